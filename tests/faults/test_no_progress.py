"""No rank makes progress, and no collective is running that could time out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import HANG_S, WORLD_SIZES, World, require_places
from join_programs import SlowToLoad
from training_programs import Optimizer, return_rank, train

from ddpsafe._launcher.processes.rank_process import RankState
from ddpsafe._launcher.watch.hang_detection import LearnedGaps, NewCollectives, ProgressWatch
from ddpsafe._wire.messages import Collective, Position
from ddpsafe._wire.rank_pipe import Progress

PROGRESS_S = 1.5


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_no_step_for_too_long_is_a_hang(tmp_path: Path, ranks: int) -> None:
    """`timeouts.progress` ends the run, and the message shows where every rank is."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        "progress",
        programs.sleep_everywhere,
        within_s=PROGRESS_S + HANG_S,
        timeouts={"progress": PROGRESS_S},
    )
    assert error.missing_ranks == tuple(range(ranks))
    assert require_places(error, range(ranks)) == dict.fromkeys(range(ranks), "sleep")


def test_the_progress_timeout_names_a_rank_behind_the_others(tmp_path: Path) -> None:
    """It is shorter than the collective timeout of minutes, and names the same rank."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        "progress",
        train,
        programs.sleep,
        within_s=PROGRESS_S + HANG_S,
        timeouts={"progress": PROGRESS_S},
    )
    assert error.missing_ranks == (1,)


@pytest.mark.full
def test_a_rank_that_holds_the_gil_makes_no_progress(tmp_path: Path) -> None:
    """It cannot answer, which does not count as progress."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        "progress",
        train,
        programs.hold_the_gil,
        within_s=PROGRESS_S + HANG_S,
        timeouts={"progress": PROGRESS_S},
    )
    assert error.missing_ranks == (1,)


def test_a_step_restarts_the_timeout(tmp_path: Path) -> None:
    """A job of many short steps may take longer than the timeout."""
    world = World(folder=tmp_path)
    values = world.launch(
        programs.step_slowly,
        "optimizer",
        3 * PROGRESS_S,
        Optimizer(),
        timeouts={"progress": PROGRESS_S},
    ).values
    assert values == {0: "done", 1: "done"}


@pytest.mark.recorder
def test_a_rank_that_makes_steps_is_not_asked_for_its_position(tmp_path: Path) -> None:
    """Answering would interrupt its training, and its steps are visible without asking."""
    world = World(folder=tmp_path, ranks=1)
    values = world.launch(
        programs.count_reads_in_training, 2.5, Optimizer(), timeouts={"progress": 6}
    ).values
    assert values == {0: 0}


@pytest.mark.recorder
def test_a_collective_restarts_the_timeout(tmp_path: Path) -> None:
    """An evaluation makes no optimizer step, but its ranks communicate."""
    world = World(folder=tmp_path, ranks=1)
    values = world.launch(
        programs.step_slowly, "collective", 3 * PROGRESS_S, timeouts={"progress": PROGRESS_S}
    ).values
    assert values == {0: "done"}


def test_a_slow_start_is_not_a_hang(tmp_path: Path) -> None:
    """Until all ranks have joined, `timeouts.start` is the limit."""
    world = World(folder=tmp_path)
    values = world.launch(
        return_rank, SlowToLoad(tmp_path, 2 * PROGRESS_S), timeouts={"progress": PROGRESS_S}
    ).values
    assert values == {0: 0, 1: 1}


def test_the_attempt_timeout_ends_an_attempt(tmp_path: Path) -> None:
    """`timeouts.attempt` applies whatever the ranks do."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        "attempt",
        programs.sleep_everywhere,
        within_s=PROGRESS_S + HANG_S,
        timeouts={"attempt": PROGRESS_S},
    )
    assert error.missing_ranks == (0, 1)
    assert require_places(error, [0, 1]) == {0: "sleep", 1: "sleep"}


@pytest.mark.parametrize(
    ("gaps", "is_first", "is_save", "limit_s"),
    [
        ([], False, False, None),
        ([9.0, 9.0], False, False, None),  # two gaps are too few to learn from
        ([1.0, 2.0, 1.0], False, False, 60.0),
        ([1.0, 40.0, 1.0], False, False, 200.0),
        ([1.0, 1.0, 1.0], True, False, None),
        (["first 700", 1.0, 1.0, 1.0], True, False, 3500.0),
        (["first 2", 1.0, 1.0, 1.0], True, False, 300.0),
        (["first 700", 1.0, 1.0, 1.0], False, False, 60.0),
        ([1.0, 1.0, 1.0, "save 100"], False, True, 500.0),
        ([1.0, 1.0, 1.0, "save 100"], False, False, 60.0),
        ([1.0, 1.0, 1.0], False, True, None),
    ],
)
def test_first_steps_steps_and_saves_have_separate_limits(
    *, gaps: list[float | str], is_first: bool, is_save: bool, limit_s: float | None
) -> None:
    """Five times the longest gap so far, but at least one or five minutes; none without a gap."""
    learned = LearnedGaps()
    for gap in gaps:
        kind, _, seconds = str(gap).rpartition(" ")
        learned.note(float(seconds), is_first=kind == "first", is_save=kind == "save")
    limit = learned.limit(is_first=is_first, is_save=is_save)
    assert (None if limit is None else limit.total_seconds()) == limit_s


class FakeRank(RankState):
    """A rank whose steps the test sets."""

    def __init__(self) -> None:
        """Start without a step."""
        super().__init__(send=lambda _: None)
        self.steps = 0

    def progress(self) -> Progress:
        """Return the steps so far."""
        return Progress(steps=self.steps)


@pytest.mark.parametrize(
    ("steps_before", "steps_at_first_look"), [(0, 0), (0, 1), (0, 5), (1, 1), (1, 5)]
)
def test_the_duration_of_the_first_step_is_learned_even_if_it_is_short(
    steps_before: int, steps_at_first_look: int
) -> None:
    """The launcher may see the first step in the same look as the rank's join, or earlier."""
    learned, rank = LearnedGaps(), FakeRank()
    watch = ProgressWatch([rank], "auto", learned=learned)
    rank.steps = steps_before
    assert not watch.stalled()
    rank.phase = "running"
    rank.steps = steps_at_first_look
    assert not watch.stalled()
    rank.steps += 1
    assert not watch.stalled()
    assert learned.first_s is not None
    assert learned.first_s < LearnedGaps.LEAST_SLOW_S


@pytest.mark.parametrize("steps_before", [None, 0, 1])
def test_nothing_is_learned_while_the_launcher_is_suspended(steps_before: int | None) -> None:
    """The rank's real time is unknown; a value that is too short would end the next attempt."""
    learned, rank = LearnedGaps(), FakeRank()
    watch = ProgressWatch([rank], "auto", learned=learned)
    assert not watch.stalled()
    if steps_before is not None:  # else it joins and steps during the suspension
        rank.phase = "running"
        assert not watch.stalled()
        rank.steps = steps_before
        assert not watch.stalled()
    first_s = learned.first_s
    assert (first_s is not None) == bool(steps_before)
    watch.restart()
    rank.phase = "running"
    rank.steps += 1
    assert not watch.stalled()
    assert learned.first_s == first_s
    limits = []
    for _ in range(LearnedGaps.KNOWN):
        limits.append(learned.limit(is_first=False, is_save=False))
        rank.steps += 1
        assert not watch.stalled()
    assert limits == [None] * LearnedGaps.KNOWN
    assert learned.limit(is_first=False, is_save=False) is not None


def position(calls: Sequence[tuple[str, str, str]]) -> Position:
    """Return a position built from groups, numbers and times."""
    return Position(
        collectives=tuple(
            Collective(
                group=group,
                number=int(number),
                name="gloo:all_reduce",
                sizes="[[1]]",
                state="completed",
                entered_ns=int(entered_ns),
            )
            for group, number, entered_ns in calls
        )
    )


@pytest.mark.parametrize(
    ("looks", "entered_ns"),
    [
        (["", "a1@5", "a1@5", "a2@7 a1@5", "a2@7"], [0, 5, 0, 7, 0]),
        (["b1@900 a1@5", "b1@900 a2@3", "b1@900 a3@4"], [900, 3, 4]),  # set back after b1
        (["a1@5", "a1@5|a1@6", "|a1@6", "a1@5|a1@6", "a2@8|a1@6"], [5, 6, 0, 0, 8]),
        (["a7@5", "a1@6", "b1@6 a1@6"], [5, 6, 6]),  # another process group, then one more
    ],
)
def test_each_collective_counts_once_whatever_the_wall_clock_does(
    looks: list[str], entered_ns: list[int]
) -> None:
    """After the clock is set back, earlier entries lie in the future for a long time."""
    known = NewCollectives()
    found = []
    for look in looks:
        ranks = [re.findall(r"(.)(\d+)@(\d+)", calls) for calls in look.split("|")]
        found.append(known.last_entered_ns(position(calls) if calls else None for calls in ranks))
    assert found == entered_ns


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_limit_learned_from_the_run_ends_it(
    tmp_path: Path, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``progress="auto"`` limits steps, and the first step by that of the previous attempt."""
    for name, value in {"LEAST_S": 1.0, "LEAST_SLOW_S": 1.0, "FACTOR": 2.0}.items():
        monkeypatch.setattr(LearnedGaps, name, value)
    if attempts == 2:
        (tmp_path / "fails").touch()
    error = World(folder=tmp_path, ranks=1).launch_fails(
        "progress",
        programs.step_then_stay,
        Optimizer(),
        within_s=8 + HANG_S,
        timeouts={"progress": "auto"},
        retry={"attempts": attempts, "on": ["ConnectionError"], "backoff_initial": 0},
    )
    assert error.attempt == attempts
    assert "timeouts.progress (auto: " in str(error)
