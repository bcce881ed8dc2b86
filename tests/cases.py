"""Common parts of the operator suites: levels, poisoned outputs, and comparison with the reference."""

import numpy as np

import blitz_attn
from blitz_attn import reference, testing

# A level without kernels of its own runs the kernels of the level below, and needs no test.
ISA_LEVELS = tuple(level for level in blitz_attn.isa_levels(available=True) if level in blitz_attn.kernels(level).values())
DTYPES = ["float32", "float16", "bfloat16", "float64"]
LAYOUTS = ["BNSD", "BSND", "BSH", "TND"]

# Scores are summed in float64 if the inputs are float64, and in float32 for every other dtype.
LSE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}


def dtype_of(x):
    """Name of the dtype of an array from `testing.make_qkv`: bfloat16 for uint16, which holds its bits."""
    return "bfloat16" if x.dtype == np.uint16 else x.dtype.name


def bits_option(x):
    """The keyword argument `dtype` if `x` holds bits of bfloat16. (Where ml_dtypes is installed, arrays may have its bfloat16 instead.)"""
    return {"dtype": "bfloat16"} if x.dtype == np.uint16 else {}


def poisoned(shape, like):
    """An array of NaN in the dtype of `like`. NaN stays where an operation writes nothing."""
    return testing.round_to(np.full(shape, np.nan), dtype_of(like))


def out_shape(q, v, layout, num_heads=None, num_kv_heads=None):
    if layout != "BSH":
        return (*q.shape[:-1], v.shape[-1])
    return (*q.shape[:-1], v.shape[-1] // (num_kv_heads or num_heads) * num_heads)


def lse_shape(q, layout, num_heads=None, num_kv_heads=None):
    if layout == "BNSD" or layout == "TND":
        return q.shape[:-1]
    return q.shape[0], num_heads or q.shape[2], q.shape[1]


def attend(q, k, v, sabi=None, **options):
    """(out, lse) of the operation, both written into arrays of NaN."""
    layout = options.get("layout", "BNSD")
    heads = {name: options[name] for name in ("num_heads", "num_kv_heads") if name in options}
    out = poisoned(out_shape(q, v, layout, **heads), q)
    lse = np.full(lse_shape(q, layout, **heads), np.nan, np.float64 if dtype_of(q) == "float64" else np.float32)
    results = blitz_attn.block_sparse_attention(q, k, v, sabi, out=(out, lse), return_lse=True, **bits_option(q), **options)
    assert results[0] is out
    assert results[1] is lse
    return out, lse


def check(q, k, v, sabi=None, **options):
    """Compare output and log-sum-exp with the float64 reference, by the error rule, at every instruction set level.

    The factor of the rule is 2. It is 3 for results of under 2000 elements, because the errors of few elements vary by chance.
    Returns (out, lse) of the highest level.
    """
    dtype = dtype_of(q)
    exact, exact_lse = testing.reference_attention(q, k, v, sabi, **bits_option(q), **options)
    dense = testing.error_of(reference.dense_same_precision(q, k, v, sabi, **bits_option(q), **options), exact)
    factor = 2.0 if exact.size >= 2000 else 3.0
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            out, lse = attend(q, k, v, sabi, **options)
        ours = testing.error_of(out, exact, dtype)
        assert testing.meets_error_rule(ours, dense, dtype, factor), f"{level}: error {ours}, of the dense computation {dense}"
        np.testing.assert_allclose(lse, exact_lse, rtol=LSE_TOLERANCE[dtype], atol=LSE_TOLERANCE[dtype], err_msg=level)
    return out, lse


def read_only_zeros(*shape):
    x = np.zeros(shape, np.float32)
    x.setflags(write=False)
    return x


def same_bits(a, b):
    """Whether two arrays hold the same bytes, including NaN and signed zero."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(got, expected):
    """Assert that results equal expected ones bit for bit."""
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def random_lists(rng, batch, heads, rows, columns, *, share=0.5, empty=0.0, dtype=np.int32):
    """Unsorted random block lists: a row is empty with probability `empty`, and otherwise lists each block with probability `share`."""
    mask = rng.random((batch, heads, rows, columns)) < share
    mask &= rng.random((batch, heads, rows, 1)) >= empty
    order = rng.random(mask.shape)
    order[~mask] = 2.0  # dropped columns last
    lists = np.argsort(order, axis=-1).astype(np.int64)
    lists[np.arange(columns) >= mask.sum(axis=-1, keepdims=True)] = -1
    return lists.astype(dtype)
