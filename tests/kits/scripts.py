"""Runs scripts as a user does, from files and with their own main module.

They are forked from an interpreter that has imported torch (`warm_python`), and so are their ranks.
Tests of the start itself, and one real launch for each promise, use a new interpreter
(``fresh=True``), or new ones for the ranks (`SPAWNING`).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final

import machine
from warm_python import Forked, SharedPython, WarmPython, piped
from warm_server import read_at_start

LIMIT_S: Final = machine.hang_limit(240)
"""How long any script may take, on a busy machine."""

TESTS: Final = Path(__file__).parents[1]
OF_LAUNCHES: Final = (
    "torch.distributed",
    "torch._dynamo",  # which DistributedDataParallel imports
    "jinja2",  # which draws the report of a failure
    "encodings.idna",  # which looking up a host's name imports
    "ddpsafe.checkpoint",
    "ddpsafe._launch",
    "ddpsafe._launcher.nodes.rounds",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "ddpsafe.doctor._examine",
    "ddpsafe._launcher.attempt",
    "ddpsafe._launcher.retry",
    "ddpsafe._worker.context",
    "ddpsafe._worker.entrypoint",
    "ddpsafe._worker.process_group",
    "ddpsafe._worker.torch_hooks",
)
"""Modules that a launching script and its fork server import.

Not `ddpsafe._worker.preload`: it makes its process a fork server.
"""

FORKING: Final = {"DDPSAFE_START_METHOD": "forkserver"}
"""Variables of a script whose ranks are forked, too: a new interpreter costs seconds of a core."""

SPAWNING: Final = {"DDPSAFE_START_METHOD": "spawn"}
"""Variables of a script whose ranks start by the default method."""

SHARED: Final = "PYTEST_WARM_PYTHON"
"""Variable with the interpreter that the pytest workers of a run share."""

MAY_SHARE: Final = os.environ.get("PYTEST_WARM_PYTHON_OF_EACH") != "1"
"""False to measure each pytest worker with all its processes."""

IMPORTED: Final = (TESTS / "programs", TESTS / "kits")
"""Where rank functions are imported from, as in ``pythonpath`` of pyproject.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The exit code of a script, and what it wrote."""

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        """Return the lines of stdout; fail unless the script succeeded."""
        assert self.code == 0, self.err
        return self.out.splitlines()


class Script:
    """A Python process that is running."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        text: str | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        """Start ``python *arguments`` in `folder`, `text` being its stdin, with `env` on top.

        Options of Python and a stdin need a new interpreter, which `fresh` asks for.
        """
        self._text = text
        self._process: subprocess.Popen[str] | Forked
        environment = {**clean_environment(), **FORKING, **(env or {})}
        if fresh or text is not None or not can_be_forked(arguments, environment):
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            return
        with piped() as (theirs, ours):
            self._process = warm_python().start(
                arguments, environment=environment, streams=theirs, folder=folder
            )
            self._process.stdout, self._process.stderr = ours

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self, limit_s: float = LIMIT_S) -> Run:
        """Wait until it exits; kill it if that takes too long."""
        try:
            if isinstance(self._process, Forked):
                out, err = self._process.communicate(timeout=limit_s)
            else:
                out, err = self._process.communicate(self._text, timeout=limit_s)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return Run(code=self._process.returncode, out=out, err=err)


@functools.cache
def warm_python() -> WarmPython:
    """Return the interpreter of this pytest that has imported what launches need."""
    server = WarmPython(OF_LAUNCHES, clean_environment(), os.environ.get(SHARED))
    Finalize(None, server.close, exitpriority=0)
    return server


def share_warm_python() -> SharedPython:
    """Start the interpreter from which those of this run's pytest workers are forked."""
    shared = SharedPython(OF_LAUNCHES, clean_environment())
    os.environ[SHARED] = shared.address
    return shared


def can_be_forked(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the warm interpreter can run this as a new one would."""
    same = read_at_start(environment) == read_at_start(clean_environment())
    return same and (arguments[0].endswith(".py") or arguments[0] == "-m")


def start(
    arguments: Sequence[str],
    *,
    folder: Path,
    streams: Sequence[int],
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    session: bool = False,
) -> subprocess.Popen[bytes] | Forked:
    """Start ``python *arguments`` with these files as stdin, stdout and stderr; see `Script`."""
    environment = clean_environment() if environment is None else environment
    if fresh or not can_be_forked(arguments, environment):
        stdin, stdout, stderr = streams
        command = [sys.executable, *arguments]
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=session,
        )
    return warm_python().start(
        arguments, environment=environment, streams=streams, folder=folder, session=session
    )


def write(folder: Path, name: str, source: str) -> Path:
    """Write a script, without the indentation of the test."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
    return path


def run(
    folder: Path,
    source: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Run:
    """Write and run one script in `folder`, to its end."""
    path = write(folder, "script.py", source)
    return Script([str(path), *arguments], folder=folder, env=env, fresh=fresh).end()


def clean_environment() -> dict[str, str]:
    """Return this environment with importable rank programs and no number of threads."""
    inherited = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = [*map(str, IMPORTED), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path)}


def wait_until(
    condition: Callable[[], object],
    *,
    otherwise: Callable[[], object] = str,
    within_s: float = LIMIT_S,
    every_s: float = 0.01,
) -> None:
    """Check `condition` repeatedly until it holds; if it never does, fail with what `otherwise` returns."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s, f"it did not happen: {otherwise()!r:.4000}"
        time.sleep(every_s)
