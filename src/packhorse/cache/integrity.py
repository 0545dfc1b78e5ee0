"""What a build can vouch for when it is done: one line that says what was verified, and how."""

from dataclasses import dataclass

from packhorse.cache.selection import ranges
from packhorse.cache.states import ChunkStates


@dataclass(frozen=True, kw_only=True)
class Integrity:
    """The chunks of a plan after a build."""

    states: ChunkStates
    built: int
    """Chunks that this run committed."""
    is_read_back: bool
    """Whether each of them was read again after it was written, and its SHA-256 compared."""

    def line(self) -> str:
        """For people."""
        states = self.states
        good, planned = len(states.built), states.planned
        before = good - self.built
        text = f"{good}/{planned} chunks"
        if self.built and not before and self.is_read_back:
            text += ", all hashes verified"
        elif self.built:
            proof = "all hashes verified" if self.is_read_back else "not read back"
            text += f": {self.built} built now, {proof}"
            text += f"; {before} from before, records and sizes as committed" if before else ""
        else:
            text += ", records and sizes as committed (`packhorse cache validate` verifies every hash)"
        if states.unfinished:
            text += f"; {len(states.unfinished)} left: {ranges(states.unfinished)}"
        return text
