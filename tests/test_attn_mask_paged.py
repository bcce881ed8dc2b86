"""`attn_mask` and `alibi_slopes` over pages: against the reference, together with other rules that hide tokens, and with KV splits.

Shapes, dtypes and views of masks are drawn together with lists and plans in tests/fuzz/paged_problems.py.
"""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing
from cases import DTYPES, same_bits
from cases_masks import SLOPES, H, hiding, holes, kept, numbers
from cases_paged import check_paged
from exporters import OnlyDlpack

LENS, Q_LENS, SIZE = [70, 33, 1], [20, 0, 1], 16
PAIRS = [*((x, x) for x in DTYPES), ("bfloat16", "int8"), ("float16", "int8"), ("float32", "float8_e4m3")]


def paged(dtype="float32", kv_dtype=None, lens=LENS, q_lens=Q_LENS):
    return testing.make_paged(3, H, 2, lens, SIZE, 32, 24, dtype, kv_dtype or dtype, q_lens=q_lens, poison=kv_dtype is None)


def tree(rng, queries, tokens):
    """A mask for trees of drafted tokens, the new tokens. A drafted token sees what is before its tree, its ancestors and itself."""
    mask = np.ones((3, 1, queries, tokens), bool)
    for b, (n, length) in enumerate(zip(Q_LENS, LENS, strict=True)):
        drafted = mask[b, 0, :n, length - n : length]
        drafted[...] = np.eye(n, dtype=bool)
        for node in range(1, n):
            drafted[node] |= drafted[(node - 1) // 2]  # the parent of node n is node (n - 1) // 2
    return mask


# Masks may be larger than the requests.
MASKS = {
    "tree": tree,
    "bool": lambda rng, q, kv: kept(rng, 3, H, q, kv),
    "numbers": lambda rng, q, kv: numbers(rng, 3, 1, q, kv),
    "holes": lambda rng, q, kv: holes(rng, 1, H, q, kv),
    "keys": lambda rng, q, kv: kept(rng, 3, 1, 1, kv),
    "per query": lambda rng, q, kv: numbers(rng, H, q, 1),
    "none": lambda rng, q, kv: None,
}
RULES = {
    "causal": {},
    "window": {"window": 40, "softcap": 2.0, "sinks": np.float32([1, 0, -1, 2])},
    "ranges": {"kv_ranges": np.sort(np.random.default_rng(8).integers(0, 70, (21, 2)), axis=-1)},
    "begins": {"q_begin": [40, 0, 3]},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_split", [None, SIZE, 2 * SIZE, 8 * SIZE])
@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "slopes"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_every_mask_is_right(dtype, kv_dtype, name, rule, slopes, kv_split):
    mask = MASKS[name](np.random.default_rng(7), 22, 75)
    check_paged(paged(dtype, kv_dtype), attn_mask=mask, alibi_slopes=slopes, kv_split=kv_split, **RULES[rule])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_split", [None, 32 * SIZE])
@pytest.mark.parametrize("slopes", [None, SLOPES / 4], ids=["plain", "slopes"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_one_new_token_each(dtype, kv_dtype, masked, slopes, kv_split):
    mask = holes(np.random.default_rng(1), 3, H, 1, 2100) if masked else None
    check_paged(paged(dtype, kv_dtype, [70, 2100, 1], None), attn_mask=mask, alibi_slopes=slopes, kv_split=kv_split)


@pytest.mark.parametrize("kv_split", [None, 16 * SIZE])
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("q_lens", [None, [16, 4, 1]], ids=["one", "many"])
def test_tokens_that_a_mask_hides_are_not_read(q_lens, kv_dtype, kind, kv_split, isa_level):
    """NaN in hidden tokens, or in their scales, changes no bit. The last request sees nothing."""
    case = paged("float32", kv_dtype, [70, 2100, 33], q_lens)
    hidden = np.zeros((3, 1, 1, 2100), bool)
    hidden[..., 16:32] = hidden[1, ..., 1000:1600] = hidden[..., 3] = hidden[2] = True
    rules = case.options | {"attn_mask": hiding(kind, hidden), "return_lse": True, "kv_split": kv_split}
    clean = blitz_attn.paged_attention(*case.arrays, **rules)
    assert not clean[0][-1].any()
    assert (clean[1][-1] == -np.inf).all()
    for b, n in enumerate(case.seq_lens):
        t = np.flatnonzero(hidden[b, 0, 0, :n])
        for x in (rules["k_scale"], rules["v_scale"]) if kv_dtype == "int8" else (case.k_cache, case.v_cache):
            x[case.block_tables[b, t // SIZE], t % SIZE] = np.nan
    assert all(map(same_bits, blitz_attn.paged_attention(*case.arrays, **rules), clean))


@pytest.mark.parametrize("kv_split", [None, 2 * SIZE])
def test_a_mask_of_one_axis_has_an_element_for_each_token(kv_split):
    """A longer mask is accepted only with an axis of queries. A single element holds for any number of tokens."""
    case = paged()
    shown = np.random.default_rng(3).random(75) < 0.5
    rules = {"kv_split": kv_split, "return_lse": True}
    plan = blitz_attn.PagedPlan(*case.arrays[3:], page_size=SIZE, q_lens=Q_LENS, kv_split=kv_split)
    found, _ = check_paged(case, attn_mask=shown[None], kv_split=kv_split)
    for mask in (shown[None, :70], shown[:70]):
        assert same_bits(plan.attention(*case.arrays[:3], attn_mask=mask), found)
    one, none = (blitz_attn.paged_attention(*case.arrays, attn_mask=mask, **rules, **case.options) for mask in (np.ones(1, bool), None))
    assert all(map(same_bits, one, none))
    with pytest.raises(ValueError, match=r"^attn_mask: expected 70 tokens in a mask of one axis, got \(75,\)$"):
        reference.paged_attention(*case.arrays, attn_mask=shown, **case.options)


@pytest.mark.parametrize("shape", [(20, 70), (1,), (3, 1, 1, 1), (1, H, 22, 1), ()], ids=str)
@pytest.mark.parametrize("q_lens", [None, Q_LENS])
def test_a_mask_that_hides_nothing_has_the_bits_of_none(q_lens, shape, isa_level):
    case = paged(q_lens=q_lens)
    usual, masked = (
        blitz_attn.paged_attention(*case.arrays, attn_mask=mask, kv_split=SIZE, return_lse=True, **case.options)
        for mask in (None, np.ones(shape, bool))
    )
    assert all(map(same_bits, usual, masked))


def kind_of(name, mask):
    if name in ("memoryview", "dlpack"):
        return memoryview(mask) if name == "memoryview" else OnlyDlpack(mask)
    library = pytest.importorskip(name.partition(" ")[0])
    if name == "jax":
        return library.numpy.asarray(mask)
    tensor = library.from_numpy(mask)
    return tensor.bfloat16() if name == "torch bfloat16" else tensor


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of JAX
@pytest.mark.parametrize("name", ["torch", "torch bfloat16", "jax", "memoryview", "dlpack"])
def test_masks_of_any_kind_in_chunks(name):
    case, mask = paged(), holes(np.random.default_rng(4), 3, 1, 20, 70)
    given = testing.to_float64(testing.round_to(mask, "bfloat16"), "bfloat16").astype(np.float32) if "bfloat16" in name else mask
    found, expected = (
        blitz_attn.paged_attention(*case.arrays, attn_mask=x, kv_split=2 * SIZE, **case.options) for x in (kind_of(name, mask), given)
    )
    assert same_bits(found, expected)


@pytest.mark.parametrize("q_lens", [None, []])
def test_calls_without_requests_or_tokens_in_chunks(q_lens):
    case = paged(q_lens=None)
    nobody = case.q[:0], *case.arrays[1:3], case.block_tables[:0], []
    out = blitz_attn.paged_attention(*nobody, q_lens=q_lens, attn_mask=np.ones((0, H, 1, 7), bool), kv_split=SIZE)
    assert out.shape == (0, H, 24)
    for mask in (np.ones((3, 1, 1, 0), bool), np.ones(1, bool)):
        assert not blitz_attn.paged_attention(*case.arrays[:4], [0, 0, 0], attn_mask=mask, kv_split=SIZE).any()


def test_a_tensor_that_needs_a_gradient_is_refused_in_chunks():
    torch = pytest.importorskip("torch")
    case, mask = paged(), torch.zeros(20, 70, requires_grad=True)
    with pytest.raises(ValueError, match="^attn_mask: expected a tensor that needs no gradient"):
        blitz_attn.paged_attention(*case.arrays, attn_mask=mask, kv_split=SIZE, **case.options)
