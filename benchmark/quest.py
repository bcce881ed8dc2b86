#!/usr/bin/env python3
"""Quest on a paged cache against dense decode, by context length: a table on stdout, progress on stderr.

    python benchmark/quest.py | tee quest.log | python benchmark/plot.py  # 4K .. 1M tokens, as memory allows
    python benchmark/quest.py --quick                                     # 4K, 32K, 128K
    python benchmark/quest.py --contexts 131072 --blocks 16 32 64 --dtype float16

One request. These are timed: dense paged decode, making the summaries of all pages (Build), the choice of blocks (Select), attention over
the chosen blocks (Attend), and Select and Attend in a row (Both). A step goes through several layers, so that it finds in a cache only what
it would also find there in a real model. Each layer has its own queries, tables and summaries. Layers share pages only where the pool, with
four times the bytes of the largest cache, has too few. Times are for one layer. The byte model counts the bytes that must be read: for
dense decode, all of K and V; for Both, the summaries and the K and V of the chosen blocks. README.md in this folder explains the columns.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
import machine
from _bench import Contender, Report, columns, command, in_turns, parameters, parser_of, positive, yes
from blitz_attn import _core, testing
from operations import ITEM_BYTES, Decode, bits_options, draw_cache, draw_tables, memory_available, poison, poisoned, token_bytes

CONTEXTS = tuple(1 << n for n in range(12, 21))
QUICK_CONTEXTS = (4096, 32768, 131072)
MOST_LAYERS = 32
CACHES_OVER = 4  # a step's summaries have this many times the size of the largest cache, unless that takes more layers than MOST_LAYERS
PROBE_SECONDS = 0.05
SCORE_TOLERANCE = 1e-4  # of float32 scores against float64 scores, relative to the largest score

COLUMNS = columns(
    "context:8 blocks:6 page:4 dtype:8 H:3 H_kv:4 D:4 threads:7 layers:6 Outputs_equal:13 Dense_[usec]:12.1f "
    "Build_[usec]:12.1f Select_[usec]:13.1f Attend_[usec]:13.1f Both_[usec]:11.1f Model_[usec]:12.1f R_[GB/s]:8.1f "
    "R_select_[GB/s]:15.1f Dense_[GB/s]:12.1f Build_[GB/s]:12.1f Select_[GB/s]:13.1f Select_share:12.3f Speedup:8.2f "
    "Model_speedup:13.2f"
)


class Layers:
    """A request of `context` tokens in several layers, whose pages come from one pool."""

    def __init__(self, context: int, blocks: int, args: argparse.Namespace):
        self.context, self.page = context, args.page
        self.count = -(-context // args.page)  # pages per layer
        self.blocks = min(blocks, self.count)
        largest = CACHES_OVER * max(machine.cache_sizes().values())
        item = ITEM_BYTES[args.dtype]
        self.kv_bytes = context * token_bytes(args.dtype, args.kv_heads, args.head_dim)
        self.k_bytes = self.kv_bytes // 2
        self.summary_bytes = 2 * self.count * args.kv_heads * args.head_dim * item
        self.picked_bytes = min(self.blocks * args.page, context) * token_bytes(args.dtype, args.kv_heads, args.head_dim)
        self.layers = min(MOST_LAYERS, max(1, -(-largest // self.summary_bytes)))
        self.few = min(self.layers, max(1, -(-2 * largest // self.kv_bytes)))  # so many layers that reading all of K exceeds the caches
        self.pool_pages = max(self.count, -(-largest * self.count // self.kv_bytes))
        self.args = args

    @property
    def bytes_needed(self) -> int:
        return self.pool_pages * self.kv_bytes // self.count + 2 * self.layers * self.summary_bytes

    def draw(self) -> None:
        args = self.args
        rng = np.random.default_rng([args.seed, 1])
        cache = draw_cache(args.dtype, self.pool_pages, self.page, args.kv_heads, args.head_dim, args.seed)
        tables = draw_tables((self.context,) * self.layers, self.page, self.pool_pages, rng)
        lengths = np.array([self.context], np.int64)
        shape = (1, args.heads, args.head_dim)
        queries = [testing.round_to(rng.standard_normal(shape, dtype=np.float32), args.dtype) for _ in range(self.layers)]
        out = np.zeros_like(queries[0])  # shared by all layers, so that a check sees the last layer's result
        self.steps = [Decode(q, cache, table[None], lengths, out) for q, table in zip(queries, tables, strict=True)]
        self.plans = [step.plan() for step in self.steps]
        rows = -(-self.count // self.page)  # summary pages per layer; a summary page has as many rows as a page has tokens
        summaries = np.zeros((2, self.layers * rows, self.page, args.kv_heads, args.head_dim), cache.k.dtype)
        self.high, self.low = summaries
        self.summaries = summaries.view(np.uint8).reshape(-1)
        self.summary_tables = [np.arange(n * rows, (n + 1) * rows, dtype=np.int32)[None] for n in range(self.layers)]
        self.selected = [np.zeros((1, args.kv_heads, self.blocks), np.int32) for _ in range(self.layers)]
        self.bits = bits_options(cache.k)

    def each(self, layers: int, *parts: Callable[[int], None]) -> Callable[[], None]:
        """A call that goes through the layers, and runs all parts for each layer."""

        def run() -> None:
            for layer in range(layers):
                for part in parts:
                    part(layer)

        return run

    def dense(self, layer: int) -> None:
        step = self.steps[layer]
        self.plans[layer].attention(step.q, step.cache.k, step.cache.v, out=step.out)

    def build(self, layer: int) -> None:
        step, table = self.steps[layer], self.summary_tables[layer]
        blitz_attn.quest_prefill_metadata(step.cache.k, step.tables, step.lengths, table, self.high, self.low, **self.bits)

    def select(self, layer: int) -> None:
        step, table = self.steps[layer], self.summary_tables[layer]
        picked = blitz_attn.quest_block_select_paged(step.q, self.high, self.low, table, step.lengths, self.blocks, **self.bits)
        self.selected[layer] = picked

    def attend(self, layer: int) -> None:
        step = self.steps[layer]
        self.plans[layer].select_attention(step.q, step.cache.k, step.cache.v, self.selected[layer], out=step.out)

    def head_is_equal(self, head: int) -> bool:
        """Whether a KV head's blocks in the last layer are the best by float64 scores, and its output equals float64 attention over them.

        The score of a block is an upper bound of the products of the group's mean query with the block's keys.
        """
        step, listed, bits = self.steps[-1], np.sort(self.selected[-1][0, head]), self.bits.get("dtype")
        group = self.args.heads // self.args.kv_heads
        query = testing.to_float64(step.q[0, head * group : (head + 1) * group], bits).mean(axis=0)
        rows = (x[self.summary_tables[-1][0], :, head].reshape(-1, query.size)[: self.count] for x in (self.high, self.low))
        scores = np.maximum(*(query * testing.to_float64(x, bits) for x in rows)).sum(axis=-1)
        worst, best_left = scores[listed].min(), np.delete(scores, listed).max(initial=-np.inf)
        tokens = np.minimum((listed + 1) * self.page, self.context) - listed * self.page  # only the newest page can be partly filled
        return (
            len(set(listed.tolist())) == self.blocks
            and worst >= best_left - SCORE_TOLERANCE * abs(scores).max()
            and step.head_is_equal(step.out, 0, head, step.tables[0, listed], int(tokens.sum()))
        )

    def is_equal(self) -> bool:
        return not poisoned(self.steps[-1].out) and all(self.head_is_equal(head) for head in range(self.args.kv_heads))


def measure(layers: Layers, args: argparse.Namespace, report: Report, share: float) -> None:
    """Time everything, and print a row for each number of threads."""
    isa = _core.isa_active()
    count, few = layers.layers, layers.few
    layers.each(count, layers.build)()
    some = layers.steps[0].cache.memory[: 1 << 28]
    for threads in args.threads:
        blitz_attn.set_num_threads(threads)
        calls = {  # a layer's summaries are built in one call and read in another; other memory is read in between
            "limit": lambda threads=threads: _core.probe_read(isa, some, PROBE_SECONDS, threads),
            "dense": layers.each(few, layers.dense),
            "once": lambda threads=threads: _core.probe_read(isa, layers.summaries, None, threads),
            "build": layers.each(few, layers.build),
            "select": layers.each(count, layers.select),
            "attend": layers.each(count, layers.attend),
            "both": layers.each(count, layers.select, layers.attend),
        }
        timed = {name: Contender(f"context {layers.context}", call) for name, call in calls.items()}
        timed["both"].before_last = lambda: poison(layers.steps[0].out)
        list(in_turns(list(timed.values()), args, report.progress, share / len(args.threads)))  # "both" comes last
        blitz_attn.set_num_threads(None)
        seconds = {name: timed[name].median / few for name in ("dense", "build")}
        seconds |= {name: timed[name].median / count for name in ("select", "attend", "both")}
        read, read_select, sparse_bytes = timed["limit"].value, timed["once"].value, layers.summary_bytes + layers.picked_bytes
        report.row(
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
                "Outputs_equal": yes(layers.is_equal()),
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


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=None)
    result.add_argument("--quick", action="store_true", help=f"contexts {', '.join(map(str, QUICK_CONTEXTS))} and two repeats")
    result.add_argument("--contexts", type=positive, nargs="+", help="tokens of the request (4K, 8K .. 1M)")
    result.add_argument("--blocks", type=positive, nargs="+", default=[32], help="blocks that a KV head attends (%(default)s)")
    result.add_argument("--page", type=positive, default=128, help="tokens per page, and rows per summary page (%(default)s)")
    result.add_argument("--heads", "-H", type=positive, default=32, help="query heads (%(default)s)")
    result.add_argument("--kv-heads", type=positive, default=8, help="KV heads (%(default)s)")
    result.add_argument("--head-dim", "-D", type=positive, default=128, help="head dimension (%(default)s)")
    result.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16", help="dtype (%(default)s)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads: expected a divisor of {args.heads} heads, got {args.kv_heads}")
    args.contexts = args.contexts or (QUICK_CONTEXTS if args.quick else CONTEXTS)
    args.repeats = args.repeats or (2 if args.quick else 5)
    options = {"THREADS": args.threads, "ISA": _core.isa_active(), "REPEATS": args.repeats, "SEED": args.seed}
    report.head(parameters(**options), _core.cpu_model())
    for context, blocks in itertools.product(args.contexts, args.blocks):
        layers = Layers(context, blocks, args)
        if layers.bytes_needed > 0.7 * memory_available():
            report.note(f"context {context}: left out, it needs {layers.bytes_needed / 2**30:.1f} GiB")
            continue
        layers.draw()
        measure(layers, args, report, 1 / len(args.contexts) / len(args.blocks))
    report.foot()


if __name__ == "__main__":
    raise SystemExit(main())
