"""Gradients of native sparse attention and of its parts: against the float64 reference at every level and dtype, against differences
of the forward function itself, upstream's table, packed sequences, threads, contexts. `BLITZ_ATTN_TEST_NSA`: see cases_nsa_library.py."""

import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, ISA_LEVELS, bits_option, dtype_of, same_bits
from cases_nsa import GRADIENTS, UPSTREAM, WEIGHTS, alone, one_hot, problem, sequences, tensors
from cases_nsa_library import IS_REFERENCE, check_backward, library, routing_of, run
from test_nsa import MODES, MSLK, PAPER, both_modes, every_mode

BEST = blitz_attn.isa_levels(available=True)[-1:]


def gradients(q, k, v, seed=99, **options):
    """dout, context and gradients of the module under test."""
    _, context = run(q, k, v, **options)
    dout = tensors((*q.shape[:-1], v.shape[-1]), dtype=dtype_of(q), seed=seed)
    return dout, context, library.nsa_backward(dout, context)


def wide(x):
    return None if x is None else testing.to_float64(x, dtype_of(x))


# ---- Against the reference ------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", DTYPES)
def test_modes_and_dtypes(mode, dtype):
    q, k, v, options = problem(203, 4, 2, 24, 16, dtype=dtype, weights=WEIGHTS[:3])
    check_backward(q, k, v, **MODES[mode], **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1)])
@both_modes
def test_grouped_heads(mode, heads, kv_heads):
    check_backward(*problem(130, heads, kv_heads, 16)[:3], **mode)


@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (7, 33), (64, 64), (128, 128), (192, 128)])
@both_modes
def test_head_dimensions(mode, dim, v_dim):
    check_backward(*problem(100, 2, 1, dim, v_dim)[:3], **mode)


@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 100])
@every_mode
def test_sequences_of_any_length_are_right(mode, tokens):
    check_backward(*problem(tokens, 4, 2, 16)[:3], **MODES[mode])


@pytest.mark.parametrize("weights", [(), ("w_k_compress",), ("w_v_compress",), ("gate_proj_weight",), ("gates",), (*WEIGHTS[:2], "gates")])
@both_modes
def test_weights(mode, weights):
    """What was not given has no gradient."""
    q, k, v, options = problem(90, 4, 2, 16, 24, weights=weights)
    grads = check_backward(q, k, v, **mode, **options)
    assert {name for name, x in zip(GRADIENTS, grads, strict=True) if x is not None} == {"dq", "dk", "dv", *("d" + name for name in weights)}


@pytest.mark.parametrize("branch", [0, 1, 2], ids=["compressed", "selected", "window"])
@every_mode
def test_each_branch_alone(mode, branch):
    q, k, v, options = problem(150, 4, 2, 16, weights=WEIGHTS[:2])
    check_backward(q, k, v, gates=one_hot(q, branch), **MODES[mode], **options)


@pytest.mark.parametrize("extra", [{"scale": 0.5}, {"scale": 0.0}, {"window_size": 1}, {"window_size": 1000}, {"num_selected_blocks": 100}])
@both_modes
def test_options(mode, extra):
    check_backward(*problem(90, 4, 2, 16)[:3], **{**mode, **extra})


def test_defaults():
    check_backward(*problem(1100, 4, 1, 32, batch=1)[:3], levels=BEST)


def test_float64_is_exact():
    for name, mode in MODES.items():
        q, k, v, options = problem(120, 4, 2, 16, 8, dtype="float64", weights=WEIGHTS[:3])
        dout, _, grads = gradients(q, k, v, **mode, **options)
        exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **mode, **options)[1])
        for a, b in zip(grads[:6], exact[:6], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("causal", [True, False])
def test_groups_of_compressed_keys(causal):
    q, k, v, _ = problem(700, 2, 1, 8, batch=1, dtype="float64")
    mode = {"mode": "mslk", "compress_block_size": 2, "num_selected_blocks": 2, "window_size": 4, "q_tile_size": 64, "causal": causal}
    dout, _, grads = gradients(q, k, v, num_cmp_selected_blocks=1, **mode)
    exact = reference.nsa_backward(dout, reference.nsa(q, k, v, num_cmp_selected_blocks=1, return_context=True, **mode)[1])
    for a, b in zip(grads[:3], exact[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


# ---- Against the forward function itself --------------------------------------------------------------------------------


def directional_errors(q, k, v, seed=0, **options):
    """For each given array: the gradient along a random direction against the central difference, relative to the directions' usual
    size. Routing is frozen, so that the function is smooth."""
    _, context = run(q, k, v, **options)
    frozen = {**options, "block_indices": routing_of(context)}
    _, context = run(q, k, v, **frozen)
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1]))
    grads = dict(zip(GRADIENTS, library.nsa_backward(dout, context), strict=True))
    arrays = {"q": q, "k": k, "v": v, **{name: frozen[name] for name in WEIGHTS if frozen.get(name) is not None}}
    step = UPSTREAM["gradcheck"]["eps"]
    found = {}
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ends = []
        for sign in (1, -1):
            call = {**frozen, "q": q, "k": k, "v": v, name: x + sign * step * direction}
            ends.append(float((library.nsa(**call) * dout).sum()))
        along = float((grads["d" + name] * direction).sum())
        found[name] = abs((ends[0] - ends[1]) / (2 * step) - along) / max(float(np.linalg.norm(grads["d" + name])), 1e-3)
    return found


@every_mode
def test_directions(mode):
    q, k, v, options = problem(150, 4, 2, 16, 8, dtype="float64", weights=WEIGHTS[:3])
    assert max(directional_errors(q, k, v, **MODES[mode], **options).values()) <= 1e-6


@every_mode
def test_directions_packed(mode):
    q, k, v, options = problem([33, 0, 101, 1, 16], 4, 2, 16, 8, packed=True, dtype="float64", weights=(*WEIGHTS[:2], "gates"))
    assert max(directional_errors(q, k, v, **MODES[mode], **options).values()) <= 1e-6


@every_mode
def test_every_element(mode):
    """Central differences of each element of each array, at a size where that is quick."""
    sizes = {"compress_block_size": 4, "num_selected_blocks": 2, "window_size": 3, "init_blocks": 0, "local_blocks": 1, "q_tile_size": 8}
    rules = {name: MODES[mode][name] for name in ("mode", "causal") if name in MODES[mode]}
    q, k, v, options = problem(18, 2, 1, 3, 2, batch=1, dtype="float64", weights=(*WEIGHTS[:2], "gates"))
    call = {"q": q, "k": k, "v": v, **sizes, **rules, **options}
    _, context = library.nsa(return_context=True, **call)
    call["block_indices"] = routing_of(context)
    dout = tensors((1, 18, 2, 2), dtype="float64", seed=1)
    grads = dict(zip(GRADIENTS, library.nsa_backward(dout, library.nsa(return_context=True, **call)[1]), strict=True))
    for name in ("q", "k", "v", *WEIGHTS[:2], "gates"):
        x, numeric = call[name], np.zeros(call[name].shape)
        for at in np.ndindex(*x.shape):
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[at] += sign * 1e-5
                ends.append(float((library.nsa(**{**call, name: moved}) * dout).sum()))
            numeric[at] = (ends[0] - ends[1]) / 2e-5
        error = abs(grads["d" + name] - numeric).max() / abs(numeric).max()
        assert error <= 1e-6, f"{name}: {error}"


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


@pytest.mark.parametrize("name", list(GRADCHECKS))
def test_upstream_gradcheck(name):
    """Upstream's sizes and torch's default tolerances, along three directions each."""
    case = dict(GRADCHECKS[name])
    q, k, v, options = problem(256, case.pop("heads", 2), 2, 32, batch=1, dtype="float64", weights=case.pop("weights", ()))
    if "branch" in case:
        options["gates"] = one_hot(q, case.pop("branch"))
    sizes = {"mode": "mslk", "num_selected_blocks": 2, "window_size": 128}
    for seed in range(3):
        found = directional_errors(q, k, v, seed, **sizes, **options, **case)
        assert max(found.values()) <= UPSTREAM["gradcheck"]["atol"]


@pytest.mark.parametrize(("causal", "name"), [(True, "backward"), (False, "backward_not_causal")])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_upstream_backward(causal, name, kv_heads):
    q, k, v, options = problem(1024, 4, kv_heads, 128, batch=1, dtype="bfloat16", size=0.1, weights=WEIGHTS[:3])
    sizes = {"mode": "mslk", "num_selected_blocks": 8, "window_size": 256, "causal": causal}
    dout, _, grads = gradients(q, k, v, **sizes, **options)
    bits = bits_option(q)
    exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **sizes, **options, **bits)[1])
    for which in ("dq", "dk", "dv"):
        apart = abs(wide(getattr(grads, which)) - getattr(exact, which))
        assert apart.max() <= UPSTREAM[f"{name}_max"]
        assert apart.mean() <= UPSTREAM[f"{name}_mean"]
    assert abs(wide(grads.dgate_proj_weight) - exact.dgate_proj_weight).mean() <= UPSTREAM["backward_gates_mean"]


def test_upstream_varlen_one_sequence():
    q, k, v, _ = problem(512, 4, 2, 64, batch=1, size=0.1)
    sizes = {"mode": "mslk", "num_selected_blocks": 4, "window_size": 128}
    dout, _, grads = gradients(q, k, v, **sizes)
    _, context = run(q[0], k[0], v[0], cu_seqlens=np.array([0, 512], np.int32), **sizes)
    for a, b in zip(library.nsa_backward(dout[0], context)[:3], grads[:3], strict=True):
        assert abs(a - b[0]).max() <= UPSTREAM["varlen_backward_one_sequence"]


# ---- Packed sequences, threads, contexts ----------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_is_each_sequence_alone(mode, dtype):
    q, k, v, options = problem([33, 0, 101, 1, 16, 75], 4, 2, 16, 24, packed=True, dtype=dtype, weights=WEIGHTS[:3])
    grads = check_backward(q, k, v, levels=BEST, **MODES[mode], **options)
    dout = tensors((*q.shape[:-1], 24), dtype=dtype, seed=99)
    sums = [0.0, 0.0, 0.0]
    for n, part in enumerate(sequences(q, options)):
        *arrays, own = alone(n, q, k, v, options)
        _, context = run(*arrays, **MODES[mode], **own)
        one = library.nsa_backward(np.ascontiguousarray(dout[None, part]), context)
        for name, a, b in zip(GRADIENTS, grads[:3], one[:3], strict=False):
            assert same_bits(np.ascontiguousarray(a[part]), np.ascontiguousarray(b[0])), name
        sums = [a + wide(b) for a, b in zip(sums, one[3:6], strict=True)]
    for a, b in zip(grads[3:6], sums, strict=True):
        tolerance = 1e-5 if dtype == "float32" else 0.03
        np.testing.assert_allclose(wide(a), b, rtol=tolerance, atol=tolerance * abs(b).max())


@every_mode
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_for_any_number_of_threads(mode, dtype):
    q, k, v, options = problem(500, 4, 2, 32, dtype=dtype, weights=WEIGHTS[:3])
    dout = tensors(q.shape, dtype=dtype)
    _, context = run(q, k, v, num_threads=1, **MODES[mode], **options)
    expected = library.nsa_backward(dout, context, num_threads=1)
    for num_threads in (2, 3, 8):
        _, context = run(q, k, v, num_threads=num_threads, **MODES[mode], **options)
        for name, a, b in zip(GRADIENTS, library.nsa_backward(dout, context, num_threads=num_threads), expected, strict=True):
            assert a is None or same_bits(a, b), name


@pytest.mark.sampled("options")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1), (9, 1)])
@pytest.mark.parametrize("size", [16, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_that_share_blocks_get_the_same_bits_alone_and_in_threads(dtype, size, heads, kv_heads):
    """More queries than one item holds, and blocks that are longer and shorter than what is attended at a time."""
    rules = {"compress_block_size": size, "num_selected_blocks": 5, "window_size": 16}
    q, k, v, _ = problem(650, heads, kv_heads, 40, 56, dtype=dtype, batch=2)
    expected = check_backward(q, k, v, **rules)
    dout, context, grads = gradients(q, k, v, **rules)
    for num_threads in (1, 3):
        for name, a, b in zip(GRADIENTS, library.nsa_backward(dout, context, num_threads=num_threads), grads, strict=True):
            assert a is None or same_bits(a, b), name
    _, alone_context = run(q[:1], k[:1], v[:1], **rules)
    for name, a, b in zip(GRADIENTS[:3], library.nsa_backward(dout[:1], alone_context)[:3], grads[:3], strict=True):
        assert same_bits(a, b[:1]), name
    assert all(np.isfinite(wide(x)).all() for x in expected if x is not None)


@both_modes
def test_the_rest_of_the_batch_does_not_matter(mode):
    q, k, v, _ = problem(90, batch=3)
    dout, _, grads = gradients(q, k, v, **mode)
    for b in range(3):
        one = slice(b, b + 1)
        _, context = run(q[one], k[one], v[one], **mode)
        for x, y in zip(library.nsa_backward(dout[one], context)[:3], grads[:3], strict=True):
            assert same_bits(x, y[one])


@both_modes
def test_a_context_can_be_used_again(mode):
    q, k, v, options = problem(90, weights=WEIGHTS[:3])
    dout, context, grads = gradients(q, k, v, **mode, **options)
    before = dout.copy()
    dout.flags.writeable = False
    again = library.nsa_backward(dout, context)
    assert same_bits(dout, before)
    for a, b in zip(again[:6], grads[:6], strict=True):
        assert same_bits(a, b)
        assert not np.shares_memory(a, b)
    other = library.nsa_backward(2 * dout, context)
    np.testing.assert_allclose(other.dv, 2 * grads.dv, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(IS_REFERENCE, reason="its context keeps what it is given")
@both_modes
def test_a_context_keeps_lists_and_lengths_of_its_own(mode):
    q, k, v, options = problem([40, 50], packed=True)
    _, context = run(q, k, v, **mode, **options)
    for dtype in (np.int32, np.int64):
        given = {"cu_seqlens": options["cu_seqlens"].astype(np.int64), "block_indices": routing_of(context).astype(dtype)}
        _, own = run(q, k, v, **mode, **{**options, **given})
        dout = tensors(q.shape)
        before = library.nsa_backward(dout, own)
        for x in given.values():
            x[...] = 0
        assert all(same_bits(a, b) for a, b in zip(library.nsa_backward(dout, own)[:3], before[:3], strict=True))


@both_modes
def test_gradients_are_fresh_arrays(mode):
    q, k, v, options = problem(60, weights=WEIGHTS[:3])
    copies = [x.copy() for x in (q, k, v)]
    _, _, grads = gradients(q, k, v, **mode, **options)
    assert all(same_bits(a, b) for a, b in zip((q, k, v), copies, strict=True))
    for x in grads[:6]:
        assert not any(np.shares_memory(x, y) for y in (q, k, v, *options.values()))
        assert x.flags.writeable


@pytest.mark.parametrize("weights", [(), WEIGHTS[:2]], ids=["means", "weights"])
def test_float16_holds_the_gradient_of_a_token_where_it_cannot_hold_that_of_its_block(weights):
    """All queries see the first block alone, so that the gradient of its mean is the sum of 64 tokens' gradients."""
    tokens, size = 2048, 64
    q, k, v, options = problem(tokens, 4, 1, 16, batch=1, dtype="float16", size=0.1, weights=weights)
    q[...], k[...] = 1, 0
    k[:, :size] = 2
    dout = np.full(q.shape, 40, np.float16)
    sizes = {"compress_block_size": size, "num_selected_blocks": 4}
    if weights:
        options = {name: np.broadcast_to(np.eye(16, dtype=np.float16), (1, 16, 16)) for name in weights}
    _, context = run(q, k, v, **sizes, **options)
    grads = library.nsa_backward(dout, context)
    chosen = {**sizes, **options, "block_indices": routing_of(context)}
    exact = reference.nsa_backward(dout, reference.nsa(q, k, v, return_context=True, **chosen)[1])
    assert 4000 < abs(exact.dv).max() < 5000
    for name in ("dk", "dv"):
        a, b = wide(getattr(grads, name)), getattr(exact, name)
        assert abs(a - b).max() <= 0.01 * abs(b).max(), name


@pytest.mark.skipif(IS_REFERENCE, reason="the reference multiplies by BLAS")
def test_gradients_of_weights_are_sums_in_the_order_of_the_blocks():
    """Blocks behind all others whose gradients are 0 change no bit, which a product of BLAS does not promise."""
    k, dk_cmp = (tensors((1, 300, 2, 64), seed=n) for n in range(2))
    w = tensors((2, 64, 64), seed=2)
    longer = [np.concatenate([x, np.zeros((1, 50, 2, 64), x.dtype)], axis=1) for x in (k, dk_cmp)]
    for size in (1, 3):
        one, two = (
            library.compress_kv_backward(d[:, : x.shape[1] // size], d[:, : x.shape[1] // size], x, x, size, w, w)
            for x, d in ((k, dk_cmp), longer)
        )
        for a, b in zip(one[2:], two[2:], strict=True):
            assert same_bits(a, b)


def test_dead_rows_get_zero():
    q, k, v, _ = problem(512, 2, 1, 16, batch=1)
    mode = {**MSLK, "num_selected_blocks": 1, "q_tile_size": 128}
    _, context, grads = gradients(q, k, v, gates=one_hot(q, 1), **mode)
    begin = routing_of(context)[0, :, np.arange(512) // 128, 0].reshape(512, 2) * 16
    dead = np.arange(512)[:, None] < begin
    assert dead.any()
    assert (grads.dq[0][dead] == 0).all()
    assert all(np.isfinite(x).all() for x in grads if x is not None)


@both_modes
def test_nothing_unwritten(mode):
    """Keys that no query selects and that lie in no block still get their gradients, 0 or not."""
    q, k, v, _ = problem(150, 4, 2, 16)
    for branch in range(3):
        _, context = run(q, k, v, gates=one_hot(q, branch), **mode)
        for x in library.nsa_backward(np.zeros(q.shape, np.float32), context)[:3]:
            assert (x == 0).all()
    listed = np.full_like(routing_of(context), -1)
    listed[..., 0] = 2
    _, context = run(q, k, v, gates=one_hot(q, 1), block_indices=listed, **mode)
    grads = library.nsa_backward(tensors(q.shape), context)
    touched = np.flatnonzero((grads.dv != 0).any((0, 2, 3)))
    assert touched.tolist() == list(range(32, 48))


# ---- Parts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("size", "stride"), [(16, None), (16, 8), (12, 5), (1, None), (200, None)])
@pytest.mark.parametrize("packed", [False, True])
def test_compress_backward(dtype, size, stride, packed):
    _, k, v, options = problem([33, 0, 101, 1] if packed else 101, 4, 2, 16, 24, packed=packed, dtype=dtype, weights=WEIGHTS[:2])
    cu = {"cu_seqlens": options["cu_seqlens"]} if packed else {}
    for weights in ((), (options["w_k_compress"], options["w_v_compress"])):
        shapes = [x.shape for x in reference.compress_kv(k, v, size, *weights, stride=stride, **cu)]
        dy = [tensors(shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
        ours = library.compress_kv_backward(*dy, k, v, size, *weights, stride=stride, **cu)
        exact = reference.compress_kv_backward(*dy, k, v, size, *weights, stride=stride, **cu)
        for a, b in zip(ours, exact, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                tolerance = 1e-12 if dtype == "float64" else 2e-6
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, abs(b).max(initial=0)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gating_backward(dtype, weighted, packed):
    shape = (90, 4) if packed else (2, 45, 4)
    q = tensors((*shape, 16), dtype=dtype)
    dout, *branches = (tensors((*shape, 24), dtype=dtype, seed=n) for n in range(1, 5))
    weight = tensors((4, 3, 16), dtype=dtype, seed=9) if weighted else None
    gates = library.compute_gates(q, weight)
    ours = library.gating_backward(q, dout, *branches, gates, weight)
    exact = reference.gating_backward(q, dout, *branches, gates, weight)
    for a, b in zip(ours, exact, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            tolerance = 1e-12 if dtype == "float64" else 5e-6
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())


def check_branch_backward(name, args, options):
    """Gradients of a branch by itself, from the reference's result and log-sum-exp, at every level."""
    out, lse = (np.ascontiguousarray(x, np.float32) for x in getattr(reference, name)(*args, return_lse=True, **options))
    dout = tensors(out.shape, seed=17)
    call = (dout, *args[:3], out, lse, *args[3:])
    exact = getattr(reference, f"{name}_backward")(*call, **options)
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            ours = getattr(library, f"{name}_backward")(*call, **options)
        for a, b in zip(ours, exact, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, abs(b).max(initial=0)), err_msg=level)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_branches_backward(causal, packed):
    q, k, v, cu = problem([33, 0, 101, 5] if packed else 101, 4, 2, 16, 24, packed=packed)
    both = {"causal": causal, **cu}
    for mode, stride, tile in (("paper", 8, 1), ("mslk", 16, 32)):
        k_cmp, v_cmp = (x.astype(np.float32) for x in reference.compress_kv(k, v, 16, stride=stride, **cu))
        check_branch_backward("compressed_attention", (q, k_cmp, v_cmp, 16), {"stride": stride, "mode": mode, **both})
        chosen = reference.score_and_select_blocks(q, k_cmp, 3, 16, q_tile_size=32, mode=mode, **both)
        check_branch_backward("selected_attention", (q, k, v, chosen, 16), {"q_tile_size": tile, **both})
    for window in (1, 9, 500):
        check_branch_backward("window_attention", (q, k, v, window), both)


# ---- Bad input ----------------------------------------------------------------------------------------------------------------

SENTENCE = re.compile(r"^[\w\[\], ]+: expected .+, got .+", re.DOTALL)


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [
        (ValueError, "dout", lambda dout, ctx: (dout[:, :-1], ctx)),
        (ValueError, "dout", lambda dout, ctx: (dout[..., :-1], ctx)),
        (ValueError, "dout", lambda dout, ctx: (dout[0], ctx)),
        (TypeError, "ctx", lambda dout, ctx: (dout, None)),
        (TypeError, "ctx", lambda dout, ctx: (dout, {"q": dout})),
    ],
    ids=["tokens", "dim", "rank", "none", "dictionary"],
)
@both_modes
def test_a_bad_argument_is_named(mode, error, name, call):
    q, k, v, _ = problem(40)
    dout, context, _ = gradients(q, k, v, **mode)
    with pytest.raises(error, match=rf"^{name}: ") as caught:
        library.nsa_backward(*call(dout, context))
    assert SENTENCE.match(str(caught.value)), caught.value


def test_a_context_of_another_call():
    """Of other shapes, packed for not packed: refused. Nothing is computed from a wrong context."""
    q, k, v, _ = problem(40)
    dout, _, _ = gradients(q, k, v, **PAPER)
    for other in (problem(41)[:3], problem(40, 6, 2)[:3], problem(40, batch=1)[:3], problem(40, v_dim=8)[:3]):
        with pytest.raises(ValueError, match=r"^dout: expected shape .+, got \(2, 40, 4, 16\)"):
            library.nsa_backward(dout, run(*other, **PAPER)[1])
    _, packed = run(q.reshape(80, 4, 16), k.reshape(80, 2, 16), v.reshape(80, 2, 16), cu_seqlens=[0, 40, 80], **PAPER)
    with pytest.raises(ValueError, match=r"^dout: expected shape .*\(80, 4, 16\).*, got \(2, 40, 4, 16\)"):
        library.nsa_backward(dout, packed)


@pytest.mark.skipif(IS_REFERENCE, reason="the reference takes any array")
@pytest.mark.parametrize("wrong", [np.float16, np.float64, np.int32])
def test_dout_of_another_dtype(wrong):
    q, k, v, _ = problem(40)
    dout, context, _ = gradients(q, k, v, **PAPER)
    with pytest.raises(TypeError, match="^dout: expected "):
        library.nsa_backward(dout.astype(wrong), context)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


X, PACKED, BLOCKS, LSE, GATES = zeros(1, 12, 2, 4), zeros(12, 2, 4), zeros(1, 3, 2, 4), zeros(1, 12, 2), zeros(1, 12, 2, 3)
WIDE, WIDE_BLOCKS = zeros(1, 12, 2, 577), zeros(1, 3, 2, 577)
PARTS = [
    (ValueError, r"v: expected the tokens and heads of k \(1, 12, 2, 4\), got \(1, 11, 2, 4\)",
     lambda: library.compress_kv(X, X[:, 1:], 4)),
    (ValueError, "k: expected shape .* a last axis from 1 to 576, got .1, 12, 2, 577", lambda: library.compress_kv(WIDE, X, 4)),
    (ValueError, "v: expected shape .* at least one head .*, got .1, 12, 2, 577", lambda: library.compress_kv(X, WIDE, 4)),
    (ValueError, "k: expected shape .* a last axis from 1 to 576, got .1, 12, 2, 577",
     lambda: library.compress_kv_backward(WIDE_BLOCKS, BLOCKS, WIDE, X, 4)),
    (ValueError, "v: expected shape .* a last axis from 1 to 576, got .1, 12, 2, 577",
     lambda: library.compress_kv_backward(BLOCKS, WIDE_BLOCKS, X, WIDE, 4)),
    (ValueError, r"k_cmp: expected 3 blocks of compress_block_size = 4, got \(2, 2, 4\)",
     lambda: library.compressed_attention(PACKED, PACKED[:2], PACKED[:2], 4, cu_seqlens=[0, 12])),
    (ValueError, r"k_cmp: expected 3 blocks of compress_block_size = 4, got \(2, 2, 4\)",
     lambda: library.score_and_select_blocks(PACKED, PACKED[:2], 4, 4, compress_stride=4, cu_seqlens=[0, 12])),
    (ValueError, r"v_cmp: expected shape .* tokens of k_cmp \(1, 3, 2, 4\), got \(1, 2, 2, 4\)",
     lambda: library.compressed_attention(X, BLOCKS, BLOCKS[:, 1:], 4)),
    (ValueError, r"k_cmp: expected a number of heads that divides q's 2, got 3",
     lambda: library.compressed_attention_backward(X, X, zeros(1, 3, 3, 4), zeros(1, 3, 3, 4), X, LSE, 4)),
    (ValueError, r"k: expected at least the 12 tokens of q \(layout \(B, tokens, heads, D\)\), got \(1, 11, 2, 4\)",
     lambda: library.window_attention(X, X[:, 1:], X[:, 1:], 4)),
    (ValueError, r"k: expected the tokens of q \(1, 11, 2, 4\), got \(1, 12, 2, 4\)",
     lambda: library.window_attention_backward(X[:, 1:], X[:, 1:], X, X, X[:, 1:], LSE[:, 1:], 4)),
    (ValueError, "q: expected a head dim D from 1 to 576, got 577",
     lambda: library.window_attention_backward(WIDE, WIDE, WIDE, WIDE, WIDE, LSE, 4)),
    (ValueError, r"q: expected the tokens and heads of o_cmp \(1, 12, 2, 4\), got \(1, 12, 1, 4\)",
     lambda: library.gating_backward(X[:, :, :1], X, X, X, X, GATES)),
    (ValueError, "v: expected at least one head and a head dim from 1 to 576, got .1, 12, 2, 0", lambda: library.nsa(X, X, X[..., :0])),
    (ValueError, "out: expected a writable array, got a read-only one",
     lambda: library.nsa(X, X, X, out=np.broadcast_to(X[:, :1], X.shape))),
    (ValueError, "out: expected memory of its own, got an array that overlaps k", lambda: library.nsa(X.copy(), X, X.copy(), out=X)),
    (ValueError, "cu_seqlens: expected numbers rising from 0 to 12, got -9223372036854775808 after a larger one",
     lambda: library.nsa(PACKED, PACKED, PACKED, cu_seqlens=[0, 2**63 - 1, -(2**63), -1, 12])),
    (TypeError, "q: expected float64 as dtype says, got float32$", lambda: library.nsa(X, X, X, dtype="float64")),
    (TypeError, "k: expected float16 as dtype says, got float32$", lambda: library.compress_kv(X, X, 4, dtype="float16")),
    (TypeError, "k: expected float16 as dtype says, got float32$",
     lambda: library.compress_kv_backward(zeros(1, 3, 2, 4), zeros(1, 3, 2, 4), X, X, 4, dtype="float16")),
    (TypeError, "q: expected float16 as dtype says, got float32$",
     lambda: library.compressed_attention(X, zeros(1, 3, 2, 4), zeros(1, 3, 2, 4), 4, dtype="float16")),
    (TypeError, "q: expected float16 as dtype says, got float32$",
     lambda: library.compressed_attention_backward(X, X, zeros(1, 3, 2, 4), zeros(1, 3, 2, 4), X, LSE, 4, dtype="float16")),
    (TypeError, "q: expected bfloat16 as dtype says, got float32$",
     lambda: library.score_and_select_blocks(X, zeros(1, 3, 2, 4), 3, 4, dtype="bfloat16")),
    (TypeError, "q: expected float16 as dtype says, got float32$",
     lambda: library.selected_attention(X, X, X, np.zeros((1, 2, 12, 1), np.int32), 4, dtype="float16")),
    (TypeError, "q: expected float16 as dtype says, got float32$", lambda: library.window_attention(X, X, X, 4, dtype="float16")),
    (TypeError, "q: expected float16 as dtype says, got float32$",
     lambda: library.window_attention_backward(X, X, X, X, X, LSE, 4, dtype="float16")),
    (TypeError, "q: expected float16 as dtype says, got float32$", lambda: library.compute_gates(X, dtype="float16")),
    (TypeError, "o_cmp: expected float16 as dtype says, got float32$", lambda: library.gate_and_combine(X, X, X, GATES, dtype="float16")),
    (TypeError, "o_cmp: expected float16 as dtype says, got float32$",
     lambda: library.gating_backward(X, X, X, X, X, GATES, dtype="float16")),
    (TypeError, "k: expected float16 as dtype says, got float32$", lambda: library.NsaCache(compress_block_size=4, dtype="float16").append(X, X)),
    (ValueError, "compress_block_size: expected at most 1073741823, got 2147483648",
     lambda: library.nsa(X, X, X, compress_block_size=2**31)),
    (ValueError, "q_tile_size: expected at most 1073741823, got 1073741824",
     lambda: library.nsa(X, X, X, mode="mslk", q_tile_size=2**30)),
]  # fmt: skip


@pytest.mark.skipif(IS_REFERENCE, reason="the reference takes any number")
@pytest.mark.parametrize("mode", ["paper", "mslk"])
@pytest.mark.parametrize("name", ["compress_block_size", "select_block_size", "q_tile_size", "window_size"])
def test_the_largest_number_is_right(name, mode):
    """It is that of any size which no sequence has."""
    most = 2**30 - 1
    if mode == "mslk" and name == "select_block_size":
        return
    sizes = {"mode": mode, "compress_block_size": 4, "num_selected_blocks": 3, "window_size": 4, "compress_stride": None if mode == "mslk" else 1}
    out = library.nsa(X, X, X, **{**sizes, name: most})
    np.testing.assert_allclose(out, library.nsa(X, X, X, **{**sizes, name: 500}), rtol=1e-6, atol=1e-6)


# Twelve tokens have three blocks of four tokens, and five where blocks begin every two tokens. With `causal`, the last queries see all of them.
NUMBERS_OF_BLOCKS = {
    "attention": lambda x, **more: library.compressed_attention(X, x, x, 4, **more),
    "gradient": lambda x, **more: library.compressed_attention_backward(X, X, x, x, X, LSE, 4, **more),
    "selection": lambda x, mode, stride, **more: library.score_and_select_blocks(
        X, x, 4, 4, mode=mode, compress_stride=stride, **({"lse": LSE} if mode == "paper" else {}), **more
    ),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("mode", "stride", "blocks"), [("paper", 4, 3), ("paper", 2, 5), ("mslk", 4, 3)])
@pytest.mark.parametrize("part", NUMBERS_OF_BLOCKS)
def test_compressed_keys_are_those_of_all_tokens(part, mode, stride, blocks, causal):
    """Any other number is refused, with the sentence that packed sequences have."""
    call, how = NUMBERS_OF_BLOCKS[part], {"mode": mode, "stride": stride, "causal": causal}
    call(zeros(1, blocks, 2, 4), **how)
    for wrong in (0, blocks - 1, blocks + 1):
        sentence = rf"^k_cmp: expected {blocks} blocks of compress_block_size = 4, got \(1, {wrong}, 2, 4\)$"
        with pytest.raises(ValueError, match=sentence):
            call(zeros(1, wrong, 2, 4), **how)


@pytest.mark.parametrize(("x", "cu"), [(X[:, :3], {}), (PACKED[:3], {"cu_seqlens": [0, 3]})])
def test_tokens_of_no_block_need_no_compressed_keys(x, cu):
    """A sequence that is shorter than a block has none, with a batch axis or without."""
    none = x[..., :0, :, :]
    out, lse = library.compressed_attention(x, none, none, 4, return_lse=True, **cu)
    assert not out.any()
    assert np.isneginf(lse).all()
    grads = library.compressed_attention_backward(x, x, none, none, out, lse, 4, **cu)
    assert [g.shape for g in grads] == [x.shape, none.shape, none.shape]
    assert not grads[0].any()
    chosen = library.score_and_select_blocks(x, none, 1, 4, init_blocks=0, local_blocks=1, **cu)
    assert not chosen.any()  # the block that the queries lie in


@pytest.mark.skipif(IS_REFERENCE, reason="the reference takes any array")
@pytest.mark.parametrize(("error", "pattern", "call"), PARTS, ids=lambda x: x[:50] if isinstance(x, str) else None)
def test_a_bad_argument_of_a_part_is_named(error, pattern, call):
    with pytest.raises(error, match=f"^{pattern}") as caught:
        call()
    assert SENTENCE.match(str(caught.value)), caught.value
