"""A checkpoint -> a model that is ready to read, with its tokenizer; no configuration and no cache is needed."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from packhorse.corpus.bos import with_bos
from packhorse.corpus.tokenizer import (
    TokenizerContent,
    TokenizerFacts,
    locate_tokenizer,
    read_tokenizer,
    tokenizer_of_files,
)
from packhorse.errors import CheckpointError, SettingsError, TokenizerError
from packhorse.training.checkpoint_io import load_checkpoint
from packhorse.training.compatibility import check_contents
from packhorse.training.families import allow_cache
from packhorse.training.locate import is_transformers_folder, resolve_checkpoint
from packhorse.training.module import LanguageModule

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A folder with one of these has a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Which checkpoint, and where it shall run."""

    ckpt_path: str
    """A file, the folder of a run, `latest`, `last`, or a transformers folder. Also called --checkpoint-path."""
    tokenizer: str | None = None
    """Another tokenizer than the checkpoint's own: a name, a folder or a tokenizer.json."""
    device: str = "auto"
    """As torch names it; `auto` takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is bfloat16 on a GPU that has it, and float32 elsewhere. Memory and gates are float32 in any case."""
    runs: Path = Path("runs")
    """The folder of all runs, where `latest` is looked for."""

    def __post_init__(self) -> None:
        try:
            torch.empty(0, device=self.torch_device)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise SettingsError(
                f"The device {self.device} cannot be used: {str(error).splitlines()[0]}\n"
                "`--device auto` takes a GPU if there is one, and `--device cpu` none."
            ) from None

    @property
    def torch_device(self) -> str:
        """Where the model shall be."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @property
    def torch_dtype(self) -> torch.dtype:
        """What its weights shall be."""
        if self.dtype == "auto":
            has_bf16 = self.torch_device.startswith("cuda") and torch.cuda.is_bf16_supported()
            return torch.bfloat16 if has_bf16 else torch.float32
        return getattr(torch, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held."""

    path: Path
    model: PreTrainedModel
    """In evaluation mode, on its device."""
    tokenizer: TokenizerContent
    """With BOS before every text if the model was trained so, and only then."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after BOS if the model was trained with one before every text."""
        facts, ids = self.tokenizer.facts, self._codec.encode(text, add_special_tokens=False).ids
        if not ids and not facts.adds_bos:
            raise SettingsError(f"The prompt {text!r} has no tokens. Give a text.")
        return [facts.bos_id, *ids] if facts.adds_bos else ids

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, without special tokens."""
        return self._codec.decode(ids, skip_special_tokens=True)

    @cached_property
    def _codec(self):
        from tokenizers import Tokenizer

        if not self.tokenizer.json:
            raise TokenizerError("This needs a fast tokenizer, with a tokenizer.json. Give one: `--tokenizer`.")
        return Tokenizer.from_str(self.tokenizer.json)


def restore(settings: CheckpointSettings) -> Restored:
    """Load a checkpoint.

    Raises:
        SettingsError, CheckpointError: there is no such checkpoint, it is damaged, or it is not one of ours.
        TokenizerError: there is no tokenizer, or it does not fit.
    """
    path = resolve_checkpoint(settings.ckpt_path, settings.runs)
    model, own = (_load_folder(path), None) if is_transformers_folder(path) else _load_file(path)
    tokenizer = _tokenizer(path, (own or {}).get("tokenizer"), settings.tokenizer)
    if tokenizer.facts.vocab_size > model.config.vocab_size:
        raise TokenizerError(
            f"The tokenizer has ids up to {tokenizer.facts.vocab_size - 1:,}, but the model of {path} has a vocabulary "
            f"of {model.config.vocab_size:,}.\nGive its own: `--tokenizer`."
        )
    if own is not None:
        tokenizer = with_bos(tokenizer, _bos_id(own, tokenizer.facts))
    allow_cache(model)
    model = model.to(settings.torch_device, settings.torch_dtype).eval()
    return Restored(path=path, model=model, tokenizer=tokenizer)


def _load_folder(path: Path) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"The model in {path} cannot be loaded: {str(error).splitlines()[0]}") from error


def _load_file(path: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a checkpoint in shards.\nMake one file of it first: "
            f"`python -m lightning.fabric.utilities.consolidate_checkpoint {path}`."
        )
    checkpoint = load_checkpoint(path)
    check_contents(checkpoint, str(path), goes_on=False)
    module = LanguageModule()
    module.on_load_checkpoint(checkpoint)
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"The weights in {path} do not fit its model: {error}") from None
    return module.model, checkpoint["packhorse"]


def _tokenizer(path: Path, files: dict[str, bytes] | None, name: str | None) -> TokenizerContent:
    if name is not None:
        return read_tokenizer(locate_tokenizer(name))
    if files is not None:
        return tokenizer_of_files(files)
    if path.is_dir() and any((path / file).exists() for file in TOKENIZER_FILES):
        return read_tokenizer(path)
    raise TokenizerError(f"{path} brings no tokenizer. Give one: `--tokenizer`, a name, a folder or a tokenizer.json.")


def _bos_id(own: dict[str, Any], facts: TokenizerFacts) -> int | None:
    """The token before every text that the model has seen."""
    if "bos_id" in own:
        return own["bos_id"]
    # An older checkpoint: new models had the recipe's in their configuration; what the makers of a pretrained one left
    # there counts only where the tokenizer calls it BOS as well.
    configured = own["config"].get("bos_token_id")
    if configured in (None, facts.bos_id):
        return configured
    return facts.bos_id if facts.adds_bos else None
