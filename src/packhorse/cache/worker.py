"""One worker process: jobs in, committed chunks and their records out.

python -m packhorse.cache.worker CORE    (started by `workers.py`, not by hand)
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from packhorse.cache.workers import pin


def main(core: str) -> None:
    """Build what standard input asks for, and tell about it on standard output."""
    # Before anything is loaded that counts cores.
    pin(int(core))
    import json
    import threading
    import traceback
    from dataclasses import asdict
    from pathlib import Path

    # So that they are there when the first message comes.
    import pyarrow.parquet  # noqa: F401
    import tokenizers  # noqa: F401

    with suppress(ImportError):
        import fastokens  # noqa: F401

    from packhorse.cache.build import Builder, Job, build_all
    from packhorse.corpus.documents import TextFile
    from packhorse.corpus.engines import load_early
    from packhorse.errors import EngineMismatch, PackhorseError

    # Nothing but messages may reach the parent through standard output.
    channel, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)

    def say(**message) -> None:
        try:
            with lock:
                channel.write(json.dumps(message) + "\n")
                channel.flush()
        except BrokenPipeError:
            # The parent is gone: nobody wants the rest, and the cache may be gone too.
            raise SystemExit(1) from None

    def tell(error: Exception) -> None:
        if isinstance(error, EngineMismatch):
            say(error="EngineMismatch", engine=error.engine, text=error.text)
        elif isinstance(error, PackhorseError):
            say(error=type(error).__name__, message=str(error))
        else:
            say(error="Exception", message="".join(traceback.format_exception(error)))

    def jobs() -> Iterator[tuple[Builder, Job]]:
        builder = None
        for line in sys.stdin:
            message = json.loads(line)
            if "tokenizer" in message:
                load_early(Path(message["tokenizer"]), message["split_special_tokens"])
                continue
            setting = Path(message["folder"]), message["engine"], message["compression"], message["read_back"]
            builder = builder or Builder(*setting, lambda text: say(tell=text))
            job = message["job"]
            files = {
                int(n): TextFile(**{**file, "filters": tuple(file["filters"])}) for n, file in job["files"].items()
            }
            yield (
                builder,
                Job(
                    chunk=job["chunk"],
                    ranges=[tuple(r) for r in job["ranges"]],
                    files=files,
                    dropped=job["dropped"],
                    max_document_bytes=job["max_document_bytes"],
                ),
            )

    build_all(
        jobs(),
        lambda *done: say(progress=done),
        lambda record, seconds: say(record=asdict(record), seconds=seconds),
        tell,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
