"""The launcher receives Ctrl-C, SIGTERM, SIGHUP or SIGQUIT, alone or with its whole terminal."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import scripts
from fault_kit import (
    CRASH_S,
    launch_everything,
    start_script,
    start_script_on_terminal,
    write_script,
)
from machine import require_in_time


@pytest.mark.full(but=["2-gil", "15-gloo", "3-python"])
@pytest.mark.parametrize(
    ("signum", "how"),
    [
        pytest.param(signal.SIGINT, "gloo", marks=pytest.mark.soak),
        (signal.SIGINT, "gil"),
        (signal.SIGTERM, "gloo"),
        (signal.SIGHUP, "python"),
        (signal.SIGQUIT, "python"),
    ],
)
def test_a_signal_ends_the_ranks_and_then_the_launcher(
    tmp_path: Path, signum: signal.Signals, how: str
) -> None:
    """Its exit status is the signal, and no process is left: ranks in C++ or with the GIL, workers, children."""
    with start_script(tmp_path, launch_everything(how)) as job:
        job.wait_until_up()
        sent_s = time.monotonic()
        os.kill(job.pid, signum)
        run = job.end()
        require_in_time(time.monotonic() - sent_s, CRASH_S)
        assert run.code == -signum, run.err
        job.require_all_ended()
    assert f"{signum.name}; no rank is left running" in run.err
    if signum == signal.SIGINT:
        assert run.err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.full(but=["9"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_no_temporary_file_is_left(tmp_path: Path, signum: signal.Signals) -> None:
    """Neither ddpsafe's run directory nor the folder of Python's own helpers, even after SIGKILL."""
    with tempfile.TemporaryDirectory() as temporary:  # short, for the fork server's socket
        statements = f"""
            os.environ["TMPDIR"] = {temporary!r}
            if {signum == signal.SIGKILL}:
                import multiprocessing.process
                start = multiprocessing.process.BaseProcess.start
                die = lambda rank: (start(rank), os.kill(os.getpid(), signal.SIGKILL))
                multiprocessing.process.BaseProcess.start = die
            ddpsafe.launch(orphan_programs.wait_for_go, (folder,), **{{**options, "run_dir": None}})
        """
        with start_script(tmp_path, statements) as job:
            if signum == signal.SIGTERM:
                job.wait_until_up()
                assert list(Path(temporary).iterdir())
                os.kill(job.pid, signum)
            assert job.end().code == -signum
            scripts.wait_until(lambda: not list(Path(temporary).iterdir()), within_s=5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("backoff_s", "signum"),
    [
        pytest.param(60, signal.SIGINT, id="in-the-pause", marks=pytest.mark.soak),
        pytest.param(0, signal.SIGINT, id="in-the-next-attempt", marks=pytest.mark.soak),
        pytest.param(0, signal.SIGKILL, id="killed-in-the-next-attempt"),
    ],
)
def test_the_logs_of_a_failed_attempt_are_kept(
    tmp_path: Path, backoff_s: int, signum: signal.Signals
) -> None:
    """A user who stops the next attempt still wants to know why the first one failed."""
    with tempfile.TemporaryDirectory() as temporary:  # short, for the fork server's socket
        statements = f"""
            from join_programs import die_first_and_then_wait
            os.environ["TMPDIR"] = {temporary!r}
            times = dict(backoff_initial={backoff_s}, backoff_max=60, jitter=0)
            options.update(run_dir=None, retry=ddpsafe.RetryPolicy(on={{"killed"}}, **times))
            ddpsafe.launch(die_first_and_then_wait, (folder,), **options)
        """
        with start_script(tmp_path, statements) as job:
            scripts.wait_until(lambda: "trying again" in job.errors())
            if not backoff_s:
                scripts.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
            os.kill(job.pid, signum)
            run = job.end()
            assert run.code == -signum
            scripts.wait_until(lambda: not list(Path(temporary).glob("pymp-*")), within_s=5)
        (kept,) = Path(temporary).glob("ddpsafe-*")
        assert (kept / "attempt-1" / "report.txt").exists()
        if signum == signal.SIGINT:
            assert f"the logs of the attempts that failed are in {kept}\n" in run.err


def test_ctrl_c_in_the_terminal_ends_the_ranks_in_order(tmp_path: Path) -> None:
    """The terminal signals the launcher's process group, and the ranks are not in it."""
    with start_script_on_terminal(tmp_path, launch_everything("gloo")) as job:
        job.wait_until_up()
        sent_s = time.monotonic()
        job.type("\x03")
        code = job.end().code
        require_in_time(time.monotonic() - sent_s, CRASH_S)
        assert code == -signal.SIGINT
        job.require_all_ended()


@pytest.mark.full
@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM]
)
def test_the_exit_status_is_the_signal_without_a_stderr(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """A closed stderr changes neither the exit status nor the cleanup."""
    python = shlex.join([sys.executable, *write_script(tmp_path, launch_everything("gloo"))])
    with start_script(tmp_path, command=["sh", "-c", f"exec {python} 2>&-"]) as job:
        job.wait_until_up()
        os.kill(job.pid, signum)
        assert job.end().code == -signum
        job.require_all_ended()


@pytest.mark.full
def test_ctrl_c_ends_a_launch_under_asyncio(tmp_path: Path) -> None:
    """The handler of asyncio would only cancel the task, which is blocked in the launch."""
    statements = """
        import asyncio
        async def main():
            ddpsafe.launch(orphan_programs.wait_for_go, (folder,), **options)
        asyncio.run(main())
    """
    with start_script(tmp_path, statements) as job:
        job.wait_until_up()
        sent_s = time.monotonic()
        os.kill(job.pid, signal.SIGINT)
        assert job.end().code == -signal.SIGINT
        require_in_time(time.monotonic() - sent_s, CRASH_S)
        job.require_all_ended()


def test_closing_the_terminal_ends_the_launch(tmp_path: Path) -> None:
    """The SIGHUP of the terminal ends the launcher and the ranks."""
    with start_script_on_terminal(tmp_path, launch_everything("gloo")) as job:
        job.wait_until_up()
        job.hang_up()
        assert job.end().code == -signal.SIGHUP
        job.require_all_ended()


@pytest.mark.full
@pytest.mark.parametrize(
    "program", [pytest.param("nohup", marks=pytest.mark.soak), "its system call"]
)
def test_nohup_lets_the_job_continue(tmp_path: Path, program: str) -> None:
    """An ignored SIGHUP stays ignored; torchrun installs its own handler and stops."""
    launch = "print(ddpsafe.launch(orphan_programs.wait_for_go, (folder,), **options).values)"
    if program == "nohup":
        command = ["nohup", sys.executable, *write_script(tmp_path, launch)]
        started = start_script(tmp_path, command=command)
    else:
        started = start_script(tmp_path, f"signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{launch}")
    with started as job:
        scripts.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        os.kill(job.pid, signal.SIGHUP)
        (tmp_path / "go").touch()
        run = job.end()
    assert run.code == 0, run.err
    assert "{0: 'went', 1: 'went'}" in run.out


@pytest.mark.full
def test_one_ctrl_c_is_enough_for_a_rank_that_ignores_it(tmp_path: Path) -> None:
    """Ranks that ignore SIGTERM and SIGINT are killed after the grace period."""
    with start_script(tmp_path, launch_everything("deaf")) as job:
        job.wait_until_up()
        sent_s = time.monotonic()
        os.kill(job.pid, signal.SIGINT)
        run = job.end()
        require_in_time(time.monotonic() - sent_s, CRASH_S + 1)
        assert run.code == -signal.SIGINT
        assert "still run 1.0 s after SIGTERM" in run.err
        job.require_all_ended()


def test_the_callers_own_handler_is_used_and_kept(tmp_path: Path) -> None:
    """A script that handles SIGTERM decides by itself; the launch ends when its handler raises."""
    statements = """
        class Preempted(Exception):
            pass

        def handle(*_):
            raise Preempted("save now")

        signal.signal(signal.SIGTERM, handle)
        try:
            ddpsafe.launch(orphan_programs.work_with_everything, (folder, "gloo"), **options)
        except Preempted as exc:
            print(exc, signal.getsignal(signal.SIGTERM) is handle)
    """
    with start_script(tmp_path, statements) as job:
        job.wait_until_up()
        sent_s = time.monotonic()
        os.kill(job.pid, signal.SIGTERM)
        run = job.end()
        require_in_time(time.monotonic() - sent_s, CRASH_S)
        assert run.lines() == ["save now True"]
        job.require_all_ended()


def test_a_signal_while_ranks_start_ends_them(tmp_path: Path) -> None:
    """Ctrl-C works during the import of torch, too."""
    statements = """
        from training_programs import return_rank
        (folder / "starting").touch()
        ddpsafe.launch(return_rank, nproc_per_node=4, start_method="spawn")
    """
    with start_script(tmp_path, statements) as job:
        scripts.wait_until((tmp_path / "starting").exists)
        scripts.wait_until(lambda: len(children_of(job.pid)) >= 2)
        sent_s = time.monotonic()
        os.kill(job.pid, signal.SIGINT)
        run = job.end()
        require_in_time(time.monotonic() - sent_s, CRASH_S)
        assert run.code in (-signal.SIGINT, 130), run.err
        job.require_all_ended()


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def handles(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_a_signal_between_attempts_ends_the_launch_at_once(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """The launch does not sit out the backoff, and only the logs of the failure remain."""
    with tempfile.TemporaryDirectory() as temporary:  # short, for the fork server's socket
        statements = f"""
            from exception_programs import die_by_kill
            from training_programs import train
            os.environ["TMPDIR"] = {temporary!r}
            policy = ddpsafe.RetryPolicy(on={{"killed"}}, backoff_initial=60, backoff_max=60)
            options["run_dir"] = None
            ddpsafe.launch(train, (folder, die_by_kill), retry=policy, **options)
        """
        with start_script(tmp_path, statements) as job:
            scripts.wait_until(lambda: "trying again" in job.errors())
            scripts.wait_until(lambda: handles(job.pid, signal.SIGTERM))
            sent_s = time.monotonic()
            os.kill(job.pid, signum)
            run = job.end()
            assert run.code == -signum
            require_in_time(time.monotonic() - sent_s, CRASH_S)
            (logs,) = Path(temporary).glob("ddpsafe-*")
            scripts.wait_until(lambda: not list(Path(temporary).glob("pymp-*")), within_s=5)
            assert f"the logs of the attempts that failed are in {logs}" in run.err
            assert f"{signum.name}; no rank is left running" in run.err
