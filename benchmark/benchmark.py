#!/usr/bin/env python3
"""Block-sparse attention against dense attention: a table on stdout, progress on stderr.

    python benchmark/benchmark.py | tee bench.log | python benchmark/plot.py     # the default sweep, about two minutes on two cores
    python benchmark/benchmark.py --headline | tee headline.log                  # upstream's own sweep; says first how long it takes
    python benchmark/benchmark.py --headline --resume headline.log | tee all.log # goes on where a stopped run ended
    python benchmark/benchmark.py --input smollm2.npz                            # a real model's q, k, v (see capture.py)

The first columns are upstream's, in upstream's order and widths. Ref_Latency is dense attention over the same operands, timed in turns
with the block-sparse calls; Our_Latency is the median of the repeats. Outputs_equal compares rows with a float64 reference (rtol 0.01,
atol 0.001). Then: GFLOP/s of the work that the list asks for; the share of the ideal speed-up 1/(1-s), s being what the list really
drops; and the share of F, the fp32 FMA peak of the same threads, measured in the same run. README.md beside this file says more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from _bench import command, isa_level, natural, positive, readable, share, writable
from result_files import add_save, main_with_save

SIZES = (128, 256, 512, 1024)
GRID_BLOCK_SHAPES = [(block_q, block_kv) for block_q in SIZES for block_kv in SIZES]
DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("BNSD", "BSND", "BSH", "TND")

# What an option is where it is not given: for the default sweep, upstream's own, and captured input.
DEFAULTS = {
    "sweep": {
        "seq": [8192],
        "sparsities": [0.0, 0.5, 0.8, 0.9],
        "block_shapes": GRID_BLOCK_SHAPES,
        "frames": False,
        "repeats": 3,
        "warmup": 1,
        "dtype": "bfloat16",
    },
    "headline": {
        "seq": [118806],
        "sparsities": [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        "block_shapes": GRID_BLOCK_SHAPES,
        "frames": True,
        "repeats": 1,
        "warmup": 0,
        "dtype": "bfloat16",
    },
    "input": {
        "sparsities": [0.0, 0.5, 0.75, 0.9],
        "block_shapes": [(128, 128), (64, 64)],
        "choosers": ["mean-pool", "oracle"],
        "repeats": 3,
        "warmup": 1,
        "dtype": "float32",
    },
}


def block_shape(text: str) -> tuple[int, int]:
    """`128x512` -> (128, 512)."""
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected two positive sizes such as 128x512 (queries x keys), got {text!r}")
    return int(sizes[0]), int(sizes[1])


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    lists.add_argument("--frame-tokens", type=positive, default=3600, help="border at the left and top, in tokens (%(default)s)")
    lists.add_argument("--sorted", action=argparse.BooleanOptionalAction, default=True, help="columns of a row rising (yes)")
    lists.add_argument("--seed", type=natural, default=1234, help="of block lists and operands (%(default)s, upstream's)")
    lists.add_argument("--layers", type=natural, nargs="+", help="with --input: layers to run (all in the file)")
    lists.add_argument("--choosers", nargs="+", choices=("mean-pool", "oracle"), help="with --input (both)")
    timing = result.add_argument_group("timing")
    timing.add_argument("--repeats", type=positive, help="timed turns, of which the median counts (3; headline 1)")
    timing.add_argument("--warmup", type=natural, help="turns before them (1; headline 0)")
    timing.add_argument("--reference", choices=("own", "torch"), default="own", help="dense attention to compare with (%(default)s)")
    timing.add_argument("--threads", type=positive, help="threads (the library's choice)")
    timing.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
    outputs = result.add_argument_group("outputs")
    outputs.add_argument("--run-reference", action=argparse.BooleanOptionalAction, default=True, help="check the outputs (yes)")
    outputs.add_argument("--check-rows", type=natural, default=32, help="query rows a head to check, 0: all; short problems: all (32)")
    outputs.add_argument("--print-mask", action="store_true", help="picture of each block list, on stderr")
    outputs.add_argument("--print-outputs", action="store_true", help="a corner of each output, on stderr")
    outputs.add_argument("--print-block-equality", action="store_true", help="which blocks of an output are right, on stderr")
    outputs.add_argument("--print-height", type=positive, default=128, help="rows of that corner and of those blocks (%(default)s)")
    outputs.add_argument("--print-width", type=positive, default=8, help="columns of them (%(default)s)")
    outputs.add_argument("--csv", type=writable, metavar="FILE", help="also write the rows, with every timing, as CSV")
    outputs.add_argument("--json", type=writable, metavar="FILE", help="the same as JSON")
    return add_save(result)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser()
    args = options.parse_args(argv)
    if args.input and (args.headline or args.resume):
        options.error("--input: cannot be combined with --headline or --resume")
    for name in ("layers", "choosers"):
        if getattr(args, name) and not args.input:
            options.error(f"--{name}: expected only with --input, whose layers it is about")
    for name, value in DEFAULTS["input" if args.input else "headline" if args.headline else "sweep"].items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.kv_heads and any(heads % args.kv_heads for heads in args.heads):
        options.error(f"--kv-heads: expected a divisor of every number of heads {args.heads}, got {args.kv_heads}")
    return args


def run(args: argparse.Namespace) -> None:
    """Run the sweep that `args` describe. The library is imported here, so that --help and bad arguments need none."""
    import _bench  # first: finds the library of this checkout
    import blitz_attn
    import roofline
    from blitz_attn import _core
    from captured_input import RealRun
    from random_input import Sweep
    from result_files import Records

    if args.isa:
        blitz_attn.isa(args.isa)
    args.threads = args.threads or blitz_attn.get_num_threads()
    problem = {} if args.input else {"KV_HEADS": args.kv_heads}
    parameter_line = _bench.parameters(
        DTYPE=args.dtype,
        INPUT_LAYOUT=args.layout,
        SABI_SORTED=args.sorted,
        TORCH_REFERENCE=args.reference,
        **problem,
        SEED=args.seed,
        THREADS=args.threads,
        ISA=_core.isa_active(),
    )
    records = Records(args.csv, args.json, {"cpu": _core.cpu_model(), "isa": _core.isa_active(), "options": vars(args)})
    try:
        job = (RealRun if args.input else Sweep)(args, sys.stdout, records)
        limits = records.run["limits"] = roofline.measure(args.threads, [_core.isa_active()], seconds=0.1)
        reads = ", ".join(f"{level} {value:.0f}" for level, value in limits["read"].items())
        peak = limits["flops"][_core.isa_active()]
        job.run(parameter_line, f"{_core.cpu_model()}: F = {peak:.0f} GFLOP/s; reads in GB/s: {reads}; all threads together")
    finally:
        records.close()


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        run(args)
    except KeyboardInterrupt:
        print("\nbenchmark.py: stopped; --resume FILE goes on from what was printed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
