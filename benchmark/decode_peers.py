"""The same decode step by other libraries, where they are installed: each over its own favourite form of the same operands.

All of them want K and V of a request in one piece, so they are given that; none of them reads pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from _peers import Fetch, Step, UnavailableError, imported_torch, onnx_bound, onnx_session, openvino_sdpa, torch_tensor
from paged_operands import Decode


class Pieces:
    """K and V of a step in one piece, (B, H_kv, S, D), gathered once for all peers. Requests of different lengths: one piece each."""

    def __init__(self, step: Decode):
        if step.cache.scales:
            raise UnavailableError("no quantised caches")
        self.step = step
        self.ragged = len(set(step.lengths.tolist())) > 1
        requests = range(len(step.lengths))
        groups = [[b] for b in requests] if self.ragged else [list(requests)]
        self.groups = [(b[0], b[-1] + 1, *(np.stack([step.request(i, which) for i in b]) for which in ("k", "v"))) for b in groups]

    def only(self) -> tuple[np.ndarray, np.ndarray]:
        if self.ragged:
            raise UnavailableError("no requests of different lengths in one call")
        return self.groups[0][2:]


def torch_sdpa(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """torch.nn.functional.scaled_dot_product_attention with enable_gqa; one call a request where their lengths differ."""
    torch = imported_torch()
    dtype = pieces.step.cache.dtype
    q = torch_tensor(pieces.step.q[:, :, None], dtype)
    parts = [(q[first:last], torch_tensor(k, dtype), torch_tensor(v, dtype)) for first, last, k, v in pieces.groups]
    results: list[Any] = []

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            results[:] = [torch.nn.functional.scaled_dot_product_attention(*part, enable_gqa=True) for part in parts]

    return run, lambda: torch.cat(results)[:, :, 0].float().numpy()


def onnxruntime_gqa(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """onnxruntime's GroupQueryAttention, cache in place: the newest token comes as its key and value inputs, the others are the past."""
    step, dtype = pieces.step, pieces.step.cache.dtype
    k, v = pieces.only()
    batch, heads, head_dim = step.q.shape
    kv_heads, tokens = k.shape[1:3]
    cache_shape = (batch, kv_heads, tokens, head_dim)
    names = ["query", "key", "value", "past_key", "past_value"]
    shapes = [(batch, 1, heads * head_dim), *[(batch, 1, kv_heads * head_dim)] * 2, cache_shape, cache_shape]
    inputs = [(name, shape, dtype) for name, shape in zip(names, shapes, strict=True)]
    inputs += [("seqlens_k", (batch,), "int32"), ("total_sequence_length", (1,), "int32")]
    outputs = [("output", shapes[0], dtype), ("present_key", cache_shape, dtype), ("present_value", cache_shape, dtype)]
    session = onnx_session("GroupQueryAttention", inputs, outputs, threads, num_heads=heads, kv_num_heads=kv_heads)
    import onnxruntime

    value = onnxruntime.OrtValue.ortvalue_from_numpy
    newest = [np.ascontiguousarray(x[:, :, -1:].swapaxes(1, 2)).reshape(batch, 1, -1) for x in (k, v)]
    past = [value(x) for x in (k, v)]  # past and present are one memory, as in a serving loop
    result = value(np.zeros(shapes[0], step.q.dtype))
    lengths = [np.full(batch, tokens - 1, np.int32), np.full(1, tokens, np.int32)]
    run = onnx_bound(session, [step.q.reshape(batch, 1, -1), *newest, *past, *lengths], [result, *past])
    return run, lambda: result.numpy().reshape(batch, heads, -1).astype(np.float32)


def openvino_decode(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention. It wants as many KV heads as query heads, so a group's heads are queries of one head."""
    step = pieces.step
    k, v = pieces.only()
    batch, heads, head_dim = step.q.shape
    kv_heads = k.shape[1]
    run, fetch = openvino_sdpa([step.q.reshape(batch, kv_heads, heads // kv_heads, head_dim), k, v], step.cache.dtype, threads)
    return run, lambda: fetch().reshape(batch, heads, -1)


PEERS: dict[str, Callable[[Pieces, int], tuple[Step, Fetch]]] = {
    "torch": torch_sdpa,
    "onnxruntime": onnxruntime_gqa,
    "openvino": openvino_decode,
}
