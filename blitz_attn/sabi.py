"""Block lists (sabi: sparse attention block indices): build, convert, combine, measure and show them.

A block list is an integer array (B or 1, H or Hkv or 1, R, W). Each of its R = ceil(s_q / block_q) rows has the column numbers of the
blocks of keys that one block of queries attends to. A row ends at its first pad, which is 65535 in uint16 and any negative number in the
signed types. Builders return int32 lists (1, 1, R, W), with larger first axes where they are given heads or batches. Columns rise in each
row, and pads are -1. Lists are coarser than token rules (causal, window, lengths): a builder lists every block in which its rule leaves at
least one token. Pass the same rule to the attention call as well: it then hides exactly the other tokens of these blocks.

Lists that are made for a block shape know this shape (`BlockList`), so that attention needs no `block_shape` with them. The first one or
two of a list's four axes may be missing: they then count as 1, as in NumPy's broadcasting.

``dtype="uint16"`` halves the memory of lists over at most 65535 columns. When such a list is cast to a wider type, its pads stay 65535,
which is a column and not a pad in the wider type.

`causal`, `sliding_window`, `sink_local` and `document` make lists of at most 2**28 entries: the number of rows times the number of blocks
in the fullest row. They can therefore list small blocks of long sequences if rows are short. The other builders of lists hold a whole grid
of rows and columns for each head, and this grid may have at most 2**28 blocks. `from_function`, `picture`, `to_num_idx` and the functions
that combine lists or convert them to masks hold the grids of all heads at once, with at most 2**28 blocks in all. `to_csr`, `from_csr` and
`from_num_idx` hold no grid.
"""

from ._sabi.block_list import BlockList
from ._sabi.build import causal, dense, dilated, document, document_ranges, sink_local, sliding_window, vertical_slash
from ._sabi.check import check
from ._sabi.combine import coarsen, complement, difference, intersection, refine, transpose, union
from ._sabi.convert import (
    from_block_mask,
    from_csr,
    from_num_idx,
    from_token_mask,
    kv_ranges_from_token_mask,
    to_block_mask,
    to_csr,
    to_num_idx,
    to_token_mask,
)
from ._sabi.frame import FramePlan, FrameWidths, frame_plan, random_with_frame
from ._sabi.function import FunctionMask, from_function
from ._sabi.measure import balance, counts, density, picture, sparsity

__all__ = [
    "BlockList",
    "FramePlan",
    "FrameWidths",
    "FunctionMask",
    "balance",
    "causal",
    "check",
    "coarsen",
    "complement",
    "counts",
    "dense",
    "density",
    "difference",
    "dilated",
    "document",
    "document_ranges",
    "frame_plan",
    "from_block_mask",
    "from_csr",
    "from_function",
    "from_num_idx",
    "from_token_mask",
    "intersection",
    "kv_ranges_from_token_mask",
    "picture",
    "random_with_frame",
    "refine",
    "sink_local",
    "sliding_window",
    "sparsity",
    "to_block_mask",
    "to_csr",
    "to_num_idx",
    "to_token_mask",
    "transpose",
    "union",
    "vertical_slash",
]
