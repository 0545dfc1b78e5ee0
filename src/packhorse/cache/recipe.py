"""How text becomes sequences: the identity of a cache.

Everything that decides the tokens of a chunk, given its documents, is in the recipe; which documents is in the plan.
Two caches with equal recipes may be compared, continued and mixed; with another tokenizer, another sequence length
or another packing a cache is another cache.
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from packhorse.cache import store
from packhorse.cache.regular import read_file
from packhorse.cache.settings import CacheSettings
from packhorse.cache.typed import make, refuse_unless
from packhorse.corpus.filters import normal_filters
from packhorse.corpus.tokenizer import TokenizerContent, TokenizerFacts
from packhorse.errors import CacheCorruptionError, CacheIncompleteError, SettingsError, TokenizerError

FORMAT = 1
"""The version of the folder, the chunk files and the records. Readers refuse what they do not know."""

MAX_BYTES = 2**20
"""A larger recipe.json is refused unread."""

MAX_TOKENIZER_BYTES = 2**30

_PLAIN = re.compile(r"\A(?!\.\.?\Z)[\w.+ -]+\Z")
"""What a part of a file's name may be: no way out of the folder."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How text becomes sequences. All fields are plain, so that the recipe has one canonical form."""

    format: int = FORMAT
    tokenizer: str
    """Fingerprint of the tokenizer's content."""
    tokenizer_probe: str
    """SHA-256 of the ids that the reference gives for the probe set."""
    vocab_size: int
    bos_id: int | None
    """The token before every document, None for none; documents of ids that are final have their own."""
    eos_id: int | None
    """The same after it."""
    pad_id: int
    split_special_tokens: bool
    text_column: str
    sample_by: str
    sequence_length: int
    packing: str
    eval_share: float
    overlap: int = 0
    """For `window`: tokens that neighbouring pieces of a document share."""
    long_documents: str = "split"
    filters: tuple[str, ...] = ()
    """In their normal form."""
    deduplicate: str = "none"

    @property
    def canonical(self) -> dict[str, Any]:
        """The fields as plain values, but for defaults: recipes keep their digest when fields are added."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {f.name: value for f, value in values if f.name == "format" or value != f.default}

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return hashlib.sha256(store.canonical(self.canonical)).hexdigest()

    @property
    def token_policy(self) -> dict[str, Any]:
        """How documents become tokens: the arguments of `corpus.tokens.tokenize`."""
        return {name: getattr(self, name) for name in ("bos_id", "eos_id", "eval_share", "vocab_size")}

    @property
    def id(self) -> str:
        """Short form of the digest, for folder names."""
        return self.digest[:12]

    def differences(self, other: "Recipe") -> list[tuple[str, Any, Any]]:
        """Fields with other values: (name, here, there)."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [(name, here, there) for name, here, there in pairs if here != there]


def make_recipe(settings: CacheSettings, tokenizer: TokenizerFacts) -> Recipe:
    """The recipe that the settings ask for.

    Raises:
        TokenizerError: the tokenizer has no token that the settings need.
    """
    add_bos = tokenizer.adds_bos if settings.add_bos is None else settings.add_bos
    for wanted, token, name, key in (
        (add_bos, tokenizer.bos_id, "beginning-of-text", "bos"),
        (settings.add_eos, tokenizer.eos_id, "end-of-text", "eos"),
    ):
        if wanted and token is None:
            raise TokenizerError(
                f"The tokenizer names no {name} token.\n"
                f"Name it in its tokenizer_config.json (`{key}_token`), or set `add_{key}: false`."
            )
    return Recipe(
        tokenizer=tokenizer.fingerprint,
        tokenizer_probe=tokenizer.probe,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id if add_bos else None,
        eos_id=tokenizer.eos_id if settings.add_eos else None,
        pad_id=tokenizer.pad_id,
        split_special_tokens=settings.split_special_tokens,
        text_column=settings.text_column,
        sample_by=settings.sample_by,
        sequence_length=settings.sequence_length,
        packing=settings.packing,
        eval_share=float(settings.eval_share),
        overlap=settings.overlap,
        long_documents=settings.long_documents,
        filters=normal_filters(settings.filters),
        deduplicate=settings.deduplicate,
    )


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What recipe.json says: it makes a folder a cache."""

    recipe: Recipe
    tokenizer_name: str
    """As the user wrote it; another name with equal content is the same tokenizer."""
    tokenizer_files: dict[str, str]
    """Name -> SHA-256 of the files of the reference copy."""


def create(folder: Path, recipe: Recipe, content: TokenizerContent, name: str) -> None:
    """Make a folder a cache: the recipe comes last."""
    for file_name, data in content.files.items():
        path = folder / "tokenizer" / file_name
        store.make_folder(path.parent)
        if not store.publish(path, data) and not store.holds(path, hashlib.sha256(data).hexdigest()):
            store.quarantine(path, folder)
            store.publish(path, data)
    files = {file_name: hashlib.sha256(data).hexdigest() for file_name, data in content.files.items()}
    value = {"recipe": recipe.canonical, "tokenizer_name": name, "tokenizer_files": files}
    store.publish(folder / "recipe.json", store.seal(value))


def read_identity(folder: Path) -> Identity:
    """What the cache in a folder is.

    Raises:
        CacheIncompleteError: there is no cache.
        CacheCorruptionError: its recipe.json is damaged, or of a format that is not known.
    """
    path = folder / "recipe.json"
    try:
        value = store.read_sealed(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        inside = [path.parent.name for path in sorted(folder.glob("*/recipe.json"))[:5]]
        hint = f"It holds caches: {', '.join(inside)}. Name one." if inside else "`packhorse cache build` makes it."
        raise CacheIncompleteError(f"There is no cache in {folder} yet. {hint}") from None
    recipe = value.get("recipe")
    if isinstance(recipe, dict) and recipe.get("format") != FORMAT:
        raise CacheCorruptionError(
            f"{path} has format {recipe.get('format')!r:.20}; this version of packhorse reads format {FORMAT}."
        )
    identity = make(Identity, value, path, "a recipe")
    try:
        filters = normal_filters(identity.recipe.filters)
    except SettingsError as error:
        raise CacheCorruptionError(f"{path} is not a recipe: {error}") from None
    refuse_unless(filters == identity.recipe.filters, path, "a recipe", "its filters are not in their normal form")
    _refuse_nonsense(identity, path)
    return identity


def _refuse_nonsense(identity: Identity, path: Path) -> None:
    recipe, what = identity.recipe, "a recipe"
    hints = get_type_hints(CacheSettings)
    for name in ("packing", "sample_by", "long_documents", "deduplicate"):
        value = getattr(recipe, name)
        refuse_unless(value in get_args(hints[name]), path, what, f"{name} is {value!r:.100}")
    length, size = recipe.sequence_length, recipe.vocab_size
    refuse_unless(1 < length <= 131_072, path, what, f"sequence_length is {length}")
    refuse_unless(recipe.overlap < length, path, what, f"overlap is {recipe.overlap}")
    refuse_unless(0 < size <= 2**32, path, what, f"vocab_size is {size}")
    refuse_unless(0 <= recipe.eval_share < 1, path, what, f"eval_share is {recipe.eval_share}")
    for name in ("bos_id", "eos_id", "pad_id"):
        value = getattr(recipe, name)
        refuse_unless(value is None or value < size, path, what, f"{name} is {value} in a vocabulary of {size}")
    for name in identity.tokenizer_files:
        is_plain = all(_PLAIN.match(part) for part in name.split("/"))
        refuse_unless(is_plain, path, what, f"a file of a tokenizer cannot be called {name!r:.100}")


def tokenizer_json(folder: Path, identity: Identity) -> str:
    """The tokenizer.json of a cache, verified; empty for a tokenizer that exists in Python only.

    Raises:
        CacheCorruptionError: a file of the copy is damaged or missing.
    """
    if strangers := strange_files(folder, identity):
        raise CacheCorruptionError(f"{strangers[0]} is not a file of this cache's tokenizer. Move it away.")
    content = {
        name: verified_file(folder / "tokenizer" / name, digest) for name, digest in identity.tokenizer_files.items()
    }
    return content.get("tokenizer.json", b"").decode()


def strange_files(folder: Path, identity: Identity) -> list[Path]:
    """What lies beside the files of the tokenizer's copy: transformers might read it."""
    root = folder / "tokenizer"
    paths = (path for path in sorted(root.rglob("*")) if not path.is_dir() or path.is_symlink())
    known = {root / name for name in identity.tokenizer_files}
    return [path for path in paths if path not in known and not path.name.startswith(store.TEMPORARY)]


def verified_file(path: Path, sha256: str) -> bytes:
    """The content of a file of the tokenizer's copy.

    Raises:
        CacheCorruptionError: it is damaged or missing.
    """
    with suppress(FileNotFoundError, NotADirectoryError, CacheCorruptionError):
        data = read_file(path, MAX_TOKENIZER_BYTES)
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    raise CacheCorruptionError(
        f"{path} is damaged or missing; no text was tokenized with it.\n"
        "`packhorse cache repair --config ...` takes it from the tokenizer of the settings again."
    )
