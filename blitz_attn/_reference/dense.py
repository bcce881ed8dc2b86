"""float64 twins of attention over whole arrays and of merging. Public through `blitz_attn.reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .._arrays import array, choice, dtype_name
from .._block_sparse import call as operation
from .._floats import FLOATS
from .._operations import sequence_shapes
from .._sabi.block_list import block_shape_for
from .._sabi.check import check
from . import attend as core
from .common import cuts, delivered, lengths, name_of, per_head, real_of, rounding_of, to_float64, with_options_of, written

__all__ = ["block_sparse_attention", "dense_same_precision", "merge_states", "merge_states_n", "merge_states_tree"]


# ---- One call, taken apart ----------------------------------------------------------------------------------------


def split(x: np.ndarray, layout: str, offsets: Sequence[int] | None = None, heads: int | None = None) -> list[np.ndarray]:
    """(heads, tokens, dim) of each batch entry."""
    if layout == "TND":
        assert offsets is not None
        return [x[a:b].swapaxes(0, 1) for a, b in pairwise(offsets)]
    if layout == "BSH":
        assert heads is not None
        x = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    return list(x if layout == "BNSD" else x.swapaxes(1, 2))


def join(parts: Sequence[np.ndarray], layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `split`, in float64. `shape`: the shape of the result, which is read where there are no parts, and in layout BSH."""
    if not parts:
        return np.zeros(shape)
    if layout == "TND":
        return np.concatenate([x.swapaxes(0, 1) for x in parts]).astype(np.float64)
    stacked = np.stack(parts).astype(np.float64)
    if layout == "BNSD":
        return stacked
    turned = stacked.swapaxes(1, 2)
    return turned if layout == "BSND" else turned.reshape(shape)


def split_numbers(x: np.ndarray, layout: str, offsets: Sequence[int] | None) -> list[np.ndarray]:
    """(heads, tokens) of each batch entry of an array of the shape of the log-sum-exp."""
    return [part[..., 0] for part in split(x[..., None], "TND" if layout == "TND" else "BNSD", offsets)]


def join_numbers(parts: Sequence[np.ndarray], layout: str, shape: tuple[int, ...]) -> np.ndarray:
    return join([x[..., None] for x in parts], "TND" if layout == "TND" else "BNSD", (*shape, 1))[..., 0]


def begins_of(q_begin: Any, q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
    """The token number of each batch entry's query 0. By default, the queries are the last tokens."""
    if q_begin is None:
        return [kv - q for q, kv in zip(q_lens, kv_lens, strict=True)]
    return [int(n) for n in np.broadcast_to(np.asarray(q_begin), (len(q_lens),))]


def _bounds(window: Any, causal: bool) -> dict[str, Any]:
    """How many keys before and after the diagonal a query sees; None for all."""
    left, right = (None if n == -1 else int(n) for n in ((-1, -1) if window is None else window))
    return {"left": left, "right": 0 if causal and (right is None or right > 0) else right}


def sequences_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, sabi: Any, o: dict[str, Any], inputs: str) -> list[core.Sequence]:
    """The batch entries of a call with the options `o`, whose inputs have the dtype `inputs`."""
    layout, heads = choice(o["layout"], "layout", ("BNSD", "BSND", "BSH", "TND")), o["num_heads"]
    packed = layout == "TND"
    cut_q, cut_kv = (cuts(name, o[name], len(x)) if packed else None for name, x in (("cu_seqlens_q", q), ("cu_seqlens_kv", k)))
    kv_heads = o["num_kv_heads"] or heads
    parts = split(q, layout, cut_q, heads), split(k, layout, cut_kv, kv_heads), split(v, layout, cut_kv, kv_heads)
    tokens, room = ([x.shape[1] for x in xs] for xs in parts[:2])
    q_lens, kv_lens = lengths("q_lens", o["q_lens"], tokens), lengths("kv_lens", o["kv_lens"], room)
    ranges: Any = [None] * len(tokens)
    if o["kv_ranges"] is not None:
        given = np.asarray(o["kv_ranges"])
        ranges = [given[a:b] for a, b in pairwise(cut_q)] if cut_q else np.broadcast_to(given, (len(tokens), max(tokens, default=0), 2))
    bounds = _bounds(o["window"], o["causal"])
    numbers = q_lens, kv_lens, begins_of(o["q_begin"], q_lens, kv_lens), ranges
    sequences = [
        core.sequence(*arrays, q_len=q_len, kv_len=kv_len, begin=begin, ranges=run, **bounds)
        for arrays, q_len, kv_len, begin, run in zip(zip(*parts, strict=True), *numbers, strict=True)
    ]
    longest = max(tokens, default=0), max(room, default=0)
    if sabi is not None and all(longest):
        block_q, block_kv = (int(n) for n in block_shape_for(sabi, o["block_shape"], (128, 128)))
        sizes = {"batch": len(sequences), "heads": len(sequences[0].q), "kv_heads": len(sequences[0].k)}
        kept = core.named(check(sabi, *longest, (block_q, block_kv), **sizes), -(-longest[1] // block_kv))
        for b, s in enumerate(sequences):
            s.kept, s.block_shape = kept[b % len(kept)], (block_q, block_kv)
    add_biases(sequences, o["attn_mask"], o["alibi_slopes"], inputs)
    return sequences


def add_biases(sequences: Sequence[core.Sequence], attn_mask: Any, alibi_slopes: Any, inputs: str, *, longer: bool = False) -> None:
    """Gives each batch entry its bias. `inputs`: the dtype of q. `longer`: a mask of two axes or more may have more rows and columns than
    there are queries and keys."""
    if not sequences or (attn_mask is None and alibi_slopes is None):
        return
    sizes = (len(sequences), len(sequences[0].q), max(s.q.shape[1] for s in sequences), max(s.k.shape[1] for s in sequences))
    masks: Sequence[np.ndarray | None] = [None] * len(sequences)
    if attn_mask is not None:
        given = attn_mask if hasattr(attn_mask, "detach") else array(attn_mask, "attn_mask", "an array")
        if dtype_name(given.dtype) not in ("bool", *FLOATS):
            raise TypeError(f"attn_mask: expected bool, float32, float16, bfloat16 or float64, got {dtype_name(given.dtype)}")
        # A NumPy array keeps its dtype: each strip widens the part that it needs.
        mask = np.asarray(given) if dtype_name(given.dtype) == "bool" or isinstance(given, np.ndarray) else to_float64(given)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        fits = [n in (1, full) or (longer and axis > 1 and n > full) for axis, (n, full) in enumerate(zip(mask.shape, sizes, strict=False))]
        if mask.ndim != 4 or not all(fits):
            expected = ", ".join(f"{full} or 1" for full in sizes)
            raise ValueError(f"attn_mask: expected shape ({expected}), got {np.shape(attn_mask)}")
        if np.ndim(attn_mask) == 1 and mask.shape[3] > max(1, sizes[3]):
            raise ValueError(f"attn_mask: expected {sizes[3]} tokens in a mask of one axis, got {np.shape(attn_mask)}")
        masks = list(np.broadcast_to(mask, [full if n == 1 else n for n, full in zip(mask.shape, sizes, strict=True)]))
    slopes = per_head(alibi_slopes, "alibi_slopes")
    if slopes is not None and slopes.shape != sizes[1:2]:
        raise ValueError(f"alibi_slopes: expected shape {sizes[1:2]}, one number per head, got {slopes.shape}")
    # In float32, numbers below this one become minus infinity when they are multiplied by log2(e).
    least = -math.inf if inputs == "float64" else -float(np.finfo(np.float32).max) / math.log2(math.e)
    for s, part in zip(sequences, masks, strict=True):
        s.bias = core.Bias(part, slopes, s.begin, least)


# ---- Attention ----------------------------------------------------------------------------------------------------


def _attend(name: str, q: Any, k: Any, v: Any, sabi: Any, o: dict[str, Any]) -> Any:
    """Attention as a program in dtype `name` computes it."""
    inputs, layout = name_of(q, o["dtype"]), o["layout"]
    q, k, v = (to_float64(x, o["dtype"]).astype(real_of(name)) for x in (q, k, v))
    rules, sinks = core.ScoreRules.of(o), per_head(o.get("sinks"), "sinks")
    results = [core.attend(s, rules, rounding_of(name), sinks) for s in sequences_of(q, k, v, sabi, o, inputs)]
    shape, lse_shape = sequence_shapes(q, v, layout, o["num_heads"], o["num_kv_heads"])
    outs, lses = zip(*results, strict=True) if results else ((), ())
    return delivered(join(outs, layout, shape), join_numbers(lses, layout, lse_shape), o)


@with_options_of(operation.block_sparse_attention)
def block_sparse_attention(q, k, v, sabi=None, **options):
    """See `blitz_attn.block_sparse_attention`."""
    return _attend("float64", q, k, v, sabi, options)


@with_options_of(block_sparse_attention, without="sinks softcap")
def dense_same_precision(q, k, v, sabi=None, **options):
    """The attention of `block_sparse_attention` as a plain array program computes it in the precision of the inputs.

    For float32 inputs, every step is in float32. For float16 and bfloat16 inputs, products are summed in float32, and the
    scaled scores, the probabilities and the result are rounded to the input dtype. For float64 inputs, the result is that of
    `block_sparse_attention`.
    The error of the library against float64 is compared with the error of this computation.

    Parameters
    ----------
    q, k, v, sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        See `blitz_attn.block_sparse_attention`.
    q_begin, q_total, kv_ranges, attn_mask, alibi_slopes
        See `blitz_attn.block_sparse_attention`.
    return_lse, out_dtype, out, dtype, num_threads
        See `block_sparse_attention` in this module.

    Returns
    -------
    out, lse : numpy.ndarray
        Like `block_sparse_attention`: float64 arrays, holding the rounded values.

    Raises
    ------
    ValueError
        A shape, length, block list or option out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q, k, v = (np.float32([[[[0.1 * n, 0.3]] * 3]]) for n in range(3))
    >>> exact, rounded = (f(q, k, v) for f in (reference.block_sparse_attention, reference.dense_same_precision))
    >>> bool(0 <= abs(exact - rounded).max() < 1e-6)
    True
    """
    return _attend(name_of(q, options["dtype"]), q, k, v, sabi, options)


# ---- Merging ----------------------------------------------------------------------------------------------------


def merge_states_n(outs, lses, *, out=None, lse_out=None, dtype=None):
    """See `blitz_attn.merge_states_n`."""
    lse, parts = np.stack([to_float64(x) for x in lses]), np.stack([to_float64(x, dtype) for x in outs])
    with np.errstate(all="ignore"):
        top = lse.max(axis=0)
        top = np.where(top == -np.inf, 0.0, top)
        share = np.exp(lse - top)
        total = share.sum(axis=0)
        terms = np.where(lse[..., None] == -np.inf, 0.0, share[..., None] * parts)
        merged = np.where(total[..., None] == 0, 0.0, terms.sum(axis=0) / total[..., None])
        return written(merged, out), written(top + np.log(total), lse_out)


def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse_out=None, dtype=None):
    """See `blitz_attn.merge_states`."""
    return merge_states_n([out_a, out_b], [lse_a, lse_b], out=out, lse_out=lse_out, dtype=dtype)


def merge_states_tree(outs, lses):
    """See `blitz_attn.merge_states_tree`: exact sums have no order."""
    return merge_states_n(outs, lses)
