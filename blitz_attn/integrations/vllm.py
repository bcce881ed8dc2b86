"""The CPU engine of vLLM, with attention computed here.

    pip install '.[vllm]'  # in a checkout
    BLITZ_ATTN_VLLM=1 vllm serve ...

vLLM finds `register` as one of its general plug-ins, and calls it in each of its processes. The environment variable turns the plug-in on,
and may hold options: a JSON object with `kv_dtype` and fields of `blitz_attn.integrations.transformers.SparseConfig`. The field `profile`
is the path of a file.

    BLITZ_ATTN_VLLM='{"density": 0.25, "min_tokens": 4096, "dense_layers": [0, 1], "decode_budget": 2048}' vllm serve ... --block-size 32

vLLM is imported by `register` alone.
"""

from __future__ import annotations

__all__ = ["register"]


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Make vLLM's CPU engine compute attention here, if the environment variable ``BLITZ_ATTN_VLLM`` says so.

    The variable is ``1``, or a JSON object with options: see the notes. Without it, with ``0`` or with an empty value, nothing changes.
    A second call changes nothing.

    Raises
    ------
    TypeError, ValueError, OSError
        The variable holds neither ``0`` nor ``1`` nor options, an option is out of range, or the profile cannot be read.
    ImportError
        vLLM is not installed, and the variable turns the plug-in on.

    Notes
    -----
    Without a budget (`density`, `top_p`, `threshold`, `top_k` or `profile`), prompts attend to all keys. With one, layers outside
    `dense_layers` leave blocks out of prompts, and of chunks of prompts, that have at least `min_tokens` tokens so far. If there is a
    `decode_budget`, then in the same layers each new token of a request with more tokens than that attends to `decode_budget` tokens; Quest
    chooses among the engine's own blocks (``--block-size``), which also hold their summaries. Layers with a sliding window keep everything.

    The cache's dtype (``--kv-cache-dtype``) may be ``auto``, ``float16``, ``bfloat16``, ``fp8``, ``fp8_e4m3``, ``fp8_per_token_head`` or
    ``int8_per_token_head``. With ``auto``, the option `kv_dtype` keeps keys and values in rows of 8.5, 4.5 or 5 bits per number:
    ``"q8_0"``, ``"q4_0"``, ``"q4_1"``, or a pair for keys and values; see `blitz_attn.quantize_rows`. The head dim must then be a multiple
    of 32. Layers that need something that the operations lack, such as attention from a decoder to an encoder, are computed by vLLM's own
    backend, and the reason is logged once. `register` is written for the interface of vLLM 0.32. With a release that has another interface,
    vLLM's own backend computes all layers.

    The bits of attention do not depend on the other requests of a step. They do depend on how vLLM cuts a prompt into chunks.

    Examples
    --------
    >>> from blitz_attn.integrations.vllm import register
    >>> register()  # the variable is not set: nothing happens
    """
    from ._vllm.options import options

    if options() is None:
        return
    from ._vllm.interface import take_over

    take_over()
