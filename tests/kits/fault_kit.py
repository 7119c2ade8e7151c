"""Every fault must lead to the right error, in time, explained, and leave nothing behind.

A promise in seconds is stretched on a slow or busy machine, see `machine`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import leftovers
import machine
import psutil
import pytest
import scripts
from warm_python import Forked

import ddpsafe
from ddpsafe import LaunchError

E = TypeVar("E", bound="ddpsafe.LaunchError")

CRASH_S: Final = 2.0
"""From a rank's fault to the launcher's exit."""

HANG_S: Final = 2.0
"""From the end of the timeout that detects a hang to the launcher's exit."""

CLEANUP_S: Final = 1.0
"""From the launcher's exit until everything it started has ended."""

COLLECTIVE_S: Final = 1.5
"""Timeout of collectives in tests of hangs that only a timeout can detect."""

BY_TIMEOUT: Final[dict[str, Any]] = {
    "within_s": COLLECTIVE_S + HANG_S,
    "timeouts": {"collective": COLLECTIVE_S},
}
"""Arguments of `World.launch_fails` for such a hang."""

WORLDS: Final = [
    pytest.param(2, "forkserver", id="2-forkserver", marks=pytest.mark.soak),
    pytest.param(3, "forkserver", id="3-forkserver"),
    pytest.param(2, "spawn", id="2-spawn", marks=pytest.mark.soak),
]
"""Numbers of ranks and start methods, for faults to which both may matter."""

WORLD_SIZES: Final = [pytest.param(2, marks=pytest.mark.soak), 3]
"""Numbers of ranks, for other faults; with three ranks, several could be blamed."""

_SCREEN_LINES: Final = 40
_PLACE: Final = re.compile(r"at (?P<file>/.+?):(?P<line>\d+) in (?P<name>[^\s,]+)")


class Touch(logging.Handler):
    """Makes a file at each warning that has a text, so that ranks can wait for the warning."""

    def __init__(self, path: Path, text: str = "") -> None:
        super().__init__(logging.WARNING)
        self._path, self._text = path, text

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        if self._text in record.getMessage():
            self._path.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How a fault is launched: the rank writes its time to `folder`, and the run directory is below it."""

    folder: Path
    ranks: int = 2
    start_method: str = "forkserver"

    def launch(self, program: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """Run ``program(ctx, folder, *args)`` on every rank."""
        return ddpsafe.launch(
            program, (self.folder, *args), nproc_per_node=self.ranks, **self._fields(fields)
        )

    def spawn(self, program: Callable[..., Any], *args: Any, **fields: Any) -> None:
        """Run ``program(rank, world_size, folder, *args)`` on every rank."""
        ddpsafe.spawn(
            program, (self.ranks, self.folder, *args), nprocs=self.ranks, **self._fields(fields)
        )

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        ours = {
            "start_method": self.start_method,
            "backend": "gloo",
            "run_dir": self.folder / "run",
            "console": "none",
        }
        return {**ours, **fields}

    def launch_fails(
        self, error: type[E] | str, program: Callable[..., Any], *args: Any, **how: Any
    ) -> E:
        """Launch a program that must fail; see `_fails`."""
        return _fails(error, self, self.launch, program, *args, **how)

    def spawn_fails(
        self, error: type[E] | str, program: Callable[..., Any], *args: Any, **how: Any
    ) -> E:
        """Spawn a program that must fail; see `_fails`."""
        return _fails(error, self, self.spawn, program, *args, **how)


def _fails(
    error: type[E] | str,
    world: World,
    call: Callable[..., Any],
    *args: Any,
    within_s: float = CRASH_S,
    **fields: Any,
) -> E:
    """Make a call that must fail with exactly this error, in time, and leave nothing behind.

    Instead of an error's class, `error` may be the field of `Timeouts` whose `LaunchTimeoutError` it is.
    """
    before = leftovers.Snapshot.take()
    with pytest.raises(ddpsafe.LaunchError) as caught:
        call(*args, **fields)
    ended_s = time.monotonic()
    # Errors of `spawn` are of a subclass of the same name, which is torch's, too.
    cls = ddpsafe.LaunchTimeoutError if isinstance(error, str) else error
    assert isinstance(caught.value, cls), caught.value
    assert type(caught.value).__name__ == cls.__name__, caught.value
    if isinstance(error, str):
        assert caught.value.setting == error, caught.value
    assert (world.folder / "fault").exists(), f"failed before the fault: {caught.value}"
    took_s = ended_s - fault_time_s(world.folder)
    machine.require_in_time(took_s, within_s, caught.value)
    require_nothing_left(before, caught.value)
    require_complete_message(caught.value)
    return caught.value


def fault_time_s(folder: Path) -> float:
    """Return the time of the fault on the monotonic clock."""
    return float((folder / "fault").read_text())


def require_nothing_left(before: leftovers.Snapshot, error: LaunchError | None = None) -> None:
    """Fail unless everything newer than `before` is removed in time, sessions of ranks included."""
    remaining = leftovers.wait_until_gone(before, grace_s=CLEANUP_S * machine.stretch())
    if error is not None:
        remaining += _in_sessions_of(error)
    assert remaining == [], "\n".join(remaining)


def _in_sessions_of(error: LaunchError) -> list[str]:
    leaders = {outcome.pid for outcome in error.outcomes.values()}
    members = [process for process in psutil.process_iter() if _session_of(process.pid) in leaders]
    return [f"in a rank's session: {each}" for each in members if is_running(each.pid)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return None


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def require_complete_message(error: LaunchError) -> None:
    """Fail unless the message answers the four questions, names the logs, and fits one screen."""
    lines = str(error).splitlines()
    assert len(lines) <= _SCREEN_LINES, str(error)
    size = len(error.outcomes)
    assert re.search(rf"ranks? \d+(, \d+)*( and \d+)? \(world_size {size}\)", lines[0]), lines[0]
    assert re.search(rf"attempt {error.attempt}( of \d+)?, after \d+\.\d s", lines[0]), lines[0]
    for start in ("Likely cause: ", "What to do: "):
        assert [line for line in lines if line.startswith(f"  {start}")], f"no {start!r} in {error}"
    logs = [line for line in lines if line.startswith("  Logs: ")]
    assert len(logs) == 1, str(error)
    if error.run_dir is not None and error.run_dir.exists():
        assert Path(logs[0].removeprefix("  Logs: ")).exists()


def require_rank(error: ddpsafe.RankFailedError, rank: int) -> None:
    """Fail unless that rank is blamed in the first line and in the error's attributes."""
    assert error.rank == rank, error
    assert str(error).startswith(f"rank {rank} (world_size "), error
    assert error.pid == error.outcomes[rank].pid


def require_places(error: LaunchError, ranks: Iterable[int]) -> dict[int, str]:
    """Return the functions in which the message shows each rank, on lines of the test programs that are stuck."""
    names = {}
    for rank in ranks:
        (line,) = [text for text in str(error).splitlines() if text.startswith(f"  rank {rank}")]
        place = _PLACE.search(line)
        assert place is not None, line
        file = Path(place["file"])
        assert file.match("*_programs.py"), line
        assert file.parent == scripts.TESTS / "programs", line
        source = file.read_text().splitlines()[int(place["line"]) - 1]
        assert "# stuck here" in source, f"{line}: {source}"
        names[rank] = place["name"]
    return names


def run_script(folder: Path, statements: str, *arguments: str, fresh: bool = False) -> scripts.Run:
    """Run a script with statements below its main guard, to its end.

    In scope are `folder`, `ddpsafe`, `orphan_programs`, and `options` for two ranks.
    """
    script = write_script(folder, statements, *arguments)
    return scripts.Script(script, folder=folder, fresh=fresh).end()


def write_script(folder: Path, statements: str, *arguments: str) -> list[str]:
    """Write such a script; return the arguments for Python to run it."""
    options = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}
    source = "\n".join(
        [
            "import os, signal, sys, threading, time",
            "from pathlib import Path",
            "import ddpsafe",
            "import orphan_programs",
            f"folder = Path({str(folder)!r})",
            f"options = dict({options!r}, run_dir=folder / 'run')",
            "if __name__ == '__main__':",
            textwrap.indent(textwrap.dedent(statements).strip(), "    "),
        ]
    )
    return [str(scripts.write(folder, "script.py", source)), *arguments]


def require_hang(
    error: ddpsafe.LaunchTimeoutError, rank: int, *, or_rank: int | None = None
) -> None:
    """Fail unless that rank is missing in the first line and the attributes; `or_rank` may be wrong as well."""
    assert error.missing_ranks == ((rank,) if or_rank is None else (rank, or_rank)), error
    assert or_rank is None or f", but rank {or_rank} (world_size " in str(error), error
    assert str(error).startswith(f"rank {rank} (world_size "), error
    assert error.kind == "hang"
    assert error.waited_s > 0
    assert rank in error.stacks


def launch_everything(how: str, start_method: str = "forkserver") -> str:
    """Return the statement of a script whose ranks have DataLoader workers and stubborn children."""
    options = f"**{{**options, 'start_method': {start_method!r}}}, timeouts={{'grace': 1}}"
    return f"ddpsafe.launch(orphan_programs.work_with_everything, (folder, {how!r}), {options})"


class Started:
    """A running script with the processes that its ranks started, and its terminal if it has one."""

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes] | Forked, terminal: int | None
    ) -> None:
        self._folder = folder
        self._process = process
        self._terminal = terminal

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    def wait_until_up(self, ranks: int = 2) -> None:
        """Wait until each rank has started its children and has reached its place."""
        scripts.wait_until(lambda: self._is_up(ranks), otherwise=self.errors)

    def _is_up(self, ranks: int) -> bool:
        assert self._process.poll() is None, f"it ended: {self.errors()}"
        return len(list(self._folder.glob("ready-*"))) == ranks

    def type(self, text: str) -> None:
        """Type on its terminal."""
        assert self._terminal is not None
        os.write(self._terminal, text.encode())

    def hang_up(self) -> None:
        """Close its terminal."""
        assert self._terminal is not None
        os.close(self._terminal)
        self._terminal = None

    def errors(self) -> str:
        """Return what the script has written to stderr so far."""
        return (self._folder / "script.err").read_text()

    def end(self) -> scripts.Run:
        """Wait until the script exits; return its result."""
        code = self._process.wait(scripts.LIMIT_S)
        return scripts.Run(
            code=code, out=(self._folder / "script.out").read_text(), err=self.errors()
        )

    def require_all_ended(self) -> None:
        """Fail unless all processes that the ranks started have ended in time."""
        ends_s = time.monotonic() + CLEANUP_S * machine.stretch()
        while (alive := self._alive()) and time.monotonic() < ends_s:
            time.sleep(0.02)
        assert alive == []

    def _alive(self) -> list[str]:
        found = []
        for path in self._folder.glob("pids-?"):
            pids = map(int, path.read_text().split())
            found += [f"{path.name}: process {pid}" for pid in pids if is_running(pid)]
        return found

    def close(self) -> None:
        """Kill the script if it is still running."""
        if self._terminal is not None:
            self.hang_up()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def start_script(
    folder: Path,
    statements: str = "",
    *,
    command: list[str] | None = None,
    fresh: bool = False,
    session: bool = False,
) -> Iterator[Started]:
    """Start the script of `write_script`, or a command that runs it, in the background; see `scripts` for `fresh`."""
    with (
        Path(os.devnull).open("rb") as nothing,
        (folder / "script.out").open("wb") as out,
        (folder / "script.err").open("wb") as err,
    ):
        process: subprocess.Popen[bytes] | Forked
        if command is None:
            process = scripts.start(
                write_script(folder, statements),
                folder=folder,
                streams=[stream.fileno() for stream in (nothing, out, err)],
                fresh=fresh,
                session=session,
            )
        else:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=scripts.clean_environment(),
                stdin=nothing,
                stdout=out,
                stderr=err,
            )
    started = Started(folder, process, None)
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def start_script_on_terminal(folder: Path, statements: str) -> Iterator[Started]:
    """Start such a script as the foreground job of a new terminal."""
    ours, theirs = os.openpty()
    with (folder / "script.out").open("wb") as out, (folder / "script.err").open("wb") as err:
        process = scripts.warm_python().start(
            write_script(folder, statements),
            environment=scripts.clean_environment(),
            streams=[theirs, out.fileno(), err.fileno()],
            folder=folder,
            session=True,
            terminal=os.ttyname(theirs),
        )
    os.close(theirs)
    started = Started(folder, process, ours)
    try:
        yield started
    finally:
        started.close()


MEMORY_BYTES: Final = 1 << 30


@contextlib.contextmanager
def memory_group() -> Iterator[Path | None]:
    """Make a control group limited to 1 GB, or yield None if this process may not."""
    group = _make_group()
    yield group
    if group is not None:
        scripts.wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def _make_group() -> Path | None:
    """Try version 1 of control groups, then version 2."""
    for root, limit, swap in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.swap.max"),
    ):
        group = Path(root) / f"ddpsafe-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if _limit(group, limit, swap):
                return group
            group.rmdir()
    return None


def _limit(group: Path, limit: str, swap: str) -> bool:
    try:
        (group / limit).write_text(str(MEMORY_BYTES))
        if (group / swap).exists():
            (group / swap).write_text("0" if swap == "memory.swap.max" else str(MEMORY_BYTES))
    except OSError:
        return False
    return True
