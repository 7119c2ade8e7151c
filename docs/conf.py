"""How sphinx builds the documentation: ``nox -s docs``."""

from importlib.metadata import version as installed_version

project = "ddpsafe"
author = "The ddpsafe authors"
copyright = "The ddpsafe authors"  # noqa: A001 - the name sphinx reads
release = version = installed_version("ddpsafe")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "ddpsafe"
