"""Simulated ranks that run random programs of collectives over subgroups, one step of one rank at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ddpsafe._launcher.diagnosis.wait_graph import Deadlock, RankView, find_deadlock, unchanged
from ddpsafe._wire.messages import MAIN_GROUP, Collective, CollectiveState, Position, Whereabouts

if TYPE_CHECKING:
    import random

FROM_ONE: Final = "broadcast"

Groups = dict[str, tuple[int, ...]]


def call(
    number: int,
    name: str = "all_reduce",
    *,
    group: str = MAIN_GROUP,
    state: CollectiveState = "started",
    numel: int = 4,
    root: int | None = None,
) -> Collective:
    """Return a collective as the flight recorder reports it, with the root from the stack."""
    return Collective(
        group=group,
        number=number,
        name=f"gloo:{name}",
        sizes=f"[[{numel}]]",
        state=state,
        entered_ns=number,
        numel=numel,
        root=root,
    )


def done(number: int, name: str = "all_reduce", group: str = MAIN_GROUP) -> Collective:
    """Return a completed collective."""
    return call(number, name, group=group, state="completed")


@dataclass
class Op:
    """One collective of a program."""

    group: str
    name: str
    is_async: bool = False


@dataclass
class Rank:
    """One rank of a simulated job, with its program and position."""

    program: list[Op]
    groups: Groups
    at: int = 0
    is_inside: bool = False
    moves: int = 0
    entered: dict[str, list[Op]] = field(default_factory=dict)

    @property
    def has_left(self) -> bool:
        """Whether its program has ended."""
        return self.at == len(self.program)


class Job:
    """Ranks that run their programs, one step of one rank at a time."""

    def __init__(self, programs: list[list[Op]], groups: Groups) -> None:
        """Start all ranks at the beginning of their programs."""
        self.groups = groups
        self.ranks = [
            Rank(program, {name: who for name, who in groups.items() if rank in who})
            for rank, program in enumerate(programs)
        ]

    def step(self, rank: int) -> bool:
        """Let a rank enter its next collective or leave a completed one; return whether it could."""
        mine = self.ranks[rank]
        if mine.has_left:
            return False
        op = mine.program[mine.at]
        if not mine.is_inside:
            mine.entered.setdefault(op.group, []).append(op)
            mine.is_inside = True
        elif op.is_async or self._has_ended(rank, op.group, len(mine.entered[op.group])):
            mine.at, mine.is_inside = mine.at + 1, False
        else:
            return False
        mine.moves += 1
        return True

    def _has_ended(self, rank: int, group: str, number: int) -> bool:
        members = self.groups[group]
        mine = self.ranks[rank].entered[group][number - 1]
        if mine.name == FROM_ONE:
            members = members[:1]  # sent by its first rank, which does not wait
        others = [self.ranks[each].entered.get(group, []) for each in members]
        return all(len(ops) >= number and ops[number - 1].name == mine.name for ops in others)

    def look(self, rank: int) -> tuple[Whereabouts, int]:
        """Return the rank's current answer, and how often it has moved."""
        mine = self.ranks[rank]
        calls = tuple(
            call(
                number,
                op.name,
                group=group,
                state="completed" if self._has_ended(rank, group, number) else "started",
            )
            for group, ops in mine.entered.items()
            for number, op in enumerate(ops, start=1)
        )
        waits_in = None
        if mine.is_inside and not mine.program[mine.at].is_async:
            inside = (mine.program[mine.at].group, len(mine.entered[mine.program[mine.at].group]))
            waits_in = (
                next(
                    each for each in calls if (each.group, each.number) == inside and not each.done
                )
                if not self._has_ended(rank, *inside)
                else None
            )
        position = Position(collectives=calls)
        return Whereabouts(position=position, groups=mine.groups, waits_in=waits_in), mine.moves

    def run(self, choose: random.Random, steps: int) -> None:
        """Advance random ranks."""
        for _ in range(steps):
            self.step(choose.randrange(len(self.ranks)))

    def run_to_the_end(self) -> None:
        """Advance all ranks as long as one can move."""
        while self.advance():
            pass

    def require_held(self, found: Deadlock, seed: int) -> None:
        """Run to the end, and fail unless the ranks of the proof stay where they are."""
        inside = {wait.rank for wait in found.waits} or {rank for rank, _ in found.calls}
        held = {rank: self.ranks[rank].at for rank in inside if self.ranks[rank].is_inside}
        self.run_to_the_end()
        stays = {rank: self.ranks[rank].at for rank in held}
        if found.reason == "mismatch":  # an asynchronous rank continues, but another stays
            assert any(stays[rank] == held[rank] for rank in held), f"seed {seed}: {found}"
        else:
            assert stays == held, f"seed {seed}: {found}"

    def advance(self) -> bool:
        """Advance each rank by a step; return whether one could move."""
        return any(list(map(self.step, range(len(self.ranks)))))

    def ask(self, choose: random.Random) -> dict[int, tuple[Whereabouts, int]]:
        """Ask the ranks one after another while they continue."""
        answers = {}
        for rank in choose.sample(range(len(self.ranks)), len(self.ranks)):
            answers[rank] = self.look(rank)
            self.run(choose, choose.randrange(3))
        return answers

    def find(self, choose: random.Random) -> Deadlock | None:
        """Ask twice, as the launcher does."""
        first, second = self.ask(choose), self.ask(choose)
        views = {}
        for rank, (now, moves) in second.items():
            before, moves_before = first[rank]
            views[rank] = RankView(
                rank=rank,
                answer=self.look(rank)[0] if self.ranks[rank].has_left else unchanged(before, now),
                is_asleep=moves == moves_before,
                has_left=self.ranks[rank].has_left,
            )
        return find_deadlock(views)


def random_job(choose: random.Random, *, is_broken: bool) -> Job:
    """Make a job in which all ranks call collectives of random subgroups in the same order.

    In a broken job, a rank skips a collective, calls another one, or swaps two.
    """
    size = choose.randint(2, 6)
    groups: Groups = {MAIN_GROUP: tuple(range(size))}
    for number in range(1, choose.randint(1, 4)):
        members = choose.sample(range(size), choose.randint(2, size))
        groups[str(number)] = tuple(sorted(members))
    programs: list[list[Op]] = [[] for _ in range(size)]
    for _ in range(choose.randint(1, 12)):
        group = choose.choice(list(groups))
        name = choose.choice(["all_reduce", "all_reduce", "barrier", FROM_ONE])
        for rank in groups[group]:
            programs[rank].append(Op(group, name, is_async=choose.random() < 0.2))
    if is_broken and (victims := [each for each in programs if len(each) > 1]):
        program = choose.choice(victims)
        at = choose.randrange(len(program) - 1)
        how = choose.choice(["leave out", "call another", "swap"])
        if how == "leave out":
            del program[at]
        elif how == "call another":
            program[at] = Op(program[at].group, "all_gather")
        else:
            program[at], program[at + 1] = program[at + 1], program[at]
    return Job(programs, groups)
