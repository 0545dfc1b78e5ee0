"""Laws of the names of checkpoints."""

import os
import zipfile
from pathlib import Path

import pytest

from packhorse.errors import CheckpointCorruptError, SettingsError
from packhorse.training.locate import resolve_checkpoint


def make(path: Path, age: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as content:  # as far as this module looks, a checkpoint
        content.writestr("data.pkl", b"weights")
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


@pytest.fixture
def runs(tmp_path) -> Path:
    make(tmp_path / "runs/a/version_0/checkpoints/step=00000900.ckpt", age=30)
    make(tmp_path / "runs/a/version_1/checkpoints/step=00000100.ckpt", age=20)
    newest = make(tmp_path / "runs/a/version_1/checkpoints/step=00000200.ckpt", age=10)
    newest.with_name("last.ckpt").symlink_to(newest.name)
    make(tmp_path / "runs/b/checkpoints/step=00000300.ckpt", age=0)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["latest", "last"])
def test_latest_is_the_newest_of_all_runs(runs, name):
    assert resolve_checkpoint(name, runs) == runs / "b/checkpoints/step=00000300.ckpt"


@pytest.mark.parametrize("name", ["a", "a/version_1", "a/latest", "a/last", "a/version_1/checkpoints/last"])
def test_a_folder_is_the_newest_checkpoint_in_it_whatever_its_step(runs, name):
    found = resolve_checkpoint(str(runs / name), Path("elsewhere"))
    assert found == runs / "a/version_1/checkpoints/step=00000200.ckpt", "and not the link to it"
    assert resolve_checkpoint(str(runs / "a/version_0"), runs).name == "step=00000900.ckpt"


def test_a_file_is_itself_and_so_is_a_folder_of_shards(runs):
    for name in ("a/version_0/checkpoints/step=00000900.ckpt", "a/version_1/checkpoints/last.ckpt"):
        assert resolve_checkpoint(str(runs / name), runs) == runs / name
    shard = make(runs / "c/checkpoints/step=00000001.ckpt/shard.ckpt", age=-10)
    (shard.parent / ".metadata").write_bytes(b"the index of the shards, written last")
    assert resolve_checkpoint(str(shard.parent), runs) == shard.parent
    assert resolve_checkpoint(str(runs / "c"), runs) == shard.parent
    assert resolve_checkpoint("latest", runs) != shard, "part of a checkpoint is none"


def test_a_transformers_folder_is_itself_and_a_configuration_alone_is_none(tmp_path, runs):
    make(tmp_path / "model/config.json", age=0)
    with pytest.raises(SettingsError, match="with weights"):
        resolve_checkpoint(str(tmp_path / "model"), runs)
    make(tmp_path / "model/model.safetensors", age=0)
    assert resolve_checkpoint(str(tmp_path / "model"), runs) == tmp_path / "model"


def test_what_does_not_exist_is_refused_with_what_could_be_meant(tmp_path, runs):
    with pytest.raises(SettingsError, match="does not exist"):
        resolve_checkpoint(str(runs / "d"), runs)
    with pytest.raises(SettingsError, match="holds no"):
        resolve_checkpoint("latest", tmp_path / "empty")


def test_a_damaged_checkpoint_is_skipped_in_words(runs, capsys):
    damaged = runs / "b/checkpoints/step=00000300.ckpt"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    assert resolve_checkpoint("last", runs) == runs / "a/version_1/checkpoints/step=00000200.ckpt"
    assert f"Skipped {damaged}" in capsys.readouterr().err
    with pytest.raises(CheckpointCorruptError, match="All 1 checkpoints"):
        resolve_checkpoint(str(runs / "b"), runs)
