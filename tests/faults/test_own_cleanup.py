"""The user's own `except` and `finally` meet or destroy the group while an exception is on its way.

Everywhere else this hides the error until a timeout, or blames a rank that only lost a peer.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import TYPE_CHECKING, Any

import own_cleanup_programs as programs
import pytest
from exception_programs import LostSampleError
from fault_kit import BY_TIMEOUT, SIZES, WORLDS, World, require_hang, require_rank
from training_programs import Optimizer, train

import ddpsafe
from ddpsafe._wire.exception_facts import find_on_its_way

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


MOST_READS = 8
"""Within 3 s; it would be 12 if a rank were asked every 0.25 s throughout."""


@pytest.mark.recorder
@pytest.mark.parametrize(
    "tidy_up",
    [
        programs.tidy_up_with_destroy,
        programs.tidy_up_with_barrier,
        programs.tidy_up_with_barrier_and_destroy,
        programs.tidy_up_with_our_cleanup,
        programs.tidy_up_with_another_group,
    ],
)
@pytest.mark.parametrize("ranks", SIZES)
def test_in_a_script_of_its_own(tmp_path: Path, ranks: int, tidy_up: Callable[..., Any]) -> None:
    """The exception is told before the wait that it would hide behind."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.spawn_fails(ddpsafe.RankRaisedError, tidy_up)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert "in raise_own_error" in str(error)


@pytest.mark.recorder
@pytest.mark.parametrize("ranks", SIZES)
def test_a_barrier_of_ours_in_finally(tmp_path: Path, ranks: int) -> None:
    """`ctx.barrier` does not hide it either."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.tidy_up_with_our_barrier)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_an_error_that_is_swallowed_leaves_the_rank_behind(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """``except Exception: print`` skips a step: the rank returns while the others still wait."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.spawn_fails(ddpsafe.RankLeftEarlyError, programs.swallow_and_go_on, within_s=3.0)
    require_rank(error, 1)


@pytest.mark.parametrize("ranks", SIZES)
def test_a_barrier_that_is_meant_is_no_failure(tmp_path: Path, ranks: int) -> None:
    """All ranks handle the same expected error and meet in its `except` block, slowly."""
    world = World(folder=tmp_path, ranks=ranks)
    values = world.launch(programs.recover_together).values
    assert values == dict.fromkeys(range(ranks), "recovered")


@pytest.mark.parametrize("where", ["inside", "after"])
def test_another_group_after_an_error_is_no_failure(tmp_path: Path, where: str) -> None:
    """Once all ranks have met again, one may keep the others waiting as long as in any group."""
    World(folder=tmp_path).spawn(programs.start_anew_with_another_group, where, 1.5)


@pytest.mark.recorder
def test_a_rank_that_is_long_at_an_error_is_asked_ever_more_rarely(tmp_path: Path) -> None:
    """Each answer costs it time, and what it does there may be meant."""
    world = World(folder=tmp_path, ranks=1)
    reads = world.launch(programs.count_reads_at_an_error, 3.0).values[0]
    assert 1 <= reads <= MOST_READS


@pytest.mark.parametrize(("where", "status"), [("after", "stopped"), ("inside", "raised")])
def test_a_step_withdraws_an_error_that_is_over(tmp_path: Path, where: str, status: str) -> None:
    """A rank that trains on without a group has not failed.

    While the error is still handled it may be on its way out, and a step there says nothing.
    """
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.RankRaisedError,
        *(programs.fail_beside_a_rank_that_steps, Optimizer(), where),
    )
    require_rank(error, 1)
    assert error.outcomes[0].status == status


def test_a_handled_error_is_not_blamed_for_another_ranks_end(tmp_path: Path) -> None:
    """Rank 0 trains inside an `except` block, and waits at a barrier there when rank 1 fails."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.fail_beside_a_handled_error)
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


@pytest.mark.parametrize(
    "fault",
    [
        programs.hang_in_finally,
        programs.hang_in_an_except_block_that_raises,
        programs.hang_at_the_end_of_a_with_block,
        programs.hang_while_a_cleanup_tries_again,
    ],
)
def test_an_error_on_its_way_is_named_where_the_rank_hangs(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """The rank is asked what it handles, so what looks like a hang is told as the error it is."""
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
def test_an_error_beneath_the_one_that_is_handled_is_found_if_it_is_on_its_way(
    program: Callable[..., Any], *, leaves: bool
) -> None:
    """A cleanup may handle errors of its own, and a generator is left by a `GeneratorExit`."""
    found: list[BaseException | None] = []

    def look() -> None:
        exc = sys.exc_info()[1]
        assert exc is not None
        frames = {frame for frame, _ in traceback.walk_stack(sys._getframe())}
        found.append(find_on_its_way(exc, frames))

    with contextlib.suppress(LostSampleError):
        program(look)
    assert [type(each) for each in found] == [LostSampleError if leaves else type(None)]


def test_a_rank_that_works_on_after_an_error_hangs(tmp_path: Path) -> None:
    """What it handles there may be expected; it is told beside the line, and is not the reason."""
    fault = programs.hang_in_an_except_block_that_goes_on
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.CollectiveTimeoutError, train, fault, **BY_TIMEOUT
    )
    require_hang(error, 1)
    assert "was handling exception_programs.LostSampleError: " in str(error)


def test_an_error_that_cannot_be_described_costs_no_evidence(tmp_path: Path) -> None:
    """The rank is named with its line, as without the error."""
    fault = programs.hang_with_an_error_that_cannot_be_described
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.CollectiveTimeoutError, train, fault, **BY_TIMEOUT
    )
    require_hang(error, 1)


def test_cleanup_inside_an_except_block_closes_the_group(tmp_path: Path) -> None:
    """A script that runs inside ``except ImportError:`` as a whole ends well, group closed."""
    world = World(folder=tmp_path, ranks=2)
    world.spawn(programs.run_inside_an_except_block)
    closed = {path.read_text() for path in tmp_path.glob("closed-*")}
    assert closed == {"True"}
