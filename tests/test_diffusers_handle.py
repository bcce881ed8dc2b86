"""`sparse_video`: a model gets its own attention back, and attention that is left dense is logged once."""

import copy
import gc
import inspect
import logging
import re
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend  # noqa: E402

from blitz_attn import video  # noqa: E402
from blitz_attn.integrations._diffusers import backend, geometries, sparse  # noqa: E402
from blitz_attn.integrations.diffusers import SparseVideo, register, sparse_video  # noqa: E402
from blitz_attn.video import Geometry, Schedule, SlidingTiles  # noqa: E402
from cases_diffusers import (  # noqa: E402
    MODELS,
    _defaults,  # noqa: F401
    close,
    forward,
    geometry_of,
    inputs,
    logged,
    pytestmark,  # noqa: F401
    small_model,
)
from interpreters import python  # noqa: E402
from test_diffusers_video import FULL, LOCAL, SMALL, computed, masks_of, reasons, run, under_masks  # noqa: E402, F401

CHOSEN = SparseVideo(density=0.3, **SMALL)


# ---- A model gets its own attention back -------------------------------------------------------------------------------------


def state(model):
    """The state of a model: the attributes of all its modules, by identity."""
    return {
        name: {key: (id(x) if not isinstance(x, dict) else {k: id(y) for k, y in x.items()}) for key, x in vars(module).items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_as_it_was(name):
    model, given = small_model(name), inputs(name)
    before, tensors, expected = state(model), {key: x.clone() for key, x in model.state_dict().items()}, forward(model, given)
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)) as handle:
        assert not torch.equal(forward(model, given), expected)
        assert model.state_dict().keys() == tensors.keys()
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    handle.undo()
    assert state(model) == before
    assert all(torch.equal(x, tensors[key]) for key, x in model.state_dict().items())
    assert torch.equal(forward(model, given), expected)


def test_errors_leave_nothing_behind(monkeypatch):
    model, given = small_model("wan"), inputs("wan")
    before, expected = state(model), forward(model, given)

    def stop():
        with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
            forward(model, given)
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        stop()
    assert state(model) == before
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
        found = forward(model, given)
        with pytest.raises(TypeError, match="missing"):
            model(given["hidden_states"])

        def fail(*given, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(sparse.dense.operators, "call", fail)
            with pytest.raises(KeyboardInterrupt):
                forward(model, given)
        assert sparse._here.now is None
        assert sparse._here.layer is None
        assert not torch.overrides._get_current_function_mode_stack()
        assert torch.equal(forward(model, given), found)
    assert torch.equal(forward(model, given), expected)


def test_a_failure_while_a_model_is_prepared_leaves_it_as_it_was(monkeypatch):
    model = small_model("wan")
    before, own, count = state(model), sparse._put, []

    def put(*arguments):
        count.append(arguments)
        if len(count) == 3:
            raise MemoryError
        own(*arguments)

    monkeypatch.setattr(sparse, "_put", put)
    with pytest.raises(MemoryError):
        sparse_video(model, SparseVideo(LOCAL, **SMALL))
    assert state(model) == before


def test_a_layer_that_a_model_uses_twice_is_changed_once(computed):  # noqa: F811
    model, given = copy.deepcopy(small_model("wan")), inputs("wan")
    model.blocks[1] = model.blocks[0]
    before, expected = state(model), forward(model, given)
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
        assert not torch.equal(forward(model, given), expected)
        assert [x is not None for x in computed] == [True, True]
    assert state(model) == before
    assert torch.equal(forward(model, given), expected)
    with pytest.raises(ValueError, match=r"^dense_layers: expected layers from 0 to 0, got 1$"):
        sparse_video(model, SparseVideo(LOCAL, dense_layers=(1,), **SMALL))


def test_lists_go_with_the_statement(computed):  # noqa: F811
    """The lists of all threads are freed. The handle still shows the step and the share of the blocks."""
    model, config = small_model("wan"), SparseVideo(density=0.3, schedule=Schedule(refresh_every=9), **SMALL)
    with sparse_video(model, config) as handle:
        work = threading.Thread(target=lambda: forward(model, inputs("wan")))
        work.start()
        work.join()
        go, begun = threading.Event(), threading.Event()
        waiting = threading.Thread(target=lambda: (forward(model, inputs("wan")), begun.set(), go.wait()))
        waiting.start()
        begun.wait(60)
        forward(model, inputs("wan"))
        assert {x.dtype for x in computed} == {torch.int16}
        lists, shown = [weakref.ref(x) for x in computed], repr(handle)
        computed.clear()
        assert sum(x() is not None for x in lists) == 4
    handle.undo()
    assert repr(handle) == shown != "Handle(WanTransformer3DModel, step=None, density=None)"
    gc.collect()
    assert not any(x() is not None for x in lists)
    go.set()
    waiting.join()


def test_rules_for_each_head_need_the_number_of_heads(computed):  # noqa: F811
    """Some models (Krea 2) have layers that do not say their number of heads. One rule for all heads works for these models."""
    model, given = copy.deepcopy(small_model("wan")), inputs("wan")
    expected = run("wan", SparseVideo(LOCAL, **SMALL), given)
    heads = {layer: layer.heads for layer in (block.attn1 for block in model.blocks)}
    for layer in heads:
        del layer.heads
    sentence = "rule: expected one rule, because layers of WanTransformer3DModel do not say how many heads they have, got 2"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        sparse_video(model, SparseVideo([LOCAL, FULL], **SMALL))
    with sparse_video(model, SparseVideo([LOCAL], **SMALL)):
        for layer, number in heads.items():
            layer.heads = number  # the processor reads the number
        assert torch.equal(forward(model, given), expected)


def test_control_branches_are_sparse(computed):  # noqa: F811
    torch.manual_seed(0)
    model = diffusers.WanVACETransformer3DModel(**MODELS["wan"][1], vace_layers=[0], vace_in_channels=6).eval()
    given = inputs("wan") | {"control_hidden_states": torch.randn(1, 6, 3, 10, 14)}
    before = state(model)
    with sparse_video(model, SparseVideo(LOCAL, geometry=Geometry([(3, 5, 7)]), dense_layers=(0,), **SMALL)):
        forward(model, given)
    assert [x is not None for x in computed] == [True, False, True]  # the control branch runs first, and has the last number
    assert state(model) == before
    assert not reasons()


def test_a_model_is_in_one_statement_at_a_time():
    model = small_model("wan")
    with sparse_video(model, CHOSEN):
        before = state(model)
        with pytest.raises(ValueError, match=r"^model: expected one that is not in a sparse_video yet, got WanTransformer3DModel$"):
            sparse_video(model, CHOSEN)
        assert state(model) == before
    with sparse_video(model, CHOSEN):
        pass


def test_methods_that_others_wrap_in_the_meantime_stay():
    model, given = copy.deepcopy(small_model("wan")), inputs("wan")
    expected, handle = forward(model, given), sparse_video(model, SparseVideo(LOCAL, **SMALL))
    inner, calls = model.forward, []
    model.forward = lambda *arguments, **options: calls.append(1) or inner(*arguments, **options)
    found = forward(model, given)
    handle.undo()
    assert not torch.equal(found, expected)
    assert torch.equal(forward(model, given), expected)
    assert len(calls) == 2


def test_methods_that_others_have_wrapped_before_are_called(computed):  # noqa: F811
    model, given = copy.deepcopy(small_model("wan")), inputs("wan")
    own, calls = model.blocks[0].attn1.forward, []
    wrapped = model.blocks[0].attn1.forward = lambda *arguments, **options: calls.append(1) or own(*arguments, **options)
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
        forward(model, given)
    assert len(calls) == 1
    assert len(computed) == 2
    assert model.blocks[0].attn1.forward is wrapped


def test_copies_are_sparse_as_long_as_the_model_is(computed):  # noqa: F811
    given = inputs("wan")
    expected = forward(small_model("wan"), given)
    with sparse_video(small_model("wan"), SparseVideo(LOCAL, **SMALL)):
        twin = copy.deepcopy(small_model("wan"))
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        forward(twin, given)
        assert len(computed) == 2
    assert not forward(twin, given).any()
    assert torch.equal(forward(small_model("wan"), given), expected)
    with sparse_video(twin, SparseVideo(LOCAL, **SMALL)):
        forward(twin, given)
    assert len(computed) == 4


# ---- Several at once -----------------------------------------------------------------------------------------------------------


def test_models_do_not_disturb_each_other():
    first, second, other = small_model("wan"), small_model("cog"), small_model("ltx")
    given = {name: inputs(name) for name in ("wan", "cog", "ltx")}
    alone = [run("wan", SparseVideo(LOCAL, **SMALL), given["wan"]), run("cog", CHOSEN, given["cog"]), forward(other, given["ltx"])]
    with sparse_video(first, SparseVideo(LOCAL, **SMALL)) as handle, sparse_video(second, CHOSEN) as more:
        found = [forward(first, given["wan"]), forward(second, given["cog"]), forward(other, given["ltx"])]
        forward(first, given["wan"] | {"timestep": torch.tensor([3.0])})
        assert (handle.step, more.step) == (1, 0)
    assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


def test_a_model_that_calls_another_one_goes_on_with_its_own():
    """The other model is called in a layer, as a control network would be."""
    outer, given = copy.deepcopy(small_model("wan")), inputs("wan")
    expected = run("wan", SparseVideo(LOCAL, **SMALL), given)
    own = outer.blocks[1].forward
    outer.blocks[1].forward = lambda *arguments: forward(small_model("cog"), inputs("cog")) is not None and own(*arguments)
    with sparse_video(outer, SparseVideo(LOCAL, **SMALL)), sparse_video(small_model("cog"), CHOSEN):
        assert torch.equal(forward(outer, given), expected)


def test_threads_count_their_own_steps():
    """Two threads make two videos with one model at once. The videos have different numbers of steps."""
    model, schedule = small_model("wan"), Schedule(dense_steps=1, refresh_every=2)
    config = SparseVideo(LOCAL, density=0.2, schedule=schedule, **SMALL)
    works = [[inputs("wan", (3, 5, 7), seed=n, timestep=t) for t in range(9, 9 - 3 - n, -1)] for n in range(2)]

    def video_of(work):
        return [forward(model, given) for given in work]

    expected = []
    for work in works:
        with sparse_video(model, config):
            expected.append(video_of(work))
    found, steps, together = [None, None], [None, None], threading.Barrier(2)

    def run_thread(n, handle):
        together.wait()
        found[n], steps[n] = video_of(works[n]), handle.step

    with sparse_video(model, config) as handle:
        threads = [threading.Thread(target=run_thread, args=(n, handle)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.step is None  # this thread has made no step
    assert steps == [2, 3]
    assert all(torch.equal(x, y) for n in range(2) for x, y in zip(found[n], expected[n], strict=True))


# ---- Beside other things ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
def test_the_backend_of_a_model_computes_what_is_not_sparse(name, computed, monkeypatch):  # noqa: F811
    register()
    model, given = small_model(name), inputs(name, batch=2, lengths=[6, 3])
    config = SparseVideo(LOCAL, **SMALL)
    expected = under_masks(monkeypatch, model, given, geometry_of(name, (3, 5, 7), 6).num_tokens, masks_of(name, config, (3, 5, 7)))
    dense, own = [], backend.computed
    monkeypatch.setattr(backend, "computed", lambda *arguments, **options: dense.append(arguments) or own(*arguments, **options))
    with sparse_video(model, config):
        model.set_attention_backend("blitz_attn")
        assert close(forward(model, given), expected)
        assert len(computed) == 2
        assert len(dense) == {"wan": 2, "ltx": 2}.get(name, 0)
        with attention_backend("_native_math"):
            model.reset_attention_backend()
            assert close(forward(model, given), expected)
    assert not reasons()


@pytest.mark.parametrize(
    ("asked", "reason"), [({"return_lse": True}, "a returned log-sum-exp"), ({"_parallel_config": object()}, "context parallelism")]
)
def test_what_the_backend_cannot_do_in_a_sparse_layer_is_dense(asked, reason, monkeypatch):
    register()
    model, given = small_model("wan"), inputs("wan")
    expected, seen = forward(model, given), []
    backends, ours = _AttentionBackendRegistry._backends, AttentionBackendName("blitz_attn")
    native = backends[AttentionBackendName.NATIVE]

    def without(*arguments, return_lse, _parallel_config, **options):
        seen.append({"return_lse": return_lse, "_parallel_config": _parallel_config})
        return native(*arguments, **options)

    monkeypatch.setitem(backends, ours, lambda *arguments, **options: backend.attend(*arguments, **options | asked))
    monkeypatch.setitem(backends, AttentionBackendName.NATIVE, without)
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
        model.set_attention_backend("blitz_attn")
        assert torch.equal(forward(model, given), expected)
    assert seen == [{"return_lse": False, "_parallel_config": None} | asked] * 4
    assert reasons() == {
        f"WanTransformer3DModel: attention not sparse, because of {reason}",
        f"attention by torch instead of blitz_attn, because of {reason}",
    }


def test_gradients_are_those_under_the_mask(monkeypatch):
    model, given, config = copy.deepcopy(small_model("wan")), inputs("wan"), SparseVideo(LOCAL, **SMALL)

    def gradients(call):
        model.zero_grad()
        call().square().mean().backward()
        return [x.grad.clone() for x in model.parameters() if x.grad is not None]

    own = torch.nn.functional.scaled_dot_product_attention
    mask = masks_of("wan", config, (3, 5, 7))[0]
    with monkeypatch.context() as patched:
        patched.setattr(
            torch.nn.functional, "scaled_dot_product_attention",
            lambda query, key, value, attn_mask=None, **options: own(query, key, value, attn_mask=mask if query.shape == key.shape else attn_mask, **options),
        )  # fmt: skip
        expected = gradients(lambda: model(**given).sample)
    with sparse_video(model, config):
        found = gradients(lambda: model(**given).sample)
    assert len(found) == len(expected) > 20
    assert all(close(x, y) for x, y in zip(found, expected, strict=True))
    assert not reasons()


def test_autocast_and_bfloat16(computed):  # noqa: F811
    given = inputs("wan")
    expected = forward(small_model("wan"), given)
    with torch.autocast("cpu", torch.bfloat16):
        found = run("wan", SparseVideo(FULL, **SMALL), given)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    model = copy.deepcopy(small_model("wan")).to(torch.bfloat16)
    lowered = {key: x.to(torch.bfloat16) for key, x in given.items()}
    native = forward(model, lowered)
    with sparse_video(model, SparseVideo(FULL, **SMALL)):
        assert (forward(model, lowered) - native).abs().max() < 0.05 * expected.abs().max()
    assert len(computed) == 4
    assert not reasons()


def test_inference_mode():
    given = inputs("wan")
    expected = run("wan", CHOSEN, given)
    with torch.inference_mode(), sparse_video(small_model("wan"), CHOSEN):
        assert torch.equal(small_model("wan")(**given).sample, expected)


def test_a_given_geometry_replaces_what_the_model_says(computed, monkeypatch):  # noqa: F811
    """Here, the last frame is another clip. A model of an unknown class needs a given geometry."""
    geometry, config = Geometry([(2, 5, 7), (1, 5, 7)]), SparseVideo(LOCAL, geometry=Geometry([(2, 5, 7), (1, 5, 7)]), **SMALL)
    order = video.cube_order(geometry, config.cube)
    monkeypatch.setattr(sys.modules["test_diffusers_video"], "geometry_of", lambda *arguments: geometry)
    expected = under_masks(monkeypatch, small_model("wan"), inputs("wan"), order.geometry.num_tokens, masks_of("wan", config, (3, 5, 7)))
    assert close(run("wan", config, inputs("wan")), expected)
    monkeypatch.setattr(sparse, "finder_of", lambda model: None)
    assert close(run("wan", config, inputs("wan")), expected)


def test_patches_of_several_frames(monkeypatch):
    """A patch of CogVideoX 1.5 has two frames."""
    shape = MODELS["cog"][1] | {"patch_size_t": 2}
    torch.manual_seed(0)
    model, given = diffusers.CogVideoXTransformer3DModel(**shape).eval(), inputs("cog", (2, 5, 7))
    given["hidden_states"] = torch.randn(1, 4, 4, 10, 14)
    config = SparseVideo(LOCAL, **SMALL)
    expected = under_masks(monkeypatch, model, given, 76, masks_of("cog", config, (2, 5, 7)))
    with sparse_video(model, config):
        assert close(forward(model, given), expected)
    assert not reasons()


def test_images_of_flux_are_grids(computed, monkeypatch):  # noqa: F811
    """A reference image stands behind the image, and its img_ids begin with another number."""
    rows = torch.arange(24)
    first, second = (torch.stack([torch.full((24,), n), rows // w, rows % w], 1).float() for n, w in ((0, 6), (1, 4)))
    given = inputs("flux", (1, 6, 8)) | {"img_ids": torch.cat([first, second])}
    geometry = Geometry([6, (1, 4, 6), (1, 6, 4)])
    monkeypatch.setattr(sys.modules["test_diffusers_video"], "geometry_of", lambda *arguments: geometry)
    config = SparseVideo(LOCAL, **SMALL)
    expected = under_masks(monkeypatch, small_model("flux"), given, 54, masks_of("flux", config, None))
    assert close(run("flux", config, given), expected)
    assert not reasons()


# ---- What is left dense, and said --------------------------------------------------------------------------------------------------


def share_of(lists, tokens, config):
    """The mean share of the blocks that lists keep. Padding of a list does not count."""
    counts = [(x.numpy() >= 0).sum(-1).mean() / -(-tokens // config.block_shape[1]) for x in lists]
    return sum(counts) / len(counts)


@pytest.mark.parametrize(
    ("options", "what", "steps"),
    [
        ({"rule": LOCAL}, "2 of 2 layers are sparse: Neighbourhood(radius=(1, 0, 1))", ""),
        ({"rule": [LOCAL, FULL], "dense_layers": (0,)}, "1 of 2 layers is sparse: a rule for each of 2 heads", ""),
        ({"rule": LOCAL, "density": 0.5, "schedule": Schedule(1)}, "2 of 2 layers are sparse: Neighbourhood(radius=(1, 0, 1)) and chosen blocks",
         "the first step is dense, "),
        ({"schedule": Schedule(2, (0.5, 0.25), 2)}, "2 of 2 layers are sparse: chosen blocks", "the first 2 steps are dense, "),
        ({"choose_from": (SlidingTiles((1, 2, 2)), LOCAL), "schedule": Schedule(0, None, 9)},
         "2 of 2 layers are sparse: for each head the best of (SlidingTiles(window=(1, 2, 2)), Neighbourhood(radius=(1, 0, 1)))", ""),
    ],
)  # fmt: skip
def test_what_runs_is_said_once_for_each_statement(options, what, steps, computed, caplog):  # noqa: F811
    """The line is logged after the first sparse forward call, with the share of the blocks that this call attended to."""
    config, model = SparseVideo(**options, **SMALL), small_model("cog")
    step = config.schedule.dense_steps
    for _ in range(2):
        caplog.clear()
        first = None
        with sparse_video(model, config) as handle:
            assert repr(handle) == "Handle(CogVideoXTransformer3DModel, step=None, density=None)"
            for timestep in (9, 9, 8, 8, 7, 7, 8, 7):
                forward(model, inputs("cog", timestep=timestep))
                lists = [x for x in computed[-2:] if x is not None]
                share = share_of(lists, 111, config) if lists else 1.0
                assert repr(handle) == f"Handle(CogVideoXTransformer3DModel, step={handle.step}, density={round(share, 4)})"
                first = share if first is None and lists else first
                assert len(caplog.records) == (first is not None)
            handle.reset()
            assert repr(handle) == "Handle(CogVideoXTransformer3DModel, step=None, density=None)"
        assert 0 < first < 1
        assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [(
            "blitz_attn.integrations.diffusers", logging.WARNING,
            f"CogVideoXTransformer3DModel: {what}, cubes of (2, 2, 3), blocks of (12, 8); {steps}step {step} attends to {first:.1%} of the blocks of 111 tokens",
        )]  # fmt: skip


@pytest.mark.parametrize("options", [{"schedule": Schedule(dense_steps=9)}, {"dense_layers": (0, 1)}, {"density": 1.0}], ids=str)
def test_where_nothing_is_sparse_nothing_runs(options):
    with sparse_video(small_model("wan"), SparseVideo(LOCAL, **options, **SMALL)) as handle:
        for timestep in (3, 2, 1):
            forward(small_model("wan"), inputs("wan", timestep=timestep))
        assert repr(handle) == "Handle(WanTransformer3DModel, step=2, density=1.0)"
    assert not logged


def left(name, given, reason, config=None):
    """Runs a model whose attention is left dense for one reason."""
    expected = forward(small_model(name), given)
    for count in (1, 2):
        assert close(run(name, config or SparseVideo(LOCAL, **SMALL), given), expected)
        assert logged == [f"{MODELS[name][0]}: attention not sparse, because of {reason}"] * count


def test_loops_whose_timesteps_rise_are_said_to_stay_dense():
    """In inversion, timesteps rise. A second video, or a video after a single call, is not taken for such a loop."""
    model = small_model("wan")
    for schedule, timesteps, count in (
        (Schedule(dense_steps=1), (1, 1, 2, 2), 0),
        (Schedule(dense_steps=1), (2, 3, 2, 3, 2, 1, 3, 2), 0),
        (Schedule(), (1, 2, 3, 4), 0),
        (Schedule(dense_steps=1), (1, 1, 2, 2, 3, 3, 4, 5, 6), 1),
    ):
        with sparse_video(model, SparseVideo(LOCAL, schedule=schedule, **SMALL)) as handle:
            for timestep in timesteps:
                forward(model, inputs("wan", timestep=timestep))
            assert count == 0 or handle.step == 0
        text = "timesteps rise, and each larger one begins a new video: these calls are all of step 0, which is dense"
        assert sorted(reasons()) == [f"WanTransformer3DModel: {text}"] * count


@pytest.mark.parametrize(("size", "kind"), [(None, "TypeError"), ((1, 0, 2), "ZeroDivisionError"), ((1, 2), "ValueError")])
def test_configurations_that_do_not_say_the_tokens(size, kind):
    model = type("WanTransformer3DModel", (), {"config": SimpleNamespace(patch_size=size)})()
    with pytest.raises(geometries.UnknownError, match=rf"^arguments that do not say what the tokens are \({kind}\)$"):
        geometries.finder_of(model)(inputs("wan"))


def test_short_sequences():
    left("wan", inputs("wan"), "105 tokens, which are fewer than min_tokens = 106", SparseVideo(LOCAL, **SMALL | {"min_tokens": 106}))


def test_sizes_that_are_not_given():
    given = inputs("ltx")
    coordinates = torch.rand(1, 3, 105)
    given = given | {"num_frames": None, "height": None, "width": None, "video_coords": coordinates}
    left("ltx", given, "num_frames, height and width of (None, None, None) for 105 tokens: give a geometry")


def test_places_that_are_no_image():
    given = inputs("flux")
    given["img_ids"][5] += 1
    left("flux", given, "img_ids that are not the rows of images: give a geometry")


@pytest.mark.parametrize("options", [{}, {"dense_layers": (0, 1)}, {"min_tokens": 999}, {"schedule": Schedule(dense_steps=9)}], ids=str)
@pytest.mark.parametrize(("name", "tokens"), [("wan", 105), ("cog", 111)])
def test_a_geometry_of_other_tokens_is_refused(name, tokens, options):
    model, given = small_model(name), inputs(name)
    before = state(model)
    with sparse_video(model, SparseVideo(LOCAL, geometry=Geometry([(3, 5, 8), 7]), **SMALL | options)):
        what = f"the {tokens} tokens that self-attention of {MODELS[name][0]} has"
        with pytest.raises(ValueError, match=f"^geometry: expected {what}, got 127 in spans {re.escape('((3, 5, 8), 7)')}$"):
            forward(model, given)
        assert sparse._here.now is None
    assert state(model) == before
    config = SparseVideo(LOCAL, geometry=geometry_of(name, (3, 5, 7), 6), **SMALL)
    assert torch.equal(run(name, config, given), run(name, SparseVideo(LOCAL, **SMALL), given))


def test_further_attention_in_a_layer_is_left_as_it_is(monkeypatch):
    """An adapter, for example, attends to an image after the layer has attended to the geometry's tokens."""
    model, given, seen = copy.deepcopy(small_model("wan")), inputs("wan"), []
    own = model.blocks[0].attn1.forward

    def forward_twice(*arguments, **options):
        out = own(*arguments, **options)
        q, k, v = torch.randn(1, 2, 105, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        seen.append(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        return out

    model.blocks[0].attn1.forward = forward_twice
    with sparse_video(model, SparseVideo(LOCAL, geometry=Geometry([(3, 5, 7)]), **SMALL)):
        forward(model, given)
    assert seen[0].shape == (1, 2, 105, 8)
    assert reasons() == {"WanTransformer3DModel: attention not sparse, because of 105 queries and 9 keys where the geometry has 105 tokens"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_mask": torch.zeros(105, 105)}, "a mask that is not the same for all queries and heads"),
        ({"attn_mask": torch.zeros(1, 1, 1, 105)}, "a mask that is not the same for all queries and heads"),
        ({"is_causal": True}, "a causal rule"),
        ({"dropout_p": 1e-9}, "dropout of attention weights"),
    ],
)
def test_what_other_processors_ask_for(change, reason, monkeypatch):
    own = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, **options):
        return own(query, key, value, **options | (change if query.shape == key.shape else {}))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    left("wan", inputs("wan"), reason)


def test_another_backend(monkeypatch):
    """The backend calls no attention of torch."""

    def attend(query, key, value, attn_mask=None):
        weights = torch.einsum("bqhd,bkhd->bhqk", query, key / query.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName.FLEX, attend)
    monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, AttentionBackendName.FLEX, {"query", "key", "value", "attn_mask"})
    with attention_backend("flex"):
        left("wan", inputs("wan"), "another backend than torch's own attention and blitz_attn")


def test_gradient_checkpointing():
    model, given = copy.deepcopy(small_model("wan")), inputs("wan")

    def gradient():
        model.zero_grad()
        model(**given).sample.square().mean().backward()
        return model.blocks[0].attn1.to_q.weight.grad.clone()

    expected = gradient()
    model.enable_gradient_checkpointing()
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
        assert close(gradient(), expected)
        assert reasons() == {
            "WanTransformer3DModel: attention not sparse, because of gradient checkpointing, which computes layers again after the forward call"
        }
        assert not close(forward(model, given), forward(small_model("wan"), given))  # without gradients, nothing is computed again


def test_graphs_are_dense():
    torch._dynamo.reset()
    model, given = copy.deepcopy(small_model("wan")), inputs("wan")
    expected = forward(model, given)
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)):
        assert close(forward(torch.compile(model, backend="eager"), given), expected)
    assert reasons() == {"WanTransformer3DModel: attention left as it is, because of torch.compile"}
    torch._dynamo.reset()


# ---- Configurations ----------------------------------------------------------------------------------------------------------------

RULE = "expected a Neighbourhood, a Radial or a SlidingTiles such as SlidingTiles((3, 3, 3)), or a list of them"


@pytest.mark.parametrize(
    ("cube", "size"),
    [((4, 4, 4), 64), ((3, 5, 4), 60), ((1, 4, 8), 32), ((4, 8, 8), 256), ((1, 1, 31), 64), ((1, 1, 257), 64), ((1, 1, 1), 64), ([5, 4, 3], 60)],
)
def test_blocks_are_cubes_where_nothing_else_is_said(cube, size):
    assert SparseVideo(LOCAL, cube=cube).block_shape == (size, size)
    assert SparseVideo(LOCAL, cube=cube, block_shape=(9, 8)).block_shape == (9, 8)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({}, ValueError, "rule: expected a rule, rules to choose_from or a density, got none of them"),
        ({"rule": 3}, TypeError, f"rule: {RULE}, got int"),
        ({"rule": (3, 3, 3)}, TypeError, f"rule: {RULE}, got int in a tuple"),
        ({"rule": LOCAL, "choose_from": [LOCAL]}, ValueError, "choose_from: expected no rules to choose from together with a rule, got both"),
        ({"choose_from": LOCAL}, TypeError, "choose_from: expected a tuple of rules, got Neighbourhood"),
        ({"density": 0}, ValueError, "density: expected a number above 0 and at most 1, got 0"),
        ({"choose_from": [LOCAL, 3]}, TypeError, f"choose_from: {RULE}, got int in a list"),
        ({"density": "half"}, TypeError, "density: expected a number, got str"),
        ({"density": [0.1, 0.2]}, TypeError, "density: expected a number, got list"),
        (
            {"density": 0.5, "schedule": Schedule(densities=0.2)}, ValueError,
            "density: expected None with a schedule that has densities, got 0.5",
        ),
        ({"rule": LOCAL, "schedule": 3}, TypeError, "schedule: expected a blitz_attn.video.Schedule, got 3"),
        ({"rule": LOCAL, "geometry": (3, 5, 7)}, TypeError, "geometry: expected a blitz_attn.video.Geometry or None, got (3, 5, 7)"),
        (
            {"rule": LOCAL, "geometry": Geometry((9, 10, 16))}, ValueError,
            "geometry: expected a geometry with a grid, such as Geometry([(9, 10, 16)]), got spans (9, 10, 16)",
        ),
        ({"rule": LOCAL, "cube": (4, 4)}, ValueError, "cube: expected three positive numbers of tokens (frames, height, width), got (4, 4)"),
        ({"rule": LOCAL, "cube": (4, 4, 0)}, ValueError, "cube: expected three positive numbers of tokens (frames, height, width), got (4, 4, 0)"),
        ({"rule": LOCAL, "block_shape": (0, 64)}, ValueError, "block_shape: expected two positive numbers (queries, keys), got (0, 64)"),
        ({"rule": LOCAL, "dense_frames": -1}, ValueError, "dense_frames: expected at least 0, got -1"),
        ({"rule": LOCAL, "min_tokens": -1}, ValueError, "min_tokens: expected at least 0, got -1"),
        ({"rule": LOCAL, "min_tokens": 2.5}, TypeError, "min_tokens: expected an integer, got float"),
        ({"rule": LOCAL, "dense_layers": 3}, TypeError, "dense_layers: expected a tuple of layer numbers, got int"),
        ({"rule": LOCAL, "dense_layers": ("1",)}, TypeError, "dense_layers: expected an integer, got str"),
        ({"rule": LOCAL, "num_threads": 0}, ValueError, "num_threads: expected at least 1, got 0"),
        ({"rule": LOCAL, "chooser": "none"}, ValueError, None),
    ],
)
def test_bad_configurations(options, kind, sentence):
    with pytest.raises(kind) as error:
        SparseVideo(**options)
    assert str(error.value) == sentence or (sentence is None and str(error.value).startswith("chooser: expected "))


@pytest.mark.parametrize(
    ("model", "config", "kind", "sentence"),
    [
        ("wan", {"rule": LOCAL}, TypeError, "config: expected a SparseVideo, got dict"),
        ("wan", torch.nn.Linear(1, 1), TypeError, "config: expected a SparseVideo, got Linear"),
        (None, CHOSEN, TypeError, "model: expected a transformer of diffusers, got NoneType"),
        (SimpleNamespace(transformer=3), CHOSEN, TypeError, "model: expected a transformer of diffusers, got SimpleNamespace: give pipeline.transformer"),
        ("wan", SparseVideo([LOCAL] * 3), ValueError, "rule: expected one rule or one for each of 2 heads, got 3"),
        ("wan", SparseVideo(LOCAL, dense_layers=(0, 2)), ValueError, "dense_layers: expected layers from 0 to 1, got 2"),
        (
            torch.nn.Linear(1, 1), CHOSEN, ValueError,
            "geometry: expected one for Linear, because it is known only for WanTransformer3DModel, HunyuanVideoTransformer3DModel, "
            "CogVideoXTransformer3DModel, LTXVideoTransformer3DModel or FluxTransformer2DModel, got None",
        ),
        (
            torch.nn.Linear(1, 1), SparseVideo(LOCAL, geometry=Geometry([(2, 2, 2)])), ValueError,
            "model: expected a transformer whose blocks have attn1 or attn, got Linear",
        ),
    ],
)  # fmt: skip
def test_bad_calls(model, config, kind, sentence):
    model = small_model(model) if isinstance(model, str) else model
    before = state(model) if hasattr(model, "modules") else None
    with pytest.raises(kind) as error:
        sparse_video(model, config)
    assert str(error.value) == sentence
    assert before is None or state(model) == before
    assert not logged


@pytest.mark.parametrize("part", ["model", "wrapper", "blocks"])
def test_compiled_models_are_refused(part):
    model = copy.deepcopy(small_model("wan"))
    if part == "wrapper":
        model = torch.compile(model)
    elif part == "model":
        model.compile()
    else:
        model.compile_repeated_blocks()
    with pytest.raises(ValueError, match="^model: expected one that is not compiled, got (WanTransformer3DModel|OptimizedModule): graphs of"):
        sparse_video(model, CHOSEN)


# ---- Memory ------------------------------------------------------------------------------------------------------------------------

PEAK = """
import torch
from peaks import MIB, peak
from cases_diffusers import forward, inputs, small_model
from blitz_attn.integrations.diffusers import SparseVideo, sparse_video
from blitz_attn.video import Neighbourhood, Schedule
torch.set_num_threads(1)
model, given = small_model("wan"), inputs("wan", (8, 64, 32))
config = SparseVideo(choose_from=(Neighbourhood.spatial(), Neighbourhood.temporal()), density=0.05, schedule=Schedule(refresh_every=2))
with torch.no_grad():
    dense = peak(lambda: model(**given, return_dict=False)[0].numpy())
    with sparse_video(model, config):
        sparse = peak(lambda: model(**given, return_dict=False)[0].numpy())
print(dense // MIB, sparse // MIB)
"""


def test_nothing_has_an_element_for_each_pair_of_tokens():
    """There are 16384 tokens, for which a mask of bool would take 256 MiB."""
    dense, sparse_too = map(int, python("-W", "ignore", "-c", PEAK).split())
    assert sparse_too < dense + 100, (dense, sparse_too)
