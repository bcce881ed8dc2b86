"""Machine-readable copies of a table: `--csv` row by row, `--json` at the end, with every single timing."""

from __future__ import annotations

import csv
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn


class Records:
    """Collects rows. A row is a dict of plain values; every row has the same keys."""

    def __init__(self, csv_path: Path | None, json_path: Path | None, run: dict[str, Any]):
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
