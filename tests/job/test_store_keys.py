"""A store on another host: calls over a connection that breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cut_wire import HERE, Wire
from torch.distributed import DistNetworkError, TCPStore

from ddpsafe._job.store_keys import ReopenedStore

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    """What was raised there is what the call raises."""
    opened: list[TCPStore] = []

    def open_once() -> TCPStore:
        if opened:
            raise DistNetworkError("no route")
        opened.append(open_store(wire))
        return opened[0]

    store = ReopenedStore(open_once)
    wire.cut()
    with pytest.raises(DistNetworkError, match="no route"):
        store.check(["key"])
