#!/usr/bin/env python3
"""One layer of DeepSeek-V3.2, whose indexer chooses 2048 tokens for each query: time and memory, by length and by way of attending.

    python examples/trained_sparse.py --tokens 4096 8192 16384 | tee layer.csv
    python examples/trained_sparse.py --draw layer.csv -o layer.png

The layer has the dimensions of the released model (128 heads over one latent of 512 + 64 numbers per token, an indexer of 64 heads) and
random weights; its MLP is left small. Each row is measured in a process of its own: a prompt of so many tokens ("prompt"), or one new
token after them ("step"), by transformers' own attention ("eager", "sdpa"), by this library over the tokens that the model chose
("lists"), or with `trained_sparse` ("ours"), where this library also chooses the tokens, and attends to the latents. A row has no numbers
where its way needs more memory than the machine has, or than --memory allows.
"""

from __future__ import annotations

import argparse
import csv
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)

WAYS = {"eager": "eager", "sdpa": "sdpa", "lists": "blitz_attn", "ours": "blitz_attn"}  # attn_implementation
COLUMNS = ("what", "way", "dtype", "tokens", "threads", "seconds", "MiB")
MIB = 1 << 20


def make_model(way: str, dtype: Any) -> Any:
    import torch
    from transformers import DeepseekV32Config, DeepseekV32Model

    from blitz_attn.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = DeepseekV32Config(num_hidden_layers=1, vocab_size=8, intermediate_size=8, first_k_dense_replace=1, pad_token_id=0)
    config._attn_implementation = WAYS[way]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return DeepseekV32Model(config).eval()
    finally:
        torch.set_default_dtype(before)


def filled_cache(model: Any, tokens: int, dtype: Any) -> Any:
    """A cache as a prompt of so many tokens leaves it, with random numbers."""
    import torch
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    latent, rotated = (torch.randn(1, 1, tokens, n, dtype=dtype) for n in (config.kv_lora_rank, config.qk_rope_head_dim))
    cache.update(latent, rotated, 0)
    cache.update_indexer(torch.randn(1, tokens, config.index_head_dim, dtype=dtype), 0)
    return cache


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(what: str, way: str, dtype_name: str, tokens: int, threads: int) -> tuple[float, int]:
    """Seconds of the layer, the least of some calls, and the memory beyond that of the model and of its cache."""
    import torch

    import blitz_attn
    torch.set_num_threads(threads)
    blitz_attn.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    model = make_model(way, dtype)
    if way == "ours":
        from blitz_attn.integrations.transformers import trained_sparse

        trained_sparse(model)
    with torch.no_grad():
        if what == "prompt":
            x, cache = torch.randn(1, tokens, model.config.hidden_size, dtype=dtype), None
        else:
            x, cache = torch.randn(1, 1, model.config.hidden_size, dtype=dtype), filled_cache(model, tokens, dtype)
        model(inputs_embeds=x[:, :1], use_cache=False)
        before, best, spent = peak(), float("inf"), 0.0
        while spent < 2:
            begin = time.perf_counter()
            model(inputs_embeds=x, past_key_values=cache, use_cache=cache is not None)
            best, spent = min(best, time.perf_counter() - begin), spent + time.perf_counter() - begin
            if cache is not None:
                cache.crop(-1)
    return best, peak() - before


def run(row: Sequence[Any], memory: int) -> list[str]:
    """Seconds and bytes of a row, measured in a process that may take so many MiB; empty where it ended otherwise."""
    limit = memory * MIB
    done = subprocess.run(
        [sys.executable, __file__, "--row", *map(str, row)],
        capture_output=True, text=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    found = done.stdout.split()
    if done.returncode or len(found) != 2:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"ended by signal {-done.returncode}"
        print(f"trained_sparse.py: {' '.join(map(str, row))}: {reason}", file=sys.stderr)
        return ["", ""]
    return found


def draw(table: Path, picture: Path) -> None:
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["seconds"]]
    dtypes = sorted({row["dtype"] for row in rows})
    figure = Figure(figsize=(12, 0.6 + 3.4 * len(dtypes)), layout="constrained")
    panels = (
        ("prompt", "seconds", "prompt: seconds"),
        ("step", "seconds", "one new token: seconds"),
        ("prompt", "MiB", "prompt: MiB beyond the model"),
    )
    for line, dtype in zip(figure.subplots(len(dtypes), 3, squeeze=False), dtypes, strict=True):
        for axis, (what, column, title) in zip(line, panels, strict=True):
            for way in WAYS:
                of_line = (r for r in rows if (r["what"], r["way"], r["dtype"]) == (what, way, dtype))
                points = sorted((int(r["tokens"]), float(r[column])) for r in of_line)
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=way, linewidth=2.4 if way == "ours" else 1.2)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{title}, {dtype}", fontsize=10)
            axis.set_xlabel("tokens")
            axis.grid(alpha=0.3)
        line[0].legend()
    figure.savefig(picture, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="lengths (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways of attending (all)")
    parser.add_argument("--what", nargs="+", choices=["prompt", "step"], default=["prompt", "step"], help="what is measured (both)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"], help="of the model (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads (%(default)s)")
    parser.add_argument("--memory", type=int, default=20480, metavar="MIB", help="address space of a measured process (%(default)s)")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="draw a table that was printed, and measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("trained_sparse.png"), help="picture of --draw (%(default)s)")
    parser.add_argument("--row", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.draw:
        draw(args.draw, args.output)
        return 0
    if args.row:
        what, way, dtype, tokens, threads = args.row
        print(*measure(what, way, dtype, int(tokens), int(threads)))
        return 0
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for what in args.what:
        for dtype in args.dtypes:
            for way in args.ways:
                for tokens in args.tokens:
                    row = (what, way, dtype, tokens, args.threads)
                    seconds, size = run(row, args.memory)
                    writer.writerow((*row, seconds and f"{float(seconds):.4g}", size and int(size) // MIB))
                    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
