"""There is always a good checkpoint, and a damaged one is refused in words."""

import errno
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import lightning
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringModel

from packhorse.errors import CheckpointCorruptError, CheckpointError, StorageFullError
from packhorse.training import BestCheckpoint, RecoveryCheckpoint, checkpoint_file
from packhorse.training.checkpoint_file import check_checkpoint, is_link, is_sound, link_checkpoint, sound_checkpoints
from packhorse.training.checkpoint_io import CrashSafeCheckpointIO
from packhorse.training.locate import resolve_checkpoint


def state(step: int) -> dict:
    return {"global_step": step, "state_dict": {"weight": torch.full((5_000,), float(step))}}


def loads(path: Path) -> int | None:
    """The step of a checkpoint that is whole, None otherwise."""
    try:
        value = torch.load(path, weights_only=True)
    except Exception:
        return None
    assert torch.equal(value["state_dict"]["weight"], state(value["global_step"])["state_dict"]["weight"])
    return value["global_step"]


def dies_at(operation: int, work) -> bool:
    """Run `work` in a child that is killed at its n-th operation on the disk; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            left = [operation]

            def deadly(function):
                def call(*args, **kwargs):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **kwargs)

                return call

            for name in ("fsync", "replace", "rename", "link", "symlink", "unlink", "remove", "mkdir", "sendfile"):
                setattr(os, name, deadly(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def rename_as_if_the_temporary_folder_were_another_disk(source, target, rename=os.rename):
    if Path(source).parent != Path(target).parent:
        raise OSError(18, "Invalid cross-device link")
    rename(source, target)


def worst_that_is_left(folder: Path, checkpoint_io) -> set[int | None]:
    """What `last.ckpt` holds after a save over step 1 was killed at each of its operations."""
    found: set[int | None] = set()
    for operation in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint_io.save_checkpoint(state(1), folder / "last.ckpt")
        killed = dies_at(operation, lambda: checkpoint_io.save_checkpoint(state(2), folder / "last.ckpt"))
        found.add(loads(folder / "last.ckpt"))
        if not killed:
            return found
    raise AssertionError("it never ends")


def test_lightnings_own_way_leaves_the_only_checkpoint_empty_and_ours_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", rename_as_if_the_temporary_folder_were_another_disk)
    assert None in worst_that_is_left(tmp_path / "theirs", TorchCheckpointIO()), "the test must see the damage"
    assert worst_that_is_left(tmp_path / "ours", CrashSafeCheckpointIO()) == {1, 2}


def test_a_checkpoint_is_never_written_in_place(tmp_path):
    io, path = CrashSafeCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint(state(1), path)
    seen: set[int | None] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(loads(path))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 30):
        io.save_checkpoint(state(step), path)
    done.set()
    reader.join()
    assert None not in seen


def test_what_was_written_is_read_back_before_it_replaces_anything(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    CrashSafeCheckpointIO().save_checkpoint(state(1), path)
    fsync = os.fsync

    def lose_the_tail(descriptor):
        fsync(descriptor)
        os.truncate(f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size - 100)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file.os, "fsync", lose_the_tail)
        with pytest.raises(CheckpointCorruptError):
            CrashSafeCheckpointIO().save_checkpoint(state(2), path)
    assert loads(path) == 1
    assert list(tmp_path.iterdir()) == [path], "the temporary file is gone"


def test_a_full_disk_is_told_and_costs_nothing(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    CrashSafeCheckpointIO().save_checkpoint(state(1), path)
    open_file = Path.open

    class Full:
        def __init__(self, file) -> None:
            self.file, self.written = file, 0

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.written += len(data)
            if self.written > 5_000:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

    monkeypatch.setattr(
        Path, "open", lambda path, mode="r": Full(open_file(path, mode)) if "x" in mode else open_file(path, mode)
    )
    with pytest.raises(StorageFullError, match=r"last\.ckpt.*No space left"):
        CrashSafeCheckpointIO().save_checkpoint(state(2), path)
    assert loads(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_flipped_bit_or_a_missing_tail_is_found_anywhere(fast_folder):
    path = fast_folder / "a.ckpt"
    CrashSafeCheckpointIO().save_checkpoint({"x": torch.arange(20), "name": "hay"}, path)
    data = path.read_bytes()
    draw = random.Random(0)
    for place in range(0, len(data), 2):
        damaged = bytearray(data)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        if is_sound(path):  # only a flip in the 16 bytes that say that a hash follows; then the zip's CRCs were right
            assert len(data) - 32 <= place < len(data) - 16
            value = torch.load(path, weights_only=True)
            assert value["name"] == "hay"
            assert torch.equal(value["x"], torch.arange(20))
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        assert not is_sound(path) or loads_the_same(path, size, len(data))


def loads_the_same(path: Path, size: int, whole: int) -> bool:
    # Without a part of the last 32 bytes it is the zip that torch wrote.
    return size >= whole - 32 and torch.equal(torch.load(path, weights_only=True)["x"], torch.arange(20))


def test_a_damaged_checkpoint_is_refused_with_the_newest_good_one_beside_it(tmp_path):
    io = CrashSafeCheckpointIO()
    for step in (1, 2, 3):
        io.save_checkpoint(state(step), tmp_path / f"step={step}.ckpt")
        os.utime(tmp_path / f"step={step}.ckpt", (step, step))
    (tmp_path / "step=3.ckpt").write_bytes((tmp_path / "step=3.ckpt").read_bytes()[:-500])
    with pytest.raises(CheckpointCorruptError, match=r"(?s)step=3.ckpt.*damaged.*newest good one.*step=2.ckpt"):
        io.load_checkpoint(tmp_path / "step=3.ckpt")
    assert [path.stem for path in sound_checkpoints(tmp_path)] == ["step=2", "step=1"]


@pytest.mark.parametrize("content", [b"", b"PK", b"not a checkpoint" * 100], ids=["empty", "two bytes", "text"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="no other good checkpoint"):
        CrashSafeCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    torch.save({"state_dict": Hostile()}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="run code"):
        CrashSafeCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_others_are_checked_by_their_own_sums(tmp_path):
    TorchCheckpointIO().save_checkpoint(state(4), tmp_path / "x.ckpt")
    assert CrashSafeCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")["global_step"] == 4
    data = bytearray((tmp_path / "x.ckpt").read_bytes())
    data[len(data) // 2] ^= 1  # in the weights, where torch itself looks at no sum
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(CheckpointCorruptError):
        check_checkpoint(tmp_path / "x.ckpt")


@pytest.fixture(params=[(), ("symlink",), ("symlink", "link")], ids=["symbolic", "hard", "copy"])
def links(request, monkeypatch):
    """What the disk knows of links, as vfat and some disks of a network know none."""

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for name in request.param:
        monkeypatch.setattr(os, name, refuse)


def test_a_link_leads_somewhere_at_every_instant(links, tmp_path):
    for step in (1, 2):
        CrashSafeCheckpointIO().save_checkpoint(state(step), tmp_path / f"{step}.ckpt")
    for operation in range(10):
        link_checkpoint(tmp_path / "1.ckpt", tmp_path / "last.ckpt")
        killed = dies_at(operation, lambda: link_checkpoint(tmp_path / "2.ckpt", tmp_path / "last.ckpt"))
        assert loads(tmp_path / "last.ckpt") in (1, 2)
    assert not killed
    assert loads(tmp_path / "last.ckpt") == 2


class Boring(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 1 / (1 + self.global_step))


def run_of(folder: Path, steps: int, *callbacks, ckpt_path: Path | None = None, **settings) -> lightning.Trainer:
    run = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **settings,
    )
    run.fit(Boring(), ckpt_path=ckpt_path)
    return run


def test_a_run_that_has_saved_once_has_a_good_last_checkpoint_at_every_operation_on_the_disk(
    links, tmp_path, monkeypatch
):
    last, seen = tmp_path / "last.ckpt", []

    def watched(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            if seen or last.exists():
                seen.append(is_sound(last))
            return result

        return call

    for name in ("fsync", "replace", "rename", "symlink", "unlink", "remove"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    recovery = RecoveryCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_last="link")
    run_of(tmp_path, 7, recovery, limit_val_batches=0)
    assert len(seen) > 10
    assert all(seen)
    assert torch.load(last, weights_only=True)["global_step"] == 7
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=7.ckpt"}, "older ones are removed"
    assert resolve_checkpoint("last", tmp_path) == tmp_path / "step=7.ckpt"


def test_a_link_leads_to_a_folder_of_shards(links, tmp_path):
    for step in (1, 2):
        (tmp_path / f"{step}.ckpt").mkdir()
        (tmp_path / f"{step}.ckpt" / "shard").write_text(str(step))
        link_checkpoint(tmp_path / f"{step}.ckpt", tmp_path / "last.ckpt")
        assert (tmp_path / "last.ckpt" / "shard").read_text() == str(step)
        assert is_link(tmp_path / "last.ckpt")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_that_was_killed_before_its_link_was_moved_goes_on_under_the_same_name(links, tmp_path):
    def recovery():
        return RecoveryCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_last="link")

    run_of(tmp_path, 2, recovery(), limit_val_batches=0)
    # As if killed in step 4, when the file was there and the link still led to step 2.
    shutil.copy(tmp_path / "step=2.ckpt", tmp_path / "kept")
    run = run_of(tmp_path, 4, recovery(), limit_val_batches=0, ckpt_path=tmp_path / "step=2.ckpt")
    (tmp_path / "kept").rename(tmp_path / "step=2.ckpt")
    link_checkpoint(tmp_path / "step=2.ckpt", tmp_path / "last.ckpt")
    value = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    (own,) = value["callbacks"].values()
    own.update(last_model_path="", files=[str(tmp_path / "step=2.ckpt"), str(tmp_path / "step=4.ckpt"), "/etc/x.ckpt"])
    run.strategy.checkpoint_io.save_checkpoint(value, tmp_path / "step=4.ckpt")
    run_of(tmp_path, 6, recovery(), limit_val_batches=0, ckpt_path=tmp_path / "step=4.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=6.ckpt"}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6


def test_a_run_removes_what_killed_writers_left_and_nothing_of_living_ones(tmp_path):
    path = tmp_path / "a.ckpt"
    CrashSafeCheckpointIO().save_checkpoint(state(1), path)
    for operation in range(3):
        dies_at(operation, lambda: CrashSafeCheckpointIO().save_checkpoint(state(2), path))
    left = list(tmp_path.glob(".tmp-*"))
    assert left
    living = left[0].with_name(left[0].name.replace(left[0].name.split("-")[-2], str(os.getpid())))
    living.write_bytes(b"being written")
    elsewhere = tmp_path / ".tmp-checkpoint-another-machine-999999999-00"
    elsewhere.write_bytes(b"being written there")
    run_of(tmp_path, 1, RecoveryCheckpoint(dirpath=tmp_path, filename="{step}"), limit_val_batches=0)
    assert {item.name for item in tmp_path.iterdir()} == {"a.ckpt", "step=1.ckpt", living.name, elsewhere.name}


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    class Worse(Boring):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", abs(self.global_step - 4))

    run = lightning.Trainer(
        accelerator="cpu",
        max_steps=8,
        val_check_interval=2,
        limit_val_batches=1,
        callbacks=[RecoveryCheckpoint(dirpath=tmp_path, filename="{step}"), BestCheckpoint(dirpath=tmp_path)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    run.fit(Worse())
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 4
    assert torch.load(tmp_path / "step=8.ckpt", weights_only=True)["global_step"] == 8


def test_a_trainers_own_way_of_writing_checkpoints_is_left_alone(tmp_path):
    class Own(TorchCheckpointIO):
        pass

    assert type(run_of(tmp_path, 1, RecoveryCheckpoint(), plugins=[Own()]).strategy.checkpoint_io) is Own
    assert type(run_of(tmp_path, 1, RecoveryCheckpoint()).strategy.checkpoint_io) is CrashSafeCheckpointIO
