"""What the user of a launch sees: the ranks' output, a line while they start, and nothing else."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import console_programs as programs
import pytest
import scripts

import ddpsafe

TWO: Final[dict[str, Any]] = {
    "nproc_per_node": 2,
    "backend": "gloo",
    "start_method": "forkserver",
}


# Whose output.


@pytest.mark.parametrize(
    ("console", "shown"),
    [
        ({}, {"NAME of rank 0"}),
        ({"console": "rank-zero"}, {"NAME of rank 0"}),
        ({"console": "all"}, {"NAME of rank 0", "NAME of rank 1"}),
        ({"console": "tagged"}, {"[rank 0] NAME of rank 0", "[rank 1] NAME of rank 1"}),
        ({"console": "none"}, set()),
    ],
    ids=["default", "rank-zero", "all", "tagged", "none"],
)
def test_launch_shows_rank_zero_or_whom_it_is_told_to(
    capfd: pytest.CaptureFixture[str],
    run_dir: Path,
    console: dict[str, Any],
    shown: set[str],
) -> None:
    """Both streams, each on its own; the files hold every rank's output in any case."""
    ddpsafe.launch(programs.speak, run_dir=run_dir, **console, **TWO)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(line.replace("NAME", "out") for line in shown)
    assert sorted(err.splitlines()) == sorted(line.replace("NAME", "err") for line in shown)
    for rank in (0, 1):
        log = run_dir / "attempt-1" / f"rank-{rank}.out"
        assert log.read_text() == f"out of rank {rank}\n"


@pytest.mark.parametrize("tag", ["", "[rank N] "])
def test_spawn_shows_all_ranks_and_tears_no_line_apart(
    capfd: pytest.CaptureFixture[str], tag: str
) -> None:
    """Every line of every rank arrives whole, in the order of its rank, however it was written."""
    console: dict[str, Any] = {"console": "tagged"} if tag else {}
    ddpsafe.spawn(programs.write_in_pieces, nprocs=2, start_method="forkserver", **console)
    out, err = capfd.readouterr()
    assert err == ""
    for rank in (0, 1):
        head = tag.replace("N", str(rank)) + f"rank {rank} line "
        lines = [line.removeprefix(head) for line in out.splitlines() if line.startswith(head)]
        assert lines == [str(number) for number in range(programs.LINES)]
    assert out.count("\n") == 2 * programs.LINES


def test_a_line_of_several_ranks_is_shown_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is in the middle of a line does not spoil the line of another one."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    fields: dict[str, Any] = {"nprocs": 2, "start_method": "forkserver", "join": False}
    handle = ddpsafe.spawn(programs.write_half_a_line, (tmp_path,), **fields)
    assert handle is not None
    try:
        scripts.wait_until(lambda: "a whole line" in screen.getvalue())
        assert screen.getvalue() == "a whole line\n"
    finally:
        (tmp_path / "gate").touch()
        handle.join()
    assert screen.getvalue() == "a whole line\nfirst half, second half\n"


def test_a_progress_bar_is_shown_as_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carriage returns pass through, and a line without an end does not wait for its end."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ddpsafe.launch, programs.show_progress, (gate,), **TWO)
        try:
            scripts.wait_until(lambda: "50%" in screen.getvalue())
            assert screen.getvalue() == "\r  0%|     |\r 50%|██▌  |"
        finally:
            gate.touch()
        running.result()
    assert screen.getvalue() == "\r  0%|     |\r 50%|██▌  |\r100%|█████|\n"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", "café \ufffd\n"), ("latin-1", "café ?\n"), ("ascii", "caf? ?\n")],
)
def test_output_that_the_terminal_cannot_show_does_not_end_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str
) -> None:
    """A character may come in two parts; what is not text, or not the terminal's, is a mark."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    gate = tmp_path / "gate"
    options = {**TWO, "nproc_per_node": 1}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ddpsafe.launch, programs.write_bytes, (gate,), **options)
        try:
            scripts.wait_until(lambda: screen.buffer.getvalue() == b"caf")
        finally:
            gate.touch()
        running.result()
    assert screen.buffer.getvalue().decode(encoding) == expected


def test_a_console_without_streams_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may run with ``sys.stdout`` set to None."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    ddpsafe.launch(programs.speak, **TWO)


# While ranks start, and when all is well.

SCRIPT = """
    import sys, ddpsafe

    if __name__ == "__main__":
        import slow_import

        ddpsafe.launch(slow_import.train, nproc_per_node=2, start_method=sys.argv[1])
"""


def test_streams_of_the_programs_own_need_no_more_than_write(tmp_path: Path) -> None:
    """Such as those that copy what is written into a log."""
    source = """
        import sys
        import ddpsafe

        class Tee:
            def __init__(self, stream): self.stream = stream
            def write(self, text): return self.stream.write(text)

        def train(ctx): print("hello from", ctx.rank)

        if __name__ == "__main__":
            sys.stdout, sys.stderr = Tee(sys.stdout), Tee(sys.stderr)
            ddpsafe.launch(train, nproc_per_node=2)  # its start takes more than a second
            sys.stdout, sys.stderr = sys.stdout.stream, sys.stderr.stream
    """
    run = scripts.run(tmp_path, source)
    assert (run.code, run.lines(), run.err) == (0, ["hello from 0"], "")


def test_nothing_is_written_when_all_is_well(tmp_path: Path) -> None:
    """Not a warning, not a line about the start: also where Python shows every warning."""
    path = scripts.write(tmp_path, "script.py", SCRIPT)
    for method in ("spawn", "forkserver"):
        run = scripts.Script(["-X", "dev", str(path), method], folder=tmp_path).end()
        assert run.lines() == ["trained"]
        assert run.err == ""


RETRIED: Final = """
import sys
import ddpsafe


def train(ctx):
    print("hello")
    if ctx.attempt == 1 and ctx.rank == 0:
        raise ConnectionError("once")


if __name__ == "__main__":
    ddpsafe.launch(
        train, nproc_per_node=1, console=sys.argv[1], retry={"on": ConnectionError}
    )
"""


@pytest.mark.parametrize("console", ["none", "rank-zero"])
def test_a_console_that_shows_nothing_is_silent_about_a_retry_too(
    console: str, tmp_path: Path
) -> None:
    """Where the program has set up no logging, `"none"` keeps warnings off stderr; others do not."""
    path = scripts.write(tmp_path, "script.py", RETRIED)
    run = scripts.Script([str(path), console], folder=tmp_path).end()
    assert (run.code, "hello" in run.out) == (0, console != "none")
    assert ("trying again" in run.err) is (console != "none")
    assert console != "none" or run.err == ""


def test_pytest_shows_the_line_of_the_caller(tmp_path: Path) -> None:
    """Neither the docstring of `launch` nor a frame of ddpsafe stands before the error."""
    source = """
        import ddpsafe


        def train(ctx):
            raise ValueError("bad batch")


        def test_training():
            ddpsafe.launch(train, nproc_per_node=1, run_dir=__file__ + ".run")


        def test_config():
            ddpsafe.LaunchConfig(nprocs=2)


        def test_part():
            ddpsafe.Timeouts(grace="soon")
        """
    path = scripts.write(tmp_path, "test_user.py", source)
    run = scripts.Script(["-m", "pytest", "-q", "--no-header", str(path)], folder=tmp_path).end()
    assert run.code == 1
    assert "bad batch" in run.out
    assert ">       ddpsafe.launch(train, nproc_per_node=1" in run.out
    assert "Args:" not in run.out
    frames = re.findall(r"^(\S+\.py):\d+", run.out, re.MULTILINE)
    assert {Path(frame).name for frame in frames} == {"test_user.py"}


_COLOURS: Final = re.compile(r"\x1b\[[\d;]*m")


class Terminal:
    """A terminal on which a script runs, and what can be read on it."""

    def __init__(self, command: list[str], *, folder: Path, env: dict[str, str]) -> None:
        """Start the command on a new terminal."""
        self.text = ""
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**env, "TERM": "xterm", "COLUMNS": "120"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)

    def read(self) -> str:
        """Return everything that has been shown."""
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # nothing new, or the other end is closed
                return self.text
            if not data:
                return self.text
            self.text += _COLOURS.sub("", data.decode())

    def close(self) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(scripts.LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.read()
            os.close(self._ours)


def test_a_live_line_says_how_many_have_joined_and_who_is_missing(tmp_path: Path) -> None:
    """It counts up the seconds in one place, and is wiped away once all are there."""
    path = scripts.write(tmp_path, "script.py", SCRIPT)
    terminal = Terminal(
        [sys.executable, str(path), "forkserver"],
        folder=tmp_path,
        env={**scripts.clean_environment(), "SLOW_IMPORT": str(tmp_path)},
    )
    try:
        line = "ddpsafe: 1 of 2 ranks have joined, waiting for rank 1 ("
        scripts.wait_until(lambda: line in terminal.read(), otherwise=terminal.read)
        scripts.wait_until(lambda: len(set(re.findall(r"\((\d+) s\)", terminal.read()))) > 1)
        assert "\n" not in terminal.text.partition("ddpsafe:")[2]
    finally:
        (tmp_path / "gate").touch()
        code = terminal.close()
    assert code == 0
    assert terminal.text.endswith("trained\r\n")
    after_the_line = terminal.text.rpartition(" s)")[2]
    assert "\x1b[2K" in after_the_line  # the terminal's order to wipe a line
