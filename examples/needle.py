#!/usr/bin/env python3
"""Does a model find a fact in a long text as well through chosen blocks as through all keys? It is asked for the fact at the end.

    python examples/needle.py --figure needle.png      # needs what perplexity.py needs; many minutes on two cores

For each of several depths, SmolLM2-135M-Instruct reads a text that has a line with a pass code at this depth, and the beginning of this
line again at the end. The table shows the mean probability of the code's tokens, each given the tokens before it, and whether each is the
most likely (`found`). The prompt ends with a line to continue, not with a question: a model this small answers few questions about 8000
tokens, even by dense attention.

There are rows for `dense`, and for `sparse` at each density, with and without dense last rows (the last `--last-rows` blocks of queries
keep all blocks that they see). With `--unforced`, there are also rows without forced blocks. Forced blocks are the first and the recent
blocks of keys, which are otherwise kept whatever their scores are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from perplexity import DEFAULT_TEXT, load, share_of

from blitz_attn.integrations.transformers import SparseConfig, configure, register

NEEDLE = "\n\nThe secret pass code of the lighthouse is"
CODE = " 7391 amber falcon."


def prompts(tokenizer: Any, text: str, tokens: int, depths: int) -> Iterator[tuple[float, list[int], list[int]]]:
    """For each depth: the depth, the tokens to read, and the tokens of the code, with which they end."""
    body = tokenizer(text, truncation=True, max_length=tokens).input_ids
    question, code = (tokenizer(x).input_ids for x in (NEEDLE, CODE))
    room = tokens - 2 * (len(question) + len(code))
    if len(body) < room:
        raise ValueError(f"--text: expected at least {room} tokens, got {len(body)}")
    for n in range(depths):
        at = round(room * n / max(1, depths - 1))
        yield at / room, body[:at] + question + code + body[at:room] + question + code, code


def asked(model: Any, ids: list[int], code: list[int]) -> tuple[float, bool]:
    """The mean probability of the code's tokens, and whether each of them is the most likely."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=len(code) + 1).logits[0, :-1].float()
    right = torch.tensor(code)
    likely = torch.softmax(logits, -1)[torch.arange(len(code)), right]
    return float(likely.mean()), bool((logits.argmax(-1) == right).all())


def modes(args: argparse.Namespace) -> Iterator[tuple[str, str, SparseConfig | None]]:
    """The name of a way to attend, its name in transformers, and its configuration."""
    yield "dense", "blitz_attn", None
    for density in args.densities:
        common = {"density": density, "min_tokens": 0, "num_threads": args.threads}
        yield f"sparse {density:g}", "blitz_attn_sparse", SparseConfig(**common)
        yield f"sparse {density:g}, last rows dense", "blitz_attn_sparse", SparseConfig(**common, last_rows=args.last_rows)
        if args.unforced:
            common |= {"sink": 0, "recent": 0}
            yield f"sparse {density:g}, none forced", "blitz_attn_sparse", SparseConfig(**common)
            both = SparseConfig(**common, last_rows=args.last_rows)
            yield f"sparse {density:g}, none forced, last rows dense", "blitz_attn_sparse", both


def draw(records: Sequence[dict[str, Any]]) -> Any:
    """The probability of the code at each depth, one row of cells per way to attend."""
    import numpy as np
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(x["mode"] for x in records))
    depths = sorted({x["depth"] for x in records})
    cells = np.full((len(names), len(depths)), np.nan)
    for x in records:
        cells[names.index(x["mode"]), depths.index(x["depth"])] = x["probability"]
    figure = Figure(figsize=(3.2 + 0.62 * len(depths), 1.4 + 0.42 * len(names)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(cells):
        axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if value < 0.6 else "black")
    axis.set_xticks(range(len(depths)), [f"{100 * x:.0f} %" for x in depths])
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("where the fact stands in the text")
    axis.set_title(f"probability of the hidden code after {records[0]['tokens']} tokens", fontsize=10)
    figure.colorbar(image, ax=axis)
    return figure


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(DEFAULT_TEXT), help="UTF-8 text that hides the fact (%(default)s)")
    parser.add_argument("--tokens", type=int, default=7600, help="tokens to read (%(default)s)")
    parser.add_argument("--depths", type=int, default=10, help="places of the fact (%(default)s)")
    parser.add_argument("--densities", type=share_of, nargs="+", default=[0.25, 0.125], help="shares of the causal blocks")
    parser.add_argument("--last-rows", type=int, default=2, help="blocks of queries at the end that keep all they see (%(default)s)")
    parser.add_argument("--unforced", action="store_true", help="also without blocks that are always kept")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the whole model (%(default)s)")
    parser.add_argument("--threads", type=int, help="threads (the libraries' own choice)")
    parser.add_argument("--json", type=Path, help="file to which each row is appended as a line of JSON")
    parser.add_argument("--figure", type=Path, help="picture to write")
    return parser.parse_args(argv)


def rows_of(tokenizer: Any, model: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    register()
    text = args.text.read_text(encoding="utf-8")
    for depth, ids, code in prompts(tokenizer, text, args.tokens, args.depths):
        for name, implementation, config in modes(args):
            model.set_attn_implementation(implementation)
            if config:
                configure(config, model)
            probability, found = asked(model, ids, code)
            yield {"mode": name, "depth": round(depth, 3), "tokens": len(ids), "probability": probability, "found": found}


def run(args: argparse.Namespace) -> int:
    tokenizer, model = load(args.dtype, args.threads)
    if args.tokens > model.config.max_position_embeddings:
        raise ValueError(f"--tokens: expected at most {model.config.max_position_embeddings}, got {args.tokens}")
    print(f"{'mode':>42} {'depth':>6} {'probability':>11} {'found':>6}")
    records = []
    for row in rows_of(tokenizer, model, args):
        records.append(row)
        print(f"{row['mode']:>42} {row['depth']:6.2f} {row['probability']:11.4f} {row['found']!s:>6}", flush=True)
        if args.json:
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if args.figure:
        draw(records).savefig(args.figure, dpi=120)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    wrong = None
    if not args.text.is_file():
        wrong = f"--text: no such file: {args.text}"
    for name, least in (("tokens", 64), ("depths", 1), ("last_rows", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            wrong = wrong or f"--{name.replace('_', '-')}: expected at least {least}, got {value}"
    if wrong:
        print(f"needle.py: {wrong}", file=sys.stderr)
        return 1
    try:
        return run(args)
    except ValueError as error:
        print(f"needle.py: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"needle.py: needs torch, transformers, gguf and accelerate, and matplotlib for a figure ({error})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
