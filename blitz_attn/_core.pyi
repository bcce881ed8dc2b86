from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

__version__: str
compiler: str

# The operations. `operations()` has their arguments; csrc/python/operations.h is the table that it comes from. `empty(shape, dtype name)`
# makes results that the caller does not give. An array may also be a pair (array of 16-bit integers, "bfloat16").

def block_sparse_attention(*given: Any, **named: Any) -> Any:
    """Returns out or (out, lse). cu_rows to key_last are described in blitz_attn.h."""

def block_sparse_attention_backward(*given: Any, **named: Any) -> tuple[Any, ...]:
    """out and lse are what the forward call returned. Returns (dq, dk, dv). With bias_grads, which makes arrays as empty does, the
    gradients of attn_mask and of alibi_slopes follow: None for one that is not given or is of bool."""

def select_prefill(*given: Any, **named: Any) -> tuple[Any, Any]:
    """v is k once more and sabi None. Returns (scores or None, sabi)."""

def merge_states(*given: Any, **named: Any) -> tuple[Any, Any]:
    """outs and lses are tuples of arrays."""

def open_page_tables(*given: Any, **named: Any) -> tuple[Any, int, int]:
    """Checks and copies tables, lengths and the places of queries. Returns (opened tables, number of requests, number of queries)."""

def page_table_lengths(tables: Any) -> tuple[list[int], list[int]]:
    """Of each request of opened tables: its tokens, and its queries."""

def paged_attention(*given: Any, **named: Any) -> Any:
    """As block_sparse_attention. With indptr, block_tables lists the pages of all requests and last_page_len stands in for seq_lens. In
    place of block_tables, seq_lens, indptr, last_page_len, q_lens, q_begin and kv_split, block_tables may be opened tables."""

def quantize_kv(*given: Any, **named: Any) -> None: ...
def append_paged_kv(*given: Any, **named: Any) -> None:
    """Tables and lengths as for paged_attention, read where slot_mapping is None; q_begin must be None."""

def quest_metadata(*given: Any, **named: Any) -> None:
    """block_tables may be opened tables; seq_lens is then None."""

def select_blocks(*given: Any, **named: Any) -> Any:
    """Returns selected, or a tuple of it and of counts and scores, where these are wanted. k is the width of a result that is made
    here; budget is in blocks, one per request. seq_lens may be opened page tables, which then also replace q_lens, block_size and, for
    the method max, tables."""

def block_means(*given: Any, **named: Any) -> None: ...
def block_means_backward(*given: Any, **named: Any) -> None: ...
def gate(*given: Any, **named: Any) -> None: ...
def gate_backward(*given: Any, **named: Any) -> None: ...
def nsa_select(*given: Any, **named: Any) -> None: ...
def operations() -> dict[str, tuple[tuple[str, str, bool], ...]]:
    """Of each function, its arguments in order: name, role, and whether results have gradients in it."""

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
