"""The interface of upstream's sparse_attn package: its names, argument order, shapes and terms."""

import inspect

import numpy as np
import pytest

from blitz_attn import reference
from blitz_attn.compat import mslk
from cases_nsa import WEIGHTS, problem, tensors

SIZES = (16, 3, 21)  # compress_block_size, num_selected_blocks, window_size
NAMED = {"compress_block_size": 16, "num_selected_blocks": 3, "window_size": 21, "mode": "mslk", "q_tile_size": 32}


def upstream_weights(options):
    return options["w_k_compress"], options["w_v_compress"], options["gate_proj_weight"]


def test_argument_order():
    """The order is that of upstream's signatures. Arguments that upstream added later come last."""
    orders = {
        "nsa": "Q K V compress_block_size num_selected_blocks window_size W_k_compress W_v_compress gate_proj_weight causal softmax_scale "
        "q_tile_size n_block_size cu_seqlens max_seqlen num_cmp_selected_blocks",
        "nsa_forward_reference": "Q K V compress_block_size num_selected_blocks window_size W_k_compress W_v_compress gate_proj_weight causal "
        "softmax_scale q_tile_size _block_indices",
        "nsa_backward_reference": "Q K V dO compress_block_size num_selected_blocks window_size W_k_compress W_v_compress gate_proj_weight "
        "causal softmax_scale q_tile_size _block_indices",
        "compute_block_indices_reference": "Q K compress_block_size num_selected_blocks W_k_compress causal softmax_scale q_tile_size",
        "compress_kv": "K V block_size W_k W_v",
        "fused_compress_kv": "K V block_size W_k W_v cu_seqlens max_seqlen",
        "fused_compress_kv_backward": "dK_cmp dV_cmp K V block_size W_k W_v cu_seqlens",
        "score_and_select_blocks": "Q K_cmp num_selected_blocks compress_block_size causal q_tile_size softmax_scale",
        "fused_score_and_select_blocks": "Q K_cmp num_selected_blocks compress_block_size causal q_tile_size softmax_scale cu_seqlens max_seqlen",
        "compute_gates": "Q gate_proj_weight chunk_size",
        "gate_and_combine": "O_cmp O_slc O_sld gates chunk_size",
        "fused_gate_and_combine": "Q O_cmp O_slc O_sld gate_proj_weight",
        "fused_gating_backward": "Q dO O_cmp O_slc O_sld gates gate_proj_weight",
    }
    orders["nsa_forward"] = orders["nsa"]
    assert set(orders) == set(mslk.__all__)
    for name, order in orders.items():
        assert list(inspect.signature(getattr(mslk, name)).parameters) == order.split()
    defaults = {name: p.default for name, p in inspect.signature(mslk.nsa).parameters.items()}
    assert (defaults["compress_block_size"], defaults["num_selected_blocks"], defaults["window_size"]) == (64, 16, 512)
    assert (defaults["q_tile_size"], defaults["n_block_size"], defaults["causal"]) == (256, 128, True)


def test_references():
    """The references return gradients by upstream's names, and take fixed block indices, as upstream's do."""
    q, k, v, options = problem(100, 4, 2, 8, dtype="float64", weights=WEIGHTS[:3])
    chosen = mslk.compute_block_indices_reference(q, k, 16, 3, options["w_k_compress"], q_tile_size=32)
    assert chosen.dtype == np.int64
    assert chosen.shape == (2, 4, 4, 3)
    call = {"q_tile_size": 32, "_block_indices": chosen}
    out = mslk.nsa_forward_reference(q, k, v, *SIZES, *upstream_weights(options), **call)
    exact, context = reference.nsa(q, k, v, return_context=True, **NAMED, **options)
    np.testing.assert_array_equal(out, exact)
    dout = tensors(out.shape, dtype="float64", seed=2)
    grads = mslk.nsa_backward_reference(q, k, v, dout, *SIZES, *upstream_weights(options), **call)
    assert list(grads) == ["dQ", "dK", "dV", "dW_k_compress", "dW_v_compress", "dgate_proj_weight"]
    for ours, expected in zip(grads.values(), reference.nsa_backward(dout, context), strict=False):
        np.testing.assert_array_equal(ours, expected)


class WithoutShape:
    """An array without a shape attribute, which only NumPy can read."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_reference_of_a_gradient_without_a_shape():
    q, k, v, _ = problem(40, 4, 2, 8, dtype="float64")
    dout = tensors(q.shape, dtype="float64", seed=2)
    expected = mslk.nsa_backward_reference(q, k, v, dout, *SIZES)
    grads = mslk.nsa_backward_reference(q, k, v, WithoutShape(dout), *SIZES)
    for name in ("dQ", "dK", "dV"):
        np.testing.assert_array_equal(grads[name], expected[name])


def test_no_sequences_and_no_blocks():
    """Calls without sequences, and with sequences shorter than a block, are valid."""
    Q, K = np.ones((0, 2, 4), np.float32), np.ones((0, 1, 4), np.float32)
    K_cmp, V_cmp = mslk.fused_compress_kv(K, K, 8, cu_seqlens=[0])
    assert K_cmp.shape == V_cmp.shape == (0, 0, 1, 4)
    assert [x.shape for x in mslk.fused_compress_kv_backward(K_cmp, V_cmp, K, K, 8, cu_seqlens=[0])[:2]] == [(0, 1, 4)] * 2
    assert mslk.fused_score_and_select_blocks(Q, K_cmp, 3, 8, cu_seqlens=[0]).shape == (0, 2, 0, 3)
    short = np.ones((1, 5, 1, 4), np.float32)
    lists = mslk.compute_block_indices_reference(short, short, 8, 3)
    assert lists.dtype == np.int64
    assert lists.tolist() == [[[[-1, -1, -1]]]]
    out = mslk.nsa_forward_reference(short, short, short, 8, 3)
    assert (mslk.nsa_forward_reference(short, short, short, 8, 3, _block_indices=lists) == out).all()


def test_no_batch_entries():
    empty = np.ones((0, 5, 1, 4), np.float32)
    lists = mslk.compute_block_indices_reference(empty, empty, 2, 3, q_tile_size=4)
    assert lists.shape == (0, 1, 2, 2)
    assert mslk.nsa_forward_reference(empty, empty, empty, 2, 3, q_tile_size=4, _block_indices=lists).shape == (0, 5, 1, 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"K": (2, 40, 3, 8), "V": (2, 40, 3, 8)}, "^K: expected "),
        ({"W_k_compress": (2, 8, 7)}, "^W_k_compress: expected "),
        ({"W_v_compress": (1, 8, 8)}, "^W_v_compress: expected "),
        ({"gate_proj_weight": (4, 2, 8)}, "^gate_proj_weight: expected "),
        ({"window_size": 0}, "^window_size: expected "),
        ({"softmax_scale": float("nan")}, "^softmax_scale: expected "),
    ],
)
def test_errors_are_in_upstream_names(changes, sentence):
    arrays = {"Q": (2, 40, 4, 8), "K": (2, 40, 2, 8), "V": (2, 40, 2, 8)}
    arguments = {name: tensors(x) if isinstance(x, tuple) else x for name, x in {**arrays, **changes}.items()}
    with pytest.raises(ValueError, match=sentence):
        mslk.nsa(**arguments)


X, ONE = np.ones((1, 12, 2, 8), np.float32), np.ones((1, 3, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("kind", "sentence", "call"),
    [
        (TypeError, "block_size: expected an integer, got str", lambda: mslk.fused_compress_kv(X[0], X[0], "4", cu_seqlens=[0, 12])),
        (TypeError, "block_size: expected an integer, got str", lambda: mslk.fused_compress_kv_backward(ONE, ONE, X[0], X[0], "4", cu_seqlens=[0, 12])),
        (ValueError, r"dV_cmp: expected shape \(1 sequences, 3 or more", lambda: mslk.fused_compress_kv_backward(ONE, ONE[:, 1:], X[0], X[0], 4, cu_seqlens=[0, 12])),
        (ValueError, "cu_seqlens: expected numbers rising from 0, got 12", lambda: mslk.fused_compress_kv_backward(ONE, ONE, X[0], X[0], 4, cu_seqlens=12)),
        (ValueError, "cu_seqlens: expected numbers rising from 0, got .0, 9223372036854775807, ",
         lambda: mslk.fused_compress_kv_backward(ONE, ONE, X[0], X[0], 4, cu_seqlens=[0, 2**63 - 1, -(2**63), -1, 12])),
        (TypeError, "K_cmp: expected an array, got int", lambda: mslk.score_and_select_blocks(X, 7, 2, 4)),
        (TypeError, "num_selected_blocks: expected an integer, got float", lambda: mslk.score_and_select_blocks(X, ONE, 2.0, 4)),
        (TypeError, "O_slc: expected dtype float32 like O_cmp, got float64", lambda: mslk.gate_and_combine(X, X.astype(float), X, X[..., :3])),
        (ValueError, "Q: expected the tokens and heads of O_cmp", lambda: mslk.fused_gate_and_combine(X[:, 1:], X, X, X)),
        (TypeError, "W_k_compress: expected an array, got list", lambda: mslk.nsa_forward_reference(X, X, X, 4, W_k_compress=[1])),
        (TypeError, "_block_indices: expected int16, int32 or int64, got float32", lambda: mslk.nsa_forward_reference(X, X, X, 4, _block_indices=X)),
        (TypeError, "dO: expected an array, got tuple", lambda: mslk.nsa_backward_reference(X, X, X, (1, 2), 4)),
        (TypeError, "softmax_scale: expected a number, got str", lambda: mslk.compute_block_indices_reference(X, X, 4, softmax_scale="1")),
    ],
)  # fmt: skip
def test_parts_of_a_wrong_kind(kind, sentence, call):
    with pytest.raises(kind, match=f"^{sentence}"):
        call()


def test_torch_gradients():
    """This nsa is differentiable, like upstream's."""
    torch = pytest.importorskip("torch")
    q, k, v, options = problem(100, 4, 2, 16, weights=WEIGHTS[:3])
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, *upstream_weights(options))]
    out = mslk.nsa(*leaves[:3], *SIZES, *leaves[3:], q_tile_size=32)
    assert isinstance(out, torch.Tensor)
    dout = tensors(q.shape, seed=4)
    out.backward(torch.from_numpy(dout))
    exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **NAMED, **options)[1])
    for leaf, expected in zip(leaves, exact, strict=False):
        np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(mslk.nsa(*leaves[:3], *SIZES, *leaves[3:], q_tile_size=32), out)
    padded = mslk.fused_compress_kv(leaves[1].detach()[0], leaves[2].detach()[0], 16, cu_seqlens=[0, 33, 100])
    assert isinstance(padded[0], torch.Tensor)
    assert padded[0].shape == (2, 4, 2, 16)
