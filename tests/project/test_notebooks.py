"""Notebooks run from top to bottom, and lie here with what they showed."""

import os

import pytest
from paths import ROOT

nbformat = pytest.importorskip("nbformat", reason="pip install 'hf-specdec[notebooks]'")
pytest.importorskip("nbclient", reason="pip install 'hf-specdec[notebooks]'")
pytest.importorskip("ipykernel", reason="pip install 'hf-specdec[notebooks]'")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = "1-quickstart.ipynb"


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_there_are_six():
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_saved_with_its_outputs(path):
    """A badge, a first cell that installs, every cell run in order, no error, and a plot."""
    nbformat.validate(nbformat.read(path, as_version=4))
    first, code = cells(path, "markdown")[0].source, cells(path, "code")
    assert f"colab.research.google.com/github/hf-specdec/hf-specdec/blob/main/notebooks/{path.name}" in first
    assert "pip" in code[0].source and "find_spec" in code[0].source
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    messages = [output.text for output in outputs if output.get("name") == "stderr"]
    assert all("lossy" in text for text in messages), messages  # what the rule "typical" says of itself
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    assert "GPU" in text and "Hub" in text  # what changes there
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.name == QUICK else pytest.mark.slow) for path in NOTEBOOKS],
)
def test_it_runs(path, tmp_path, monkeypatch):
    """In a folder of its own, with this checkout's package; every `assert` of a notebook counts."""
    from nbclient import NotebookClient

    if path.name.startswith("5"):
        pytest.importorskip("uvicorn", reason="pip install 'hf-specdec[serve]'")
        pytest.importorskip("openai", reason="pip install 'hf-specdec[serve]'")
    if path.name.startswith("4"):
        pytest.importorskip("accelerate", reason="pip install 'hf-specdec[train]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
