"""One worker process: jobs in, committed chunks and their records out.

    python -m packhorse.cache.worker CORE    (started by `workers.py`, not by hand)

A chunk is written to the disk while the next one is built.
"""

import os
import sys
from contextlib import suppress


def main(core: str) -> None:
    """Build what standard input asks for, and tell about it on standard output."""
    # Before anything is imported that counts cores.
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {int(core)})
    import json
    import threading
    import traceback
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import asdict
    from pathlib import Path

    import pyarrow.parquet  # noqa: F401  (so that it is there when the first job comes)

    from packhorse.cache.build import Builder, Job
    from packhorse.corpus.documents import TextFile
    from packhorse.corpus.engines import load_fastokens, load_reference
    from packhorse.errors import EngineMismatch, PackhorseError

    # Nothing but messages may reach the parent through standard output.
    channel, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)

    def say(**message) -> None:
        with lock, suppress(BrokenPipeError):
            channel.write(json.dumps(message) + "\n")
            channel.flush()

    def tell(error: BaseException) -> None:
        if isinstance(error, EngineMismatch):
            say(error="EngineMismatch", engine=error.engine, text=error.text)
        elif isinstance(error, PackhorseError):
            say(error=type(error).__name__, message=str(error))
        else:
            say(error="Exception", message="".join(traceback.format_exception(error)))

    def finish(commit) -> None:
        try:
            say(record=asdict(commit()))
        except Exception as error:
            tell(error)

    builder = None
    with ThreadPoolExecutor(1) as committer:
        try:
            for line in sys.stdin:
                message = json.loads(line)
                if "tokenizer" in message:
                    # Only to have it loaded: whether it can be used is found out with the first job.
                    with suppress(Exception):
                        text = Path(message["tokenizer"]).read_text(encoding="utf-8")
                        load_reference(text, message["split_special_tokens"])
                        load_fastokens(text, message["split_special_tokens"])
                    continue
                folder = Path(message["folder"])
                builder = builder or Builder(
                    folder, message["engine"], message["compression"], lambda text: say(message=text)
                )
                job = message["job"]
                job = Job(
                    chunk=job["chunk"],
                    ranges=[tuple(r) for r in job["ranges"]],
                    files={int(number): TextFile(**file) for number, file in job["files"].items()},
                )
                committer.submit(finish, builder.make(job, lambda *done: say(progress=done)))
        except Exception as error:
            tell(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
