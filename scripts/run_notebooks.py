#!/usr/bin/env python3
"""Runs notebooks and stores their outputs, without Jupyter: printed text, the value of a cell's last expression, and figures.

    python scripts/run_notebooks.py [--check] [NOTEBOOK ...]     # default: all of examples/; --check stores nothing

Each notebook runs in a process of its own, in its folder, with the library of this checkout. The exit code is 1 if a cell raises an
exception.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DPI = 75


def lines(text: str) -> list[str]:
    """The text as a list of lines, as notebooks store it."""
    return text.splitlines(keepends=True)


def png_of(figure: Any) -> str:
    """A figure of matplotlib as notebooks store it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return base64.b64encode(file.getvalue()).decode("ascii") + "\n"


def figures() -> list[dict[str, Any]]:
    """Returns the open figures of pyplot as outputs, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    made = []
    for number in pyplot.get_fignums() if pyplot else ():
        figure = pyplot.figure(number)
        width, height = (int(n * DPI) for n in figure.get_size_inches())
        data = {"image/png": png_of(figure), "text/plain": [f"<Figure size {width}x{height}>"]}
        made.append({"data": data, "metadata": {}, "output_type": "display_data"})
        pyplot.close(figure)
    return made


def run_cell(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one cell with the names of the notebook. Returns its outputs."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {number}>", "exec"), names)
        if last is not None:
            value = eval(compile(last, f"<cell {number}>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    outputs += figures()
    if value is not None:
        data: dict[str, Any] = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_png_"):  # a figure of blitz_attn.plot
            data = {"image/png": png_of(value)} | data
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def run(path: Path) -> str:
    """Runs a notebook in this process. Returns its text with the outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    os.chdir(path.parent)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["outputs"] = run_cell("".join(cell["source"]), number, names)
        cell["execution_count"] = number
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def run_all(paths: list[Path], check: bool) -> int:
    """Runs each notebook in a process of its own. Returns the exit code."""
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))}
    failed = False
    for path in paths:
        begin = time.monotonic()
        command = [sys.executable, __file__, "--here", *(["--check"] if check else []), str(path)]
        code = subprocess.run(command, env=environment, check=False).returncode
        print(f"{path.name}: {'failed' if code else 'ran'} in {time.monotonic() - begin:.0f} s", flush=True)
        failed = failed or code != 0
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="store nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # set in the notebook's own process
    parser.add_argument("notebooks", nargs="*", type=Path)
    options = parser.parse_args()
    paths = [path.resolve() for path in options.notebooks] or sorted((ROOT / "examples").glob("*.ipynb"))
    if options.here:
        try:
            text = run(paths[0])
        except Exception:
            traceback.print_exc()
            return 1
        if not options.check:
            paths[0].write_text(text, encoding="utf-8")
        return 0
    return run_all(paths, options.check)


if __name__ == "__main__":
    sys.exit(main())
