"""Errors wrap, hide or resemble another rank's failure, and the root cause is still named.

One launch for each way in which a rank learns of it; tests/launcher/test_root_cause.py has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_cleanup_programs as programs
import pytest
from exception_programs import LostSampleError, raise_own_error
from fault_kit import BY_TIMEOUT, HANG_S, World, require_hang, require_rank
from hang_programs import sleep

import ddpsafe

IN_FLIGHT_S = 3.0
"""Two looks find a rank that waits with an exception in flight; no timeout is involved."""


@pytest.mark.full
def test_ranks_that_exit_when_a_hang_times_out_are_not_blamed(tmp_path: Path) -> None:
    """Many scripts contain ``except Exception: sys.exit(1)``."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        "collective", *(programs.train_in_try, sleep, programs.exit_with_one), **BY_TIMEOUT
    )
    require_hang(error, 1)


def test_ranks_that_exit_because_of_a_failed_rank_are_not_blamed(tmp_path: Path) -> None:
    """The message also has the error that the failed rank exits on, with its line."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.RankExitedError, *(programs.train_in_try, raise_own_error, programs.exit_with_one)
    )
    require_rank(error, 1)
    assert "rank 0 failed because of rank 1: " in str(error)
    assert "while it handled exception_programs.LostSampleError: " in str(error)
    assert "in raise_own_error" in str(error)


@pytest.mark.full
def test_an_error_that_is_being_handled_is_not_blamed_for_a_hang(tmp_path: Path) -> None:
    """The waiting ranks run inside ``except ImportError:``, which is not a failure."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails("collective", programs.train_in_an_except_block, sleep, **BY_TIMEOUT)
    require_hang(error, 1)


@pytest.mark.full(but=["gather"])
@pytest.mark.recorder
@pytest.mark.parametrize(
    "meet", [programs.gather, programs.reduce, programs.broadcast, programs.monitor]
)
def test_a_collective_in_finally_does_not_hide_the_error(
    tmp_path: Path, meet: Callable[..., object]
) -> None:
    """The others wait in a different collective, and gloo may even abort one of them."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.meet_in_finally, meet, within_s=IN_FLIGHT_S
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


@pytest.mark.full
def test_an_error_is_found_beneath_the_timeout_of_a_collective_in_finally(tmp_path: Path) -> None:
    """Collectives of tensors are not watched; the timeout's context has the hidden exception."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.meet_in_finally, programs.gather_tensors, **BY_TIMEOUT
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert "on top of it, in an except or a finally: RuntimeError" in str(error)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (programs.lose_a_download, "Connection reset by peer"),
        (programs.fail_in_the_handler, "KeyError"),
    ],
)
def test_an_error_that_only_resembles_a_peer_error_is_the_ranks_own(
    tmp_path: Path, fault: Callable[..., Any], expected: str
) -> None:
    """The user's own connections and waits fail with the same texts."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.train_in_try, fault, programs.let_through
    )
    require_rank(error, 1)
    assert expected in str(error)
    assert error.kind == "user-error"


@pytest.mark.full
def test_a_killed_rank_is_blamed_before_those_that_exit_because_of_it(tmp_path: Path) -> None:
    """Their exits may be seen first: the kernel closes a process's connections before it ends it."""
    for attempt in range(4):
        world = World(folder=tmp_path / str(attempt), ranks=3)
        world.folder.mkdir()
        error = world.launch_fails(ddpsafe.RankKilledError, programs.die_beside_a_rank_that_exits)
        require_rank(error, 1)


@pytest.mark.full
@pytest.mark.recorder
def test_a_rank_that_hangs_in_a_subgroup_is_named_not_the_waiting_one(tmp_path: Path) -> None:
    """Both have made the same number of collectives in the group of all ranks."""
    world = World(folder=tmp_path, ranks=4)
    error = world.launch_fails("collective", programs.hang_in_a_subgroup, sleep, **BY_TIMEOUT)
    require_hang(error, 1)
    assert "timed out in all_reduce number 3 of group '" in str(error)


@pytest.mark.full
def test_ranks_at_barriers_of_different_names_are_all_shown(tmp_path: Path) -> None:
    """For each rank the message has the barrier where it waited, and the missing ranks."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        "barrier", programs.meet_under_other_names, 1.5, within_s=1.5 + HANG_S
    )
    assert error.kind == "hang"
    assert "at the barrier 'trained'" in str(error)
    assert "at the barrier 'evaluated'" in str(error)
    assert "ranks 0 and 2 did not reach it" in str(error)
    assert "collective" not in str(error)


@pytest.mark.full
@pytest.mark.recorder
def test_a_rank_that_makes_a_group_alone_is_named(tmp_path: Path) -> None:
    """The message says only of the others that they wait in the collective."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails("collective", programs.make_a_group_alone, **BY_TIMEOUT)
    require_hang(error, 0)
    assert "ranks 1 and 2 were waiting for it in all_reduce number 2 " in str(error)


@pytest.mark.full
def test_a_mean_of_different_shapes_raises(tmp_path: Path) -> None:
    """No rank receives a wrong mean, and none hangs."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.average_other_shapes)
    assert "different keys or shapes" in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.full
def test_a_thread_that_died_is_shown_beside_the_hang_it_caused(tmp_path: Path) -> None:
    """Its traceback went only to stderr, where a reader would miss it."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        "collective",
        *(programs.train_in_try, programs.hang_after_a_thread_died, programs.let_through),
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    assert "it has printed a traceback:" in str(error)
    assert "LostSampleError" in str(error)


@pytest.mark.full
def test_an_error_in_the_forward_pass_is_the_ranks_own(tmp_path: Path) -> None:
    """DDP's frames are in the traceback, but the model raised the error."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.fail_inside_the_model)
    require_rank(error, 1)
    assert "Socket Timeout" in str(error)


@pytest.mark.full
@pytest.mark.parametrize("meet", [programs.scatter, programs.gather_in_a_subgroup])
def test_ranks_may_enter_a_collective_in_an_except_block_late(meet: Callable[..., object]) -> None:
    """Some ranks wait, inside an `except` block, for others that are still working."""
    options: dict[str, Any] = {"start_method": "forkserver", "backend": "gloo", "console": "none"}
    fn = programs.be_slow_in_an_except_block
    values = ddpsafe.launch(fn, (meet,), nproc_per_node=3, **options).values
    assert values == dict.fromkeys(range(3), "well")


@pytest.mark.full
@pytest.mark.recorder
def test_a_script_inside_an_except_block_is_not_asked_at_every_collective(tmp_path: Path) -> None:
    """Once the ranks have completed one there, the error is known to be handled."""
    reads = World(folder=tmp_path).launch(programs.count_reads_of_meetings).values
    assert all(1 <= each <= 10 for each in reads.values()), reads


@pytest.mark.full
def test_a_mean_of_other_metrics_in_finally_does_not_hide_the_error(tmp_path: Path) -> None:
    """The other rank raises because of different keys, which is a consequence."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.average_other_metrics_in_finally, **BY_TIMEOUT
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


def test_a_rank_that_is_killed_while_it_handles_an_error_is_blamed(tmp_path: Path) -> None:
    """A kill is stronger evidence than any exception."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankKilledError, programs.be_killed_in_an_except_block)
    require_rank(error, 1)
    assert error.exit_code == 137
