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
from typing import TYPE_CHECKING, Final

import pytest
import texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpsafe import ConfigError
from ddpsafe._world import (
    World,
    expand_hosts,
    find_node_place,
    find_world,
    read_nnodes,
    require_int,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLURM_JOB: Final = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
"""The variables of every process of a job, including the shell of ``salloc``."""


def slurm_step(
    *, rank: int, world_size: int, local_rank: int, node: int, tasks: str, nodes: int = 2
) -> dict[str, str]:
    """Return the variables that ``srun`` sets in one task of a step, and those of the job."""
    return {
        **SLURM_JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": "n[0-1]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
    }


def torchrun(**changes: str) -> dict[str, str]:
    """Return the variables that torchrun sets in rank 3 of two nodes with two ranks each."""
    env = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    return env | changes


def require_world(env: dict[str, str]) -> World:
    """Return the world of a process that a launcher has started."""
    world = find_world(env)
    assert world is not None
    return world


def places(world: World) -> tuple[int, int, int, int, int, int]:
    """Return every number of a world, in the order of their names in `World`."""
    return (
        world.rank,
        world.world_size,
        world.local_rank,
        world.local_world_size,
        world.node_rank,
        world.nnodes,
    )


def test_a_process_without_a_launcher_has_no_world() -> None:
    """The variables of an ordinary shell do not make a rank, nor does MASTER_PORT alone."""
    assert find_world({"PATH": "/bin", "MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}) is None
    assert places(World.alone()) == (0, 1, 0, 1, 0, 1)


def test_rank_of_torchrun_knows_its_place_on_its_node() -> None:
    """Rank 3 of 2 nodes with 2 ranks each is local rank 1 of node 1."""
    world = require_world(torchrun())
    assert world.started_by == "torchrun"
    assert places(world) == (3, 4, 1, 2, 1, 2)


def test_nodes_of_torchrun_may_have_different_numbers_of_ranks() -> None:
    """Rank 1 of 1 + 2 + 1 ranks is the first of node 1, and there are 3 nodes."""
    env = torchrun(RANK="1", LOCAL_RANK="0", GROUP_RANK="1", GROUP_WORLD_SIZE="3")
    assert places(require_world(env)) == (1, 4, 0, 2, 1, 3)


def test_torchrun_inside_a_slurm_step_is_the_launcher() -> None:
    """``srun -N2 --ntasks-per-node=1 torchrun …``: the ranks are torchrun's, not Slurm's tasks."""
    task = slurm_step(rank=1, world_size=2, local_rank=0, node=1, tasks="1(x2)")
    world = require_world(task | torchrun())
    assert world.started_by == "torchrun"
    assert (world.rank, world.world_size) == (3, 4)


def test_hand_written_variables_are_enough() -> None:
    """RANK and WORLD_SIZE make a rank; without more, all ranks are taken to share one node."""
    world = require_world({"RANK": "1", "WORLD_SIZE": "2"})
    assert world.started_by == "environment"
    assert places(world) == (1, 2, 1, 2, 0, 1)


def test_hand_written_variables_may_span_nodes() -> None:
    """LOCAL_WORLD_SIZE determines how ranks are placed, node after node."""
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert places(require_world(env)) == (5, 8, 1, 4, 1, 2)


def test_ddpsafes_own_variables_describe_the_same_world() -> None:
    """The variables that a launch exports are read back as the same world."""
    world = World(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        nnodes=2,
        started_by="ddpsafe",
    )
    assert places(require_world(world.as_env())) == places(world)


def test_task_of_a_slurm_step_is_a_rank() -> None:
    """``srun -N2 --ntasks-per-node=2``: task 3 is local rank 1 of node 1."""
    world = require_world(slurm_step(rank=3, world_size=4, local_rank=1, node=1, tasks="2(x2)"))
    assert world.started_by == "slurm"
    assert places(world) == (3, 4, 1, 2, 1, 2)


def test_slurm_step_may_be_smaller_than_its_job() -> None:
    """``srun -n1`` in a job of four tasks is one rank: the step's numbers apply, not the job's."""
    world = require_world(
        slurm_step(rank=0, world_size=1, local_rank=0, node=0, tasks="1", nodes=1)
    )
    assert places(world) == (0, 1, 0, 1, 0, 1)


def test_slurm_batch_script_without_srun_is_alone() -> None:
    """SLURM_PROCID=0 and SLURM_NTASKS=4 in a batch script are one process, not rank 0 of 4."""
    assert find_world(SLURM_JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) is None


def test_salloc_shell_is_alone() -> None:
    """The shell of an allocation sees the job's numbers and is not a rank."""
    assert find_world(SLURM_JOB) is None


def test_shell_of_an_interactive_slurm_step_is_alone(tmp_path: Path) -> None:
    """``srun -n4 --pty bash``: its tasks 1 to 3 run nothing. A script that Slurm starts itself is a rank."""
    env = slurm_step(rank=0, world_size=4, local_rank=0, node=0, tasks="4", nodes=1)
    env |= {"SLURM_PTY_PORT": "40123"}
    assert find_world(env) is None
    assert require_world(env | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).rank == 1
    # The name of a process that starts another one: a copy of Python under the name of Slurm's daemon.
    daemon = tmp_path / "slurmstepd"
    daemon.symlink_to(sys.executable)
    ask = f"import os; from ddpsafe._world import find_world; print(find_world({env!r}).world_size)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [daemon, "-c", start],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "4", done.stderr


@pytest.mark.parametrize("step", ["4294967291", "4294967292", "4294967290"])
def test_slurm_step_of_a_shell_is_alone(step: str) -> None:
    """The steps that Slurm opens for batch scripts and interactive shells are not ranks."""
    env = slurm_step(rank=0, world_size=1, local_rank=0, node=0, tasks="1", nodes=1)
    assert find_world(env | {"SLURM_STEP_ID": step}) is None


@pytest.mark.parametrize(
    ("node", "here"), [(0, 2), (1, 1), (2, 1)], ids=["first", "second", "third"]
)
def test_slurm_nodes_may_have_different_numbers_of_tasks(node: int, here: int) -> None:
    """``2,1(x2)`` is two tasks on the first node and one on each of the two others."""
    rank = {0: 1, 1: 2, 2: 3}[node]
    local_rank = 1 if node == 0 else 0
    env = slurm_step(
        rank=rank, world_size=4, local_rank=local_rank, node=node, tasks="2,1(x2)", nodes=3
    )
    world = require_world(env)
    assert (world.local_world_size, world.node_rank, world.local_rank) == (here, node, local_rank)


@pytest.mark.parametrize("node", [0, 1, 2])
def test_every_slurm_node_counts_the_same_nodes(node: int) -> None:
    """All ranks of a job with uneven nodes agree on nnodes."""
    rank = {0: 0, 1: 2, 2: 3}[node]
    env = slurm_step(rank=rank, world_size=4, local_rank=0, node=node, tasks="2,1(x2)", nodes=3)
    assert require_world(env).nnodes == 3


def test_cyclic_slurm_ranks_are_on_the_node_that_slurm_reports() -> None:
    """``--distribution=cyclic`` puts ranks 0 and 2 on node 0: rank // tasks-per-node is wrong."""
    worlds = [
        require_world(slurm_step(rank=rank, world_size=4, local_rank=local, node=node, tasks="2,2"))
        for rank, local, node in [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    ]
    assert [world.node_rank for world in worlds] == [0, 1, 0, 1]
    assert [world.local_rank for world in worlds] == [0, 0, 1, 1]
    assert {world.nnodes for world in worlds} == {2}


def test_rank_of_openmpi_knows_its_place_on_its_node() -> None:
    """``mpirun`` of OpenMPI sets rank and local rank in OMPI_COMM_WORLD_*."""
    world = require_world(
        {
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_NODE_RANK": "0",
        }
    )
    assert world.started_by == "openmpi"
    assert places(world) == (2, 4, 0, 2, 1, 2)


def test_rank_of_mpich_knows_its_place_on_its_node() -> None:
    """``mpiexec`` of MPICH and Intel MPI sets them in PMI_* and MPI_LOCAL*."""
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    world = require_world(env)
    assert world.started_by == "mpi"
    assert places(world) == (3, 4, 1, 2, 1, 2)


def test_ranks_of_pmi_alone_are_assumed_to_share_one_node() -> None:
    """Without MPI_LOCAL*, all ranks are on one node."""
    assert places(require_world({"PMI_RANK": "3", "PMI_SIZE": "4"})) == (3, 4, 3, 4, 0, 1)


def test_rank_without_world_size_is_refused() -> None:
    """RANK alone is half a launcher: an error that names both variables, never rank 0 of 1."""
    with pytest.raises(ConfigError) as caught:
        find_world({"RANK": "1"})
    text = str(caught.value)
    assert "WORLD_SIZE is not set, but RANK is." in text
    assert "unset RANK" in text


def test_torchrun_without_rank_is_refused() -> None:
    """A missing RANK is an error, never rank 0."""
    env = torchrun()
    del env["RANK"]
    with pytest.raises(ConfigError, match="RANK is not set, but TORCHELASTIC_RUN_ID is"):
        find_world(env)


@pytest.mark.parametrize(
    ("rank", "world_size"), [("2", "2"), ("7", "2"), ("-1", "2"), ("0", "0"), ("0", "-3")]
)
def test_rank_outside_of_the_world_is_refused(rank: str, world_size: str) -> None:
    """0 <= RANK < WORLD_SIZE, and the message shows both numbers."""
    with pytest.raises(ConfigError) as caught:
        find_world({"RANK": rank, "WORLD_SIZE": world_size})
    text = str(caught.value)
    assert f"RANK is {rank}, but WORLD_SIZE is {world_size}" in text
    assert "What to do:" in text


@pytest.mark.parametrize("text", ["", "one", "1.0", "0x1", "1 2", "9" * 5000])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_not_a_number_is_refused_by_its_name(name: str, text: str) -> None:
    """Every variable must be a whole number; the message names the variable and shows the value."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", name: text}
    with pytest.raises(ConfigError) as caught:
        find_world(env)
    assert f"{name}=" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"LOCAL_RANK": "2"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "-2"},
        {"GROUP_RANK": "-1"},
        {"GROUP_RANK": "2"},
        {"GROUP_WORLD_SIZE": "0"},
    ],
    ids=str,
)
def test_place_outside_of_the_node_is_refused(changes: dict[str, str]) -> None:
    """A local rank beyond its node, a node of no ranks and a node below 0 are contradictions."""
    with pytest.raises(ConfigError, match="What to do:"):
        find_world(torchrun(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "two"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999999)"},
        {"SLURM_STEP_TASKS_PER_NODE": "0(x2)"},
        {"SLURM_NODEID": "-3"},
        {"SLURM_NODEID": "here"},
        {"SLURM_NODEID": "7"},
    ],
    ids=str,
)
def test_broken_slurm_variable_is_refused_or_read(changes: dict[str, str]) -> None:
    """A damaged step is a `ConfigError` or a world in range: no other error, and no hang."""
    env = slurm_step(rank=0, world_size=4, local_rank=0, node=0, tasks="2(x2)") | changes
    require_sane(env)


def test_require_int_names_both_variables() -> None:
    """The message says which variable is missing and which one makes it necessary."""
    with pytest.raises(ConfigError, match="WORLD_SIZE is not set, but RANK is"):
        require_int({}, "WORLD_SIZE", because="RANK")
    assert require_int({"WORLD_SIZE": " 3 "}, "WORLD_SIZE", because="RANK") == 3


NAMES: Final = sorted(
    {
        *torchrun(),
        *slurm_step(rank=0, world_size=1, local_rank=0, node=0, tasks="1"),
        *("NODE_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }
)
"""Every variable that any dialect reads, and some that none does."""

TASKS: Final = string.digits + "(x),-_ "
VALUES: Final = st.one_of(
    st.integers(-3, 9).map(str),
    st.integers().map(str),
    st.text(TASKS, max_size=8),
    st.text(texts.ENCODABLE.replace("\0", ""), max_size=6),
)


def require_sane(env: dict[str, str]) -> None:
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
def test_no_environment_causes_another_error(env: dict[str, str]) -> None:
    """Whatever the variables contain, the result is a world in range, None, or a `ConfigError`."""
    require_sane(env)


@settings(max_examples=200)
@given(
    node=st.integers(0, 5) | st.integers(),
    tasks=st.text(TASKS, max_size=12),
    rank=st.integers(0, 3),
)
def test_no_list_of_slurm_tasks_causes_another_error(node: int, tasks: str, rank: int) -> None:
    """SLURM_STEP_TASKS_PER_NODE may contain anything."""
    require_sane(slurm_step(rank=rank, world_size=4, local_rank=0, node=node, tasks=tasks))


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


def test_the_number_of_hosts_in_brackets_is_limited() -> None:
    """Three brackets of a thousand each are a billion hosts."""
    with pytest.raises(ValueError, match="100000 hosts"):
        expand_hosts("a[1-1000]b[1-1000]c[1-1000]")


PODS: Final = {
    "Kubeflow Trainer: nodes of eight ranks": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"},
    "PyTorchJob: RANK counts pods": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "RANK": "1",
        "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
    },
    "PyTorchJob: WORLD_SIZE counts ranks, RANK pods": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "RANK": "1", "WORLD_SIZE": "16",
    },
    "auto": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"},
    "elastic": {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:29400"},
    "no rank": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"},
    "contradiction": {"PET_NNODES": "2", "PET_NODE_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"},
    "not a number": {"PET_NNODES": "two", "PET_NODE_RANK": "0"},
}  # fmt: skip
"""Variables that operators set, for torchrun, in a pod that runs ``python train.py``."""


@pytest.mark.parametrize("pod", PODS)
def test_variables_of_a_node_are_not_read_as_those_of_a_rank(pod: str) -> None:
    """The pod is neither rank 1 of 2 on one host nor a world of one."""
    with pytest.raises(ConfigError, match="PET_"):
        find_world(PODS[pod] | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert places(require_world(PODS[pod] | torchrun())) == (3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize(
    "env",
    [
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"},
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "job-0.svc",
            "KUBERNETES_SERVICE_HOST": "x",
        },
    ],
)
def test_pods_with_one_rank_each_are_nodes(env: dict[str, str]) -> None:
    """Rank 1 of 2 pods is local rank 0 of node 1: the first GPU of its own host."""
    assert places(require_world(env)) == (1, 2, 0, 1, 1, 2)


def test_ranks_within_one_pod_share_a_host() -> None:
    """LOCAL_RANK, or a loopback MASTER_ADDR, distinguishes them from pods."""
    pod = {"KUBERNETES_SERVICE_HOST": "x", "RANK": "1", "WORLD_SIZE": "2"}
    for told in ({"LOCAL_RANK": "1"}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"}):
        assert places(require_world(pod | told)) == (1, 2, 1, 2, 0, 1)


@pytest.mark.parametrize("nproc", ["8", "auto", "gpu"])
def test_a_single_pod_may_launch_its_ranks(nproc: str) -> None:
    """On one node with several ranks, `launch` starts them, whatever RANK counts."""
    pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": nproc, "RANK": "0", "WORLD_SIZE": "1"}
    assert find_world(pod) is None
    assert find_world({"PET_NNODES": "1"}) is None
    assert places(require_world(pod | {"PET_NPROC_PER_NODE": "1"})) == (0, 1, 0, 1, 0, 1)


NODES: Final = [
    # source, variables, nodes, fewest nodes, node rank, endpoint
    (
        "srun with one task on each of two nodes",
        {
            "SLURM_JOB_ID": "10",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NODEID": "1",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
        },
        (2, None, 1, "gpu07:30070"),
    ),
    (
        "srun with a master of the user's",
        {
            "SLURM_JOB_ID": "10",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NODEID": "0",
            "MASTER_ADDR": "gpu07-ib",
            "MASTER_PORT": "29512",
        },
        (2, None, 0, "gpu07-ib:29512"),
    ),
    (
        "srun with an IPv6 master",
        {
            "SLURM_JOB_ID": "10",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NODEID": "0",
            "MASTER_ADDR": "fd77::1",
            "MASTER_PORT": "29512",
        },
        (2, None, 0, "[fd77::1]:29512"),
    ),
    (
        "a pod of PyTorchJob",
        {
            "PET_NNODES": "4",
            "PET_NPROC_PER_NODE": "8",
            "PET_NODE_RANK": "2",
            "PET_MASTER_ADDR": "job-master-0",
            "PET_MASTER_PORT": "23456",
            "RANK": "2",
            "WORLD_SIZE": "4",
        },
        (4, None, 2, "job-master-0:23456"),
    ),
    (
        "an elastic pod with a place in an indexed Job",
        {
            "PET_NNODES": "2:4",
            "JOB_COMPLETION_INDEX": "3",
            "PET_RDZV_ENDPOINT": "job-0.job:29400",
        },
        (4, 2, 3, "job-0.job:29400"),
    ),
    (
        "mpirun with one process per host",
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        },
        (3, None, 1, None),
    ),
]


@pytest.mark.parametrize(("env", "expected"), [row[1:] for row in NODES], ids=[r[0] for r in NODES])
def test_the_only_process_of_each_node_knows_the_nodes(
    env: dict[str, str], expected: tuple[int, int | None, int, str | None]
) -> None:
    """It knows their number, its own, and the endpoint, as far as the variables contain them."""
    place = find_node_place(env)
    assert place is not None
    assert (place.nnodes, place.min_nodes, place.node_rank, place.endpoint) == expected


@pytest.mark.parametrize(
    "env",
    [
        *(env for _, env, _ in NODES),
        torchrun(),
        slurm_step(rank=1, world_size=4, local_rank=1, node=0, tasks="2(x2)"),
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"},
        {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
    ],
)
def test_blanks_around_a_variable_change_nothing(env: dict[str, str]) -> None:
    """A YAML manifest or a quoted ``$(cat file)`` may add a newline, which torchrun ignores, too."""
    padded = {name: f" {text}\n" for name, text in env.items()}
    for find in (find_world, find_node_place):
        assert _answer(find, padded) == _answer(find, env)


def _answer(find: Callable[[dict[str, str]], object], env: dict[str, str]) -> object:
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


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
        slurm_step(rank=1, world_size=4, local_rank=1, node=0, tasks="2(x2)"),
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
    ],
)
def test_one_node_or_several_processes_per_node_give_no_node_rank(env: dict[str, str]) -> None:
    """Each process is then a rank, or no other node takes part."""
    assert find_node_place(env) is None


def test_an_indexed_job_of_kubernetes_gives_its_pods_node_ranks() -> None:
    """It also needs WORLD_SIZE, or PET_NNODES with one rank each; an index alone is not enough."""
    index = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert places(require_world(index | {"WORLD_SIZE": "4"})) == (1, 4, 0, 1, 1, 4)
    assert places(require_world(index | {"WORLD_SIZE": "4", "RANK": "2"})) == (2, 4, 0, 1, 2, 4)
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    assert places(require_world(index | pods)) == (1, 2, 0, 1, 1, 2)
    assert find_world(index) is None
    assert find_world(index | {"WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match="RANK is 4"):
        find_world({"JOB_COMPLETION_INDEX": "4", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("hosts", "node_ranks", "known"),
    [
        pytest.param("abab", [0, 1, 0, 1], [(0, 2), (1, 3), (0, 2), (1, 3)], id="in turns"),
        pytest.param(
            "abab", [0, 0, 1, 1], [(0, 2), (1, 3), (0, 2), (1, 3)], id="node ranks guessed"
        ),
        pytest.param("aaaa", [0, 1, 0, 1], [(0, 2), (1, 3), (0, 2), (1, 3)], id="one host name"),
        pytest.param("aaaa", [0, 0, 0, 1], [(), (), (), ()], id="contradiction"),
    ],
)
def test_ranks_of_a_node_are_known_once_all_have_told(
    hosts: str, node_ranks: list[int], known: list[tuple[int, ...]]
) -> None:
    """A launcher may number ranks in turns, and give no node ranks."""
    for rank, ranks in enumerate(known):
        place = World(
            rank=rank,
            world_size=4,
            local_rank=0,
            local_world_size=2,
            node_rank=node_ranks[rank],
            nnodes=2,
            started_by="openmpi",
        )
        assert place.among(hosts, node_ranks).known_ranks_of_node == ranks
