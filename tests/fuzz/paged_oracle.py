"""Attention over paged caches: each request's tokens are gathered, and attended as in a call over whole arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention_oracle import Attention, forward


@dataclass
class Paged:
    """One problem. Caches (pages, page_size, Hkv, dim) hold the float64 values that the elements and scales stand for."""

    dtype: str
    q: np.ndarray  # (T, H, D): the queries of all requests, in order
    q_lens: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: list[np.ndarray]  # the pages of each request
    seq_lens: np.ndarray
    scale: float
    window: int | None
    sinks: np.ndarray | None
    softcap: float | None
    selected: list[list[np.ndarray]] | None  # [request or query][all heads, KV head or query head] logical blocks
    begin: np.ndarray | None = None  # token numbers of the first queries; None: the queries are the last tokens
    ranges: np.ndarray | None = None  # (T, 2): the run of tokens that each query sees, in place of all tokens up to itself
    mask: np.ndarray | None = None  # (B or 1, H or 1, queries or 1, tokens or 1): added to the scores; -inf hides a token
    slopes: np.ndarray | None = None  # (H,): subtracted from the score per token of distance
    selected_size: int | None = None  # tokens of a block if each query has a list; None: blocks are pages, and each request has a list

    @property
    def real(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def tokens(self, cache: np.ndarray, b: int) -> np.ndarray:
        """The tokens of a request from a cache, (tokens, Hkv, ...)."""
        t = np.arange(self.seq_lens[b])
        return cache[self.pages[b][t // cache.shape[1]], t % cache.shape[1]]

    def rows(self, b: int) -> slice:
        """The queries of a request."""
        end = int(np.cumsum(self.q_lens)[b])
        return slice(end - int(self.q_lens[b]), end)

    def request(self, b: int) -> Attention:
        """A request as a call over whole arrays."""
        size, rows, n, tokens = self.k.shape[1], self.rows(b), int(self.q_lens[b]), int(self.seq_lens[b])
        mask, blocks = self.mask, None
        if mask is not None:
            mask = mask[b % len(mask)][None]
            mask = mask if mask.shape[2] == 1 else mask[:, :, :n]
            mask = mask if mask.shape[3] == 1 else mask[..., :tokens]
        shape = max(n, 1), size
        if self.selected is not None:
            shape = shape if self.selected_size is None else (1, self.selected_size)
            lists = [self.selected[b]] if self.selected_size is None else self.selected[rows]
            columns = np.arange(-(-tokens // shape[1]))
            heads = len(self.selected[0]) if self.selected else 1
            blocks = np.array([[np.isin(columns, x) for x in row] for row in lists], np.bool_)
            blocks = blocks.reshape(len(lists), heads, len(columns)).swapaxes(0, 1)[None]
        return Attention(
            self.dtype, *(x.swapaxes(0, 1)[None] for x in (self.q[rows], self.tokens(self.k, b), self.tokens(self.v, b))),
            np.array([n]), np.array([tokens]), blocks, shape, self.scale, self.ranges is None,
            None if self.window is None else (self.window, -1), None if self.begin is None else self.begin[b : b + 1], softcap=self.softcap,
            sinks=self.sinks, ranges=None if self.ranges is None else self.ranges[rows][None], mask=mask, slopes=self.slopes,
        )  # fmt: skip


def attend(p: Paged) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, and the allowed errors of both)."""
    shapes = (*p.q.shape[:2], p.v.shape[-1]), p.q.shape[:2]
    results = [np.zeros(shape) for shape in (*shapes, *shapes)]
    for b in range(len(p.q_lens)):
        f = forward(p.request(b))
        for whole, part in zip(results, (f.out, f.lse, f.allowed_out, f.allowed_lse), strict=True):
            whole[p.rows(b)] = part[0].swapaxes(0, 1)
    return tuple(results)
