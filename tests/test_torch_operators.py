"""The operators that torch compiles pass torch's own checks, break no graph, give the library's results to the bit, and refuse wrong calls."""

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import blitz_attn  # noqa: E402
from blitz_attn.integrations import torch as functions  # noqa: E402
from blitz_attn.select import Antidiagonal, Pooled, SampledRows, VerticalSlash  # noqa: E402
from cases_torch import DTYPES, LISTS, tensors  # noqa: E402

operators = torch.ops.blitz_attn


def of_layout(layout, queries=31, keys=37):
    """The lengths, as positional arguments, and the options of a layout."""
    ends = (None, None) if layout != "TND" else (torch.tensor([0, 13, 2 * queries]), torch.tensor([0, 40, 2 * keys]))
    lengths = (None, None) if layout == "TND" else (torch.tensor([queries, 9]), torch.tensor([keys, 21]))
    return (*lengths, *ends), {"layout": layout} | ({"num_heads": 4, "num_kv_heads": 2} if layout == "BSH" else {})


def paged(dtype=torch.float32):
    torch.manual_seed(2)
    caches = [torch.randn(6, 8, 2, dim).to(dtype) for dim in (16, 8)]
    return torch.randn(2, 4, 16).to(dtype), *caches, torch.tensor([[4, 1, 0], [2, 5, 3]]), torch.tensor([20, 9])


# ---- torch's own checks ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled("options")
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("lists", [False, True], ids=["dense", "listed"])
def test_opcheck_of_attention(layout, lists):
    lengths, options = of_layout(layout)
    rows = LISTS if layout != "TND" else torch.arange(5, dtype=torch.int32).expand(1, 1, 7, 5)
    given = (*tensors(layout, grad=True), rows if lists else None, *lengths)
    torch.library.opcheck(operators.block_sparse_attention.default, given, {"block_shape": [8, 8], "causal": True, **options})


@pytest.mark.sampled("options")
@pytest.mark.parametrize("shape", [(31, 37), (2, 1, 31, 37), (2, 1, 1, 37), (1, 4, 31, 1)], ids=str)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_opcheck_of_masks(kind, shape, reads):
    torch.manual_seed(3)
    mask = torch.rand(shape) < 0.5 if kind == "bool" else torch.randn(shape)
    given = (*tensors(grad=True), *[None] * 6, mask, None if reads else torch.rand(4))
    torch.library.opcheck(operators.block_sparse_attention.default, given, {"reads_mask": reads})


def test_opcheck_of_the_gradient():
    q, k, v = tensors()
    out, lse = operators.block_sparse_attention(q, k, v, LISTS, block_shape=[8, 8])
    given = (torch.randn_like(out), q, k, v, out, lse, torch.randn_like(lse), LISTS)
    torch.library.opcheck(operators.block_sparse_attention_backward.default, given, {"block_shape": [8, 8]})


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_opcheck_of_chosen_blocks(layout):
    lengths, options = of_layout(layout)
    options |= {"density": [0.5], "block_shape": [8, 8], "causal": True}
    given = tensors(layout)
    torch.library.opcheck(operators.select_and_attend_prefill.default, (*given, *lengths), options)
    if layout == "BNSD":
        runs = torch.stack([torch.arange(31) // 8 * 8, torch.arange(31) + 6], dim=-1)
        torch.library.opcheck(operators.select_and_attend_prefill.default, (*given, *[None] * 4, runs), options)
        more = torch.randn(2, 1, 31, 37), torch.rand(4), torch.randn(4)
        torch.library.opcheck(operators.select_and_attend_prefill.default, (*given, *[None] * 5, *more), options | {"softcap": 2.0})


@pytest.mark.sampled("options")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_paged_attention(dtype):
    torch.library.opcheck(operators.paged_attention.default, paged(dtype), {"window": 12})
    selected = torch.tensor([[[0, 2], [1, -1]], [[1, -1], [0, 1]]])
    torch.library.opcheck(operators.paged_attention.default, (*paged(dtype), None, None, selected))
    rules = torch.tensor([[5, 20], [0, 3]]), torch.rand(2, 1, 1, 20) < 0.8, torch.rand(4)  # kv_ranges, attn_mask, alibi_slopes
    for lists in (None, selected):
        torch.library.opcheck(operators.paged_attention.default, (*paged(dtype), None, None, lists, *[None] * 5, *rules))


def indexer(packed):
    torch.manual_seed(0)
    shapes = [(45, 5, 16), (60, 16), (45, 5)] if packed else [(2, 45, 5, 16), (2, 60, 16), (2, 45, 5)]
    lengths = {"cu_seqlens_q": torch.tensor([0, 20, 45]), "cu_seqlens_kv": torch.tensor([0, 31, 60])}
    return [torch.randn(shape) for shape in shapes], lengths if packed else {"kv_lens": torch.tensor([9, 60])}


@pytest.mark.parametrize("packed", [False, True])
def test_choosing_tokens(packed):
    given, lengths = indexer(packed)
    options = {"causal": True, "q_begin": torch.tensor([2, 30])} | (lengths if packed else {"pool_size": 4, "keep_tail": True} | lengths)
    torch.library.opcheck(operators.select_tokens.default, given, options | {"top_k": 7})
    theirs = blitz_attn.select_tokens(*given, 7, return_scores=True, **options)
    compiled = torch.compile(functions.select_tokens, backend="eager", fullgraph=True)
    for call in (functions.select_tokens, compiled):
        assert all(torch.equal(a, b) for a, b in zip(call(*given, 7, return_scores=True, **options), theirs, strict=True))
        assert torch.equal(call(*given, 7, **options), theirs[0])
    given[0].requires_grad_()
    assert not functions.select_tokens(*given, 7, **options).requires_grad
    with pytest.raises(RuntimeError, match="^select_tokens: expected a call under torch.no_grad"):
        functions.select_tokens(*given, 7, return_scores=True, **options)[1].sum().backward()


# ---- In a graph -------------------------------------------------------------------------------------------------------------


def several(q, k, v, lists, lengths):
    """A combination of results of functions that may be differentiated within a graph."""
    listed = functions.block_sparse_attention(q, k, v, lists, block_shape=(8, 8), causal=True, kv_lens=lengths)
    causal, lse = functions.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True, scale=0.2)
    shorter = functions.scaled_dot_product_attention(q, k[:, :, :20], v[:, :, :20], is_causal=True, enable_gqa=True)
    window = functions.scaled_dot_product_attention(q, k, v, window=(5, -1), q_lens=[31, 7], enable_gqa=True)
    return (listed + 2 * causal + shorter) * window + lse[..., None]


@pytest.mark.sampled("options")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_no_graph_break(backend, dynamic):
    """Results and gradients have the same bits as without a compiler."""
    given = tensors(grad=True)
    lengths = torch.tensor([37, 21])
    compiled = torch.compile(several, backend=backend, fullgraph=True, dynamic=dynamic)
    expected, got = several(*given, LISTS, lengths), compiled(*given, LISTS, lengths)
    assert torch.equal(expected, got)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((x * weight).sum(), given) for x in (expected, got)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def served(q, k, v, request, selected):
    chosen = functions.select_and_attend_prefill(q, k, v, density=0.5, block_shape=(8, 8), causal=True, chooser=Pooled(4))
    most = functions.select_and_attend_prefill(q, k, v, top_k=[1, 2, 3, 4], block_shape=(8, 8), chooser=Antidiagonal(4))
    return chosen + most, functions.paged_attention(*request), functions.paged_select_attention(*request, selected, return_lse=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_graph_break_where_there_is_no_gradient(backend):
    given = (*tensors(), paged(), torch.tensor([[[0, 2], [1, -1]], [[1, -1], [0, 1]]]))
    (a, b, (c, d)), (e, f, (g, h)) = served(*given), torch.compile(served, backend=backend, fullgraph=True)(*given)
    for expected, got in ((a, e), (b, f), (c, g), (d, h)):
        assert torch.equal(expected, got)


def test_checkpoints_and_exports():
    """Checkpoints compute activations anew, and an exported graph gives the same bits."""
    given = tensors(grad=True)
    expected = torch.autograd.grad(several(*given, LISTS, None).sum(), given)
    again = checkpoint(several, *given, LISTS, None, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.sum(), given), expected, strict=True):
        assert torch.equal(a, b)

    class Model(torch.nn.Module):
        def forward(self, q, k, v, lists):
            return several(q, k, v, lists, None)

    given = tensors()
    exported = torch.export.export(Model(), (*given, LISTS))
    assert [node.target for node in exported.graph.nodes].count(operators.block_sparse_attention.default) == 4
    assert torch.equal(exported.module()(*given, LISTS), several(*given, LISTS, None))


# ---- With and without torch's dispatch ----------------------------------------------------------------------------------------


MASK = torch.from_numpy(np.random.default_rng(0).random((31, 37)) < 0.7)


def every_call(q, k, v):
    """The output and the log-sum-exp of each function."""
    request, options = paged(), {"return_lse": True}
    selected = torch.tensor([[[0, 2], [1, -1]], [[1, -1], [0, 1]]])
    return {
        "block_sparse_attention": functions.block_sparse_attention(q, k, v, LISTS, block_shape=(8, 8), **options),
        "scaled_dot_product_attention": functions.scaled_dot_product_attention(q, k, v, MASK, enable_gqa=True, **options),
        "select_and_attend_prefill": functions.select_and_attend_prefill(q, k, v, density=0.5, block_shape=(8, 8), **options),
        "paged_attention": functions.paged_attention(*request, **options),
        "paged_select_attention": functions.paged_select_attention(*request, selected, **options),
    }


class Operators(TorchDispatchMode):
    """Records the library's operators that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.namespace == "blitz_attn":
            self.seen.append(operator._schema.name.removeprefix("blitz_attn::"))
        return operator(*arguments, **(options or {}))


EVERY = ["block_sparse_attention"] * 2 + ["select_and_attend_prefill"] + ["paged_attention"] * 2


def test_no_dispatch_where_nothing_needs_it(monkeypatch):
    """Without torch's dispatch, which takes longer than a small call, results have the same bits."""
    given = tensors()
    with Operators() as mode:
        expected = every_call(*given)
    assert mode.seen == EVERY
    for name in set(EVERY):
        monkeypatch.setattr(operators, name, None)
    got, grad_given = every_call(*given), tensors(grad=True)
    with torch.no_grad():
        unfollowed = every_call(*grad_given)
    with torch.inference_mode():
        frozen = every_call(*given)
    for name, pair in expected.items():
        for results in (got, unfollowed, frozen):
            assert all(torch.equal(a, b) for a, b in zip(pair, results[name], strict=True))
            assert not any(x.requires_grad for x in results[name])


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is")  # deprecated, or not supported
def test_watchers_of_operators_see_them():
    """Modes, profilers, traces and transforms of torch see the operators."""
    given = tensors()
    with torch.profiler.profile() as profile:
        every_call(*given)
    counted = {event.key: event.count for event in profile.key_averages()}
    assert all(counted[f"blitz_attn::{name}"] == EVERY.count(name) for name in EVERY)

    attend = lambda q, k, v: functions.block_sparse_attention(q, k, v, causal=True)  # noqa: E731
    traced = torch.jit.trace(attend, given)
    changed = [2 * x for x in given]
    assert torch.equal(traced(*changed), attend(*changed))
    graph = make_fx(attend)(*given)
    assert operators.block_sparse_attention.default in [node.target for node in graph.graph.nodes]
    with FakeTensorMode() as fake:
        out = attend(*(fake.from_tensor(x) for x in given))
    assert type(out).__name__ == "FakeTensor"
    masks = torch.rand(2, 31, 37) < 0.5
    for own in (lambda q, m: functions.scaled_dot_product_attention(q, *given[1:], m, enable_gqa=True),
                lambda q, m: functions.block_sparse_attention(q, *given[1:], attn_mask=m)):  # fmt: skip
        assert torch.equal(torch.func.vmap(own, in_dims=(None, 0))(given[0], masks), torch.stack([own(given[0], m) for m in masks]))
    assert torch.equal(torch.jit.trace(own, (given[0], masks[0]))(given[0], masks[1]), own(given[0], masks[1]))  # own: block_sparse_attention
    stacked = [torch.stack([x, 2 * x]) for x in given]
    for a, b in zip(torch.func.vmap(attend)(*stacked), zip(*stacked, strict=True), strict=True):
        assert torch.equal(a, attend(*b))


class Named(torch.Tensor):
    """A subclass of tensors that records the operators it is given to."""

    seen: ClassVar = []

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, arguments, options or {})


@pytest.mark.parametrize("which", [0, 2])
def test_classes_of_tensors_see_operators(which):
    given = [x.as_subclass(Named) if n == which else x for n, x in enumerate(tensors())]
    Named.seen.clear()
    assert type(functions.block_sparse_attention(*given)) is Named
    assert "blitz_attn.block_sparse_attention" in Named.seen


# ---- The library's results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chooser", ["pooled", Pooled((4, 8), "mean"), Antidiagonal(4), SampledRows(2, over="mean"), VerticalSlash(16)], ids=str
)
def test_choosers_reach_the_library(chooser):
    q, k, v = tensors()
    options = {"chooser": chooser, "top_k": [1, 2, 3, 1], "block_shape": (8, 8), "causal": True, "sink": 0, "recent": 1}
    ours = functions.select_and_attend_prefill(q, k, v, return_lse=True, **options)
    expected = blitz_attn.select_and_attend_prefill(q, k, v, return_lse=True, **options)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("budget", [{"top_k": [1, 2, 3, 4]}, {"density": [0.3, 0.5, 0.7, 0.9]}, {"top_k": [2]}], ids=str)
def test_budgets_in_arrays(budget):
    """A budget per head, or one budget, may be a list, an array or a tensor."""
    ((name, numbers),) = budget.items()
    q, k, v = tensors()
    options = {"block_shape": (8, 8), "causal": True}
    expected = blitz_attn.select_and_attend_prefill(*(x.numpy() for x in (q, k, v)), **{name: numbers}, **options)
    for given in (numbers, np.array(numbers), torch.tensor(numbers, dtype=torch.float64 if name == "density" else torch.int64)):
        out = functions.select_and_attend_prefill(q, k, v, **{name: given}, **options)
        assert np.array_equal(out.numpy(), expected)


def test_paged_tables_as_a_triple():
    q, k_cache, v_cache, tables, lengths = paged()
    triple = (torch.tensor([0, 3, 5]), torch.tensor([4, 1, 0, 2, 5]), torch.tensor([4, 1]))
    assert torch.equal(
        functions.paged_attention(q, k_cache, v_cache, triple), functions.paged_attention(q, k_cache, v_cache, tables, lengths)
    )
    given = {"sinks": [0.5, 0.1, 0.2, 0.3], "softcap": 3.0, "q_lens": [1, 1], "return_lse": True}
    ours = functions.paged_attention(q, k_cache, v_cache, tables.numpy(), [20, 9], **given)
    for a, b in zip(ours, blitz_attn.paged_attention(q, k_cache, v_cache, tables, [20, 9], **given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        (torch.ones(31, 36), ValueError, r"expected shape \(2 or 1, 4 or 1, 31 or 1, 37 or 1\), got"),
        (np.ones((31, 36)), ValueError, r"expected shape \(2 or 1, 4 or 1, 31 or 1, 37 or 1\), got"),
        (torch.ones(31, 37, dtype=torch.int32), TypeError, "expected bool, float32, float16, bfloat16 or float64, got (torch.)?int32"),
        (np.ones((31, 37), np.int32), TypeError, "expected bool, float32, float16, bfloat16 or float64, got (torch.)?int32"),
        (np.array(["a"]), TypeError, "expected bool, float32, float16, bfloat16 or float64, got str"),
        ([[True]], TypeError, "expected an array, got list"),
        (torch.ones(31, 37, device="meta"), TypeError, "expected a dense tensor in CPU memory"),
    ],
)
def test_bad_masks(given, error, sentence):
    with pytest.raises(error, match=f"^attn_mask: {sentence}"):
        functions.block_sparse_attention(*tensors(), attn_mask=given)


@pytest.mark.parametrize("dtype", ["uint16", "float64", "int8"])
def test_kinds_of_ranges(dtype):
    with pytest.raises(TypeError, match=f"^kv_ranges: expected int32 or int64, got {dtype}$"):
        functions.block_sparse_attention(*tensors(), kv_ranges=np.zeros((37, 2), dtype))


def test_a_mask_that_needs_a_gradient():
    """Where no gradients are recorded, such a mask is accepted, too, and gives the same bits."""
    q, k, v = tensors()
    bias = torch.randn(31, 37, requires_grad=True)
    slopes = torch.rand(4, requires_grad=True)
    for name, x in (("attn_mask", bias), ("alibi_slopes", slopes)):
        with torch.no_grad():
            found = functions.block_sparse_attention(q, k, v, **{name: x})
        assert torch.equal(found, functions.block_sparse_attention(q, k, v, **{name: x.detach()}))
        assert torch.equal(found, functions.block_sparse_attention(q, k, v, **{name: x}))
    with torch.no_grad():
        found = functions.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    assert torch.equal(found, functions.scaled_dot_product_attention(q, k, v, bias.detach(), enable_gqa=True))


# ---- Masks and slopes with the library's arguments --------------------------------------------------------------------------------


def test_masks_as_arrays():
    """Masks that are NumPy arrays are copied, but not along axes of stride 0. bfloat16 comes from ml_dtypes."""
    q, k, v = tensors(grad=True)
    numbers = np.random.default_rng(0).standard_normal((4, 1, 37), np.float32)
    mask = np.broadcast_to(numbers, (2, 4, 31, 37))
    out = functions.block_sparse_attention(q, k, v, attn_mask=mask)
    expected = torch.autograd.grad(functions.block_sparse_attention(q, k, v, attn_mask=torch.from_numpy(numbers)).sum(), (q, k, v))
    numbers[:] = 7
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), expected))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.float32([0.5, -np.inf, 1.5, 0] * 9 + [0]).astype(ml_dtypes.bfloat16)
    found = functions.block_sparse_attention(q, k, v, attn_mask=bits)
    assert torch.equal(found, functions.block_sparse_attention(q, k, v, attn_mask=torch.from_numpy(bits.astype(np.float32))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_masks_and_slopes_compile(backend):
    def run(q, k, v, mask, slopes):
        out = functions.block_sparse_attention(q, k, v, attn_mask=mask, alibi_slopes=slopes)
        return out + functions.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    given = tensors(grad=True)
    torch.manual_seed(7)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for mask in (torch.randn(31, 37), torch.rand(2, 1, 1, 37) < 0.5, torch.randn(4, 31, 37).bfloat16()):
        results = [call(*given, mask, torch.tensor([0.5, 0.2, 0.1, 0.0])) for call in (run, compiled)]
        assert torch.equal(*results)
        assert all(map(torch.equal, *(torch.autograd.grad(x.square().sum(), given) for x in results)))


def test_runs_of_keys_compile():
    """The operator and its gradient are part of a graph. Ranges may have any of their shapes."""
    given = tensors(grad=True)
    i = torch.arange(31)
    runs = torch.stack([i // 8 * 8, i + 6], dim=-1)

    def run(q, k, v, runs):
        return functions.block_sparse_attention(q, k, v, kv_ranges=runs)

    expected = blitz_attn.block_sparse_attention(*(x.detach() for x in given), kv_ranges=runs)
    for ranges in (runs, runs.to(torch.int32)[None], runs.expand(2, 31, 2)):
        assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(*given, ranges), expected)
    grads = [torch.autograd.grad(x.sum(), given) for x in (run(*given, runs), run(*given, runs.numpy()))]
    exact = blitz_attn.reference.block_sparse_attention_backward(
        np.ones(expected.shape), *(x.detach().numpy() for x in given),
        *blitz_attn.reference.block_sparse_attention(*(x.detach().numpy() for x in given), kv_ranges=runs, return_lse=True), kv_ranges=runs,
    )  # fmt: skip
    for *found, right in zip(*grads, exact, strict=True):
        assert torch.equal(*found)
        np.testing.assert_allclose(found[0], right, atol=1e-5)


@pytest.mark.parametrize("chooser", ["pooled", Antidiagonal(4), SampledRows(2)], ids=str)
def test_blocks_are_chosen_among_runs_of_keys(chooser):
    """Results are those of the library's own function, also in a graph. Ranges may be an array, too."""
    given = tensors()
    runs = torch.stack([torch.arange(31) // 8 * 8, torch.arange(31) // 8 * 8 + 13], dim=-1)
    options = {"chooser": chooser, "density": 0.5, "block_shape": (8, 8), "sink": 0, "recent": 0}
    expected = blitz_attn.select_and_attend_prefill(*given, kv_ranges=runs, **options)
    assert not torch.equal(expected, blitz_attn.select_and_attend_prefill(*given, **options))

    def run(q, k, v, runs):
        return functions.select_and_attend_prefill(q, k, v, kv_ranges=runs, **options)

    assert torch.equal(run(*given, runs.numpy()), expected)
    for ranges in (runs, runs.to(torch.int32)[None], runs.expand(2, 31, 2)):
        assert torch.equal(run(*given, ranges), expected)
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(*given, runs), expected)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_chosen_blocks_takes_masks_slopes_sinks_and_a_softcap(layout, dtype):
    """Results are those of the library's own function, to the bit. Each argument changes the result, alone and with all others."""
    torch.manual_seed(8)
    given = tensors(layout, dtype)
    lengths, options = of_layout(layout)
    options |= dict(zip(("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_kv"), lengths, strict=True))
    options |= {"causal": True, "density": 0.5, "block_shape": (8, 8), "return_lse": True}
    sizes = (49, 40) if layout == "TND" else (31, 37)
    mask = torch.randn(2, 4, *sizes).masked_fill(torch.rand(2, 1, *sizes) < 0.3, -torch.inf).to(dtype)
    every = {"attn_mask": mask, "alibi_slopes": torch.rand(4), "sinks": torch.randn(4), "softcap": 0.7}
    plain = functions.select_and_attend_prefill(*given, **options)
    for more in (*({name: x} for name, x in every.items()), every):
        expected = blitz_attn.select_and_attend_prefill(*given, **options, **more)
        assert not torch.equal(expected[1], plain[1])
        arrays = {name: x.numpy() if name == "attn_mask" and dtype != torch.bfloat16 else x for name, x in more.items()}
        arrays |= {name: x.tolist() for name, x in more.items() if name in ("alibi_slopes", "sinks")}
        for way in (more, arrays):
            assert all(map(torch.equal, functions.select_and_attend_prefill(*given, **options, **way), expected))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_masks_slopes_sinks_and_a_softcap_over_chosen_blocks_compile(backend):
    def run(q, k, v, mask, slopes, sinks):
        more = {"attn_mask": mask, "alibi_slopes": slopes, "sinks": sinks, "softcap": 0.7}
        return functions.select_and_attend_prefill(q, k, v, density=0.5, block_shape=(8, 8), **more)

    torch.manual_seed(9)
    given = *tensors(), torch.randn(31, 37), torch.rand(4), torch.randn(4)
    assert torch.equal(torch.compile(run, backend=backend, fullgraph=True)(*given), run(*given))


def test_compiled_functions_call_nsa_outside_of_their_graphs(recwarn):
    """Results and gradients have the same bits, without a warning, also if lengths change."""
    sizes = {"compress_block_size": 8, "num_selected_blocks": 4, "window_size": 16}
    run = lambda q, k, v, gates: functions.nsa(2 * q, k, v, gates=gates.sigmoid(), **sizes).sin()  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager")
    torch.manual_seed(10)
    for tokens in (100, 100, 90, 70):
        given = [torch.randn(1, tokens, heads, dim, requires_grad=True) for heads, dim in ((4, 16), (2, 16), (2, 16), (4, 3))]
        results = [(out := call(*given), *torch.autograd.grad(out.sum(), given)) for call in (run, compiled)]
        assert all(map(torch.equal, *results))
    assert not [str(x.message) for x in recwarn if x.category is not DeprecationWarning]  # torch itself raises DeprecationWarnings


def test_nsa_without_a_compiler_does_not_import_one():
    program = """if True:
        import sys, torch
        from blitz_attn.integrations.torch import nsa
        q, k, v = (torch.ones(1, 40, heads, 8, requires_grad=True) for heads in (2, 1, 1))
        nsa(q, k, v, compress_block_size=8).sum().backward()
        print("torch._dynamo" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True).stdout == "False\n"


# ---- Refusals -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p: expected 0, got 0.1: this attention has no dropout"),
        ({"attn_mask": torch.ones(31, 36, dtype=torch.bool)}, ValueError,
         r"attn_mask: expected a shape that expands to \(.*31, 37\), got \(31, 36\)"),
        ({"attn_mask": torch.ones(37, dtype=torch.bool), "key": torch.ones(8)}, ValueError, r"key: expected shape \(..., H, S, D\), got \(8,\)"),
        ({"attn_mask": torch.ones(31, 37, dtype=torch.int64)}, TypeError,
         "attn_mask: expected bool, float32, float16, bfloat16 or float64, got torch.int64"),
        ({"attn_mask": torch.ones(31, 37).to(torch.float8_e4m3fn)}, TypeError,
         "attn_mask: expected bool, float32, float16, bfloat16 or float64, got torch.float8_e4m3fn"),
        ({"attn_mask": torch.ones(31, 37, dtype=torch.bool), "is_causal": True}, ValueError,
         "is_causal: expected False with an attn_mask, got True"),
        ({"attn_mask": causal_lower_right(31, 37), "is_causal": True}, ValueError,
         "is_causal: expected False with an attn_mask, got True"),
        ({"attn_mask": causal_lower_right(31, 36)}, ValueError,
         r"attn_mask: expected a CausalBias for 31 queries and 37 keys, got one for \(31, 36\)"),
        ({"attn_mask": 3}, TypeError, "attn_mask: expected None, a tensor or a CausalBias, got int"),
        ({"enable_gqa": False}, ValueError, "key: expected 4 heads like query, or enable_gqa=True, got 2"),
        ({"value": torch.ones(3, 2, 37, 8)}, ValueError,
         r"value: expected leading axes that broadcast with those of query \(2, 4, 31, 16\) and key \(2, 2, 37, 16\), got shape \(3, 2, 37, 8\)"),
        ({"key": torch.ones(3, 2, 37, 16)}, ValueError,
         r"key: expected leading axes that broadcast with those of query \(2, 4, 31, 16\), got shape \(3, 2, 37, 16\)"),
        ({"value": torch.ones(8)}, ValueError, r"value: expected shape \(..., H, S, D\), got \(8,\)"),
        ({"value": torch.ones(2, 3, 37, 8)}, ValueError, r"value: expected 2 heads like key, or 1, got 3"),
        ({"key": torch.ones(2, 2, 37, 8)}, ValueError, "key: expected shape .* like query"),
        ({"query": torch.ones(2, 4, 31, 16, device="meta")}, TypeError, "query: expected a dense tensor in CPU memory, got one of layout torch.strided on meta"),
        ({"query": np.ones((2, 4, 31, 16))}, TypeError, "query: expected a torch tensor, got ndarray"),
        ({"sabi": torch.ones(1, 1, 1, 1)}, TypeError, "sabi: expected integers, got torch.float32"),
        ({"sabi": torch.full((1, 1, 4, 1), 9, dtype=torch.int32), "block_shape": (8, 8)}, ValueError, "sabi: expected .*, got 9"),
        ({"sabi": np.ones((1, 1, 1, 1))}, TypeError, "sabi: expected uint16, int16, int32 or int64, got float64"),
        ({"kv_lens": torch.tensor([1, 2], device="meta")}, TypeError, "kv_lens: expected a dense tensor in CPU memory"),
        ({"kv_lens": [1.5, 2]}, TypeError, "kv_lens: expected integers, got float64"),
        ({"kv_lens": [99, 2]}, ValueError, "kv_lens: expected .*, got 99"),
    ],
)  # fmt: skip
def test_bad_calls(change, error, sentence):
    query, key, value = tensors()
    with pytest.raises(error, match=f"^{sentence}"):
        functions.scaled_dot_product_attention(**{"query": query, "key": key, "value": value, "enable_gqa": True} | change)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"density": None}, ValueError, "density, top_p, threshold, top_k: expected exactly one of them, got none"),
        ({"top_k": 1.5}, TypeError, "top_k: expected an integer, got float"),
        ({"density": 2}, ValueError, "density: expected .*, got 2"),
        ({"chooser": "best"}, ValueError, "chooser: expected one of pooled, .*, got 'best'"),
        ({"chooser": 3}, TypeError, "chooser: expected an instance of Pooled, .*, got int"),
        ({"chooser": Pooled(7)}, ValueError, "pool"),
        ({"chooser": Pooled(8, "median")}, ValueError, "term: expected one of both, mean, bound, got 'median'"),
        ({"softcap": "x"}, TypeError, "softcap: expected a number, got str$"),
        ({"softcap": -1.0}, ValueError, "softcap: expected "),
        ({"sinks": [1.0]}, ValueError, r"sinks: expected shape \(4,\), one number per head, got \(1,\)$"),
        ({"alibi_slopes": "x"}, TypeError, "alibi_slopes: expected numbers, got str$"),
        ({"attn_mask": torch.ones(31, 36, dtype=torch.bool)}, ValueError, r"attn_mask: expected shape .*, got \(31, 36\)$"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask: expected an array, got list$"),
    ],
)
def test_bad_choosers(change, error, sentence):
    q, k, v = tensors()
    with pytest.raises(error, match=f"^{sentence}"):
        functions.select_and_attend_prefill(q, k, v, **{"density": 0.5, "block_shape": (8, 8)} | change)


def over_chosen_blocks(name):
    x = torch.zeros((31, 37) if name == "attn_mask" else 4, requires_grad=True)
    return functions.select_and_attend_prefill(
        *tensors(grad=name == "q"), density=0.5, block_shape=(8, 8), **({} if name == "q" else {name: x})
    )


@pytest.mark.parametrize("name", ["q", "attn_mask", "alibi_slopes", "sinks", "paged"])
def test_no_gradient(name):
    q, *rest = paged()
    out = functions.paged_attention(q.requires_grad_(), *rest) if name == "paged" else over_chosen_blocks(name)
    called = "paged_attention" if name == "paged" else "select_and_attend_prefill"
    sentence = f"^{called}: expected a call under torch.no_grad\\(\\), got a request for its gradient, which it does not have"
    with pytest.raises(RuntimeError, match=sentence):
        out.sum().backward()


@pytest.mark.parametrize("call", [functions.paged_attention, functions.paged_select_attention])
def test_bad_paged_calls(call):
    q, k_cache, v_cache, tables, lengths = paged()
    lists = () if call is functions.paged_attention else (torch.zeros(2, 2, 1, dtype=torch.int32),)
    with pytest.raises(TypeError, match="^block_tables: expected an array, got NoneType$"):
        functions.paged_attention(q, k_cache, v_cache, None, lengths)
    with pytest.raises(ValueError, match="^seq_lens: expected one length per request where block_tables is an array, got None$"):
        functions.paged_attention(q, k_cache, v_cache, tables)
    with pytest.raises(TypeError, match="^selected: expected an array, got NoneType$"):
        functions.paged_select_attention(q, k_cache, v_cache, tables, lengths, None)
    with pytest.raises(ValueError, match="^block_tables: expected "):
        functions.paged_attention(q, k_cache, v_cache, tables + 9, lengths)
    with pytest.raises(ValueError, match="^seq_lens: expected None with "):
        functions.paged_attention(q, k_cache, v_cache, (tables, tables, tables), lengths)
    for error, sentence, runs in (
        (ValueError, r"expected shape \(2, 2\), got \(1, 2\)", torch.zeros(1, 2, dtype=torch.int64)),
        (TypeError, "expected int32 or int64, got torch.int16", torch.zeros(2, 2, dtype=torch.int16)),
        (TypeError, "expected integers, got torch.float32", torch.zeros(2, 2)),
        (TypeError, "expected an array, got list", [[0, 3], [0, 3]]),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^kv_ranges: {sentence}"):
            call(q, k_cache, v_cache, tables, lengths, *lists, kv_ranges=runs)
