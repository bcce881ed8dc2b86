"""The library's operations as operators of torch, `torch.ops.blitz_attn`: what torch.compile, export and autograd know of them.

Each operator has a schema, an implementation on CPU tensors, which calls the library's function of that name, and a fake one, which says
what shapes come out. Operators that torch differentiates have a formula; the others say in `backward` that they have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ... import _arrays
from ..._float_mode import in_usual_mode
from ..._select.choosers import CHOOSERS, chooser_of, fields_of, rules_of
from ..._select.prefill import select_and_attend_prefill
from ...block_sparse import block_sparse_attention, block_sparse_attention_backward
from ...paged import paged_attention, paged_select_attention
from .masks import read_mask
from .tensors import autocast_dtype, lowered, rows, transforms_active

try:
    import torch
except ModuleNotFoundError:  # the module can be imported then; nothing is registered
    torch = None

# Tensors come first: torch differentiates no operator that takes some by keyword only.
_LENGTHS = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_kv")
_TENSORS = ", ".join(f"Tensor? {name}=None" for name in _LENGTHS)
_SHOWN = ("kv_ranges", "attn_mask", "alibi_slopes")
_PAIRS = ", ".join(f"Tensor? {name}=None" for name in _SHOWN)
_RULES = """int[] block_shape=[128, 128], float? scale=None, str layout="BNSD", bool causal=False, int[]? window=None,
    int? num_heads=None, int? num_kv_heads=None, int? num_threads=None"""

SCHEMAS = {
    "block_sparse_attention": f"""(Tensor q, Tensor k, Tensor v, Tensor? sabi=None, {_TENSORS}, {_PAIRS},
        Tensor? sinks=None, *, {_RULES}, float? softcap=None, bool reads_mask=False, int? q_begin=None) -> (Tensor, Tensor)""",
    "block_sparse_attention_backward": f"""(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
        Tensor? dlse=None, Tensor? sabi=None, {_TENSORS}, {_PAIRS}, *, {_RULES}, float? softcap=None,
        bool reads_mask=False, int? q_begin=None, bool bias_grads=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)""",
    "select_and_attend_prefill": f"""(Tensor q, Tensor k, Tensor v, {_TENSORS}, {_PAIRS}, Tensor? sinks=None, *, {_RULES},
        float? softcap=None, str chooser="pooled", float[]? density=None, float[]? top_p=None, float[]? threshold=None, int[]? top_k=None,
        int? sink=1, int? recent=2, int? last_columns=0, int? first_rows=0, int? last_rows=0,
        bool per_kv_head=False) -> (Tensor, Tensor)""",
    "paged_attention": f"""(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor? seq_lens=None, Tensor? indptr=None,
        Tensor? last_page_len=None, Tensor? selected=None, Tensor? counts=None, Tensor? sinks=None, Tensor? k_scale=None,
        Tensor? v_scale=None, Tensor? q_lens=None, {_PAIRS}, *, float? scale=None, str kv_layout="NHD", int? window=None,
        float? softcap=None, int? num_threads=None) -> (Tensor, Tensor)""",
}


def _json(x: Any) -> str:
    return f"[{', '.join(str(int(n)) for n in x)}]" if isinstance(x, (tuple, list)) else f'"{x}"' if isinstance(x, str) else str(int(x))


def chooser_text(chooser: Any) -> str:
    """A chooser as the operator takes it: its name, or its attributes as JSON, by code that `torch.compile` can trace."""
    if isinstance(chooser, str):
        return chooser if chooser in CHOOSERS else _arrays.choice(chooser, "chooser", tuple(CHOOSERS))
    if not torch.compiler.is_compiling():
        rules_of(chooser)  # refuses what is no chooser with a sentence; in a graph the operator does
    return "{" + ", ".join(f'"{name}": {_json(x)}' for name, x in fields_of(chooser).items()) + "}"


# ---- On CPU tensors -----------------------------------------------------------------------------------------------


def _named(given: tuple[Any, ...]) -> dict[str, Any]:
    """What comes after q, k, v and a list, by name: the dispatcher leaves out the last ones where they are None."""
    return dict(zip((*_LENGTHS, *_SHOWN, "sinks"), given, strict=False))


def _told(q: Any, k: Any, sabi: Any, named: tuple[Any, ...], reads_mask: bool = False, **options: Any) -> dict[str, Any]:
    """The list, the rules and the options of a call. `reads_mask`: the mask is the only rule that is not about lengths and the diagonal, in
    layout BNSD, and is passed on as what it can be read as. That is done here since a graph holds no elements."""
    told = {"sabi": sabi, **_named(named), **options}
    if reads_mask:
        told |= {"attn_mask": None} | read_mask(told["attn_mask"], q.shape[2], k.shape[2], q.dtype, lists=sabi is None)
    return told


def _attend(q: Any, k: Any, v: Any, sabi: Any = None, *named: Any, return_lse: bool = True, **options: Any) -> Any:
    return block_sparse_attention(rows(q), rows(k), rows(v), return_lse=return_lse, **_told(q, k, sabi, named, **options))


def _attend_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None, sabi: Any = None, *named: Any, bias_grads: bool = False,
    reads_mask: bool = False, **options: Any,
) -> Any:  # fmt: skip
    dout, q, k, v, out, lse = (rows(x) for x in (dout, q, k, v, out, lse))
    dlse = None if dlse is None else rows(dlse)
    told = _told(q, k, sabi, named, reads_mask and not bias_grads, **options)  # what a mask is read as has no gradient
    grads = block_sparse_attention_backward(dout, q, k, v, out, lse, dlse=dlse, bias_grads=bias_grads, **told)
    of_biases = grads[3:] or (None, None)
    return (*grads[:3], *(q.new_empty(0) if x is None else x for x in of_biases))  # an operator returns tensors only


def _select_and_attend(q: Any, k: Any, v: Any, *named: Any, chooser: str = "pooled", return_lse: bool = True, **options: Any) -> Any:
    made = chooser_of(json.loads(chooser)) if chooser.startswith("{") else chooser
    return select_and_attend_prefill(rows(q), rows(k), rows(v), chooser=made, return_lse=return_lse, **_named(named), **options)


def _paged(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any = None, indptr: Any = None, last_page_len: Any = None,
    selected: Any = None, counts: Any = None, sinks: Any = None, k_scale: Any = None, v_scale: Any = None,
    q_lens: Any = None, kv_ranges: Any = None, attn_mask: Any = None, alibi_slopes: Any = None, return_lse: bool = True, **options: Any,
) -> Any:  # fmt: skip
    tables = block_tables if indptr is None else (indptr, block_tables, last_page_len)
    given = rows(q), rows(k_cache), rows(v_cache), tables, seq_lens
    options |= {
        "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "q_lens": q_lens, "kv_ranges": kv_ranges, "attn_mask": attn_mask,
        "alibi_slopes": alibi_slopes, "return_lse": return_lse,
    }  # fmt: skip
    if selected is None:
        return paged_attention(*given, **options)
    return paged_select_attention(*given, selected, counts=counts, **options)


_ON_CPU: dict[str, Callable[..., Any]] = {
    "block_sparse_attention": _attend,
    "block_sparse_attention_backward": _attend_backward,
    "select_and_attend_prefill": _select_and_attend,
    "paged_attention": _paged,
}

# ---- Shapes -------------------------------------------------------------------------------------------------------


def _real(q: Any) -> Any:
    """The dtype of the log-sum-exp."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _attend_shapes(
    q: Any, k: Any, v: Any, *rest: Any, layout: str = "BNSD", num_heads: int | None = None, num_kv_heads: int | None = None, **options: Any
) -> Any:
    out, lse = _arrays.result_shapes(q, v, layout, num_heads or 1, num_kv_heads)
    return q.new_empty(out), q.new_empty(lse, dtype=_real(q))


def _attend_backward_shapes(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None, sabi: Any = None, *named: Any, bias_grads: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    given = _named(named)
    mask, slopes = (given.get(name) if bias_grads else None for name in ("attn_mask", "alibi_slopes"))
    dmask = q.new_empty(0) if mask is None or mask.dtype == torch.bool else mask.new_empty(mask.shape)
    dslopes = q.new_empty(0) if slopes is None else slopes.new_empty(slopes.shape, dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape), dmask, dslopes


def _paged_shapes(q: Any, k_cache: Any, v_cache: Any, *rest: Any, **options: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1])), q.new_empty(q.shape[:-1], dtype=_real(q))


# ---- Under torch.autocast -----------------------------------------------------------------------------------------


def _cast_attention(given: tuple[Any, ...], dtype: Any, arrays: int = 4) -> tuple[Any, ...]:
    """As torch casts for its own attention: queries, keys, values, and a mask of numbers. Sinks and slopes are read as float32.

    `arrays`: how many come before the lengths, which are q, k, v and perhaps a list.
    """
    mask = arrays + len(_LENGTHS) + _SHOWN.index("attn_mask")
    return tuple(lowered(x, dtype) if n < 3 or n == mask else x for n, x in enumerate(given))


def _cast_choice(given: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """The same where blocks are chosen, and no list is given."""
    return _cast_attention(given, dtype, 3)


def _cast_queries(given: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """Queries for a cache, which no call casts: it is as long as all that was said before."""
    q, k_cache, *rest = given
    to = dtype if k_cache.dtype.itemsize == 1 else k_cache.dtype
    return (q if to == torch.float64 else lowered(q, to), k_cache, *rest)


def _under_autocast(name: str, cast: Callable[..., Any]) -> Callable[..., Any]:
    """The operator where autocast is on: its tensors are cast, where torch can differentiate that, and so is its result."""
    this_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def run(*given: Any, **options: Any) -> Any:
        dtype = autocast_dtype()
        with torch._C._ExcludeDispatchKeyGuard(this_key):
            out, lse = getattr(torch.ops.blitz_attn, name).default(*cast(given, dtype), **options)
            return lowered(out, dtype), lse

    return run


# ---- Gradients ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Any, dlse: Any) -> Any:
    q, k, v, out, lse, *lists, sinks = ctx.saved_tensors  # read once: under torch.utils.checkpoint, each reading computes them again
    dout = torch.zeros_like(out) if dout is None else dout
    slopes = lists[-1]
    needs = (*ctx.needs_input_grad, *[False] * (4 + len(lists)))  # it has no entries for arguments left out
    needs_mask, needs_slopes = (needs[3 + len(lists) + n] for n in (-2, -1))
    grads: tuple[Any, ...] = (None,) * 5
    if any(needs[:3]) or needs_mask or needs_slopes:
        told = ctx.options | {"bias_grads": needs_mask or needs_slopes}
        grads = torch.ops.blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, dlse, *lists, **told)
    dq, dk, dv = (x if needed else None for x, needed in zip(grads[:3], needs[:3], strict=True))
    dmask, dslopes = grads[3] if needs_mask else None, grads[4].to(slopes.dtype) if needs_slopes else None
    dsinks = None
    if sinks is not None and needs[3 + len(lists)]:
        dsinks = _gradient_of_sinks(sinks, dout, out, lse, dlse, ctx.options["layout"])
    return (dq, dk, dv, *[None] * (len(lists) - 2), dmask, dslopes, dsinks)


@in_usual_mode
def _gradient_of_sinks(sinks: Any, dout: Any, out: Any, lse: Any, dlse: Any, layout: str) -> Any:
    """The share of a sink in the softmax of a query is exp(sink - lse). As a sink grows, the log-sum-exp grows by that share, and the
    output, to which a sink adds no value, shrinks by that share of itself."""
    products = dout.to(lse.dtype) * out
    products = products.unflatten(-1, (lse.shape[1], -1)) if layout == "BSH" else products
    change = -products.sum(-1).movedim(2 if layout in ("BSND", "BSH") else 1, 0)  # heads first, as below
    change = change if dlse is None else change + dlse.movedim(1, 0)
    lse = lse.movedim(1, 0).flatten(1)
    empty = lse == -torch.inf  # queries that are not valid, which see no sink: whatever the loss makes of them, NaN included, adds nothing
    share = torch.exp(sinks.float().to(lse.dtype)[:, None] - lse.masked_fill(empty, torch.inf))
    return (share * change.flatten(1).masked_fill(empty, 0)).sum(1).to(sinks.dtype)


def no_second(name: str) -> str:
    """What is said where a gradient is to be differentiated."""
    return f"{name}: expected to be differentiated once, got a request for the gradient of its gradient, which it does not have"


def _refuse(sentence: str) -> Callable[..., Any]:
    def gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(sentence)

    return gradient


def _without(name: str, instead: str) -> Callable[..., Any]:
    return _refuse(f"{name}: expected a call under torch.no_grad(), got a request for its gradient, which it does not have{instead}")


def _nothing(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    """No input is kept for a gradient that is refused."""


def _register() -> Any:
    library = torch.library.Library("blitz_attn", "FRAGMENT")
    attention, lists = "block_sparse_attention", "; block_sparse_attention has one, with the lists of select_blocks_prefill"
    for name, shapes, keep, gradient, cast in (
        (attention, _attend_shapes, _keep, _gradients, _cast_attention),
        ("block_sparse_attention_backward", _attend_backward_shapes, _nothing, _refuse(no_second(attention)), None),
        ("select_and_attend_prefill", _attend_shapes, _nothing, _without("select_and_attend_prefill", lists), _cast_choice),
        ("paged_attention", _paged_shapes, _nothing, _without("paged_attention", ""), _cast_queries),
    ):
        library.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _ON_CPU[name], "CPU")
        torch.library.register_fake(f"blitz_attn::{name}", shapes, lib=library)
        torch.library.register_autograd(f"blitz_attn::{name}", gradient, setup_context=keep, lib=library)
        if cast is not None:
            library.impl(name, _under_autocast(name, cast), "AutocastCPU")
    return library


library = None if torch is None else _register()  # the operators exist as long as this object does


# ---- Calls --------------------------------------------------------------------------------------------------------

_CLASSES = frozenset() if torch is None else frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list))


def _needs_dispatch(*given: Any, **options: Any) -> bool:
    """Whether torch would do more for a call than pass it on to the CPU: whether it follows a tensor for a gradient, a tensor is of a class
    of its own, autocast is on, a mode or torch's profiler watches operators, or a graph is made of them."""
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*given, **options))
        or torch.is_autocast_enabled("cpu")
        or not _CLASSES.issuperset(map(type, (*given, *options.values())))
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or transforms_active()
        or torch.jit.is_tracing()
        or torch.autograd._profiler_enabled()
    )


def call(name: str, *given: Any, return_lse: bool, **options: Any) -> tuple[Any, Any]:
    """The operator of that name. Where torch would only pass the call on to the CPU, this does, since the way through torch takes longer
    than a small call. Without `return_lse`, the log-sum-exp may be None."""
    if _needs_dispatch(*given, **options):
        return getattr(torch.ops.blitz_attn, name)(*given, **options)
    results = _ON_CPU[name](*given, return_lse=return_lse, **options)
    return results if return_lse else (results, None)
