"""Rows of an earlier, stopped run: they are printed again as they stand and not measured again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from _bench import KEY_COLUMNS, UPSTREAM_COLUMNS


def row_key(text: str) -> tuple[str, ...]:
    """What a row measures: its leading columns, as printed."""
    return tuple(text.split()[:KEY_COLUMNS])


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
        if not any(line.split()[:1] == [UPSTREAM_COLUMNS[0].name] for line in lines):
            raise ValueError(f"--resume: {path} holds no table (was it overwritten by sending this run's output to the same file?)")
        found = [line for line in lines if re.match(r"\s*\d+x\d+\s", line) and len(line.split()) == columns]
        return cls(path, lines, {row_key(line): line for line in found})

    def require(self, parameter_line: str) -> None:
        """Raise ValueError where the earlier run had other parameters."""
        if self.path and parameter_line not in (line.strip() for line in self.lines):
            raise ValueError(f"--resume: {self.path} was measured with other parameters than {parameter_line}")
