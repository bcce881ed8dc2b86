"""Every wrong call is refused with one sentence that names the argument, what was expected and what came, before any work."""

import gc
import re
import sys
from array import array

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import blitz_attn
from blitz_attn import plot, select, testing
from exporters import COMPLEX, CUDA, IS_COPIED, READ_ONLY, Dlpack, NotACapsule, StoppedBuffer, StoppedDlpack, released_view

B, H, HKV, SQ, SKV, D, DV = 2, 4, 2, 96, 160, 32, 16
ROWS, COLUMNS = 3, 5  # of blocks of 32 tokens
SENTENCE = re.compile(r"^[\w\[\], ]+: expected .+, got .+", re.DOTALL)


def good_call():
    """Arguments of a call that is right in everything."""
    q, k, v = testing.make_qkv(B, H, HKV, SQ, SKV, D, DV)
    sabi = np.tile(np.array([0, 3, -1, -1, -1], np.int32), (B, H, ROWS, 1))
    out = np.full((B, H, SQ, DV), np.nan, np.float32)
    return {"q": q, "k": k, "v": v, "sabi": sabi, "block_shape": (32, 32), "out": out}


def set_entries(sabi, *entries):
    """The lists with `entries` in one row."""
    sabi = sabi.copy()
    sabi[1, 2, 1, : len(entries)] = entries
    return sabi


def misaligned(x):
    """The same values at an address that is no multiple of the element size."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def huge(*shape):
    """A view of a shape that no memory could hold."""
    base = np.zeros(shape[-1], np.float32)
    return as_strided(base, shape, (0,) * (len(shape) - 1) + (4,))


def dlpack(x, **options):
    return Dlpack(np.ascontiguousarray(x), **options)


class Odd:
    """An object that is right for no argument: no array, number, sequence or text."""


class Raising:
    """Raises an error of two lines when it is asked for a number or a truth value. A refusal quotes the first line alone."""

    def __index__(self):
        raise RuntimeError("no index\nat all")

    def __float__(self):
        raise RuntimeError("no number\nat all")

    def __bool__(self):
        raise RuntimeError("no truth\nat all")


# id, exception, pattern of the sentence, the arguments that differ from those of the good call (made from its arguments)
CASES = [
    # ---- rank and shape
    ("q_rank_3", ValueError, r"^q: expected shape \(B, H, Sq, D\) for layout BNSD, got \(4, 96, 32\)", lambda a: {"q": a["q"][0]}),
    ("q_rank_0", ValueError, r"^q: expected shape .*, got \(\)", lambda a: {"q": np.array(1.0, np.float32)}),
    ("q_rank_5", ValueError, r"^q: expected at most 4 dimensions, got 5", lambda a: {"q": a["q"][None]}),
    ("k_rank", ValueError, r"^k: expected shape \(B, Hkv, Skv, D\)", lambda a: {"k": a["k"][0]}),
    ("v_rank", ValueError, r"^v: expected shape \(B, Hkv, Skv, Dv\)", lambda a: {"v": a["v"][0]}),
    ("layout_rank", ValueError, r"^q: expected shape \(T, H, D\) for layout TND, got", lambda a: {"layout": "TND"}),
    ("d_mismatch", ValueError, r"^k: expected .* D = 32 like q, got \(2, 2, 160, 31\)", lambda a: {"k": a["k"][..., :31].copy()}),
    ("batch_mismatch", ValueError, r"^k: expected .* B = 2 like q, got \(1,", lambda a: {"k": a["k"][:1]}),
    ("heads_do_not_divide", ValueError, r"^k: expected a number of heads that divides q's 4, got 3", lambda a: {"k": huge(B, 3, SKV, D)}),
    ("no_kv_heads", ValueError, r"^k: expected a number of heads", lambda a: {"k": a["k"][:, :0]}),
    ("no_heads", ValueError, r"^q: expected at least one head", lambda a: {"q": a["q"][:, :0]}),
    ("v_heads", ValueError, r"^v: expected .* of k", lambda a: {"v": a["v"][:, :1]}),
    ("v_tokens", ValueError, r"^v: expected .* of k", lambda a: {"v": a["v"][:, :, 1:]}),
    ("v_batch", ValueError, r"^v: expected .* of k", lambda a: {"v": a["v"][:1]}),
    ("d_zero", ValueError, r"^q: expected a head dim D from 1 to 576, got 0", lambda a: {"q": a["q"][..., :0], "k": a["k"][..., :0]}),
    ("dv_zero", ValueError, r"^v: expected a head dim Dv from 1 to 576, got 0", lambda a: {"v": a["v"][..., :0]}),
    ("d_too_big", ValueError, r"^q: expected a head dim D from 1 to 576, got 577",
     lambda a: {"q": huge(B, H, SQ, 577), "k": huge(B, HKV, SKV, 577)}),
    # ---- dtype and memory
    ("q_int", TypeError, r"^q: expected float32, .*, got int32", lambda a: {"q": a["q"].astype(np.int32)}),
    ("q_bool", TypeError, r"^q: expected float32, .*, got bool", lambda a: {"q": a["q"] > 0}),
    ("q_complex", TypeError, r"^q: expected float32, .*, got complex64", lambda a: {"q": a["q"].astype(np.complex64)}),
    ("q_longdouble", TypeError, r"^q: expected float32, .*, got (float128|longdouble)", lambda a: {"q": a["q"].astype(np.longdouble)}),
    ("q_object", TypeError, r"^q: expected float32, .*, got object", lambda a: {"q": a["q"].astype(object)}),
    ("q_structured", TypeError, r"^q: expected float32, .*, got \[\('x', '<f4'\)\]", lambda a: {"q": a["q"].view([("x", "<f4")])}),
    ("q_datetime", ValueError, r"^q: expected an array whose memory can be read, got ndarray", lambda a: {"q": a["q"].astype("M8[s]")}),
    ("q_bytes_view", TypeError, r"^q: expected float32, .*, got buffer format 'B'", lambda a: {"q": memoryview(a["q"]).cast("B")}),
    ("q_byte_order", TypeError, r"^q: expected native byte order, got >f4", lambda a: {"q": a["q"].astype(">f4")}),
    ("sabi_byte_order", TypeError, r"^sabi: expected native byte order, got >i4", lambda a: {"sabi": a["sabi"].astype(">i4")}),
    ("lens_byte_order", TypeError, r"^q_lens: expected native byte order, got >i8", lambda a: {"q_lens": np.array([1, 2], ">i8")}),
    ("bits_without_dtype", TypeError, r'^q: .*, got uint16 \(dtype="bfloat16"', lambda a: {"q": a["q"].astype(np.uint16)}),
    ("k_mixed", TypeError, r"^k: expected dtype float32 like q, got float16", lambda a: {"k": a["k"].astype(np.float16)}),
    ("v_mixed", TypeError, r"^v: expected dtype float32 like q, got float64", lambda a: {"v": a["v"].astype(np.float64)}),
    ("q_list", TypeError, r"^q: expected an array, got list", lambda a: {"q": a["q"].tolist()}),
    ("q_tuple", TypeError, r"^q: expected an array, got tuple", lambda a: {"q": (a["q"].view(np.uint16), "bfloat16")}),
    ("q_none", TypeError, r"^q: expected an array, got NoneType", lambda a: {"q": None}),
    ("k_string", TypeError, r"^k: expected an array, got str", lambda a: {"k": "keys"}),
    ("v_type", TypeError, r"^v: expected an array, got Odd", lambda a: {"v": Odd()}),
    ("q_masked", TypeError, r"^q: expected an array without a mask, got MaskedArray", lambda a: {"q": np.ma.array(a["q"])}),
    ("q_last_axis", ValueError, r"^q: expected a contiguous last axis .*, got a stride of 2",
     lambda a: {"q": np.repeat(a["q"], 2, -1)[..., ::2]}),
    ("k_last_axis_reversed", ValueError, r"^k: expected a contiguous last axis .*, got a stride of -1", lambda a: {"k": a["k"][..., ::-1]}),
    ("v_last_axis_broadcast", ValueError, r"^v: .*, got a stride of 0", lambda a: {"v": np.broadcast_to(a["v"][..., :1], a["v"].shape)}),
    ("q_misaligned", ValueError, r"^q: expected memory aligned to 4 bytes", lambda a: {"q": misaligned(a["q"])}),
    ("q_odd_strides", ValueError, r"^q: expected strides of whole elements",
     lambda a: {"q": as_strided(a["q"], a["q"].shape, (0, 0, 2, 4))}),
    # ---- sizes beyond 64 bits
    (
        "out_overflow",
        ValueError,
        r"^q: expected an output below 2\^63 bytes, got",
        lambda a: {"q": huge(1 << 20, 1 << 10, 1 << 20, 1), "k": huge(1 << 20, 1 << 10, 1, 1), "v": huge(1 << 20, 1 << 10, 1, 576), "sabi": None},
    ),
    ("dims_overflow", ValueError, r"^k: expected dimensions of fewer than 2\^63 bytes",
     lambda a: {"k": dlpack(a["k"], shape=(1 << 40, 1 << 20, SKV, D))}),
    ("reach_overflow", ValueError, r"^k: expected .* fewer than 2\^63 bytes", lambda a: {"k": dlpack(a["k"], strides=(1 << 61, 0, D, 1))}),
    ("reach_overflow_below", ValueError, r"^k: expected .* fewer than 2\^63 bytes",
     lambda a: {"k": dlpack(a["k"], strides=(-(1 << 60), 0, D, 1), shape=(5, HKV, SKV, D))}),
    ("negative_dim", ValueError, r"^q: expected dimensions .*, got -1 on axis 2", lambda a: {"q": dlpack(a["q"], shape=(B, H, -1, D))}),
    ("q_too_long", ValueError, r"^q: expected at most 1073741823 tokens per sequence, got 2147483648",
     lambda a: {"q": huge(1, 1, 1 << 31, 1), "k": huge(1, 1, 1, 1), "v": huge(1, 1, 1, 1), "sabi": None}),
    ("k_too_long", ValueError, r"^k: expected at most 1073741823 tokens per sequence, got 2147483648",
     lambda a: {"q": huge(1, 1, 1, 1), "k": huge(1, 1, 1 << 31, 1), "v": huge(1, 1, 1 << 31, 1), "sabi": None}),
    # ---- exporters
    ("released", ValueError, r"^q: .* memory can be read, got memoryview that raises: .*released", lambda a: {"q": released_view()}),
    ("stopped", ValueError, r"^k: .* memory can be read, got StoppedDlpack that raises: gone",
     lambda a: {"k": StoppedDlpack(RuntimeError("gone"))}),
    ("stopped_sabi", ValueError, r"^sabi: .* got StoppedDlpack that raises", lambda a: {"sabi": StoppedDlpack(BufferError("gone"))}),
    ("stopped_lens", ValueError, r"^kv_lens: .* got StoppedDlpack that raises", lambda a: {"kv_lens": StoppedDlpack(TypeError("gone"))}),
    ("no_capsule", TypeError, r"^v: expected an unused DLPack capsule .*, got int", lambda a: {"v": NotACapsule()}),
    ("device", TypeError, r"^q: expected an array in CPU memory, got one on DLPack device type 2",
     lambda a: {"q": dlpack(a["q"], device_type=CUDA)}),
    ("dlpack_complex", TypeError, r"^q: expected float32", lambda a: {"q": dlpack(a["q"], code=COMPLEX)}),
    ("dlpack_lanes", TypeError, r"^q: expected float32", lambda a: {"q": dlpack(a["q"], lanes=4)}),
    ("dlpack_rank", ValueError, r"^q: expected at most 4 dimensions, got 6", lambda a: {"q": dlpack(a["q"], ndim=6)}),
    ("dlpack_version", ValueError, r"^q: expected DLPack version 1, got version 2", lambda a: {"q": dlpack(a["q"], version=(2, 0))}),
    # ---- block lists
    ("sabi_rank", ValueError, r"^sabi: expected shape \(2 or 1, 4, 2 or 1, 3, W\)", lambda a: {"sabi": a["sabi"][0]}),
    ("sabi_batch", ValueError, r"^sabi: expected shape", lambda a: {"sabi": np.zeros((3, H, ROWS, 1), np.int32)}),
    ("sabi_heads", ValueError, r"^sabi: expected shape", lambda a: {"sabi": a["sabi"][:, :3]}),
    ("sabi_rows", ValueError, r"^sabi: expected .* 3 rows = ceil\(96 queries / block_shape\[0\] = 32\), got \(2, 4, 2, 5\)",
     lambda a: {"sabi": a["sabi"][:, :, :2]}),
    ("sabi_float", TypeError, r"^sabi: expected uint16, int16, int32 or int64, got float32",
     lambda a: {"sabi": a["sabi"].astype(np.float32)}),
    ("sabi_uint8", TypeError, r"^sabi: expected uint16, .*, got uint8", lambda a: {"sabi": a["sabi"].astype(np.uint8)}),
    ("sabi_int8", TypeError, r"^sabi: expected uint16, .*, got int8", lambda a: {"sabi": a["sabi"].astype(np.int8)}),
    ("sabi_bool", TypeError, r"^sabi: expected uint16, .*, got bool", lambda a: {"sabi": a["sabi"] > 0}),
    ("sabi_masked", TypeError, r"^sabi: expected an array without a mask, got MaskedArray$", lambda a: {"sabi": np.ma.array(a["sabi"])}),
    ("sabi_masked_constant", TypeError, r"^sabi: expected an array without a mask, got MaskedArray$", lambda a: {"sabi": np.ma.masked}),
    ("kv_lens_masked", TypeError, r"^kv_lens: expected an array without a mask, got MaskedArray$", lambda a: {"kv_lens": np.ma.array([9, 8])}),
    ("mask_masked", TypeError, r"^attn_mask: expected an array without a mask, got MaskedArray$",
     lambda a: {"attn_mask": np.ma.ones((96, 160), bool)}),
    ("sabi_list", TypeError, r"^sabi: expected an array, got list", lambda a: {"sabi": a["sabi"].tolist()}),
    ("entry_beyond", ValueError, r"^sabi: expected .*, got 5 ", lambda a: {"sabi": set_entries(a["sabi"], 0, 5)}),
    ("entry_far_beyond", ValueError, r"^sabi: expected .*, got 2147483647 ", lambda a: {"sabi": set_entries(a["sabi"], 2147483647)}),
    ("entry_int64", ValueError, r"^sabi: expected .*, got 9223372036854775807 ",
     lambda a: {"sabi": set_entries(a["sabi"].astype(np.int64), 2**63 - 1)}),
    ("entry_uint16", ValueError, r"^sabi: expected .*, got 65534 ", lambda a: {"sabi": np.full((1, 1, ROWS, 1), 65534, np.uint16)}),
    ("entry_twice", ValueError, r"^sabi: expected .*, got 3 ", lambda a: {"sabi": set_entries(a["sabi"], 3, 1, 3)}),
    ("block_zero", ValueError, r"^block_shape: expected two sizes of at least 1, got \(0, 32\)", lambda a: {"block_shape": (0, 32)}),
    ("block_negative", ValueError, r"^block_shape: expected .*, got \(32, -1\)", lambda a: {"block_shape": (32, -1)}),
    ("block_float", TypeError, r"^block_shape: expected integers, got float", lambda a: {"block_shape": (32.0, 32)}),
    ("block_number", TypeError, r"^block_shape: expected a pair of integers, got int", lambda a: {"block_shape": 32}),
    ("block_three", ValueError, r"^block_shape: expected a pair of integers, got 3 of them$", lambda a: {"block_shape": (32, 32, 32)}),
    ("block_huge", ValueError, r"^block_shape: expected an integer of 64 bits, got 10+", lambda a: {"block_shape": (10**20, 32)}),
    ("block_none", TypeError, r"^block_shape: expected a pair of integers, got NoneType", lambda a: {"block_shape": None}),
    # ---- lengths
    ("q_lens_count", ValueError, r"^q_lens: expected 2 entries, one per batch entry, got 3", lambda a: {"q_lens": [1, 2, 3]}),
    ("q_lens_negative", ValueError, r"^q_lens: expected lengths from 0 to 96, got -1 at \[1\]", lambda a: {"q_lens": [96, -1]}),
    ("q_lens_beyond", ValueError, r"^q_lens: expected lengths from 0 to 96, got 97", lambda a: {"q_lens": (97, 0)}),
    ("kv_lens_beyond", ValueError, r"^kv_lens: expected lengths from 0 to 160, got 161", lambda a: {"kv_lens": np.array([1, 161])}),
    ("kv_lens_uint64", ValueError, r"^kv_lens: expected lengths from 0 to 160, got",
     lambda a: {"kv_lens": np.array([1, 2**64 - 1], np.uint64)}),
    ("kv_lens_float", TypeError, r"^kv_lens: expected integers, got float64", lambda a: {"kv_lens": np.array([1.0, 2.0])}),
    ("kv_lens_float_items", TypeError, r"^kv_lens: expected integers, got float", lambda a: {"kv_lens": [1, 2.0]}),
    ("kv_lens_rank", ValueError, r"^kv_lens: expected 1 dimension, got 2", lambda a: {"kv_lens": np.ones((2, 1), int)}),
    ("kv_lens_number", TypeError, r"^kv_lens: expected a sequence of integers, got int", lambda a: {"kv_lens": 3}),
    ("kv_lens_string", TypeError, r"^kv_lens: expected a sequence of integers, got str", lambda a: {"kv_lens": "12"}),
    ("kv_lens_of_odd_bits", TypeError, r"^kv_lens: expected integers, got", lambda a: {"kv_lens": dlpack(np.array([1, 2]), bits=24)}),
    ("kv_lens_of_no_bits", TypeError, r"^kv_lens: expected integers, got", lambda a: {"kv_lens": dlpack(np.array([1, 2]), bits=0)}),
    ("kv_lens_negative_size", ValueError, r"^kv_lens: expected dimensions of fewer than 2\^63 bytes, got -2 on axis 0",
     lambda a: {"kv_lens": dlpack(np.array([1, 2]), shape=(-2,))}),
    ("kv_lens_stopped", ValueError, r"^kv_lens: expected integers, got Raising that raises: no index$", lambda a: {"kv_lens": [1, Raising()]}),
    ("heads_of_5000_digits", ValueError, r"^num_heads: expected an integer of 64 bits, got a larger one", lambda a: {"num_heads": 10**5000}),
    ("cumulative_without_tnd", ValueError, r"^cu_seqlens_q: expected none with layout BNSD", lambda a: {"cu_seqlens_q": [0, 96]}),
    # ---- rules and options
    ("scale_nan", ValueError, r"^scale: expected a finite number, got -?nan", lambda a: {"scale": float("nan")}),
    ("scale_inf", ValueError, r"^scale: expected a finite number, got inf", lambda a: {"scale": float("inf")}),
    ("scale_string", TypeError, r"^scale: expected a number, got str", lambda a: {"scale": "0.1"}),
    ("scale_complex", TypeError, r"^scale: expected a number, got complex128", lambda a: {"scale": np.complex128(1)}),
    ("scale_complex64", TypeError, r"^scale: expected a number, got complex64", lambda a: {"scale": np.complex64(1 + 5j)}),
    ("scale_beyond_float32", ValueError, r"^scale: expected a number from -1e\+37 to 1e\+37 with a float32 q, got 1e\+39", lambda a: {"scale": 1e39}),
    ("scale_stopped", ValueError, r"^scale: expected a number, got Raising that raises: no number$", lambda a: {"scale": Raising()}),
    ("causal_stopped", ValueError, r"^causal: expected True or False, got Raising that raises: no truth$", lambda a: {"causal": Raising()}),
    ("layout_surrogate", ValueError, r"^layout: expected a string, got str that raises: 'utf-8'", lambda a: {"layout": "\ud800"}),
    ("layout_null", ValueError, r"^layout: expected a string without null characters, got 'BNSD", lambda a: {"layout": "BNSD\0"}),
    ("dtype_number", TypeError, r"^dtype: expected a dtype or its name, got int", lambda a: {"dtype": 3}),
    ("return_lse_array", TypeError, r"^return_lse: expected True or False, got ndarray",
     lambda a: {"return_lse": np.zeros(2), "out": (a["q"], a["q"])}),
    ("scale_huge", ValueError, r"^scale: expected a finite number, got an integer beyond", lambda a: {"scale": 10**400}),
    ("window_number", TypeError, r"^window: expected a pair of integers, got int", lambda a: {"window": 3}),
    ("window_one", ValueError, r"^window: expected a pair of integers, got 1 of them$", lambda a: {"window": (3,)}),
    ("window_below", ValueError, r"^window: expected .*, got \(-2, 0\)", lambda a: {"window": (-2, 0)}),
    ("window_float", TypeError, r"^window: expected integers, got float", lambda a: {"window": (1, 0.5)}),
    ("causal_string", TypeError, r"^causal: expected True or False, got str", lambda a: {"causal": "yes"}),
    ("causal_none", TypeError, r"^causal: expected True or False, got NoneType", lambda a: {"causal": None}),
    ("return_lse_list", TypeError, r"^return_lse: expected True or False, got list", lambda a: {"return_lse": []}),
    ("layout_unknown", ValueError, r"^layout: expected 'BNSD', 'BSND', 'BSH' or 'TND', got 'BHSD'", lambda a: {"layout": "BHSD"}),
    ("layout_kind", TypeError, r"^layout: expected a string, got int", lambda a: {"layout": 0}),
    ("dtype_unknown", ValueError, r"^dtype: expected 'float32', .*, got 'int8'", lambda a: {"dtype": "int8"}),
    ("dtype_differs", TypeError, r"^q: expected float16 as dtype says, got float32", lambda a: {"dtype": "float16"}),
    ("num_heads_differ", ValueError, r"^num_heads: expected 4 like q, got 8", lambda a: {"num_heads": 8}),
    ("num_kv_heads_differ", ValueError, r"^num_kv_heads: expected 2 like k, got 4", lambda a: {"num_kv_heads": 4}),
    ("num_heads_float", TypeError, r"^num_heads: expected an integer, got float", lambda a: {"num_heads": 4.0}),
    ("threads_zero", ValueError, r"^num_threads: expected a positive number of threads or None, got 0", lambda a: {"num_threads": 0}),
    ("threads_many", ValueError, r"^num_threads: expected .*, got 1000000", lambda a: {"num_threads": 1000000}),
    ("threads_float", TypeError, r"^num_threads: expected an integer, got float", lambda a: {"num_threads": 2.0}),
    # ---- other layouts
    ("bsh_without_heads", ValueError, r"^num_heads: expected num_heads= with layout BSH, whose last axis holds all heads, got no num_heads$",
     lambda a: {"q": a["q"][0], "k": a["k"][0], "v": a["v"][0], "layout": "BSH"}),
    ("bsh_no_heads", ValueError, r"^num_heads: expected .*, got 0$", lambda a: {"q": a["q"][0], "layout": "BSH", "num_heads": 0}),
    ("bsh_heads", ValueError, r"^q: expected a last axis that 5 heads divide", lambda a: {"q": a["q"][0], "layout": "BSH", "num_heads": 5}),
    ("tnd_without_lengths", ValueError, r"^cu_seqlens_q: expected cu_seqlens_q= and cu_seqlens_kv= with layout TND, got no cu_seqlens_q$",
     lambda a: tnd(a, cu_seqlens_q=None)),
    ("tnd_without_kv_lengths", ValueError, r"^cu_seqlens_kv: expected cu_seqlens_q= and cu_seqlens_kv= with layout TND, got no cu_seqlens_kv$",
     lambda a: tnd(a, cu_seqlens_kv=None)),
    ("tnd_q_lens", ValueError, r"^q_lens: expected none with layout TND", lambda a: tnd(a, q_lens=[1])),
    ("tnd_empty", ValueError, r"^cu_seqlens_q: expected at least one number", lambda a: tnd(a, cu_seqlens_q=[], cu_seqlens_kv=[])),
    ("tnd_counts", ValueError, r"^cu_seqlens_kv: expected 2 entries, as many as cu_seqlens_q has, got 3",
     lambda a: tnd(a, cu_seqlens_kv=[0, 1, 2])),
    ("tnd_start", ValueError, r"^cu_seqlens_q: expected 0 at \[0\], got 1", lambda a: tnd(a, cu_seqlens_q=[1, 4])),
    ("tnd_falling", ValueError, r"^cu_seqlens_q: expected rising numbers, got 2 after 3",
     lambda a: tnd(a, cu_seqlens_q=[0, 3, 2, 4], cu_seqlens_kv=[0, 1, 2, 2])),
    ("tnd_end", ValueError, r"^cu_seqlens_kv: expected the last number to be the token count 2, got 3",
     lambda a: tnd(a, cu_seqlens_kv=[0, 3])),
    # ---- outputs (those that the call may not write; `out` of the good call is not given here)
    ("out_read_only", ValueError, r"^out: expected a writable array, got a read-only one", lambda a: {"out": read_only(a["out"])}),
    ("out_is_q", ValueError, r"^out: expected memory of its own, got an array that overlaps q",
     lambda a: {"v": a["q"][:, :HKV], "k": a["q"][:, :HKV].copy(), "out": a["q"]}),
    ("out_in_v", ValueError, r"^out: expected memory of its own, got an array that overlaps v", lambda a: overlapping_v(a)),
    ("out_broadcast", ValueError, r"^out: expected .* their own memory, got",
     lambda a: {"out": as_strided(a["out"], a["out"].shape, (0, 0, 64, 4))}),
    ("out_self_overlap", ValueError, r"^out: expected .* their own memory, got",
     lambda a: {"out": as_strided(a["out"], a["out"].shape, (6144, 1536, 8, 4))}),
    ("out_shape", ValueError, r"^out: expected shape \(2, 4, 96, 16\), got \(2, 4, 96, 15\)",
     lambda a: {"out": np.zeros((B, H, SQ, DV - 1), np.float32)}),
    ("out_rank", ValueError, r"^out: expected shape", lambda a: {"out": a["out"][0]}),
    ("out_dtype", TypeError, r"^out: expected dtype float32, got float64", lambda a: {"out": a["out"].astype(np.float64)}),
    ("out_int", TypeError, r"^out: expected float32, .*, got int32", lambda a: {"out": a["out"].view(np.int32)}),
    ("out_last_axis", ValueError, r"^out: expected a contiguous last axis",
     lambda a: {"out": np.zeros((B, H, DV, SQ), np.float32).swapaxes(2, 3)}),
    ("out_byte_order", TypeError, r"^out: expected native byte order, got >f4", lambda a: {"out": a["out"].astype(">f4")}),
    ("out_kind", TypeError, r"^out: expected an array, got list", lambda a: {"out": [1.0]}),
    ("out_pair_without_lse", ValueError, r"^out: expected an array, or a pair \(out, lse\) with return_lse=True, got a tuple of 2",
     lambda a: {"out": (a["out"], None)}),
    ("out_dlpack_read_only", ValueError, r"^out: expected a writable array", lambda a: {"out": dlpack(a["out"], flags=READ_ONLY)}),
    ("out_dlpack_copy", ValueError, r"^out: expected a writable array", lambda a: {"out": dlpack(a["out"], flags=IS_COPIED)}),
    ("lse_shape", ValueError, r"^lse: expected shape \(2, 4, 96\), got \(2, 4, 95\)",
     lambda a: lse_call(a, np.zeros((B, H, SQ - 1), np.float32))),
    ("lse_dtype", TypeError, r"^lse: expected dtype float32, got float64", lambda a: lse_call(a, np.zeros((B, H, SQ)))),
    ("lse_kind", TypeError, r"^lse: expected float32 or float64, got float16", lambda a: lse_call(a, np.zeros((B, H, SQ), np.float16))),
    ("lse_in_out", ValueError, r"^lse: expected memory of its own, got an array that overlaps out",
     lambda a: lse_call(a, a["out"][..., 0])),
    ("lse_in_k", ValueError, r"^lse: expected memory of its own, got an array that overlaps k",
     lambda a: lse_call(a, a["k"].reshape(-1)[: B * H * SQ].reshape(B, H, SQ))),
]  # fmt: skip


def tnd(a, **changes):
    arguments = {"q": a["q"][0, :, :4].swapaxes(0, 1), "k": a["k"][0, :, :2].swapaxes(0, 1), "v": a["v"][0, :, :2].swapaxes(0, 1)}
    out = np.full((4, H, DV), np.nan, np.float32)
    return arguments | {"sabi": None, "layout": "TND", "cu_seqlens_q": [0, 4], "cu_seqlens_kv": [0, 2], "out": out} | changes


def read_only(x):
    x.flags.writeable = False
    return x


def overlapping_v(a):
    """v and out in one piece of memory, the first byte of out being the last of v."""
    memory = np.full(a["v"].size + a["out"].size - 1, np.nan, np.float32)
    v = memory[: a["v"].size].reshape(a["v"].shape)
    v[...] = a["v"]
    return {"v": v, "out": memory[a["v"].size - 1 :].reshape(a["out"].shape)}


def lse_call(a, lse):
    return {"return_lse": True, "out": (a["out"], lse)}


@pytest.mark.parametrize("name", ["q_lens", "kv_lens", "q_begin", "q_total", "cu_seqlens_q", "cu_seqlens_kv"])
@pytest.mark.parametrize("output", ["out", "lse", "dq", "dk", "dv"])
def test_no_output_lies_in_lengths(output, name):
    x, layout = np.ones((16, 1, 8), np.float32), "TND"
    cu = {"cu_seqlens_q": [0, 16], "cu_seqlens_kv": [0, 16]}
    if name in ("q_lens", "kv_lens"):
        x, layout, cu = x[None], "BSND", {}
    memory = np.zeros(256, np.int64)
    lengths = memory[: len(cu.get(name, [16]))]
    lengths[...] = cu.get(name, [0] if name == "q_begin" else [16])
    rules = {**cu, "layout": layout, name: lengths}
    whole = memory.view(np.float32)[: x.size].reshape(x.shape)
    lse = memory.view(np.float32)[:16].reshape((16, 1) if layout == "TND" else (1, 1, 16))
    before = memory.copy()
    if output in ("out", "lse"):
        call, out = blitz_attn.block_sparse_attention, (whole, None) if output == "out" else (None, lse)
        arguments = (x, x, x), {"return_lse": True, "out": out}
    else:
        call, grads = blitz_attn.block_sparse_attention_backward, tuple(whole if own == output else None for own in ("dq", "dk", "dv"))
        arguments = (x, x, x, x, x, np.zeros_like(lse)), {"grads": grads}
    with pytest.raises(ValueError, match=f"^{output}: expected memory of its own, got an array that overlaps {name}$"):
        call(*arguments[0], **arguments[1], **rules)
    assert (memory == before).all()


def bytes_of(x):
    """What is in an output now."""
    if isinstance(x, tuple):
        return [bytes_of(part) for part in x]
    if isinstance(x, Dlpack):
        x = x.array
    return x.tobytes() if isinstance(x, np.ndarray) else None


def test_the_good_call_is_good():
    arguments = good_call()
    blitz_attn.block_sparse_attention(**arguments)
    assert not np.isnan(arguments["out"]).any()


@pytest.mark.parametrize(("error", "pattern", "changes"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_a_bad_argument_is_named_and_out_is_not_touched(error, pattern, changes):
    arguments = good_call()
    arguments |= changes(arguments)
    before = bytes_of(arguments["out"])
    with pytest.raises(error, match=pattern) as caught:
        blitz_attn.block_sparse_attention(**arguments)
    assert type(caught.value) is error  # pytest.raises lets subclasses pass, too
    assert SENTENCE.match(str(caught.value))
    assert bytes_of(arguments["out"]) == before
    for x in arguments.values():
        if isinstance(x, Dlpack):  # its memory was asked for once, and given back
            assert x.deleted == len(x.capsules) == 1


class Endless:
    """A sequence of so many items that no memory has room for a copy."""

    def __len__(self):
        return 2**62

    def __getitem__(self, i):
        return 1


@pytest.mark.parametrize("lens", [Endless(), as_strided(np.ones(1, np.int8), (2**62,), (0,))], ids=["items", "view"])
def test_lengths_without_end(lens):
    """A copy of 2**62 lengths takes 8 * 2**62 bytes, which is 0 in 64 bits. The size must not be computed like that."""
    with pytest.raises(MemoryError):
        blitz_attn.block_sparse_attention(**(good_call() | {"kv_lens": lens}))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python classes export buffers from 3.12 on")
def test_stopped_buffer():
    with pytest.raises(
        ValueError, match=r"^q: expected an array whose memory can be read, got StoppedBuffer that raises: the exporter has stopped"
    ):
        blitz_attn.block_sparse_attention(**(good_call() | {"q": StoppedBuffer()}))


def test_the_cause_is_kept():
    gone = RuntimeError("gone")
    with pytest.raises(ValueError, match="gone") as caught:
        blitz_attn.block_sparse_attention(**(good_call() | {"q": StoppedDlpack(gone)}))
    assert caught.value.__cause__ is gone


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupts_pass_through(interrupt):
    with pytest.raises(interrupt):
        blitz_attn.block_sparse_attention(**(good_call() | {"k": StoppedDlpack(interrupt())}))


# Objects of many kinds. For any argument most of them are wrong.
ODDITIES = [
    Odd(), Odd, "x", b"xy", 1.5, -1, 2**70, [], [None], {}, {1}, lambda: 0, 1j, NotACapsule(), np.float32(1), np.array("text"), np.array(None),
    np.zeros((0,)),
]  # fmt: skip
ARGUMENTS = [
    "q", "k", "v", "sabi", "block_shape", "scale", "layout", "causal", "window", "q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_kv", "num_heads",
    "num_kv_heads", "return_lse", "out", "dtype", "num_threads",
]  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_any_object_as_an_argument_is_refused_or_accepted(name):
    """Any object as any argument gives a result, or a TypeError or a ValueError that names the argument; no other error, and no crash."""
    refused = 0
    for oddity in ODDITIES:
        arguments = good_call() | {name: oddity}
        try:
            blitz_attn.block_sparse_attention(**arguments)
        except (TypeError, ValueError) as error:
            refused += 1
            assert str(error).startswith(name)
    # Were few refused, the loop would have tested little. A flag takes most objects that have a truth value, and refuses strings and arrays.
    assert refused >= (2 if name in ("causal", "return_lse") else 10)


def refuse_everything(watched, x):
    """Runs every wrong call, and two that hold the arrays of `watched` and `x` when they fail."""
    kept = {name: watched[name] for name in ("k", "v", "sabi", "out")}
    for _id, _error, _pattern, changes in CASES:
        fresh = good_call()
        for arguments in (fresh | changes(fresh), kept | {"q": x, "block_shape": (32, 32)}, watched | {"scale": "no"}):
            with pytest.raises((TypeError, ValueError)):
                blitz_attn.block_sparse_attention(**arguments)


def test_nothing_is_held_after_an_error():
    """Buffers and capsules are let go on every path: arrays can be resized and reference counts are as before."""
    memory = array("f", [0.0] * (SQ * D))
    x = memoryview(memory).cast("B").cast("f", (1, 1, SQ, D))
    watched = good_call()
    arrays = [name for name, value in watched.items() if isinstance(value, np.ndarray)]
    counts = {name: sys.getrefcount(watched[name]) for name in arrays}
    refuse_everything(watched, x)
    gc.collect()
    assert {name: sys.getrefcount(watched[name]) for name in arrays} == counts
    x.release()
    memory.append(0.0)  # BufferError while anyone holds it


# ---- Merging ------------------------------------------------------------------------------------------------------


def states():
    out, lse = np.ones((B, H, SQ, DV), np.float32), np.zeros((B, H, SQ), np.float32)
    return {
        "out_a": out,
        "lse_a": lse,
        "out_b": out.copy(),
        "lse_b": lse.copy(),
        "out": np.full_like(out, np.nan),
        "lse_out": np.full_like(lse, np.nan),
    }


MERGE_CASES = [
    ("rank", ValueError, r"^out_b: expected shape \(4, 96, 16\) like out_a, got \(2, 4, 96, 16\)$", lambda a: {"out_a": a["out_a"][0]}),
    ("shape", ValueError, r"^out_b: expected shape \(2, 4, 96, 16\) like out_a, got", lambda a: {"out_b": a["out_b"][..., :8]}),
    ("dtype", TypeError, r"^out_b: expected dtype float32 like", lambda a: {"out_b": a["out_b"].astype(np.float16)}),
    ("kind", TypeError, r"^out_b: expected float32, .*, got int64", lambda a: {"out_b": a["out_b"].astype(np.int64)}),
    ("list", TypeError, r"^lse_a: expected an array, got list", lambda a: {"lse_a": a["lse_a"].tolist()}),
    ("lse_shape", ValueError, r"^lse_b: expected shape \(2, 4, 96\)", lambda a: {"lse_b": a["lse_b"][:1]}),
    ("lse_dtype", TypeError, r"^lse_b: expected dtype float32", lambda a: {"lse_b": a["lse_b"].astype(np.float64)}),
    ("lse_kind", TypeError, r"^lse_b: expected float32 or float64, got float16", lambda a: {"lse_b": a["lse_b"].astype(np.float16)}),
    ("last_axis", ValueError, r"^out_a: expected a contiguous last axis", lambda a: {"out_a": a["out_a"].repeat(2, -1)[..., ::2]}),
    ("out_in_a", ValueError, r"^out: expected memory of its own, got an array that overlaps out", lambda a: {"out": a["out_a"]}),
    ("out_read_only", ValueError, r"^out: expected a writable array", lambda a: {"out": read_only(a["out"])}),
    ("out_shape", ValueError, r"^out: expected shape", lambda a: {"out": a["out"][:1]}),
    ("lse_out_shape", ValueError, r"^lse_out: expected shape", lambda a: {"lse_out": a["lse_out"][:1]}),
    ("lse_out_in_lse", ValueError, r"^lse_out: expected memory of its own", lambda a: {"lse_out": a["lse_b"]}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "pattern", "changes"), [pytest.param(*case[1:], id=case[0]) for case in MERGE_CASES])
def test_merge_refused(error, pattern, changes):
    arguments = states()
    arguments |= changes(arguments)
    before = [bytes_of(arguments[name]) for name in ("out", "lse_out")]
    with pytest.raises(error, match=pattern) as caught:
        blitz_attn.merge_states(**arguments)
    assert SENTENCE.match(str(caught.value))
    assert [bytes_of(arguments[name]) for name in ("out", "lse_out")] == before


def test_merge_counts():
    out, lse = np.ones((1, 1, 2, 2), np.float32), np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ValueError, match=r"^outs: expected at least 1 array, got 0"):
        blitz_attn.merge_states_n([], [])
    with pytest.raises(ValueError, match=r"^lses: expected 2 arrays, one for each of outs, got 1"):
        blitz_attn.merge_states_n([out, out], [lse])


# ---- What is unusual and fine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (2, 2, 0, 8)], ids=["no_batch", "no_queries"])
def test_empty_is_fine(shape):
    q = np.zeros(shape, np.float32)
    k = np.zeros((shape[0], 1, 8, 8), np.float32)
    for sabi in (None, np.zeros((1, 1, 1 if shape[2] else 0, 1), np.int32)):
        out, lse = blitz_attn.block_sparse_attention(q, k, k, sabi, return_lse=True)
        assert out.shape == shape
        assert lse.shape == shape[:3]


def test_no_keys_at_all():
    q, k = np.ones((1, 2, 5, 8), np.float32), np.ones((1, 1, 0, 8), np.float32)
    out, lse = blitz_attn.block_sparse_attention(q, k, k, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_no_sequences():
    x = np.zeros((0, 2, 8), np.float32)
    out, lse = blitz_attn.block_sparse_attention(x, x, x, layout="TND", cu_seqlens_q=[0], cu_seqlens_kv=[0], return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


@pytest.mark.parametrize("block_shape", [(2**61, 8), (2**62, 2**62), (2**63 - 1, 1), (4, 2**63 - 1)])
@pytest.mark.parametrize("heads", [1, 8])
def test_blocks_of_any_size(block_shape, heads):
    """Sizes whose product with the heads of a group, or with a number of columns, is beyond 64 bits."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((1, 8, 4, 16)).astype(np.float32), rng.standard_normal((1, 1, 4, 16)).astype(np.float32)
    sabi = np.arange(-(-4 // block_shape[1]), dtype=np.int32).reshape(1, 1, 1, -1).repeat(heads, 1)
    expected = blitz_attn.block_sparse_attention(q, k, k)
    np.testing.assert_allclose(blitz_attn.block_sparse_attention(q, k, k, sabi, block_shape=block_shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2**40, 0, 4), (2**40, 1, 0, 4), (0, 2**40, 4, 4)], ids=["heads", "batch", "no_batch"])
def test_empty_takes_no_time(shape):
    q = np.empty(shape, np.float32)
    assert blitz_attn.block_sparse_attention(q, q, q).shape == shape
    grads = blitz_attn.block_sparse_attention_backward(q, q, q, q, q, np.empty(shape[:3], np.float32))
    assert [grad.shape for grad in grads] == [shape] * 3


def test_strides_of_single_places():
    """Where an axis has one place, its stride may be any number."""
    x = np.random.default_rng(4).standard_normal((1, 1, 5, 8)).astype(np.float32)
    odd = as_strided(x, x.shape, (-(2**63), 2**62 + 4, *x.strides[2:]))
    assert (blitz_attn.block_sparse_attention(odd, odd, odd) == blitz_attn.block_sparse_attention(x, x, x)).all()


@pytest.mark.parametrize("scalar", [np.datetime64("2020-01-01"), np.timedelta64(3, "D"), np.datetime64("NaT")])
@pytest.mark.parametrize("name", ["q", "sabi", "q_lens", "out"])
def test_scalars_of_dates(scalar, name):
    """NumPy exports them as buffers without strides."""
    x = np.ones((8, 1, 8, 8), np.float32)
    arguments = {"q": x, "k": x, "v": x, name: scalar}
    with pytest.raises(TypeError, match=f"^{name}: expected "):
        blitz_attn.block_sparse_attention(**arguments)


@pytest.mark.parametrize("num_threads", [1, 2, 8, 64])
def test_the_first_of_two_bad_entries_is_reported(num_threads):
    """In the order of the lists, whatever the number of threads, and so of tiles per item."""
    q, k = np.zeros((1, 2, 8192, 8), np.float32), np.zeros((1, 1, 8192, 8), np.float32)
    lists = np.tile(np.arange(3), (1, 2, 64, 1))
    lists[0, 0, 1, 2] = lists[0, 1, 0, 2] = 99
    with pytest.raises(ValueError, match=r"^sabi: .*99.*\[0, 0, 1, 2\]"):
        blitz_attn.block_sparse_attention(q, k, k, lists, num_threads=num_threads)


X = np.ones((1, 1, 8, 8), np.float32)
BYTES = np.ones((1, 8, 1, 8), np.int8)
EIGHT = {"q": X[0, :, :1], "k_cache": BYTES, "v_cache": BYTES, "block_tables": np.zeros((1, 1), np.int32), "seq_lens": [8]}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("1.0000001", lambda: blitz_attn.select_blocks_prefill(X, X, density=1.0000001)),
        ("1.0000000000000002", lambda: blitz_attn.select_blocks_prefill(X, X, top_p=1 + 2.0**-52)),
        ("-1e-300", lambda: blitz_attn.select_blocks_prefill(X, X, threshold=-1e-300)),
        ("-0.123456789", lambda: blitz_attn.block_sparse_attention(X, X, X, softcap=-0.123456789)),
        ("1.00000001e+37", lambda: blitz_attn.block_sparse_attention(X, X, X, scale=1.00000001e37)),
        ("1e+38", lambda: blitz_attn.block_sparse_attention(X, X, X, softcap=1e38)),
        ("-0.1", lambda: blitz_attn.paged_attention(**EIGHT, k_scale=-0.1, v_scale=1)),  # the scale is float32, whose number is written as 0.1
        ("-1.0000001", lambda: blitz_attn.paged_attention(**EIGHT, k_scale=-1 - 2.0**-23, v_scale=1)),
        ("1.0000000000000001e+200 at place 3 of row 0", lambda: blitz_attn.quantize_kv([[0, 0, 0, 1e200 * (1 + 2.0**-52)]] * np.ones((1, 4)), "int8")),
        ("1.0000001", lambda: select.calibrate([[(X, X, X)]], target=1.0000001)),
        ("1.0000001", lambda: select.allocate([[(X, X, X, X)]], density=1.0000001)),
        ("1.0000001", lambda: blitz_attn.sabi.frame_plan(4, 4, 1.0000001)),
        ("-0.123456789", lambda: plot.plot_mask(np.zeros((1, 1, 1, 1), np.int32), dpi=-0.123456789)),
        ("a stride of 1048577 elements", lambda: blitz_attn.nsa.compute_gates(as_strided(X, (1, 1, 1, 8), (4, 4, 4, 4 * 1048577)))),
    ],
)  # fmt: skip
def test_numbers_are_written_so_that_they_read_as_themselves(text, call):
    with pytest.raises(ValueError, match=f", got {re.escape(text)}$"):
        call()
