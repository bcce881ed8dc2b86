#!/usr/bin/env python3
"""What choosing blocks costs, beside the dense call that it replaces and the sparse call that follows.

    python benchmark/choosing.py                                          # 8K and 64K tokens, every dtype, every chooser
    python benchmark/choosing.py --tokens 8192 --choosers pooled8 pooled64 --peers --threads 1

Causal attention of normally distributed q, k and v. Each chooser finds its list at one density; dense attention, attention over the
list of the first chooser, every chooser, and choosers as users of torch write them are timed in turns (A B C A B C ...), and medians are
compared. "%_of_dense" and "%_of_sparse" are shares of those calls' times. A peer that cannot run is a line that says why. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Contender, Progress, command, density, in_turns, positive
from blitz_attn import _core, select, testing
from other_libraries import Step, UnavailableError, imported_torch, pause, torch_tensor
from result_files import add_save, main_with_save

CHOOSERS = {
    "pooled8": select.Pooled(8),
    "pooled8_mean": select.Pooled(8, "mean", "mean"),
    "pooled16": select.Pooled(16),
    "pooled64": select.Pooled(64),
    "antidiagonal16": select.Antidiagonal(16),
    "sampled_rows4": select.SampledRows(4),
    "vertical_slash64": select.VerticalSlash(64),
}

STRIDE = 16  # of the antidiagonals
BLOCK_MEANS, ANTIDIAGONAL = "torch_block_means", "torch_antidiagonal16"
PEERS = (BLOCK_MEANS, ANTIDIAGONAL)

COLUMNS = {
    "dtype": 8, "tokens": 7, "heads": 6, "D": 4, "block": 7, "density": 7, "threads": 7, "chooser": 21, "ms": 9, "%_of_dense": 10,
    "%_of_sparse": 11,
}  # fmt: skip


# Choosers in torch, after published definitions; the code is this repository's own. Each works on one KV head at a time, so that memory
# stays bounded.


def _visible(torch: Any, rows: int, columns: int) -> Any:
    """Which column each row sees, causally; both count the same number of tokens."""
    return torch.ones((rows, columns), dtype=torch.bool).tril(columns - rows)


def block_means(q: Any, k: Any, block: int, density: float) -> Any:
    """The blocks of keys with the highest products of mean query and mean key, as many per row as `density` of those that it sees:
    (H, R, K) indices in rising order, -1 behind the last. It is the usual way to make a BlockMask for FlexAttention."""
    torch = imported_torch()
    heads, kv_heads, rows = q.shape[1], k.shape[1], q.shape[2] // block
    means_q, means_k = (x[0].unflatten(1, (-1, block)).mean(2) for x in (q, k))
    scores = torch.matmul(means_q.unflatten(0, (kv_heads, -1)), means_k.unsqueeze(1).mT).flatten(0, 1).float()
    scores.masked_fill_(~_visible(torch, rows, scores.shape[2]), -math.inf)
    wanted = (torch.arange(1, rows + 1) * density).ceil().long()
    chosen = scores.topk(int(wanted.max()), dim=-1).indices
    unused = torch.arange(chosen.shape[2]) >= wanted[:, None]
    listed = chosen.masked_fill(unused, scores.shape[2]).sort(dim=-1).values
    return listed.masked_fill(listed == scores.shape[2], -1).expand(heads, -1, -1)


def antidiagonal_scores(q: Any, k: Any, block: int, stride: int = STRIDE) -> Any:
    """XAttention's scores (H, R, C), each row adding up to 1: the queries of a stride, taken backwards, are one long query, the keys of a
    stride one long key, so that their product is the sum along the antidiagonals; the softmax over all keys is added up by blocks."""
    torch = imported_torch()
    group = q.shape[1] // k.shape[1]
    scale = 1 / (math.sqrt(q.shape[3]) * stride)
    every = []
    for head in range(k.shape[1]):
        long_q = q[0, head * group : (head + 1) * group].unflatten(1, (-1, stride)).flip(2).flatten(2)
        long_k = k[0, head].unflatten(0, (-1, stride)).flatten(1)
        scores = torch.matmul(long_q, long_k.T).float() * scale
        scores.masked_fill_(~_visible(torch, scores.shape[1], scores.shape[2]), -math.inf)
        shares = scores.softmax(dim=-1)
        every.append(shares.unflatten(2, (-1, block // stride)).sum(3).unflatten(1, (-1, block // stride)).mean(2))
    return torch.cat(every)


def antidiagonal(q: Any, k: Any, block: int, mass: float) -> Any:
    """The fewest blocks of each row that hold `mass` of its scores: (H, R, C) bool."""
    scores = antidiagonal_scores(q, k, block)
    ordered = scores.sort(dim=-1, descending=True)
    before = ordered.values.cumsum(dim=-1) - ordered.values
    return (before < mass).new_zeros(scores.shape).scatter_(2, ordered.indices, before < mass)


def peer(name: str, q: np.ndarray, k: np.ndarray, dtype: str, block: int, density: float, threads: int) -> Step:
    """A call of the peer. Raises `UnavailableError` where there is no torch."""
    torch = imported_torch()
    torch.set_num_threads(threads)
    tensors = (torch_tensor(q, dtype), torch_tensor(k, dtype))
    if name == BLOCK_MEANS:
        return lambda: block_means(*tensors, block, density)
    return lambda: antidiagonal(*tensors, block, 0.9)


# ---- The command -------------------------------------------------------------------------------------------------


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
