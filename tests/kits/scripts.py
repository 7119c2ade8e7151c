"""Runs scripts as a user does: in files, with a main module of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LIMIT_S: Final = 120
"""How long any script may take, on a busy machine."""

TESTS: Final = Path(__file__).parents[1]
IMPORTED: Final = (TESTS / "programs", TESTS / "kits")
"""Where rank functions are imported from, as ``pythonpath`` of pyproject.toml has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What became of a script.

    Attributes:
        code: Its exit code.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
    """

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        """Return the lines of stdout of a script that must have ended well."""
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
    ) -> None:
        """Start ``python *arguments`` in `folder`, `text` being its stdin, with `env` on top."""
        self._text = text
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**clean_environment(), **(env or {})},
            stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> Run:
        """Wait for its end; kill it if that takes too long."""
        try:
            out, err = self._process.communicate(self._text, timeout=LIMIT_S)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        return Run(code=self._process.returncode, out=out, err=err)


def write(folder: Path, name: str, source: str) -> Path:
    """Write a script that was indented for the reader of the test."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
    return path


def run(folder: Path, source: str, *arguments: str) -> Run:
    """Write and run one script in `folder`, to its end."""
    path = write(folder, "script.py", source)
    return Script([str(path), *arguments], folder=folder).end()


def clean_environment() -> dict[str, str]:
    """Return this environment, with our rank programs importable and no threads chosen."""
    inherited = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = [*map(str, IMPORTED), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path)}


def wait_until(
    condition: Callable[[], object], *, otherwise: Callable[[], object] = str, within_s: float = 60
) -> None:
    """Look again and again until `condition` holds; fail with `otherwise` when it never does."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s, f"it did not happen: {otherwise()!r:.500}"
        time.sleep(0.01)
