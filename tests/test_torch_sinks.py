"""Sinks and a softcap under torch's autograd: gradients are compared with plain operations of torch in float64, no graph breaks, and wrong calls
are refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blitz_attn  # noqa: E402
from blitz_attn import sabi  # noqa: E402
from blitz_attn.integrations import torch as functions  # noqa: E402

operator = torch.ops.blitz_attn.block_sparse_attention
HEADS, TOKENS, LENGTHS = 4, 20, torch.tensor([[20, 7], [9, 20]])  # of two batch entries: the lengths of queries, and those of keys
LISTS = torch.from_numpy(sabi.from_block_mask(np.random.default_rng(3).random((2, HEADS, 3, 5)) < 0.4, dtype="int32"))
i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
RULES = {  # options, and the keys that each query sees under them
    "dense": ({}, i >= 0),
    "window": ({"causal": True, "window": (4, 0)}, (j <= i) & (i - j <= 4)),
    "listed": ({"block_shape": (8, 4), "sabi": LISTS}, torch.from_numpy(sabi.to_token_mask(LISTS.numpy(), TOKENS, TOKENS, (8, 4)))),
    "short": ({"q_lens": LENGTHS[0], "kv_lens": LENGTHS[1]}, j < LENGTHS[1, :, None, None, None]),
}


def inputs(dtype=torch.float64, grad=True):
    """q, k, v and sinks. The sinks have few digits, because the library reads sinks as float32."""
    torch.manual_seed(4)
    made = [torch.randn(2, heads, TOKENS, dim, dtype=dtype) for heads, dim in ((HEADS, 5), (2, 5), (2, 3))]
    return [x.requires_grad_(grad) for x in (*made, torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=dtype))]


def as_layout(x, layout):
    """A tensor (B, H, S, D) in another layout."""
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    return x if layout == "BSND" else x.flatten(2) if layout == "BSH" else x.flatten(0, 1)


def of_layout(layout):
    ends = torch.tensor([0, TOKENS, 2 * TOKENS])
    more = {"BSH": {"num_heads": HEADS, "num_kv_heads": 2}, "TND": {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}}
    return {"layout": layout} | more.get(layout, {})


def dense(q, k, v, sinks, seen, valid, softcap=None):
    """Attention by definition: a sink is one more score, without a value. Queries that are not valid get 0 and -inf."""
    k, v = (x.repeat_interleave(HEADS // 2, dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    more = sinks[:, None, None].expand(*scores.shape[:3], 1)
    lse = torch.logsumexp(torch.cat([scores, more], dim=-1), dim=-1)
    return (torch.exp(scores - lse[..., None]) @ v).where(valid[..., None], 0), lse.where(valid, -torch.inf)


@pytest.mark.parametrize(
    ("rule", "layout"), [(rule, layout) for rule in RULES for layout in ("BNSD", "BSND", "BSH")] + [("dense", "TND"), ("window", "TND")]
)
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_gradient_of_sinks(rule, layout, softcap):
    """Gradients of sinks and of q, k and v are those of `dense`, for a loss that uses both results."""
    options, seen = RULES[rule]
    options = options | {"softcap": softcap}
    valid = torch.arange(TOKENS) < LENGTHS[0, :, None, None] if rule == "short" else torch.ones(2, 1, TOKENS, dtype=torch.bool)
    given = inputs()
    weight, lse_weight = torch.randn(2, HEADS, TOKENS, 3, dtype=torch.float64), torch.randn(2, HEADS, TOKENS, dtype=torch.float64)
    expected, expected_lse = dense(*given, seen, valid.expand(2, HEADS, TOKENS), softcap)
    loss = (expected * weight).sum() + (expected_lse * lse_weight)[valid.expand(2, HEADS, TOKENS)].sum()
    exact = torch.autograd.grad(loss, given)

    q, k, v = (as_layout(x, layout) for x in given[:3])
    out, lse = functions.block_sparse_attention(q, k, v, sinks=given[3], return_lse=True, **options, **of_layout(layout))
    torch.testing.assert_close(out, as_layout(expected, layout), rtol=1e-12, atol=1e-12)
    weight = as_layout(weight, layout)
    lse_weight = lse_weight.transpose(1, 2).flatten(0, 1) if layout == "TND" else lse_weight
    loss = (out * weight).sum() + (lse * lse_weight)[lse > -torch.inf].sum()
    for ours, theirs in zip(torch.autograd.grad(loss, given), exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_queries_that_are_not_valid_add_nothing():
    """Such queries add nothing to the gradient of sinks, even if the gradient of their results is NaN. A sink of -inf has a gradient of 0."""
    given = inputs()
    sinks = torch.tensor([-torch.inf, 0.5, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    options = {"q_lens": [20, 7], "kv_lens": [0, 20], "return_lse": True}
    out, lse = functions.block_sparse_attention(*given[:3], sinks=sinks, **options)
    weights = torch.randn_like(out), torch.randn_like(lse)
    clean = torch.autograd.grad((out, lse), sinks, weights, retain_graph=True)[0]
    for x in weights:
        x[1, :, 7:] = torch.nan
    assert torch.equal(torch.autograd.grad((out, lse), sinks, weights)[0], clean)
    assert clean[0] == 0
    assert clean.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sinks", [[0.5, -1, 3, 0], np.array([0.5, -1, 3, 0]), torch.tensor([0.5, -1, 3, 0]).half(), None], ids=type)
def test_results_are_those_of_the_library(sinks, grad, dtype):
    q, k, v, _ = inputs(dtype, grad)
    ours = functions.block_sparse_attention(q, k, v, softcap=2.0, sinks=sinks, return_lse=True)
    expected = blitz_attn.block_sparse_attention(*(x.detach() for x in (q, k, v)), softcap=2.0, sinks=sinks, return_lse=True)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


# ---- As an operator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_graph_break(backend):
    """Results and gradients, with sinks and capped scores, have the same bits as without a compiler."""

    def layer(q, k, v, sinks):
        out, lse = functions.block_sparse_attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
        return out + lse[..., None] + functions.block_sparse_attention(q, k, v, softcap=3.0, sinks=sinks)

    given = inputs(torch.float32)
    expected, got = layer(*given), torch.compile(layer, backend=backend, fullgraph=True)(*given)
    assert torch.equal(expected, got)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), given) for x in (expected, got)), strict=True):
        assert torch.equal(a, b)


# ---- Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"sinks": [1.0]}, ValueError, r"sinks: expected shape \(4,\), one number per head, got \(1,\)$"),
        ({"sinks": torch.ones(3)}, ValueError, r"sinks: expected shape \(4,\), one number per head, got \(3,\)$"),
        ({"sinks": ["a"] * 4}, TypeError, "sinks: expected numbers, got list"),
        ({"sinks": torch.ones(4, device="meta")}, TypeError, "sinks: expected a dense tensor in CPU memory, got one of layout torch.strided on meta"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a positive finite number, or 0 for none, got -1"),
        ({"softcap": "x"}, TypeError, "softcap: expected a number, got str"),
    ],
)  # fmt: skip
def test_bad_calls(change, error, sentence, grad):
    q, k, v, _ = inputs(torch.float32, grad)
    with pytest.raises(error, match=f"^{sentence}"):
        functions.block_sparse_attention(q, k, v, **change)


def test_integers_compile():
    """Models may have integers as caps and scales."""
    q, k, v, _ = inputs(torch.float32, False)
    run = torch.compile(lambda x: functions.block_sparse_attention(x, k, v, softcap=30, scale=1), fullgraph=True, backend="eager")
    assert torch.equal(run(q), functions.block_sparse_attention(q, k, v, softcap=30.0, scale=1.0))


def test_lengths_with_the_negative_bit():
    """Tensors with the negative bit, whose memory has the opposite sign, are read right with and without torch's dispatch."""
    q, k, v, _ = inputs(torch.float32, False)
    n = torch.full((q.shape[0],), 5)
    expected = functions.block_sparse_attention(q, k, v, q_lens=n)
    for x in (q, q.clone().requires_grad_()):
        assert torch.equal(functions.block_sparse_attention(x, k, v, q_lens=torch._neg_view(-n)), expected)
