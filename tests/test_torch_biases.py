"""Masks, biases and ALiBi slopes that learn in torch: their gradients against torch's own attention."""

import pytest

torch = pytest.importorskip("torch")

from blitz_attn.integrations import torch as functions  # noqa: E402

operator = torch.ops.blitz_attn.block_sparse_attention
HEADS, QUERIES, KEYS = 4, 70, 90


def tensors(dtype=torch.float32, grad=True):
    torch.manual_seed(3)
    sizes = ((HEADS, QUERIES), (2, KEYS), (2, KEYS))
    return [torch.randn(2, heads, n, 16, dtype=dtype, requires_grad=grad) for heads, n in sizes]


def check(found, expected, rtol=1e-4):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= rtol * theirs.abs().max() + 1e-9


@pytest.mark.parametrize("shape", [(2, HEADS, QUERIES, KEYS), (HEADS, QUERIES, KEYS), (QUERIES, KEYS), (2, 1, 1, KEYS), (1, HEADS, QUERIES, 1), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_of_torchs_own_attention(shape, dtype):
    q, k, v = tensors(dtype)
    mask = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn_like(q)
    found, expected = (
        torch.autograd.grad((f(q, k, v, attn_mask=mask, enable_gqa=True) * weight).sum(), (q, k, v, mask))
        for f in (functions.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    check(found[:3], expected[:3])
    check(found[3:], expected[3:], 1e-4 if shape[-1] > 1 else 1e3)  # where all keys have one number, its gradient is 0 but for rounding


def test_a_mask_that_only_hides_learns_too():
    """It would be read as a run of keys or as a list of blocks, which have no gradient."""
    q, k, v = tensors(grad=False)
    mask = torch.zeros(QUERIES, KEYS).masked_fill(torch.ones(QUERIES, KEYS).triu(20).bool(), -torch.inf).requires_grad_()
    weight = torch.randn_like(q)
    found, expected = (
        torch.autograd.grad((f(q, k, v, attn_mask=mask, enable_gqa=True) * weight).sum(), mask)
        for f in (functions.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    check(found, expected)


@pytest.mark.parametrize("slope_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_slopes_beside_a_mask(slope_dtype):
    """Of the slopes alone, and of both; the loss uses both results."""
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=slope_dtype, requires_grad=True)
    mask = torch.randn(HEADS, 1, KEYS, requires_grad=True)
    weight, lse_weight = torch.randn_like(q), torch.randn(2, HEADS, QUERIES)
    out, lse = functions.block_sparse_attention(q, k, v, causal=True, attn_mask=mask, alibi_slopes=slopes, return_lse=True)
    found = torch.autograd.grad((out * weight).sum() + (lse * lse_weight).sum(), (mask, slopes), retain_graph=True)
    alone = torch.autograd.grad((out * weight).sum() + (lse * lse_weight).sum(), slopes)[0]
    away = torch.arange(KEYS) - (torch.arange(QUERIES)[:, None] + KEYS - QUERIES)
    scores = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 4 + mask - slopes.float()[:, None, None] * away.abs()
    scores = scores.masked_fill(away > 0, -torch.inf)
    loss = (scores.softmax(-1) @ v.repeat_interleave(2, dim=1) * weight).sum() + (scores.logsumexp(-1) * lse_weight).sum()
    check(found, torch.autograd.grad(loss, (mask, slopes)), 1e-2 if slope_dtype == torch.bfloat16 else 1e-4)
    assert torch.equal(alone, found[1])


def test_what_torch_checks_of_an_operator():
    q, k, v = tensors()
    mask, slopes = torch.randn(1, 1, QUERIES, KEYS, requires_grad=True), torch.rand(HEADS, requires_grad=True)
    none = [None] * 6
    torch.library.opcheck(operator, (q, k, v, *none, mask, slopes), {})
    torch.library.opcheck(operator, (q, k, v, *none, torch.randn(QUERIES, KEYS) > 0, slopes), {"causal": True})


def test_under_the_compiler_and_autocast():
    q, k, v = tensors()
    mask = torch.randn(HEADS, QUERIES, KEYS, requires_grad=True)

    def run(mask):
        return functions.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    weight = torch.randn_like(q)
    expected = torch.autograd.grad((run(mask) * weight).sum(), mask)
    check(torch.autograd.grad((torch.compile(run, backend="aot_eager")(mask) * weight).sum(), mask), expected)
    with torch.autocast("cpu"):
        found = torch.autograd.grad((run(mask).float() * weight).sum(), mask)
    assert found[0].dtype == torch.float32
    check(found, expected, 0.05)


def test_a_table_learns():
    """A bias of relative positions, one number for each distance and head, follows the one that made the targets."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 2, 24, 8) for _ in range(3))
    distance = 23 + torch.arange(24)[:, None] - torch.arange(24)
    right, table = torch.randn(2, 47), torch.zeros(2, 47, requires_grad=True)
    targets = functions.scaled_dot_product_attention(q, k, v, attn_mask=right[:, distance])
    optimiser = torch.optim.Adam([table], lr=0.1)
    losses = []
    for _ in range(150):
        optimiser.zero_grad()
        loss = (functions.scaled_dot_product_attention(q, k, v, attn_mask=table[:, distance]) - targets).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50


def test_a_paged_call_has_no_gradient():
    q, cache = torch.randn(1, 2, 8), torch.randn(4, 16, 1, 8)
    mask = torch.zeros(1, 1, 1, 20, requires_grad=True)
    out = functions.paged_attention(q, cache, cache, torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20]), attn_mask=mask)
    with pytest.raises(RuntimeError, match="^paged_attention: expected a call under torch.no_grad"):
        out.sum().backward()
