"""Which node dials which, and what blocked directions share: simulated, up to 1,024 nodes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from ddpsafe.doctor._mesh.findings.connections import Group, group_ways
from ddpsafe.doctor._mesh.pairs import EVERY_PAIR, plan_targets

Direction = tuple[int, int]


def directions_of(plan: list[list[int]]) -> set[Direction]:
    """Return all directions of a plan."""
    return {(node, target) for node, targets in enumerate(plan) for target in targets}


@pytest.mark.parametrize("count", [1, 2, 3, 16, EVERY_PAIR])
def test_every_pair_is_tried_with_few_nodes(count: int) -> None:
    """Up to 64 nodes the plan is complete."""
    plan = plan_targets(["net"] * count, seed=1)
    assert directions_of(plan) == set(itertools.permutations(range(count), 2))


@pytest.mark.parametrize("count", [65, 100, 256, 1000, 1024])
def test_with_many_nodes_each_dials_and_is_dialled_about_equally_often(count: int) -> None:
    """No node dials itself or another one twice, and the number of connections stays bounded."""
    networks = [f"10.0.{node // 64}.0/26" for node in range(count)]
    plan = plan_targets(networks, seed=7)
    assert all(node not in targets for node, targets in enumerate(plan))
    assert all(len(targets) == len(set(targets)) for targets in plan)
    most = 2 * (int(count**0.5) + 1) + 80
    assert max(map(len, plan)) <= most
    dialled = Counter(target for targets in plan for target in targets)
    assert max(dialled.values()) <= 2 * most
    assert min(dialled[node] for node in range(count)) >= 2


GROUPINGS: dict[str, Callable[[int], list[list[int]]]] = {
    "racks of 32": lambda count: [list(range(i, i + 32)) for i in range(0, count, 32)],
    "every 32nd": lambda count: [list(range(i, count, 32)) for i in range(32)],
    "networks of 16": lambda count: [list(range(i, i + 16)) for i in range(0, count, 16)],
    "halves": lambda count: [list(range(count // 2)), list(range(count // 2, count))],
}


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_host_that_cannot_reach_a_group_is_found_among_1024(name: str, seed: int) -> None:
    """Every host dials at least one node of every group, its own groups excepted."""
    groups = GROUPINGS[name](1024)
    own = {node: number for number, group in enumerate(groups) for node in group}
    networks = [own[node] for node in range(1024)] if name.startswith("networks") else [0] * 1024
    plan = plan_targets(networks, seed=seed)
    for node, targets in enumerate(plan):
        reached = {own[target] for target in targets}
        assert reached | {own[node]} == set(range(len(groups)))


def test_host_that_cannot_reach_a_random_group_is_found_almost_surely() -> None:
    """With a random eighth of the hosts as the group, fewer than one host in ten thousand is missed."""
    chance = random.Random(5)
    plan = plan_targets([0] * 1024, seed=9)
    misses = 0
    for _ in range(50):
        group = set(chance.sample(range(1024), 128))
        misses += sum(group.isdisjoint(targets) for targets in plan)
    assert misses / (50 * 1024) < 1e-4


@pytest.mark.parametrize("count", [4, 16, 256, 1024])
def test_closed_host_explains_every_failure(count: int) -> None:
    """However many dialled it, all failures form one group, which names no other host."""
    tried = directions_of(plan_targets(["net"] * count, seed=3))
    closed = {way for way in tried if way[1] == 2}
    assert group_ways(closed, tried) == [Group(shape="to", nodes=(2,), ways=tuple(sorted(closed)))]


def test_blocked_directions_are_explained_by_as_few_hosts_as_possible() -> None:
    """Each shape has its own name: everywhere, split, around, to, from, a pair, one way."""
    tried = set(itertools.permutations(range(6), 2))

    def shapes(blocked: set[Direction]) -> list[tuple[str, tuple[int, ...]]]:
        groups = group_ways(blocked, tried)
        explained = [way for group in groups for way in group.ways]
        assert sorted(explained) == sorted(blocked), "each direction is explained once"
        return [(group.shape, group.nodes) for group in groups]

    assert shapes(set()) == []
    assert shapes(tried) == [("everywhere", (0, 1, 2, 3, 4, 5))]
    across = {way for way in tried if (way[0] < 2) is not (way[1] < 2)}
    assert shapes(across) == [("split", (0, 1))]
    assert shapes({way for way in tried if 4 in way}) == [("around", (4,))]
    assert shapes({way for way in tried if way[1] in (1, 3)}) == [("to", (1, 3))]
    assert shapes({way for way in tried if way[0] == 5}) == [("from", (5,))]
    assert shapes({(1, 2)}) == [("one-way", (1, 2))]
    assert shapes({(1, 2), (2, 1), (0, 3)}) == [("one-way", (0, 3)), ("pair", (1, 2))]
    both = {way for way in tried if way[1] == 1} | {(2, 3)}
    assert shapes(both) == [("to", (1,)), ("one-way", (2, 3))]


def test_single_pair_of_hosts_is_not_blamed_on_one_of_them() -> None:
    """With two hosts nothing shows which one is at fault, so the direction is reported."""
    tried = {(0, 1), (1, 0)}
    assert [group.shape for group in group_ways({(0, 1)}, tried)] == ["one-way"]
