"""Nodes exchange bounded lines, and unknown clients at the port do no harm."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from forked_ranks import free_port

from ddpsafe._clock import Deadline
from ddpsafe._job.channel import from_json
from ddpsafe.doctor._mesh import probe
from ddpsafe.doctor._mesh.channel_transport import Client, Server
from ddpsafe.doctor._mesh.probe import Listener, encode
from ddpsafe.doctor._mesh.protocol import VERSION, Greeting
from ddpsafe.doctor._mesh.reach_node_zero import Obstacle, Refused, reach_coordinator
from ddpsafe.doctor._mesh.transport import TransportLostError, gather, wait_for

SOON = timedelta(seconds=5)


def greeting(node_rank: int, **changed: object) -> Greeting:
    """Return the greeting of one node of three."""
    known = {"nnodes": 3, "hostname": f"h{node_rank}", "pid": 1, "job": ""}
    return from_json(Greeting, {"version": VERSION, "node_rank": node_rank, **known, **changed})


async def join_job(
    port: int, node_rank: int, *, secret: str = "", **changed: object
) -> Client | Refused | Obstacle:
    """Connect to a coordinator on this machine as a node."""
    return await reach_coordinator(
        "127.0.0.1",
        port,
        greeting(node_rank, **changed),
        secret=secret,
        deadline=Deadline.after(SOON),
        on_trouble=lambda _: None,
    )


async def opened(*, secret: str = "") -> tuple[Server, int]:
    """Return an open coordinator and its port."""
    coordinator, port = Server(greeting(0), secret=secret), free_port()
    await coordinator.open(port)
    return coordinator, port


def test_coordinator_and_nodes_read_each_other_and_nodes_not_one_another() -> None:
    """The coordinator reads every node; a node reads the coordinator, earlier messages included."""

    async def talk() -> None:
        coordinator, port = await opened()
        await coordinator.put("progress", 1)
        one, two = await join_job(port, 1), await join_job(port, 2)
        assert isinstance(one, Client)
        assert isinstance(two, Client)
        await one.put("hello", {"from": 1})
        await two.put("hello", {"from": 2})
        said = await gather(coordinator, "hello", [1, 2], deadline=Deadline.after(SOON))
        assert said == {1: {"from": 1}, 2: {"from": 2}}
        assert await wait_for(two, "progress", deadline=Deadline.after(SOON)) == 1
        assert await one.get("hello") == {}
        await asyncio.gather(one.close(), two.close(), coordinator.close())

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("node_rank", "changed", "trouble"),
    [
        (1, {}, "duplicate"),
        (2, {"nnodes": 4}, "other-job"),
        (2, {"job": "SLURM_JOB_ID=8"}, "other-job"),
        (7, {}, "other-job"),
        (-1, {}, "other-job"),
        (2, {"version": VERSION + 1}, "version"),
    ],
)
def test_nodes_that_do_not_belong_are_rejected(
    node_rank: int, changed: dict[str, object], trouble: str
) -> None:
    """They learn why, the coordinator records them, and they receive only the results."""

    async def talk() -> None:
        coordinator, port = await opened()
        first = await join_job(port, 1)
        assert isinstance(first, Client)
        found = await join_job(port, node_rank, **changed)
        assert isinstance(found, Refused)
        assert found.obstacle.trouble == trouble
        assert [each.reason for each in coordinator.rejected] == [trouble]
        await coordinator.put("roster", [1])
        await coordinator.put("results", "for all")
        waiting = wait_for(found.client, "results", deadline=Deadline.after(SOON))
        assert await waiting == "for all"
        assert await found.client.get("roster") == {}
        await asyncio.gather(first.close(), found.client.close(), coordinator.close())

    asyncio.run(talk())


def test_a_node_notices_at_once_that_node_rank_0_has_exited() -> None:
    """Messages that it has received stay readable; waiting for another one raises."""

    async def talk() -> None:
        coordinator, port = await opened()
        node = await join_job(port, 1)
        assert isinstance(node, Client)
        await coordinator.put("roster", [1])
        assert await wait_for(node, "roster", deadline=Deadline.after(SOON)) == [1]
        await coordinator.close()
        with pytest.raises(TransportLostError):
            await wait_for(node, "results", deadline=Deadline.after(SOON))
        assert await wait_for(node, "roster", deadline=Deadline.after(SOON)) == [1]
        await node.close()

    asyncio.run(talk())


def test_a_node_that_leaves_may_join_again_before_the_roster() -> None:
    """Its doctor was restarted, and nothing waits for the first one."""

    async def talk() -> None:
        coordinator, port = await opened()
        first = await join_job(port, 1)
        assert isinstance(first, Client)
        await first.close()
        assert await gather(coordinator, "hello", [1], deadline=Deadline.after(SOON)) == {}
        assert 1 in coordinator.disconnected()
        again = await join_job(port, 1)
        assert isinstance(again, Client)
        assert 1 not in coordinator.disconnected()
        await asyncio.gather(again.close(), coordinator.close())

    asyncio.run(talk())


@pytest.mark.parametrize(("ours", "theirs"), [("ours", ""), ("ours", "theirs"), ("", "theirs")])
def test_a_node_without_the_secret_takes_no_rank(ours: str, theirs: str) -> None:
    """Both sides learn it, and the rank stays free for a node that knows the secret."""

    async def talk() -> None:
        coordinator, port = await opened(secret=ours)
        found = await join_job(port, 1, secret=theirs)
        assert isinstance(found, Obstacle)
        assert found.trouble == "secret"
        assert [each.reason for each in coordinator.rejected] == ["secret"]
        node = await join_job(port, 1, secret=ours)
        assert isinstance(node, Client)
        await asyncio.gather(node.close(), coordinator.close())

    asyncio.run(talk())


def test_address_with_most_unknown_clients_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address with few connections keeps them, and is answered."""
    monkeypatch.setattr(probe, "_MAX_UNKNOWN", 2)

    async def flood() -> None:
        listener = Listener(token="ab", secret="", nnodes=1)
        port = await listener.open("127.0.0.1")
        one = await asyncio.open_connection("127.0.0.1", port)
        other = {"local_addr": ("127.0.0.2", 0)}
        many = [await asyncio.open_connection("127.0.0.1", port, **other) for _ in range(4)]
        assert await asyncio.wait_for(many[0][0].read(), SOON.total_seconds()) == b""
        one[1].write(encode({"source": 0, "challenge": "ab"}))
        assert b"answer" in await asyncio.wait_for(one[0].readline(), SOON.total_seconds())
        for _, writer in (one, *many):
            writer.close()
        await listener.close()

    asyncio.run(flood())


def test_a_connection_is_closed_even_if_nobody_waits_for_that() -> None:
    """Neither without a free thread nor after a cancellation does its own thread stay."""

    async def scenario() -> None:
        coordinator, port = await opened()
        client = await join_job(port, 1)
        assert isinstance(client, Client)
        go_on = threading.Event()
        with ThreadPoolExecutor(1) as busy:
            asyncio.get_running_loop().set_default_executor(busy)
            busy.submit(go_on.wait)
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
            client._channel._thread.join(SOON.total_seconds())
            go_on.set()
        assert not client._channel._thread.is_alive()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await coordinator.close()

    asyncio.run(scenario())
