"""A coordinator connects many nodes and sends them the result quickly, with little CPU time."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import scripts
from cut_wire import Wire, dial, listen
from hosts import Network
from machine import require_in_time

from ddpsafe._clock import Deadline
from ddpsafe._launcher.nodes.node_messages import NodeFacts, RoundPlan
from ddpsafe._launcher.nodes.node_zero import world_of

BENCHMARK: Final = Path(__file__).parents[2] / "benchmarks" / "nodes.py"


def benchmark() -> ModuleType:
    """Load the benchmark, whose simulated nodes this test uses."""
    spec = importlib.util.spec_from_file_location("nodes_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.root
def test_sixteen_nodes_take_little_of_a_core(network: Network) -> None:
    """All connect at once, all have the result within seconds, and waiting costs next to nothing."""
    found = benchmark().measure_stand_ins(network, 16, watched_s=3)
    assert found["results"] == 15
    require_in_time(found["result_s"], 2.0, "all have the result")
    assert found["cpu_share"] < 0.05
    assert found["bytes_per_s"] < 100_000


def facts(node: int) -> NodeFacts:
    """Return a node with eight ranks."""
    return NodeFacts(
        hostname=f"h{node}", pid=node, address="10.77.0.1", nproc=8, settings={}, launcher=f"{node}"
    )


class Nodes(tuple[NodeFacts, ...]):
    """The nodes of a plan; counts how many of them are read one after the other."""

    __slots__ = ()
    reads = 0

    def __iter__(self) -> Iterator[NodeFacts]:
        Nodes.reads += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Count those of a slice."""
        found = super().__getitem__(index)
        Nodes.reads += len(found) if isinstance(index, slice) else 1
        return found


def test_the_places_of_all_ranks_cost_a_constant_for_each() -> None:
    """Node 0 computes them before each attempt, and looks up ranks with every message."""
    nodes = Nodes(map(facts, range(256)))
    plan = RoundPlan(round_id="", attempt=1, nodes=nodes, store_port=1, master_port=1)
    Nodes.reads = 0
    places = [world_of(plan, rank) for rank in range(plan.world_size)]
    assert [(each.node_rank, each.local_rank) for each in places] == [
        (node, local) for node in range(256) for local in range(8)
    ]
    assert Nodes.reads <= 2 * len(places), Nodes.reads / len(places)


def test_no_node_is_dropped_when_all_of_them_dial_at_once() -> None:
    """The answer to a greeting takes as long as a packet travels; until then they may be anyone."""
    channel = listen(nnodes=400)
    dialled = []
    try:
        for _ in range(399):
            dialled.append(socket.create_connection(("127.0.0.1", channel.port), 5))
            dialled[-1].settimeout(10)
        for connection in dialled:
            assert connection.recv(1), "node 0 has dropped it"
        scripts.wait_until(lambda: len(channel._ungreeted) == len(dialled))
        for connection in dialled:
            connection.settimeout(0)
            assert connection.recv(1000), "node 0 has dropped it"
            with pytest.raises(BlockingIOError):
                connection.recv(1)
    finally:
        for connection in dialled:
            connection.close()
        channel.close()


def test_a_dial_that_node_0_drops_is_tried_again() -> None:
    """Other programs may have filled its list; the next dial is greeted."""
    channel = listen(nnodes=2)
    wire = Wire(channel.port, drops=1)
    node = dial(wire.port, deadline=Deadline.after(timedelta(seconds=20)))
    assert channel.connected() == {1}
    node.close()
    wire.close()
    channel.close()
