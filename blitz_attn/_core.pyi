from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

__version__: str
compiler: str

def block_sparse_attention(
    empty: Callable[[tuple[int, ...], str], Any],
    q: Any,
    k: Any,
    v: Any,
    sabi: Any = ...,
    block_shape: Any = ...,
    scale: Any = ...,
    layout: Any = ...,
    causal: Any = ...,
    window: Any = ...,
    q_lens: Any = ...,
    kv_lens: Any = ...,
    cu_seqlens_q: Any = ...,
    cu_seqlens_kv: Any = ...,
    num_heads: Any = ...,
    num_kv_heads: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
    q_begin: Any = ...,
    q_total: Any = ...,
    kv_ranges: Any = ...,
    attn_mask: Any = ...,
    alibi_slopes: Any = ...,
    return_lse: Any = ...,
    out_dtype: Any = ...,
    out: Any = ...,
    lse_out: Any = ...,
    cu_rows: Any = ...,
    routed: Any = ...,
    key_stride: Any = ...,
    key_last: Any = ...,
    softcap: Any = ...,
    sinks: Any = ...,
) -> Any:
    """Checks the inputs, makes outputs with empty(shape, dtype name) where none are given, and fills them. Returns out or (out, lse).
    An array argument may also be a pair (16-bit array, "bfloat16"). cu_rows to key_last are described in blitz_attn.h."""

def block_sparse_attention_backward(
    empty: Callable[[tuple[int, ...], str], Any],
    q: Any,
    k: Any,
    v: Any,
    sabi: Any = ...,
    block_shape: Any = ...,
    scale: Any = ...,
    layout: Any = ...,
    causal: Any = ...,
    window: Any = ...,
    q_lens: Any = ...,
    kv_lens: Any = ...,
    cu_seqlens_q: Any = ...,
    cu_seqlens_kv: Any = ...,
    num_heads: Any = ...,
    num_kv_heads: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
    q_begin: Any = ...,
    q_total: Any = ...,
    kv_ranges: Any = ...,
    attn_mask: Any = ...,
    alibi_slopes: Any = ...,
    dout: Any = ...,
    out: Any = ...,
    lse: Any = ...,
    dlse: Any = ...,
    dq: Any = ...,
    dk: Any = ...,
    dv: Any = ...,
    accumulate: Any = ...,
    cu_rows: Any = ...,
    routed: Any = ...,
    key_stride: Any = ...,
    key_last: Any = ...,
    softcap: Any = ...,
    bias_grads: Any = ...,
) -> tuple[Any, ...]:
    """As block_sparse_attention; out and lse are its results. Returns (dq, dk, dv). With bias_grads, which makes arrays as empty does, the
    gradients of attn_mask and of alibi_slopes follow: None for one that is not given or is of bool."""

def select_prefill(
    empty: Callable[[tuple[int, ...], str], Any],
    q: Any,
    k: Any,
    v: Any,
    sabi: Any,
    block_shape: Any,
    scale: Any,
    layout: Any,
    causal: Any,
    window: Any,
    q_lens: Any,
    kv_lens: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    num_heads: Any,
    num_kv_heads: Any,
    dtype: Any,
    num_threads: Any,
    chooser: Any,
    pool_q: Any,
    pool_k: Any,
    term: Any,
    largest: Any,
    budget: Any,
    budgets: Any,
    sink: Any,
    recent: Any,
    last_columns: Any,
    first_rows: Any,
    last_rows: Any,
    per_kv_head: Any,
    index_dtype: Any,
    return_scores: Any,
    kv_ranges: Any = ...,
    q_begin: Any = ...,
) -> tuple[Any, Any]:
    """v is k once more and sabi None, as the arguments are read as those of block_sparse_attention. Returns (sabi, scores or None)."""

def merge_states(
    empty: Callable[[tuple[int, ...], str], Any],
    outs: tuple[Any, ...],
    lses: tuple[Any, ...],
    out: Any = ...,
    lse_out: Any = ...,
    dtype: Any = ...,
) -> tuple[Any, Any]: ...
def open_page_tables(
    block_tables: Any,
    seq_lens: Any,
    indptr: Any,
    last_page_len: Any,
    q_lens: Any,
    q_begin: Any,
    page_size: Any,
    num_pages: Any,
    kv_split: Any,
) -> tuple[Any, int, int]:
    """Checks and copies tables, lengths and the places of queries. Returns (opened tables, number of requests, number of queries)."""

def page_table_lengths(tables: Any) -> tuple[list[int], list[int]]:
    """Of each request of opened tables: its tokens, and its queries."""

def paged_attention(
    empty: Callable[[tuple[int, ...], str], Any],
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any = ...,
    indptr: Any = ...,
    last_page_len: Any = ...,
    q_lens: Any = ...,
    q_begin: Any = ...,
    kv_split: Any = ...,
    selected: Any = ...,
    counts: Any = ...,
    scale: Any = ...,
    kv_layout: Any = ...,
    window: Any = ...,
    sinks: Any = ...,
    softcap: Any = ...,
    k_scale: Any = ...,
    v_scale: Any = ...,
    return_lse: Any = ...,
    out: Any = ...,
    lse_out: Any = ...,
    dtype: Any = ...,
    kv_dtype: Any = ...,
    num_threads: Any = ...,
    out_dtype: Any = ...,
    kv_ranges: Any = ...,
    attn_mask: Any = ...,
    alibi_slopes: Any = ...,
) -> Any:
    """As block_sparse_attention. With indptr, block_tables lists the pages of all requests and last_page_len stands in for seq_lens. In
    place of block_tables, seq_lens, indptr, last_page_len, q_lens, q_begin and kv_split, block_tables may be opened tables."""

def quantize_kv(x: Any, values: Any, scale: Any, dtype: Any = ..., kv_dtype: Any = ...) -> None: ...
def append_paged_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    block_tables: Any = ...,
    seq_lens: Any = ...,
    indptr: Any = ...,
    last_page_len: Any = ...,
    q_lens: Any = ...,
    q_begin: Any = ...,
    kv_layout: Any = ...,
    k_scale: Any = ...,
    v_scale: Any = ...,
    dtype: Any = ...,
    kv_dtype: Any = ...,
    num_threads: Any = ...,
) -> None:
    """Tables and lengths as for paged_attention, read where slot_mapping is None; q_begin must be None."""

def quest_metadata(
    k_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    metadata_block_tables: Any,
    maxblocks: Any,
    minblocks: Any,
    meanblocks: Any = ...,
    start_lens: Any = ...,
    kv_layout: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
    k_scale: Any = ...,
) -> None:
    """block_tables may be opened tables; seq_lens is then None."""

def select_blocks(
    empty: Callable[[tuple[int, ...], str], Any],
    method: str,
    query: Any,
    a: Any,
    b: Any,
    tables: Any,
    seq_lens: Any,
    k: Any,
    block_size: Any,
    per_query_head: Any,
    sink: Any,
    recent: Any,
    tokens_since_metadata_update: Any,
    q_lens: Any,
    budget: Any,
    ascending: Any,
    kv_layout: Any,
    selected_indices: Any,
    return_counts: Any,
    return_scores: Any,
    dtype: Any,
    num_threads: Any,
    k_scale: Any = ...,
    kv_dtype: Any = ...,
) -> Any:
    """Returns selected, or a tuple of it and of counts and scores, where these are wanted. k is the width of a result that is made
    here; budget is in blocks, one per request. seq_lens may be opened page tables, which then also replace q_lens, block_size and, for
    the method max, tables."""

def block_means(
    x: Any,
    weight: Any,
    out: Any,
    block_size: Any,
    stride: Any,
    cu_seqlens: Any = ...,
    cu_blocks: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
) -> None: ...
def block_means_backward(
    dout: Any,
    dx: Any,
    more: Any,
    block_size: Any,
    stride: Any,
    cu_seqlens: Any = ...,
    cu_blocks: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
) -> None: ...
def gate(
    q: Any,
    gate_proj_weight: Any,
    gates: Any,
    branches: Any,
    out: Any,
    dtype: Any = ...,
    num_threads: Any = ...,
) -> None: ...
def gate_backward(
    q: Any,
    gate_proj_weight: Any,
    gates: Any,
    branches: Any,
    dout: Any,
    dbranches: Any,
    dgates: Any,
    dq: Any,
    dgate_proj_weight: Any,
    dtype: Any = ...,
    num_threads: Any = ...,
) -> None: ...
def nsa_select(
    q: Any,
    k_cmp: Any,
    lse: Any,
    block_indices: Any,
    cmp_block_indices: Any,
    scale: Any,
    causal: Any,
    compress_block_size: Any,
    compress_stride: Any,
    select_block_size: Any,
    q_tile_size: Any,
    init_blocks: Any,
    local_blocks: Any,
    q_begin: Any,
    tokens: Any,
    cmp_group: Any,
    cu_seqlens: Any = ...,
    cu_blocks: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
) -> None: ...
def read_integer(value: Any, name: str) -> int:
    """The argument `name` as the operations read an integer: it fits in 64 bits, or is refused in a sentence. The next two likewise."""

def read_number(value: Any, name: str) -> float: ...
def read_flag(value: Any, name: str) -> bool: ...
def refuse_masked(masked: type) -> None:
    """From now on, every call refuses arrays of this type and of those derived from it. The package names NumPy's arrays with a mask."""

def in_usual_mode(function: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
    """What a function returns that runs in the usual mode of floating-point numbers. The mode is then as it was, also where it raises."""

def get_num_threads() -> int: ...
def set_num_threads(num_threads: int | None) -> None: ...
def num_threads_source() -> str: ...
def isa_levels() -> tuple[str, ...]: ...
def isa_detected() -> str: ...
def isa_active() -> str: ...
def isa_set_cap(level: str) -> None: ...
def isa_note() -> str: ...
def cpu_model() -> str: ...
def kernels(level: str | None = ...) -> list[tuple[str, str]]: ...
def probe_flops(level: str, seconds: float, num_threads: int | None = ...) -> float:
    """GFLOP/s of float32 multiply-adds, all threads together."""

def probe_tile_flops(level: str, seconds: float, num_threads: int | None = ...) -> float:
    """The same of bfloat16 tile products; 0 where the level has no tiles."""

def probe_read(level: str, memory: Any, seconds: float | None, num_threads: int | None = ...) -> float:
    """GB/s of reading an array, shared out among the threads, or so many bytes a thread over and over, all threads together; once where
    `seconds` is None."""
