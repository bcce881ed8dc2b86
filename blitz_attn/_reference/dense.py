"""float64 twins of attention over whole arrays and of merging, and the rounding that all twins share. Public through
`blitz_attn.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .._arrays import array, dtype_name, float32_numbers, result_shapes
from .._sabi import lists

__all__ = [
    "block_sparse_attention",
    "dense_same_precision",
    "merge_states",
    "merge_states_n",
    "merge_states_tree",
    "round_to",
    "to_float64",
]

_STRIP_ELEMENTS = 1 << 22  # most scores in memory at a time: 32 MiB of float64


# ---- Precision -------------------------------------------------------------------------------------------------


def _host_array(x: Any) -> np.ndarray:
    """NumPy view or copy of `x`; framework tensors are widened to float64 first, which NumPy always has."""
    if hasattr(x, "detach"):
        return x.detach().cpu().double().numpy()
    return array(x, "x", "an array")


def to_float64(x: Any, dtype: Any = None) -> np.ndarray:
    """Exact float64 copy of an array of any floating kind the library takes.

    Parameters
    ----------
    x : array_like
        float16, float32, float64 or bfloat16 values; uint16 holds bfloat16 bits when `dtype` says so.
    dtype : str or dtype, optional
        ``"bfloat16"`` to read a uint16 array as bits. Ignored for other arrays.

    Returns
    -------
    numpy.ndarray
        float64, of the shape of `x`.

    Raises
    ------
    TypeError
        `x` holds uint16 and `dtype` does not name bfloat16.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.reference import to_float64
    >>> to_float64(np.array([0x3F80, 0xC000], np.uint16), "bfloat16").tolist()
    [1.0, -2.0]
    """
    given = _host_array(x)
    if given.dtype.name == "bfloat16" or given.dtype == np.uint16:
        if given.dtype == np.uint16 and dtype_name(dtype) != "bfloat16":
            raise TypeError(f'dtype: expected "bfloat16" to read uint16 bits, got {dtype!r}')
        bits = np.ascontiguousarray(given).view(np.uint16).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32).astype(np.float64).reshape(given.shape)
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return given.astype(np.float64)


def _bfloat16_bits(x32: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to bfloat16, ties to even; a NaN stays a NaN."""
    bits = x32.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x32), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _to_odd_float32(x: np.ndarray) -> np.ndarray:
    """float64 to float32 towards zero, the last bit set where bits were lost: rounding this again is exact."""
    near = x.astype(np.float32)
    lossy = np.isfinite(near) & (near.astype(np.float64) != x)
    toward = np.where(lossy & (np.abs(near.astype(np.float64)) > np.abs(x)), np.nextafter(near, np.float32(0)), near)
    return (toward.view(np.uint32) | lossy.astype(np.uint32)).view(np.float32)


def round_to(x: Any, dtype: Any) -> np.ndarray:
    """Round float64 values once, to nearest with ties to even.

    Parameters
    ----------
    x : array_like
        Values; taken as float64.
    dtype : str or dtype
        ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Returns
    -------
    numpy.ndarray
        Of that dtype. bfloat16 comes as an ``ml_dtypes.bfloat16`` array where ml_dtypes is installed, else as its
        uint16 bits.

    Raises
    ------
    ValueError
        `dtype` is none of the four.

    Examples
    --------
    >>> from blitz_attn.reference import round_to, to_float64
    >>> to_float64(round_to([1.0, 1.00390625, 3.1415926], "bfloat16"), "bfloat16").tolist()
    [1.0, 1.0, 3.140625]
    """
    name = dtype_name(dtype)
    values = np.array(array(x, "x", "numbers"), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if name in ("float64", "float32", "float16"):
            return values.astype(name)
        if name == "bfloat16":
            bits = _bfloat16_bits(_to_odd_float32(values))
            try:
                import ml_dtypes
            except ImportError:
                return bits
            return bits.view(ml_dtypes.bfloat16)
    raise ValueError(f"dtype: expected float64, float32, float16 or bfloat16, got {name}")


def round_in_float32(x32: np.ndarray, name: str) -> np.ndarray:
    """float32 values as they would be after a trip through dtype `name`."""
    if name == "float16":
        return x32.astype(np.float16).astype(np.float32)
    if name == "bfloat16":
        return (_bfloat16_bits(x32).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x32


# ---- One call, taken apart ----------------------------------------------------------------------------------------


@dataclass
class Bias:
    """What is added to the scores of one batch entry, after the scale and the softcap."""

    mask: np.ndarray | None  # (heads, queries, keys): True where a key takes part, or numbers, of which -inf hides the key
    slopes: np.ndarray | None  # (heads,): what a token of distance takes from the score
    least: float  # numbers of the mask below it count as -inf

    def of(self, heads: np.ndarray, queries: np.ndarray, keys: np.ndarray, begin: int) -> np.ndarray:
        """(queries, keys) in float64. `heads`: that of each query; `begin`: the key on the diagonal of query 0."""
        bias = np.zeros((queries.size, keys.size))
        if self.mask is not None:
            part = self.mask[heads[:, None], queries[:, None], keys]
            numbers = np.where(part, 0.0, -np.inf) if part.dtype == np.bool_ else to_float64(part)
            bias = np.where(numbers < self.least, -np.inf, numbers)
        if self.slopes is not None:
            bias -= self.slopes[heads, None] * np.abs(queries[:, None] + begin - keys)
        return bias


@dataclass
class SequenceParts:
    """One batch entry: arrays are (heads, tokens, dim), lengths count valid tokens."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_len: int
    kv_len: int
    begin: int  # the key on the diagonal of query 0: its token number
    ranges: np.ndarray | None = None  # (tokens, 2): the first key that each query may see, and the place after the last one
    bias: Bias | None = None


def _offsets(name: str, value: Any, total: int) -> list[int]:
    if value is None:
        raise ValueError(f"{name}: expected cumulative lengths for layout TND, got None")
    offsets = [int(n) for n in np.asarray(value)]
    if not offsets or offsets[0] != 0 or offsets[-1] != total or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"{name}: expected lengths rising from 0 to {total}, got {offsets}")
    return offsets


def _lengths(name: str, value: Any, full: Sequence[int]) -> list[int]:
    if value is None:
        return list(full)
    lengths = [int(n) for n in np.asarray(value)]
    if len(lengths) != len(full) or any(not 0 <= n <= most for n, most in zip(lengths, full, strict=False)):
        raise ValueError(f"{name}: expected {len(full)} lengths within {list(full)}, got {lengths}")
    return lengths


def begins_of(q_begin: Any, q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
    """The token number of each batch entry's query 0. By default, the queries are the last tokens."""
    if q_begin is None:
        return [kv - q for q, kv in zip(q_lens, kv_lens, strict=True)]
    begins = [int(n) for n in np.broadcast_to(np.asarray(q_begin), (len(q_lens),))]
    if any(abs(n) >= 1 << 30 for n in begins):
        raise ValueError(f"q_begin: expected token numbers within 2**30 of 0, got {begins}")
    return begins


def _ranges_of(kv_ranges: Any, tokens: Sequence[int], packed: bool) -> list[Any]:
    """The ranges of each sequence's queries."""
    if kv_ranges is None:
        return [None] * len(tokens)
    ranges = np.asarray(kv_ranges)
    if packed:
        if ranges.shape != (sum(tokens), 2):
            raise ValueError(f"kv_ranges: expected shape {(sum(tokens), 2)}, got {ranges.shape}")
        return np.split(ranges, np.cumsum(tokens)[:-1])
    return list(np.broadcast_to(ranges, (len(tokens), tokens[0] if tokens else 0, 2)))


def sequences_of(
    q, k, v, layout, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin=None, kv_ranges=None
) -> list[SequenceParts]:
    """The batch entries of a call in any layout."""
    if layout == "TND":
        cut_q, cut_kv = _offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0]), _offsets("cu_seqlens_kv", cu_seqlens_kv, k.shape[0])
        if len(cut_q) != len(cut_kv):
            raise ValueError(f"cu_seqlens_kv: expected {len(cut_q)} entries like cu_seqlens_q, got {len(cut_kv)}")
        parts = [[x[a:b].swapaxes(0, 1) for a, b in pairwise(cut)] for x, cut in ((q, cut_q), (k, cut_kv), (v, cut_kv))]
    elif layout in ("BNSD", "BSND", "BSH"):
        if layout == "BSH":
            if not num_heads:
                raise ValueError(f"num_heads: expected a number of heads for layout BSH, got {num_heads}")
            kv = num_kv_heads or num_heads
            q, k, v = (x.reshape(*x.shape[:2], heads, x.shape[2] // heads) for x, heads in ((q, num_heads), (k, kv), (v, kv)))
        parts = [list(x if layout == "BNSD" else x.swapaxes(1, 2)) for x in (q, k, v)]
    else:
        raise ValueError(f"layout: expected BNSD, BSND, BSH or TND, got {layout!r}")
    tokens = [x.shape[1] for x in parts[0]]
    q_lens = _lengths("q_lens", q_lens, tokens)
    kv_lens = _lengths("kv_lens", kv_lens, [x.shape[1] for x in parts[1]])
    numbers = (q_lens, kv_lens, begins_of(q_begin, q_lens, kv_lens), _ranges_of(kv_ranges, tokens, layout == "TND"))
    sequences = [SequenceParts(*fields) for fields in zip(*parts, *numbers, strict=True)]
    for seq in sequences:
        if seq.k.shape[0] != seq.v.shape[0] or seq.k.shape[1] != seq.v.shape[1] or seq.q.shape[2] != seq.k.shape[2]:
            raise ValueError(f"v: expected heads and tokens of k {seq.k.shape} and q's head dimension, got {seq.v.shape}")
        if seq.k.shape[0] == 0 or seq.q.shape[0] % seq.k.shape[0]:
            raise ValueError(f"k: expected a number of heads that divides {seq.q.shape[0]}, got {seq.k.shape[0]}")
    return sequences


def input_dtype(q: Any, dtype: Any) -> str:
    """The name of the dtype of a call's inputs."""
    given = dtype if dtype is not None else getattr(q, "dtype", None)
    return dtype_name(given if given is not None else np.asarray(q).dtype)


def _mask_array(attn_mask: Any) -> np.ndarray:
    """The mask with four axes: True and False, or numbers in a dtype of NumPy or ml_dtypes."""
    given = attn_mask if hasattr(attn_mask, "detach") else array(attn_mask, "attn_mask", "an array")
    name = dtype_name(given.dtype)
    if name not in ("bool", "float32", "float16", "bfloat16", "float64"):
        raise TypeError(f"attn_mask: expected bool, float32, float16, bfloat16 or float64, got {name}")
    # An array keeps its dtype: what a strip needs of it is widened there.
    mask = np.asarray(given) if name == "bool" or isinstance(given, np.ndarray) else to_float64(given)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def add_biases(sequences: Sequence[SequenceParts], attn_mask: Any, alibi_slopes: Any, inputs: str, *, longer: bool = False) -> None:
    """Gives each batch entry what is added to its scores. `inputs`: the dtype of q; `longer`: a mask of two axes or
    more may have more rows and columns."""
    if not sequences or (attn_mask is None and alibi_slopes is None):
        return
    heads = sequences[0].q.shape[0]
    sizes = (len(sequences), heads, max(s.q.shape[1] for s in sequences), max(s.k.shape[1] for s in sequences))
    masks: Sequence[np.ndarray | None] = [None] * len(sequences)
    if attn_mask is not None:
        mask = _mask_array(attn_mask)
        fits = [n in (1, full) or (longer and axis > 1 and n > full) for axis, (n, full) in enumerate(zip(mask.shape, sizes, strict=False))]
        if mask.ndim != 4 or not all(fits):
            expected = ", ".join(f"{full} or 1" for full in sizes)
            raise ValueError(f"attn_mask: expected shape ({expected}), got {np.shape(attn_mask)}")
        if len(np.shape(attn_mask)) == 1 and mask.shape[3] > max(1, sizes[3]):
            raise ValueError(f"attn_mask: expected {sizes[3]} tokens in a mask of one axis, got {np.shape(attn_mask)}")
        masks = list(np.broadcast_to(mask, [full if n == 1 else n for n, full in zip(mask.shape, sizes, strict=True)]))
    slopes = None
    if alibi_slopes is not None:
        slopes = per_head(alibi_slopes, "alibi_slopes")
        if slopes.shape != (heads,):
            raise ValueError(f"alibi_slopes: expected shape ({heads},), one number per head, got {slopes.shape}")
    # In float32, such a number times log2(e) is infinite.
    least = -math.inf if inputs == "float64" else -float(np.finfo(np.float32).max) / math.log2(math.e)
    for seq, part in zip(sequences, masks, strict=True):
        seq.bias = Bias(part, slopes, least)


def join_sequences(parts: list[np.ndarray], layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """Per-sequence (heads, tokens, dim) results back into the layout of q. `shape`: that of the whole, which may have no sequences."""
    if not parts:
        return np.zeros(shape)
    if layout == "TND":
        return np.concatenate([x.swapaxes(0, 1) for x in parts])
    stacked = np.stack(parts)
    return stacked if layout == "BNSD" else stacked.swapaxes(1, 2).reshape(shape)


def per_head(numbers: Any, name: str) -> np.ndarray:
    """The float64 values of sinks or slopes, which the library reads as float32 whatever the dtype of q."""
    return float32_numbers(numbers, name).astype(np.float64)


# ---- Attention ----------------------------------------------------------------------------------------------------


@dataclass
class Rules:
    """Which keys a query may see, beside the block list."""

    causal: bool
    left: int | None  # tokens before the diagonal; None: no bound
    right: int | None

    def bounds(self, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last key position that the queries on `diagonal` may see."""
        huge = np.iinfo(np.int64).max // 4
        left = huge if self.left is None else self.left
        right = huge if self.right is None else self.right
        return diagonal - left, diagonal + (min(right, 0) if self.causal else right)


def make_rules(causal: bool, window: Any) -> Rules:
    if window is None:
        return Rules(bool(causal), None, None)
    left, right = (int(n) for n in window)
    if min(left, right) < -1:
        raise ValueError(f"window: expected two counts of tokens or -1, got {(left, right)}")
    return Rules(bool(causal), None if left == -1 else left, None if right == -1 else right)


def seen_bounds(rules: Rules, seq: SequenceParts, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last key position that these queries may see."""
    low, high = rules.bounds(queries + seq.begin)
    if seq.ranges is None:
        return low, high
    return np.maximum(low, seq.ranges[queries, 0]), np.minimum(high, seq.ranges[queries, 1] - 1)


def bias_and_seen(
    seq: SequenceParts, head: int, shared: int, rows: np.ndarray, keys: np.ndarray, seen: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """What is added to the scores of these rows, 0 where a key is hidden, and which keys they see, None where they see all.

    `seen`: which keys the rules and lists show. Rows are queries of `head` and of the `shared` - 1 heads behind it, as in `attend_head`.
    """
    if seq.bias is None:
        return None, seen
    bias = seq.bias.of(head + rows % shared, rows // shared, keys, seq.begin)
    shown = bias != -np.inf
    seen = shown if seen is None else seen & shown
    return np.where(seen, bias, 0.0), seen


def strips(row_first: int, row_last: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _STRIP_ELEMENTS // max(1, columns))
    for start in range(row_first, row_last, step):
        yield start, min(start + step, row_last)


def _weighted_sum(p: np.ndarray, v: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """p @ v in which a NaN or inf in v reaches only the rows that see its key (0 * inf would reach all)."""
    nonfinite = np.flatnonzero(~np.isfinite(v).all(axis=1))
    if nonfinite.size == 0:
        return p @ v
    plain = v.copy()
    plain[nonfinite] = 0
    out = p @ plain
    for j in nonfinite:
        term = p[:, j, None] * v[j]
        out += term if seen is None else np.where(seen[:, j, None], term, 0)
    return out


def _strip(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray | None,
    scale: float,
    name: str,
    softcap: float = 0.0,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of a strip of queries over some keys; `name` is the precision that S, P and the result are rounded to."""
    s = q @ k.T * q.dtype.type(scale)
    if softcap:
        s = q.dtype.type(softcap) * np.tanh(s / q.dtype.type(softcap))
    s = round_in_float32(s, name)
    if bias is not None:
        s = round_in_float32(s + bias.astype(s.dtype), name)
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    top = s.max(axis=1, keepdims=True)
    top = np.where(top == -np.inf, q.dtype.type(0), top)
    p = np.exp(s - top)
    total = p.sum(axis=1, keepdims=True)
    lse = (top + np.log(total))[:, 0]
    if name in ("float64", "float32"):
        out = _weighted_sum(p, v, seen) / total
    else:  # frameworks normalise P before they round it
        out = round_in_float32(_weighted_sum(round_in_float32(p / total, name), v, seen), name)
    return np.where(total == 0, q.dtype.type(0), out), lse


def listed_keys(row: np.ndarray, width: int, kv_len: int) -> np.ndarray:
    """Token positions of the blocks named in one row of a block list."""
    blocks = np.sort(row[row >= 0])
    keys = (blocks[:, None] * width + np.arange(width)).reshape(-1)
    return keys[keys < kv_len]


def attend_head(
    q, k, v, seq: SequenceParts, rows: np.ndarray | None, block_shape, rules: Rules, scale, name, softcap=0.0, *, head: int, shared=1
):
    """(tokens, dim_v) output and (tokens,) log-sum-exp of `head`. `rows`: its block list (R, W), -1 padded, or None.

    With `shared` heads, rows of q are those heads' queries of the first token, then of the second, and so on.
    """
    out = np.zeros((q.shape[0], v.shape[1]), q.dtype)
    lse = np.full(q.shape[0], -np.inf, q.dtype)
    block_q, block_kv = block_shape
    queries, step = seq.q_len * shared, block_q * shared
    bands: Iterable[tuple[int, int, np.ndarray | None]]
    if rows is None:
        bands = [(0, queries, None)]
    else:
        starts = range(0, queries, step)
        bands = ((a, min(a + step, queries), listed_keys(rows[r], block_kv, seq.kv_len)) for r, a in enumerate(starts))
    free = not rules.causal and rules.left is None and rules.right is None and seq.ranges is None
    for band_first, band_last, keys in bands:
        for first, last in strips(band_first, band_last, seq.kv_len if keys is None else keys.size):
            low, high = seen_bounds(rules, seq, np.arange(first, last) // shared)
            if keys is None:  # a run of keys: no gather
                a, b = max(0, int(low.min())), min(seq.kv_len, int(high.max()) + 1)
                pick: Any = slice(a, max(a, b))
                where = np.arange(a, max(a, b))
            else:
                pick = where = keys[(keys >= low.min()) & (keys <= high.max())]
            if where.size == 0:
                continue
            seen = None if free else (where >= low[:, None]) & (where <= high[:, None])
            bias, seen = bias_and_seen(seq, head, shared, np.arange(first, last), where, seen)
            out[first:last], lse[first:last] = _strip(q[first:last], k[pick], v[pick], seen, scale, name, softcap, bias)
    return out, lse


def add_sinks(out: np.ndarray, lse: np.ndarray, sinks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The softmax with one more score, which has no value. `sinks` has the shape of `lse`, or one that NumPy repeats."""
    with_sink = np.logaddexp(lse, sinks)
    share = np.exp(np.where(lse == -np.inf, -np.inf, lse - with_sink))  # no key, and a sink of -inf: no difference of infinities
    return out * share[..., None], with_sink


def _run(tensors, sabi, block_shape, scale, layout, rules, shape_args, bias_args, name, return_lse, out, softcap=None, sinks=None):
    """The common body of the twins. `tensors` are float64 or float32; `name` is the precision that is imitated."""
    q, k, v = tensors
    block_q, block_kv = (int(n) for n in block_shape)
    if min(block_q, block_kv) < 1:
        raise ValueError(f"block_shape: expected two positive numbers, got {(block_q, block_kv)}")
    sequences = sequences_of(q, k, v, layout, *shape_args)
    add_biases(sequences, *bias_args)
    if scale is None:
        head_dim = sequences[0].q.shape[2] if sequences else 1
        scale = 1.0 / math.sqrt(head_dim)
    heads = sequences[0].q.shape[0] if sequences else 0
    kept = None
    longest_q, longest_kv = (max((x.shape[1] for x in xs), default=0) for xs in ([s.q for s in sequences], [s.k for s in sequences]))
    if sabi is not None and longest_q and longest_kv:
        sizes = {"batch": len(sequences), "heads": heads, "kv_heads": sequences[0].k.shape[0]}
        kept = lists.check(sabi, longest_q, longest_kv, (block_q, block_kv), **sizes)
    outs, lses = [], []
    with np.errstate(all="ignore"):
        for b, seq in enumerate(sequences):
            group = heads // seq.k.shape[0]
            out_b, lse_b = np.zeros((heads, seq.q.shape[1], seq.v.shape[2])), np.zeros((heads, seq.q.shape[1]))
            for h in range(heads):
                rows = None if kept is None else kept[b % kept.shape[0], h * kept.shape[1] // heads]
                out_b[h], lse_b[h] = attend_head(
                    seq.q[h],
                    seq.k[h // group],
                    seq.v[h // group],
                    seq,
                    rows,
                    (block_q, block_kv),
                    rules,
                    scale,
                    name,
                    float(softcap or 0.0),
                    head=h,
                )
            if sinks is not None:
                out_b[:, : seq.q_len], lse_b[:, : seq.q_len] = add_sinks(
                    out_b[:, : seq.q_len], lse_b[:, : seq.q_len], per_head(sinks, "sinks")[:, None]
                )
            outs.append(out_b)
            lses.append(lse_b)
    shape, lse_shape = result_shapes(q, v, layout, *shape_args[4:6])
    result = join_sequences(outs, layout, shape)
    out, lse_out = out if isinstance(out, tuple) else (out, None)
    if not return_lse:
        return written(result, out)
    if not lses:
        lse = np.zeros(lse_shape)
    else:
        lse = np.concatenate([m.T for m in lses]) if layout == "TND" else np.stack(lses)
    return written(result, out), written(lse, lse_out)


def written(result: np.ndarray, out: Any) -> Any:
    """The result, written into `out` where that is given."""
    if out is None:
        return result
    out[...] = result
    return out


def block_sparse_attention(
    q,
    k,
    v,
    sabi=None,
    *,
    block_shape=(128, 128),
    scale=None,
    layout="BNSD",
    causal=False,
    window=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    num_heads=None,
    num_kv_heads=None,
    q_begin=None,
    q_total=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    sinks=None,
    softcap=None,
    return_lse=False,
    out_dtype=None,
    out=None,
    dtype=None,
    num_threads=None,
):
    """See `blitz_attn.block_sparse_attention`."""
    tensors = [to_float64(x, dtype) for x in (q, k, v)]
    shape_args = (q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges)
    bias_args = (attn_mask, alibi_slopes, input_dtype(q, dtype))
    rules = make_rules(causal, window)
    return _run(tensors, sabi, block_shape, scale, layout, rules, shape_args, bias_args, "float64", return_lse, out, softcap, sinks)


def dense_same_precision(
    q,
    k,
    v,
    sabi=None,
    *,
    block_shape=(128, 128),
    scale=None,
    layout="BNSD",
    causal=False,
    window=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    num_heads=None,
    num_kv_heads=None,
    q_begin=None,
    q_total=None,
    kv_ranges=None,
    attn_mask=None,
    alibi_slopes=None,
    return_lse=False,
    out_dtype=None,
    out=None,
    dtype=None,
    num_threads=None,
):
    """The attention of `block_sparse_attention` as a plain array program computes it in the precision of the inputs.

    float32 inputs: every step in float32. float16 and bfloat16 inputs: products summed in float32, the scaled scores,
    the probabilities and the result rounded to the input dtype. float64 inputs: the same as `block_sparse_attention`.
    The error of this computation against float64 is what the error of the library is held against.

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
    name = dtype_name(dtype) if dtype is not None else dtype_name(getattr(q, "dtype", np.asarray(q).dtype))
    tensors = [to_float64(x, dtype) for x in (q, k, v)]
    if name != "float64":
        tensors = [x.astype(np.float32) for x in tensors]
    shape_args = (q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, kv_ranges)
    bias_args = (attn_mask, alibi_slopes, name)
    return _run(tensors, sabi, block_shape, scale, layout, make_rules(causal, window), shape_args, bias_args, name, return_lse, out)


# ---- Merging ----------------------------------------------------------------------------------------------------


def merge_states_n(outs, lses, *, out=None, lse_out=None, dtype=None):
    """See `blitz_attn.merge_states_n`."""
    parts, weights = [to_float64(x, dtype) for x in outs], [to_float64(x) for x in lses]
    if not parts or len(parts) != len(weights):
        raise ValueError(f"lses: expected as many as outs and at least one, got {len(weights)} for {len(parts)}")
    if any(o.shape != parts[0].shape or m.shape != parts[0].shape[:-1] for o, m in zip(parts, weights, strict=True)):
        raise ValueError(f"lses: expected shape {parts[0].shape[:-1]} each, got {[m.shape for m in weights]}")
    lse = np.stack(weights)
    with np.errstate(all="ignore"):
        top = lse.max(axis=0)
        top = np.where(top == -np.inf, 0.0, top)
        share = np.exp(lse - top)
        total = share.sum(axis=0)
        terms = np.where(lse[..., None] == -np.inf, 0.0, share[..., None] * np.stack(parts))
        merged = np.where(total[..., None] == 0, 0.0, terms.sum(axis=0) / total[..., None])
        return written(merged, out), written(top + np.log(total), lse_out)


def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse_out=None, dtype=None):
    """See `blitz_attn.merge_states`."""
    return merge_states_n([out_a, out_b], [lse_a, lse_b], out=out, lse_out=lse_out, dtype=dtype)


def merge_states_tree(outs, lses):
    """See `blitz_attn.merge_states_tree`: exact sums have no order."""
    return merge_states_n(outs, lses)
