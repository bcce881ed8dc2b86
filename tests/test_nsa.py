"""Native sparse attention forward, and its parts: against the float64 reference at every level and dtype, upstream's table, selection,
packed sequences, threads, causality, bad input. `BLITZ_ATTN_TEST_NSA`: see cases_nsa_library.py."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, ISA_LEVELS, bits_option, dtype_of, poisoned, same_bits
from cases_nsa import MSLK, PAPER, PAPER_STRIDES, UPSTREAM, WEIGHTS, alone, one_hot, problem, sequences, tensors
from cases_nsa_library import IS_REFERENCE, check, check_selection, exact_scores, library, routing_of, run
from exporters import StoppedDlpack

MODES = {
    "paper": PAPER,
    "paper_strides": PAPER_STRIDES,
    "paper_free": {**PAPER, "init_blocks": 0, "local_blocks": 0, "compress_stride": 16},
    "paper_not_causal": {**PAPER, "causal": False},
    "mslk": MSLK,
    "mslk_not_causal": {**MSLK, "causal": False},
}  # fmt: skip
both_modes = pytest.mark.parametrize("mode", [PAPER, MSLK], ids=["paper", "mslk"])
every_mode = pytest.mark.parametrize("mode", list(MODES))


def upstream_close(ours, exact, name):
    apart = abs(testing.to_float64(ours, dtype_of(ours)) - exact)
    assert apart.max() <= UPSTREAM[f"{name}_max"]
    assert apart.mean() <= UPSTREAM[f"{name}_mean"]


# ---- Against the reference ------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", DTYPES)
def test_modes_and_dtypes(mode, dtype):
    q, k, v, options = problem(203, 4, 2, 24, 16, dtype=dtype, weights=WEIGHTS[:3])
    check(q, k, v, **MODES[mode], **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1), (10, 2)])
@both_modes
def test_grouped_heads(mode, heads, kv_heads):
    check(*problem(130, heads, kv_heads, 16, dtype="float32")[:3], **mode)


@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (7, 33), (64, 64), (128, 128), (192, 128)])
@both_modes
def test_head_dimensions(mode, dim, v_dim):
    check(*problem(100, 2, 1, dim, v_dim)[:3], **mode)


@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 100])
@every_mode
def test_sequences_of_any_length_are_right(mode, tokens):
    """Fewer than a block, whole blocks and tiles, and one more or less."""
    check(*problem(tokens, 4, 2, 16)[:3], **MODES[mode])


@pytest.mark.parametrize("weights", [(), ("w_k_compress",), ("w_v_compress",), ("gate_proj_weight",), ("gates",), WEIGHTS[:3]])
@both_modes
def test_weights(mode, weights):
    q, k, v, options = problem(90, 4, 2, 16, 24, weights=weights)
    check(q, k, v, **mode, **options)


@pytest.mark.parametrize("branch", [0, 1, 2], ids=["compressed", "selected", "window"])
@every_mode
def test_each_branch_alone(mode, branch):
    q, k, v, _ = problem(150, 4, 2, 16)
    check(q, k, v, gates=one_hot(q, branch), **MODES[mode])


@pytest.mark.parametrize("extra", [{"scale": 0.5}, {"scale": -1.0}, {"scale": 0.0}, {"window_size": 1}, {"window_size": 1000}, {"num_selected_blocks": 100}])
@both_modes
def test_options(mode, extra):
    check(*problem(90, 4, 2, 16)[:3], **{**mode, **extra})


@pytest.mark.parametrize("size", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_block_sizes(size, causal):
    q, k, v, _ = problem(150, 4, 2, 16)
    check(q, k, v, mode="mslk", compress_block_size=size, num_selected_blocks=3, q_tile_size=48, window_size=9, causal=causal)
    check(q, k, v, compress_block_size=size, compress_stride=1 if size < 16 else None, num_selected_blocks=4, window_size=9, causal=causal)


def test_defaults():
    check(*problem(1100, 4, 1, 32, batch=1)[:3], levels=[blitz_attn.isa_levels(available=True)[-1]])


def test_float64_is_exact():
    for name, mode in MODES.items():
        q, k, v, options = problem(120, 4, 2, 16, 8, dtype="float64", weights=WEIGHTS[:3])
        out, context = run(q, k, v, **mode, **options)
        exact, own = reference.nsa(q, k, v, return_context=True, **mode, **options)
        np.testing.assert_array_equal(routing_of(context), own.block_indices, err_msg=name)
        np.testing.assert_allclose(out, exact, rtol=1e-11, atol=1e-13, err_msg=name)


def test_strided_inputs():
    """Views of a larger array, the last axis contiguous."""
    q, k, v, _ = problem(80, 4, 2, 16, seed=1)
    joint = np.concatenate([q, k, v], axis=2)
    out, _ = run(q, k, v, **PAPER)
    again, _ = run(joint[:, :, :4], joint[:, :, 4:6], joint[:, :, 6:], **PAPER)
    assert same_bits(again, out)


def test_more_than_a_page_of_compressed_groups():
    """num_cmp_selected_blocks counts groups of 128 compressed keys."""
    q, k, v, _ = problem(700, 2, 1, 8, batch=1, dtype="float64")
    mode = {"mode": "mslk", "compress_block_size": 2, "num_selected_blocks": 2, "window_size": 4, "q_tile_size": 64}
    whole, _ = run(q, k, v, **mode)
    assert same_bits(run(q, k, v, num_cmp_selected_blocks=3, **mode)[0], whole)
    for causal in (True, False):
        options = {**mode, "causal": causal, "num_cmp_selected_blocks": 1}
        out, _ = run(q, k, v, **options)
        np.testing.assert_allclose(out, reference.nsa(q, k, v, **options), rtol=1e-10, atol=1e-12)
        assert abs(out - whole).max() > 1e-3


# ---- Upstream's table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1024, 2048])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_upstream_forward(tokens, kv_heads):
    q, k, v, options = problem(tokens, 4, kv_heads, 128, batch=1, dtype="bfloat16", size=0.1, weights=WEIGHTS[:3])
    sizes = {"mode": "mslk", "num_selected_blocks": 8, "window_size": 256}
    out, _ = run(q, k, v, **sizes, **options)
    upstream_close(out, reference.nsa(q, k, v, **sizes, **options, **bits_option(q)), "forward")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_upstream_compress(dtype):
    _, k, v, options = problem(256, 4, 2, 64, dtype=dtype, size=0.1, weights=WEIGHTS[:2])
    bits = bits_option(k)
    for weights in ((), (options["w_k_compress"], options["w_v_compress"])):
        ours = library.compress_kv(k, v, 64, *weights, **bits)
        for x, exact in zip(ours, reference.compress_kv(k, v, 64, *weights, **bits), strict=True):
            assert dtype_of(x) == dtype
            assert abs(testing.to_float64(x, dtype) - exact).max() <= UPSTREAM[f"compress_{dtype}"]


@pytest.mark.parametrize("tokens", [512, 1024])
@pytest.mark.parametrize("causal", [True, False])
def test_upstream_select(tokens, causal):
    """In float64 equal to the mean of all scores of a tile; in range, sorted, the same twice, no block from beyond the tile."""
    q, k, v, _ = problem(tokens, 4, 2, 32, dtype="float64")
    k_cmp, _ = library.compress_kv(k, v, 64)
    options = {"causal": causal, "q_tile_size": 256, "mode": "mslk"}
    chosen = library.score_and_select_blocks(q, k_cmp, 3, 64, **options)
    scores = np.einsum("bnhd,bmhd->bhnm", q, np.asarray(k_cmp).repeat(2, 2)).reshape(2, 4, tokens // 256, 256, -1).mean(3) / np.sqrt(32)
    for tile in range(tokens // 256):
        eligible = scores[:, :, tile, : 4 * (tile + 1) if causal else None]
        best = np.sort(np.argsort(-eligible, axis=-1)[..., :3], axis=-1)
        np.testing.assert_array_equal(chosen[:, :, tile], best)
    np.testing.assert_array_equal(chosen, library.score_and_select_blocks(q, k_cmp, 3, 64, **options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_upstream_gating(dtype):
    q, _, _, options = problem(128, 4, 2, 64, dtype=dtype, weights=["gate_proj_weight"])
    bits = bits_option(q)
    weight = options["gate_proj_weight"]
    branches = [tensors(q.shape, dtype=dtype, seed=n) for n in range(3)]
    gates = library.compute_gates(q, weight, **bits)
    exact = reference.gate_and_combine(*branches, reference.compute_gates(q, weight, **bits), **bits)
    ours = library.gate_and_combine(*branches, gates, **bits)
    apart = abs(testing.to_float64(ours, dtype) - exact)
    assert apart.max() <= UPSTREAM["gating_float16_max" if dtype == "float16" else "gating_bfloat16_max"]
    assert apart.mean() <= UPSTREAM["gating_bfloat16_mean"]
    flat = [np.ascontiguousarray(x).reshape(-1, *x.shape[2:]) for x in (q, *branches)]
    packed = library.gate_and_combine(*flat[1:], library.compute_gates(flat[0], weight, **bits), **bits)
    apart = abs(testing.to_float64(packed, dtype) - testing.to_float64(ours, dtype).reshape(packed.shape))
    assert apart.max() <= UPSTREAM["gating_packed"]


def test_upstream_uniform_gates():
    q = tensors((2, 64, 4, 32))
    gates = library.compute_gates(q)
    assert gates.shape == (2, 64, 4, 3)
    assert abs(np.asarray(gates) - 1 / 3).max() <= UPSTREAM["gating_uniform"]
    q, k, v, _ = problem(90)
    given = np.full((*q.shape[:-1], 3), 1 / 3, np.float32)
    assert abs(run(q, k, v, **MSLK)[0] - run(q, k, v, gates=given, **MSLK)[0]).max() <= UPSTREAM["gating_uniform"]


@pytest.mark.parametrize("lengths", [[512, 256], [777, 1, 300]])
def test_upstream_varlen(lengths):
    q, k, v, options = problem(lengths, 4, 2, 64, packed=True, dtype="bfloat16", size=0.1)
    sizes = {"mode": "mslk", "num_selected_blocks": 4, "window_size": 128}
    out, _ = run(q, k, v, **sizes, **options)
    exact = [testing.to_float64(run(*arrays, **sizes, **own)[0], "bfloat16")[0] for *arrays, own in (alone(n, q, k, v, options) for n in range(len(lengths)))]
    upstream_close(out, np.concatenate(exact), "varlen")
    q, k, v, _ = problem(512, 4, 2, 64, batch=1, size=0.1)
    one = run(q[0], k[0], v[0], cu_seqlens=[0, 512], **sizes)[0]
    assert abs(one - run(q, k, v, **sizes)[0][0]).max() <= UPSTREAM["varlen_one_sequence"]


# ---- Packed sequences, threads, company -------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_is_each_sequence_alone(mode, dtype):
    """Odd lengths, shorter than a block or empty ones among them: the same bits, and the reference's numbers."""
    q, k, v, options = problem([33, 0, 101, 1, 16, 75], 4, 2, 16, 24, packed=True, dtype=dtype, weights=WEIGHTS)
    options.pop("gate_proj_weight")
    out, context = check(q, k, v, **MODES[mode], **options)
    routing, begin = routing_of(context), 0
    for n, part in enumerate(sequences(q, options)):
        *arrays, own = alone(n, q, k, v, options)
        one, own_context = run(*arrays, **MODES[mode], **own)
        assert same_bits(np.ascontiguousarray(out[part]), np.ascontiguousarray(one[0])), n
        rows = routing_of(own_context)[0]
        np.testing.assert_array_equal(routing[:, begin : begin + rows.shape[1]], rows)
        begin += rows.shape[1]
    assert begin == routing.shape[1]


@every_mode
def test_same_bits_for_any_number_of_threads(mode):
    q, k, v, options = problem(500, 4, 2, 32, weights=WEIGHTS[:3])
    expected, context = run(q, k, v, num_threads=1, **MODES[mode], **options)
    for num_threads in (2, 3, 8):
        out, own = run(q, k, v, num_threads=num_threads, **MODES[mode], **options)
        assert same_bits(out, expected)
        np.testing.assert_array_equal(routing_of(own), routing_of(context))


@pytest.mark.sampled("options")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (9, 1)])
@pytest.mark.parametrize("size", [16, 64, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_that_share_blocks_get_the_same_bits_alone_and_in_threads(dtype, size, heads, kv_heads):
    """Queries of a longer stretch are attended block by block: many of them, and blocks that are longer and shorter than what is
    attended at a time. Alone, in threads and beside other queries, every query gets the same bits."""
    rules = {"compress_block_size": size, "num_selected_blocks": 5, "window_size": 16}
    q, k, v, _ = problem(650, heads, kv_heads, 40, 56, dtype=dtype, batch=2)
    _, context = check(q, k, v, **rules)
    assert same_bits(run(q, k, v, num_threads=1, **rules)[0], run(q, k, v, num_threads=3, **rules)[0])
    lists = routing_of(context)
    bits = {"block_size": size, "return_lse": True, **bits_option(q)}
    whole, lse = library.selected_attention(q, k, v, lists, **bits)
    one, one_lse = library.selected_attention(q[:1], k[:1], v[:1], lists[:1], **bits)
    assert same_bits(np.ascontiguousarray(whole[:1]), one)
    assert same_bits(np.ascontiguousarray(lse[:1]), one_lse)
    cut = lists[:, :, ::-1]  # other queries side by side
    turned, _ = library.selected_attention(np.ascontiguousarray(q[:, ::-1]), k, v, np.ascontiguousarray(cut), causal=False, **bits)
    straight, _ = library.selected_attention(q, k, v, lists, causal=False, **bits)
    assert same_bits(np.ascontiguousarray(turned[:, ::-1]), straight)


@pytest.mark.skipif(IS_REFERENCE, reason="the reference does everything at once")
@pytest.mark.parametrize("elements", [1 << 10, 1 << 12, 1 << 14, 40_000])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["paper", "mslk", "mslk_groups"])
def test_pieces_change_nothing(mode, packed, elements, monkeypatch):
    """Long calls are worked off in pieces, of one head's queries or of many heads: same bits, and the context is whole."""
    rules = {**MSLK, "num_cmp_selected_blocks": 1} if mode == "mslk_groups" else MODES[mode]
    q, k, v, options = problem(480, 12, 3, 16, 24, batch=1 if packed else 2, weights=WEIGHTS[:3])
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        options["cu_seqlens"] = [0, 48, 288, 288, 480]
    expected, context = run(q, k, v, **rules, **options)
    monkeypatch.setattr(sys.modules["blitz_attn.nsa"], "PIECE_ELEMENTS", elements)
    out, own = run(q, k, v, **rules, **options)
    assert same_bits(out, expected)
    assert same_bits(library.nsa(q, k, v, **rules, **options), expected)
    for kept, before in ((own.lse, context.lse), (dict(enumerate(own.branches)), dict(enumerate(context.branches)))):
        assert all(same_bits(np.ascontiguousarray(x), np.ascontiguousarray(before[n])) for n, x in kept.items())
    np.testing.assert_array_equal(routing_of(own), routing_of(context))
    given = {**options, "block_indices": routing_of(context)}
    assert same_bits(run(q, k, v, **rules, **given)[0], expected)
    if mode == "mslk":  # one list for the heads of a KV head
        given["block_indices"] = np.ascontiguousarray(routing_of(context)[..., ::4, :, :])
        cut = library.nsa(q, k, v, **rules, **given)
        monkeypatch.undo()
        assert same_bits(cut, library.nsa(q, k, v, **rules, **given))


@pytest.mark.skipif(IS_REFERENCE, reason="the reference does everything at once")
def test_batch_mates_cut_nothing(monkeypatch):
    """A sequence is cut into pieces by its own length alone: a piece of one query by itself would be summed in another order."""
    rules = {"mode": "mslk", "compress_block_size": 1, "num_selected_blocks": 1, "window_size": 1, "q_tile_size": 14}
    q, k, v, _ = problem(15, 1, 1, 2, 37, batch=2)
    monkeypatch.setattr(sys.modules["blitz_attn.nsa"], "PIECE_ELEMENTS", 20 * 37)
    out = library.nsa(q, k, v, **rules)
    for b in range(2):
        assert same_bits(library.nsa(q[b : b + 1], k[b : b + 1], v[b : b + 1], **rules), np.ascontiguousarray(out[b : b + 1]))


@both_modes
def test_the_rest_of_the_batch_does_not_matter(mode):
    q, k, v, _ = problem(90, batch=3)
    out, _ = run(q, k, v, **mode)
    for b in range(3):
        assert same_bits(run(q[b : b + 1], k[b : b + 1], v[b : b + 1], **mode)[0], out[b : b + 1])


@both_modes
def test_the_context_changes_nothing(mode):
    q, k, v, options = problem(90, weights=WEIGHTS[:3])
    expected, _ = run(q, k, v, **mode, **options)
    out = poisoned(expected.shape, q)
    assert library.nsa(q, k, v, out=out, **mode, **options) is out
    assert same_bits(out, expected)
    assert same_bits(library.nsa(q, k, v, **mode, **options), expected)


def test_inputs_are_not_written():
    q, k, v, options = problem(90, weights=WEIGHTS[:3])
    arrays = [q, k, v, *options.values()]
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    for mode in (PAPER, MSLK):
        run(q, k, v, **mode, **options)
    assert all(same_bits(a, b) for a, b in zip(arrays, before, strict=True))


def test_concurrent_callers():
    problems = [(problem(60 + 20 * n, seed=n)[:3], (PAPER, MSLK)[n % 2]) for n in range(4)]
    expected = [run(*arrays, **mode)[0] for arrays, mode in problems]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: run(*problems[n % 4][0], num_threads=1 + n % 3, **problems[n % 4][1])[0], range(24)))
    assert all(same_bits(out, expected[n % 4]) for n, out in enumerate(results))


def test_bits_of_bfloat16():
    """Plain uint16 with dtype="bfloat16": the same bits as ml_dtypes arrays, where that is installed."""
    q, k, v, options = problem(80, dtype="bfloat16", weights=WEIGHTS[:3])
    bits = [x.view(np.uint16) for x in (q, k, v)]
    weights = {name: x.view(np.uint16) for name, x in options.items()}
    out = library.nsa(*bits, dtype="bfloat16", **PAPER, **weights)
    assert out.dtype == np.uint16
    assert same_bits(out, run(q, k, v, **PAPER, **options)[0].view(np.uint16))


@pytest.mark.skipif(IS_REFERENCE, reason="the reference returns NumPy arrays")
def test_torch_tensors():
    torch = pytest.importorskip("torch")
    q, k, v, _ = problem(80)
    out = library.nsa(*(torch.from_numpy(x) for x in (q, k, v)), **PAPER)
    assert isinstance(out, torch.Tensor)
    assert same_bits(out.numpy(), run(q, k, v, **PAPER)[0])


# ---- Selection --------------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_by_itself(mode, dtype):
    """`score_and_select_blocks` over the library's own compressed keys."""
    options = MODES[mode]
    q, k, v, _ = problem(190, 6, 2, 16, dtype=dtype)
    bits = bits_option(q)
    size, count = options["compress_block_size"], options["num_selected_blocks"]
    stride = options.get("compress_stride") or (size if "mode" in options else size // 2)
    k_cmp, _ = library.compress_kv(k, v, size, stride=stride, **bits)
    names = ("causal", "q_tile_size", "mode", "compress_stride", "select_block_size", "init_blocks", "local_blocks")
    named = {name: options[name] for name in names if name in options}
    named.setdefault("mode", "paper")
    chosen = library.score_and_select_blocks(q, k_cmp, count, size, **named, **bits)
    check_selection(chosen, exact_scores(q, k, v, **options), count, dtype)
    for num_threads in (1, 3):
        again = library.score_and_select_blocks(q, k_cmp, count, size, num_threads=num_threads, **named, **bits)
        np.testing.assert_array_equal(again, chosen)


@pytest.mark.skipif(IS_REFERENCE, reason="the reference keeps every place")
@pytest.mark.parametrize("packed", [False, True])
@both_modes
def test_more_places_than_blocks_take_no_memory(mode, packed):
    """Lists of 2**30 places would not fit. The bits are those of lists that have a place for each block."""
    q, k, v, options = problem([3, 0, 197] if packed else 200, packed=packed)
    many = {"num_cmp_selected_blocks": 2**30 - 1} if mode.get("mode") == "mslk" else {}
    out = library.nsa(q, k, v, **{**mode, "num_selected_blocks": 2**30 - 1}, **many, **options)
    few, context = run(q, k, v, **{**mode, "num_selected_blocks": 50}, **dict.fromkeys(many, 3), **options)
    assert same_bits(out, few)
    assert routing_of(context).shape[-1] == 50


def test_a_score_of_minus_infinity_is_not_selected():
    """Where places are left, a block whose score is NaN takes one, and one whose score is -inf does not."""
    q, k_cmp = np.ones((1, 8, 1, 2), np.float32), np.ones((1, 4, 1, 2), np.float32)
    k_cmp[0, 1:3, 0, 0] = -np.inf, np.nan
    assert library.score_and_select_blocks(q, k_cmp, 4, 2, q_tile_size=8, mode="mslk").tolist() == [[[[0, 2, 3, -1]]]]


@pytest.mark.skipif(IS_REFERENCE, reason="the reference leaves branches out that see nothing")
@pytest.mark.parametrize("gate", [np.nan, np.inf])
def test_a_gate_of_nan_reaches_branches_that_see_nothing(gate):
    """The first three queries see no compressed block."""
    q, k, v, _ = problem(8, batch=1)
    gates = one_hot(q, 1)
    gates[..., 0] = gate
    assert np.isnan(library.nsa(q, k, v, compress_block_size=4, num_selected_blocks=3, gates=gates)[:, :3]).all()


def test_ties_go_to_the_lower_index():
    """Keys that are all zero: every score is the same."""
    q = tensors((1, 100, 2, 16))
    k = np.zeros((1, 100, 1, 16), np.float32)
    sizes = {"compress_block_size": 8, "num_selected_blocks": 4, "window_size": 3}
    mslk = routing_of(run(q, k, k, mode="mslk", q_tile_size=16, **sizes)[1])
    assert mslk[0, :, 0, :2].tolist() == [[0, 1]] * 2
    assert (mslk[0, :, 0, 2:] == -1).all()
    assert mslk[0, 1, 1:].tolist() == [[0, 1, 2, 3]] * 6
    paper = routing_of(run(q, k, k, compress_stride=8, **sizes)[1])
    assert [[j for j in paper[0, 0, t] if j >= 0] for t in (0, 7, 8, 31, 63, 99)] == [[0], [0], [0, 1], [0, 1, 2, 3], [0, 1, 6, 7], [0, 1, 11, 12]]


@pytest.mark.parametrize(("init", "local"), [(0, 0), (1, 0), (0, 3), (2, 2), (4, 4)])
def test_forced_blocks(init, local):
    q, k, v, _ = problem(200, 4, 2, 16)
    routing = routing_of(run(q, k, v, compress_block_size=8, num_selected_blocks=8, init_blocks=init, local_blocks=local, window_size=3)[1])
    for t in range(200):
        own = t // 8
        forced = set(range(min(init, own + 1))) | set(range(max(0, own - local + 1), own + 1))
        for row in routing[:, :, t].reshape(-1, routing.shape[-1]):
            blocks = row[row >= 0].tolist()
            assert forced <= set(blocks)
            assert len(blocks) == len(set(blocks)) == min(8, own + 1)
            assert max(blocks) <= own


def test_what_comes_behind_the_end_of_a_row_is_in_no_row():
    """Rows end at the first -1: what lies behind it need not be a block, nor another one each time."""
    q, k, v, _ = problem(50, 4, 2, 8)
    clean = np.full((q.shape[0], k.shape[2], q.shape[1], 5), -1)
    clean[..., 0] = 1
    littered = clean.copy()
    littered[..., 2:] = [1, 1000, -7]
    results = [run(q, k, v, **{**PAPER, "num_selected_blocks": 5}, block_indices=lists)[0] for lists in (littered, clean)]
    assert same_bits(*results)


def test_no_block_from_behind_the_last_whole_one():
    """mslk: 100 tokens have 6 whole blocks of 16, though 6 * 16 < 100."""
    q, k, v, _ = problem(100)
    routing = routing_of(run(q, k, v, **{**MSLK, "num_selected_blocks": 10})[1])
    assert routing.max() == 5
    assert ((routing >= 0).sum(-1) <= 6).all()


@every_mode
def test_given_routing(mode):
    """A call's own routing changes no bit; another is followed, and kept in the context."""
    q, k, v, options = problem(150, weights=WEIGHTS[:3])
    options = {**MODES[mode], **options}
    out, context = run(q, k, v, **options)
    routing = routing_of(context)
    assert same_bits(run(q, k, v, block_indices=routing, **options)[0], out)
    other = np.full_like(routing, -1)
    other[..., 0] = 1
    other[:, :, ::2, 1] = 3
    changed, context = check(q, k, v, block_indices=other, **options)
    assert not np.array_equal(changed, out)
    np.testing.assert_array_equal(routing_of(context), other)
    nothing, _ = check(q, k, v, block_indices=np.full_like(routing, -1), gates=one_hot(q, 1), **MODES[mode])
    assert (nothing == 0).all()


def test_routing_by_kv_head():
    """mslk: one row a KV head stands for all heads of its group; wider and narrower lists and int64 are fine."""
    q, k, v, _ = problem(150, 4, 2)
    routing = np.random.default_rng(0).permuted(np.tile(np.arange(9), (2, 2, 5, 1)), axis=-1)
    by_head = run(q, k, v, block_indices=routing.repeat(2, 1), **MSLK)[0]
    assert same_bits(check(q, k, v, block_indices=routing, **MSLK)[0], by_head)
    check(q, k, v, block_indices=routing[..., :1].astype(np.int32), **MSLK)


# ---- Rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("mode", ["paper", "paper_strides", "paper_free"])
def test_paper_mode_never_looks_ahead(mode, which):
    """Whatever happens to later tokens, not a bit of an earlier token's output changes."""
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
    """With given routing a token reaches back to the beginning of its own compressed block, l - 1 tokens at most, and no further."""
    q, k, v, _ = problem(150, 4, 2, 16, batch=1)
    routing = routing_of(run(q, k, v, **MSLK)[1])
    arrays = {"q": q, "k": k, "v": v}
    plain, _ = run(**arrays, block_indices=routing, **MSLK)
    for at in (16, 31, 47, 100, 143, 149):
        changed = arrays[which].copy()
        changed[:, at] += 1
        out, _ = run(**{**arrays, which: changed}, block_indices=routing, **MSLK)
        first = np.flatnonzero((out != plain).any((0, 2, 3)))[0]
        assert first == (at // 16 * 16 if at < 144 else at)  # 144 .. 149 are in no block


@pytest.mark.parametrize("causal", [True, False])
@both_modes
def test_all_selected_is_dense(mode, causal):
    q, k, v, _ = problem(160, 4, 2, 16, dtype="float32")
    out, _ = run(q, k, v, **{**mode, "num_selected_blocks": 10, "causal": causal}, gates=one_hot(q, 1))
    dense = blitz_attn.block_sparse_attention(q, k, v, layout="BSND", causal=causal)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@both_modes
def test_wide_window_is_dense(mode, causal):
    q, k, v, _ = problem(157, 4, 2, 16, dtype="float32")
    out, _ = run(q, k, v, **{**mode, "window_size": 157 if causal else 314, "causal": causal}, gates=one_hot(q, 2))
    dense = blitz_attn.block_sparse_attention(q, k, v, layout="BSND", causal=causal)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-6)


def test_dead_rows_are_zero():
    """One block a tile of 128 queries: many come before it, and see nothing in the selected branch."""
    q, k, v, _ = problem(512, 2, 1, 16, batch=1)
    mode = {**MSLK, "num_selected_blocks": 1, "q_tile_size": 128}
    out, context = run(q, k, v, gates=one_hot(q, 1), **mode)
    routing = routing_of(context)
    begin = routing[0, :, np.arange(512) // 128, 0].T * 16  # (head, token)
    dead = (np.arange(512) < begin).T
    assert dead.any()
    assert (out[0][dead] == 0).all()
    assert (out[0][~dead] != 0).any(-1).all()
    early = run(q, k, v, gates=one_hot(q, 0), **PAPER)[0]
    assert (early[:, :15] == 0).all()
    assert (early[:, 15:] != 0).any(-1).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@both_modes
def test_bad_values_stay_with_those_who_see_them(mode, bad, dtype):
    q, k, v, _ = problem(150, 2, 1, 16, batch=1, dtype=dtype)
    routing = routing_of(run(q, k, v, **mode)[1])
    clean, _ = run(q, k, v, block_indices=routing, **mode)
    v[0, 100, 0, 3] = testing.round_to(np.float32(bad), dtype)
    out, _ = run(q, k, v, block_indices=routing, **mode)
    assert same_bits(np.ascontiguousarray(out[:, :96]), np.ascontiguousarray(clean[:, :96]))
    out, clean = (testing.to_float64(x, dtype) for x in (out, clean))
    assert not np.isfinite(out[0, 112:121, :, 3]).any()  # the window and the compressed block reach it
    others = [n for n in range(16) if n != 3]
    np.testing.assert_allclose(out[..., others], clean[..., others], rtol=1e-5, atol=1e-6)


# ---- Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("size", "stride"), [(16, None), (16, 8), (16, 16), (12, 5), (1, None), (200, None)])
@pytest.mark.parametrize("lengths", [101, [33, 0, 101, 1]])
def test_compress(dtype, size, stride, lengths):
    packed = isinstance(lengths, list)
    _, k, v, options = problem(lengths, 4, 2, 16, 24, packed=packed, dtype=dtype, weights=WEIGHTS[:2])
    bits = bits_option(k)
    cu = {"cu_seqlens": options["cu_seqlens"]} if packed else {}
    for weights in ((), (options["w_k_compress"], options["w_v_compress"])):
        ours = library.compress_kv(k, v, size, *weights, stride=stride, **cu, **bits)
        for x, exact in zip(ours, reference.compress_kv(k, v, size, *weights, stride=stride, **cu, **bits), strict=True):
            assert x.shape == exact.shape
            rounding = {"float64": 1e-13, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
            np.testing.assert_allclose(testing.to_float64(x, dtype), exact, rtol=rounding, atol=0.3 * rounding * max(1, abs(exact).max(initial=0)))


def check_branch(name, args, options, lse_tolerance=1e-5):
    """A branch by itself: result and log-sum-exp of the reference, at every level."""
    exact, exact_lse = getattr(reference, name)(*args, return_lse=True, **options)
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            out, lse = getattr(library, name)(*args, return_lse=True, **options)
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=2e-6, err_msg=level)
        np.testing.assert_allclose(lse, exact_lse, rtol=lse_tolerance, atol=lse_tolerance, err_msg=level)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_branches(causal, packed):
    lengths = [33, 0, 101, 5] if packed else 101
    q, k, v, options = problem(lengths, 4, 2, 16, 24, packed=packed)
    cu = options
    both = {"causal": causal, **cu}
    for mode, stride, tile in (("paper", 8, 1), ("mslk", 16, 32)):
        k_cmp, v_cmp = (x.astype(np.float32) for x in reference.compress_kv(k, v, 16, stride=stride, **cu))
        check_branch("compressed_attention", (q, k_cmp, v_cmp, 16), {"stride": stride, "mode": mode, **both})
        chosen = reference.score_and_select_blocks(q, k_cmp, 3, 16, q_tile_size=32, mode=mode, **both)
        check_branch("selected_attention", (q, k, v, chosen, 16), {"q_tile_size": tile, **both})
    for window in (1, 9, 500):
        check_branch("window_attention", (q, k, v, window), both)


# ---- Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(IS_REFERENCE, reason="the reference takes its time")
@both_modes
def test_memory_is_linear(mode):
    """32768 tokens: one float for every query and compressed block would be 256 MiB, for every query and key 4 GiB."""
    resource = pytest.importorskip("resource")
    q, k, v, _ = problem(32768, 1, 1, 16, batch=1)
    run(q[:, :4096], k[:, :4096], v[:, :4096], **{**mode, "num_selected_blocks": 8})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(q, k, v, **{**mode, "num_selected_blocks": 8})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# ---- Bad input ------------------------------------------------------------------------------------------------------------

SENTENCE = re.compile(r"^[\w\[\], ]+: expected .+, got .+", re.DOTALL)
TOKENS = 40


def good_call():
    q, k, v, options = problem(TOKENS, 4, 2, 8, 6, weights=WEIGHTS[:3])
    out = np.full((2, TOKENS, 4, 6), np.nan, np.float32)
    return {"q": q, "k": k, "v": v, "out": out, "compress_block_size": 8, "num_selected_blocks": 3, "window_size": 5, **options}


def packed_call(cu_seqlens):
    """The good call's tokens in one row."""
    return lambda a: {
        **{name: a[name].reshape(-1, *a[name].shape[2:]) for name in ("q", "k", "v", "out")},
        "cu_seqlens": np.asarray(cu_seqlens),
    }


def routing(*row, rows=TOKENS, heads=2, dtype=np.int32):
    """One row of blocks for all of the good call."""
    return np.tile(np.array(row, dtype), (2, heads, rows, 1))


BAD = [
    ("k_zero", ValueError, "num_selected_blocks", lambda a: {"num_selected_blocks": 0}),
    ("k_negative", ValueError, "num_selected_blocks", lambda a: {"num_selected_blocks": -1}),
    ("k_fraction", TypeError, "num_selected_blocks", lambda a: {"num_selected_blocks": 2.5}),
    ("k_below_forced", ValueError, "num_selected_blocks", lambda a: {"num_selected_blocks": 2}),
    ("window_zero", ValueError, "window_size", lambda a: {"window_size": 0}),
    ("window_text", TypeError, "window_size", lambda a: {"window_size": "5"}),
    ("block_zero", ValueError, "compress_block_size", lambda a: {"compress_block_size": 0}),
    ("stride_zero", ValueError, "compress_stride", lambda a: {"compress_stride": 0}),
    ("stride_no_divisor", ValueError, "compress_stride", lambda a: {"compress_stride": 3}),
    ("stride_no_divisor_of_selected", ValueError, "compress_stride|select_block_size", lambda a: {"select_block_size": 10}),
    ("select_zero", ValueError, "select_block_size", lambda a: {"select_block_size": 0}),
    ("init_negative", ValueError, "init_blocks", lambda a: {"init_blocks": -1}),
    ("local_negative", ValueError, "local_blocks", lambda a: {"local_blocks": -2}),
    ("tile_zero", ValueError, "q_tile_size", lambda a: {"mode": "mslk", "q_tile_size": 0}),
    ("mode", ValueError, "mode", lambda a: {"mode": "fla"}),
    ("stride_in_mslk", ValueError, "compress_stride", lambda a: {"mode": "mslk", "compress_stride": 4}),
    ("select_in_mslk", ValueError, "select_block_size", lambda a: {"mode": "mslk", "select_block_size": 16}),
    ("groups_in_paper", ValueError, "num_cmp_selected_blocks", lambda a: {"num_cmp_selected_blocks": 4}),
    ("groups_zero", ValueError, "num_cmp_selected_blocks", lambda a: {"mode": "mslk", "num_cmp_selected_blocks": 0}),
    ("w_k_shape", ValueError, "w_k_compress", lambda a: {"w_k_compress": a["w_k_compress"][:1]}),
    ("w_k_dims", ValueError, "w_k_compress", lambda a: {"w_k_compress": a["w_v_compress"]}),
    ("w_v_shape", ValueError, "w_v_compress", lambda a: {"w_v_compress": a["w_v_compress"][..., :5]}),
    ("w_v_rank", ValueError, "w_v_compress", lambda a: {"w_v_compress": a["w_v_compress"][0]}),
    ("gate_weight_shape", ValueError, "gate_proj_weight", lambda a: {"gate_proj_weight": a["gate_proj_weight"][:, :2]}),
    ("gate_weight_heads", ValueError, "gate_proj_weight", lambda a: {"gate_proj_weight": a["gate_proj_weight"][:2]}),
    ("gates_and_weight", ValueError, "gates|gate_proj_weight", lambda a: {"gates": np.ones((2, TOKENS, 4, 3), np.float32)}),
    ("gates_shape", ValueError, "gates", lambda a: {"gates": np.ones((2, TOKENS, 4, 2), np.float32), "gate_proj_weight": None}),
    ("q_rank", ValueError, "q", lambda a: {"q": a["q"][0]}),
    ("k_tokens", ValueError, "k", lambda a: {"k": a["k"][:, :-1]}),
    ("k_dim", ValueError, "k", lambda a: {"k": a["k"][..., :4]}),
    ("k_heads", ValueError, "k", lambda a: {"k": a["k"].repeat(3, 2)[:, :, :3], "v": a["v"].repeat(3, 2)[:, :, :3]}),
    ("v_heads", ValueError, "v", lambda a: {"v": a["v"][:, :, :1]}),
    ("v_tokens", ValueError, "v", lambda a: {"v": a["v"][:, 1:]}),
    ("cu_beginning", ValueError, "cu_seqlens", packed_call([1, 40, 80])),
    ("cu_end", ValueError, "cu_seqlens", packed_call([0, 40, 79])),
    ("cu_falling", ValueError, "cu_seqlens", packed_call([0, 50, 40, 80])),
    ("cu_none", ValueError, "cu_seqlens", packed_call(np.zeros(0, np.int32))),
    ("cu_with_4d", ValueError, "q", lambda a: {"cu_seqlens": [0, TOKENS]}),
    ("routing_range", ValueError, "block_indices", lambda a: {"block_indices": routing(0, 1, 99)}),
    ("routing_negative", ValueError, "block_indices", lambda a: {"block_indices": routing(0, 1, -2)}),
    ("routing_twice", ValueError, "block_indices", lambda a: {"block_indices": routing(0, 1, 1)}),
    ("routing_heads", ValueError, "block_indices", lambda a: {"block_indices": routing(0, 1, heads=3)}),
    ("routing_rows", ValueError, "block_indices", lambda a: {"block_indices": routing(0, 1, rows=TOKENS - 1)}),
    ("routing_kind", TypeError, "block_indices", lambda a: {"block_indices": routing(0, 1, dtype=np.float32)}),
    ("out_shape", ValueError, "out", lambda a: {"out": a["out"][..., :5]}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "name", "changes"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_a_bad_argument_is_named_and_out_is_not_touched(error, name, changes):
    arguments = good_call()
    arguments |= changes(arguments)
    with pytest.raises(error, match=rf"^({name}): ") as caught:
        library.nsa(**arguments)
    assert SENTENCE.match(str(caught.value)), caught.value
    assert np.isnan(arguments["out"]).all(), "out was touched"


@pytest.mark.skipif(IS_REFERENCE, reason="the reference makes arrays of its own")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [*WEIGHTS, "block_indices", "cu_seqlens"])
def test_out_lies_in_no_argument(name, dtype):
    """Not even in one that is read before the first result is written: whoever keeps it keeps what it holds, and a context refers to it."""
    arguments = good_call()
    weight = {"gate_proj_weight": None, "gates": np.ones((2, TOKENS, 4, 3))} if name == "gates" else {}
    arguments = {key: x.astype(dtype) if isinstance(x, np.ndarray) else x for key, x in {**arguments, **weight}.items()}
    if name == "block_indices":
        arguments[name] = routing(0, 1, 2, dtype=np.int16)
    if name == "cu_seqlens":
        arguments |= packed_call([0, 2 * TOKENS])(arguments)
    memory = np.zeros(max(arguments[key].nbytes for key in ("out", name)), np.uint8)
    for key in (name, "out"):
        x = arguments[key]
        arguments[key] = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
        if key == name:
            arguments[key][...] = x
    before = memory.copy()
    with pytest.raises(ValueError, match=f"^out: expected memory of its own, got an array that overlaps {name}$"):
        library.nsa(**arguments)
    assert same_bits(memory, before)


def test_the_good_call_is_good():
    arguments = good_call()
    assert np.isfinite(library.nsa(**arguments)).all()
    packed = packed_call([0, 3, 80])(arguments)
    assert np.isfinite(library.nsa(**{**arguments, **packed})).all()


@pytest.mark.skipif(IS_REFERENCE, reason="the reference takes any array")
@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "q", lambda a: {"q": a["q"].astype(np.int32)}),
        (TypeError, "k", lambda a: {"k": a["k"].astype(np.float16)}),
        (TypeError, "v", lambda a: {"v": a["v"].astype(np.float64)}),
        (TypeError, "w_k_compress", lambda a: {"w_k_compress": a["w_k_compress"].astype(np.int64)}),
        (TypeError, "q", lambda a: {"q": a["q"].tolist()}),
        (TypeError, "out", lambda a: {"out": a["out"].astype(np.float64)}),
        (ValueError, "out", lambda a: {"q": a["q"], "out": a["v"].repeat(2, 2)[:, :, :4][..., ::-1]}),
        (TypeError, "scale", lambda a: {"scale": "no"}),
        (ValueError, "scale", lambda a: {"scale": np.nan}),
        (TypeError, "block_indices", lambda a: {"block_indices": "all"}),
        (TypeError, "cu_seqlens", lambda a: {"cu_seqlens": "0 80"}),
        (TypeError, "scale", lambda a: {"scale": 1j}),
        (TypeError, "causal", lambda a: {"causal": [True]}),
        (TypeError, "mode", lambda a: {"mode": ["paper"]}),
        (TypeError, "dtype", lambda a: {"dtype": ["float32"]}),
        (TypeError, "q_tile_size", lambda a: {"q_tile_size": 2.0}),
        (ValueError, "k", lambda a: {"k": StoppedDlpack(RuntimeError("gone\nfor good"))}),
        (ValueError, "num_threads", lambda a: {"num_threads": 0}),
    ],
)
def test_a_bad_argument_of_the_library_is_named(error, name, changes):
    arguments = good_call()
    arguments |= changes(arguments)
    with pytest.raises(error, match=rf"^{name}: expected "):
        library.nsa(**arguments)


def test_a_default_is_named():
    """Nobody gave the stride that does not fit."""
    x = np.ones((1, 40, 1, 8), np.float32)
    sentence = "^compress_stride: expected a divisor of compress_block_size = 9, got the default compress_block_size // 2 = 4$"
    with pytest.raises(ValueError, match=sentence):
        blitz_attn.nsa.nsa(x, x, x, compress_block_size=9, num_selected_blocks=3)
    with pytest.raises(ValueError, match="^compress_stride: expected a divisor of compress_block_size = 9, got 4$"):
        blitz_attn.nsa.nsa(x, x, x, compress_block_size=9, num_selected_blocks=3, compress_stride=4)
