#!/usr/bin/env python3
"""A video model's denoising loop, dense and sparse: seconds per step, and the distance of the latents from those of dense attention.

    python examples/video.py --grids 8x32x32 8x32x64 8x64x64 | tee video.csv
    python examples/video.py --draw video.csv -o video.png
    python examples/video.py --grids 33x60x60 --layers 1 --steps 2 --dense-steps 1 --ways dense tiles   # 118800 tokens, one layer

A transformer with the shape of Wan's and random weights denoises latents, with a FlowMatchEulerDiscreteScheduler of diffusers. The ways are
diffusers' own attention ("sdpa"), this library over all blocks ("dense"), and `sparse_video` with several configurations. All begin with
the same noise, and their first --dense-steps steps are dense. `seconds` is the median time of the other steps. `attention` is the share of
self-attention in these steps, without projections but with norms, rotary embeddings, lists and the order of tokens. `density` is the share
of blocks that the rule keeps. If each head gets one of several rules, it is the mean over these rules; if blocks are chosen in addition to
a rule, it is a lower bound. `error` has a number for each step: the distance from the latents of "dense", in units of their norm. Weights
are random, so the errors show how a difference grows over the steps, not what a trained model would lose.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import numpy as np

import _bench

COLUMNS = ("way", "grid", "tokens", "dtype", "threads", "density", "seconds", "attention", "error")
CHANNELS, TEXT = 16, 64  # channels of the latents; tokens of the prompt


def ways(dense_steps: int) -> dict[str, Any]:
    """The configuration that each way passes to `sparse_video`; None: nothing is sparse."""
    from blitz_attn.integrations.diffusers import SparseVideo
    from blitz_attn.video import Neighbourhood, Radial, Schedule, SlidingTiles

    steps = Schedule(dense_steps=dense_steps)
    slow = Schedule(dense_steps=dense_steps, refresh_every=4)
    return {
        "sdpa": None,
        "dense": None,
        "tiles": SparseVideo(SlidingTiles((2, 3, 3)), schedule=steps),
        "neighbourhood": SparseVideo(Neighbourhood((None, 1, 1)), schedule=steps),
        "radial": SparseVideo(Radial(), schedule=steps, cube=(1, 8, 8), dense_frames=1),
        "spatial or temporal": SparseVideo(choose_from=(Neighbourhood.spatial(), Neighbourhood.temporal()), schedule=slow, cube=(1, 8, 8)),
        "chosen": SparseVideo(density=0.15, schedule=slow),
        "tiles and chosen": SparseVideo(SlidingTiles((1, 3, 3)), density=0.1, schedule=slow),
    }


def make_model(grid: Sequence[int], args: argparse.Namespace) -> Any:
    import torch
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=args.heads, attention_head_dim=128, in_channels=CHANNELS, out_channels=CHANNELS, text_dim=256, freq_dim=256,
        ffn_dim=512 * args.heads, num_layers=args.layers, rope_max_seq_len=max(1024, *grid),
    )  # fmt: skip
    with torch.no_grad():
        for block in model.blocks:  # makes attention about as sharp as a trained model's, and lets it move the latents as much
            block.attn1.norm_q.weight.mul_(3)
            block.scale_shift_table.mul_(10)
    return model.to(getattr(torch, args.dtype)).eval()


def denoise(model: Any, clock: _bench.Clock, grid: Sequence[int], args: argparse.Namespace) -> tuple[list[Any], list[float], list[float]]:
    """The latents after each step, and the seconds of each step and of its self-attention."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(args.steps)
    random = torch.Generator().manual_seed(1)
    latents = torch.randn(1, CHANNELS, grid[0], 2 * grid[1], 2 * grid[2], generator=random)  # a token is a patch of 1 x 2 x 2
    text = torch.randn(1, TEXT, 256, generator=random, dtype=torch.float32).to(model.dtype)
    found, seconds, attention = [], [], []
    for step, timestep in enumerate(scheduler.timesteps):
        print(f"\rvideo.py: step {step + 1} of {args.steps} ", end="", file=sys.stderr, flush=True)
        clock.seconds, begin = 0.0, time.perf_counter()
        with torch.no_grad():
            velocity = model(latents.to(model.dtype), timestep[None], text).sample
        seconds.append(time.perf_counter() - begin)
        attention.append(clock.seconds)
        latents = scheduler.step(velocity.float(), timestep, latents).prev_sample
        found.append(latents)
    return found, seconds, attention


def density_of(config: Any, grid: tuple[int, int, int]) -> float:
    """The share of blocks that a way attends to in its sparse steps; a lower bound if blocks are chosen in addition to a rule."""
    from blitz_attn import video

    if config is None:
        return 1.0
    order = video.cube_order(video.Geometry([grid]), config.cube)
    rules = config.choose_from or [config.rule]
    shares = [video.density(order, x, config.block_shape, dense_frames=config.dense_frames) for x in rules if x is not None]
    return max(statistics.fmean(shares) if shares else 0.0, config.density or 0.0)


def measure(grid: tuple[int, int, int], args: argparse.Namespace, writer: Any) -> None:
    import contextlib

    from blitz_attn.integrations.diffusers import register, sparse_video

    register()
    model = make_model(grid, args)
    clock = _bench.Clock(block.attn1 for block in model.blocks)
    configs = ways(args.dense_steps)
    expected = None
    for way in dict.fromkeys(("dense", *args.ways)):  # the other ways are compared with "dense"
        print(f"video.py: {way}, {'x'.join(map(str, grid))}", file=sys.stderr)
        model.set_attention_backend("native" if way == "sdpa" else "blitz_attn")
        config = configs[way]
        with sparse_video(model, config) if config is not None else contextlib.nullcontext():
            found, seconds, attention = denoise(model, clock, grid, args)
        print(file=sys.stderr)
        expected = expected or found
        if way not in args.ways:
            continue
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        sparse = slice(args.dense_steps, None)
        share = sum(attention[sparse]) / sum(seconds[sparse])
        row = (way, "x".join(map(str, grid)), int(np.prod(grid)), args.dtype, args.threads, f"{density_of(config, grid):.3f}")
        writer.writerow((*row, f"{statistics.median(seconds[sparse]):.4g}", f"{share:.3f}", " ".join(f"{x:.3g}" for x in errors)))
        sys.stdout.flush()


def draw(table: Path, picture: Path) -> None:
    """Seconds of a step by way and grid, and the errors of the largest grid over the steps."""
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["way"] for row in rows))
    grids = list(dict.fromkeys((int(row["tokens"]), row["grid"]) for row in rows))
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    times, errors = figure.subplots(1, 2)
    colours = {name: f"C{n}" for n, name in enumerate(names)}
    for place, (_, grid) in enumerate(grids):
        of_grid = {row["way"]: row for row in rows if row["grid"] == grid}
        longest = max(float(row["seconds"]) for row in of_grid.values())
        for n, name in enumerate(name for name in names if name in of_grid):
            seconds = float(of_grid[name]["seconds"])
            x, part = place + (n - len(of_grid) / 2 + 0.5) * 0.8 / len(of_grid), float(of_grid[name]["attention"])
            bar = times.bar(x, seconds / longest, 0.8 / len(of_grid), color=colours[name], alpha=0.45, label=None if place else name)
            times.bar(x, seconds / longest * part, 0.8 / len(of_grid), color=colours[name])
            times.bar_label(bar, [f"{seconds:.3g}"], fontsize=7, rotation=90, padding=3)
    times.set_xticks(range(len(grids)), [f"{grid}\n{tokens} tokens" for tokens, grid in grids])
    times.set_ylabel("time of a step / that of the slowest way")
    times.set_title(f"seconds of a step (dark: self-attention), {rows[0]['dtype']}, {rows[0]['threads']} threads", fontsize=10)
    times.set_ylim(0, 1.12)
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(names))
    grid = max(grids)[1]
    for row in rows:
        if row["grid"] == grid and row["way"] != "dense":
            points = [(n + 1, float(x)) for n, x in enumerate(row["error"].split()) if float(x) > 0]
            errors.plot(*zip(*points, strict=True), marker="o", color=colours[row["way"]])
    errors.set_yscale("log")
    errors.set_xlabel("steps")
    errors.set_ylabel("distance from dense attention's latents / their norm")
    errors.set_title(f"latents of {grid} (random weights)", fontsize=10)
    errors.grid(alpha=0.3)
    figure.savefig(picture, dpi=100)


def grid_of(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(x) for x in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    names = list(ways(0))
    grid = _bench.checked(grid_of, lambda _: True, "frames x height x width in tokens, such as 8x32x32")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [(8, 32, 32), (8, 32, 64), (8, 64, 64)]
    parser.add_argument("--grids", type=grid, nargs="+", default=usual, help="FRAMESxHEIGHTxWIDTH in tokens (8x32x32 8x32x64 8x64x64)")
    parser.add_argument("--ways", nargs="+", choices=names, default=names, metavar="WAY", help=f"some of {names} (all)")
    parser.add_argument("--steps", type=_bench.positive, default=8, help="denoising steps (%(default)s)")
    parser.add_argument("--dense-steps", type=int, default=2, help="first steps that attend to everything (%(default)s)")
    parser.add_argument("--heads", type=_bench.positive, default=4, help="heads, of 128 numbers each (%(default)s)")
    parser.add_argument("--layers", type=_bench.positive, default=2, help="of the model (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the model (%(default)s)")
    parser.add_argument("--threads", type=_bench.positive, default=2, help="threads (%(default)s)")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="draw a table that was printed, and measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("video.png"), help="picture of --draw (%(default)s)")
    args = parser.parse_args(argv)
    if args.draw:
        draw(args.draw, args.output)
        return 0
    if not 0 <= args.dense_steps < args.steps:
        parser.error(f"--dense-steps: expected at least 0 and fewer than --steps, got {args.dense_steps}")
    import torch

    import blitz_attn

    torch.set_num_threads(args.threads)
    blitz_attn.set_num_threads(args.threads)
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for shape in args.grids:
        measure(shape, args, writer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
