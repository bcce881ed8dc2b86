"""Attention over sequences: lists of blocks, torch's own signature, and chosen blocks. Public through `blitz_attn.integrations.torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ... import block_sparse as numpy_calls
from ..._arrays import refuse_block_mask
from ..._operations import like
from ..._select import prefill as numpy_choice
from ..._sentences import rename
from . import attention_operators, operators  # noqa: F401 - the first one defines operators
from .arguments import NOT_TAKEN, read
from .tensors import expect_tensors, flag_of, mask_of, number_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..._block_sparse.call import SparseRules
    from ..._options import ChosenRules, TorchOwnOptions
    from ..._types import Array

try:
    import torch
except ModuleNotFoundError:  # without torch, the module can be imported and documented, but its functions cannot be called
    torch = None

__all__ = ["block_sparse_attention", "scaled_dot_product_attention", "select_and_attend_prefill"]

_NAMES = {"q": "query", "k": "key", "v": "value"}


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sabi: Array | None = None, *, return_lse: Literal[False] = False, **options: Unpack[SparseRules]
) -> Tensor: ...
@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sabi: Array | None = None, *, return_lse: Literal[True], **options: Unpack[SparseRules]
) -> tuple[Tensor, Tensor]: ...
@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sabi: Array | None = None, *, return_lse: bool, **options: Unpack[SparseRules]
) -> Any: ...
@like(numpy_calls.block_sparse_attention, NOT_TAKEN)
def block_sparse_attention(q: Any, k: Any, v: Any, sabi: Any = None, *, return_lse: Any = False, **rules: Any) -> Any:
    """`blitz_attn.block_sparse_attention` on torch tensors, differentiable in q, k, v, attn_mask, alibi_slopes and sinks.

    Parameters
    ----------
    q, k, v : torch.Tensor
        CPU tensors: float32, float16, bfloat16 or float64.
    sabi, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        See `blitz_attn.block_sparse_attention`. Under `torch.compile`, `sabi`, `kv_ranges` and `attn_mask` must be tensors.
    kv_ranges : torch.Tensor or array of int, optional
        ``(B, Sq, 2)``, ``(Sq, 2)`` or for layout TND ``(T, 2)``: the run of keys that each query may see.
    attn_mask : torch.Tensor or array, optional
        ``(B, H, Sq, Skv)``, or any shape that broadcasts to it: bool, False where a query does not see a key, or numbers that are added to
        the scores. A tensor of numbers may need a gradient. Arrays are copied, and tensors are not.
    alibi_slopes : torch.Tensor or sequence of float, optional
        ``(H,)``: how much the score of each head falls per token of distance. Read as float32; a tensor may need a gradient.
    sinks : torch.Tensor or sequence of float, optional
        ``(H,)``: one more score per head, which takes part in the softmax but has no value. Read as float32; a tensor of any float dtype
        may need a gradient, which then has that dtype.
    softcap : float, optional
        Replaces each score by ``softcap * tanh(score / softcap)``; 0: scores are not capped.
    return_lse : bool
        Also return the log-sum-exp, which is differentiable too.
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    out : torch.Tensor
        Like `q`, with the last dimension of `v`.
    lse : torch.Tensor
        With `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.block_sparse_attention`.
    RuntimeError
        In ``backward``, where the gradient of a gradient is requested; only the gradient of `sinks` has one.

    Notes
    -----
    The call is the operator ``torch.ops.blitz_attn.block_sparse_attention``, which `torch.compile` takes into its graph.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import block_sparse_attention
    >>> q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    >>> block_sparse_attention(q, k, v, causal=True).sum().backward()
    >>> bool(q.grad.shape == q.shape), round(v.grad.sum().item())  # the weights of each of 2 x 64 x 16 results add up to 1
    (True, 2048)

    A learned sink. All scores are equal here, so that the sink makes half of the sum in each softmax:

    >>> sinks = torch.full((2,), 64.0).log().requires_grad_()
    >>> out, lse = block_sparse_attention(torch.zeros_like(q), k, v, sinks=sinks, return_lse=True)
    >>> lse.mean().backward()
    >>> [round(x, 4) for x in sinks.grad.tolist()]  # each head has half of the queries of the mean
    [0.25, 0.25]
    """
    expect_tensors(q=q, k=k, v=v)
    told = read("block_sparse_attention", {"sabi": sabi} | rules)
    return operators.call("block_sparse_attention", q, k, v, **told, return_lse=return_lse)


def _four_axes(x: Any) -> Any:
    """A view (B, H, S, D) of a tensor with at least two axes."""
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x if x.dim() == 4 else x.flatten(0, -4)


def _shape_error(name: str, x: Any, given: dict[str, Any]) -> ValueError:
    others = [f"{other} {tuple(y.shape)}" for other, y in given.items()]
    return ValueError(f"{name}: expected leading axes that broadcast with those of {' and '.join(others)}, got shape {tuple(x.shape)}")


def _broadcast(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any, Any]:
    """Views whose leading axes are equal. Keys and values may keep fewer heads than queries: one, or with `enable_gqa` any number."""
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if x.dim() < 2:
            raise ValueError(f"{name}: expected shape (..., H, S, D), got {tuple(x.shape)}")
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return query, key, value
    if query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and query.dim() == key.dim() == value.dim():
        lead: tuple[Any, ...] = tuple(query.shape[:-3])
    else:
        axes: list[Any] = [1] * (max(x.dim() for x in given.values()) - 3)
        before: dict[str, Any] = {}
        for name, x in given.items():
            for n, size in enumerate(reversed(x.shape[:-3]), 1):
                if size != 1 and axes[-n] not in (1, size):
                    raise _shape_error(name, x, before)
                axes[-n] = axes[-n] if size == 1 else size
            before[name] = x
        lead = tuple(axes)
    heads, of_keys, of_values = (x.shape[-3] if x.dim() > 2 else 1 for x in given.values())
    if of_keys != of_values and 1 not in (of_keys, of_values):
        raise ValueError(f"value: expected {of_keys} heads like key, or 1, got {of_values}")
    kv_heads = of_values if of_keys == 1 else of_keys
    if heads == 1 and kv_heads != 1 and not enable_gqa:
        heads = kv_heads
    if kv_heads not in (1, heads) and not enable_gqa:
        raise ValueError(f"key: expected {heads} heads like query, or enable_gqa=True, got {kv_heads}")
    wanted = (heads, kv_heads, kv_heads)
    q, k, v = (_expanded(x, (*lead, n, *x.shape[-2:])) for x, n in zip(given.values(), wanted, strict=True))
    return q, k, v


def _expanded(x: Any, shape: tuple[Any, ...]) -> Any:
    return x if x.shape == shape else x.expand(shape)


def _upper_left(query: Any, key: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """The rules for torch's `is_causal`: query i sees key j when j <= i. Without `q_begin`, the library's diagonal ends at the last query
    and key."""
    queries, keys, whole = query.shape[2], key.shape[2], rules["kv_lens"] is None
    if whole and rules["q_lens"] is None and queries == keys:
        return {"causal": True}
    upper_left: dict[str, Any] = {"causal": True, "q_begin": 0}
    if whole and queries < keys:  # no query sees the last keys, which take time unless a length leaves them out
        upper_left["kv_lens"] = torch.full((query.shape[0],), queries, dtype=torch.int64)
    return upper_left


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[False] = False, **options: Unpack[TorchOwnOptions],
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True], **options: Unpack[TorchOwnOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: bool, **options: Unpack[TorchOwnOptions],
) -> Any: ...  # fmt: skip
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sabi: Any = None,
    block_shape: tuple[int, int] | None = None,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    return_lse: bool = False,
    num_threads: int | None = None,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` by this library, with lists of blocks on request.

    Parameters
    ----------
    query : torch.Tensor
        ``(..., H, Sq, D)``: a CPU tensor, float32, float16, bfloat16 or float64.
    key, value : torch.Tensor
        ``(..., Hkv, Skv, D)`` and ``(..., Hkv, Skv, Dv)``, same dtype. Leading axes of the three broadcast, and so does a single head of
        `query`, of `key` or of `value`. Tensors of up to four axes are not copied for this.
    attn_mask : torch.nn.attention.bias.CausalBias or torch.Tensor, optional
        ``causal_upper_left`` means the same as `is_causal`; ``causal_lower_right`` aligns the diagonal to the last query and the last key.
        A tensor that torch can expand to ``(..., H, Sq, Skv)``: bool, True where a query sees a key, or of floats, which are added to
        the scores and may need a gradient. It is read once. It is expanded only where `query` has several axes before H, and some, but not
        all, of these are missing or 1 in the mask.
    dropout_p : float
        Must be 0.
    is_causal : bool
        As torch means it: query i sees key j when ``j <= i``, whatever the numbers of queries and keys, and whatever the lengths.
    scale : float, optional
        Factor of ``query key^T``. Default: ``1 / sqrt(D)``.
    enable_gqa : bool
        Allows `key` and `value` to have more than one head, but fewer than `query`.
    sabi : torch.Tensor or array of int, optional
        Block list ``(B or 1; H, Hkv or 1; ceil(Sq / block_shape[0]); W)``: see `blitz_attn.block_sparse_attention`.
    block_shape : (int, int), optional
        Number of tokens per block of queries and per block of keys. Default: the shape that the list knows, or else (128, 128).
    window : (int, int), optional
        How many tokens query i sees before and after token ``i + kv_len - q_len``, or ``i`` with `is_causal`; -1 sets no bound.
    q_lens, kv_lens : sequence of int, optional
        ``(B,)``: number of valid tokens of each batch entry.
    return_lse : bool
        Also return the log-sum-exp, which is differentiable too.
    num_threads : int, optional
        Threads of this call and of its gradient.

    Returns
    -------
    out : torch.Tensor
        ``(..., H, Sq, Dv)``. A query that sees no key gets 0.
    lse : torch.Tensor
        With `return_lse`: ``(..., H, Sq)``, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        A dropout, a tensor that is not in CPU memory, and what `blitz_attn.block_sparse_attention` refuses.

    Notes
    -----
    A mask of bool, or of 0 and ``-inf``, is replaced by the cheapest rule that does the same. If all heads share the mask, and the keys of
    each query have no gap between them, it becomes a run of keys for each query, and costs no more than `is_causal`. Otherwise, unless
    `sabi` is given, blocks of 128 x 128 pairs in which no pair is seen are left out. Masks of other numbers make a call take a tenth to a
    third more time.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(1, heads, 300, 64) for heads in (8, 2, 2))
    >>> ours = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> torch.allclose(ours, theirs, atol=1e-5)
    True
    """
    expect_tensors(query=query, key=key, value=value)
    if type(dropout_p) not in (int, float) or dropout_p != 0:
        raise ValueError(f"dropout_p: expected 0, got {number_of(dropout_p, 'dropout_p')}: this attention has no dropout")
    is_causal, lower_right = flag_of(is_causal, "is_causal"), False
    has_elements = isinstance(attn_mask, torch.Tensor) and not hasattr(attn_mask, "variant")  # a CausalBias has a variant
    if has_elements:
        if is_causal:
            raise ValueError("is_causal: expected False with an attn_mask, got True")
    elif attn_mask is not None:
        is_causal, lower_right = _rule_of_mask(attn_mask, is_causal)
        sizes, made_for = (query.shape[-2], key.shape[-2]), (attn_mask.seq_len_q, attn_mask.seq_len_kv)
        if made_for != sizes:
            raise ValueError(f"attn_mask: expected a CausalBias for {sizes[0]} queries and {sizes[1]} keys, got one for {made_for}")
    return_lse = flag_of(return_lse, "return_lse")
    query, key, value = _broadcast(query, key, value, flag_of(enable_gqa, "enable_gqa"))
    mask = _mask_of_pairs(attn_mask, query, key) if has_elements else None
    q, k, v = _four_axes(query), _four_axes(key), _four_axes(value)
    rules = read(
        "block_sparse_attention",
        {
            "sabi": sabi, "block_shape": block_shape, "scale": scale, "causal": lower_right, "window": window, "q_lens": q_lens,
            "kv_lens": kv_lens, "num_threads": num_threads,
        },
    )  # fmt: skip
    if is_causal:
        rules |= _upper_left(q, k, rules)
    try:
        result: Any = operators.call(
            "block_sparse_attention", q, k, v, **rules, attn_mask=mask, reads_mask=has_elements, return_lse=return_lse
        )
    except (TypeError, ValueError) as error:
        rename(error, _NAMES)
        raise
    out, lse = result if return_lse else (result, result)  # without return_lse, lse is not read
    if query.dim() != 4:
        out, lse = out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1]) if return_lse else None
    return (out, lse) if return_lse else out


def _rule_of_mask(attn_mask: Any, is_causal: bool) -> tuple[bool, bool]:
    """Whether a `CausalBias` aligns the diagonal to the first query and key, and whether it aligns it to the last ones."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    refuse_block_mask(attn_mask, "attn_mask")
    if not isinstance(attn_mask, CausalBias):
        raise TypeError(f"attn_mask: expected None, a tensor or a CausalBias, got {type(attn_mask).__name__}")
    if is_causal:
        raise ValueError("is_causal: expected False with an attn_mask, got True")
    lower = attn_mask.variant == CausalVariant.LOWER_RIGHT
    return not lower, lower


def _mask_of_pairs(mask: Any, query: Any, key: Any) -> Any:
    """A mask that torch can expand to (..., H, Sq, Skv), with its leading axes joined into one."""
    shape = (*query.shape[:-1], key.shape[-2])
    mask = mask_of(mask, "attn_mask")
    if mask.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise TypeError(f"attn_mask: expected bool, float32, float16, bfloat16 or float64, got {mask.dtype}")
    if mask.dim() > len(shape) or any(n not in (1, m) for n, m in zip(mask.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"attn_mask: expected a shape that expands to {shape}, got {tuple(mask.shape)}")
    if len(shape) > 4 and any(n != 1 for n in mask.shape[:-3]):
        mask = mask.expand(*shape[:-3], *mask.shape[-3:])
    return _four_axes(mask) if mask.dim() > 4 else mask


@overload
def select_and_attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[ChosenRules]
) -> Tensor: ...
@overload
def select_and_attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[ChosenRules]
) -> tuple[Tensor, Tensor]: ...
@overload
def select_and_attend_prefill(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[ChosenRules]) -> Any: ...
@like(numpy_choice.select_and_attend_prefill, NOT_TAKEN)
def select_and_attend_prefill(q: Any, k: Any, v: Any, *, return_lse: Any = False, **rules: Any) -> Any:
    """`blitz_attn.select_and_attend_prefill` on torch tensors, as an operator that `torch.compile` takes into its graph.

    Parameters
    ----------
    q, k, v : torch.Tensor
        CPU tensors: float32, float16, bfloat16 or float64.
    chooser, density, top_p, threshold, top_k, sink, recent, last_columns, first_rows, last_rows, per_kv_head
        See `blitz_attn.select_blocks_prefill`. Give exactly one of `density`, `top_p`, `threshold` and `top_k`.
    block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        See `blitz_attn.block_sparse_attention`.
    kv_ranges : torch.Tensor or array of int, optional
        A run of keys for each query: see `blitz_attn.select_blocks_prefill`. Under `torch.compile`, a tensor.
    attn_mask, alibi_slopes, sinks, softcap
        Further options of attention: see `block_sparse_attention`. They have no gradient here, and the choice of blocks ignores them.
        Under `torch.compile`, `attn_mask` must be a tensor.
    return_lse : bool
        Also return the log-sum-exp.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    out : torch.Tensor
        Like `q`, with the last dimension of `v`.
    lse : torch.Tensor
        With `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `blitz_attn.select_and_attend_prefill`.
    RuntimeError
        In ``backward``: the operation has no gradient. For training, give the list of `blitz_attn.select_blocks_prefill` to
        `block_sparse_attention`.

    Examples
    --------
    >>> import torch
    >>> from blitz_attn.integrations.torch import select_and_attend_prefill
    >>> q, k, v = (torch.randn(1, 2, 1024, 64) for _ in range(3))
    >>> select_and_attend_prefill(q, k, v, density=0.4, causal=True).shape
    torch.Size([1, 2, 1024, 64])
    """
    expect_tensors(q=q, k=k, v=v)
    return operators.call("select_and_attend_prefill", q, k, v, **read("select_and_attend_prefill", rules), return_lse=return_lse)
