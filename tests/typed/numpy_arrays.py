"""The types that checkers must find for calls with NumPy arrays: results by assert_type, and errors in some lines. Nothing here runs."""

from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt
from numpy import ndarray

import blitz_attn
from blitz_attn import merge_states, merge_states_n, merge_states_tree, nsa, sabi, select
from blitz_attn.distributed import Alone, ContextParallelPlan, DecodePlan, context_parallel_attention, dispatch

Floats = npt.NDArray[np.float32]
Pair = tuple[ndarray, ndarray]


def block_sparse(q: Floats, k: Floats, v: Floats, lists: npt.NDArray[np.int32], flag: bool) -> None:
    assert_type(blitz_attn.block_sparse_attention(q, k, v), ndarray)
    assert_type(blitz_attn.block_sparse_attention(q, k, v, lists, block_shape=(64, 64), causal=True, q_lens=[3, 4]), ndarray)
    assert_type(blitz_attn.block_sparse_attention(q, k, v, sabi.causal(512), return_lse=False), ndarray)
    out, lse = blitz_attn.block_sparse_attention(q, k, v, kv_lens=np.array([5]), sinks=[0.5], out_dtype="float32", return_lse=True)
    assert_type((out, lse), tuple[ndarray, ndarray])
    assert_type(blitz_attn.block_sparse_attention(q, k, v, out=(out, None), return_lse=True), Pair)
    assert_type(blitz_attn.block_sparse_attention(q, k, v, return_lse=flag), Any)
    assert_type(blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, dlse=lse), tuple[ndarray, ndarray, ndarray])
    grads = blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, attn_mask=out, bias_grads=True)
    assert_type(grads, tuple[ndarray, ndarray, ndarray, ndarray | None, ndarray | None])


def kinds_of_arrays(
    exact: np.ndarray[tuple[int, int, int, int], np.dtype[np.float16]], mapped: np.memmap[Any, np.dtype[np.float32]], memory: memoryview
) -> None:
    """Results are plain arrays. Log-sum-exps and lists do not have the shape and dtype of q."""
    assert_type(blitz_attn.block_sparse_attention(exact, exact, exact), ndarray)
    assert_type(blitz_attn.block_sparse_attention(mapped, mapped, mapped, return_lse=True), Pair)
    assert_type(blitz_attn.block_sparse_attention(memory, exact, exact), ndarray)


def mistakes(q: Floats, k: Floats, v: Floats) -> None:
    blitz_attn.block_sparse_attention([[1.0]], k, v)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    blitz_attn.block_sparse_attention(q, k)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    blitz_attn.block_sparse_attention(q, k, v, casual=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    blitz_attn.block_sparse_attention(q, k, v, causal="yes")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    blitz_attn.block_sparse_attention(q, k, v, layout="BSHD")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    blitz_attn.block_sparse_attention(q, k, v, q_lens="12")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    blitz_attn.block_sparse_attention(q, k, v, dtype=32)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    out, lse = blitz_attn.block_sparse_attention(q, k, v, return_lse=True)
    print(blitz_attn.block_sparse_attention(q, k, v, return_lse=True).shape)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    merge_states(out, lse, out)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    nsa.window_attention(q, k, v, 2.5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    nsa.NsaCache(window=64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    blitz_attn.append_paged_kv(k, v, k, [0.5], slot_mapping=[1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sabi.union(1.5, None)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def pages(q: Floats, k_cache: Floats, v_cache: Floats, tables: npt.NDArray[np.int32], selected: npt.NDArray[np.int32]) -> None:
    assert_type(blitz_attn.append_paged_kv(q, q, k_cache, v_cache, block_tables=tables, seq_lens=[4], k_scale=0.5), None)
    values, scale = blitz_attn.quantize_kv(k_cache, "int8")
    assert_type(blitz_attn.dequantize_kv(values, scale), ndarray)
    assert_type(blitz_attn.paged_attention(q, k_cache, v_cache, tables, [40, 48]), ndarray)
    assert_type(blitz_attn.paged_attention(q, k_cache, v_cache, (tables, tables, [3]), kv_split=32, return_lse=True), Pair)
    assert_type(blitz_attn.paged_select_attention(q, k_cache, v_cache, tables, [40], selected, counts=selected), ndarray)
    assert_type(blitz_attn.paged_select_attention(q, k_cache, v_cache, tables, [40], selected, return_lse=True), Pair)
    plan = blitz_attn.PagedPlan(tables, [40, 48], page_size=16, dtype=np.dtype(np.float32))
    assert_type(plan.append(q, q, k_cache, v_cache), None)
    assert_type(plan.attention(q, k_cache, v_cache, k_scale=0.5), ndarray)
    assert_type(plan.attention(q, k_cache, v_cache, return_lse=True), Pair)
    assert_type(plan.select_attention(q, k_cache, v_cache, selected), ndarray)
    assert_type(plan.select_attention(q, k_cache, v_cache, selected, counts=selected, return_lse=True), Pair)
    assert_type(plan.select_and_attend(q, k_cache, v_cache, (k_cache, k_cache), tables, k=3), ndarray)
    assert_type(plan.select_and_attend(q, k_cache, v_cache, budget=64, method="max", return_lse=True), Pair)
    assert_type(plan.select_and_attend(q, k_cache, v_cache, k=[3], method="max", return_selected=True), tuple[ndarray, ...])
    assert_type(plan.batch, int)


def quest(q: Floats, k_cache: Floats, tables: npt.NDArray[np.int32], selected: npt.NDArray[np.int32], flag: bool) -> None:
    assert_type(blitz_attn.quest_prefill_metadata(k_cache, tables, [40], tables, k_cache, k_cache), None)
    assert_type(blitz_attn.quest_block_select_paged(q, k_cache, k_cache, tables, [40], 3), ndarray)
    assert_type(blitz_attn.quest_block_select_paged_in_out(q, k_cache, k_cache, tables, [40], selected), None)
    assert_type(blitz_attn.quest_block_select_paged_in_out_w(q, k_cache, k_cache, tables, [40], 0, selected), None)
    assert_type(blitz_attn.select_blocks(q, (k_cache, k_cache), tables, [40], 3), Pair)
    assert_type(blitz_attn.select_blocks(q, k_cache, tables, [40], 3, return_scores=True), tuple[ndarray, ndarray, ndarray])
    assert_type(blitz_attn.select_blocks(q, k_cache, tables, [40], 3, return_scores=flag), tuple[Any, ...])
    assert_type(blitz_attn.select_and_attend(q, k_cache, k_cache, tables, [40], k=3, method="max"), ndarray)
    assert_type(blitz_attn.select_and_attend(q, k_cache, k_cache, tables, [40], k=3, method="max", return_lse=True), Pair)
    out, chosen, counts = blitz_attn.select_and_attend(q, k_cache, k_cache, tables, [40], k=3, method="max", return_selected=True)
    assert_type((out, chosen, counts), tuple[ndarray, ndarray, ndarray])


def prefill(q: Floats, k: Floats, v: Floats) -> None:
    assert_type(blitz_attn.select_blocks_prefill(q, k, top_p=0.9, causal=True), sabi.BlockList)
    assert_type(blitz_attn.select_blocks_prefill(q, k, density=[0.5, 0.25], return_scores=True), tuple[sabi.BlockList, ndarray])
    assert_type(select.scores(q, k, chooser=select.Antidiagonal(stride=8)), ndarray)
    assert_type(select.list_from_scores(q, 512, top_k=4, block_shape=(64, 64)), sabi.BlockList)
    assert_type(blitz_attn.select_and_attend_prefill(q, k, v, density=0.5), ndarray)
    assert_type(blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, return_lse=True), Pair)
    assert_type(blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, return_sabi=True), tuple[ndarray, ...])
    assert_type(select.recall(q, k, sabi.causal(512)), ndarray)
    assert_type(select.output_error(q, k, v, sabi.causal(512), attn_mask=q), ndarray)


def lists(mask: npt.NDArray[np.bool_], flag: bool) -> None:
    assert_type(sabi.causal(512, block_shape=(64, 64), dtype="uint16"), sabi.BlockList)
    assert_type(sabi.from_block_mask(mask), ndarray)
    assert_type(sabi.from_block_mask([[True, False]], dtype=np.int16), ndarray)
    assert_type(sabi.from_block_mask(mask, block_shape=(64, 64)), sabi.BlockList)
    assert_type(sabi.union(sabi.causal(512), [[[[0, 1]]]]), sabi.BlockList)
    assert_type(sabi.union(np.array([[0, 1]]), [[0, 1]]), ndarray)
    assert_type(sabi.transpose(sabi.causal(512), 4).block_shape, tuple[int, int])
    assert_type(sabi.to_csr(sabi.dense(512)), Pair)
    assert_type(sabi.density(sabi.causal(512), 4), float)
    assert_type(sabi.density(sabi.causal(512), 4, per_head=True), ndarray)
    assert_type(sabi.balance(sabi.causal(512), per_head=flag), float)
    assert_type(sabi.picture(sabi.causal(512)), str)
    assert_type(sabi.from_function(lambda b, h, i, j: i >= j, 512).sabi, sabi.BlockList)


def merging(out: Floats, lse: Floats, states: list[tuple[ndarray, ndarray]]) -> None:
    assert_type(merge_states(out, lse, out, lse), Pair)
    assert_type(merge_states_n([out, out], [lse, lse], dtype="float32"), Pair)
    assert_type(merge_states_n(out, lse), Pair)
    assert_type(merge_states_tree((out for out, _ in states), [lse for _, lse in states]), Pair)


def native(q: Floats, k: Floats, v: Floats, w: Floats, mode: Literal["paper", "mslk"]) -> None:
    assert_type(nsa.nsa(q, k, v, window_size=64, mode=mode), ndarray)
    out, context = nsa.nsa(q, k, v, w_k_compress=w, return_context=True)
    assert_type(out, ndarray)
    assert_type(context, nsa.NSAContext[ndarray])
    grads = nsa.nsa_backward(out, context)
    assert_type(grads.dq, ndarray)
    assert_type(grads.dw_k_compress, ndarray | None)
    k_cmp, v_cmp = nsa.compress_kv(k, v, 64)
    assert_type((k_cmp, v_cmp), tuple[ndarray, ndarray])
    assert_type(nsa.compress_kv_backward(k_cmp, v_cmp, k, v, 64, w), tuple[ndarray, ndarray, ndarray | None, ndarray | None])
    assert_type(nsa.compressed_attention(q, k_cmp, v_cmp, 64), ndarray)
    _, lse = nsa.compressed_attention(q, k_cmp, v_cmp, 64, return_lse=True)
    assert_type(nsa.compressed_attention_backward(out, q, k_cmp, v_cmp, out, lse, 64), tuple[ndarray, ndarray, ndarray])
    chosen = nsa.score_and_select_blocks(q, k_cmp, 4, 64, lse=lse)
    assert_type(nsa.selected_attention(q, k, v, chosen, 64, return_lse=True), Pair)
    assert_type(nsa.selected_attention_backward(out, q, k, v, out, lse, chosen, 64), tuple[ndarray, ndarray, ndarray])
    assert_type(nsa.window_attention(q, k, v, 64, causal=True), ndarray)
    assert_type(nsa.window_attention_backward(out, q, k, v, out, lse, 64), tuple[ndarray, ndarray, ndarray])
    gates = nsa.compute_gates(q, w)
    assert_type(nsa.gate_and_combine(out, out, out, gates), ndarray)
    assert_type(nsa.gating_backward(q, out, out, out, out, gates), tuple[ndarray, ndarray, ndarray, ndarray | None, ndarray | None])
    cache = nsa.NsaCache(window_size=64, num_selected_blocks=8)
    cache.append(k, v, [3])
    assert_type(cache.attend(q, gates=gates), ndarray)
    assert_type(cache.lens, ndarray)


def ranks(q: Floats, k: Floats, v: Floats, k_cache: Floats, tables: npt.NDArray[np.int64]) -> None:
    plan = ContextParallelPlan(None, 512, comm=Alone())
    assert_type(dispatch(q, plan), ndarray)
    assert_type(context_parallel_attention(q, k, v, plan), Pair)
    assert_type(context_parallel_attention(q, k, v, plan, return_lse=False, comm_type="p2p"), ndarray)
    decode = DecodePlan(tables, [40], page_size=16, comm=Alone())
    assert_type(decode.attention(q, k_cache, k_cache), ndarray)
    assert_type(decode.attention(q, k_cache, k_cache, return_lse=True), Pair)
    assert_type(blitz_attn.distributed.decode_context_parallel_attention(q, k_cache, k_cache, tables, [40], return_lse=True), Pair)
    assert_type(blitz_attn.distributed.nsa(q, k, v, window_size=64, overlap=False), ndarray)
