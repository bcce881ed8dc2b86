"""Problems of `block_sparse_attention`: lists, rules, layouts, dtypes and kinds of arrays are drawn together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import blitz_attn

from . import arrays, checks
from .attention_cases import LAYOUTS, Arguments, Case, Outputs, draw_alone, draw_case, draw_slice, laid_out, plain_arguments, rows_of
from .attention_oracle import Attention, forward
from .draw import Draw
from .problems import Finding, problem

CHECKS = ("oracle", "threads", "permute", "alone", "dense", "masked", "slice", "rounded")


def attend(
    case: Case, rng: np.random.Generator, num_threads: int | None = 1, out_dtype: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Calls the case again with plain arrays, and with the entries of its lists in another order."""
    given, options = plain_arguments(case, rng)
    return blitz_attn.block_sparse_attention(*given.values(), **options, out_dtype=out_dtype, return_lse=True, num_threads=num_threads)


def call(draw: Draw, case: Case, made: Arguments, out_dtype: str) -> tuple[Any, Any]:
    """Makes the drawn call, and checks promises that do not depend on the numbers. Returns None for a log-sum-exp that is not requested."""
    p = case.problem
    shapes = {"out": laid_out(np.empty((*p.q.shape[:3], p.v.shape[-1])), case.layout, p.q_lens).shape}
    shapes["lse"] = laid_out(np.empty(p.q.shape[:3]), case.layout, p.q_lens).shape
    dtypes = {"out": out_dtype, "lse": p.real}
    return_lse = draw.flag("return_lse", 0.7)
    given = {"none": (), "out": ("out",), "pair": ("out", "lse"), "lse": ("lse",)}[
        draw.pick("out", ("none", "out", "pair", "lse"), (4, 2, 1, 1))
    ]
    if "lse" in given and not return_lse:
        given = ("out",)
    outputs = Outputs(made, shapes, dtypes, given)
    out = (outputs.given.get("out"), outputs.given["lse"]) if "lse" in given else outputs.given.get("out")
    result = blitz_attn.block_sparse_attention(
        *made.arrays.values(), **made.options, out_dtype=None if out_dtype == p.dtype else out_dtype, out=out, return_lse=return_lse, num_threads=checks.threads(draw)
    )
    results = dict(zip(("out", "lse"), result if return_lse else (result,), strict=False))
    outputs.check(results)
    return results["out"], results.get("lse")


def check_numbers(case: Case, out: Any, lse: Any, out_dtype: str) -> None:
    """Compares with the oracle. A row that sees a NaN key must be NaN, and a row that sees other garbage may be anything."""
    p = case.problem
    f, hit = forward(p), case.hit
    if np.isnan(case.garbage):
        f.out[hit], f.lse[hit] = np.nan, np.nan
    skipped = hit & ~np.isnan(f.lse)
    got = arrays.values_of(out, out_dtype)
    expected, allowed, off = (
        laid_out(x, case.layout, p.q_lens) for x in (f.out, f.allowed_out, np.broadcast_to(skipped[..., None], f.out.shape))
    )
    checks.near("out", np.where(off, 0, got), np.where(off, 0, expected), np.where(off, 1, allowed))
    some = laid_out(f.some | hit, case.layout, p.q_lens)
    empty = laid_out(np.broadcast_to(~f.seen.any(axis=-1)[..., None], f.out.shape), case.layout, p.q_lens)
    if got[empty].any():
        raise Finding("out: rows that see nothing are not 0")
    if lse is not None:
        expected, allowed, off = (laid_out(x, case.layout, p.q_lens) for x in (f.lse, f.allowed_lse, skipped))
        got = arrays.values_of(lse, p.real)
        checks.near("lse", np.where(off, 0, got), np.where(off, 0, expected), np.where(off, 1, allowed))
        if not np.array_equal(np.isneginf(got[~off]), ~some[~off]):
            raise Finding("lse: -inf in other rows than those that see nothing")


def masked_blocks(p: Attention) -> np.ndarray:
    """The lists, with additional blocks in each row: all blocks that lie behind the last key of every batch entry that uses the row."""
    starts = np.arange(p.blocks.shape[3]) * p.block_shape[1]
    lens = p.kv_lens if p.blocks.shape[0] == p.kv_lens.size else p.kv_lens.max(initial=0)[None]
    return p.blocks | (starts >= lens[:, None])[:, None, None]


@problem("block_sparse_attention", weight=3)
def block_sparse_attention(draw: Draw) -> None:
    check = draw.pick("check", CHECKS)
    case = draw_case(draw, forward_only=True, all_blocks=check == "dense")
    p = case.problem
    out_dtype = p.real if draw.flag("out_dtype", 0.25) else p.dtype
    with checks.at_level(draw):
        made = Arguments(draw, case)
        out, lse = call(draw, case, made, out_dtype)
        check_numbers(case, out, lse, out_dtype)
        rng = draw.rng("again")
        if check == "alone":
            check_alone(draw, case, out, lse, out_dtype)
            return
        if check == "slice":
            check_slice(draw, case, out, lse, out_dtype)
            return
        if check == "rounded":
            check_rounded(case, out, out_dtype, rng)
            return
        if check == "oracle" or (check in ("permute", "dense", "masked") and p.blocks is None):
            return
        other = case
        if check == "dense":
            other = dataclasses.replace(case, problem=dataclasses.replace(p, blocks=None))
        elif check == "masked":
            other = dataclasses.replace(case, problem=dataclasses.replace(p, blocks=masked_blocks(p)))
        again = attend(other, rng, {"threads": draw.pick("other_threads", checks.THREADS)}.get(check, 1), out_dtype)
        what = {"dense": "all blocks listed and no list", "masked": "with masked blocks", "threads": "another number of threads"}.get(
            check, "other order"
        )
        checks.same_bits(what, *((out, again[0]) if lse is None else ((out, lse), again)))


def check_slice(draw: Draw, case: Case, out: Any, lse: Any, out_dtype: str) -> None:
    """Compares some rows with a call on only these rows."""
    p, drawn = case.problem, draw_slice(draw, case)
    if drawn is None:
        return
    (rows, part), first = drawn, drawn[0].start
    again = attend(part, draw.rng("again"), draw.pick("other_threads", checks.THREADS), out_dtype)
    for b in range(len(p.q_lens)):
        end = min(int(p.q_lens[b]), rows.stop)
        clear = ~case.hit[b, :, first : max(first, end)]  # NaN may have other bits
        for whole, theirs, numbers in ((out, again[0], False), (lse, again[1], True)):
            if whole is None:
                continue
            dtype = p.real if numbers else out_dtype
            ours = arrays.stored(arrays.values_of(whole, dtype), dtype)
            one = rows_of(ours, case.layout, p.q.shape[1], p.q_lens, b, numbers=numbers)[:, first : max(first, end)]
            other = rows_of(theirs, case.layout, p.q.shape[1], part.problem.q_lens, b, numbers=numbers)
            checks.same_bits("lse of a slice" if numbers else "out of a slice", one[clear], other[clear])


def check_rounded(case: Case, out: Any, out_dtype: str, rng: np.random.Generator) -> None:
    """The unrounded result, rounded by NumPy, must be the usual result."""
    p = case.problem
    usual, wide = arrays.values_of(out, out_dtype), attend(case, rng, 1, p.real)[0]
    if out_dtype != p.dtype:
        usual, wide = arrays.values_of(attend(case, rng)[0], p.dtype), out
    rounded = arrays.rounded(arrays.values_of(wide, p.real), p.dtype)
    clear = ~np.isnan(usual)
    if not np.array_equal(np.isnan(rounded), ~clear):
        raise Finding("out: NaN in other places before it is rounded")
    checks.same_bits("rounded by NumPy", arrays.stored(rounded[clear], p.dtype), arrays.stored(usual[clear], p.dtype))


def check_alone(draw: Draw, case: Case, out: Any, lse: Any, out_dtype: str) -> None:
    """Compares one batch entry with a call on only this entry, in another layout and with other padding."""
    p, layout = case.problem, draw.pick("alone.layout", LAYOUTS)
    drawn = draw_alone(draw, case, layout)
    if drawn is None:
        return
    (b, single), heads = drawn, p.q.shape[1]
    again = attend(single, draw.rng("again"), 1, out_dtype)
    clear = ~case.hit[b, :, : int(p.q_lens[b])]  # NaN may have other bits
    results = [(arrays.stored(arrays.values_of(out, out_dtype), out_dtype), again[0], False)]
    if lse is not None:
        results.append((arrays.stored(arrays.values_of(lse, p.real), p.real), again[1], True))
    for ours, theirs, numbers in results:
        one = rows_of(ours, case.layout, heads, p.q_lens, b, numbers=numbers)
        other = rows_of(theirs, layout, heads, single.problem.q_lens, 0, numbers=numbers)
        checks.same_bits("lse alone" if numbers else "out alone", one[clear], other[clear])


@problem("refused_lists", weight=0.5)
def refused_lists(draw: Draw) -> None:
    """A block that is in a row twice, or that does not exist, is refused at any position, and nothing is written."""
    batch, heads, rows, columns = (draw.integer(name, 1, most) for name, most in (("batch", 3), ("heads", 4), ("rows", 9), ("columns", 9)))
    block_q, block_kv = draw.integer("block_q", 1, 20), draw.integer("block_kv", 1, 20)
    rng = draw.rng("list")
    lists = np.argsort(rng.random((batch, heads, rows, columns)), axis=-1)
    lists = np.concatenate([lists, np.full_like(lists[..., :1], -1)], axis=-1)
    kind = np.dtype(draw.pick("dtype", ("int32", "int16", "int64", "uint16")))
    at = tuple(int(rng.integers(n)) for n in (batch, heads, rows, columns))
    if draw.pick("mistake", ("range", "twice")) == "range" or columns == 1:
        lists[at] = columns + int(rng.integers(3))
    else:
        lists[at] = lists[(*at[:3], (at[3] + 1) % columns)]
    q = draw.rng("q").standard_normal((batch, heads, rows * block_q, 8)).astype(np.float32)
    k = draw.rng("k").standard_normal((batch, heads, columns * block_kv, 8)).astype(np.float32)
    q_lens = rng.integers(0, rows * block_q, batch, endpoint=True) if draw.flag("q_lens") else None
    out = arrays.poisoned(draw, "out", q.shape, "float32")
    given = {"block_shape": (block_q, block_kv), "q_lens": q_lens, "num_threads": checks.threads(draw), "out": out.array}
    checks.refused(lambda: blitz_attn.block_sparse_attention(q, k, k, lists.astype(kind), **given), "sabi")
    out.check_unchanged()
