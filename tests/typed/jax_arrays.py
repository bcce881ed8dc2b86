"""The types that checkers must find for calls with JAX arrays. Nothing here runs. `make lint` checks this file where JAX is installed."""

from typing import assert_type

import jax
import numpy as np

import blitz_attn
from blitz_attn import merge_states_n
from blitz_attn.integrations import jax as of_jax


def arrays(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array) -> None:
    assert_type(blitz_attn.block_sparse_attention(q, k, v), jax.Array)
    assert_type(blitz_attn.block_sparse_attention(q, k, v, dtype=jax.numpy.bfloat16, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(blitz_attn.select_blocks(q, k, tables, tables, 3), tuple[np.ndarray, np.ndarray])
    assert_type(merge_states_n([q, q], [k, k]), tuple[jax.Array, jax.Array])


def in_jit(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array) -> None:
    assert_type(of_jax.block_sparse_attention(q, k, v, q_begin=3), jax.Array)
    assert_type(of_jax.block_sparse_attention(q, k, v, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(of_jax.dot_product_attention(q, k, v, is_causal=True), jax.Array)
    assert_type(of_jax.dot_product_attention(q, k, v, return_residual=True), tuple[jax.Array, jax.Array])
    assert_type(of_jax.select_and_attend_prefill(q, k, v, density=0.5), jax.Array)
    assert_type(of_jax.paged_attention(q, k, v, tables, tables, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(of_jax.paged_select_attention(q, k, v, tables, tables, tables), jax.Array)
    assert_type(of_jax.nsa(q, k, v), jax.Array)
