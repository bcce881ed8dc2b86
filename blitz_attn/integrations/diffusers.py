"""Models of diffusers whose attention runs here: dense by the backend's name, and video models over lists of blocks.

>>> from blitz_attn.integrations.diffusers import SparseVideo, register, sparse_video
>>> register()  # "blitz_attn" is now a name that model.set_attention_backend() takes

torch and diffusers are imported by `register` and `sparse_video`, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._diffusers.config import SparseVideo

if TYPE_CHECKING:
    from diffusers import ModelMixin

    from ._diffusers.sparse import Handle

__all__ = ["SparseVideo", "register", "sparse_video"]


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Make ``"blitz_attn"`` a name of an attention backend in diffusers: dense attention on CPUs.

    The name then works wherever diffusers takes one: in ``model.set_attention_backend("blitz_attn")``, in
    ``with attention_backend("blitz_attn")``, and in the environment variable ``DIFFUSERS_ATTN_BACKEND``. If the variable has the name,
    `register` must be called before diffusers imports its first model. A second call changes nothing.

    Raises
    ------
    ImportError
        torch or diffusers is not installed, or the release of diffusers has no registry of attention backends with the interface of 0.42.

    Notes
    -----
    Tensors are read in diffusers' layout (B, S, H, D), without copies: float32, float16, bfloat16 or float64. Masks of bool and of numbers
    are read as torch reads them, and a mask by which each query sees one run of keys costs no more than lengths. Gradients are computed
    here, too, and `torch.compile` takes the attention of a layer into its graph as one operator.

    Calls with options that this library lacks (dropout of weights, other devices, context parallelism) go to diffusers' backend
    ``"native"``, and the reason is logged once, on the logger ``blitz_attn.integrations.diffusers``. Models whose attention does not go
    through diffusers' dispatch, such as CogVideoX, take no backend: `set_attention_backend` changes nothing there, whatever the name.
    `sparse_video` works for these models.

    Examples
    --------
    >>> import torch
    >>> from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
    >>> from blitz_attn.integrations.diffusers import register
    >>> register()
    >>> q, k, v = (torch.randn(1, 300, 4, 64) for _ in range(3))
    >>> with attention_backend("blitz_attn"):
    ...     out = dispatch_attention_fn(q, k, v)
    >>> torch.allclose(out, dispatch_attention_fn(q, k, v), atol=1e-5)
    True
    """
    from ._diffusers.backend import put_in_registry

    put_in_registry()


def sparse_video(model: ModelMixin, config: SparseVideo) -> Handle:
    """Let the self-attention of a video model of diffusers be sparse, on CPUs, in this model alone.

    Each forward call says which grid of frames, height and width its tokens are, and which denoising step it belongs to. Layers then attend
    over a list of blocks in the order of cubes (`blitz_attn.video`). Cross-attention to a text stays as it is. Where text and video are
    one sequence, the text sees everything and is seen by everything, and padding is left out exactly.

    Parameters
    ----------
    model : diffusers.ModelMixin
        A WanTransformer3DModel, HunyuanVideoTransformer3DModel, CogVideoXTransformer3DModel, LTXVideoTransformer3DModel or
        FluxTransformer2DModel. With a geometry in `config`, any transformer of diffusers whose blocks call their self-attention ``attn1``
        or ``attn``. Weights, processors and the backend of the model stay as they are.
    config : SparseVideo
        Which blocks are attended, in which steps and layers.

    Returns
    -------
    Handle
        ``undo()`` gives the model its own attention back, and so does the end of a ``with`` statement. ``step`` is the number of the step
        that the calling thread has begun last, and ``reset()`` lets the thread's next call begin a new video. The ``repr`` of the handle
        has the step, and the share of the blocks that the sparse layers of the last call attended to.

    Raises
    ------
    TypeError
        `model` is not a module of torch, or `config` is not a SparseVideo.
    ValueError
        The model is compiled, is in a `sparse_video` already, has no block with an ``attn1`` or ``attn``, or is of another class and
        `config` has no geometry; `config` has rules for another number of heads, or layers that the model lacks. In a forward call: the
        geometry of `config` has another number of tokens than self-attention.
    ImportError
        torch or diffusers is not installed.

    See Also
    --------
    register : dense attention by the name of a backend. Attention that `sparse_video` leaves as it is runs by the model's backend.

    Notes
    -----
    A smaller timestep begins the next step. Calls with the same timestep, as guidance makes them, belong to the same step, and each of
    these calls has lists of its own. A larger timestep begins a new video. Call ``reset()`` before a video whose first timestep is
    not larger than the last one of the video before. A loop whose timesteps rise, as for inversion, stays at step 0: give it a schedule
    without dense steps. Each thread counts its own steps, and so does each model of a pipeline with several models. Schedulers of second
    order call a model with two timesteps per step, which count as two steps.

    After the first forward call that is sparse, the logger ``blitz_attn.integrations.diffusers`` says how many layers are sparse, by which
    rules, and what share of the blocks these layers attended to. Each reason why attention is dense is logged there once, too: sequences
    shorter than `min_tokens`, masks that are not the same for all queries and heads, dropout, other devices, arguments that do not say the
    geometry, gradient checkpointing, `torch.compile`. Each call of `sparse_video` logs anew. Results of dense steps and dense layers are
    those of `blitz_attn.block_sparse_attention` over all blocks. Attention over a list has gradients; the choice of the list has none.

    In each sparse layer, queries, keys and values are copied into the order of cubes, and outputs are copied back.

    Examples
    --------
    >>> import torch
    >>> from diffusers import WanTransformer3DModel
    >>> from blitz_attn.integrations.diffusers import SparseVideo, sparse_video
    >>> from blitz_attn.video import Neighbourhood, Schedule
    >>> model = WanTransformer3DModel(
    ...     num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2
    ... )
    >>> latents, text = torch.randn(1, 4, 8, 32, 32), torch.randn(1, 7, 16)  # 8 x 16 x 16 tokens
    >>> config = SparseVideo(Neighbourhood((1, 1, 1)), schedule=Schedule(dense_steps=1))
    >>> with torch.no_grad(), sparse_video(model, config) as handle:
    ...     for timestep in (900, 800, 700):
    ...         latents -= 0.1 * model(latents, torch.tensor([timestep]), text).sample
    >>> handle.step
    2
    """
    if not isinstance(config, SparseVideo):
        raise TypeError(f"config: expected a SparseVideo, got {type(config).__name__}")
    if not hasattr(model, "modules"):
        hint = ": give pipeline.transformer" if hasattr(model, "transformer") else ""
        raise TypeError(f"model: expected a transformer of diffusers, got {type(model).__name__}{hint}")
    from ._diffusers.sparse import make_sparse

    return make_sparse(model, config)
