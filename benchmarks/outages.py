"""Outages between hosts: does training end as without them, and if not, what does each node say?

Hosts are Linux namespaces (as root) with two networks: launchers meet on the first one, and the ranks use
gloo on the second one. A small training runs on three hosts, one rank on each, while the network of a host
is away, a host is paused, a firewall forgets its connections or rejects them, or packets are lost. It has to
end with the loss that the same number of steps gives without an outage, on every rank, and with exit code 0
on every node; after an outage that is longer than ``timeouts.node_loss``, every node has to say that.

Six faults are then compared on two hosts: how soon each launcher names the culprit, whom it blames in the
end, the exit codes, and what is left running. ``torchrun --nnodes`` meets the same faults on the same hosts,
with the same script.

Run ``python benchmarks/outages.py``, with ``--rounds`` and ``--torchrun-rounds`` for the number of trials,
``--jobs`` for how many run at a time, ``--only NAME`` for one fault, ``--json FILE`` for all that was seen,
``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from _machine import measured_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hosts import Network
    from warm_python import Forked

# The tests have the code that makes hosts.
KITS: Final = Path(__file__).parents[1] / "tests" / "kits"
TORCHRUN: Final = ("torch.distributed.run",)
"""What the interpreter has imported from which its agents are forked."""

ENDPOINT: Final = "h0:29400"
LAUNCHERS: Final = "eth0"
RANKS: Final = "eth1"
BOTH: Final = (LAUNCHERS, RANKS)
STEP_S: Final = 0.02
FAULT_STEP: Final = 50
REFERENCE_STEPS: Final = 6000
STARTS_S: Final = 120
ENDS_S: Final = 100
LEFT_S: Final = 5
"""After this time, a process of an ended job counts as left."""

GROUP_TIMEOUT_S: Final = 20
"""Of the process groups of the six faults; of the outages, ten minutes."""

NODE_LOSS_S: Final = 8
"""``timeouts.node_loss`` for the outage that is longer than that."""


# ---- the script of every job


def train(folder: Path, fault: str) -> None:
    """Make steps until told to end; print how many, and the loss."""
    import torch
    import torch.distributed as dist

    limit = timedelta(minutes=10) if fault == "none" else timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", timeout=limit)
    rank = dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    weights = torch.zeros(64, dtype=torch.float64)
    losses = []
    is_reference = fault == "reference"
    for step in range(REFERENCE_STEPS):
        inputs = torch.randn(16, 64, generator=data, dtype=torch.float64)
        errors = inputs @ weights - inputs.sum(1).sin()
        # The loss, the gradient, and whether to end: one message.
        ends = float(rank == 0 and not is_reference and (folder / "release").exists())
        shared = torch.cat([errors.square().sum()[None], errors @ inputs, torch.tensor([ends])])
        dist.all_reduce(shared)
        weights -= 1e-4 * shared[1:-1]
        losses.append(shared[0].item().hex())
        if shared[-1]:
            break
        if step == FAULT_STEP:
            (folder / f"running-{rank}").touch()
            if rank == 1 and fault not in ("none", "reference"):
                strike(folder, fault)
        if not is_reference:
            time.sleep(STEP_S)
    if is_reference and rank == 0:
        (folder / "reference").write_text(json.dumps(losses))
    print(f"rank {rank}: loss {losses[-1]} after {len(losses)} steps", flush=True)
    dist.destroy_process_group()


def strike(folder: Path, fault: str) -> None:
    """Fail, as one of the six faults."""
    (folder / "fault").write_text(repr(time.time()))
    if fault == "raise":
        raise ValueError("label 7 is out of range")
    if fault == "exit":
        os._exit(0)
    if fault == "hang":
        time.sleep(3600)


# ---- what happens to hosts


@contextlib.contextmanager
def away(network: Network, node: int, nics: Sequence[str] = BOTH) -> Iterator[None]:
    """Let no packet pass to or from a host."""
    for nic in nics:
        network[node].cut_off(nic)
    try:
        yield
    finally:
        network.switch.run("nft", "delete", "table", "bridge", f"off{node}")


@contextlib.contextmanager
def paused(network: Network, node: int) -> Iterator[None]:
    """Stop every process of a host and its network at one moment, as a machine that migrates."""
    with away(network, node):
        stopped = processes_of(network, node)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def processes_of(network: Network, node: int) -> list[int]:
    """Return the processes of a host, without the one that keeps it."""
    keeper = network[node].pid
    namespace = Path(f"/proc/{keeper}/ns/pid").readlink()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != keeper and (entry / "ns" / "pid").readlink() == namespace:
                found.append(int(entry.name))
    return found


def fence(otherwise: str, *open_nics: str) -> Callable[[Network, int], None]:
    """Return what puts a stateful firewall before a host: only a SYN opens a connection."""
    rules = [f"iifname {nic} accept" for nic in open_nics]
    rules.append("tcp flags & (fin|syn|rst|ack) == syn accept")
    return lambda network, node: network[node].firewall(*rules, otherwise=otherwise)


@contextlib.contextmanager
def forgotten(network: Network, node: int) -> Iterator[None]:
    """Have the firewall before a host forget all connections."""
    network[node].forget_connections()
    yield


@contextlib.contextmanager
def reset(network: Network, node: int, nics: Sequence[str]) -> Iterator[None]:
    """Answer each packet to a host with RST."""
    cards = ", ".join(nics)
    given = f"""
        table inet rejecting {{
        chain input {{
            type filter hook input priority -10
            iifname {{ {cards} }} meta l4proto tcp reject with tcp reset
        }}
        }}
        """
    network[node].run("nft", "-f", "-", given=given)
    try:
        yield
    finally:
        network[node].run("nft", "delete", "table", "inet", "rejecting")


@contextlib.contextmanager
def lossy(network: Network, node: int) -> Iterator[None]:
    """Lose one packet in ten between all hosts."""
    del node
    given = """
        table bridge lossy {
        chain forward {
            type filter hook forward priority 0
            numgen random mod 100 < 10 drop
        }
        }
        """
    network.switch.run("nft", "-f", "-", given=given)
    try:
        yield
    finally:
        network.switch.run("nft", "delete", "table", "bridge", "lossy")


def only_launchers(fault: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same fault on the first network only."""
    return lambda network, node: fault(network, node, (LAUNCHERS,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One outage.

    Attributes:
        lasts_s: How long it lasts.
        strike: Makes it, as a context.
        prepare: What the host has from the beginning.
        ends: Whether it ends training.
        options: Of ``ddpsafe run``.
    """

    lasts_s: float
    strike: Callable[..., Any]
    prepare: Callable[[Network, int], None] | None = None
    ends: bool = False
    options: tuple[str, ...] = ()


OUTAGES: Final = {
    "network away for 3 s": Outage(lasts_s=3, strike=away),
    "network away for 6 s": Outage(lasts_s=6, strike=away),
    "network away for 20 s": Outage(lasts_s=20, strike=away),
    "host paused for 8 s": Outage(lasts_s=8, strike=paused),
    "launchers' network away for 8 s": Outage(lasts_s=8, strike=only_launchers(away)),
    "firewall forgets connections, drops": Outage(
        lasts_s=8,
        strike=forgotten,
        prepare=fence("drop", RANKS),
    ),
    "firewall forgets connections, resets": Outage(
        lasts_s=8,
        strike=forgotten,
        prepare=fence("reset", RANKS),
    ),
    "RST on the launchers' network for 1 s": Outage(lasts_s=1, strike=only_launchers(reset)),
    "10 % of packets lost for 40 s": Outage(lasts_s=40, strike=lossy),
    f"network away for longer than node_loss ({NODE_LOSS_S} s)": Outage(
        lasts_s=NODE_LOSS_S + 12,
        strike=away,
        ends=True,
        options=(f"--timeouts.node-loss={NODE_LOSS_S}",),
    ),
    "firewall of all networks forgets connections, resets": Outage(
        lasts_s=8,
        strike=forgotten,
        prepare=fence("reset"),
        ends=True,
    ),
}


WARNING: Final = "cannot be reached"
NAMES: Final = r"\b(?:rank|node) *:? {}\b"
"""How a line names a rank or node."""

FAULTS: Final = {
    "rank 1 raises": "raise",
    "launcher 1 is killed": "kill",
    "host 1 is cut off": "cut",
    "rank 1 ends with exit code 0": "exit",
    "rank 1 hangs in Python": "hang",
    "network of host 1 away for 6 s": "away",
}


# ---- one job


@dataclass(slots=True)
class Launched:
    """A launcher and its output, each line with the time at which it came."""

    process: Forked
    lines: list[tuple[float, str]] = field(default_factory=list)
    code: int | None = None
    ended_s: float = 0.0
    threads: list[threading.Thread] = field(default_factory=list)

    def watch(self) -> None:
        """Read its streams in threads."""
        for stream in (self.process.stdout, self.process.stderr):
            self.threads.append(threading.Thread(target=self._read, args=(stream,), daemon=True))
            self.threads[-1].start()

    def _read(self, stream: Any) -> None:
        with contextlib.suppress(ValueError):
            for line in stream:
                self.lines.append((time.time(), line.rstrip("\n")))

    def has_ended(self) -> bool:
        """Return whether it has ended; note when it first had."""
        if self.code is None:
            self.code = self.process.poll()
            self.ended_s = time.time()
        return self.code is not None


def command_of(
    launcher: str, nnodes: int, folder: Path, node: int, fault: str, options: Sequence[str]
) -> list[str]:
    """Return the command of a node."""
    script = [str(Path(__file__).resolve()), "--be", str(folder), fault]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-id=job"]
    else:
        command = ["-m", "ddpsafe", "run", "--start-method=forkserver", "--preflight=off"]
        command += [f"--run-dir={folder}/run-{node}", *options]
    command += [f"--nnodes={nnodes}", "--nproc-per-node=1", f"--rdzv-endpoint={ENDPOINT}"]
    return [*command, *script]


def start(
    network: Network,
    launcher: str,
    nnodes: int,
    folder: Path,
    fault: str,
    options: Sequence[str] = (),
) -> list[Launched]:
    """Start a job; wait until all ranks train."""
    import scripts

    env = {**scripts.clean_environment(), "GLOO_SOCKET_IFNAME": RANKS}
    started = []
    for node in range(nnodes):
        arguments = command_of(launcher, nnodes, folder, node, fault, options)
        modules = TORCHRUN if launcher == "torchrun" else None
        started.append(Launched(network[node].fork(arguments, env=env, modules=modules)))
        started[-1].watch()
    scripts.wait_until(
        lambda: len(list(folder.glob("running-*"))) == nnodes,
        otherwise=lambda: [each.lines[-20:] for each in started],
        within_s=STARTS_S,
        every_s=0.05,
    )
    return started


def finish(network: Network, started: list[Launched], limit_s: float) -> dict[str, Any]:
    """Wait for the end of all launchers; return what they said, and end what is left."""
    ends_s = time.time() + limit_s
    while [each for each in started if not each.has_ended()] and time.time() < ends_s:
        time.sleep(0.05)
    codes = [each.code for each in started]
    nodes = range(len(started))
    ends_s = time.time() + LEFT_S
    while any(processes_of(network, node) for node in nodes) and time.time() < ends_s:
        time.sleep(0.2)
    left = [pid for node in nodes for pid in processes_of(network, node)]
    names = []
    for pid in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(psutil.Process(pid).cmdline()))
            psutil.Process(pid).kill()
    for each in started:
        for thread in each.threads:
            thread.join(10)
    return {
        "codes": codes,
        "left": names,
        "ended_s": [each.ended_s for each in started],
        "lines": [each.lines for each in started],
    }


def clear(network: Network) -> None:
    """Remove all firewalls."""
    for each in (network.switch, *network):
        each.run("nft", "flush", "ruleset")


def try_outage(network: Network, name: str, launcher: str, culprit: int) -> dict[str, Any]:
    """Run one job through an outage."""
    outage = OUTAGES[name]
    with tempfile.TemporaryDirectory(prefix="outages-") as made:
        folder = Path(made)
        if outage.prepare is not None:
            outage.prepare(network, culprit)
        started = start(network, launcher, 3, folder, "none", outage.options)
        with outage.strike(network, culprit):
            fault_s = time.time()
            time.sleep(outage.lasts_s)
        over_s = time.time()
        time.sleep(2)
        (folder / "release").touch()
        found = finish(network, started, ENDS_S)
        found |= {"fault_s": fault_s, "over_s": over_s}
    clear(network)
    return found


def try_fault(network: Network, name: str, launcher: str, _: int) -> dict[str, Any]:
    """Run one job on two hosts into one of the six faults."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="outages-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        started = start(
            network, launcher, 2, folder, fault if fault in ("raise", "exit", "hang") else "wait"
        )
        fault_s = time.time()
        if fault == "kill":
            started[1].process.kill()
        elif fault == "cut":
            stack.enter_context(away(network, 1))
        elif fault == "away":
            with away(network, 1):
                time.sleep(6)
            time.sleep(2)
            (folder / "release").touch()
        else:
            fault_s = float((folder / "fault").read_text())
        found = finish(network, started, ENDS_S)
        found["fault_s"] = fault_s
    clear(network)
    return found


# ---- what was seen


BLAMES: Final = {
    "ddpsafe": re.compile(r"^ddpsafe\.\w+: ((?:rank|node) \d+) \("),
    "torchrun": re.compile(r"^\s+(rank)\s+: (\d+) "),
}
"""The rank or node that an error is about."""


def blamed(found: dict[str, Any], node: int) -> str:
    """Return which rank or node a launcher blames in the end."""
    matches = [BLAMES[found["launcher"]].search(line) for _, line in found["lines"][node]]
    named = [" ".join(match.groups()) for match in matches if match]
    return named[-1] if named else "none"


def exits(found: dict[str, Any]) -> str:
    """Return the exit codes of all nodes."""
    return "/".join("runs on" if code is None else str(code) for code in found["codes"])


def median_s(times: Sequence[float | None]) -> str:
    """Return the median of the times of what happened, and how often it did not."""
    known = [each for each in times if each is not None]
    if not known:
        return "never"
    some = "" if len(known) == len(times) else f" ({len(known)} of {len(times)})"
    return f"{statistics.median(known):.1f} s{some}"


def most(texts: Sequence[str]) -> str:
    """Return what was seen, and how often if it was not always the same."""
    counts = Counter(texts).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{text} ({count})" for text, count in counts)


def losses_of(found: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the loss and the number of steps of each rank that has printed them."""
    pattern = re.compile(r"rank \d+: loss (\S+) after (\d+) steps")
    matches = [pattern.search(line) for lines in found["lines"] for _, line in lines]
    return [(match[1], int(match[2])) for match in matches if match]


def is_unharmed(found: dict[str, Any], reference: list[str]) -> bool:
    """Return whether training has ended everywhere with the loss that it has without an outage."""
    losses = losses_of(found)
    nnodes = len(found["codes"])
    return (
        found["codes"] == [0] * nnodes
        and len(losses) == nnodes
        and len(set(losses)) == 1
        and reference[losses[0][1] - 1] == losses[0][0]
    )


def first_line_s(found: dict[str, Any], node: int, pattern: str) -> float | None:
    """Return how many seconds after the fault a node has printed a line; ranks' own lines do not count."""
    times = [
        at_s - found["fault_s"]
        for at_s, line in found["lines"][node]
        if at_s >= found["fault_s"] and not line.startswith("[rank") and re.search(pattern, line)
    ]
    return min(times, default=None)


class References:
    """The loss after each step, of jobs that nothing happens to, by number of nodes."""

    def __init__(self) -> None:
        """Make each one when it is first needed."""
        self._known: dict[int, list[str]] = {}
        self._lock = threading.Lock()

    def of(self, nnodes: int, network: Network) -> list[str]:
        """Return the losses."""
        with self._lock, tempfile.TemporaryDirectory(prefix="outages-") as made:
            if nnodes not in self._known:
                started = start(network, "ddpsafe", nnodes, Path(made), "reference")
                if any(finish(network, started, ENDS_S)["codes"]):
                    raise RuntimeError(str(started))
                self._known[nnodes] = json.loads((Path(made) / "reference").read_text())
            return self._known[nnodes]


def run_all(
    trials: list[tuple[str, str, int]], jobs: int, note: Callable[[dict[str, Any]], None]
) -> None:
    """Run trials (name, launcher, culprit), some at a time, each on hosts of its own."""
    from hosts import Network

    waiting: queue.SimpleQueue[tuple[str, str, int]] = queue.SimpleQueue()
    for trial in trials:
        waiting.put(trial)

    references = References()

    def work() -> None:
        with Network(3, nics={LAUNCHERS: "10.77.0", RANKS: "10.78.0"}) as network:
            while not waiting.empty():
                name, launcher, culprit = waiting.get()
                attempt = try_fault if name in FAULTS else try_outage
                found = {"name": name, "launcher": launcher, "culprit": culprit}
                reference = references.of(2 if name in FAULTS else 3, network)
                try:
                    found |= attempt(network, name, launcher, culprit)
                except AssertionError as exc:
                    note({**found, "broken": str(exc)})
                    break  # its processes may be left on these hosts
                note({**found, "unharmed": is_unharmed(found, reference)})

    workers = [threading.Thread(target=work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


# ---- the page


def outage_rows(trials: list[dict[str, Any]]) -> list[str]:
    """Return the table of the outages."""
    lines = [
        "| outage | torchrun: as without | ddpsafe: as without | the first warning of ddpsafe | exit codes of ddpsafe |",
        "|---|---|---|---|---|",
    ]
    for name in OUTAGES:
        by = {each: of(trials, name, each) for each in ("torchrun", "ddpsafe")}
        if not any(by.values()):
            continue
        cells = [f"{sum(each['unharmed'] for each in by[who])} of {len(by[who])}" for who in by]
        warned = [
            min(
                filter(None, (first_line_s(each, node, WARNING) for node in range(3))), default=None
            )
            for each in by["ddpsafe"]
        ]
        cells += [median_s(warned), most([exits(each) for each in by["ddpsafe"]])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def fault_rows(trials: list[dict[str, Any]]) -> list[str]:
    """Return the table of the six faults."""
    lines = [
        "| fault | launcher | node 0 names the culprit, blames | node 1 names the culprit, blames | exit codes | left |",
        "|---|---|---|---|---|---|",
    ]
    for name in FAULTS:
        for launcher in ("torchrun", "ddpsafe"):
            seen = of(trials, name, launcher)
            if not seen:
                continue
            cells = []
            for node in range(2):
                # A host that is cut off sees the other one vanish.
                culprit = 1 - node if FAULTS[name] == "cut" else 1
                named = [first_line_s(each, node, NAMES.format(culprit)) for each in seen]
                cells.append(f"{median_s(named)}, {most([blamed(each, node) for each in seen])}")
            if FAULTS[name] == "kill":
                cells[1] = "(killed)"
            if FAULTS[name] == "away":
                unharmed = sum(each["unharmed"] for each in seen)
                cells = [f"training ends as without ({unharmed} of {len(seen)})"] * 2
            cells += [
                most([exits(each) for each in seen]),
                str(max(len(each["left"]) for each in seen)),
            ]
            lines.append(f"| {name} ({len(seen)}) | {launcher} | {' | '.join(cells)} |")
    return lines


def of(trials: list[dict[str, Any]], name: str, launcher: str) -> list[dict[str, Any]]:
    """Return the trials of an outage or fault under a launcher."""
    return [each for each in trials if (each["name"], each["launcher"]) == (name, launcher)]


def page_of(trials: list[dict[str, Any]]) -> str:
    """Return the page for the documentation."""
    newline = "\n"
    return f"""\
# Outages between hosts

Three hosts (Linux namespaces) train together with gloo, one rank on each.
The launchers meet on one network and the ranks on another one.
Something then happens to one host: node 0 in the first trial, node 1 in the second one, node 2 in the third one, and so on.
"As without" counts the trials in which training ended with exit code 0 on every node, and every rank had exactly the loss that as many steps give without an outage.
The first warning is that of any node, as the median; the network may be back before it.

{newline.join(outage_rows(trials))}

Training cannot go on in the last two rows: the network is away for longer than ddpsafe was told to wait (`timeouts.node_loss`), and a firewall resets the connections of gloo itself.
torchrun has no such limit, and ranks whose peer has vanished wait for as long as their process group allows.

## Six faults on two hosts

The process group times out after {GROUP_TIMEOUT_S} s.
Each cell has the median time from the fault until a node prints the culprit's rank or node, and whom its launcher blames in the end; in brackets, how often that was seen if not always.
A host that is cut off sees the other one vanish, so each blames the other.
"runs on" is a launcher that had not ended {ENDS_S} s after the fault, and the last column the number of processes that were left on both hosts {LEFT_S} s later, itself included.

{newline.join(fault_rows(trials))}

All of it shared one core with other work, so the times are upper bounds: compare who is named.
{measured_on()}
To repeat: `python benchmarks/outages.py` (as root).
"""


def main() -> None:
    """Run the trials; print or save the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torchrun-rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--only", action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--be", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        train(Path(arguments.be[0]), arguments.be[1])
        return
    sys.path.insert(0, str(KITS))
    names = [each for each in (*OUTAGES, *FAULTS) if not arguments.only or each in arguments.only]
    trials = [
        (name, launcher, number % 3)
        for launcher, rounds in (
            ("torchrun", arguments.torchrun_rounds),
            ("ddpsafe", arguments.rounds),
        )
        for number in range(rounds)
        for name in names
    ]
    seen: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        seen += map(json.loads, arguments.json.read_text().splitlines())
        for each in seen:
            trial = (each["name"], each["launcher"], each["culprit"])
            if trial in trials:
                trials.remove(trial)

    def note(found: dict[str, Any]) -> None:
        seen.append(found)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
        facts = {
            key: found.get(key) for key in ("codes", "left", "unharmed", "broken") if key in found
        }
        print(
            f"{len(seen)}/{len(trials)} {found['name']} {found['launcher']} {found['culprit']} {facts}",
            flush=True,
        )

    from hosts import serving_forks

    with serving_forks(TORCHRUN):
        run_all(trials, arguments.jobs, note)
    page = page_of([each for each in seen if "broken" not in each])
    if arguments.save:
        arguments.save.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
