#!/usr/bin/env python3
"""What this machine can do at most: fp32 multiply-adds and reads, measured through the library's own vector code.

    python benchmark/roofline.py                 # every level and 1..n threads; some seconds
    python benchmark/roofline.py --threads 2     # two threads only

Prints one row a measurement: `flops` rows give F, the fp32 FMA peak of a level's widest vectors in GFLOP/s; `tiles` rows
give P, that of products of bfloat16 tiles with random operands, where the CPU has tiles; `read` rows give GB/s when
every thread reads its own memory over and over, small enough to stay in the cache named. All threads together. Columns are split by
white space; lines that start with # are not data.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn import _core

READ_LEVELS = ("L1", "L2", "L3", "DRAM")
DEFAULT_CACHES = {"L1": 32 << 10, "L2": 512 << 10, "L3": 16 << 20}  # where the system does not tell


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
    """Bytes a thread that sit in each level and in none below it. A level that leaves no room for that is left out."""
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
    sizes["DRAM"] = max(4 * largest // threads, 64 << 20)
    return sizes


def peak_flops(threads: int, isa: str | None = None, seconds: float = 0.15) -> float:
    """F in GFLOP/s, all threads together, of `isa` (the active level by default)."""
    return float(_core.probe_flops(isa or _core.isa_active(), seconds, threads))


def peak(dtype: str, threads: int, seconds: float = 0.15) -> tuple[str, float]:
    """What binds attention of `dtype` at the active level: its name (P for bfloat16 where there are tiles, else F) and GFLOP/s of all threads."""
    tiles = float(_core.probe_tile_flops(_core.isa_active(), seconds, threads)) if dtype == "bfloat16" else 0.0
    return ("P", tiles) if tiles else ("F", peak_flops(threads, seconds=seconds))


def measure(threads: int, isas: list[str] | None = None, levels: tuple[str, ...] = READ_LEVELS, seconds: float = 0.2) -> dict:
    """Measure the machine's limits with `threads` threads.

    Returns
    -------
    dict
        ``{"threads": n, "flops": {isa: GFLOP/s}, "tiles": {isa: GFLOP/s}, "read": {level: GB/s}, "read_bytes": {level: bytes a thread}}``.
        Reads use the highest level of `isas`.
    """
    isas = isas or list(blitz_attn.isa_levels(available=True))
    sizes = {level: size for level, size in read_sizes(threads).items() if level in levels}
    tiles = {isa: float(_core.probe_tile_flops(isa, seconds, threads)) for isa in isas}
    return {
        "threads": threads,
        "tiles": {isa: value for isa, value in tiles.items() if value},
        "flops": {isa: float(_core.probe_flops(isa, seconds, threads)) for isa in isas},
        "read": {level: float(_core.probe_read(isas[-1], size, seconds, threads)) for level, size in sizes.items()},
        "read_bytes": sizes,
    }


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads (1 .. what the library uses)")
    parser.add_argument("--isa", nargs="+", help="levels (all that this CPU has)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time a measurement (%(default)s)")
    args = parser.parse_args(argv)
    isas = args.isa or list(blitz_attn.isa_levels(available=True))
    print(f"{'what':>6} {'level':>12} {'threads':>8} {'bytes_a_thread':>15} {'value':>10} unit")
    for threads in args.threads or range(1, blitz_attn.get_num_threads() + 1):
        limits = measure(threads, isas, seconds=args.seconds)
        for isa, value in limits["flops"].items():
            print(f"{'flops':>6} {isa:>12} {threads:>8} {0:>15} {value:>10.1f} GFLOP/s", flush=True)
        for isa, value in limits["tiles"].items():
            print(f"{'tiles':>6} {isa:>12} {threads:>8} {0:>15} {value:>10.1f} GFLOP/s", flush=True)
        for level, value in limits["read"].items():
            print(f"{'read':>6} {level:>12} {threads:>8} {limits['read_bytes'][level]:>15} {value:>10.1f} GB/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
