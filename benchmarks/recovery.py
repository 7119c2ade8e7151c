"""What a failure costs: from a kill until the training is where it was.

A training of 2 ranks makes a step every tenth of a second, with a state of a given size. Rank 1 kills itself at
step 150, so with a checkpoint every 100 steps, 50 are repeated, the mean for a kill at a random moment. Measured
are the time from the kill to the first step of the next attempt, the steps repeated, and the time from the kill
until step 150 is made again, which is what the failure costs.

The forms take turns: torchrun with ``torch.save`` of rank 0 into a file that is then renamed, as in torch's own
example; torchft, if it is installed; `Checkpointer` with ``every=100``; the same with ``memory_every="auto"``, and with ``memory_every=1``.
With two nodes, each has a launcher and one rank, on this host.

Run ``python benchmarks/recovery.py``, with ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from _machine import measured_on

RANKS: Final = 2
EVERY: Final = 100
DIES_AT: Final = 150
STEP_S: Final = 0.1
LIMIT_S: Final = 600
FOLDER: Final = "RECOVERY_FOLDER"
BYTES: Final = "RECOVERY_BYTES"
REPLICA: Final = "RECOVERY_REPLICA"


class Recovery(NamedTuple):
    """What one failure cost.

    Attributes:
        first_s: From the kill to the first step of the next attempt.
        repeated: Steps made again.
        lost_s: From the kill until the last step before it is made again.
        healthy_s: What a step before the kill took, saves included.
        alone: Steps that the other rank made without the killed one.
    """

    first_s: float
    repeated: float
    lost_s: float
    healthy_s: float
    alone: float


class Training:
    """The state, and a step of it."""

    def __init__(self, wrap: Any = None) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        self.folder = Path(os.environ[FOLDER])
        # TorchElastic does not count a restart on the nodes whose own ranks have not failed.
        self.is_again = (self.folder / "killed").exists()
        self.model: Any = (wrap or DistributedDataParallel)(torch.nn.Linear(64, 64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {
            "model": self.model.module,
            "optimizer": self.optimizer,
            "rest": torch.ones(int(os.environ[BYTES]) // 4),
        }

    def step(self, number: int, rank: int) -> None:
        """Make a step; rank 1 dies at `DIES_AT` of the first attempt."""
        import torch

        if rank == 1 and number == DIES_AT and not self.is_again:
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        self.model(torch.ones(4, 64)).sum().backward()
        self.optimizer.step()
        time.sleep(STEP_S)
        is_again = self.is_again or number >= DIES_AT  # torchft's other rank continues
        if rank == 0 and (number == 1 or is_again or number == DIES_AT - 1):
            self.note(f"{1 + is_again}-{number}")

    def note(self, name: str) -> None:
        """Record the time."""
        (self.folder / name).write_text(str(time.monotonic()))


def train_with_ddpsafe(ctx: Any, memory: Any) -> None:
    """Train with a `Checkpointer`."""
    from ddpsafe.checkpoint import Checkpointer

    training = Training()
    with Checkpointer(
        training.folder / "checkpoints", every=EVERY, memory_every=memory, keep=1
    ) as checkpointer:
        begin = checkpointer.restore(training.state) or 0
        for number in range(begin + 1, DIES_AT + 1):
            training.step(number, ctx.rank)
            if number < DIES_AT and checkpointer.is_due(number):
                checkpointer.save(training.state, number)
        os._exit(0)  # what follows a training is not measured


def train_by_hand() -> None:
    """Train as a rank of torchrun, with torch.save."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    training = Training()
    file, begin = training.folder / "state.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        begin = saved["step"]
        training.state["model"].load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        training.state["rest"].copy_(saved["rest"])
    for number in range(begin + 1, DIES_AT + 1):
        training.step(number, dist.get_rank())
        if number % EVERY == 0 and dist.get_rank() == 0:
            saved = {
                "step": number,
                "model": training.state["model"].state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "rest": training.state["rest"],
            }
            with file.with_suffix(".new").open("wb") as target:
                torch.save(saved, target)
                target.flush()
                os.fsync(target.fileno())
            file.with_suffix(".new").replace(file)
    os._exit(0)


def train_with_torchft() -> None:
    """Train as one of torchft's replicas, each the only rank of a torchrun."""
    from datetime import timedelta

    import torchft

    def load(saved: dict[str, Any]) -> None:
        training.state["model"].load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        training.state["rest"].copy_(saved["rest"])

    def save() -> dict[str, Any]:
        keys = ("model", "optimizer")
        whole = {key: training.state[key].state_dict() for key in keys}
        return {**whole, "rest": training.state["rest"]}

    replica = int(os.environ[REPLICA])
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"replica-{replica}",
        timeout=timedelta(seconds=60),
    )
    training = Training(lambda model: torchft.DistributedDataParallel(manager, model))
    optimizer = torchft.Optimizer(manager, training.optimizer)
    training.optimizer = optimizer
    training.state["optimizer"] = optimizer.optim
    while (number := manager.current_step() + 1) <= DIES_AT + 400:
        optimizer.zero_grad()
        training.step(number, replica)
        if replica == 1 and number > DIES_AT and manager.num_participants() == RANKS:
            training.note("back")
        if (training.folder / "back").exists():
            break
    os._exit(0)


def launch_torchft(node: int) -> None:
    """Run torchft's lighthouse, and a torchrun for each replica, which are as apart as nodes are."""
    if node > 0:
        return
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000)
    os.environ["TORCHFT_LIGHTHOUSE"] = house.address()
    replicas = []
    for replica in range(RANKS):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=1", "--max-restarts=3", __file__, "--be-a-replica"]
        replicas.append(subprocess.Popen(command, env={**os.environ, REPLICA: str(replica)}))
    for each in replicas:
        each.wait(LIMIT_S)
    house.shutdown()


def launch_torchrun(nodes: int, node: int, port: int) -> None:
    """Train under torchrun, with restarts."""
    from torch.distributed.run import main

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    place = ["--standalone"]
    if nodes > 1:
        place = [f"--nnodes={nodes}", f"--node-rank={node}", "--rdzv-backend=c10d"]
        place += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    count = f"--nproc-per-node={RANKS // nodes}"
    main([*place, count, "--max-restarts=3", __file__, "--be-a-rank"])


def launch_ddpsafe(memory: Any, nodes: int, node: int, port: int) -> None:
    """Train under ddpsafe, with one retry."""
    import ddpsafe

    options: dict[str, Any] = {"start_method": "forkserver", "backend": "gloo"}
    if nodes > 1:
        options |= {"nnodes": nodes, "node_rank": node, "preflight": "off"}
        options["rendezvous"] = {"endpoint": f"127.0.0.1:{port}"}
    retry = {"attempts": 2, "on": {"killed", "peer-lost"}, "backoff_initial": 0, "jitter": 0}
    ddpsafe.launch(
        train_with_ddpsafe, args=(memory,), nproc_per_node=RANKS // nodes, retry=retry, **options
    )


JOBS: Final = {
    "torchrun, torch.save": launch_torchrun,
    "torchft": lambda _, node, __: launch_torchft(node),
    "ddpsafe, disk": lambda *place: launch_ddpsafe(None, *place),
    'ddpsafe, memory, "auto"': lambda *place: launch_ddpsafe("auto", *place),
    "ddpsafe, memory, each step": lambda *place: launch_ddpsafe(1, *place),
}


def recover(job: str, size: int, nodes: int) -> Recovery | None:
    """Run a job in fresh processes, and return what its failure cost; ``None`` if it did not recover."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        environment = {**os.environ, FOLDER: folder, BYTES: str(size), "OMP_NUM_THREADS": "1"}
        launchers = []
        for node in range(nodes):
            place = ["--nodes", str(nodes), "--node", str(node), "--port", str(port)]
            errors = stack.enter_context(open(Path(folder, f"errors-{node}"), "w"))  # noqa: PTH123 - so
            launcher = subprocess.Popen(
                [sys.executable, __file__, "--job", job, *place],
                env=environment,
                stdout=errors,
                stderr=errors,
            )
            launchers.append(launcher)
        try:
            for launcher in launchers:
                launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            for launcher in launchers:
                launcher.kill()
            return None
        noted = {
            path.name: float(path.read_text())
            for path in Path(folder).iterdir()
            if path.name == "killed" or path.name.startswith(("1-", "2-"))
        }
        steps = sorted(int(name[2:]) for name in noted if name.startswith("2-"))
        if not steps or steps[-1] < DIES_AT:
            print(f"{job} failed: {Path(folder, 'errors-0').read_text()[-3000:]}", file=sys.stderr)
            return None
    killed_s = noted["killed"]
    return Recovery(
        first_s=noted[f"2-{steps[0]}"] - killed_s,
        repeated=DIES_AT - steps[0],
        alone=steps[-1] - DIES_AT,
        lost_s=noted[f"2-{DIES_AT - 1 if DIES_AT - 1 in steps else DIES_AT}"] - killed_s,
        healthy_s=(noted[f"1-{DIES_AT - 1}"] - noted["1-1"]) / (DIES_AT - 2),
    )


def measure(sizes: list[int], nodes: list[int], rounds: int) -> dict[tuple[int, int, str], Any]:
    """Measure all forms, in turns."""
    found: dict[tuple[int, int, str], list[Recovery]] = {}
    for _ in range(rounds):
        for count in nodes:
            for size in sizes:
                for job in JOBS:
                    if job == "torchft" and find_spec("torchft") is None:
                        continue
                    result = recover(job, size, count)
                    found.setdefault((count, size, job), []).extend([result] if result else [])
                    print(count, size, job, result, file=sys.stderr, flush=True)
    return found


def page_of(found: dict[tuple[int, int, str], list[Recovery]], rounds: int) -> str:
    """Return the page: the results, what they mean, and the machine and versions."""
    rows = []
    for (nodes, size, job), results in found.items():
        name = f"{size / 1e6:g} MB" if size < 1e9 else f"{size / 1e9:g} GB"
        if not results:
            rows.append(f"| {nodes} | {name} | {job} | no result | | | | | |")
            continue
        first, repeated, lost, healthy, alone = (
            statistics.median(each) for each in zip(*results, strict=True)
        )
        bases = [each.lost_s for each in found[nodes, size, next(iter(JOBS))]]
        ratio = f"{lost / statistics.median(bases):.2f}" if bases else ""
        rows.append(
            f"| {nodes} | {name} | {job} | {first:.1f} s | {repeated:g} | {lost:.1f} s "
            f"| {ratio} | {1000 * healthy:.0f} ms | {alone:g} |"
        )
    table = "\n".join(rows)
    return f"""\
---
orphan: true
---

# What a failure costs

Rank 1 of 2 is killed at step {DIES_AT}, with a checkpoint every {EVERY} steps and {1000 * STEP_S:.0f} ms for a step.
The time lost ends when the step before the kill has been made again; the ratio compares it with torchrun's.
Medians of {rounds}.

| nodes | state | form | kill to the next step | steps repeated | time lost | ratio | a healthy step, saves included | steps with one rank |
|--:|--:|---|--:|--:|--:|--:|--:|--:|
{table}

Two nodes are two launchers with one rank each, on one host.
The directory is on a local disk; on slower storage, the forms that restore from it lose more, and the others the same.
With longer steps the ratio becomes smaller: what is repeated grows with them, and the restart does not.
"auto" is for long trainings: with large states it has made two saves here to measure them, and the next one is due after the kill.
torchft repeats no step, because its other rank continues alone until the killed one is back: the last column counts these steps, which have half of the batch.
Its rank and those of torchrun are new processes; ddpsafe's are forked from a process that has imported torch.
Where there is no result, the ranks did not come to step {DIES_AT} again in the benchmark's limit.
DLRover's flash checkpoint is not here: `dlrover-run` 0.6.1 ends when it starts with this torch (`TypeError: SubprocessHandler.__init__() missing 1 required positional argument: 'numa_options'`).
Neither are NVRx's local checkpoints: 0.4.1 takes tensors on a GPU only (`assert state_dict_value.is_cuda`).

{measured_on()}
To repeat: `python benchmarks/recovery.py`.
"""


def main() -> None:
    """Measure and print the page, or be a launcher or a rank of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e7, 5e8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--save", type=Path, help="also write the page here")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--be-a-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--be-a-replica", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_a_rank:
        train_by_hand()
        return
    if options.be_a_replica:
        train_with_torchft()
        return
    if options.job:
        JOBS[options.job](options.nodes[0], options.node, options.port)
        return
    found = measure([int(size) for size in options.sizes], options.nodes, options.rounds)
    page = page_of(found, options.rounds)
    print(page)
    if options.save:
        options.save.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
