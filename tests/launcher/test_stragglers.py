"""Stragglers, the ranks that make others wait, are found in torch's records of collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import World

from ddpsafe._launcher.diagnosis.stragglers import find_stragglers

STEPS = 40
S = 10**9


def arrivals(delay: Callable[[int, int], float], *, ranks: int = 4, buckets: int = 1) -> dict[int, list[tuple[int, int]]]:  # fmt: skip
    """Return when the ranks enter the collectives of their steps.

    A step computes for a second, and `delay` returns how much longer a rank takes. Buckets follow
    each other every 10 ms, and ranks wait only for the last one.
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


def test_the_rank_that_enters_last_is_named_with_its_cost() -> None:
    """It takes 0.5 s longer in each step of a second, so the others wait a third of the time."""
    (found,) = find_stragglers(arrivals(lambda rank, _: 0.5 * (rank == 2)), ONE_NODE)
    assert found.ranks == (2,)
    assert found.share == pytest.approx(1 / 3, abs=0.02)
    assert found.waited_s == pytest.approx(0.5 * STEPS, rel=0.05)
    assert str(found) == (
        "all others waited for rank 2 34 % of the time: 20.0 s of 58.9 s, the last 40 collectives"
    )


def test_buckets_of_one_step_are_counted_once() -> None:
    """A single delay makes all collectives of the step late."""
    (found,) = find_stragglers(arrivals(lambda rank, _: 0.5 * (rank == 2), buckets=5), ONE_NODE)
    assert found.waited_s == pytest.approx(0.54 * STEPS, rel=0.05)


@pytest.mark.parametrize(
    "delay",
    [
        lambda _rank, _step: 0.0,
        lambda rank, step: 0.2 * (rank == step % 4),  # in turns: no rank is the slow one
        lambda rank, _step: 0.05 * rank,
        lambda rank, _step: 0.5 * (rank in (1, 2)),  # two together: no single rank makes all wait
    ],
)
def test_there_is_no_straggler_without_a_single_slow_rank(
    delay: Callable[[int, int], float],
) -> None:
    """Nor is a rank that costs less than a tenth of the time."""
    assert find_stragglers(arrivals(delay), ONE_NODE) == []


def test_a_slow_node_is_named_as_a_node() -> None:
    """Both of its ranks are late in the same steps, and neither is later than the other."""
    found = find_stragglers(arrivals(lambda rank, step: 1.0 * (rank >= 2 and step % 2)), TWO_NODES)
    assert [(each.node_rank, each.ranks) for each in found] == [(1, (2, 3))]


def test_clocks_of_nodes_may_differ() -> None:
    """If a node is late by the same time in every collective, its clock is different."""
    assert find_stragglers(arrivals(lambda rank, _: 0.4 * (rank >= 2)), TWO_NODES) == []


@pytest.mark.parametrize(
    "times",
    [{}, {0: [(1, S)]}, {0: [], 1: []}, {0: [(n, n * S) for n in range(20)], 1: []}],
)
def test_there_is_no_finding_without_enough_data(times: dict[int, list[tuple[int, int]]]) -> None:
    """There is one rank, no recorder, or too few collectives."""
    assert find_stragglers(times, {}) == []


@pytest.mark.recorder
def test_a_launch_reports_stragglers_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one INFO line, computed only after the ranks have run."""
    caplog.set_level(logging.INFO, logger="ddpsafe")
    World(folder=tmp_path).launch(programs.reduce_often, 0.08)
    (line,) = [each.message for each in caplog.records if "waited for" in each.message]
    assert line.startswith("all others waited for rank 1 ")
