"""A rank waits inside the kernel for a disk that does not respond, and not even SIGKILL ends it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hang_programs as programs
import pytest
import scripts
from fault_kit import COLLECTIVE_S, HANG_S, fault_time_s, is_running, start_script
from machine import require_in_time

KILL_S = 2.5
"""How long the launcher tries to end such a rank: grace after SIGTERM, SIGKILL, a last check."""


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate disk and freeze it: a process that writes there waits, as on a dead server."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount and freeze a disk")
    image, folder = tmp_path / "image", tmp_path / programs.DISK
    image.write_bytes(b"")
    os.truncate(image, 16 * 2**20)
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    done = subprocess.run(
        ["mount", "-o", "loop", str(image), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a disk here: {done.stderr.strip()}")
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    yield folder
    thaw(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def thaw(folder: Path) -> None:
    """Let the disk respond again, if it is still frozen."""
    subprocess.run(["fsfreeze", "--unfreeze", str(folder)], capture_output=True, check=False)


@pytest.mark.recorder
@pytest.mark.root
def test_the_launcher_names_the_rank_and_does_not_wait_for_it(
    tmp_path: Path, frozen_disk: Path
) -> None:
    """It reports that the rank cannot be ended, and exits; the rank ends once the disk responds."""
    statements = f"""
        from hang_programs import write_to_a_frozen_disk
        from training_programs import train
        timeouts = {{"collective": {COLLECTIVE_S}, "grace": 0.5}}
        ddpsafe.launch(train, (folder, write_to_a_frozen_disk), timeouts=timeouts, **options)
    """
    with start_script(tmp_path, statements) as job:
        run = job.end()
        took_s = time.monotonic() - fault_time_s(tmp_path)
        assert run.code == 1, run.err
        assert "ddpsafe.LaunchTimeoutError: rank 1 (world_size 2) is behind at" in run.err
        assert "rank 1, was waiting in the kernel for a disk or a device, at " in run.err
        assert " in write_to_a_frozen_disk, after all_reduce number 2" in run.err
        assert "does not respond; until it does, not even SIGKILL ends the rank" in run.err
        found = re.search(r"rank 1 \(pid (\d+)\) did not end after SIGKILL: it is waiting", run.err)
        assert found is not None, run.err
        require_in_time(took_s, COLLECTIVE_S + HANG_S + KILL_S)
        thaw(frozen_disk)
        scripts.wait_until(lambda: not is_running(int(found[1])))
