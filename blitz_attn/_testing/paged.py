"""Test inputs for calls over paged caches. Public through `blitz_attn.testing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arrays import integer, integers
from .._reference.common import round_to
from .._reference.paged import CELL_BYTES, pair_of, quantize_kv, quantize_rows

QUANTIZED = ("int8", "float8_e4m3")
ROW_FORMATS = ("q8_0", "q4_0", "q4_1")


class Paged(NamedTuple):
    """The arguments `p` of one call of `blitz_attn.paged_attention`: ``paged_attention(*p.arrays, **p.options)``."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    options: dict[str, Any]
    """kv_layout, and q_lens, k_scale, v_scale, dtype and kv_dtype where the call needs them."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The positional arguments."""
        return self[:5]

    @property
    def dtype(self) -> str:
        """The dtype of the queries and the result."""
        return self.options.get("dtype") or self.q.dtype.name

    @property
    def v_dim(self) -> int:
        """The last dimension of V."""
        cell = CELL_BYTES.get(pair_of(self.options.get("kv_dtype"))[1])
        return self.v_cache.shape[-1] // cell * 32 if cell else self.v_cache.shape[-1]

    @property
    def page_size(self) -> int:
        """Number of tokens per page."""
        return self.k_cache.shape[1 if self.options["kv_layout"] == "NHD" else 2]

    def csr(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tables and lengths as a triple (indptr, indices, last_page_len).

        Returns
        -------
        indptr, indices, last_page_len : numpy.ndarray
            The second form of tables that `blitz_attn.paged_attention` takes.

        Examples
        --------
        >>> from blitz_attn.testing import make_paged
        >>> [x.shape for x in make_paged(2, 2, 1, [5, 3], 4, 8).csr()]
        [(3,), (3,), (2,)]
        """
        used = -(-self.seq_lens // self.page_size)
        indices = np.concatenate(
            [row[:n] for row, n in zip(self.block_tables, used, strict=True)] or [np.zeros(0, self.block_tables.dtype)]
        )
        return np.cumsum([0, *used]), indices, self.seq_lens - np.maximum(used - 1, 0) * self.page_size


def make_paged(
    batch: int,
    heads: int,
    kv_heads: int,
    seq_lens: int | Sequence[int],
    page_size: int,
    head_dim: int,
    v_dim: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | tuple[str, str] | None = None,
    kv_layout: str = "NHD",
    seed: int = 0,
    poison: bool = True,
    *,
    q_lens: Sequence[int] | None = None,
    table_seed: int = 0,
    index_dtype: str = "int32",
) -> Paged:
    """Normally distributed queries and a paged cache. For n pages that requests own, drawn at random, the cache has n + n // 2 + 2 pages.

    Parameters
    ----------
    batch, heads, kv_heads : int
        Sizes.
    seq_lens : int or sequence of int
        Tokens of each request in the cache.
    page_size, head_dim : int
        Number of tokens per page, and D.
    v_dim : int, optional
        Last dimension of V; default `head_dim`.
    dtype : str
        The dtype of the queries, as in `make_qkv`.
    kv_dtype : str or pair of str, optional
        The dtype of the cache; default `dtype`. Caches of ``"int8"`` and ``"float8_e4m3"`` are quantised and have scales; float8 comes as
        bits. Caches of ``"q8_0"``, ``"q4_0"``, ``"q4_1"`` and pairs of these are rows of bytes.
    kv_layout : str
        NHD or HND. No value depends on the layout.
    seed, table_seed : int
        Seeds of the values, and of the choice of pages that a request owns. No value of a token depends on `table_seed` or `page_size`.
    poison : bool
        Fill pages that no request owns, and the rest of each request's last page, with NaN (in int8 caches only the scales are NaN), and
        unused table entries with a number that no page has. False: fill them with zeros, and scales with ones.
    q_lens : sequence of int, optional
        Number of queries of each request. None: each request has one, and queries are (B, H, D).
    index_dtype : str
        The dtype of the tables.

    Returns
    -------
    Paged

    Raises
    ------
    ValueError
        The layout or the dtype is unknown.

    Examples
    --------
    >>> from blitz_attn.testing import make_paged
    >>> p = make_paged(2, 4, 2, [5, 9], page_size=4, head_dim=8)
    >>> p.q.shape, p.k_cache.shape[1:], p.block_tables.shape, p.seq_lens.tolist()
    ((2, 4, 8), (4, 2, 8), (2, 4), [5, 9])
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected NHD or HND, got {kv_layout!r}")
    lengths = np.broadcast_to(integers(seq_lens, "seq_lens"), (batch,)).copy()
    v_dim, kv_dtype = head_dim if v_dim is None else v_dim, dtype if kv_dtype is None else kv_dtype
    seed, table_seed = integer(seed, "seed"), integer(table_seed, "table_seed")
    rng = np.random.default_rng(seed)
    queries = batch if q_lens is None else int(integers(q_lens, "q_lens").sum())
    q = round_to(rng.standard_normal((queries, heads, head_dim), dtype=np.float32), dtype)
    used = -(-lengths // page_size)
    tables, pages = _random_tables(used, table_seed, index_dtype, poison)
    options: dict[str, Any] = {"kv_layout": kv_layout}
    caches = []
    for name, dim, of in zip(("k_scale", "v_scale"), (head_dim, v_dim), pair_of(kv_dtype), strict=True):
        tokens = [rng.standard_normal((n, kv_heads, dim), dtype=np.float32) for n in lengths]
        values: list[Any]
        if of in QUANTIZED:
            pairs = [quantize_kv(x, of) for x in tokens]
            values = [x for x, _ in pairs]
            scale = np.full((pages, page_size, kv_heads), np.nan if poison else 1.0, np.float32)
            _scatter(scale, tables, [s for _, s in pairs])
            options[name] = _in_layout(scale, kv_layout)
        else:
            values = [quantize_rows(x, of) if of in ROW_FORMATS else round_to(x, of) for x in tokens]
        width = dim // 32 * CELL_BYTES[of] if of in ROW_FORMATS else dim
        cache = np.full((pages, page_size, kv_heads, width), _filling(of, poison))
        _scatter(cache, tables, values)
        caches.append(_in_layout(cache, kv_layout))
    if q_lens is not None:
        options["q_lens"] = np.asarray(q_lens, np.int64)
    if q.dtype == np.uint16:
        options["dtype"] = "bfloat16"
    if caches[0].dtype in (np.uint8, np.uint16):
        options["kv_dtype"] = kv_dtype
    return Paged(q, caches[0], caches[1], tables, lengths, options)


def _random_tables(used: np.ndarray, seed: int, index_dtype: str, poison: bool) -> tuple[np.ndarray, int]:
    """(B, W) tables of distinct pages, one entry wider than the longest request needs, and the number of pages of the pool."""
    total = int(used.sum())
    pages = total + total // 2 + 2
    order = np.random.default_rng([seed, 1]).permutation(pages)
    width = int(used.max(initial=0)) + 1
    tables = np.full((len(used), width), np.iinfo(np.int32).max if poison else 0, index_dtype)
    for row, end, n in zip(tables, np.cumsum(used), used, strict=True):
        row[:n] = order[end - n : end]
    return tables, pages


def _filling(kv_dtype: str, poison: bool) -> Any:
    if kv_dtype == "int8":
        return np.int8(-128 if poison else 0)
    if kv_dtype == "float8_e4m3" or kv_dtype in ROW_FORMATS:
        return np.uint8(0x7F if poison else 0)  # 0x7F is NaN, and so is 0x7F7F as float16
    return round_to(np.nan if poison else 0.0, kv_dtype)


def _scatter(cache: np.ndarray, tables: np.ndarray, tokens: list[np.ndarray]) -> None:
    page_size = cache.shape[1]
    for table, values in zip(tables, tokens, strict=True):
        at = np.arange(len(values))
        cache[table[at // page_size], at % page_size] = values


def _in_layout(cache: np.ndarray, kv_layout: str) -> np.ndarray:
    return cache if kv_layout == "NHD" else np.ascontiguousarray(cache.swapaxes(1, 2))
