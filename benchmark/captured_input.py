"""benchmark.py on captured queries, keys and values: speed at each sparsity, what it costs in accuracy, and the mass that is kept.

Which blocks to keep: a cheap guess (mean-pooled scores) and the best possible choice. Both keep the same number of blocks in every row
(fewer where a row has fewer to give), among them the first block, the diagonal one and the one before it, and look no further than the
causal diagonal. Block rows and block columns have the same size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

import _bench
from _bench import Column, Progress, Table
from blitz_attn import reference, testing
from capture import Capture, load_capture
from measure import Job, Result, dense_work, measured
from operands import Operands, lay_out
from result_files import Records

QUALITY_COLUMNS = (Column("Layer", 5), Column("Chooser", 9), Column("Kept_mass", 9, ".4f"), Column("Output_error", 12, ".2e"))
COLUMNS = _bench.UPSTREAM_COLUMNS + _bench.RATE_COLUMNS + QUALITY_COLUMNS
FORCED = 3  # blocks of a row that every chooser keeps: first, previous, diagonal


def pooled(x: np.ndarray, block: int) -> np.ndarray:
    """Mean over each block of tokens, (B, H, S, D) -> (B, H, ceil(S / block), D) float32; a cut last block counts its own tokens only."""
    starts = np.arange(0, x.shape[2], block)
    counts = np.diff([*starts, x.shape[2]])
    return np.add.reduceat(x.astype(np.float32), starts, axis=2) / counts[:, None].astype(np.float32)


def mean_pool_scores(q: np.ndarray, k: np.ndarray, block: int) -> np.ndarray:
    """Scores of all pairs of blocks from pooled queries and keys, (B, H, R, R): no scale, for only their order in a row counts."""
    group = q.shape[1] // k.shape[1]
    keys = np.repeat(pooled(k, block), group, axis=1)
    return pooled(q, block) @ keys.swapaxes(-1, -2)


def block_masses(q: np.ndarray, k: np.ndarray, scale: float, block: int) -> np.ndarray:
    """Exact softmax mass of each pair of blocks under causal attention, (B, H, R, R): summed over the block's queries, so that a
    row of blocks sums to its number of queries. Float32, a strip of queries at a time."""
    batch, heads, tokens, _ = q.shape
    group = heads // k.shape[1]
    starts = np.arange(0, tokens, block)
    masses = np.zeros((batch, heads, starts.size, starts.size), np.float32)
    for b, h in np.ndindex(batch, heads):
        queries, keys = q[b, h].astype(np.float32) * np.float32(scale), k[b, h // group].astype(np.float32)
        for row, start in enumerate(starts):
            stop = min(start + block, tokens)
            scores = queries[start:stop] @ keys[:stop].T
            ahead = np.arange(start, stop) > np.arange(start, stop)[:, None]
            scores[:, start:][ahead] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            masses[b, h, row, : row + 1] = np.add.reduceat(weights, starts[: row + 1], axis=1).sum(axis=0)
    return masses


def coarser(masses: np.ndarray, factor: int) -> np.ndarray:
    """Masses of blocks `factor` times as large."""
    cuts = np.arange(0, masses.shape[-1], factor)
    return np.add.reduceat(np.add.reduceat(masses, cuts, axis=-1), cuts, axis=-2)


def blocks_a_row(rows: int, sparsity: float) -> int:
    """How many blocks each row keeps so that about 1 - sparsity of all causal blocks are kept; never fewer than the forced ones."""
    wanted = (1.0 - sparsity) * rows * (rows + 1) / 2
    totals = np.cumsum(np.arange(rows, 0, -1))  # k blocks a row, and r + 1 in the first rows, keep totals[k - 1]
    return max(FORCED, int(np.argmin(np.abs(totals - wanted))) + 1)


def choose(scores: np.ndarray, budget: int) -> np.ndarray:
    """Block list (B, H, R, W) int32 of the `budget` best causal blocks of each row, the forced ones first among them; -1 padded, rising."""
    rows = scores.shape[-1]
    row, column = np.arange(rows)[:, None], np.arange(rows)
    ranked = np.where((column == 0) | (column == row) | (column == row - 1), np.inf, scores)
    ranked = np.where(column > row, -np.inf, ranked)
    width = min(budget, rows)
    best = np.argpartition(-ranked, width - 1, axis=-1)[..., :width].astype(np.int32)
    best = np.sort(np.where(best > row, rows, best), axis=-1)  # what lies ahead of the diagonal goes to the end, as pads
    return np.where(best == rows, -1, best)


def causal_sparsity(sabi: np.ndarray) -> float:
    """Share of the causal blocks that a list drops: what was asked for, up to the whole numbers that a budget comes in."""
    rows = sabi.shape[-2]
    return 1.0 - float((sabi >= 0).sum(axis=(-1, -2)).mean()) / (rows * (rows + 1) / 2)


def kept_mass(masses: np.ndarray, sabi: np.ndarray) -> float:
    """Share of the softmax mass that a block list keeps, the mean over all queries and heads (recall)."""
    picked = np.take_along_axis(masses, np.maximum(sabi, 0).astype(np.int64), axis=-1)
    return float(np.where(sabi >= 0, picked, 0).sum(dtype=np.float64) / masses.sum(dtype=np.float64))


@dataclass(frozen=True)
class Choice:
    """What one row is about, beside layer and block size."""

    sparsity: float
    chooser: str
    budget: int


class RealRun:
    """One run over the layers of a capture."""

    def __init__(self, args: argparse.Namespace, out: TextIO, records: Records):
        self.args, self.records = args, records
        try:
            self.capture: Capture = load_capture(args.input)
        except ValueError as error:
            raise ValueError(f"--input: {error}") from None
        unknown = set(args.layers or ()) - set(self.capture.layers)
        if unknown:
            raise ValueError(f"--layers: expected some of {sorted(self.capture.layers)}, got {sorted(unknown)}")
        for block_q, block_kv in args.block_shapes:
            if block_q != block_kv:
                raise ValueError(f"--block-shapes: expected square ones with --input, got {block_q}x{block_kv}")
        self.layers = args.layers or sorted(self.capture.layers)
        q, k, _ = self.capture.layers[self.layers[0]]
        self.what = _bench.parameters(MODEL=self.capture.model, TEXT=self.capture.text, CAUSAL=True, KV_HEADS=k.shape[1])
        self.tokens = q.shape[2]
        self.progress = Progress(len(self.layers) * self.layer_work(self.operands_of(self.layers[0])))
        self.table = Table(COLUMNS, out, self.progress)

    def operands_of(self, layer: int) -> Operands:
        q, k, v = (testing.round_to(x, self.args.dtype) for x in self.capture.layers[layer])
        return lay_out(q, k, v, self.args.layout, self.args.dtype, causal=True, scale=self.capture.scale)

    def choices(self, block: int) -> list[Choice]:
        """Rows of one layer and block size. Sparsity 0 lists every causal block: there is nothing to choose."""
        rows = -(-self.tokens // block)
        found: dict[Choice, None] = {}
        for sparsity in self.args.sparsities:
            if sparsity == 0:
                found[Choice(0.0, "all", rows)] = None
                continue
            budget = blocks_a_row(rows, sparsity)
            for chooser in self.args.choosers:
                found[Choice(sparsity, chooser, budget)] = None
        return list(found)

    def layer_work(self, operands: Operands) -> float:
        shares = sum(1 + sum(1 - c.sparsity for c in self.choices(block)) for block, _ in self.args.block_shapes)
        return shares * dense_work(operands) * (self.args.repeats + self.args.warmup)

    def run(self, parameter_line: str, machine_line: str) -> None:
        self.table.head(parameter_line, self.what, machine_line)
        rows = [row for layer in self.layers for row in self.run_layer(layer)]
        self.table.foot()
        for line in summary(rows):
            self.table.line(line)

    def run_layer(self, layer: int) -> Iterator[dict[str, Any]]:
        operands = self.operands_of(layer)
        q, k, _, out = operands.views
        q32, k32 = (reference.to_float64(x, operands.bits).astype(np.float32) for x in (q, k))
        operands.call(None, (128, 128), self.args.threads)()
        dense_out = reference.to_float64(out, operands.bits)
        blocks = sorted({block for block, _ in self.args.block_shapes})
        finest = block_masses(q32, k32, self.capture.scale, blocks[0])
        for block, _ in self.args.block_shapes:
            whole, rest = divmod(block, blocks[0])
            masses = coarser(finest, whole) if rest == 0 else block_masses(q32, k32, self.capture.scale, block)
            scores = {"mean-pool": mean_pool_scores(q32, k32, block), "oracle": masses, "all": masses}
            jobs = [
                Job(choice, (block, block), choose(scores[choice.chooser], choice.budget), f"layer {layer}, {block}x{block}")
                for choice in self.choices(block)
            ]
            for job, result in measured(operands, jobs, self.args, self.progress):
                sparse_out = reference.to_float64(out, operands.bits)
                values = self.values(layer, job, result, operands)
                values["Kept_mass"] = kept_mass(masses, job.sabi)
                values["Output_error"] = float(np.linalg.norm(sparse_out - dense_out) / np.linalg.norm(dense_out))
                self.table.row(values)
                self.record(values, result)
                yield values

    def values(self, layer: int, job: Job, result: Result, operands: Operands) -> dict[str, Any]:
        q, k = operands.views[:2]
        return {
            "block_shape": "{}x{}".format(*job.block_shape),
            "H": q.shape[1],
            "B": q.shape[0],
            "s_q": q.shape[2],
            "s_kv": k.shape[2],
            "D": q.shape[3],
            "frame(L,R,T,B)": "-",
            "sparsity": causal_sparsity(job.sabi),
            **result.values,
            "Layer": layer,
            "Chooser": job.tag.chooser,
        }

    def record(self, values: dict[str, Any], result: Result) -> None:
        more = {"reference_samples_s": result.reference.samples, "own_samples_s": result.own.samples, "F_gflops": result.peak}
        self.records.add(values | {"dtype": self.args.dtype, "threads": self.args.threads} | more)


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Means over the layers, a line for each block shape, chooser and sparsity. The lines are comments to whoever reads the table."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["block_shape"], row["Chooser"], row["sparsity"]), []).append(row)
    yield f"# mean over {len({row['Layer'] for row in rows})} layers"
    names = (
        f"{'block_shape':>11} {'Chooser':>9} {'sparsity':>8} {'Speed_up':>8} {'Share_of_ideal':>14} {'Kept_mass':>9} {'Output_error':>12}"
    )
    yield "# " + names
    for (shape, chooser, sparsity), group in sorted(groups.items()):
        speed_up = np.mean([row["Ref_Latency_[usec]"] / row["Our_Latency_[usec]"] for row in group])
        ideal, mass, error = (np.mean([row[name] for row in group]) for name in ("Share_of_ideal", "Kept_mass", "Output_error"))
        yield f"# {shape:>11} {chooser:>9} {sparsity:>8.2f} {speed_up:>8.2f} {ideal:>14.3f} {mass:>9.4f} {error:>12.2e}"
