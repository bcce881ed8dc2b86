"""benchmark.py on random operands: upstream's sweep of block shapes, sizes and sparsities, which can go on where an earlier run ended."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import _bench
from _bench import Progress, Table
from blitz_attn import reference, testing
from blitz_attn import sabi as lists
from measure import Job, dense_call, measured
from operands import Operands, dense_pairs, draw, flops
from result_files import Records

COLUMNS = _bench.UPSTREAM_COLUMNS + _bench.RATE_COLUMNS


def row_key(text: str) -> tuple[str, ...]:
    """What a row measures: its leading columns, as printed."""
    return tuple(text.split()[: _bench.KEY_COLUMNS])


@dataclass
class Earlier:
    """The rows of an earlier run by what they measure."""

    path: Path | None = None
    lines: list[str] = field(default_factory=list)
    rows: dict[tuple[str, ...], str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, columns: int) -> Earlier:
        """Rows of the table in `path`; complete ones only, for a stopped run may have left half a line.

        Raises
        ------
        ValueError
            There is no table in it.
        """
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        lines = [line.rstrip("\n") for line in lines if line.endswith("\n")]
        if not any(line.split()[:1] == [_bench.UPSTREAM_COLUMNS[0].name] for line in lines):
            raise ValueError(f"--resume: {path} holds no table (was it overwritten by sending this run's output to the same file?)")
        found = [line for line in lines if re.match(r"\s*\d+x\d+\s", line) and len(line.split()) == columns]
        return cls(path, lines, {row_key(line): line for line in found})

    def require(self, parameter_line: str) -> None:
        """Raise ValueError where the earlier run had other parameters."""
        if self.path and parameter_line not in (line.strip() for line in self.lines):
            raise ValueError(f"--resume: {self.path} was measured with other parameters than {parameter_line}")


@dataclass(frozen=True)
class Cell:
    """One row of the table, before it is measured."""

    block_shape: tuple[int, int]
    batch: int
    heads: int
    tokens: int
    head_dim: int
    sparsity: float
    frame: lists.FrameWidths | None

    @property
    def problem(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.tokens, self.head_dim

    def key_values(self) -> dict[str, Any]:
        """What upstream's leading columns say. At sparsity 0 the frame makes no difference."""
        bare = self.frame is None or self.sparsity == 0
        return {
            "block_shape": "{}x{}".format(*self.block_shape),
            "H": self.heads,
            "B": self.batch,
            "s_q": self.tokens,
            "s_kv": self.tokens,
            "D": self.head_dim,
            "frame(L,R,T,B)": "-" if bare else "({},{},{},{})".format(*self.frame),
            "sparsity": self.sparsity,
        }

    @property
    def key(self) -> tuple[str, ...]:
        values = self.key_values()
        return row_key(" ".join(column.text(values[column.name]) for column in COLUMNS[: _bench.KEY_COLUMNS]))

    def feasible(self) -> bool:
        """Whether a list of this sparsity exists: the frame fits into it and no row is left empty."""
        grid = testing.BlockGrid(self.tokens, self.tokens, *self.block_shape)
        return self.sparsity == 0 or testing.is_block_sparse_pattern_feasible(grid, self.frame, self.sparsity)

    def dense_work(self) -> float:
        """Floating-point operations of dense attention."""
        return self.batch * self.heads * flops(dense_pairs(self.tokens, self.tokens), self.head_dim, self.head_dim)

    def draw_list(self, args: argparse.Namespace) -> np.ndarray:
        return lists.random_with_frame(
            self.tokens,
            None,
            self.block_shape,
            self.sparsity,
            frame=None if self.sparsity == 0 else self.frame,
            batch=self.batch,
            heads=self.heads,
            seed=args.seed,
            sort=args.sorted,
        )


def frame_of(block_shape: tuple[int, int], tokens: int) -> lists.FrameWidths:
    """Upstream's frame: about `tokens` tokens at the left and at the top, one block at the right and at the bottom."""
    block_q, block_kv = block_shape
    return lists.FrameWidths(-(-tokens // block_kv), 1, -(-tokens // block_q), 1)


def groups_of(args: argparse.Namespace) -> Iterator[list[Cell]]:
    """The cells of the sweep in upstream's order, those of one block shape and problem together; impossible ones are left out."""
    for block_shape in args.block_shapes:
        frame = frame_of(block_shape, args.frame_tokens) if args.frames else None
        for problem in itertools.product(args.batch, args.heads, args.seq, args.head_dim):
            cells = [Cell(block_shape, *problem, sparsity, frame) for sparsity in args.sparsities]
            left_out = [f"{cell.sparsity:g}" for cell in cells if not cell.feasible()]
            if left_out:
                name = f"{cells[0].key_values()['block_shape']} at S = {problem[2]}"
                print(
                    f"{name}: sparsity {', '.join(left_out)} left out (the frame alone keeps more, or rows would be empty)", file=sys.stderr
                )
            if len(left_out) < len(cells):
                yield [cell for cell in cells if cell.feasible()]


def probe_rate(args: argparse.Namespace) -> float:
    """FLOP/s of a short piece of the first problem: enough to say how long the whole will take."""
    heads, head_dim = args.heads[0], args.head_dim[0]
    keys = min(args.seq[0], 8192)
    piece = draw(1, heads, args.kv_heads or heads, keys, head_dim, args.dtype, "BNSD", args.seed)
    rows = min(keys, 256 * args.threads)
    piece.q, piece.out = np.ascontiguousarray(piece.q[:, :, :rows]), np.ascontiguousarray(piece.out[:, :, :rows])
    call = dense_call(piece, "own", args.threads)
    call()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < 0.2:
        call()
        calls += 1
    return calls * heads * flops(rows * keys, head_dim, head_dim) / (time.perf_counter() - start)


class Sweep:
    """One run over the grid."""

    def __init__(self, args: argparse.Namespace, out: TextIO, records: Records):
        self.args, self.records = args, records
        self.groups = list(groups_of(args))
        if not self.groups:
            raise ValueError("--sparsities: no cell of this sweep can have a block list; lower them, or use --no-frames")
        self.earlier = Earlier.read(args.resume, len(COLUMNS)) if args.resume else Earlier()
        work = 0.0
        for group in self.groups:
            missing = self.missing(group)
            work += sum((1 - cell.sparsity) * cell.dense_work() for cell in missing) + (group[0].dense_work() if missing else 0.0)
        self.total = work * (args.repeats + args.warmup)
        self.progress = Progress(self.total)
        self.table = Table(COLUMNS, out, self.progress)
        self.kept: tuple[tuple, Operands] | None = None

    def missing(self, group: list[Cell]) -> list[Cell]:
        """The cells that the earlier run has no row of."""
        return [cell for cell in group if cell.key not in self.earlier.rows]

    def announce(self) -> None:
        rate = probe_rate(self.args)
        rows = [cell for group in self.groups for cell in group]
        done = len(rows) - sum(len(self.missing(group)) for group in self.groups)
        count = f"{len(rows)} row{'s' if len(rows) > 1 else ''}" + (f", {done} of them from {self.args.resume}" if done else "")
        self.progress.note(
            f"{count}: about {_bench.duration(self.total / rate)} "
            f"({self.total / 1e12:.3g} TFLOP at {rate / 1e9:.0f} GFLOP/s, from a short probe). Rows come as they are measured; "
            "a stopped run goes on with --resume FILE, where FILE is what it printed."
        )
        self.progress.restart()

    def operands_of(self, cell: Cell) -> Operands:
        """The operands of the cell's problem. Those of the last problem are kept, for the next block shape has the same ones."""
        if self.kept is None or self.kept[0] != cell.problem:
            self.kept = None  # frees the old ones before the new ones are made
            args = self.args
            kv_heads = args.kv_heads or cell.heads
            drawn = draw(cell.batch, cell.heads, kv_heads, cell.tokens, cell.head_dim, args.dtype, args.layout, args.seed)
            self.kept = (cell.problem, drawn)
        return self.kept[1]

    def run(self, parameter_line: str, machine_line: str) -> None:
        self.earlier.require(parameter_line)
        self.announce()
        self.table.head(parameter_line, machine_line)
        for group in self.groups:
            missing = self.missing(group)
            jobs = [Job(cell, cell.block_shape, cell.draw_list(self.args), " ".join(cell.key)) for cell in missing]
            results = measured(self.operands_of(group[0]), jobs, self.args, self.progress) if jobs else iter(())
            for cell in group:  # in order, rows of the earlier run among the new ones
                if cell in missing:
                    job, result = next(results)
                    self.report(cell, job, result)
                else:
                    self.table.line(self.earlier.rows[cell.key])
        self.table.foot()

    def report(self, cell: Cell, job: Job, result) -> None:
        values = cell.key_values() | result.values
        if self.args.print_mask or self.args.print_outputs or self.args.print_block_equality:
            show(cell, job, self.operands_of(cell), self.args, self.progress)
        self.table.row(values)
        more = {"reference_samples_s": result.reference.samples, "own_samples_s": result.own.samples, "F_gflops": result.peak}
        self.records.add(values | {"dtype": self.args.dtype, "threads": self.args.threads} | more)


def show(cell: Cell, job: Job, operands: Operands, args: argparse.Namespace, progress: Progress) -> None:
    """Upstream's looks at a cell, on stderr: its mask, a corner of its output, and which blocks of the output equal the reference."""
    q, k, v, out = operands.views
    progress.note(" ".join(cell.key))
    if args.print_mask:
        progress.note(lists.picture(job.sabi, -(-cell.tokens // cell.block_shape[1])))
    if args.print_outputs:
        corner = reference.to_float64(out[:, :, : args.print_height, : args.print_width], operands.bits)
        progress.note(np.array2string(corner, precision=4, suppress_small=True, threshold=sys.maxsize))
    if args.print_block_equality:  # the whole reference: for short sequences
        expected = reference.block_sparse_attention(q, k, v, job.sabi, block_shape=job.block_shape, dtype=operands.bits)
        got = reference.to_float64(out, operands.bits)
        equal = testing.block_allclose_map(got, expected, args.print_height, args.print_width)
        progress.note(str(np.asarray(equal).astype(int)))
