"""The wait graph proves whether waiting ranks can continue: a table, and random programs.

The random programs run here, in one process: each rank has a list of collectives over subgroups,
and a scheduler advances one rank at a time, in random order. The ranks' answers to the launcher are
read one by one, with steps of other ranks in between, as in a real job.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Final

import pytest
from random_jobs import BARRIER, FROM_ONE, Groups, call, done, random_job

from ddpsafe._launcher.diagnosis.wait_graph import RankView, find_deadlock
from ddpsafe._wire.messages import MAIN_GROUP, Collective, Position, Whereabouts

HEALTHY_PROGRAMS: Final = 1_000
BROKEN_PROGRAMS: Final = 1_000


PAIR: Final[Groups] = {MAIN_GROUP: (0, 1)}
TWO_GROUPS: Final[Groups] = {MAIN_GROUP: (0, 1), "1": (0, 1), "2": (0, 1)}
RING: Final[Groups] = {"1": (0, 1), "2": (1, 2), "3": (2, 0)}
FOUR: Final[Groups] = {MAIN_GROUP: (0, 1, 2, 3)}


def waits(rank: int, groups: Groups, *calls: Collective, threads: int = 1) -> RankView:
    """Return a rank whose threads wait in the last of its collectives."""
    return _view(rank, groups, calls, waits=calls[-threads:])


def works(rank: int, groups: Groups, *calls: Collective) -> RankView:
    """Return a rank that is working, or sleeping outside of a collective."""
    return _view(rank, groups, calls)


def half_waits(rank: int, groups: Groups, *calls: Collective) -> RankView:
    """Return a rank of which one thread waits in the last of its collectives, and another one works."""
    return _view(rank, groups, calls, waits=calls[-1:], is_held=False)


def left(rank: int, *calls: Collective) -> RankView:
    """Return a rank that has returned."""
    at = Whereabouts(position=Position(collectives=calls))
    return RankView(rank=rank, answer=at, has_left=True)


def stopped(rank: int) -> RankView:
    """Return a rank that is stopped and does not answer."""
    return RankView(rank=rank, is_stopped=True)


def _view(
    rank: int,
    groups: Groups,
    calls: tuple[Collective, ...],
    *,
    waits: tuple[Collective, ...] = (),
    is_held: bool = True,
) -> RankView:
    at = Whereabouts(
        position=Position(collectives=calls),
        groups={name: members for name, members in groups.items() if rank in members},
        waits=waits,
        is_held=is_held and bool(waits),
    )
    return RankView(rank=rank, answer=at, is_asleep=True)


def passed(number: int, name: str = "all_gather", *, numel: int = 4) -> tuple[Collective, ...]:
    """Return the calls of a rank that has left a collective and waits in a barrier after it."""
    return (
        call(number, name, state="completed", numel=numel),
        call(number + 1, "barrier", numel=0),
    )


THREE: Final[Groups] = {MAIN_GROUP: (0, 1, 2)}
LEFT_BEHIND: Final = [
    pytest.param("all_gather", 4, 0, "mismatch", (1,), id="a rank passes nothing and is done"),
    pytest.param("all_gather", 4, 3, "mismatch", (1,), id="a rank passes less and is done"),
    pytest.param("all_gather", 0, 4, "mismatch", (1,), id="all others pass nothing"),
    pytest.param("reduce", 4, 3, "mismatch", (1,), id="a sender passes less"),
    pytest.param("broadcast", 4, 0, "mismatch", (1,), id="a root passes nothing"),
    pytest.param("all_gather", 4, 4, None, (), id="a rank is done a moment earlier"),
    pytest.param("broadcast", 4, 4, None, (), id="a root is done a moment earlier"),
    pytest.param("gather", 4, 3, None, (), id="sizes that may differ are left behind"),
    pytest.param("all_to_all", 4, 0, None, (), id="splits are not known"),
]
"""Collective, the size of the two ranks that wait in it, that of rank 1, which has left it; the verdict."""


@pytest.mark.parametrize(("name", "size", "other", "reason", "ranks"), LEFT_BEHIND)
def test_a_rank_that_has_left_a_collective_which_the_others_cannot_finish(
    name: str, size: int, other: int, reason: str | None, ranks: tuple[int, ...]
) -> None:
    """Sizes of one number are compared with ranks that have left it."""
    inside = call(3, name, numel=size)
    views = [
        waits(0, THREE, inside),
        waits(1, THREE, *passed(3, name, numel=other)),
        waits(2, THREE, inside),
    ]
    found = find_deadlock({view.rank: view for view in views})
    assert (found and found.reason, found.ranks if found else ()) == (reason, ranks)
    if found:
        assert "rank 1 has left " in found.lines()[1]


@pytest.mark.parametrize(
    ("roots", "reason", "ranks"),
    [
        ((0, 1), "mismatch", (0, 1)),
        ((0, 0), None, ()),
        ((None, 1), None, ()),
        ((None, None), None, ()),
    ],
)
@pytest.mark.parametrize("name", ["broadcast", "scatter", "gather", "reduce"])
def test_ranks_that_name_different_roots_wait_forever(
    roots: tuple[int | None, int | None], name: str, reason: str | None, ranks: tuple[int, ...]
) -> None:
    """A rank that has left does not show its root, so only those that wait are named."""
    views = [
        waits(0, THREE, call(3, name, root=roots[0])),
        waits(1, THREE, call(3, name, root=roots[1])),
        waits(2, THREE, *passed(3, name)),
    ]
    found = find_deadlock({view.rank: view for view in views})
    assert (found and found.reason, found.ranks if found else ()) == (reason, ranks)


@pytest.mark.parametrize(
    ("name", "root", "reason"),
    [
        ("broadcast", 0, "left"),
        ("scatter", 0, "left"),
        ("broadcast", 1, None),
        ("broadcast", None, None),
        ("reduce", 0, None),
    ],
)
def test_a_broadcast_needs_its_root(name: str, root: int | None, reason: str | None) -> None:
    """The others send and receive nothing without it, while any other rank may be missing."""
    views = [left(0), *(waits(rank, THREE, call(3, name, root=root)) for rank in (1, 2))]
    found = find_deadlock({view.rank: view for view in views})
    assert (found and found.reason) == reason


def in_own_wait(
    rank: int, awaited: tuple[int, ...], *, number: int = 1, done: dict[str, int] | None
) -> RankView:
    """Return a rank that waits in ddpsafe's store for other ranks."""
    at = Whereabouts(
        position=Position(collectives=(), done=done),
        groups={**PAIR, "epoch": awaited},
        waits=(call(number, BARRIER, group="epoch"),),
        is_held=True,
    )
    return RankView(rank=rank, answer=at, is_asleep=True)


def knowing(view: RankView, done: dict[str, int] | None) -> RankView:
    """Return a rank that has done so much of what others wait for."""
    assert view.answer is not None
    position = replace(view.answer.position, done=done)
    return replace(view, answer=replace(view.answer, position=position))


AT_BARRIER: Final = in_own_wait(0, (0, 1), done={"epoch": 1})
OWN_ROWS: Final = [
    pytest.param(knowing(waits(1, PAIR, call(3)), {}), "mismatch", (0, 1), id="in a collective"),
    pytest.param(knowing(waits(1, PAIR, call(3)), {"epoch": 1}), None, (), id="it has been there"),
    pytest.param(knowing(waits(1, PAIR, call(3)), None), None, (), id="what it did is unknown"),
    pytest.param(knowing(works(1, PAIR, done(2)), {}), None, (), id="it works"),
    pytest.param(knowing(left(1, done(2)), {}), "left", (1,), id="it has returned before"),
    pytest.param(knowing(left(1, done(2)), {"epoch": 1}), None, (), id="it has returned after"),
    pytest.param(knowing(left(1, done(2)), None), None, (), id="it has returned, no more is known"),
    pytest.param(stopped(1), None, (), id="it is stopped, perhaps behind the barrier"),
    pytest.param(
        in_own_wait(1, (0,), number=2, done={"epoch": 1}), None, (), id="it is at the next one"
    ),
]
"""Rank 0 waits at a barrier; what is known of rank 1, and what follows from that."""


@pytest.mark.parametrize(("other", "reason", "ranks"), OWN_ROWS)
def test_waits_of_ddpsafes_own_are_part_of_the_graph(
    other: RankView, reason: str | None, ranks: tuple[int, ...]
) -> None:
    """They wait for what a rank has not done yet, and never for what is not known."""
    found = find_deadlock({0: AT_BARRIER, 1: other})
    assert (found and found.reason, tuple(sorted(found.ranks)) if found else ()) == (reason, ranks)


@pytest.mark.parametrize(
    ("third", "proved"),
    [
        pytest.param(in_own_wait(2, (0, 1, 2), done={"epoch": 1}), True, id="at the barrier"),
        pytest.param(knowing(works(2, THREE), {"epoch": 1}), False, id="there, with its own limit"),
        pytest.param(works(2, THREE), False, id="perhaps there"),
    ],
)
def test_a_barrier_that_a_rank_may_give_up_is_no_proof(third: RankView, *, proved: bool) -> None:
    """When the limit of one rank runs out, the barrier ends for all that are there."""
    views = {
        0: in_own_wait(0, (0, 1, 2), done={"epoch": 1}),
        1: knowing(waits(1, THREE, call(3)), {}),
        2: third,
    }
    found = find_deadlock(views)
    assert (found and found.ranks) == ((1,) if proved else None)


ROWS: Final = [
    pytest.param([waits(0, PAIR, call(3)), works(1, PAIR, done(2))], None, (), id="a slow rank"),
    pytest.param([waits(0, PAIR, call(3)), waits(1, PAIR, call(3))], None, (), id="both have entered"),
    pytest.param([waits(0, PAIR, call(3))], None, (), id="the other is unknown"),
    pytest.param([waits(0, PAIR, call(3)), half_waits(1, PAIR, call(3, "broadcast"))], "mismatch", (0, 1),
        id="a thread is in a different one, and another thread works"),
    pytest.param([waits(0, TWO_GROUPS, call(1, group="1")), half_waits(1, TWO_GROUPS, call(1, group="2"))],
        None, (), id="a thread waits for the other rank, and another thread works"),
    pytest.param([waits(0, TWO_GROUPS, call(1, group="1")),
        waits(1, TWO_GROUPS, call(1, group="2"), call(3), threads=2)], "cycle", (0, 1),
        id="two threads wait for the other rank"),
    pytest.param([waits(0, TWO_GROUPS, call(1, group="1"), call(3)),
        waits(1, TWO_GROUPS, call(1, group="2"), call(3), threads=2)], None, (),
        id="of two threads, one waits for nothing"),
    pytest.param([waits(0, PAIR, call(3)), RankView(rank=1)], None, (), id="the other does not answer"),
    pytest.param([waits(0, PAIR, call(3)), waits(1, PAIR, call(3, "barrier"))], "mismatch", (0, 1),
        id="different collectives"),
    pytest.param([waits(0, FOUR, call(3)), waits(1, FOUR, call(3)), waits(2, FOUR, call(3, "barrier")),
        waits(3, FOUR, call(3))], "mismatch", (2,), id="one of four is in a different one"),
    pytest.param([waits(0, FOUR, call(3)), waits(1, FOUR, call(3, "barrier")), waits(2, FOUR, call(3)),
        works(3, FOUR, done(2))], None, (), id="one has not entered yet, so the odd one is not known"),
    pytest.param([waits(0, PAIR, call(3)), waits(1, PAIR, call(3, numel=5))], "mismatch", (0, 1),
        id="different sizes"),
    pytest.param([waits(0, PAIR, call(3, "gather")), waits(1, PAIR, call(3, "gather", numel=5))], None, (),
        id="sizes that may differ"),
    pytest.param([waits(0, PAIR, call(3, "all_gather")), waits(1, PAIR, call(3, "_all_gather_base"))], None,
        (), id="two forms of one collective"),
    pytest.param([waits(0, TWO_GROUPS, call(1, group="1")), waits(1, TWO_GROUPS, call(1, group="2"))],
        "cycle", (0, 1), id="two groups in two orders"),
    pytest.param([works(0, TWO_GROUPS, call(1, group="1")), waits(1, TWO_GROUPS, call(1, group="2"))], None,
        (), id="one of them is asynchronous and continues"),
    pytest.param([waits(0, RING, call(1, group="1")), waits(1, RING, call(1, group="2")),
        waits(2, RING, call(1, group="3"))], "cycle", (0, 1, 2), id="a ring of three"),
    pytest.param([waits(0, RING, call(1, group="1")), waits(1, RING, call(1, group="2")), works(2, RING)],
        None, (), id="a chain that ends at a working rank"),
    pytest.param([waits(0, PAIR, call(3)), left(1, done(2))], "left", (1,), id="the other has returned"),
    pytest.param([waits(0, PAIR, done(2), call(3)), left(1, done(3))], None, (),
        id="it returned after the same collective"),
    pytest.param([waits(0, PAIR, call(1, numel=4)), left(1, call(1, numel=3, state="completed"))],
        "mismatch", (0, 1), id="it returned after the same collective of another size"),
    pytest.param([waits(0, PAIR, call(1, numel=4)), works(1, PAIR, call(1, numel=3, state="completed"))],
        "mismatch", (0, 1), id="it is busy after the same collective of another size"),
    pytest.param([waits(0, RING, call(1, group="1")), waits(1, RING, call(1, group="2")), left(2)], "left",
        (2,), id="a chain that ends at a rank that has returned"),
    pytest.param([waits(0, PAIR, call(3)), stopped(1)], "stopped", (1,), id="the other is stopped"),
    pytest.param([works(0, PAIR, call(3)), stopped(1)], "stopped", (1,), id="it sleeps in a backward pass"),
    pytest.param([works(0, PAIR, done(2)), stopped(1)], None, (),
        id="stopped, but no rank waits for it yet"),
    pytest.param([waits(0, FOUR, call(3)), waits(1, FOUR, call(3)), works(2, FOUR, done(2)), stopped(3)],
        None, (), id="stopped, but another rank is still working"),
    pytest.param([waits(0, FOUR, call(3, FROM_ONE)), works(1, FOUR), left(2), works(3, FOUR)], None, (),
        id="a working rank may still send the broadcast"),
    pytest.param([waits(0, PAIR, call(3, FROM_ONE)), left(1, done(2))], "left", (1,),
        id="only a rank that has returned could send the broadcast"),
    pytest.param([left(0), waits(1, THREE, call(3, "broadcast", root=0)), works(2, THREE)], None, (),
        id="rank 2 may be the root, if a script has numbered the ranks in another order"),
]  # fmt: skip


@pytest.mark.parametrize(("views", "reason", "ranks"), ROWS)
def test_find_deadlock_returns_a_proof_or_none(
    views: list[RankView], reason: str | None, ranks: tuple[int, ...]
) -> None:
    """Each row has the known facts about the ranks, and what certainly follows from them."""
    found = find_deadlock({view.rank: view for view in views})
    assert (None if found is None else found.reason) == reason
    assert (() if found is None else tuple(sorted(found.ranks))) == ranks


def test_the_proof_is_shown_step_by_step() -> None:
    """It lists which rank waits where for which rank, and why the wait cannot end."""
    views = [waits(0, RING, call(1, group="1")), waits(1, RING, call(1, group="2")), left(2)]
    found = find_deadlock({view.rank: view for view in views})
    assert found is not None
    assert found.lines() == [
        "rank 0 waits in all_reduce number 1 of group '1' of shape [4] for rank 1",
        "rank 1 waits in all_reduce number 1 of group '2' of shape [4] for rank 2",
        "rank 2 has returned and enters no further collective.",
    ]


@pytest.mark.full
def test_a_healthy_program_is_never_a_deadlock() -> None:
    """Whenever the ranks are asked and however slow one is, there is no proof."""
    for seed in range(HEALTHY_PROGRAMS):
        choose = random.Random(seed)
        job = random_job(choose, is_broken=False)
        for _ in range(12):
            job.run(choose, choose.randrange(6))
            found = job.find(choose)
            assert found is None, f"seed {seed}: {found}"
        job.run_to_the_end()
        assert all(rank.has_left for rank in job.ranks), (
            f"seed {seed} does not end, so it is not healthy"
        )


def test_ranks_in_a_proof_never_continue() -> None:
    """A proof found while other ranks run still holds after they have run as far as they can."""
    proofs = stuck = 0
    for seed in range(BROKEN_PROGRAMS):
        choose = random.Random(seed)
        job = random_job(choose, is_broken=True)
        found = None
        while found is None and job.advance():
            job.run(choose, choose.randrange(4))
            found = job.find(choose)
        found = found or job.find(choose)
        if found is not None:
            proofs += 1
            job.require_held(found, seed)
        job.run_to_the_end()
        stuck += not all(rank.has_left for rank in job.ranks)
    assert proofs > stuck * 0.9, f"{proofs} proofs for {stuck} programs that do not end"
    assert stuck > BROKEN_PROGRAMS / 4


def test_many_ranks_are_compared_in_time() -> None:
    """256 ranks with 128 collectives in each of two groups take a tenth of a second, not eight."""
    size = 256
    groups = {MAIN_GROUP: tuple(range(size)), "1": tuple(range(size))}
    past = [done(number, group=group) for number in range(1, 129) for group in groups]
    views = {
        rank: waits(rank, groups, *past, call(129, "all_reduce" if rank else "broadcast"))
        for rank in range(size)
    }
    started_s = time.process_time()
    found = find_deadlock(views)
    took_s = time.process_time() - started_s
    assert found is not None
    assert (found.reason, found.ranks) == ("mismatch", (0,))
    assert took_s < 2, f"{took_s:.1f} s"
