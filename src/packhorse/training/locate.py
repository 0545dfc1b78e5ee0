"""A checkpoint's name -> the file or folder that holds it.

    runs/mine/version_3/checkpoints/step=00000500.ckpt   itself
    runs/mine/version_3, runs/mine                       a run, or several: the newest checkpoint in it
    latest, last                                         the newest checkpoint of all runs
    runs/mine/latest, runs/mine/last                     the same as runs/mine
    models/llama                                         a transformers folder (config.json and weights): itself

The newest is the one that was written last and is sound: damaged ones are skipped, and that is said; where a run shall
go on, also those that hold weights only. A sharded checkpoint is a folder `*.ckpt`, and a whole.
"""

from pathlib import Path

from packhorse.cache.progress import say
from packhorse.errors import CheckpointCorruptError, CheckpointError, SettingsError
from packhorse.training.checkpoint_file import is_sound
from packhorse.training.checkpoint_io import read_outline
from packhorse.training.compatibility import check_contents

NEWEST = ("latest", "last")
"""Names for the newest checkpoint of a folder."""


def resolve_checkpoint(name: str, runs: Path, *, goes_on: bool = False) -> Path:
    """The checkpoint that a name means: a Lightning file, a folder of shards `*.ckpt`, or a transformers folder.

    Args:
        name: See the top of this file.
        runs: The folder of all runs, where `latest` is looked for.
        goes_on: Whether the newest is one that a run can go on from.

    Raises:
        SettingsError: there is none, or the name means something that is no checkpoint.
    """
    path = Path(name).expanduser()
    if name in NEWEST and not path.exists():
        return _newest(runs, name, goes_on)
    if path.name in NEWEST and not path.exists():
        path = path.parent
    if not path.exists():
        raise SettingsError(
            f"The checkpoint {name} does not exist.\nThe path is relative to {Path.cwd()}; `latest` is the newest "
            f"checkpoint in {runs}."
        )
    if path.is_file() or path.suffix == ".ckpt":
        return path
    return path if is_transformers_folder(path) else _newest(path, name, goes_on)


def find_checkpoint(name: str, runs: Path | None, *, goes_on: bool = True) -> str | None:
    """The checkpoint that a command of the Trainer begins with; `auto` is `last`, or None when there is none yet.

    Args:
        name: As for `resolve_checkpoint`, `auto`, or an address with `://`, which is left as it is.
        runs: The folder of this run and its earlier versions; None if they are not in a folder.
        goes_on: Whether a run goes on from it; otherwise weights are enough.

    Raises:
        SettingsError: there is none, or nobody can look for it.
        CheckpointError: it is not of a Packhorse run, or holds too little.
    """
    if "://" in name:
        return name
    if runs is None:
        if name in ("auto", *NEWEST):
            raise SettingsError(
                f"`--ckpt_path {name}` looks in folders, but the checkpoints of this run are kept at an address.\n"
                "Give that of one of them, or set `checkpoint.dirpath` to a folder."
            )
        runs = Path()
    if name == "auto":
        try:
            return str(_newest(runs, "last", goes_on))
        except SettingsError:
            say(f"There is no checkpoint in {runs} yet: the run begins at step 0.")
            return None
    path = resolve_checkpoint(name, runs, goes_on=goes_on)
    if is_transformers_folder(path):
        raise SettingsError(
            f"{path} holds a model, but not the state of a run.\nTo begin a new run from it, set `model.pretrained`."
        )
    _check(path, goes_on=goes_on)
    if name != str(path):
        say(f"`{name}` is {path}.")
    return str(path)


def is_transformers_folder(path: Path) -> bool:
    """Whether `from_pretrained` would find a model here."""
    weights = (path.glob(pattern) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    return (path / "config.json").is_file() and any(any(files) for files in weights)


def _newest(folder: Path, name: str, goes_on: bool) -> Path:
    damaged = 0
    for path in _checkpoints_in(folder, name):
        if not _is_whole(path):
            damaged += 1
            say(f"Skipped {path}: it is damaged or cut short.")
        elif not goes_on or _holds_run(path):
            return path
    if damaged:
        raise CheckpointCorruptError(f"All {damaged} checkpoints in {folder.absolute()} are damaged.")
    raise SettingsError(
        f"The checkpoint {name} cannot be found: those in {folder.absolute()} do not hold the state of a run.\n"
        "To begin a new run with their weights, `export` them to a folder and set `model.pretrained` to it."
    )


def _checkpoints_in(folder: Path, name: str) -> list[Path]:
    """Newest first."""
    found = [path for path in folder.rglob("*.ckpt") if path.exists() and path.parent.suffix != ".ckpt"]
    if not found:
        raise SettingsError(
            f"The checkpoint {name} cannot be found: {folder.absolute()} holds no *.ckpt file, and no config.json with "
            "weights.\nGive a file, the folder of a run, `latest`, or a folder that `save_pretrained` wrote."
        )
    # `last.ckpt` is often a link to another of them: of two names for one file, the one that says what it is.
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, not path.is_symlink(), path.name), reverse=True)


def _is_whole(path: Path) -> bool:
    # The shards' own index is written last.
    return (path / ".metadata").is_file() if path.is_dir() else is_sound(path)


def _holds_run(path: Path) -> bool:
    try:
        _check(path, goes_on=True)
    except CheckpointError as error:
        say(f"Skipped: {str(error).splitlines()[0]}")
        return False
    return True


def _check(path: Path, *, goes_on: bool) -> None:
    if (outline := read_outline(path)) is not None:
        check_contents(outline, str(path), goes_on=goes_on)
