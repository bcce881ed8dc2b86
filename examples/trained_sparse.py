#!/usr/bin/env python3
"""Time and memory of one layer of a model that was trained to be sparse, for several lengths and ways of attending.

    python examples/trained_sparse.py --tokens 4096 8192 16384 | tee layer.csv
    python examples/trained_sparse.py --draw layer.csv -o layer.png
    python examples/trained_sparse.py --family qwen4_exp --ways sdpa ours --tokens 1024 4096

The layer has the attention dimensions of the released model and random weights; its hidden size and its MLP are small. DeepSeek-V3.2
has 128 heads over one latent of 512 + 64 numbers per token, and an indexer of 64 heads that chooses 2048 tokens for each query.

Each row is measured in a process of its own. `what` is a prompt of `tokens` tokens ("prompt"), or one new token after such a prompt
("step"). `way` is transformers' own attention ("eager", "sdpa"), this library inside the model's own code ("blitz_attn"), or
`trained_sparse` ("ours"), where this library also chooses the tokens. "dense" is "ours" with a budget that covers all tokens. `seconds` is
the time of the whole layer. `attention` is the processor time of its attention without projections, except the one that expands keys and
values. `MiB` is the most memory that the layer takes beyond the memory of its model and its cache. A row has no numbers if its way needs
more memory than --memory allows, or is not for this model.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench

WAYS = {"eager": "eager", "sdpa": "sdpa", "blitz_attn": "blitz_attn", "dense": "blitz_attn", "ours": "blitz_attn"}  # attn_implementation
COLUMNS = ("family", "what", "way", "dtype", "tokens", "threads", "seconds", "attention", "MiB")
MIB = 1 << 20
LEAST_SECONDS = 2  # a row is repeated for at least this time

# For each family: the beginning of the names of its classes, the option that is its budget, and the configuration of one layer.
SMALL = {"num_hidden_layers": 1, "vocab_size": 128, "hidden_size": 1024, "intermediate_size": 16, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", "index_topk", {"first_k_dense_replace": 1}),
    "glm5_next": ("Glm5NextText", "index_topk", {
        "layer_types": ["indexed_attention"], "indexer_types": ["full"], "mlp_layer_types": ["dense"], "moe_intermediate_size": 16,
    }),
    "qwen4_exp": ("Qwen4ExpText", "indexer_budget", {
        "layer_types": ["indexed_attention"], "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8, "hc_mult": 2, "indexer_n_heads": 16, "indexer_kv_heads": 1,
        "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }),
    "deepseek_v4": ("DeepseekV4", "index_topk", {
        "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"], "n_routed_experts": 1, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "hc_mult": 2,
    }),
}  # fmt: skip


def make_model(family: str, way: str, dtype: Any) -> Any:
    import torch

    kind, budget, options = FAMILIES[family]
    config = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), f"{kind}Config")
    model = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), f"{kind}Model")
    given = {name: x for name, x in (SMALL | options).items() if hasattr(config, name)}
    if way == "dense":
        given[budget] = 1 << 20
    made = config(**given, attn_implementation=WAYS[way])
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return model(made).eval()
    finally:
        torch.set_default_dtype(before)


def filled_cache(model: Any, family: str, tokens: int, dtype: Any) -> Any:
    """A cache after a prompt of `tokens` tokens: random numbers if their shapes are known here, else what `trained_sparse` puts there."""
    import torch
    from transformers import DynamicCache

    from blitz_attn.integrations.transformers import trained_sparse

    config = model.config
    cache = DynamicCache(config=config)
    if family == "deepseek_v32":
        latent, rotated = (torch.randn(1, 1, tokens, n, dtype=dtype) for n in (config.kv_lora_rank, config.qk_rope_head_dim))
        cache.update(latent, rotated, 0)
        cache.update_indexer(torch.randn(1, tokens, config.index_head_dim, dtype=dtype), 0)
        return cache
    own = config._attn_implementation
    model.set_attn_implementation("blitz_attn")
    with trained_sparse(model):
        model(torch.randint(1, 128, (1, tokens)), cache=cache, use_cache=True)
    model.set_attn_implementation(own)
    return cache


def memory(name: str) -> int:
    """Bytes of memory that this process has now ("VmRSS"), or has had at most since `forget_peak` ("VmHWM"), as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def measure(family: str, what: str, way: str, dtype_name: str, tokens: int, threads: int) -> tuple[float, float, int]:
    """The seconds of the layer and the processor seconds of its attention, each the least of some calls, and the bytes that it takes."""
    import torch

    import blitz_attn
    from blitz_attn.integrations.transformers import register, trained_sparse

    register()
    torch.set_num_threads(threads)
    blitz_attn.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    model, cache = make_model(family, way, dtype), None
    attention = model.layers[0].self_attn
    clock = _bench.Clock([attention], time.process_time, counted=getattr(attention, "kv_b_proj", None))  # kv_b_proj expands keys and values
    ids = torch.randint(1, 128, (1, tokens if what == "prompt" else 1))
    with torch.no_grad():
        if what == "step":
            cache = filled_cache(model, family, tokens, dtype)
        if way in ("dense", "ours"):
            trained_sparse(model)
        model(ids[:, :1], use_cache=False)
        best, least, used = float("inf"), float("inf"), 0.0
        forget_peak()
        before = memory("VmRSS")
        while used < LEAST_SECONDS or best == float("inf"):
            clock.seconds, begin = 0.0, time.perf_counter()
            model(ids, cache=cache, use_cache=cache is not None)
            seconds = time.perf_counter() - begin
            best, least, used = min(best, seconds), min(least, clock.seconds), used + seconds
    return best, least, memory("VmHWM") - before


def run(row: Sequence[Any], memory: int) -> list[str]:
    """The numbers of `measure` for a row, from a process that may take `memory` MiB; empty texts if that process failed."""
    limit = memory * MIB
    done = subprocess.run(
        [sys.executable, __file__, "--row", *map(str, row)],
        capture_output=True, text=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    found = done.stdout.split()
    if done.returncode or len(found) != 3:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"ended by signal {-done.returncode}"
        print(f"trained_sparse.py: {' '.join(map(str, row))}: {reason}", file=sys.stderr)
        return ["", "", ""]
    return [f"{float(found[0]):.4g}", f"{float(found[1]):.4g}", str(int(found[2]) // MIB)]


def draw(table: Path, picture: Path) -> None:
    """Draw a table, with a line of panels for each family and dtype."""
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["seconds"]]
    lines = sorted({(row["family"], row["dtype"]) for row in rows})
    figure = Figure(figsize=(12, 0.6 + 3.4 * len(lines)), layout="constrained")
    panels = (
        ("prompt", "attention", "prompt: seconds of attention"),
        ("step", "attention", "one new token: seconds of attention"),
        ("prompt", "MiB", "prompt: MiB beyond the model"),
    )
    for axes, line in zip(figure.subplots(len(lines), 3, squeeze=False), lines, strict=True):
        for axis, (what, column, title) in zip(axes, panels, strict=True):
            for way in WAYS:
                of_way = (r for r in rows if (r["family"], r["dtype"], r["what"], r["way"]) == (*line, what, way))
                points = sorted((int(r["tokens"]), max(float(r[column]), 1 if column == "MiB" else 0)) for r in of_way)
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=way, linewidth=2.4 if way == "ours" else 1.2)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{title}, {line[0]}, {line[1]}", fontsize=9)
            axis.set_xlabel("tokens")
            axis.grid(alpha=0.3)
        axes[0].legend()
    figure.savefig(picture, dpi=100)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="deepseek_v32", help="the model (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="lengths (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways of attending (all)")
    parser.add_argument("--what", nargs="+", choices=["prompt", "step"], default=["prompt", "step"], help="what is measured (both)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"], help="of the model (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads (%(default)s)")
    parser.add_argument("--memory", type=int, default=20480, metavar="MIB", help="address space of a measured process (%(default)s)")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="draw a table that was printed, and measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("trained_sparse.png"), help="picture of --draw (%(default)s)")
    parser.add_argument("--row", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.draw:
        draw(args.draw, args.output)
        return 0
    if args.row:
        family, what, way, dtype, tokens, threads = args.row
        print(*measure(family, what, way, dtype, int(tokens), int(threads)))
        return 0
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for row in product([args.family], args.what, args.ways, args.dtypes, args.tokens, [args.threads]):
        writer.writerow((*row, *run(row, args.memory)))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
