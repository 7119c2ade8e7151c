"""A long wait is reported on the console while it lasts, and the job continues."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import time
from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import Touch, World
from machine import require_in_time

import ddpsafe
from ddpsafe._clock import AwakeClock
from ddpsafe._launcher.watch import deadlock_watch, supervisor

QUIET_S = 1.5


@pytest.fixture(autouse=True)
def _warn_after_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warn after seconds, and let ranks that wait for a warning continue; a real launch waits for half a minute."""
    settings = dataclasses.replace(
        deadlock_watch.SETTINGS, look_s=0.2, quiet_s=QUIET_S, first_s=60.0, idle_sample_s=0.4
    )
    monkeypatch.setattr(deadlock_watch, "SETTINGS", settings)
    monkeypatch.setattr(
        deadlock_watch.logger, "handlers", [Touch(tmp_path / programs.MAY_CONTINUE)]
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the watch."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == deadlock_watch.logger.name and record.levelno == logging.WARNING
    ]


class FastClock(AwakeClock):
    """A launcher's clock that runs too fast, so that collectives seem to be entered ever later."""

    FACTOR = 1.5

    def __call__(self) -> float:
        """Return a reading in seconds."""
        return self.FACTOR * super().__call__()


@pytest.mark.recorder
def test_a_warning_names_the_waiting_ranks_and_the_line_of_the_missing_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is repeated ever more rarely, even if two clocks differ, and the run completes."""
    monkeypatch.setattr(supervisor, "AwakeClock", FastClock)
    began_s = time.monotonic()
    result = World(folder=tmp_path, ranks=4).launch(programs.step_and_wait)
    took_s = FastClock.FACTOR * (time.monotonic() - began_s)
    assert set(result.values.values()) == {"done"}
    messages = warnings(caplog)
    assert 1 <= len(messages) <= 1 + math.log2(took_s / QUIET_S), messages
    assert re.fullmatch(
        r"ranks 0, 2 and 3 have waited \d+ s for rank 1 in all_reduce number 6 of shape \[8\] "
        r"\(longest step so far: \d+\.\d s\); rank 1 is at .*hang_programs\.py:\d+ in wait_for_test",
        messages[0],
    ), messages


@pytest.mark.full
def test_a_warning_names_the_barrier_that_ranks_wait_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait in ddpsafe's store is shown as one in a collective is."""
    World(folder=tmp_path, ranks=3).launch(
        functools.partial(programs.step_and_wait, at_barrier=True)
    )
    assert re.search(
        r"^ranks 0 and 2 have waited \d+ s for rank 1 in barrier 'epoch' .*; rank 1 is at .* in wait_for_test$",
        warnings(caplog)[0],
    ), caplog.text


@pytest.mark.full
@pytest.mark.recorder
def test_a_warning_names_the_loader_worker_that_the_rank_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's pid and line follow the rank's own line, and every sample is read."""
    program = programs.step_and_wait_for_a_loader_worker
    result = World(folder=tmp_path).launch(program)
    assert set(result.values.values()) == {"done"}
    messages = warnings(caplog)
    assert messages, caplog.text
    assert re.search(
        r"rank 0 has waited \d+ s for rank 1 in .*; rank 1 is at .*hang_programs\.py:\d+ in "
        r"step_and_wait_for_a_loader_worker, waiting for \S+ \(pid \d+\) at "
        r".*hang_programs\.py:\d+ in wait_for_test$",
        messages[0],
    ), messages


def test_a_wait_of_rpc_for_a_rank_that_has_returned_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its threads poll all the time, so the ranks never look idle, and nothing there fails or times out."""
    World(folder=tmp_path).spawn_fails(ddpsafe.RankLeftEarlyError, programs.shut_rpc_down_alone)
    messages = warnings(caplog)
    assert messages, caplog.text
    position = r"rank 0 is at .*hang_programs\.py:\d+ in shut_rpc_down_alone"
    assert re.search(
        rf"^no rank has made a step for .*; {position}, rank 1 is done", messages[0]
    ), messages


@pytest.mark.full
def test_no_warning_in_a_busy_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its duration cannot be predicted: compilation, data on a slow disk. The other rank waits for it."""
    World(folder=tmp_path).launch(programs.compute_before_the_first_step, 2 * QUIET_S)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "how",
    [
        "polls a lock file",
        pytest.param("lock", marks=pytest.mark.full),
        pytest.param("in a collective", marks=pytest.mark.full),
        pytest.param("after computing", marks=pytest.mark.full),
    ],
)
def test_ranks_that_do_nothing_are_named_in_the_first_step_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A lock file that a killed build has left: no rank computes, reads or writes. Each rank's line is shown."""
    World(folder=tmp_path).launch(programs.wait_before_the_first_step, how)
    messages = warnings(caplog)
    assert messages, caplog.text
    if how == "in a collective":
        assert re.search(
            r"^rank 0 has waited \d+ s for rank 1 in all_reduce number 1 ", messages[0]
        )
        assert re.search(r"rank 1 is at .*hang_programs\.py:\d+ in wait_for_test", messages[0])
        return
    position = r".*hang_programs\.py:\d+ in (wait_for_test|wait_before_the_first_step)"
    together = f"ranks 0 and 1 are at {position}"  # or one each: a loop that polls has two lines
    assert re.search(
        r"^no rank has made a step for \d+ s, and none does anything \(no processor time, no input or "
        rf"output\); ({together}|rank 0 is at {position}, rank 1 is at {position})$",
        messages[0],
    ), messages
    if how == "after computing":  # however long ago the ranks were last asked
        idle_s = max(path.stat().st_mtime for path in tmp_path.glob("idle-*"))
        warned_s = (tmp_path / programs.MAY_CONTINUE).stat().st_mtime
        require_in_time(warned_s - idle_s, 2 * QUIET_S, "the warning")


@pytest.mark.full
def test_no_warning_in_an_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One rank evaluates while all others wait at the end of the epoch."""
    World(folder=tmp_path).launch(programs.evaluate_on_one_rank, 2 * QUIET_S)
    assert warnings(caplog) == []


@pytest.mark.full
def test_no_warning_while_rank_0_evaluates_and_saves_between_accumulations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A common idiom: no_sync(), then a long pause of all ranks but one, twice."""
    world = World(folder=tmp_path)
    result = world.launch(programs.accumulate_evaluate_and_save, 1.5 * QUIET_S)
    assert set(result.values.values()) == {"done"}
    assert warnings(caplog) == []


@pytest.mark.full
@pytest.mark.recorder
def test_a_warning_has_the_line_of_a_rank_that_holds_the_gil(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank cannot answer, so a signal handler reports its line."""
    World(folder=tmp_path).launch(programs.hold_the_gil_in_training)
    messages = warnings(caplog)
    assert messages, caplog.text
    assert re.search(r"; rank 1 is at .*hang_programs\.py:\d+ in wait_with_the_gil", messages[0]), (
        messages
    )


def test_a_warning_names_a_rank_that_has_not_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as long as for a first step: imports and data may take minutes before that."""
    settings = dataclasses.replace(deadlock_watch.SETTINGS, first_s=2 * QUIET_S)
    monkeypatch.setattr(deadlock_watch, "SETTINGS", settings)
    World(folder=tmp_path).spawn(programs.wait_before_joining)
    messages = warnings(caplog)
    assert messages, caplog.text
    assert re.search(
        r"no rank has made a step for \d+ s.*; .*rank 1 is at .*hang_programs\.py:\d+ in wait_for_test",
        messages[0],
    ), messages
