"""`sparse_video`: self-attention of five classes of diffusers over lists of blocks is attention under the mask that the lists stand for."""

import math
import random

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", minversion="0.42")


from blitz_attn import video  # noqa: E402
from blitz_attn.integrations._diffusers import sparse  # noqa: E402
from blitz_attn.integrations.diffusers import SparseVideo, sparse_video  # noqa: E402
from blitz_attn.video import Geometry, Neighbourhood, Radial, Schedule, SlidingTiles  # noqa: E402
from cases_diffusers import (  # noqa: E402
    MODELS,
    _defaults,  # noqa: F401
    close,
    forward,
    geometry_of,
    inputs,
    logged,
    pytestmark,  # noqa: F401
    small_model,
    token_mask,
    under_masks,
)

FULL = Neighbourhood((None, None, None))
LOCAL = Neighbourhood((1, 0, 1))
SMALL = {"cube": (2, 2, 3), "block_shape": (12, 8), "min_tokens": 1}  # cubes and blocks for grids of a hundred tokens


def reasons():
    """The logged lines, except those that describe sparse layers."""
    return {text for text in logged if "of the blocks of" not in text}


@pytest.fixture
def computed(monkeypatch):
    """The lists of all calls of self-attention. None stands for all blocks."""
    lists, own = [], sparse.dense.computed

    def keep(*arguments, **options):
        lists.append(options.get("sabi"))
        return own(*arguments, **options)

    monkeypatch.setattr(sparse.dense, "computed", keep)
    return lists


def run(name, config, given):
    with sparse_video(small_model(name), config):
        return forward(small_model(name), given)


def masks_of(name, config, grid, text=6, layers=2):
    """The masks of a model's layers under a configuration that chooses no blocks."""
    order = video.cube_order(geometry_of(name, grid, text), config.cube)
    lists = video.blocks(order, config.rule, config.block_shape, dense_frames=config.dense_frames)
    mask = token_mask(lists, order, config.block_shape)
    return [None if layer in config.dense_layers else mask for layer in range(layers)]


# ---- Results -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("grid", [(3, 5, 7), (4, 4, 6)], ids=["ragged", "even"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_rule_that_lists_all_gives_native_results(name, grid, batch, computed):
    given = inputs(name, grid, batch, lengths=[6, 2][:batch])
    expected = forward(small_model(name), given)
    assert close(run(name, SparseVideo(FULL, **SMALL), given), expected)
    assert [x is not None for x in computed] == [True, True]
    assert not reasons()


@pytest.mark.parametrize("options", [{"rule": LOCAL, "density": 1.0}, {"density": 1.0}, {"rule": LOCAL, "schedule": Schedule(dense_steps=3)}])
@pytest.mark.parametrize("name", list(MODELS))
def test_density_1_and_dense_steps_give_native_results(name, options, computed):
    given = inputs(name, batch=2, lengths=[4, 6])
    expected = forward(small_model(name), given)
    assert close(run(name, SparseVideo(**options, **SMALL), given), expected)
    assert computed == [None, None]


def draw(name, seed):
    """A configuration, a grid and the arguments of a forward call, all drawn together."""
    rng = random.Random(f"{name} {seed}")
    grid, batch, text = tuple(rng.randint(1, 6) for _ in range(3)), rng.randint(1, 2), rng.randint(1, 9)
    text += text == math.prod(grid)  # otherwise, under_masks() would not tell self-attention from attention to the text

    def rule():
        kind = rng.choice((Neighbourhood, SlidingTiles, Radial))
        if kind is Radial:
            return Radial(rng.choice((0.2, 0.5, 1.0)))
        return kind(tuple(rng.choice((None, 1, 2) if kind is SlidingTiles else (None, 0, 1)) for _ in range(3)))

    config = SparseVideo(
        rng.choice((rule(), [rule(), rule()])), cube=tuple(rng.randint(1, 4) for _ in range(3)), min_tokens=1,
        block_shape=(rng.choice((4, 7, 16)), rng.choice((4, 6, 16))), dense_frames=rng.choice((0, 0, 1)), dense_layers=rng.choice(((), (), (1,))),
    )  # fmt: skip
    given = inputs(name, grid, batch, text, seed=seed, lengths=[rng.randint(1, text) for _ in range(batch)])
    return config, grid, text, given


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", list(MODELS))
def test_results_are_those_under_a_token_mask(name, seed, monkeypatch):
    config, grid, text, given = draw(name, seed)
    tokens = geometry_of(name, grid, text).num_tokens
    expected = under_masks(monkeypatch, small_model(name), given, tokens, masks_of(name, config, grid, text))
    assert close(run(name, config, given), expected)
    assert not reasons()


@pytest.mark.parametrize("name", list(MODELS))
def test_rules_leave_tokens_out(name):
    """A rule changes results by more than rounding, so the tests above would notice lists that are not used."""
    given = inputs(name)
    assert (run(name, SparseVideo(LOCAL, **SMALL), given) - forward(small_model(name), given)).abs().max() > 0.05


@pytest.mark.parametrize("rule", [LOCAL, None, [LOCAL, SlidingTiles((1, 2, 1))]], ids=["rule", "none", "heads"])
@pytest.mark.parametrize("name", list(MODELS))
def test_chosen_blocks_are_added_to_those_of_the_rule(name, rule, monkeypatch):
    grid = (4, 4, 6)
    given = inputs(name, grid, batch=2, lengths=[6, 3])
    config = SparseVideo(rule, density=0.2, **SMALL)
    chosen, own = [], sparse.select_blocks_prefill

    def choose(q, k, **options):
        assert options["density"] == 0.2
        assert not q.requires_grad
        chosen.append(own(q, k, **options))
        return chosen[-1]

    with monkeypatch.context() as patched:
        patched.setattr(sparse, "select_blocks_prefill", choose)
        found = run(name, config, given)
    assert [x.shape[:2] for x in chosen] == [(2, 2)] * 2
    order = video.cube_order(geometry_of(name, grid, 6), config.cube)
    own_cube = video.blocks(order, Neighbourhood((0, 0, 0)) if rule is None else rule, config.block_shape)
    masks = [token_mask(own_cube, order, config.block_shape) | token_mask(x, order, config.block_shape) for x in chosen]
    assert not masks[0].all()
    expected = under_masks(monkeypatch, small_model(name), given, order.geometry.num_tokens, masks)
    assert close(found, expected)


@pytest.mark.parametrize("name", list(MODELS))
def test_heads_get_the_rule_that_keeps_most(name, monkeypatch):
    grid, rules = (4, 4, 6), (Neighbourhood.spatial(), Neighbourhood.temporal(), SlidingTiles((2, 1, 1)))
    given = inputs(name, grid, batch=2, lengths=[6, 3])
    config = SparseVideo(choose_from=rules, **SMALL)
    best, lens, own = [], [], video.choose_rules

    def choose(*arguments, **options):
        best.append(own(*arguments, **options))
        lens.append(options["kv_lens"])
        return best[-1]

    with monkeypatch.context() as patched:
        patched.setattr(sparse.video, "choose_rules", choose)
        found = run(name, config, given)
    assert [len(x) for x in best] == [2, 2]
    assert lens == [[102, 99] if name == "hunyuan" else None] * 2
    order = video.cube_order(geometry_of(name, grid, 6), config.cube)
    each = torch.cat([token_mask(video.blocks(order, rule, config.block_shape), order, config.block_shape) for rule in rules], 1)[0]
    expected = under_masks(monkeypatch, small_model(name), given, order.geometry.num_tokens, [each[x] for x in best])
    assert close(found, expected)


def test_the_choice_of_rules_is_by_mass(monkeypatch):
    """Heads get the spatial rule if queries and keys depend on the frame alone, and the temporal rule if they depend on the place alone."""
    geometry = Geometry([(4, 4, 6)])
    order = video.cube_order(geometry, (1, 2, 2))
    frame, place = torch.arange(96) // 24, torch.arange(96) % 24
    codes = torch.stack([6 * torch.nn.functional.one_hot(x, 32).float() for x in (frame, place)], 1)[None]  # (1, S, 2, 32)
    config = SparseVideo(choose_from=(Neighbourhood.spatial(), Neighbourhood.temporal()), cube=(1, 2, 2), block_shape=(4, 4), min_tokens=1)
    with sparse_video(small_model("wan"), config) as handle:
        q = order.permute(codes, layout="BSND")
        assert handle._best_rules(q, q, order, {}) == [0, 1]


def test_the_text_padding_of_hunyuan_video_is_left_out(computed, monkeypatch):
    """The contents of the padding change nothing, and leaving the padding out needs no mask."""
    seen, own = [], sparse.dense.computed
    monkeypatch.setattr(sparse.dense, "computed", lambda *given, **options: seen.append(options) or own(*given, **options))
    given = inputs("hunyuan", batch=2, lengths=[6, 2])
    found = run("hunyuan", SparseVideo(LOCAL, **SMALL), given)
    assert [options.get("kv_lens") for options in seen] == [[111, 107]] * 2
    assert all("attn_mask" not in options for options in seen)
    given["encoder_hidden_states"][1, 2:] += 7
    given["encoder_hidden_states"][1, 2:] *= -3
    assert torch.equal(run("hunyuan", SparseVideo(LOCAL, **SMALL), given), found)


def test_keys_with_gaps_are_left_out(monkeypatch):
    """A mask may hide keys anywhere, and not only padding at the end. Here such a mask replaces the text mask of HunyuanVideo."""
    given, tokens = inputs("hunyuan", batch=2), geometry_of("hunyuan", (3, 5, 7), 6).num_tokens
    shown = torch.rand(2, 1, 1, tokens) < 0.6
    shown[..., 0] = True
    masks = [shown & mask for mask in masks_of("hunyuan", SparseVideo(LOCAL, **SMALL), (3, 5, 7))]
    expected = under_masks(monkeypatch, small_model("hunyuan"), given, tokens, masks)
    own = sparse.attend_here
    monkeypatch.setattr(sparse, "attend_here", lambda q, k, v, mask, *rest: own(q, k, v, shown, *rest))
    assert close(run("hunyuan", SparseVideo(LOCAL, **SMALL), given), expected)
    assert not reasons()
