"""The launcher's stdout is not read: a pager waits for a key, or ssh or a log collector stalls."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import machine
import pytest
import scripts
from exception_programs import LostSampleError
from fault_kit import CRASH_S, fault_time_s, write_script
from machine import require_in_time

PAUSE_S: Final = 2.0
"""How long a reader may pause after the ranks have ended before the launcher stops writing."""

LINES: Final = [f"{number:099d}" for number in range(3000)]

UNREAD: Final = "nothing reads the console"


class Unread:
    """A script whose stdout is read only by the test.

    Attributes:
        process: The launcher.
    """

    def __init__(self, folder: Path, then: str, options: str, *, on: str, unbuffered: bool) -> None:
        """Start two ranks; one of them writes a lot."""
        text = f"""
            import console_programs
            print("before")
            ddpsafe.launch(console_programs.write_much, (folder, {then!r}), {options} **options)
            print("after")
        """
        self._folder = folder
        self._ours, theirs = os.openpty() if on == "terminal" else os.pipe()
        arguments = write_script(folder, text)
        with Path(os.devnull).open("rb") as nothing, (folder / "script.err").open("wb") as err:
            self.process = scripts.start(
                arguments,
                folder=folder,
                streams=[nothing.fileno(), theirs, err.fileno()],
                environment={**scripts.clean_environment(), "PYTHONUNBUFFERED": "1" * unbuffered},
            )
        os.close(theirs)

    def wait_until_stuck(self) -> None:
        """Wait until there is more output than the pipe holds, and copying has begun."""
        scripts.wait_until((self._folder / "written").exists, otherwise=self.errors)
        scripts.wait_until(lambda: self._readable() > len("before\n"), otherwise=self.errors)

    def open_gate(self) -> None:
        """Let the rank exit."""
        (self._folder / "gate").touch()

    def outlast_pause(self) -> None:
        """Wait until the rank ended longer ago than a reader may pause."""
        scripts.wait_until((self._folder / "fault").exists)
        late_s = fault_time_s(self._folder) + PAUSE_S + 1
        scripts.wait_until(lambda: time.monotonic() > late_s)

    def _readable(self) -> int:
        size = array.array("i", [0])
        fcntl.ioctl(self._ours, termios.FIONREAD, size)
        return size[0]

    def read(self, *, every_s: float = 0) -> list[str]:
        """Read to the end in small chunks, with a pause after each; return the lines."""
        data = b""
        while chunk := os.read(self._ours, 32768):
            data += chunk
            ends_s = time.monotonic() + every_s
            scripts.wait_until(lambda ends_s=ends_s: time.monotonic() > ends_s)
        return data.decode().splitlines()

    def stop_reading(self) -> None:
        """Close the reading end, as ``head`` does."""
        os.close(self._ours)
        self._ours = -1

    def errors(self) -> str:
        """Return what the script has written to stderr so far."""
        return (self._folder / "script.err").read_text()

    def close(self) -> None:
        """Kill the script if it is still running."""
        self.process.kill()
        self.process.wait()
        if self._ours >= 0:
            self.stop_reading()


@contextlib.contextmanager
def unread(
    folder: Path, then: str, options: str = "", *, on: str = "pipe", unbuffered: bool = False
) -> Iterator[Unread]:
    """Start the script; see `console_programs.write_much` for what its rank does."""
    script = Unread(folder, then, options, on=on, unbuffered=unbuffered)
    try:
        yield script
    finally:
        script.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("on", "unbuffered"),
    [
        pytest.param("pipe", False, id="pipe", marks=pytest.mark.soak),
        pytest.param("pipe", True, id="unbuffered"),
        pytest.param("terminal", False, id="terminal", marks=pytest.mark.soak),
    ],
)
def test_failed_rank_is_reported_while_stdout_is_not_read(
    tmp_path: Path, on: str, *, unbuffered: bool
) -> None:
    """The error, the exit status and a line about the missing output appear; the log is complete."""
    with unread(tmp_path, "raise", on=on, unbuffered=unbuffered) as script:
        script.wait_until_stuck()
        script.open_gate()
        code = script.process.wait(scripts.LIMIT_S)
        require_in_time(
            time.monotonic() - fault_time_s(tmp_path), CRASH_S + PAUSE_S, script.errors()
        )
    assert code == 1
    assert LostSampleError.__name__ in script.errors()
    assert script.errors().count(UNREAD) == 1
    log = tmp_path / "run" / "attempt-1" / "rank-0.out"
    assert log.read_text().splitlines() == LINES


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, id="SIGINT"),
    ],
)
def test_signal_ends_a_launch_whose_stdout_is_not_read(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """It ends as fast as any other launch, plus the pause that a reader may make."""
    with unread(tmp_path, "return") as script:
        script.wait_until_stuck()
        sent_s = time.monotonic()
        script.process.send_signal(signum)
        assert script.process.wait(scripts.LIMIT_S) == -signum
        require_in_time(time.monotonic() - sent_s, CRASH_S + PAUSE_S, script.errors())


def test_attempt_timeout_holds_while_stdout_is_not_read(tmp_path: Path) -> None:
    """A blocked console does not extend ``timeouts.attempt``."""
    limit_s = 4 * machine.stretch()
    with unread(tmp_path, "return", f"timeouts={{'attempt': {limit_s}}},") as script:
        script.wait_until_stuck()
        stuck_s = time.monotonic()
        assert script.process.wait(scripts.LIMIT_S) == 1
        require_in_time(time.monotonic() - stuck_s, limit_s + CRASH_S + PAUSE_S, script.errors())
    assert "LaunchTimeoutError" in script.errors()


@pytest.mark.full
def test_successful_launch_waits_for_its_reader(tmp_path: Path) -> None:
    """A reader who continues late gets all the output, in order, and no warning."""
    with unread(tmp_path, "return") as script:
        script.wait_until_stuck()
        script.open_gate()
        script.outlast_pause()
        assert script.read() == ["before", *LINES, "after"]
        assert script.process.wait(scripts.LIMIT_S) == 0
    assert "ddpsafe" not in script.errors()  # torch may warn of a host without a name server


def test_signal_ends_a_launch_that_waits_for_its_reader(tmp_path: Path) -> None:
    """SIGTERM still works after all ranks have returned and only output is left."""
    with unread(tmp_path, "return") as script:
        script.wait_until_stuck()
        script.open_gate()
        script.outlast_pause()
        assert script.process.poll() is None, script.errors()
        script.process.terminate()
        sent_s = time.monotonic()
        assert script.process.wait(scripts.LIMIT_S) == -signal.SIGTERM
        require_in_time(time.monotonic() - sent_s, CRASH_S + PAUSE_S, script.errors())


@pytest.mark.full
def test_slow_reader_of_a_failure_gets_everything(tmp_path: Path) -> None:
    """The pause is counted from the last read, so a steady reader may take longer in total."""
    with unread(tmp_path, "raise") as script:
        script.wait_until_stuck()
        script.open_gate()
        assert script.read(every_s=0.4) == ["before", *LINES]
        assert script.process.wait(scripts.LIMIT_S) == 1
    assert UNREAD not in script.errors()


@pytest.mark.full
@pytest.mark.parametrize(
    ("unbuffered", "code"),
    [
        pytest.param(False, 120, id="buffered"),
        pytest.param(True, 1, id="-u", marks=pytest.mark.soak),
    ],
)
def test_reader_that_exits_does_not_end_the_ranks(
    tmp_path: Path, code: int, *, unbuffered: bool
) -> None:
    """With ``| head -1``, only the script's own ``print`` and exit report the broken pipe."""
    with unread(tmp_path, "return", unbuffered=unbuffered) as script:
        script.wait_until_stuck()
        script.stop_reading()
        script.open_gate()
        assert script.process.wait(scripts.LIMIT_S) == code
    assert "BrokenPipeError" in script.errors()
    assert (tmp_path / "fault").exists()


MEGABYTES: Final = 400

WRITES: Final = f"""
import sys
from pathlib import Path
import ddpsafe

def train(ctx, lines):
    text = "x" * 999 + "\\n" if lines else "x" * 1000
    for _ in range({MEGABYTES} * 1000):
        sys.stdout.write(text)
    sys.stdout.flush()
    Path("written").touch()

if __name__ == "__main__":
    ddpsafe.launch(train, (sys.argv[1] == "lines",), nproc_per_node=1, console=sys.argv[2])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "console"), [("lines", "rank-zero"), ("lines", "json"), ("one line", "all")]
)
def test_much_output_needs_no_memory_of_the_launcher(
    tmp_path: Path, what: str, console: str
) -> None:
    """It waits in the log: the rank continues at once, and the launcher stays below 200 MiB."""
    script = scripts.write(tmp_path, "train.py", WRITES)
    ours, theirs = os.pipe()
    process = scripts.start(
        [str(script), what, console], folder=tmp_path, streams=[0, theirs, 2], fresh=True
    )
    os.close(theirs)
    try:
        scripts.wait_until((tmp_path / "written").exists)  # nothing has been read
        size = 0
        with os.fdopen(ours, "rb") as stdout:
            while chunk := stdout.read(1 << 20):
                size += len(chunk)
                status = Path(f"/proc/{process.pid}/status").read_text()
                # Of a process that has ended, it is missing.
                peak = next((n for n in status.splitlines() if n.startswith("VmHWM")), "VmHWM: 0")
                assert int(peak.split()[1]) < 200 << 10, peak
    finally:
        process.kill()
        process.wait()
    assert size >= MEGABYTES * 1_000_000


def test_a_console_on_a_full_disk_ends_nothing_and_is_told(tmp_path: Path) -> None:
    """``ddpsafe run train.py > log`` continues without its log, and says so where the user may still see it."""
    scripts.write(tmp_path, "train.py", "print('step 1')")
    command = [sys.executable, "-m", "ddpsafe", "run", "--nproc-per-node", "1", "train.py"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=True
        )
    assert done.stderr.count("the output cannot be written: No space left on device") == 1
