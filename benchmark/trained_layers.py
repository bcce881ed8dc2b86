"""One attention layer of a model that was trained to be sparse, with real dimensions and random weights: its own code, and trained_sparse.

    python benchmark/trained_layers.py qwen4_exp float32 1024 4096 8192

Times are those of the processor, in the layer without its projections: of a prompt, and of the best of five new tokens. The peak of
memory is that of the process.
"""

import argparse
import importlib
import resource
import time

import torch
import transformers

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn.integrations.transformers import register, trained_sparse

MOE = {"vocab_size": 128, "num_hidden_layers": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "hc_mult": 2, "pad_token_id": 0}
FAMILIES = {
    "qwen4_exp": ("Qwen4ExpText", "sdpa", {
        "layer_types": ["indexed_attention"], "num_experts": 1, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
        "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }),
    "glm5_next": ("Glm5NextText", "sdpa", {
        "layer_types": ["indexed_attention"], "indexer_types": ["full"], "mlp_layer_types": ["dense"], "intermediate_size": 16,
    }),
    "deepseek_v4": ("DeepseekV4", "eager", {
        "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"], "n_routed_experts": 1,
    }),
}  # fmt: skip


def make(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, str]:
    """A model of one layer, and the implementation of its own."""
    kind, own, options = FAMILIES[name]
    config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), f"{kind}Config")
    model = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), f"{kind}Model")
    known = {key: x for key, x in MOE.items() if hasattr(config, key)}
    torch.manual_seed(0)
    made = model(config(**known, **options)).eval()
    for key, parameter in made.named_parameters():
        if "norm" not in key:
            parameter.data.normal_(std=0.05)
    return made.to(dtype), own


def run(model: torch.nn.Module, tokens: int) -> tuple[list[float], list[torch.Tensor]]:
    """Seconds of the layer's attention without projections, of a prompt and of single tokens, and the last state of each."""
    layer, spent, states = model.layers[0].self_attn, [], []

    def add(sign: int) -> None:
        spent[-1] += sign * time.process_time()

    hooks = [layer.register_forward_pre_hook(lambda *_: add(-1)), layer.register_forward_hook(lambda *_: add(1))]
    for part in layer.modules():
        if isinstance(part, torch.nn.Linear) and part is not getattr(layer, "kv_b_proj", None):  # which expands keys and values
            hooks += [part.register_forward_pre_hook(lambda *_: add(1)), part.register_forward_hook(lambda *_: add(-1))]
    ids = torch.randint(1, 128, (1, tokens + 5), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache(config=model.config)
    for new in (ids[:, :tokens], *ids[:, tokens:].split(1, dim=1)):
        spent.append(0.0)
        states.append(model(new, cache=cache, use_cache=True).last_hidden_state[:, -1].float())
    for hook in hooks:
        hook.remove()
    return spent, states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--only", choices=["own", "blitz_attn"], help="time one of the two, whose peak of memory is then its own")
    given = parser.parse_args()
    torch.set_num_threads(1)
    blitz_attn.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    register()
    model, own = make(given.family, getattr(torch, given.dtype))
    for tokens in given.tokens:
        results = {}
        for name in ("blitz_attn", "own") if given.only is None else (given.only,):
            model.set_attn_implementation(own if name == "own" else name)
            with torch.no_grad(), trained_sparse(model):
                times, results[name] = run(model, tokens)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            found = f"prompt {times[0]:7.2f} s, token {1e3 * min(times[1:]):7.1f} ms, peak {peak:6.0f} MB"
            print(f"{given.family} {given.dtype} {tokens:6} {name:10} {found}", flush=True)
        if len(results) == 2:
            apart = [(a - b).abs().max().item() / b.abs().max().item() for a, b in zip(*results.values(), strict=True)]
            print(f"  largest difference of states, of their largest number: {max(apart):.1e}")


if __name__ == "__main__":
    main()
