"""Whole pipelines of diffusers, from embeddings of a prompt to latents: `sparse_video` finds their tokens and steps."""

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", minversion="0.42")
pytest.importorskip("transformers")  # pipelines of diffusers import tokenizers of transformers

from blitz_attn.integrations._diffusers.steps import Job  # noqa: E402
from blitz_attn.integrations.diffusers import SparseVideo, sparse_video  # noqa: E402
from blitz_attn.video import Neighbourhood, Schedule  # noqa: E402
from cases_diffusers import (  # noqa: E402
    _defaults,  # noqa: F401
    close,
    pytestmark,  # noqa: F401
    small_model,
)
from test_diffusers_video import computed, reasons  # noqa: E402, F401

TEXT = {"prompt_embeds": (1, 6, 16)}
GUIDED = TEXT | {"negative_prompt_embeds": (1, 6, 16)}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
PIPELINES = {  # pipeline, scheduler and its options, embeddings, other arguments, calls per step
    "wan": ("WanPipeline", "UniPCMultistepScheduler", FLOW, GUIDED, {"num_frames": 9}, 2),
    "hunyuan": (
        "HunyuanVideoPipeline", "FlowMatchEulerDiscreteScheduler", {}, TEXT | {"pooled_prompt_embeds": (1, 8)},
        {"num_frames": 9, "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}, 1,
    ),
    "cog": ("CogVideoXPipeline", "CogVideoXDPMScheduler", {}, GUIDED, {"num_frames": 9}, 1),  # both prompts are one batch, as in ltx
    "ltx": (
        "LTXPipeline", "FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, GUIDED,
        {"num_frames": 17, "prompt_attention_mask": torch.ones(1, 6), "negative_prompt_attention_mask": torch.ones(1, 6)}, 1,
    ),
    "flux": ("FluxPipeline", "FlowMatchEulerDiscreteScheduler", {}, {"prompt_embeds": (1, 6, 32), "pooled_prompt_embeds": (1, 8)}, {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PIPELINES))
def test_pipelines(name, computed, monkeypatch):  # noqa: F811
    kind, scheduler, options, embeddings, given, calls = PIPELINES[name]
    kind = getattr(diffusers, kind)
    rest = dict.fromkeys(("tokenizer", "text_encoder", "vae", *(("tokenizer_2", "text_encoder_2") if name in ("hunyuan", "flux") else ())))
    pipeline = kind(**rest, transformer=small_model(name), scheduler=getattr(diffusers, scheduler)(**options))
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    given = given | {key: torch.randn(shape) for key, shape in embeddings.items()} | {"num_inference_steps": 4, "output_type": "latent"}

    def latents():
        made = pipeline(**given, height=128, width=96, generator=torch.Generator().manual_seed(1))
        return made.frames if hasattr(made, "frames") else made.images

    expected = latents()
    found, own = [], Job.begin

    def begin(self, timestep):
        found.append(own(self, timestep))
        return found[-1]

    monkeypatch.setattr(Job, "begin", begin)
    size = {"cube": (2, 2, 2), "block_shape": (8, 8), "min_tokens": 1, "schedule": Schedule(dense_steps=1, refresh_every=2)}
    for rule, same in ((Neighbourhood((None, None, None)), True), (Neighbourhood((0, 0, 1)), False)):
        computed.clear()
        with sparse_video(pipeline.transformer, SparseVideo(rule, density=0.1, **size)) as handle:
            assert close(latents(), expected) == same
            assert [tuple(call) for call in found[-4 * calls :]] == [(step, n) for step in range(4) for n in range(calls)]
            assert handle.step == 3
        assert [x is None for x in computed] == [True] * 2 * calls + [False] * 6 * calls
    assert not reasons()
