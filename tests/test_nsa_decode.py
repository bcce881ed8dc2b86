"""Native sparse attention of queries that are the last tokens of their sequences: rows of the whole call, bit for bit, in a batch, packed and
with lengths; compressed keys that the caller keeps; bad input."""

import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import nsa, reference, testing
from cases import DTYPES, ISA_LEVELS, bits_option, poisoned, same_bits
from cases_nsa import MSLK, PAPER, PAPER_STRIDES, WEIGHTS, problem
from cases_nsa_library import IS_REFERENCE, errors_close, library

MODES = {
    "paper": PAPER,
    "paper_strides": PAPER_STRIDES,
    "paper_not_causal": {**PAPER, "causal": False},
    "mslk": MSLK,
    "mslk_groups": {**MSLK, "compress_block_size": 1, "num_cmp_selected_blocks": 1},
    "mslk_not_causal": {**MSLK, "causal": False},
}  # fmt: skip
every_mode = pytest.mark.parametrize("mode", list(MODES))
pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="the reference has no dtypes and no bits")


def begin_of(queries, tokens, rules):
    """The first query, moved to where a tile begins."""
    tile = rules.get("q_tile_size", 1) if rules.get("mode") == "mslk" else 1
    return (tokens - min(queries, tokens)) // tile * tile


def last(q, options, begin):
    """The queries from `begin` on, and options with the gates of these."""
    own = {name: x[:, begin:] if name == "gates" else x for name, x in options.items()}
    return q[:, begin:], own


def compressed(k, v, rules, options, **more):
    size, paper = rules["compress_block_size"], rules.get("mode") != "mslk"
    stride = rules.get("compress_stride", max(1, size // 2)) if paper else size
    weights = options.get("w_k_compress"), options.get("w_v_compress")
    return library.compress_kv(k, v, size, *weights, stride=stride, **more, **bits_option(k))


def without_weights(options):
    return {name: x for name, x in options.items() if name not in ("w_k_compress", "w_v_compress")}


# ---- Rows of the whole call -------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [WEIGHTS[:3], WEIGHTS[3:]])
def test_last_queries_have_the_bits_of_the_whole(mode, dtype, weights):
    rules = MODES[mode]
    q, k, v, options = problem(203, 4, 2, 24, 16, dtype=dtype, weights=weights)
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            whole = library.nsa(q, k, v, **rules, **options, **bits_option(q))
            known = compressed(k, v, rules, options)
            for queries in (1, 2, 5, 17, 64, 202):
                begin = begin_of(queries, 203, rules)
                some, own = last(q, options, begin)
                out = poisoned((*some.shape[:-1], 16), q)
                assert library.nsa(some, k, v, out=out, **rules, **own, **bits_option(q)) is out
                assert same_bits(out, np.ascontiguousarray(whole[:, begin:])), (level, queries)
                kept = library.nsa(some, k, v, compressed_kv=known, **rules, **without_weights(own), **bits_option(q))
                assert same_bits(kept, out), (level, queries)


@every_mode
@pytest.mark.parametrize("tokens", [1, 2, 11, 12, 15, 16, 17, 31, 32, 33, 64, 129])
def test_any_length(mode, tokens):
    rules = MODES[mode]
    q, k, v, _ = problem(tokens, 4, 2, 16)
    whole = library.nsa(q, k, v, **rules)
    for queries in {0, 1, min(3, tokens)}:
        begin = tokens if queries == 0 and rules.get("mode") != "mslk" else begin_of(max(1, queries), tokens, rules)
        assert same_bits(library.nsa(q[:, begin:], k, v, **rules), np.ascontiguousarray(whole[:, begin:]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (16, 1), (16, 2), (40, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_heads(heads, kv_heads, dtype):
    """The heads of a group that fit a panel are selected for side by side."""
    q, k, v, _ = problem(333, heads, kv_heads, 16, dtype=dtype)
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            whole = library.nsa(q, k, v, **PAPER, **bits_option(q))
            for queries in (1, 2, 3, 9):
                out = library.nsa(q[:, -queries:], k, v, **PAPER, **bits_option(q))
                assert same_bits(out, np.ascontiguousarray(whole[:, -queries:])), (level, queries)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sequences(dtype):
    """More compressed keys than a chunk has, and parts of a long walk."""
    q, k, v, _ = problem(9000, 4, 1, 16, batch=1, dtype=dtype)
    rules = {"compress_block_size": 4, "num_selected_blocks": 8, "window_size": 40}
    whole = library.nsa(q, k, v, **rules, **bits_option(q))
    for queries in (1, 8, 100):
        for threads in (1, 2):
            out = library.nsa(q[:, -queries:], k, v, num_threads=threads, **rules, **bits_option(q))
            assert same_bits(out, np.ascontiguousarray(whole[:, -queries:]))


@every_mode
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_against_the_reference(mode, dtype):
    """The twin, which is given what was selected."""
    rules = MODES[mode]
    q, k, v, options = problem(150, 4, 2, 16, 24, dtype=dtype, weights=WEIGHTS[:3])
    _, context = library.nsa(q, k, v, return_context=True, **rules, **options, **bits_option(q))
    begin = begin_of(6, 150, rules)
    some, own = last(q, options, begin)
    lists = context.block_indices[:, :, begin if "mode" not in rules else begin // 32 :]
    frozen = {**rules, **own, "block_indices": np.ascontiguousarray(lists), **bits_option(q)}
    out = library.nsa(some, k, v, **frozen)
    exact = reference.nsa(some, k, v, **frozen)
    rough = reference.nsa_same_precision(some, k, v, name=dtype, **frozen)[0]
    errors_close(out, exact, rough, dtype, 3.0, mode)
    if "num_cmp_selected_blocks" not in rules:
        known = compressed(k, v, rules, options)
        kept = reference.nsa(some, k, v, compressed_kv=known, **without_weights(frozen))
        np.testing.assert_allclose(kept, exact, rtol=0, atol={"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[dtype])


@every_mode
def test_the_reference_gives_rows_of_its_whole(mode):
    rules = MODES[mode]
    q, k, v, options = problem(101, 4, 2, 8, dtype="float64", weights=WEIGHTS[:3])
    whole = reference.nsa(q, k, v, **rules, **options)
    for queries in (1, 7, 40):
        begin = begin_of(queries, 101, rules)
        np.testing.assert_allclose(reference.nsa(q[:, begin:], k, v, **rules, **options), whole[:, begin:], rtol=1e-12, atol=1e-13)


# ---- Sequences of different lengths -------------------------------------------------------------------------------------

LENGTHS, QUERIES = [33, 0, 101, 1, 16, 75], [1, 0, 7, 1, 16, 2]


@pytest.mark.parametrize("mode", ["paper", "paper_strides", "paper_not_causal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed(mode, dtype, monkeypatch):
    q, k, v, options = problem(LENGTHS, 4, 2, 16, 24, packed=True, dtype=dtype, weights=WEIGHTS)
    options.pop("gate_proj_weight")
    rules, ends = MODES[mode], np.cumsum(LENGTHS)
    whole = library.nsa(q, k, v, **rules, **options, **bits_option(q))
    rows = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, QUERIES, strict=True)])
    given = {**options, "gates": options["gates"][rows], "cu_seqlens_q": np.cumsum([0, *QUERIES])}
    cu = {"cu_seqlens": options["cu_seqlens"]}
    known = {**without_weights(given), "compressed_kv": compressed(k, v, rules, options, **cu)}
    exact = reference.nsa(q[rows], k, v, **rules, **given, **bits_option(q))
    for elements in (nsa.PIECE_ELEMENTS, 200, 1):
        monkeypatch.setattr(nsa, "PIECE_ELEMENTS", elements)
        for more in (given, known):
            out = library.nsa(q[rows], k, v, **rules, **more, **bits_option(q))
            assert same_bits(out, np.ascontiguousarray(whole[rows]))
    close = np.abs(testing.to_float64(out, dtype) - exact).max(axis=(1, 2)) < (1e-4 if dtype == "float32" else 0.1)
    assert close.mean() > 0.9  # the others have blocks of nearly equal scores


@pytest.mark.parametrize("mode", ["paper", "paper_strides"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 3])
def test_lengths(mode, dtype, queries, monkeypatch):
    """A batch whose arrays have room for more tokens, which are not looked at."""
    rules, lens = MODES[mode], [5, 90, 16, 31]
    q, k, v, options = problem(90, 4, 2, 16, 24, batch=4, dtype=dtype, weights=WEIGHTS[:3])
    expected, some = [], []
    for b, n in enumerate(lens):
        one = slice(b, b + 1)
        some.append(q[b, n - queries : n])
        expected.append(library.nsa(q[one, :n], k[one, :n], v[one, :n], **rules, **options, **bits_option(q))[0, n - queries :])
        for x in (k, v):
            x[b, n:] = testing.round_to(np.float32(np.nan), dtype)
    some, expected = np.stack(some), np.stack(expected)
    known = compressed(k, v, rules, options)
    for elements in (nsa.PIECE_ELEMENTS, 200, 1):
        monkeypatch.setattr(nsa, "PIECE_ELEMENTS", elements)
        out = library.nsa(some, k, v, kv_lens=lens, **rules, **options, **bits_option(q))
        assert same_bits(out, expected)
        kept = library.nsa(some, k, v, kv_lens=lens, compressed_kv=known, **rules, **without_weights(options), **bits_option(q))
        assert same_bits(kept, expected)
    exact = reference.nsa(some, k, v, kv_lens=lens, **rules, **options, **bits_option(q))
    close = np.abs(testing.to_float64(out, dtype) - exact).max(axis=(2, 3)) < (1e-4 if dtype == "float32" else 0.1)
    assert close.mean() > 0.6


# ---- Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_parts(causal, packed):
    lengths = LENGTHS if packed else 101
    q, k, v, options = problem(lengths, 4, 2, 16, 24, packed=packed)
    both, ends = {"causal": causal, **options}, np.cumsum(LENGTHS)
    if packed:
        rows = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, QUERIES, strict=True)])
        some, fewer, tokens = q[rows], {"cu_seqlens_q": np.cumsum([0, *QUERIES])}, {}
    else:
        rows = slice(-7, None)
        some, fewer, tokens = q[:, rows], {}, {"tokens": 101}

    def cut(x, axis):
        return np.ascontiguousarray(x[(slice(None),) * axis + (rows,)])

    axis = 0 if packed else 1
    for mode, stride in (("paper", 8), ("mslk", 16)):
        k_cmp, v_cmp = library.compress_kv(k, v, 16, stride=stride, **options)
        given = {"stride": stride, "mode": mode, "return_lse": True, **both}
        for x, y in zip(
            library.compressed_attention(some, k_cmp, v_cmp, 16, **given, **fewer, **tokens),
            library.compressed_attention(q, k_cmp, v_cmp, 16, **given), strict=True,
        ):  # fmt: skip
            assert same_bits(x, cut(y, axis))
        exact = reference.compressed_attention(some, k_cmp, v_cmp, 16, **given, **fewer, **tokens)
        np.testing.assert_allclose(x, exact[1], rtol=1e-5, atol=1e-5)
        given = {"compress_stride": stride, "mode": mode, "q_tile_size": 1, **both}
        chosen = library.score_and_select_blocks(some, k_cmp, 3, 16, **given, **fewer, **tokens)
        every = library.score_and_select_blocks(q, k_cmp, 3, 16, **given)
        np.testing.assert_array_equal(chosen, cut(every, axis + 1))
        here = reference.score_and_select_blocks(some, k_cmp, 3, 16, **given, **fewer, **tokens)
        assert (here == chosen).mean() > 0.98
        of_few = library.selected_attention(some, k, v, chosen, 16, **both, **fewer)
        assert same_bits(of_few, cut(library.selected_attention(q, k, v, every, 16, **both), axis))
        np.testing.assert_allclose(of_few, reference.selected_attention(some, k, v, chosen, 16, **both, **fewer), rtol=1e-5, atol=1e-5)
    near = library.window_attention(some, k, v, 9, **both, **fewer)
    assert same_bits(near, cut(library.window_attention(q, k, v, 9, **both), axis))
    np.testing.assert_allclose(near, reference.window_attention(some, k, v, 9, **both, **fewer), rtol=1e-5, atol=1e-5)


# ---- Bad input ------------------------------------------------------------------------------------------------------------

Q, K, V, _ = problem(40, 4, 2, 8, 6)
FLAT = {"q": Q[0, -2:], "k": K[0], "v": V[0], "cu_seqlens": [0, 40]}
KNOWN = reference.compress_kv(K, V, 8, stride=4)
KNOWN = tuple(x.astype(np.float32) for x in KNOWN)
BAD = [
    ("more queries than keys", ValueError, "k: expected at least the 40 tokens of q (layout (B, tokens, heads, D)), got (2, 39, 2, 8)",
     {"q": Q, "k": K[:, 1:], "v": V[:, 1:]}),
    ("context", ValueError, "return_context: expected False where q has not all tokens, or with compressed_kv or kv_lens, got True",
     {"return_context": True}),
    ("tile", ValueError, 'q: expected in mode "mslk" queries from the beginning of a tile of q_tile_size = 16 tokens on, got token 38',
     {"mode": "mslk", "q_tile_size": 16}),
    ("pair", TypeError, "compressed_kv: expected a pair (k_cmp, v_cmp), got ndarray", {"compressed_kv": KNOWN[0]}),
    ("pair of one", TypeError, "compressed_kv: expected a pair (k_cmp, v_cmp), got tuple", {"compressed_kv": KNOWN[:1]}),
    ("weight", ValueError, "w_k_compress: expected None beside compressed_kv, got some",
     {"compressed_kv": KNOWN, "w_k_compress": np.zeros((2, 8, 8), np.float32)}),
    ("blocks", ValueError, "k_cmp: expected 9 blocks of compress_block_size = 8, got (2, 8, 2, 8)",
     {"compressed_kv": (KNOWN[0][:, 1:], KNOWN[1])}),
    ("blocks of values", ValueError, "v_cmp: expected 9 blocks of compress_block_size = 8, got (2, 8, 2, 6)",
     {"compressed_kv": (KNOWN[0], KNOWN[1][:, 1:])}),
    ("blocks of lengths", ValueError, "k_cmp: expected at least 8 blocks of compress_block_size = 8, got (2, 7, 2, 8)",
     {"compressed_kv": tuple(x[:, :7] for x in KNOWN), "kv_lens": [39, 2]}),
    ("heads of blocks", ValueError, "k_cmp: expected blocks of tokens, else like k (2, 40, 2, 8), got (2, 9, 1, 8)",
     {"compressed_kv": (KNOWN[0][:, :, :1], KNOWN[1])}),
    ("dtype of blocks", TypeError, "k_cmp: expected dtype float32 like q, got float64", {"compressed_kv": (KNOWN[0].astype(np.float64), KNOWN[1])}),
    ("lengths", ValueError, "kv_lens: expected one number per sequence, (2,), got (3,)", {"kv_lens": [40, 40, 40]}),
    ("long", ValueError, "kv_lens: expected numbers from the 2 tokens of q to the 40 of k, got 41", {"kv_lens": [40, 41]}),
    ("short", ValueError, "kv_lens: expected numbers from the 2 tokens of q to the 40 of k, got 1", {"kv_lens": [1, 40]}),
    ("lengths packed", ValueError, "kv_lens: expected None beside cu_seqlens, got some", {**FLAT, "cu_seqlens_q": [0, 2], "kv_lens": [40]}),
    ("queries of a batch", ValueError, "cu_seqlens_q: expected None without cu_seqlens, got some", {"cu_seqlens_q": [0, 2]}),
    ("no queries", ValueError, "k: expected the 2 tokens of q without cu_seqlens_q, got (40, 2, 8)", FLAT),
    ("queries", ValueError, "cu_seqlens_q: expected numbers rising from 0 to 2, got 0 to 3", {**FLAT, "cu_seqlens_q": [0, 3]}),
    ("numbers", ValueError, "cu_seqlens_q: expected 2 numbers like cu_seqlens, got 3", {**FLAT, "cu_seqlens_q": [0, 1, 2]}),
    ("queries of a sequence", ValueError, "cu_seqlens_q: expected at most the 1 tokens of the sequence, got 2 queries",
     {**FLAT, "cu_seqlens": [0, 1, 40], "cu_seqlens_q": [0, 2, 2]}),
    ("blocks of a short sequence", ValueError, "block_indices: expected blocks from 0 to 0, or -1 after them, got 4",
     {"kv_lens": [40, 8], "block_indices": np.full((2, 2, 2, 1), 4)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "changes"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_a_bad_argument_is_named(error, text, changes):
    given = {"q": Q[:, -2:], "k": K, "v": V, "compress_block_size": 8, "num_selected_blocks": 3, "window_size": 5, **changes}
    out = np.full((*given["q"].shape[:-1], 6), np.nan, np.float32)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        library.nsa(**given, out=out)
    assert np.isnan(out).all(), "out was touched"


@pytest.mark.parametrize("name", ["k_cmp", "v_cmp"])
def test_out_lies_in_no_compressed_array(name):
    x = np.zeros((2, 9, 2, 8), np.float32)
    pair = {"k_cmp": (x, np.zeros_like(x)), "v_cmp": (np.zeros_like(x), x)}[name]
    with pytest.raises(ValueError, match=f"^out: expected memory of its own, got an array that overlaps {name}$"):
        library.nsa(Q[:, -1:], K, K, compress_block_size=8, compressed_kv=pair, out=x.reshape(-1)[:64].reshape(2, 1, 4, 8))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "tokens: expected None beside cu_seqlens, got 40",
         lambda: library.compressed_attention(Q[0], KNOWN[0][0], KNOWN[1][0], 8, stride=4, cu_seqlens=[0, 40], tokens=40)),
        (ValueError, "q: expected at most the 3 tokens of the sequence, got 40 queries",
         lambda: library.compressed_attention(Q, *KNOWN, 8, stride=4, tokens=3)),
        (ValueError, "cu_seqlens_q: expected None without cu_seqlens, got some",
         lambda: library.score_and_select_blocks(Q, KNOWN[0], 3, 8, cu_seqlens_q=[0, 40])),
        (ValueError, "cu_seqlens_q: expected None without cu_seqlens, got some", lambda: library.window_attention(Q, K, V, 3, cu_seqlens_q=[0, 40])),
        (ValueError, "k: expected the tokens of q (2, 4, 8), got (40, 2, 8)", lambda: library.window_attention(Q[0, :2], K[0], V[0], 3, cu_seqlens=[0, 40])),
        (ValueError, 'q: expected in mode "mslk" queries from the beginning of a tile of q_tile_size = 256 tokens on, got token 38',
         lambda: library.score_and_select_blocks(Q[:, -2:], KNOWN[0][:, ::2], 3, 8, mode="mslk", tokens=40)),
    ],
)  # fmt: skip
def test_a_bad_argument_of_a_part_is_named(error, text, call):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()
