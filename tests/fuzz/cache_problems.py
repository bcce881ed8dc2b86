"""`append_paged_kv`, `quantize_kv` and `dequantize_kv`: every token is written where it belongs, and nothing else is written."""

from __future__ import annotations

from typing import Any

import numpy as np

import blitz_attn

from . import arrays, checks
from . import quest_oracle as oracle
from .arrays import INTEGERS_AS, integers_as
from .draw import Discard, Draw
from .paged_oracle import Paged, attend
from .problems import Finding, problem
from .quest_draws import Held, pages_for

LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}


# ---- Eight bits ---------------------------------------------------------------------------------------------------


def quantized(x: np.ndarray, to: str, scale: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, scales) of a float64 array (..., D). Each number is the nearest one of the format to x / scale. Ties go to even bits."""
    if scale is None:
        scale = (np.abs(x).max(axis=-1, initial=0) / LARGEST[to]).astype(np.float32).astype(np.float64)
        scale = np.where(scale == 0, 1, scale)
    scale = np.broadcast_to(scale, x.shape[:-1])
    bits = np.arange(-127, 128) if to == "int8" else np.array([*range(0xFE, 0x80, -1), *range(0x7F)])
    numbers = bits.astype(np.float64) if to == "int8" else arrays.float8_values(bits)
    wanted = x / scale[..., None]
    above = np.clip(np.searchsorted(numbers, wanted), 1, len(numbers) - 1)
    low, high = np.abs(wanted - numbers[above - 1]), np.abs(numbers[above] - wanted)
    return numbers[np.where((high < low) | (high == low) & (bits[above] % 2 == 0), above, above - 1)], scale


def dtype_object(draw: Draw, to: str) -> Any:
    """An 8-bit format as its name, or as a framework's dtype."""
    how = draw.pick("format.as", ("name", "numpy", "torch"))
    if how == "torch" and arrays.HAS_TORCH:
        import torch

        return torch.int8 if to == "int8" else torch.float8_e4m3fn
    if how == "numpy" and to == "int8":
        return np.dtype(np.int8)
    if how == "numpy" and arrays.HAS_ML_DTYPES:
        import ml_dtypes

        return np.dtype(ml_dtypes.float8_e4m3fn)
    return to


def any_shape(draw: Draw) -> tuple[int, ...]:
    before = (draw.integer(f"shape[{i}]", 0, 6, likely=(1, 2)) for i in range(draw.integer("axes", 0, 4)))
    return (*before, draw.integer("dim", 0, 80, likely=(1, 64)))


@problem("quantize_kv", weight=0.4)
def quantize_kv(draw: Draw) -> None:
    dtype, to, rng = draw.pick("dtype", arrays.FLOATS), draw.pick("format", tuple(LARGEST)), draw.rng("x")
    kind = draw.pick("kind", arrays.kinds_for(dtype))
    named = {"dtype": "bfloat16"} if kind == "bits" else {"dtype": dtype} if draw.flag("named", 0.2) else {}
    shape = any_shape(draw)
    sizes = rng.choice([0.0, 1.0, draw.pick("size", (1.0, 1e-30, 1e30, 1e-44, 1e4))], shape[:-1])
    with np.errstate(over="ignore"):
        x = arrays.rounded(rng.standard_normal(shape) * sizes[..., None], dtype)
    if draw.flag("halves", 0.3):  # many quotients are ties between two numbers
        x = arrays.rounded(rng.integers(-254, 255, shape) * 0.5, dtype)
        x[..., :1] = LARGEST[to] * 2.0 ** rng.integers(-1, 2, (*shape[:-1], 1))
    unusual = draw.flag("odd", 0.15)
    if unusual:
        x[rng.random(shape) < 0.1] = (np.nan, np.inf, -np.inf)[draw.pick("odd.number", (0, 1, 2))]
    placed = arrays.place(draw, "x", arrays.stored(x, dtype), views=arrays.views_for(kind))
    given, how = arrays.dressed(placed.array, dtype, kind), dtype_object(draw, to)
    if not np.isfinite(x).all():
        checks.refused(lambda: blitz_attn.quantize_kv(given, how, **named), "x")
    else:
        values, scale = blitz_attn.quantize_kv(given, how, **named)
        if values.dtype != ("int8" if to == "int8" else "uint8") or scale.dtype != np.float32:
            raise Finding(f"values of {values.dtype}, scales of {scale.dtype}")
        expected, expected_scale = quantized(x, to)
        checks.near("scale", scale.astype(np.float64), expected_scale, 0)
        checks.near("values", arrays.values_of(values, to), expected, 0)
    placed.check_unchanged()


@problem("dequantize_kv", weight=0.3)
def dequantize_kv(draw: Draw) -> None:
    dtype, rng, shape = draw.pick("format", tuple(LARGEST)), draw.rng("values"), any_shape(draw)
    kind = draw.pick("kind", arrays.kinds_for(dtype))
    bits = rng.integers(0, 256, shape, dtype=np.uint8)
    placed = arrays.place(draw, "values", bits.view(np.int8) if dtype == "int8" else bits, last_contiguous=False, views=arrays.views_for(kind))
    scale_dtype = draw.pick("scale_dtype", ("float32", "float64", "float16"))
    scale = rng.standard_normal(shape[:-1]) * draw.pick("size", (1.0, 1e-40, 1e30))
    with np.errstate(over="ignore"):
        scale = np.asarray(arrays.stored(scale, scale_dtype))
    scale = np.where(np.isfinite(scale), scale, scale.dtype.type(1))
    placed_scale = arrays.place(draw, "scale", scale, last_contiguous=False)
    given = placed_scale.array.tolist() if draw.flag("list", 0.2) and scale.size else placed_scale.array
    got = blitz_attn.dequantize_kv(arrays.dressed(placed.array, dtype, kind), given)
    product = arrays.values_of(placed.array, dtype) * scale.astype(np.float32).astype(np.float64)[..., None]  # exact, so rounded only once
    if got.dtype != np.float32:
        raise Finding(f"{got.dtype}, expected float32")
    checks.near("values", got.astype(np.float64), product.astype(np.float32).astype(np.float64), 0)
    placed.check_unchanged()
    placed_scale.check_unchanged()


# ---- Appending ----------------------------------------------------------------------------------------------------


class Side:
    """K or V: the new tokens, and the cache with its contents before the call."""

    def __init__(self, draw: Draw, name: str, new: np.ndarray, shape: tuple[int, ...], dtypes: tuple[str, str], kinds: tuple[str, str], hnd: bool):
        rng = draw.rng(f"{name}_cache")
        (dtype, self.dtype), (kind, cache_kind) = dtypes, kinds
        self.new = arrays.rounded(new, dtype)
        spread = draw.flag(f"{name}.spread", 0.1)
        self.new = np.repeat(self.new[:, :1], shape[2], axis=1) if spread else self.new
        given = arrays.stored(self.new[:, :1] if spread else self.new, dtype)
        self.tokens = arrays.place(draw, name, given, views=arrays.views_for(kind))
        if spread:
            arrays.repeated(self.tokens, 1, shape[2])
        self.named = dtype, kind
        self.eight = self.dtype in LARGEST
        before = rng.standard_normal(shape)
        if self.eight:
            before = rng.integers(0, 127, shape).astype(np.int8 if self.dtype == "int8" else np.uint8)  # no NaN among them
        self.cache = Held(draw, f"{name}_cache", before, self.dtype, cache_kind, hnd)
        self.fixed = None  # given scales: a single one, or one per head
        self.scale = None
        scales = draw.pick(f"{name}.scales", ("tokens", "heads", "one", "number"), (3, 1, 1, 1)) if self.eight else None
        if scales == "tokens":
            self.scale = Held(draw, f"{name}_scale", rng.random(shape[:3]) + 0.01, "float32", "torch" if cache_kind == "torch" else "numpy", hnd)
        elif scales is not None:
            numbers = (rng.random(shape[2] if scales == "heads" else ()) + 0.01) * (np.abs(self.new).max(initial=0) + 1e-3) / LARGEST[self.dtype]
            self.fixed = np.float32(numbers) if scales == "heads" else np.array(numbers, np.float32) if scales == "one" else float(np.float32(numbers))

    def given(self, tokens: Any = slice(None)) -> Any:
        given = self.tokens.array[tokens]
        return arrays.dressed(given if isinstance(tokens, slice) else np.ascontiguousarray(given), *self.named)

    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """The cache's numbers and scales. If there are no scales, they are 1."""
        numbers = self.cache.values()
        if self.scale is not None:
            return numbers, self.scale.values()
        return numbers, np.array(np.broadcast_to(np.float64(1 if self.fixed is None else self.fixed), numbers.shape[:3]))

    def expected(self, tokens: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The cache's numbers and scales after these tokens are written to these slots."""
        numbers, scales = self.held()
        with np.errstate(over="ignore", invalid="ignore"):
            new, new_scales = quantized(self.new, self.dtype, self.fixed) if self.eight else (arrays.rounded(self.new, self.dtype), np.ones(self.new.shape[:2]))
        for token, slot in zip(tokens, slots, strict=True):
            at = divmod(int(slot), numbers.shape[1])
            numbers[at], scales[at] = new[token], new_scales[token]
        return numbers, scales

    def check(self, what: str, expected: tuple[np.ndarray, np.ndarray]) -> None:
        for part, got, wanted in zip(("cache", "scale"), self.held(), expected, strict=True):
            checks.near(f"{what} {part}", got, wanted, 0)
        self.tokens.check_unchanged()
        for x in (self.cache, self.scale):
            if x is not None:
                x.placed.check_around()

    def check_unchanged(self) -> None:
        for x in (self.tokens, self.cache.placed, *([] if self.scale is None else [self.scale.placed])):
            x.check_unchanged()


class Append:
    """A drawn call. The tokens are written to the given slots, or to the last positions of their requests."""

    def __init__(self, draw: Draw, finite: bool):
        self.numbers_as, self.threads = draw.pick("numbers.as", INTEGERS_AS), checks.threads(draw)
        cache_dtype = draw.pick("cache", (*arrays.FLOATS, *LARGEST))
        cache_kind = draw.pick("cache_kind", tuple(x for x in arrays.kinds_for(cache_dtype) if x != "dlpack"))
        self.cache_dtype, self.hnd = cache_dtype, draw.pick("kv_layout", ("NHD", "HND")) == "HND"
        self.kv_heads, self.size = draw.integer("kv_heads", 1, 4), draw.integer("page_size", 1, 40, likely=(1, 4, 16))
        dims = draw.integer("dim", 1, 80, likely=(8, 32, 64)), draw.integer("v_dim", 1, 80, likely=(8, 32, 64))
        self.by_slots = draw.flag("slots", 0.35)
        batch = draw.integer("batch", 0, 4, likely=(1, 2))
        self.lens = np.array([draw.integer(f"seq_lens[{b}]", 0, 120, likely=(1, self.size, self.size + 1)) for b in range(batch)], np.int64)
        self.ragged = draw.flag("ragged", 0.7) or bool((self.lens == 0).any())
        new = [min(draw.integer(f"q_lens[{b}]", 0, 40, likely=(0, 1, self.size)), n) for b, n in enumerate(self.lens)] if self.ragged else [1] * batch
        self.new = np.array(new, np.int64)
        self.own, self.pages = pages_for(draw.rng("pages"), -(-self.lens // self.size), 1, 2)
        self._places(draw)
        tokens = len(self.slots)
        self.sides = []
        for name, dim in zip("kv", dims, strict=True):
            dtype = draw.pick(f"{name}.dtype", arrays.FLOATS)
            kind = draw.pick(f"{name}.kind", arrays.kinds_for(dtype))
            values = draw.rng(name).standard_normal((tokens, self.kv_heads, dim)) * draw.pick(f"{name}.spread_of_values", (1.0, 1e-6, 1e4))
            if not finite and cache_dtype not in LARGEST:
                values[draw.rng(f"{name}.odd").random(values.shape) < 0.1] = (np.nan, np.inf)[draw.pick(f"{name}.odd", (0, 1))]
            shape = (self.pages, self.size, self.kv_heads, dim)
            self.sides.append(Side(draw, name, values, shape, (dtype, cache_dtype), (kind, cache_kind), self.hnd))
        self.k, self.v = self.sides
        self.kv_dtype = cache_dtype if cache_kind == "bits" else draw.pick("kv_dtype", (None, cache_dtype))
        self.dtype = "bfloat16" if any(x.named[1] == "bits" for x in self.sides) else None
        self.summaries: dict[str, Held] = {}
        self.by_plan = not self.by_slots and draw.flag("plan", 0.3)
        if not self.by_slots and (self.by_plan or isinstance(self.tables, arrays.Placed)) and draw.flag("summaries"):
            self._summaries(draw, dims[0])

    def _places(self, draw: Draw) -> None:
        """Draws slots: slots[i] is the slot of token i, or -1 if the token is not written."""
        self.tables: Any = None
        if self.by_slots:
            count = draw.integer("tokens", 0, 60)
            free = draw.rng("slots").permutation(self.pages * self.size)
            self.slots = np.full(count, -1)
            self.slots[: len(free)] = free[:count]
            self.slots[draw.rng("left out").random(count) < draw.pick("left out", (0.0, 0.3, 1.0))] = -1
            self.slots = draw.rng("slots order").permutation(self.slots)
            return
        places = [np.arange(n - m, n) for n, m in zip(self.lens, self.new, strict=True)]
        slots = [pages[t // self.size] * self.size + t % self.size for pages, t in zip(self.own, places, strict=True)]
        self.slots = np.concatenate([*slots, np.empty(0, np.int64)]).astype(np.int64)
        self.tables = arrays.page_table(draw, "block_tables", self.own)
        if draw.pick("tables", ("matrix", "triple"), (3, 1)) == "triple":
            counts = -(-self.lens // self.size)
            indices = np.concatenate([*self.own, np.empty(0, np.int64)]).astype(draw.pick("indices.dtype", ("int32", "int64")))
            self.tables = np.concatenate([[0], np.cumsum(counts)]), indices, self.lens - np.maximum(counts - 1, 0) * self.size

    def _summaries(self, draw: Draw, dim: int) -> None:
        self.rows = draw.integer("rows", 1, 10, likely=(1, 2))
        self.summary_pages, count = pages_for(draw.rng("summary pages"), -(-self.lens // self.size), self.rows, 1)
        self.summary_tables = arrays.page_table(draw, "metadata_block_tables", self.summary_pages)
        for name in ("maxblocks", "minblocks") if draw.flag("both", 0.7) else ("minblocks",):
            values = draw.rng("before").integers(100, 200, (count, self.rows, self.kv_heads, dim)).astype(np.float64)
            dtype, kind = ("float32", "numpy") if self.k.eight else (self.cache_dtype, self.k.cache.kind)
            self.summaries[name] = Held(draw, name, values, dtype, kind)

    def expected_summaries(self, cache: np.ndarray) -> dict[str, np.ndarray]:
        """The summaries after the call. Summaries of blocks with new tokens are renewed, and 0 stands behind a request's last block."""
        found = {name: x.values() for name, x in self.summaries.items()}
        for b, (n, m) in enumerate(zip(self.lens, self.new, strict=True)):
            t = np.arange(n)
            every = oracle.summaries(cache[self.own[b][t // self.size], t % self.size], self.size)
            for i in range((n - m) // self.size, len(self.summary_pages[b]) * self.rows) if m else ():
                for name, values in found.items():
                    numbers = every.largest if name == "maxblocks" else every.smallest
                    values[self.summary_pages[b][i // self.rows], i % self.rows] = numbers[i] if i < len(numbers) else 0
        return found

    def options(self) -> dict[str, Any]:
        scales = {f"{name}_scale": x.fixed if x.scale is None else x.scale.given() for name, x in zip("kv", self.sides, strict=True)}
        return {"kv_layout": "HND" if self.hnd else "NHD", "kv_dtype": self.kv_dtype, **scales}
    def call(self, tokens: Any = slice(None), lens: Any = None, new: Any = None) -> None:
        """Appends all tokens, or the given ones, as the last tokens of requests of these lengths, by the function or by a plan."""
        where: dict[str, Any] = {"slot_mapping": integers_as(self.numbers_as, self.slots[tokens])}
        if not self.by_slots:
            lens, new = (integers_as(self.numbers_as, x) for x in (self.lens if lens is None else lens, self.new if new is None else new))
            tables = self.tables.array if isinstance(self.tables, arrays.Placed) else self.tables
            where = {"block_tables": tables, "seq_lens": lens if isinstance(self.tables, arrays.Placed) else None, "q_lens": new if self.ragged else None}
        append, options = blitz_attn.append_paged_kv, self.options() | {"num_threads": self.threads}
        if self.by_plan:
            of_plan = where | {name: options.pop(name) for name in ("kv_layout", "kv_dtype", "num_threads")}
            append, where = blitz_attn.PagedPlan(**of_plan, page_size=self.size).append, {}
        if self.summaries:
            where |= {name: x.given(written=True) for name, x in self.summaries.items()} | {"metadata_block_tables": self.summary_tables.array}
        result = append(
            *(x.given(tokens) for x in self.sides), *(x.cache.given(written=True) for x in self.sides), **where, **options, dtype=self.dtype
        )
        if result is not None:
            raise Finding(f"returned {type(result).__name__}")

    def check_unchanged(self) -> None:
        for x in (*self.sides, *(x.placed for x in self.summaries.values())):
            x.check_unchanged()


@problem("append_paged_kv", weight=1.5)
def append_paged_kv(draw: Draw) -> None:
    check = draw.pick("check", ("oracle", "attend", "pieces"))
    case = Append(draw, finite=check == "attend")
    with checks.at_level(draw):
        tokens = np.flatnonzero(case.slots >= 0)
        expected = [x.expected(tokens, case.slots[tokens]) for x in case.sides]
        keys, scales = expected[0]
        if case.k.eight:
            keys = (keys * scales[..., None]).astype(np.float32).astype(np.float64)
        summaries = case.expected_summaries(keys) if case.summaries else {}
        if check == "pieces":
            in_pieces(draw, case)
        else:
            case.call()
        for x, wanted in zip(case.sides, expected, strict=True):
            x.check("after the call:", wanted)
        for name, wanted in summaries.items():
            checks.near(name, case.summaries[name].values(), wanted, 0)
            case.summaries[name].placed.check_around()
        if check == "attend" and not case.by_slots and len(case.slots):
            attends(draw, case, expected)


def in_pieces(draw: Draw, case: Append) -> None:
    """Appends some of the tokens first, and then the others."""
    if case.by_slots or not case.ragged or not isinstance(case.tables, arrays.Placed):
        if case.by_slots:
            cut = int(draw.rng("cut").integers(len(case.slots) + 1))
            case.call(slice(None, cut))
            case.call(slice(cut, None))
            return
        case.call()
        return
    first = draw.rng("cut").integers(0, case.new + 1)
    begins = np.cumsum(case.new) - case.new
    rows = [np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64) for parts in (
        [np.arange(begin, begin + n) for begin, n in zip(begins, first, strict=True)],
        [np.arange(begin + n, begin + m) for begin, n, m in zip(begins, first, case.new, strict=True)],
    )]  # fmt: skip
    case.call(rows[0], case.lens - case.new + first, first)
    case.call(rows[1], case.lens, case.new - first)


def attends(draw: Draw, case: Append, expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Attention of the new tokens' queries over the cache equals dense attention over the tokens."""
    k, v = (numbers * scales[..., None] for numbers, scales in expected)
    dtype = "float64" if case.cache_dtype == "float64" else "float32"
    q = arrays.rounded(draw.rng("q").standard_normal((len(case.slots), case.kv_heads * draw.integer("group", 1, 4), k.shape[-1])) / np.abs(k).max(), dtype)
    problem = Paged(dtype, q, case.new, k, v, case.own, case.lens, 1.0, None, None, None, None)
    out, lse, allowed, allowed_lse = attend(problem)
    tables = case.tables.array if isinstance(case.tables, arrays.Placed) else case.tables
    got = blitz_attn.paged_attention(
        q.astype(dtype), *(x.cache.given(written=True) for x in case.sides), tables, case.lens if isinstance(case.tables, arrays.Placed) else None,
        q_lens=case.new, scale=1.0, return_lse=True, num_threads=case.threads,
        **case.options() | {"kv_dtype": case.cache_dtype if case.k.cache.kind == "bits" else None},
    )  # fmt: skip
    checks.near("attention over what was appended", np.asarray(got[0], np.float64), out, allowed)
    checks.near("its log-sum-exp", np.asarray(got[1], np.float64), lse, allowed_lse)


@problem("refused_append", weight=0.4)
def refused_append(draw: Draw) -> None:
    """Bad calls are refused and write nothing: a slot or page twice or outside the cache, unequal numbers of tokens, infinity."""
    case = Append(draw, finite=True)
    rng, used = draw.rng("mistake"), np.flatnonzero(case.slots >= 0)
    mistake = draw.pick("mistake", ("slot", "twice", "page", "length", "infinite", "tokens"))
    name = {"slot": "slot_mapping", "twice": "slot_mapping", "page": "block_tables", "length": "q_lens", "infinite": "v", "tokens": "v"}[mistake]
    matrix = isinstance(case.tables, arrays.Placed)
    if mistake in ("slot", "twice") and case.by_slots and len(used) > 1:
        one, other = rng.permutation(used)[:2]
        case.slots[one] = case.slots[other] if mistake == "twice" else (-2, case.pages * case.size, 2**31 - 1)[int(rng.integers(3))]
    elif mistake in ("twice", "page") and matrix and case.new.any():
        b = int(rng.choice(np.flatnonzero(case.new)))
        last, name = (case.lens[b] - 1) // case.size, "block_tables"
        if mistake == "page":
            case.tables.array[b, last] = (-1, -5, case.pages, 2**31 - 1)[int(rng.integers(4))]
        elif case.new[b] > case.size:
            case.tables.array[b, last - 1] = case.tables.array[b, last]
            if (case.lens[b] - 1) % case.size + case.new[b] < case.size + 1:
                raise Discard("no slot is met twice")
        else:
            raise Discard("the new tokens lie on one page")
    elif mistake == "length" and case.ragged and not case.by_slots and not case.by_plan and len(case.lens):
        case.new = case.new + rng.permutation(np.arange(len(case.lens)) == 0)
    elif mistake == "infinite" and case.v.eight and len(used):  # tokens without a slot are not read
        heads, dim = case.v.tokens.array.shape[1:]
        case.v.tokens.array[rng.choice(used), rng.integers(heads), rng.integers(dim)] = np.inf if case.v.named[0] != "bfloat16" else 0x7F80
    elif mistake == "tokens" and len(case.slots):
        case.v.tokens.array = case.v.tokens.array[:-1]
    else:
        raise Discard("no such mistake in this call")
    case.v.tokens.before = case.v.tokens.buffer.copy()
    checks.refused(case.call, name)
    case.check_unchanged()
