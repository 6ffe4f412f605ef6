"""Sphinx's settings. Nothing in the site is loaded from another host."""

import importlib
from importlib.metadata import version as _version
from typing import Any

from docs.generator.reference import with_code

project = "hvdlite"
copyright = "the hvdlite authors"
version = release = _version("hvdlite")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
# Anchors of headings as a code host makes them.
myst_heading_anchors = 6
highlight_language = "none"

# A name in single backquotes in a docstring is a link where it is one of the reference.
default_role = "py:obj"
autoclass_content = "both"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 80
napoleon_use_rtype = False

# They make one dash of the two of an option.
smartquotes = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"hvdlite {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def setup(app: Any) -> None:
    nodes: Any = importlib.import_module("docutils.nodes")

    def change(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        lines[:] = map(with_code, lines)

    def dashes(app: Any, page: Any) -> None:
        """Between a parameter and its text, where Sphinx leaves the dash to the smart quotes."""
        for node in page.findall(nodes.Text):
            if node == " -- ":
                node.parent.replace(node, nodes.Text(" – "))

    app.connect("autodoc-process-docstring", change)
    app.connect("doctree-read", dashes)
