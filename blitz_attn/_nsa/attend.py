"""A branch of native sparse attention: the keys that its queries see, and the core's operations over these keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._sentences import rename
from .rules import CMP_GROUP, Rules
from .sequences import Sequences, block_count


class Common(NamedTuple):
    """Values that all parts of a call share."""

    kind: str  # the dtype of the arrays
    scale: float  # factor of the products of queries and keys
    threads: int | None


@dataclass(frozen=True, eq=False)
class Branch:
    """The keys that the queries of a branch see."""

    causal: bool
    sequences: Sequences
    lists: np.ndarray | None = None  # block lists
    block_shape: tuple[int, int] = (128, 128)
    window: tuple[int, int] | None = None
    size: int = 0  # tokens of a compressed key
    stride: int = 0  # tokens from one compressed key's first token to the next key's first token; 0: keys are tokens
    last: int = 0  # tokens from a compressed key's first token to the first query that sees it
    names: Mapping[str, str] = field(default_factory=dict)  # from the core's names of arguments to the caller's, for errors


def compressed_branch(rules: Rules, sequences: Sequences, groups: np.ndarray | None = None) -> Branch:
    """All compressed keys, or the groups of them that are listed."""
    names = {"k": "k_cmp", "v": "v_cmp", "sabi": "cmp_block_indices"}
    every = Branch(rules.causal, sequences, size=rules.size, stride=rules.stride, last=rules.last, names=names)
    return every if groups is None else replace(every, lists=groups, block_shape=(rules.tile, CMP_GROUP))


def selected_branch(rules: Rules, sequences: Sequences, lists: np.ndarray | None) -> Branch:
    """The tokens of listed blocks."""
    shape = (rules.tile, rules.select)
    names = {"sabi": "block_indices"}
    return Branch(rules.causal, sequences, lists=lists, block_shape=shape, names=names)


def window_branch(size: int, causal: bool, sequences: Sequences) -> Branch:
    """The `size` tokens that end with the query itself. If not `causal`: the ``size // 2`` tokens before the query, as many after it, and
    itself."""
    return Branch(causal, sequences, window=(size - 1, 0) if causal else (size // 2, size // 2))


def _arguments(common: Common, branch: Branch) -> dict[str, Any]:
    """The arguments by which the core's two operations know which keys are seen."""
    at = branch.sequences
    lens = at.kv_lens
    if lens is not None and branch.stride:
        lens = block_count(lens, branch.size, branch.stride)
    return {
        "sabi": branch.lists,
        "block_shape": branch.block_shape,
        "scale": common.scale,
        "layout": "BSND" if at.queries is None else "TND",
        "causal": branch.causal,
        "window": branch.window,
        "kv_lens": lens,
        "cu_seqlens_q": at.queries,
        "cu_seqlens_kv": at.blocks if branch.stride else at.tokens,
        "dtype": common.kind,
        "num_threads": common.threads,
        "cu_rows": None if branch.lists is None else at.rows,
        "routed": branch.lists is not None,
        "key_stride": branch.stride,
        "key_last": branch.last,
    }


def _by_head(lse: np.ndarray, branch: Branch) -> np.ndarray:
    """The log-sum-exp with the core's order of axes: heads before tokens where there is a batch axis."""
    return lse.swapaxes(1, 2) if branch.sequences.queries is None else lse


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray | None, common: Common, branch: Branch
) -> None:  # fmt: skip
    """Fills `out`, and `lse` of shape (B, N, H) or (T, H) where it is given. The results of some of a sequence's queries are bit-identical
    to their results in a call with all queries of the sequence."""
    lse_out = None if lse is None else _by_head(lse, branch)
    try:
        _core.block_sparse_attention(
            np.empty, q, k, v, **_arguments(common, branch), return_lse=lse is not None, out=out, lse_out=lse_out,
            q_begin=branch.sequences.begin, q_total=branch.sequences.lengths,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, branch.names)
        raise


def attend_backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, grads: tuple[np.ndarray, ...],
    common: Common, branch: Branch, accumulate: bool = False,
) -> None:  # fmt: skip
    """The gradient of `attend`: fills the three arrays of `grads`. With `accumulate`, the gradients of `k` and `v` are added to the second
    and third array, which have the dtype of sums."""
    dq, dk, dv = grads
    try:
        _core.block_sparse_attention_backward(
            np.empty, q, k, v, **_arguments(common, branch), dout=dout, out=out, lse=_by_head(lse, branch), dq=dq, dk=dk, dv=dv, q_begin=0,
            accumulate=accumulate,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, branch.names)
        raise
