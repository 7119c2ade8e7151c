"""torch, asked in a process of its own: a broken one or a hanging driver ends that process only."""

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
# `python -c` puts the current directory first: a torch.py that lies there is found as a script
# of that directory would find it.
_WITH_DIRECTORY: Final = (
    "import sys; del sys.argv[0]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
)
WITHOUT_DIRECTORY: Final = "import sys; sys.path[:] = filter(None, sys.path);" + _WITH_DIRECTORY
"""For ``python -c``: run the script that the first argument names, and import nothing from the
current directory, as ``python -P`` does from Python 3.11 on."""
_LAST_CHARS: Final = 2000


class TorchProbe:
    """One process that imports torch and tries the GPUs, while other checks go on."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start the process."""
        self._lines = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as above
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", _WITH_DIRECTORY, str(_PROGRAM)],
            cwd=find_safe_directory(),
            stdin=subprocess.DEVNULL,
            stdout=self._lines,
            stderr=self._errors,
            env={**env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._said: dict[str, Any] | None = None

    def said(self, deadline: Deadline) -> dict[str, Any]:
        """Return what the process said by `deadline`, ending it where it has not ended by then.

        Keys are the stages of the program; ``stage`` is the one it was in last, ``timed_out``
        whether it had to be ended, ``returncode`` its exit status, ``stderr`` its last words.
        """
        if self._said is None:
            timed_out = False
            try:
                self._process.wait(deadline.remaining_s())
            except subprocess.TimeoutExpired:
                timed_out = True
            self._end()
            self._lines.seek(0)
            stages: dict[str, Any] = {}
            for line in self._lines.read().decode("utf-8", "replace").splitlines():
                with contextlib.suppress(ValueError):  # the line was cut off with its process
                    stages.update(json.loads(line))
            self._errors.seek(0)
            self._said = {
                **stages,
                "timed_out": timed_out,
                "waited_s": deadline.waited_s(),
                "returncode": self._process.returncode,
                "stderr": self._errors.read().decode("utf-8", "replace")[-_LAST_CHARS:],
            }
        return self._said

    def close(self) -> None:
        """End the process if it still runs, and let the files go."""
        self._end()
        self._lines.close()
        self._errors.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that sits in a dead driver cannot be ended; it is left to the system.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)


def find_safe_directory() -> str:
    """Return where helpers run: the current directory, or the root where it may be foreign.

    So that `cd /tmp && ddpsafe doctor` runs no torch.py that another user has put there.
    """
    return "/" if is_directory_foreign() else "."
