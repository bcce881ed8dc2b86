"""Laws of the operation, on random problems: what must not change the result, bit for bit or to rounding."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi, testing
from cases import DTYPES, ISA_LEVELS, attend, bits_option, dtype_of, same_bits

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

# Derandomised: a run is the same on every machine. Levels are walked inside a test, since fixtures outlive examples.
examples = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def problems(draw, dtypes=tuple(DTYPES), rules=True, lists=True):
    """(q, k, v, list, options) in BNSD, with at least one key."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    head_dim, v_dim = draw(st.sampled_from([1, 7, 16, 40, 64])), draw(st.sampled_from([1, 5, 32, 64]))
    block_shape = draw(st.sampled_from([(16, 16), (8, 32), (32, 8), (5, 7), (64, 64), (128, 128)]))
    heads, seed = kv_heads * group, draw(st.integers(0, 999))
    arrays = testing.make_qkv(batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim, dtype=draw(st.sampled_from(dtypes)), seed=seed)
    options = {"block_shape": block_shape}
    if rules:
        options["causal"] = draw(st.booleans())
        options["window"] = draw(st.sampled_from([None, (10, 3), (-1, 5), (20, -1)]))
    chosen = None
    if lists:
        rows, columns = -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
        mask = np.random.default_rng(seed).random((batch, heads, rows, columns)) < draw(st.sampled_from([0.2, 0.6, 1.0]))
        chosen = sabi.from_block_mask(mask, dtype="int32")
    return (*arrays, chosen, options)


def each_level():
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            yield level


def close(a, b):
    """Equal to a few roundings: the number of queries that share keys may choose another kernel, which sums in another order."""
    rounding = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype_of(a[0])]
    sums = min(rounding, 2.0**-24)
    out_a, out_b = (testing.to_float64(x[0], "bfloat16") for x in (a, b))
    np.testing.assert_allclose(out_a, out_b, rtol=2 * rounding, atol=64 * sums)
    np.testing.assert_allclose(a[1], b[1], rtol=16 * sums, atol=16 * sums)


def same(a, b):
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@examples
@hypothesis.given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_a_row_changes_nothing(problem, rng):
    q, k, v, lists, options = problem
    shuffled = np.full((*lists.shape[:-1], lists.shape[-1] + 2), -1, lists.dtype)
    for place in np.ndindex(*lists.shape[:-1]):
        kept = [c for c in lists[place].tolist() if c >= 0]
        rng.shuffle(kept)
        shuffled[place][: len(kept)] = kept
    for level in each_level():
        assert same(attend(q, k, v, lists, **options), attend(q, k, v, shuffled, **options)), level


@examples
@hypothesis.given(problems(lists=False), st.sampled_from([(1, 1), (16, 16), (7, 50), (50, 7), (64, 64), (1000, 1000)]))
def test_all_blocks_listed_is_no_list(problem, block_shape):
    q, k, v, _, options = problem
    options["block_shape"] = block_shape
    full = sabi.dense(q.shape[2], k.shape[2], block_shape)
    for level in each_level():
        assert same(attend(q, k, v, full, **options), attend(q, k, v, None, **options)), level


@examples
@hypothesis.given(problems())
def test_a_fully_masked_block_changes_nothing(problem):
    """Keys beyond kv_len, in new blocks and in the last one, whatever they hold."""
    q, k, v, lists, options = problem
    kv_len, block_kv = k.shape[2], options["block_shape"][1]
    more = block_kv + 3
    junk = testing.round_to(np.full((*k.shape[:2], more, 1), np.nan), "bfloat16" if bits_option(q) else q.dtype.name)
    longer_k = np.concatenate([k, np.broadcast_to(junk, (*k.shape[:2], more, k.shape[3]))], axis=2)
    longer_v = np.concatenate([v, np.broadcast_to(junk, (*v.shape[:2], more, v.shape[3]))], axis=2)
    beyond = -(-kv_len // block_kv)  # a column that holds no valid key
    longer = np.where(sabi.counts(lists)[..., None] > np.arange(lists.shape[-1] + 1), np.pad(lists, [(0, 0)] * 3 + [(0, 1)]), beyond)
    ends = sabi.counts(lists)[..., None] < np.arange(lists.shape[-1] + 1)
    longer = np.where(ends, -1, longer)
    lens = {"kv_lens": [kv_len] * q.shape[0]}
    for level in each_level():
        assert same(attend(q, k, v, lists, **options), attend(q, longer_k, longer_v, longer, **lens, **options)), level


@examples
@hypothesis.given(problems(rules=False, dtypes=("float32", "float16", "bfloat16", "float64")), st.integers(0, 150))
def test_split_keys_merge_to_the_whole(problem, cut):
    q, k, v, lists, options = problem
    columns = -(-k.shape[2] // options["block_shape"][1])
    left = sabi.dense(q.shape[2], k.shape[2], options["block_shape"])[..., : cut % (columns + 1)].astype(np.int32)
    left = np.pad(left, [(0, 0)] * 3 + [(0, 1)], constant_values=-1)
    parts = sabi.intersection(lists, left, columns, dtype="int32"), sabi.difference(lists, left, columns, dtype="int32")
    wide = [testing.round_to(testing.to_float64(x, "bfloat16"), "float64" if x.dtype == np.float64 else "float32") for x in (q, k, v)]
    whole, whole_lse = attend(*wide, lists, **options)
    states = [attend(*wide, part, **options) for part in parts]
    merged, merged_lse = blitz_attn.merge_states(*states[0], *states[1])
    tolerance = 1e-12 if wide[0].dtype == np.float64 else 2e-6
    scale = max(1.0, float(np.abs(wide[2]).max()))
    np.testing.assert_allclose(merged, whole, rtol=tolerance, atol=tolerance * scale)
    np.testing.assert_allclose(merged_lse, whole_lse, rtol=tolerance, atol=tolerance * 4)


@examples
@hypothesis.given(problems(), st.integers(0, 1))
def test_a_batch_entry_does_not_know_the_others(problem, seed):
    q, k, v, lists, options = problem
    other = np.random.default_rng(seed)
    for level in each_level():
        out, lse = attend(q, k, v, lists, **options)
        for b in range(q.shape[0]):
            alone = attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], lists[b : b + 1], **options)
            assert same(alone, (out[b : b + 1], lse[b : b + 1])), level
        larger = [np.concatenate([x[other.permutation(len(x))], x]) for x in (q, k, v)]
        again = attend(*larger, np.concatenate([lists, lists]), **options)
        assert same([x[len(q) :] for x in again], (out, lse)), level


@examples
@hypothesis.given(problems())
def test_a_head_does_not_know_the_others(problem):
    q, k, v, lists, options = problem
    group = q.shape[1] // k.shape[1]
    for _ in each_level():
        out, lse = attend(q, k, v, lists, **options)
        for h in range(q.shape[1]):
            kv = slice(h // group, h // group + 1)
            alone = attend(q[:, h : h + 1], k[:, kv], v[:, kv], lists[:, h : h + 1], **options)
            close(alone, (out[:, h : h + 1], lse[:, h : h + 1]))


@examples
@hypothesis.given(problems(), st.integers(2, 5))
def test_the_number_of_threads_changes_nothing(problem, threads):
    q, k, v, lists, options = problem
    for level in each_level():
        assert same(attend(q, k, v, lists, num_threads=1, **options), attend(q, k, v, lists, num_threads=threads, **options)), level


@examples
@hypothesis.given(problems())
def test_grouped_heads_are_repeated_keys(problem):
    q, k, v, lists, options = problem
    group = q.shape[1] // k.shape[1]
    for _ in each_level():
        repeated = attend(q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1), lists, **options)
        close(attend(q, k, v, lists, **options), repeated)


@examples
@hypothesis.given(problems(), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=4))
def test_ragged_sequences_are_separate_calls(problem, sizes):
    q, k, v, _, options = problem
    q, k, v = (np.ascontiguousarray(np.concatenate([x[0]] * 3, axis=1)[:, :200].swapaxes(0, 1)) for x in (q, k, v))
    sizes = [(min(n, q.shape[0] // 4), min(m, k.shape[0] // 4)) for n, m in sizes]
    cut_q, cut_kv = (np.cumsum([0, *lengths]) for lengths in zip(*sizes, strict=True))
    q, k, v = q[: cut_q[-1]], k[: cut_kv[-1]], v[: cut_kv[-1]]
    longest_q, longest_kv = (max(lengths) for lengths in zip(*sizes, strict=True))
    if not longest_q or not longest_kv:
        return
    block_shape, heads = options["block_shape"], q.shape[1]
    rows, columns = -(-longest_q // block_shape[0]), -(-longest_kv // block_shape[1])
    chosen = np.random.default_rng(3).random((len(sizes), heads, rows, columns)) < 0.6
    ragged = {"layout": "TND", "cu_seqlens_q": cut_q, "cu_seqlens_kv": cut_kv}
    for level in each_level():
        out, lse = attend(q, k, v, sabi.from_block_mask(chosen, dtype="int32"), **ragged, **options)
        for n, (q_len, kv_len) in enumerate(sizes):
            if not q_len:
                continue
            at_q, at_kv = slice(cut_q[n], cut_q[n + 1]), slice(cut_kv[n], cut_kv[n + 1])
            one = [x[at].swapaxes(0, 1)[None] for x, at in ((q, at_q), (k, at_kv), (v, at_kv))]
            mask = chosen[n : n + 1, :, : -(-q_len // block_shape[0]), : -(-kv_len // block_shape[1])]
            alone = attend(*one, sabi.from_block_mask(mask, dtype="int32") if kv_len else None, **options)
            assert same((out[at_q].swapaxes(0, 1)[None], lse[at_q].T[None]), alone), level


@examples
@hypothesis.given(problems())
def test_layouts_hold_the_same_bits(problem):
    q, k, v, lists, options = problem
    for level in each_level():
        out, lse = attend(q, k, v, lists, **options)
        for layout in ("BSND", "BSH"):
            heads = {"num_heads": q.shape[1], "num_kv_heads": k.shape[1]} if layout == "BSH" else {}
            arrays = [testing.to_layout(x, layout) for x in (q, k, v)]
            other, other_lse = attend(*arrays, lists, layout=layout, **heads, **options)
            assert same((other, other_lse), (testing.to_layout(out, layout), lse)), (level, layout)


@examples
@hypothesis.given(problems(dtypes=("float32", "float64")), st.integers(-20, 20))
def test_a_power_of_two_on_v_goes_through(problem, power):
    q, k, v, lists, options = problem
    out, lse = attend(q, k, v, lists, **options)
    scaled, scaled_lse = attend(q, k, v * v.dtype.type(2.0**power), lists, **options)
    assert same((scaled, scaled_lse), (out * out.dtype.type(2.0**power), lse))


@examples
@hypothesis.given(problems())
def test_inputs_are_not_written_and_calls_repeat(problem):
    q, k, v, lists, options = problem
    before = [x.tobytes() for x in (q, k, v, lists)]
    for x in (q, k, v, lists):
        x.flags.writeable = False
    first, second = attend(q, k, v, lists, **options), attend(q, k, v, lists, **options)
    assert same(first, second)
    assert before == [x.tobytes() for x in (q, k, v, lists)]
