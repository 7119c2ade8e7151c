"""Find which ranks wait for each other, and prove that these waits never end.

A rank that waits in a collective continues only when the collective has ended, and most collectives
end only when every rank of their group has entered them. So a rank waits forever if a rank that it
needs has returned, is stopped, or waits forever itself. `find_deadlock` finds the largest set of
such ranks: it repeatedly removes every rank that may still continue, and what remains is a deadlock.
A rank about which too little is known may always continue, and so may one with another thread that could
call something. Waits in ddpsafe's own store, as in a barrier, are waits for what `Position.done` counts.

The ranks have to be seen at one instant, so each is asked twice, the second time after all have
answered once. Numbers of collectives only grow. A rank that is in the same place in both answers was
there all the time between, so there is an instant at which all such ranks were; see `unchanged`.

This is pure logic: tests/launcher/test_wait_graph.py has the table, and runs random programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ddpsafe._text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpsafe._wire.messages import Collective, Whereabouts

# Ranks may mix these variants of a collective with its plain form, and both end well.
_VARIANTS: Final = ("_base", "_into_tensor", "_tensor", "_coalesced", "_single")
_FROM_ONE: Final = ("broadcast", "scatter")
_FROM_OR_TO_ONE: Final = ("broadcast", "reduce", "gather", "scatter", "send", "recv")

Reason = Literal["mismatch", "cycle", "left", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What is known about one rank.

    Attributes:
        is_asleep: Whether its main thread did not run between the two questions.
        has_left: Whether its function has returned, so that it enters no further collective.
        is_stopped: Whether its process is stopped (SIGSTOP).
    """

    rank: int
    answer: Whereabouts | None = None
    is_asleep: bool = False
    has_left: bool = False
    is_stopped: bool = False

    @cached_property  # as each rank is compared with every other: 0.06 s instead of 2 s for 128 ranks
    def entered(self) -> Mapping[str, int]:
        """What it has entered last, by group: the number of a collective, or of what others wait for in the store."""
        return {} if self.answer is None else _last_numbers(self.answer)

    @property
    def waits(self) -> tuple[Collective, ...]:
        """The collectives, and waits of ddpsafe's own, that its threads cannot leave before these end."""
        if self.has_left or self.is_stopped or self.answer is None or not self.is_asleep:
            return ()
        return self.answer.waits

    @property
    def is_held(self) -> bool:
        """Whether it does nothing for another rank before one of `waits` ends."""
        return self.answer is not None and self.answer.is_held and bool(self.waits)

    def wait_at(self, place: tuple[str, int]) -> Collective | None:
        """Return the one of `waits` with this group and number."""
        return next((wait for wait in self.waits if _place(wait) == place), None)

    def is_missing_in(self, collective: Collective) -> bool:
        """Return whether a collective, or a wait of ddpsafe's own, needs the rank, as far as is known."""
        if collective.is_own_wait:
            # A stopped rank may have done what the others wait for, which does not need it further.
            is_known = self.answer is not None and self.answer.position.done is not None
            return is_known and self.entered.get(collective.group, 0) < collective.number
        is_behind = self.entered.get(collective.group, 0) < collective.number
        return self.is_stopped or (self.answer is not None and is_behind)

    def incomplete(self) -> list[Collective]:
        """Return the collectives that have not ended, without those queued for a GPU."""
        if self.answer is None:
            return []
        return [
            collective
            for collective in self.answer.position.collectives
            if not collective.done and not collective.is_queued_ahead
        ]


class Wait(NamedTuple):
    """A rank that waits in a collective for ranks that will never enter it."""

    rank: int
    collective: Collective
    awaited: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """The proof that ranks wait forever.

    Attributes:
        ranks: The ranks that cause it: those whose collective differs, those in the cycle, or the
            one that has returned or is stopped.
        calls: Which collective each rank is in, if they differ under one number.
    """

    reason: Reason
    ranks: tuple[int, ...]
    waits: tuple[Wait, ...] = ()
    calls: tuple[tuple[int, Collective], ...] = ()

    def lines(self) -> list[str]:
        """Return the proof, a line for each step."""
        if self.reason == "mismatch":
            return [
                *call_lines(self.calls),
                "waiting longer cannot resolve this: the ranks can never continue.",
            ]
        lines = [
            f"rank {rank} waits in {collective} for {ranks_text(awaited)}"
            for rank, collective, awaited in self.waits
        ]
        last = {
            "cycle": "each waits for the next, and the last for the first: none of them can continue.",
            "left": f"{ranks_text(self.ranks)} has returned and enters no further collective.",
            "stopped": f"{ranks_text(self.ranks)} is stopped and does nothing until it is resumed.",
        }
        return [*lines, last[self.reason]]


def call_lines(
    calls: Iterable[tuple[int, Collective]], *, verbs: tuple[str, str] | None = None
) -> list[str]:
    """Return a line for each collective that ranks have entered under one number, with the ranks.

    `verbs` say what one rank and what several did; by default, whether they are in it or have left it.
    """
    texts: dict[tuple[str, bool], list[int]] = {}
    calls = list(calls)
    has_dtypes = len({collective.dtypes for _, collective in calls} - {""}) > 1
    for rank, collective in calls:
        has_left = collective.done and verbs is None
        of = f" of {collective.dtypes}" if has_dtypes and collective.dtypes else ""
        texts.setdefault((f"{collective}{of}", has_left), []).append(rank)
    words = {False: verbs or ("is in", "are in"), True: ("has left", "have left")}
    return [
        f"{ranks_text(ranks)} {words[has_left][len(ranks) > 1]} {text}"
        for (text, has_left), ranks in texts.items()
    ]


def unchanged(before: Whereabouts | None, now: Whereabouts | None) -> Whereabouts | None:
    """Return the later answer if the rank was in the same place all the time between the two."""
    if before is None or now is None or before is now:
        return None
    seen = [
        (list(map(_place, answer.waits)), answer.is_held, answer.ran, _last_numbers(answer))
        for answer in (before, now)
    ]
    return now if seen[0] == seen[1] else None


def _place(collective: Collective) -> tuple[str, int]:
    return (collective.group, collective.number)


def _last_numbers(answer: Whereabouts) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for collective in answer.position.collectives:
        last = numbers.get(collective.group, 0)
        numbers[collective.group] = max(collective.number, last)
    return {**numbers, **(answer.position.done or {})}


def find_deadlock(views: Mapping[int, RankView]) -> Deadlock | None:
    """Return the proof that ranks wait forever, if there is one.

    All views are of one instant; a rank that is missing counts as busy.
    """
    members = _members(views)
    mismatch = _find_mismatch(views, members)
    if mismatch is not None:
        return mismatch
    # Repeatedly remove every rank that may still continue; the others are stuck.
    inactive = {view.rank for view in views.values() if view.has_left or view.is_stopped}
    stuck = {view.rank for view in views.values() if view.is_held}
    while True:
        waits = _find_endless(views, members, stuck, inactive | stuck)
        free = {rank for rank, wait in waits.items() if wait is None}
        if not free:
            break
        stuck -= free
    endless = {rank: wait for rank, wait in waits.items() if wait is not None}
    return _find_stopped(views, members, endless) or _find_cycle_or_left(views, endless)


def _members(views: Mapping[int, RankView]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for view in views.values():
        if view.answer is not None:
            members.update(view.answer.groups)
    return members


def _find_mismatch(
    views: Mapping[int, RankView], members: Mapping[str, tuple[int, ...]]
) -> Deadlock | None:
    """Find a group whose ranks have all entered its lowest current number, in different collectives."""
    for group, ranks in members.items():
        numbers = [
            views[rank].entered[group]
            for rank in ranks
            if rank in views and group in views[rank].entered
        ]
        if len(numbers) < len(ranks):  # a rank has entered nothing, or is unknown
            continue
        numbered = [
            (rank, answer.position.numbered(group, min(numbers)))
            for rank in ranks
            if (answer := views[rank].answer) is not None
        ]
        entered = [(rank, call) for rank, call in numbered if call is not None]
        if len(entered) < len(ranks) or any(call.is_queued_ahead for _, call in entered):
            continue
        # Those that a rank cannot leave before they end, with what only its stack shows.
        blocking = {
            rank: inside
            for rank, call in entered
            if not call.done and (inside := views[rank].wait_at(_place(call))) is not None
        }
        calls = [(rank, blocking.get(rank, call)) for rank, call in entered]
        if any(_never_ends(inside, calls) for inside in blocking.values()):
            # Where roots differ, only ranks that still wait show theirs.
            has_roots = len({inside.root for inside in blocking.values()}) > 1
            shown = [rank for rank, _ in calls if rank in blocking or not has_roots]
            return differ(calls, shown=shown, has_roots=has_roots)
    return None


def differ(
    calls: Sequence[tuple[int, Collective]],
    *,
    shown: Sequence[int] | None = None,
    has_roots: bool = False,
) -> Deadlock:
    """Return the proof that ranks are in different calls; those of `shown` in the rarest one cause it."""
    ranks_of: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls:
        if shown is None or rank in shown:
            dtypes = call.dtypes if call.has_one_size else ""
            kind = (family(call), call.required_size, dtypes, call.root if has_roots else None)
            ranks_of.setdefault(kind, []).append(rank)
    fewest = min(len(callers) for callers in ranks_of.values())
    rarest = tuple(
        rank for callers in ranks_of.values() if len(callers) == fewest for rank in callers
    )
    return Deadlock(reason="mismatch", ranks=rarest, calls=tuple(calls))


def _never_ends(blocking: Collective, calls: Sequence[tuple[int, Collective]]) -> bool:
    """Return whether what all ranks have entered under one number shows that a rank's wait never ends."""
    same = [call for _, call in calls if family(call) == family(blocking)]
    # A wait for one rank only, such as that of a broadcast, may end while another rank is in a
    # different collective. It does not if the ranks name different roots, or pass different sizes
    # to it.
    if len(same) < len(calls) and not _is_for_one(blocking):
        return True
    # Sizes count on a rank whose collective has ended, too: of gloo ranks that pass different
    # sizes, the one that passes fewer elements, or none, often has all that it needs, and leaves
    # the other ones alone.
    sizes = {call.required_size for call in same} - {None}
    is_other_size = blocking.required_size is not None and len(sizes) > 1
    roots = {call.root for call in same} - {None}
    return is_other_size or (blocking.root is not None and len(roots) > 1)


def family(collective: Collective) -> str:
    name = collective.name.partition(":")[2].lstrip("_")
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    return name


def _is_for_one(collective: Collective) -> bool:
    """Return whether one rank sends to or receives from all, so that a wait may need that one only."""
    return family(collective) in _FROM_OR_TO_ONE


def _find_endless(
    views: Mapping[int, RankView],
    members: Mapping[str, tuple[int, ...]],
    held: Iterable[int],
    inactive: set[int],
) -> dict[int, Wait | None]:
    """Return a wait of each rank that is held, if all its waits need ranks that never enter them."""
    # By collective: most of thousands of ranks wait in the same one, and for the same ranks.
    never: dict[tuple[str, int], tuple[int, ...]] = {}
    waits: dict[int, Wait | None] = {}
    for rank in held:
        endless = []
        for collective in views[rank].waits:
            place, group = _place(collective), members.get(collective.group, ())
            if place not in never:
                of_group = [view for member in group if (view := views.get(member)) is not None]
                missing = [view.rank for view in of_group if view.is_missing_in(collective)]
                never[place] = tuple(other for other in missing if other in inactive)
                if collective.is_own_wait and rank in group:
                    # A barrier. A rank that is there, or comes, with a limit of its own may give up, for all.
                    at_it = [view.rank for view in of_group if view.wait_at(place) is not None]
                    if not inactive.intersection([*missing, *at_it]).issuperset(group):
                        never[place] = ()
            # torch's number of the root need not be the launch's: then another rank of the group is the root.
            lacks_root = (
                family(collective) in _FROM_ONE
                and collective.root in never[place]
                and inactive.issuperset(group)
            )
            is_enough = _is_for_one(collective) and len(never[place]) < len(group) - 1
            if never[place] and (lacks_root or not is_enough):
                endless.append(Wait(rank, collective, never[place]))
        waits[rank] = endless[0] if len(endless) == len(views[rank].waits) else None
    return waits


def _find_stopped(
    views: Mapping[int, RankView], members: Mapping[str, tuple[int, ...]], waits: Mapping[int, Wait]
) -> Deadlock | None:
    """Find a stopped rank that all others wait for."""
    # All: a rank that is still busy may resume it.
    sets = {group: frozenset(ranks) for group, ranks in members.items()}
    for culprit in views.values():
        if not culprit.is_stopped:
            continue
        for_culprit = []
        for view in views.values():
            if view is culprit or view.has_left or view.is_stopped:
                continue
            if view.rank in waits and culprit.rank in waits[view.rank].awaited:
                for_culprit.append(waits[view.rank])
                continue
            # A rank that sleeps elsewhere waits too, if a collective that it has under way needs the culprit.
            unfinished = [
                collective
                for collective in view.incomplete()
                if culprit.rank in sets.get(collective.group, ()) and view.is_asleep
            ]
            if not unfinished:
                break
            for_culprit.append(Wait(view.rank, unfinished[0], (culprit.rank,)))
        else:
            if for_culprit:
                return Deadlock(reason="stopped", ranks=(culprit.rank,), waits=tuple(for_culprit))
    return None


def _find_cycle_or_left(
    views: Mapping[int, RankView], waits: Mapping[int, Wait]
) -> Deadlock | None:
    """Follow the waits until they reach a rank that has returned, or a rank for the second time."""
    for first in sorted(waits):
        path: list[int] = []
        rank = first
        while rank in waits and rank not in path:
            path.append(rank)
            awaited = waits[rank].awaited
            rank = next((other for other in awaited if other not in waits), awaited[0])
        if rank in path:
            cycle = path[path.index(rank) :]
            pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            if any(wait.collective.is_own_wait for wait in waits.values()):
                # The ranks are in different calls, and torch knows only some of these.
                return differ([(wait.rank, wait.collective) for wait in waits.values()])
            narrowed = [Wait(one, waits[one].collective, (after,)) for one, after in pairs]
            return Deadlock(reason="cycle", ranks=tuple(cycle), waits=tuple(narrowed))
        if views[rank].has_left:
            on_path = tuple(waits[waiting] for waiting in path)
            return Deadlock(reason="left", ranks=(rank,), waits=on_path)
    return None  # they wait for a stopped rank, which may be resumed while another rank is busy
