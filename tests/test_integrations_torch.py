"""The functions that torch differentiates: torch's own gradcheck, arrays that change before the backward pass, and refused calls."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blitz_attn import reference, sabi  # noqa: E402
from blitz_attn.integrations import torch as functions  # noqa: E402
from cases_nsa import WEIGHTS, problem, tensors  # noqa: E402

SIZES = {"compress_block_size": 4, "num_selected_blocks": 3, "window_size": 5}
MODES = {"paper": SIZES, "mslk": {**SIZES, "mode": "mslk", "q_tile_size": 8}, "mslk_not_causal": {**SIZES, "mode": "mslk", "causal": False}}
ATTENTION = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (4, 0)},
    "listed": {"block_shape": (8, 4), "causal": True},
    "short": {"kv_lens": [9, 20], "q_lens": [20, 7]},
}


def leaves(*arrays):
    return [torch.from_numpy(np.array(x)).requires_grad_() for x in arrays]


def attention_inputs(name, layout="BNSD"):
    shapes = [(2, heads, 20, dim) for heads, dim in ((4, 5), (2, 5), (2, 3))]
    q, k, v = (tensors(shape, dtype="float64", seed=n) for n, shape in enumerate(shapes))
    lists = None
    if name == "listed":
        mask = np.random.default_rng(0).random((2, 4, 3, 5)) < 0.5
        lists = sabi.from_block_mask(mask)
    return leaves(q, k, v), lists, ATTENTION[name]


# ---- torch's own check --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ATTENTION))
def test_gradcheck_of_attention(name):
    """The first case is checked in every element, the others along random directions."""
    arrays, lists, options = attention_inputs(name)
    fast = name != next(iter(ATTENTION))
    assert torch.autograd.gradcheck(lambda q, k, v: functions.block_sparse_attention(q, k, v, lists, **options), arrays, fast_mode=fast)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("weights", [(), WEIGHTS[:3], (*WEIGHTS[:2], "gates")], ids=["plain", "weights", "gates"])
def test_gradcheck_of_nsa(mode, weights):
    """Routing is frozen, because the choice of blocks is not continuous. The check is along random directions."""
    q, k, v, options = problem(22, 4, 2, 5, 3, batch=1, dtype="float64", weights=weights)
    routing = reference.nsa(q, k, v, return_context=True, **MODES[mode], **options)[1].block_indices
    names = list(options)

    def call(q, k, v, *given):
        return functions.nsa(q, k, v, block_indices=routing, **MODES[mode], **dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(call, leaves(q, k, v, *options.values()), fast_mode=True)


# ---- Against the calls of the library ---------------------------------------------------------------------------------------


def test_backward_twice_on_one_graph():
    q, k, v = leaves(*problem(40)[:3])
    out = functions.nsa(q, k, v, **SIZES)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


def test_example_trains():
    """Only two steps of the example run, because the whole example takes two minutes."""
    script = Path(__file__).resolve().parent.parent / "examples" / "train_recall.py"
    options = ["--attention", "nsa", "--steps", "2", "--batch", "2", "--every", "1"]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, encoding="utf-8", timeout=300, check=True
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["nsa", "1"], ["nsa", "2"]]


# ---- What is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["block_sparse_attention", "nsa"])
def test_no_gradient_of_a_gradient(name):
    if name == "nsa":
        arrays = leaves(*problem(20, dtype="float64")[:3])
        out = functions.nsa(*arrays, **SIZES)
    else:
        arrays, _, _ = attention_inputs("dense")
        out = functions.block_sparse_attention(*arrays)
    grads = torch.autograd.grad(out.square().sum(), arrays, create_graph=True)
    plain = torch.autograd.grad(
        (functions.nsa(*arrays, **SIZES) if name == "nsa" else functions.block_sparse_attention(*arrays)).square().sum(), arrays
    )
    for a, b in zip(grads, plain, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match=rf"^{name}: expected to be differentiated once, got a request for the gradient of its gradient"):
        grads[0].sum().backward()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_inputs_changed_in_place(which):
    for call in (lambda *x: functions.nsa(*x, **SIZES), lambda *x: functions.block_sparse_attention(*x, layout="BSND")):
        arrays = [x.detach().clone() for x in leaves(*problem(40)[:3])]
        arrays[0 if which else 1].requires_grad_()
        out = call(*arrays)
        arrays[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("kind", [torch.from_numpy, np.array], ids=["torch", "numpy"])
def test_lists_changed_in_place(kind):
    """Gradients are those of the call, even if its lists and lengths are changed afterwards."""
    arrays, cu = [x[0] for x in problem(40)[:3]], np.array([0, 13, 40])
    options = SIZES | {"cu_seqlens": cu}
    routing = reference.nsa(*arrays, return_context=True, **options)[1].block_indices
    grads = []
    for changes in (False, True):
        q, k, v = leaves(*arrays)
        lists, lengths = kind(routing.copy()), kind(cu.copy())
        out = functions.nsa(q, k, v, block_indices=lists, **SIZES, cu_seqlens=lengths)
        if changes:
            lists[:], lengths[:] = 0, 7
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("function", ["block_sparse_attention", "scaled_dot_product_attention"])
def test_numpy_arrays_changed_before_backward(function):
    """torch notices changes of tensors, but not of NumPy arrays. Gradients are those of the call, whatever the arrays hold later."""
    arrays, lists, _ = attention_inputs("listed")
    grads = []
    for changes in (False, True):
        given = {"sabi": lists.copy(), "q_lens": np.array([20, 7]), "kv_lens": np.array([9, 20])}
        options = {"block_shape": (8, 4)} if function == "block_sparse_attention" else {"block_shape": (8, 4), "enable_gqa": True}
        if function == "block_sparse_attention":
            rng = np.random.default_rng(0)
            given |= {"sinks": np.float32([0, 1, 2, 3]), "attn_mask": rng.random((20, 20)) < 0.8, "alibi_slopes": rng.random(4, np.float32)}
        out = getattr(functions, function)(*arrays, **given, **options)
        for x in given.values() if changes else ():
            x[:] = x[::-1].copy()
        grads.append(torch.autograd.grad(out.square().sum(), arrays))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ["sabi", "q_lens", "sinks", "attn_mask", "alibi_slopes"])
def test_tensors_changed_before_backward(name):
    """torch notices the change, and refuses the backward pass."""
    arrays, lists, _ = attention_inputs("listed")
    given = {"sabi": torch.from_numpy(lists), "q_lens": torch.tensor([20, 7]), "sinks": torch.ones(4)}
    given |= {"attn_mask": torch.ones(20, 20), "alibi_slopes": torch.ones(4)}
    out = functions.block_sparse_attention(*arrays, block_shape=(8, 4), **given)
    given[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


CALLS = {
    "block_sparse_attention": lambda x: functions.block_sparse_attention(x, x, x),
    "scaled_dot_product_attention": lambda x: functions.scaled_dot_product_attention(x, x, x),
    "select_and_attend_prefill": lambda x: functions.select_and_attend_prefill(x, x, x, density=1.0),
    "paged_attention": lambda x: functions.paged_attention(x[0].transpose(0, 1), x.mT.mT, x, [[0]] * 16, [1] * 16, kv_layout="HND"),
    "nsa": lambda x: functions.nsa(x, x, x),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize("name", list(CALLS))
def test_forward_mode_is_refused(name):
    x = torch.randn(1, 2, 16, 8)
    sentence = "^q(uery)?: expected a tensor without a forward-mode tangent, got one of torch.func.jvp or a dual tensor"
    with pytest.raises(ValueError, match=sentence):
        torch.func.jvp(CALLS[name], (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=sentence):
        CALLS[name](torch.autograd.forward_ad.make_dual(x, x))


TRANSFORMS = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(1.0)),
    "jacrev": torch.func.jacrev,
    "vmap of grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x])),
    "grad of vmap": lambda f: lambda x: torch.func.grad(lambda y: torch.func.vmap(f)(torch.stack([y, y])).sum())(x),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_gradients_of_torch_func_are_refused(transform, name):
    """The sentence of the refusal is one of this library."""
    transformed = TRANSFORMS[transform](lambda y: CALLS[name](y).sum())
    with pytest.raises(
        ValueError, match="^q(uery)?: expected a tensor that torch.func does not differentiate, got one of grad, vjp or jacrev: use"
    ):
        transformed(torch.randn(1, 2, 16, 8))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "nsa"])
def test_what_torch_func_does_not_differentiate(name):
    """A call on a tensor that torch.func does not differentiate, and a call under torch.no_grad(), count as constants."""
    x = torch.randn(1, 2, 16, 8)
    factor = CALLS[name](x).sum()
    assert torch.equal(torch.func.grad(lambda y: (y * CALLS[name](x).sum()).sum())(x), factor.expand_as(x))

    def unfollowed(y):
        with torch.no_grad():
            return CALLS[name](y).sum()

    assert torch.equal(torch.func.grad(lambda y: (y * unfollowed(y)).sum())(x), factor.expand_as(x))


def test_vmap():
    """torch.func.vmap maps a call, and torch.autograd differentiates the mapped call."""
    x, y = torch.randn(3, 1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    mapped, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    attend = lambda q: functions.block_sparse_attention(q, y, y, sinks=[0.5, 1.0])  # noqa: E731
    out, expected = torch.func.vmap(attend)(mapped), torch.stack([attend(q) for q in alone])
    assert torch.equal(out, expected)
    assert torch.equal(*(torch.autograd.grad(o.square().sum(), q)[0] for o, q in ((out, mapped), (expected, alone))))
    with pytest.raises(ValueError, match=r"^nsa: expected a call outside of torch\.func's transforms, which cannot see into it$"):
        torch.func.vmap(lambda q: functions.nsa(q, y, y))(x)


def test_errors_are_those_of_the_library():
    q, k, v = leaves(*problem(40)[:3])
    with pytest.raises(ValueError, match="^window_size: expected "):
        functions.nsa(q, k, v, window_size=0)
    with pytest.raises(ValueError, match="^k: expected "):
        functions.block_sparse_attention(q, k[..., :3], v, layout="BSND")


def test_what_is_not_a_tensor_is_refused():
    x = torch.ones(1, 8, 2, 4)
    with pytest.raises(TypeError, match="^q: expected a torch tensor, got ndarray$"):
        functions.block_sparse_attention(x.numpy(), x, x)
    with pytest.raises(TypeError, match="^v: expected a torch tensor, got NoneType$"):
        functions.nsa(x, x, None)


def test_tensors_outside_cpu_memory_or_not_dense_are_refused():
    x = torch.ones(1, 8, 2, 4)
    with pytest.raises(TypeError, match="^k: expected a dense tensor in CPU memory, got one of layout torch.strided on meta$"):
        functions.block_sparse_attention(x, x.to("meta"), x)
    with pytest.raises(TypeError, match="^v: expected a dense tensor in CPU memory, got one of layout torch.sparse_coo on cpu$"):
        functions.nsa(x, x, x.to_sparse())
    with pytest.raises(ValueError, match="^return_lse: expected True or False, got Tensor that raises: Boolean value of"):
        functions.block_sparse_attention(x, x, x, return_lse=torch.ones(2))
