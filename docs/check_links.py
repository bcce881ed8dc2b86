#!/usr/bin/env python3
"""Checks that everything to which the documents point exists: relative links of Markdown files with their anchors, and paths in code marks.

A path is a word in code marks that begins with a folder of the repository and names a file or folder, such as `csrc/kernels/tuning.c`;
`*` in a path stands for anything. For a form such as `csrc/kernels/<isa>.c`, the folder must exist. The exit code is 1 if something is
missing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKDOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmark/README.md")
FOLDERS = ("csrc", "blitz_attn", "tests", "benchmark", "docs", "examples", "scripts", ".ci", ".github")
PATH = re.compile(r"`+((?:" + "|".join(re.escape(folder) for folder in FOLDERS) + r")/[\w./<>*-]*)`+")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors_of(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        where = (path.parent / file).resolve() if file else path
        if not where.exists() or (anchor and where.suffix == ".md" and anchor not in anchors_of(where)):
            broken.append(f"link {target}")
    return broken


def missing_paths(text: str) -> list[str]:
    missing = []
    for word in PATH.findall(text):
        known = re.match(r"[^<*]*(?=/)", word + "/")[0] if "<" in word else word.rstrip("/.")  # the folder of a form
        if not any(ROOT.glob(known)):
            missing.append(f"path {word}")
    return missing


def main() -> int:
    files = [ROOT / name for name in MARKDOWN] + sorted((ROOT / "docs").glob("**/*.rst"))
    found = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        links = broken_links(path, text) if path.suffix == ".md" else []
        for what in links + missing_paths(text):
            print(f"{path.relative_to(ROOT)}: {what}: there is no such file or heading", file=sys.stderr)
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
