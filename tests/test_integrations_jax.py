"""The library inside JAX: calls have the bits of the library's own calls, forward and backward, and take part in JAX's transforms."""

import inspect
import subprocess
import sys
import textwrap

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.buffer_callback")  # from JAX 0.6.1 on

import jax.numpy as jnp  # noqa: E402

import blitz_attn  # noqa: E402
from blitz_attn import sabi  # noqa: E402
from blitz_attn.integrations import jax as functions  # noqa: E402
from blitz_attn.integrations._jax import attention as attention_part  # noqa: E402

HEADS, KV_HEADS, TOKENS, DIM, V_DIM = 4, 2, 48, 16, 8
rng = np.random.default_rng(5)
LISTS = sabi.from_block_mask(rng.random((2, HEADS, 3, 6)) < 0.4, dtype="int32")
SHAPE = (16, 8)
RANGES = np.stack([np.maximum(np.arange(TOKENS) - 9, 0), np.arange(TOKENS) + 1], axis=-1).astype(np.int32)
BIAS = rng.standard_normal((HEADS, TOKENS, TOKENS)).astype(np.float32)
HIDES = rng.random((2, 1, TOKENS, TOKENS)) < 0.7
ALIBI = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SINKS = np.array([-1.0, 0.5, 2.0, 0.0], np.float32)
ENDS = np.array([0, 20, 20, TOKENS], np.int32)

RULES = {  # by name: arguments that are arrays, and other arguments
    "dense": ({}, {}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"window": (4, 2)}),
    "lists": ({"sabi": LISTS}, {"block_shape": SHAPE}),
    "lengths": ({"q_lens": np.array([48, 9]), "kv_lens": np.array([31, 48])}, {"causal": True}),
    "offsets": ({"q_begin": np.int32(3), "q_total": np.int32(60)}, {"causal": True}),
    "ranges": ({"kv_ranges": RANGES}, {}),
    "bias": ({"attn_mask": BIAS}, {"scale": 0.3}),
    "mask": ({"attn_mask": HIDES}, {"causal": True}),
    "alibi": ({"alibi_slopes": ALIBI}, {"causal": True}),
    "sinks": ({"sinks": SINKS, "attn_mask": BIAS}, {"causal": True}),
    "softcap": ({"sinks": SINKS}, {"softcap": 0.8}),
    "BSND": ({"sinks": SINKS}, {"layout": "BSND", "causal": True}),
    "BSH": ({"sinks": SINKS}, {"layout": "BSH", "num_heads": HEADS, "num_kv_heads": KV_HEADS, "causal": True}),
    "TND": ({"cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS}, {"layout": "TND", "causal": True}),
}


def normal(n, shape, dtype="float32"):
    """Normal numbers from seed n. They are drawn by NumPy, because JAX would compile each of its operations first."""
    return jnp.asarray(np.random.default_rng(n).standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


def inputs(dtype="float32", layout="BNSD"):
    """q, k and v."""
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))
    made = [np.asarray(normal(n, (2, TOKENS, *shape), dtype)) for n, shape in enumerate(shapes)]
    if layout == "BNSD":
        made = [x.swapaxes(1, 2) for x in made]
    elif layout == "BSH":
        made = [x.reshape(2, TOKENS, -1) for x in made]
    return [jnp.asarray(x[0] if layout == "TND" else x) for x in made]


def same(ours, theirs):
    """Whether two trees of arrays have the same bits."""
    ours, theirs = (jax.tree.leaves(x) for x in (ours, theirs))
    assert len(ours) == len(theirs)
    return all(x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()
               for x, y in zip(ours, theirs, strict=True))  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_of_attention(rule, dtype):
    """The bits are those of the library's own call, with and without jit. All arrays are traced."""
    arrays, options = RULES[rule]
    q, k, v = inputs(dtype, options.get("layout", "BNSD"))
    theirs = blitz_attn.block_sparse_attention(*(np.asarray(x) for x in (q, k, v)), **arrays, **options, return_lse=True)
    call = lambda q, k, v, arrays: functions.block_sparse_attention(q, k, v, **arrays, **options, return_lse=True)  # noqa: E731
    assert same(jax.jit(call)(q, k, v, arrays), theirs)
    eager = call(q, k, v, arrays)
    assert all(isinstance(x, jax.Array) for x in eager)
    assert same(eager, theirs)
    assert same(jax.jit(lambda *x: functions.block_sparse_attention(*x, **arrays, **options))(q, k, v), theirs[0])


@pytest.mark.sampled("options")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("compiled", [True, False])
def test_gradients(rule, compiled):
    """Gradients through both results are the library's, except those of sinks, which are computed here from the results."""
    arrays, options = RULES[rule]
    learned = {name: x for name, x in arrays.items() if name in ("attn_mask", "alibi_slopes", "sinks") and x.dtype != bool}
    rest = {name: x for name, x in arrays.items() if name not in learned}
    given = inputs(layout=options.get("layout", "BNSD"))
    attend = lambda q, k, v, learned: functions.block_sparse_attention(q, k, v, **learned, **rest, **options, return_lse=True)  # noqa: E731
    results, gradient = jax.vjp(jax.jit(attend) if compiled else attend, *given, learned)
    weights = [normal(n, x.shape) for n, x in enumerate(results)]
    *found, of_learned = gradient(tuple(weights))
    host, (out, lse), (dout, dlse) = ([np.asarray(x) for x in arrays] for arrays in (given, results, weights))
    rules = {name: x for name, x in arrays.items() if name != "sinks"} | options
    *right, dmask, dslopes = blitz_attn.block_sparse_attention_backward(dout, *host, out, lse, dlse=dlse, bias_grads=True, **rules)
    assert same(found, right)
    exact = {"attn_mask": dmask, "alibi_slopes": dslopes}
    if "sinks" in learned:
        by_head = options.get("layout") not in ("BSND", "BSH")
        products = dout * out if by_head else (dout * out).reshape(2, TOKENS, HEADS, V_DIM).swapaxes(1, 2)
        products = products.sum(-1)
        exact["sinks"] = (np.exp(SINKS[:, None] - lse) * (dlse - products)).sum((0, 2))
    for name, x in of_learned.items():
        np.testing.assert_allclose(x, exact[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_gradient_of_one_result():
    """A loss may use only one of the two results. The other result then has no gradient."""
    q, k, v = inputs()
    call = lambda q: functions.block_sparse_attention(q, k, v, causal=True, return_lse=True)  # noqa: E731
    of_out, of_lse = (jax.jit(jax.grad(lambda q, n=n: call(q)[n].sum()))(q) for n in range(2))
    both = jax.jit(jax.grad(lambda q: sum(x.sum() for x in call(q))))(q)
    np.testing.assert_allclose(of_out + of_lse, both, rtol=1e-5, atol=1e-5)
    assert bool(abs(of_lse).max() > 0)


def test_gradients_of_bfloat16_have_its_dtype():
    given = [*inputs("bfloat16"), jnp.asarray(BIAS, "bfloat16"), jnp.asarray(SINKS, "bfloat16")]
    loss = lambda *x: functions.block_sparse_attention(*x[:3], attn_mask=x[3], sinks=x[4]).astype("float32").sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=range(5)))
    grads, exact = gradient(*given), gradient(*(x.astype("float32") for x in given))
    for x, grad, right in zip(given, grads, exact, strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, "bfloat16")
        np.testing.assert_allclose(grad.astype("float32"), right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("compiled", [True, False])
def test_vmap(compiled):
    """vmap makes one call after the other. It also works with shared arguments, over two axes, and for gradients."""
    q, k, v = inputs()
    wrap = jax.jit if compiled else lambda f: f
    whole = functions.block_sparse_attention(q, k, v, causal=True)
    one = lambda q, k, v: functions.block_sparse_attention(q[None], k[None], v[None], causal=True)[0]  # noqa: E731
    assert same(wrap(jax.vmap(one))(q, k, v), whole)
    shared = wrap(jax.vmap(one, in_axes=(0, None, None)))(q, k[0], v[0])
    assert same(shared, jnp.stack([one(x, k[0], v[0]) for x in q]))
    many = jnp.stack([q, q[::-1], q * 2])
    twice = wrap(jax.vmap(jax.vmap(one), in_axes=(0, None, None)))(many, k, v)
    assert same(twice, jnp.stack([functions.block_sparse_attention(x, k, v, causal=True) for x in many]))
    loss = lambda q, k, v: (one(q, k, v) ** 2).sum()  # noqa: E731
    each = wrap(jax.vmap(jax.grad(loss, argnums=(0, 1))))(q, k, v)
    assert same(each, wrap(jax.grad(lambda q, k, v: jax.vmap(loss)(q, k, v).sum(), argnums=(0, 1)))(q, k, v))
    assert wrap(jax.vmap(one))(q[:0], k[:0], v[:0]).shape == (0, *whole.shape[1:])


def test_scan_and_checkpoint():
    q, k, v = inputs()
    loss = lambda q: (functions.block_sparse_attention(q, k, v, causal=True) ** 2).sum()  # noqa: E731
    plain = jax.grad(loss)(q)
    assert same(jax.jit(jax.grad(jax.checkpoint(loss)))(q), plain)
    steps = lambda qs: jax.lax.scan(lambda total, q: (total + loss(q), None), 0.0, qs)[0]  # noqa: E731
    assert same(jax.jit(jax.grad(steps))(jnp.stack([q, q])), jnp.stack([plain, plain]))


def test_memory_is_shared(monkeypatch):
    """The library reads the memory of JAX's arrays, and writes into the memory of JAX's results."""
    seen = {}

    def run(out, **given):
        seen.update(out=out[0].ctypes.data, **{name: given[name].ctypes.data for name in "qkv"})
        original(out, **given)

    original = attention_part._attend
    monkeypatch.setattr(attention_part, "_attend", run)
    q, k, v = inputs()
    out = jax.jit(lambda *x: functions.block_sparse_attention(*x))(q, k, v)
    assert seen == {"out": out.unsafe_buffer_pointer()} | {n: x.unsafe_buffer_pointer() for n, x in zip("qkv", (q, k, v), strict=True)}


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-39), ("float16", 3e-7)])
def test_subnormal_numbers_stay(dtype, scale):
    """JAX's threads flush subnormal numbers to 0, but the library's calls keep them."""
    q, k, v = inputs(dtype)
    v = jnp.asarray((np.asarray(v) * scale).astype(dtype))
    for level in blitz_attn.isa_levels():
        with blitz_attn.isa(level):
            theirs = blitz_attn.block_sparse_attention(*(np.asarray(x) for x in (q, k, v)))
            assert np.asarray(theirs).any() or (level, dtype) == ("amx", "float32")  # tiles read subnormal numbers as 0
            assert same(jax.jit(lambda *x: functions.block_sparse_attention(*x))(q, k, v), theirs)


def test_options_are_read_when_a_call_is_made():
    """Options that the caller changes after the call have no effect, and a refused call leaves no option behind."""
    q, k, v = inputs()
    call = lambda window: jax.vmap(lambda q: functions.block_sparse_attention(q[None], k[:1], v[:1], window=window)[0])(q)  # noqa: E731
    window, expected = [4, 0], jnp.concatenate([functions.block_sparse_attention(x[None], k[:1], v[:1], window=(4, 0)) for x in q])
    assert same(call(window), expected)
    window[0] = 30
    assert same(call((4, 0)), expected)
    with pytest.raises(jax.errors.JaxRuntimeError, match="window: expected integers"):
        jax.block_until_ready(call((5.0, 0)))
    jax.block_until_ready(call((5, 0)))


# ---- JAX's own signature -------------------------------------------------------------------------------------------

HAS_RESIDUAL = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters  # not in JAX 0.6
JAX_RULES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (5, 2), "query_seq_lengths": np.array([30, 30], np.int32)},  # without lengths, JAX 0.6 ignores the window
    "one number": {"local_window_size": 4, "is_causal": True},
    "before alone": {"local_window_size": (3, -1), "query_seq_lengths": np.array([30, 30], np.int32)},
    "before alone, causal": {"local_window_size": (3, -1), "is_causal": True},
    "behind alone": {"local_window_size": (-2, 1000), "key_value_seq_lengths": np.array([21, 30], np.int32)},
    "behind alone, causal": {"local_window_size": (-2, 9), "is_causal": True},
    "nothing": {"local_window_size": -1, "query_seq_lengths": np.array([30, 30], np.int32)},
    "nothing but one": {"local_window_size": (np.int64(-1), 1), "query_seq_lengths": np.array([9, 30], np.int32)},
    "scale": {"scale": 0.2},
    "lengths": {"query_seq_lengths": np.array([9, 30], np.int32), "key_value_seq_lengths": np.array([21, 17], np.int32)},
    "causal lengths": {"is_causal": True, "key_value_seq_lengths": np.array([21, 17], np.int32)},
    "bias": {"bias": rng.standard_normal((1, HEADS, 30, 1)).astype(np.float32) * np.arange(40, dtype=np.float32) / 9},
    "mask": {"mask": (rng.random((2, 1, 30, 40)) < 0.5) | (np.arange(40) == 0)},
    "both": {"mask": (rng.random((2, 1, 30, 40)) < 0.5) | (np.arange(40) == 0), "bias": BIAS[None, :, :30, :40], "is_causal": True},
}
SIZED = ("bias", "mask", "both")  # these rules have arrays for 30 queries and 40 keys


CELLS = [(rule, (30, 40)) for rule in JAX_RULES] + [(rule, (40, 30)) for rule in JAX_RULES if rule not in SIZED]


@pytest.mark.sampled("options")
@pytest.mark.parametrize(("rule", "sizes"), CELLS)
def test_dot_product_attention(rule, sizes):
    """Results and gradients are those of JAX's own function, with more keys than queries and with fewer. If a query sees no key, JAX returns the
    mean of all values, and this library returns 0."""
    options = JAX_RULES[rule]
    q, k, v = (normal(n, (2, size, heads, DIM)) for n, size, heads in zip(range(3), (sizes[0], sizes[1], sizes[1]), (4, 2, 2), strict=True))
    both = (functions.dot_product_attention, jax.nn.dot_product_attention)
    residual = {"return_residual": True} if HAS_RESIDUAL else {}
    out, lse = functions.dot_product_attention(q, k, v, **options, return_residual=True)
    theirs, *their_lse = jax.tree.leaves(jax.nn.dot_product_attention(q, k, v, **options, **residual))
    empty = np.asarray(lse) == -np.inf
    assert (np.asarray(out)[empty] == 0).all()
    np.testing.assert_allclose(np.where(empty[..., None], 0, out), np.where(empty[..., None], 0, theirs), rtol=1e-4, atol=1e-5)
    for x in their_lse:
        np.testing.assert_allclose(np.where(empty, 0, lse), np.where(empty, 0, x), rtol=1e-4, atol=1e-5)
        assert (np.asarray(x)[empty] < -1e30).all()  # JAX returns a finite number if no key is seen
    compiled = jax.jit(lambda *x: functions.dot_product_attention(*x, **options, return_residual=True))
    assert same(compiled(q, k, v), (out, lse))
    if rule not in ("causal", "both"):  # other gradients are tested above
        return
    loss = lambda function: lambda *x: (jnp.where(empty[..., None], 0, function(*x, **options)) ** 2).sum()  # noqa: E731
    ours, theirs = (jax.grad(loss(f), argnums=(0, 1, 2))(q, k, v) for f in both)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_dot_product_attention_without_a_batch_and_with_lists():
    q, k, v = (x[0] for x in inputs(layout="BSND"))
    out, lse = functions.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert (out.shape, lse.shape) == ((TOKENS, HEADS, V_DIM), (TOKENS, HEADS))
    whole = functions.dot_product_attention(q[None], k[None], v[None], is_causal=True, return_residual=True)
    assert same((out, lse), (whole[0][0], whole[1][0]))
    listed = functions.dot_product_attention(q[None], k[None], v[None], sabi=LISTS[:1], block_shape=SHAPE)
    assert same(listed, functions.block_sparse_attention(q[None], k[None], v[None], LISTS[:1], block_shape=SHAPE, layout="BSND"))


@pytest.mark.parametrize(
    ("error", "sentence", "changes"),
    [
        (ValueError, "key: ", {"key": np.ones((2, TOKENS, KV_HEADS, 5), np.float32)}),
        (TypeError, "mask: expected bool, got float32", {"mask": BIAS}),
        (TypeError, "bias: expected numbers, got bool", {"bias": np.ones((TOKENS, TOKENS), bool)}),
        (ValueError, "bias: expected ", {"bias": np.ones((TOKENS, 7), np.float32)}),
        (TypeError, "local_window_size: expected ", {"local_window_size": (1.5, 2)}),
        (ValueError, r"key_value_seq_lengths: expected lengths from 0 to 48, got 49 at \[1\]", {"key_value_seq_lengths": [3, 49]}),
    ],
)
def test_dot_product_attention_names_its_arguments(error, sentence, changes):
    call = dict(zip(("query", "key", "value"), inputs(layout="BSND"), strict=True)) | changes
    with pytest.raises(error, match=f"^{sentence}"):
        functions.dot_product_attention(**{name: jnp.asarray(x) if name in ("query", "key") else x for name, x in call.items()})


# ---- Other operations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [{"density": 0.3}, {"density": [0.2, 0.3, 0.4, 0.5]}, {"top_k": 2, "chooser": "antidiagonal"}])
def test_choosing(budget):
    q, k, v = (normal(n, (1, heads, 300, 32)) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    call = lambda *x: functions.select_and_attend_prefill(*x, causal=True, **budget, return_lse=True)  # noqa: E731
    theirs = blitz_attn.select_and_attend_prefill(*(np.asarray(x) for x in (q, k, v)), causal=True, **budget, return_lse=True)
    assert same(jax.jit(call)(q, k, v), theirs)
    assert same(call(q, k, v), theirs)
    with pytest.raises(TypeError, match=r"^select_and_attend_prefill: expected a call that JAX does not differentiate"):
        jax.grad(lambda q: call(q, k, v)[0].sum())(q)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["tables", "triple", "selected"])
def test_paged(dtype, form):
    q = normal(0, (2, 8, 32), "float32" if dtype == "float32" else "bfloat16")
    caches = [jnp.asarray((np.asarray(normal(n, (7, 4, 2, 32))) * 20).astype(jnp.dtype(dtype))) for n in (1, 2)]
    scales = {"k_scale": jnp.float32(0.1), "v_scale": 0.2} if dtype in ("int8", "float8_e4m3fn") else {}
    tables, lens = jnp.array([[3, 1, 6], [0, 5, 2]]), jnp.array([11, 5])
    selected = (jnp.array([[[0, 2], [1, 2]], [[0, 1], [1, 0]]]),) if form == "selected" else ()
    if form == "triple":
        tables, lens = (jnp.array([0, 3, 5]), jnp.array([3, 1, 6, 0, 5]), jnp.array([3, 1])), None
    name = "paged_select_attention" if selected else "paged_attention"
    call = lambda *x: getattr(functions, name)(*x, sinks=np.arange(8.0), return_lse=True, **scales)  # noqa: E731
    given = (q, *caches, tables, lens, *selected)
    theirs = getattr(blitz_attn, name)(*jax.tree.map(np.asarray, given), sinks=np.arange(8.0), return_lse=True, **scales)
    assert same(jax.jit(call)(*given), theirs)
    assert same(call(*given), theirs)
    with pytest.raises(TypeError, match=rf"^{name}: expected a call that JAX does not differentiate"):
        jax.grad(lambda q: call(q, *given[1:])[0].astype("float32").sum())(q)


def test_paged_under_vmap():
    """The map goes over three sets of queries, which share one cache."""
    q, caches = normal(0, (3, 2, 8, 32)), [normal(n, (7, 4, 2, 32)) for n in (1, 2)]
    tables, lens = jnp.array([[3, 1, 6], [0, 5, 2]]), jnp.array([11, 5])
    call = lambda q: functions.paged_attention(q, *caches, tables, lens)  # noqa: E731
    assert same(jax.jit(jax.vmap(call))(q), jnp.stack([call(x) for x in q]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choosing_tokens(dtype):
    given = [normal(n, shape, dtype) for n, shape in enumerate([(2, 45, 5, 16), (2, 60, 16), (2, 45, 5)])]
    options = {"kv_lens": jnp.array([9, 60]), "q_begin": jnp.array([2, 30])}
    theirs = blitz_attn.select_tokens(*map(np.asarray, given), 7, causal=True, return_scores=True, **jax.tree.map(np.asarray, options))
    for call in (functions.select_tokens, jax.jit(functions.select_tokens, static_argnames=("top_k", "causal", "return_scores"))):
        assert same(call(*given, top_k=7, causal=True, return_scores=True, **options), theirs)
        assert same(call(*given, top_k=7, causal=True, **options), theirs[0])
    with pytest.raises(TypeError, match="^select_tokens: expected a call that JAX does not differentiate"):
        jax.grad(lambda q: functions.select_tokens(q, *given[1:], 7, return_scores=True)[1].sum())(given[0])
    mapped = jax.vmap(lambda k: functions.select_tokens(given[0], k, given[2], 7))(jnp.stack([given[1] + 1, given[1]]))
    assert same(mapped[1], functions.select_tokens(*given, 7))


@pytest.mark.parametrize("mode", ["paper", "mslk"])
@pytest.mark.parametrize("form", ["batch", "varlen", "weights"])
def test_nsa(mode, form):
    q, k, v = (normal(n, (1, 96, heads, 16)) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    gates = 1 / (1 + jnp.exp(-normal(3, (1, 96, HEADS, 3))))
    options = {"compress_block_size": 8, "num_selected_blocks": 3, "window_size": 16, "mode": mode}
    arrays = {"q": q, "k": k, "v": v, "gates": gates}
    if form == "varlen":
        arrays = {name: x[0] for name, x in arrays.items()} | {"cu_seqlens": jnp.array([0, 40, 96])}
    if form == "weights":
        arrays |= {f"w_{x}_compress": normal(n, (KV_HEADS, 16, 16)) * 0.2 for n, x in enumerate("kv")}
        arrays["gate_proj_weight"] = normal(7, (HEADS, 3, 16))
        del arrays["gates"]
    host = {name: np.asarray(x) for name, x in arrays.items()}
    theirs, context = blitz_attn.nsa.nsa(**host, **options, return_context=True)
    call = lambda arrays: functions.nsa(**arrays, **options)  # noqa: E731
    assert same(jax.jit(call)(arrays), theirs)
    assert same(call(arrays), theirs)
    grads = blitz_attn.nsa.nsa_backward(2 * theirs, context)
    floats = {name: x for name, x in arrays.items() if name != "cu_seqlens"}
    rest = {name: x for name, x in arrays.items() if name == "cu_seqlens"}
    for wrap in (jax.jit, lambda f: f):
        got = wrap(jax.grad(lambda floats: (call({**floats, **rest}) ** 2).sum()))(floats)
        for name, x in got.items():
            np.testing.assert_array_equal(x, getattr(grads, f"d{name}"))


# ---- Refusals -------------------------------------------------------------------------------------------------------


Q, K, V = inputs()
TABLES = jnp.array([0, 1, 2]), jnp.array([0, 1]), jnp.array([2, 2])
attend, paged = functions.block_sparse_attention, functions.paged_attention


@pytest.mark.parametrize("count", [0, -1, 3, 64])
def test_heads_that_do_not_divide(count):
    with pytest.raises(ValueError, match=f"^num_heads: expected a divisor of the last axis of q, 32, got {count}"):
        jax.jit(lambda x: attend(x, x, x, layout="BSH", num_heads=count))(jnp.ones((1, 8, 32)))


@pytest.mark.parametrize(("name", "x"), [("scale", 1.0), ("causal", True), ("num_threads", 1), ("softcap", 1.0)])
def test_options_that_are_traced(name, x):
    with pytest.raises(TypeError, match=f"^{name}: expected a Python value, got a tracer of JAX"):
        jax.jit(lambda s: attend(Q, K, V, **{name: s}))(x)


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (TypeError, "q: expected a JAX array, got list", lambda: attend([1.0], K, V)),
        (TypeError, "window: expected a Python value, got a tracer of JAX", lambda: jax.jit(lambda s: attend(Q, K, V, window=(s, 0)))(1)),
        (ValueError, "kv_lens: expected integers of 32 bits, .*, got 4294967301",
         lambda: attend(Q, K, V, kv_lens=np.array([2**32 + 5, 48]))),
        (TypeError, "kv_lens: expected an array that JAX can hold, got list", lambda: attend(Q, K, V, kv_lens=[2**70, 48])),
        (ValueError, "kv_lens: expected 2 entries, one per batch entry, got 0", lambda: attend(Q, K, V, kv_lens=[])),
        (ValueError, r"block_shape: expected two sizes of at least 1, got \(16, 0\)",
         lambda: attend(Q, K, V, LISTS, block_shape=np.array([16, 0]))),
        (ValueError, r"v: expected 3 or 4 axes, got shape \(8,\)", lambda: jax.jit(functions.nsa)(Q, K, V[0, 0, 0])),
        (TypeError, "selected: expected an array, got NoneType", lambda: functions.paged_select_attention(Q[0], K, V, TABLES, None, None)),
        (ValueError, r"k: expected 4 axes for layout BNSD, got shape \(4, 48, 16\)",
         lambda: jax.jit(attend)(Q, K.reshape(4, TOKENS, DIM), V)),
        (ValueError, "query: expected 4 axes", lambda: jax.jit(functions.dot_product_attention)(Q[0, 0], K, V)),
        (ValueError, "layout: expected one of", lambda: jax.jit(lambda q: attend(q, K, V, layout="BDSN"))(Q)),
        (TypeError, "sabi: expected an array that JAX can hold, got str", lambda: attend(Q, K, V, "all")),
        (ValueError, "seq_lens: expected None with ", lambda: paged(Q[:, :, 0], K, V, TABLES, jnp.array([999, 1]))),
        (TypeError, "block_tables: expected an array, got NoneType", lambda: paged(Q[:, :, 0], K, V, (TABLES[0], None, TABLES[2]))),
        (ValueError, "block_tables: expected an array or a tuple of 3 arrays, got a tuple of 2", lambda: paged(Q[0], K, V, (K, V))),
        (ValueError, r"q: expected 3 axes, got shape \(2, 4, 48, 16\)",
         lambda: jax.jit(paged)(Q, K, V, jnp.zeros((1, 1), int), jnp.ones(1, int))),
    ],
)  # fmt: skip
def test_sentences_while_tracing(error, sentence, call):
    with pytest.raises(error, match=f"^{sentence}"):
        call()


def test_sentences_while_running():
    """Under a transform, the library's sentence is part of JAX's error. Otherwise the sentence is the whole error."""
    q, k, v = inputs()
    call = lambda lens: functions.block_sparse_attention(q, k, v, kv_lens=lens)  # noqa: E731
    sentence = r"kv_lens: expected lengths from 0 to 48, got 49 at \[1\]"
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call(jnp.array([3, 49]))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ValueError: {sentence}"):
        jax.block_until_ready(jax.jit(call)(jnp.array([3, 49])))


@pytest.mark.parametrize("call", [functions.block_sparse_attention, functions.nsa])
def test_second_gradients_are_refused(call):
    q, k, v = (jnp.ones((1, 8, 2, 8)) for _ in range(3))
    first = jax.grad(lambda q: (call(q, k, v) ** 2).sum())
    with pytest.raises(TypeError, match=rf"^{call.__name__}: expected to be differentiated once"):
        jax.grad(lambda q: first(q).sum())(q)


@pytest.mark.parametrize("call", [functions.block_sparse_attention, functions.dot_product_attention, functions.nsa])
@pytest.mark.parametrize("compiled", [True, False])
def test_forward_mode_and_transposes_are_refused(call, compiled):
    """JAX refuses forward mode and transposes even for v, in which attention is linear. Reverse mode can replace a transpose."""
    q, k, v = (jnp.ones((1, 8, 2, 8)) for _ in range(3))
    attend = (jax.jit if compiled else lambda f: f)(lambda v: call(q, k, v))
    for forward in (lambda: jax.jvp(attend, (v,), (v,)), lambda: jax.linearize(attend, v)[1](v), lambda: jax.jacfwd(attend)(v)):
        with pytest.raises(TypeError, match=r"^can't apply forward-mode .* to a custom_vjp function"):
            forward()
    with pytest.raises(NotImplementedError, match="custom_vjp_call"):
        jax.linear_transpose(attend, v)(v)
    assert jax.vjp(attend, v)[1](v)[0].shape == v.shape


INTERRUPTED = """
    import os, signal, threading, time
    import jax
    import jax.numpy as jnp
    from blitz_attn.integrations.jax import block_sparse_attention as attend

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process that a shell starts in the background ignores SIGINT
    long, small = jnp.ones((1, 1, 120000, 64)), jax.random.normal(jax.random.key(0), (1, 1, 90, 64))
    call = {call}
    expected = jax.block_until_ready(call(small))
    run = call.lower(long).compile() if hasattr(call, "lower") else call  # an interrupt while JAX traces never reaches the library
    def interrupt():
        time.sleep(0.4)
        global sent
        sent = time.process_time()
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        jax.block_until_ready(run(long))
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
        took = time.process_time() - sent
        print(type(error).__name__, "KeyboardInterrupt" in repr(error), took, bool((call(small) == expected).all()))
    else:
        print("ran to its end")
"""
INTERRUPTIBLE = {
    "call": "lambda q: attend(q, q, q)",
    "jit": "jax.jit(lambda q: attend(q, q, q) * 2)",
    "vmap": "jax.vmap(lambda q: attend(q[None], q[None], q[None])[0])",
    "grad": "jax.grad(lambda q: attend(q, q, q).sum())",
    "grad under jit": "jax.jit(jax.grad(lambda q: attend(q, q, q).sum()))",
}


@pytest.mark.sampled("options")
@pytest.mark.parametrize("name", INTERRUPTIBLE)
def test_ctrl_c(name):
    """Ctrl-C ends a call soon, and the next call is right. If JAX calls the library back, JAX's own error names the interrupt."""
    code = textwrap.dedent(INTERRUPTED).format(call=INTERRUPTIBLE[name])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kind, named, took, right = done.stdout.split()
    assert kind == ("KeyboardInterrupt" if name in ("call", "grad") else "JaxRuntimeError")
    assert named == right == "True"
    assert float(took) < 8  # processor time of all threads; a whole call takes far more


def test_calls_of_the_library_name_this_module():
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"^q: .* got a tracer of JAX, .*blitz_attn\.integrations\.jax"):
        jax.jit(blitz_attn.block_sparse_attention)(q, k, v)


def test_without_jax():
    """The module can be imported without JAX, and its functions then say that JAX is missing."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import numpy as np\n"
        "from blitz_attn.integrations.jax import block_sparse_attention\n"
        "try:\n    block_sparse_attention(*[np.zeros((1, 1, 8, 8), np.float32)] * 3)\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "jax" in done.stdout
