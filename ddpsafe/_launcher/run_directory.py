"""The directory of one launch: logs and reports, kept when something failed."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import Explanation, LaunchError, PreflightError
from ddpsafe._launcher.diagnosis.report import write_report
from ddpsafe._wire.spec import LogFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpsafe._wire.outcome import RankOutcome
    from ddpsafe._world import World
logger = logging.getLogger(__name__)
_ROOM_BYTES: Final = 64 << 10


class RunDirectory:
    """Paths of a launch; `discard` decides what stays.

    Attributes:
        path: The directory.
        is_ours: Whether we made it under the system's temporary directory.
        holds_failure: Whether an attempt has failed, and its logs and report are in there.
    """

    def __init__(self, path: Path, *, is_ours: bool) -> None:
        """Keep the path."""
        self.path = path
        self.is_ours = is_ours
        self.holds_failure = False

    def attempt(self, number: int) -> Path:
        """Make the directory of an attempt, counted from 1."""
        path = self.path / f"attempt-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def logs(self, number: int, world: World) -> LogFiles:
        """Name the files of one rank in one attempt."""
        stem = str(self.path / f"attempt-{number}" / f"rank-{world.rank}")
        return LogFiles(
            stdout=f"{stem}.out",
            stderr=f"{stem}.err",
            stacks=f"{stem}.stacks",
            nccl=f"{stem}.nccl",
        )

    def note_tracebacks(self, outcomes: Iterable[RankOutcome]) -> None:
        """Append what each rank raised to its log, where a reader looks for it.

        The rank does not print it: the console would show the echoes before the cause.
        """
        for outcome in outcomes:
            if outcome.raised is not None and outcome.stderr is not None:
                with (
                    contextlib.suppress(OSError),
                    Path(outcome.stderr).open(
                        "a", encoding="utf-8", errors="backslashreplace"
                    ) as file,
                ):
                    file.write(outcome.raised.traceback)

    def report(self, number: int, error: LaunchError) -> None:
        """Write what is known of a failed attempt beside its logs, if the disk takes it."""
        with contextlib.suppress(OSError):
            write_report(error, self.path / f"attempt-{number}")

    @property
    def is_kept(self) -> bool:
        """Whether it stays when the launch ends, by whatever but success."""
        return self.holds_failure or not self.is_ours

    def discard(self) -> None:
        """Remove a directory that we made."""
        if self.is_ours:
            shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def open_run_directory(wanted: Path | None) -> Iterator[RunDirectory]:
    """Make the run directory; remove a temporary one when all went well or no attempt has failed.

    Args:
        wanted: The user's directory, or ``None`` for a private temporary one.

    Raises:
        PreflightError: It cannot be made or written to.
    """
    directory = _make_temporary() if wanted is None else _make(wanted)
    try:
        yield directory
    except BaseException as error:
        if not directory.holds_failure:
            directory.discard()
        elif not isinstance(error, LaunchError):  # which would name the directory itself
            logger.warning("the logs of the attempts that failed are in %s", directory.path)
        raise
    directory.discard()


def _make_temporary() -> RunDirectory:
    try:
        return RunDirectory(Path(tempfile.mkdtemp(prefix="ddpsafe-")), is_ours=True)
    except OSError as exc:
        raise _unusable(Path(tempfile.gettempdir()), exc) from exc


def _make(path: Path) -> RunDirectory:
    try:
        path.mkdir(parents=True, exist_ok=True)
        _set_aside_earlier_attempts(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_ROOM_BYTES))  # an empty file fits on a full disk
    except OSError as exc:
        raise _unusable(path, exc) from exc
    return RunDirectory(path, is_ours=False)


def _set_aside_earlier_attempts(path: Path) -> None:
    """Keep the logs of a launch that used the same directory: its crash may be why we are here."""
    earlier = sorted(path.glob("attempt-*"))
    if not earlier:
        return
    target = path / "earlier" / time.strftime("%Y%m%dT%H%M%S")
    while target.exists():
        target = target.with_name(target.name + "+")
    target.mkdir(parents=True)
    for attempt in earlier:
        attempt.rename(target / attempt.name)


def _unusable(path: Path, exc: OSError) -> PreflightError:
    what = f"the run directory {path} cannot be used: {exc.strerror or exc}."
    cause = "it is not writable, its disk is full, or a file is in its place."
    fix = "pass run_dir= with a directory that you can write to, or make room."
    return PreflightError(Explanation(what, cause=cause, fix=fix))
