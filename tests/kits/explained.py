"""Runs ``ddpsafe explain`` in this process, as a new interpreter for each call would cost too much."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Final

import pytest
from scripts import Run
from source_tree import PACKAGE

from ddpsafe._explain.catalogue import AREAS
from ddpsafe._explain.rule_files import RuleFile
from ddpsafe.cli import main

RULES: Final = PACKAGE / "_explain" / "rules"


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


@functools.cache
def built_in_files() -> tuple[RuleFile, ...]:
    """Return the files of rules that come with ddpsafe, with their examples."""
    return tuple(RuleFile(RULES / f"{area}.toml") for area in AREAS)
