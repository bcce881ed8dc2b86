"""Programs that round otherwise, or that flush subnormal numbers to 0: results do not depend on it, and the caller's mode stays."""

import contextlib
import ctypes
import ctypes.util
import platform

import numpy as np
import pytest

import blitz_attn
from cases import same_bits
from cases_operations import arrays_of, operations
from interpreters import python

FIELD, FLUSHES, UPWARD = {  # where fenv_t of the system has the register, and its bits
    "x86_64": (slice(28, 32), 0x8040, 0x4000),
    "aarch64": (slice(0, 4), 1 << 24, 1 << 22),
}.get(platform.machine(), (None, 0, 0))
pytestmark = pytest.mark.skipif(FIELD is None or platform.libc_ver()[0] != "glibc", reason="another layout of fenv_t")

SET_MODE = """
import ctypes, ctypes.util
libm = ctypes.CDLL(ctypes.util.find_library("m"))
usual = ctypes.create_string_buffer(64)
libm.fegetenv(usual)
changed = ctypes.create_string_buffer(usual.raw)
field = slice({field.start}, {field.stop})
changed[field] = (int.from_bytes(usual.raw[field], "little") | {bits}).to_bytes(4, "little")
"""


@contextlib.contextmanager
def float_mode(bits):
    """The block in a mode with these bits. Yields a function that returns the mode's bits that are set."""
    names: dict = {}
    exec(SET_MODE.format(field=FIELD, bits=bits), names)

    def current():
        now = ctypes.create_string_buffer(64)
        names["libm"].fegetenv(now)
        return int.from_bytes(now.raw[FIELD], "little") & (FLUSHES | UPWARD | UPWARD << 1)

    names["libm"].fesetenv(names["changed"])
    try:
        yield current
    finally:
        names["libm"].fesetenv(names["usual"])


@pytest.mark.parametrize("level", blitz_attn.isa_levels())
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-39), ("float16", 3e-7), ("float32", 1)])
@pytest.mark.parametrize("bits", [FLUSHES, UPWARD])
def test_attention(level, dtype, scale, bits):
    """With values that are subnormal, or become so, on one thread and on two."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, 300, 16)).astype(dtype) for _ in range(3))
    v = (v * scale).astype(dtype)
    with blitz_attn.isa(level):
        usual = blitz_attn.block_sparse_attention(q, k, v, return_lse=True)
        for threads in (1, 2):
            with float_mode(bits) as current:
                found = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, num_threads=threads)
                left = current()
            assert left == bits
            assert all(map(same_bits, found, usual))


@pytest.mark.parametrize("name", operations())
def test_every_operation(name):
    """Under a mode in which subnormal numbers are 0, also for the arithmetic of NumPy that an operation may use."""
    operation = operations()[name]
    usual = [x.tobytes() for x in arrays_of(operation.call())]
    with float_mode(FLUSHES):
        found = operation.call()
    assert [x.tobytes() for x in arrays_of(found)] == usual


def test_threads_do_not_inherit_the_mode():
    """Threads begin in the mode of the thread that starts them."""
    code = SET_MODE.format(field=FIELD, bits=FLUSHES) + (
        "import numpy as np, blitz_attn\n"
        "rng = np.random.default_rng(0)\n"
        "q, k, v = (rng.standard_normal((1, 8, 600, 64), dtype=np.float32) for _ in range(3))\n"
        "v *= np.float32(1e-39)\n"
        "libm.fesetenv(changed)\n"
        "blitz_attn.block_sparse_attention(q, k, v, num_threads=2)\n"
        "libm.fesetenv(usual)\n"
        "vectors = [level for level in blitz_attn.isa_levels() if level != 'amx'][-1]\n"  # tiles take subnormal numbers for 0
        "with blitz_attn.isa(vectors):\n"
        "    one, two = (blitz_attn.block_sparse_attention(q, k, v, num_threads=n) for n in (1, 2))\n"
        "print((one == two).all(), (one != 0).mean() > 0.9)\n"
    )
    assert python("-c", code).split() == ["True", "True"]


def test_python_runs_in_its_own_mode_while_a_call_waits():
    """A signal handler that runs in the middle of a call has the mode of the program."""
    code = SET_MODE.format(field=FIELD, bits=FLUSHES) + (
        "import signal, numpy as np, blitz_attn\n"
        "small, seen = np.float32([1e-39]), []\n"
        "signal.signal(signal.SIGALRM, lambda *_: seen.append(float((small * np.float32(1)).view(np.int32)[0])))\n"
        "q = np.ones((1, 8, 4096, 64), np.float32)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.12)\n"
        "libm.fesetenv(changed)\n"
        "while not seen:\n    blitz_attn.block_sparse_attention(q, q, q, num_threads=1)\n"
        "print(seen[0])\n"
    )
    assert python("-c", code).strip() == "0.0"
