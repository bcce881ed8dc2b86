"""Every dtype, layout, head ratio, ragged tail, rule and instruction set level against the reference, over poisoned outputs."""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi, testing
from cases import DTYPES, LAYOUTS, attend, bits_option, check, dtype_of, random_lists, same_bits

# Two batch entries, sizes with tails in every direction; blocks of 16 x 24.
B, Q_LEN, KV_LEN, BLOCK_SHAPE = 2, 77, 131, (16, 24)
ROWS, COLUMNS = 5, 6

RULES = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (20, 7)},
    "causal window": {"causal": True, "window": (33, -1)},
    "lengths": {"q_lens": [77, 30], "kv_lens": [5, 131]},
    "causal lengths": {"q_lens": [60, 77], "kv_lens": [131, 40], "causal": True},
    "no keys": {"kv_lens": [0, 131], "q_lens": [77, 0]},
}
LISTS = {"all blocks": None, "lists": {"empty": 0.0}, "empty rows": {"empty": 0.4}}


def rule_options(rule, layout, heads, kv_heads):
    """Options of a call in a layout; TND says its lengths by where the sequences end."""
    options = dict(RULES[rule], layout=layout)
    if layout == "BSH":
        options.update(num_heads=heads, num_kv_heads=kv_heads)
    if layout == "TND":
        q_lens, kv_lens = options.pop("q_lens", [Q_LEN] * B), options.pop("kv_lens", [KV_LEN] * B)
        options.update(cu_seqlens_q=np.cumsum([0, *q_lens]), cu_seqlens_kv=np.cumsum([0, *kv_lens]))
    return options


def trimmed(q, k, v, options):
    """Arrays of as many tokens as the cumulative lengths of a TND call say."""
    if options["layout"] != "TND":
        return q, k, v
    q_end, kv_end = options["cu_seqlens_q"][-1], options["cu_seqlens_kv"][-1]
    return q[:q_end], k[:kv_end], v[:kv_end]


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix(dtype, layout, heads, kv_heads):
    rng = np.random.default_rng(7)
    for (rule, (name, kind)), dims in zip(itertools.product(RULES, LISTS.items()), itertools.cycle([(40, 24), (64, 64), (7, 33)])):
        options = rule_options(rule, layout, heads, kv_heads)
        q, k, v = trimmed(*testing.make_qkv(B, heads, kv_heads, Q_LEN, KV_LEN, *dims, dtype=dtype, layout=layout), options)
        lists = None
        if kind is not None:
            rows, columns = ROWS, COLUMNS
            if layout == "TND":
                rows = -(-int(np.diff(options["cu_seqlens_q"]).max()) // BLOCK_SHAPE[0])
                columns = -(-int(np.diff(options["cu_seqlens_kv"]).max()) // BLOCK_SHAPE[1])
            lists = random_lists(rng, B, heads, rows, columns, **kind)
        try:
            check(q, k, v, lists, block_shape=BLOCK_SHAPE, **options)
        except AssertionError as error:
            raise AssertionError(f"{rule}, {name}, dims {dims}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype):
    dims = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 160, 192, 200, 256, 320, 512, 575, 576]
    for n, head_dim in enumerate(dims):
        v_dim = dims[(n * 5 + 3) % len(dims)]
        q, k, v = testing.make_qkv(1, 2, 1, 35, 70, head_dim, v_dim, dtype=dtype, seed=n)
        try:
            check(q, k, v, causal=True)
        except AssertionError as error:
            raise AssertionError(f"D {head_dim}, Dv {v_dim}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_tile_sizes(dtype):
    lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    for n, q_len in enumerate(lengths):
        kv_len = lengths[(n * 8 + 5) % len(lengths)]
        q, k, v = testing.make_qkv(1, 1, 1, q_len, kv_len, 64, dtype=dtype, seed=n)
        for options in ({}, {"causal": True}, {"window": (5, 0)}):
            try:
                check(q, k, v, **options)
            except AssertionError as error:
                raise AssertionError(f"Sq {q_len}, Skv {kv_len}, {options}: {error}") from error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_shape", [(1, 1), (3, 5), (7, 64), (64, 7), (32, 32), (64, 64), (100, 300), (1000, 1)])
def test_any_block_shape(block_shape, dtype):
    q_len, kv_len = 150, 170
    rows, columns = -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
    lists = random_lists(np.random.default_rng(1), 1, 2, rows, columns, share=0.4, empty=0.1)
    for options in ({}, {"causal": True}, {"window": (30, 30)}):
        check(*testing.make_qkv(1, 2, 2, q_len, kv_len, 32, dtype=dtype), lists, block_shape=block_shape, **options)


@pytest.mark.parametrize("index_dtype", ["uint16", "int16", "int32", "int64"])
def test_index_dtypes_pads_and_broadcasts(index_dtype):
    rng = np.random.default_rng(4)
    q, k, v = testing.make_qkv(2, 4, 2, 100, 120, 16)
    for batch, heads in itertools.product((1, 2), (1, 4)):
        lists = random_lists(rng, batch, heads, 5, 6, empty=0.2, dtype=np.int64)
        typed = lists.astype(index_dtype)  # -1 wraps to 65535 in uint16
        out, lse = check(q, k, v, typed, block_shape=(20, 20))
        strided = np.repeat(np.repeat(typed, 2, axis=-1), 2, axis=0)[::2, :, :, ::2]
        assert (attend(q, k, v, strided, block_shape=(20, 20))[0] == out).all()
        after_the_pad = typed.copy()
        ends = (lists < 0).argmax(axis=-1)
        for row, end, kept in zip(after_the_pad.reshape(-1, 6), ends.reshape(-1), (lists >= 0).reshape(-1, 6), strict=True):
            if not kept.all():
                row[end + 1 :] = 3  # not looked at, though a duplicate
        any_negative = np.where(lists < 0, 65535 if index_dtype == "uint16" else -7, lists).astype(index_dtype)
        for other in (after_the_pad, any_negative):
            again, again_lse = attend(q, k, v, other, block_shape=(20, 20))
            assert (again == out).all()
            assert (again_lse == lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views(dtype, isa_level):
    q, k, v = testing.make_qkv(2, 4, 2, 40, 90, 24, dtype=dtype)
    out, lse = attend(q, k, v, causal=True)

    def spread(x):
        """The same values in a larger array: every second batch entry, heads reversed, rows apart."""
        b, h, s, d = x.shape
        wide = np.zeros((2 * b, h, s + 3, d + 5), x.dtype)
        wide[::2, ::-1, 1 : s + 1, 2 : d + 2] = x
        return wide[::2, ::-1, 1 : s + 1, 2 : d + 2]

    views = [spread(x) for x in (q, k, v)]
    assert not any(x.flags.c_contiguous for x in views)
    again, again_lse = attend(*views, causal=True)
    assert (again.view(np.uint8) == out.view(np.uint8)).all()
    assert (again_lse == lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_out_and_its_surroundings(dtype):
    q, k, v = testing.make_qkv(1, 2, 2, 37, 50, 20, dtype=dtype)
    wide = testing.round_to(np.full((1, 2, 40, 30), 7.0), dtype)
    bits = bits_option(q)
    expected = blitz_attn.block_sparse_attention(q, k, v, **bits)
    blitz_attn.block_sparse_attention(q, k, v, out=wide[:, :, 1:38, 4:24], **bits)
    assert (wide[:, :, 1:38, 4:24] == expected).all()
    rest = testing.to_float64(wide, dtype_of(q))
    rest[:, :, 1:38, 4:24] = 7.0
    assert (rest == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype):
    arrays = testing.make_qkv(1, 2, 1, 40, 60, 16, dtype=dtype)
    for scale in (0.0, 1.0, -0.5, 1e-3):
        check(*arrays, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype, isa_level):
    """Scores of a few hundred: exp() alone would overflow, and almost all weight is on one key."""
    q, k, v = testing.make_qkv(1, 1, 1, 50, 200, 16, dtype=dtype)
    out, lse = attend(q, k, v, scale=20.0)
    exact, exact_lse = testing.reference_attention(q, k, v, scale=20.0, **bits_option(q))
    assert np.abs(exact_lse).max() > 88  # beyond what float32's exp() takes
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6 if dtype != "float64" else 1e-13)
    limit = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert testing.error_of(out, exact, dtype).relative < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_rising_scores(dtype):
    """Keys score higher and higher, so that the running maximum moves all the way (and falls, the other way round)."""
    q, k, v = testing.make_qkv(1, 1, 1, 40, 500, 8, dtype="float64")
    q, k = 1.0 + q / 50, np.linspace(0, 30, 500)[:, None] * (1.0 + k / 50)
    check(*(testing.round_to(x, dtype) for x in (q, k, v)), scale=0.5)
    check(*(testing.round_to(x, dtype) for x in (q, -k, v)), scale=0.5)


def test_all_scores_far_below_zero():
    """Scores of -3e4: exp() of them is 0 in every precision, exp() of their differences is not."""
    q, k, v = testing.make_qkv(1, 1, 1, 9, 33, 4)
    q[...], k[...] = 100.0, -75.0
    check(q, k, v, scale=1.0)


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 7), (1, 2, 1, 0, 7), (2, 2, 2, 5, 0), (0, 1, 1, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_axes(dtype, sizes):
    q, k, v = testing.make_qkv(*sizes, 16, 8, dtype=dtype)
    out, lse = attend(q, k, v)
    assert out.shape == (*q.shape[:3], 8)
    assert (testing.to_float64(out, dtype) == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("rule", [{}, {"causal": True}, {"window": (100, 20)}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", [64, 32])
def test_same_bits(size, dtype, rule, isa_level):
    """On a problem with work for several threads: their number, the batch, the order of a row and a list of all blocks."""
    q, k, v = testing.make_qkv(2, 4, 2, 700, 900, 64, dtype=dtype)
    lists = sabi.random_with_frame(700, 900, (size, size), 0.5, batch=2, heads=4, dtype="int32")
    options = {"block_shape": (size, size), **rule}

    def assert_same(got, expected):
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))

    out, lse = attend(q, k, v, lists, num_threads=1, **options)
    for threads in (2, 3, 8):
        assert_same(attend(q, k, v, lists, num_threads=threads, **options), (out, lse))
    assert_same(attend(q[1:], k[1:], v[1:], lists[1:], **options), (out[1:], lse[1:]))
    assert_same(attend(q, k, v, backwards(lists), **options), (out, lse))
    dense = attend(q, k, v, **options)
    for block_shape in ((64, 64), (100, 7), (1024, 1024), (16, 32)):
        assert_same(attend(q, k, v, sabi.dense(700, 900, block_shape), **{**options, "block_shape": block_shape}), dense)


@pytest.mark.parametrize("tokens", [320, 384, 1100])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("listed", [False, True])
def test_same_bits_of_smaller_tiles(listed, dtype, tokens, isa_level):
    """Few tiles are cut smaller where that leaves the threads even shares."""
    q, k, v = testing.make_qkv(1, 1, 1, tokens, tokens, 64, dtype=dtype)
    lists = sabi.random_with_frame(tokens, tokens, (128, 64), 0.4) if listed else None
    one, *others = (attend(q, k, v, lists, block_shape=(128, 64), causal=not listed, num_threads=threads) for threads in (1, 2, 3, 5))
    assert all(same_bits(a, b) for other in others for a, b in zip(other, one, strict=True))


def backwards(lists):
    """Each row's entries in reverse, pads still last."""
    kept = sabi.counts(lists)[..., None]
    place = np.arange(lists.shape[-1])
    return np.where(place < kept, np.take_along_axis(lists, np.maximum(kept - 1 - place, 0), axis=-1), -1)
