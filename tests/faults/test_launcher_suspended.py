"""The launcher is suspended and continues later: Ctrl-Z and fg, SIGSTOP, a paused virtual machine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

import machine
import psutil
import pytest
import scripts
from fault_kit import Started, start_script

_EXIT_CODE_OF_A_STOP: Final = 75
"""Exit code of a job that stopped on request."""


@pytest.fixture
def limit_s() -> float:
    """Return a limit that ranks can keep on a machine as busy as this one."""
    return 3.0 * min(machine.stretch(), 3)


def suspend(job: Started, limit_s: float) -> None:
    """Stop only the launcher for longer than its limit, and give it time to look at the clock."""
    os.kill(job.pid, signal.SIGSTOP)
    time.sleep(limit_s + 0.5)  # the fault itself
    os.kill(job.pid, signal.SIGCONT)
    time.sleep(0.3)


@pytest.mark.full(but=["start"])
@pytest.mark.parametrize("limit", ["start", "progress", "finish"])
def test_time_that_the_launcher_was_suspended_does_not_count_against_ranks(
    tmp_path: Path, limit: str, limit_s: float
) -> None:
    """Ranks that load, train or exit are not ended, and nothing is printed about them."""
    statements = f"""
        import stop_programs as programs
        limits = {{{limit!r}: {limit_s}}}
        call = programs.CALLS[{limit!r}](folder)
        print(ddpsafe.launch(programs.run, (call,), **options, timeouts=limits).values)
    """
    with start_script(tmp_path, statements) as job:
        job.wait_until_up()
        suspend(job, limit_s)
        (tmp_path / "go").touch()
        run = job.end()
    assert (run.code, run.err) == (0, "")
    assert "{0: 'went', 1: 'went'}" in run.out


@pytest.mark.full
def test_a_launcher_suspended_between_two_starts_starts_the_rest_later(
    tmp_path: Path, limit_s: float
) -> None:
    """The rank that has started waits as long as it takes, because no other rank could join it."""
    (tmp_path / "go").touch()
    statements = f"""
        import stop_programs as programs
        sys.stdout = programs.StopBetweenStarts(sys.stdout)
        call = programs.Loading(folder)
        limits = {{"start": {limit_s}}}
        print(ddpsafe.launch(programs.run, (call,), **options, timeouts=limits).values)
    """
    with start_script(tmp_path, statements) as job:
        scripts.wait_until(lambda: list(tmp_path.glob("ready-*")), otherwise=job.errors)
        assert psutil.Process(job.pid).status() == psutil.STATUS_STOPPED
        time.sleep(limit_s + 0.5)  # the fault itself
        assert len(list(tmp_path.glob("ready-*"))) == 1
        os.kill(job.pid, signal.SIGCONT)
        run = job.end()
    assert (run.code, run.err) == (0, "")
    assert "{0: 'went', 1: 'went'}" in run.out


@pytest.mark.full
def test_a_launcher_suspended_while_ranks_save_waits_for_them(
    tmp_path: Path, limit_s: float
) -> None:
    """`timeouts.stop` of ranks that have been asked to stop excludes the suspension."""
    statements = f"""
        import stop_programs as programs
        limits = {{"stop": {limit_s}}}
        ddpsafe.launch(programs.save_slowly, (folder,), **options, timeouts=limits)
    """
    with start_script(tmp_path, statements) as job:
        job.wait_until_up()
        os.kill(job.pid, signal.SIGTERM)
        scripts.wait_until(lambda: "asked to save and return" in job.errors())
        suspend(job, limit_s)
        (tmp_path / "go").touch()
        run = job.end()
    assert run.code == _EXIT_CODE_OF_A_STOP, run.err
    assert "did not return" not in run.err
