"""A store on another host: calls over a connection that breaks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from cut_wire import HERE, Wire
from torch.distributed import DistNetworkError, TCPStore

from ddpsafe._host import ending_when_silent
from ddpsafe._job.store_keys import ReopenedStore


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Lay a way to a store that runs meanwhile."""
    server = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    laid = Wire(server.port)
    yield laid
    laid.close()
    del server


def open_store(wire: Wire) -> TCPStore:
    """Connect to the store."""
    return TCPStore(HERE, wire.port, is_master=False, wait_for_workers=False)


def test_each_call_is_made_again_over_a_new_connection(
    wire: Wire, capfd: pytest.CaptureFixture[str]
) -> None:
    """The result is that of one call, whenever the connection broke, and torch writes nothing about it."""
    store = ReopenedStore(lambda: open_store(wire))
    for number in range(10):
        wire.cut()
        store.set(f"{number}", "here")
        wire.cut()
        assert store.check([f"{number}"])
        wire.cut()
        assert store.get(f"{number}") == b"here"
        wire.cut()
        assert store.compare_set("first", "", f"{number}") == b"0"
        wire.cut()
        store.delete_key(f"{number}")
        assert not store.check([f"{number}"])
    assert capfd.readouterr().err == ""


def test_a_store_that_cannot_be_opened_again_is_an_error(wire: Wire) -> None:
    """What was raised there is what the call raises; later calls do not wait for it again."""
    tries: list[str] = []

    def fail() -> TCPStore:
        tries.append("once more")
        raise DistNetworkError("no route")

    store = ReopenedStore(lambda: open_store(wire), fail)
    wire.cut()
    with pytest.raises(DistNetworkError, match="no route"):
        store.check(["key"])
    with pytest.raises(DistNetworkError):
        store.set("key", "value")
    assert tries == ["once more"]


def test_a_default_timeout_of_sockets_does_not_reach_those_of_torch(
    wire: Wire,
) -> None:
    """A script or a library may set one; with it torch's calls ended with "Socket Timeout"."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        with ending_when_silent(wire.port, 4):
            store = open_store(wire)
        for number in range(50):
            store.set(f"{number}", "here")
            assert store.check([f"{number}"])
    finally:
        socket.setdefaulttimeout(before)
