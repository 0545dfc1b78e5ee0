"""Chunk numbers -> records: the processes that build.

One builder is a thread of the calling process, the others are plain subprocesses, started once and fed one chunk after
the other. Each is pinned to one core before it loads anything that has threads of its own (the only cap that every
tokenizer engine obeys). A builder reads, tokenizes, packs, compresses, hashes and writes; between processes only small
messages travel: JSON lines, a job down, progress and a record up.

A worker whose parent is gone stops with its next message, or where its input ends; what it was writing to the disk then
is still committed. One that is killed leaves a temporary file.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packhorse import errors
from packhorse.errors import PackhorseError

OnProgress = Callable[[int, int, int], None]


def usable_cores() -> list[int]:
    """The cores that this process may use, one of each physical core, within a container's quota."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    physical: dict[str, int] = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            physical.setdefault(siblings.read_text(), core)
        except OSError:
            physical.setdefault(str(core), core)
    cores = list(physical.values())
    return cores[: max(1, int(_quota(len(cores))))]


def pin(core: int) -> None:
    """Keep the calling thread, and those that it starts, on one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {core})


_early: list[subprocess.Popen] = []
"""A process that was started before it was known whether anybody needs it."""


@contextmanager
def one_early() -> Iterator[None]:
    """Start a process at once, where there is a core for it: it imports while the caller still reads its command.

    The next `Workers` take it, or end it when they want none.
    """
    cores = usable_cores()
    if len(cores) > 1:
        _early.append(_launch(cores[1]))
    try:
        yield
    finally:
        _end_early()


def _end_early() -> None:
    while _early:
        worker = _early.pop()
        worker.kill()
        worker.wait()


class Workers:
    """The builders of a cache: this process, and others beside it.

    Others begin to import what they need as soon as they exist, while the caller is still planning. The one in this
    process is a thread: it shares what the caller has loaded already, so a small build is not mostly start-up.

    Args:
        num_workers: How many builders; 0 builds in the calling thread.
    """

    def __init__(self, num_workers: int) -> None:
        self._cores = usable_cores()
        self._number = num_workers
        self._messages: queue.Queue = queue.Queue()
        self._others = {i: _start(self._cores[i % len(self._cores)], i, self._messages) for i in range(1, num_workers)}
        _end_early()
        self._here: queue.Queue = queue.Queue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def stop(self) -> None:
        """End all builders. Whoever is idle has nothing to lose; whoever is not leaves a temporary file."""
        self._stopped = True
        for worker in self._others.values():
            worker.kill()
        for worker in self._others.values():
            worker.wait()
        if self._thread is not None:
            self._here.put(None)
            self._thread.join()

    def prepare(self, tokenizer_json: Path, split_special_tokens: bool) -> None:
        """Let the others load the tokenizer in a file, which they will probably be asked to use."""
        for worker in self._others.values():
            _send(worker, {"tokenizer": str(tokenizer_json), "split_special_tokens": split_special_tokens})

    def run(
        self,
        jobs: Iterable[Any],
        folder: Path,
        engine: str,
        compression: str,
        read_back: bool,
        on_progress: OnProgress,
        on_record: Callable[[Any, dict[str, float]], None],
        tell: Callable[[str], None],
    ) -> None:
        """Build chunks.

        Args:
            jobs: `build.Job`s; taken when a builder is about to be free.
            folder: The cache.
            engine: What is to tokenize: `auto`, `fastokens` or `hf`.
            compression: How hard LZ4 works.
            read_back: Read what was written again before it counts.
            on_progress: Called with (documents, tokens, bytes of text) while chunks are made.
            on_record: Called with each committed record and the seconds that it took by phase.
            tell: Takes messages for the user, each once.

        Raises:
            PackhorseError: what went wrong in a builder. Chunks that were committed stay.
        """
        from packhorse.cache.build import Builder

        if not self._number:
            builder = None
            for job in jobs:
                builder = builder or Builder(folder, engine, compression, read_back, tell)
                on_record(*builder.make(job, on_progress)())
            return
        jobs, running, told = iter(jobs), 0, set()
        if self._thread is None:
            setting = (folder, engine, compression, read_back)
            self._thread = threading.Thread(target=self._build_here, args=setting, daemon=True)
            self._thread.start()

        def give(number: int) -> int:
            job = next(jobs, None)
            if job is None:
                return 0
            if number == 0:
                self._here.put(job)
            else:
                setting = {"folder": str(folder), "engine": engine, "compression": compression, "read_back": read_back}
                _send(self._others[number], {**setting, "job": asdict(job)})
            return 1

        for number in range(self._number):
            running += give(number)
        begun: set[int] = set()
        while running:
            number, message = self._messages.get()
            if "progress" in message:
                on_progress(*message["progress"])
                # Two at a time: one is built while the one before is written to the disk. Not before a builder has
                # loaded what it needs: who is ready first takes more.
                if number not in begun:
                    begun.add(number)
                    running += give(number)
            elif "record" in message:
                on_record(message["record"], message["seconds"])
                running += give(number) - 1
            elif "tell" in message:
                if message["tell"] not in told:
                    tell(message["tell"])
                told.add(message["tell"])
            else:
                raise _error(message)

    def _build_here(self, folder: Path, engine: str, compression: str, read_back: bool) -> None:
        """The life of the builder in this process."""
        from packhorse.cache.build import Builder, Job, build_all

        # The affinity of this thread alone, and of those that the engine starts from it.
        pin(self._cores[0])

        def say(**message) -> None:
            self._messages.put((0, message))

        def jobs() -> Iterator[tuple[Builder, Job]]:
            builder = None
            while (job := self._here.get()) is not None and not self._stopped:
                builder = builder or Builder(folder, engine, compression, read_back, lambda text: say(tell=text))
                yield builder, job

        build_all(
            jobs(),
            lambda *done: say(progress=done),
            lambda record, seconds: say(record=record, seconds=seconds),
            lambda error: say(exception=error),
        )


def _start(core: int, number: int, messages: queue.Queue) -> subprocess.Popen:
    worker = _early.pop() if number == 1 and _early else _launch(core)
    threading.Thread(target=_listen, args=(number, worker, messages), daemon=True).start()
    return worker


def _launch(core: int) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Chunk after chunk needs the same large arrays: memory that is given back must be cleared page by page again.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "packhorse.cache.worker", str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        # Ctrl-C is for the parent alone: it decides what becomes of its workers.
        start_new_session=True,
    )


def _listen(number: int, worker: subprocess.Popen, messages: queue.Queue) -> None:
    from packhorse.cache.record import Record

    for line in worker.stdout:
        message = json.loads(line)
        if "record" in message:
            record = message["record"]
            message["record"] = Record(**{**record, "ranges": [tuple(r) for r in record["ranges"]]})
        messages.put((number, message))
    messages.put((number, {"died": worker.wait()}))


def _send(worker: subprocess.Popen, message: dict[str, Any] | None) -> int:
    """Send a message; 1 if there was one."""
    if message is None:
        return 0
    with suppress(BrokenPipeError):  # its last words are in the queue
        worker.stdin.write(json.dumps(message) + "\n")
        worker.stdin.flush()
    return 1


def _error(message: dict[str, Any]) -> Exception:
    if "exception" in message:
        return message["exception"]
    if "died" in message:
        status = message["died"]
        why = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return errors.CacheError(
            f"A worker process ended unexpectedly ({why}); often the memory was not enough.\n"
            "What was committed is intact. Run the same command again, with fewer `workers` if it was the memory."
        )
    if message["error"] == "EngineMismatch":
        return errors.EngineMismatch(message["engine"], message["text"])
    kind = getattr(errors, message["error"], None)
    if isinstance(kind, type) and issubclass(kind, PackhorseError):
        return kind(message["message"])
    return RuntimeError(f"A worker process failed:\n{message['message']}")


def _quota(cores: int) -> float:
    """Cores that a cgroup grants."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return cores
