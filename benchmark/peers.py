#!/usr/bin/env python3
"""This library beside others: the same attention over the same operands and threads, in turns in one process. A table on stdout.

    python benchmark/peers.py | tee peers.log | python benchmark/plot.py  # everything: an hour or so; says first how many cells
    python benchmark/peers.py --quick                                     # two minutes
    python benchmark/peers.py -S 512 2048 -D 64 --dtypes bfloat16 --peers torch flex
    python benchmark/peers.py --merge part1.log part2.log                 # the last tables, of what was measured in pieces

Contenders are what is installed of NumPy (three lines), torch (scaled_dot_product_attention), flex (torch's flex_attention, compiled, with
an equal BlockMask), onnxruntime (MultiHeadAttention), OpenVINO and JAX; `pip install .[peers]` brings them. Each is asked for the same
result, and timed only if its error against float64 is within the dtype's. Rows: `Share_of_limit` is GFLOP/s of what is attended over the
machine's limit on the same threads (F, or P for bfloat16 where the CPU has tiles); `Over_ours` is the time over this library's: above 1,
this library is quicker. A contender that cannot do a cell, or would take longer than --most-seconds for it, has a row without a time, and
the reason behind a #.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _bench
import blitz_attn
import roofline
from _bench import (
    Column,
    Contender,
    Progress,
    Table,
    above_zero,
    command,
    in_turns,
    isa_level,
    natural,
    parse_rows,
    positive,
    readable,
    share,
    writable,
)
from blitz_attn import _core, sabi, testing
from operands import dense_pairs, draw, flops, kept_pairs, memory_available
from other_libraries import BLOCK, LARGEST_ERROR, OURS, Fetch, Question, Step, UnavailableError, pause, reason_of
from other_libraries import PREFILL_PEERS as PEERS
from result_files import Records, add_save, main_with_save

OWN = "ours"
DTYPES = tuple(LARGEST_ERROR)
SEQ = (256, 512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
SPARSITIES = (0.0, 0.5, 0.9)
PROBE_SECONDS = 0.03
# Threads that slept are woken one by one, some on the same CPU, and tiles and wide vectors need a while to come up to speed: without calls
# ahead of the clock, a call of half a millisecond takes anything up to 16.
SETTLE_SECONDS = 0.03
PROBE_TOKENS = 512  # the length at which a contender shows how long a longer one will take it
AHEAD_FROM, NEAR_ENOUGH = 512, 0.9  # below this length a peer may be ahead by a tenth

COLUMNS = (
    Column("dtype", 9),
    Column("D", 4),
    Column("rule", 7),
    Column("sparsity", 8, ".2f"),
    Column("H", 3),
    Column("S", 6),
    Column("threads", 7),
    Column("contender", 12),
    Column("Equal", 6),
    Column("Error", 8, ".1e"),
    Column("Time_[usec]", 12, ".1f"),
    Column("GFLOP/s", 8, ".1f"),
    Column("Limit_[GFLOP/s]", 15, ".1f"),
    Column("Share_of_limit", 14, ".3f"),
    Column("Over_ours", 10, ".2f"),
)
CELL_COLUMNS = ("dtype", "D", "rule", "sparsity", "H", "S", "threads")  # what a row measures, but for who


@dataclass(frozen=True)
class Cell:
    """A problem, and what is attended."""

    dtype: str
    head_dim: int
    heads: int
    tokens: int
    causal: bool
    sparsity: float

    def values(self) -> dict[str, Any]:
        rule = "causal" if self.causal else "all"
        return {"dtype": self.dtype, "D": self.head_dim, "rule": rule, "sparsity": self.sparsity, "H": self.heads, "S": self.tokens}

    @property
    def kind(self) -> tuple:
        """Cells of one kind differ in their length alone."""
        return self.dtype, self.head_dim, self.causal, self.sparsity

    def feasible(self) -> bool:
        """Whether a list of this sparsity exists that leaves no row empty."""
        grid = testing.BlockGrid(self.tokens, self.tokens, BLOCK, BLOCK)
        return self.sparsity == 0 or testing.is_block_sparse_pattern_feasible(grid, None, self.sparsity)

    def shorter(self) -> Cell:
        """The shortest cell of this kind that is long enough to tell how long a contender takes; itself where there is none shorter."""
        lengths = (PROBE_TOKENS << n for n in range(30))
        return next((cell for cell in (replace(self, tokens=x) for x in lengths if x < self.tokens // 2) if cell.feasible()), self)

    def ask(self, seed: int) -> Question:
        tokens = self.tokens
        operands = draw(1, self.heads, self.heads, tokens, self.head_dim, self.dtype, "BNSD", seed)
        lists = None
        if self.sparsity:
            lists = sabi.random_with_frame(tokens, tokens, (BLOCK, BLOCK), self.sparsity, heads=self.heads, seed=seed)
        return Question(operands, lists, self.causal)

    def work(self, question: Question) -> float:
        """Floating-point operations of what is attended."""
        tokens = self.tokens
        if question.lists is None:
            pairs: float = dense_pairs(tokens, tokens, self.causal)
        else:
            pairs = kept_pairs(question.lists, tokens, tokens, (BLOCK, BLOCK))
        return self.heads * flops(pairs, self.head_dim, self.head_dim)


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells that were asked for, by rising length: how long a contender takes tells how long it will take for more."""
    rules = [(False, sparsity) for sparsity in args.sparsities]
    if args.causal:
        rules.append((True, 0.0))
    for dtype in args.dtypes:
        for head_dim in args.head_dim:
            for tokens in sorted(args.seq):
                for causal, sparsity in rules:
                    cell = Cell(dtype, head_dim, args.heads, tokens, causal, sparsity)
                    if cell.feasible():
                        yield cell


class Bounds:
    """Who may take part in a cell: contenders that are installed, fit into memory, and are expected to be done in time."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.calls = args.repeats + args.warmup + 2  # two are for the check and to settle
        self.rates: dict[tuple, float] = {}  # seconds a query-key pair, whether attended or not

    @staticmethod
    def pairs(question: Question) -> int:
        return question.shape[1] * question.shape[2] ** 2

    def note(self, name: str, threads: int, cell: Cell, question: Question, seconds: float) -> None:
        self.rates[name, threads, cell.kind] = seconds / self.pairs(question)

    def prepare(self, name: str, threads: int, cell: Cell, question: Question) -> tuple[Step, Fetch]:
        """A contender of the cell; UnavailableError with the reason where there is none."""
        peer = OURS if name == OWN else PEERS[name]
        needed = peer.bytes_a_pair[question.lists is not None] * self.pairs(question)
        if needed > memory_available():
            raise UnavailableError(f"needs about {needed / 2**30:.0f} GiB")
        if (name, threads, cell.kind) not in self.rates and cell.shorter() != cell:
            shorter = cell.shorter().ask(self.args.seed)
            run, _ = peer.make(shorter, threads)
            self.note(name, threads, cell, shorter, self.timed(run))
        seconds = self.rates.get((name, threads, cell.kind), 0.0) * self.pairs(question)
        if seconds * self.calls > self.args.most_seconds:
            raise UnavailableError(f"{self.calls} calls of about {seconds:.2g} s: more than --most-seconds {self.args.most_seconds:g}")
        return peer.make(question, threads)

    @staticmethod
    def timed(run: Step) -> float:
        """Seconds of a second call: the first may still set things up."""
        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def checked(name: str, threads: int, cell: Cell, question: Question, bounds: Bounds) -> tuple[Step, float]:
    """A call of a contender and the error of its result; UnavailableError where there is none to time."""
    try:
        run, fetch = bounds.prepare(name, threads, cell, question)
        start = time.perf_counter()
        run()
        taken = time.perf_counter() - start
        error = question.error_of(fetch())
    except UnavailableError:
        raise
    except (RuntimeError, ValueError, MemoryError, NotImplementedError) as failure:  # how the others say that they cannot
        raise UnavailableError(reason_of(failure)) from None
    if error > LARGEST_ERROR[cell.dtype]:
        raise UnavailableError(f"error {error:.1e} against float64: not the same result, not timed")
    if taken * (bounds.calls - 1) > bounds.args.most_seconds:
        raise UnavailableError(f"a call took {taken:.2g} s: too long for {bounds.calls} in --most-seconds {bounds.args.most_seconds:g}")
    return run, error


def measured(cell: Cell, args: argparse.Namespace, bounds: Bounds, progress: Progress) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows of a cell, ours first for each number of threads; with each the reason why it has no time."""
    question = cell.ask(args.seed)
    limits: dict[int, list[float]] = {threads: [] for threads in args.threads}
    contenders: list[tuple[tuple[str, int], Contender]] = []
    errors: dict[tuple[str, int], float] = {}
    reasons: dict[tuple[str, int], str] = {}
    for threads in args.threads:

        def probe(threads: int = threads) -> None:
            limits[threads].append(roofline.peak(cell.dtype, threads, seconds=PROBE_SECONDS)[1])

        contenders.append((("limit", threads), Contender("limit", probe, 0.0)))
        for name in (OWN, *args.peers):
            progress.add(0.0, f"{cell.dtype} D={cell.head_dim} S={cell.tokens} {name}")
            try:
                run, errors[name, threads] = checked(name, threads, cell, question, bounds)
            except UnavailableError as reason:
                reasons[name, threads] = str(reason)
                continue
            contenders.append(((name, threads), Contender(name, run, 0.0, settle=SETTLE_SECONDS)))
            if threads > 1:
                contenders.append((("pause", 0), pause((OURS if name == OWN else PEERS[name]).rest)))
    times: dict[tuple[str, int], Any] = {}
    for index, timing in in_turns([contender for _, contender in contenders], args.repeats, args.warmup, progress):
        times[contenders[index][0]] = timing
    work = cell.work(question)
    for threads in args.threads:
        limit = statistics.median(limits[threads][args.warmup :])
        own = times[OWN, threads].median if (OWN, threads) in times else None
        for name in (OWN, *args.peers):
            values = cell.values() | {"threads": threads, "contender": name, "Limit_[GFLOP/s]": limit}
            timing = times.get((name, threads))
            if timing:
                bounds.note(name, threads, cell, question, timing.median)
                rate = work / timing.median / 1e9
                values |= {
                    "Equal": "yes",
                    "Error": errors[name, threads],
                    "Time_[usec]": timing.median * 1e6,
                    "GFLOP/s": rate,
                    "Share_of_limit": rate / limit,
                    "Over_ours": timing.median / own if own else None,
                }
            yield values | {"samples_s": timing.samples if timing else None}, reasons.get((name, threads), "")


# ---- What a whole table says ---------------------------------------------------------------------------------------


def by_cell(rows: Iterable[dict[str, Any]]) -> dict[tuple, dict[str, dict[str, Any]]]:
    """The rows of each cell by contender; of rows that stand twice the later one."""
    cells: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in CELL_COLUMNS), {})[row["contender"]] = row
    return cells


def merged(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of several tables as one table's."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    rows = [row for text in texts for row in parse_rows(text, ("dtype",)) if "contender" in row]
    if not rows:
        raise ValueError("--merge: expected tables of peers.py, got none with a row of a contender")
    rows.sort(key=lambda row: (DTYPES.index(row["dtype"]), row["D"], row["S"], row["rule"], row["sparsity"], row["threads"]))
    return [row for found in by_cell(rows).values() for row in found.values()]


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line a cell: our rate and its share, and everybody else's time over ours."""
    names = [name for name in PEERS if any(row["contender"] == name for row in rows)]
    head = [column for column in COLUMNS if column.name in (*CELL_COLUMNS, "GFLOP/s", "Share_of_limit")]
    ratios = [Column(f"{name}/ours", len(name) + 5, ".2f") for name in names]
    yield "# " + " ".join(f"{column.name:>{column.width}}" for column in (*head, *ratios))
    for cell, found in by_cell(rows).items():
        if OWN not in found:
            continue
        values = found[OWN] | dict(zip(CELL_COLUMNS, cell, strict=True))
        values |= {f"{name}/ours": found.get(name, {}).get("Over_ours") for name in names}
        yield "# " + " ".join(column.text(values.get(column.name)) for column in (*head, *ratios))


def behind(rows: Sequence[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Where a peer is ahead: at all from 512 tokens on, by more than a tenth below. (its time over ours, its row), the worst first."""
    found = []
    for row in rows:
        ratio = row.get("Over_ours")
        if row["contender"] != OWN and ratio is not None and ratio <= (1.0 if row["S"] >= AHEAD_FROM else NEAR_ENOUGH):
            found.append((ratio, row))
    return sorted(found, key=lambda pair: pair[0])


def verdict(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Who is ahead of us and where, a line each."""
    cells = sum(OWN in found and len(found) > 1 for found in by_cell(rows).values())
    ahead = behind(rows)
    lost = len({tuple(row[name] for name in CELL_COLUMNS) for _, row in ahead})
    yield f"# cells with a peer ahead (below {AHEAD_FROM} tokens: by more than a tenth): {lost} of {cells}"
    for ratio, row in ahead:
        what = "causal" if row["rule"] == "causal" else f"sparsity {row['sparsity']:g}"
        place = f"{row['dtype']} D={row['D']} S={row['S']} {what}, threads {row['threads']}"
        yield f"# {ratio:.2f}  {row['contender']}: {place}"


# ---- The command ---------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help="lengths 512 and 2048, D 128, sparsities 0 and 0.9, 3 repeats")
    what.add_argument("--seq", "-S", type=positive, nargs="+", help="tokens (256 .. 16384)")
    what.add_argument("--head-dim", "-D", type=positive, nargs="+", help="head dimensions (64 128)")
    what.add_argument("--heads", "-H", type=positive, default=4, help="heads (%(default)s)")
    what.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes (all)")
    what.add_argument("--sparsities", type=share, nargs="*", metavar="s", help=f"shares of {BLOCK}x{BLOCK} blocks to drop (0 0.5 0.9)")
    what.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="causal attention too (yes)")
    what.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="libraries (all that are installed)")
    what.add_argument("--seed", type=natural, default=1234, help="of operands and lists (%(default)s)")
    what.add_argument("--merge", type=readable, nargs="+", metavar="FILE", help="measure nothing: the summary of the tables in these files")
    timing = result.add_argument_group("timing")
    timing.add_argument("--threads", type=positive, nargs="+", help="numbers of threads (1, and what the library uses)")
    timing.add_argument("--isa", type=isa_level, help="highest instruction set for this library, such as avx2 (the CPU's best)")
    timing.add_argument("--repeats", type=positive, help="timed turns, of which the median counts (5)")
    timing.add_argument("--warmup", type=positive, default=1, help="turns before them (%(default)s)")
    timing.add_argument("--most-seconds", type=above_zero, default=20.0, help="what a contender may take in a cell, all turns (20)")
    outputs = result.add_argument_group("outputs")
    outputs.add_argument("--csv", type=writable, metavar="FILE", help="also write the rows as CSV")
    outputs.add_argument("--json", type=writable, metavar="FILE", help="the same as JSON, with every timing")
    return add_save(result)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(argv)
    args.seq = args.seq or ([512, 2048] if args.quick else list(SEQ))
    args.head_dim = args.head_dim or ([128] if args.quick else list(HEAD_DIMS))
    if args.sparsities is None:
        args.sparsities = [0.0, 0.9] if args.quick else list(SPARSITIES)
    args.repeats = args.repeats or (3 if args.quick else 5)
    return args


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cells; returns the table's rows."""
    args.threads = args.threads or sorted({1, blitz_attn.get_num_threads()})
    args.peers = [name for name in args.peers if PEERS[name].version]
    cells = list(cells_of(args))
    costs = [cell.heads * cell.tokens**2 + 1e6 for cell in cells]
    progress = Progress(sum(costs))
    table = Table(COLUMNS, sys.stdout, progress)
    versions = {PEERS[name].package: PEERS[name].version for name in args.peers}
    about = {"cpu": _core.cpu_model(), "isa": _core.isa_active(), "versions": versions, "options": vars(args)}
    records = Records(args.csv, args.json, about)
    progress.note(f"{len(cells)} cells, each with {' and '.join(map(str, args.threads))} threads")
    named = ", ".join(f"{package} {number}" for package, number in versions.items())
    options = _bench.parameters(BLOCK_SHAPE=f"{BLOCK}x{BLOCK}", ISA=_core.isa_active(), REPEATS=args.repeats, SEED=args.seed)
    table.head(options, f"{_core.cpu_model()}; blitz_attn {blitz_attn.__version__} beside {named or 'nobody'}")
    bounds = Bounds(args)
    rows = []
    try:
        for cell, cost in zip(cells, costs, strict=True):
            for values, reason in measured(cell, args, bounds, progress):
                table.line(table.row_text(values) + (f"  # {reason}" if reason else ""))
                records.add(values)
                rows.append(values)
            progress.add(cost)
        table.foot()
    finally:
        records.close()
    return rows


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.merge:
        rows = merged(args.merge)
    else:
        with blitz_attn.isa(args.isa):
            rows = run(args)
    for line in (*summary(rows), *verdict(rows)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_save(main))
