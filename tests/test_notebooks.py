"""The notebooks in examples/ run, and contain the outputs of a complete run."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(path):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
    """The kind of each output of a cell, and whether the output is a picture."""
    return [(output["output_type"], "image/png" in output.get("data", ())) for output in cell["outputs"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, runner, tmp_path):
    """A notebook runs in a process of its own, and gives the same kinds of outputs as are stored."""
    pytest.importorskip("matplotlib")
    copy = tmp_path / "examples" / path.name
    copy.parent.mkdir()
    copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    data = tmp_path / "tests" / "data"
    data.parent.mkdir()
    data.symlink_to(ROOT / "tests" / "data")
    assert runner.run_all([copy], check=False) == 0
    assert [kinds(cell) for cell in code_cells(copy)] == [kinds(cell) for cell in code_cells(path)]


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != "serving"], ids=lambda path: path.stem)
def test_notebook_runs_without_the_model_s_heads(path, runner, tmp_path):
    """Outside a checkout, the notebook uses made-up heads."""
    pytest.importorskip("matplotlib")
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert runner.run_all([copy], check=True) == 0


def test_stored_outputs_are_complete():
    for path in NOTEBOOKS:
        cells = code_cells(path)
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
        assert path.stat().st_size < 500_000
