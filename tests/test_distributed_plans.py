"""Plans of context-parallel attention, without MPI: each block that a row sees arrives once at the rank that computes the row, the plan's bytes
are those of all rows that ranks send, and work is balanced."""

import itertools

import numpy as np
import pytest

from blitz_attn import distributed, nsa, sabi
from blitz_attn.distributed import Alone, ContextParallelPlan
from blitz_attn.distributed._dispatch import chain_cut

DISPATCHES = ("cut", "zigzag", "contiguous", "items")


class Fake:
    """A communicator in which every other rank sends what this rank sends."""

    def __init__(self, size, rank=0):
        self.size, self.rank = size, rank

    def Get_rank(self):  # noqa: N802 - MPI's names, here and below
        return self.rank

    def Get_size(self):  # noqa: N802
        return self.size

    def Allgather(self, sent, received):  # noqa: N802
        received[...] = sent

    def Allgatherv(self, sent, received):  # noqa: N802
        place, (counts, starts) = received
        for count, start in zip(counts, starts, strict=True):
            place[start : start + count] = sent

    Alltoallv = Isend = Irecv = Allgather


def lists_of(rng, batch, heads, rows, columns, density=0.4):
    """Lists in random order, some of them empty."""
    mask = rng.random((batch, heads, rows, columns)) < density
    mask[rng.random((batch, heads, rows)) < 0.2] = False
    lists = np.full((batch, heads, rows, columns), -1, np.int32)
    for at in np.ndindex(mask.shape[:3]):
        kept = rng.permutation(np.flatnonzero(mask[at]))
        lists[at][: len(kept)] = kept
    return lists


def problem_of(seed):
    """Arguments of a plan, drawn at random."""
    rng = np.random.default_rng(seed)
    block = tuple(int(n) for n in rng.choice([3, 4, 8], 2))
    group, kv_heads, batch = (int(rng.integers(1, 4)) for _ in range(3))
    given = {
        "num_heads": group * kv_heads, "num_kv_heads": kv_heads, "block_shape": block, "causal": bool(rng.integers(2)), "head_dim": 5,
        "head_dim_v": 3, "dtype": str(rng.choice(["float32", "bfloat16", "float64"])), "window": [None, (9, -1), (20, 3), (-1, 0)][rng.integers(4)],
    }  # fmt: skip
    if rng.integers(3) == 0:
        q_sizes = rng.integers(0, 40, batch)
        kv_sizes = q_sizes if rng.integers(2) else rng.integers(0, 40, batch)
        q_sizes[0], kv_sizes[0] = max(1, q_sizes[0]), max(1, kv_sizes[0])
        given |= {"layout": "TND", "cu_seqlens_q": np.cumsum([0, *q_sizes]), "cu_seqlens_kv": np.cumsum([0, *kv_sizes])}
        longest = q_sizes.max(), kv_sizes.max()
    else:
        longest = int(rng.integers(1, 90)), int(rng.integers(1, 90))
        longest = longest if rng.integers(2) else (longest[0], longest[0])
        given |= {"layout": "BNSD", "batch": batch, "s_q": longest[0], "s_kv": longest[1]}
        if rng.integers(2):
            given |= {"q_lens": rng.integers(0, longest[0] + 1, batch), "kv_lens": rng.integers(0, longest[1] + 1, batch)}
    if rng.integers(4):
        rows, columns = -(-longest[0] // block[0]), -(-longest[1] // block[1])
        given["sabi"] = lists_of(rng, batch if rng.integers(2) else 1, int(rng.choice([group * kv_heads, kv_heads, 1])), rows, columns)
    return given


def sequences_of(given):
    """(first query, first key, number of queries, number of keys) of each sequence, as positions on the token axes, without padding."""
    if given["layout"] == "TND":
        cu_q, cu_kv = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        return list(zip(cu_q[:-1], cu_kv[:-1], np.diff(cu_q), np.diff(cu_kv), strict=True))
    q_lens = given.get("q_lens", np.full(given["batch"], given["s_q"]))
    kv_lens = given.get("kv_lens", np.full(given["batch"], given["s_kv"]))
    return [(0, 0, q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)]


def seen(given, sequence, head, queries, keys):
    """The mask (queries, keys) of the token rules and of the head's list, by the definitions of `block_sparse_attention`."""
    i, j = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
    mask = np.ones((queries, keys), bool)
    if given["causal"]:
        mask &= j <= i
    if given["window"] is not None:
        left, right = given["window"]
        mask &= (left < 0) | (j >= i - left)
        mask &= (right < 0) | (j <= i + right)
    lists = given.get("sabi")
    if lists is not None:
        one = lists[sequence % len(lists), head * lists.shape[1] // given["num_heads"]]
        listed = np.zeros((len(one), max(1, keys, *(one.max(initial=0) + 1,)) + 1), bool)
        for row, columns in enumerate(one):
            listed[row, columns[columns >= 0]] = True
        mask &= listed[np.arange(queries) // given["block_shape"][0]][:, j // given["block_shape"][1]]
    return mask


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("seed", range(24))
def test_each_listed_block_arrives_once(seed, dispatch):
    """For each KV head, a rank receives exactly the blocks that its rows see: each token once, from the rank that holds the token."""
    given = problem_of(seed)
    size = [1, 2, 3, 4, 8, 50][seed % 6]
    arguments = dict(given, size=size, dispatch=dispatch)
    plan = ContextParallelPlan(arguments.pop("sabi", None), **arguments)
    routes, packed = plan._routes, given["layout"] == "TND"
    tokens = (int(given["cu_seqlens_q"][-1]), int(given["cu_seqlens_kv"][-1])) if packed else (given["s_q"], given["s_kv"])
    owner = np.full(tokens[1], -1)
    for rank in range(size):
        for a, b in ContextParallelPlan(given.get("sabi"), **arguments, rank=rank).kv_ranges:
            assert (owner[a:b] == -1).all()
            owner[a:b] = rank
    assert (owner >= 0).all()
    shards = [np.concatenate([np.arange(a, b) for a, b in routes.kv_held.of(r)] or [np.zeros(0, int)]) for r in range(size)]
    group = given["num_heads"] // given["num_kv_heads"]
    batch = 1 if packed else given["batch"]
    sent, moved = np.zeros((size, size), int), np.zeros((size, size), int)
    held = [np.concatenate([np.arange(a, b) for a, b in routes.q_held.of(r)] or [np.zeros(0, int)]) for r in range(size)]
    assert sorted(np.concatenate(held)) == list(range(tokens[0]))
    for head in range(given["num_kv_heads"]):
        worker = np.full(tokens[0], -1)
        for rank in range(size):
            for a, b in routes.computed[head].mapped(routes.problem.row_at).of(rank):
                assert (worker[a:b] == -1).all()
                worker[a:b] = rank
        assert (worker >= 0).all()
        for rank in range(size):
            for other in range(size):
                if other != rank:
                    moved[other, rank] += batch * int((worker[held[other]] == rank).sum())
            arrived = np.zeros((1 if packed else routes.problem.entries, tokens[1]), int)
            for other in range(size):
                for entry, begin, local, length in zip(*routes.kv_runs(other, rank, head), strict=True):
                    assert (shards[other][local : local + length] == np.arange(begin, begin + length)).all()
                    arrived[0 if packed else entry, begin : begin + length] += 1
                    sent[other, rank] += length * routes.problem.alike * (other != rank)
            wanted = np.zeros_like(arrived)
            for number, (q0, k0, queries, keys) in enumerate(sequences_of(given)):
                for h in range(head * group, (head + 1) * group):
                    mine = worker[q0 : q0 + queries] == rank
                    visible = seen(given, number, h, queries, keys)[mine].any(axis=0)
                    for column in np.unique(np.flatnonzero(visible) // given["block_shape"][1]):
                        first = column * given["block_shape"][1]
                        wanted[0 if packed else number % len(wanted), k0 + first : k0 + min(first + given["block_shape"][1], keys)] = 1
            assert (arrived == wanted).all()
    itemsize = {"float32": 4, "bfloat16": 2, "float64": 8}[given["dtype"]]
    lse = 8 if given["dtype"] == "float64" else 4
    assert (plan.bytes == sent * 8 * itemsize + moved * group * 5 * itemsize + moved.T * group * (3 * itemsize + lse)).all()


def patterns(size, block=128):
    """The number of tokens, and lists for causal calls with 8 rows per rank: name -> (lists, more arguments)."""
    rng, rows = np.random.default_rng(size), 8 * size
    tokens = rows * block
    ends = np.sort(rng.choice(np.arange(1, rows), max(3, size // 2), replace=False)) * block
    mask = (rng.random((rows, rows)) < max(0.05, 4 / rows)) & np.tri(rows, dtype=bool) | np.eye(rows, dtype=bool)
    return tokens, {
        "dense": (None, {}),
        "window": (sabi.sliding_window(tokens, window=(4096, 0)), {"window": (4096, 0)}),
        "sink and local": (sabi.sink_local(tokens, sink=block, local=4096), {}),
        "documents": (sabi.document(np.diff([0, *ends, tokens])), {}),
        "random": (sabi.from_block_mask(mask[None, None]), {}),
    }


@pytest.mark.parametrize("size", [4, 8, 64, pytest.param(256), pytest.param(1024, marks=pytest.mark.long)])
def test_work_is_even(size):
    """With 8 rows per rank and 8 heads, no rank has more than 1.1 times the mean load. With one head, the bound is 1.15 for documents."""
    tokens, lists = patterns(size)
    for name, (one, more) in lists.items():
        for dispatch in ("cut", "items"):
            plan = ContextParallelPlan(one, tokens, size=size, num_heads=8, dispatch=dispatch, causal=True, **more)
            assert plan.balance <= 1.1, (name, dispatch, plan.balance)
            assert plan.balance == pytest.approx(plan.loads.max() / plan.loads.mean())
        one_head = ContextParallelPlan(one, tokens, size=size, dispatch="cut", causal=True, **more)
        assert one_head.balance <= (1.15 if name == "documents" else 1.1), (name, one_head.balance)


@pytest.mark.parametrize("name", ["window", "documents"])
def test_windows_and_documents_move_little(name):
    tokens, lists = patterns(64)
    one, more = lists[name]
    plan = ContextParallelPlan(one, tokens, size=64, num_heads=8, causal=True, **more)
    received = plan.bytes.sum(axis=0)
    assert received.max() <= 0.2 * plan.all_gather_bytes.min(), name
    assert received.sum() <= 0.1 * plan.all_gather_bytes.sum(), name


def test_auto_takes_about_the_fastest_dispatch():
    tokens, lists = patterns(16)
    for one, more in lists.values():
        given = dict(size=16, num_heads=16, num_kv_heads=8, causal=True, link=1e9, rate=1e13, **more)
        totals = {d: ContextParallelPlan(one, tokens, dispatch=d, **given).predict(1e9, 1e13).total for d in DISPATCHES}
        auto = ContextParallelPlan(one, tokens, **given)
        assert auto.predict(1e9, 1e13).total <= 1.07 * min(totals.values())
        assert auto.predict(1e9, 1e13).total == totals[auto.dispatch]


def test_items_bring_only_some_heads():
    """With as many ranks as KV heads, each rank computes one KV head, and receives only that head's keys."""
    plan = ContextParallelPlan(None, 8192, size=8, num_heads=16, num_kv_heads=8, dispatch="items")
    assert [plan._routes.stages(r) for r in range(8)] == [[r] for r in range(8)]
    assert plan.bytes.sum(axis=0).max() == 7 * 1024 * (2 * 128 * 4 + 2 * 128 * 4) + 7 * 1024 * 2 * (128 * 4 + 4)


def test_the_best_chain_cut():
    rng = np.random.default_rng(0)
    for _ in range(200):
        work = rng.integers(0, 9, rng.integers(1, 9)).astype(float)
        parts = int(rng.integers(1, 5))
        at = chain_cut(work, parts)
        assert at[0] == 0
        assert at[-1] == len(work)
        assert (np.diff(at) >= 0).all()
        least = min(
            max(work[a:b].sum() for a, b in zip((0, *cuts), (*cuts, len(work)), strict=True))
            for cuts in np.ndindex(*(len(work) + 1,) * (parts - 1)) if all(a <= b for a, b in itertools.pairwise(cuts))
        )  # fmt: skip
        assert max(work[a:b].sum() for a, b in itertools.pairwise(at)) <= least * (1 + 1e-3), (work, parts, at)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_more_ranks_than_rows_and_lists_without_work(dispatch):
    plan = ContextParallelPlan(None, 100, size=5, rank=4, num_heads=2, dispatch=dispatch)
    assert sum(b - a for r in range(5) for a, b in plan._routes.q_held.of(r)) == 100
    empty = ContextParallelPlan(np.full((1, 1, 8, 1), -1), 1024, size=4, dispatch=dispatch, num_heads=4)
    assert empty.balance == 1.0
    assert not empty.bytes[:, [r for r in range(4) if dispatch != "items"]].any()
    assert empty.predict(1e9, 1e12).efficiency == (1.0 if dispatch != "items" else 0.0)
    assert ContextParallelPlan(None, 100, size=1, dispatch=dispatch).bytes.tolist() == [[0]]


def test_a_plan_of_a_communicator_is_that_of_its_size():
    arguments = {"num_heads": 4, "causal": True, "dispatch": "zigzag"}
    plan = ContextParallelPlan(None, 4096, comm=Fake(3, 1), **arguments)
    pure = ContextParallelPlan(None, 4096, size=3, rank=1, **arguments)
    assert (plan.bytes == pure.bytes).all()
    assert plan.q_ranges == pure.q_ranges == [(640, 1280), (2688, 3328)]
    assert plan.comm is not None
    assert pure.comm is None


def test_picture_and_prediction():
    plan = ContextParallelPlan(None, 1 << 15, size=64, num_heads=8, causal=True, dispatch="zigzag")
    lines = plan.picture().splitlines()
    assert len(lines) == 33
    assert lines[0].startswith("zigzag, 64 ranks, balance 1.00, ")
    said = plan.predict(link=1e9, rate=1e12)
    flops = plan.loads * 4 * 128
    assert said.compute == pytest.approx(flops.max() / 1e12)
    assert said.transfer == pytest.approx(max(plan.bytes.sum(0).max(), plan.bytes.sum(1).max()) / 1e9)
    assert said.total == pytest.approx(said.compute + said.exposed)
    assert said.efficiency == pytest.approx(flops.mean() / 1e12 / said.total)


BAD = [
    ({"s_q": None}, TypeError, "s_q: expected the number of queries of the whole sequence with layout BNSD, got None"),
    ({"s_q": 0}, ValueError, "s_q: expected at least 1, got 0"),
    ({"size": 0}, ValueError, "size: expected 1 to 65536 ranks, got 0"),
    ({"rank": 2}, ValueError, "rank: expected 0 to 1, got 2"),
    ({"comm": Fake(2)}, ValueError, "comm: expected none with size, got a communicator"),
    ({"size": None, "rank": 1, "comm": Fake(2)}, ValueError, "rank: expected none without size, got one"),
    ({"size": None, "comm": 3}, TypeError, "comm: expected a communicator with the methods of mpi4py.MPI.Comm, got int without Get_rank"),
    ({"dispatch": "ring"}, ValueError, "dispatch: expected one of auto, cut, zigzag, contiguous, items, got 'ring'"),
    ({"num_heads": 3, "num_kv_heads": 2}, ValueError, "num_heads: expected a multiple of num_kv_heads = 2, got 3"),
    ({"dtype": "int8"}, TypeError, "dtype: expected float32, float16, bfloat16 or float64, got int8"),
    ({"sabi": np.zeros((1, 1, 3, 1), int)}, ValueError, "sabi: expected shape (B or 1, H, Hkv or 1, 2, W), with 2 rows = ceil(256 queries / block_shape[0] = 128), got (1, 1, 3, 1)"),
    ({"sabi": np.full((1, 1, 2, 1), 2)}, ValueError, "sabi: expected block columns from 0 to 1, or a pad, got 2 at [0, 0, 0, 0]"),
    ({"sabi": np.full((1, 2, 2, 2), 1)}, ValueError, "sabi: expected heads 1 on axis 1, got shape (1, 2, 2, 2)"),
    ({"num_heads": 2, "sabi": np.array([[[[0], [1]], [[1], [2]]]])}, ValueError,
     "sabi: expected block columns from 0 to 1, or a pad, got 2 at [0, 1, 1, 0]"),
    ({"kv_lens": [3, 4]}, ValueError, "kv_lens: expected shape (1,), one per batch entry, got (2,)"),
    ({"q_lens": [257]}, ValueError, "q_lens: expected lengths from 0 to 256, got [257]"),
    ({"layout": "TND"}, ValueError, "s_q: expected none with layout TND, whose lengths are cu_seqlens_q and cu_seqlens_kv, got some"),
    ({"layout": "TND", "s_q": None}, TypeError, "cu_seqlens_q: expected cumulative lengths with layout TND, got None"),
    ({"layout": "TND", "s_q": None, "cu_seqlens_q": [0, 9], "cu_seqlens_kv": [0, 4, 9]}, ValueError,
     "cu_seqlens_kv: expected 2 numbers like cu_seqlens_q, got 3"),
    ({"layout": "TND", "s_q": None, "cu_seqlens_q": [0, 9], "batch": 2}, ValueError, "batch: expected 1 as cu_seqlens_q says, got 2"),
    ({"layout": "TND", "s_q": None, "cu_seqlens_q": [0, 9, 5]}, ValueError,
     "cu_seqlens_q: expected at least two cumulative lengths that rise from 0, got [0, 9, 5]"),
    ({"layout": "TND", "s_q": None, "cu_seqlens_q": [0, 2**63 - 1, -(2**63), -1]}, ValueError,
     f"cu_seqlens_q: expected at least two cumulative lengths that rise from 0, got {[0, 2**63 - 1, -(2**63), -1]}"),
    ({"sabi": np.zeros((1, 1, 2, 1))}, TypeError, "sabi: expected an integer array, got float64"),
    ({"sabi": np.zeros(2, int)}, ValueError, "sabi: expected shape (B or 1, H, Hkv or 1, rows, width), got (2,)"),
    ({"dtype": 3}, TypeError, "dtype: expected a dtype or its name, got int"),
    ({"dtype": "two words"}, TypeError, "dtype: expected float32, float16, bfloat16 or float64, got 'two words'"),
    ({"cu_seqlens_q": [0, 2]}, ValueError, "cu_seqlens_q: expected none with layout BNSD, whose lengths are q_lens and kv_lens, got some"),
    ({"window": (-2, 0)}, ValueError, "window: expected two numbers of tokens (before, after), -1 for no bound, got (-2, 0)"),
    ({"link": 0.0}, ValueError, "link: expected a positive number, got 0.0"),
    ({"rate": "x"}, TypeError, "rate: expected a number, got str"),
    ({"s_q": 1 << 40}, ValueError, "block_shape: expected blocks so large that there are at most 4194304 rows and columns, got 8589934592 x 8589934592"),
    ({"s_q": 1 << 24, "sabi": np.zeros((1, 1, 1, 1), int)}, ValueError,
     "block_shape: expected blocks so large that a grid has at most 4294967296 blocks with a list, got 131072 x 131072"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_without_a_list_is_that_of_the_full_list(seed):
    rng = np.random.default_rng(seed)
    s_q, s_kv, block_shape = int(rng.integers(1, 400)), int(rng.integers(1, 400)), tuple(rng.integers(1, 40, 2).tolist())
    options = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "block_shape": block_shape,
        "causal": bool(rng.integers(2)),
        "size": int(rng.integers(1, 6)),
    }
    if rng.integers(2):
        options["window"] = tuple(rng.integers(-1, 60, 2).tolist())
    if rng.integers(2):
        options |= {"batch": 2, "q_lens": rng.integers(0, s_q + 1, 2), "kv_lens": rng.integers(0, s_kv + 1, 2)}
    one, other = (ContextParallelPlan(lists, s_q, s_kv, **options) for lists in (None, sabi.dense(s_q, s_kv, block_shape)))
    assert one.dispatch == other.dispatch
    assert (one.loads == other.loads).all()
    assert (one.bytes == other.bytes).all()
    assert (one.backward_bytes == other.backward_bytes).all()


def test_plans_of_a_million_tokens_in_small_blocks():
    """The grids of these plans have more than 2**28 blocks."""
    window, options = (4096, 0), {"size": 8, "block_shape": (64, 64), "causal": True, "dispatch": "cut"}
    one = ContextParallelPlan(None, 1_100_000, window=window, **options)
    other = ContextParallelPlan(sabi.sliding_window(1_100_000, block_shape=(64, 64), window=window), 1_100_000, window=window, **options)
    assert one.balance < 1.02
    assert (one.bytes == other.bytes).all()
    assert ContextParallelPlan(None, 1_100_000, **options).balance < 1.02


@pytest.mark.parametrize(("changed", "kind", "text"), BAD)
def test_bad_plans(changed, kind, text):
    given = {"sabi": None, "s_q": 256, "size": 2} | changed
    with pytest.raises(kind) as caught:
        ContextParallelPlan(given.pop("sabi"), given.pop("s_q"), **given)
    assert str(caught.value) == text


# ---- Calls on one rank --------------------------------------------------------------------------------------------


def alone(**options):
    return ContextParallelPlan(None, 256, comm=Alone(), **options)


@pytest.mark.parametrize("dispatch", ["auto", "cut", "items"])
@pytest.mark.parametrize("rows", [None, 0])
def test_sequences_without_tokens(rows, dispatch):
    """Lists without queries have no rows, as in a call on one process."""
    sabi = None if rows is None else np.zeros((1, 1, rows, 1), np.int32)
    x, cu = np.zeros((0, 2, 4), np.float32), [0, 0, 0]
    plan = ContextParallelPlan(sabi, comm=Alone(), num_heads=2, head_dim=4, layout="TND", cu_seqlens_q=cu, dispatch=dispatch)
    out, lse = distributed.context_parallel_attention(x, x, x, plan)
    assert (out.shape, lse.shape) == ((0, 2, 4), (0, 2))
    assert [g.shape for g in distributed.context_parallel_attention_backward(out, x, x, x, out, lse, plan)] == [x.shape] * 3


@pytest.mark.parametrize("comm_type", ["auto", "p2p", "a2a"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 0), (0, 10), (0, 0)])
def test_nsa_of_nothing(batch, tokens, comm_type):
    q, k, v = (np.zeros((batch, tokens, heads, 8), np.float32) for heads in (4, 2, 2))
    assert distributed.nsa(q, k, v, comm=Alone(), comm_type=comm_type).shape == q.shape
    assert nsa.nsa(q, k, v).shape == q.shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_tensors_come_back_as_tensors(dtype):
    torch = pytest.importorskip("torch")
    x = torch.arange(2 * 256 * 3).reshape(2, 256, 3).to(getattr(torch, dtype))
    shard = distributed.dispatch(x, alone(), axis=1)
    assert (type(shard), shard.dtype) == (torch.Tensor, x.dtype)
    assert torch.equal(shard, x)
    assert torch.equal(distributed.undispatch(shard, alone(), axis=1), x)


X, LSE = np.zeros((1, 1, 256, 128), np.float32), np.zeros((1, 1, 256), np.float32)
BAD_CALLS = [
    (TypeError, "plan: expected a ContextParallelPlan, got int", lambda: distributed.context_parallel_attention(X, X, X, 3)),
    (TypeError, "plan: expected a ContextParallelPlan, got NoneType", lambda: distributed.dispatch(X, None)),
    (ValueError, "plan: expected one that was made with a communicator, got one that was made with size",
     lambda: distributed.context_parallel_attention(X, X, X, ContextParallelPlan(None, 256, size=1))),
    (ValueError, "axis: expected one of the 4 axes of x, got 4", lambda: distributed.dispatch(X, alone(), axis=4)),
    (ValueError, r"x: expected 256 tokens on axis 3, got shape \(1, 1, 256, 128\)", lambda: distributed.dispatch(X, alone(), axis=3)),
    (TypeError, "lse: expected float32, got float64",
     lambda: distributed.context_parallel_attention_backward(X, X, X, X, X, LSE.astype(float), alone())),
    (ValueError, r"lse: expected shape \(1, 1, 256\), this rank's shard, got \(1, 256\)",
     lambda: distributed.context_parallel_attention_backward(X, X, X, X, X, LSE[0], alone())),
]  # fmt: skip


@pytest.mark.parametrize(("error", "sentence", "call"), BAD_CALLS, ids=lambda x: x[:40] if isinstance(x, str) else None)
def test_bad_calls_on_one_rank(error, sentence, call):
    with pytest.raises(error, match=f"^{sentence}$"):
        call()


def test_a_waiting_thread_needs_mpi_that_allows_one(monkeypatch):
    monkeypatch.setattr("blitz_attn.distributed.attention.has_threads", lambda: False)
    with pytest.raises(ValueError, match='^overlap: expected MPI initialised with MPI_THREAD_MULTIPLE for "thread", got a lower level$'):
        distributed.context_parallel_attention(X, X, X, alone(), overlap="thread")


def test_one_rank_sends_nothing():
    with pytest.raises(RuntimeError, match="^comm: expected no message, because there is one rank, got one$"):
        Alone().Isend(X)
