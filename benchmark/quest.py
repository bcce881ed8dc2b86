#!/usr/bin/env python3
"""Quest on a paged cache against dense decode, over the context length: a table on stdout, progress on stderr.

    python benchmark/quest.py | tee quest.log | python benchmark/plot.py  # 4K .. 1M tokens, as memory allows
    python benchmark/quest.py --quick                                     # 4K, 32K, 128K
    python benchmark/quest.py --contexts 131072 --blocks 16 32 64 --dtype float16

One request. Timed: dense paged decode, the summaries of all pages (Build), the choice of blocks (Select), attention over them (Attend)
and both in a row (Both). A step goes through several layers, each with its own queries, tables and summaries and as far as memory
allows its own pages, so that nothing is found in a cache that a real model would not find there; times are for one layer. The byte
model says what must be read: dense, all of K and V; sparse, the summaries and the K and V of the chosen blocks. README.md beside
this file explains the columns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import _bench
import blitz_attn
import check
import roofline
from _bench import Column, Contender, Progress, Table, command, in_turns, isa_level, natural, positive, writable
from blitz_attn import _core, testing
from operands import ITEM_BYTES, LAYOUTS, Decode, bits_options, draw_cache, draw_tables, memory_available, token_bytes
from result_files import Records, add_save, main_with_save

CONTEXTS = tuple(1 << n for n in range(12, 21))
QUICK_CONTEXTS = (4096, 32768, 131072)
MOST_LAYERS = 32
CACHES_OVER = 4  # what a step reads is this many times as large as the largest cache, where that takes no more than MOST_LAYERS
PROBE_SECONDS = 0.05
SCORE_TOLERANCE = 1e-4  # of float32 sums against float64 ones, relative to the largest score

COLUMNS = (
    Column("context", 8),
    Column("blocks", 6),
    Column("page", 4),
    Column("dtype", 8),
    Column("H", 3),
    Column("H_kv", 4),
    Column("D", 4),
    Column("threads", 7),
    Column("layers", 6),
    Column("Outputs_equal", 13),
    Column("Dense_[usec]", 12, ".1f"),
    Column("Build_[usec]", 12, ".1f"),
    Column("Select_[usec]", 13, ".1f"),
    Column("Attend_[usec]", 13, ".1f"),
    Column("Both_[usec]", 11, ".1f"),
    Column("Model_[usec]", 12, ".1f"),
    Column("R_[GB/s]", 8, ".1f"),
    Column("R_select_[GB/s]", 15, ".1f"),
    Column("Dense_[GB/s]", 12, ".1f"),
    Column("Build_[GB/s]", 12, ".1f"),
    Column("Select_[GB/s]", 13, ".1f"),
    Column("Select_share", 12, ".3f"),
    Column("Speedup", 8, ".2f"),
    Column("Model_speedup", 13, ".2f"),
)


class Layers:
    """A request of `context` tokens in several layers, whose pages come from one pool."""

    def __init__(self, context: int, blocks: int, args: argparse.Namespace):
        self.context, self.page = context, args.page
        self.count = -(-context // args.page)  # pages of a layer
        self.blocks = min(blocks, self.count)
        largest = CACHES_OVER * max(roofline.cache_sizes().values())
        item = ITEM_BYTES[args.dtype]
        self.kv_bytes = context * token_bytes(args.dtype, args.kv_heads, args.head_dim)
        self.k_bytes = self.kv_bytes // 2
        self.summary_bytes = 2 * self.count * args.kv_heads * args.head_dim * item
        self.picked_bytes = min(self.blocks * args.page, context) * token_bytes(args.dtype, args.kv_heads, args.head_dim)
        self.layers = min(MOST_LAYERS, max(1, -(-largest // self.summary_bytes)))
        self.dense_layers = min(self.layers, max(1, -(-largest // self.kv_bytes)))
        self.build_layers = min(self.layers, max(1, -(-largest // self.k_bytes)))
        self.pool_pages = max(self.count, -(-largest * self.count // self.kv_bytes))
        self.args = args

    @property
    def bytes_needed(self) -> int:
        return self.pool_pages * self.kv_bytes // self.count + 2 * self.layers * self.summary_bytes

    def draw(self) -> None:
        args = self.args
        rng = np.random.default_rng([args.seed, 1])
        cache = draw_cache(args.dtype, self.pool_pages, self.page, args.kv_heads, args.head_dim, args.seed, args.layout)
        tables = draw_tables((self.context,) * self.layers, self.page, self.pool_pages, rng)
        lengths = np.array([self.context], np.int64)
        shape = (1, args.heads, args.head_dim)
        queries = [testing.round_to(rng.standard_normal(shape, dtype=np.float32), args.dtype) for _ in range(self.layers)]
        out = np.zeros_like(queries[0])  # one for all layers: who fills its bytes once must see the last layer's result
        self.steps = [Decode(q, cache, table[None], lengths, out) for q, table in zip(queries, tables, strict=True)]
        self.plans = [step.plan() for step in self.steps]
        rows = -(-self.count // self.page)  # summary pages of a layer; a summary page has as many rows as a page has tokens
        summaries = np.zeros((2, self.layers * rows, self.page, args.kv_heads, args.head_dim), cache.k.dtype)
        self.high, self.low = summaries
        self.summaries = summaries.view(np.uint8).reshape(-1)
        self.summary_tables = [np.arange(n * rows, (n + 1) * rows, dtype=np.int32)[None] for n in range(self.layers)]
        self.selected = [np.zeros((1, args.kv_heads, self.blocks), np.int32) for _ in range(self.layers)]
        self.bits = bits_options(cache.k)

    def dense(self) -> None:
        for step, plan in zip(self.steps[: self.dense_layers], self.plans, strict=False):
            plan.attention(step.q, step.cache.k, step.cache.v, out=step.out)

    def build(self, layers: int | None = None) -> None:
        for step, table in zip(self.steps[: layers or self.build_layers], self.summary_tables, strict=False):
            blitz_attn.quest_prefill_metadata(step.cache.k, step.tables, step.lengths, table, self.high, self.low, **self.bits)

    def select_one(self, layer: int) -> None:
        step = self.steps[layer]
        self.selected[layer] = blitz_attn.quest_block_select_paged(
            step.q, self.high, self.low, self.summary_tables[layer], step.lengths, self.blocks, **self.bits
        )

    def attend_one(self, layer: int) -> None:
        step = self.steps[layer]
        self.plans[layer].select_attention(step.q, step.cache.k, step.cache.v, self.selected[layer], out=step.out)

    def select(self) -> None:
        for layer in range(self.layers):
            self.select_one(layer)

    def attend(self) -> None:
        for layer in range(self.layers):
            self.attend_one(layer)

    def both(self) -> None:
        for layer in range(self.layers):
            self.select_one(layer)
            self.attend_one(layer)

    def scores(self, layer: int) -> np.ndarray:
        """(H_kv, blocks) float64: upper bounds of the products of a group's mean query with the keys of each block."""
        bits = self.bits.get("dtype")
        rows = self.summary_tables[layer][0]
        query = testing.to_float64(self.steps[layer].q[0], bits).reshape(self.args.kv_heads, 1, -1, self.args.head_dim).mean(axis=2)
        flat = (-1, self.args.kv_heads, self.args.head_dim)
        bounds = (query * testing.to_float64(x[rows], bits).reshape(flat)[: self.count].swapaxes(0, 1) for x in (self.high, self.low))
        return np.maximum(*bounds).sum(axis=-1)

    def is_equal(self) -> bool:
        """Whether the last layer's blocks are the best by float64 scores, and its output float64 attention over them."""
        step, picked = self.steps[-1], self.selected[-1]
        scores = self.scores(self.layers - 1)
        for row, listed in zip(scores, picked[0], strict=True):
            inside = np.zeros(self.count, bool)
            inside[listed] = True
            if inside.sum() != self.blocks:
                return False
            if not inside.all() and row[inside].min() < row[~inside].max() - SCORE_TOLERANCE * abs(row).max():
                return False
        if check.poisoned(step.out):
            return False
        for head in {0, self.args.kv_heads - 1}:
            chosen = np.sort(picked[0, head])
            tokens = np.minimum((chosen + 1) * self.page, self.context) - chosen * self.page  # only the newest page can be cut
            if not step.head_is_equal(step.out, 0, head, step.tables[0, chosen], int(tokens.sum())):
                return False
        return True


def measured(layers: Layers, args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Time everything with each number of threads; one row of values each."""
    isa = _core.isa_active()
    layers.build(layers.layers)
    reads: dict[tuple[str, int], list[float]] = {}

    def probe(what: str, threads: int) -> None:
        """Reads K and V over and over, or the summaries once, as a round of selections does, with as much other memory read before."""
        memory, seconds = (layers.steps[0].cache.memory[: 1 << 28], PROBE_SECONDS) if what == "limit" else (layers.summaries, None)
        reads.setdefault((what, threads), []).append(float(_core.probe_read(isa, memory, seconds, threads)))

    def with_threads(threads: int, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            blitz_attn.set_num_threads(threads)
            call()

        return run

    calls = {"dense": layers.dense, "build": layers.build, "select": layers.select, "attend": layers.attend, "both": layers.both}
    per_layer = {"dense": layers.dense_layers, "build": layers.build_layers}
    # summaries are read far from where they are selected by, with other memory read in between
    keys = [(name, threads) for threads in args.threads for name in ("limit", "dense", "once", "build", "select", "attend", "both")]
    share = 1 / (len(keys) * (args.repeats + args.warmup))
    contenders = [
        Contender(
            f"context {layers.context}",
            with_threads(threads, calls[name]) if name in calls else (lambda what=name, threads=threads: probe(what, threads)),
            share,
            before_last=(lambda: check.poison(layers.steps[0].out)) if name == "both" else None,
        )
        for name, threads in keys
    ]
    times: dict[tuple[str, int], float] = {}
    equal: dict[int, bool] = {}
    for index, timing in in_turns(contenders, args.repeats, args.warmup, progress):
        name, threads = keys[index]
        times[name, threads] = timing.median / per_layer.get(name, layers.layers)
        if name == "both":
            equal[threads] = layers.is_equal()
    blitz_attn.set_num_threads(None)
    rows = []
    for threads in args.threads:
        read, read_select = (statistics.median(reads[what, threads][args.warmup :]) for what in ("limit", "once"))
        seconds = {name: times[name, threads] for name in calls}
        sparse_bytes = layers.summary_bytes + layers.picked_bytes
        rows.append(
            {
                "context": layers.context,
                "blocks": layers.blocks,
                "page": args.page,
                "dtype": args.dtype,
                "H": args.heads,
                "H_kv": args.kv_heads,
                "D": args.head_dim,
                "threads": threads,
                "layers": layers.layers,
                "Outputs_equal": "yes" if equal[threads] else "no",
                **{f"{name.capitalize()}_[usec]": value * 1e6 for name, value in seconds.items()},
                "Model_[usec]": sparse_bytes / read / 1e3,
                "R_[GB/s]": read,
                "R_select_[GB/s]": read_select,
                "Dense_[GB/s]": layers.kv_bytes / seconds["dense"] / 1e9,
                "Build_[GB/s]": layers.k_bytes / seconds["build"] / 1e9,
                "Select_[GB/s]": layers.summary_bytes / seconds["select"] / 1e9,
                "Select_share": layers.summary_bytes / seconds["select"] / 1e9 / read_select,
                "Speedup": seconds["dense"] / seconds["both"],
                "Model_speedup": layers.kv_bytes / sparse_bytes,
            }
        )
    return rows


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help=f"contexts {', '.join(map(str, QUICK_CONTEXTS))} and two repeats")
    result.add_argument("--contexts", type=positive, nargs="+", help="tokens of the request (4K, 8K .. 1M)")
    result.add_argument("--blocks", type=positive, nargs="+", default=[32], help="blocks that a KV head attends to (%(default)s)")
    result.add_argument("--page", type=positive, default=128, help="tokens a page, and rows a summary page (%(default)s)")
    result.add_argument(
        "--layout", choices=LAYOUTS, default="NHD", help="in a page: a token's heads together, or a head's tokens (%(default)s)"
    )
    result.add_argument("--heads", "-H", type=positive, default=32, help="query heads (%(default)s)")
    result.add_argument("--kv-heads", type=positive, default=8, help="KV heads (%(default)s)")
    result.add_argument("--head-dim", "-D", type=positive, default=128, help="head dimension (%(default)s)")
    result.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16", help="dtype (%(default)s)")
    result.add_argument("--seed", type=natural, default=1234, help="of the operands (%(default)s)")
    result.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (1, and what the library uses)")
    result.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
    result.add_argument("--repeats", type=positive, help="timed turns, of which the median counts (5)")
    result.add_argument("--warmup", type=positive, default=1, help="turns before them (%(default)s)")
    result.add_argument("--csv", type=writable, metavar="FILE", help="also write the rows as CSV")
    result.add_argument("--json", type=writable, metavar="FILE", help="the same as JSON")
    return add_save(result)


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    if args.heads % args.kv_heads:
        options.error(f"--kv-heads: expected a divisor of {args.heads} heads, got {args.kv_heads}")
    if args.isa:
        blitz_attn.isa(args.isa)
    args.contexts = args.contexts or (QUICK_CONTEXTS if args.quick else CONTEXTS)
    args.repeats = args.repeats or (2 if args.quick else 5)
    args.threads = args.threads or sorted({1, blitz_attn.get_num_threads()})
    progress = Progress(len(args.contexts) * len(args.blocks))
    table = Table(COLUMNS, sys.stdout, progress)
    records = Records(args.csv, args.json, {"cpu": _core.cpu_model(), "isa": _core.isa_active(), "options": vars(args)})
    shown = _bench.parameters(THREADS=args.threads, ISA=_core.isa_active(), LAYOUT=args.layout, REPEATS=args.repeats, SEED=args.seed)
    table.head(shown, _core.cpu_model())
    wrong = 0
    try:
        for context in args.contexts:
            for blocks in args.blocks:
                layers = Layers(context, blocks, args)
                if layers.bytes_needed > 0.7 * memory_available():
                    progress.note(f"context {context}: left out, it needs {layers.bytes_needed / 2**30:.1f} GiB")
                    progress.add(1.0)
                    continue
                layers.draw()
                for values in measured(layers, args, progress):
                    table.row(values)
                    records.add(values)
                    wrong += values["Outputs_equal"] != "yes"
        table.foot()
    finally:
        records.close()
    if wrong:
        progress.note(f"quest.py: {wrong} rows with wrong blocks or outputs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main_with_save(main))
