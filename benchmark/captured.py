"""The main job on captured queries, keys and values: speed at each sparsity, what it costs in accuracy, and the mass that is kept."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

import _bench
import choosers
from _bench import Column, Progress, Table
from blitz_attn import reference, testing
from measure import Job, Result, dense_work, measured
from operands import Operands, lay_out
from qkv_file import Capture, load_capture
from records import Records

QUALITY_COLUMNS = (Column("Layer", 5), Column("Chooser", 9), Column("Kept_mass", 9, ".4f"), Column("Output_error", 12, ".2e"))
COLUMNS = _bench.UPSTREAM_COLUMNS + _bench.RATE_COLUMNS + QUALITY_COLUMNS
CHOOSERS = ("mean-pool", "oracle")


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
            budget = choosers.blocks_a_row(rows, sparsity)
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
        finest = choosers.block_masses(q32, k32, self.capture.scale, blocks[0])
        for block, _ in self.args.block_shapes:
            whole, rest = divmod(block, blocks[0])
            masses = choosers.coarser(finest, whole) if rest == 0 else choosers.block_masses(q32, k32, self.capture.scale, block)
            scores = {"mean-pool": choosers.mean_pool_scores(q32, k32, block), "oracle": masses, "all": masses}
            jobs = [
                Job(choice, (block, block), choosers.choose(scores[choice.chooser], choice.budget), f"layer {layer}, {block}x{block}")
                for choice in self.choices(block)
            ]
            for job, result in measured(operands, jobs, self.args, self.progress):
                sparse_out = reference.to_float64(out, operands.bits)
                values = self.values(layer, job, result, operands)
                values["Kept_mass"] = choosers.kept_mass(masses, job.sabi)
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
            "sparsity": choosers.causal_sparsity(job.sabi),
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
