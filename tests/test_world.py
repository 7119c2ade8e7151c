"""A process learns its rank from the variables of any launcher, and never guesses from half of them.

The variables are as set by real launchers: torchrun of torch 2.13, Slurm 22.05, OpenMPI 4 and
MPICH 4.
"""

from __future__ import annotations

import contextlib
import os
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpsafe import ConfigError
from ddpsafe._world import World, expand_hosts, find_node_place, find_world, read_nnodes

Env = dict[str, str]


def variables(text: str) -> Env:
    """Return the variables of ``NAME=text NAME=text``."""
    return dict(pair.split("=", 1) for pair in text.split())


JOB: Final = variables(
    "SLURM_JOB_ID=4711 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS_PER_NODE=2 "
    "SLURM_JOB_NODELIST=n[0-1] SLURM_TASKS_PER_NODE=2(x2)"
)
"""The variables of every process of a job of Slurm, including the shell of ``salloc``."""


def step(rank: int, size: int, local: int, node: int, tasks: str, nodes: int = 2) -> Env:
    """Return the variables that ``srun`` sets in one task of a step, and those of the job."""
    return JOB | variables(
        f"SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={size} SLURM_STEP_NUM_NODES={nodes} "
        f"SLURM_STEP_TASKS_PER_NODE={tasks} SLURM_STEP_NODELIST=n[0-1] SLURM_PROCID={rank} "
        f"SLURM_LOCALID={local} SLURM_NODEID={node}"
    )


TORCHRUN: Final = variables(
    "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=True "
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "ROLE_RANK=3 MASTER_ADDR=localhost MASTER_PORT=29500"
)
"""The variables that torchrun sets in rank 3 of two nodes with two ranks each."""

ALONE: Final = step(0, 1, 0, 0, "1", nodes=1)
FIVE: Final = World(
    rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, nnodes=2, started_by="ddpsafe"
)  # fmt: skip


def in_pod(text: str) -> Env:
    """Return variables that are set in a pod of Kubernetes."""
    return variables(f"KUBERNETES_SERVICE_HOST=x {text}")


# fmt: off
RANKS: Final = {
    "torchrun": (TORCHRUN, "torchrun", (3, 4, 1, 2, 1, 2)),
    "torchrun: rank 1 of 1 + 2 + 1 ranks is the first of node 1":
        (TORCHRUN | variables("RANK=1 LOCAL_RANK=0 GROUP_RANK=1 GROUP_WORLD_SIZE=3"), "torchrun", (1, 4, 0, 2, 1, 3)),
    "torchrun inside a step of Slurm": (step(1, 2, 0, 1, "1(x2)") | TORCHRUN, "torchrun", (3, 4, 1, 2, 1, 2)),
    "by hand: all ranks share one node": (variables("RANK=1 WORLD_SIZE=2"), "environment", (1, 2, 1, 2, 0, 1)),
    "by hand: LOCAL_WORLD_SIZE places ranks node after node":
        (variables("RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4"), "environment", (5, 8, 1, 4, 1, 2)),
    "ddpsafe's own variables": (FIVE.as_env(), "environment", (5, 8, 1, 4, 1, 2)),
    "srun: a task of a step": (step(3, 4, 1, 1, "2(x2)"), "slurm", (3, 4, 1, 2, 1, 2)),
    "srun: a step smaller than its job": (ALONE, "slurm", (0, 1, 0, 1, 0, 1)),
    "srun: the first of uneven nodes": (step(1, 4, 1, 0, "2,1(x2)", 3), "slurm", (1, 4, 1, 2, 0, 3)),
    "srun: the second of uneven nodes": (step(2, 4, 0, 1, "2,1(x2)", 3), "slurm", (2, 4, 0, 1, 1, 3)),
    "srun: the third of uneven nodes": (step(3, 4, 0, 2, "2,1(x2)", 3), "slurm", (3, 4, 0, 1, 2, 3)),
    "srun --distribution=cyclic: rank 1": (step(1, 4, 0, 1, "2,2"), "slurm", (1, 4, 0, 2, 1, 2)),
    "srun --distribution=cyclic: rank 2": (step(2, 4, 1, 0, "2,2"), "slurm", (2, 4, 1, 2, 0, 2)),
    "srun --pty: not the shell": (step(1, 4, 1, 0, "4", 1) | {"SLURM_PTY_PORT": "40123"}, "slurm", (1, 4, 1, 4, 0, 1)),
    "mpirun of OpenMPI": (variables(
        "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=0"), "openmpi", (2, 4, 0, 2, 1, 2)),
    "mpiexec of MPICH and Intel MPI":
        (variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"), "mpi", (3, 4, 1, 2, 1, 2)),
    "PMI alone: all ranks are on one node": (variables("PMI_RANK=3 PMI_SIZE=4"), "mpi", (3, 4, 3, 4, 0, 1)),
    "pods with one rank each are nodes, by PET":
        (variables("PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1"), "environment", (1, 2, 0, 1, 1, 2)),
    "by PET and RANK":
        (variables("PET_NNODES=2 PET_NODE_RANK=1 RANK=1 WORLD_SIZE=2"), "environment", (1, 2, 0, 1, 1, 2)),
    "by RANK and another host's MASTER_ADDR":
        (in_pod("RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-0.svc"), "environment", (1, 2, 0, 1, 1, 2)),
    "ranks within one pod: LOCAL_RANK": (in_pod("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1"), "environment", (1, 2, 1, 2, 0, 1)),
    "ranks within one pod: a loopback name":
        (in_pod("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost"), "environment", (1, 2, 1, 2, 0, 1)),
    "ranks within one pod: a loopback address":
        (in_pod("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"), "environment", (1, 2, 1, 2, 0, 1)),
    "a single pod with one rank":
        (variables("PET_NNODES=1 PET_NPROC_PER_NODE=1 RANK=0 WORLD_SIZE=1"), "environment", (0, 1, 0, 1, 0, 1)),
    "indexed Job": (in_pod("JOB_COMPLETION_INDEX=1 WORLD_SIZE=4"), "environment", (1, 4, 0, 1, 1, 4)),
    "indexed Job with RANK":
        (in_pod("JOB_COMPLETION_INDEX=1 WORLD_SIZE=4 RANK=2"), "environment", (2, 4, 0, 1, 2, 4)),
    "indexed Job with PET":
        (in_pod("JOB_COMPLETION_INDEX=1 PET_NNODES=2 PET_NPROC_PER_NODE=1"), "environment", (1, 2, 0, 1, 1, 2)),
}
"""Variables, what started the process, and the numbers of `World`, in the order of their names there."""

NO_RANKS: Final = {
    "a shell": variables("PATH=/bin MASTER_ADDR=localhost MASTER_PORT=12355"),
    "a batch script of Slurm": JOB | variables("SLURM_PROCID=0 SLURM_LOCALID=0"),
    "the shell of salloc": JOB,
    "the shell of srun -n4 --pty bash": step(0, 4, 0, 0, "4", 1) | {"SLURM_PTY_PORT": "40123"},
    "a batch step": ALONE | {"SLURM_STEP_ID": "4294967291"},
    "an external step": ALONE | {"SLURM_STEP_ID": "4294967292"},
    "an interactive step": ALONE | {"SLURM_STEP_ID": "4294967290"},
    "a single pod of eight ranks": variables("PET_NNODES=1 PET_NPROC_PER_NODE=8 RANK=0 WORLD_SIZE=1"),
    "a single pod, auto": variables("PET_NNODES=1 PET_NPROC_PER_NODE=auto RANK=0 WORLD_SIZE=1"),
    "a single pod, gpu": variables("PET_NNODES=1 PET_NPROC_PER_NODE=gpu RANK=0 WORLD_SIZE=1"),
    "a single pod, no number": variables("PET_NNODES=1"),
    "an index alone": in_pod("JOB_COMPLETION_INDEX=1"),
    "an index and a world of one": in_pod("JOB_COMPLETION_INDEX=1 WORLD_SIZE=1"),
}
"""Variables of a process that no launcher has started, and that may launch."""

PODS: Final = {
    "Kubeflow Trainer: nodes of eight ranks": "PET_NNODES=2 PET_NPROC_PER_NODE=8",
    "PyTorchJob: RANK counts pods": "PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 RANK=1 WORLD_SIZE=2",
    "PyTorchJob: WORLD_SIZE counts ranks, RANK pods": "PET_NNODES=2 PET_NPROC_PER_NODE=8 RANK=1 WORLD_SIZE=16",
    "auto": "PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=0",
    "elastic": "PET_NNODES=1:4 PET_RDZV_ENDPOINT=job-worker-0:29400",
    "no rank": "PET_NNODES=2 PET_NPROC_PER_NODE=1",
    "contradiction": "PET_NNODES=2 PET_NODE_RANK=0 RANK=1 WORLD_SIZE=2",
    "not a number": "PET_NNODES=two PET_NODE_RANK=0",
}
"""Variables that operators set, for torchrun, in a pod that runs ``python train.py``."""

SMALL: Final = variables("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2")
REFUSED: Final = [
    (variables("RANK=1"), "WORLD_SIZE is not set, but RANK is."),
    (variables("RANK=1"), "unset RANK"),
    ({name: text for name, text in TORCHRUN.items() if name != "RANK"}, "RANK is not set, but TORCHELASTIC_RUN_ID is"),
    *((variables(f"RANK={rank} WORLD_SIZE={size}"), f"RANK is {rank}, but WORLD_SIZE is {size}")
        for rank, size in ((2, 2), (7, 2), (-1, 2), (0, 0), (0, -3))),
    (variables("JOB_COMPLETION_INDEX=4 WORLD_SIZE=4"), "RANK is 4"),
    *((SMALL | {name: text}, f"{name}=") for name in SMALL for text in ("", "one", "1.0", "0x1", "1 2", "9" * 5000)),
    *((TORCHRUN | variables(text), "What to do:") for text in (
        "LOCAL_RANK=2", "LOCAL_RANK=-1", "LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=-2", "GROUP_RANK=-1",
        "GROUP_RANK=2", "GROUP_WORLD_SIZE=0")),
    *((in_pod(text), "PET_") for text in PODS.values()),
]
"""Variables that contradict each other or are incomplete, and a part of the error."""
# fmt: on


def read(env: Env) -> World:
    """Return the world of a process that a launcher has started."""
    world = find_world(env)
    assert world is not None
    return world


def numbers(world: World) -> tuple[int, ...]:
    """Return every number of a world, in the order of their names in `World`."""
    place = (world.local_rank, world.local_world_size, world.node_rank, world.nnodes)
    return (world.rank, world.world_size, *place)


@pytest.mark.parametrize("what", RANKS)
def test_a_rank_knows_its_place(what: str) -> None:
    """Whatever has started it, and whatever an outer launcher has set as well."""
    env, started_by, expected = RANKS[what]
    assert (numbers(read(env)), read(env).started_by) == (expected, started_by)


@pytest.mark.parametrize("what", NO_RANKS)
def test_a_process_without_a_launcher_has_no_world(what: str) -> None:
    """The variables of a job, a pod or an ordinary shell do not make a rank."""
    assert find_world(NO_RANKS[what]) is None
    assert numbers(World.alone()) == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(("env", "text"), REFUSED)
def test_half_a_launcher_is_refused(env: Env, text: str) -> None:
    """The error names the variables and shows their values; a missing rank is never rank 0."""
    with pytest.raises(ConfigError) as caught:
        find_world(env)
    assert text in str(caught.value)
    assert "What to do:" in str(caught.value)


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_torchrun_in_a_pod_is_the_launcher(pod: str) -> None:
    """Its ranks are read, whatever the variables of the pod count."""
    assert numbers(read(variables(pod) | TORCHRUN)) == (3, 4, 1, 2, 1, 2)


def test_a_script_that_slurm_starts_with_a_terminal_is_a_rank(tmp_path: Path) -> None:
    """``srun -n4 --pty python train.py``: Slurm's daemon is its parent, where a shell's child has the shell."""
    env = NO_RANKS["the shell of srun -n4 --pty bash"]
    # The name of a process that starts another one: a copy of Python under the name of Slurm's daemon.
    daemon = tmp_path / "slurmstepd"
    daemon.symlink_to(sys.executable)
    ask = f"import os; from ddpsafe._world import find_world; print(find_world({env!r}).world_size)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [daemon, "-c", start]
    done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "4", done.stderr


NAMES: Final = sorted(
    {*TORCHRUN, *ALONE, *variables("NODE_RANK= OMPI_COMM_WORLD_RANK= OMPI_COMM_WORLD_SIZE=")}
    | {*variables("OMPI_COMM_WORLD_LOCAL_RANK= OMPI_COMM_WORLD_LOCAL_SIZE= PMI_RANK= PMI_SIZE=")}
    | {*variables("MPI_LOCALRANKID= MPI_LOCALNRANKS= JOB_COMPLETION_INDEX=")}
)
"""Every variable that any dialect reads, and some that none does."""

TASKS: Final = string.digits + "(x),-_ "
VALUES: Final = st.one_of(
    st.integers(-3, 9).map(str),
    st.integers().map(str),
    st.text(TASKS, max_size=8),
    st.text(texts.ENCODABLE.replace("\0", ""), max_size=6),
)


def require_sane(env: Env) -> None:
    """Assert that an environment is refused with a `ConfigError`, or read as a world in range."""
    world = None
    with contextlib.suppress(ConfigError):
        world = find_world(env)
    if world is not None:
        assert 0 <= world.rank < world.world_size
        assert 0 <= world.local_rank < world.local_world_size
        assert 0 <= world.node_rank < world.nnodes


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES)))
@example({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"})
def test_no_environment_causes_another_error(env: Env) -> None:
    """Whatever the variables contain, the result is a world in range, None, or a `ConfigError`."""
    require_sane(env)


@settings(max_examples=200)
@given(
    tasks=st.text(TASKS, max_size=12),
    rank=st.integers(0, 3),
    node=st.integers(0, 5) | st.integers(),
)
@example(tasks="two", rank=0, node=0)
@example(tasks="2(x999999999999)", rank=0, node=0)
@example(tasks="0(x2)", rank=0, node=0)
@example(tasks="2(x2)", rank=0, node=-3)
@example(tasks="2(x2)", rank=0, node=7)
def test_no_list_of_slurm_tasks_causes_another_error(tasks: str, rank: int, node: int) -> None:
    """SLURM_STEP_TASKS_PER_NODE may contain anything: no other error, and no hang."""
    require_sane(step(rank, 4, 0, node, "") | {"SLURM_STEP_TASKS_PER_NODE": tasks})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[01-03,7],m5", "n01 n02 n03 n7 m5"),
        ("gpu-[9-11]-ib", "gpu-9-ib gpu-10-ib gpu-11-ib"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("r[1,3]c[1-2].x,m[2-3]", "r1c1.x r1c2.x r3c1.x r3c2.x m2 m3"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("[1-2]", "1 2"),
        ("a,b.example.com", "a b.example.com"),
    ],
)
def test_host_lists_of_slurm_are_expanded(text: str, names: str) -> None:
    """The result is that of ``scontrol show hostnames``, but needs no Slurm."""
    assert expand_hosts(text) == names.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "n[", "n]", "n[1", "n[[1]]", "n[2-1]", "n[a-b]", "n[]", "a,,b", "n[1-999999999]"],
)
def test_an_invalid_host_list_is_refused(text: str) -> None:
    """It is refused before it is expanded to a billion hosts."""
    with pytest.raises(ValueError, match=r"host|range"):
        expand_hosts(text)
    with pytest.raises(ValueError, match="100000 hosts"):
        expand_hosts("a[1-1000]b[1-1000]c[1-1000]")


TWO_TASKS: Final = variables(
    "SLURM_JOB_ID=10 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_NODEID=0"
)
NODES: Final = {
    "srun with one task on each of two nodes": (TWO_TASKS | variables("SLURM_NODEID=1 SLURM_STEP_NODELIST=gpu[07-08]"),
        (2, None, 1, "gpu07:30070")),
    "srun with a master of the user's": (TWO_TASKS | variables("MASTER_ADDR=gpu07-ib MASTER_PORT=29512"),
        (2, None, 0, "gpu07-ib:29512")),
    "srun with an IPv6 master": (TWO_TASKS | variables("MASTER_ADDR=fd77::1 MASTER_PORT=29512"),
        (2, None, 0, "[fd77::1]:29512")),
    "a pod of PyTorchJob": (variables("PET_NNODES=4 PET_NPROC_PER_NODE=8 PET_NODE_RANK=2 RANK=2 WORLD_SIZE=4") | variables("PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456"),
        (4, None, 2, "job-master-0:23456")),
    "an elastic pod with a place in an indexed Job": (variables("PET_NNODES=2:4 JOB_COMPLETION_INDEX=3 PET_RDZV_ENDPOINT=job-0.job:29400"),
        (4, 2, 3, "job-0.job:29400")),
    "mpirun with one process per host": (variables("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=1"),
        (3, None, 1, None)),
    "no launcher": ({}, None),
    "one pod": (variables("PET_NNODES=1 PET_NPROC_PER_NODE=8"), None),
    "srun with two tasks per node": (step(1, 4, 1, 0, "2(x2)"), None),
    "mpirun with two processes per host": (variables("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        None),
}  # fmt: skip
"""Variables; the number of nodes, the fewest, the node rank and the endpoint, as far as they are known."""


@pytest.mark.parametrize("what", NODES)
def test_the_only_process_of_each_node_knows_the_nodes(what: str) -> None:
    """One of several processes per node is a rank, and on one node no other takes part."""
    env, expected = NODES[what]
    place = find_node_place(env)
    found = place and (place.nnodes, place.min_nodes, place.node_rank, place.endpoint)
    assert found == expected


@pytest.mark.parametrize("what", [*RANKS, *NODES])
def test_blanks_around_a_variable_change_nothing(what: str) -> None:
    """A YAML manifest or a quoted ``$(cat file)`` may add a newline, which torchrun ignores, too."""
    env: Env = (RANKS | NODES)[what][0]
    padded = {name: f" {text}\n" for name, text in env.items()}
    for find in (find_world, find_node_place):
        assert _answer(find, padded) == _answer(find, env)


def _answer(find: Callable[[Env], object], env: Env) -> object:
    """Return the result of `find`, or its error."""
    try:
        return find(env)
    except ConfigError as error:
        return type(error), error.explanation


@pytest.mark.parametrize(
    ("text", "found"),
    [("2", (2, 2)), (" 2\n", (2, 2)), ("2:4", (2, 4)), ("2 : 4\n", (2, 4))]
    + [(text, None) for text in ("", "0", "4:2", "2:", ":4", "2:4:6", "two", "-1", "9" * 5000)],
    ids=lambda text: text[:9] if isinstance(text, str) else None,
)
def test_a_number_of_nodes_is_read_as_torchrun_does(
    text: str, found: tuple[int, int] | None
) -> None:
    """It is one number, or a minimum and a maximum; anything else is a `ConfigError`."""
    if found is not None:
        assert read_nnodes("PET_NNODES", text) == found
        return
    with pytest.raises(ConfigError, match="is not a number of nodes"):
        read_nnodes("PET_NNODES", text)


IN_TURNS: Final = [(0, 2), (1, 3), (0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("hosts", "node_ranks", "known"),
    [
        pytest.param("abab", [0, 1, 0, 1], IN_TURNS, id="in turns"),
        pytest.param("abab", [0, 0, 1, 1], IN_TURNS, id="node ranks guessed"),
        pytest.param("aaaa", [0, 1, 0, 1], IN_TURNS, id="one host name"),
        pytest.param("aaaa", [0, 0, 0, 1], [(), (), (), ()], id="contradiction"),
    ],
)
def test_ranks_of_a_node_are_known_once_all_have_told(
    hosts: str, node_ranks: list[int], known: list[tuple[int, ...]]
) -> None:
    """A launcher may number ranks in turns, and give no node ranks."""
    for rank, ranks in enumerate(known):
        place = World(
            rank=rank, world_size=4, local_rank=0, local_world_size=2, node_rank=node_ranks[rank],
            nnodes=2, started_by="openmpi",
        )  # fmt: skip
        assert place.among(hosts, node_ranks).known_ranks_of_node == ranks
