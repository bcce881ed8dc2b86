"""Common parts of the tests of `integrations.diffusers`: small models of five classes, their inputs, and attention under a token mask."""

import functools
import logging
import math

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry  # noqa: E402

from blitz_attn import sabi, video  # noqa: E402
from blitz_attn.integrations._transformers.fallbacks import TOLD  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("one_torch_thread"),
]
logged: list[str] = []  # messages that the integration has logged during a test
logging.getLogger("blitz_attn.integrations.diffusers").addFilter(lambda record: logged.append(record.getMessage()) or True)

MODELS = {
    "wan": ("WanTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32,
        "num_layers": 2,
    }),
    "hunyuan": ("HunyuanVideoTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "num_refiner_layers": 1, "guidance_embeds": False, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6),
    }),
    "cog": ("CogVideoXTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16,
        "num_layers": 2, "use_rotary_positional_embeddings": True,
    }),
    "ltx": ("LTXVideoTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 2,
        "caption_channels": 16,
    }),
    "flux": ("FluxTransformer2DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "joint_attention_dim": 32, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
    }),
}  # fmt: skip
TEXT_FIRST, TEXT_LAST = ("cog", "flux"), ("hunyuan",)


@functools.cache
def small_model(name):
    """A model with random weights, which are so large that attention is far from uniform. Every model has two layers of self-attention."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(diffusers, kind)(**options).eval()
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name or parameter.dim() > 1:
                parameter.normal_(std=0.3 if "to_" not in parameter_name else 0.6)
    return model


def grid_for(name, grid):
    """The grid of a model's tokens. The model of images has a single frame."""
    return (1, grid[0] * grid[1], grid[2]) if name == "flux" else grid


def geometry_of(name, grid, text):
    spans = [grid_for(name, grid)]
    return video.Geometry([text, *spans] if name in TEXT_FIRST else [*spans, text] if name in TEXT_LAST else spans)


def inputs(name, grid=(3, 5, 7), batch=1, text=6, timestep=500.0, seed=0, lengths=None):
    """The arguments of a forward call. For models with a text mask, `lengths` has the number of valid text tokens of each batch entry."""
    torch.manual_seed(seed)
    t, h, w = grid_for(name, grid)
    tokens = t * h * w
    mask = torch.arange(text) < torch.tensor(lengths or [text] * batch)[:, None]
    when = torch.full((batch,), float(timestep))
    if name == "wan":
        return {"hidden_states": torch.randn(batch, 4, t, 2 * h, 2 * w), "timestep": when, "encoder_hidden_states": torch.randn(batch, text, 16)}
    if name == "hunyuan":
        return {
            "hidden_states": torch.randn(batch, 4, t, 2 * h, 2 * w), "timestep": when, "encoder_hidden_states": torch.randn(batch, text, 16),
            "encoder_attention_mask": mask, "pooled_projections": torch.randn(batch, 8),
        }  # fmt: skip
    if name == "cog":
        angles = torch.randn(tokens, 8).repeat_interleave(2, 1)
        return {
            "hidden_states": torch.randn(batch, t, 4, 2 * h, 2 * w), "timestep": when, "encoder_hidden_states": torch.randn(batch, text, 16),
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }  # fmt: skip
    if name == "ltx":
        return {
            "hidden_states": torch.randn(batch, tokens, 4), "timestep": when, "encoder_hidden_states": torch.randn(batch, text, 16),
            "encoder_attention_mask": mask.long(), "num_frames": t, "height": h, "width": w,
        }  # fmt: skip
    rows = torch.arange(tokens)
    return {
        "hidden_states": torch.randn(batch, tokens, 4), "timestep": when / 1000, "encoder_hidden_states": torch.randn(batch, text, 32),
        "pooled_projections": torch.randn(batch, 8), "img_ids": torch.stack([0 * rows, rows // w, rows % w], 1).float(),
        "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip


def forward(model, given):
    with torch.no_grad():
        return model(**given, return_dict=False)[0]


def token_mask(lists, order, block_shape):
    """The token mask of a list of blocks, bool (B or 1, H or 1, S, S). The list is in the order of cubes, the mask in the model's."""
    tokens = order.geometry.num_tokens
    seen = torch.from_numpy(sabi.to_token_mask(lists, tokens, tokens, block_shape))
    inverse = torch.from_numpy(order.inverse.copy())
    return seen[..., inverse, :][..., inverse]


def under_masks(monkeypatch, model, given, tokens, masks):
    """A forward call by torch. Its n-th self-attention over `tokens` tokens has the n-th mask, or no mask where `masks` has None."""
    own, count = torch.nn.functional.scaled_dot_product_attention, [0]

    def attend(query, key, value, attn_mask=None, **options):
        if query.shape[2] == key.shape[2] == tokens:
            mask = masks[count[0]]
            count[0] += 1
            attn_mask = mask if attn_mask is None else attn_mask if mask is None else attn_mask & mask
        return own(query, key, value, attn_mask=attn_mask, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        out = forward(model, given)
    assert count[0] == len(masks)
    return out


def close(found, expected):
    """Whether results differ by rounding alone."""
    return (found - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max().item()) and math.isfinite(found.abs().max().item())


@pytest.fixture(autouse=True)
def _defaults():
    """Every test begins and ends with no backend chosen and nothing logged."""

    def reset():
        TOLD.clear()
        logged.clear()
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
        for name in MODELS:
            if small_model.cache_info().currsize:
                small_model(name).reset_attention_backend()

    reset()
    yield
    reset()
