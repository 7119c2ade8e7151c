"""Ranks that end as NCCL ends them, with recorded watchdog messages: who is blamed."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import machine
import nccl_programs as programs
import pytest
from nccl_programs import TIMED_OUT, nccl2_words, thrown_words, watchdog_words

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path


def fails(
    folder: Path, words: programs.Words, *options: Any, ranks: int = 3, **fields: Any
) -> ddpsafe.LaunchError:
    """Launch ranks that print and act so; return the error."""
    with pytest.raises(ddpsafe.LaunchError) as caught:
        ddpsafe.spawn(
            programs.act,
            args=(folder, words, *options),
            nprocs=ranks,
            start_method="forkserver",
            run_dir=folder,
            timeouts={"grace": 1},
            **fields,
        )
    return caught.value


def at(*ranks: int, **places: int) -> programs.Words:
    """Return messages of watchdogs that time out in collective 118."""
    usual = {"number": 118, "queued": 160, "completed": 117}
    return {rank: watchdog_words(rank, **usual | places) for rank in ranks}


@pytest.mark.full(but=["abort"])
@pytest.mark.parametrize("then", ["abort", "wait for the dump"])
def test_rank_that_reads_from_a_dead_mount_is_blamed(tmp_path: Path, then: str) -> None:
    """Ranks 0 and 2 only waited for it, so the aborts of their watchdogs are not their own failures.

    The message alone ends the attempt, while the ranks still live and can be asked: torch waits up to
    a minute between the message and the abort.
    """
    began_s = time.monotonic()
    error = fails(tmp_path, at(0, 2), then)
    assert error.setting == "collective", error
    assert (error.missing_ranks, error.kind) == ((1,), "hang")
    assert "read_next_batch_from_dead_mount" in error.stacks[1]
    assert "rank 1 (world_size 3) is behind" in str(error)
    assert "ALLREDUCE number 118" in str(error)
    assert time.monotonic() - began_s < machine.hang_limit(30)


@pytest.mark.parametrize("then", ["abort", "wait for the dump"])
def test_rank_that_hangs_is_blamed_under_nccl_of_torch_2_15(tmp_path: Path, then: str) -> None:
    """Its message has no numbers, and a rank that aborts is none that failed."""
    words = {
        rank: nccl2_words(rank, TIMED_OUT, "Operation timed out after 3000 ms") for rank in (0, 2)
    }
    error = fails(tmp_path, words, then)
    assert error.setting == "collective", error
    assert error.kind == "hang"
    assert "read_next_batch_from_dead_mount" in error.stacks[1]
    assert 1 in error.missing_ranks or not error.missing_ranks


@pytest.mark.full
def test_nccl_timeout_is_retried_as_a_hang(tmp_path: Path) -> None:
    """It must not count as a kill, or ``RetryPolicy(on={"hang"})`` would not apply."""
    error = fails(
        tmp_path,
        at(0),
        "abort",
        ranks=2,
        retry={"attempts": 2, "on": {"hang"}, "backoff_initial": 0},
    )
    assert (error.kind, error.attempt) == ("hang", 2)


@pytest.mark.full(but=["CUDA error: uncorrectable ECC error encountered-hardware-out of service"])
@pytest.mark.parametrize(
    ("words", "kind", "advice"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "hardware", "out of service"),
        ("CUDA error: device-side assert triggered", "user-error", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: out of memory", "out-of-memory", "batch size"),
    ],
)
def test_error_that_the_watchdog_reports_first_has_its_own_kind(
    tmp_path: Path, words: str, kind: str, advice: str
) -> None:
    """A sticky CUDA error ends the process by SIGABRT, and the message has the reason."""
    error = fails(tmp_path, {1: thrown_words(1, words), **at(0)}, "abort")
    assert isinstance(error, ddpsafe.RankKilledError), error
    assert (error.rank, error.kind) == (1, kind)
    assert error.exit_code == -signal.SIGABRT
    assert words in str(error)
    assert advice in str(error)


def test_stuck_link_blames_no_rank(tmp_path: Path) -> None:
    """All ranks have enqueued the same collective, and none completes it."""
    error = fails(tmp_path, {**at(0, 1), **at(2, queued=121)}, "abort")
    assert error.setting == "collective"
    assert error.missing_ranks == ()
    assert "ranks 0, 1 and 2 (world_size 3) all wait in ALLREDUCE number 118" in str(error)


def test_rank_in_a_different_collective_of_the_same_number_is_named(tmp_path: Path) -> None:
    """The watchdogs' messages have the collectives in which their ranks wait."""
    words = {**at(0, 2), 1: watchdog_words(1, 118, 160, 117, "BROADCAST")}
    error = fails(tmp_path, words, "abort")
    assert error.setting == "collective"
    assert error.missing_ranks == (1,)
    assert "entered a different collective" in str(error)


def test_rank_that_raises_is_named_although_the_others_abort(tmp_path: Path) -> None:
    """Its peers' watchdogs see the connection close."""
    lost = "NCCL error: remote process exited or there was a network error"
    error = fails(tmp_path, {0: thrown_words(0, lost), 2: thrown_words(2, lost)}, "abort", 1)
    assert isinstance(error, ddpsafe.RankRaisedError)
    assert (error.rank, error.kind) == (1, "user-error")


def test_watchdog_message_printed_by_a_script_ends_nothing(tmp_path: Path) -> None:
    """Only torch's own log counts as NCCL's watchdog."""
    ddpsafe.spawn(programs.print_the_words, nprocs=2, start_method="forkserver", run_dir=tmp_path)


@pytest.mark.full(but=["variable0"])
@pytest.mark.parametrize(
    "variable", [{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}]
)
def test_script_that_handles_nccl_errors_continues(
    tmp_path: Path, variable: dict[str, str]
) -> None:
    """Then the watchdog does not end the process, so its message does not announce an end."""
    ddpsafe.spawn(
        programs.go_on_after,
        args=(tmp_path,),
        nprocs=2,
        start_method="forkserver",
        run_dir=tmp_path / "run",
        env=variable,
    )
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["went on"] * 2
