"""Several nodes: from a fault to the result on every node, and to the first step of the next attempt.

Hosts are Linux namespaces (as root), with gloo and one rank on each. ddpsafe restarts the ranks of
both hosts again and again, by ``retry``; so does ``torchrun --max-restarts``, with the same training
and the same fault on the same hosts. Then one coordinator supervises many nodes whose ranks are
simulated (no torch, no processes): how soon all have joined, how soon all of them have the result,
the traffic of the control channel, and the share of a core that the coordinator uses.

Run ``python benchmarks/nodes.py``, with ``--rounds`` for the number of faults, ``--nodes`` for the
number of simulated nodes, ``--json`` for numbers or ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hosts import Network

# The tests have the code that makes hosts.
KITS: Final = Path(__file__).parents[1] / "tests" / "kits"
PORT: Final = 29400
LIMIT_S: Final = 60
FAULT_AT: Final = 5
RANKS: Final = 8
WATCHED_S: Final = 20
SETTLES_S: Final = 2.0


# ---- two hosts: the ranks


def train_under_ddpsafe(ctx: Any, folder: str, faults: int) -> None:
    """Run as a rank of ``ddpsafe.launch``; rank 1 is killed in each attempt but the last."""
    train(Path(folder), ctx.rank, ctx.attempt, faults)


def train_under_torchrun(folder: str, faults: int) -> None:
    """Run as a rank of torchrun."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    files = Path(folder).glob("fault-*")
    train(Path(folder), rank, 1 + len(list(files)), faults)
    dist.destroy_process_group()


def train(folder: Path, rank: int, attempt: int, faults: int) -> None:
    """Make steps together, and record the first one and the fault."""
    import torch
    import torch.distributed as dist

    for step in range(2 * FAULT_AT):
        total = torch.ones(1)
        dist.all_reduce(total)
        if step == 0:
            note(folder / f"first-{attempt}-{rank}")
        if step == FAULT_AT and rank == 1 and attempt <= faults:
            note(folder / f"fault-{attempt}")
            os.kill(os.getpid(), signal.SIGKILL)


def note(path: Path) -> None:
    """Write the time to a file."""
    path.write_text(repr(time.time()))


def launch_node(folder: str, faults: int) -> None:
    """Launch on one node; record when it has each result."""
    import ddpsafe

    def note_result(error: Exception) -> None:
        attempt = getattr(error, "attempt", 0)
        note(Path(folder) / f"result-{attempt}-{os.uname().nodename}")

    ddpsafe.launch(
        train_under_ddpsafe,
        (folder, faults),
        nnodes=2,
        nproc_per_node=1,
        backend="gloo",
        preflight="off",
        console="none",
        start_method="forkserver",
        rendezvous={"endpoint": f"h0:{PORT}", "join": 60},
        retry={
            "attempts": faults + 1,
            "on": ["killed"],
            "backoff_initial": 0,
            "jitter": 0,
            "no_progress": None,
        },
        on_retry=note_result,
    )


# ---- two hosts: the comparison


def compare(network: Network, rounds: int) -> dict[str, Any]:
    """Run both launchers on the hosts; return the times of each round."""
    this = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        run(network, [[*this, "--be", "node", folder, str(rounds)]] * 2, limit_s=20 * rounds)
        ours = read_times(Path(folder), rounds)
    theirs: list[dict[str, float]] = []
    for _ in range(rounds):  # one restart in each job: after one that fails, there is no other
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"h0:{PORT}", "--rdzv-id", "job"]
            run(network, [[*command, __file__, "--be", "rank", folder, "1"]] * 2)
            theirs += read_times(Path(folder), 1)
    return {"ddpsafe": ours, "torchrun": theirs}


def run(network: Network, commands: list[list[str]], limit_s: float = LIMIT_S) -> None:
    """Run a command on each host, to its end."""
    paths = os.pathsep.join([str(KITS), str(Path(__file__).parent)])
    started = [
        network[node].start(command, env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
        for node, command in enumerate(commands)
    ]
    ends_s = time.monotonic() + limit_s
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=max(1.0, ends_s - time.monotonic()))
        process.kill()
    for node in range(len(commands)):  # ranks that survive their launcher keep its pipes open
        network[node].shell("pkill -KILL -f '[n]odes.py' || true")
    for process in started:
        process.communicate()


def read_times(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Return, for each fault, the seconds to the last result and to the next first step."""
    found = []
    for attempt in range(1, rounds + 1):
        fault = folder / f"fault-{attempt}"
        if not fault.exists():
            break
        fault_s = float(fault.read_text())
        times = {}
        for name, files in (
            ("result", list(folder.glob(f"result-{attempt}-*"))),
            ("first_step", list(folder.glob(f"first-{attempt + 1}-*"))),
        ):
            if len(files) == 2:  # on both hosts
                times[name] = max(float(each.read_text()) for each in files) - fault_s
        found.append(times)
    return found


# ---- many nodes, without torch


def stand_in_nodes(
    ports: Any, nodes: list[int], nnodes: int, progress_s: float, fault: Any, results: Any
) -> None:
    """Act as the launchers of some nodes: report as they do, fail when told to, and wait for the result."""
    from multiprocessing.connection import wait

    from ddpsafe._clock import Deadline
    from ddpsafe._job.channel import Channel, Hello
    from ddpsafe._launcher.nodes import node_messages
    from ddpsafe._launcher.processes.rank_process import Activity
    from ddpsafe._wire.messages import Entered
    from ddpsafe._wire.rank_pipe import Progress

    port, channels = ports.get(), {}
    for node in nodes:
        channels[node] = Channel.dial(
            ("127.0.0.1", port),
            secret=b"secret",
            scope="round",
            codec=node_messages.CODEC,
            node=node,
            hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
            deadline=Deadline.after(timedelta(seconds=30)),
        )
        for rank in range(node * RANKS, (node + 1) * RANKS):
            channels[node].send(node_messages.rank_report(rank, Entered(phase="running")))
    steps, next_s = 0, 0.0
    culprit = nnodes - 1
    has_failed = False
    waiting = dict(channels)
    while waiting:
        wait([channel.fileno() for channel in waiting.values()], 0.2)
        if time.monotonic() >= next_s:
            next_s, steps = time.monotonic() + progress_s, steps + 10
            for node, channel in waiting.items():
                ranks = range(node * RANKS, (node + 1) * RANKS)
                progress = Progress(steps=steps, last_ns=time.monotonic_ns())
                report = node_messages.NodeProgress(
                    at_ns=time.monotonic_ns(),
                    ranks=dict.fromkeys(ranks, progress),
                    activity=dict.fromkeys(ranks, Activity("R", (steps, steps))),
                )
                channel.send(report)
        if culprit in waiting and fault.is_set() and not has_failed:
            results.put(("fault", time.time()))
            has_failed, now_ns = True, time.monotonic_ns()
            rank = culprit * RANKS
            ended = node_messages.RankEnded(rank=rank, exit_code=-9, ended_ns=now_ns)
            waiting[culprit].send(ended)
        for node, channel in list(waiting.items()):
            for _, event in channel.events():
                if isinstance(event, node_messages.ReportOutcomes):
                    channel.send(outcomes_of(node, culprit))
                elif isinstance(event, node_messages.RoundResult):
                    results.put(("result", time.time()))
                    channel.send(node_messages.RanksEnded())
                    del waiting[node]
    for channel in channels.values():
        channel.close()


def outcomes_of(node: int, culprit: int) -> Any:
    """Return the outcomes of the ranks of a node."""
    from ddpsafe._launcher.nodes import node_messages
    from ddpsafe._wire.messages import RankOutcome

    outcomes = tuple(
        RankOutcome(
            rank=rank,
            local_rank=rank % RANKS,
            node_rank=node,
            pid=1,
            hostname=f"h{node}",
            status="killed" if rank == culprit * RANKS else "stopped",
            phase="running",
            exit_code=-9 if rank == culprit * RANKS else None,
        )
        for rank in range(node * RANKS, (node + 1) * RANKS)
    )
    return node_messages.NodeOutcomes(outcomes=outcomes, oom_kills=0)


def coordinate_stand_ins(nnodes: int, watched_s: float) -> dict[str, float]:
    """Act as node 0 of `nnodes` nodes, itself without ranks; return the measurements."""
    from multiprocessing import get_context

    from ddpsafe._clock import Deadline
    from ddpsafe._config import Timeouts
    from ddpsafe._errors import Explanation, RankKilledError
    from ddpsafe._job.channel import Channel
    from ddpsafe._launcher.nodes import node_messages
    from ddpsafe._launcher.nodes.node_zero import OtherNodes
    from ddpsafe._launcher.watch.signals import open_inbox
    from ddpsafe._launcher.watch.supervisor import AttemptWatch

    nodes = tuple(
        node_messages.NodeFacts(
            hostname=f"h{node}", pid=node, address="127.0.0.1", nproc=RANKS, settings={}
        )
        for node in range(nnodes)
    )
    plan = node_messages.RoundPlan(
        round_id="round",
        attempt=1,
        nodes=nodes,
        store_port=0,
        master_port=0,
    )
    context = get_context("fork")
    results, ports, fault = context.SimpleQueue(), context.SimpleQueue(), context.Event()
    others = list(range(1, nnodes))
    started = [
        context.Process(
            target=stand_in_nodes,
            args=(ports, others[part::4], nnodes, plan.progress_every_s, fault, results),
        )
        for part in range(4)
    ]
    for process in started:  # before the channel has threads, whose locks a fork may inherit locked
        process.start()
    listening = Channel.listen(
        "127.0.0.1", secret=b"secret", scope="round", codec=node_messages.CODEC, nnodes=nnodes
    )
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for _ in started:
        ports.put(listening.port)
    with open_inbox() as inbox:
        before_s = time.thread_time()
        parts: Any = SimpleNamespace(
            directory=None, plan=SimpleNamespace(config=SimpleNamespace(timeouts=Timeouts()))
        )
        peers = OtherNodes(listening, plan, inbox, parts)
        table_s = time.thread_time() - before_s
        watch = AttemptWatch([], timeouts=Timeouts(), inbox=inbox, peers=peers)
        found: dict[str, float] = {}

        def observe() -> None:
            while not all(rank.joined for rank in peers.ranks):
                time.sleep(0.05)
            found["start_s"] = time.monotonic() - began_s
            found["start_cpu_s"] = time.process_time() - began_cpu_s
            time.sleep(SETTLES_S)
            cpu_s, from_s, carried = time.process_time(), time.monotonic(), loopback_bytes()
            time.sleep(watched_s)
            took_s = time.monotonic() - from_s
            found["cpu_share"] = (time.process_time() - cpu_s) / took_s
            found["bytes_per_s"] = (loopback_bytes() - carried) / took_s
            fault.set()

        observing = threading.Thread(target=observe)
        observing.start()
        ending = watch.until_end()
        observing.join()
        peers.gather_evidence(ending, [], lambda _: None)
        error = RankKilledError(
            Explanation("rank was killed"),
            rank=(nnodes - 1) * RANKS,
            local_rank=0,
            hostname="h",
            pid=1,
            exit_code=137,
            kind="killed",
            attempt=1,
            attempts=1,
        )
        listening.send(node_messages.round_result_of(error, is_final=True))
        peers._wait_until(  # noqa: SLF001 - as at the end of an attempt
            lambda: all(view.has_ended for view in peers.core.nodes.values()),
            Deadline.after(timedelta(seconds=10)),
        )
    listening.close()
    for process in started:
        process.join()
    times: dict[str, list[float]] = {"fault": [], "result": []}
    while not results.empty():
        name, at_s = results.get()
        times[name].append(at_s)
    return {
        "nodes": nnodes,
        "ranks": nnodes * RANKS,
        "results": len(times["result"]),
        "table_s": table_s,
        **found,
        "result_s": max(times["result"]) - times["fault"][0],
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_stand_ins(
    network: Network, nnodes: int, watched_s: int = WATCHED_S
) -> dict[str, float]:
    """Measure on a host whose loopback has no other traffic."""
    command = [sys.executable, __file__, "--be", "many", str(nnodes), str(watched_s)]
    # Only for a hang: on a busy machine, so many interpreters take a minute to import torch.
    out, _ = network[0].start(command).communicate(timeout=5 * LIMIT_S + watched_s)
    found: dict[str, float] = json.loads(out)
    return found


def loopback_bytes() -> int:
    """Return the bytes carried by the loopback of this network so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split()[1])


# ---- results


def median_of(rounds: list[dict[str, float]], name: str) -> str:
    """Return median and range, as a cell."""
    times = [each[name] for each in rounds if name in each]
    if not times:
        return "none"
    return f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}; {len(times)} of {len(rounds)})"


def as_page(found: dict[str, Any]) -> str:
    """Return the page for the documentation."""
    stand = found["stand_ins"]
    lines = [
        "# Several nodes",
        "",
        (
            "Rank 1 of two is killed with SIGKILL in its sixth step, on the second of two hosts "
            "(Linux namespaces, gloo, one rank on each)."
        ),
        (
            "The result counts when the launcher of every node has the error, and the first step when "
            "every rank of the next attempt has finished its first all-reduce."
        ),
        (
            "With ddpsafe, all faults happen one after the other in one job, which then succeeds; with "
            "torchrun (`--max-restarts 1`), each job has one fault."
        ),
        "The table has medians, and in brackets the range and the number of faults with a result.",
        "",
        (
            f"Measured on {found['date']} with torch {found['torch']}, Python {found['python']}, "
            f"{found['cores']} cores, load {found['load']:.0f}, by `python benchmarks/nodes.py`."
        ),
        "",
        "| launcher | fault to result on every node | fault to the first step of the next attempt |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {median_of(found[name], 'result')} | {median_of(found[name], 'first_step')} |"
        for name in ("ddpsafe", "torchrun")
    ]
    lines += [
        "",
        "torchrun reports no common error to compare: the other node prints that a connection was closed. The missing ones of its ten jobs had not reached the first step of the next attempt within 60 s.",
        "",
        "## Many nodes",
        "",
        (
            "One real coordinator talks over loopback to simulated launchers of the other nodes, with "
            f"{RANKS} ranks each: they report as launchers do, without torch and without rank processes."
        ),
        (
            "All run on the same cores, so the times of start and result are upper bounds; the coordinator's "
            "share is that of one core during training."
        ),
        "",
        "| nodes | ranks | all connected and started | fault to result on all | control channel | coordinator | its memory |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['nodes']} | {each['ranks']} | {each['start_s']:.2f} s | {each['result_s']:.2f} s "
        f"| {each['bytes_per_s'] / 1000:.0f} kB/s | {100 * each['cpu_share']:.1f} % | {each['memory_mb']:.0f} MB |"
        for each in stand
    ]
    lines.append("")
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    sys.path.insert(0, str(KITS))
    from hosts import Network

    with Network(2) as network:
        stand_ins = [measure_stand_ins(network, count) for count in sorted(options.nodes)]
        found = compare(network, options.rounds)
    return {
        **found,
        "stand_ins": stand_ins,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--be", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        role, folder, faults = options.be
        if role == "many":
            print(json.dumps(coordinate_stand_ins(int(folder), int(faults))))
            return
        {"node": launch_node, "rank": train_under_torchrun}[role](folder, int(faults))
        return
    found = measure(options)
    print(json.dumps(found, indent=2) if options.json else as_page(found))
    if options.save:
        options.save.write_text(as_page(found))


if __name__ == "__main__":
    main()
