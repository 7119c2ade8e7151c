"""The frame and the style of the HTML pages that ddpsafe writes. A page loads and runs nothing.

Parts of it come from scripts, other hosts and programs. All of them are escaped, and the page's
Content-Security-Policy also forbids the browser to run or load anything.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from ddpsafe._text import printable

_FRAME: Final = """\
<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ddpsafe: {{ title | printable }}</title><style>{{ style }}</style></head><body>
<h1>{{ title | printable }}</h1>
%s</body></html>
"""

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c2024; --back: #fff; --line: #8a94a0; --dim: #5b6470;
  --box: #eef0f2; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --back: #14171a; --line: #7b8693;
  --dim: #9aa4af; --box: #23282d; --bad: #f0685c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 64rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } pre { background: var(--box); padding: .6rem .8rem;
  border-radius: 4px; font-size: 13px; white-space: pre-wrap; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
.dim { color: var(--dim); }
"""


def draw_page(body: str, *, style: str, title: str, has_all: bool = True, **values: object) -> str:
    """Return a page: what the template `body` draws below its title, with a style of its own.

    With `has_all`, a value that the template asks for and does not get is an error; else it is left out.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined if has_all else jinja2.ChainableUndefined,
        trim_blocks=True,
    )
    environment.filters["printable"] = partial(printable, keep="\n\t")
    template = environment.from_string(_FRAME % body)
    return template.render(title=title, style=Markup(_STYLE + style), **values)  # noqa: S704 - constants
