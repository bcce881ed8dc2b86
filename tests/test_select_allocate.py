"""`allocate` chooses densities of layers and heads by the effect of their errors on the loss."""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select
from blitz_attn._select import allocation

BLOCK = (16, 16)
MASSES = (0.3, 0.6, 0.8, 0.95, 1)


def captures(weights, tokens=160, heads=4, kv_heads=2, seed=0):
    """One capture per layer. The gradients of a layer are multiplied by its weight."""
    rng = np.random.default_rng(seed)
    shapes = [(2, heads, tokens, 16), (2, kv_heads, tokens, 16), (2, kv_heads, tokens, 16), (2, heads, tokens, 16)]
    layers = [[[rng.standard_normal(shape, dtype=np.float32) for shape in shapes]] for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer[0][3] *= weight
    return layers


def test_blocks_are_shared_as_brute_force_shares_them():
    """No choice with at most as many blocks costs less. The work of choosers is counted in blocks, too."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        kept = np.cumsum(rng.integers(0, 4, (2, 2, 2, 3)), axis=3) + 1.0
        cost, choosing = rng.random((2, 2, 2, 3)), rng.integers(0, 4, (2, 2))
        most = rng.integers(3, 40)
        chooser, points = allocation._shared(kept, cost, choosing, most)
        layers = np.arange(2)

        def total(x, chooser, points, layers=layers):
            return sum(x[chooser[n], n, h, points[n][h]] for n in layers for h in range(2))

        own, paid = total(kept, chooser, points), total(cost, chooser, points)
        every = [
            (c, p)
            for c in itertools.product(range(2), repeat=2)
            for p in itertools.product(itertools.product(range(3), repeat=2), repeat=2)
        ]
        least = min(total(kept, c, p) for c, p in every)
        assert own <= max(most, least + choosing.max() * 2)
        used = own + choosing[chooser, layers].sum()
        costs = [total(cost, c, p) for c, p in every if total(kept, c, p) + choosing[c, layers].sum() <= used]
        assert paid <= min(costs) + 1e-9


def test_costs_are_those_of_the_reference():
    (case,) = captures([1.0], 40)[0]
    q, k, v, dout = case
    rules = {"block_shape": (8, 8), "causal": True}
    choosers = [select.Pooled(4), select.SampledRows(2)]
    found = allocation._costs(case, 4, np.array([0.4, 0.9]), choosers, (8, 8), {"causal": True})
    dense = reference.block_sparse_attention(q, k, v, **rules)
    for n, chooser in enumerate(choosers):
        for i, mass in enumerate((0.4, 0.9)):
            sabi = reference.select_blocks_prefill(q, k, chooser=chooser, top_p=mass, **rules)
            out = reference.block_sparse_attention(q, k, v, sabi, **rules)
            assert (found[n, 0, :, i] == (sabi >= 0).sum(axis=(0, 2, 3))).all()
            assert np.allclose(found[n, 1, :, i], (((out - dense) * dout).sum(axis=3) ** 2).sum(axis=(0, 2)), rtol=1e-3)
    assert (found[:, 2] == 2 * 15).all()


def test_work_of_choosing():
    shares = [
        allocation._work(x, 64) for x in (select.Pooled(8), select.Pooled((8, 4), "mean"), select.Antidiagonal(16), select.SampledRows(8))
    ]
    assert shares == [1 / 64, 1 / 64, 1 / 32, 1 / 16]


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_the_density_is_met_and_goes_where_it_counts(layout):
    layers, rules = captures([1, 30, 1]), {"causal": True, "layout": layout}
    arranged = layers
    if layout != "BNSD":
        arranged = [[[np.ascontiguousarray(x.swapaxes(1, 2)) for x in case] for case in layer] for layer in layers]
    if layout == "BSH":
        arranged = [[[x.reshape(*x.shape[:2], -1) for x in case] for case in layer] for layer in arranged]
        rules |= {"num_heads": 4, "num_kv_heads": 2}
    profile = select.allocate(arranged, density=0.7, block_shape=BLOCK, masses=MASSES, **rules)
    assert (profile.budget, profile.measure, profile.target) == ("top_p", "loss", 0.7)
    kept = []
    for n, ((q, k, _, _),) in enumerate(layers):
        options = profile.options(n, heads=4, kv_heads=2, head_dim=16)
        kept.append((blitz_attn.select_blocks_prefill(q, k, causal=True, **options) >= 0).sum() / (2 * 4 * 55))
    assert 0.6 < np.mean(kept) <= 0.7
    assert kept[1] > max(kept[0], kept[2]) + 0.1


def test_each_layer_gets_the_chooser_that_serves_it(tmp_path):
    """In the first layer, one token in every four blocks has most of the mass. Means of 16 tokens hide this token, and sampled rows find it."""
    layers = captures([1.0, 1.0], 256)
    layers[0][0][1][:, :, 5::64] *= 4
    choosers = [select.Pooled(16, "mean"), select.SampledRows(2)]
    profile = select.allocate(layers, density=0.5, chooser=choosers, block_shape=BLOCK, causal=True)
    assert type(profile.chooser) is tuple
    assert profile.options(0, heads=4, kv_heads=2, head_dim=16)["chooser"] == select.SampledRows(2)
    profile.save(tmp_path / "profile.json")
    assert select.Profile.load(tmp_path / "profile.json") == profile
    short = profile._replace(chooser=profile.chooser[:1])
    short.save(tmp_path / "profile.json")
    with pytest.raises(ValueError, match="^path: expected a profile with one chooser, or with one for each of its 2 layers, got 1$"):
        select.Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"density": 0}, ValueError, "density: expected a number above 0 and at most 1, got 0"),
        ({"masses": ()}, ValueError, "masses: expected rising numbers above 0 and at most 1, got []"),
        ({"masses": (0.9, 0.5)}, ValueError, "masses: expected rising numbers above 0 and at most 1, got [0.9, 0.5]"),
        ({"masses": (0.9, 1.5)}, ValueError, "masses: expected rising numbers above 0 and at most 1, got [0.9, 1.5]"),
        ({"masses": 0.5}, TypeError, "masses: expected a sequence of numbers, got float"),
        ({"masses": ["a"]}, TypeError, "masses: expected a sequence of numbers, got <U1 of shape (1,)"),
        ({"layers": captures([1.0], 64)[0]}, TypeError, "layers[0][0]: expected a capture (q, k, v, dout), got ndarray: is one level of"),
        (
            {"layers": [captures([1.0], 64)[0], [[x[:, :, :, :8] for x in captures([1.0], 64)[0][0]]]]},
            ValueError,
            "layers: expected (heads, kv_heads, head_dim) = (4, 2, 16) like the first capture, got (4, 2, 8)",
        ),
        (
            {"sink": 3},
            TypeError,
            "allocate() got an unexpected keyword argument 'sink'",
        ),
        ({"chooser": []}, ValueError, "chooser: expected at least one, got an empty list"),
        ({"chooser": "best"}, ValueError, "chooser: expected "),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_calls(changes, kind, sentence):
    with pytest.raises(kind) as caught:
        select.allocate(**({"layers": captures([1.0], 64), "density": 0.6, "block_shape": BLOCK} | changes))
    assert str(caught.value).startswith(sentence)


def test_gradients_of_another_shape_are_refused():
    layers = captures([1.0], 64)
    layers[0][0][3] = layers[0][0][3][:, :2]
    with pytest.raises(
        ValueError, match=r"^layers: expected dout of the output's shape, as \(B, H, S, D\) \(2, 4, 64, 16\), got \(2, 2, 64, 16\)$"
    ):
        select.allocate(layers, density=0.6, block_shape=BLOCK)


@pytest.mark.parametrize("chooser", ["pooled", "antidiagonal", "sampled_rows", "vertical_slash"])
@pytest.mark.parametrize("shape", [(48, 40), (7, 5)])
def test_profiles_of_named_choosers_fit_any_block_shape(tmp_path, chooser, shape):
    """The profile has a chooser that fits the block shape. The profile can be saved and loaded, and chooses what the chooser's name chooses."""
    layers = captures([1, 2])
    profile = select.allocate(layers, density=0.5, chooser=chooser, block_shape=shape, causal=True)
    profile.save(tmp_path / "profile.json")
    loaded = select.Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    for layer, [(q, k, v, _)] in enumerate(layers):
        options = loaded.options(layer, heads=4, kv_heads=2, head_dim=16)
        named = blitz_attn.select_blocks_prefill(q, k, **options | {"chooser": chooser}, causal=True)
        np.testing.assert_array_equal(blitz_attn.select_blocks_prefill(q, k, **options, causal=True), named)
        out = blitz_attn.select_and_attend_prefill(q, k, v, **options, causal=True)
        np.testing.assert_array_equal(out, blitz_attn.block_sparse_attention(q, k, v, named, block_shape=shape, causal=True))
