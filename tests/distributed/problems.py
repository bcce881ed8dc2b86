"""Calls of attention over a whole sequence, with the same arrays on each rank, and helpers to compare ranks. This file needs no MPI."""

import numpy as np

import blitz_attn
from blitz_attn import testing
from blitz_attn.distributed import _comm

DISPATCHES = ("cut", "zigzag", "contiguous", "items")


class Problem:
    """A call over the whole sequence, which is the same on all ranks, and the arguments for its plan."""

    def __init__(
        self, seed, s_q, s_kv=None, *, batch=1, heads=4, kv_heads=2, dim=32, dim_v=None, dtype="float32", layout="BNSD", block_shape=(64, 32),
        density=None, list_batch=1, list_heads=1, q_sizes=None, kv_sizes=None, softcap=None, sinks=None, **options,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        s_kv = s_q if s_kv is None else s_kv
        dim_v = dim if dim_v is None else dim_v
        self.layout, self.options = layout, options
        if layout == "TND":
            cu_q = np.cumsum([0, *q_sizes])
            cu_kv = cu_q if kv_sizes is None else np.cumsum([0, *kv_sizes])
            self.options = options | {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
            batch, s_q, s_kv = len(q_sizes), max(q_sizes), int(np.diff(cu_kv).max())
            shapes = [(int(cu[-1]), h, d) for cu, h, d in ((cu_q, heads, dim), (cu_kv, kv_heads, dim), (cu_kv, kv_heads, dim_v))]
        else:
            shapes = [(batch, h, s, d) for h, s, d in ((heads, s_q, dim), (kv_heads, s_kv, dim), (kv_heads, s_kv, dim_v))]
        self.arrays = []
        for shape in shapes:
            x = testing.round_to(rng.standard_normal(shape), dtype)
            x = np.ascontiguousarray(x.swapaxes(1, 2)) if layout in ("BSND", "BSH") else x
            self.arrays.append(x.reshape(*x.shape[:2], -1) if layout == "BSH" else x)
        self.sabi = None
        if density is not None:
            rows, columns = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
            mask = rng.random((list_batch, list_heads, rows, columns)) < density
            mask[rng.random(mask.shape[:3]) < 0.1] = False
            self.sabi = blitz_attn.sabi.from_block_mask(mask)
        self.heads = {"num_heads": heads, "num_kv_heads": kv_heads} if layout == "BSH" else {}
        self.call = {"block_shape": block_shape, "layout": layout, **self.options}
        lengths = {} if layout == "TND" else {"s_q": s_q, "s_kv": s_kv}
        self.plan = {
            **lengths, **self.call, "batch": batch, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "head_dim_v": dim_v, "dtype": dtype,
        }  # fmt: skip
        self.caps = {name: x for name, x in (("softcap", softcap), ("sinks", sinks)) if x is not None}
        self.bits = {"dtype": "bfloat16"} if self.arrays[0].dtype == np.uint16 else {}

    def whole(self):
        return blitz_attn.block_sparse_attention(*self.arrays, self.sabi, return_lse=True, **self.call, **self.heads, **self.caps, **self.bits)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def raised(call):
    """The exception of a call as text; None if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def same_everywhere(comm, value):
    """The value, after a check that it is the same on all ranks."""
    values = _comm.everyone(comm, value)
    assert all(v == values[0] for v in values), values
    return values[0]


def lse_axis(problem):
    return 0 if problem.layout == "TND" else 2
