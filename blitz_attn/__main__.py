"""``python -m blitz_attn``: this machine, the kernels and the number of threads that are used on it, and why."""

from __future__ import annotations

import argparse
import json

from .config import show_config


def main() -> None:
    """Print the report of `show_config`, as text or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m blitz_attn", description=__doc__.partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if parser.parse_args().json:
        print(json.dumps(show_config("dict"), indent=2))
    else:
        show_config()


if __name__ == "__main__":
    main()
