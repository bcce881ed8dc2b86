"""Draws for all problems of native sparse attention: sequences in a batch or packed, arrays of one dtype and kind, rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import arrays, checks
from .arrays import as_integers, check_kind
from .draw import Draw
from .nsa_oracle import Arithmetic, Near, Rules, block_count, exact
from .problems import Finding


def as_lists(draw: Draw, name: str, lists: np.ndarray) -> Any:
    """Block lists in a drawn dtype and view."""
    dtype = draw.pick(f"{name}.dtype", ("int32", "int64", "int16"))
    view = draw.pick(f"{name}.view", ("plain", "turned", "steps"))
    lists = lists.astype(dtype)
    if view == "turned":  # the first axis is the contiguous one
        return lists.T.copy().T
    return np.repeat(lists, 2, axis=-1)[..., ::2] if view == "steps" else lists


class Tensor(NamedTuple):
    values: np.ndarray  # float64
    placed: arrays.Placed
    given: Any
    dtype: str
    kind: str

    def cut(self, at: Any) -> Any:
        """Some entries as an argument of their own."""
        return arrays.dressed(np.ascontiguousarray(self.placed.array[at]), self.dtype, self.kind)


class Setting:
    """The first draws of a problem: the dtype and the kind of its arrays, and the shapes of q, k and v.

    `arrays` lists the arrays that `tensor` has made. `check_inputs` checks at the end that none was written.
    """

    def __init__(
        self, draw: Draw, kinds: tuple[str, ...] | None = None, dtypes: tuple[str, ...] = arrays.FLOATS, packed: bool | None = None
    ):
        self.draw = draw
        self.dtype = draw.pick("dtype", dtypes)
        kinds_here = tuple(x for x in arrays.kinds_for(self.dtype) if kinds is None or x in kinds)
        self.kind = draw.pick("kind", kinds_here)
        self.real = "float64" if self.dtype == "float64" else "float32"
        # The argument dtype= of the call. Bits need it, and other kinds may leave it out.
        self.named = "bfloat16" if self.kind == "bits" else draw.pick("named", (None, self.dtype))
        size = draw.pick("size", ("small", "middle", "long", "wide"), (8, 3, 0.4, 0.4))
        self.packed = draw.flag("packed") if packed is None else packed
        count = draw.pick("sequences", (1, 2, 3, 0), (5, 3, 2, 0.2)) if size != "long" else 1
        most = {"small": 24, "middle": 70, "long": 600, "wide": 16}[size]
        tokens = draw.integer("tokens", 0, most, likely=(16, 17, 31, 33, 64, most))
        self.lens = [tokens] * count
        if self.packed:
            self.lens = [tokens if i == 0 else draw.integer(f"lens[{i}]", 0, most, likely=(0, 1, 7, 16)) for i in range(count)]
        self.kv_heads = draw.pick("kv_heads", (1, 2, 3), (3, 2, 1)) if size != "long" else 1
        self.group = draw.pick(
            "group", (1, 2, 3, 4, 8, 16) if size == "small" else (1, 2), (6, 6, 2, 1, 0.5, 0.3) if size == "small" else None
        )
        self.heads = self.kv_heads * self.group
        widest = {"wide": 576, "long": 16}.get(size, 48)
        self.dim = draw.integer("dim", 1, widest, likely=(4, 8, 16, 32))
        self.v_dim = draw.integer("v_dim", 1, widest, likely=(4, 8, 16, 32))
        self.cu = np.concatenate([[0], np.cumsum(self.lens)]).astype(np.int64)
        self.arrays: list[arrays.Placed] = []

    @property
    def views(self) -> tuple[str, ...]:
        return arrays.views_for(self.kind)

    def cu_seqlens(self) -> Any:
        return as_integers(self.draw, "cu_seqlens", self.cu) if self.packed else None

    def shape(self, *rest: int) -> tuple[int, ...]:
        """The shape of an array with one entry per token."""
        return (
            (int(self.cu[-1]), *rest)
            if self.packed
            else (len(self.lens), self.lens[0] if self.lens else self.draw.options["tokens"], *rest)
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k and v."""
        sizes = {"q": (self.heads, self.dim), "k": (self.kv_heads, self.dim), "v": (self.kv_heads, self.v_dim)}
        return {name: self.shape(*size) for name, size in sizes.items()}

    def blocks_shape(self, rules: Rules, *rest: int) -> tuple[int, ...]:
        """The shape of an array with one entry per compressed block."""
        counts = [block_count(n, rules.block, rules.stride) for n in self.lens]
        if self.packed:
            return (sum(counts), *rest)
        return (len(counts), counts[0] if counts else block_count(self.draw.options["tokens"], rules.block, rules.stride), *rest)

    def tensor(self, name: str, values: np.ndarray, dtype: str | None = None, kind: str | None = None) -> Tensor:
        """Makes an argument. Its values are rounded to the dtype first."""
        dtype, kind = dtype or self.dtype, kind or self.kind
        values = arrays.rounded(values, dtype)
        placed = arrays.place(self.draw, name, arrays.stored(values, dtype), views=self.views)
        self.arrays.append(placed)
        return Tensor(values, placed, arrays.dressed(placed.array, dtype, kind), dtype, kind)

    def normal(self, name: str, *shape: int, amplitude: float = 1.0) -> np.ndarray:
        return self.draw.rng(name).standard_normal(shape) * amplitude

    def drawn(self, name: str, *shape: int, amplitude: float = 1.0) -> Tensor:
        return self.tensor(name, self.normal(name, *shape, amplitude=amplitude))

    def weight(self, name: str, *shape: int, amplitude: float | None = None) -> Tensor:
        """Makes a weight, which may have another dtype than q."""
        own = ("float64",) if self.dtype == "float64" else (self.dtype, "float32", "float16", "bfloat16")
        dtype = self.draw.pick(f"{name}.dtype", tuple(dict.fromkeys(own)))
        kind = self.kind
        # A torch tensor can have any dtype; the other kinds cannot.
        if dtype != self.dtype and kind in ("bits", "ml_dtypes", "numpy", "dlpack"):
            kind = "numpy" if dtype != "bfloat16" else ("ml_dtypes" if arrays.HAS_ML_DTYPES else "bits")
            if kind == "bits":  # bits would need dtype="bfloat16", although q is not bfloat16
                dtype, kind = "float32", "numpy"
        values = self.normal(name, *shape, amplitude=shape[-1] ** -0.5 if amplitude is None else amplitude)
        if self.named not in (None, dtype):  # the weight has another dtype than dtype= says, so only bits keep dtype=
            self.named = "bfloat16" if self.kind == "bits" else None
        return self.tensor(name, values, dtype, kind)

    def result(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> tuple[arrays.Placed, Any]:
        """Makes an output for the call to write."""
        placed = arrays.poisoned(self.draw, name, shape, dtype or self.dtype, views=self.views)
        kind = {"dlpack": "numpy"}.get(self.kind, self.kind)
        return placed, arrays.dressed(placed.array, dtype or self.dtype, kind)

    def parts(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """The sequences of an array that has one entry per token, with heads first."""
        for i in range(len(self.lens)):
            part = x[self.cu[i] : self.cu[i + 1]] if self.packed else x[i]
            yield part.swapaxes(0, 1)

    def joined(self, parts: list[np.ndarray], like: tuple[int, ...]) -> np.ndarray:
        """The inverse of `parts`."""
        if not parts:
            return np.zeros(like)
        tokens_first = [x.swapaxes(0, 1) for x in parts]
        return np.concatenate(tokens_first) if self.packed else np.stack(tokens_first)

    def joined_near(self, parts: list[Near]) -> Near:
        return Near(self.joined([x.value for x in parts], ()), self.joined([np.broadcast_to(x.error, x.value.shape) for x in parts], ()))

    def near(
        self, what: str, got: Any, parts: list[Near], dtype: str | None = None, shape: tuple[int, ...] | None = None, tainted: Any = None
    ) -> None:
        """Checks that `got`, with one entry per token or block, is near the sequences' exact values. Rows in `tainted` are skipped."""
        dtype = dtype or self.dtype
        check_kind(what, got, dtype, self.kind)
        values = arrays.values_of(got, dtype)
        if not parts:
            if values.size or (shape is not None and values.shape != shape):
                raise Finding(f"{what}: shape {values.shape} of no sequences")
            return
        how = Arithmetic(dtype, "")
        expected, allowed = self.joined_near([x.rounded(how) for x in parts])
        if tainted is not None:
            mask = self.joined(tainted, ())
            mask = mask.reshape(*mask.shape, *(1,) * (values.ndim - mask.ndim))
            if values.shape == expected.shape:
                values = np.where(mask, 0, values)
            expected = np.where(mask, 0, expected)
        checks.near(what, values, expected, np.where(np.isfinite(expected), allowed, 0))

    def weight_near(self, what: str, got: Any, exact_values: Near, given: Tensor) -> None:
        """Checks a gradient of a weight, whose kind and dtype must be the weight's."""
        check_kind(what, got, given.dtype, given.kind)
        rounded = exact_values.rounded(Arithmetic(given.dtype, ""))
        checks.near(what, arrays.values_of(got, given.dtype), rounded.value, rounded.error)

    def check_inputs(self) -> None:
        for x in self.arrays:
            x.check_unchanged()


def draw_rules(setting: Setting, modes: tuple[str, ...] = ("paper", "mslk")) -> tuple[Rules, dict[str, Any]]:
    """Rules, and the keyword arguments of `nsa` for them. Options that equal their defaults may be left out."""
    draw = setting.draw
    mode = draw.pick("mode", modes)
    causal = draw.pick("causal", (True, False), (3, 1))
    given_scale = draw.pick("scale", (None, 0.25, 1.0, 0, -0.5), (6, 2, 2, 0.5, 0.5))
    scale = setting.dim**-0.5 if given_scale is None else float(given_scale)
    window = draw.integer("window_size", 1, 700, likely=(1, 2, 4, 7, 16, 64))
    step = draw.integer("stride", 1, 64, likely=(1, 2, 3, 4, 8))
    block_steps = draw.pick("block_steps", (1, 2, 3, 4), (2, 4, 1, 2))
    wide_steps = draw.pick("wide_steps", (1, 2, 3, 4), (2, 3, 1, 3))
    extra = draw.integer("num_selected_blocks", 0, 40, likely=(1, 2, 3))
    init, local = draw.pick("init_blocks", (1, 0, 2), (4, 2, 1)), draw.pick("local_blocks", (2, 0, 1, 3, 5), (5, 2, 2, 1, 1))
    tile = draw.integer("q_tile_size", 1, 300, likely=(1, 4, 8, 16, 32, 256))
    groups = draw.pick("num_cmp_selected_blocks", (None, 1, 2, 3), (8, 1, 1, 1))
    plain = draw.flag("defaults")  # whether options that equal their defaults are left out
    options: dict[str, Any] = {"compress_block_size": step * block_steps, "causal": causal, "scale": given_scale, "mode": mode}
    if mode == "mslk":
        options["compress_block_size"] = block = step
        options["num_selected_blocks"] = count = max(1, extra)
        options["q_tile_size"] = tile
        if groups is not None:
            options["num_cmp_selected_blocks"] = groups
        return Rules(mode, causal, scale, block, block, block, count, 0, 0, tile, window), {**options, "window_size": window}
    block, wide, count = step * block_steps, step * wide_steps, max(1, init + local + extra)
    options |= {"num_selected_blocks": count, "init_blocks": init, "local_blocks": local}
    if not (plain and step == max(1, block // 2)):
        options["compress_stride"] = step
    if not (plain and wide == block):
        options["select_block_size"] = wide
    return Rules(mode, causal, scale, block, step, wide, count, init, local, 1, window), {**options, "window_size": window}


def weight_near(w: Tensor | None) -> Near | None:
    return None if w is None else exact(w.values)


def exact_parts(setting: Setting, x: np.ndarray) -> list[Near]:
    return [exact(part) for part in setting.parts(x)]


# ---- Lists --------------------------------------------------------------------------------------------------------


def rows_of(setting: Setting, tile: int) -> list[int]:
    return [-(-n // tile) for n in setting.lens]


def list_parts(setting: Setting, lists: np.ndarray, tile: int) -> list[np.ndarray]:
    """The lists of each sequence, (heads, rows, places)."""
    if not setting.packed:
        return list(lists)
    ends = np.concatenate([[0], np.cumsum(rows_of(setting, tile))]).astype(int)
    return [lists[:, ends[i] : ends[i + 1]] for i in range(len(setting.lens))]


def lists_shape(setting: Setting, heads: int, tile: int, places: int) -> tuple[int, ...]:
    rows = rows_of(setting, tile)
    if setting.packed:
        return heads, sum(rows), places
    return len(rows), heads, rows[0] if rows else -(-setting.draw.options["tokens"] // tile), places


def random_lists(setting: Setting, name: str, heads: int, tile: int, wide: int, places: int) -> np.ndarray:
    """Rows of different lengths, with blocks in any order and -1 behind them. Blocks behind the first -1 must not count."""
    draw = setting.draw
    rng, garbage = draw.rng(name), draw.pick(f"{name}.behind", (-1, 0, 1000, -7))
    lists = np.full(lists_shape(setting, heads, tile, places), -1, np.int64)
    for n, part in zip(setting.lens, list_parts(setting, lists, tile), strict=True):
        blocks = -(-n // wide)
        for index in np.ndindex(part.shape[:2]):
            row = part[index]
            length = int(rng.integers(0, min(places, blocks), endpoint=True))
            row[:length] = rng.permutation(blocks)[:length]
            if blocks:
                row[length + 1 :] = garbage
    return lists
