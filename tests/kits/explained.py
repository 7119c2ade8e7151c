"""Runs ``ddpsafe explain`` in this process, and compares its output with the rows of a table.

A new interpreter for each call, or a test for each of two thousand rows, would cost too much.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import pytest
from scripts import Run

from ddpsafe._explain.logs import explain_text
from ddpsafe.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterable


def explain(*arguments: str, log: str = "") -> Run:
    """Run the command with a log on its standard input."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log.encode())))
        try:
            code = main(["explain", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Run(code=code, out=out.getvalue(), err=err.getvalue())


def wrong_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return a line for each log whose first cause is not that code, or has no evidence or no fix."""
    wrong = []
    for number, (log, code) in enumerate(rows):
        causes = explain_text(log)
        has_all = bool(causes and causes[0].evidence and causes[0].fix)
        if not has_all or causes[0].code != f"DS-{code}":
            lacks = "" if has_all else " (without evidence or fix)"
            found = ", ".join(cause.code for cause in causes) or "nothing"
            wrong.append(f"row {number}: DS-{code} is wanted, found {found}{lacks} in {log!r}")
    return "\n".join(wrong)
