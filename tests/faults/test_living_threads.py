"""A rank has returned, and what its function left running still works: the job is not over."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Iterable
from multiprocessing.connection import wait
from pathlib import Path

import odd_end_programs as programs
import pytest
import scripts
from fault_kit import CRASH_S, World, require_complete_message

import ddpsafe
from ddpsafe._launcher.watch import supervisor


def test_what_a_function_left_running_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As under mp.spawn; a warning names the line that the launcher waits for."""
    queue: multiprocessing.Queue[bytes] = multiprocessing.get_context("spawn").Queue()
    reader = threading.Thread(
        target=lambda: (
            scripts.wait_until(lambda: "rank 1 has returned" in caplog.text),
            queue.get(),
        )
    )
    reader.start()
    with caplog.at_level(logging.WARNING):
        result = World(folder=tmp_path).launch(programs.leave_work, queue, timeouts={"grace": 0.2})
    reader.join()
    assert result.values == {0: 0, 1: 1}
    assert {path.name for path in tmp_path.iterdir()} >= {"thread", "executor", "exit", "process"}
    first, *_ = (line for line in caplog.messages if line.startswith("rank "))
    assert first.startswith("rank 1 has returned, but its process ")
    assert f" at {programs.__file__}:" in first
    assert "in _save_later; the launch ends when that is done" in first


@pytest.mark.full
def test_the_end_of_loader_workers_is_not_that_of_the_process_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An iterator in a reference cycle ends its workers once it is collected, after the group is left."""
    with caplog.at_level(logging.WARNING):
        World(folder=tmp_path, ranks=2).launch(programs.leave_loader_in_cycle)
    assert "process group" not in caplog.text


@pytest.mark.full
def test_a_queue_that_its_reader_reads_too_late_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller of `spawn` means to read after it: a deadlock that mp.spawn does not explain."""
    queue: multiprocessing.Queue[bytes] = multiprocessing.get_context("spawn").Queue()
    with caplog.at_level(logging.WARNING):
        error = World(folder=tmp_path).spawn_fails(
            "finish", programs.leave_a_queue, queue, within_s=CRASH_S + 6, timeouts={"finish": 6}
        )
    assert "read the queue before you wait for the ranks" in caplog.text
    assert "a process that reads the items of a multiprocessing.Queue" in str(error)
    assert "for which its reader waits for ever" in str(error)


def test_what_is_not_done_within_the_limit_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning and the error name the rank and its thread; a success would hide what was cut off."""
    with caplog.at_level(logging.WARNING):
        error = World(folder=tmp_path).launch_fails(
            "finish", programs.leave, "a thread", within_s=CRASH_S + 5, timeouts={"finish": 5}
        )
    require_complete_message(error)
    assert error.missing_ranks == (1,)
    (waits,) = [line for line in caplog.messages if line.startswith("rank ")]
    for text in (waits, str(error)):
        assert f"thread 'uploader' at {programs.__file__}:" in text
        assert "in _work_on" in text
        assert "timeouts.finish" in text


def test_the_launcher_sleeps_until_the_ranks_have_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that are due only while ranks run would wake it all the time and keep a core busy."""
    limits_s: list[float] = []

    def counted(handles: Iterable[int], timeout: float) -> list[object]:
        limits_s.append(timeout)
        return list(wait(handles, timeout))

    monkeypatch.setattr(supervisor, "wait", counted)
    World(folder=tmp_path).launch_fails(
        "finish", programs.leave, "a thread", within_s=CRASH_S + 3, timeouts={"finish": 3}
    )
    assert len(limits_s) < 100


def test_an_abort_after_the_end_of_the_function_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No function of the user's runs then, so it is not a failure, and not silent either."""
    with caplog.at_level(logging.WARNING):
        result = World(folder=tmp_path).launch(programs.leave, "an abort")
    assert result.values == {0: 0, 1: 1}
    (line,) = [line for line in caplog.messages if line.startswith("rank ")]
    assert line.startswith("rank 1 was killed by SIGABRT after it had returned")


@pytest.mark.full
def test_a_slow_exit_handler_is_reported_as_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread is to blame: the main thread runs what the script registered with `atexit`."""
    with caplog.at_level(logging.WARNING):
        World(folder=tmp_path).launch_fails(
            "finish",
            programs.leave,
            "an exit handler",
            within_s=CRASH_S + 4,
            timeouts={"finish": 4},
        )
    waits = next(line for line in caplog.messages if line.startswith("rank "))
    assert "it waits for exit handlers (atexit)" in waits
    assert "MainThread" not in waits


@pytest.mark.full(but=["thread-SIGKILL--"])
@pytest.mark.parametrize(
    ("where", "how", "error", "code"),
    [
        ("thread", "SIGKILL", ddpsafe.RankKilledError, 137),
        ("thread", "SIGSEGV", ddpsafe.RankKilledError, 139),
        ("thread", "_exit", ddpsafe.RankExitedError, 9),
        ("exit", "SIGKILL", ddpsafe.RankKilledError, 137),
        ("exit", "_exit", ddpsafe.RankExitedError, 9),
        ("exit", "SIGSEGV", ddpsafe.RankKilledError, 139),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_dies_in_what_it_left_running_has_failed(
    tmp_path: Path, where: str, how: str, error: type[ddpsafe.RankFailedError], code: int
) -> None:
    """An upload that the kernel kills is lost, although the function has returned."""
    failed = World(folder=tmp_path).launch_fails(error, programs.die_later, where, how)
    assert (failed.rank, failed.exit_code) == (1, code)
    assert "while leaving" in str(failed)
    assert failed.outcomes[0].status == "returned"


@pytest.mark.full
def test_what_the_end_of_a_failed_rank_cuts_off_is_told(tmp_path: Path) -> None:
    """Threads and exit functions of a rank that has failed have the grace period, and its error stays first."""
    source = """
        import atexit, sys, threading, time
        if sys.argv[1] == "thread":
            threading.Thread(target=time.sleep, args=[600], name="uploader").start()
        else:
            atexit.register(time.sleep, 600)
        if sys.argv[2] == "exit":
            sys.exit(3)
        raise ValueError("bad batch")
    """
    scripts.write(tmp_path, "train.py", source)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "1", "--timeouts.grace", "2"]
    command += ["--run-dir", "run"]
    for what, how, code, told in (
        ("thread", "exit", 3, "rank 0 waits for thread 'uploader'"),
        ("atexit", "raise", 1, "rank 0 waits for exit handlers (atexit)"),
    ):
        run = scripts.Script([*command, "train.py", what, how], folder=tmp_path).end()
        assert run.code == code, run.err
        assert f"(timeouts.grace); {told}" in run.err
        assert ("exited with code 3" if how == "exit" else "bad batch") in run.err
