"""How sphinx builds the documentation: ``nox -s docs``."""

import re
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from ddpsafe._explain.catalogue import built_in

project = "ddpsafe"
author = "The ddpsafe authors"
copyright = "The ddpsafe authors"  # noqa: A001 - the name sphinx reads
release = version = installed_version("ddpsafe")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False
default_role = "py:obj"  # `name` in a docstring is a link where the name is documented

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"ddpsafe {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
        "versions.html",
    ]
}
# `nox -s docs` builds each version into a folder of its name, beside those of other versions.
_SITE = Path(__file__).parent / "_build" / "html"
html_context = {
    "versions": sorted({version, *(path.parent.name for path in _SITE.glob("*/genindex.html"))})
}


def setup(app: Sphinx) -> None:
    """Add the rules of ``ddpsafe explain`` to their page, and make the navigation of titles."""
    app.connect("source-read", _add_rules)
    app.connect("html-page-context", _navigate_titles, priority=400)  # before the theme asks for it


_titles: dict[str, nodes.bullet_list] = {}


def _navigate_titles(
    app: Sphinx,
    _page: str,
    _template: str,
    context: dict[str, Any],
    _doctree: nodes.document | None,
) -> None:
    """Give the theme, which asks for the titles of all pages on each page, trees that have only these.

    sphinx copies every heading of every page first, and then drops them: two thirds of the build.
    """
    headings, toctree = app.env.tocs, context["toctree"]
    if not _titles:
        _titles.update({page: _without_headings(toc) for page, toc in headings.items()})

    def titles(**options: Any) -> Any:
        app.env.tocs = _titles
        try:
            return toctree(**options)
        finally:
            app.env.tocs = headings

    context["toctree"] = titles


def _without_headings(toc: nodes.bullet_list) -> nodes.bullet_list:
    """Return a page's tree without the headings below which there is no other page."""
    kept = toc.deepcopy()
    for below in list(kept.findall(nodes.bullet_list)):
        if below is not kept and next(below.findall(addnodes.toctree), None) is None:
            below.parent.remove(below)
    return kept


def _add_rules(_: Sphinx, page: str, text: list[str]) -> None:
    if page == "reference/failures":
        text[0] += _sections()


_PAGE_REPORT = """
## DS-RUN-report

- Cause: the one that `report.json` in a ddpsafe run directory names, with its rank, its kind and what to do.
"""

_PAGE_USER = """
## DS-USER-exception

- Cause: the script raised an exception that no other rule matches.
- What to do: fix the line that the finding names, or do what the exception's message asks for; ranks that complain of a lost peer failed because of it.
- Kind `user-error`, retry `never`.
"""


def _sections() -> str:
    """Return a section for each rule, as Markdown."""
    parts = []
    for rule in built_in().rules:
        if rule.code == "DS-RUN-report":
            parts.append(_PAGE_REPORT)
            continue
        cause, fix = (re.sub(r"\{(\w+)\}", "…", text) for text in (rule.cause, rule.fix))
        parts.append(
            f"\n## {rule.code}\n\n- Cause: {cause}\n- What to do: {fix}\n"
            f"- Kind `{rule.kind}`, retry `{rule.retry}`.\n"
        )
    return "".join(parts) + _PAGE_USER
