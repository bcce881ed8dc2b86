#!/usr/bin/env python3
"""Native sparse attention against dense causal attention, by length: a table on stdout, progress on stderr.

    python benchmark/nsa.py | tee nsa.log | python benchmark/plot.py  # upstream's sizes, 1K .. 64K tokens
    python benchmark/nsa.py --quick                                   # 1K .. 8K
    python benchmark/nsa.py -H 8 --kv-heads 2 --tokens 262144 1048576 --passes forward --repeats 1 --warmup 0
    python benchmark/nsa.py --mode mslk --weights --dtype float32

B = 1. These take turns: our own dense causal attention, native sparse attention, both with the gradient (forward with context, then
backward), and the parts of the forward pass by themselves. Dense attention is run if a call is expected to take at most --dense-seconds.
Otherwise its time is extrapolated with N^2 from the longest length that was run, and `Dense_by` is `N^2` instead of `run`. `Parts` is the
sum of the times of the parts over the time of the whole call. Peaks are the process's largest resident memory during a call, inputs
included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Contender, Report, checked, columns, command, in_turns, parameters, parser_of, positive, yes
from blitz_attn import _core, reference, testing
from blitz_attn.nsa import (
    compress_kv,
    compressed_attention,
    compute_gates,
    gate_and_combine,
    nsa,
    nsa_backward,
    score_and_select_blocks,
    selected_attention,
    window_attention,
)
from operations import ATOL, DRAWN_TOKENS, ITEM_BYTES, RTOL, bits_options, memory_available, poison, poisoned

TOKENS = tuple(1 << n for n in range(10, 17))
QUICK_TOKENS = tuple(1 << n for n in range(10, 14))
CHECKED_QUERIES = 12
PARTS = ("compress", "cmp", "select", "slc", "win", "gate")

COLUMNS = columns(
    "N:8 mode:5 dtype:8 H:3 H_kv:4 D:4 threads:7 Outputs_equal:13 Dense_by:8 Dense_fwd_[ms]:14.2f NSA_fwd_[ms]:12.2f Speedup_fwd:11.2f "
    "Dense_f+b_[ms]:14.2f NSA_f+b_[ms]:12.2f Speedup_f+b:11.2f Fwd_peak_[MiB]:14.0f F+b_peak_[MiB]:14.0f "
    "compress:8.3f cmp:8.3f select:8.3f slc:8.3f win:8.3f gate:8.3f Parts:6.2f"
)


def peak_during(call: Callable[[], Any]) -> float | None:
    """The largest resident memory during the call in MiB; None if the system cannot tell."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        call()
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


def bytes_needed(tokens: int, args: argparse.Namespace) -> dict[str, int]:
    """A generous estimate of a pass's memory: inputs and results, and for the gradient also the context, the gradients and float32 sums."""
    wide, narrow = (tokens * heads * args.head_dim * ITEM_BYTES[args.dtype] for heads in (args.heads, args.kv_heads))
    forward = 3 * wide + 2 * narrow + (4 * wide if args.parts else wide)
    return {"forward": forward, "backward": 9 * wide + 8 * narrow + 4 * tokens * (args.heads * 8 + args.kv_heads * 16)}


def draw(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers, (1, N, heads, dim). A drawn stretch of tokens is repeated, shifted further along dim each time so that repetitions
    differ."""
    drawn = testing.round_to(rng.standard_normal((min(shape[1], DRAWN_TOKENS), *shape[2:]), dtype=np.float32), dtype)
    x = np.empty(shape, drawn.dtype)
    for n, begin in enumerate(range(0, shape[1], len(drawn))):
        stretch = x[0, begin : begin + len(drawn)]
        stretch[...] = np.roll(drawn, n, axis=-1)[: len(stretch)]
    return x


class Problem:
    """One length: inputs, and every call that is timed."""

    def __init__(self, tokens: int, args: argparse.Namespace):
        self.tokens, self.args = tokens, args
        rng = np.random.default_rng([args.seed, tokens])
        self.q, self.dout = (draw((1, tokens, args.heads, args.head_dim), args.dtype, rng) for _ in range(2))
        self.k, self.v = (draw((1, tokens, args.kv_heads, args.head_dim), args.dtype, rng) for _ in range(2))
        self.out = np.zeros_like(self.q)
        self.bits = bits_options(self.q)
        self.rules: dict[str, Any] = {"causal": True, "mode": args.mode}
        self.sizes = {"compress_block_size": args.block, "num_selected_blocks": args.selected, "window_size": args.window}
        self.stride, self.tile = args.block, args.tile
        if args.mode == "paper":
            self.stride, self.tile = args.stride or max(1, args.block // 2), 1
            self.rules["compress_stride"] = self.stride
        else:
            self.rules["q_tile_size"] = args.tile
        self.weights: dict[str, np.ndarray] = {}
        if args.weights:
            dim = args.head_dim
            shapes = {"w_k_compress": (args.kv_heads, dim, dim), "w_v_compress": (args.kv_heads, dim, dim)}
            shapes["gate_proj_weight"] = (args.heads, 3, dim)
            for name, shape in shapes.items():
                self.weights[name] = testing.round_to(rng.standard_normal(shape, dtype=np.float32) / dim**0.5, args.dtype)
        self.kept: dict[str, Any] = {}  # results of parts, which later parts read

    def dense_forward(self) -> None:
        blitz_attn.block_sparse_attention(self.q, self.k, self.v, layout="BSND", causal=True, out=self.out, **self.bits)

    def dense_both(self) -> None:
        dense = {"layout": "BSND", "causal": True, **self.bits}
        out, lse = blitz_attn.block_sparse_attention(self.q, self.k, self.v, return_lse=True, **dense)
        blitz_attn.block_sparse_attention_backward(self.dout, self.q, self.k, self.v, out, lse, **dense)

    def forward(self) -> None:
        nsa(self.q, self.k, self.v, out=self.out, **self.sizes, **self.rules, **self.weights, **self.bits)

    def both(self) -> None:
        context = nsa(self.q, self.k, self.v, return_context=True, **self.sizes, **self.rules, **self.weights, **self.bits)[1]
        nsa_backward(self.dout, context)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """The parts of the forward pass, in an order in which each part finds the results of earlier parts that it needs."""
        q, k, v, kept, size, bits = self.q, self.k, self.v, self.kept, self.args.block, self.bits
        w_k, w_v, w_gate = (self.weights.get(name) for name in ("w_k_compress", "w_v_compress", "gate_proj_weight"))
        seen = {"stride": self.stride, "mode": self.args.mode, "return_lse": True, **bits}
        tile = {"q_tile_size": self.tile, "return_lse": True, **bits}

        def chosen() -> Any:
            lse = kept["cmp"][1] if self.args.mode == "paper" else None
            return score_and_select_blocks(q, kept["compress"][0], self.args.selected, size, lse=lse, **self.rules, **bits)

        calls: dict[str, Callable[[], Any]] = {
            "compress": lambda: compress_kv(k, v, size, w_k, w_v, stride=self.stride, **bits),
            "cmp": lambda: compressed_attention(q, *kept["compress"], size, **seen),
            "select": chosen,
            "slc": lambda: selected_attention(q, k, v, kept["select"], size, **tile),
            "win": lambda: window_attention(q, k, v, self.args.window, return_lse=True, **bits),
            "gate": lambda: gate_and_combine(*(kept[name][0] for name in ("cmp", "slc", "win")), compute_gates(q, w_gate, **bits), **bits),
        }

        def keeping(name: str) -> Callable[[], Any]:
            def run() -> None:
                kept.pop(name, None)
                kept[name] = calls[name]()

            return run

        return {name: keeping(name) for name in calls}

    def routing(self) -> np.ndarray:
        """The blocks that the whole call chooses, computed by the parts up to the selection."""
        if "select" not in self.kept:
            calls = self.parts()
            for name in ("compress", "cmp", "select"):
                calls[name]()
            self.kept.pop("cmp")
        return np.asarray(self.kept["select"])

    def is_equal(self) -> bool:
        """Whether every element of the result was written, and the last queries of the last heads equal float64 attention over the chosen
        blocks."""
        if poisoned(self.out):
            return False
        group = self.args.heads // self.args.kv_heads
        paper = self.args.mode == "paper"
        count = min(CHECKED_QUERIES, self.tokens) if paper else self.tokens - (self.tokens - 1) // self.tile * self.tile
        weights = {name: w[-group if name.startswith("gate") else -1 :] for name, w in self.weights.items()}
        chosen = self.routing()[:, -1:, -count:] if paper else self.routing()[:, -group:, -1:]
        exact = reference.nsa(
            self.q[:, -count:, -group:], self.k[:, :, -1:], self.v[:, :, -1:], block_indices=chosen,
            **self.sizes, **self.rules, **weights, **self.bits,
        )  # fmt: skip
        got = testing.to_float64(self.out[:, -count:, -group:], self.bits.get("dtype"))
        return np.allclose(got, exact, rtol=RTOL, atol=max(ATOL, 2.0**-7 * abs(exact).max()))


Longest = dict[tuple[str, int], tuple[int, float]]  # pass and threads -> the longest length of a dense run, its seconds


def measure(problem: Problem, threads: int, longest: Longest, passes: Sequence[str], report: Report, share: float) -> None:
    """Time everything at one length with one number of threads."""
    args = problem.args

    def expected(name: str) -> float:
        """Seconds of dense attention at this length, extrapolated from the longest length that was run; 0 before the first run."""
        tokens, seconds = longest.get((name, threads), (1, 0.0))
        return seconds * (problem.tokens / tokens) ** 2

    names = ["forward", "both"] if "backward" in passes else ["forward"]
    afforded = [name for name in names if 0 < args.dense_seconds >= expected(name)]
    calls: dict[str, Callable[[], Any]] = {f"nsa {name}": getattr(problem, name) for name in names}
    calls |= {f"dense {name}": getattr(problem, f"dense_{name}") for name in afforded}
    blitz_attn.set_num_threads(threads)
    peaks = {name: peak_during(calls[f"nsa {name}"]) for name in names}
    if args.parts:
        calls |= problem.parts()
    timed = {name: Contender(f"{problem.tokens} tokens, {name}", call) for name, call in calls.items()}
    timed["nsa forward"].before_last = lambda: poison(problem.out)
    for contender in in_turns(list(timed.values()), args, report.progress, share):
        if contender is timed["nsa forward"]:
            equal = problem.is_equal()
    blitz_attn.set_num_threads(None)
    seconds = {name: contender.median for name, contender in timed.items()}
    longest |= {(name, threads): (problem.tokens, seconds[f"dense {name}"]) for name in afforded}
    values: dict[str, Any] = {
        "N": problem.tokens,
        "mode": args.mode,
        "dtype": args.dtype,
        "H": args.heads,
        "H_kv": args.kv_heads,
        "D": args.head_dim,
        "threads": threads,
        "Outputs_equal": yes(equal),
        "Dense_by": "run" if afforded == names else "N^2" if expected("forward") else None,
    }
    for name, name_of_pass in zip(names, ("fwd", "f+b"), strict=False):
        own, baseline = seconds[f"nsa {name}"], expected(name)
        values[f"NSA_{name_of_pass}_[ms]"] = own * 1e3
        values[f"{name_of_pass.capitalize()}_peak_[MiB]"] = peaks[name]
        if baseline:
            values |= {f"Dense_{name_of_pass}_[ms]": baseline * 1e3, f"Speedup_{name_of_pass}": baseline / own}
    if args.parts:
        total = sum(seconds[name] for name in PARTS)
        values |= {name: seconds[name] / total for name in PARTS} | {"Parts": total / seconds["nsa forward"]}
    report.row(values, samples_s={name: contender.samples for name, contender in timed.items()})


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=None)
    result.set_defaults(threads=[blitz_attn.get_num_threads()])
    what = result.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help=f"{', '.join(map(str, QUICK_TOKENS))} tokens and two repeats")
    what.add_argument("--tokens", type=positive, nargs="+", help="lengths (1K, 2K .. 64K)")
    what.add_argument("--passes", nargs="+", choices=("forward", "backward"), default=["forward", "backward"], help="passes to time (both)")
    what.add_argument("--heads", "-H", type=positive, default=32, help="query heads (%(default)s)")
    what.add_argument("--kv-heads", type=positive, default=8, help="KV heads (%(default)s)")
    what.add_argument("--head-dim", "-D", type=positive, default=128, help="head dimension (%(default)s)")
    what.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16", help="dtype (%(default)s)")
    what.add_argument("--mode", choices=("paper", "mslk"), default="paper", help="which rules (%(default)s)")
    what.add_argument("--block", type=positive, default=64, help="tokens per compressed block, and per selected block (%(default)s)")
    what.add_argument("--stride", type=positive, help="paper mode: tokens from the start of a compressed block to the next (half a block)")
    what.add_argument("--selected", type=positive, default=16, help="blocks selected (%(default)s)")
    what.add_argument("--window", type=positive, default=512, help="keys of the window (%(default)s)")
    what.add_argument("--tile", type=positive, default=256, help="mslk mode: queries that share a selection (%(default)s)")
    what.add_argument("--weights", action="store_true", help="with compression matrices, and with gates from q instead of gates of a third")
    what.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="also time the parts by themselves (yes)")
    from_zero = checked(float, lambda value: value >= 0, "a number from 0")
    what.add_argument("--dense-seconds", type=from_zero, default=10.0, help="longest dense call to run; 0 for none (%(default)s)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads: expected a divisor of {args.heads} heads, got {args.kv_heads}")
    lengths = sorted(args.tokens or (QUICK_TOKENS if args.quick else TOKENS))
    args.repeats = args.repeats or (2 if args.quick else 3)
    sizes = {"BLOCK": args.block, "STRIDE": args.stride, "SELECTED": args.selected, "WINDOW": args.window, "TILE": args.tile}
    report.head(parameters(**sizes, WEIGHTS=args.weights, ISA=_core.isa_active(), REPEATS=args.repeats, SEED=args.seed), _core.cpu_model())
    longest: Longest = {}
    for tokens in lengths:
        needed, there = bytes_needed(tokens, args), 0.85 * memory_available()
        passes = [name for name in args.passes if needed[name] <= there]
        for name in set(args.passes) - set(passes):
            report.note(f"{tokens} tokens: {name} would need {needed[name] / 2**30:.1f} GiB")
        if passes:
            problem = Problem(tokens, args)
            for threads in args.threads:
                measure(problem, threads, longest, passes, report, tokens / sum(lengths) / len(args.threads))
            del problem
    report.foot()


if __name__ == "__main__":
    raise SystemExit(main())
