"""This machine's limits: the sizes of its caches, and the peak that the library's own vector code reaches."""

from __future__ import annotations

import os
from pathlib import Path

from blitz_attn import _core

DRAM_BYTES = int(os.environ.get("BENCHMARK_DRAM_BYTES") or 0)  # set by tests to save time; the measured rates are then no limits
DEFAULT_CACHES = {"L1": 32 << 10, "L2": 512 << 10, "L3": 16 << 20}  # if the system does not tell


def _bytes(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text.rstrip("KMGkmg")) * unit


def cache_sizes() -> dict[str, int]:
    """Bytes of the data caches that the first CPU sees."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}"] = _bytes(size)
    return sizes or dict(DEFAULT_CACHES)


def read_sizes(threads: int) -> dict[str, int]:
    """Bytes per thread that fit each cache but not the next smaller one, or no cache (DRAM). A cache too small for this is left out."""
    caches = cache_sizes()
    sizes = {}
    below = 0
    for level in ("L1", "L2", "L3"):
        if level not in caches:
            continue
        share = caches[level] // (threads if level == "L3" else 1)
        size = share // 2
        if size >= 2 * below:
            sizes[level] = size
        below = caches[level]
    largest = max(caches.values())
    # Part of an array that is read repeatedly stays in L3, so that DRAM looks faster: by a quarter if the array is four times as large as
    # L3.
    sizes["DRAM"] = (DRAM_BYTES or max(8 * largest, 1 << 30)) // threads
    return sizes


def peak_flops(threads: int, seconds: float = 0.15) -> float:
    """F in GFLOP/s of the level in use, all threads together."""
    return _core.probe_flops(_core.isa_active(), seconds, threads)
