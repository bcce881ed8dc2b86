"""`quest_prefill_metadata`, the three functions named `quest_block_select_paged...`, `select_blocks` and `select_and_attend`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import blitz_attn
from blitz_attn.compat import select_attn_ops

from . import arrays, checks
from . import quest_oracle as oracle
from .arrays import as_integers, check_kind
from .draw import Discard, Draw
from .paged_oracle import attend
from .paged_problems import GARBAGE, PER_CALL, Case
from .problems import Finding, problem
from .quest_draws import Batch, Choice, Held, contents, laid_out, named_bits, pages_for, unusual_numbers

SOURCES = (blitz_attn, select_attn_ops)


# ---- Summaries ----------------------------------------------------------------------------------------------------


class Metadata:
    """A call of `quest_prefill_metadata`. With `pool`, the largest keys are written to pages of the cache itself."""

    NAMES = ("maxblocks", "minblocks", "meanblocks")

    def __init__(self, draw: Draw):
        self.batch = batch = Batch(draw, most_size=1024)
        self.eight = draw.pick("eight", (None, "int8", "float8_e4m3"), (4, 1, 1))
        self.dtype = draw.pick("dtype", arrays.FLOATS) if self.eight is None else "float32"
        self.kind = draw.pick("kind", arrays.kinds_for(self.dtype))
        self.hnd = draw.pick("kv_layout", ("NHD", "HND")) == "HND"
        self.pool = draw.flag("pool", 0.15) and not self.hnd and self.eight is None
        self.rows = batch.size if self.pool else draw.integer("rows", 1, 40, likely=(1, 2, batch.size))
        how, unusual, spread = draw.pick("keys", ("normal", "whole", "alike")), unusual_numbers(draw, "keys.odd"), draw.flag("spread", 0.1) and not self.pool
        own, count = batch.pages("keys", 1)
        self.summary_pages, self.summaries = batch.pages("summaries", self.rows)
        if self.pool:  # summary pages come after the pages of keys
            self.summary_pages = [x + count for x in self.summary_pages]
            self.summaries = count = count + self.summaries
        shape = (batch.kv_heads, batch.dim)
        garbage = GARBAGE[draw.pick("garbage", (0, 1, 2))]
        self.scale: Held | None = None  # one scale per token and head
        self.fixed: Any = None  # one scale per head, or a single one
        if self.eight is None:
            keys = [contents(draw.rng(f"keys[{b}]"), (int(n), *shape), self.dtype, how, unusual) for b, n in enumerate(batch.lens)]
            self.keys = [np.repeat(x[:, :1], batch.kv_heads, axis=1) for x in keys] if spread else keys
            cache = laid_out(self.keys, shape, (own, count), batch.size, garbage)
            self.k = Held(draw, "k_cache", cache, self.dtype, self.kind, self.hnd, spread)
        else:
            self._eight_bits(draw, (own, count), unusual[0], garbage)
        self.tables = arrays.page_table(draw, "block_tables", own)
        self.summary_tables = arrays.page_table(draw, "metadata_block_tables", self.summary_pages)
        self.lens = as_integers(draw, "seq_lens", batch.lens)
        self.start = None
        if draw.flag("start_lens", 0.3):
            self.start = np.array([draw.integer(f"start_lens[{b}]", 0, n + 5, likely=(0, n, n - 1, batch.size)) for b, n in enumerate(batch.lens)], np.int64)
        self.wanted = [name for name in self.NAMES if draw.flag(name, 0.75)] or ["meanblocks"]

    def _eight_bits(self, draw: Draw, own: tuple[list[np.ndarray], int], unusual: float, garbage: float) -> None:
        """Draws a quantised cache, in which numbers and scales may be NaN, and the keys that it stands for."""
        batch, kind = self.batch, draw.pick("eight.kind", arrays.kinds_for(self.eight))
        every, numbers, scales = [], [], []
        for b, n in enumerate(batch.lens):
            rng = draw.rng(f"keys[{b}]")
            bits = rng.integers(0, 256, (int(n), batch.kv_heads, batch.dim), dtype=np.uint8)
            bits[((bits & 0x7F) == 0x7F) | (rng.random(bits.shape) < unusual)] = 0x7F if unusual else 1
            every.append(bits)
            numbers.append(bits.view(np.int8).astype(np.float64) if self.eight == "int8" else arrays.float8_values(bits))
            scales.append(((0.1 + rng.random(bits.shape[:2])) * np.where(rng.random(bits.shape[:2]) < unusual, np.nan, 0.02)).astype(np.float32).astype(np.float64))
        how = draw.pick("scales", ("tokens", "heads", "one", "number"), (3, 1, 1, 1))
        if how == "tokens":
            whole = laid_out(scales, (batch.kv_heads,), own, batch.size, garbage)
            self.scale = Held(draw, "k_scale", whole, "float32", "torch" if kind == "torch" else "numpy", self.hnd)
        else:
            fixed = draw.rng("k_scale").random(batch.kv_heads if how == "heads" else ()) + 0.01
            self.fixed = np.asarray(fixed, np.float32) if how != "number" else float(np.float32(fixed))
            scales = [np.broadcast_to(np.asarray(self.fixed, np.float64), x.shape[:2]) for x in numbers]
        with np.errstate(invalid="ignore"):
            self.keys = [(x * scale[..., None]).astype(np.float32).astype(np.float64) for x, scale in zip(numbers, scales, strict=True)]
        raw = draw.rng("bits").integers(0, 127, (own[1], batch.size, batch.kv_heads, batch.dim), dtype=np.uint8)
        for bits, pages in zip(every, own[0], strict=True):
            i = np.arange(len(bits))
            raw[pages[i // batch.size], i % batch.size] = bits
        self.k = Held(draw, "k_cache", raw.view(np.int8) if self.eight == "int8" else raw, self.eight, kind, self.hnd)

    def options(self, layout: str) -> dict[str, Any]:
        """The options that describe the cache in a layout."""
        scale = self.fixed
        if self.scale is not None:
            scale = self.scale.given() if layout == ("HND" if self.hnd else "NHD") else self.scale.other_layout()
        dtype = "float8_e4m3" if self.eight == "float8_e4m3" and self.k.kind == "bits" else named_bits(self.dtype, self.kind)
        return {"kv_layout": layout, "k_scale": scale, "dtype": dtype}

    def outputs(self, name: str = "") -> dict[str, Held]:
        """Output arrays for summaries. The numbers that fill the arrays show which elements are overwritten."""
        shape = (self.summaries, self.rows, self.batch.kv_heads, self.batch.dim)
        return {
            x: Held(self.batch.draw, f"{x}{name}", arrays.rounded(self.batch.draw.rng("before").integers(100, 200, shape), self.dtype), self.dtype, self.kind)
            for x in self.wanted
            if not (self.pool and x == "maxblocks")
        }

    def expected(self, before: dict[str, Held], only: int | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(values, allowed error) of each summary. Rows that must not be written keep the numbers that are there."""
        found = {name: (x.values(), np.zeros(x.placed.array.shape)) for name, x in before.items()}
        if self.pool and "maxblocks" in self.wanted:
            found["maxblocks"] = (self.k.values(), np.zeros(self.k.placed.array.shape))
        for b, keys in enumerate(self.keys):
            start = 0 if self.start is None else int(self.start[b])
            if start >= len(keys) or only not in (None, b):
                continue
            every = oracle.summaries(keys, self.batch.size)
            rounding = checks.EPSILON[self.dtype] * np.abs(every.mean) + (2.0**-25 if self.dtype == "float16" else 1e-36)
            unit = 2 * checks.EPSILON["float64"] if self.dtype == "float64" else oracle.UNIT
            mean_error = (min(self.batch.size, len(keys)) + oracle.SLACK) * unit * every.sizes + 2 * rounding
            for i in range(start // self.batch.size, len(self.summary_pages[b]) * self.rows):
                at = self.summary_pages[b][i // self.rows], i % self.rows
                for name, (values, allowed) in found.items():
                    numbers = {"maxblocks": every.largest, "minblocks": every.smallest, "meanblocks": every.mean}[name]
                    values[at] = numbers[i] if i < len(numbers) else 0
                    if name == "meanblocks" and i < len(numbers):
                        allowed[at] = np.where(np.isfinite(mean_error[i]), mean_error[i], 0)
        return found

    def call(self, outputs: dict[str, Held], num_threads: int, only: int | None = None, cache: Any = None, **options: Any) -> None:
        rows = slice(None) if only is None else slice(only, only + 1)
        k = self.k.given(written=self.pool) if cache is None else cache
        given = {name: x.given(written=True) for name, x in outputs.items()}
        if self.pool and "maxblocks" in self.wanted:
            given["maxblocks"] = k
        options = {"start_lens": None if self.start is None else self.start[rows], **self.options("HND" if self.hnd else "NHD"), **options}
        SOURCES[self.batch.draw.options["module"]].quest_prefill_metadata(
            k, self.tables.array[rows], self.lens if only is None else self.batch.lens[rows], self.summary_tables.array[rows], given.get("maxblocks"),
            given.get("minblocks"), meanblocks=given.get("meanblocks"), num_threads=num_threads, **options,
        )  # fmt: skip

    def check(self, what: str, outputs: dict[str, Held], expected: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        for name, (values, allowed) in expected.items():
            held = outputs.get(name, self.k)
            checks.near(f"{what} {name}", held.values(), values, allowed)
            held.placed.check_around()
        for x in ([self.tables, self.summary_tables] if self.pool and "maxblocks" in self.wanted else [self.k.placed, self.tables, self.summary_tables]):
            x.check_unchanged()
        if self.scale is not None:
            self.scale.placed.check_unchanged()


@problem("quest_prefill_metadata", weight=1)
def quest_prefill_metadata(draw: Draw) -> None:
    check = draw.pick("check", ("oracle", "threads", "alone", "layout"))
    draw.pick("module", (0, 1))
    case = Metadata(draw)
    with checks.at_level(draw):
        outputs = case.outputs()
        expected = case.expected(outputs)
        case.call(outputs, checks.threads(draw))
        case.check("after the call:", outputs, expected)
        if case.pool or check == "oracle":
            return
        again, only, options, cache = case.outputs(" again"), None, {}, None
        if check == "alone" and len(case.keys):
            only = int(draw.rng("alone").integers(len(case.keys)))
            expected = case.expected(again, only)
        elif check == "layout":
            cache = case.k.other_layout()
            options = case.options("NHD" if case.hnd else "HND")
        case.call(again, draw.pick("other_threads", checks.THREADS), only, cache, **options)
        case.check(f"{check}:", again, expected)
        for name, x in outputs.items():
            one, other = x.placed.array, again[name].placed.array
            at = slice(None) if only is None else case.summary_pages[only]
            checks.same_bits(f"{check}: {name}", one[at].copy(), other[at].copy())


# ---- Selections ---------------------------------------------------------------------------------------------------


class Selection:
    """Queries, and the arrays that a method scores: summaries, or keys."""

    def __init__(self, draw: Draw, method: str, size_is_rows: bool = False, several: bool = False):
        self.batch = batch = Batch(draw)
        self.method = method
        self.per_query_head = draw.flag("per_query_head")
        self.group = draw.integer("group", 1, 9, likely=(1, 2, 3, 4, 8))
        self.dtype = draw.pick("dtype", arrays.FLOATS)
        self.source_dtype = self.dtype
        if self.dtype != "float64" and draw.flag("other dtype", 0.3):
            self.source_dtype = draw.pick("source_dtype", ("float32", "float16", "bfloat16"))
        self.kind = draw.pick("kind", arrays.kinds_for(self.dtype))
        self.source_kind = draw.pick("source_kind", ("same", "other"))
        kinds = arrays.kinds_for(self.source_dtype)
        self.source_kind = self.kind if self.source_kind == "same" and self.kind in kinds else kinds[0]
        self.hnd = method == "max" and draw.pick("kv_layout", ("NHD", "HND")) == "HND"
        self.rows = batch.size if method == "max" or size_is_rows else draw.integer("rows", 1, 40, likely=(1, 2, batch.size))
        self.how, self.unordered = draw.pick("values", ("normal", "whole", "alike"), (3, 2, 1)), draw.flag("unordered", 0.3)
        self.unusual, q_unusual = unusual_numbers(draw, "source.odd"), unusual_numbers(draw, "q.odd") if draw.flag("q.odd", 0.1) else (0.0, 0.0)
        self.ragged = several and draw.flag("ragged", 0.4)
        drawn = [draw.integer(f"q_lens[{b}]", 0, 12, likely=(1, 2, 3)) if self.ragged else 1 for b in range(len(batch.lens))]
        self.q_lens = np.minimum(drawn, batch.lens).astype(np.int64) if self.ragged else np.ones(len(batch.lens), np.int64)
        shape = (int(self.q_lens.sum()), batch.kv_heads * self.group, batch.dim)
        self.q = contents(draw.rng("q"), shape, self.dtype, "whole" if self.how == "whole" else "normal", q_unusual)
        self.sides = [self._sides(draw.rng(f"source[{b}]"), b) for b in range(len(batch.lens))]  # for each request, arrays (entries, N, D)
        self.placed_q = arrays.place(draw, "query", arrays.stored(self.q, self.dtype), views=arrays.views_for(self.kind))
        self.garbage = GARBAGE[draw.pick("garbage", (0, 1, 2))]
        self.tables, self.held = self.on_pages("source", spare=2)
        self.lens = as_integers(draw, "seq_lens", batch.lens)

    def _sides(self, rng: np.random.Generator, b: int) -> tuple[np.ndarray, ...]:
        batch = self.batch
        shape = (int(batch.lens[b] if self.method == "max" else batch.blocks[b]), batch.kv_heads, batch.dim)
        if self.method != "quest":
            return (contents(rng, shape, self.source_dtype, self.how, self.unusual),)
        both = contents(rng, (*shape[:2], 2, batch.dim), self.source_dtype, self.how, self.unusual)
        both = both if self.unordered else -np.sort(-both, axis=2)
        return both[:, :, 0], both[:, :, 1]

    def on_pages(self, name: str, spare: int) -> tuple[arrays.Placed, list[Held]]:
        """The tables and the source's arrays."""
        draw, batch = self.batch.draw, self.batch
        own = batch.pages(name, 1 if self.method == "max" else self.rows, spare)
        held = []
        for i in range(2 if self.method == "quest" else 1):
            whole = laid_out([x[i] for x in self.sides], (batch.kv_heads, batch.dim), own, self.rows, self.garbage)
            held.append(Held(draw, f"{name}[{i}]", whole, self.source_dtype, self.source_kind, self.hnd))
        return arrays.page_table(draw, f"{name}.tables", own[0]), held

    @property
    def bits(self) -> str | None:
        return named_bits(self.dtype, self.kind) or named_bits(self.source_dtype, self.source_kind)

    @property
    def rows_a_request(self) -> int:
        return self.batch.kv_heads * (self.group if self.per_query_head else 1)

    def queries(self, b: int) -> slice:
        end = int(self.q_lens[: b + 1].sum())
        return slice(end - int(self.q_lens[b]), end)

    def query(self, rows: slice = slice(None)) -> Any:
        """The queries of all requests, or of one."""
        return arrays.dressed(self.placed_q.array[rows if rows == slice(None) else self.queries(rows.start)], self.dtype, self.kind)

    def score(self, b: int) -> oracle.Scores | None:
        """The oracle's scores for a request; None for a request without queries."""
        queries = self.q[self.queries(b)]
        return oracle.score_of_queries(self.method, queries, self.per_query_head, self.sides[b], self.batch.size) if len(queries) else None

    def check(self, what: str, selected: Any, rules: list[oracle.Rule], ascending: bool) -> None:
        selected = np.asarray(selected)
        batch = self.batch
        if selected.dtype != np.int32 or selected.shape[:2] != (len(batch.lens), self.rows_a_request):
            raise Finding(f"{what}: {selected.dtype} of shape {selected.shape}")
        for b, rule in enumerate(rules):
            scores = self.score(b)
            for r in range(self.rows_a_request):
                if scores is None:
                    if (selected[b, r] != -1).any():
                        raise Finding(f"{what}: request {b}, row {r}: {selected[b, r].tolist()} without queries")
                    continue
                mistake = oracle.row_mistake(selected[b, r], rule, scores, r, ascending)
                if mistake:
                    raise Finding(f"{what}: request {b}, row {r}: {mistake}")

    def check_scores(self, selected: np.ndarray, scores: np.ndarray) -> None:
        """Checks that the score of each selected block is near the oracle's, and that blocks with the same numbers have the same score."""
        if scores.shape != selected.shape or not np.isneginf(scores[selected < 0]).all():
            raise Finding(f"scores of shape {scores.shape}, or not -inf in unused places")
        for b in range(len(self.batch.lens)):
            exact = self.score(b)
            if exact is None:
                continue  # nothing is selected
            for r in range(self.rows_a_request):
                used = selected[b, r] >= 0
                blocks, got = selected[b, r][used], scores[b, r][used].astype(np.float64)
                closed = ~exact.open[r][blocks] & np.isfinite(exact.value[r][blocks])
                with np.errstate(invalid="ignore"):
                    off = np.abs(got - exact.value[r][blocks]) > exact.error[r][blocks] + 2.0**-24 * np.abs(exact.value[r][blocks])
                if (off & closed).any():
                    raise Finding(f"scores: request {b}, row {r}: {got.tolist()} of {blocks.tolist()}, expected {exact.value[r][blocks].tolist()}")

    def check_unchanged(self) -> None:
        for x in (self.placed_q, self.tables, *(x.placed for x in self.held)):
            x.check_unchanged()


@problem("quest_block_select_paged", weight=1.5)
def quest_block_select_paged(draw: Draw) -> None:
    variant = draw.pick("variant", ("plain", "in_out", "in_out_w"))
    check = draw.pick("check", ("oracle", "threads", "alone", "pages"))
    module = SOURCES[draw.pick("module", (0, 1))]
    case = Selection(draw, "quest", size_is_rows=variant != "plain")
    batch = case.batch
    most = int(batch.blocks.max(initial=0))
    k = draw.integer("k", 1, most + 5, likely=(1, 2, 8, 16, most))
    ascending = variant == "plain" and draw.flag("ascending")
    if variant != "plain" and case.group == 1:
        case.per_query_head = False  # the shape of the result decides this option
    since = np.full(len(batch.lens), -1)
    sink, given_since = 0, -1
    if variant == "in_out_w":
        how = draw.pick("since", ("one", "each", "off"), (2, 2, 1))
        if how == "one":
            since[:] = given_since = draw.integer("since.one", 0, 200, likely=(0, 1, *(batch.lens % batch.size)))
        elif how == "each":
            since = np.array([draw.integer(f"since[{b}]", -1, n + 9, likely=(-1, 1, n, n % batch.size)) for b, n in enumerate(batch.lens)], np.int64)
            given_since = as_integers(draw, "since", since)
        sink = 0 if how == "off" else 1
    rules = [
        oracle.Rule(int(n), k, sink, oracle.stale(int(seq_len), int(ago), batch.size))
        for n, seq_len, ago in zip(batch.blocks, batch.lens, since, strict=True)
    ]

    def call(name: str, rows: slice, tables: Any, held: list[Held], lens: Any, num_threads: int) -> np.ndarray:
        given = case.query(rows), *(x.given() for x in held), tables, lens
        if variant == "plain":
            selected = module.quest_block_select_paged(
                *given, k, per_query_head=case.per_query_head, ascending=ascending, block_size=None if case.rows == batch.size else batch.size,
                dtype=case.bits, num_threads=num_threads,
            )  # fmt: skip
            check_kind("selected", selected, "int32", case.kind)
            return np.asarray(selected)
        shape, views = (len(batch.lens[rows]), case.rows_a_request, k), arrays.views_for(case.kind)
        written = arrays.poisoned(draw, name, shape, "int32", last_contiguous=False, views=views)
        out = arrays.dressed(written.array, "int32", "torch" if case.kind == "torch" else "numpy")
        with checks.default_threads(num_threads):
            if variant == "in_out":
                module.quest_block_select_paged_in_out(*given, out, dtype=case.bits)
            else:
                ago = given_since if rows == slice(None) or isinstance(given_since, int) else since[rows]
                module.quest_block_select_paged_in_out_w(*given, ago, out, dtype=case.bits)
        written.check_around()
        return written.array

    with checks.at_level(draw):
        selected = call("selected", slice(None), case.tables.array, case.held, case.lens, checks.threads(draw))
        case.check(variant, selected, rules, ascending)
        check_again(draw, check, case, selected, call)
        case.check_unchanged()


def check_again(draw: Draw, check: str, case: Selection, selected: np.ndarray, call: Any) -> None:
    """Checks the same selection with another number of threads, for one request alone, or with the source on other pages in another view."""
    batch, rows, tables, held, lens = case.batch, slice(None), case.tables.array, case.held, case.lens
    if check == "oracle":
        return
    if check == "alone" and len(batch.lens):
        b = int(draw.rng("alone").integers(len(batch.lens)))
        rows, tables, lens = slice(b, b + 1), tables[b : b + 1], batch.lens[b : b + 1]
    elif check == "pages":
        placed, held = case.on_pages("other source", spare=0)
        tables = placed.array
    again = call("selected again", rows, tables, held, lens, draw.pick("other_threads", checks.THREADS))
    checks.same_bits(check, selected[rows], again)


@problem("select_blocks", weight=2)
def select_blocks(draw: Draw) -> None:
    check = draw.pick("check", ("oracle", "threads", "alone", "pages", "order"))
    with_scores = draw.flag("return_scores")
    case = Selection(draw, draw.pick("method", ("quest", "mean", "max")), several=True)
    batch, ascending = case.batch, draw.flag("ascending")
    choice = Choice(draw, batch.lens, batch.size, case.q_lens)
    q_lens = as_integers(draw, "q_lens", case.q_lens) if case.ragged else None

    def call(name: str, rows: slice, tables: Any, held: list[Held], lens: Any, num_threads: int, ascending: bool = ascending) -> np.ndarray:
        source = tuple(x.given() for x in held)
        selected, counts, *scores = blitz_attn.select_blocks(
            case.query(rows), source if case.method == "quest" else source[0], tables, lens, method=case.method, **choice.given(rows),
            per_query_head=case.per_query_head, ascending=ascending, block_size=None if case.rows == batch.size else batch.size,
            q_lens=q_lens if rows == slice(None) or q_lens is None else case.q_lens[rows], kv_layout="HND" if case.hnd else "NHD",
            return_scores=with_scores, dtype=case.bits, num_threads=num_threads,
        )  # fmt: skip
        if with_scores:
            check_kind("scores", scores[0], "float32", case.kind)
            if rows == slice(None):
                case.check_scores(np.asarray(selected), np.asarray(scores[0]))
        check_kind("selected", selected, "int32", case.kind)
        check_kind("counts", counts, "int32", case.kind)
        selected = np.asarray(selected)
        used = np.array([[rule.used] * case.rows_a_request for rule in choice.rules[rows]], np.int32).reshape(-1, case.rows_a_request)
        if not np.array_equal(np.asarray(counts), used):
            raise Finding(f"counts {np.asarray(counts).tolist()}, expected {used.tolist()}")
        if rows != slice(None):  # these lists are only as wide as the request needs
            return np.pad(selected, [(0, 0), (0, 0), (0, choice.width - selected.shape[2])], constant_values=-1)
        if choice.width not in (None, selected.shape[2]):
            raise Finding(f"{selected.shape[2]} places, expected {choice.width}")
        return selected

    with checks.at_level(draw):
        selected = call("selected", slice(None), case.tables.array, case.held, case.lens, checks.threads(draw))
        case.check(case.method, selected, choice.rules, ascending)
        if check == "order":
            other = call("other order", slice(None), case.tables.array, case.held, case.lens, 1, not ascending)
            checks.same_bits("the other order", np.sort(selected), np.sort(other))
        else:
            check_again(draw, check, case, selected, call)
        case.check_unchanged()


@problem("select_and_attend", weight=1)
def select_and_attend(draw: Draw) -> None:
    """`select_and_attend` must equal attention over the blocks of `select_blocks`, with summaries of the keys as floats."""
    case = Case(draw, listed=False, newest=True)
    q_lens = case.problem.q_lens if case.ragged else None
    p, method, per_query_head = case.problem, draw.pick("method", ("quest", "mean", "max")), draw.flag("per_query_head")
    size, tables = p.k.shape[1], case.tables[0]
    choice = Choice(draw, p.seq_lens, size, p.q_lens)
    source, summary_tables = case.k.given(), tables
    if method != "max":
        rows = draw.integer("rows", 1, 20, likely=(1, 2, size))
        dtype = p.dtype if draw.flag("source.same") or p.dtype == "float64" else "float32"
        own = pages_for(draw.rng("summaries"), -(-p.seq_lens // size), rows, 1)
        every = [oracle.summaries(p.tokens(p.k, b), size) for b in range(len(p.seq_lens))]
        held = []
        for name in ("largest", "smallest") if method == "quest" else ("mean",):
            whole = arrays.rounded(laid_out([getattr(x, name) for x in every], p.k.shape[2:], own, rows, np.nan), dtype)
            held.append(Held(draw, name, whole, dtype, "bits" if dtype == "bfloat16" else "numpy").given())
        source, summary_tables = tuple(held) if method == "quest" else held[0], arrays.page_table(draw, "metadata_block_tables", own[0]).array
    summaries = {} if method == "max" else {"source": source, "metadata_block_tables": summary_tables}
    bits = "bfloat16" if p.dtype == "bfloat16" or case.cache_dtype == "bfloat16" else None
    how = choice.given() | {"method": method, "per_query_head": per_query_head}
    attending = case.options() | {"return_lse": True}
    of_keys = {name: attending.get(name) for name in ("k_scale", "kv_dtype")} if method == "max" else {}
    if isinstance(of_keys.get("kv_dtype"), tuple):  # of keys and of values
        of_keys["kv_dtype"] = of_keys["kv_dtype"][0]
    with checks.at_level(draw):
        selected, counts = blitz_attn.select_blocks(
            case.q.array, source, summary_tables, p.seq_lens, **how, **of_keys, block_size=size, kv_layout="HND" if case.hnd else "NHD",
            dtype=bits, num_threads=1, ascending=draw.flag("ascending"), q_lens=q_lens,
        )  # fmt: skip
        written = arrays.poisoned(draw, "out", (*p.q.shape[:2], p.v.shape[-1]), p.dtype) if draw.flag("out") else None
        out, lse = blitz_attn.select_and_attend(
            case.q.array, case.k.given(), case.v.given(), tables, p.seq_lens, **summaries, **how, **attending,
            out=written and written.array, num_threads=checks.threads(draw),
        )  # fmt: skip
        opened = attending | {"num_threads": draw.pick("other_threads", checks.THREADS), "page_size": size}
        here = {name: opened.pop(name) for name in ("return_lse", *PER_CALL)}
        plan = blitz_attn.PagedPlan(tables, p.seq_lens, **opened)
        planned = plan.select_and_attend(
            case.q.array, case.k.given(), case.v.given(), **summaries, **how, **here, return_selected=True
        )
        checks.same_bits("a plan", (out, lse, np.sort(selected), counts), (*planned[:2], np.sort(planned[2]), planned[3]))
        chosen = [[row[:n] for row, n in zip(*pair, strict=True)] for pair in zip(selected, counts, strict=True)]
        expected, expected_lse, allowed, allowed_lse = attend(dataclasses.replace(p, selected=chosen))
        more_out, more_lse = case.roundings()
        allowed, allowed_lse = allowed + more_out, allowed_lse + more_lse
        checks.near("out", arrays.values_of(out, p.dtype), expected, allowed)
        checks.near("lse", arrays.values_of(lse, p.real), expected_lse, allowed_lse)
        if written:
            written.check_around()
        apart = blitz_attn.paged_select_attention(
            case.q.array, case.k.given(), case.v.given(), tables, p.seq_lens, selected, counts=counts, **attending, num_threads=1
        )
        checks.same_bits("selecting and attending apart", (out, lse), apart)
        if draw.flag("split", 0.25):
            cut = attending | {"kv_split": size * draw.integer("kv_split", 1, 12, likely=(1, 2, 4)), "out_dtype": p.real}
            arguments = case.q.array, case.k.given(), case.v.given(), tables, p.seq_lens
            checks.same_bits(
                "in chunks",
                blitz_attn.paged_select_attention(*arguments, selected, counts=counts, **cut),
                blitz_attn.select_and_attend(*arguments, **summaries, **how, **cut),
            )
    case.check_unchanged()


# ---- Refusals -----------------------------------------------------------------------------------------------------


@problem("refused_summaries", weight=0.3)
def refused_summaries(draw: Draw) -> None:
    """Missing pages, a page twice, lengths beyond a table and outputs of other sizes are refused, and nothing is written."""
    draw.pick("module", (0,))
    case = Metadata(draw)
    batch, outputs, rng = case.batch, case.outputs(), draw.rng("mistake")
    long = np.flatnonzero(batch.lens)
    mistake = draw.pick("mistake", ("page", "summary page", "twice", "length", "rows", "heads"))
    if not len(long) or case.pool:
        raise Discard("no page in use")
    b = int(rng.choice(long))
    nowhere = int(rng.choice([-1, -2, 2**31 - 1]))
    if mistake == "page":
        case.tables.array[b, rng.integers(batch.blocks[b])], name = nowhere, "block_tables"
    elif mistake == "summary page":
        case.summary_tables.array[b, rng.integers(len(case.summary_pages[b]))], name = (nowhere, case.summaries)[int(rng.integers(2))], "metadata_block_tables"
    elif mistake == "twice":
        places = [(i, j) for i, pages in enumerate(case.summary_pages) for j in range(len(pages))]
        if len(places) < 2:
            raise Discard("one page in use")
        one, other = rng.permutation(len(places))[:2]
        case.summary_tables.array[places[one]], name = case.summary_tables.array[places[other]], "metadata_block_tables"
    elif mistake == "length":
        case.lens, name = batch.lens.copy(), "seq_lens"
        case.lens[b] = case.tables.array.shape[1] * batch.size + 1 + int(rng.integers(3))
    else:
        name = case.wanted[-1]
        shape = [case.summaries, case.rows, batch.kv_heads, batch.dim]
        shape[1 if mistake == "rows" else 2] += 1
        if mistake == "rows" and len(case.wanted) < 2:
            raise Discard("one summary has any rows")
        outputs[name] = Held(draw, f"{name} of another shape", np.full(shape, 100.0), case.dtype, case.kind)
    for x in (case.tables, case.summary_tables):
        x.before = x.buffer.copy()
    checks.refused(lambda: case.call(outputs, 1), name)
    for x in (*(y.placed for y in outputs.values()), case.k.placed, case.tables, case.summary_tables):
        x.check_unchanged()


@problem("long_blocks", weight=0.4)
def long_blocks(draw: Draw) -> None:
    """If no request is longer than a block, the selection is the same for any size of blocks."""
    batch, heads, dim = (draw.integer(name, 1, most) for name, most in (("batch", 3), ("kv_heads", 3), ("dim", 40)))
    rows = draw.integer("rows", 1, 9, likely=(4, 8))  # its product with a power of two may be 0 in 64 bits
    rng, lens = draw.rng("values"), np.array([draw.integer(f"seq_lens[{b}]", 0, 64) for b in range(batch)], np.int64)
    query, high, low = (rng.standard_normal(shape, np.float32) for shape in ((batch, heads, dim), *[(batch, rows, heads, dim)] * 2))
    tables, size = np.arange(batch, dtype=np.int32)[:, None], 2 ** draw.integer("log2(block_size)", 7, 62, likely=(60, 61, 62))
    method = draw.pick("method", ("quest_block_select_paged", "quest", "mean"))

    def call(block_size: int) -> Any:
        if method == "quest_block_select_paged":
            return blitz_attn.quest_block_select_paged(query, high, low, tables, lens, 2, block_size=block_size)
        source = (high, low) if method == "quest" else high
        return blitz_attn.select_blocks(query, source, tables, lens, 2, method=method, block_size=block_size)

    checks.same_bits(f"blocks of {size} tokens and of 64", call(size), call(64))
