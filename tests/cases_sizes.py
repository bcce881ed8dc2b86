"""Every operation and option at sizes of choice, for suites that test how time and memory depend on numbers of tokens, queries and requests."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import blitz_attn as ba
from blitz_attn import nsa, sabi, select

HEADS, KV_HEADS, DIM, PAGE, BLOCK = 2, 1, 32, 16, 64


class Sized(NamedTuple):
    """An operation. `make(tokens, queries, requests, threads)` makes its arrays and returns the call."""

    make: Callable[[int, int, int, int], Callable[[], Any]]
    small: tuple[int, int, int]  # tokens, queries and requests of a quick call
    long: tuple[int, int, int]  # tokens, queries and requests of a call of about a second
    # The sizes that grow, each in its own runs: "t" tokens, "q" queries, "r" requests, "s" tokens and queries together. A call whose memory
    # may grow with the product of queries and tokens has "t" and "q" instead of "s".
    grows: str = "tq"


def reals(*shape, dtype=np.float32):
    """Random numbers: 65536 of them are drawn, and repeated to fill the shape."""
    drawn = np.random.default_rng(sum(shape)).standard_normal(1 << 16).astype(dtype)
    return np.resize(drawn, shape)


def zeros(*shape, dtype=np.float32):
    """Zeros in memory that is already resident. Memory of np.zeros becomes resident when it is first written."""
    array = np.empty(shape, dtype)
    array[...] = 0
    return array


# ---- Block-sparse attention -----------------------------------------------------------------------------------------


def qkv(tokens, queries, requests, dtype=np.float32):
    return [reals(requests, heads, n, DIM, dtype=dtype) for heads, n in ((HEADS, queries), (KV_HEADS, tokens), (KV_HEADS, tokens))]


def window_list(tokens, queries, heads=1, width=4):
    """A list of `width` blocks for each block of queries."""
    rows, columns = -(-queries // BLOCK), -(-tokens // BLOCK)
    listed = (np.arange(rows)[:, None] + np.arange(width) * (columns // width)) % columns
    return np.broadcast_to(np.sort(listed, axis=1).astype(np.int32), (1, heads, rows, width)).copy()


def forward(listed=False, dtype=np.float32, of_tokens=lambda tokens, queries, requests: {}, **options):
    def make(tokens, queries, requests, threads):
        arrays = qkv(tokens, queries, requests, dtype)
        lists = {"sabi": window_list(tokens, queries), "block_shape": (BLOCK, BLOCK)} if listed else {}
        more = of_tokens(tokens, queries, requests)
        return lambda: ba.block_sparse_attention(*arrays, **lists, **options, **more, num_threads=threads)

    return make


def backward(listed=False, dtype=np.float32, of_tokens=lambda tokens, queries, requests: {}, **options):
    def make(tokens, queries, requests, threads):
        arrays = qkv(tokens, queries, requests, dtype)
        lists = {"sabi": window_list(tokens, queries), "block_shape": (BLOCK, BLOCK)} if listed else {}
        more = of_tokens(tokens, queries, requests)
        out, lse = reals(*arrays[0].shape, dtype=dtype), zeros(*arrays[0].shape[:3])
        lse[...] = 20
        return lambda: ba.block_sparse_attention_backward(out, *arrays, out, lse, **lists, **options, **more, num_threads=threads)

    return make


def ranges(tokens, queries, requests):
    begin = np.arange(queries) * max(1, tokens - 512) // queries
    return {"kv_ranges": np.stack([begin, begin + 512], axis=-1)}


def booleans(tokens, queries, requests):
    return {"attn_mask": np.resize(np.arange(4097) % 3 > 0, (1, 1, queries, tokens))}


def numbers(tokens, queries, requests):
    return {"attn_mask": reals(1, 1, queries, tokens)}


def key_numbers(tokens, queries, requests):
    return {"attn_mask": reals(1, 1, 1, tokens)}


def slopes(tokens, queries, requests):
    return {"alibi_slopes": np.float32([0.5, 0.25])}


def key_bias(tokens, queries, requests):
    return key_numbers(tokens, queries, requests) | slopes(tokens, queries, requests)


def packed(tokens, queries, requests, threads):
    arrays = [reals(requests * n, heads, DIM) for heads, n in ((HEADS, queries), (KV_HEADS, tokens), (KV_HEADS, tokens))]
    cuts = {"cu_seqlens_q": np.arange(requests + 1) * queries, "cu_seqlens_kv": np.arange(requests + 1) * tokens}
    return lambda: ba.block_sparse_attention(*arrays, layout="TND", **cuts, num_threads=threads)


BLOCK_SPARSE = {
    "forward": Sized(forward(), (4096, 4096, 1), (60000, 60000, 1), "sr"),
    "forward, causal": Sized(forward(causal=True), (4096, 4096, 1), (80000, 80000, 1), "sr"),
    "forward, window": Sized(forward(window=(256, 0)), (4096, 4096, 1), (1000000, 1000000, 1), "sr"),
    "forward, few queries": Sized(forward(), (16384, 1, 1), (100000, 4, 200), "tr"),
    "forward, bfloat16 and sinks": Sized(
        forward(dtype=np.float16, sinks=np.float32([1, 2]), softcap=30.0), (4096, 4096, 1), (60000, 60000, 1), "tq"
    ),
    "forward, lists": Sized(forward(True), (8192, 8192, 1), (2000000, 2000000, 1), "sr"),
    "forward, float64": Sized(forward(dtype=np.float64), (4096, 4096, 1), (40000, 40000, 1), "s"),
    "forward, ranges": Sized(forward(of_tokens=ranges), (8192, 8192, 1), (1000000, 1000000, 1), "s"),
    "forward, mask": Sized(forward(of_tokens=booleans), (2048, 2048, 1), (20000, 40000, 1), "s"),
    "forward, numbers": Sized(forward(of_tokens=numbers), (2048, 2048, 1), (10000, 30000, 1), "s"),
    "forward, numbers of keys": Sized(forward(of_tokens=key_numbers), (4096, 4096, 1), (60000, 60000, 1), "s"),
    "forward, slopes": Sized(forward(of_tokens=slopes), (4096, 4096, 1), (60000, 60000, 1), "s"),
    "forward, packed": Sized(packed, (1024, 1024, 4), (2000, 2000, 1000), "sr"),
    "backward": Sized(backward(), (2048, 2048, 1), (30000, 30000, 1), "sr"),
    "backward, lists": Sized(backward(True), (8192, 8192, 1), (600000, 600000, 1), "sr"),
    "backward, float16": Sized(backward(dtype=np.float16), (2048, 2048, 1), (30000, 30000, 1), "sr"),
    "backward, ranges": Sized(backward(of_tokens=ranges), (8192, 8192, 1), (300000, 300000, 1), "s"),
    "backward, mask gradients": Sized(backward(of_tokens=numbers, bias_grads=True), (1024, 1024, 1), (10000, 20000, 1), "s"),
    "backward, key bias gradients": Sized(backward(of_tokens=key_bias, bias_grads=True), (2048, 2048, 1), (20000, 20000, 1), "s"),
    "backward, slope gradients": Sized(backward(of_tokens=slopes, bias_grads=True), (2048, 2048, 1), (20000, 20000, 1), "s"),
}  # fmt: skip


# ---- Choosing for prefill -------------------------------------------------------------------------------------------


def choose(attend=False, of_tokens=lambda tokens, queries, requests: {}, **options):
    def make(tokens, queries, requests, threads):
        q, k, v = qkv(tokens, queries, requests)
        more = {"block_shape": (BLOCK, BLOCK), "num_threads": threads, **options, **of_tokens(tokens, queries, requests)}
        if attend:
            return lambda: ba.select_and_attend_prefill(q, k, v, **more)
        return lambda: ba.select_blocks_prefill(q, k, **more)

    return make


def choose_tokens(**options):
    def make(tokens, queries, requests, threads):
        q, k, weights = reals(requests, queries, 4, DIM), reals(requests, tokens, DIM), reals(requests, queries, 4)
        return lambda: ba.select_tokens(q, k, weights, 64, num_threads=threads, **options)

    return make


def judge(of, every=1):
    def make(tokens, queries, requests, threads):
        arrays = qkv(tokens, queries, requests)
        lists = window_list(tokens, queries)
        return lambda: of(
            *arrays[: 3 if of is select.output_error else 2], lists, block_shape=(BLOCK, BLOCK), every=every, num_threads=threads
        )

    return make


def profile(of, **options):
    def make(tokens, queries, requests, threads):
        q, k, v = qkv(tokens, queries, requests)
        capture = (q, k, v) if of is select.calibrate else (q, k, v, q)
        return lambda: of([[capture]], block_shape=(BLOCK, BLOCK), num_threads=threads, **options)

    return make


CHOOSING = {
    "prefill, k": Sized(choose(top_k=4), (8192, 8192, 1), (300000, 300000, 1), "sr"),
    "prefill, density": Sized(choose(density=0.1), (8192, 8192, 1), (300000, 300000, 1), "sr"),
    "prefill, top-p": Sized(choose(top_p=0.9), (8192, 8192, 1), (300000, 300000, 1), "sr"),
    "prefill, top-p with scores": Sized(choose(top_p=0.9, return_scores=True), (8192, 8192, 1), (300000, 300000, 1), "sr"),
    "prefill, antidiagonal": Sized(choose(threshold=0.9, chooser="antidiagonal"), (16384, 16384, 1), (200000, 200000, 1), "sr"),
    "prefill, sampled rows": Sized(choose(density=0.1, chooser=select.SampledRows(4)), (16384, 16384, 1), (200000, 200000, 1), "sr"),
    "prefill, lines": Sized(choose(top_p=0.9, chooser=select.VerticalSlash(64)), (16384, 16384, 1), (2000000, 2000000, 1), "sr"),
    "prefill, ranges": Sized(choose(top_k=4, of_tokens=ranges), (8192, 8192, 1), (300000, 300000, 1), "s"),
    "tokens": Sized(choose_tokens(causal=True), (8192, 8192, 1), (30000, 30000, 1), "sr"),
    "tokens, blocks": Sized(choose_tokens(block_size=128), (65536, 16, 1), (4000000, 64, 1), "tq"),
    "prefill, choose and attend": Sized(choose(attend=True, top_k=4), (8192, 8192, 1), (300000, 300000, 1), "sr"),
    "recall": Sized(judge(select.recall), (2048, 2048, 1), (60000, 60000, 1), "s"),
    "recall, every 8": Sized(judge(select.recall, 8), (2048, 2048, 1), (200000, 200000, 1), "s"),
    "output_error": Sized(judge(select.output_error), (2048, 2048, 1), (60000, 60000, 1), "s"),
    "calibrate": Sized(profile(select.calibrate, target=0.9, steps=3), (1024, 1024, 1), (60000, 60000, 1), "s"),
    "allocate": Sized(profile(select.allocate, density=0.3, masses=(0.5, 0.9)), (1024, 1024, 1), (40000, 40000, 1), "s"),
}


# ---- Paged caches ---------------------------------------------------------------------------------------------------


def pages_of(tokens, requests):
    """Tables and lengths of requests that share no page, and the number of pages."""
    each = -(-tokens // PAGE)
    return np.arange(requests * each, dtype=np.int32).reshape(requests, each), np.full(requests, tokens), requests * each


def cache_of(pages, dtype=np.float32):
    return reals(pages, PAGE, KV_HEADS, DIM, dtype=dtype)


def eight_bit(pages):
    """Keys and values in 8 bits, and their scales."""
    values = np.resize(np.arange(-127, 128).astype(np.int8), (pages, PAGE, KV_HEADS, DIM))
    scale = zeros(pages, PAGE, KV_HEADS)
    scale[...] = 0.01
    return values, values.copy(), {"k_scale": scale, "v_scale": scale.copy()}


def paged(eight=False, of_tokens=lambda tokens, queries, requests: {}, plan=False, **options):
    def make(tokens, queries, requests, threads):
        tables, lens, pages = pages_of(tokens, requests)
        k, v, scales = eight_bit(pages) if eight else (cache_of(pages), cache_of(pages), {})
        q = reals(requests * queries, HEADS, DIM)
        more = {**options, **scales, **of_tokens(tokens, queries, requests)}
        lengths = {"q_lens": np.full(requests, queries)} if queries > 1 else {}
        if plan:
            made = ba.PagedPlan(tables, lens, page_size=PAGE, num_threads=threads, **lengths)
            return lambda: made.attention(q, k, v, **more)
        return lambda: ba.paged_attention(q, k, v, tables, lens, num_threads=threads, **lengths, **more)

    return make


def plan_alone(**options):
    def make(tokens, queries, requests, threads):
        tables, lens, _ = pages_of(tokens, requests)
        return lambda: ba.PagedPlan(tables, lens, page_size=PAGE, num_threads=threads, **options).batch

    return make


def chosen_pages(tokens, queries, requests, threads):
    tables, lens, pages = pages_of(tokens, requests)
    chosen = np.broadcast_to(np.arange(0, tables.shape[1], 4, dtype=np.int32), (requests, KV_HEADS, -(-tables.shape[1] // 4))).copy()
    q, k, v = reals(requests, HEADS, DIM), cache_of(pages), cache_of(pages)
    return lambda: ba.paged_select_attention(q, k, v, tables, lens, chosen, num_threads=threads)


def chosen_tokens(tokens, queries, requests, threads):
    tables, lens, pages = pages_of(tokens, requests)
    chosen = np.resize(np.random.default_rng(0).permutation(tokens)[:64].astype(np.int32), (requests * queries, 1, 64))
    q, k, v = reals(requests * queries, HEADS, DIM), cache_of(pages), cache_of(pages)
    options = {"q_lens": [queries] * requests, "selected_size": 1, "num_threads": threads}
    return lambda: ba.paged_select_attention(q, k, v, tables, lens, chosen, **options)


def append(dtype=np.float32, summaries=False, slots=False):
    def make(tokens, queries, requests, threads):
        tables, lens, pages = pages_of(tokens, requests)
        new = reals(requests * queries, KV_HEADS, DIM)
        caches = [zeros(pages, PAGE, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
        options = {"num_threads": threads}
        if dtype == np.int8:
            options |= {name: zeros(pages, PAGE, KV_HEADS) for name in ("k_scale", "v_scale")}
        if summaries:
            rows = 64
            each = -(-tables.shape[1] // rows)
            options |= {name: zeros(requests * each, rows, KV_HEADS, DIM) for name in ("maxblocks", "minblocks", "meanblocks")}
            options["metadata_block_tables"] = np.arange(requests * each, dtype=np.int32).reshape(requests, each)
        if slots:
            options["slot_mapping"] = np.arange(requests * queries)
        else:
            options |= {"block_tables": tables, "seq_lens": lens, "q_lens": np.full(requests, queries)}
        return lambda: ba.append_paged_kv(new, new, *caches, **options)

    return make


def quantised(kv_dtype, dtype=np.float32, back=False):
    def make(tokens, queries, requests, threads):
        x = reals(tokens, KV_HEADS, DIM, dtype=dtype)
        if back:
            values, scale = ba.quantize_kv(x, kv_dtype)
            return lambda: ba.dequantize_kv(values, scale)
        return lambda: ba.quantize_kv(x, kv_dtype)

    return make


def summaries_of(pages_per_request, requests, rows=64):
    each = -(-pages_per_request // rows)
    return [reals(requests * each, rows, KV_HEADS, DIM) for _ in range(3)], np.arange(requests * each, dtype=np.int32).reshape(
        requests, each
    )


def summarise(eight=False):
    def make(tokens, queries, requests, threads):
        tables, lens, pages = pages_of(tokens, requests)
        k, _, scales = eight_bit(pages) if eight else (cache_of(pages), None, {})
        (largest, smallest, mean), summary_tables = summaries_of(tables.shape[1], requests)
        scale = {"k_scale": scales["k_scale"]} if eight else {}
        return lambda: ba.quest_prefill_metadata(
            k, tables, lens, summary_tables, largest, smallest, meanblocks=mean, num_threads=threads, **scale
        )

    return make


def select_pages(method, attend=False, **options):
    def make(tokens, queries, requests, threads):
        tables, lens, pages = pages_of(tokens, requests)
        q = reals(requests, HEADS, DIM)
        (largest, smallest, mean), summary_tables = summaries_of(tables.shape[1], requests)
        source = (largest, smallest) if method == "quest" else mean if method == "mean" else cache_of(pages)
        if attend:
            k, v = cache_of(pages), cache_of(pages)
            return lambda: ba.select_and_attend(
                q, k, v, tables, lens, source=source, metadata_block_tables=summary_tables, method=method, num_threads=threads, **options
            )
        if method == "max":
            return lambda: ba.select_blocks(q, source, tables, lens, method="max", num_threads=threads, **options)
        return lambda: ba.select_blocks(q, source, summary_tables, lens, method=method, block_size=PAGE, num_threads=threads, **options)

    return make


def key_booleans(tokens, queries, requests):
    return {"attn_mask": np.resize(np.arange(4097) % 3 > 0, (requests, 1, 1, tokens))}


PAGED = {
    "paged": Sized(paged(), (16384, 1, 4), (40000, 1, 200), "tr"),
    "paged, chunk of queries": Sized(paged(window=4096), (8192, 512, 2), (40000, 20000, 2), "sr"),
    "paged, int8": Sized(paged(True), (16384, 1, 4), (60000, 1, 200), "tr"),
    "paged, mask": Sized(paged(of_tokens=key_booleans), (16384, 1, 4), (40000, 1, 200), "tr"),
    "paged, sinks and softcap": Sized(paged(sinks=np.float32([1, 2]), softcap=30.0), (16384, 1, 4), (40000, 1, 200), "tr"),
    "paged, kv_split": Sized(paged(kv_split=1024), (16384, 1, 4), (40000, 1, 200), "tr"),
    "paged, kv_split and queries": Sized(paged(kv_split=1024), (4096, 256, 1), (40000, 8000, 1), "sr"),
    "paged plan": Sized(paged(plan=True), (16384, 1, 4), (40000, 1, 200), "tr"),
    "PagedPlan": Sized(plan_alone(), (65536, 1, 16), (16000000, 1, 100), "tr"),
    "PagedPlan, kv_split": Sized(plan_alone(kv_split=1024), (65536, 1, 16), (16000000, 1, 20), "tr"),
    "paged, chosen pages": Sized(chosen_pages, (16384, 1, 4), (100000, 1, 200), "tr"),
    "paged, chosen tokens": Sized(chosen_tokens, (16384, 64, 4), (100000, 20000, 4), "tqr"),
    "append": Sized(append(), (65536, 65536, 1), (6000000, 6000000, 1), "sr"),
    "append, int8": Sized(append(np.int8), (65536, 65536, 1), (6000000, 6000000, 1), "sr"),
    "append, float16": Sized(append(np.float16), (65536, 65536, 1), (6000000, 6000000, 1), "sr"),
    "append, slots": Sized(append(slots=True), (65536, 65536, 1), (6000000, 6000000, 1), "sr"),
    "append, summaries": Sized(append(summaries=True), (65536, 65536, 1), (6000000, 6000000, 1), "sr"),
    "append, many requests": Sized(append(), (16, 1, 4096), (16, 1, 4000000), "r"),
    "quantize_kv": Sized(quantised("int8"), (65536, 1, 1), (8000000, 1, 1), "t"),
    "quantize_kv, float64": Sized(quantised("float8_e4m3", np.float64), (65536, 1, 1), (4000000, 1, 1), "t"),
    "dequantize_kv": Sized(quantised("int8", back=True), (65536, 1, 1), (10000000, 1, 1), "t"),
    "dequantize_kv, float8": Sized(quantised("float8_e4m3", back=True), (65536, 1, 1), (10000000, 1, 1), "t"),
    "quest_prefill_metadata": Sized(summarise(), (65536, 1, 1), (10000000, 1, 1), "tr"),
    "quest_prefill_metadata, int8": Sized(summarise(True), (65536, 1, 1), (16000000, 1, 1), "tr"),
    "select_blocks, quest": Sized(select_pages("quest", k=16), (65536, 1, 4), (16000000, 1, 5), "tr"),
    "select_blocks, mean": Sized(select_pages("mean", budget=1000), (65536, 1, 4), (16000000, 1, 5), "tr"),
    "select_blocks, max": Sized(select_pages("max", k=16), (65536, 1, 4), (4000000, 1, 4), "tr"),
    "select_blocks, k of all": Sized(select_pages("quest", k=256), (65536, 1, 4), (16000000, 1, 5), "tr"),
    "select_and_attend": Sized(select_pages("quest", True, k=64), (65536, 1, 4), (4000000, 1, 1), "tr"),
}


# ---- Merging --------------------------------------------------------------------------------------------------------


def merge(of, parts):
    def make(tokens, queries, requests, threads):
        outs = [reals(queries, HEADS, DIM) for _ in range(parts)]
        lses = [reals(queries, HEADS) for _ in range(parts)]
        return lambda: of(outs, lses)

    return make


MERGING = {
    "merge_states_n": Sized(merge(ba.merge_states_n, 4), (1, 16384, 1), (1, 2000000, 1), "q"),
    "merge_states_tree": Sized(merge(ba.merge_states_tree, 4), (1, 16384, 1), (1, 1000000, 1), "q"),
}


# ---- Native sparse attention ----------------------------------------------------------------------------------------

SIZES = {"compress_block_size": 64, "num_selected_blocks": 4, "window_size": 256}


def native(of, **options):
    """`of(q, k, v, options)` returns the call. The arrays are in layout BSND."""

    def make(tokens, queries, requests, threads):
        q, k, v = (reals(requests, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return of(q, k, v, {"num_threads": threads, **options})

    return make


def nsa_backward(q, k, v, options):
    out, context = nsa.nsa(q, k, v, return_context=True, **SIZES, **options)
    return lambda: nsa.nsa_backward(out, context)


def compressed(q, k, v, stride):
    return q, *nsa.compress_kv(k, v, 64, stride=stride)


def chosen_lists(q, k):
    tokens = q.shape[1]
    return np.broadcast_to((np.arange(tokens)[:, None] // 64 - np.arange(4)).clip(-1), (len(q), KV_HEADS, tokens, 4)).astype(np.int32)


def nsa_selected_backward(q, k, v, options):
    lists, lse = chosen_lists(q, k), zeros(*q.shape[:3])
    return lambda: nsa.selected_attention_backward(q, q, k, v, q, lse, lists, 64, **options)


def cache_append(q, k, v, options):
    cache = nsa.NsaCache(**SIZES, **options)
    return lambda: cache.append(k, v)


def cache_attend(q, k, v, options):
    cache = nsa.NsaCache(**SIZES, **options)
    cache.append(k, v)
    last = q[:, -1:].copy()
    return lambda: cache.attend(last)


def native_forward(**more):
    return lambda q, k, v, options: lambda: nsa.nsa(q, k, v, **SIZES, **options, **more)


NATIVE = {
    "nsa": Sized(native(native_forward()), (8192, 1, 1), (300000, 1, 1), "tr"),
    "nsa, mslk": Sized(native(native_forward(mode="mslk", q_tile_size=16)), (8192, 1, 1), (300000, 1, 1), "tr"),
    "nsa_backward": Sized(native(nsa_backward), (4096, 1, 1), (100000, 1, 1), "tr"),
    "nsa, compress_kv": Sized(native(lambda q, k, v, options: partial(nsa.compress_kv, k, v, 64, **options)), (65536, 1, 1), (8000000, 1, 1), "tr"),
    "nsa, compress_kv_backward": Sized(
        native(lambda q, k, v, options: partial(nsa.compress_kv_backward, k[:, ::64].copy(), v[:, ::64].copy(), k, v, 64, **options)),
        (65536, 1, 1), (8000000, 1, 1), "tr",
    ),
    "nsa, compressed_attention": Sized(
        native(lambda q, k, v, options: partial(nsa.compressed_attention, *compressed(q, k, v, 64), 64, **options)),
        (8192, 1, 1), (300000, 1, 1), "tr",
    ),
    "nsa, score_and_select": Sized(
        native(lambda q, k, v, options: partial(nsa.score_and_select_blocks, *compressed(q, k, v, 32)[:2], 4, 64, **options)),
        (8192, 1, 1), (300000, 1, 1), "tr",
    ),
    "nsa, selected_attention": Sized(
        native(lambda q, k, v, options: partial(nsa.selected_attention, q, k, v, chosen_lists(q, k), 64, **options)),
        (8192, 1, 1), (1000000, 1, 1), "tr",
    ),
    "nsa, selected_backward": Sized(native(nsa_selected_backward), (8192, 1, 1), (500000, 1, 1), "tr"),
    "nsa, window_attention": Sized(native(lambda q, k, v, options: partial(nsa.window_attention, q, k, v, 256, **options)), (8192, 1, 1), (1000000, 1, 1), "tr"),
    "nsa, gates": Sized(
        native(lambda q, k, v, options: partial(nsa.compute_gates, q, reals(HEADS, 3, DIM), **options)), (65536, 1, 1), (3000000, 1, 1), "tr"
    ),
    "nsa, gate_and_combine": Sized(
        native(lambda q, k, v, options: partial(nsa.gate_and_combine, q, q, q, zeros(*q.shape[:3], 3), **options)),
        (32768, 1, 1), (3000000, 1, 1), "tr",
    ),
    "nsa, gating_backward": Sized(
        native(
            lambda q, k, v, options: partial(nsa.gating_backward, *[q] * 5, zeros(*q.shape[:3], 3), reals(HEADS, 3, DIM), **options)
        ),
        (32768, 1, 1), (3000000, 1, 1), "tr",
    ),
    "NsaCache.append": Sized(native(cache_append), (65536, 1, 1), (3000000, 1, 1), "tr"),
    "NsaCache.attend": Sized(native(cache_attend), (65536, 1, 1), (4000000, 1, 1), "tr"),
}  # fmt: skip


# ---- Block lists ----------------------------------------------------------------------------------------------------


def built(of):
    """Makes a call of `of(queries, tokens)`."""
    return lambda tokens, queries, requests, threads: lambda: of(queries, tokens)


def over_list(of, heads=1):
    """Makes a call of `of(list, columns)`. The list has a row for each block of queries, and `columns` counts the blocks of tokens."""

    def make(tokens, queries, requests, threads):
        lists, columns = window_list(tokens, queries, requests * heads, 16), -(-tokens // BLOCK)
        return lambda: of(lists, columns)

    return make


def over_mask(of, block=1):
    def make(tokens, queries, requests, threads):
        mask = np.resize(np.arange(4097) % 3 == 0, (requests, 1, queries // block, tokens // block))
        return lambda: of(mask)

    return make


def over_causal(of):
    def make(tokens, queries, requests, threads):
        mask = np.tri(queries, tokens, tokens - queries, dtype=bool)
        return lambda: of(mask)

    return make


def csr(tokens, queries, requests, threads):
    indptr, indices = np.arange(queries + 1) * 8, np.resize(np.arange(8), queries * 8)
    return lambda: sabi.from_csr(indptr, indices)


def num_idx(tokens, queries, requests, threads):
    num, idx = np.full(queries, 8), np.resize(np.arange(16), (queries, 16))
    return lambda: sabi.from_num_idx(num, idx)


def documents(of):
    def make(tokens, queries, requests, threads):
        lengths = np.full(tokens // 100, 100)
        return lambda: of(lengths)

    return make


SHAPE = (BLOCK, BLOCK)
HUGE = 1 << 20  # tokens and queries whose grid of blocks of 64 has 2**28 blocks
LISTS = {
    "sabi.dense": Sized(built(lambda q, t: sabi.dense(q, t, SHAPE)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.causal": Sized(built(lambda q, t: sabi.causal(q, t, SHAPE)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.sliding_window": Sized(
        built(lambda q, t: sabi.sliding_window(q, t, (1, BLOCK), window=(640, 0))), (65536, 65536, 1), (10000000, 10000000, 1)
    ),
    "sabi.sink_local": Sized(
        built(lambda q, t: sabi.sink_local(q, t, (1, BLOCK), sink=64, local=640)), (65536, 65536, 1), (10000000, 10000000, 1)
    ),
    "sabi.document": Sized(documents(lambda lengths: sabi.document(lengths, block_shape=(1, BLOCK))), (65536, 1, 1), (15000000, 1, 1), "t"),
    "sabi.document_ranges": Sized(documents(sabi.document_ranges), (65536, 1, 1), (1 << 24, 1, 1), "t"),
    "sabi.dilated": Sized(built(lambda q, t: sabi.dilated(q, t, SHAPE, stride=4)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.vertical_slash": Sized(
        built(lambda q, t: sabi.vertical_slash(q, t, SHAPE, vertical=[0, 5000], slash=[0, 100, 4000])), (65536, 65536, 1), (HUGE, HUGE, 1)
    ),
    "sabi.random_with_frame": Sized(
        built(lambda q, t: sabi.random_with_frame(q, t, SHAPE, frame=sabi.FrameWidths(1, 1, 1, 1))),
        (32768, 32768, 1),
        (HUGE // 2, HUGE // 2, 1),
    ),
    "sabi.check": Sized(
        over_list(lambda x, c: sabi.check(x, x.shape[2] * BLOCK, c * BLOCK, SHAPE)), (65536, 65536, 1), (1 << 16, 1 << 29, 1)
    ),
    "sabi.to_block_mask": Sized(over_list(sabi.to_block_mask), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.from_block_mask": Sized(over_mask(sabi.from_block_mask), (1024, 1024, 1), (1 << 14, 1 << 14, 1)),
    "sabi.to_token_mask": Sized(
        over_list(lambda x, c: sabi.to_token_mask(x, x.shape[2] * BLOCK, c * BLOCK, SHAPE)), (1024, 1024, 1), (1 << 14, 1 << 14, 1)
    ),
    "sabi.from_token_mask": Sized(over_mask(lambda x: sabi.from_token_mask(x, SHAPE)), (1024, 1024, 1), (1 << 16, 1 << 16, 1)),
    "sabi.kv_ranges_from_token_mask": Sized(over_causal(sabi.kv_ranges_from_token_mask), (1024, 1024, 1), (1 << 16, 1 << 16, 1)),
    "sabi.to_csr": Sized(over_list(lambda x, c: sabi.to_csr(x)), (65536, 65536, 1), (1 << 16, 1 << 29, 1)),
    "sabi.from_csr": Sized(csr, (1, 65536, 1), (1, 1 << 24, 1), "q"),
    "sabi.to_num_idx": Sized(over_list(sabi.to_num_idx), (65536, 65536, 1), (HUGE // 2, HUGE, 1)),
    "sabi.from_num_idx": Sized(num_idx, (1, 65536, 1), (1, 1 << 24, 1), "q"),
    "sabi.union": Sized(over_list(lambda x, c: sabi.union(x, x, c)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.intersection": Sized(over_list(lambda x, c: sabi.intersection(x, x, c)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.difference": Sized(over_list(lambda x, c: sabi.difference(x, x, c)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.complement": Sized(over_list(sabi.complement), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.transpose": Sized(over_list(sabi.transpose), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.coarsen": Sized(over_list(lambda x, c: sabi.coarsen(x, (2, 2), c)), (65536, 65536, 1), (HUGE, HUGE, 1)),
    "sabi.refine": Sized(
        over_list(lambda x, c: sabi.refine(x, (2, 2), x.shape[2] * 2, c * 2)), (65536, 65536, 1), (HUGE // 2, HUGE // 2, 1)
    ),
    "sabi.counts": Sized(over_list(lambda x, c: sabi.counts(x)), (65536, 65536, 1), (1 << 16, 1 << 29, 1)),
    "sabi.density": Sized(over_list(sabi.density), (65536, 65536, 1), (1 << 16, 1 << 29, 1)),
    "sabi.balance": Sized(over_list(lambda x, c: sabi.balance(x)), (65536, 65536, 1), (1 << 16, 1 << 29, 1)),
    "sabi.picture": Sized(over_list(sabi.picture), (65536, 65536, 1), (HUGE, HUGE, 1)),
}

CASES = {**BLOCK_SPARSE, **CHOOSING, **PAGED, **MERGING, **NATIVE, **LISTS}
