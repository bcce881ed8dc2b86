#!/usr/bin/env python3
"""Memory of every operation and option beyond its inputs and outputs, while tokens, queries or requests double twice. A line each.

    python tests/peaks.py                    # the whole table
    python tests/peaks.py --only backward

`n`, `2n` and `4n` are the MiB that the process holds at most during a call, more than before it and without the arrays that the call returns.
A line ends in GROWS where the memory is above 6 MiB and grows faster than the size that doubles, or where a call failed.
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
FLOOR = 6 * MIB  # what does not count: memory that threads keep, and what the system counts late
MOST_RATIO = 2.35  # of a size to its half, which is 2 where memory is in proportion to the size
OF_AXIS = {"t": (1, 0, 0), "q": (0, 1, 0), "r": (0, 0, 1), "s": (1, 1, 0)}
NAMES = {"t": "tokens", "q": "queries", "r": "requests", "s": "both"}


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def peak(call):
    """Bytes held at most during a call, beyond those before it and those of its result."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM, the peak, begins anew
    before = status("VmRSS")
    result = call()
    return max(0, status("VmHWM") - before - sum(x.nbytes for x in arrays_of(result)))


def sizes_of(case, axis, times):
    return [size * (times if grows else 1) for size, grows in zip(case.small, OF_AXIS[axis], strict=True)]


def measure(case, axis, times, threads, found, i):
    """Writes the peak of a call to found[i]. For a process of its own."""
    M_MMAP_THRESHOLD = -3
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system: nothing hides in a free heap
    call = case.make(*sizes_of(case, axis, times), threads)
    gc.collect()
    libc.malloc_trim(0)  # gives back what the parent process had freed or left to the collector, so that nothing hides there either
    found[i] = max(found[i], peak(call))


def peaks(case, axis, threads=1):
    """The peaks of a case with one axis at its size, twice and four times that; -1 where a call fails.

    The system may take pages of libraries back during a call, which hides as much of its memory: what seems to grow is measured again.
    """
    found = multiprocessing.RawArray("q", [-1] * 3)
    for _ in range(3):
        for i in range(3):
            in_child(lambda i=i: measure(case, axis, 2**i, threads, found, i))
        if not grows_too_fast(found):
            break
    return list(found)


def grows_too_fast(found):
    """Whether a call failed, or the memory at 4n is above FLOOR, above MOST_RATIO times that at 2n, and above its square times that at n."""
    return min(found) < 0 or found[2] > max(FLOOR, MOST_RATIO * found[1], MOST_RATIO**2 * found[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="operations whose name holds one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sample", type=int, metavar="N", help="so many operations, which --seed draws")
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
