#!/usr/bin/env python3
"""Checks that the speeds in tables of README.md and of the summary of docs/performance.rst are those of the files under benchmark/results.

The speeds of the files are rounded as in the documents. The exit code is 1 if one differs. A row of a table is found by its first cell.
Rows that this script does not name are not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent / "_ext"))

from results_table import MACHINES, read_results  # noqa: E402

ZEN5 = MACHINES["AMD EPYC, Zen 5 (AVX-512)"]
ZEN3 = MACHINES["AMD EPYC, Zen 3 (AVX2)"]
XEON = MACHINES["Intel Xeon, Emerald Rapids (AMX)"]
Row = dict[str, str]


def rows(file: str, table: int = 0) -> list[Row]:
    return list(read_results(file).tables[table].rows())


def shown_rows(file: str, begin: str, end: str) -> Iterator[list[str]]:
    """The rows of the tables between two headings of a document."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for line in text[text.index(begin) : text.index(end)].splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def by_threads(found: list[Row], column: Callable[[Row], float], **wanted: str) -> list[float]:
    """The values of the rows that agree with `wanted`: for one thread, then for two."""
    matching = [row for row in found if all(row[key] == value for key, value in wanted.items())]
    return [column(next(row for row in matching if row["threads"] == threads)) for threads in ("1", "2")]


def fastest_peer(row: Row) -> float:
    return min(float(value) for key, value in row.items() if key.endswith("/ours") and value != "N/A")


def expected_in_readme() -> dict[str, list[list[float]]]:
    """First cell of a row -> the values in each of its other cells; a cell with the name of a CPU has none."""
    found: dict[str, list[list[float]]] = {}
    for name in ("AMD EPYC, Zen 5 (AVX-512)", "AMD EPYC, Zen 4 (AVX-512)", "Intel Xeon, L3 of 480 MiB (AMX)"):
        blocks = [row for row in rows(f"{MACHINES[name]}/headline.txt") if row["block_shape"] == "64x64"]
        found[name] = [[(1 - float(row["sparsity"])) / float(row["Share_of_ideal"])] for row in blocks]
    dense = [row for row in rows(f"{ZEN3}/peers.txt") if row["S"] == "2048"]
    found["dense attention, float32, 2048 tokens: the fastest of NumPy, torch, flex_attention, onnxruntime, OpenVINO and JAX"] = [
        [], by_threads(dense, fastest_peer, dtype="float32", rule="all", sparsity="0.00")
    ]  # fmt: skip
    gradients = rows(f"{ZEN5}/backward.txt")
    found["dense gradients, bfloat16, 4096 tokens: torch"] = [
        [], by_threads(gradients, lambda row: float(row["Torch/ours"]), dtype="bfloat16", rule="all", sparsity="0.00")
    ]  # fmt: skip
    decode = [row for row in rows(f"{XEON}/decode_peers.txt") if row["H"] == "32"]
    found["decode, float32, 32768 tokens, four query heads per KV head: torch, the fastest"] = [
        [], by_threads(decode, lambda row: float(row["Best_peer/ours"]), dtype="float32")
    ]  # fmt: skip
    return found


def expected_in_summary() -> dict[str, list[list[float]]]:
    """The same for the summary of docs/performance.rst."""
    headline = {(row["block_shape"], row["sparsity"]): float(row["Share_of_ideal"]) for row in rows(f"{ZEN5}/headline.txt")}
    found: dict[str, list[list[float]]] = {}
    sparsities = ("0.50", "0.80", "0.90")
    for size in (32, 64, 128):
        found[f"{size} x {size}"] = [[headline[f"{size}x{size}", sparsity]] for sparsity in sparsities]
    large = {key: value for key, value in headline.items() if key[0] not in ("32x32", "64x64", "128x128")}
    others = [[value for (_, other), value in large.items() if other == sparsity] for sparsity in sparsities]
    found["512 x 512 and 1024 x 1024"] = [[min(values), max(values)] for values in others]

    limits, gradients = rows(f"{ZEN5}/roofline.txt", 1), rows(f"{ZEN5}/backward.txt")

    def share(row: Row) -> float:
        return float(row["Share_of_limit"])

    dtypes = ("float32", "float16", "bfloat16")
    here = {"level": "avx512_bf16"}
    found["dense, D = 128"] = [by_threads(limits, share, operation="dense", dtype=dtype, **here) for dtype in dtypes]
    for name, operation in (("dense, D = 64", "dense_D=64"), ("causal", "causal")):
        found[name] = [by_threads(limits, share, operation=operation, dtype=dtype, **here) for dtype in ("float32", "bfloat16")]
    dense = {"rule": "all", "sparsity": "0.00"}
    measured = ("float32", "bfloat16")
    found["gradients, dense"] = [by_threads(gradients, lambda row: float(row["Share_of_F"]), dtype=dtype, **dense) for dtype in measured]
    capped = [by_threads(limits, share, operation="dense", dtype=dtype, level="avx2") for dtype in dtypes]
    found["dense, limited to AVX2 (share of AVX2's peak)"] = capped

    def torch(**wanted: str) -> list[list[float]]:
        return [by_threads(gradients, lambda row: float(row["Torch/ours"]), dtype=dtype, **wanted) for dtype in measured]

    peers = [row for row in rows(f"{ZEN3}/peers.txt") if row["S"] == "2048"]
    cases = {"dense": ("all", "0.00"), "causal": ("causal", "0.00"), "sparsity 0.9, 128 x 128": ("all", "0.90")}
    for name, (rule, sparsity) in cases.items():
        found[name + " (peers)"] = [by_threads(peers, fastest_peer, dtype=dtype, rule=rule, sparsity=sparsity) for dtype in dtypes]
    found["dense (gradients)"], found["causal (gradients)"] = torch(**dense), torch(rule="causal", sparsity="0.00")
    found["sparsity 0.9, 128 x 128 (torch: dense)"] = torch(rule="all", sparsity="0.90")

    decode = rows(f"{ZEN5}/decode.txt")
    for dtype in dtypes:
        for name, column in ((dtype, share), (dtype + " (peers)", lambda row: float(row["Best_peer/ours"]))):
            found[name] = [by_threads(decode, column, dtype=dtype, requests="1", G=g) for g in ("1", "4", "8")]
    return found


def agrees(shown: str, exact: float) -> bool:
    """Whether a number in a document is `exact`, rounded to the digits that the document shows."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - exact) <= 0.5000001 * 10**-digits


def check(file: str, known: dict[str, list[list[float]]], shown_cells: Iterator[list[str]]) -> int:
    """Returns how many rows are wrong or missing."""
    # Several tables have rows of these names. The keys of a name are in the order of these tables.
    order = {"causal": ["causal", "causal (gradients)", "causal (peers)"], "dense": ["dense (gradients)", "dense (peers)"]}
    order["sparsity 0.9, 128 x 128"] = ["sparsity 0.9, 128 x 128 (peers)"]
    order |= {dtype: [dtype, dtype + " (peers)"] for dtype in ("float32", "bfloat16", "float16")}
    wrong = 0
    for name, *cells in shown_cells:
        key = order[name].pop(0) if order.get(name) else name
        if key not in known:
            continue
        exact = known.pop(key)
        shown = [re.findall(r"\d+\.?\d*", cell) for cell in cells if cell]
        shown = [texts if values else [] for texts, values in zip_longest(shown, exact, fillvalue=[])]
        same = [len(texts) for texts in shown] == [len(values) for values in exact]
        same = same and all(agrees(*pair) for texts, values in zip(shown, exact, strict=True) for pair in zip(texts, values, strict=True))
        if not same:
            wrong += 1
            print(f"{file}: {key}: {shown}, but benchmark/results has {exact}", file=sys.stderr)
    for key in known:
        print(f"{file}: no row {key}", file=sys.stderr)
    return wrong + len(known)


def main() -> int:
    readme = check("README.md", expected_in_readme(), shown_rows("README.md", "## How fast", "## Two commands"))
    place = "docs/performance.rst"
    return 1 if readme + check(place, expected_in_summary(), shown_rows(place, "\nIn short\n", "\nSparse lists\n")) else 0


if __name__ == "__main__":
    sys.exit(main())
