"""`blitz_attn.integrations.jax`: results and gradients inside a computation of JAX are the library's own to the bit.

There are few of these problems, because compiling takes longer than the call."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import blitz_attn
from blitz_attn.integrations import jax as integration

from . import arrays, bias_draws, checks
from .draw import Draw
from .framework_draws import CallDraw
from .problems import problem

DTYPES = ("float32", "float16", "bfloat16")  # not float64, which needs a setting of the whole process
LEARNED = ("attn_mask", "alibi_slopes")


@problem("jax.block_sparse_attention", weight=0.1)
def jax_attention(draw: Draw) -> None:
    with checks.at_level(draw):
        drawn = CallDraw(draw, DTYPES)
        bits = {"dtype": "bfloat16"} if drawn.dtype == "bfloat16" else {}
        host = [arrays.stored(draw.rng(name).standard_normal(size), drawn.dtype) for name, size in drawn.shapes.items()]
        given = [jax.numpy.asarray(arrays.dressed(x, drawn.dtype, "ml_dtypes" if bits else "numpy")) for x in host]
        biases: dict[str, Any] = {}
        if draw.flag("mask", 0.4):
            own = draw.pick("mask.dtype", ("bool", "float32"))
            seen = draw.rng("mask").random(drawn.full) < 0.7
            biases["attn_mask"] = seen if own == "bool" else draw.rng("mask.numbers").standard_normal(drawn.full).astype(np.float32)
        if draw.flag("alibi", 0.3):
            biases["alibi_slopes"] = np.asarray(bias_draws.draw_slopes(draw, drawn.heads), np.float32)
        rules = {name: x for name, x in drawn.options.items() if not name.endswith("lens") and not name.startswith("cu_")}
        traced = {name: x for name, x in drawn.options.items() if name not in rules} | biases
        traced = {name: x if isinstance(x, np.ndarray) else np.array(x, np.int64) for name, x in traced.items()}
        if drawn.sabi is not None:
            traced["sabi"] = np.asarray(drawn.sabi)
        learned = {name: x for name, x in biases.items() if x.dtype != bool} if draw.flag("learns") else {}

        def attend(q: Any, k: Any, v: Any, learned: Any, rest: Any) -> Any:
            return integration.block_sparse_attention(q, k, v, **learned, **rest, **rules, return_lse=True)

        rest = {name: x for name, x in traced.items() if name not in learned}
        results, gradient = jax.vjp(jax.jit(lambda q, k, v, learned: attend(q, k, v, learned, rest)), *given, learned)
        expected = blitz_attn.block_sparse_attention(*host, **traced, **rules, return_lse=True, **bits)
        for name, ours, own in zip(("out", "lse"), results, expected, strict=True):
            checks.same_bits(name, ours, own)
        dout = arrays.stored(draw.rng("dout").standard_normal(results[0].shape), drawn.dtype)
        dlse = draw.rng("dlse").standard_normal(results[1].shape).astype(np.float32)
        grads = gradient((jax.numpy.asarray(arrays.dressed(dout, drawn.dtype, "ml_dtypes" if bits else "numpy")), jax.numpy.asarray(dlse)))
        right = blitz_attn.block_sparse_attention_backward(
            dout, *host, *expected, **traced, **rules, dlse=dlse, bias_grads=bool(learned), **bits
        )
        named = dict(zip(("q", "k", "v", *LEARNED), right, strict=False))
        for name, ours in [*zip("qkv", grads, strict=False), *grads[3].items()]:
            checks.same_bits(f"d{name}", ours, named[name])
