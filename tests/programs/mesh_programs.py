"""Programs of hosts in the tests of the mesh, which print reports as JSON without importing torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from ddpsafe import RankContext
from ddpsafe.doctor._findings import Finding, Matrix


def examine() -> None:
    """Examine the mesh as the arguments say, all but a few of them with defaults."""
    from ddpsafe._config.endpoint import split_endpoint
    from ddpsafe.doctor import _mesh

    asked = json.loads(sys.argv[2])
    _set_clock(asked.get("clock_ahead_s", 0))
    time.sleep(asked.get("comes_after_s", 0))
    if asked.get("comes_with"):
        print("waiting for the file", file=sys.stderr, flush=True)
        while not Path(asked["comes_with"]).exists():
            time.sleep(0.01)
    if asked.get("protocol"):
        _speak(asked["protocol"])
    started_s = time.monotonic()
    host, port = split_endpoint(asked.get("endpoint", "h0:29500"))
    job = _mesh.Job(
        nnodes=asked["nnodes"],
        node_rank=asked["node_rank"],
        host=host,
        port=int(port),
        interface=asked.get("interface"),
        backend=asked.get("backend", "gloo"),
        timeout=timedelta(seconds=asked.get("timeout_s", 3)),
        facts=asked.get("local", {}),
        on_progress=_progress_of(asked),
        collective=asked.get("collective", "skip"),
    )
    _report(*_mesh.examine(job), started_s)


def _speak(version: int) -> None:
    """Act as a doctor of another version."""
    from ddpsafe.doctor._mesh import job, reach_node_zero

    job.VERSION = reach_node_zero.VERSION = version


def _set_clock(ahead_s: float) -> None:
    """Let this host's clock be ahead, because a namespace cannot have its own clock."""
    true = time.time
    time.time = lambda: true() + ahead_s


def choose_interface() -> None:
    """Choose an interface as a rank does, and print the resulting variables."""
    from ddpsafe._clock import Deadline
    from ddpsafe._worker.join import network
    from ddpsafe._worker.join.store_endpoint import StoreEndpoint

    asked = json.loads(sys.argv[2])
    endpoint = StoreEndpoint(host=asked["host"], port=29500, is_served=False, is_on_this_host=False)
    deadline = Deadline.after(timedelta(seconds=10))
    network.choose(asked["interface"], endpoint, deadline=deadline)
    print(json.dumps({k: v for k, v in os.environ.items() if k.endswith("_SOCKET_IFNAME")}))


def join_and_reduce() -> None:
    """Join the group as a rank on one of several hosts, and add up."""
    import torch
    import torch.distributed as dist

    import ddpsafe

    asked = json.loads(sys.argv[2])
    with ddpsafe.process_group("gloo", **asked) as ctx:
        value = torch.tensor([ctx.rank + 1.0])
        dist.all_reduce(value)
        print(json.dumps([value.item(), os.environ["GLOO_SOCKET_IFNAME"]]), flush=True)


def train() -> None:
    """Run as a rank of a plain torch job with gloo, without ddpsafe."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=json.loads(sys.argv[2])["timeout_s"])
    dist.init_process_group("gloo", timeout=timeout)
    values = torch.ones(64 << 10)
    dist.all_reduce(values)
    assert bool((values == dist.get_world_size()).all())
    print("TRAINED", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # unloading torch would take a quarter of a second


def launch_fully_examined() -> None:
    """Join as a rank of another launcher with the full preflight."""
    import ddpsafe

    timeouts = {"start": 30}
    done = ddpsafe.launch(_add_up, preflight="full", backend="gloo", timeouts=timeouts)
    print(json.dumps(done.values), flush=True)


def _add_up(ctx: RankContext) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(value)
    return value.item()


def examine_at_store() -> None:
    """Examine the mesh over a store of torch, as ranks of another launcher do."""
    from torch.distributed import PrefixStore, TCPStore

    from ddpsafe.doctor import _mesh

    asked = json.loads(sys.argv[2])
    is_master = asked["node_rank"] == 0
    store = TCPStore("h0", 29500, is_master=is_master, wait_for_workers=False)
    started_s = time.monotonic()
    job = _mesh.Job(
        nnodes=asked["nnodes"],
        node_rank=asked["node_rank"],
        host="h0",
        port=29500,
        interface=None,
        backend="gloo",
        timeout=timedelta(seconds=asked.get("timeout_s", 20)),
        facts={},
        on_progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    _report(*_mesh.examine_at_store(job, PrefixStore("doctor", store)), started_s)
    store.add("left", 1)
    while is_master and int(store.add("left", 0)) < asked["nnodes"]:
        time.sleep(0.01)


def _report(findings: list[Finding], matrix: Matrix, started_s: float) -> None:
    report = {
        "findings": [asdict(finding) for finding in findings],
        "matrix": asdict(matrix),
        "took_s": time.monotonic() - started_s,
    }
    print(json.dumps(report), flush=True)


def _progress_of(asked: dict[str, object]) -> Callable[[str], None]:
    """Return a callback that prints progress, and stops or exits at a line with a given text."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if asked.get("hang_at") and str(asked["hang_at"]) in text:
            time.sleep(3600)
        if asked.get("die_at") and str(asked["die_at"]) in text:
            os.kill(os.getpid(), signal.SIGKILL)

    return say


def accept_everything() -> None:
    """Act as a proxy: accept every connection on a port, and never send anything."""
    listening = socket.create_server(("", int(sys.argv[2])), backlog=128)
    print("listening", file=sys.stderr, flush=True)
    taken = []
    while True:
        taken.append(listening.accept())


def listen_and_close() -> None:
    """Act as another service: accept connections on a port, and close them."""
    listening = socket.create_server(("", int(sys.argv[2])), backlog=128)
    print("listening", file=sys.stderr, flush=True)
    while True:
        listening.accept()[0].close()


def know_messages() -> None:
    """Build the validators of messages before the fork, to save 40 ms in each process."""
    from ddpsafe.doctor._mesh import all_reduce, channel_transport, probe, protocol
    from ddpsafe.doctor._mesh.findings import observations

    kinds = [protocol.Answer, protocol.Facts, protocol.Greeting, protocol.Node, protocol.NodeReport]
    kinds += [
        protocol.Roster,
        probe.Call,
        all_reduce.Request,
        observations.Peer,
        observations.Results,
    ]
    channel_transport.CODEC.prepare(*kinds)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
else:
    know_messages()
