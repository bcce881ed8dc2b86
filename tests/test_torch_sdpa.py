"""torch's own function is the oracle of `integrations.torch.scaled_dot_product_attention`, for masks, leading axes that broadcast, and
biases that learn. Masks of every form, together with options that torch's function lacks, are drawn in tests/test_problems.py."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from blitz_attn.integrations import torch as functions  # noqa: E402
from cases_torch import tensors  # noqa: E402


def dense(q, k, v, allowed=None, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True, **options)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("sizes", [(31, 31), (20, 37), (37, 20)])
def test_causal_biases(sizes):
    q, k, v = tensors(queries=sizes[0], keys=sizes[1])
    ones = torch.ones(sizes, dtype=torch.bool)
    for bias, allowed in ((causal_upper_left(*sizes), ones.tril()), (causal_lower_right(*sizes), ones.tril(sizes[1] - sizes[0]))):
        ours = functions.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
        seen = allowed.any(-1)
        torch.testing.assert_close(ours[:, :, seen], dense(q, k, v, allowed)[:, :, seen])
        assert (ours[:, :, ~seen] == 0).all()


@pytest.mark.sampled("options")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (31, 37), (37, 31)])
def test_causal_with_lengths_compiles(queries, keys, dynamic):
    qkv, lens = tensors(queries=queries, keys=keys, grad=True), torch.tensor([3, keys - 2])
    weight = torch.randn(2, 4, queries, 8)

    def attend(q, k, v, kv_lens):
        return functions.scaled_dot_product_attention(q, k, v, is_causal=True, window=(9, 0), kv_lens=kv_lens, enable_gqa=True)

    torch._dynamo.reset()  # the cases would count as recompilations of one function
    run = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    made = [(f(*qkv, kv_lens) * weight).sum() for kv_lens in (lens, None) for f in (run, attend)]
    grads = [torch.autograd.grad(x, qkv) for x in made]
    for n in (0, 2):
        assert torch.equal(made[n], made[n + 1])
        assert all(torch.equal(a, b) for a, b in zip(*grads[n : n + 2], strict=True))


def test_masks_are_read_in_the_cheapest_form():
    from blitz_attn.integrations._torch.masks import read_mask

    near = (torch.arange(400)[:, None] // 200 == torch.arange(400) // 200) & (torch.arange(400) % 7 > 0)
    read = read_mask(near, 400, 400, torch.float32, lists=True)
    assert (read["sabi"].tolist(), read["block_shape"]) == ([[[[0, 1, -1, -1], [0, 1, 2, 3], [1, 2, 3, -1], [1, 2, 3, -1]]]], (128, 128))
    assert read["attn_mask"].data_ptr() == near.data_ptr()
    assert read_mask(near, 400, 400, torch.float32, lists=False).keys() == {"attn_mask"}
    assert read_mask(torch.rand(400, 400) < 0.5, 400, 400, torch.float32, lists=True).keys() == {"attn_mask"}  # a list would keep all blocks
    causal = torch.ones(400, 400, dtype=torch.bool).tril()
    for numbers in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mask = torch.full((400, 400), -0.0, dtype=numbers)  # -0.0 adds nothing, like 0
        assert read_mask(mask.masked_fill(~causal, -torch.inf), 400, 400, torch.float32, lists=True).keys() == {"kv_ranges"}
        lowest = mask.masked_fill(~causal, torch.finfo(numbers).min)
        kind = "attn_mask" if numbers == torch.float16 else "kv_ranges"
        assert read_mask(lowest, 400, 400, torch.float32, lists=True).keys() == {kind}
        assert read_mask(lowest, 400, 400, torch.float64, lists=True)["attn_mask"] is lowest
        for other in (torch.nan, torch.inf, 1e-4, -1.0):
            mask[399, 399] = other
            assert read_mask(mask, 400, 400, torch.float32, lists=True)["attn_mask"] is mask
    expanded = (torch.rand(400) < 0.5).expand(2, 4, 400, 400)
    assert read_mask(expanded, 400, 400, torch.float32, lists=True)["attn_mask"].numel() == 400


def test_masks_compile():
    """A mask is read when the graph runs, so one graph takes masks of every form."""
    given = tensors()
    mask = torch.ones(31, 37, dtype=torch.bool).tril(5)
    run = torch.compile(
        lambda q, k, v, m: functions.scaled_dot_product_attention(q, k, v, m, enable_gqa=True), backend="aot_eager", fullgraph=True
    )
    for m in (mask, mask.expand(2, 1, 31, 37).clone(), torch.ones(2, 1, 1, 37, dtype=torch.bool)):
        assert torch.equal(run(*given, m), functions.scaled_dot_product_attention(*given, m, enable_gqa=True))
    for m in (mask & (torch.arange(37) != 3), torch.randn(4, 31, 37)):
        assert torch.equal(run(*given, m), functions.scaled_dot_product_attention(*given, m, enable_gqa=True))


def test_a_mask_of_padding_needs_no_memory_for_pairs():
    """The mask is read before it is expanded, and no tensor that is made from it is larger than q."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made.extend(x.numel() for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor))
            return result

    q, k, v = (torch.randn(2, 1, 2000, 8) for _ in range(3))
    mask = torch.ones(2, 1, 1, 2000, dtype=torch.bool)
    mask[1, ..., 700:] = False
    with Sizes():
        out = functions.scaled_dot_product_attention(q, k, v, mask)
    assert max(made) <= q.numel()
    torch.testing.assert_close(out, functions.scaled_dot_product_attention(q, k, v, kv_lens=[2000, 700]))


AXES = [
    # leading axes of query, key and value
    ((), (), ()), ((2, 2, 3),) * 3,
    ((2, 4), (1, 4), (1, 4)), ((1, 4), (2, 4), (2, 4)), ((2, 4), (1, 1), (1, 1)), ((2, 4), (2, 1), (2, 1)), ((2, 4), (2, 1), (2, 4)),
    ((2, 1), (2, 4), (2, 4)), ((1, 4), (1, 4), (2, 4)), ((2, 4), (4,), (4,)), ((2, 4), (), ()), ((), (4,), (4,)), ((4,), (1,), (1,)),
    ((4,), (), (4,)), ((3, 2, 4), (1, 2, 4), (3, 1, 1)), ((3, 2, 4), (2, 4), (2, 4)), ((3, 1, 4), (2, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_leading_axes_that_broadcast(axes, causal):
    """Results and gradients are those of torch's own attention."""
    torch.manual_seed(4)
    given = [torch.randn(*lead, tokens, 16, requires_grad=True) for lead, tokens in zip(axes, (9, 11, 11), strict=True)]
    ours = functions.scaled_dot_product_attention(*given, is_causal=causal)
    theirs = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), given) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    out, lse = functions.scaled_dot_product_attention(*given, is_causal=causal, return_lse=True)
    assert torch.equal(out, ours)
    assert lse.shape == ours.shape[:-1]
    scores = torch.broadcast_shapes(*(x.shape[:-2] for x in given[:2]))
    if not causal and scores == ours.shape[:-2]:  # for other axes, torch accepts no mask
        mask = torch.randn(*ours.shape[:-1], 11)
        theirs = torch.nn.functional.scaled_dot_product_attention(*given, mask)
        torch.testing.assert_close(functions.scaled_dot_product_attention(*given, mask), theirs)


@pytest.mark.parametrize("axes", [((2, 4), (1, 2), (1, 2)), ((2, 4), (2, 1), (2, 2)), ((2, 4), (1, 1), (1, 1)), ((4,), (2,), (2,)),
                                  ((2, 4), (2,), (2,)), ((3, 2, 4), (1, 1, 2), (3, 2, 1))], ids=str)  # fmt: skip
def test_leading_axes_that_broadcast_with_grouped_heads(axes):
    torch.manual_seed(4)
    given = [torch.randn(*lead, tokens, 16) for lead, tokens in zip(axes, (9, 11, 11), strict=True)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=True)
    torch.testing.assert_close(functions.scaled_dot_product_attention(*given, enable_gqa=True), theirs)


def test_what_broadcasts_is_not_copied():
    """A batch of 64 shares one set of keys. The call allocates fewer bytes than these keys have."""
    q, k, v = torch.randn(64, 4, 1, 64), *(torch.randn(1, 1, 4096, 64) for _ in range(2))
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        out = functions.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert sum(max(0, event.cpu_memory_usage) for event in profile.events()) < k.nbytes


@pytest.mark.parametrize("dynamic", [False, True])
def test_leading_axes_broadcast_in_a_graph(dynamic):
    given = torch.randn(2, 4, 9, 16), torch.randn(1, 1, 11, 16), torch.randn(4, 11, 16)
    run = torch.compile(functions.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(run(*given), functions.scaled_dot_product_attention(*given))


# ---- Masks and slopes that learn --------------------------------------------------------------------------------------------

HEADS, QUERIES, KEYS = 4, 70, 90


def problem_of_biases():
    return tensors(queries=QUERIES, keys=KEYS, dims=(16, 16, 16))


def check(found, expected, rtol=1e-4):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= rtol * theirs.abs().max() + 1e-9


def test_a_mask_that_only_hides_learns_too():
    """If it needed no gradient, such a mask would be read as runs of keys or as a block list, which have no gradients."""
    q, k, v = problem_of_biases()
    mask = torch.zeros(QUERIES, KEYS).masked_fill(torch.ones(QUERIES, KEYS).triu(20).bool(), -torch.inf).requires_grad_()
    weight = torch.randn_like(q)
    found, expected = (
        torch.autograd.grad((f(q, k, v, attn_mask=mask, enable_gqa=True) * weight).sum(), mask)
        for f in (functions.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    check(found, expected)


@pytest.mark.parametrize("slope_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_slopes_and_a_mask(slope_dtype):
    """Gradients of slopes are computed alone, and together with those of the mask. The loss uses both results."""
    q, k, v = problem_of_biases()
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


def test_under_the_compiler_and_autocast():
    q, k, v = problem_of_biases()
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
