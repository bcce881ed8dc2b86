"""Runs Python in a process of its own, for tests of forks and of what is read once per process, such as environment variables."""

import os
import subprocess
import sys
from pathlib import Path

import blitz_attn

OURS = ("BLITZ_ATTN_ISA", "BLITZ_ATTN_NUM_THREADS", "OMP_NUM_THREADS")


def python(*arguments, **variables):
    """Standard output of ``python *arguments``. Of the environment variables that the library reads, only `variables` are set."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(blitz_attn.__file__).parents[1]), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr
    return run.stdout.strip()
