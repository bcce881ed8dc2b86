#!/usr/bin/env python3
"""Block-sparse attention against dense attention: a table on stdout, progress on stderr.

    python benchmark/benchmark.py | tee bench.log | python benchmark/plot.py     # the default sweep, about two minutes on two cores
    python benchmark/benchmark.py --headline | tee headline.log                  # upstream's own sweep; first prints how long it will take
    python benchmark/benchmark.py --headline --resume headline.log | tee all.log # goes on where a stopped run ended
    python benchmark/benchmark.py --input smollm2.npz                            # a real model's q, k, v (see capture.py)

The first columns are upstream's, in upstream's order and widths. README.md in this folder explains all columns.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import _bench  # first: finds the library of this checkout
import blitz_attn
import machine
import roofline
from _bench import Contender, Report, block_shape, columns, command, in_turns, natural, parser_of, positive, readable, share, yes
from blitz_attn import _core, sabi, select, testing
from capture import load_capture
from operations import CHECKED_ROWS, DTYPES, Attention, draw, is_feasible, lay_out, poison
from other_libraries import UnavailableError, torch_sdpa, torch_tensor

SIZES = (128, 256, 512, 1024)
GRID_BLOCK_SHAPES = [(block_q, block_kv) for block_q in SIZES for block_kv in SIZES]
LAYOUTS = ("BNSD", "BSND", "BSH", "TND")

# The defaults of options: for the default sweep, for upstream's own, and for captured input.
EVERY = [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
SWEEP = {
    "seq": [8192],
    "sparsities": [0.0, 0.5, 0.8, 0.9],
    "block_shapes": GRID_BLOCK_SHAPES,
    "dtype": "bfloat16",
    "repeats": 3,
    "warmup": 1,
}
HEADLINE = SWEEP | {"seq": [118806], "sparsities": EVERY, "frames": True, "repeats": 1, "warmup": 0}
INPUT = SWEEP | {"sparsities": [0.0, 0.5, 0.75, 0.9], "block_shapes": [(128, 128), (64, 64)], "dtype": "float32"}


# Upstream's columns, in upstream's order and widths; the first eight say what a row measures.
KEY_COLUMNS = columns("block_shape:13 H:3 B:3 s_q:6 s_kv:6 D:4 frame(L,R,T,B):15 sparsity:9.2f")
COLUMNS = KEY_COLUMNS + columns(
    "Outputs_equal:15 Ref_Latency_[usec]:18.2f Our_Latency_[usec]:18.2f GFLOP/s:10.1f Share_of_ideal:15.3f Share_of_F:11.3f"
)
QUALITY_COLUMNS = columns("Layer:5 Chooser:9 Kept_mass:9.4f Output_error:12.2e")
PEAK_SECONDS = 0.05
SETTLE_SECONDS = 0.3  # after a check of a result, NumPy's threads spin for a while


# ---- Measuring ---------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A row to measure: the columns that identify it, and the call."""

    values: dict[str, Any]
    asked: Attention


def dense_call(asked: Attention, args: argparse.Namespace) -> Callable[[], Any]:
    """Dense attention over the operands, by this library or by torch."""
    if args.reference == "own":
        return asked.call(args.threads)
    q, k, v = asked.views[:3]
    options = {"is_causal": asked.causal, "scale": asked.options.get("scale"), "enable_gqa": k.shape[1] != q.shape[1]}
    try:
        return torch_sdpa([tuple(torch_tensor(x, asked.dtype) for x in (q, k, v))], args.threads, **options)
    except UnavailableError as reason:
        raise ValueError(f"--reference: {reason}") from None


def measured(dense: Attention, jobs: Sequence[Job], args: argparse.Namespace, report: Report, part: float) -> Iterator[Job]:
    """Measure attention over block lists in turns with dense attention over the same operands and with F. Yields each job right after its
    last sample, with all its values set and its result still in `out`."""

    def prepare() -> None:
        poison(dense.out)
        if args.repeats == 1:
            time.sleep(SETTLE_SECONDS)

    limit = Contender("limit", lambda: machine.peak_flops(args.threads, seconds=PEAK_SECONDS), 0.0)
    reference = Contender("dense", dense_call(dense, args), dense.flops)
    own = {Contender(" ".join(map(str, job.values.values())), job.asked.call(args.threads), job.asked.flops, prepare): job for job in jobs}
    for contender in in_turns([limit, reference, *own], args, report.progress, part):
        if contender not in own:
            continue
        job = own[contender]
        rate = job.asked.flops / contender.median / 1e9
        job.values |= {
            "Outputs_equal": yes(job.asked.is_equal(args.check_rows, args.seed)) if args.run_reference else None,
            "Ref_Latency_[usec]": reference.median * 1e6,
            "Our_Latency_[usec]": contender.median * 1e6,
            "GFLOP/s": rate,
            "Share_of_ideal": reference.median / contender.median * job.asked.pairs / dense.pairs,
            "Share_of_F": rate / limit.value,
            "dtype": args.dtype,
            "threads": args.threads,
            "reference_samples_s": reference.samples,
            "own_samples_s": contender.samples,
        }
        yield job


# ---- Random operands: upstream's sweep -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A row of the sweep, before it is measured."""

    block_shape: tuple[int, int]
    batch: int
    heads: int
    tokens: int
    head_dim: int
    sparsity: float
    frame: sabi.FrameWidths | None

    def values(self) -> dict[str, Any]:
        bare = self.frame is None or self.sparsity == 0  # at sparsity 0 the frame makes no difference
        shape, frame = "{}x{}".format(*self.block_shape), "-" if bare else "({},{},{},{})".format(*self.frame)
        cells = (shape, self.heads, self.batch, self.tokens, self.tokens, self.head_dim, frame, self.sparsity)
        return {column.name: value for column, value in zip(KEY_COLUMNS, cells, strict=True)}

    @property
    def key(self) -> tuple[str, ...]:
        """The leading columns as they are printed, which identify the row."""
        values = self.values()
        return tuple(column.text(values[column.name]).strip() for column in KEY_COLUMNS)

    @property
    def work(self) -> float:
        """The approximate number of floating-point operations."""
        return 4.0 * (1 - self.sparsity) * self.batch * self.heads * self.head_dim * self.tokens**2

    def job(self, dense: Attention, args: argparse.Namespace) -> Job:
        return Job(self.values(), dense.sparse(self.sparsity, self.block_shape, args.seed, self.frame, args.sorted))


def groups_of(args: argparse.Namespace, report: Report) -> Iterator[list[Cell]]:
    """The cells of the sweep in upstream's order, grouped by block shape and problem. Impossible cells are left out."""
    for shape in args.block_shapes:
        widths = [-(-args.frame_tokens // size) for size in shape]  # upstream's frame: frame_tokens at the left and at the top
        frame = sabi.FrameWidths(widths[1], 1, widths[0], 1) if args.frames else None
        for problem in itertools.product(args.batch, args.heads, args.seq, args.head_dim):
            cells = [Cell(shape, *problem, sparsity, frame) for sparsity in args.sparsities]
            group = [cell for cell in cells if is_feasible(cell.tokens, shape, cell.sparsity, frame)]
            left_out = ", ".join(f"{cell.sparsity:g}" for cell in cells if cell not in group)
            if left_out:
                why = "(the frame alone keeps more, or rows would be empty)"
                report.note(f"{cells[0].key[0]} at S = {problem[2]}: sparsity {left_out} left out {why}")
            if group:
                yield group


def earlier_rows(path: Path, parameter_line: str) -> dict[tuple[str, ...], str]:
    """The rows of an earlier run, by their keys. An incomplete line, as a stopped run may leave, is no row."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if not any(line.split()[:1] == [COLUMNS[0].name] for line in lines):
        raise ValueError(f"--resume: {path} holds no table (was it overwritten by sending this run's output to the same file?)")
    if parameter_line not in (line.strip() for line in lines):
        raise ValueError(f"--resume: {path} was measured with other parameters than {parameter_line}")
    rows = [line for line in lines if re.match(r"\s*\d+x\d+\s", line) and line.endswith("\n") and len(line.split()) == len(COLUMNS)]
    return {tuple(line.split()[: len(KEY_COLUMNS)]): line.rstrip("\n") for line in rows}


def probe_rate(args: argparse.Namespace) -> float:
    """FLOP/s of a short piece of the first problem, to estimate how long the whole sweep takes."""
    keys = min(args.seq[0], 8192)
    piece = draw(args.dtype, args.heads[0], keys, args.head_dim[0], kv_heads=args.kv_heads, queries=min(keys, 256 * args.threads))
    call, times = piece.call(args.threads), []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return piece.flops / min(times)


def sweep(args: argparse.Namespace, report: Report, parameter_line: str, machine_line: str) -> None:
    groups = list(groups_of(args, report))
    if not groups:
        raise ValueError("--sparsities: no cell of this sweep can have a block list; lower them, or use --no-frames")
    known = earlier_rows(args.resume, parameter_line) if args.resume else {}
    missing = [[cell for cell in group if cell.key not in known] for group in groups]
    work = [sum(cell.work for cell in cells) + (cells[0].work / (1 - cells[0].sparsity) if cells else 0.0) for cells in missing]
    total, rows, rate = sum(work) * (args.repeats + args.warmup), sum(map(len, groups)), probe_rate(args)
    count = f"{rows} rows" + (f", {rows - sum(map(len, missing))} of them from {args.resume}" if known else "")
    report.note(
        f"{count}: about {_bench.duration(total / rate)} ({total / 1e12:.3g} TFLOP at {rate / 1e9:.0f} GFLOP/s, from a short probe). "
        "Rows come as they are measured; a stopped run goes on with --resume FILE, where FILE is what it printed."
    )
    report.head(parameter_line, machine_line)
    for group, cells, cost in zip(groups, missing, work, strict=True):
        one = group[0]
        dense = draw(
            args.dtype, one.heads, one.tokens, one.head_dim, batch=one.batch, kv_heads=args.kv_heads, layout=args.layout, seed=args.seed
        )
        results = measured(dense, [cell.job(dense, args) for cell in cells], args, report, cost / sum(work)) if cells else iter(())
        for cell in group:  # rows of the earlier run are printed among the new ones, in the order of the sweep
            if cell.key in known:
                report.line(known[cell.key])
                continue
            job = next(results)
            report.row(job.values)
            show(job.asked, args, report)
    report.foot()


def show(asked: Attention, args: argparse.Namespace, report: Report) -> None:
    """Print upstream's views of a cell on stderr: its mask, a corner of its output, and which blocks of the output equal the reference."""
    out = asked.views[3]
    if args.print_mask:
        report.note(sabi.picture(asked.lists, -(-asked.views[1].shape[2] // asked.block_shape[1])))
    if args.print_outputs:
        corner = testing.to_float64(out[:, :, : args.print_height, : args.print_width], asked.bits)
        report.note(np.array2string(corner, precision=4, suppress_small=True, threshold=sys.maxsize))
    if args.print_block_equality:  # needs the whole reference, so only for short sequences
        got, exact = (np.concatenate(parts, axis=1) for parts in zip(*asked.compared(out, 0), strict=True))
        report.note(str(np.asarray(testing.block_allclose_map(got, exact, args.print_height, args.print_width)).astype(int)))


# ---- A real model's operands ---------------------------------------------------------------------------------------

CHOOSERS: dict[str, Callable[[int], Any]] = {  # a cheap estimate of each block's softmax mass, and the exact mass
    "mean-pool": lambda block: select.Pooled(block, "mean", "mean"),
    "oracle": lambda block: select.SampledRows(block, "mean"),
}


def captured(args: argparse.Namespace, report: Report, parameter_line: str, machine_line: str) -> None:
    """Measure speed, loss of accuracy and kept softmax mass at each sparsity, over the layers of a capture. Choosers always keep the first
    block of a row, the block on the diagonal and the block before the diagonal."""
    try:
        capture = load_capture(args.input)
    except ValueError as error:
        raise ValueError(f"--input: {error}") from None
    layers = args.layers or sorted(capture.layers)
    if not set(layers) <= set(capture.layers):
        raise ValueError(f"--layers: expected some of {sorted(capture.layers)}, got {layers}")
    shapes = [block for block, block_kv in args.block_shapes if block == block_kv]
    if len(shapes) < len(args.block_shapes):
        raise ValueError(f"--block-shapes: expected square ones with --input, got {args.block_shapes}")
    report.columns = COLUMNS + QUALITY_COLUMNS
    kv_heads = capture.layers[layers[0]][1].shape[1]
    report.head(parameter_line, _bench.parameters(MODEL=capture.model, TEXT=capture.text, CAUSAL=True, KV_HEADS=kv_heads), machine_line)
    for layer, block in itertools.product(layers, shapes):
        q, k, v = (testing.round_to(x, args.dtype) for x in capture.layers[layer])
        dense = lay_out(q, k, v, args.dtype, args.layout, causal=True, scale=capture.scale)
        dense.call(args.threads)()
        exact = testing.to_float64(dense.out, dense.bits)
        rules = {"causal": True, "scale": capture.scale, "block_shape": (block, block), "dtype": dense.bits}
        jobs = []
        for sparsity in args.sparsities:
            for chooser in args.choosers if sparsity else ("all",):
                if sparsity:
                    lists = blitz_attn.select_blocks_prefill(q, k, chooser=CHOOSERS[chooser](block), density=1 - sparsity, **rules)
                else:
                    lists = sabi.causal(q.shape[2], block_shape=(block, block))
                values = Cell((block, block), q.shape[0], q.shape[1], q.shape[2], q.shape[3], sparsity, None).values()
                jobs.append(Job(values | {"Layer": layer, "Chooser": chooser}, dense.over(lists, (block, block))))
        for job in measured(dense, jobs, args, report, 1 / len(layers) / len(shapes)):
            recall = select.recall(q, k, job.asked.lists, **rules)
            error = testing.error_of(dense.out, exact, dense.bits).relative
            report.row(job.values | {"Kept_mass": float(np.nanmean(recall)), "Output_error": error})
    report.foot()


# ---- The command ---------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=None, warmup=None, one_count=True)
    what = result.add_argument_group("what to run")
    what.add_argument("--headline", action="store_true", help="upstream's sweep: S=118806, H=3, D=128, bfloat16, 11 sparsities, frames")
    what.add_argument("--input", type=readable, metavar="FILE", help="run on the queries, keys and values that capture.py saved")
    what.add_argument("--resume", type=readable, metavar="FILE", help="output of an earlier run: its rows are kept, the rest is measured")
    problem = result.add_argument_group("problem (lists: every combination is run)")
    problem.add_argument("--batch", "-B", type=positive, nargs="+", default=[1], help="batch sizes (1)")
    problem.add_argument("--heads", "-H", type=positive, nargs="+", default=[3], help="query heads (3)")
    problem.add_argument("--kv-heads", type=positive, help="KV heads (as many as query heads)")
    problem.add_argument("--seq", "-S", type=positive, nargs="+", help="tokens, of queries and of keys (8192; headline 118806)")
    problem.add_argument("--head-dim", "-D", type=positive, nargs="+", default=[128], help="head dimensions (128)")
    problem.add_argument("--dtype", choices=DTYPES, help="dtype (bfloat16; with --input float32)")
    problem.add_argument("--layout", choices=LAYOUTS, default="BNSD", help="layout of q, k, v (%(default)s)")
    lists = result.add_argument_group("block lists")
    lists.add_argument("--block-shapes", type=block_shape, nargs="+", metavar="QxKV", help="such as 128x512 (all 16 of 128 .. 1024)")
    lists.add_argument("--sparsities", type=share, nargs="+", metavar="s", help="shares of blocks to drop")
    lists.add_argument("--frames", action=argparse.BooleanOptionalAction, help="always keep a border of blocks (only with --headline)")
    lists.add_argument("--frame-tokens", type=positive, default=3600, help="tokens of the border at the left and top (%(default)s)")
    lists.add_argument("--sorted", action=argparse.BooleanOptionalAction, default=True, help="sort the columns of each row (yes)")
    lists.add_argument("--layers", type=natural, nargs="+", help="with --input: layers to run (all layers in the file)")
    lists.add_argument("--choosers", nargs="+", choices=tuple(CHOOSERS), default=list(CHOOSERS), help="with --input (both)")
    lists.add_argument("--reference", choices=("own", "torch"), default="own", help="dense attention to compare with (%(default)s)")
    checks = result.add_argument_group("checks and looks")
    checks.add_argument("--run-reference", action=argparse.BooleanOptionalAction, default=True, help="check the outputs (yes)")
    checks.add_argument("--check-rows", type=natural, default=CHECKED_ROWS, help="query rows to check per head, 0: all (%(default)s)")
    checks.add_argument("--print-mask", action="store_true", help="picture of each block list, on stderr")
    checks.add_argument("--print-outputs", action="store_true", help="a corner of each output, on stderr")
    checks.add_argument("--print-block-equality", action="store_true", help="which blocks of an output are right, on stderr")
    checks.add_argument("--print-height", type=positive, default=128, help="rows that the last two print (%(default)s)")
    checks.add_argument("--print-width", type=positive, default=8, help="columns that they print (%(default)s)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    if args.input and (args.headline or args.resume):
        raise ValueError("--input: cannot be combined with --headline or --resume")
    for name, value in (INPUT if args.input else HEADLINE if args.headline else SWEEP).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.kv_heads and any(heads % args.kv_heads for heads in args.heads):
        raise ValueError(f"--kv-heads: expected a divisor of every number of heads {args.heads}, got {args.kv_heads}")
    names = {"DTYPE": args.dtype, "INPUT_LAYOUT": args.layout, "SABI_SORTED": args.sorted, "TORCH_REFERENCE": args.reference}
    if not args.input:
        names["KV_HEADS"] = args.kv_heads
    names |= {"SEED": args.seed, "THREADS": args.threads, "ISA": _core.isa_active()}
    limits = list(roofline.limits(args.threads, [_core.isa_active()], seconds=0.1))
    reads = ", ".join(f"{row['level']} {row['value']:.0f}" for row in limits if row["what"] == "read")
    about = f"{_core.cpu_model()}: F = {limits[0]['value']:.0f} GFLOP/s; reads in GB/s: {reads}; all threads together"
    (captured if args.input else sweep)(args, report, _bench.parameters(**names), about)


if __name__ == "__main__":
    raise SystemExit(main())
