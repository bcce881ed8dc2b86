"""Every wrong call on a paged cache is refused with one sentence, before any work: caches, summaries and outputs stay as they are."""

import random
import re

import numpy as np
import pytest

import blitz_attn
from exporters import StoppedDlpack

B, H, HKV, D, DV = 2, 4, 2, 32, 16
PAGES, SIZE, WIDTH = 8, 16, 3
SEQ_LENS = [40, 18]
SENTENCE = re.compile(r"^[\w\[\], ]+: expected .+, got .+", re.DOTALL)


def floats(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def tables():
    """Tables of 3 and of 2 used pages; what lies beyond a length may be anything."""
    return np.array([[5, 2, 7], [0, 3, 99]], np.int32)


def attend():
    return {
        "q": floats(B, H, D), "k_cache": floats(PAGES, SIZE, HKV, D), "v_cache": floats(PAGES, SIZE, HKV, DV), "block_tables": tables(),
        "seq_lens": SEQ_LENS, "out": np.full((B, H, DV), np.nan, np.float32),
    }  # fmt: skip


def select_attend():
    return attend() | {"selected": np.array([[[0, 2], [1, -1]], [[1, 0], [0, -1]]], np.int32)}


def append():
    call = {"k": floats(B, HKV, D), "v": floats(B, HKV, DV)} | attend()
    del call["q"], call["out"]
    return call


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def append_slots(**changes):
    return {"block_tables": None, "seq_lens": None, "slot_mapping": [3, 60]} | changes


def append_summaries(**changes):
    names = ("k_cache", "metadata_block_tables", "maxblocks", "minblocks")
    return {name: value for name, value in metadata().items() if name in names} | changes


def metadata():
    return {
        "k_cache": floats(PAGES, SIZE, HKV, D), "block_tables": tables(), "seq_lens": SEQ_LENS,
        "metadata_block_tables": np.array([[2], [0]], np.int64), "maxblocks": floats(3, SIZE, HKV, D), "minblocks": floats(3, SIZE, HKV, D),
    }  # fmt: skip


def quest():
    return {
        "query": floats(B, H, D), "maxblocks": floats(3, SIZE, HKV, D), "minblocks": floats(3, SIZE, HKV, D),
        "metadata_block_tables": np.array([[2], [0]], np.int64), "seq_lens": SEQ_LENS, "k": 2,
    }  # fmt: skip


def quest_in_out():
    call = quest() | {"selected_indices": np.full((B, HKV, 2), 77, np.int32)}
    del call["k"]
    return call


def quest_in_out_w():
    return quest_in_out() | {"tokens_since_metadata_update": 3}


def select():
    return {"q": floats(B, H, D), "source": floats(PAGES, SIZE, HKV, D), "tables": tables(), "seq_lens": SEQ_LENS, "k": 2, "method": "max"}


def plan():
    return {"block_tables": tables(), "seq_lens": SEQ_LENS, "page_size": SIZE, "num_pages": PAGES}


CALLS = {
    "paged_attention": attend,
    "paged_select_attention": select_attend,
    "append_paged_kv": append,
    "quest_prefill_metadata": metadata,
    "quest_block_select_paged": quest,
    "quest_block_select_paged_in_out": quest_in_out,
    "quest_block_select_paged_in_out_w": quest_in_out_w,
    "select_blocks": select,
    "PagedPlan": plan,
}


def entry(array, value, *at):
    """A copy with one entry changed."""
    array = array.copy()
    array[at] = value
    return array


def eight_bits(a, **changes):
    """Caches of int8 with their scales."""
    k, k_scale = blitz_attn.quantize_kv(a["k_cache"], "int8")
    v, v_scale = blitz_attn.quantize_kv(a["v_cache"], "int8")
    return {"k_cache": k, "v_cache": v, "k_scale": k_scale, "v_scale": v_scale} | changes


def triple(indptr=(0, 3, 5), indices=(5, 2, 7, 0, 3), last_page_len=(8, 2), **changes):
    return {"block_tables": (np.array(indptr), np.array(indices), np.array(last_page_len)), "seq_lens": None} | changes


# What holds wherever tables and lengths are taken: id, exception, pattern, changes
TABLE_CASES = [
    ("page_too_big", ValueError, r"^block_tables: expected pages from 0 to 7 .*, got 8", lambda a: {"block_tables": entry(tables(), 8, 0, 2)}),
    ("page_negative", ValueError, r"^block_tables: expected pages from 0 to 7 .*, got -1",
     lambda a: {"block_tables": entry(tables(), -1, 1, 1)}),
    ("length_beyond_table", ValueError, r"^seq_lens: expected .* 3 pages .*, got 49 at \[0\]", lambda a: {"seq_lens": [49, 18]}),
    ("length_negative", ValueError, r"^seq_lens: expected .* from 0|^seq_lens: expected 0 to", lambda a: {"seq_lens": [40, -1]}),
    ("length_huge", ValueError, r"^seq_lens: expected", lambda a: {"seq_lens": [2**62, 18]}),
    ("length_beyond_64_bits", (ValueError, TypeError), r"^seq_lens: expected", lambda a: {"seq_lens": [2**80, 18]}),
    ("lengths_float", TypeError, r"^seq_lens: expected integers, got float64", lambda a: {"seq_lens": np.array([40.0, 18.0])}),
    ("lengths_missing", ValueError, r"^seq_lens: expected", lambda a: {"seq_lens": None}),
    ("other_batch", ValueError, r"^(block_tables|metadata_block_tables|seq_lens): expected .*", lambda a: {"block_tables": np.zeros((3, 3), np.int32)}),
    ("tables_rank", ValueError, r"^block_tables: expected shape \(.*\).*, got \(3,\)", lambda a: {"block_tables": tables()[0]}),
    ("tables_float", TypeError, r"^block_tables: expected int32 or int64, got float64", lambda a: {"block_tables": tables().astype(float)}),
    ("tables_int16", TypeError, r"^block_tables: expected int32 or int64, got int16", lambda a: {"block_tables": tables().astype(np.int16)}),
    ("tables_list", TypeError, "^block_tables: expected an array, got list", lambda a: {"block_tables": tables().tolist()}),
]  # fmt: skip

SCALE_CASES = [
    ("no_k_scale", ValueError, r"^k_scale: expected scales of shape \(8, 16, 2\), \(2,\) or \(\) for int8 k_cache, got none",
     lambda a: eight_bits(a, k_scale=None)),
    ("no_v_scale", ValueError, r"^v_scale: expected scales of shape", lambda a: eight_bits(a, v_scale=None)),
    ("scale_shape", ValueError, r"^k_scale: expected shape \(8, 16, 2\) like k_cache, \(2,\) .*, or \(\) for one number, got \(8, 2, 16\)",
     lambda a: eight_bits(a, k_scale=np.ones((PAGES, HKV, SIZE), np.float32))),
    ("scale_rank", ValueError, r"^v_scale: expected shape", lambda a: eight_bits(a, v_scale=np.ones(PAGES, np.float32))),
    ("scale_of_heads", ValueError, r"^k_scale: expected shape", lambda a: eight_bits(a, k_scale=np.ones(HKV + 1, np.float32))),
    ("scale_zero", ValueError, r"^v_scale: expected positive numbers within the range of float32, got 0", lambda a: eight_bits(a, v_scale=0)),
    ("scale_not_finite", ValueError, r"^k_scale: expected positive numbers within the range of float32, got inf",
     lambda a: eight_bits(a, k_scale=np.array([1, np.inf], np.float32))),
    ("scale_dtype", TypeError, r"^k_scale: expected float32, got int64", lambda a: eight_bits(a, k_scale=np.ones((PAGES, SIZE, HKV), int))),
    ("scale_too_large", ValueError, r"^k_scale: expected positive numbers within the range of float32, got inf",
     lambda a: eight_bits(a, k_scale=np.full(HKV, 1e39))),
    ("scale_of_floats", ValueError, r"^v_scale: expected none with float32 v_cache, got shape \(\)", lambda a: {"k_scale": 1.0, "v_scale": 1.5}),
    ("scales_of_floats", ValueError, r"^k_scale: expected none with float32 k_cache, got shape \(2,\)", lambda a: {"k_scale": np.ones(HKV, np.float32)}),
    ("scale_unasked", ValueError, r"^k_scale: expected [nN]one with float32 k_cache, got shape",
     lambda a: {"k_scale": np.ones((PAGES, SIZE, HKV), np.float32)}),
    ("bits_without_name", TypeError, r'^k_cache: expected .*, got uint8 \(for uint8 that holds float8 bits, pass kv_dtype="float8_e4m3", or dtype=',
     lambda a: eight_bits(a, k_cache=np.zeros((PAGES, SIZE, HKV, D), np.uint8))),
    ("v_dtype", TypeError, r"^v_cache: expected dtype float32 like k_cache, got float16", lambda a: {"v_cache": a["v_cache"].astype(np.float16)}),
    ("v_pages", ValueError, r"^v_cache: expected the first three axes of k_cache", lambda a: {"v_cache": a["v_cache"][:4]}),
    ("kv_layout", ValueError, r"^kv_layout: expected 'NHD' or 'HND', got 'NDH'", lambda a: {"kv_layout": "NDH"}),
]  # fmt: skip

CASES = {
    "paged_attention": [
        *TABLE_CASES,
        *SCALE_CASES,
        ("scale_beyond_float32", ValueError, r"^scale: expected a number from -1e\+37 to 1e\+37 with a float32 q, got 1e\+39", lambda a: {"scale": 1e39}),
        ("softcap_beyond_float32", ValueError, r"^softcap: expected a number from 1e-37 to 1e\+37 with a float32 q, or 0 for none, got 1e\+308",
         lambda a: {"softcap": 1e308}),
        ("softcap_tiny", ValueError, r"^softcap: expected a number from 1e-37 to 1e\+37", lambda a: {"softcap": 1e-300}),
        ("q_rank", ValueError, r"^q: expected shape \(B, H, D\), got \(2, 1, 4, 32\)", lambda a: {"q": a["q"][:, None]}),
        ("q_batch", ValueError, r"^seq_lens: expected one length for each of q's 1 requests, got 2", lambda a: {"q": a["q"][:1]}),
        ("q_int", TypeError, r"^q: expected float32", lambda a: {"q": a["q"].astype(np.int8)}),
        ("q_list", TypeError, r"^q: expected an array, got list", lambda a: {"q": a["q"].tolist()}),
        ("head_dim", ValueError, r"^k_cache: expected a last axis D = 31", lambda a: {"q": a["q"][..., :31].copy()}),
        ("heads", ValueError, r"^k_cache: expected a number of heads that divides q's 3", lambda a: {"q": a["q"][:, :3]}),
        ("cache_rank", ValueError, r"^k_cache: expected shape \(pages, page_size, Hkv, D\), got", lambda a: {"k_cache": a["k_cache"][0]}),
        ("cache_last_axis", ValueError, r"^k_cache: expected a contiguous last axis", lambda a: {"k_cache": a["k_cache"][..., ::-1]}),
        ("cache_dtype", TypeError, r"^k_cache: expected", lambda a: {"k_cache": a["k_cache"].astype(np.int32)}),
        ("float64_cache", TypeError, r"^k_cache: expected float32, .* with a float32 q, got float64",
         lambda a: {"k_cache": a["k_cache"].astype(float), "v_cache": a["v_cache"].astype(float)}),
        ("kv_dtype_name", ValueError, r"^kv_dtype: expected 'float32', .*, got 'int4'", lambda a: {"kv_dtype": "int4"}),
        ("kv_dtype_wrong", TypeError, r"^k_cache: expected int8 as kv_dtype says, got float32", lambda a: {"kv_dtype": "int8"}),
        ("dtype_wrong", TypeError, r"^q: expected float16 as dtype says, got float32", lambda a: {"dtype": "float16"}),
        ("scale_infinite", ValueError, r"^scale: expected a finite number, got inf", lambda a: {"scale": np.inf}),
        ("softcap_negative", ValueError, r"^softcap: expected", lambda a: {"softcap": -1.0}),
        ("softcap_text", TypeError, r"^softcap: expected a number, got str", lambda a: {"softcap": "x"}),
        ("window", ValueError, r"^window: expected", lambda a: {"window": -2}),
        ("window_pair", TypeError, r"^window: expected one integer, the number of tokens before itself that a query sees, got tuple", lambda a: {"window": (4, 0)}),
        ("sinks_shape", ValueError, r"^sinks: expected shape \(4,\), one number per head, got \(2,\)$", lambda a: {"sinks": [0.0, 1.0]}),
        ("sinks_complex", TypeError, r"^sinks: expected numbers, got complex64", lambda a: {"sinks": np.zeros(H, np.complex64)}),
        ("sinks_dates", TypeError, r"^sinks: expected numbers, got datetime64", lambda a: {"sinks": np.zeros(H, "M8[s]")}),
        ("kv_dtype_number", TypeError, r"^kv_dtype: expected a dtype or its name, got float", lambda a: {"kv_dtype": 1.5}),
        ("sinks_text", TypeError, r"^sinks: expected numbers, got str", lambda a: {"sinks": "zero"}),
        ("threads", ValueError, r"^num_threads: expected a positive number", lambda a: {"num_threads": 0}),
        ("many_threads", ValueError, r"^num_threads: expected 1 to 1024, got 9999", lambda a: {"num_threads": 9999}),
        ("v_dim", ValueError, r"^v_cache: expected a head dim from 1 to 576, got \(8, 16, 2, 577\)",
         lambda a: {"v_cache": floats(PAGES, SIZE, HKV, 577)}),
        ("no_heads", ValueError, r"^q: expected at least one head and a head dim D from 1 to 576, got \(2, 0, 32\)",
         lambda a: {"q": a["q"][:, :0]}),
        ("no_tokens_per_page", ValueError, r"^k_cache: expected a page_size of at least 1, got \(8, 0, 2, 32\)",
         lambda a: {"k_cache": a["k_cache"][:, :0], "v_cache": a["v_cache"][:, :0]}),
        ("triple_none", ValueError, r"^indptr: expected B \+ 1 entries, got 0", lambda a: triple(indptr=np.zeros(0, int))),
        ("triple_far", ValueError, r"^indptr: expected rising numbers from 0 to 5, got 0 and 4611686018427387904",
         lambda a: triple(indptr=(0, 2**62, 2**62), last_page_len=(8, 0))),
        ("q_lens_sum", ValueError, r"^q_lens: expected lengths that add up to q's 2 tokens, got 3", lambda a: {"q_lens": [1, 2]}),
        ("q_lens_count", ValueError, r"^q_lens: expected 2 entries, one per request, got 1", lambda a: {"q_lens": [2]}),
        ("q_lens_long", ValueError, r"^q_lens: expected 0 to seq_lens\[0\] = 1, got 2 at \[0\]", lambda a: {"q_lens": [2, 0], "seq_lens": [1, 18]}),
        ("q_lens_negative", ValueError, r"^q_lens: expected 0 to", lambda a: {"q_lens": [3, -1]}),
        ("triple_lengths", ValueError, r"^seq_lens: expected None with", lambda a: triple(seq_lens=SEQ_LENS)),
        ("triple_size", ValueError, r"^block_tables: expected an array or .*, got a tuple of 2",
         lambda a: {"block_tables": triple()["block_tables"][:2], "seq_lens": None}),
        ("triple_falling", ValueError, r"^indptr: expected rising numbers", lambda a: triple(indptr=(0, 3, 2))),
        ("triple_beyond", ValueError, r"^indptr: expected rising numbers from 0 to 5", lambda a: triple(indptr=(0, 3, 6))),
        ("triple_last", ValueError, r"^last_page_len: expected 1 to the 16 tokens of a page, got 17 at \[1\]",
         lambda a: triple(last_page_len=(8, 17))),
        ("triple_last_zero", ValueError, r"^last_page_len: expected 1 to", lambda a: triple(last_page_len=(0, 2))),
        ("triple_last_count", ValueError, r"^last_page_len: expected 2 entries, one per request, got 1", lambda a: triple(last_page_len=(8,))),
        ("triple_page", ValueError, r"^block_tables: expected pages from 0 to 7", lambda a: triple(indices=(5, 2, 8, 0, 3))),
        ("out_shape", ValueError, r"^out: expected shape \(2, 4, 16\), got \(2, 4, 32\)", lambda a: {"out": np.zeros((B, H, D), np.float32)}),
        ("out_dtype", TypeError, r"^out: expected dtype float32, got float16", lambda a: {"out": a["out"].astype(np.float16)}),
        ("out_in_cache", ValueError, r"^out: expected memory of its own, got an array that overlaps v_cache",
         lambda a: {"out": a["v_cache"].reshape(-1)[: B * H * DV].reshape(B, H, DV)}),
    ],
    "paged_select_attention": [
        *TABLE_CASES,
        ("beyond_last_block", ValueError, r"^selected: expected .*, got 2", lambda a: {"selected": entry(a["selected"], 2, 1, 0, 0)}),
        ("twice", ValueError, r"^selected: expected .*", lambda a: {"selected": entry(a["selected"], 0, 0, 0, 1)}),
        ("none", TypeError, r"^selected: expected an array, got NoneType", lambda a: {"selected": None}),
        ("rank", ValueError, r"^selected: expected shape \(2, 2 or 4, K\)", lambda a: {"selected": a["selected"][0]}),
        ("rows", ValueError, r"^selected: expected shape", lambda a: {"selected": np.zeros((B, 3, 1), np.int32)}),
        ("batch", ValueError, r"^selected: expected shape", lambda a: {"selected": a["selected"][:1]}),
        ("dtype", TypeError, r"^selected: expected", lambda a: {"selected": a["selected"].astype(float)}),
        ("dtype_float", TypeError, r"^selected: expected int16, int32 or int64, got float32",
         lambda a: {"selected": np.zeros((B, HKV, 1), np.float32)}),
        ("dtype_uint16", TypeError, r"^selected: expected int16, int32 or int64, got uint16",
         lambda a: {"selected": np.zeros((B, HKV, 1), np.uint16)}),
        ("counts_big", ValueError, r"^counts: expected 0 to 2, got 3 at \[0, 1\]", lambda a: {"counts": np.array([[1, 3], [1, 1]])}),
        ("counts_shape", ValueError, r"^counts: expected shape \(2, 2\) like the rows of selected, got \(2, 4\)",
         lambda a: {"counts": np.ones((B, H), int)}),
        ("counts_float", TypeError, r"^counts: expected integers, got float64", lambda a: {"counts": np.ones((B, HKV))}),
        ("counted_pad", ValueError, r"^selected: expected", lambda a: {"counts": np.full((B, HKV), 2)}),
    ],
    "append_paged_kv": [
        *TABLE_CASES,
        *SCALE_CASES,
        ("slot_twice", ValueError, r"^slot_mapping: expected each slot once, got slot 3 twice", lambda a: append_slots(slot_mapping=[3, 3])),
        ("slot_twice_by_tables", ValueError, r"^block_tables: expected each slot once, got slot 23 twice",
         lambda a: {"block_tables": np.array([[1], [1]]), "seq_lens": [8, 8]}),
        ("slot_beyond", ValueError, r"^slot_mapping: expected slots from 0 to 127, .*, got 128 at \[1\]",
         lambda a: append_slots(slot_mapping=[3, 128])),
        ("slot_negative", ValueError, r"^slot_mapping: expected slots .*, got -2 at \[0\]", lambda a: append_slots(slot_mapping=[-2, 3])),
        ("slot_count", ValueError, r"^slot_mapping: expected 2 entries", lambda a: append_slots(slot_mapping=[3])),
        ("slot_float", TypeError, r"^slot_mapping: expected integers, got float64", lambda a: append_slots(slot_mapping=np.array([1.0, 2.0]))),
        ("slots_and_tables", ValueError, r"^slot_mapping: expected exactly one of slot_mapping and block_tables, got both", lambda a: {"slot_mapping": [3, 60]}),
        ("nowhere", ValueError, r"^slot_mapping: expected exactly one of slot_mapping and block_tables, got neither", lambda a: append_slots(slot_mapping=None)),
        ("slots_and_lengths", ValueError, r"^seq_lens: expected None with slot_mapping", lambda a: append_slots(seq_lens=SEQ_LENS)),
        ("k_shape", ValueError, r"^k: expected shape \(T, 2, 32\) like k_cache, got \(2, 2, 31\)", lambda a: {"k": a["k"][..., :31]}),
        ("v_tokens", ValueError, r"^v: expected 2 tokens like k, got 1", lambda a: {"v": a["v"][:1]}),
        ("k_dtype", TypeError, r"^k: expected float32, .*, got int64", lambda a: {"k": a["k"].astype(int)}),
        ("k_not_finite", ValueError, r"^k: expected finite numbers to quantise, .*, got inf at \[0, 0, 0\]$", lambda a: eight_bits(a, k=entry(a["k"], np.inf, 0, 0, 0))),
        ("k_in_cache", ValueError, r"^k: expected memory of its own, got an array that overlaps k_cache", lambda a: {"k": a["k_cache"][0, :2]}),
        ("v_in_k_cache", ValueError, r"^v: expected memory of its own, got an array that overlaps k_cache", lambda a: {"v": a["k_cache"][0, :2, :, :DV]}),
        ("read_only", ValueError, r"^k_cache: expected a writable array, got a read-only one", lambda a: {"k_cache": read_only(a["k_cache"])}),
        ("q_lens_sum", ValueError, r"^q_lens: expected lengths that add up to k's 2 tokens, got 3", lambda a: {"q_lens": [1, 2]}),
        ("q_lens_count", ValueError, r"^q_lens: expected 2 entries, one per request, got 1", lambda a: {"q_lens": [2]}),
        ("no_tokens_per_page", ValueError, r"^k_cache: expected a page_size of at least 1, got \(8, 0, 2, 32\)",
         lambda a: {"k_cache": a["k_cache"][:, :0], "v_cache": a["v_cache"][:, :0]}),
        ("scale_read_only", ValueError, r"^k_scale: expected a writable array, got a read-only one",
         lambda a: eight_bits(a, k_scale=np.broadcast_to(np.float32(1), (PAGES, SIZE, HKV)))),
        ("summaries_of_eight_bits", TypeError, r"^maxblocks: expected dtype float32 with k_cache of int8, got float16",
         lambda a: append_summaries(maxblocks=np.ones((3, SIZE, HKV, D), np.float16)) | eight_bits(a)),
        ("summaries_of_eight_bits_without_scales", ValueError, r"^k_scale: expected scales of shape",
         lambda a: append_summaries() | eight_bits(a, k_scale=None)),
        ("nothing_new", ValueError, r"^q_lens: expected 0 to seq_lens\[1\] = 0, got 1 at \[1\]", lambda a: {"seq_lens": [40, 0]}),
        ("summaries_without_tables", ValueError, r"^metadata_block_tables: expected the tables",
         lambda a: append_summaries(metadata_block_tables=None)),
        ("summaries_of_slots", ValueError, r"^maxblocks: expected None with slot_mapping, got ndarray",
         lambda a: append_summaries(metadata_block_tables=None) | {"slot_mapping": [1, 2], "block_tables": None, "seq_lens": None}),
        ("tables_without_summaries", ValueError, r"^maxblocks: expected a summary",
         lambda a: append_summaries(maxblocks=None, minblocks=None)),
        ("summary_dtype", TypeError, r"^maxblocks: expected dtype float32 like k_cache",
         lambda a: append_summaries(maxblocks=np.zeros((3, SIZE, HKV, D), np.float16))),
        ("summary_page", ValueError, r"^metadata_block_tables: expected pages from 0 to 2 .*, got 3",
         lambda a: append_summaries(metadata_block_tables=np.array([[2], [3]]))),
    ],
    "quest_prefill_metadata": [
        *TABLE_CASES,
        ("summary_page", ValueError, r"^metadata_block_tables: expected pages from 0 to 2 .*, got 3",
         lambda a: {"metadata_block_tables": np.array([[2], [3]])}),
        ("summary_page_twice", ValueError, r"^metadata_block_tables: expected pages that nothing else uses, got 2, which is listed twice",
         lambda a: {"metadata_block_tables": np.array([[2], [2]])}),
        ("summary_over_keys", ValueError, r"^metadata_block_tables: expected pages that nothing else uses, got 2, which holds keys",
         lambda a: {"maxblocks": a["k_cache"], "minblocks": floats(PAGES, SIZE, HKV, D)}),
        ("summary_batch", ValueError, r"^metadata_block_tables: expected shape \(2, W\), got \(3, 1\)",
         lambda a: {"metadata_block_tables": np.zeros((3, 1), int)}),
        ("summaries_differ", ValueError, r"^minblocks: expected shape", lambda a: {"minblocks": a["minblocks"][:2]}),
        ("summary_heads", ValueError, r"^maxblocks: expected shape", lambda a: {"maxblocks": floats(3, SIZE, 1, D)}),
        ("summary_dtype", TypeError, r"^maxblocks: expected dtype float32 like k_cache, got float64",
         lambda a: {"maxblocks": floats(3, SIZE, HKV, D, dtype=np.float64)}),
        ("summaries_overlap", ValueError, r"^minblocks: expected memory of its own, got an array that overlaps maxblocks",
         lambda a: {"minblocks": a["maxblocks"]}),
        ("no_summary", ValueError, r"^maxblocks: expected a summary to write, got none", lambda a: {"maxblocks": None, "minblocks": None}),
        ("threads", ValueError, r"^num_threads: expected 1 to 1024, got 100000", lambda a: {"num_threads": 100000}),
        ("start_negative", ValueError, r"^start_lens: expected lengths of at least 0, got -1 at \[1\]", lambda a: {"start_lens": [0, -1]}),
        ("start_count", ValueError, r"^start_lens: expected 2 entries", lambda a: {"start_lens": [0]}),
        ("eight_bits", ValueError, r"^k_scale: expected scales of shape", lambda a: {"k_cache": a["k_cache"].astype(np.int8)}),
        ("bits_of_floats", TypeError, r"^k_cache: expected", lambda a: {"k_cache": a["k_cache"].astype(np.uint8), "k_scale": 1.0}),
    ],
    "quest_block_select_paged": [
        ("k_zero", ValueError, r"^k: expected 1 to .*, got 0", lambda a: {"k": 0}),
        ("k_float", TypeError, r"^k: expected an integer, got float", lambda a: {"k": 2.0}),
        ("query_rank", ValueError, r"^query: expected shape \(2, H, D\), got \(4, 32\)", lambda a: {"query": a["query"][0]}),
        ("query_batch", ValueError, r"^query: expected shape \(2, H, D\), got \(1, 4, 32\)", lambda a: {"query": a["query"][:1]}),
        ("query_dim", ValueError, r"^maxblocks: expected D = 31", lambda a: {"query": a["query"][..., :31].copy()}),
        ("heads", ValueError, r"^maxblocks: expected .* a number of heads that divides 3", lambda a: {"query": a["query"][:, :3]}),
        ("query_int", TypeError, r"^query: expected float32, .*, got int32", lambda a: {"query": a["query"].astype(np.int32)}),
        ("query_last_axis", ValueError, r"^query: expected a contiguous last axis", lambda a: {"query": a["query"][..., ::-1]}),
        ("max_float64", TypeError, r"^maxblocks: expected float32, float16 or bfloat16 with query of float32, got float64",
         lambda a: {"maxblocks": a["maxblocks"].astype(float)}),
        ("query_float64", TypeError, r"^maxblocks: expected float64 with query of float64, got float32",
         lambda a: {"query": a["query"].astype(float)}),
        ("table_int16", TypeError, r"^metadata_block_tables: expected int32 or int64, got int16",
         lambda a: {"metadata_block_tables": a["metadata_block_tables"].astype(np.int16)}),
        ("many_threads", ValueError, r"^num_threads: expected 1 to 1024, got 9999", lambda a: {"num_threads": 9999}),
        ("min_missing", TypeError, r"^minblocks: expected an array, got NoneType", lambda a: {"minblocks": None}),
        ("min_shape", ValueError, r"^minblocks: expected shape", lambda a: {"minblocks": a["minblocks"][:2]}),
        ("max_rank", ValueError, r"^maxblocks: expected shape \(pages, page_size, Hkv, D\), got \(16, 2, 32\)$", lambda a: {"maxblocks": a["maxblocks"][0]}),
        ("max_dim", ValueError, r"^maxblocks: expected a head dim from 1 to 576, got \(3, 16, 2, 577\)$", lambda a: {"maxblocks": floats(3, SIZE, HKV, 577)}),
        ("no_rows_per_page", ValueError, r"^maxblocks: expected a page_size of at least 1, got \(3, 0, 2, 32\)$",
         lambda a: {"maxblocks": a["maxblocks"][:, :0], "minblocks": a["minblocks"][:, :0]}),
        ("no_heads", ValueError, r"^maxblocks: expected at least one head, got \(3, 16, 0, 32\)$",
         lambda a: {"maxblocks": a["maxblocks"][:, :, :0], "minblocks": a["minblocks"][:, :, :0]}),
        ("page", ValueError, r"^metadata_block_tables: expected pages from 0 to 2", lambda a: {"metadata_block_tables": np.array([[2], [-1]])}),
        ("length", ValueError, r"^seq_lens: expected 0 to the 256 tokens", lambda a: {"seq_lens": [257, 18]}),
        ("block_size", ValueError, r"^block_size: expected at least 1 token per page, got 0", lambda a: {"block_size": 0}),
        ("seq_lens", ValueError, r"^seq_lens: expected at most 1073741823 tokens, got 1152921504606846976 at \[1\]", lambda a: {"seq_lens": np.array([3, 2**60]), "block_size": 2**62}),
    ],
    "quest_block_select_paged_in_out": [
        ("dtype", TypeError, r"^selected_indices: expected dtype int32, got int64",
         lambda a: {"selected_indices": a["selected_indices"].astype(np.int64)}),
        ("shape", ValueError, r"^selected_indices: expected shape \(2, 2, 2\), got \(2, 3, 2\)",
         lambda a: {"selected_indices": np.zeros((B, 3, 2), np.int32)}),
        ("rank", ValueError, r"^selected_indices: expected shape", lambda a: {"selected_indices": np.zeros((B, 2), np.int32)}),
        ("empty", ValueError, r"^selected_indices: expected at least 1 place per row, got 0", lambda a: {"selected_indices": np.zeros((B, HKV, 0), np.int32)}),
        ("none", TypeError, r"^selected_indices: expected an array, got NoneType", lambda a: {"selected_indices": None}),
        ("read_only", ValueError, r"^selected_indices: expected a writable array",
         lambda a: {"selected_indices": np.broadcast_to(np.int32(0), (B, HKV, 2))}),
    ],
    "quest_block_select_paged_in_out_w": [
        ("none", TypeError, r"^selected_indices: expected an array, got NoneType", lambda a: {"selected_indices": None}),
        ("since", ValueError, r"^tokens_since_metadata_update: expected at least 0, or -1 .*, got -2", lambda a: {"tokens_since_metadata_update": -2}),
        ("since_count", ValueError, r"^tokens_since_metadata_update: expected 2 entries", lambda a: {"tokens_since_metadata_update": [1]}),
        ("since_float", TypeError, r"^tokens_since_metadata_update: expected", lambda a: {"tokens_since_metadata_update": 1.5}),
    ],
    "select_blocks": [
        ("method", ValueError, r"^method: expected 'quest', 'mean' or 'max', got 'best'", lambda a: {"method": "best"}),
        ("no_pair", TypeError, r"^source: expected the pair", lambda a: {"method": "quest"}),
        ("pair", TypeError, r"^source: expected one array for method 'max', got a pair", lambda a: {"source": (a["source"], a["source"])}),
        ("neither", ValueError, r"^budget: expected exactly one of budget and k, got neither", lambda a: {"k": None}),
        ("both", ValueError, r"^budget: expected exactly one of budget and k, got both", lambda a: {"budget": 64}),
        ("k", ValueError, r"^k: expected 1 to .*, got -1", lambda a: {"k": -1}),
        ("k_of_a_half", TypeError, r"^k: expected an integer, got float", lambda a: {"k": 1.5}),
        ("k_each", ValueError, r"^k: expected at least 1, got 0", lambda a: {"k": [2, 0]}),
        ("k_count", ValueError, r"^k: expected a number, or 2 of them, one per request", lambda a: {"k": [2, 1, 1]}),
        ("budget", ValueError, r"^budget: expected at least 1 token, got 0", lambda a: {"k": None, "budget": 0}),
        ("sink", ValueError, r"^sink: expected at least 0 pages, got -1", lambda a: {"sink": -1}),
        ("recent", ValueError, r"^recent: expected at least 0 pages, got -1 at \[1\]", lambda a: {"recent": [1, -1]}),
        ("q", ValueError, r"^q: expected shape", lambda a: {"q": a["q"][0]}),
        ("q_lens", ValueError, r"^q_lens: expected lengths that add up to q's 2 tokens, got 3", lambda a: {"q_lens": [1, 2]}),
        ("block_size", ValueError, r"^block_size: expected at least 1 token, got 0", lambda a: {"block_size": 0}),
        ("other_block_size", ValueError, r"^block_size: expected the 16 tokens per page of source, got 8", lambda a: {"block_size": 8}),
        ("unreadable", TypeError, r"^source: expected an array with a shape, or one that NumPy can read by DLPack, got StoppedDlpack",
         lambda a: {"k": None, "budget": 32, "source": StoppedDlpack(BufferError("gone"))}),
    ],
    "PagedPlan": [
        *TABLE_CASES,
        *[(f"{name}_in_chunks", error, pattern, lambda a, make=make: {"kv_split": 32} | make(a)) for name, error, pattern, make in TABLE_CASES],
        ("page_size", ValueError, r"^page_size: expected at least 1 token, got 0", lambda a: {"page_size": 0}),
        ("q_lens", ValueError, r"^q_lens: expected 0 to seq_lens\[1\] = 18, got 19 at \[1\]", lambda a: {"q_lens": [1, 19]}),
        ("q_lens_of_stretches", ValueError, r"^q_lens: expected at least 0, got -1 at \[1\]", lambda a: {"q_lens": [1, -1], "q_begin": [0, 0]}),
        ("q_begin_count", ValueError, r"^q_begin: expected 2 entries, one per request, got 3", lambda a: {"q_begin": [1, 2, 3]}),
        ("q_begin_far", ValueError, r"^q_begin: expected token numbers from -1073741823 to 1073741823, got 1073741824 at \[1\]",
         lambda a: {"q_begin": [1, 2**30]}),
        ("q_begin_float", TypeError, r"^q_begin: expected integers, got float64", lambda a: {"q_begin": np.zeros(2)}),
        ("kv_split", ValueError, r"^kv_split: expected a positive multiple of the 16 tokens of a page, got 24", lambda a: {"kv_split": 24}),
        ("kv_split_text", TypeError, r"^kv_split: expected an integer, got str", lambda a: {"kv_split": "16"}),
        ("page_size_in_chunks", ValueError, r"^page_size: expected at least 1 token, got 0", lambda a: {"page_size": 0, "kv_split": 16}),
        ("num_pages", ValueError, r"^num_pages: expected at least 0 pages, got -1", lambda a: {"num_pages": -1}),
        ("num_pages_in_chunks", ValueError, r"^num_pages: expected at least 0 pages, got -1", lambda a: {"num_pages": -1, "kv_split": 16}),
        ("num_pages_text_in_chunks", TypeError, r"^num_pages: expected an integer, got str", lambda a: {"num_pages": "8", "kv_split": 16}),
    ],
}  # fmt: skip


def arrays_of(arguments):
    return {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}


@pytest.mark.parametrize("function", CALLS)
def test_the_good_call_is_good(function):
    getattr(blitz_attn, function)(**CALLS[function]())


@pytest.mark.parametrize("changes", [append_slots, append_summaries, lambda: eight_bits(append())])
def test_the_good_append_is_good(changes):
    blitz_attn.append_paged_kv(**append() | changes())


@pytest.mark.parametrize(
    ("function", "error", "pattern", "changes"),
    [pytest.param(function, *case[1:], id=f"{function}-{case[0]}") for function, cases in CASES.items() for case in cases],
)
def test_a_bad_argument_is_named_and_no_array_is_touched(function, error, pattern, changes):
    arguments = CALLS[function]()
    arguments |= changes(arguments)
    before = arrays_of(arguments)
    with pytest.raises(error, match=pattern) as caught:
        getattr(blitz_attn, function)(**arguments)
    assert SENTENCE.match(str(caught.value))
    assert arrays_of(arguments) == before


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        pytest.param(function, case[-1], id=f"{function}-{case[0]}")
        for function in ("paged_attention", "paged_select_attention")
        for case in CASES[function]
    ],
)
def test_a_call_in_chunks_is_refused_by_the_same_sentence(function, changes):
    arguments = CALLS[function]()
    arguments |= changes(arguments)
    assert "kv_split" not in arguments
    with pytest.raises((TypeError, ValueError)) as whole:
        getattr(blitz_attn, function)(**arguments)
    with pytest.raises(whole.type, match=f"^{re.escape(str(whole.value))}$"):
        getattr(blitz_attn, function)(**arguments, kv_split=2 * SIZE)


def sentence_of(function, arguments):
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(blitz_attn, function)(**arguments)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("function", ["paged_attention", "paged_select_attention"])
def test_of_two_mistakes_a_call_in_chunks_names_the_same_one(function):
    pairs = [(first, second) for first in CASES[function] for second in CASES[function] if first[0] != second[0]]
    rng, compared = random.Random(0), 0
    for first, second in rng.sample(pairs, 300):
        arguments = CALLS[function]()
        arguments |= first[-1](arguments)
        try:
            arguments |= second[-1](arguments)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            continue  # the second mistake cannot be made in what the first has left
        chunks = arguments | {"kv_split": 2 * SIZE}
        assert sentence_of(function, chunks) == sentence_of(function, arguments), (first[0], second[0])
        compared += 1
    assert compared > 150


@pytest.mark.parametrize(
    ("kv_dtype", "error", "text"),
    [
        ("int4", ValueError, "kv_dtype: expected 'int8' or 'float8_e4m3', got 'int4'"),
        ("float32", ValueError, "kv_dtype: expected 'int8' or 'float8_e4m3', got 'float32'"),
        (None, ValueError, "kv_dtype: expected 'int8' or 'float8_e4m3', got None"),
        (3, TypeError, "kv_dtype: expected a dtype or its name, got int"),
    ],
)
def test_quantise_to_what(kv_dtype, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        blitz_attn.quantize_kv(floats(2, 8), kv_dtype)


@pytest.mark.parametrize(
    ("x", "dtype", "error", "text"),
    [
        (np.float32, "int8", ValueError, "dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'int8'"),
        (np.float32, 3, TypeError, "dtype: expected a dtype or its name, got int"),
        (np.float32, "bfloat16", TypeError, "x: expected bfloat16 as dtype says, got float32"),
        (np.float16, "float32", TypeError, "x: expected float32 as dtype says, got float16"),
        (
            np.uint16, None, TypeError,
            'x: expected float32, float16, bfloat16 or float64, got uint16 (dtype="bfloat16" reads uint16 as bfloat16 bits)',
        ),
    ],
)  # fmt: skip
def test_quantise_of_what_dtype(x, dtype, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        blitz_attn.quantize_kv(np.zeros((2, 8), x), "int8", dtype=dtype)


def test_quantise_what():
    with pytest.raises(TypeError, match="^x: expected float32, .*, got int64"):
        blitz_attn.quantize_kv(np.arange(8), "int8")
    sentence = "^x: expected finite numbers to quantise, within float32's range, got %s$"
    with pytest.raises(ValueError, match=sentence % "nan at place 1 of row 0"):
        blitz_attn.quantize_kv(np.array([1.0, np.nan]), "float8_e4m3")
    with pytest.raises(ValueError, match=sentence % r"-1e\+300 at place 2 of row 3"):  # row 3 of the six
        blitz_attn.quantize_kv(entry(np.ones((2, 3, 8)), -1e300, 1, 0, 2), "int8")
    with pytest.raises(ValueError, match=r"^x: expected shape \(..., D\), got \(\)"):
        blitz_attn.quantize_kv(np.float32(1), "int8")
    with pytest.raises(TypeError, match="^x: expected native byte order, got >f4"):
        blitz_attn.quantize_kv(np.ones((2, 8), ">f4"), "int8")
    with pytest.raises(TypeError, match="^values: expected int8"):
        blitz_attn.dequantize_kv(floats(2, 8), np.ones(2))
    with pytest.raises(ValueError, match=r"^scale: expected shape \(2,\)"):
        blitz_attn.dequantize_kv(np.zeros((2, 8), np.int8), np.ones(3))


def test_select_and_attend_knows_its_source():
    call = attend()
    arrays = [call[name] for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens")]
    with pytest.raises(ValueError, match="^source: expected summaries and their tables for method 'quest', got None"):
        blitz_attn.select_and_attend(*arrays, budget=32)
    with pytest.raises(ValueError, match="^source: expected None for method 'max'"):
        blitz_attn.select_and_attend(*arrays, call["k_cache"], budget=32, method="max")


OPTIONS = [
    ({"kv_layout": "x"}, "kv_layout: expected 'NHD' or 'HND', got 'x'"),
    ({"softcap": -1.0}, "softcap: expected a positive finite number, or 0 for none, got -1"),
    ({"window": "a"}, "window: expected one integer, the number of tokens before itself that a query sees, got str"),
    ({"window": -2, "kv_split": SIZE}, "window: expected a token count of at least 0, or -1 for no bound, got -2"),
    ({"scale": "b"}, "scale: expected a number, got str"),
    ({"out_dtype": "int8"}, "out_dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'int8'"),
    ({"out_dtype": "float16", "dtype": "float32"}, "out_dtype: expected 'float32' like q, got 'float16'"),
    ({"dtype": "x"}, "dtype: expected 'float32', 'float16', 'bfloat16' or 'float64', got 'x'"),
    ({"num_threads": -4}, "num_threads: expected a positive number of threads or None, got -4"),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS)
def test_a_plan_refuses_options_that_no_call_can_have(options, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        blitz_attn.PagedPlan(tables(), SEQ_LENS, page_size=SIZE, **options)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 1e-200}, {"out_dtype": "float32", "dtype": "bfloat16"}, {"out_dtype": "bfloat16"}, {"out_dtype": "float64"},
     {"kv_dtype": "float8_e4m3", "dtype": "float16"}, {"kv_dtype": "int8", "out_dtype": "float16"}, {"kv_dtype": "bfloat16"}],
)  # fmt: skip
def test_a_plan_takes_options_that_some_call_can_have(options):
    blitz_attn.PagedPlan(tables(), SEQ_LENS, page_size=SIZE, **options)


def test_a_list_of_three_is_no_triple():
    with pytest.raises(TypeError, match=r"^block_tables: expected an array or a tuple \(indptr, indices, last_page_len\), got list$"):
        blitz_attn.paged_attention(floats(1, H, D), floats(2, SIZE, HKV, D), floats(2, SIZE, HKV, D), [[0, 1], [0], [5]])


def test_a_plan_refuses_a_call_that_does_not_fit():
    opened = blitz_attn.PagedPlan(tables(), SEQ_LENS, page_size=SIZE, num_pages=PAGES, q_lens=[1, 2])
    call = attend()
    with pytest.raises(ValueError, match=r"^q: expected 3 queries as the plan has them, got \(2, 4, 32\)"):
        opened.attention(call["q"], call["k_cache"], call["v_cache"])
    with pytest.raises(TypeError, match="^selected: expected an array, got NoneType"):
        opened.select_attention(floats(3, H, D), call["k_cache"], call["v_cache"], None)


ODDITIES = [object(), "x", b"xy", 1.5, -1, 2**70, [], [None], {}, 1j, np.float32(1), np.array("text"), np.array(None), np.zeros((0,))]


STRETCHES = [(function, name) for function in ("paged_attention", "paged_select_attention", "PagedPlan") for name in ("q_begin", "kv_split")]


@pytest.mark.parametrize(("function", "name"), [*((function, name) for function, make in CALLS.items() for name in make()), *STRETCHES])
def test_any_object_as_an_argument_is_refused_or_accepted(function, name):
    """Whatever is passed as whatever: an error of the two kinds, or a result; nothing else and no crash."""
    refused = 0
    for oddity in ODDITIES:
        try:
            getattr(blitz_attn, function)(**(CALLS[function]() | {name: oddity}))
        except (TypeError, ValueError) as error:
            refused += 1
            assert str(error).partition(":")[0].split("[")[0].isidentifier() or "argument" in str(error), str(error)
    assert refused > len(ODDITIES) // 2


@pytest.mark.parametrize("missing", ["indptr", "indices", "last_page_len"])
@pytest.mark.parametrize("call", [blitz_attn.paged_attention, blitz_attn.paged_select_attention])
def test_half_a_triple(call, missing):
    parts = {"indptr": np.array([0, 1, 2]), "indices": np.array([0, 1]), "last_page_len": np.array([1, 1]), missing: None}
    cache = np.ones((8, 4, 2, 8), np.float32)
    selected = [np.zeros((2, 2, 1), np.int32)] if call is blitz_attn.paged_select_attention else []
    with pytest.raises(TypeError, match=f"^{missing}: expected an array of .indptr, indices, last_page_len., got NoneType"):
        call(np.ones((2, 2, 8), np.float32), cache, cache, tuple(parts.values()), None, *selected)
