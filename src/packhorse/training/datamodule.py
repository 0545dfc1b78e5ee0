"""Cache -> batches: the DataModule owns the token cache.

`prepare_data` brings the cache up to date (one process, safe to kill and to repeat), `setup` opens it (milliseconds,
the same on all ranks), the loaders read it. What a step trains on depends on the seed and on how many sequences were
consumed before, not on ranks, workers, micro batch or accumulation. Batches straddle epochs of the data: Lightning's
epoch e ends with the last whole batch of the data's epoch e, and the next one begins with what was left over.
"""

import time
from dataclasses import replace

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from packhorse.cache import Cache, DataSettings, open_cache, update_cache
from packhorse.cache.progress import say
from packhorse.cache.tokenizers import resolve_tokenizer
from packhorse.errors import CacheIncompleteError, SettingsError, TokenizerError
from packhorse.training.batches import derive
from packhorse.training.order import TrainingOrder
from packhorse.training.plan import RunPlan
from packhorse.training.sampler import Rows, TrainSampler

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
        self.cache: Cache | None = None
        self.opening_seconds = 0.0
        """Time from the beginning of `prepare_data` to the open cache."""
        self.was_built = False
        """Whether `prepare_data` had to build something."""
        self._started: float | None = None

    def prepare_data(self) -> None:
        """Bring the cache up to date with its sources."""
        self._started = time.monotonic()
        self._check_vocabulary()
        before = self._num_chunks()
        cache = update_cache(self.settings.cache)
        self.was_built = before != cache.snapshot.num_chunks
        if self.was_built:
            say("\n".join(cache.summary.lines()))

    def setup(self, stage: str) -> None:
        """Open the cache. Opening a second time for another stage keeps what is open."""
        if self.cache is None:
            start = self._started or time.monotonic()
            self.cache = open_cache(self.settings.cache)
            self.opening_seconds = time.monotonic() - start
        if stage == "fit" and self.trainer is not None:
            # An epoch has one step more or less than the last: its loader is made anew.
            self.trainer.reload_dataloaders_every_n_epochs = 1
            self._check_plan(self.plan)
            self._check_utilisation()

    @property
    def vocab_size(self) -> int:
        """Ids are below this; the model's vocabulary follows it."""
        return self._opened.vocab_size

    @property
    def plan(self) -> RunPlan:
        """How long the run of the current Trainer is."""
        trainer = self._trainer
        sequences = self._opened.num_sequences("train")
        accumulation = trainer.accumulate_grad_batches
        limit = None
        if isinstance(trainer.limit_train_batches, int):
            limit = -(-trainer.limit_train_batches // accumulation)
        plan = RunPlan(
            sequences=sequences,
            sequence_length=self._opened.sequence_length,
            global_batch=trainer.world_size * self.settings.micro_batch_size * accumulation,
            steps=trainer.max_steps if trainer.max_steps > 0 else 0,
            limit=limit,
        )
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            by_epochs = sum(map(plan.epoch_steps, range(trainer.max_epochs)))
            plan = replace(plan, steps=min(plan.steps, by_epochs) if plan.steps else by_epochs)
        return plan

    def train_dataloader(self) -> DataLoader:
        """Micro-batches of the rest of Lightning's current epoch."""
        trainer = self._trainer
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise SettingsError("Set `trainer.use_distributed_sampler: false`: the order of training is our own.")
        # Between two epochs Lightning still counts the batches of the last one.
        progress = trainer.fit_loop.epoch_loop.batch_progress
        sampler = TrainSampler(
            order=self.order,
            step=trainer.global_step,
            accumulation=trainer.accumulate_grad_batches,
            micro_batch=self.settings.micro_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            length=self.plan.epoch_steps(trainer.current_epoch) * trainer.accumulate_grad_batches,
            done=0 if progress.is_last_batch else progress.current.ready,
        )
        return DataLoader(self.rows("train"), sampler=sampler, batch_size=None)

    def rows(self, split: str) -> Rows:
        """Sequence numbers -> batches, for one side of the split."""
        return Rows(self._opened, split)

    @property
    def order(self) -> TrainingOrder:
        """The global order of the run."""
        return TrainingOrder(seed=self.settings.seed, history=((0, self._opened.num_sequences("train")),))

    def val_dataloader(self) -> DataLoader | list:
        """The first evaluation sequences: the same for every run on this cache, however it grows."""
        return self._eval_loader(self.settings.eval_sequences)

    def test_dataloader(self) -> DataLoader | list:
        """All evaluation sequences."""
        return self._eval_loader(self._opened.num_sequences("eval"))

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

    def _num_chunks(self) -> int:
        try:
            return open_cache(self.settings.cache).snapshot.num_chunks
        except (CacheIncompleteError, TokenizerError):
            return 0

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

    def _check_plan(self, plan: RunPlan) -> None:
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

    def _eval_loader(self, sequences: int) -> DataLoader | list:
        trainer = self._trainer
        available = min(sequences, self._opened.num_sequences("eval"))
        if not available:
            return []
        numbers = np.arange(trainer.global_rank, available, trainer.world_size)
        size = self.settings.micro_batch_size
        batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        return DataLoader(self.rows("eval"), sampler=batches, batch_size=None)
