"""Choosing blocks for prefill, and attention over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from .. import _arrays, _core
from .._block_sparse.call import block_sparse_attention
from .._names import Layout
from .._sabi.block_list import BlockList, listed
from .._sabi.lists import checked_shape, sides_of, tokens_of
from .._sentences import rename
from .choosers import budget_of, rules_of
from .options import Options

if TYPE_CHECKING:
    from .._options import ChoiceOptions, ChosenOptions, ListOptions, ScoreOptions
    from .._types import Array, Kind

__all__ = ["list_from_scores", "scores", "select_and_attend_prefill", "select_blocks_prefill"]

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def _floats(x: Any, name: str) -> np.ndarray:
    """Scores of a caller in float32, which the core reads."""
    dtype = _arrays.dtype_of(x)
    named = type(x).__name__ if dtype is None else _arrays.dtype_name(dtype, name)
    if named not in _FLOATS:
        raise TypeError(f"{name}: expected scores in an array of {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}, got {named}")
    return _arrays.float32_numbers(x, name)


@overload
def select_blocks_prefill(q: Kind, k: Array, *, return_scores: Literal[False] = False, **options: Unpack[ChoiceOptions]) -> Kind: ...
@overload
def select_blocks_prefill(q: Kind, k: Array, *, return_scores: Literal[True], **options: Unpack[ChoiceOptions]) -> tuple[Kind, Kind]: ...
@overload
def select_blocks_prefill(q: Array, k: Array, *, return_scores: Literal[False] = False, **options: Unpack[ChoiceOptions]) -> BlockList: ...
@overload
def select_blocks_prefill(
    q: Array, k: Array, *, return_scores: Literal[True], **options: Unpack[ChoiceOptions]
) -> tuple[BlockList, np.ndarray]: ...
@overload
def select_blocks_prefill(q: Array, k: Array, *, return_scores: bool, **options: Unpack[ChoiceOptions]) -> Any: ...
def select_blocks_prefill(
    q: Any,
    k: Any,
    *,
    chooser: Any = "pooled",
    density: Any = None,
    top_p: Any = None,
    threshold: Any = None,
    top_k: Any = None,
    block_shape: tuple[int, int] = (64, 64),
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    sink: int = 1,
    recent: int = 2,
    last_columns: int = 0,
    first_rows: int = 0,
    last_rows: int = 0,
    per_kv_head: bool = False,
    return_scores: bool = False,
    index_dtype: str = "int32",
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Choose the blocks of keys that each block of queries attends to, from the queries and keys themselves.

    The scores of a row of blocks are a chooser's estimate of the share of the row's softmax mass that lies in each block: they are not
    negative and add up to 1. Exactly one of `density`, `top_p`, `threshold` and `top_k` says which blocks are kept besides forced ones.

    Parameters
    ----------
    q : array
        Queries, ``(B, H, Sq, D)`` for layout BNSD: float32, float16, bfloat16 or float64. D from 1 to 576.
    k : array
        Keys, ``(B, Hkv, Skv, D)``, of the dtype of `q`. H must be a multiple of Hkv.
    chooser : str or Pooled, Antidiagonal, SampledRows, VerticalSlash, or callable
        How blocks are scored: ``"pooled"``, ``"antidiagonal"``, ``"sampled_rows"`` or ``"vertical_slash"`` with the defaults of the
        class of that name, or an instance of it. If the default size of a named chooser does not divide the block, the greatest common
        divisor of both is taken: a block of 12 x 20 is pooled by 4. The smaller the divisor, the longer choosing takes.
        A function is called as ``chooser(q, k, **options)``, with the arrays of this call and all options that `blitz_attn.select.scores`
        takes except `chooser`, after everything else has been checked. It returns scores as `blitz_attn.select.list_from_scores` takes
        them, ``(B, H, rows, columns)``; with `per_kv_head`, Hkv heads are enough. Its exceptions are passed on.
    density : float or sequence of float, optional
        Share of the blocks that the rules let a sequence see, from above 0 to 1. The blocks are kept as if one common `top_p` were
        applied to all rows and heads of the sequence, chosen so that this share of the visible blocks is kept, rounded to whole
        blocks. Forced blocks count towards this share, and may exceed it. With one number per head, each head has its own share.
        `blitz_attn.sabi.density` counts all pairs of blocks instead: for a causal list it gives about half of this number.
    top_p : float or sequence of float, optional
        Each row keeps its forced blocks, and then as few of its best other blocks as it takes to hold this much of its scores in all: from
        above 0 to 1. One number, or one per head.
    threshold : float or sequence of float, optional
        Each row keeps the blocks that score at least this: from above 0 to 1. One number, or one per head.
    top_k : int or sequence of int, optional
        Each row keeps this many blocks, forced ones among them, or all blocks that it sees if these are fewer. One number, or one per head.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys; pass the same shape to `block_sparse_attention`. Smaller blocks keep a model's
        quality better at the same density.
    scale : float, optional
        Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
    layout : {"BNSD", "BSND", "BSH", "TND"}
        Order of the axes of q and k, as in `block_sparse_attention`.
    causal : bool
        Query i sees key j only when ``j <= i + kv_len - q_len``, a rule aligned to the bottom right; with `q_begin`, only when
        ``j <= i + q_begin``.
    window : (int, int), optional
        Numbers of tokens that are seen before and after the diagonal of `causal`; -1 sets no bound.
    q_lens, kv_lens : sequence of int, optional
        ``(B,)``: how many tokens of each batch entry are valid.
    cu_seqlens_q, cu_seqlens_kv : sequence of int, optional
        Layout TND: ``(B + 1,)`` cumulative lengths that rise from 0 to T.
    num_heads, num_kv_heads : int, optional
        Layout BSH: numbers of heads in q and in k. In other layouts, they are checked against the arrays.
    q_begin : int or sequence of int, optional
        Token number of query 0, where the queries are a slice of a longer sequence, as in `block_sparse_attention`: see the notes. Default:
        the queries are the last tokens.
    kv_ranges : array of int, optional
        ``(B, Sq, 2)``, ``(1, Sq, 2)`` or ``(Sq, 2)``, for layout TND ``(T, 2)``; int32 or int64: the run of keys that each query may see,
        as in `block_sparse_attention`. They cannot be combined with `VerticalSlash`, whose lines run through all keys.
    sink : int
        How many of the first blocks of keys are always kept. With `kv_ranges`, these are for each query the first blocks that its range
        touches, such as the first blocks of its document.
    recent : int
        With 1, the blocks of keys on the diagonal ``i + kv_len - q_len`` of a row's queries are always kept; with n, also the n - 1 blocks
        before them. With `kv_ranges` or `q_begin`, blocks are counted back, for each query, from the last key that it sees at or before the
        diagonal. A row of blocks always keeps a block that is forced for one of its queries, if that query sees it.
    last_columns : int
        How many of the last blocks of keys are always kept, such as blocks of text at the end of a sequence.
    first_rows, last_rows : int
        How many of the first and of the last blocks of queries keep all blocks that they see, such as blocks of text or of the end of a
        prompt. Together with `sink` and `last_columns`, they make a frame: the outermost rows and columns of blocks are kept whole.
    per_kv_head : bool
        Whether heads that share keys share a list. Their scores are then averaged.
    return_scores : bool
        Also return the scores.
    index_dtype : {"int32", "uint16", "int16", "int64"}
        Integers of the list; uint16 and int16 take up to 65535 and 32768 blocks of keys.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays among q and k hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    sabi : array
        ``(B, H, ceil(Sq / block_shape[0]), W)``: the kept columns of each row, rising, then pads (-1, for uint16 65535). W is the
        length of the longest row, at least 1. Of the kind of array of `q`: NumPy, torch or JAX.
    scores : array
        With `return_scores`: ``(B, H, ceil(Sq / block_shape[0]), ceil(Skv / block_shape[1]))`` float32; 0 for
        blocks that a row does not see. With `per_kv_head`, Hkv heads.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    ValueError
        An argument of the wrong shape or out of range: a pool, stride or number of rows that does not divide the block, no budget or
        several, a density or mass outside (0, 1]. The text names the argument, what was expected and what was given.
    MemoryError
        The scratch memory could not be allocated.

    See Also
    --------
    select_and_attend_prefill : this and the attention in one call.
    blitz_attn.sabi : makes, measures and shows block lists.
    blitz_attn.select_blocks : the same for decode over a paged cache.
    blitz_attn.reference.select_blocks_prefill : the same in plain float64 NumPy.

    Notes
    -----
    A row that sees any block keeps at least one: the best, where none is forced. Of blocks that tie, the lower column is kept;
    under `density`, the lower head, then row, then column. A NaN score counts as 0; if all scores of a row are NaN, the blocks that it
    sees count alike. Scores are computed in float32 (float64 for float64) and kept as float32. Scores and lists have the same bits for any
    number of threads, and whatever else is in the batch. Scratch memory grows with the number of tokens. It also takes one bit for each
    pair of blocks in each list, and under `density` four more bytes for each pair and 600 bytes for each row of blocks.

    With `kv_ranges`, blocks that no query of a row sees are neither kept nor counted as visible, even where they lie between blocks that
    the row sees. Queries that a chooser pools into one see all keys from the first key that any of them sees to the last. Pools are not cut
    where ranges begin and end. Under `top_p`, `threshold` and `top_k`, documents that fill whole blocks get the lists that they would get
    alone, up to rounding. Under `density`, all documents of a batch entry share the blocks.

    A slice of the queries, from row a on, has the lists of these rows in the whole call, bit for bit, where a is a multiple of
    ``block_shape[0]`` and ``q_begin = a + kv_len - q_len`` of the whole call. This does not hold with `density`, `VerticalSlash`,
    `first_rows` and `last_rows`, which look only at the queries of the slice.

    `Pooled` extends the mean pooling of SpargeAttn [4]_ and the bound of Quest [1]_ to small groups of queries and keys, `Antidiagonal` is
    after XAttention [2]_, `VerticalSlash` after MInference [3]_.

    References
    ----------
    .. [1] J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024.
    .. [2] R. Xu et al., "XAttention: Block Sparse Attention with Antidiagonal Scoring", 2025.
    .. [3] H. Jiang et al., "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention", 2024.
    .. [4] J. Zhang et al., "SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model Inference", 2025.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k = (rng.standard_normal((1, 2, 1024, 64), dtype=np.float32) for _ in range(2))
    >>> sabi, scores = blitz_attn.select_blocks_prefill(q, k, density=0.5, causal=True, return_scores=True)
    >>> int((sabi >= 0).sum()), scores.shape
    (136, (1, 2, 16, 16))
    """
    asks = callable(chooser) and not isinstance(chooser, type)
    options = vars(Options.of(locals())) if asks else {}
    name, pool_q, pool_k, term, largest = ("given", 1, 1, "mean", False) if asks else rules_of(chooser, block_shape)
    budget, numbers = budget_of(density=density, top_p=top_p, threshold=threshold, top_k=top_k)
    if return_scores is False:  # lists have no gradient, but scores would
        q, k = _arrays.detached(q, k)
    keys = _arrays.readable(k, "k")
    returned = []

    def asked() -> np.ndarray:  # the core calls this function
        returned.append(chooser(q, k, per_kv_head=per_kv_head, **options))
        made = _arrays.detached(returned[0])[0] if return_scores is False else returned[0]
        return _floats(made, "chooser")

    try:
        made, lists = _core.select_prefill(
            np.empty, _arrays.readable(q, "q"), keys, keys, None, block_shape, scale, layout, causal, window, q_lens, kv_lens,
            cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, _arrays.dtype_name(dtype), num_threads, q_begin, kv_ranges, name, pool_q,
            pool_k, term, largest, budget, numbers, sink, recent, last_columns, first_rows, last_rows, per_kv_head,
            _arrays.choice(index_dtype, "index_dtype", ("int32", "uint16", "int16", "int64")), return_scores, asked,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        if returned:
            rename(error, {"scores": "chooser"})
        raise
    sabi = _arrays.as_kind_of(listed(lists, checked_shape(block_shape)), q)
    return sabi if made is None else (sabi, _arrays.as_kind_of(made, q))


@overload
def scores(q: Kind, k: Array, **options: Unpack[ScoreOptions]) -> Kind: ...
@overload
def scores(q: Array, k: Array, **options: Unpack[ScoreOptions]) -> np.ndarray: ...
def scores(
    q: Any,
    k: Any,
    *,
    chooser: Any = "pooled",
    block_shape: tuple[int, int] = (64, 64),
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    per_kv_head: bool = False,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """A chooser's estimate of the share of softmax mass in each block of keys, for each block of queries.

    Parameters
    ----------
    q, k, chooser, block_shape, scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads
        As in `select_blocks_prefill`.
    q_begin, kv_ranges, per_kv_head, dtype, num_threads
        Likewise.

    Returns
    -------
    array
        ``(B, H, ceil(Sq / block_shape[0]), ceil(Skv / block_shape[1]))`` float32, with `per_kv_head` Hkv heads: the scores that
        `select_blocks_prefill` returns with ``return_scores=True``. They are at least 0, never NaN, 0 for blocks that a row does not
        see, and add up to 1 in each row that sees anything. In layout TND, B is the number of sequences, and the longest sequence sets the
        numbers of rows and columns.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `select_blocks_prefill` does.

    See Also
    --------
    list_from_scores : the list that a budget makes from scores.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> from blitz_attn import select
    >>> rng = np.random.default_rng(0)
    >>> q, k = (rng.standard_normal((1, 2, 1024, 64), dtype=np.float32) for _ in range(2))
    >>> both = (select.scores(q, k, causal=True) + select.scores(q, k, chooser="antidiagonal", causal=True)) / 2
    >>> sabi = select.list_from_scores(both, 1024, density=0.5, causal=True)
    >>> both.shape, int((sabi >= 0).sum())
    ((1, 2, 16, 16), 136)
    """
    options = Options.of(locals())
    return select_blocks_prefill(q, k, chooser=chooser, threshold=1, per_kv_head=per_kv_head, return_scores=True, **vars(options))[1]


@overload
def list_from_scores(scores: Kind, s_q: int, s_kv: int | None = None, **options: Unpack[ListOptions]) -> Kind: ...
@overload
def list_from_scores(scores: Array, s_q: int, s_kv: int | None = None, **options: Unpack[ListOptions]) -> BlockList: ...
def list_from_scores(
    scores: Any,
    s_q: int,
    s_kv: int | None = None,
    *,
    density: Any = None,
    top_p: Any = None,
    threshold: Any = None,
    top_k: Any = None,
    block_shape: tuple[int, int] = (64, 64),
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    q_begin: Any = None,
    kv_ranges: Any = None,
    sink: int = 1,
    recent: int = 2,
    last_columns: int = 0,
    first_rows: int = 0,
    last_rows: int = 0,
    index_dtype: str = "int32",
    num_threads: int | None = None,
) -> Any:
    """Block list from scores, by the budgets and forced blocks of `select_blocks_prefill`.

    Parameters
    ----------
    scores : array
        ``(B, H, ceil(s_q / block_shape[0]), ceil(s_kv / block_shape[1]))``, float32, or another float, which is rounded to float32. Scores
        are at least 0 and finite, except that NaN and minus infinity are allowed and count as 0. Blocks that a row does not see also count
        as 0. Only ratios within a row matter: each row is divided by its sum over the blocks that it sees, unless this sum is 1 to within
        1e-4. If all scores of a row are 0, the blocks that it sees count alike.
    s_q, s_kv : int
        Numbers of query and key tokens; `s_kv` defaults to `s_q`.
    density, top_p, threshold, top_k, block_shape, causal, window, q_lens, kv_lens, q_begin, kv_ranges, sink, recent, last_columns
        As in `select_blocks_prefill`.
    first_rows, last_rows, index_dtype, num_threads
        Likewise.

    Returns
    -------
    array
        ``(B, H, ceil(s_q / block_shape[0]), W)``, exactly the list that `select_blocks_prefill` makes from the same scores. Scores of Hkv
        heads give lists of Hkv heads. Of the kind of array of `scores`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `select_blocks_prefill` does, and for scores that have another dtype or shape, that are finite and below 0, or that are plus
        infinity.

    See Also
    --------
    scores : the scores of the choosers of this package.

    Notes
    -----
    For layout TND, give the length of the longest sequence as `s_q` and `s_kv`, and all lengths as `q_lens` and `kv_lens`.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn import select
    >>> made = np.array([[[[5, 3, 1, 2], [1, 9, 1, 4], [2, 2, 3, 9], [9, 1, 1, 1]]]], np.float32)
    >>> select.list_from_scores(made, 256, top_k=2, sink=0, recent=0).tolist()
    [[[[0, 1], [1, 3], [2, 3], [0, 1]]]]
    >>> select.list_from_scores(made, 256, top_p=0.5, causal=True, sink=0, recent=0).tolist()
    [[[[0, -1], [1, -1], [0, 2], [0, -1]]]]
    """
    (own,) = _arrays.detached(scores)
    found = _floats(own, "scores")
    (tokens_q, tokens_kv), sides = tokens_of(s_q, s_kv), sides_of(s_q, s_kv, block_shape)
    if found.ndim != 4 or found.shape[2:] != sides:
        rows = f"{sides[0]} x {sides[1]} blocks of {tokens_q} queries and {tokens_kv} keys in block_shape {checked_shape(block_shape)}"
        raise ValueError(f"scores: expected shape (B, H, {sides[0]}, {sides[1]}), for {rows}, got {found.shape}")
    nothing = np.zeros(1, np.float32)
    q, k = (np.broadcast_to(nothing, (*found.shape[:2], tokens, 1)) for tokens in (tokens_q, tokens_kv))
    try:
        made = select_blocks_prefill(
            q, k, chooser=lambda q, k, **options: found, density=density, top_p=top_p, threshold=threshold, top_k=top_k,
            block_shape=block_shape, causal=causal, window=window, q_lens=q_lens, kv_lens=kv_lens, q_begin=q_begin, kv_ranges=kv_ranges,
            sink=sink, recent=recent, last_columns=last_columns, first_rows=first_rows, last_rows=last_rows, index_dtype=index_dtype,
            num_threads=num_threads,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        rename(error, {"chooser": "scores", "q": "scores", "k": "scores"})
        raise
    return _arrays.as_kind_of(made, scores)


@overload
def select_and_attend_prefill(
    q: Kind, k: Array, v: Array, *, return_lse: Literal[False] = False, return_sabi: Literal[False] = False,
    **options: Unpack[ChosenOptions],
) -> Kind: ...  # fmt: skip
@overload
def select_and_attend_prefill(
    q: Kind, k: Array, v: Array, *, return_lse: Literal[True], return_sabi: Literal[False] = False, **options: Unpack[ChosenOptions]
) -> tuple[Kind, Kind]: ...
@overload
def select_and_attend_prefill(
    q: Kind, k: Array, v: Array, *, return_sabi: Literal[True], return_lse: bool = False, **options: Unpack[ChosenOptions]
) -> tuple[Kind, ...]: ...
@overload
def select_and_attend_prefill(
    q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, return_sabi: Literal[False] = False,
    **options: Unpack[ChosenOptions],
) -> np.ndarray: ...  # fmt: skip
@overload
def select_and_attend_prefill(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], return_sabi: Literal[False] = False, **options: Unpack[ChosenOptions]
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def select_and_attend_prefill(
    q: Array, k: Array, v: Array, *, return_sabi: Literal[True], return_lse: bool = False, **options: Unpack[ChosenOptions]
) -> tuple[np.ndarray, ...]: ...
@overload
def select_and_attend_prefill(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, return_sabi: bool = False, **options: Unpack[ChosenOptions]
) -> Any: ...
def select_and_attend_prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    chooser: Any = "pooled",
    density: Any = None,
    top_p: Any = None,
    threshold: Any = None,
    top_k: Any = None,
    block_shape: tuple[int, int] = (64, 64),
    scale: float | None = None,
    layout: Layout = "BNSD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    q_begin: Any = None,
    q_total: Any = None,
    kv_ranges: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    sink: int = 1,
    recent: int = 2,
    last_columns: int = 0,
    first_rows: int = 0,
    last_rows: int = 0,
    per_kv_head: bool = False,
    return_lse: bool = False,
    return_sabi: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    dtype: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Choose blocks with `select_blocks_prefill` and compute attention over them with `block_sparse_attention`, in one call.

    Parameters
    ----------
    q, k, v : array
        As in `block_sparse_attention`: ``(B, H, Sq, D)``, ``(B, Hkv, Skv, D)`` and ``(B, Hkv, Skv, Dv)`` for layout BNSD.
    chooser, density, top_p, threshold, top_k
        How blocks are scored and how many are kept: see `select_blocks_prefill`. Give exactly one of the last four.
    block_shape : (int, int)
        Tokens in a block of queries and in a block of keys.
    scale, layout, causal, window, q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, num_heads, num_kv_heads, q_begin, q_total, kv_ranges
        Options of both steps (`q_total`: of attention alone): see `block_sparse_attention`.
    attn_mask, alibi_slopes, sinks, softcap
        Further options of attention: see `block_sparse_attention`. The choice of blocks ignores them and looks at queries and keys alone:
        a block that `attn_mask` hides may be chosen in place of a block that the mask shows.
    sink, recent, last_columns, first_rows, last_rows
        Blocks that are always kept: see `select_blocks_prefill`.
    per_kv_head : bool
        Whether heads that share keys share a list.
    return_lse : bool
        Also return the log-sum-exp.
    return_sabi : bool
        Also return the block list.
    out_dtype : str or dtype, optional
        ``"float32"`` with float16 and bfloat16 inputs gives the accumulated result before it is rounded. Default: the dtype of `q`.
    out : array, optional
        Where to write the result, as in `block_sparse_attention`. With `return_lse`, it may be a pair.
    dtype : str or dtype, optional
        ``"bfloat16"`` says that uint16 arrays among q, k, v and out hold bfloat16 bits. Any other value is only checked against the arrays.
    num_threads : int, optional
        Threads for this call. Default: see `set_num_threads`. The result does not depend on it.

    Returns
    -------
    out : array
        As from `block_sparse_attention`.
    lse : array
        With `return_lse`, as from `block_sparse_attention`.
    sabi : array
        With `return_sabi`: int32, as from `select_blocks_prefill`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `select_blocks_prefill` and `block_sparse_attention` do.

    See Also
    --------
    select_blocks_prefill, block_sparse_attention : the two parts.
    blitz_attn.reference.select_and_attend_prefill : the same in plain float64 NumPy.

    Notes
    -----
    Make the two calls yourself where one list serves several calls, such as a forward and a backward pass, or several layers.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 1024, 64), dtype=np.float32) for _ in range(3))
    >>> out, sabi = blitz_attn.select_and_attend_prefill(q, k, v, density=0.4, causal=True, return_sabi=True)
    >>> out.shape, round(blitz_attn.sabi.density(sabi, 16) * 16 * 16 / 136, 2)
    ((1, 2, 1024, 64), 0.4)
    """
    options = Options.of(locals())
    with_lse, with_sabi = _arrays.flag(return_lse, "return_lse"), _arrays.flag(return_sabi, "return_sabi")  # before out is written
    sabi = select_blocks_prefill(
        q, k, chooser=chooser, density=density, top_p=top_p, threshold=threshold, top_k=top_k, sink=sink, recent=recent,
        last_columns=last_columns, first_rows=first_rows, last_rows=last_rows, per_kv_head=per_kv_head, **vars(options),
    )  # fmt: skip
    result = block_sparse_attention(
        q, k, v, sabi, q_total=q_total, attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks, softcap=softcap,
        return_lse=with_lse, out_dtype=out_dtype, out=out, **vars(options),
    )  # fmt: skip
    parts = result if with_lse else (result,)
    parts = (*parts, sabi) if with_sabi else parts
    return parts if len(parts) > 1 else parts[0]
