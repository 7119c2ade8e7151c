"""Probe torch in a process of its own, so that a broken torch or a hanging driver ends only that."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._host import is_directory_foreign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._clock import Deadline

_PROGRAM: Final = Path(__file__).with_name("torch_probe_program.py")
# `python -c` puts the current directory first on sys.path, so the probe finds a torch.py there, as a
# script of that directory would.
_WITH_DIRECTORY: Final = (
    "import sys; del sys.argv[0]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
)
WITHOUT_DIRECTORY: Final = "import sys; sys.path[:] = filter(None, sys.path);" + _WITH_DIRECTORY
"""For ``python -c``: run the script named by the first argument, and import nothing from the
current directory, like ``python -P`` since Python 3.11."""
_STDERR_CHARS: Final = 2000


class TorchProbe:
    """A process that imports torch and tries the GPUs while other checks run."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._lines = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as above
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", _WITH_DIRECTORY, str(_PROGRAM)],
            cwd=find_safe_directory(),
            stdin=subprocess.DEVNULL,
            stdout=self._lines,
            stderr=self._errors,
            env={**env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that its children can be killed with it
        )
        self._results: dict[str, Any] | None = None

    def results(self, deadline: Deadline) -> dict[str, Any]:
        """Return what the process has reported by `deadline`, and kill it if it has not exited.

        Keys are the stages of the program; ``stage`` is its last one, ``timed_out`` whether it was
        killed, ``returncode`` its exit status, ``stderr`` the end of its output there.
        """
        if self._results is None:
            timed_out = False
            try:
                self._process.wait(deadline.remaining_s())
            except subprocess.TimeoutExpired:
                timed_out = True
            self._kill()
            self._lines.seek(0)
            stages: dict[str, Any] = {}
            for line in self._lines.read().decode("utf-8", "replace").splitlines():
                with contextlib.suppress(ValueError):  # the process died in the middle of a line
                    stages.update(json.loads(line))
            self._errors.seek(0)
            self._results = {
                **stages,
                "timed_out": timed_out,
                "waited_s": deadline.waited_s(),
                "returncode": self._process.returncode,
                "stderr": self._errors.read().decode("utf-8", "replace")[-_STDERR_CHARS:],
            }
        return self._results

    def close(self) -> None:
        """Kill the process if it still runs, and close its files."""
        self._kill()
        self._lines.close()
        self._errors.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process stuck in a dead driver cannot be killed, so do not wait for it forever.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)


def find_safe_directory() -> str:
    """Return the working directory for helpers: the current one, or / if others can write to it.

    `cd /tmp && ddpsafe doctor` must not run a torch.py that another user has put there.
    """
    return "/" if is_directory_foreign() else "."
