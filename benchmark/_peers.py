"""What comparisons with other libraries share: how each is asked, on how many threads, and what is said where one cannot answer."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from _bench import Contender

Step = Callable[[], Any]
Fetch = Callable[[], np.ndarray]  # the result in the shape of the queries, float32

PAUSE_SECONDS = 0.03  # after a call on several threads: whoever ran may spin for a while


class UnavailableError(Exception):
    """This library cannot do this cell; the text says why."""


def version(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def reason_of(error: Exception) -> str:
    """What an error of another library says, in a line: its first one that is neither a place nor advice."""
    noise = ("Exception from", "Set TORCH", "You can suppress", "from user code")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(noise)]
    return (lines or [type(error).__name__])[0][:120]


def pause(seconds: float = PAUSE_SECONDS) -> Contender:
    """A turn in which nobody runs."""
    return Contender("pause", lambda: time.sleep(seconds), 0.0)


def imported_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise UnavailableError("torch is not installed") from None
    return torch


def torch_tensor(x: np.ndarray, dtype: str) -> Any:
    """A tensor over the array's memory. NumPy's bfloat16 arrays, bare bits or ml_dtypes', are none that torch knows."""
    torch = imported_torch()
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)


ONNX_KINDS = {"float32": "FLOAT", "float16": "FLOAT16"}


def onnx_session(operator: str, inputs: list, outputs: list, threads: int, **attributes: int) -> Any:
    """An onnxruntime session of one operator of its own; `inputs` and `outputs` are (name, shape, dtype), name "" where one is left out."""
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
    """A call of the session over arrays (or its own values) that stay where they are; `results` are its own values."""
    import onnxruntime

    binding = session.io_binding()
    for wanted, x in zip(session.get_inputs(), fed, strict=True):
        held = onnxruntime.OrtValue.ortvalue_from_numpy(x) if isinstance(x, np.ndarray) else x
        binding.bind_ortvalue_input(wanted.name, held)
    for wanted, x in zip(session.get_outputs(), results, strict=True):
        binding.bind_ortvalue_output(wanted.name, x)
    return lambda: session.run_with_iobinding(binding)


def openvino_sdpa(arrays: list[np.ndarray], dtype: str, threads: int, causal: bool = False) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention of q, k, v of `dtype` and, where there are four arrays, a bool mask."""
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
    # With a hint of float16 or bfloat16 some sums are held in that too, which is another result than everybody else's; it is no quicker.
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    try:
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        for index, x in enumerate(arrays):
            bits = x.view(np.uint16) if x.dtype != bool and dtype == "bfloat16" else x
            kind = inputs[index].get_element_type()
            request.set_input_tensor(index, openvino.Tensor(bits, list(x.shape), kind))  # shares the array's memory
    except Exception as error:
        raise UnavailableError(reason_of(error)) from None

    def run(held: Any = arrays) -> None:  # the tensors know only the address of what they share: it must not be freed
        request.infer()

    return run, lambda: np.array(request.get_output_tensor(0).data)
