"""Block lists that know how many tokens their blocks have. Public through `blitz_attn.sabi`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .._arrays import array as array_of
from .lists import checked_shape

__all__ = ["BlockList"]

BlockShape = tuple[int, int]


class BlockList(np.ndarray):
    """A block list that knows its block shape: a NumPy array with one attribute more.

    Functions that make lists for a block shape return such arrays: the builders of `blitz_attn.sabi`, `blitz_attn.video.blocks`,
    `blitz_attn.select_blocks_prefill` and `blitz_attn.select.list_from_scores`. Attention takes them without a `block_shape`, and refuses a
    `block_shape` that contradicts the list. ``BlockList(array, block_shape)`` makes such a list from an array of integers, and shares the
    array's memory. `from_block_mask` with a `block_shape` makes one from a mask.

    Parameters
    ----------
    sabi : array_like of int
        Block list (..., R, W).
    block_shape : (int, int)
        Number of tokens per block of queries and of keys, at least 1 each.

    Attributes
    ----------
    block_shape : (int, int)
        The block shape that was given. It cannot be set.

    Raises
    ------
    TypeError, ValueError
        Entries that are not integers, or a block shape that is not two sizes of at least 1.

    Notes
    -----
    Slices, views, ``copy``, ``astype``, ``repeat``, pickles, `numpy.concatenate`, `numpy.stack` and `numpy.broadcast_to` keep the block
    shape; lists of different block shapes cannot be joined. Computing drops the block shape: arithmetic, comparisons and functions that
    make an array anew (`numpy.array`, `numpy.asarray`, `numpy.where`) return plain arrays. Files of `numpy.save`, tensors of torch and
    arrays of JAX know no block shape either: calls with them need ``block_shape=`` unless the list has the default block shape.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn import sabi
    >>> blocks = sabi.causal(256, block_shape=(64, 64))
    >>> blocks.block_shape, blocks[:, :, 2:].block_shape, type(blocks >= 0) is np.ndarray
    ((64, 64), (64, 64), True)
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 256, 32), dtype=np.float32)
    >>> out = blitz_attn.block_sparse_attention(q, q, q, blocks)
    >>> blitz_attn.block_sparse_attention(q, q, q, blocks, block_shape=(128, 128))
    Traceback (most recent call last):
    ...
    ValueError: block_shape: expected (64, 64), which sabi is made for, or none, got (128, 128)
    """

    _block_shape: BlockShape | None = None

    if TYPE_CHECKING:  # by NumPy's own types, these methods return plain arrays

        def __getitem__(self, key: Any) -> Any: ...
        def astype(self, *args: Any, **kwargs: Any) -> BlockList: ...

    def __new__(cls, sabi: Any, block_shape: Sequence[int]) -> BlockList:
        array = array_of(sabi, "sabi", "an integer array")
        if array.dtype.kind not in "iu":
            raise TypeError(f"sabi: expected an integer array, got {array.dtype}")
        made = array.view(cls)
        made._block_shape = checked_shape(block_shape)
        return made

    @property
    def block_shape(self) -> BlockShape:
        """Number of tokens per block of queries and of keys."""
        if self._block_shape is None:  # np.ndarray.__new__, and views as this class, make arrays without a block shape
            raise AttributeError("block_shape: expected a list that was made with a block shape, got a bare view")
        return self._block_shape

    def __repr__(self) -> str:
        return super().__repr__() if self._block_shape is None else f"{super().__repr__()[:-1]}, block_shape={self._block_shape})"

    def __array_finalize__(self, source: Any) -> None:
        self._block_shape = getattr(source, "_block_shape", None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array)[()]  # a result without axes becomes a number

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = super().__array_function__(func, types, args, kwargs)
        if not isinstance(made, np.ndarray):
            return made
        sources = {np.concatenate: args[0] if args else (), np.broadcast_to: args[:1]}.get(func)
        if sources is not None:
            return listed(np.asarray(made), common_shape(sources))
        return np.asarray(made) if isinstance(made, BlockList) and made._block_shape is None else made

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        make, arguments, state = reduced
        return make, arguments, (*state, self._block_shape)

    def __setstate__(self, state: Any) -> None:
        *array, self._block_shape = state
        super().__setstate__(tuple(array))


BlockList.__module__ = "blitz_attn.sabi"  # where users and pickles find the class


@overload
def listed(sabi: np.ndarray, block_shape: BlockShape) -> BlockList: ...
@overload
def listed(sabi: np.ndarray, block_shape: BlockShape | None) -> np.ndarray: ...
def listed(sabi: np.ndarray, block_shape: BlockShape | None) -> np.ndarray:
    """The array as a list of this block shape; the array itself where `block_shape` is None."""
    if block_shape is None:
        return sabi
    made = sabi.view(BlockList)
    made._block_shape = block_shape
    return made


def shape_of(sabi: Any) -> BlockShape | None:
    """The block shape that a list knows; None for any other array."""
    return sabi._block_shape if isinstance(sabi, BlockList) else None


def common_shape(lists: Iterable[Any]) -> BlockShape | None:
    """The block shape of those lists that know theirs. Refuses lists of several block shapes."""
    known = [shape for shape in map(shape_of, lists) if shape is not None]
    for shape in known:
        if shape != known[0]:
            raise ValueError(f"block_shape: expected lists of one block shape, got {known[0]} and {shape}")
    return known[0] if known else None


def block_shape_for(sabi: Any, block_shape: Any, default: Any = None) -> Any:
    """The block shape of a call. A list that knows its block shape decides, and `block_shape` must agree or be None. For any other array,
    it is `block_shape`, or `default` where `block_shape` is None."""
    known = shape_of(sabi)
    if known is None:
        return default if block_shape is None else block_shape
    if block_shape is not None:
        given = checked_shape(block_shape)
        if given != known:
            raise ValueError(f"block_shape: expected {known}, which sabi is made for, or none, got {given}")
    return known


def with_block_shape(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call by name, with the block shape of its list among them."""
    if shape_of(arguments.get("sabi")) is None:
        return arguments
    return {**arguments, "block_shape": block_shape_for(arguments["sabi"], arguments.get("block_shape"))}


def of_shape(block_shape: Any, change: Callable[[int, int], BlockShape]) -> BlockShape | None:
    """`change` applied to the two sizes of a block shape; None stays None."""
    return None if block_shape is None else change(*block_shape)
