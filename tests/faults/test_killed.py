"""A signal ends a rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exception_programs as programs
import pytest
import scripts
from fault_kit import WORLD_SIZES, WORLDS, World, require_rank, run_script
from join_programs import FailsToLoad
from training_programs import return_rank, train, train_by_hand

import ddpsafe


@pytest.mark.full(but=["3-SIGKILL", "3-SIGSEGV"])
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
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_a_signal_ends_is_blamed_and_the_signal_named(
    tmp_path: Path, ranks: int, fault: Callable[..., Any], signum: signal.Signals
) -> None:
    """The error has the signal's number, and 128 + signal as the script's exit status."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankKilledError, train, fault)
    require_rank(error, 1)
    assert (error.signal, error.exit_code, error.kind) == (signum, 128 + signum, "killed")
    assert f"was killed by {signum.name} " in str(error)


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_of_an_unported_script_that_is_killed_is_blamed(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """`spawn` reports it as `launch` does."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.spawn_fails(ddpsafe.RankKilledError, train_by_hand, programs.die_by_kill)
    require_rank(error, 1)


@pytest.mark.full(but=["die_by_null_pointer"])
@pytest.mark.parametrize(
    "fault", [programs.die_by_null_pointer, programs.die_by_short_mapping, programs.die_by_abort]
)
def test_a_crash_in_native_code_shows_the_python_line(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """The message has the Python line that led to the crash, and the log has the whole stack."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankKilledError, train, fault)
    assert f"in {fault.__name__}" in str(error)
    assert error.log_path is not None
    assert "Fatal Python error" in error.log_path.read_text()


@pytest.mark.full
def test_a_rank_that_has_used_its_processor_time_is_told_from_one_killed_for_memory(
    tmp_path: Path,
) -> None:
    """The kernel sends SIGKILL at the hard limit, which ``ulimit -t`` sets and ranks inherit."""
    statements = """
        import exception_programs, resource
        resource.setrlimit(resource.RLIMIT_CPU, (6, 6))
        ddpsafe.launch(exception_programs.use_the_processor, **options | {"start_method": "spawn"})
    """
    run = run_script(tmp_path, statements)
    assert "rank 1 (world_size 2) was killed by SIGKILL" in run.err
    assert "it has used the 6 s of processor time" in run.err


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_a_rank_that_is_killed_before_its_function_runs_is_blamed(
    tmp_path: Path, start_method: str
) -> None:
    """The launcher does not wait for a rank that died while it loaded its arguments."""
    world = World(folder=tmp_path, start_method=start_method)
    error = world.launch_fails(
        ddpsafe.RankKilledError, return_rank, FailsToLoad(tmp_path, programs.die_by_kill)
    )
    require_rank(error, 1)
    assert "while loading what it is to run" in str(error)


@pytest.mark.full
def test_a_caller_that_reaps_the_rank_does_not_mislead_the_message(tmp_path: Path) -> None:
    """The caller's SIGCHLD handler may take the exit status; the rank did not exit by itself."""
    statements = """
        from exception_programs import die_by_kill
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
    assert run.code in (1, 128 + signal.SIGKILL), run.err  # the first to wait gets the status
    said = "was killed by SIGKILL" if run.code != 1 else "a handler of SIGCHLD or os.wait()"
    assert said in run.err
    assert "rank 1 (world_size 2)" in run.err


@pytest.mark.full
def test_a_kill_is_recognized_in_a_caller_that_ignores_sigchld(tmp_path: Path) -> None:
    """The kernel keeps no exit status while SIGCHLD is ignored; the caller's choice is restored."""
    statements = """
        from exception_programs import die_by_kill
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


@pytest.mark.full
def test_a_killed_fork_server_is_reported_and_replaced(tmp_path: Path) -> None:
    """The exit codes of its ranks are lost; the next launch starts a new fork server."""
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


@pytest.mark.full
@pytest.mark.full
def test_a_killed_rank_leaves_no_folder_of_sockets(tmp_path: Path) -> None:
    """`multiprocessing` makes ``pymp-…`` in the temporary directory, and removes it only at a normal exit."""
    source = """
        import tempfile
        from pathlib import Path
        import ddpsafe, odd_end_programs

        def folders():
            return {*Path(tempfile.gettempdir()).glob("pymp-*")}

        if __name__ == "__main__":
            before = folders()  # of the tests
            try:
                # A fork server would have a folder of its own as long as this process runs.
                fields = {"nproc_per_node": 2, "backend": "gloo", "start_method": "spawn"}
                fields["run_dir"] = Path.cwd() / "run"
                ddpsafe.launch(odd_end_programs.die_with_sockets, **fields)
            except ddpsafe.RankKilledError as error:
                print(error.rank, folders() - before)
    """
    run = scripts.run(tmp_path, source)
    assert run.lines() == ["1 set()"], run.err
