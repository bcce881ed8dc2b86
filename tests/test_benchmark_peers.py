"""peers.py, roofline.py, speed.py and beside.py at sizes that take no time: what they print, what they refuse, that the others are asked the right question."""

import argparse
import io
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.append(str(BENCHMARK))

import _bench  # noqa: E402
import beside  # noqa: E402
import operations  # noqa: E402
import peers  # noqa: E402
import plot_roofline  # noqa: E402
import prefill_peers  # noqa: E402
import saved  # noqa: E402
import speed  # noqa: E402
from _peers import UnavailableError  # noqa: E402
from _plots import parse_rows  # noqa: E402
from operands import draw  # noqa: E402
from test_benchmark import is_png  # noqa: E402
from test_benchmark import run as run_words  # noqa: E402

TINY = "-S 130 300 -H 2 -D 16 --dtypes float32 bfloat16 --sparsities 0 0.5 --repeats 1 --threads 1 2 --peers"
UNDER_ASAN = "asan" in os.environ.get("LD_PRELOAD", "")


def run(script, options="", *more, **how):
    return run_words(script, *options.split(), *more, **how)


@pytest.mark.parametrize("script", ["peers.py", "plot_peers.py", "plot_roofline.py", "speed.py", "beside.py"])
def test_help(script):
    assert "usage:" in run(script, "--help")[0]


# ---- peers.py ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table():
    return run("peers.py", TINY)[0]


def test_rows_are_right_and_complete(table):
    rows = parse_rows(table, ("dtype",))
    cells = [(dtype, tokens, rule, sparsity, threads)
             for dtype in ("float32", "bfloat16") for tokens in (130, 300)
             for rule, sparsity in (("all", 0), ("all", 0.5), ("causal", 0)) for threads in (1, 2)]  # fmt: skip
    assert [tuple(row[name] for name in ("dtype", "S", "rule", "sparsity", "threads")) for row in rows] == cells
    for row in rows:
        assert (row["contender"], row["Equal"], row["Over_ours"]) == ("ours", "yes", 1)
        assert row["Error"] < prefill_peers.LARGEST_ERROR[row["dtype"]]
        assert row["GFLOP/s"] > 0
        assert row["Limit_[GFLOP/s]"] > 0
    dense = rows[0]
    assert dense["GFLOP/s"] == pytest.approx(2 * 4 * 16 * 130**2 / dense["Time_[usec]"] / 1e3, rel=1e-2, abs=0.1)
    assert "# cells with a peer ahead (below 512 tokens: by more than a tenth): 0 of 0" in table


def test_pieces_are_merged(table, tmp_path):
    (tmp_path / "one.log").write_text(table)
    (tmp_path / "again.log").write_text(table)
    lines = run("peers.py", "--merge", tmp_path / "one.log", tmp_path / "again.log")[0].splitlines()
    assert lines[0].split()[1:8] == list(peers.CELL_COLUMNS)
    assert len(lines) == 1 + 24 + 1
    words = " ".join(["word"] * len(parse_rows(table, ("dtype",))[0]))  # above a second table, as many as it has columns
    assert parse_rows(f"{table}{'=' * 120}\n{words}\n{table}", ("dtype",)) == 2 * parse_rows(table, ("dtype",))


def test_plot_draws_the_table(table, tmp_path):
    pytest.importorskip("matplotlib")
    run("plot_peers.py", "--dpi 40 -o", tmp_path / "figure.png", stdin=table)
    assert is_png(tmp_path / "figure.png")
    error = run("plot_peers.py", "-o", tmp_path / "none.png", stdin="no table\n", code=1)[1]
    assert error == "plot_peers.py: no row of a table of peers.py on stdin, so there is nothing to draw\n"


def question(kind, dtype, tokens=256, heads=2):
    """A question of each kind: everything, causal, or a list with another head another row."""
    lists = sabi.random_with_frame(tokens, tokens, (128, 128), 0.5, heads=heads, seed=3) if kind == "list" else None
    return prefill_peers.Question(draw(1, heads, heads, tokens, 16, dtype, "BNSD", 5), lists, kind == "causal")


@pytest.mark.sampled("options")
@pytest.mark.filterwarnings("ignore")  # what they warn of is theirs
@pytest.mark.parametrize("kind", ["dense", "causal", "list"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["ours", *peers.PEERS])
def test_everybody_is_asked_the_same(name, dtype, kind):
    if UNDER_ASAN and name != "ours":
        pytest.skip("other libraries do things that AddressSanitizer refuses")
    if name == "flex" and dtype != "float32":
        pytest.skip("a compilation each: one dtype is enough")
    asked = question(kind, dtype)
    peer = prefill_peers.OURS if name == "ours" else peers.PEERS[name]
    try:
        call, fetch = peer.make(asked, prefill_peers._cpus() if name == "jax" else 1)
        call()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    except ValueError as reason:  # how JAX says that it has no such product
        assert name == "jax"
        pytest.skip(str(reason).splitlines()[0])
    assert asked.error_of(fetch()) < prefill_peers.LARGEST_ERROR[dtype]


@pytest.mark.parametrize("kind", ["dense", "causal", "list"])
def test_the_check_takes_no_wrong_answer(kind):
    asked = question(kind, "float32")
    call, fetch = prefill_peers.blitz(asked, 1)
    call()
    right = fetch()
    assert asked.error_of(right) < 1e-6
    for other in {"dense", "causal", "list"} - {kind}:
        assert question(other, "float32").error_of(right) > 0.1
    wrong = right.copy()
    wrong[0, 1, -1, 0] = np.nan  # the last row is always looked at
    assert asked.error_of(wrong) == np.inf


def bounds(most_seconds):
    return peers.Bounds(argparse.Namespace(repeats=3, warmup=1, most_seconds=most_seconds, seed=0))


CELL = peers.Cell("float32", 16, 2, 16384, False, 0.9)


def test_a_contender_is_left_out_before_it_takes_too_long(monkeypatch):
    """A shorter sequence says how long it would take; the long one is never called."""
    lengths = []

    def make(asked, threads):
        lengths.append(asked.shape[2])
        return lambda: _bench.time.sleep(0.005), None

    monkeypatch.setitem(peers.PEERS, "torch", prefill_peers.Peer(make, "numpy", (0, 0)))
    asked = CELL.ask(0)
    with pytest.raises(UnavailableError, match=r"6 calls of about \S+ s: more than --most-seconds 1"):
        bounds(1.0).prepare("torch", 1, CELL, asked)
    assert lengths == [CELL.shorter().tokens]
    assert bounds(1000.0).prepare("torch", 1, CELL, asked)
    assert lengths[1:] == [CELL.shorter().tokens, 16384]


def test_the_shorter_sequence_has_a_list_too():
    assert CELL.shorter().tokens < 16384 / 2
    assert (sabi.counts(CELL.shorter().ask(0).lists) > 0).all()
    short = peers.Cell("float32", 16, 2, 600, False, 0.0)
    assert short.shorter() is short


def test_a_contender_is_left_out_before_it_takes_all_memory(monkeypatch):
    monkeypatch.setattr(peers, "memory_available", lambda: 1 << 20)
    with pytest.raises(UnavailableError, match=r"needs about \d+ GiB"):
        bounds(10.0).prepare("numpy", 1, CELL, CELL.ask(0))


def test_reasons_stand_in_the_table(monkeypatch, capsys):
    def refuse(asked, threads):
        raise RuntimeError("Exception from somewhere:\n\nno such kernel\nmore")

    monkeypatch.setitem(peers.PEERS, "numpy", prefill_peers.Peer(refuse, "numpy", (0, 0)))
    wrong = prefill_peers.Peer(lambda asked, threads: (lambda: None, lambda: np.zeros(asked.shape, np.float32)), "numpy", (0, 0))
    monkeypatch.setitem(peers.PEERS, "jax", wrong)
    options = "-S 128 -H 1 -D 16 --dtypes float32 --sparsities 0 --no-causal --repeats 1 --threads 1 --peers numpy jax"
    assert peers.main(options.split()) == 0
    rows = {line.split()[7]: line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["float32"]}
    assert rows["numpy"].endswith("N/A  # no such kernel")
    assert rows["jax"].endswith("N/A  # error 1.0e+00 against float64: not the same result, not timed")


def test_who_is_ahead():
    def row(name, tokens, ratio, rule="all"):
        cell = {"dtype": "float32", "D": 64, "rule": rule, "sparsity": 0.0, "H": 4, "S": tokens, "threads": 1}
        return cell | {"contender": name, "Over_ours": ratio, "GFLOP/s": 10.0, "Share_of_limit": 0.5}

    rows = [row("ours", 256, 1.0), row("torch", 256, 0.95), row("ours", 512, 1.0), row("torch", 512, 0.95), row("jax", 512, 0.5),
            row("ours", 512, 1.0, "causal"), row("torch", 512, None, "causal")]  # fmt: skip
    lines = list(peers.verdict(rows))
    assert lines[0].endswith(": 1 of 3")
    assert lines[1:] == [
        "# 0.50  jax: float32 D=64 S=512 sparsity 0, threads 1",
        "# 0.95  torch: float32 D=64 S=512 sparsity 0, threads 1",
    ]
    summary = list(peers.summary(rows))
    assert summary[0].split()[-2:] == ["torch/ours", "jax/ours"]
    assert [line.split()[-2:] for line in summary[1:]] == [["0.95", "N/A"], ["0.95", "0.50"], ["N/A", "N/A"]]


# ---- roofline.py ---------------------------------------------------------------------------------------------------


@pytest.fixture
def few_operations(monkeypatch):
    chosen = [operations.small("float32"), operations.select("bfloat16"), operations.forward("dense", "bfloat16", tokens=256)]
    monkeypatch.setattr(operations, "every_operation", lambda: chosen)
    monkeypatch.setattr(speed, "every_operation", lambda: chosen)


def test_every_operation_fills_its_output(monkeypatch):
    """Small forms of all of them: `measured` refuses an output with elements that were not written."""
    for name, value in (("TOKENS", 512), ("LARGE_BYTES", 1 << 21), ("SETTLE_SECONDS", 0.0), ("PROBE_SECONDS", 0.001)):
        monkeypatch.setattr(operations, name, value)
    chosen = operations.every_operation()
    points = list(operations.measured(chosen, [1], 1, _bench.Progress(1.0)))
    assert [point.operation for point in points] == chosen
    assert len({point.key for point in points}) == len(points)
    assert all(point.rate > 0 and len(point.shares) == 1 and point.shares[0] > 0 for point in points)
    assert {point.bound for point in points} <= {"F", "P", "R"}
    assert {point.operation.dtype for point in points} >= {"float32", "float16", "bfloat16", "int8"}


def test_shares_follow_from_the_limits(monkeypatch):
    monkeypatch.setattr(operations._core, "probe_flops", lambda level, seconds, threads: 100.0)
    monkeypatch.setattr(operations._core, "probe_tile_flops", lambda level, seconds, threads: 0.0)
    monkeypatch.setattr(operations._core, "probe_read", lambda level, size, seconds, threads: 2.0)
    operation = operations.few("float32", 1)
    (point,) = operations.measured([operation], [1], 3, _bench.Progress(1.0))
    assert point.bound == "R"  # half a flop a byte: 2 GB/s allow one GFLOP/s
    assert operation.bytes == pytest.approx(2 * 8 * 4097 * 128 * 4)
    for share, seconds in zip(point.shares, point.seconds, strict=True):
        assert share == pytest.approx(operation.bytes / 2e9 / seconds)


def test_roofline_prints_and_draws(few_operations, capsys, tmp_path):
    import roofline

    assert roofline.main(["--threads", "1", "--seconds", "0.01", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    limits, points = (parse_rows(text, (first,)) for first in ("what", "operation"))
    assert {row["what"] for row in limits if "what" in row} >= {"flops", "read"}
    points = [row for row in points if "operation" in row]
    assert [row["operation"] for row in points] == ["small_call", "select", "dense"]
    assert points[2]["flop/byte"] == 128  # 4 D flop a pair over 4 x 2 D bytes a token, 256 pairs a token
    pytest.importorskip("matplotlib")
    run("plot_roofline.py", "--dpi 40 -o", tmp_path / "figure.png", stdin=text)
    assert is_png(tmp_path / "figure.png")
    cut = "".join(line + "\n" for line in text.splitlines() if line.split()[:1] != ["operation"])
    assert "expected limits and operations" in run("plot_roofline.py", "-o", tmp_path / "none.png", stdin=cut.split("\n\n")[0], code=1)[1]


# ---- speed.py ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dram", [1.0, 6.0, 35.0])
def test_names_of_slopes_stand_clear_of_marks(dram):
    pytest.importorskip("matplotlib")
    limits = [{"what": "flops", "level": "avx2", "threads": 1, "value": 90.0}]
    limits += [{"what": "read", "level": level, "threads": 1, "value": value} for level, value in (("L2", 100.0), ("DRAM", dram))]
    operation = {"operation": "decode", "dtype": "float32", "level": "avx2", "threads": 1}
    points = [{**operation, "flop/byte": 2.0**n, "GFLOP/s": min(dram * 2.0**n, 180.0)} for n in range(-1, 8)]
    figure = plot_roofline.draw(limits + points, None, 60)
    figure.savefig(io.BytesIO(), format="png")
    (axes,) = figure.axes
    names = [text.get_window_extent() for text in axes.texts if "GB/s" in text.get_text()]
    marks = axes.transData.transform([(row["flop/byte"], row["GFLOP/s"]) for row in points])
    assert len(names) == 2
    for name in names:
        assert axes.bbox.containsx(name.x0)
        assert axes.bbox.y0 <= name.y0 < name.y1 <= axes.bbox.y1
        assert name.x1 < marks[:, 0].min()
    assert marks[:, 1].max() < axes.bbox.y1


def test_a_record_is_compared_with(few_operations, tmp_path, capsys):
    record = tmp_path / "record.json"
    options = ["--threads", "1", "--repeats", "2", "--file", str(record)]
    assert speed.main(["--record", *options]) == 0
    kept = json.loads(record.read_text())
    assert [row["operation"] for row in kept["rows"]] == ["small call", "select", "dense"]
    assert set(kept) == {"machine", "version", "commit", "compiler", "date", "rows"}
    assert set(kept["machine"]) == {"cpu", "threads", "level", "caches"}
    for number, row in enumerate(kept["rows"], start=1):
        row["shares"] = [number * share for share in (0.1, 0.3)]
    del kept["rows"][1]
    record.write_text(json.dumps(kept))
    capsys.readouterr()
    assert speed.main(["--compare", *options]) == 0
    rows = parse_rows(capsys.readouterr().out, ("operation",))
    assert [row["operation"] for row in rows] == ["small_call", "select", "dense"]
    assert rows[1]["Was"] is None
    assert [rows[0]["Was"], rows[2]["Was"]] == [pytest.approx(0.2), pytest.approx(0.6)]
    assert all(row["Share"] > 0 for row in rows)


def test_a_record_tells_nothing_of_its_host(few_operations, tmp_path):
    """Nor of its folders: CPU model, threads, level and caches are all that there is of the machine."""
    assert speed.main(["--record", "--threads", "1", "--repeats", "1", "--file", str(tmp_path / "r.json")]) == 0
    assert str(tmp_path) not in (tmp_path / "r.json").read_text()
    named = {"cpu": "Some(R) CPU(TM) @ 2.0 GHz/x", "threads": 4, "level": "avx2", "caches": {"L2": 1 << 20, "L1": 1 << 15}}
    assert saved.tag(named) == "some-cpu-2.0-ghz-x-4-avx2-l1.32k-l2.1024k"


@pytest.mark.parametrize(
    ("was", "now", "bound", "flag"),
    [
        ([0.8] * 5, [0.7] * 5, "F", "SLOWER"),
        ([0.8] * 5, [0.7] * 5, "R", "-"),
        ([0.5] * 5, [0.6] * 5, "R", "faster"),
        ([0.8] * 5, [0.77] * 5, "P", "-"),  # less than a twentieth
        ([0.8, 0.7, 0.9, 0.6, 1.0], [0.7, 0.6, 0.8, 0.5, 0.9], "F", "-"),  # less than the spreads
        ([0.8], [0.4], "F", "SLOWER"),
    ],
)
def test_what_counts_as_moved(was, now, bound, flag):
    assert speed.moved(was, now, bound)[1] == flag


@pytest.mark.parametrize(("text", "sentence"), [(None, "make bench-record makes a record"), ("half a", "not a record, for it is not JSON")])
def test_no_record(text, sentence, tmp_path, capsys):
    record = tmp_path / "record.json"
    if text:
        record.write_text(text)
    assert speed.main(["--compare", "--file", str(record)]) == 1
    assert sentence in capsys.readouterr().err


def test_contenders_settle_outside_the_clock():
    calls = []

    def call():
        calls.append(0)
        _bench.time.sleep(0.004)

    contender = _bench.Contender("cold", call, 1.0, settle=0.01)
    ((_, timing),) = _bench.in_turns([contender], repeats=2, warmup=1, progress=_bench.Progress(1.0))
    assert len(timing.samples) == 2
    assert len(calls) >= 2 * (1 + 2)  # a timed call and at least one ahead of it, in every turn


def test_results_of_this_repository_say_where_they_are_from():
    files = sorted(saved.RESULTS.glob("*/*.txt"))
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        head = saved.read_head(text)
        assert set(saved.HEAD) <= set(head), path
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", head["commit"]), path
        assert re.fullmatch(r"2\d\d\d-\d\d-\d\d", head["date"]), path
        assert any(line.strip() and not line.startswith("#") for line in text.splitlines()), path


def test_records_of_this_repository_can_be_read():
    for path in saved.RESULTS.glob("*/*.json"):
        kept = speed.read(path)
        assert path.parent.name == saved.tag(kept["machine"])
        assert all(row["shares"] and len(row["key"].split(", ")) >= 4 for row in kept["rows"])


# ---- saved.py ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "name"), [(["--save"], "script.txt"), (["--save", "other"], "other.txt")])
def test_what_is_printed_is_kept_under_its_head(option, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["folder/script.py", "--quick", *option])
    assert saved.main_with_save(lambda: print("a row") or 0) == 0
    assert capsys.readouterr().out == "a row\n"  # standard output is as without the option
    text = (tmp_path / saved.tag(saved.machine()) / name).read_text()
    assert text.endswith("\na row\n")
    head = saved.read_head(text)
    assert list(head) == list(saved.HEAD)
    assert head["command"] == " ".join(["python benchmark/script.py --quick", *option])


def ends(how, printed):
    """A script's `main` that prints something or nothing, and then returns a number or raises."""

    def main(argv=None):
        if printed:
            print("a row")
        if isinstance(how, int):
            return how
        raise how

    return main


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("how", [1, SystemExit(2), KeyboardInterrupt(), BrokenPipeError()], ids=repr)
def test_results_are_replaced_by_a_run_that_ends_well(how, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py", "--save"])
    assert saved.main_with_save(ends(0, True)) == 0
    path = tmp_path / saved.tag(saved.machine()) / "script.txt"
    path.write_text("earlier results")
    if isinstance(how, int):
        assert saved.main_with_save(ends(how, printed)) == how
    else:
        with pytest.raises(type(how)):
            saved.main_with_save(ends(how, printed))
    assert path.read_text() == "earlier results"
    part = path.with_name("script.txt.part")
    assert part.exists() == printed
    if printed:
        assert part.read_text().endswith("\na row\n")
        assert f"{part}: what was printed" in capsys.readouterr().err
    assert saved.main_with_save(ends(0, True)) == 0
    assert path.read_text().endswith("\na row\n")
    assert not part.exists()


def test_a_reader_that_goes_away_is_no_good_end(tmp_path, monkeypatch):
    """A script's `command` is then silent, and returns 0."""
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py", "--save"])
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as gone:
        monkeypatch.setattr("sys.stdout", gone)
        code = saved.main_with_save(_bench.command(ends(0, True)))
        monkeypatch.undo()
    assert code == 0
    assert [path.name for path in tmp_path.glob("*/*")] == ["script.txt.part"]


@pytest.mark.parametrize("options", [["--quick"], ["--save", "--help"], ["-h", "--save"]])
def test_nothing_is_kept_without_the_option_or_of_a_help_text(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py", *options])
    assert saved.main_with_save(lambda: print("a row") or 0) == 0
    assert capsys.readouterr().out == "a row\n"
    assert not list(tmp_path.iterdir())


# ---- beside.py -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_build(tmp_path_factory):
    """What stands for another checkout: this build's package, under another path."""
    checkout = tmp_path_factory.mktemp("other")
    shutil.copytree(Path(blitz_attn.__file__).parent, checkout / "blitz_attn")
    return checkout


def test_two_builds_side_by_side(other_build, few_operations, monkeypatch, capsys):
    monkeypatch.setattr(operations, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(beside, "GROUPS", (2,))
    monkeypatch.setattr(beside, "every_operation", operations.every_operation)
    assert beside.main([str(other_build), "--threads", "1", "2", "--turns", "2", "--kv-mib", "1", "--only", "s", "bfloat16"]) == 0
    rows = parse_rows(capsys.readouterr().out, ("operation",))
    expected = [("small_call", "float32"), ("select", "bfloat16"), ("dense", "bfloat16"), ("decode_G=2", "bfloat16")]
    assert [(row["operation"], row["dtype"], row["threads"]) for row in rows] == [(*one, threads) for one in expected for threads in (1, 2)]
    for row in rows:
        assert row["Same_bits"] == "yes"
        assert 0 < row["Low"] <= row["This/other"] <= row["High"]


def test_the_other_build_is_another(other_build):
    other = beside.load(other_build, "blitz_attn_of_the_test")
    assert other._core is not blitz_attn._core
    assert other._core.__file__ != blitz_attn._core.__file__
    other.set_num_threads(blitz_attn.get_num_threads() + 3)
    assert other.get_num_threads() == blitz_attn.get_num_threads() + 3  # each has its own state


def test_other_bits_are_seen(few_operations, monkeypatch):
    """A library whose dense call returns something else."""
    operation = operations.every_operation()[2]
    wrong = types.SimpleNamespace(block_sparse_attention=lambda q, k, v, *_, out, **__: out.__setitem__(slice(None), v))
    assert beside.compared(operation, 1, wrong, 2, _bench.Progress(1.0))["Same_bits"] == "NO"


@pytest.mark.parametrize(("folder", "sentence"), [("", "built in place"), (Path(blitz_attn.__file__).parent.parent, "is what is measured")])
def test_no_other_build(folder, sentence, tmp_path, capsys):
    assert beside.main([str(folder or tmp_path)]) == 1
    assert sentence in capsys.readouterr().err
