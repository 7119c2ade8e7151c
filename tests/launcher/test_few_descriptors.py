"""A launcher with few file descriptors or without /proc fails before anything starts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scripts
from doctor_kit import needs_namespaces
from machine import require_in_time

LAUNCH_S = 20.0
"""How long a script that imports torch and cannot launch may take."""

SCRIPT = """
import json, os, resource, sys
import ddpsafe, torch
from launch_programs import add_up

def outcome(free, preflight):
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(256 - len(os.listdir("/dev/fd")) - free)]
    try:
        return ddpsafe.launch(
            add_up, (1,), nproc_per_node=2, backend="gloo", start_method="forkserver", preflight=preflight
        ).values
    except ddpsafe.DDPSafeError as error:
        return [type(error).__name__, error.explanation.what]
    finally:
        for fd in held:
            os.close(fd)

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for preflight in ("local", "off"):
        print(json.dumps([outcome(free, preflight) for free in (1, 4, 8, 12, 16, 20, 24, 40, 50)]))
"""


@pytest.mark.full
def test_too_few_free_descriptors_raise_preflight_error_at_once(tmp_path: Path) -> None:
    """Wherever they would run out; with the number that it names, the launch works."""
    for line in scripts.run(tmp_path, SCRIPT).lines():
        *refused, last = json.loads(line)
        assert last == {"0": 2.0, "1": 3.0}
        assert len(refused) == 8
        for name, what in refused:
            assert name == "PreflightError"
            assert what.startswith("2 ranks need 44 file descriptors"), what


def test_a_limit_of_sixteen_files_ends_the_script_at_once(tmp_path: Path) -> None:
    """``ulimit -n 16`` leads to the error and to the exit code for "no retry", not to a hang."""
    source = "import ddpsafe\nfrom launch_programs import add_up\n"
    source += "if __name__ == '__main__':\n    ddpsafe.launch(add_up, (1,), nproc_per_node=2)\n"
    script = scripts.write(tmp_path, "script.py", source)
    began = time.monotonic()
    run = subprocess.run(
        ["sh", "-c", f"ulimit -n 16; exec {shlex.quote(sys.executable)} {script}"],
        env=scripts.clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=scripts.LIMIT_S,
    )
    require_in_time(time.monotonic() - began, LAUNCH_S, run.stderr)
    assert run.returncode == 78, run.stderr
    assert "file descriptors" in run.stderr
    assert "ulimit -n" in run.stderr


WITHOUT_PROC = """
import sys
import ddpsafe

def train(ctx):
    raise SystemExit("a rank was started")

if __name__ == "__main__":
    for preflight in ("local", "off"):
        try:
            ddpsafe.launch(train, nproc_per_node=2, backend="gloo", preflight=preflight)
        except ddpsafe.PreflightError as error:
            print(error)
"""


@pytest.mark.full
@pytest.mark.root
@needs_namespaces
def test_a_machine_without_proc_raises_preflight_error(tmp_path: Path) -> None:
    """Without it, the processes that a rank starts cannot be found, and psutil raises IndexError."""
    script = scripts.write(tmp_path, "script.py", WITHOUT_PROC)
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", hide, "sh", sys.executable, str(script)],
        env=scripts.clean_environment(),
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    what, cause, fix, *without_preflight = run.stdout.splitlines()
    assert without_preflight == [what, cause, fix]
    assert what.startswith("/proc is not mounted")
    assert "a container or a chroot" in cause
    assert "mount -t proc proc /proc" in fix
