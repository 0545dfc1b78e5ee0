"""Who is building which chunk: so that several builders of one folder do not do the same work twice.

    claims/<builder>.lease         held and refreshed by a builder while it lives (`filelock.SoftFileLease`)
    claims/<builder>.json          what it tells about itself: host, process, rate
    claims/<chunk>.claim           the name of the builder that has the chunk in hand

A claim is worth as much as the lease of its builder. The lease of a builder of this machine whose process is gone is
free at once, any other when it was not refreshed for a minute of the observer's own clock. Nothing that is right or
wrong depends on any of this: two builders of one chunk give the same bytes. So nothing here is synced to the disk, and
where leases cannot be had, builders only do some work twice.
"""

import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhorse.cache import store
from packhorse.errors import CacheError

LEASE_SECONDS = 60.0
"""A lease that is not refreshed for so long is free; it is refreshed three times as often."""

ASK_SECONDS = 1.0
"""How long it is believed that a builder lives, before its lease is looked at again."""


@dataclass(frozen=True, kw_only=True)
class LiveBuilder:
    """A builder that is at work, as others see it."""

    name: str
    heartbeat_seconds: float
    """Since it was last heard of."""
    chunks: list[int] = field(default_factory=list)
    """Those that it has in hand."""
    tells: dict[str, Any] = field(default_factory=dict)
    """What it says about itself: host, pid, started, chunks, and rates per second."""


class Claims:
    """The claims of one builder, and what it sees of those of others.

    Args:
        folder: The cache.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "claims"
        host = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname())[:60] or "host"
        self._identity = {"host": host, "pid": os.getpid(), "started": time.time()}
        self.name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._lease = None
        self._mine: set[int] = set()
        self._seen: dict[str, tuple[float, Any]] = {}  # builder -> until when it is believed to live, its lease

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            # What went wrong before is what the user must hear of.
            with suppress(*[CacheError, OSError] if kind else []):
                for chunk in list(self._mine):
                    self.drop(chunk)
                store.remove(self._note)
        finally:
            if self._lease is not None:
                self._lease.release(force=True)

    def take(self, chunk: int) -> bool:
        """Claim a chunk; False when a builder that lives has it in hand."""
        self._hold_lease()
        path, content = self._path(chunk), self.name.encode()
        if not store.note(path, content, over=False):
            owner = self.owner(chunk)
            if self.is_alive(owner):
                return owner == self.name
            # Its builder is dead. Who is last of several that come at once has it.
            store.note(path, content, over=True)
            if self.owner(chunk) != self.name:
                return False
        self._mine.add(chunk)
        return True

    def drop(self, chunk: int) -> None:
        """Give a chunk up: it is built, or will not be."""
        if chunk in self._mine:
            self._mine.remove(chunk)
            if self.owner(chunk) == self.name:
                store.remove(self._path(chunk))

    def tell(self, values: dict[str, Any]) -> None:
        """Let others know how it goes."""
        if self._lease is not None:
            with suppress(CacheError, OSError):
                store.note(self._note, json.dumps({**self._identity, **values}).encode(), over=True)

    def owner(self, chunk: int) -> str:
        """The name of the builder that claims a chunk, "" for none."""
        try:
            return self._path(chunk).read_text("ascii", "replace")[:200]
        except OSError:
            return ""

    def is_alive(self, name: str) -> bool:
        """Whether the builder of that name is at work."""
        path = self.root / f"{name}.lease"
        if name == self.name:
            return True
        if not re.fullmatch(r"[A-Za-z0-9.-]+", name) or not path.exists():
            return False
        until, lease = self._seen.get(name) or (0.0, _lease_of(path))
        if time.monotonic() < until:
            return True
        if _acquire(lease):
            lease.release(force=True)
            self._seen.pop(name, None)
            return False
        self._seen[name] = time.monotonic() + ASK_SECONDS, lease
        return True

    def builders(self) -> list[LiveBuilder]:
        """All builders that are at work."""
        chunks: dict[str, list[int]] = {}
        for chunk in self._claimed():
            chunks.setdefault(self.owner(chunk), []).append(chunk)
        live = []
        for path in sorted(self.root.glob("*.lease")) if self.root.is_dir() else []:
            with suppress(FileNotFoundError):
                if self.is_alive(path.stem):
                    age = max(0.0, time.time() - path.stat().st_mtime)
                    mine = chunks.get(path.stem, [])
                    live.append(
                        LiveBuilder(
                            name=path.stem, heartbeat_seconds=age, chunks=mine, tells=_read(path.stem, self.root)
                        )
                    )
        return live

    def sweep(self) -> None:
        """Remove what dead builders left."""
        for chunk in self._claimed():
            if not self.is_alive(self.owner(chunk)):
                store.remove(self._path(chunk))
        for path in self.root.glob("*.json") if self.root.is_dir() else []:
            if not self.is_alive(path.stem):
                store.remove(path)

    def _hold_lease(self) -> None:
        if self._lease is not None and self._lease.compromise is None:
            return
        store.make_folder(self.root)
        if self._lease is not None:
            # Lost, after a long stop: others may have taken over what is in hand here, which does no harm.
            self._lease.release(force=True)
        self._lease = _lease_of(self.root / f"{self.name}.lease")
        _acquire(self._lease)

    def _claimed(self) -> list[int]:
        paths = self.root.glob("*.claim") if self.root.is_dir() else []
        return sorted(int(path.stem) for path in paths if path.stem.isdigit())

    @property
    def _note(self) -> Path:
        return self.root / f"{self.name}.json"

    def _path(self, chunk: int) -> Path:
        return self.root / f"{chunk:08d}.claim"


def _lease_of(path: Path):
    from filelock import SoftFileLease

    return SoftFileLease(str(path), lease_duration=LEASE_SECONDS, thread_local=False)


def _acquire(lease) -> bool:
    """Try once. Who cannot even try holds nothing, and may take what others hold: that only costs work."""
    from filelock import Timeout

    try:
        lease.acquire(timeout=0)
    except Timeout:
        return False
    except (OSError, RuntimeError, ValueError):
        return True
    return True


def _read(name: str, root: Path) -> dict[str, Any]:
    """What a builder tells about itself; zeros where that is nothing, or makes no sense."""
    try:
        value = json.loads((root / f"{name}.json").read_bytes()[:10_000])
    except (OSError, ValueError, RecursionError):
        value = {}
    value = value if isinstance(value, dict) else {}
    numbers = ("pid", "started", "chunks", "documents_per_second", "tokens_per_second", "bytes_per_second")
    read = {name: value.get(name) for name in numbers}
    kept = {name: item if type(item) in (int, float) and 0 <= item < 2**53 else 0 for name, item in read.items()}
    return {"host": str(value.get("host", name))[:100], **kept}
