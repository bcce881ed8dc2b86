#!/usr/bin/env python3
"""Train a small model to recall values, with dense attention, native sparse attention or a window, and print a table of accuracies.

    python examples/train_recall.py              # all three; about two minutes on two cores
    python examples/train_recall.py --attention nsa --steps 400

A sequence begins with pairs of a key and a value, in random order and with new random values. Then come keys alone. At each of these keys,
the model must predict the value that followed the same key in its pair. That value is further back than the window reaches, so a model that
is right has found it by attention: by dense attention over everything, or by native sparse attention through the blocks that it selects.
The model has two layers; in each, attention gets a mix of each token and the token before it.

Torch trains the model; attention and its gradient are those of blitz_attn.integrations.torch. The exit code is 1 if native sparse attention
does not reach the accuracy of dense attention. It is also 1 if the window reaches it, since the task then proves nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)
from blitz_attn.integrations.torch import block_sparse_attention, nsa

KEYS, VALUES = 64, 16
PAIRS, QUESTIONS = 48, 32
TOKENS = 2 * PAIRS + QUESTIONS
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 32
WINDOW = 8
SPARSE = {"compress_block_size": 4, "num_selected_blocks": 6, "init_blocks": 0, "local_blocks": 1, "window_size": WINDOW}
ATTENTIONS = ("dense", "nsa", "window")
CLOSE = 0.02  # a difference from dense accuracy that counts as none


def draw(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (batch, TOKENS) and the right values of the questions (batch, QUESTIONS)."""
    order = torch.rand(batch, KEYS, generator=generator).argsort(dim=1)[:, :PAIRS]  # keys of the pairs
    values = torch.randint(VALUES, (batch, PAIRS), generator=generator)
    asked = torch.randint(PAIRS - WINDOW, (batch, QUESTIONS), generator=generator)  # not of the last pairs, so that no window reaches them
    pairs = torch.stack([order, KEYS + values], dim=2).reshape(batch, 2 * PAIRS)
    return torch.cat([pairs, order.gather(1, asked)], dim=1), values.gather(1, asked)


class Attention(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.gates = nn.Linear(WIDTH, 3 * HEADS)
        self.back = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.project(x).view(batch, tokens, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        if self.kind == "nsa":
            gates = torch.sigmoid(self.gates(x)).view(batch, tokens, HEADS, 3)
            out = nsa(q, k, v, gates=gates, **SPARSE)
        else:
            window = (WINDOW - 1, 0) if self.kind == "window" else None
            out = block_sparse_attention(q, k, v, layout="BSND", causal=True, window=window)
        return self.back(out.reshape(batch, tokens, -1))


class Layer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.before = nn.Linear(WIDTH, WIDTH, bias=False)  # for the token before
        self.attention = Attention(kind)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed + self.before(functional.pad(normed, (0, 0, 1, 0))[:, :-1]))
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES, WIDTH)
        self.layers = nn.Sequential(*(Layer(kind) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens))[:, -QUESTIONS:])


def accuracy(model: nn.Module, generator: torch.Generator) -> float:
    tokens, right = draw(128, generator)
    with torch.no_grad():
        return (model(tokens).argmax(dim=-1) == right).double().mean().item()


def train(kind: str, args: argparse.Namespace) -> float:
    """Trains a model, and returns its accuracy on sequences outside the training."""
    torch.manual_seed(args.seed)  # the same weights to begin with, and the same sequences, for all kinds
    generator, unseen = (torch.Generator().manual_seed(args.seed + n) for n in (1, 2))
    model = Model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, total_steps=args.steps, pct_start=0.1)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        tokens, right = draw(args.batch, generator)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), right.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % args.every == 0 or step == args.steps:
            reached = accuracy(model, unseen)
            seconds = time.perf_counter() - start
            print(f"{kind:>9} {step:>6} {loss.item():>8.4f} {reached:>9.3f} {seconds:>8.1f} {1e3 * seconds / step:>9.1f}", flush=True)
    return reached


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS), help="kinds to train (all)")
    parser.add_argument("--steps", type=int, default=400, help="steps for each kind (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step (%(default)s)")
    parser.add_argument("--rate", type=float, default=4e-3, help="largest learning rate (%(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps between lines of the table (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and sequences (%(default)s)")
    args = parser.parse_args(argv)
    print(f"# {PAIRS} pairs of {KEYS} keys, then {QUESTIONS} questions; chance is {1 / VALUES:.3f}")
    print(f"{'attention':>9} {'step':>6} {'loss':>8} {'accuracy':>9} {'seconds':>8} {'ms/step':>9}")
    reached = {kind: train(kind, args) for kind in args.attention}
    if "dense" not in reached:
        return 0
    if reached.get("nsa", 1.0) < reached["dense"] - CLOSE:
        print("train_recall.py: native sparse attention did not reach the accuracy of dense attention", file=sys.stderr)
        return 1
    if reached.get("window", 0.0) > reached["dense"] - CLOSE:
        print("train_recall.py: a window is enough here, so the task proves nothing about selection", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
