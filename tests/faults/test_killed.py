"""A rank is ended by a signal."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import crash_programs as programs
import pytest
from fault_kit import SIZES, WORLDS, World, require_rank, run_script
from join_programs import KillsWhoLoads
from training_programs import return_rank, train, train_by_hand

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("fault", "signum"),
    [
        (programs.die_by_kill, signal.SIGKILL),
        (programs.die_by_terminate, signal.SIGTERM),
        (programs.die_by_null_pointer, signal.SIGSEGV),
        (programs.die_by_short_mapping, signal.SIGBUS),
        (programs.die_by_abort, signal.SIGABRT),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGSEGV", "SIGBUS", "SIGABRT"],
)
@pytest.mark.parametrize("ranks", SIZES)
def test_the_signal_is_named(
    tmp_path: Path, ranks: int, fault: Callable[..., Any], signum: signal.Signals
) -> None:
    """With its number as a fact, and 128 + signal for the script's exit status."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankKilledError, train, fault)
    require_rank(error, 1)
    assert (error.signal, error.exit_code, error.kind) == (signum, 128 + signum, "killed")
    assert f"was killed by {signum.name} " in str(error)


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_in_an_unported_script(tmp_path: Path, ranks: int, start_method: str) -> None:
    """The same under `spawn`."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.spawn_fails(ddpsafe.RankKilledError, train_by_hand, programs.die_by_kill)
    require_rank(error, 1)


@pytest.mark.parametrize(
    "fault", [programs.die_by_null_pointer, programs.die_by_short_mapping, programs.die_by_abort]
)
def test_a_crash_in_native_code_shows_the_python_line_that_led_there(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """The last words of the process are in the message, the whole stack in the log."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankKilledError, train, fault)
    assert f"in {fault.__name__}" in str(error)
    assert error.log_path is not None
    assert "Fatal Python error" in error.log_path.read_text()


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_before_its_function_runs(tmp_path: Path, start_method: str) -> None:
    """A rank that died while it loaded its arguments is not waited for."""
    world = World(folder=tmp_path, start_method=start_method)
    error = world.launch_fails(ddpsafe.RankKilledError, return_rank, KillsWhoLoads(tmp_path))
    require_rank(error, 1)
    assert "while loading the function and its arguments" in str(error)


def test_after_its_value_has_arrived(tmp_path: Path) -> None:
    """A rank that is killed after it has returned has done its work: the result stands."""
    world = World(folder=tmp_path)
    assert world.launch(programs.be_killed_at_exit).values == {0: 0, 1: 1}


def test_in_a_caller_that_takes_the_exit_status(tmp_path: Path) -> None:
    """A handler that waits for any child: it is not said that the rank exited by itself."""
    statements = """
        from crash_programs import die_by_kill
        from training_programs import train
        def reap(*_):
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
        signal.signal(signal.SIGCHLD, reap)
        ddpsafe.launch(train, (folder, die_by_kill), **options)
    """
    run = run_script(tmp_path, statements)
    assert run.code in (1, 128 + signal.SIGKILL), run.err  # whoever is first learns it
    said = "was killed by SIGKILL" if run.code != 1 else "a handler of SIGCHLD or os.wait()"
    assert said in run.err
    assert "rank 1 (world_size 2)" in run.err


def test_in_a_caller_that_ignores_the_end_of_its_children(tmp_path: Path) -> None:
    """With SIGCHLD ignored the kernel keeps no exit status; the caller's choice comes back after."""
    statements = """
        from crash_programs import die_by_kill
        from training_programs import train
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            ddpsafe.launch(train, (folder, die_by_kill), **options)
        finally:
            print(signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN)
    """
    run = run_script(tmp_path, statements)
    assert run.code == 128 + signal.SIGKILL, run.err
    assert "was killed by SIGKILL" in run.err
    assert run.out == "True\n"


def test_the_fork_server_itself(tmp_path: Path) -> None:
    """How its ranks end can no longer be known; the next launch has a new one."""
    statements = """
        from training_programs import return_rank
        def kill_the_server(ctx):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
        try:
            ddpsafe.launch(kill_the_server, **options)
        except ddpsafe.RankExitedError as error:
            print(error.exit_code, error)
        ddpsafe.launch(return_rank, **options)
    """
    run = run_script(tmp_path, statements)
    assert run.code == 0, run.err
    assert run.out.startswith("255 rank ")
    assert "fork server was killed, so the exit codes of its ranks are lost" in run.out
