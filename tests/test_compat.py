"""The drop-in for upstream's package: its names, order and defaults, with NumPy arrays and with torch tensors."""

import inspect
import math

import numpy as np
import pytest

from blitz_attn import reference, testing
from blitz_attn.compat import torch_bsa
from blitz_attn.sabi import random_with_frame


def qkv(batch=1, heads=2, q_len=300, kv_len=300, **options):
    return testing.make_qkv(batch, heads, options.pop("kv_heads", heads), q_len, kv_len, 32, **options)


def bnsd(q, k, v, **options):
    """The drop-in's call with BNSD arrays, with the argument names of upstream's README."""
    arguments = {"num_heads": q.shape[1], "num_key_value_heads": k.shape[1], "input_layout": "BNSD", "softmax_lse_flag": True}
    return torch_bsa.blitz_sparse_attention(q, k, v, **arguments | options)


# ---- Upstream's README --------------------------------------------------------------------------------------------


def test_signature_is_upstreams():
    parameters = inspect.signature(torch_bsa.blitz_sparse_attention).parameters
    assert list(parameters) == [
        "query", "key", "value", "atten_mask", "sabi", "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale_value",
        "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads", "sparse_mode", "softmax_lse_flag", "block_shape",
    ]  # fmt: skip
    assert all(p.default is (p.empty if n < 3 else None) for n, p in enumerate(parameters.values()))


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("block_shape", [(128, 128), (128, 512), (1024, 256)])
def test_readme_example(block_shape, flag):
    """The call of upstream's README with only the import changed: bfloat16 tensors, and uint16 lists padded with 0xFFFF."""
    torch = pytest.importorskip("torch")
    h, s, d = 2, 2000, 64
    q, k, v = (torch.randn(1, h, s, d, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in range(3))
    lists = random_with_frame(s, s, block_shape, 0.5, heads=h, dtype=np.int64, width=math.ceil(s / block_shape[1]))
    sabi = torch.tensor(lists, dtype=torch.int32).to(torch.uint16)  # -1 wraps to 0xFFFF, as in upstream's own benchmark
    assert sabi.shape == (1, h, math.ceil(s / block_shape[0]), math.ceil(s / block_shape[1]))
    scale = 1 / math.sqrt(d)
    attention_out, softmax_lse = torch_bsa.blitz_sparse_attention(
        q, k, v,
        sabi=sabi,
        actual_seq_lengths=[s],
        actual_seq_lengths_kv=[s],
        num_heads=h,
        num_key_value_heads=h,
        input_layout="BNSD",
        scale_value=scale,
        sparse_mode=0,
        softmax_lse_flag=flag,
        block_shape=list(block_shape),
    )  # fmt: skip
    exact, exact_lse = reference.block_sparse_attention(
        *(x.double().numpy() for x in (q, k, v)), lists, block_shape=block_shape, scale=scale, return_lse=True
    )
    assert (attention_out.dtype, attention_out.shape) == (torch.bfloat16, q.shape)
    np.testing.assert_allclose(attention_out.double().numpy(), exact, rtol=testing.OUT_RTOL, atol=testing.OUT_ATOL)
    assert softmax_lse.dtype == torch.float32
    if flag:
        np.testing.assert_allclose(softmax_lse.numpy(), exact_lse, rtol=testing.LSE_RTOL, atol=testing.LSE_ATOL)
    else:
        assert softmax_lse.shape == (0,)


def test_readme_cpp_example():
    """Upstream's C++ example: all ones, float16, (1, 8, 512, 128). The example prints the output 0x3C00, and expects an lse of 17.5520."""
    ones = np.ones((1, 8, 512, 128), np.float16)
    sabi = np.tile(np.arange(4, dtype=np.uint16), (1, 8, 4, 1))
    out, lse = bnsd(ones, ones, ones, sabi=sabi, scale_value=1 / math.sqrt(128))
    assert (out.view(np.uint16) == 0x3C00).all()
    np.testing.assert_allclose(lse, 17.5520, atol=1e-4)


# ---- Defaults -----------------------------------------------------------------------------------------------------


def test_defaults():
    """The defaults are layout BSH with one head, scale 1, no lse, and blocks of 128 by 128."""
    q, k, v = (x[:, 0] for x in qkv(heads=1, kv_len=260))
    sabi = np.array([[[[1], [0], [2]]]], np.int16)
    out, lse = torch_bsa.blitz_sparse_attention(q, k, v, sabi=sabi)
    exact = reference.block_sparse_attention(q, k, v, sabi, layout="BSH", num_heads=1, scale=1.0)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)
    assert (lse.shape, lse.dtype) == ((0,), np.float32)


# ---- Refused ------------------------------------------------------------------------------------------------------

MASK = np.zeros((300, 300), bool)


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"atten_mask": MASK}, ValueError, r"^atten_mask: expected None with sparse_mode 0, got a mask: list blocks in sabi"),
        ({"atten_mask": MASK, "sabi": np.zeros((1, 2, 3, 1), np.uint16)}, ValueError, r"^atten_mask: expected None with sparse_mode 0"),
        ({"atten_mask": MASK.astype(np.uint8), "sparse_mode": 3}, TypeError, r"^atten_mask: expected a bool array, got uint8"),
        ({"atten_mask": [1], "sparse_mode": 3}, TypeError, r"^atten_mask: expected a bool array, got list"),
        ({"sparse_mode": 1}, ValueError, r"^sparse_mode: expected 0, 2, 3 or 4, got 1, which needs a full mask"),
        ({"sparse_mode": 5}, ValueError, r"^sparse_mode: expected 0 to 4 or 10 to 14, got 5"),
        (
            {"sparse_mode": 4, "pre_tokens": -1},
            ValueError,
            r"^pre_tokens, next_tokens: expected 0 or more with sparse_mode 4, got -1 and 0",
        ),
        ({"query": np.zeros((2, 2, 300, 32), np.float32)}, ValueError, r"^key: expected the 2 batch entries of query, got shape \(1, 2, "),
        ({"block_shape": ("x", 128)}, TypeError, r"^block_shape: expected integers, got <U"),
        ({"softmax_lse_flag": [True]}, TypeError, r"^softmax_lse_flag: expected True or False, got list"),
        ({"actual_seq_lengths": 300}, ValueError, r"^actual_seq_lengths: expected one axis, got shape \(\)"),
        ({"actual_seq_lengths": [300.0]}, TypeError, r"^actual_seq_lengths: expected integers, got float64"),
        ({"sabi": "lists"}, TypeError, r"^sabi: expected an array, got str"),
        ({"input_layout": "NSD"}, ValueError, r"^input_layout: expected one of BSH, BSND, BNSD, BNSD_BSND, TND, got 'NSD'"),
        ({"block_shape": [64, 128]}, ValueError, r"^block_shape: expected two of \(128, 256, 512, 1024\), got \[64, 128\]"),
        ({"num_heads": 3}, ValueError, r"^num_heads: expected 2 like query, got 3"),
        ({"num_key_value_heads": 1}, ValueError, r"^num_key_value_heads: expected 2 like key, got 1"),
        ({"scale_value": float("nan")}, ValueError, r"^scale_value: expected a finite number, got -?nan"),
        ({"actual_seq_lengths": [301]}, ValueError, r"^actual_seq_lengths: expected lengths from 0 to 300, got 301"),
        ({"actual_seq_lengths_kv": []}, ValueError, r"^actual_seq_lengths_kv: expected 1 or at least 1 lengths, got 0"),
        ({"sabi": np.zeros((1, 2, 2, 1), np.uint16)}, ValueError, r"^sabi: expected shape"),
        ({"sabi": np.zeros((1, 2, 3, 1), np.float32)}, TypeError, r"^sabi: expected uint16, .*, got float32"),
        ({"query": np.zeros((2, 300, 32), np.float32)}, ValueError, r"^query: expected shape \(B, H, Sq, D\)"),
        ({"query": np.zeros((1, 2, 300, 31), np.float32)}, ValueError, r"^key: expected shape .* with D = 31 like query"),
        ({"value": np.zeros((1, 2, 299, 32), np.float32)}, ValueError,
         r"^value: expected .* the batch, heads and tokens of key \(1, 2, 300, 32\)"),
        ({"key": np.zeros((1, 3, 300, 32), np.float32)}, ValueError, r"^key: expected a number of heads that divides query's 2, got 3"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_as_upstream_names_it(options, error, pattern):
    q, k, v = qkv()
    arguments = {"query": q, "key": k, "value": v, "input_layout": "BNSD"} | options
    with pytest.raises(error, match=pattern):
        torch_bsa.blitz_sparse_attention(**arguments)


def test_tnd_needs_lengths():
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv())
    with pytest.raises(ValueError, match=r"^actual_seq_lengths_kv: expected cumulative sums of lengths with layout TND, got None"):
        torch_bsa.blitz_sparse_attention(q, k, v, input_layout="TND", actual_seq_lengths=[300])
    with pytest.raises(ValueError, match=r"^sparse_mode: expected 0, 3 or 4 with layout TND, got 2"):
        torch_bsa.blitz_sparse_attention(q, k, v, input_layout="TND", actual_seq_lengths=[300], actual_seq_lengths_kv=[300], sparse_mode=2)


def test_what_is_not_an_array_is_refused():
    x = np.ones((1, 2, 8, 8), np.float32)
    with pytest.raises(TypeError, match="^query: expected an array, got NoneType$"):
        torch_bsa.blitz_sparse_attention(None, x, x)
    with pytest.raises(TypeError, match="^key: expected an array, got int$"):
        torch_bsa.blitz_sparse_attention(x, 3, x, input_layout="BNSD")


@pytest.mark.parametrize(
    ("queries", "keys", "sentence"),
    [
        ([5, 4, 10], [5, 6, 10], r"actual_seq_lengths: expected sums that rise from 0 on, got 4 after 5 at \[1\]"),
        ([5, 10], [-1, 10], r"actual_seq_lengths_kv: expected sums that rise from 0 on, got -1 after 0 at \[0\]"),
        ([5, 10], [10], "actual_seq_lengths_kv: expected 2 sums like actual_seq_lengths, got 1"),
    ],
)
def test_sums_of_lengths_are_refused_as_the_caller_wrote_them(queries, keys, sentence):
    """The sentence shows upstream's sums, without the 0 that this library's cumulative lengths begin with."""
    x = np.ones((10, 2, 8), np.float32)
    options = {"actual_seq_lengths": queries, "actual_seq_lengths_kv": keys}
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        torch_bsa.blitz_sparse_attention(x, x, x, num_heads=2, input_layout="TND", **options)
