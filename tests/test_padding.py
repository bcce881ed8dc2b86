"""Queries behind their entry's length: output 0 and log-sum-exp -inf, and nothing of them reaches the valid rows."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import testing
from cases import DTYPES, bits_option, same_bits

HEADS = [(2, 2), (8, 2), (9, 1)]



def attend(q, k, v, lists=None, **options):
    """(out, lse), written over NaN."""
    real = np.float64 if q.dtype == np.float64 else np.float32
    poison = 0xFFFF if q.dtype == np.uint16 else np.nan  # bfloat16 comes as its bits
    out = np.full(q.shape[:-1] + v.shape[-1:], poison, q.dtype)
    lse = np.full(q.shape[:-1], np.nan, real)
    return blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, out=(out, lse), **bits_option(q), **options)


@pytest.mark.sampled
@pytest.mark.parametrize("valid", [0, 1, 3, 4, 5, 9, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_changes_no_bit(dtype, heads, kv_heads, valid, isa_level):
    """A padded entry beside a full one gives what its valid queries give alone, with and without lists, on any number of threads."""
    rng = np.random.default_rng(valid)
    tokens, keys, block = 40, 300, (2, 32)
    q, k, v = testing.make_qkv(2, heads, kv_heads, tokens, keys, 16, 24, dtype=dtype)
    rows, columns = -(-tokens // block[0]), -(-keys // block[1])
    lists = np.argsort(rng.random((2, heads, rows, columns)), axis=-1).astype(np.int16)[..., :6]
    for given in (None, lists):
        for causal in (False, True):
            options = {"block_shape": block, "causal": causal}
            got = attend(q, k, v, given, q_lens=[valid, tokens], num_threads=1, **options)
            several = attend(q, k, v, given, q_lens=[valid, tokens], num_threads=3, **options)
            alone = attend(
                q[:1, :, :valid], k[:1], v[:1], None if given is None else given[:1, :, : -(-valid // block[0])], **options, num_threads=1
            )
            for one, other, short in zip(got, several, alone, strict=True):
                assert same_bits(one, other)
                assert same_bits(one[:1, :, :valid], short)
            assert not got[0][0, :, valid:].astype(np.float64).any()
            assert (got[1][0, :, valid:] == -np.inf).all()


def test_far_padded_few_queries():
    """One valid query of two heads: what was wrong where padding made several tiles of an entry that the kernel for few queries serves."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 16, 4))
    k = v = rng.standard_normal((1, 2, 4, 4))
    out, lse = blitz_attn.block_sparse_attention(q, k, v, q_lens=[1], return_lse=True)
    scores = q[0, :, :1] @ k[0].swapaxes(1, 2) / 2
    np.testing.assert_allclose(lse[0, :, 0], np.log(np.exp(scores).sum(-1))[:, 0], rtol=1e-12)
    assert (lse[0, :, 1:] == -np.inf).all()
    assert not out[0, :, 1:].any()


@pytest.mark.parametrize("bad", [7, 2])
def test_lists_of_padding_are_checked(bad):
    """No query reads them, but an entry out of range is a mistake all the same."""
    q = k = v = np.ones((2, 2, 64, 8), np.float32)
    lists = np.full((2, 2, 4, 3), -1, np.int32)
    lists[1, 1, 3] = [2, bad, -1]  # out of range, or twice
    with pytest.raises(ValueError, match=r"^sabi: expected .* at \[1, 1, 3, 1\]"):
        blitz_attn.block_sparse_attention(q, k, v, lists, block_shape=(16, 16), q_lens=[64, 5])
