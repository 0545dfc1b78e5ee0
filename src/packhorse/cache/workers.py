"""Chunk numbers -> records: the processes that build.

Workers are plain subprocesses, started once and fed one chunk after the other. Each is pinned to one core before it
imports anything that has threads of its own (the only cap that every tokenizer engine obeys). A worker reads,
tokenizes, packs, compresses, hashes and writes; only small messages travel: JSON lines, a job down, progress and a
record up.

A worker whose parent is gone reads the end of its input and stops. One that is killed leaves a temporary file.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
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


def run_jobs(
    jobs: Iterable[Any],
    num_workers: int,
    folder: Path,
    engine: str,
    compression: str,
    on_progress: OnProgress,
    on_record: Callable[[Any], None],
) -> None:
    """Build chunks with worker processes, or in this process when `num_workers` is 0.

    Args:
        jobs: `build.Job`s; taken one at a time, when a worker is free.
        num_workers: How many processes.
        folder: The cache.
        engine: What tokenizes.
        compression: How hard LZ4 works.
        on_progress: Called with (documents, tokens, bytes of text) while chunks are made.
        on_record: Called with each committed record.

    Raises:
        PackhorseError: what went wrong in a worker. Chunks that were committed stay.
    """
    if num_workers == 0:
        from packhorse.cache.build import Builder

        builder = None
        for job in jobs:
            builder = builder or Builder(folder, engine, compression)
            on_record(builder.build(job, on_progress))
        return
    _Pool(num_workers, folder, engine, compression).run(iter(jobs), on_progress, on_record)


class _Pool:
    def __init__(self, num_workers: int, folder: Path, engine: str, compression: str) -> None:
        cores = usable_cores()
        self._messages: queue.Queue = queue.Queue()
        self._workers = [
            _start(cores[i % len(cores)], folder, engine, compression, i, self._messages) for i in range(num_workers)
        ]

    def run(self, jobs, on_progress: OnProgress, on_record: Callable[[Any], None]) -> None:
        from packhorse.cache.record import Record

        running = 0
        try:
            for worker in self._workers:
                running += _send(worker, jobs)
            while running:
                number, message = self._messages.get()
                if "progress" in message:
                    on_progress(*message["progress"])
                elif "record" in message:
                    record = message["record"]
                    on_record(Record(**{**record, "ranges": [tuple(r) for r in record["ranges"]]}))
                    running += _send(self._workers[number], jobs) - 1
                else:
                    raise _error(message)
        finally:
            for worker in self._workers:
                with suppress(OSError):
                    worker.stdin.close()
                if running:
                    worker.terminate()
            for worker in self._workers:
                worker.wait()


def _start(core: int, folder: Path, engine: str, compression: str, number: int, messages: queue.Queue):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "packhorse.cache.worker", str(core), str(folder), engine or "ids", compression],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        # Ctrl-C is for the parent alone: it decides what becomes of its workers.
        start_new_session=True,
    )
    threading.Thread(target=_listen, args=(number, worker, messages), daemon=True).start()
    return worker


def _listen(number: int, worker: subprocess.Popen, messages: queue.Queue) -> None:
    for line in worker.stdout:
        messages.put((number, json.loads(line)))
    messages.put((number, {"died": worker.wait()}))


def _send(worker: subprocess.Popen, jobs) -> int:
    """Give a worker the next job; 1 if there was one."""
    job = next(jobs, None)
    if job is None:
        return 0
    with suppress(BrokenPipeError):  # its last words are in the queue
        worker.stdin.write(json.dumps(asdict(job)) + "\n")
        worker.stdin.flush()
    return 1


def _error(message: dict[str, Any]) -> Exception:
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
