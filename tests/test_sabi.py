"""Block lists: random lists by upstream's rule, sizes at the limits, unusual integers, and refusals. The results of builders, conversions, set
operations and measures are checked in tests/test_problems.py."""

import itertools
import mmap
import pickle
import random
import time

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi


@pytest.mark.parametrize("lengths", [[1], [5, 0, 9, 1], [0, 0, 3], np.array([40, 7, 33], np.uint8)], ids=str)
def test_document_ranges(lengths):
    """Other token rules apply together with the ranges, both with a list of the documents' blocks and without a list."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    n = len(document)
    ranges = sabi.document_ranges(lengths)
    assert (ranges == sabi.kv_ranges_from_token_mask(document[:, None] == document)).all()
    q, k, v = (np.random.default_rng(s).standard_normal((1, 2, n, 8)) for s in range(3))
    i = np.arange(n)
    mask = (document[:, None] == document) & (i <= i[:, None]) & (i >= i[:, None] - 4)
    rules = {"block_shape": (8, 8), "kv_ranges": ranges, "causal": True, "window": (4, 0)}
    expected = blitz_attn.block_sparse_attention(q, k, v, attn_mask=mask)
    for lists in (None, sabi.document(lengths, block_shape=(8, 8))):
        np.testing.assert_allclose(blitz_attn.block_sparse_attention(q, k, v, lists, **rules), expected, atol=1e-12)


# ---- Random lists by upstream's rule -------------------------------------------------------------------------------


def upstream_rows(rows, columns, sparsity, seed, frame):
    """The rule restated: rows at the top and bottom are full. The others have the forced columns and sampled ones, the same number
    in each of these rows."""
    left, right, top, bottom = frame
    forced = {c for c in range(columns) if c < left or c >= columns - right}
    full = {r for r in range(rows) if r < top or r >= rows - bottom}
    budget = int(rows * columns * (1.0 - sparsity)) - len(forced) * (rows - len(full)) - columns * len(full)
    extra = -(-budget // (rows - len(full))) if rows > len(full) else 0
    generator = random.Random(seed)
    others = [c for c in range(columns) if c not in forced]
    return [list(range(columns)) if r in full else sorted([*forced, *generator.sample(others, max(0, extra))]) for r in range(rows)]


@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("frame", [(0, 0, 0, 0), (2, 1, 3, 1), (1, 1, 0, 0), (0, 0, 1, 0)])
@pytest.mark.parametrize(("s_q", "s_kv", "block_shape"), [(4096, 4096, (128, 128)), (3000, 5000, (256, 128))])
def test_random_with_frame_follows_upstream(s_q, s_kv, block_shape, frame, sparsity):
    rows, columns = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
    drawn = sabi.random_with_frame(s_q, s_kv, block_shape, sparsity, frame=sabi.FrameWidths(*frame), batch=2, heads=3, seed=99)
    for b, h in itertools.product(range(2), range(3)):
        expected = upstream_rows(rows, columns, sparsity, 99 + b + h, frame)
        got = [[int(c) for c in row if c >= 0] for row in drawn[b, h]]
        assert got == expected


def test_random_with_frame_unsorted_is_a_shuffle():
    shapes = {"frame": sabi.FrameWidths(1, 1, 1, 1), "heads": 2}
    shuffled = sabi.random_with_frame(2048, sparsity=0.5, sort=False, **shapes)
    for row in shuffled.reshape(-1, shuffled.shape[-1]):
        kept = row[row >= 0].tolist()
        assert len(set(kept)) == len(kept)
        assert (row[len(kept) :] == -1).all()
    assert any(row.tolist() != sorted(row.tolist()) for row in shuffled[0])
    assert (sabi.counts(shuffled) == sabi.counts(sabi.random_with_frame(2048, sparsity=0.5, **shapes))).all()
    assert (shuffled[0, 1] == sabi.random_with_frame(2048, sparsity=0.5, sort=False, seed=1235, frame=shapes["frame"])[0, 0]).all()


def test_large_list_is_quick():
    start = time.process_time()
    drawn = sabi.random_with_frame(118806, sparsity=0.1, frame=sabi.FrameWidths(29, 1, 29, 1), heads=3)
    assert drawn.shape[:3] == (1, 3, 929)
    assert time.process_time() - start < 10  # it takes about half a second; sanitizers need more


def test_lists_of_million_tokens_in_small_blocks():
    """The grids have more than 2**28 blocks, of which the lists name few."""
    tokens, shape = 1_100_000, (64, 64)
    rows = np.arange(17188)[:, None]
    near = rows + np.arange(-64, 1)
    local = sabi.sliding_window(tokens, block_shape=shape, window=(4096, 0), dtype="int32")
    assert np.array_equal(np.sort(local[0, 0], axis=1), np.sort(np.where(near >= 0, near, -1), axis=1))
    both = sabi.sink_local(tokens, block_shape=shape, sink=64, local=4096, dtype="int32")
    assert np.array_equal(both[0, 0, 70:], np.concatenate([np.zeros_like(rows), near], axis=1)[70:])
    each = sabi.document([6400] * 171, block_shape=shape)
    assert (each[0, 0] == rows[:17100] // 100 * 100 + np.arange(100)).all()
    assert (sabi.check(local, tokens, block_shape=shape) == local).all()
    most = "block_shape: expected blocks so large that a list has at most 268435456 entries, got 17188 rows of up to 17188"
    with pytest.raises(ValueError, match=most):
        sabi.causal(tokens, block_shape=shape)
    most = "block_shape: expected blocks so large that a grid has at most 16777216 rows and 268435456 columns"
    with pytest.raises(ValueError, match=most):
        sabi.sliding_window(1 << 40, window=(0, 0))


# ---- Conversions ---------------------------------------------------------------------------------------------------


def test_dtype_choice():
    wide = np.zeros((1, 65535), bool)
    wide[0, 65534] = True
    assert sabi.from_block_mask(wide).dtype == sabi.causal(512).dtype == np.int32
    assert sabi.from_block_mask(wide[:, 1:], dtype="uint16").tolist() == [[65533]]
    assert sabi.from_block_mask(np.zeros((1, 3), bool), width=2, dtype="uint16").tolist() == [[65535, 65535]]
    with pytest.raises(ValueError, match="dtype: expected room for 70000 columns"):
        sabi.from_block_mask(np.zeros((1, 70000), bool), dtype="uint16")
    with pytest.raises(TypeError, match="dtype: expected uint16, int16, int32 or int64, got float32"):
        sabi.dense(128, dtype="float32")


def test_picture_limits_its_size():
    text = sabi.picture(sabi.causal(128 * 100), max_rows=10, max_columns=5)
    lines = text.splitlines()
    assert lines[0] == "head (0, 0): 100 x 100 blocks, 50.5% kept, 10 x 20 blocks per cell"
    assert len(lines) == 11
    assert max(len(line) for line in lines[1:]) == 10
    assert lines[1] == "░░"
    assert lines[10].startswith("████████░░")
    assert sabi.picture(sabi.dense(256)[0, 0]) == "2 x 2 blocks, 100.0% kept\n████\n████"


def test_a_plan_of_a_frame_can_be_pickled():
    plan = sabi.frame_plan(4, 4, 0.5)
    assert isinstance(plan, sabi.FramePlan)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_picture_of_no_blocks():
    """A head without rows or columns has its line and no picture below it."""
    assert sabi.picture(np.zeros((2, 0, 3), np.int32)) == "head (0,): 0 x 0 blocks, 0.0% kept\nhead (1,): 0 x 0 blocks, 0.0% kept"
    assert sabi.picture(np.full((2, 1), -1), columns=0) == "2 x 0 blocks, 0.0% kept"


# ---- Refusals ------------------------------------------------------------------------------------------------------


def closed_mmap():
    """A buffer that can no longer be read, and that is not a sequence."""
    memory = mmap.mmap(-1, 16)
    memory.close()
    return memory


SHAPE = r"sabi: expected shape \(2 or 1, 4 or 1, 2, W\), with 2 rows = ceil\(200 queries / block_shape\[0\] = 128\), got "


@pytest.mark.parametrize(
    ("lists", "error", "sentence"),
    [
        (np.zeros((1, 1, 2, 2)), TypeError, "sabi: expected an integer array, got float64"),
        (np.zeros((3, 2), int), ValueError, rf"{SHAPE}\(1, 1, 3, 2\)"),
        (np.zeros((1, 1, 3, 1), int), ValueError, rf"{SHAPE}\(1, 1, 3, 1\)"),
        (np.zeros((1, 3, 2, 1), int), ValueError, rf"{SHAPE}\(1, 3, 2, 1\)"),
        (np.zeros((3, 1, 2, 1), int), ValueError, rf"{SHAPE}\(3, 1, 2, 1\)"),
        (np.full((1, 1, 2, 1), 3), ValueError, r"sabi: expected block columns from 0 to 2, or a pad, got 3 at \[0, 0, 0, 0\]"),
        (np.array([[[[0, 65535], [1, 0]]]]), ValueError,
         r"sabi: expected block columns from 0 to 2, or a pad, got 65535 at \[0, 0, 0, 1\] \(65535 is a pad in uint16 alone\)"),
        (np.array([[[[0, 1, -1], [2, 0, 2]]]]), ValueError, r"sabi: expected each block column once per row, got 2 again at \[0, 0, 1, 2\]"),
    ],
)  # fmt: skip
def test_check_refuses(lists, error, sentence):
    with pytest.raises(error, match=f"^{sentence}$"):
        sabi.check(lists, 200, 300, batch=2, heads=4)


def test_check_names_all_sizes_that_an_axis_may_have():
    with pytest.raises(ValueError, match=r"^sabi: expected shape \(B or 1, 4, 2 or 1, 1, W\), with 1 rows = ceil\(100 "):
        sabi.check(np.zeros((1, 3, 1, 1), int), 100, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"^sabi: expected shape \(1, H, Hkv or 1, 1, W\), with 1 rows = ceil\(100 "):
        sabi.check(np.zeros((3, 1, 1, 1), int), 100, batch=1)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_check_and_attention_refuse_by_the_same_sentence(batch, heads):
    """Lists have wrong axes, or wrong entries at random positions. The sentence names the first wrong entry."""
    rng = np.random.default_rng(batch * 10 + heads[1])
    q, k = (np.zeros((batch, n, 200, 8), np.float32) for n in heads)
    refused = 0
    for _ in range(120):
        shape = [batch, heads[0], 4, int(rng.integers(1, 6))]
        axis = int(rng.integers(8))
        if axis < 3:
            shape[axis] += int(rng.integers(-1, 3))
        lists = rng.permuted(np.tile(np.arange(5), (*shape[:3], 1)), axis=-1)[..., : shape[3]]
        lists = lists.astype(rng.choice(["int16", "int32", "int64", "uint16"]))
        for _ in range(int(rng.integers(0, 3)) if lists.size else 0):
            where = tuple(int(rng.integers(n)) for n in lists.shape)
            lists[where] = rng.choice([0, 1, 2, 3, 5, 9]) if rng.integers(4) else np.array(-1).astype(lists.dtype)
        errors = []
        for call in (
            lambda lists=lists: blitz_attn.block_sparse_attention(q, k, k, lists, block_shape=(50, 40)),
            lambda lists=lists: sabi.check(lists, 200, 200, (50, 40), batch=batch, heads=heads[0], kv_heads=heads[1]),
        ):
            try:
                call()
                errors.append("none")
            except ValueError as error:
                errors.append(str(error))
        assert errors[0] == errors[1]
        refused += errors[0] != "none"
    assert 20 < refused < 110


INTEGERS = [np.dtype(order + kind) for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8") for order in "<>"]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.str)
def test_rows_of_integers_of_any_kind(dtype):
    """Compressed rows, counts and lists may have any integer dtype. 255 and 65535 are columns in dtypes in which they are not pads."""
    columns = [0, min(np.iinfo(dtype).max, 2**16 - 1), 7]
    indptr, indices = np.array([0, 0, 2, 3], dtype), np.array(columns, dtype)
    lists = np.array([[-1, -1], columns[:2], [7, -1]])
    for one, other in ((indptr, indices), (indptr, columns), ([0, 0, 2, 3], indices)):
        np.testing.assert_array_equal(sabi.from_csr(one, other, (), dtype="int32"), lists)
    counts, entries = np.diff([0, 0, 2, 3]).astype(dtype), np.array([[0, 0], columns[:2], [7, 0]], dtype)
    np.testing.assert_array_equal(sabi.from_num_idx(counts, entries, dtype="int32"), lists)
    if dtype.kind == "u" and dtype.itemsize == 2:
        columns[1] = 65534  # 65535 is the pad of this dtype
    whole = np.array([columns], dtype)  # a row without a pad, because other unsigned dtypes have none
    np.testing.assert_array_equal(sabi.to_csr(whole)[1], np.sort(columns))
    assert sabi.counts(whole).tolist() == [3]


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1])
def test_numbers_beyond_int64_do_not_wrap(number):
    """Such numbers become neither small numbers nor pads. Sentences about compressed rows say 2**63 - 1 for every such number."""
    rows, most = np.array([0, number, 1], np.uint64), 2**63 - 1
    with pytest.raises(ValueError, match=f"^indices: expected columns below 268435456, got {most}$"):
        sabi.from_csr([0, 3], rows)
    with pytest.raises(ValueError, match=f"^indices: expected columns below 9, got {most}$"):
        sabi.from_csr([0, 3], rows, columns=9)
    with pytest.raises(ValueError, match=rf"^indptr: expected numbers rising from 0 to 1, the length of indices, got \[0, {most}, 1\]$"):
        sabi.from_csr(rows, [0])
    calls = [
        sabi.counts,
        sabi.to_csr,
        lambda x: sabi.check(x[None, None], 1, 9, (1, 1)),
        lambda x: sabi.to_block_mask(x, 9),
        lambda x: sabi.density(x, 9),
    ]
    if number < 2**63:  # a valid column if the number of columns is not known
        assert calls.pop(0)(rows[None]).tolist() == [3]
    for call in calls:
        with pytest.raises(ValueError, match=f"^sabi: expected (block )?columns .*, got {number}\\b"):
            call(rows[None])


def test_differences_of_indptr_do_not_wrap():
    """The differences of these numbers, taken in 64 bits, are all positive."""
    with pytest.raises(ValueError, match="^indptr: expected numbers rising from 0 to 3, .* got .0, 9223372036854775807, "):
        sabi.from_csr([0, 2**63 - 1, -(2**63), -1, 3], [0, 2, 1])


@pytest.mark.parametrize("column", [2**31, 2**32, 2**63 - 1])
def test_columns_of_compressed_rows_must_fit_into_int32(column):
    with pytest.raises(ValueError, match=rf"^sabi: expected columns below 2\*\*31, got {column}$"):
        sabi.to_csr(np.array([[0, column]]))
    assert sabi.to_csr(np.array([[0, 2**31 - 1]]))[1].tolist() == [0, 2**31 - 1]


class Silent:
    """An object whose repr() raises."""

    def __repr__(self):
        raise RuntimeError("no text")


def test_a_sentence_about_an_object_without_repr():
    with pytest.raises(TypeError, match="^dtype: expected uint16, int16, int32 or int64, got Silent$"):
        sabi.dense(8, 8, dtype=Silent())


def test_ranges_of_a_token_mask():
    """Without a list, the ranges are the mask. With a list, the ranges and the blocks together are the mask."""
    rng = np.random.default_rng(0)
    runs = np.sort(rng.integers(0, 30, (2, 3, 20, 2)), axis=-1)
    keys = np.arange(29)
    mask = (keys >= runs[..., :1]) & (keys < runs[..., 1:])
    found = sabi.kv_ranges_from_token_mask(mask)
    assert (found.shape, found.dtype) == ((2, 3, 20, 2), np.int32)
    assert (((keys >= found[..., :1]) & (keys < found[..., 1:])) == mask).all()
    assert not found[~mask.any(axis=-1)].any()
    kept = mask & sabi.to_token_mask(sabi.random_with_frame(20, 29, (4, 5), 0.5, seed=1)[0, 0], 20, 29, (4, 5))
    with pytest.raises(ValueError, match=r"mask: expected rows whose keys are a run, got a gap in row \[0, 0, \d+\]"):
        sabi.kv_ranges_from_token_mask(kept)
    blocks = sabi.to_token_mask(sabi.from_token_mask(kept, (4, 5)), 20, 29, (4, 5))
    found = sabi.kv_ranges_from_token_mask(kept, (4, 5))
    assert (((keys >= found[..., :1]) & (keys < found[..., 1:]) & blocks) == kept).all()
    assert sabi.kv_ranges_from_token_mask(np.zeros((3, 0), bool)).tolist() == [[0, 0]] * 3
    assert sabi.kv_ranges_from_token_mask(np.zeros((0, 3), bool)).shape == (0, 2)


def test_masks_must_be_boolean():
    for call in (sabi.from_block_mask, sabi.from_token_mask, sabi.kv_ranges_from_token_mask):
        with pytest.raises(TypeError, match="mask: expected booleans, got int64"):
            call(np.zeros((2, 2), np.int64))


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (ValueError, "s_q: expected at least 1 token, got 0", lambda: sabi.dense(0)),
        (ValueError, r"block_shape: expected two positive numbers \(queries, keys\), got \(0, 128\)",
         lambda: sabi.dense(128, 128, (0, 128))),
        (ValueError, r"window: expected two counts of tokens or -1, got \(-2, 0\)", lambda: sabi.sliding_window(128, window=(-2, 0))),
        (ValueError, "sink, local: expected numbers of tokens from 0 on, got -1, 0", lambda: sabi.sink_local(128, sink=-1, local=0)),
        (ValueError, "lengths: expected as many numbers of at least 0", lambda: sabi.document([5, -1])),
        (ValueError, "lengths: expected lengths of at least 0 whose sum is from 1 to 16777216, got ",
         lambda: sabi.document_ranges([5, -1])),
        (ValueError, "stride, reach: expected a stride from 1", lambda: sabi.dilated(128, stride=0)),
        (ValueError, r"vertical: expected key positions in 0..127, got 128..128",
         lambda: sabi.vertical_slash(128, vertical=[128], slash=[])),
        (ValueError, "frame: expected widths within 4 rows and 4 columns",
         lambda: sabi.random_with_frame(512, frame=sabi.FrameWidths(5, 0, 0, 0))),
        (ValueError, "frame: expected at most 10.00% of the",
         lambda: sabi.random_with_frame(512, sparsity=0.9, frame=sabi.FrameWidths(1, 1, 0, 0))),
        (ValueError, "sabi: expected columns below 3, got 3", lambda: sabi.to_block_mask(np.array([[3]]), 3)),
        (ValueError, "width: expected at least 4, the blocks of the fullest row, got 3",
         lambda: sabi.from_block_mask(np.ones((2, 4), bool), width=3)),
        (ValueError, "indptr: expected numbers rising from 0 to 1", lambda: sabi.from_csr([0, 2], [1])),
        (ValueError, "lead: expected axes that divide 2 rows", lambda: sabi.from_csr([0, 1, 2], [1, 0], lead=(3,))),
        (ValueError, "indices: expected columns from 0 on, got -1", lambda: sabi.from_csr([0, 1], [-1])),
        (ValueError, "idx: expected columns from 0 on, got -1", lambda: sabi.from_num_idx([1], [[-1, 0]])),
        (ValueError, "block_shape: expected two positive numbers", lambda: sabi.dense(8, 8, (3, 4, 5))),
        (ValueError, r"num: expected counts in 0..2, got 3..3", lambda: sabi.from_num_idx([3], [[0, 1]])),
        (ValueError, r"rows: expected 1..2, got 3", lambda: sabi.refine(np.array([[0]]), (2, 2), 3, 2)),
        (ValueError, "columns: expected at least 1, got 0", lambda: sabi.density(np.array([[0]]), 0)),
        (ValueError, "sabi: expected columns below 2, got 3", lambda: sabi.density(sabi.causal(512), 2)),
        (ValueError, "max_rows: expected at least 1, got -1", lambda: sabi.picture(sabi.causal(512), max_rows=-1)),
        (ValueError, "sparsity: expected a number from 0 to 1, got 90", lambda: sabi.random_with_frame(1024, sparsity=90)),
        (ValueError, r"sabi: expected at least one row, got shape \(0, W\)", lambda: sabi.density(np.zeros((0, 1), int), 4)),
        (ValueError, r"sabi: expected at least one row, got shape \(2, 0, W\)",
         lambda: sabi.density(np.zeros((2, 0, 1), int), 4, per_head=True)),
        (ValueError, "sabi: expected 3 rows for 300 queries in blocks of 128, got 1",
         lambda: sabi.to_token_mask(np.array([[0]]), 300, 300)),
        (ValueError, "width: expected at least 2, the blocks of the fullest row, got 1", lambda: sabi.random_with_frame(512, width=1)),
        (TypeError, "s_q: expected an integer, got float", lambda: sabi.causal(np.inf, 8)),
        (ValueError, "s_q: expected an integer of 64 bits, got 9223372036854775808", lambda: sabi.dense(2**63, 8)),
        (TypeError, "block_shape: expected two positive numbers", lambda: sabi.dense(8, 8, 3)),
        (TypeError, "block_shape: expected an integer, got str", lambda: sabi.dense(8, 8, (3, "x"))),
        (TypeError, "window: expected two token counts", lambda: sabi.sliding_window(100, window=np.inf)),
        (ValueError, "s_q: expected at most 281474976710656 tokens, got 4611686018427387904", lambda: sabi.causal(2**62, 8)),
        (TypeError, "dtype: expected uint16, int16, int32 or int64, got .two words", lambda: sabi.dense(8, 8, dtype="two words")),
        (TypeError, "causal: expected True or False, got ndarray", lambda: sabi.sink_local(8, sink=1, local=1, causal=np.ones(2))),
        (TypeError, "lengths: expected integers, got <U1", lambda: sabi.document(["a"])),
        (ValueError, "lengths: expected 1 to 281474976710656 tokens in all, got 0", lambda: sabi.document([0])),
        (TypeError, "vertical: expected integers, got datetime64",
         lambda: sabi.vertical_slash(8, vertical=np.zeros(1, "M8[s]"), slash=[0])),
        (ValueError, "slash: expected axes that broadcast with those of vertical",
         lambda: sabi.vertical_slash(8, vertical=np.zeros((2, 1), int), slash=np.zeros((3, 1), int))),
        (ValueError, "sparsity: expected a number from 0 to 1, got nan", lambda: sabi.frame_plan(4, 4, np.nan)),
        (TypeError, "sparsity: expected a number, got list", lambda: sabi.random_with_frame(8, sparsity=[0.5])),
        (TypeError, "frame: expected four widths, got str", lambda: sabi.frame_plan(4, 4, 0.5, "1111")),
        (ValueError, "heads: expected 0 to 1048576, got 4611686018427387904", lambda: sabi.random_with_frame(8, heads=2**62)),
        (ValueError, "width: expected 0 to 268435456, got 2147483648", lambda: sabi.causal(8, 8, width=2**31)),
        (TypeError, "a: expected an integer array, got float64", lambda: sabi.union([[0.5]], [[0]])),
        (ValueError, "b: expected columns below 2, got 3", lambda: sabi.difference([[0]], [[3]], 2)),
        (ValueError, "b: expected axes that broadcast with a's", lambda: sabi.union([[0]] * 2, [[0]] * 3)),
        (ValueError, "factors: expected two positive numbers, got \\(0, 2\\)", lambda: sabi.refine([[0]], (0, 2), 1, 1)),
        (TypeError, "indptr: expected integers, got dict", lambda: sabi.from_csr({}, [0])),
        (TypeError, "indptr: expected integers, got mmap", lambda: sabi.from_csr(closed_mmap(), [0])),
        (ValueError, "indices: expected columns below 268435456, got 9223372036854775807",
         lambda: sabi.from_csr([0, 1], np.array([2**64 - 1], np.uint64))),
        (ValueError, r"indices: expected one axis, got shape \(1, 1\)", lambda: sabi.from_csr([0, 1], [[0]])),
        (ValueError, "lead: expected axes that divide 1 rows, got \\[-1\\]", lambda: sabi.from_csr([0, 1], [0], lead=[-1])),
        (TypeError, "per_head: expected True or False, got NoneType", lambda: sabi.density([[0]], 1, per_head=None)),
        (ValueError, "columns: expected 0 to 268435456, got 4611686018427387904", lambda: sabi.to_block_mask([[0]], 2**62)),
        (ValueError, "s_q: expected tokens whose mask has at most", lambda: sabi.to_token_mask([[0]], 2**40, 2**40, (2**40, 2**40))),
        (ValueError, "block_shape: expected blocks so large that a grid has at most", lambda: sabi.dense(54000, 54000, (1, 1))),
        (ValueError, r"mask: expected shape \(..., rows, columns\), got \(3,\)", lambda: sabi.from_block_mask(np.zeros(3, bool))),
        (ValueError, "columns: expected so few that the mask has at most 268435456 blocks, got 32768",
         lambda: sabi.to_block_mask(np.zeros((2**16, 1), int), 2**15)),
        (ValueError, "rows: expected a grid of at most 268435456 blocks, got 1048576 x 1048576",
         lambda: sabi.refine([[0]], (2**20, 2**20), 2**20, 2**20)),
        (ValueError, r"vertical, slash: expected at most three axes, got \(1, 1, 1, 1\) and \(1,\)",
         lambda: sabi.vertical_slash(8, vertical=np.zeros((1, 1, 1, 1), int), slash=[0])),
        (ValueError, "slash: expected distances of at most 281474976710656 tokens, got -4611686018427387904..0",
         lambda: sabi.vertical_slash(8, vertical=[0], slash=[0, -(2**62)])),
        (ValueError, r"vertical, slash: expected at most 1048576 heads in all, got \(1025, 1025\)",
         lambda: sabi.vertical_slash(8, vertical=np.zeros((1025, 1, 1), np.int8), slash=np.zeros((1, 1025, 1), np.int8))),
        (ValueError, "rows, columns: expected at most 1048576 blocks each, got 2097152 and 4",
         lambda: sabi.frame_plan(2**21, 4, 0.5)),
        (ValueError, "batch, heads: expected at most 1048576 heads in all, got 2048 x 2048",
         lambda: sabi.random_with_frame(8, batch=2**11, heads=2**11)),
        (ValueError, "sabi: expected columns below 268435456, got 1099511627776", lambda: sabi.to_block_mask([[2**40]])),
    ],
)  # fmt: skip
def test_refusals(error, sentence, call):
    """Wrong arguments are refused by a sentence. A list of 11 GiB is refused before it is made."""
    with pytest.raises(error, match=f"^{sentence}"):
        call()


class Nested:
    """A sequence whose two items are the sequence itself."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self


def test_items_without_end():
    with pytest.raises(TypeError, match="^sabi: expected an integer array, got Nested"):
        sabi.counts(Nested())
