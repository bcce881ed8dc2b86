"""Softcap and sinks of block-sparse attention: gradients against differences, and sinks at the ends of their range."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import bits_option, same_bits


@pytest.mark.parametrize("added", [{}, {"alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.0])}, {"attn_mask": True}], ids=["", "alibi", "mask"])
def test_gradients_against_differences(added):
    """The difference is taken along one direction in q, k, v and sinks together, in float64. The cap changes most scores. The sinks enter the
    gradients of q, k and v through the log-sum-exp, and their own gradient is computed here from the results."""
    rng = np.random.default_rng(1)
    q, k, v = (x.astype(np.float64) for x in testing.make_qkv(1, 4, 2, 20, 20, 8))
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    rules = {"causal": True, "softcap": 1.5, **added}
    if "attn_mask" in added:
        rules["attn_mask"] = rng.standard_normal((1, 4, 20, 20))
    dout, dlse = rng.standard_normal(q.shape), rng.standard_normal(q.shape[:3])
    directions = [rng.standard_normal(x.shape) for x in (q, k, v, sinks)]
    out, lse = blitz_attn.block_sparse_attention(q, k, v, sinks=sinks, return_lse=True, **rules)
    gradients = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **rules)
    dsinks = (np.exp(sinks[:, None] - lse) * (dlse - (dout * out).sum(-1))).sum((0, 2))

    def loss(step):
        q1, k1, v1, s1 = (x + step * d for x, d in zip((q, k, v, sinks), directions, strict=True))
        out, lse = reference.block_sparse_attention(q1, k1, v1, sinks=s1, return_lse=True, **rules)
        return (dout * out).sum() + (dlse * lse).sum()

    slope = sum((g * d).sum() for g, d in zip((*gradients, dsinks), directions, strict=True))
    assert slope == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=1e-4)


def test_sinks_that_need_a_gradient():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, testing.make_qkv(1, 4, 4, 5, 20, 8))
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="^sinks: expected a tensor that needs no gradient"):
        blitz_attn.block_sparse_attention(q, k, v, sinks=sinks)
    with torch.no_grad():
        blitz_attn.block_sparse_attention(q, k, v, sinks=sinks)


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_that_are_as_good_as_infinite(dtype, q_len, isa_level):
    """The largest float32 sinks act as infinite ones, even if a query sees no key. In float64 they are ordinary numbers."""
    q, k, v = testing.make_qkv(1, 2, 2, q_len, 8, 16, dtype=dtype)
    for kv_lens in ([8], [0]):
        options = {"kv_lens": kv_lens, "return_lse": True} | bits_option(q)
        most, infinite = (blitz_attn.block_sparse_attention(q, k, v, sinks=np.float32([x, -x]), **options) for x in (3e38, np.inf))
        assert all(map(same_bits, most, infinite))
    q, k, v = testing.make_qkv(1, 2, 2, q_len, 8, 16, dtype="float64")
    _, lse = blitz_attn.block_sparse_attention(q, k, v, kv_lens=[0], return_lse=True, sinks=np.float32([3e38, -3e38]))
    np.testing.assert_allclose(lse[0, :, 0], [3e38, -3e38], rtol=1e-6)
