"""Which room may import which: the arrows of the house."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "src" / "packhorse"
HEAVY = ("torch", "lightning", "transformers", "datasets", "torchmetrics")
ALLOWED = {
    "corpus": {"corpus", "errors"},
    "cache": {"cache", "corpus", "errors"},
    "models": {"models", "errors"},
    "evaluation": {"evaluation", "models", "corpus", "errors"},
    "training": {"training", "evaluation", "models", "cache", "corpus", "errors"},
}


def imported(path: Path) -> set[str]:
    """All modules that a file names in imports, wherever they stand."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("room", ALLOWED)
def test_no_room_imports_one_that_it_must_not(room):
    for path in sorted((HOUSE / room).rglob("*.py")):
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("packhorse.")}
        strangers = {
            name for name in rooms & {p.name for p in HOUSE.iterdir() if p.is_dir()} if name not in ALLOWED[room]
        }
        assert not strangers, f"{path} imports {strangers}"


def test_models_know_neither_lightning_nor_files():
    for path in [*(HOUSE / "models").rglob("*.py"), *(HOUSE / "evaluation").rglob("*.py")]:
        assert not any(name.split(".")[0] in ("lightning", "lz4", "pyarrow") for name in imported(path)), path


@pytest.mark.parametrize(
    "module", ["packhorse", "packhorse.corpus.sources", "packhorse.cache.update", "packhorse.cache.commands"]
)
def test_text_and_disk_are_imported_without_torch(module):
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
