"""The float64 twins of native sparse attention: against a token-by-token computation, against dense attention, against the
causal rules by perturbation, and their gradients against central differences."""

import math

import numpy as np
import pytest

from blitz_attn import reference, testing
from blitz_attn._reference import nsa_core as core
from cases_nsa import GRADIENTS, WEIGHTS, alone, one_hot, problem, sequences, tensors

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


# ---- Token by token -------------------------------------------------------------------------------------------------


def softmax_sum(q, keys, values, scale):
    """Attention of one query; nothing to see gives 0."""
    if not keys:
        return np.zeros(len(values[0]) if values else 0)
    scores = [scale * float(q @ k) for k in keys]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def slow_nsa(q, k, v, *, mode, compress_block_size, num_selected_blocks, window_size, causal=True, q_tile_size=256, compress_stride=None,
             select_block_size=None, init_blocks=1, local_blocks=2, w_k_compress=None, w_v_compress=None, gate_proj_weight=None, gates=None,
             scale=None, num_cmp_selected_blocks=None, cmp_group=128):  # fmt: skip
    """One sequence (N, H, D) by the formulas, a query at a time. Returns (out, list of blocks by [head][query])."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    scale = 1 / math.sqrt(dim) if scale is None else scale
    size = compress_block_size
    stride = size if mode == "mslk" else compress_stride or max(1, size // 2)
    wide = size if mode == "mslk" else select_block_size or size
    starts = [a for a in range(0, tokens, stride) if a + size <= tokens]

    def compressed(x, w, h):
        means = [x[a : a + size, h].mean(0) for a in starts]
        return means if w is None else [mean @ w[h] for mean in means]

    k_cmp = [compressed(k, w_k_compress, h) for h in range(kv_heads)]
    v_cmp = [compressed(v, w_v_compress, h) for h in range(kv_heads)]

    def visible(t):
        return [i for i, a in enumerate(starts) if not causal or (a + size - 1 if mode == "paper" else a) <= t]

    def probabilities(t, h):
        keys = visible(t)
        scores = np.array([scale * float(q[t, h] @ k_cmp[h // group][i]) for i in keys])
        weights = np.exp(scores - scores.max()) if keys else scores
        return dict(zip(keys, weights / weights.sum() if keys else [], strict=True))

    def paper_blocks(t, kv):
        importance = {}
        for j in range(-(-tokens // wide)):
            if causal and j * wide > t:
                continue
            total = 0.0
            for h in range(kv * group, (kv + 1) * group):
                for i, p in probabilities(t, h).items():
                    # strides of block i that lie in block j, each counted for every stride of i: the overlap in tokens over d, as Eq. 9
                    shared = min(starts[i] + size, (j + 1) * wide) - max(starts[i], j * wide)
                    total += p * max(0, shared) / stride
            importance[j] = total
        own = t // wide
        first = own - (local_blocks - 1 if causal else local_blocks // 2)
        forced = [j for j in importance if j < init_blocks or first <= j < first + local_blocks]
        others = sorted((j for j in importance if j not in forced), key=lambda j: (-round(importance[j], 12), j))
        return sorted(forced + others[: num_selected_blocks - len(forced)])

    def tile_scores(tile, h):
        rows = range(tile * q_tile_size, min(tokens, (tile + 1) * q_tile_size))
        scores = {j: np.mean([scale * float(q[t, h] @ k_cmp[h // group][j]) for t in rows]) for j in range(len(starts))}
        return {j: s for j, s in scores.items() if not causal or starts[j] < (tile + 1) * q_tile_size}

    def best(scores, count):
        return sorted(sorted(scores, key=lambda j: (-scores[j], j))[:count])

    out = np.zeros((tokens, heads, v.shape[2]))
    chosen = [[[] for _ in range(tokens)] for _ in range(heads)]
    for h in range(heads):
        kv = h // group
        for t in range(tokens):
            if mode == "paper":
                blocks = paper_blocks(t, kv)
                compressed = visible(t)
            else:
                scores = tile_scores(t // q_tile_size, h)
                blocks = best(scores, num_selected_blocks)
                compressed = visible(t)
                if num_cmp_selected_blocks is not None:
                    means = {}
                    for g in {j // cmp_group for j in scores}:
                        means[g] = np.mean([s for j, s in scores.items() if j // cmp_group == g])
                    kept = best(means, num_cmp_selected_blocks)
                    compressed = [i for i in compressed if i // cmp_group in kept]
            chosen[h][t] = blocks
            selected = [p for j in blocks for p in range(j * wide, min(tokens, (j + 1) * wide)) if not causal or p <= t]
            low, high = (t - window_size + 1, t) if causal else (t - window_size // 2, t + window_size // 2)
            window = [p for p in range(tokens) if low <= p <= high]
            branches = [
                softmax_sum(q[t, h], [k_cmp[kv][i] for i in compressed], [v_cmp[kv][i] for i in compressed], scale),
                softmax_sum(q[t, h], [k[p, kv] for p in selected], [v[p, kv] for p in selected], scale),
                softmax_sum(q[t, h], [k[p, kv] for p in window], [v[p, kv] for p in window], scale),
            ]
            if gates is not None:
                gate = gates[t, h]
            elif gate_proj_weight is not None:
                gate = [1 / (1 + math.exp(-float(q[t, h] @ gate_proj_weight[h, c]))) for c in range(3)]
            else:
                gate = [1 / 3] * 3
            for g, o in zip(gate, branches, strict=True):
                if o.size:
                    out[t, h] += g * o
    return out, chosen


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("weights", [(), WEIGHTS[:3], ("gates",)], ids=["plain", "weights", "gates"])
@pytest.mark.parametrize("tokens", [3, 26])
def test_against_single_tokens(mode, weights, tokens):
    q, k, v, options = problem(tokens, 4, 2, 5, 3, batch=1, dtype="float64", weights=weights)
    out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode], **options)
    single = {name: x[0] if name == "gates" else x for name, x in options.items()}
    expected, chosen = slow_nsa(q[0], k[0], v[0], **MODES[mode], **single)
    np.testing.assert_allclose(out[0], expected, rtol=1e-12, atol=1e-13)
    heads, tile = context.block_indices.shape[1], context.how.tile
    for h in range(4):
        for t in range(tokens):
            row = context.block_indices[0, h * heads // 4, t // tile]
            assert row[row >= 0].tolist() == chosen[h][t]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", list(MODES))
def test_bad_values_against_single_tokens(mode, bad):
    """A value that is no finite number reaches the queries that see it, by whichever branch, and no others."""
    q, k, v, _ = problem(26, 4, 2, 5, 3, batch=1, dtype="float64")
    v[0, 9, 1, 2] = bad
    out = reference.nsa(q, k, v, **MODES[mode])
    expected, _ = slow_nsa(q[0], k[0], v[0], **MODES[mode])
    np.testing.assert_allclose(out[0], expected, rtol=1e-12, atol=1e-13)
    assert not np.isfinite(out).all()


@pytest.mark.parametrize("causal", [True, False])
def test_groups_of_compressed_keys_where_there_are_none(causal):
    """A sequence that is shorter than a block has no compressed keys: their branch gives 0, and the window is all."""
    q, k, v, _ = problem(3, 4, 2, 5, 3, batch=1, dtype="float64")
    mode = {**MODES["mslk"], "causal": causal, "num_cmp_selected_blocks": 1}
    out = reference.nsa(q, k, v, **mode)
    expected, _ = slow_nsa(q[0], k[0], v[0], **mode)
    np.testing.assert_allclose(out[0], expected, rtol=1e-12, atol=1e-13)
    window = reference.window_attention(q, k, v, mode["window_size"], causal=causal)
    np.testing.assert_allclose(out, window / 3, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_groups_of_compressed_keys_against_single_tokens(causal, monkeypatch):
    monkeypatch.setattr(core, "CMP_GROUP", 3)
    q, k, v, _ = problem(45, 4, 2, 5, 3, batch=1, dtype="float64")
    mode = {**MODES["mslk"], "causal": causal, "num_cmp_selected_blocks": 2}
    expected, _ = slow_nsa(q[0], k[0], v[0], **mode, cmp_group=3)
    out = reference.nsa(q, k, v, **mode)[0]
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    assert abs(out - reference.nsa(q, k, v, **{**mode, "num_cmp_selected_blocks": None})[0]).max() > 1e-3


def test_eq_9_on_the_sizes_of_the_paper():
    how = core.selector("paper", 32, True, 256, 16, 64, 1, 2, 16)
    assert {64 // 16 * 3 + offset: times for offset, times in how.overlaps} == {11: 1, 12: 2, 13: 2, 14: 2, 15: 1}


# ---- Against dense attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", ["paper", "mslk"])
def test_all_selected_is_dense(mode, causal):
    """48 tokens are 6 whole blocks, so that mslk mode can select all of them too."""
    q, k, v, _ = problem(48, 4, 2, 8, 6, dtype="float64")
    dense = reference.block_sparse_attention(q, k, v, layout="BSND", causal=causal)
    sizes = {"compress_block_size": 8, "num_selected_blocks": 6, "q_tile_size": 16}
    out = reference.nsa(q, k, v, mode=mode, causal=causal, gates=one_hot(q, 1), **sizes)
    np.testing.assert_allclose(out, dense, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", ["paper", "mslk"])
def test_wide_window_is_dense(mode, causal):
    q, k, v, _ = problem(47, 4, 2, 8, 6, dtype="float64")
    dense = reference.block_sparse_attention(q, k, v, layout="BSND", causal=causal)
    out = reference.nsa(q, k, v, mode=mode, causal=causal, window_size=47 if causal else 94, gates=one_hot(q, 2), compress_block_size=8)
    np.testing.assert_allclose(out, dense, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("window", "causal", "span"), [(1, True, (0, 0)), (5, True, (4, 0)), (5, False, (2, 2)), (1, False, (0, 0))])
def test_window_is_a_window(window, causal, span):
    q, k, v, _ = problem(23, 4, 2, 8, 6, dtype="float64")
    expected = reference.block_sparse_attention(q, k, v, layout="BSND", causal=causal, window=span)
    np.testing.assert_allclose(reference.window_attention(q, k, v, window, causal=causal), expected, rtol=1e-12, atol=1e-14)


def test_selected_branch_is_a_block_list():
    q, k, v, _ = problem(40, 4, 2, 8, 6, dtype="float64")
    k_cmp, _ = reference.compress_kv(k, v, 8)
    chosen = reference.score_and_select_blocks(q, k_cmp, 2, 8, q_tile_size=16, mode="mslk")
    expected, expected_lse = reference.block_sparse_attention(
        q, k, v, chosen, block_shape=(16, 8), layout="BSND", causal=True, return_lse=True
    )
    out, lse = reference.selected_attention(q, k, v, chosen, 8, q_tile_size=16, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse.swapaxes(1, 2), expected_lse, rtol=1e-12, atol=1e-14)


# ---- Rules ------------------------------------------------------------------------------------------------------------


def moved(mode, which, at, routing):
    """Tokens whose output moves when token `at` of q, k or v does."""
    q, k, v, _ = problem(40, 2, 1, 6, batch=1, dtype="float64", seed=3)
    arrays = {"q": q, "k": k, "v": v}
    plain = reference.nsa(**arrays, **mode, block_indices=routing)
    changed = arrays[which].copy()
    changed[0, at] += 1.0
    return np.flatnonzero(abs(reference.nsa(**{**arrays, which: changed}, **mode, block_indices=routing) - plain)[0].max((1, 2)) > 1e-12)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("at", [1, 5, 17, 30, 39])
@pytest.mark.parametrize("mode", ["paper", "paper_strides"])
def test_paper_mode_never_looks_ahead(mode, which, at):
    assert moved(MODES[mode], which, at, None).min() >= at


@pytest.mark.parametrize("at", [5, 15, 18, 39])  # before the second block a query sees one compressed key, which then does not matter
@pytest.mark.parametrize("which", ["k", "v"])
def test_mslk_mode_looks_ahead_within_its_block(which, at):
    """With blocks chosen beforehand: a token reaches the queries of its own compressed block, up to l - 1 before it, and no other
    before it. The choice itself looks ahead to the end of the tile."""
    mode = MODES["mslk"]
    q, k, v, _ = problem(40, 2, 1, 6, batch=1, dtype="float64", seed=3)
    routing = reference.nsa(q, k, v, return_context=True, **mode)[1].block_indices
    first = moved(mode, which, at, routing)[0]
    assert first == at // 4 * 4
    assert moved(mode, which, at, None)[0] >= at // 8 * 8


def test_early_rows_of_paper_mode_have_no_compressed_block():
    q, k, v, _ = problem(26, 4, 2, 5, 3, dtype="float64")
    _, context = reference.nsa(q, k, v, return_context=True, **MODES["paper"])
    assert np.isneginf(context.lse["compressed"]).all(axis=(0, 2)).tolist() == [t < 3 for t in range(26)]
    assert (context.sequences[0].out[0][:, :3] == 0).all()


def test_dead_rows_of_mslk_mode_are_zero():
    """With one block a tile, a tile's first queries can come before it."""
    q, k, v, _ = problem(64, 2, 1, 6, batch=1, dtype="float64", seed=1)
    mode = {"mode": "mslk", "compress_block_size": 4, "num_selected_blocks": 1, "window_size": 2, "q_tile_size": 32}
    out, context = reference.nsa(q, k, v, return_context=True, gates=one_hot(q, 1), **mode)
    dead = np.isneginf(context.lse["selected"])
    assert dead.any()
    assert not dead.all()
    assert (out[dead] == 0).all()
    grads = reference.nsa_backward(np.ones_like(out), context)
    assert all(np.isfinite(x).all() for x in grads if x is not None)
    assert (grads.dq[dead] == 0).all()


def test_ties_go_to_the_lower_index():
    q, k = np.zeros((1, 40, 2, 4)), np.zeros((1, 40, 1, 4))
    mslk = reference.nsa(q, k, k, return_context=True, **{**MODES["mslk"], "num_selected_blocks": 3})[1].block_indices
    assert mslk[0, 0].tolist() == [[0, 1, -1]] + [[0, 1, 2]] * 4
    sizes = {"compress_block_size": 4, "compress_stride": 4, "num_selected_blocks": 4, "window_size": 3}
    paper = reference.nsa(q, k, k, return_context=True, mode="paper", **sizes)[1].block_indices
    assert paper[0, 0, [3, 15, 38]].tolist() == [[0, -1, -1, -1], [0, 1, 2, 3], [0, 1, 8, 9]]


@pytest.mark.parametrize("mode", list(MODES))
def test_packed_is_each_sequence_alone(mode):
    q, k, v, options = problem([7, 0, 26, 1, 13], 4, 2, 5, 3, packed=True, dtype="float64", weights=WEIGHTS[:3])
    dout = tensors((*q.shape[:2], 3), dtype="float64", seed=5)
    out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode], **options)
    grads = reference.nsa_backward(dout, context)
    sums = [0, 0, 0]
    for n, part in enumerate(sequences(q, options)):
        *arrays, own = alone(n, q, k, v, options)
        one, own_context = reference.nsa(*arrays, return_context=True, **MODES[mode], **own)
        np.testing.assert_array_equal(out[part], one[0])
        own_grads = reference.nsa_backward(dout[None, part], own_context)
        for a, b in zip(grads[:3], own_grads[:3], strict=True):
            np.testing.assert_array_equal(a[part], b[0])
        sums = [a + b for a, b in zip(sums, own_grads[3:6], strict=True)]
    for a, b in zip(grads[3:6], sums, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("packed", [False, True])
def test_own_routing_given_back_changes_nothing(mode, packed):
    q, k, v, options = problem([7, 26] if packed else 26, 4, 2, 5, 3, packed=packed, dtype="float64")
    out, context = reference.nsa(q, k, v, return_context=True, **MODES[mode], **options)
    np.testing.assert_array_equal(reference.nsa(q, k, v, block_indices=context.block_indices, **MODES[mode], **options), out)
    assert context.block_indices.dtype == np.int32


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


def test_parts_make_the_whole():
    q, k, v, options = problem([7, 26, 13], 4, 2, 5, 3, packed=True, dtype="float64", weights=WEIGHTS[:3])
    cu, mode = options["cu_seqlens"], MODES["mslk"]
    k_cmp, v_cmp = reference.compress_kv(k, v, 4, options["w_k_compress"], options["w_v_compress"], cu_seqlens=cu)
    assert k_cmp.shape == (1 + 6 + 3, 2, 5)
    chosen = reference.score_and_select_blocks(q, k_cmp, 2, 4, q_tile_size=8, cu_seqlens=cu, mode="mslk")
    branches = [
        reference.compressed_attention(q, k_cmp, v_cmp, 4, cu_seqlens=cu, mode="mslk"),
        reference.selected_attention(q, k, v, chosen, 4, q_tile_size=8, cu_seqlens=cu),
        reference.window_attention(q, k, v, 3, cu_seqlens=cu),
    ]
    out = reference.gate_and_combine(*branches, reference.compute_gates(q, options["gate_proj_weight"]))
    np.testing.assert_allclose(out, reference.nsa(q, k, v, **mode, **options), rtol=1e-13, atol=1e-14)


def test_strips_do_not_show(monkeypatch):
    q, k, v, _ = problem(40, 4, 2, 5, 3, dtype="float64")
    dout = tensors((2, 40, 4, 3), dtype="float64")
    for mode in MODES.values():
        whole, context = reference.nsa(q, k, v, return_context=True, **mode)
        whole_grads = reference.nsa_backward(dout, context)
        with monkeypatch.context() as patch:
            patch.setattr(core, "_STRIP_ELEMENTS", 600)
            out, context = reference.nsa(q, k, v, return_context=True, **mode)
            grads = reference.nsa_backward(dout, context)
        np.testing.assert_allclose(out, whole, rtol=1e-12, atol=1e-14)
        for a, b in zip(grads[:3], whole_grads[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


# ---- Gradients against central differences ------------------------------------------------------------------------------

STEP = 1e-5
BRANCHES = {"all": None, "compressed": 0, "selected": 1, "window": 2}


def central_differences(f, x, places):
    """Gradient of the scalar function `f` of the array `x` at some of its elements, one at a time; 0 elsewhere."""
    grad = np.zeros_like(x)
    for at in places:
        value = x[at]
        x[at] = value + STEP
        high = f()
        x[at] = value - STEP
        grad[at] = (high - f()) / (2 * STEP)
        x[at] = value
    return grad


def largest_errors(mode, branch, tokens=22, packed=False, groups=None):
    """Largest error of each gradient against central differences with frozen routing, over the gradient's largest magnitude: of a quarter of
    the elements. test_torch_agrees compares all."""
    rng = np.random.default_rng(9)
    names = ["w_k_compress", "w_v_compress", "gate_proj_weight" if branch == "all" else "gates"]
    batch = {"packed": True} if packed else {"batch": 1}
    q, k, v, options = problem([5, 9] if packed else tokens, 4, 2, 3, 2, dtype="float64", seed=7, weights=names, **batch)
    if branch != "all":
        options["gates"] = one_hot(q, BRANCHES[branch])
    dout = tensors((*q.shape[:-1], 2), dtype="float64", seed=8)
    options = {**mode, **options}
    if groups:
        options["num_cmp_selected_blocks"] = groups
    _, context = reference.nsa(q, k, v, return_context=True, **options)
    options["block_indices"] = context.block_indices
    _, context = reference.nsa(q, k, v, return_context=True, **options)
    grads = reference.nsa_backward(dout, context)
    arrays = {"dq": q, "dk": k, "dv": v, **{"d" + name: options[name] for name in names}}
    found = {}
    for name, x in arrays.items():
        places = [*np.ndindex(*x.shape)]
        places = [places[n] for n in rng.permutation(len(places))[: max(20, len(places) // 4)]]
        numeric = central_differences(lambda: float((reference.nsa(q, k, v, **options) * dout).sum()), x, places)
        exact = getattr(grads, name)
        found[name] = max(abs(exact[at] - numeric[at]) for at in places) / max(abs(exact).max(), 1e-3)
    assert {name for name in GRADIENTS if getattr(grads, name) is not None} == set(arrays)
    return found


@pytest.mark.sampled("options")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("branch", list(BRANCHES))
def test_central_differences(mode, branch):
    found = largest_errors(MODES[mode], branch)
    print(mode, branch, {name: f"{error:.1e}" for name, error in found.items()})
    assert max(found.values()) <= 1e-6


@pytest.mark.parametrize("mode", ["paper", "mslk"])
def test_central_differences_packed(mode):
    assert max(largest_errors(MODES[mode], "all", packed=True).values()) <= 1e-6


def test_central_differences_of_groups(monkeypatch):
    """The choice of groups is no part of what is given, so it may not hang on a hair here."""
    monkeypatch.setattr(core, "CMP_GROUP", 2)
    found = largest_errors({**MODES["mslk"], "compress_block_size": 2}, "compressed", groups=2)
    assert max(found.values()) <= 1e-6


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
