"""The blocks that the selected branch of native sparse attention attends to. Public through `blitz_attn.nsa`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _arrays, _core
from .._floats import real_of
from .._sentences import shown
from .arrays import check_rank, dtype_of, expect_shape, leading, reals, same_kind, storage
from .attend import Common, attend, compressed_branch
from .compression import check_compressed
from .rules import CMP_GROUP, Rules, number, rules_of, scale_of, threads_of
from .sequences import Sequences, check_queries, packed_cuts, refuse_cuts_of_queries, sums_of

if TYPE_CHECKING:
    from .._types import Array, DType, Integers

__all__ = ["score_and_select_blocks"]


def list_heads(q: np.ndarray, kv_heads: int, rules: Rules) -> int:
    """Number of heads of the lists of a selection."""
    return kv_heads if rules.by_query else q.shape[-2]


def list_shape(q: np.ndarray, heads: int, rules: Rules, sequences: Sequences) -> tuple[int, ...]:
    """Shape of the lists of a selection, without the axis of their entries."""
    if sequences.rows is not None:
        return (heads, int(sequences.rows[-1]))
    return (q.shape[0], heads, rules.rows(q.shape[1]))


def select_into(
    q: np.ndarray, k_cmp: np.ndarray, lse: np.ndarray | None, out: np.ndarray, groups: np.ndarray | None, common: Common, rules: Rules,
    sequences: Sequences,
) -> None:  # fmt: skip
    """Fills `out` with the selected blocks, and `groups` with the selected groups where it is given."""
    _core.nsa_select(
        q, k_cmp, lse, block_indices=out, cmp_block_indices=groups, scale=common.scale, causal=rules.causal,
        compress_block_size=rules.size, compress_stride=rules.stride, select_block_size=rules.select,
        q_tile_size=0 if rules.by_query else rules.tile, init_blocks=rules.init, local_blocks=rules.local, q_begin=sequences.begin,
        tokens=sequences.lengths, cmp_group=CMP_GROUP, cu_seqlens=sequences.queries,
        cu_blocks=sequences.blocks, dtype=common.kind, num_threads=common.threads,
    )  # fmt: skip


def lse_of(q: np.ndarray, k_cmp: np.ndarray, common: Common, rules: Rules, sequences: Sequences) -> np.ndarray:
    """Log-sum-exp of the compressed branch. Of the branch's output, only one channel is computed."""
    out, lse = np.empty((*q.shape[:-1], 1), storage(common.kind)), np.empty(q.shape[:-1], real_of(common.kind))
    attend(q, k_cmp, k_cmp[..., :1], out, lse, common, compressed_branch(rules, sequences))
    return lse


def score_and_select_blocks(
    q: Array, k_cmp: Array, num_selected_blocks: int, compress_block_size: int, *, causal: bool = True, q_tile_size: int = 256,
    scale: float | None = None, cu_seqlens: Integers | None = None, mode: str = "paper", compress_stride: int | None = None,
    select_block_size: int | None = None, init_blocks: int = 1, local_blocks: int = 2, lse: Array | None = None, tokens: int | None = None,
    cu_seqlens_q: Integers | None = None, dtype: DType | None = None, num_threads: int | None = None,
) -> np.ndarray:  # fmt: skip
    """The blocks that the selected branch attends to.

    Parameters
    ----------
    q : array
        ``(B, N, H, D)``, with `cu_seqlens` ``(T, H, D)``: float32, float16, bfloat16 or float64.
    k_cmp : array
        Compressed keys of all tokens of the sequences, as `compress_kv` returns them, of the dtype of `q`.
    num_selected_blocks : int
        Number n of entries of a row of the result, at least 1.
    compress_block_size : int
        Number l of tokens per compressed block.
    causal : bool
        A query selects only blocks that begin at or before it (paper mode), or before the end of its tile (mslk mode).
    q_tile_size : int
        mslk mode: number of queries that share a row. The last tile of a sequence may have fewer queries, and its mean query is their mean.
    scale : float, optional
        Factor of the products. Default: ``1 / sqrt(D)``.
    cu_seqlens : sequence of int, optional
        ``(sequences + 1,)`` numbers of tokens that rise from 0 to T.
    mode : {"paper", "mslk"}
        In paper mode, there is one row per query and KV head. The score of a block is the sum, over the heads of the group, of the
        probabilities of the compressed keys that overlap the block, each times the number of strides that it shares with the block (Eq. 9
        and 10 of the paper that `nsa` cites). In mslk mode, there is one row per tile and query head. The score is the product of the
        compressed key and the mean query of the tile.
    compress_stride, select_block_size, init_blocks, local_blocks : int
        Paper mode, see `nsa`.
    lse : array, optional
        Paper mode: ``(B, N, H)`` or ``(T, H)`` log-sum-exp of the compressed branch, as `compressed_attention` returns it. Default: it is
        computed here.
    tokens, cu_seqlens_q
        For a `q` that has only the last tokens of the sequences: see `compressed_attention`. In mslk mode, queries must begin where a tile
        begins.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    numpy.ndarray
        int32 ``(B, Hkv, N, n)`` in paper mode and ``(B, H, tiles, n)`` in mslk mode; with `cu_seqlens` ``(Hkv, T, n)`` and
        ``(H, all tiles, n)``. Each row has blocks in rising order, then -1. Of blocks with equal scores, the lower is selected. A score of
        NaN comes last. In mslk mode, a block whose score is -inf is not selected, even where a row has entries left.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, shape or range.

    Notes
    -----
    Each thread holds the scores of some dozens of rows at a time: memory is linear in the number of tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import nsa
    >>> q = np.ones((1, 4, 1, 1))
    >>> k_cmp = np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> nsa.score_and_select_blocks(q, k_cmp, 1, 2, q_tile_size=2, mode="mslk")[0, 0].tolist()
    [[0], [1]]
    """
    rules = rules_of(
        mode, compress_block_size, num_selected_blocks, q_tile_size, compress_stride, select_block_size, init_blocks, local_blocks, causal
    )
    q, k_cmp, lse = _arrays.detached(q, k_cmp, lse)  # lists have no gradient
    threads = threads_of(num_threads)
    dtype, cu_seqlens = dtype_of(dtype), sums_of(cu_seqlens)
    queries, kind = leading(q, "q", dtype)
    keys = same_kind(k_cmp, "k_cmp", dtype, kind, "q")
    packed = cu_seqlens is not None
    check_rank(queries, "q", packed)
    check_rank(keys, "k_cmp", packed)
    sequences = last_tokens(queries, tokens, cu_seqlens, cu_seqlens_q, rules)
    check_tiles(rules, sequences)
    check_compressed(keys, rules.size, rules.stride, sequences)
    common = Common(kind, scale_of(scale, queries.shape[-1]), threads)
    known = None
    if rules.by_query and lse is not None:
        known = reals(lse, "lse", None, kind)[0]
        expect_shape(known, "lse", queries.shape[:-1], "of ", "q", " without D")
    elif rules.by_query:
        known = lse_of(queries, keys, common, rules, sequences)
    rows = list_shape(queries, list_heads(queries, keys.shape[-2], rules), rules, sequences)
    chosen = np.empty((*rows, rules.count), np.int32)
    select_into(queries, keys, known, chosen, None, common, rules, sequences)
    return chosen


def last_tokens(q: np.ndarray, tokens: Any, cu_seqlens: Any, cu_seqlens_q: Any, rules: Rules) -> Sequences:
    """The sequences of queries `q`, in a call that has no array of tokens from which their number could be read."""
    if cu_seqlens is not None:
        if tokens is not None:
            raise ValueError(f"tokens: expected None with cu_seqlens, got {shown(tokens)}")
        cu, own = packed_cuts(cu_seqlens, cu_seqlens_q, q.shape[0], None)
        return Sequences.packed(cu, rules.size, rules.stride, rules.tile, own)
    refuse_cuts_of_queries(cu_seqlens_q)
    length = q.shape[1] if tokens is None else number(tokens, "tokens", 0)
    check_queries(q.shape[1], length, "q")
    return Sequences.batch(q.shape[1], length)


def check_tiles(rules: Rules, sequences: Sequences) -> None:
    """Refuses queries that begin within a tile, because the tile's selection would depend on queries that the call does not have."""
    if rules.tile == 1:
        return
    within = np.atleast_1d(np.asarray(sequences.begin) % rules.tile != 0)
    if within.any():
        raise ValueError(
            f'q: expected in mode "mslk" queries from the beginning of a tile of q_tile_size = {rules.tile} tokens on, got token '
            f"{np.atleast_1d(sequences.begin)[within][0]}"
        )


def lists_of(block_indices: Any, rules: Rules, heads: tuple[int, ...], q: np.ndarray, sequences: Sequences) -> np.ndarray:
    """The selection that the caller gave, after checks: it has the rows that the call needs, and each row names blocks that exist, none
    of them twice."""
    lists = _arrays.array(block_indices, "block_indices", "an integer array")
    if lists.dtype.kind not in "iu" or lists.dtype.itemsize < 2 or lists.dtype == np.uint64:
        raise TypeError(f"block_indices: expected int16, int32 or int64, got {lists.dtype}")
    shapes = [list_shape(q, head, rules, sequences) for head in heads]
    if lists.ndim != len(shapes[0]) + 1 or lists.shape[:-1] not in shapes:
        raise ValueError(f"block_indices: expected shape {' or '.join(f'({str(shape)[1:-1]}, n)' for shape in shapes)}, got {lists.shape}")
    lists = lists.astype(np.promote_types(lists.dtype, np.int32), copy=False)  # no pad of an unsigned dtype becomes -1
    if ((lists[..., 1:] != -1) & (lists[..., :-1] == -1)).any():  # entries after a row's first -1 do not count
        lists = np.where(np.logical_or.accumulate(lists == -1, axis=-1), lists.dtype.type(-1), lists)
    for some, tokens in _of_sequences(lists, sequences):
        blocks = -(-tokens // rules.select)
        for at in range(0, some.shape[-2], 1 << 14):
            part = some[..., at : at + (1 << 14), :]
            if part.size and (part.min() < -1 or part.max() >= blocks):
                wrong = part[(part < -1) | (part >= blocks)][0]
                raise ValueError(f"block_indices: expected blocks from 0 to {blocks - 1}, or -1 after them, got {wrong}")
            ordered = np.sort(part, axis=-1)
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if twice.any():
                raise ValueError(f"block_indices: expected each block once per row, got {ordered[..., 1:][twice][0]} twice")
    return lists


def _of_sequences(lists: np.ndarray, sequences: Sequences) -> Iterator[tuple[np.ndarray, int]]:
    """(rows of lists, number of tokens) for each sequence, or once where all sequences have the same number of tokens."""
    if isinstance(sequences.lengths, int):
        yield lists, sequences.lengths
        return
    for n, tokens in enumerate(sequences.lengths.tolist()):
        yield lists[n] if sequences.rows is None else lists[:, sequences.rows[n] : sequences.rows[n + 1]], tokens
