"""A program may round in another direction, or flush subnormal numbers to 0: results do not depend on its mode, and calls leave the mode as it is."""

import contextlib
import ctypes
import ctypes.util
import platform

import numpy as np
import pytest

import blitz_attn
from blitz_attn import nsa, sabi, select
from cases import same_bits
from cases_operations import arrays_of, operations
from interpreters import python

FIELD, FLUSHES, UPWARD, MODE = {  # the control register's bytes in fenv_t; its bits to flush, to round upward, and to flush or round
    "x86_64": (slice(28, 32), 0x8040, 0x4000, 0xE040),
    "aarch64": (slice(0, 4), 1 << 24, 1 << 22, 7 << 22),
}.get(platform.machine(), (None, 0, 0, 0))
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
    """Run the block in a mode with these bits. Yields a function that returns which bits for flushing and rounding are set."""
    names: dict = {}
    exec(SET_MODE.format(field=FIELD, bits=bits), names)

    def current():
        now = ctypes.create_string_buffer(64)
        names["libm"].fegetenv(now)
        return int.from_bytes(now.raw[FIELD], "little") & MODE

    names["libm"].fesetenv(names["changed"])
    try:
        yield current
    finally:
        names["libm"].fesetenv(names["usual"])


ROUNDINGS = {  # arguments of fesetround(), which also sets the mode of the unit that computes numpy.longdouble
    "x86_64": {"downward": 0x400, "upward": 0x800, "towards 0": 0xC00},
    "aarch64": {"downward": 0x800000, "upward": 0x400000, "towards 0": 0xC00000},
}.get(platform.machine(), {})


@contextlib.contextmanager
def rounding(direction):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    before = libm.fegetround()
    libm.fesetround(ROUNDINGS[direction])
    try:
        yield
        assert libm.fegetround() == ROUNDINGS[direction]
    finally:
        libm.fesetround(before)


def other_modes():
    """Context managers of every mode that results must not depend on, by name."""
    return {"flushes": float_mode(FLUSHES)} | {direction: rounding(direction) for direction in ROUNDINGS}


LEVELS = list(dict.fromkeys((blitz_attn.isa_levels()[0], blitz_attn.isa_levels(available=True)[-1])))


def changed_by(call):
    """The modes in which a call returns other bits than in the usual mode."""
    usual = [x.tobytes() for x in arrays_of(call())]
    changed = []
    for name, mode in other_modes().items():
        with mode:
            found = call()
        if [x.tobytes() for x in arrays_of(found)] != usual:
            changed.append(name)
    return changed


@pytest.mark.parametrize("level", blitz_attn.isa_levels())
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-39), ("float16", 3e-7), ("float32", 1)])
@pytest.mark.parametrize("bits", [FLUSHES, UPWARD])
def test_attention(level, dtype, scale, bits):
    """Values are subnormal or normal, and calls use one thread and two."""
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", operations())
def test_every_operation(name, level):
    """The mode must not reach any arithmetic of NumPy within an operation, either."""
    with blitz_attn.isa(level):
        assert not changed_by(operations()[name].call)


TENTHS = [0.1, 0.2, 0.3, 0.4]


def numbers_of_calls():
    """Calls that convert numeric arguments, or compute with them outside the threads' work, by name."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, 60, 24), dtype=np.float32) for _ in range(3))
    weights, tokens = rng.standard_normal((3, 4, 24, 24)), [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    attend, paged, ones = blitz_attn.block_sparse_attention, blitz_attn.paged_attention, np.ones(4, np.float32)
    out, lse = attend(q, k, v, return_lse=True)
    lists, block = sabi.causal(60, block_shape=(8, 8)), {"block_shape": (8, 8)}
    values, scales = blitz_attn.quantize_kv(k, "int8")
    eight, cache = values.reshape(-1, 4, 1, 24)[:8], k.reshape(-1, 4, 1, 24)[:8]
    few, requests = np.ascontiguousarray(q[:, :2, 0]), (np.array([[0, 1], [2, 3]]), [8, 7])
    extended = np.array(TENTHS, np.longdouble) + np.array(TENTHS, np.longdouble) * 2.0**-24
    options = {"compress_block_size": 8, "num_selected_blocks": 3, "window_size": 8}
    halves, half_weights = [x.astype(np.float16) for x in tokens], weights[0].astype(np.float16)
    weighted = options | {"gate_proj_weight": half_weights[:, :3], "w_k_compress": half_weights}
    wide, wide_tokens = [x.astype(np.float64) for x in (q, k, v)], [x.astype(np.float64) for x in tokens]

    def context_gradients():
        result, context = nsa.nsa(*tokens, **weighted, return_context=True)
        return tuple(nsa.nsa_backward(result, context))

    return {
        "alibi_slopes": lambda: attend(q, k, v, alibi_slopes=TENTHS),
        "alibi_slopes, longdouble": lambda: attend(q, k, v, alibi_slopes=extended),
        "dalibi_slopes": lambda: blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, alibi_slopes=ones, bias_grads=True),
        "sinks": lambda: attend(q, k, v, sinks=TENTHS, return_lse=True),
        "default scale": lambda: attend(*wide),
        "k_scale": lambda: paged(few, eight, eight, *requests, k_scale=0.1, v_scale=0.3),
        "k_scale, float64": lambda: paged(few, eight, eight, *requests, k_scale=np.array([0.1]), v_scale=np.array([0.3])),
        "v_scale, subnormal": lambda: paged(few, eight, eight, *requests, k_scale=0.1, v_scale=1e-40),
        "sinks, paged": lambda: paged(few, cache, cache, *requests, sinks=TENTHS[:2], alibi_slopes=TENTHS[:2]),
        "sinks, in chunks": lambda: paged(few, cache, cache, *requests, sinks=[3.3, 4.7], kv_split=4, return_lse=True),
        "dequantize_kv": lambda: blitz_attn.dequantize_kv(values, scales),
        "dequantize_kv, subnormal": lambda: blitz_attn.dequantize_kv(values, 1e-43),
        "select_blocks_prefill, density": lambda: blitz_attn.select_blocks_prefill(
            q, k, density=0.553125, chooser=select.Pooled(4), block_shape=(8, 12)
        ),
        "recall": lambda: select.recall(q, k, lists, **block),
        "output_error": lambda: select.output_error(q, k, v, lists, **block),
        "nsa, default scale": lambda: nsa.nsa(*wide_tokens, **options),
        "nsa_backward": context_gradients,
        "compute_gates": lambda: nsa.compute_gates(tokens[0]),
        "compress_kv_backward": lambda: nsa.compress_kv_backward(
            *(x[:, :14] for x in halves[:2]), *halves[1:], 8, stride=4, w_k=half_weights
        ),
        "sabi.density": lambda: sabi.density(lists, 11, per_head=True),
        "sabi.sparsity": lambda: sabi.sparsity(lists, 11),
        "sabi.balance": lambda: sabi.balance(lists[..., :3, :]),
        "sabi.frame_plan": lambda: sabi.frame_plan(10, 10, 0.1)[3:],
    }  # fmt: skip


NUMBERS = numbers_of_calls()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_calls(name, level):
    with blitz_attn.isa(level):
        assert not changed_by(NUMBERS[name])


def test_the_mode_is_restored_if_a_call_raises():
    with float_mode(FLUSHES) as current:
        with pytest.raises(ValueError, match="^sparsity: "):
            sabi.frame_plan(4, 4, 2.0)
        assert current() == FLUSHES
    with rounding("upward"), pytest.raises(ValueError, match="^sparsity: "):  # rounding() checks the mode at its end
        sabi.frame_plan(4, 4, 2.0)


def test_threads_do_not_inherit_the_mode():
    """A new thread has the mode of the thread that starts it, but the library's threads compute in the usual mode."""
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
    """A signal handler that runs in the middle of a call has the mode of the program, and not the mode of the call."""
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
