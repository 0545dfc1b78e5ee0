"""A checkpoint's name -> the file or folder that holds it.

    runs/mine/version_3/checkpoints/step=00000500.ckpt   itself
    runs/mine/version_3, runs/mine                       a run, or several: the newest checkpoint in it
    latest, last                                         the newest checkpoint of all runs
    runs/mine/latest, runs/mine/last                     the same as runs/mine
    models/llama                                         a transformers folder (config.json and weights): itself

The newest is the one that was written last and is sound: damaged ones are skipped, and that is said. A sharded
checkpoint is a folder `*.ckpt`, and a whole.
"""

from pathlib import Path

from packhorse.cache.progress import say
from packhorse.errors import CheckpointCorruptError, SettingsError
from packhorse.training.checkpoint_file import is_sound

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


def find_checkpoint(name: str, runs: Path) -> str | None:
    """The checkpoint that a run goes on from; `auto` is `last`, or None when there is none yet.

    Args:
        name: As for `resolve_checkpoint`, `auto`, or an address with `://`, which is left as it is.
        runs: The folder of this run and its earlier versions.
    """
    if "://" in name:
        return name
    if name == "auto":
        try:
            return str(_newest(runs, "last"))
        except SettingsError:
            say(f"There is no checkpoint in {runs} yet: the run begins at step 0.")
            return None
    path = resolve_checkpoint(name, runs)
    if is_transformers_folder(path):
        raise SettingsError(
            f"{path} holds a model, but not the state of a run.\nTo begin a new run from it, set `model.pretrained`."
        )
    if name != str(path):
        say(f"`{name}` is {path}.")
    return str(path)


def is_transformers_folder(path: Path) -> bool:
    """Whether `from_pretrained` would find a model here."""
    weights = (path.glob(pattern) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    return (path / "config.json").is_file() and any(any(files) for files in weights)


def _newest(folder: Path, name: str) -> Path:
    found = [path for path in folder.rglob("*.ckpt") if path.exists() and path.parent.suffix != ".ckpt"]
    if not found:
        raise SettingsError(
            f"The checkpoint {name} cannot be found: {folder.absolute()} holds no *.ckpt file, and no config.json with "
            "weights.\nGive a file, the folder of a run, `latest`, or a folder that `save_pretrained` wrote."
        )
    # `last.ckpt` is often a link to another of them: of two names for one file, the one that says what it is.
    found.sort(key=lambda path: (path.stat().st_mtime_ns, not path.is_symlink(), path.name), reverse=True)
    for path in found:
        if _is_whole(path):
            return path
        say(f"Skipped {path}: it is damaged or cut short.")
    raise CheckpointCorruptError(f"All {len(found)} checkpoints in {folder.absolute()} are damaged.")


def _is_whole(path: Path) -> bool:
    # The shards' own index is written last.
    return (path / ".metadata").is_file() if path.is_dir() else is_sound(path)
