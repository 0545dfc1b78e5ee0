"""Caches -> batches: the DataModule owns the token caches.

`prepare_data` brings them up to date (one process, safe to kill and to repeat), `setup` opens them (milliseconds, the
same on all ranks), the loaders read them. What a step trains on depends on the seed and on how many sequences were
trained on before, not on ranks, workers, micro batch or accumulation; a checkpoint keeps that as a few integers.
"""

import time
from typing import Any

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from packhorse.cache import Cache, DataSettings, update_cache
from packhorse.cache.progress import say
from packhorse.cache.tokenizers import resolve_tokenizer
from packhorse.errors import CacheIncompleteError, SettingsError, SnapshotMismatch, TokenizerError
from packhorse.training.batches import derive
from packhorse.training.caches import count_chunks, open_caches, pin_caches, snapshots_of, stage_starts
from packhorse.training.mixture import RunOrder
from packhorse.training.plan import RunPlan
from packhorse.training.ranks import keep_failure, share_failure
from packhorse.training.resume import Change, align_loops, continue_run
from packhorse.training.sampler import Rows, TrainSampler
from packhorse.training.state import RunState, begin_run, check_snapshot

MIN_UTILISATION = 0.9
"""Below this share of real tokens nobody trains without being told."""


class TokenDataModule(LightningDataModule):
    """Feeds sequences of a token cache to training, validation and test.

    Args:
        kwargs: The fields of `DataSettings`.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.settings = DataSettings(**kwargs)
        self.caches: dict[str, Cache] = {}
        """The open caches by name; usually one."""
        self.run: RunState | None = None
        """What of the data the current run has used."""
        self.change: Change | None = None
        """What is different since the checkpoint that the run goes on from."""
        self.opening_seconds = 0.0
        """Time from the beginning of `prepare_data` to the open cache."""
        self.was_built = False
        """Whether `prepare_data` had to build something."""
        self._started: float | None = None
        self._known: RunState | None = None
        self._plan: RunPlan | None = None
        self._max_steps: int | None = None
        self._must_align = False

    @property
    def cache(self) -> Cache | None:
        """The open cache; of several, the first."""
        return next(iter(self.caches.values()), None)

    @keep_failure
    def prepare_data(self) -> None:
        """Bring the caches up to date with their sources."""
        self._started = time.monotonic()
        self._check_vocabulary()
        before = count_chunks(self.settings)
        caches = [update_cache(settings) for settings in self.settings.caches.values()]
        self.was_built = before != sum(cache.snapshot.num_chunks for cache in caches)
        if self.was_built:
            say("\n".join(line for cache in caches for line in cache.summary.lines()))

    @share_failure
    def setup(self, stage: str) -> None:
        """Open the caches. Opening a second time for another stage keeps what is open."""
        if not self.caches or (stage == "fit" and self.run is not None):
            start = self._started or time.monotonic()
            self.caches = open_caches(self.settings)
            self.opening_seconds = time.monotonic() - start
        if stage == "fit" and self.trainer is not None:
            self._check_trainer()
            # An epoch has one step more or less than the last: its loader is made anew.
            self.trainer.reload_dataloaders_every_n_epochs = 1
            self.run, self.change, self._known, self._must_align = self._begin(), None, None, False
            self._follow()
            self._check_plan(self.plan)
            self._check_utilisation()

    def state_dict(self) -> dict[str, Any]:
        """What of the data the run has used, by its completed optimizer steps."""
        if self.run is None or self._trainer.state.fn != TrainerFn.FITTING:
            return {}
        return self.run.to_dict(self._trainer.global_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; where nothing is trained, only take the validation set from it.

        Raises:
            SnapshotMismatch: The run was trained on another cache, or on more of this one.
            CheckpointError: The state makes no sense.
        """
        self._known = RunState.from_dict(state_dict)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._resume(self._known, int(state_dict["step"]))

    @property
    def seed(self) -> int:
        """Of what is random in the run."""
        return self.settings.seed if self.run is None else self.run.seed

    @property
    def vocab_size(self) -> int:
        """Ids are below this; the model's vocabulary follows it."""
        return self._opened.vocab_size

    @property
    def plan(self) -> RunPlan:
        """How long the run of the current Trainer is."""
        if self._plan is None:
            raise ValueError("There is no run yet: call `trainer.fit(module, datamodule=datamodule)`.")
        return self._plan

    @property
    def order(self) -> RunOrder:
        """The global order of the run."""
        return self.plan.state.order

    def train_dataloader(self) -> DataLoader:
        """Micro-batches of the rest of Lightning's current epoch."""
        trainer = self._trainer
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise SettingsError("Set `trainer.use_distributed_sampler: false`: the order of training is our own.")
        if self._must_align:
            align_loops(trainer, self.plan)
            self._must_align = False
        step, accumulation = trainer.global_step, trainer.accumulate_grad_batches
        _, first, end = self.plan.epoch_at(step)
        sampler = TrainSampler(
            order=lambda: self.order,
            trained=self.plan.state.trained(step),
            accumulation=accumulation,
            micro_batch=self.settings.micro_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            length=max(1, end - first) * accumulation,  # Lightning warns of an empty one when a run is finished
            done=max(0, step - first) * accumulation,
        )
        return DataLoader(self.rows("train"), sampler=sampler, batch_size=None)

    def rows(self, split: str) -> Rows:
        """(Cache, sequence number) -> batches, for one side of the split."""
        numbers = {name: number for number, name in enumerate(self.caches)}
        if self.run is not None:
            numbers = {name: self.run.number(name) for name in self.caches}
        return Rows({numbers[name]: cache for name, cache in self.caches.items()}, split)

    def val_dataloader(self) -> DataLoader | list:
        """The first evaluation sequences of the first snapshot: the same however the cache grows."""
        return self._eval_loader(
            {name: min(self.settings.eval_sequences, self._first_eval_sequences(name)) for name in self.caches}
        )

    def test_dataloader(self) -> DataLoader | list:
        """All evaluation sequences."""
        return self._eval_loader({name: cache.num_sequences("eval") for name, cache in self.caches.items()})

    def predict_dataloader(self) -> DataLoader:
        """The prompts."""
        return DataLoader(list(self.settings.prompts), batch_size=None)

    def first_batch_seconds(self) -> float:
        """Time that the first batch of the run takes to read."""
        start = time.monotonic()
        self.rows("train")[self.order.sequence_numbers(0, self.settings.micro_batch_size)]
        return time.monotonic() - start

    def unigram_entropy(self, sequences: int = 2_048) -> float:
        """Nats per token that guessing by frequency alone would cost on the first training sequences.

        A model must fall well below it: it is the loss of knowing the words but nothing about their order.
        """
        cache = self._opened
        numbers = np.arange(min(sequences, cache.num_sequences("train")))
        rows = cache.read(numbers)
        labels = derive(rows.tokens, rows.piece_lengths, rows.repeated).labels
        counts = np.bincount(labels[labels >= 0])
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after the BOS of the recipe if it has one."""
        bos = self._opened.recipe.bos_id
        return [*([] if bos is None else [bos]), *self._opened.encode(text)]

    def decode(self, ids: list[int]) -> str:
        """The text of some ids."""
        return self._opened.decode(ids)

    @property
    def _opened(self) -> Cache:
        if self.cache is None:
            raise CacheIncompleteError("The cache is not open yet. Call `prepare_data()` and `setup('fit')` first.")
        return self.cache

    @property
    def _trainer(self):
        if self.trainer is None:
            raise ValueError("This needs a Trainer: call `trainer.fit(module, datamodule=datamodule)`.")
        return self.trainer

    def _begin(self) -> RunState:
        """The state of a run that starts."""
        return begin_run(
            [snapshots_of(name, cache) for name, cache in self.caches.items()],
            stage_starts(self.settings),
            seed=self.settings.seed,
            global_batch=self._global_batch,
            skips=self._skips,
        )

    def _resume(self, state: RunState, step: int) -> None:
        """Go on in a step of a run, with the caches and the Trainer as they are now."""
        there = sum(cache.num_sequences("train") for cache in self.caches.values())
        if self.settings.on_growth == "pin":
            self.caches = pin_caches(self.caches, state)
        used = sum(cache.num_sequences("train") for cache in self.caches.values())
        before = self._plan_of(state)
        self.run = continue_run(
            state,
            step,
            self.caches,
            stage_starts(self.settings),
            global_batch=self._global_batch,
            skips=self._skips,
        )
        self._follow()
        self.change = Change(step=step, before=before, after=self.plan, pinned=there - used)
        self._must_align = True

    def _follow(self) -> None:
        """Make the plan of the run as it is now, and let the Trainer end with it."""
        assert self.run is not None
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if epoch_loop.max_steps == self._max_steps:
            epoch_loop.max_steps = -1  # it was ours, not the user's
        self._max_steps = None
        self._plan = self._plan_of(self.run)
        if self._plan.fixed_by == "max_train_tokens":
            epoch_loop.max_steps = self._max_steps = self._plan.steps

    def _plan_of(self, state: RunState) -> RunPlan:
        trainer = self._trainer
        limit, accumulation = trainer.limit_train_batches, trainer.accumulate_grad_batches
        most = -(-limit // accumulation) if isinstance(limit, int) else None
        max_epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
        max_steps = None if trainer.max_steps in (-1, self._max_steps) else trainer.max_steps
        return RunPlan(
            state=state,
            sequence_length=self._opened.sequence_length,
            max_epochs=max_epochs,
            max_steps=max_steps,
            max_train_tokens=self.settings.max_train_tokens,
            limit=most,
        )

    @property
    def _global_batch(self) -> int:
        trainer = self._trainer
        return trainer.world_size * self.settings.micro_batch_size * trainer.accumulate_grad_batches

    @property
    def _skips(self) -> list[tuple[int, int]]:
        return [(first, last) for first, last in self.settings.skip_steps or []]

    def _first_eval_sequences(self, name: str) -> int:
        """Evaluation sequences of the first snapshot of the run; of a cache without one, as it is now."""
        snapshot = snapshots_of(name, self.caches[name])
        for known in () if (self.run or self._known) is None else (self.run or self._known).caches:
            if known.name == name:
                try:
                    check_snapshot(known, snapshot)
                except SnapshotMismatch:
                    break  # another cache: it may be used to validate, not to go on
                return known.eval_sequences
        return snapshot.eval_sequences

    def _check_vocabulary(self) -> None:
        """A model that is too small for its tokenizer is found before hours of building."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        size = getattr(module, "declared_vocab_size", None)
        if size is None:
            return
        facts, _ = resolve_tokenizer(self.settings.cache)
        if facts.vocab_size > size:
            raise TokenizerError(
                f"The tokenizer {self.settings.tokenizer} has ids up to {facts.vocab_size - 1:,}, but the model's "
                f"vocabulary has {size:,} entries.\nLeave `vocab_size` out (it follows the tokenizer), or take the "
                "model's own tokenizer."
            )

    def _check_trainer(self) -> None:
        limit = self._trainer.limit_train_batches
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise SettingsError(f"Give `limit_train_batches` as a number of micro-batches, not as the share {limit}.")

    def _check_plan(self, plan: RunPlan) -> None:
        if plan.state.order.only_cache is None and plan.fixed_by is None:
            raise SettingsError(
                "A mixture of caches has no length of its own.\nSet `trainer.max_steps` or `data.max_train_tokens`."
            )
        if plan.sequences < plan.global_batch:
            raise SettingsError(
                f"The cache has {plan.sequences:,} train sequences, fewer than one global batch "
                f"({plan.global_batch:,}).\nAdd text, or lower `micro_batch_size`, `accumulate_grad_batches` or "
                "`sequence_length`."
            )

    def _check_utilisation(self) -> None:
        """Padding that nobody notices costs as much as real tokens."""
        utilisation = self._opened.utilisation
        if utilisation < MIN_UTILISATION:
            rank_zero_warn(
                f"Only {utilisation:.1%} of the sequences' tokens are text, the rest is padding: there is too little "
                "text for chunks of this size, or documents are much shorter than `sequence_length`. "
                "`packing: concat`, shorter sequences or more text help."
            )

    def _eval_loader(self, sequences: dict[str, int]) -> DataLoader | list:
        """The first evaluation sequences of each cache, shared out to the ranks."""
        trainer, rows = self._trainer, self.rows("eval")
        numbers = {id(cache): number for number, cache in rows.caches.items()}
        places = [
            np.stack([np.full(count, numbers[id(self.caches[name])]), np.arange(count)], axis=1)
            for name, count in sequences.items()
            if count
        ]
        if not places:
            return []
        mine = np.concatenate(places)[trainer.global_rank :: trainer.world_size]
        size = self.settings.micro_batch_size
        return DataLoader(
            rows, sampler=[mine[start : start + size] for start in range(0, len(mine), size)], batch_size=None
        )
