"""What the scripts of this folder share: command-line options and their errors, the table and its files, progress, and timing."""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

# Measure this checkout if it has been built in place and PYTHONPATH is not set. Otherwise measure the package that Python finds by
# itself: one in a folder that PYTHONPATH names, or else the installed package. If it finds none, take this checkout, too.
if (any((ROOT / "blitz_attn").glob("_core*.so")) and not os.environ.get("PYTHONPATH")) or importlib.util.find_spec("blitz_attn") is None:
    sys.path.insert(0, str(ROOT))

import blitz_attn  # noqa: E402
from blitz_attn import _core  # noqa: E402
from blitz_attn.__main__ import drop_output  # noqa: E402
from blitz_attn.plot import _cell as cell_value  # noqa: E402
from machine import cache_sizes  # noqa: E402

# ---- The command line --------------------------------------------------------------------------------------------


def checked(convert: Callable[[str], Any], holds: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type for argparse. It refuses values for which `holds` is false with "expected X, got Y", and argparse adds the option's name."""

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
share = checked(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
readable = checked(Path, lambda path: os.access(path, os.R_OK) and not path.is_dir(), "a file that can be read")
writable = checked(Path, _can_be_written, "a file that can be written, in a folder that exists")
_LEVELS = blitz_attn.isa_levels(available=True)
isa_level = checked(str, _LEVELS.__contains__, f"a level of this CPU ({', '.join(_LEVELS)})")


def sizes(text: str, count: int) -> tuple[int, ...]:
    """`128x512` -> (128, 512)."""
    words = text.lower().split("x")
    if len(words) != count or not all(word.isdigit() and int(word) > 0 for word in words):
        raise ValueError
    return tuple(map(int, words))


block_shape = checked(lambda text: sizes(text, 2), bool, "two positive sizes such as 128x512 (queries x keys)")


def parser_of(
    doc: str | None, *, repeats: int | None = 3, warmup: int | None = 1, one_count: bool = False, measured: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options that scripts share. Where `repeats` or `warmup` is None, the script fills it in."""
    most = blitz_attn.get_num_threads()
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.set_defaults(isa=None)
    timing = result.add_argument_group("timing")
    if measured:
        if one_count:
            timing.add_argument("--threads", type=positive, default=most, help="number of threads (%(default)s)")
        else:
            timing.add_argument("--threads", type=positive, nargs="+", default=sorted({1, most}), help="numbers of threads (%(default)s)")
        timing.add_argument("--isa", type=isa_level, help="highest instruction set to use, such as avx2 (the CPU's best)")
        timing.add_argument("--repeats", type=positive, default=repeats, help="timed turns, of which the median counts (%(default)s)")
        timing.add_argument("--warmup", type=natural, default=warmup, help="turns before the timed ones (%(default)s)")
    result.add_argument("--seed", type=natural, default=1234, help="seed of operands and lists (%(default)s)")
    outputs = result.add_argument_group("outputs")
    outputs.add_argument("--csv", type=writable, metavar="FILE", help="also write the rows as CSV")
    outputs.add_argument("--json", type=writable, metavar="FILE", help="the same as JSON, with every timing")
    outputs.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="also keep what is printed, in benchmark/results/<this machine>/NAME.txt"
    )
    return result


_NAMES_AN_ARGUMENT = re.compile(r"(--)?[\w.\[\]-]+: ")


def command(parser: Callable[[], argparse.ArgumentParser], shown: Sequence[Column] = ()) -> Callable[..., Callable[..., int]]:
    """Decorate a script's `main(args, report)`.

    The exit code is 1 where a row says that a result is wrong, and 2 where options are refused: by the parser, or by an error that begins
    with the name of an argument. Any other error is a mistake in the script or the library, and keeps its traceback. If the reader of the
    output closes the pipe, the script ends quietly.
    """

    def decorate(main: Callable[[argparse.Namespace, Report], None]) -> Callable[..., int]:
        script = Path(main.__code__.co_filename).name

        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            args = parser().parse_args(argv)
            report = Report(script, args, shown)
            try:
                with blitz_attn.isa(args.isa):
                    main(args, report)
                    report.close()
            except BrokenPipeError:  # as by `| head`
                drop_output()
                return 0
            except (TypeError, ValueError) as error:
                if not _NAMES_AN_ARGUMENT.match(str(error)):
                    raise
                print(f"{script}: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print(f"\n{script}: stopped", file=sys.stderr)
                return 130
            finally:
                report.write_rows()
            return 1 if report.wrong else 0

        return run

    return decorate


# ---- The table -------------------------------------------------------------------------------------------------

RULE_WIDTH = 120  # upstream's


@dataclass(frozen=True)
class Column:
    """One column: its heading (no spaces, so that a table splits at white space), width and number format."""

    name: str
    width: int
    spec: str

    def text(self, value: Any) -> str:
        return f"{'N/A' if value is None else format(value, self.spec):>{self.width}}"


def columns(text: str) -> tuple[Column, ...]:
    """The columns that `text` lists as name:width, or with a format of Python behind the width, as in name:8.2f."""
    found = (re.fullmatch(r"(.+):(\d+)(.*)", word) for word in text.split())
    return tuple(Column(match[1], int(match[2]), match[3]) for match in found if match)


def yes(right: bool) -> str:
    """A cell that says whether a result is right."""
    return "yes" if right else "no"


class Report:
    """The output of a script, and the files that keep it. Rows go to standard output as they come, progress and notes to standard error."""

    def __init__(self, script: str, args: argparse.Namespace, shown: Sequence[Column]):
        self.script, self.args, self.columns, self.progress = script, args, tuple(shown), Progress()
        self.lines: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}  # goes into the file of --json, next to the rows
        self.wrong = 0

    def line(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def names(self) -> None:
        self.line(" ".join(f"{column.name:>{column.width}}" for column in self.columns))

    def head(self, *texts: str) -> None:
        for text in ("=" * RULE_WIDTH, *(f"  {text}" for text in texts), "=" * RULE_WIDTH):
            self.line(text)
        self.names()
        self.line("-" * RULE_WIDTH)

    def foot(self) -> None:
        self.line("=" * RULE_WIDTH)

    def row(self, values: dict[str, Any], reason: str = "", **kept: Any) -> None:
        """Print a row. `reason` is printed behind it, and `kept` goes only into the files."""
        text = " ".join(column.text(values.get(column.name)) for column in self.columns)
        self.line(f"{text}  # {reason}" if reason else text)
        self.rows.append(values | kept)
        self.wrong += "no" in values.values()

    def note(self, text: str) -> None:
        """A line on standard error."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """With --save, store what was printed. An earlier run's file is replaced only here, after this run has ended."""
        if self.wrong:
            self.note(f"{self.script}: {self.wrong} rows with wrong results")
        if self.args.save is not None:
            path = RESULTS / tag(machine()) / f"{self.args.save or Path(self.script).stem}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head_of(["python", f"benchmark/{self.script}", *sys.argv[1:]]) + "\n".join([*self.lines, ""]), encoding="utf-8")
            self.note(f"{path}: saved")

    def write_rows(self) -> None:
        """Write the files of --csv and --json."""
        if self.args.csv and self.rows:
            with self.args.csv.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in self.rows for name in row)))
                writer.writeheader()
                writer.writerows(self.rows)
        if self.args.json and self.rows:
            run = {"command": sys.argv, "blitz_attn": blitz_attn.__version__, "python": platform.python_version(), "machine": machine()}
            run |= {"options": vars(self.args)} | self.about | {"rows": self.rows}
            self.args.json.write_text(json.dumps(run, indent=1, default=str) + "\n", encoding="utf-8")


def parse_rows(text: str, first_columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of tables among any other output. A header is a line of more than five cells, of which the first is one of `first_columns`;
    a row is a line below the header with as many cells. Text behind a # is ignored."""
    header: list[str] = []
    rows = []
    for line in text.splitlines():
        cells = line.partition("#")[0].split()
        if line.startswith("==="):
            header = []  # a rule: ends a table, or stands above the next header
        elif len(cells) > 5 and cells[0] in first_columns:
            header = cells
        elif header and len(cells) == len(header):
            rows.append({name: cell_value(name, cell) for name, cell in zip(header, cells, strict=True)})
    return rows


def parameters(**values: Any) -> str:
    """Upstream's parameter line: NAME=value, two spaces apart."""
    return "  ".join(f"{name}={value!r}" for name, value in values.items())


# ---- Files of results --------------------------------------------------------------------------------------------

HEAD = ("machine", "commit", "date", "command", "compiler")


def machine() -> dict[str, Any]:
    """The properties that tell machines of different speed apart."""
    level, threads = _core.isa_active(), blitz_attn.get_num_threads()
    return {"cpu": _core.cpu_model(), "threads": threads, "level": level, "caches": cache_sizes()}


def tag(found: dict[str, Any]) -> str:
    """The machine as the name of a folder."""
    sizes = "-".join(f"{name}.{size >> 10}k" for name, size in sorted(found["caches"].items()))
    text = f"{found['cpu']}-{found['threads']}-{found['level']}-{sizes}"
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


def commit() -> str | None:
    """The commit of this checkout, with a + if files differ from it; None outside a checkout."""
    try:
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def head_of(command: list[str]) -> str:
    """The first lines of a file of results, `# key: value`."""
    here = machine()
    caches = ", ".join(f"{name} {size >> 10} KiB" for name, size in sorted(here["caches"].items()))
    about = f"{here['cpu']}; {here['threads']} threads; {here['level']}; {caches}"
    values = (about, commit() or "unknown", today(), shlex.join(command), _core.compiler)
    return "".join(f"# {key}: {value}\n" for key, value in zip(HEAD, values, strict=True))


def read_head(text: str) -> dict[str, str]:
    """The head of a file of results as keys and values. Its notes, which are added by hand, are joined."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"# (machine|commit|date|command|compiler|note): (.+)", line)
        if not match:
            break
        key, value = match.groups()
        found[key] = f"{found[key]}; {value}" if key in found else value
    return found


# ---- Progress --------------------------------------------------------------------------------------------------


PROGRESS_EVERY = 20.0  # seconds


def duration(seconds: float) -> str:
    """A time span in words: 40 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 90:
        return f"{seconds} s"
    if seconds < 5400:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """Prints on stderr, every PROGRESS_EVERY seconds, the share that is done and the time that is left."""

    def __init__(self) -> None:
        self.done = 0.0
        self.start = self.last = time.monotonic()

    def add(self, share: float, label: str = "") -> None:
        """Count another `share` of the whole run as done."""
        self.done += share
        now = time.monotonic()
        if self.done and now - self.last > PROGRESS_EVERY:
            self.last = now
            left = (now - self.start) / self.done * max(1 - self.done, 0.0)
            print(f"{100 * min(self.done, 1):3.0f} %  about {duration(left)} left  {label}", file=sys.stderr, flush=True)


# ---- Timing ----------------------------------------------------------------------------------------------------

SHORTEST_SAMPLE = 2e-3  # seconds; warm-up turns find how often quicker calls must be repeated for a sample of this length
SETTLE_UP_TO = 0.25  # seconds; in longer calls, the time to wake threads hardly counts


@dataclass(eq=False)
class Contender:
    """One of several calls that are timed in turns."""

    label: str
    call: Callable[[], Any]
    work: float = 1.0  # relative to the other contenders, for the progress line
    before_last: Callable[[], Any] | None = None  # runs before the last sample, untimed
    settle: float = 0.0  # seconds of untimed calls before each sample, if a call takes less than SETTLE_UP_TO
    limit: Callable[[], float] | None = None  # measures a limit of the machine, right before and right after each timed sample
    samples: list[float] = field(default_factory=list)  # seconds per call
    values: list[float] = field(default_factory=list)  # one per sample: the mean of `limit`, or the float that the call returned
    calls: int = 1  # per sample

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def value(self) -> float:
        """The median of `values`."""
        return statistics.median(self.values)

    def take(self, timed: bool) -> None:
        """Run one sample, and keep its time if it is `timed`."""
        if self.settle and (self.samples or [0.0])[-1] < SETTLE_UP_TO:
            start = time.perf_counter()
            while time.perf_counter() - start < self.settle:
                self.call()
        result = None
        around = [self.limit()] if self.limit and timed else []
        start = time.perf_counter()
        for _ in range(self.calls):
            result = self.call()
        taken = (time.perf_counter() - start) / self.calls
        if timed:
            self.samples.append(taken)
            if self.limit:
                self.values.append(statistics.mean([*around, self.limit()]))
            elif isinstance(result, float):
                self.values.append(result)
        elif not isinstance(result, float):  # a call whose result is a float is a measurement itself, and runs once per sample
            self.calls = max(1, math.ceil(SHORTEST_SAMPLE / max(taken, 1e-7)))


def in_turns(contenders: Sequence[Contender], args: argparse.Namespace, progress: Progress, share: float = 1.0) -> Iterator[Contender]:
    """Time the contenders A B C A B C ..., so that a slow spell of the machine hits all of them. Their work is a `share` of the whole run.

    Yields each contender right after its last sample and before the next contender runs, so that an output array that several contenders
    share still holds its result.
    """
    turns = args.warmup + args.repeats
    whole = turns * sum(contender.work for contender in contenders) or 1.0
    for turn in range(turns):
        for contender in contenders:
            if turn == turns - 1 and contender.before_last:
                contender.before_last()
            contender.take(turn >= args.warmup)
            progress.add(share * contender.work / whole, contender.label)
            if turn == turns - 1:
                yield contender


class Clock:
    """Adds up the seconds that modules of torch take, without the time of the linear layers in them. The linear layer
    `counted`, if there is one, counts, too."""

    def __init__(self, modules: Iterable[Any], now: Callable[[], float] = time.perf_counter, counted: Any = None) -> None:
        import torch

        self.seconds, self._now = 0.0, now
        for module in modules:
            linear = (x for x in module.modules() if isinstance(x, torch.nn.Linear) and x is not counted)
            for part, sign in ((module, 1), *((x, -1) for x in linear)):
                part.register_forward_pre_hook(functools.partial(self._add, -sign))
                part.register_forward_hook(functools.partial(self._add, sign))

    def _add(self, sign: int, *_: Any) -> None:
        self.seconds += sign * self._now()
