"""Native sparse attention and its parts, forward and backward, agree with the float64 reference at every level and dtype, meet the
tolerances of upstream's table, and have the right outcomes in special cases. Tests of gradients alone are in test_nsa_backward.py.

Sizes, options, views, kinds of arrays, threads, pieces, lists, packed sequences, calls with the last queries alone, NaN and ties are drawn
together in tests/fuzz/nsa_problems.py and nsa_parts_problems.py, and compared with oracles.
"""

import sys

import numpy as np
import pytest

import blitz_attn
import cases_nsa
from blitz_attn import nsa, reference, testing
from cases import DTYPES, ISA_LEVELS, bits_option, dtype_of, same_bits
from cases_nsa import MODES, MSLK, PAPER, WEIGHTS, both_modes, check, every_mode, gradients, one_hot, problem, run, tensors


def upstream_close(ours, exact, name):
    apart = abs(testing.to_float64(ours, dtype_of(ours)) - exact)
    assert apart.max() <= cases_nsa.UPSTREAM[f"{name}_max"]
    assert apart.mean() <= cases_nsa.UPSTREAM[f"{name}_mean"]


# ---- Against the reference ------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", DTYPES)
def test_modes_and_dtypes(mode, dtype):
    q, k, v, options = problem(203, 4, 2, 24, 16, dtype=dtype, weights=WEIGHTS[:3])
    check(q, k, v, **MODES[mode], **options)


# Each case changes a problem of 100 tokens, 4 heads, 2 KV heads and dims of 16, without weights.
CASES = [
    *({"heads": x} for x in [(1, 1), (3, 3), (6, 2), (8, 1), (10, 2)]),
    *({"dims": x} for x in [(1, 1), (7, 33), (64, 64), (128, 128), (192, 128)]),
    *(
        {"lengths": x} for x in (0, 1, 2, 15, 16, 17, 31, 32, 33, 64, [33, 0, 101, 1, 16, 75])
    ),  # fewer tokens than a block, whole blocks and tiles, and packed sequences
    *({"weights": x} for x in (*((name,) for name in WEIGHTS), (*WEIGHTS[:2], "gates"))),
    *({"options": {"scale": x}} for x in (0.5, 0.0)),
    *({"options": {"window_size": x}} for x in (1, 1000)),
    *({"options": {"compress_block_size": x, "compress_stride": None, "select_block_size": None}} for x in (1, 6, 64, 100)),
    {"options": {"num_selected_blocks": 100}},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@every_mode
def test_every_option_is_right(mode, case):
    case = {"heads": (4, 2), "dims": (16, 16), "lengths": 100, "weights": (), "options": {}} | case
    packed = isinstance(case["lengths"], list)
    q, k, v, given = problem(case["lengths"], *case["heads"], *case["dims"], packed=packed, weights=case["weights"])
    check(q, k, v, **{**MODES[mode], **case["options"]}, **given)


@pytest.mark.parametrize("branch", [0, 1, 2], ids=["compressed", "selected", "window"])
@every_mode
def test_each_branch_alone(mode, branch):
    q, k, v, options = problem(150, 4, 2, 16, weights=WEIGHTS[:2])
    check(q, k, v, gates=one_hot(q, branch), **MODES[mode], **options)


def test_defaults():
    check(*problem(1100, 4, 1, 32, batch=1)[:3], levels=ISA_LEVELS[-1:])


@every_mode
def test_float64_is_exact(mode):
    q, k, v, options = problem(120, 4, 2, 16, 8, dtype="float64", weights=WEIGHTS[:3])
    dout, _, grads = gradients(q, k, v, **MODES[mode], **options)
    exact, context = reference.nsa(q, k, v, return_context=True, **MODES[mode], **options)
    np.testing.assert_allclose(run(q, k, v, **MODES[mode], **options)[0], exact, rtol=1e-11, atol=1e-13)
    for a, b in zip(grads[:6], reference.nsa_backward(dout, context)[:6], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
def test_groups_of_compressed_keys(causal):
    """num_cmp_selected_blocks counts groups of 128 compressed keys."""
    q, k, v, _ = problem(700, 2, 1, 8, batch=1, dtype="float64")
    mode = {"mode": "mslk", "compress_block_size": 2, "num_selected_blocks": 2, "window_size": 4, "q_tile_size": 64, "causal": causal}
    whole, _ = run(q, k, v, **mode)
    assert same_bits(run(q, k, v, num_cmp_selected_blocks=3, **mode)[0], whole)
    dout, _, grads = gradients(q, k, v, num_cmp_selected_blocks=1, **mode)
    out, _ = run(q, k, v, num_cmp_selected_blocks=1, **mode)
    assert abs(out - whole).max() > 1e-3
    exact, context = reference.nsa(q, k, v, num_cmp_selected_blocks=1, return_context=True, **mode)
    for a, b in zip((out, *grads[:3]), (exact, *reference.nsa_backward(dout, context)[:3]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


# ---- Upstream's table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1024, 2048])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_upstream_forward(tokens, kv_heads):
    q, k, v, options = problem(tokens, 4, kv_heads, 128, batch=1, dtype="bfloat16", size=0.1, weights=WEIGHTS[:3])
    sizes = {"mode": "mslk", "num_selected_blocks": 8, "window_size": 256}
    out, _ = run(q, k, v, **sizes, **options)
    upstream_close(out, reference.nsa(q, k, v, **sizes, **options, **bits_option(q)), "forward")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_upstream_compress(weighted, dtype):
    _, k, v, options = problem(256, 4, 2, 64, dtype=dtype, size=0.1, weights=WEIGHTS[:2])
    call = k, v, 64, *(options.values() if weighted else ())
    for x, exact in zip(*(op.compress_kv(*call, **bits_option(k)) for op in (nsa, reference)), strict=True):
        assert dtype_of(x) == dtype
        assert abs(testing.to_float64(x, dtype) - exact).max() <= cases_nsa.UPSTREAM[f"compress_{dtype}"]


@pytest.mark.parametrize("tokens", [512, 1024])
@pytest.mark.parametrize("causal", [True, False])
def test_upstream_select(tokens, causal):
    """In float64, blocks are chosen by the mean of all scores of a tile, and sorted. In causal calls, no block lies beyond the tile."""
    q, k, v, _ = problem(tokens, 4, 2, 32, dtype="float64")
    k_cmp, _ = nsa.compress_kv(k, v, 64)
    chosen = nsa.score_and_select_blocks(q, k_cmp, 3, 64, causal=causal, q_tile_size=256, mode="mslk")
    scores = np.einsum("bnhd,bmhd->bhnm", q, np.asarray(k_cmp).repeat(2, 2)).reshape(2, 4, tokens // 256, 256, -1).mean(3) / np.sqrt(32)
    for tile in range(tokens // 256):
        eligible = scores[:, :, tile, : 4 * (tile + 1) if causal else None]
        np.testing.assert_array_equal(chosen[:, :, tile], np.sort(np.argsort(-eligible, axis=-1)[..., :3], axis=-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_upstream_gating(dtype):
    q, _, _, options = problem(128, 4, 2, 64, dtype=dtype, weights=["gate_proj_weight"])
    bits, weight = bits_option(q), options["gate_proj_weight"]
    branches = [tensors(q.shape, dtype=dtype, seed=n) for n in range(3)]
    exact, ours = (op.gate_and_combine(*branches, op.compute_gates(q, weight, **bits), **bits) for op in (reference, nsa))
    apart = abs(testing.to_float64(ours, dtype) - exact)
    assert apart.max() <= cases_nsa.UPSTREAM["gating_float16_max" if dtype == "float16" else "gating_bfloat16_max"]
    assert apart.mean() <= cases_nsa.UPSTREAM["gating_bfloat16_mean"]
    flat = [np.ascontiguousarray(x).reshape(-1, *x.shape[2:]) for x in (q, *branches)]
    packed = nsa.gate_and_combine(*flat[1:], nsa.compute_gates(flat[0], weight, **bits), **bits)
    apart = abs(testing.to_float64(packed, dtype) - testing.to_float64(ours, dtype).reshape(packed.shape))
    assert apart.max() <= cases_nsa.UPSTREAM["gating_packed"]


def test_upstream_uniform_gates():
    q, k, v, _ = problem(90)
    gates = nsa.compute_gates(q)
    assert gates.shape == (*q.shape[:-1], 3)
    assert abs(gates - 1 / 3).max() <= cases_nsa.UPSTREAM["gating_uniform"]
    assert abs(run(q, k, v, **MSLK)[0] - run(q, k, v, gates=gates, **MSLK)[0]).max() <= cases_nsa.UPSTREAM["gating_uniform"]


@pytest.mark.parametrize("lengths", [[512, 256], [777, 1, 300], [512]])
def test_upstream_varlen(lengths):
    """Each packed sequence has the results of a call of that sequence alone. If it is the only one, its gradients are compared, too."""
    dtype = "bfloat16" if len(lengths) > 1 else "float32"
    q, k, v, options = problem(lengths, 4, 2, 64, packed=True, dtype=dtype, size=0.1)
    sizes = {"mode": "mslk", "num_selected_blocks": 4, "window_size": 128}
    out, _ = run(q, k, v, **sizes, **options)
    parts = [(arrays, own) for *arrays, own in (cases_nsa.alone(n, q, k, v, options) for n in range(len(lengths)))]
    exact = [testing.to_float64(run(*arrays, **sizes, **own)[0], dtype)[0] for arrays, own in parts]
    upstream_close(out, np.concatenate(exact), "varlen")
    if len(lengths) == 1:
        assert abs(out - exact[0]).max() <= cases_nsa.UPSTREAM["varlen_one_sequence"]
        arrays, own = parts[0]
        one, packed = gradients(*arrays, **sizes, **own)[2], gradients(q, k, v, **sizes, **options)[2]
        assert (
            max(abs(a - b[0]).max() for a, b in zip(packed[:3], one[:3], strict=True)) <= cases_nsa.UPSTREAM["varlen_backward_one_sequence"]
        )


# ---- Batch mates, threads and pieces ----------------------------------------------------------------------------------


@pytest.mark.sampled("options")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (9, 1)])
@pytest.mark.parametrize("size", [16, 64, 100, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_that_share_blocks_get_the_same_bits_alone_and_in_threads(dtype, size, heads, kv_heads):
    """Many queries that choose the same blocks are attended block by block. Blocks here are longer or shorter than a kernel attends at a time.
    Results and gradients have the same bits with another number of threads and without the other batch entry. With the queries in another
    order, results have the same bits, too."""
    rules = {"compress_block_size": size, "num_selected_blocks": 5, "window_size": 16}
    q, k, v, _ = problem(650, heads, kv_heads, 40, 56, dtype=dtype, batch=2)
    check(q, k, v, **rules)
    assert same_bits(run(q, k, v, num_threads=1, **rules)[0], run(q, k, v, num_threads=3, **rules)[0])
    dout, context, grads = gradients(q, k, v, **rules)
    for num_threads in (1, 3):
        for name, a, b in zip(cases_nsa.GRADIENTS, nsa.nsa_backward(dout, context, num_threads=num_threads), grads, strict=True):
            assert a is None or same_bits(a, b), name
    one = nsa.nsa_backward(dout[:1], run(q[:1], k[:1], v[:1], **rules)[1])
    assert all(same_bits(a, b[:1]) for a, b in zip(one[:3], grads[:3], strict=True))
    bits = {"block_size": size, "return_lse": True, **bits_option(q)}
    lists = context.block_indices
    whole = nsa.selected_attention(q, k, v, lists, **bits)
    one = nsa.selected_attention(q[:1], k[:1], v[:1], lists[:1], **bits)
    assert all(same_bits(np.ascontiguousarray(a[:1]), b) for a, b in zip(whole, one, strict=True))
    turned = np.ascontiguousarray(q[:, ::-1]), k, v, np.ascontiguousarray(lists[:, :, ::-1])  # queries have other neighbours
    turned, straight = (nsa.selected_attention(*x, causal=False, **bits)[0] for x in (turned, (q, k, v, lists)))
    assert same_bits(np.ascontiguousarray(turned[:, ::-1]), straight)


@pytest.mark.parametrize("elements", [1 << 10, 1 << 12, 1 << 14, 40_000])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rules", [PAPER, MSLK, {**MSLK, "num_cmp_selected_blocks": 1}], ids=["paper", "mslk", "mslk_groups"])
def test_pieces_change_nothing(rules, packed, elements, monkeypatch):
    """Long calls are computed in pieces, of one head's queries or of many heads. Pieces change no bit, and the context is complete."""
    q, k, v, options = problem(480, 12, 3, 16, 24, batch=1 if packed else 2, weights=WEIGHTS[:3])
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        options["cu_seqlens"] = [0, 48, 288, 288, 480]
    expected, context = run(q, k, v, **rules, **options)
    monkeypatch.setattr(sys.modules["blitz_attn.nsa"], "PIECE_ELEMENTS", elements)
    out, own = run(q, k, v, **rules, **options)
    assert same_bits(out, expected)
    assert same_bits(nsa.nsa(q, k, v, **rules, **options), expected)
    for kept, before in ((own.lse, context.lse), (dict(enumerate(own.branches)), dict(enumerate(context.branches)))):
        assert all(same_bits(np.ascontiguousarray(x), np.ascontiguousarray(before[n])) for n, x in kept.items())
    np.testing.assert_array_equal(own.block_indices, context.block_indices)
    assert same_bits(run(q, k, v, **rules, **options, block_indices=context.block_indices)[0], expected)


def test_batch_mates_cut_nothing(monkeypatch):
    """The pieces of a sequence depend on its own length alone. A piece of a single query would be summed in another order."""
    rules = {"mode": "mslk", "compress_block_size": 1, "num_selected_blocks": 1, "window_size": 1, "q_tile_size": 14}
    q, k, v, _ = problem(15, 1, 1, 2, 37, batch=2)
    monkeypatch.setattr(sys.modules["blitz_attn.nsa"], "PIECE_ELEMENTS", 20 * 37)
    out = nsa.nsa(q, k, v, **rules)
    for b in range(2):
        assert same_bits(nsa.nsa(q[b : b + 1], k[b : b + 1], v[b : b + 1], **rules), np.ascontiguousarray(out[b : b + 1]))


# ---- Rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@both_modes
def test_more_places_than_blocks_take_no_memory(mode, packed):
    """Lists of 2**30 places would not fit into memory. The bits are those of lists with a place for each block."""
    q, k, v, options = problem([3, 0, 197] if packed else 200, packed=packed)
    many = {"num_cmp_selected_blocks": 2**30 - 1} if mode.get("mode") == "mslk" else {}
    out = nsa.nsa(q, k, v, **{**mode, "num_selected_blocks": 2**30 - 1}, **many, **options)
    few, context = run(q, k, v, **{**mode, "num_selected_blocks": 50}, **dict.fromkeys(many, 3), **options)
    assert same_bits(out, few)
    assert context.block_indices.shape[-1] == 50


SIZES = ("compress_block_size", "q_tile_size", "window_size")


@pytest.mark.parametrize(("mode", "name"), [*((mode, name) for mode in (PAPER, MSLK) for name in SIZES), (PAPER, "select_block_size")])
def test_the_largest_number_is_right(mode, name):
    """The largest size gives the result of any size that is longer than every sequence."""
    q, k, v, _ = problem(12)
    most, usual = (nsa.nsa(q, k, v, **{**mode, "compress_stride": None if mode is MSLK else 1, name: n}) for n in (2**30 - 1, 500))
    np.testing.assert_allclose(most, usual, rtol=1e-6, atol=1e-6)


def test_a_score_of_minus_infinity_is_not_selected():
    """If places are left, a block with a score of NaN takes one, and a block with a score of -inf does not."""
    q, k_cmp = np.ones((1, 8, 1, 2), np.float32), np.ones((1, 4, 1, 2), np.float32)
    k_cmp[0, 1:3, 0, 0] = -np.inf, np.nan
    assert nsa.score_and_select_blocks(q, k_cmp, 4, 2, q_tile_size=8, mode="mslk").tolist() == [[[[0, 2, 3, -1]]]]


@pytest.mark.parametrize("gate", [np.nan, np.inf])
def test_a_gate_that_is_not_finite_reaches_branches_that_see_nothing(gate):
    """The first three queries see no compressed block, so the gate is multiplied by 0, and the product is NaN."""
    q, k, v, _ = problem(8, batch=1)
    gates = one_hot(q, 1)
    gates[..., 0] = gate
    assert np.isnan(nsa.nsa(q, k, v, compress_block_size=4, num_selected_blocks=3, gates=gates)[:, :3]).all()


@pytest.mark.parametrize("op", [nsa, reference], ids=["library", "twin"])
def test_ties_go_to_the_lower_index(op):
    """All keys are zero, so that all scores are equal."""
    q, k = tensors((1, 100, 2, 16)), np.zeros((1, 100, 1, 16), np.float32)
    sizes = {"compress_block_size": 8, "num_selected_blocks": 4, "window_size": 3, "return_context": True}
    mslk = op.nsa(q, k, k, mode="mslk", q_tile_size=16, **sizes)[1].block_indices
    assert mslk[0, :, 0].tolist() == [[0, 1, -1, -1]] * 2
    assert mslk[0, 1, 1:].tolist() == [[0, 1, 2, 3]] * 6
    paper = op.nsa(q, k, k, compress_stride=8, **sizes)[1].block_indices
    assert [[j for j in paper[0, 0, t] if j >= 0] for t in (0, 7, 8, 31, 63, 99)] == [
        [0],
        [0],
        [0, 1],
        [0, 1, 2, 3],
        [0, 1, 6, 7],
        [0, 1, 11, 12],
    ]


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("mode", ["paper", "paper_strides", "paper_free"])
def test_paper_mode_never_looks_ahead(mode, which):
    """However later tokens change, no bit of an earlier token's output changes."""
    q, k, v, options = problem(150, 4, 2, 16, batch=1, weights=WEIGHTS[:3])
    arrays = {"q": q, "k": k, "v": v}
    plain, _ = run(**arrays, **MODES[mode], **options)
    for at in (1, 15, 16, 40, 77, 149):
        changed = arrays[which].copy()
        changed[:, at:] += tensors(changed[:, at:].shape, seed=at)
        out, _ = run(**{**arrays, which: changed}, **MODES[mode], **options)
        assert same_bits(np.ascontiguousarray(out[:, :at]), np.ascontiguousarray(plain[:, :at])), at
        assert not np.array_equal(out[:, at:], plain[:, at:])


@pytest.mark.parametrize("which", ["k", "v"])
def test_mslk_mode_looks_ahead_within_its_block(which):
    """With given block_indices, a token changes outputs from the beginning of its own compressed block on, and none before."""
    q, k, v, _ = problem(150, 4, 2, 16, batch=1)
    arrays = {"q": q, "k": k, "v": v}
    plain, context = run(**arrays, **MSLK)
    for at in (16, 31, 47, 100, 143, 149):
        changed = arrays[which].copy()
        changed[:, at] += 1
        out, _ = run(**{**arrays, which: changed}, block_indices=context.block_indices, **MSLK)
        first = np.flatnonzero((out != plain).any((0, 2, 3)))[0]
        assert first == (at // 16 * 16 if at < 144 else at)  # tokens 144 to 149 are in no block


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("branch", "wide"), [(1, {"num_selected_blocks": 10}), (2, {"window_size": 320})], ids=["all selected", "wide window"]
)
@both_modes
def test_everything_is_dense(mode, branch, wide, causal):
    q, k, v, _ = problem(160, 4, 2, 16, dtype="float32")
    out, _ = run(q, k, v, **{**mode, **wide, "causal": causal}, gates=one_hot(q, branch))
    dense = blitz_attn.block_sparse_attention(q, k, v, layout="BSND", causal=causal)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-6)


# ---- Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "stride"), [(16, None), (16, 8), (16, 16), (12, 5), (1, None), (200, None)])
@pytest.mark.parametrize("lengths", [101, [33, 0, 101, 1]], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_compress(weighted, dtype, size, stride, lengths):
    """Results are compared in every dtype, gradients only in the dtypes in which they are summed, float32 and float64."""
    _, k, v, options = problem(lengths, 4, 2, 16, 24, packed=isinstance(lengths, list), dtype=dtype, weights=WEIGHTS[:2])
    weights = [options.pop(name) for name in WEIGHTS[:2]]
    call = k, v, size, *(weights if weighted else ())
    options |= {"stride": stride, **bits_option(k)}
    ours, exact = (op.compress_kv(*call, **options) for op in (nsa, reference))
    rounding = {"float64": 1e-13, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    if dtype in ("float64", "float32"):
        dy = [tensors(x.shape, dtype=dtype, seed=n) for n, x in enumerate(exact)]
        ours, exact = ((*x, *op.compress_kv_backward(*dy, *call, **options)) for op, x in ((nsa, ours), (reference, exact)))
        rounding = {"float64": 1e-12, "float32": 2e-6}[dtype]
    for a, b in zip(ours, exact, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.shape == b.shape
            np.testing.assert_allclose(testing.to_float64(a, dtype), b, rtol=rounding, atol=rounding * max(1, abs(b).max(initial=0)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(90, 4), (2, 45, 4)], ids=str)
def test_gating_backward(shape, dtype, weighted):
    q, dout, *branches = (tensors((*shape, 24), dtype=dtype, seed=n) for n in range(5))
    weight = tensors((4, 3, 24), dtype=dtype, seed=9) if weighted else None
    call = q, dout, *branches, nsa.compute_gates(q, weight), weight
    for a, b in zip(nsa.gating_backward(*call), reference.gating_backward(*call), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            tolerance = 1e-12 if dtype == "float64" else 5e-6
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())


BRANCHES = {
    "compressed, paper": ("compressed_attention", {"stride": 8, "mode": "paper"}),
    "compressed, mslk": ("compressed_attention", {"stride": 16, "mode": "mslk"}),
    "selected, paper": ("selected_attention", {"q_tile_size": 1}),
    "selected, mslk": ("selected_attention", {"q_tile_size": 32}),
    **{f"window of {n}": ("window_attention", {"window_size": n}) for n in (1, 9, 500)},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("branch", BRANCHES)
def test_branches(branch, causal, packed, isa_level):
    """Result, log-sum-exp and gradients of a single branch are those of the reference."""
    q, k, v, options = problem([33, 0, 101, 5] if packed else 101, 4, 2, 16, 24, packed=packed)
    name, own = BRANCHES[branch]
    mode, args = branch.rpartition(" ")[2], [q, k, v]
    k_cmp, v_cmp = (x.astype(np.float32) for x in reference.compress_kv(k, v, 16, stride=8 if mode == "paper" else 16, **options))
    if name == "compressed_attention":
        args = [q, k_cmp, v_cmp, 16]
    elif name == "selected_attention":
        args += [reference.score_and_select_blocks(q, k_cmp, 3, 16, q_tile_size=32, mode=mode, causal=causal, **options), 16]
    options |= {"causal": causal, **own}
    results = [getattr(op, name)(*args, return_lse=True, **options) for op in (nsa, reference)]
    for ours, exact in zip(*results, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)
    out, lse = (np.ascontiguousarray(x, np.float32) for x in results[1])
    call = (tensors(out.shape, seed=17), *args[:3], out, lse, *args[3:])
    for a, b in zip(*(getattr(op, f"{name}_backward")(*call, **options) for op in (nsa, reference)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, abs(b).max(initial=0)))


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_of_no_block_need_no_compressed_keys(packed):
    """A sequence that is shorter than a block has no compressed keys, with a batch axis or without."""
    x = np.zeros((3, 2, 4) if packed else (1, 3, 2, 4), np.float32)
    none, cu = x[..., :0, :, :], {"cu_seqlens": [0, 3]} if packed else {}
    out, lse = nsa.compressed_attention(x, none, none, 4, return_lse=True, **cu)
    assert not out.any()
    assert np.isneginf(lse).all()
    grads = nsa.compressed_attention_backward(x, x, none, none, out, lse, 4, **cu)
    assert [g.shape for g in grads] == [x.shape, none.shape, none.shape]
    assert not nsa.score_and_select_blocks(x, none, 1, 4, init_blocks=0, local_blocks=1, **cu).any()  # every query gets block 0, in which it lies


# ---- Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WEIGHTS, "block_indices", "cu_seqlens"])
def test_out_must_not_overlap_an_argument(name):
    """Overlap is refused even if the argument is read before the first result is written: the caller or a context may keep the argument."""
    q, k, v, options = problem([40, 40], 4, 2, 8, 6, packed=True, weights=WEIGHTS)
    options |= {"block_indices": np.zeros((2, 80, 1), np.int32)}
    left_out = "gate_proj_weight" if name == "gates" else "gates"
    memory = np.zeros(80 * 4 * 6 + options[name].size, np.float32)
    given = memory[: options[name].size].view(options[name].dtype).reshape(options[name].shape)
    given[...] = options[name]
    call = {key: x for key, x in options.items() if key != left_out} | {name: given, "compress_block_size": 8, "num_selected_blocks": 3}
    before = memory.copy()
    with pytest.raises(ValueError, match=f"^out: expected memory of its own, got an array that overlaps {name}$"):
        nsa.nsa(q, k, v, out=memory[given.size - 1 :][: 80 * 4 * 6].reshape(80, 4, 6), **call)
    assert same_bits(memory, before)
