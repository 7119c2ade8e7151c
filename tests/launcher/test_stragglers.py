"""Who makes the others wait: from the times of collectives that torch records anyway."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import live_programs as programs
import pytest
from fault_kit import World

from ddpsafe._launcher.diagnosis.stragglers import find_stragglers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 40
S = 10**9


def arrivals(delay: Callable[[int, int], float], *, ranks: int = 4, buckets: int = 1) -> dict[int, list[tuple[int, int]]]:  # fmt: skip
    """Return when the ranks enter the collectives of steps that wait for each other.

    A step computes for a second; `delay` says by how much a rank comes later. Buckets follow each
    other in 10 ms, and no rank waits for them before the last.
    """
    found: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks)}
    now_s, number = 0.0, 0
    for step in range(STEPS):
        late = {rank: delay(rank, step) for rank in range(ranks)}
        for bucket in range(buckets):
            number += 1
            for rank in range(ranks):
                entered_s = now_s + 1 + late[rank] + 0.01 * bucket
                found[rank].append((number, int(entered_s * S)))
        now_s += 1 + max(late.values()) + 0.01 * buckets
    return found


ONE_NODE = dict.fromkeys(range(4), 0)
TWO_NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def test_the_rank_that_comes_last_is_named_with_what_it_costs() -> None:
    """It takes 0.5 s longer in each step of a second: a third of the time is waited for it."""
    (found,) = find_stragglers(arrivals(lambda rank, _: 0.5 * (rank == 2)), ONE_NODE)
    assert found.ranks == (2,)
    assert found.share == pytest.approx(1 / 3, abs=0.02)
    assert found.waited_s == pytest.approx(0.5 * STEPS, rel=0.05)
    assert str(found) == (
        "all others waited for rank 2 34 % of the time: 20.0 s of 58.9 s, the last 40 collectives"
    )


def test_buckets_of_one_step_are_counted_once() -> None:
    """One delay makes all collectives of the step late."""
    (found,) = find_stragglers(arrivals(lambda rank, _: 0.5 * (rank == 2), buckets=5), ONE_NODE)
    assert found.waited_s == pytest.approx(0.54 * STEPS, rel=0.05)


@pytest.mark.parametrize(
    "delay",
    [
        lambda _rank, _step: 0.0,
        lambda rank, step: 0.2 * (rank == step % 4),  # each once: none of them is the slow one
        lambda rank, _step: 0.05 * rank,
        lambda rank, _step: 0.5 * (rank in (1, 2)),  # two at once: no single one makes all wait
    ],
)
def test_ranks_that_take_turns_are_no_stragglers(delay: Callable[[int, int], float]) -> None:
    """Below a tenth of the time there is no line."""
    assert find_stragglers(arrivals(delay), ONE_NODE) == []


def test_a_slow_node_is_named_as_one() -> None:
    """Both of its ranks come late together, now and then; neither does so against the other."""
    found = find_stragglers(arrivals(lambda rank, step: 1.0 * (rank >= 2 and step % 2)), TWO_NODES)
    assert [(each.node_rank, each.ranks) for each in found] == [(1, (2, 3))]


def test_clocks_of_nodes_may_differ() -> None:
    """What a node is late by in every collective is the difference of two clocks."""
    assert find_stragglers(arrivals(lambda rank, _: 0.4 * (rank >= 2)), TWO_NODES) == []


@pytest.mark.parametrize(
    "times",
    [{}, {0: [(1, S)]}, {0: [], 1: []}, {0: [(n, n * S) for n in range(20)], 1: []}],
)
def test_too_little_is_known_for_a_finding(times: dict[int, list[tuple[int, int]]]) -> None:
    """One rank, no recorder, or a few collectives."""
    assert find_stragglers(times, {}) == []


@pytest.mark.recorder
def test_a_launch_says_at_its_end_who_made_the_others_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An INFO line, at no cost while it ran; none where the ranks are alike."""
    caplog.set_level(logging.INFO, logger="ddpsafe")
    World(folder=tmp_path).launch(programs.reduce_often, 0.08)
    (line,) = [each.message for each in caplog.records if "waited for" in each.message]
    assert line.startswith("all others waited for rank 1 ")
