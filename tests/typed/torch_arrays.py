"""The types that checkers must find for calls with torch tensors. Nothing here runs. `make lint` checks the file if torch is there."""

from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor

import blitz_attn
from blitz_attn import merge_states, merge_states_n, nsa, select
from blitz_attn.integrations import torch as of_torch


def tensors(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, array: np.ndarray, weight: torch.nn.Parameter, flag: bool) -> None:
    assert_type(blitz_attn.block_sparse_attention(q, k, v), Tensor)
    assert_type(blitz_attn.block_sparse_attention(q, k, v, q_lens=tables, sinks=q, out_dtype=torch.float32), Tensor)
    out, lse = blitz_attn.block_sparse_attention(q, k, v, array, attn_mask=q, return_lse=True)
    assert_type((out, lse), tuple[Tensor, Tensor])
    assert_type(blitz_attn.block_sparse_attention(q, k, v, return_lse=flag), Any)
    assert_type(blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse), tuple[Tensor, Tensor, Tensor])
    assert_type(blitz_attn.paged_attention(q, k, v, tables, tables, return_lse=True), tuple[Tensor, Tensor])
    plan = blitz_attn.PagedPlan(tables, tables, page_size=16)
    assert_type(plan.attention(q, k, v), Tensor)
    assert_type(plan.select_and_attend(q, k, v, k=3, method="max", return_selected=True), tuple[Tensor, ...])
    assert_type(blitz_attn.quest_block_select_paged(q, k, k, tables, tables, 3), Tensor)
    assert_type(blitz_attn.select_blocks(q, k, tables, tables, 3), tuple[Tensor, Tensor])
    assert_type(blitz_attn.select_and_attend(q, k, v, tables, tables, k=3, method="max", return_lse=True), tuple[Tensor, Tensor])
    assert_type(blitz_attn.select_blocks_prefill(q, k, top_p=0.9), Tensor)
    assert_type(select.list_from_scores(select.scores(q, k), 512, density=0.5), Tensor)
    assert_type(merge_states(out, lse, out, lse), tuple[Tensor, Tensor])
    assert_type(merge_states_n([out, out], [lse, lse]), tuple[Tensor, Tensor])
    assert_type(merge_states_n(torch.stack([out, out]), torch.stack([lse, lse])), tuple[Tensor, Tensor])
    result, context = nsa.nsa(q, k, v, w_k_compress=weight, return_context=True)
    assert_type(result, Tensor)
    assert_type(nsa.nsa_backward(result, context).dgates, Tensor | None)


def torch_operators(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, flag: bool) -> None:
    assert_type(of_torch.block_sparse_attention(q, k, v, tables, block_shape=(64, 64)), Tensor)
    assert_type(of_torch.block_sparse_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(of_torch.block_sparse_attention(q, k, v, return_lse=flag), Any)
    assert_type(of_torch.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
    assert_type(of_torch.scaled_dot_product_attention(q, k, v, None, 0.0, True, return_lse=True), tuple[Tensor, Tensor])
    assert_type(of_torch.select_and_attend_prefill(q, k, v, density=0.5, return_lse=True), tuple[Tensor, Tensor])
    assert_type(of_torch.paged_attention(q, k, v, tables, tables), Tensor)
    assert_type(of_torch.paged_select_attention(q, k, v, tables, tables, tables, return_lse=True), tuple[Tensor, Tensor])
    assert_type(of_torch.nsa(q, k, v, window_size=64), Tensor)
