"""A rank raises an exception that cannot be pickled, or should not be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exception_programs as programs
import pytest
from fault_kit import World, require_rank
from training_programs import train

import ddpsafe

NEEDS_GROUPS = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="exception groups need Python 3.11"
)


@pytest.mark.full(but=["cannot-be-pickled", "base-exception", "no-attributes"])
@pytest.mark.parametrize(
    ("fault", "travels_as", "text"),
    [
        pytest.param(programs.raise_locked, None, "locked text", id="cannot-be-pickled"),
        pytest.param(programs.raise_keyword, None, "keyword code 7", id="cannot-be-built-again"),
        pytest.param(programs.raise_bomb, None, "bomb text", id="exits-where-it-is-built-again"),
        pytest.param(programs.raise_rude, programs.RudeError, "rude text", id="base-exception"),
        pytest.param(
            programs.raise_nameless, RuntimeError, "NamelessError", id="class-without-name"
        ),
        pytest.param(programs.raise_sealed, RuntimeError, "SealedError", id="no-attributes"),
        pytest.param(
            programs.raise_untraced,
            RuntimeError,
            "UntracedError: untraced text",
            id="no-traceback",
        ),
        pytest.param(programs.raise_chained, ValueError, "second text", id="chained"),
        pytest.param(
            programs.raise_group, "ExceptionGroup", "both parts", id="group", marks=NEEDS_GROUPS
        ),
    ],
)
def test_its_text_always_arrives_and_its_type_where_possible(
    tmp_path: Path,
    fault: Callable[..., Any],
    travels_as: type[BaseException] | str | None,
    text: str,
) -> None:
    """The text is in the first line, and the whole traceback is below the cause."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, fault)
    require_rank(error, 1)
    assert text in str(error).splitlines()[0]
    remote = error.__cause__
    if travels_as is not None:
        assert travels_as in {type(remote), type(remote).__name__}
        assert remote is not None
        remote = remote.__cause__
    assert f"in {fault.__name__}" in str(remote)


@pytest.mark.full
def test_an_exit_of_an_odd_class_keeps_its_code(tmp_path: Path) -> None:
    """Its attributes cannot be read, and the scheduler reads the code."""
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.RankExitedError, train, programs.exit_sealed
    )
    assert error.exit_code == 7


@pytest.mark.full
def test_fifty_megabytes_of_text_are_shortened(tmp_path: Path) -> None:
    """The launcher shows the beginning and the end, and is as fast as with a short text."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, programs.raise_large)
    require_rank(error, 1)
    assert len(str(error)) < 10_000
    assert "large text" in str(error)
    assert "end of text" in str(error)
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*")) < 1_000_000


@pytest.mark.full
def test_the_log_has_the_exceptions_it_was_raised_from(tmp_path: Path) -> None:
    """The message names the log, and a reader looks there for the whole chain."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, programs.raise_chained)
    assert error.log_path is not None
    assert "KeyError: 'key of the first'" in error.log_path.read_text()
