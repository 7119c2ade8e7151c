"""The launcher is the first process of a container: no default action of a signal, and orphans are its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import scripts

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, for a namespace of processes"
)

LEAVES_ORPHANS = """
import subprocess, time
from pathlib import Path

import psutil

for _ in range(5):
    subprocess.run(["sh", "-c", "(sleep 0.1 &)"])
subprocess.run(["sh", "-c", "setsid sleep 2.5 &"])
def zombies():
    found = [process.info for process in psutil.process_iter(["name", "status"])]
    return [each for each in found if psutil.STATUS_ZOMBIE in each.values() or each["name"] == "sleep"]
ends = time.monotonic() + 120
while zombies() and time.monotonic() < ends:
    time.sleep(0.05)
Path("zombies").write_text(str(zombies()))
Path("ready").touch()
time.sleep(600)
"""

STOPS = """
import time
from pathlib import Path
import ddpsafe

def train(ctx):
    while not ctx.stop_requested():
        time.sleep(0.02)
        Path("ready").touch()

if __name__ == "__main__":
    ddpsafe.launch(train, nproc_per_node=1, backend="gloo")
"""


@pytest.fixture
def container() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list of containers, which are killed at the end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        with each:
            each.kill()  # and with it the first process of the container


def signal_first_process(
    containers: list[subprocess.Popen[str]], folder: Path, command: list[str], signum: int
) -> tuple[int, str]:
    """Run Python as the first process, send it a signal once it is ready; return exit code and stderr."""
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *command],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    containers.append(process)
    scripts.wait_until(lambda: (folder / "ready").exists() or process.poll() is not None)
    assert process.returncode is None, process.communicate()[1]
    (first,) = psutil.Process(process.pid).children()
    first.send_signal(signum)
    _, errors = process.communicate(timeout=scripts.LIMIT_S)
    return process.returncode, errors


def test_it_reaps_orphans_and_ends_with_the_exit_code_of_the_signal(
    tmp_path: Path, container: list[subprocess.Popen[str]]
) -> None:
    """``docker stop`` of a training that does not call `stop_requested()` ends with 143."""
    scripts.write(tmp_path, "train.py", LEAVES_ORPHANS)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "1", "train.py"]
    code, errors = signal_first_process(container, tmp_path, command, signal.SIGTERM)
    assert (tmp_path / "zombies").read_text() == "[]"
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in errors


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_it_lets_the_ranks_save(
    tmp_path: Path, container: list[subprocess.Popen[str]], signum: int
) -> None:
    """A training that calls `stop_requested()` ends with 75."""
    scripts.write(tmp_path, "train.py", STOPS)
    code, errors = signal_first_process(container, tmp_path, ["train.py"], signum)
    assert code == 75, errors
