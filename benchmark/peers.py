"""The same decode step by other libraries, where they are installed: each over its own favourite form of the same operands.

All of them want K and V of a request in one piece, so they are given that; none of them reads pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paged_operands import Decode

Step = Callable[[], Any]
Fetch = Callable[[], np.ndarray]  # the result as (B, H, D), float32


class UnavailableError(Exception):
    """This library cannot do this cell; the text says why."""


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
    try:
        import torch
    except ImportError:
        raise UnavailableError("torch is not installed") from None

    def tensor(x: np.ndarray) -> Any:
        if pieces.step.cache.dtype == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    q = tensor(pieces.step.q[:, :, None])
    parts = [(q[first:last], tensor(k), tensor(v)) for first, last, k, v in pieces.groups]
    results: list[Any] = []

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            results[:] = [torch.nn.functional.scaled_dot_product_attention(*part, enable_gqa=True) for part in parts]

    return run, lambda: torch.cat(results)[:, :, 0].float().numpy()


def onnxruntime_gqa(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """onnxruntime's GroupQueryAttention, cache in place: the newest token comes as its key and value inputs, the others are the past."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        raise UnavailableError("onnxruntime and onnx are not installed") from None
    kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
    step = pieces.step
    if step.cache.dtype not in kinds:
        raise UnavailableError(f"no {step.cache.dtype}")
    k, v = pieces.only()
    kind = kinds[step.cache.dtype]
    batch, heads, head_dim = step.q.shape
    kv_heads, tokens = k.shape[1:3]

    def info(name: str, shape: list[int], element: int = kind) -> Any:
        return helper.make_tensor_value_info(name, element, shape)

    cache_shape = [batch, kv_heads, tokens, head_dim]
    names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    shapes = [[batch, 1, heads * head_dim], *[[batch, 1, kv_heads * head_dim]] * 2, cache_shape, cache_shape]
    inputs = [info(name, shape) for name, shape in zip(names, shapes, strict=False)]
    inputs += [info("seqlens_k", [batch], TensorProto.INT32), info("total_sequence_length", [1], TensorProto.INT32)]
    outputs = [info("output", shapes[0]), info("present_key", cache_shape), info("present_value", cache_shape)]
    node = helper.make_node(
        "GroupQueryAttention", names, [x.name for x in outputs], domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "decode", inputs, outputs), opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UnavailableError(str(error).splitlines()[0]) from None
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    newest = [np.ascontiguousarray(x[:, :, -1:].swapaxes(1, 2)).reshape(batch, 1, -1) for x in (k, v)]
    past = [value(x) for x in (k, v)]  # past and present are one memory, as in a serving loop
    result = value(np.zeros(shapes[0], step.q.dtype))
    lengths = [np.full(batch, tokens - 1, np.int32), np.full(1, tokens, np.int32)]
    fed = [value(step.q.reshape(batch, 1, -1)), *map(value, newest), *past, *map(value, lengths)]
    binding = session.io_binding()
    for name, x in zip(names, fed, strict=True):
        binding.bind_ortvalue_input(name, x)
    for output, x in zip(outputs, [result, *past], strict=True):
        binding.bind_ortvalue_output(output.name, x)
    return lambda: session.run_with_iobinding(binding), lambda: result.numpy().reshape(batch, heads, -1).astype(np.float32)


def openvino_sdpa(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention. It wants as many KV heads as query heads, so a group's heads are queries of one head."""
    try:
        import openvino
        from openvino import opset13
    except ImportError:
        raise UnavailableError("openvino is not installed") from None
    step = pieces.step
    k, v = pieces.only()
    kind = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}[step.cache.dtype]
    batch, heads, head_dim = step.q.shape
    kv_heads = k.shape[1]
    arrays = [step.q.reshape(batch, kv_heads, heads // kv_heads, head_dim), k, v]
    inputs = [opset13.parameter(list(x.shape), kind) for x in arrays]
    attention = opset13.scaled_dot_product_attention(*inputs, causal=False)
    model = openvino.Model([opset13.convert(attention, "f32")], inputs)  # NumPy cannot hold a bfloat16 result
    # With a hint of float16 or bfloat16 its sums are held in that too, which is another result than everybody else's.
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    try:
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        for index, x in enumerate(arrays):
            bits = x.view(np.uint16) if step.cache.dtype == "bfloat16" else x
            request.set_input_tensor(index, openvino.Tensor(bits, list(x.shape), kind))  # shares the array's memory
    except Exception as error:
        raise UnavailableError(str(error).splitlines()[0]) from None

    def run(held: Any = arrays) -> None:  # the tensors know only the address of what they share: it must not be freed
        request.infer()

    return run, lambda: np.array(request.get_output_tensor(0).data).reshape(batch, heads, -1)


PEERS: dict[str, Callable[[Pieces, int], tuple[Step, Fetch]]] = {
    "torch": torch_sdpa,
    "onnxruntime": onnxruntime_gqa,
    "openvino": openvino_sdpa,
}
