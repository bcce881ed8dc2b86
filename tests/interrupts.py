#!/usr/bin/env python3
"""Interrupts every operation by a signal, and prints how long it takes to return: a line for each operation and number of threads.

    python tests/interrupts.py                        # the whole table: some 20 minutes
    python tests/interrupts.py --only append --threads 1 --at 0.05

A line has the seconds from the signal to the return, for a signal after each time of `--at`. Seconds are processor time per thread, which a busy
machine does not lengthen. If the call returns before the signal, "-" is printed. The line ends in LATE if a number is above `--bound`.
"""

import argparse
import os
import random
import signal
import sys
import time

from cases_sizes import CASES


def interrupt(call, at):
    """Processor time from a signal, sent after `at` seconds of processor time, to the return of the call; None if the call returned before."""

    def raise_error(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGPROF, raise_error)
    begun = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, at)
        call()
        signal.setitimer(signal.ITIMER_PROF, 0)
        return None
    except KeyboardInterrupt:
        return max(0.0, time.process_time() - begun - at)


def in_child(job):
    """Runs job() in a child process, whose memory goes back to the system when it ends. Returns whether it succeeded."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job()
            status = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def row(name, threads, times, bound):
    """Prints the line of an operation. Ends the process with status 1 if a call returns late."""
    case = CASES[name]
    call = case.make(*case.long, threads)
    found = [interrupt(call, at) for at in times]
    late = any(x is not None and x / threads > bound for x in found)
    print(f"{name:32} {threads:7} {' '.join('   -   ' if x is None else f'{x / threads:7.3f}' for x in found)}{' LATE' if late else ''}")
    if late:
        sys.exit(1)


def drawn(names, number, seed):
    """`number` of the names, drawn by `seed`, or all names if `number` is None."""
    return sorted(random.Random(seed).sample(names, min(number, len(names))), key=names.index) if number else names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="operations whose name contains one of these")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bound", type=float, default=0.2, help="seconds (%(default)s)")
    parser.add_argument("--sample", type=int, metavar="N", help="N operations, which --seed draws")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--at", type=float, nargs="+", default=[0.05, 0.3, 0.9], help="seconds of processor time before the signal")
    args = parser.parse_args()
    print(f"{'operation':32} {'threads':7} {' '.join(f'at {x:<4g}' for x in args.at)}")
    late = 0
    names = [name for name in CASES if any(word in name for word in args.only)]
    for name in drawn(names, args.sample, args.seed):
        for threads in args.threads:
            late += not in_child(lambda name=name, threads=threads: row(name, threads, args.at, args.bound))
    print(f"{late} return late")
    return late > 0


if __name__ == "__main__":
    sys.exit(main())
