"""Common parts of the suites of paged operations: calls that write into poisoned outputs, and comparison with the reference."""

import numpy as np

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, ISA_LEVELS, LSE_TOLERANCE, poisoned

CACHE_DTYPES = ["float32", "float16", "bfloat16", "int8", "float8_e4m3"]
PAIRS = [(d, c) for d in DTYPES for c in (CACHE_DTYPES if d != "float64" else ["float64"])]  # dtypes of queries, and of the caches that they may read
# Lengths and new tokens of six requests. With four query heads per KV head, a KV head has 12, 20, 8, 32, 0 and 36 queries in them.
DRAFT_LENS, DRAFTS = [1400, 2200, 700, 2100, 30, 2400], [3, 5, 2, 8, 0, 9]


def _poisoned_results(case):
    shape = (*case.q.shape[:2], case.v_dim)
    return poisoned(shape, case.q), np.full(shape[:2], np.nan, np.float64 if case.dtype == "float64" else np.float32)


def attend_paged(case, selected=None, tables=None, **options):
    """(out, lse) of the operation, both written into arrays of NaN. `tables` replaces the case's tables and lengths."""
    out, lse = _poisoned_results(case)
    arrays = case.arrays if tables is None else (*case.arrays[:3], *tables)
    options = {**case.options, **options}
    if selected is None:
        results = blitz_attn.paged_attention(*arrays, out=(out, lse), return_lse=True, **options)
    else:
        results = blitz_attn.paged_select_attention(*arrays, selected, out=(out, lse), return_lse=True, **options)
    assert results[0] is out
    assert results[1] is lse
    return out, lse


# The options that a plan's calls take. The constructor of a plan takes all others.
PER_CALL = ("sinks", "k_scale", "v_scale", "counts", "kv_ranges", "attn_mask", "alibi_slopes")


def plan_paged(case, tables=None, **options):
    """A plan of the case's requests, and the options that remain for its calls. `tables` is as in `attend_paged`."""
    options = {**case.options, **options}
    per_call = {name: options.pop(name) for name in PER_CALL if name in options}
    return blitz_attn.PagedPlan(*(tables or case.arrays[3:]), page_size=case.page_size, **options), per_call


def every_block(case, rows, width=None):
    """Lists of all blocks of each request, in a random order."""
    blocks = -(-case.seq_lens // case.page_size)
    selected = np.full((len(blocks), rows, int(blocks.max(initial=1)) if width is None else width), -1)
    rng = np.random.default_rng(5)
    for b, r in np.ndindex(*selected.shape[:2]):
        selected[b, r, : blocks[b]] = rng.permutation(blocks[b])
    return selected


def check_paged(case, selected=None, **options):
    """Compare output and log-sum-exp with the float64 reference, by the error rule, at every instruction set level.

    The factor of the rule is 2. It is 3 for results of under 2000 elements, because the errors of few elements vary by chance. It is always
    3 for the largest single error: all elements of a row share the error of its scores, and a decode has few rows. Returns (out, lse) of
    the highest level.
    """
    both = {**case.options, **options}
    if selected is None:
        exact, exact_lse = reference.paged_attention(*case.arrays, return_lse=True, **both)
    else:
        exact, exact_lse = reference.paged_select_attention(*case.arrays, selected, return_lse=True, **both)
    dense = testing.error_of(reference.paged_same_precision(*case.arrays, selected, **both), exact)
    factor = 2.0 if exact.size >= 2000 else 3.0
    dense = dense._replace(largest=dense.largest * 3.0 / factor)
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            out, lse = attend_paged(case, selected, **options)
        ours = testing.error_of(out, exact, case.dtype)
        assert testing.meets_error_rule(ours, dense, case.dtype, factor), f"{level}: error {ours}, of the dense computation {dense}"
        tolerance = LSE_TOLERANCE[case.dtype]
        np.testing.assert_allclose(lse, exact_lse, rtol=tolerance, atol=tolerance, err_msg=level)
    return out, lse
