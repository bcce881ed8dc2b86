"""One number of blocks for a whole model, shared out to the layers and heads where blocks lower the model's loss most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .. import _arrays
from .._block_sparse.call import block_sparse_attention
from .._float_mode import in_usual_mode
from .._sabi.lists import two_integers
from .._sentences import number_shown
from .choosers import Antidiagonal, Pooled, SampledRows, chooser_for, rules_of
from .prefill import select_blocks_prefill
from .profile import Profile, captures_of, refuse_unknown
from .quality import of_heads

__all__ = ["allocate"]

_MASSES = (0.5, 0.75, 0.88, 0.94, 0.97, 0.985, 0.993, 0.997, 0.999, 0.9997)


def allocate(
    layers: Iterable[Any],
    *,
    density: float,
    chooser: Any = "pooled",
    block_shape: tuple[int, int] = (64, 64),
    masses: Sequence[float] = _MASSES,
    **rules: Any,
) -> Profile:
    """Find the mass that each layer and head must keep so that the model loses the least quality at one density.

    An error costs the model more in some layers and heads than in others. The cost of a list is estimated as the sum over queries of
    ``(dout . (out - out_dense))**2``, where dout is the gradient of the model's loss with respect to the attention output.

    Parameters
    ----------
    layers : iterable of sequence of (q, k, v, dout)
        For each layer the captures of some texts: queries, keys and values as `block_sparse_attention` takes them, and the gradient
        of the model's loss with respect to the dense output, shaped as the output. Pass a generator to keep only one layer in memory.
    density : float
        Share of the blocks that all layers and heads together are to keep in the captures, above 0 and at most 1. The result exceeds this
        share if even the least of `masses` keeps more.
    chooser : str or Pooled, Antidiagonal, SampledRows, VerticalSlash, or list of them
        How blocks are scored: see `select_blocks_prefill`. From a list, each layer gets the chooser with the lowest cost. The arithmetic of
        choosing then counts, too, as a number of blocks (that of `VerticalSlash` counts as 0).
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys.
    masses : sequence of float
        The values of `top_p` that are tried, rising, above 0 and at most 1.
    **rules
        scale, layout, causal, window, num_heads, num_kv_heads, kv_ranges, dtype and num_threads of the calls: see
        `select_blocks_prefill`. Captures are whole sequences, and all captures have the same `kv_ranges`.

    Returns
    -------
    Profile
        A profile with ``budget="top_p"``, ``measure="loss"`` and the density as its target.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or out of range, no layer, captures that differ in heads, KV heads or head dim, or a dout without the
        output's shape.

    See Also
    --------
    calibrate : finds budgets with which every head keeps the same mass or has the same error.
    select_blocks_prefill : takes a profile's options: ``**profile.options(layer, heads=..., kv_heads=..., head_dim=...)``.

    Notes
    -----
    If the labels of the loss are drawn from the model's own predictions, half of the estimate equals, to second order, the divergence
    between the predictions of the dense and the sparse model (Fisher information). This holds for heads taken one by one. One price per
    block, the same for all heads, decides which mass each head keeps; the lowest price that meets the density is found. Each capture of a
    layer takes one dense call, one choice of all blocks and, for each chooser, ``len(masses)`` choices and as many sparse calls. Texts for
    which a result is reported should not be among the captures.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import select
    >>> rng = np.random.default_rng(0)
    >>> layers = [[[rng.standard_normal((1, 2, 256, 16), dtype=np.float32) for _ in range(4)]] for _ in range(2)]
    >>> for layer, weight in zip(layers, (1, 100)):
    ...     layer[0][3] *= weight  # errors of the second layer cost the model more
    >>> profile = select.allocate(layers, density=0.8, block_shape=(16, 16), causal=True)
    >>> bool(np.mean(profile.numbers[1]) > np.mean(profile.numbers[0]))
    True
    """
    refuse_unknown("allocate", rules)
    density = _arrays.number(density, "density")
    if not 0 < density <= 1:
        raise ValueError(f"density: expected a number above 0 and at most 1, got {number_shown(density)}")
    tried = _arrays.array(masses, "masses", "a sequence of numbers")
    if tried.ndim != 1 or tried.dtype.kind not in "fiu":
        kind = type(masses).__name__ if tried.ndim == 0 else f"{tried.dtype} of shape {tried.shape}"
        raise TypeError(f"masses: expected a sequence of numbers, got {kind}")
    tried = tried.astype(np.float64)
    if not tried.size or not (tried[0] > 0 and tried[-1] <= 1) or not (np.diff(tried) > 0).all():
        raise ValueError(f"masses: expected rising numbers above 0 and at most 1, got {tried.tolist()}")
    choosers = chooser if isinstance(chooser, list) else [chooser]
    for x in choosers:
        rules_of(x)
    if not choosers:
        raise ValueError("chooser: expected at least one, got an empty list")
    block_q, block_kv = two_integers(block_shape, "block_shape", "two sizes of at least 1", 1)
    choosers = [chooser_for(x, (block_q, block_kv)) for x in choosers]
    points = []
    for cases, shape in captures_of(layers, ("q", "k", "v", "dout"), rules):
        points.append(_costs_of_layer(cases, shape[0], tried, choosers, (block_q, block_kv), rules))
    which, chosen = _allocated(np.array(points), choosers, block_q, density)
    numbers = tuple(map(tuple, tried[chosen].tolist()))
    by_layer = tuple(choosers[i] for i in which)
    return Profile(*shape, by_layer if len(choosers) > 1 else choosers[0], (block_q, block_kv), "top_p", numbers, "loss", density)


@in_usual_mode
def _costs_of_layer(
    cases: list[Any], heads: int, masses: np.ndarray, choosers: list[Any], block: tuple[int, int], rules: dict[str, Any]
) -> np.ndarray:  # fmt: skip
    """The sum of `_costs` over the captures of a layer."""
    return np.sum([_costs(x, heads, masses, choosers, block, rules) for x in cases], axis=0)


@in_usual_mode
def _allocated(points: np.ndarray, choosers: list[Any], block_q: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """The result of `_shared` for the costs `points` of all layers, (layers, choosers, 3, heads, masses)."""
    kept, cost, every = np.moveaxis(points, (2, 0), (0, 2))  # each (choosers, layers, heads, masses)
    every = every[..., 0]
    choosing = every.sum(axis=2) * np.array([_work(x, block_q) for x in choosers])[:, None]
    return _shared(kept, cost, choosing, density * every[0].sum())


def _costs(case: Any, heads: int, masses: np.ndarray, choosers: list[Any], block: tuple[int, int], rules: dict[str, Any]) -> np.ndarray:
    """(choosers, 3, heads, masses) of a capture: the number of blocks kept under each mass, the cost of this list, and the number of all
    visible blocks."""
    q, k, v, dout = _arrays.detached(*case)
    layout, dtype = rules.get("layout", "BNSD"), rules.get("dtype")
    rules = rules | {"block_shape": block}
    dense = of_heads(block_sparse_attention(q, k, v, **rules), layout, heads, dtype)
    slope = of_heads(dout, layout, heads, dtype)
    if slope.shape != dense.shape:
        raise ValueError(f"layers: expected dout of the output's shape, as (B, H, S, D) {dense.shape}, got {slope.shape}")
    found = np.empty((len(choosers), 3, heads, masses.size))
    found[:, 2] = (np.asarray(select_blocks_prefill(q, k, density=1, **rules)) >= 0).sum(axis=(0, 2, 3))[:, None]
    for one, chooser in zip(found, choosers, strict=True):
        for i, mass in enumerate(masses):
            sabi = select_blocks_prefill(q, k, chooser=chooser, top_p=mass, **rules)
            difference = of_heads(block_sparse_attention(q, k, v, sabi, **rules), layout, heads, dtype) - dense
            one[0, :, i] = (np.asarray(sabi) >= 0).sum(axis=(0, 2, 3))
            one[1, :, i] = (np.einsum("bhsd,bhsd->bhs", slope, difference) ** 2).sum(axis=(0, 2))
    return found


def _shared(kept: np.ndarray, cost: np.ndarray, choosing: np.ndarray, most: float) -> tuple[np.ndarray, np.ndarray]:
    """The chooser of each layer, and the points (layers, heads) of its heads, that cost least with at most `most` blocks.

    `kept` and `cost` are (choosers, layers, heads, points), `choosing` (choosers, layers) is each chooser's own work in blocks. A price
    per block decides: the lowest price with at most `most` blocks, or the highest price where none has so few.
    """

    def at(price: float) -> tuple[np.ndarray, np.ndarray, float]:
        worth = cost + price * kept
        points = worth.argmin(axis=3)
        chooser = (worth.min(axis=3).sum(axis=2) + price * choosing).argmin(axis=0)
        chosen = points[chooser, np.arange(len(chooser))]
        blocks = np.take_along_axis(kept, points[..., None], 3)[..., 0].sum(axis=2)[chooser, np.arange(len(chooser))].sum()
        return chooser, chosen, blocks

    # At the highest price, the points with the fewest blocks win whatever they cost; at the lowest price, blocks are free.
    low, high = 0.0, 2 * float(cost.max()) + 1.0
    best = at(high)
    if at(low)[2] <= most:
        return at(low)[:2]
    for _ in range(200):
        middle = (low + high) / 2 if low > 0 else high / 1024
        found = at(middle)
        if found[2] <= most:
            best, high = found, middle
        else:
            low = middle
    return best[:2]


def _work(chooser: Any, block_q: int) -> float:
    """The arithmetic of choosing, as a share of dense attention's. It is 0 for `VerticalSlash`, whose share falls as sequences get
    longer."""
    if isinstance(chooser, Pooled):
        rows, keys = chooser.pool if isinstance(chooser.pool, (tuple, list)) else (chooser.pool, chooser.pool)
        return (0.5 if chooser.term == "mean" else 1.0) / (rows * keys)
    if isinstance(chooser, Antidiagonal):
        return 0.5 / chooser.stride
    return 0.5 * chooser.rows / block_q if isinstance(chooser, SampledRows) else 0.0
