"""Settings -> the open caches of a run, and what a run has to know of them."""

from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_warn

from packhorse.cache import Cache, DataSettings, open_cache
from packhorse.errors import SettingsError
from packhorse.training.mixture import shares_of
from packhorse.training.state import RunState, Snapshots, StageStart, check_snapshot

MIN_UTILISATION = 0.9
"""Below this share of real tokens nobody trains without being told."""


def open_caches(settings: DataSettings) -> dict[str, Cache]:
    """The caches that the settings name, as they are now, with one tokenizer."""
    caches = {name: open_cache(each) for name, each in settings.caches.items()}
    tokenizers = {name: (cache.recipe.tokenizer, cache.recipe.sequence_length) for name, cache in caches.items()}
    if len(set(tokenizers.values())) > 1:
        listed = "\n".join(
            f"  {name}: tokenizer {key[:12]}, {length} tokens" for name, (key, length) in tokenizers.items()
        )
        raise SettingsError(f"Caches of one mixture need the same tokenizer and sequence length:\n{listed}")
    return caches


def warn_of_padding(caches: Mapping[str, Cache]) -> None:
    """Padding that nobody notices costs as much as real tokens."""
    for name, cache in caches.items():
        if cache.utilisation < MIN_UTILISATION:
            rank_zero_warn(
                f"Only {cache.utilisation:.1%} of the tokens in the sequences of {name} are text, the rest is "
                "padding: there is too little text for chunks of this size, or documents are much shorter than "
                "`sequence_length`. `packing: concat`, shorter sequences or more text help."
            )


def pin_caches(caches: Mapping[str, Cache], state: RunState) -> dict[str, Cache]:
    """The same caches, as a checkpoint knew them; those that it did not know stay as they are."""
    known = {cache.name: cache for cache in state.caches}
    for name in caches.keys() & known.keys():
        check_snapshot(known[name], snapshots_of(name, caches[name]))
    return {
        name: Cache(cache.folder, known[name].num_chunks) if name in known else cache for name, cache in caches.items()
    }


def snapshots_of(name: str, cache: Cache) -> Snapshots:
    """What a run has to know of an open cache."""
    return Snapshots(
        name=name,
        num_chunks=cache.snapshot.num_chunks,
        sequences=cache.num_sequences("train"),
        eval_sequences=cache.num_sequences("eval"),
        digests=cache.snapshot.digest_of,
        recipe=cache.recipe.id,
    )


def stage_starts(settings: DataSettings) -> list[StageStart]:
    """When each stage begins, and with which shares."""
    return [
        StageStart(
            step=stage.start_training_step - 1,
            shares=dict(zip(stage.weights, shares_of(list(stage.weights.values())), strict=True)),
        )
        for stage in settings.stages
    ]
