"""Limits of processes and containers, which the tests really set."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import scripts
from doctor_kit import Found, examine, lines_to_copy, needs_namespaces

from ddpsafe._host import Limits, count_cores, read_limits, usable_cores

MIB: Final = 1 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")

SMALL_SHM: Final = "mount -t tmpfs -o size=16m tmpfs /dev/shm"


@needs_namespaces
def test_small_shared_memory_is_a_warning_and_the_copied_line_repairs_it() -> None:
    """64 MiB is the default of containers."""
    found = examine("LIM", host=SMALL_SHM)
    assert found.severity("DS-LIM-001") == "warning"
    assert "16 MiB free of 16 MiB" in found.of("DS-LIM-001")["fact"]
    _, line = lines_to_copy(found.of("DS-LIM-001"))
    repaired = examine("LIM", host=f"{SMALL_SHM}; {line}")
    assert repaired.severity("DS-LIM-001") == "ok"


@needs_namespaces
def test_full_shared_memory_fails() -> None:
    """Without a free byte, not even a lock can be created."""
    fill = f"{SMALL_SHM}; head -c 16m /dev/zero > /dev/shm/left-behind"
    found = examine("LIM", "PROC", host=fill)
    assert found.severity("DS-LIM-001") == "failed"
    assert "cannot be written (No space left on device)" in found.of("DS-LIM-001")["fact"]


@needs_namespaces
def test_a_launch_works_without_shared_memory() -> None:
    """Read-only, it is a warning: only workers and locks need it."""
    source = """
        import ddpsafe

        def train(ctx):
            ctx.barrier()
            return ctx.rank

        if __name__ == "__main__":
            print(ddpsafe.launch(train, nproc_per_node=2, backend="gloo").values)
    """
    host = ["unshare", "--mount", "sh", "-c"]
    with tempfile.TemporaryDirectory() as folder:
        script = scripts.write(Path(folder), "train.py", source)
        mount = "mount -t tmpfs -o ro tmpfs /dev/shm && exec "
        done = subprocess.run(
            [*host, mount + shlex.join([sys.executable, str(script)])],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "{0: 0, 1: 1}\n", done.stderr
    assert done.stderr.count("DS-LIM-001: Shared memory (/dev/shm) cannot be written") == 1


def test_few_open_files_are_a_warning_with_the_highest_possible_limit() -> None:
    """``ulimit`` cannot exceed the hard limit, so the line to copy requests that."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1000))"
    found = examine("LIM", before=limit)
    assert found.severity("DS-LIM-002") == "warning"
    assert lines_to_copy(found.of("DS-LIM-002")) == ["ulimit -n 1000"]


@needs_namespaces
def test_locked_memory_matters_only_with_an_infiniband_card() -> None:
    """A small limit on a host without such a card is normal."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))"
    card = "mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0"
    assert examine("LIM", before=limit).severity("DS-LIM-003") == "ok"
    found = examine("LIM", before=limit, host=card)
    assert "mlx5_0" in found.of("DS-LIM-003")["fact"]


@contextlib.contextmanager
def control_group(controller: str, **values: str) -> Iterator[str]:
    """Create a group of cgroup version 1, and yield Python code that moves a process into it."""
    group = CGROUPS / controller / f"ddpsafe-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        for name, value in values.items():
            (group / name.replace("__", ".")).write_text(value, encoding="ascii")
    except OSError as error:
        pytest.skip(f"needs root and control groups of version 1 ({error})")
    try:
        yield f"open('{group}/cgroup.procs', 'w').write(str(__import__('os').getpid()))"
    finally:
        group.rmdir()


def test_limit_on_processes_is_read_from_the_control_group() -> None:
    """The limit is above what the doctor needs, and below what the ranks need."""
    with control_group("pids", pids__max="40") as enter:
        found = examine("LIM", before=enter, nproc_per_node=4)
    assert found.severity("DS-LIM-004") == "warning"
    assert 30 <= found.of("DS-LIM-004")["details"]["left"] < 40


def test_limit_on_memory_is_read_from_the_control_group() -> None:
    """The container's memory counts, not the host's."""
    with control_group("memory", memory__limit_in_bytes=str(300 * MIB)) as enter:
        found = examine("LIM", before=enter, nproc_per_node=4)
    assert found.severity("DS-LIM-005") == "warning"
    assert found.of("DS-LIM-005")["details"]["limit_bytes"] == 300 * MIB


def test_quota_of_cores_is_compared_with_the_visible_cores() -> None:
    """PyTorch starts threads for the cores it sees, not for those it may use."""
    with control_group("cpu", cpu__cfs_quota_us="50000") as enter:
        found = examine("LIM", before=enter, nproc_per_node=1)
    assert found.severity("DS-LIM-006") == "warning"
    assert "quota is 0.5 cores" in found.of("DS-LIM-006")["fact"]


@pytest.mark.parametrize(
    ("share", "cores"), [(None, count_cores()), (0.5, 1), (1.9, 1), (1e6, count_cores())]
)
def test_a_quota_counts_where_ddpsafe_chooses_the_number_of_ranks(
    share: float | None, cores: int
) -> None:
    """``nproc_per_node="auto"`` starts a rank for each core that the container may keep busy."""
    limits = Limits(memory_bytes=None, memory_left_bytes=None, cores=share, processes_left=None)
    assert usable_cores(limits) == cores


def write_tree(root: Path, files: dict[str, str]) -> None:
    """Write files below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")


def test_cgroup_version_2_uses_the_tightest_limit_of_all_parents(tmp_path: Path) -> None:
    """A parent's limit applies to its children, and page cache counts as free."""
    write_tree(
        tmp_path,
        {
            "membership": "0::/job/task\n",
            "root/cgroup.controllers": "cpu memory pids\n",
            "root/job/memory.max": f"{100 * MIB}\n",
            "root/job/memory.current": f"{90 * MIB}\n",
            "root/job/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
            "root/job/pids.max": "100\n",
            "root/job/pids.current": "30\n",
            "root/job/task/memory.max": "max\n",
            "root/job/task/cpu.max": "150000 100000\n",
        },
    )
    limits = read_limits(membership=tmp_path / "membership", root=tmp_path / "root")
    assert limits == Limits(
        memory_bytes=100 * MIB, memory_left_bytes=60 * MIB, cores=1.5, processes_left=70
    )


def test_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    """If the host's path does not exist, the mounted root is the container's own group."""
    write_tree(
        tmp_path,
        {
            "membership": "0::/../../docker/0123\n",
            "root/cgroup.controllers": "memory\n",
            "root/memory.max": f"{7 * MIB}\n",
        },
    )
    limits = read_limits(membership=tmp_path / "membership", root=tmp_path / "root")
    assert limits.memory_bytes == 7 * MIB


def test_no_control_groups_mean_no_limit(tmp_path: Path) -> None:
    """A system without control groups has no limits to report."""
    assert read_limits(membership=tmp_path / "none", root=tmp_path) == Limits()


@pytest.mark.full
@needs_namespaces
def test_pid_1_of_a_container_needs_an_init() -> None:
    """Without one, orphaned processes are never reaped."""
    program = "from ddpsafe import doctor; print(doctor.run(checks={'LIM'}).to_json())"
    run = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", program],
        env={**scripts.clean_environment(), "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=True,
    )
    found = Found(json.loads(run.stdout))
    assert found.severity("DS-LIM-007") == "warning"
    assert lines_to_copy(found.of("DS-LIM-007")) == ["docker run --init …"]
