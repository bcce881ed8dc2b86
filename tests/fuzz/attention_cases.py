"""Draws problems of block-sparse attention, and makes their arguments in every layout, dtype, view and kind of array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blitz_attn.sabi import BlockList

from . import arrays, bias_draws
from .attention_oracle import Attention
from .draw import Draw
from .problems import Finding

LAYOUTS = ("BNSD", "BSND", "BSH", "TND")
LENGTH_KINDS = ("list", "tuple", "int64", "int32", "int16", "uint16", "uint64", "strided")
SIGNED_KINDS = ("list", "tuple", "int64", "int32", "int16", "strided")
LIST_DTYPES = ("int32", "int64", "int16", "uint16")


@dataclass
class Case:
    """A problem, and the form of its arguments."""

    problem: Attention
    layout: str
    bad: np.ndarray  # bool (B, Hkv, Skv): keys and values that are garbage
    garbage: float
    has_q_lens: bool
    has_kv_lens: bool
    mask_dtype: str = ""

    @property
    def hit(self) -> np.ndarray:
        """Bool (B, H, Sq): the queries that see keys with garbage, or NaN in a mask."""
        p = self.problem
        spoilt = p.mask is not None and np.isnan(p.mask).any()
        if not self.bad.any() and not spoilt:
            return np.zeros(p.q.shape[:3], np.bool_)
        bad = p.grouped(self.bad)[:, :, None]
        return (p.seen() & (bad | np.isnan(p.mask) if spoilt else bad)).any(axis=-1)

    @property
    def mask_sizes(self) -> tuple[int, ...]:
        """The sizes of a mask in which no axis is shortened to length 1."""
        return (*self.problem.q.shape[:3], self.problem.k.shape[2])


# ---- Drawing ------------------------------------------------------------------------------------------------------


MOST = {"small": (3, 3, 4, 64, 64), "few": (3, 2, 8, 9, 1500), "long": (2, 1, 3, 300, 600), "deep": (2, 2, 4, 24, 100), "middle": (3, 3, 3, 150, 150)}


def _sizes(draw: Draw, regimes: dict[str, float]) -> tuple[int, ...]:
    """Batch, KV heads, group, query tokens, keys, head dims."""
    regime = draw.pick("regime", tuple(regimes), tuple(regimes.values()))
    most = MOST[regime]
    zero = draw.pick("zero", ("none", "batch", "s_q", "s_kv"), (40, 1, 1, 1))
    batch = draw.integer("batch", 1, most[0], likely=(1, 2))
    kv_heads = draw.integer("kv_heads", 1, most[1])
    group = draw.integer("group", 1, most[2], likely=(1, 2))
    s_q = draw.integer("s_q", 1, most[3], likely=(1, 2, 8, 16, 32, 33, 64, 128, 256))
    s_kv = draw.integer("s_kv", 1, most[4], likely=(most[4], 64, 128, 256, 512))
    dims = {"small": 128, "few": 128, "long": 64, "deep": 576, "middle": 70}[regime]
    dim = draw.integer("dim", 1, dims, likely=(8, 16, 32, 64, 128, 256, 576))
    v_dim = dim if draw.pick("v_dim.same", (True, False)) else draw.integer("v_dim", 1, dims, likely=(16, 64, 128, 512))
    return batch * (zero != "batch"), kv_heads, group, s_q * (zero != "s_q"), s_kv * (zero != "s_kv"), dim, v_dim


def _lengths(draw: Draw, name: str, batch: int, most: int) -> np.ndarray:
    return np.array([draw.integer(f"{name}[{b}]", 0, most, likely=(most,)) for b in range(batch)], np.int64)


def _window(draw: Draw, s_kv: int) -> tuple[int, int] | None:
    sizes = {"none": -1, "zero": 0, "one": 1, "some": 1 + s_kv // 5, "most": s_kv, "huge": 2**40}
    pair = tuple(sizes[draw.pick(f"window.{side}", tuple(sizes), (4, 1, 1, 2, 1, 1))] for side in ("before", "after"))
    return pair if draw.flag("window", 0.4) else None


def _blocks(draw: Draw, batch: int, heads: int, kv_heads: int, rows: int, columns: int) -> np.ndarray:
    """The blocks that are kept: random ones, sometimes all or none of them, and sometimes none in some of the rows."""
    rng = draw.rng("blocks")
    list_heads = 1 if draw.flag("lists.one_head", 0.3) else kv_heads if draw.flag("lists.kv_heads", 0.2) else heads
    lead = (1 if draw.flag("lists.one_batch", 0.3) else batch, list_heads)
    density = draw.pick("lists.density", (0.5, 1.0, 0.1, 0.9, 0.0))
    mask = rng.random((*lead, rows, columns)) < density
    if draw.flag("lists.empty_rows", 0.3):
        mask[rng.random((*lead, rows)) < 0.3] = False
    return mask


def draw_ranges(draw: Draw, batch: int, s_q: int, s_kv: int) -> np.ndarray:
    """A run of keys for each query."""
    rng, shape = draw.rng("ranges"), (batch, s_q)
    kind = draw.pick("ranges.kind", ("any", "chunks", "documents", "prefix", "wide", "none"), (4, 2, 2, 2, 1, 1))
    if kind == "any":
        ends = np.sort(rng.integers(-3, s_kv + 4, (*shape, 2)), axis=-1)
        if draw.flag("ranges.empty", 0.3):
            ends[rng.random(shape) < 0.3] = (s_kv // 2, s_kv // 2 - int(rng.integers(9)))
        return ends
    place = np.broadcast_to(np.arange(s_q) * max(s_kv, 1) // max(s_q, 1), shape)
    if kind == "chunks":
        size = int(rng.integers(1, max(2, s_kv)))
        return np.stack([place // size * size, place // size * size + size], axis=-1)
    if kind == "documents":  # a document is a run of keys; most queries belong to the document of the query before, the other queries to any
        cuts = np.concatenate([[0], np.sort(rng.integers(0, s_kv + 1, int(rng.integers(4)))), [s_kv]])
        document = rng.integers(0, len(cuts) - 1, shape)
        stays = rng.random(shape) < 0.95
        stays[:, :1] = False
        document = np.take_along_axis(document, np.maximum.accumulate(np.where(stays, 0, np.arange(s_q)), axis=1), axis=1)
        return np.stack([cuts[document], cuts[document + 1]], axis=-1)
    if kind == "prefix":
        return np.stack([np.zeros(shape, np.int64), np.maximum(place + 1, rng.integers(0, s_kv + 1, (batch, 1)))], axis=-1)
    info = np.iinfo(np.int32)
    return np.broadcast_to(np.int64((info.min, info.max) if kind == "wide" else (info.max, info.min)), (*shape, 2)).copy()


REGIMES = {"small": 5, "few": 2, "long": 2, "deep": 1}


def draw_problem(
    draw: Draw, *, spreads: tuple[float, ...] = (1, 0.02, 12), forward_only: bool = False, all_blocks: bool = False, regimes: dict[str, float] = REGIMES
) -> tuple[Attention, str, bool, bool]:
    dtype = draw.pick("dtype", arrays.FLOATS)
    layout = draw.pick("layout", LAYOUTS)
    batch, kv_heads, group, s_q, s_kv, dim, v_dim = _sizes(draw, regimes)
    has_q_lens, has_kv_lens = draw.flag("q_lens", 0.4), draw.flag("kv_lens", 0.4)
    full = np.full(batch, s_q, np.int64), np.full(batch, s_kv, np.int64)
    q_lens = _lengths(draw, "q_lens", batch, s_q) if has_q_lens or layout == "TND" else full[0]
    kv_lens = _lengths(draw, "kv_lens", batch, s_kv) if has_kv_lens or layout == "TND" else full[1]
    if layout == "TND":
        s_q, s_kv = int(q_lens.max(initial=0)), int(kv_lens.max(initial=0))
    likely = (16, 32, 64, 128)
    block_shape = draw.integer("block_q", 1, 2048, likely=likely), draw.integer("block_kv", 1, 2048, likely=likely)
    rows, columns = -(-s_q // block_shape[0]), -(-s_kv // block_shape[1])
    blocks = _blocks(draw, batch, kv_heads * group, kv_heads, rows, columns) if draw.flag("lists", 0.7) else None
    if all_blocks and blocks is not None:
        blocks = np.ones_like(blocks)
    rng = draw.rng("values")
    spread = draw.pick("spread", spreads)
    q = rng.standard_normal((batch, kv_heads * group, s_q, dim)) * spread
    k = rng.standard_normal((batch, kv_heads, s_kv, dim))
    v = rng.standard_normal((batch, kv_heads, s_kv, v_dim))
    problem = Attention(
        dtype,
        *(arrays.rounded(x, dtype) for x in (q, k, v)),
        q_lens,
        kv_lens,
        blocks,
        block_shape,
        draw.pick("scale", (None, 1.0, 0.0, -0.3, 4.0), (4, 1, 1, 1, 1)),
        draw.flag("causal", 0.4),
        _window(draw, s_kv),
        np.array([draw.integer(f"q_begin[{b}]", -20, s_kv + 20, likely=(0,)) for b in range(batch)], np.int64) if draw.flag("q_begin", 0.25) else None,
        q_lens + draw.pick("q_total", (0, 1, 9, 1000)) if draw.flag("q_total.given", 0.25) else None,
    )
    if draw.flag("ranges", 0.25):
        problem.ranges = draw_ranges(draw, batch, s_q, s_kv)
    if draw.flag("capped", 0.3):
        problem.softcap = draw.pick("softcap", (None, 2.0, 30.0, 1e6))
        if forward_only and draw.flag("sinks"):
            problem.sinks = arrays.rounded(draw.rng("sinks").standard_normal(kv_heads * group) * 3, "float32")
            problem.sinks[draw.rng("sinks.left").random(kv_heads * group) < 0.2] = -np.inf
    return problem, layout, has_q_lens, has_kv_lens


def draw_case(draw: Draw, *, forward_only: bool = False, **how: Any) -> Case:
    """Draws a case. `forward_only` allows options that only the forward call takes, and masks that make results NaN. With `all_blocks`, lists have
    all blocks."""
    problem, layout, has_q_lens, has_kv_lens = draw_problem(draw, forward_only=forward_only, **how)
    garbage = draw.pick("garbage", (0.0, np.inf, -np.inf), (2, 1, 1)) if draw.flag("garbage.infinite", 0.3) else np.nan
    bad = draw.rng("bad").random(problem.k.shape[:3]) < draw.pick("bad_keys", (0.0, 0.02, 0.3), (3, 1, 1))
    case = Case(problem, layout, bad, garbage, has_q_lens, has_kv_lens)
    if draw.flag("mask", 0.25):
        problem.mask, case.mask_dtype = bias_draws.draw_mask(draw, case.mask_sizes, problem.dtype, problem.shown(), spoils=forward_only)
    if draw.flag("alibi", 0.15):
        problem.slopes = bias_draws.draw_slopes(draw, problem.q.shape[1])
    return case


# ---- Arguments ----------------------------------------------------------------------------------------------------


def laid_out(x: np.ndarray, layout: str, lens: np.ndarray) -> np.ndarray:
    """Brings an array (B, H, S, D), or (B, H, S) with one number per query, into the layout."""
    if layout == "TND":
        runs = [x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lens)]
        return np.concatenate([np.empty((0, x.shape[1], *x.shape[3:]), x.dtype), *runs])
    if x.ndim == 3 or layout == "BNSD":
        return x
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) if layout == "BSH" else x


def _garbled(x: np.ndarray, bad: np.ndarray, value: float) -> np.ndarray:
    """A copy in which all rows that must not be read, and all bad rows, hold `value`."""
    return np.where(bad[..., None], value, x)


def inputs(case: Case) -> dict[str, np.ndarray]:
    """q, k and v in the case's layout and dtype; padding and bad keys hold garbage."""
    p = case.problem
    beyond_q = np.broadcast_to(np.arange(p.q.shape[2]) >= p.q_lens[:, None, None], p.q.shape[:3])
    bad = case.bad | (np.arange(p.k.shape[2]) >= p.kv_lens[:, None, None])
    given = {"q": (p.q, beyond_q, p.q_lens), "k": (p.k, bad, p.kv_lens), "v": (p.v, bad, p.kv_lens)}
    laid = {name: laid_out(_garbled(x, off, case.garbage), case.layout, lens) for name, (x, off, lens) in given.items()}
    return {name: np.ascontiguousarray(arrays.stored(x, p.dtype)) for name, x in laid.items()}


def listed(
    blocks: np.ndarray, dtype: str, rng: np.random.Generator, *, extra: int = 0, shuffled: bool = False, garbage: bool = False
) -> np.ndarray:
    """The block list of a mask: each row's columns, rising or shuffled. Places that are left hold pads, or one pad and then garbage."""
    columns, info = blocks.shape[-1], np.iinfo(dtype)
    keys = rng.random(blocks.shape) if shuffled else np.broadcast_to(np.arange(columns) / max(columns, 1), blocks.shape)
    order = np.argsort(np.where(blocks, keys, 2.0), axis=-1, kind="stable")
    counts = blocks.sum(axis=-1)
    width = int(counts.max(initial=0)) + extra
    if columns < width:
        order = np.concatenate([order, np.zeros((*blocks.shape[:-1], width - columns), order.dtype)], axis=-1)
    place = np.arange(width)
    pads = np.full((*blocks.shape[:-1], width), 65535 if dtype == "uint16" else -1, np.int64)
    if garbage:
        behind = place > counts[..., None]
        pads[behind] = rng.integers(info.min, info.max, int(behind.sum()), endpoint=True)
        first = place == counts[..., None]
        if dtype != "uint16":
            pads[first] = rng.integers(info.min, -1, int(first.sum()), endpoint=True)
    return np.where(place < counts[..., None], order[..., :width], pads).astype(dtype)


def draw_listed(draw: Draw, name: str, blocks: np.ndarray, extra: Sequence[int]) -> np.ndarray:
    """The block list of a mask in a drawn dtype and order, with a drawn number of unneeded places."""
    how = {"shuffled": draw.flag(f"{name}.shuffled"), "garbage": draw.flag(f"{name}.garbage", 0.3)}
    dtype = draw.pick(f"{name}.dtype", LIST_DTYPES)
    return listed(blocks, dtype, draw.rng(name), extra=draw.pick(f"{name}.extra", extra), **how)


def rules(case: Case, kinds: dict[str, str]) -> dict[str, Any]:
    """The options of the call that decide what is computed. `kinds` names the kind of sequence in which lengths are passed."""
    p = case.problem
    options: dict[str, Any] = {"block_shape": p.block_shape, "layout": case.layout, "causal": p.causal}
    if p.scale is not None:
        options["scale"] = p.scale
    if p.window is not None:
        options["window"] = p.window
    for name, lens, given in (("q", p.q_lens, case.has_q_lens), ("kv", p.kv_lens, case.has_kv_lens)):
        if case.layout == "TND":
            options[f"cu_seqlens_{name}"] = arrays.integers_as(kinds.get(name, "list"), np.concatenate([[0], np.cumsum(lens)]))
        elif given:
            options[f"{name}_lens"] = arrays.integers_as(kinds.get(name, "list"), lens)
    for name, numbers in (("q_begin", p.begin), ("q_total", p.total)):
        if numbers is not None:
            equal = numbers.size > 0 and (numbers == numbers[0]).all()
            options[name] = int(numbers[0]) if equal else arrays.integers_as(kinds.get(name, "list"), numbers)
    if p.ranges is not None:
        options["kv_ranges"] = laid_out(p.ranges[:, None], "TND", p.q_lens)[:, 0] if case.layout == "TND" else p.ranges
    if p.mask is not None:
        options["attn_mask"] = bias_draws.plain(p.mask, case.mask_dtype)
    if p.slopes is not None:
        options["alibi_slopes"] = p.slopes.astype(np.float32)
    if p.softcap is not None:
        options["softcap"] = p.softcap
    if p.sinks is not None:
        options["sinks"] = p.sinks.tolist()
    if case.layout == "BSH":
        options.update(num_heads=p.q.shape[1], num_kv_heads=p.k.shape[1])
    return options


def plain_arguments(case: Case, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and options of the case in their plainest form, for calls that are compared with the drawn one."""
    blocks = case.problem.blocks
    lists = None if blocks is None else listed(blocks, "int32", rng, shuffled=True)
    options = rules(case, {}) | {"dtype": "bfloat16" if case.problem.dtype == "bfloat16" else None}
    return inputs(case), {"sabi": lists, **options}


class Arguments:
    """The arrays of a call in drawn views and kinds, with guards around them."""

    def __init__(self, draw: Draw, case: Case):
        self.case, self.draw = case, draw
        self.placed: list[arrays.Placed] = []
        dtype = case.problem.dtype
        self.kinds = arrays.kinds_for(dtype)
        self.kind = draw.pick("kind", self.kinds)
        self.mixed = draw.flag("kinds_mixed", 0.15)
        self.arrays = {name: self.array(name, x, dtype) for name, x in inputs(case).items()}
        # bfloat16 is always named: arrays of bits need it, and views that torch cannot have are passed as bits
        named = dtype == "bfloat16" or draw.flag("dtype_named", 0.2)
        self.options = rules(case, {name: draw.pick(f"lengths.{name}", LENGTH_KINDS) for name in ("q", "kv")} | {"q_begin": draw.pick("q_begin.kind", SIGNED_KINDS)})
        self.options["dtype"] = dtype if named else None
        if case.layout in ("BNSD", "BSND", "TND") and draw.flag("heads_named", 0.2):
            self.options.update(num_heads=case.problem.q.shape[1], num_kv_heads=case.problem.k.shape[1])
        self.options["sabi"] = self._lists()
        if case.problem.ranges is not None:
            self.options["kv_ranges"] = self._ranges(self.options["kv_ranges"])
        if case.problem.mask is not None:
            placed, self.options["attn_mask"] = bias_draws.place(draw, case.problem.mask, case.mask_dtype, case.mask_sizes)
            self.placed.append(placed)
        if case.problem.slopes is not None:
            self.options["alibi_slopes"] = bias_draws.draw_given_slopes(draw, case.problem.slopes)

    def array(self, name: str, data: np.ndarray, dtype: str) -> Any:
        """`data` as an input. If kinds are mixed, a kind is drawn for each array but q."""
        placed = arrays.place(self.draw, name, data)
        self.placed.append(placed)
        kind = self.kind
        if self.mixed and name != "q":
            kind = self.kinds[int(self.draw.rng(f"{name}.kind").integers(len(self.kinds)))]
        if kind not in arrays.kinds_for(dtype):
            kind = "numpy"  # the log-sum-exp beside arrays of bfloat16
        return arrays.dressed(placed.array, dtype, kind)

    def _lists(self) -> Any:
        blocks, draw = self.case.problem.blocks, self.draw
        if blocks is None:
            return None
        lists = draw_listed(draw, "lists", blocks, (0, 1, 3))
        while lists.ndim > 2 and lists.shape[0] == 1 and draw.flag(f"lists.drop_axis.{lists.ndim}", 0.3):
            lists = lists[0]
        made = self._dressed("lists", lists, lists.dtype.name, "lists.kind")
        if type(made) is np.ndarray and draw.flag("lists.know_shape", 0.3):
            made = BlockList(made, self.options["block_shape"])
            if draw.flag("lists.alone"):
                del self.options["block_shape"]
        return made

    def _ranges(self, ranges: np.ndarray) -> Any:
        draw = self.draw
        dtype = draw.pick("ranges.dtype", ("int32", "int64"))
        if ranges.ndim == 3 and ranges.shape[0] and (ranges == ranges[:1]).all() and draw.flag("ranges.shared"):
            ranges = ranges[0]
        return self._dressed("ranges", ranges.astype(dtype), dtype, "ranges.dressed")

    def _dressed(self, name: str, array: np.ndarray, dtype: str, kind: str) -> Any:
        self.placed.append(arrays.place(self.draw, name, array, last_contiguous=False))
        return arrays.dressed(self.placed[-1].array, dtype, self.draw.pick(kind, arrays.kinds_for(dtype)))

    def check_unchanged(self) -> None:
        for x in self.placed:
            x.check_unchanged()


# ---- Results ------------------------------------------------------------------------------------------------------


class Outputs:
    """The outputs of a call. Outputs in `given` are drawn views, filled with NaN. The package makes the other outputs."""

    def __init__(self, made: Arguments, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], given: Sequence[str]):
        self.made, self.shapes, self.dtypes = made, shapes, dtypes
        self.placed = {x: arrays.poisoned(made.draw, x, shapes[x], dtypes[x]) for x in given}
        kind = "torch" if made.kind == "torch" else "bits"
        self.given = {x: arrays.dressed(y.array, dtypes[x], kind) for x, y in self.placed.items()}

    def check(self, results: dict[str, Any]) -> None:
        """Checks promises that do not depend on the numbers."""
        like = self.made.arrays["q"]
        bits = "bits" if getattr(like, "dtype", None) == np.uint16 else "ml_dtypes"
        kind = "torch" if type(like).__module__.partition(".")[0] == "torch" else bits
        for name, got in results.items():
            if name in self.given:
                if got is not self.given[name]:
                    raise Finding(f"{name}: another object than the one that was given")
                self.placed[name].check_around()
            else:
                arrays.check_kind(name, got, self.dtypes[name], kind)
            if tuple(got.shape) != self.shapes[name]:
                raise Finding(f"{name}: shape {tuple(got.shape)} where {self.shapes[name]} was expected")
        self.made.check_unchanged()


# ---- Other calls for the same problem -----------------------------------------------------------------------------


def _resized(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """`x` with this many entries on the axis: cut, or padded with zeros."""
    x = np.take(x, range(min(size, x.shape[axis])), axis)
    return np.concatenate([x, np.zeros((*x.shape[:axis], size - x.shape[axis], *x.shape[axis + 1 :]), x.dtype)], axis)


def alone(case: Case, b: int, layout: str, pad_q: int, pad_kv: int) -> Case:
    """Batch entry b alone, in another layout and with other padding. (TND has no padding.)"""
    p = case.problem
    q_len, kv_len = int(p.q_lens[b]), int(p.kv_lens[b])
    s_q, s_kv = q_len + (layout != "TND") * pad_q, kv_len + (layout != "TND") * pad_kv
    blocks = p.blocks
    if blocks is not None:
        blocks = blocks[min(b, blocks.shape[0] - 1)][None]
        blocks = _resized(_resized(blocks, 2, -(-s_q // p.block_shape[0])), 3, -(-s_kv // p.block_shape[1]))
    mask = p.mask
    if mask is not None:
        mask = mask[b if mask.shape[0] > 1 else 0][None]
        for axis, size in ((2, s_q), (3, s_kv)):
            mask = mask if mask.shape[axis] == 1 else _resized(mask, axis, size)
    problem = dataclasses.replace(
        p,
        q=_resized(p.q[b : b + 1], 2, s_q),
        k=_resized(p.k[b : b + 1], 2, s_kv),
        v=_resized(p.v[b : b + 1], 2, s_kv),
        q_lens=p.q_lens[b : b + 1],
        kv_lens=p.kv_lens[b : b + 1],
        blocks=blocks,
        begin=None if p.begin is None else p.begin[b : b + 1],
        total=None if p.total is None else p.total[b : b + 1],
        ranges=None if p.ranges is None else _resized(p.ranges[b : b + 1], 1, s_q),
        mask=mask,
    )
    bad = _resized(case.bad[b : b + 1], 2, s_kv)
    return Case(problem, layout, bad, case.garbage, s_q > q_len, s_kv > kv_len, case.mask_dtype)


def slice_of(case: Case, rows: slice) -> Case:
    """The queries `rows` of all batch entries as a call of their own; the slice begins at a block row."""
    p, block_q = case.problem, case.problem.block_shape[0]
    begin = p.kv_lens - p.q_lens if p.begin is None else p.begin
    problem = dataclasses.replace(
        p,
        q=p.q[:, :, rows],
        q_lens=np.clip(p.q_lens - rows.start, 0, rows.stop - rows.start),
        blocks=None if p.blocks is None else p.blocks[:, :, rows.start // block_q : -(-rows.stop // block_q)],
        begin=begin + rows.start,
        total=p.q_lens if p.total is None else p.total,
        ranges=None if p.ranges is None else p.ranges[:, rows],
        mask=p.mask if p.mask is None or p.mask.shape[2] == 1 else p.mask[:, :, rows],
    )
    return dataclasses.replace(case, problem=problem, has_q_lens=True)


def draw_alone(draw: Draw, case: Case, layout: str) -> tuple[int, Case] | None:
    """A batch entry, if there is one, and a call on it alone, in this layout and with other padding."""
    pads = draw.pick("alone.pad_q", (0, 1, 70)), draw.pick("alone.pad_kv", (0, 1, 70))
    if not len(case.problem.q):
        return None
    b = int(draw.rng("alone.entry").integers(len(case.problem.q)))
    return b, alone(case, b, layout, *pads)


def draw_slice(draw: Draw, case: Case) -> tuple[slice, Case] | None:
    """Some queries, if there are any, and a call on these alone."""
    rng, block_q, s_q = draw.rng("slice"), case.problem.block_shape[0], case.problem.q.shape[2]
    if s_q == 0:
        return None
    first = int(rng.integers(-(-s_q // block_q))) * block_q
    rows = slice(first, min(s_q, first + int(rng.choice([1, block_q, 3 * block_q, s_q]))))
    return rows, slice_of(case, rows)


def rows_of(x: np.ndarray, layout: str, heads: int, lens: np.ndarray, b: int, *, numbers: bool = False) -> np.ndarray:
    """The first lens[b] tokens of batch entry b: (heads, n, dim), or (heads, n) for one number per query."""
    n = int(lens[b])
    if layout == "TND":
        start = int(lens[:b].sum())
        return x[start : start + n].swapaxes(0, 1)
    if numbers or layout == "BNSD":
        return x[b, :, :n]
    return x[b, :n].reshape(n, heads, x[b, :1].size // heads).swapaxes(0, 1) if n else np.empty((heads, 0, 0), x.dtype)
