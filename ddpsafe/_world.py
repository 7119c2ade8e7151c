"""Who am I in the job: the ranks and sizes, and how each launcher spells them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._host import plain_host, show_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    started_by: StartedBy

    @classmethod
    def alone(cls) -> World:
        """Return the world of a process that nothing launched."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            nnodes=1,
            started_by="alone",
        )

    def __str__(self) -> str:
        """Name the rank the way every message does."""
        return f"rank {self.rank} (world_size {self.world_size})"

    def as_env(self) -> dict[str, str]:
        """Spell the world in the variables that torch and every framework read."""
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
    """Return the variables that tell one job from another, and are the same for all its ranks."""
    # "none" is torchrun's default of --rdzv-id.
    return {name: env[name] for name in _JOB_VARIABLES if env.get(name, "none") != "none"}


def queue_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the ids that a queue gave to this process; mpirun need not carry them to other nodes."""
    return {name: env[name] for name in _QUEUE_VARIABLES if name in env}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """The variables in which one launcher tells a process its place."""

    started_by: StartedBy
    marker: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None
    node_rank: str | None
    nnodes: str | None


# The first dialect whose marker is set wins: torchrun inside srun is torchrun's.
# Slurm is trusted only inside a step: a batch script without srun also sees SLURM_PROCID=0 and
# SLURM_NTASKS=4, though it is one process (measured with Slurm 22.05).
_BY_HAND: Final = _Dialect(
    started_by="environment",
    marker="RANK",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node_rank="NODE_RANK",
    nnodes=None,
)
_SLURM: Final = _Dialect(
    started_by="slurm",
    marker="SLURM_STEP_ID",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_world_size=None,
    node_rank="SLURM_NODEID",
    nnodes="SLURM_STEP_NUM_NODES",
)
_DIALECTS: Final = (
    _Dialect(
        started_by="torchrun",
        marker="TORCHELASTIC_RUN_ID",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
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
        node_rank=None,
        nnodes=None,
    ),
    _SLURM,
    _Dialect(
        started_by="mpi",
        marker="PMI_RANK",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        node_rank=None,
        nnodes=None,
    ),
)

# A step that Slurm opens for the batch script or for an interactive shell is one process of the job.
_SLURM_SHELL_STEPS: Final = frozenset({"4294967291", "4294967292", "4294967290"})
_TASKS: Final = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def require_int(env: Mapping[str, str], name: str, *, because: str) -> int:
    """Read an integer variable.

    Args:
        env: The environment.
        name: The variable.
        because: What else is set, that makes this one necessary.

    Returns:
        Its value.

    Raises:
        ConfigError: It is missing or no integer. A missing rank is never taken for 0.
    """
    text = env.get(name)
    if text is None:
        what = f"{name} is not set, but {because} is."
        cause = f"a stray {because} in the shell, or a launcher that sets only some variables."
        fix = f"set {name} too, or `unset {because}` to run without a launcher."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    try:
        return int(text)
    except ValueError as exc:
        what = f"{name}={text!r} is not an integer."
        fix = f"set {name} to an integer, or unset {because}."
        raise ConfigError(Explanation(what, cause="a typo.", fix=fix)) from exc


def find_world(env: Mapping[str, str]) -> World | None:
    """Read the place that an outer launcher gave this process.

    Args:
        env: The environment, usually ``os.environ``.

    Returns:
        The world of this rank, or ``None`` where no launcher started the process.

    Raises:
        ConfigError: The variables contradict each other or are incomplete.
    """
    env = trimmed(env)
    # A node's variables without a rank's are for a torchrun that did not start this process.
    by_rank = any(
        dialect.marker in env and not _is_shell_step(dialect, env)
        for dialect in _DIALECTS
        if dialect.started_by != "environment"
    )
    if not by_rank and "LOCAL_RANK" not in env and any(n in env for n in _NODE_VARIABLES):
        return _node_as_rank(env)
    # A pod of an Indexed Job of Kubernetes has its index, where the manifest gives WORLD_SIZE alone.
    index = env.get("JOB_COMPLETION_INDEX")
    if index is not None and "RANK" not in env and env.get("WORLD_SIZE", "1") != "1":
        env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **env, "RANK": index}
    for dialect in _DIALECTS:
        if dialect.marker in env and not _is_shell_step(dialect, env):
            # What a pod's RANK and WORLD_SIZE leave out: pods are hosts, each with one rank.
            by_pod = "KUBERNETES_SERVICE_HOST" in env and not is_loopback(
                env.get("MASTER_ADDR", "")
            )
            is_told = "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env
            if dialect is _BY_HAND and by_pod and not is_told:
                env = {**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            return _read(dialect, env)
    return None


def trimmed(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables without the blanks around them: a file or a manifest leaves ends of lines."""
    return {name: text.strip() for name, text in env.items()}


def read_nnodes(name: str, text: str) -> tuple[int, int]:
    """Read what torchrun calls nnodes, ``N`` or ``MIN:MAX``, as the fewest and the most nodes.

    Args:
        name: The option or the variable that says it.
        text: Its value.

    Raises:
        ConfigError: It is neither.
    """
    found = _NNODES.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < least <= most:
        what = f"{name}={text} is not a number of nodes."
        fix = f"write {name}=2, or {name}=2:4 to start with two and take up to four."
        raise ConfigError(Explanation(what, fix=fix))
    return least, most


_NNODES: Final = re.compile(r"\s*([0-9]{1,9})\s*(?::\s*([0-9]{1,9})\s*)?")

# torchrun takes its options from PET_<OPTION>. PyTorchJob, Kubeflow Trainer, Volcano and PAI set them
# in each pod, some with a RANK and WORLD_SIZE that count pods: they describe a node, not a rank.
_NODE_VARIABLES: Final = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")


def _node_as_rank(env: Mapping[str, str]) -> World | None:
    """Return the world of a node's variables where each node has one rank, else refuse them.

    Returns:
        ``None`` where there is one node: a launch can start its ranks.
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
        shown = ", ".join(
            f"{name}={env[name]}"
            for name in (*_NODE_VARIABLES, "RANK", "WORLD_SIZE")
            if name in env
        )
        what = f"{shown} are for torchrun, which has not started this process."
        cause = (
            "a pod of Kubernetes (PyTorchJob, Kubeflow Trainer, Volcano, …) that runs "
            "`python script.py`: the variables describe the pod, not its ranks."
        )
        fix = (
            "run `torchrun script.py` in the pod, which reads PET_*; or ask for one rank in each "
            "pod (PET_NPROC_PER_NODE=1); or unset PET_* for a job in this pod alone."
        )
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    one_rank = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return _read(_BY_HAND, {**env, **one_rank, "RANK": env[place], "WORLD_SIZE": nnodes})


def is_loopback(host: str) -> bool:
    """Tell whether a host, as written, is this very machine."""
    return plain_host(host) in {"localhost", "::1"} or host.startswith("127.")


def _is_shell_step(dialect: _Dialect, env: Mapping[str, str]) -> bool:
    if dialect.started_by != "slurm":
        return False
    return env["SLURM_STEP_ID"] in _SLURM_SHELL_STEPS or "SLURM_STEP_NUM_TASKS" not in env


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
    # Where nothing says how ranks lie on nodes, these are filled evenly.
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
    """Count this node's tasks; the format is ``2,1(x2)``: two, then one on two nodes."""
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
    raise ConfigError(Explanation(what, cause="variables changed by hand.", fix=fix))


def _check_range(name: str, value: int, size_name: str, size: int) -> None:
    if size < 1 or not 0 <= value < size:
        what = f"{name} is {value}, but {size_name} is {size}: ranks count from 0 to {size - 1}."
        cause = "ranks counted from 1, or variables left over from another job."
        fix = f"start every process with 0 <= {name} < {size_name}, or unset both."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


_HOST_PARTS: Final = re.compile(r"([^,\[\]]+)|\[([^\[\]]*)\]")
_HOST_RANGE: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MOST_HOSTS: Final = 100_000


def expand_hosts(text: str) -> list[str]:
    """Spell out a list of hosts as Slurm writes it, in the order of ``scontrol show hostnames``.

    ``gpu[01-03,7],m5`` is gpu01, gpu02, gpu03, gpu7 and m5; in ``rack[1-2]n[01-02]`` the last
    number counts fastest.

    Raises:
        ValueError: It is not such a list, or names more than 100,000 hosts.
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
            raise ValueError(f"{text!r} is not a list of hosts: a bracket has no other half")
        endings = [part[1]] if part[1] else list(_host_numbers(part[2]))
        if len(names) * len(endings) + len(hosts) > _MOST_HOSTS:
            raise ValueError(f"a list of more than {_MOST_HOSTS} hosts")
        names = [name + ending for name in names for ending in endings]
        start = part.end()
    hosts += names
    if "" in hosts:
        raise ValueError(f"{text!r} is not a list of hosts: a name in it is empty")
    return hosts


def _host_numbers(text: str) -> Iterator[str]:
    """Yield what stands for a bracket; numbers keep the zeros that the first one begins with."""
    for item in text.split(","):
        found = _HOST_RANGE.fullmatch(item)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not found or not 0 <= last - first < _MOST_HOSTS:
            raise ValueError(f"[{text}] is not a list of numbers and ranges")
        for number in range(first, last + 1):
            yield f"{number:0{len(found[1])}d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """One node's place among those of a job, where each has one process that starts its ranks.

    Attributes:
        nnodes: Number of nodes, the most there may be.
        min_nodes: The fewest to start with; ``None`` for all.
        node_rank: This node; ``None`` where nothing says it.
        endpoint: Where the nodes meet; ``None`` where nothing says it.
        job: Name of the job; ``None`` where nothing says it.
        said_by: Who says so, for a note.
    """

    nnodes: int
    min_nodes: int | None
    node_rank: int | None
    endpoint: str | None
    job: str | None
    said_by: str


_TORCHRUN_PORT: Final = 29500
"""What torchrun takes for MASTER_PORT by default."""
_NODE_PORTS: Final = range(30_000, 32_768)
"""Below the ports that Linux gives out by itself; a Slurm job takes one by its number."""


def find_node_place(env: Mapping[str, str]) -> NodePlace | None:
    """Read that this process is the only one on each of several nodes, and where they meet.

    Returns:
        The place, or ``None`` where there is one node, or each node has several processes.

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
                min_nodes=None,
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
            what = f"SLURM_STEP_NODELIST does not say which node is the first: {exc}."
            fix = "write --rdzv-endpoint HOST:PORT, the host being that of node 0."
            raise ConfigError(Explanation(what, fix=fix)) from exc
        number = int(job) * 7 + int(step) if (job + step).isdecimal() else 0
        endpoint = f"{first}:{_NODE_PORTS[number % len(_NODE_PORTS)]}"
    return NodePlace(
        nnodes=nnodes,
        min_nodes=None,
        node_rank=node,
        endpoint=endpoint,
        job=f"slurm-{job}.{step}",
        said_by="Slurm",
    )


def _torchrun_node(env: Mapping[str, str]) -> NodePlace:
    fewest, nnodes = read_nnodes("PET_NNODES", env["PET_NNODES"])
    named = [name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK") if name in env]
    node = require_int(env, named[0], because="PET_NNODES") if named else None
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
    """Return variables that keep gloo and NCCL on loopback, where no other host can reach them.

    NCCL takes prefixes: without ``=``, lo would stand for every name that begins with it.
    """
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
