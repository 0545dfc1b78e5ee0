"""Caches -> batches: the DataModule owns the token caches.

`prepare_data` brings them up to date (one process, safe to kill and to repeat), `setup` opens them (milliseconds, the
same on all ranks), the loaders read them. What a step trains on depends on the seed and on how many sequences were
trained on before, not on ranks, workers, micro batch or accumulation; a checkpoint keeps that as a few integers.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from packhorse.cache import Cache, DataSettings
from packhorse.cache.background import BackgroundBuilder, Lease
from packhorse.cache.progress import say
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection
from packhorse.errors import CacheIncompleteError, SettingsError, SnapshotMismatch
from packhorse.training.caches import open_caches, snapshots_of, stage_starts, warn_of_padding
from packhorse.training.compatibility import check_before_building, check_model
from packhorse.training.live import EVERY_STEPS, POLL_SECONDS, LiveCaches, build_first, set_epoch_length
from packhorse.training.mixture import RunOrder
from packhorse.training.plan import RunPlan
from packhorse.training.ranks import keep_failure, share_failure, share_of
from packhorse.training.resume import Change, align_loops
from packhorse.training.run import Run
from packhorse.training.sampler import PassSampler, Rows, TrainLoader, TrainSampler, for_transformers, share_out
from packhorse.training.state import RunState, begin_run, check_snapshot
from packhorse.training.trainer_limits import check_limits
from packhorse.training.validation import ask_for_sequences_again, count_over_the_run


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
        self.run: Run | None = None
        """The current run, when there is one."""
        self.opening_seconds = 0.0
        """Time from the beginning of `prepare_data` to the open cache."""
        self.built: set[str] = set()
        """The caches of which `prepare_data` had to build something."""
        self._started: float | None = None
        self._known: RunState | None = None
        self._to_come: Mapping[str, Any] = {}
        self._must_align = False
        self._builder: BackgroundBuilder | None = None
        self._live: LiveCaches | None = None
        self._lease: Lease | None = None
        self._loader: DataLoader | None = None

    @property
    def cache(self) -> Cache | None:
        """The open cache; of several, the first."""
        return next(iter(self.caches.values()), None)

    @keep_failure
    def prepare_data(self) -> None:
        """Bring the caches up to date with their sources."""
        self._started = time.monotonic()
        self._take_lease()
        is_fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            module = self.trainer.lightning_module
            check_limits(self.trainer, self.settings, getattr(module, "schedule_settings", None))
        if self.trainer is not None:
            check_model(self.trainer.lightning_module, self.settings)
        self._check_checkpoint()
        first, settings = self.settings.chunks_first, list(self.settings.caches.values())
        if first is None:
            done = [build_selection(each, Selection()) for each in settings]
        else:
            done = [build_first(each, first, self._global_batch) for each in settings]
        caches, integrities = zip(*done, strict=True)
        if first is not None and is_fitting:
            self._end_builder()
            self._builder = BackgroundBuilder(settings)
        self.built = {name for name, each in zip(self.settings.caches, integrities, strict=True) if each.built}
        if self.built:
            say("\n".join(line for cache in caches for line in cache.summary.lines()))

    @share_failure
    def setup(self, stage: str) -> None:
        """Open the caches. Opening a second time for another stage keeps what is open."""
        self._take_lease()
        if not self.caches or (stage == "fit" and self.run is not None):
            start = self._started or time.monotonic()
            self.caches = open_caches(self.settings)
            self.opening_seconds = time.monotonic() - start
        if stage == "fit" and self.trainer is not None:
            # An epoch has one step more or less than the last: its loader is made anew.
            self.trainer.reload_dataloaders_every_n_epochs = 1
            count_over_the_run(self.trainer)
            self.run, self._known, self._must_align = Run(self.trainer, self.settings, self.caches), None, False
            warn_of_padding(self.caches)
            if self.settings.chunks_first is not None:
                self._live = LiveCaches(self.caches, self._builder, self.trainer)

    def teardown(self, stage: str) -> None:
        """End the builder, and remove temporary caches of a run that is finished."""
        is_over = stage == "fit" and self.run is not None and self.plan.is_over(self._trainer.global_step)
        self._let_go(remove=is_over)

    def on_exception(self, exception: BaseException) -> None:
        """End the builder; temporary caches stay for when the run goes on."""
        self._let_go(remove=False)

    def will_go_on(self, checkpoint: Mapping[str, Any]) -> None:
        """Take notice of the checkpoint that `fit` will get: what does not fit to it is not built."""
        # Not all of it: its tensors would keep the file open.
        self._to_come = {key: checkpoint[key] for key in ("packhorse", type(self).__qualname__) if key in checkpoint}

    def state_dict(self) -> dict[str, Any]:
        """What of the data the run has used, by its completed optimizer steps."""
        if self.run is None or self._trainer.state.fn != TrainerFn.FITTING:
            return {}
        return self.run.state.to_dict(self._trainer.global_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; where nothing is trained, only take the validation set from it.

        Raises:
            SnapshotMismatch: The run was trained on another cache, or on more of this one.
            CheckpointError: The state makes no sense.
        """
        self._known = RunState.from_dict(state_dict)
        if self._trainer.state.fn == TrainerFn.FITTING:
            assert self.run is not None
            if self._live is not None:
                self._live.wait_for({cache.name: cache.num_chunks for cache in self._known.caches})
                self.caches.update(open_caches(self.settings))
            self.run.resume(self._known, int(state_dict["step"]))
            self._must_align = True

    @property
    def seed(self) -> int:
        """Of what is random in the run."""
        return self.settings.seed if self.run is None else self.run.state.seed

    @property
    def vocab_size(self) -> int:
        """Ids are below this; the model's vocabulary follows it."""
        return self._opened.vocab_size

    @property
    def plan(self) -> RunPlan:
        """How long the run of the current Trainer is."""
        if self.run is None:
            raise ValueError("There is no run yet: call `trainer.fit(module, datamodule=datamodule)`.")
        return self.run.plan

    @property
    def change(self) -> Change | None:
        """What is different since the checkpoint that the run goes on from, or since it last grew."""
        return None if self.run is None else self.run.change

    @property
    def order(self) -> RunOrder:
        """The global order of the run."""
        return self.plan.state.order

    def train_dataloader(self) -> DataLoader:
        """Micro-batches of the rest of Lightning's current epoch; for a loop without a Trainer see `passes`."""
        if self.trainer is None:
            return self.passes()
        trainer = self.trainer
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise SettingsError("Set `trainer.use_distributed_sampler: false`: the order of training is our own.")
        if self._must_align:
            align_loops(trainer, self.plan)
            self._must_align = False
        step, accumulation = trainer.global_step, trainer.accumulate_grad_batches
        _, first, end = self.plan.epoch_at(step)
        sampler = TrainSampler(
            order=self._order_of_next_step,
            trained=self.plan.state.trained(step),
            accumulation=accumulation,
            micro_batch=self.settings.micro_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            length=max(1, end - first) * accumulation,  # Lightning warns of an empty one when a run is finished
            done=max(0, step - first) * accumulation,
        )
        self._loader = TrainLoader(self.rows("train"), sampler=sampler, batch_size=None)
        return self._loader

    def passes(self) -> DataLoader:
        """Micro-batches for a loop of one's own: each iteration goes on in the order, for one pass over the data.

        `model(**batch).loss` of any causal language model of transformers is right: labels stand at their own tokens.
        With `torch.distributed`, each process gets its share of every batch.

        Raises:
            SettingsError: There is too little text for a batch, or a mixture, of which there is no pass.
        """
        if len(self.caches) > 1:
            raise SettingsError("A mixture of caches has no length of its own: train it with a Trainer.")
        rank, world_size = share_of(self.trainer)
        batch = world_size * self.settings.micro_batch_size
        snapshot = snapshots_of(next(iter(self.caches), ""), self._opened)
        order = begin_run([snapshot], stage_starts(self.settings), seed=self.seed, global_batch=batch).order
        if not (length := snapshot.sequences // batch):
            raise SettingsError(f"The cache has fewer train sequences than one batch ({batch:,}).")
        sampler = PassSampler(
            order=lambda: order,
            trained=0,
            accumulation=1,
            micro_batch=self.settings.micro_batch_size,
            rank=rank,
            world_size=world_size,
            length=length,
        )
        return DataLoader(self.rows("train"), sampler=sampler, batch_size=None, collate_fn=for_transformers)

    def rows(self, split: str) -> Rows:
        """(Cache, sequence number) -> batches, for one side of the split."""
        numbers = {name: number for number, name in enumerate(self.caches)}
        if self.run is not None:
            numbers = {name: self.run.state.number(name) for name in self.caches}
        return Rows({numbers[name]: cache for name, cache in self.caches.items()}, split)

    def val_dataloader(self) -> DataLoader | list:
        """The first evaluation sequences of the first snapshot that has any: the same however the cache grows."""
        return self._eval_loader(self.validation_sequences())

    def test_dataloader(self) -> DataLoader | list:
        """All evaluation sequences."""
        return self._eval_loader({name: cache.num_sequences("eval") for name, cache in self.caches.items()})

    def predict_dataloader(self) -> DataLoader:
        """The prompts."""
        for prompt in self.settings.prompts:
            self.encode(prompt)  # what cannot be continued is refused before any is
        return DataLoader(list(self.settings.prompts), batch_size=None)

    def validation_sequences(self) -> dict[str, int]:
        """How many evaluation sequences of each cache are used for validation."""
        return {name: min(self.settings.eval_sequences, self._first_eval_sequences(name)) for name in self.caches}

    def next_sequences(self, count: int) -> np.ndarray:
        """What the run trains on next: int64 [count, 2] of (cache, sequence number)."""
        return self.order.sequence_numbers(self.plan.state.trained(self._trainer.global_step), count)

    def first_batch_seconds(self) -> float:
        """Time that the next batch of the run takes to read."""
        start = time.monotonic()
        self.rows("train")[self.next_sequences(self.settings.micro_batch_size)]
        return time.monotonic() - start

    def unigram_entropy(self, sequences: int = 2_048) -> float:
        """Nats per token that guessing by frequency alone would cost, on some training sequences.

        A model must fall well below it: it is the loss of knowing the words but nothing about their order.

        Args:
            sequences: So many are looked at: the first of the cache, or of a mixture the next ones.
        """
        rows = self.rows("train")
        if len(self.caches) > 1 and self.run is not None:
            numbers = self.next_sequences(sequences)
        else:
            numbers = np.arange(min(sequences, self._opened.num_sequences("train")))
        labels = rows[numbers]["labels"].numpy()
        counts = np.bincount(labels[labels >= 0])
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after the BOS of the recipe if it has one.

        Raises:
            SettingsError: there are none, so nothing to continue.
        """
        bos = self._opened.recipe.bos_id
        ids = [*([] if bos is None else [bos]), *self._opened.encode(text)]
        if not ids:
            raise SettingsError(f"The prompt {text!r} has no tokens. Give a text in `data.prompts`.")
        return ids

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

    def _order_of_next_step(self) -> RunOrder:
        """The order, after a look for chunks that were built meanwhile."""
        step = self._trainer.global_step
        ends_here = self.plan.fixed_by is None and self.plan.is_over(step + 1)
        if self._live is not None and (ends_here or step % EVERY_STEPS == 0):
            there, more_to_come = self._live.look()
            while not self._take_up(there, step) and ends_here and more_to_come:
                time.sleep(POLL_SECONDS)
                there, more_to_come = self._live.look()
            if not more_to_come:
                self._live = None
        return self.order

    def _take_up(self, chunks: dict[str, int], step: int) -> bool:
        """Go on with more chunks, if there are more; whether the run is longer now."""
        assert self.run is not None
        assert self._loader is not None
        before, known = self.plan.steps, [cache.eval_sequences for cache in self.run.state.caches]
        if self.run.take_up(chunks, step):
            self._loader.dataset.caches = self.rows("train").caches
            _, first, end = self.plan.epoch_at(step)
            self._loader.sampler.length = (end - first) * self._trainer.accumulate_grad_batches
            set_epoch_length(self._trainer, self._loader.sampler.length)
            if known != [cache.eval_sequences for cache in self.run.state.caches]:
                self._validate_on_more()
        return self.plan.steps > before

    def _validate_on_more(self) -> None:
        """Caches without evaluation sequences have some now."""
        count, trainer = sum(self.validation_sequences().values()), self._trainer
        if count and trainer.limit_val_batches:
            ask_for_sequences_again(trainer)
            if trainer.is_global_zero:
                say(f"validation takes {count:,} evaluation sequences from now on")

    @property
    def _global_batch(self) -> int:
        """Sequences of an optimizer step."""
        accumulation = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        return share_of(self.trainer)[1] * self.settings.micro_batch_size * accumulation

    def _take_lease(self) -> None:
        """Keep temporary caches from being removed at the end of another run, already while they are built."""
        if self.settings.temporary_root is not None:
            self._lease = self._lease or Lease(self.settings.temporary_root)

    def _end_builder(self) -> None:
        self._live = None
        if self._builder is not None:
            self._builder.stop()
            self._builder = None

    def _let_go(self, remove: bool) -> None:
        self._end_builder()
        if self._lease is not None:
            self._lease.release(remove)
            self._lease = None

    def _first_eval_sequences(self, name: str) -> int:
        """Evaluation sequences of the first snapshot of the run that has any; of a cache without one, as it is now."""
        snapshot = snapshots_of(name, self.caches[name])
        state = self._known if self.run is None else self.run.state
        for known in () if state is None else state.caches:
            if known.name == name:
                try:
                    check_snapshot(known, snapshot)
                except SnapshotMismatch:
                    break  # another cache: it may be used to validate, not to go on
                return known.eval_sequences or snapshot.eval_sequences
        return snapshot.eval_sequences

    def _check_checkpoint(self) -> None:
        """A run that cannot go on is found before hours of building, too."""
        if self._to_come and self.trainer is not None:
            data = self._to_come.get(type(self).__qualname__)
            known = RunState.from_dict(data).caches if data else ()
            make_config = self.trainer.lightning_module.make_config
            check_before_building(self._to_come["packhorse"]["config"], known, self.settings, make_config)

    def _eval_loader(self, sequences: dict[str, int]) -> DataLoader | list:
        """The first evaluation sequences of each cache, shared out to the ranks."""
        trainer, rows = self.trainer, self.rows("eval")
        numbers = {id(cache): number for number, cache in rows.caches.items()}
        places = [
            np.stack([np.full(count, numbers[id(self.caches[name])]), np.arange(count)], axis=1)
            for name, count in sequences.items()
            if count
        ]
        if not places:
            if trainer is None or trainer.state.fn != TrainerFn.FITTING:
                raise SettingsError(
                    "There is no evaluation text, so there is nothing to measure.\nSet `data.eval_sequences` and "
                    "`data.eval_share` above 0 (a share makes another cache), or add text."
                )
            return []
        sampler = share_out(np.concatenate(places), *share_of(trainer), self.settings.micro_batch_size)
        collate = for_transformers if trainer is None else None
        return DataLoader(rows, sampler=sampler, batch_size=None, collate_fn=collate)
