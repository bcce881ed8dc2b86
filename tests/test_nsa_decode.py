"""Native sparse attention of the last queries of sequences gives the rows of the whole call, bit for bit, and agrees with the reference.
Sequences come in a batch, packed or with lengths, and the caller may keep the compressed keys.

Numbers of queries, gates, lists and unused room behind sequences are drawn together in tests/fuzz/nsa_problems.py.
"""

import numpy as np
import pytest

from blitz_attn import nsa, reference, testing
from cases import DTYPES, bits_option, same_bits
from cases_nsa import MODES, MSLK, WEIGHTS, errors_close, problem

ALL_MODES = MODES | {"mslk_groups": {**MSLK, "compress_block_size": 1, "num_cmp_selected_blocks": 1}}
every_mode = pytest.mark.parametrize("mode", list(ALL_MODES))
LENGTHS, QUERIES = [33, 0, 101, 1, 16, 75], [1, 0, 7, 1, 16, 2]
ROWS = np.concatenate([np.arange(end - n, end) for end, n in zip(np.cumsum(LENGTHS), QUERIES, strict=True)])
FEWER = {"cu_seqlens_q": np.cumsum([0, *QUERIES])}


def begin_of(queries, tokens, rules):
    """The position of the first query, moved back to the beginning of its tile."""
    tile = rules.get("q_tile_size", 1) if rules.get("mode") == "mslk" else 1
    return (tokens - min(queries, tokens)) // tile * tile


def known(k, v, rules, options, **more):
    """The options, with compressed keys and values in place of the weights that compress."""
    size, paper = rules["compress_block_size"], rules.get("mode") != "mslk"
    stride = rules.get("compress_stride", max(1, size // 2)) if paper else size
    weights = options.get("w_k_compress"), options.get("w_v_compress")
    pair = nsa.compress_kv(k, v, size, *weights, stride=stride, **more, **bits_option(k))
    return {name: x for name, x in options.items() if name not in WEIGHTS[:2]} | {"compressed_kv": pair}


@pytest.mark.sampled(2)
@every_mode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [WEIGHTS[:3], WEIGHTS[3:]], ids=["weights", "gates"])
@pytest.mark.parametrize("queries", [1, 2, 5, 17, 64, 202])
def test_last_queries_have_the_bits_of_the_whole(queries, mode, dtype, weights, isa_level):
    rules = ALL_MODES[mode]
    q, k, v, options = problem(203, 4, 2, 24, 16, dtype=dtype, weights=weights)
    begin = begin_of(queries, 203, rules)
    whole = nsa.nsa(q, k, v, **rules, **options, **bits_option(q))[:, begin:]
    own = {name: x[:, begin:] if name == "gates" else x for name, x in options.items()}
    for given in (own, known(k, v, rules, own)):
        assert same_bits(nsa.nsa(q[:, begin:], k, v, **rules, **given, **bits_option(q)), np.ascontiguousarray(whole))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("queries", [1, 3, 9, 100])
@pytest.mark.parametrize(("tokens", "heads"), [(9000, (4, 1)), (333, (16, 1)), (333, (40, 2))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sequences_and_many_heads(tokens, heads, dtype, queries, threads):
    """Some sequences have more compressed keys than a chunk holds, some are attended in parts, and in some a group of many heads selects together."""
    q, k, v, _ = problem(tokens, *heads, 16, batch=1, dtype=dtype)
    rules = {"compress_block_size": 4, "num_selected_blocks": 8, "window_size": 40} | bits_option(q)
    out = nsa.nsa(q[:, -queries:], k, v, num_threads=threads, **rules)
    assert same_bits(out, np.ascontiguousarray(nsa.nsa(q, k, v, **rules)[:, -queries:]))


@every_mode
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_against_the_reference(mode, dtype):
    """The reference is given the blocks that the operation selected. In float64, the reference without given blocks must
    also give the rows of its own whole call."""
    rules = ALL_MODES[mode]
    q, k, v, options = problem(150, 4, 2, 16, 24, dtype=dtype, weights=WEIGHTS[:3])
    options |= rules | bits_option(q)
    _, context = nsa.nsa(q, k, v, return_context=True, **options)
    begin = begin_of(6, 150, rules)
    lists = context.block_indices[:, :, begin if "mode" not in rules else begin // 32 :]
    frozen = {**options, "block_indices": np.ascontiguousarray(lists)}
    exact = reference.nsa(q[:, begin:], k, v, **frozen)
    rough = reference.nsa_same_precision(q[:, begin:], k, v, name=dtype, **frozen)[0]
    errors_close(nsa.nsa(q[:, begin:], k, v, **frozen), exact, rough, dtype, 3.0, mode)
    if "num_cmp_selected_blocks" not in rules:
        kept = reference.nsa(q[:, begin:], k, v, **known(k, v, rules, frozen))
        np.testing.assert_allclose(kept, exact, rtol=0, atol={"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[dtype])
    if dtype == "float64":
        whole = reference.nsa(q, k, v, **options)[:, begin:]
        np.testing.assert_allclose(reference.nsa(q[:, begin:], k, v, **options), whole, rtol=1e-12, atol=1e-13)


# ---- Sequences of different lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [nsa.PIECE_ELEMENTS, 200, 1])
@pytest.mark.parametrize("mode", ["paper", "paper_strides", "paper_not_causal"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_packed(mode, dtype, elements, monkeypatch):
    q, k, v, options = problem(LENGTHS, 4, 2, 16, 24, packed=True, dtype=dtype, weights=(*WEIGHTS[:2], "gates"))
    rules = ALL_MODES[mode] | bits_option(q)
    whole = nsa.nsa(q, k, v, **rules, **options)
    given = {**options, "gates": options["gates"][ROWS], **FEWER}
    monkeypatch.setattr(nsa, "PIECE_ELEMENTS", elements)
    for more in (given, known(k, v, rules, given, cu_seqlens=options["cu_seqlens"])):
        assert same_bits(nsa.nsa(q[ROWS], k, v, **rules, **more), np.ascontiguousarray(whole[ROWS]))
    if dtype == "float64":
        np.testing.assert_allclose(reference.nsa(q[ROWS], k, v, **rules, **given), whole[ROWS], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("elements", [nsa.PIECE_ELEMENTS, 200, 1])
@pytest.mark.parametrize("mode", ["paper", "paper_strides"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 3])
def test_lengths(mode, dtype, queries, elements, monkeypatch):
    """The arrays of a batch have more room than its sequences have tokens. The room behind the tokens is not read."""
    lens = [5, 90, 16, 31]
    q, k, v, options = problem(90, 4, 2, 16, 24, batch=4, dtype=dtype, weights=WEIGHTS[:3])
    rules, expected = ALL_MODES[mode] | bits_option(q), []
    for b, n in enumerate(lens):
        expected.append(nsa.nsa(*(x[b : b + 1, :n] for x in (q, k, v)), **rules, **options)[0, n - queries :])
        for x in (k, v):
            x[b, n:] = testing.round_to(np.float32(np.nan), dtype)
    some, expected = np.stack([q[b, n - queries : n] for b, n in enumerate(lens)]), np.stack(expected)
    monkeypatch.setattr(nsa, "PIECE_ELEMENTS", elements)
    for given in (options, known(k, v, rules, options)):
        assert same_bits(nsa.nsa(some, k, v, kv_lens=lens, **rules, **given), expected)
    if dtype == "float64":
        np.testing.assert_allclose(reference.nsa(some, k, v, kv_lens=lens, **rules, **options), expected, rtol=1e-11, atol=1e-13)


# ---- Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("mode", "stride"), [("paper", 8), ("mslk", 16)])
def test_parts(mode, stride, packed, causal):
    """For the last queries, each part gives the rows of its whole call, and so does the reference."""
    q, k, v, options = problem(LENGTHS if packed else 101, 4, 2, 16, 24, packed=packed, dtype="float64")
    rows, axis = (ROWS if packed else slice(-7, None)), 0 if packed else 1
    some, fewer, tokens = q[(slice(None),) * axis + (rows,)], FEWER if packed else {}, {} if packed else {"tokens": 101}
    both = {"causal": causal, **options}
    k_cmp, v_cmp = nsa.compress_kv(k, v, 16, stride=stride, **options)
    chosen = nsa.score_and_select_blocks(q, k_cmp, 3, 16, compress_stride=stride, mode=mode, q_tile_size=1, **both)
    few = np.ascontiguousarray(chosen[(slice(None),) * (axis + 1) + (rows,)])
    selection = {"compress_stride": stride, "mode": mode, "q_tile_size": 1}
    for op in (nsa, reference):
        np.testing.assert_array_equal(op.score_and_select_blocks(some, k_cmp, 3, 16, **selection, **both, **fewer, **tokens), few)
    for name, args, lists, own, more in (
        ("compressed_attention", (k_cmp, v_cmp, 16), (), {"stride": stride, "mode": mode}, tokens),
        ("selected_attention", (k, v), (chosen, few), {"block_size": 16}, {}),
        ("window_attention", (k, v, 9), (), {}, {}),
    ):
        whole = getattr(nsa, name)(q, *args, *lists[:1], **own, **both)[(slice(None),) * axis + (rows,)]
        found, twin = (getattr(op, name)(some, *args, *lists[1:], **own, **both, **fewer, **more) for op in (nsa, reference))
        assert same_bits(found, np.ascontiguousarray(whole)), name
        np.testing.assert_allclose(found, twin, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("name", ["k_cmp", "v_cmp"])
def test_out_must_not_overlap_compressed_arrays(name):
    q, k, _, _ = problem(40, 4, 2, 8)
    x = np.zeros((2, 9, 2, 8), np.float32)
    pair = (x, np.zeros_like(x)) if name == "k_cmp" else (np.zeros_like(x), x)
    with pytest.raises(ValueError, match=f"^out: expected memory of its own, got an array that overlaps {name}$"):
        nsa.nsa(q[:, -1:], k, k, compress_block_size=8, compressed_kv=pair, out=x.reshape(-1)[:64].reshape(2, 1, 4, 8))
