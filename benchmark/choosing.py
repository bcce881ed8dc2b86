#!/usr/bin/env python3
"""What choosing blocks costs, beside the dense call that it replaces and the sparse call that follows.

    python benchmark/choosing.py                                          # 8K and 64K tokens, every dtype, every chooser
    python benchmark/choosing.py --tokens 8192 --choosers pooled8 pooled64 --peers --threads 1

Causal attention of normally distributed q, k and v. Each chooser finds its list at one density; dense attention, attention over the
list of the first chooser, every chooser, and the choosers of choosing_peers.py are timed in turns (A B C A B C ...), and medians are
compared. "%_of_dense" and "%_of_sparse" are shares of those calls' times. A peer that cannot run is a line that says why. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Contender, Progress, command, density, in_turns, positive
from _peers import UnavailableError, pause
from blitz_attn import _core, select, testing
from choosing_peers import PEERS, peer
from saved import add_save, main_with_save

CHOOSERS = {
    "pooled8": select.Pooled(8),
    "pooled8_mean": select.Pooled(8, "mean", "mean"),
    "pooled16": select.Pooled(16),
    "pooled64": select.Pooled(64),
    "antidiagonal16": select.Antidiagonal(16),
    "sampled_rows4": select.SampledRows(4),
    "vertical_slash64": select.VerticalSlash(64),
}

COLUMNS = {
    "dtype": 8, "tokens": 7, "heads": 6, "D": 4, "block": 7, "density": 7, "threads": 7, "chooser": 21, "ms": 9, "%_of_dense": 10,
    "%_of_sparse": 11,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", type=positive, nargs="+", default=[8192, 65536])
    made.add_argument("--dtype", nargs="+", default=["float32", "float16", "bfloat16"], choices=["float32", "float16", "bfloat16"])
    made.add_argument("--choosers", nargs="+", default=list(CHOOSERS), choices=list(CHOOSERS))
    made.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="choosers in torch")
    made.add_argument("-H", "--heads", type=positive, default=9)
    made.add_argument("--kv-heads", type=positive, default=3)
    made.add_argument("-D", "--head-dim", type=positive, default=64)
    made.add_argument("--block", type=positive, default=64, help="tokens of a block, of queries and of keys")
    made.add_argument("--density", type=density, default=0.25)
    made.add_argument("--threads", type=positive, help="number of threads (default: what the library uses)")
    made.add_argument("--repeats", type=positive, default=5)
    return add_save(made)


def measure(args: argparse.Namespace, tokens: int, dtype: str, progress: Progress) -> None:
    """Prints the rows of one length and dtype."""
    q, k, v = testing.make_qkv(1, args.heads, args.kv_heads, tokens, tokens, args.head_dim, dtype=dtype)
    shared = {"causal": True, "num_threads": args.threads} | ({"dtype": dtype} if dtype == "bfloat16" else {})
    shape = (args.block, args.block)

    def choose(name: str) -> object:
        return blitz_attn.select_blocks_prefill(q, k, chooser=CHOOSERS[name], density=args.density, block_shape=shape, **shared)

    sabi = choose(args.choosers[0])
    work = float(tokens) ** 2
    contenders = [
        Contender("dense", lambda: blitz_attn.block_sparse_attention(q, k, v, **shared), work),
        Contender("sparse", lambda: blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=shape, **shared), work * args.density),
    ]
    contenders += [Contender(name, lambda name=name: choose(name), work * 0.05) for name in args.choosers]
    threads = args.threads or blitz_attn.get_num_threads()
    reasons = {}
    for name in args.peers:
        try:
            contenders += [pause(), Contender(name, peer(name, q, k, dtype, args.block, args.density, threads), work * 0.1), pause()]
        except UnavailableError as error:
            reasons[name] = str(error)
    medians = {contenders[i].label: timing.median for i, timing in in_turns(contenders, args.repeats, 1, progress)}
    dense, sparse = medians["dense"], medians["sparse"]
    print(f"\n=== {tokens} tokens, {dtype}: dense {dense * 1e3:.3f} ms, sparse {sparse * 1e3:.3f} ms")
    print(" ".join(name.rjust(width) for name, width in COLUMNS.items()))
    for name in (*args.choosers, *args.peers):
        if name in reasons:
            print(f"--- {name}: {reasons[name]}")
            continue
        seconds = medians[name]
        cells = (dtype, tokens, f"{args.heads}/{args.kv_heads}", args.head_dim, f"{args.block}x{args.block}", args.density, threads, name)
        times = (f"{seconds * 1e3:.3f}", f"{100 * seconds / dense:.2f}", f"{100 * seconds / sparse:.2f}")
        print(" ".join(str(cell).rjust(width) for cell, width in zip((*cells, *times), COLUMNS.values(), strict=True)), flush=True)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    each = (1 + args.repeats) * (1 + args.density + 0.05 * len(args.choosers))
    progress = Progress(each * sum(float(n) ** 2 for n in args.tokens) * len(args.dtype))
    print(f"{_core.cpu_model()}, level {_core.isa_active()}")
    for tokens in args.tokens:
        for dtype in args.dtype:
            measure(args, tokens, dtype, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
