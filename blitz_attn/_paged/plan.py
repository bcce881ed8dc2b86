"""`PagedPlan`: the tables and lengths of a decoding step, checked once for the calls of all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from .. import _arrays
from .._names import KVLayout, Method
from .append import Summaries, append_tokens
from .call import Rules, attend_requests, check_rules, open_requests, size_of_selected
from .selection import Opened, select_to_attend, with_lists
from .tables import tables_for_core

if TYPE_CHECKING:
    from numpy import ndarray

    from .._options import PlanChoiceOptions, PlanOptions, PlanSelectOptions
    from .._types import Array, DType, Integers, JaxArray, Kind, KVDType, Scale, Source, Tables, Tensor

__all__ = ["PagedPlan"]

_USUAL_RULES = Rules()  # the rules of a plan without options, which need no check
_NO_DTYPES = (None, None, None)


class PagedPlan:
    """The page tables and lengths of one decoding step, checked and copied once for the calls of all layers.

    A plan belongs to its process: it can neither be pickled nor deep-copied.

    Parameters
    ----------
    block_tables, seq_lens
        See `paged_attention`. They are copied: later changes of the arrays do not reach the plan.
    page_size : int
        Number of tokens per page of the caches that calls pass.
    q_lens, q_begin : sequence of int, optional
        See `paged_attention`. They are copied, too.
    num_pages : int, optional
        Number of pages of the caches that calls pass. If it is given, page numbers are checked here. Each call checks that its own cache
        has all pages.
    kv_split : int, optional
        See `paged_attention`; a multiple of `page_size`.
    scale, kv_layout, window, softcap, out_dtype, dtype, kv_dtype, num_threads
        See `paged_attention`. They hold for all calls of the plan.

    Attributes
    ----------
    batch : int
        Number of requests.
    num_queries : int
        Number of queries in the `q` that calls take: `batch`, or the sum of `q_lens`.

    Raises
    ------
    TypeError, ValueError
        As `paged_attention`. Options that no call could have are refused here.
    MemoryError
        The copies could not be allocated.

    Examples
    --------
    >>> import numpy as np
    >>> import blitz_attn
    >>> rng = np.random.default_rng(0)
    >>> layers = [rng.standard_normal((2, 6, 16, 2, 64), dtype=np.float32) for _ in range(3)]
    >>> tables, seq_lens = np.array([[4, 1, 0], [2, 5, 3]]), [40, 48]
    >>> plan = blitz_attn.PagedPlan(tables, seq_lens, page_size=16, num_pages=6)
    >>> q = rng.standard_normal((2, 8, 64), dtype=np.float32)
    >>> for k_cache, v_cache in layers:
    ...     q = plan.attention(q, k_cache, v_cache)
    >>> q.shape
    (2, 8, 64)
    >>> exact = blitz_attn.paged_attention(q, *layers[0], tables, seq_lens)
    >>> bool((plan.attention(q, *layers[0]) == exact).all())
    True

    A plan that is made with the options of a call returns exactly the result of that call:

    >>> options = {"q_begin": [35, 60], "kv_split": 32}
    >>> plan = blitz_attn.PagedPlan(tables, seq_lens, page_size=16, **options)
    >>> exact = blitz_attn.paged_attention(q, *layers[0], tables, seq_lens, **options)
    >>> bool((plan.attention(q, *layers[0]) == exact).all())
    True
    """

    __slots__ = ("_opened", "_rules", "_tables", "batch", "num_queries")

    def __init__(
        self,
        block_tables: Tables,
        seq_lens: Integers | None = None,
        *,
        page_size: int,
        q_lens: Integers | None = None,
        q_begin: Integers | None = None,
        num_pages: int | None = None,
        kv_split: int | None = None,
        scale: float | None = None,
        kv_layout: KVLayout = "NHD",
        window: int | None = None,
        softcap: float | None = None,
        out_dtype: DType | None = None,
        dtype: DType | None = None,
        kv_dtype: KVDType | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.batch: int
        self.num_queries: int
        tables = tables_for_core(block_tables, seq_lens)
        self._tables, self.batch, self.num_queries = open_requests(*tables, q_lens, q_begin, page_size, num_pages, kv_split)
        self._opened = Opened(self._tables[0], _arrays.integer(page_size, "page_size"))
        kinds = _arrays.dtype_name(out_dtype, "out_dtype"), _arrays.dtype_name(dtype), _arrays.kv_dtype_name(kv_dtype)
        self._rules = Rules(*kinds, scale, kv_layout, window, softcap, num_threads)
        if not (scale is window is softcap is num_threads is None and kinds == _NO_DTYPES and kv_layout is _USUAL_RULES.kv_layout):
            check_rules(self._rules)

    def __repr__(self) -> str:
        return f"PagedPlan(batch={self.batch}, num_queries={self.num_queries}, page_size={self._opened.page_size})"

    def append(
        self, k: Array, v: Array | None, k_cache: Array, v_cache: Array | None, *, k_scale: Scale | None = None,
        v_scale: Scale | None = None, maxblocks: Array | None = None, minblocks: Array | None = None, meanblocks: Array | None = None,
        metadata_block_tables: Array | None = None, dtype: DType | None = None,
    ) -> None:  # fmt: skip
        """`append_paged_kv` with the tables, the lengths and the options of the plan: the new tokens are the tokens of the queries.

        Parameters
        ----------
        k, v : array
            ``(num_queries, Hkv, D)`` and ``(num_queries, Hkv, Dv)``: the new tokens of all requests one after the other.
        k_cache, v_cache : array
            The caches of one layer, with the `page_size` of the plan, written in place.
        k_scale, v_scale
            See `append_paged_kv`.
        maxblocks, minblocks, meanblocks, metadata_block_tables : array, optional
            Summaries of that layer and their tables, kept up to date as by `append_paged_kv`.
        dtype : str or dtype, optional
            The dtype of `k` and `v`, see `append_paged_kv`. Default: the plan's.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `append_paged_kv`; also where the plan has `q_begin`.

        Examples
        --------
        >>> import numpy as np
        >>> import blitz_attn
        >>> k_cache, v_cache = np.zeros((2, 6, 16, 2, 64), np.float32)
        >>> plan = blitz_attn.PagedPlan(np.array([[4, 1, 0], [2, 5, 3]]), [40, 48], page_size=16)
        >>> plan.append(np.ones((2, 2, 64)), np.ones((2, 2, 64)), k_cache, v_cache)  # token 39 of the first request, 47 of the second
        >>> np.argwhere(k_cache[:, :, 0, 0]).tolist()
        [[0, 7], [3, 15]]
        """
        rules = self._rules
        append_tokens(
            k, v, k_cache, v_cache, None, self._tables, rules.kv_layout, k_scale, v_scale,
            Summaries(maxblocks, minblocks, meanblocks, metadata_block_tables), rules.dtype if dtype is None else dtype, rules.kv_dtype,
            rules.num_threads,
        )  # fmt: skip

    @overload
    def attention(
        self, q: Kind, k_cache: Array, v_cache: Array, *, return_lse: Literal[False] = False, **options: Unpack[PlanOptions]
    ) -> Kind: ...
    @overload
    def attention(
        self, q: Kind, k_cache: Array, v_cache: Array, *, return_lse: Literal[True], **options: Unpack[PlanOptions]
    ) -> tuple[Kind, Kind]: ...
    @overload
    def attention(
        self, q: Array, k_cache: Array, v_cache: Array, *, return_lse: Literal[False] = False, **options: Unpack[PlanOptions]
    ) -> ndarray: ...
    @overload
    def attention(
        self, q: Array, k_cache: Array, v_cache: Array, *, return_lse: Literal[True], **options: Unpack[PlanOptions]
    ) -> tuple[ndarray, ndarray]: ...
    @overload
    def attention(self, q: Array, k_cache: Array, v_cache: Array, *, return_lse: bool, **options: Unpack[PlanOptions]) -> Any: ...
    def attention(
        self, q: Any, k_cache: Any, v_cache: Any, *, sinks: Any = None, k_scale: Any = None, v_scale: Any = None, kv_ranges: Any = None,
        attn_mask: Any = None, alibi_slopes: Any = None, return_lse: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """`paged_attention` with the tables, the lengths and the options of the plan.

        Parameters
        ----------
        q : array
            ``(num_queries, H, D)``: the queries of all requests one after the other.
        k_cache, v_cache : array
            The caches of one layer, with the `page_size` of the plan.
        sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out
            See `paged_attention`.

        Returns
        -------
        out : array
            ``(num_queries, H, Dv)``, with the dtype of `q` (or `out_dtype`) and the kind of array of `q`.
        lse : array
            With `return_lse`: ``(num_queries, H)``, see `paged_attention`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `paged_attention`.

        Examples
        --------
        >>> import numpy as np
        >>> import blitz_attn
        >>> q, k_cache, v_cache = np.ones((1, 4, 64)), np.ones((6, 16, 2, 64)), np.ones((6, 16, 2, 64))
        >>> plan = blitz_attn.PagedPlan(np.array([[4, 1, 0]]), [40], page_size=16)
        >>> bool((plan.attention(q, k_cache, v_cache) == 1).all())
        True
        """
        return attend_requests(
            q, k_cache, v_cache, self._tables, self._rules, None, None, sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes,
            return_lse, out,
        )  # fmt: skip

    @overload
    def select_attention(
        self, q: Kind, k_cache: Array, v_cache: Array, selected: Array, *, return_lse: Literal[False] = False,
        **options: Unpack[PlanSelectOptions],
    ) -> Kind: ...  # fmt: skip
    @overload
    def select_attention(
        self, q: Kind, k_cache: Array, v_cache: Array, selected: Array, *, return_lse: Literal[True], **options: Unpack[PlanSelectOptions]
    ) -> tuple[Kind, Kind]: ...
    @overload
    def select_attention(
        self, q: Array, k_cache: Array, v_cache: Array, selected: Array, *, return_lse: Literal[False] = False,
        **options: Unpack[PlanSelectOptions],
    ) -> ndarray: ...  # fmt: skip
    @overload
    def select_attention(
        self, q: Array, k_cache: Array, v_cache: Array, selected: Array, *, return_lse: Literal[True], **options: Unpack[PlanSelectOptions]
    ) -> tuple[ndarray, ndarray]: ...
    @overload
    def select_attention(
        self, q: Array, k_cache: Array, v_cache: Array, selected: Array, *, return_lse: bool, **options: Unpack[PlanSelectOptions]
    ) -> Any: ...
    def select_attention(
        self, q: Any, k_cache: Any, v_cache: Any, selected: Any, *, counts: Any = None, selected_size: int | None = None,
        sinks: Any = None, k_scale: Any = None, v_scale: Any = None, kv_ranges: Any = None, attn_mask: Any = None,
        alibi_slopes: Any = None, return_lse: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """`paged_select_attention` with the tables, the lengths and the options of the plan.

        Parameters
        ----------
        q : array
            ``(num_queries, H, D)``: the queries of all requests one after the other.
        k_cache, v_cache : array
            The caches of one layer, with the `page_size` of the plan.
        selected : array of int16, int32 or int64
            The blocks that are seen, see `paged_select_attention`: ``(batch, Hkv, K)`` or ``(batch, H, K)``. With `selected_size`:
            ``(num_queries, Hkv, K)``, ``(num_queries, H, K)`` or ``(num_queries, 1, K)``.
        counts : array of int, optional
            ``(batch, Hkv)`` or ``(batch, H)``: number of entries in use in each row of `selected`.
        selected_size : int, optional
            Number of tokens of a block, where each query has a list of its own: see `paged_select_attention`.
        sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out
            See `paged_attention`.

        Returns
        -------
        out : array
            ``(num_queries, H, Dv)``, with the dtype of `q` (or `out_dtype`) and the kind of array of `q`.
        lse : array
            With `return_lse`: ``(num_queries, H)``, see `paged_attention`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `paged_select_attention`.

        Examples
        --------
        >>> import numpy as np
        >>> import blitz_attn
        >>> rng = np.random.default_rng(0)
        >>> k_cache, v_cache = rng.standard_normal((2, 6, 16, 2, 64), dtype=np.float32)
        >>> q, selected = rng.standard_normal((1, 4, 64), dtype=np.float32), np.array([[[0, 2], [1, 2]]])
        >>> plan = blitz_attn.PagedPlan(np.array([[4, 1, 0]]), [40], page_size=16)
        >>> out = plan.select_attention(q, k_cache, v_cache, selected)
        >>> bool((out == blitz_attn.paged_select_attention(q, k_cache, v_cache, np.array([[4, 1, 0]]), [40], selected)).all())
        True
        """
        if selected is None:
            raise TypeError("selected: expected an array, got NoneType")
        return attend_requests(
            q, k_cache, v_cache, self._tables, self._rules, selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask,
            alibi_slopes, return_lse, out, size_of_selected(selected_size),
        )  # fmt: skip

    @overload
    def select_and_attend(
        self, q: Kind, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_lse: Literal[False] = False, return_selected: Literal[False] = False, **options: Unpack[PlanChoiceOptions],
    ) -> Kind: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: Kind, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_lse: Literal[True], return_selected: Literal[False] = False, **options: Unpack[PlanChoiceOptions],
    ) -> tuple[Kind, Kind]: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: Tensor, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_selected: Literal[True], return_lse: bool = False, **options: Unpack[PlanChoiceOptions],
    ) -> tuple[Tensor, ...]: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: JaxArray, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_selected: Literal[True], return_lse: bool = False, **options: Unpack[PlanChoiceOptions],
    ) -> tuple[Any, ...]: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: Array, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_lse: Literal[False] = False, return_selected: Literal[False] = False, **options: Unpack[PlanChoiceOptions],
    ) -> ndarray: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: Array, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_lse: Literal[True], return_selected: Literal[False] = False, **options: Unpack[PlanChoiceOptions],
    ) -> tuple[ndarray, ndarray]: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: Array, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_selected: Literal[True], return_lse: bool = False, **options: Unpack[PlanChoiceOptions],
    ) -> tuple[ndarray, ...]: ...  # fmt: skip
    @overload
    def select_and_attend(
        self, q: Array, k_cache: Array, v_cache: Array, source: Source = None, metadata_block_tables: Array | None = None, *,
        return_lse: bool = False, return_selected: bool = False, **options: Unpack[PlanChoiceOptions],
    ) -> Any: ...  # fmt: skip
    def select_and_attend(
        self, q: Any, k_cache: Any, v_cache: Any, source: Any = None, metadata_block_tables: Any = None, *, k: Any = None,
        budget: Any = None, method: Method = "quest", sink: int = 1, recent: Any = 1, per_query_head: bool = False,
        dense_below: int | None = None, tokens_since_metadata_update: Any = -1, sinks: Any = None, k_scale: Any = None,
        v_scale: Any = None, kv_ranges: Any = None, attn_mask: Any = None, alibi_slopes: Any = None, return_lse: bool = False,
        return_selected: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """`blitz_attn.select_and_attend` with the tables, the lengths and the options of the plan.

        Parameters
        ----------
        q : array
            ``(num_queries, H, D)``: the queries of all requests one after the other. The queries of a request share its lists: see
            `select_blocks`.
        k_cache, v_cache : array
            The caches of one layer, with the `page_size` of the plan.
        source, metadata_block_tables : optional
            Summaries of that layer and their tables, see `select_blocks`. None for ``method="max"``.
        k, budget, method, sink, recent, per_query_head, dense_below, tokens_since_metadata_update
            See `select_blocks`.
        sinks, k_scale, v_scale, kv_ranges, attn_mask, alibi_slopes, return_lse, out
            See `paged_attention`.
        return_selected : bool
            Also return the selected blocks and their counts.

        Returns
        -------
        out : array
            ``(num_queries, H, Dv)``, with the dtype of `q` (or `out_dtype`) and the kind of array of `q`.
        lse : array
            With `return_lse`: ``(num_queries, H)``, see `paged_attention`.
        selected, counts : array
            With `return_selected`, as from `select_blocks`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `select_blocks` and `paged_select_attention`; also where the plan has `q_begin`.

        Notes
        -----
        The results are bit-identical to those of `select_blocks` with the page size as `block_size`, followed by `select_attention`. Blocks
        are chosen without the rules that hide tokens or change scores: see `blitz_attn.select_and_attend`.

        Examples
        --------
        >>> import numpy as np
        >>> import blitz_attn
        >>> rng = np.random.default_rng(0)
        >>> k_cache, v_cache = rng.standard_normal((2, 8, 16, 2, 64), dtype=np.float32)
        >>> tables, seq_lens, summary_tables = np.array([[3, 0, 6, 7, 1]]), [77], np.array([[1]])
        >>> maxblocks, minblocks = (np.empty((2, 16, 2, 64), np.float32) for _ in range(2))
        >>> blitz_attn.quest_prefill_metadata(k_cache, tables, seq_lens, summary_tables, maxblocks, minblocks)
        >>> plan = blitz_attn.PagedPlan(tables, seq_lens, page_size=16, q_lens=[3])  # three draft tokens
        >>> q = rng.standard_normal((3, 4, 64), dtype=np.float32)
        >>> out, selected, counts = plan.select_and_attend(
        ...     q, k_cache, v_cache, (maxblocks, minblocks), summary_tables, k=3, return_selected=True)
        >>> selected.shape, counts.tolist()
        ((1, 2, 3), [[3, 3]])
        >>> bool((out == plan.select_attention(q, k_cache, v_cache, selected, counts=counts)).all())
        True
        """
        with_lse, with_selected = _arrays.flag(return_lse, "return_lse"), _arrays.flag(return_selected, "return_selected")
        rules = self._rules
        selected, counts = select_to_attend(
            q, k_cache, None, self._opened, source, metadata_block_tables, k, budget=budget, method=method, sink=sink, recent=recent,
            per_query_head=per_query_head, dense_below=dense_below, tokens_since_metadata_update=tokens_since_metadata_update,
            q_lens=None, kv_layout=rules.kv_layout, k_scale=k_scale, dtype=rules.dtype, kv_dtype=rules.kv_dtype,
            num_threads=rules.num_threads,
        )  # fmt: skip
        result = attend_requests(
            q, k_cache, v_cache, self._tables, rules, selected, counts, sinks, k_scale, v_scale, kv_ranges, attn_mask,
            alibi_slopes, with_lse, out,
        )  # fmt: skip
        return with_lists(result, with_lse, (selected, counts) if with_selected else ())
