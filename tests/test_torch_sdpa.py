"""`integrations.torch.scaled_dot_product_attention`, with torch's own function as the oracle: masks of every form, gradients, leading axes that
broadcast, and what torch's function lacks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from blitz_attn import sabi  # noqa: E402
from blitz_attn.integrations import torch as functions  # noqa: E402
from cases_torch import DTYPES, LISTS, tensors  # noqa: E402


def dense(q, k, v, allowed=None, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True, **options)


@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (31, 37), (37, 20), (1, 9), (9, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_against_torch(queries, keys, is_causal, dtype):
    q, k, v = tensors(queries=queries, keys=keys, dtype=dtype, dims=(16, 16, 16))
    ours = functions.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    theirs = dense(q.double(), k.double(), v.double(), is_causal=is_causal, scale=0.3)
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours.double(), theirs, rtol=close, atol=close)


@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 3, 7, 8), (2, 2, 3, 7, 8)])
def test_any_number_of_axes(shape):
    q, k, v = (torch.randn(shape) for _ in range(3))
    out, lse = functions.scaled_dot_product_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert lse.shape == shape[:-1]


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("sizes", [(31, 31), (20, 37), (37, 20)])
def test_causal_biases(sizes):
    q, k, v = tensors(queries=sizes[0], keys=sizes[1])
    ones = torch.ones(sizes, dtype=torch.bool)
    for bias, allowed in ((causal_upper_left(*sizes), ones.tril()), (causal_lower_right(*sizes), ones.tril(sizes[1] - sizes[0]))):
        ours = functions.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
        seen = allowed.any(-1)
        torch.testing.assert_close(ours[:, :, seen], dense(q, k, v, allowed)[:, :, seen])
        assert (ours[:, :, ~seen] == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (31, 37), (37, 31), (16, 4), (3, 40)])
@pytest.mark.parametrize("window", [None, (4, -1), (0, 0), (-1, 3)])
@pytest.mark.parametrize("given", ["neither", "q_lens", "kv_lens", "both"])
@pytest.mark.parametrize("listed", [False, True])
def test_causal_with_lengths_and_windows(queries, keys, window, given, listed):
    """The diagonal starts at the first query and key, whatever the lengths, which hide queries and keys and move nothing."""
    qkv = tensors(queries=queries, keys=keys, grad=True)
    lens = {"q_lens": torch.tensor([queries, queries // 3]), "kv_lens": [keys // 2, keys]}
    lens = {name: x for name, x in lens.items() if given in (name, "both")}
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    left = queries if window is None or window[0] < 0 else window[0]
    q_lens, kv_lens = (torch.as_tensor(lens.get(name, [n, n]))[:, None, None, None] for name, n in (("q_lens", queries), ("kv_lens", keys)))
    seen = ((j <= i) & (i - j <= left) & (i < q_lens) & (j < kv_lens)).expand(2, 4, queries, keys)
    options = {"is_causal": True, "window": window, "enable_gqa": True, **lens}
    if listed:
        kept = np.random.default_rng(2).random((2, 4, -(-queries // 8), -(-keys // 8))) < 0.6
        options |= {"sabi": torch.from_numpy(sabi.from_block_mask(kept, dtype="int32")), "block_shape": (8, 8)}
        seen = seen & torch.from_numpy(kept.repeat(8, 2).repeat(8, 3)[:, :, :queries, :keys])
    ours = functions.scaled_dot_product_attention(*qkv, **options)
    any_seen = seen.any(-1, keepdim=True)
    theirs = dense(*qkv, torch.zeros(seen.shape).masked_fill(~seen & any_seen, -torch.inf)) * any_seen
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn(ours.shape)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), qkv) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled("options")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (31, 37), (37, 31)])
def test_causal_with_lengths_compiles(queries, keys, dynamic):
    qkv, lens = tensors(queries=queries, keys=keys, grad=True), torch.tensor([3, keys - 2])
    weight = torch.randn(2, 4, queries, 8)

    def attend(q, k, v, kv_lens):
        return functions.scaled_dot_product_attention(q, k, v, is_causal=True, window=(9, 0), kv_lens=kv_lens, enable_gqa=True)

    torch._dynamo.reset()  # the cases would count as graphs of one function
    run = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    made = [(f(*qkv, kv_lens) * weight).sum() for kv_lens in (lens, None) for f in (run, attend)]
    grads = [torch.autograd.grad(x, qkv) for x in made]
    for n in (0, 2):
        assert torch.equal(made[n], made[n + 1])
        assert all(torch.equal(a, b) for a, b in zip(*grads[n : n + 2], strict=True))


MASKS = {
    "queries and keys": lambda i, j: (j <= i + 3) & (j >= i - 9),
    "keys": lambda i, j: (j[0] < 30)[None],
    "padding on the left": lambda i, j: ((j <= i + 6) & (j >= torch.tensor([0, 11])[:, None, None]))[:, None],
    "prefix": lambda i, j: ((j <= i) | (j < 5))[None, None],
    "heads that agree": lambda i, j: (j <= i).repeat(2, 4, 1, 1),
    "nothing": lambda i, j: torch.zeros(31, 37, dtype=torch.bool),
    "keys of each entry": lambda i, j: (j < torch.tensor([30, 11])[:, None])[:, None, None],
    "queries": lambda i, j: (i < 20)[None],
}


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("floats", [False, True])
def test_masks_of_elements(name, floats):
    """Masks of bool, and of 0 and -inf, in every shape that torch expands, forward and backward."""
    allowed = MASKS[name](torch.arange(31)[:, None], torch.arange(37)[None])
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf) if floats else allowed
    given = tensors(grad=True, dims=(16, 16, 16))
    ours = functions.scaled_dot_product_attention(*given, mask, enable_gqa=True)
    seen = allowed.expand(2, 4, 31, 37).any(-1)
    assert (ours[~seen] == 0).all()
    weight = torch.randn(ours.shape) * seen[..., None]
    q, k, v = given
    theirs = dense(q, k, v, allowed | ~allowed.any(-1, keepdim=True))  # rows that see nothing have no weight
    torch.testing.assert_close(ours[seen], theirs[seen])
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), given) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", [(2, 3), (1, 3), (2, 1), (3,), (1,), ()], ids=str)
def test_masks_of_several_leading_axes(lead):
    q, k, v = (torch.randn(2, 3, 2, 9, 8) for _ in range(3))
    runs = (torch.arange(9)[:, None] >= torch.arange(9)) | (torch.arange(9) < torch.randint(9, (*lead, 1, 1, 1)))
    for mask in (runs, runs | (torch.rand(*lead, 2, 9, 9) < 0.5), torch.randn(*lead, 2, 1, 9), torch.randn(*lead, 1, 9, 9)):
        ours = functions.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v, mask))


def gaps(*shape):
    """Half of the pairs, by blocks and by tokens; some queries see none."""
    blocks = torch.rand(*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 16)) < 0.6
    wide = blocks.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., : shape[-2], : shape[-1]]
    return wide & (torch.rand(shape) < 0.8) & (torch.rand(*shape[:-1], 1) < 0.95)


def holes(*shape):
    return torch.randn(shape).mul(3).masked_fill(~gaps(*shape), -torch.inf)


ANY_MASKS = {
    "gaps": lambda: gaps(300, 280),
    "gaps of each entry": lambda: gaps(2, 1, 300, 280),
    "gaps of each head": lambda: gaps(4, 300, 280),
    "gaps between keys": lambda: torch.rand(2, 1, 1, 280) < 0.7,
    "whole blocks of keys": lambda: torch.arange(280) // 128 != 1,
    "queries of each head": lambda: torch.rand(1, 4, 300, 1) < 0.7,
    "heads": lambda: torch.tensor([True, False, True, True])[:, None, None],
    "runs that heads do not share": lambda: torch.arange(280) < torch.tensor([10, 280, 0, 150])[:, None, None],
    "numbers": lambda: torch.randn(2, 4, 300, 280),
    "numbers for all": lambda: torch.randn(300, 280),
    "numbers and holes": lambda: holes(2, 1, 300, 280),
    "numbers of keys": lambda: torch.randn(4, 1, 280),
    "numbers of queries": lambda: torch.randn(2, 1, 300, 1),
    "expanded": lambda: holes(4, 1, 280).expand(2, 4, 300, 280),
    "expanded gaps": lambda: (torch.rand(4, 1, 280) < 0.6).expand(2, 4, 300, 280),
    "turned": lambda: holes(280, 300).t(),
    "steps": lambda: torch.randn(300, 560)[:, ::2],
}


@pytest.mark.parametrize("name", list(ANY_MASKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_mask(name, dtype):
    """Against torch in float64, with gradients. Of masks of bool, also as 0 and -inf, and as 0 and the lowest number."""
    torch.manual_seed(5)
    mask = ANY_MASKS[name]()
    forms = [mask if mask.dtype == torch.bool else mask.to(dtype)]
    if mask.dtype == torch.bool:
        forms += [torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, x) for x in (-torch.inf, torch.finfo(dtype).min)]
    elif dtype == torch.bfloat16:
        forms.append(mask)  # float32, which torch takes, too
    given = tensors(grad=True, queries=300, keys=280, dims=(16, 16, 16), dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in given]
    close = {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    for form in forms:
        seen = (form if form.dtype == torch.bool else form > -1e38).expand(2, 4, 300, 280).any(-1)
        ours = functions.scaled_dot_product_attention(*given, form, enable_gqa=True)
        assert (ours[~seen] == 0).all()
        weight = torch.randn(ours.shape).double() * seen[..., None]
        shown = form.masked_fill(~seen.expand(2, 4, 300)[..., None], True if form.dtype == torch.bool else 0)  # torch gives NaN for the others
        theirs = dense(*wide, shown if form.dtype == torch.bool else shown.double())
        torch.testing.assert_close(ours[seen].double(), theirs[seen], rtol=close, atol=close)
        grads = [torch.autograd.grad((x * weight.to(x.dtype)).sum(), y) for x, y in ((ours, given), (theirs, wide))]
        for a, b in zip(*grads, strict=True):
            scale = b.abs().max().item()
            torch.testing.assert_close(a.double(), b, rtol=0, atol=4 * close * max(scale, 1))


def test_masks_beside_what_torch_lacks():
    """Lists, a window and lengths hold beside a mask, which makes no list of its own beside one."""
    torch.manual_seed(5)
    q, k, v = tensors()
    mask = torch.rand(31, 37) < 0.8
    i, j = torch.arange(31)[:, None], torch.arange(37)
    rules = {"window": (9, 3), "q_lens": [31, 20], "kv_lens": [37, 21], "sabi": LISTS, "block_shape": (8, 8)}
    ends = torch.tensor([[31, 37], [20, 21]])[:, :, None, None, None]
    away = j - i - (ends[:, 1] - ends[:, 0])
    allowed = (away <= 3) & (away >= -9) & (i < ends[:, 0]) & (j < ends[:, 1]) & torch.from_numpy(sabi.to_token_mask(LISTS.numpy(), 31, 37, (8, 8)))
    for given in (mask, torch.zeros(31, 37).masked_fill(~mask, -torch.inf), torch.randn(31, 37), mask & (j < 20)):
        ours = functions.scaled_dot_product_attention(q, k, v, given, enable_gqa=True, **rules)
        seen = allowed & given if given.dtype == torch.bool else allowed & (given > -torch.inf)
        bias = torch.zeros(31, 37) if given.dtype == torch.bool else given
        theirs = dense(q, k, v, bias.expand(seen.shape).masked_fill(~seen, -torch.inf)).nan_to_num()
        torch.testing.assert_close(ours, theirs * seen.any(-1, keepdim=True))


def test_masks_are_read_as_what_costs_least():
    from blitz_attn.integrations._torch.masks import read_mask

    near = (torch.arange(400)[:, None] // 200 == torch.arange(400) // 200) & (torch.arange(400) % 7 > 0)
    read = read_mask(near, 400, 400, torch.float32, lists=True)
    assert (read["sabi"].tolist(), read["block_shape"]) == ([[[[0, 1, -1, -1], [0, 1, 2, 3], [1, 2, 3, -1], [1, 2, 3, -1]]]], (128, 128))
    assert read["attn_mask"].data_ptr() == near.data_ptr()
    assert read_mask(near, 400, 400, torch.float32, lists=False).keys() == {"attn_mask"}
    assert read_mask(torch.rand(400, 400) < 0.5, 400, 400, torch.float32, lists=True).keys() == {"attn_mask"}  # no block is empty
    causal = torch.ones(400, 400, dtype=torch.bool).tril()
    for numbers in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mask = torch.full((400, 400), -0.0, dtype=numbers)  # which is 0
        assert read_mask(mask.masked_fill(~causal, -torch.inf), 400, 400, torch.float32, lists=True).keys() == {"kv_ranges"}
        lowest = mask.masked_fill(~causal, torch.finfo(numbers).min)
        kind = "attn_mask" if numbers == torch.float16 else "kv_ranges"
        assert read_mask(lowest, 400, 400, torch.float32, lists=True).keys() == {kind}
        assert read_mask(lowest, 400, 400, torch.float64, lists=True)["attn_mask"] is lowest
        for other in (torch.nan, torch.inf, 1e-4, -1.0):
            mask[399, 399] = other
            assert read_mask(mask, 400, 400, torch.float32, lists=True)["attn_mask"] is mask
    expanded = (torch.rand(400) < 0.5).expand(2, 4, 400, 400)
    assert read_mask(expanded, 400, 400, torch.float32, lists=True)["attn_mask"].numel() == 400


@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 0, 5), (2, 4, 0), (2, 0, 0), (0, 4, 5)])
@pytest.mark.parametrize("shared", [False, True])
def test_masks_without_elements(batch, queries, keys, shared):
    """A call without queries, keys or batch entries gives what the same call without a mask gives."""
    q, k = torch.randn(batch, 3, queries, 8), torch.randn(batch, 3, keys, 8)
    mask = torch.ones((queries, keys) if shared else (batch, 1, queries, keys), dtype=torch.bool)
    ours = functions.scaled_dot_product_attention(q, k, k, mask)
    assert ours.shape == q.shape
    assert torch.equal(ours, functions.scaled_dot_product_attention(q, k, k))


def test_masks_compile():
    """A mask is read when the graph runs."""
    given = tensors()
    mask = torch.ones(31, 37, dtype=torch.bool).tril(5)
    run = torch.compile(lambda q, k, v, m: functions.scaled_dot_product_attention(q, k, v, m, enable_gqa=True), backend="aot_eager", fullgraph=True)
    for m in (mask, mask.expand(2, 1, 31, 37).clone(), torch.ones(2, 1, 1, 37, dtype=torch.bool)):
        assert torch.equal(run(*given, m), functions.scaled_dot_product_attention(*given, m, enable_gqa=True))
    for m in (mask & (torch.arange(37) != 3), torch.randn(4, 31, 37)):
        assert torch.equal(run(*given, m), functions.scaled_dot_product_attention(*given, m, enable_gqa=True))


def test_a_mask_of_padding_needs_no_memory_for_pairs():
    """It is read as it is, not as it is expanded: 24 bytes per query are made of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made.extend(x.numel() for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor))
            return result

    q, k, v = (torch.randn(2, 1, 2000, 8) for _ in range(3))
    mask = torch.ones(2, 1, 1, 2000, dtype=torch.bool)
    mask[1, ..., 700:] = False
    with Sizes():
        out = functions.scaled_dot_product_attention(q, k, v, mask)
    assert max(made) <= q.numel()
    torch.testing.assert_close(out, functions.scaled_dot_product_attention(q, k, v, kv_lens=[2000, 700]))


def test_lists_cut_what_is_attended():
    q, k, v = tensors()
    allowed = torch.from_numpy(sabi.to_token_mask(LISTS.numpy(), 31, 37, (8, 8)))
    ours = functions.scaled_dot_product_attention(q, k, v, sabi=LISTS, block_shape=(8, 8), enable_gqa=True)
    seen = allowed.any(-1)
    torch.testing.assert_close(ours[seen], dense(q, k, v, allowed)[seen])


def test_gradients_as_torchs():
    given = tensors(grad=True, queries=37, dims=(16, 16, 16))
    weight = torch.randn(2, 4, 37, 16)
    ours = functions.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    grads = [torch.autograd.grad((x * weight).sum(), given) for x in (ours, dense(*given, is_causal=True))]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


AXES = [
    # leading axes of query, key and value
    ((2, 4), (1, 4), (1, 4)), ((1, 4), (2, 4), (2, 4)), ((2, 4), (1, 1), (1, 1)), ((2, 4), (2, 1), (2, 1)), ((2, 4), (2, 1), (2, 4)),
    ((2, 1), (2, 4), (2, 4)), ((1, 4), (1, 4), (2, 4)), ((2, 4), (4,), (4,)), ((2, 4), (), ()), ((), (4,), (4,)), ((4,), (1,), (1,)),
    ((4,), (), (4,)), ((3, 2, 4), (1, 2, 4), (3, 1, 1)), ((3, 2, 4), (2, 4), (2, 4)), ((3, 1, 4), (2, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_leading_axes_that_broadcast(axes, causal):
    """As torch's own attention takes them; forward and backward."""
    torch.manual_seed(4)
    given = [torch.randn(*lead, tokens, 16, requires_grad=True) for lead, tokens in zip(axes, (9, 11, 11), strict=True)]
    ours = functions.scaled_dot_product_attention(*given, is_causal=causal)
    theirs = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), given) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    out, lse = functions.scaled_dot_product_attention(*given, is_causal=causal, return_lse=True)
    assert torch.equal(out, ours)
    assert lse.shape == ours.shape[:-1]
    scores = torch.broadcast_shapes(*(x.shape[:-2] for x in given[:2]))
    if not causal and scores == ours.shape[:-2]:  # of others torch takes no mask
        mask = torch.randn(*ours.shape[:-1], 11)
        theirs = torch.nn.functional.scaled_dot_product_attention(*given, mask)
        torch.testing.assert_close(functions.scaled_dot_product_attention(*given, mask), theirs)


@pytest.mark.parametrize("axes", [((2, 4), (1, 2), (1, 2)), ((2, 4), (2, 1), (2, 2)), ((2, 4), (1, 1), (1, 1)), ((4,), (2,), (2,)),
                                  ((2, 4), (2,), (2,)), ((3, 2, 4), (1, 1, 2), (3, 2, 1))], ids=str)  # fmt: skip
def test_leading_axes_that_broadcast_beside_grouped_heads(axes):
    torch.manual_seed(4)
    given = [torch.randn(*lead, tokens, 16) for lead, tokens in zip(axes, (9, 11, 11), strict=True)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=True)
    torch.testing.assert_close(functions.scaled_dot_product_attention(*given, enable_gqa=True), theirs)


def test_what_broadcasts_is_not_copied():
    """One set of keys for a batch of 64: their bytes do not show in the memory that a call takes."""
    q, k, v = torch.randn(64, 4, 1, 64), *(torch.randn(1, 1, 4096, 64) for _ in range(2))
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        out = functions.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert sum(max(0, event.cpu_memory_usage) for event in profile.events()) < k.nbytes


@pytest.mark.parametrize("dynamic", [False, True])
def test_leading_axes_broadcast_in_a_graph(dynamic):
    given = torch.randn(2, 4, 9, 16), torch.randn(1, 1, 11, 16), torch.randn(4, 11, 16)
    run = torch.compile(functions.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(run(*given), functions.scaled_dot_product_attention(*given))
