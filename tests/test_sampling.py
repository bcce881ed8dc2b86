"""How the suite itself is run: samples of grids have every pair of options, and the run in several processes loses no failure."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import sampling

HERE = Path(__file__).resolve().parent


def pairs_of(cells):
    return {pair for cell in cells for pair in itertools.combinations(enumerate(cell), 2)}


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_has_every_pair_of_options(seed):
    cells = [cell for cell in itertools.product("abcdefg", (1, 2, 3, 4), (True, False), "xyz") if cell[:2] != ("a", 1)]
    taken = [cells[n] for n in sampling.covering(cells, random.Random(seed))]
    assert pairs_of(taken) == pairs_of(cells)
    assert len(taken) < len(cells) / 3


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_options_has_every_option(seed):
    cells = [cell for cell in itertools.product("abcdefg", (1, 2, 3, 4), (True, False), "xyz") if cell[:2] != ("a", 1)]
    taken = [cells[n] for n in sampling.covering(cells, random.Random(seed), pairs=False)]
    assert [{*options} for options in zip(*taken, strict=True)] == [{*options} for options in zip(*cells, strict=True)]
    assert len(taken) == 7


def test_a_sample_of_one_axis_is_all_of_it():
    assert sorted(sampling.covering([(n,) for n in range(9)], random.Random(0))) == list(range(9))


def test_seeds_draw_other_samples():
    cells = list(itertools.product(range(6), range(5), range(4), range(3)))
    first, again, other = (set(sampling.covering(cells, random.Random(seed))) for seed in ("1 name", "1 name", "2 name"))
    assert first == again
    assert first != other


class Item:
    """What sampling.py asks of a test of pytest's. Not sampled."""

    def __init__(self, function, n=None, mark=None):
        self.mark = mark
        self.nodeid = function if n is None else f"{function}[{n}]"
        if n is not None:
            self.callspec = True

    def get_closest_marker(self, name):
        return self.mark == name


def test_one_test_in_three_of_every_function(monkeypatch):
    items = [Item(function, n) for function, count in (("one", 1), ("two", 2), ("ten", 10)) for n in range(count)]
    items += [Item(f"file.py::{n}") for n in range(7)]
    items += [Item("levels", n, "whole") for n in range(4)]
    for one_in, cells_one_in, expected in ((1, 1, [1, 2, 10, 7]), (1, 3, [1, 1, 4, 7]), (3, 3, [1, 1, 4, 3])):
        monkeypatch.setattr(sampling, "ONE_IN", one_in)
        monkeypatch.setattr(sampling, "CELLS_ONE_IN", cells_one_in)
        left_out = sampling.left_out(items)
        counts = [sum(item.nodeid.startswith(name) for item in {*items} - left_out) for name in ("one", "two", "ten", "file.py", "levels")]
        assert counts == [*expected, 4]
        assert sampling.left_out(items) == left_out
        if not sampling.ALL:
            assert ("one case in 3" in sampling.description()) == (cells_one_in == 3)
            assert ("one in 3 of the tests" in sampling.description()) == (one_in == 3)


# ---- Several processes ----------------------------------------------------------------------------------------------

FILES = {
    "passes": "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_one(n): pass\ndef test_two(): pytest.skip('no reason')\n",
    "also_passes": "def test_three(): pass\n",
    "fails": "def test_four(): assert 1 == 2, 'what went wrong'\n",
    "has_no_setup": "import pytest\n@pytest.fixture\ndef broken(): raise ValueError\ndef test_five(broken): pass\n",
    "breaks_down": "import os\ndef test_six(): os._exit(0)\n",
    "cannot_be_imported": "import there_is_no_such_module\n",
}


def run_suite(folder, names, *arguments):
    """(exit status, lines) of tests/run.py over files of these names, in two processes."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for name in names:
        (folder / f"test_{name}.py").write_text(FILES[name], encoding="utf-8")
    environment = {**os.environ, "BLITZ_ATTN_TEST_PROCESSES": "2", "SAMPLE_SEED": "7", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take long to import
    command = [sys.executable, str(HERE / "run.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
    return done.returncode, done.stdout.splitlines()


def test_processes_together_run_each_test_once(tmp_path):
    status, lines = run_suite(tmp_path, ["passes", "also_passes"])
    assert status == 0
    assert "= 6 passed, 1 skipped in " in lines[-1]
    assert "SAMPLE_SEED=7" in lines[0]


@pytest.mark.parametrize(
    ("name", "told"),
    [("fails", "what went wrong"), ("has_no_setup", "ValueError"), ("breaks_down", "broke down"), ("cannot_be_imported", "ModuleNotFoundError")],
)
def test_no_failure_is_lost(name, told, tmp_path):
    status, lines = run_suite(tmp_path, ["passes", "also_passes", name])
    assert status == 1
    assert any(told in line for line in lines)
    assert "failed" in lines[-1] or "error" in lines[-1]
    assert "SAMPLE_SEED=7" in lines[-2]


def test_a_run_without_a_test_is_no_success(tmp_path):
    status, lines = run_suite(tmp_path, ["passes", "also_passes"], "-k", "nothing")
    assert status == 5
    assert " passed" not in lines[-1]


def test_arguments_that_name_files_reach_pytest(tmp_path):
    status, lines = run_suite(tmp_path, ["passes", "fails"], "test_passes.py", "-q")
    assert status == 0
    assert lines[-1].startswith("5 passed, 1 skipped in ")
