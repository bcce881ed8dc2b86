"""Block lists and token rules from masks that are functions of indices, against the whole mask as an array."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import sabi, testing
from blitz_attn._sabi import function
from cases import same_bits

S_Q, S_KV, BATCH, HEADS = 150, 170, 2, 3
PLACE, DOCUMENT = S_KV - S_Q, np.arange(S_KV) // 37
FUNCTIONS = {
    "causal": lambda b, h, i, j: j <= i + PLACE,
    "window": lambda b, h, i, j: (j <= i + PLACE) & (j > i + PLACE - 40),
    "prefix": lambda b, h, i, j: (j <= i + PLACE) | (j < 60),
    "documents": lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j],
    "sink and window": lambda b, h, i, j: (j < 32) | (abs(i + PLACE - j) < 10),  # keys have a gap, which the list leaves out if blocks are small
    "padding": lambda b, h, i, j: (i < [150, 61][b]) & (j < [77, 170][b]),
    "a window by head": lambda b, h, i, j: (j <= i) & (i - j < 16 * (h + 1)),  # heads have different runs of keys
    "a head that sees nothing": lambda b, h, i, j: (h != 1) & (j <= i),
    "dilated": lambda b, h, i, j: (i - j) % 3 == 0,
    "scattered": lambda b, h, i, j: (i * 7919 + j * j * 31 + b * 5 + h) % 11 < 2,
    "whole blocks": lambda b, h, i, j: (i // 96 + j // 96 + h) % 2 == 0,
    "some queries": lambda b, h, i, j: i % 5 != 2,  # the result has shape (queries, 1)
    "some keys": lambda b, h, i, j: j[0] > 50,  # the result has one axis
    "whole tiles": lambda b, h, i, j: j < 50,  # each tile of (64, 50) is all True or all False, within one block
    "all": lambda b, h, i, j: True,
    "none": lambda b, h, i, j: [False],
}
TILES = {(32, 32): (128, 512), (16, 48): (40, 100), (7, 1): (128, 40), (1, 13): (64, 512), (150, 170): (64, 50), (1000, 64): (60, 30)}  # by block shape


def whole(mask_mod, batch, heads):
    """The mask over all queries and keys as an array, bool (batch, heads, S_Q, S_KV)."""
    i, j = np.arange(S_Q)[:, None], np.arange(S_KV)[None]
    rows = [[np.broadcast_to(mask_mod(np.int64(b), np.int64(h), i, j), (S_Q, S_KV)) for h in range(heads)] for b in range(batch)]
    return np.array(rows, bool)


def cut_of(mask, block_shape):
    """For each query, the shortest run with all keys that any head sees. Also the masks of the list, and of the list with the runs."""
    listed = sabi.to_token_mask(sabi.from_token_mask(mask, block_shape), S_Q, S_KV, block_shape)
    runs = sabi.kv_ranges_from_token_mask(np.zeros((len(mask), S_Q, S_KV), bool))
    for b, i in np.ndindex(runs.shape[:2]):
        keys = np.flatnonzero(mask[b, :, i].any(axis=0))
        runs[b, i] = (keys[0], keys[-1] + 1) if keys.size else 0
    inside = (np.arange(S_KV) >= runs[..., :1]) & (np.arange(S_KV) < runs[..., 1:])
    return runs, listed, listed & inside[:, None]


@pytest.mark.parametrize("block_shape", TILES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_from_function(name, block_shape, monkeypatch):
    monkeypatch.setattr(function, "TILE", TILES[block_shape])
    for lead in ((1, 1), (BATCH, HEADS)):
        mask = whole(FUNCTIONS[name], *lead)
        runs, listed, cut = cut_of(mask, block_shape)
        given = {"s_q": S_Q, "s_kv": S_KV, "block_shape": block_shape, "batch": lead[0], "heads": lead[1]}
        covered = sabi.from_function(FUNCTIONS[name], **given, token_rule="none")
        assert same_bits(covered.sabi, sabi.from_token_mask(mask, block_shape))
        assert covered[1:] == (None, None, block_shape)
        if not np.array_equal(cut, mask):
            with pytest.raises(ValueError, match=r"^mask_mod: expected .* got a gap for \[batch, head, query\] = \[\d+, \d+, \d+\]$"):
                sabi.from_function(FUNCTIONS[name], **given)
        made = sabi.from_function(FUNCTIONS[name], **given, token_rule="kv_ranges" if np.array_equal(cut, mask) else "attn_mask")
        assert same_bits(made.sabi, covered.sabi)
        if np.array_equal(listed, mask):
            assert made[1:] == (None, None, block_shape)
        elif np.array_equal(cut, mask):
            assert same_bits(made.kv_ranges, runs[0] if lead[0] == 1 else runs)
            assert made.attn_mask is None
        else:
            assert same_bits(made.attn_mask, mask)
            assert made.kv_ranges is None
        q, k, v = testing.make_qkv(BATCH, HEADS, 1, S_Q, S_KV, 8, 8, dtype="float64")
        out = blitz_attn.block_sparse_attention(q, k, v, **made._asdict())
        assert np.abs(out - blitz_attn.block_sparse_attention(q, k, v, attn_mask=mask)).max() < 1e-12


def test_what_the_function_raises_is_passed_on():
    error = ValueError("mask_mod: no\nsuch thing")

    def mask_mod(b, h, i, j):
        raise error

    with pytest.raises(ValueError, match="no\nsuch thing") as raised:
        sabi.from_function(mask_mod, 64)
    assert raised.value is error


def test_memory_does_not_grow_with_pairs():
    """The function is never given more than a tile of pairs, and is given every pair of tokens once."""
    asked = []

    def mask_mod(b, h, i, j):
        asked.append((i.size, j.size))
        return i >= j

    made = sabi.from_function(mask_mod, 3000, 2500, (300, 700), dtype="int16", width=9)
    assert made.sabi.dtype == np.int16
    assert made.sabi.shape == (1, 1, 10, 9)
    assert max(n * m for n, m in asked) <= 128 * 512
    assert sum(n * m for n, m in asked) == 3000 * 2500
