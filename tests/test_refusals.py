"""Every wrong call is refused before any work, by one sentence that names the argument, what was expected and what the call got."""

import gc
import random
import sys
from array import array

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import blitz_attn
from exporters import Dlpack, StoppedBuffer, StoppedDlpack
from fuzz.bad_calls import SENTENCE, Call
from fuzz.good_calls import GROUPS
from fuzz.refusals import REFUSALS, valid
from fuzz.unusual_values import OBJECTS

ROWS = [pytest.param(name, row, id=f"{name}-{row.sentence[:70]}") for name, rows in REFUSALS.items() for row in rows]
BLOCK_SPARSE = "block_sparse.block_sparse_attention"


def wrong(name, row, **more):
    """The call that a row describes, for a test to make."""
    call = Call(name, valid(name), row.variety)
    call.arguments = row.apply(call.arguments) | more
    return call


def refused(call, error, pattern=None):
    """Makes a call that must be refused, checks that it writes nothing, and returns the exception."""
    before = call.arena.memory.copy()
    with pytest.raises(error, match=pattern) as caught:
        call.good.call(**call.arguments)
    assert np.array_equal(call.arena.memory, before)
    return caught


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_wrong_call_is_refused_by_its_sentence(name, row):
    call = wrong(name, row)
    caught = refused(call, row.error, f"^{row.pattern}$")
    assert type(caught.value) is row.error  # pytest.raises accepts subclasses, too
    assert SENTENCE.fullmatch(str(caught.value))
    for x in call.arguments.values():
        if isinstance(x, Dlpack):  # its memory was requested once, and released
            assert x.deleted == len(x.capsules) == 1


@pytest.mark.parametrize(("name", "variety"), sorted({(name, row.variety) for name, rows in REFUSALS.items() for row in rows}))
def test_the_valid_call_is_valid(name, variety):
    call = Call(name, valid(name), variety)
    call.good.call(**call.arguments)


# ---- With KV splits -------------------------------------------------------------------------------------------------

CHUNKED = ("paged.paged_attention", "paged.paged_select_attention")
NOT_CHUNKED = {"kv_split", "selected_size"}


def sentence(call):
    return str(refused(call, (TypeError, ValueError)).value)


@pytest.mark.parametrize(("name", "row"), [x for x in ROWS if x.values[0] in CHUNKED and not NOT_CHUNKED & x.values[1].changes.keys()])
def test_a_call_with_kv_splits_is_refused_by_the_same_sentence(name, row):
    refused(wrong(name, row, kv_split=8), row.error, f"^{row.pattern}$")


@pytest.mark.parametrize("name", CHUNKED)
def test_of_two_mistakes_a_call_with_kv_splits_names_the_same_one(name):
    rows = [row for row in REFUSALS[name] if row.variety == 0 and not NOT_CHUNKED & row.changes.keys()]
    for first, second in random.Random(0).sample([(a, b) for a in rows for b in rows if not a.changes.keys() & b.changes.keys()], 200):
        both = first._replace(changes=first.changes | second.changes)
        assert sentence(wrong(name, both, kv_split=8)) == sentence(wrong(name, both)), (first.sentence, second.sentence)


# ---- What holds for any argument --------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["q_lens", "kv_lens", "q_begin", "q_total", "cu_seqlens_q", "cu_seqlens_kv"])
@pytest.mark.parametrize("output", ["out", "lse", "dq", "dk", "dv"])
def test_outputs_must_not_overlap_lengths(output, name):
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
        call, arguments = blitz_attn.block_sparse_attention, (x, x, x)
        rules |= {"return_lse": True, "out": (whole, None) if output == "out" else (None, lse)}
    else:
        call, arguments = blitz_attn.block_sparse_attention_backward, (x, x, x, x, x, np.zeros_like(lse))
        rules["grads"] = tuple(whole if own == output else None for own in ("dq", "dk", "dv"))
    with pytest.raises(ValueError, match=f"^{output}: expected memory of its own, got an array that overlaps {name}$"):
        call(*arguments, **rules)
    assert (memory == before).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "sinks", "selected"])
@pytest.mark.parametrize("kv_split", [None, 8])
def test_the_log_sum_exp_must_not_overlap_an_input(name, kv_split):
    call = Call("", valid("paged.paged_select_attention"), 20)
    given = call.arguments[name]
    given = np.abs(given, out=given) if "scale" in name else given
    lse = as_strided(given.reshape(-1)[-1:].view(np.float32), (2, 4), (16, 4))
    call.arguments |= {"kv_split": kv_split, "return_lse": True, "out": (None, lse), "attn_mask": None, "alibi_slopes": None}
    refused(call, ValueError, f"^lse: expected memory of its own, got an array that overlaps {name}$")


@pytest.mark.parametrize("lens", [OBJECTS["len is huge"](), as_strided(np.ones(1, np.int8), (2**62,), (0,))], ids=["items", "view"])
def test_lengths_without_end(lens):
    """A copy of 2**62 lengths takes 8 * 2**62 bytes, which overflows to 0 in 64 bits. The call must notice the overflow."""
    with pytest.raises(MemoryError):
        GROUPS["block_sparse"]["block_sparse_attention"].call(**Call("", valid(BLOCK_SPARSE), 0).arguments | {"kv_lens": lens})


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python classes export buffers from 3.12 on")
def test_stopped_buffer():
    call = Call("", valid(BLOCK_SPARSE), 0)
    call.arguments["q"] = StoppedBuffer()
    refused(call, ValueError, "^q: expected an array whose memory can be read, got StoppedBuffer that raises: the exporter has stopped")


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt(), SystemExit(), MemoryError()], ids=repr)
def test_errors_of_exporters_are_the_cause_and_interrupts_pass_through(error):
    call = Call("", valid(BLOCK_SPARSE), 0)
    call.arguments["k"] = StoppedDlpack(error)
    caught = refused(call, ValueError if isinstance(error, RuntimeError) else type(error))
    assert error in (caught.value, caught.value.__cause__)


def test_nothing_is_held_after_an_error():
    """Buffers and capsules are released on every path: arrays can be resized, and reference counts are as before."""
    memory = array("f", [0.0] * 128)
    x = memoryview(memory).cast("B").cast("f", (1, 1, 16, 8))
    watched = Call("", valid(BLOCK_SPARSE), 15).arguments
    held = {name: value for name, value in watched.items() if isinstance(value, np.ndarray)}
    counts = {name: sys.getrefcount(value) for name, value in held.items()}
    for row in REFUSALS[BLOCK_SPARSE]:
        for arguments in (wrong(BLOCK_SPARSE, row).arguments, watched | {"q": x, "scale": "no"}, watched | {"scale": "no"}):
            with pytest.raises((TypeError, ValueError)):
                blitz_attn.block_sparse_attention(**arguments)
    del arguments
    gc.collect()
    assert {name: sys.getrefcount(value) for name, value in held.items()} == counts
    x.release()
    memory.append(0.0)  # raises BufferError if the buffer is still held


@pytest.mark.parametrize("num_threads", [1, 2, 8, 64])
def test_the_first_of_two_bad_entries_is_reported(num_threads):
    """The first bad entry in the order of the lists is reported for any number of threads, which changes how many tiles an item has."""
    q, k = np.zeros((1, 2, 8192, 8), np.float32), np.zeros((1, 1, 8192, 8), np.float32)
    lists = np.tile(np.arange(3), (1, 2, 64, 1))
    lists[0, 0, 1, 2] = lists[0, 1, 0, 2] = 99
    with pytest.raises(ValueError, match=r"^sabi: .*99.*\[0, 0, 1, 2\]"):
        blitz_attn.block_sparse_attention(q, k, k, lists, num_threads=num_threads)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_the_first_number_that_cannot_be_quantised_is_reported(number, dtype):
    """The first bad element in the order of the written tokens is reported, whichever thread finds it."""
    v = np.ones((300, 2, 8), dtype)
    for place in [(3, 0, 0), (70, 1, 5), (70, 1, 7), (200, 0, 3), (299, 1, 1)]:
        v[place] = number
    caches, slots = np.zeros((2, 40, 8, 2, 8), np.int8), np.where(np.arange(300) == 3, -1, np.arange(300))
    scales = np.zeros((2, 40, 8, 2), np.float32)
    sentence = rf"^v: expected finite numbers to quantise, within float32's range, got {number} at \[70, 1, 5\]$"
    for threads in (1, 3):
        with pytest.raises(ValueError, match=sentence):
            blitz_attn.append_paged_kv(
                np.ones_like(v), v, *caches, slot_mapping=slots, k_scale=scales[0], v_scale=scales[1], num_threads=threads
            )
        assert not caches.any()


# ---- Unusual calls that are valid -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (2, 2, 0, 8), (1, 2**40, 0, 4), (2**40, 1, 0, 4), (0, 2**40, 4, 4)], ids=str)
def test_empty_arrays_are_valid_and_take_no_time(shape):
    q = np.empty(shape, np.float32)
    for sabi in (None, np.zeros((1, 1, 1 if shape[2] else 0, 1), np.int32)):
        out, lse = blitz_attn.block_sparse_attention(q, q, q, sabi, return_lse=True)
        assert (out.shape, lse.shape) == (shape, shape[:3])
    grads = blitz_attn.block_sparse_attention_backward(q, q, q, q, q, np.empty(shape[:3], np.float32))
    assert [grad.shape for grad in grads] == [shape] * 3


@pytest.mark.parametrize("block_shape", [(2**61, 8), (2**62, 2**62), (2**63 - 1, 1), (4, 2**63 - 1)])
@pytest.mark.parametrize("heads", [1, 8])
def test_blocks_of_any_size(block_shape, heads):
    """The product of these sizes with the heads of a group, or with a number of columns, exceeds 64 bits."""
    q, k = (np.random.default_rng(3).standard_normal((1, n, 4, 16), np.float32) for n in (8, 1))
    sabi = np.arange(-(-4 // block_shape[1]), dtype=np.int32).reshape(1, 1, 1, -1).repeat(heads, 1)
    expected = blitz_attn.block_sparse_attention(q, k, k)
    np.testing.assert_allclose(blitz_attn.block_sparse_attention(q, k, k, sabi, block_shape=block_shape), expected, rtol=1e-5, atol=1e-6)


def test_strides_of_axes_of_length_one():
    """An axis of length 1 may have any stride."""
    x = np.random.default_rng(4).standard_normal((1, 1, 5, 8)).astype(np.float32)
    odd = as_strided(x, x.shape, (-(2**63), 2**62 + 4, *x.strides[2:]))
    assert (blitz_attn.block_sparse_attention(odd, odd, odd) == blitz_attn.block_sparse_attention(x, x, x)).all()


@pytest.mark.parametrize(
    "options",
    [{"softcap": 1e-200}, {"out_dtype": "float32", "dtype": "bfloat16"}, {"out_dtype": "bfloat16"}, {"out_dtype": "float64"},
     {"kv_dtype": "float8_e4m3", "dtype": "float16"}, {"kv_dtype": "int8", "out_dtype": "float16"}, {"kv_dtype": "bfloat16"}],
)  # fmt: skip
def test_a_plan_takes_options_that_some_call_can_have(options):
    blitz_attn.PagedPlan(np.array([[3, 1], [0, 9]]), [6, 4], page_size=4, **options)
