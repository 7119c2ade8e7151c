"""A rank has returned, but a thread keeps its process alive."""

from __future__ import annotations

import logging
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

import odd_end_programs as programs
from fault_kit import World

from ddpsafe._launcher.watch import supervisor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest


def test_the_launcher_names_the_rank_and_the_thread_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does so after a few seconds and when it ends the rank; the result stands."""
    with caplog.at_level(logging.WARNING):
        result = World(folder=tmp_path).launch(
            programs.leave_a_thread, timeouts={"shutdown": 5, "grace": 1}
        )
    assert result.values == {0: 0, 1: 1}
    waits, ends = [line for line in caplog.messages if line.startswith("rank ")][:2]
    for line in (waits, ends):
        assert line.startswith("rank 1 has returned, but its process ")
        assert f"thread 'uploader' at {programs.__file__}:" in line
        assert "in _work_on" in line
        assert "timeouts.shutdown" in line
    assert "so it is ended now" in ends


def test_the_launcher_sleeps_until_the_ranks_have_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that are due only while ranks run would wake it all the time and keep a core busy."""
    limits_s: list[float] = []

    def counted(handles: Iterable[int], timeout: float) -> list[object]:
        limits_s.append(timeout)
        return list(wait(handles, timeout))

    monkeypatch.setattr(supervisor, "wait", counted)
    World(folder=tmp_path).launch(programs.leave_a_thread, timeouts={"shutdown": 3, "grace": 1})
    assert len(limits_s) < 100


def test_a_slow_exit_handler_is_reported_as_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread is to blame: the main thread runs what the script registered with `atexit`."""
    with caplog.at_level(logging.WARNING):
        World(folder=tmp_path).launch(
            programs.leave_an_exit_handler, timeouts={"shutdown": 4, "grace": 1}
        )
    waits = next(line for line in caplog.messages if line.startswith("rank "))
    assert "it is still running exit handlers (atexit)" in waits
    assert "MainThread" not in waits
