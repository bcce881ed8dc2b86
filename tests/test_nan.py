"""NaN and inf in q, k and v reach the rows that attend them, as in float arithmetic, and no other row."""

import numpy as np
import pytest

from blitz_attn import testing
from cases import DTYPES, attend, bits_option, random_lists, same_bits

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, BLOCK_SHAPE = 2, 4, 2, 45, 70, 20, (8, 8)
ROWS, COLUMNS = 6, 9
BAD = [np.nan, np.inf, -np.inf]

RULES = {
    "list": {"lists": True},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "lengths": {"kv_lens": [50, 69], "q_lens": [45, 40]},
    "all": {"lists": True, "causal": True, "window": (30, -1), "kv_lens": [60, 70]},
}


def seen(rule, lists):
    """A bool array (B, H, Sq, Skv) of the keys that each query attends."""
    q_lens, kv_lens = (np.array(rule.get(name, [full] * BATCH)) for name, full in (("q_lens", Q_LEN), ("kv_lens", KV_LEN)))
    i, j = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)
    away = j - (i + (kv_lens - q_lens)[:, None, None])
    left, right = (10**6 if n < 0 else n for n in rule.get("window", (-1, -1)))
    mask = (away >= -left) & (away <= right) & (j < kv_lens[:, None, None]) & (i < q_lens[:, None, None])
    if rule.get("causal"):
        mask &= away <= 0
    mask = np.broadcast_to(mask[:, None], (BATCH, HEADS, Q_LEN, KV_LEN))
    return mask if lists is None else mask & testing.token_mask(lists, Q_LEN, KV_LEN, BLOCK_SHAPE)


def problem(rule_name, dtype):
    rule = dict(RULES[rule_name])
    lists = random_lists(np.random.default_rng(8), BATCH, HEADS, ROWS, COLUMNS, empty=0.1) if rule.pop("lists", False) else None
    arrays = testing.make_qkv(BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, dtype=dtype)
    return arrays, lists, rule, {"block_shape": BLOCK_SHAPE, **rule}


def spoilt(x, places, value):
    """A copy of a BNSD array with `value` at the places."""
    wide = testing.to_float64(x, "bfloat16")
    for place in places:
        wide[place] = value
    return testing.round_to(wide, "bfloat16" if bits_option(x) else x.dtype.name)


def assert_rows_kept(got, clean, rows):
    """Assert that output and log-sum-exp of `rows` (B, H, Sq) have the same bits as without the bad values."""
    for one, other in zip(got, clean, strict=True):
        assert same_bits(np.ascontiguousarray(one[rows]), np.ascontiguousarray(other[rows]))


def assert_only_hit(got, clean, hit, bad, dtype):
    """Assert that the elements in `hit` (B, H, Sq, D) are `bad`, and that everything else is as without the bad values."""
    assert same_bits(got[1], clean[1])
    assert_rows_kept(got, clean, ~hit.any(axis=-1))
    values, before = (testing.to_float64(x[0], "bfloat16") for x in (got, clean))
    limit = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(values[~hit], before[~hit], rtol=limit, atol=limit)
    assert (np.isnan(values[hit]) if np.isnan(bad) else values[hit] == bad).all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_keys(dtype, rule_name, bad, isa_level):
    """A bad element of a key makes the key's score bad in the rows that attend the key. A score of NaN or +inf makes the whole row NaN."""
    (q, k, v), lists, rule, options = problem(rule_name, dtype)
    clean = attend(q, k, v, lists, **options)
    places = [(0, 0, 33), (1, 1, 5), (1, 0, 69)]
    got = attend(q, spoilt(k, [(*p, 7) for p in places], bad), v, lists, **options)
    mask = seen(rule, lists)
    hit = np.zeros((BATCH, HEADS, Q_LEN), bool)
    for b, h, j in places:
        hit[b, 2 * h : 2 * h + 2] |= mask[b, 2 * h : 2 * h + 2, :, j]
    assert hit.any()
    assert (~hit).any()
    assert_rows_kept(got, clean, ~hit)
    exact, exact_lse = testing.reference_attention(q, spoilt(k, [(*p, 7) for p in places], bad), v, lists, **options, **bits_option(q))
    values = testing.to_float64(got[0], "bfloat16")
    assert (np.isnan(values) == np.isnan(exact)).all()
    assert (np.isnan(got[1]) | np.isposinf(got[1]))[np.isnan(exact_lse)].all()
    if np.isnan(bad):
        assert np.isnan(values[hit]).all()
        assert np.isnan(got[1][hit]).all()
    else:  # the sign of q decides between inf and -inf, and scores of -inf have no weight
        fine = ~np.isnan(exact)
        limit = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
        np.testing.assert_allclose(values[fine], exact[fine], rtol=limit, atol=limit)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_values(dtype, rule_name, bad, isa_level):
    """A bad value makes only its own column bad, in the rows that attend its key. The log-sum-exp does not depend on values."""
    (q, k, v), lists, rule, options = problem(rule_name, dtype)
    clean = attend(q, k, v, lists, **options)
    places = [(0, 0, 33, 7), (1, 1, 5, 0), (1, 0, 69, 19), (0, 1, 3, 12)]
    got = attend(q, k, spoilt(v, places, bad), lists, **options)
    mask = seen(rule, lists)
    hit = np.zeros((BATCH, HEADS, Q_LEN, DIM), bool)
    for b, h, j, d in places:
        hit[b, 2 * h : 2 * h + 2, :, d] |= mask[b, 2 * h : 2 * h + 2, :, j]
    assert hit.any()
    assert_only_hit(got, clean, hit, bad, dtype)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dim", [64, 128])
def test_in_values_beside_a_large_weight(dim, bad, isa_level):
    """On tiles, the weights of a heavy group have residuals. Bad values must not be multiplied by residuals, which may be 0."""
    q, k, v = testing.make_qkv(1, 1, 1, 64, 600, dim, dtype="bfloat16")
    wide = testing.to_float64(k, "bfloat16")
    wide[0, 0, 130] = 40 * testing.to_float64(q, "bfloat16")[0, 0, :8].mean(axis=0)
    k = testing.round_to(wide, "bfloat16")
    clean = attend(q, k, v)
    got = attend(q, k, spoilt(v, [(0, 0, 130, 3), (0, 0, 135, 40)], bad))
    hit = np.zeros(q.shape, bool)
    hit[..., [3, 40]] = True
    assert_only_hit(got, clean, hit, bad, "bfloat16")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_values_of_few_queries(dtype, bad, isa_level):
    """In a decode step of three tokens, the first token does not attend the last two keys, and the second token does not attend the last key."""
    q, k, v = testing.make_qkv(2, 4, 2, 3, 100, 20, dtype=dtype)
    clean = attend(q, k, v, causal=True)
    got = attend(q, k, spoilt(v, [(0, 0, 98, 7), (1, 1, 99, 19)], bad), causal=True)
    hit = np.zeros((2, 4, 3, 20), bool)
    hit[0, :2, 1:, 7] = hit[1, 2:, 2:, 19] = True
    assert_only_hit(got, clean, hit, bad, dtype)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_queries(dtype, rule_name, bad, isa_level):
    """A bad query makes only its own row bad. A row that attends nothing has the output 0 and the log-sum-exp -inf, even if its query is bad."""
    (q, k, v), lists, rule, options = problem(rule_name, dtype)
    clean = attend(q, k, v, lists, **options)
    places = [(0, 0, 0), (0, 3, 44), (1, 2, 17), (1, 1, 41)]
    got = attend(spoilt(q, [(*p, 7) for p in places], bad), k, v, lists, **options)
    hit = np.zeros((BATCH, HEADS, Q_LEN), bool)
    for place in places:
        hit[place] = True
    attends = seen(rule, lists).any(axis=-1)
    assert_rows_kept(got, clean, ~hit | ~attends)
    exact, exact_lse = testing.reference_attention(spoilt(q, [(*p, 7) for p in places], bad), k, v, lists, **options, **bits_option(q))
    assert np.isnan(exact[hit & attends]).any()
    assert (np.isnan(testing.to_float64(got[0], "bfloat16")) == np.isnan(exact)).all()
    assert (np.isnan(got[1]) | np.isposinf(got[1]))[np.isnan(exact_lse)].all()
    assert (testing.to_float64(got[0], "bfloat16")[~attends] == 0).all()
    assert (got[1][~attends] == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_overflow_is_that_of_floats(dtype, isa_level):
    """A query that attends a single value near the largest float gets this value. Sums of several such values may overflow to inf."""
    largest = np.finfo(dtype).max / 4
    q, k, v = testing.make_qkv(1, 1, 1, 6, 6, 4, dtype=dtype)
    q[...] = k[...] = 0
    v[...] = largest
    out, _ = attend(q, k, v, window=(0, 0))
    np.testing.assert_allclose(out, largest, rtol=1e-6)
