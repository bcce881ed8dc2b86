"""Every kind of array is read without a copy. Tensors and JAX arrays give results of their own kind, and all others NumPy arrays."""

import tracemalloc
from array import array
from functools import partial

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import blitz_attn
from blitz_attn import _core, select, testing
from cases import same_bits
from exporters import CUDA, Dlpack

FLOATS = ["float32", "float16", "float64"]


def problem(dtype="float32"):
    """The arrays of a small call with grouped heads, and its options, with a block list."""
    q, k, v = testing.make_qkv(2, 4, 2, 40, 56, 24, 16, dtype=dtype)
    sabi = np.array([[[[0, 2, -1], [3, -1, -1], [1, 0, 3]]]], np.int32)
    return q, k, v, {"sabi": sabi, "block_shape": (16, 16), "causal": True, "return_lse": True}


def bfloat16_bits():
    q, k, v, options = problem("float32")
    bits = [np.ascontiguousarray(x).view(np.uint32) >> 16 for x in (q, k, v)]
    return *(x.astype(np.uint16) for x in bits), options


def attend(*arguments, **options):
    return blitz_attn.block_sparse_attention(*arguments, **options)


def bits_result():
    q, k, v, options = bfloat16_bits()
    return attend(q, k, v, dtype="bfloat16", **options)


# ---- NumPy --------------------------------------------------------------------------------------------------------


def test_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, options = bfloat16_bits()
    for dtype in (None, "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        out, lse = attend(*(x.view(ml_dtypes.bfloat16) for x in (q, k, v)), dtype=dtype, **options)
        assert (out.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)
        assert same_bits(out.view(np.uint16), bits_result()[0])
        assert same_bits(lse, bits_result()[1])


def test_subclass():
    class Labelled(np.ndarray):
        pass

    q, k, v, options = problem()
    out, _ = attend(q.view(Labelled), k.view(Labelled), v, **options)
    assert same_bits(np.asarray(out), attend(q, k, v, **options)[0])


# ---- Views --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [np.s_[:1, :1], np.s_[:, :, :1]], ids=["heads", "tokens"])
def test_broadcast_views(place):
    q, k, v, options = problem()
    wide = [np.broadcast_to(x[place], x.shape) for x in (q, k, v)]
    assert 0 in wide[0].strides
    expected = attend(*(np.ascontiguousarray(x) for x in wide), **options)
    options["sabi"] = np.broadcast_to(options["sabi"], (2, 4, 3, 3))
    assert same_bits(attend(*wide, **options)[0], expected[0])


def test_strides_of_axes_of_length_one_do_not_matter():
    q, k, v = testing.make_qkv(1, 1, 1, 5, 7, 1)
    odd = [as_strided(x, x.shape, (3, -5, x.strides[2], 77)) for x in (q, k, v)]
    assert same_bits(attend(*odd), attend(q, k, v))


def test_nothing_is_copied():
    """The memory of Python's allocator grows by the results, and not by the inputs, even if the inputs are strided."""
    q, k, v = testing.make_qkv(1, 2, 2, 64, 16384, 64)
    k, v = k[:, ::-1, ::-1], v[:, ::-1, ::-1]
    tracemalloc.start()
    out = attend(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes + 10_000 < k.nbytes / 10


# ---- Other buffers ------------------------------------------------------------------------------------------------


def test_memoryview():
    q, k, v, options = problem()
    out, lse = attend(*(memoryview(x) for x in (q, k, v)), **options)
    assert (type(out), type(lse)) == (np.ndarray, np.ndarray)
    assert same_bits(out, attend(q, k, v, **options)[0])


def test_array_module():
    q, k, v = testing.make_qkv(1, 1, 1, 6, 6, 8)
    flat = [array("f", x.ravel().tolist()) for x in (q, k, v)]
    views = [memoryview(x).cast("B").cast("f", (1, 1, 6, 8)) for x in flat]
    lengths = array("q", [4])
    assert same_bits(attend(*views, kv_lens=lengths), attend(q, k, v, kv_lens=[4]))


# ---- DLPack -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)], ids=["unversioned", "1.0", "1.3"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dlpack(dtype, version):
    q, k, v, options = problem(dtype)
    exporters = [Dlpack(x, version=version) for x in (q, k, v)]
    out, _ = attend(*exporters, **options)
    assert same_bits(out, attend(q, k, v, **options)[0])
    for exporter in exporters:
        assert exporter.deleted == 1
        assert exporter.names == ["used_dltensor" if version is None else "used_dltensor_versioned"]


def test_dlpack_compact_and_offset():
    q, k, v, options = problem()
    late = Dlpack(q[1:], data=q.ctypes.data, byte_offset=q.strides[0], compact_strides=True)
    expected, _ = attend(q[1:], k[1:], v[1:], **options)
    assert same_bits(attend(late, k[1:], v[1:], **options)[0], expected)


@pytest.mark.parametrize("version", [None, (1, 0)], ids=["unversioned", "1.0"])
def test_dlpack_out(version):
    q, k, v, options = problem()
    out = Dlpack(np.zeros((2, 4, 40, 16), np.float32), version=version)
    assert attend(q, k, v, out=out, **options)[0] is out
    assert same_bits(out.array, attend(q, k, v, **options)[0])
    assert out.deleted == 1


def test_dlpack_is_let_go_when_refused():
    q, k, v, options = problem()
    held, refused = Dlpack(q), Dlpack(k, device_type=CUDA)
    with pytest.raises(TypeError, match=r"^k: expected an array in CPU memory"):
        attend(held, refused, v, **options)
    assert (held.deleted, refused.deleted) == (1, 1)


# ---- torch --------------------------------------------------------------------------------------------------------


def test_torch_tensors_that_need_a_gradient_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 1, 16, 8) for _ in range(3))
    expected = attend(q, k, v)
    k.requires_grad_()
    with pytest.raises(
        ValueError, match=r"^k: expected a tensor that needs no gradient, got .*: detach it or call under torch\.no_grad\(\)$"
    ):
        attend(q, k, v)
    with torch.no_grad():
        assert torch.equal(attend(q, k, v), expected)
    assert torch.equal(attend(q, k.detach(), v), expected)


def test_choosing_and_judging_take_tensors_that_need_a_gradient():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, 96, 8, requires_grad=True) for _ in range(3))
    plain = [x.detach() for x in (q, k, v)]
    lists = blitz_attn.select_blocks_prefill(q, k, top_k=1, sink=0, recent=1, block_shape=(16, 16), causal=True)
    assert torch.equal(lists, blitz_attn.select_blocks_prefill(*plain[:2], top_k=1, sink=0, recent=1, block_shape=(16, 16), causal=True))
    sinks = torch.zeros(2, requires_grad=True)
    options = {"block_shape": (16, 16), "causal": True, "sinks": sinks}
    assert select.output_error(q, k, v, lists, **options).shape == (1, 2)
    del options["sinks"]
    assert select.recall(q, k, lists, **options).max() <= 1
    assert select.calibrate([[(q, k, v)]], target=0.8, steps=2, block_shape=(16, 16)).heads == 2
    rows = [x.swapaxes(1, 2) for x in (q, k, v)]
    k_cmp = blitz_attn.nsa.compress_kv(*(x.detach() for x in rows[1:]), 16)[0].requires_grad_()
    assert blitz_attn.nsa.score_and_select_blocks(rows[0], k_cmp, 3, 16, compress_stride=16).shape == (1, 2, 96, 3)
    token, cache, tables = q[0, :, :1].swapaxes(0, 1).contiguous(), k[0].reshape(6, 16, 2, 8), np.arange(6)[None]
    assert blitz_attn.select_blocks(token, cache, tables, [96], 2, method="max")[0].shape == (1, 2, 2)
    for call in (
        lambda: blitz_attn.select_blocks_prefill(q, k, top_k=1, return_scores=True),
        lambda: blitz_attn.select_blocks(token, cache, tables, [96], 2, method="max", return_scores=True),
        lambda: blitz_attn.select_and_attend_prefill(q, k, v, top_k=1),
    ):
        with pytest.raises(ValueError, match="expected a tensor that needs no gradient"):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_torch_tensors_with_a_tangent_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 1, 16, 8) for _ in range(3))
    sentence = (
        "^k: expected a tensor without a forward-mode tangent, got one of torch.func.jvp or a dual tensor, whose tangent would be lost"
    )
    with pytest.raises(ValueError, match=sentence):
        torch.func.jvp(lambda x: attend(q, x, v), (k,), (torch.ones_like(k),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(ValueError, match=sentence):
            attend(q, dual, v)
        assert torch.equal(attend(q, dual.detach(), v), attend(q, k, v))


def written_arrays(torch):
    """Calls that write tensors, by name: the call, arguments with which it is refused, and the tensors."""
    x, cache, lse = torch.randn(1, 1, 16, 8), torch.randn(4, 4, 1, 8), torch.zeros(1, 1, 16)
    tokens, places, few = x[0].transpose(0, 1), torch.arange(16), {"num_threads": -1}
    tables, high, low = torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
    row, numbers = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32)
    dx, heads, eight, scales = torch.zeros_like(x), torch.zeros(1, 1, 8), torch.zeros(4, 4, 1, 8, dtype=torch.int8), torch.zeros(4, 4, 1)
    requests = {"block_tables": tables, "seq_lens": [16], "q_lens": [16]}
    out, part_lse = attend(x, x, x, return_lse=True)
    append = blitz_attn.append_paged_kv
    return {
        "out": (partial(attend, x, x, x, out=(dx, lse), return_lse=True), few, (dx, lse)),
        "gradients": (partial(blitz_attn.block_sparse_attention_backward, x, x, x, x, out, part_lse, grads=(dx, None, None)), few, (dx,)),
        "merge": (
            partial(blitz_attn.merge_states, out, part_lse, out, lse_b=part_lse, out=dx, lse_out=lse), {"lse_b": part_lse[..., 1:]},
            (dx, lse),
        ),
        "decode": (partial(blitz_attn.paged_attention, x[:, :, 0], cache, cache, tables, [16], out=heads), few, (heads,)),
        "split": (partial(blitz_attn.paged_attention, x[:, :, 0], cache, cache, tables, [16], out=heads, kv_split=4), few, (heads,)),
        "nsa": (partial(blitz_attn.nsa.nsa, q=x.transpose(1, 2), k=x.transpose(1, 2), v=x.transpose(1, 2), out=dx.transpose(1, 2)), {"q": dx.transpose(1, 2)}, (dx,)),
        "append": (partial(append, tokens, tokens, cache, cache.clone(), slot_mapping=places), few, (cache,)),
        "append with scales": (partial(append, tokens, None, eight, None, k_scale=scales, **requests), few, (eight, scales)),
        "append with summaries": (
            partial(append, tokens, None, cache, None, maxblocks=high, minblocks=low, metadata_block_tables=row, **requests), few,
            (cache, high, low),
        ),
        "summaries": (partial(blitz_attn.quest_prefill_metadata, cache, tables, [16], row, high, low), few, (high, low)),
        "chosen pages": (
            partial(blitz_attn.quest_block_select_paged_in_out, heads, high, low, row, seq_lens=[16], selected_indices=numbers),
            {"seq_lens": [-1]}, (numbers,),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "out",
        "gradients",
        "merge",
        "decode",
        "split",
        "nsa",
        "append",
        "append with scales",
        "append with summaries",
        "summaries",
        "chosen pages",
    ],
)
def test_torch_notices_what_is_written(name):
    """A call raises the versions of the tensors that it writes, but a refused call does not."""
    torch = pytest.importorskip("torch")
    call, bad, arrays = written_arrays(torch)[name]
    before = [x._version for x in arrays]
    with pytest.raises(ValueError, match=": expected "):
        call(**bad)
    assert [x._version for x in arrays] == before
    call()
    assert all(x._version > version for x, version in zip(arrays, before, strict=True))


def test_torch_refuses_gradients_through_what_is_written():
    torch = pytest.importorskip("torch")
    x, factor = torch.randn(1, 1, 16, 8), torch.ones(1, 1, 16, 8)
    result = (torch.ones(1, 1, 16, 8, requires_grad=True) * factor).sum()
    attend(x, x, x, out=factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_torch_negative_bit():
    """A tensor with the negative bit is a view of memory that holds its elements with the opposite sign."""
    torch = pytest.importorskip("torch")
    negative = torch.randn(1, 1, 16, 1, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    q = torch.zeros(1, 1, 16, 8)
    assert torch.equal(attend(q, q, negative), attend(q, q, negative.resolve_neg()))
    weights = torch.full((1, 1, 16), 0.5)
    merged = blitz_attn.merge_states(negative, weights, negative, weights)[0]
    torch.testing.assert_close(merged, negative.resolve_neg())
    with pytest.raises(ValueError, match="^out: expected a tensor whose memory holds its numbers, got one with torch's negative bit$"):
        attend(q, q, q[..., :1].clone(), out=negative)


_FLOATS = "expected float32, float16, bfloat16 or float64"
_CACHES = "expected float32, float16, bfloat16, float64, int8 or float8_e4m3"


@pytest.mark.parametrize("kind", ["float8_e5m2", "float8_e4m3fn", "int4"])
def test_ml_dtypes_that_are_not_read_are_named(kind):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.zeros((1, 1, 16, 8), getattr(ml_dtypes, kind))
    real, lse = x.astype(np.float32), np.zeros((1, 1, 16), np.float32)
    with pytest.raises(TypeError, match=f"^q: {_FLOATS}, got {kind}$"):
        attend(x, x, x)
    with pytest.raises(TypeError, match=f"^k: {_FLOATS}, got {kind}$"):
        attend(real, x, real)
    with pytest.raises(TypeError, match=f"^out_a: {_FLOATS}, got {kind}$"):
        blitz_attn.merge_states(x, lse, x, lse)
    if kind != "float8_e4m3fn":
        cache, q = x.reshape(4, 4, 1, 8), np.zeros((1, 1, 8), np.float32)
        with pytest.raises(TypeError, match=f"^k_cache: {_CACHES}, got {kind}$"):
            blitz_attn.paged_attention(q, cache, cache, np.arange(4, dtype=np.int32)[None], np.array([16]))


def test_torch_float8_is_named():
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 1, 16, 8).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=f"^q: {_FLOATS}, got torch.float8_e4m3fn$"):
        attend(x, x, x)


# ---- JAX ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax(dtype):
    jax = pytest.importorskip("jax")
    q, k, v, options = problem()
    arrays = [jax.numpy.asarray(x).astype(dtype) for x in (q, k, v)]
    out, lse = attend(*arrays, **options)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert (out.dtype.name, lse.dtype.name) == (dtype, "float32")
    expected, _ = attend(*(np.asarray(x) for x in arrays), **options)
    assert np.asarray(out).tobytes() == expected.tobytes()


def test_jax_lists_of_uint16_are_numbers():
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(np.random.default_rng(0).standard_normal((1, 2, 256, 16), np.float32))
    lists = blitz_attn.select_blocks_prefill(q, q, density=0.5, index_dtype="uint16")
    assert isinstance(lists, jax.Array)
    assert lists.dtype == np.uint16
    assert (np.asarray(lists) == blitz_attn.select_blocks_prefill(np.asarray(q), np.asarray(q), density=0.5, index_dtype="uint16")).all()
    blitz_attn.block_sparse_attention(q, q, q, lists, block_shape=(64, 64))


def test_jax_tracers_are_refused():
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((1, 1, 16, 8))
    for trace in (jax.jit, jax.vmap):
        with pytest.raises(TypeError, match="^q: expected an array of numbers, got a tracer of JAX, whose jit, grad and vmap cannot see"):
            trace(lambda q: attend(q, x, x))(x)


def test_jax_out_is_refused():
    jax = pytest.importorskip("jax")
    q, k, v, options = problem()
    with pytest.raises(TypeError, match=r"^out: expected an array that can be written, got a JAX array"):
        attend(q, k, v, out=jax.numpy.zeros((2, 4, 40, 16)), **options)


# ---- Integers -----------------------------------------------------------------------------------------------------


def test_scalars_of_numpy():
    q, k, v, options = problem()
    expected = attend(q, k, v, scale=0.25, window=(3, -1), num_threads=1, **options)
    options |= {"block_shape": np.array([16, 16]), "causal": np.True_, "return_lse": np.bool_(True)}
    given = attend(q, k, v, scale=np.float32(0.25), window=np.array([3, -1], np.int8), num_threads=np.int64(1), **options)
    assert same_bits(given[0], expected[0])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_lengths_of_any_integers(dtype):
    q, k, v, options = problem()
    expected = attend(q, k, v, q_lens=[40, 7], kv_lens=[3, 56], **options)
    given = attend(q, k, v, q_lens=np.array([40, 7], dtype), kv_lens=np.array([3, 56], dtype), **options)
    assert same_bits(given[0], expected[0])


def test_the_core_names_a_wrong_argument():
    with pytest.raises(TypeError, match="missing the argument 'q'"):
        _core.block_sparse_attention(np.empty)
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        _core.kernels(blocks=1)
    with pytest.raises(TypeError, match="multiple values for argument 'level'"):
        _core.kernels("portable", level="portable")
    with pytest.raises(TypeError, match="takes at most 0 arguments, got 1"):
        _core.isa_note(1)
    with pytest.raises(TypeError, match="^masked: expected a type, got 3$"):
        _core.refuse_masked(3)


def test_an_exporters_memory_error_is_not_changed():
    class Full:
        def __array__(self, *args, **options):
            raise MemoryError

    with pytest.raises(MemoryError):
        blitz_attn.sabi.counts(Full())
