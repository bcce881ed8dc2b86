"""``python -m fuzz``: a campaign, or the replay of one problem. From the repository's root: ``make fuzz``."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from . import campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh seed, which is printed")
    parser.add_argument("--jobs", type=int, default=campaign.default_jobs())
    parser.add_argument("--only", nargs="*", default=[], metavar="OPERATION", help="these operations alone")
    parser.add_argument("--replay", metavar="PROBLEM", help="operation:seed[:options]: runs one problem, and shrinks it if it fails")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-corpus", action="store_true", help="do not run the problems that failed once")
    parser.add_argument("--list", action="store_true", help="print the operations")
    args = parser.parse_args()
    warnings.simplefilter("error")
    registry = campaign.load()
    if args.list:
        print("\n".join(registry))
        return 0
    for name in args.only:
        if name not in registry:
            parser.error(f"--only: expected names among {', '.join(registry)}, got {name}")
    if args.replay:
        return campaign.replay(args.replay)
    failed = 0 if args.no_corpus else campaign.run_corpus(str(Path(__file__).with_name("corpus.txt")))
    seed = time.time_ns() // 1000 % 10**9 if args.seed is None else args.seed
    return 1 if campaign.campaign(args.seconds, seed, args.jobs, args.only, args.stop) + failed else 0


raise SystemExit(main())
