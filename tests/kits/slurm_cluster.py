"""A real Slurm on one machine: each node has its own network, name, mounts and processes.

A node's first process lives as long as a pipe that this process holds, and the kernel ends
everything in a node with its first process. So nothing outlives the tests, however they end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import machine
import scripts
from hosts import require

_TOOLS: Final = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged", "ip")
_SEARCHED: Final = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_LIMIT_S: Final = machine.hang_limit(60)
_ASKED_EVERY_S: Final = 0.2
_SUBNET: Final = "10.79.0"

_CONFIG: Final = """
    ClusterName=test
    SlurmctldHost=n0({subnet}.1)
    SlurmUser=root
    SlurmdUser=root
    AuthType=auth/munge
    CredType=cred/munge
    AuthInfo=socket={folder}/munge.socket
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/spool-%n
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/slurmd-%n.pid
    SlurmctldLogFile={folder}/slurmctld.log
    SlurmdLogFile={folder}/slurmd-%n.log
    ProctrackType=proctrack/linuxproc
    TaskPlugin=task/none
    SwitchType=switch/none
    MpiDefault=none
    JobAcctGatherType=jobacct_gather/none
    AccountingStorageType=accounting_storage/none
    SelectType=select/cons_tres
    SelectTypeParameters=CR_Core
    # Nodes claim more cores than this machine has; the ranks share what there is.
    SlurmdParameters=config_overrides
    SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
    PreemptType=preempt/partition_prio
    PreemptMode=REQUEUE
    ReturnToService=2
    RequeueExit=75
    KillWait=8
    MessageTimeout=20
    NodeName={names} NodeAddr={addresses} CPUs=4 CoresPerSocket=4 RealMemory=1000 State=UNKNOWN
    PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
    PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def require_slurm() -> None:
    """Skip the test with the reason if Slurm cannot run; fail if it is required."""
    require(_why_not())


def _why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return "Slurm needs Linux"
    if os.geteuid() != 0:
        return "Slurm needs root"
    if Path("/proc/self/setgroups").read_text().strip() == "deny":
        return "Slurm needs root outside of a user namespace"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_SEARCHED) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return probe.stderr.strip() if probe.returncode else None


class Node:
    """One node: a first process that holds its namespaces, and a way to run commands inside."""

    def __init__(self, name: str, setup: str) -> None:
        self.name = name
        script = f"set -e; hostname {name}; ip link set lo up; {setup}\necho up; exec cat >&2"
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        # An ignored SIGCHLD is inherited and has the kernel reap what the first process adopts.
        self._holder = subprocess.Popen(
            ["env", "--ignore-signal=CHLD", "unshare", *flags, "sh", "-c", script],
            env={**os.environ, "PATH": _SEARCHED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            _, error = self._holder.communicate(timeout=_LIMIT_S)
            msg = f"node {name}: {error}"
            raise RuntimeError(msg)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.first_pid = int(children.split()[0])

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one in this node."""
        spaces = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", f"--target={self.first_pid}", *spaces, "--wd=.", "--", *command]

    def close(self) -> None:
        """End every process in the node."""
        if self._holder.returncode is not None:
            return  # by `Cluster.power_off`
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first_pid, signal.SIGKILL)
        self._holder.communicate(timeout=_LIMIT_S)


class Cluster:
    """The nodes n0, n1, …, with a controller on n0."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self._nodes: list[Node] = []
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start nodes and daemons, and wait until Slurm calls every node idle."""
        self._write_config()
        names = [f"n{number}" for number in range(self.size)]
        switch = Node("switch", "ip link add br0 type bridge && ip link set br0 up")
        stack.callback(switch.close)
        self._switch = switch
        stack.callback(self._reap)
        for number, name in enumerate(names):
            node = Node(name, f"mount --bind {self.folder}/hosts /etc/hosts")
            stack.callback(node.close)
            self._nodes.append(node)
            self._plug_in(node, switch, f"{_SUBNET}.{number + 1}")
        head = self._nodes[0]
        key, socket = self.folder / "key", self.folder / "munge.socket"
        files = [f"--{each}-file={self.folder}/munge.{each}" for each in ("pid", "log", "seed")]
        options = [f"--key-file={key}", f"--socket={socket}", *files]
        self._start_daemon(head, "munged", "--foreground", "--force", *options)
        self._await(socket.exists)
        self._start_daemon(head, "slurmctld", "-D", "-c")
        for node in self._nodes:
            self._start_daemon(node, "slurmd", "-D", "-N", node.name)
        self._await(
            lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t") == "idle\n" * self.size
        )

    def _write_config(self) -> None:
        numbers = range(self.size)
        names = ",".join(f"n{number}" for number in numbers)
        addresses = [f"{_SUBNET}.{number + 1}" for number in numbers]
        text = _CONFIG.format(
            folder=self.folder, names=names, addresses=",".join(addresses), subnet=_SUBNET
        )
        (self.folder / "slurm.conf").write_text(textwrap.dedent(text))
        # With the nodes' own mounts of /sys, the search for cgroups finds no cgroup.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        hosts = [f"{address} n{number}" for number, address in enumerate(addresses)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (self.folder / "state").mkdir()
        for number in numbers:
            (self.folder / f"spool-n{number}").mkdir()
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)

    def _plug_in(self, node: Node, switch: Node, address: str) -> None:
        port = f"to-{node.name}"
        link = f"ip link add {port} type veth peer name eth0 netns {node.first_pid}"
        script = f"{link} && ip link set {port} master br0 up"
        # From outside of the switch's process namespace, where the node's first process has its number.
        inside = ["nsenter", f"--target={switch.first_pid}", "--net", "--", "sh", "-c", script]
        subprocess.run(inside, check=True, env={**os.environ, "PATH": _SEARCHED})
        script = f"ip address add {address}/24 dev eth0 && ip link set eth0 up"
        subprocess.run(
            node.inside("sh", "-c", script), check=True, env={**os.environ, "PATH": _SEARCHED}
        )

    def _start_daemon(self, node: Node, *command: str) -> None:
        with (self.folder / f"{command[0]}-{node.name}.err").open("wb") as errors:
            daemon = subprocess.Popen(
                node.inside(*command),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        self._daemons.append(daemon)

    def _environment(self) -> dict[str, str]:
        ours = scripts.clean_environment()
        kept = {name: text for name, text in ours.items() if not name.startswith("SLURM_")}
        conf = str(self.folder / "slurm.conf")
        return {**kept, "PATH": _SEARCHED, "SLURM_CONF": conf, "OMP_NUM_THREADS": "1"}

    def _await(self, condition: Callable[[], bool]) -> None:
        scripts.wait_until(condition, otherwise=self.logs, every_s=_ASKED_EVERY_S)

    def _reap(self) -> None:
        for daemon in self._daemons:
            daemon.wait(_LIMIT_S)

    def start_command(
        self, *command: str, folder: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on n0, in `folder`, with its output piped together."""
        return subprocess.Popen(
            self._nodes[0].inside(*command),
            cwd=folder or self.folder,
            env={**self._environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for the end of a command; return its exit code and output."""
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
        except BaseException:
            self.run("scancel", "--user=root", "--signal=KILL")
            process.kill()
            process.communicate()
            raise
        return process.returncode, output

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Run a command on n0, which must succeed; return its output."""
        code, output = self.end(self.start_command(*command, folder=folder))
        assert code == 0, f"{command}: exit code {code}\n{output}\n{self.logs()}"
        return output

    def submit(self, folder: Path, script: str, *options: str) -> int:
        """Submit a batch script; return the number of its job."""
        path = folder / "job.sh"
        path.write_text("#!/bin/bash\n" + textwrap.dedent(script).lstrip())
        logs = ["--output=job.out", "--open-mode=append"]
        found = self.run("sbatch", "--parsable", *logs, *options, str(path), folder=folder)
        return int(found.strip())

    def job(self, number: int) -> dict[str, str]:
        """Return Slurm's description of a job."""
        text = self.run("scontrol", "show", "job", str(number))
        pairs = (word.partition("=") for word in text.split())
        return {name: value for name, _, value in pairs}

    def await_state(self, number: int, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        self._await(lambda: self.job(number)["JobState"] in states)
        return self.job(number)

    def await_end(self, number: int, state: str) -> dict[str, str]:
        """Wait until a job has ended; fail unless it is in that state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
        facts = self.await_state(number, *ended)
        assert facts["JobState"] == state, facts
        return facts

    def clear(self) -> None:
        """Cancel all jobs, and wait until none is left."""

        def is_clear() -> bool:
            if not self.run("squeue", "-h"):
                return True
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
            return False

        self._await(is_clear)

    def kill(self, number: int, pid: int) -> None:
        """Kill a process of a node by its pid there."""
        command = self._nodes[number].inside("kill", "-KILL", str(pid))
        subprocess.run([*command], check=True, env={**os.environ, "PATH": _SEARCHED})

    def power_off(self, number: int) -> None:
        """Power a node off: first no packet leaves it, then every process is killed."""
        link = ["ip", "link", "set", f"to-n{number}", "down"]
        subprocess.run(
            [*self._switch.inside(*link)], check=True, env={**os.environ, "PATH": _SEARCHED}
        )
        self._nodes[number].close()

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.err")]
        tails = [(path.name, path.read_text().splitlines()[-8:]) for path in sorted(paths)]
        return "\n".join("\n".join([f"--- {name}", *lines]) for name, lines in tails)


@contextlib.contextmanager
def started_cluster(size: int) -> Iterator[Cluster]:
    """Run a cluster."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(folder, size)
        cluster.start(stack)
        yield cluster
