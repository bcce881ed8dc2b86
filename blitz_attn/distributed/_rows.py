"""Calls of the library for block rows of a plan: a slice of the queries attends to the keys of the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from .._sabi.lists import PAD_UINT16, blocks_of
from ._problem import Problem


class RowCall:
    """The arguments of a call for some rows of one KV head. Its results are bit-identical to these rows of a call over the whole sequence.

    Arrays are given and taken as views (entries, heads, tokens, dims). Layout TND has one entry, in which sequences follow one another on
    the axis of tokens.

    Parameters
    ----------
    problem : Problem
    head : int
        The KV head, or 0 where heads share their lists.
    first, end : int
        Rows of the chain.
    """

    def __init__(self, problem: Problem, head: int, first: int, end: int) -> None:
        self.problem = problem
        heads = slice(0, 1) if problem.sabi is None else problem.lists_of(head)
        common: dict[str, Any] = {"block_shape": problem.block_shape, "causal": problem.causal, "window": problem.window}
        if problem.layout == "TND":
            self.arguments = common | self._packed(heads, first, end)
        else:
            self.arguments = common | self._batched(heads, first, end)

    def _batched(self, heads: slice, first: int, end: int) -> dict[str, Any]:
        p = self.problem
        begin, count = int(p.row_at[first]), int(p.row_at[end] - p.row_at[first])
        return {
            "sabi": None if p.sabi is None else p.sabi[:, heads, first:end], "q_begin": begin + p.kv_valid - p.q_valid,
            "q_total": p.q_valid, "q_lens": None if p.q_lens is None else np.clip(p.q_lens - begin, 0, count), "kv_lens": p.kv_lens,
        }  # fmt: skip

    def _packed(self, heads: slice, first: int, end: int) -> dict[str, Any]:
        """The arguments for packed sequences. The rows may be only a part of their first and of their last sequence."""
        p = self.problem
        block_q, _ = p.block_shape
        begins, ends = np.maximum(first, p.row_begin[:-1]) - p.row_begin[:-1], np.minimum(end, p.row_begin[1:]) - p.row_begin[:-1]
        inside = np.flatnonzero(ends > begins)
        span = slice(int(inside[0]), int(inside[-1]) + 1)  # includes sequences without queries, which may have keys
        starts, counts = begins[span], np.maximum(ends - begins, 0)[span]
        sizes = np.where(counts > 0, np.minimum(ends[span] * block_q, p.q_sizes[span]) - starts * block_q, 0)
        cu_kv = p.cu_kv[span.start : span.stop + 1]
        self.keys = slice(int(cu_kv[0]), int(cu_kv[-1]))
        return {
            "sabi": None if p.sabi is None else self._lists(heads, np.arange(span.start, span.stop), starts, counts), "layout": "TND",
            "q_begin": starts * block_q + p.kv_sizes[span] - p.q_sizes[span], "q_total": p.q_sizes[span],
            "cu_seqlens_q": np.concatenate([[0], np.cumsum(sizes)]), "cu_seqlens_kv": cu_kv - cu_kv[0],
        }  # fmt: skip

    def _lists(self, heads: slice, inside: ndarray, starts: ndarray, counts: ndarray) -> ndarray:
        """The lists of each sequence from its first row in the call on."""
        sabi = self.problem.sabi
        assert sabi is not None
        columns = blocks_of(int(self.problem.kv_sizes[inside].max()), self.problem.block_shape[1])
        pad = PAD_UINT16 if sabi.dtype == np.uint16 else -1
        if len(sabi) == 1 and not starts.any():
            return _below(sabi[:, heads, : int(counts.max())], columns, pad)
        found = np.full((len(inside), *sabi[:1, heads].shape[1:2], int(counts.max()), sabi.shape[-1]), pad, sabi.dtype)
        for at, (sequence, start, count) in enumerate(zip(inside, starts, counts, strict=True)):
            found[at, :, :count] = sabi[sequence if len(sabi) > 1 else 0, heads, start : start + count]
        return _below(found, columns, pad)

    def given(self, array: ndarray, keys: bool = False) -> ndarray:
        """An array in the layout of the call."""
        if self.problem.layout != "TND":
            return array
        return (array[0, :, self.keys] if keys else array[0]).swapaxes(0, 1)


def _below(lists: ndarray, columns: int, pad: int) -> ndarray:
    """Lists without the columns that only longer sequences have. The sequences of this call have no keys in these columns, and the
    call would refuse them."""
    padded = lists == pad if pad > 0 else lists < 0
    kept = ~np.logical_or.accumulate(padded, axis=-1) & (lists < columns)
    if (kept | padded).all():
        return lists
    order = np.argsort(~kept, axis=-1, kind="stable")
    return np.where(np.take_along_axis(kept, order, axis=-1), np.take_along_axis(lists, order, axis=-1), pad).astype(lists.dtype)
