"""What the float64 twins refuse: one wrong argument each, which the sentence names."""

import re

import numpy as np
import pytest

from blitz_attn import reference

SENTENCE = re.compile(r"^[\w\[\], ]+: expected .+", re.DOTALL)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


X, PACKED, LSE, GATES = zeros(1, 12, 2, 4), zeros(12, 2, 4), zeros(1, 12, 2), zeros(1, 12, 2, 3)
HEADS = X.swapaxes(1, 2)
CACHE, TABLES, QUERY = zeros(4, 8, 2, 4), np.array([[0, 1], [2, 3]]), zeros(2, 2, 4)
SUMMARIES = zeros(2, 8, 2, 4)


def nsa(**changes):
    rules = {"compress_block_size": 4, "num_selected_blocks": 3, "window_size": 3}
    return lambda: reference.nsa(**({"q": X, "k": X, "v": X} | rules | changes))


def routed(lists, **changes):
    return nsa(block_indices=np.broadcast_to(np.array(lists), (1, 2, 12, len(lists))), **changes)


def backward(**changes):
    given = {"dout": HEADS, "q": HEADS, "k": HEADS, "v": HEADS, "out": HEADS, "lse": zeros(1, 2, 12)}
    return lambda: reference.block_sparse_attention_backward(**(given | changes))


def attend(**changes):
    given = {"q": QUERY, "k_cache": CACHE, "v_cache": CACHE, "block_tables": TABLES, "seq_lens": [9, 16]}
    return lambda: reference.paged_attention(**(given | changes))


def attend_selected(selected):
    return lambda: reference.paged_select_attention(QUERY, CACHE, CACHE, TABLES, [9, 16], np.array(selected))


def select(**changes):
    given = {"q": QUERY, "source": CACHE, "tables": TABLES, "seq_lens": [9, 16], "k": 1, "method": "max"}
    return lambda: reference.select_blocks(**(given | changes))


def append(slots):
    return lambda: reference.append_paged_kv(QUERY, QUERY, CACHE.copy(), CACHE.copy(), slot_mapping=slots)


def packed(**changes):
    given = {"layout": "TND", "cu_seqlens_q": [0, 12], "cu_seqlens_kv": [0, 12]} | changes
    return lambda: reference.block_sparse_attention(PACKED, PACKED, PACKED, **given)


CASES = {
    # ---- attention
    "falling lengths": (packed(cu_seqlens_q=[0, 9, 5, 12]), ValueError,
        r"cu_seqlens_q: expected lengths rising from 0 to 12, got \[0, 9, 5, 12\]"),
    "other lengths": (packed(cu_seqlens_kv=[0, 5, 12]), ValueError, "cu_seqlens_kv: expected 2 entries like cu_seqlens_q, got 3"),
    "far begin": (
        lambda: reference.block_sparse_attention(HEADS, HEADS, HEADS, q_begin=[2**30]), ValueError,
        r"q_begin: expected token numbers within 2\*\*30 of 0, got \[1073741824\]",
    ),
    "gradient of blocks of nothing": (backward(block_shape=(0, 4)), ValueError,
        r"block_shape: expected two positive numbers, got \(0, 4\)"),
    "gradient of another result": (backward(dout=HEADS[..., :3]), ValueError,
        r"dout: expected the shape of q with v's last dimension, got \(1, 2, 12, 3\)"),
    "result": (backward(out=HEADS[..., :3]), ValueError, "out: expected the shape of q with v's last dimension"),
    "log-sum-exp": (backward(lse=zeros(1, 2, 11)), ValueError, r"lse: expected one number per query and head, got \(1, 2, 11\)"),
    "gradient of it": (backward(dlse=zeros(2, 2, 12)), ValueError, r"dlse: expected one number per query and head, got \(2, 2, 12\)"),
    "nothing to add to": (
        backward(accumulate=True, grads=(None, HEADS, None)), ValueError,
        "grads: expected dk and dv to add to with accumulate=True, got None",
    ),
    # ---- choosing
    "chooser": (
        lambda: reference.select_blocks_prefill(HEADS, HEADS, top_k=1, chooser="best"), ValueError,
        "chooser: expected one of pooled, antidiagonal, sampled_rows, vertical_slash, got 'best'",
    ),
    # ---- caches
    "cache of bits": (lambda: reference.quantize_kv(QUERY, "float16"), ValueError, "kv_dtype: expected int8 or float8_e4m3, got float16"),
    "lengths of another batch": (attend(seq_lens=[9]), ValueError, "seq_lens: expected 2 lengths, got 1"),
    "lengths beyond the table": (attend(seq_lens=[9, 17]), ValueError,
        r"seq_lens: expected lengths from 0 to what 2 pages hold, got \[9, 17\]"),
    "layout": (attend(kv_layout="NDH"), ValueError, "kv_layout: expected NHD or HND, got 'NDH'"),
    "page": (attend(block_tables=np.array([[0, 1], [2, 4]])), ValueError, r"block_tables: expected pages from 0 to 3, got \[2, 4\]"),
    "number of queries": (attend(q_lens=[1, 2]), ValueError, r"q_lens: expected 2 lengths that add up to 2, got \[1, 2\]"),
    "block beyond the last": (attend_selected([[[0], [2]]] * 2), ValueError,
        r"selected: expected blocks from 0 to 1, each once, got \[2\]"),
    "block twice": (attend_selected([[[0, 1], [1, 1]]] * 2), ValueError, r"selected: expected blocks from 0 to 1, each once, got \[1, 1\]"),
    "slot twice": (append([3, 3]), ValueError, r"slot_mapping: expected 2 slots, each once, got \[3, 3\]"),
    "few slots": (append([3]), ValueError, r"slot_mapping: expected 2 slots, each once, got \[3\]"),
    "method": (select(method="best"), ValueError, "method: expected quest, mean or max, got 'best'"),
    "two budgets": (select(budget=8), ValueError, "budget: expected exactly one of budget and k"),
    # ---- native sparse attention
    "rank of q": (nsa(q=PACKED), ValueError, r"q: expected shape \(B, N, H, D\), got \(12, 2, 4\)"),
    "tokens of k": (nsa(k=X[:, 1:]), ValueError,
        r"k: expected at least the 12 tokens of q \(layout \(B, tokens, heads, D\)\), got \(1, 11, 2, 4\)"),
    "tokens of v": (nsa(v=X[:, 1:]), ValueError, r"v: expected the tokens and heads of k \(1, 12, 2, 4\), got \(1, 11, 2, 4\)"),
    "heads of k": (nsa(k=zeros(1, 12, 3, 4), v=zeros(1, 12, 3, 4)), ValueError, "k: expected a number of heads that divides 2, got 3"),
    "gates twice": (nsa(gates=GATES, gate_proj_weight=zeros(2, 3, 4)), ValueError, "gates: expected None with gate_proj_weight, got both"),
    "gates": (nsa(gates=GATES[..., :2]), ValueError, r"gates: expected shape \(1, 12, 2, 3\), got \(1, 12, 2, 2\)"),
    "gate weights": (nsa(gate_proj_weight=zeros(2, 2, 4)), ValueError,
        r"gate_proj_weight: expected shape \(H, 3, D\) = \(2, 3, 4\), got \(2, 2, 4\)"),
    "gate weights alone": (
        lambda: reference.compute_gates(X, zeros(2, 2, 4)), ValueError,
        r"gate_proj_weight: expected shape \(H, 3, D\) = \(2, 3, 4\), got \(2, 2, 4\)",
    ),
    "compression": (nsa(w_k_compress=zeros(2, 4, 5)), ValueError,
        r"w_k_compress: expected shape \(Hkv, D, D\) = \(2, 4, 4\), got \(2, 4, 5\)"),
    "blocks of numbers": (routed([0.0, 1.0]), TypeError, "block_indices: expected integers, got float64"),
    "rows of blocks": (nsa(block_indices=zeros(1, 2, 11, 2, dtype=int)), ValueError,
        r"block_indices: expected shape \(1, 2, 12\) .*, got \(1, 2, 11, 2\)"),
    "block that is not there": (routed([0, 3]), ValueError, "block_indices: expected blocks from 0 to 2 or -1, got 3"),
    "block below -1": (routed([0, -2]), ValueError, "block_indices: expected blocks from 0 to 2 or -1, got -2"),
    "same block": (routed([1, 1]), ValueError, "block_indices: expected every block once in a row, got 1 twice"),
    "groups in paper": (nsa(num_cmp_selected_blocks=2), ValueError, 'num_cmp_selected_blocks: expected None in mode "paper", got 2'),
    "mode": (nsa(mode="both"), ValueError, 'mode: expected "paper" or "mslk", got \'both\''),
    "mode of a branch": (lambda: reference.compressed_attention(X, X[:, :3], X[:, :3], 4, mode="both"), ValueError,
        'mode: expected "paper" or "mslk", got \'both\''),
    "compressed keys": (lambda: reference.compressed_attention(X, X[:, :2], X[:, :2], 4), ValueError,
        r"k_cmp: expected 3 blocks of compress_block_size = 4, got \(1, 2, 2, 4\)"),
    "compressed keys of a gradient": (
        lambda: reference.compressed_attention_backward(X, X, X[:, :3], X[:, :3], X, LSE, 4, stride=2), ValueError,
        r"k_cmp: expected 5 blocks of compress_block_size = 4, got \(1, 3, 2, 4\)",
    ),
    "compressed keys of a selection": (
        lambda: reference.score_and_select_blocks(PACKED, PACKED[:3], 3, 4, compress_stride=4, cu_seqlens=[0, 6, 12]), ValueError,
        r"k_cmp: expected 2 blocks of compress_block_size = 4, got \(3, 2, 4\)",
    ),
    "size": (nsa(compress_block_size=0), ValueError, "compress_block_size: expected a positive number, got 0"),
    "number of first blocks": (nsa(init_blocks=-1), ValueError, "init_blocks: expected 0 or more, got -1"),
    "stride in mslk": (nsa(mode="mslk", compress_stride=2), ValueError,
        'compress_stride: expected None or compress_block_size = 4 in mode "mslk", got 2'),
    "stride": (nsa(compress_stride=3), ValueError, "compress_stride: expected a divisor of compress_block_size = 4, got 3"),
    "forced blocks": (nsa(num_selected_blocks=2), ValueError, "num_selected_blocks: expected "),
    "cumulative lengths": (nsa(q=PACKED, k=PACKED, v=PACKED, cu_seqlens=[0, 11]), ValueError,
        r"cu_seqlens: expected lengths rising from 0 to 12, got \[0, 11\]"),
    "context": (lambda: reference.nsa_backward(X, None), TypeError, "ctx: expected the context that nsa returned, got NoneType"),
    "gradient of nsa": (
        lambda: reference.nsa_backward(X[:, 1:], nsa(return_context=True)()[1]), ValueError,
        r"dout: expected shape \(1, 12, 2, 4\) of the result that came with ctx, got \(1, 11, 2, 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_twin_refuses(name):
    call, error, sentence = CASES[name]
    with pytest.raises(error, match=f"^{sentence}") as caught:
        call()
    assert SENTENCE.match(str(caught.value))


@pytest.mark.parametrize(
    "call", [nsa(), routed([0, 1]), backward(), attend(), attend_selected([[[0], [1]]] * 2), select(), append([3, 4]), packed()]
)
def test_the_calls_without_changes_are_right(call):
    call()
