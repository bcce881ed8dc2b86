"""Budgets of each layer and head of a model, found from some of its queries, keys and values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from .. import _arrays
from .._float_mode import in_usual_mode
from .._names import LAYOUTS
from .._sabi.lists import two_integers
from .._sentences import number_shown, shown
from .choosers import chooser_for, chooser_of, fields_of, rules_of
from .options import Options
from .prefill import select_blocks_prefill
from .quality import attended_all, attended_kept, checked, error_of, narrow, recall_of

__all__ = ["Profile", "calibrate"]

_FORMAT = "blitz_attn profile 1"
RULES = ("scale", "layout", "causal", "window", "num_heads", "num_kv_heads", "kv_ranges", "dtype", "num_threads")


class Profile(NamedTuple):
    """The budgets of all layers and heads of one model, from `calibrate`, `allocate` or a file.

    Attributes
    ----------
    heads, kv_heads, head_dim : int
        The model's shape; the number of layers is the length of `numbers`.
    chooser : Pooled, Antidiagonal, SampledRows or VerticalSlash, or tuple of them
        How blocks are scored: one chooser for all layers, or one for each layer.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys.
    budget : {"top_p", "threshold", "density"}
        The option of `select_blocks_prefill` that takes `numbers`.
    numbers : tuple of tuple of float
        A number for each layer and head.
    measure : {"mass", "error", "loss"}
        The measure by which the numbers were chosen; `allocate` chooses by ``"loss"``.
    target : float
        For ``"mass"`` and ``"error"``, the kept mass or the error of the output that each head is to meet; for ``"loss"``, the density of
        the whole model.
    """

    heads: int
    kv_heads: int
    head_dim: int
    chooser: Any
    block_shape: tuple[int, int]
    budget: str
    numbers: tuple[tuple[float, ...], ...]
    measure: str
    target: float

    def options(self, layer: int, *, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
        """The options of `select_blocks_prefill` for a layer of a model of this shape.

        Parameters
        ----------
        layer : int
            The layer, from 0.
        heads, kv_heads, head_dim : int
            The shape of the model that the options are for.

        Returns
        -------
        dict
            Chooser, block shape and budget.

        Raises
        ------
        TypeError, ValueError
            The model has another shape or no such layer, or an argument is not an integer.

        Examples
        --------
        >>> from blitz_attn import select
        >>> profile = select.Profile(2, 1, 64, select.Pooled(), (64, 64), "top_p", ((0.9, 0.95),), "mass", 0.9)
        >>> profile.options(0, heads=2, kv_heads=1, head_dim=64)["top_p"]
        [0.9, 0.95]
        """
        given = (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim))
        ours, theirs = (self.heads, self.kv_heads, self.head_dim), tuple(_arrays.integer(x, name) for name, x in given)
        if ours != theirs:
            raise ValueError(f"profile: expected one of a model with (heads, kv_heads, head_dim) = {theirs}, got one with {ours}")
        layer = _arrays.integer(layer, "layer")
        if not 0 <= layer < len(self.numbers):
            raise ValueError(f"layer: expected 0 to {len(self.numbers) - 1}, got {layer}")
        chooser = self.chooser[layer] if self._by_layer() else self.chooser
        return {"chooser": chooser, "block_shape": self.block_shape, self.budget: list(self.numbers[layer])}

    def _by_layer(self) -> bool:
        """Whether each layer has its own chooser. (A chooser is a named tuple, so `isinstance` would not tell.)"""
        return type(self.chooser) is tuple

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON.

        Parameters
        ----------
        path : path
            The file, which is replaced.

        Raises
        ------
        TypeError
            `chooser` is not one of the classes above, or `path` is not a path.
        ValueError
            `path` cannot be the name of a file.
        OSError
            The file cannot be written.

        Examples
        --------
        >>> import os, tempfile
        >>> from blitz_attn import select
        >>> profile = select.Profile(2, 1, 64, select.Pooled(), (64, 64), "top_p", ((0.9, 0.95),), "mass", 0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profile.save(os.path.join(folder, "profile.json"))
        ...     select.Profile.load(os.path.join(folder, "profile.json")) == profile
        True
        """
        fields = fields_of_profile(self)
        with _opened(path, "w") as file:
            json.dump(fields, file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile that `save` wrote.

        Parameters
        ----------
        path : path
            The file.

        Returns
        -------
        Profile
            The profile that was saved.

        Raises
        ------
        TypeError
            `path` is not a path.
        ValueError
            The file holds something else, or a field of the profile is of the wrong kind, out of range, or of the wrong length.
        OSError
            There is no such file, or it cannot be read.

        Examples
        --------
        >>> from blitz_attn import select
        >>> select.Profile.load(os.devnull)
        Traceback (most recent call last):
        ValueError: path: expected a profile in JSON, got Expecting value: line 1 column 1 (char 0)
        """
        with _opened(path, "r") as file:
            try:
                fields = json.load(file)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"path: expected a profile in JSON, got {error}") from error
        return profile_of(fields)


def _opened(path: Any, mode: str) -> IO[str]:
    """The file of a profile. Refuses a number, which `open` would take for the descriptor of an open file."""
    try:
        name = os.fspath(path)
    except TypeError as error:
        raise TypeError(f"path: expected a path, got {type(path).__name__}") from error
    try:
        return open(name, mode, encoding="utf-8")
    except ValueError as error:  # a path with a null character, say
        raise ValueError(f"path: expected the name of a file, got {shown(path)}") from error


def fields_of_profile(profile: Profile) -> dict[str, Any]:
    """A profile as a dict that JSON can hold."""
    chooser = [fields_of(x) for x in profile.chooser] if profile._by_layer() else fields_of(profile.chooser)
    return profile._asdict() | {"format": _FORMAT, "chooser": chooser, "layers": len(profile.numbers)}


def profile_of(fields: Any) -> Profile:
    """The profile whose `fields_of_profile` is `fields`, as JSON returns it; anything else is refused."""
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f"path: expected a profile with format {_FORMAT!r}, got {shown(fields)}")
    heads, kv_heads, layers = (_field(fields, name, _is_size, "an integer of at least 1") for name in ("heads", "kv_heads", "layers"))
    _field(fields, "kv_heads", lambda n: heads % n == 0, f"a divisor of its {heads} heads")
    head_dim = _field(fields, "head_dim", lambda n: _is_size(n) and n <= 576, "an integer from 1 to 576")
    block_q, block_kv = _field(fields, "block_shape", lambda x: _is_list(x, 2) and all(map(_is_size, x)), "two integers of at least 1")
    budget = _field(fields, "budget", ("top_p", "threshold", "density").__contains__, "top_p, threshold or density")
    measure = _field(fields, "measure", ("mass", "error", "loss").__contains__, "mass, error or loss")
    target = _field(fields, "target", _is_share, "a number above 0 and at most 1")
    rows = _field(fields, "numbers", lambda x: _is_list(x, layers), f"a list for each of its {layers} layers")
    for n, row in enumerate(rows):
        if not _is_list(row, heads):
            raise ValueError(f"path: expected a profile with a list of {heads} numbers for layer {n}, one per head, got {shown(row)}")
        for h, x in enumerate(row):
            if not _is_share(x):
                raise ValueError(f"path: expected a profile with numbers above 0 and at most 1, got {shown(x)} for head {h} of layer {n}")
    stored: Any = fields.get("chooser")
    if isinstance(stored, list) and len(stored) != layers:
        raise ValueError(f"path: expected a profile with one chooser, or with one for each of its {layers} layers, got {len(stored)}")
    try:
        choosers = [chooser_of(dict(x)) for x in (stored if isinstance(stored, list) else [stored])]
        for x in choosers:
            rules_of(x)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path: expected a profile with choosers as Profile.save writes them, got {shown(stored)}") from error
    chooser = tuple(choosers) if isinstance(stored, list) else choosers[0]
    numbers = tuple(tuple(map(float, row)) for row in rows)
    return Profile(heads, kv_heads, head_dim, chooser, (block_q, block_kv), budget, numbers, measure, float(target))


def _field(fields: dict[str, Any], name: str, is_right: Callable[[Any], bool], expected: str) -> Any:
    """A field of a profile, refused unless it `is_right`. A value from JSON may have any type."""
    value = fields.get(name)
    if not is_right(value):
        raise ValueError(f"path: expected a profile whose {name} is {expected}, got {shown(value) if name in fields else 'none'}")
    return value


def _is_size(x: Any) -> bool:
    return type(x) is int and 1 <= x < 1 << 31


def _is_share(x: Any) -> bool:
    return type(x) in (int, float) and 0 < x <= 1


def _is_list(x: Any, count: int) -> bool:
    return isinstance(x, list) and len(x) == count


class _Capture:
    """A capture of a layer, and the result of attention over all its keys, which is computed once: no budget changes it."""

    def __init__(self, case: tuple[Any, Any, Any], measure: str, every: int, chooser: Any, options: Options) -> None:
        self.q, self.k, self.v = _arrays.detached(*case)
        self.measure, self.every, self.chooser, self.options = measure, every, chooser, options
        self.of_all: tuple[Any, Any] | None = None

    def measured(self, budget: dict[str, Any]) -> np.ndarray:
        """Kept mass or error of each head, under a budget with one number per head."""
        q, k, layout = self.q, self.k, self.options.layout
        v = narrow(k, layout) if self.measure == "mass" else self.v
        sabi = select_blocks_prefill(q, k, chooser=self.chooser, **budget, **vars(self.options))
        rows, every = _arrays.shape_of(sabi)[2], checked(sabi, self.every, layout)
        of_list = attended_kept(q, k, v, sabi, every, self.options)
        if self.of_all is None:
            self.of_all = attended_all(q, k, v, rows, every, self.options)
        if self.measure == "error":
            return np.sqrt((error_of(of_list, self.of_all[0], every, self.options) ** 2).mean(axis=0))
        return np.nanmean(np.nanmean(recall_of(of_list[1], self.of_all[1], rows, every, self.options), axis=2), axis=0)


@in_usual_mode
def _found(captures: list[_Capture], heads: int, target: float, steps: int, budget: str) -> tuple[float, ...]:
    """For each head, the number that meets the target, by binary search for all heads at once.

    The search assumes that each candidate keeps no less than the candidate before it. The last candidate, which keeps the most, is not
    tried.
    """
    error = captures[0].measure == "error"
    candidates = np.arange(1, 2**steps + 1) / 2**steps
    if budget == "threshold":  # down to the smallest positive float32, since scores are float32
        candidates = np.concatenate([candidates[::-1], 2.0 ** -np.arange(steps + 1, 150)])
    low, high = np.full(heads, -1), np.full(heads, len(candidates) - 1)
    while (high - low > 1).any():
        middle = np.maximum((low + high) // 2, 0)
        met = np.mean([x.measured({budget: candidates[middle].tolist()}) for x in captures], axis=0)
        enough = met <= target if error else met >= target
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return tuple(candidates[high].tolist())


def calibrate(
    layers: Iterable[Any],
    *,
    target: float,
    measure: str = "mass",
    budget: str = "top_p",
    chooser: Any = "pooled",
    block_shape: tuple[int, int] = (64, 64),
    steps: int = 8,
    every: int = 1,
    **rules: Any,
) -> Profile:
    """Find the budget with which each layer and head meets a target, from queries, keys and values that a model has made.

    Parameters
    ----------
    layers : iterable of sequence of (q, k, v)
        For each layer the captures of some texts: queries, keys and values as `block_sparse_attention` takes them. Pass a generator to keep
        only one layer in memory.
    target : float
        The value that each head must meet in the mean over the captures: the kept softmax mass, or the relative error of the output. Over
        the batch entries of one capture, masses are averaged by the mean, and errors by the root mean square.
    measure : {"mass", "error"}
        The measure to which `target` refers: see `recall` and `output_error`.
    budget : {"top_p", "density", "threshold"}
        The budget whose number is found.
    chooser : str or Pooled, Antidiagonal, SampledRows, VerticalSlash
        How blocks are scored: see `select_blocks_prefill`.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys.
    steps : int
        How often the range from 0 to 1 is halved, 1 to 20 times: numbers are multiples of ``2**-steps``, and thresholds below
        ``2**-steps`` are powers of two.
    every : int
        Only every n-th block of queries is looked at: see `recall`.
    **rules
        scale, layout, causal, window, num_heads, num_kv_heads, kv_ranges, dtype and num_threads of the calls: see
        `select_blocks_prefill`. Captures are whole sequences, and all captures have the same `kv_ranges`.

    Returns
    -------
    Profile
        The smallest numbers (with ``budget="threshold"`` the largest) that meet the target, and the shape of the model. A head for
        which no number meets the target gets the number that keeps the most: 1, or the threshold ``2**-149``, which keeps every
        block whose score is not 0.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or out of range, no layer, or captures of different shapes.

    See Also
    --------
    select_blocks_prefill : takes a profile's options: ``**profile.options(layer, heads=..., kv_heads=..., head_dim=...)``.

    Notes
    -----
    Numbers are found by binary search, which assumes that a larger budget keeps more. Each capture of a layer takes one dense attention
    call, ``steps`` choices and as many sparse calls; with ``budget="threshold"``, up to ``max(8, steps + 2)`` choices and as many sparse
    calls. Texts for which a result is reported should not be among the captures.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import select
    >>> rng = np.random.default_rng(0)
    >>> layers = [[[rng.standard_normal((1, 2, 256, 16), dtype=np.float32) * s for _ in range(3)]] for s in (0.5, 2)]
    >>> profile = select.calibrate(layers, target=0.9, block_shape=(16, 16), causal=True, steps=5)
    >>> len(profile.numbers), profile.heads, profile.options(1, heads=2, kv_heads=2, head_dim=16)["block_shape"]
    (2, 2, (16, 16))
    """
    refuse_unknown("calibrate", rules)
    _arrays.choice(measure, "measure", ("mass", "error"))
    _arrays.choice(budget, "budget", ("top_p", "density", "threshold"))
    target, steps, every = _arrays.number(target, "target"), _arrays.integer(steps, "steps"), _arrays.integer(every, "every")
    if not 0 < target <= 1:
        raise ValueError(f"target: expected a number above 0 and at most 1, got {number_shown(target)}")
    if not 1 <= steps <= 20:
        raise ValueError(f"steps: expected 1 to 20 halvings, got {steps}")
    rules_of(chooser)
    block_q, block_kv = two_integers(block_shape, "block_shape", "two sizes of at least 1", 1)
    chooser = chooser_for(chooser, (block_q, block_kv))
    options = Options(block_shape=(block_q, block_kv), **rules)
    numbers: list[tuple[float, ...]] = []
    for cases, shape in captures_of(layers, ("q", "k", "v"), rules):
        numbers.append(_found([_Capture(x, measure, every, chooser, options) for x in cases], shape[0], target, steps, budget))
    return Profile(*shape, chooser, (block_q, block_kv), budget, tuple(numbers), measure, target)


def refuse_unknown(function: str, rules: dict[str, Any]) -> None:
    """Refuses keywords that are not among RULES, as Python does."""
    for name in rules:
        if name not in RULES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def captures_of(layers: Any, names: tuple[str, ...], rules: dict[str, Any]) -> Iterator[tuple[list[Any], tuple[int, int, int]]]:
    """The captures of each layer, one layer after the other, and the shape of the model, which must be the same in all captures. Refuses an
    empty sequence of layers. `names` are the names of a capture's arrays, of which q and k are the first."""
    if not isinstance(layers, (tuple, list)) and not hasattr(layers, "__next__"):
        raise TypeError(f"layers: expected a sequence or a generator of the layers' captures, got {type(layers).__name__}")
    shape: tuple[int, int, int] | None = None
    for n, layer in enumerate(layers):
        cases = _captures_of_layer(layer, f"layers[{n}]", names)
        for q, k, *_ in cases:
            own = shape_of_model(q, k, rules)
            if shape is not None and own != shape:
                raise ValueError(f"layers: expected (heads, kv_heads, head_dim) = {shape} like the first capture, got {own}")
            shape = own
        assert shape is not None
        yield cases, shape
    if shape is None:
        raise ValueError("layers: expected at least one layer, got none")


def _captures_of_layer(layer: Any, name: str, names: tuple[str, ...]) -> list[Any]:
    form = f"({', '.join(names)})"
    if not isinstance(layer, (tuple, list)):
        raise TypeError(f"{name}: expected a sequence of captures {form}, got {type(layer).__name__}")
    if not layer:
        raise ValueError(f"{name}: expected at least one capture {form}, got none")
    for i, case in enumerate(layer):
        if not isinstance(case, (tuple, list)):
            missing = ": is one level of brackets missing?" if len(layer) == len(names) else ""
            raise TypeError(f"{name}[{i}]: expected a capture {form}, got {type(case).__name__}{missing}")
        if len(case) != len(names):
            raise ValueError(f"{name}[{i}]: expected a capture {form}, got {len(case)} arrays")
    return list(layer)


def shape_of_model(q: Any, k: Any, rules: dict[str, Any]) -> tuple[int, int, int]:
    """Heads, KV heads and D of a capture."""
    layout = _arrays.choice(rules.get("layout", "BNSD"), "layout", LAYOUTS)
    shapes = _arrays.shape_of(q), _arrays.shape_of(k)
    if layout == "BSH":
        heads = _arrays.integer(rules.get("num_heads", 0), "num_heads")
        kv_heads = _arrays.integer(rules.get("num_kv_heads") or heads, "num_kv_heads")
        return heads, kv_heads, shapes[0][-1] // max(1, heads) if shapes[0] else 0
    if layout == "TND" or any(len(x) != 4 for x in shapes):
        raise ValueError(f"layers: expected captures in layout BNSD, BSND or BSH, got shapes {shapes[0]} and {shapes[1]} with {layout}")
    axis = 1 if layout == "BNSD" else 2
    return shapes[0][axis], shapes[1][axis], shapes[0][3]
