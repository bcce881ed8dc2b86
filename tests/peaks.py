#!/usr/bin/env python3
"""Prints the memory that every operation and option takes beyond inputs and outputs, while tokens, queries or requests double twice.

    python tests/peaks.py                    # the whole table
    python tests/peaks.py --only backward

`n`, `2n` and `4n` are the peak of the process's memory during a call in MiB, minus its memory before the call and the arrays that the call returns.
A line ends in GROWS if the memory is above 6 MiB and grows faster than the size that doubles, or if a call failed.
"""

import argparse
import ctypes
import gc
import multiprocessing
import sys

from cases_operations import arrays_of
from cases_sizes import CASES
from interrupts import drawn, in_child

MIB = 1 << 20
FLOOR = 6 * MIB  # memory that threads keep, or that the system counts late, is ignored
MOST_RATIO = 2.35  # of the memory at a size to the memory at half that size; 2 means memory in proportion to the size
OF_AXIS = {"t": (1, 0, 0), "q": (0, 1, 0), "r": (0, 0, 1), "s": (1, 1, 0)}
NAMES = {"t": "tokens", "q": "queries", "r": "requests", "s": "both"}


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def peak(call):
    """The most bytes held during a call, minus the bytes held before the call and the bytes of its result."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM, the peak
    before = status("VmRSS")
    result = call()
    return max(0, status("VmHWM") - before - sum(x.nbytes for x in arrays_of(result)))


def sizes_of(case, axis, times):
    return [size * (times if grows else 1) for size, grows in zip(case.small, OF_AXIS[axis], strict=True)]


def measure(case, axis, times, threads, found, i):
    """Writes the peak of a call to found[i]. It must run in a process of its own."""
    M_MMAP_THRESHOLD = -3
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed memory goes back to the system, so that the heap has none to reuse
    call = case.make(*sizes_of(case, axis, times), threads)
    gc.collect()
    libc.malloc_trim(0)  # gives back memory that the parent process had freed, or left to the garbage collector
    found[i] = max(found[i], peak(call))


def peaks(case, axis, threads=1):
    """The peaks of a case with one axis at its size, at twice its size and at four times its size. A peak is -1 if the call fails.

    Pages of libraries that the system reclaims during a call hide as much of the call's memory. So peaks that seem to grow are measured
    again.
    """
    found = multiprocessing.RawArray("q", [-1] * 3)
    for _ in range(3):
        for i in range(3):
            in_child(lambda i=i: measure(case, axis, 2**i, threads, found, i))
        if not grows_too_fast(found):
            break
    return list(found)


def grows_too_fast(found):
    """Whether a call failed, or the memory at 4n is above FLOOR, above MOST_RATIO times that at 2n, and above MOST_RATIO**2 times that at n."""
    return min(found) < 0 or found[2] > max(FLOOR, MOST_RATIO * found[1], MOST_RATIO**2 * found[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="operations whose name contains one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sample", type=int, metavar="N", help="N operations, which --seed draws")
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    wrong = 0
    print(f"{'operation':32} {'grows':8} {'n':>8} {'2n':>8} {'4n':>8}")
    for name in drawn([name for name in CASES if any(word in name for word in args.only)], args.sample, args.seed):
        for axis in CASES[name].grows:
            found = peaks(CASES[name], axis, args.threads)
            fast = grows_too_fast(found)
            wrong += fast
            print(f"{name:32} {NAMES[axis]:8} {' '.join(f'{x / MIB:8.2f}' for x in found)}{' GROWS' if fast else ''}", flush=True)
    print(f"{wrong} grow too fast")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
