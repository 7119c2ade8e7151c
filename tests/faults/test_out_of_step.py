"""Ranks get out of step: one makes fewer collectives than the others, or exits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import collective_programs as programs
import hang_programs
import pytest
from fault_kit import (
    BY_TIMEOUT,
    COLLECTIVE_S,
    HANG_S,
    WORLDS,
    World,
    require_hang,
    require_places,
    require_rank,
)
from training_programs import average_gradients, do_nothing_about_it

import ddpsafe
from ddpsafe._wire.foreign_texts import find_handled_errors

KEPT_COLLECTIVES = 16
"""How many collectives of each group are kept as evidence."""

EARLY_RETURN_S = 3.0
"""Two looks, half a second apart, find a rank that returned early; no timeout is involved."""

UNRECORDED_S = 6.0
"""A rank that has returned keeps its connections for 3 s."""


@pytest.mark.full(but=["2-1"])
@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (4, 2)])
def test_a_rank_that_skips_an_all_reduce_is_named(tmp_path: Path, ranks: int, culprit: int) -> None:
    """It is alone in its next collective; of two ranks, both are named. The message has both calls."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails("collective", programs.skip_one, culprit, **BY_TIMEOUT)
    require_hang(error, culprit, or_rank=0 if ranks == 2 else None)
    assert "all_gather number 5 " in str(error)
    assert "all_reduce number 5 " in str(error)
    assert "in skip_one, " in str(error)


@pytest.mark.full(but=["[5, 3]-1"])
@pytest.mark.recorder
@pytest.mark.parametrize(
    ("batches", "culprit"), [([5, 3], 1), ([3, 5], 0), ([5, 5, 3, 4], 2)], ids=str
)
def test_the_rank_that_runs_out_of_batches_first_is_named(
    tmp_path: Path, batches: list[int], culprit: int
) -> None:
    """The failure is reported long before any timeout, and the advice mentions Join."""
    world = World(folder=tmp_path, ranks=len(batches))
    error = world.launch_fails(
        ddpsafe.RankLeftEarlyError, programs.run_out_of_batches, batches, within_s=EARLY_RETURN_S
    )
    require_rank(error, culprit)
    assert error.exit_code == 1
    assert "returned early" in str(error)
    assert "Join" in str(error)


@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_that_returns_early_is_blamed(tmp_path: Path, ranks: int, start_method: str) -> None:
    """`mp.spawn` and torchrun blame a rank that was still working."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails(
        ddpsafe.RankLeftEarlyError, programs.return_early, within_s=EARLY_RETURN_S
    )
    require_rank(error, 1)


@pytest.mark.full(but=["wait_for_irecv"])
@pytest.mark.parametrize(
    "wait", [programs.wait_for_irecv, programs.wait_in_monitored_barrier, average_gradients]
)
def test_a_rank_that_returns_early_is_blamed_for_waits_that_torch_does_not_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]
) -> None:
    """It does not stay for others that need nothing of it, so those that do see its connections close."""
    if wait is average_gradients:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # a check of torch's comes first
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.RankLeftEarlyError, programs.return_early, wait, within_s=UNRECORDED_S
    )
    require_rank(error, 1)
    assert not re.search("(timed out|lost a peer) in all_reduce number 1 ", str(error)), error


def test_a_rank_that_skips_the_monitored_barrier_of_a_group_is_named(tmp_path: Path) -> None:
    """In its error torch has the number in the group, and it records no such barrier: by its records, rank 0 is behind."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        "collective", programs.skip_the_monitored_barrier_of_a_group, within_s=2 + HANG_S
    )
    require_hang(error, 2)
    assert "rank 2 (world_size 3) did not reach torch's monitored barrier in time" in str(error)
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms, with the" in str(error)
    assert "timed out in monitored_barrier" in str(error)


@pytest.mark.full
@pytest.mark.recorder
@pytest.mark.parametrize("calls", [0, 2])
def test_a_rank_that_returns_early_from_a_second_group_is_blamed(
    tmp_path: Path, calls: int
) -> None:
    """A new group counts from 1, so calls in the first group do not put the rank ahead."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.RankLeftEarlyError,
        programs.come_apart_in_the_second_group,
        do_nothing_about_it,
        calls,
        within_s=EARLY_RETURN_S,
    )
    require_rank(error, 1)


@pytest.mark.full
def test_a_rank_that_hangs_in_a_second_group_is_named(tmp_path: Path) -> None:
    """The waiting rank, whose calls in the first group are long past, is not named."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        "collective",
        programs.come_apart_in_the_second_group,
        hang_programs.sleep,
        KEPT_COLLECTIVES - 1,
        COLLECTIVE_S,
        within_s=COLLECTIVE_S + HANG_S,
    )
    require_hang(error, 1)


@pytest.mark.full
@pytest.mark.recorder
def test_a_rank_that_enters_after_the_timeout_is_named(tmp_path: Path) -> None:
    """By then all ranks are in the same collective; the message shows how late the rank was."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails("collective", programs.come_after_the_timeout, **BY_TIMEOUT)
    require_hang(error, 1)
    assert re.search(
        r"entered all_reduce number 2 of shape \[\d+\] \d\.\d s after the others at ", str(error)
    ), error


@pytest.mark.full
@pytest.mark.recorder
def test_ranks_that_receive_from_each_other_are_shown_in_recv(tmp_path: Path) -> None:
    """They are in no collective: the last one completed, so it is not reported as timed out."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.receive_from_each_other, **BY_TIMEOUT
    )
    assert error.missing_ranks == ()
    for rank in range(2):
        line = rf"rank {rank}, .* in recv from rank {1 - rank}, after all_reduce number 1 "
        assert re.search(line, str(error)), error
    assert " in all_reduce" not in str(error)


@pytest.mark.full
@pytest.mark.recorder
def test_a_rank_that_does_not_send_is_named(tmp_path: Path) -> None:
    """The receiver is behind only because of it; the message shows which rank it receives from."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        "collective", programs.send_nothing, **BY_TIMEOUT
    )
    require_hang(error, 1)
    line = r"rank 0, .* in recv from rank 1, after all_reduce number 1 "
    assert re.search(line, str(error)), error


@pytest.mark.full
def test_a_rank_may_work_alone_after_the_others_have_returned(tmp_path: Path) -> None:
    """Rank 0 saves and evaluates by itself at the end, and no rank waits for it."""
    world = World(folder=tmp_path)
    assert world.launch(programs.work_alone_at_the_end, 2.0).values == {0: "saved", 1: "done"}


@pytest.mark.recorder
@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("enters the collective", "entered all_reduce number 2 of shape [8] only 0."),
        pytest.param(
            "enters another one", "entered barrier number 2 only 0.", marks=pytest.mark.full
        ),
        pytest.param(
            "returns", "returned only when another rank had given up", marks=pytest.mark.full
        ),
    ],
)
def test_what_a_rank_does_after_another_one_gave_up_is_a_consequence(
    tmp_path: Path, then: str, said: str
) -> None:
    """The lock that it waited for came free by that. Its line and position from before count, and both are shown."""
    error = World(folder=tmp_path).launch_fails(
        "collective",
        hang_programs.hold_a_lock_in_a_collective,
        then,
        timeouts={"collective": 6},
        within_s=6 + HANG_S,
    )
    require_hang(error, 1)
    text = str(error)
    assert f"rank 1 (world_size 2) is behind at {hang_programs.__file__}:" in text
    assert "in all_reduce number 2 of shape [8]" in text
    assert "such as the lock of a file" in text
    assert said in text
    assert "entered all_reduce number 2 of shape [8] 6." not in text
    assert require_places(error, [1]) == {1: "hold_a_lock_in_a_collective"}


@pytest.mark.recorder
@pytest.mark.parametrize(
    ("when", "kind"),
    [
        ("forward", ddpsafe.RankLeftEarlyError),
        pytest.param("backward", ddpsafe.RankRaisedError, marks=pytest.mark.full),
    ],
)
def test_an_error_that_a_rank_swallowed_is_shown(
    tmp_path: Path, when: str, kind: type[ddpsafe.RankFailedError]
) -> None:
    """Skipping a batch on one rank is what puts it out of step; only its output shows that."""
    error = World(folder=tmp_path).launch_fails(
        kind, programs.swallow_an_error, when, within_s=EARLY_RETURN_S
    )
    require_rank(error, 1)
    text = str(error)
    assert "the rank probably handled the error below and skipped calls" in text
    assert "rank 1 has written about an error, and continued:" in text
    assert "| step 2: MemoryError, skipping this batch" in text
    assert "drop_last" not in text


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("step 3: CUDA out of memory, retrying with a smaller batch", True),
        ("WARNING skipped corrupt sample 17", True),
        ("ValueError: cannot identify image file", True),
        ("caught exception in data loader: truncated file", True),
        ("ignoring bad batch 4", True),
        ("epoch 3: train error 0.031, val error 0.044", False),
        ("dropout 0.1, samples 60000, drop_last True", False),
        ("skip connections: 12", False),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:5112", False),
        ("FutureWarning: use torch.amp; AttributeError in the next release", False),
        ("step 100, loss 0.2", False),
        ("step 3: skipped, CUDA OOM", True),
        ("failed to decode /data/3.jpg, skipping", True),
        ("ERROR:root:cannot read /data/3.jpg", True),
        ("KeyError: 17", True),
        ("step 3 loss=0.51 val_error=0.123 MeanSquaredError=0.2", False),
        ("Epoch 3 | WordError: 0.33 | TopKError: .23", False),
        ("MeanAbsoluteError: 0.5", False),
        ("Skipping download: the file /data/mnist.gz exists", False),
        ("No checkpoint found, ignoring --resume; first step is 0", False),
        ("Exception ignored in: <function f at 0x7f>", False),
        ("WARNING: no exception handler", False),
        ("caught up with the last step", False),
    ],
)
def test_only_lines_about_a_handled_error_are_shown(line: str, is_found: bool) -> None:  # noqa: FBT001 - a row
    """Metrics and options that share a word with errors are not among them."""
    assert bool(find_handled_errors(line)) is is_found
