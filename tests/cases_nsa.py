"""Problems of native sparse attention, the tolerances of the upstream suite, and the comparison with the reference."""

import math
from itertools import pairwise

import numpy as np
import pytest

import blitz_attn
from blitz_attn import nsa, reference, testing
from cases import ISA_LEVELS, bits_option, dtype_of, poisoned

GRADIENTS = reference.NSAGradients._fields
WEIGHTS = ("w_k_compress", "w_v_compress", "gate_proj_weight", "gates")

# Options of `nsa` at sizes for tests.
PAPER = {"compress_block_size": 16, "num_selected_blocks": 4, "window_size": 21}
MSLK = {"mode": "mslk", "compress_block_size": 16, "num_selected_blocks": 3, "window_size": 21, "q_tile_size": 32}
PAPER_STRIDES = {
    "compress_block_size": 12, "compress_stride": 4, "select_block_size": 20, "num_selected_blocks": 5, "init_blocks": 2, "local_blocks": 1,
    "window_size": 8,
}  # fmt: skip

MODES = {
    "paper": PAPER,
    "paper_strides": PAPER_STRIDES,
    "paper_free": {**PAPER, "init_blocks": 0, "local_blocks": 0, "compress_stride": 16},
    "paper_not_causal": {**PAPER, "causal": False},
    "mslk": MSLK,
    "mslk_not_causal": {**MSLK, "causal": False},
}  # fmt: skip
both_modes = pytest.mark.parametrize("mode", [PAPER, MSLK], ids=["paper", "mslk"])
every_mode = pytest.mark.parametrize("mode", list(MODES))

# Tolerances of the upstream suite for each of its comparisons.
UPSTREAM = {
    "compress_float32": 1e-5,
    "compress_bfloat16": 1e-3,  # upstream's fused kernel against its plain computation; all inputs of that suite are multiplied by 0.1
    "compress_bfloat16_against_float32": 1e-2,
    "gating_bfloat16_max": 0.05,
    "gating_bfloat16_mean": 5e-3,
    "gating_float16_max": 1e-2,
    "gating_packed": 1e-5,
    "gating_uniform": 1e-6,
    "forward_max": 0.1,
    "forward_mean": 0.01,
    "backward_max": 0.5,
    "backward_mean": 0.05,
    "backward_not_causal_max": 5.0,
    "backward_not_causal_mean": 0.1,
    "backward_gates_mean": 1.0,
    "varlen_max": 0.01,
    "varlen_mean": 1e-3,
    "varlen_one_sequence": 1e-5,
    "varlen_backward_one_sequence": 0.01,
    "gradcheck": {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3},  # torch's own tolerances
}


# ---- Problems -------------------------------------------------------------------------------------------------------


def tensors(shape, *, dtype="float32", seed=0, size=1.0):
    """Normal numbers of a shape, in a dtype."""
    return testing.round_to(size * np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def problem(tokens, heads=4, kv_heads=2, dim=16, v_dim=None, *, batch=2, packed=False, dtype="float32", seed=0, size=1.0, weights=()):
    """q, k, v and a dictionary of the arrays that `weights` names. If `packed`, `tokens` is a list, and cu_seqlens is another array."""
    v_dim = v_dim or dim
    leading = (sum(tokens),) if packed else (batch, tokens)
    rng = np.random.default_rng(seed)

    def draw(*shape, by=1.0):
        return testing.round_to(by * size * rng.standard_normal(shape, dtype=np.float32), dtype)

    q, k, v = draw(*leading, heads, dim), draw(*leading, kv_heads, dim), draw(*leading, kv_heads, v_dim)
    made = {
        "w_k_compress": draw(kv_heads, dim, dim, by=1 / math.sqrt(dim)),
        "w_v_compress": draw(kv_heads, v_dim, v_dim, by=1 / math.sqrt(v_dim)),
        "gate_proj_weight": draw(heads, 3, dim, by=1 / math.sqrt(dim)),
        "gates": testing.round_to(rng.random((*leading, heads, 3)), dtype),
    }
    options = {name: made[name] for name in weights}
    if packed:
        options["cu_seqlens"] = np.cumsum([0, *tokens]).astype(np.int32)
    return q, k, v, options


def one_hot(q, branch, dtype=None):
    """Gates that are 1 for one branch (0 compressed, 1 selected, 2 window) and 0 for the others."""
    gates = np.zeros((*q.shape[:-1], 3))
    gates[..., branch] = 1
    return testing.round_to(gates, dtype or dtype_of(q))


def sequences(q, options):
    """Slices of the tokens of each sequence."""
    if "cu_seqlens" not in options:
        return [slice(0, q.shape[1])] * q.shape[0]
    return [slice(int(a), int(b)) for a, b in pairwise(options["cu_seqlens"])]


def alone(n, q, k, v, options, routing=None):
    """Arguments of a call of sequence n alone, from the arguments of a packed call."""
    part = sequences(q, options)[n]
    own = {name: x for name, x in options.items() if name not in ("cu_seqlens", "gates")}
    if "gates" in options:
        own["gates"] = options["gates"][None, part]
    return (*(np.ascontiguousarray(x[part])[None] for x in (q, k, v)), own)


# ---- Comparison -----------------------------------------------------------------------------------------------------


def run(q, k, v, **options):
    """(result, context). The result is written into an array of NaN."""
    out = poisoned((*q.shape[:-1], v.shape[-1]), q)
    result, context = nsa.nsa(q, k, v, out=out, return_context=True, **bits_option(q), **options)
    assert result is out
    return out, context


def gradients(q, k, v, seed=99, **options):
    """dout, context and gradients."""
    _, context = run(q, k, v, **options)
    dout = tensors((*q.shape[:-1], v.shape[-1]), dtype=dtype_of(q), seed=seed)
    return dout, context, nsa.nsa_backward(dout, context)


def errors_close(values, exact, rough, dtype, factor, what):
    ours, yardstick = testing.error_of(values, exact, dtype), testing.error_of(rough, exact)
    assert testing.meets_error_rule(ours, yardstick, dtype, factor), f"{what}: error {ours}, of the plain computation {yardstick}"


def check(q, k, v, *, levels=ISA_LEVELS, **options):
    """Compare the result and all gradients with the float64 reference, by the error rule, at every instruction set level.

    If the scores of two blocks differ by less than rounding, either block may be chosen. So the reference attends the blocks that the
    operation chose. In float64, the reference must choose the same blocks. The factors of the rule are those of `cases.check`, and 3 for
    gradients. Returns (result, gradients) of the highest level.
    """
    dtype, bits = dtype_of(q), bits_option(q)
    previous = None
    for level in levels:
        with blitz_attn.isa(level):
            out, _ = run(q, k, v, **options)
            dout, context, grads = gradients(q, k, v, **options)
        routing = context.block_indices
        if previous is None or not np.array_equal(previous, routing):
            frozen = {**options, **bits, "block_indices": routing}
            exact, exact_context = reference.nsa(q, k, v, return_context=True, **frozen)
            rough, rough_context = reference.nsa_same_precision(q, k, v, name=dtype, **frozen)
            exact_grads, rough_grads = (reference.nsa_backward(dout, c) for c in (exact_context, rough_context))
            previous = routing
        errors_close(out, exact, rough, dtype, 2.0 if exact.size >= 2000 else 3.0, level)
        assert grads._fields == GRADIENTS
        for name, ours, true, plain in zip(GRADIENTS, grads, exact_grads, rough_grads, strict=True):
            assert (ours is None) == (true is None), name
            if true is not None:
                assert dtype_of(ours) == dtype, name
                errors_close(ours, true, plain, dtype, 3.0, f"{level}: {name}")
    if dtype == "float64" and "block_indices" not in options:
        np.testing.assert_array_equal(routing, reference.nsa(q, k, v, return_context=True, **options)[1].block_indices)
    return out, grads
