"""The drop-in for upstream's package: its names, order and defaults, with NumPy arrays and with torch tensors."""

import inspect
import math

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from blitz_attn.compat import torch_bsa
from blitz_attn.sabi import random_with_frame
from cases import same_bits

BLOCK = (128, 128)


def qkv(batch=1, heads=2, q_len=300, kv_len=300, **options):
    return testing.make_qkv(batch, heads, options.pop("kv_heads", heads), q_len, kv_len, 32, **options)


def bnsd(q, k, v, **options):
    """The drop-in's call in the words of its README."""
    arguments = {"num_heads": q.shape[1], "num_key_value_heads": k.shape[1], "input_layout": "BNSD", "softmax_lse_flag": True}
    return torch_bsa.blitz_sparse_attention(q, k, v, **arguments | options)


def seen_by(rule, q_len, kv_len):
    i, j = np.mgrid[:q_len, :kv_len]
    return rule(i, j)


def masked(q, k, v, mask, scale=1.0):
    """float64 attention under a (q_len, kv_len) mask, written down directly."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.where(mask, np.einsum("bhid,bhjd->bhij", q, k) * scale, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, weights @ v / total, 0), (top + np.log(total))[..., 0]


def close(result, expected):
    for got, want in zip(result, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


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
    """The call of upstream's README with one import changed: bfloat16 tensors, uint16 lists padded with 0xFFFF."""
    torch = pytest.importorskip("torch")
    h, s, d = 2, 2000, 64
    q, k, v = (torch.randn(1, h, s, d, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in range(3))
    lists = random_with_frame(s, s, block_shape, 0.5, heads=h, dtype=np.int64, width=math.ceil(s / block_shape[1]))
    sabi = torch.tensor(lists, dtype=torch.int32).to(torch.uint16)  # -1 wraps to 0xFFFF, as upstream's own benchmark has it
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
    """Upstream's C++ example: all ones, float16, (1, 8, 512, 128); it prints out 0x3C00 and expects an lse of 17.5520."""
    ones = np.ones((1, 8, 512, 128), np.float16)
    sabi = np.tile(np.arange(4, dtype=np.uint16), (1, 8, 4, 1))
    out, lse = bnsd(ones, ones, ones, sabi=sabi, scale_value=1 / math.sqrt(128))
    assert (out.view(np.uint16) == 0x3C00).all()
    np.testing.assert_allclose(lse, 17.5520, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_zero_input_gives_log_of_the_length(dtype):
    zeros = np.zeros((1, 2, 700, 128), dtype)
    _, lse = bnsd(zeros, zeros, zeros, actual_seq_lengths=[700], actual_seq_lengths_kv=[700])
    np.testing.assert_allclose(lse, math.log(700), atol=1e-6)


# ---- Defaults -----------------------------------------------------------------------------------------------------


def test_defaults():
    """Layout BSH with one head, scale 1, no lse, blocks of 128 by 128."""
    q, k, v = (x[:, 0] for x in qkv(heads=1, kv_len=260))
    sabi = np.array([[[[1], [0], [2]]]], np.int16)
    out, lse = torch_bsa.blitz_sparse_attention(q, k, v, sabi=sabi)
    exact = reference.block_sparse_attention(q, k, v, sabi, layout="BSH", num_heads=1, scale=1.0)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)
    assert (lse.shape, lse.dtype) == ((0,), np.float32)


def test_positional_order():
    q, k, v = qkv()
    by_name = bnsd(q, k, v, scale_value=0.5, sparse_mode=3, block_shape=[256, 128])
    by_place = torch_bsa.blitz_sparse_attention(q, k, v, None, None, None, None, 2, 0.5, None, None, "BNSD", 2, 3, True, [256, 128])
    assert same_bits(by_name[0], by_place[0])
    assert same_bits(by_name[1], by_place[1])


def test_zero_key_value_heads_are_as_many_as_query_heads():
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(1, 300, 64) for x in qkv())
    options = {"num_heads": 2, "scale_value": 0.2}
    expected, _ = torch_bsa.blitz_sparse_attention(q, k, v, num_key_value_heads=2, **options)
    assert same_bits(torch_bsa.blitz_sparse_attention(q, k, v, num_key_value_heads=0, **options)[0], expected)


# ---- Layouts ------------------------------------------------------------------------------------------------------


def test_bnsd_bsnd():
    q, k, v = qkv(heads=4, kv_heads=2)
    out, lse = bnsd(q, k, v)
    swapped, same_lse = bnsd(q, k, v, input_layout="BNSD_BSND")
    assert swapped.shape == (1, 300, 4, 32)
    assert swapped.flags.c_contiguous
    assert same_bits(np.ascontiguousarray(swapped.swapaxes(1, 2)), out)
    assert same_bits(same_lse, lse)


def test_bsnd_and_bsh():
    q, k, v = qkv(batch=2, heads=4, kv_heads=2)
    out, lse = bnsd(q, k, v)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    bsnd, bsnd_lse = bnsd(q=turned[0], k=turned[1], v=turned[2], input_layout="BSND", num_heads=4, num_key_value_heads=2)
    flat = [x.reshape(2, 300, -1) for x in turned]
    bsh, _ = bnsd(*flat, input_layout="BSH", num_heads=4, num_key_value_heads=2)
    assert same_bits(np.ascontiguousarray(bsnd.swapaxes(1, 2)), out)
    assert same_bits(bsnd_lse, lse)
    assert same_bits(bsh.reshape(bsnd.shape), bsnd)


def test_tnd():
    """Upstream's lengths are cumulative without the leading 0; it gives no lse with this layout."""
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv())
    out, lse = bnsd(q, k, v, input_layout="TND", actual_seq_lengths=[100, 300], actual_seq_lengths_kv=[40, 300], sparse_mode=3,
                    num_heads=2, num_key_value_heads=2)  # fmt: skip
    exact = reference.block_sparse_attention(
        q, k, v, layout="TND", cu_seqlens_q=[0, 100, 300], cu_seqlens_kv=[0, 40, 300], scale=1.0, causal=True
    )
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)
    assert lse.shape == (0,)


# ---- Lengths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"), [([200], [200, 200]), ([200, 31], [200, 31]), ([200, 31, 5], [200, 31]), (np.array([300, 0]), [300, 0])]
)
@pytest.mark.parametrize(("ours", "name"), [("q_lens", "actual_seq_lengths"), ("kv_lens", "actual_seq_lengths_kv")])
def test_actual_lengths_mean_lengths_of_batch_entries(given, meant, ours, name):
    q, k, v = qkv(batch=2)
    expected = blitz_attn.block_sparse_attention(q, k, v, scale=1.0, return_lse=True, **{ours: meant})
    out, lse = bnsd(q, k, v, **{name: given})
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_batches_groups_and_lengths_are_sparse():
    """Upstream's tests stay with one batch entry, equal heads and full lengths; lists hold beyond them here."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2)
    sabi = random_with_frame(300, 300, BLOCK, 0.5, batch=2, heads=4, dtype=np.uint16)
    out, lse = bnsd(q, k, v, sabi=sabi, actual_seq_lengths=[300, 170], actual_seq_lengths_kv=[300, 280])
    exact = reference.block_sparse_attention(q, k, v, sabi, scale=1.0, q_lens=[300, 170], kv_lens=[300, 280], return_lse=True)
    close((out, lse), exact)
    assert np.abs(out - bnsd(q, k, v)[0]).max() > 0.1


def test_empty_rows_and_unsorted_lists():
    q, k, v = qkv()
    sabi = np.array([[[[2, 0, 65535], [65535, 65535, 65535], [1, 2, 0]]] * 2], np.uint16).reshape(1, 2, 3, 3)
    out, lse = bnsd(q, k, v, sabi=sabi)
    assert (out[:, :, 128:256] == 0).all()
    assert (lse[:, :, 128:256] == -np.inf).all()
    close((out, lse), reference.block_sparse_attention(q, k, v, sabi, scale=1.0, return_lse=True))


def test_list_without_batch_axis_and_signed():
    q, k, v = qkv()
    sabi = np.array([[[2, 0], [-1, -1], [1, 2]], [[0, -1], [1, -1], [2, -1]]], np.int64)
    assert same_bits(bnsd(q, k, v, sabi=sabi)[0], bnsd(q, k, v, sabi=sabi[None].astype(np.uint16))[0])


# ---- Sparse modes -------------------------------------------------------------------------------------------------

TRIANGLE = np.triu(np.ones((2048, 2048), bool), 1)  # upstream's compressed mask, True = masked


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 70), (70, 200), (200, 70)])
@pytest.mark.parametrize("precision", [0, 10])
@pytest.mark.parametrize("atten_mask", [None, TRIANGLE], ids=["no_mask", "compressed_mask"])
@pytest.mark.parametrize(
    ("mode", "options", "rule"),
    [
        (2, {}, lambda i, j, shift: j <= i),
        (3, {}, lambda i, j, shift: j <= i + shift),
        (4, {"pre_tokens": 20, "next_tokens": 7}, lambda i, j, shift: (j >= i + shift - 20) & (j <= i + shift + 7)),
        (4, {}, lambda i, j, shift: j <= i + shift),
        (4, {"pre_tokens": 0, "next_tokens": 2147483647}, lambda i, j, shift: j >= i + shift),
    ],
    ids=["left_up", "right_down", "band", "band_default", "band_after"],
)
def test_modes(mode, options, rule, atten_mask, precision, q_len, kv_len):
    q, k, v = qkv(q_len=q_len, kv_len=kv_len)
    result = bnsd(q, k, v, sparse_mode=mode + precision, atten_mask=atten_mask, scale_value=0.1, **options)
    close(result, masked(q, k, v, seen_by(lambda i, j: rule(i, j, kv_len - q_len), q_len, kv_len), 0.1))


@pytest.mark.parametrize("precision", [0, 10])
def test_mode_0_passes_over_the_tokens(precision):
    q, k, v = qkv()
    expected, _ = bnsd(q, k, v)
    assert same_bits(bnsd(q, k, v, sparse_mode=precision, pre_tokens=3, next_tokens=3)[0], expected)


@pytest.mark.parametrize("lengths", [((100, 140), (30, 30)), ((10, 4), (0, 4)), ((200, 150), (200, 70))], ids=str)
def test_left_up_with_lengths(lengths):
    q, k, v = qkv(batch=2, q_len=200, kv_len=150)
    q_lens, kv_lens = map(list, zip(*lengths, strict=True))
    out, lse = bnsd(q, k, v, sparse_mode=2, actual_seq_lengths=q_lens, actual_seq_lengths_kv=kv_lens, scale_value=0.1)
    for b, (n, m) in enumerate(lengths):
        exact = masked(q[b : b + 1, :, :n], k[b : b + 1, :, :m], v[b : b + 1, :, :m], seen_by(lambda i, j: j <= i, n, m), 0.1)
        close((out[b : b + 1, :, :n], lse[b : b + 1, :, :n]), exact)
        assert (out[b, :, n:] == 0).all()


def test_mode_with_lists():
    q, k, v = qkv()
    sabi = np.array([[[[0, -1], [1, -1], [0, 2]]] * 2], np.int16).reshape(1, 2, 3, 2)
    expected = reference.block_sparse_attention(q, k, v, sabi, scale=1.0, causal=True, return_lse=True)
    close(bnsd(q, k, v, sabi=sabi, sparse_mode=3), expected)


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
        ({"sparse_mode": 15}, ValueError, r"^sparse_mode: expected 0 to 4 or 10 to 14, got 15"),
        (
            {"sparse_mode": 4, "pre_tokens": -1},
            ValueError,
            r"^pre_tokens, next_tokens: expected 0 or more with sparse_mode 4, got -1 and 0",
        ),
        ({"query": np.zeros((2, 2, 300, 32), np.float32)}, ValueError, r"^key: expected the 2 batch entries of query, got shape \(1, 2, "),
        ({"input_layout": 3}, TypeError, r"^input_layout: expected a string, got int"),
        ({"sparse_mode": "3"}, TypeError, r"^sparse_mode: expected an integer, got str"),
        ({"pre_tokens": 1.5}, TypeError, r"^pre_tokens: expected an integer, got float"),
        ({"block_shape": ("x", 128)}, TypeError, r"^block_shape: expected integers, got <U"),
        ({"num_key_value_heads": [2]}, TypeError, r"^num_key_value_heads: expected an integer, got list"),
        ({"softmax_lse_flag": [True]}, TypeError, r"^softmax_lse_flag: expected True or False, got list"),
        ({"actual_seq_lengths": 300}, ValueError, r"^actual_seq_lengths: expected one axis, got shape \(\)"),
        ({"actual_seq_lengths": [300.0]}, TypeError, r"^actual_seq_lengths: expected integers, got float64"),
        ({"sabi": "lists"}, TypeError, r"^sabi: expected an array, got str"),
        ({"input_layout": "NSD"}, ValueError, r"^input_layout: expected one of BSH, BSND, BNSD, BNSD_BSND, TND, got 'NSD'"),
        ({"block_shape": [64, 128]}, ValueError, r"^block_shape: expected two of \(128, 256, 512, 1024\), got \[64, 128\]"),
        ({"block_shape": [128]}, ValueError, r"^block_shape: expected two of"),
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
)
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


def test_things_that_are_no_arrays():
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
    """Without the 0 that this library's sums begin with."""
    x = np.ones((10, 2, 8), np.float32)
    options = {"actual_seq_lengths": queries, "actual_seq_lengths_kv": keys}
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        torch_bsa.blitz_sparse_attention(x, x, x, num_heads=2, input_layout="TND", **options)
