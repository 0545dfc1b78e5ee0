"""The log of a disk -> every state that a power cut may leave.

What a file holds is safe once the file was synced, a name once its folder was. All else is lost, kept, or kept in part:

    content   of each write since the last sync: everything, the first half, zeros, or nothing
    names     of the changes in a folder since its last sync: any subset, applied in their order
    a rename  within a folder is atomic; between two folders each side goes its own way

A folder whose own name is lost is lost with all that is in it.
"""

import itertools
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

PARTS = ("all", "half", "zeros", "none")


class File:
    """The content of a file, as far as it is safe, and what was written since."""

    def __init__(self, safe: bytes = b"") -> None:
        self.safe, self.writes = safe, []

    def sync(self) -> None:
        """All of it is safe now."""
        self.safe, self.writes = self.content, []

    @property
    def content(self) -> bytes:
        """As processes see it."""
        return self.safe + b"".join(self.writes) if self.writes else self.safe

    def after(self, parts: tuple[str, ...]) -> bytes:
        """What is left when of each unsafe write this much was kept."""
        content, place = self.safe, len(self.safe)
        for part, data in zip(parts, self.writes, strict=True):
            kept = {"all": data, "half": data[: len(data) // 2], "zeros": bytes(len(data)), "none": b""}[part]
            if kept:
                content += bytes(place - len(content)) + kept
            place += len(data)
        return content


Change = dict[str, File | str | None]
"""Path -> file; None for a folder, GONE for nothing. All of it happens at once."""

GONE = "gone"

Tree = dict[str, tuple[File | None, bytes]]
"""Path -> file (None for a folder) and its content."""


class PowerCut:
    """A disk, seen as what a power cut would leave of it.

    Args:
        root: What lies there now is safe.
    """

    def __init__(self, root: Path) -> None:
        self.safe: Change = {str(root): None}
        for path in root.rglob("*"):
            self.safe[str(path)] = None if path.is_dir() else File(path.read_bytes())
        self.now = dict(self.safe)
        """As processes see it."""
        self.unsafe: list[tuple[str, Change]] = []
        """Folders, and what was changed in them and not synced."""
        self.there: dict[str, list[File | None]] = {}
        """Path -> the files that may be there, since the store promised one."""
        self.gone: list[tuple[str, File]] = []
        """Paths, and files that are no longer there, as the store promised."""

    def do(self, operation: str, path: str, *more) -> None:
        """One more entry of the log of a disk."""
        match operation:
            case "create":
                self._change({path: File()})
            case "mkdir":
                self._change({path: None})
            case "link":
                self._change({more[0]: self.now[path]})
            case "unlink":
                self._change({path: GONE})
            case "rename" if Path(path).parent == Path(more[0]).parent:
                self._change({more[0]: self.now[path], path: GONE})
            case "rename":
                moved = {name: file for name, file in self.now.items() if name == path or name.startswith(f"{path}/")}
                self._change({more[0] + name.removeprefix(path): file for name, file in moved.items()})
                self._change(dict.fromkeys(moved, GONE))
            case "write":
                self.now[path].writes.append(more[0])
            case "fsync" if self.now[path] is None:
                for change in [change for folder, change in self.unsafe if folder == path]:
                    _apply(change, self.safe)
                self.unsafe = [entry for entry in self.unsafe if entry[0] != path]
            case "fsync":
                self.now[path].sync()
            case "moved":
                self.there[more[0]] = [self.now[more[0]]]
                if self.now[more[0]] is not None:
                    self.gone.append((path, self.now[more[0]]))
            case "there":
                self.there[path] = [self.now[path]]
            case "settled":
                self.there |= {name: [file] for name, file in self.now.items() if _is_settled(name, path)}

    def states(self, most: int, draw: random.Random) -> Iterator[Tree]:
        """What may be left; a random choice if that is more than `most`."""
        files = {id(f): f for f in self.now.values() if isinstance(f, File) and f.writes}.values()
        choices = [(False, True) for _ in self.unsafe]
        choices += [tuple(itertools.product(PARTS, repeat=len(file.writes))) for file in files]
        if math.prod(map(len, choices)) <= most:
            picks = itertools.product(*choices)
        else:
            picks = (tuple(map(draw.choice, choices)) for _ in range(most))
        for pick in picks:
            changes = [change for (_, change), kept in zip(self.unsafe, pick, strict=False) if kept]
            contents = {id(f): f.after(parts) for f, parts in zip(files, pick[len(self.unsafe) :], strict=True)}
            yield self._tree(changes, contents)

    def broken(self, tree: Tree) -> list[str]:
        """The promises of the store that a state breaks."""
        found = []
        for path, files in self.there.items():
            if not any(tree.get(path) == (file, b"" if file is None else file.content) for file in files):
                found.append(f"{path} is not what was promised")
        return found + [f"{path} came back" for path, file in self.gone if path in tree and tree[path][0] is file]

    def _change(self, change: Change) -> None:
        _apply(change, self.now)
        self.unsafe.append((str(Path(next(iter(change))).parent), change))
        for path, file in change.items():
            if file is GONE:
                self.there.pop(path, None)
            elif path in self.there:
                self.there[path].append(file)

    def _tree(self, changes: list[Change], contents: dict[int, bytes]) -> Tree:
        names = dict(self.safe)
        for change in changes:
            _apply(change, names)
        tree: Tree = {}
        root = next(iter(self.safe))
        for path in sorted(names):
            file = names[path]
            if path == root or tree.get(path.rpartition("/")[0], (GONE,))[0] is None:
                tree[path] = (None, b"") if file is None else (file, contents.get(id(file), file.content))
        return tree


def write_tree(tree: Tree, root: Path, target: Path) -> None:
    """Make a folder hold what is left of `root`; when it is looked at, nothing is young any more."""
    for path, (file, content) in tree.items():
        place = target / Path(path).relative_to(root)
        place.mkdir() if file is None else place.write_bytes(content)
        os.utime(place, (0, 0))


def _is_settled(name: str, folder: str) -> bool:
    # What a dead repair left of its scratch is of no use to anybody.
    is_left = any(part in name for part in (".tmp-", "/claims", "/spool/repair-"))
    return name.startswith(f"{folder}/") and not is_left


def _apply(change: Change, names: Change) -> None:
    for path, file in change.items():
        if file is GONE:
            names.pop(path, None)
        else:
            names[path] = file
