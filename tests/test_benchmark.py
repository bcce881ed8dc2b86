"""The benchmark scripts at tiny sizes: tables, figures, wrong results, refused options, and stored results."""

import csv
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core
from interpreters import python

HERE = Path(__file__).resolve().parent
BENCHMARK = HERE.parent / "benchmark"
SLICE = HERE / "data" / "smollm2_qkv.npz"
sys.path.insert(0, str(BENCHMARK))

import _bench  # noqa: E402
import nsa  # noqa: E402
import operations  # noqa: E402
import peers  # noqa: E402
import plot  # noqa: E402
import roofline  # noqa: E402

UNDER_ASAN = "asan" in os.environ.get("LD_PRELOAD", "")  # AddressSanitizer would report errors of other libraries
FIRST_COLUMNS = ("block_shape", "operation", "dtype", "cell", "context", "N", "pattern")

TINY = "-S 200 -H 2 -D 16 --block-shapes 32x32 64x32 --sparsities 0 0.5 --repeats 1 --threads 1"
CAPTURED = f"--input {SLICE} --layers 14 --block-shapes 64x64 --sparsities 0 0.4 --repeats 1 --warmup 0"
PEERS = "-S 130 300 -H 2 -D 16 --sparsities 0 0.5 --repeats 1 --threads 1 --dtypes float32 bfloat16 --peers"
BACKWARD = "-S 200 -H 2 -D 16 --block-shape 32x32 --sparsities 0 0.5 --repeats 1 --dtypes float32 --no-torch --threads 1 2"
DECODE = "--shapes 2x4x2x50 1x3x3x33 --page 16 --head-dim 24 --repeats 1 --threads 1 2"
QUEST = "--contexts 100 512 --blocks 4 8 -H 4 --kv-heads 2 -D 16 --page 16 --repeats 1 --threads 1 --dtype float32"
NSA = "--tokens 100 257 -H 4 --kv-heads 2 -D 16 --block 16 --selected 4 --window 21 --tile 32 --repeats 1 --threads 1"


@pytest.fixture
def small_operations(monkeypatch):
    for name, value in (("TOKENS", 512), ("LARGE_BYTES", 1 << 21), ("SETTLE_SECONDS", 0.0), ("PROBE_SECONDS", 0.001)):
        monkeypatch.setattr(operations, name, value)


def main_of(script, options, capsys, code=0):
    """Runs a script in this process, and returns its standard output and error. Asserts that its exit code is `code`."""
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


def rows_of(printed):
    return [row for row in _bench.parse_rows(printed.out, FIRST_COLUMNS) if "what" not in row]


@pytest.mark.filterwarnings("ignore")  # other libraries may warn
@pytest.mark.parametrize(
    ("script", "options", "count"),
    [
        ("benchmark", TINY, 4),
        ("benchmark", CAPTURED, 3),
        ("roofline", "--threads 1 --seconds 0.01 --repeats 1", None),
        ("speed", "--threads 1 --repeats 1", None),
        ("peers", PEERS + ("" if UNDER_ASAN else " numpy torch onnxruntime openvino jax"), None),
        ("backward", BACKWARD, 8),
        ("decode", f"{DECODE} --dtypes float32 float16 bfloat16 int8 float8_e4m3" + (" --peers" if UNDER_ASAN else ""), 20),
        ("quest", QUEST, 4),
        ("nsa", f"{NSA} --mode paper --dtype float32", 2),
        ("nsa", f"{NSA} --mode mslk --weights --dtype bfloat16", 2),
        ("distributed", "--tokens 8192 --heads 2 --kv-heads 1 --ranks 2 64", 48),
    ],
)
def test_a_script_prints_its_table_and_its_figure_is_drawn(script, options, count, small_operations, capsys, tmp_path, monkeypatch):
    """Scripts check their own results and those of other libraries, and report wrong results in rows and notes."""
    printed = main_of(script, options, capsys)
    rows = rows_of(printed)
    assert len(rows) == count if count else rows
    assert not any("no" in row.values() for row in rows)
    assert "not the same result" not in printed.out
    assert "not equal to float64" not in printed.err
    if script not in ("speed", "backward"):
        pytest.importorskip("matplotlib")
        monkeypatch.setattr(sys, "stdin", io.StringIO(printed.out))
        assert plot.main(["--dpi", "40", "-o", str(tmp_path / "figure.png")]) == 0
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_script_runs_by_its_name(tmp_path):
    """Scripts work in a pipe, as README says. Upstream's columns come first, and at sparsity 0 the shares follow from the latencies."""
    pytest.importorskip("matplotlib")
    one = subprocess.run([sys.executable, str(BENCHMARK / "benchmark.py"), *TINY.split()], capture_output=True, text=True, check=True)
    for table, code, files in (("no table\n", 1, []), (one.stdout, 0, ["benchmark.png"])):
        drawn = subprocess.run([sys.executable, str(BENCHMARK / "plot.py")], input=table, capture_output=True, text=True, cwd=tmp_path)
        assert (drawn.returncode, [path.name for path in tmp_path.iterdir()]) == (code, files), drawn.stderr
    lines = one.stdout.splitlines()
    assert lines[0] == lines[3] == lines[-1] == "=" * 120  # upstream's form
    assert lines[4].split()[:11] == list(importlib.import_module("blitz_attn.plot").COLUMNS)
    row = _bench.parse_rows(one.stdout, FIRST_COLUMNS)[0]
    assert row["Share_of_ideal"] == pytest.approx(row["Ref_Latency_[usec]"] / row["Our_Latency_[usec]"], abs=2e-3)
    assert row["GFLOP/s"] == pytest.approx(2 * 4 * 16 * 200 * 200 / row["Our_Latency_[usec]"] / 1e3, rel=1e-2, abs=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/numa_maps")
@pytest.mark.skipif(UNDER_ASAN, reason="a sanitizer writes to memory of its own")
def test_where_memory_lands():
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no nodes")
    head, _, *rows, last = python(str(BENCHMARK / "numa.py"), "--tokens", "2048", BLITZ_ATTN_NUM_THREADS="2").splitlines()
    assert re.fullmatch(r"# \d+ nodes; CPUs \S+; 2 threads", head)
    assert last.startswith("# CPUs that each thread may use: ")
    found = {}
    for row in rows:
        name, nodes, own, others = re.fullmatch(r"(.*?)  +((?:N\d+ +-?[\d.]+(?:, )?)+) +(\d+) +(\d+)", row).groups()
        found[name] = sum(float(x) for x in re.findall(r"N\d+ +(-?[\d.]+)", nodes)), int(own), int(others)
    for name in ("append_paged_kv: a prompt, into new memory", "np.full: two caches"):
        assert 7.5 < found[name][0] < 9  # two caches of 4 MiB
    assert found["np.full: two caches"][1] > 2000
    assert found["np.full: two caches"][2] == found["PagedPlan of 1024 requests"][2] == 0
    assert sum(found["np.zeros: two caches"][1:]) < 300


# ---- Wrong results are seen --------------------------------------------------------------------------------------


def wrong(function, name="out"):
    """The function, with 0.1 added to its results."""

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
        ("decode", f"{DECODE} --dtypes float32 --peers", blitz_attn.PagedPlan, "attention", wrong(blitz_attn.PagedPlan.attention)),
        ("quest", QUEST, blitz_attn, "quest_block_select_paged", first_blocks),
        ("nsa", f"{NSA} --dtype float32 --passes forward --no-parts", nsa, "nsa", wrong(nsa.nsa)),
        (
            "backward", BACKWARD, blitz_attn, "block_sparse_attention_backward",
            wrong(blitz_attn.block_sparse_attention_backward, "grads"),
        ),
    ],
)  # fmt: skip
def test_a_wrong_result_is_noticed(script, options, module, name, other, monkeypatch, capsys):
    monkeypatch.setattr(module, name, other)
    rows = rows_of(main_of(script, options, capsys, code=1))
    assert [row.get("Outputs_equal", row.get("Equal")) for row in rows[-2:]] == ["no", "no"]


def test_a_peer_that_answers_something_else_is_not_timed(monkeypatch, capsys):
    zeros = peers.PEERS["numpy"].__class__(
        lambda asked, threads: (lambda: None, lambda _: np.zeros(asked.q.shape, np.float32)), "numpy", (0, 0)
    )
    monkeypatch.setitem(peers.PEERS, "jax", zeros)
    options = "-S 128 -H 1 -D 16 --dtypes float32 --sparsities 0 --no-causal --repeats 1 --threads 1 --peers jax"
    assert "N/A  # error 1.0e+00 against float64: not the same result, not timed\n" in main_of("peers", options, capsys).out


def test_two_builds_side_by_side(small_operations, tmp_path, capsys):
    """The other checkout is a copy of this build, and then a copy that returns other results."""
    shutil.copytree(Path(blitz_attn.__file__).parent, tmp_path / "blitz_attn")
    options = ["--beside", str(tmp_path), *["--threads", "1", "2", "--repeats", "2", "--kv-mib", "1", "--only", "small", "select", "decode_G=1"]]
    rows = rows_of(main_of("speed", options, capsys))
    assert {row["threads"] for row in rows} == {1, 2}
    assert all(row["Same_bits"] == "yes" and 0 < row["Low"] <= row["This/other"] <= row["High"] for row in rows)
    with (tmp_path / "blitz_attn" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\ndef block_sparse_attention(q, k, v, *_, out, **__):\n    out[...] = v\n")
    assert rows_of(main_of("speed", ["--beside", str(tmp_path), "--only", "small"], capsys, code=1))[0]["Same_bits"] == "no"


# ---- Stored results ----------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on(tmp_path, capsys):
    lines = main_of("benchmark", TINY, capsys).out.splitlines(keepends=True)
    log = tmp_path / "stopped.log"
    log.write_text("".join(lines[:7]) + lines[7][:40])  # one row and half of the next
    resumed = main_of("benchmark", f"{TINY} --resume {log}", capsys)
    assert "4 rows, 1 of them from" in resumed.err
    again = resumed.out.splitlines(keepends=True)
    assert again[6] == lines[6]
    assert [line.split()[:8] for line in again[6:10]] == [line.split()[:8] for line in lines[6:10]]
    assert "measured with other parameters" in main_of("benchmark", f"{TINY} --seed 5 --resume {log}", capsys, code=2).err


def test_upstreams_options_and_all_files(tmp_path, monkeypatch, capsys):
    """The options that change the printed output (outputs, masks, frames, order, layout, KV heads), and the files that store the output."""
    monkeypatch.setattr(_bench, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["folder/benchmark.py", "--quick", "--save", "other"])
    options = (
        "-S 300 -B 2 -H 4 --kv-heads 2 -D 24 --dtype float32 --layout BSH --repeats 2 --warmup 0 --block-shapes 32x32"
        " --sparsities 0.3 0.95 --frames --frame-tokens 32 --no-sorted --save other"
        " --print-mask --print-outputs --print-block-equality --print-height 100 --print-width 12"
    )
    printed = main_of("benchmark", f"{options} --csv {tmp_path / 'rows.csv'} --json {tmp_path / 'rows.json'}", capsys)
    (row,) = rows_of(printed)
    assert (row["frame(L,R,T,B)"], row["Outputs_equal"]) == ((1, 1, 1, 1), "yes")
    assert "SABI_SORTED=False" in printed.out
    assert "sparsity 0.95 left out" in printed.err
    assert "10 x 10 blocks" in printed.err  # the mask
    with (tmp_path / "rows.csv").open() as file:
        (csv_row,) = csv.DictReader(file)
    (kept,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert float(csv_row["Our_Latency_[usec]"]) == kept["Our_Latency_[usec]"]
    assert len(kept["own_samples_s"]) == 2
    path = tmp_path / _bench.tag(_bench.machine()) / "other.txt"
    text = path.read_text()
    assert text.endswith("\n" + printed.out)
    assert list(_bench.read_head(text)) == list(_bench.HEAD)
    assert _bench.read_head(text)["command"] == "python benchmark/benchmark.py --quick --save other"
    main_of("benchmark", f"{TINY} -D 999 --save other", capsys, code=2)
    assert path.read_text() == text  # only a run that succeeds replaces it


def test_a_record_of_speeds_is_compared_with(small_operations, tmp_path, capsys):
    options = f"--threads 1 --repeats 2 --only select small causal --file {tmp_path / 'r.json'}"
    main_of("speed", f"--record {options}", capsys)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert set(kept["machine"]) == {"cpu", "threads", "level", "caches"}  # nothing of the host's name or folders
    kept["rows"].pop()
    for row, shares in zip(kept["rows"], ([90, 100], [1e-9, 1e-9], [0, 90]), strict=True):  # the last row moves by less than its spread
        row["shares"] = shares
    (tmp_path / "r.json").write_text(json.dumps(kept))
    rows = rows_of(main_of("speed", f"--compare {options}", capsys))
    assert [row["Flag"] for row in rows] == ["SLOWER", "faster", None, None]  # None stands for - and for N/A, which means no record
    (tmp_path / "r.json").write_text("half a")
    assert "is not a record, because it is not JSON" in main_of("speed", f"--compare {options}", capsys, code=2).err


def test_tiles_are_measured_before_and_after_each_sample(small_operations, tmp_path, capsys, monkeypatch):
    """A share of the tiles' rate is marked P_sustained, and is not compared with a share in an old record, which is marked P."""
    events = []

    def call():
        events.append("call")
        time.sleep(3e-3)

    beside = _bench.Contender("a call", call, limit=lambda: events.append("limit") or float(len(events)))
    beside.take(timed=False)
    beside.take(timed=True)
    assert events == ["call", "limit", "call", "limit"]
    assert beside.values == [3.0]  # between the limits 2 and 4

    monkeypatch.setattr(_core, "probe_tile_flops", lambda level, seconds, threads: 1e-3)  # so slow that no other limit binds
    monkeypatch.setattr(operations, "_has_tiles", lambda level: True)
    (limit,) = [row for row in roofline.limits(1, ["portable"], 0.001) if "tiles" in row["what"]]
    assert (limit["what"], limit["value"]) == ("tiles_sustained", 1e-3)
    rows = rows_of(main_of("peers", "-S 128 -H 1 -D 16 --sparsities 0 --no-causal --repeats 1 --threads 1 --peers", capsys))
    assert [row["Bound_by"] for row in rows if row["contender"] == "ours"] == ["F", "F", "P_sustained"]
    options = f"--threads 1 --repeats 1 --only causal --file {tmp_path / 'r.json'}"
    rows = rows_of(main_of("speed", f"--record {options}", capsys))
    assert {row["dtype"]: row["Bound_by"] for row in rows} == {"float32": "F", "bfloat16": "P_sustained"}
    point = next(row for row in rows if row["dtype"] == "bfloat16")
    operation = next(one for one in operations.chosen(operations.every_operation(), ["causal"]) if one.dtype == "bfloat16")
    assert point["Share"] == pytest.approx(operation.draw().flops / 1e6 / (point["Time_[usec]"] * 1e-6), rel=0.02)
    kept = json.loads((tmp_path / "r.json").read_text())
    for row in kept["rows"]:
        row["bound"] = row["bound"].partition("_")[0]  # as in old records
    (tmp_path / "r.json").write_text(json.dumps(kept))
    printed = main_of("speed", f"--compare {options}", capsys)
    assert {row["dtype"]: row["Was"] is None for row in rows_of(printed)} == {"float32": False, "bfloat16": True}


def test_results_of_this_repository_say_where_they_are_from():
    files = sorted(_bench.RESULTS.glob("*/*.txt"))
    assert files
    for path in files:
        head = _bench.read_head(path.read_text(encoding="utf-8"))
        assert set(_bench.HEAD) <= set(head), path
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", head["commit"]), path
        assert re.fullmatch(r"2\d\d\d-\d\d-\d\d", head["date"]), path
    named = {"cpu": "Some(R) CPU(TM) @ 2.0 GHz/x", "threads": 4, "level": "avx2", "caches": {"L2": 1 << 20, "L1": 1 << 15}}
    assert _bench.tag(named) == "some-cpu-2.0-ghz-x-4-avx2-l1.32k-l2.1024k"


# ---- Refused options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "options", "sentence"),
    [
        ("plot", "-o /nonexistent/figure.png", "--output/-o: expected a file that can be written, in a folder that exists"),
        ("benchmark", "--isa foo", "--isa: expected a level of this CPU (portable"),
        ("benchmark", "--sparsities 1", "expected a number from 0 to below 1, got '1'"),
        ("benchmark", f"--input {BENCHMARK / 'README.md'}", f"--input: {BENCHMARK / 'README.md'}: expected a file written by capture.py"),
        ("benchmark", f"--resume {SLICE}", "--resume: "),
        ("speed", f"--beside {BENCHMARK}", "speed.py: --beside: expected a checkout that was built in place"),
        ("decode", "--shapes 2x3x2x10", "expected B x H x Hkv x S such as 4x32x8x2048, H a multiple of Hkv, got '2x3x2x10'"),
        ("backward", "-D 999 -S 32 --no-torch", "backward.py: q: expected a head dim"),
    ],
    ids=lambda value: value.replace(str(BENCHMARK), "."),
)
def test_a_sentence_says_what_an_option_may_be(script, options, sentence, capsys):
    error = main_of(script, options, capsys, code=2).err
    assert sentence in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["-m blitz_attn", "-m blitz_attn.distributed --alone", "benchmark.py --help", "roofline.py --no-operations --seconds 0.001"]
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


def test_a_missing_mpi_is_told_in_one_sentence(monkeypatch):
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("sys.argv", ["blitz_attn.distributed"])
    with pytest.raises(SystemExit, match=r"^blitz_attn\.distributed needs mpi4py: pip install mpi4py, or pass --alone$"):
        importlib.import_module("blitz_attn.distributed.__main__").main()
