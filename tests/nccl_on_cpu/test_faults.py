"""Ranks that end as NCCL ends them, with recorded watchdog messages: who is blamed, and what they say."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import machine
import nccl_programs as programs
import pytest
from nccl_programs import TIMED_OUT, nccl2_words, thrown_words, watchdog_words

import ddpsafe
from ddpsafe._errors import FailureKind
from ddpsafe._launcher.diagnosis.rank_readings import read_position
from ddpsafe._wire.foreign_texts import (
    WatchdogPlace,
    find_kind,
    find_native_error,
    find_peer_origin,
    read_places,
    says_that_it_ends,
)
from ddpsafe._wire.messages import MAIN_GROUP


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


DIST = "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, "


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        (DIST + "remote process exited or there was a network error, NCCL version 2.27.5", "peer-lost"),
        ("DistBackendError: ncclRemoteError: A call failed possibly due to a network error", "peer-lost"),
        ("DistBackendError: ncclSystemError: System call (e.g. socket, malloc) or external library call failed\nLast error: socketProgress: Connection closed by remote peer node-2<41>", "peer-lost"),
        (DIST + "Last error:\nsocketStartConnect: Connect to 10.37.12.78<46417> failed : Software caused connection abort", "peer-lost"),
        ("RuntimeError: Net : Connect to 192.168.1.9<54263> failed : No route to host", "peer-lost"),
        ("DistBackendError: NET/IB : Got completion from peer 11.2.1.7<39138> with error 12, opcode 0, len 0, vendor err 129", "peer-lost"),
        ("DistBackendError: NET/IB: Got completion from peer 11.2.1.7<39138> with status=12 opcode=0", "peer-lost"),
        ("DistBackendError: NCCL communicator was aborted on rank 1.", "peer-lost"),
        ("DistBackendError: NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "timeout"),
        ("DistBackendError: NCCL communicator was aborted on rank 1. Original reason for failure was: CUDA error: uncorrectable ECC error encountered", None),
        ("DistBackendError: NCCL communicator encountered error set by ProcessGroupNCCL", "peer-lost"),
        ("DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)", "timeout"),
        ("DistBackendError: [Rank 0] Work WorkNCCL(SeqNum=4, OpType=ALLREDUCE) timed out in blocking wait.", "timeout"),
        ("DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout", "timeout"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", None),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", None),
        ("DistBackendError: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2", None),
    ],
)  # fmt: skip
def test_exceptions_that_blame_another_rank_are_recognised(text: str, origin: str | None) -> None:
    """An NCCL error about a lost peer or a wait does not blame the rank that raises it."""
    assert find_peer_origin(text) == origin


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "hardware"),
        ("AcceleratorError: CUDA error: unknown error", "hardware"),
        ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment", "hardware"),
        ("DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999 'unknown error'", "hardware"),
        ("AcceleratorError: CUDA error: hardware stack error", "hardware"),
        ("AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "hardware"),
        ("RuntimeError: Unable to determine the device handle for GPU0000:03:00.0: GPU is lost.  Reboot the system to recover this GPU", "hardware"),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "hardware"),
        ("RuntimeError: all CUDA-capable devices are busy or unavailable", "hardware"),
        ("RuntimeError: CUDA error: system not yet initialized", "hardware"),
        ("RuntimeError: No CUDA GPUs are available", "hardware"),
        ("NVMLError: GPU has fallen off the bus", "hardware"),
        ("RuntimeError: uncorrectable NVLink error detected during the execution", "hardware"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out-of-memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out-of-memory"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "out-of-memory"),
        ("AcceleratorError: CUDA error: out of memory", "out-of-memory"),
        ("DistBackendError: ncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'", "out-of-memory"),
        ("DistBackendError: Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "network"),
        ("DistBackendError: Bootstrap : no socket interface found", "network"),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", None),
        ("AcceleratorError: CUDA error: device-side assert triggered", None),
        ("AcceleratorError: CUDA error: unspecified launch failure", None),
        ("AcceleratorError: CUDA error: the launch timed out and was terminated", None),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", None),
        ("DistBackendError: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2", None),
        ("RuntimeError: CUDA error: invalid device ordinal", None),
        ("ValueError: unknown error in the label file", None),
    ],
)  # fmt: skip
def test_gpu_errors_have_kinds(text: str, kind: FailureKind | None) -> None:
    """An unlisted text is the user's own error, which is not retried."""
    assert find_kind(text) == kind


HEAD = "[rank{r}]:[E1118 20:27:21.426415540 ProcessGroupNCCL.cpp:{line}] "
PG = "[PG ID 0 PG GUID 0(default_pg) Rank {r}] "


def timed_out(rank: int, number: int, queued: int, completed: int, op: str = "ALLREDUCE") -> str:
    """Return the message of the watchdog of torch 2.6 to 2.13 before it waits for the dump."""
    head = HEAD.format(r=rank, line=685)
    return (
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
        f"OpType={op}, NumelIn=131072, NumelOut=131072, Timeout(ms)=600000) ran for 600081 "
        "milliseconds before timing out.\n"
        f"{head}{PG.format(r=rank)} failure detected by watchdog at work sequence id: {number} PG "
        f"status: last enqueued work: {queued}, last completed work: {completed}\n"
    )


def thrown(error: str, rank: int = 0) -> str:
    """Return the message of the watchdog when it ends the process."""
    said = f"{PG.format(r=rank)}Process group watchdog thread terminated with exception: {error}"
    return (
        f"{HEAD.format(r=rank, line=2057)}{said}\n"
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {said}\n"
    )


ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously"
REMOTE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error"
)


@pytest.mark.parametrize(
    ("stderr", "origin", "kind"),
    [
        (timed_out(0, 118, 160, 117), "timeout", None),
        (timed_out(0, 118, 160, 117) + thrown("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL("), "timeout", None),
        (thrown(ECC), "own", "hardware"),
        (thrown("CUDA error: an illegal memory access was encountered"), "own", "user-error"),
        (thrown("CUDA error: device-side assert triggered"), "own", "user-error"),
        (thrown("CUDA error: out of memory"), "own", "out-of-memory"),
        (thrown("NCCL error: unhandled cuda error, NCCL version 2.27\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"), "own", "out-of-memory"),
        (thrown("unknown"), "own", None),
        (thrown(REMOTE), "peer-lost", None),
        (f"{HEAD.format(r=0, line=700)}[Rank 0] Collective WorkNCCL(SeqNum=7, OpType=ALLREDUCE) raised the following async exception: {REMOTE}\n" + timed_out(0, 7, 9, 6), "peer-lost", None),
        (HEAD.format(r=7, line=1743) + PG.format(r=7) + "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", "timeout", None),
        (HEAD.format(r=7, line=1800) + PG.format(r=7) + "Terminating the process after attempting to dump debug info, due to collective timeout or exception.", "timeout", None),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side assert triggered\n", "own", "user-error"),
        ("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 4 vs 2\n", "own", None),
        ("free(): invalid pointer\n", None, None),
        ("", None, None),
        ('[rank0]:[W1229 22:06:38.48 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should dump" flag on TCPStore, with error: Broken pipe', None, None),
    ],
)  # fmt: skip
def test_last_message_of_a_rank_is_evidence_like_an_exception(
    stderr: str, origin: str | None, kind: FailureKind | None
) -> None:
    """A watchdog's timeout was a wait for others; any other reason has its own kind and origin."""
    found = find_native_error(stderr)
    assert (
        (origin, kind) == (None, None)
        if found is None
        else (found.origin, found.kind) == (origin, kind)
    )
    if found is not None:
        assert found.text in stderr


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (timed_out(0, 118, 160, 117), [WatchdogPlace(group=MAIN_GROUP, number=118, queued=160,
            completed=117, operation="ALLREDUCE", numel="131072")]),
        ("[rank1]:[E1218 20:27:21.48 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 1 Rank 1]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 547, last completed work: -1",
            [WatchdogPlace(group="1", number=1, queued=547, completed=0)]),
        ("[E ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0 Rank 1]  failure detected by watchdog at work sequence id: 2 PG status: last enqueued work: 3, last completed work: 1",
            [WatchdogPlace(group=MAIN_GROUP, number=2, queued=3, completed=1)]),
        (HEAD.format(r=1,
            line=1620) + PG.format(r=1) + "Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 117, last completed NCCL work: 117.This is most likely caused by",
            [WatchdogPlace(group=MAIN_GROUP, number=117, queued=117, completed=117)]),
        ("", []),
    ],
)  # fmt: skip
def test_watchdog_message_shows_where_its_rank_is(
    stderr: str, expected: list[WatchdogPlace]
) -> None:
    """The rank that the others wait for prints one too: the dump signal reaches all ranks."""
    assert read_places(stderr) == expected


def test_position_is_read_from_the_messages_of_a_rank_that_has_ended() -> None:
    """It has the last completed, the waiting and the last enqueued collective."""
    found = read_position(timed_out(0, 118, 160, 117), None)
    assert found is not None
    assert [(each.number, each.state) for each in found.collectives] == [
        (117, "completed"),
        (118, "queued"),
        (160, "queued"),
    ]
    at = found.newest()
    assert at is not None
    assert (str(at), at.is_of_watchdog) == ("ALLREDUCE number 118 of shape [131072]", True)


@pytest.mark.parametrize(
    ("written", "ends"),
    [
        (timed_out(0, 118, 160, 117), True),
        (thrown(ECC), True),
        ("[E ProcessGroupNCCL.cpp:475] [PG 0 Rank 3] failure detected by watchdog at work sequence id: 4", True),
        (nccl2_words(3, TIMED_OUT), True),
        # Printed by the script itself, by its own logger, or as a warning.
        (f"Aborting process on rank 3 due to {TIMED_OUT}", False),
        ("failure detected by watchdog at work sequence id: 118", False),
        ("Process group watchdog thread terminated with exception: none", False),
        ("[I1118 20:27:21 ProcessGroupNCCL.cpp:1] [PG ID 0] Process group watchdog thread started", False),
        ("epoch 3: 100%|####| 118/118", False),
    ],
)  # fmt: skip
def test_only_torchs_own_messages_end_an_attempt_early(written: str, ends: bool) -> None:  # noqa: FBT001 - a row's value
    """A rank that is about to abort can still be asked; one that only prints the same text is not ended."""
    assert says_that_it_ends(written.encode()) is ends


@pytest.mark.parametrize(
    ("reason", "before", "origin", "kind"),
    [
        (TIMED_OUT, "Operation timed out after 3000 ms", "timeout", None),
        ("timeout - collective operation timed out", "", "timeout", None),
        ("error - nccl hit async error: remote process exited or there was a network error", "", "peer-lost", None),
        ("error - nccl hit async error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "", "own", None),
        ("error - timeout watchdog detected operation error", "CUDA error during end event query: device-side assert triggered", "own", "user-error"),
        ("error - timeout watchdog detected operation error", "CUDA error during end event query: out of memory", "own", "out-of-memory"),
        ("error - timeout watchdog detected operation error", "CUDA error during start event query: uncorrectable ECC error encountered", "own", "hardware"),
        ("error - timeout watchdog detected operation error", "CUDA error during end event query: unknown error", "own", "hardware"),
    ],
)  # fmt: skip
def test_nccl_of_torch_2_15_says_why_it_aborts(
    reason: str, before: str, origin: str, kind: FailureKind | None
) -> None:
    """It has other words than the first implementation, and the error of CUDA stands on a line before."""
    found = find_native_error(nccl2_words(0, reason, before))
    assert found is not None
    assert (found.origin, found.kind) == (origin, kind)


@pytest.mark.parametrize(("error", "origin"), [(REMOTE, "peer-lost"), (ECC, "own")])
def test_first_error_of_nccl_decides_not_the_timeouts_that_follow(error: str, origin: str) -> None:
    """A remote error comes first, then the timeout of what was enqueued behind it."""
    found = find_native_error(thrown(error) + timed_out(0, 9, 9, 8))
    assert found is not None
    assert found.origin == origin
