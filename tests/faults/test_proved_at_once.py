"""A deadlock that can be proved is ended within seconds, with its proof and without a timeout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import World, require_hang, require_places, require_rank

import ddpsafe
from ddpsafe._launcher.watch import deadlock_watch

PROVED_S = 5.0
"""From the fault to the end of the launch."""

PROOF = "this is a deadlock, so ddpsafe did not wait for a timeout:"


@pytest.mark.recorder
def test_a_cycle_over_two_groups_is_proved(tmp_path: Path) -> None:
    """Each rank waits in a different group for the other rank."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.cross_two_groups, within_s=PROVED_S
    )
    assert error.missing_ranks == (0, 1)
    assert error.kind == "hang"
    assert str(error).startswith("ranks 0 and 1 (world_size 2) wait for each other in ")
    assert PROOF in str(error)
    assert "| rank 0 waits in all_reduce number 2 of group '2' of shape [8] for rank 1" in str(
        error
    )
    assert "| rank 1 waits in all_reduce number 2 of group '1' of shape [8] for rank 0" in str(
        error
    )
    assert require_places(error, range(2)) == dict.fromkeys(range(2), "cross_two_groups")


@pytest.mark.recorder
def test_different_sizes_are_proved_if_one_rank_has_returned(tmp_path: Path) -> None:
    """With gloo, the rank that passes fewer elements may complete its side; that proves nothing less."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.reduce_different_sizes, within_s=PROVED_S
    )
    assert error.kind == "hang"
    assert PROOF in str(error)
    assert "all_reduce number 1 of shape [4]" in str(error)
    assert "all_reduce number 1 of shape [3]" in str(error)


@pytest.mark.full
@pytest.mark.recorder
@pytest.mark.parametrize(
    ("kind", "said", "shown"),
    [
        (
            "empty all_gather",
            "rank 1 (world_size 3), unlike the others, passed shape [0] of float32 to all_gather number 2",
            "| rank 1 has left all_gather number 2 of shape [0]",
        ),
        pytest.param(
            "empty asynchronous all_gather",
            "rank 1 (world_size 3), unlike the others, passed shape [0] of float32 to all_gather number 2",
            "| ranks 0 and 2 are in all_gather number 2 of shape [4]",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "empty all_reduce",
            "rank 1 (world_size 3), unlike the others, passed shape [0] of float32 to all_reduce number 2",
            "| rank 1 has left all_reduce number 2 of shape [0]",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "fewer in a reduce",
            "rank 1 (world_size 3), unlike the others, passed shape [3] of float32 to reduce number 2",
            "| rank 1 has left reduce number 2 of shape [3]",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "another root of a broadcast",
            "rank 0 (world_size 3) named rank 0 as the root of broadcast number 2 at ",
            "| rank 1 is in broadcast number 2 of shape [4] with rank 1 as its root",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_has_left_a_collective_which_the_others_cannot_finish_is_proved(
    tmp_path: Path, kind: str, said: str, shown: str
) -> None:
    """It may finish alone; what it passed is compared with what the others pass, and both are shown."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        "collective", programs.leave_the_others, kind, within_s=PROVED_S
    )
    assert str(error).startswith(said)
    assert PROOF in str(error)
    assert shown in str(error)


@pytest.mark.recorder
def test_a_cycle_over_three_ranks_is_proved(tmp_path: Path) -> None:
    """No single group shows the cycle."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        "collective", programs.go_round_in_a_ring, within_s=PROVED_S
    )
    assert error.missing_ranks == (0, 1, 2)
    assert PROOF in str(error)


@pytest.mark.full(but=["2-1"])
@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (4, 1)])
def test_a_skipped_collective_is_proved(tmp_path: Path, ranks: int, culprit: int) -> None:
    """The rank is in a different collective than the others, under the same number."""
    error = World(folder=tmp_path, ranks=ranks).launch_fails(
        "collective", programs.skip_a_collective, within_s=PROVED_S
    )
    require_hang(error, culprit, or_rank=0 if ranks == 2 else None)
    assert PROOF in str(error)
    assert f"| rank {culprit} is in barrier number 4" in str(error)


@pytest.mark.full
@pytest.mark.recorder
def test_a_branch_that_only_one_rank_takes_is_proved(tmp_path: Path) -> None:
    """The others are in the backward pass of DDP, whose collectives Python does not see."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        "collective", programs.branch_by_rank, within_s=PROVED_S
    )
    require_hang(error, 0)
    assert "rank 0 is in barrier number " in str(error)
    assert require_places(error, range(3)) == dict.fromkeys(range(3), "branch_by_rank")


@pytest.mark.full(but=["stop_in_training-then0"])
@pytest.mark.recorder
@pytest.mark.parametrize(
    ("program", "then"),
    [
        (programs.stop_in_training, []),
        *((programs.stop_before, [then]) for then in ("a broadcast", "an exit", "a crash")),
    ],
)
def test_a_rank_stopped_by_a_signal_is_proved(
    tmp_path: Path, program: Callable[..., None], then: list[str]
) -> None:
    """All others wait for the rank, and the user has set no timeout.

    The launcher resumes it to ask for its position: no rank reaches the end of its function by that,
    and what the rank does then is not reported as a cause.
    """
    error = World(folder=tmp_path).launch_fails("collective", program, *then, within_s=PROVED_S + 1)
    require_hang(error, 1)
    assert "rank 1 is stopped and does nothing until it is resumed." in str(error)
    assert {each.status for each in error.outcomes.values()} == {"stopped"}, error.outcomes
    assert "stopped (SIGSTOP), at" in str(error)
    assert "after broadcast" not in str(error)


@pytest.mark.full
@pytest.mark.recorder
def test_a_rank_that_returns_while_a_subgroup_waits_is_blamed(tmp_path: Path) -> None:
    """The group of all ranks does not show that the rank is missing."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        ddpsafe.RankLeftEarlyError, programs.leave_a_subgroup_alone, within_s=PROVED_S
    )
    require_rank(error, 1)
    assert "| rank 0 waits in all_reduce number 1 of group '1' of shape [8] for rank 1" in str(
        error
    )


def test_a_rank_may_be_stopped_for_a_moment(tmp_path: Path) -> None:
    """A debugger does so, or a laptop's lid."""
    result = World(folder=tmp_path).launch(programs.stop_for_a_moment)
    assert set(result.values.values()) == {"done"}


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
)
def test_healthy_programs_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """They run collectives over random subgroups with slow ranks, under a watch that asks often."""
    eager = dataclasses.replace(deadlock_watch.SETTINGS, look_s=0.02, sleep_s=0.02)
    monkeypatch.setattr(deadlock_watch, "SETTINGS", eager)
    world = World(folder=tmp_path, ranks=4)
    result = world.launch(programs.call_random_collectives, seed, 120)
    assert set(result.values.values()) == {"done"}
