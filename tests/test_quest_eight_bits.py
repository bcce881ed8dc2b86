"""Summaries of 8-bit caches are those of the float32 keys that numbers and scales stand for."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import bits_option, same_bits
from exporters import released_view

EIGHT_BITS = ["int8", "float8_e4m3"]
SCALES = ["token", "head", "number"]
KV_HEADS = 3


def float8_numbers():
    """The 256 numbers of float8 e4m3, by its definition."""
    bits = np.arange(256)
    sign, exponent, fraction = np.where(bits & 0x80, -1.0, 1.0), bits >> 3 & 15, bits & 7
    numbers = np.where(exponent, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6) * sign
    numbers[(bits & 0x7F) == 0x7F] = np.nan
    return numbers.astype(np.float32)


class Cache:
    """A cache, its scales, and the float32 keys of each request; NaN scales where no request has a token."""

    def __init__(self, dtype, scales="token", lens=(1, 0, 16, 77), size=16, dim=24, rows=3, hnd=False, seed=0):
        rng = np.random.default_rng(seed)
        self.lens, self.size, self.rows, self.dim, self.hnd = np.asarray(lens), size, rows, dim, hnd
        self.blocks = -(-self.lens // size)
        count = int(self.blocks.sum()) + 2
        order = rng.permutation(count)
        self.own = [order[end - n : end] for end, n in zip(np.cumsum(self.blocks), self.blocks, strict=True)]
        raw = rng.integers(0, 256, (count, size, KV_HEADS, dim), dtype=np.uint8)
        if dtype == "float8_e4m3":
            raw[(raw & 0x7F) == 0x7F] = 5
        shape = {"token": raw.shape[:3], "head": (KV_HEADS,), "number": ()}[scales]
        self.scale = (rng.random(shape, dtype=np.float32) + np.float32(0.1)) * np.float32(0.3)
        self.raw = raw
        if scales == "token":
            used = np.zeros((count, size), bool)
            for pages, n in zip(self.own, self.lens, strict=True):
                t = np.arange(n)
                used[pages[t // size], t % size] = True
            self.scale[~used] = np.nan
        self.dtype, self.bits = dtype, {"dtype": "float8_e4m3"} if dtype == "float8_e4m3" else {}
        self.block_tables = self._table(self.own)
        needed = -(-self.blocks // rows)
        order = rng.permutation(int(needed.sum()) + 1)
        self.summary_own = [order[end - n : end] for end, n in zip(np.cumsum(needed), needed, strict=True)]
        self.tables, self.count = self._table(self.summary_own), len(order)

    def _table(self, own):
        table = np.full((len(own), max(map(len, own)) + 1), -5, np.int32)
        for row, pages in zip(table, own, strict=True):
            row[: len(pages)] = pages
        return table

    @property
    def numbers(self):
        """float32 (pages, size, N, D): products of numbers and scales, rounded once."""
        values = self.raw.view(np.int8).astype(np.float32) if self.dtype == "int8" else float8_numbers()[self.raw]
        scale = self.scale[..., None] if self.scale.ndim == 3 else np.reshape(self.scale, (-1, 1))
        return values * scale

    def given(self):
        """(k_cache, k_scale) as the call takes them."""
        raw = self.raw.view(np.int8) if self.dtype == "int8" else self.raw
        scale = self.scale.swapaxes(1, 2) if self.hnd and self.scale.ndim == 3 else self.scale
        return raw.swapaxes(1, 2) if self.hnd else raw, scale

    def blank(self):
        return np.full((self.count, self.rows, KV_HEADS, self.dim), 77, np.float32)

    def summarise(self, op=blitz_attn.quest_prefill_metadata, scale=None, **options):
        outputs = [self.blank() for _ in range(3)]
        k_cache, k_scale = self.given()
        layout = {"kv_layout": "HND" if self.hnd else "NHD"}
        how = {"k_scale": k_scale if scale is None else scale} | layout | self.bits
        assert op(k_cache, self.block_tables, self.lens, self.tables, *outputs[:2], meanblocks=outputs[2], **how | options) is None
        return outputs

    def expected(self, start_lens=None):
        """(largest, smallest, mean in float64), written out; 0 behind the last block, and 77 where nothing is written."""
        outputs = [self.blank().astype(np.float64) for _ in range(3)]
        numbers = self.numbers
        for b, (pages, n) in enumerate(zip(self.own, self.lens, strict=True)):
            start = 0 if start_lens is None else start_lens[b]
            for i in range(start // self.size, len(self.summary_own[b]) * self.rows) if start < n else ():
                at = self.summary_own[b][i // self.rows], i % self.rows
                keys = numbers[pages[i], : n - i * self.size] if i < len(pages) else np.zeros((1, KV_HEADS, self.dim), np.float32)
                with np.errstate(invalid="ignore"):
                    for out, x in zip(outputs, (np.fmax.reduce(keys), np.fmin.reduce(keys), keys.astype(np.float64).mean(0)), strict=True):
                        out[at] = x
        return outputs

    def check(self, outputs, start_lens=None):
        largest, smallest, mean = self.expected(start_lens)
        np.testing.assert_array_equal(outputs[0], largest)  # of 0 and -0, which float8 has, either may come
        np.testing.assert_array_equal(outputs[1], smallest)
        np.testing.assert_allclose(outputs[2], mean, rtol=2.0**-22, atol=2.0**-20 * np.nanmax(np.abs(largest), initial=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize(
    ("size", "rows", "dim", "lens"),
    [(16, 3, 24, (1, 0, 16, 77)), (1, 4, 1, (5, 3, 1, 0)), (7, 1, 33, (20, 7, 8)), (64, 2, 128, (300,)), (1024, 2, 576, (1500, 9)), (5, 40, 100, (400,))],
)
def test_summaries_of_products(size, rows, dim, lens, dtype, hnd, scales, isa_level):
    cache = Cache(dtype, scales, lens, size, dim, rows, hnd, seed=dim)
    cache.check(cache.summarise())
    cache.check(cache.summarise(reference.quest_prefill_metadata))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_from_a_length_on_and_by_any_threads(dtype, isa_level):
    cache = Cache(dtype, lens=(1, 0, 16, 77, 900), seed=3)
    for start_lens in ([0, 0, 15, 40, 899], [1, 0, 16, 77, 300]):
        cache.check(cache.summarise(start_lens=start_lens), start_lens)
    whole = cache.summarise()
    for threads in (1, 2, 5):
        assert all(same_bits(a, b) for a, b in zip(cache.summarise(num_threads=threads), whole, strict=True))


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2]])
def test_some_of_the_summaries(wanted):
    cache = Cache("int8", "head")
    (k_cache, k_scale), expected = cache.given(), cache.summarise()
    outputs = [cache.blank() if i in wanted else None for i in range(3)]
    blitz_attn.quest_prefill_metadata(k_cache, cache.block_tables, cache.lens, cache.tables, *outputs[:2], meanblocks=outputs[2], k_scale=k_scale)
    for i in wanted:
        assert same_bits(outputs[i], expected[i])


def test_nan(isa_level):
    """As in float caches: a NaN among numbers is ignored, whether the number or the scale is NaN; a channel of NaN alone is NaN."""
    cache = Cache("float8_e4m3", lens=(64,), size=16, dim=40)
    page = cache.own[0]
    cache.raw[page[0], 3] = 0x7F
    cache.raw[page[1], :, 1, 7] = 0xFF
    cache.scale[page[2], 5, 2] = np.nan
    cache.scale[page[3], :, 0] = np.nan
    cache.scale[page[0], 9, 1] = np.inf
    high, low, _ = cache.summarise()
    expected = cache.expected()
    np.testing.assert_array_equal(high, expected[0])
    np.testing.assert_array_equal(low, expected[1])
    rows = [high[cache.summary_own[0][i // 3], i % 3] for i in range(4)]
    assert np.isfinite(rows[0][0]).all()
    assert np.argwhere(np.isnan(rows[1])).tolist() == [[1, 7]]
    assert np.isfinite(rows[2]).all()
    assert np.isnan(rows[3][0]).all()


def test_one_number_in_every_form():
    cache = Cache("int8", "number")
    expected = cache.summarise()
    for scale in (float(cache.scale), np.float32(cache.scale), np.float64(cache.scale), np.array(cache.scale)):
        assert all(same_bits(a, b) for a, b in zip(cache.summarise(scale=scale), expected, strict=True))


def test_views_and_kinds_of_arrays():
    """Interleaved keys and values, arrays of ml_dtypes, tensors of torch."""
    cache = Cache("float8_e4m3")
    expected = cache.summarise()
    both = np.zeros((2, *cache.raw.shape), np.uint8)
    both[0] = cache.raw
    wide = np.ascontiguousarray(both.transpose(1, 2, 3, 0, 4))
    cache.raw = wide[:, :, :, 0]
    assert all(same_bits(a, b) for a, b in zip(cache.summarise(), expected, strict=True))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    torch = pytest.importorskip("torch")
    raw, scale = np.ascontiguousarray(cache.raw), torch.from_numpy(cache.scale)
    for k_cache in (raw.view(ml_dtypes.float8_e4m3fn), torch.from_numpy(raw).view(torch.float8_e4m3fn)):
        outputs = [torch.from_numpy(cache.blank()) for _ in range(2)]
        blitz_attn.quest_prefill_metadata(k_cache, cache.block_tables, cache.lens, cache.tables, *outputs, k_scale=scale)
        assert all(same_bits(a.numpy(), b) for a, b in zip(outputs, expected[:2], strict=True))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_appending_keeps_summaries(dtype, scales, isa_level):
    """Token by token and in pieces, the summaries are those of the whole cache; the twin's, too."""
    rng, size, dim, requests = np.random.default_rng(4), 4, 24, 2
    named = {"kv_dtype": dtype}
    fixed = {"head": rng.random(KV_HEADS, dtype=np.float32) * np.float32(0.05) + np.float32(0.01), "number": 0.02}
    tables, summary_tables = np.arange(20, dtype=np.int32).reshape(requests, 10), np.array([[3, 1], [0, 2]])
    for op in (blitz_attn.append_paged_kv, reference.append_paged_kv):
        k_cache, v_cache = np.zeros((2, 20, size, KV_HEADS, dim), np.int8 if dtype == "int8" else np.uint8)
        scale = [np.full((20, size, KV_HEADS), np.nan, np.float32) if scales == "token" else fixed[scales] for _ in range(2)]
        high, low = np.full((2, 4, 5, KV_HEADS, dim), 7, np.float32)
        kept = {"maxblocks": high, "minblocks": low, "metadata_block_tables": summary_tables, "k_scale": scale[0], "v_scale": scale[1]}
        ends = np.array([0, 0])
        for step in ([1, 1], [3, 0], [1, 6], [9, 2], [0, 1], [7, 7]):
            ends = ends + step
            k, v = rng.standard_normal((2, sum(step), KV_HEADS, dim), dtype=np.float32)
            op(k, v, k_cache, v_cache, block_tables=tables, seq_lens=ends, q_lens=step, **kept, **named)
            expected = [np.full_like(high, 7) for _ in range(2)]
            bits = {"dtype": dtype} if dtype == "float8_e4m3" else {}
            blitz_attn.quest_prefill_metadata(k_cache, tables, ends, summary_tables, *expected, k_scale=scale[0], **bits)
            for row, n in zip(summary_tables, -(-ends // size), strict=True):
                for i in range(n):
                    at = row[i // 5], i % 5
                    assert same_bits(high[at], expected[0][at])
                    assert same_bits(low[at], expected[1][at])


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_selection_by_them_is_that_of_the_float_keys(dtype, isa_level):
    cache = Cache(dtype, lens=(700, 300), dim=64)
    high, low, _ = cache.summarise()
    keys = np.nan_to_num(cache.numbers)
    outputs = [cache.blank() for _ in range(2)]
    blitz_attn.quest_prefill_metadata(keys, cache.block_tables, cache.lens, cache.tables, *outputs)
    assert same_bits(high, outputs[0])
    q = np.random.default_rng(1).standard_normal((2, 2 * KV_HEADS, 64), dtype=np.float32)
    k_cache, k_scale = cache.given()
    arrays = q, k_cache, k_cache, cache.block_tables, cache.lens, (high, low), cache.tables
    named = {"kv_dtype": "float8_e4m3"} if dtype == "float8_e4m3" else {}
    got = blitz_attn.select_and_attend(*arrays, k=6, k_scale=k_scale, v_scale=k_scale, return_selected=True, **named)
    expected = blitz_attn.select_and_attend(q, keys, keys, *arrays[3:], k=6, return_selected=True)
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_allclose(got[0], expected[0], atol=1e-3)


BAD = [
    (ValueError, r"^k_scale: expected scales of shape \(\d+, 16, 3\), \(3,\) or \(\) for int8 k_cache, got none", {"k_scale": None}),
    (ValueError, r"^k_scale: expected shape \(\d+, 16, 3\) like k_cache, .*, got \(2,\)", {"k_scale": np.ones(2, np.float32)}),
    (TypeError, r"^k_scale: expected float32, got int64", {"k_scale": np.ones(3, np.int64)}),
    (ValueError, r"^k_scale: expected positive numbers within the range of float32, got -1", {"k_scale": -1.0}),
    (TypeError, r"^k_scale: expected", {"k_scale": "x"}),
    (TypeError, r"^maxblocks: expected dtype float32 with k_cache of int8, got float16", {"maxblocks": np.ones((9, 3, 3, 24), np.float16)}),
    (TypeError, r"^minblocks: expected", {"minblocks": np.ones((9, 3, 3, 24), np.int8)}),
    (ValueError, r"^k_scale: expected none with float32 k_cache, got shape", {"k_cache": np.ones((9, 16, 3, 24), np.float32)}),
    (ValueError, r"^dtype: expected 'float32', .*'int8' or 'float8_e4m3', got 'int4'", {"dtype": "int4"}),
    (TypeError, r"^k_cache: expected", {"k_cache": np.ones((9, 16, 3, 24), np.int32)}),
]


@pytest.mark.parametrize(("error", "pattern", "changes"), BAD)
def test_refusals(error, pattern, changes):
    cache = Cache("int8")
    (k_cache, k_scale), outputs = cache.given(), [cache.blank() for _ in range(2)]
    call = {"k_cache": k_cache, "block_tables": cache.block_tables, "seq_lens": cache.lens, "metadata_block_tables": cache.tables}
    call |= {"maxblocks": outputs[0], "minblocks": outputs[1], "k_scale": k_scale}
    with pytest.raises(error, match=pattern):
        blitz_attn.quest_prefill_metadata(**call | changes)
    assert all((x == 77).all() for x in outputs)


def test_memory_that_is_shared():
    """Summaries may lie neither in the scales nor in the 8-bit keys."""
    cache = Cache("int8")
    k_cache, k_scale = cache.given()
    call = k_cache, cache.block_tables, cache.lens, cache.tables
    room = np.zeros(max(k_scale.size, cache.blank().size), np.float32)
    scale, high = room[: k_scale.size].reshape(k_scale.shape), room[: cache.blank().size].reshape(cache.blank().shape)
    with pytest.raises(ValueError, match="^maxblocks: expected .*k_scale"):
        blitz_attn.quest_prefill_metadata(*call, high, None, k_scale=scale)
    pool = np.zeros((*k_cache.shape[:3], 4 * k_cache.shape[3]), np.int8)
    same = pool.reshape(-1)[: k_cache.size].reshape(k_cache.shape)
    with pytest.raises(ValueError, match="^maxblocks: expected .*k_cache"):
        blitz_attn.quest_prefill_metadata(same, *call[1:], pool.view(np.float32), None, k_scale=1.0)


def test_a_released_view_is_no_scale():
    cache = Cache("int8")
    k_cache, k_scale = cache.given()
    q, lens = np.ones((len(cache.lens), 2 * k_cache.shape[2], k_cache.shape[3]), np.float32), (cache.block_tables, cache.lens)
    for call in (
        lambda scale: blitz_attn.quest_prefill_metadata(k_cache, *lens, cache.tables, cache.blank(), None, k_scale=scale),
        lambda scale: blitz_attn.paged_attention(q, k_cache, k_cache, *lens, k_scale=scale, v_scale=k_scale),
    ):
        with pytest.raises(TypeError, match="^k_scale: expected numbers, got memoryview$"):
            call(released_view())


@pytest.mark.parametrize(("cache", "named"), [(np.int8, "float8_e4m3"), (np.int8, "bfloat16"), (np.float32, "float8_e4m3"), (np.float32, "bfloat16")])
def test_a_dtype_that_the_cache_does_not_have_is_refused(cache, named):
    """Else the bits of one format would be summarised as numbers of the other."""
    keys, maxima = np.zeros((1, 2, 1, 8), cache), np.full((1, 2, 1, 8), 7, np.float32)
    scale = 1.0 if cache is np.int8 else None
    with pytest.raises(TypeError, match=f"^k_cache: expected {named} as dtype says, got {np.dtype(cache).name}$"):
        blitz_attn.quest_prefill_metadata(keys, np.array([[0]]), [2], np.array([[0]]), maxima, None, k_scale=scale, dtype=named)
    assert (maxima == 7).all()


def test_uint8_without_a_name_is_refused():
    keys, maxima = np.zeros((1, 2, 1, 8), np.uint8), np.zeros((1, 2, 1, 8), np.float32)
    with pytest.raises(TypeError, match=r"^k_cache: expected .*, got uint8 \(for uint8 that holds float8 bits, pass kv_dtype=\"float8_e4m3\", or dtype= where there is no kv_dtype\)$"):
        blitz_attn.quest_prefill_metadata(keys, np.array([[0]]), [2], np.array([[0]]), maxima, None, k_scale=1.0)


@pytest.mark.parametrize("cache", ["float32", "int8", "bfloat16"])
def test_tokens_named_bfloat16_beside_another_cache(cache):
    """`dtype` names the new tokens, and the cache only where that holds bits."""
    tables, bits = np.array([[1]]), np.full((1, 1, 8), 0x3F80, np.uint16)  # 1.0
    k_cache = np.zeros((2, 4, 1, 8), {"bfloat16": np.uint16}.get(cache, cache))
    maxima, minima = np.zeros((2, 1, 2, 1, 8), np.uint16 if cache == "bfloat16" else np.float32)
    scales = {"k_scale": np.ones((2, 4, 1), np.float32), "v_scale": np.ones((2, 4, 1), np.float32)} if cache == "int8" else {}
    blitz_attn.append_paged_kv(
        bits, bits, k_cache, k_cache.copy(), block_tables=tables, seq_lens=[1], maxblocks=maxima, minblocks=minima,
        metadata_block_tables=np.array([[0]]), dtype="bfloat16", **scales,
    )  # fmt: skip
    found = reference.to_float64(maxima[0, 0, 0], "bfloat16")
    np.testing.assert_allclose(found, 1, rtol=1e-6)



# ---- Blocks by their best keys --------------------------------------------------------------------------------------


def best_keys(cache, q, op=blitz_attn.select_blocks, **options):
    """(selected, counts, scores) of the method max."""
    k_cache, k_scale = cache.given()
    named = {"kv_dtype": cache.bits["dtype"]} if cache.bits else {}
    how = {"method": "max", "k_scale": k_scale, "kv_layout": "HND" if cache.hnd else "NHD", "return_scores": True} | named | bits_option(q)
    return op(q, k_cache, cache.block_tables, cache.lens, **how | options)


def score_bounds(cache, q, q_lens, per_query_head):
    """By how much the score of each request's blocks may err: float32's rounding of sums of products."""
    wide = np.abs(testing.to_float64(q, "bfloat16" if q.dtype == np.uint16 else None))
    rows = wide if per_query_head else wide.reshape(len(wide), KV_HEADS, -1, cache.dim).mean(axis=2)
    largest = np.abs(np.nan_to_num(cache.numbers)).max(axis=(0, 1))  # (N, D)
    products = (rows * np.repeat(largest, rows.shape[1] // KV_HEADS, axis=0)).sum(axis=-1)
    ends = np.cumsum(q_lens)
    return np.array([products[end - n : end].max(axis=0, initial=0) for end, n in zip(ends, q_lens, strict=True)])[..., None] * 2.0**-20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("q_lens", [None, [1, 0, 9, 3]])
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize(("size", "dim", "lens"), [(16, 24, (1, 0, 16, 77)), (1, 64, (1, 0, 16, 77)), (5, 7, (3, 0, 40, 1300))])
def test_best_keys(size, dim, lens, dtype, hnd, scales, q_dtype, q_lens, per_query_head, isa_level):
    """Scores and lists against the twin over numbers times scales, and over these as a float32 cache."""
    cache = Cache(dtype, scales, lens, size, dim, hnd=hnd)
    count = sum(q_lens) if q_lens else len(lens)
    q = testing.round_to(np.random.default_rng(2).standard_normal((count, 2 * KV_HEADS, dim)), q_dtype)
    options = {"per_query_head": per_query_head, "q_lens": q_lens, "sink": 0, "recent": 0}
    every = {"k": int(cache.blocks.max()), **options}
    selected, counts, scores = best_keys(cache, q, num_threads=1, **every)
    exact_selected, exact_counts, exact = best_keys(cache, q, reference.select_blocks, **every)
    assert same_bits(selected, exact_selected.astype(np.int32))
    assert same_bits(counts, exact_counts.astype(np.int32))
    allowed = score_bounds(cache, q, q_lens or [1] * len(lens), per_query_head)
    unused = np.isneginf(exact)
    assert (np.isneginf(scores) == unused).all()
    assert (np.abs(np.where(unused, 0, scores - np.where(unused, 0, exact))) <= allowed)[~unused].all()
    assert all(map(same_bits, (selected, counts, scores), best_keys(cache, q, num_threads=3, **every)))
    few, few_counts, few_scores = best_keys(cache, q, k=2, **options)
    for b, h in np.ndindex(few.shape[:2]):  # the two best of all scores
        own = scores[b, h, : counts[b, h]]
        wanted = np.sort(np.argsort(-own, kind="stable")[: few_counts[b, h]])
        assert (few[b, h, : few_counts[b, h]] == wanted).all()
        assert (few_scores[b, h, : few_counts[b, h]] == own[wanted]).all()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_choosing_by_best_keys_and_attending(dtype, scales, isa_level):
    """The bits of the two calls, by the function and by a plan."""
    cache = Cache(dtype, scales)
    k_cache, k_scale = cache.given()
    q = np.random.default_rng(3).standard_normal((4, 2 * KV_HEADS, cache.dim), dtype=np.float32)
    named = {"kv_dtype": "float8_e4m3"} if dtype == "float8_e4m3" else {}
    whole = q, k_cache, k_cache, cache.block_tables, cache.lens
    selected, counts, _ = best_keys(cache, q, k=3)
    expected = blitz_attn.paged_select_attention(*whole, selected, counts=counts, k_scale=k_scale, v_scale=k_scale, return_lse=True, **named)
    how = {"method": "max", "k": 3, "k_scale": k_scale, "v_scale": k_scale, "return_lse": True, "return_selected": True}
    plan = blitz_attn.PagedPlan(cache.block_tables, cache.lens, page_size=cache.size, **named)
    for got in (blitz_attn.select_and_attend(*whole, **how, **named), plan.select_and_attend(*whole[:3], **how)):
        assert all(map(same_bits, got, (*expected, selected, counts)))
    twin = reference.select_and_attend(*whole, **how, **named)
    assert all(map(same_bits, (selected, counts), (x.astype(np.int32) for x in twin[2:])))


def test_a_scale_that_is_no_number_makes_its_block_the_last():
    cache = Cache("int8", lens=(77,))
    q = np.random.default_rng(4).standard_normal((1, 2 * KV_HEADS, cache.dim), dtype=np.float32)
    cache.scale[cache.own[0][1], 3, 2] = np.nan
    selected, _, scores = best_keys(cache, q, k=5, sink=0, recent=0, ascending=False)
    assert np.isnan(scores[0, 2, -1])
    assert selected[0, 2, -1] == 1
    assert np.isfinite(scores[0, :2]).all()


@pytest.mark.parametrize(
    ("error", "sentence", "changes"),
    [
        (ValueError, r"k_scale: expected scales of shape \(\d+, 16, 3\), \(3,\) or \(\) for int8 k_cache, got none", {"k_scale": None}),
        (ValueError, r"k_scale: expected shape \(\d+, 16, 3\) like source, .*, got \(2,\)", {"k_scale": np.ones(2, np.float32)}),
        (ValueError, r"k_scale: expected positive numbers within the range of float32, got -1", {"k_scale": -1.0}),
        (TypeError, "k_scale: expected numbers, got memoryview", {"k_scale": "released"}),
        (TypeError, "source: expected float8_e4m3 as kv_dtype says, got int8", {"kv_dtype": "float8_e4m3"}),
        (TypeError, "source: expected float64 with q of float64, got int8", {"q": np.ones((4, 6, 24))}),
        (ValueError, "kv_dtype: expected 'float32', .*, got 'int9'", {"kv_dtype": "int9"}),
        (TypeError, "source: expected float32, float16, bfloat16 or float64, got int8", {"method": "mean"}),
    ],
)
def test_best_keys_refuse(error, sentence, changes):
    cache = Cache("int8")
    k_cache, k_scale = cache.given()
    q = np.ones((4, 2 * KV_HEADS, cache.dim), np.float32)
    call = {"q": q, "source": k_cache, "tables": cache.block_tables, "seq_lens": cache.lens, "k": 2, "method": "max", "k_scale": k_scale} | changes
    if isinstance(call["k_scale"], str):
        call["k_scale"] = released_view()
    with pytest.raises(error, match=f"^{sentence}"):
        blitz_attn.select_blocks(**call)


def test_summaries_have_no_scale():
    means, q = np.ones((1, 4, KV_HEADS, 24), np.float32), np.ones((1, 2 * KV_HEADS, 24), np.float32)
    with pytest.raises(ValueError, match="^k_scale: expected none with float32 meanblocks, got shape"):
        blitz_attn.select_blocks(q, means, np.array([[0]]), [4], k=1, method="mean", k_scale=np.ones(KV_HEADS, np.float32))
