"""How long a run is: the data, the limits of the Trainer and what was trained on -> steps and epochs.

Epochs follow the data: Lightning's epoch e ends with the last whole batch of the data's epoch e, and what is left over
begins the next one. The last epoch ends with the run. It is longer than the data when the data grew after the first
epoch, because the run's total is always that of the data as they are now:

    total = step + (sequences * epochs - consumed) // global_batch

`max_steps` and `max_train_tokens` fix the total. A run over several caches is one epoch of Lightning's, because each
cache has epochs of its own.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from packhorse.training.state import RunState


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How long a run is, as known now."""

    state: RunState
    sequence_length: int
    max_epochs: int | None = None
    """Passes over the data, if the run has only one cache and a limit."""
    max_steps: int | None = None
    max_train_tokens: int | None = None
    limit: int | None = None
    """Steps of an epoch at most, if the Trainer was told so."""
    full_sequences: int | None = None
    """Instead of the train sequences that there are."""

    @property
    def sequences(self) -> int:
        """Train sequences of one epoch; of several caches, all together."""
        return sum(cache.history[-1][1] for cache in self.state.caches)

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step: devices x nodes x micro batch x accumulation."""
        return self.state.global_batch

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the run; 0 if nothing ends it."""
        return min((steps for steps, _ in self._limits), default=0)

    def is_over(self, step: int) -> bool:
        """Whether nothing is left to do after so many completed steps."""
        return 0 < self.steps <= step

    @property
    def length(self) -> str:
        """The steps of the run, for people."""
        return f"{self.steps:,}" if self.steps else "no end"

    def place(self, step: int) -> str:
        """A step, and of how many, for people."""
        return f"{step:,}/{self.steps:,}" if self.steps else f"{step:,}"

    @property
    def fixed_by(self) -> str | None:
        """The setting that keeps the total as it is when the data grow."""
        _, name = min(self._limits, default=(0, "max_epochs"))
        return None if name == "max_epochs" else name

    @property
    def tokens(self) -> int:
        """Tokens of the run, padding included."""
        return self.state.trained(self.steps) * self.sequence_length

    @property
    def epochs(self) -> float:
        """Passes over the data as they are now."""
        return self.state.trained(self.steps) / self.sequences

    def epochs_of(self, name: str) -> float:
        """Passes over one of the caches."""
        number = self.state.number(name)
        taken = self.state.order.taken(self.state.position(self.steps))[number]
        return taken / self.state.caches[number].history[-1][1]

    def epoch_at(self, step: int) -> tuple[int, int, int]:
        """Lightning's epoch in which the next step lies after so many, and the steps that it goes from and to.

        After the run's last step: the epoch that would come next, of no steps, or the one in which the steps ran out.
        """
        if self.is_over(step):
            if self.fixed_by is None:
                return self.max_epochs or 0, step, step
            step = self.steps - 1
        if self._cache is None:
            return 0, 0, self.steps
        if self.limit is not None:
            return self._limited_epoch_at(step)
        epoch = self._data_epoch(step)
        return epoch, self._end(epoch - 1), self._end(epoch)

    def passes(self, step: int) -> float:
        """Passes over the data after so many completed steps: 1.25 is a quarter into the second."""
        if self._cache is None:
            return self.state.trained(step) / self.sequences
        order, position = self.state.order.orders[self._cache].locate(self.state.position(step))
        return order.epoch + position / order.num_sequences

    def of_full_data(self, sequences: int) -> int:
        """The run's steps if the data set had so many train sequences."""
        if self.fixed_by is not None:
            return self.steps
        return max(self.steps, replace(self, full_sequences=sequences).steps)

    @cached_property
    def _cache(self) -> int | None:
        return self.state.order.only_cache

    @cached_property
    def _limits(self) -> list[tuple[int, str]]:
        begin, trained, size = self.state.batches[-1]
        limits = []
        if self.max_steps is not None:
            limits.append((self.max_steps, "max_steps"))
        if self.max_train_tokens is not None:
            left = self.max_train_tokens // self.sequence_length - trained
            limits.append((begin + max(0, left) // size, "max_train_tokens"))
        if self.max_epochs is not None and self._cache is not None:
            sequences = self.full_sequences or self.state.caches[self._cache].history[-1][1]
            left = self.state.order.trained_at(sequences * self.max_epochs) - trained
            by_epochs = begin + max(0, left) // size
            if self.limit is not None:
                by_epochs = min(by_epochs, sum(self._epoch_steps(epoch) for epoch in range(self.max_epochs)))
            limits.append((by_epochs, "max_epochs"))
        return limits

    def _data_epoch(self, step: int) -> int:
        """The epoch whose end comes after so many completed steps."""
        assert self._cache is not None
        order, _ = self.state.order.orders[self._cache].locate(self.state.position(step))
        epoch = order.epoch if self.max_epochs is None else min(order.epoch, self.max_epochs - 1)
        while self._end(epoch) <= step:  # its last sequences belong to a batch that straddles
            epoch += 1
        return epoch

    def _end(self, epoch: int) -> int:
        """Completed steps when an epoch ends."""
        if epoch < 0:
            return 0
        if self.steps and self.max_epochs is not None and epoch >= self.max_epochs - 1:
            return self.steps
        assert self._cache is not None
        end = self.state.steps_until(self.state.order.orders[self._cache].epoch_start(epoch + 1))
        return min(end, self.steps) if self.steps else end

    def _epoch_steps(self, epoch: int) -> int:
        assert self._cache is not None
        assert self.limit is not None
        starts = [self.state.order.orders[self._cache].epoch_start(number) for number in (epoch, epoch + 1)]
        first, end = map(self.state.steps_until, starts)
        return min(end - first, self.limit)

    def _limited_epoch_at(self, step: int) -> tuple[int, int, int]:
        epoch, first = 0, 0
        while (end := first + self._epoch_steps(epoch)) <= step:
            epoch, first = epoch + 1, end
        return epoch, first, min(end, self.steps) if self.steps else end
