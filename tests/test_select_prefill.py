"""Choosers of blocks for prefill: against brute force in float64, and what they promise whatever the numbers are."""

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select, testing
from cases import DTYPES, ISA_LEVELS, bits_option, same_bits

CHOOSERS = {
    "pooled": select.Pooled(),
    "mean": select.Pooled((4, 16), "mean", "mean"),
    "bound": select.Pooled(16, "bound"),
    "antidiagonal": select.Antidiagonal(8),
    "sampled_rows": select.SampledRows(4),
    "vertical_slash": select.VerticalSlash(20),
}
BUDGETS = [{"density": 0.4}, {"top_p": 0.8}, {"threshold": 0.05}, {"top_k": 4}]


def make(*sizes, seed=0, **options):
    q, k, _ = testing.make_qkv(*sizes, seed=seed, **options)
    return q, k


@pytest.mark.sampled
@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(isa_level, name, dtype):
    q, k = make(2, 4, 2, 150, 170, 24, dtype=dtype, seed=3)
    for budget in BUDGETS:
        options = {"chooser": CHOOSERS[name], "causal": True, "kv_lens": [170, 90], "q_lens": [140, 90], "block_shape": (32, 32)} | budget
        options |= bits_option(q)
        _, scores = blitz_attn.select_blocks_prefill(q, k, return_scores=True, **options)
        _, expected = reference.select_blocks_prefill(q, k, return_scores=True, **options)
        assert np.abs(scores - expected).max() < 1e-5


def test_longer_than_a_chunk():
    """Groups of several chunks, rows of several panels, blocks larger than a chunk: maxima move as the row goes on."""
    q, k = make(1, 2, 1, 300, 2600, 16, seed=4)
    k *= np.linspace(0.2, 4, k.shape[2], dtype=np.float32)[:, None]
    for chooser, block_shape in [
        (select.Pooled((4, 1)), (256, 2048)), (select.Pooled(1), (4, 8)), (select.SampledRows(64), (128, 640)), (select.VerticalSlash(70), (64, 64)),
    ]:  # fmt: skip
        options = {"chooser": chooser, "block_shape": block_shape, "density": 0.5, "window": (2000, 100), "return_scores": True}
        _, expected = reference.select_blocks_prefill(q, k, **options)
        for level in ISA_LEVELS:
            with blitz_attn.isa(level):
                _, scores = blitz_attn.select_blocks_prefill(q, k, **options)
            assert np.abs(scores - expected).max() < 2e-5, level


@pytest.mark.parametrize("name", ["pooled", "antidiagonal", "sampled_rows", "vertical_slash"])
@pytest.mark.parametrize("block_shape", [(12, 20), (13, 7), (4, 64), (64, 6)])
def test_names_fit_any_block(name, block_shape):
    """The sizes of a chooser that is named become divisors of the block; those of an instance stay, and are refused."""
    q, k = make(1, 2, 1, 100, 110, 16, seed=5)
    options = {"block_shape": block_shape, "density": 0.5, "causal": True, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, chooser=name, **options)
    expected_sabi, expected = reference.select_blocks_prefill(q, k, chooser=name, **options)
    assert np.abs(scores - expected).max() < 1e-5
    assert np.array_equal(sabi, expected_sabi)
    profile = select.calibrate([[(q, k, k)]], target=0.9, chooser=name, block_shape=block_shape, steps=2)
    assert blitz_attn.select_blocks_prefill(q, k, **profile.options(0, heads=2, kv_heads=1, head_dim=16)).shape[:3] == sabi.shape[:3]
    with pytest.raises(ValueError, match="pool: expected a divisor of block_shape"):
        blitz_attn.select_blocks_prefill(q, k, chooser=select.Pooled(8), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deep(isa_level, dtype):
    """Products of more elements than any head has: means and ranges, and tokens of a stride side by side."""
    q, k = make(1, 1, 1, 70, 90, 576, dtype=dtype, seed=6)
    for chooser in (select.Pooled(4), select.Antidiagonal(16)):
        options = {"chooser": chooser, "block_shape": (16, 16), "density": 0.5, "causal": True, "return_scores": True}
        options |= bits_option(q)
        _, scores = blitz_attn.select_blocks_prefill(q, k, **options)
        _, expected = reference.select_blocks_prefill(q, k, **options)
        assert np.abs(scores - expected).max() < 1e-5


@pytest.mark.parametrize("name", CHOOSERS)
def test_same_bits(name):
    """Whatever the number of threads, the layout and what else is in the batch."""
    q, k = make(3, 4, 2, 200, 220, 32, seed=5)
    lens = {"q_lens": [200, 77, 130], "kv_lens": [220, 200, 0]}
    options = {"chooser": CHOOSERS[name], "top_p": 0.9, "causal": True, "block_shape": (32, 32), "return_scores": True}
    expected = blitz_attn.select_blocks_prefill(q, k, num_threads=1, **lens, **options)
    for threads in (2, 5):
        assert all(map(same_bits, blitz_attn.select_blocks_prefill(q, k, num_threads=threads, **lens, **options), expected))
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k)]
    assert all(map(same_bits, blitz_attn.select_blocks_prefill(*turned, layout="BSND", **lens, **options), expected))
    for b in range(3):
        one = [x[b : b + 1] for x in (q, k)]
        own = {key: x[b : b + 1] for key, x in lens.items()}
        assert same_bits(blitz_attn.select_blocks_prefill(*one, **own, **options)[1], expected[1][b : b + 1])


def test_density_is_exact_where_scores_tie():
    q = np.zeros((1, 2, 512, 8), np.float32)
    sabi = blitz_attn.select_blocks_prefill(q, q, density=0.37, block_shape=(32, 32), sink=0, recent=0)
    assert (sabi >= 0).sum() == int(0.37 * 2 * 256 + 0.5)


@pytest.mark.parametrize("top_k", [40, 400])
def test_many_blocks_with_nearly_the_same_score(top_k):
    """Nearly all blocks of a row have scores of one power of two, in no order, and one block is far below."""
    q, k = make(1, 1, 1, 16, 4096, 16, seed=7)
    k *= np.float32(0.02)
    k[0, 0, 2000:2008] = -30 * np.sign(q[0, 0, 15])
    options = {"chooser": select.SampledRows(1), "block_shape": (16, 8), "sink": 0, "recent": 0, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, top_k=top_k, **options)
    expected = np.sort(np.argsort(-scores[0, 0, 0], kind="stable")[:top_k])
    assert (sabi[0, 0, 0, :top_k] == expected).all()


@pytest.mark.parametrize("budget", [{"density": 1}, {"top_p": 1.0}, {"top_k": 99}])
def test_everything(budget):
    """A budget of all keeps what plain attention sees."""
    q, k, v = testing.make_qkv(1, 2, 2, 256, 256, 16)
    out = blitz_attn.select_and_attend_prefill(q, k, v, causal=True, block_shape=(32, 32), **budget)
    assert np.abs(out - blitz_attn.block_sparse_attention(q, k, v, causal=True)).max() < 1e-5


def test_forced_blocks():
    q, k = make(1, 1, 1, 320, 320, 16)
    options = {"causal": True, "block_shape": (32, 32), "threshold": 1.0}
    sabi = blitz_attn.select_blocks_prefill(q, k, **options)
    assert [[c for c in row if c >= 0] for row in sabi[0, 0].tolist()] == [sorted({0, max(0, r - 1), r}) for r in range(10)]
    sabi = blitz_attn.select_blocks_prefill(q, k, sink=2, recent=1, last_columns=1, first_rows=3, last_rows=1, **options)
    rows = [[c for c in row if c >= 0] for row in sabi[0, 0].tolist()]
    assert rows == [[0], [0, 1], [0, 1, 2]] + [[0, 1, r] for r in range(3, 9)] + [list(range(10))]


def test_a_number_a_head():
    q, k = make(1, 4, 2, 256, 256, 16)
    options = {"causal": True, "block_shape": (16, 16), "recent": 1}
    each = [0.3, 0.5, 0.8, 0.4]
    together = blitz_attn.select_blocks_prefill(q, k, density=each, **options)
    for h, density in enumerate(each):
        kept = (together[:, h] >= 0).sum()
        assert kept == int(density * 16 * 17 / 2 + 0.5)
    mixed = blitz_attn.select_blocks_prefill(q, k, top_k=[3, 5], per_kv_head=True, **options)
    assert ((mixed >= 0).sum(axis=-1)[0, :, -1] == [3, 3, 5, 5]).all()
    assert (mixed[:, 0] == mixed[:, 1]).all()


@pytest.mark.parametrize("name", CHOOSERS)
def test_what_is_no_number(name):
    """A key that is NaN spoils the rows that look at it and no others; a row without any number keeps blocks alike."""
    q, k = make(1, 1, 1, 256, 256, 16)
    k[0, 0, 200] = np.nan
    options = {"chooser": CHOOSERS[name], "causal": True, "block_shape": (32, 32), "density": 0.6, "return_scores": True}
    sabi, scores = blitz_attn.select_blocks_prefill(q, k, **options)
    expected_sabi, expected = reference.select_blocks_prefill(q, k, **options)
    assert np.abs(scores - expected).max() < 1e-5
    assert same_bits(sabi, expected_sabi)


def test_kinds_of_arrays():
    q, k = make(1, 2, 1, 128, 128, 16, dtype="bfloat16")
    options = {"top_p": 0.7, "block_shape": (16, 16)}
    expected = blitz_attn.select_blocks_prefill(q, k, **options, **(bits_option(q)))
    bits = [x.view(np.uint16) for x in (q, k)]
    assert same_bits(blitz_attn.select_blocks_prefill(*bits, dtype="bfloat16", **options), expected)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) for x in (q, k)]
    sabi = blitz_attn.select_blocks_prefill(*tensors, **options)
    assert isinstance(sabi, torch.Tensor)
    assert same_bits(sabi.numpy(), expected)
    small = blitz_attn.select_blocks_prefill(*tensors, index_dtype="uint16", **options)
    assert (small.numpy().astype(np.int16) == expected).all()


@pytest.mark.parametrize("flag", ["return_lse", "return_sabi"])
def test_flags_are_checked_before_out_is_written(flag):
    q, k, v = testing.make_qkv(1, 2, 2, 64, 64, 16, 16)
    out = np.full(q.shape, np.nan, np.float32)
    with pytest.raises(TypeError, match=f"^{flag}: expected True or False, got NoneType"):
        blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, out=out, **{flag: None})
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_and_attend(dtype):
    q, k, v = testing.make_qkv(2, 4, 2, 130, 150, 32, 16, dtype=dtype)
    options = {"density": 0.5, "causal": True, "block_shape": (32, 16)}
    shared = bits_option(q)
    out, lse, sabi = blitz_attn.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **options, **shared)
    assert same_bits(sabi, blitz_attn.select_blocks_prefill(q, k, **options, **shared))
    again = blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(32, 16), causal=True, return_lse=True, **shared)
    assert all(map(same_bits, (out, lse), again))
    given = np.zeros_like(out)
    assert blitz_attn.select_and_attend_prefill(q, k, v, out=given, **options, **shared) is given
    assert same_bits(given, out)


ADDED = {
    "attn_mask": np.random.default_rng(5).standard_normal((2, 1, 130, 150), np.float32),
    "mask of bool": np.random.default_rng(6).random((130, 150)) < 0.7,
    "alibi_slopes": [0.5, 0.25, 0.0, -0.1],
    "sinks": np.array([0.5, -2.0, 3.0, 0.0], np.float32),
    "softcap": 1.5,
}


@pytest.mark.parametrize("name", [*ADDED, "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_to_scores_reaches_attention_alone(dtype, name):
    q, k, v = testing.make_qkv(2, 4, 2, 130, 150, 32, 16, dtype=dtype)
    plain = {"density": 0.5, "causal": True, "block_shape": (32, 16), **bits_option(q)}
    added = {key: x for key, x in ADDED.items() if key != "mask of bool"}
    added = added if name == "all" else {"attn_mask" if name == "mask of bool" else name: ADDED[name]}
    out, lse, sabi = blitz_attn.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **plain, **added)
    without, _, chosen = blitz_attn.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **plain)
    assert same_bits(sabi, chosen)
    assert not same_bits(out, without)
    options = {key: x for key, x in plain.items() if key != "density"}
    again = blitz_attn.block_sparse_attention(q, k, v, sabi, return_lse=True, **options, **added)
    assert all(map(same_bits, (out, lse), again))
    if dtype in ("float32", "float64"):
        exact, exact_lse = reference.select_and_attend_prefill(q, k, v, return_lse=True, **plain, **added)
        np.testing.assert_allclose(out, exact, atol=4e-6)
        np.testing.assert_allclose(lse, exact_lse, atol=4e-6)


@pytest.mark.parametrize(
    ("error", "text", "added"),
    [
        (ValueError, r"attn_mask: expected shape .*, got \(3, 64, 64\)", {"attn_mask": np.ones((3, 64, 64), bool)}),
        (TypeError, "attn_mask: expected an array, got list", {"attn_mask": [[True] * 64] * 64}),
        (ValueError, r"alibi_slopes: expected shape \(2,\).*, got \(3,\)", {"alibi_slopes": [1, 2, 3]}),
        (ValueError, r"sinks: expected shape \(2,\).*, got \(3,\)", {"sinks": [1, 2, 3]}),
        (ValueError, "softcap: expected .*, got -1", {"softcap": -1}),
    ],
)  # fmt: skip
def test_what_is_added_is_checked_before_out_is_written(error, text, added):
    q, k, v = testing.make_qkv(1, 2, 2, 64, 64, 16, 16)
    out = np.full(q.shape, np.nan, np.float32)
    with pytest.raises(error, match=f"^{text}$"):
        blitz_attn.select_and_attend_prefill(q, k, v, density=0.5, out=out, **added)
    assert np.isnan(out).all()


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("name", ["pooled", "antidiagonal", "sampled_rows", "vertical_slash"])
def test_reference_of_select_and_attend(name, budget):
    """Choosers by their names, rows that nothing forces, rows of all blocks, and a batch entry without tokens."""
    q, k, v = testing.make_qkv(2, 4, 2, 150, 170, 24, 16, seed=3)
    options = {"chooser": name, "causal": True, "q_lens": [150, 0], "kv_lens": [170, 0], "block_shape": (32, 32), "sink": 0, "recent": 0}
    options |= budget | {"first_rows": 1, "last_rows": 1}
    out, lse, sabi = blitz_attn.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **options)
    exact, exact_lse, exact_sabi = reference.select_and_attend_prefill(q, k, v, return_lse=True, return_sabi=True, **options)
    assert same_bits(sabi, exact_sabi)
    np.testing.assert_allclose(out, exact, atol=2e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-6)
    kept = (sabi[0] >= 0).sum(axis=-1)
    assert (kept[:, 0] == 2).all()  # the first 32 queries see 52 keys
    assert (kept[:, -1] == 6).all()
    assert (kept >= 1).all()
    assert (sabi[1] == -1).all()
    assert same_bits(reference.select_and_attend_prefill(q, k, v, **options), exact)
    given = np.full_like(exact, np.nan)
    assert reference.select_and_attend_prefill(q, k, v, out=given, **options) is given
    assert same_bits(given, exact)


@pytest.mark.parametrize("operation", [blitz_attn.select_blocks_prefill, reference.select_blocks_prefill])
def test_a_row_keeps_its_best_block(operation):
    """Where nothing is forced and no score reaches the threshold."""
    q, k = make(1, 2, 1, 128, 160, 16, seed=8)
    options = {"threshold": 0.999, "block_shape": (32, 32), "sink": 0, "recent": 0, "return_scores": True}
    sabi, scores = operation(q, k, **options)
    assert sabi.shape == (1, 2, 4, 1)
    assert (sabi[..., 0] == scores.argmax(axis=-1)).all()


def huge(*shape):
    """A view of a shape that no memory could hold, of head dimension 1."""
    return np.broadcast_to(np.zeros((), np.float32), shape)[..., None]


BAD = [
    ({"chooser": "best"}, ValueError, "chooser: expected one of pooled, antidiagonal, sampled_rows, vertical_slash, got 'best'"),
    ({"chooser": 3}, TypeError, "chooser: expected Pooled, Antidiagonal, SampledRows, VerticalSlash or the name of one, got int"),
    ({"chooser": select.Pooled(5)}, ValueError, "pool: expected a divisor of block_shape[0] = 64, got 5"),
    ({"chooser": select.Pooled((8, 0))}, ValueError, "pool: expected a divisor of block_shape[1] = 64, got 0"),
    ({"chooser": select.Pooled((8, 8, 8))}, ValueError, "pool: expected a number of tokens or a pair of them, got (8, 8, 8)"),
    ({"chooser": select.Pooled(8, "max")}, ValueError, "term: expected one of both, mean, bound, got 'max'"),
    ({"chooser": select.Pooled(8, over="sum")}, ValueError, "over: expected 'largest' or 'mean', got 'sum'"),
    ({"chooser": select.Antidiagonal(48)}, ValueError, "stride: expected a divisor of block_shape[0] = 64, got 48"),
    ({"chooser": select.SampledRows(7)}, ValueError, "rows: expected a divisor of block_shape[0] = 64, got 7"),
    ({"chooser": select.VerticalSlash(0)}, ValueError, "rows: expected at least 1 query, got 0"),
    ({"density": None}, ValueError, "density, top_p, threshold, top_k: expected exactly one of them, got none"),
    ({"top_p": 0.5}, ValueError, "density, top_p, threshold, top_k: expected exactly one of them, got density and top_p"),
    ({"density": 0.0}, ValueError, "density: expected a number above 0 and at most 1, got 0"),
    ({"density": 1.5}, ValueError, "density: expected a number above 0 and at most 1, got 1.5"),
    ({"density": float("nan")}, ValueError, "density: expected a number above 0 and at most 1, got nan"),
    ({"density": [0.5, 0.5, 0.5]}, ValueError, "density: expected one number, or one for each of 2 lists, got (3,)"),
    ({"density": "all"}, TypeError, "density: expected a number, got str"),
    ({"density": [True, False]}, TypeError, "density: expected numbers, got bool"),
    ({"density": [[0.5, 0.5]]}, ValueError, "density: expected a number, or one per head, got shape (1, 2)"),
    ({"density": None, "top_k": [[3]]}, ValueError, "top_k: expected a number, or one per head, got shape (1, 1)"),
    ({"chooser": select.Antidiagonal(4096), "block_shape": (4096, 4096), "q": np.zeros((1, 2, 128, 64), np.float32),
      "k": np.zeros((1, 2, 128, 64), np.float32)}, ValueError, "stride: expected at most 1024 tokens with D = 64, got 4096"),
    ({"density": None, "top_p": -0.1}, ValueError, "top_p: expected a number above 0 and at most 1, got -0.1"),
    ({"density": None, "top_k": 0}, ValueError, "top_k: expected at least 1 block, got 0"),
    ({"density": None, "top_k": 1.5}, TypeError, "top_k: expected an integer, got float"),
    ({"sink": -1}, ValueError, "sink: expected at least 0 blocks, got -1"),
    ({"recent": -3}, ValueError, "recent: expected at least 0 blocks, got -3"),
    ({"last_rows": -1}, ValueError, "last_rows: expected at least 0 blocks, got -1"),
    ({"index_dtype": "float32"}, ValueError, "index_dtype: expected one of int32, uint16, int16, int64, got 'float32'"),
    ({"block_shape": (1, 1), "chooser": select.Pooled(1), "q": huge(2**12, 2**10, 2**20), "k": huge(2**12, 2**10, 2**20)}, ValueError,
     "q: expected scores below 2^63 bytes, got shape (4096, 1024, 1048576, 1048576)"),
    ({"block_shape": (1, 1), "chooser": select.Pooled(1), "index_dtype": "int16", "k": np.zeros((1, 2, 40000, 8), np.float32)}, ValueError,
     "index_dtype: expected one that holds 40000 columns, got int16"),
    ({"k": np.zeros((1, 2, 128, 9), np.float32)}, ValueError, "k: expected shape (B, Hkv, Skv, D) with D = 8 like q, got (1, 2, 128, 9)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "sentence"), BAD, ids=lambda x: str(x)[:60])
def test_bad_calls(changes, kind, sentence):
    q, k = make(1, 2, 2, 128, 128, 8)
    call = {"q": q, "k": k, "density": 0.5} | changes
    with pytest.raises(kind) as caught:
        blitz_attn.select_blocks_prefill(**call)
    assert str(caught.value) == sentence
