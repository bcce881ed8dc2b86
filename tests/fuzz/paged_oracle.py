"""Attention over paged caches, request by request in float64: gather the tokens, mask, softmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention_oracle import SMALL, growth, hiding, weight_error
from .checks import EPSILON


@dataclass
class Paged:
    """One problem. Caches are (pages, page_size, Hkv, dim): the float64 values that their elements and scales stand for."""

    dtype: str
    q: np.ndarray  # (T, H, D): the requests' queries one after the other
    q_lens: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: list[np.ndarray]  # of each request
    seq_lens: np.ndarray
    scale: float
    window: int | None
    sinks: np.ndarray | None
    softcap: float | None
    selected: list[list[np.ndarray]] | None  # [request][KV head or query head] logical blocks
    begin: np.ndarray | None = None  # token numbers of the first queries; None: the queries are the last tokens
    ranges: np.ndarray | None = None  # (T, 2): the run of tokens that each query sees instead of those up to itself
    mask: np.ndarray | None = None  # (B or 1, H or 1, queries or 1, tokens or 1): what is added to the scores; -inf hides a token
    slopes: np.ndarray | None = None  # (H,): what a token of distance takes from the score

    @property
    def real(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def tokens(self, cache: np.ndarray, b: int) -> np.ndarray:
        """(tokens, Hkv, ...) of a request."""
        t = np.arange(self.seq_lens[b])
        return cache[self.pages[b][t // cache.shape[1]], t % cache.shape[1]]

    def places(self, b: int) -> np.ndarray:
        """(queries, 1): the token numbers of a request's queries."""
        n = int(self.q_lens[b])
        return np.arange(n)[:, None] + (self.seq_lens[b] - n if self.begin is None else self.begin[b])

    def mask_of(self, b: int, head: int) -> np.ndarray:
        """(queries, tokens): what the mask adds."""
        n, tokens = int(self.q_lens[b]), int(self.seq_lens[b])
        if self.mask is None:
            return np.zeros((n, tokens))
        mask = hiding(self.mask[b % self.mask.shape[0], head % self.mask.shape[1]], self.dtype)
        mask = mask if mask.shape[0] == 1 else mask[:n]
        return np.broadcast_to(mask if mask.shape[1] == 1 else mask[:, :tokens], (n, tokens))

    def seen(self, b: int, head: int) -> np.ndarray:
        """Boolean (queries, tokens)."""
        shown = self.shown(b, head)
        return shown if self.mask is None else shown & ~np.isneginf(self.mask_of(b, head))

    def shown(self, b: int, head: int) -> np.ndarray:
        """Boolean (queries, tokens): what all but the mask shows."""
        n, size = int(self.q_lens[b]), self.k.shape[1]
        j, last = np.arange(self.seq_lens[b]), self.places(b)
        mask = j <= last
        if self.ranges is not None:
            end = int(np.cumsum(self.q_lens)[b])
            mask = (j >= self.ranges[end - n : end, :1]) & (j < self.ranges[end - n : end, 1:])
        if self.window is not None:
            mask = mask & (j >= last - self.window)
        if self.selected is not None:
            rows = self.selected[b]
            chosen = rows[head * len(rows) // self.q.shape[1]]
            mask = mask & np.isin(j // size, chosen)
        return mask


def attend(p: Paged) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, and the allowed errors of both). The bounds are those of `attention_oracle.forward`; a softcap adds a few roundings."""
    heads, dim, eps = p.q.shape[1], p.q.shape[2], EPSILON[p.real]
    out, lse = np.zeros((*p.q.shape[:2], p.v.shape[-1])), np.full(p.q.shape[:2], -np.inf)
    allowed_out, allowed_lse = np.zeros_like(out), np.zeros(p.q.shape[:2])
    ends = np.cumsum(p.q_lens)
    for b, end in enumerate(ends):
        rows = slice(end - p.q_lens[b], end)
        keys, values = p.tokens(p.k, b), p.tokens(p.v, b)
        for h in range(heads):
            g, slope = h * p.k.shape[2] // heads, 0.0 if p.slopes is None else p.slopes[h]
            q, k, v, mask = p.q[rows, h], keys[:, g], values[:, g], p.seen(b, h)
            k, v = np.where(mask.any(axis=0)[:, None], k, 0), np.where(mask.any(axis=0)[:, None], v, 0)
            scores = p.scale * (q @ k.T)
            norms = np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1).max(initial=0)
            error = eps * abs(p.scale) * (dim + 8) * norms
            if p.softcap:
                scores = p.softcap * np.tanh(scores / p.softcap)
                error = error + 16 * eps * np.abs(scores).max(axis=-1, initial=0)
            added, steps = (np.where(mask, x, 0) for x in (p.mask_of(b, h), slope * np.abs(p.places(b) - np.arange(p.seq_lens[b]))))
            scores = scores + added - steps
            top = np.max(np.where(mask, scores, -np.inf), axis=-1, initial=-np.inf if p.sinks is None else p.sinks[h])
            some = top > -np.inf
            shift = np.where(some, top, 0)
            w = np.exp(np.where(mask, scores - shift[:, None], -np.inf))
            total = w.sum(axis=-1) + (0 if p.sinks is None else np.exp(p.sinks[h] - shift))
            w /= np.where(some, total, 1)[:, None]
            with np.errstate(divide="ignore"):
                lse[rows, h] = np.where(some, np.log(total) + shift, -np.inf)
            out[rows, h] = w @ v
            relative, count = np.expm1(2 * error), mask.sum(axis=-1)
            share = 2 * (relative + weight_error(p.dtype)) + (count + 8) * eps
            allowed_out[rows, h] = share[:, None] * (w @ np.abs(v)) + 2 * EPSILON[p.dtype] * np.abs(w @ v) + SMALL + (2.0**-24 if p.dtype == "float16" else 0)
            lse_size = 4 * eps * (np.abs(shift) + np.abs(np.where(some, lse[rows, h], 0)))
            allowed_lse[rows, h] = relative + (2.0**-12 if p.dtype in ("float16", "bfloat16") else 8 * eps) + (count + 8) * eps + lse_size
            grown = growth(w, error, 6 * eps * (np.abs(added) + np.abs(steps)))
            allowed_out[rows, h] += grown @ np.abs(v) + grown.sum(axis=-1, keepdims=True) * (w @ np.abs(v))
            allowed_lse[rows, h] += grown.sum(axis=-1)
    return out, lse, allowed_out, allowed_lse
