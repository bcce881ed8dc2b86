"""What the suites of native sparse attention share: which module is tested, and the comparison with the reference.

The suites test `blitz_attn.nsa`. ``BLITZ_ATTN_TEST_NSA=blitz_attn.reference`` lets them test the reference instead, as an ideal
library that rounds its float64 results once: they have to pass then, and with a fault put into a copy of it, to fail.
"""

import importlib
import os
from types import SimpleNamespace

import numpy as np

import blitz_attn
from blitz_attn import reference, testing
from cases import ISA_LEVELS, bits_option, dtype_of, poisoned
from cases_nsa import GRADIENTS, tensors

MODULE = os.environ.get("BLITZ_ATTN_TEST_NSA", "blitz_attn.nsa")


# ---- The module under test ------------------------------------------------------------------------------------------


def _rounded(function, like):
    """`function` of the reference with its float64 results rounded to the dtype of argument number `like`."""

    def call(*args, **options):
        dtype = dtype_of(np.asarray(args[like]))
        return_lse = options.get("return_lse", False)
        results = function(*args, **options)

        def one(x):
            return None if x is None else testing.round_to(x, dtype) if x.dtype == np.float64 else x

        if return_lse:
            return one(results[0]), results[1]
        return tuple(map(one, results)) if isinstance(results, tuple) else one(results)

    return call


def _as_library(module):
    """The twins as a library would behave that computes in float64 and rounds once."""

    def nsa(q, k, v, *, out=None, return_context=False, **options):
        exact, context = module.nsa(q, k, v, return_context=True, **options)
        dtype = dtype_of(q)
        context.bits = dtype
        result = testing.round_to(exact, dtype)
        if q.dtype == np.uint16:
            result = result.view(np.uint16)
        if out is not None:
            if (out.shape, dtype_of(out)) != (result.shape, dtype):
                raise ValueError(f"out: expected shape {result.shape} and dtype {dtype}, got {out.shape} and {dtype_of(out)}")
            out[...] = result
            result = out
        return (result, context) if return_context else result

    def nsa_backward(dout, ctx, *, num_threads=None):
        grads = module.nsa_backward(dout, ctx)
        return module.NSAGradients(*(None if x is None else testing.round_to(x, ctx.bits) for x in grads))

    leading = {
        "compress_kv": 0,
        "compress_kv_backward": 2,
        "compressed_attention": 0,
        "compressed_attention_backward": 1,
        "selected_attention": 0,
        "selected_attention_backward": 1,
        "window_attention": 0,
        "window_attention_backward": 1,
        "compute_gates": 0,
        "gate_and_combine": 0,
        "gating_backward": 0,
    }
    parts = {name: _rounded(getattr(module, name), like) for name, like in leading.items()}
    return SimpleNamespace(nsa=nsa, nsa_backward=nsa_backward, score_and_select_blocks=module.score_and_select_blocks, **parts)


_module = importlib.import_module(MODULE)
IS_REFERENCE = hasattr(_module, "nsa_same_precision")
library = _as_library(_module) if IS_REFERENCE else _module


# ---- Comparison -----------------------------------------------------------------------------------------------------


def run(q, k, v, **options):
    """(result over NaN, context) of the module under test."""
    out = poisoned((*q.shape[:-1], v.shape[-1]), q)
    result, context = library.nsa(q, k, v, out=out, return_context=True, **bits_option(q), **options)
    assert result is out
    return out, context


def routing_of(context):
    """The blocks that a call chose."""
    return np.asarray(context.block_indices)


SELECTION = ("causal", "q_tile_size", "scale", "cu_seqlens", "mode", "compress_stride", "select_block_size", "init_blocks", "local_blocks")


def exact_scores(q, k, v, **options):
    """float64 scores of every sequence, by which `nsa` with these options has to choose."""
    bits = bits_option(q)
    size = options.get("compress_block_size", 64)
    paper = options.get("mode", "paper") == "paper"
    stride = (options.get("compress_stride") or max(1, size // 2)) if paper else size
    k_cmp, _ = reference.compress_kv(
        k, v, size, options.get("w_k_compress"), None, stride=stride, cu_seqlens=options.get("cu_seqlens"), **bits
    )
    named = {name: options[name] for name in SELECTION if name in options}
    return reference.score_blocks(testing.to_float64(q, bits.get("dtype")), k_cmp, options.get("num_selected_blocks", 16), size, **named)


SCORE_ROUNDINGS = {"float64": (2.0**-53, 1000), "float32": (2.0**-24, 64), "float16": (2.0**-11, 16), "bfloat16": (2.0**-8, 16)}


def check_selection(indices, scores, count, dtype, packed=False):
    """Rows are ascending, then -1, without repeats; forced blocks are in, ineligible ones are not; and no block that was left out
    has a score above that of one that was taken, beyond the rounding of the scores."""
    indices = np.asarray(indices)
    assert indices.dtype == np.int32
    assert indices.shape[-1] <= count
    unit, factor = SCORE_ROUNDINGS[dtype]
    begin = 0
    for n, exact in enumerate(scores):
        rows = exact.shape[1]
        part = indices[:, begin : begin + rows] if packed else indices[n]
        begin += rows
        assert part.shape[:2] == exact.shape[:2]
        blocks = exact.shape[2]
        assert part.min(initial=0) >= -1
        assert part.max(initial=-1) < blocks
        listed = part >= 0
        assert (np.diff(listed.astype(int), axis=-1) <= 0).all(), "a pad before a block"
        assert ((np.diff(part, axis=-1) > 0) | ~listed[..., 1:]).all(), "not ascending"
        taken = np.zeros((*part.shape[:2], blocks + 1), bool)
        np.put_along_axis(taken, np.where(listed, part, blocks).astype(np.int64), True, axis=-1)
        taken = taken[..., :blocks]
        eligible = ~np.isneginf(exact)
        assert not (taken & ~eligible).any(), "a block that may not be selected"
        np.testing.assert_array_equal(taken.sum(-1), np.minimum(eligible.sum(-1), count), err_msg="places left unused")
        assert taken[np.isposinf(exact)].all(), "a forced block left out"
        free = eligible & ~np.isposinf(exact)
        largest = np.abs(np.where(free, exact, 0)).max(axis=-1, initial=0)
        worst = np.where(taken & free, exact, np.inf).min(axis=-1, initial=np.inf)
        best = np.where(~taken & free, exact, -np.inf).max(axis=-1, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            short = best - worst > factor * unit * largest + 1e-30
        assert not short.any(), f"better blocks left out in {int(short.sum())} rows"


def errors_close(values, exact, rough, dtype, factor, what):
    ours, yardstick = testing.error_of(values, exact, dtype), testing.error_of(rough, exact)
    assert testing.meets_error_rule(ours, yardstick, dtype, factor), f"{what}: error {ours}, of the plain computation {yardstick}"


def check(q, k, v, *, levels=ISA_LEVELS, **options):
    """Hold the selection and the result against the float64 reference, by the error rule, at every instruction set level.

    Blocks whose scores differ by less than rounding may be chosen either way, so the reference attends to what was chosen. Factors are
    those of `cases.check`. Returns (result, context) of the highest level.
    """
    dtype, bits = dtype_of(q), bits_option(q)
    given = options.get("block_indices")
    scores = None if given is not None else exact_scores(q, k, v, **options)
    previous = None
    for level in levels:
        with blitz_attn.isa(level):
            out, context = run(q, k, v, **options)
        routing = routing_of(context)
        if scores is not None:
            check_selection(routing, scores, options.get("num_selected_blocks", 16), dtype, "cu_seqlens" in options)
        if previous is None or not np.array_equal(previous, routing):
            frozen = {**options, **bits, "block_indices": routing}
            exact = reference.nsa(q, k, v, **frozen)
            rough = reference.nsa_same_precision(q, k, v, name=dtype, **frozen)[0]
            previous = routing
        errors_close(out, exact, rough, dtype, 2.0 if exact.size >= 2000 else 3.0, level)
    return out, context


def check_backward(q, k, v, *, levels=ISA_LEVELS, seed=99, **options):
    """The same for every gradient, whose factor is 3. Returns the gradients of the highest level."""
    dtype, bits = dtype_of(q), bits_option(q)
    dout = tensors((*q.shape[:-1], v.shape[-1]), dtype=dtype, seed=seed)
    previous = None
    for level in levels:
        with blitz_attn.isa(level):
            _, context = run(q, k, v, **options)
            grads = library.nsa_backward(dout, context)
        routing = routing_of(context)
        if previous is None or not np.array_equal(previous, routing):
            frozen = {**options, **bits, "block_indices": routing}
            exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **frozen)[1])
            rough = reference.nsa_backward(dout, reference.nsa_same_precision(q, k, v, name=dtype, **frozen)[1])
            previous = routing
        assert type(grads)._fields == GRADIENTS
        for name, ours, true, plain in zip(GRADIENTS, grads, exact, rough, strict=True):
            assert (ours is None) == (true is None), name
            if true is not None:
                assert dtype_of(ours) == dtype, name
                errors_close(ours, true, plain, dtype, 3.0, f"{level}: {name}")
    return grads
