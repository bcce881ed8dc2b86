from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

__version__: str
compiler: str

# The operations are not listed here. The table in csrc/python/operations.h, which `operations()` returns, says what they take and return.
def __getattr__(name: str) -> Callable[..., Any]: ...
def operations() -> dict[str, tuple[tuple[str, str, bool], ...]]:
    """The arguments of each function in order: name, role, and whether the function has a gradient with respect to it."""

def page_table_lengths(tables: Any) -> tuple[list[int], list[int]]:
    """Two lists for the requests of opened tables: the number of tokens of each request, and its number of queries."""

def read_integer(value: Any, name: str) -> int:
    """The argument `name`, read as the operations read an integer: refused unless it fits in 64 bits. `read_number` and `read_flag`
    do the same for a number and a truth value."""

def read_number(value: Any, name: str) -> float: ...
def read_flag(value: Any, name: str) -> bool: ...
def refuse_masked(masked: type) -> None:
    """From now on, every call refuses arrays of this type and of types derived from it. The package passes the type of NumPy's masked
    arrays."""

def in_usual_mode(function: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
    """Calls a function in the usual mode of floating-point numbers and returns its result. The mode is then restored, even after an
    error."""

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
    """GFLOP/s of bfloat16 tile products, all threads together, at the rate that a CPU sustains; 0 where the level has no tiles."""

def probe_read(level: str, memory: Any, seconds: float | None, num_threads: int | None = ...) -> float:
    """GB/s that all threads together read. If `memory` is an array, each thread reads a share of it; if it is a number, each thread reads
    that many bytes of its own. The threads read over and over for `seconds`, or once where `seconds` is None."""
