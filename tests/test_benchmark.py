"""The benchmark scripts at sizes that take no time: tables, figures, refusals, results that are kept, and the arithmetic that readers rely on."""

import csv
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import select, testing

HERE = Path(__file__).resolve().parent
BENCHMARK = HERE.parent / "benchmark"
SLICE = HERE / "data" / "smollm2_qkv.npz"
sys.path[:0] = [str(BENCHMARK), str(HERE / "distributed")]

import _bench  # noqa: E402
import beside  # noqa: E402
import choosing  # noqa: E402
import launcher  # noqa: E402
import nsa  # noqa: E402
import operation_set  # noqa: E402
import peers  # noqa: E402
import plot  # noqa: E402
import result_files  # noqa: E402
import speed  # noqa: E402

UNDER_ASAN = "asan" in os.environ.get("LD_PRELOAD", "")  # other libraries do things that AddressSanitizer refuses

# Script, options, first column of its table, rows.
TINY = "-S 200 -H 2 -D 16 --block-shapes 32x32 64x32 --sparsities 0 0.5 --repeats 1 --threads 1"
DECODE = "--shapes 2x4x2x50 1x3x3x33 --page 16 --head-dim 24 --repeats 1 --threads 1 2"
QUEST = "--contexts 100 512 --blocks 4 8 -H 4 --kv-heads 2 -D 16 --page 16 --repeats 1 --threads 1 --dtype float32"
NSA = "--tokens 100 257 -H 4 --kv-heads 2 -D 16 --block 16 --selected 4 --window 21 --tile 32 --repeats 1 --threads 1"
SMALL = {
    "benchmark": ("benchmark", TINY, "block_shape", 4),
    "real input": ("benchmark", f"--input {SLICE} --layers 14 --block-shapes 64x64 --sparsities 0 0.4 --repeats 1 --warmup 0", "block_shape", 3),
    "roofline": ("roofline", "--threads 1 --seconds 0.01 --repeats 1", "operation", None),
    "speed": ("speed", "--threads 1 --repeats 1", "operation", None),
    "peers": ("peers", "-S 130 300 -H 2 -D 16 --sparsities 0 0.5 --repeats 1 --threads 1", "dtype", None),
    "backward": ("backward", "-S 200 -H 2 -D 16 --block-shape 32x32 --sparsities 0 0.5 --repeats 1 --dtypes float32 --no-torch --threads 1 2", "dtype", 8),
    "masks": ("masks", "--seq 100 --heads 4 --head-dim 24 --repeats 1 --dtypes float32 bfloat16 --no-torch", "dtype", 22),
    "decode": ("decode", f"{DECODE} --dtypes float32 float16 bfloat16 int8 float8_e4m3", "cell", 20),
    "decode by head": ("decode", f"{DECODE} --dtypes bfloat16 int8 --layout HND --peers", "cell", 8),
    "quest": ("quest", QUEST, "context", 4),
    "nsa": ("nsa", f"{NSA} --mode paper --dtype float32", "N", 2),
    "nsa mslk": ("nsa", f"{NSA} --mode mslk --weights --dtype bfloat16", "N", 2),
    "choosing": ("choosing", "--tokens 256 --dtype float32 bfloat16 -H 4 --kv-heads 2 -D 16 --threads 1 --repeats 1", "dtype", None),
    "distributed": ("distributed", "--tokens 8192 --heads 2 --kv-heads 1 --ranks 2 64", "pattern", 48),
    "scheduling": ("scheduling", "-S 300 -H 2 --dtypes bfloat16 --threads 2 --repeats 1 --warmup 0 --settle 0 --no-busy", "dtype", None),
    "error_table": ("error_table", "--dtypes float16 bfloat16 --tokens 256", "dtype", None),
}  # fmt: skip
DRAWN = ("benchmark", "real input", "roofline", "peers", "decode", "quest", "nsa", "distributed")


@pytest.fixture
def small_operations(monkeypatch):
    for name, value in (("TOKENS", 512), ("LARGE_BYTES", 1 << 21), ("SETTLE_SECONDS", 0.0), ("PROBE_SECONDS", 0.001)):
        monkeypatch.setattr(operation_set, name, value)


def main_of(script, options, capsys, code=0):
    """What a script prints, on standard output and error, in this process; fails where its exit code is another than `code`."""
    capsys.readouterr()
    try:
        found = importlib.import_module(script).main(options if isinstance(options, list) else options.split())
    except SystemExit as end:
        found = end.code
    finally:
        blitz_attn.set_num_threads(None)
    printed = capsys.readouterr()
    assert found == code, printed.err
    return printed


def figure_of(table, path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "stdin", io.StringIO(table))
    assert plot.main(["--dpi", "40", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore")  # what other libraries warn of is theirs
@pytest.mark.parametrize("name", SMALL)
def test_a_script_prints_its_table_and_its_figure_is_drawn(name, small_operations, capsys, tmp_path, monkeypatch):
    """Every script checks its own results against float64, and those of other libraries: rows and notes say so."""
    script, options, first, count = SMALL[name]
    if name == "peers":
        options += " --dtypes float32 bfloat16 --peers" + ("" if UNDER_ASAN else " numpy torch onnxruntime openvino jax")
    if name == "decode" and UNDER_ASAN:
        options += " --peers"
    out, error = main_of(script, options, capsys)
    rows = [row for row in _bench.parse_rows(out, (first,)) if first in row]
    assert len(rows) == count if count else rows
    for row in rows:
        assert row.get("Outputs_equal", "yes") == row.get("Same_bits", "yes") == "yes"
        assert row.get("Equal") in ("yes", None)
        assert row.get("rule") != "broken"
    assert "not the same result" not in out
    assert "not equal to float64" not in out + error
    if name in DRAWN:
        figure_of(out, tmp_path / "figure.png", monkeypatch)


@pytest.mark.parametrize("text", ["", "no table here\n", "dtype a b c d e f\nfloat32 1 2 3 4 5 6\n"])
def test_what_has_no_table_is_not_drawn(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert plot.main(["-o", str(tmp_path / "figure.png")]) == 1
    assert capsys.readouterr().err == "plot.py: no row of a table that it can draw on stdin, so there is nothing to draw\n"
    assert not list(tmp_path.iterdir())


def test_a_script_runs_by_its_name(tmp_path):
    """In a pipe, as README says."""
    pytest.importorskip("matplotlib")
    one = subprocess.run([sys.executable, str(BENCHMARK / "benchmark.py"), *TINY.split()], capture_output=True, text=True, check=True)
    subprocess.run([sys.executable, str(BENCHMARK / "plot.py")], input=one.stdout, text=True, check=True, cwd=tmp_path)
    assert (tmp_path / "benchmark.png").exists()
    lines = one.stdout.splitlines()
    assert lines[0] == lines[3] == lines[-1] == "=" * 120  # upstream's form
    assert lines[4].split()[:11] == list(importlib.import_module("blitz_attn.plot").COLUMNS)


# ---- Wrong results are seen --------------------------------------------------------------------------------------


def wrong(function, name="out"):
    """The function, with results that are off by a tenth."""

    def call(*arguments, **options):
        result = function(*arguments, **options)
        arrays = options.get(name, result)
        for array in arrays if isinstance(arrays, tuple) else (arrays,):
            array += np.float32(0.1)
        return result

    return call


def first_blocks(q, high, low, tables, lengths, blocks, **options):
    return np.broadcast_to(np.arange(blocks, dtype=np.int32), (len(q), high.shape[2], blocks)).copy()


@pytest.mark.parametrize(
    ("script", "options", "module", "name", "other"),
    [
        ("benchmark", f"{TINY} --dtype float32", blitz_attn, "block_sparse_attention", wrong(blitz_attn.block_sparse_attention)),
        ("decode", f"{DECODE} --dtypes float32 --no-plan --peers", blitz_attn, "paged_attention", wrong(blitz_attn.paged_attention)),
        ("quest", QUEST, blitz_attn, "quest_block_select_paged", first_blocks),
        ("nsa", f"{NSA} --dtype float32 --passes forward --no-parts", nsa, "nsa", wrong(nsa.nsa)),
        ("backward", SMALL["backward"][1], blitz_attn, "block_sparse_attention_backward", wrong(blitz_attn.block_sparse_attention_backward, "grads")),
    ],
)  # fmt: skip
def test_a_wrong_result_is_noticed(script, options, module, name, other, monkeypatch, capsys):
    monkeypatch.setattr(module, name, other)
    printed = main_of(script, options, capsys, code=script in ("decode", "quest", "nsa"))
    rows = _bench.parse_rows(printed.out, ("block_shape", "cell", "context", "N", "dtype"))
    assert [row.get("Outputs_equal", row.get("Equal")) for row in rows[-2:]] == ["no", "no"]


def test_a_peer_that_answers_something_else_is_not_timed(monkeypatch, capsys):
    zeros = peers.PEERS["numpy"].__class__(
        lambda asked, threads: (lambda: None, lambda: np.zeros(asked.shape, np.float32)), "numpy", (0, 0)
    )
    monkeypatch.setitem(peers.PEERS, "jax", zeros)
    options = "-S 128 -H 1 -D 16 --dtypes float32 --sparsities 0 --no-causal --repeats 1 --threads 1 --peers jax"
    assert "N/A  # error 1.0e+00 against float64: not the same result, not timed\n" in main_of("peers", options, capsys).out


def test_other_bits_of_another_build_are_seen(small_operations):
    """A library whose dense call returns something else."""
    operation = operation_set.forward("dense", "bfloat16", tokens=256)
    other = types.SimpleNamespace(block_sparse_attention=lambda q, k, v, *_, out, **__: out.__setitem__(slice(None), v))
    assert beside.compared(operation, 1, other, 2, _bench.Progress(1.0))["Same_bits"] == "NO"


def test_peers_choose_what_they_say():
    """The choosers in torch against this library's: antidiagonal scores are the same, and block means keep the blocks with the largest."""
    torch = pytest.importorskip("torch")
    q, k, _ = testing.make_qkv(1, 4, 2, 256, 256, 16)
    tensors = torch.from_numpy(q), torch.from_numpy(k)
    options = {"block_shape": (32, 32), "causal": True, "return_scores": True}
    _, expected = blitz_attn.select_blocks_prefill(q, k, chooser=select.Antidiagonal(16), top_p=0.9, **options)
    assert np.abs(choosing.antidiagonal_scores(*tensors, 32)[None].numpy() - expected).max() < 1e-5
    ours, _ = blitz_attn.select_blocks_prefill(q, k, chooser=select.Antidiagonal(16), top_p=0.9, sink=0, recent=0, **options)
    kept = choosing.antidiagonal(*tensors, 32, 0.9).numpy()
    assert all(sorted(np.flatnonzero(kept[h, r])) == [c for c in ours[0, h, r] if c >= 0] for h, r in np.ndindex(kept.shape[:2]))
    _, by_means = blitz_attn.select_blocks_prefill(q, k, chooser=select.Pooled(32, "mean", "mean"), top_k=1, **options)
    listed = choosing.block_means(*tensors, 32, 0.5).numpy()
    for h, r in np.ndindex(listed.shape[:2]):
        assert [c for c in listed[h, r] if c >= 0] == sorted(np.argsort(-by_means[0, h, r, : r + 1])[: -(-(r + 1) // 2)])


# ---- Arithmetic --------------------------------------------------------------------------------------------------


def test_shares_follow_from_the_latencies(capsys):
    """At sparsity 0 every pair is listed, so the ideal is the dense time and the work is 4 D operations a pair."""
    row = _bench.parse_rows(main_of("benchmark", TINY, capsys).out, ("block_shape",))[0]
    assert row["Share_of_ideal"] == pytest.approx(row["Ref_Latency_[usec]"] / row["Our_Latency_[usec]"], abs=2e-3)
    assert row["GFLOP/s"] == pytest.approx(2 * 4 * 16 * 200 * 200 / row["Our_Latency_[usec]"] / 1e3, rel=1e-2, abs=0.1)


def test_decode_shares_follow_from_the_bytes_and_flops(tmp_path, capsys):
    main_of(
        "decode",
        [
            "--shapes",
            "2x16x2x2000",
            *["--dtypes", "float32", "int8", "--threads", "1", "--repeats", "1", "--peers", "--csv"],
            str(tmp_path / "t.csv"),
        ],
        capsys,
    )
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


def test_operations_are_held_against_the_nearest_limit(monkeypatch):
    monkeypatch.setattr(operation_set._core, "probe_flops", lambda level, seconds, threads: 100.0)
    monkeypatch.setattr(operation_set._core, "probe_tile_flops", lambda level, seconds, threads: 0.0)
    monkeypatch.setattr(operation_set._core, "probe_read", lambda level, size, seconds, threads: 2.0)
    operation = operation_set.few("float32", 1)
    (point,) = operation_set.measured([operation], [1], 3, _bench.Progress(1.0))
    assert point.bound == "R"  # half a flop per byte: 2 GB/s allow one GFLOP/s
    assert operation.bytes == pytest.approx(2 * 8 * 4097 * 128 * 4)
    assert point.shares == pytest.approx([operation.bytes / 2e9 / seconds for seconds in point.seconds])


def test_dense_beyond_the_budget_is_grown(tmp_path, capsys):
    """No dense call is as quick as a nanosecond, so only the first is measured."""
    options = f"{NSA} --tokens 100 200 400 --passes forward --no-parts --dense-seconds 1e-9 --dtype float32 --json {tmp_path / 't.json'}"
    main_of("nsa", options, capsys)
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["Dense_by"] for row in rows] == ["run", "N^2", "N^2"]
    times = [row["Dense_fwd_[ms]"] for row in rows]
    assert times[1:] == pytest.approx([4 * times[0], 16 * times[0]])


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ([(1024, 2.0)], "below 1024"),
        ([(1024, 0.5), (2048, 0.9), (4096, 1.1)], "between 2048 and 4096"),
        ([(1024, 0.5)], "above 1024"),
        ([(1024, None)], "not measured"),
    ],
)
def test_where_nsa_is_faster_than_dense(speedups, words):
    assert nsa.crossover([{"N": tokens, "x": speedup} for tokens, speedup in speedups], "x") == words


def test_who_is_ahead(tmp_path, capsys):
    def row(name, tokens, ratio, rule="all"):
        cell = {"dtype": "float32", "D": 64, "rule": rule, "sparsity": 0.0, "H": 4, "S": tokens, "threads": 1}
        return cell | {"contender": name, "Over_ours": ratio, "GFLOP/s": 10.0, "Share_of_limit": 0.5}

    rows = [row("ours", 256, 1.0), row("torch", 256, 0.95), row("ours", 512, 1.0), row("torch", 512, 0.95), row("jax", 512, 0.5),
            row("ours", 512, 1.0, "causal"), row("torch", 512, None, "causal")]  # fmt: skip
    with (tmp_path / "pieces.log").open("w") as file:
        table = _bench.Table(peers.COLUMNS, file)
        for part in (rows[:3], rows):  # what stands twice counts once
            table.head()
            for values in part:
                table.row(values)
            table.foot()
    lines = main_of("peers", f"--merge {tmp_path / 'pieces.log'}", capsys).out.splitlines()
    assert lines[0].split()[-2:] == ["torch/ours", "jax/ours"]
    assert [line.split()[-2:] for line in lines[1:4]] == [["0.95", "N/A"], ["0.95", "0.50"], ["N/A", "N/A"]]
    assert lines[4].endswith(": 1 of 3")
    assert lines[5:] == [
        "# 0.50  jax: float32 D=64 S=512 sparsity 0, threads 1",
        "# 0.95  torch: float32 D=64 S=512 sparsity 0, threads 1",
    ]


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


def test_bytes_of_a_window_are_below_those_of_dense(capsys):
    rows = _bench.parse_rows(main_of("distributed", SMALL["distributed"][1], capsys).out, ("pattern",))
    assert all(0 <= row["Moved"] <= 3 and row["Imbalance"] >= 1 for row in rows)
    moved = {p: [row["Moved"] for row in rows if (row["pattern"], row["dispatch"]) == (p, "cut")] for p in ("window_and_sink", "dense")}
    assert max(moved["window_and_sink"]) < min(moved["dense"])


def test_contenders_take_turns():
    calls = []
    contenders = [_bench.Contender(name, lambda name=name: calls.append(name) or _bench.time.sleep(0.003), 1.0) for name in "AB"]
    contenders[1].before_last = lambda: calls.append("-")
    turns = _bench.in_turns(contenders, repeats=2, warmup=1, progress=_bench.Progress(1.0, io.StringIO()))
    assert [(index, len(timing.samples), "".join(calls)) for index, timing in turns] == [(0, 2, "ABABA"), (1, 2, "ABABA-B")]


# ---- What is kept ------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on(tmp_path, capsys):
    table = main_of("benchmark", TINY, capsys).out
    lines = table.splitlines(keepends=True)
    log = tmp_path / "stopped.log"
    log.write_text("".join(lines[:7]) + lines[7][:40])  # one row and half of the next
    resumed = main_of("benchmark", f"{TINY} --resume {log}", capsys)
    assert "4 rows, 1 of them from" in resumed.err
    again = resumed.out.splitlines(keepends=True)
    assert again[6] == lines[6]
    assert [line.split()[:8] for line in again[6:10]] == [line.split()[:8] for line in lines[6:10]]
    assert "measured with other parameters" in main_of("benchmark", f"{TINY} --seed 5 --resume {log}", capsys, code=2).err
    log.write_text("")
    assert "holds no table" in main_of("benchmark", f"{TINY} --resume {log}", capsys, code=2).err


def test_upstreams_options_and_both_files(tmp_path, capsys):
    """The options that change what is printed: outputs, masks, frames, order, layout, KV heads, files."""
    options = (
        "-S 300 -B 2 -H 4 --kv-heads 2 -D 24 --dtype float32 --layout BSH --repeats 2 --warmup 0 --block-shapes 32x32"
        " --sparsities 0.3 0.95 --frames --frame-tokens 32 --no-sorted"
        " --print-mask --print-outputs --print-block-equality --print-height 100 --print-width 12"
    )
    out, error = main_of("benchmark", f"{options} --csv {tmp_path / 'rows.csv'} --json {tmp_path / 'rows.json'}", capsys)
    (row,) = _bench.parse_rows(out, ("block_shape",))
    assert (row["frame(L,R,T,B)"], row["Outputs_equal"]) == ((1, 1, 1, 1), "yes")
    assert "SABI_SORTED=False" in out
    assert "sparsity 0.95 left out" in error
    assert "10 x 10 blocks" in error  # the mask
    with (tmp_path / "rows.csv").open() as file:
        (csv_row,) = csv.DictReader(file)
    (kept,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert float(csv_row["Our_Latency_[usec]"]) == kept["Our_Latency_[usec]"]
    assert len(kept["own_samples_s"]) == 2


def test_a_record_of_speeds_is_compared_with(small_operations, tmp_path, capsys):
    options = f"--threads 1 --repeats 2 --only select small --file {tmp_path / 'r.json'}"
    main_of("speed", f"--record {options}", capsys)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert set(kept) == {"machine", "version", "commit", "compiler", "date", "rows"}
    assert set(kept["machine"]) == {"cpu", "threads", "level", "caches"}  # nothing of the host's name or folders
    for row in kept["rows"]:
        row["shares"] = [0.1, 0.3]
    gone = kept["rows"].pop()
    (tmp_path / "r.json").write_text(json.dumps(kept))
    rows = _bench.parse_rows(main_of("speed", f"--compare {options}", capsys).out, ("operation",))
    assert [row["Was"] for row in rows] == [pytest.approx(0.2)] * len(kept["rows"]) + [None]
    assert rows[-1]["dtype"] == gone["dtype"]
    (tmp_path / "r.json").write_text("half a")
    assert "not a record, for it is not JSON" in main_of("speed", f"--compare {options}", capsys, code=1).err


def test_two_builds_side_by_side(small_operations, tmp_path, capsys):
    """What stands for another checkout is a copy of this build."""
    assert "built in place" in main_of("beside", [str(tmp_path)], capsys, code=1).err
    shutil.copytree(Path(blitz_attn.__file__).parent, tmp_path / "blitz_attn")
    options = [str(tmp_path), *["--threads", "1", "2", "--turns", "2", "--kv-mib", "1", "--only", "small", "select", "decode_G=1"]]
    rows = _bench.parse_rows(main_of("beside", options, capsys).out, ("operation",))
    assert {row["threads"] for row in rows} == {1, 2}
    for row in rows:
        assert row["Same_bits"] == "yes"
        assert 0 < row["Low"] <= row["This/other"] <= row["High"]


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
def test_saved_results_are_replaced_by_a_run_that_ends_well(how, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["folder/script.py", "--quick", "--save", "other"])
    assert result_files.main_with_save(ends(0, True)) == 0
    assert capsys.readouterr().out == "a row\n"  # standard output is as without the option
    path = tmp_path / result_files.tag(result_files.machine()) / "other.txt"
    text = path.read_text()
    head = result_files.read_head(text)
    assert text.endswith("\na row\n")
    assert list(head) == list(result_files.HEAD)
    assert head["command"] == "python benchmark/script.py --quick --save other"
    if isinstance(how, int):
        assert result_files.main_with_save(ends(how, printed)) == how
    else:
        with pytest.raises(type(how)):
            result_files.main_with_save(ends(how, printed))
    assert path.read_text() == text
    part = path.with_name("other.txt.part")
    assert part.exists() == printed
    if printed:
        assert part.read_text().endswith("\na row\n")


def test_results_of_this_repository_say_where_they_are_from():
    files = sorted(result_files.RESULTS.glob("*/*.txt"))
    assert files
    for path in files:
        head = result_files.read_head(path.read_text(encoding="utf-8"))
        assert set(result_files.HEAD) <= set(head), path
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", head["commit"]), path
        assert re.fullmatch(r"2\d\d\d-\d\d-\d\d", head["date"]), path
    named = {"cpu": "Some(R) CPU(TM) @ 2.0 GHz/x", "threads": 4, "level": "avx2", "caches": {"L2": 1 << 20, "L1": 1 << 15}}
    assert result_files.tag(named) == "some-cpu-2.0-ghz-x-4-avx2-l1.32k-l2.1024k"


# ---- What no script takes ----------------------------------------------------------------------------------------

REFUSED = [
    ("benchmark", f"--csv {BENCHMARK} --seed -1", "--csv: expected a file that can be written, in a folder that exists"),
    ("plot", "-o /nonexistent/figure.png", "--output/-o: expected a file that can be written, in a folder that exists"),
    ("benchmark", "--isa foo", "--isa: expected a level of this CPU (portable"),
    ("benchmark", "--sparsities 1", "expected a number from 0 to below 1, got '1'"),
    ("benchmark", "--block-shapes 128", "expected two positive sizes such as 128x512"),
    ("benchmark", "-H 3 --kv-heads 2", "--kv-heads: expected a divisor"),
    ("benchmark", f"--input {SLICE} --headline", "--input: cannot be combined"),
    ("benchmark", f"--input {SLICE} --layers 5", "--layers: expected some of [3, 14], got [5]"),
    ("benchmark", "--input missing.npz", "--input: expected a file that can be read"),
    ("benchmark", f"--input {BENCHMARK / 'README.md'}", f"--input: {BENCHMARK / 'README.md'}: expected a file written by capture.py"),
    ("benchmark", f"--resume {SLICE}", "--resume: "),
    ("benchmark", "--layers 0", "--layers: expected only with --input"),
    ("benchmark", "-S 16 -H 1 -D 16 999 --block-shapes 16x16 --sparsities 0 --repeats 1 --threads 1", "benchmark.py: q: expected a head dim"),
    ("roofline", "--seconds nan", "--seconds: expected a number above 0"),
    ("scheduling", "--settle -1", "--settle: expected a number from 0"),
    ("scheduling", "--threads 0", "--threads: expected a whole number from 1"),
    ("peers", f"--merge {BENCHMARK / 'README.md'}", "--merge: expected tables of peers.py"),
    ("error_table", "--tokens 0", "--tokens: expected a whole number from 4"),
    ("distributed", "speed", "expected bytes, exposed, scaling or decode, got speed"),
    ("distributed", "--density 3", "--density: expected a number above 0 and at most 1"),
    ("distributed", "--tokens 1024 --heads 3 --kv-heads 2", "distributed.py: num_heads: expected a multiple of num_kv_heads"),
    ("choosing", "--tokens 64 --heads 3 --kv-heads 2 --peers", "choosing.py: k: expected a number of heads"),
    ("decode", "--shapes 2x3x2x10", "expected B x H x Hkv x S such as 4x32x8x2048, H a multiple of Hkv, got '2x3x2x10'"),
    ("decode", "--head-dim 1000 --shapes 1x4x2x64 --threads 1 --peers", "decode.py: q: expected at least one head and a head dim"),
    ("backward", "-D 999 -S 32 --no-torch", "backward.py: q: expected a head dim"),
    ("quest", "-H 3 --kv-heads 2", "--kv-heads: expected a divisor of 3 heads, got 2"),
    ("quest", "--page 2000 --contexts 2001 -H 1 --kv-heads 1 -D 16 --threads 1", "quest.py: k_cache: expected pages of at most"),
    ("masks", "--heads 3 --kv-heads 2 -S 32 --no-torch", "masks.py: k: expected a number of heads"),
    ("nsa", "--block 48 --stride 20 --tokens 100 -H 1 --kv-heads 1 -D 16", "nsa.py: compress_stride: expected a divisor"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "options", "sentence"), REFUSED, ids=lambda value: value.replace(str(BENCHMARK), "."))
def test_a_sentence_says_what_an_option_may_be(script, options, sentence, capsys):
    error = main_of(script, options, capsys, code=2).err
    assert sentence in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "script", sorted(path.stem for path in BENCHMARK.glob("*.py") if "if __name__" in path.read_text(encoding="utf-8"))
)
def test_help(script, capsys):
    assert "usage:" in main_of(script, "--help", capsys).out


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["-m blitz_attn", "-m blitz_attn.distributed --alone", "benchmark.py --help", "error_table.py --tokens 64 --dtypes float32"]
)
def test_a_reader_that_goes_away_is_no_error(command, unbuffered):
    library = str(Path(blitz_attn.__file__).resolve().parents[1])
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, cwd=BENCHMARK,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": os.pathsep.join([library, os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Ranks -------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("what", ["decode --ranks 2", "scaling --cores 2", "scaling --cores 2 --backward"])
def test_ranks_have_the_bits_of_one_process(what, monkeypatch, capsys):
    how = launcher.starter("openmpi")
    if isinstance(how, str):
        pytest.skip(how)
    monkeypatch.setenv("MPIRUN", " ".join(how[0]))
    out = main_of("distributed", f"{what} --tokens 8192 --heads 2 --kv-heads 1 --repeats 1", capsys).out
    rows = [line.split() for line in out.splitlines() if len(line.split()) > 5 and any(cell.isdigit() for cell in line.split()[:2])]
    assert len(rows) == 2
    assert all(row[-1] == "yes" for row in rows)
