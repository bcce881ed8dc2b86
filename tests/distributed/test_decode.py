"""Decoding over a cache that ranks share has the bits of one process, and an error is the same on all ranks."""

import numpy as np
import pytest

import blitz_attn
import launcher
from blitz_attn import testing
from blitz_attn.distributed import Alone, _tree, select_blocks_distributed
from blitz_attn.distributed.decode import DecodePlan, decode_context_parallel_attention
from ranks import Shared, check_selection, run, sentences


@pytest.mark.parametrize("case", launcher.names_of("cases_decode"))
@pytest.mark.parametrize(("library", "ranks"), launcher.jobs())
def test_decode(library, ranks, case):
    launcher.passes(case, "cases_decode", ranks, library)


def attend(comm, p, owner="runs", kv_split=32, interleave=64, **options):
    own = Shared(p, comm.Get_size(), comm.Get_rank(), owner, kv_split, interleave)
    return decode_context_parallel_attention(p.q, own.k_cache, own.v_cache, own.tables, p.seq_lens, comm=comm, **{**own.options, **options})


def whole(p, **options):
    return blitz_attn.paged_attention(*p.arrays, kv_split=32, **{**p.options, **options})


@pytest.mark.parametrize("owner", ["turns", "runs", "random"])
@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_bits_do_not_depend_on_ranks(ranks, owner):
    p = testing.make_paged(5, 4, 2, [700, 33, 0, 96, 1], 16, 32)
    out, lse = whole(p, return_lse=True)
    for other in run(ranks, lambda comm: attend(comm, p, owner, return_lse=True)):
        assert np.array_equal(other[0], out)
        assert np.array_equal(other[1], lse)


def test_infinite_sinks():
    """A sink of plus infinity leaves no weight for values, and a sink of minus infinity takes no weight."""
    p, sinks = testing.make_paged(3, 4, 2, [70, 33, 0], 16, 32), np.array([np.inf, -np.inf, 1.0, 1e30])
    out, lse = whole(p, sinks=sinks, return_lse=True)
    for other in run(2, lambda comm: attend(comm, p, sinks=sinks, return_lse=True)):
        assert np.array_equal(other[0], out)
        assert np.array_equal(other[1], lse)


def test_copies_of_a_split_are_attended_once():
    p = testing.make_paged(1, 4, 2, [500], 16, 32)
    out = whole(p)

    def held_twice(comm):
        own = Shared(p, 1, 0, "runs", 32)  # every rank has all pages
        return decode_context_parallel_attention(p.q, own.k_cache, own.v_cache, own.tables, p.seq_lens, comm=comm, kv_split=32)

    for other in run(3, held_twice):
        assert np.array_equal(other, out)


def test_runs_of_splits_send_few_states():
    """A rank sends at most two nodes per level of the tree, or 2 log2(n) nodes for n splits. A run that is one node is sent as one
    state."""
    for chunks in (1, 7, 64, 1000):
        for ranks in (1, 2, 5, 8, 64):
            tree = _tree.build(np.array([chunks]), np.arange(chunks) * ranks // chunks)
            most = np.bincount(tree.sender, minlength=ranks).max()
            assert most <= max(1, 2 * np.log2(chunks))
    tree = _tree.build(np.array([64]), np.arange(64) // 16)
    assert tree.sent.tolist() == [0, 16, 32, 48]


def test_every_split_is_sent_in_one_state():
    rng = np.random.default_rng(0)
    for _ in range(100):
        counts = rng.integers(0, 40, rng.integers(1, 5))
        owner = rng.integers(0, 4, counts.sum())
        tree = _tree.build(counts, owner)
        covered = np.zeros(counts.sum(), int)
        for first, after, rank in zip(tree.sent, tree.after, tree.sender, strict=True):
            assert (owner[first:after] == rank).all()
            covered[first:after] += 1
        assert (covered == 1).all()


def test_bytes_are_those_of_the_plan():
    p = testing.make_paged(3, 4, 2, [700, 33, 0], 16, 32)

    def sent(comm):
        own = Shared(p, comm.Get_size(), comm.Get_rank(), "random", 32)
        plan = DecodePlan(own.tables, p.seq_lens, page_size=16, comm=comm, kv_split=32)
        before = comm.sent
        plan.attention(p.q, own.k_cache, own.v_cache)
        return comm.sent - before - 32, int(plan.states[comm.Get_rank()]) * 4 * (32 + 1) * 4  # 32 bytes are for the agreement

    for actual, expected in run(4, sent):
        assert actual == expected


@pytest.mark.parametrize("owner", ["turns", "runs", "random"])
def test_counts_and_no_window(owner):
    """Counts mean the same as -1 in a list, and a window of -1 means that there is no window."""
    p = testing.make_paged(3, 4, 2, [700, 33, 0], 16, 32)
    rng = np.random.default_rng(4)
    selected = np.stack([np.stack([rng.permutation(n) % 44 for n in (44, 44)]) for _ in range(3)])[:, :, :6]
    selected[1] = [[0, 2, 1, 9, 9, 9], [1, 9, 9, 9, 9, 9]]
    counts = np.array([[6, 2], [3, 1], [0, 0]])
    padded = np.where(np.arange(6) < counts[:, :, None], selected, -1)
    expected = blitz_attn.paged_select_attention(*p.arrays, padded, kv_split=32, return_lse=True, **p.options)
    for out, lse in run(3, lambda comm: attend(comm, p, owner, selected=selected, counts=counts, window=-1, return_lse=True)):
        assert np.array_equal(out, expected[0])
        assert np.array_equal(lse, expected[1])


BAD = {
    "dtype of q": (lambda r: {"q": np.ones((2, 4, 32), np.int32)} if r == 1 else {}, "TypeError: q: expected float32"),
    "shape of q": (lambda r: {"q": np.ones((3, 4, 32), np.float32)} if r == 1 else {}, "ValueError: q: expected shape (2, H, D), got (3, 4, 32) (on rank 1)"),
    "values of q": (lambda r: {"q": np.full((2, 4, 32), r, np.float32)}, "ValueError: q: expected the same on all ranks, got float32 of shape (2, 4, 32) on rank 0 and one with other values on rank 1"),
    "lengths": (lambda r: {"seq_lens": [70, 33 - r]}, "ValueError: seq_lens: expected the same on all ranks"),
    "kv_split": (lambda r: {"kv_split": 24}, "ValueError: kv_split: expected a multiple of page_size = 16, got 24"),
    "interleave": (lambda r: {"interleave": 48}, "ValueError: interleave: expected a multiple of kv_split = 32, got 48"),
    "window": (lambda r: {"window": -2}, "ValueError: window: "),
    "window of one rank": (lambda r: {"window": 5 + r}, "ValueError: window: expected the same on all ranks, got 5 on rank 0 and 6 on rank 1"),
    "layout": (lambda r: {"kv_layout": "HNS"}, "ValueError: kv_layout: expected 'NHD' or 'HND', got 'HNS'"),
    "sinks": (lambda r: {"sinks": np.ones(5)} if r == 0 else {"sinks": np.ones(4)}, "ValueError: sinks: expected shape (4,), one number per head, got (5,) (on rank 0)"),
    "number of q_lens": (lambda r: {"q_lens": [1]}, "ValueError: q_lens: expected 2 entries, one per request, got 1"),
    "negative q_lens": (lambda r: {"q_lens": [1, -1]}, "ValueError: q_lens: expected 0 to seq_lens[1] = 33, got -1 at [1]"),
    "more queries than tokens": (lambda r: {"q_lens": [1, 34]}, "ValueError: q_lens: expected 0 to seq_lens[1] = 33, got 34 at [1]"),
    "q_lens of one rank": (lambda r: {"q_lens": [1, 34 if r else 1]}, "ValueError: q_lens: expected 0 to seq_lens[1] = 33, got 34 at [1] (on rank 1)"),
    "kind of sinks": (lambda r: {"sinks": "x"}, "TypeError: sinks: expected numbers, got str"),
    "axes of the cache": (lambda r: {"k_cache": np.ones((2, 16, 32), np.float32)} if r == 1 else {}, "ValueError: k_cache: expected shape (pages, page_size, Hkv, D), got (2, 16, 32) (on rank 1)"),
    "selected": (lambda r: {"selected": np.full((2, 2, 1), 9, np.int32)}, "ValueError: selected: expected pages from 0 to 4, or a pad, got 9 at [0, 0, 0]"),
    "selected twice": (lambda r: {"selected": np.array([[[0, 4, 1, 4]] * 2, [[2, 1, -1, -1]] * 2])},
        "ValueError: selected: expected each page once per row, got 4 again at [0, 0, 3]"),
    "selected of no tokens": (lambda r: {"selected": np.array([[[0]] * 2, [[0]] * 2]), "seq_lens": [70, 0]},
        "ValueError: selected: expected no page, since request 1 has no tokens, got 0 at [1, 0, 0]"),
    "selected dtype": (lambda r: {"selected": np.zeros((2, 2, 1))}, "TypeError: selected: expected int16, int32 or int64, got float64"),
    "selected axes": (lambda r: {"selected": np.zeros((2, 2), np.int32)},
        "ValueError: selected: expected shape (2, 2 or 4, K), one row per request and KV head or query head, got (2, 2)"),
    "selected heads": (lambda r: {"selected": np.zeros((2, 3, 1), np.int32)},
        "ValueError: selected: expected shape (2, 2 or 4, K), one row per request and KV head or query head, got (2, 3, 1)"),
    "counts": (lambda r: {"selected": np.zeros((2, 2, 1), np.int32), "counts": np.full((2, 2), 2)},
        "ValueError: counts: expected 0 to 1, got 2 at [0, 0]"),
    "shape of counts": (lambda r: {"selected": np.zeros((2, 2, 1), np.int32), "counts": [1, 1]},
        "ValueError: counts: expected shape (2, 2) like the rows of selected, got (2,)"),
    "a triple": (lambda r: {"block_tables": ([0], [0], [1]), "seq_lens": None}, "TypeError: block_tables: expected an array, got tuple"),
    "axes of the table": (lambda r: {"block_tables": np.zeros(5, np.int32)},
        "ValueError: block_tables: expected shape (B, W) with one row per entry of seq_lens, got (5,)"),
    "negative length": (lambda r: {"seq_lens": [70, -1]}, "ValueError: seq_lens: expected at least 0, got -1 at [1]"),
    "kv_split of no tokens": (lambda r: {"kv_split": 0}, "ValueError: kv_split: expected "),
    "few columns": (lambda r: {"block_tables": np.zeros((2, 2), np.int32)},
        "ValueError: seq_lens: expected lengths from 0 to what the table's 2 pages of 16 tokens hold, got 70 at [0]"),
    "pages of no tokens": (lambda r: {"k_cache": np.zeros((8, 0, 2, 32), np.float32)},
        "ValueError: page_size: expected at least 1 token, got 0"),
    "few columns by turns": (lambda r: {"block_tables": np.zeros((2, 1), np.int32), "interleave": 64},
        "ValueError: block_tables: expected the 4 pages that this rank holds of request 0, got rows of 1"),
    "out in v_cache": (lambda r: (lambda cache: {"v_cache": cache, "out": cache[0, :4, :, :].reshape(2, 4, 32)})(np.ones((8, 16, 2, 32), np.float32)),
        "ValueError: out: expected memory of its own, got an array that overlaps v_cache"),
    "out in selected": (lambda r: (lambda memory: {"selected": memory[3:7].reshape(2, 2, 1), "out": memory[:256].view(np.float32).reshape(2, 4, 32)})(np.zeros(256, np.int32)),
        "ValueError: out: expected memory of its own, got an array that overlaps selected"),
    "table's dtype": (lambda r: {"block_tables": np.zeros((2, 5))}, "TypeError: block_tables: expected int32 or int64, got float64"),
    "pages on no rank": (lambda r: {"block_tables": np.full((2, 5), -1)}, "ValueError: block_tables: expected every page on some rank, got tokens 0 to 31 of request 0 on none"),
    "half a chunk": (lambda r: {"block_tables": np.array([[0, -1, -1, -1, -1]] * 2)}, "ValueError: block_tables: expected all pages or none of each chunk of kv_split = 32 tokens on a rank, got 1 of pages 0 to 1 of request 0"),
    "page number": (lambda r: {"block_tables": np.full((2, 5), 99)}, "ValueError: block_tables: "),
    "shape of out": (lambda r: {"out": np.zeros((2, 4, 31), np.float32)}, "ValueError: out: expected shape (2, 4, 32), got (2, 4, 31)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_the_same_on_all_ranks(name):
    change, sentence = BAD[name]
    p = testing.make_paged(2, 4, 2, [70, 33], 16, 32)

    def work(comm):
        own = Shared(p, 2, comm.Get_rank(), "runs", 32)
        arguments = {"q": p.q, "k_cache": own.k_cache, "v_cache": own.v_cache, "block_tables": own.tables, "seq_lens": p.seq_lens}
        decode_context_parallel_attention(**{**arguments, **own.options, **change(comm.Get_rank())}, comm=comm)

    texts = sentences(2, work)
    assert texts[0] == texts[1]
    assert texts[0] is not None
    assert texts[0].startswith(sentence), texts[0]


def test_queries_of_requests_longer_than_one_process_takes():
    """All ranks together may have more tokens than one process takes."""
    lens, size = [2**31, 40], 2**25
    plan = DecodePlan(np.zeros((2, 64), np.int32), lens, page_size=size, comm=Alone(), kv_split=size, q_lens=[3, 2])
    assert plan.num_queries == 5


# ---- Selection ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("content", ["random", "ties", "not finite"])
@pytest.mark.parametrize("method", ["quest", "mean", "max"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_choice_is_that_of_one_process(ranks, method, content):
    rng = np.random.default_rng(0)
    p = testing.make_paged(6, 6, 2, [1500, 5, 0, 777, 64, 17], 16, 32, poison=False)
    if content == "ties":
        p.k_cache[...], p.q[...] = np.round(p.k_cache / 2), np.round(p.q)
    elif content == "not finite":
        p.k_cache[rng.random(p.k_cache.shape) < 0.003] = np.nan
        p.k_cache[rng.random(p.k_cache.shape) < 0.003] = np.inf

    def work(comm):
        for options in (
            {"k": 8},
            {"k": [1, 2, 3, 4, 5, 6], "sink": 0, "recent": 0, "ascending": False},
            {"k": 3, "sink": 2, "recent": [1, 2, 3, 0, 1, 1], "per_query_head": True},
            {"k": 4, "dense_below": 100},
            {"k": 6, "tokens_since_metadata_update": [3, -1, 0, 100, 64, 2]},
            {"k": 200},
        ):
            check_selection(comm, p, options.pop("k"), method, 32, **options)

    run(ranks, work)


def test_a_plan_knows_the_owners_of_pages():
    p = testing.make_paged(2, 4, 2, [500, 77], 16, 32, poison=False)
    tables = np.maximum(p.block_tables, 0)
    selected, counts = blitz_attn.select_blocks(p.q, p.k_cache, tables, p.seq_lens, 5, method="max")

    def work(comm):
        own = Shared(p, comm.Get_size(), comm.Get_rank(), "random", 32)
        plan = DecodePlan(own.tables, p.seq_lens, page_size=16, comm=comm, kv_split=32)
        rows = [row[row >= 0] for row in own.tables]
        pages = np.zeros((2, max(map(len, rows))), np.int32)
        for to, row in zip(pages, rows, strict=True):
            to[: len(row)] = row
        return select_blocks_distributed(p.q, own.k_cache, pages, p.seq_lens, 5, method="max", plan=plan)

    for got in run(3, work):
        assert np.array_equal(got[0], selected)
        assert np.array_equal(got[1], counts)


def test_candidates_are_eight_bytes_each():
    p = testing.make_paged(2, 4, 2, [500, 77], 16, 32, poison=False)

    def work(comm):
        own = Shared(p, comm.Get_size(), comm.Get_rank(), "turns", 32, 32)
        pages, _ = own.rows()
        select_blocks_distributed(p.q, own.k_cache, pages, p.seq_lens, 5, method="max", comm=comm, interleave=32)
        return comm.sent - 32  # 32 bytes are for the agreement

    assert set(run(3, work)) == {2 * 2 * 5 * 8}


BAD_SELECTION = {
    "k": (lambda r: {"k": 5 - r}, "ValueError: k: expected the same on all ranks"),
    "no owner": (lambda r: {"interleave": None}, "ValueError: interleave: expected a number of tokens where plan is not given, got None"),
    "interleave": (lambda r: {"interleave": 24}, "ValueError: interleave: expected a multiple of the block size 16, got 24"),
    "sink": (lambda r: {"sink": -1}, "ValueError: sink: expected at least 0 pages, got -1"),
    "recent": (lambda r: {"recent": [1, 2, 3]}, "ValueError: recent: expected a number, or 2 of them, one per request, got shape (3,)"),
    "method": (lambda r: {"method": "best"}, "ValueError: method: "),
    "lengths": (lambda r: {"seq_lens": [-1, 5]}, "ValueError: seq_lens: expected lengths of at least 0, got [-1, 5]"),
    "block size": (lambda r: {"block_size": 0}, "ValueError: block_size: expected at least 1 token, got 0"),
    "few recent": (lambda r: {"recent": [1, -1]}, "ValueError: recent: expected at least 0 pages, got -1"),
    "tokens since": (lambda r: {"tokens_since_metadata_update": -2},
        "ValueError: tokens_since_metadata_update: expected at least 0, or -1 for no window, got -2"),
    "source of one rank": (lambda r: {"source": np.zeros(3)} if r else {}, "ValueError: source: expected four axes, got shape (3,) (on rank 1)"),
    "q of one rank": (lambda r: {"q": np.zeros((2, 4, 32), np.int32)} if r else {}, "TypeError: q: expected float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SELECTION)
def test_bad_selection_raises_the_same_on_all_ranks(name):
    change, sentence = BAD_SELECTION[name]
    p = testing.make_paged(2, 4, 2, [500, 77], 16, 32, poison=False)

    def work(comm):
        own = Shared(p, 2, comm.Get_rank(), "turns", 32, 32)
        arguments = {
            "q": p.q,
            "source": own.k_cache,
            "tables": own.rows()[0],
            "seq_lens": p.seq_lens,
            "k": 5,
            "method": "max",
            "interleave": 32,
        }
        select_blocks_distributed(**{**arguments, **change(comm.Get_rank())}, comm=comm)

    texts = sentences(2, work)
    assert texts[0] == texts[1]
    assert texts[0] is not None
    assert texts[0].startswith(sentence), texts[0]


def test_a_plan_that_does_not_fit_is_refused():
    p = testing.make_paged(2, 4, 2, [500, 77], 16, 32, poison=False)
    tables = np.maximum(p.block_tables, 0)
    given = {"q": p.q, "source": p.k_cache, "tables": tables, "k": 5, "method": "max"}
    plan = DecodePlan(tables, p.seq_lens, page_size=16, comm=Alone(), kv_split=32)
    with pytest.raises(ValueError, match="^interleave: expected None with plan, which says who holds what, got a number$"):
        select_blocks_distributed(**given, seq_lens=p.seq_lens, plan=plan, interleave=32)
    with pytest.raises(ValueError, match=r"^plan: expected one of seq_lens \[499, 77\], got one of \[500, 77\]$"):
        select_blocks_distributed(**given, seq_lens=[499, 77], plan=plan)
    with pytest.raises(ValueError, match="^plan: expected one of pages of 8 tokens, got one of pages of 16$"):
        select_blocks_distributed(**given, seq_lens=p.seq_lens, plan=plan, block_size=8)


def test_one_rank_needs_no_turns():
    p = testing.make_paged(3, 4, 2, [500, 77, 0], 16, 32, poison=False)
    tables = np.maximum(p.block_tables, 0)
    expected = blitz_attn.select_blocks(p.q, p.k_cache, tables, p.seq_lens, 5, method="max")
    got = select_blocks_distributed(p.q, p.k_cache, tables, p.seq_lens, 5, method="max", comm=Alone())
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
