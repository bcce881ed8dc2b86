"""A rule for each head, chosen by the share of the softmax mass that it keeps. Public through `blitz_attn.video`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import _arrays
from .._block_sparse.call import block_sparse_attention
from .._float_mode import in_usual_mode
from .._names import Layout
from .._sabi.lists import at_least_one, filled
from .._select.options import JudgingOptions
from .._select.quality import narrow, recall_of
from .lists import BlockGrid
from .order import TokenOrder, checked_arrays
from .rules import Rule, rules_of

if TYPE_CHECKING:
    from .._types import Array, DType, Integers

__all__ = ["choose_rules"]


@in_usual_mode
def _best(kept: list[np.ndarray], counts: np.ndarray) -> list[int]:
    """For each head, the rule that keeps the most mass, and of several such rules the first. `kept` has the masses, (B, H, queries), of
    each rule; `counts`, which broadcasts to them, says which queries count. The counted queries are the same for all rules, so that sums
    compare like means."""
    return np.stack([np.where(counts, mass, 0).sum(axis=(0, 2)) for mass in kept]).argmax(axis=0).tolist()


def choose_rules(
    q: Array,
    k: Array,
    order: TokenOrder,
    rules: Sequence[Rule],
    block_shape: Sequence[int] = (64, 64),
    *,
    sampled_rows: int = 64,
    seed: int = 0,
    dense_frames: int = 0,
    dense_tokens: Integers | None = None,
    scale: float | None = None,
    layout: Layout = "BNSD",
    kv_lens: Integers | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    dtype: DType | None = None,
    num_threads: int | None = None,
) -> list[int]:
    """For each head, the rule whose list keeps the most softmax mass of sampled queries.

    A query's share is ``exp(lse - lse_dense)``, where `lse` is its log-sum-exp over the blocks that its row lists, and `lse_dense` over all
    valid keys. A rule keeps the mean of these shares over the sampled queries and the batch. Queries in rows of blocks that are dense under
    every rule, and queries that are padding in all batch entries, are drawn only if there are no others.

    Parameters
    ----------
    q, k : array
        Queries and keys of one layer, in the order of `order` (`TokenOrder.permute`), as `block_sparse_attention` takes them.
    order : TokenOrder
        The order of the tokens.
    rules : sequence of Neighbourhood, SlidingTiles or Radial
        The rules to choose from. A rule that lists more blocks keeps more: compare rules of about the same `density`.
    block_shape, dense_frames, dense_tokens
        As in `blocks`, for the lists with which attention will be called.
    sampled_rows : int
        How many queries are sampled, at least 1. If fewer may be drawn, all of these.
    seed : int
        Seed of the draw, from 0 on.
    scale, layout, num_heads, num_kv_heads, dtype
        As in `block_sparse_attention`. Layout TND has one sequence here.
    kv_lens : sequence of int, optional
        ``(B,)``: how many tokens of each batch entry are valid. The tokens after them are padding: as keys, they have no share of the
        softmax, and as queries, they do not count. Layout TND takes no `kv_lens`.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    list of int
        (H,): for each query head, the number of its rule in `rules`. Of rules that keep equally much, the first is chosen.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `blocks` and `block_sparse_attention` do, and for `sampled_rows` below 1, a negative seed, arrays with another number of tokens
        than `order`, or `kv_lens` with layout TND.

    References
    ----------
    H. Xi et al., "Sparse VideoGen: Accelerating Video Diffusion Transformers with Spatial-Temporal Sparsity", arXiv:2502.01776, which also
    samples 64 queries. There, the rule whose output has the least squared error is taken; here, the rule that keeps the most mass.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import video
    >>> order = video.cube_order(video.Geometry([(8, 8, 8)]), (2, 4, 4))
    >>> rng = np.random.default_rng(0)
    >>> q, k = (rng.standard_normal((1, 2, 512, 32), dtype=np.float32) for _ in range(2))
    >>> frames = np.repeat(np.eye(8, dtype=np.float32), 64, axis=0)  # the first head looks for its own frame
    >>> places = np.tile(np.eye(8, dtype=np.float32), (8, 8)).reshape(512, 8)  # the second one for its own column
    >>> for x in (q, k):
    ...     x[0, 0, :, :8], x[0, 1, :, :8] = 8 * frames, 8 * places
    >>> q, k = order.permute(q, k)
    >>> rules = [video.Neighbourhood.spatial(), video.Neighbourhood.temporal()]
    >>> chosen = video.choose_rules(q, k, order, rules, (32, 32))
    >>> chosen
    [0, 1]
    >>> video.blocks(order, [rules[n] for n in chosen], (32, 32)).shape
    (1, 2, 16, 4)
    """
    grid, rules = BlockGrid(order, block_shape, dense_frames, dense_tokens), rules_of(rules, "rules")
    most, seed = at_least_one(sampled_rows, "sampled_rows"), _arrays.integer(seed, "seed")
    if seed < 0:
        raise ValueError(f"seed: expected a number from 0 on, got {seed}")
    axis = checked_arrays({"q": q, "k": k}, layout, grid.tokens)
    lens = None if kv_lens is None else _arrays.integers(kv_lens, "kv_lens")
    if lens is not None and layout == "TND":
        raise ValueError("kv_lens: expected none with layout TND, whose only sequence has all tokens of the order, got some")
    q, k = _arrays.detached(q, k)  # a choice has no gradient
    sampled = _sample(grid, most, seed, grid.tokens if lens is None else int(lens.max(initial=0)))
    picked = _arrays.take(q, sampled, axis)
    cuts = ([0, len(sampled)], [0, grid.tokens]) if layout == "TND" else (None, None)
    own = {"block_shape": (1, grid.shape[1]), "kv_lens": lens, "cu_seqlens_q": cuts[0], "cu_seqlens_kv": cuts[1]}
    options = JudgingOptions.of(locals() | own)
    v, given = narrow(k, layout), vars(options)
    _, lse_of_all = block_sparse_attention(picked, k, v, return_lse=True, **given)  # this call refuses lengths that do not fit
    counts = np.ones((1, 1, 1), np.bool_) if lens is None else sampled < lens[:, None, None]
    kept = []
    for rule in rules:
        rows = list(grid.of_rows(rule, sampled // grid.shape[0]))
        lists = filled(np.array([len(row) for row in rows]), np.concatenate(rows), None)[None, None]
        _, lse = block_sparse_attention(picked, k, v, lists, return_lse=True, **given)
        kept.append(recall_of(lse, lse_of_all, len(sampled), 1, options))
    return _best(kept, counts)


def _sample(grid: BlockGrid, most: int, seed: int, longest: int) -> np.ndarray:
    """The positions of the sampled queries, in rising order. Queries from position `longest` on are padding in all batch entries. They are
    drawn only where no other query would tell the rules apart."""
    positions = np.arange(grid.tokens)
    telling = positions[~grid.dense_rows[positions // grid.shape[0]] & (positions < longest)]
    positions = telling if telling.size else positions
    return np.sort(np.random.default_rng(seed).choice(positions, min(most, len(positions)), replace=False))
