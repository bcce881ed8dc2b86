"""The library for JAX: attention on CPU arrays that `jax.jit` compiles into its computations, and that JAX differentiates and maps.

The functions have the names of the library's functions, and their arguments but these: `kv_split`, `out`, `out_dtype`, `dtype`, `kv_dtype`,
`return_sabi`, `q_begin` and `q_total` of paged calls and of choosing, and of `nsa` `return_context` and what it decodes with
(`compressed_kv`, `cu_seqlens_q`, `kv_lens`). Inside a transform of JAX, the library works on the memory of the computation. Outside, the
functions are those of the library itself, which take JAX arrays, too. Derivatives are those of reverse mode, once: `jax.grad`, `jax.vjp`.
JAX refuses those of forward mode (`jax.jvp`, `jax.linearize`), and `jax.linear_transpose`. `jax.vmap` maps a call, one entry after the
other. They require JAX 0.6.1 or later, and run on the CPU.
"""

from ._jax.attention import block_sparse_attention, dot_product_attention, select_and_attend_prefill
from ._jax.native import nsa
from ._jax.paged import paged_attention, paged_select_attention

__all__ = [
    "block_sparse_attention",
    "dot_product_attention",
    "nsa",
    "paged_attention",
    "paged_select_attention",
    "select_and_attend_prefill",
]
