"""Lists that know their block shape: which operations keep it, which drop it, and how calls use it."""

import copy
import pickle

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, sabi, select, testing

SHAPE = (32, 16)
SIZE = 100


def arrays(count=3):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, SIZE, 8), dtype=np.float32) for _ in range(count)]


def blocks():
    return sabi.random_with_frame(SIZE, block_shape=SHAPE, sparsity=0.5, heads=2)


KEPT = {
    "rows": lambda x: x[:, :, 1:],
    "one head": lambda x: x[0, 1],
    "reversed": lambda x: x[..., ::-1],
    "copy": lambda x: x.copy(),
    "int64": lambda x: x.astype("int64"),
    "view": lambda x: x.view(),
    "repeat": lambda x: x.repeat(2, axis=1),
    "broadcast": lambda x: np.broadcast_to(x, (3, *x.shape[1:])),
    "concatenate": lambda x: np.concatenate([x, x], axis=1),
    "with a plain list": lambda x: np.concatenate([np.asarray(x), x], axis=1),
    "stack": lambda x: np.stack([x[0], x[0]]),
    "split": lambda x: np.split(x, 2, axis=1)[0],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle 2": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "union": lambda x: sabi.union(x, np.asarray(x)),
    "check": lambda x: sabi.check(x, SIZE),
}


@pytest.mark.parametrize("how", KEPT)
def test_what_keeps_the_block_shape(how):
    made = KEPT[how](blocks())
    assert type(made) is sabi.BlockList
    assert made.block_shape == SHAPE


DROPPED = {
    "sum": lambda x: x + 1,
    "comparison": lambda x: x >= 0,
    "asarray": np.asarray,
    "array": np.array,
    "where": lambda x: np.where(x < 0, 0, x),
    "total": lambda x: x.sum(axis=-1),
    "mask": lambda x: sabi.to_block_mask(x),
}


@pytest.mark.parametrize("how", DROPPED)
def test_what_drops_the_block_shape(how):
    assert type(DROPPED[how](blocks())) is np.ndarray


def test_numbers_stay_numbers():
    made = blocks()
    assert type(made.max()) is np.int32
    assert type(made[0, 0, 0, 0]) is np.int32
    assert isinstance(int(made.sum()), int)


def test_lists_of_several_block_shapes_do_not_join():
    other = sabi.random_with_frame(SIZE, block_shape=(32, 32), heads=2)
    sentence = r"^block_shape: expected lists of one block shape, got \(32, 16\) and \(32, 32\)$"
    with pytest.raises(ValueError, match=sentence):
        sabi.union(blocks(), other)
    with pytest.raises(ValueError, match=sentence):
        np.concatenate([blocks()[..., :1], other[..., :1]])


def test_the_shape_cannot_be_set():
    with pytest.raises(AttributeError):
        blocks().block_shape = (1, 1)
    with pytest.raises(AttributeError, match="^block_shape: expected a list that was made with a block shape, got a bare view$"):
        _ = np.zeros((1, 1), int).view(sabi.BlockList).block_shape


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((np.zeros((2, 2)), SHAPE), TypeError, "sabi: expected an integer array, got float64"),
        (([[0, 1]], (0, 1)), ValueError, r"block_shape: expected two positive numbers \(queries, keys\), got \(0, 1\)"),
    ],
)
def test_a_list_is_made_of_integers_and_two_sizes(arguments, error, sentence):
    with pytest.raises(error, match=f"^{sentence}$"):
        sabi.BlockList(*arguments)


def test_conversions_are_told_the_block_shape():
    made = blocks()
    num, idx = sabi.to_num_idx(made)
    indptr, indices = sabi.to_csr(made)
    for back in (
        sabi.from_block_mask(sabi.to_block_mask(made), block_shape=SHAPE),
        sabi.from_num_idx(num, idx, block_shape=SHAPE),
        sabi.from_csr(indptr, indices, made.shape[:2], block_shape=SHAPE),
        sabi.BlockList(np.asarray(made).tolist(), SHAPE),
    ):
        assert back.block_shape == SHAPE
        assert (sabi.to_token_mask(back, SIZE) == sabi.to_token_mask(np.asarray(made), SIZE, block_shape=SHAPE)).all()


def test_a_finer_list_needs_sizes_that_divide():
    with pytest.raises(ValueError, match=r"^factors: expected divisors of a's block shape \(32, 16\), got \(3, 1\)$"):
        sabi.refine(blocks(), (3, 1), 12, 7)


CALLS = {
    "attention": lambda x, **o: blitz_attn.block_sparse_attention(*arrays(), x, **o),
    "backward": lambda x, **o: blitz_attn.block_sparse_attention_backward(
        *arrays(5), np.zeros((1, 2, SIZE), np.float32), x, **o
    )[0],
    "reference": lambda x, **o: reference.block_sparse_attention(*arrays(), x, **o),
    "recall": lambda x, **o: select.recall(*arrays(2), x, **o),
    "recall of some": lambda x, **o: select.recall(*arrays(2), x, every=2, **o),
    "output_error": lambda x, **o: select.output_error(*arrays(), x, **o),
    "to_token_mask": lambda x, **o: sabi.to_token_mask(x, SIZE, **o),
    "token_mask": lambda x, **o: testing.token_mask(x, SIZE, **o),
    "check": lambda x, **o: sabi.check(x, SIZE, **o),
    "plan": lambda x, **o: blitz_attn.distributed.ContextParallelPlan(x, SIZE, size=2, num_heads=2, head_dim=8, **o).loads,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_take_the_shape_of_the_list_and_refuse_another(name):
    import blitz_attn.distributed  # noqa: F401

    known, call = blocks(), CALLS[name]
    expected = call(np.asarray(known), block_shape=SHAPE)
    assert np.array_equal(call(known), expected, equal_nan=True)
    assert np.array_equal(call(known, block_shape=list(SHAPE)), expected, equal_nan=True)
    with pytest.raises(ValueError, match=r"^block_shape: expected \(32, 16\), which sabi is made for, or none, got \(16, 16\)$"):
        call(known, block_shape=(16, 16))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_functions_for_frameworks_do_as_well(framework):
    module = pytest.importorskip(framework)
    ours = __import__(f"blitz_attn.integrations.{framework}", fromlist=["block_sparse_attention"])
    given = [(module.from_numpy if framework == "torch" else module.numpy.asarray)(x) for x in arrays()]
    expected = blitz_attn.block_sparse_attention(*arrays(), blocks())
    assert np.array_equal(np.asarray(ours.block_sparse_attention(*given, blocks())), expected)
    with pytest.raises(ValueError, match=r"^block_shape: expected \(32, 16\), which sabi is made for, or none, got \(16, 16\)$"):
        ours.block_sparse_attention(*given, blocks(), block_shape=(16, 16))
    if framework == "torch":
        other = ours.scaled_dot_product_attention(*given, sabi=blocks())
    else:
        other = module.jit(lambda q, k, v: ours.block_sparse_attention(q, k, v, blocks()))(*given)
    assert np.array_equal(np.asarray(other), expected)


def test_arrays_of_another_layout_get_a_hint():
    q, k, v = (x.swapaxes(1, 2) for x in arrays())
    hint = r' \(it fits q of shape \(B, S, H, D\), which layout "BSND" takes\)$'
    with pytest.raises(ValueError, match=hint):
        blitz_attn.block_sparse_attention(q, k, v, blocks())
    with pytest.raises(ValueError, match=r"got \(1, 1, 1, 1\)$"):  # too few rows: no hint
        blitz_attn.block_sparse_attention(*arrays(), sabi.causal(32, block_shape=(32, 32)))
    with pytest.raises(TypeError, match=r"^sabi: expected an array, got a FunctionMask: its _asdict\(\) has the list and the arguments that go with it$"):
        blitz_attn.block_sparse_attention(*arrays(), sabi.from_function(lambda b, h, i, j: i >= j, SIZE))


def test_a_list_shows_its_shape():
    assert repr(blocks()[0, 0, :1, :1]) == "BlockList([[0]], dtype=int32, block_shape=(32, 16))"


def test_choosers_make_such_lists():
    q, k, v = arrays()
    made = blitz_attn.select_blocks_prefill(q, k, density=0.5, block_shape=SHAPE)
    assert made.block_shape == SHAPE
    out, again = blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, block_shape=SHAPE, return_sabi=True)
    assert again.block_shape == SHAPE
    assert np.array_equal(blitz_attn.block_sparse_attention(q, k, v, made), out)
    assert select.list_from_scores(np.ones((1, 1, 4, 7), np.float32), SIZE, block_shape=SHAPE, density=0.5).block_shape == SHAPE


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_missing_axes_are_one(axes, layout):
    lists = np.asarray(blocks())
    lists = lists[0, 0] if axes == 2 else lists[0]
    q, k, v = arrays()
    options = {"block_shape": SHAPE, "return_lse": True}
    if layout == "TND":
        q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {"layout": "TND", "cu_seqlens_q": [0, SIZE], "cu_seqlens_kv": [0, SIZE]}
    out, lse = blitz_attn.block_sparse_attention(q, k, v, lists, **options)
    whole = lists[(None,) * (4 - axes)]
    for got, expected in zip((out, lse), blitz_attn.block_sparse_attention(q, k, v, whole, **options), strict=True):
        assert np.array_equal(got, expected)
    exact, _ = reference.block_sparse_attention(q, k, v, lists, **options)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    for call in ("check", "plan", "recall", "recall of some", "output_error") if layout == "BNSD" else ():
        assert np.array_equal(CALLS[call](lists, block_shape=SHAPE), CALLS[call](whole, block_shape=SHAPE), equal_nan=True)
