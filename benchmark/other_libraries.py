"""Calls of other libraries, where they are installed, for the same attention of a whole sequence and for the same decode step.

Each library gets the same operands in the form that suits it best. A mask, a list of blocks or another layout, where a library needs one,
is made once and is not timed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
from _bench import Contender
from blitz_attn import sabi
from operations import Attention, Decode

Step = Callable[[], Any]  # returns the library's own result
Fetch = Callable[[Any], np.ndarray]  # turns the result of a Step into an array in the shape of the queries, in float32 or their dtype

PAUSE_SECONDS = 0.03  # after a call on several threads, whose threads may spin for a while


class UnavailableError(Exception):
    """A library cannot run this cell. The text says why."""


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def reason_of(error: Exception) -> str:
    """An error of another library in one line: the first line of the error's text that is neither a location nor advice."""
    noise = ("Exception from", "Set TORCH", "You can suppress", "from user code")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(noise)]
    return (lines or [type(error).__name__])[0][:120]


def pause(seconds: float = PAUSE_SECONDS) -> Contender:
    """A contender that only sleeps."""
    return Contender("pause", lambda: time.sleep(seconds), 0.0)


def imported_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise UnavailableError("torch is not installed") from None
    return torch


def torch_tensor(x: np.ndarray, dtype: str) -> Any:
    """A tensor over the array's memory. torch takes no bfloat16 array of NumPy, neither bare bits nor one of ml_dtypes."""
    torch = imported_torch()
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)


def torch_sdpa(parts: list[tuple], threads: int, **options: Any) -> Step:
    """torch's scaled_dot_product_attention of each (q, k, v) in `parts`."""
    torch = imported_torch()

    def run() -> list[Any]:
        torch.set_num_threads(threads)
        with torch.no_grad():
            return [torch.nn.functional.scaled_dot_product_attention(*part, **options) for part in parts]

    return run


ONNX_KINDS = {"float32": "FLOAT", "float16": "FLOAT16"}


def onnx_session(operator: str, inputs: list, outputs: list, threads: int, **attributes: int) -> Any:
    """A session that runs one of onnxruntime's own operators. `inputs` and `outputs` are (name, shape, dtype); "" leaves an input out."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        raise UnavailableError("onnxruntime and onnx are not installed") from None
    kinds = {**{name: getattr(TensorProto, kind) for name, kind in ONNX_KINDS.items()}, "int32": TensorProto.INT32}

    def info(name: str, shape: Any, dtype: str) -> Any:
        if dtype not in kinds:
            raise UnavailableError(f"no {dtype}")
        return helper.make_tensor_value_info(name, kinds[dtype], list(shape))

    node = helper.make_node(operator, [x[0] for x in inputs], [x[0] for x in outputs], domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "attention", [info(*x) for x in inputs if x[0]], [info(*x) for x in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UnavailableError(reason_of(error)) from None


def onnx_bound(session: Any, fed: list[np.ndarray | Any], results: list[Any]) -> Step:
    """A call of the session that copies no array. `fed` holds arrays or values of onnxruntime; `results` holds values of onnxruntime."""
    import onnxruntime

    binding = session.io_binding()
    for wanted, x in zip(session.get_inputs(), fed, strict=True):
        held = onnxruntime.OrtValue.ortvalue_from_numpy(x) if isinstance(x, np.ndarray) else x
        binding.bind_ortvalue_input(wanted.name, held)
    for wanted, x in zip(session.get_outputs(), results, strict=True):
        binding.bind_ortvalue_output(wanted.name, x)
    return lambda: session.run_with_iobinding(binding)


def openvino_sdpa(arrays: list[np.ndarray], dtype: str, threads: int, causal: bool = False) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention of q, k, v in `dtype`. A fourth array is a bool mask."""
    try:
        import openvino
        from openvino import opset13
    except ImportError:
        raise UnavailableError("openvino is not installed") from None
    kinds = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}
    if dtype not in kinds:
        raise UnavailableError(f"no {dtype}")
    inputs = [opset13.parameter(list(x.shape), openvino.Type.boolean if x.dtype == bool else kinds[dtype]) for x in arrays]
    attention = opset13.scaled_dot_product_attention(*inputs, causal=causal)
    model = openvino.Model([opset13.convert(attention, "f32")], inputs)  # NumPy cannot hold a bfloat16 result
    # With a hint of float16 or bfloat16, some sums are in that dtype too: the result differs from all other libraries', and is no faster.
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    try:
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        for index, x in enumerate(arrays):
            bits = x.view(np.uint16) if x.dtype != bool and dtype == "bfloat16" else x
            kind = inputs[index].get_element_type()
            request.set_input_tensor(index, openvino.Tensor(bits, list(x.shape), kind))  # shares the array's memory
    except Exception as error:
        raise UnavailableError(reason_of(error)) from None

    def run(held: Any = arrays) -> None:  # keeps the arrays alive: the tensors know only their addresses
        request.infer()

    return run, lambda _: np.array(request.get_output_tensor(0).data)


# ---- A whole sequence -------------------------------------------------------------------------------------------

BLOCK = 128  # queries per block, and keys per block


def blitz(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """This library. It allocates its output in each call, as NumPy, torch and JAX do."""
    return asked.call(threads, out=None), lambda result: result


@functools.cache
def _blas() -> Any:
    try:
        import threadpoolctl
    except ImportError:
        raise UnavailableError("threadpoolctl is not installed, so NumPy's threads cannot be set") from None
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def numpy_lines(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """Three lines of NumPy with S x S scores in memory. 16-bit dtypes are widened first, because NumPy does not use BLAS for them."""
    blas = _blas()
    q, k, v = asked.views[:3]
    bits, scale = asked.bits, np.float32(1 / np.sqrt(q.shape[-1]))
    if bits:
        raise UnavailableError(f"no {bits} without ml_dtypes")
    mask = asked.mask
    if asked.causal:
        mask = np.tril(np.ones((1, 1, q.shape[2], k.shape[2]), bool))

    def run() -> np.ndarray:
        blas.limit(limits=threads)
        a, b, c = (x.astype(np.float32, copy=False) for x in (q, k, v))
        scores = a @ b.swapaxes(-1, -2) * scale
        if mask is not None:
            np.putmask(scores, np.broadcast_to(~mask, scores.shape), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ c / weights.sum(axis=-1, keepdims=True)).astype(q.dtype, copy=False)

    return run, lambda result: result


def torch_prefill(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """torch's scaled_dot_product_attention: dense, is_causal, or with a bool mask."""
    parts = [tuple(torch_tensor(x, asked.dtype) for x in asked.views[:3])]
    mask = None if asked.mask is None else imported_torch().from_numpy(asked.mask)
    return torch_sdpa(parts, threads, attn_mask=mask, is_causal=asked.causal), lambda results: results[0].float().numpy()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """flex_attention, compiled anew for each shape, dtype and number of threads."""
    torch = imported_torch()
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        raise UnavailableError("this torch has no flex_attention") from None
    from torch import _dynamo

    limit = "recompile_limit" if hasattr(_dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(_dynamo.config, limit, 10000)  # every cell has another shape; beyond the limit, flex_attention would run uncompiled
    return torch.compile(flex_attention, dynamic=False)


def _sees_before(b: Any, h: Any, query: Any, key: Any) -> Any:
    return query >= key


def torch_flex(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """torch's flex_attention, compiled (which needs a C++ compiler), with a BlockMask of the same blocks."""
    torch = imported_torch()
    flex = _compiled_flex()
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    heads, tokens = asked.q.shape[1:3]
    rows = -(-tokens // BLOCK)
    if asked.causal:
        blocks = create_block_mask(_sees_before, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK)
    else:
        lists = sabi.dense(tokens, tokens, (BLOCK, BLOCK)) if asked.lists is None else asked.lists
        kept = np.broadcast_to(sabi.to_block_mask(lists, rows), (1, heads, rows, rows))
        full = torch.from_numpy(np.argsort(~kept, axis=-1, kind="stable").astype(np.int32))  # kept columns first: one shape for all lists
        counts = torch.from_numpy(kept.sum(axis=-1, dtype=np.int32))
        none = (torch.zeros_like(counts), torch.zeros_like(full))
        blocks = BlockMask.from_kv_blocks(*none, counts, full, BLOCK_SIZE=BLOCK, seq_lengths=(tokens, tokens))
    q, k, v = (torch_tensor(x, asked.dtype) for x in asked.views[:3])

    def run() -> Any:
        torch.set_num_threads(threads)
        with torch.no_grad():
            return flex(q, k, v, block_mask=blocks)

    try:
        run()  # compiles
    except Exception as error:
        torch.compiler.reset()  # otherwise flex_attention would run uncompiled from now on, and ignore the list
        raise UnavailableError(f"does not compile: {reason_of(error)}") from None
    return run, lambda result: result.float().numpy()


def onnxruntime_mha(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """onnxruntime's MultiHeadAttention, tokens before heads. A list becomes an additive bias, the only form of mask that this operator
    takes."""
    q, k, v = asked.views[:3]
    heads, tokens, head_dim = asked.q.shape[1:]
    flat = (1, tokens, heads * head_dim)
    inputs = [(name, flat, asked.dtype) for name in ("query", "key", "value")]
    fed = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(flat) for x in (q, k, v)]
    if asked.mask is not None:
        fed.append(np.where(asked.mask, 0, np.finfo(np.float16).min).astype(q.dtype))
        inputs += [("", (), ""), ("", (), ""), ("attention_bias", fed[-1].shape, asked.dtype)]
    session = onnx_session(
        "MultiHeadAttention", inputs, [("output", flat, asked.dtype)], threads, num_heads=heads, unidirectional=int(asked.causal)
    )
    import onnxruntime

    result = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(flat, q.dtype))
    run = onnx_bound(session, fed, [result])
    return run, lambda _: result.numpy().reshape(1, tokens, heads, head_dim).swapaxes(1, 2).astype(np.float32)


def openvino_prefill(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention."""
    arrays = list(asked.views[:3]) + ([asked.mask] if asked.mask is not None else [])
    return openvino_sdpa(arrays, asked.dtype, threads, asked.causal)


def _cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jax_sdpa(asked: Attention, threads: int) -> tuple[Step, Fetch]:
    """jax.nn.dot_product_attention, compiled by jit. JAX runs as many threads as there are CPUs that the process may use at its start."""
    if threads != _cpus():
        raise UnavailableError(f"its threads cannot be set in a running process (taskset gives it {threads})")
    try:
        import jax
        from jax import numpy as jnp
    except ImportError:
        raise UnavailableError("jax is not installed") from None
    if asked.bits:
        raise UnavailableError(f"no {asked.bits} without ml_dtypes")
    device = jax.devices("cpu")[0]
    q, k, v = (jax.device_put(jnp.asarray(x.swapaxes(1, 2)), device) for x in asked.views[:3])
    mask = None if asked.mask is None else jax.device_put(jnp.asarray(asked.mask), device)
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=asked.causal))
    attend(q, k, v, mask=mask)  # compiles
    return lambda: attend(q, k, v, mask=mask).block_until_ready(), lambda result: np.asarray(result.swapaxes(1, 2).astype(jnp.float32))


@dataclass(frozen=True)
class Peer:
    """A library that can compute an `Attention`."""

    make: Callable[[Attention, int], tuple[Step, Fetch]]
    package: str  # whose version is shown
    bytes_a_pair: tuple[int, int]  # upper estimate of the library's memory per query-key pair of a head: without and with a list
    rest: float = PAUSE_SECONDS  # how long its threads may spin after a call

    @property
    def version(self) -> str | None:
        return version(self.package)


PREFILL_PEERS = {
    "numpy": Peer(numpy_lines, "numpy", (14, 14), rest=0.15),  # threads of OpenBLAS spin for 2^28 cycles
    "torch": Peer(torch_prefill, "torch", (0, 6)),
    "flex": Peer(torch_flex, "torch", (0, 1)),
    "onnxruntime": Peer(onnxruntime_mha, "onnxruntime", (0, 10)),
    "openvino": Peer(openvino_prefill, "openvino", (0, 6)),
    "jax": Peer(jax_sdpa, "jax", (12, 13)),
}
OURS = Peer(blitz, "blitz_attn", (0, 0))


# ---- A decode step: K and V of a request in one piece, because no other library reads pages ---------------------


class Pieces:
    """K and V of a step in one contiguous piece, (B, H_kv, S, D), or one piece per request if lengths differ. Gathered once for all
    peers."""

    def __init__(self, step: Decode):
        if step.cache.scales or step.cache.k.dtype == np.uint8:
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


def torch_decode(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """torch's scaled_dot_product_attention with enable_gqa. If the lengths of requests differ, each request has a call of its own."""
    dtype = pieces.step.cache.dtype
    q = torch_tensor(pieces.step.q[:, :, None], dtype)
    parts = [(q[first:last], torch_tensor(k, dtype), torch_tensor(v, dtype)) for first, last, k, v in pieces.groups]
    return torch_sdpa(parts, threads, enable_gqa=True), lambda results: imported_torch().cat(results)[:, :, 0].float().numpy()


def onnxruntime_gqa(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """onnxruntime's GroupQueryAttention, cache in place: the newest token is its key and value input, and the other tokens are the past."""
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
    past = [value(x) for x in (k, v)]  # past and present share memory, as in a serving loop
    result = value(np.zeros(shapes[0], step.q.dtype))
    lengths = [np.full(batch, tokens - 1, np.int32), np.full(1, tokens, np.int32)]
    run = onnx_bound(session, [step.q.reshape(batch, 1, -1), *newest, *past, *lengths], [result, *past])
    return run, lambda _: result.numpy().reshape(batch, heads, -1).astype(np.float32)


def openvino_decode(pieces: Pieces, threads: int) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention. It needs as many KV heads as query heads, so the heads of a group become queries of one
    head."""
    step = pieces.step
    k, v = pieces.only()
    batch, heads, head_dim = step.q.shape
    kv_heads = k.shape[1]
    run, fetch = openvino_sdpa([step.q.reshape(batch, kv_heads, heads // kv_heads, head_dim), k, v], step.cache.dtype, threads)
    return run, lambda result: fetch(result).reshape(batch, heads, -1)


DECODE_PEERS: dict[str, Callable[[Pieces, int], tuple[Step, Fetch]]] = {
    "torch": torch_decode,
    "onnxruntime": onnxruntime_gqa,
    "openvino": openvino_decode,
}
