"""The user's `except` or `finally` uses or destroys the group while an exception is in flight.

Other launchers then hide the error until a timeout, or blame a rank that only lost a peer.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_cleanup_programs as programs
import pytest
from exception_programs import LostSampleError
from fault_kit import BY_TIMEOUT, WORLD_SIZES, WORLDS, World, require_hang, require_rank
from training_programs import Optimizer, train

import ddpsafe
from ddpsafe._wire.exception_facts import find_on_its_way

MAX_READS = 8
"""Within 3 s. A rank that was asked every 0.25 s throughout would have 12 reads."""


@pytest.mark.full(but=["3-barrier", "3-barrier and destroy"])
@pytest.mark.recorder
@pytest.mark.parametrize(
    "how", ["destroy", "barrier", "barrier and destroy", "our cleanup", "another group"]
)
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_cleanup_in_an_unported_script_does_not_hide_the_error(
    tmp_path: Path, ranks: int, how: str
) -> None:
    """The rank reports the exception before it enters the wait that would hide it."""
    world = World(folder=tmp_path, ranks=ranks)
    call = (programs.tidy_up, how) if how != "barrier" else (programs.tidy_up_with_barrier,)
    error = world.spawn_fails(ddpsafe.RankRaisedError, *call)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert "in raise_own_error" in str(error)


@pytest.mark.full
@pytest.mark.recorder
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_ctx_barrier_in_finally_does_not_hide_the_error(tmp_path: Path, ranks: int) -> None:
    """`ctx.barrier`, too, reports the exception before it waits."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.tidy_up_with_our_barrier)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_that_swallows_its_error_and_returns_is_blamed(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """``except Exception: print`` skips a step: the rank returns while the others still wait."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.spawn_fails(ddpsafe.RankLeftEarlyError, programs.swallow_and_go_on, within_s=3.0)
    require_rank(error, 1)


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_ranks_may_recover_together_at_a_barrier(tmp_path: Path, ranks: int) -> None:
    """All ranks handle the same expected error and slowly reach a barrier in its `except` block."""
    world = World(folder=tmp_path, ranks=ranks)
    values = world.launch(programs.recover_together).values
    assert values == dict.fromkeys(range(ranks), "recovered")


@pytest.mark.full
@pytest.mark.parametrize("where", ["inside", "after"])
def test_ranks_may_make_another_group_after_an_error(tmp_path: Path, where: str) -> None:
    """In the new group, a rank may keep the others waiting as long as in any group."""
    World(folder=tmp_path).spawn(programs.start_anew_with_another_group, where, 1.5)


@pytest.mark.recorder
def test_a_rank_that_handles_an_error_for_long_is_asked_ever_more_rarely(tmp_path: Path) -> None:
    """Each answer costs it time, and it may do useful work there."""
    world = World(folder=tmp_path, ranks=1)
    reads = world.launch(programs.count_reads_at_an_error, 3.0).values[0]
    assert 1 <= reads <= MAX_READS


@pytest.mark.full
@pytest.mark.parametrize(("where", "status"), [("after", "stopped"), ("inside", "raised")])
def test_a_step_withdraws_an_error_that_has_been_handled(
    tmp_path: Path, where: str, status: str
) -> None:
    """A step after the `except` block does; inside of it the error may still end the rank."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.RankRaisedError, *(programs.fail_beside_a_rank_that_steps, Optimizer(), where)
    )
    require_rank(error, 1)
    assert error.outcomes[0].status == status


@pytest.mark.full
def test_a_handled_error_is_not_blamed_for_another_ranks_failure(tmp_path: Path) -> None:
    """Rank 0 trains inside an `except` block and waits at a barrier when rank 1 fails."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.fail_beside_a_handled_error)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


@pytest.mark.full(but=["hang_in_finally"])
@pytest.mark.parametrize(
    "fault",
    [
        programs.hang_in_finally,
        programs.hang_in_an_except_block_that_raises,
        programs.hang_at_the_end_of_a_with_block,
        programs.hang_while_a_cleanup_tries_again,
    ],
)
def test_an_exception_in_flight_is_reported_where_the_rank_hangs(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """The rank is asked what it is handling, so an apparent hang is reported as the error it is."""
    error = World(folder=tmp_path).launch_fails(ddpsafe.RankRaisedError, train, fault, **BY_TIMEOUT)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert "in raise_own_error" in str(error)
    assert "own_cleanup_programs.py:" in str(error)
    assert "in an except or a finally" in str(error)


@pytest.mark.parametrize(
    ("program", "leaves"),
    [
        (programs.leave_by_finally, True),
        (programs.leave_by_finally_itself, True),
        (programs.leave_by_with, True),
        (programs.leave_by_except, True),
        (programs.leave_with_a_generator, True),
        (programs.close_a_generator, False),
        (programs.handle, False),
        (programs.handle_in_a_generator, False),
        (programs.handle_what_it_became, False),
        (programs.handle_what_it_became_here, False),
    ],
)
def test_an_exception_in_flight_is_found_beneath_the_handled_one(
    program: Callable[..., Any], *, leaves: bool
) -> None:
    """Cleanup code may handle other errors, and `GeneratorExit` leaves a generator."""
    found: list[BaseException | None] = []

    def look() -> None:
        exc = sys.exc_info()[1]
        assert exc is not None
        frames = {frame for frame, _ in traceback.walk_stack(sys._getframe())}
        found.append(find_on_its_way(exc, frames))

    with contextlib.suppress(LostSampleError):
        program(look)
    assert [type(each) for each in found] == [LostSampleError if leaves else type(None)]


@pytest.mark.full
def test_a_rank_that_hangs_after_handling_an_error_is_reported_as_a_hang(tmp_path: Path) -> None:
    """The handled error may be expected: it is shown beside the line, but not as the cause."""
    fault = programs.hang_in_an_except_block_that_goes_on
    error = World(folder=tmp_path).launch_fails("collective", train, fault, **BY_TIMEOUT)
    require_hang(error, 1)
    assert "was handling exception_programs.LostSampleError: " in str(error)


@pytest.mark.full
def test_an_error_that_cannot_be_described_does_not_hide_the_rank(tmp_path: Path) -> None:
    """The rank is named with its line, as it would be without the error."""
    fault = programs.hang_with_an_error_that_cannot_be_described
    error = World(folder=tmp_path).launch_fails("collective", train, fault, **BY_TIMEOUT)
    require_hang(error, 1)


@pytest.mark.full
def test_cleanup_inside_an_except_block_closes_the_group(tmp_path: Path) -> None:
    """A script that runs entirely inside ``except ImportError:`` succeeds and closes its group."""
    world = World(folder=tmp_path, ranks=2)
    world.spawn(programs.run_inside_an_except_block)
    closed = {path.read_text() for path in tmp_path.glob("closed-*")}
    assert closed == {"True"}
