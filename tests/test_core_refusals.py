"""What the compiled module refuses by itself: the package's own checks come first there, and other callers may have none."""

import re

import numpy as np
import pytest

from blitz_attn import _core

SENTENCE = re.compile(r"^[\w\[\], ]+: expected .+, got .+", re.DOTALL)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def unwritten(*shape, dtype=np.float32):
    """An output; 77 shows where nothing was written."""
    return np.full(shape, 77, dtype)


X, PACKED, BLOCKS = zeros(1, 12, 2, 4), zeros(12, 2, 4), zeros(1, 3, 2, 4)
LISTS = zeros(1, 2, 2, 1, dtype=np.int32)


def means():
    return {"x": X, "weight": None, "out": unwritten(1, 3, 2, 4), "block_size": 4, "stride": 4}


def packed_means(**changes):
    return {"x": PACKED, "out": unwritten(3, 2, 4), "cu_seqlens": [0, 12], "cu_blocks": [0, 3]} | changes


def means_backward():
    return {"dout": BLOCKS, "dx": unwritten(1, 12, 2, 4), "more": (X,), "block_size": 4, "stride": 4}


def gate():
    weight, gates = zeros(2, 3, 4), unwritten(1, 12, 2, 3)
    return {"q": X, "gate_proj_weight": weight, "gates": gates, "branches": (X, X, X), "out": unwritten(1, 12, 2, 4)}


def gate_backward():
    return {
        "q": X, "gate_proj_weight": zeros(2, 3, 4), "gates": zeros(1, 12, 2, 3), "branches": (X, X, X), "dout": X,
        "dbranches": tuple(unwritten(1, 12, 2, 4) for _ in range(3)), "dgates": None, "dq": unwritten(1, 12, 2, 4),
        "dgate_proj_weight": unwritten(2, 3, 4),
    }  # fmt: skip


def select():
    return {
        "q": X, "k_cmp": BLOCKS, "lse": zeros(1, 12, 2), "block_indices": unwritten(1, 2, 12, 4, dtype=np.int32), "cmp_block_indices": None,
        "scale": 1.0, "causal": True, "compress_block_size": 4, "compress_stride": 4, "select_block_size": 4, "q_tile_size": 0,
        "init_blocks": 1, "local_blocks": 2, "q_begin": 0, "tokens": 12, "cmp_group": 128,
    }  # fmt: skip


def packed_select(**changes):
    arrays = {"q": PACKED, "k_cmp": zeros(3, 2, 4), "lse": zeros(12, 2), "block_indices": unwritten(2, 12, 4, dtype=np.int32)}
    return arrays | {"cu_seqlens": [0, 12], "cu_blocks": [0, 3]} | changes


def attention():
    q = zeros(1, 2, 64, 8)
    plain = {"layout": "BNSD", "causal": False, "return_lse": False}
    return {"empty": np.empty, "q": q, "k": q, "v": q, "block_shape": (32, 32), "out": unwritten(1, 2, 64, 8)} | plain


def packed_attention(**changes):
    q, lists = zeros(64, 2, 8), zeros(2, 2, 1, dtype=np.int32)
    ends = {"layout": "TND", "cu_seqlens_q": [0, 64], "cu_seqlens_kv": [0, 64]}
    return {"q": q, "k": q, "v": q, "out": unwritten(64, 2, 8), "sabi": lists, "cu_rows": [0, 2]} | ends | changes


def paged():
    q, cache = zeros(2, 2, 8), zeros(4, 16, 1, 8)
    given = {"empty": np.empty, "q": q, "k_cache": cache, "v_cache": cache, "block_tables": np.array([[0, 1], [2, 3]]), "seq_lens": [20, 32]}
    return given | {"selected": np.array([[[0, -1]], [[1, 0]]]), "kv_layout": "NHD", "return_lse": False, "out": unwritten(2, 2, 8)}


def merge():
    return {"empty": np.empty, "outs": (X,), "lses": (zeros(1, 12, 2),)}


def choose():
    q = zeros(1, 2, 64, 8)
    given = {"empty": np.empty, "q": q, "k": q, "v": q, "sabi": None, "block_shape": (32, 32), "layout": "BNSD", "causal": False}
    given |= dict.fromkeys(("scale", "window", "q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_kv"))
    given |= dict.fromkeys(("num_heads", "num_kv_heads", "dtype", "num_threads"))
    given |= {"chooser": "pooled", "pool_q": 8, "pool_k": 8, "term": "both", "largest": True, "budget": "density"}
    given |= {"budgets": np.array([0.5]), "sink": 1, "recent": 1, "last_columns": 0, "first_rows": 0, "last_rows": 0, "per_kv_head": False}
    return given | {"index_dtype": "int32", "return_scores": False}


def select_pages():
    given = {"empty": np.empty, "method": "max", "query": zeros(1, 2, 8), "a": zeros(4, 16, 2, 8), "b": None, "tables": np.array([[0, 1]])}
    given |= {"seq_lens": [20], "k": 2, "block_size": 16, "per_query_head": False, "sink": 0, "recent": [0], "budget": [1]}
    given |= {"tokens_since_metadata_update": -1, "q_lens": None, "ascending": True, "kv_layout": "NHD", "selected_indices": None}
    return given | {"return_counts": False, "return_scores": False, "dtype": None, "num_threads": None}


def quantise():
    return {"x": zeros(3, 8), "values": unwritten(3, 8, dtype=np.int8), "scale": unwritten(3)}


CALLS = {
    "block_means": means,
    "block_means_backward": means_backward,
    "gate": gate,
    "gate_backward": gate_backward,
    "nsa_select": select,
    "block_sparse_attention": attention,
    "paged_attention": paged,
    "merge_states": merge,
    "select_prefill": choose,
    "select_blocks": select_pages,
    "quantize_kv": quantise,
}

CASES = [
    ("block_means", TypeError, "x: expected float32, .*, got int32", {"x": X.astype(np.int32)}),
    ("block_means", ValueError, r"x: expected shape \(B, N, H, D\), got \(12, 2, 4\)", {"x": PACKED}),
    ("block_means", ValueError, r"x: expected shape .* last axis from 1 to 576, got \(1, 12, 2, 577\)", {"x": zeros(1, 12, 2, 577)}),
    ("block_means", ValueError, "num_threads: expected 1 to 1024, got 9999", {"num_threads": 9999}),
    ("block_means", ValueError, "block_size: expected at least 1 token, got 0", {"block_size": 0}),
    ("block_means", ValueError, "stride: expected at least 1 token, got 0", {"stride": 0}),
    ("block_means", ValueError, r"out: expected 3 blocks, got \(1, 2, 2, 4\)", {"out": unwritten(1, 2, 2, 4)}),
    ("block_means", TypeError, "out: expected dtype float32 like x, or float32, got float16",
     {"out": unwritten(1, 3, 2, 4, dtype=np.float16)}),
    ("block_means", ValueError, r"out: expected batch, heads and last axis of x \(1, 12, 2, 4\), got \(1, 3, 1, 4\)",
     {"out": unwritten(1, 3, 1, 4)}),
    ("block_means", TypeError, "weight: expected dtype float32, got float64", {"weight": zeros(2, 4, 4, dtype=np.float64)}),
    ("block_means", ValueError, r"weight: expected shape \(2, 4, 4\), got \(2, 4, 5\)", {"weight": zeros(2, 4, 5)}),
    ("block_means", ValueError, r"cu_blocks: expected 3, the number of blocks in the sequences before this one, got 2 at \[1\]",
     packed_means(cu_blocks=[0, 2])),
    ("block_means", ValueError, "cu_blocks: expected the cumulative numbers of the sequences' blocks, got none",
     packed_means(cu_blocks=None)),
    ("block_means", ValueError, "cu_blocks: expected 2 entries like cu_seqlens, got 1", packed_means(cu_blocks=[0])),
    ("block_means", ValueError, "cu_seqlens: expected at least one number, got none", packed_means(cu_seqlens=[])),
    ("block_means_backward", ValueError, r"dout: expected batch, heads, last axis and dtype of dx \(1, 12, 2, 4\), got \(1, 3, 2, 3\)",
     {"dout": zeros(1, 3, 2, 3)}),
    ("block_means_backward", TypeError, "more: expected dtype float32 like dx, got float16", {"more": (X.astype(np.float16),)}),
    ("block_means_backward", ValueError, "more: expected 1 x 12 tokens and 2 heads like dx, and a last axis of 4, got .* a last axis of 3",
     {"more": (zeros(1, 12, 2, 3),)}),
    ("gate", TypeError, "gate_proj_weight: expected dtype float32, got float64", {"gate_proj_weight": zeros(2, 3, 4, dtype=np.float64)}),
    ("gate", ValueError, r"gate_proj_weight: expected shape \(2, 3, 4\), got \(2, 2, 4\)", {"gate_proj_weight": zeros(2, 2, 4)}),
    ("gate", TypeError, "gates: expected dtype float32, got float64", {"gates": unwritten(1, 12, 2, 3, dtype=np.float64)}),
    ("gate", ValueError, "gates: expected 1 x 12 tokens and 2 heads like the other arrays, and a last axis of 3, got .* a last axis of 2",
     {"gates": unwritten(1, 12, 2, 2)}),
    ("gate", TypeError, "o_slc: expected dtype float32 like the other arrays, got float16", {"branches": (X, X.astype(np.float16), X)}),
    ("gate", ValueError, "o_win: expected 1 x 12 tokens and 2 heads like the other arrays, .*, got 1 x 12 tokens, 1 heads",
     {"branches": (X, X, X[:, :, :1])}),
    ("gate", TypeError, "out: expected dtype float32 like the other arrays, got float64",
     {"out": unwritten(1, 12, 2, 4, dtype=np.float64)}),
    ("gate_backward", TypeError, "gate_proj_weight: expected dtype float32, got float64",
     {"gate_proj_weight": zeros(2, 3, 4, dtype=np.float64)}),
    ("gate_backward", ValueError, "dq: expected .* a last axis of 4, got .* a last axis of 3", {"dq": unwritten(1, 12, 2, 3)}),
    ("gate_backward", ValueError, r"dgate_proj_weight: expected shape \(2, 3, 4\), got \(2, 3, 3\)",
     {"dgate_proj_weight": unwritten(2, 3, 3)}),
    ("nsa_select", TypeError, "k_cmp: expected dtype float32 like q, got float16", {"k_cmp": BLOCKS.astype(np.float16)}),
    ("nsa_select", ValueError, r"k_cmp: expected D = 4 and a number of heads that divides 2 like q, got \(1, 3, 3, 4\)",
     {"k_cmp": zeros(1, 3, 3, 4)}),
    ("nsa_select", ValueError, "compress_block_size: expected a number from 1 to 1073741823, got 0", {"compress_block_size": 0}),
    ("nsa_select", ValueError, "init_blocks: expected a number from 0 to 1073741823, got -1", {"init_blocks": -1}),
    ("nsa_select", ValueError, "compress_stride: expected a divisor of compress_block_size = 4 and of select_block_size = 4, got 3",
     {"compress_stride": 3}),
    ("nsa_select", ValueError, "compress_stride: expected compress_block_size = 4 with tiles, got 2",
     {"q_tile_size": 4, "compress_stride": 2}),
    ("nsa_select", ValueError, "scale: expected a finite number, got nan", {"scale": np.nan}),
    ("nsa_select", ValueError, "q: expected at most 1073741823 tokens per sequence, got 2147483648", {"tokens": 2**31}),
    ("nsa_select", ValueError, "q: expected at most 5 tokens from token 0 on, got 12", {"tokens": 5}),
    ("nsa_select", ValueError, r"k_cmp: expected \(1, at least 5, Hkv, D\), got \(1, 3, 2, 4\)", {"tokens": 20}),
    ("nsa_select", ValueError, r"k_cmp: expected \(1, blocks, Hkv, D\), got \(2, 3, 2, 4\)", {"k_cmp": zeros(2, 3, 2, 4)}),
    ("nsa_select", ValueError, "q_begin: expected numbers from 0 to 1073741823, got -1", {"q_begin": -1}),
    ("nsa_select", ValueError, "tokens: expected 1 entries, one per sequence, got 2", {"tokens": [12, 12]}),
    ("nsa_select", ValueError, "q: expected at most 14 tokens from token 3 on, got 12", packed_select(q_begin=[3], tokens=[14])),
    ("nsa_select", ValueError, "cu_blocks: expected the cumulative numbers of the sequences' blocks, got none",
     packed_select(cu_blocks=None)),
    ("nsa_select", ValueError, "cu_blocks: expected 3 blocks of sequence 0, got 2",
     packed_select(cu_blocks=[0, 2], k_cmp=zeros(2, 2, 4))),
    ("nsa_select", ValueError, r"num_selected_blocks: expected at least 1, and at least init_blocks \+ local_blocks = 3, got 2",
     {"block_indices": unwritten(1, 2, 12, 2, dtype=np.int32)}),
    ("nsa_select", TypeError, "block_indices: expected dtype int32, got int64", {"block_indices": unwritten(1, 2, 12, 4, dtype=np.int64)}),
    ("nsa_select", ValueError, "lse: expected the log-sum-exp of the compressed branch, got none", {"lse": None}),
    ("nsa_select", ValueError, "num_cmp_selected_blocks: expected None without tiles, got some",
     {"cmp_block_indices": unwritten(1, 2, 12, 1, dtype=np.int32)}),
    ("block_sparse_attention", ValueError, "cu_rows: expected none with layout BNSD, whose lists have a batch axis, got some",
     {"sabi": LISTS, "cu_rows": [0, 2]}),
    ("block_sparse_attention", ValueError,
     r"cu_rows: expected 2, the number of block rows in the sequences before this one, got 3 at \[1\]",
     packed_attention(cu_rows=[0, 3])),
    ("block_sparse_attention", ValueError, r"sabi: expected shape \(2 or 1, 2, W\), got \(2, 3, 1\)",
     packed_attention(sabi=zeros(2, 3, 1, dtype=np.int32))),
    ("block_sparse_attention", ValueError, "key_stride, key_last: expected at least 0, got -1 and 0", {"key_stride": -1}),
    ("block_sparse_attention", ValueError, "q_begin: expected the first query's token number where key_stride is given, got none",
     {"key_stride": 2}),
    ("block_sparse_attention", ValueError, r"window: expected no bound where key_stride is given, got \(3, 4\)",
     {"key_stride": 2, "q_begin": [0], "window": (3, 4)}),
    ("block_sparse_attention", ValueError, r"sabi: expected block columns from 0 to 1, or a pad, got 2 at \[0, 0, 1, 0\]$",
     {"sabi": np.array([[[[0], [2]]]])}),
    ("block_sparse_attention", ValueError,
     r"sabi: expected block columns from 0 to 1, or a pad, got 65535 at \[0, 0, 1, 0\] \(65535 is a pad in uint16 alone\)$",
     {"sabi": np.array([[[[0], [65535]]]])}),
    ("block_sparse_attention", ValueError, r"sabi: expected block columns from 0 to 1, or a pad, got 2 at \[1, 1, 0\]$",
     packed_attention(sabi=np.array([[[0], [1]], [[0], [2]]]))),
    ("block_sparse_attention", ValueError, r"sabi: expected no block column, since sequence 0 has no keys, got 0 at \[0, 0, 0\]$",
     packed_attention(k=zeros(0, 2, 8), v=zeros(0, 2, 8), cu_seqlens_kv=[0, 0])),
    ("block_sparse_attention", ValueError, r"sabi: expected each block column once per row, got 1 again at \[0, 1, 1\]$",
     packed_attention(sabi=np.array([[[0, 1], [1, 1]]]))),
    ("paged_attention", ValueError, r"selected: expected pages from 0 to 1, or a pad, got 2 at \[1, 0, 1\]$",
     {"selected": np.array([[[0, -1]], [[1, 2]]])}),
    ("paged_attention", ValueError, r"selected: expected pages from 0 to 1, or a pad, got 65535 at \[1, 0, 1\]$",
     {"selected": np.array([[[0, -1]], [[1, 65535]]])}),
    ("paged_attention", ValueError, r"selected: expected pages from 0 to 1, got -1 at \[0, 0, 1\]$", {"counts": np.array([[2], [2]])}),
    ("paged_attention", ValueError, r"selected: expected each page once per row, got 1 again at \[1, 0, 1\]$",
     {"selected": np.array([[[0, -1]], [[1, 1]]])}),
    ("merge_states", ValueError, "lses: expected 2 arrays, one for each of outs, got 1", {"outs": (X, X)}),
    ("select_prefill", ValueError, "chooser: expected pooled or another of that kind, got 'best'", {"chooser": "best"}),
    ("select_prefill", ValueError, "term: expected mean or another of that kind, got 'most'", {"term": "most"}),
    ("select_prefill", ValueError, "budget: expected density or another of that kind, got 'all'", {"budget": "all"}),
    ("select_prefill", ValueError, "index_dtype: expected uint16 or another of that kind, got 'int8'", {"index_dtype": "int8"}),
    ("select_prefill", ValueError, r"density: expected one number, or one for each of 2 lists, got \(3,\)", {"budgets": np.full(3, 0.5)}),
    ("select_blocks", ValueError, r"budget: expected at least 0 pages, got -1 at \[0\]", {"budget": [-1]}),
    ("select_blocks", TypeError, "recent: expected an integer, or one per request, with tokens_since_metadata_update, got NoneType",
     {"recent": None, "tokens_since_metadata_update": 3}),
    ("merge_states", ValueError, "outs: expected at least 1 array, got 0", {"outs": (), "lses": ()}),
    ("quantize_kv", TypeError, "x: expected float32, .*, got int32", {"x": zeros(3, 8, dtype=np.int32)}),
    ("quantize_kv", ValueError, r"x: expected shape \(N, D\), got \(3, 2, 4\)", {"x": zeros(3, 2, 4)}),
    ("quantize_kv", TypeError, "values: expected int8 or float8_e4m3, got float32", {"values": unwritten(3, 8)}),
    ("quantize_kv", ValueError, r"values: expected shape \(3, 8\), got \(3, 7\)", {"values": unwritten(3, 7, dtype=np.int8)}),
    ("quantize_kv", ValueError, r"scale: expected shape \(3,\), got \(4,\)", {"scale": unwritten(4)}),
    ("quantize_kv", ValueError, r"x: expected rows of at most 16777216 numbers, got shape \(0, 16777217\)",
     {"x": zeros(0, 2**24 + 1), "values": unwritten(0, 2**24 + 1, dtype=np.int8), "scale": unwritten(0)}),
]  # fmt: skip


def outputs_of(arguments):
    """The bytes of every array of the call, inputs included: none of them may change."""
    arrays = [x for given in arguments.values() for x in (given if isinstance(given, tuple) else (given,))]
    return [x.tobytes() for x in arrays if isinstance(x, np.ndarray)]


@pytest.mark.parametrize("function", CALLS)
def test_the_call_without_changes_is_right(function):
    getattr(_core, function)(**CALLS[function]())


@pytest.mark.parametrize(
    ("function", "changes"),
    [("block_means", packed_means()), ("nsa_select", packed_select()), ("block_sparse_attention", packed_attention())],
)
def test_the_packed_call_without_changes_is_right(function, changes):
    getattr(_core, function)(**(CALLS[function]() | changes))


@pytest.mark.parametrize(
    ("function", "error", "pattern", "changes"), [pytest.param(*case, id=f"{case[0]}-{case[2][:50]}") for case in CASES]
)
def test_the_core_refuses(function, error, pattern, changes):
    arguments = CALLS[function]() | changes
    before = outputs_of(arguments)
    with pytest.raises(error, match=f"^{pattern}") as caught:
        getattr(_core, function)(**arguments)
    assert SENTENCE.match(str(caught.value))
    assert outputs_of(arguments) == before
