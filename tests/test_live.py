"""Laws of training while the cache is being built: the same run, only that the data come later."""

import fcntl
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from packhorse.cache import open_cache, planner, update_cache
from packhorse.cache.background import BackgroundBuilder, Lease, take_up
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection
from packhorse.errors import CacheError, SettingsError
from packhorse.training.live import set_epoch_length
from packhorse.training.progress_bar import RunProgressBar
from resuming import Watch, assert_once_per_epoch, chain, hash_of, read_trace
from test_training import datamodule, module, trainer, write_corpus
from test_validation import Validated


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    path = write_corpus(folder / "hills.jsonl", 100)
    datamodule(folder, path, max_documents=5, cache_dir=str(folder / "small")).prepare_data()  # trains the tokenizer
    return path


def data_of(corpus, folder, **settings):
    values = {"cache_dir": str(folder / "cache"), "sequences_per_chunk": 10, "start_after_chunks": 2}
    values = {**values, "packing": "concat", **settings}
    return datamodule(corpus.parent, corpus, **values)


def numbers_of(cache) -> dict[str, int]:
    rows = cache.read(range(cache.num_sequences("train"))).tokens.astype("int64")
    return {hash_of(row): number for number, row in enumerate(rows)}


def all_sizes(cache) -> set[int]:
    return {
        0,
        *(cache.snapshot._index.totals(chunks + 1).train_sequences for chunks in range(cache.snapshot.num_chunks)),
    }


def test_a_run_that_begins_before_the_cache_is_built_trains_on_all_of_it(corpus, tmp_path, capfd):
    data = data_of(corpus, tmp_path)
    training, model = trainer(tmp_path, max_epochs=2, callbacks=[Watch(tmp_path / "trace")]), module()
    training.fit(model, datamodule=data)
    whole = open_cache(data.settings.cache)
    sequences, steps = whole.num_sequences("train"), read_trace(tmp_path / "trace")
    assert data.run.state.caches[0].history[0][1] < sequences, "the test needs chunks that come later"
    assert training.global_step == len(steps) == sequences * 2 // 4 == model.schedule.total
    assert_once_per_epoch(chain((steps, 0, len(steps))), numbers_of(whole), all_sizes(whole))
    assert "dataset expanded" in capfd.readouterr().err
    assert whole.snapshot.num_chunks == data.run.state.caches[0].num_chunks


class Longer(Callback):
    """Tells Lightning of a longer epoch while it goes on, and keeps what the bar shows at its end."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        """In the second batch."""
        if batch_idx == 1:
            set_epoch_length(trainer, 6)

    def on_train_epoch_end(self, trainer, module) -> None:
        """Before the bar is gone."""
        self.bar = getattr(trainer.progress_bar_callback, "train_progress_bar", None)


def test_the_bar_of_an_epoch_that_grows_goes_to_its_new_end(tmp_path):
    longer = Longer()
    training = longer_run(tmp_path, RunProgressBar(), longer, limit_val_batches=0)
    assert training.global_step == 6
    assert (longer.bar.completed, longer.bar.total) == (6, 6)


def test_an_epoch_that_grows_is_validated_at_shares_of_what_it_is_now(tmp_path):
    validated = Validated()
    longer_run(tmp_path, Longer(), validated, limit_val_batches=1, val_check_interval=0.5, enable_progress_bar=False)
    assert validated.steps == [3, 6]


def longer_run(folder: Path, *callbacks: Callback, **settings) -> Trainer:
    """A run of an epoch of four batches, which becomes one of six."""
    quiet = {"enable_checkpointing": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 0}
    limits = {"max_epochs": 1, "limit_train_batches": 4, "accelerator": "cpu", "default_root_dir": folder}
    training = Trainer(callbacks=list(callbacks), **quiet, **limits, **settings)
    training.fit(BoringModel())
    return training


class SlowBuilder:
    """Builds in this process, a part whenever it was asked often enough."""

    def __init__(self, settings):
        self.settings, self.asked = settings[0], 0

    @property
    def status(self):
        self.asked += 1
        if self.asked == 8:
            build_selection(self.settings, Selection(end_chunk=4), quiet=True)
        if self.asked == 16:
            update_cache(self.settings, quiet=True)
        return None if self.asked < 20 else 0

    def stop(self):
        pass


def test_a_run_waits_before_its_last_step_for_what_is_still_to_come(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("packhorse.training.datamodule.BackgroundBuilder", SlowBuilder)
    data, training = data_of(corpus, tmp_path), trainer(tmp_path, callbacks=[Watch(tmp_path / "trace")])
    training.fit(module(), datamodule=data)
    whole = open_cache(data.settings.cache)
    assert training.global_step == whole.num_sequences("train") // 4
    assert len(data.run.state.caches[0].history) == 3, "taken up twice"


@pytest.mark.parametrize(
    "settings",
    [
        {"start_after_chunks": 1},
        {"start_after_chunks": 2, "deduplicate": "exact"},
        {"start_after_chunks": None, "use_cached_tokens": False},
    ],
)
def test_a_run_waits_for_the_first_text_that_its_filters_leave(settings, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a run that fails leaves its temporary cache
    monkeypatch.setattr(planner, "SEARCHED_CHUNKS", 2)  # all that is planned is built, and there is more to plan
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    rows = [{"text": text, "lang": "de" if number < 60 else "en"} for number, text in enumerate(texts)]
    (tmp_path / "sorted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": str(tmp_path / "sorted.jsonl"), "tokenizer": str(corpus.parent / "tokenizer"), **settings}
    data = data_of(corpus, tmp_path, filters=["lang == 'en'"], **settings)
    training = trainer(tmp_path)
    training.fit(module(), datamodule=data)
    assert training.global_step == data.plan.sequences // 4 > 1
    data = data_of(corpus, tmp_path, filters=["lang == 'en'"], micro_batch_size=10_000, **settings)
    with pytest.raises(SettingsError, match="fewer than one global batch"):
        trainer(tmp_path).fit(module(), datamodule=data)


def test_a_run_on_the_fly_goes_on_after_a_stop_and_leaves_nothing_behind(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"use_cached_tokens": False, "start_after_chunks": None}
    data = data_of(corpus, tmp_path, **settings)
    training, model = trainer(tmp_path, callbacks=[Watch(tmp_path / "first")]), module()

    def stop(*_):
        if training.global_step == 15:
            training.save_checkpoint(tmp_path / "saved.ckpt")
            raise RuntimeError("stopped by the test")

    model.on_train_batch_end = stop
    with pytest.raises(RuntimeError, match="stopped by the test"):
        training.fit(model, datamodule=data)
    root = data.settings.temporary_root
    assert root.exists()
    assert not (tmp_path / "cache").exists()
    data = data_of(corpus, tmp_path, **settings)
    training = trainer(tmp_path, callbacks=[Watch(tmp_path / "second")])
    training.fit(module(), datamodule=data, ckpt_path=str(tmp_path / "saved.ckpt"))
    first, second = read_trace(tmp_path / "first"), read_trace(tmp_path / "second")
    sequences = chain((first, 0, 15), (second, 15, training.global_step))
    assert len(sequences) == len(set(sequences)), "one epoch"
    assert training.global_step == data.plan.sequences // 4
    assert not root.exists()


def test_a_builder_ends_with_the_process_that_started_it(corpus, tmp_path):
    settings = [data_of(corpus, tmp_path).settings.cache]
    (tmp_path / "settings").write_bytes(pickle.dumps(settings))
    code = (
        "import os, pickle, sys; from packhorse.cache.background import BackgroundBuilder\n"
        f"builder = BackgroundBuilder(pickle.load(open({str(tmp_path / 'settings')!r}, 'rb')))\n"
        "print(builder._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    builder, deadline = int(done.stdout), time.monotonic() + 30
    while Path(f"/proc/{builder}").exists() and "Z" not in Path(f"/proc/{builder}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_builder_ends_after_its_workers(corpus, tmp_path):
    builder = BackgroundBuilder([data_of(corpus, tmp_path, workers=2).settings.cache])
    process, workers = psutil.Process(builder._process.pid), []
    while not workers:
        assert builder.status is None
        workers = process.children()
        time.sleep(0.005)
    builder.stop()
    assert not any(worker.is_running() for worker in workers)


def test_a_builder_that_fails_ends_the_training_with_its_words(corpus, tmp_path):
    data = data_of(corpus, tmp_path)
    data.prepare_data()
    bad = data_of(tmp_path / "missing.jsonl", tmp_path, tokenizer=data.settings.tokenizer).settings.cache
    builder = BackgroundBuilder([bad])
    while builder.status is None:
        time.sleep(0.05)
    assert builder.status == 2
    assert isinstance(builder.error(), CacheError)
    assert "missing.jsonl" in str(builder.error())
    builder.stop()


def test_a_source_of_this_process_cannot_be_built_by_another(corpus, tmp_path):
    data = data_of(corpus, tmp_path)
    settings = data_of(corpus, tmp_path, source=(text for text in ["a", "b"])).settings.cache
    with pytest.raises(SettingsError, match="leave `start_after_chunks` out"):
        BackgroundBuilder([settings])
    assert data.settings.chunks_first == 2


def test_a_path_is_a_source_that_another_process_can_build(corpus, tmp_path):
    data = data_of(corpus, tmp_path, source=Path(corpus), cache_dir=tmp_path / "cache")
    builder = BackgroundBuilder([data.settings.cache])
    while builder.status is None:
        time.sleep(0.05)
    assert builder.status == 0, builder.error()
    assert open_cache(data.settings.cache).num_sequences()


def test_only_chunks_without_a_gap_are_taken_up(corpus, tmp_path):
    data = data_of(corpus, tmp_path, start_after_chunks=None)
    data.prepare_data()
    folder = open_cache(data.settings.cache).folder
    for path in (folder / "index").iterdir():
        path.unlink()
    records = sorted((folder / "records").rglob("*.json"))
    records[3].rename(tmp_path / "later")
    assert take_up(folder) == 3
    (tmp_path / "later").rename(records[3])
    assert take_up(folder) == len(records)


def test_a_run_that_ends_leaves_the_temporary_cache_that_another_is_just_building(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = data_of(corpus, tmp_path, use_cached_tokens=False, start_after_chunks=None)
    other = Lease(data.settings.temporary_root)

    def build_while_the_other_ends(*arguments):
        built = build_selection(*arguments)
        other.release(remove=True)
        return built

    monkeypatch.setattr("packhorse.training.live.build_selection", build_while_the_other_ends)
    training = trainer(tmp_path, max_steps=2)
    training.fit(module(), datamodule=data)
    assert training.global_step == 2
    assert not data.settings.temporary_root.exists()


def test_a_lease_is_of_the_folder_that_is_there(tmp_path, monkeypatch):
    folder, flock = tmp_path / "shared", fcntl.flock
    ending = [Lease(folder)]

    def flock_late(*arguments):
        if ending:
            ending.pop().release(remove=True)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    lease = Lease(folder)
    Lease(folder).release(remove=True)
    assert folder.exists()
    lease.release(remove=True)
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_goes_with_its_last_user(tmp_path):
    one, other = Lease(tmp_path / "shared"), Lease(tmp_path / "shared")
    one.release(remove=True)
    assert (tmp_path / "shared").exists()
    other.release(remove=True)
    assert not (tmp_path / "shared").exists()
