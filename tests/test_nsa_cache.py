"""`NsaCache`: results of `nsa` over all tokens so far, bit for bit; sequences of different lengths; memory; bad input."""

import re

import numpy as np
import pytest

from blitz_attn import nsa
from cases import DTYPES, bits_option, same_bits
from cases_nsa import PAPER, PAPER_STRIDES, WEIGHTS, problem


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
        places.append(cache._store.held[0].__array_interface__["data"][0])
    assert 1 + np.count_nonzero(np.diff(places)) <= 4  # 64, 128, 256, 512
    np.testing.assert_array_equal(cache._store.held[0], k)


def test_the_cache_takes_what_nsa_takes():
    torch = pytest.importorskip("torch")
    q, k, v, _ = problem(40, 4, 2, 16)
    cache = nsa.NsaCache(**PAPER)
    tensors = [torch.from_numpy(x).bfloat16() for x in (q, k, v)]
    cache.append(*tensors[1:])
    out = cache.attend(tensors[0][:, -1:])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, nsa.nsa(*tensors, **PAPER)[:, -1:])


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
