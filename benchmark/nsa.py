#!/usr/bin/env python3
"""Native sparse attention against dense causal attention, over the length: a table on stdout, progress on stderr.

    python benchmark/nsa.py | tee nsa.log | python benchmark/plot.py  # upstream's sizes, 1K .. 64K tokens
    python benchmark/nsa.py --quick                                   # 1K .. 8K
    python benchmark/nsa.py -H 8 --kv-heads 2 --tokens 262144 1048576 --passes forward
    python benchmark/nsa.py --mode mslk --weights --dtype float32

B = 1. Timed in turns: our own dense causal attention, native sparse attention, the same with the gradient (forward with context, then
backward), and the parts by themselves. Dense attention is measured as long as a call is expected to take no more than --dense-seconds;
beyond that its time is that of the longest measured length, grown with N^2, and `Dense_by` says so: `N^2` in place of `run`. Shares are
those of a pass's parts among each other; `Parts` is the sum of the forward parts over the whole call. Peaks are the process's largest
resident memory during a call, inputs included. README.md beside this file explains the columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import _bench
import blitz_attn
import check
from _bench import Column, Contender, Progress, Table, command, from_zero, in_turns, isa_level, natural, positive, writable
from blitz_attn import _core, reference, testing
from blitz_attn.nsa import (
    compress_kv,
    compress_kv_backward,
    compressed_attention,
    compressed_attention_backward,
    compute_gates,
    gate_and_combine,
    gating_backward,
    nsa,
    nsa_backward,
    score_and_select_blocks,
    selected_attention,
    selected_attention_backward,
    window_attention,
    window_attention_backward,
)
from operands import bits_options, memory_available
from result_files import Records, add_save, main_with_save

TOKENS = tuple(1 << n for n in range(10, 17))
QUICK_TOKENS = tuple(1 << n for n in range(10, 14))
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LONG_CALL = 5.0  # seconds; longer ones are timed once, without a turn to warm up
DRAWN_TOKENS = 4099  # tokens drawn at random; longer sequences repeat them, times a number of their own
CHECKED_QUERIES = 12
FORWARD_PARTS = ("compress", "cmp", "select", "slc", "win", "gate")
BACKWARD_PARTS = ("b_gate", "b_cmp", "b_slc", "b_win", "b_compress")

COLUMNS = (
    Column("N", 8),
    Column("mode", 5),
    Column("dtype", 8),
    Column("H", 3),
    Column("H_kv", 4),
    Column("D", 4),
    Column("threads", 7),
    Column("Outputs_equal", 13),
    Column("Dense_by", 8),
    Column("Dense_fwd_[ms]", 14, ".2f"),
    Column("NSA_fwd_[ms]", 12, ".2f"),
    Column("Speedup_fwd", 11, ".2f"),
    Column("Dense_f+b_[ms]", 14, ".2f"),
    Column("NSA_f+b_[ms]", 12, ".2f"),
    Column("Speedup_f+b", 11, ".2f"),
    Column("Fwd_peak_[MiB]", 14, ".0f"),
    Column("F+b_peak_[MiB]", 14, ".0f"),
    *(Column(name, 8, ".3f") for name in FORWARD_PARTS),
    Column("Parts", 6, ".2f"),
    *(Column(name, 10, ".3f") for name in BACKWARD_PARTS),
)


# ---- Memory -------------------------------------------------------------------------------------------------------


def status(name: str) -> float | None:
    """MiB of a line of this process's status, where the system has such a file."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name + ":"))
    except (OSError, StopIteration):
        return None


def peak_during(call: Callable[[], Any]) -> float | None:
    """MiB of resident memory at the call's highest point; None where the system cannot tell."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        call()
        return None
    call()
    return status("VmHWM")


# ---- A problem ----------------------------------------------------------------------------------------------------


def draw(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers, (1, N, heads, dim). A stretch is drawn; each repetition of it is shifted, so that no two are alike."""
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
        self.kept: dict[str, Any] = {}  # what the parts leave for each other
        self.dense_kept: Any = None

    @staticmethod
    def bytes_needed(tokens: int, args: argparse.Namespace) -> dict[str, int]:
        """A generous guess: inputs, results, and for the gradient what the context holds, the gradients and float32 sums."""
        item = ITEM_BYTES[args.dtype]
        wide, narrow = (tokens * heads * args.head_dim * item for heads in (args.heads, args.kv_heads))
        forward = 3 * wide + 2 * narrow + (4 * wide if args.parts else wide)
        return {"forward": forward, "backward": 9 * wide + 8 * narrow + 4 * tokens * (args.heads * 8 + args.kv_heads * 16)}

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

    def parts(self, backward: bool) -> dict[str, Callable[[], Any]]:
        """The parts in the order in which they feed each other; each keeps its result for the next."""
        q, k, v, kept, size, bits = self.q, self.k, self.v, self.kept, self.args.block, self.bits
        w_k, w_v, w_gate = (self.weights.get(name) for name in ("w_k_compress", "w_v_compress", "gate_proj_weight"))
        seen = {"stride": self.stride, "mode": self.args.mode, **bits}
        tile = {"q_tile_size": self.tile, **bits}

        def keep(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> None:
                kept.pop(name, None)
                kept[name] = call()

            return run

        def chosen() -> Any:
            lse = kept["cmp"][1] if self.args.mode == "paper" else None
            return score_and_select_blocks(q, kept["compress"][0], self.args.selected, size, lse=lse, **self.rules, **bits)

        def gated() -> Any:
            gates = compute_gates(q, w_gate, **bits)
            kept["gates"] = gates
            return gate_and_combine(*(kept[name][0] for name in ("cmp", "slc", "win")), gates, **bits)

        def branch(name: str, back: str, call: Callable[..., Any], arrays: Sequence[Any], last: Sequence[Any], **more: Any) -> Any:
            n = ("cmp", "slc", "win").index(name)
            return keep(back, lambda: call(kept["b_gate"][n], *(x() for x in arrays), *kept[name], *(x() for x in last), **more))

        calls = {
            "compress": keep("compress", lambda: compress_kv(k, v, size, w_k, w_v, stride=self.stride, **bits)),
            "cmp": keep("cmp", lambda: compressed_attention(q, *kept["compress"], size, return_lse=True, **seen)),
            "select": keep("select", chosen),
            "slc": keep("slc", lambda: selected_attention(q, k, v, kept["select"], size, return_lse=True, **tile)),
            "win": keep("win", lambda: window_attention(q, k, v, self.args.window, return_lse=True, **bits)),
            "gate": keep("gate", gated),
        }
        if backward:
            whole = [lambda: q, lambda: k, lambda: v]
            compressed = [lambda: q, lambda: kept["compress"][0], lambda: kept["compress"][1]]
            three = [lambda name=name: kept[name][0] for name in ("cmp", "slc", "win")]
            calls["b_gate"] = keep("b_gate", lambda: gating_backward(q, self.dout, *(x() for x in three), kept["gates"], w_gate, **bits))
            calls["b_cmp"] = branch("cmp", "b_cmp", compressed_attention_backward, compressed, [lambda: size], **seen)
            calls["b_slc"] = branch("slc", "b_slc", selected_attention_backward, whole, [lambda: kept["select"], lambda: size], **tile)
            calls["b_win"] = branch("win", "b_win", window_attention_backward, whole, [lambda: self.args.window], **bits)
            calls["b_compress"] = keep(
                "b_compress", lambda: compress_kv_backward(*kept["b_cmp"][1:], k, v, size, w_k, w_v, stride=self.stride, **bits)
            )
        return calls

    def is_equal(self) -> bool:
        """Whether every element of the result was written, and some queries' results equal float64 attention over the blocks chosen."""
        if check.poisoned(self.out):
            return False
        args, bits = self.args, self.bits.get("dtype")
        rng = np.random.default_rng(args.seed)
        queries = sorted({0, self.tokens - 1, *rng.integers(0, self.tokens, CHECKED_QUERIES).tolist()})
        group = args.heads // args.kv_heads
        scale = args.head_dim**-0.5
        routing = self.routing()
        for head in {0, args.heads - 1}:
            kv = head // group
            keys, values = (self.compressed(x, kv, name) for x, name in ((self.k, "w_k_compress"), (self.v, "w_v_compress")))
            row = routing[0, kv if args.mode == "paper" else head]
            for t in queries:
                q = testing.to_float64(self.q[0, t, head], bits)
                begin = np.arange(len(keys)) * self.stride
                visible = begin + (args.block - 1 if args.mode == "paper" else 0) <= t
                listed = row[t // self.tile]
                tokens = (listed[listed >= 0][:, None] * args.block + np.arange(args.block)).reshape(-1)
                gathered = [tokens[tokens <= t], np.arange(max(0, t - args.window + 1), t + 1)]
                branches = [softmax_sum(q, keys[visible], values[visible], scale)]
                branches += [softmax_sum(q, *(testing.to_float64(x[0, at, kv], bits) for x in (self.k, self.v)), scale) for at in gathered]
                weight = self.weights.get("gate_proj_weight")
                gates = reference.compute_gates(self.q[:, t : t + 1], weight, dtype=bits)[0, 0, head]
                expected = sum(g * x for g, x in zip(gates, branches, strict=True))
                got = testing.to_float64(self.out[0, t, head], bits)
                if not np.allclose(got, expected, rtol=check.RTOL, atol=max(check.ATOL, 2.0**-7 * abs(expected).max())):
                    return False
        return True

    def routing(self) -> np.ndarray:
        """The blocks that the call chooses, from its parts."""
        if "select" not in self.kept:
            calls = self.parts(False)
            for name in ("compress", "cmp", "select"):
                calls[name]()
            self.kept.pop("cmp")
        return np.asarray(self.kept["select"])

    def compressed(self, x: np.ndarray, kv: int, weight: str) -> np.ndarray:
        """float64 (blocks, D) block means of one head, a stretch at a time."""
        size, step, w = self.args.block, 4096, self.weights.get(weight)
        count = 0 if self.tokens < size else (self.tokens - size) // self.stride + 1
        means = []
        for first in range(0, count, step):
            last = min(first + step, count)
            part = x[:, first * self.stride : (last - 1) * self.stride + size, kv : kv + 1]
            own = None if w is None else w[kv : kv + 1]
            means.append(reference.compress_kv(part, part, size, own, None, stride=self.stride, dtype=self.bits.get("dtype"))[0][0, :, 0])
        return np.concatenate([np.zeros((0, x.shape[-1])), *means])


def softmax_sum(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Attention of one query; 0 where there is nothing to see."""
    if len(k) == 0:
        return np.zeros(v.shape[1])
    s = scale * (k @ q)
    p = np.exp(s - s.max())
    return p @ v / p.sum()


# ---- Timing -------------------------------------------------------------------------------------------------------


class Dense:
    """Dense times measured so far with one number of threads, and their growth beyond."""

    def __init__(self) -> None:
        self.longest: dict[str, tuple[int, float]] = {}

    def expected(self, what: str, tokens: int) -> float:
        """Seconds at this length; 0 before the first measurement."""
        measured, seconds = self.longest.get(what, (tokens, 0.0))
        return seconds * (tokens / measured) ** 2


def measured(problem: Problem, threads: int, dense: Dense, expected: float, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Time everything at one length with one number of threads."""
    blitz_attn.set_num_threads(threads)
    backward = "backward" in args.now
    names = ["forward", *(["both"] if backward else [])]
    afforded = [name for name in names if args.dense_seconds > 0 and dense.expected(name, problem.tokens) <= args.dense_seconds]
    calls: dict[str, Callable[[], Any]] = {"nsa " + name: getattr(problem, name) for name in names}
    calls |= {"dense " + name: getattr(problem, "dense_" + name) for name in afforded}
    peaks = {name: peak_during(calls["nsa " + name]) for name in names}
    long = expected > LONG_CALL
    repeats, warmup = (1, 0) if long else (args.repeats, args.warmup)
    if args.parts:
        parts = problem.parts(backward)
        if not warmup:  # the first turn needs what the others left
            repeats = 1
        calls |= parts
    share = problem.tokens / args.tokens[-1] / (len(calls) * (repeats + warmup) * len(args.threads))
    contenders = [
        Contender(
            f"{problem.tokens} tokens, {name}", call, share,
            before_last=(lambda: check.poison(problem.out)) if name == "nsa forward" else None,
        )
        for name, call in calls.items()
    ]  # fmt: skip
    seconds: dict[str, float] = {}
    equal = False
    order = list(calls)
    for index, timing in in_turns(contenders, repeats, warmup, progress):
        seconds[order[index]] = timing.median
        if order[index] == "nsa forward":
            equal = problem.is_equal()
    blitz_attn.set_num_threads(None)
    for name in afforded:
        dense.longest[name] = (problem.tokens, seconds["dense " + name])
    values: dict[str, Any] = {
        "N": problem.tokens,
        "mode": args.mode,
        "dtype": args.dtype,
        "H": args.heads,
        "H_kv": args.kv_heads,
        "D": args.head_dim,
        "threads": threads,
        "Outputs_equal": "yes" if equal else "no",
        "Dense_by": "run" if afforded == names else "N^2" if dense.longest else None,
    }
    for name, tag in (("forward", "fwd"), ("both", "f+b")):
        own = seconds.get("nsa " + name)
        baseline = dense.expected(name, problem.tokens) or None
        values[f"Dense_{tag}_[ms]"] = baseline and baseline * 1e3 if own else None
        values[f"NSA_{tag}_[ms]"] = own and own * 1e3
        values[f"Speedup_{tag}"] = baseline / own if baseline and own else None
        values[f"{tag.capitalize()}_peak_[MiB]"] = peaks.get(name)
    for group in (FORWARD_PARTS, BACKWARD_PARTS):
        total = sum(seconds.get(name, 0.0) for name in group)
        values |= {name: seconds[name] / total if name in seconds else None for name in group}
    values["Parts"] = sum(seconds[name] for name in FORWARD_PARTS) / seconds["nsa forward"] if args.parts else None
    return values


def crossover(rows: list[dict[str, Any]], column: str) -> str:
    """From which measured length on native sparse attention is the faster one."""
    known = [(row["N"], row[column]) for row in rows if row[column] is not None]
    slower = [tokens for tokens, speedup in known if speedup < 1]
    if not known:
        return "not measured"
    if not slower:
        return f"below {known[0][0]}"
    faster = [tokens for tokens, _ in known if tokens > max(slower)]
    return f"between {max(slower)} and {min(faster)}" if faster else f"above {max(slower)}"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help=f"{', '.join(map(str, QUICK_TOKENS))} tokens and two repeats")
    what.add_argument("--tokens", type=positive, nargs="+", help="lengths (1K, 2K .. 64K)")
    what.add_argument("--passes", nargs="+", choices=("forward", "backward"), default=["forward", "backward"], help="what to time (both)")
    what.add_argument("--backward-tokens", type=positive, default=1 << 18, help="longest length with a gradient (%(default)s)")
    what.add_argument("--heads", "-H", type=positive, default=32, help="query heads (%(default)s)")
    what.add_argument("--kv-heads", type=positive, default=8, help="KV heads (%(default)s)")
    what.add_argument("--head-dim", "-D", type=positive, default=128, help="head dimension (%(default)s)")
    what.add_argument("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="dtype (%(default)s)")
    what.add_argument("--mode", choices=("paper", "mslk"), default="paper", help="which rules (%(default)s)")
    what.add_argument("--block", type=positive, default=64, help="tokens a compressed block, and a selected one (%(default)s)")
    what.add_argument("--stride", type=positive, help="paper mode: tokens from a compressed block to the next (half a block)")
    what.add_argument("--selected", type=positive, default=16, help="blocks selected (%(default)s)")
    what.add_argument("--window", type=positive, default=512, help="keys of the window (%(default)s)")
    what.add_argument("--tile", type=positive, default=256, help="mslk mode: queries that share a selection (%(default)s)")
    what.add_argument("--weights", action="store_true", help="with compression matrices and gates from q; without, gates of a third")
    what.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="also time the parts by themselves (yes)")
    what.add_argument("--dense-seconds", type=from_zero, default=10.0, help="longest dense call to measure; 0 for none (%(default)s)")
    what.add_argument("--seed", type=natural, default=1234, help="of the operands (%(default)s)")
    timing = result.add_argument_group("timing")
    timing.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (what the library uses)")
    timing.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
    timing.add_argument("--repeats", type=positive, help="timed turns, of which the median counts (3)")
    timing.add_argument("--warmup", type=positive, default=1, help="turns before them (%(default)s)")
    outputs = result.add_argument_group("outputs")
    outputs.add_argument("--csv", type=writable, metavar="FILE", help="also write the rows as CSV")
    outputs.add_argument("--json", type=writable, metavar="FILE", help="the same as JSON")
    return add_save(result)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser()
    args = options.parse_args(argv)
    if args.heads % args.kv_heads:
        options.error(f"--kv-heads: expected a divisor of {args.heads} heads, got {args.kv_heads}")
    args.tokens = sorted(args.tokens or (QUICK_TOKENS if args.quick else TOKENS))
    args.repeats = args.repeats or (2 if args.quick else 3)
    args.threads = args.threads or [blitz_attn.get_num_threads()]
    return args


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.isa:
        blitz_attn.isa(args.isa)
    progress = Progress(sum(args.tokens) / args.tokens[-1])
    table = Table(COLUMNS, sys.stdout, progress)
    records = Records(args.csv, args.json, {"cpu": _core.cpu_model(), "isa": _core.isa_active(), "options": vars(args)})
    sizes = {"BLOCK": args.block, "STRIDE": args.stride, "SELECTED": args.selected, "WINDOW": args.window, "TILE": args.tile}
    shared = _bench.parameters(**sizes, WEIGHTS=args.weights, ISA=_core.isa_active(), REPEATS=args.repeats, SEED=args.seed)
    table.head(shared, _core.cpu_model())
    dense: dict[int, Dense] = {threads: Dense() for threads in args.threads}
    rows: list[dict[str, Any]] = []
    pace = 0.0  # seconds a token of the length before, all calls of native sparse attention
    try:
        for tokens in args.tokens:
            needed, there = Problem.bytes_needed(tokens, args), 0.85 * memory_available()
            args.now = [name for name in args.passes if needed[name] <= there and (name == "forward" or tokens <= args.backward_tokens)]
            if set(args.passes) - set(args.now) and tokens <= args.backward_tokens:
                short = ", ".join(f"{name} would need {needed[name] / 2**30:.1f} GiB" for name in args.passes if name not in args.now)
                progress.note(f"{tokens} tokens: {short}")
            if needed["forward"] > there:
                progress.add(tokens / args.tokens[-1])
                continue
            problem = Problem(tokens, args)
            for threads in args.threads:
                start = time.perf_counter()
                values = measured(problem, threads, dense[threads], 1.5 * pace * tokens, args, progress)
                pace = (values["NSA_f+b_[ms]"] or values["NSA_fwd_[ms]"]) / 1e3 / tokens
                table.row(values)
                records.add(values)
                rows.append(values)
                progress.add(0.0, f"{tokens} tokens took {time.perf_counter() - start:.0f} s")
            del problem
        table.foot()
        for threads in args.threads:
            own = [row for row in rows if row["threads"] == threads]
            for column, what in (("Speedup_fwd", "forward"), ("Speedup_f+b", "forward and backward")):
                table.line(f"# {threads} threads, {what}: faster than dense from a length {crossover(own, column)}")
    finally:
        records.close()
    wrong = sum(row["Outputs_equal"] != "yes" for row in rows)
    if wrong:
        progress.note(f"nsa.py: {wrong} rows with wrong outputs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main_with_save(main))
