"""FlexAttention's BlockMask to and from block lists with token rules. Public through `blitz_attn.integrations.torch`.

A BlockMask lists full blocks, in which every query sees every key, and partial blocks, in which a function of (batch, head, query, key)
says which queries see which keys. A block list has one kind of block, and token rules that cut inside of blocks: causal, window, lengths
and documents, or a run of keys for each query. So a BlockMask becomes a list with rules that cut its partial blocks exactly as its
function does, and that cut no full block. Where there are no such rules, it becomes a list with a mask that has an element for each pair.
To find the rules, the function is evaluated on all tokens of the partial blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._arrays import falls, integers
from ..._sabi.check import check
from ..._sabi.convert import from_block_mask, from_num_idx, listed_in_runs, to_block_mask, to_num_idx
from ..._sabi.lists import checked_shape, grid_of, tokens_of
from .tensors import flag_of, pair_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from ..._types import Array, ArrayLike, Integers

try:
    import torch
except ModuleNotFoundError:  # without torch, the module can be imported and documented, but its functions cannot be called
    torch = None

__all__ = ["from_flex_block_mask", "to_flex_block_mask"]

CHUNK = 1 << 22  # pairs of tokens that are evaluated at once


# ---- Coordinates: where a token lies in its sequence ------------------------------------------------------------------


class Places(NamedTuple):
    """Sequences of a problem: those of a batch with their lengths, or documents that follow one another."""

    sizes: tuple[int, int]  # tokens of queries and of keys
    q_lens: Any  # int64 tensor: the length of each batch entry or document; None: all tokens
    kv_lens: Any
    documents: tuple[Any, Any] | None  # the document of each query and of each key
    starts: tuple[Any, Any] | None  # the first query and key of each document

    @classmethod
    def of(cls, sizes: tuple[int, int], lens: tuple[Any, Any], ends: tuple[Any, Any], device: Any) -> Places:
        def tensor(x: np.ndarray | None) -> Any:
            return None if x is None else torch.from_numpy(np.ascontiguousarray(x)).to(device)

        if ends[0] is None:
            return cls(sizes, tensor(lens[0]), tensor(lens[1]), None, None)
        of_queries, of_keys = (tensor(np.searchsorted(x[1:], np.arange(n), side="right")) for x, n in zip(ends, sizes, strict=True))
        starts = tensor(ends[0][:-1]), tensor(ends[1][:-1])
        return cls(sizes, tensor(np.diff(ends[0])), tensor(np.diff(ends[1])), (of_queries, of_keys), starts)

    def distance(self, b: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        """For a query and a key: their sequence, whether both are valid tokens of it, and how far the key lies beyond the diagonal."""
        if self.documents is not None and self.starts is not None:
            b, other = self.documents[0][i], self.documents[1][j]
            inside = b == other
            i, j = i - self.starts[0][b], j - self.starts[1][other]
        else:
            inside = (i < self.sizes[0]) & (j < self.sizes[1])
        q_end = self.sizes[0] if self.q_lens is None else self.q_lens[b]
        kv_end = self.sizes[1] if self.kv_lens is None else self.kv_lens[b]
        return b, inside & (i < q_end) & (j < kv_end), j - i - (kv_end - q_end)


class Rules(NamedTuple):
    """Which valid keys a query sees: those at distances from `lowest` to `highest`. None sets no bound."""

    lowest: int | None
    highest: int | None

    @classmethod
    def of(cls, causal: bool, window: Sequence[int] | None) -> Rules:
        left, right = (-1, -1) if window is None else window
        highest = None if right < 0 else right
        return cls(None if left < 0 else -left, 0 if causal else highest)

    def allow(self, distance: Any) -> Any:
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.lowest is not None:
            seen = seen & (distance >= self.lowest)
        if self.highest is not None:
            seen = seen & (distance <= self.highest)
        return seen


def _mask_mod(places: Places, rules: Rules, kept: Any, block_shape: tuple[int, int], ranges: Any = None) -> Callable[..., Any]:
    """The function of a BlockMask. It applies the rules and also the list (`kept`: bool (B or 1, H or 1, R, C), or None), because
    uncompiled flex_attention calls this function for all pairs. In a problem of documents, the rows and columns of `kept` begin at each
    document. `ranges`: (B or 1, Sq, 2), a run of keys for each query."""
    several = None if kept is None else (kept.shape[0] > 1, kept.shape[1] > 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        sequence, inside, distance = places.distance(b, q_idx, kv_idx)
        seen = inside & rules.allow(distance)
        if ranges is not None:
            first, end = ranges[b if ranges.shape[0] > 1 else torch.zeros_like(q_idx), q_idx].unbind(-1)
            seen = seen & (first <= kv_idx) & (kv_idx < end)
        if kept is None or several is None:
            return seen
        i, j = q_idx, kv_idx
        if places.starts is not None:
            i, j = i - places.starts[0][sequence], j - places.starts[1][sequence]
            j = torch.where(inside, j, 0)  # a key of another document
        zero = torch.zeros_like(i)
        return seen & kept[sequence if several[0] else zero, h if several[1] else zero, i // block_shape[0], j // block_shape[1]]

    return mask_mod


def _evaluated(mask_mod: Any, blocks: np.ndarray, block_shape: tuple[int, int], sizes: tuple[int, int], device: Any) -> Iterator[Any]:
    """Evaluates the function of a mask in `blocks`, rows of (batch, head, row, column), a part at a time. Yields the part; b, i and j,
    indices that broadcast to (n, BQ, BKV); `valid`, whether both i and j are tokens; and `seen`, whether the function lets i see j."""
    over_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_pairs = torch.vmap(torch.vmap(over_keys, in_dims=(None, None, 0, None)), in_dims=(0, 0, 0, 0))
    step = max(1, CHUNK // (block_shape[0] * block_shape[1]))
    for first in range(0, len(blocks), step):
        part = blocks[first : first + step]
        b, h, row, column = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in part.T)
        i = row[:, None] * block_shape[0] + torch.arange(block_shape[0], device=device)
        j = column[:, None] * block_shape[1] + torch.arange(block_shape[1], device=device)
        valid = (i < sizes[0])[:, :, None] & (j < sizes[1])[:, None, :]
        i, j = i.clamp(max=sizes[0] - 1), j.clamp(max=sizes[1] - 1)
        try:
            seen = over_pairs(b, h, i, j)
        except Exception as error:  # whatever a caller's function raises
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"block_mask: expected a mask_mod that torch.vmap can evaluate, got one that raises: {why}") from error
        yield part, b[:, None, None], i[:, :, None], j[:, None, :], valid, seen.expand(valid.shape) & valid


def _lengths(x: Any, name: str, count: int | None, most: int) -> np.ndarray | None:
    """int64 lengths of each batch entry, or None."""
    if x is None:
        return None
    lengths = integers(x, name)
    if lengths.ndim != 1 or count not in (None, lengths.size):
        raise ValueError(f"{name}: expected {'B' if count is None else count} lengths, got shape {lengths.shape}")
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > most:
        raise ValueError(f"{name}: expected lengths from 0 to {most}, got {lengths.min()} to {lengths.max()}")
    return lengths


def _ends(x: Any, name: str, tokens: int) -> np.ndarray | None:
    """int64 cumulative lengths of documents, or None."""
    if x is None:
        return None
    ends = integers(x, name)
    if ends.ndim != 1 or ends.size < 2 or ends[0] != 0 or ends[-1] != tokens or falls(ends).any():
        raise ValueError(f"{name}: expected numbers rising from 0 to {tokens}, got {ends.tolist()[:10]}")
    return ends


def _both_ends(cu_seqlens_q: Any, cu_seqlens_kv: Any, lens: tuple[Any, Any], sizes: tuple[int, int]) -> tuple[Any, Any]:
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_kv"
        raise ValueError(f"{missing}: expected the documents of both queries and keys, got None")
    ends = _ends(cu_seqlens_q, "cu_seqlens_q", sizes[0]), _ends(cu_seqlens_kv, "cu_seqlens_kv", sizes[1])
    if ends[0] is not None and ends[1] is not None and ends[0].size != ends[1].size:
        raise ValueError(f"cu_seqlens_kv: expected {ends[0].size} numbers like cu_seqlens_q, got {ends[1].size}")
    if ends[0] is not None and (lens[0] is not None or lens[1] is not None):
        raise ValueError(f"{'q_lens' if lens[0] is not None else 'kv_lens'}: expected None with documents, got lengths")
    return ends


def _ranges_given(kv_ranges: Any, queries: int, ends: tuple[Any, Any]) -> np.ndarray | None:
    """int64 (B or 1, Sq, 2), or None."""
    if kv_ranges is None:
        return None
    ranges = integers(kv_ranges, "kv_ranges")
    if ends[0] is not None:
        raise ValueError("kv_ranges: expected None with documents, got ranges")
    if ranges.ndim not in (2, 3) or ranges.shape[-2:] != (queries, 2):
        raise ValueError(f"kv_ranges: expected shape (B, {queries}, 2) or ({queries}, 2), got {ranges.shape}")
    return np.ascontiguousarray(ranges.reshape(-1, queries, 2) if queries else ranges.reshape(1, 0, 2))


# ---- To a BlockMask ---------------------------------------------------------------------------------------------------


def _grid_of_documents(ends: tuple[np.ndarray, np.ndarray], block_shape: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """bool (rows, columns): blocks of a packed problem that hold a query and a key of the same document."""
    overlap = np.zeros(grid, bool)
    for (q0, q1), (k0, k1) in zip(zip(ends[0], ends[0][1:], strict=False), zip(ends[1], ends[1][1:], strict=False), strict=True):
        if q1 > q0 and k1 > k0:
            overlap[q0 // block_shape[0] : -(-q1 // block_shape[0]), k0 // block_shape[1] : -(-k1 // block_shape[1])] = True
    return overlap


def to_flex_block_mask(
    sabi: ArrayLike,
    s_q: int,
    s_kv: int | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    cu_seqlens_kv: Integers | None = None,
    kv_ranges: Array | None = None,
) -> BlockMask:
    """FlexAttention's BlockMask of the pairs of queries and keys that a call of `block_sparse_attention` computes.

    Parameters
    ----------
    sabi : array_like of int, optional
        Block list ``(B or 1, H or 1, R, W)``; None lists every block. With documents, rows and columns begin at each document, and the
        first axis counts documents.
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    block_shape : (int, int)
        Number of tokens per block of queries and of keys. The BlockMask gets the same shape.
    causal, window, q_lens, kv_lens
        Token rules: see `block_sparse_attention`.
    cu_seqlens_q, cu_seqlens_kv : sequence of int, optional
        Documents that follow one another, as in layout TND. The BlockMask is for tensors ``(1, H, T, D)``.
    kv_ranges : array of int, optional
        ``(B, s_q, 2)`` or ``(s_q, 2)``, without documents: see `block_sparse_attention`.

    Returns
    -------
    torch.nn.attention.flex_attention.BlockMask
        On the CPU. Its function holds the rules and the list, so that flex_attention computes the same whether it is compiled or not.
        A query that sees no key gets 0 in both cases.

    Raises
    ------
    TypeError, ValueError
        Lists, lengths, documents or ranges that do not fit the sizes.

    Examples
    --------
    >>> from blitz_attn import sabi
    >>> from blitz_attn.integrations.torch import to_flex_block_mask
    >>> mask = to_flex_block_mask(sabi.sliding_window(512, window=(128, 0)), 512, causal=True, window=(100, 0))
    >>> mask.shape, mask.kv_num_blocks.tolist(), round(mask.sparsity(), 1)
    ((1, 1, 512, 512), [[[1, 2, 2, 2]]], 56.2)
    """
    sizes, shape = tokens_of(s_q, s_kv), checked_shape(block_shape)
    grid = grid_of(*sizes, shape)
    lens = _lengths(q_lens, "q_lens", None, sizes[0]), _lengths(kv_lens, "kv_lens", None, sizes[1])
    ends = _both_ends(cu_seqlens_q, cu_seqlens_kv, lens, sizes)
    rules = Rules.of(flag_of(causal, "causal"), pair_of(window, "window"))
    places = Places.of(sizes, lens, ends, "cpu")
    ranges = _ranges_given(kv_ranges, sizes[0], ends)
    if ends[0] is None:
        kept = None if sabi is None else to_block_mask(check(sabi, *sizes, shape), grid[1])
        several = [x.shape[:1] for x in (*lens, kept, ranges) if x is not None]
        batches = {n for (n,) in several} - {1}
        if len(batches) > 1:
            raise ValueError(f"kv_lens: expected the batch of sabi, q_lens and kv_ranges, got batches of {sorted(batches)}")
        lead = (max(batches, default=1), 1 if kept is None else kept.shape[1])
        candidates = np.broadcast_to(np.True_ if kept is None else kept, (*lead, *grid))
    else:
        most_q, most_kv = (max(1, int(np.diff(x).max())) for x in ends)
        columns = grid_of(most_q, most_kv, shape)[1]
        kept = None if sabi is None else to_block_mask(check(sabi, most_q, most_kv, shape, batch=ends[0].size - 1), columns)
        lead = (1, 1 if kept is None else kept.shape[1])
        candidates = np.broadcast_to(_grid_of_documents(ends, shape, grid), (*lead, *grid))
    mask_mod = _mask_mod(
        places, rules, None if kept is None else torch.from_numpy(kept), shape, None if ranges is None else torch.from_numpy(ranges)
    )
    some, every = np.zeros((2, *lead, *grid), bool)
    for part, *_, seen in _evaluated(mask_mod, np.argwhere(candidates), shape, sizes, "cpu"):
        some[tuple(part.T)] = seen.any(-1).any(-1).numpy()
        every[tuple(part.T)] = seen.all(-1).all(-1).numpy()

    from torch.nn.attention.flex_attention import BlockMask

    listed = (torch.from_numpy(x) for kind in (some & ~every, every) for x in to_num_idx(from_block_mask(kind), grid[1]))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=shape, mask_mod=mask_mod, seq_lengths=sizes)


# ---- From a BlockMask -------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """Which distances of `Places.distance` a mask shows somewhere, and which it hides somewhere: arrays of bool, whose index is the
    distance plus the numbers of queries and keys."""

    seen: np.ndarray
    hidden: np.ndarray
    ends: np.ndarray  # int64 (2, B): one more than the last query that sees a key, and one more than the last key that is seen


def _has_gap(seen: np.ndarray, hidden: np.ndarray) -> bool:
    """Whether no window expresses what is seen: some distance from the lowest seen one to the highest is hidden somewhere."""
    where = np.flatnonzero(seen)
    return where.size > 0 and bool(hidden[where[0] : where[-1] + 1].any())


def _looked_at(
    mask: Any, partial: np.ndarray, full: np.ndarray, shape: tuple[int, int], places: Places, device: Any, *, whole: bool
) -> _Found | None:
    """What the blocks of a mask show. None if a query sees a key beyond the lengths or in another document. Unless `whole`, also None as
    soon as no window can express what is seen."""
    sizes = places.sizes
    shift = sum(sizes)
    seen_at, hidden_at = np.zeros((2, 2 * shift + 1), bool)
    ends = np.zeros((2, partial.shape[0]), np.int64)
    for part, b, i, j, valid, seen in _evaluated(mask.mask_mod, np.argwhere(partial), shape, sizes, device):
        _, inside, distance = places.distance(b, i, j)
        inside, distance = inside & valid, (distance + shift).expand(valid.shape)
        if bool((seen & ~inside).any()):
            return None
        seen_at[distance[seen].cpu().numpy()] = True
        hidden_at[distance[inside & ~seen].cpu().numpy()] = True
        if not whole and _has_gap(seen_at, hidden_at):
            return None
        for end, index in zip(ends, (i, j), strict=True):
            last = torch.where(seen, index + 1, 0).flatten(1).amax(1)
            np.maximum.at(end, part[:, 0], last.cpu().numpy())
    blocks = np.argwhere(full)
    b, (first_q, first_k) = blocks[:, 0], (blocks[:, 2:] * shape).T
    last_q, last_k = np.minimum(first_q + shape[0], sizes[0]) - 1, np.minimum(first_k + shape[1], sizes[1]) - 1
    corners = []
    for i, j in ((first_q, last_k), (last_q, first_k)):  # the keys farthest beyond the diagonal, and farthest before it
        _, inside, distance = places.distance(*(torch.from_numpy(x).to(device) for x in (b, i, j)))
        if not bool(inside.all()):
            return None
        corners.append(np.broadcast_to(distance.cpu().numpy(), b.shape) + shift)
    rises = np.zeros(seen_at.size + 1, np.int64)
    np.add.at(rises, corners[1], 1)
    np.add.at(rises, corners[0] + 1, -1)
    for end, last in zip(ends, (last_q, last_k), strict=True):
        np.maximum.at(end, b, last + 1)
    return _Found(seen_at | (np.cumsum(rises)[:-1] > 0), hidden_at, ends)


def _rules_of(found: _Found | None, shift: int) -> tuple[bool, tuple[int, int] | None] | None:
    """(causal, window) that let a query see exactly the distances that the mask shows; None where there are no such rules."""
    if found is None:
        return None
    if _has_gap(found.seen, found.hidden):
        return None
    seen, hidden = (np.flatnonzero(x) - shift for x in (found.seen, found.hidden))
    if seen.size == 0:
        return (False, None) if hidden.size == 0 else None
    lowest, highest = int(seen.min()), int(seen.max())
    below, above = hidden[hidden < lowest], hidden[hidden > highest]
    left = right = -1
    if below.size:
        left = max(0, -lowest)
        if below.max() >= -left:
            return None  # what is seen begins after the diagonal
    if above.size:
        right = max(0, highest)
        if above.min() <= right:
            return None  # what is seen ends before the diagonal
    causal = right == 0
    window = None if left < 0 and (causal or right < 0) else (left, 0 if causal else right)
    return causal, window


def _ranges_of(mask: Any, partial: np.ndarray, full: np.ndarray, shape: tuple[int, int], sizes: tuple[int, int], device: Any) -> Any:
    """int32 (B, Sq, 2): one run of keys per query. In the partial blocks of all heads, the mask's function lets a query see the keys of
    its run and no others. None where no such runs exist."""
    counts = np.zeros((*partial.shape[:2], sizes[0]), np.int64)
    first, end = np.full((partial.shape[0], sizes[0]), sizes[1], np.int32), np.zeros((partial.shape[0], sizes[0]), np.int32)
    for part, b, i, j, _, seen in _evaluated(mask.mask_mod, np.argwhere(partial), shape, sizes, device):
        if bool(((seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0] > 1).any()):
            return None  # two runs in a row of a block
        at = np.broadcast_arrays(b[..., 0].cpu().numpy(), i[..., 0].cpu().numpy())
        np.minimum.at(first, tuple(at), torch.where(seen, j, sizes[1]).amin(-1).cpu().numpy())
        np.maximum.at(end, tuple(at), torch.where(seen, j + 1, 0).amax(-1).cpu().numpy())
        np.add.at(counts, (at[0], part[:, 1:2], at[1]), seen.sum(-1).cpu().numpy())
    for b, row, column in np.argwhere(full.any(axis=1)):
        rows = slice(row * shape[0], (row + 1) * shape[0])
        first[b, rows] = np.minimum(first[b, rows], column * shape[1])
        end[b, rows] = np.maximum(end[b, rows], min(sizes[1], (column + 1) * shape[1]))
    ranges = np.stack([first, end], axis=-1)
    counts += listed_in_runs(full, np.broadcast_to(np.array([0, sizes[1]]), (sizes[0], 2)), shape, sizes[1])
    same = np.array_equal(counts, listed_in_runs(partial | full, ranges[:, None], shape, sizes[1]))
    return torch.from_numpy(ranges) if same else None


def _pairs_of(mask: Any, partial: np.ndarray, full: np.ndarray, shape: tuple[int, int], sizes: tuple[int, int], device: Any) -> Any:
    """A mask of bool, (B or 1, H or 1, Sq, Skv): True where a query sees a key in a listed block."""
    shown = torch.zeros((*full.shape[:2], *sizes), dtype=torch.bool)
    for b, h, row, column in np.argwhere(full).tolist():
        shown[b, h, row * shape[0] : (row + 1) * shape[0], column * shape[1] : (column + 1) * shape[1]] = True
    for part, *_, seen in _evaluated(mask.mask_mod, np.argwhere(partial), shape, sizes, device):
        for (b, h, row, column), block in zip(part.tolist(), seen.cpu(), strict=True):
            view = shown[b, h, row * shape[0] : (row + 1) * shape[0], column * shape[1] : (column + 1) * shape[1]]
            view.copy_(block[: view.shape[0], : view.shape[1]])
    return shown


def from_flex_block_mask(
    block_mask: BlockMask, *, q_lens: Integers | None = None, kv_lens: Integers | None = None, cu_seqlens_q: Integers | None = None,
    cu_seqlens_kv: Integers | None = None
) -> dict[str, Any]:
    """The arguments of `block_sparse_attention` that stand for a BlockMask of FlexAttention.

    Causal masks and windows are recognised: the mask's function is evaluated on all tokens of its partial blocks, and the rules that
    are returned cut these blocks exactly as the function does. Lengths of a padded batch are recognised, too, if padding attends to nothing
    and nothing attends to padding. Where these rules do not fit, a run of keys for each query may fit, as for a prefix that sees itself, or
    for documents that are not given. A mask that none of these rules express becomes an ``attn_mask`` of bool, which takes
    ``B * H * Sq * Skv`` bytes, where B and H are those that the BlockMask was made for (1 for None). Documents and lengths that are given
    are checked: a mask that does not fit them is refused. A mask that was made for any batch (``B=None``) gets arguments that fit any
    batch.

    Parameters
    ----------
    block_mask : torch.nn.attention.flex_attention.BlockMask
        Of any block size and device.
    q_lens, kv_lens : sequence of int, optional
        ``(B,)``: number of valid tokens of each batch entry, where they are known. Causal and window are aligned to them.
    cu_seqlens_q, cu_seqlens_kv : sequence of int, optional
        ``(N + 1,)`` cumulative lengths of the documents of a mask for one packed sequence, rising from 0 to its number of tokens.

    Returns
    -------
    dict
        ``sabi`` (int32 tensor) and ``block_shape``, with ``causal``, ``window``, ``q_lens`` and ``kv_lens``, or with ``kv_ranges``, or with
        ``attn_mask``. With given documents, the arguments are for tensors ``(T, H, D)``: ``layout="TND"``, ``cu_seqlens_q`` and
        ``cu_seqlens_kv`` take the place of the lengths, and rows and columns of ``sabi`` begin at each document. ``sabi`` is then None if
        the mask leaves out nothing of the documents.

    Raises
    ------
    TypeError
        Not a BlockMask.
    ValueError
        With the given lengths or documents, no combination of causal and window cuts the partial blocks as the mask does. Or documents
        begin within a block, and the list leaves out parts of them.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from blitz_attn.integrations.torch import block_sparse_attention, from_flex_block_mask
    >>> mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 100), None, None, 512, 512, device="cpu")
    >>> options = from_flex_block_mask(mask)
    >>> options["causal"], options["window"], options["sabi"][0, 0].tolist()
    (True, (100, 0), [[0, -1], [0, 1], [1, 2], [2, 3]])
    >>> q, k, v = (torch.randn(1, 2, 512, 64) for _ in range(3))
    >>> block_sparse_attention(q, k, v, **options).shape
    torch.Size([1, 2, 512, 64])
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got {type(block_mask).__name__}")
    shape = checked_shape(block_mask.BLOCK_SIZE)
    sizes = tokens_of(*block_mask.seq_lengths)
    rows, columns = grid_of(*sizes, shape)
    device = block_mask.kv_num_blocks.device

    def listed(count: Any, index: Any) -> np.ndarray:
        if count is None:
            return np.zeros((1, 1, rows, columns), bool)
        lists = from_num_idx(count.cpu(), index.cpu(), dtype="int64")
        return to_block_mask(lists.reshape(*[1] * (4 - lists.ndim), *lists.shape), columns)

    partial, full = np.broadcast_arrays(
        listed(block_mask.kv_num_blocks, block_mask.kv_indices), listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    )
    kept = partial | full
    lens = _lengths(q_lens, "q_lens", kept.shape[0], sizes[0]), _lengths(kv_lens, "kv_lens", kept.shape[0], sizes[1])
    ends = _both_ends(cu_seqlens_q, cu_seqlens_kv, lens, sizes)
    if ends[0] is not None and kept.shape[0] != 1:
        raise ValueError(f"block_mask: expected a mask of one packed sequence with documents, got one of a batch of {kept.shape[0]}")
    places = Places.of(sizes, lens, ends, device)
    given = any(x is not None for x in (*lens, ends[0]))
    found = _looked_at(block_mask, partial, full, shape, places, device, whole=not given and kept.shape[0] > 1)
    rules = _rules_of(found, sum(sizes))
    # A mask of batch size 1 holds for every batch size, while lengths hold for one sequence: so no lengths are derived from it.
    if rules is None and found is not None and not given and kept.shape[0] > 1:
        lens = found.ends[0], found.ends[1]
        places = Places.of(sizes, lens, ends, device)
        rules = _rules_of(_looked_at(block_mask, partial, full, shape, places, device, whole=False), sum(sizes))
    if rules is None and not given:
        ranges = _ranges_of(block_mask, partial, full, shape, sizes, device)
        if ranges is not None:
            return {"block_shape": shape, "sabi": _list_of(kept), "kv_ranges": ranges[0] if len(ranges) == 1 else ranges}
        return {"block_shape": shape, "sabi": _list_of(kept), "attn_mask": _pairs_of(block_mask, partial, full, shape, sizes, device)}
    if rules is None:
        raise ValueError(
            "block_mask: expected partial blocks that causal and window cut exactly together with the given lengths or documents, got a "
            "mask_mod that cuts them otherwise"
        )
    options: dict[str, Any] = {"block_shape": shape, "causal": rules[0], "window": rules[1]}
    if ends[0] is None:
        tensors = (None if x is None else torch.from_numpy(np.ascontiguousarray(x)) for x in lens)
        return options | {"sabi": _list_of(kept)} | dict(zip(("q_lens", "kv_lens"), tensors, strict=True))
    named = {"cu_seqlens_q": torch.from_numpy(ends[0].copy()), "cu_seqlens_kv": torch.from_numpy(ends[1].copy())}
    cut = Rules.of(rules[0], rules[1])
    return options | {"layout": "TND", "sabi": _list_of_documents(kept, ends, shape, places, cut)} | named


def _list_of(kept: np.ndarray) -> Any:
    return torch.from_numpy(from_block_mask(kept, dtype="int32"))


def _list_of_documents(kept: np.ndarray, ends: tuple[Any, Any], shape: tuple[int, int], places: Places, rules: Rules) -> Any:
    """A list whose rows and columns begin at each document, or None where nothing of the documents is left out."""
    left_out = _grid_of_documents(ends, shape, kept.shape[2:]) & ~kept
    mask_mod = _mask_mod(places, rules, None, shape)
    device = places.documents[0].device if places.documents is not None else "cpu"
    if not any(bool(seen.any()) for *_, seen in _evaluated(mask_mod, np.argwhere(left_out), shape, places.sizes, device)):
        return None
    used = [x[:-1][np.diff(x) > 0] for x in ends]
    if any((x % n).any() for x, n in zip(used, shape, strict=True)):
        raise ValueError(
            "block_mask: expected documents that begin with a block, or every block of them listed, got a list that leaves out parts of "
            "documents that begin within a block"
        )
    longest = tuple(-(-max(1, int(np.diff(x).max())) // n) for x, n in zip(ends, shape, strict=True))
    lists = np.zeros((ends[0].size - 1, kept.shape[1], *longest), bool)
    for n, (q0, k0) in enumerate(zip(ends[0][:-1] // shape[0], ends[1][:-1] // shape[1], strict=True)):
        cut = kept[0, :, q0 : q0 + longest[0], k0 : k0 + longest[1]]
        q_blocks, k_blocks = (-(-(x[n + 1] - x[n]) // size) for x, size in zip(ends, shape, strict=True))
        lists[n, :, :q_blocks, :k_blocks] = cut[:, :q_blocks, :k_blocks]
    return _list_of(lists)
