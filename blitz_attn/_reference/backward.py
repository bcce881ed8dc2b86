"""float64 twin of the gradients of attention over whole arrays, and their computation in the precision of the inputs. Public
through `blitz_attn.reference`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .._arrays import dtype_name
from .._block_sparse import call as operation
from . import attend as core
from .common import name_of, real_of, rounding_of, to_float64, with_options_of, written
from .dense import join, sequences_of, split, split_numbers

__all__ = ["block_sparse_attention_backward", "dense_same_precision_backward"]


class _BiasSums:
    """The gradients of a mask (B or 1, H or 1, Sq or 1, Skv or 1) and of the slopes (H,). None for a bias that is not given, and
    for a mask of bool."""

    def __init__(self, attn_mask, alibi_slopes):
        self.shape = None if attn_mask is None or dtype_name(attn_mask.dtype) == "bool" else np.shape(attn_mask)
        self.mask = None if self.shape is None else np.zeros((1,) * (4 - len(self.shape)) + self.shape)
        self.slopes = None if alibi_slopes is None else np.zeros(len(alibi_slopes))

    def add(self, b, begin, rows, keys, dbias):
        """Adds the gradient of the biases of some queries and keys of a batch entry, (heads, queries, keys)."""
        if self.mask is not None:
            place, every = self.mask[min(b, len(self.mask) - 1)], (np.arange(len(dbias)), rows, keys)
            shared = tuple(axis for axis, n in enumerate(place.shape) if n == 1)
            place[np.ix_(*([0] if axis in shared else at for axis, at in enumerate(every)))] += dbias.sum(axis=shared, keepdims=True)
        if self.slopes is not None:
            self.slopes -= (dbias * np.abs(rows[:, None] + begin - keys)).sum(axis=(1, 2))

    def results(self):
        return (None if self.mask is None else self.mask.reshape(self.shape)), self.slopes


def _numbers(x: Any, real: type, layout: str, offsets: Any, entries: int) -> list[Any]:
    """(heads, tokens) of each batch entry, from an array of the shape of the log-sum-exp; None for each entry where the array is None."""
    return [None] * entries if x is None else split_numbers(to_float64(x).astype(real), layout, offsets)


def _gradients(name: str, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sabi: Any, o: dict[str, Any]) -> tuple[Any, ...]:
    """The gradients as a program in dtype `name` computes them, written to `grads` if given. With `accumulate`, dk and dv are added
    to the numbers in `grads`."""
    layout, real, inputs = o["layout"], real_of(name), name_of(q, o["dtype"])
    dout, q, k, v, out = (to_float64(x, o["dtype"]).astype(real) for x in (dout, q, k, v, out))
    sequences = sequences_of(q, k, v, sabi, o, inputs)
    outs, douts = (split(x, layout, o["cu_seqlens_q"], o["num_heads"]) for x in (out, dout))
    lses, dlses = (_numbers(x, real, layout, o["cu_seqlens_q"], len(sequences)) for x in (lse, o["dlse"]))
    rules, r, biases = core.ScoreRules.of(o), rounding_of(name), _BiasSums(o["attn_mask"], o["alibi_slopes"])
    parts = [
        core.attend_backward(s, dout, out, lse, rules, r, dlse, partial(biases.add, b, s.begin) if o["bias_grads"] else None)
        for b, (s, dout, out, lse, dlse) in enumerate(zip(sequences, douts, outs, lses, dlses, strict=True))
    ]
    results = [join([part[i] for part in parts], layout, x.shape) for i, x in enumerate((q, k, v))]
    grads = o["grads"] or (None, None, None)
    if o["accumulate"]:
        for i in (1, 2):
            results[i] = results[i] + grads[i]
    return (*(written(x, given) for x, given in zip(results, grads, strict=True)), *(biases.results() if o["bias_grads"] else ()))


@with_options_of(operation.block_sparse_attention_backward)
def block_sparse_attention_backward(dout, q, k, v, out, lse, sabi=None, **options):
    """See `blitz_attn.block_sparse_attention_backward`."""
    return _gradients("float64", dout, q, k, v, out, lse, sabi, options)


@with_options_of(block_sparse_attention_backward)
def dense_same_precision_backward(dout, q, k, v, out, lse, sabi=None, **options):
    """The gradients of `block_sparse_attention_backward` as a plain array program computes them in the precision of the inputs.

    For float32 inputs, every step is in float32. For float16 and bfloat16 inputs, products are summed in float32, and the
    scaled scores, the probabilities, their gradients and the results are rounded to the input dtype. For float64 inputs, the
    results are those of `block_sparse_attention_backward`. The error of the library against float64 is compared with the error of this
    computation.

    Parameters
    ----------
    dout, q, k, v, out, lse, sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads
        See `blitz_attn.block_sparse_attention_backward`.
    num_kv_heads, q_begin, q_total, kv_ranges, attn_mask, alibi_slopes, softcap, dlse, grads, bias_grads, accumulate, dtype, num_threads
        See `block_sparse_attention_backward` in this module.

    Returns
    -------
    dq, dk, dv : numpy.ndarray
        float64 arrays of the rounded values. With `bias_grads`, the gradients of the biases follow, as in
        `block_sparse_attention_backward`.

    Raises
    ------
    ValueError
        A shape, length, block list or option out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import reference
    >>> q, k, v, dout = (np.float32([[[[0.1 * n, 0.3]] * 3]]) for n in range(4))
    >>> out, lse = reference.dense_same_precision(q, k, v, return_lse=True)
    >>> [x.shape for x in reference.dense_same_precision_backward(dout, q, k, v, out, lse)]
    [(1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)]
    """
    return _gradients(name_of(q, options["dtype"]), dout, q, k, v, out, lse, sabi, options)
