"""The grid of options for the tests of attention and of its gradients: dtypes, layouts, head ratios, token rules, lists and head dims."""

import numpy as np
import pytest

from blitz_attn import testing
from cases import DTYPES, LAYOUTS, random_lists

# Two batch entries. No length is a multiple of the size of its blocks.
B, Q_LEN, KV_LEN, BLOCK_SHAPE = 2, 77, 131, (16, 24)
ROWS, COLUMNS = 5, 6

RULES = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (20, 7)},
    "causal window": {"causal": True, "window": (33, -1)},
    "lengths": {"q_lens": [77, 30], "kv_lens": [5, 131]},
    "causal lengths": {"q_lens": [60, 77], "kv_lens": [131, 40], "causal": True},
    "no keys": {"kv_lens": [0, 131], "q_lens": [77, 0]},
}
LISTS = {"all blocks": None, "lists": {"empty": 0.0}, "empty rows": {"empty": 0.4}}
HEADS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (3, 1)}
DIMS = {"40x24": (40, 24), "64x64": (64, 64), "7x33": (7, 33)}


def every_combination(function):
    """Decorate a test of (dtype, layout, heads, rule, kind, dims), which are names in this file's tables."""
    for name, values in [("dims", DIMS), ("kind", LISTS), ("rule", RULES), ("heads", HEADS), ("layout", LAYOUTS), ("dtype", DTYPES)]:
        function = pytest.mark.parametrize(name, list(values))(function)
    return function


def rule_options(rule, layout, heads, kv_heads):
    """Options of a call in a layout. For TND, lengths become cumulative lengths."""
    options = dict(RULES[rule], layout=layout)
    if layout == "BSH":
        options.update(num_heads=heads, num_kv_heads=kv_heads)
    if layout == "TND":
        q_lens, kv_lens = options.pop("q_lens", [Q_LEN] * B), options.pop("kv_lens", [KV_LEN] * B)
        options.update(cu_seqlens_q=np.cumsum([0, *q_lens]), cu_seqlens_kv=np.cumsum([0, *kv_lens]))
    return options


def trimmed(q, k, v, options):
    """The arrays, cut to the number of tokens in the cumulative lengths of a TND call."""
    if options["layout"] != "TND":
        return q, k, v
    q_end, kv_end = options["cu_seqlens_q"][-1], options["cu_seqlens_kv"][-1]
    return q[:q_end], k[:kv_end], v[:kv_end]


def combination(dtype, layout, heads, rule, kind, dims):
    """((q, k, v, lists), options) of one combination."""
    options = {"block_shape": BLOCK_SHAPE, **rule_options(rule, layout, *HEADS[heads])}
    arrays = trimmed(*testing.make_qkv(B, *HEADS[heads], Q_LEN, KV_LEN, *DIMS[dims], dtype=dtype, layout=layout), options)
    if LISTS[kind] is None:
        return (*arrays, None), options
    rows, columns = ROWS, COLUMNS
    if layout == "TND":
        rows = -(-int(np.diff(options["cu_seqlens_q"]).max()) // BLOCK_SHAPE[0])
        columns = -(-int(np.diff(options["cu_seqlens_kv"]).max()) // BLOCK_SHAPE[1])
    rng = np.random.default_rng(7 + list(RULES).index(rule))
    return (*arrays, random_lists(rng, B, HEADS[heads][0], rows, columns, **LISTS[kind])), options
