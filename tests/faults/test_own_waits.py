"""Waits of ddpsafe's own, and calls of other threads, are parts of a proof, with their names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import collective_programs as programs
import group_programs
import pytest
from fault_kit import World, require_hang, require_places, require_rank

import ddpsafe
from ddpsafe._launcher.watch import deadlock_watch

PROVED_S = 6.0
"""From the fault to the end of the launch; no timeout is set."""


class Row(NamedTuple):
    """What the message says of ranks that part ways."""

    culprit: int
    lines: tuple[str, str]
    advice: str


ROWS = {
    "evaluation": Row(
        0,
        ("rank 0 is in broadcast number ", "ranks 1 and 2 are in barrier 'evaluated'"),
        "evaluate with the model inside DDP, model.module",
    ),
    "reduction": Row(
        0,
        ("rank 0 is in all_reduce number ", "ranks 1 and 2 are in barrier 'barrier'"),
        "in the same order",
    ),
    "download": Row(
        0,
        ("rank 0 is in barrier number ", "ranks 1 and 2 are in rank_zero_first"),
        "in the same order",
    ),
    "two barriers": Row(
        1, ("rank 1 is in barrier 'one'", "ranks 0 and 2 are in barrier 'all'"), "in the same order"
    ),
    "new group": Row(
        0,
        ("rank 0 is in all_reduce number ", "ranks 1 and 2 are in new_group"),
        "in the same order",
    ),
    "save": Row(
        0,
        ("rank 0 is in save() of /", "ranks 1 and 2 are in broadcast number "),
        "call it on every rank",
    ),
    "skipped save": Row(
        1,
        ("rank 1 is in broadcast number ", "ranks 0 and 2 are in save() of /"),
        "call it on every rank",
    ),
}


@pytest.mark.full(but=["evaluation", "save"])
@pytest.mark.recorder
@pytest.mark.parametrize("how", ROWS)
def test_ranks_in_different_calls_are_proved(tmp_path: Path, how: str) -> None:
    """The rank that differs is named, both calls are shown, and the advice fits."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        "collective", programs.part_ways, how, within_s=PROVED_S
    )
    row = ROWS[how]
    require_hang(error, row.culprit)
    for line in row.lines:
        assert f"| {line}" in str(error)
    assert row.advice in str(error)
    assert require_places(error, range(3)) == dict.fromkeys(range(3), "part_ways")


@pytest.mark.full
@pytest.mark.recorder
def test_both_of_two_ranks_are_shown_with_their_calls(tmp_path: Path) -> None:
    """Nothing shows which of them is wrong."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.part_ways, "save", within_s=PROVED_S
    )
    assert error.missing_ranks in ((0, 1), (1, 0))
    assert "rank 0 (world_size 2) entered save() of /" in str(error)
    assert "rank 1 (world_size 2) entered broadcast number " in str(error)


@pytest.mark.full
@pytest.mark.recorder
def test_two_saves_into_different_directories_are_told_apart(tmp_path: Path) -> None:
    """Each is a call of its own, and both ranks are named."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.save_elsewhere, within_s=PROVED_S
    )
    assert error.missing_ranks in ((0, 1), (1, 0))
    assert f"| rank 0 is in save() of {tmp_path}/first" in str(error)
    assert f"| rank 1 is in save() of {tmp_path}/second" in str(error)


@pytest.mark.full(but=["return before new group-new_group"])
@pytest.mark.parametrize(
    ("how", "call"), [("return", "barrier 'end'"), ("return before new group", "new_group")]
)
def test_a_rank_that_has_returned_before_a_barrier_is_blamed(
    tmp_path: Path, how: str, call: str
) -> None:
    """It reaches no further one, nor a group of which it is a member: the others wait for no timeout."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        ddpsafe.RankLeftEarlyError, programs.part_ways, how, within_s=PROVED_S
    )
    require_rank(error, 1)
    assert f"waits in {call} for rank" in str(error)


@pytest.mark.full(but=["order"])
@pytest.mark.recorder
@pytest.mark.parametrize(
    ("how", "lines", "advice"),
    [
        pytest.param(
            "order",
            (
                r"rank \d is in all_reduce number \d of shape \[3\]\n",
                r"rank \d is in broadcast number \d of shape \[2\].* \(thread 'weights' at .*:\d+ in <lambda>\)",
            ),
            "give the thread a group of its own",
            id="order",
        ),
        pytest.param(
            "evaluation",
            (
                r"rank 0 is in broadcast number .*eval\(\) mode, thread 'evaluation' at .*:\d+ in evaluate\)",
                r"rank 1 is in barrier 'epoch'\n",
            ),
            "model.module",
            id="evaluation",
        ),
        pytest.param(
            "upload",
            (
                r"rank 0 is in barrier 'uploaded' \(thread 'upload'\)\n",
                r"rank 1 is in all_reduce number \d of shape \[3\]\n",
            ),
            "in one thread",
            id="upload",
        ),
    ],
)
def test_calls_of_other_threads_are_proved_with_thread_and_line(
    tmp_path: Path, how: str, lines: tuple[str, str], advice: str
) -> None:
    """The thread that makes the call is named, not the line of the main thread alone."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.call_in_threads, how, within_s=PROVED_S
    )
    for line in lines:
        assert re.search(rf"\| {line}", str(error)), error
    assert advice in str(error), str(error)
    assert sorted(error.missing_ranks) == [0, 1]


SLOW: Final = [0.3, *(pytest.param(slow_s, marks=pytest.mark.full) for slow_s in (1.0, 2.5, 5.0))]


@pytest.fixture
def _asking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watch take every sleep for one that may last."""
    eager = dataclasses.replace(deadlock_watch.SETTINGS, look_s=0.02, sleep_s=0.02)
    monkeypatch.setattr(deadlock_watch, "SETTINGS", eager)


@pytest.mark.usefixtures("_asking_often")
@pytest.mark.parametrize("slow_s", SLOW)
@pytest.mark.parametrize(
    "program",
    [
        programs.wait_for_a_slow_rank,
        programs.make_two_groups_at_once,
        pytest.param(programs.work_in_threads, marks=pytest.mark.full),
        pytest.param(
            programs.leave_a_thread_behind, marks=[pytest.mark.full, pytest.mark.recorder]
        ),
        pytest.param(programs.give_up_waiting, marks=pytest.mark.full),
        pytest.param(programs.save_alone_with_a_limit, marks=pytest.mark.full),
        pytest.param(programs.call_from_a_loop, marks=[pytest.mark.full, pytest.mark.recorder]),
        pytest.param(programs.handle_a_signal_in_a_barrier, marks=pytest.mark.full),
    ],
    ids=lambda program: program.__name__,
)
def test_a_job_that_goes_on_is_left_alone(
    tmp_path: Path, program: Callable[..., str], slow_s: float
) -> None:
    """However slow one rank is: in a barrier, a save, a thread, a handler, and where a barrier may be given up."""
    ranks = {programs.handle_a_signal_in_a_barrier: 2, programs.make_two_groups_at_once: 4}.get(
        program, 3
    )
    result = World(folder=tmp_path, ranks=ranks).launch(program, slow_s)
    expected = {"done"}
    if program is programs.give_up_waiting:
        expected.add("alone without (2,)")
    assert set(result.values.values()) == expected


@pytest.mark.usefixtures("_asking_often")
@pytest.mark.parametrize("slow_s", SLOW)
def test_members_that_have_other_numbers_in_the_launch_are_left_alone(
    tmp_path: Path, slow_s: float
) -> None:
    """The numbers that a rank gives ``new_group`` are then not the ranks that it waits for."""
    World(folder=tmp_path, ranks=4).spawn(group_programs.make_a_group_by_other_numbers, slow_s)
