"""Nodes of a doctor that leave, join again or lose node rank 0; unknown clients do no harm."""

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
from ddpsafe.doctor._mesh.reach_node_zero import reach_coordinator
from ddpsafe.doctor._mesh.transport import TransportLostError, gather, wait_for

SOON = timedelta(seconds=5)


def greeting(node_rank: int) -> Greeting:
    """Return the greeting of one node of three."""
    facts = {"nnodes": 3, "hostname": f"h{node_rank}", "pid": 1, "job": ""}
    return from_json(Greeting, {"version": VERSION, "node_rank": node_rank, **facts})


async def join_job(port: int) -> Client:
    """Connect to a coordinator on this machine as node 1."""
    deadline, host = Deadline.after(SOON), "127.0.0.1"
    said: list[object] = []
    joined = await reach_coordinator(
        host, port, greeting(1), deadline=deadline, on_trouble=said.append
    )
    assert isinstance(joined, Client), said
    return joined


async def opened() -> tuple[Server, int]:
    """Return an open coordinator and its port."""
    coordinator, port = Server(greeting(0)), free_port()
    await coordinator.open(port)
    return coordinator, port


def test_a_node_that_leaves_may_join_again_before_the_roster() -> None:
    """Its doctor was restarted: nothing waits for the first one, and the next one receives everything."""

    async def talk() -> None:
        coordinator, port = await opened()
        await coordinator.put("progress", "said before")
        first = await join_job(port)
        await first.close()
        assert await gather(coordinator, "hello", [1], deadline=Deadline.after(SOON)) == {}
        assert 1 in coordinator.disconnected()
        again = await join_job(port)
        assert 1 not in coordinator.disconnected()
        told = await wait_for(again, "progress", deadline=Deadline.after(SOON))
        assert told == "said before"
        await asyncio.gather(again.close(), coordinator.close())

    asyncio.run(talk())


def test_a_node_notices_at_once_that_node_rank_0_has_exited() -> None:
    """Messages that it has received stay readable; waiting for another one raises."""

    async def talk() -> None:
        coordinator, port = await opened()
        node = await join_job(port)
        await coordinator.put("roster", [1])
        assert await wait_for(node, "roster", deadline=Deadline.after(SOON)) == [1]
        await coordinator.close()
        with pytest.raises(TransportLostError):
            await wait_for(node, "results", deadline=Deadline.after(SOON))
        assert await wait_for(node, "roster", deadline=Deadline.after(SOON)) == [1]
        await node.close()

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
        client = await join_job(port)
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
