"""`blitz_attn.sabi`: builders, conversions, set operations and statistics of block lists, against boolean masks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blitz_attn import sabi

from . import arrays, checks
from . import sabi_oracle as oracle
from .attention_cases import LIST_DTYPES, draw_listed
from .draw import Draw
from .problems import Finding, problem


def same(what: str, got: Any, expected: np.ndarray, known: Sequence[Any] = ()) -> None:
    """Asserts the same dtype, shape and elements. `known` is the block shape that a list must know, if any."""
    shapes = [got.block_shape] if isinstance(got, sabi.BlockList) else []
    if shapes != list(known):
        raise Finding(f"{what}: got a list that knows {shapes} where {list(known)} was expected")
    if not isinstance(got, np.ndarray) or got.dtype != expected.dtype or got.shape != expected.shape or not np.array_equal(got, expected):
        raise Finding(
            f"{what}: got {getattr(got, 'dtype', type(got))} {np.shape(got)}\n{got}\nwhere {expected.dtype} was expected\n{expected}"
        )


def close(what: str, got: Any, expected: Any) -> None:
    if np.shape(got) != np.shape(expected) or not np.allclose(got, expected, rtol=1e-12, atol=0):
        raise Finding(f"{what}: {got} where {expected} was expected")


def draw_dtype(draw: Draw) -> str | None:
    return draw.pick("dtype", (None, *LIST_DTYPES))


def draw_width(draw: Draw, mask: np.ndarray) -> int | None:
    """A width that is large enough, or None."""
    more = draw.pick("width.more", (None, 0, 1, 5))
    return None if more is None else int(mask.sum(axis=-1).max(initial=0)) + more or 1


# ---- Builders -----------------------------------------------------------------------------------------------------


def draw_grid(draw: Draw) -> tuple[int, int, tuple[int, int]]:
    sizes = tuple(draw.integer(name, 1, 400, likely=(64, 128, 256)) for name in ("s_q", "s_kv"))
    blocks = tuple(draw.integer(name, 1, 500, likely=(16, 32, 64, 128)) for name in ("block_q", "block_kv"))
    return *sizes, tuple(max(b, s // 24) for b, s in zip(blocks, sizes, strict=True))


Drawn = tuple[dict[str, Any], np.ndarray]  # a builder's own options, and its blocks; `run` applies `causal` (except for document)


def builder(name: str, weight: float = 0.2) -> Callable[[Callable[..., Drawn]], Callable[..., Drawn]]:
    """Registers a function that draws the options of a builder. It takes a draw, the sizes, the block shape and `causal`."""

    def register(drawn: Callable[..., Drawn]) -> Callable[..., Drawn]:
        @problem(f"sabi.{name}", weight)
        def run(draw: Draw) -> None:
            grid, dtype, causal = draw_grid(draw), draw_dtype(draw), draw.flag("causal")
            options, mask = drawn(draw, *grid, causal)
            if causal and name != "document":
                mask = mask & oracle.blocks_of(oracle.within(*grid[:2], -1, 0), grid[2])
            width = draw_width(draw, mask)
            sizes = () if name == "document" else grid[:2]
            got = getattr(sabi, name)(*sizes, block_shape=grid[2], **options, causal=causal, dtype=dtype, width=width)
            same(name, got, oracle.rising(mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape), dtype, width), [grid[2]])

        return drawn

    return register


@problem("sabi.dense", weight=0.1)
def dense(draw: Draw) -> None:
    s_q, s_kv, block_shape = draw_grid(draw)
    dtype = draw_dtype(draw)
    mask = oracle.blocks_of(np.ones((1, 1, s_q, s_kv), np.bool_), block_shape)
    same("dense", sabi.dense(s_q, s_kv, block_shape, dtype=dtype), oracle.rising(mask, dtype), [block_shape])


@problem("sabi.sliding_window", weight=0.3)
def sliding_window(draw: Draw) -> None:
    *sizes, block_shape = draw_grid(draw)
    dtype = draw_dtype(draw)
    window = tuple(draw.integer(name, -1, 400, likely=(-1, 0, 1, 64)) for name in ("before", "after"))
    is_causal = draw.flag("causal")
    mask = oracle.blocks_of(oracle.within(*sizes, *((-1, 0) if is_causal else window))[None, None], block_shape)
    options = {"dtype": dtype, "width": draw_width(draw, mask)}
    build = sabi.causal if is_causal else functools.partial(sabi.sliding_window, window=window)
    same("list", build(*sizes, block_shape, **options), oracle.rising(mask, *options.values()), [block_shape])


@builder("sink_local")
def sink_local(draw: Draw, s_q: int, s_kv: int, block_shape: tuple[int, int], causal: bool) -> Drawn:
    sink, local = draw.integer("sink", 0, 500, likely=(1, 64)), draw.integer("local", 0, 500, likely=(1, 64))
    tokens = (oracle.keys(s_kv) < sink) | oracle.within(s_q, s_kv, local, 0 if causal else local)
    return {"sink": sink, "local": local}, oracle.blocks_of(tokens, block_shape)


@builder("dilated")
def dilated(draw: Draw, s_q: int, s_kv: int, block_shape: tuple[int, int], causal: bool) -> Drawn:
    stride = draw.integer("stride", 1, 12, likely=(2, 3))
    reach = draw.integer("reach", 0, 30) if draw.flag("reach.given") else None
    return {"stride": stride, "reach": reach}, oracle.dilated(s_q, s_kv, block_shape, stride, reach, causal)


@builder("document")
def document(draw: Draw, _s_q: int, _s_kv: int, block_shape: tuple[int, int], causal: bool) -> Drawn:
    count = draw.integer("documents", 1, 6)
    lengths = [draw.integer(f"lengths[{i}]", 0, 90) for i in range(count)]
    kv_lengths = [draw.integer(f"kv_lengths[{i}]", 0, 90) for i in range(count)] if draw.flag("kv_lengths") else lengths
    lengths[0], kv_lengths[0] = max(lengths[0], 1), max(kv_lengths[0], 1)
    given = None if kv_lengths is lengths else np.array(kv_lengths, draw.pick("lengths.dtype", ("int64", "int32", "uint16")))
    return {"lengths": lengths, "kv_lengths": given}, oracle.blocks_of(oracle.document(lengths, kv_lengths, causal), block_shape)


@builder("vertical_slash")
def vertical_slash(draw: Draw, s_q: int, s_kv: int, block_shape: tuple[int, int], _causal: bool) -> Drawn:
    batch, heads = draw.integer("batch", 1, 3), draw.integer("heads", 1, 3)
    given = {}
    for name, most in (("vertical", s_kv), ("slash", s_q + s_kv)):
        leads = {"all": (), "heads": (heads,), "both": (batch, heads), "one head": (batch, 1)}
        lead = leads[draw.pick(f"{name}.axes", tuple(leads))]
        given[name] = draw.rng(name).integers(0, most, (*lead, draw.integer(f"{name}.count", 0, 6)))
    full = (x.reshape(*(1,) * (3 - x.ndim), *x.shape) for x in given.values())
    return given, oracle.blocks_of(oracle.vertical_slash(s_q, s_kv, *full), block_shape)


@problem("sabi.from_function", weight=0.3)
def from_function(draw: Draw) -> None:
    s_q, s_kv, block_shape = draw_grid(draw)
    lead = draw.integer("batch", 1, 2), draw.integer("heads", 1, 3)
    kind, rng = draw.pick("kind", ("band", "runs", "scattered", "blocks")), draw.rng("function")
    own = lead if draw.flag("own") else (1, 1)
    if kind == "band":
        ends = np.sort(rng.integers(-s_q, s_kv, (2, *own, 1, 1)), axis=0)
        away = np.arange(s_kv) - np.arange(s_q)[:, None]
        mask = (ends[0] <= away) & (away < ends[1])
    elif kind == "runs":
        ends = np.sort(rng.integers(0, s_kv + 1, (2, own[0], 1, s_q, 1)), axis=0)
        mask = (ends[0] <= np.arange(s_kv)) & (np.arange(s_kv) < ends[1])
    elif kind == "scattered":
        mask = rng.random((*own, s_q, s_kv)) < draw.pick("share", (0.5, 0.001, 0.02, 0.99, 1.0))
    else:
        grid = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
        mask = oracle.tokens_of(rng.random((*own, *grid)) < 0.3, s_q, s_kv, block_shape)
    mask = np.broadcast_to(mask, (*lead, s_q, s_kv))
    options: dict[str, Any] = {"block_shape": block_shape, "batch": lead[0], "heads": lead[1], "dtype": draw_dtype(draw)}
    options["width"] = draw_width(draw, blocks := oracle.blocks_of(mask, block_shape))
    mask_mod = lambda b, h, i, j: mask[b, h, i, j]  # noqa: E731
    made = sabi.from_function(mask_mod, s_q, s_kv, **options, token_rule="attn_mask")
    same("from_function", made.sabi, oracle.rising(blocks, options["dtype"], options["width"]), [block_shape])
    seen = oracle.tokens_of(blocks, s_q, s_kv, block_shape)
    hull = mask.any(axis=1, keepdims=True)  # the keys that any head of a query sees
    hull = np.logical_or.accumulate(hull, axis=-1) & np.logical_or.accumulate(hull[..., ::-1], axis=-1)[..., ::-1]
    if made.kv_ranges is not None:
        ranges = made.kv_ranges.reshape(lead[0], 1, s_q, 2)
        seen = seen & (ranges[..., :1] <= np.arange(s_kv)) & (np.arange(s_kv) < ranges[..., 1:])
    if made.attn_mask is None:
        same("what is seen", seen, mask)
        same("ranges", sabi.from_function(mask_mod, s_q, s_kv, **options).sabi, np.asarray(made.sabi), [block_shape])
        return
    same("attn_mask", made.attn_mask, np.ascontiguousarray(mask))
    if np.array_equal(seen & hull, mask):
        raise Finding("from_function: a mask where runs of keys mean the same")
    checks.refused(lambda: sabi.from_function(mask_mod, s_q, s_kv, **options), "mask_mod")


@problem("sabi.random_with_frame", weight=0.2)
def random_with_frame(draw: Draw) -> None:
    s_q, s_kv, block_shape = draw_grid(draw)
    rows, columns = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
    sparsity = draw.pick("sparsity", (0.5, 0.0, 0.1, 0.75, 0.9, 1.0))
    left, right = draw.integer("left", 0, min(3, columns)), draw.integer("right", 0, min(3, columns))
    top, bottom = draw.integer("top", 0, min(2, rows)), draw.integer("bottom", 0, min(2, rows))
    wide = left + right > columns or top + bottom > rows
    frame = sabi.FrameWidths(left, right, top, bottom) if draw.flag("frame") else None
    border = np.zeros((rows, columns), np.bool_)
    if frame is not None:
        border[:, :left] = border[:, columns - right :] = True
        border[:top] = border[rows - bottom :] = True
    forced, kept = int(border.sum()), int(np.floor(rows * columns * (1 - sparsity)))
    batch, heads = draw.integer("batch", 1, 3), draw.integer("heads", 1, 3)
    options = {"frame": frame, "batch": batch, "heads": heads, "seed": draw.integer("seed", 0, 10**6), "sort": draw.flag("sort")}
    dtype = draw_dtype(draw)
    try:
        got = sabi.random_with_frame(s_q, s_kv, block_shape, sparsity, **options, dtype=dtype)
    except ValueError as error:
        if "frame" not in str(error) or (not wide and forced <= kept):
            raise
        return
    if sparsity > 0 and frame is not None and (wide or forced > kept):  # with a sparsity of 0, the list is full, and the frame is not read
        raise Finding(f"a frame of {forced} blocks was accepted where {kept} of {rows} x {columns} are kept")
    plan = None if wide else sabi.frame_plan(rows, columns, sparsity, frame)
    if plan and (plan.forced_blocks, plan.kept_blocks) != (forced, kept):
        raise Finding(f"frame_plan: {plan} where {forced} forced and {kept} kept blocks were expected")
    mask = sabi.to_block_mask(got, columns)
    if mask.shape != (batch, heads, rows, columns) or not (mask | ~border).all():
        raise Finding(f"not all of the frame is kept, or shape {mask.shape}")
    free = ~border.all(axis=1)
    outside = (mask & ~border).sum(axis=-1)[..., free]
    if outside.size and (outside != outside.flat[0]).any():
        raise Finding(f"rows of different counts: {outside}")
    if abs(int(mask[0, 0].sum()) - kept) >= max(1, int(free.sum())):
        raise Finding(f"{mask[0, 0].sum()} blocks where {kept} were to be kept")
    for (b, h), (c, g) in itertools.combinations(itertools.product(range(batch), range(heads)), 2):
        if b + h == c + g and not np.array_equal(got[b, h], got[c, g]):
            raise Finding(f"({b}, {h}) and ({c}, {g}) draw from one seed and differ")
    if options["sort"]:
        same("rising", got, oracle.rising(mask, dtype, got.shape[-1]), [block_shape])


# ---- Conversions, set operations and statistics of random lists ---------------------------------------------------


def draw_list(draw: Draw, name: str, lead: tuple[int, ...], rows: int, columns: int) -> tuple[Any, np.ndarray]:
    """A list in any order, dtype, view and kind, with its mask."""
    rng = draw.rng(name)
    mask = rng.random((*lead, rows, columns)) < draw.pick(f"{name}.density", (0.5, 0.0, 0.1, 0.9, 1.0))
    lists = draw_listed(draw, name, mask, (1, 0, 3) if mask.any() else (1,))
    dtype, placed = lists.dtype.name, arrays.place(draw, name, lists, last_contiguous=False)
    kind = draw.pick(f"{name}.kind", ("numpy", "list", "torch")[: 2 + arrays.HAS_TORCH])
    if kind == "list" and dtype != "uint16" and lists.size:
        return placed.array.tolist(), mask
    return arrays.dressed(placed.array, dtype, "torch" if kind == "torch" else "numpy"), mask


def draw_shape(draw: Draw) -> tuple[tuple[int, ...], int, int]:
    lead = tuple(draw.integer(f"lead.{i}", 1, 3) for i in range(draw.pick("lead", (0, 1, 2))))
    return lead, draw.integer("rows", 1, 20, likely=(1, 2)), draw.integer("columns", 1, 20, likely=(1, 2))


def least_columns(mask: np.ndarray) -> int:
    used = np.flatnonzero(mask.any(axis=tuple(range(mask.ndim - 1))))
    return int(used[-1]) + 1 if used.size else 0


@problem("sabi.conversions", weight=0.5)
def conversions(draw: Draw) -> None:
    lead, rows, columns = draw_shape(draw)
    lists, mask = draw_list(draw, "a", lead, rows, columns)
    dtype = draw_dtype(draw)
    width = draw_width(draw, mask)
    known = draw.flag("columns.given")
    seen = mask if known else mask[..., : least_columns(mask)]
    given = columns if known else None
    same("to_block_mask", sabi.to_block_mask(lists, given), seen)
    same("from_block_mask", sabi.from_block_mask(mask, dtype=dtype, width=width), oracle.rising(mask, dtype, width))

    indptr, indices = sabi.to_csr(lists)
    flat = mask.reshape(-1, columns)
    same("indptr", indptr, np.concatenate([[0], np.cumsum(flat.sum(axis=1))]).astype(np.int64))
    same("indices", indices, np.nonzero(flat)[1].astype(np.int32))
    back = sabi.from_csr(indptr, indices, lead, columns=given, dtype=dtype, width=width)
    if known:
        same("from_csr", back, oracle.rising(mask, dtype, width))
    else:
        same("from_csr", sabi.to_block_mask(back, columns), mask)

    num, idx = sabi.to_num_idx(lists, given)
    order = np.argsort(~seen, axis=-1, kind="stable").astype(np.int32)
    same("num", num, mask.sum(axis=-1).astype(np.int32))
    same("idx", idx, order)
    if seen.shape[-1]:
        garbled = np.where(np.arange(seen.shape[-1]) < num[..., None], idx, draw.pick("garbage", (0, -7, 1000)))
        same("from_num_idx", sabi.from_num_idx(num, garbled, columns=columns, dtype=dtype), oracle.rising(mask, dtype))

    block_shape = draw.integer("block_q", 1, 9), draw.integer("block_kv", 1, 9)
    s_q = rows * block_shape[0] - draw.integer("short_q", 0, block_shape[0] - 1)
    s_kv = columns * block_shape[1] - draw.integer("short_kv", 0, block_shape[1] - 1)
    tokens = oracle.tokens_of(mask, s_q, s_kv, block_shape)
    same("to_token_mask", sabi.to_token_mask(lists, s_q, s_kv, block_shape), tokens)
    same("from_token_mask", sabi.from_token_mask(tokens, block_shape, dtype=dtype, width=width), oracle.rising(mask, dtype, width), [block_shape])
    some = tokens & (draw.rng("some").random(tokens.shape) < 0.1)
    same("covered", sabi.from_token_mask(some, block_shape, dtype=dtype), oracle.rising(oracle.blocks_of(some, block_shape), dtype), [block_shape])
    if len(lead) == 2:
        checked = sabi.check(lists, s_q, s_kv, block_shape)
        array = np.asarray(lists).astype(np.int64)
        same("check", checked, np.where(np.arange(array.shape[-1]) < mask.sum(axis=-1)[..., None], array, -1))


@problem("sabi.algebra", weight=0.4)
def algebra(draw: Draw) -> None:
    lead, rows, columns = draw_shape(draw)
    a, mask_a = draw_list(draw, "a", lead, rows, columns)
    other = tuple(1 if draw.flag(f"broadcast.{i}", 0.3) else n for i, n in enumerate(lead))
    b, mask_b = draw_list(draw, "b", other[draw.pick("b.drops", (0, 1, 2)) :], rows, columns)
    dtype = draw_dtype(draw)
    given = columns if draw.flag("columns.given") else None
    if not (mask_a.any() or mask_b.any()):
        given = columns  # empty lists have no least number of columns
    factors = draw.integer("factor_q", 1, 5), draw.integer("factor_kv", 1, 5)
    shape = tuple(draw.integer(f"block.{i}", 1, 9) * factor for i, factor in enumerate(factors))
    a, b = (sabi.BlockList(x, shape) if draw.flag(f"{name}.knows_shape") else x for name, x in (("a", a), ("b", b)))
    known = [shape] if isinstance(a, sabi.BlockList) else []
    of_both = [shape] if known or isinstance(b, sabi.BlockList) else []
    columns_of = {"union": mask_a | mask_b, "intersection": mask_a & mask_b, "difference": mask_a & ~mask_b}
    for name, expected in columns_of.items():
        same(name, getattr(sabi, name)(a, b, given, dtype=dtype), oracle.rising(expected, dtype), of_both)
    same("complement", sabi.complement(a, columns, dtype=dtype), oracle.rising(~mask_a, dtype), known)
    turned = sabi.transpose(a, columns, dtype=dtype)
    same("transpose", turned, oracle.rising(mask_a.swapaxes(-1, -2), dtype), [x[::-1] for x in known])
    larger = [(x[0] * factors[0], x[1] * factors[1]) for x in known]
    same("coarsen", sabi.coarsen(a, factors, columns, dtype=dtype), oracle.rising(oracle.blocks_of(mask_a, factors), dtype), larger)
    fine_rows = rows * factors[0] - draw.integer("short_rows", 0, factors[0] - 1)
    fine_columns = columns * factors[1] - draw.integer("short_columns", 0, factors[1] - 1)
    fine = oracle.tokens_of(mask_a, fine_rows, fine_columns, factors)
    smaller = [(x[0] // factors[0], x[1] // factors[1]) for x in known]
    same("refine", sabi.refine(a, factors, fine_rows, fine_columns, dtype=dtype), oracle.rising(fine, dtype), smaller)


@problem("sabi.statistics", weight=0.2)
def statistics(draw: Draw) -> None:
    lead, rows, columns = draw_shape(draw)
    lists, mask = draw_list(draw, "a", lead, rows, columns)
    counts = mask.sum(axis=-1)
    same("counts", sabi.counts(lists), counts.astype(np.int64))
    for per_head in (False, True):
        share = mask.mean(axis=(-1, -2)) if per_head else mask.mean()
        close("density", sabi.density(lists, columns, per_head=per_head), share)
        close("sparsity", sabi.sparsity(lists, columns, per_head=per_head), 1 - share)
    close("balance", sabi.balance(lists), counts.mean() / counts.max() if counts.any() else 1.0)
    if lead:
        heads = counts.sum(axis=-1)
        close("balance of heads", sabi.balance(lists, per_head=True), heads.mean() / heads.max() if heads.any() else 1.0)
    limits = {"max_rows": draw.pick("max_rows", (32, 20, 7, 1)), "max_columns": draw.pick("max_columns", (32, 20, 7, 1))}
    drawn = sabi.picture(lists, columns, **limits)
    if rows <= limits["max_rows"] and columns <= limits["max_columns"] and lead:
        if drawn.split("\n") != oracle.picture(mask):
            raise Finding(f"picture:\n{drawn}\nwhere this was expected:\n" + "\n".join(oracle.picture(mask)))
    elif any(line != line.rstrip() for line in drawn.splitlines()):
        raise Finding("picture: blanks at the end of a line")
