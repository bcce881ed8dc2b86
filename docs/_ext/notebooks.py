"""Makes pages from the notebooks in examples/, with their stored outputs, and a gallery of them. Nothing is run here.

A Markdown page whose text is `notebook: <name>` becomes the notebook of that name. `.. gallery:: <name> ...` shows the largest picture,
the title and the first paragraph of each notebook that it names.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
DOWNLOAD = "{download}`Download this notebook <../../examples/%s.ipynb>`"


def cells_of(name: str) -> list[dict[str, Any]]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def linked(text: str) -> str:
    """The text, with the names of other notebooks and pages of the site as links."""
    text = re.sub(r"`(\w+)\.ipynb`", r"[\1](\1.md)", text)
    return re.sub(r"`docs/(\w+/\w+)\.rst`", r"{doc}`/\1`", text)


def picture_of(output: dict[str, Any]) -> str | None:
    picture = output.get("data", {}).get("image/png")
    return f"data:image/png;base64,{''.join(picture).strip()}" if picture else None


def pixels(picture: str) -> int:
    """The number of pixels of a picture, from the head of its PNG file."""
    head = base64.b64decode(picture.partition(",")[2][:32])
    return int.from_bytes(head[16:20], "big") * int.from_bytes(head[20:24], "big")


def page(name: str) -> str:
    """A notebook as Markdown."""
    parts = []
    for cell in cells_of(name):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(linked(source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            picture = picture_of(output)
            printed = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            parts.append(f"![output]({picture})" if picture else f"```{{code-block}} none\n:class: output\n\n{printed}\n```")
    title, parts[0] = parts[0].split("\n", 1)
    return "\n\n".join([title, DOWNLOAD % name, *parts])


def read_page(app: Any, docname: str, source: list[str]) -> None:
    wanted = re.fullmatch(r"notebook: (\w+)\s*", source[0])
    if wanted:
        app.env.note_dependency(str(EXAMPLES / f"{wanted[1]}.ipynb"))
        source[0] = page(wanted[1])


def setup(app: Any) -> dict[str, bool]:
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    class GalleryDirective(Directive):
        required_arguments = 1
        final_argument_whitespace = True

        def run(self) -> list[nodes.Node]:
            text = [".. container:: gallery", ""]
            for name in self.arguments[0].split():
                cells = cells_of(name)
                pictures = [picture_of(output) or "" for cell in cells for output in cell.get("outputs", ())]
                title, about, *_ = "".join(cells[0]["source"]).split("\n\n")
                title, about = title.strip("# "), about.replace("\n", " ")
                figure = [f".. figure:: {max(pictures, key=pixels)}", f"   :target: {name}.html", f"   :alt: {title}", ""]
                figure += [f"   :doc:`{title} <{name}>`", "", f"   {about}", ""]
                figure += [f"   :download:`{name}.ipynb <../../examples/{name}.ipynb>`", ""]
                text += [f"   {line}" for line in figure]
                self.state.document.settings.record_dependencies.add(str(EXAMPLES / f"{name}.ipynb"))
            node = nodes.container()
            self.state.nested_parse(StringList(text, source="examples"), self.content_offset, node)
            return node.children

    app.add_directive("gallery", GalleryDirective)
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
