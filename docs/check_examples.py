#!/usr/bin/env python3
"""Runs the Python examples of README.md, each by itself, as somebody who pastes it would. What they print is not compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def examples(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    found = examples(ROOT / "README.md")
    for number, text in enumerate(found, 1):
        exec(compile(text, f"README.md, example {number}", "exec"), {"__name__": "__example__"})
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
