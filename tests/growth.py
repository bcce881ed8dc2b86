#!/usr/bin/env python3
"""Calls every operation many times, and as many times with an argument that it refuses: memory must not grow. Prints a line for the calls
of an operation, and one for its refused calls.

    make growth                             # a million calls and a million refusals of each: an hour on one core
    make growth CALLS=1000 ARGS="--only nsa"

`RSS` is the memory of the process in KiB, after some calls to warm up and at the end. `blocks` and `bytes` are the growth per call: blocks
that Python's allocator has handed out, and bytes that malloc has handed out (glibc only). The smallest possible leaks would show as 1 block
and as 32 bytes per call.
"""

import argparse
import ctypes
import gc
import sys

from cases_operations import operations

ENOUGH = 1 << 20  # bytes by which resident memory may grow over any number of calls
SPARE_BLOCKS, SPARE_BYTES = 300, 4096  # the interpreter and NumPy may keep so many for reuse, as free tuples for example


class Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>: the bytes in blocks with a mapping of their own, and in all other blocks."""

    _fields_ = [
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    ]


def malloced():
    """Bytes in blocks that malloc has handed out."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # the C library has no mallinfo2
        return 0
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


def refusing(call):
    """A function that calls `call`, and expects it to be refused."""

    def refused():
        try:
            call()
        except (TypeError, ValueError):
            return
        raise AssertionError("a wrong argument was accepted")

    return refused


def repeat(call, times):
    for _ in range(times):
        call()


def measure(call, calls):
    """Resident memory before and after the calls, and blocks and bytes that they did not give back."""
    repeat(call, max(100, calls // 50))
    gc.collect()
    before = resident(), sys.getallocatedblocks(), malloced()
    repeat(call, calls)
    gc.collect()
    after = sys.getallocatedblocks(), malloced()
    return before[0], resident(), after[0] - before[1], after[1] - before[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10**6, help="accepted calls, and refused calls, of each operation (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="operations whose name contains this")
    args = parser.parse_args()
    grown = 0
    print(f"{'operation':42} {'kind':8} {'calls':>8} {'RSS':>8} {'at the end':>10} {'blocks':>8} {'bytes':>8}")
    every = operations()
    gc.collect()
    gc.freeze()  # otherwise each of 250 collections would go through the objects of all modules
    for name, operation in every.items():
        if args.only not in name:
            continue
        kinds = {"called": operation.call} | ({"refused": refusing(operation.refused)} if operation.refused else {})
        for kind, call in kinds.items():
            for _ in range(3):  # a leak grows each time; pages that the system had taken from the process come back only once
                before, after, blocks, size = measure(call, args.calls)
                wrong = after - before > ENOUGH or blocks > SPARE_BLOCKS + args.calls // 100 or size > SPARE_BYTES + args.calls // 10
                if not wrong:
                    break
            grown += wrong
            print(
                f"{name.replace(', ', ',').replace(' ', '_'):42} {kind:8} {args.calls:8} {before >> 10:8} {after >> 10:10} {blocks / args.calls:8.4f}"
                f" {size / args.calls:8.4f}{' GROWS' if wrong else ''}",
                flush=True,
            )
    print(f"{grown} grow")
    return grown > 0


if __name__ == "__main__":
    sys.exit(main())
