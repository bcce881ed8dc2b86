"""What the scripts of this folder share: finding the library, options and refusals, the table's form, a progress line, timing in turns."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent

# A checkout that has been built in place is measured as it stands, otherwise the installed package is; PYTHONPATH goes before both.
if (any((ROOT / "blitz_attn").glob("_core*.so")) and not os.environ.get("PYTHONPATH")) or importlib.util.find_spec("blitz_attn") is None:
    sys.path.insert(0, str(ROOT))

# ---- The command line --------------------------------------------------------------------------------------------


def checked(convert: Callable[[str], Any], holds: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type of options for argparse, which names the option ahead of what this says of a value that does not hold."""

    def value_of(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return value_of


def _can_be_written(path: Path) -> bool:
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


positive = checked(int, lambda value: value >= 1, "a whole number from 1")
natural = checked(int, lambda value: value >= 0, "a whole number from 0")
above_zero = checked(float, lambda value: 0 < value < math.inf, "a number above 0")
from_zero = checked(float, lambda value: 0 <= value < math.inf, "a number from 0")
share = checked(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
density = checked(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
readable = checked(Path, lambda path: os.access(path, os.R_OK) and not path.is_dir(), "a file that can be read")
writable = checked(Path, _can_be_written, "a file that can be written, in a folder that exists")


def isa_level(text: str) -> str:
    """An instruction set of this CPU."""
    import blitz_attn  # here, so that a script's --help needs no library

    levels = blitz_attn.isa_levels(available=True)
    return str(checked(str, levels.__contains__, f"a level of this CPU ({', '.join(levels)})")(text))


_NAMES_AN_ARGUMENT = re.compile(r"(--)?[\w.\[\]-]+: ")
_timing = False  # whether contenders have been called once and are being timed: what is refused then is no matter of options


def command(main: Callable[[Any], int]) -> Callable[..., int]:
    """Decorate a script's `main`.

    Where the library refuses what the options ask for, the script prints that sentence, and its exit code is 2. Where the reader of its
    output goes away, the script ends quietly. A refusal is an error that begins with the name of an argument, while operands are made or
    contenders are called for the first time.
    Other errors are mistakes of the script or the library, and keep their traceback.
    """
    script = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        global _timing
        _timing = False
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # `| head`: the reader has what it wanted
            from blitz_attn.__main__ import drop_output

            drop_output()
            return 0
        except (TypeError, ValueError) as error:
            if _timing or not _NAMES_AN_ARGUMENT.match(str(error)):
                raise
            print(f"{script}: {error}", file=sys.stderr)
            return 2
        except MemoryError as error:
            print(f"{script}: {str(error) or 'there is not enough memory'}", file=sys.stderr)
            return 1

    return run


# ---- The table -------------------------------------------------------------------------------------------------

RULE_WIDTH = 120  # upstream's


@dataclass(frozen=True)
class Column:
    """One column: its heading (no spaces, so that a table splits at white space), width and number format."""

    name: str
    width: int
    spec: str = ""

    def text(self, value: Any) -> str:
        return f"{'N/A' if value is None else format(value, self.spec):>{self.width}}"


# Upstream's columns, in upstream's order and widths.
UPSTREAM_COLUMNS = (
    Column("block_shape", 13),
    Column("H", 3),
    Column("B", 3),
    Column("s_q", 6),
    Column("s_kv", 6),
    Column("D", 4),
    Column("frame(L,R,T,B)", 15),
    Column("sparsity", 9, ".2f"),
    Column("Outputs_equal", 15),
    Column("Ref_Latency_[usec]", 18, ".2f"),
    Column("Our_Latency_[usec]", 18, ".2f"),
)
KEY_COLUMNS = 8  # the leading columns that say what a row measures
# Ours, after them.
RATE_COLUMNS = (Column("GFLOP/s", 10, ".1f"), Column("Share_of_ideal", 15, ".3f"), Column("Share_of_F", 11, ".3f"))


class Table:
    """Prints a table row by row: each row is flushed, so that a run that is stopped leaves a file that can be used."""

    def __init__(self, columns: Sequence[Column], out: TextIO, progress: Progress | None = None):
        self.columns, self.out, self.progress = tuple(columns), out, progress

    def line(self, text: str) -> None:
        if self.progress:
            self.progress.clear()
        print(text, file=self.out, flush=True)

    def head(self, *parameter_lines: str) -> None:
        self.line("=" * RULE_WIDTH)
        for text in parameter_lines:
            self.line("  " + text)
        self.line("=" * RULE_WIDTH)
        self.names()
        self.line("-" * RULE_WIDTH)

    def names(self) -> None:
        self.line(" ".join(f"{column.name:>{column.width}}" for column in self.columns))

    def row_text(self, values: dict[str, Any]) -> str:
        return " ".join(column.text(values.get(column.name)) for column in self.columns)

    def row(self, values: dict[str, Any]) -> None:
        self.line(self.row_text(values))

    def foot(self) -> None:
        self.line("=" * RULE_WIDTH)


def parse_rows(text: str, first_columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of tables, found among any other output: lines with as many cells as the last header line above them, which starts with one
    of `first_columns`. What stands behind a # is not looked at."""
    from blitz_attn.plot import _cell as cell_value

    header: list[str] = []
    rows = []
    for line in text.splitlines():
        cells = line.partition("#")[0].split()
        if line.startswith("==="):
            header = []  # the end of a table, or what stands above the next one's header
        elif len(cells) > 5 and cells[0] in first_columns:
            header = cells
        elif header and len(cells) == len(header):
            rows.append({name: cell_value(name, cell) for name, cell in zip(header, cells, strict=True)})
    return rows


def parameters(**values: Any) -> str:
    """Upstream's parameter line: NAME=value, two spaces apart."""
    return "  ".join(f"{name}={value!r}" for name, value in values.items())


# ---- Progress --------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A time span as a person says it: 40 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 90:
        return f"{seconds} s"
    if seconds < 5400:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """Share done and time left, on stderr: one line that rewrites itself on a terminal, else a line now and then."""

    LINE_EVERY = 30.0  # seconds between lines where stderr is not a terminal
    REWRITE_EVERY = 0.2

    def __init__(self, total: float, out: TextIO | None = None):
        self.total, self.done, self.out = max(total, 1e-9), 0.0, out or sys.stderr
        self.start = self.last = time.monotonic()
        self.live = self.out.isatty()
        self.shown = False

    def restart(self) -> None:
        """Forget what was done so far: the clock starts now."""
        self.done, self.start = 0.0, time.monotonic()

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=self.out, flush=True)
            self.shown = False

    def note(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self.out, flush=True)

    def add(self, work: float, label: str = "") -> None:
        self.done += work
        now = time.monotonic()
        if not self.done or now - self.last < (self.REWRITE_EVERY if self.live else self.LINE_EVERY):
            return
        self.last = now
        left = (now - self.start) / self.done * max(self.total - self.done, 0.0)
        text = f"{100 * min(self.done / self.total, 1):3.0f} %  about {duration(left)} left  {label}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width] + "\x1b[K", end="", file=self.out, flush=True)
            self.shown = True
        else:
            print(text, file=self.out, flush=True)


# ---- Timing ----------------------------------------------------------------------------------------------------

SHORTEST_SAMPLE = 2e-3  # seconds; a quicker call is repeated until a sample lasts this long
SETTLE_UP_TO = 0.25  # seconds; in a longer call, waking threads is little


@dataclass
class Contender:
    """One of several calls that are timed in turns."""

    label: str
    call: Callable[[], Any]
    work: float  # for the progress line only
    before_last: Callable[[], Any] | None = None  # run ahead of the last sample, outside the clock
    settle: float = 0.0  # seconds of calls ahead of each sample, outside the clock, while a call takes less than SETTLE_UP_TO


@dataclass
class Timing:
    """The samples of one contender, in seconds a call."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def in_turns(contenders: Sequence[Contender], repeats: int, warmup: int, progress: Progress) -> Iterator[tuple[int, Timing]]:
    """Time the contenders A B C A B C ..., so that a slow spell of the machine hits all of them.

    Yields (index, timing) right after a contender's last sample, before the next contender runs: outputs that the
    contenders share still hold this one's result.
    """
    global _timing
    samples: list[list[float]] = [[] for _ in contenders]
    calls = [1] * len(contenders)
    latest = [0.0] * len(contenders)
    for turn in range(warmup + repeats):
        last = turn == warmup + repeats - 1
        _timing = turn > 0
        for index, contender in enumerate(contenders):
            if last and contender.before_last:
                contender.before_last()
            if contender.settle and latest[index] < SETTLE_UP_TO:
                start = time.perf_counter()
                while time.perf_counter() - start < contender.settle:
                    contender.call()
            start = time.perf_counter()
            for _ in range(calls[index]):
                contender.call()
            taken = (time.perf_counter() - start) / calls[index]
            latest[index] = taken
            if turn >= warmup:
                samples[index].append(taken)
            if turn < warmup:
                calls[index] = max(1, math.ceil(SHORTEST_SAMPLE / max(taken, 1e-7)))
            progress.add(contender.work, contender.label)
            if last:
                yield index, Timing(samples[index])
    _timing = False
