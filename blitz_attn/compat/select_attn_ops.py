"""The interface of upstream's ``select_attn_ops`` package: ``from blitz_attn.compat import select_attn_ops`` in place of ``import
select_attn_ops``.

The library's own functions have upstream's names, order of arguments and shapes; this module offers them under upstream's module name.
Tensors may be torch tensors or NumPy arrays. The notes of each function say in what it differs from upstream, such as the blocks that are
always selected.

>>> import numpy as np
>>> from blitz_attn.compat import select_attn_ops
>>> rng = np.random.default_rng(0)
>>> query, k_cache = rng.standard_normal((1, 8, 128)), rng.standard_normal((12, 128, 2, 128))
>>> block_tables, metadata_block_tables = np.arange(9)[None].astype(np.int32), np.array([[1]], np.int32)
>>> seq_lens = np.array([1100], np.int32)
>>> maxblocks, minblocks = np.zeros((2, 2, 128, 2, 128))
>>> select_attn_ops.quest_prefill_metadata(k_cache, block_tables, seq_lens, metadata_block_tables, maxblocks, minblocks)
>>> selected = select_attn_ops.quest_block_select_paged(query, maxblocks, minblocks, metadata_block_tables, seq_lens, 8)
>>> sorted(set(range(9)) - set(selected[0, 0].tolist())) != [], selected.shape
(True, (1, 2, 8))
"""

from ..quest import (
    quest_block_select_paged,
    quest_block_select_paged_in_out,
    quest_block_select_paged_in_out_w,
    quest_prefill_metadata,
)

__all__ = [
    "quest_block_select_paged",
    "quest_block_select_paged_in_out",
    "quest_block_select_paged_in_out_w",
    "quest_prefill_metadata",
]
