#!/usr/bin/env python3
"""This library next to other libraries: the same attention, operands and number of threads, in turns in one process. A table on stdout.

    python benchmark/peers.py | tee peers.log | python benchmark/plot.py  # everything: an hour or so; first prints the number of cells
    python benchmark/peers.py --quick                                     # two minutes
    python benchmark/peers.py -S 512 2048 -D 64 --dtypes bfloat16 --peers torch flex

Contenders, as far as installed: NumPy (three lines), torch (scaled_dot_product_attention), flex (torch's flex_attention, compiled, with
an equal BlockMask), onnxruntime (MultiHeadAttention), OpenVINO and JAX; `pip install .[peers]` installs them. Each contender is asked for
the same result, and is timed only if its error against float64 is within the bound for the dtype. `Share_of_limit` is the contender's rate
over the limit of arithmetic that `Bound_by` names: P_sustained for bfloat16 on a CPU with tiles, else F. `Over_ours` is the contender's
time over this library's; above 1, this library is faster. A contender that cannot run a cell, or would need longer than --most-seconds for
it, has a row without a time, with the reason behind a #.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from _bench import Contender, Report, above_zero, columns, command, in_turns, parameters, parser_of, positive, share
from blitz_attn import _core
from operations import Attention, draw, is_feasible, memory_available, peak_name
from other_libraries import BLOCK, OURS, Step, UnavailableError, pause, reason_of
from other_libraries import PREFILL_PEERS as PEERS

OWN = "ours"
DTYPES = ("float32", "float16", "bfloat16")
LARGEST_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # relative, by norms: single elements near 0 may have larger errors
SEQ = (256, 512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
SPARSITIES = (0.0, 0.5, 0.9)
PROBE_SECONDS = 0.03
# Sleeping threads are woken one by one, some on the same CPU, and tiles and wide vectors need a while to reach full speed. Where no untimed
# calls come first, a call of half a millisecond takes up to 16 milliseconds.
SETTLE_SECONDS = 0.03

COLUMNS = columns(
    "dtype:9 D:4 rule:7 sparsity:8.2f H:3 S:6 threads:7 contender:12 Equal:6 Error:8.1e Time_[usec]:12.1f GFLOP/s:8.1f "
    "Limit_[GFLOP/s]:15.1f Bound_by:11 Share_of_limit:14.3f Over_ours:10.2f"
)
CELL_COLUMNS = ("dtype", "D", "rule", "sparsity", "H", "S", "threads")  # the problem of a row, without its contender


@dataclass(frozen=True)
class Cell:
    """A problem, and which keys its queries attend."""

    dtype: str
    head_dim: int
    tokens: int
    causal: bool
    sparsity: float

    def draw(self, args: argparse.Namespace) -> Attention:
        dense = draw(self.dtype, args.heads, self.tokens, self.head_dim, seed=args.seed, causal=self.causal)
        return dense.sparse(self.sparsity, (BLOCK, BLOCK), args.seed) if self.sparsity else dense


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells that were asked for, by rising length, so that a contender's time at one length predicts its time at the next."""
    rules = [(False, sparsity) for sparsity in args.sparsities] + ([(True, 0.0)] if args.causal else [])
    for dtype, head_dim, tokens, rule in itertools.product(args.dtypes, args.head_dim, sorted(args.seq), rules):
        if is_feasible(tokens, (BLOCK, BLOCK), rule[1]):
            yield Cell(dtype, head_dim, tokens, *rule)


@dataclass
class Table:
    """The rows of a run, and the rates of contenders that were measured so far."""

    args: argparse.Namespace
    report: Report
    rates: dict[tuple[Any, ...], float] = field(default_factory=dict)  # seconds per query-key pair, attended or not, in the last run

    def prepared(self, name: str, threads: int, cell: Cell, asked: Attention) -> tuple[Step, float]:
        """A call of a contender and the error of its result. Raises UnavailableError if the contender is not installed, does not fit into
        memory, would take too long, fails, or gives a wrong result."""
        peer, pairs, most = OURS if name == OWN else PEERS[name], asked.q.shape[1] * cell.tokens**2, self.args.most_seconds
        kind, calls = (name, threads, cell.dtype, cell.head_dim, cell.causal, cell.sparsity), self.args.repeats + self.args.warmup + 1
        needed, seconds = peer.bytes_a_pair[cell.sparsity > 0] * pairs, self.rates.get(kind, 0.0) * pairs
        if needed > memory_available():
            raise UnavailableError(f"needs about {needed / 2**30:.0f} GiB")
        if seconds * calls <= most:
            try:
                run, fetch = peer.make(asked, threads)
                start = time.perf_counter()
                result = run()
                seconds = time.perf_counter() - start
                error = asked.error(fetch(result))
            except (RuntimeError, ValueError, MemoryError, NotImplementedError) as failure:  # other libraries raise these if they cannot
                raise UnavailableError(reason_of(failure)) from None
            self.rates[kind] = seconds / pairs
        if seconds * calls > most:
            raise UnavailableError(f"{calls} calls of about {seconds:.2g} s: more than --most-seconds {most:g}")
        if error > LARGEST_ERROR[cell.dtype]:
            raise UnavailableError(f"error {error:.1e} against float64: not the same result, not timed")
        return run, error

    def measure(self, cell: Cell, share: float) -> None:
        """Measure and print the rows of a cell. For each number of threads, the row of this library comes first."""
        args, asked, level = self.args, cell.draw(self.args), _core.isa_active()
        bound = peak_name(cell.dtype, level)
        probe = _core.probe_flops if bound == "F" else _core.probe_tile_flops
        limits: dict[int, Contender] = {}
        timed: dict[tuple[int, str], tuple[Contender, float]] = {}
        reasons: dict[tuple[int, str], str] = {}
        contenders: list[Contender] = []
        for threads in args.threads:
            limits[threads] = Contender("limit", partial(probe, level, PROBE_SECONDS, threads))
            contenders.append(limits[threads])
            for name in (OWN, *args.peers):
                try:
                    run, error = self.prepared(name, threads, cell, asked)
                except UnavailableError as reason:
                    reasons[threads, name] = str(reason)
                    continue
                label = f"{cell.dtype} D={cell.head_dim} S={cell.tokens} {name}"
                timed[threads, name] = Contender(label, run, settle=SETTLE_SECONDS), error
                contenders.append(timed[threads, name][0])
                if threads > 1:
                    contenders.append(pause((OURS if name == OWN else PEERS[name]).rest))
        list(in_turns(contenders, args, self.report.progress, share))
        rule = "causal" if cell.causal else "all"
        known = {"dtype": cell.dtype, "D": cell.head_dim, "rule": rule, "sparsity": cell.sparsity, "H": args.heads, "S": cell.tokens}
        for threads in args.threads:
            limit = limits[threads].value
            for name in (OWN, *args.peers):
                values = known | {"threads": threads, "contender": name, "Limit_[GFLOP/s]": limit, "Bound_by": bound}
                if (threads, name) in timed:
                    contender, error = timed[threads, name]
                    rate = asked.flops / contender.median / 1e9
                    values |= {
                        "Equal": "yes",
                        "Error": error,
                        "Time_[usec]": contender.median * 1e6,
                        "GFLOP/s": rate,
                        "Share_of_limit": rate / limit,
                        "Over_ours": contender.median / timed[threads, OWN][0].median if (threads, OWN) in timed else None,
                        "samples_s": contender.samples,
                    }
                self.report.row(values, reasons.get((threads, name), ""))


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line per cell with our rate, our share of the limit and each peer's time over ours; then the number of cells with a faster peer."""
    names = [name for name in PEERS if any(row["contender"] == name for row in rows)]
    shown = [column for column in COLUMNS if column.name in (*CELL_COLUMNS, "GFLOP/s", "Bound_by", "Share_of_limit")]
    shown += columns(" ".join(f"{name}/ours:{len(name) + 5}.2f" for name in names))
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:  # our rows come first
        cell = cells.setdefault(tuple(row[name] for name in CELL_COLUMNS), dict(row))
        cell[f"{row['contender']}/ours"] = row.get("Over_ours")
    yield "# " + " ".join(f"{column.name:>{column.width}}" for column in shown)
    for cell in cells.values():
        yield "# " + " ".join(column.text(cell.get(column.name)) for column in shown)
    ahead = sum(any((cell[f"{name}/ours"] or 1.0) < 1 for name in names) for cell in cells.values())
    yield f"# cells with a peer ahead: {ahead} of {len(cells)}"


# ---- The command ---------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=None)
    what = result.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help="lengths 512 and 2048, D 128, sparsities 0 and 0.9, 3 repeats")
    what.add_argument("--seq", "-S", type=positive, nargs="+", help="tokens (256 .. 16384)")
    what.add_argument("--head-dim", "-D", type=positive, nargs="+", help="head dimensions (64 128)")
    what.add_argument("--heads", "-H", type=positive, default=4, help="heads (%(default)s)")
    what.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes (all)")
    what.add_argument("--sparsities", type=share, nargs="*", metavar="s", help=f"shares of {BLOCK}x{BLOCK} blocks to drop (0 0.5 0.9)")
    what.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="causal attention too (yes)")
    what.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="libraries (all that are installed)")
    what.add_argument("--most-seconds", type=above_zero, default=20.0, help="what a contender may take in a cell, all turns (20)")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    args.seq = args.seq or ([512, 2048] if args.quick else SEQ)
    args.head_dim = args.head_dim or ([128] if args.quick else HEAD_DIMS)
    if args.sparsities is None:
        args.sparsities = [0.0, 0.9] if args.quick else SPARSITIES
    args.repeats = args.repeats or (3 if args.quick else 5)
    args.peers = [name for name in args.peers if PEERS[name].version]
    cells = list(cells_of(args))
    costs = [cell.tokens**2 + 1e6 for cell in cells]
    versions = {PEERS[name].package: PEERS[name].version for name in args.peers}
    report.about["versions"] = versions
    report.note(f"{len(cells)} cells, each with {' and '.join(map(str, args.threads))} threads")
    named = ", ".join(f"{package} {number}" for package, number in versions.items())
    options = parameters(BLOCK_SHAPE=f"{BLOCK}x{BLOCK}", ISA=_core.isa_active(), REPEATS=args.repeats, SEED=args.seed)
    report.head(options, f"{_core.cpu_model()}; blitz_attn {blitz_attn.__version__} beside {named or 'nobody'}")
    table = Table(args, report)
    for cell, cost in zip(cells, costs, strict=True):
        table.measure(cell, cost / sum(costs))
    report.foot()
    for line in summary(report.rows):
        report.line(line)


if __name__ == "__main__":
    raise SystemExit(main())
