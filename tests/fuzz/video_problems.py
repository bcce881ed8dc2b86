"""`blitz_attn.video`: orders of tokens, the lists and densities of rules over cubes, and the choice of rules, against brute force over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from blitz_attn import video

from . import sabi_oracle, video_oracle
from .attention_cases import laid_out
from .draw import Draw
from .problems import Finding, problem
from .sabi_problems import close, draw_dtype, same

MOST_TOKENS = 260


def draw_spans(draw: Draw) -> list[Any]:
    """Grids with ragged edges, and plain tokens before, between and after the grids. There is at least one token in all."""
    spans: list[Any] = []
    left = MOST_TOKENS
    for n in range(draw.integer("spans", 1, 5)):
        if draw.flag(f"plain.{n}", 0.35):
            spans.append(draw.integer(f"tokens.{n}", 0, 20, likely=(0, 1)))
            left -= spans[-1]
            continue
        most = max(1, left)
        sizes = []
        for axis, longest in zip(("frames", "height", "width"), (9, 12, 14), strict=True):
            sizes.append(draw.integer(f"{axis}.{n}", 1, min(longest, most), likely=(1,)))
            most //= sizes[-1]
        spans.append(tuple(sizes))
        left -= sizes[0] * sizes[1] * sizes[2]
    return spans if any(span != 0 for span in spans) else [1]


def draw_rule(draw: Draw, name: str) -> Any:
    kind = draw.pick(f"{name}.kind", ("neighbourhood", "tiles", "radial", "spatial", "temporal"))
    if kind == "radial":
        return video.Radial(draw.pick(f"{name}.decay", (1.0, 0.2, 0.5, 3.0, 1e-9, 1e300)))
    if kind in ("spatial", "temporal"):
        return getattr(video.Neighbourhood, kind)(draw.integer(f"{name}.radius", 0, 2))
    least = int(kind == "tiles")
    sizes = tuple(None if draw.flag(f"{name}.all.{n}", 0.2) else draw.integer(f"{name}.{n}", least, 5, likely=(least,)) for n in range(3))
    return video.SlidingTiles(sizes) if least else video.Neighbourhood(sizes)


def draw_order(draw: Draw) -> tuple[list[Any], tuple[int, ...], video.TokenOrder]:
    spans = draw_spans(draw)
    cube = tuple(draw.integer(f"cube.{n}", 1, 6, likely=(2, 4)) for n in range(3))
    return spans, cube, video.cube_order(video.Geometry(spans), cube)


@problem("video.blocks", weight=0.3)
def blocks(draw: Draw) -> None:
    spans, cube, order = draw_order(draw)
    tokens = order.geometry.num_tokens
    same("indices", order.indices, np.array(video_oracle.order_of(spans, cube)))
    same("inverse", order.inverse, np.argsort(order.indices, kind="stable"))
    if not order.geometry.grids:  # such an order is refused, since all its tokens see each other
        return
    options: dict[str, Any] = {"dense_frames": draw.integer("dense_frames", 0, 3, likely=(0,))}
    if draw.flag("dense_tokens", 0.3):
        options["dense_tokens"] = draw.rng("dense_tokens").integers(0, tokens, draw.integer("dense_tokens.count", 0, 3))
    shape = tuple(draw.integer(name, 1, 70, likely=(1, 4, 8, 16, 64)) for name in ("block_q", "block_kv"))
    heads = draw.integer("heads", 0, 3, likely=(0,))  # 0: a rule by itself
    rules = [draw_rule(draw, f"rule.{n}") for n in range(max(1, heads))]
    masks = [sabi_oracle.blocks_of(video_oracle.seen(spans, cube, rule, **options), shape) for rule in rules]
    mask, dtype = np.stack(masks)[None], draw_dtype(draw)
    given = rules if heads else rules[0]
    got = video.blocks(order, given, shape, dtype=dtype, **options)
    same(f"blocks of {given}", got, sabi_oracle.rising(mask, dtype), [shape])
    close("density", video.density(order, given, shape, **options), mask.mean())
    close("densities", video.density(order, given, shape, per_head=True, **options), mask.mean(axis=(-1, -2)))


@problem("video.choose_rules", weight=0.2)
def choose_rules(draw: Draw) -> None:
    """All queries are sampled, so that the mass that each rule keeps is known: the chosen rule keeps most. Padding changes nothing."""
    spans, cube, order = draw_order(draw)
    tokens = order.geometry.num_tokens
    if not order.geometry.grids:
        return
    options: dict[str, Any] = {"dense_frames": draw.integer("dense_frames", 0, 1)}
    if draw.flag("dense_tokens", 0.3):
        options["dense_tokens"] = [draw.integer("dense_token", 0, tokens - 1)]
    shape = tuple(draw.integer(name, 1, 70, likely=(1, 4, 8, 16, 64)) for name in ("block_q", "block_kv"))
    rules = [draw_rule(draw, f"rule.{n}") for n in range(draw.integer("rules", 1, 3))]
    batch, kv_heads, group, dim = (draw.integer(name, 1, most) for name, most in (("batch", 2), ("kv_heads", 2), ("group", 2), ("dim", 8)))
    scale, dtype = draw.pick("scale", (1.0, 0.1, -0.5)), draw.pick("dtype", ("float32", "float64"))
    rng = draw.rng("arrays")
    q, k = (rng.standard_normal((batch, heads, tokens, dim)).astype(dtype) for heads in (group * kv_heads, kv_heads))
    layout = draw.pick("layout", ("BNSD", "BSND", "BSH", *(["TND"] if batch == 1 else [])))
    padded = layout != "TND" and draw.flag("kv_lens")
    lens = np.array([draw.integer(f"kv_lens.{n}", 0, tokens, likely=(tokens, tokens - 1, tokens // 2)) if padded else tokens for n in range(batch)])
    valid = np.arange(tokens) < lens[:, None]  # (B, S)
    masks = [sabi_oracle.blocks_of(video_oracle.seen(spans, cube, rule, **options), shape) for rule in (video.SlidingTiles((1, 1, 1)), *rules)]
    masks = [sabi_oracle.tokens_of(mask, tokens, tokens, shape) for mask in masks]
    counts = valid & ~masks[0].all(axis=-1)  # if the blocks of a query's own cube hold all keys, every rule keeps them
    kept = [(video_oracle.shares(*(x.astype(np.float64) for x in (q, k)), mask, scale, lens) * counts[:, None]).sum(axis=(0, 2)) for mask in masks[1:]]
    means = np.stack(kept) / max(1, counts.sum())

    def choose(padding: float, **more: Any) -> list[int]:
        filled = (np.where(valid[:, None, :, None], x, x.dtype.type(padding)) for x in (q, k))
        given = [np.ascontiguousarray(laid_out(x, layout, lens)) for x in filled]
        named = {"num_heads": q.shape[1], "num_kv_heads": kv_heads} if layout == "BSH" else {}
        return video.choose_rules(*given, order, rules, shape, scale=scale, layout=layout, **options, **named, **more)

    lengths = {"kv_lens": lens} if padded else {}
    chosen = choose(draw.pick("padding", (0.0, 30.0, float("nan"))), sampled_rows=tokens, **lengths)
    if len(chosen) != q.shape[1] or not all(type(n) is int for n in chosen):
        raise Finding(f"expected a rule for each of {q.shape[1]} heads, got {chosen}")
    for head, n in enumerate(chosen):
        if means[n, head] < means[:, head].max() - 1e-5:
            raise Finding(f"head {head}: rule {n} was chosen, but {means[:, head]} are kept")
    few = {"sampled_rows": draw.integer("sampled_rows", 1, 20), "seed": draw.integer("seed", 0, 3), "num_threads": 1}
    first, second = choose(0.0, **few, **lengths), choose(5.0, **few, **({"kv_lens": lens.tolist()} if layout != "TND" else {}))
    if first != second:
        raise Finding(f"the rules {first} where padding is 0, {second} where it is 5")


@problem("video.permute", weight=0.1)
def permute(draw: Draw) -> None:
    _, _, order = draw_order(draw)
    layout = draw.pick("layout", ("BNSD", "BSND", "BSH", "TND"))
    axis = {"BNSD": 2, "BSND": 1, "BSH": 1, "TND": 0}[layout]
    rng, arrays = draw.rng("arrays"), []
    for n in range(draw.integer("arrays", 1, 3)):
        shape = [draw.integer(f"{n}.axis.{i}", 1, 4) for i in range(draw.integer(f"{n}.axes", axis + 1, 4))]
        shape[axis] = order.geometry.num_tokens
        array = (rng.random(shape) * 100).astype(draw.pick(f"{n}.dtype", ("float32", "float16", "float64", "uint16", "int8")))
        arrays.append(array.swapaxes(0, axis).copy().swapaxes(0, axis) if draw.flag(f"{n}.view") else array)
    for name, places in (("permute", order.indices), ("restore", order.inverse)):
        outs = [np.empty(x.shape, x.dtype) for x in arrays] if draw.flag(f"{name}.out") else None
        got = getattr(order, name)(*arrays, layout=layout, out=outs)
        results = got if len(arrays) > 1 else (got,)
        for n, (x, result) in enumerate(zip(arrays, results, strict=True)):
            same(f"{name} {n}", result, np.ascontiguousarray(x.swapaxes(0, axis)[places].swapaxes(0, axis)))
            if not result.flags.c_contiguous or (outs is not None and result is not outs[n]):
                raise Finding(f"{name}: expected a contiguous result, in out where it is given")
