"""Under autocast, the functions for tensors compute in autocast's dtype, as torch's own attention does, and gradients have the dtypes of the inputs."""

import pytest

torch = pytest.importorskip("torch")

from blitz_attn.integrations import torch as functions  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention
LOW = [torch.bfloat16, torch.float16]
HALF_STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # twice the rounding of a result of 1
EXACT = torch.float32, torch.float32, torch.float32
AFTER_ROTARY = torch.float32, torch.float32, torch.bfloat16  # dtypes of q, k and v in a Llama under autocast


def tensors(dtypes=EXACT, grad=False, heads=(4, 4, 4), queries=37, keys=37):
    torch.manual_seed(1)
    sizes = zip(heads, (queries, keys, keys), dtypes, strict=True)
    return [torch.randn(2, n, tokens, 16).to(dtype).requires_grad_(grad) for n, tokens, dtype in sizes]


def paged(q_dtype, cache_dtype):
    torch.manual_seed(2)
    caches = [torch.randn(6, 8, 2, 16).to(cache_dtype) for _ in range(2)]
    return torch.randn(2, 4, 16).to(q_dtype), *caches, torch.tensor([[4, 1, 0], [2, 5, 3]]), torch.tensor([20, 9])


# ---- Against torch's own attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("dtypes", [EXACT, AFTER_ROTARY, (torch.bfloat16, torch.float16, torch.float32), (torch.float16,) * 3], ids=str)
def test_results_and_gradients_have_the_dtypes_of_torchs(low, dtypes):
    given = tensors(dtypes, grad=True)
    with torch.autocast("cpu", dtype=low):
        ours, expected = functions.scaled_dot_product_attention(*given, is_causal=True), theirs(*given, is_causal=True)
    assert ours.dtype == expected.dtype == low
    torch.testing.assert_close(ours, expected, atol=2 * HALF_STEP[low], rtol=2 * HALF_STEP[low])
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad((x * weight).sum(), given) for x in (ours, expected)]
    for x, own, other in zip(given, *grads, strict=True):
        assert own.dtype == other.dtype == x.dtype
        torch.testing.assert_close(own, other, atol=16 * HALF_STEP[torch.bfloat16], rtol=0.05)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_the_same_bits_as_tensors_that_are_cast(low):
    given = tensors(grad=True)
    cast = [x.detach().to(low).requires_grad_() for x in given]
    with torch.autocast("cpu", dtype=low):
        out, lse = functions.block_sparse_attention(*given, causal=True, return_lse=True)
    expected, expected_lse = functions.block_sparse_attention(*cast, causal=True, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert lse.dtype == torch.float32
    for own, other in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), cast), strict=True):
        assert torch.equal(own, other.float())


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_masks_of_numbers_are_cast_as_torch_casts_them(low, grad):
    """The masks hold numbers whose rounding shows. Masks of bool are not cast."""
    q, k, v = tensors(grad=grad)
    mask = 60 + torch.randn(4, 37, 37)
    seen = (torch.rand(37, 37) < 0.6) | torch.eye(37, dtype=torch.bool)
    with torch.autocast("cpu", dtype=low):
        for given in (mask, seen, torch.zeros(37, 37).masked_fill(~seen, -torch.inf), torch.zeros(37, 37).masked_fill(~seen, -3e38)):
            ours, expected = functions.scaled_dot_product_attention(q, k, v, given), theirs(q, k, v, given)
            torch.testing.assert_close(ours, expected, atol=4 * HALF_STEP[low], rtol=4 * HALF_STEP[low])
    unrounded = theirs(q, k, v, mask)
    if low == torch.bfloat16:
        with torch.autocast("cpu", dtype=low):
            assert (functions.scaled_dot_product_attention(q, k, v, mask).float() - unrounded).abs().max() > 8 * HALF_STEP[low]


def test_repeated_axes_are_cast_once():
    """A mask of 37 x 37 is expanded to all heads and batch entries, and only its 37 x 37 elements are cast."""
    q, k, v = tensors()
    mask = torch.randn(37, 37).expand(2, 4, 37, 37)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            if operator is torch.ops.aten._to_copy.default:
                sizes.append(arguments[0].numel())
            return operator(*arguments, **(options or {}))

    with torch.autocast("cpu", dtype=torch.bfloat16), Sizes():
        out = functions.block_sparse_attention(q, k[:1].expand(2, -1, -1, -1), v, attn_mask=mask)
    assert sorted(sizes) == [37 * 37, k[:1].numel(), q.numel(), v.numel()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(out, functions.block_sparse_attention(q, k[:1].repeat(2, 1, 1, 1), v, attn_mask=mask.contiguous()))


@pytest.mark.parametrize("low", LOW, ids=str)
def test_each_place_of_a_repeated_tensor_has_its_own_gradient(low):
    """The leaves are expanded tensors: keys over heads, values over the batch, and a mask over heads, batch and queries."""
    q, k, v = tensors()
    mask = torch.randn(1, 1, 1, 37)

    def gradients(*places):
        leaves = [x.detach().requires_grad_() for x in places]
        with torch.autocast("cpu", dtype=low):
            out = functions.scaled_dot_product_attention(q, *leaves[:2], attn_mask=leaves[2])
        return torch.autograd.grad((out.float() * torch.arange(37.0)[:, None]).sum(), leaves)

    repeated = [k[:, :1].expand(2, 4, 37, 16), v[:1].expand(2, 4, 37, 16), mask.expand(2, 4, 37, 37)]
    for own, other in zip(gradients(*repeated), gradients(*(x.contiguous() for x in repeated)), strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own, other, atol=0.02, rtol=0.02)


def test_float64_stays_as_torch_leaves_it():
    given = [x.double() for x in tensors()]
    mask = torch.randn(37, 37)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert functions.scaled_dot_product_attention(*given).dtype == theirs(*given).dtype == torch.float64
        assert functions.scaled_dot_product_attention(*given, mask).dtype == torch.float64
        with pytest.raises(TypeError, match="^key: expected dtype float64 like query, got bfloat16"):
            functions.scaled_dot_product_attention(given[0], given[1].float(), given[2])


def test_where_autocast_is_off():
    given, mixed = tensors(), tensors(AFTER_ROTARY)
    expected = functions.scaled_dot_product_attention(*given)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(functions.scaled_dot_product_attention(*given), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(functions.scaled_dot_product_attention(*given), expected)
        with pytest.raises(TypeError, match="^value: expected dtype float32 like query, got bfloat16"):
            functions.scaled_dot_product_attention(*mixed)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16):
        assert functions.scaled_dot_product_attention(*mixed).dtype == torch.float16
    assert functions.scaled_dot_product_attention(*given).dtype == torch.float32


def test_sinks_and_slopes_stay():
    """Sinks and slopes are read as float32 for any dtype of the tensors, and the gradient of sinks is float32, too."""
    q, k, v = tensors()
    low = [x.bfloat16() for x in (q, k, v)]
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = functions.block_sparse_attention(q, k, v, causal=True, sinks=sinks, alibi_slopes=slopes, softcap=None)
    expected = functions.block_sparse_attention(*low, causal=True, sinks=sinks, alibi_slopes=slopes)
    assert torch.equal(out, expected)
    own, other = (torch.autograd.grad(x.sum(), sinks)[0] for x in (out, expected))
    assert own.dtype == torch.float32
    assert torch.equal(own, other)


# ---- Other functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW, ids=str)
def test_masks_over_chosen_blocks(low):
    """A mask of numbers is cast, but sinks and slopes are not, as in attention over given blocks."""
    given, options = tensors(), {"density": 0.5, "block_shape": (8, 8)}
    mask, slopes, sinks = 60 + torch.randn(4, 37, 37), 0.5 + torch.rand(4) / 3, torch.randn(4)
    with torch.autocast("cpu", dtype=low):
        out = functions.select_and_attend_prefill(*given, attn_mask=mask, alibi_slopes=slopes, sinks=sinks, **options)
    lowered = [x.to(low) for x in given]
    for cast, same in ((mask.to(low), True), (mask, False)):
        expected = functions.select_and_attend_prefill(*lowered, attn_mask=cast, alibi_slopes=slopes, sinks=sinks, **options)
        assert out.dtype == low
        assert torch.equal(out, expected) == same
    rounded = functions.select_and_attend_prefill(*lowered, attn_mask=mask.to(low), alibi_slopes=slopes.to(low), sinks=sinks, **options)
    assert not torch.equal(out, rounded)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_caches_are_not_cast(low, cache_dtype, q_dtype):
    """Queries are cast to the dtype of the cache, and results are cast to the dtype of autocast."""
    q, *rest = paged(q_dtype, cache_dtype)
    expected, expected_lse = functions.paged_attention(q.to(cache_dtype), *rest, return_lse=True)
    selected = torch.tensor([[[0, 2], [1, -1]], [[1, -1], [0, 1]]])
    with torch.autocast("cpu", dtype=low):
        out, lse = functions.paged_attention(q, *rest, return_lse=True)
        chosen = functions.paged_select_attention(q, *rest, selected)
    assert torch.equal(out, expected.to(low))
    assert torch.equal(lse, expected_lse)
    assert torch.equal(chosen, functions.paged_select_attention(q.to(cache_dtype), *rest, selected).to(low))


def test_caches_of_8_bits():
    q, *caches, tables, lengths = paged(torch.float32, torch.float32)
    caches = [x.to(torch.float8_e4m3fn) for x in caches]
    options = {"k_scale": 0.5, "v_scale": 0.25}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = functions.paged_attention(q, *caches, tables, lengths, **options)
    assert torch.equal(out, functions.paged_attention(q.bfloat16(), *caches, tables, lengths, **options))


def test_caches_of_float64():
    q, *rest = paged(torch.float64, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(functions.paged_attention(q, *rest), functions.paged_attention(q.double(), *rest))
        with pytest.raises(TypeError, match="^k_cache: expected "):
            functions.paged_attention(q.float(), *rest)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_native_sparse_attention(low):
    """Weights are read as float32, and are not cast."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 40, heads, 16).requires_grad_() for heads in (4, 2, 2))
    gate = torch.randn(4, 3, 16).requires_grad_()
    given = (q, k, v, gate)
    options = {"compress_block_size": 8, "num_selected_blocks": 3, "window_size": 8}
    with torch.autocast("cpu", dtype=low):
        out = functions.nsa(q, k, v.to(low), gate_proj_weight=gate, **options)
    assert out.dtype == low
    cast = [x.detach().to(low if n < 3 else x.dtype).requires_grad_() for n, x in enumerate(given)]
    expected = functions.nsa(*cast[:3], gate_proj_weight=cast[3], **options)
    assert torch.equal(out, expected)
    for own, other in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), cast), strict=True):
        assert torch.equal(own, other.float())


# ---- In a graph -------------------------------------------------------------------------------------------------------------


def several(q, k, v, request):
    listed = functions.block_sparse_attention(q, k, v, causal=True, attn_mask=torch.ones(37, 37))
    both = listed + functions.scaled_dot_product_attention(q, k, v, is_causal=True)
    return both, functions.paged_attention(*request)


def several_under_autocast(low):
    def run(q, k, v, request):
        with torch.autocast("cpu", dtype=low):
            both = several(q, k, v, request)
            with torch.autocast("cpu", enabled=False):
                return *both, functions.block_sparse_attention(q, k, v)

    return run


@pytest.mark.sampled("options")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_no_graph_break(backend, dynamic, low, grad):
    """Autocast may be around the graph or within it."""
    torch.compiler.reset()  # options of these tests would count as recompilations of one function
    given, request = tensors(grad=grad), paged(torch.float32, torch.float32)
    within = several_under_autocast(low)
    expected = within(*given, request)
    results = [torch.compile(within, backend=backend, fullgraph=True, dynamic=dynamic)(*given, request)]
    with torch.autocast("cpu", dtype=low):
        results.append(torch.compile(several, backend=backend, fullgraph=True, dynamic=dynamic)(*given, request))
    weight = torch.randn(2, 4, 37, 16)
    grads = torch.autograd.grad((expected[0] * weight).sum(), given) if grad else []
    for found in results:
        for own, other in zip(found, expected[: len(found)], strict=True):
            assert own.dtype == other.dtype
            assert torch.equal(own, other)
        for own, other in zip(torch.autograd.grad((found[0] * weight).sum(), given) if grad else [], grads, strict=True):
            assert torch.equal(own, other)


def test_transforms():
    given = [torch.stack([x, 2 * x]) for x in tensors(AFTER_ROTARY)]
    attend = lambda q, k, v: functions.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for own, parts in zip(torch.func.vmap(attend)(*given), zip(*given, strict=True), strict=True):
            assert torch.equal(own, attend(*parts))
