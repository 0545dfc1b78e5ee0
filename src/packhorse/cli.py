"""The one entry: what is typed after `python main.py`.

`cache ...` is dispatched before anything heavy is imported; the rest is a LightningCLI. Both read the same YAML. Errors
that are meant for the user are printed without a traceback, and end with exit status 2.
"""

import os
import sys
from contextlib import nullcontext

TRAINING_COMMANDS = ("fit", "validate", "test", "predict", "preview")
EVALUATION_COMMANDS = ("passkey", "generate", "benchmark", "export")

HELP = """Packhorse: raw text to a trained long-context language model in one command.

    python main.py fit      --config configs/quickstart.yaml     build the cache (if needed) and train
    python main.py validate --config ... --ckpt_path ...         loss and perplexity on the validation set
    python main.py test     --config ... --ckpt_path ...         the same on all evaluation text
    python main.py predict  --config ... --ckpt_path ...         continue the prompts of the configuration
    python main.py preview  --config ...                         what would happen; writes nothing
    python main.py passkey  --ckpt_path ... --lengths 4096 32768 a key hidden far back: how often it is found
    python main.py generate --ckpt_path ... "Once upon a time"   continue prompts
    python main.py export   --ckpt_path ... --folder my/model    a folder for AutoModelForCausalLM
    python main.py benchmark --ckpt_path ... --tasks hellaswag   standard benchmarks, by lm-eval
    python main.py health   runs/quickstart                      is a run well: from its logs and checkpoints
    python main.py cache build    --config ...                   build the cache, or bring it up to date
    python main.py cache status   --config ...                   what is built, what is missing, and who is building
    python main.py cache validate --config ...                   say exactly what is damaged
    python main.py cache repair   --config ...                   build that again, and prove it equal

Any value of a configuration can be set on the command line: --data.source my.parquet --trainer.max_steps 100
More about one of them: python main.py fit --help
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: What follows the program's name; by default from the command line.

    Returns:
        The exit status: 0 when all went well, 1 when a cache is damaged, 2 for errors of use, 130 after
        Ctrl-C, 143 when a training was told to stop (SIGTERM).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    from packhorse.errors import PackhorseError
    from packhorse.start import imports, set_up_libraries

    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(HELP)
            return 0
        if arguments[0] == "cache":
            set_up_libraries()
            with imports():
                from packhorse.cache.commands import run_cache_command

            return run_cache_command(arguments[1:])
        if arguments[0] in EVALUATION_COMMANDS:
            with imports():
                from packhorse.training.evaluate import run_evaluation_command

            return run_evaluation_command(arguments)
        if arguments[0] == "health":
            from packhorse.training.health import run_health_command

            return run_health_command(arguments[1:])
        if not arguments[0].startswith("-") and arguments[0] not in TRAINING_COMMANDS:
            from packhorse.usage import nearest

            near = nearest(arguments[0], (*TRAINING_COMMANDS, *EVALUATION_COMMANDS, "cache", "health"))
            meant = f" Did you mean {near}?" if near else f"\n\n{HELP}"
            print(f"There is no command {arguments[0]!r}.{meant}", file=sys.stderr)
            return 2
        with imports():
            from packhorse.training.cli import run_training_command

        return run_training_command(arguments)
    except PackhorseError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. What was committed is safe; the same command goes on from there.", file=sys.stderr)
        return 130
    except PermissionError as error:
        print(f"PermissionError: {error.filename} may not be read or written: see its permissions.", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output went away, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run() -> None:
    """What `packhorse` and `main.py` are: `main`, in a process that has nothing else to do before or after it."""
    command = sys.argv[1:]
    if command[:1] != ["cache"]:
        raise SystemExit(main())
    from packhorse.cache.workers import one_early
    from packhorse.start import leave, set_up_libraries

    set_up_libraries()
    with one_early() if command[1:2] == ["build"] else nullcontext():
        status = main()
    leave(status)


if __name__ == "__main__":
    run()
