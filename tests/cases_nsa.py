"""Problems of native sparse attention, and the tolerances of the upstream suite."""

import math
from itertools import pairwise

import numpy as np

from blitz_attn import reference, testing
from cases import dtype_of

GRADIENTS = reference.NSAGradients._fields
WEIGHTS = ("w_k_compress", "w_v_compress", "gate_proj_weight", "gates")

# Options of `nsa` at sizes for tests.
PAPER = {"compress_block_size": 16, "num_selected_blocks": 4, "window_size": 21}
MSLK = {"mode": "mslk", "compress_block_size": 16, "num_selected_blocks": 3, "window_size": 21, "q_tile_size": 32}
PAPER_STRIDES = {
    "compress_block_size": 12, "compress_stride": 4, "select_block_size": 20, "num_selected_blocks": 5, "init_blocks": 2, "local_blocks": 1,
    "window_size": 8,
}  # fmt: skip

# Tolerances of the upstream suite, by what they are for.
UPSTREAM = {
    "compress_float32": 1e-5,
    "compress_bfloat16": 1e-3,  # fused against plain, of inputs * 0.1 as all of its suite
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
    "gradcheck": {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3},  # torch's own
}


# ---- Problems -------------------------------------------------------------------------------------------------------


def tensors(shape, *, dtype="float32", seed=0, size=1.0):
    """Normal numbers of a shape, in a dtype."""
    return testing.round_to(size * np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def problem(tokens, heads=4, kv_heads=2, dim=16, v_dim=None, *, batch=2, packed=False, dtype="float32", seed=0, size=1.0, weights=()):
    """q, k, v and a dictionary of what `weights` names. `packed`: tokens is a list of lengths, and cu_seqlens comes along."""
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
    """Gates that leave one branch: 0 compressed, 1 selected, 2 window."""
    gates = np.zeros((*q.shape[:-1], 3))
    gates[..., branch] = 1
    return testing.round_to(gates, dtype or dtype_of(q))


def sequences(q, options):
    """Slices of the tokens of each sequence."""
    if "cu_seqlens" not in options:
        return [slice(0, q.shape[1])] * q.shape[0]
    return [slice(int(a), int(b)) for a, b in pairwise(options["cu_seqlens"])]


def alone(n, q, k, v, options, routing=None):
    """Arguments of sequence n of a packed call as a call of its own."""
    part = sequences(q, options)[n]
    own = {name: x for name, x in options.items() if name not in ("cu_seqlens", "gates")}
    if "gates" in options:
        own["gates"] = options["gates"][None, part]
    return (*(np.ascontiguousarray(x[part])[None] for x in (q, k, v)), own)
