"""Attention over a paged key/value cache, for decoding and chunked prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

from numpy import empty, float32, floating, integer, ndarray, zeros

from .. import _arrays, _core
from .._arrays import bias_for_core, is_registered
from .._floats import FLOATS
from .._formats import CELL_BYTES, CELL_DIMS
from .._names import KVLayout
from .._sentences import rename
from .tables import tables_for_core

if TYPE_CHECKING:
    from typing import TypedDict

    from .._block_sparse.call import Outputs
    from .._types import Array, ArrayLike, Integers, Kind, KVDType, Scale, Tables

    # Options that functions take by name, for overloads here and elsewhere.

    class PagedInputs(TypedDict, total=False):
        """The arrays of one call over pages."""

        sinks: ArrayLike | None
        k_scale: Scale | None
        v_scale: Scale | None
        kv_ranges: Array | None
        attn_mask: Array | None
        alibi_slopes: ArrayLike | None

    class PagedRules(PagedInputs, total=False):
        """Options of `paged_attention` of `blitz_attn.integrations.torch` and of `blitz_attn.integrations.jax`."""

        scale: float | None
        kv_layout: KVLayout
        q_lens: Integers | None
        window: int | None
        softcap: float | None
        num_threads: int | None

    class PagedSelectRules(PagedRules, total=False):
        """Options of `paged_select_attention` of `blitz_attn.integrations.torch` and of `blitz_attn.integrations.jax`."""

        counts: Array | None
        selected_size: int | None

    class PagedOutputs(Outputs, total=False):
        """The options of results, of the order of summation, and of the dtype of caches."""

        kv_split: int | None
        kv_dtype: KVDType | None

    class PagedOptions(PagedRules, PagedOutputs, total=False):
        """Options of `blitz_attn.paged_attention`."""

        q_begin: Integers | None

    class PagedSelectOptions(PagedOptions, PagedSelectRules, total=False):
        """Options of `blitz_attn.paged_select_attention`."""

__all__ = ["paged_attention", "paged_select_attention"]

_CORE_NAMES = {"selected_counts": "counts"}
_OTHER_FLOATS = ("float64", "float16", "bfloat16")
_STORED = {name: name for name in ("float32", "float16", "float64", "int8")} | {"bfloat16": "uint16", "float8_e4m3": "uint8"}
_STORED |= dict.fromkeys(CELL_BYTES, "uint8")
_NO_REQUESTS = zeros((0, 1), "int32"), (), None, None, None, None, None  # the `requests` of `attend_requests` for a call without requests


class Rules(NamedTuple):
    """Options of `paged_attention` that hold for all calls of a plan: the last arguments of the core's function, in its order."""

    out_dtype: Any = None
    dtype: Any = None
    kv_dtype: Any = None
    scale: Any = None
    kv_layout: Any = "NHD"
    window: Any = None
    softcap: Any = None
    num_threads: Any = None


def scales_for_core(scale: Any, name: str, cache: Any) -> Any:
    """k_scale or v_scale as the core can read it: a number, or an array of other floats, becomes an array of float32. A `cache` of 16 bits
    or more has no scale: for such a cache, the number 1 becomes None."""
    if type(scale) is ndarray:
        number = scale.ndim == 0
    else:  # a released memoryview has `ndim` but raises when it is read: it is then refused as a number
        number = isinstance(scale, (float, int, floating, integer)) or (hasattr(type(scale), "ndim") and not _arrays.shape_of(scale))
    if number:
        made = _arrays.float32_numbers(scale, name)
        return None if made == 1 and getattr(_arrays.dtype_of(cache), "itemsize", 1) > 1 else made
    other = type(scale) is not ndarray or scale.dtype != float32
    return _arrays.float32_numbers(scale, name) if other and str(_arrays.dtype_of(scale)).rpartition(".")[2] in _OTHER_FLOATS else scale


def open_requests(
    block_tables: Any, seq_lens: Any, indptr: Any, last_page_len: Any, q_lens: Any, q_begin: Any, page_size: Any, num_pages: Any = None,
    kv_split: Any = None,
) -> tuple[tuple[Any, ...], int, int]:  # fmt: skip
    """Checks and copies requests once for many calls. Returns the `requests` of `attend_requests`, the number of requests, and the number
    of their queries."""
    opened, batch, num_queries = _core.open_page_tables(
        block_tables, seq_lens, indptr, last_page_len, q_lens, q_begin, page_size, num_pages, kv_split
    )
    return (opened, None, None, None, None, None, None), batch, num_queries


def attend_requests(
    q: Any, k_cache: Any, v_cache: Any, requests: tuple[Any, ...], rules: tuple[Any, ...], selected: Any = None, counts: Any = None,
    sinks: Any = None, k_scale: Any = None, v_scale: Any = None, kv_ranges: Any = None, attn_mask: Any = None, alibi_slopes: Any = None,
    return_lse: Any = False, out: Any = None, selected_size: Any = None,
) -> Any:  # fmt: skip
    """Attention over a paged cache by one call of the core, with arrays of any kind; over all blocks where `selected` is None. `requests`
    is the result of `tables_for_core`, followed by `q_lens`, `q_begin` and `kv_split`, or the first result of `open_requests`. `rules` is
    `Rules`, or a plain tuple of the same values, which takes less time to make."""
    if k_scale is not None or v_scale is not None:
        k_scale, v_scale = scales_for_core(k_scale, "k_scale", k_cache), scales_for_core(v_scale, "v_scale", v_cache)
    if sinks is not None:
        sinks = _arrays.float32_numbers(sinks, "sinks")
    if not (attn_mask is alibi_slopes is None):
        attn_mask, alibi_slopes = bias_for_core(attn_mask, alibi_slopes)
    try:
        if (  # plain NumPy arrays: nothing to translate
            type(q) is type(k_cache) is type(v_cache) is ndarray and out is None
            and rules[0] is rules[1] is rules[2] is None  # out_dtype, dtype and kv_dtype
            and not (is_registered(q) or is_registered(k_cache) or is_registered(v_cache))
        ):  # fmt: skip
            tables, seq_lens, indptr, last_page_len, q_lens, q_begin, kv_split = requests  # unpacked, because a call with * takes longer
            return _core.paged_attention(
                empty, q, k_cache, v_cache, tables, seq_lens, indptr, last_page_len, q_lens, q_begin, kv_split, selected, counts,
                selected_size, sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, None, None, rules,
            )  # fmt: skip
        family = _arrays.family_of(q)
        out, lse_out = _arrays.split_out(out, return_lse)
        kinds = _arrays.dtype_name(rules[0], "out_dtype"), _arrays.dtype_name(rules[1])
        kv_kind = _arrays.kv_dtype_name(rules[2])
        query, keys = _arrays.readable(q, "q"), _arrays.readable(k_cache, "k_cache", True)
        values, kv_kind = _arrays.of_format(_arrays.readable(v_cache, "v_cache", True), kv_kind)
        result = _core.paged_attention(
            family.empty, query, keys, values, *requests, selected, counts, selected_size, sinks, k_scale, v_scale,
            kv_ranges, attn_mask, alibi_slopes, return_lse, _arrays.writable(out, "out"), _arrays.writable(lse_out, "lse"),
            (*kinds, kv_kind, *rules[3:]),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, _CORE_NAMES)
        raise
    if not return_lse:
        return _arrays.finished(result, out, family)
    return _arrays.finished(result[0], out, family), _arrays.finished(result[1], lse_out, family)


def size_of_selected(selected_size: Any) -> int | None:
    """Number of tokens of a selected block; None where blocks are pages."""
    if selected_size is None:
        return None
    size = _arrays.integer(selected_size, "selected_size")
    if size < 1:
        raise ValueError(f"selected_size: expected at least 1 token, got {size}")
    return size


def check_rules(rules: Rules) -> None:
    """Refuses options that no call can have, by making a call without requests. The arrays of this call have the dtypes that the options
    name, or float64, which allows the widest range of softcaps, if they name none."""
    dtype, kv_dtype = rules.dtype, rules.kv_dtype
    kind = dtype or (kv_dtype if kv_dtype in FLOATS else None) or rules.out_dtype or ("float64" if kv_dtype is None else "float32")
    kind = kind if kind in FLOATS else "float32"  # the call refuses a dtype that it does not know
    names = kv_dtype if type(kv_dtype) is tuple else (kv_dtype or kind,) * 2
    cells = names[0] in CELL_BYTES
    q = empty((0, 1, CELL_DIMS if cells else 1), _STORED.get(kind, "float32"))
    k_cache, v_cache = (empty((0, 1, 1, CELL_BYTES.get(name, 1)), _STORED.get(name, "float32")) for name in names)
    factor = None if kv_dtype is None or cells else 1
    if dtype is None and kind == "bfloat16":
        rules = rules._replace(dtype=kind)  # its bits are stored as uint16
    attend_requests(q, k_cache, v_cache, _NO_REQUESTS, rules, k_scale=factor, v_scale=factor)


# ---- Public functions ---------------------------------------------------------------------------------------------


@overload
def paged_attention(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> Kind: ...  # fmt: skip
@overload
def paged_attention(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def paged_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> ndarray: ...  # fmt: skip
@overload
def paged_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
@overload
def paged_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None = None, *, return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Any: ...  # fmt: skip
def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any = None,
    *,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_split: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention of each request's newest queries over its own pages of a key/value cache.

    Token t of request b lies in page ``block_tables[b, t // page_size]``, at place ``t % page_size``. The queries are the
    last of the request's tokens, so that query i of n sees token j when ``j <= i + seq_len - n``. Only pages within a request's length are
    read.

    Parameters
    ----------
    q : array
        ``(B, H, D)``, one query per request; with `q_lens` ``(T, H, D)``, the queries of all requests one after the other. float32,
        float16, bfloat16 or float64; D from 1 to 576.
    k_cache, v_cache : array
        ``(pages, page_size, Hkv, D)`` and ``(pages, page_size, Hkv, Dv)``: page_size is at least 1. They are float64 where `q` is float64;
        else float32, float16, bfloat16, or, with scales, int8 or float8 e4m3, whatever the dtype of `q`. H must be a multiple of Hkv; query
        head h reads head ``h // (H // Hkv)``. A cache may also hold rows of llama.cpp's blocks, as `quantize_rows` makes them: uint8 with
        the bytes of a row on the last axis. `kv_dtype` then names the format, and D and Dv are multiples of 32.
    block_tables : array of int32 or int64, or tuple
        ``(B, W)`` page numbers; entries beyond a request's length are not read. Or a triple ``(indptr, indices, last_page_len)``: request b
        then has the pages ``indices[indptr[b]:indptr[b + 1]]``, and its last page holds ``last_page_len[b]`` tokens.
    seq_lens : sequence of int
        ``(B,)``: number of tokens of each request in the cache, including the tokens of the queries. It is None with the triple.
    scale : float, optional
        Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
    kv_layout : {"NHD", "HND"}
        HND caches are ``(pages, Hkv, page_size, D)``, and their scales are ``(pages, Hkv, page_size)``.
    q_lens : sequence of int, optional
        ``(B,)``: number of queries of each request, 0 to ``seq_lens[b]``, as in chunked prefill and speculative decoding.
    window : int, optional
        Number of tokens before itself that a query sees, at least 0. With -1, and by default, it sees all of them.
    q_begin : sequence of int, optional
        ``(B,)``: token number of each request's query 0, which may be negative. Give it for a cache that holds a stretch of a longer
        request: token 0 is the first token in the cache. Query i then sees token j when ``j <= i + q_begin``, and `q_lens` may exceed the
        number of tokens. Default: the queries are the last tokens.
    kv_ranges : array of int, optional
        ``(B, 2)``, with `q_lens` ``(T, 2)``; int32 or int64: query i sees the tokens ``kv_ranges[i, 0] <= j < kv_ranges[i, 1]`` of its
        request instead of the tokens up to itself. This is for prompts in which an image or a prefix sees itself as a whole. `window` still
        holds. Ranges may be empty, and reach beyond the tokens.
    attn_mask : array, optional
        ``(B, H, Q, T)``, or any shape that broadcasts to it, with Q at least the most queries of a request and T at least the most tokens:
        row i belongs to a request's query i, column j to its token j. A mask of bool hides a token where it is False, as the causal rule
        does; numbers are added to the scores, as in `block_sparse_attention`. A tree of draft tokens needs such a mask. A mask of one axis
        has one element per token of the longest request and no more, so that a flattened mask of queries and tokens is refused.
    alibi_slopes : array_like, optional
        ``(H,)`` float32: ``-alibi_slopes[h] * abs(p - j)`` is added to the score of token j, where p is the query's own token number.
    sinks : array_like, optional
        ``(H,)`` float32: one more score per head, which takes part in the softmax but has no value. The log-sum-exp includes it. A
        sink beyond about +-2.3e38 counts as infinite, unless `q` is float64.
    softcap : float, optional
        As in `block_sparse_attention`: replaces each score by ``softcap * tanh(score / softcap)``. With 0, and by default, it does nothing.
    k_scale, v_scale : array of float32, or float, optional
        The factors of int8 and float8 e4m3 caches: ``(pages, page_size, Hkv)``, one for each token and head, ``(Hkv,)``, one for each head,
        or one number. Arrays of other floats are converted. Other caches accept only the number 1, which has no effect.
    kv_split : int, optional
        Number of tokens of a chunk, a multiple of page_size: each request is attended in chunks, whose states are merged by a fixed tree:
        see the notes. Default: requests are cut as suits the machine.
    return_lse : bool
        Also return the log-sum-exp.
    out_dtype : str or dtype, optional
        ``"float32"`` with float16 and bfloat16 queries returns the float32 result before rounding; rounding it gives exactly the default
        result. Default: the dtype of `q`.
    out : array, optional
        Where to write the result: a writable array of the result's shape and dtype that shares no memory with any input. With `return_lse`,
        it may be a pair ``(out, lse)``, of which either may be None.
    dtype, kv_dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays hold bfloat16 bits. ``kv_dtype="float8_e4m3"`` says that uint8 caches hold bits of float8
        e4m3, and ``"q8_0"``, ``"q4_0"`` or ``"q4_1"`` that they hold rows of this format. If keys and values have different formats of
        these three, `kv_dtype` is a pair such as ``("q8_0", "q4_1")``. `kv_dtype` defaults to `dtype`.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        ``(B, H, Dv)`` or ``(T, H, Dv)``, with the dtype of `q` (or `out_dtype`) and the kind of array of `q`. A query that sees no token
        gets 0.
    lse : array
        With `return_lse`: ``(B, H)`` or ``(T, H)``, natural log of the sum of ``exp(score)``; without `sinks` ``-inf`` where no token is
        seen. It is float32, for float64 queries float64.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape or out of range, such as a page number, within a request's length, that the cache does not have. No
        output has been written then.
    MemoryError
        The scratch memory could not be allocated.

    See Also
    --------
    paged_select_attention : over listed pages only.
    PagedPlan : checks tables and lengths once for all layers of a step.
    append_paged_kv : writes new tokens into the cache.
    blitz_attn.reference.paged_attention : the same in plain float64 NumPy.

    Notes
    -----
    Query heads that share a key/value head are computed together, so that they share each read of the cache. Long requests are cut into
    parts, whose states are joined in order. The cuts of a request depend on that request alone: the result has the same bits for any number
    of threads, and whatever else is in the batch.

    With `kv_split`, chunk c of a request is its tokens ``c * kv_split`` to ``(c + 1) * kv_split - 1``. Attention over each chunk is
    computed by itself, and the results and log-sum-exps of the chunks (float32, for float64 queries float64) are merged by
    `merge_states_tree`; then `sinks` take part, and the result is rounded once. So chunks may be computed in different places. Make a call
    for each chunk, as a request of its own with `q_begin` and unrounded results (``out_dtype="float32"`` for queries of 16 bits), and merge
    the results in the same way: the merged result is bit-identical. Each chunk has the columns of `attn_mask` that belong to its tokens.

    A prefix that many requests share can be read once for all of these requests. One call attends to the prefix with all queries, a second
    call to the rest of each request, and `blitz_attn.merge_states` merges the two results (see the second example).

    The operation follows paged attention of vLLM [1]_ and the table formats of FlashInfer [2]_.

    References
    ----------
    .. [1] W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    .. [2] Z. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", 2025.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 64), dtype=np.float32)
    >>> k_cache, v_cache = (rng.standard_normal((6, 16, 2, 64), dtype=np.float32) for _ in range(2))
    >>> tables, seq_lens = np.array([[4, 1, 0], [2, 5, 3]], dtype=np.int32), [40, 48]
    >>> out = blitz_attn.paged_attention(q, k_cache, v_cache, tables, seq_lens)
    >>> exact = blitz_attn.reference.paged_attention(q, k_cache, v_cache, tables, seq_lens)
    >>> bool(np.abs(out - exact).max() < 1e-5)
    True

    Two requests that share the 32 tokens of pages 4 and 1, which are read once for both:

    >>> tables = np.array([[4, 1, 0], [4, 1, 3]], dtype=np.int32)
    >>> k, v = (np.concatenate([cache[4], cache[1]]).swapaxes(0, 1)[None] for cache in (k_cache, v_cache))
    >>> prefix = blitz_attn.block_sparse_attention(q.swapaxes(0, 1)[None], k, v, return_lse=True)
    >>> own = blitz_attn.paged_attention(q, k_cache, v_cache, tables[:, 2:].copy(), [8, 16], return_lse=True)
    >>> own = own[0].swapaxes(0, 1)[None], own[1].swapaxes(0, 1)[None]
    >>> joined = blitz_attn.merge_states(*prefix, *own)[0][0].swapaxes(0, 1)
    >>> bool(np.abs(joined - blitz_attn.paged_attention(q, k_cache, v_cache, tables, [40, 48])).max() < 1e-5)
    True
    """
    requests = (*tables_for_core(block_tables, seq_lens), q_lens, q_begin, kv_split)
    return attend_requests(
        q, k_cache, v_cache, requests, (out_dtype, dtype, kv_dtype, scale, kv_layout, window, softcap, num_threads), None, None, sinks,
        k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out,
    )  # fmt: skip


@overload
def paged_select_attention(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedSelectOptions],
) -> Kind: ...  # fmt: skip
@overload
def paged_select_attention(
    q: Kind, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, selected: Array, *, return_lse: Literal[True],
    **options: Unpack[PagedSelectOptions],
) -> tuple[Kind, Kind]: ...  # fmt: skip
@overload
def paged_select_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedSelectOptions],
) -> ndarray: ...  # fmt: skip
@overload
def paged_select_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, selected: Array, *,
    return_lse: Literal[True], **options: Unpack[PagedSelectOptions],
) -> tuple[ndarray, ndarray]: ...  # fmt: skip
@overload
def paged_select_attention(
    q: Array, k_cache: Array, v_cache: Array, block_tables: Tables, seq_lens: Integers | None, selected: Array, *, return_lse: bool,
    **options: Unpack[PagedSelectOptions],
) -> Any: ...  # fmt: skip
def paged_select_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    selected: Any,
    *,
    counts: Any = None,
    selected_size: int | None = None,
    scale: float | None = None,
    kv_layout: KVLayout = "NHD",
    q_lens: Any = None,
    window: int | None = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_split: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Attention over listed blocks of each request: `paged_attention` that leaves the other blocks out.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, seq_lens
        See `paged_attention`. `seq_lens` is None where `block_tables` is the triple.
    selected : array of int16, int32 or int64
        ``(B, Hkv, K)`` or ``(B, H, K)``: the blocks that the query heads of a key/value head see, or that a query head sees. Block i of a
        request is its i-th page, ``block_tables[b, i]``. A row has numbers from 0 to ``ceil(seq_len / page_size) - 1``, in any order, none
        of them twice. A row ends at the first -1.
    counts : array of int, optional
        ``(B, Hkv)`` or ``(B, H)``: number of entries in use in each row of `selected`, which then needs no -1.
    selected_size : int, optional
        Number of tokens of a block, where each query has a list of its own: `selected` is then ``(B, Hkv, K)``, ``(B, H, K)`` or
        ``(B, 1, K)``, and with `q_lens` ``(T, Hkv, K)`` and so on. Block i is the tokens from ``i * selected_size`` on; 1 lists single
        tokens. It cannot be combined with `counts` or `kv_split`. Default: blocks are pages, and all queries of a request share one list.
    scale, kv_layout, q_lens, window, q_begin, kv_ranges, attn_mask, alibi_slopes, sinks, softcap, k_scale, v_scale, kv_split, return_lse
        See `paged_attention`.
    out_dtype, out, dtype, kv_dtype, num_threads
        See `paged_attention`.

    Returns
    -------
    out : array
        As from `paged_attention`. A row that lists no block gives 0.
    lse : array
        With `return_lse`, as from `paged_attention`, over the tokens of the listed blocks.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `paged_attention`; also for a block that the request does not have or that a row lists twice.

    See Also
    --------
    blitz_attn.select_blocks : makes lists of blocks.
    blitz_attn.select_and_attend : both in one call.

    Notes
    -----
    The last block of a request may be listed anywhere in a row; only its valid tokens are seen. With a list of all blocks, the result is
    bit-identical to that of `paged_attention`. One list per key/value head is faster than one per query head, because query heads with
    lists of their own do not share reads of the cache.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 64), dtype=np.float32)
    >>> k_cache, v_cache = (rng.standard_normal((6, 16, 2, 64), dtype=np.float32) for _ in range(2))
    >>> tables, seq_lens = np.array([[4, 1, 0, 5]], dtype=np.int32), [57]
    >>> selected = np.array([[[0, 3, -1], [3, 1, 0]]], dtype=np.int32)
    >>> out = blitz_attn.paged_select_attention(q, k_cache, v_cache, tables, seq_lens, selected)
    >>> exact = blitz_attn.reference.paged_select_attention(q, k_cache, v_cache, tables, seq_lens, selected)
    >>> bool(np.abs(out - exact).max() < 1e-5)
    True
    """
    if selected is None:
        raise TypeError("selected: expected an array, got NoneType")
    size = size_of_selected(selected_size)
    requests = (*tables_for_core(block_tables, seq_lens), q_lens, q_begin, kv_split)
    return attend_requests(
        q, k_cache, v_cache, requests, (out_dtype, dtype, kv_dtype, scale, kv_layout, window, softcap, num_threads),
        selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out, size,
    )  # fmt: skip
