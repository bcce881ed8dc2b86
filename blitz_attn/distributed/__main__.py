"""``mpirun -n 4 python -m blitz_attn.distributed --check``: where the ranks run and with what, and whether they compute as one process."""

from __future__ import annotations

import argparse
import sys

from ..__main__ import run_piped
from ._check import run
from ._comm import Alone, communicator


def main() -> None:
    """Report, and with --check also test. Ends with status 1 if ranks differ in release or instruction set, if a check fails, or if MPI is
    missing."""
    parser = argparse.ArgumentParser(prog="python -m blitz_attn.distributed", description=__doc__.partition(": ")[2])
    parser.add_argument("--check", action="store_true", help="test bits, bytes and bandwidth")
    parser.add_argument("--alone", action="store_true", help="one process, without MPI")
    options = parser.parse_args()
    try:
        ranks = Alone() if options.alone else communicator()
    except ImportError as error:  # the error says what to install
        sys.exit(f"{error}, or pass --alone")
    sys.exit(run(ranks, options.check))


if __name__ == "__main__":
    run_piped(main)
