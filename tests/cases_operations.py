"""Every public operation as a small call over arrays that are made once, for suites that call each operation many times."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import blitz_attn
from blitz_attn import nsa, select, testing
from blitz_attn.compat import mslk
from blitz_attn.compat.torch_bsa import blitz_sparse_attention


class Operation(NamedTuple):
    """`call()` returns the operation's result. `outs` are the arrays that it is given for results, if any."""

    call: Callable[[], Any]
    outs: tuple[np.ndarray, ...] = ()
    refused: Callable[[], Any] | None = None  # a call of the operation that raises ValueError or TypeError


def arrays_of(result):
    """The arrays of a result, which may be nested tuples."""
    if isinstance(result, tuple):
        return [x for part in result for x in arrays_of(part)]
    return [] if result is None else [np.asarray(result)]


def blank(*arrays):
    return tuple(np.zeros_like(x) for x in arrays)


# ---- Block-sparse attention -----------------------------------------------------------------------------------------


def block_sparse(threads):
    q, k, v = testing.make_qkv(2, 4, 2, 40, 48, 8, seed=1)
    sabi = np.array([[1, 0, -1], [2, 1, 0], [0, 2, -1]], np.int32)[None, None]
    options = {"block_shape": (16, 16), "causal": True, "q_lens": [40, 33], "kv_lens": (48, 41), "num_threads": threads}
    op = blitz_attn.block_sparse_attention
    out, lse = op(q, k, v, sabi, return_lse=True, **options)
    given = blank(out, lse)
    packed = testing.make_qkv(1, 4, 2, 40, 40, 8, seed=2)
    packed = [x[0].transpose(1, 0, 2).copy() for x in packed]
    cu = np.array([0, 17, 40])
    grads = blank(q, k, v)
    backward = blitz_attn.block_sparse_attention_backward
    short = q[:, :, :4].copy()
    ranges = np.stack([np.arange(40) // 16 * 16, np.arange(40) // 16 * 16 + 20], axis=-1)
    bias = {"attn_mask": np.random.default_rng(3).random((2, 1, 40, 48)) < 0.8, "alibi_slopes": np.float32([0.5, 0.25, 0.1, 0])}
    numbers = np.random.default_rng(4).standard_normal((1, 4, 40, 48), dtype=np.float32)
    halves = [x.astype(np.float16) for x in (q, k, v, out)]
    return {
        "block_sparse_attention": Operation(
            lambda: op(q, k, v, sabi, return_lse=True, out=given, **options), given, lambda: op(q, k[..., :7], v, sabi, **options)
        ),
        "block_sparse_attention, dense": Operation(lambda: op(q, k, v, num_threads=threads)),
        "block_sparse_attention, ranges": Operation(
            lambda: op(q, k, v, kv_ranges=ranges, num_threads=threads), refused=lambda: op(q, k, v, kv_ranges=ranges[1:], num_threads=threads)
        ),
        "block_sparse_attention, mask": Operation(
            lambda: op(q, k, v, **bias, num_threads=threads),
            refused=lambda: op(q, k, v, attn_mask=bias["attn_mask"][..., 1:], num_threads=threads),
        ),
        "block_sparse_attention, few queries": Operation(lambda: op(short, k, v, window=(-1, 0), num_threads=threads)),
        "block_sparse_attention, packed": Operation(
            lambda: op(*packed, layout="TND", cu_seqlens_q=cu, cu_seqlens_kv=cu.tolist(), num_threads=threads),
            refused=lambda: op(*packed, layout="TND", cu_seqlens_q=[0, 41], num_threads=threads),
        ),
        "block_sparse_attention_backward": Operation(
            lambda: backward(out, q, k, v, out, lse, sabi, dlse=lse, grads=grads, **options),
            grads,
            lambda: backward(out, q, k, v, out, lse[:, 1:], sabi, **options),
        ),
        "block_sparse_attention_backward, mask": Operation(lambda: backward(out, q, k, v, out, lse, **bias, num_threads=threads)),
        "block_sparse_attention_backward, biases": Operation(
            lambda: backward(out, q, k, v, out, lse, attn_mask=numbers, alibi_slopes=bias["alibi_slopes"], bias_grads=True, num_threads=threads),
            refused=lambda: backward(out, q, k, v, out, lse, attn_mask=numbers, bias_grads="learned"),
        ),
        "block_sparse_attention_backward, halves": Operation(
            lambda: backward(halves[3], *halves, lse, sabi, **{**options, "causal": False})
        ),
    }


def choosing(threads):
    q, k, v = testing.make_qkv(2, 4, 2, 70, 80, 16, seed=9)
    options = {"block_shape": (16, 16), "causal": True, "q_lens": [70, 33], "kv_lens": (80, 41), "num_threads": threads}
    op, attend = blitz_attn.select_blocks_prefill, blitz_attn.select_and_attend_prefill
    lines, sabi = select.VerticalSlash(20), np.array([[[[0, 2]] * 5]], np.int32)
    ranges = np.stack([np.arange(70) // 30 * 30, np.arange(70) // 30 * 30 + 30], axis=-1)
    scores = np.random.default_rng(9).random((2, 4, 5, 5), np.float32)
    indexer = q.transpose(0, 2, 1, 3), k[:, 0], np.ones((2, 70, 4), np.float32)
    return {
        "select_blocks_prefill": Operation(
            lambda: op(q, k, density=0.5, return_scores=True, **options), refused=lambda: op(q, k, density=0.5, chooser=select.Pooled(5), **options)
        ),
        "select_blocks_prefill, lines": Operation(lambda: op(q, k, top_p=0.8, chooser=lines, **options), refused=lambda: op(q, k, **options)),
        "select_blocks_prefill, ranges": Operation(
            lambda: op(q, k, density=0.5, kv_ranges=ranges, **options), refused=lambda: op(q, k, density=0.5, kv_ranges=ranges[1:], **options)
        ),
        "scores": Operation(
            lambda: select.scores(q, k, per_kv_head=True, **options), refused=lambda: select.scores(q, k, chooser=select.Pooled(5), **options)
        ),
        "select_tokens": Operation(
            lambda: select.select_tokens(*indexer, 9, causal=True, pool_size=3, keep_tail=True, return_scores=True, num_threads=threads),
            refused=lambda: select.select_tokens(*indexer, 9, kv_lens=[81, 1]),
        ),
        "list_from_scores": Operation(
            lambda: select.list_from_scores(scores, 70, 80, density=0.5, **options),
            refused=lambda: select.list_from_scores(scores[..., :3], 70, 80, density=0.5, **options),
        ),
        "recall": Operation(lambda: select.recall(q, k, sabi, every=2, **options), refused=lambda: select.recall(q, k, sabi, every=0, **options)),
        "output_error": Operation(
            lambda: select.output_error(q, k, v, sabi, **options), refused=lambda: select.output_error(q, k, v[:, :1], sabi, **options)
        ),
        "select_and_attend_prefill": Operation(
            lambda: attend(q, k, v, top_k=3, chooser="antidiagonal", per_kv_head=True, return_lse=True, return_sabi=True, **options),
            refused=lambda: attend(q, k, v[:, :, 1:], top_k=3, **options),
        ),
    }


# ---- Paged caches ---------------------------------------------------------------------------------------------------


def paged(threads):
    case = testing.make_paged(3, 4, 2, [9, 0, 21], 4, 8, seed=3, poison=False)
    coarse = testing.make_paged(2, 4, 2, [9, 14], 4, 8, kv_dtype="int8", kv_layout="HND", seed=4, poison=False)
    ragged = testing.make_paged(2, 4, 2, [9, 14], 4, 8, seed=5, q_lens=[2, 3], poison=False)
    options = {"num_threads": threads}
    op, select = blitz_attn.paged_attention, blitz_attn.paged_select_attention
    out, lse = op(*case.arrays, return_lse=True)
    given, csr = blank(out, lse), (*case.csr(),)
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=4, num_threads=threads)
    appending = blitz_attn.PagedPlan(csr, page_size=4, q_lens=[1, 0, 2], num_threads=threads)
    chunked = blitz_attn.PagedPlan(csr, page_size=4, q_begin=[2, 0, 30], kv_split=8, num_threads=threads)
    mask = np.random.default_rng(7).random((3, 1, 1, 21)) < 0.8
    chosen, counts = np.array([[[0, 2]] * 2, [[0, 0]] * 2, [[1, 3]] * 2], np.int32), np.array([[2, 1], [0, 0], [2, 2]])
    tokens = np.array([[[0, 5, 2]], [[8, 1, -1]], [[3, 9, 11]], [[4, 0, 7]], [[13, 12, -1]]], np.int32)
    written = [x.copy() for x in case.arrays[1:3]]
    new = [np.random.default_rng(6).standard_normal((3, 2, 8)).astype(np.float32) for _ in range(2)]
    quantised, scales = [np.zeros((6, 4, 2, 8), np.int8) for _ in range(2)], [np.zeros((6, 4, 2), np.float32) for _ in range(2)]
    values, scale = blitz_attn.quantize_kv(new[0], "int8")
    rows_of = np.resize(new[0], (6, 64))
    packed = blitz_attn.quantize_rows(rows_of, "q4_1")
    slots, append = [3, 17, 9], blitz_attn.append_paged_kv
    kept = [np.zeros((3, 8, 2, 8), np.float32) for _ in range(3)]
    summaries = {"maxblocks": kept[0], "minblocks": kept[1], "meanblocks": kept[2], "metadata_block_tables": np.array([[1], [0], [2]])}
    tables = {"block_tables": np.array([[1, 2], [3, 4], [5, 0]], np.int32), "seq_lens": [3, 7, 5]}
    return {
        "paged_attention": Operation(
            lambda: op(*case.arrays, return_lse=True, out=given, **options), given, lambda: op(*case.arrays[:4], [9, 0, 99], **options)
        ),
        "paged_attention, csr": Operation(lambda: op(*case.arrays[:3], csr, sinks=np.ones(4, np.float32), softcap=20.0, **options)),
        "paged_attention, int8": Operation(lambda: op(*coarse.arrays, **coarse.options, **options)),
        "paged_attention, ragged": Operation(lambda: op(*ragged.arrays, window=5, **ragged.options, **options)),
        "PagedPlan.attention": Operation(
            lambda: plan.attention(*case.arrays[:3], return_lse=True, out=given), given, lambda: plan.attention(out[1:], *case.arrays[1:3])
        ),
        "PagedPlan.attention, in chunks": Operation(
            lambda: chunked.attention(*case.arrays[:3], return_lse=True, out=given),
            given,
            lambda: chunked.attention(*case.arrays[:3], out=case.arrays[0]),
        ),
        "PagedPlan.attention, in chunks with a mask": Operation(
            lambda: chunked.attention(*case.arrays[:3], attn_mask=mask, return_lse=True, out=given),
            given,
            lambda: chunked.attention(*case.arrays[:3], attn_mask=mask[..., 1:]),
        ),
        "PagedPlan.select_attention": Operation(
            lambda: plan.select_attention(*case.arrays[:3], chosen, counts=counts, return_lse=True, out=given),
            given,
            lambda: plan.select_attention(*case.arrays[:3], chosen + 9, counts=counts),
        ),
        "PagedPlan.append": Operation(
            lambda: appending.append(*new, *written), tuple(written), lambda: appending.append(new[0][1:], new[1][1:], *written)
        ),
        "PagedPlan.append, summaries": Operation(
            lambda: appending.append(*new, *written, **summaries), (*written, *kept), lambda: appending.append(*new, kept[0], written[1], **summaries)
        ),
        "PagedPlan": Operation(
            lambda: blitz_attn.PagedPlan(csr, page_size=4, q_lens=[1, 0, 1]).batch, refused=lambda: blitz_attn.PagedPlan(csr, page_size=0)
        ),
        "PagedPlan, in chunks": Operation(
            lambda: blitz_attn.PagedPlan(csr, page_size=4, q_lens=[1, 0, 30], q_begin=[2, 0, 30], kv_split=8).batch,
            refused=lambda: blitz_attn.PagedPlan(csr, page_size=4, kv_split=6),
        ),
        "paged_select_attention": Operation(
            lambda: select(*case.arrays, chosen, counts=counts, return_lse=True, out=given, **options),
            given,
            lambda: select(*case.arrays, chosen + 9, counts=counts, **options),
        ),
        "paged_select_attention, tokens": Operation(
            lambda: select(*ragged.arrays, tokens, selected_size=1, **ragged.options, **options),
            refused=lambda: select(*ragged.arrays, tokens + 9, selected_size=1, **ragged.options, **options),
        ),
        "append_paged_kv": Operation(
            lambda: append(*new, *written, **tables), tuple(written), lambda: append(*new, *written, slot_mapping=[0, 1, 1])
        ),
        "append_paged_kv, int8": Operation(
            lambda: append(*new, *quantised, slot_mapping=slots, k_scale=scales[0], v_scale=scales[1]), (*quantised, *scales)
        ),
        "quantize_kv": Operation(lambda: blitz_attn.quantize_kv(new[0], "int8"), refused=lambda: blitz_attn.quantize_kv(new[0], "int9")),
        "quantize_rows": Operation(lambda: blitz_attn.quantize_rows(rows_of, "q4_1"), refused=lambda: blitz_attn.quantize_rows(rows_of, "q9_0")),
        "dequantize_rows": Operation(lambda: blitz_attn.dequantize_rows(packed, "q4_1"), refused=lambda: blitz_attn.dequantize_rows(packed, "q8_0")),
        "dequantize_kv": Operation(lambda: blitz_attn.dequantize_kv(values, scale), refused=lambda: blitz_attn.dequantize_kv(values, scale[1:])),
    }


def quest(threads):
    case = testing.make_paged(2, 4, 2, [30, 17], 4, 8, seed=7, poison=False)
    tables = np.array([[0], [1]], np.int32)
    largest, smallest, mean = (np.zeros((2, 8, 2, 8), np.float32) for _ in range(3))
    metadata = blitz_attn.quest_prefill_metadata
    metadata(case.k_cache, case.block_tables, case.seq_lens, tables, largest, smallest, meanblocks=mean)
    summaries, over = blank(largest, smallest, mean), (largest, smallest, tables, case.seq_lens)
    chosen = np.zeros((2, 2, 3), np.int32)
    paged_keys = {"k_cache": case.k_cache, "v_cache": case.v_cache, "block_tables": case.block_tables, "seq_lens": case.seq_lens}
    out = np.zeros_like(case.q)
    threaded = {"num_threads": threads}
    pairs = (largest, smallest)
    select, attend = blitz_attn.select_blocks, blitz_attn.select_and_attend
    choose, in_out, in_out_w = (
        blitz_attn.quest_block_select_paged, blitz_attn.quest_block_select_paged_in_out, blitz_attn.quest_block_select_paged_in_out_w,
    )  # fmt: skip
    sized = {"block_size": 4}
    eight, scale = blitz_attn.quantize_kv(case.k_cache, "int8")
    plan = blitz_attn.PagedPlan(case.block_tables, case.seq_lens, page_size=4, **threaded)
    return {
        "PagedPlan.select_and_attend": Operation(
            lambda: plan.select_and_attend(*case.arrays[:3], pairs, tables, k=3, dense_below=20, return_lse=True, return_selected=True, out=(out, None)),
            (out,),
            lambda: plan.select_and_attend(*case.arrays[:3], pairs, tables, k=[3, 0]),
        ),
        "PagedPlan.select_and_attend, max": Operation(lambda: plan.select_and_attend(*case.arrays[:3], method="max", budget=9)),
        "quest_prefill_metadata": Operation(
            lambda: metadata(
                case.k_cache, case.block_tables, case.seq_lens, tables, *summaries[:2], meanblocks=summaries[2], start_lens=[0, 3], **threaded
            ),
            summaries,
            lambda: metadata(case.k_cache, case.block_tables, [30, 99], tables, *summaries[:2]),
        ),
        "quest_prefill_metadata, int8": Operation(
            lambda: metadata(eight, case.block_tables, case.seq_lens, tables, *summaries[:2], k_scale=scale, **threaded),
            summaries[:2],
            lambda: metadata(eight, case.block_tables, case.seq_lens, tables, *summaries[:2]),
        ),
        "quest_block_select_paged": Operation(
            lambda: choose(case.q, *over, 3, ascending=True, **sized, **threaded), refused=lambda: choose(case.q, *over, 0)
        ),
        "quest_block_select_paged_in_out": Operation(
            lambda: in_out(case.q, largest, smallest, tables, [8, 7], chosen), (chosen,), lambda: in_out(case.q, *over, chosen[0])
        ),
        "quest_block_select_paged_in_out_w": Operation(
            lambda: in_out_w(case.q, largest, smallest, tables, [8, 7], [1, 2], chosen),
            (chosen,),
            lambda: in_out_w(case.q, *over, -5, chosen),
        ),
        "select_blocks": Operation(
            lambda: select(case.q, pairs, tables, case.seq_lens, budget=[3, 2], **sized, **threaded),
            refused=lambda: select(case.q, pairs, tables, case.seq_lens, 3, method="quests"),
        ),
        "select_blocks, max": Operation(
            lambda: select(case.q, case.k_cache, case.block_tables, case.seq_lens, 3, method="max", per_query_head=True, **threaded)
        ),
        "select_blocks, mean": Operation(lambda: select(case.q, mean, tables, case.seq_lens, 3, method="mean", recent=[1, 2], **sized, **threaded)),
        "select_blocks, ragged": Operation(
            lambda: select(np.ones((3, 4, 8), np.float32), mean, tables, case.seq_lens, 3, method="mean", q_lens=[2, 1], **sized, **threaded),
            refused=lambda: select(case.q, mean, tables, case.seq_lens, 3, method="mean", q_lens=[2, 1], **sized),
        ),
        "select_and_attend": Operation(
            lambda: attend(case.q, **paged_keys, source=pairs, metadata_block_tables=tables, k=3, out=out, **threaded),
            (out,),
            lambda: attend(case.q, **paged_keys, source=pairs, metadata_block_tables=tables, k=0, **threaded),
        ),
    }


# ---- Merging, and native sparse attention ---------------------------------------------------------------------------


def merging(_threads):
    rng = np.random.default_rng(8)
    outs = [rng.standard_normal((2, 2, 5, 8)).astype(np.float32) for _ in range(3)]
    lses = [rng.standard_normal((2, 2, 5)).astype(np.float32) for _ in range(3)]
    given = blank(outs[0], lses[0])
    two, many = blitz_attn.merge_states, blitz_attn.merge_states_n
    return {
        "merge_states": Operation(
            lambda: two(outs[0], lses[0], outs[1], lses[1], out=given[0], lse_out=given[1]),
            given,
            lambda: two(outs[0], lses[0], outs[1], lses[1][1:]),
        ),
        "merge_states_n": Operation(lambda: many(outs, lses), refused=lambda: many(outs, lses[1:])),
        "merge_states_tree": Operation(
            lambda: blitz_attn.merge_states_tree(outs, lses), refused=lambda: blitz_attn.merge_states_tree(outs, lses[1:])
        ),
    }


def native(threads):
    rng = np.random.default_rng(9)
    tokens, block, stride = 40, 8, 4
    q, k, v = (rng.standard_normal((1, tokens, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    w_k, w_v, w_gate = ((rng.standard_normal(shape) / 8).astype(np.float32) for shape in ((2, 8, 8), (2, 8, 8), (4, 3, 8)))
    sizes = {"compress_block_size": block, "num_selected_blocks": 3, "window_size": 6, "num_threads": threads}
    weights = {"w_k_compress": w_k, "w_v_compress": w_v, "gate_proj_weight": w_gate}
    out = np.zeros_like(q)
    result, context = nsa.nsa(q, k, v, return_context=True, **sizes, **weights)
    packed = [x[0] for x in (q, k, v)]
    k_cmp, v_cmp = nsa.compress_kv(k, v, block, w_k, w_v, stride=stride)
    o_cmp, lse_cmp = nsa.compressed_attention(q, k_cmp, v_cmp, block, stride=stride, return_lse=True)
    chosen = nsa.score_and_select_blocks(q, k_cmp, 3, block)
    o_slc, lse_slc = nsa.selected_attention(q, k, v, chosen, block, return_lse=True)
    o_win, lse_win = nsa.window_attention(q, k, v, 6, return_lse=True)
    gates = nsa.compute_gates(q, w_gate)
    branches, options = (o_cmp, o_slc, o_win), {"num_threads": threads}
    short = q[:, :-1]

    def decoded(values):
        cache = nsa.NsaCache(**sizes, **weights)
        cache.append(k, values)
        cache.append(k[:, :9], values[:, :9])
        cache.crop(k.shape[1])
        cache.reorder(range(len(k)))
        return cache.attend(q[:, -3:], out=last)

    last = np.zeros_like(q[:, -3:])
    return {
        "NsaCache": Operation(lambda: decoded(v), (last,), lambda: decoded(v[:, 1:])),
        "nsa": Operation(lambda: nsa.nsa(q, k, v, out=out, **sizes, **weights), (out,), lambda: nsa.nsa(q, k, v[:, 1:], **sizes)),
        "nsa, mslk": Operation(lambda: nsa.nsa(q, k, v, mode="mslk", q_tile_size=16, **sizes)),
        "nsa, packed": Operation(lambda: nsa.nsa(*packed, cu_seqlens=[0, 13, tokens], **sizes)),
        "nsa_backward": Operation(lambda: tuple(nsa.nsa_backward(result, context)), refused=lambda: nsa.nsa_backward(result[:, 1:], context)),
        "compress_kv": Operation(lambda: nsa.compress_kv(k, v, block, w_k, w_v, stride=stride, **options), refused=lambda: nsa.compress_kv(k, v, 0, **options)),
        "compress_kv_backward": Operation(
            lambda: nsa.compress_kv_backward(k_cmp, v_cmp, k, v, block, w_k, w_v, stride=stride, **options),
            refused=lambda: nsa.compress_kv_backward(k_cmp[:, 1:], v_cmp, k, v, block, w_k, w_v),
        ),
        "compressed_attention": Operation(
            lambda: nsa.compressed_attention(q, k_cmp, v_cmp, block, stride=stride, return_lse=True, **options),
            refused=lambda: nsa.compressed_attention(q, k_cmp, v_cmp[:, 1:], block, stride=stride),
        ),
        "compressed_attention_backward": Operation(
            lambda: nsa.compressed_attention_backward(o_cmp, q, k_cmp, v_cmp, o_cmp, lse_cmp, block, stride=stride, **options),
            refused=lambda: nsa.compressed_attention_backward(short, q, k_cmp, v_cmp, o_cmp, lse_cmp, block, stride=stride),
        ),
        "score_and_select_blocks": Operation(
            lambda: nsa.score_and_select_blocks(q, k_cmp, 3, block, **options), refused=lambda: nsa.score_and_select_blocks(q, k_cmp, 0, block)
        ),
        "selected_attention": Operation(
            lambda: nsa.selected_attention(q, k, v, chosen, block, return_lse=True, **options),
            refused=lambda: nsa.selected_attention(q, k, v, chosen + 90, block),
        ),
        "selected_attention_backward": Operation(
            lambda: nsa.selected_attention_backward(o_slc, q, k, v, o_slc, lse_slc, chosen, block, **options),
            refused=lambda: nsa.selected_attention_backward(short, q, k, v, o_slc, lse_slc, chosen, block),
        ),
        "window_attention": Operation(
            lambda: nsa.window_attention(q, k, v, 6, return_lse=True, **options), refused=lambda: nsa.window_attention(q, k, v, -2)
        ),
        "window_attention_backward": Operation(
            lambda: nsa.window_attention_backward(o_win, q, k, v, o_win, lse_win, 6, **options),
            refused=lambda: nsa.window_attention_backward(short, q, k, v, o_win, lse_win, 6),
        ),
        "compute_gates": Operation(lambda: nsa.compute_gates(q, w_gate, **options), refused=lambda: nsa.compute_gates(q, w_gate[1:])),
        "gate_and_combine": Operation(
            lambda: nsa.gate_and_combine(*branches, gates, **options), refused=lambda: nsa.gate_and_combine(*branches, gates[:, 1:])
        ),
        "gating_backward": Operation(
            lambda: nsa.gating_backward(q, o_cmp, *branches, gates, w_gate, **options),
            refused=lambda: nsa.gating_backward(q, short, *branches, gates, w_gate),
        ),
    }


# ---- Upstream's interfaces, and the settings ---------------------------------------------------------------------------


def compatible(_threads):
    q, k, v = testing.make_qkv(1, 4, 2, 40, 48, 8, seed=10)
    rows = [np.ascontiguousarray(x[:, :, :40].transpose(0, 2, 1, 3)) for x in (q, k, v)]
    rng = np.random.default_rng(11)
    w_k, w_v, w_gate = ((rng.standard_normal(shape) / 8).astype(np.float32) for shape in ((2, 8, 8), (2, 8, 8), (4, 3, 8)))
    bsa, sizes, cu = blitz_sparse_attention, (8, 3, 6), np.array([0, 13, 40])
    packed = [x[0] for x in rows]
    k_cmp, v_cmp = mslk.compress_kv(*rows[1:], 8, w_k, w_v)
    packed_cmp, _ = mslk.fused_compress_kv(*packed[1:], 8, cu_seqlens=cu)
    gates = mslk.compute_gates(rows[0], w_gate)
    branches = [rng.standard_normal(rows[0].shape).astype(np.float32) for _ in range(3)]
    options = {"input_layout": "BNSD", "num_heads": 4, "num_key_value_heads": 2, "softmax_lse_flag": True}
    return {
        "blitz_sparse_attention": Operation(
            lambda: bsa(q, k, v, actual_seq_lengths_kv=[41], sparse_mode=2, **options), refused=lambda: bsa(q, k, v, sparse_mode=1, **options)
        ),
        "mslk.nsa": Operation(lambda: mslk.nsa(*packed, *sizes, q_tile_size=16, cu_seqlens=cu), refused=lambda: mslk.nsa(*packed, *sizes)),
        "mslk.nsa_forward": Operation(
            lambda: mslk.nsa_forward(*rows, *sizes, w_k, w_v, w_gate), refused=lambda: mslk.nsa_forward(*rows, *sizes, w_k, w_v[1:])
        ),
        "mslk.compress_kv": Operation(lambda: mslk.compress_kv(*rows[1:], 8, w_k, w_v), refused=lambda: mslk.compress_kv(*rows[1:], 0)),
        "mslk.fused_compress_kv": Operation(
            lambda: mslk.fused_compress_kv(*packed[1:], 8, w_k, w_v, cu), refused=lambda: mslk.fused_compress_kv(*packed[1:], 8, cu_seqlens=[0, 99])
        ),
        "mslk.fused_compress_kv_backward": Operation(
            lambda: mslk.fused_compress_kv_backward(k_cmp, v_cmp, *rows[1:], 8, w_k, w_v),
            refused=lambda: mslk.fused_compress_kv_backward(k_cmp[:, 1:], v_cmp, *rows[1:], 8, w_k, w_v),
        ),
        "mslk.score_and_select_blocks": Operation(
            lambda: mslk.score_and_select_blocks(rows[0], k_cmp, 3, 8, q_tile_size=16),
            refused=lambda: mslk.score_and_select_blocks(rows[0], k_cmp, 0, 8),
        ),
        "mslk.fused_score_and_select_blocks": Operation(
            lambda: mslk.fused_score_and_select_blocks(packed[0], packed_cmp, 3, 8, q_tile_size=16, cu_seqlens=cu),
            refused=lambda: mslk.fused_score_and_select_blocks(packed[0], packed_cmp, 0, 8, cu_seqlens=cu),
        ),
        "mslk.compute_gates": Operation(lambda: mslk.compute_gates(rows[0], w_gate), refused=lambda: mslk.compute_gates(rows[0], w_gate[1:])),
        "mslk.gate_and_combine": Operation(
            lambda: mslk.gate_and_combine(*branches, gates), refused=lambda: mslk.gate_and_combine(*branches, gates[:, 1:])
        ),
        "mslk.fused_gate_and_combine": Operation(
            lambda: mslk.fused_gate_and_combine(rows[0], *branches, w_gate),
            refused=lambda: mslk.fused_gate_and_combine(rows[0], *branches, w_gate[1:]),
        ),
        "mslk.fused_gating_backward": Operation(
            lambda: mslk.fused_gating_backward(rows[0], branches[0], *branches, gates, w_gate),
            refused=lambda: mslk.fused_gating_backward(rows[0], branches[0], *branches, gates[:, 1:], w_gate),
        ),
    }


def settings(_threads):
    """Operations that return settings, which an earlier call could have left changed."""

    def capped():
        with blitz_attn.isa("portable"):
            pass
        return np.array(blitz_attn.isa().level)

    def threads():
        blitz_attn.set_num_threads(3)
        three = blitz_attn.get_num_threads()
        blitz_attn.set_num_threads(None)
        return np.array(three)

    return {
        "isa": Operation(capped, refused=lambda: blitz_attn.isa("pdp11")),
        "isa_levels": Operation(lambda: np.array(blitz_attn.isa_levels(available=True))),
        "kernels": Operation(lambda: np.array(list(blitz_attn.kernels().items())), refused=lambda: blitz_attn.kernels("pdp11")),
        "set_num_threads": Operation(threads, refused=lambda: blitz_attn.set_num_threads(-1)),
        "get_num_threads": Operation(lambda: np.array(blitz_attn.get_num_threads())),
    }


GROUPS = (block_sparse, choosing, paged, quest, merging, native, compatible, settings)


def operations(threads=1):
    """All operations by name: that of the function, or of the class and method. In some names, a comma and a remark follow."""
    return {name: operation for group in GROUPS for name, operation in group(threads).items()}
