"""The benchmark scripts at sizes that take no time: what they print, what they refuse, and that their parts fit together."""

import contextlib
import csv
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import blitz_attn
from blitz_attn.plot import COLUMNS, parse_table

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
SLICE = Path(__file__).resolve().parent / "data" / "smollm2_qkv.npz"
TINY = [
    "-S",
    "200",
    "-H",
    "2",
    "-D",
    "16",
    "--block-shapes",
    "32x32",
    "64x32",
    "--sparsities",
    "0",
    "0.5",
    "--repeats",
    "1",
    "--threads",
    "1",
]
TINY_ROWS = 4


sys.path.append(str(BENCHMARK))

import _bench  # noqa: E402


def run(script, *arguments, stdin="", code=0):
    """Standard output and error of a script; fails where its exit code is another than `code`."""
    command = [sys.executable, str(BENCHMARK / script), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def table():
    return run("benchmark.py", *TINY)[0]


def data_lines(text):
    return [line for line in text.splitlines() if line.split()[:1] in (["32x32"], ["64x32"])]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", ["benchmark.py", "plot.py", "roofline.py", "capture.py", "error_table.py", "backward.py", "scheduling.py"])
def test_help(script):
    assert "usage:" in run(script, "--help")[0]


def test_table_has_upstreams_form(table):
    lines = table.splitlines()
    assert lines[0] == lines[3] == lines[-1] == "=" * 120
    assert lines[1].startswith("  DTYPE='bfloat16'  INPUT_LAYOUT='BNSD'  SABI_SORTED=True  TORCH_REFERENCE='own'")
    assert lines[4].split()[: len(COLUMNS)] == list(COLUMNS)
    assert lines[5] == "-" * 120
    assert len(data_lines(table)) == TINY_ROWS
    assert data_lines(table)[0].startswith("        32x32   2   1    200    200   16               -      0.00             yes ")


def test_rows_are_right_and_complete(table):
    rows = parse_table(table)
    assert [(row["block_shape"], row["sparsity"]) for row in rows] == [((q, 32), s) for q in (32, 64) for s in (0, 0.5)]
    for row in rows:
        assert row["Outputs_equal"] == "yes"
        assert all(row[name] > 0 for name in ("Ref_Latency_[usec]", "Our_Latency_[usec]", "GFLOP/s", "Share_of_ideal", "Share_of_F"))


def test_shares_follow_from_the_latencies(table):
    """At sparsity 0 every pair is listed, so the ideal is the dense time and the work is 4 D operations a pair."""
    row = parse_table(table)[0]
    assert row["Share_of_ideal"] == pytest.approx(row["Ref_Latency_[usec]"] / row["Our_Latency_[usec]"], abs=2e-3)
    assert row["GFLOP/s"] == pytest.approx(2 * 4 * 16 * 200 * 200 / row["Our_Latency_[usec]"] / 1e3, rel=1e-2, abs=0.1)


def test_plot_draws_the_table(table, tmp_path):
    pytest.importorskip("matplotlib")
    run("plot.py", "--output", tmp_path / "figure.png", "--title", "a title", "--dpi", "40", stdin=table)
    assert is_png(tmp_path / "figure.png")


@pytest.mark.parametrize("stdin", ["", "no table here\n"])
def test_plot_refuses_what_holds_no_rows(tmp_path, stdin):
    _, error = run("plot.py", "-o", tmp_path / "figure.png", stdin=stdin, code=1)
    assert error == "plot.py: no row of a benchmark table on stdin, so there is nothing to draw\n"
    assert not (tmp_path / "figure.png").exists()


def test_resume_keeps_rows_and_measures_the_rest(table, tmp_path):
    lines = table.splitlines(keepends=True)
    stopped = tmp_path / "stopped.log"
    stopped.write_text("".join(lines[:7]) + lines[7][:40])  # one row and half of the next
    resumed, error = run("benchmark.py", *TINY, "--resume", stopped)
    assert "4 rows, 1 of them from" in error
    assert data_lines(resumed)[0] == data_lines(table)[0]
    assert [line.split()[:8] for line in data_lines(resumed)] == [line.split()[:8] for line in data_lines(table)]


def test_resume_of_a_whole_table_prints_it_again(table, tmp_path):
    (tmp_path / "whole.log").write_text(table)
    assert data_lines(run("benchmark.py", *TINY, "--resume", tmp_path / "whole.log")[0]) == data_lines(table)


def test_resume_refuses_other_parameters(table, tmp_path):
    (tmp_path / "other.log").write_text(table)
    assert "measured with other parameters" in run("benchmark.py", *TINY, "--seed", "5", "--resume", tmp_path / "other.log", code=2)[1]
    (tmp_path / "empty.log").write_text("")
    assert "holds no table" in run("benchmark.py", *TINY, "--resume", tmp_path / "empty.log", code=2)[1]


def test_every_option_of_upstreams_file(tmp_path):
    """The options that change what is printed: outputs, masks, frames, order, layout, KV heads, files."""
    options = (
        "-S 300 -B 2 -H 4 --kv-heads 2 -D 24 --dtype float32 --layout BSH --isa portable --repeats 2 --warmup 0 --block-shapes 32x32"
        " --sparsities 0.3 0.95 --frames --frame-tokens 32 --no-sorted"
        " --print-mask --print-outputs --print-block-equality --print-height 100 --print-width 12"
    )
    out, error = run("benchmark.py", *options.split(), "--csv", tmp_path / "rows.csv", "--json", tmp_path / "rows.json")
    (row,) = parse_table(out)
    assert (row["frame(L,R,T,B)"], row["Outputs_equal"]) == ((1, 1, 1, 1), "yes")
    assert "SABI_SORTED=False" in out
    assert "ISA='portable'" in out
    assert "sparsity 0.95 left out" in error
    assert "10 x 10 blocks" in error  # the mask
    with (tmp_path / "rows.csv").open() as file:
        (csv_row,) = csv.DictReader(file)
    run_record = json.loads((tmp_path / "rows.json").read_text())
    assert float(csv_row["Our_Latency_[usec]"]) == run_record["rows"][0]["Our_Latency_[usec]"]
    assert len(run_record["rows"][0]["own_samples_s"]) == 2


def test_correctness_can_be_switched_off():
    out, _ = run("benchmark.py", *TINY, "--no-run-reference", "--layout", "TND")
    assert {row["Outputs_equal"] for row in parse_table(out)} == {None}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sparsities", "1"], "expected a number from 0 to below 1, got '1'"),
        (["--block-shapes", "128"], "expected two positive sizes such as 128x512"),
        (["-H", "3", "--kv-heads", "2"], "--kv-heads: expected a divisor"),
        (["--input", SLICE, "--headline"], "--input: cannot be combined"),
    ],
)
def test_bad_arguments(arguments, sentence):
    assert sentence in run("benchmark.py", *arguments, code=2)[1]


def test_captured_input(tmp_path):
    options = ["--layers", "14", "--block-shapes", "64x64", "--sparsities", "0", "0.4", "--repeats", "1", "--warmup", "0"]
    out, _ = run("benchmark.py", "--input", SLICE, *options)
    rows = parse_table(out)
    assert [row["Chooser"] for row in rows] == ["all", "mean-pool", "oracle"]
    assert {row["Outputs_equal"] for row in rows} == {"yes"}
    assert rows[0]["Kept_mass"] == 1
    assert rows[0]["Output_error"] == 0  # a list of every block is dense attention, bit for bit
    assert all(0.5 < row["Kept_mass"] < 1 and 0 < row["Output_error"] < 1 for row in rows[1:])
    pytest.importorskip("matplotlib")
    run("plot.py", "-o", tmp_path / "figure.png", "--dpi", "40", stdin=out)
    assert is_png(tmp_path / "figure.png")


def test_captured_input_refused():
    assert "--layers: expected some of [3, 14], got [5]" in run("benchmark.py", "--input", SLICE, "--layers", "5", code=2)[1]


def test_roofline_prints_its_limits():
    lines = [line.split() for line in run("roofline.py", "--threads", "1", "--seconds", "0.01", "--no-operations")[0].splitlines()]
    assert lines[0] == ["what", "level", "threads", "bytes_a_thread", "value", "unit"]
    assert {line[0] for line in lines[1:]} == {"flops", "read"} | ({"tiles"} if "amx" in blitz_attn.isa_levels(available=True) else set())
    assert all(float(line[4]) > 0 for line in lines[1:])


def test_error_table_holds_the_rule():
    out, _ = run("error_table.py", "--dtypes", "float16", "bfloat16", "--tokens", "256")
    assert out.splitlines()[-1] == "# the rule holds in every row"


# ---- What no script takes ---------------------------------------------------------------------------------------------

FROM_1, FROM_0, ABOVE_0 = "expected a whole number from 1", "expected a whole number from 0", "expected a number above 0"
UNWRITABLE = "expected a file that can be written, in a folder that exists"
REFUSED = [
    *((script, f"{option} {BENCHMARK}", f"{option}: {UNWRITABLE}") for script in ("benchmark", "decode", "quest", "nsa", "peers") for option in ("--csv", "--json")),
    ("decode", "--json /nonexistent/rows.json", f"--json: {UNWRITABLE}"),
    ("plot", "-o /nonexistent/figure.png", f"--output/-o: {UNWRITABLE}"),
    *((script, "--isa foo", "--isa: expected a level of this CPU (portable") for script in ("benchmark", "roofline", "decode", "quest", "backward", "nsa", "peers", "scheduling", "error_table")),
    *((script, "--seed -1", f"--seed: {FROM_0}") for script in ("benchmark", "decode", "quest", "backward", "masks", "nsa", "peers", "error_table")),
    *((script, f"{option} 0", f"{option}: {FROM_1}") for script in ("roofline", "speed", "scheduling") for option in ("--threads", "--repeats")),
    *(("roofline", f"--seconds {seconds}", f"--seconds: {ABOVE_0}") for seconds in ("0", "-1", "nan", "inf", "x")),
    *((script, "--warmup -1", f"--warmup: {FROM_0}") for script in ("benchmark", "backward", "scheduling")),
    ("scheduling", "--settle -1", "--settle: expected a number from 0"),
    ("nsa", "--dense-seconds -1", "--dense-seconds: expected a number from 0"),
    ("peers", "--most-seconds -1", f"--most-seconds: {ABOVE_0}"),
    ("peers", "--merge /nonexistent", "--merge: expected a file that can be read"),
    ("peers", f"--merge {BENCHMARK / 'README.md'}", "--merge: expected tables of peers.py"),
    ("error_table", "--tokens 0", "--tokens: expected a whole number from 4"),
    ("distributed", "--tokens 100", "--tokens: expected a multiple of 128"),
    ("distributed", "--ranks 0", f"--ranks: {FROM_1}"),
    ("distributed", "--density 3", "--density: expected a number above 0 and at most 1"),
    ("distributed", "--tokens 1024 --heads 3 --kv-heads 2", "distributed.py: num_heads: expected a multiple of num_kv_heads"),
    ("choosing", "--tokens 64 --heads 3 --kv-heads 2 --peers", "choosing.py: k: expected a number of heads"),
    ("decode", "--head-dim 1000 --shapes 1x4x2x64 --threads 1 --peers", "decode.py: q: expected at least one head and a head dim"),
    ("backward", "-D 999 -S 32 --no-torch", "backward.py: q: expected a head dim"),
    ("quest", "--page 2000 --contexts 2001 -H 1 --kv-heads 1 -D 16 --threads 1", "quest.py: k_cache: expected pages of at most"),
    ("masks", "--heads 3 --kv-heads 2 -S 32 --no-torch", "masks.py: k: expected a number of heads"),
    ("nsa", "--block 48 --stride 20 --tokens 100 -H 1 --kv-heads 1 -D 16", "nsa.py: compress_stride: expected a divisor"),
    ("benchmark", "--input missing.npz", "--input: expected a file that can be read"),
    ("benchmark", f"--input {BENCHMARK / 'README.md'}", f"--input: {BENCHMARK / 'README.md'}: expected a file written by capture.py"),
    ("benchmark", f"--resume {SLICE}", "--resume: "),
    ("benchmark", "-S 16 -H 1 -D 16 999 --block-shapes 16x16 --sparsities 0 --repeats 1 --threads 1", "benchmark.py: q: expected a head dim"),
    ("benchmark", "--resume missing.log", "--resume: expected a file that can be read"),
    ("benchmark", "--layers 0", "--layers: expected only with --input"),
    ("benchmark", "--choosers oracle", "--choosers: expected only with --input"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "options", "sentence"), REFUSED, ids=lambda value: value.replace(str(BENCHMARK), "."))
def test_a_sentence_says_what_an_option_may_be(script, options, sentence, capsys):
    try:
        code = importlib.import_module(script).main(options.split())
    except SystemExit as end:
        code = end.code
    finally:
        blitz_attn.set_num_threads(None)
    assert code == 2
    error = capsys.readouterr().err
    assert sentence in error.splitlines()[-1]
    assert "Traceback" not in error


def test_nothing_is_written_where_another_option_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("benchmark").main(["--csv", str(tmp_path / "rows.csv"), "--seed", "-1"])
    assert not list(tmp_path.iterdir())
    assert "--seed" in capsys.readouterr().err


def test_plot_refuses_no_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("plot").main(["-o", ""])
    assert UNWRITABLE in capsys.readouterr().err


@pytest.mark.parametrize(("words", "call", "refused"), [("no name of an argument", 1, False), ("q: expected another", 1, True), ("q: expected another", 2, False)])
def test_a_mistake_keeps_its_traceback(words, call, refused, capsys):
    """What the library says of an argument when it is first called is about options, later it is a mistake."""
    calls = []

    def once_more():
        calls.append(0)
        if len(calls) == call:
            raise ValueError(words)

    def main(argv):
        for contender in (int, once_more):
            list(_bench.in_turns([_bench.Contender("call", contender, 1.0)], 1, 1, _bench.Progress(1.0, io.StringIO())))

    with contextlib.nullcontext() if refused else pytest.raises(ValueError, match=words):
        assert _bench.command(main)([]) == 2
    assert capsys.readouterr().err == (f"test_benchmark.py: {words}\n" if refused else "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["-m blitz_attn", "-m blitz_attn.distributed --alone", "benchmark.py --help", "plot.py --help", "error_table.py --tokens 64 --dtypes float32"]
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


# ---- The parts that have no table -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()])
def test_progress_rewrites_its_line_on_a_terminal_only(out, monkeypatch):
    clock = iter(range(0, 10000, 50))
    monkeypatch.setattr(_bench.time, "monotonic", lambda: next(clock))
    progress = _bench.Progress(4.0, out)
    progress.add(0.0, "nothing done yet")
    progress.add(1.0, "a quarter")
    progress.add(2.0, "more")
    progress.note("a line that stays")
    text = out.getvalue()
    assert "nothing" not in text
    assert " 25 %  about 5 min 00 s left  a quarter" in text  # 100 s for a quarter
    assert " 75 %  about 50 s left  more" in text
    assert text.endswith("\r\x1b[Ka line that stays\n" if out.isatty() else "more\na line that stays\n")
    assert text.count("\n") == (1 if out.isatty() else 3)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_durations_are_said_as_people_say_them(seconds, text):
    assert _bench.duration(seconds) == text


def test_contenders_take_turns():
    calls = []
    contenders = [_bench.Contender(name, lambda name=name: calls.append(name) or _bench.time.sleep(0.003), 1.0) for name in "AB"]
    contenders[1].before_last = lambda: calls.append("-")
    progress = _bench.Progress(1.0, io.StringIO())
    seen = [
        (index, len(timing.samples), "".join(calls))
        for index, timing in _bench.in_turns(contenders, repeats=2, warmup=1, progress=progress)
    ]
    assert seen == [(0, 2, "ABABA"), (1, 2, "ABABA-B")]
    assert progress.done == 6


def test_quick_calls_are_repeated_within_a_sample():
    calls = []
    contender = _bench.Contender("quick", lambda: calls.append(0), 1.0)
    list(_bench.in_turns([contender], repeats=1, warmup=1, progress=_bench.Progress(1.0, io.StringIO())))
    assert len(calls) > 10


# ---- Backward -----------------------------------------------------------------------------------------------------


def test_backward_rows():
    options = ["-S", "200", "-H", "2", "-D", "16", "--block-shape", "32x32", "--sparsities", "0", "0.5", "--repeats", "1", "--no-torch"]
    lines = run("backward.py", *options, "--dtypes", "float32", "bfloat16", "--threads", "1", "2")[0].splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["float32"], ["bfloat16"])]
    keys = [(dtype, rule, sparsity, threads) for dtype in ("float32", "bfloat16") for rule in ("all", "causal")
            for threads in ("1", "2") for sparsity in ("0.00", "0.50")]  # fmt: skip
    assert [(row[0], row[4], row[6], row[7]) for row in rows] == keys
    assert all(row[8] == "yes" for row in rows)
    assert "usage:" in run("backward.py", "--sparsities", "0.5", code=2)[1]


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="another process' clock"))])
def test_scheduling_rows(busy):
    options = ["-S", "300", "-H", "2", "--dtypes", "bfloat16", "--threads", "2", "--repeats", "1", "--warmup", "0", "--settle", "0"]
    lines = run("scheduling.py", *options, "--busy" if busy else "--no-busy")[0].splitlines()
    rows = [line.split() for line in lines if " idle " in line or " busy " in line]
    assert len(rows) == 16 * (1 + busy)
    for row in rows:
        threads, same, *_, ratio, limit, share = row[-7:]
        assert (threads, same) == ("2", "yes")
        assert "busy" in row or float(limit) == 2
        assert limit == share == "N/A" or float(share) == pytest.approx(float(ratio) / float(limit), abs=0.02)
    small = [line.split() for line in lines if line.split()[-2:-1] in (["1"], ["16"], ["64"])]
    assert len(small) == 15
    assert all(float(row[-1]) > 0 for row in small)
