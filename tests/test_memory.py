"""Memory beside inputs and outputs: bounded for a long sequence, and given back by every call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import blitz_attn
from cases_operations import operations

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
    pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer keeps memory of its own"),
]

MIB = 1 << 20

HELPERS = """
import sys
import numpy as np
import blitz_attn
from blitz_attn import testing

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
"""


def measure(program, *arguments, timeout=300):
    """Runs a program in a process of its own, so that no other test's memory is counted, and returns the number it prints."""
    folders = (str(Path(blitz_attn.__file__).resolve().parents[1]), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-c", HELPERS + program, *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


PEAK = """
dtype, threads = sys.argv[1], int(sys.argv[2])
tokens, head_dim, block = 118806, 64, 128
q, k, v = testing.make_qkv(1, 1, 1, tokens, tokens, head_dim, dtype=dtype)
rows = -(-tokens // block)
sabi = np.stack([np.arange(rows), (np.arange(rows) + rows // 2) % rows], axis=-1).astype(np.int32)[None, None]
out, lse = np.empty_like(v), np.empty((1, 1, tokens), np.float32)
out[...] = 0  # so that their pages are there before
lse[...] = 0
options = {"dtype": dtype} if q.dtype == np.uint16 else {}
forget_peak()
before = status("VmRSS")
blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(block, block), return_lse=True, out=(out, lse), num_threads=threads, **options)
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_of_a_long_sequence(dtype, threads):
    assert measure(PEAK, dtype, threads) <= threads * 32 * MIB


PEAK_BACKWARD = PEAK.partition("forget_peak()")[0] + """
blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(block, block), return_lse=True, out=(out, lse), **options)
dout, grads = v.copy(), tuple(np.zeros_like(x) for x in (q, k, v))
for x in grads:
    x[...] = 0
options.update(block_shape=(block, block), grads=grads, num_threads=threads)
forget_peak()
before = status("VmRSS")
blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, sabi, **options)
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_of_a_long_backward_pass(dtype, threads):
    sums = 118806 * 2 * 64 * 4 if dtype == "bfloat16" else 0  # float32 sums of dk and dv
    assert measure(PEAK_BACKWARD, dtype, threads) <= threads * 32 * MIB + sums


# ---- Many calls -----------------------------------------------------------------------------------------------------------

GROWTH = """
from cases_operations import operations

def refuse(operation):
    try:
        operation.refused()
    except (TypeError, ValueError):
        return
    raise AssertionError("a wrong argument was accepted")

names, kind, warm_up, calls = sys.argv[1].split(";"), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
by_name = operations()
chosen = [by_name[name] for name in names]

def call_each(times):
    for _ in range(times):
        for operation in chosen:
            if kind != "refused":
                operation.call()
            if kind != "called" and operation.refused is not None:
                refuse(operation)

call_each(warm_up)
before = status("VmRSS")
call_each(calls)
print(status("VmRSS") - before)
"""
OPERATIONS = operations()
MANY = 10**6


def test_no_growth():
    """Every operation, called and refused; one that lost 3000 bytes a call would show."""
    assert measure(GROWTH, ";".join(OPERATIONS), "both", 100, 350) <= MIB


def test_no_growth_of_short_calls():
    """One that lost 150 bytes a call would show."""
    names = ("block_sparse_attention", "merge_states", "paged_attention", "paged_select_attention", "quest_block_select_paged_in_out")
    assert measure(GROWTH, ";".join(names), "both", 1000, 7000) <= MIB


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_growth_of_a_million_calls(name):
    assert measure(GROWTH, name, "called", MANY // 50, MANY, timeout=None) <= MIB


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.refused is not None])
def test_no_growth_of_a_million_refusals(name):
    assert measure(GROWTH, name, "refused", MANY // 50, MANY, timeout=None) <= MIB
