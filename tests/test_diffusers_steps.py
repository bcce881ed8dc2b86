"""`sparse_video`: steps are counted as schedulers make them, and lists are kept from one step to the next."""

import copy

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", minversion="0.42")

from blitz_attn import video  # noqa: E402
from blitz_attn.integrations._diffusers import sparse  # noqa: E402
from blitz_attn.integrations._diffusers.steps import Call, Job, ListKey  # noqa: E402
from blitz_attn.integrations.diffusers import SparseVideo, sparse_video  # noqa: E402
from blitz_attn.video import Schedule  # noqa: E402
from cases_diffusers import (  # noqa: E402
    _defaults,  # noqa: F401
    forward,
    inputs,
    pytestmark,  # noqa: F401
    small_model,
)
from test_diffusers_video import LOCAL, SMALL, computed, reasons  # noqa: E402, F401

CHOSEN = SparseVideo(density=0.3, **SMALL)


@pytest.fixture
def choices(monkeypatch):
    """The densities that choosers are called with."""
    found, own = [], sparse.select_blocks_prefill

    def choose(q, k, **options):
        found.append(options["density"])
        return own(q, k, **options)

    monkeypatch.setattr(sparse, "select_blocks_prefill", choose)
    return found


@pytest.mark.parametrize("calls", [1, 2], ids=["alone", "guided"])
@pytest.mark.parametrize("kind", ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DDIMScheduler", "CogVideoXDPMScheduler"])
def test_steps_are_those_of_a_scheduler(kind, calls, choices, computed):  # noqa: F811
    """Two videos are made in sequence. Guidance calls the model twice with each timestep, and each call has lists of its own."""
    scheduler = getattr(diffusers, kind)()
    scheduler.set_timesteps(9)
    schedule = Schedule(dense_steps=2, densities=(0.5, 0.4, 0.3), refresh_every=3)
    model, given = small_model("wan"), inputs("wan")
    with sparse_video(model, SparseVideo(schedule=schedule, **SMALL)) as handle:
        assert handle.step is None
        for _ in range(2):
            for step, timestep in enumerate(scheduler.timesteps):
                before, used = len(choices), len(computed)
                for _ in range(calls):
                    forward(model, given | {"timestep": timestep.expand(1)})
                    assert handle.step == step
                lists = computed[used:]
                assert [x is None for x in lists] == [step < 2] * 2 * calls
                fresh = step >= 2 and (step - 2) % 3 == 0
                assert choices[before:] == [schedule.density(step)] * (2 * calls if fresh else 0)
                if fresh:
                    kept = lists
                assert step < 2 or all(x is y for x, y in zip(lists, kept, strict=True))
        assert len({id(x) for x in kept}) == 2 * calls


def test_a_call_that_failed_is_the_same_one_when_it_is_repeated(computed):  # noqa: F811
    """The lists of two prompts differ. The failing call may have the first or the second prompt, in a step with or without new lists."""
    model, prompts = copy.deepcopy(small_model("wan")), [inputs("wan", seed=n) for n in range(2)]

    def stop(*_):
        raise InterruptedError

    def lists(handle, failed):
        handle.reset()
        found = []
        for step in range(5):
            for number, given in enumerate(prompts):
                given = given | {"timestep": torch.tensor([9.0 - step])}
                if (step, number) == failed:
                    before, hook = handle.step, model.norm_out.register_forward_pre_hook(stop)
                    with pytest.raises(InterruptedError):
                        forward(model, given)
                    hook.remove()
                    assert handle.step == before
                used = len(computed)
                forward(model, given)
                assert handle.step == step
                found.append(computed[used:])
        return found

    with sparse_video(model, SparseVideo(density=0.3, schedule=Schedule(refresh_every=3), **SMALL)) as handle:
        expected = lists(handle, None)
        for failed in [(step, number) for step in range(5) for number in range(2)]:
            found = lists(handle, failed)
            for call, (some, others) in enumerate(zip(found, expected, strict=True)):
                assert all(torch.equal(x, y) for x, y in zip(some, others, strict=True))
                assert call < 2 or all((x is y) == (call not in (6, 7)) for x, y in zip(some, found[call - 2], strict=True))


def test_a_call_whose_tokens_cannot_be_told_is_no_step(monkeypatch):
    def fail(*_):
        raise MemoryError

    model = small_model("wan")
    with sparse_video(model, CHOSEN) as handle:
        forward(model, inputs("wan", timestep=9))
        monkeypatch.setattr(handle, "_order_of", fail)
        with pytest.raises(MemoryError):
            forward(model, inputs("wan", timestep=8))
        assert handle.step == 0


@pytest.mark.parametrize(
    ("schedule", "chosen_in"),
    [
        (Schedule(0, (0.25, 1.0), 2), (0, 0, None, None, None)),
        (Schedule(0, (0.25, 0.25, 1.0, 0.75), 2), (0, 0, None, None, 4)),
        (Schedule(1, (1.0, 0.5), 2), (None, None, None, 3, 3)),
        (Schedule(1, (0.5, 1.0), 3), (None, 1, 1, 1, None)),
    ],
)
def test_all_blocks_are_kept_as_other_lists_are(schedule, chosen_in, computed):  # noqa: F811
    """A step that chooses decides whether all blocks are attended until the next choice, as with any other density."""
    model, fresh = small_model("wan"), {}
    with sparse_video(model, SparseVideo(schedule=schedule, **SMALL)):
        for step, source in enumerate(chosen_in):
            used = len(computed)
            forward(model, inputs("wan", timestep=9 - step))
            if source is None:
                assert computed[used:] == [None, None]
            else:
                fresh.setdefault(source, computed[used:])
                assert all(x is y and x is not None for x, y in zip(computed[used:], fresh[source], strict=True))
    assert not reasons()


def test_a_handle_can_be_told_that_a_video_begins():
    """A model that makes a video in one step gets the same timestep for every video."""
    model, given = small_model("wan"), inputs("wan")
    with sparse_video(model, SparseVideo(density=0.3, schedule=Schedule(refresh_every=4), **SMALL)) as handle:
        for timestep, step in ((9, 0), (9, 0), (8, 1), (8, 1), (7.5, 2)):
            forward(model, given | {"timestep": torch.tensor([float(timestep)])})
            assert handle.step == step
        handle.reset()
        assert handle.step is None
        forward(model, given | {"timestep": torch.tensor([7.5])})
        assert handle.step == 0


def test_the_largest_timestep_of_all_tokens_counts():
    """The tokens of a given first frame have the timestep 0 (Wan 2.2)."""
    model, given = small_model("wan"), inputs("wan")
    with sparse_video(model, SparseVideo(LOCAL, **SMALL)) as handle:
        for timestep, step in ((900, 0), (900, 0), (700, 1), (950, 0)):
            each = torch.full((1, 105), float(timestep))
            each[:, :35] = 0
            forward(model, given | {"timestep": each})
            assert handle.step == step
    assert not reasons()


def test_lists_are_chosen_anew_for_another_grid_or_batch(choices):
    model = small_model("wan")
    with sparse_video(model, SparseVideo(density=0.3, schedule=Schedule(refresh_every=9), **SMALL)):
        for timestep, grid, batch, count in ((9, (3, 5, 7), 1, 2), (8, (3, 5, 7), 1, 2), (7, (3, 5, 7), 2, 4), (6, (3, 7, 5), 2, 6), (5, (3, 7, 5), 2, 6)):
            forward(model, inputs("wan", grid, batch, timestep=timestep))
            assert len(choices) == count


def test_a_job_keeps_the_lists_of_few_calls():
    job = Job()
    for _ in range(100):
        call = job.begin(5.0)
        job.keep(ListKey(0, call.number), object())
    assert job.call == Call(0, 99)
    assert len(job.lists) == 8
    job.begin(6.0)
    assert not job.lists


def test_without_a_timestep_each_call_is_a_step():
    job = Job()
    assert [job.begin(None).step for _ in range(3)] == [0, 1, 2]


def test_rules_are_made_into_lists_once(monkeypatch):
    made, own = [], video.blocks
    monkeypatch.setattr(sparse.video, "blocks", lambda *given, **options: made.append(given) or own(*given, **options))
    with sparse_video(small_model("wan"), SparseVideo(LOCAL, **SMALL)):
        for timestep in (3, 2, 1):
            forward(small_model("wan"), inputs("wan", timestep=timestep))
    assert len(made) == 1
