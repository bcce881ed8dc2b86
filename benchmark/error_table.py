#!/usr/bin/env python3
"""How far the library is from float64, beside the same-precision dense computation, for every dtype and instruction set.

    python benchmark/error_table.py              # exit code 1 where the rule is broken

The rule: the library's error against the float64 reference is at most twice the error of `reference.dense_same_precision`, which rounds
as a plain array program in the same dtype does (scores, probabilities and result). Both are relative errors in the Frobenius norm and
largest absolute errors. float64 has no wider yardstick, so there the library must stay within some roundings of the reference, which is
float64 itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import _bench  # first: finds the library of this checkout
import blitz_attn
from _bench import checked, command, isa_level, natural
from blitz_attn import sabi, testing
from result_files import add_save, main_with_save

DTYPES = ("float32", "float16", "bfloat16", "float64")
COLUMNS = (
    _bench.Column("dtype", 9),
    _bench.Column("isa", 12),
    _bench.Column("case", 22),
    _bench.Column("relative", 10, ".2e"),
    _bench.Column("dense_relative", 14, ".2e"),
    _bench.Column("largest", 10, ".2e"),
    _bench.Column("dense_largest", 13, ".2e"),
    _bench.Column("ratio", 6, ".2f"),
    _bench.Column("rule", 6),
)


def cases(tokens: int, seed: int) -> Iterator[tuple[str, dict[str, int], np.ndarray | None, dict[str, Any]]]:
    """Name, sizes for `testing.make_qkv`, block list and options of each case; every one has ragged ends."""
    for head_dim in (64, 128):
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": tokens - 3, "kv_len": tokens - 3, "head_dim": head_dim, "seed": seed}
        drawn = sabi.random_with_frame(tokens - 3, None, (128, 64), 0.7, heads=2, seed=seed)
        yield f"D={head_dim}, dense", sizes, None, {}
        yield f"D={head_dim}, causal", sizes, None, {"causal": True}
        yield f"D={head_dim}, 128x64, s=0.7", sizes, drawn, {"block_shape": (128, 64)}
    long = {**sizes, "head_dim": 64, "q_len": 64, "kv_len": 16 * tokens}
    yield "D=64, 16 times the keys", long, None, {}  # sums over many keys, where careless accumulation shows
    one = {**sizes, "heads": 16, "kv_heads": 4, "head_dim": 72, "v_dim": 40, "q_len": 1}  # many heads: few numbers make a noisy error
    yield "D=72, D_v=40, one query", one, None, {}


def rows(dtypes: list[str], isas: list[str], tokens: int, seed: int) -> Iterator[dict[str, Any]]:
    """One row a dtype, instruction set and case."""
    for dtype in dtypes:
        for name, sizes, listed, options in cases(tokens, seed):
            q, k, v = testing.make_qkv(**sizes, dtype=dtype)
            if q.dtype == np.uint16:
                options = {**options, "dtype": dtype}
            exact = dense = None
            for isa in isas:
                with blitz_attn.isa(isa):
                    out = blitz_attn.block_sparse_attention(q, k, v, listed, **options)
                if exact is None:  # the references do not depend on the instruction set
                    exact = blitz_attn.reference.block_sparse_attention(q, k, v, listed, **options)
                    same = blitz_attn.reference.dense_same_precision(q, k, v, listed, **options)
                    dense = testing.error_of(same, exact)
                ours = testing.error_of(out, exact, dtype)
                yield {
                    "dtype": dtype,
                    "isa": isa,
                    "case": name.replace(" ", ""),
                    "relative": ours.relative,
                    "dense_relative": dense.relative,
                    "largest": ours.largest,
                    "dense_largest": dense.largest,
                    "ratio": ours.relative / dense.relative if dense.relative else None,
                    "rule": "holds" if testing.meets_error_rule(ours, dense, dtype) else "BROKEN",
                }


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes (all)")
    parser.add_argument("--isa", type=isa_level, nargs="+", help="instruction sets (all that this CPU has)")
    tokens = checked(int, lambda value: value >= 4, "a whole number from 4")
    parser.add_argument("--tokens", type=tokens, default=1024, help="tokens of queries and keys (%(default)s)")
    parser.add_argument("--seed", type=natural, default=1234, help="of operands and lists (%(default)s)")
    args = add_save(parser).parse_args(argv)
    print(" ".join(f"{column.name:>{column.width}}" for column in COLUMNS))
    broken = 0
    for row in rows(args.dtypes, args.isa or list(blitz_attn.isa_levels(available=True)), args.tokens, args.seed):
        print(" ".join(column.text(row[column.name]) for column in COLUMNS), flush=True)
        broken += row["rule"] != "holds"
    print(f"# the rule is broken in {broken} rows" if broken else "# the rule holds in every row")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
