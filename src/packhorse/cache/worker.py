"""One worker process: jobs in, committed chunks and their records out.

python -m packhorse.cache.worker CORE FOLDER ENGINE COMPRESSION    (started by `workers.py`, not by hand)
"""

import os
import sys
from contextlib import suppress


def main(core: str, folder: str, engine: str, compression: str) -> None:
    """Build what standard input asks for, and tell about it on standard output."""
    # Before anything is imported that counts cores.
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {int(core)})
    import json
    import traceback
    from dataclasses import asdict
    from pathlib import Path

    from packhorse.cache.build import Builder, Job
    from packhorse.corpus.documents import TextFile
    from packhorse.errors import EngineMismatch, PackhorseError

    # Nothing but messages may reach the parent through standard output.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        builder = Builder(Path(folder), "" if engine == "ids" else engine, compression)
        for line in sys.stdin:
            job = json.loads(line)
            job = Job(
                chunk=job["chunk"],
                ranges=[tuple(r) for r in job["ranges"]],
                files={int(number): TextFile(**file) for number, file in job["files"].items()},
            )
            say(record=asdict(builder.build(job, lambda *done: say(progress=done))))
    except EngineMismatch as error:
        say(error="EngineMismatch", engine=error.engine, text=error.text)
    except PackhorseError as error:
        say(error=type(error).__name__, message=str(error))
    except BrokenPipeError:
        pass
    except Exception:
        say(error="Exception", message=traceback.format_exc())


if __name__ == "__main__":
    main(*sys.argv[1:])
