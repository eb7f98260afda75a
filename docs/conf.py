"""The documentation site: `nox -s docs`, or `sphinx-build -n -W docs docs/_build/html`."""

from __future__ import annotations

import enum
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import graphshare

project = "graphshare"
author = "graphshare developers"
project_copyright = author
version = release = graphshare.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# The pages are read on GitHub too: they link to each other as files, and to headings by the
# anchors that GitHub gives them.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
# A class documents its attributes itself; without this each would be declared a second time.
napoleon_use_ivar = True
napoleon_attr_annotations = False

# Nothing is fetched while building, so names of other projects are text, not links. Every name of
# graphshare's own must resolve: put what is missing on a page of the reference, and nothing here.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"torch(\..*)?"),
    (r"py:.*", r"(collections\.abc|contextlib|dataclasses|enum|os|pathlib|types)\..*"),
    (r"py:class", r"ModuleType"),  # within `str | ModuleType | None`, its module is not named
    (r"py:.*", r"(pytest|hypothesis|st)\..*"),
    # Type variables, and aliases that are private to their module.
    (r"py:class", r"(graphshare\.[\w.]+\.)?(_?[CDKPT]|_Extra)"),
]

html_theme = "furo"
html_title = f"graphshare {release}"
html_show_copyright = False

# Nobody calls these classes: a pool, a loan, an owner or a strategy makes the objects.
_MADE_FOR_THE_USER = {
    "graphshare.BoundReplay",
    "graphshare.Capturing",
    "graphshare.SharedStates",
    "graphshare.adapters.flashinfer.PageLists",
    "graphshare.adapters.flashinfer.Planner",
    "graphshare.adapters.vllm.session.Session",
    "graphshare.testing.strategies.Branch",
}


def _signature(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    if kind == "class" and (
        name in _MADE_FOR_THE_USER
        or issubclass(value, enum.Enum)
        or getattr(value, "_is_protocol", False)
    ):
        return "", ""
    return None


def _no_type(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Keep Napoleon from taking a member's sentence, up to its colon, for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment: it looks at the first line alone


def _by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Node | None:
    """A docstring may call what is imported where it stands by its bare name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains["py"]
    found = domain.find_obj(env, None, None, node["reftarget"], None, 1)
    where = {(entry.docname, entry.node_id) for _, entry in found}
    if len(where) != 1:
        return None
    ((docname, node_id),) = where
    return make_refnode(app.builder, node["refdoc"], docname, node_id, text)


def setup(app: Sphinx) -> None:
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as the docstrings call them
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _no_type, priority=400)  # before Napoleon
    app.connect("missing-reference", _by_last_name)
