"""Laws of the command line: exit statuses, messages, and what is not written."""

import csv
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning import Callback

from conftest import TINY_MODEL, tiny_data
from packhorse.cache import store
from packhorse.cache.commands import VERBS
from packhorse.cli import main
from packhorse.models import InfiniAttentionConfig
from packhorse.start import imports
from packhorse.training import LanguageModule
from packhorse.training.cli import PackhorseCLI, make_cli
from packhorse.training.health import health
from packhorse.training.telling import memory_lines

ROOT = Path(__file__).parents[1]


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": f"document {i}: " + "salt wool hay " * (i % 7 + 3), "id": i} for i in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path, corpus):
    path = tmp_path / "config.yaml"
    value = {
        "data": tiny_data(tmp_path, packing="concat", eval_share=0.1, prompts=["document 1"]),
        "model": TINY_MODEL,
        "trainer": {"accelerator": "cpu", "max_steps": 3, "logger": False, "default_root_dir": str(tmp_path / "run")},
        "checkpoint": {"dirpath": str(tmp_path / "run" / "checkpoints")},
    }
    path.write_text(json.dumps(value))  # JSON is YAML
    return path


def build(config: Path, *arguments: str) -> int:
    return main(["cache", "build", "--config", str(config), *arguments])


def test_garbage_is_looked_for_again_after_the_imports():
    with imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_that_ends_at_once_says_all_and_keeps_its_status():
    code = "import atexit; from packhorse.start import leave; atexit.register({}, 'last'); print('first'); leave(3)"
    ended = subprocess.run([sys.executable, "-c", code.format("print")], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "first\nlast\n", "")
    writer = subprocess.Popen(
        [sys.executable, "-c", code.format("str")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    writer.stdout.close()  # as `head` does
    assert (writer.stderr.read(), writer.wait()) == (b"", 3)


def test_fit_validate_and_predict_take_one_configuration(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    said = capsys.readouterr().err
    assert "Plan" in said
    assert "3 of 2 sequences" in said
    for word in ("utilisation", "bytes per token", "unigram entropy", "tokens/s", "last.ckpt", "Next"):
        assert word in said.partition("Report")[2], word
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main(["validate", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert "val/perplexity" in capsys.readouterr().out
    assert main(["predict", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert capsys.readouterr().out.startswith("document 1")


def test_a_second_fit_finds_the_cache_and_says_how_long_that_took(config, capsys):
    assert build(config) == 0
    capsys.readouterr()
    assert main(["fit", "--config", str(config)]) == 0
    said = capsys.readouterr().err
    assert "found; opened in" in said
    assert "Building" not in said


def test_preview_shows_what_would_happen_and_writes_nothing(config, tmp_path, capsys):
    before = files(tmp_path)
    assert main(["preview", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    for part in ("id", "text", "document 0", "tokens:", "300 entries", "hidden size 32", "segments of 8", "parameters"):
        assert part in out, part
    assert "about" in out
    assert "3 steps of 2 sequences" in out
    assert files(tmp_path) == before


def test_cache_commands_tell_the_same_in_json(config, capsys):
    assert build(config, "--json") == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["cache", "status", "--config", str(config), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["missing"] == []
    assert built.pop("built") == 1
    assert {key: status[key] for key in built} == built
    assert main(["cache", "validate", "--config", str(config)]) == 0
    assert "1/1 chunks, all hashes verified" in capsys.readouterr().out


def test_a_cache_command_takes_the_folder_of_a_cache_too(config, tmp_path, capsys):
    build(config)
    (folder,) = (tmp_path / "cache").glob("*-*")
    capsys.readouterr()
    assert main(["cache", "status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(folder)
    assert main(["cache", "build", str(folder)]) == 2
    assert "give --config" in capsys.readouterr().err
    assert main(["cache", "status", str(folder), "--config", str(config)]) == 2


def test_an_error_of_a_cache_command_is_json_too_when_json_is_asked_for(tmp_path, capsys):
    assert main(["cache", "status", str(tmp_path / "nothing"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "CacheIncompleteError"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["cache", verb, "--help"])
    assert stop.value.code == 0
    assert f"packhorse cache {verb}" in capsys.readouterr().out


def test_dashes_and_underscores_in_options_are_the_same(config, capsys):
    assert build(config, "--data.sequence-length=1") == 2
    assert "from 2 to 131,072" in capsys.readouterr().err


def test_what_is_yes_or_no_is_said_by_the_name_of_the_option_alone_or_by_what_follows_it(capsys, monkeypatch):
    from packhorse.cache import commands

    def build(where, *, force: bool = False, number: int = 0):
        """Build."""
        return commands.Outcome(lines=[f"{force} {number}"])

    monkeypatch.setattr(commands, "load_verb", lambda name: build)
    for arguments, said in {
        "--force --number 3": "True 3",
        "--force=false": "False 0",
        "--force true --number 2": "True 2",
        "--number 1 --force false": "False 1",
        "": "False 0",
    }.items():
        assert main(["cache", "build", *arguments.split()]) == 0
        assert capsys.readouterr().out.strip() == said


def test_validate_finds_a_damaged_chunk_with_status_1_and_changes_nothing(config, tmp_path, capsys):
    build(config)
    (chunk,) = (tmp_path / "cache").rglob("*.chunk")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    assert main(["cache", "validate", "--config", str(config)]) == 1
    assert "chunk 0" in capsys.readouterr().out
    assert chunk.read_bytes() == bytes(data)


def test_validate_misses_a_record_that_is_gone(config, tmp_path, capsys):
    build(config)
    (record,) = (tmp_path / "cache").glob("*/records/*/*.json")
    record.unlink()
    assert main(["cache", "validate", "--config", str(config)]) == 1
    assert f"{record} is missing" in capsys.readouterr().out
    assert build(config) == 0
    assert main(["cache", "validate", "--config", str(config)]) == 0


def test_cache_commands_never_import_torch(config):
    value = json.loads(config.read_text())
    value["trainer"]["logger"] = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}
    config.write_text(json.dumps(value))
    code = (
        "import sys; from packhorse.cli import main; "
        f"assert main(['cache', 'build', '--config', {str(config)!r}]) == 0; "
        "print([m for m in ('torch', 'lightning', 'transformers', 'datasets') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.source", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--data.text_column", "body"], "It has: text, id"),
        (["--data.tokenizer", "nowhere/", "--data.train_tokenizer", "null"], "no such file"),
        (["--data.sequence_length", "64", "--data.cache_dir", "{cache}"], "sequence_length: on disk 32, asked for 64"),
    ],
    ids=["missing source", "missing column", "missing tokenizer", "another recipe"],
)
def test_bad_input_is_refused_with_status_2_and_nothing_changed(config, tmp_path, capsys, arguments, message):
    build(config)
    (folder,) = (path.parent for path in (tmp_path / "cache").glob("*/recipe.json"))
    before = files(tmp_path)
    capsys.readouterr()
    assert build(config, *(argument.format(cache=folder) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert files(tmp_path) == before


def test_broken_files_are_refused_with_status_2_before_anything_is_made(config, tmp_path, capsys):
    cut = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"text": ["salt"] * 1000}), cut)
    cut.write_bytes(cut.read_bytes()[:-20])
    empty, blank, bad = (tmp_path / name for name in ("empty.jsonl", "blank.txt", "bad.jsonl"))
    empty.write_text("")
    blank.write_text("\n \n\n")
    bad.write_text('{"text": "salt"}\n{"text": "wool}\n')
    build(config)  # the tokenizer exists now
    before = files(tmp_path)
    for path, message in (
        (cut, "damaged or cut off"),
        (empty, "no text"),
        (blank, "no text"),
        (bad, "line 2 is not valid JSON"),
    ):
        assert build(config, "--data.source", str(path)) == 2, path
        assert message in capsys.readouterr().err
        assert files(tmp_path) == before
    blank.write_text("salt and wool\n" * 20)
    assert build(config, "--data.source", str(blank)) == 0


def test_a_run_that_is_finished_says_so(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    capsys.readouterr()
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main(["fit", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert "Nothing was trained: the run is in step 3 of 3" in capsys.readouterr().err


def test_a_full_disk_ends_with_status_2_and_the_next_build_goes_on(config, monkeypatch, capsys):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "write", full)
        assert build(config) == 2
        assert "StorageFullError" in capsys.readouterr().err
    assert build(config) == 0


def test_a_vocabulary_larger_than_the_models_is_refused_with_status_2(config, tmp_path, capsys):
    value = json.loads(config.read_text())
    value["model"]["config"]["vocab_size"] = 100
    config.write_text(json.dumps(value))
    assert main(["fit", "--config", str(config)]) == 2
    assert "ids up to 299, but the model's vocabulary has 100 entries" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.chunk"))


@pytest.mark.parametrize(
    ("command", "argument", "meant"),
    [
        ("fit", "--data.sequence_lenght=3", "--data.sequence_length"),
        ("fit", "--trainer.max_epoch=3", "--trainer.max_epochs"),
        ("fit", "--micro_batchsize=3", "--data.micro_batch_size"),
        ("fit", "--model.infini_attention.segment_len=3", "--model.infini_attention.segment_length"),
        ("cache build", "--data.sequence_lenght=3", "--data.sequence_length"),
        ("cache build", "--start-chnk=3", "--start_chunk"),
        ("passkey", "--lenghts=3", "--lengths"),
    ],
)
def test_a_misspelt_option_is_refused_alone_with_the_one_that_was_meant(config, capsys, command, argument, meant):
    configured = [] if command == "passkey" else ["--config", str(config)]
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), *configured, argument])
    assert stop.value.code == 2
    error, tip = capsys.readouterr().err.splitlines()
    assert error.endswith(f"Did you mean {meant}?")
    assert f"{command} --help" in tip


@pytest.mark.parametrize("command", ["fit", "cache build"])
def test_a_misspelt_setting_of_a_configuration_is_told_in_the_same_way(config, capsys, command):
    value = json.loads(config.read_text())
    value["data"]["micro_batchsize"] = 3
    config.write_text(json.dumps(value))
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--config", str(config)])
    assert stop.value.code == 2
    assert "no option data.micro_batchsize. Did you mean data.micro_batch_size?" in capsys.readouterr().err


def test_a_setting_that_is_like_no_other_is_told_as_it_is(config, capsys):
    for argument, said in (("--xyzzy=3", "no option --xyzzy.\n"), ("--trainer.max_steps=many", "trainer.max_steps")):
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--config", str(config), argument])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["fit"], ["cache", "build"]], ids=" ".join)
def test_a_class_path_in_a_configuration_is_a_source(config, tmp_path, monkeypatch, capsys, command):
    (tmp_path / "stories.py").write_text(
        "def stories(count):\n    return [f'a story {i} of salt' for i in range(count)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = {"class_path": "stories.stories", "init_args": {"count": 400}}
    build(config)
    assert main([*command, "--config", str(config), "--data.name=one", f"--data.source={json.dumps(source)}"]) == 0
    # The same source in a list, and by the other command, is the same cache.
    capsys.readouterr()
    assert build(config, "--data.name=one", f"--data.source={json.dumps([source])}") == 0
    assert "400 documents" in (output := capsys.readouterr()).out
    assert "Building" not in output.err
    assert "Extending" not in output.err


def test_a_list_in_a_configuration_names_sources_and_never_holds_texts(config, monkeypatch, capsys):
    build(config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert build(config, '--data.source=["nobody/nothing", "nobody/nowhere"]') == 2
    assert "nobody/nothing" in capsys.readouterr().err
    assert build(config, '--data.source=["nowhere.jsonl", "sample"]') == 2
    assert "nowhere.jsonl does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument",
    [
        "--model.infini_attention.segment_length=0",
        "--model.schedule.min_ratio=2",
        "--model.schedule.warmup_ratio=-1",
        "--model.config.hidden_size=abc",
        "--model.infini_attention.memory_layers=[5]",
        "--model.compile=nosuch",
        "--trainer.accumulate_grad_batches=-2",
        "--trainer.accumulate_grad_batches=0",
    ],
)
def test_a_model_or_schedule_that_makes_no_sense_is_refused_before_the_cache_is_built(
    config, tmp_path, capsys, argument
):
    assert main(["fit", "--config", str(config), argument]) == 2
    assert argument.partition("=")[0].rpartition(".")[2] in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_preview_refuses_a_model_that_makes_no_sense(config, capsys):
    assert main(["preview", "--config", str(config), "--model.infini_attention.memory_layers=[5]"]) == 2
    assert "memory_layers names [5], but the model has" in capsys.readouterr().err


def test_a_run_trains_without_logging(config):
    assert main(["fit", "--config", str(config), "--trainer.log_every_n_steps=0"]) == 0


def test_a_folder_for_logs_that_cannot_be_made_is_refused_with_status_2(config, corpus, capsys):
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.init_args.save_dir={corpus}"]
    assert main(["fit", "--config", str(config), *logger]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err


class Enough(Callback):
    """Ends a training after two steps."""

    def on_train_batch_end(self, trainer, *_) -> None:
        trainer.should_stop = trainer.global_step == 2


def test_a_run_that_ends_before_its_time_says_so_and_health_too(config, tmp_path, capsys):
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.init_args.save_dir={tmp_path / 'runs'}"]
    ends = ["--trainer.log_every_n_steps=1", f"--trainer.callbacks={__name__}.Enough"]
    assert main(["fit", "--config", str(config), *logger, *ends]) == 0
    said = capsys.readouterr()
    told = re.search(r"ended +in step (\d+) of (\d+)", said.out + said.err)
    assert told, said
    facts = health(tmp_path / "runs")
    assert (facts["state"], facts["step"], facts["steps"]) == ("stopped", int(told[1]), int(told[2]))
    assert facts["step"] < facts["steps"]


def test_a_learning_rate_that_makes_no_sense_is_refused_with_status_2(config, capsys):
    optimizer = ["--model.optimizer=packhorse.training.module.AdamW", "--model.optimizer.init_args.lr=-1"]
    assert main(["fit", "--config", str(config), *optimizer]) == 2
    assert "`model.optimizer` makes no sense: Invalid learning rate: -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate"], "needs trained weights"),
        (["predict"], "needs trained weights"),
        (["test", "--ckpt_path", "nothing.ckpt"], "nothing.ckpt does not exist"),
        (["fit", "--ckpt_path", "nothing.ckpt"], "nothing.ckpt does not exist"),
        (["fit", "--ckpt_path", "last"], "last cannot be found"),
    ],
    ids=["validate", "predict", "no such file", "no such file in fit", "last"],
)
def test_a_command_without_the_weights_it_needs_is_refused_with_status_2(config, tmp_path, capsys, arguments, message):
    assert main([arguments[0], "--config", str(config), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_preview_counts_what_raised_limits_will_add_to_a_cache(config, tmp_path, capsys):
    few = ["--config", str(config), "--data.max_documents", "20"]
    assert main(["cache", "build", *few]) == 0
    capsys.readouterr()

    def told(arguments: list[str]) -> tuple[int, str]:
        assert main(["preview", *arguments]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "train sequences" in line)
        return int(re.search(r"about ([\d,]+) train", line)[1].replace(",", "")), line

    there, line = told(few)
    assert "is there" in line
    more, line = told(["--config", str(config)])
    assert "so far and will grow" in line
    assert more > 1.5 * there


def test_preview_refuses_a_cache_of_another_source_in_the_words_of_a_build(config, tmp_path, capsys):
    assert build(config) == 0
    (tmp_path / "more.jsonl").write_text('{"text": "wool for winter"}\n' * 50)
    other = ["--data.source", str(tmp_path / "more.jsonl"), "--data.name", "corpus"]
    assert build(config, *other) == 2
    refused = capsys.readouterr().err.splitlines()[-2:]
    assert "the settings name only" in refused[0]
    assert main(["preview", "--config", str(config), *other]) == 2
    assert capsys.readouterr().err.splitlines()[-2:] == refused


@pytest.mark.parametrize("command", ["preview", "fit"])
def test_rows_that_are_one_segment_are_warned_of_before_they_are_trained_on(config, capsys, command):
    segments = "--model.infini_attention.segment_length=32"
    assert main([command, "--config", str(config), "--trainer.max_steps=1", segments]) == 0
    assert "a row is one segment of 32 tokens: the memory is never read" in "".join(capsys.readouterr())


def test_only_a_memory_that_is_on_and_never_read_is_warned_of():
    told = {length: memory_lines(InfiniAttentionConfig(segment_length=length), 32) for length in (31, 32, 64)}
    assert [bool(lines) for lines in told.values()] == [False, True, True]
    assert memory_lines(InfiniAttentionConfig(segment_length=32, turn_on_memory=False), 32) == []


def test_preview_refuses_a_column_that_is_not_there(config, tmp_path, capsys):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"body": ["salt"]}), path)
    assert main(["preview", "--config", str(config), "--data.source", str(path)]) == 2
    assert "It has: body" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stopped_training_ends_with_its_own_status_and_says_how_it_goes_on(config, tmp_path, name, status):
    command = [sys.executable, str(ROOT / "main.py"), "fit", "--config", str(config), "--trainer.max_steps=100000"]
    command += ["--trainer.max_epochs=-1", "--checkpoint.every_n_train_steps=1", "--checkpoint.save_last=true"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(getattr(signal, name))
        _, err = run.communicate(timeout=60)
    assert run.returncode == status
    assert "To go on from the last checkpoint" in err


def metrics(folder: Path) -> dict[str, list[str]]:
    with folder.joinpath("metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows if row[name]] for name in rows[0]}


def csv_logger(tmp_path) -> list[str]:
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path / "logs")}}
    return [f"--trainer.logger={json.dumps(logger)}", "--trainer.log_every_n_steps=1", "--checkpoint.dirpath=null"]


def test_a_run_goes_on_by_name_with_what_the_command_line_says_now(config, tmp_path, capsys):
    logged = csv_logger(tmp_path)
    assert main(["fit", "--config", str(config), *logged]) == 0
    runs = tmp_path / "logs" / "lightning_logs"
    # Its saved configuration, and others over it.
    (tmp_path / "more.yaml").write_text("trainer:\n  max_steps: 4\n")
    again = ["--config", str(runs / "version_0/config.yaml"), "--config", str(tmp_path / "more.yaml")]
    constant = "--model.schedule={shape: constant, warmup_steps: 0}"
    optimizer = "--model.optimizer.init_args.lr=0.0625"
    capsys.readouterr()
    assert main(["fit", *again, constant, optimizer, "--trainer.max_steps=5", "--ckpt_path=last"]) == 0
    said = capsys.readouterr().err
    assert f"`last` is {runs / 'version_0/checkpoints/step=00000003.ckpt'}" in said
    values = metrics(runs / "version_1")
    assert [float(rate) for rate in values["lr/matrices"]] == [0.0625, 0.0625]
    assert values["step"][-1] == "5", "three steps, and two more"
    assert values["run/ended"] == ["1"]
    for name in ("train/loss", "train/perplexity", "tokens_per_second", "run/epoch", "run/steps", "cache/padding"):
        assert values[name], name
    # The same again: there is nothing left to do, and that is said.
    assert main(["fit", *again, constant, optimizer, "--trainer.max_steps=5", "--ckpt_path=last"]) == 0
    assert "Nothing was trained: the run is in step 5 of 5" in capsys.readouterr().err
    # So is a command that trains nothing; and how the last training ended is known.
    assert main(["validate", *again, "--ckpt_path=last"]) == 0
    assert main(["health", str(runs)]) == 0
    assert "version_2: finished" in (said := capsys.readouterr().out)
    assert "step        5 of 5" in said


def test_auto_begins_a_run_where_there_is_none(config, tmp_path, capsys):
    arguments = ["fit", "--config", str(config), *csv_logger(tmp_path), "--ckpt_path=auto"]
    assert main([*arguments, "--trainer.max_steps=1"]) == 0
    assert "begins at step 0" in capsys.readouterr().err
    assert main([*arguments, "--trainer.max_steps=2"]) == 0
    assert "Nothing was trained" not in capsys.readouterr().err
    assert (tmp_path / "logs/lightning_logs/version_1/checkpoints/step=00000002.ckpt").exists()


def test_a_run_that_cannot_go_on_is_refused_before_a_cache_is_built(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    before = files(tmp_path / "cache")
    again = ["fit", "--config", str(config), f"--ckpt_path={tmp_path / 'run/checkpoints/last.ckpt'}"]
    for arguments, message in (
        (["--data.sequence_length=16"], "The tokenizer, `sequence_length`, `packing` or another setting"),
        ([f"--data.tokenizer={tmp_path / 'b'}", "--data.train_tokenizer=280"], "in the checkpoint 300, configured 280"),
        (["--model.config={hidden_size: 64}"], "hidden_size: in the checkpoint 32, configured 64"),
    ):
        capsys.readouterr()
        assert main([*again, *arguments]) == 2
        assert message in capsys.readouterr().err
        assert {path for path in files(tmp_path / "cache") - before if "tokenizers" not in path.parts} == set()


def test_memory_that_is_full_is_explained_with_what_helps(config, monkeypatch, capsys):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(LanguageModule, "training_step", full)
    assert main(["fit", "--config", str(config), "--trainer.accumulate_grad_batches=3"]) == 2
    said = capsys.readouterr().err
    assert "DeviceMemoryError: The device is out of memory in step 0: CUDA out of memory. Tried" in said
    assert "--data.micro_batch_size 1 --trainer.accumulate_grad_batches 6" in said
    for way in ("--model.gradient_checkpointing true", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        assert way in said
    assert "Traceback" not in said


def test_a_configuration_is_printed_and_fit_explains_its_settings(config, capsys):
    for arguments, words in (
        (["--print_config"], ["sequence_length: 32", "every_n_train_steps: 500"]),
        (["--help"], ["Tokens per sequence", "--checkpoint.every_n_train_steps", "Compute activations twice"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--config", str(config), *arguments])
        assert stop.value.code == 0
        said = capsys.readouterr().out
        assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("frobnicate", ["no command 'frobnicate'", "preview"]),
        ("fitt", ["no command 'fitt'. Did you mean fit?"]),
        ("cache frobnicate", ["no verb 'frobnicate'", "estimate"]),
        ("cache biuld", ["no verb 'biuld' of `cache`. Did you mean build?"]),
    ],
)
def test_a_command_that_is_not_there_is_refused_with_the_nearest_or_all_that_are(capsys, command, words):
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_values_that_make_no_sense_are_refused_with_status_2(config, capsys):
    assert build(config, "--data.sequence_length=1") == 2
    assert "from 2 to 131,072" in capsys.readouterr().err


def test_help_shows_the_docstring_of_a_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["cache", "build", "--help"])
    assert stop.value.code == 0
    assert "Tokens per sequence" in capsys.readouterr().out
    assert main([]) == 0
    assert "preview" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--checkpoint.save_top_k 3", "top_k"),
        ("--checkpoint.every_n_train_steps 5 --checkpoint.every_n_epochs 1", "mutually exclusive"),
        ("--trainer.max_steps -5", "max_steps"),
    ],
)
def test_what_lightning_refuses_is_an_error_of_use_in_words(config, arguments, words, capsys):
    assert main(["fit", "--config", str(config), *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert words in next(line for line in said.splitlines() if line.startswith("SettingsError"))


@pytest.mark.parametrize(
    ("arguments", "steps", "at_ends_of_epochs"),
    [
        ("", 500, None),
        ("--checkpoint.every_n_epochs 1", 0, True),
        ("--checkpoint.train_time_interval 00:30:00", 0, None),
        ("--checkpoint.every_n_train_steps 7", 7, None),
    ],
)
def test_a_run_saves_when_it_is_told_to_and_every_500_steps_otherwise(config, arguments, steps, at_ends_of_epochs):
    recovery, _ = make_cli(["--config", str(config), *arguments.split()], run=False).trainer.checkpoint_callbacks
    assert recovery._every_n_train_steps == steps
    assert recovery._save_on_train_epoch_end is at_ends_of_epochs


@pytest.mark.parametrize("command", ["preview", "fit"])
def test_limits_that_a_run_cannot_keep_to_are_refused_by_a_preview_too(config, command, capsys):
    limits = ["--trainer.limit_train_batches=5", "--trainer.accumulate_grad_batches=4"]
    assert main([command, "--config", str(config), *limits]) == 2
    assert "no whole number of steps" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--trainer.enable_checkpointing=false", "--trainer.fast_dev_run=true"])
def test_a_run_that_saves_nothing_trains_and_reports(config, tmp_path, capsys, arguments):
    logger = json.dumps({"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}})
    assert main(["fit", "--config", str(config), f"--trainer.logger={logger}", arguments]) == 0
    assert "at the end" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("many", [False, True])
def test_logs_and_checkpoints_in_ones_home_stand_side_by_side(config, tmp_path, monkeypatch, many):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "~/runs", "name": "a"}}
    arguments = ["--trainer.logger", json.dumps([logger] if many else logger), "--checkpoint.dirpath", "null"]
    assert main(["fit", "--config", str(config), *arguments]) == 0
    assert not list((tmp_path / "elsewhere").iterdir())
    inside = {path.name for path in (tmp_path / "runs" / "a" / "version_0").iterdir()}
    assert {"checkpoints", "config.yaml", "metrics.csv"} <= inside


def test_several_devices_print_a_continuation_once(capsys):
    for rank in range(2):
        cli = SimpleNamespace(trainer=SimpleNamespace(predict=lambda: ["salt wool"], is_global_zero=rank == 0))
        PackhorseCLI.predict(cli)
    assert capsys.readouterr().out == "salt wool\n"
