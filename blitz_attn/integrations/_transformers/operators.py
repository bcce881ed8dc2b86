"""The attention of a layer as an operator of torch: what torch.compile and export take into a graph.

The rules of a mask depend on numbers in tensors: padding, packed sequences, the length of a static cache. A graph does not know these
numbers, so it holds one operator per layer, ``torch.ops.blitz_attn.attend_layer``, which reads them when the graph runs. From there on, the
operator computes attention as a call without a graph does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..._operations import arguments_of
from ...block_sparse import block_sparse_attention
from .masks import TracedMask

__all__ = ["Traced", "attend_in_graph", "register_operator"]

# The rules of attention that are numbers. Models give them by the same names.
NUMBERS = tuple(name for name, x in arguments_of(block_sparse_attention).items() if x.role == "number")
_NUMBERS = ", ".join(f"float? {name}=None" for name in NUMBERS)
_SCHEMA = f"""attend_layer(Tensor query, Tensor key, Tensor value, Tensor? padding=None, Tensor? packed=None, Tensor? q_position=None,
    Tensor? cu_seq_lens_q=None, Tensor? cu_seq_lens_k=None, Tensor? sinks=None, Tensor? block_indices=None, Tensor? mask=None,
    Tensor? position_bias=None, Tensor? indices=None, *, bool causal=True, int? left=None, int? right=None, SymInt q_offset=0,
    SymInt kv_offset=0, float? scaling=None, {_NUMBERS}, str config="", bool sparse=False, int? layer=None, int? index_block=None,
    str module="", str kind="") -> Tensor"""


@dataclass
class _Indexer:
    block_size: int | None


@dataclass
class Traced:
    """Stands for the module of a layer: it has the attributes that attention and its fallback read."""

    source: str  # the name of the Python module that the layer is from
    kind: str
    layer_idx: int | None
    is_causal: bool
    num_key_value_groups: int
    sinks: Any
    indexer: _Indexer
    training: bool = False


def attend_in_graph(layer: Any, mask: TracedMask) -> Any:
    """Calls the operator, for a layer that `_why_not_by_shape` does not refuse."""
    where = mask.q_offset
    return torch.ops.blitz_attn.attend_layer(
        layer.query, layer.key, layer.value, mask.padding, mask.packed, where if isinstance(where, torch.Tensor) else None,
        layer.rest.get("cu_seq_lens_q"), layer.rest.get("cu_seq_lens_k"), layer.sinks, layer.block_indices, mask.made,
        layer.rest.get("position_bias"), layer.indices, causal=mask.causal, left=mask.left, right=mask.right,
        q_offset=0 if isinstance(where, torch.Tensor) else where, kv_offset=mask.kv_offset, scaling=layer.scaling,
        **layer.numbers, config=layer.config._text, sparse=layer.sparse,
        layer=layer.number, index_block=None if layer.block_indices is None else layer.module.indexer.block_size, module=layer.source,
        kind=layer.kind,
    )  # fmt: skip


def register_operator(attend: Callable[[Traced, tuple[Any, Any, Any], Any, dict[str, Any]], Any]) -> Any:
    """Define the operator, whose work `attend` does. The operator exists as long as the object that is returned."""

    def run(
        query: Any, key: Any, value: Any, padding: Any = None, packed: Any = None, q_position: Any = None, cu_seq_lens_q: Any = None,
        cu_seq_lens_k: Any = None, sinks: Any = None, block_indices: Any = None, mask: Any = None, position_bias: Any = None,
        indices: Any = None, *, causal: bool = True, left: int | None = None, right: int | None = None, q_offset: int = 0,
        kv_offset: int = 0, layer: int | None = None, index_block: int | None = None, module: str = "", kind: str = "", **options: Any,
    ) -> Any:  # fmt: skip
        shape = (query.shape[0], 1, query.shape[2], key.shape[2])
        where = q_offset if q_position is None else q_position
        if mask is None:
            mask = TracedMask(shape, causal, left, right, packed, padding, where, kv_offset).as_rules()
        stand_in = Traced(module, kind, layer, causal, query.shape[1] // max(1, key.shape[1]), sinks, _Indexer(index_block))
        tensors = {
            "sinks": sinks, "block_indices": block_indices, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k,
            "position_bias": position_bias, "indices": indices,
        }  # fmt: skip
        return attend(stand_in, (query, key, value), mask, tensors | options).contiguous()

    def shapes(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    def refuse(ctx: Any, grad: Any) -> Any:
        raise RuntimeError("attend_layer: expected a graph without gradients, got a request for one, which it does not have")

    library = torch.library.Library("blitz_attn", "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("attend_layer", run, "CPU")
    torch.library.register_fake("blitz_attn::attend_layer", shapes, lib=library)
    torch.library.register_autograd("blitz_attn::attend_layer", refuse, setup_context=lambda *_, **__: None, lib=library)
    return library
