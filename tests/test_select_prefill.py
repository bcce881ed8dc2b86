"""Choosers of blocks for prefill agree with their float64 twins, and keep their promises for any values, also for queries that are a slice of a
longer sequence (`q_begin`), and for queries that each see a run of keys (`kv_ranges`)."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select, testing
from cases import DTYPES, ISA_LEVELS, bits_option, same_bits

CHOOSERS = {
    "pooled": select.Pooled(),
    "mean": select.Pooled((4, 16), "mean", "mean"),
    "bound": select.Pooled(16, "bound"),
    "antidiagonal": select.Antidiagonal(8),
    "sampled_rows": select.SampledRows(4),
    "vertical_slash": select.VerticalSlash(24),
}
NAMES = ["pooled", "antidiagonal", "sampled_rows", "vertical_slash"]
BY_ROW = [{"top_p": 0.8}, {"threshold": 0.05}, {"top_k": 4}]
BUDGETS = [{"density": 0.4}, *BY_ROW]
RULES = {"all": {}, "causal": {"causal": True}, "window": {"window": (40, 12)}, "both": {"causal": True, "window": (70, 0)}}
Q, KV = 150, 170
BOTH = [blitz_attn.select_blocks_prefill, reference.select_blocks_prefill]


def budget_name(budget):
    return next(iter(budget))


def of_documents(cuts, order, queries):
    """Ranges for queries that are divided into len(order) parts. Part n sees document order[n], whose keys are between two of the cuts."""
    part = np.arange(queries) * len(order) // queries
    return np.stack([np.asarray(cuts)[np.asarray(order)[part]], np.asarray(cuts)[np.asarray(order)[part] + 1]], axis=-1)


def ranges_of(kind):
    """Ranges (150, 2) for 150 queries and 170 keys."""
    place, rng = np.arange(Q) + KV - Q, np.random.default_rng(11)
    if kind == "documents":
        return of_documents([0, 37, 101, 170], [0, 1, 2], Q)
    if kind == "other order":  # a block row sees documents with other documents between them
        return of_documents([0, 37, 64, 101, 170], [3, 0, 2, 1, 0], Q)
    if kind == "chunks":
        return np.stack([place // 48 * 48, place + 1], axis=-1)
    if kind == "prefix":
        return np.stack([np.zeros(Q, int), np.maximum(place + 1, 77)], axis=-1)
    if kind == "images":
        image = (place >= 50) & (place < 90)
        return np.stack([np.zeros(Q, int), np.where(image, 90, place + 1)], axis=-1)
    if kind == "empty":
        ends = of_documents([0, 37, 101, 170], [0, 1, 2], Q)
        ends[20:75] = (60, 60)
        ends[110:] = (90, 30)
        return ends
    if kind == "outside":
        ends = np.sort(rng.integers(-40, KV + 40, (Q, 2)), axis=-1)
        ends[::7] = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
        ends[::11] = (KV + 3, np.iinfo(np.int64).max)
        return ends
    return np.sort(rng.integers(0, KV + 1, (Q, 2)), axis=-1)  # random ranges


KINDS = ["documents", "other order", "chunks", "prefix", "images", "empty", "outside", "any"]


def make(*sizes, seed=0, **options):
    q, k, _ = testing.make_qkv(*sizes, seed=seed, **options)
    return q, k


PLACES = {  # positions of queries: at the end; by q_begin, so that some see no key in a window; or with a run of keys for each query
    "last": {},
    "near": {"q_begin": [20, 3]},
    "far": {"q_begin": [-500, 165]},
    "farther": {"q_begin": [2**30 - 1, -30]},
    **{kind: {"kv_ranges": np.stack([ranges_of(kind), ranges_of("documents")])} for kind in KINDS[1::2]},
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["all", "both"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("budget", BUDGETS, ids=budget_name)
@pytest.mark.parametrize("name", CHOOSERS)
def test_reference(isa_level, name, budget, place, rule, dtype):
    if place in KINDS and name == "vertical_slash":
        name = "mean"  # vertical_slash does not take ranges
    q, k = make(2, 4, 2, Q, KV, 24, dtype=dtype, seed=3)
    options = {"chooser": CHOOSERS[name], "kv_lens": [170, 120], "q_lens": [140, 150], "block_shape": (32, 32), "return_scores": True}
    options |= budget | PLACES[place] | RULES[rule] | bits_option(q)
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, **options)
    expected_sabi, expected = reference.select_blocks_prefill(q, k, **options)
    assert np.abs(scores - expected).max() < 1e-5
    assert ((scores > 0) <= (expected > 0)).all()
    assert ((sabi >= 0).sum() == (expected_sabi >= 0).sum()) or "density" not in budget
    if "top_k" in budget and dtype == "float64":
        assert same_bits(sabi, expected_sabi)


def test_longer_than_a_chunk():
    """Keys and queries need several chunks and panels, and blocks may be larger than a chunk. Scores rise along rows, so that maxima change."""
    q, k = make(1, 2, 1, 300, 2600, 16, seed=4)
    k *= np.linspace(0.2, 4, k.shape[2], dtype=np.float32)[:, None]
    for chooser, block_shape in [
        (select.Pooled((4, 1)), (256, 2048)), (select.Pooled(1), (4, 8)), (select.SampledRows(64), (128, 640)), (select.VerticalSlash(70), (64, 64)),
    ]:  # fmt: skip
        options = {"chooser": chooser, "block_shape": block_shape, "density": 0.5, "window": (2000, 100), "return_scores": True}
        _, expected = reference.select_blocks_prefill(q, k, **options)
        for level in ISA_LEVELS:
            with blitz_attn.isa(level):
                _, scores = blitz_attn.select_blocks_prefill(q, k, **options)
            assert np.abs(scores - expected).max() < 2e-5, level


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_shape", [(12, 20), (13, 7), (4, 64), (64, 6)])
def test_names_fit_any_block(name, block_shape):
    """The sizes of a chooser that is given by name are fitted to the block. The sizes of an instance are not, and may be refused."""
    q, k = make(1, 2, 1, 100, 110, 16, seed=5)
    options = {"block_shape": block_shape, "density": 0.5, "causal": True, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, chooser=name, **options)
    expected_sabi, expected = reference.select_blocks_prefill(q, k, chooser=name, **options)
    assert np.abs(scores - expected).max() < 1e-5
    assert np.array_equal(sabi, expected_sabi)
    profile = select.calibrate([[(q, k, k)]], target=0.9, chooser=name, block_shape=block_shape, steps=2)
    assert blitz_attn.select_blocks_prefill(q, k, **profile.options(0, heads=2, kv_heads=1, head_dim=16)).shape[:3] == sabi.shape[:3]
    with pytest.raises(ValueError, match="pool: expected a divisor of block_shape"):
        blitz_attn.select_blocks_prefill(q, k, chooser=select.Pooled(8), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chooser", [select.Pooled(4), select.Antidiagonal(16)], ids=["pooled", "antidiagonal"])
def test_deep(isa_level, chooser, dtype):
    """The vectors that are multiplied are longer than any head: Pooled's hold means and ranges, and Antidiagonal's the tokens of a stride."""
    q, k = make(1, 1, 1, 70, 90, 576, dtype=dtype, seed=6)
    options = {"chooser": chooser, "block_shape": (16, 16), "density": 0.5, "causal": True, "return_scores": True} | bits_option(q)
    scores, expected = (operation(q, k, **options)[1] for operation in BOTH)
    assert np.abs(scores - expected).max() < 1e-5


@pytest.mark.parametrize("budget", BY_ROW, ids=budget_name)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES[:3])
def test_a_slice_has_the_lists_of_its_rows(name, rule, budget, isa_level):
    q, k = make(1, 4, 2, 290, 330, 32, dtype="bfloat16" if rule == "both" else "float32", seed=8)
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 16), "return_scores": True} | budget | RULES[rule] | bits_option(q)
    lists, scores = blitz_attn.select_blocks_prefill(q, k, **options)
    for first, end in ((0, 32), (32, 288), (96, 290), (288, 290)):
        own, own_scores = blitz_attn.select_blocks_prefill(q[:, :, first:end], k, q_begin=first + 40, num_threads=2, **options)
        rows = slice(first // 32, -(-end // 32))
        assert same_bits(own_scores, scores[:, :, rows])
        assert same_bits(own, np.ascontiguousarray(lists[:, :, rows, : own.shape[3]]))
        assert (lists[:, :, rows, own.shape[3] :] == -1).all()


@pytest.mark.parametrize("budget", [{"top_k": 3}, {"top_p": 0.7}, {"threshold": 0.1}], ids=budget_name)
@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_documents_are_chosen_as_if_alone(name, budget, order, window):
    """Documents fill whole blocks and have as many queries as keys. Their queries come in the order of their keys or in another order."""
    lengths = [160, 320, 96]
    cuts = np.concatenate([[0], np.cumsum(lengths)])
    q, k = make(1, 4, 2, 576, 576, 24, dtype="float64", seed=5)
    sees = np.repeat(np.stack([cuts[:-1], cuts[1:]], axis=-1)[order], np.asarray(lengths)[order], axis=0)
    causal = order == [0, 1, 2]  # only in this order is the diagonal of the call that of each document
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 32), "sink": 2, "recent": 2 if causal else 0} | budget
    options |= {"causal": causal, "window": window if causal else None, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, kv_ranges=sees, **options)
    first = 0
    for n in order:
        keys, rows = slice(cuts[n], cuts[n + 1]), slice(first // 32, (first + lengths[n]) // 32)
        alone, expected = blitz_attn.select_blocks_prefill(q[:, :, first : first + lengths[n]], k[:, :, keys], **options)
        found = sabi[:, :, rows]
        lists = np.where(found >= 0, found - cuts[n] // 32, -1)
        assert (lists[..., : alone.shape[3]] == alone).all()
        assert (lists[..., alone.shape[3] :] == -1).all()
        assert np.abs(scores[:, :, rows, cuts[n] // 32 : cuts[n + 1] // 32] - expected).max() < 1e-6
        first += lengths[n]


@pytest.mark.parametrize("dtype", DTYPES)
def test_choosing_and_attending(dtype, isa_level):
    """One call has the bits of the two calls with the same arguments, and slices have the bits of the whole, rounded or not."""
    q, k, v = testing.make_qkv(2, 4, 2, 290, 330, 32, 16, dtype=dtype, seed=9)
    shared = {"causal": True, "block_shape": (32, 16), "return_lse": True} | bits_option(q)
    accumulated = {"out_dtype": None if dtype == "float64" else "float32"}
    whole = blitz_attn.select_and_attend_prefill(q, k, v, top_k=5, **shared, **accumulated)
    assert whole[0].dtype == (np.float64 if dtype == "float64" else np.float32)
    for first, end in ((0, 32), (32, 288), (288, 290)):
        part, given = q[:, :, first:end], {"q_begin": first + 40, "q_total": 290}
        *found, sabi = blitz_attn.select_and_attend_prefill(part, k, v, top_k=5, return_sabi=True, **given, **shared, **accumulated)
        assert all(same_bits(a, np.ascontiguousarray(b[:, :, first:end])) for a, b in zip(found, whole, strict=True))
        again = blitz_attn.block_sparse_attention(part, k, v, sabi, **given, **shared, **accumulated)
        assert all(map(same_bits, found, again))
        rounded = blitz_attn.select_and_attend_prefill(part, k, v, top_k=5, **given, **shared)
        assert same_bits(rounded[0], testing.round_to(testing.to_float64(found[0], str(found[0].dtype)), dtype))
        if dtype == "float64":
            twin = reference.select_and_attend_prefill(part, k, v, top_k=5, return_sabi=True, **given, **shared)
            assert same_bits(twin[2], sabi)
            np.testing.assert_allclose(twin[0], found[0], atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS, ids=budget_name)
@pytest.mark.parametrize("name", NAMES)
def test_reference_of_select_and_attend(name, budget):
    """Choosers are given by name. Some rows have no forced blocks, some keep all blocks, and one batch entry has no tokens."""
    q, k, v = testing.make_qkv(2, 4, 2, 150, 170, 24, 16, seed=3)
    options = {"chooser": name, "causal": True, "q_lens": [150, 0], "kv_lens": [170, 0], "block_shape": (32, 32), "sink": 0, "recent": 0}
    options |= budget | {"first_rows": 1, "last_rows": 1}
    out, lse, sabi = blitz_attn.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **options)
    exact, exact_lse, exact_sabi = reference.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **options)
    assert same_bits(sabi, exact_sabi)
    np.testing.assert_allclose(out, exact, atol=2e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-6)
    kept = (sabi[0] >= 0).sum(axis=-1)
    assert (kept[:, 0] == 2).all()  # the first 32 queries see 52 keys
    assert (kept[:, -1] == 6).all()
    assert (kept >= 1).all()
    assert (sabi[1] == -1).all()
    assert same_bits(reference.select_and_attend_prefill(q, k, v, **options), exact)
    given = np.full_like(exact, np.nan)
    assert reference.select_and_attend_prefill(q, k, v, out=given, **options) is given
    assert same_bits(given, exact)


# ---- Which blocks are kept ------------------------------------------------------------------------------------------


def test_density_is_exact_where_scores_tie():
    q = np.zeros((1, 2, 512, 8), np.float32)
    sabi = blitz_attn.select_blocks_prefill(q, q, density=0.37, block_shape=(32, 32), sink=0, recent=0)
    assert (sabi >= 0).sum() == int(0.37 * 2 * 256 + 0.5)


def test_density_is_a_share_of_what_is_seen():
    q = np.zeros((1, 2, 512, 8), np.float32)
    sees = of_documents([0, 128, 256, 384, 512], [2, 0, 3, 1], 512)
    sabi = blitz_attn.select_blocks_prefill(q, q, density=0.37, block_shape=(32, 32), sink=0, recent=0, kv_ranges=sees)
    assert (sabi >= 0).sum() == int(0.37 * 2 * 16 * 4 + 0.5)
    for row in range(16):
        listed = sabi[0, :, row][sabi[0, :, row] >= 0]
        assert (listed // 4 == [2, 0, 3, 1][row // 4]).all()


@pytest.mark.parametrize("top_k", [40, 400])
def test_many_blocks_with_nearly_the_same_score(top_k):
    """Nearly all blocks of a row have scores within one power of two, in random order, and one block is far below."""
    q, k = make(1, 1, 1, 16, 4096, 16, seed=7)
    k *= np.float32(0.02)
    k[0, 0, 2000:2008] = -30 * np.sign(q[0, 0, 15])
    options = {"chooser": select.SampledRows(1), "block_shape": (16, 8), "sink": 0, "recent": 0, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, top_k=top_k, **options)
    expected = np.sort(np.argsort(-scores[0, 0, 0], kind="stable")[:top_k])
    assert (sabi[0, 0, 0, :top_k] == expected).all()


@pytest.mark.parametrize("budget", [{"density": 1}, {"top_p": 1.0}, {"top_k": 99}], ids=budget_name)
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_everything(kind, budget):
    """A budget that keeps everything keeps exactly the blocks that plain attention sees."""
    q, k, v = testing.make_qkv(1, 4, 2, Q, KV, 16, 16)
    rules = {"causal": True} if kind is None else {"kv_ranges": ranges_of(kind)}
    seen = np.stack([np.zeros(Q, int), np.arange(Q) + KV - Q + 1], axis=-1) if kind is None else ranges_of(kind)
    out, sabi = blitz_attn.select_and_attend_prefill(q, k, v, block_shape=(32, 16), return_sabi=True, **rules, **budget)
    assert np.abs(out - blitz_attn.block_sparse_attention(q, k, v, **rules)).max() < 1e-5
    padded = np.zeros((160, 176), bool)
    padded[:Q, :KV] = (np.arange(KV) >= seen[:, :1]) & (np.arange(KV) < seen[:, 1:])
    assert (sabi >= 0).sum() == 4 * padded.reshape(5, 32, 11, 16).any(axis=(1, 3)).sum()


def test_forced_blocks():
    q, k = make(1, 1, 1, 320, 320, 16)
    options = {"causal": True, "block_shape": (32, 32), "threshold": 1.0}
    sabi = blitz_attn.select_blocks_prefill(q, k, **options)
    assert [[c for c in row if c >= 0] for row in sabi[0, 0].tolist()] == [sorted({0, max(0, r - 1), r}) for r in range(10)]
    sabi = blitz_attn.select_blocks_prefill(q, k, sink=2, recent=1, last_columns=1, first_rows=3, last_rows=1, **options)
    rows = [[c for c in row if c >= 0] for row in sabi[0, 0].tolist()]
    assert rows == [[0], [0, 1], [0, 1, 2]] + [[0, 1, r] for r in range(3, 9)] + [list(range(10))]


@pytest.mark.parametrize("operation", BOTH)
def test_forced_blocks_of_documents(operation):
    """The second of two documents begins in the middle of a block row and in the middle of a block of keys."""
    q, k = make(1, 1, 1, 320, 320, 16)
    place = np.arange(320)
    sees = np.where(place[:, None] < 176, (0, 176), (176, 320))
    options = {"block_shape": (32, 32), "threshold": 1.0, "causal": True, "kv_ranges": sees}
    rows = [[c for c in row if c >= 0] for row in operation(q, k, **options)[0, 0].tolist()]
    assert rows == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5], [5, 6], [5, 6, 7], [5, 7, 8], [5, 8, 9]]
    rows = [[c for c in row if c >= 0] for row in operation(q, k, sink=2, recent=1, **options)[0, 0].tolist()]
    assert rows == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5], [5, 6], [5, 6, 7], [5, 6, 8], [5, 6, 9]]
    # The last columns and the rows of a frame are those of the whole sequence.
    rows = operation(q, k, sink=0, recent=0, last_columns=1, first_rows=3, **options | {"causal": False})[0, 0]
    assert [[c for c in row if c >= 0] for row in rows.tolist()][:3] == [[0, 1, 2, 3, 4, 5]] * 3
    assert (rows[6:, 0] == 9).all()


@pytest.mark.parametrize("operation", BOTH)
def test_recent_blocks_before_a_far_diagonal(operation):
    """If all keys that a query sees are before the diagonal, the last of these keys' blocks are recent. If all are behind it, no block is recent."""
    q, k = make(1, 1, 1, 96, 320, 16)
    sees = np.repeat([(40, 130), (300, 320), (10, 10)], 32, axis=0)
    rows = operation(q, k, block_shape=(32, 32), threshold=1.0, sink=0, kv_ranges=sees)[0, 0]
    assert [[c for c in row if c >= 0] for row in rows.tolist()] == [[3, 4], [9], []]  # row 1: its only block


@pytest.mark.parametrize("operation", BOTH)
def test_a_row_keeps_its_best_block(operation):
    """A row keeps its best block even if no block is forced and no score reaches the threshold."""
    q, k = make(1, 2, 1, 128, 160, 16, seed=8)
    options = {"threshold": 0.999, "block_shape": (32, 32), "sink": 0, "recent": 0, "return_scores": True}
    sabi, scores = operation(q, k, **options)
    assert sabi.shape == (1, 2, 4, 1)
    assert (sabi[..., 0] == scores.argmax(axis=-1)).all()


@pytest.mark.parametrize("name", CHOOSERS)
def test_keys_of_nan(name):
    """A key of NaN affects only the rows that see it. Lists and scores are those of the reference, even in a row whose scores are all NaN."""
    q, k = make(1, 1, 1, 256, 256, 16)
    k[0, 0, 200] = np.nan
    options = {"chooser": CHOOSERS[name], "causal": True, "block_shape": (32, 32), "density": 0.6, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, **options)
    expected_sabi, expected = reference.select_blocks_prefill(q, k, **options)
    assert np.abs(scores - expected).max() < 1e-5
    assert same_bits(sabi, expected_sabi)


# ---- Scores of the caller -------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("budget", [*BUDGETS, {"density": [0.2, 0.9]}, {"top_k": [1, 5]}], ids=str)
@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("per_kv_head", [False, True])
def test_scores_and_lists_apart(name, budget, place, rule, per_kv_head):
    """Scoring and then making lists has the bits of one call, and so has a chooser that is a function and returns the same scores."""
    if place in KINDS and name == "vertical_slash":
        name = "mean"
    q, k = make(2, 4 if per_kv_head else 2, 2, Q, KV, 24, seed=3)
    scored = {"kv_lens": [170, 120], "q_lens": [140, 150], "block_shape": (32, 16)} | PLACES[place] | RULES[rule]
    kept = budget | {"sink": 1, "recent": 1, "last_columns": 1, "last_rows": 1}
    call = scored | kept | {"per_kv_head": per_kv_head, "return_scores": True}
    lists, expected = blitz_attn.select_blocks_prefill(q, k, chooser=CHOOSERS[name], **call)
    scores = select.scores(q, k, chooser=CHOOSERS[name], per_kv_head=per_kv_head, **scored)
    assert same_bits(scores, expected)
    made = select.list_from_scores(scores, Q, KV, **scored, **kept)
    assert same_bits(np.repeat(made, 2, axis=1) if per_kv_head else made, lists)
    for shared in {per_kv_head, False}:  # scores per query head are accepted for lists per KV head
        given = select.scores(q, k, chooser=CHOOSERS[name], per_kv_head=shared, **scored)
        found, taken = blitz_attn.select_blocks_prefill(q, k, chooser=lambda q, k, given=given, **options: given, **call)
        assert np.abs(taken - expected).max() < 1e-6
        assert shared != per_kv_head or (same_bits(found, lists) and same_bits(taken, expected))


@pytest.mark.parametrize("budget", BUDGETS, ids=budget_name)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_scores_of_any_scale(layout, rule, budget):
    """Scores may have any scale, be NaN or -inf, or belong to blocks that no row sees. Scores times powers of two give the same lists."""
    rng = np.random.default_rng(2)
    given = (rng.random((2, 3, 5, 11)) ** 4 * 900).astype(np.float32)
    given[rng.random(given.shape) < 0.2] = np.nan
    given[rng.random(given.shape) < 0.1] = -np.inf
    given[0, 1, 2], given[1, 0, 3] = 0, np.nan
    ends = np.array([0, 131, 131 + Q]), np.array([0, 170, 290])
    packed = {"layout": "TND", "cu_seqlens_q": ends[0], "cu_seqlens_kv": ends[1]}
    lens = {"q_lens": np.diff(ends[0]), "kv_lens": np.diff(ends[1])}
    options = {"block_shape": (32, 16), "sink": 0, "recent": 0} | budget | RULES[rule]
    if layout == "TND":
        q, k = np.zeros((2, 281, 3, 8), np.float32)[0], np.zeros((2, 290, 3, 8), np.float32)[0]
    else:
        q, k = np.zeros((2, 3, Q, 8), np.float32), np.zeros((2, 3, KV, 8), np.float32)
    call = {"chooser": lambda q, k, **x: given, "return_scores": True} | options | (packed if layout == "TND" else lens)
    (lists, scores), (expected_lists, expected) = (operation(q, k, **call) for operation in BOTH)
    assert same_bits(lists, expected_lists)
    assert np.abs(scores - expected).max() < 1e-6
    scaled = np.ldexp(given, rng.integers(-20, 20, (2, 3, 5, 1))).astype(np.float64)
    assert same_bits(select.list_from_scores(scaled, Q, KV, **options, **lens), lists)


def test_a_chooser_that_is_a_function_gets_the_call():
    """The function gets the arrays and options of the call, after all arguments have been checked. Its exception is passed on."""
    q, k, v = testing.make_qkv(1, 2, 2, 128, 128, 16, 16)
    asked, error = [], ValueError("scores: not today")

    def stops(q, k, **options):
        asked.append((q, k, options))
        raise error

    for changes in ({"density": 2}, {"k": k[..., :8]}, {"sink": -1}, {"index_dtype": "int8"}):
        with pytest.raises(ValueError, match="expected"):
            blitz_attn.select_blocks_prefill(**{"q": q, "k": k, "chooser": stops, "density": 0.5} | changes)
    assert not asked
    out = np.full(q.shape, np.nan, np.float32)
    with pytest.raises(ValueError, match="^scores: not today$") as raised:
        blitz_attn.select_and_attend_prefill(q, k, v, chooser=stops, density=0.5, causal=True, block_shape=(32, 64), out=out)
    assert raised.value is error
    assert np.isnan(out).all()
    (given_q, given_k, options), = asked
    assert given_q is q
    assert given_k is k
    assert select.scores(q, k, **options).shape == (1, 2, 4, 2)
    assert (options["causal"], options["block_shape"]) == (True, (32, 64))
    chooser = lambda q, k, **options: select.scores(q, k, chooser="antidiagonal", **options)  # noqa: E731
    both = [blitz_attn.select_and_attend_prefill(q, k, v, chooser=x, top_p=0.8, causal=True) for x in (chooser, "antidiagonal")]
    assert same_bits(*both)


def test_scores_of_tensors():
    torch = pytest.importorskip("torch")
    q, k = (torch.from_numpy(x).requires_grad_() for x in make(1, 2, 2, 256, 256, 16))
    learned = torch.rand(1, 2, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    sabi = blitz_attn.select_blocks_prefill(q, k, chooser=lambda q, k, **x: learned * (q.requires_grad + 1), top_k=2)
    assert isinstance(sabi, torch.Tensor)
    assert torch.equal(sabi, select.list_from_scores(learned, 256, top_k=2))
    assert isinstance(select.scores(q.detach(), k.detach()), torch.Tensor)


# ---- Refusals -------------------------------------------------------------------------------------------------------


def huge(*shape):
    """A view of a shape that no memory could hold, with head dim 1."""
    return np.broadcast_to(np.zeros((), np.float32), shape)[..., None]


LINES = "kv_ranges: expected None with the chooser vertical_slash, whose lines run through all keys, got ranges"
BAD = [
    ({"chooser": "vertical_slash", "kv_ranges": np.zeros((128, 2), int)}, ValueError, LINES),
    ({"chooser": select.VerticalSlash(8), "kv_ranges": np.zeros((128, 2), int)}, ValueError, LINES),
    ({"kv_ranges": np.zeros((128, 3), int)}, ValueError, "kv_ranges: expected shape (1, 128, 2) or (128, 2), got (128, 3)"),
    ({"kv_ranges": np.zeros((2, 128, 2), int)}, ValueError, "kv_ranges: expected shape (1, 128, 2) or (128, 2), got (2, 128, 2)"),
    ({"kv_ranges": np.zeros((128, 2), np.int16)}, TypeError, "kv_ranges: expected int32 or int64, got int16"),
    ({"chooser": "best"}, ValueError, "chooser: expected one of pooled, antidiagonal, sampled_rows, vertical_slash, got 'best'"),
    ({"chooser": 3}, TypeError, "chooser: expected an instance of Pooled, Antidiagonal, SampledRows or VerticalSlash, or the name of one, got int"),
    ({"chooser": select.Pooled(5)}, ValueError, "pool: expected a divisor of block_shape[0] = 64, got 5"),
    ({"chooser": select.Pooled((8, 0))}, ValueError, "pool: expected a divisor of block_shape[1] = 64, got 0"),
    ({"chooser": select.Pooled((8, 8, 8))}, ValueError, "pool: expected a number of tokens or a pair of them, got (8, 8, 8)"),
    ({"chooser": select.Pooled(8, "max")}, ValueError, "term: expected one of both, mean, bound, got 'max'"),
    ({"chooser": select.Pooled(8, over="sum")}, ValueError, "over: expected 'largest' or 'mean', got 'sum'"),
    ({"chooser": select.Antidiagonal(48)}, ValueError, "stride: expected a divisor of block_shape[0] = 64, got 48"),
    ({"chooser": select.SampledRows(7)}, ValueError, "rows: expected a divisor of block_shape[0] = 64, got 7"),
    ({"chooser": select.VerticalSlash(0)}, ValueError, "rows: expected at least 1 query, got 0"),
    ({"density": None}, ValueError, "density, top_p, threshold, top_k: expected exactly one of them, got none"),
    ({"top_p": 0.5}, ValueError, "density, top_p, threshold, top_k: expected exactly one of them, got density and top_p"),
    ({"density": 0.0}, ValueError, "density: expected a number above 0 and at most 1, got 0"),
    ({"density": 1.5}, ValueError, "density: expected a number above 0 and at most 1, got 1.5"),
    ({"density": float("nan")}, ValueError, "density: expected a number above 0 and at most 1, got nan"),
    ({"density": [0.5, 0.5, 0.5]}, ValueError, "density: expected one number, or one for each of 2 lists, got (3,)"),
    ({"density": "all"}, TypeError, "density: expected a number, got str"),
    ({"density": [True, False]}, TypeError, "density: expected numbers, got bool"),
    ({"density": [[0.5, 0.5]]}, ValueError, "density: expected a number, or one per head, got shape (1, 2)"),
    ({"density": None, "top_k": [[3]]}, ValueError, "top_k: expected a number, or one per head, got shape (1, 1)"),
    ({"chooser": select.Antidiagonal(4096), "block_shape": (4096, 4096), "q": np.zeros((1, 2, 128, 64), np.float32),
      "k": np.zeros((1, 2, 128, 64), np.float32)}, ValueError, "stride: expected at most 1024 tokens with D = 64, got 4096"),
    ({"density": None, "top_p": -0.1}, ValueError, "top_p: expected a number above 0 and at most 1, got -0.1"),
    ({"density": None, "top_k": 0}, ValueError, "top_k: expected at least 1 block, got 0"),
    ({"density": None, "top_k": 1.5}, TypeError, "top_k: expected an integer, got float"),
    ({"sink": -1}, ValueError, "sink: expected at least 0 blocks, got -1"),
    ({"recent": -3}, ValueError, "recent: expected at least 0 blocks, got -3"),
    ({"last_rows": -1}, ValueError, "last_rows: expected at least 0 blocks, got -1"),
    ({"index_dtype": "float32"}, ValueError, "index_dtype: expected one of int32, uint16, int16, int64, got 'float32'"),
    ({"block_shape": (1, 1), "chooser": select.Pooled(1), "q": huge(2**12, 2**10, 2**20), "k": huge(2**12, 2**10, 2**20)}, ValueError,
     "q: expected scores below 2^63 bytes, got shape (4096, 1024, 1048576, 1048576)"),
    ({"block_shape": (1, 1), "chooser": select.Pooled(1), "index_dtype": "int16", "k": np.zeros((1, 2, 40000, 8), np.float32)}, ValueError,
     "index_dtype: expected one that holds 40000 columns, got int16"),
    ({"k": np.zeros((1, 2, 128, 9), np.float32)}, ValueError, "k: expected shape (B, Hkv, Skv, D) with D = 8 like q, got (1, 2, 128, 9)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "sentence"), BAD, ids=lambda x: str(x)[:60])
def test_bad_calls(changes, kind, sentence):
    q, k = make(1, 2, 2, 128, 128, 8)
    call = {"q": q, "k": k, "density": 0.5} | changes
    with pytest.raises(kind) as caught:
        blitz_attn.select_blocks_prefill(**call)
    assert str(caught.value) == sentence


ATTENDS_BAD = [
    ({"attn_mask": np.ones((3, 64, 64), bool)}, ValueError, r"attn_mask: expected shape .*, got \(3, 64, 64\)"),
    ({"attn_mask": [[True] * 64] * 64}, TypeError, "attn_mask: expected an array, got list"),
    ({"alibi_slopes": [1, 2, 3]}, ValueError, r"alibi_slopes: expected shape \(2,\).*, got \(3,\)"),
    ({"sinks": [1, 2, 3]}, ValueError, r"sinks: expected shape \(2,\).*, got \(3,\)"),
    ({"softcap": -1}, ValueError, "softcap: expected .*, got -1"),
    ({"return_lse": None}, TypeError, "return_lse: expected True or False, got NoneType"),
    ({"return_sabi": None}, TypeError, "return_sabi: expected True or False, got NoneType"),
    ({"q_begin": [1, 2, 3]}, ValueError, "q_begin: expected 1 entry, one per batch entry, got 3"),
    ({"q_begin": [2**30]}, ValueError, r"q_begin: expected token numbers from -1073741823 to 1073741823, got 1073741824 at \[0\]"),
    ({"q_begin": 1.5}, TypeError, "q_begin: expected .*"),
    ({"q_total": 63}, ValueError, "q_total: expected .* got 63.*"),
    ({"out_dtype": "float16"}, ValueError, r"out_dtype: expected 'float32' like q, got 'float16'.*"),
]


@pytest.mark.parametrize(("changes", "error", "sentence"), ATTENDS_BAD, ids=lambda x: str(x)[:60])
def test_bad_calls_write_no_output(changes, error, sentence):
    q, k, v = testing.make_qkv(1, 2, 2, 64, 64, 16, 16)
    out = np.full(q.shape, np.nan, np.float32)
    with pytest.raises(error, match=f"^{sentence}$"):
        blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, out=out, **changes)
    assert np.isnan(out).all()


def test_the_twin_refuses_vertical_slash():
    q, k = make(1, 2, 2, Q, KV, 8)
    with pytest.raises(ValueError, match=LINES):
        reference.select_blocks_prefill(q, k, density=0.5, chooser="vertical_slash", kv_ranges=ranges_of("any"))
