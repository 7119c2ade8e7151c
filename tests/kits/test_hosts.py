"""Hosts made for tests leave nothing behind, however the tests end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest
from hosts import find_obstacle, require
from scripts import wait_until

pytestmark = pytest.mark.root

KITS: Final = str(Path(__file__).parent)
PROGRAM: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from hosts import Network
with Network(2) as network:
    started = [host.start(["sleep", "1000"]) for host in network]
    print(*(each.pid for each in started), *(host.pid for host in network), flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them() -> None:
    """SIGKILL of the tests ends every process of every host, and removes namespaces and cables."""
    require(find_obstacle())
    maker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, KITS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(psutil.pid_exists, pids))
    maker.kill()
    maker.communicate(timeout=10)
    wait_until(lambda: not any(map(_lives, pids)), within_s=10)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
