"""What a user says about the data of a training: the whole `data:` group of a YAML, without torch.

Usually that is one cache. A `mixture` takes several by weight, and `data_stages` change the mixture in the course of
the run. All three are the same thing: named caches, and stages that say from which step on each has which weight.

    data:
      tokenizer: gpt2
      mixture:
        - {name: web, source: HuggingFaceFW/fineweb-edu, weight: 9}
        - {name: code, source: data/code/*.jsonl, text_column: content, weight: 1}
      data_stages:
        - name: annealing
          start_training_step: 90001
          mixture:
            - {name: web, weight: 4}
            - {name: code, weight: 4}
            - {name: books, source: data/books.parquet, weight: 2}
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from packhorse.cache.cache import default_name
from packhorse.cache.settings import CacheSettings
from packhorse.corpus.sources import named_in_configuration
from packhorse.errors import SettingsError

SHARED = ("tokenizer", "train_tokenizer", "sequence_length")
"""What caches that are mixed must have in common."""


@dataclass(frozen=True, kw_only=True)
class DataStage:
    """A part of a run in which caches have constant weights."""

    name: str
    start_training_step: int
    """The first step of the stage, counted from 1 on."""
    weights: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DataSettings(CacheSettings):
    """The whole `data:` group: the cache, and how batches are made of it."""

    mixture: list[dict] | None = None
    """Several caches instead of one: a list of {name, weight, source} and any other setting of a cache that differs.
    Needs `trainer.max_steps` or `max_train_tokens`; each cache has epochs and growth of its own."""
    data_stages: list[dict] | None = None
    """Other mixtures later on: a list of {name, start_training_step, mixture}, steps counted from 1. A cache that was
    named before needs its name and weight only."""
    micro_batch_size: int = 8
    """Sequences per step of one device; the global batch is devices x nodes x micro batch x accumulation."""
    max_train_tokens: int | None = None
    """End the run after so many tokens, padding included; like `trainer.max_steps` it fixes the total."""
    full_dataset_sequences: int | None = None
    """Train sequences that the cache will have one day, if it is only partly built: warm-up is a share of the steps
    over all of them."""
    start_after_chunks: int | None = None
    """Start training when so many chunks of each cache are built, and build the rest meanwhile, in another process."""
    use_cached_tokens: bool = True
    """`false` starts at once, without a cache that stays: tokens go to a temporary one, removed when the run is over.
    The same as `start_after_chunks: 1` otherwise."""
    on_growth: Literal["adopt", "pin"] = "adopt"
    """If the cache has more sequences than at the checkpoint from which a run goes on: take them up (the rest of the
    epoch mixes what was not seen with what is new), or stay with what the checkpoint was trained on."""
    skip_steps: list[list[int]] | None = None
    """Leave out what these steps would have trained on, a list of [first, last], after a spike of the loss: go on from
    a checkpoint before them. Checkpoints remember it; a list replaces what they remember and is still to come."""
    eval_sequences: int = 2_048
    """At most so many evaluation sequences are used for validation: the first of the cache, unchanged by growth."""
    seed: int = 0
    """Decides the order of training."""
    prompts: tuple[str, ...] = ("def ", "import ", "class ")
    """What `predict` continues."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("micro_batch_size", 1),
            ("eval_sequences", 0),
            ("max_train_tokens", 1),
            ("full_dataset_sequences", 1),
            ("start_after_chunks", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingsError(f"{name} must be {least} or more, not {value}.")
        if self.on_growth not in ("adopt", "pin"):
            raise SettingsError(f"on_growth must be adopt or pin, not {self.on_growth}.")
        for steps in self.skip_steps or []:
            if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
                raise SettingsError(f"skip_steps is a list of [first step, last step], counted from 1; got {steps}.")
        _ = self.caches, self.stages  # refused here, not after hours

    @property
    def cache(self) -> CacheSettings:
        """The part that concerns the cache; of several, the first."""
        return next(iter(self.caches.values()))

    @cached_property
    def caches(self) -> dict[str, CacheSettings]:
        """The caches of the run by name."""
        if not self.mixture and not self.data_stages:
            return {self.name or default_name(self.source): CacheSettings(**self._common)}
        caches: dict[str, CacheSettings] = {}
        for _, mixture in self._mixtures:
            for entry in mixture:
                self._add_cache(caches, entry)
        return caches

    @cached_property
    def stages(self) -> list[DataStage]:
        """What is trained on, from which step on; the first begins with step 1."""
        if not self.mixture and not self.data_stages:
            return [DataStage(name="training", start_training_step=1, weights={next(iter(self.caches)): 1.0})]
        stages = [
            DataStage(
                name=str(stage["name"]),
                start_training_step=int(stage["start_training_step"]),
                weights={entry["name"]: float(entry.get("weight", 1)) for entry in mixture},
            )
            for stage, mixture in self._mixtures
        ]
        starts = [stage.start_training_step for stage in stages]
        if starts[0] != 1 or starts != sorted(set(starts)):
            raise SettingsError(
                f"data_stages: the stages begin with the steps {starts}; the first must begin with step 1 (as "
                "`mixture` does), and each later than the one before."
            )
        return stages

    @property
    def chunks_first(self) -> int | None:
        """Chunks of each cache that training waits for, if the rest is built meanwhile."""
        return self.start_after_chunks or (None if self.use_cached_tokens else 1)

    @property
    def temporary_root(self) -> Path | None:
        """Where temporary caches lie: the same folder for all processes of a run, and when it goes on."""
        if self.use_cached_tokens:
            return None
        words = f"{Path.cwd()}|{self.cache_dir}|{getattr(os, 'getuid', int)()}"
        return Path(tempfile.gettempdir()) / f"packhorse-{hashlib.sha256(words.encode()).hexdigest()[:16]}"

    @property
    def _common(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(CacheSettings)}
        return values if self.use_cached_tokens else {**values, "cache_dir": str(self.temporary_root)}

    @cached_property
    def _mixtures(self) -> list[tuple[dict, list[dict]]]:
        """Each stage as it was written, with its mixture."""
        first = {"name": "training", "start_training_step": 1, "mixture": self.mixture}
        stages = [*([first] if self.mixture else []), *(self.data_stages or [])]
        for stage in stages:
            if set(stage) != set(first):
                raise SettingsError(
                    f"data_stages: a stage has {', '.join(first)}; got {', '.join(map(str, stage)) or 'nothing'}."
                )
            if not isinstance(stage["mixture"], list) or not stage["mixture"]:
                raise SettingsError(f"The mixture of the stage {stage['name']} is a list of {{name, weight, source}}.")
        return [(stage, stage["mixture"]) for stage in stages]

    def _add_cache(self, caches: dict[str, CacheSettings], entry: dict) -> None:
        """Take up a cache, when it is described for the first time."""
        own = {key: value for key, value in entry.items() if key != "weight"}
        allowed = {"weight", *self._common} - set(SHARED)
        if "name" not in own or (unknown := sorted(set(entry) - allowed)):
            raise SettingsError(
                f"A cache of a mixture has name, weight, source and other settings of a cache, but not "
                f"{', '.join(SHARED)}, which all share; got {', '.join(map(str, entry)) or 'nothing'}."
                + (f"\nNot known or not allowed: {', '.join(unknown)}." if "name" in own else "")
            )
        if float(entry.get("weight", 1)) < 0:
            raise SettingsError(f"The weight of {own['name']} must be 0 or more, not {entry['weight']}.")
        if own["name"] not in caches:
            if "source" not in own:
                raise SettingsError(f"The cache {own['name']} of a mixture needs a `source`.")
            caches[own["name"]] = CacheSettings(**{**self._common, **own})
        elif len(own) > 1:
            raise SettingsError(f"The cache {own['name']} is described twice; later its name and weight are enough.")


def name_sources(values: Any) -> None:
    """Take the sources of a configuration, in which a list holds names and never texts.

    Args:
        values: The `data:` group; it is changed.
    """
    values["source"] = named_in_configuration(values["source"])
    stages = [{"mixture": values["mixture"]}, *(values["data_stages"] or [])]
    for entry in [entry for stage in stages for entry in stage.get("mixture") or []]:
        if "source" in entry:
            entry["source"] = named_in_configuration(entry["source"])
