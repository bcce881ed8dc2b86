"""The same attention of a whole sequence by other libraries, where they are installed.

Each works over its own favourite form of the same operands. What a library needs besides q, k and v (a mask, a list of blocks, another
layout) is made once, outside its time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
import check
from _peers import (
    PAUSE_SECONDS,
    Fetch,
    Step,
    UnavailableError,
    imported_torch,
    onnx_bound,
    onnx_session,
    openvino_sdpa,
    reason_of,
    torch_tensor,
    version,
)
from blitz_attn import sabi, testing
from operands import Operands

BLOCK = 128  # queries and keys a block
# Relative error that still counts as the same answer. Element by element, bfloat16 results near 0 differ however well they are computed.
LARGEST_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass
class Question:
    """Operands, and what is attended: everything, what causal attention sees, or the blocks of a list (1, H, R, W)."""

    operands: Operands
    lists: np.ndarray | None = None
    causal: bool = False

    @property
    def dtype(self) -> str:
        return self.operands.dtype

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.operands.views[:3]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.operands.q.shape

    @functools.cached_property
    def mask(self) -> np.ndarray | None:
        """(1, H, S, S) bool, True where attended; None where a list does not rule."""
        tokens = self.shape[2]
        return None if self.lists is None else sabi.to_token_mask(self.lists, tokens, tokens, (BLOCK, BLOCK))

    def error_of(self, out: np.ndarray) -> float:
        """Relative error of `out` (B, H, S, D) against float64, by Frobenius norms of 32 rows of every head; infinite where not finite."""
        q, k, v = self.arrays
        bits = self.operands.bits
        rows = check.sample_rows(q.shape[2], k.shape[2], q.shape[1], 32, 0)
        wrong = whole = 0.0
        for head in range(q.shape[1]):
            one = slice(head, head + 1)
            lists = None if self.lists is None else self.lists[:, one]
            exact = check.reference_rows(
                q[:, one], k[:, one], v[:, one], lists, rows, (BLOCK, BLOCK), causal=self.causal, dtype=bits
            )  # fmt: skip
            got = testing.to_float64(out[:, one][:, :, rows], bits if out.dtype == np.uint16 else None)
            wrong += float(np.square(got - exact).sum())
            whole += float(np.square(exact).sum())
        return float(np.sqrt(wrong / whole)) if np.isfinite(wrong) else float("inf")


def blitz(question: Question, threads: int) -> tuple[Step, Fetch]:
    """This library. Like the others it makes its own output; the check also sees that it writes every element of a given one."""
    q, k, v = question.arrays
    options = {"block_shape": (BLOCK, BLOCK), "causal": question.causal, "num_threads": threads, **question.operands.options}
    results: list[Any] = []

    def run() -> None:
        results[:] = [blitz_attn.block_sparse_attention(q, k, v, question.lists, **options)]

    def fetch() -> np.ndarray:
        spare = np.zeros_like(results[0])
        check.poison(spare)
        blitz_attn.block_sparse_attention(q, k, v, question.lists, out=spare, **options)
        if not np.array_equal(spare.view(np.uint8), results[0].view(np.uint8)):
            raise AssertionError("blitz_attn: two calls over the same operands differ, or an element was not written")
        return spare

    return run, fetch


@functools.cache
def _blas() -> Any:
    try:
        import threadpoolctl
    except ImportError:
        raise UnavailableError("threadpoolctl is not installed, so NumPy's threads cannot be set") from None
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def numpy_lines(question: Question, threads: int) -> tuple[Step, Fetch]:
    """Three lines of NumPy, S x S in memory. Other dtypes are widened first, for its products of those are not BLAS."""
    blas = _blas()
    q, k, v = question.arrays
    bits, scale = question.operands.bits, np.float32(1 / np.sqrt(q.shape[-1]))
    if bits:
        raise UnavailableError(f"no {bits} without ml_dtypes")
    mask = question.mask
    if question.causal:
        mask = np.tril(np.ones((1, 1, q.shape[2], k.shape[2]), bool))
    results: list[np.ndarray] = []

    def run() -> None:
        blas.limit(limits=threads)
        a, b, c = (x.astype(np.float32, copy=False) for x in (q, k, v))
        scores = a @ b.swapaxes(-1, -2) * scale
        if mask is not None:
            np.putmask(scores, np.broadcast_to(~mask, scores.shape), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        results[:] = [(weights @ c / weights.sum(axis=-1, keepdims=True)).astype(q.dtype, copy=False)]

    return run, lambda: results[0]


def torch_sdpa(question: Question, threads: int) -> tuple[Step, Fetch]:
    """torch.nn.functional.scaled_dot_product_attention: dense, is_causal, or with a bool mask."""
    torch = imported_torch()
    q, k, v = (torch_tensor(x, question.dtype) for x in question.arrays)
    mask = None if question.mask is None else torch.from_numpy(question.mask)
    results: list[Any] = []

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            results[:] = [torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=question.causal)]

    return run, lambda: results[0].float().numpy()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """flex_attention, compiled for each shape, dtype and number of threads that comes."""
    torch = imported_torch()
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        raise UnavailableError("this torch has no flex_attention") from None
    from torch import _dynamo

    limit = "recompile_limit" if hasattr(_dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(_dynamo.config, limit, 10000)  # a cell is a shape; beyond the limit it would run uncompiled
    return torch.compile(flex_attention, dynamic=False)


def _sees_before(b: Any, h: Any, query: Any, key: Any) -> Any:
    return query >= key


def torch_flex(question: Question, threads: int) -> tuple[Step, Fetch]:
    """torch's flex_attention, compiled (which needs a C++ compiler), with a BlockMask of the same blocks."""
    torch = imported_torch()
    flex = _compiled_flex()
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    heads, tokens = question.shape[1:3]
    rows = -(-tokens // BLOCK)
    if question.causal:
        blocks = create_block_mask(_sees_before, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK)
    else:
        lists = sabi.dense(tokens, tokens, (BLOCK, BLOCK)) if question.lists is None else question.lists
        kept = np.broadcast_to(sabi.to_block_mask(lists, rows), (1, heads, rows, rows))
        full = torch.from_numpy(np.argsort(~kept, axis=-1, kind="stable").astype(np.int32))  # kept columns first: one shape for all lists
        counts = torch.from_numpy(kept.sum(axis=-1, dtype=np.int32))
        none = (torch.zeros_like(counts), torch.zeros_like(full))
        blocks = BlockMask.from_kv_blocks(*none, counts, full, BLOCK_SIZE=BLOCK, seq_lengths=(tokens, tokens))
    q, k, v = (torch_tensor(x, question.dtype) for x in question.arrays)
    results: list[Any] = []

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            results[:] = [flex(q, k, v, block_mask=blocks)]

    try:
        run()  # compiles
    except Exception as error:
        torch.compiler.reset()  # else it runs uncompiled from now on, where the list does not count
        raise UnavailableError(f"does not compile: {reason_of(error)}") from None
    return run, lambda: results[0].float().numpy()


def onnxruntime_mha(question: Question, threads: int) -> tuple[Step, Fetch]:
    """onnxruntime's MultiHeadAttention, tokens before heads; a list as an additive bias, which is the form of a mask that it takes."""
    q, k, v = question.arrays
    heads, tokens, head_dim = question.shape[1:]
    flat = (1, tokens, heads * head_dim)
    inputs = [(name, flat, question.dtype) for name in ("query", "key", "value")]
    fed = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(flat) for x in (q, k, v)]
    if question.mask is not None:
        fed.append(np.where(question.mask, 0, np.finfo(np.float16).min).astype(q.dtype))
        inputs += [("", (), ""), ("", (), ""), ("attention_bias", fed[-1].shape, question.dtype)]
    session = onnx_session(
        "MultiHeadAttention", inputs, [("output", flat, question.dtype)], threads, num_heads=heads, unidirectional=int(question.causal)
    )
    import onnxruntime

    result = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(flat, q.dtype))
    run = onnx_bound(session, fed, [result])
    return run, lambda: result.numpy().reshape(1, tokens, heads, head_dim).swapaxes(1, 2).astype(np.float32)


def openvino(question: Question, threads: int) -> tuple[Step, Fetch]:
    """OpenVINO's scaled_dot_product_attention."""
    arrays = list(question.arrays) + ([question.mask] if question.mask is not None else [])
    return openvino_sdpa(arrays, question.dtype, threads, question.causal)


def _cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jax_sdpa(question: Question, threads: int) -> tuple[Step, Fetch]:
    """jax.nn.dot_product_attention, jit-compiled. Its threads are as many as the CPUs that the process may use when it starts."""
    if threads != _cpus():
        raise UnavailableError(f"its threads cannot be set in a running process (taskset gives it {threads})")
    try:
        import jax
        from jax import numpy as jnp
    except ImportError:
        raise UnavailableError("jax is not installed") from None
    if question.operands.bits:
        raise UnavailableError(f"no {question.operands.bits} without ml_dtypes")
    device = jax.devices("cpu")[0]
    q, k, v = (jax.device_put(jnp.asarray(x.swapaxes(1, 2)), device) for x in question.arrays)
    mask = None if question.mask is None else jax.device_put(jnp.asarray(question.mask), device)
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=question.causal))
    results: list[Any] = []

    def run() -> None:
        results[:] = [attend(q, k, v, mask=mask).block_until_ready()]

    run()  # compiles
    return run, lambda: np.asarray(results[0].swapaxes(1, 2).astype(jnp.float32))


@dataclass(frozen=True)
class Peer:
    """A library that can answer."""

    make: Callable[[Question, int], tuple[Step, Fetch]]
    package: str  # whose version is shown
    bytes_a_pair: tuple[int, int]  # memory that it takes for each query-key pair of a head: without and with a list. A guess from above
    rest: float = PAUSE_SECONDS  # how long its threads may spin after a call

    @property
    def version(self) -> str | None:
        return version(self.package)


PEERS = {
    "numpy": Peer(numpy_lines, "numpy", (14, 14), rest=0.15),  # OpenBLAS: 2^28 cycles
    "torch": Peer(torch_sdpa, "torch", (0, 6)),
    "flex": Peer(torch_flex, "torch", (0, 1)),
    "onnxruntime": Peer(onnxruntime_mha, "onnxruntime", (0, 10)),
    "openvino": Peer(openvino, "openvino", (0, 6)),
    "jax": Peer(jax_sdpa, "jax", (12, 13)),
}
OURS = Peer(blitz, "blitz_attn", (0, 0))
