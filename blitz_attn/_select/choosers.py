"""Choosers and budgets, in the form that callers give and in the form that the core takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays
from .._sabi.lists import two_integers
from .._sentences import shown

__all__ = ["Antidiagonal", "Pooled", "SampledRows", "VerticalSlash"]

_POOL = 8


class Pooled(NamedTuple):
    """Scores from means and ranges of a few neighbouring tokens.

    Each group of `pool` queries becomes one row, the mean of these queries. Each group of `pool` keys has the mean of these keys and,
    channel by channel, their largest and smallest element. A row i of pooled queries and a group j of pooled keys score ``scale`` times

    - ``qmean_i . kmean_j`` for ``term="mean"``,
    - ``max(qmean_i, 0) . kmax_j + min(qmean_i, 0) . kmin_j``, an upper bound of the product with any key of the group, for ``"bound"``,
    - the mean of the two for ``"both"``.

    A softmax over the groups that the row sees, summed over the groups of a key block, is the row's share of that block. A block's
    score is the largest or the mean of these shares over the rows of the block of queries.

    With bfloat16 inputs, means are rounded to bfloat16, and so are the two vectors of a group from which the bound is computed: the factor
    of ``qmean``, which is ``(kmax + kmin) / 2`` (for ``"both"`` the mean of this and ``kmean``), and the factor of ``|qmean|``, which is
    ``(kmax - kmin) / 2`` (for ``"both"`` half of it).

    Attributes
    ----------
    pool : int or (int, int)
        Number of queries, and of keys, that are pooled to one. Each must divide the block's size.
    term : {"both", "mean", "bound"}
        The formula of the scores.
    over : {"largest", "mean"}
        How the rows of a block of queries are combined.

    Notes
    -----
    The cost relative to dense attention's arithmetic is about ``1 / pool**2`` (half of it for ``term="mean"``).
    """

    pool: int | tuple[int, int] = _POOL
    term: str = "both"
    over: str = "largest"


class Antidiagonal(NamedTuple):
    """Scores from sums along antidiagonals, as in XAttention.

    Queries and keys are cut into groups of `stride` tokens; a group of queries, taken backwards, and a group of keys score the sum of their
    `stride` products, times ``scale / stride``. From these scores, a softmax and shares follow as in `Pooled`.

    Attributes
    ----------
    stride : int
        Number of tokens of a group. It must divide both sizes of the block.
    over : {"mean", "largest"}
        How the rows of a block of queries are combined.

    Notes
    -----
    The cost relative to dense attention's arithmetic is about ``1 / (2 * stride)``.
    """

    stride: int = 16
    over: str = "mean"


class SampledRows(NamedTuple):
    """Scores from some queries of each block against all keys, exactly.

    Attributes
    ----------
    rows : int
        How many queries of a block are sampled: the last query of each of `rows` equal parts. The number must divide the block's queries.
    over : {"largest", "mean"}
        How the sampled queries are combined.

    Notes
    -----
    The cost relative to dense attention's arithmetic is about ``rows / (2 * block_shape[0])``.
    """

    rows: int = 8
    over: str = "largest"


class VerticalSlash(NamedTuple):
    """Scores from the columns of keys and the diagonals that the last queries of a sequence attend to, as in MInference.

    The softmax of the last `rows` queries, averaged over them, gives each key a mass and each distance between query and key a
    mass. A block scores the mass of its keys plus, averaged over its queries, the mass of the distances to its keys.

    Attributes
    ----------
    rows : int
        How many queries at the end of each sequence are looked at. Shorter sequences use all of their queries.

    Notes
    -----
    The cost relative to dense attention's arithmetic is about ``rows / Sq``: each of these queries is multiplied with all keys twice, first
    to find its log-sum-exp and then its weights. In causal calls, the cost is about ``2 * rows / Sq``, because dense attention then has
    half the arithmetic.
    """

    rows: int = 64


CHOOSERS = {"pooled": Pooled(), "antidiagonal": Antidiagonal(), "sampled_rows": SampledRows(), "vertical_slash": VerticalSlash()}
KINDS: dict[str, Any] = {name: type(chooser) for name, chooser in CHOOSERS.items()}
BUDGETS = ("density", "top_p", "threshold", "top_k")


def fields_of(chooser: Any) -> dict[str, Any]:
    """A chooser as a dict that JSON can hold: its name as ``"kind"``, and its attributes."""
    for name, kind in KINDS.items():
        if isinstance(chooser, kind):
            return {"kind": name} | chooser._asdict()
    raise TypeError(f"chooser: expected Pooled, Antidiagonal, SampledRows or VerticalSlash, got {type(chooser).__name__}")


def chooser_of(fields: Mapping[str, Any]) -> Any:
    """The chooser whose `fields_of` is `fields`, even after JSON has turned its tuples into lists."""
    rest = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items() if name != "kind"}
    return KINDS[fields["kind"]](**rest)


def _pair(x: Any, name: str) -> tuple[int, int]:
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ValueError(f"{name}: expected a number of tokens or a pair of them, got {shown(x)}")
        return _arrays.integer(x[0], name), _arrays.integer(x[1], name)
    number = _arrays.integer(x, name)
    return number, number


def chooser_for(chooser: Any, block_shape: Any) -> Any:
    """A chooser unchanged, or the default chooser of a name, with smaller sizes where the default sizes do not divide the block."""
    if not isinstance(chooser, str):
        return chooser
    _arrays.choice(chooser, "chooser", tuple(CHOOSERS))
    made = CHOOSERS[chooser]
    try:
        block_q, block_kv = two_integers(block_shape, "block_shape", "two sizes of at least 1", 1)
    except (TypeError, ValueError):
        return made  # the operation refuses the shape
    if isinstance(made, Pooled):
        rows, keys = math.gcd(_POOL, block_q), math.gcd(_POOL, block_kv)
        return made._replace(pool=rows if rows == keys else (rows, keys))
    if isinstance(made, Antidiagonal):
        return made._replace(stride=math.gcd(made.stride, block_q, block_kv))
    return made._replace(rows=math.gcd(made.rows, block_q)) if isinstance(made, SampledRows) else made


def rules_of(chooser: Any, block_shape: Any = (64, 64)) -> tuple[str, int, int, str, bool]:
    """A chooser as the core takes it: its name, two sizes, a term, and whether a block's score is the largest of its rows instead of their
    mean."""
    chooser = chooser_for(chooser, block_shape)
    if isinstance(chooser, VerticalSlash):
        return "vertical_slash", _arrays.integer(chooser.rows, "rows"), 1, "mean", False
    if not isinstance(chooser, (Pooled, Antidiagonal, SampledRows)):
        kind = type(chooser).__name__
        choosers = "an instance of Pooled, Antidiagonal, SampledRows or VerticalSlash, or the name of one"
        raise TypeError(f"chooser: expected {choosers}, got {kind}")
    largest = _arrays.choice(chooser.over, "over", ("largest", "mean")) == "largest"
    if isinstance(chooser, Pooled):
        return "pooled", *_pair(chooser.pool, "pool"), _arrays.choice(chooser.term, "term", ("both", "mean", "bound")), largest
    if isinstance(chooser, Antidiagonal):
        stride = _arrays.integer(chooser.stride, "stride")
        return "antidiagonal", stride, stride, "mean", largest
    return "sampled_rows", _arrays.integer(chooser.rows, "rows"), 1, "mean", largest


def budget_of(**given: Any) -> tuple[str, np.ndarray]:
    """The one budget that is given: its name, and its numbers, which are one in all or one per head."""
    named = [name for name in BUDGETS if given[name] is not None]
    if len(named) != 1:
        raise ValueError(f"density, top_p, threshold, top_k: expected exactly one of them, got {' and '.join(named) or 'none'}")
    name = named[0]
    value = given[name]
    if hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
        numbers = _arrays.integers(value, name) if name == "top_k" else _arrays.array(value, name, "numbers")
        if numbers.dtype.kind not in "fiu":
            raise TypeError(f"{name}: expected numbers, got {numbers.dtype}")
        if numbers.ndim > 1:
            raise ValueError(f"{name}: expected a number, or one per head, got shape {numbers.shape}")
        return name, np.array(numbers, np.float64).reshape(-1)
    return name, np.array([_arrays.integer(value, name) if name == "top_k" else _arrays.number(value, name)], np.float64)
