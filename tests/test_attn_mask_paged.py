"""`attn_mask` and `alibi_slopes` over pages: trees of draft tokens, decoding, what hides tokens beside them, and requests in chunks."""

import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, bits_option, same_bits
from cases_masks import BFLOAT16, HKV, SLOPES, D, H, bias_of, close, expected, hiding, holes, kept, numbers, slope_bias
from exporters import OnlyDlpack

LENS, Q_LENS, SIZE = [70, 33, 1], [20, 0, 1], 16
DECODE_LENS = [70, 2100, 1]


def paged(dtype="float32", cache=None, lens=LENS, queries=21):
    """Three requests over shuffled pages: q, the caches, tables, the options, and K and V of request b as (1, Hkv, tokens, D)."""
    rng = np.random.default_rng(0)
    counts = [-(-n // SIZE) for n in lens]
    given = [testing.round_to(rng.standard_normal((sum(counts) + 2, SIZE, HKV, D)), "float32" if cache else dtype) for _ in range(2)]
    q = testing.round_to(rng.standard_normal((queries, H, D)), dtype)
    options = bits_option(q)
    scales = [None, None]
    if cache:
        (given[0], scales[0]), (given[1], scales[1]) = (blitz_attn.quantize_kv(x, cache) for x in given)
        options |= {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": cache}
    order = rng.permutation(sum(counts) + 2)
    tables = np.full((len(lens), max(counts)), -1, np.int32)
    for b, n in enumerate(counts):
        tables[b, :n] = order[sum(counts[:b]) :][:n]

    def gathered(b):
        wide = [testing.to_float64(x, dtype) if s is None else reference.dequantize_kv(x, s) for x, s in zip(given, scales, strict=True)]
        return [x[tables[b, : counts[b]]].reshape(-1, HKV, D)[: lens[b]].swapaxes(0, 1)[None] for x in wide]

    return q, *given, tables, options, gathered


def tree(queries, tokens):
    """A tree of drafted tokens: each sees the tokens before the tree, its own branch, and itself. Node n hangs on node (n - 1) // 2."""
    mask = np.ones((queries, tokens), bool)
    mask[:, tokens - queries :] = np.eye(queries, dtype=bool)
    for n in range(1, queries):
        mask[n, tokens - queries :] |= mask[(n - 1) // 2, tokens - queries :]
    return mask


@pytest.mark.parametrize(("dtype", "cache"), [*((x, None) for x in DTYPES), ("bfloat16", "int8"), ("float32", "float8_e4m3")])
def test_a_tree_of_drafted_tokens(dtype, cache, isa_level):
    """Each request has a tree of its own; rows count its queries, columns its tokens."""
    lens, q_lens = [70, 33, 40], [15, 0, 6]
    q, k, v, tables, options, gathered = paged(dtype, cache, lens)
    mask = np.zeros((3, 1, 18, 75), bool)  # larger than the requests
    for b, (n, tokens) in enumerate(zip(q_lens, lens, strict=True)):
        mask[b, 0, :n, :tokens] = tree(n, tokens)
    numeric = np.where(mask, 0, -np.inf).astype(np.float32)
    rules = {"q_lens": q_lens} | options
    results = [
        blitz_attn.paged_attention(q, k, v, tables, lens, attn_mask=x, return_lse=True, num_threads=n, **rules)
        for n, x in ((1, mask), (3, mask), (1, numeric))
    ]
    assert all(map(same_bits, results[0], results[1]))
    twin = reference.paged_attention(q, k, v, tables, lens, attn_mask=mask, return_lse=True, **rules)
    for b, rows in ((0, slice(0, 15)), (2, slice(15, 21))):
        queries = testing.to_float64(q, dtype)[rows].swapaxes(0, 1)[None]
        right = [x[0].swapaxes(0, 1) for x in expected(queries, *gathered(b), bias_of(mask[b, :, : q_lens[b], : lens[b]]))]
        for found in (results[0], results[2]):
            close([x[rows] for x in found], right, dtype)
        close([x[rows] for x in twin], right, "float64")


PAGED_MASKS = {
    "bool": lambda rng, q, kv: kept(rng, 3, H, q, kv),
    "numbers": lambda rng, q, kv: numbers(rng, 3, 1, q, kv),
    "holes": lambda rng, q, kv: holes(rng, 1, H, q, kv),
    "keys": lambda rng, q, kv: kept(rng, 3, 1, 1, kv),
    "per query": lambda rng, q, kv: numbers(rng, H, q, 1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("rule", ["causal", "window", "ranges", "begins"])
@pytest.mark.parametrize("name", PAGED_MASKS)
def test_paged_rules(name, rule, isa_level):
    q, k, v, tables, _, gathered = paged()
    mask, slopes = PAGED_MASKS[name](np.random.default_rng(7), 20, 70), SLOPES if rule != "causal" else None
    runs = np.sort(np.random.default_rng(8).integers(0, 70, (21, 2)), axis=-1)
    rules = {
        "causal": {}, "window": {"window": 12, "softcap": 2.0, "sinks": np.float32([1, 0, -1, 2])}, "ranges": {"kv_ranges": runs},
        "begins": {"q_begin": [40, 0, 3]},
    }[rule] | {"q_lens": Q_LENS, "attn_mask": mask, "alibi_slopes": slopes, "return_lse": True}  # fmt: skip
    results = [blitz_attn.paged_attention(q, k, v, tables, LENS, num_threads=n, **rules) for n in (1, 3)]
    assert all(map(same_bits, *results))
    plan_rules = {name: rules[name] for name in ("q_lens", "window", "softcap", "q_begin") if name in rules}
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, **plan_rules)
    calls = {name: x for name, x in rules.items() if name not in plan_rules}
    for _ in range(2):
        assert all(map(same_bits, results[0], plan.attention(q, k, v, **calls)))
    every = np.broadcast_to(np.array([[4, 0, 1, 3, 2], [2, 1, 0, -1, -1], [0, -1, -1, -1, -1]])[:, None], (3, HKV, 5))
    assert all(map(same_bits, results[0], blitz_attn.paged_select_attention(q, k, v, tables, LENS, every, **rules)))
    assert all(map(same_bits, results[0], plan.select_attention(q, k, v, every, **calls)))
    close(results[0], reference.paged_attention(q, k, v, tables, LENS, **rules))
    some = every.copy()
    some[0], some[1, 1] = [3, 4, 0, -1, -1], [1, -1, -1, -1, -1]
    found = blitz_attn.paged_select_attention(q, k, v, tables, LENS, some, **rules)
    close(found, reference.paged_select_attention(q, k, v, tables, LENS, some, **rules))
    if rule == "ranges":
        return
    for b, rows in ((0, slice(0, 20)), (2, slice(20, 21))):
        n, tokens = Q_LENS[b], LENS[b]
        begin = rules.get("q_begin", [50, 33, 0])[b]
        away = np.arange(tokens) - (np.arange(n)[:, None] + begin)
        bias = np.where((away <= 0) & (away >= -rules.get("window", 1000)), 0, -np.inf)
        bias = bias + bias_of(np.broadcast_to(mask, (3, H, 20, 70))[b, :, :n, :tokens])
        bias = bias + (0 if slopes is None else slope_bias(n, tokens, begin=begin))
        queries = q[None, rows].swapaxes(1, 2).astype(float)
        right = expected(queries, *gathered(b), bias, softcap=rules.get("softcap"), sinks=rules.get("sinks"))
        close([x[rows] for x in results[0]], [x[0].swapaxes(0, 1) for x in right])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", ["slopes", "mask", "both"])
@pytest.mark.parametrize(
    ("dtype", "cache"), [*((x, None) for x in DTYPES), ("bfloat16", "int8"), ("float16", "int8"), ("float32", "float8_e4m3")]
)
def test_one_new_token_each(dtype, cache, given, isa_level):
    q, k, v, tables, options, gathered = paged(dtype, cache, DECODE_LENS, 3)
    slopes = None if given == "mask" else SLOPES / 4
    mask = None if given == "slopes" else holes(np.random.default_rng(1), 3, H, 1, 2100)
    rules = options | {"alibi_slopes": slopes, "attn_mask": mask, "return_lse": True}
    results = [blitz_attn.paged_attention(q, k, v, tables, DECODE_LENS, num_threads=n, **rules) for n in (1, 3)]
    assert all(map(same_bits, *results))
    for b, n in enumerate(DECODE_LENS):
        bias = (0 if mask is None else bias_of(mask[b : b + 1, :, :, :n])) + (0 if slopes is None else slope_bias(1, n, slopes))
        right = expected(testing.to_float64(q, dtype)[b][None, :, None], *gathered(b), bias)
        close([x[b] for x in results[0]], [x[0, :, 0] for x in right], dtype)
    twin = reference.paged_attention(q, k, v, tables, DECODE_LENS, **rules)
    close([results[0][0]], [twin[0]], dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("q_lens", [None, [4, 9, 1]])
@pytest.mark.parametrize(("dtype", "cache"), [("float32", None), ("bfloat16", None), ("float64", None), ("float16", "int8")])
def test_slopes_in_chunks(dtype, cache, q_lens, isa_level):
    """Requests whose tokens are attended in chunks have the distances of the whole request."""
    q, k, v, tables, options, _ = paged(dtype, cache, DECODE_LENS, sum(q_lens or [1, 1, 1]))
    options |= {"alibi_slopes": SLOPES / 4, "return_lse": True, "q_lens": q_lens}
    right = reference.paged_attention(q, k, v, tables, DECODE_LENS, **options)
    every = np.broadcast_to(np.where(np.arange(132) < [[5], [132], [1]], np.arange(132), -1)[:, None], (3, HKV, 132))
    for split in (2 * SIZE, 32 * SIZE):
        results = [blitz_attn.paged_attention(q, k, v, tables, DECODE_LENS, kv_split=split, num_threads=n, **options) for n in (1, 3)]
        assert all(map(same_bits, *results))
        close(results[0], right, dtype)
        close(blitz_attn.paged_select_attention(q, k, v, tables, DECODE_LENS, every, kv_split=split, **options), right, dtype)


def check_what_is_hidden(cache, kind, queries, q_lens, **options):
    """NaN in tokens that a mask hides, or in their scales, changes no bit. The last request sees nothing."""
    lens = [70, 2100, 33]
    q, k, v, tables, scales, _ = paged("float32", cache, lens, queries)
    hidden = np.zeros((3, 1, 1, 2100), bool)
    hidden[..., 16:32] = hidden[1, ..., 1000:1600] = hidden[..., 3] = hidden[2] = True
    rules = scales | options | {"q_lens": q_lens, "attn_mask": hiding(kind, hidden), "return_lse": True}
    clean = blitz_attn.paged_attention(q, k, v, tables, lens, **rules)
    assert not clean[0][-1].any()
    assert (clean[1][-1] == -np.inf).all()
    for b, n in enumerate(lens):
        t = np.flatnonzero(hidden[b, 0, 0, :n])
        for x in (rules["k_scale"], rules["v_scale"]) if cache else (k, v):
            x[tables[b, t // SIZE], t % SIZE] = np.nan
    assert all(map(same_bits, blitz_attn.paged_attention(q, k, v, tables, lens, **rules), clean))


@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("cache", [None, "int8"])
def test_tokens_that_a_mask_hides_are_not_read(cache, kind, isa_level):
    check_what_is_hidden(cache, kind, 3, None)
    check_what_is_hidden(cache, kind, 21, [16, 4, 1])


def test_paged_refusals():
    q, k, v, tables, _, _ = paged()
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, q_lens=Q_LENS)
    every = np.zeros((3, HKV, 1), np.int32)
    calls = [
        lambda **given: blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, **given),
        lambda **given: blitz_attn.paged_select_attention(q, k, v, tables, LENS, every, q_lens=Q_LENS, **given),
        lambda **given: plan.attention(q, k, v, **given),
        lambda **given: plan.select_attention(q, k, v, every, **given),
    ]
    shapes = [(2, 1, 20, 70), (3, HKV, 20, 70), (19, 70), (20, 69), (1, 1, 1, 20, 70)]
    for call in calls:
        for shape in shapes:
            with pytest.raises(ValueError, match=rf"^attn_mask: expected .*, got {'5' if len(shape) > 4 else re.escape(str(shape))}$"):
                call(attn_mask=np.zeros(shape, bool))
        sentence = f"attn_mask: expected shape (3 or 1, {H} or 1, 20 or 1, 70 or 1), or more queries and keys, got (19, 70)"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):  # of the caller's two axes, not of the four that the library is given
            call(attn_mask=np.zeros((19, 70), bool))
        with pytest.raises(TypeError, match="^attn_mask: expected"):
            call(attn_mask=np.zeros((20, 70), np.int32))
        with pytest.raises(ValueError, match="^alibi_slopes: expected"):
            call(alibi_slopes=np.zeros(HKV, np.float32))


@pytest.mark.parametrize("kv_split", [None, 2 * SIZE])
def test_a_flattened_mask_is_refused(kv_split):
    """FlashInfer's custom_mask, all pairs of a query and a token in one axis, is not taken for a mask of tokens, whose first elements it would be."""
    q, k, v, tables, _, _ = paged()
    every, out, flat = np.zeros((3, HKV, 1), np.int32), np.full((21, H, D), 7, np.float32), np.ones(20 * 70 + 1, bool)
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, q_lens=Q_LENS, kv_split=kv_split)
    rules = {"q_lens": Q_LENS, "kv_split": kv_split}
    for call in (
        lambda mask: blitz_attn.paged_attention(q, k, v, tables, LENS, attn_mask=mask, out=out, **rules),
        lambda mask: blitz_attn.paged_select_attention(q, k, v, tables, LENS, every, attn_mask=mask, out=out, **rules),
        lambda mask: plan.attention(q, k, v, attn_mask=mask, out=out),
        lambda mask: plan.select_attention(q, k, v, every, attn_mask=mask, out=out),
    ):
        for mask in (flat, flat[:71], flat[::2], np.zeros(len(flat), np.float32)):
            expected = "70 tokens in a mask of one axis, or shape (3, 1, 20, 70), a matrix of queries and tokens for each request"
            with pytest.raises(ValueError, match=f"^{re.escape(f'attn_mask: expected {expected}, got ({len(mask)},)')}$"):
                call(mask)
    with pytest.raises(ValueError, match=r"^attn_mask: expected 70 tokens in a mask of one axis, got \(1401,\)$"):
        reference.paged_attention(q, k, v, tables, LENS, attn_mask=flat, **rules)
    assert (out == 7).all()


@pytest.mark.parametrize("kv_split", [None, 2 * SIZE])
def test_a_mask_of_one_axis_has_an_element_for_each_token(kv_split):
    """A longer mask of tokens has an axis of queries, too."""
    q, k, v, tables, _, _ = paged()
    shown = np.random.default_rng(3).random(75) < 0.5
    rules = {"q_lens": Q_LENS, "kv_split": kv_split, "return_lse": True}
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, q_lens=Q_LENS, kv_split=kv_split)
    found = blitz_attn.paged_attention(q, k, v, tables, LENS, attn_mask=shown[:70], **rules)
    for mask in (shown[None], shown[None, :70], shown[:70]):
        assert all(map(same_bits, found, plan.attention(q, k, v, attn_mask=mask, return_lse=True)))
        close(reference.paged_attention(q, k, v, tables, LENS, attn_mask=mask, **rules), found)
    one = [blitz_attn.paged_attention(q, k, v, tables, LENS, attn_mask=mask, **rules) for mask in (np.ones(1, bool), None)]
    assert all(map(same_bits, *one))
    nothing = {"attn_mask": np.ones(1, bool), "kv_split": kv_split}  # one element holds for any number of tokens
    assert not blitz_attn.paged_attention(q[:3], k, v, tables, [0, 0, 0], **nothing).any()


# ---- Requests in chunks ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [SIZE, 2 * SIZE, 4 * SIZE, 8 * SIZE])
@pytest.mark.parametrize("rule", ["causal", "window", "ranges", "begins"])
@pytest.mark.parametrize("name", PAGED_MASKS)
def test_masks_in_chunks(name, rule, split, isa_level):
    """Against the twin and the call without chunks; whole, listed and by plans."""
    q, k, v, tables, _, _ = paged()
    mask, slopes = PAGED_MASKS[name](np.random.default_rng(9), 22, 75), SLOPES if rule != "causal" else None
    runs = np.sort(np.random.default_rng(8).integers(0, 70, (21, 2)), axis=-1)
    rules = {
        "causal": {}, "window": {"window": 40, "softcap": 2.0, "sinks": np.float32([1, 0, -1, 2])}, "ranges": {"kv_ranges": runs},
        "begins": {"q_begin": [40, 0, 3]},
    }[rule] | {"q_lens": Q_LENS, "attn_mask": mask, "alibi_slopes": slopes, "return_lse": True}  # fmt: skip
    results = [blitz_attn.paged_attention(q, k, v, tables, LENS, kv_split=split, num_threads=n, **rules) for n in (1, 3)]
    assert all(map(same_bits, *results))
    usual = blitz_attn.paged_attention(q, k, v, tables, LENS, **rules)
    close(results[0], usual)
    if split > max(LENS) and rule != "window":  # one chunk; sinks take part after the merges
        assert all(map(same_bits, results[0], usual))
    close(results[0], reference.paged_attention(q, k, v, tables, LENS, kv_split=split, **rules))
    plan_rules = {"kv_split": split} | {name: rules[name] for name in ("q_lens", "window", "softcap", "q_begin") if name in rules}
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, **plan_rules)
    calls = {name: x for name, x in rules.items() if name not in plan_rules}
    some = np.broadcast_to(np.array([[4, 0, 2, -1], [2, 1, -1, -1], [0, -1, -1, -1]])[:, None], (3, HKV, 4)).copy()
    some[0, 1] = [1, 3, -1, -1]
    for lists in (some, np.repeat(some, H // HKV, axis=1)[:, ::-1].copy()):
        found = blitz_attn.paged_select_attention(q, k, v, tables, LENS, lists, kv_split=split, **rules)
        close(found, reference.paged_select_attention(q, k, v, tables, LENS, lists, **rules))
        for _ in range(2):
            assert all(map(same_bits, found, plan.select_attention(q, k, v, lists, **calls)))
            assert all(map(same_bits, results[0], plan.attention(q, k, v, **calls)))


@pytest.mark.parametrize("q_lens", [None, [4, 9, 1]])
@pytest.mark.parametrize(("dtype", "cache"), [*((x, None) for x in DTYPES), ("bfloat16", "int8"), ("float32", "float8_e4m3")])
def test_chunks_by_hand(dtype, cache, q_lens, isa_level):
    """The bits of calls over single chunks, each with the columns of its tokens, whose states are merged by the tree. The last chunk of the
    longest request has one token, and one column, which is not taken for one that holds for all tokens."""
    lens, split, queries = [70, 193, 1], 3 * SIZE, q_lens or [1, 1, 1]
    q, k, v, tables, options, _ = paged(dtype, cache, lens, sum(queries))
    options |= {"return_lse": True, "out_dtype": None if dtype == "float64" else "float32"}
    for mask in (kept(np.random.default_rng(2), 3, H, max(queries), 193), holes(np.random.default_rng(3), max(queries), 193)):
        found = blitz_attn.paged_attention(q, k, v, tables, lens, attn_mask=mask, q_lens=q_lens, kv_split=split, **options)
        for b, (end, n, tokens) in enumerate(zip(np.cumsum(queries), queries, lens, strict=True)):
            states, rows = [], slice(end - n, end)
            for at in range(0, tokens, split):
                here = min(split, tokens - at)
                own = tables[b : b + 1, at // SIZE :][:, : -(-here // SIZE)].copy()
                part = (mask[b : b + 1] if mask.ndim == 4 else mask)[..., :n, at : at + here]
                begin = {"q_lens": [n], "q_begin": [tokens - n - at]}
                states.append(blitz_attn.paged_attention(q[rows], k, v, own, [here], attn_mask=part.copy(), **begin, **options))
            outs, lses = zip(*states, strict=True)
            out, lse = blitz_attn.merge_states_tree([x.swapaxes(0, 1)[None].copy() for x in outs], [x.T[None].copy() for x in lses])
            assert same_bits(np.ascontiguousarray(out[0].swapaxes(0, 1)), found[0][rows])
            assert same_bits(np.ascontiguousarray(lse[0].T), found[1][rows])


@pytest.mark.parametrize("q_lens", [None, Q_LENS])
def test_a_mask_that_hides_nothing_has_the_bits_of_none(q_lens, isa_level):
    q, k, v, tables, _, _ = paged(queries=sum(q_lens or [1, 1, 1]))
    rules = {"q_lens": q_lens, "kv_split": SIZE, "return_lse": True}
    usual = blitz_attn.paged_attention(q, k, v, tables, LENS, **rules)
    for shape in ((20, 70), (1,), (3, 1, 1, 1), (1, H, 22, 1), ()):
        assert all(map(same_bits, usual, blitz_attn.paged_attention(q, k, v, tables, LENS, attn_mask=np.ones(shape, bool), **rules)))


VIEWS = {
    "plain": lambda x: x,
    "turned": lambda x: np.ascontiguousarray(x.T).T,
    "falling": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "steps": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "repeated": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["bool", "float32", "float16", "float64", BFLOAT16])
def test_chunks_read_masks_of_any_strides(name, dtype):
    rng = np.random.default_rng(4)
    q, k, v, tables, _, _ = paged()
    mask = VIEWS[name](kept(rng, 3, H, 20, 70) if dtype == "bool" else testing.round_to(holes(rng, 3, H, 20, 70), dtype))
    rules = {"q_lens": Q_LENS, "return_lse": True}
    whole = blitz_attn.paged_attention(q, k, v, tables, LENS, attn_mask=mask, **rules)
    close(blitz_attn.paged_attention(q, k, v, tables, LENS, attn_mask=mask, kv_split=2 * SIZE, **rules), whole)
    same = mask[..., :1]
    rules["attn_mask"] = same
    usual = blitz_attn.paged_attention(q, k, v, tables, LENS, **rules)
    close(blitz_attn.paged_attention(q, k, v, tables, LENS, kv_split=2 * SIZE, **rules), usual)


def kinds_of(name, mask):
    if name == "memoryview":
        return memoryview(mask)
    if name == "dlpack":
        return OnlyDlpack(mask)
    library = pytest.importorskip(name.partition(" ")[0])
    if name == "jax":
        return library.numpy.asarray(mask)
    tensor = library.from_numpy(mask)
    return tensor.bfloat16() if name == "torch bfloat16" else tensor


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of JAX
@pytest.mark.parametrize("name", ["torch", "torch bfloat16", "jax", "memoryview", "dlpack"])
def test_masks_of_any_kind_in_chunks(name):
    q, k, v, tables, _, _ = paged()
    mask = kinds_of(name, holes(np.random.default_rng(4), 3, 1, 20, 70))
    rules = {"q_lens": Q_LENS, "return_lse": True, "attn_mask": mask}
    whole, found = (blitz_attn.paged_attention(q, k, v, tables, LENS, kv_split=split, **rules) for split in (None, 2 * SIZE))
    close(found, whole)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_tokens_that_a_mask_hides_are_not_read_in_chunks(cache, isa_level):
    check_what_is_hidden(cache, "bool", 21, [16, 4, 1], kv_split=16 * SIZE)


def test_calls_without_requests_or_tokens_in_chunks():
    q, k, v, tables, _, _ = paged()
    for q_lens in (None, []):
        out = blitz_attn.paged_attention(q[:0], k, v, tables[:0], [], q_lens=q_lens, attn_mask=np.ones((0, H, 1, 7), bool), kv_split=SIZE)
        assert out.shape == (0, H, D)
    out = blitz_attn.paged_attention(q[:3], k, v, tables, [0, 0, 0], attn_mask=np.ones((3, 1, 1, 0), bool), kv_split=SIZE)
    assert not out.any()


def test_refusals_in_chunks():
    """The sentences of calls without chunks, before anything is written."""
    q, k, v, tables, _, _ = paged()
    every, out = np.zeros((3, HKV, 1), np.int32), np.full((21, H, D), 7, np.float32)
    plan = blitz_attn.PagedPlan(tables, LENS, page_size=SIZE, q_lens=Q_LENS, kv_split=SIZE)
    calls = [
        lambda mask, **given: blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, attn_mask=mask, out=out, **given),
        lambda mask, **given: blitz_attn.paged_select_attention(q, k, v, tables, LENS, every, q_lens=Q_LENS, attn_mask=mask, out=out, **given),
    ]
    by_plan = [lambda mask: plan.attention(q, k, v, attn_mask=mask, out=out), lambda mask: plan.select_attention(q, k, v, every, attn_mask=mask, out=out)]
    masks = [np.zeros(shape, bool) for shape in ((2, 1, 20, 70), (3, HKV, 20, 70), (19, 70), (20, 69), (70, 20), (1, 1, 1, 20, 70))]
    masks += [np.zeros((20, 70), np.int32), np.zeros((20, 70), ">f4"), np.ma.zeros((20, 70)), [[True] * 70] * 20]
    for mask in masks:
        for usual, planned in zip(calls, by_plan, strict=True):
            with pytest.raises((TypeError, ValueError), match="^attn_mask: expected") as expected:
                usual(mask)
            for call in (planned, lambda x, f=usual: f(x, kv_split=2 * SIZE)):
                with pytest.raises(expected.type) as found:
                    call(mask)
                assert str(found.value) == str(expected.value)
    for kv_split in (None, SIZE):
        with pytest.raises(ValueError, match="^out: expected memory of its own, got an array that overlaps attn_mask$"):
            calls[0](out.reshape(-1)[:70], kv_split=kv_split)
    assert (out == 7).all()


def test_a_tensor_that_needs_a_gradient_is_refused_in_chunks():
    torch = pytest.importorskip("torch")
    q, k, v, tables, _, _ = paged()
    with pytest.raises(ValueError, match="^attn_mask: expected a tensor that needs no gradient"):
        blitz_attn.paged_attention(q, k, v, tables, LENS, q_lens=Q_LENS, attn_mask=torch.zeros(20, 70, requires_grad=True), kv_split=SIZE)
