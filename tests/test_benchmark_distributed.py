"""The benchmark of context parallelism: its tables, and their figure."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "distributed"))

import launcher

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--tokens", "8192", "--heads", "2", "--kv-heads", "1"]


def run(*arguments, text=None, code=0, **environment):
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, cwd=ROOT / "benchmark", env={**os.environ, **environment}
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


def rows_of(text):
    cells = [line.split() for line in text.splitlines()]
    return [row for row in cells if len(row) > 5 and any(cell.isdigit() for cell in row[:2])]


def test_bytes_are_the_same_on_every_machine(tmp_path):
    table = run("distributed.py", *SMALL, "--ranks", "2", "64")
    rows = rows_of(table)
    assert len(rows) == 6 * 2 * 4
    assert all(0 <= float(row[3]) <= 3 and float(row[4]) >= 1 for row in rows)
    windows = [float(row[3]) for row in rows if row[0] == "window_and_sink" and row[2] == "cut"]
    dense = [float(row[3]) for row in rows if row[0] == "dense" and row[2] == "cut"]
    assert max(windows) < min(dense)
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bytes.png"
    run("plot_distributed.py", "-o", str(picture), text=table)
    assert picture.stat().st_size > 10000
    run("plot_distributed.py", text="nothing", code=1)


def test_an_unknown_table_is_refused():
    run("distributed.py", "speed", code=2)


def test_a_missing_mpi_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setenv("MPIRUN", "no_such_mpirun --oversubscribe")
    with pytest.raises(SystemExit, match=r"^distributed\.py: found no no_such_mpirun, which starts the ranks"):
        importlib.import_module("distributed").main(["scaling", "--cores", "1"])
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("sys.argv", ["blitz_attn.distributed"])
    with pytest.raises(SystemExit, match=r"^blitz_attn\.distributed needs mpi4py: pip install mpi4py, or pass --alone$"):
        importlib.import_module("blitz_attn.distributed.__main__").main()


@pytest.mark.long
@pytest.mark.parametrize("what", [["decode", "--ranks", "2"], ["scaling", "--cores", "2"], ["scaling", "--cores", "2", "--backward"]])
def test_measured_rows_have_the_bits_of_one_process(what):
    how = launcher.starter("openmpi")
    if isinstance(how, str):
        pytest.skip(how)
    rows = rows_of(run("distributed.py", *what, *SMALL, "--repeats", "1", MPIRUN=" ".join(how[0])))
    assert len(rows) == 2
    assert all(row[-1] == "yes" for row in rows)
