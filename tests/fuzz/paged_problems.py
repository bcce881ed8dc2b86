"""`paged_attention`, `paged_select_attention` and `PagedPlan`: caches, tables, lengths and rules at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import blitz_attn

from . import arrays, bias_draws, checks
from .attention_oracle import hiding
from .draw import Discard, Draw
from .paged_oracle import Paged, attend
from .problems import Finding, problem

CACHES = ("same", "float32", "float16", "bfloat16", "int8", "float8_e4m3")
GARBAGE = (0.0, np.nan, np.inf)
PER_CALL = ("sinks", "k_scale", "v_scale", "kv_ranges", "attn_mask", "alibi_slopes")  # options that the calls of a plan take


class Cache:
    """K or V: its stored array, its scales and its values."""

    def __init__(self, draw: Draw, name: str, shape: tuple[int, ...], dtype: str, used: np.ndarray, garbage: float, hnd: bool):
        rng = draw.rng(name)
        self.dtype, self.scales = dtype, None
        self.terms = 0.0  # if values are sums or differences of two numbers, as in formats of 4 bits: a bound of these numbers
        if dtype in ("int8", "float8_e4m3"):
            bits = rng.integers(0, 256, shape, dtype=np.uint8)
            bits[(bits & 0x7F) == 0x7F] = 0x11
            raw = bits.view(np.int8) if dtype == "int8" else bits
            numbers = raw.astype(np.float64) if dtype == "int8" else arrays.float8_values(bits)
            scales = (0.5 + rng.random(shape[:3])).astype(np.float32) * np.float32(0.01)
            self.values = numbers * scales[..., None].astype(np.float64)
            scales[~used] = garbage
            self.scales = scales.swapaxes(1, 2).copy() if hnd else scales
        elif dtype in arrays.ROWS:
            size, head = arrays.ROWS[dtype], 2 if dtype == "q4_1" else 1
            raw = rng.integers(0, 256, (*shape[:3], shape[3] // 32 * size), dtype=np.uint8)
            heads = (rng.standard_normal((*shape[:3], shape[3] // 32, head)) * (0.02 if dtype == "q8_0" else 0.3)).astype(np.float16)
            blocks = raw.reshape(*heads.shape[:-1], size)
            blocks[..., : 2 * head] = heads.view(np.uint8)
            if dtype != "q8_0" and heads.size:
                self.terms = 16 * float(np.abs(heads.astype(np.float64)).max())
            self.values = arrays.numbers_of_rows(raw, dtype)
            blocks[~used, :, : 2 * head] = np.full(head, garbage, np.float16).view(np.uint8)
        else:
            self.values = arrays.rounded(rng.standard_normal(shape) * draw.pick(f"{name}.spread", (1, 0.02, 8)), dtype)
            filled = self.values.copy()
            filled[~used] = garbage
            raw = arrays.stored(filled, dtype)
        self.placed = arrays.place(draw, name, raw.swapaxes(1, 2).copy() if hnd else raw)

    def given(self) -> Any:
        return self.placed.array


def _ranges(draw: Draw, tokens: np.ndarray) -> np.ndarray:
    """A run of tokens for each query. `tokens` has the number of tokens of each query's request. Some runs are empty, and some reach beyond the tokens."""
    rng = draw.rng("ranges")
    ends = np.sort(rng.integers(-2, np.maximum(tokens, 1)[:, None] + 3, (len(tokens), 2)), axis=-1)
    if draw.flag("ranges.wide", 0.2):
        ends[rng.random(len(tokens)) < 0.5] = (np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    return ends.astype(draw.pick("ranges.dtype", ("int32", "int64")))


class Case:
    """A drawn problem and its arguments. With `newest`, the queries are the last tokens, and tables are a matrix."""

    def __init__(self, draw: Draw, listed: bool, newest: bool = False):
        regime = draw.pick("regime", ("small", "long", "chunk"), (4, 2, 1))
        dtype = draw.pick("dtype", arrays.FLOATS)
        cache_dtype = draw.pick("cache", CACHES, (4, 1, 1, 1, 2, 2))
        cache_dtype = dtype if cache_dtype == "same" or dtype == "float64" else cache_dtype
        formats = cache_dtype, cache_dtype  # of keys and of values
        if dtype != "float64" and draw.flag("blocks", 0.15):
            formats = draw.pick("blocks.k", tuple(arrays.ROWS)), draw.pick("blocks.v", tuple(arrays.ROWS))
        self.cache_dtype = formats[0] if formats[0] == formats[1] else formats
        batch = draw.integer("batch", 0 if regime == "small" else 1, {"small": 4, "long": 2, "chunk": 2}[regime], likely=(1, 2))
        kv_heads = draw.integer("kv_heads", 1, 3)
        group = draw.integer("group", 1, 9, likely=(1, 2, 4, 8))
        dim = draw.integer("dim", 1, 576 if regime == "small" else 64, likely=(8, 16, 32, 64, 128))
        v_dim = dim if draw.pick("v_dim.same", (True, False)) else draw.integer("v_dim", 1, 160, likely=(16, 64, 128))
        if formats[0] in arrays.ROWS:
            dim, v_dim = -(-dim // 32) * 32, -(-v_dim // 32) * 32
        size = draw.integer("page_size", 1, 64, likely=(1, 4, 16, 32))
        longest = {"small": 80, "long": 3000, "chunk": 300}[regime]
        lens = np.array([draw.integer(f"seq_lens[{b}]", 0, longest, likely=(1, longest, 256, 257, 2048, 2049)) for b in range(batch)], np.int64)
        self.ragged = draw.flag("ragged")
        most = {"small": 10, "long": 10, "chunk": 70}[regime]
        begins = not newest and draw.flag("q_begin", 0.25)
        begin = np.array([draw.integer(f"q_begin[{b}]", -5, longest + 5, likely=(0, longest)) for b in range(batch)], np.int64) if begins else None
        drawn = [draw.integer(f"q_lens[{b}]", 0, most, likely=(1,)) for b in range(batch)]
        q_lens = np.array([n if begins else min(n, lens[b]) for b, n in enumerate(drawn)], np.int64)
        q_lens = q_lens if self.ragged else np.ones(batch, np.int64)
        rng = draw.rng("tables")
        counts = -(-lens // size)
        pages = int(counts.sum()) + 3
        order = rng.permutation(pages)
        shared = draw.flag("shared", 0.2)
        own = [order[rng.integers(0, pages, n)] if shared else order[int(counts[:b].sum()) :][:n] for b, n in enumerate(counts)]
        window = draw.pick("window", (None, 0, 5, 100))
        self.ranges = _ranges(draw, lens.repeat(q_lens)) if draw.flag("ranges", 0.2) else None
        heads = kv_heads * group
        q = arrays.rounded(draw.rng("q").standard_normal((int(q_lens.sum()), heads, dim)), dtype)
        self.sinks = draw.rng("sinks").standard_normal(heads).astype(np.float32) * 3 if draw.flag("sinks", 0.3) else None
        self.scale = draw.pick("scale", (None, 0.0, -0.5, 1.0))
        nothing = np.empty((pages, size, kv_heads, 0))
        self.problem = p = Paged(
            dtype, q, q_lens, nothing, nothing, own, lens, dim**-0.5 if self.scale is None else self.scale, window,
            None if self.sinks is None else self.sinks.astype(np.float64), draw.pick("softcap", (None, 2.0, 30.0, 1e6)), None, begin, self.ranges,
        )  # fmt: skip
        self.kv_split = size * draw.integer("kv_split", 1, 12, likely=(1, 2, 4)) if not newest and draw.flag("split", 0.25) else None
        self.mask_dtype, self.mask, self.slopes = "", None, None
        self.draw_bias(draw)
        used = np.zeros((pages, size), np.bool_)
        for b in range(batch):  # tokens that no query of the request sees may hold garbage, like those behind the request
            first = int(lens[b] - q_lens[b] if begin is None else begin[b])
            end = first + int(q_lens[b])
            if self.ranges is not None:
                end = int(self.ranges[q_lens[:b].sum() : q_lens[: b + 1].sum(), 1].max(initial=0))
            t = np.arange(0 if window is None else max(0, first - window), max(0, min(lens[b], end)))
            if p.mask is not None:
                hidden = np.isneginf(hiding(p.request(b).mask, dtype)).all(axis=(0, 1, 2))
                t = t[~np.broadcast_to(hidden, lens[b])[t]]
            used[own[b][t // size], t % size] = True
        garbage = draw.pick("garbage", (0, 1, 2))
        self.hnd = draw.pick("kv_layout", ("NHD", "HND")) == "HND"
        all_used = np.repeat(used[..., None], kv_heads, axis=2)
        self.k = Cache(draw, "k_cache", (pages, size, kv_heads, dim), formats[0], all_used, GARBAGE[garbage], self.hnd)
        self.v = Cache(draw, "v_cache", (pages, size, kv_heads, v_dim), formats[1], all_used, GARBAGE[garbage], self.hnd)
        p.k, p.v = self.k.values, self.v.values
        self.tables: tuple[Any, Any] = (arrays.page_table(draw, "block_tables", own).array, lens)
        if not newest and draw.pick("tables", ("matrix", "triple")) == "triple":
            indices = np.concatenate([*own, np.empty(0, np.int64)]).astype(draw.pick("indices.dtype", ("int32", "int64")))
            self.tables = (np.concatenate([[0], np.cumsum(counts)]), indices, lens - np.maximum(counts - 1, 0) * size), None
        if listed:
            if not newest and draw.flag("selected.own", 0.3):
                p.selected_size, self.kv_split = draw.integer("selected_size", 1, 70, likely=(1, 2, 4, 16, 64)), None
                counts = (-(-lens // p.selected_size)).repeat(q_lens)
            kinds = ("kv", "query") if p.selected_size is None else ("kv", "query", "one")
            rows = {"kv": kv_heads, "query": heads, "one": 1}[draw.pick("selected.rows", kinds)]
            kept = draw.pick("selected.kept", (0.5, 0.0, 1.0))
            make = draw.rng("selected")
            p.selected = [[np.flatnonzero(make.random(n) < kept) for _ in range(rows)] for n in counts]
        self.out_dtype = p.real if not newest and draw.flag("out_dtype", 0.25) else dtype
        self.q = arrays.place(draw, "q", arrays.stored(q, dtype))

    def draw_bias(self, draw: Draw) -> None:
        """Draws a mask, which may be larger than the requests, and slopes."""
        p, heads = self.problem, self.problem.q.shape[1]
        if draw.flag("mask", 0.25):
            more = draw.pick("mask.rows", (0, 1, 3)), draw.pick("mask.columns", (0, 1, 70))
            longest = p.q_lens.max(initial=0 if self.ragged else 1), p.seq_lens.max(initial=0)
            full = (len(p.q_lens), heads, *(int(n) + m for n, m in zip(longest, more, strict=True)))
            shown = np.zeros(full, np.bool_)
            for b in range(len(p.q_lens)):
                shown[b, :, : p.q_lens[b], : p.seq_lens[b]] = p.request(b).shown()[0]
            p.mask, self.mask_dtype = bias_draws.draw_mask(draw, full, p.dtype, shown, spoils=False)
            most_missing = 2 if more[1] else 4  # a mask of one axis has no more columns than there are tokens
            self.mask_placed, self.mask = bias_draws.place(draw, p.mask, self.mask_dtype, full, most_missing)
        if draw.flag("alibi", 0.15):
            p.slopes = bias_draws.draw_slopes(draw, heads)
            self.slopes = bias_draws.draw_given_slopes(draw, p.slopes)

    def options(self) -> dict[str, Any]:
        p, bits = self.problem, {}
        if p.dtype == "bfloat16":
            bits["dtype"] = "bfloat16"
        if self.cache_dtype in ("bfloat16", "float8_e4m3", *arrays.ROWS) or isinstance(self.cache_dtype, tuple):
            bits["kv_dtype"] = self.cache_dtype
        elif p.dtype == "bfloat16":
            bits["kv_dtype"] = None
        return {
            "scale": self.scale, "kv_layout": "HND" if self.hnd else "NHD", "window": p.window, "sinks": self.sinks, "softcap": p.softcap,
            "k_scale": self.k.scales, "v_scale": self.v.scales, "q_lens": p.q_lens if self.ragged else None, "kv_ranges": self.ranges,
            "attn_mask": self.mask, "alibi_slopes": self.slopes, **bits,
        }  # fmt: skip

    def roundings(self) -> tuple[float, float]:
        """The errors that outputs and log-sum-exps may have in addition, where values are sums or differences of two numbers."""
        p = self.problem
        sums = np.abs(p.q).sum(axis=-1).max(initial=0)
        score = 2.0**-22 * abs(p.scale) * float(sums) * self.k.terms
        largest = np.abs(p.v[np.isfinite(p.v)]).max(initial=0)
        return 4 * score * largest + 2.0**-20 * self.v.terms, 2 * score

    def new_options(self) -> dict[str, Any]:
        """The options that cases for `select_and_attend` do not draw: `q_begin`, which that function lacks, and options that change no choice."""
        p = self.problem
        begin = None if p.begin is None else p.begin.tolist()
        return {"q_begin": begin, "kv_split": self.kv_split, "out_dtype": None if self.out_dtype == p.dtype else self.out_dtype}

    def lists(self, rng: np.random.Generator, counts: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """The selected blocks in any order, with -1 behind them, or with counts and 9999 behind them."""
        chosen = self.problem.selected
        counts = counts and self.problem.selected_size is None
        assert chosen is not None
        width = max([len(x) for row in chosen for x in row], default=0) + 1
        rows = len(chosen[0]) if chosen else self.problem.k.shape[2]
        selected = np.full((len(chosen), rows, width), -1 if not counts else 9999, np.int32)
        for b, row in enumerate(chosen):
            for h, x in enumerate(row):
                selected[b, h, : len(x)] = rng.permutation(x)
        numbers = np.array([[len(x) for x in row] for row in chosen], np.int64).reshape(len(chosen), rows)
        return selected, numbers if counts else None

    def named(self, rng: np.random.Generator, counts: bool) -> tuple[str, dict[str, Any]]:
        """The name and the lists of the function or method that the case calls."""
        if self.problem.selected is None:
            return "attention", {}
        selected, numbers = self.lists(rng, counts)
        return "select_attention", {"selected": selected, "counts": numbers, "selected_size": self.problem.selected_size}

    def call(self, rng: np.random.Generator, counts: bool, num_threads: int, **options: Any) -> tuple[Any, Any]:
        tables, lens = self.tables
        given = {**self.options(), **self.new_options(), **options, "return_lse": True, "num_threads": num_threads}
        name, lists = self.named(rng, counts)
        call = getattr(blitz_attn, f"paged_{name}")
        return call(self.q.array, self.k.given(), self.v.given(), tables, lens, **lists, **given)

    def check_unchanged(self) -> None:
        for x in (self.q, self.k.placed, self.v.placed, *([] if self.mask is None else [self.mask_placed])):
            x.check_unchanged()


def run(draw: Draw, listed: bool) -> None:
    check = draw.pick("check", ("oracle", "threads", "order", "alone", "plan", "all", "chunks", "rounded"))
    case = Case(draw, listed)
    p = case.problem
    with_counts = draw.flag("counts")
    with checks.at_level(draw):
        written = {}
        if draw.flag("out", 0.3):
            written = {"out": arrays.poisoned(draw, "out", (*p.q.shape[:2], p.v.shape[-1]), case.out_dtype)}
        out, lse = case.call(draw.rng("order"), with_counts, checks.threads(draw), out=written["out"].array if written else None)
        expected, expected_lse, allowed, allowed_lse = attend(p)
        got = arrays.values_of(out, case.out_dtype)
        more_out, more_lse = case.roundings()
        allowed, allowed_lse = allowed + more_out, allowed_lse + more_lse
        if case.kv_split:  # each merge rounds
            merges = 64 * checks.EPSILON[p.real]
            allowed = allowed + merges * (np.abs(expected) + np.abs(p.v[np.isfinite(p.v)]).max(initial=0))
            allowed_lse = allowed_lse + merges * (1 + np.abs(np.where(np.isneginf(expected_lse), 0, expected_lse)))
        checks.near("out", got, expected, allowed)
        checks.near("lse", arrays.values_of(lse, p.real), expected_lse, allowed_lse)
        if got[np.isneginf(expected_lse)].any():
            raise Finding("out: rows that see nothing are not 0")
        case.check_unchanged()
        if written:
            written["out"].check_around()
        if check == "threads":
            again = case.call(draw.rng("order"), with_counts, draw.pick("other_threads", checks.THREADS))
            checks.same_bits("another number of threads", (out, lse), again)
        elif check == "order" and listed:
            checks.same_bits("another order of blocks", (out, lse), case.call(draw.rng("other order"), not with_counts, 1))
        elif check == "alone" and len(p.q_lens):
            check_alone(draw, case, out, lse)
        elif check == "rounded":
            check_rounded(draw, case, with_counts)
        elif check == "chunks" and not listed:
            check_chunks(draw, case)
        elif check == "plan":
            check_plan(draw, case, with_counts, out, lse)
        elif check == "all" and listed:
            size = p.selected_size or p.k.shape[1]
            lens = p.seq_lens if p.selected_size is None else p.seq_lens.repeat(p.q_lens)
            every = [[np.arange(-(-n // size)) for _ in row] for n, row in zip(lens, p.selected or [], strict=True)]
            case.problem = dataclasses.replace(p, selected=every)
            listed_all = case.call(draw.rng("order"), with_counts, 1)
            case.problem = dataclasses.replace(p, selected=None)
            checks.same_bits("all blocks listed and no list", listed_all, case.call(draw.rng("order"), with_counts, 1))


def check_alone(draw: Draw, case: Case, out: Any, lse: Any) -> None:
    """Checks that a request alone has the bits that it has in the batch."""
    p = case.problem
    b = int(draw.rng("alone").integers(len(p.q_lens)))
    end = int(np.cumsum(p.q_lens)[b])
    rows = slice(end - int(p.q_lens[b]), end)
    tables = np.asarray(p.pages[b], np.int32)[None]
    options = {**case.options(), **case.new_options()}
    if case.ragged:
        options["q_lens"] = p.q_lens[b : b + 1]
    if p.begin is not None:
        options["q_begin"] = p.begin[b : b + 1]
    if p.ranges is not None:
        options["kv_ranges"] = p.ranges[rows]
    if p.mask is not None:
        options["attn_mask"] = bias_draws.plain(p.mask[b if p.mask.shape[0] > 1 else 0][None], case.mask_dtype)
    arguments: list[Any] = [case.q.array[rows], case.k.given(), case.v.given(), tables, p.seq_lens[b : b + 1]]
    name, lists = case.named(draw.rng("other order"), False)
    if lists:
        lists["selected"] = lists["selected"][rows if lists["selected_size"] else slice(b, b + 1)]
        options |= lists
    again = getattr(blitz_attn, f"paged_{name}")(*arguments, **options, return_lse=True, num_threads=1)
    checks.same_bits("a request alone", (np.asarray(out)[rows], np.asarray(lse)[rows]), again)


def check_rounded(draw: Draw, case: Case, counts: bool) -> None:
    """Checks that the unrounded result, rounded by NumPy, is the usual result."""
    p = case.problem
    usual, wide = (
        arrays.values_of(case.call(draw.rng("order"), counts, 1, out_dtype=given)[0], dtype)
        for given, dtype in ((None, p.dtype), (p.real, p.real))
    )
    checks.same_bits("rounded by NumPy", arrays.stored(arrays.rounded(wide, p.dtype), p.dtype), arrays.stored(usual, p.dtype))


def check_chunks(draw: Draw, case: Case) -> None:
    """Checks that a call with kv_split has the bits of its splits, attended as requests of their own and merged node by node."""
    p, size = case.problem, case.problem.k.shape[1]
    split = case.kv_split or size * 3
    options = {**case.options(), "return_lse": True, "num_threads": 1, "sinks": None, "out_dtype": p.real}
    whole = case.call(draw.rng("order"), False, 1, kv_split=split, out_dtype=p.real, sinks=None)
    ends = np.cumsum(p.q_lens)
    for b, end in enumerate(ends):
        n, tokens = int(p.q_lens[b]), int(p.seq_lens[b])
        begin = tokens - n if p.begin is None else int(p.begin[b])
        nodes = []
        for at in range(0, max(1, tokens), split):
            here = min(split, tokens - at)
            pages = np.asarray(p.pages[b][at // size : -(-(at + here) // size)], np.int32)[None]
            mine = options | {"q_lens": [n], "q_begin": [begin - at]}
            if p.ranges is not None:
                mine["kv_ranges"] = p.ranges[end - n : end].astype(np.int64) - at
            if p.mask is not None:
                own = p.mask[b : b + 1] if p.mask.shape[0] > 1 else p.mask
                mine["attn_mask"] = bias_draws.plain(own if own.shape[3] == 1 else own[..., at : at + here], case.mask_dtype)
            out, lse = blitz_attn.paged_attention(case.q.array[end - n : end], case.k.given(), case.v.given(), pages, [here], **mine)
            nodes.append((out[:, :, None], lse[:, :, None]))
        while len(nodes) > 1:
            pairs = [blitz_attn.merge_states(*nodes[i], *nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
            nodes = pairs + nodes[len(nodes) & ~1 :]
        rows = slice(end - n, end)
        checks.same_bits("chunks by hand", (whole[0][rows], whole[1][rows]), (nodes[0][0][:, :, 0], nodes[0][1][:, :, 0]))


def check_plan(draw: Draw, case: Case, counts: bool, out: Any, lse: Any) -> None:
    """Checks that a plan gives the same bits, in its first and in its second call."""
    options = {**case.options(), **case.new_options()}
    rest = {name: options.pop(name) for name in PER_CALL}
    tables, lens = case.tables
    plan = blitz_attn.PagedPlan(tables, lens, page_size=case.problem.k.shape[1], num_pages=case.problem.k.shape[0], **options)
    arguments = [case.q.array, case.k.given(), case.v.given()]
    for _ in range(2):
        name, lists = case.named(draw.rng("order"), counts)
        again = getattr(plan, name)(*arguments, **lists, **rest, return_lse=True)
        checks.same_bits("a plan", (out, lse), again)


@problem("paged_attention", weight=3)
def paged_attention(draw: Draw) -> None:
    run(draw, listed=False)


@problem("paged_select_attention", weight=2)
def paged_select_attention(draw: Draw) -> None:
    run(draw, listed=True)


@problem("refused_tables", weight=0.5)
def refused_tables(draw: Draw) -> None:
    """A length beyond the table, or a page that the cache does not have, is refused, and nothing is written."""
    case = Case(draw, listed=False)
    p, rng = case.problem, draw.rng("mistake")
    if p.begin is not None:
        raise Discard("more queries than tokens may be refused first")
    long = [b for b in range(len(p.seq_lens)) if p.seq_lens[b] > 0]
    if not long:
        return
    b, size, pages = long[int(rng.integers(len(long)))], p.k.shape[1], p.k.shape[0]
    width = max(len(x) for x in p.pages)
    tables, lens = np.zeros((len(p.pages), width), np.int32), p.seq_lens.copy()
    for i, x in enumerate(p.pages):
        tables[i, : len(x)] = x
    if draw.pick("mistake", ("page", "length")) == "page":
        at, name = int(rng.integers(len(p.pages[b]))), "block_tables"
        tables[b, at] = (-1, -2, pages, 2**31 - 1)[int(rng.integers(4))]
    else:
        lens[b], name = width * size + 1 + int(rng.integers(2)) * size, "seq_lens"
    out = arrays.poisoned(draw, "out", (*p.q.shape[:2], p.v.shape[-1]), p.dtype)
    options = case.options()
    arguments = case.q.array, case.k.given(), case.v.given(), tables, lens
    checks.refused(lambda: blitz_attn.paged_attention(*arguments, out=out.array, **options), name)
    out.check_unchanged()
