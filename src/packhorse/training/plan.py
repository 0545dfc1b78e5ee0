"""How long a run is: sequences, epochs and global batch -> steps."""

from dataclasses import dataclass

from packhorse.training.order import steps_in_epoch


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How long a run is, before it begins."""

    sequences: int
    """Train sequences of one epoch."""
    sequence_length: int
    global_batch: int
    """Sequences of one optimizer step: devices x nodes x micro batch x accumulation."""
    steps: int
    """Optimizer steps of the run."""
    limit: int | None = None
    """Steps in an epoch at most, if the Trainer was told so."""

    @property
    def tokens(self) -> int:
        """Tokens of the run, padding included."""
        return self.steps * self.global_batch * self.sequence_length

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.steps * self.global_batch / self.sequences

    def epoch_steps(self, epoch: int) -> int:
        """Optimizer steps in Lightning's epoch."""
        steps = steps_in_epoch(epoch, self.sequences, self.global_batch)
        return steps if self.limit is None else min(steps, self.limit)
