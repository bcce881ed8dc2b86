"""The backend "blitz_attn" of diffusers gives the results and gradients of the backend "native", or leaves a call to that backend."""

import random
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn  # noqa: E402

from blitz_attn.integrations._diffusers import backend, dense  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402
from blitz_attn.integrations.diffusers import register  # noqa: E402
from cases_diffusers import (  # noqa: E402
    MODELS,
    _defaults,  # noqa: F401
    close,
    forward,
    inputs,
    pytestmark,  # noqa: F401
    small_model,
)
from interpreters import python  # noqa: E402

DISPATCHED = [name for name in MODELS if name != "cog"]  # CogVideoX's processor calls torch's attention, whatever the backend


@pytest.fixture(autouse=True)
def _registered():
    register()


@pytest.fixture
def computed(monkeypatch):
    """The calls of attention that this library computes."""
    calls, own = [], backend.computed

    def count(*arguments, **options):
        calls.append(arguments)
        return own(*arguments, **options)

    monkeypatch.setattr(backend, "computed", count)
    return calls


# ---- The name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
def test_models_give_native_results(name, computed):
    model, given = small_model(name), inputs(name, batch=2, lengths=[6, 3])
    expected = forward(model, given)
    model.set_attention_backend("blitz_attn")
    found = forward(model, given)
    assert close(found, expected)
    assert len(computed) == {"wan": 4, "hunyuan": 2, "cog": 0, "ltx": 4, "flux": 2}[name]
    assert not TOLD


def test_a_context_takes_the_name(computed):
    q = torch.randn(1, 9, 2, 8)
    with attention_backend("blitz_attn"):
        dispatch_attention_fn(q, q, q)
    assert len(computed) == 1
    dispatch_attention_fn(q, q, q)
    assert len(computed) == 1


def test_the_name_is_a_member_like_the_others():
    import copy
    import pickle

    register()
    member = AttentionBackendName("blitz_attn")
    assert member is AttentionBackendName.BLITZ_ATTN is AttentionBackendName["BLITZ_ATTN"]
    assert member == "blitz_attn"
    assert [x for x in AttentionBackendName if x == "blitz_attn"] == [member]
    assert pickle.loads(pickle.dumps(member)) is member is copy.deepcopy(member)
    assert isinstance(AttentionBackendName.__members__, type(AttentionBackendName.__members__))
    assert "BLITZ_ATTN" in AttentionBackendName.__members__
    assert dispatch._AttentionBackendRegistry.list_backends().count("blitz_attn") == 1


def in_python(text, **environment):
    """The words that a program prints in a process of its own."""
    return python("-W", "ignore", "-c", textwrap.dedent(text), **environment).split()


def test_the_environment_variable_takes_the_name():
    text = """
        from blitz_attn.integrations.diffusers import register
        register()
        register()
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend
        from diffusers.utils import constants
        with attention_backend("native"):
            register()
            print(_AttentionBackendRegistry.get_active_backend()[0].value)
        print(_AttentionBackendRegistry.get_active_backend()[0].value, constants.DIFFUSERS_ATTN_BACKEND)
    """
    assert in_python(text, DIFFUSERS_ATTN_BACKEND="blitz_attn") == ["native", "blitz_attn", "blitz_attn"]
    assert in_python(text, DIFFUSERS_ATTN_BACKEND="_native_math") == ["native", "_native_math", "_native_math"]


def test_neither_torch_nor_diffusers_is_imported_with_the_module():
    text = """
        import sys
        import blitz_attn.integrations.diffusers as module
        print(module.SparseVideo.__name__, "torch" in sys.modules, "diffusers" in sys.modules)
    """
    assert in_python(text) == ["SparseVideo", "False", "False"]


@pytest.mark.parametrize("missing", ["_supported_arg_names", "_backends", "register"])
def test_another_interface_is_refused(missing, monkeypatch):
    monkeypatch.delattr(dispatch._AttentionBackendRegistry, missing)
    with pytest.raises(ImportError, match=r"^diffusers: expected a release that has a registry of attention backends, such as 0\.42\.1, got \d"):
        register()


def test_other_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "dispatch_attention_fn", lambda q, k, v: None)
    with pytest.raises(ImportError, match="^diffusers: expected a release"):
        register()


# ---- Calls that this library computes -----------------------------------------------------------------------------------


def draw(seed):
    """Tensors and options of one call, all drawn together."""
    rng = random.Random(f"diffusers {seed}")
    torch.manual_seed(seed)
    batch, queries, keys, heads, dim = rng.randint(1, 3), rng.randint(1, 70), rng.randint(1, 90), rng.choice((2, 4)), rng.choice((8, 24, 64))
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    options = {"scale": rng.choice((None, 0.3)), "enable_gqa": rng.random() < 0.3}
    kind = rng.choice(("none", "causal", "keys", "bool", "numbers", "two axes", "no key"))
    if kind == "causal":
        options["is_causal"], keys = True, queries
    q, k, v = (torch.randn(batch, n, heads, dim).to(dtype) for n in (queries, keys, keys))
    if options["enable_gqa"]:
        k, v = k[:, :, :2], v[:, :, :2]
    shown = torch.rand(batch, 1, 1, keys) < 0.7
    shown[..., 0] = True
    options["attn_mask"] = {
        "keys": shown,
        "bool": shown & (torch.rand(1, heads, queries, keys) < 0.8) | (torch.arange(keys) == 0),
        "numbers": torch.randn(batch, 1, queries, keys).to(dtype),
        "two axes": shown[:, 0, 0],
        "no key": shown & (torch.arange(batch) > 0)[:, None, None, None],
    }.get(kind)
    return q, k, v, options


def exact(q, k, v, options):
    """float64 attention by torch."""
    mask = options["attn_mask"]
    return dispatch_attention_fn(
        q.double(), k.double(), v.double(), backend="_native_math",
        **options | {"attn_mask": mask.double() if mask is not None and mask.is_floating_point() else mask[:, None, None] if mask is not None and mask.dim() == 2 else mask},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_calls_are_as_exact_as_native_ones(seed):
    q, k, v, options = draw(seed)
    found = dispatch_attention_fn(q, k, v, backend="blitz_attn", **options)
    native = dispatch_attention_fn(q, k, v, backend="native", **options)
    expected = exact(q, k, v, options).nan_to_num()
    assert found.dtype == q.dtype
    assert found.shape == q.shape
    least = torch.finfo(q.dtype).eps * max(1.0, v.abs().max().item())
    assert (found.double() - expected).abs().max() <= 2 * (native.double().nan_to_num() - expected).abs().max() + least
    assert not TOLD


@pytest.mark.parametrize("seed", range(40, 55))
def test_gradients_are_as_exact_as_native_ones(seed):
    q, k, v, options = draw(seed)
    up = torch.randn(q.shape).to(q.dtype)

    def gradients(tensors, call):
        tensors = [x.detach().clone().requires_grad_() for x in tensors]
        call(*tensors).backward(up.to(tensors[0].dtype))
        return [x.grad.double().nan_to_num() for x in tensors]

    found, native = (
        gradients((q, k, v), lambda *x, name=name: dispatch_attention_fn(*x, backend=name, **options)) for name in ("blitz_attn", "native")
    )
    expected = gradients((q.double(), k.double(), v.double()), lambda *x: exact(*x, options))
    for ours, theirs, right in zip(found, native, expected, strict=True):
        least = 4 * torch.finfo(q.dtype).eps * max(1.0, right.abs().max().item())
        assert (ours - right).abs().max() <= 3 * (theirs - right).abs().max() + least


def test_a_mask_of_numbers_has_a_gradient():
    q, k, v, _options = draw(0)
    q, k, v = q.float(), k.float(), v.float()
    bias = torch.randn(1, 1, q.shape[1], k.shape[1])
    grads = []
    for name in ("blitz_attn", "native"):
        own = bias.clone().requires_grad_()
        dispatch_attention_fn(q, k, v, own, enable_gqa=True, backend=name).square().sum().backward()
        grads.append(own.grad)
    assert torch.allclose(*grads, atol=1e-4)


def test_tensors_are_read_where_they_lie(monkeypatch):
    seen = []
    own = dense.operators.call
    monkeypatch.setattr(dense.operators, "call", lambda name, *given, **options: seen.append((given, options)) or own(name, *given, **options))
    q, k, v = (torch.randn(2, 30, 4, 16) for _ in range(3))
    out = dispatch_attention_fn(q, k, v, backend="blitz_attn")
    (given, options), = seen
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in (q, k, v)]
    assert options["layout"] == "BSND"
    assert out.is_contiguous()  # models view the output as (B, S, H * D)


def test_autocast_casts_as_torch_does():
    q = torch.randn(1, 40, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, native = (dispatch_attention_fn(q, q, q, backend=name) for name in ("blitz_attn", "native"))
    assert found.dtype == native.dtype == torch.bfloat16
    assert (found.float() - native.float()).abs().max() < 0.05


def test_threads_use_their_own_contexts_at_once(computed):
    """Calls of several threads at once have the results of one thread's calls."""
    calls = [draw(seed) for seed in range(8)]
    expected = [dispatch_attention_fn(q, k, v, backend="blitz_attn", **options) for q, k, v, options in calls]
    found = [None] * len(calls)

    def run(n):
        q, k, v, options = calls[n]
        found[n] = dispatch_attention_fn(q, k, v, backend="blitz_attn", **options)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", DISPATCHED)
def test_a_compiled_model_has_attention_in_its_graph(name):
    torch._dynamo.reset()
    model, given = small_model(name), inputs(name, batch=2, lengths=[6, 3])
    expected = forward(model, given)
    model.set_attention_backend("blitz_attn")
    graphs = []

    def keep(graph, examples):
        graphs.append(graph)
        return graph.forward

    found = forward(torch.compile(model, backend=keep, fullgraph=True), given)
    assert close(found, expected)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("blitz_attn.block_sparse_attention" in text for text in names)
    assert sum("scaled_dot_product_attention" in text for text in names) == (name == "hunyuan")  # attention of text alone is not dispatched
    torch._dynamo.reset()


# ---- What is left to torch ----------------------------------------------------------------------------------------------


def test_dropout_is_left_to_torch(computed, caplog):
    q = torch.randn(1, 50, 2, 16)
    results = []
    for name in ("native", "blitz_attn", "blitz_attn"):
        torch.manual_seed(3)
        results.append(dispatch_attention_fn(q, q, q, dropout_p=0.4, backend=name))
    assert torch.equal(results[0], results[1])
    assert not computed
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("blitz_attn.integrations.diffusers", "WARNING", "attention by torch instead of blitz_attn, because of dropout of attention weights")
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: ((q.to("meta"), k.to("meta"), v.to("meta")), {}), "tensors on meta"),
        (lambda q, k, v: ((q, k[:, :7], v[:, :7]), {"is_causal": True}), "a causal rule with a mask, or for different numbers of queries and keys"),
        (lambda q, k, v: ((q, k, v), {"_parallel_config": object()}), "context parallelism"),
        (lambda q, k, v: ((q, k, v), {"return_lse": True}), "a returned log-sum-exp"),
        (lambda q, k, v: ((q, k[:, :, :1], v[:, :, :1]), {}), "different numbers of heads of queries and keys without enable_gqa"),
        (lambda q, k, v: ((q, k[:, :, :1], v[:, :, :2]), {"enable_gqa": True}), "different numbers of heads of keys and values"),
        (lambda q, k, v: ((q, k[:1].expand(1, -1, -1, -1), v[:1]), {}), "queries, keys and values of different batches"),
        (lambda q, k, v: ((q.expand(-1, -1, -1, 600), k.expand(-1, -1, -1, 600), v), {}), "a head dim above 576"),
        (lambda q, k, v: ((q, k, v.half()), {}), "tensors of torch.float32, torch.float32, torch.float16"),
        (lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(30, 31)}), "a mask of shape (30, 31) where attention has (2, 4, 30, 30)"),
        (lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(30, 30, dtype=torch.int64)}), "a mask of torch.int64 on cpu"),
    ],
)
def test_reasons_to_leave_a_call_to_native(change, reason, monkeypatch, computed):
    """The call arrives at the native backend as it was made."""
    tensors, options = change(torch.randn(2, 30, 4, 1), torch.randn(2, 30, 4, 1), torch.randn(2, 30, 4, 16))
    arrived = []
    monkeypatch.setitem(
        dispatch._AttentionBackendRegistry._backends, AttentionBackendName.NATIVE, lambda *given, **more: arrived.append((given, more)) or "theirs"
    )
    assert backend.attend(*tensors, **options) == "theirs"
    (given, more), = arrived
    assert all(x is y for x, y in zip(given, tensors, strict=True))
    assert {name: x for name, x in more.items() if name in options} == options
    assert {f"attention by torch instead of blitz_attn, because of {reason}"} == TOLD
    assert not computed
