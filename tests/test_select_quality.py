"""Measures of what a block list keeps agree with their definitions over float64 attention, and `calibrate` finds budgets by these measures."""

import json
import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select, testing
from cases import DTYPES, LAYOUTS, bits_option, random_lists
from test_select_prefill import KV, Q, ranges_of

Q_LENS, KV_LENS = [90, 50], [130, 70]
RULES = {
    "causal": {"causal": True},
    "a chunk with all that changes attention": {
        "causal": True, "q_begin": [64, 3], "softcap": 2.0, "sinks": np.float32([0.5, -1, 0, 2]), "alibi_slopes": np.float32([0.1, 0, 0.2, 0]),
        "attn_mask": np.where(np.random.default_rng(3).random((90, 130)) < 0.2, -np.inf, 0.5).astype(np.float32),
    },
    "runs of keys, some of them empty": {"kv_ranges": np.random.default_rng(4).integers(-5, 140, (2, 90, 2)) * (np.arange(90) % 48 > 15)[:, None]},
}  # fmt: skip


def in_layout(layout, q, k, v, rules):
    """Arrays (B, H, S, D) and the options of a call in a layout."""
    rules = rules | {"layout": layout} | bits_option(q)
    if layout != "TND":
        heads = {"num_heads": 4, "num_kv_heads": 2} if layout == "BSH" else {}
        return [testing.to_layout(x, layout) for x in (q, k, v)], rules | heads | {"q_lens": Q_LENS, "kv_lens": KV_LENS}
    parts = [[x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lens)] for x, lens in ((q, Q_LENS), (k, KV_LENS), (v, KV_LENS))]
    if "kv_ranges" in rules:
        rules["kv_ranges"] = np.concatenate([x[:n] for x, n in zip(rules["kv_ranges"], Q_LENS, strict=True)])
    return list(map(np.concatenate, parts)), rules | {"cu_seqlens_q": np.cumsum([0, *Q_LENS]), "cu_seqlens_kv": np.cumsum([0, *KV_LENS])}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_measures(rule, every, dtype, layout):
    """A query's share is the ratio of its sums of weights with the list and without it. Sinks scale all weights alike and are left out."""
    given = testing.make_qkv(2, 4, 2, 90, 130, 16, dtype=dtype)
    lists, rules = random_lists(np.random.default_rng(1), 2, 4, 6, 9, empty=0.1), RULES[rule]
    exact = {"block_shape": (16, 16), "q_lens": Q_LENS, "kv_lens": KV_LENS} | rules | bits_option(given[0])
    (out, _), (all_out, _) = (reference.block_sparse_attention(*given, x, return_lse=True, **exact) for x in (lists, None))
    (_, lse), (_, all_lse) = (reference.block_sparse_attention(*given, x, return_lse=True, **exact | {"sinks": None}) for x in (lists, None))
    (q, k, v), options = in_layout(layout, *given, rules)
    options |= {"block_shape": (16, 16), "every": every}
    error = select.output_error(q, k, v, lists, **options)
    kept = select.recall(q, k, lists, **{name: x for name, x in options.items() if name != "sinks"})
    at, half = np.arange(90), {"float64": 1e-10, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]  # tolerances for the rounding of outputs
    assert kept.shape == (2, 4, 6)
    for b, h, r in np.ndindex(2, 4, 6):
        seen = (at // 16 == r) & (at < Q_LENS[b]) & np.isfinite(all_lse[b, h]) & (r % every == 0)
        share = np.exp(lse[b, h, seen] - all_lse[b, h, seen]).mean() if seen.any() else np.nan
        np.testing.assert_allclose(kept[b, h, r], share, rtol=0, atol=1e-5)
    for b, h in np.ndindex(2, 4):
        looked_at = (at < Q_LENS[b]) & (at // 16 % every == 0)
        apart, size = (np.linalg.norm(x[b, h, looked_at]) for x in (out - all_out, all_out))
        assert abs(error[b, h] - apart / size) < half * max(1, apart / size)


def captures(scales, tokens=256):
    """A capture for each layer. The larger a scale, the sharper are the scores, and the more mass is in few blocks."""
    return [[[x * s for x in testing.make_qkv(1, 4, 2, tokens, tokens, 16, seed=n)]] for n, s in enumerate(scales)]


@pytest.mark.parametrize(
    ("budget", "measure", "target"),
    [("top_p", "mass", 0.9), ("density", "mass", 0.8), ("threshold", "mass", 0.85), ("top_p", "error", 0.2)],
)
def test_calibrate_meets_the_target(budget, measure, target):
    """Each head meets the target, and would miss it with a budget that is one step tighter."""
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
    """Scores of many blocks may all be smaller than 2**-steps, or the best block alone, which every row keeps, may meet the target."""
    q, k, v = (x * np.float32(scale) for x in testing.make_qkv(1, 2, 1, 4096, 4096, 16, seed=0))
    found = select.calibrate([[(q, k, v)]], target=target, budget="threshold", block_shape=(8, 8), steps=steps, every=8)
    numbers = np.array(found.numbers[0])
    assert (numbers == 1).all() if target < 0.5 else (numbers < 1 / 256).all()
    sabi = blitz_attn.select_blocks_prefill(q, k, threshold=numbers, block_shape=(8, 8))
    assert (np.nanmean(select.recall(q, k, sabi, block_shape=(8, 8), every=8), axis=(0, 2)) >= target).all()


def test_profiles_are_saved_and_loaded(tmp_path):
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
def test_a_file_with_a_wrong_field_is_refused(changes, text, tmp_path):
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


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(ValueError, match=r"^path: expected the name of a file, got 'a\\x00b'$"):
        select.Profile.load("a\0b")


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
    with pytest.raises(ValueError, match=r"^sabi: expected shape \(B or 1; H, Hkv or 1; R; W\), got \(4,\)$"):
        measure(q, k, np.zeros(4, np.int32), block_shape=(16, 16))
    with pytest.raises(TypeError, match="^sabi: expected an array, got list$"):
        measure(q, k, [[[[0]]]], block_shape=(16, 16))
    with pytest.raises(TypeError, match="^sabi: expected uint16, int16, int32 or int64, got float64$"):
        measure(q, k, np.zeros((1, 1, 4, 1)), block_shape=(16, 16), every=2)


class WithoutViews:
    """An array with a shape and a dtype, which otherwise only exports DLPack."""

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


# ---- With kv_ranges ----------------------------------------------------------------------------------------------


def test_profiles():
    """Budgets are found for ranges that all captures share."""
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
