"""Laws of the notebook: it runs from top to bottom in an empty folder, and shows what it promises."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The notebook, executed, and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKHORSE_STEPS", "50")
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, folder


def test_notebooks_are_kept_without_outputs():
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path
            assert cell.get("execution_count") is None, path


def test_the_cache_is_nearly_full(quickstart):
    (utilisation,) = re.findall(r"utilisation ([\d.]+)%", printed(quickstart[0]))
    assert 95 < float(utilisation) <= 100


def test_the_pieces_of_a_sequence_come_from_different_documents(quickstart):
    pieces = re.findall(r"(\d+) tokens of (\S+) \([\d,]+ bytes\): ", printed(quickstart[0]))
    assert 2 <= len({name for _, name in pieces}) == len(pieces)
    assert 0 < sum(int(length) for length, _ in pieces) <= 256


def test_a_figure_is_drawn(quickstart):
    figures = [output for output in outputs(quickstart[0]) if "image/png" in output.get("data", {})]
    assert len(figures) == 1


def test_the_loss_falls_below_guessing_by_frequency(quickstart):
    text = printed(quickstart[0])
    ((before, after),) = re.findall(r"evaluation text: ([\d.]+) -> ([\d.]+) after 50 steps", text)
    (entropy,) = re.findall(r"alone would cost ([\d.]+)", text)
    assert float(after) < float(entropy) < float(before)


def test_a_text_is_generated_for_every_prompt(quickstart):
    texts = printed(quickstart[0].cells[-2]).split("\n---\n")[:-1]
    assert [text.startswith(prompt) for text, prompt in zip(texts, ("def ", "import "), strict=True)] == [True, True]
    assert all(len(text) > 10 for text in texts)


def test_everything_is_written_to_runs(quickstart):
    assert {path.name for path in quickstart[1].iterdir()} == {"runs", "ipython"}


def outputs(part) -> list:
    return [output for cell in part.get("cells", [part]) for output in cell.get("outputs", [])]


def printed(part) -> str:
    return "".join(output["text"] for output in outputs(part) if output.get("name") == "stdout")
