"""The process that cleans up after a launcher that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ddpsafe
from ddpsafe._launcher.processes import reaper

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that is to be removed if the launcher is killed."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def start(folder: Path, launcher_pid: int) -> subprocess.Popen[str]:
    """Start it, and tell it what a launcher does."""
    command = [sys.executable, "-I", "-S", str(reaper._PROGRAM), str(launcher_pid), "-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    for line in ({"path": sys.path, "launch": "5" * 32}, {"folder": str(folder)}):
        process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()
    return process


def test_a_launcher_that_is_killed_in_the_middle_of_a_line(folder: Path) -> None:
    """What was told before is cleaned up."""
    process = start(folder, os.getpid())
    assert process.stdin is not None
    process.stdin.write('{"rank": {"pi')
    process.stdin.close()
    assert process.wait(60) == 0
    assert not folder.exists()


def test_a_launcher_that_was_killed_before_the_first_look(folder: Path) -> None:
    """Its pipe may be held open by a process that it has forked off."""
    process = start(folder, launcher_pid=1)
    assert process.wait(60) == 0
    assert process.stdin is not None
    process.stdin.close()
    assert not folder.exists()


def test_a_system_that_starts_no_process_is_a_preflight_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the limit of ``ulimit -u``: nothing was started."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ddpsafe.PreflightError, match="could not be started") as caught:
        reaper.running_reaper("5" * 32).__enter__()
    assert "ulimit -u" in str(caught.value)
