"""The launcher dies without cleaning up, and its ranks outlive it by a second at most."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import leftovers
import psutil
import pytest
import scripts
from fault_kit import launch_everything, start_script


@pytest.mark.full(but=["gil-forkserver"])
@pytest.mark.parametrize(
    ("how", "start_method"),
    [
        pytest.param("python", "forkserver", marks=pytest.mark.soak),
        pytest.param("gloo", "forkserver", marks=pytest.mark.soak),
        ("gil", "forkserver"),
        ("gloo", "spawn"),
        pytest.param("gil", "spawn", marks=pytest.mark.soak),
    ],
)
def test_sigkill_of_the_launcher_ends_everything_it_started(
    tmp_path: Path, how: str, start_method: str
) -> None:
    """Ranks in Python, in C++ or with the GIL held, DataLoader workers and stubborn children end."""
    with start_script(tmp_path, launch_everything(how, start_method)) as job:
        job.wait_until_up()
        os.kill(job.pid, signal.SIGKILL)
        assert job.end().code == -signal.SIGKILL
        job.require_all_ended()


@pytest.mark.root
def test_ranks_that_changed_their_user_end_with_roots_launcher(tmp_path: Path) -> None:
    """The change clears the kernel's parent-death signal, and these ranks also hold the GIL."""
    statement = "ddpsafe.launch(orphan_programs.become_another_user, (folder,), **options)"
    with start_script(tmp_path, statement) as job:
        job.wait_until_up()
        pids = [int(pid) for path in tmp_path.glob("pids-?") for pid in path.read_text().split()]
        scripts.wait_until(lambda: {psutil.Process(pid).uids().real for pid in pids} == {65534})
        os.kill(job.pid, signal.SIGKILL)
        assert job.end().code == -signal.SIGKILL
        job.require_all_ended()


def test_semaphores_are_removed_when_the_whole_process_group_is_killed(tmp_path: Path) -> None:
    """Python's resource tracker, which would remove them, dies with the launcher."""
    statement = "ddpsafe.launch(orphan_programs.hold_a_semaphore, (folder,), **options)"
    with start_script(tmp_path, statement, session=True) as job:
        job.wait_until_up()
        assert list(leftovers.own_semaphores())
        os.killpg(job.pid, signal.SIGKILL)
        assert job.end().code == -signal.SIGKILL
        job.require_all_ended()
        scripts.wait_until(lambda: not list(leftovers.own_semaphores()))


@pytest.mark.full
def test_os_exit_in_another_thread_ends_the_ranks(tmp_path: Path) -> None:
    """A user's watchdog thread exits in this way."""
    statements = f"""
        def leave():
            orphan_programs.wait_for(folder / "go")
            os._exit(5)

        threading.Thread(target=leave).start()
        {launch_everything("gloo")}
    """
    with start_script(tmp_path, statements) as job:
        job.wait_until_up()
        (tmp_path / "go").touch()
        assert job.end().code == 5
        job.require_all_ended()


@pytest.mark.full
def test_ranks_of_a_daemon_thread_end_when_the_main_thread_raises(tmp_path: Path) -> None:
    """Python freezes the daemon thread that launched, so it cannot end its ranks itself."""
    statements = f"""
        def work():
            {launch_everything("gloo")}

        threading.Thread(target=work, daemon=True).start()
        orphan_programs.wait_for(folder / "go")
        raise ValueError("the main thread dies")
    """
    with start_script(tmp_path, statements) as job:
        job.wait_until_up()
        (tmp_path / "go").touch()
        run = job.end()
        assert run.code == 1
        assert "ValueError: the main thread dies" in run.err
        job.require_all_ended()


@pytest.mark.full
def test_an_exception_in_a_helper_thread_does_not_disturb_the_launch(tmp_path: Path) -> None:
    """Python reports the exception and continues, and so does the launch."""
    statements = """
        def fail():
            orphan_programs.wait_for(folder / "ready-1")
            try:
                raise ValueError("a helper dies")
            finally:
                (folder / "go").touch()

        threading.Thread(target=fail).start()
        print(ddpsafe.launch(orphan_programs.wait_for_go, (folder,), **options).values)
    """
    with start_script(tmp_path, statements) as job:
        run = job.end()
    assert run.lines() == ["{0: 'went', 1: 'went'}"]
    assert "ValueError: a helper dies" in run.err
