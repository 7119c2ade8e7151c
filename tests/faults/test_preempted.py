"""A scheduler asks the job to stop: the ranks save at the same step, and the exit code asks to requeue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import scripts
import stop_programs as programs
from fault_kit import CRASH_S, World, require_complete_message, require_rank, start_script
from machine import require_in_time

import ddpsafe

EXIT_TRY_AGAIN: Final = 75
"""Exit code that asks for another start: EX_TEMPFAIL."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of all `stop_programs.SCENARIOS`, run by one script."""
    folder = tmp_path_factory.mktemp("scenarios")
    source = """
        from pathlib import Path
        import stop_programs
        if __name__ == "__main__":
            stop_programs.run_scenarios(Path.cwd())
    """
    run = scripts.run(folder, source)
    assert run.code == 0, run.err
    return {
        name: {
            **json.loads((folder / name / "found.json").read_text()),
            "saved": [path.read_text() for path in sorted((folder / name).glob("saved-*"))],
        }
        for name in programs.SCENARIOS
    }


def launch(program: str, fields: str = "") -> str:
    """Return a script that launches one of the stop programs and continues after it."""
    return f"""
        import stop_programs
        ddpsafe.launch(stop_programs.{program}, (folder,), **options, {fields})
        print("the code after launch has run")
    """


@pytest.mark.full
@pytest.mark.parametrize("name", ["order and echo", "warning and order", "warning"])
def test_ranks_at_different_calls_stop_at_the_same_one(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    """Four ranks, each at its own speed and many calls apart, save at the same step; no retry follows."""
    found = outcomes[name]
    assert (found["error"], found["kind"], found["attempt"]) == ("PreemptedError", "preempted", 1)
    assert len(found["saved"]) == 4
    assert len(set(found["saved"])) == 1, f"stopped at different steps: {found['saved']}"
    assert "ranks 0, 1, 2 and 3 (world_size 4) stopped on SIG" in found["text"]
    require_in_time(found["took_s"], CRASH_S, found["text"])


@pytest.mark.parametrize("name", ["all processes", "all processes warned"])
def test_signals_to_all_processes_of_a_job_are_one_request(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    """Systemd and ``scancel --full`` signal every process, and Slurm the group of each task."""
    found = outcomes[name]
    assert found["error"] == "PreemptedError", found["text"]
    assert len(found["saved"]) == 2
    assert len(set(found["saved"])) == 1


def test_helpers_of_ranks_outlive_a_signal_to_all_processes(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    """Workers of loaders, pools, executors and managers work until the ranks have saved; it comes twice."""
    found = outcomes["all processes and helpers"]
    assert found["error"] == "PreemptedError", found["text"]
    assert "ranks 0 and 1 (world_size 2) stopped on SIGTERM" in found["text"]
    assert len(found["saved"]) == 2
    assert len(set(found["saved"])) == 1


def test_what_dies_of_the_request_itself_is_no_failure(outcomes: dict[str, dict[str, Any]]) -> None:
    """A rank needs a program, and that dies of the SIGTERM to all: the job was stopped, it did not fail."""
    found = outcomes["a program died"]
    assert (found["error"], found["attempt"]) == ("PreemptedError", 1), found["text"]
    assert "did not save: SIGTERM to the launcher asked them to" in found["text"]
    assert "died of the same signal" in found["text"]
    assert "died with <Signals.SIGTERM: 15>" in found["text"]


@pytest.mark.full
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", programs.HELPERS)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_helpers_of_each_kind_outlive_a_signal_in_any_order(
    tmp_path: Path, kind: str, method: str, start_method: str, signum: signal.Signals
) -> None:
    """Helpers receive it before their ranks and before the launcher, once more in the middle of the save."""
    fields = f'backend="gloo", start_method={start_method!r}'
    script = f"""
        import stop_programs
        ddpsafe.launch(
            stop_programs.train_with_helpers, (folder, ({kind!r},), {method!r}), nproc_per_node=2, {fields}
        )
    """
    with start_script(tmp_path, script) as job:
        scripts.wait_until(
            lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists()
        )
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in reversed(processes):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signum)
        scripts.wait_until((tmp_path / "saving-0").exists)
        for process in reversed(processes):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        run = job.end()
    assert run.code == EXIT_TRY_AGAIN, run.err
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text()


def test_ranks_that_do_not_return_in_time_are_named_and_ended(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    """Calling `stop_requested()` is not enough: after `timeouts.stop` the launcher ends them."""
    found = outcomes["overdue"]
    assert found["error"] == "PreemptedError", found["text"]
    assert (
        "ranks 0 and 1 (world_size 2) did not return and exit within 1 s of SIGTERM"
        in found["text"]
    )
    assert "in ask_and_go_on" in found["text"]
    assert found["took_s"] > 1
    require_in_time(found["took_s"], CRASH_S + 1)


def test_failure_while_saving_is_reported_and_not_retried(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    """A full disk is the error of the launch, not a clean stop, and there is no new attempt."""
    found = outcomes["full disk"]
    assert (found["error"], found["attempt"]) == ("RankRaisedError", 1)
    assert "rank 1 (world_size 2) raised OSError" in found["text"]


def test_request_after_a_rank_has_returned_changes_nothing(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    """Rank 0 has made all its calls, so the others must not stop at a call that it has passed."""
    assert outcomes["too late"]["values"] == {"0": 40, "1": 40}


def test_ctrl_c_does_not_wait_for_ranks_that_save(outcomes: dict[str, dict[str, Any]]) -> None:
    """Ctrl-C ends them at once, although they have a minute left."""
    found = outcomes["impatience"]
    assert found["error"] == "KeyboardInterrupt"
    require_in_time(found["took_s"], CRASH_S)


def test_exit_code_asks_for_another_start(tmp_path: Path) -> None:
    """The script exits with 75, without a traceback and without running the code after `launch`."""
    with start_script(tmp_path, launch("train_in_step")) as job:
        job.wait_until_up()
        os.kill(job.pid, signal.SIGTERM)
        run = job.end()
    assert (run.code, run.out) == (EXIT_TRY_AGAIN, ""), run.err
    assert "start the same command again" in run.err
    assert "Traceback" not in run.err


def test_sigterm_ends_ranks_that_never_call_stop_requested(tmp_path: Path) -> None:
    """No rank could react, so the launch ends by the signal at once, and reports why."""
    with start_script(tmp_path, launch("never_ask")) as job:
        job.wait_until_up()
        sent = time.monotonic()
        os.kill(job.pid, signal.SIGTERM)
        run = job.end()
        require_in_time(time.monotonic() - sent, CRASH_S)
    assert run.code == -signal.SIGTERM
    assert run.err.count("no rank has called stop_requested() yet") == 1


@pytest.mark.full
def test_a_warning_before_the_first_step_is_remembered(tmp_path: Path) -> None:
    """SIGUSR1 while ranks still load stops them at their first call of `stop_requested()`."""
    with start_script(tmp_path, launch("ask_late")) as job:
        job.wait_until_up()
        os.kill(job.pid, signal.SIGUSR1)
        scripts.wait_until(lambda: "the stop begins when one does" in job.errors())
        (tmp_path / "go").touch()
        run = job.end()
    assert run.code == EXIT_TRY_AGAIN, run.err
    assert (tmp_path / "saved-0").exists()


def test_second_sigterm_ends_the_ranks_at_once(tmp_path: Path) -> None:
    """A user who insists need not wait; a repetition within a second does not count."""
    with start_script(tmp_path, launch("ask_and_go_on")) as job:
        job.wait_until_up()
        os.kill(job.pid, signal.SIGTERM)
        scripts.wait_until(lambda: "asked to save and return" in job.errors())
        asked_s = time.monotonic()
        scripts.wait_until(lambda: time.monotonic() > asked_s + 1.1)
        os.kill(job.pid, signal.SIGTERM)
        sent = time.monotonic()
        assert job.end().code == -signal.SIGTERM
        require_in_time(time.monotonic() - sent, CRASH_S)


@pytest.mark.full
def test_a_request_to_one_rank_stops_all_and_the_launcher_retries(tmp_path: Path) -> None:
    """Only that rank's host is preempted, so ``on={"preempted"}`` starts another attempt."""
    policy = ddpsafe.RetryPolicy(on={"preempted"}, backoff_initial=0, jitter=0, no_progress=None)
    result = World(folder=tmp_path).launch(programs.try_again, retry=policy)
    assert result.values == {0: "finished attempt 2", 1: "finished attempt 2"}


def test_a_request_to_one_rank_is_explained_without_a_retry(tmp_path: Path) -> None:
    """The message names the rank and the signal, and the same command continues the job."""
    with pytest.raises(ddpsafe.PreemptedError) as caught:
        World(folder=tmp_path).launch(programs.try_again)
    require_complete_message(caught.value)
    assert "SIGTERM to rank 1" in str(caught.value)
    assert len(set(caught.value.values.values())) == 1


@pytest.mark.full
def test_ranks_that_handle_sigterm_are_ended_as_fast_as_others(tmp_path: Path) -> None:
    """Their handler does not keep them alive when another rank has failed."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        ddpsafe.RankKilledError, programs.wait_in_gloo, timeouts={"grace": 20}
    )
    require_rank(error, 1)
    # If its own error comes at the same moment, the rank ignores the signal while it reports that.
    assert error.outcomes[2].exit_code in {-signal.SIGTERM, 128 + signal.SIGTERM}
