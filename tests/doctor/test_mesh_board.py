"""What nodes tell each other travels as bounded lines, and strangers at the port do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from datetime import timedelta

import pytest

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh import _lines
from ddpsafe.doctor._mesh._board import BoardLostError, gather, wait_for
from ddpsafe.doctor._mesh._endpoint import Obstacle, reach_hub
from ddpsafe.doctor._mesh._guest import Guest
from ddpsafe.doctor._mesh._hub import Hub

SOON = timedelta(seconds=5)


def greeting(node_rank: int, **changed: object) -> _lines.Greeting:
    """Return the greeting of a node of a job of three."""
    known = {"nnodes": 3, "hostname": f"h{node_rank}", "pid": 1, "job": "", "challenge": "c"}
    return _lines.Greeting(node_rank=node_rank, **{**known, **changed})  # type: ignore[arg-type]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


async def come(port: int, node_rank: int, **changed: object) -> Guest | Obstacle:
    """Come to a hub on this machine."""
    return await reach_hub(
        "127.0.0.1",
        port,
        greeting(node_rank, **changed),
        deadline=Deadline.after(SOON),
        on_trouble=lambda _: None,
    )


async def opened() -> tuple[Hub, int]:
    """Return a hub and its port."""
    hub, port = Hub(greeting(0)), free_port()
    await hub.open(port)
    return hub, port


def test_nodes_and_hub_read_each_other_and_nobody_else() -> None:
    """The hub hears all, a node hears the hub, also what was said before it came."""

    async def talk() -> None:
        hub, port = await opened()
        await hub.put("early", 1)
        one, two = await come(port, 1), await come(port, 2)
        assert isinstance(one, Guest)
        assert isinstance(two, Guest)
        await one.put("hello", {"from": 1})
        await two.put("hello", {"from": 2})
        said = await gather(hub, "hello", [1, 2], deadline=Deadline.after(SOON))
        assert said == {1: {"from": 1}, 2: {"from": 2}}
        assert await wait_for(two, "early", deadline=Deadline.after(SOON)) == 1
        assert await one.get("hello") == {}
        await asyncio.gather(one.close(), two.close(), hub.close())

    asyncio.run(talk())


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x80\x04\x95 a pickle\n",
        b"[1]\n",
        b"{}\n",
        b'{"ddpsafe_doctor": 99}\n',
        b'{"ddpsafe_doctor": 1, "nnodes": "many"}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (_lines.LONGEST_FROM_NODE_BYTES + 2),
        b"",
    ],
    ids=lambda said: repr(said[:20]),
)
def test_strangers_at_the_port_change_nothing(said: bytes) -> None:
    """Whatever is sent to the hub, it hangs up and the nodes go on."""

    async def talk() -> None:
        hub, port = await opened()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):  # it did not even read all of it
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        node = await come(port, 1)
        assert isinstance(node, Guest)
        await node.put("hello", "there")
        assert await gather(hub, "hello", [1], deadline=Deadline.after(SOON)) == {1: "there"}
        await asyncio.gather(node.close(), hub.close())

    asyncio.run(talk())


def test_who_listens_without_knowing_the_language_is_a_stranger() -> None:
    """Another server at the endpoint, even one that repeats what it hears, is no hub."""

    async def talk() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = await reach_hub(
            "127.0.0.1",
            port,
            greeting(1),
            deadline=Deadline.after(timedelta(seconds=0.2)),
            on_trouble=lambda _: None,
        )
        server.close()
        assert isinstance(found, Obstacle)
        assert found.trouble == "stranger"

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("node_rank", "changed", "trouble"),
    [
        (1, {}, "doubled"),
        (2, {"nnodes": 4}, "other-job"),
        (2, {"job": "SLURM_JOB_ID=8"}, "other-job"),
        (7, {}, "other-job"),
        (-1, {}, "other-job"),
    ],
)
def test_nodes_that_do_not_belong_are_sent_away(
    node_rank: int, changed: dict[str, object], trouble: str
) -> None:
    """They learn why, and the hub remembers them."""

    async def talk() -> None:
        hub, port = await opened()
        first = await come(port, 1)
        assert isinstance(first, Guest)
        found = await come(port, node_rank, **changed)
        assert isinstance(found, Obstacle)
        assert found.trouble == trouble
        assert [each.reason for each in hub.rejected] == [trouble]
        await asyncio.gather(first.close(), hub.close())

    asyncio.run(talk())


def test_nobody_is_let_in_after_the_roll_call() -> None:
    """A late node learns that it is late, not that something is broken."""

    async def talk() -> None:
        hub, port = await opened()
        hub.close_roll()
        found = await come(port, 1)
        assert isinstance(found, Obstacle)
        assert found.trouble == "late"
        await hub.close()

    asyncio.run(talk())


def test_node_notices_at_once_that_the_hub_is_gone() -> None:
    """What was said stays readable; what was not will not come."""

    async def talk() -> None:
        hub, port = await opened()
        node = await come(port, 1)
        assert isinstance(node, Guest)
        await hub.put("roster", [1])
        assert await wait_for(node, "roster", deadline=Deadline.after(SOON)) == [1]
        await hub.close()
        with pytest.raises(BoardLostError):
            await wait_for(node, "verdict", deadline=Deadline.after(SOON))
        assert await wait_for(node, "roster", deadline=Deadline.after(SOON)) == [1]
        await node.close()

    asyncio.run(talk())


def test_node_that_leaves_and_comes_back_before_the_roster_is_let_in() -> None:
    """Its doctor was started again; nobody waits for the first one."""

    async def talk() -> None:
        hub, port = await opened()
        first = await come(port, 1)
        assert isinstance(first, Guest)
        await first.close()
        assert await gather(hub, "hello", [1], deadline=Deadline.after(SOON)) == {}
        assert 1 in hub.gone()
        again = await come(port, 1)
        assert isinstance(again, Guest)
        assert 1 not in hub.gone()
        await asyncio.gather(again.close(), hub.close())

    asyncio.run(talk())


def test_message_is_one_line_and_survives_the_way() -> None:
    """Line breaks in a value do not end a message."""
    line = _lines.encode({"topic": "x", "value": "two\nlines"})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"topic": "x", "value": "two\nlines"}
