"""Slices of the queries: rows that are computed by themselves have the bits that they have in the whole call, and stand where `q_begin` says."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, ISA_LEVELS, attend, check, random_lists, same_bits
from test_backward import check as check_gradients
from test_backward import gradients

RULES = [{}, {"causal": True}, {"causal": True, "window": (20, -1)}, {"window": (9, 4)}, {"causal": True, "window": (3, 0)}, {"window": (-1, 6)}]
SEEDS = range(60)


class Whole:
    """A random call, its results at the level in use, and its slices."""

    def __init__(self, seed, dtype):
        rng = self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.packed = seed % 5 == 4
        self.batch, kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 5, 8]))
        self.heads = kv_heads * group
        q_len, kv_len = int(rng.choice([2, 4, 7, 8, 9, 33, 70, 150, 300])), int(rng.choice([1, 8, 65, 150, 400]))
        dims = [int(n) for n in rng.choice([8, 16, 33, 64], 2)]
        block_q = int(rng.choice([1, 2, 4, 8, 16, 31, 64, 128]))
        self.options = {"block_shape": (block_q, int(rng.choice([8, 16, 48, 64, 128]))), **RULES[int(rng.integers(len(RULES)))]}
        self.rows = -(-q_len // block_q)
        self.lists = None
        if rng.random() < 0.7:
            shared = [(1, 1), (self.batch, 1), (self.batch, kv_heads), (self.batch, self.heads)][int(rng.integers(4))]
            columns = -(-kv_len // self.options["block_shape"][1])
            self.lists = random_lists(rng, *shared, self.rows, columns, share=0.6, empty=0.1)
        self.q, self.k, self.v = testing.make_qkv(self.batch, self.heads, kv_heads, q_len, kv_len, *dims, dtype=dtype, seed=seed)
        ragged = rng.random() < 0.5
        self.q_lens = rng.integers(0, q_len + 1, self.batch) if ragged else np.full(self.batch, q_len)
        self.kv_lens = rng.integers(0, kv_len + 1, self.batch) if ragged else np.full(self.batch, kv_len)
        if self.packed:
            self.kv_lens[0] = kv_len  # the longest sequence has all the columns that lists name
        self.q_total = self.q_lens.copy()
        self.begin = self.kv_lens - self.q_lens
        if rng.random() < 0.3:  # the whole is itself a slice
            self.begin = rng.integers(-20, kv_len + 20, self.batch)
            self.options["q_begin"] = self.begin

    def call(self, firsts, ends, given=None):
        """(out, lse, dq) of rows firsts[b] .. ends[b] - 1 of each entry, each (batch, heads, tokens, ...), padded with zeros. With the results
        of the whole as `given`, dq is computed from these."""
        block_q, padded = self.options["block_shape"][0], int(max(ends - firsts))
        q = np.zeros((*self.q.shape[:2], padded, self.q.shape[3]), self.q.dtype)
        whole = firsts.max() == 0 and (ends == self.q.shape[2]).all()
        lens, rows = np.clip(self.q_lens - firsts, 0, ends - firsts), -(-padded // block_q)
        lists = None if self.lists is None else np.full((self.batch, self.lists.shape[1], rows, self.lists.shape[3]), -1, np.int32)
        for b in range(self.batch):
            a, e = int(firsts[b]), int(ends[b])
            q[b, :, : e - a] = self.q[b, :, a:e]
            if lists is not None:
                mine = self.lists[b % len(self.lists)][:, a // block_q : -(-e // block_q)]
                lists[b, :, : mine.shape[1]] = mine
        options = dict(self.options)
        if not whole:
            options |= {"q_begin": self.begin + firsts, "q_total": self.q_total}
        arrays = (q, self.k, self.v)
        if self.packed:  # valid tokens only, sequence after sequence
            options |= {"layout": "TND", "cu_seqlens_q": np.cumsum([0, *lens]), "cu_seqlens_kv": np.cumsum([0, *self.kv_lens])}
            arrays = tuple(self.pack(x, n) for x, n in zip(arrays, (lens, self.kv_lens, self.kv_lens), strict=True))
            lists = None if lists is None else lists[:, :, : max(1, -(-int(max(lens)) // block_q))] if max(lens) else lists[:, :, :0]
        else:
            options |= {"q_lens": lens, "kv_lens": self.kv_lens}
        out, lse = attend(*arrays, lists, **options)
        if not self.packed:
            state = (out, lse)
        else:
            state = self.unpack(out, lens, padded), self.unpack(lse[..., None], lens, padded)[..., 0]
        douts = testing.round_to(np.random.default_rng(7).standard_normal((*self.q.shape[:3], self.v.shape[3])), self.dtype)
        dout = np.zeros((*q.shape[:3], self.v.shape[3]), douts.dtype)
        for b in range(self.batch):
            dout[b, :, : ends[b] - firsts[b]] = douts[b, :, firsts[b] : ends[b]]
        if self.packed:
            dout = self.pack(dout, lens)
        dq = gradients(dout, *arrays, out, lse, lists, **options)[0]
        return (*state, self.unpack(dq, lens, padded) if self.packed else dq)

    def pack(self, x, lens):
        return np.concatenate([x[b, :, : lens[b]].swapaxes(0, 1) for b in range(self.batch)])

    def unpack(self, x, lens, padded):
        result = np.zeros((self.batch, self.heads, padded, x.shape[-1]), x.dtype)
        for b, at in enumerate(np.cumsum([0, *lens])[:-1]):
            result[b, :, : lens[b]] = x[at : at + lens[b]].swapaxes(0, 1)
        return result

    def cuts(self):
        """Rows where each entry's slice begins and ends."""
        block_q, q_len = self.options["block_shape"][0], self.q.shape[2]
        firsts = self.rng.integers(0, self.rows, self.batch) * block_q
        lengths = self.rng.choice([1, block_q, 3 * block_q, q_len], self.batch)
        if self.packed or self.batch == 1:
            return firsts, np.minimum(firsts + lengths, q_len)
        return firsts, np.minimum(firsts + lengths[0], q_len)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slice_has_the_bits_of_the_whole(seed, dtype, isa_level):
    call = Whole(seed, dtype)
    whole = call.call(np.zeros(call.batch, int), np.full(call.batch, call.q.shape[2]))
    for _ in range(4):
        firsts, ends = call.cuts()
        part = call.call(firsts, ends)
        for name, all_rows, rows in zip(("out", "lse", "dq"), whole, part, strict=True):
            for b in range(call.batch):
                valid = min(int(ends[b]), int(call.q_lens[b]))
                mine, there = rows[b, :, : max(0, valid - firsts[b])], all_rows[b, :, firsts[b] : max(valid, firsts[b])]
                assert same_bits(np.ascontiguousarray(mine), np.ascontiguousarray(there)), (name, b, firsts, ends)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", RULES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", [[0, 50, 90], [-30, 129, 200], 64, np.int32(7), np.array([5, 5, -39])], ids=str)
def test_queries_stand_where_q_begin_says(begin, dtype, rules):
    q, k, v = testing.make_qkv(3, 4, 2, 40, 130, 32, 24, dtype=dtype)
    lists = random_lists(np.random.default_rng(1), 3, 4, 3, 9, share=0.7, empty=0.1)
    options = {"q_begin": begin, "kv_lens": [130, 100, 60], "q_lens": [40, 33, 40], "block_shape": (16, 16), **rules}
    check(q, k, v, lists, **options)
    check(q, k, v, **options)
    check_gradients(q, k, v, lists, levels=ISA_LEVELS[-1:], **options)


def test_begin_of_each_packed_sequence():
    q, k, v = testing.make_qkv(1, 4, 2, 60, 150, 32, dtype="float32")
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    options = {"layout": "TND", "cu_seqlens_q": [0, 20, 20, 60], "cu_seqlens_kv": [0, 70, 90, 150], "causal": True, "window": (30, -1)}
    check(q, k, v, q_begin=[50, 3, -5], **options)
    check(q, k, v, q_begin=12, **options)


def test_the_last_tokens_are_the_default():
    q, k, v = testing.make_qkv(2, 2, 2, 40, 100, 32, dtype="float32")
    options = {"causal": True, "q_lens": [40, 11], "kv_lens": [100, 60]}
    usual = attend(q, k, v, **options)
    assert all(map(same_bits, usual, attend(q, k, v, q_begin=[60, 49], **options)))
    assert all(map(same_bits, usual, attend(q, k, v, q_begin=[60, 49], q_total=[40, 11], **options)))


def test_few_queries_of_many_take_the_path_of_many():
    """One query of 300: without q_total it takes the kernel for few queries, whose sums have another order."""
    q, k, v = testing.make_qkv(1, 4, 1, 300, 500, 64, dtype="float32", seed=3)
    whole = attend(q, k, v, causal=True)[0]
    one = {n: attend(q[:, :, 77:78], k, v, causal=True, q_begin=277, **n_total)[0] for n, n_total in ((1, {}), (300, {"q_total": 300}))}
    assert same_bits(one[300], np.ascontiguousarray(whole[:, :, 77:78]))
    np.testing.assert_allclose(one[1], whole[:, :, 77:78], rtol=1e-5, atol=1e-6)


def test_reference_begins():
    q, k, v = testing.make_qkv(1, 2, 2, 64, 64, 16, dtype="float64")
    whole = reference.block_sparse_attention(q, k, v, causal=True, window=(9, -1))
    part = reference.block_sparse_attention(q[:, :, 20:31], k, v, causal=True, window=(9, -1), q_begin=20)
    np.testing.assert_allclose(part, whole[:, :, 20:31], rtol=1e-14)


BAD = [
    ({"q_begin": [1, 2, 3]}, ValueError, "q_begin: expected 2 entries, one per batch entry, got 3"),
    ({"q_begin": 2**31}, ValueError, "q_begin: expected token numbers from -1073741823 to 1073741823, got 2147483648 at \\[0\\]"),
    ({"q_begin": [0, -(2**40)]}, ValueError, "q_begin: expected token numbers .* at \\[1\\]"),
    ({"q_begin": 1.5}, TypeError, "q_begin: expected an integer or a sequence of integers, got float"),
    ({"q_begin": "1"}, TypeError, "q_begin: expected an integer or a sequence of integers, got str"),
    ({"q_total": 39}, ValueError, "q_total: expected at least the 40 queries of the call and at most 1073741823, got 39 at \\[0\\]"),
    ({"q_total": [40, 2**40]}, ValueError, "q_total: expected at least .* at \\[1\\]"),
    ({"q_total": [40]}, ValueError, "q_total: expected 2 entries, one per batch entry, got 1"),
]


@pytest.mark.parametrize(("options", "kind", "sentence"), BAD, ids=lambda x: str(x)[:40])
def test_refused(options, kind, sentence):
    q, k, v = testing.make_qkv(2, 2, 2, 40, 100, 32, dtype="float32")
    with pytest.raises(kind, match=sentence):
        blitz_attn.block_sparse_attention(q, k, v, **options)
    out, lse = blitz_attn.block_sparse_attention(q, k, v, return_lse=True)
    with pytest.raises(kind, match=sentence):
        blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, **options)
