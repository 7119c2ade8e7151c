"""This process's place in the job: ranks and sizes, read from the variables of each launcher."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._host import is_loopback, plain_host, show_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

StartedBy = Literal["ddpsafe", "torchrun", "slurm", "openmpi", "mpi", "environment", "alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank's place in the job. Ranks count from 0.

    Attributes:
        rank: This process among all processes of the job.
        world_size: Number of processes of the job.
        local_rank: This process among those of its node.
        local_world_size: Number of processes on this node.
        node_rank: This node among all nodes.
        nnodes: Number of nodes.
        started_by: What started the process.
        known_ranks_of_node: The ranks of this node, once all ranks have told theirs.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    started_by: StartedBy
    known_ranks_of_node: tuple[int, ...] = ()

    @classmethod
    def alone(cls) -> World:
        """Return the world of a process that no launcher started."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            nnodes=1,
            started_by="alone",
        )

    @property
    def ranks_of_node(self) -> Sequence[int]:
        """The ranks of this node; if not known, as torchrun, Slurm by default, and ddpsafe number them.

        They number node by node, ``srun --distribution=cyclic`` and ``mpirun --map-by node`` do not.
        """
        first = self.rank - self.local_rank
        return self.known_ranks_of_node or range(first, first + self.local_world_size)

    def among(self, hosts: Sequence[str], node_ranks: Sequence[int]) -> World:
        """Return the same place, given the host and the node rank of each rank of the job."""
        # Some launchers give no node ranks, and some nodes are containers with one name.
        for nodes in (hosts, node_ranks):
            ranks = tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.rank])
            if len(ranks) == self.local_world_size:
                return replace(self, known_ranks_of_node=ranks)
        return self

    def __str__(self) -> str:
        """Return the rank as every message names it."""
        return f"rank {self.rank} (world_size {self.world_size})"

    def as_env(self) -> dict[str, str]:
        """Return the world as the variables that torch and other frameworks read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
        }


_JOB_VARIABLES: Final = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_orte_jobid",
)
_QUEUE_VARIABLES: Final = ("PBS_JOBID", "LSB_JOBID")


def job_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that identify the job: they are the same in all its ranks."""
    # torchrun's --rdzv-id is "none" by default.
    return {name: env[name] for name in _JOB_VARIABLES if env.get(name, "none") != "none"}


def queue_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the batch system's job ids; mpirun may not pass them on to other nodes."""
    return {name: env[name] for name in _QUEUE_VARIABLES if name in env}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """The variables with which one launcher gives a process its place."""

    started_by: StartedBy
    marker: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None
    node_rank: str | None = None
    nnodes: str | None = None


# The first dialect whose marker is set wins: a rank of torchrun inside srun is torchrun's.
# Slurm's variables count only inside a step: a batch script without srun also sees SLURM_PROCID=0 and
# SLURM_NTASKS=4, although it is a single process (measured with Slurm 22.05).
_BY_HAND: Final = _Dialect(
    started_by="environment",
    marker="RANK",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node_rank="NODE_RANK",
)
_SLURM: Final = _Dialect(
    started_by="slurm",
    marker="SLURM_STEP_ID",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    node_rank="SLURM_NODEID",
    nnodes="SLURM_STEP_NUM_NODES",
)
_DIALECTS: Final = (
    replace(
        _BY_HAND,
        started_by="torchrun",
        marker="TORCHELASTIC_RUN_ID",
        node_rank="GROUP_RANK",
        nnodes="GROUP_WORLD_SIZE",
    ),
    _BY_HAND,
    _Dialect(
        started_by="openmpi",
        marker="OMPI_COMM_WORLD_RANK",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _SLURM,
    _Dialect(
        started_by="mpi",
        marker="PMI_RANK",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
)

# Step ids that Slurm uses for the batch script and for interactive shells: one process each.
_SLURM_SHELL_STEPS: Final = frozenset({"4294967291", "4294967292", "4294967290"})
_TASKS: Final = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


JOINED: Final = "_DDPSAFE_JOINED"
"""The variable with the rank and the process that has joined a process group; its children inherit it."""

_OF_A_RANK: Final = re.compile(
    "RANK|WORLD_SIZE|LOCAL_.*RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_.*|ROLE_.*|MASTER_ADDR|MASTER_PORT"
    f"|TORCHELASTIC_.*|PET_.*|{JOINED}"
)


def clean_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a program that a rank starts, without what makes a process that rank.

    A program with RANK, WORLD_SIZE and MASTER_ADDR would join the job as that rank, and wait for ranks that
    are in it already::

        subprocess.run([sys.executable, "evaluate.py"], env=ddpsafe.clean_environment())

    Args:
        env: The environment to clean; this process's by default.

    Returns:
        A copy without the variables of ddpsafe, torchrun, Slurm steps and MPI that give a process its place.
    """
    env = os.environ if env is None else env
    of_launchers = {
        name
        for dialect in _DIALECTS
        for name in (dialect.marker, dialect.rank, dialect.world_size, dialect.local_rank)
    }
    return {
        name: text
        for name, text in env.items()
        if name not in of_launchers and not _OF_A_RANK.fullmatch(name)
    }


def joined_mark(rank: int, env: Mapping[str, str]) -> str:
    """Return the value of `JOINED` in a rank that joins with these variables."""
    return f"{rank} {os.getpid()} {_place_in(env)}"


def _place_in(env: Mapping[str, str]) -> str:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    return json.dumps([env.get(name) for name in names])


def is_inherited(env: Mapping[str, str], pid: int) -> bool:
    """Return whether a process with these variables has inherited the place of a rank in its group."""
    _, rank_pid, place = [*env.get(JOINED, "").split(" ", 2), "", "", ""][:3]
    # A launcher that the rank has started gives its own ranks other places.
    return rank_pid not in {"", str(pid)} and place == _place_in(env)


def require_not_inherited(env: Mapping[str, str]) -> None:
    """Check that this process has not inherited the place of a rank that has joined its group.

    Raises:
        ConfigError: It has.
    """
    if not is_inherited(env, os.getpid()):
        return
    rank, pid, _ = env[JOINED].split(" ", 2)
    what = (
        f"this process (pid {os.getpid()}) was started by rank {rank} (pid {pid}) and has its variables "
        "(RANK, WORLD_SIZE, MASTER_ADDR), with which it would join as that rank."
    )
    cause = "that rank has joined already, so this process would wait for ranks that never come."
    fix = (
        "start a program with  env=ddpsafe.clean_environment(),  then it is a job of its own; in a module "
        "that worker processes import, join the group under  if __name__ == '__main__':."
    )
    raise ConfigError(Explanation(what, cause=cause, fix=fix))


def require_int(env: Mapping[str, str], name: str, *, because: str) -> int:
    """Read an integer variable that the variable `because`, which is set, needs.

    Raises:
        ConfigError: It is missing or not an integer. A missing rank never counts as 0.
    """
    text = env.get(name)
    if text is None:
        what = f"{name} is not set, but {because} is."
        cause = f"a leftover {because} in the shell, or a launcher that sets only some variables."
        fix = f"set {name} too, or `unset {because}` to run without a launcher."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    try:
        return int(text)
    except ValueError as exc:
        what = f"{name}={text!r} is not an integer."
        fix = f"set {name} to an integer, or unset {because}."
        raise ConfigError(Explanation(what, cause="a typo.", fix=fix)) from exc


def find_world(env: Mapping[str, str]) -> World | None:
    """Read the place that an outer launcher gave this process; ``None`` if no launcher started it.

    Raises:
        ConfigError: The variables contradict each other or are incomplete.
    """
    env = trimmed(env)
    # A node's variables alone are meant for a torchrun that did not start this process.
    by_rank = any(
        dialect.marker in env and not _is_shell_step(dialect, env)
        for dialect in _DIALECTS
        if dialect.started_by != "environment"
    )
    if not by_rank and "LOCAL_RANK" not in env and any(n in env for n in _NODE_VARIABLES):
        return _node_as_rank(env)
    # In an Indexed Job of Kubernetes, a pod knows its index; the manifest may set only WORLD_SIZE.
    index = env.get("JOB_COMPLETION_INDEX")
    if index is not None and "RANK" not in env and env.get("WORLD_SIZE", "1") != "1":
        env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **env, "RANK": index}
    for dialect in _DIALECTS:
        if dialect.marker in env and not _is_shell_step(dialect, env):
            # If a pod has only RANK and WORLD_SIZE, each pod is a host with one rank.
            by_pod = "KUBERNETES_SERVICE_HOST" in env and not is_loopback(
                plain_host(env.get("MASTER_ADDR", ""))
            )
            has_local = "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env
            if dialect is _BY_HAND and by_pod and not has_local:
                env = {**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            return _read(dialect, env)
    return None


def trimmed(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables without surrounding whitespace."""
    # Those from files may end in newlines.
    return {name: text.strip() for name, text in env.items()}


def read_nnodes(name: str, text: str) -> tuple[int, int]:
    """Parse torchrun's nnodes, ``N`` or ``MIN:MAX``; return the minimum and the maximum.

    Raises:
        ConfigError: It has neither form.
    """
    match = _NNODES.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        what = f"{name}={text} is not a number of nodes."
        fix = f"write {name}=2, or {name}=2:4 to start with two and take up to four."
        raise ConfigError(Explanation(what, fix=fix))
    return least, most


_NNODES: Final = re.compile(r"\s*([0-9]{1,9})\s*(?::\s*([0-9]{1,9})\s*)?")

# torchrun reads its options from PET_<OPTION>. PyTorchJob, Kubeflow Trainer, Volcano and PAI set these
# in each pod, some with a RANK and WORLD_SIZE that count pods. They describe a node, not a rank.
_NODE_VARIABLES: Final = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")


def _node_as_rank(env: Mapping[str, str]) -> World | None:
    """Return the world that a node's variables describe if each node has one rank.

    Returns ``None`` if there is a single node: a launch can start its ranks.

    Raises:
        ConfigError: The nodes have several ranks, or variables are missing or contradict each other.
    """
    nnodes, nproc = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    if nnodes in {"1", "1:1"}:
        is_rank = nproc == "1" and "RANK" in env
        return _read(_BY_HAND, env) if is_rank else None
    places = ("PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX")
    place = next((name for name in places if name in env), "RANK")
    counts_nodes = env.get("WORLD_SIZE", nnodes) == nnodes
    same_place = "RANK" not in env or env["RANK"] == env.get(place)
    if (
        nproc != "1"
        or not nnodes.isdecimal()
        or place not in env
        or not (counts_nodes and same_place)
    ):
        variables = ", ".join(
            f"{name}={env[name]}"
            for name in (*_NODE_VARIABLES, "RANK", "WORLD_SIZE")
            if name in env
        )
        what = f"{variables} are meant for torchrun, which did not start this process."
        cause = (
            "a pod of Kubernetes (PyTorchJob, Kubeflow Trainer, Volcano, …) that runs "
            "`python script.py`: the variables describe the pod, not its ranks."
        )
        fix = (
            "run `torchrun script.py` in the pod, which reads PET_*; or request one rank for each "
            "pod (PET_NPROC_PER_NODE=1); or unset PET_* for a job in this pod alone."
        )
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    one_rank = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return _read(_BY_HAND, {**env, **one_rank, "RANK": env[place], "WORLD_SIZE": nnodes})


def _is_shell_step(dialect: _Dialect, env: Mapping[str, str]) -> bool:
    if dialect.started_by != "slurm":
        return False
    if env["SLURM_STEP_ID"] in _SLURM_SHELL_STEPS or "SLURM_STEP_NUM_TASKS" not in env:
        return True
    # `srun --ntasks=4 --pty bash`: the shell is task 0, and nothing else runs in the step's other tasks. With
    # `srun --pty python script.py` all tasks run the script, and Slurm's daemon is the parent of each.
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_PROCID") != "0":
        return False
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text(encoding="utf-8").strip()
    except OSError:  # another user's process, so not the shell
        return False
    return parent != "slurmstepd"


def _read(dialect: _Dialect, env: Mapping[str, str]) -> World:
    rank = require_int(env, dialect.rank, because=dialect.marker)
    world_size = require_int(env, dialect.world_size, because=dialect.rank)
    _check_range(dialect.rank, rank, dialect.world_size, world_size)
    if dialect.local_world_size is not None and dialect.local_world_size in env:
        local_world_size = require_int(env, dialect.local_world_size, because=dialect.rank)
    elif dialect.started_by == "slurm":
        local_world_size = _slurm_tasks_here(env, world_size)
    else:
        local_world_size = world_size
    if dialect.local_rank in env:
        local_rank = require_int(env, dialect.local_rank, because=dialect.rank)
    else:
        local_rank = rank % max(1, local_world_size)
    _check_range("the local rank", local_rank, "the local world size", local_world_size)
    # Unless a variable says otherwise, nodes are filled one after the other.
    node_rank = rank // local_world_size
    if dialect.node_rank is not None and dialect.node_rank in env:
        node_rank = require_int(env, dialect.node_rank, because=dialect.rank)
    nnodes = max(-(-world_size // local_world_size), node_rank + 1)
    if dialect.nnodes is not None and dialect.nnodes in env:
        nnodes = require_int(env, dialect.nnodes, because=dialect.rank)
    _check_range("the node's rank", node_rank, "the number of nodes", nnodes)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        nnodes=nnodes,
        started_by=dialect.started_by,
    )


def _slurm_tasks_here(env: Mapping[str, str], world_size: int) -> int:
    """Return the number of tasks of this node; ``2,1(x2)`` means two, then one on each of two nodes."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", str(world_size))
    node = require_int({"SLURM_NODEID": "0", **env}, "SLURM_NODEID", because="SLURM_STEP_ID")
    first = 0
    for part in map(_TASKS.fullmatch, text.split(",")):
        last = first if part is None else first + int(part[2] or 1)
        if part is not None and first <= node < last:
            return int(part[1])
        first = last
    what = f"SLURM_STEP_TASKS_PER_NODE={text!r} does not say how many tasks node {node} has."
    fix = "start the script with srun, or `unset SLURM_STEP_ID` to run without Slurm."
    raise ConfigError(Explanation(what, cause="the variables were changed by hand.", fix=fix))


def _check_range(name: str, value: int, size_name: str, size: int) -> None:
    if size < 1 or not 0 <= value < size:
        what = f"{name} is {value}, but {size_name} is {size}: ranks count from 0 to {size - 1}."
        cause = "ranks counted from 1, or variables left over from another job."
        fix = f"start every process with 0 <= {name} < {size_name}, or unset both."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


_HOST_PARTS: Final = re.compile(r"([^,\[\]]+)|\[([^\[\]]*)\]")
_HOST_RANGE: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MAX_HOSTS: Final = 100_000


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's host list, in the order of ``scontrol show hostnames``.

    ``gpu[01-03,7],m5`` is gpu01, gpu02, gpu03, gpu7 and m5. In ``rack[1-2]n[01-02]`` the last number
    varies fastest.

    Raises:
        ValueError: The text is not a host list, or names more than 100,000 hosts.
    """
    hosts: list[str] = []
    names, start = [""], 0
    while start < len(text):
        if text[start] == ",":
            hosts += names
            names, start = [""], start + 1
            continue
        part = _HOST_PARTS.match(text, start)
        if part is None:
            raise ValueError(f"{text!r} is not a list of hosts: it has an unmatched bracket")
        endings = [part[1]] if part[1] else list(_host_numbers(part[2]))
        if len(names) * len(endings) + len(hosts) > _MAX_HOSTS:
            raise ValueError(f"a list of more than {_MAX_HOSTS} hosts")
        names = [name + ending for name in names for ending in endings]
        start = part.end()
    hosts += names
    if "" in hosts:
        raise ValueError(f"{text!r} is not a list of hosts: it has an empty name")
    return hosts


def _host_numbers(text: str) -> Iterator[str]:
    """Yield the numbers of a bracket, padded with zeros to the width of each range's first number."""
    for item in text.split(","):
        match = _HOST_RANGE.fullmatch(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or not 0 <= last - first < _MAX_HOSTS:
            raise ValueError(f"[{text}] is not a list of numbers and ranges")
        for number in range(first, last + 1):
            yield f"{number:0{len(match[1])}d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """A node's place in a job in which one process on each node starts the ranks.

    Attributes:
        nnodes: Number of nodes, or its maximum.
        min_nodes: Minimum number of nodes to start with; ``None`` for all.
        node_rank: This node; ``None`` if unknown.
        endpoint: Address of the rendezvous; ``None`` if unknown.
        job: Name of the job; ``None`` if unknown.
        said_by: Source of these facts, for a note to the user.
    """

    nnodes: int
    min_nodes: int | None = None
    node_rank: int | None
    endpoint: str | None
    job: str | None
    said_by: str


_TORCHRUN_PORT: Final = 29500
"""torchrun's default for MASTER_PORT."""
_NODE_PORTS: Final = range(30_000, 32_768)
"""Below the ports that Linux assigns by itself. A Slurm job and step map to one of them."""


def find_node_place(env: Mapping[str, str]) -> NodePlace | None:
    """Return this node's place if a launcher started one process on each of several nodes.

    Returns ``None`` if there is one node, or several processes on each node.

    Raises:
        ConfigError: The variables contradict each other or are incomplete.
    """
    env = trimmed(env)
    if "SLURM_STEP_ID" in env and not _is_shell_step(_SLURM, env):
        return _slurm_node(env)
    if env.get("PET_NNODES", "1") not in {"1", "1:1"}:
        return _torchrun_node(env)
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1":
        nnodes = require_int(env, "OMPI_COMM_WORLD_SIZE", because="OMPI_COMM_WORLD_LOCAL_SIZE")
        if nnodes > 1:
            node = require_int(env, "OMPI_COMM_WORLD_RANK", because="OMPI_COMM_WORLD_SIZE")
            return NodePlace(
                nnodes=nnodes,
                node_rank=node,
                endpoint=_master(env),
                job=env.get("PMIX_NAMESPACE"),
                said_by="mpirun",
            )
    return None


def _slurm_node(env: Mapping[str, str]) -> NodePlace | None:
    nnodes = require_int(env, "SLURM_STEP_NUM_NODES", because="SLURM_STEP_ID")
    if nnodes == 1 or env.get("SLURM_STEP_NUM_TASKS") != str(nnodes):
        return None
    node = require_int(env, "SLURM_NODEID", because="SLURM_STEP_NUM_NODES")
    job, step = env.get("SLURM_JOB_ID", "0"), env["SLURM_STEP_ID"]
    endpoint = _master(env)
    if endpoint is None:
        try:
            first = expand_hosts(env.get("SLURM_STEP_NODELIST", ""))[0]
        except (ValueError, IndexError) as exc:
            what = f"SLURM_STEP_NODELIST does not name the first node: {exc}."
            fix = "write --rdzv-endpoint HOST:PORT, with the host of node 0."
            raise ConfigError(Explanation(what, fix=fix)) from exc
        number = int(job) * 7 + int(step) if (job + step).isdecimal() else 0
        endpoint = f"{first}:{_NODE_PORTS[number % len(_NODE_PORTS)]}"
    return NodePlace(
        nnodes=nnodes, node_rank=node, endpoint=endpoint, job=f"slurm-{job}.{step}", said_by="Slurm"
    )


def _torchrun_node(env: Mapping[str, str]) -> NodePlace:
    fewest, nnodes = read_nnodes("PET_NNODES", env["PET_NNODES"])
    variables = [name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK") if name in env]
    node = require_int(env, variables[0], because="PET_NNODES") if variables else None
    master = {
        name: env.get(f"PET_{name}") or env.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")
    }
    return NodePlace(
        nnodes=nnodes,
        min_nodes=fewest if fewest != nnodes else None,
        node_rank=node,
        endpoint=env.get("PET_RDZV_ENDPOINT") or _master(master),
        job=env.get("PET_RDZV_ID"),
        said_by="PET_NNODES",
    )


def _master(env: Mapping[str, str]) -> str | None:
    host = env.get("MASTER_ADDR")
    if not host:
        return None
    return show_endpoint(plain_host(host), env.get("MASTER_PORT") or _TORCHRUN_PORT)


def loopback_interfaces() -> dict[str, str]:
    """Return variables that keep gloo and NCCL on loopback, where no other host can reach them."""
    # NCCL matches prefixes: without "=", lo would select every name that begins with it.
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
