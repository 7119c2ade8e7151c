"""Processes whose pid is reused, and services that ranks leave running on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import scripts

from ddpsafe import RankContext
from ddpsafe._launcher.processes.descendants import RankIdentity, kill_members


def start_services(_ctx: RankContext) -> tuple[int, int]:
    """Start a service that has left the launch, and one that only has its own session."""
    sleep = ["sleep", "300"]
    kept = subprocess.Popen(["env", "-u", "DDPSAFE_LAUNCH_ID", "setsid", *sleep])
    ended = subprocess.Popen(["setsid", *sleep])
    for service in (kept, ended):
        scripts.wait_until(lambda pid=service.pid: os.getsid(pid) == pid)
    return kept.pid, ended.pid


def reuse_pids() -> dict[str, list[bool]]:
    """Let an unrelated process have the pid of a rank that has exited, and sweep.

    Returns:
        For each way in which the rank's exit is known: whether the unrelated process and its child
        survive; the last value is whether the rank's own descendant has been ended.
    """
    found = {}
    for way in ("told", "not told"):
        started_s = time.monotonic()
        rank = subprocess.Popen(["sleep", "300"], start_new_session=True)
        identity = RankIdentity.of(rank.pid)
        assert identity is not None
        # The kernel counts start times in ticks of 10 ms; no pid is reused within one.
        scripts.wait_until(lambda started_s=started_s: time.monotonic() > started_s + 0.05)
        rank.kill()
        scripts.wait_until(lambda rank=rank: psutil.Process(rank.pid).status() == "zombie")
        if way == "told":
            identity = identity.ended()
        rank.wait()
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(rank.pid - 1))
        stranger = subprocess.Popen(
            ["sh", "-c", "sleep 300 & wait"], start_new_session=True, env={}, user=65534
        )
        assert stranger.pid == rank.pid
        leader = psutil.Process(stranger.pid)
        scripts.wait_until(lambda leader=leader: len(leader.children()) == 1)
        (child,) = leader.children()
        kill_members([identity], "0" * 32, within_s=0.5)
        lives = [stranger.poll() is None, child.is_running()]
        if way == "told":  # and now without the leader of the stranger's session
            stranger.kill()
            stranger.wait()
            kill_members([identity], "0" * 32, within_s=0.5)
            lives.append(child.is_running())
        found[way] = lives
        for process in (stranger.pid, child.pid):
            if psutil.pid_exists(process):
                os.kill(process, signal.SIGKILL)
        stranger.wait()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(reuse_pids()))
