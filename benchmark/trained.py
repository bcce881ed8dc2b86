#!/usr/bin/env python3
"""One attention layer of DeepSeek-V3.2 in transformers: time and memory of a prompt, or of a new token behind a cache.

    python benchmark/trained.py decode 8192 --how trained --dtype bfloat16 --threads 1

Dimensions are those of the model (128 heads of 128 + 64 and 128 numbers, latents of 512, an indexer of 64 heads of 128 numbers, the best
2048 tokens), but for a hidden size of 1024, which only projections know; weights and inputs are random. ``trained`` is trained_sparse,
``dense`` the same without a choice, ``blitz_attn`` this library's attention inside of the model's own code, as are transformers' ``sdpa``
and ``eager``. One line: seconds, those of the processor, and those without projections, each the best of the repetitions; and the largest
memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn.integrations.transformers import register, trained_sparse

OURS = ("trained", "dense")


class Layer:
    def __init__(self, how: str, hidden: int = 1024) -> None:
        implementation = "blitz_attn" if how in OURS else how
        self.config = DeepseekV32Config(num_hidden_layers=1, attn_implementation=implementation, hidden_size=hidden)
        if how == "dense":
            self.config.index_topk = 1 << 20
        self.module, self.rope = DeepseekV32Attention(self.config, 0).eval(), DeepseekV32RotaryEmbedding(self.config)
        for weight in self.module.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
        if how in OURS:
            trained_sparse(self.module)
        self.projections, self.begin = 0.0, 0.0
        for linear in self.module.modules():
            if isinstance(linear, torch.nn.Linear) and linear is not self.module.kv_b_proj:
                linear.register_forward_pre_hook(lambda *_: setattr(self, "begin", time.process_time()))
                linear.register_forward_hook(lambda *_: setattr(self, "projections", self.projections + time.process_time() - self.begin))

    def __call__(self, x: torch.Tensor, cache: DynamicCache | None = None) -> tuple[float, float, float]:
        """Seconds, those of the processor, and those of it outside of projections."""
        past = cache.get_seq_length() if cache else 0
        places = torch.arange(past, past + x.shape[1])[None]
        given = {"config": self.config, "inputs_embeds": x, "attention_mask": None, "cache": cache, "position_ids": places}
        mask = create_causal_mask(**given, allow_is_causal_skip=False)
        self.projections = 0.0
        begin = time.perf_counter(), time.process_time()
        self.module(x, self.rope(x, places), mask, cache=cache, position_ids=places)
        wall, used = time.perf_counter() - begin[0], time.process_time() - begin[1]
        return wall, used, used - self.projections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("prompt", "decode"))
    parser.add_argument("tokens", type=int)
    parser.add_argument("--how", choices=(*OURS, "blitz_attn", "sdpa", "eager"), default="trained")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    blitz_attn.set_num_threads(chosen.threads)
    register()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, chosen.dtype))
    with torch.no_grad():
        layer, cache = Layer(chosen.how), None
        x = torch.randn(1, chosen.tokens if chosen.what == "prompt" else 1, layer.config.hidden_size)
        if chosen.what == "decode":
            cache = DynamicCache(config=layer.config)
            cache.update(torch.randn(1, 1, chosen.tokens, 512), torch.randn(1, 1, chosen.tokens, 64), 0)
            cache.update_indexer(torch.randn(1, chosen.tokens, 128), 0)
        best = [min(times) for times in zip(*(layer(x, cache) for _ in range(chosen.repeat)), strict=True)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    shown = "{:.4g} s in all, {:.4g} s of the processor, {:.4g} s without projections".format(*best)
    print(f"{chosen.what} {chosen.tokens} {chosen.how} {chosen.dtype} {chosen.threads}: {shown}, {peak:.2f} GiB")


if __name__ == "__main__":
    main()
