"""Limits, processes and paths of one host, which the tests really set."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from doctor_kit import Found, examine, lines_to_copy, needs_namespaces
from source_tree import PACKAGE

from ddpsafe import LaunchConfig, doctor
from ddpsafe._clock import Deadline
from ddpsafe._host import Limits, count_cores, read_limits, usable_cores
from ddpsafe.doctor import Finding
from ddpsafe.doctor._examine import run_check
from ddpsafe.doctor._findings import ok
from ddpsafe.doctor._subject import Subject

MIB: Final = 1 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")

SMALL_SHM: Final = "mount -t tmpfs -o size=16m tmpfs /dev/shm"

SOFT_NFS: Final = """
import pathlib, psutil
root = pathlib.Path("FOLDER/proc")
(root / "self").mkdir(parents=True)
(root / "filesystems").write_text("nodev nfs4\\n")
(root / "self" / "mounts").write_text("server:/data FOLDER/data nfs4 rw,soft,timeo=50 0 0\\n")
psutil.PROCFS_PATH = str(root)
"""
"""A table of mounts that names a server, since no server runs here."""

NOHUP: Final = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
SSH: Final = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}
# fmt: off
FINDINGS: Final[dict[str, tuple[str, dict[str, Any], str, str, str, list[str]]]] = {
    # an area, how the doctor runs, the code, its severity, a part of its text, and the lines to copy
    "full shared memory": ("LIM", {"host": f"{SMALL_SHM}; head -c 16m /dev/zero > /dev/shm/left-behind"},
        "DS-LIM-001", "failed", "cannot be written (No space left on device)", []),
    # not more than the hard limit, which ``ulimit`` cannot exceed
    "few open files": ("LIM", {"before": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1000))"},
        "DS-LIM-002", "warning", "", ["ulimit -n 1000"]),
    # of Python that is embedded in another program
    "a missing interpreter": ("PROC", {"before": "import multiprocessing as m; m.set_executable('/nowhere/python')"},
        "DS-PROC-001", "failed", "/nowhere/python cannot be started", []),
    # nohup does not keep torchrun alive; tmux does
    "a session of ssh": ("PROC", {"before": NOHUP, "env": SSH}, "DS-PROC-002", "warning", "",
        ["tmux new -s train", "setsid -f YOUR COMMAND > train.log 2>&1"]),
    "a session of ssh in tmux": ("PROC", {"before": NOHUP, "env": {**SSH, "TMUX": "/tmp/tmux-0/default,1,0"}},
        "DS-PROC-002", "ok", "", []),
    "data on a soft network mount": ("PATH", {"host": "mkdir FOLDER/data; mount -t tmpfs tmpfs FOLDER/data",
        "before": SOFT_NFS, "data_paths": {"train": "FOLDER/data"}},
        "DS-PATH-002", "warning", "mounted `soft`", ["mount -o remount,hard FOLDER/data"]),
    # only such a mount stops root from writing
    "a read-only run directory": ("PATH", {"host": "mkdir FOLDER/runs; mount -t tmpfs -o ro tmpfs FOLDER/runs",
        "run_dir": "FOLDER/runs/7/a"}, "DS-PATH-003", "failed", "FOLDER/runs cannot be written (Read-only file system)", []),
    "a small run directory": ("PATH", {"host": "mount -t tmpfs -o size=64m tmpfs FOLDER", "run_dir": "FOLDER"},
        "DS-PATH-004", "warning", "", []),
    "a full run directory": ("PATH", {"host": "mount -t tmpfs -o size=2m tmpfs FOLDER", "run_dir": "FOLDER"},
        "DS-PATH-004", "failed", "", []),
    "a run directory for few files": ("PATH", {"host": "mount -t tmpfs -o nr_inodes=50 tmpfs FOLDER", "run_dir": "FOLDER"},
        "DS-PATH-004", "warning", "room for only", []),
    # Python silently uses another one
    "a missing temporary directory": ("PATH", {"env": {"TMPDIR": "FOLDER/gone"}},
        "DS-PATH-006", "warning", "does not exist; files go to", ["mkdir -p FOLDER/gone", "unset TMPDIR"]),
}
# fmt: on


def in_folder(value: Any, folder: Path) -> Any:
    """Return a value of a row with the folder of the test in its texts."""
    if isinstance(value, dict):
        return {name: in_folder(each, folder) for name, each in value.items()}
    return value.replace("FOLDER", str(folder))


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=needs_namespaces if "host" in row[1] else ())
        for what, row in FINDINGS.items()
    ],
)
def test_a_host_has_a_finding(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its severity, text and lines to copy are those of what is wrong, or of what is well after all."""
    monkeypatch.delenv("TMUX", raising=False)
    area, options, code, severity, says, lines = FINDINGS[what]
    found = examine(area, **in_folder(options, tmp_path))
    assert found.severity(code) == severity
    assert in_folder(says, tmp_path) in found.of(code)["fact"]
    assert [in_folder(line, tmp_path) for line in lines] in ([], lines_to_copy(found.of(code)))


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


# Processes, the terminal, the clock, and checks that fail or hang.


def test_clock_before_the_installation_is_a_warning(tmp_path: Path) -> None:
    """A package from the future shows that the clock is behind."""
    shutil.copytree(PACKAGE, tmp_path / "ddpsafe", ignore=shutil.ignore_patterns("__pycache__"))
    late = tmp_path / "ddpsafe" / "doctor" / "_checks" / "processes.py"
    os.utime(late, (4e9, 4e9))
    program = scripts.write(
        tmp_path,
        "script.py",
        """
        from ddpsafe import doctor
        report = doctor.run(checks={"PROC"})
        print(*(f"{each.code} {each.fact}" for each in report.warnings), sep="\\n")
        """,
    )
    (line,) = scripts.Script([str(program)], folder=tmp_path, fresh=True).end().lines()
    assert line.startswith("DS-PROC-003 The clock shows 20")


def test_check_that_raises_is_a_finding() -> None:
    """A system that behaves unexpectedly costs one check, not the report."""
    broken = "import psutil; psutil.PROCFS_PATH = '/nowhere'"
    found = examine("NET", "LIM", before=broken)
    assert found.severity("DS-PROC-004") == "warning"
    found.of("DS-LIM-002")  # whatever the limits of this user are


def test_check_that_hangs_ends_at_its_deadline() -> None:
    """A hanging file system delays nothing else."""
    over = threading.Event()

    def check_forever(subject: Subject, /) -> Iterator[Finding]:
        del subject
        yield ok("DS-LIM-002", "This came before.")
        over.wait(scripts.LIMIT_S)

    subject = Subject(
        config=LaunchConfig(),
        env={},
        nproc=1,
        at_launch=False,
        deadline=Deadline.after(timedelta(seconds=0.1)),
    )
    try:
        before, found = run_check(check_forever, subject, limit=None)
    finally:
        over.set()
    assert (before.severity, found.code) == ("ok", "DS-PROC-004")
    assert "'check_forever' has not returned after" in found.fact


# Data paths, the run directory and the temporary directory.


def test_missing_data_path_fails_with_the_part_that_exists(tmp_path: Path) -> None:
    """The finding names the path and how far it exists."""
    missing = tmp_path / "data" / "train"
    report = doctor.run(checks={"PATH"}, data_paths={"train": missing, "valid": tmp_path})
    (found,) = report.failed
    assert found.code == "DS-PATH-001"
    assert found.fact == f"Data path 'train' is not ready: {missing} does not exist."
    assert str(tmp_path) in found.cause
    kinds = [each.severity for each in report.findings if each.code == "DS-PATH-001"]
    assert kinds == ["failed", "ok"]


def test_run_directory_below_a_file_fails(tmp_path: Path) -> None:
    """A path through a file cannot be created; one with a blank can be copied."""
    file = tmp_path / "a file"
    file.write_text("", encoding="utf-8")
    (finding,) = doctor.run(checks={"PATH"}, run_dir=file / "run").failed
    assert finding.code == "DS-PATH-003"
    assert f"namei -l '{file}'; findmnt -T '{file}'" in finding.fix


def test_slow_run_directory_is_a_warning_within_seconds(tmp_path: Path) -> None:
    """The check does not wait for a disk that takes 0.5 s for every MiB."""
    slow = "import os, time; real = os.fsync; os.fsync = lambda fd: (time.sleep(0.5), real(fd))"
    found = examine("PATH", before=slow, run_dir=str(tmp_path))
    assert found.severity("DS-PATH-005") == "warning"
    assert found.report["took_s"] < 8


def test_temporary_directory_too_long_for_sockets_breaks_the_forkserver(tmp_path: Path) -> None:
    """The forkserver listens on a socket there, before Python 3.14; spawn does not."""
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    env = {"TMPDIR": str(deep)}
    start = "from multiprocessing import forkserver; forkserver.ensure_running()"
    started = subprocess.run(
        [sys.executable, "-c", start], env={**os.environ, **env}, check=False, capture_output=True
    )
    starts = started.returncode == 0
    assert examine("PATH", env=env).severity("DS-PATH-006") == ("ok" if starts else "warning")
    forkserver = examine("PATH", env=env, start_method="forkserver")
    assert forkserver.severity("DS-PATH-006") == ("ok" if starts else "failed")
