"""Memory beside inputs and outputs: bounded for a long sequence, and given back by every call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import blitz_attn

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


def measure(program, *arguments):
    """Runs a program in a process of its own, so that no other test's memory is counted, and returns the number it prints."""
    path = os.pathsep.join([str(Path(blitz_attn.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", HELPERS + program, *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300, check=False,
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


LEAK = """
q, k, v = testing.make_qkv(1, 4, 2, 200, 300, 24, dtype="float16")
sabi = np.array([[1, 0, -1], [2, 1, 0]], np.int32)[None, None]

def call_all():
    out, lse = blitz_attn.block_sparse_attention(q, k, v, sabi, causal=True, return_lse=True)
    blitz_attn.merge_states(out, lse, out, lse)
    blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, sabi, causal=True, dlse=lse)
    try:
        blitz_attn.block_sparse_attention(q, k[..., :8], v, sabi)
    except ValueError:
        pass
    else:
        raise AssertionError("a wrong shape was accepted")
    try:
        blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse[:, 1:], sabi)
    except ValueError:
        pass
    else:
        raise AssertionError("a wrong shape was accepted")

for _ in range(300):
    call_all()
before = status("VmRSS")
for _ in range(2000):
    call_all()
print(status("VmRSS") - before)
"""


def test_no_leak():
    assert measure(LEAK) <= MIB  # 500 bytes a call would show
