"""Gradients of block-sparse attention: against central differences; against the reference by the error rule, at every level, dtype, layout and
shape; and properties that hold bit for bit."""

import itertools

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, testing
from cases import DTYPES, ISA_LEVELS, attend, bits_option, dtype_of, lse_shape, out_shape, poisoned, random_lists, same_bits
from cases_grid import combination, every_combination

FACTOR = 3.0  # of the error rule, for gradients
STEP = 1e-4  # of central differences
HEAD_DIMS = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 72, 80, 96, 112, 127, 128, 129, 160, 192, 200, 256, 320, 512, 575, 576]
NAMES = ("dq", "dk", "dv")


def rest_of(q, v, layout="BNSD", seed=100, **heads):
    """Random gradients of the output and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    heads = {name: n for name, n in heads.items() if name in ("num_heads", "num_kv_heads")}
    dout = testing.round_to(rng.standard_normal(out_shape(q, v, layout, **heads)), dtype_of(q))
    dlse = rng.standard_normal(lse_shape(q, layout, **heads))
    return dout, dlse.astype(np.float64 if dtype_of(q) == "float64" else np.float32)


def gradients(dout, q, k, v, out, lse, lists=None, **options):
    """(dq, dk, dv) of the operation, written into arrays of NaN."""
    grads = tuple(poisoned(x.shape, x) for x in (q, k, v))
    results = blitz_attn.block_sparse_attention_backward(dout, q, k, v, out, lse, lists, grads=grads, **bits_option(q), **options)
    assert all(result is given for result, given in zip(results, grads, strict=True))
    return results


def forward_and_back(q, k, v, lists=None, with_dlse=True, **options):
    dout, dlse = rest_of(q, v, **options)
    return gradients(dout, q, k, v, *attend(q, k, v, lists, **options), lists, dlse=dlse if with_dlse else None, **options)


def check(q, k, v, lists=None, *, levels=ISA_LEVELS, with_dlse=True, **options):
    """Compare the gradients with the float64 reference by the error rule, at every instruction set level."""
    dtype, bits = dtype_of(q), bits_option(q)
    dout, dlse = rest_of(q, v, **options)
    more = {"dlse": dlse if with_dlse else None, **bits, **options}
    exact, plain = (
        backward(dout, q, k, v, *forward(q, k, v, lists, return_lse=True, **bits, **options), lists, **more)
        for forward, backward in (
            (reference.block_sparse_attention, reference.block_sparse_attention_backward),
            (reference.dense_same_precision, reference.dense_same_precision_backward),
        )
    )
    for level in levels:
        with blitz_attn.isa(level):
            results = forward_and_back(q, k, v, lists, with_dlse, **options)
        for name, ours, theirs, right in zip(NAMES, results, plain, exact, strict=True):
            error, allowed = testing.error_of(ours, right, dtype), testing.error_of(theirs, right)
            if right.size < 100:  # all elements of the dense result may be exact by chance, as with some BLAS if a row has one key
                allowed = testing.Errors(max(allowed.relative, 2.0**-23), max(allowed.largest, 2.0**-23 * allowed.peak), allowed.peak)
            assert testing.meets_error_rule(error, allowed, dtype, FACTOR), (
                f"{level}, {name}: error {error}, of the dense computation {allowed}"
            )


# ---- Against central differences ----------------------------------------------------------------------------------

LISTED = np.array([[[[0, 2, -1], [-1, -1, -1], [1, 0, -1]], [[2, -1, -1], [0, 1, 2], [1, -1, -1]]]])  # blocks of 3 x 3, 2 heads

DIFFERENCES = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "lengths": {"q_lens": [5], "kv_lens": [6], "causal": True},
    "lists": {"sabi": LISTED, "block_shape": (3, 3)},
    "lists_causal": {"sabi": LISTED[:, :1], "block_shape": (3, 3), "causal": True, "scale": 0.3},
    "bsh": {"layout": "BSH", "num_heads": 2, "num_kv_heads": 1},
    "tnd": {"layout": "TND", "cu_seqlens_q": [0, 3, 7], "cu_seqlens_kv": [0, 2, 8], "causal": True},
}


@pytest.mark.parametrize("direction", range(5))
@pytest.mark.parametrize("name", DIFFERENCES)
def test_float64_against_central_differences(name, direction):
    """The differences are along random directions, through the output and through the log-sum-exp."""
    options = dict(DIFFERENCES[name])
    tensors = testing.make_qkv(1, 2, 1, 7, 8, 4, 3, dtype="float64", layout=options.get("layout", "BNSD"), seed=3)
    lists = options.pop("sabi", None)
    dout, dlse = rest_of(tensors[0], tensors[2], **options)
    results = forward_and_back(*tensors, lists, **options)
    rng = np.random.default_rng(direction)
    along = [rng.standard_normal(x.shape) for x in tensors]

    def loss(shift):
        out, lse = attend(*(x + shift * d for x, d in zip(tensors, along, strict=True)), lists, **options)
        return (dout * out).sum() + (dlse * np.where(lse == -np.inf, 0.0, lse)).sum()

    far, near = (loss(n * STEP) - loss(-n * STEP) for n in (2, 1))
    slope = sum((d * g).sum() for d, g in zip(along, results, strict=True))
    assert abs((8 * near - far) / (12 * STEP) - slope) < 1e-8 * max(1.0, abs(slope))


# ---- The operation against the reference --------------------------------------------------------------------------


@pytest.mark.sampled
@every_combination
def test_every_combination_is_right(dtype, layout, heads, rule, kind, dims):
    arrays, options = combination(dtype, layout, heads, rule, kind, dims)
    check(*arrays, with_dlse=rule != "causal", **options)


@pytest.mark.parametrize("n", range(len(HEAD_DIMS)), ids=[f"d{dim}" for dim in HEAD_DIMS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_is_right(dtype, n):
    v_dim = HEAD_DIMS[(n * 5 + 3) % len(HEAD_DIMS)]
    check(*testing.make_qkv(1, 2, 1, 35, 70, HEAD_DIMS[n], v_dim, dtype=dtype, seed=n), causal=True)


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    "block_shape", [(1, 64), (1, 1), (3, 5), (17, 33), (32, 32), (64, 64), (128, 32), (128, 128), (200, 7), (256, 512)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_shapes(dtype, block_shape, heads):
    """Each head has a list of its own, or all heads share a list. The lists span several tiles, items and chunks."""
    q_len, kv_len = (150, 260) if min(block_shape) < 8 else (430, 600)
    q, k, v = testing.make_qkv(1, 4, 2, q_len, kv_len, 48, dtype=dtype)
    grid = -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
    lists = random_lists(np.random.default_rng(heads), 1, heads, *grid, share=0.4, empty=0.1)
    check(q, k, v, lists, block_shape=block_shape, causal=heads == 4, levels=ISA_LEVELS[-2:])


@pytest.mark.parametrize(
    "tokens", [*range(1, 20), 31, 32, 33, 47, 48, 63, 64, 65, 95, 100, 127, 128, 129, 144, 160, 255, 256, 257, 300, 384, 385]
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_length(causal, tokens):
    """The lengths leave tails of panels, tiles and chunks."""
    check(*testing.make_qkv(1, 1, 1, tokens, tokens + tokens // 3, 16, dtype="float32", seed=tokens), causal=causal)


# ---- Bit for bit --------------------------------------------------------------------------------------------------

THREADED = [  # calls with many items of different cost that add to the same keys; the last number is the share of blocks in their lists
    ("float32", 1, 1, {}, None),
    ("float32", 4, 1, {"causal": True}, None),
    ("bfloat16", 2, 2, {"block_shape": (64, 64)}, 0.3),
    ("float16", 4, 2, {"block_shape": (1, 32)}, 0.2),
    ("float64", 2, 1, {"block_shape": (128, 32), "window": (200, 100)}, 0.5),
]


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "options", "density"), THREADED)
def test_same_bits_for_any_number_of_threads(dtype, heads, kv_heads, options, density):
    block_q, block_kv = options.get("block_shape", (9, 9))
    tokens, lists = 300 if block_q == 1 else 1100, None
    q, k, v = testing.make_qkv(1, heads, kv_heads, tokens, tokens, 32, dtype=dtype)
    if density is not None:
        sizes = 1 if block_q == 1 else heads, -(-tokens // block_q), -(-tokens // block_kv)
        lists = random_lists(np.random.default_rng(5), 1, *sizes, share=density, empty=0.1)
        lists[:, :, 0] = np.arange(lists.shape[-1])  # one block row lists all columns
    expected = forward_and_back(q, k, v, lists, num_threads=1, **options)
    for num_threads in (2, 3, 4, 8):
        assert all(map(same_bits, forward_and_back(q, k, v, lists, num_threads=num_threads, **options), expected))


@pytest.mark.parametrize("block_shape", [(16, 32), (48, 64), (80, 96), (128, 128), (200, 33)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_equal_lists(dtype, block_shape):
    """Query tiles with equal lists are computed together, from keys that are packed once, even if their panels differ in width."""
    q, k, v = testing.make_qkv(1, 2, 1, 530, 650, 40, 24, dtype=dtype)
    rows, columns = -(-530 // block_shape[0]), -(-650 // block_shape[1])
    lists = np.tile(np.delete(np.arange(columns, dtype=np.int32), columns // 2), (1, 1, rows, 1))
    for options in ({}, {"causal": True}, {"window": (150, 20)}):
        check(q, k, v, lists, block_shape=block_shape, **options)


PACKED = {"layout": "TND", "cu_seqlens_q": [0, 200, 201, 330], "cu_seqlens_kv": [0, 333, 400, 700], "causal": True}


@pytest.mark.parametrize(
    "options", [{}, {"window": (200, 0)}, {"causal": True, "q_begin": [390]}, PACKED], ids=["all", "window", "part", "packed"]
)
def test_many_queries_of_one_kv_head(options):
    """For so many queries, keys are packed once. Under the window, the first keys are not packed. The last keys do not fill a group."""
    q, k, v = testing.make_qkv(1, 16, 1, 330, 701, 40, dtype="bfloat16")
    if options is PACKED:
        q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1))[:700] for x in (q, k, v))
    check(q, k, v, **options)


def test_query_tiles_together_or_one_by_one():
    """Gradients of query tiles that are computed together have the same bits as sums over calls with one tile each."""
    q, k, v = testing.make_qkv(1, 1, 1, 512, 300, 64, dtype="bfloat16")
    dout, _ = rest_of(q, v)
    out, lse = attend(q, k, v)
    results = []
    for step in (512, 128):
        grads = [np.zeros_like(q), *(np.zeros(x.shape, np.float32) for x in (k, v))]
        for first in range(0, 512, step):
            some = slice(first, first + step)
            part = [np.ascontiguousarray(x[:, :, some]) for x in (dout, q, out, lse)]
            dq = np.zeros_like(part[1])
            given = part[0], part[1], k, v, part[2], part[3]
            blitz_attn.block_sparse_attention_backward(*given, grads=(dq, *grads[1:]), accumulate=True, **bits_option(q))
            grads[0][:, :, some] = dq
        results.append(grads)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_blocks_behind_the_last_key_change_no_bit():
    """Heads that list the same keys may list different blocks of padding, as in a batch with longer entries."""
    q, k, v = testing.make_qkv(1, 4, 1, 1, 70, 16)
    kept = np.ones((1, 4, 1, 7), bool)
    kept[0, 1, 0, 5] = False
    options = {"block_shape": (1, 10), "kv_lens": [10]}
    dout, _ = rest_of(q, v)
    results = []
    for columns in (1, 7):
        lists = sabi.from_block_mask(kept[..., :columns], dtype="int32")
        cut = [np.ascontiguousarray(x[:, :, : 10 * columns]) for x in (k, v)]
        out, lse = attend(q, *cut, lists, **options)
        results.append([x[:, :, :10] for x in gradients(dout, q, *cut, out, lse, lists, **options)])
    assert all(same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b)) for a, b in zip(*results, strict=True))


def test_padding_of_queries_changes_no_bit():
    """An entry of one query gives the same bits with and without padding, because the heads of a KV head add in the same order."""
    q, k, v = testing.make_qkv(1, 8, 1, 40, 30, 16)
    kept = np.ones((1, 8, 1, 30), bool)
    kept[0, :4, 0, 10:] = False
    dout, _ = rest_of(q, v)
    results = []
    for length in (1, 2, 40):
        options = {"block_shape": (40, 1), "q_lens": [1]}
        cut = [np.ascontiguousarray(x[:, :, :length]) for x in (dout, q)]
        lists = sabi.from_block_mask(kept, dtype="int32")
        out, lse = attend(cut[1], k, v, lists, **options)
        dq, dk, dv = gradients(cut[0], cut[1], k, v, out, lse, lists, **options)
        results.append((np.ascontiguousarray(dq[:, :, :1]), dk, dv))
    assert all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# ---- What is not seen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unseen_is_nothing(dtype, bad):
    """At keys that no query attends and queries that attend nothing, NaN or inf in any input but `lse` changes no bit of any gradient."""
    q, k, v = testing.make_qkv(2, 4, 2, 150, 200, 24, dtype=dtype)
    lists = random_lists(np.random.default_rng(2), 2, 4, 5, 7, share=0.5, empty=0.2)
    options = {"block_shape": (32, 32), "causal": True, "q_lens": [100, 150], "kv_lens": [200, 130]}
    lists = np.where((lists == 2) | (lists == 6), -2, lists)  # no query attends these columns
    lists = np.where(lists >= 0, lists, -1)
    lists = -np.sort(-lists, axis=-1)
    dout, dlse = rest_of(q, v)
    out, lse = attend(q, k, v, lists, **options)
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            expected = gradients(dout, q, k, v, out, lse, lists, dlse=dlse, **options)
            assert all(np.isfinite(testing.to_float64(x, "bfloat16")).all() for x in expected)
            spoilt = [x.copy() for x in (dout, q, k, v, out, lse, dlse)]
            poison = poisoned((), q) if np.isnan(bad) else testing.round_to(np.full((), bad), dtype)
            for x in spoilt[2:4]:  # keys and values
                x[:, :, 64:96] = poison
                x[:, :, 192:] = poison
                x[1, :, 130:] = poison
            blind = np.isneginf(lse)
            for x in (spoilt[0], spoilt[1], spoilt[4]):  # queries that see nothing
                x[blind] = poison
            spoilt[6][blind] = bad
            results = gradients(*spoilt[:6], lists, dlse=spoilt[6], **options)
            assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))
            assert blind.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nonfinite_queries_reach_what_they_see(dtype):
    """A NaN in a query's row of q, or of dout, reaches the query's dq and the gradients of the keys that it sees. No other bit changes."""
    q, k, v = testing.make_qkv(1, 2, 2, 140, 140, 24, dtype=dtype)
    dout, _ = rest_of(q, v)
    for level, which in itertools.product(ISA_LEVELS, ("q", "dout")):
        with blitz_attn.isa(level):
            out, lse = attend(q, k, v, causal=True)
            expected = gradients(dout, q, k, v, out, lse, causal=True)
            given = {"q": q.copy(), "dout": dout.copy()}
            given[which][0, 1, 50, 3] = poisoned((), q)
            out, lse = attend(given["q"], k, v, causal=True)
            results = gradients(given["dout"], given["q"], k, v, out, lse, causal=True)
        for name, got, want in zip(NAMES, results, expected, strict=True):
            wide = np.isnan(testing.to_float64(got, "bfloat16"))
            reached = np.zeros(140, bool)
            reached[50 if name == "dq" else slice(0, 51)] = True
            assert not wide[0, 0].any()
            assert same_bits(got[0, 1, ~reached], want[0, 1, ~reached])
            assert wide[0, 1, reached].any(axis=-1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_nonfinite_values_reach_the_same_elements_as_in_the_reference(which, bad):
    """If one element is NaN or inf, the same elements of the gradients are non-finite as in the reference, and all others are close."""
    arrays = dict(zip("qkv", testing.make_qkv(1, 4, 2, 40, 50, 8, 6), strict=True))
    arrays["dout"], _ = rest_of(arrays["q"], arrays["v"])
    arrays[which][0, 1, 30, 3] = bad
    lists = random_lists(np.random.default_rng(2), 1, 4, 5, 7)
    options = {"causal": True, "block_shape": (8, 8)}
    out, lse = attend(arrays["q"], arrays["k"], arrays["v"], lists, **options)
    given = arrays["dout"], arrays["q"], arrays["k"], arrays["v"], out, lse, lists
    results, exact = gradients(*given, **options), reference.block_sparse_attention_backward(*given, **options)
    assert not all(np.isfinite(x).all() for x in exact)
    for name, got, want in zip(NAMES, results, exact, strict=True):
        assert (np.isfinite(got) == np.isfinite(want)).all(), name
        finite = np.isfinite(want)
        assert finite.any(), name
        np.testing.assert_allclose(got[finite], want[finite], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_nonfinite_value_in_a_long_sequence(dtype, which):
    """A NaN lies in one of several query tiles, or groups of keys, that are computed together. The other results are right."""
    arrays = dict(zip("qkv", testing.make_qkv(1, 1, 1, 420, 300, 32, dtype=dtype), strict=True))
    arrays["dout"], _ = rest_of(arrays["q"], arrays["v"])
    arrays[which][0, 0, 200, 3] = testing.round_to(np.array(np.nan), dtype)
    options = {"window": (30, 9)}
    for level in ISA_LEVELS:
        with blitz_attn.isa(level):
            given = arrays["dout"], arrays["q"], arrays["k"], arrays["v"], *attend(arrays["q"], arrays["k"], arrays["v"], **options)
            results = gradients(*given, **options)
        exact = reference.block_sparse_attention_backward(*given, **bits_option(arrays["q"]), **options)
        for name, got, want in zip(NAMES, results, exact, strict=True):
            got = testing.to_float64(got, dtype)
            assert (np.isfinite(got) == np.isfinite(want)).all(), f"{level}, {name}"
            finite = np.isfinite(want)
            np.testing.assert_allclose(got[finite], want[finite], atol=0.03 if dtype == "bfloat16" else 2e-5, err_msg=f"{level}, {name}")


# ---- Bad input ----------------------------------------------------------------------------------------------------


def test_a_tensor_that_needs_a_gradient_is_refused():
    torch = pytest.importorskip("torch")
    x = torch.ones((1, 1, 4, 4))
    lse = torch.zeros((1, 1, 4))
    with pytest.raises(ValueError, match=r"^dout: expected a tensor that needs no gradient"):
        blitz_attn.block_sparse_attention_backward(x.clone().requires_grad_(), x, x, x, x, lse)
