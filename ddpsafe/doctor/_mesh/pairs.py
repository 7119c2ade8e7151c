"""Who dials whom: every pair of nodes while they are few, a bounded scheme beyond.

docs/explanation/mesh-plan.md argues for it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

EVERY_PAIR: Final = 64
"""Up to so many nodes, every pair is tried in both directions."""

_FOR_NETWORKS: Final = 64
"""Connections of a node to see every network: one or two to each of the largest."""
_AT_RANDOM: Final = 8


def plan_targets(networks: Sequence[Hashable], *, seed: int) -> list[list[int]]:
    """Decide whom each node dials.

    Args:
        networks: The network that each node is in, by node rank.
        seed: Decides the part that is left to chance, the same on every node.

    Returns:
        For each node rank, the node ranks it dials, in an order that spreads the load.
    """
    count = len(networks)
    if count <= EVERY_PAIR:
        return [[(node + step) % count for step in range(1, count)] for node in range(count)]
    # Steps that every node takes: up and down alike, so that each is dialled as often.
    # No secret: only the pattern must not be one that a network happens to have as well.
    chosen = random.Random(seed).sample(range(1, count // 2), _AT_RANDOM)  # noqa: S311
    steps = [step for each in chosen for step in (each, -each)]
    members = _members(networks)
    plan = []
    for node in range(count):
        # The others in a node's row and column when all stand in a square.
        side = math.isqrt(count - 1) + 1
        row, column = divmod(node, side)
        in_row = range(row * side, min((row + 1) * side, count))
        in_column = range(column, count, side)
        targets = dict.fromkeys([each for each in (*in_row, *in_column) if each != node])
        targets.update(dict.fromkeys((node + step) % count for step in steps))
        # Members of every network, its own included: a switch may keep its hosts apart.
        each_gets = min(2, _FOR_NETWORKS // len(members))
        targets.update(
            dict.fromkeys(
                group[(node * each_gets + turn) % len(group)]
                for group in members
                for turn in range(min(each_gets, len(group)))
            )
        )
        targets.pop(node, None)
        plan.append(list(targets))
    return plan


def _members(networks: Sequence[Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for node, network in enumerate(networks):
        found[network].append(node)
    largest = sorted(found.values(), key=len, reverse=True)
    return largest[:_FOR_NETWORKS]
