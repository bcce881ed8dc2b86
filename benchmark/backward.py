#!/usr/bin/env python3
"""Gradients of block-sparse attention: dense, causal and sparse, next to torch's dense backward where torch is installed.

    python benchmark/backward.py                                  # about a minute and a half
    python benchmark/backward.py --isa avx2 --dtypes float32      # what a CPU with AVX2 gets
    python benchmark/backward.py -S 16384 --sparsities 0 0.9 --no-torch

A row is one call of the backward pass. Backward/forward is the time of this call over the time of our own forward call with the same
arguments. Torch_[usec] is the time of the backward pass of scaled_dot_product_attention, dense or causal; sparse rows show the time
without a list. No time includes a forward pass. README.md in this folder explains the other columns.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import machine
from _bench import Contender, Report, block_shape, columns, command, in_turns, parameters, parser_of, positive, share, yes
from blitz_attn import _core
from operations import DTYPES, Attention, Gradients, draw
from other_libraries import UnavailableError, imported_torch, torch_tensor

COLUMNS = columns(
    "dtype:9 H:3 S:6 D:4 rule:7 block_shape:11 sparsity:8.2f threads:7 Equal:6 Our_[usec]:11.0f GFLOP/s:8.1f "
    "Share_of_F:10.3f Share_of_ideal:14.3f Over_1_thread:13.2f Backward/forward:16.2f Torch_[usec]:12.0f "
    "Torch/ours:10.2f"
)
PEAK_SECONDS = 0.05


def torch_call(gradients: Gradients, threads: int) -> Callable[[], Any]:
    """A call of torch's dense backward pass over the same operands. The forward pass runs here, once. Raises `UnavailableError` without
    torch."""
    torch, asked = imported_torch(), gradients.asked
    inputs = [torch_tensor(x, asked.dtype).requires_grad_() for x in asked.views[:3]]
    dout = torch_tensor(gradients.dout, asked.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=asked.causal)

    def run() -> None:
        torch.set_num_threads(threads)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return run


def asked_of(dtype: str, causal: bool, sparsity: float, args: argparse.Namespace) -> Attention:
    dense = draw(dtype, args.heads, args.seq, args.head_dim, seed=args.seed, causal=causal)
    return dense.sparse(sparsity, args.block_shape, args.seed) if sparsity else dense


def measure(dtype: str, causal: bool, args: argparse.Namespace, report: Report, part: float) -> None:
    """Measure the rows of a dtype and rule in turns. For each number of threads the dense row comes first."""
    cells = {sparsity: Gradients(asked_of(dtype, causal, sparsity, args), args.seed) for sparsity in args.sparsities}
    alone: dict[float, float] = {}
    for threads in args.threads:
        limit = Contender("limit", lambda threads=threads: machine.peak_flops(threads, seconds=PEAK_SECONDS), 0.0)
        contenders, torch = [limit], None
        if args.torch:
            try:
                torch = Contender("torch", torch_call(cells[0.0], threads), cells[0.0].asked.flops)
                contenders.append(torch)
            except UnavailableError:
                pass
        rows = {}
        for sparsity, gradients in cells.items():
            forward = Contender("forward", gradients.asked.call(threads), gradients.asked.flops)
            own = Contender(f"{dtype}, {threads} threads", gradients.call(threads), 2.5 * gradients.asked.flops, gradients.poison)
            contenders += [forward, own]
            rows[own] = sparsity, gradients, forward
        dense = contenders[-2 * len(cells) + 1]
        for own in in_turns(contenders, args, report.progress, part / len(args.threads)):
            if own not in rows:
                continue
            sparsity, gradients, forward = rows[own]
            rate = gradients.work().flops / own.median / 1e9
            if threads == 1:
                alone[sparsity] = own.median
            values = {
                "dtype": dtype,
                "H": args.heads,
                "S": args.seq,
                "D": args.head_dim,
                "rule": "causal" if causal else "all",
                "block_shape": "x".join(map(str, args.block_shape)) if sparsity else "-",
                "sparsity": sparsity,
                "threads": threads,
                "Equal": yes(gradients.is_equal()) if args.run_reference else None,
                "Our_[usec]": own.median * 1e6,
                "GFLOP/s": rate,
                "Share_of_F": rate / limit.value,
                "Share_of_ideal": dense.median / own.median * gradients.asked.pairs / cells[0.0].asked.pairs,
                "Over_1_thread": alone[sparsity] / own.median if threads > 1 and alone else None,
                "Backward/forward": own.median / forward.median,
                "Torch_[usec]": torch.median * 1e6 if torch else None,
                "Torch/ours": torch.median / own.median if torch else None,
            }
            report.row(values, samples_s=own.samples)


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__)
    result.add_argument("--seq", "-S", type=positive, default=4096, help="tokens (%(default)s)")
    result.add_argument("--heads", "-H", type=positive, default=2, help="heads (%(default)s)")
    result.add_argument("--head-dim", "-D", type=positive, default=128, help="head dim (%(default)s)")
    result.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="dtypes (float32 bfloat16)")
    result.add_argument("--sparsities", type=share, nargs="+", default=[0.0, 0.5, 0.8, 0.9], metavar="s", help="the first must be 0")
    result.add_argument("--block-shape", type=block_shape, default=(128, 128), metavar="QxKV", help="of the lists (128x128)")
    result.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only causal rows, or none (both)")
    result.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="time torch too (yes)")
    result.add_argument("--run-reference", action=argparse.BooleanOptionalAction, default=True, help="check the gradients (yes)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    if args.sparsities[0] != 0:
        raise ValueError(f"--sparsities: expected 0 first, which the others are measured against, got {args.sparsities[0]:g}")
    rules = (False, True) if args.causal is None else (args.causal,)
    limits = ", ".join(f"{threads}: {machine.peak_flops(threads):.0f}" for threads in args.threads)
    report.head(parameters(ISA=_core.isa_active(), SEED=args.seed), f"F in GFLOP/s by threads: {limits}")
    for dtype, causal in itertools.product(args.dtypes, rules):
        measure(dtype, causal, args, report, 1 / len(args.dtypes) / len(rules))
    report.foot()


if __name__ == "__main__":
    raise SystemExit(main())
