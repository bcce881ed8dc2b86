"""`NsaCache`: results of `nsa` over all tokens so far, bit for bit; sequences of different lengths, with padded queries; tokens that are taken back and sequences
that change places; memory; bad input."""

import inspect
import re

import numpy as np
import pytest

from blitz_attn import nsa, reference
from cases import DTYPES, bits_option, same_bits
from cases_nsa import MSLK, PAPER, PAPER_STRIDES, WEIGHTS, problem


@pytest.mark.parametrize("rules", [PAPER, PAPER_STRIDES], ids=["paper", "strides"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache(rules, dtype):
    """A prompt in chunks, then token after token: each result is that of the call over all tokens so far."""
    q, k, v, options = problem(150, 4, 2, 16, 24, dtype=dtype, weights=WEIGHTS[:3])
    cache = nsa.NsaCache(**rules, **options, **bits_option(q))
    assert cache.lens.size == 0
    begin = 0
    for step in (1, 2, 60, 3, 50, *[1] * 34):
        end = begin + step
        cache.append(k[:, begin:end], v[:, begin:end])
        out = cache.attend(q[:, begin:end])
        whole = nsa.nsa(q[:, begin:end], k[:, :end], v[:, :end], **rules, **options, **bits_option(q))
        assert same_bits(out, whole)
        assert cache.lens.tolist() == [end] * 2
        begin = end
    assert begin == 150


def test_cache_in_mslk_mode():
    q, k, v, options = problem(70, 4, 2, 16, weights=WEIGHTS[:3])
    rules = {**PAPER, "mode": "mslk", "q_tile_size": 1}
    cache = nsa.NsaCache(**rules, **options)
    for n in range(70):
        cache.append(k[:, n : n + 1], v[:, n : n + 1])
        assert same_bits(cache.attend(q[:, n : n + 1]), nsa.nsa(q[:, n : n + 1], k[:, : n + 1], v[:, : n + 1], **rules, **options))


def test_cache_of_sequences_of_different_lengths():
    """Prompts of different lengths, and a sequence that ends before the others."""
    q, k, v, options = problem(120, 4, 2, 16, 24, batch=3, weights=WEIGHTS[:3])
    cache, lens = nsa.NsaCache(**PAPER, **options), np.array([40, 7, 23])
    cache.append(k[:, :40], v[:, :40], lens)
    rng = np.random.default_rng(0)
    for step in range(60):
        counts = np.array([1, 1, step < 30])
        new = [np.stack([x[b, n : n + 1] for b, n in enumerate(lens)]) for x in (q, k, v)]
        cache.append(*new[1:], counts)
        lens = lens + counts
        assert cache.lens.tolist() == lens.tolist()
        if rng.integers(3):
            continue
        now = np.stack([q[b, n - 1 : n] for b, n in enumerate(lens)])
        out = cache.attend(now)
        for b, n in enumerate(lens):
            one = slice(b, b + 1)
            assert same_bits(out[one], nsa.nsa(now[one], k[one, :n], v[one, :n], **PAPER, **options))


def test_the_cache_copies_only_when_it_is_full():
    _, k, v, _ = problem(300, 2, 1, 8, batch=1)
    cache, places = nsa.NsaCache(**PAPER), []
    for n in range(300):
        cache.append(k[:, n : n + 1], v[:, n : n + 1])
        places.append(cache._store.held(0)[1][0].__array_interface__["data"][0])
    assert 1 + np.count_nonzero(np.diff(places)) <= 4  # 64, 128, 256, 512
    np.testing.assert_array_equal(cache._store.held(0)[1][0], k)


def test_the_cache_takes_what_nsa_takes():
    torch = pytest.importorskip("torch")
    q, k, v, _ = problem(40, 4, 2, 16)
    cache = nsa.NsaCache(**PAPER)
    tensors = [torch.from_numpy(x).bfloat16() for x in (q, k, v)]
    cache.append(*tensors[1:])
    out = cache.attend(tensors[0][:, -1:])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, nsa.nsa(*tensors, **PAPER)[:, -1:])
    out = cache.attend(tensors[0], lens=torch.tensor([40, 8]))
    assert torch.equal(out[0], nsa.nsa(*tensors, **PAPER)[0])
    assert not out[1, 8:].any()


def test_the_defaults_are_those_of_nsa(monkeypatch):
    own, usual = (inspect.signature(function).parameters for function in (nsa.NsaCache, nsa.nsa))
    named = [name for name in own if name != "options"]
    assert {name: own[name].default for name in named} == {name: usual[name].default for name in named}
    monkeypatch.setitem(nsa.USUAL, "num_selected_blocks", 2)  # fewer than init_blocks + local_blocks are by default
    with pytest.raises(ValueError, match=r"^num_selected_blocks: expected at least init_blocks \+ local_blocks = 3, got 2$"):
        nsa.NsaCache()
    q, k, v, _ = problem(90, 2, 1, 8)
    cache = nsa.NsaCache(compress_block_size=4, compress_stride=2, init_blocks=0)
    cache.append(k, v)
    assert same_bits(cache.attend(q), nsa.nsa(q, k, v, compress_block_size=4, compress_stride=2, init_blocks=0, num_selected_blocks=2))


def test_what_a_cache_shows():
    _, k, v, _ = problem(20, 2, 1, 8, batch=9)
    cache = nsa.NsaCache(compress_block_size=8, window_size=21)
    sizes = "mode='paper', compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=16, window_size=21)"
    assert repr(cache) == f"NsaCache(batch=0, lens=[], {sizes}"
    cache.append(k, v, range(9))
    assert repr(cache) == f"NsaCache(batch=9, lens=[0, 1, 2, 3, 4, 5, 6, 7, ...], {sizes}"
    cache.reorder([3, 8])
    assert repr(cache) == f"NsaCache(batch=2, lens=[3, 8], {sizes}"


# ---- Padded queries -------------------------------------------------------------------------------------------------------

PROMPTS = np.array([50, 0, 20, 20, 37])


def nan_like(x):
    return np.full_like(x, 0x7FC0 if x.dtype == np.uint16 else np.nan)


def padded(x, counts):
    """A copy whose tokens of entry b from counts[b] on are NaN."""
    valid = np.arange(x.shape[1]) < np.asarray(counts)[:, None]
    return np.where(valid[..., None, None], x, nan_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [WEIGHTS[:3], WEIGHTS[3:]], ids=["weights", "gates"])
@pytest.mark.parametrize(
    "rules",
    [PAPER, PAPER_STRIDES, {**PAPER, "causal": False}, MSLK, {**MSLK, "causal": False}, {**MSLK, "num_cmp_selected_blocks": 1}],
    ids=["paper", "strides", "paper not causal", "mslk", "mslk not causal", "mslk groups"],
)
def test_prompts_of_different_lengths_in_one_call(rules, weights, dtype):
    """Each sequence has the bits that it has alone, padding is 0 whatever its queries and gates are, and the reference agrees."""
    q, k, v, options = problem(50, 4, 2, 16, 24, batch=5, dtype=dtype, weights=weights)
    gates = options.pop("gates", None)
    cache = nsa.NsaCache(**rules, **options, **bits_option(q))
    cache.append(padded(k, PROMPTS), padded(v, PROMPTS), PROMPTS)
    out = nan_like(np.empty((5, 50, 4, 24), q.dtype))
    given = None if gates is None else padded(gates, PROMPTS)
    assert cache.attend(padded(q, PROMPTS), lens=PROMPTS, gates=given, out=out) is out
    for b, n in enumerate(PROMPTS):
        alone = [x[b : b + 1, :n] for x in (q, k, v)]
        own = options if gates is None else {"gates": gates[b : b + 1, :n]}
        one, context = nsa.nsa(*alone, **rules, **own, **bits_option(q), return_context=True)
        assert same_bits(out[b : b + 1, :n], one)
        assert not out[b, n:].any()
        if dtype == "float64":
            exact = reference.nsa(*alone, **rules, **own, block_indices=context.block_indices)
            np.testing.assert_allclose(one, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rules", [PAPER, PAPER_STRIDES, {**PAPER, "mode": "mslk", "q_tile_size": 1}], ids=["paper", "strides", "mslk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_different_lengths(rules, dtype):
    """Each step brings every sequence another number of tokens, down to none."""
    q, k, v, options = problem(120, 4, 2, 16, 24, batch=4, dtype=dtype, weights=WEIGHTS[:3])
    cache, lens, rng = nsa.NsaCache(**rules, **options, **bits_option(q)), np.zeros(4, np.int64), np.random.default_rng(0)
    for step in range(12):
        most = (40, 1, 3, 8)[step % 4]
        counts = np.minimum(rng.integers(0, most, 4, endpoint=True), 120 - lens)
        new = [padded(np.stack([np.resize(x[b, n:], (most, *x.shape[2:])) for b, n in enumerate(lens)]), counts) for x in (q, k, v)]
        cache.append(*new[1:], counts)
        lens += counts
        out = cache.attend(new[0], lens=counts.tolist())
        for b, (n, count) in enumerate(zip(lens, counts, strict=True)):
            one = slice(b, b + 1)
            alone = nsa.nsa(new[0][one, :count], k[one, :n], v[one, :n], **rules, **options, **bits_option(q))
            assert same_bits(out[one, :count], alone)
            assert not out[b, count:].any()


@pytest.mark.parametrize("rules", [PAPER, MSLK], ids=["paper", "mslk"])
def test_equal_lengths_are_the_call_without_lengths(rules):
    q, k, v, options = problem(64, 4, 2, 16, 24, batch=3, weights=WEIGHTS[:3])
    cache = nsa.NsaCache(**rules, **options)
    cache.append(k, v)
    assert same_bits(cache.attend(q, lens=[64] * 3), cache.attend(q))
    assert same_bits(cache.attend(q, lens=[32] * 3)[:, :32], cache.attend(q[:, :32]))
    assert not cache.attend(q, lens=[32] * 3)[:, 32:].any()
    assert not cache.attend(q, lens=[0] * 3).any()


def test_padded_queries_in_pieces(monkeypatch):
    """Sequences that are cut between heads and between queries, in arrays whose axes are in another order."""
    monkeypatch.setattr(nsa, "PIECE_ELEMENTS", 24 * 30)
    q, k, v, options = problem(50, 4, 2, 16, 24, batch=5, weights=WEIGHTS[:3])
    cache = nsa.NsaCache(**PAPER, **options)
    cache.append(k, v, PROMPTS)
    by_head = np.ascontiguousarray(padded(q, PROMPTS).swapaxes(1, 2)).swapaxes(1, 2)
    out = cache.attend(by_head, lens=PROMPTS)
    for b, n in enumerate(PROMPTS):
        assert same_bits(out[b : b + 1, :n], nsa.nsa(*(x[b : b + 1, :n] for x in (q, k, v)), **PAPER, **options))


# ---- Taking back and reordering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rejected_tokens_leave_no_trace(dtype):
    """Draft tokens come and go, some of them NaN, at every place among the blocks: the others' results and blocks are as without them."""
    q, k, v, options = problem(90, 4, 2, 16, 24, dtype=dtype, weights=WEIGHTS[:3])
    drafted, plain = (nsa.NsaCache(**PAPER_STRIDES, **options, **bits_option(q)) for _ in range(2))
    wrong = [np.full_like(x[:, :9], 0x7FC0 if x.dtype == np.uint16 else np.nan) for x in (k, v)]
    for begin in range(0, 90, 2):
        new = slice(begin, begin + 2)
        drafted.append(k[:, new], v[:, new])
        if begin % 3 == 0:
            drafted.append(*wrong)
        else:
            drafted.append(*(np.flip(x[:, begin : begin + 5], axis=1) for x in (k, v)))
        drafted.crop(begin + 2 if begin % 4 else [begin + 2] * 2)
        plain.append(k[:, new], v[:, new])
        assert drafted.lens.tolist() == [begin + 2] * 2
        assert all(same_bits(*pair) for pair in zip(drafted._store.held(0)[1], plain._store.held(0)[1], strict=True))
        assert same_bits(drafted.attend(q[:, new]), plain.attend(q[:, new]))


def test_a_number_crops_only_longer_sequences():
    _, k, v, _ = problem(20, 2, 1, 8, batch=3)
    cache = nsa.NsaCache(**PAPER)
    cache.append(k, v, [20, 3, 11])
    for kept, lens in ((100, [20, 3, 11]), (np.int32(11), [11, 3, 11]), (10, [10, 3, 10]), (0, [0, 0, 0])):
        cache.crop(kept)
        assert cache.lens.tolist() == lens


def test_a_view_of_lens_is_no_way_into_the_cache():
    _, k, v, _ = problem(20, 2, 1, 8)
    cache, kept = nsa.NsaCache(**PAPER), np.array([7, 9])
    cache.append(k, v)
    cache.crop(kept)
    kept[:] = 20
    cache.lens[:] = 20
    assert cache.lens.tolist() == [7, 9]


@pytest.mark.parametrize("seed", range(40))
def test_any_operations_in_any_order(seed):
    """Tokens come, are taken back, and sequences change places; each sequence is then as in a cache that got its tokens at once."""
    rng = np.random.default_rng(seed)
    rules = (PAPER, PAPER_STRIDES, {**PAPER, "mode": "mslk", "q_tile_size": 1})[seed % 3]
    _, _, _, options = problem(1, 4, 2, 8, 12, seed=seed, weights=WEIGHTS[:3])
    cache, tokens = nsa.NsaCache(**rules, **options), [np.empty((0, 2, 20), np.float32)] * 2  # k beside v, by sequence
    cache.append(*(np.empty((2, 0, 2, dim), np.float32) for dim in (8, 12)))
    seen = set()
    for _ in range(60):
        batch, lens = len(tokens), np.array([len(x) for x in tokens], np.int64)
        step = rng.choice(["append", "append with lens", "crop", "crop to a number", "reorder", "more or fewer"], p=[0.35, 0.2, 0.15, 0.1, 0.15, 0.05])
        if step.startswith("append"):
            new = rng.standard_normal((batch, int(rng.choice([1, 2, 7, 40], p=[0.5, 0.3, 0.15, 0.05])), 2, 20), np.float32)
            counts = rng.integers(0, new.shape[1], batch, endpoint=True) if "lens" in step else np.full(batch, new.shape[1])
            cache.append(new[..., :8], new[..., 8:], counts if "lens" in step else None)
            tokens = [np.concatenate([x, more[:n]]) for x, more, n in zip(tokens, new, counts, strict=True)]
        elif step == "crop":
            kept = np.maximum(lens - rng.integers(0, rng.choice([3, 9, 100]), batch, endpoint=True), 0)
            cache.crop(kept)
            tokens = [x[:n] for x, n in zip(tokens, kept, strict=True)]
        elif step == "crop to a number":
            kept = max(0, int(lens.max(initial=0)) - int(rng.integers(0, 12)))
            cache.crop(kept)
            tokens = [x[:kept] for x in tokens]
        else:
            size = batch if step == "reorder" else int(rng.integers(1, 5))
            chosen = rng.integers(0, batch, size)
            cache.reorder(chosen if rng.integers(2) else chosen.tolist())
            tokens = [tokens[n] for n in chosen]
        seen.add(step)
        lens = [len(x) for x in tokens]
        assert cache.lens.tolist() == lens
        if min(lens) == 0 or rng.integers(2):
            continue
        q = rng.standard_normal((len(tokens), min(int(rng.integers(1, 4)), *lens), 4, 8), np.float32)
        out = cache.attend(q)
        for b, x in enumerate(tokens):
            fresh = nsa.NsaCache(**rules, **options)
            fresh.append(x[None, ..., :8], x[None, ..., 8:])
            assert same_bits(out[b : b + 1], fresh.attend(q[b : b + 1]))
    assert len(seen) >= 5


def test_beams_of_prompts():
    """Each prompt becomes three beams, which go different ways; the best ones go on."""
    q, k, v, options = problem(50, 4, 2, 16, batch=6, weights=WEIGHTS[:3])
    cache = nsa.NsaCache(**PAPER, **options)
    cache.append(k[:2, :30], v[:2, :30])
    beams = np.repeat(np.arange(2), 3)
    cache.reorder(beams)
    history = [[beam] * 30 for beam in beams]  # of each beam and token: the entry of k and v that it is from
    rng = np.random.default_rng(0)
    for n in range(30, 50):
        cache.append(k[:, n : n + 1], v[:, n : n + 1])
        history = [[*past, b] for b, past in enumerate(history)]
        best = 3 * (np.arange(6) // 3) + rng.integers(0, 3, 6)
        cache.reorder(best)
        history = [history[b] for b in best]
        paths = np.array(history), np.arange(n + 1)
        assert same_bits(cache.attend(q[:, n : n + 1]), nsa.nsa(q[:, n : n + 1], k[paths], v[paths], **PAPER, **options))


def test_sequences_that_all_stay_are_not_copied():
    _, k, v, _ = problem(30, 2, 1, 8, batch=3)
    cache = nsa.NsaCache(**PAPER)
    cache.append(k, v)
    place = cache._store.held(0)[1][0].__array_interface__["data"][0]
    cache.reorder([0, 1, 2])
    assert cache._store.held(0)[1][0].__array_interface__["data"][0] == place
    cache.reorder([0, 0, 2])
    np.testing.assert_array_equal(cache._store.held(0)[1][0], k[[0, 0, 2]])


# ---- Bad input ------------------------------------------------------------------------------------------------------------

Q, K, V, _ = problem(40, 4, 2, 8, 6)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "NsaCache() got an unexpected keyword argument 'num_blocks'", lambda: nsa.NsaCache(num_blocks=3)),
        (ValueError, "window_size: expected a positive number, got -3", lambda: nsa.NsaCache(window_size=-3)),
        (TypeError, "scale: expected a number, got str", lambda: nsa.NsaCache(scale="x")),
        (ValueError, 'num_cmp_selected_blocks: expected None in mode "paper", got 2', lambda: nsa.NsaCache(num_cmp_selected_blocks=2)),
        (TypeError, "gate_proj_weight: expected an array, got int", lambda: nsa.NsaCache(gate_proj_weight=3)),
        (ValueError, "gate_proj_weight: expected shape (H, 3, D), got (4, 8)", lambda: nsa.NsaCache(gate_proj_weight=np.ones((4, 8)))),
        (ValueError, "compress_block_size: expected a positive number, got 0", lambda: nsa.NsaCache(compress_block_size=0)),
        (ValueError, "q: expected tokens appended before the first queries, got none", lambda: nsa.NsaCache().attend(Q)),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(error, text, call):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


@pytest.mark.parametrize(
    ("error", "text", "given"),
    [
        (TypeError, "k: expected dtype float32 like the tokens before, got float64", (K.astype(np.float64), V.astype(np.float64))),
        (ValueError, "k: expected shape (2, N, 2, 8) like the tokens before, got (1, 40, 2, 8)", (K[:1], V[:1])),
        (ValueError, "v: expected shape (2, N, 2, 6) like the tokens before, got (2, 40, 2, 5)", (K, V[..., :5])),
        (ValueError, "v: expected the tokens and heads of k (2, 40, 2, 8), got (2, 39, 2, 6)", (K, V[:, 1:])),
        (ValueError, "k: expected shape (B, N, H, D), got (40, 2, 8)", (K[0], V[0])),
        (ValueError, "v: expected at least one head and a head dim from 1 to 576, got (2, 40, 2, 0)", (K, V[..., :0])),
        (ValueError, "k: expected at least one head and a head dim from 1 to 576, got (2, 40, 0, 8)", (K[:, :, :0], V[:, :, :0])),
        (ValueError, "lens: expected one number per sequence, (2,), got (1,)", (K, V, [1])),
        (ValueError, "lens: expected numbers from 0 to the 40 tokens of k, got 41", (K, V, [1, 41])),
    ],
)  # fmt: skip
def test_the_cache_refuses(error, text, given):
    cache = nsa.NsaCache(compress_block_size=8)
    cache.append(K, V)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        cache.append(*given)
    assert cache.lens.tolist() == [40, 40]
    assert np.isfinite(cache.attend(Q[:, -1:])).all()


@pytest.mark.parametrize(
    ("error", "text", "given"),
    [
        (ValueError, "q: expected at most the 12 tokens of sequence 1, got 20 (lens= gives the tokens of each sequence)", {}),
        (ValueError, "lens: expected numbers from 0 to the tokens that each sequence has, got 13", {"lens": [20, 13]}),
        (ValueError, "lens: expected numbers from 0 to the 20 tokens of q, got 21", {"lens": [21, 0]}),
        (ValueError, "lens: expected numbers from 0 to the 20 tokens of q, got -1", {"lens": [20, -1]}),
        (ValueError, "lens: expected one number per sequence, (2,), got (1,)", {"lens": [3]}),
        (ValueError, "lens: expected one number per sequence, (2,), got ()", {"lens": 3}),
        (TypeError, "lens: expected integers, got float64", {"lens": [2.0, 3.0]}),
        (ValueError, "gates: expected shape (2, 20, 4, 3), (..., H, 3), got (2, 12, 4, 3)", {"lens": [9, 9], "gates": np.ones((2, 12, 4, 3))}),
    ],
)  # fmt: skip
def test_attend_refuses(error, text, given):
    cache = nsa.NsaCache(compress_block_size=8)
    cache.append(K, V, [20, 12])
    out = np.full((2, 20, 4, 6), np.nan, np.float32)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        cache.attend(Q[:, :20], out=out, **given)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("error", "text", "q"),
    [
        (ValueError, "q: expected shape (2, N, H, 8) like the tokens, got (2, 1, 4, 9)", np.ones((2, 1, 4, 9), np.float32)),
        (ValueError, "q: expected shape (2, N, H, 8) like the tokens, got (3, 1, 4, 8)", np.ones((3, 1, 4, 8), np.float32)),
        (ValueError, "q: expected shape (2, N, H, 8) like the tokens, got (1, 4, 8)", np.ones((1, 4, 8), np.float32)),
        (ValueError, "q: expected a multiple of 2 heads, which the tokens have, got 3", np.ones((2, 1, 3, 8), np.float32)),
        (ValueError, "q: expected a multiple of 2 heads, which the tokens have, got 0", np.ones((2, 1, 0, 8), np.float32)),
        (TypeError, "q: expected dtype float32 like the tokens, got float64", Q[:, :1].astype(np.float64)),
        (TypeError, "q: expected dtype float32 like the tokens, got float16", Q[:, :1].astype(np.float16)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lens", [None, [1, 1]])
def test_queries_that_do_not_fit_the_tokens_are_refused_by_their_name(error, text, q, lens):
    cache = nsa.NsaCache(compress_block_size=8)
    cache.append(K, V)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        cache.attend(q, lens=lens)


def test_queries_beside_bits_of_bfloat16():
    cache = nsa.NsaCache(compress_block_size=8, dtype="bfloat16")
    cache.append(*(np.zeros(x.shape, np.uint16) for x in (K, V)))
    with pytest.raises(TypeError, match="^q: expected dtype bfloat16 like the tokens, got float32$"):
        cache.attend(Q[:, -1:])


def test_a_tile_that_a_sequence_is_within_is_refused():
    cache = nsa.NsaCache(compress_block_size=8, mode="mslk", q_tile_size=16)
    cache.append(K, V, [24, 20])
    out = np.full((2, 20, 4, 6), np.nan, np.float32)
    text = 'q: expected in mode "mslk" queries from the beginning of a tile of q_tile_size = 16 tokens on, got token 15'
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        cache.attend(Q[:, :20], lens=[8, 5], out=out)
    assert np.isnan(out).all()
    cache.attend(Q[:, :20], lens=[8, 0], out=out)  # a sequence without queries is within no tile
    assert not np.isnan(out).any()


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "lens: expected at least 0 tokens, got -3", lambda cache: cache.crop(-3)),
        (TypeError, "lens: expected integers, got bool", lambda cache: cache.crop(True)),
        (TypeError, "lens: expected integers, got float64", lambda cache: cache.crop(2.5)),
        (TypeError, "lens: expected integers, got NoneType", lambda cache: cache.crop(None)),
        (ValueError, "lens: expected one number per sequence, (2,), got (1,)", lambda cache: cache.crop([3])),
        (ValueError, "lens: expected numbers from 0 to the tokens that each sequence has, got 13", lambda cache: cache.crop([20, 13])),
        (ValueError, "lens: expected numbers from 0 to the tokens that each sequence has, got -1", lambda cache: cache.crop([-1, 12])),
        (ValueError, "indices: expected numbers from 0 to 1, got 2", lambda cache: cache.reorder([0, 2])),
        (ValueError, "indices: expected numbers from 0 to 1, got -1", lambda cache: cache.reorder([-1, 0])),
        (ValueError, "indices: expected one number per sequence, got shape (1, 2)", lambda cache: cache.reorder([[0, 1]])),
        (ValueError, "indices: expected one number per sequence, got shape ()", lambda cache: cache.reorder(1)),
        (TypeError, "indices: expected integers, got bool", lambda cache: cache.reorder([True, False])),
        (
            ValueError, "indices: expected no numbers for a cache without sequences, got 0",
            lambda cache: nsa.NsaCache(compress_block_size=8).reorder([0, 1]),
        ),
    ],
)  # fmt: skip
def test_crop_and_reorder_refuse(error, text, call):
    cache = nsa.NsaCache(compress_block_size=8)
    cache.append(K, V, [20, 12])
    before = cache.attend(Q[:, -1:])
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call(cache)
    assert cache.lens.tolist() == [20, 12]
    assert same_bits(cache.attend(Q[:, -1:]), before)


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
    cache.reorder([])
    cache.append(K[:0], V[:0])
    assert cache.lens.tolist() == []


@pytest.mark.parametrize("mode", ["paper", "mslk"])
@pytest.mark.parametrize("queries", [0, 1, 5, 9, 200])
def test_no_sequence_of_an_empty_cache_is_too_short(queries, mode):
    cache, k = nsa.NsaCache(compress_block_size=2, mode=mode), np.ones((2, 5, 1, 8), np.float32)
    cache.append(k, k[..., :4], [5, 3])
    cache.reorder([])
    q = np.ones((0, queries, 2, 8), np.float32)
    assert cache.attend(q, gates=np.ones((0, queries, 2, 3), np.float32)).shape == (0, queries, 2, 4)
    out = np.empty((0, queries, 2, 4), np.float32)
    assert cache.attend(q, out=out) is out
    assert cache.attend(q, lens=[], out=out) is out
    cache.append(k[:0], k[:0, ..., :4])  # the cache goes on, without sequences
    assert cache.attend(q).shape == (0, queries, 2, 4)
    assert cache.lens.tolist() == []
    with pytest.raises(ValueError, match=r"^q: expected shape \(0, N, H, 8\) like the tokens, got \(1, 2, 2, 8\)$"):
        cache.attend(np.ones((1, 2, 2, 8), np.float32))
    with pytest.raises(ValueError, match="^q: expected at most 1073741824 tokens, got 1099511627776$"):
        cache.attend(np.ones((0, 1 << 40, 2, 8), np.float32))
