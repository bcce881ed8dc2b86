"""Cascade attention: requests that share a prefix attend to it once, all together, and merge with what is their own.

The recipe: the queries of all requests are one request's `len(requests)` queries over the prefix, with every key visible
(a block-sparse call over the prefix, or paged calls), each request attends to its own pages, and `merge_states` joins the
two. The prefix is read once instead of once a request.
"""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases_paged import attend_paged


def gathered(cache, pages, tokens):
    """(1, heads, tokens, dim) of the first tokens in the named pages of an NHD cache."""
    return np.ascontiguousarray(cache[pages].reshape(-1, *cache.shape[2:])[:tokens].swapaxes(0, 1)[None])


def cascade(case, prefix_pages):
    """The recipe, for requests whose first `prefix_pages` table entries are the same."""
    page_size = case.page_size
    # the shared part: queries of all requests along one axis, the prefix as plain keys and values
    shared = case.block_tables[0, :prefix_pages]
    k, v = (gathered(cache, shared, prefix_pages * page_size) for cache in (case.k_cache, case.v_cache))
    q = np.ascontiguousarray(case.q.swapaxes(0, 1)[None])  # (1, H, B, D)
    out_shared, lse_shared = blitz_attn.block_sparse_attention(q, k, v, return_lse=True)
    # each request's own pages
    own = case._replace(block_tables=case.block_tables[:, prefix_pages:], seq_lens=case.seq_lens - prefix_pages * page_size)
    out_own, lse_own = attend_paged(own)
    out, lse = blitz_attn.merge_states(
        out_shared, lse_shared, np.ascontiguousarray(out_own.swapaxes(0, 1)[None]), np.ascontiguousarray(lse_own.T[None])
    )
    return out[0].swapaxes(0, 1), lse[0].T


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shared_prefix(dtype, isa_level):
    case = testing.make_paged(5, 8, 2, [160, 190, 129, 161, 300], 32, 64, dtype=dtype)
    case.block_tables[:, :4] = case.block_tables[0, :4]
    out, lse = cascade(case, 4)
    exact, exact_lse = reference.paged_attention(*case.arrays, return_lse=True)
    tolerance = 1e-12 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(out, exact, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, exact_lse, rtol=tolerance)


def test_a_request_that_is_only_the_prefix(isa_level):
    """Its own part is empty: lse -inf, and the merge returns the shared part."""
    case = testing.make_paged(3, 4, 2, [64, 80, 64], 32, 32)
    case.block_tables[:, :2] = case.block_tables[0, :2]
    out, lse = cascade(case, 2)
    exact, exact_lse = reference.paged_attention(*case.arrays, return_lse=True)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def test_three_levels():
    """System prompt, document and turn: as many states as levels, merged at once."""
    case = testing.make_paged(4, 4, 2, [200, 170, 220, 161], 32, 32)
    case.block_tables[:, :2] = case.block_tables[0, :2]  # all share the first two pages
    for pair in ((0, 1), (2, 3)):
        case.block_tables[pair[1], 2:5] = case.block_tables[pair[0], 2:5]  # pairs share the next three
    states = []
    for first, last in ((0, 2), (2, 5), (5, None)):
        end = case.seq_lens if last is None else np.full(4, last * 32)
        part = case._replace(block_tables=case.block_tables[:, first:], seq_lens=end - first * 32)
        states.append(attend_paged(part))
    out, lse = blitz_attn.merge_states_n([o[:, :, None] for o, _ in states], [m[:, :, None] for _, m in states])
    exact, exact_lse = reference.paged_attention(*case.arrays, return_lse=True)
    np.testing.assert_allclose(out[:, :, 0], exact, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lse[:, :, 0], exact_lse, rtol=1e-6)
