from collections.abc import Callable
from typing import Any

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
    return_lse: Any = ...,
    out: Any = ...,
    lse_out: Any = ...,
    dtype: Any = ...,
    num_threads: Any = ...,
) -> Any:
    """Checks the inputs, makes outputs with empty(shape, dtype name) where none are given, and fills them. Returns out or (out, lse).
    An array argument may also be a pair (16-bit array, "bfloat16")."""

def merge_states(
    empty: Callable[[tuple[int, ...], str], Any],
    outs: tuple[Any, ...],
    lses: tuple[Any, ...],
    out: Any = ...,
    lse_out: Any = ...,
    dtype: Any = ...,
) -> tuple[Any, Any]: ...
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

def probe_read(level: str, num_bytes: int, seconds: float, num_threads: int | None = ...) -> float:
    """GB/s of reading num_bytes a thread over and over, all threads together."""
