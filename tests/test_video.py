"""Orders, lists and densities of `blitz_attn.video` are compared with brute force over tokens. Arrays of every kind are permuted, and attended in
another order. The choice of rules, and schedules, are tested, too. Refusals are in tests/fuzz/refusals.py."""

import dataclasses
import pickle
import sys
import time
import tracemalloc

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing, video
from cases import DTYPES, bits_option
from fuzz import problems, video_oracle
from fuzz.draw import Draw

RULES = [
    video.Neighbourhood((1, 1, 1)),
    video.Neighbourhood.spatial(1),
    video.Neighbourhood.temporal(),
    video.SlidingTiles((2, 3, 3)),
    video.Radial(0.5),
]
EVERYTHING = video.Neighbourhood((None, None, None))
SPANS = [5, (5, 7, 6), 3, (2, 4, 9), 11]
TOKENS = sum(span if isinstance(span, int) else span[0] * span[1] * span[2] for span in SPANS)


def order_of(spans=SPANS, cube=(2, 3, 4)):
    return video.cube_order(video.Geometry(spans), cube)


@pytest.mark.parametrize("seed", range(1000, 1080))
@pytest.mark.parametrize("name", ["video.blocks", "video.choose_rules", "video.permute"])
def test_random_geometries_rules_and_blocks(name, seed):
    """All options are drawn together: grids with ragged edges, plain tokens, dense frames and tokens, heads with rules of their own, any block shape."""
    problems.load()[name].run(Draw(seed))


# ---- Orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [SPANS, [(13, 30, 45), 226], [226, (13, 30, 45)], [(33, 30, 52), 256], [512, (1, 64, 64)]], ids=str)
def test_an_order_is_a_permutation_and_full_cubes_are_aligned(spans):
    order = order_of(spans, (4, 4, 4))
    places = np.arange(order.geometry.num_tokens)
    assert order.indices.dtype == order.inverse.dtype == np.int64
    assert (np.sort(order.indices) == places).all()
    assert (order.indices[order.inverse] == places).all()
    tokens = video_oracle.tokens_of(spans)
    cubes = [None if token.grid is None else (token.grid, *video_oracle.cube_of(token, (4, 4, 4))) for token in tokens]
    in_order = [cubes[n] for n in order.indices]
    full = [cube for cube in in_order if cube is not None and cube[2] == cube[3]]
    assert in_order[: len(full)] == full  # full cubes come first
    for n in range(0, len(full), 64):  # sizes of full cubes in these geometries divide 64
        size = np.prod(full[n][2])
        for m in range(n, min(n + 64, len(full)), size):
            assert len(set(full[m : m + size])) == 1
    plain = [n for n, token in enumerate(tokens) if token.grid is None]
    assert order.indices[len(order.indices) - len(plain) :].tolist() == plain


@pytest.mark.parametrize("cube", [(1, 1, 9), (1, 7, 9), (1, 1, 100), (5, 7, 9), (100, 100, 100), (1, 1, 1)], ids=str)
def test_cubes_that_keep_the_order_of_the_model(cube):
    assert (order_of([(5, 7, 9), 4], cube).indices == np.arange(319)).all()
    assert (order_of([7], cube).indices == np.arange(7)).all()


def test_orders_are_values():
    order, same = order_of(), order_of([5, [5, 7, 6], 3, np.array([2, 4, 9]), np.int8(11)], np.array([2, 3, 4]))
    assert order == same
    assert hash(order) == hash(same)
    assert order != order_of(cube=(2, 3, 3))
    assert order.geometry.spans == tuple(SPANS)
    back = pickle.loads(pickle.dumps(order))
    assert back == order
    assert (back.indices == order.indices).all()
    assert (video.blocks(back, RULES) == video.blocks(order, RULES)).all()
    assert pickle.loads(pickle.dumps(RULES)) == RULES
    for array in (order.indices, order.inverse):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        order.cube = (1, 1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        order.geometry.spans = (1,)


# ---- Permuting arrays -------------------------------------------------------------------------------------------------

SHAPES = {"BNSD": (2, 3, TOKENS, 4), "BSND": (2, TOKENS, 3, 4), "BSH": (2, TOKENS, 12), "TND": (TOKENS, 3, 4)}


def torch_tensors(numbers):
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(numbers)
    return [tensor, tensor.bfloat16(), tensor.half(), tensor.double(), tensor.to(torch.int8), tensor > 50, tensor.to(torch.complex128)]


KINDS = {
    "numpy": lambda x: [x, x.astype(np.float16), x.astype(np.float64), x.astype(np.int8), x > 50, x.astype(np.complex128), x.astype(">f4")],
    "ml_dtypes": lambda x: [x.astype(pytest.importorskip("ml_dtypes").bfloat16)],
    "torch": torch_tensors,
    "jax": lambda x: [pytest.importorskip("jax.numpy").asarray(x)],
}


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_permute_and_restore_keep_kind_and_dtype(kind, layout):
    order, axis = order_of(), SHAPES[layout].index(TOKENS)
    numbers = np.random.default_rng(0).integers(0, 100, SHAPES[layout]).astype(np.float32)
    arrays = KINDS[kind](numbers)
    moved = order.permute(*arrays, layout=layout) if len(arrays) > 1 else (order.permute(*arrays, layout=layout),)
    for x, got in zip(arrays, moved, strict=True):
        assert type(got) is type(x)
        assert got.dtype == x.dtype
        there, plain = numbers.take(order.indices, axis), got.float() if kind == "torch" and got.dtype.itemsize == 2 else got
        assert (np.asarray(plain) == (there > 50 if "bool" in str(x.dtype) else there)).all()
        back = order.restore(got, layout=layout)
        assert bool((back == x).all())
        if kind != "jax":
            out = sys.modules["torch" if kind == "torch" else "numpy"].zeros_like(got)
            assert order.permute(x, layout=layout, out=out) is out
            assert bool((out == got).all())
            assert order.restore(got, layout=layout, out=(out,)) is out
            assert bool((out == x).all())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_views_become_contiguous(kind):
    """Models, for example, have arrays (B, S, H, D) that are viewed as (B, H, S, D)."""
    order = order_of()
    numbers = np.random.default_rng(0).standard_normal(SHAPES["BSND"])
    expected = order.permute(numbers, layout="BSND").swapaxes(1, 2)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        got = order.permute(torch.from_numpy(numbers).transpose(1, 2))
        assert got.is_contiguous()
        got = got.numpy()
    else:
        got = order.permute(numbers.swapaxes(1, 2))
        assert got.flags.c_contiguous
    assert (got == expected).all()


def test_log_sum_exps_have_the_tokens_on_the_third_axis():
    order, lse = order_of(), np.random.default_rng(0).standard_normal((2, 3, TOKENS))
    assert (order.restore(lse[..., order.indices]) == lse).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_torch_follows_what_it_must():
    torch = pytest.importorskip("torch")
    order, places = order_of(), torch.from_numpy(order_of().indices.copy())
    x = torch.randn(1, 2, TOKENS, 4, requires_grad=True)
    weights = torch.randn(1, 2, TOKENS, 4)
    (order.permute(x) * weights).sum().backward()
    assert torch.equal(x.grad, order.restore(weights))
    with torch.no_grad():
        assert not order.permute(x).requires_grad
    plain, more = x.detach(), torch.stack([x.detach(), x.detach() + 1])
    assert torch.equal(torch.func.vmap(order.permute)(more), more[:, :, :, places])
    assert torch.equal(torch.func.jvp(order.restore, (plain,), (weights,))[1], order.restore(weights))
    compiled = torch.compile(lambda y: order.permute(y, y + 1)[1], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(plain), plain[:, :, places] + 1)
    assert torch.equal(order.permute(plain.conj()), plain[:, :, places])
    negative = torch.complex(plain, -plain).conj().imag  # a view whose memory holds the other sign
    assert negative.is_neg()
    assert torch.equal(order.permute(negative), plain[:, :, places])
    assert order.permute(torch.empty(1, 1, TOKENS, 2, device="meta")).shape == (1, 1, TOKENS, 2)
    with torch.inference_mode():
        out = torch.empty(1, 2, TOKENS, 4)
        assert order.permute(plain, out=out) is out
    before = plain.clone()
    y = x * 1
    square = y**2  # torch keeps y for the gradient
    order.permute(plain, out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    assert torch.equal(plain, before)
    with pytest.raises(ValueError, match=r"^arrays\[0\]: expected a tensor that needs no gradient"):
        order.permute(x, out=torch.empty(1, 2, TOKENS, 4))


def test_jax_traces_it():
    jax = pytest.importorskip("jax")
    order, x = order_of(), np.random.default_rng(0).standard_normal((1, 1, TOKENS, 2), dtype=np.float32)
    assert (np.asarray(jax.jit(order.permute)(x)) == order.permute(x)).all()
    with pytest.raises(TypeError, match=r"^out: expected none for the JAX array arrays\[0\], got ndarray$"):
        order.permute(jax.numpy.asarray(x), out=x.copy())


# ---- Attention in the order of cubes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_rule_is_dense_attention(dtype):
    order = order_of()
    q, k, v = testing.make_qkv(1, 4, 2, TOKENS, TOKENS, 32, dtype=dtype)
    lists = video.blocks(order, EVERYTHING, (32, 16))
    out, lse = blitz_attn.block_sparse_attention(*order.permute(q, k, v), lists, return_lse=True, **bits_option(q))
    out, lse = order.restore(out, lse)
    ours, dense = testing.error_rule(out, q, k, v, **bits_option(q))
    assert testing.meets_error_rule(ours, dense, dtype, 3), (ours, dense)
    np.testing.assert_allclose(lse, reference.block_sparse_attention(q, k, v, return_lse=True, **bits_option(q))[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_sparse_rule_is_attention_under_its_mask(rule):
    """In float64, and in the model's order, the result is attention over the listed blocks, which hold all tokens that the rule sees."""
    order, shape = order_of(), (24, 12)
    q, k, v = (np.random.default_rng(n).standard_normal((1, 2, TOKENS, 8)) for n in range(3))
    lists = video.blocks(order, rule, shape, dense_frames=1)
    out = order.restore(blitz_attn.block_sparse_attention(*order.permute(q, k, v), lists))
    listed = sabi.to_token_mask(lists, TOKENS)[0, 0][np.ix_(order.inverse, order.inverse)]
    seen = video_oracle.seen(SPANS, (2, 3, 4), rule, 1)[np.ix_(order.inverse, order.inverse)]
    assert (listed >= seen).all()
    np.testing.assert_allclose(out, blitz_attn.block_sparse_attention(q, k, v, attn_mask=listed), atol=1e-12)


def test_gradients_come_back_in_the_order_of_the_model():
    torch = pytest.importorskip("torch")
    from blitz_attn.integrations import torch as blitz

    order = order_of()
    tensors = [torch.randn(1, 2, TOKENS, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lists = video.blocks(order, EVERYTHING)
    order.restore(blitz.block_sparse_attention(*order.permute(*tensors), lists)).square().sum().backward()
    ours = [x.grad.clone() for x in tensors]
    for x in tensors:
        x.grad = None
    torch.nn.functional.scaled_dot_product_attention(*tensors).square().sum().backward()
    for x, grad in zip(tensors, ours, strict=True):
        torch.testing.assert_close(grad, x.grad, rtol=1e-9, atol=1e-9)


# ---- Lists --------------------------------------------------------------------------------------------------------------


def test_blocks_of_a_cube_list_cubes():
    """Where each block holds whole cubes, its list has the blocks of the cubes that the rule sees, and no others."""
    order = order_of([(8, 16, 24)], (4, 4, 4))
    for rule in RULES:
        mask = sabi.to_block_mask(video.blocks(order, rule), 48)[0, 0]
        for a, b in np.ndindex(mask.shape):
            places = [np.unravel_index(n, (2, 4, 6)) for n in (a, b)]
            assert mask[a, b] == video_oracle.rule_of(rule)(*places, (2, 4, 6), 4)


@pytest.mark.parametrize("window", [(1, 1, 1), (3, 3, 3), (2, 4, 5), (3, None, 1), (9, 9, 9)], ids=str)
def test_every_cube_sees_as_many_sliding_tiles(window):
    counts = sabi.counts(video.blocks(order_of([(12, 20, 24)], (4, 4, 4)), video.SlidingTiles(window)))
    assert (counts == np.prod([n if w is None else min(w, n) for w, n in zip(window, (3, 5, 6), strict=True)])).all()


@pytest.mark.parametrize("window", [(1, 3, 5), (3, 5, 1), (3, 1, 3)], ids=str)
def test_odd_sliding_tiles_are_those_of_the_paper(window):
    """arXiv:2502.04507: the centre of a tile's window is kept half a window away from the edges."""
    counts = (3, 5, 6)
    tiles = np.stack(np.unravel_index(np.arange(90), counts), axis=-1)
    half = np.array(window) // 2
    centres = np.clip(tiles, half, np.array(counts) - 1 - half)
    paper = (np.abs(centres[:, None] - tiles) <= half).all(axis=-1)
    lists = video.blocks(order_of([(12, 20, 24)], (4, 4, 4)), video.SlidingTiles(window))
    assert (sabi.to_block_mask(lists, 90)[0, 0] == paper).all()


@pytest.mark.parametrize(("frames", "width"), [(40, 12), (9, 33), (70, 1), (17, 5)])
def test_radial_is_the_mask_of_the_paper_for_rows_of_tokens(frames, width):
    """The mask of arXiv:2506.19852, section 4.2, is for tokens k and l of frames i and j."""
    i, j, k, l = np.ogrid[:frames, :frames, :width, :width]  # noqa: E741
    power = 2 ** np.floor(np.log2(np.maximum(abs(i - j), 1))).astype(int)
    near = (power <= width) & ((abs(k - l) + 1) * power <= width)
    diagonal = (abs(i - j) % -(-power // width) == 0) & (k == l)
    paper = (near | diagonal).transpose(0, 2, 1, 3).reshape(frames * width, frames * width)
    order = order_of([(frames, 1, width)], (1, 1, 1))
    lists = video.blocks(order, video.Radial(), (1, 1))
    assert (sabi.to_block_mask(lists, frames * width)[0, 0] == paper).all()


def test_heads_have_rules_of_their_own():
    order = order_of()
    lists = video.blocks(order, RULES, (16, 8), dtype="uint16")
    assert lists.shape[:2] == (1, len(RULES))
    for n, rule in enumerate(RULES):
        own = video.blocks(order, rule, (16, 8))
        assert (sabi.to_block_mask(lists)[:, n] == sabi.to_block_mask(own)[:, 0]).all()


@pytest.mark.parametrize(
    ("cube", "size"), [((4, 4, 4), 64), ((4, 4, 4), 128), ((3, 5, 4), 60), ((1, 45, 80), 64), ((1, 1, 1), 128)], ids=str
)
def test_long_videos_are_quick(cube, size):
    order = order_of([(33, 45, 80), 6], cube)
    assert order.geometry.num_tokens == 118806
    for rule in (RULES[0], RULES[3], RULES[4]):
        start = time.process_time()
        lists = video.blocks(order, rule, (size, size), dense_frames=1)
        assert time.process_time() - start < 15  # it takes a tenth of a second, or about a second with cubes of one token; sanitizers need more
        if size == 128:
            share = video.density(order, rule, (size, size), dense_frames=1)
            assert share == pytest.approx(sabi.density(lists, -(-118806 // size)), rel=1e-12)


def test_density_is_counted_without_the_list():
    """The list would take 180 MB: it would have 6001 rows of 7501 entries, because the rows of the last tokens see everything."""
    order = order_of([(48, 80, 125), 64], (4, 4, 5))
    tracemalloc.start()
    found = video.density(order, video.Neighbourhood((1, 2, 2)), (80, 64), per_head=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24
    seen = [sum(min(x + r, n - 1) - max(x - r, 0) + 1 for x in range(n)) / n**2 for r, n in ((1, 12), (2, 20), (2, 25))]
    assert found.shape == (1, 1)
    assert np.prod(seen) < found[0, 0] < 1.2 * np.prod(seen)  # a block of keys from two cubes is listed if one of them is seen


def test_a_list_that_is_too_long_is_refused():
    order = order_of([(125, 80, 100)], (4, 4, 4))
    most = "block_shape: expected blocks so large that a list has at most 268435456 entries, got 250000 rows of up to 62500"
    with pytest.raises(ValueError, match=f"^{most}$"):
        video.blocks(order, EVERYTHING, (4, 16))


def test_blocks_of_a_chooser_are_added():
    """VSA attends to the blocks that it chooses. The list of a rule can add further blocks."""
    order = order_of([(8, 16, 16), 64], (4, 4, 4))
    q, k = (np.random.default_rng(n).standard_normal((1, 2, 2112, 32), dtype=np.float32) for n in range(2))
    ruled = video.blocks(order, video.Neighbourhood())
    chosen = blitz_attn.select_blocks_prefill(*order.permute(q, k), density=0.2)
    both = sabi.union(ruled, chosen)
    assert both.block_shape == (64, 64)
    masks = [sabi.to_block_mask(x, 33) for x in (both, ruled, chosen)]
    assert (masks[0] == (masks[1] | masks[2])).all()


# ---- Choosing rules -------------------------------------------------------------------------------------------------------


def test_keys_of_padding_have_no_share():
    """Queries of the first two frames look at their own frame, and more at padding. If padding counts, both rules keep the same share of these
    queries. Then the last two frames decide: their queries look a little at their own place in all frames."""
    order, rules = order_of([(4, 4, 6), 8], (1, 2, 2)), [video.Neighbourhood.spatial(), video.Neighbourhood.temporal()]
    frame, place = np.arange(96) // 24, np.arange(96) % 24
    q, k = np.zeros((2, 1, 1, 104, 32), np.float32)
    k[0, 0, np.arange(96), frame] = k[0, 0, np.arange(96), 4 + place] = k[0, 0, 96:, 31] = 1
    early, late = np.arange(48), np.arange(48, 96)
    q[0, 0, early, frame[early]], q[0, 0, early, 31], q[0, 0, late, 4 + place[late]] = 8, 20, 2
    q, k = order.permute(q, k)
    options = {"scale": 1.0, "sampled_rows": 96}
    assert video.choose_rules(q, k, order, rules, (4, 4), **options) == [1]
    assert video.choose_rules(q, k, order, rules, (4, 4), kv_lens=[96], **options) == [0]
    q[:, :, 96:], k[:, :, 96:] = np.nan, np.nan
    assert video.choose_rules(q, k, order, rules, (4, 4), kv_lens=[96], **options) == [0]


@pytest.mark.parametrize("seed", range(5))
def test_queries_of_padding_do_not_count(seed):
    """Only the first frame is valid. Its queries see all valid keys by the spatial rule. Queries of other frames see some of these keys by the
    temporal rule, and none by the spatial rule."""
    order, rules = order_of([(4, 4, 6)], (1, 2, 2)), [video.Neighbourhood.temporal(), video.Neighbourhood.spatial()]
    k = np.zeros((2, 1, 96, 24), np.float32)
    k[:, 0, np.arange(96), np.arange(96) % 24] = 1  # queries look a little at their own place
    k = order.permute(k)
    for rows in (1, 96):
        options = {"scale": 2.0, "sampled_rows": rows, "seed": seed}
        assert video.choose_rules(k[:1], k[:1], order, rules, (4, 4), kv_lens=[24], **options) == [1]
        assert video.choose_rules(k, k, order, rules, (4, 4), kv_lens=[0, 24], **options) == [1]
        assert video.choose_rules(k, k, order, rules, (4, 4), kv_lens=[0, 0], **options) == [0]  # no query counts, so the first rule is chosen


def test_equal_rules_and_dense_rows():
    order = order_of()
    q, k = (np.random.default_rng(n).standard_normal((TOKENS, 2, 8), dtype=np.float32) for n in range(2))
    assert video.choose_rules(q, k, order, [RULES[0]] * 3, layout="TND") == [0, 0]
    assert video.choose_rules(q, k, order, [RULES[0], EVERYTHING], (8, 8), layout="TND", sampled_rows=20) == [1, 1]
    assert video.choose_rules(q, k, order, RULES, layout="TND", dense_frames=9) == [0, 0]  # all rows are dense


@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_depend_on_neither_threads_nor_kind(dtype):
    torch = pytest.importorskip("torch")
    order = order_of()
    q, k = (np.random.default_rng(n).standard_normal((1, 2, TOKENS, 8), dtype=np.float32) for n in range(2))
    tensors = [torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in (q, k)]
    one, two = (video.choose_rules(*tensors, order, RULES, (8, 8), seed=5, num_threads=n) for n in (1, 2))
    assert one == two
    rounded = [testing.round_to(x, dtype) for x in (q, k)]
    assert one == video.choose_rules(*rounded, order, RULES, (8, 8), seed=5, **bits_option(rounded[0]))


# ---- Schedules ---------------------------------------------------------------------------------------------------------------


def test_schedules():
    assert video.Schedule() == video.Schedule(0, None, 1)
    assert [video.Schedule().density(n) for n in range(2)] == [None, None]
    schedule = video.Schedule(3, [0.5, 0.25], 4)
    assert schedule.densities == (0.5, 0.25)
    assert [schedule.density(n) for n in range(7)] == [1.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25]
    assert [n for n in range(12) if schedule.refreshes(n)] == [3, 7, 11]
    assert video.Schedule(densities=0.5).densities == (0.5,)
    assert hash(schedule) == hash(video.Schedule(3, (0.5, 0.25), 4))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
