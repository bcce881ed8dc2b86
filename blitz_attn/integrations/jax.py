"""The library for JAX: attention on CPU arrays that `jax.jit` compiles into its computations, and that JAX differentiates and maps.

A function that is named like one of the library's functions takes the same arguments except these: `kv_split`, `out`, `out_dtype`, `dtype`,
`kv_dtype` and `return_sabi`. Paged calls and those that choose blocks also lack `q_begin` and `q_total`, and `nsa` lacks `return_context`
and the arguments for decoding (`compressed_kv`, `cu_seqlens_q`, `kv_lens`). Inside a transform of JAX, the library works on the memory of
the computation. Outside, the library's own functions are called, which take JAX arrays, too. There are first derivatives in reverse mode
(`jax.grad`, `jax.vjp`). JAX refuses forward mode (`jax.jvp`, `jax.linearize`) and `jax.linear_transpose`. `jax.vmap` computes the entries
of a mapped call one after the other. The functions require JAX 0.6.1 or later, and run on the CPU.
"""

from ._jax import attention as _attention
from ._jax import native as _native
from ._jax import paged as _paged
from ._jax import tokens as _tokens
from ._jax.attention import *
from ._jax.native import *
from ._jax.paged import *
from ._jax.tokens import *

__all__: list[str] = []
__all__ += _attention.__all__
__all__ += _native.__all__
__all__ += _paged.__all__
__all__ += _tokens.__all__
