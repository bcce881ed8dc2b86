"""What a block list keeps, against plain softmax, and budgets found by it."""

import json
import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import select, testing
from cases import DTYPES, bits_option
from fuzz.arrays import values_of
from test_select_prefill import KV, Q, ranges_of


def masses(q, k, causal, q_len, kv_len):
    """Softmax (H, q_len, kv_len) of one sequence; rows that see nothing are NaN."""
    k = np.repeat(k, q.shape[0] // k.shape[0], axis=0)
    scores = q[:, :q_len] @ k[:, :kv_len].swapaxes(1, 2) / np.sqrt(q.shape[2])
    if causal:
        scores[:, np.arange(kv_len) > np.arange(q_len)[:, None] + kv_len - q_len] = -np.inf
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        return weights / weights.sum(axis=2, keepdims=True)


def random_list(rng, *shape):
    """(*shape, 4) unsorted columns below 6, some rows shorter."""
    lists = np.argsort(rng.random((*shape, 6)), axis=-1)[..., :4].astype(np.int32)
    lists[np.arange(4) >= rng.integers(0, 5, shape)[..., None]] = -1
    return lists


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("every", [1, 2])
def test_against_softmax(layout, dtype, every):
    rng = np.random.default_rng(1)
    heads, kv_heads, tokens = 4, 2, 90
    q, k, v = testing.make_qkv(2, heads, kv_heads, tokens, tokens, 16, dtype=dtype, layout=layout)
    plain = [values_of(x, dtype) for x in testing.make_qkv(2, heads, kv_heads, tokens, tokens, 16, dtype=dtype)]
    lens = [tokens, tokens] if layout == "TND" else [90, 50]
    sabi = random_list(rng, 2, heads, 6)
    options = {"block_shape": (16, 16), "layout": layout, "causal": True, "every": every}
    if layout == "TND":
        options |= {"cu_seqlens_q": [0, 90, 180], "cu_seqlens_kv": [0, 90, 180]}
    else:
        options |= {"q_lens": lens, "kv_lens": lens}
    if layout == "BSH":
        options |= {"num_heads": heads, "num_kv_heads": kv_heads}
    options |= bits_option(q)
    kept, error = select.recall(q, k, sabi, **options), select.output_error(q, k, v, sabi, **options)
    assert kept.shape == (2, heads, 6)
    half = {"float64": 1e-10, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]  # of the dtype's own rounding of outputs
    for b, n in enumerate(lens):
        weights = masses(plain[0][b], plain[1][b], True, n, n)
        listed = np.zeros((heads, 6, 6), bool)
        for h, r in np.ndindex(heads, 6):
            listed[h, r, sabi[b, h, r][sabi[b, h, r] >= 0]] = True
        seen = listed[:, np.arange(n) // 16][:, :, np.arange(n) // 16]
        shares = np.where(seen, weights, 0).sum(axis=2)
        for r in range(6):
            here = shares[:, r * 16 : min((r + 1) * 16, n)]
            if r % every or not here.size:
                assert np.isnan(kept[b, :, r]).all()
            else:
                assert np.abs(kept[b, :, r] - here.mean(axis=1)).max() < 1e-4
        values = np.repeat(plain[2][b], 2, axis=0)[:, :n]
        at = np.arange(n) // 16 % every == 0
        dense = (weights @ values)[:, at]
        with np.errstate(invalid="ignore"):
            sparse = np.nan_to_num((np.where(seen, weights, 0) / shares[..., None]) @ values)[:, at]
        expected = np.sqrt(((sparse - dense) ** 2).sum(axis=(1, 2)) / (dense**2).sum(axis=(1, 2)))
        assert np.abs(error[b] - expected).max() < half * max(1, expected.max())


def captures(scales, tokens=256):
    """A capture for each layer: sharper scores, the more mass fewer blocks hold."""
    return [[[x * s for x in testing.make_qkv(1, 4, 2, tokens, tokens, 16, seed=n)]] for n, s in enumerate(scales)]


@pytest.mark.parametrize(
    ("budget", "measure", "target"),
    [("top_p", "mass", 0.9), ("density", "mass", 0.8), ("threshold", "mass", 0.85), ("top_p", "error", 0.2)],
)
def test_calibrate_meets_the_target(budget, measure, target):
    """Each head meets it, and would not with one step less."""
    layers, rules = captures([0.5, 1.5]), {"causal": True}
    found = select.calibrate(layers, target=target, measure=measure, budget=budget, block_shape=(16, 16), steps=6, **rules)
    assert np.shape(found.numbers) == (2, 4)
    step = -1 / 64 if budget == "threshold" else 1 / 64
    for n, ((q, k, v),) in enumerate(layers):
        options = found.options(n, heads=4, kv_heads=2, head_dim=16)
        numbers = np.array(options[budget])
        for less in (False, True):
            tried = numbers - step if less else numbers
            tried = np.clip(tried, 1 / 128, 1)
            sabi = blitz_attn.select_blocks_prefill(q, k, **(options | {budget: tried}), **rules)
            if measure == "mass":
                met = np.nanmean(select.recall(q, k, sabi, block_shape=(16, 16), **rules), axis=2)[0] >= target
            else:
                met = select.output_error(q, k, v, sabi, block_shape=(16, 16), **rules)[0] <= target
            if less:
                floor = numbers <= 1 / 64 if budget != "threshold" else numbers >= 1 - 1 / 64
                assert not met[~floor].any()
            else:
                assert met.all()


@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize(("scale", "target"), [(0.55, 0.9), (1, 1e-3), (0, 0.99)], ids=["below the grid", "one", "even"])
def test_calibrate_finds_thresholds_of_any_size(scale, target, steps):
    """Scores of many blocks are all smaller than any multiple of 2**-steps; and the best block alone, which every row keeps, may do."""
    q, k, v = (x * np.float32(scale) for x in testing.make_qkv(1, 2, 1, 4096, 4096, 16, seed=0))
    found = select.calibrate([[(q, k, v)]], target=target, budget="threshold", block_shape=(8, 8), steps=steps, every=8)
    numbers = np.array(found.numbers[0])
    assert (numbers == 1).all() if target < 0.5 else (numbers < 1 / 256).all()
    sabi = blitz_attn.select_blocks_prefill(q, k, threshold=numbers, block_shape=(8, 8))
    assert (np.nanmean(select.recall(q, k, sabi, block_shape=(8, 8), every=8), axis=(0, 2)) >= target).all()


def test_profiles_are_kept(tmp_path):
    chooser = select.Pooled((4, 8), "bound")
    profile = select.calibrate(captures([1.0]), target=0.9, chooser=chooser, block_shape=(16, 16), steps=3, causal=True)
    path = tmp_path / "profile.json"
    profile.save(path)
    assert select.Profile.load(path) == profile
    assert json.loads(path.read_text())["layers"] == 1
    with pytest.raises(ValueError, match=r"^profile: expected one of a model with .* = \(8, 2, 16\), got one with \(4, 2, 16\)$"):
        profile.options(0, heads=8, kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="^layer: expected 0 to 0, got 1$"):
        profile.options(1, heads=4, kv_heads=2, head_dim=16)
    whole = json.loads(path.read_text())
    for text in ("", "[]", "{}", json.dumps(whole | {"layers": 2}), json.dumps(whole | {"chooser": {"kind": "best"}})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^path: expected .+, got .+"):
            select.Profile.load(path)


PROFILE = {
    "heads": 4, "kv_heads": 2, "head_dim": 16, "chooser": {"kind": "pooled"}, "block_shape": [16, 16], "budget": "top_p",
    "numbers": [[0.5, 0.9, 1, 0.25], [1, 1, 1, 1]], "measure": "mass", "target": 0.9, "format": "blitz_attn profile 1", "layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": 64.5}, "a profile whose head_dim is an integer from 1 to 576, got 64.5"),
        ({"head_dim": 0}, "a profile whose head_dim is an integer from 1 to 576, got 0"),
        ({"head_dim": 577}, "a profile whose head_dim is an integer from 1 to 576, got 577"),
        ({"head_dim": "16"}, "a profile whose head_dim is an integer from 1 to 576, got '16'"),
        ({"heads": True}, "a profile whose heads is an integer of at least 1, got True"),
        ({"heads": 2}, "a profile with a list of 2 numbers for layer 0, one per head, got [0.5, 0.9, 1, 0.25]"),
        ({"kv_heads": -2}, "a profile whose kv_heads is an integer of at least 1, got -2"),
        ({"kv_heads": 3}, "a profile whose kv_heads is a divisor of its 4 heads, got 3"),
        ({"kv_heads": None}, "a profile whose kv_heads is an integer of at least 1, got None"),
        ({"layers": 0}, "a profile whose layers is an integer of at least 1, got 0"),
        ({"layers": 10**400}, f"a profile whose layers is an integer of at least 1, got {'1' + '0' * 199}..."),
        ({"layers": 3}, "a profile whose numbers is a list for each of its 3 layers, got [[0.5, 0.9, 1, 0.25], [1, 1, 1, 1]]"),
        ({"numbers": 0.9}, "a profile whose numbers is a list for each of its 2 layers, got 0.9"),
        ({"numbers": [[1] * 4, "high"]}, "a profile with a list of 4 numbers for layer 1, one per head, got 'high'"),
        ({"numbers": [[1] * 4, [1, 1, 1.5, 1]]}, "a profile with numbers above 0 and at most 1, got 1.5 for head 2 of layer 1"),
        ({"numbers": [[1] * 4, [1, 1, 1, float("nan")]]}, "a profile with numbers above 0 and at most 1, got nan for head 3 of layer 1"),
        ({"numbers": [["0.5"] * 4, [1] * 4]}, "a profile with numbers above 0 and at most 1, got '0.5' for head 0 of layer 0"),
        ({"block_shape": [16, 16, 16]}, "a profile whose block_shape is two integers of at least 1, got [16, 16, 16]"),
        ({"block_shape": [16, 0]}, "a profile whose block_shape is two integers of at least 1, got [16, 0]"),
        ({"budget": "top_k"}, "a profile whose budget is top_p, threshold or density, got 'top_k'"),
        ({"measure": "masses"}, "a profile whose measure is mass, error or loss, got 'masses'"),
        ({"measure": ["mass"]}, "a profile whose measure is mass, error or loss, got ['mass']"),
        ({"target": 90}, "a profile whose target is a number above 0 and at most 1, got 90"),
        ({"target": "0.9"}, "a profile whose target is a number above 0 and at most 1, got '0.9'"),
        ({"target": 0}, "a profile whose target is a number above 0 and at most 1, got 0"),
        ({"chooser": [{"kind": "pooled"}]}, "a profile with one chooser, or with one for each of its 2 layers, got 1"),
        ({"chooser": None}, "a profile with choosers as Profile.save writes them, got None"),
        ({"chooser": {"kind": "pooled", "pool": [8, 8, 8]}}, "a profile with choosers as Profile.save writes them, got {'kind': 'pooled', 'pool': [8, 8, 8]}"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_whole_profile_is_refused(changes, text, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    assert select.Profile.load(path).numbers == ((0.5, 0.9, 1.0, 0.25), (1.0,) * 4)
    path.write_text(json.dumps(PROFILE | changes))
    with pytest.raises(ValueError, match=f"^path: expected {re.escape(text)}$"):
        select.Profile.load(path)


@pytest.mark.parametrize("name", [name for name in PROFILE if name not in ("format", "chooser")])
def test_a_file_without_a_field_of_a_profile_is_refused(name, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({field: x for field, x in PROFILE.items() if field != name}))
    with pytest.raises(ValueError, match=f"^path: expected a profile whose {name} is .+, got none$"):
        select.Profile.load(path)


def test_a_profile_of_another_chooser_is_not_written(tmp_path):
    profile = select.Profile(2, 1, 16, "pooled", (16, 16), "top_p", ((0.9, 0.9),), "mass", 0.9)
    with pytest.raises(TypeError, match="^chooser: expected Pooled, Antidiagonal, SampledRows or VerticalSlash, got str$"):
        profile.save(tmp_path / "profile.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"target": 0}, ValueError, "target: expected a number above 0 and at most 1, got 0"),
        ({"measure": "perplexity"}, ValueError, "measure: expected 'mass' or 'error', got 'perplexity'"),
        ({"budget": "top_k"}, ValueError, "budget: expected one of top_p, density, threshold, got 'top_k'"),
        ({"steps": 0}, ValueError, "steps: expected 1 to 20 halvings, got 0"),
        ({"layers": []}, ValueError, "layers: expected at least one layer, got none"),
        ({"layers": [[]]}, ValueError, "layers[0]: expected at least one capture (q, k, v), got none"),
        ({"layers": captures([1.0], 64)[0]}, TypeError,
         "layers[0][0]: expected a capture (q, k, v), got ndarray: is one level of brackets missing?"),
        ({"layers": [[captures([1.0], 64)[0][0][:2]]]}, ValueError, "layers[0][0]: expected a capture (q, k, v), got 2 arrays"),
        ({"layers": 5}, TypeError, "layers: expected a sequence or a generator of the layers' captures, got int"),
        ({"layers": [5]}, TypeError, "layers[0]: expected a sequence of captures (q, k, v), got int"),
        ({"layers": [captures([1.0], 64)[0], [[x[:, :, :, :8] for x in captures([1.0], 64)[0][0]]]]}, ValueError,
         "layers: expected (heads, kv_heads, head_dim) = (4, 2, 16) like the first capture, got (4, 2, 8)"),
        ({"layers": [[[np.zeros((2, 64, 8), np.float32)] * 3]]}, ValueError,
         "layers: expected captures in layout BNSD, BSND or BSH, got shapes (2, 64, 8) and (2, 64, 8) with BNSD"),
        ({"layout": "TND"}, ValueError,
         "layers: expected captures in layout BNSD, BSND or BSH, got shapes (1, 4, 64, 16) and (1, 2, 64, 16) with TND"),
        ({"sink": 3}, TypeError, "calibrate() got an unexpected keyword argument 'sink'"),
        ({"every": 0}, ValueError, "every: expected at least 1 row of blocks, got 0"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_bad_calls(changes, kind, sentence):
    call = {"layers": captures([1.0], 64), "target": 0.9, "block_shape": (16, 16)} | changes
    with pytest.raises(kind) as caught:
        select.calibrate(**call)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("measure", [select.recall, lambda q, k, sabi, **options: select.output_error(q, k, k, sabi, **options)])
def test_bad_lists(measure):
    q, k, _ = captures([1.0], 64)[0][0]
    with pytest.raises(ValueError, match=r"^sabi: expected shape \(B or 1; H, Hkv or 1; R; W\), got \(4, 1\)$"):
        measure(q, k, np.zeros((4, 1), np.int32), block_shape=(16, 16))
    with pytest.raises(TypeError, match="^sabi: expected an array, got list$"):
        measure(q, k, [[[[0]]]], block_shape=(16, 16))
    with pytest.raises(TypeError, match="^sabi: expected uint16, int16, int32 or int64, got float64$"):
        measure(q, k, np.zeros((1, 1, 4, 1)), block_shape=(16, 16), every=2)


class WithoutViews:
    """An array for NumPy alone."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_recall_of_keys_without_views():
    q, k, _ = captures([1.0], 64)[0][0]
    sabi = np.array([[[[0, -1], [1, 0], [2, -1], [0, 3]]]], np.int32)
    expected = select.recall(q, k, sabi, block_shape=(16, 16), causal=True)
    np.testing.assert_array_equal(select.recall(q, WithoutViews(k), sabi, block_shape=(16, 16), causal=True), expected)


# ---- Where the queries see runs of keys, or stand elsewhere -------------------------------------------------------


def test_measures():
    """Recall and error over the keys that the ranges let a query see."""
    q, k, v = testing.make_qkv(1, 2, 1, Q, KV, 16, 16, seed=9)
    sees = ranges_of("empty")
    options = {"kv_ranges": sees, "block_shape": (16, 16)}
    every = blitz_attn.select_blocks_prefill(q, k, top_p=1.0, **options)
    some = blitz_attn.select_blocks_prefill(q, k, top_k=1, sink=0, recent=0, **options)
    kept = select.recall(q, k, every, **options)
    rows = [sees[r : r + 16] for r in range(0, Q, 16)]
    blind = [bool((row[:, 0] >= row[:, 1]).all()) for row in rows]
    assert any(blind)
    assert (np.isnan(kept) == blind).all()
    assert np.nanmin(kept) > 0.9999
    assert select.output_error(q, k, v, every, **options).max() < 1e-6
    assert np.nanmin(select.recall(q, k, some, **options)) < 0.9
    assert select.output_error(q, k, v, some, **options).min() > 0.1
    sparse = select.recall(q, k, some, every=2, **options)
    assert np.isnan(sparse[:, :, 1::2]).all()
    np.testing.assert_allclose(sparse[:, :, ::2], select.recall(q, k, some, **options)[:, :, ::2], atol=1e-6)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
def test_a_chunk_of_a_prompt_is_judged_where_it_stands(layout):
    """With everything that changes attention, against the log-sum-exps and the outputs of the two calls."""
    rng = np.random.default_rng(3)
    q, k, v = testing.make_qkv(1, 2, 1, 48, 160, 16, 16, seed=4)
    whole = {"causal": True, "q_begin": 64, "softcap": 2.0, "sinks": np.float32([0.5, -1]), "alibi_slopes": np.float32([0.1, 0])}
    whole |= {"attn_mask": np.where(rng.random((48, 160)) < 0.2, -np.inf, rng.standard_normal((48, 160))).astype(np.float32)}
    sabi = blitz_attn.select_blocks_prefill(q, k, top_k=2, sink=0, recent=1, block_shape=(16, 16), causal=True, q_begin=64)
    options = whole | {"block_shape": (16, 16)}
    out, all_out = (blitz_attn.block_sparse_attention(q, k, v, lists, **options) for lists in (sabi, None))
    lses = [
        blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options | {"sinks": None})[1] for lists in (sabi, None)
    ]  # sinks take mass from all keys in proportion
    if layout == "BSND":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if layout == "TND":
        q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {"cu_seqlens_q": [0, 48], "cu_seqlens_kv": [0, 160]}
    options["layout"] = layout
    kept = np.exp(lses[0] - lses[1]).astype(np.float64).reshape(1, 2, 3, 16).mean(axis=3)
    without = {name: x for name, x in options.items() if name != "sinks"}
    found = select.recall(q, k, sabi, **without)
    np.testing.assert_allclose(found, kept, rtol=1e-5)
    assert found.max() < 0.95
    np.testing.assert_allclose(select.recall(q, k, sabi, every=2, **without)[:, :, ::2], kept[:, :, ::2], rtol=1e-5)
    error = np.linalg.norm((out - all_out)[0], axis=(1, 2)) / np.linalg.norm(all_out[0], axis=(1, 2))
    np.testing.assert_allclose(select.output_error(q, k, v, sabi, **options)[0], error, rtol=1e-4)


def test_profiles():
    """Budgets are found under ranges that all captures share."""
    captures = [[testing.make_qkv(1, 2, 1, Q, KV, 16, 16, seed=s) for s in (1, 2)]]
    options = {"kv_ranges": ranges_of("documents"), "block_shape": (16, 16)}
    profile = select.calibrate(captures, target=0.8, steps=5, **options)
    chosen = profile.options(0, heads=2, kv_heads=1, head_dim=16)
    met = [
        np.nanmean(select.recall(q, k, blitz_attn.select_blocks_prefill(q, k, **chosen, kv_ranges=options["kv_ranges"]), **options), axis=2)
        for q, k, _ in captures[0]
    ]
    assert (np.mean(met, axis=0) >= 0.8).all()
    layers = [[(*x, x[0]) for x in captures[0]]]
    assert select.allocate(layers, density=0.6, **options).numbers[0]
