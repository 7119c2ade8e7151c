"""Processes, the terminal, the clock, and checks that fail or hang."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import scripts
from doctor_kit import examine, lines_to_copy
from source_tree import PACKAGE

from ddpsafe import LaunchConfig
from ddpsafe._clock import Deadline
from ddpsafe.doctor import Finding
from ddpsafe.doctor._examine import run_check
from ddpsafe.doctor._findings import ok
from ddpsafe.doctor._subject import Subject


def test_missing_interpreter_fails() -> None:
    """Python embedded in another program reports the wrong one."""
    gone = "import multiprocessing as m; m.set_executable('/nowhere/python')"
    found = examine("PROC", before=gone)
    assert found.severity("DS-PROC-001") == "failed"
    assert "/nowhere/python cannot be started" in found.of("DS-PROC-001")["fact"]


def test_ssh_session_without_tmux_is_a_warning_under_nohup_too() -> None:
    """The command nohup does not keep torchrun alive; tmux does."""
    session = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22", "TMUX": ""}
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    del session["TMUX"]
    found = examine("PROC", before=nohup, env=session)
    assert found.severity("DS-PROC-002") == "warning"
    assert "tmux new -s train" in lines_to_copy(found.of("DS-PROC-002"))
    kept = examine("PROC", before=nohup, env={**session, "TMUX": "/tmp/tmux-0/default,1,0"})
    assert kept.severity("DS-PROC-002") == "ok"


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
