"""A Sphinx directive that renders a table of a file of benchmark/results, and the reader behind it.

    .. results:: <machine>/<file>
       :columns: dtype threads Share_of_F
       :where: rule=all threads=1 2
       :table: 2

The head of the file (machine, commit, date, command) becomes a line above the table. `columns` chooses and orders columns, `where` keeps
rows whose column has one of the values, `table` chooses one of the file's tables, from 1. `pivot: key value` makes a column for each
value of the column `key`, which holds the column `value`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "benchmark"))

from _bench import RESULTS, read_head  # noqa: E402

# The folders of the machines that documents name.
MACHINES = {
    "AMD EPYC, Zen 3 (AVX2)": "amd-epyc-2-avx2-l1.32k-l2.512k-l3.32768k",
    "AMD EPYC, Zen 4 (AVX-512)": "amd-epyc-2-avx512-bf16-l1.32k-l2.1024k-l3.32768k",
    "AMD EPYC, Zen 5 (AVX-512)": "amd-epyc-2-avx512-bf16-l1.48k-l2.1024k-l3.32768k",
    "Intel Xeon, Emerald Rapids (AMX)": "intel-xeon-processor-2-amx-l1.48k-l2.2048k-l3.307200k",
    "Intel Xeon, L3 of 480 MiB (AMX)": "intel-xeon-processor-2-amx-l1.48k-l2.2048k-l3.491520k",
}


@dataclass
class Printed:
    """One table as a script prints it: names of columns, and rows of one word per column."""

    names: list[str]
    lines: list[list[str]] = field(default_factory=list)

    def rows(self) -> Iterator[dict[str, str]]:
        return (dict(zip(self.names, line, strict=True)) for line in self.lines)

    def column(self, name: str) -> list[str]:
        return [row[name] for row in self.rows()]


@dataclass
class Results:
    """A file of results."""

    head: dict[str, str]
    tables: list[Printed]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_results(name: str) -> Results:
    """Reads the file `name`, a path under benchmark/results. A table begins with a line of names, none of them a number, and has the lines
    below it that have the same number of words."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    tables: list[Printed] = []
    open_table = False
    for line in text.splitlines():
        words = line.split()
        if not words or line.startswith(("#", "=", "-")):
            open_table = open_table and bool(words)
            continue
        if open_table and len(words) == len(tables[-1].names):
            tables[-1].lines.append(words)
        elif not any(_is_number(word) for word in words):
            tables.append(Printed(words))
            open_table = True
    return Results(read_head(text), [table for table in tables if table.lines])


def pivoted(rows: list[dict[str, str]], columns: list[str], key: str, value: str) -> tuple[list[str], list[list[str]]]:
    """The column heads and the rows of a table that has a column for each value of `key`."""
    left = [column for column in columns if column not in (key, value)]
    heads = list(dict.fromkeys(row[key] for row in rows))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cells.setdefault(tuple(row[column] for column in left), {})[row[key]] = row[value]
    return [*left, *(f"{key} {head}" for head in heads)], [[*first, *(own.get(head, "") for head in heads)] for first, own in cells.items()]


def setup(app: Any) -> dict[str, bool]:
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives
    from docutils.statemachine import StringList

    class ResultsDirective(Directive):
        required_arguments = 1
        option_spec = {  # noqa: RUF012
            "columns": directives.unchanged,
            "where": directives.unchanged,
            "table": directives.positive_int,
            "pivot": directives.unchanged,
        }

        def run(self) -> list[nodes.Node]:
            name = self.arguments[0]
            try:
                results = read_results(name)
                table = results.tables[self.options.get("table", 1) - 1]
                columns = self.options.get("columns", " ".join(table.names)).split()
                wanted: dict[str, list[str]] = {}
                for word in self.options.get("where", "").split():
                    key, equals, value = word.partition("=")
                    if equals:
                        wanted[key] = [value]
                    else:
                        wanted[list(wanted)[-1]].append(word)
                rows = [row for row in table.rows() if all(row[key] in values for key, values in wanted.items())]
                body = [[row[column] for column in columns] for row in rows]
                if "pivot" in self.options:
                    key, value = self.options["pivot"].split()
                    columns, body = pivoted(rows, columns, key, value)
            except (OSError, IndexError, KeyError, ValueError) as error:
                raise self.error(f"results: {name}: {type(error).__name__}: {error}") from None
            if not body:
                raise self.error(f"results: {name}: no row is left")
            self.state.document.settings.record_dependencies.add(str(RESULTS / name))
            head = results.head
            lines = [f"{head['machine']}. Measured on {head['date']} at commit {head['commit']} by ``{head['command']}``."]
            if "note" in head:
                lines += ["", f"Notes: {head['note']}."]
            lines += ["", ".. list-table::", "   :header-rows: 1", "   :class: results", ""]
            for row in ([f"``{column}``" for column in columns], *body):
                lines += [f"   {' ' if place else '*'} - {cell}" for place, cell in enumerate(row)]
            node = nodes.container()
            self.state.nested_parse(StringList(lines, source=name), self.content_offset, node)
            return node.children

    app.add_directive("results", ResultsDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
