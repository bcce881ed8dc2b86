"""Choosers of blocks for prefill where each query sees a run of keys (`kv_ranges`): documents, chunks, prefixes and images."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select, testing
from cases import DTYPES, bits_option, same_bits

CHOOSERS = {
    "pooled": select.Pooled(),
    "mean": select.Pooled((4, 16), "mean", "mean"),
    "antidiagonal": select.Antidiagonal(8),
    "sampled_rows": select.SampledRows(4),
}
BUDGETS = [{"density": 0.4}, {"top_p": 0.8}, {"threshold": 0.05}, {"top_k": 4}]
Q, KV = 150, 170


def of_documents(cuts, order, queries):
    """Queries cut into as many parts as there are documents; part n sees document order[n], which lies at cuts[order[n]] .. cuts[order[n] + 1]."""
    part = np.arange(queries) * len(order) // queries
    return np.stack([np.asarray(cuts)[np.asarray(order)[part]], np.asarray(cuts)[np.asarray(order)[part] + 1]], axis=-1)


def ranges_of(kind):
    """(150, 2) ranges of 170 keys."""
    place, rng = np.arange(Q) + KV - Q, np.random.default_rng(11)
    if kind == "documents":
        return of_documents([0, 37, 101, 170], [0, 1, 2], Q)
    if kind == "other order":  # a row of blocks sees documents with others between them
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
    return np.sort(rng.integers(0, KV + 1, (Q, 2)), axis=-1)  # any


KINDS = ["documents", "other order", "chunks", "prefix", "images", "empty", "outside", "any"]


def make(*sizes, seed=0, **options):
    q, k, _ = testing.make_qkv(*sizes, seed=seed, **options)
    return q, k


@pytest.mark.sampled("options")
@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_reference(isa_level, name, kind, dtype, causal):
    q, k = make(2, 4, 2, Q, KV, 24, dtype=dtype, seed=3)
    both = np.stack([ranges_of(kind), ranges_of("documents")])
    for budget in BUDGETS:
        options = {"chooser": CHOOSERS[name], "causal": causal, "kv_lens": [170, 120], "q_lens": [140, 150], "block_shape": (32, 32)} | budget
        options |= {"kv_ranges": both, "return_scores": True} | bits_option(q)
        sabi, scores = blitz_attn.select_blocks_prefill(q, k, **options)
        expected_sabi, expected = reference.select_blocks_prefill(q, k, **options)
        assert np.abs(scores - expected).max() < 1e-5
        assert ((scores > 0) <= (expected > 0)).all()
        assert ((sabi >= 0).sum() == (expected_sabi >= 0).sum()) or "density" not in budget


@pytest.mark.parametrize("budget", [{"top_k": 3}, {"top_p": 0.7}, {"threshold": 0.1}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_documents_are_chosen_as_if_alone(name, budget, order, window):
    """Documents that fill whole blocks, each of as many queries as keys, in either order of their queries."""
    lengths = [160, 320, 96]
    cuts = np.concatenate([[0], np.cumsum(lengths)])
    q, k = make(1, 4, 2, 576, 576, 24, dtype="float64", seed=5)
    sees = np.repeat(np.stack([cuts[:-1], cuts[1:]], axis=-1)[order], np.asarray(lengths)[order], axis=0)
    causal = order == [0, 1, 2]  # whose diagonal is that of the documents only where these stand in order
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


@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window": (40, 12)}, {"causal": True, "window": (70, 0), "q_lens": [150], "kv_lens": [90]}])
def test_ranges_of_all_keys_change_no_bit(name, budget, rules):
    q, k = make(1, 4, 2, Q, KV, 24, seed=6)
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 32), "sink": 2, "recent": 2, "last_columns": 1, "last_rows": 1, "return_scores": True}
    options |= budget | rules
    usual = blitz_attn.select_blocks_prefill(q, k, **options)
    assert all(map(same_bits, blitz_attn.select_blocks_prefill(q, k, kv_ranges=np.tile([[-3, KV + 5]], (Q, 1)), **options), usual))


@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda x: next(iter(x)))
def test_same_bits(name, budget):
    """Whatever the number of threads, the layout, the integers of the ranges and what else is in the batch."""
    q, k = make(2, 4, 2, Q, KV, 32, seed=7)
    runs = np.stack([ranges_of("other order"), ranges_of("empty")])
    options = {"chooser": CHOOSERS[name], "block_shape": (32, 32), "return_scores": True} | budget
    expected = blitz_attn.select_blocks_prefill(q, k, kv_ranges=runs, num_threads=1, **options)
    for threads in (2, 5):
        assert all(map(same_bits, blitz_attn.select_blocks_prefill(q, k, kv_ranges=runs, num_threads=threads, **options), expected))
    assert all(map(same_bits, blitz_attn.select_blocks_prefill(q, k, kv_ranges=runs.astype(np.int32)[..., ::-1][..., ::-1], **options), expected))
    packed = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, x.shape[1], 32) for x in (q, k)]
    cuts = {"cu_seqlens_q": [0, Q, 2 * Q], "cu_seqlens_kv": [0, KV, 2 * KV]}
    of_packed = blitz_attn.select_blocks_prefill(*packed, layout="TND", kv_ranges=runs.reshape(-1, 2), **cuts, **options)
    assert all(map(same_bits, of_packed, expected))
    for b in range(2):
        own = blitz_attn.select_blocks_prefill(q[b : b + 1], k[b : b + 1], kv_ranges=runs[b], **options)
        assert same_bits(own[1], expected[1][b : b + 1])


@pytest.mark.parametrize("budget", [{"density": [0.3, 0.9]}, {"top_k": [2, 4]}])
def test_shares_of_heads(budget):
    """A number a head, and lists of KV heads."""
    q, k = make(1, 4, 2, Q, KV, 24, seed=8)
    options = {"kv_ranges": ranges_of("other order"), "block_shape": (16, 16), "per_kv_head": True, "recent": 0} | budget
    sabi = blitz_attn.select_blocks_prefill(q, k, **options)
    assert same_bits(sabi, reference.select_blocks_prefill(q, k, **options))
    assert same_bits(np.ascontiguousarray(sabi[:, 0]), np.ascontiguousarray(sabi[:, 1]))


def test_density_is_a_share_of_what_is_seen():
    q = np.zeros((1, 2, 512, 8), np.float32)
    sees = of_documents([0, 128, 256, 384, 512], [2, 0, 3, 1], 512)
    sabi = blitz_attn.select_blocks_prefill(q, q, density=0.37, block_shape=(32, 32), sink=0, recent=0, kv_ranges=sees)
    assert (sabi >= 0).sum() == int(0.37 * 2 * 16 * 4 + 0.5)
    for row in range(16):
        listed = sabi[0, :, row][sabi[0, :, row] >= 0]
        assert (listed // 4 == [2, 0, 3, 1][row // 4]).all()


@pytest.mark.parametrize("operation", [blitz_attn.select_blocks_prefill, reference.select_blocks_prefill])
def test_forced_blocks(operation):
    """Two documents, of which the second begins in the middle of a row of blocks and in the middle of a block of keys."""
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


@pytest.mark.parametrize("operation", [blitz_attn.select_blocks_prefill, reference.select_blocks_prefill])
def test_recent_blocks_before_a_far_diagonal(operation):
    """Where all that a query sees lies before the diagonal, the last of it is recent; where all lies behind, nothing is."""
    q, k = make(1, 1, 1, 96, 320, 16)
    sees = np.repeat([(40, 130), (300, 320), (10, 10)], 32, axis=0)
    rows = operation(q, k, block_shape=(32, 32), threshold=1.0, sink=0, kv_ranges=sees)[0, 0]
    assert [[c for c in row if c >= 0] for row in rows.tolist()] == [[3, 4], [9], []]  # row 1: its only block


def test_rows_that_see_nothing_are_empty():
    q, k, v = testing.make_qkv(1, 2, 2, 128, 128, 16, 16)
    sees = np.tile([[0, 128]], (128, 1))
    sees[32:64] = (5, 5)
    for budget in BUDGETS:
        out, lse, sabi = blitz_attn.select_and_attend_prefill(
            q, k, v, kv_ranges=sees, block_shape=(32, 32), first_rows=2, return_lse=True, return_sabi=True, **budget
        )
        assert (sabi[:, :, 1] == -1).all()
        assert (sabi[:, :, [0, 2, 3], 0] >= 0).all()
        assert (out[:, :, 32:64] == 0).all()
        assert (lse[:, :, 32:64] == -np.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_everything(kind):
    """A budget of all keeps what plain attention sees, and nothing that it does not."""
    q, k, v = testing.make_qkv(1, 4, 2, Q, KV, 16, 16)
    sees = ranges_of(kind)
    for budget in ({"density": 1}, {"top_p": 1.0}, {"top_k": 99}):
        out, sabi = blitz_attn.select_and_attend_prefill(q, k, v, kv_ranges=sees, block_shape=(32, 16), return_sabi=True, **budget)
        assert np.abs(out - blitz_attn.block_sparse_attention(q, k, v, kv_ranges=sees)).max() < 1e-5
        mask = (np.arange(KV) >= sees[:, :1]) & (np.arange(KV) < sees[:, 1:])
        padded = np.zeros((160, 176), bool)
        padded[:Q, :KV] = mask
        expected = padded.reshape(5, 32, 11, 16).any(axis=(1, 3)).sum()
        assert (sabi >= 0).sum() == 4 * expected
        exact = reference.select_and_attend_prefill(q, k, v, kv_ranges=sees, block_shape=(32, 16), **budget)
        np.testing.assert_allclose(out, exact, atol=2e-6)


def test_measures():
    """Recall and error over the keys that the ranges let a query see."""
    q, k, v = testing.make_qkv(1, 2, 1, Q, KV, 16, 16, seed=9)
    sees = ranges_of("empty")
    options = {"kv_ranges": sees, "block_shape": (16, 16)}
    every = blitz_attn.select_blocks_prefill(q, k, top_p=1.0, **options)
    some = blitz_attn.select_blocks_prefill(q, k, top_k=1, sink=0, recent=0, **options)
    kept = select.recall(q, k, every, **options)
    rows = [sees[r : r + 16] for r in range(0, Q, 16)]
    blind = [bool((row[:, 0] >= row[:, 1]).all()) for row in rows]
    assert any(blind)
    assert (np.isnan(kept) == blind).all()
    assert np.nanmin(kept) > 0.9999
    assert select.output_error(q, k, v, every, **options).max() < 1e-6
    assert np.nanmin(select.recall(q, k, some, **options)) < 0.9
    assert select.output_error(q, k, v, some, **options).min() > 0.1
    sparse = select.recall(q, k, some, every=2, **options)
    assert np.isnan(sparse[:, :, 1::2]).all()
    np.testing.assert_allclose(sparse[:, :, ::2], select.recall(q, k, some, **options)[:, :, ::2], atol=1e-6)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
def test_a_chunk_of_a_prompt_is_judged_where_it_stands(layout):
    """With everything that changes attention, against the log-sum-exps and the outputs of the two calls."""
    rng = np.random.default_rng(3)
    q, k, v = testing.make_qkv(1, 2, 1, 48, 160, 16, 16, seed=4)
    whole = {"causal": True, "q_begin": 64, "softcap": 2.0, "sinks": np.array([0.5, -1], np.float32), "alibi_slopes": np.array([0.1, 0], np.float32)}
    whole |= {"attn_mask": np.where(rng.random((48, 160)) < 0.2, -np.inf, rng.standard_normal((48, 160))).astype(np.float32)}
    sabi = blitz_attn.select_blocks_prefill(q, k, top_k=2, sink=0, recent=1, block_shape=(16, 16), causal=True, q_begin=64)
    options = whole | {"block_shape": (16, 16)}
    out, all_out = (blitz_attn.block_sparse_attention(q, k, v, lists, **options) for lists in (sabi, None))
    lses = [
        blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options | {"sinks": None})[1] for lists in (sabi, None)
    ]  # sinks take mass from all keys in proportion
    if layout == "BSND":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if layout == "TND":
        q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {"cu_seqlens_q": [0, 48], "cu_seqlens_kv": [0, 160]}
    options["layout"] = layout
    kept = np.exp(lses[0] - lses[1]).astype(np.float64).reshape(1, 2, 3, 16).mean(axis=3)
    without = {name: x for name, x in options.items() if name != "sinks"}
    found = select.recall(q, k, sabi, **without)
    np.testing.assert_allclose(found, kept, rtol=1e-5)
    assert found.max() < 0.95
    np.testing.assert_allclose(select.recall(q, k, sabi, every=2, **without)[:, :, ::2], kept[:, :, ::2], rtol=1e-5)
    error = np.linalg.norm((out - all_out)[0], axis=(1, 2)) / np.linalg.norm(all_out[0], axis=(1, 2))
    np.testing.assert_allclose(select.output_error(q, k, v, sabi, **options)[0], error, rtol=1e-4)


def test_profiles():
    """Budgets are found under ranges that all captures share."""
    captures = [[testing.make_qkv(1, 2, 1, Q, KV, 16, 16, seed=s) for s in (1, 2)]]
    options = {"kv_ranges": ranges_of("documents"), "block_shape": (16, 16)}
    profile = select.calibrate(captures, target=0.8, steps=5, **options)
    chosen = profile.options(0, heads=2, kv_heads=1, head_dim=16)
    met = [
        np.nanmean(select.recall(q, k, blitz_attn.select_blocks_prefill(q, k, **chosen, kv_ranges=options["kv_ranges"]), **options), axis=2)
        for q, k, _ in captures[0]
    ]
    assert (np.mean(met, axis=0) >= 0.8).all()
    layers = [[(*x, x[0]) for x in captures[0]]]
    assert select.allocate(layers, density=0.6, **options).numbers[0]


def test_strides_and_tensors():
    q, k = make(1, 2, 1, Q, KV, 16)
    sees = ranges_of("any")
    expected = blitz_attn.select_blocks_prefill(q, k, top_p=0.8, kv_ranges=sees)
    wide = np.zeros((2 * Q, 6), np.int32)
    wide[::2, ::3] = sees
    assert same_bits(blitz_attn.select_blocks_prefill(q, k, top_p=0.8, kv_ranges=wide[::2, ::3]), expected)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x) for x in (q, k, sees)]
    assert same_bits(blitz_attn.select_blocks_prefill(*tensors[:2], top_p=0.8, kv_ranges=tensors[2]).numpy(), expected)


LINES = "kv_ranges: expected None with the chooser vertical_slash, whose lines run through all keys, got ranges"
BAD = [
    ({"chooser": "vertical_slash"}, ValueError, LINES),
    ({"chooser": select.VerticalSlash(8)}, ValueError, LINES),
    ({"kv_ranges": np.zeros((Q, 3), int)}, ValueError, f"kv_ranges: expected shape (1, {Q}, 2) or ({Q}, 2), got ({Q}, 3)"),
    ({"kv_ranges": np.zeros((2, Q, 2), int)}, ValueError, f"kv_ranges: expected shape (1, {Q}, 2) or ({Q}, 2), got (2, {Q}, 2)"),
    ({"kv_ranges": np.zeros((Q, 2), np.int16)}, TypeError, "kv_ranges: expected int32 or int64, got int16"),
]


@pytest.mark.parametrize(("changes", "kind", "sentence"), BAD, ids=lambda x: str(x)[:60])
def test_bad_calls(changes, kind, sentence):
    q, k, v = testing.make_qkv(1, 2, 2, Q, KV, 8, 8)
    call = {"density": 0.5, "kv_ranges": ranges_of("any")} | changes
    for run in (lambda: blitz_attn.select_blocks_prefill(q, k, **call), lambda: blitz_attn.select_and_attend_prefill(q, k, v, **call)):
        with pytest.raises(kind) as caught:
            run()
        assert str(caught.value) == sentence


def test_the_twin_refuses_vertical_slash():
    q, k = make(1, 2, 2, Q, KV, 8)
    with pytest.raises(ValueError, match=LINES):
        reference.select_blocks_prefill(q, k, density=0.5, chooser="vertical_slash", kv_ranges=ranges_of("any"))
