"""All ranks report, one decides, and all get its answer or raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import machine
import pytest

from ddpsafe._clock import Deadline
from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    LaunchTimeoutError,
    PreflightError,
)
from ddpsafe._job.agreement import Absence, Exchange, Message, RankGroup
from ddpsafe._job.control import Control
from ddpsafe._job.peers import Process
from ddpsafe._job.store_keys import FolderStore
from ddpsafe._world import World

RANKS: Final = 3
LIMIT_S: Final = machine.hang_limit(60)


def world_of(rank: int, nnodes: int = 1) -> World:
    """Return the place of a rank, on one node or alone on a node of its own."""
    local = RANKS // nnodes
    return World(
        rank=rank,
        world_size=RANKS,
        local_rank=rank % local,
        local_world_size=local,
        node_rank=rank // local,
        nnodes=nnodes,
        started_by="alone",
    )


def control_of(folder: Path, rank: int) -> Control:
    """Return the control line of a rank."""
    return Control(FolderStore(folder), rank=rank, world_size=RANKS)


def absence_error(absence: Absence) -> LaunchTimeoutError:
    """Return an error that shows who was missing, and why."""
    return LaunchTimeoutError(
        Explanation(f"missing {absence.ranks}", cause=absence.lost),
        waited_s=absence.waited_s,
        missing_ranks=absence.ranks,
        attempt=1,
    )


def highest(messages: dict[int, Message]) -> dict[str, Any]:
    """Decide for the highest number that any rank has sent."""
    return {"highest": max(message.facts["number"] for message in messages.values())}


def refuse(messages: dict[int, Message]) -> dict[str, Any]:
    """Refuse whatever the ranks have sent."""
    raise ConfigError(Explanation(f"refused {len(messages)} numbers"))


def crash(messages: dict[int, Message]) -> dict[str, Any]:
    """Fail with an exception that is not ddpsafe's."""
    raise ZeroDivisionError(len(messages))


def take_part(
    folder: Path,
    rank: int,
    *,
    decide: Callable[[dict[int, Message]], dict[str, Any]] = highest,
    limit_s: float = LIMIT_S,
    call: str = "a choice",
    before: Callable[[Exchange], None] = lambda _: None,
) -> object:
    """Agree as one rank; return the answer or the error."""
    ranks, world = range(RANKS), world_of(rank)
    group = RankGroup(control_of(folder, rank), "test", world, ranks, error_type=PreflightError)
    exchange = group.begin(call)
    try:
        before(exchange)
        exchange.send(Message(facts={"number": rank}))
        deadline = Deadline.after(timedelta(seconds=limit_s))
        return exchange.agree(decide, absence_error, deadline)
    except DDPSafeError as error:
        return error
    except ArithmeticError as error:
        exchange.fail(error)
        return error


def agree(folder: Path, *ranks: int, **options: Any) -> list[Any]:
    """Let these ranks take part at the same time; return what each of them got."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        started = [pool.submit(take_part, folder, rank, **options) for rank in ranks]
        return [each.result() for each in started]


def test_every_rank_gets_the_answer_of_the_leader(tmp_path: Path) -> None:
    """It knows what each of them has sent."""
    assert agree(tmp_path, 0, 1, 2) == [{"highest": 2}] * 3


@pytest.mark.parametrize(
    ("decide", "error", "text"),
    [(refuse, ConfigError, "refused 3 numbers"), (crash, PreflightError, "ZeroDivisionError: 3")],
)
def test_every_rank_raises_what_the_leader_raised(
    decide: Any, error: type[DDPSafeError], text: str, tmp_path: Path
) -> None:
    """An exception of another library is a line in the group's own kind of error."""
    first, *others = agree(tmp_path, 0, 1, 2, decide=decide)
    assert isinstance(first, (error, ZeroDivisionError))
    for rank, other in enumerate(others, 1):
        assert type(other) is error
        assert other.origin == "peer-lost"
        note = f"(raised on rank 0, seen by {world_of(rank)})"
        assert other.explanation.what == f"{text} {note}"


def test_the_error_of_a_rank_reaches_all_with_its_number(tmp_path: Path) -> None:
    """The leader raises it too, and decides nothing."""

    def fail_on_two(exchange: Exchange) -> None:
        if exchange._group.rank == 2:
            raise ZeroDivisionError

    zero, one, two = agree(tmp_path, 0, 1, 2, before=fail_on_two)
    assert isinstance(two, ZeroDivisionError)
    for error in (zero, one):
        assert type(error) is PreflightError
        assert "ZeroDivisionError:  (raised on rank 2, seen by rank " in str(error)


@pytest.mark.parametrize(("present", "missing"), [((0, 1), [2]), ((1, 2), [0])])
def test_who_did_not_take_part_is_named_on_every_rank(
    present: tuple[int, ...], missing: list[int], tmp_path: Path
) -> None:
    """Whether the leader is missing or another one."""
    for error in agree(tmp_path, *present, limit_s=0.5):
        assert f"missing {missing}" in str(error)


@pytest.mark.parametrize(("present", "lost"), [((0, 1), 2), ((1, 2), 0)])
def test_a_process_that_has_ended_is_not_waited_for(
    present: tuple[int, ...], lost: int, tmp_path: Path
) -> None:
    """Its pid may belong to another process by now: the time of its start tells them apart."""
    gone = replace(Process.myself(), started=1)
    control_of(tmp_path, lost).put(f"process/{lost}", json.dumps(asdict(gone)).encode())
    for error in agree(tmp_path, *present):
        assert f"missing [{lost}]" in str(error)
        assert f"its process {gone.pid} on {gone.host} has ended." in str(error)


def test_ranks_in_different_calls_are_told_so(tmp_path: Path) -> None:
    """What one has sent would be misread by the other."""
    with ThreadPoolExecutor(RANKS) as pool:
        calls = ("save()", "restore()", "save()")
        started = [
            pool.submit(take_part, tmp_path, rank, call=call) for rank, call in enumerate(calls)
        ]
        errors = [each.result() for each in started]
    for error in errors:
        assert type(error) is ConfigError
        assert "rank 1 calls restore() while rank 0 (world_size 3) calls save()" in str(error)


def test_the_first_rank_of_a_node_leads_it(tmp_path: Path) -> None:
    """The others wait for what it has done, without a message of their own."""
    world = replace(world_of(1), world_size=4, local_world_size=2)

    def follow(rank: int) -> object:
        control = Control(FolderStore(tmp_path), rank=rank, world_size=4)
        place = replace(world, rank=rank, local_rank=rank - 2, node_rank=1, nnodes=2)
        group = RankGroup(control, "node", place, range(2, 4))
        exchange = group.begin("its disk")
        if group.leads:
            with exchange.leading() as answer:
                answer["folder"] = "prepared"
            return answer
        return exchange.receive(Deadline.after(timedelta(seconds=LIMIT_S)), absence_error)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(follow, (2, 3))] == [{"folder": "prepared"}] * 2


def test_a_use_leaves_one_key_in_the_store(tmp_path: Path) -> None:
    """A rank that calls `rank_zero_first` in every step would fill it otherwise."""
    controls = [control_of(tmp_path, rank) for rank in range(RANKS)]
    for number in range(3):
        groups = [
            RankGroup(control, f"use/{number}", world_of(rank), range(RANKS))
            for rank, control in enumerate(controls)
        ]
        exchanges = [group.begin("") for group in groups]
        with exchanges[0].leading():
            pass
        for exchange in exchanges[1:]:
            exchange.receive(Deadline.after(timedelta(seconds=LIMIT_S)), absence_error)
        assert len([*tmp_path.glob("[0-9a-f]*")]) == RANKS + number + 1


def test_an_error_is_passed_on_as_it_came(tmp_path: Path) -> None:
    """The rank that raised it stays the one that is named, once."""
    ranks = [
        RankGroup(control_of(tmp_path, rank), "test", world_of(rank), range(RANKS))
        for rank in range(RANKS)
    ]
    first = ranks[2].failure_of(ConfigError("no"))
    second = ranks[0].failure_of(ranks[0].peer_error(first))
    assert str(ranks[1].peer_error(second)) == f"no (raised on rank 2, seen by {world_of(1)})"
