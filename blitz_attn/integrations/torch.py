"""The library for torch: operators on CPU tensors that torch differentiates and compiles, and FlexAttention's masks as block lists.

A function that is named like one of the library's functions takes the same arguments except these: `q_begin` (which only `select_tokens`
has), `q_total`, `kv_split`, `out`, `out_dtype`, `dtype`, `kv_dtype` (which only the functions over pages have, for caches of bytes) and
`return_sabi`. `nsa` also lacks `return_context` and the arguments for decoding (`compressed_kv`, `cu_seqlens_q`, `kv_lens`). Where you need
these arguments, call the library's own functions, which take tensors, too, but only tensors that need no gradient. Caches, and q, k and v
of up to four axes, are copied only if their last axis is not contiguous, or if torch.autocast casts them. The library computes the
gradients. Of these, only the gradient of `sinks` can be differentiated again. All functions that attend or choose, except `nsa`, call
operators (``torch.ops.blitz_attn``), which `torch.compile` takes into its graph.
"""

from ._torch import attention as _attention
from ._torch import block_mask as _block_mask
from ._torch import native as _native
from ._torch import paged as _paged
from ._torch import tokens as _tokens
from ._torch.attention import *
from ._torch.block_mask import *
from ._torch.native import *
from ._torch.paged import *
from ._torch.tensors import expect_tensors as _expect_tensors  # noqa: F401 - for other integrations, as _rows is
from ._torch.tensors import rows as _rows  # noqa: F401
from ._torch.tokens import *

__all__: list[str] = []
__all__ += _attention.__all__
__all__ += _block_mask.__all__
__all__ += _native.__all__
__all__ += _paged.__all__
__all__ += _tokens.__all__
