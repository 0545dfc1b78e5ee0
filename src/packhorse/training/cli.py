"""`fit`, `validate`, `test`, `predict` by LightningCLI, and `preview`."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from packhorse.cache.data_settings import name_sources
from packhorse.errors import PackhorseError, SettingsError
from packhorse.training.checkpoint_io import read_outline
from packhorse.training.checkpoints import BestCheckpoint, RecoveryCheckpoint
from packhorse.training.datamodule import TokenDataModule
from packhorse.training.failures import explained
from packhorse.training.locate import find_checkpoint
from packhorse.training.module import LanguageModule
from packhorse.training.monitors import RunReport
from packhorse.training.progress_bar import RunProgressBar
from packhorse.training.run_folder import claim_run_folder, runs_folder
from packhorse.training.run_log import RunLog
from packhorse.training.signals import Stopped, StopSignals
from packhorse.usage import PlainErrors, read_docstrings

COMMANDS = ("fit", "validate", "test", "predict")
SAVE_EVERY_STEPS = 500


class TrainingParser(PlainErrors, LightningArgumentParser):
    """Lightning's parser, with errors that can be seen."""


class PackhorseCLI(LightningCLI):
    """LightningCLI with our defaults."""

    def subcommands(self) -> dict[str, set[str]]:
        """Only the command that was typed: to make the parser of one takes a third of a second."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in _typed(sys.argv[1:])}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Groups `checkpoint:`, from which a run goes on, and `best_checkpoint:`."""
        parser.add_lightning_class_args(RecoveryCheckpoint, "checkpoint")
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.set_defaults(
            {
                "checkpoint.filename": "step={step:08d}",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.every_n_train_steps": SAVE_EVERY_STEPS,
                "checkpoint.save_last": "link",
                "checkpoint.save_top_k": 1,
            }
        )

    def before_instantiate_classes(self) -> None:
        """Without a tokenizer, take that of the model; without any limit, pass once over the data."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        if config.data.tokenizer is None:
            config.data.tokenizer = config.model.pretrained
        name_sources(config.data)
        if config.trainer.max_epochs is None:
            is_limited = config.trainer.max_steps > 0 or config.data.max_train_tokens is not None
            config.trainer.max_epochs = -1 if is_limited else 1
        _set_trigger(config.checkpoint)
        _expand_home(config.trainer.logger)
        if self.subcommand:
            _check_weights(self.subcommand, config)

    def instantiate_classes(self) -> None:
        """Make the objects; settings that they refuse are the user's to mend."""
        try:
            super().instantiate_classes()
        except PackhorseError:
            raise
        except (ValueError, MisconfigurationException) as error:
            raise SettingsError(str(error)) from error

    def before_fit(self) -> None:
        """Give the run a folder of its own."""
        if rank_zero_only.rank == 0 and not self.trainer.fast_dev_run:
            claim_run_folder(self.trainer)

    def predict(self, **arguments) -> None:
        """Print each prompt with its continuation, once: every rank has them all."""
        texts = self.trainer.predict(**arguments) or []
        if self.trainer.is_global_zero:
            print("\n\n".join(texts))

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        own = config.get("callbacks") or []
        own = own if isinstance(own, list) else [own]
        if config.get("enable_progress_bar") and not any(isinstance(callback, ProgressBar) for callback in own):
            callbacks = [*callbacks, RunProgressBar()]
        if config.get("enable_checkpointing") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        return super()._instantiate_trainer(config, callbacks)

    def _run_subcommand(self, subcommand: str) -> None:
        with explained(self.trainer, self.datamodule.settings.micro_batch_size, self.model.gradient_checkpointing):
            super()._run_subcommand(subcommand)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if arguments.get("ckpt_path"):
            runs, goes_on = runs_folder(self.trainer), subcommand == "fit"
            path = arguments["ckpt_path"] = find_checkpoint(arguments["ckpt_path"], runs, goes_on=goes_on)
            if path and goes_on and "://" not in path:
                self.datamodule.will_go_on(read_outline(Path(path)) or {})
        return arguments

    def _parse_ckpt_path(self) -> None:
        # LightningCLI would let the checkpoint's hyper-parameters win over the command line, without a word.
        return


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration of training runs, beside their logs."""

    def setup(self, trainer, pl_module, stage: str) -> None:
        """Save it when a run begins; other commands leave it alone."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


def run_training_command(arguments: list[str]) -> int:
    """Run a command that needs Lightning; the result is the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    read_docstrings(arguments)
    _quieten()
    if arguments[0] == "preview":
        from packhorse.training.preview import preview

        return preview(make_cli(arguments[1:], run=False))
    try:
        make_cli(arguments, run=True)
    except Stopped as stop:
        return stop.code
    except SIGTERMException:  # a SystemExit that would look like success
        return 128 + signal.SIGTERM
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            return 128 + signal.SIGINT  # what to do next was said by the report
        raise
    return 0


def make_cli(arguments: list[str], run: bool) -> PackhorseCLI:
    """Parse a command line; with `run`, do what it says."""
    with _command_line(arguments):
        return PackhorseCLI(
            LanguageModule,
            TokenDataModule,
            run=run,
            parser_class=TrainingParser,
            auto_configure_optimizers=False,
            # An abbreviation is a typing error that happens to work.
            parser_kwargs={"allow_abbrev": False, **{name: {"allow_abbrev": False} for name in _typed(arguments)}},
            save_config_callback=SaveRunConfig if run else None,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            trainer_defaults={
                "gradient_clip_val": 1.0,
                "use_distributed_sampler": False,
                "enable_progress_bar": sys.stderr.isatty(),
                "callbacks": [StopSignals(), RunLog(), RunReport()],
                **_as_launched(),
            },
        )


def _set_trigger(checkpoint: Any) -> None:
    """Our number of steps is only a default: another setting that says when to save takes its place."""
    is_ours = checkpoint.every_n_train_steps == SAVE_EVERY_STEPS
    if is_ours and (checkpoint.every_n_epochs or checkpoint.train_time_interval is not None):
        checkpoint.every_n_train_steps = None
    if checkpoint.every_n_epochs and (checkpoint.monitor, checkpoint.save_on_train_epoch_end) == (None, None):
        checkpoint.save_on_train_epoch_end = True  # Lightning would save after validation, whenever that is


def _expand_home(loggers: Any) -> None:
    """Find `~` in the folders of logs: Lightning would put the checkpoints beside them into a folder of that name."""
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        arguments = logger.get("init_args") if isinstance(logger, Namespace) else None
        if arguments and isinstance(folder := arguments.get("save_dir"), str):
            arguments["save_dir"] = os.path.expanduser(folder)


def _check_weights(command: str, config: Any) -> None:
    """Refuse what would measure random weights without a word."""
    if command != "fit" and config.ckpt_path is None and config.model.pretrained is None:
        raise SettingsError(
            f"`{command}` needs trained weights.\nGive `--ckpt_path FILE`, a checkpoint of a run, or set "
            "`model.pretrained`."
        )


def _as_launched() -> dict[str, int]:
    """Under torchrun, as many devices and nodes as it has started processes for."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    here, everywhere = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    return {"devices": here, "num_nodes": everywhere // here}


def _typed(arguments: list[str]) -> tuple[str, ...]:
    """The command of a command line; all of them if it has none."""
    return (arguments[0],) if arguments and arguments[0] in COMMANDS else COMMANDS


@contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """What LightningCLI reads; ranks that it starts read the same."""
    before = sys.argv
    if before[1:] != arguments:
        sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _quieten() -> None:
    """Drop messages that are no news to our users."""
    for message in (
        ".*does not have many workers.*",  # a batch is read faster than a worker process could hand it over
        ".*overridden `on_before_batch_transfer`.*",  # which is what we want
        ".*treespec, LeafSpec.*",
        ".*The dirpath has changed from.*",  # a run that goes on has a folder of its own
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.msg)
