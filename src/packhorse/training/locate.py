"""A checkpoint's name -> the file or folder that holds it.

    runs/mine/version_3/checkpoints/step=00000500.ckpt   itself
    runs/mine/version_3, runs/mine                       a run, or several: the newest checkpoint in it
    latest, last                                         the newest checkpoint of all runs
    runs/mine/latest, runs/mine/last                     the same as runs/mine
    models/llama                                         a transformers folder (config.json and weights): itself

The newest is the one that was written last. A sharded checkpoint is a folder `*.ckpt`, and a whole.
"""

from pathlib import Path

from packhorse.errors import SettingsError

NEWEST = ("latest", "last")
"""Names for the newest checkpoint of a folder."""


def resolve_checkpoint(name: str, runs: Path) -> Path:
    """The checkpoint that a name means: a Lightning file, a folder of shards `*.ckpt`, or a transformers folder.

    Args:
        name: See the top of this file.
        runs: The folder of all runs, where `latest` is looked for.

    Raises:
        SettingsError: there is none, or the name means something that is no checkpoint.
    """
    path = Path(name).expanduser()
    if name in NEWEST and not path.exists():
        return _newest(runs, name)
    if path.name in NEWEST and not path.exists():
        path = path.parent
    if not path.exists():
        raise SettingsError(
            f"The checkpoint {name} does not exist.\nThe path is relative to {Path.cwd()}; `latest` is the newest "
            f"checkpoint in {runs}."
        )
    if path.is_file() or path.suffix == ".ckpt":
        return path
    return path if is_transformers_folder(path) else _newest(path, name)


def is_transformers_folder(path: Path) -> bool:
    """Whether `from_pretrained` would find a model here."""
    weights = (path.glob(pattern) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    return (path / "config.json").is_file() and any(any(files) for files in weights)


def _newest(folder: Path, name: str) -> Path:
    found = [path for path in folder.rglob("*.ckpt") if not any(part.suffix == ".ckpt" for part in path.parents)]
    if not found:
        raise SettingsError(
            f"The checkpoint {name} cannot be found: {folder.absolute()} holds no *.ckpt file, and no config.json with "
            "weights.\nGive a file, the folder of a run, `latest`, or a folder that `save_pretrained` wrote."
        )
    # `last.ckpt` is often a link to another of them: of two names for one file, the one that says what it is.
    return max(found, key=lambda path: (path.stat().st_mtime_ns, not path.is_symlink(), path.name))
