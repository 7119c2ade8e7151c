"""The plan of which node dials which: every pair up to 64 nodes, a bounded scheme beyond.

docs/explanation/mesh-plan.md has the reasons.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

EVERY_PAIR: Final = 64
"""Up to this many nodes, every pair is tried in both directions."""

# Connections of a node to other networks: one or two to each of the largest.
_NETWORK_TARGETS: Final = 64
# A group of nodes that have nothing else in common, an eighth of 1,024, is then missed by fewer than
# one node in 10,000.
_RANDOM_STEPS: Final = 8


def plan_targets(networks: Sequence[Hashable], *, seed: int) -> list[list[int]]:
    """Decide which nodes each node dials.

    Args:
        networks: The network that each node is in, by node rank.
        seed: Determines the random part, the same on every node.

    Returns:
        For each node rank, the node ranks it dials, in an order that spreads the load.
    """
    count = len(networks)
    # Firewalls depend on who dials, and gloo dials from the greater address to the lower: so both
    # directions of a pair matter.
    if count <= EVERY_PAIR:
        return [[(node + step) % count for step in range(1, count)] for node in range(count)]
    # Every node dials the nodes at the same distances in both directions, so all are dialled equally often.
    # Not a secret: the pattern just must not coincide with that of a network.
    distances = random.Random(seed).sample(range(1, count // 2), _RANDOM_STEPS)  # noqa: S311
    steps = [step for distance in distances for step in (distance, -distance)]
    by_network: dict[Hashable, list[int]] = defaultdict(list)
    for node, network in enumerate(networks):
        by_network[network].append(node)
    members = sorted(by_network.values(), key=len, reverse=True)[:_NETWORK_TARGETS]
    plan = []
    for node in range(count):
        # The others in this node's row and column, with all nodes arranged in a square: a column reaches
        # every run of so many node ranks (a rack), a row every k-th node rank (cyclic distribution).
        side = math.isqrt(count - 1) + 1
        row, column = divmod(node, side)
        in_row = range(row * side, min((row + 1) * side, count))
        in_column = range(column, count, side)
        targets = dict.fromkeys((*in_row, *in_column))
        targets.update(dict.fromkeys((node + step) % count for step in steps))
        # Members of every network, including its own: a switch may isolate its hosts from each other.
        # Which members it dials rotates from node to node, so that no host is dialled by all.
        per_network = min(2, _NETWORK_TARGETS // len(members))
        targets.update(
            dict.fromkeys(
                group[(node * per_network + turn) % len(group)]
                for group in members
                for turn in range(min(per_network, len(group)))
            )
        )
        targets.pop(node, None)
        plan.append(list(targets))
    return plan
