"""Everything that can go wrong for a user, in words: what, where, and what to do next.

Every error here ends a command with exit status 2 and deletes nothing. Settings that make no sense raise
`ValueError` where they are set; `assert` is for our own logic.
"""


class PackhorseError(Exception):
    """The base of all errors that are meant for the user."""


class SettingsError(PackhorseError, ValueError):
    """Settings that make no sense together, or with the data."""


class SourceError(PackhorseError, ValueError):
    """A source is missing, unreadable, or is not what the settings say."""


class DocumentTooLongError(SourceError):
    """A document needs more memory than the limit leaves."""


class TokenizerError(PackhorseError, ValueError):
    """A tokenizer cannot be loaded, or does not fit the model or the settings."""


class EngineMismatch(TokenizerError):
    """A fast tokenizer engine gave other ids than the reference for `text`."""

    def __init__(self, engine: str, text: str) -> None:
        super().__init__(f"The engine {engine} gave other ids than the Hugging Face reference for {text[:200]!r}.")
        self.engine, self.text = engine, text


class CacheError(PackhorseError):
    """The base of all errors about a cache on disk."""


class CacheCorruptionError(CacheError):
    """A file of the cache is damaged: it was refused before any of its tokens was used."""


class CacheIncompleteError(CacheError):
    """A chunk that is asked for does not exist (yet)."""


class SnapshotMismatch(CacheError):
    """A cache is not the one that a checkpoint was trained on, or has less than it had."""


class RecipeMismatch(CacheError):
    """A cache folder was built by another recipe than the one asked for."""


class NonDeterministicBuildError(CacheError):
    """Two builds of one chunk gave different tokens; nothing was overwritten."""


class SourceChangedError(CacheError, SourceError):
    """A source is no longer what the plan recorded."""


class StorageFullError(CacheError):
    """The disk is full; what was committed is intact."""


class StorageIOError(CacheError):
    """The disk reported an error; what was committed is intact."""


class CheckpointError(PackhorseError):
    """The base of all errors about a checkpoint."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is damaged: nothing of it was used."""


class DeviceMemoryError(PackhorseError):
    """The model, its optimizer and a micro-batch do not fit into the device."""


class PortInUseError(PackhorseError):
    """The port by which the processes of a training find each other is taken."""


class RankError(PackhorseError):
    """Another process of the training failed."""
