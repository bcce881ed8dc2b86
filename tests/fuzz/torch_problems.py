"""`blitz_attn.integrations.torch`: results and gradients are the library's own to the bit, for any strides of tensors.

Other problems judge the results of the library's own functions. The function with torch's signature, which reads masks as rules of the
library, is judged by the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import blitz_attn
from blitz_attn import nsa
from blitz_attn.integrations import torch as integration

from . import arrays, bias_draws, checks
from .arrays import as_integers
from .attention_cases import listed
from .attention_oracle import Attention, forward
from .attention_oracle import backward as oracle_backward
from .draw import Discard, Draw
from .framework_draws import CallDraw
from .nsa_draws import Setting, as_lists, draw_rules, random_lists
from .paged_problems import Case as PagedCase
from .problems import Finding, problem

VIEWS = ("plain", "offset", "gaps", "steps", "turned")  # torch has no negative strides


class Leaf:
    """A tensor, and a contiguous NumPy array of the same numbers (of bits for bfloat16)."""

    def __init__(self, draw: Draw, name: str, values: np.ndarray, dtype: str, history: bool = True):
        stored = arrays.stored(values, dtype)
        self.host = np.ascontiguousarray(stored)
        self.placed = arrays.place(draw, name, stored, last_contiguous=False, views=VIEWS)
        self.wanted = draw.flag(f"{name}.requires_grad", 0.7) if history else False
        self.tensor = arrays.dressed(self.placed.array, dtype, "torch").requires_grad_(self.wanted)
        # The function's argument may be the result of an operation of torch. The gradient of an alias is that of the tensor.
        self.given = self.tensor.view_as(self.tensor) if history and draw.flag(f"{name}.alias") else self.tensor


def upstream_gradient(draw: Draw, name: str, out: torch.Tensor, dtype: str) -> tuple[torch.Tensor, np.ndarray]:
    """A gradient of a result in a drawn memory layout (torch may pass expanded ones), and as an array in C order."""
    how = draw.pick(f"{name}.as", ("plain", "expanded", "turned", "none"))
    if how == "expanded":
        values = np.ones(tuple(out.shape))
        return torch.ones((), dtype=out.dtype).expand(out.shape), arrays.stored(values, dtype)
    values = draw.rng(name).standard_normal(tuple(out.shape))
    stored = np.ascontiguousarray(arrays.stored(values, dtype))
    tensor = arrays.dressed(stored.T.copy().T if how == "turned" else stored.copy(), dtype, "torch")
    return tensor, stored


def compare(name: str, leaf: Leaf | None, got: torch.Tensor | None, expected: Any) -> None:
    """Checks that a leaf has a gradient if it needs one, and that the gradient is right."""
    if leaf is None or not leaf.wanted:
        if got is not None:
            raise Finding(f"{name}: a gradient that was not asked for")
        return
    if got is None or got.dtype != leaf.tensor.dtype or got.shape != leaf.tensor.shape:
        raise Finding(
            f"{name}: {None if got is None else (got.dtype, tuple(got.shape))} as the gradient of {leaf.tensor.dtype} {tuple(leaf.tensor.shape)}"
        )
    checks.same_bits(name, got, expected)


def backward(draw: Draw, outputs: list[torch.Tensor], gradients: list[torch.Tensor], leaves: dict[str, Leaf | None]) -> dict[str, Any]:
    """The gradients of the leaves, by `backward` or by `torch.autograd.grad`."""
    named = {name: x for name, x in leaves.items() if x is not None and x.wanted}
    if draw.pick("autograd", ("backward", "grad")) == "grad" and named:
        grads = torch.autograd.grad(outputs, [x.tensor for x in named.values()], gradients, allow_unused=True)
        return dict(zip(named, grads, strict=True))
    torch.autograd.backward(outputs, gradients)
    return {name: x.tensor.grad for name, x in leaves.items() if x is not None}


@problem("torch.nsa", weight=0.7)
def torch_nsa(draw: Draw) -> None:
    with checks.at_level(draw):
        setting = Setting(draw, kinds=("torch",), packed=None)
        dtype = setting.dtype
        rules, options = draw_rules(setting)
        leaves: dict[str, Leaf | None] = {x: Leaf(draw, x, setting.normal(x, *shape), dtype) for x, shape in setting.shapes.items()}
        gating = draw.pick("gating", ("none", "weight", "gates"), (1, 2, 1))
        others = ("float64",) if dtype == "float64" else (dtype, "float32", "float16")
        weight_dtype = draw.pick("weight.dtype", tuple(dict.fromkeys(others)))
        shapes = {
            "w_k_compress": (setting.kv_heads, setting.dim, setting.dim) if draw.flag("has_w_k") else None,
            "w_v_compress": (setting.kv_heads, setting.v_dim, setting.v_dim) if draw.flag("has_w_v") else None,
            "gate_proj_weight": (setting.heads, 3, setting.dim) if gating == "weight" else None,
            "gates": setting.shape(setting.heads, 3) if gating == "gates" else None,
        }
        for name, shape in shapes.items():
            leaves[name] = None if shape is None else Leaf(draw, name, setting.normal(name, *shape) * 0.3, weight_dtype)
        options |= {"cu_seqlens": setting.cu_seqlens(), "num_threads": checks.threads(draw)}
        if draw.flag("has_block_indices", 0.2):
            lists = random_lists(setting, "block_indices", setting.kv_heads, rules.tile, rules.wide, 4)
            options["block_indices"] = as_lists(draw, "block_indices", lists)
        out = integration.nsa(**{name: None if x is None else x.given for name, x in leaves.items()}, **options)
        # In NumPy, bfloat16 is passed as bits, and so are weights of bfloat16.
        own, context = nsa.nsa(
            **{name: None if x is None else x.host for name, x in leaves.items()}, **options,
            dtype="bfloat16" if "bfloat16" in (dtype, weight_dtype) else None, return_context=True,
        )  # fmt: skip
        checks.same_bits("out", out, own)
        if str(out.dtype) != f"torch.{dtype}" or tuple(out.shape) != own.shape:
            raise Finding(f"out: {out.dtype} {tuple(out.shape)}")
        wanted = any(x is not None and x.wanted for x in leaves.values())
        if out.requires_grad != wanted:
            raise Finding(f"out: requires_grad is {out.requires_grad}")
        gradient, host = upstream_gradient(draw, "dout", out, dtype)
        if wanted:
            got = backward(draw, [out], [gradient], leaves)
            expected = nsa.nsa_backward(host, context)
            for name, leaf in leaves.items():
                compare(f"d{name}", leaf, got.get(name), getattr(expected, f"d{name}"))
    for leaf in leaves.values():
        if leaf is not None:
            leaf.placed.check_unchanged()


@problem("torch.block_sparse_attention", weight=0.7)
def torch_attention(draw: Draw) -> None:
    with checks.at_level(draw):
        drawn = CallDraw(draw, arrays.FLOATS)
        dtype, real, options, full, sabi = drawn.dtype, drawn.real, drawn.options, drawn.full, drawn.sabi
        leaves: dict[str, Leaf | None] = {
            name: Leaf(draw, name, draw.rng(name).standard_normal(size), dtype) for name, size in drawn.shapes.items()
        }
        with_lse = draw.flag("return_lse")
        given: dict[str, Any] = {}
        placed = []
        if draw.flag("mask", 0.4):
            mask, own_dtype = bias_draws.draw_mask(draw, full, dtype, np.ones(full, np.bool_), spoils=False)
            place, given["attn_mask"] = bias_draws.place(draw, mask, own_dtype, full)
            placed.append(place)
            options["attn_mask"] = bias_draws.plain(mask, own_dtype)
        if draw.flag("alibi", 0.3):
            options["alibi_slopes"] = bias_draws.draw_slopes(draw, drawn.heads)
            given["alibi_slopes"] = bias_draws.draw_given_slopes(draw, options["alibi_slopes"])
        result = integration.block_sparse_attention(*(x.given for x in leaves.values()), sabi, return_lse=with_lse, **options | given)
        out, lse = result if with_lse else (result, None)
        named = "bfloat16" if dtype == "bfloat16" else None
        host = [x.host for x in leaves.values()]
        own = blitz_attn.block_sparse_attention(*host, sabi, return_lse=True, dtype=named, **options)
        checks.same_bits("out", out, own[0])
        if lse is not None:
            checks.same_bits("lse", lse, own[1])
        wanted = any(x.wanted for x in leaves.values())
        if out.requires_grad != wanted:
            raise Finding(f"out: requires_grad is {out.requires_grad}")
        if wanted:
            gradient, dout = upstream_gradient(draw, "dout", out, dtype)
            outputs, gradients, dlse = [out], [gradient], None
            through = draw.pick("through", ("both", "out", "lse")) if lse is not None else "out"
            if through != "out":
                lse_gradient, dlse = upstream_gradient(draw, "dlse", lse, real)
                outputs, gradients = [*outputs, lse], [*gradients, lse_gradient]
            if through == "lse":
                outputs, gradients, dout = outputs[1:], gradients[1:], np.zeros_like(dout)
            got = backward(draw, outputs, gradients, leaves)
            expected = blitz_attn.block_sparse_attention_backward(dout, *host, *own, sabi, dlse=dlse, dtype=named, **options)
            for i, (name, leaf) in enumerate(leaves.items()):
                compare(f"d{name}", leaf, got.get(name), expected[i])
    for x in (*placed, *(leaf.placed for leaf in leaves.values())):
        x.check_unchanged()


@problem("torch.paged_attention", weight=0.7)
def torch_paged(draw: Draw) -> None:
    """The operator gives the bits of the library's own functions, whether or not torch's dispatcher calls it."""
    case = PagedCase(draw, listed=draw.flag("listed"))
    p = case.problem
    if p.begin is not None:
        raise Discard("the operator does not take q_begin")
    tables, lens = case.tables
    options = {name: x for name, x in {**case.options(), **case.new_options()}.items() if name not in ("dtype", "kv_dtype")}
    if isinstance(case.cache_dtype, tuple) or case.cache_dtype in arrays.ROWS:
        options["kv_dtype"] = case.cache_dtype
    for name in ("q_begin", "kv_split", "out_dtype"):
        del options[name]
    options |= {"return_lse": True, "num_threads": checks.threads(draw)}
    arguments: list[Any] = [case.q.array, case.k.given(), case.v.given()]
    kinds = p.dtype, case.cache_dtype, case.cache_dtype
    views = [x if min(x.strides) >= 0 else x.copy() for x in arguments]  # torch has no negative strides
    given = [arrays.dressed(x, kind, "torch") for x, kind in zip(views, kinds, strict=True)]
    name, lists = case.named(draw.rng("order"), p.selected is not None and draw.flag("counts"))
    ours, own = (getattr(module, f"paged_{name}") for module in (integration, blitz_attn))
    options |= {"block_tables": tables, "seq_lens": lens, **lists}
    with checks.at_level(draw):
        given[0].requires_grad_(draw.flag("dispatched"))  # a call without a gradient bypasses the dispatcher
        out = ours(*given, **options)
        expected = own(*(x.detach() for x in given), **options)
    checks.same_bits("torch", tuple(x.detach() for x in out), expected)
    case.check_unchanged()


def shown_pairs(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of bool, which in some cases is read as runs of keys or as blocks."""
    rng, keys = draw.rng("shown"), np.arange(shape[-1])
    form = draw.pick("shown", ("runs", "runs of entries", "blocks", "gaps", "all"))
    rows = (*shape[:-1], 1) if form == "runs" else (shape[0], 1, *shape[2:-1], 1)
    if form in ("runs", "runs of entries"):
        first, last = (rng.integers(0, shape[-1], rows, endpoint=True) for _ in range(2))
        return np.broadcast_to((keys >= first) & (keys < last), shape)
    if form == "blocks":
        cell = draw.pick("shown.cell", (128, 64, 1))
        cells = rng.random((*shape[:2], -(-shape[2] // cell), -(-shape[3] // cell))) < 0.5
        return cells[:, :, np.arange(shape[2]) // cell][..., np.arange(shape[3]) // cell] & (rng.random(shape) < 0.9)
    return rng.random(shape) < (0.5 if form == "gaps" else 2)


@problem("torch.scaled_dot_product_attention", weight=0.7)
def torch_own_signature(draw: Draw) -> None:
    dtype = draw.pick("dtype", arrays.FLOATS)
    batch, kv_heads, group = draw.pick("batch", (1, 2, 3)), draw.pick("kv_heads", (1, 2)), draw.pick("group", (1, 2, 4))
    s_q, s_kv = (draw.integer(name, 0, 300, likely=(1, 16, 128, 260)) for name in ("s_q", "s_kv"))
    dim, v_dim = (draw.integer(name, 1, 64, likely=(8, 16)) for name in ("dim", "v_dim"))
    heads, full = kv_heads * group, (batch, kv_heads * group, s_q, s_kv)
    window = draw.pick("window", (None, "some"), (3, 1)) and (draw.pick("left", (-1, 0, 50)), draw.pick("right", (-1, 0, 50)))
    shape = (draw.pick("block_q", (128, 16)), draw.pick("block_kv", (128, 16)))
    blocks = None
    if draw.flag("has_sabi", 0.2):
        blocks = draw.rng("blocks").random((batch, draw.pick("sabi.heads", (1, heads)), -(-s_q // shape[0]), -(-s_kv // shape[1]))) < 0.6
    ragged = draw.flag("ragged", 0.3)
    lens = [
        np.array([draw.integer(f"{name}[{b}]", 0, n, likely=(n,)) if ragged else n for b in range(batch)], np.int64)
        for name, n in (("q_lens", s_q), ("kv_lens", s_kv))
    ]
    values = [arrays.rounded(draw.rng(name).standard_normal(size), dtype) for name, size in (
        ("q", (batch, heads, s_q, dim)), ("k", (batch, kv_heads, s_kv, dim)), ("v", (batch, kv_heads, s_kv, v_dim)),
    )]  # fmt: skip
    a = Attention(dtype, *values, *lens, blocks, shape, draw.pick("scale", (None, 0.3)), False, window)
    own = "bool"
    if draw.flag("mask.plain", 0.4):
        a.mask, own = bias_draws.draw_mask(draw, full, dtype, a.shown(), spoils=False)
    else:
        single = [draw.flag(f"mask.one_{n}", 0.3) for n in range(4)]
        seen = shown_pairs(draw, tuple(1 if one else n for one, n in zip(single, full, strict=True)))
        own = draw.pick("mask.own", ("bool", *arrays.FLOATS))
        least = -np.inf if own == "bool" or dtype == "float64" or draw.flag("mask.infinite") else bias_draws.LEAST[own]
        a.mask = np.where(seen, 0.0, least)
    stored = arrays.place(draw, "mask", bias_draws.stored(a.mask, own), last_contiguous=False, views=VIEWS)
    mask = learned = arrays.dressed(stored.array, own, "torch")
    causal = draw.flag("is_causal", 0.25)
    learns = own != "bool" and not causal and draw.flag("mask.learns")
    learned.requires_grad_(learns)
    expanded = draw.flag("mask.expanded", 0.3)
    if expanded:
        mask = mask.expand(full)
    mask = mask[(0,) * (draw.integer("mask.missing", 0, 4) % (1 + next((n for n, size in enumerate(mask.shape) if size != 1), 4)))]
    if causal:  # torch's rule, which cannot be combined with a mask: query i sees key j if j <= i
        mask, a.mask, a.causal, a.begin = None, None, True, np.zeros(batch, np.int64)
    options: dict[str, Any] = {"scale": a.scale, "window": window, "block_shape": shape, "num_threads": checks.threads(draw), "enable_gqa": True}
    options["is_causal"] = causal
    if ragged:
        options |= {name: as_integers(draw, name, x) for name, x in zip(("q_lens", "kv_lens"), lens, strict=True)}
    if blocks is not None:
        options["sabi"] = listed(blocks, "int32", draw.rng("sabi"))
    with checks.at_level(draw):
        leaves: dict[str, Leaf | None] = {name: Leaf(draw, name, x, dtype) for name, x in zip("qkv", values, strict=True)}
        given = [x.given for x in leaves.values()]
        out, lse = integration.scaled_dot_product_attention(*given, mask, return_lse=True, **options)
        f = forward(a)
        numbers = arrays.values_of(out.detach(), dtype), arrays.values_of(lse.detach(), a.real)
        for name, got, expected, allowed in zip(("out", "lse"), numbers, (f.out, f.lse), (f.allowed_out, f.allowed_lse), strict=True):
            checks.near(name, got, expected, allowed)
        if numbers[0][~f.seen.any(axis=-1)].any():
            raise Finding("out: rows that see nothing are not 0")
        if learns or any(x.wanted for x in leaves.values()):
            gradient, dout = upstream_gradient(draw, "dout", out, dtype)
            right = oracle_backward(a, f, arrays.values_of(dout, dtype), *numbers, None)
            if learns:
                dmask = arrays.values_of(torch.autograd.grad([out], [learned], [gradient], retain_graph=True)[0], own)
                expected, allowed = right.of_mask(dmask.shape, own, own if expanded else a.real)  # torch adds up over the axes that it expanded
                off = np.abs(expected) + allowed > (65504.0 if own == "float16" else np.inf)
                checks.near("dattn_mask", np.where(off, 0, dmask), np.where(off, 0, expected), allowed)
            got = backward(draw, [out], [gradient], leaves)
            for i, (name, leaf) in enumerate(leaves.items()):
                if leaf.wanted:
                    checks.near(f"d{name}", arrays.values_of(got[name], dtype), right[i], right.allowed[i])
    for x in (stored, *(leaf.placed for leaf in leaves.values())):
        x.check_unchanged()
