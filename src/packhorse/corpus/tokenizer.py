"""A tokenizer's name -> what it is: its content, its vocabulary, and the policy for BOS, EOS and PAD.

A tokenizer is identified by its *content*: the same tokenizer.json under another name is the same tokenizer, a
retrained one under the old name is another. Truncation and padding that somebody left in the file are stripped;
`dropout`, which would give other ids every time, is refused.

Fast tokenizers are read with `tokenizers` alone. transformers is imported only for those that exist in Python
only, or where no tokenizer.json is found.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.corpus.engines import Slow, load_reference, probe_digest
from packhorse.errors import TokenizerError

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
_BEGIN_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|bos|>")
_PADDING = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>")
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")

IdOf = Callable[[str], int | None]
"""A token's id, if it has one."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What decides the ids that a tokenizer gives."""

    kind: str
    """`fast` (a tokenizer.json) or `slow` (Python only)."""
    fingerprint: str
    """SHA-256 of the content, without what is stripped."""
    probe: str
    """SHA-256 of the reference's ids for the probe set."""
    vocab_size: int
    """Largest id + 1, added tokens included."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    """A token for the unused tail of a sequence; its value is never trained on."""
    adds_bos: bool
    """Whether the tokenizer's own template puts BOS before a text (Llama does, GPT-2 and Qwen do not)."""


@dataclass(frozen=True, kw_only=True)
class TokenizerContent:
    """A tokenizer in full: its facts, and the files of a reference copy."""

    facts: TokenizerFacts
    files: dict[str, bytes]
    """File name -> content; `tokenizer.json` is there for fast tokenizers."""

    @property
    def json(self) -> str:
        """The tokenizer.json; empty for a slow tokenizer."""
        return self.files.get("tokenizer.json", b"").decode()


def locate_tokenizer(name: str) -> Path:
    """The local folder that holds the tokenizer called `name`.

    Args:
        name: A folder, a tokenizer.json file, or a name on the Hugging Face hub (`name@revision` pins it).

    Raises:
        TokenizerError: there is no such tokenizer.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".json":
            raise TokenizerError(f"The tokenizer {name} is a file, but not a tokenizer.json.")
        return path
    if path.is_dir():
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith((".json", "/")):
        raise TokenizerError(f"The tokenizer {name} does not exist: no such file or folder.")
    return _download(name)


def raw_digest(path: Path) -> str:
    """SHA-256 of the tokenizer's files as they are: equal means nothing has to be read again."""
    digest = hashlib.sha256()
    for file in _tokenizer_files(path):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def read_tokenizer(path: Path) -> TokenizerContent:
    """Read the tokenizer in a folder (or a tokenizer.json file).

    Raises:
        TokenizerError: the files are damaged, or the tokenizer cannot give the same ids every time.
    """
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.exists():
        return _read_by_transformers(path)
    text = _read(file)
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if path.is_dir() and (path / name).exists():
            config |= _parse(_read(path / name), path / name)
    return _fast(_parse(text, file), config, str(path), text)


def tokenizer_of_files(files: dict[str, bytes]) -> TokenizerContent:
    """Read a tokenizer that was kept as the contents of its files.

    Raises:
        TokenizerError: as `read_tokenizer`.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file, data in files.items():
            (Path(folder) / Path(file).name).write_bytes(data)
        return read_tokenizer(Path(folder))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TokenizerContent:
    """A byte-level BPE tokenizer in the manner of GPT-2, trained on `texts`.

    The same texts give the same tokenizer. `<|endoftext|>` ends a document.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(json.loads(tokenizer.to_str()), {"eos_token": "<|endoftext|>"}, "the trained tokenizer")


def _fast(content: dict[str, Any], config: dict[str, Any], where: str, text: str | None = None) -> TokenizerContent:
    model = content.get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        raise TokenizerError(f"{where} is not a tokenizer: it has no vocabulary.")
    if model.get("dropout"):
        raise TokenizerError(
            f"The tokenizer {where} uses BPE dropout ({model['dropout']}): it would give other ids every time.\n"
            'Set "dropout" to null in its tokenizer.json.'
        )
    if text is None or content.get("truncation") or content.get("padding"):
        content = {**content, "truncation": None, "padding": None}
        text = json.dumps(content, ensure_ascii=False)
    try:
        engine = load_reference(text, True)
    except Exception as error:  # `tokenizers` raises plain Exception
        raise TokenizerError(f"The tokenizer {where} cannot be loaded: {error}") from None
    tokenizer = engine._tokenizer
    id_of = tokenizer.token_to_id
    with_template = tokenizer.encode("a", add_special_tokens=True).ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    template_start = with_template[0] if with_template[:1] != plain[:1] else None
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    bos_id = template_start if template_start is not None else _named(id_of, added, config, "bos_token", _BEGIN_OF_TEXT)
    vocab = model["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    facts = TokenizerFacts(
        kind="fast",
        fingerprint=_fingerprint(content),
        probe=probe_digest(engine),
        vocab_size=max([max(ids), *tokenizer.get_added_tokens_decoder()]) + 1,
        bos_id=bos_id,
        eos_id=_end_of_text(id_of, added, config),
        pad_id=_padding(id_of, added, config),
        adds_bos=bool(config.get("add_bos_token", template_start is not None)) and bos_id is not None,
    )
    special = {"bos_token": facts.bos_id, "eos_token": facts.eos_id, "pad_token": facts.pad_id}
    reference_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokenizer.id_to_token(i) for key, i in special.items() if i is not None},
        "add_bos_token": facts.adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    return TokenizerContent(
        facts=facts,
        files={"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(reference_config).encode()},
    )


def _read_by_transformers(path: Path) -> TokenizerContent:
    """For folders without a tokenizer.json: transformers converts it, or runs it in Python."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:
        raise TokenizerError(
            f"The tokenizer in {path} cannot be loaded: {error}\n"
            "If the folder has none, as that of a model may, name another one: `data.tokenizer`."
        ) from None
    config = {f"{key}_token": getattr(tokenizer, f"{key}_token", None) for key in ("bos", "eos", "pad")}
    if getattr(tokenizer, "is_fast", False):
        return _fast(json.loads(tokenizer.backend_tokenizer.to_str()), config, str(path))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(Path(folder).rglob("*")) if f.is_file()}
        probe = probe_digest(Slow(folder, split_special_tokens=True))
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    plain, with_template = (tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    facts = TokenizerFacts(
        kind="slow",
        fingerprint=digest.hexdigest(),
        probe=probe,
        vocab_size=max(ids.values()) + 1,
        bos_id=tokenizer.bos_token_id,
        eos_id=_end_of_text(ids.get, added, config),
        pad_id=_padding(ids.get, added, config),
        adds_bos=with_template[:1] != plain[:1] and tokenizer.bos_token_id is not None,
    )
    return TokenizerContent(facts=facts, files=files)


def _fingerprint(content: dict[str, Any]) -> str:
    """SHA-256 that does not see how the file is formatted, nor its two ways of writing merges."""
    model = dict(content["model"])
    if isinstance(model.get("merges"), list):
        model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {token: vocab[token] for token in sorted(vocab)}  # much faster here than by `json`
    # How ids become text again does not decide the ids.
    relevant = {key: value for key, value in content.items() if key not in ("decoder", "version")} | {"model": model}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _end_of_text(id_of: IdOf, added: dict[str, int], config: dict[str, Any]) -> int | None:
    """The token after a document. Chat models name their end of *turn* as EOS; text is ended by another."""
    end_of_text = next((added[name] for name in _END_OF_TEXT if name in added), None)
    if _content(config.get("eos_token")) in _END_OF_TURN and end_of_text is not None:
        return end_of_text
    return _named(id_of, added, config, "eos_token", _END_OF_TEXT)


def _padding(id_of: IdOf, added: dict[str, int], config: dict[str, Any]) -> int:
    candidates = (_named(id_of, added, config, "pad_token", _PADDING), _end_of_text(id_of, added, config), 0)
    return next(i for i in candidates if i is not None)


def _named(id_of: IdOf, added: dict[str, int], config: dict[str, Any], key: str, usual: tuple[str, ...]) -> int | None:
    """The token that the configuration names, else a usual name among the *added* tokens.

    An entry "<s>" of the plain vocabulary is a word like any other (Qwen has one).
    """
    named = _content(config.get(key))
    own = id_of(named) if isinstance(named, str) else None
    return own if own is not None else next((added[name] for name in usual if name in added), None)


def _content(token: Any) -> str | None:
    """tokenizer_config.json writes a token as a string or as {"content": ...}."""
    return token.get("content") if isinstance(token, dict) else token


def _tokenizer_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    known = [path / name for name in _FILES if (path / name).exists()]
    if any(file.name == "tokenizer.json" for file in known):
        return known
    small = (f for f in sorted(path.iterdir()) if f.is_file() and f.suffix in (".json", ".model", ".txt", ".py"))
    return [f for f in small if not f.name.endswith(".index.json")]


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"The tokenizer file {file} cannot be read: {error}") from None


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"The tokenizer file {file} is not valid JSON: {error}") from None
    return value


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    patterns = ["tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "config.json"]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # network, name and permission errors of several libraries
        raise TokenizerError(
            f"The tokenizer {name} is neither a local file or folder, nor can it be downloaded from the "
            f"Hugging Face hub:\n  {type(error).__name__}: {(str(error).splitlines() or [''])[0]}\n"
            "Check the name, or give the path of a folder or of a tokenizer.json file."
        ) from None
