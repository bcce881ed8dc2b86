#!/usr/bin/env python3
"""Find how much each layer and head of a real model should keep at one density, from how far errors of a head change the predictions.

    python examples/make_profile.py --text a.txt b.txt --output smollm2.json     # some minutes on two cores
    python examples/perplexity.py --densities 1 0.25 --profile smollm2.json      # on other texts than these

Needs what perplexity.py needs. SmolLM2-135M-Instruct reads each text densely; the gradient of its loss, with labels drawn from its own
predictions, flows back to the attention of every layer. `blitz_attn.select.allocate` turns queries, keys, values and gradients into a
profile: the mass that each head keeps, and for each layer the chooser that is best for its cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from perplexity import block_of, load, share_of

from blitz_attn import select

ATTENTION = "blitz_gradients"  # transformers gives some names a meaning: see capture.py
CHOOSERS = {
    "pooled": select.Pooled(),
    "pooled_bound": select.Pooled(term="bound"),
    "pooled_mean": select.Pooled(term="mean"),
    "sampled_rows": select.SampledRows(),
    "antidiagonal": select.Antidiagonal(),
}


def captures_of(model: Any, ids: Any, seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    """For each layer q, k, v (1, heads, S, D), and the gradient of the loss with respect to the attention output, (1, H, S, D)."""
    import torch
    from transformers import AttentionInterface

    found: dict[int, list[Any]] = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        own = found[module.layer_idx] = [x.detach().float().numpy() for x in (query, key, value)]
        out.register_hook(lambda slope: own.append(slope.float().numpy().copy()))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
    model.requires_grad_(False)
    torch.manual_seed(seed)
    embedded = model.get_input_embeddings()(ids).requires_grad_(True)
    hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    slopes = torch.zeros_like(hidden)
    for start in range(0, ids.shape[1], 512):  # the vocabulary is large, so logits are made for 512 tokens at a time
        part = hidden[0, start : start + 512].detach().requires_grad_(True)
        logits = model.lm_head(part).float()
        labels = torch.multinomial(torch.softmax(logits.detach(), -1), 1)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        slopes[0, start : start + 512] = part.grad
    hidden.backward(slopes)
    return [tuple(found[layer]) for layer in sorted(found)]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 texts, other than those that results are reported on")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of each text (%(default)s)")
    parser.add_argument("--density", type=share_of, default=0.25, help="share of the causal blocks that all heads together keep")
    parser.add_argument("--block", type=block_of, default=(64, 64), help="tokens of a block of queries and of keys (64x64)")
    choosers = ["pooled", "pooled_bound", "sampled_rows"]
    parser.add_argument(
        "--choosers", choices=CHOOSERS, nargs="+", default=choosers, help=f"choosers from which each layer gets one ({', '.join(choosers)})"
    )
    parser.add_argument("--threads", type=int, help="threads (the libraries' own choice)")
    parser.add_argument("--output", "-o", type=Path, default=Path("profile.json"), help="file to write (%(default)s)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    tokenizer, model = load("float32", args.threads)
    texts = []
    for text in args.text:
        ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", truncation=True, max_length=args.tokens).input_ids
        print(f"reading {ids.shape[1]} tokens of {text}, and back ...", file=sys.stderr)
        texts.append(captures_of(model, ids))
    print("choosing and attending at several masses ...", file=sys.stderr)
    choosers = [CHOOSERS[name] for name in args.choosers]
    rules = {"block_shape": args.block, "causal": True, "num_threads": args.threads}
    layers = [list(layer) for layer in zip(*texts, strict=True)]
    profile = select.allocate(layers, density=args.density, chooser=choosers, **rules)
    profile.save(args.output)
    for layer, numbers in enumerate(profile.numbers):
        chooser = profile.chooser[layer] if len(choosers) > 1 else profile.chooser
        print(f"layer {layer:2d}", *(f"{x:6.4f}" for x in numbers), chooser)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    missing = [x for x in args.text if not x.is_file()]
    if missing or args.tokens < 2:
        sentence = f"--text: no such file: {missing[0]}" if missing else f"--tokens: expected at least 2, got {args.tokens}"
        print(f"make_profile.py: {sentence}", file=sys.stderr)
        return 1
    try:
        return run(args)
    except ImportError as error:
        print(f"make_profile.py: needs torch, transformers, gguf and accelerate ({error})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
