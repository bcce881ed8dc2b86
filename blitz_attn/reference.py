"""Slow float64 NumPy twins of the public operations: the oracle of the tests and the specification in code.

Every function here has the name and the signature of the operation it mirrors and returns float64 arrays. Nothing but the
signatures and the reading of some arguments is shared with the library, so that the two cannot be wrong together. Arguments
are those that the operation takes: of wrong ones, those are refused in a sentence that would otherwise have a wrong result,
and others fail with an error of NumPy. Score matrices are built a strip of query rows at a time: memory stays bounded for
sequences of tens of thousands of tokens.

`dense_same_precision`, `dense_same_precision_backward`, `paged_same_precision` and `nsa_same_precision` are the yardsticks of the
error rule: the same attention as a plain array program would compute it in the precision of the inputs.
"""

from ._reference.backward import block_sparse_attention_backward, dense_same_precision_backward
from ._reference.common import round_to, to_float64
from ._reference.dense import block_sparse_attention, dense_same_precision, merge_states, merge_states_n, merge_states_tree
from ._reference.nsa import NSAContext, NSAGradients, nsa, nsa_backward, nsa_same_precision
from ._reference.nsa_parts import (
    compress_kv,
    compress_kv_backward,
    compressed_attention,
    compressed_attention_backward,
    compute_gates,
    gate_and_combine,
    gating_backward,
    score_and_select_blocks,
    score_blocks,
    selected_attention,
    selected_attention_backward,
    window_attention,
    window_attention_backward,
)
from ._reference.paged import dequantize_kv, paged_attention, paged_same_precision, paged_select_attention, quantize_kv
from ._reference.quest import (
    append_paged_kv,
    quest_block_select_paged,
    quest_block_select_paged_in_out,
    quest_block_select_paged_in_out_w,
    quest_prefill_metadata,
    select_and_attend,
    select_blocks,
)
from ._reference.select import select_and_attend_prefill, select_blocks_prefill

__all__ = [
    "NSAContext",
    "NSAGradients",
    "append_paged_kv",
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "compress_kv",
    "compress_kv_backward",
    "compressed_attention",
    "compressed_attention_backward",
    "compute_gates",
    "dense_same_precision",
    "dense_same_precision_backward",
    "dequantize_kv",
    "gate_and_combine",
    "gating_backward",
    "merge_states",
    "merge_states_n",
    "merge_states_tree",
    "nsa",
    "nsa_backward",
    "nsa_same_precision",
    "paged_attention",
    "paged_same_precision",
    "paged_select_attention",
    "quantize_kv",
    "quest_block_select_paged",
    "quest_block_select_paged_in_out",
    "quest_block_select_paged_in_out_w",
    "quest_prefill_metadata",
    "round_to",
    "score_and_select_blocks",
    "score_blocks",
    "select_and_attend",
    "select_and_attend_prefill",
    "select_blocks",
    "select_blocks_prefill",
    "selected_attention",
    "selected_attention_backward",
    "to_float64",
    "window_attention",
    "window_attention_backward",
]
