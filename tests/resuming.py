"""Runs that are stopped and go on: what the tests of resume, fast and exhaustive, share."""

import hashlib
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from packhorse.cache import Cache
from packhorse.models import InfiniAttentionConfig
from packhorse.training import ScheduleSettings
from packhorse.training.module import AdamW
from test_training import datamodule, module, trainer, write_corpus

SIZES = (40, 75, 120)
"""Documents of the corpus: at first, grown, and grown twice."""
EPOCHS, MICRO_BATCH, ACCUMULATION = 3, 2, 2
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "in_an_accumulation",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_exception",
)
STOPS = ("exception", "SIGTERM", "SIGKILL")


def make_caches(folder: Path) -> list[Path]:
    """The same cache in three sizes, each the beginning of the next."""
    corpus, caches = write_corpus(folder / "hills.jsonl", SIZES[-1]), []
    for number, documents in enumerate(SIZES):
        data = datamodule(folder, corpus, max_documents=documents, sequences_per_chunk=20)
        data.prepare_data()
        caches.append(folder / f"grown-{number}")
        shutil.copytree(folder / "cache", caches[-1])
    return caches


class Home:
    """A folder for one run, in which the cache can be of any size."""

    def __init__(self, caches: list[Path], folder: Path) -> None:
        self.caches, self.folder = caches, folder

    def data(self, size: int, **settings):
        """A DataModule, after the cache has got a size."""
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        shutil.copytree(self.caches[size], self.folder / "cache")
        origin = self.caches[0].parent
        values = {"max_documents": SIZES[size], "sequences_per_chunk": 20, "micro_batch_size": MICRO_BATCH, **settings}
        return datamodule(origin, origin / "hills.jsonl", **{**values, "cache_dir": str(self.folder / "cache")})

    def stored(self, size: int) -> dict[str, int]:
        """Which sequence has which hash."""
        cache = Cache(next(self.caches[size].iterdir()))
        numbers = np.arange(cache.num_sequences("train"))
        hashes = {hash_of(row): number for number, row in enumerate(cache.read(numbers).tokens.astype(np.int64))}
        assert len(hashes) == len(numbers), "the test needs sequences that differ"
        return hashes


def hash_of(row) -> str:
    """Stands for a sequence."""
    return hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()[:16]


class Watch(Callback):
    """Writes what each micro-batch was, and checks that Lightning counts as the plan does."""

    def __init__(self, trace: Path) -> None:
        self.trace, self.checks = trace, True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        step, accumulation = trainer.global_step, trainer.accumulate_grad_batches
        epoch, first, end = trainer.datamodule.plan.epoch_at(step)
        assert trainer.current_epoch == epoch
        assert batch_idx // accumulation == step - first
        assert trainer.num_training_batches == (end - first) * accumulation
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        assert abs(rate - 1e-2 * pl_module.schedule.factor(step)) < 1e-12
        hashes = " ".join(hash_of(row) for row in batch["input_ids"].numpy())
        with self.trace.open("a") as file:
            file.write(f"{step} {rate!r} {hashes}\n")


class SaveAndStop(Callback):
    """Saves a checkpoint in one hook, at or after a step, and stops the run before the next batch but one."""

    def __init__(self, hook: str, step: int, path: Path, stop: str) -> None:
        self.hook, self.step, self.path, self.stop = hook, step, path, stop
        self.batches_left: int | None = None
        name = "on_train_batch_end" if hook == "in_an_accumulation" else hook
        if hook != "on_exception":
            setattr(self, name, self._save)

    def _save(self, trainer, *_) -> None:
        if trainer.sanity_checking or self.batches_left is not None or trainer.global_step < self.step:
            return
        is_inside = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches != 0
        if self.hook in ("in_an_accumulation", "on_train_batch_end") and is_inside != (
            self.hook == "in_an_accumulation"
        ):
            return
        trainer.save_checkpoint(self.path)
        self.batches_left = 1

    def on_train_batch_start(self, trainer, *_):
        if self.hook == "on_exception" and trainer.global_step >= self.step:
            self.batches_left = 0
        if self.batches_left == 0:
            if self.hook == "on_exception" and self.stop == "SIGKILL":
                trainer.save_checkpoint(self.path)  # nobody is left to do it later
            stop_now(self.stop)
        if self.batches_left is not None:
            self.batches_left -= 1

    def on_exception(self, trainer, pl_module, exception):
        if self.hook == "on_exception":
            trainer.save_checkpoint(self.path)


def stop_now(how: str) -> None:
    """End a run without notice, or nearly so."""
    if how == "exception":
        raise RuntimeError("stopped by the test")
    os.kill(os.getpid(), getattr(signal, how))


def run(
    home: Home,
    size: int,
    *callbacks,
    micro_batch=MICRO_BATCH,
    accumulation=ACCUMULATION,
    learning_rate=1e-2,
    start=None,
    **settings,
):
    """Train, from a checkpoint if one is given; the Trainer, and the module."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "attention_dropout": 0.1}
    model = module(
        config={**sizes, "num_attention_heads": 2, "num_key_value_heads": 1},
        infini_attention=InfiniAttentionConfig(segment_length=16),
        schedule=settings.pop("schedule", ScheduleSettings(warmup_steps=4)),
        optimizer=lambda parameters: AdamW(parameters, lr=learning_rate),
    )
    limits = {"max_epochs": EPOCHS, "limit_val_batches": 1, "val_check_interval": 0.5, **settings.pop("limits", {})}
    training = trainer(home.folder, accumulate_grad_batches=accumulation, callbacks=list(callbacks), **limits)
    data = home.data(size, micro_batch_size=micro_batch, **settings)
    training.fit(model, datamodule=data, ckpt_path=start)
    return training, model


def order_of(home: Home, size: int, start: Path, world_size: int, micro_batch: int, accumulation: int):
    """What several ranks would draw from a checkpoint to the end of the run: {step: hashes}, and the plan."""
    saved, taken, step = torch.load(start, weights_only=True), {}, None
    plan = None
    while plan is None or step < plan.steps:
        for rank in range(world_size):
            data = home.data(size, micro_batch_size=micro_batch)
            data.trainer = fake_trainer(rank, world_size, accumulation, saved["global_step"] if step is None else step)
            data.prepare_data()
            data.setup("fit")
            data.load_state_dict(saved["TokenDataModule"])
            plan, begin = data.plan, data.trainer.global_step
            data._must_align = False
            if begin >= plan.steps:
                return {}, plan
            for index, batch in enumerate(data.train_dataloader()):
                hashes = [hash_of(row) for row in batch["input_ids"].numpy()]
                taken[begin + index // accumulation, index % accumulation, rank] = hashes
        step = max(key[0] for key in taken) + 1
    steps: dict[int, list[str]] = {}
    for key in sorted(taken):
        steps.setdefault(key[0], []).extend(taken[key])
    return steps, plan


def fake_trainer(rank: int, world_size: int, accumulation: int, step: int) -> SimpleNamespace:
    """As much of a Trainer as the order of data asks for."""
    connector = SimpleNamespace(use_distributed_sampler=False)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(max_steps=-1))
    return SimpleNamespace(
        world_size=world_size,
        global_rank=rank,
        global_step=step,
        accumulate_grad_batches=accumulation,
        limit_train_batches=1.0,
        overfit_batches=0,
        callbacks=[],
        max_epochs=EPOCHS,
        max_steps=-1,
        fit_loop=loop,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        lightning_module=None,
        _accelerator_connector=connector,
    )


def read_trace(path: Path) -> dict[int, list[str]]:
    """Step -> the hashes of all its sequences, of a run whose last step may be cut short."""
    steps: dict[int, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        step, _, *hashes = line.split()
        steps.setdefault(int(step), []).extend(hashes)
    return steps


def rates(path: Path) -> dict[int, float]:
    """Step -> learning rate."""
    return {int(line.split()[0]): float(line.split()[1]) for line in path.read_text().splitlines()}


def chain(*parts: tuple[dict[int, list[str]], int, int]) -> list[str]:
    """The sequences of the steps from .. to of each part, one after the other."""
    return [sequence for steps, first, end in parts for step in range(first, end) for sequence in steps[step]]


def assert_once_per_epoch(sequences: list[str], numbers: dict[str, int], sizes: set[int]) -> None:
    """A sequence comes again only when all of the data set, in one of its sizes, were there since the last time."""
    seen: set[int] = set()
    for sequence in sequences:
        number = numbers[sequence]
        if number in seen:
            assert len(seen) in sizes, "something came twice before all had come once"
            assert seen == set(range(len(seen))), "something was lost"
            seen = set()
        seen.add(number)


def forked(function, *arguments) -> int:
    """The exit status, or minus the signal, of a process that begins as a copy of this one."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
