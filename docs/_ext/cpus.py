"""A Sphinx directive that puts the machines of benchmark/results side by side, one column for each: `.. cpus::`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from results_table import MACHINES, RESULTS, Results, read_results

Rows = list[dict[str, str]]
# A row of the table: its name; the operation, dtype and column in roofline.txt; the digits after the point.
RATES = (
    ("dense", "dense", "float32", "GFLOP/s", 0),
    ("dense", "dense", "bfloat16", "GFLOP/s", 0),
    ("dense, D = 64", "dense_D=64", "float32", "GFLOP/s", 0),
    ("dense, D = 64", "dense_D=64", "bfloat16", "GFLOP/s", 0),
    ("causal", "causal", "float32", "GFLOP/s", 0),
    ("causal", "causal", "bfloat16", "GFLOP/s", 0),
    ("a tenth of the blocks, 64 x 64", "sparse_0.9,64x64", "float32", "GFLOP/s", 0),
    ("a tenth of the blocks, 64 x 64", "sparse_0.9,64x64", "bfloat16", "GFLOP/s", 0),
    ("gradients", "backward", "float32", "GFLOP/s", 0),
    ("gradients", "backward", "bfloat16", "GFLOP/s", 0),
    ("decode, a KV head for each query head", "decode_G=1", "float32", "GB/s", 1),
    ("decode, a KV head for each query head", "decode_G=1", "bfloat16", "GB/s", 1),
    ("decode, a KV head for eight query heads", "decode_G=8", "bfloat16", "GB/s", 1),
)


def machines() -> dict[str, str]:
    """The names of all machines that have a roofline.txt, and their folders. Folders without a name in MACHINES come last."""
    folders = {path.name: path.name for path in sorted(RESULTS.iterdir()) if (path / "roofline.txt").exists()}
    named = {name: folder for name, folder in MACHINES.items() if folders.pop(folder, None)}
    return named | folders


def read(folder: str, file: str) -> Results | None:
    return read_results(f"{folder}/{file}") if (RESULTS / folder / file).exists() else None


def rates(table: Rows, operation: str, dtype: str, column: str, digits: int) -> str:
    """The rates of one thread and of two, at the machine's own level. The first row of the table has this level."""
    level = table[0]["level"]
    found = [row for row in table if (row["operation"], row["dtype"], row["level"]) == (operation, dtype, level)]
    return " / ".join(f"{float(row[column]):.{digits}f}" for row in found)


def of_the_dense_time(folder: str) -> list[str]:
    """The times of calls over half, a fifth and a tenth of the blocks, as shares of the dense call's time."""
    headline = read(folder, "headline.txt")
    table = [row for row in headline.tables[0].rows() if row["block_shape"] == "64x64"] if headline else []
    return [f"{(1 - float(row['sparsity'])) / float(row['Share_of_ideal']):.2f}" for row in table] or [""] * 3


def fastest_peer(folder: str, rule: str, dtype: str) -> str:
    """The time of the fastest other library, divided by ours, for 2048 tokens and D = 128, with one thread and with two."""
    peers = read(folder, "peers.txt")
    wanted = {"rule": rule, "dtype": dtype, "D": "128", "S": "2048", "sparsity": "0.00"}
    table = [row for row in peers.tables[0].rows() if all(row[key] == value for key, value in wanted.items())] if peers else []
    best = [min(float(cell) for key, cell in row.items() if key.endswith("/ours") and cell != "N/A") for row in table]
    return " / ".join(f"{ratio:.2f}" for ratio in best)


def lines() -> Iterator[list[str]]:
    """The rows of the table, its head first."""
    every = machines()
    roofs = {folder: read_results(f"{folder}/roofline.txt") for folder in every.values()}
    tables = {folder: list(roof.tables[1].rows()) for folder, roof in roofs.items()}
    yield ["", "", *every]
    yield ["level", "", *(f"``{tables[folder][0]['level']}``" for folder in every.values())]
    for name, operation, dtype, column, digits in RATES:
        yield [f"{name}, {column}", dtype, *(rates(table, operation, dtype, column, digits) for table in tables.values())]
    for share, cells in zip(("half", "a fifth", "a tenth"), zip(*map(of_the_dense_time, every.values()), strict=True), strict=True):
        yield [f"time of {share} of the blocks, as a share of the dense call's", "bfloat16", *cells]
    for rule, name in (("all", "dense"), ("causal", "causal")):
        for dtype in ("float32", "bfloat16"):
            cells = (fastest_peer(folder, rule, dtype) for folder in every.values())
            yield [f"{name}: the fastest other library's time over ours", dtype, *cells]
    yield ["limits measured on", "", *(roof.head["date"] for roof in roofs.values())]


def setup(app: Any) -> dict[str, bool]:
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    class CpusDirective(Directive):
        def run(self) -> list[nodes.Node]:
            self.state.document.settings.record_dependencies.add(str(RESULTS))
            text = [".. list-table::", "   :header-rows: 1", "   :stub-columns: 1", "   :class: results", ""]
            for row in lines():
                text += [f"   {' ' if place else '*'} - {cell}" for place, cell in enumerate(row)]
            node = nodes.container()
            self.state.nested_parse(StringList(text, source="benchmark/results"), self.content_offset, node)
            return node.children

    app.add_directive("cpus", CpusDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
