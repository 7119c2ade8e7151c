"""The sweep at the end of a launch ends the ranks' descendants and no other process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import descendant_programs as programs
import psutil
import pytest
import scripts
from fault_kit import is_running

import ddpsafe
from ddpsafe._launcher.processes.descendants import (
    Orphans,
    ProcessIdentity,
    RankIdentity,
    find_members,
    kill_members,
)
from ddpsafe._wire.spec import MARKER

LAUNCH_ID = "5" * 32
AS_ROOT = pytest.mark.root


@AS_ROOT
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_an_unrelated_process_that_reuses_the_pid_of_a_rank_is_left_alone() -> None:
    """Its children are left alone, too, before and after its exit, whichever user launches."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, programs.__file__]
    run = subprocess.run(
        inside,
        capture_output=True,
        env=scripts.clean_environment(),
        text=True,
        check=False,
        timeout=scripts.LIMIT_S,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"told": [True, True, True], "not told": [True, True]}


@pytest.mark.parametrize(
    ("looks", "inherited"),
    [
        ([(100, {7: 20})], []),  # of the first look, it is not known
        ([(100, {7: 20}), (200, {7: 20})], []),
        ([(100, {}), (200, {7: 150})], []),
        ([(100, {}), (200, {7: 100})], []),  # in the same tick as the look
        ([(100, {}), (200, {7: 20})], [7]),
        ([(100, {}), (200, {7: 150}), (300, {7: 150})], []),
        ([(100, {}), (200, {7: 20}), (300, {7: 20})], [7]),  # it has not ended before
        ([(100, {7: 20}), (200, {}), (300, {7: 250})], []),  # another process with its pid
        ([(100, {7: 20}), (200, {7: 20, 8: 30})], [8]),
        ([(100, {9: 20})], [9]),  # 9 has the mark of what ranks start
        ([(100, {}), (200, {9: 150})], [9]),
    ],
)
def test_inherited_children_are_told_from_own_ones(
    looks: list[tuple[int, dict[int, int]]], inherited: list[int]
) -> None:
    """The exit status of a child that the script has started, in a session of its own too, is the script's."""
    orphans = Orphans()
    found: list[ProcessIdentity] = []
    for now, children in looks:
        given = {ProcessIdentity(pid, started): pid == 9 for pid, started in children.items()}
        found = orphans.look(given, now)
    assert [each.pid for each in found] == inherited


def test_processes_in_the_session_of_a_rank_are_ended_after_its_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are recorded when the rank exits, and recognized even after the wall clock has changed."""
    rank = subprocess.Popen(["sh", "-c", "sleep 300 & exec sleep 301"], start_new_session=True)
    identity = RankIdentity.of(rank.pid)
    assert identity is not None
    scripts.wait_until(lambda: len(psutil.Process(rank.pid).children()) == 1)
    (child,) = psutil.Process(rank.pid).children()
    rank.kill()
    ended = identity.ended()
    rank.wait()
    assert [each.pid for each in ended.left or ()] == [child.pid]
    # The kernel computes the time of boot, to which psutil adds, from the wall clock.
    booted_s = psutil.boot_time()
    for name, value in {"boot_time": lambda: booted_s + 3600, "BOOT_TIME": booted_s + 3600}.items():
        monkeypatch.setattr(f"psutil._pslinux.{name}", value, raising=False)
    assert [each.pid for each in find_members([ended], LAUNCH_ID)] == [child.pid]
    kill_members([ended], LAUNCH_ID, within_s=1)
    assert not is_running(child.pid)
    assert find_members([ended], LAUNCH_ID) == []


def test_processes_are_ended_however_long_it_took_to_find_them() -> None:
    """On a busy machine, one pass over all processes may take the whole time allowed."""
    rank = subprocess.Popen(["sleep", "300"], start_new_session=True)
    identity = RankIdentity.of(rank.pid)
    assert identity is not None
    assert [each.pid for each in kill_members([identity], LAUNCH_ID, within_s=0)] == [rank.pid]
    rank.wait()
    assert not is_running(rank.pid)


@AS_ROOT
@pytest.mark.parametrize("user", [0, 65534])
def test_a_mark_counts_only_in_processes_of_this_user(user: int) -> None:
    """Root can read the environment of every process, and must end no other user's processes."""
    marked = subprocess.Popen(["sleep", "300"], env={MARKER: LAUNCH_ID}, user=user)
    try:
        scripts.wait_until(lambda: psutil.Process(marked.pid).name() == "sleep")
        expected = [marked.pid] if user == 0 else []
        assert [each.pid for each in find_members([], LAUNCH_ID)] == expected
    finally:
        marked.kill()
        marked.wait()


def test_a_service_without_the_mark_and_in_its_own_session_survives() -> None:
    """The documentation recommends ``env -u DDPSAFE_LAUNCH_ID setsid`` for a daemon."""
    result = ddpsafe.launch(
        programs.start_services, nproc_per_node=1, backend="gloo", start_method="forkserver"
    )
    kept, ended = result.values[0]
    try:
        assert is_running(kept)
        assert not is_running(ended)
    finally:
        psutil.Process(kept).kill()
