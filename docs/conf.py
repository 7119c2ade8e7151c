"""How sphinx builds the documentation: ``nox -s docs``."""

from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

from ddpsafe._explain.catalogue import as_sections

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
    """Add the rules of ``ddpsafe explain`` to the page about them, which is not generated into the sources."""
    app.connect("source-read", _add_rules)


def _add_rules(_: Sphinx, page: str, text: list[str]) -> None:
    if page == "reference/failures":
        text[0] += as_sections()
