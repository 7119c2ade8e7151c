"""Several attempts on several nodes: one decision for all nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
import scripts
from forked_ranks import free_port
from nodes_kit import Case, run_job

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network

pytestmark = pytest.mark.root

RETRY: Final[dict[str, Any]] = {
    "attempts": 12,
    "on": ["killed", "ValueError"],
    "backoff_initial": 0,
    "jitter": 0,
    "no_progress": None,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "culprit", "start_method", "good"),
    [
        pytest.param("kill", 0, "forkserver", 11, marks=pytest.mark.soak),
        pytest.param("kill", 1, "forkserver", 11, marks=pytest.mark.soak),
        ("raise", 1, "forkserver", 11),
        pytest.param("kill", 1, "spawn", 4, marks=pytest.mark.soak),
        pytest.param("raise", 0, "spawn", 4, marks=pytest.mark.soak),
    ],
)
def test_ten_failed_attempts_are_followed_by_a_successful_one(
    network: Network, tmp_path: Path, what: str, culprit: int, start_method: str, good: int
) -> None:
    """With gloo, whichever node's rank is killed or raises; all ranks know the number of the attempt."""
    fields = {"retry": RETRY, "start_method": start_method}
    case = Case(name="kills", what=f"{what}-until-{good}", rank=culprit, fields=fields)
    nodes = run_job(network, [case], tmp_path, nproc=(1, 1))
    for node, results in enumerate(nodes):
        assert results["kills"]["values"] == {str(node): node}
        assert results["kills"]["attempts"] == good
    assert len(list(tmp_path.glob("fault-kills-*"))) == good


@pytest.mark.full
def test_an_exception_of_a_retried_type_is_retried_from_any_node(
    network: Network, tmp_path: Path
) -> None:
    """Its type is checked where it was raised, because the exception does not travel."""
    case = Case(name="raises", what="raise-until-2", rank=1, fields={"retry": RETRY})
    nodes = run_job(network, [case], tmp_path, nproc=(1, 1))
    assert [results["raises"]["attempts"] for results in nodes] == [2, 2]


HANDLE: Final = """
import socket, sys, time
from pathlib import Path
import ddpsafe

def wait_for(index, path):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    while not Path(path).exists():
        time.sleep(0.02)
    dist.barrier()

if __name__ == "__main__":
    path, port = sys.argv[1:]
    endpoint = f"{socket.gethostname()}:{port}"
    handle = ddpsafe.spawn(
        wait_for, args=(path,), join=False, nnodes=2, rendezvous={"endpoint": endpoint, "id": "one host"}
    )
    print(len(handle.pids()), len(handle.processes))
    Path(path).touch()
    while not handle.join():
        pass
"""


@pytest.mark.full
def test_spawn_without_join_returns_once_the_ranks_have_started(tmp_path: Path) -> None:
    """Two launchers on one host stand for two nodes; their ranks end once a launcher has its handle."""
    (tmp_path / "script.py").write_text(HANDLE)
    command = [sys.executable, "script.py", str(tmp_path / "go on"), str(free_port())]
    environment = {**os.environ, "DDPSAFE_JOB_SECRET": "0123456789abcdef"}
    launchers = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [launcher.communicate(timeout=scripts.LIMIT_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert printed == ["1 1\n", "1 1\n"]
