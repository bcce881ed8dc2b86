"""`NsaCache` gives the results of `nsa` over all tokens so far, bit for bit, also for sequences of different lengths with padded queries.
Cropped and reordered caches, memory and bad input are tested, too.

Random orders of append, crop, reorder and attend are drawn in tests/fuzz/nsa_cache_problems.py.
"""

import inspect
import re

import numpy as np
import pytest

from blitz_attn import nsa
from cases import DTYPES, bits_option, same_bits
from cases_nsa import MSLK, PAPER, PAPER_STRIDES, WEIGHTS, problem

BY_TOKEN = {**PAPER, "mode": "mslk", "q_tile_size": 1}
PROMPTS = np.array([50, 0, 20, 20, 37])


def nan_like(x):
    return np.full_like(x, 0x7FC0 if x.dtype == np.uint16 else np.nan)


def padded(x, counts):
    """A copy of x, in which the tokens of entry b from counts[b] on are NaN."""
    valid = np.arange(x.shape[1]) < np.asarray(counts)[:, None]
    return np.where(valid[..., None, None], x, nan_like(x))


def place(cache):
    """The address of the first keys."""
    return cache._store.held(0)[1][0].__array_interface__["data"][0]


@pytest.mark.parametrize("rules", [PAPER, PAPER_STRIDES, BY_TOKEN], ids=["paper", "strides", "mslk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_different_lengths(rules, dtype):
    """Tokens come in chunks and one by one, by turns. In a chunk, each sequence has a number of new tokens of its own, which may be 0."""
    q, k, v, options = problem(150, 4, 2, 16, 24, batch=4, dtype=dtype, weights=WEIGHTS[:3])
    options |= rules | bits_option(q)
    cache, lens, rng = nsa.NsaCache(**options), np.zeros(4, np.int64), np.random.default_rng(0)
    for step in range(24):
        most = (40, 1, 3, 8, 1, 1)[step % 6]
        counts = np.minimum(rng.integers(0, most, 4, endpoint=True) if most > 1 else 1, 150 - lens)
        new = [padded(np.stack([np.resize(x[b, n:], (most, *x.shape[2:])) for b, n in enumerate(lens)]), counts) for x in (q, k, v)]
        cache.append(*new[1:], counts)
        lens += counts
        assert cache.lens.tolist() == lens.tolist()
        out = cache.attend(new[0], lens=counts.tolist())
        for b, (n, count) in enumerate(zip(lens, counts, strict=True)):
            one = slice(b, b + 1)
            assert same_bits(out[one, :count], nsa.nsa(new[0][one, :count], k[one, :n], v[one, :n], **options))
            assert not out[b, count:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [WEIGHTS[:3], WEIGHTS[3:]], ids=["weights", "gates"])
@pytest.mark.parametrize(
    "rules",
    [PAPER, PAPER_STRIDES, {**PAPER, "causal": False}, MSLK, {**MSLK, "causal": False}, {**MSLK, "num_cmp_selected_blocks": 1}],
    ids=["paper", "strides", "paper not causal", "mslk", "mslk not causal", "mslk groups"],
)
def test_prompts_of_different_lengths_in_one_call(rules, weights, dtype):
    """Each sequence has the bits that it has alone, and results of padding are 0, whatever its queries and gates are."""
    q, k, v, options = problem(50, 4, 2, 16, 24, batch=5, dtype=dtype, weights=weights)
    gates = options.pop("gates", None)
    options |= rules | bits_option(q)
    cache = nsa.NsaCache(**options)
    cache.append(padded(k, PROMPTS), padded(v, PROMPTS), PROMPTS)
    out = nan_like(np.empty((5, 50, 4, 24), q.dtype))
    given = None if gates is None else padded(gates, PROMPTS)
    assert cache.attend(padded(q, PROMPTS), lens=PROMPTS, gates=given, out=out) is out
    for b, n in enumerate(PROMPTS):
        own = {} if gates is None else {"gates": gates[b : b + 1, :n]}
        assert same_bits(out[b : b + 1, :n], nsa.nsa(*(x[b : b + 1, :n] for x in (q, k, v)), **options, **own))
        assert not out[b, n:].any()


def test_padded_queries_in_pieces(monkeypatch):
    """Sequences are cut between heads and between queries, in arrays whose memory has another order of axes."""
    monkeypatch.setattr(nsa, "PIECE_ELEMENTS", 24 * 30)
    q, k, v, options = problem(50, 4, 2, 16, 24, batch=5, weights=WEIGHTS[:3])
    cache = nsa.NsaCache(**PAPER, **options)
    cache.append(k, v, PROMPTS)
    by_head = np.ascontiguousarray(padded(q, PROMPTS).swapaxes(1, 2)).swapaxes(1, 2)
    out = cache.attend(by_head, lens=PROMPTS)
    for b, n in enumerate(PROMPTS):
        assert same_bits(out[b : b + 1, :n], nsa.nsa(*(x[b : b + 1, :n] for x in (q, k, v)), **PAPER, **options))


def test_the_cache_takes_what_nsa_takes():
    torch = pytest.importorskip("torch")
    q, k, v, _ = problem(40, 4, 2, 16)
    cache, tensors = nsa.NsaCache(**PAPER), [torch.from_numpy(x).bfloat16() for x in (q, k, v)]
    cache.append(*tensors[1:])
    out = cache.attend(tensors[0], lens=torch.tensor([40, 8]))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[0], nsa.nsa(*tensors, **PAPER)[0])
    assert not out[1, 8:].any()


def test_the_defaults_are_those_of_nsa(monkeypatch):
    own, usual = (inspect.signature(function).parameters for function in (nsa.NsaCache, nsa.nsa))
    named = [name for name in own if name != "options"]
    assert {name: own[name].default for name in named} == {name: usual[name].default for name in named}
    monkeypatch.setitem(nsa.USUAL, "num_selected_blocks", 2)  # fewer than the default init_blocks + local_blocks
    with pytest.raises(ValueError, match=r"^num_selected_blocks: expected at least init_blocks \+ local_blocks = 3, got 2$"):
        nsa.NsaCache()
    q, k, v, _ = problem(90, 2, 1, 8)
    options = {"compress_block_size": 4, "compress_stride": 2, "init_blocks": 0}
    cache = nsa.NsaCache(**options)
    cache.append(k, v)
    assert same_bits(cache.attend(q), nsa.nsa(q, k, v, **options, num_selected_blocks=2))


def test_what_a_cache_shows():
    _, k, v, _ = problem(20, 2, 1, 8, batch=9)
    cache = nsa.NsaCache(compress_block_size=8, window_size=21)
    sizes = "mode='paper', compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=16, window_size=21)"
    assert repr(cache) == f"NsaCache(batch=0, lens=[], {sizes}"
    cache.append(k, v, range(9))
    assert repr(cache) == f"NsaCache(batch=9, lens=[0, 1, 2, 3, 4, 5, 6, 7, ...], {sizes}"
    cache.reorder([3, 8])
    assert repr(cache) == f"NsaCache(batch=2, lens=[3, 8], {sizes}"


# ---- Memory, cropping and reordering --------------------------------------------------------------------------------------


def test_the_cache_copies_only_what_it_must():
    """The cache doubles its room when it is full, and a reorder that leaves all sequences in place copies nothing."""
    _, k, v, _ = problem(300, 2, 1, 8, batch=3)
    cache, places = nsa.NsaCache(**PAPER), []
    for n in range(300):
        cache.append(k[:, n : n + 1], v[:, n : n + 1])
        places.append(place(cache))
    assert 1 + np.count_nonzero(np.diff(places)) <= 4  # room for 64, 128, 256 and 512 tokens
    np.testing.assert_array_equal(cache._store.held(0)[1][0], k)
    cache.reorder([0, 1, 2])
    assert place(cache) == places[-1]
    cache.reorder([0, 0, 2])
    np.testing.assert_array_equal(cache._store.held(0)[1][0], k[[0, 0, 2]])


def test_a_number_crops_only_longer_sequences():
    """A single number crops only longer sequences. Writing into `lens` or the given lengths does not change the cache."""
    _, k, v, _ = problem(20, 2, 1, 8, batch=3)
    cache, kept = nsa.NsaCache(**PAPER), np.array([20, 3, 11])
    cache.append(k, v, kept)
    kept[:], cache.lens[:] = 7, 7
    for most, lens in ((100, [20, 3, 11]), (np.int32(11), [11, 3, 11]), (10, [10, 3, 10]), (0, [0, 0, 0])):
        cache.crop(most)
        assert cache.lens.tolist() == lens


# ---- Bad input: cases that need tokens in the cache; other cases are in tests/fuzz/refusals.py -------------------------------

Q, K, V, _ = problem(40, 4, 2, 8, 6)


def bits(x):
    return np.zeros(x.shape, np.uint16)


@pytest.mark.parametrize(
    ("sentence", "call"),
    [
        ("k: expected dtype float32 like the tokens before, got float64", lambda c: c.append(K.astype(float), V.astype(float))),
        ("k: expected shape (2, N, 2, 8) like the tokens before, got (1, 40, 2, 8)", lambda c: c.append(K[:1], V[:1])),
        ("v: expected shape (2, N, 2, 6) like the tokens before, got (2, 40, 2, 5)", lambda c: c.append(K, V[..., :5])),
        ("q: expected at most the 20 tokens of sequence 0, got 40 (lens= gives the tokens of each sequence)", lambda c: c.attend(Q)),
        ("lens: expected numbers from 0 to the tokens that each sequence has, got 13", lambda c: c.attend(Q[:, :20], lens=[20, 13])),
        ("q: expected a number of heads that is a positive multiple of the 2 heads of the tokens, got 3", lambda c: c.attend(Q[:, :1, :3])),
        ("q: expected a number of heads that is a positive multiple of the 2 heads of the tokens, got 3", lambda c: c.attend(Q[:, :1, :3], lens=[1, 1])),
        ("q: expected dtype float32 like the tokens, got float16", lambda c: c.attend(Q[:, :1].astype(np.float16), lens=[1, 1])),
    ],
)  # fmt: skip
def test_the_cache_refuses(sentence, call):
    cache = nsa.NsaCache(compress_block_size=8)
    cache.append(K, V, [20, 12])
    before = cache.attend(Q[:, -1:])
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        call(cache)
    assert cache.lens.tolist() == [20, 12]
    assert same_bits(cache.attend(Q[:, -1:]), before)


@pytest.mark.parametrize(
    ("sentence", "call"),
    [
        ("q: expected tokens appended before the first queries, got none", lambda: nsa.NsaCache().attend(Q)),
        ("indices: expected no numbers for a cache without sequences, got 0", lambda: nsa.NsaCache().reorder([0, 1])),
        ("NsaCache() got an unexpected keyword argument 'num_blocks'", lambda: nsa.NsaCache(num_blocks=3)),
    ],
)
def test_an_empty_cache_refuses(sentence, call):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        call()


def test_float32_queries_for_bits_of_bfloat16_are_refused():
    cache = nsa.NsaCache(compress_block_size=8, dtype="bfloat16")
    cache.append(bits(K), bits(V))
    with pytest.raises(TypeError, match="^q: expected dtype bfloat16 like the tokens, got float32$"):
        cache.attend(Q[:, -1:])


def test_queries_that_begin_within_a_tile_are_refused():
    cache = nsa.NsaCache(compress_block_size=8, mode="mslk", q_tile_size=16)
    cache.append(K, V, [24, 20])
    out = np.full((2, 20, 4, 6), np.nan, np.float32)
    text = 'q: expected in mode "mslk" queries from the beginning of a tile of q_tile_size = 16 tokens on, got token 15'
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        cache.attend(Q[:, :20], lens=[8, 5], out=out)
    assert np.isnan(out).all()
    cache.attend(Q[:, :20], lens=[8, 0], out=out)  # a sequence without queries does not count
    assert not np.isnan(out).any()


def test_a_cache_may_lose_all_of_its_tokens_and_sequences():
    cache = nsa.NsaCache(compress_block_size=8)
    cache.crop(3)
    cache.reorder([])
    cache.append(K, V)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"^q: expected at most the 0 tokens of sequence 0, got 1 \(lens= "):
        cache.attend(Q[:, -1:])
    cache.append(K, V)
    assert same_bits(cache.attend(Q), nsa.nsa(Q, K, V, compress_block_size=8))


@pytest.mark.parametrize("mode", ["paper", "mslk"])
@pytest.mark.parametrize("queries", [0, 1, 5, 9, 200])
def test_a_cache_without_sequences_takes_any_number_of_queries(queries, mode):
    cache, k = nsa.NsaCache(compress_block_size=2, mode=mode), np.ones((2, 5, 1, 8), np.float32)
    cache.append(k, k[..., :4], [5, 3])
    cache.reorder([])
    q, out = np.ones((0, queries, 2, 8), np.float32), np.empty((0, queries, 2, 4), np.float32)
    assert cache.attend(q, gates=np.ones((0, queries, 2, 3), np.float32)).shape == out.shape
    assert cache.attend(q, lens=[], out=out) is out
    cache.append(k[:0], k[:0, ..., :4])  # the cache stays usable without sequences
    assert cache.attend(q).shape == out.shape
    with pytest.raises(ValueError, match=r"^q: expected shape \(0, N, H, 8\) like the tokens, got \(1, 2, 2, 8\)$"):
        cache.attend(np.ones((1, 2, 2, 8), np.float32))
    with pytest.raises(ValueError, match="^q: expected at most 1073741823 tokens, got 1099511627776$"):
        cache.attend(np.ones((0, 1 << 40, 2, 8), np.float32))
