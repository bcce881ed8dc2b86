"""Gradients of native sparse attention agree with differences of the forward function and meet upstream's tolerances.

Packed sequences and contexts are tested, too. test_nsa.py compares gradients with the float64 reference, and tests/fuzz/nsa_problems.py
compares them with its oracle.
"""

import sys

import numpy as np
import pytest

from blitz_attn import nsa, reference, testing
from cases import bits_option, dtype_of, same_bits
from cases_nsa import GRADIENTS, MODES, PAPER, UPSTREAM, WEIGHTS, alone, both_modes, every_mode, gradients, one_hot, problem, run, tensors


def wide(x):
    return testing.to_float64(x, dtype_of(x))


# ---- Against the forward function itself --------------------------------------------------------------------------------


def directional_errors(q, k, v, seed=0, **options):
    """For each given array, the difference of the gradient along a random direction from the central difference, relative to the norm of the
    gradient. The chosen blocks are kept fixed, so that the function is smooth."""
    frozen = {**options, "block_indices": run(q, k, v, **options)[1].block_indices}
    _, context = run(q, k, v, **frozen)
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1]))
    grads = dict(zip(GRADIENTS, nsa.nsa_backward(dout, context), strict=True))
    arrays = {"q": q, "k": k, "v": v, **{name: frozen[name] for name in WEIGHTS if frozen.get(name) is not None}}
    step = UPSTREAM["gradcheck"]["eps"]
    found = {}
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ends = [float((nsa.nsa(**{**frozen, **arrays, name: x + sign * step * direction}) * dout).sum()) for sign in (1, -1)]
        along = float((grads["d" + name] * direction).sum())
        found[name] = abs((ends[0] - ends[1]) / (2 * step) - along) / max(float(np.linalg.norm(grads["d" + name])), 1e-3)
    return found


@pytest.mark.parametrize(
    ("lengths", "weights"), [(150, WEIGHTS[:3]), ([33, 0, 101, 1, 16], (*WEIGHTS[:2], "gates"))], ids=["batch", "packed"]
)
@every_mode
def test_directions(mode, lengths, weights):
    q, k, v, options = problem(lengths, 4, 2, 16, 8, packed=isinstance(lengths, list), dtype="float64", weights=weights)
    assert max(directional_errors(q, k, v, **MODES[mode], **options).values()) <= 1e-6


@pytest.mark.parametrize("name", ["q", "k", "v", *WEIGHTS[:2], "gates"])
@every_mode
def test_every_element(mode, name):
    """At a small size, each element of each gradient is near a central difference."""
    sizes = {"compress_block_size": 4, "num_selected_blocks": 2, "window_size": 3, "init_blocks": 0, "local_blocks": 1, "q_tile_size": 8}
    rules = {option: MODES[mode][option] for option in ("mode", "causal") if option in MODES[mode]}
    q, k, v, options = problem(18, 2, 1, 3, 2, batch=1, dtype="float64", weights=(*WEIGHTS[:2], "gates"))
    call = {"q": q, "k": k, "v": v, **sizes, **rules, **options}
    call["block_indices"] = nsa.nsa(return_context=True, **call)[1].block_indices
    dout = tensors((1, 18, 2, 2), dtype="float64", seed=1)
    gradient = getattr(nsa.nsa_backward(dout, nsa.nsa(return_context=True, **call)[1]), "d" + name)
    numeric = np.zeros(call[name].shape)
    for at in np.ndindex(*numeric.shape):
        ends = []
        for sign in (1, -1):
            moved = call[name].copy()
            moved[at] += sign * 1e-5
            ends.append(float((nsa.nsa(**{**call, name: moved}) * dout).sum()))
        numeric[at] = (ends[0] - ends[1]) / 2e-5
    assert abs(gradient - numeric).max() <= 1e-6 * abs(numeric).max()


# ---- Upstream's table ---------------------------------------------------------------------------------------------------

GRADCHECKS = {
    "basic": {},
    "gates": {"weights": ["gate_proj_weight"]},
    "W": {"weights": WEIGHTS[:2]},
    "all": {"weights": WEIGHTS[:3]},
    "not_causal": {"weights": WEIGHTS[:3], "causal": False},
    "gqa": {"weights": WEIGHTS[:3], "heads": 4},
    "compressed": {"branch": 0},
    "selected": {"branch": 1},
    "window": {"branch": 2},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(GRADCHECKS))
def test_upstream_gradcheck(name, seed):
    """The gradient along three random directions meets torch's default tolerance, in upstream's sizes."""
    case = dict(GRADCHECKS[name])
    q, k, v, options = problem(256, case.pop("heads", 2), 2, 32, batch=1, dtype="float64", weights=case.pop("weights", ()))
    if "branch" in case:
        options["gates"] = one_hot(q, case.pop("branch"))
    sizes = {"mode": "mslk", "num_selected_blocks": 2, "window_size": 128}
    found = directional_errors(q, k, v, seed, **sizes, **options, **case)
    assert max(found.values()) <= UPSTREAM["gradcheck"]["atol"]


@pytest.mark.parametrize(("causal", "name"), [(True, "backward"), (False, "backward_not_causal")])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_upstream_backward(causal, name, kv_heads):
    q, k, v, options = problem(1024, 4, kv_heads, 128, batch=1, dtype="bfloat16", size=0.1, weights=WEIGHTS[:3])
    options |= {"mode": "mslk", "num_selected_blocks": 8, "window_size": 256, "causal": causal}
    dout, _, grads = gradients(q, k, v, **options)
    exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **options, **bits_option(q))[1])
    for which in ("dq", "dk", "dv"):
        apart = abs(wide(getattr(grads, which)) - getattr(exact, which))
        assert apart.max() <= UPSTREAM[f"{name}_max"]
        assert apart.mean() <= UPSTREAM[f"{name}_mean"]
    assert abs(wide(grads.dgate_proj_weight) - exact.dgate_proj_weight).mean() <= UPSTREAM["backward_gates_mean"]


# ---- Packed sequences, contexts -------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_is_each_sequence_alone(mode, dtype):
    lengths = [33, 0, 101, 1, 16, 75]
    q, k, v, options = problem(lengths, 4, 2, 16, 24, packed=True, dtype=dtype, weights=WEIGHTS[:3])
    dout, _, grads = gradients(q, k, v, **MODES[mode], **options)
    sums = [0.0, 0.0, 0.0]
    for n, end in enumerate(np.cumsum(lengths)):
        part = slice(end - lengths[n], end)
        *arrays, own = alone(n, q, k, v, options)
        one = nsa.nsa_backward(np.ascontiguousarray(dout[None, part]), run(*arrays, **MODES[mode], **own)[1])
        for name, a, b in zip(GRADIENTS, grads[:3], one[:3], strict=False):
            assert same_bits(np.ascontiguousarray(a[part]), np.ascontiguousarray(b[0])), name
        sums = [a + wide(b) for a, b in zip(sums, one[3:6], strict=True)]
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for a, b in zip(grads[3:6], sums, strict=True):
        np.testing.assert_allclose(wide(a), b, rtol=tolerance, atol=tolerance * abs(b).max())


@both_modes
def test_a_context_can_be_used_again(mode):
    """Gradients are fresh arrays, and the gradient of the result is not written."""
    q, k, v, options = problem(90, weights=WEIGHTS[:3])
    dout, context, grads = gradients(q, k, v, **mode, **options)
    dout.flags.writeable = False
    again = nsa.nsa_backward(dout, context)
    for a, b in zip(again[:6], grads[:6], strict=True):
        assert same_bits(a, b)
        assert a.flags.writeable
        assert not any(np.shares_memory(a, x) for x in (b, q, k, v, *options.values()))
    np.testing.assert_allclose(nsa.nsa_backward(2 * dout, context).dv, 2 * grads.dv, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@both_modes
def test_a_context_keeps_lists_and_lengths_of_its_own(mode, dtype):
    q, k, v, options = problem([40, 50], packed=True)
    _, context = run(q, k, v, **mode, **options)
    given = {"cu_seqlens": options["cu_seqlens"].astype(np.int64), "block_indices": context.block_indices.astype(dtype)}
    dout, own, before = gradients(q, k, v, **mode, **{**options, **given})
    for x in given.values():
        x[...] = 0
    assert all(same_bits(a, b) for a, b in zip(nsa.nsa_backward(dout, own)[:3], before[:3], strict=True))


def test_a_context_of_another_call():
    """A context of a call with other shapes, or of a packed call, is refused."""
    q, k, v, _ = problem(40)
    dout, _, _ = gradients(q, k, v, **PAPER)
    others = [(problem(n, *how)[:3], {}) for n, how in ((41, ()), (40, (6, 2)), (40, (4, 2, 16, 8)))]
    others.append(([x.reshape(80, *x.shape[2:]) for x in (q, k, v)], {"cu_seqlens": [0, 40, 80]}))
    for arrays, options in others:
        with pytest.raises(ValueError, match=r"^dout: expected shape .+, got \(2, 40, 4, 16\)"):
            nsa.nsa_backward(dout, run(*arrays, **options, **PAPER)[1])


@pytest.mark.parametrize("weights", [(), WEIGHTS[:2]], ids=["means", "weights"])
def test_gradients_of_float16_tokens_whose_block_overflows(weights):
    """All queries attend mostly the first block. The gradient of this block's mean is the sum over 64 tokens, and exceeds float16."""
    tokens, size = 2048, 64
    q, k, v, _ = problem(tokens, 4, 1, 16, batch=1, dtype="float16", size=0.1)
    q[...], k[...] = 1, 0
    k[:, :size] = 2
    dout = np.full(q.shape, 40, np.float16)
    options = {"compress_block_size": size, "num_selected_blocks": 4}
    options |= {name: np.broadcast_to(np.eye(16, dtype=np.float16), (1, 16, 16)) for name in weights}
    _, context = run(q, k, v, **options)
    grads = nsa.nsa_backward(dout, context)
    chosen = {**options, "block_indices": context.block_indices}
    exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **chosen)[1])
    assert 4000 < abs(exact.dv).max() < 5000
    for name in ("dk", "dv"):
        a, b = wide(getattr(grads, name)), getattr(exact, name)
        assert abs(a - b).max() <= 0.01 * abs(b).max(), name


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_weights_are_sums_in_the_order_of_the_blocks(size):
    """Further blocks at the end, whose gradients are 0, change no bit. In a product by BLAS they might."""
    k, dk_cmp = (tensors((1, 300, 2, 64), seed=n) for n in range(2))
    w = tensors((2, 64, 64), seed=2)
    longer = [np.concatenate([x, np.zeros((1, 50, 2, 64), x.dtype)], axis=1) for x in (k, dk_cmp)]
    one, two = (
        nsa.compress_kv_backward(d[:, : x.shape[1] // size], d[:, : x.shape[1] // size], x, x, size, w, w) for x, d in ((k, dk_cmp), longer)
    )
    assert all(map(same_bits, one[2:], two[2:]))


@pytest.mark.parametrize("elements", [1, 1 << 14])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weights", [(), WEIGHTS[:3], (*WEIGHTS[:2], "gates")], ids=["none", "weights", "gates"])
@pytest.mark.parametrize("rules", [*MODES.values(), {**MODES["mslk"], "num_cmp_selected_blocks": 1}], ids=[*MODES, "mslk_groups"])
def test_pieces_change_nothing(rules, weights, packed, elements, monkeypatch):
    """Gradients are computed in pieces of some KV heads. No bit depends on the size of pieces or on threads, which change how many heads a piece has."""
    q, k, v, options = problem(240, 12, 3, 16, 24, batch=1 if packed else 2, weights=weights)
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        options = {name: x[0] if name == "gates" else x for name, x in options.items()}
        options["cu_seqlens"] = [0, 48, 144, 144, 240]
    out, context = run(q, k, v, **rules, **options)
    dout = tensors(out.shape, dtype="float32", seed=1)
    expected = nsa.nsa_backward(dout, context)
    monkeypatch.setattr(sys.modules["blitz_attn.nsa"], "PIECE_ELEMENTS", elements)
    for threads in (1, 2):
        for x, y in zip(nsa.nsa_backward(dout, context, num_threads=threads), expected, strict=True):
            assert (x is None and y is None) or same_bits(x, y)


@both_modes
def test_gradients_of_unselected_keys_are_written(mode):
    """Keys that no query selects, or that lie in no block, get gradients of 0."""
    q, k, v, _ = problem(150, 4, 2, 16)
    _, context = run(q, k, v, gates=one_hot(q, 1), **mode)
    listed = np.full_like(context.block_indices, -1)
    listed[..., 0] = 2
    _, _, grads = gradients(q, k, v, gates=one_hot(q, 1), block_indices=listed, **mode)
    assert np.flatnonzero((grads.dv != 0).any((0, 2, 3))).tolist() == list(range(32, 48))
    assert all((x == 0).all() for x in nsa.nsa_backward(np.zeros(q.shape, np.float32), context)[:3])
