"""`kv_ranges`: a run of keys for each query, forward and backward, against softmax attention under the mask that the ranges say."""

import numpy as np
import pytest

import blitz_attn
import cases_masks
from blitz_attn import reference, sabi, testing
from cases import DTYPES, ISA_LEVELS, bits_option, same_bits
from cases_masks import to_heads

Q, KV = 130, 210
UNIT = {"float64": 1e-11, "float32": 3e-5, "float16": 6e-3, "bfloat16": 5e-2}


def at(tokens):
    return np.arange(tokens)


def documents(q_len, kv_len):
    """Documents of 50 tokens: a query sees its own."""
    first = at(q_len) // 50 * 50
    return np.stack([first, first + 50], axis=-1)


def prefix(q_len, kv_len):
    """The first 70 tokens see one another; from there on, attention is causal."""
    return np.stack([np.zeros(q_len, np.int64), np.maximum(at(q_len) + 1, 70)], axis=-1)


def scattered(q_len, kv_len):
    """Runs that neither rise nor fall; some are empty, some reach beyond the keys."""
    rng = np.random.default_rng(5)
    runs = np.sort(rng.integers(-10, kv_len + 10, (q_len, 2)), axis=-1)
    runs[rng.random(q_len) < 0.2] = (40, 40)
    return runs


KINDS = {"documents": documents, "prefix": prefix, "scattered": scattered}


def mask_of(ranges, q_len, kv_len):
    keys = np.arange(kv_len)
    return np.broadcast_to((keys >= ranges[..., :1]) & (keys < ranges[..., 1:]), (2, q_len, kv_len))[:, None]


def expected(q, k, v, seen, dout=None):
    """Output, log-sum-exp and, with dout, the gradients, in float64."""
    return cases_masks.expected(q, k, v, np.where(seen, 0, -np.inf), dout)


def problem(dtype, layout, q_len=Q, heads=4):
    """Arrays in the layout and the same in float64 as (B, H, S, D)."""
    given = testing.make_qkv(2, heads, 2, q_len, KV, 32, dtype=dtype)
    exact = [testing.to_float64(x, dtype) for x in given]
    if layout == "TND":
        laid = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, x.shape[1], x.shape[3]) for x in given]
        options = {"layout": layout, "cu_seqlens_q": [0, q_len, 2 * q_len], "cu_seqlens_kv": [0, KV, 2 * KV]}
    else:
        laid = [testing.to_layout(x, layout) for x in given]
        options = {"layout": layout} | ({"num_heads": heads, "num_kv_heads": 2} if layout == "BSH" else {})
    return laid, exact, options | bits_option(given[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_mask(kind, dtype, layout, isa_level):
    arrays, exact, options = problem(dtype, layout)
    runs = KINDS[kind](Q, KV)
    given = np.concatenate([runs, runs]) if layout == "TND" else runs
    results = [
        blitz_attn.block_sparse_attention(*arrays, kv_ranges=x, return_lse=True, num_threads=n, **options)
        for n, x in ((1, given), (3, given.astype(np.int32)))
    ]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    out, lse = (to_heads(x, layout, 4) for x in (testing.to_float64(results[0][0], dtype), results[0][1]))
    for found, right in zip((out, lse), expected(*exact, mask_of(runs, Q, KV)), strict=True):
        np.testing.assert_allclose(found, right, rtol=UNIT[dtype], atol=UNIT[dtype])
    twin = reference.block_sparse_attention(*arrays, kv_ranges=given, return_lse=True, **options)
    assert np.abs(to_heads(twin[0], layout, 4) - expected(*exact, mask_of(runs, Q, KV))[0]).max() < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_the_mask(kind, dtype, layout, isa_level):
    arrays, exact, options = problem(dtype, layout)
    runs = KINDS[kind](Q, KV)
    given = np.concatenate([runs, runs]) if layout == "TND" else runs
    dout = testing.make_qkv(2, 4, 4, Q, Q, 32, dtype=dtype, seed=9)[0]
    exact_dout = testing.to_float64(dout, dtype)
    dout = np.ascontiguousarray(dout.swapaxes(1, 2)).reshape(-1, 4, 32) if layout == "TND" else testing.to_layout(dout, layout)
    out, lse = blitz_attn.block_sparse_attention(*arrays, kv_ranges=given, return_lse=True, **options)
    found = [blitz_attn.block_sparse_attention_backward(dout, *arrays, out, lse, kv_ranges=given, num_threads=n, **options) for n in (1, 3)]
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    right = expected(*exact, mask_of(runs, Q, KV), exact_dout)
    twin = reference.block_sparse_attention_backward(dout, *arrays, out, lse, kv_ranges=given, **options)
    for x, y, z in zip(found[0], twin, right, strict=True):
        heads = z.shape[1]
        for got in (testing.to_float64(x, dtype), y):
            np.testing.assert_allclose(to_heads(got, layout, heads), z, rtol=2 * UNIT[dtype], atol=4 * UNIT[dtype])


@pytest.mark.parametrize("first", [16, 32, 64])
def test_gradients_of_queries_before_and_behind_others_that_see_no_key(first, isa_level):
    """Queries that see no key may stand between others of the same tile."""
    arrays, exact, options = problem("bfloat16", "BNSD")
    runs = np.where((at(Q)[:, None] >= first) & (at(Q)[:, None] < 2 * first), 0, [0, KV])
    out, lse = blitz_attn.block_sparse_attention(*arrays, kv_ranges=runs, return_lse=True, **options)
    found = blitz_attn.block_sparse_attention_backward(arrays[0], *arrays, out, lse, kv_ranges=runs, **options)
    right = expected(*exact, mask_of(runs, Q, KV), exact[0])
    for x, z in zip(found, right, strict=True):
        np.testing.assert_allclose(testing.to_float64(x, "bfloat16"), z, rtol=2 * UNIT["bfloat16"], atol=4 * UNIT["bfloat16"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_that_neither_the_first_nor_the_last_query_sees(dtype):
    """Where there are this many queries, keys are packed once for all queries. Every key that some query may see must then be packed."""
    q, k, v = testing.make_qkv(1, 8, 2, 700, 2600, 32, dtype=dtype)
    runs = np.broadcast_to([0, 2600], (700, 2)).copy()
    runs[:9], runs[-9:] = (1400, 1410), (1200, 1205)
    right = expected(*(testing.to_float64(x, dtype) for x in (q, k, v)), mask_of(runs, 700, 2600)[:1])[0]
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            out = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, **bits_option(q))
        np.testing.assert_allclose(testing.to_float64(out, dtype), right, rtol=UNIT[dtype], atol=UNIT[dtype], err_msg=level)


@pytest.mark.parametrize("q_len", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries(dtype, q_len, isa_level):
    """Kernels for few queries, and the parts of a long row of keys that are joined."""
    arrays, exact, options = problem(dtype, "BSND", q_len)
    runs = np.stack([scattered(q_len, KV), [[7, 200]] * q_len])
    out, lse = blitz_attn.block_sparse_attention(*arrays, kv_ranges=runs, return_lse=True, **options)
    right = expected(*exact, mask_of(runs, q_len, KV))
    np.testing.assert_allclose(testing.to_float64(out, dtype).swapaxes(1, 2), right[0], rtol=UNIT[dtype], atol=UNIT[dtype])
    np.testing.assert_allclose(lse, right[1], rtol=UNIT[dtype], atol=UNIT[dtype])


@pytest.mark.parametrize("block_shape", [(1, 1), (16, 32), (64, 64)])
def test_beside_lists_and_other_rules(block_shape, isa_level):
    """A key is seen where the list, the rules and the range allow it."""
    arrays, exact, options = problem("float32", "BNSD")
    lists = sabi.random_with_frame(Q, KV, block_shape, 0.4, seed=3)
    runs = scattered(Q, KV)
    rules = {"causal": True, "window": (90, 0), "q_lens": [Q, 77], "kv_lens": [KV, 150]}
    listed = testing.token_mask(lists, Q, KV, block_shape)
    seen = np.repeat(mask_of(runs, Q, KV) & listed, 4 // listed.shape[1], axis=1)
    for b, (q_len, kv_len) in enumerate(zip(rules["q_lens"], rules["kv_lens"], strict=True)):
        distance = at(KV) - (at(Q)[:, None] + kv_len - q_len)
        seen[b] &= (distance <= 0) & (distance >= -90) & (at(KV) < kv_len) & (at(Q)[:, None] < q_len)
    out, lse = blitz_attn.block_sparse_attention(
        *arrays, lists, block_shape=block_shape, kv_ranges=runs[None], return_lse=True, **rules, **options
    )
    right = expected(*exact, seen)
    np.testing.assert_allclose(out, right[0], rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(lse, right[1], rtol=3e-5, atol=3e-5)


def test_packed_documents_have_the_numbers_of_sequences(isa_level):
    """A mask of documents in one row is what layout TND computes, which has them one after the other."""
    (q, k, v), _, _ = problem("float32", "TND")
    ends = np.array([0, 40, 41, 130, 260])
    document = np.searchsorted(ends[1:], at(260), side="right")
    runs = np.stack([ends[document], ends[document + 1]], axis=-1)
    k, v = k[:260], v[:260]
    packed = blitz_attn.block_sparse_attention(q, k, v, layout="TND", cu_seqlens_q=ends, cu_seqlens_kv=ends, causal=True)
    one = blitz_attn.block_sparse_attention(q[None], k[None], v[None], layout="BSND", causal=True, kv_ranges=runs)
    np.testing.assert_allclose(one[0], packed, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ranges_of_any_size(dtype, isa_level):
    """The largest and smallest numbers mean all keys, or none; a stride of any kind is read."""
    arrays, _, options = problem("float32", "BNSD")
    all_keys = blitz_attn.block_sparse_attention(*arrays, return_lse=True, **options)
    info = np.iinfo(dtype)
    wide = np.broadcast_to(np.array([info.min, info.max], dtype), (2, Q, 2))
    found = blitz_attn.block_sparse_attention(*arrays, kv_ranges=wide, return_lse=True, **options)
    assert all(same_bits(a, b) for a, b in zip(found, all_keys, strict=True))
    out, lse = blitz_attn.block_sparse_attention(*arrays, kv_ranges=wide[..., ::-1], return_lse=True, **options)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_what_a_range_hides_is_not_read():
    """NaN behind a range reaches no result and no gradient."""
    (q, k, v), _, options = problem("float32", "BNSD")
    runs = np.broadcast_to([20, 150], (Q, 2))
    clean = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, return_lse=True, **options)
    for x in (k, v):
        x[:, :, :20] = x[:, :, 150:] = np.nan
    found = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, return_lse=True, **options)
    assert all(same_bits(a, b) for a, b in zip(found, clean, strict=True))
    dq, dk, dv = blitz_attn.block_sparse_attention_backward(q, q, k, v, *found, kv_ranges=runs, **options)
    assert np.isfinite(dq).all()
    assert not np.any([dk[:, :, :20].any(), dv[:, :, 150:].any()])


def test_a_loss_goes_down():
    """A step against the gradient lowers a loss as far as the gradient says."""
    (q, k, v), _, options = problem("float64", "BNSD")
    runs = scattered(Q, KV)
    weights = np.random.default_rng(1).standard_normal(q.shape)

    def loss(q, k, v):
        return (blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, **options) * weights).sum()

    out, lse = blitz_attn.block_sparse_attention(q, k, v, kv_ranges=runs, return_lse=True, **options)
    gradients = blitz_attn.block_sparse_attention_backward(weights, q, k, v, out, lse, kv_ranges=runs, **options)
    step = 1e-6
    moved = loss(*(x + step * g for x, g in zip((q, k, v), gradients, strict=True)))
    back = loss(*(x - step * g for x, g in zip((q, k, v), gradients, strict=True)))
    assert (moved - back) / (2 * step) == pytest.approx(sum((g * g).sum() for g in gradients), rel=1e-6)


REFUSED = {
    "shape": (np.zeros((Q, 3), int), ValueError, rf"kv_ranges: expected shape \(2, {Q}, 2\) or \({Q}, 2\), got \({Q}, 3\)"),
    "batch": (np.zeros((3, Q, 2), int), ValueError, "kv_ranges: expected shape"),
    "rows": (np.zeros((2, Q + 1, 2), int), ValueError, "kv_ranges: expected shape"),
    "axes": (np.zeros((1, 2, Q, 2), int), ValueError, "kv_ranges: expected shape"),
    "one axis": (np.zeros(2, int), ValueError, "kv_ranges: expected shape"),
    "none": (np.zeros((), int), ValueError, "kv_ranges: expected shape"),
    "int16": (np.zeros((Q, 2), np.int16), TypeError, "kv_ranges: expected int32 or int64, got int16"),
    "floats": (np.zeros((Q, 2)), TypeError, "kv_ranges: expected"),
    "a number": (7, TypeError, "kv_ranges: expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    (q, k, v), _, options = problem("float32", "BNSD")
    ranges, error, sentence = REFUSED[name]
    out = np.full_like(q, 7)
    with pytest.raises(error, match=sentence):
        blitz_attn.block_sparse_attention(q, k, v, kv_ranges=ranges, out=out, **options)
    assert (out == 7).all()


def test_packed_refusals_and_overlaps():
    (q, k, v), _, options = problem("float32", "TND")
    with pytest.raises(ValueError, match=rf"kv_ranges: expected shape \({2 * Q}, 2\), got \(2, {Q}, 2\)"):
        blitz_attn.block_sparse_attention(q, k, v, kv_ranges=np.zeros((2, Q, 2), int), **options)
    room = np.zeros(q.size, np.float32)
    ranges = room.view(np.int32)[: 4 * Q].reshape(2 * Q, 2)
    with pytest.raises(ValueError, match="out: expected memory of its own, got an array that overlaps kv_ranges"):
        blitz_attn.block_sparse_attention(q, k, v, kv_ranges=ranges, out=room.reshape(q.shape), **options)


# ---- Paged attention -------------------------------------------------------------------------------------------------

LENS, Q_LENS, SIZE = [70, 33, 1], [20, 0, 1], 16


def paged(dtype="float32", cache=None):
    """Three requests: a chunk of a prompt that holds an image, one without queries, and a new token."""
    rng = np.random.default_rng(0)
    given = [testing.round_to(rng.standard_normal((12, SIZE, 2, 32)), dtype) for _ in range(2)]
    q = testing.round_to(rng.standard_normal((21, 4, 32)), dtype)
    scales = {}
    if cache:
        (given[0], k_scale), (given[1], v_scale) = (blitz_attn.quantize_kv(x, cache, **bits_option(x)) for x in given)
        scales = {"k_scale": k_scale, "v_scale": v_scale, "kv_dtype": cache}
    tables = np.array([[3, 9, 0, 5, 1], [2, 4, 6, -1, -1], [7, -1, -1, -1, -1]], np.int32)
    place = 50 + np.arange(20)  # of the queries of request 0: tokens 55 to 64 are an image
    image = (place >= 55) & (place < 65)
    runs = np.stack([np.r_[0 * place, 0], np.r_[np.where(image, 65, place + 1), 1]], axis=-1)
    return q, *given, tables, runs, bits_option(q) | scales


def gathered(cache, tables, scale, kv_dtype):
    """(1, Hkv, tokens, D) of request 0, in float64."""
    x = reference.dequantize_kv(cache, scale) if scale is not None else testing.to_float64(cache, kv_dtype)
    return x[tables[0]].reshape(-1, 2, 32)[: LENS[0]].swapaxes(0, 1)[None]


@pytest.mark.parametrize(("dtype", "cache"), [*((x, None) for x in DTYPES), ("bfloat16", "int8"), ("float32", "float8_e4m3")])
def test_an_image_in_a_paged_prompt(dtype, cache, isa_level):
    q, k, v, tables, runs, options = paged(dtype, cache)
    out, lse = blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, kv_ranges=runs, return_lse=True, **options)
    bits = "bfloat16" if dtype == "bfloat16" else None
    whole = [gathered(x, tables, options.get(f"{name}_scale"), bits) for name, x in (("k", k), ("v", v))]
    queries = testing.to_float64(q, dtype)[:20].swapaxes(0, 1)[None]
    keys = np.arange(LENS[0])
    seen = ((keys >= runs[:20, :1]) & (keys < runs[:20, 1:]))[None, None]
    right, right_lse = expected(queries, *whole, seen)
    np.testing.assert_allclose(testing.to_float64(out, dtype)[:20].swapaxes(0, 1), right[0], rtol=UNIT[dtype], atol=UNIT[dtype])
    np.testing.assert_allclose(lse[:20].T, right_lse[0], rtol=UNIT[dtype], atol=UNIT[dtype])
    causal = blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, **options)
    changed = np.flatnonzero((testing.to_float64(causal, dtype) != testing.to_float64(out, dtype)).any(axis=(1, 2)))
    assert changed.tolist() == list(range(5, 14))  # the last token of the image sees what it saw
    twin = reference.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, kv_ranges=runs, **options)
    np.testing.assert_allclose(testing.to_float64(out, dtype), twin, rtol=UNIT[dtype], atol=UNIT[dtype])


@pytest.mark.parametrize("window", [None, 12])
def test_plans_chunks_and_selections_take_ranges(window, isa_level):
    q, k, v, tables, runs, _ = paged()
    rules = {"q_lens": Q_LENS, "window": window}
    usual = blitz_attn.paged_attention(q, k, v, tables, LENS, kv_ranges=runs, return_lse=True, **rules)
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, **rules)
    assert all(map(same_bits, usual, plan.attention(q, k, v, kv_ranges=runs, return_lse=True)))
    for split in (SIZE, 2 * SIZE):
        found = blitz_attn.paged_attention(q, k, v, tables, LENS, kv_ranges=runs.astype(np.int32), kv_split=split, return_lse=True, **rules)
        for a, b in zip(found, usual, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, kv_split=split, **rules)
        assert all(map(same_bits, found, plan.attention(q, k, v, kv_ranges=runs, return_lse=True)))
    every = np.broadcast_to(np.array([[4, 0, 1, 3, 2], [2, 1, 0, -1, -1], [0, -1, -1, -1, -1]])[:, None], (3, 2, 5))
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, **rules)
    for found in (
        blitz_attn.paged_select_attention(q, k, v, tables, LENS, every, kv_ranges=runs, return_lse=True, **rules),
        plan.select_attention(q, k, v, every, kv_ranges=runs, return_lse=True),
    ):
        assert all(map(same_bits, usual, found))
    some = np.where(every == 3, -1, every)[:, :, ::-1].copy()
    some[0] = [4, 2, 1, 0, -1]
    found = blitz_attn.paged_select_attention(q, k, v, tables, LENS, np.sort(some, axis=-1)[..., ::-1], kv_ranges=runs, **rules)
    twin = reference.paged_select_attention(q, k, v, tables, LENS, np.sort(some, axis=-1)[..., ::-1], kv_ranges=runs, **rules)
    np.testing.assert_allclose(found, twin, rtol=1e-5, atol=1e-6)


def test_one_query_per_request(isa_level):
    """Requests without `q_lens`: one range each."""
    q, k, v, tables, _, _ = paged()
    runs = np.array([[10, 60], [5, 5], [-3, 99]])
    out, lse = blitz_attn.paged_attention(q[:3], k, v, tables, LENS, kv_ranges=runs, return_lse=True)
    twin, twin_lse = reference.paged_attention(q[:3], k, v, tables, LENS, kv_ranges=runs, return_lse=True)
    np.testing.assert_allclose(out, twin, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, twin_lse, rtol=1e-5, atol=1e-6)
    assert not out[1].any()


@pytest.mark.parametrize("split", [None, SIZE])
def test_paged_refusals(split):
    q, k, v, tables, runs, _ = paged()
    with pytest.raises(ValueError, match=r"kv_ranges: expected shape \(21, 2\), got \(20, 2\)"):
        blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, kv_ranges=runs[:20], kv_split=split)
    with pytest.raises(TypeError, match="kv_ranges: expected .*, got float64"):
        blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, kv_ranges=runs.astype(float), kv_split=split)
    room = np.zeros(q.size, np.float32)
    with pytest.raises(ValueError, match="out: expected memory of its own, got an array that overlaps kv_ranges"):
        blitz_attn.paged_attention(
            q, k, v, tables, LENS, q_lens=Q_LENS, kv_split=split, out=room.reshape(q.shape),
            kv_ranges=room.view(np.int32)[:42].reshape(21, 2),
        )  # fmt: skip
