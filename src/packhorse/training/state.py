"""What of the data a run has used: a few integers in the checkpoint, from which everything goes on.

    completed optimizer steps -> sequences trained on -> the run's order

Promises: derived from completed steps alone, so that neither what was prefetched nor who saved the checkpoint matters;
plain values only, under 1 kB for one cache; never rewritten backwards: what was trained on stays as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from packhorse.errors import CheckpointError, SettingsError, SnapshotMismatch
from packhorse.training.mixture import RunOrder
from packhorse.training.order import TrainingOrder

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """What a run knows of one cache."""

    name: str
    num_chunks: int
    """Of the newest snapshot that the run took up."""
    digest: str
    """Of that snapshot."""
    history: tuple[tuple[int, int], ...]
    """For each snapshot: (sequences of this cache consumed when it was adopted, its train sequences)."""
    eval_sequences: int
    """Of the first snapshot that had any: validation stays on them."""
    recipe: str = ""
    """Its id; older checkpoints do not know it."""


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """What is on disk of one cache, now."""

    name: str
    num_chunks: int
    sequences: int
    eval_sequences: int
    digests: Any
    """Number of chunks -> digest of that snapshot, for every snapshot that the cache went through."""
    recipe: str = ""
    """Its id."""


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """From this optimizer step on, sequences are taken with these shares."""

    step: int
    """Completed steps when it begins."""
    shares: Mapping[str, int]
    """Positions per block of each cache, by name."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What of the data a run has used."""

    seed: int
    caches: tuple[CacheState, ...]
    batches: tuple[tuple[int, int, int], ...]
    """(step, sequences trained on by then, global batch from then on), oldest first."""
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    """(position, shares of the caches), see `RunOrder`."""
    skips: tuple[tuple[int, int, int, int], ...] = ()
    """(first step, last step as the user wrote them, position, how many sequences are left out there); a range has more
    than one of these where it goes around others, and one of 0 sequences where they cover it."""

    @cached_property
    def order(self) -> RunOrder:
        """The order of the run, as known now."""
        return RunOrder(
            orders=tuple(TrainingOrder(self.seed, cache.history) for cache in self.caches),
            stages=self.stages,
            skips=tuple((position, count) for _, _, position, count in self.skips if count),
        )

    @property
    def global_batch(self) -> int:
        """Sequences of a step, now."""
        return self.batches[-1][2]

    def trained(self, step: int) -> int:
        """Sequences trained on after so many completed steps."""
        begin, trained, size = next(batch for batch in reversed(self.batches) if batch[0] <= step)
        return trained + (step - begin) * size

    def position(self, step: int) -> int:
        """Where in the order the next step begins."""
        return self.order.position(self.trained(step))

    def steps_until(self, position: int) -> int:
        """Completed steps before the step that would reach beyond a position."""
        target = self.order.trained_at(position)
        begin, trained, size = next(batch for batch in reversed(self.batches) if batch[1] <= target)
        return begin + (target - trained) // size

    def with_batch(self, step: int, global_batch: int) -> "RunState":
        """The same run with another global batch from a step on."""
        if global_batch == self.global_batch:
            return self
        kept = tuple(batch for batch in self.batches if batch[0] < step)
        return replace(self, batches=(*kept, (step, self.trained(step), global_batch)))

    def with_snapshot(self, snapshot: Snapshots, step: int) -> "RunState":
        """The same run when a cache is found as it is now: grown, or new to the run.

        Raises:
            SnapshotMismatch: It is not the cache that the run was trained on, or not all of it.
        """
        number = self._number(snapshot.name)
        if number is None:
            shares = tuple((start, (*shares, 0)) for start, shares in self.stages)
            return replace(self, caches=(*self.caches, _first(snapshot)), stages=shares)
        known = self.caches[number]
        check_snapshot(known, snapshot)
        order = self.order.grow(number, snapshot.sequences, self.position(step))
        grown = replace(
            known,
            num_chunks=snapshot.num_chunks,
            digest=snapshot.digests(snapshot.num_chunks),
            history=order.orders[number].history,
            eval_sequences=known.eval_sequences or snapshot.eval_sequences,
            recipe=snapshot.recipe,
        )
        return replace(self, caches=(*self.caches[:number], grown, *self.caches[number + 1 :]))

    def with_skips(self, ranges: Sequence[tuple[int, int]] | None, step: int) -> "RunState":
        """The same run without the sequences that the given steps would have trained on.

        A range is counted once, when it is new, as if no other new one were left out: that is what the user saw in the
        log. From then on it keeps its place in the order, whatever is left out before and however large steps become.

        Args:
            ranges: (first step, last step), both left out, as the log of the run counts them: from 1 on. Recorded ones
                that are to come and not among them are trained on after all; None leaves all as recorded.
            step: Completed steps, now.

        Raises:
            SettingsError: Some of those steps are done.
        """
        trained = self.trained(step)
        recorded = {skip[:2] for skip in self.skips}
        asked = recorded if ranges is None else {(int(first), int(last)) for first, last in ranges}
        kept = [skip for skip in self.skips if skip[:2] in asked or self.order.trained_at(skip[2]) < trained]
        state, end = replace(self, skips=tuple(kept)), 0
        for first, last in sorted(asked - recorded):
            _check_to_come(first, last, step)
            begin, end = max(end, state.trained(first - 1)), max(end, state.trained(last))
            pieces = list(state.order.pieces(begin, end - begin)) or [(state.order.position(begin), 0)]
            kept += [(first, last, position, count) for position, count in pieces]
        return replace(self, skips=tuple(sorted(kept, key=lambda skip: skip[2])))

    def with_stages(self, starts: Sequence[StageStart], step: int) -> "RunState":
        """The same run with the stages that are to come; those that have begun stay, up to here.

        Args:
            starts: All stages of the run, the first from step 0 on.
            step: Completed steps, now.
        """
        here = self.position(step)
        stages = [stage for stage in self.stages if stage[0] < here]
        for number, start in enumerate(starts):
            later = [other.step for other in starts[number + 1 :]]
            if later and later[0] <= step:
                continue  # over
            position = here if start.step <= step else self.position(start.step)
            shares = tuple(start.shares.get(cache.name, 0) for cache in self.caches)
            if not stages or stages[-1][1] != shares:
                stages.append((position, shares))
        return replace(self, stages=tuple(stages))

    def to_dict(self, step: int) -> dict[str, Any]:
        """Plain values, for the checkpoint of a step."""
        return {"format": FORMAT, "step": step, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunState":
        """The state in a checkpoint.

        Raises:
            CheckpointError: It is not one.
        """
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"The checkpoint keeps its data state in format {values.get('format')}; this version of packhorse "
                f"reads format {FORMAT}."
            )
        try:
            caches = tuple(CacheState(**{**cache, "history": _pairs(cache["history"])}) for cache in values["caches"])
            state = cls(
                seed=int(values["seed"]),
                caches=caches,
                batches=_pairs(values["batches"]),
                stages=tuple((int(start), tuple(map(int, shares))) for start, shares in values["stages"]),
                skips=_pairs(values["skips"]),
            )
            state.order.position(state.trained(int(values["step"])))
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise CheckpointError(
                f"The data state of the checkpoint makes no sense: {error!r}.\nGo on from another checkpoint."
            ) from None
        return state

    def number(self, name: str) -> int:
        """The number of a cache."""
        number = self._number(name)
        assert number is not None, name
        return number

    def _number(self, name: str) -> int | None:
        return next((number for number, cache in enumerate(self.caches) if cache.name == name), None)


def begin_run(
    snapshots: Sequence[Snapshots],
    starts: Sequence[StageStart],
    *,
    seed: int,
    global_batch: int,
    skips: Sequence[tuple[int, int]] | None = None,
) -> RunState:
    """The state of a run before its first step."""
    first, *others = snapshots
    state = RunState(
        seed=seed,
        caches=(_first(first),),
        batches=((0, 0, global_batch),),
        stages=((0, (sum(starts[0].shares.values()),)),),
    )
    for snapshot in others:
        state = state.with_snapshot(snapshot, 0)
    return state.with_skips(skips, 0).with_stages(starts, 0)


def check_snapshot(known: CacheState, snapshot: Snapshots) -> None:
    """Refuse a cache that the run was not trained on.

    Raises:
        SnapshotMismatch: The snapshot of the checkpoint is not the beginning of what is on disk.
    """
    check_recipe(known, snapshot.recipe)
    if snapshot.num_chunks < known.num_chunks:
        raise SnapshotMismatch(
            f"The cache {snapshot.name} has {snapshot.num_chunks:,} chunks, but the checkpoint was trained on "
            f"{known.num_chunks:,}: it shrank, or it is another one, of another source.\nBring the missing ones back "
            "(`packhorse cache build` with the settings of that run), or start a new run."
        )
    digest = snapshot.digests(known.num_chunks)
    if digest != known.digest:
        raise SnapshotMismatch(
            f"The cache {snapshot.name} is not the one that the checkpoint was trained on: its first "
            f"{known.num_chunks:,} chunks have the digest {digest[:12]}, in the checkpoint {known.digest[:12]}.\n"
            "Point `cache_dir` to the cache of that run, or start a new run."
        )


def check_recipe(known: CacheState, recipe: str) -> None:
    """Refuse a cache of another recipe than the run was trained on, whether it is built or not.

    Args:
        known: What the checkpoint says.
        recipe: The id of the recipe that is asked for.

    Raises:
        SnapshotMismatch: It is another one.
    """
    if known.recipe and recipe and known.recipe != recipe:
        raise SnapshotMismatch(
            f"The cache {known.name} is not the one that the checkpoint was trained on: its recipe is {recipe}, in the "
            f"checkpoint {known.recipe}. The tokenizer, `sequence_length`, `packing` or another setting of how text "
            "becomes sequences is another.\nTake the configuration that was saved beside the checkpoint "
            "(`--config RUN/config.yaml`), or start a new run."
        )


def _check_to_come(first: int, last: int, step: int) -> None:
    if first <= step:
        raise SettingsError(
            f"skip_steps: steps {first:,} to {last:,} cannot be left out, the run is in step {step:,}.\n"
            "Go on from a checkpoint before them, or take this range out of `skip_steps`."
        )


def _first(snapshot: Snapshots) -> CacheState:
    return CacheState(
        name=snapshot.name,
        num_chunks=snapshot.num_chunks,
        digest=snapshot.digests(snapshot.num_chunks),
        history=((0, snapshot.sequences),),
        eval_sequences=snapshot.eval_sequences,
        recipe=snapshot.recipe,
    )


def _pairs(values: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, value)) for value in values)
