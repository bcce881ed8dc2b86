"""The options that functions take by name, as type checkers see them: TypedDicts for the ``**options: Unpack[...]`` of overloads.

An option is written down in such a TypedDict and, with its default, in the signature of its function; tests/test_types.py compares the
two. Docstrings name the functions that take all options of a TypedDict. The TypedDicts of `block_sparse_attention` and of `paged_attention`
are in the files of these functions.
"""

from __future__ import annotations

from typing import Any, TypedDict

from ._block_sparse.call import AttentionRules, Outputs, Places, Slice
from ._names import KVLayout, Method
from ._paged.call import PagedInputs, PagedOutputs, PagedRules
from ._types import Array, ArrayLike, DType, Integers, IntOrIntegers, Numbers, Scale

# ---- Options of attention over sequences --------------------------------------------------------------------------


class TorchOwnOptions(TypedDict, total=False):
    """`blitz_attn.integrations.torch.scaled_dot_product_attention`, without the options that torch's own function has."""

    sabi: Array | None
    block_shape: tuple[int, int] | None
    window: tuple[int, int] | None
    q_lens: Integers | None
    kv_lens: Integers | None
    num_threads: int | None


class JaxOwnOptions(TypedDict, total=False):
    """`blitz_attn.integrations.jax.dot_product_attention`."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Integers | None
    key_value_seq_lengths: Integers | None
    local_window_size: int | tuple[int, int] | None
    sabi: Array | None
    block_shape: tuple[int, int] | None
    num_threads: int | None


# ---- Options of choosing blocks for prefill -------------------------------------------------------------------------


class Budget(TypedDict, total=False):
    """The number of blocks that are kept, and the blocks that are kept whatever their scores."""

    density: float | Numbers | None
    top_p: float | Numbers | None
    threshold: float | Numbers | None
    top_k: IntOrIntegers | None
    sink: int
    recent: int
    last_columns: int
    first_rows: int
    last_rows: int


class ScoreOptions(Places, total=False):
    """`blitz_attn.select.scores`."""

    chooser: Any
    block_shape: tuple[int, int]
    per_kv_head: bool
    q_begin: IntOrIntegers | None
    dtype: DType | None


class ChoiceOptions(ScoreOptions, Budget, total=False):
    """`blitz_attn.select_blocks_prefill`."""

    index_dtype: str


class ListOptions(Budget, total=False):
    """`blitz_attn.select.list_from_scores`."""

    block_shape: tuple[int, int]
    causal: bool
    window: tuple[int, int] | None
    q_lens: Integers | None
    kv_lens: Integers | None
    q_begin: IntOrIntegers | None
    kv_ranges: Array | None
    index_dtype: str
    num_threads: int | None


class ChosenRules(AttentionRules, Budget, total=False):
    """`select_and_attend_prefill` of `blitz_attn.integrations.torch` and of `blitz_attn.integrations.jax`."""

    chooser: Any
    block_shape: tuple[int, int]
    per_kv_head: bool


class ChosenOptions(ChosenRules, Slice, Outputs, total=False):
    """`blitz_attn.select_and_attend_prefill`."""


# ---- Options of attention over pages --------------------------------------------------------------------------------


class PlanOptions(PagedInputs, total=False):
    """`blitz_attn.PagedPlan.attention`."""

    out: Array | tuple[Array | None, Array | None] | None


class PlanSelectOptions(PlanOptions, total=False):
    """`blitz_attn.PagedPlan.select_attention`."""

    counts: Array | None
    selected_size: int | None


class PageChoice(TypedDict, total=False):
    """The choice of pages."""

    budget: IntOrIntegers | None
    method: Method
    sink: int
    recent: IntOrIntegers | None
    per_query_head: bool
    dense_below: int | None
    tokens_since_metadata_update: IntOrIntegers


class PlanChoiceOptions(PlanOptions, PageChoice, total=False):
    """`blitz_attn.PagedPlan.select_and_attend`."""

    k: IntOrIntegers | None


class PagedChoiceOptions(PagedRules, PagedOutputs, PageChoice, total=False):
    """`blitz_attn.select_and_attend`."""

    k: IntOrIntegers | None


class SelectOptions(PageChoice, total=False):
    """`blitz_attn.select_blocks`."""

    q_lens: Integers | None
    ascending: bool
    block_size: int | None
    kv_layout: KVLayout
    k_scale: Scale | None
    dtype: DType | None
    kv_dtype: DType | None
    num_threads: int | None


# ---- Options of native sparse attention -----------------------------------------------------------------------------


class CacheRules(TypedDict, total=False):
    """The options that `blitz_attn.nsa.NsaCache` passes on to `blitz_attn.nsa.nsa`."""

    num_selected_blocks: int
    window_size: int
    gate_proj_weight: Array | None
    causal: bool
    scale: float | None
    q_tile_size: int
    num_cmp_selected_blocks: int | None
    select_block_size: int | None
    init_blocks: int
    local_blocks: int


class NSASharedRules(CacheRules, total=False):
    """The options that `blitz_attn.distributed.nsa` and `blitz_attn.nsa.nsa` both take."""

    compress_block_size: int
    w_k_compress: Array | None
    w_v_compress: Array | None
    gates: Array | None
    mode: str
    compress_stride: int | None
    num_threads: int | None


class NSARules(NSASharedRules, total=False):
    """`nsa` of `blitz_attn.integrations.torch` and of `blitz_attn.integrations.jax`."""

    block_indices: ArrayLike | None
    cu_seqlens: Integers | None


class NSAOptions(NSARules, total=False):
    """`blitz_attn.nsa.nsa`."""

    compressed_kv: tuple[Array, Array] | None
    cu_seqlens_q: Integers | None
    kv_lens: Integers | None
    out: Array | None
    dtype: DType | None


class BranchOptions(TypedDict, total=False):
    """Each of the three branches of native sparse attention, forward and backward."""

    causal: bool
    scale: float | None
    cu_seqlens: Integers | None
    dtype: DType | None
    num_threads: int | None


# ---- Options of attention over several processes --------------------------------------------------------------------


class MessageOptions(TypedDict, total=False):
    """Options of the messages between ranks."""

    comm: Any
    comm_type: str
    dtype: DType | None
    num_threads: int | None


class ContextOptions(MessageOptions, total=False):
    """`blitz_attn.distributed.context_parallel_attention` and its gradient."""

    overlap: bool | str
    scale: float | None
    softcap: float | None


class DistributedNSAOptions(NSASharedRules, MessageOptions, total=False):
    """`blitz_attn.distributed.nsa`."""

    overlap: bool


class DecodeCallOptions(TypedDict, total=False):
    """`blitz_attn.distributed.DecodePlan.attention`."""

    selected: Array | None
    counts: Array | None
    sinks: ArrayLike | None
    k_scale: Scale | None
    v_scale: Scale | None
    out: Array | tuple[Array | None, Array | None] | None


class DecodeOptions(DecodeCallOptions, total=False):
    """`blitz_attn.distributed.decode_context_parallel_attention`."""

    comm: Any
    interleave: int | None
    kv_split: int
    scale: float | None
    kv_layout: KVLayout
    q_lens: Integers | None
    window: int | None
    softcap: float | None
    dtype: DType | None
    kv_dtype: DType | None
    num_threads: int | None
