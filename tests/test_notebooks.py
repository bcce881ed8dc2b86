"""The notebooks in examples/ run, and hold the outputs of a whole run."""

import importlib.util
import json
import sys
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
    """What outputs a cell has: their kinds, and whether they are pictures."""
    return [(output["output_type"], "image/png" in output.get("data", ())) for output in cell["outputs"]]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["choosing", "serving", "tour"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, runner, tmp_path):
    """As a user would: in a process of its own. It leaves the same kinds of outputs as are stored."""
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
    """Away from a checkout they are made up."""
    pytest.importorskip("matplotlib")
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert runner.run_all([copy], check=True) == 0


def test_outputs_are_stored_whole():
    for path in NOTEBOOKS:
        cells = code_cells(path)
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
        assert path.stat().st_size < 500_000


def test_a_cell_that_raises(runner, tmp_path, capfd):
    """The run fails and nothing is stored."""
    path = tmp_path / "bad.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["1 / 0"], "outputs": [], "execution_count": None}]}))
    before = path.read_text()
    assert runner.run_all([path], check=False) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert path.read_text() == before


def test_outputs_of_a_cell(runner):
    """What is printed, and the value of the last expression."""
    names = {}
    assert runner.run_cell("x = 1\nprint(x)\nx + 1", 3, names) == [
        {"name": "stdout", "output_type": "stream", "text": ["1\n"]},
        {"data": {"text/plain": ["2"]}, "execution_count": 3, "metadata": {}, "output_type": "execute_result"},
    ]
    assert runner.run_cell("x = 5", 4, names) == []
    assert names["x"] == 5
    assert "matplotlib.pyplot" not in sys.modules or runner.figures() == []
