"""Softcap and sinks of block-sparse attention and its gradients: against the twin, with every rule, and against differences."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing
from cases import DTYPES, bits_option, same_bits

OPTIONS = {
    "cap": {"softcap": 3.0},
    "large cap": {"softcap": 1e5},
    "sinks": {"sinks": [0.5, -3.0, 9.0, -np.inf]},
    "both": {"softcap": 20.0, "sinks": [4.0, 0.0, -1.0, 1.0]},
}
RULES = {
    "dense": {},
    "lists": {"sabi": True, "block_shape": (32, 16)},
    "causal lists": {"sabi": True, "block_shape": (32, 16), "causal": True},
    "window": {"causal": True, "window": (20, 0)},
    "lengths": {"q_lens": [77, 0], "kv_lens": [150, 3], "causal": True},
}


def given(rules, q, k):
    """The rules of a call. Where "sabi" is True, a list takes its place, and block row 1 of it is empty."""
    if not rules.get("sabi"):
        return rules
    lists = sabi.random_with_frame(q.shape[2], k.shape[2], rules["block_shape"], 0.5, seed=3).astype(np.int32)
    lists[:, :, 1] = -1
    return rules | {"sabi": lists}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_the_twin(options, rules, dtype, isa_level):
    q, k, v = testing.make_qkv(2, 4, 2, 100, 150, 32, dtype=dtype)
    q = testing.round_to(3 * testing.to_float64(q, dtype), dtype)
    rules = given(rules, q, k) | bits_option(q)
    exact, exact_lse = reference.block_sparse_attention(q, k, v, return_lse=True, **rules, **options)
    plain = reference.block_sparse_attention(q, k, v, **rules)
    assert (np.abs(exact - plain).max() > 1e-3) == (options.get("softcap") != 1e5)
    results = [blitz_attn.block_sparse_attention(q, k, v, return_lse=True, num_threads=n, **rules, **options) for n in (1, 3)]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    out, lse = results[0]
    unit = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(testing.to_float64(out, dtype), exact, rtol=unit, atol=unit)
    np.testing.assert_allclose(lse, exact_lse, rtol=min(unit, 1e-3), atol=min(unit, 1e-3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("softcap", [0.7, 20.0, 1e5])
def test_gradients_against_the_twin(softcap, rules, dtype, isa_level):
    """No element may be further off than the largest error that a plain program of that precision has, by the house's rule for gradients."""
    q, k, v = testing.make_qkv(2, 4, 2, 100, 150, 32, dtype=dtype)
    q = testing.round_to(3 * testing.to_float64(q, dtype), dtype)
    dout = testing.make_qkv(2, 4, 2, 100, 150, 32, dtype=dtype, seed=7)[0]
    rules = given(rules, q, k) | bits_option(q) | {"softcap": softcap}
    out, lse = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **rules)
    call = (dout, q, k, v, out, lse)
    exact = reference.block_sparse_attention_backward(*call, **rules)
    plain = reference.dense_same_precision_backward(*call, **rules)
    uncapped = reference.block_sparse_attention_backward(*call, **rules | {"softcap": None})
    results = [blitz_attn.block_sparse_attention_backward(*call, num_threads=n, **rules) for n in (1, 3)]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    for name, got, right, other, wrong in zip(("dq", "dk", "dv"), results[0], exact, plain, uncapped, strict=True):
        allowed = 3 * np.abs(other - right).max() + 1e-6 * np.abs(right).max()
        assert np.abs(testing.to_float64(got, dtype) - right).max() <= allowed, name
        assert softcap == 1e5 or np.abs(wrong - right).max() > 3 * allowed, name


@pytest.mark.parametrize("added", [{}, {"alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.0])}, {"attn_mask": True}], ids=["", "alibi", "mask"])
def test_gradients_against_differences(added):
    """Along a direction in q, k and v together, in float64; the cap bends most scores, and the sinks count in the log-sum-exp."""
    q, k, v = (x.astype(np.float64) for x in testing.make_qkv(1, 4, 2, 20, 20, 8))
    rules = {"causal": True, "softcap": 1.5, **added}
    if "attn_mask" in added:
        rules["attn_mask"] = np.random.default_rng(5).standard_normal((1, 4, 20, 20))
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    rng = np.random.default_rng(1)
    dout, dlse, directions = rng.standard_normal(q.shape), rng.standard_normal(q.shape[:3]), [rng.standard_normal(x.shape) for x in (q, k, v)]
    out, lse = blitz_attn.block_sparse_attention(q, k, v, sinks=sinks, return_lse=True, **rules)
    gradients = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **rules)

    def loss(step):
        moved = [x + step * d for x, d in zip((q, k, v), directions, strict=True)]
        out, lse = reference.block_sparse_attention(*moved, sinks=sinks, return_lse=True, **rules)
        return (dout * out).sum() + (dlse * lse).sum()

    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    assert slope == pytest.approx((loss(1e-4) - loss(-1e-4)) / 2e-4, rel=1e-6)


def test_few_queries_have_the_numbers_of_paged_calls(isa_level):
    """One query per head: kernels for few queries, as in decoding."""
    case = testing.make_paged(1, 8, 2, [333], 16, 64, poison=False)
    options = {"sinks": np.linspace(-2, 5, 8), "softcap": 5.0, "return_lse": True}
    k, v = (x[case.block_tables[0]].reshape(-1, 2, 64)[None, :333] for x in (case.k_cache, case.v_cache))
    out, lse = blitz_attn.block_sparse_attention(case.q[:, None], k, v, layout="BSND", causal=True, **options)
    paged, paged_lse = blitz_attn.paged_attention(case.q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, **options)
    np.testing.assert_allclose(out[:, 0], paged, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:, :, 0], paged_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
def test_layouts(layout):
    q, k, v = testing.make_qkv(1, 4, 2, 70, 70, 16)
    options = {"sinks": [1.0, 2.0, -1.0, 0.0], "softcap": 2.0, "causal": True}
    expected = blitz_attn.block_sparse_attention(q, k, v, **options)
    turned = [np.ascontiguousarray(x if layout == "BNSD" else x.swapaxes(1, 2)) for x in (q, k, v)]
    if layout == "BSH":
        turned, options = [x.reshape(1, 70, -1) for x in turned], options | {"num_heads": 4, "num_kv_heads": 2}
    if layout == "TND":
        turned, options = [x[0] for x in turned], options | {"cu_seqlens_q": [0, 70], "cu_seqlens_kv": [0, 70]}
    got = blitz_attn.block_sparse_attention(*turned, layout=layout, **options)
    assert same_bits(got.reshape(1, 70, 4, 16).swapaxes(1, 2) if layout != "BNSD" else got, expected)


def test_gradients_of_sinks():
    """The log-sum-exp carries the sinks into the gradients of q, k and v; theirs follows from the results."""
    q, k, v = (x.astype(np.float64) for x in testing.make_qkv(1, 4, 2, 20, 20, 8))
    sinks, dout = np.array([0.5, -1.0, 2.0, 0.0]), np.random.default_rng(1).standard_normal(q.shape)
    out, lse = blitz_attn.block_sparse_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    gradients = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, causal=True)
    dsinks = -(np.exp(sinks[:, None] - lse) * (dout * out).sum(-1)).sum((0, 2))
    step, directions = 1e-3, [np.random.default_rng(n).standard_normal(x.shape) for n, x in enumerate((q, k, v, sinks))]

    def loss(sign):
        q1, k1, v1, s1 = (x + sign * step * d for x, d in zip((q, k, v, sinks), directions, strict=True))
        return (dout * reference.block_sparse_attention(q1, k1, v1, causal=True, sinks=s1)).sum()

    slope = sum((g * d).sum() for g, d in zip((*gradients, dsinks), directions, strict=True))
    assert slope == pytest.approx((loss(1) - loss(-1)) / (2 * step), rel=1e-4)


REFUSED = {
    "count": ({"sinks": [1.0, 2.0]}, ValueError, r"^sinks: expected shape \(4,\), one number per head, got \(2,\)$"),
    "axes": ({"sinks": [[1.0, 2.0, 3.0, 4.0]]}, ValueError, r"^sinks: expected shape \(4,\), one number per head, got \(1, 4\)$"),
    "kind": ({"sinks": "abcd"}, TypeError, "^sinks: expected numbers"),
    "negative cap": ({"softcap": -1.0}, ValueError, "^softcap: expected a positive finite number, or 0 for none, got -1"),
    "huge cap": ({"softcap": 1e39}, ValueError, r"^softcap: expected a number from 1e-37 to 1e\+37 with a float32 q"),
    "cap of text": ({"softcap": "3"}, TypeError, "^softcap: expected a number, got str"),
}


@pytest.mark.parametrize(("options", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(options, error, sentence):
    q, k, v = testing.make_qkv(1, 4, 2, 20, 20, 8)
    out = np.full_like(q, 7)
    with pytest.raises(error, match=sentence):
        blitz_attn.block_sparse_attention(q, k, v, out=out, **options)
    assert (out == 7).all()
    if "softcap" in options:
        with pytest.raises(error, match=sentence):
            blitz_attn.block_sparse_attention_backward(q, q, k, v, q, q[..., 0], grads=(out, None, None), **options)
        assert (out == 7).all()


def test_sinks_that_need_a_gradient():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, testing.make_qkv(1, 4, 4, 5, 20, 8))
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="^sinks: expected a tensor that needs no gradient"):
        blitz_attn.block_sparse_attention(q, k, v, sinks=sinks)
    with torch.no_grad():
        blitz_attn.block_sparse_attention(q, k, v, sinks=sinks)


def test_sinks_are_an_input():
    q, k, v = testing.make_qkv(1, 4, 4, 1, 20, 1)
    out = np.zeros((1, 4, 1, 1), np.float32)
    with pytest.raises(ValueError, match="^out: expected memory of its own, got an array that overlaps sinks"):
        blitz_attn.block_sparse_attention(q, k, v, sinks=out.reshape(4), out=out)


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_that_are_as_good_as_infinite(dtype, q_len, isa_level):
    """Also where a query sees no key. For float64 they are numbers."""
    q, k, v = testing.make_qkv(1, 2, 2, q_len, 8, 16, dtype=dtype)
    for kv_lens in ([8], [0]):
        options = {"kv_lens": kv_lens, "return_lse": True} | bits_option(q)
        most, infinite = (blitz_attn.block_sparse_attention(q, k, v, sinks=np.float32([x, -x]), **options) for x in (3e38, np.inf))
        assert all(map(same_bits, most, infinite))
    q, k, v = testing.make_qkv(1, 2, 2, q_len, 8, 16, dtype="float64")
    _, lse = blitz_attn.block_sparse_attention(q, k, v, kv_lens=[0], return_lse=True, sinks=np.float32([3e38, -3e38]))
    np.testing.assert_allclose(lse[0, :, 0], [3e38, -3e38], rtol=1e-6)
