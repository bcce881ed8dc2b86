"""The benchmark of native sparse attention at sizes that take no time: what it prints, what it refuses, that it notices wrong results."""

import csv
import io
import json

import pytest

from test_benchmark import BENCHMARK, is_png  # finds the scripts
from test_benchmark_decode import run

import nsa  # isort: skip
import plot_nsa  # isort: skip
from _plots import parse_rows  # isort: skip

SIZES = "-H 4 --kv-heads 2 -D 16 --block 16 --selected 4 --window 21 --tile 32 --repeats 1"
TABLE = f"--tokens 100 257 {SIZES} --threads 1 2"


@pytest.fixture(scope="module", params=["paper", "mslk"])
def table(request):
    return run("nsa.py", TABLE, "--mode", request.param, "--dtype", "float32")[0]


@pytest.mark.parametrize("script", ["nsa.py", "plot_nsa.py"])
def test_help(script):
    assert (BENCHMARK / script).exists()
    assert "usage:" in run(script, "--help")[0]


def test_rows_are_right_and_complete(table):
    rows = parse_rows(table, ("N",))
    assert [(row["N"], row["threads"]) for row in rows] == [(100, 1), (100, 2), (257, 1), (257, 2)]
    for row in rows:
        assert row["Outputs_equal"] == "yes"
        assert row["Dense_by"] == "run"
        for tag in ("fwd", "f+b"):
            assert row[f"Speedup_{tag}"] == pytest.approx(row[f"Dense_{tag}_[ms]"] / row[f"NSA_{tag}_[ms]"], abs=0.1, rel=0.3)
        for parts in (nsa.FORWARD_PARTS, nsa.BACKWARD_PARTS):
            assert sum(row[name] for name in parts) == pytest.approx(1, abs=0.01)
    assert table.count("faster than dense from a length") == 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_and_dtypes(dtype):
    rows = parse_rows(run("nsa.py", f"--tokens 300 {SIZES} --threads 1 --weights --dtype {dtype}")[0], ("N",))
    assert [row["Outputs_equal"] for row in rows] == ["yes"]


def test_dense_beyond_the_budget_is_grown(tmp_path):
    """No dense call is as quick as a nanosecond, so only the first is measured."""
    files = "--csv", tmp_path / "t.csv", "--json", tmp_path / "t.json"
    run("nsa.py", f"--tokens 100 200 400 {SIZES} --threads 1 --passes forward --no-parts --dense-seconds 1e-9 --dtype float32", *files)
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["Dense_by"] for row in rows] == ["run", "N^2", "N^2"]
    times = [float(row["Dense_fwd_[ms]"]) for row in rows]
    assert times[1:] == pytest.approx([4 * times[0], 16 * times[0]])
    assert all(not row["NSA_f+b_[ms]"] and not row["cmp"] for row in rows)
    assert len(json.loads((tmp_path / "t.json").read_text())["rows"]) == 3


def test_plot_draws_the_table(table, tmp_path):
    pytest.importorskip("matplotlib")
    run("plot_nsa.py", "--dpi 40 -o", tmp_path / "figure.png", stdin=table)
    assert is_png(tmp_path / "figure.png")


def test_the_parts_are_named_beside_their_bars(table):
    pytest.importorskip("matplotlib")
    figure = plot_nsa.draw(parse_rows(table, ("N",)), None, 60)
    figure.savefig(io.BytesIO(), format="png")
    panel = figure.axes[2]
    assert panel.get_legend().get_window_extent().y0 >= panel.bbox.y1


def test_plot_refuses_what_holds_no_rows(tmp_path):
    error = run("plot_nsa.py", "-o", tmp_path / "figure.png", stdin="no table here\n", code=1)[1]
    assert error.endswith("so there is nothing to draw\n")


def test_bad_arguments():
    assert "--kv-heads: expected a divisor of 3 heads, got 2" in run("nsa.py", "-H 3 --kv-heads 2", code=2)[1]


def test_wrong_outputs_are_noticed():
    args = nsa.parse_args(f"--tokens 300 {SIZES} --dtype float32".split())
    problem = nsa.Problem(300, args)
    problem.forward()
    assert problem.is_equal()
    problem.out[0, -1, 3] *= 1.1
    assert not problem.is_equal()
    problem.forward()
    problem.out[0, 7, 1].view("uint8")[...] = 0xFF
    assert not problem.is_equal()
    problem.forward()
    problem.kept["select"] = problem.routing().copy()
    problem.kept["select"][..., 0] = -1
    assert not problem.is_equal()


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ([(1024, 2.0)], "below 1024"),
        ([(1024, 0.5), (2048, 0.9), (4096, 1.1)], "between 2048 and 4096"),
        ([(1024, 0.5)], "above 1024"),
        ([(1024, None)], "not measured"),
    ],
)
def test_crossover(speedups, words):
    assert nsa.crossover([{"N": tokens, "x": speedup} for tokens, speedup in speedups], "x") == words
