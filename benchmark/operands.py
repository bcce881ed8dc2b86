"""Queries, keys and values to measure on, in every layout, and the dense attention that sparse attention is measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _peers import UnavailableError, imported_torch, torch_tensor
from blitz_attn import testing


@dataclass
class Operands:
    """One problem's arrays as a call takes them (`q`, `k`, `v`, `out`) and as (B, H, S, D) views of the same memory."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    views: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)  # layout and what it needs, dtype of bare bits, scale, causal

    @property
    def bits(self) -> str | None:
        """The dtype's name where the arrays are bare bits, else None."""
        return self.options.get("dtype")

    def call(self, sabi: np.ndarray | None, block_shape: tuple[int, int], threads: int, **more: Any) -> Callable[[], Any]:
        """A call of the library that writes into `out`."""

        def run():
            return blitz_attn.block_sparse_attention(
                self.q, self.k, self.v, sabi, block_shape=block_shape, out=self.out, num_threads=threads, **self.options, **more
            )

        return run


def _in_layout(x: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """A (B, H, S, D) array laid out as `layout`, and a (B, H, S, D) view of that."""
    laid = testing.to_layout(x, layout)
    batch, heads, tokens, dim = x.shape
    return laid, laid if layout == "BNSD" else laid.reshape(batch, tokens, heads, dim).swapaxes(1, 2)


def lay_out(q, k, v, layout: str, dtype: str, **options: Any) -> Operands:
    """Operands of the (B, H, S, D) arrays `q`, `k`, `v` in `layout`; `options` go to every call."""
    options["layout"] = layout
    if q.dtype == np.uint16:
        options["dtype"] = dtype
    if layout == "BSH":
        options |= {"num_heads": q.shape[1], "num_kv_heads": k.shape[1]}
    if layout == "TND":
        options["cu_seqlens_q"] = np.arange(q.shape[0] + 1, dtype=np.int64) * q.shape[2]
        options["cu_seqlens_kv"] = np.arange(k.shape[0] + 1, dtype=np.int64) * k.shape[2]
    laid = [_in_layout(x, layout) for x in (q, k, v, np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype))]
    arrays, views = zip(*laid, strict=True)
    return Operands(*arrays, views, dtype, options)


def draw(batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, dtype: str, layout: str, seed: int) -> Operands:
    """Normal random operands. Never zeros: processors that save power on them would be timed too fast."""
    q, k, v = testing.make_qkv(batch, heads, kv_heads, tokens, tokens, head_dim, dtype=dtype, seed=seed)
    return lay_out(q, k, v, layout, dtype)


def _torch_dense(operands: Operands, threads: int) -> Callable[[], Any]:
    try:
        torch = imported_torch()
    except UnavailableError:
        raise SystemExit("benchmark.py: --reference torch: torch is not installed: pip install torch, or use --reference own") from None

    torch.set_num_threads(threads)
    q, k, v = (torch_tensor(x, operands.dtype) for x in operands.views[:3])
    options = {"is_causal": bool(operands.options.get("causal")), "scale": operands.options.get("scale")}
    if k.shape[1] != q.shape[1]:
        options["enable_gqa"] = True

    def run():
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return run


def dense_call(operands: Operands, reference: str, threads: int) -> Callable[[], Any]:
    """Dense attention over the operands: `own` writes into `operands.out`, `torch` is torch's scaled_dot_product_attention."""
    return _torch_dense(operands, threads) if reference == "torch" else operands.call(None, (128, 128), threads)
