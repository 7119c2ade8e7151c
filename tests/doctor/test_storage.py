"""Data paths, the run directory and the temporary directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from doctor_kit import examine, lines_to_copy, needs_namespaces

from ddpsafe import doctor


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


SOFT_NFS: Final = """
import pathlib, psutil
root = pathlib.Path({root!r})
(root / "self").mkdir(parents=True)
(root / "filesystems").write_text("nodev nfs4\\n")
(root / "self" / "mounts").write_text("server:/data {place} nfs4 rw,soft,timeo=50 0 0\\n")
psutil.PROCFS_PATH = str(root)
"""


@needs_namespaces
def test_data_path_on_a_soft_network_mount_is_a_warning(tmp_path: Path) -> None:
    """A real mount in a table that names a server, since no server runs here."""
    place = tmp_path / "data"
    place.mkdir()
    found = examine(
        "PATH",
        host=f"mount -t tmpfs tmpfs {place}",
        before=SOFT_NFS.format(root=str(tmp_path / "proc"), place=place),
        data_paths={"train": str(place)},
    )
    assert found.severity("DS-PATH-002") == "warning"
    assert "mounted `soft`" in found.of("DS-PATH-002")["fact"]
    assert lines_to_copy(found.of("DS-PATH-002")) == [f"mount -o remount,hard {place}"]


@needs_namespaces
def test_run_directory_on_a_read_only_mount_fails(tmp_path: Path) -> None:
    """Only such a mount stops root from writing."""
    place = tmp_path / "runs"
    place.mkdir()
    found = examine(
        "PATH", host=f"mount -t tmpfs -o ro tmpfs {place}", run_dir=str(place / "7" / "a")
    )
    assert found.severity("DS-PATH-003") == "failed"
    assert f"{place} cannot be written (Read-only file system)" in found.of("DS-PATH-003")["fact"]


def test_run_directory_below_a_file_fails(tmp_path: Path) -> None:
    """A path through a file cannot be created; one with a blank can be copied."""
    file = tmp_path / "a file"
    file.write_text("", encoding="utf-8")
    (finding,) = doctor.run(checks={"PATH"}, run_dir=file / "run").failed
    assert finding.code == "DS-PATH-003"
    assert f"namei -l '{file}'; findmnt -T '{file}'" in finding.fix


@needs_namespaces
def test_full_run_directory_is_reported_in_bytes_and_in_files(tmp_path: Path) -> None:
    """A file system can run out of either."""
    small = examine(
        "PATH", host=f"mount -t tmpfs -o size=64m tmpfs {tmp_path}", run_dir=str(tmp_path)
    )
    full = examine(
        "PATH", host=f"mount -t tmpfs -o size=2m tmpfs {tmp_path}", run_dir=str(tmp_path)
    )
    files = examine(
        "PATH", host=f"mount -t tmpfs -o nr_inodes=50 tmpfs {tmp_path}", run_dir=str(tmp_path)
    )
    assert (small.severity("DS-PATH-004"), full.severity("DS-PATH-004")) == ("warning", "failed")
    assert "room for only" in files.of("DS-PATH-004")["fact"]


def test_slow_run_directory_is_a_warning_within_seconds(tmp_path: Path) -> None:
    """The check does not wait for a disk that takes 0.5 s for every MiB."""
    slow = "import os, time; real = os.fsync; os.fsync = lambda fd: (time.sleep(0.5), real(fd))"
    found = examine("PATH", before=slow, run_dir=str(tmp_path))
    assert found.severity("DS-PATH-005") == "warning"
    assert found.report["took_s"] < 8


def test_temporary_directory_that_does_not_exist_is_a_warning(tmp_path: Path) -> None:
    """Python silently uses another one; the copied line creates it."""
    env = {"TMPDIR": str(tmp_path / "gone")}
    found = examine("PATH", env=env)
    assert "does not exist; files go to" in found.of("DS-PATH-006")["fact"]
    line, *_ = lines_to_copy(found.of("DS-PATH-006"))
    assert line == f"mkdir -p {tmp_path}/gone"


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
