"""Choosers of blocks for prefill: from queries and keys to a block list that `block_sparse_attention` takes.

A chooser scores every block of keys for every block of queries at a small share of attention's own cost; a budget turns scores into lists.
A chooser is a `Pooled`, `Antidiagonal`, `VerticalSlash` or `SampledRows`, the name of one of them, which stands for its defaults, or a
function of the caller. A budget is a density, a mass to keep (`top_p`), a least share (`threshold`) or a number of blocks (`top_k`).
`scores` and `list_from_scores` are the two steps by themselves.

>>> import numpy as np
>>> import blitz_attn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, 512, 64), dtype=np.float32) for _ in range(3))
>>> sabi = blitz_attn.select_blocks_prefill(q, k, top_p=0.9, causal=True)
>>> out = blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(64, 64), causal=True)
"""

from ._select.allocation import allocate
from ._select.choosers import Antidiagonal, Pooled, SampledRows, VerticalSlash
from ._select.prefill import list_from_scores, scores, select_and_attend_prefill, select_blocks_prefill
from ._select.profile import Profile, calibrate
from ._select.quality import output_error, recall
from ._select.tokens import select_tokens

__all__ = [
    "Antidiagonal",
    "Pooled",
    "Profile",
    "SampledRows",
    "VerticalSlash",
    "allocate",
    "calibrate",
    "list_from_scores",
    "output_error",
    "recall",
    "scores",
    "select_and_attend_prefill",
    "select_blocks_prefill",
    "select_tokens",
]
