"""The float64 twins of native sparse attention: results that are known, and torch's gradients.

That they say the same as the library is held by test_nsa.py, and that the library says what the formulas say, token by token, by the
oracle of the fuzzer (tests/fuzz/nsa_oracle.py).
"""

import math

import numpy as np
import pytest

from blitz_attn import reference, testing
from blitz_attn._reference import attend
from blitz_attn._reference import nsa_core as core
from cases_nsa import WEIGHTS, problem, tensors

# Small everywhere, with tails behind blocks and tiles, and with grouped heads.
MODES = {
    "paper": {"mode": "paper", "compress_block_size": 4, "num_selected_blocks": 4, "window_size": 3},
    "paper_strides": {
        "mode": "paper", "compress_block_size": 4, "compress_stride": 1, "select_block_size": 6, "num_selected_blocks": 3,
        "init_blocks": 0, "local_blocks": 1, "window_size": 5,
    },
    "paper_not_causal": {"mode": "paper", "compress_block_size": 4, "num_selected_blocks": 4, "window_size": 4, "causal": False},
    "mslk": {"mode": "mslk", "compress_block_size": 4, "num_selected_blocks": 2, "window_size": 3, "q_tile_size": 8},
    "mslk_not_causal": {
        "mode": "mslk", "compress_block_size": 3, "num_selected_blocks": 2, "window_size": 5, "q_tile_size": 7, "causal": False,
    },
}  # fmt: skip


# ---- Results that are known -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_groups_of_compressed_keys_where_there_are_none(causal):
    """A sequence that is shorter than a block has no compressed keys: their branch gives 0, and the window is all."""
    q, k, v, _ = problem(3, 4, 2, 5, 3, batch=1, dtype="float64")
    mode = {**MODES["mslk"], "causal": causal, "num_cmp_selected_blocks": 1}
    out = reference.nsa(q, k, v, **mode)
    window = reference.window_attention(q, k, v, mode["window_size"], causal=causal)
    np.testing.assert_allclose(out, window / 3, rtol=1e-12, atol=1e-13)


def test_eq_9_on_the_sizes_of_the_paper():
    rules = core.selector("paper", 32, 16, 256, 16, 64, 1, 2, True)
    assert {64 // 16 * 3 + offset: times for offset, times in core.overlaps(rules).items()} == {11: 1, 12: 2, 13: 2, 14: 2, 15: 1}


@pytest.mark.parametrize("mode", list(MODES))
def test_shapes(mode):
    """Those of upstream's table, and of nothing."""
    q, k, v, options = problem(26, 4, 2, 5, 3, dtype="float64", weights=WEIGHTS[:3])
    out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode], **options)
    tile = context.how.tile
    assert out.shape == (2, 26, 4, 3)
    rows = (2, 2, 26) if tile == 1 else (2, 4, -(-26 // tile))
    assert context.block_indices.shape == (*rows, MODES[mode]["num_selected_blocks"])
    grads = reference.nsa_backward(out, context)
    assert [x.shape for x in grads[:6]] == [q.shape, k.shape, v.shape, (2, 5, 5), (2, 3, 3), (4, 3, 5)]
    assert grads.dgates is None
    for tokens, batch in ((0, 2), (5, 0), (1, 1)):
        q, k, v, _ = problem(tokens, 4, 2, 5, 3, batch=batch, dtype="float64")
        out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode])
        assert out.shape == (batch, tokens, 4, 3)
        assert [x.shape for x in reference.nsa_backward(out, context)[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("mode", list(MODES))
def test_strips_do_not_show(mode, monkeypatch):
    q, k, v, _ = problem(40, 4, 2, 5, 3, dtype="float64")
    dout, results = tensors((2, 40, 4, 3), dtype="float64"), []
    for elements in (attend._STRIP_ELEMENTS, 600):
        monkeypatch.setattr(attend, "_STRIP_ELEMENTS", elements)
        out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode])
        results.append([out, *reference.nsa_backward(dout, context)[:3]])
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-12, atol=1e-14)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


# ---- Against torch ----------------------------------------------------------------------------------------------------


def test_torch_agrees():
    """Every gradient of a whole call by torch's autograd over the formulas, where torch is."""
    torch = pytest.importorskip("torch")
    q, k, v, options = problem(26, 4, 2, 5, 3, batch=1, dtype="float64", weights=WEIGHTS[:3])
    mode = MODES["mslk"]
    out, context = reference.nsa(q, k, v, return_context=True, **mode, **options)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, *options.values())]
    tq, tk, tv, wk, wv, wg = leaves
    kc = torch.einsum("bnlhd,hde->bnhe", tk[:, :24].reshape(1, 6, 4, 2, 5), wk / 4)
    vc = torch.einsum("bnlhd,hde->bnhe", tv[:, :24].reshape(1, 6, 4, 2, 3), wv / 4)
    at = torch.arange(26)
    member = torch.zeros(4, 26, 26, dtype=torch.bool)
    for h in range(4):
        for t in range(26):
            for j in context.block_indices[0, h, t // 8]:
                if j >= 0:
                    member[h, t, 4 * j : 4 * j + 4] = True
    rules = [
        (kc, vc, (torch.arange(6) * 4 <= at[:, None])[None]),
        (tk, tv, member & (at <= at[:, None])),
        (tk, tv, ((at <= at[:, None]) & (at > at[:, None] - 3))[None]),
    ]
    branches = []
    for keys, values, seen in rules:
        keys, values = (x.repeat_interleave(2, 2) for x in (keys, values))
        scores = torch.einsum("bnhd,bmhd->bhnm", tq, keys) / math.sqrt(5)
        branches.append(torch.einsum("bhnm,bmhd->bnhd", torch.softmax(scores.masked_fill(~seen, -math.inf), -1), values))
    gates = torch.sigmoid(torch.einsum("bnhd,hcd->bnhc", tq, wg))
    whole = sum(gates[..., c, None] * x for c, x in enumerate(branches))
    np.testing.assert_allclose(out, whole.detach().numpy(), rtol=1e-11, atol=1e-12)
    dout = tensors(out.shape, dtype="float64", seed=4)
    whole.backward(torch.from_numpy(dout))
    for ours, leaf in zip(reference.nsa_backward(dout, context), leaves, strict=False):
        np.testing.assert_allclose(ours, leaf.grad.numpy(), rtol=1e-9, atol=1e-11)


# ---- Precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 1e-9, 1e-6), ("float16", 1e-5, 3e-3), ("bfloat16", 1e-4, 3e-2)])
@pytest.mark.parametrize("mode", ["paper", "mslk"])
def test_same_precision_errs_as_its_dtype_does(mode, dtype, low, high):
    q, k, v, options = problem(60, 4, 2, 16, dtype=dtype, weights=WEIGHTS[:3])
    bits = {"dtype": "bfloat16"} if q.dtype == np.uint16 else {}
    options = {**MODES[mode], **options, **bits}
    exact, context = reference.nsa(q, k, v, return_context=True, **options)
    options["block_indices"] = context.block_indices
    rough, rough_context = reference.nsa_same_precision(q, k, v, **options)
    assert low < testing.error_of(rough, exact).relative < high
    dout = tensors(exact.shape, seed=3)
    for ours, true in zip(*(reference.nsa_backward(dout, c) for c in (rough_context, context)), strict=True):
        if true is not None:
            assert low < testing.error_of(ours, true).relative < 4 * high


def test_same_precision_of_float64_is_the_reference():
    q, k, v, _ = problem(20, dtype="float64")
    np.testing.assert_array_equal(reference.nsa_same_precision(q, k, v, **MODES["mslk"])[0], reference.nsa(q, k, v, **MODES["mslk"]))


# ---- Nothing to do ----------------------------------------------------------------------------------------------------


def test_shapes_of_no_sequences():
    """Blocks and rows are those of the length that the entries would have, if there were any; packed runs have none."""
    x = np.ones((0, 5, 2, 4))
    k_cmp, _ = reference.compress_kv(x, x, 2)
    assert k_cmp.shape == (0, 2, 2, 4)
    assert reference.score_and_select_blocks(x, k_cmp, 3, 2, compress_stride=2, init_blocks=0).shape == (0, 2, 5, 3)
    assert reference.score_and_select_blocks(x, k_cmp, 3, 2, mode="mslk", q_tile_size=4).shape == (0, 2, 2, 3)
    for empty, packed in ((x, {}), (np.ones((0, 2, 4)), {"cu_seqlens": [0]})):
        out, lse = reference.window_attention(empty, empty, empty, 3, return_lse=True, **packed)
        grads = reference.window_attention_backward(empty, empty, empty, empty, out, lse, 3, **packed)
        assert [g.shape for g in grads] == [empty.shape] * 3
