"""Simulated ranks that run random programs of collectives over subgroups, one step of one rank at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from ddpsafe._launcher.diagnosis.wait_graph import Deadlock, RankView, find_deadlock, unchanged
from ddpsafe._wire.messages import (
    MAIN_GROUP,
    OWN_WAIT,
    Collective,
    CollectiveState,
    Position,
    Whereabouts,
)

FROM_ONE: Final = "broadcast"

BARRIER: Final = f"{OWN_WAIT}:barrier 'epoch'"
FIRST: Final = f"{OWN_WAIT}:rank_zero_first"
"""All ranks wait for each other, or all others for what the first one does, which itself waits for none."""

OWN: Final = {BARRIER.partition(":")[2]: BARRIER, FIRST.partition(":")[2]: FIRST}

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
        name=name if ":" in name else f"gloo:{name}",
        sizes="" if ":" in name else f"[[{numel}]]",
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
    """One collective of a program, or one wait of ddpsafe's own: `BARRIER` or `FIRST`."""

    group: str
    name: str
    is_async: bool = False
    has_limit: bool = False
    """Whether it may give up a barrier, for all ranks."""

    @property
    def is_own(self) -> bool:
        """Whether it is a wait of ddpsafe's own."""
        return self.name in (BARRIER, FIRST)


@dataclass
class Thread:
    """A thread of a simulated rank, with its program and where it is in that."""

    program: list[Op]
    at: int = 0
    number: int = 0
    """The number of the collective that it is inside of; 0 outside."""

    moves: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether its program has ended."""
        return self.at == len(self.program)

    @property
    def op(self) -> Op:
        """What it calls now or next."""
        return self.program[self.at]


@dataclass
class Rank:
    """One rank of a simulated job: its threads, the main one first, and what they have entered."""

    threads: list[Thread]
    groups: Groups
    entered: dict[str, list[Op]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    @property
    def has_left(self) -> bool:
        """Whether its programs have ended."""
        return all(thread.has_ended for thread in self.threads)


class Job:
    """Ranks that run their programs, one step of one thread at a time."""

    def __init__(self, programs: list[list[list[Op]]], groups: Groups) -> None:
        self.groups = groups
        self.given_up: set[tuple[str, int]] = set()
        self.ranks = [
            Rank(
                [Thread(program) for program in of_rank],
                {name: who for name, who in groups.items() if rank in who and not is_own(name)},
            )
            for rank, of_rank in enumerate(programs)
        ]

    def step(self, rank: int, thread: int = 0) -> bool:
        """Let a thread enter its next collective or leave a completed one; return whether it could."""
        mine = self.ranks[rank]
        actor = mine.threads[thread % len(mine.threads)]
        if actor.has_ended:
            return False
        op = actor.op
        if not actor.number:
            entered = mine.entered.setdefault(op.group, [])
            entered.append(op)
            actor.number = len(entered)
            if op.name == BARRIER:
                mine.done[op.group] = actor.number
        elif op.is_async or self._may_leave(rank, actor) or op.has_limit:
            if not self._may_leave(rank, actor) and op.has_limit:
                self.given_up.add((op.group, actor.number))
            if op.is_own:
                mine.done[op.group] = max(actor.number, mine.done.get(op.group, 0))
            actor.at, actor.number = actor.at + 1, 0
        else:
            return False
        actor.moves += 1
        return True

    def _may_leave(self, rank: int, actor: Thread) -> bool:
        op, number = actor.op, actor.number
        if not op.is_own:
            return self._has_ended(rank, op.group, number)
        awaited = self._awaited(rank, op)
        is_done = all(self.ranks[each].done.get(op.group, 0) >= number for each in awaited)
        return is_done or (op.group, number) in self.given_up

    def _awaited(self, rank: int, op: Op) -> tuple[int, ...]:
        first, *others = self.groups[op.group]
        if op.name == BARRIER:
            return (first, *others)
        return () if rank == first else (first,)

    def _has_ended(self, rank: int, group: str, number: int) -> bool:
        members = self.groups[group]
        mine = self.ranks[rank].entered[group][number - 1]
        if mine.name == FROM_ONE:
            members = members[:1]  # sent by its first rank, which does not wait
        others = [self.ranks[each].entered.get(group, []) for each in members]
        return all(len(ops) >= number and ops[number - 1].name == mine.name for ops in others)

    def look(self, rank: int) -> Whereabouts:
        """Return the rank's current answer."""
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
            if not op.is_own
        )
        inside = [
            thread
            for thread in mine.threads
            if thread.number
            and not (thread.op.is_async or thread.op.has_limit)
            and not self._may_leave(rank, thread)
        ]
        groups = dict(mine.groups)
        for thread in inside:
            if thread.op.is_own:
                groups[thread.op.group] = self._awaited(rank, thread.op)
        return Whereabouts(
            position=Position(collectives=calls, done=dict(mine.done)),
            groups=groups,
            waits=tuple(call(each.number, each.op.name, group=each.op.group) for each in inside),
            is_held=len(inside) == sum(not thread.has_ended for thread in mine.threads),
            ran=tuple(thread.moves for thread in inside),
        )

    def run(self, choose: random.Random, steps: int) -> None:
        """Advance random threads."""
        for _ in range(steps):
            self.step(choose.randrange(len(self.ranks)), choose.randrange(2))

    def run_to_the_end(self) -> None:
        """Advance all ranks as long as one can move."""
        while self.advance():
            pass

    def require_held(self, found: Deadlock, seed: int) -> None:
        """Run to the end, and fail unless the ranks of the proof stay where they are."""
        inside = {wait.rank for wait in found.waits} or {rank for rank, _ in found.calls}
        held = self._places(inside)
        self.run_to_the_end()
        stays = self._places(inside)
        if found.reason == "mismatch" and not any(
            each.is_own_wait for _, each in found.calls
        ):  # an asynchronous rank continues, but another stays
            assert any(held[rank] & stays[rank] for rank in held), f"seed {seed}: {found}"
        else:
            assert stays == held, f"seed {seed}: {found}"

    def _places(self, ranks: set[int]) -> dict[int, set[tuple[int, int]]]:
        """Return where the threads of ranks are that are inside of something."""
        return {
            rank: {
                (number, thread.at)
                for number, thread in enumerate(self.ranks[rank].threads)
                if thread.number
            }
            for rank in ranks
        }

    def advance(self) -> bool:
        """Advance each thread by a step; return whether one could move."""
        moved = [
            self.step(rank, thread)
            for rank, mine in enumerate(self.ranks)
            for thread in range(len(mine.threads))
        ]
        return any(moved)

    def ask(self, choose: random.Random) -> dict[int, tuple[Whereabouts, int]]:
        """Ask the ranks one after another while they continue."""
        answers = {}
        for rank in choose.sample(range(len(self.ranks)), len(self.ranks)):
            answers[rank] = (self.look(rank), self.ranks[rank].threads[0].moves)
            self.run(choose, choose.randrange(3))
        return answers

    def find(self, choose: random.Random) -> Deadlock | None:
        """Ask twice, as the launcher does."""
        first, second = self.ask(choose), self.ask(choose)
        views = {}
        for rank, (now, moves) in second.items():
            before, moves_before = first[rank]
            mine = self.ranks[rank]
            views[rank] = RankView(
                rank=rank,
                # At its end, the main thread waits for the other one.
                answer=self.look(rank) if mine.has_left else unchanged(before, now),
                is_asleep=moves == moves_before,
                has_left=mine.has_left,
            )
        return find_deadlock(views)


def is_own(group: str) -> bool:
    """Return whether a group stands for the ranks of a wait of ddpsafe's own."""
    return group.rstrip("+") in OWN


def random_job(choose: random.Random, *, is_broken: bool) -> Job:
    """Make a job in which all ranks call collectives of random subgroups in the same order.

    Some have a second thread with groups and barriers of its own, whose names end with "+". In a broken
    job, a thread skips a collective, calls another one, swaps two, or takes one of the other thread's groups.
    """
    size = choose.randint(2, 6)
    groups: Groups = {MAIN_GROUP: tuple(range(size))}
    for number in range(1, choose.randint(1, 4)):
        members = choose.sample(range(size), choose.randint(2, size))
        groups[str(number)] = tuple(sorted(members))
    groups |= dict.fromkeys(OWN, tuple(range(size)))
    groups |= {f"{name}+": members for name, members in groups.items()}
    programs = []
    for ending in ["", "+"][: choose.choice((1, 1, 2))]:
        of_thread: list[list[Op]] = [[] for _ in range(size)]
        for _ in range(choose.randint(1, 12)):
            group = choose.choice([name for name in groups if name.endswith("+") == bool(ending)])
            name = choose.choice(["all_reduce", "all_reduce", "barrier", FROM_ONE])
            for rank in groups[group]:
                own = OWN.get(group.rstrip("+"))
                of_thread[rank].append(
                    Op(
                        group,
                        own or name,
                        is_async=own is None and choose.random() < 0.2,
                        has_limit=own == BARRIER and choose.random() < 0.1,
                    )
                )
        programs.append(of_thread)
    victims = [program for of_thread in programs for program in of_thread if len(program) > 1]
    if is_broken and victims:
        program = choose.choice(victims)
        at = choose.randrange(len(program) - 1)
        how = choose.choice(["leave out", "call another", "swap", "take the other's"])
        if how == "leave out":
            del program[at]
        elif how == "call another":
            program[at] = Op(MAIN_GROUP if program[at].is_own else program[at].group, "all_gather")
        elif how == "swap":
            program[at], program[at + 1] = program[at + 1], program[at]
        else:
            group = program[at].group
            other = group[:-1] if group.endswith("+") else f"{group}+"
            program[at] = Op(other, program[at].name)
    return Job([list(of_rank) for of_rank in zip(*programs, strict=True)], groups)
