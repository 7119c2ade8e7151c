"""Errors that wrap, hide or resemble another rank's end: what went wrong first is still named.

One launch for each way in which a rank learns of it; tests/launcher/test_root_cause.py has the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import wrapped_programs as programs
from exception_programs import LostSampleError, raise_own_error
from fault_kit import BY_TIMEOUT, HANG_S, World, require_hang, require_rank
from hang_programs import sleep

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAILING_S = 3.0
"""A rank that waits with an error in flight is told by two looks, without any timeout."""


def test_ranks_that_exit_at_the_timeout_of_a_hang_are_not_blamed(tmp_path: Path) -> None:
    """``except Exception: sys.exit(1)`` is in every other script."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        *(programs.train_in_try, sleep, programs.exit_with_one),
        **BY_TIMEOUT,
    )
    require_hang(error, 1)


def test_ranks_that_exit_at_the_loss_of_a_rank_are_not_blamed(tmp_path: Path) -> None:
    """Nor is the error lost over which the rank exits: the message names it with its line."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.RankExitedError,
        *(programs.train_in_try, raise_own_error, programs.exit_with_one),
    )
    require_rank(error, 1)
    assert "rank 0 failed because of rank 1: " in str(error)
    assert "while it handled exception_programs.LostSampleError: " in str(error)
    assert "in raise_own_error" in str(error)


def test_an_error_that_is_being_handled_is_not_blamed_for_a_hang(tmp_path: Path) -> None:
    """The ranks that wait do so inside ``except ImportError:``, which means nothing."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError, programs.train_in_an_except_block, sleep, **BY_TIMEOUT
    )
    require_hang(error, 1)


@pytest.mark.recorder
@pytest.mark.parametrize(
    "meet",
    [
        programs.gather,
        programs.reduce,
        programs.broadcast,
        programs.monitor,
    ],
)
def test_a_collective_in_finally_does_not_hide_the_error(
    tmp_path: Path, meet: Callable[..., object]
) -> None:
    """The others wait in another collective, and gloo may even abort one of them."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.meet_in_finally, meet, within_s=FAILING_S
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


def test_an_error_is_found_beneath_the_timeout_of_a_collective_in_finally(tmp_path: Path) -> None:
    """One of tensors is not watched; the exception that it hides is in its context."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.meet_in_finally, programs.gather_tensors, **BY_TIMEOUT
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert "on top of it, in an except or a finally: RuntimeError" in str(error)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (programs.lose_a_download, "Connection reset by peer"),
        (programs.fail_in_the_handler, "KeyError"),
    ],
)
def test_what_only_sounds_like_a_peer_error_is_the_ranks_own(
    tmp_path: Path, fault: Callable[..., Any], said: str
) -> None:
    """The user's own connections and waits break in the same words."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.train_in_try, fault, programs.let_through
    )
    require_rank(error, 1)
    assert said in str(error)
    assert error.kind == "user-error"


def test_a_killed_rank_comes_before_those_that_exit_because_of_it(tmp_path: Path) -> None:
    """The kernel may show their ends first: it closes a process' connections before it ends it."""
    for attempt in range(4):
        world = World(folder=tmp_path / str(attempt), ranks=3)
        world.folder.mkdir()
        error = world.launch_fails(ddpsafe.RankKilledError, programs.die_beside_a_rank_that_exits)
        require_rank(error, 1)


@pytest.mark.recorder
def test_a_rank_that_hangs_in_a_subgroup_is_told_from_the_one_that_waits_for_it(
    tmp_path: Path,
) -> None:
    """Both have made as many collectives in the group of all ranks."""
    world = World(folder=tmp_path, ranks=4)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError, programs.hang_in_a_subgroup, sleep, **BY_TIMEOUT
    )
    require_hang(error, 1)
    assert "timed out in all_reduce number 3 of group '" in str(error)


def test_barriers_of_different_names(tmp_path: Path) -> None:
    """Each rank's own words are shown: where it waited, and for whom."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.BarrierTimeoutError, programs.meet_under_other_names, 1.5, within_s=1.5 + HANG_S
    )
    assert error.kind == "hang"
    assert "at the barrier 'trained'" in str(error)
    assert "at the barrier 'evaluated'" in str(error)
    assert "ranks 0 and 2 did not reach it" in str(error)
    assert "collective" not in str(error)


@pytest.mark.recorder
def test_a_rank_that_makes_a_group_alone(tmp_path: Path) -> None:
    """What is said of the others is true: only they are in the collective."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError, programs.make_a_group_alone, **BY_TIMEOUT
    )
    require_hang(error, 0)
    assert "ranks 1 and 2 were waiting for it in all_reduce number 2 " in str(error)


def test_a_mean_of_different_shapes(tmp_path: Path) -> None:
    """No rank gets a wrong mean, and none hangs."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.average_other_shapes)
    assert "different keys or shapes" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_thread_that_died_is_shown_beside_the_hang_it_led_to(tmp_path: Path) -> None:
    """Its traceback went to stderr, where it would be missed."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        *(programs.train_in_try, programs.hang_after_a_thread_died, programs.let_through),
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    assert "it has printed a traceback:" in str(error)
    assert "LostSampleError" in str(error)


def test_an_error_in_the_forward_pass_is_the_models_own(tmp_path: Path) -> None:
    """DDP's frames are above it, but it was not raised there."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.fail_inside_the_model)
    require_rank(error, 1)
    assert "Socket Timeout" in str(error)


@pytest.mark.parametrize("meet", [programs.scatter, programs.gather_in_a_subgroup])
def test_ranks_that_come_late_to_a_meeting_in_an_except_block_are_no_failure(
    meet: Callable[..., object],
) -> None:
    """Some ranks wait for others who are at work, and an error is being handled meanwhile."""
    options: dict[str, Any] = {"start_method": "forkserver", "backend": "gloo", "console": "none"}
    fn = programs.be_slow_in_an_except_block
    values = ddpsafe.launch(fn, (meet,), nproc_per_node=3, **options).values
    assert values == dict.fromkeys(range(3), "well")


@pytest.mark.recorder
def test_a_script_inside_an_except_block_is_not_asked_at_every_meeting(tmp_path: Path) -> None:
    """Once the ranks have met there, the error is known to be handled: it is told once."""
    reads = World(folder=tmp_path).launch(programs.count_reads_of_meetings).values
    assert all(1 <= each <= 10 for each in reads.values()), reads


def test_the_error_beneath_a_mean_of_other_metrics(tmp_path: Path) -> None:
    """The other rank is told of other keys, which is true, and comes of this."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.average_other_metrics_in_finally, **BY_TIMEOUT
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


def test_a_rank_that_is_killed_while_it_handles_an_error(tmp_path: Path) -> None:
    """A kill is the strongest evidence there is."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankKilledError, programs.be_killed_in_an_except_block)
    require_rank(error, 1)
    assert error.exit_code == 137
