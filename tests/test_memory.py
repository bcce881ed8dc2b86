"""A call's memory besides inputs and outputs is bounded for a long sequence, and every call gives this memory back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import blitz_attn
import sampling
from interpreters import python
from peaks import MIB

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
    pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer keeps memory of its own"),
]

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
    """Runs a program in a process of its own, so that memory of other tests does not count, and returns the number that it prints."""
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
out[...] = 0  # so that the pages of out and lse are resident before the call
lse[...] = 0
options = {"dtype": dtype} if q.dtype == np.uint16 else {}
forget_peak()
before = status("VmRSS")
blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(block, block), return_lse=True, out=(out, lse), num_threads=threads, **options)
print(status("VmHWM") - before)
"""


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_of_a_long_backward_pass(dtype, threads):
    sums = 118806 * 2 * 64 * 4 if dtype == "bfloat16" else 0  # float32 sums of dk and dv
    assert measure(PEAK_BACKWARD, dtype, threads) <= threads * 32 * MIB + sums


# ---- Sizes that double ----------------------------------------------------------------------------------------------------


def test_memory_is_linear():
    """Memory grows no faster than tokens, queries or requests, in a sample of the operations and options that peaks.py measures."""
    python(str(Path(__file__).with_name("peaks.py")), "--sample", "4", "--seed", sampling.SEED)


PEAK_OF_CHUNKS = """
from cases_sizes import Sized
from peaks import peaks

def prefill(tokens, queries, requests, threads):
    q, cache = np.zeros((tokens, 4, 64), np.float32), np.zeros((tokens // 16, 16, 1, 64), np.float32)
    table = np.arange(tokens // 16)[None]
    return lambda: blitz_attn.paged_attention(q, cache, cache, table, [tokens], q_lens=[tokens], kv_split=16, num_threads=threads)

print(max(peaks(Sized(prefill, (1024, 1, 1), (1024, 1, 1)), "t")))
"""


def test_memory_with_kv_splits_is_bounded():
    """A state for each query and KV split would take 1 GiB for 4096 tokens."""
    assert measure(PEAK_OF_CHUNKS) <= 48 * MIB


GROWS_BY_SQUARE = """
from cases_sizes import Sized
from peaks import grows_too_fast, peaks

def temporary(tokens, queries, requests, threads):
    return lambda: np.ones((queries, tokens)).sum()

print(int(grows_too_fast(peaks(Sized(temporary, (1024, 1024, 1), (1024, 1024, 1)), sys.argv[1]))))
"""


@pytest.mark.parametrize(("axis", "grows"), [("s", True), ("t", False)], ids=["both sizes double", "tokens double"])
def test_memory_that_is_not_linear_is_noticed(axis, grows):
    assert measure(GROWS_BY_SQUARE, axis) == grows


# ---- Many calls -----------------------------------------------------------------------------------------------------------

def test_no_growth():
    """A process makes a thousand calls of every operation, and a thousand that are refused. A leak of one block per call would show.
    make growth makes a million calls of each kind."""
    python(str(Path(__file__).with_name("growth.py")), "--calls", "1000")
