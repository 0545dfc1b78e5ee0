"""The README tells the truth: its commands run, its names exist, its tree is the house."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import packhorse
from packhorse.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.val_check_interval=2"]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.S)


def console_commands() -> list[list[str]]:
    lines = [line.partition("#")[0] for block in blocks("console") for line in block.splitlines()]
    return [shlex.split(line)[3:] for line in lines if line.startswith("$ python main.py")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder in which the README's commands are typed, with texts and a tokenizer under its names."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "configs").symlink_to(ROOT / "configs")
    texts = folder / "my" / "texts"
    texts.mkdir(parents=True)
    rows = [{"text": f"document {i}: " + "salt and wool over the hills " * (1 + i % 40)} for i in range(400)]
    (texts / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def quickstart(workplace):
    """What the first command of the README leaves behind: its report."""
    command = blocks("bash")[0].strip().split("&&")[-1].strip()
    assert command == "python main.py fit --config configs/quickstart.yaml"
    arguments = shlex.split(command)[2:]
    run = subprocess.run(
        [sys.executable, str(ROOT / "main.py"), *arguments, *SHORT], cwd=workplace, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    # Under the name of the README's examples.
    (workplace / "gpt2").symlink_to(workplace / "runs" / "quickstart" / "tokenizer")
    return run.stderr


def test_the_first_command_builds_trains_and_reports(quickstart, workplace):
    plan, report = quickstart.partition("Report")[::2]
    for word in ("Trained a tokenizer", "chunks built", "sequences", "steps", "parameters", "time"):
        assert word in plan, word
    for word in ("utilisation", "bytes per token", "at the beginning", "unigram entropy", "tokens/s", "Next"):
        assert word in report, word
    assert list((workplace / "runs" / "quickstart").rglob("events.out.tfevents.*"))


def test_the_next_commands_of_the_report_can_be_typed(quickstart, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    (command,) = re.findall(r"python main.py (predict .*)", quickstart)
    assert main(shlex.split(command)) == 0
    assert "def " in capsys.readouterr().out
    (folder,) = re.findall(r"tensorboard --logdir (.*)", quickstart)
    assert Path(folder).is_dir()


def test_the_commands_for_own_text_run(quickstart, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    commands = console_commands()
    assert {command[0] for command in commands} == {"preview", "fit"}
    for command in commands:
        assert main([*command, *SHORT]) == 0
    runs = {path.parent.relative_to("runs") for path in Path("runs").rglob("config.yaml")}
    assert runs == {Path("quickstart/version_0"), Path("mine/version_0")}, "so that each has a `last` of its own"


@pytest.mark.parametrize("command", ["validate", "test"])
def test_the_evaluation_commands_run(quickstart, workplace, monkeypatch, command):
    monkeypatch.chdir(workplace)
    assert f"`{command}`" in README
    (checkpoint,) = re.findall(r"checkpoint  (.*)", quickstart)
    short = ["--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"]
    assert main([command, "--config", "configs/quickstart.yaml", "--ckpt_path", checkpoint, *short]) == 0


@pytest.mark.parametrize("verb", ["build", "status", "validate"])
def test_the_cache_commands_run(quickstart, workplace, monkeypatch, verb):
    monkeypatch.chdir(workplace)
    assert f"`cache {verb}`" in README
    assert main(["cache", verb, "--config", "configs/quickstart.yaml"]) == 0


def test_the_python_example_runs(quickstart, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    names = {"documents": [f"text {i} of the example " * 30 for i in range(200)]}
    exec(blocks("python")[0], names)
    assert names["rows"].tokens.shape == (3, 512)


def test_the_public_names_of_the_readme_are_those_of_the_package():
    section = README.partition("## In Python and notebooks")[2].partition("The two Lightning classes")[0]
    assert set(re.findall(r"`(\w+)`", section)) - {"packhorse"} == set(packhorse.__all__) - {"__version__"}
    for name in packhorse.__all__:
        assert getattr(packhorse, name)


def test_the_tree_of_the_readme_is_the_house():
    tree = README.partition("## The house")[2].partition("## Figures")[0]
    named = set(re.findall(r"\b(\w+\.py)\b", tree))
    there = {path.name for path in (ROOT / "src").rglob("*.py") if path.name != "__init__.py"} | {"main.py"}
    assert named == there


def test_links_of_the_readme_and_the_docs_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page}: {link}"


def test_main_py_works_without_an_installation(tmp_path):
    environment = {**os.environ, "PYTHONPATH": ""}
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import runpy; runpy.run_path({str(ROOT / 'main.py')!r})"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
