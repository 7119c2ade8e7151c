"""What happens to a job when one of its ranks, or its launcher, dies, stops or misbehaves.

The same training runs under each launcher, rank 2 of 4 does the same wrong thing at the same step,
and four things are recorded: whether the job ended by itself, how long that took, whether rank 2 was
named, and what was left running. Collectives time out after the same few seconds everywhere.

- ``mp.spawn``: set up, train, clean up, as in the tutorials;
- ``mp.spawn, barrier in except``: the same with ``except: dist.barrier(); raise`` and
  ``finally: dist.destroy_process_group()``, which scripts often have as a precaution;
- ``torchrun``: the same script under ``torchrun --standalone``;
- ``ddpsafe``: the same training under `ddpsafe.launch`.

A job that has not ended after `LIMIT_S` is ended here, and counts as hung.

Run ``python benchmarks/faults.py``, with ``--save FILE`` for a page, ``--only NAME`` for one fault.

With ``--hangs``, no timeout is set anywhere, and rank 2 makes the others wait. Measured is the number of
seconds until a line of output names it together with its line of code.
``ft_launcher`` of NVIDIA's resiliency extension (``pip install nvidia-resiliency-ext defusedxml``) is
included if it is installed; its ranks send it a heartbeat after each step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil
from _machine import measured_on

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS: Final = 4
FAULTY: Final = 2
STRIKES_AT_STEP: Final = 20
STEPS: Final = 60
COLLECTIVE_S: Final = 5
LIMIT_S: Final = 45
PATIENCE: Final = 3
MARK: Final = "DDPSAFE_FAULT_BENCHMARK"


def raise_an_error() -> None:
    """Raise, as a bug in the script would."""
    raise ValueError("label 7 is out of range")


def hold_the_gil() -> None:
    """Sleep in C without letting any other thread run Python."""
    ctypes.PyDLL(None).sleep(3600)


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        strike: What the faulty rank does, before a step or before it joins.
        before: Whether it happens before the process group exists.
        then: How the faulty rank continues with that step.
        launcher_gets: The signal that the launcher gets, while rank 2 sleeps.
    """

    strike: Callable[[], object] | None = None
    before: bool = False
    then: str = "train"
    launcher_gets: int = 0


def sleep_long() -> None:
    """Sleep for longer than any timeout."""
    time.sleep(3600)


FAULTS: Final = {
    "raises an exception": Fault(raise_an_error),
    "raises before it joins": Fault(raise_an_error, before=True),
    "sys.exit(0)": Fault(lambda: sys.exit(0)),
    "os._exit(0)": Fault(lambda: os._exit(0)),
    "SIGKILL": Fault(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "SIGSEGV": Fault(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "SIGSTOP": Fault(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "sleeps": Fault(sleep_long),
    "holds the GIL in C": Fault(hold_the_gil),
    "never joins": Fault(sleep_long, before=True),
    "returns early": Fault(then="return"),
    "skips one step": Fault(then="skip"),
    "another tensor shape": Fault(then="misshape"),
    "launcher gets SIGTERM": Fault(sleep_long, launcher_gets=signal.SIGTERM),
    "launcher gets SIGKILL": Fault(sleep_long, launcher_gets=signal.SIGKILL),
}


def strike(fault: Fault) -> None:
    """Record the time, and cause the fault."""
    Path(os.environ["FAULT_FILE"]).write_text(str(time.monotonic()))
    if fault.strike is not None:
        fault.strike()


def train(rank: int, fault: Fault) -> None:
    """Train a small network; the faulty rank fails on the way."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(STEPS):
        if rank == FAULTY and step == STRIKES_AT_STEP and not fault.before:
            strike(fault)
            if fault.then == "return":
                return
            if fault.then == "skip":
                continue
            if fault.then == "misshape":
                dist.all_reduce(torch.zeros(3))
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.01)


def before_joining(rank: int, fault: Fault) -> None:
    """Cause the fault before the rank joins, if it belongs there."""
    if rank == FAULTY and fault.before:
        strike(fault)


def textbook(rank: int, port: int, name: str) -> None:
    """Set up, train, clean up."""
    import torch.distributed as dist

    before_joining(rank, FAULTS[name])
    join(rank, port)
    train(rank, FAULTS[name])
    dist.destroy_process_group()


def careful(rank: int, port: int, name: str) -> None:
    """Set up, train, and on an error wait for the others, as a precaution."""
    import torch.distributed as dist

    before_joining(rank, FAULTS[name])
    join(rank, port)
    try:
        train(rank, FAULTS[name])
    except Exception:
        dist.barrier()
        raise
    finally:
        dist.destroy_process_group()


def join(rank: int, port: int) -> None:
    """Make the process group by hand."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


def torchrun_rank(name: str) -> None:
    """Run as a rank that torchrun has started."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if name in HANGS:
        dist.init_process_group("gloo")
        wait_for_a_rank(rank, name, send_heartbeat=heartbeat())
        return
    before_joining(rank, FAULTS[name])
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    train(rank, FAULTS[name])
    dist.destroy_process_group()


def heartbeat() -> Callable[[], None]:
    """Return a function that sends ft_launcher a heartbeat; it does nothing under others."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def ddpsafe_rank(ctx: object, name: str) -> None:
    """Run as a rank that ddpsafe has started."""
    train(ctx.rank, FAULTS[name])  # type: ignore[attr-defined]


def ddpsafe_rank_that_joins(rank: int, port: int, name: str) -> None:
    """Run the textbook's rank under ddpsafe: to fail before joining, it has to join by hand."""
    textbook(rank, port, name)


def free_port() -> int:
    """Choose a port, as scripts do."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


HANGS_AT_STEP: Final = 100
HANGS: Final = {
    "sleeping rank": 45.0,
    "worker that hangs": 45.0,
    "skipped collective": 5.0,
    "rank-dependent branch": 5.0,
    "deadlock over two groups": 5.0,
    "SIGSTOP": 5.0,
}
"""What makes the others wait, and the seconds within which ddpsafe promises to name it: a proved deadlock
ends the run at once, a wait that may still end gets a warning."""


class SleepingSamples:
    """A dataset whose samples never arrive."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 1

    def __getitem__(self, index: int) -> int:
        """Sleep for longer than any timeout."""
        sleep_long()
        return index


def wait_for_a_rank(
    rank: int, name: str, *, send_heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Train until rank 2 makes the others wait."""
    import torch
    import torch.distributed as dist

    second = dist.new_group(list(range(RANKS)))
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(100_000):
        parameter.grad = torch.ones(8)
        groups = [None, second]
        if rank == FAULTY and step == HANGS_AT_STEP:
            strike(Fault())
            if name == "sleeping rank":
                time.sleep(3600)
            elif name == "worker that hangs":
                next(iter(torch.utils.data.DataLoader(SleepingSamples(), num_workers=1)))
            elif name == "skipped collective":
                groups = [None]
                dist.barrier()
            elif name == "rank-dependent branch":
                dist.broadcast(torch.zeros(3), src=FAULTY)
            elif name == "deadlock over two groups":
                groups = [second, None]
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        for group in groups:
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        send_heartbeat()
        time.sleep(0.02)


def wait_by_hand(rank: int, port: int, name: str) -> None:
    """Join with torch's own defaults, and train."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    wait_for_a_rank(rank, name)


def wait_under_ddpsafe(ctx: object, name: str) -> None:
    """Train as a rank that ddpsafe has started."""
    wait_for_a_rank(ctx.rank, name)  # type: ignore[attr-defined]


def launch_without_timeouts(contestant: str, name: str) -> None:
    """Launch with default settings."""
    if contestant == "torchrun":
        from torch.distributed.run import main

        main(["--standalone", f"--nproc-per-node={RANKS}", __file__, "--be-a-rank", name])
    elif contestant == "ft_launcher":
        from nvidia_resiliency_ext.fault_tolerance.launcher import main

        options = ["--standalone", f"--nproc-per-node={RANKS}", "--ignore-missing-fault-tol-cfg"]
        main([*options, __file__, "--be-a-rank", name])
    elif contestant == "ddpsafe":
        import ddpsafe

        ddpsafe.launch(wait_under_ddpsafe, (name,), nproc_per_node=RANKS, backend="gloo")
    else:
        import torch.multiprocessing as mp

        mp.spawn(wait_by_hand, args=(free_port(), name), nprocs=RANKS)


def launch(contestant: str, name: str) -> None:
    """Launch."""
    if name in HANGS:
        launch_without_timeouts(contestant, name)
        return
    if contestant == "torchrun":
        from torch.distributed.run import main

        main(["--standalone", f"--nproc-per-node={RANKS}", __file__, "--be-a-rank", name])
    elif contestant == "ddpsafe":
        import ddpsafe

        timeouts = {"collective": COLLECTIVE_S, "start": COLLECTIVE_S}
        if FAULTS[name].before:
            args = (free_port(), name)
            ddpsafe.spawn(ddpsafe_rank_that_joins, args=args, nprocs=RANKS, timeouts=timeouts)
        else:
            timeouts = {"collective": COLLECTIVE_S}
            options = {"nproc_per_node": RANKS, "backend": "gloo", "timeouts": timeouts}
            ddpsafe.launch(ddpsafe_rank, (name,), **options)
    else:
        import torch.multiprocessing as mp

        rank = careful if "barrier" in contestant else textbook
        mp.spawn(rank, args=(free_port(), name), nprocs=RANKS)


CONTESTANTS: Final = ("mp.spawn", "mp.spawn, barrier in except", "torchrun", "ddpsafe")

BLAMED: Final = {
    "mp.spawn": r"[Pp]rocess (\d+) terminated",
    "torchrun": r"Root Cause[^$]*?rank\s*: (\d+)",
    "ddpsafe": r"^(?:ddpsafe\.\S+: )?rank (\d+) \(world_size",
}
"""How each launcher names the rank that it blames."""


class EndedTooEarlyError(Exception):
    """A job ended before the fault: its port was taken, or it crashed at its start."""


class Run(NamedTuple):
    """The result of one job: its time is None if the benchmark had to end it."""

    seconds: float | None
    exit_code: int
    blamed: int | None
    left: int


def run(contestant: str, name: str) -> Run:
    """Run one job, and again if it fails for another reason than the fault."""
    for _ in range(PATIENCE):
        with contextlib.suppress(EndedTooEarlyError):
            return run_once(contestant, name)
        print(f"{name}: {contestant}: failed at its start, trying again", file=sys.stderr)
    raise SystemExit(f"{contestant} failed {PATIENCE} times before the fault")


def start(
    contestant: str, name: str, *, mark: str, struck: Path, output: Path
) -> subprocess.Popen[bytes]:
    """Start one job; `struck` gets the time of its fault, `output` what it prints."""
    with output.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, __file__, "--launch", contestant, name],
            env={**os.environ, MARK: mark, "FAULT_FILE": str(struck), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def run_once(contestant: str, name: str) -> Run:
    """Run one job to its end or to the limit, and count what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        mark = uuid.uuid4().hex
        struck, output = Path(folder, "struck"), Path(folder, "output")
        process = start(contestant, name, mark=mark, struck=struck, output=output)
        try:
            ended_s = watch(process, struck, FAULTS[name].launcher_gets)
            time.sleep(1)
            left = marked(mark, but=process.pid)
        finally:
            end(process, mark)
        seconds = None if ended_s is None else ended_s - float(struck.read_text())
        blamed = re.search(
            BLAMED[contestant.partition(",")[0]], output.read_text(errors="replace"), re.MULTILINE
        )
        return Run(seconds, process.returncode, int(blamed[1]) if blamed else None, len(left))


NAMED: Final = re.compile(r"rank 2\b[^\n]*\.py:\d+|rank 2\b[^\n]*stopped", re.IGNORECASE)
"""The faulty rank together with a line of code, or that it is stopped."""


class Wait(NamedTuple):
    """The result of one job without timeouts: None for what did not happen within the limit."""

    named_s: float | None
    ended_s: float | None
    line: str


def wait_once(contestant: str, name: str) -> Wait:
    """Run one job until it ends or the limit, and note when rank 2 is named."""
    with tempfile.TemporaryDirectory() as folder:
        mark = uuid.uuid4().hex
        struck, output = Path(folder, "struck"), Path(folder, "output")
        process = start(contestant, name, mark=mark, struck=struck, output=output)
        try:
            gives_up_s = time.monotonic() + 3 * HANG_LIMIT_S
            while not struck.exists() or not struck.read_text():
                if process.poll() is not None or time.monotonic() > gives_up_s:
                    raise EndedTooEarlyError(output.read_text(errors="replace"))
                time.sleep(0.05)
            began_s, named_s, line = float(struck.read_text()), None, ""
            while process.poll() is None and time.monotonic() - began_s < HANG_LIMIT_S:
                time.sleep(0.2)
                found = NAMED.search(output.read_text(errors="replace"))
                if found is not None and named_s is None:
                    named_s, line = time.monotonic() - began_s, found[0]
            ended_s = None if process.poll() is None else time.monotonic() - began_s
            found = NAMED.search(output.read_text(errors="replace"))
            if found is not None and named_s is None:
                named_s, line = time.monotonic() - began_s, found[0]
            return Wait(named_s, ended_s, line)
        finally:
            end(process, mark)


HANG_LIMIT_S: Final = 50
WAITING_CONTESTANTS: Final = (
    "mp.spawn",
    "torchrun",
    *(("ft_launcher",) if find_spec("nvidia_resiliency_ext") else ()),
    "ddpsafe",
)


def compare_hangs(options: argparse.Namespace) -> None:
    """Run every hang under all launchers at once, with default settings."""
    lines = [
        f"| rank 2 … | promised | {' | '.join(WAITING_CONTESTANTS)} |",
        "|---|--:|" + "---|" * len(WAITING_CONTESTANTS),
    ]
    for name, promised_s in HANGS.items():
        with ThreadPoolExecutor() as pool:
            runs = list(pool.map(partial(wait_once, name=name), WAITING_CONTESTANTS))
        cells = [wait_cell(each) for each in runs]
        lines.append(f"| {name} | {promised_s:.0f} s | {' | '.join(cells)} |")
        print(name, *runs, sep="\n  ", file=sys.stderr)
    own_limits = ""
    if "ft_launcher" in WAITING_CONTESTANTS:
        extension = version("nvidia-resiliency-ext")
        own_limits = f"\nft_launcher (nvidia-resiliency-ext {extension}) gets a heartbeat after each step; by default, it waits 45 min for the next one."
    page = f"""\
---
orphan: true
---

# Who keeps the others waiting, with default settings

Rank {FAULTY} of {RANKS} does what the first column says after {HANGS_AT_STEP} steps; no timeout is set anywhere.
Each cell: seconds from then to the first line of output that names rank {FAULTY} with its line of code (or that it is stopped), and to the end of the job.
After {HANG_LIMIT_S} s, the benchmark ends the job; torch's own timeout for gloo is 30 min.{own_limits}
"promised" is the limit that ddpsafe promises: 5 s if the deadlock can be proved, 45 s if the rank may only be slow.

{chr(10).join(lines)}

{measured_on()}
To repeat: `python benchmarks/faults.py --hangs`.
"""
    if options.save is not None:
        if options.save.exists():  # the sections below were not measured here
            _, heading, kept = options.save.read_text(encoding="utf-8").partition("\n## ")
            page += heading + kept
        options.save.write_text(page, encoding="utf-8")
    print(page)


def wait_cell(run: Wait) -> str:
    """Return the cell of the table."""
    named = (
        f"nothing in {HANG_LIMIT_S} s" if run.named_s is None else f"named in {run.named_s:.1f} s"
    )
    return named if run.ended_s is None else f"{named}, ended in {run.ended_s:.1f} s"


def watch(process: subprocess.Popen[bytes], struck: Path, launcher_gets: int) -> float | None:
    """Wait for the end; return its time on the monotonic clock, or None after the limit."""
    while not struck.exists() or not struck.read_text():
        if process.poll() is not None:
            raise EndedTooEarlyError
        time.sleep(0.01)
    if launcher_gets:
        time.sleep(0.5)  # by then, the others wait in C++
        process.send_signal(launcher_gets)
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic()


def marked(mark: str, *, but: int) -> list[psutil.Process]:
    """Find the processes of one job that are still running."""
    return [each for each in psutil.process_iter() if each.pid != but and has_mark(each, mark)]


def has_mark(process: psutil.Process, mark: str) -> bool:
    """Return whether a process runs and inherited the mark."""
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it ended, or belongs to another user
        return False


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a job and everything that it has left."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for orphan in marked(mark, but=process.pid):
        orphan.kill()


def cell(fault: Fault, runs: list[Run]) -> str:
    """Return the cell for the runs of a fault."""
    ended = [each.seconds for each in runs if each.seconds is not None]
    parts = [f"{statistics.median(ended):.1f} s" if ended else f"**hung** > {LIMIT_S} s"]
    if ended and len(ended) < len(runs):
        parts.append(f"**hung** {len(runs) - len(ended)} of {len(runs)}")
    if not fault.launcher_gets and ended:
        right = sum(each.blamed == FAULTY for each in runs if each.seconds is not None)
        parts.append("right" if right == len(ended) else f"**right {right} of {len(ended)}**")
        if any(each.exit_code == 0 for each in runs):
            parts.append("**exit code 0**")
    if orphans := max(each.left for each in runs):
        parts.append(f"**{orphans} left**")
    return ", ".join(parts)


def page_of(results: dict[str, dict[str, list[Run]]], rounds: int) -> str:
    """Return the page: the results, and the machine and versions."""
    lines = [f"| fault | {' | '.join(CONTESTANTS)} |", "|---" * (len(CONTESTANTS) + 1) + "|"]
    for name, runs in results.items():
        cells = [cell(FAULTS[name], runs[contestant]) for contestant in CONTESTANTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return f"""\
---
orphan: true
---

# The same faults under four launchers

Rank {FAULTY} of {RANKS} does what the first column says, at the same step of the same training; in the last two rows, it sleeps and the launcher gets the signal.
Each cell: seconds from the fault to the end of the launcher ({"one run each: compare which rank is named; a tenth of a second means nothing" if rounds == 1 else f"the median of {rounds}"}), whether rank {FAULTY} was named as the cause, and how many processes were left one second later.
Collectives and the rendezvous time out after {COLLECTIVE_S} s everywhere, so a fault that only a timeout can reveal takes at least that long.
"hung" means that the job had not ended by itself {LIMIT_S} s after the fault.
"exit code 0" means that a failed job counts as a success.

{chr(10).join(lines)}

{measured_on()}
To repeat: `python benchmarks/faults.py`.
"""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="The same faults under four launchers.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=FAULTS, action="append", help="only this fault")
    parser.add_argument("--save", type=Path, help="write the page to this file")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--hangs", action="store_true", help="hangs with default settings")
    parser.add_argument("--launch", nargs=2, help="internal")
    parser.add_argument("--be-a-rank", help="internal")
    options = parser.parse_args()
    if options.be_a_rank:
        torchrun_rank(options.be_a_rank)
    elif options.launch:
        launch(*options.launch)
    elif options.hangs:
        compare_hangs(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run every fault under every launcher, in turns, and print the results."""
    names = options.only or list(FAULTS)
    results: dict[str, dict[str, list[Run]]] = {
        name: {contestant: [] for contestant in CONTESTANTS} for name in names
    }
    for number in range(1, options.rounds + 1):
        for name in names:
            for contestant in CONTESTANTS:
                results[name][contestant].append(run(contestant, name))
                latest = results[name][contestant][-1]
                print(f"round {number}: {name}: {contestant}: {latest}", file=sys.stderr)
    page = page_of(results, options.rounds)
    if options.save is not None:
        options.save.write_text(page, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
