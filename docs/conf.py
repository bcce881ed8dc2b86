"""Sphinx's configuration. make docs builds the site in build/docs/html and runs the examples of the pages."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent / "examples"))  # pages show and run examples

import blitz_attn  # noqa: E402

project = "blitz_attn"
author = "the blitz_attn developers"
release = version = blitz_attn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "sphinx_copybutton",
    "myst_parser",
    "cpus",
    "notebooks",
    "results_table",
]
exclude_patterns = ["_ext"]
default_role = "code"  # numpydoc's `name`
nitpicky = True  # every function that a page names must exist
nitpick_ignore_regex = [("py:(class|data|obj|exc)", ".*")]  # numpydoc types are prose, not links
suppress_warnings = ["ref.footnote"]  # a docstring may list a source to which its text has no mark
language = "en"
highlight_language = "none"  # literal blocks are diagrams; blocks of code name their language

autosummary_generate = False  # the tables of the API pages link to entries on the same page
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the docstrings
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_rtype = False
doctest_test_doctest_blocks = ""  # the test suite runs docstrings; pages mark their examples as doctest
doctest_global_setup = "import numpy as np\nimport blitz_attn\nfrom blitz_attn import sabi\nrng = np.random.default_rng(0)"
doctest_global_setup += "\nfrom importlib.util import find_spec"
doctest_global_setup += "\nno_jax = find_spec('jax') is None"
doctest_global_setup += "\nno_diffusers = find_spec('torch') is None or find_spec('diffusers') is None"
doctest_global_setup += "\nno_transformers = find_spec('torch') is None or find_spec('transformers') is None"

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["blitz.css"]
html_show_sphinx = False
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_copy_source = False


def own_footnotes(app, what, name, obj, options, lines):
    """Numbered references of a docstring become footnotes of its own, so that several docstrings can share a page."""
    label = name.replace(".", "-").replace("_", "-")
    text = re.sub(r"\[(\d+)\](?=_|\s)", rf"[#{label}-\1]", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", own_footnotes, priority=900)
