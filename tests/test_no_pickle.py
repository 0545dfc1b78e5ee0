"""A law of safety: nothing that is read from a disk can run code."""

import ast
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "src" / "packhorse"
RUNS_CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("room", ["cache", "corpus"])
def test_no_file_of_a_cache_or_a_source_is_unpickled_or_evaluated(room):
    for path in sorted((HOUSE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            assert not names & RUNS_CODE, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                assert called not in CALLS, f"{path}:{node.lineno}"
                attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                values = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                assert values.get("allow_pickle") is not True, f"{path}:{node.lineno}"
                assert values.get("trust_remote_code") is not True, f"{path}:{node.lineno}"
                assert attribute not in ("load_pickle", "read_pickle", "system", "popen"), f"{path}:{node.lineno}"
