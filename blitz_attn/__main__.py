"""``python -m blitz_attn``: this machine, the kernels and the number of threads that are used on it, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

from .config import show_config


def drop_output() -> None:
    """Send standard output nowhere from now on, so that further output causes no error after its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_piped(main: Callable[[], object]) -> None:
    """Call `main`, and end quietly if the reader of standard output goes away, as ``head`` does after its last line."""
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def main() -> None:
    """Print the report of `show_config`, as text or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m blitz_attn", description=__doc__.partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if parser.parse_args().json:
        print(json.dumps(show_config("dict"), indent=2))
    else:
        show_config()


if __name__ == "__main__":
    run_piped(main)
