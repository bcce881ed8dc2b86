"""Models of transformers whose attention runs here: dense, or over blocks that are chosen for each prompt.

>>> from blitz_attn.integrations.transformers import SparseConfig, configure, register
>>> register()  # "blitz_attn" and "blitz_attn_sparse" are now names that attn_implementation= takes
>>> configure(SparseConfig(density=0.25, dense_layers=(0, 1)))

torch and transformers are imported by `register` and by the functions that need them, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _arrays
from .._sentences import shown
from ._transformers.config import SparseConfig, configure

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import Cache, PretrainedConfig, PreTrainedModel

    from ._transformers.trained import Trained

__all__ = ["SparseConfig", "configure", "continuous_batching", "paged_cache", "register", "trained_sparse"]


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Make ``"blitz_attn"`` and ``"blitz_attn_sparse"`` names that ``attn_implementation=`` takes.

    Both read the mask of a model as a rule (causal, a window, padding, packed sequences), so that no matrix of queries times keys is made.
    A mask that is no such rule is added to the scores, and so is a position bias. A layer with such a mask or with a position bias keeps
    all blocks and pages. The exception is a mask that shows each query one run of keys: with it, blocks of a prompt are still chosen.
    ``"blitz_attn"`` attends to all keys that the rule allows. ``"blitz_attn_sparse"`` leaves blocks of keys out of prompts, and also leaves
    pages out of decoding if there is a `decode_budget`; see `SparseConfig`. A second call of `register` changes nothing.

    Raises
    ------
    ImportError
        torch or transformers is not installed, or transformers is too old.

    Notes
    -----
    Sinks and softcaps are exact; blocks are chosen by scores without the softcap. Packed sequences are taken
    from ``position_ids`` that begin again, as transformers does, or from ``cu_seq_lens_q`` and ``cu_seq_lens_k``. Blocks that a model
    chooses itself (``block_indices`` of MiniMax-M3) are used as they are, whatever the configuration. So are tokens (``indices`` of
    DeepSeek-V3.2 and its kin), and the masks by which GLM-5.3, Qwen4 and DeepSeek-V4 pass their choice to attention. `trained_sparse`
    replaces the model's own code that chooses.

    Under `torch.compile`, the attention of a layer is one operator in the graph, which reads padding, packed sequences and the length of a
    static cache when the graph runs. The graph ends at attention that is differentiated, and at a `paged_cache`.

    Where a model needs something that this library lacks (dropout, gradients of a position bias, returned weights, packed sequences with a
    position bias), torch computes attention, unless `on_unsupported` is ``"error"``, and the reason is logged once, on the logger
    ``blitz_attn.integrations.transformers``. Models with attention code of their own run that code. Code that adds the mask to scores
    (BLOOM, XGLM, RoFormer) gets the same numbers as with ``"eager"``; for such models, `on_unsupported` of the configuration for all models
    holds. Code that uses numbers in the mask in another way (MPT) gets a ValueError. Under `torch.compile`, code of both kinds gets an
    error. transformers itself refuses some models (Falcon, GPT-Neo).

    Examples
    --------
    >>> from blitz_attn.integrations.transformers import register
    >>> register()
    """
    import inspect

    from transformers import AttentionInterface, __version__
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"transformers: expected a version whose masks have a q_offset, such as 5.24, got {__version__}")

    from ._transformers import batching
    from ._transformers.attention import attend_batch, attend_dense, attend_sparse
    from ._transformers.masks import make_mask

    for name, function in (("blitz_attn", attend_dense), ("blitz_attn_sparse", attend_sparse), (batching.NAME, attend_batch)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)


def paged_cache(model: PreTrainedModel | PretrainedConfig, *, page_size: int = 64) -> Cache:
    """A cache for a model's `generate` and forward calls that keeps keys and values in pages, which Quest can choose from.

    The cache grows without a copy of all its tokens at every step. Every attention implementation can read it. For layers with a sliding
    window or chunks, and for layers with another mechanism than attention, alone or next to attention, the cache has the same layers as
    transformers' `DynamicCache`. Under torch.autocast, keys and values are kept in the dtype of autocast, in which attention is computed.
    For a model of encoder and decoder, the cache is an `EncoderDecoderCache`, which has pages for cross-attention, too. For a model that
    chooses its own tokens, the keys of its indexer are kept in pages, too.

    Parameters
    ----------
    model : transformers.PreTrainedModel or transformers.PretrainedConfig
        The model that the cache is for.
    page_size : int
        Tokens in a page, from 1 to 1024: what Quest keeps or leaves out as a whole.

    Returns
    -------
    transformers.Cache
        For ``cache=`` of a call or of ``generate``. Earlier versions of transformers name this argument ``past_key_values=``.

    Raises
    ------
    TypeError
        `model` is neither a model nor a configuration.
    ValueError
        `page_size` is out of range.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> from blitz_attn.integrations.transformers import paged_cache
    >>> cache = paged_cache(LlamaConfig(num_hidden_layers=2), page_size=32)
    >>> len(cache.layers), cache.get_seq_length()
    (2, 0)
    """
    page_size = _arrays.integer(page_size, "page_size")
    if not 1 <= page_size <= 1024:
        raise ValueError(f"page_size: expected 1 to 1024, got {page_size}")
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"model: expected a model of transformers or its configuration, got {shown(model)}")
    from ._transformers.cache import PagedCache, PagedPair

    return (PagedPair if getattr(config, "is_encoder_decoder", False) else PagedCache)(config, page_size)


def continuous_batching(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let transformers' continuous batching of a model attend by this library, on CPUs, while a ``with`` statement lasts.

    transformers itself gathers the keys and values of all requests in each layer and step, and makes a mask of all queries and keys. Here,
    attention reads the pages of transformers' cache in place, by a table that is made once per step, and no mask is made. Layers with a
    sliding window attend to the keys that transformers gathers for them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model whose ``generate_batch`` or ``init_continuous_batching`` is called in the statement. All requests must be finished before
        it ends.

    Returns
    -------
    context manager
        It sets the model's ``attn_implementation``, and resets it at the end.

    Raises
    ------
    TypeError
        `model` is no model with continuous batching.
    ImportError
        The release of transformers has another kind of cache for continuous batching.

    See Also
    --------
    register : `continuous_batching` calls it.

    Notes
    -----
    For continuous batching, transformers takes its own implementations of attention, and functions with "flash" in their name. A function
    with such a name gets no mask, and reads the cumulative lengths of the requests. The name that is set here is ``"blitz_attn_flash"``.
    Do not pass it as ``attn_implementation=``: there, transformers looks for names with "flash" among its own packages.

    Requests attend to all their tokens: `decode_budget` and the budgets for prompts have no effect. Options that this attention lacks
    (dropout, other devices) raise a ValueError, because there is nothing to fall back to.

    Examples
    --------
    >>> from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
    >>> from blitz_attn.integrations.transformers import continuous_batching
    >>> shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape)).eval()
    >>> options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=99, pad_token_id=0)
    >>> memory = ContinuousBatchingConfig(num_blocks=32, page_size=16, max_batch_tokens=64)  # else most of the machine's memory
    >>> with continuous_batching(model):
    ...     found = model.generate_batch([[5, 6, 7], [8, 9]], options, continuous_batching_config=memory)
    >>> [len(x.generated_tokens) <= 3 for x in found.values()]
    [True, True]
    """
    from ._transformers.batching import batched, check_model

    check_model(model)
    register()
    return batched(model)


def trained_sparse(model: PreTrainedModel) -> Trained:
    """Let a model that was trained to choose its tokens do so here: DeepSeek-V3.2 and its kin, GLM-5.3, Qwen4 and DeepSeek-V4.

    With ``attn_implementation="blitz_attn"``, such a model already attends to the tokens that it chooses, but its code around attention
    makes a score for each head, query and key, and the keys and values of all heads for all tokens of the cache. `trained_sparse` replaces
    both steps, on the modules of this model alone. `blitz_attn.select_tokens` chooses the tokens. The compressed keys and values are
    attended as they are, and the projection that would expand them is folded into queries and outputs. Keys and values are expanded only
    for the first tokens of a prompt, where that costs less. While another implementation is set, the model's own code runs.

    GLM-5.3 and Qwen4 choose pools of tokens, and DeepSeek-V4 attends to a window and to compressed entries, of which it chooses some. Their
    own code makes masks of all queries and keys; here, lists take their place.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model of the architectures deepseek_v32, glm_moe_dsa, mistral_large4, hy_v4, hy_v4_vl, axk2, dots3_note, glm5_next, qwen4_exp or
        deepseek_v4, or one with such a model inside.

    Returns
    -------
    Trained
        ``undo()`` gives the model its own code back, and so does the end of a ``with`` statement. Where calls are nested, the model gets
        its own code back when the last of them is undone.

    Raises
    ------
    TypeError
        `model` is no module of torch.
    ValueError
        `model` has no attention of these architectures.

    Notes
    -----
    The logger ``blitz_attn.integrations.transformers`` says once how many modules are replaced. It also gives, once each, the reasons why
    layers are left to the model's own code: projections that are no plain linear layers (quantised, or with adapters), a release of
    transformers with another formula (for the last three architectures: with other code of attention and indexer than 5.24 has), packed
    sequences, masks that are matrices, autocast. Where only a call shows the reason, `on_unsupported` of the configuration holds.
    The model's own code also runs under `torch.compile`, and expands keys and values where attention is differentiated: call the model
    under `torch.no_grad`. Of tokens with equal scores, the first ones are taken. Results differ from those of the model's own code by
    rounding. Results of a prompt in chunks differ from those of the whole prompt by rounding, too.

    Examples
    --------
    >>> from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
    >>> from blitz_attn.integrations.transformers import register, trained_sparse
    >>> register()
    >>> config = DeepseekV32Config(
    ...     vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16,
    ...     q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=4, index_n_heads=2, index_head_dim=16,
    ...     mlp_layer_types=["dense"], attn_implementation="blitz_attn",
    ... )
    >>> model = DeepseekV32ForCausalLM(config)
    >>> with trained_sparse(model):
    ...     tokens = model.generate(max_new_tokens=8, eos_token_id=None)
    >>> tokens.shape
    torch.Size([1, 9])
    """
    from ._transformers import compressed, dsa, pools
    from ._transformers.trained import replace_methods

    if not hasattr(model, "modules"):
        raise TypeError(f"model: expected a model of transformers, got {shown(model)}")
    return replace_methods(model, compressed.ADAPTERS | dsa.ADAPTERS | pools.ADAPTERS)
