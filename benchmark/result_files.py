"""Results in files: `--save`, `--csv` and `--json`.

`--save` copies what a script prints to benchmark/results/<machine>/, under a head that says where it is from. The head is lines of the form
`# key: value`: machine, commit, date, command, compiler and, added by hand, notes. The rest is the script's output as it was printed.
`--csv` writes a table row by row, `--json` at the end, with every single timing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from _bench import ROOT

RESULTS = Path(__file__).resolve().parent / "results"
HEAD = ("machine", "commit", "date", "command", "compiler")


def machine() -> dict[str, Any]:
    """What makes a machine another one for its speed."""
    import blitz_attn  # here, so that a script's --help needs no library
    import roofline
    from blitz_attn import _core

    return {
        "cpu": _core.cpu_model(),
        "threads": blitz_attn.get_num_threads(),
        "level": _core.isa_active(),
        "caches": roofline.cache_sizes(),
    }


def tag(found: dict[str, Any]) -> str:
    """The machine as the name of a folder."""
    sizes = "-".join(f"{name}.{size >> 10}k" for name, size in sorted(found["caches"].items()))
    text = f"{found['cpu']}-{found['threads']}-{found['level']}-{sizes}"
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


def commit() -> str | None:
    """The commit of this checkout, with a + where files differ from it; None where there is none."""
    try:
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def head(command: list[str]) -> str:
    """The first lines of a file of results."""
    from blitz_attn import _core

    here = machine()
    caches = ", ".join(f"{name} {size >> 10} KiB" for name, size in sorted(here["caches"].items()))
    values = {
        "machine": f"{here['cpu']}; {here['threads']} threads; {here['level']}; {caches}",
        "commit": commit() or "unknown",
        "date": today(),
        "command": shlex.join(command),
        "compiler": _core.compiler,
    }
    return "".join(f"# {key}: {values[key]}\n" for key in HEAD)


def read_head(text: str) -> dict[str, str]:
    """The head of a file of results; notes are joined."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"# (machine|commit|date|command|compiler|note): (.+)", line)
        if not match:
            break
        key, value = match.groups()
        found[key] = f"{found[key]}; {value}" if key in found else value
    return found


def add_save(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Gives a script's parser the option, which `main_with_save` acts upon."""
    parser.add_argument(
        "--save",
        nargs="?",
        const="",
        metavar="NAME",
        help="also keep what is printed, in benchmark/results/<this machine>/NAME.txt (the script's name)",
    )
    return parser


class _Both:
    """Standard output and a file."""

    def __init__(self, out: TextIO, file: TextIO):
        self.out, self.file = out, file
        self.printed = self.cut = False  # whether anything was written, and whether the reader of the output went away

    def write(self, text: str) -> int:
        self.printed = True
        self.file.write(text)
        with self.notice_cut():
            return self.out.write(text)

    def flush(self) -> None:
        self.file.flush()
        with self.notice_cut():
            self.out.flush()

    @contextlib.contextmanager
    def notice_cut(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.cut = True
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


def main_with_save(main: Callable[[], int]) -> int:
    """Runs a script's `main`; with `--save` on the command line, what it prints goes to a file of results too.

    The results of an earlier run are replaced when this one has ended well. Otherwise what was printed stays in a file NAME.txt.part, and
    where nothing was, because options were refused, nothing stays.
    """
    option = add_save(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    option.add_argument("-h", "--help", action="store_true")
    options = option.parse_known_args(sys.argv[1:])[0]
    if options.save is None or options.help:
        return main()
    name = options.save
    script = Path(sys.argv[0])
    path = RESULTS / tag(machine()) / f"{name or script.stem}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    out, code = sys.stdout, 1
    with part.open("w", encoding="utf-8") as file:
        file.write(head(["python", f"benchmark/{script.name}", *sys.argv[1:]]))
        both = _Both(out, file)
        sys.stdout = both  # type: ignore[assignment]
        try:
            code = main()
        finally:
            sys.stdout = out
            if not code and not both.cut:
                part.replace(path)
                print(f"{path}: saved", file=sys.stderr)
            elif both.printed:
                print(f"{part}: what was printed before the end", file=sys.stderr)
            else:
                part.unlink()
    return code


class Records:
    """Collects rows. A row is a dict of plain values; every row has the same keys."""

    def __init__(self, csv_path: Path | None, json_path: Path | None, run: dict[str, Any]):
        import numpy as np

        import blitz_attn  # here, so that a script's --help needs no library

        self.json_path = json_path
        self.run = {
            "command": sys.argv,
            "blitz_attn": blitz_attn.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            **run,
        }
        self.rows: list[dict[str, Any]] = []
        self.csv_file = csv_path.open("w", newline="", encoding="utf-8") if csv_path else None

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.csv_file:
            writer = csv.DictWriter(self.csv_file, fieldnames=list(self.rows[0]))
            if len(self.rows) == 1:
                writer.writeheader()
            writer.writerow(row)
            self.csv_file.flush()

    def close(self) -> None:
        if self.csv_file:
            self.csv_file.close()
        if self.json_path:
            self.json_path.write_text(json.dumps({**self.run, "rows": self.rows}, indent=1, default=str) + "\n", encoding="utf-8")
