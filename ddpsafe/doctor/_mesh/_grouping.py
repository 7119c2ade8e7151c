"""What belongs together: fifteen blocked directions are one finding if one host explains them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

Way = tuple[int, int]
"""One direction: the node rank that dials, and the one that listens."""

Shape = Literal["everywhere", "split", "around", "to", "from", "pair", "one-way"]

_EVIDENCE: Final = 2
"""So many directions must agree before a host is blamed and not a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Directions with one explanation.

    Attributes:
        shape: ``everywhere``: nothing is open; ``split``: two sides that do not reach each other;
            ``around``: nothing to and from these hosts; ``to``, ``from``: only that; ``pair``:
            both directions between two; ``one-way``: one of them.
        nodes: The hosts that explain it; for ``split`` the smaller side; for ``pair`` and
            ``one-way`` the one that dials, then the one that listens.
        ways: The directions.
    """

    shape: Shape
    nodes: tuple[int, ...]
    ways: tuple[Way, ...]


def group_ways(blocked: Collection[Way], tried: Collection[Way]) -> list[Group]:
    """Explain blocked directions with as few hosts as possible.

    Args:
        blocked: The directions that failed, all in a like manner.
        tried: All directions that were tried, these included.
    """
    left = set(blocked)
    if not left:
        return []
    nodes = {node for way in tried for node in way}
    if left == set(tried):
        return [Group(shape="everywhere", nodes=tuple(sorted(nodes)), ways=tuple(sorted(left)))]
    opened = set(tried) - left
    groups = _find_split(left, opened, nodes)
    for group in groups:
        left.difference_update(group.ways)
    shapes: tuple[Shape, ...] = ("around", "to", "from")
    for shape in shapes:
        found = _find_hosts(shape, left, opened)
        if found is not None:
            groups.append(found)
            left.difference_update(found.ways)
    return [*groups, *_pairs(left)]


def _find_split(blocked: set[Way], opened: set[Way], nodes: set[int]) -> list[Group]:
    """Find two sides, each of several hosts that reach each other, with nothing open between."""
    sides = sorted(_sides(opened, nodes), key=len)
    if len(sides) != 2 or len(sides[0]) < _EVIDENCE:  # noqa: PLR2004 - two sides are a split
        return []
    smaller = sides[0]
    across = [way for way in blocked if (way[0] in smaller) is not (way[1] in smaller)]
    return [Group(shape="split", nodes=tuple(sorted(smaller)), ways=tuple(sorted(across)))]


def _sides(opened: Iterable[Way], nodes: set[int]) -> list[set[int]]:
    neighbours: dict[int, set[int]] = defaultdict(set)
    for source, target in opened:
        neighbours[source].add(target)
        neighbours[target].add(source)
    sides, unseen = [], set(nodes)
    while unseen:
        side, front = set(), [unseen.pop()]
        while front:
            node = front.pop()
            side.add(node)
            front += neighbours[node] - side
        unseen -= side
        sides.append(side)
    return sides


def _find_hosts(shape: Shape, blocked: set[Way], opened: set[Way]) -> Group | None:
    """Find hosts of which every direction of a kind is blocked."""
    ends = {"around": (0, 1), "to": (1,)}.get(shape, (0,))
    open_at = {way[end] for way in opened for end in ends}
    counts: dict[int, int] = defaultdict(int)
    for way in blocked:
        for end in ends:
            counts[way[end]] += 1
    needed = _EVIDENCE * len(ends)
    found = {node for node, count in counts.items() if count >= needed and node not in open_at}
    if not found:
        return None
    ways = tuple(sorted(way for way in blocked if any(way[end] in found for end in ends)))
    return Group(shape=shape, nodes=tuple(sorted(found)), ways=ways)


def _pairs(blocked: set[Way]) -> list[Group]:
    groups = []
    for source, target in sorted(blocked):
        both = (target, source) in blocked
        if both and source > target:
            continue
        ways: tuple[Way, ...] = (
            ((source, target), (target, source)) if both else ((source, target),)
        )
        shape: Shape = "pair" if both else "one-way"
        groups.append(Group(shape=shape, nodes=(source, target), ways=ways))
    return groups
