"""The console shows the ranks' output, a line while they start, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import console_programs as programs
import pytest
import scripts

import ddpsafe
from ddpsafe._launcher.watch.console import Console, _Tail, shown_log, tag_of
from ddpsafe._launcher.watch.signals import open_inbox
from ddpsafe._logging import is_json
from ddpsafe._world import World

TWO: Final[dict[str, Any]] = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}


# Whose output.


@pytest.mark.full(but=["rank-zero"])
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
def test_launch_shows_rank_zero_or_the_ranks_that_console_selects(
    capfd: pytest.CaptureFixture[str], run_dir: Path, console: dict[str, Any], shown: set[str]
) -> None:
    """The two streams stay separate, and the log files always have every rank's output."""
    ddpsafe.launch(programs.speak, run_dir=run_dir, **console, **TWO)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(line.replace("NAME", "out") for line in shown)
    assert sorted(err.splitlines()) == sorted(line.replace("NAME", "err") for line in shown)
    for rank in (0, 1):
        log = run_dir / "attempt-1" / f"rank-{rank}.out"
        assert log.read_text() == f"out of rank {rank}\n"


@pytest.mark.full
@pytest.mark.parametrize("tag", ["", "[rank N] "])
def test_spawn_shows_all_ranks_with_whole_lines(
    capfd: pytest.CaptureFixture[str], tag: str
) -> None:
    """Lines of different ranks are never mixed, and those of one rank keep their order."""
    console: dict[str, Any] = {"console": "tagged"} if tag else {}
    ddpsafe.spawn(programs.write_in_pieces, nprocs=2, start_method="forkserver", **console)
    out, err = capfd.readouterr()
    assert err == ""
    for rank in (0, 1):
        head = tag.replace("N", str(rank)) + f"rank {rank} line "
        lines = [line.removeprefix(head) for line in out.splitlines() if line.startswith(head)]
        assert lines == [str(number) for number in range(programs.LINES)]
    assert out.count("\n") == 2 * programs.LINES


def test_with_several_ranks_a_line_is_shown_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's unfinished line does not break the line of another rank."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    fields: dict[str, Any] = {"nprocs": 2, "start_method": "forkserver", "join": False}
    handle = ddpsafe.spawn(programs.write_half_a_line, (tmp_path,), **fields)
    assert handle is not None
    try:
        scripts.wait_until(lambda: "a whole line" in screen.getvalue())
        # What is left of a line for half a second may be a prompt, and is shown as a line of its own.
        assert screen.getvalue() in ("a whole line\n", "first half, \na whole line\n")
    finally:
        (tmp_path / "gate").touch()
        handle.join()
    assert screen.getvalue() in (
        "a whole line\nfirst half, second half\n",
        "first half, \na whole line\nsecond half\n",
        "a whole line\nfirst half, \nsecond half\n",
    )


def test_a_progress_bar_is_shown_as_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carriage returns pass through, and an unfinished line is shown at once."""
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", "café \ufffd\n"), ("latin-1", "café ?\n"), ("ascii", "caf? ?\n")],
)
def test_output_that_the_terminal_cannot_show_does_not_end_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str
) -> None:
    """A character may arrive in two parts; one that cannot be shown becomes a replacement mark."""
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


@pytest.mark.full
def test_a_launch_works_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may run with ``sys.stdout`` set to None."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    ddpsafe.launch(programs.speak, **TWO)


# While ranks start, and when no rank fails.

SCRIPT = """
    import sys, ddpsafe

    if __name__ == "__main__":
        import slow_import

        ddpsafe.launch(slow_import.train, nproc_per_node=2, start_method=sys.argv[1])
"""


@pytest.mark.full
def test_a_programs_own_stream_needs_only_a_write_method(tmp_path: Path) -> None:
    """Programs replace ``sys.stdout`` by an object that also writes to a log."""
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


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_a_successful_launch_writes_nothing(tmp_path: Path, method: str) -> None:
    """There is no warning and no line about the start, even where Python shows every warning."""
    path = scripts.write(tmp_path, "script.py", SCRIPT)
    run = scripts.Script(["-X", "dev", str(path), method], folder=tmp_path).end()
    assert run.lines() == ["trained"]
    assert run.err == ""


RETRIED: Final = """
import sys
import threading
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


@pytest.mark.full
@pytest.mark.parametrize("console", ["none", "rank-zero"])
def test_console_none_hides_the_warning_of_a_retry(console: str, tmp_path: Path) -> None:
    """If the program has not set up logging, only `"none"` keeps warnings off stderr."""
    path = scripts.write(tmp_path, "script.py", RETRIED)
    run = scripts.Script([str(path), console], folder=tmp_path).end()
    assert (run.code, "hello" in run.out) == (0, console != "none")
    assert ("trying again" in run.err) is (console != "none")
    assert console != "none" or run.err == ""


@pytest.mark.full
def test_pytest_shows_the_line_of_the_caller(tmp_path: Path) -> None:
    """Neither the docstring of `launch` nor a frame of ddpsafe precedes the error."""
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
    # Output of a rank, such as a warning of torch, may begin like a frame.
    options = ("-q", "--no-header", "--show-capture=no", "--disable-warnings")
    run = scripts.Script(["-m", "pytest", *options, str(path)], folder=tmp_path).end()
    assert run.code == 1
    assert "bad batch" in run.out
    assert ">       ddpsafe.launch(train, nproc_per_node=1" in run.out
    assert "Args:" not in run.out
    frames = re.findall(r"^(\S+\.py):\d+", run.out, re.MULTILINE)
    assert {Path(frame).name for frame in frames} == {"test_user.py"}


_COLOURS: Final = re.compile(r"\x1b\[[\d;]*m")


class Terminal:
    """A terminal on which a script runs, and the text that it shows."""

    def __init__(self, arguments: list[str], *, folder: Path, env: dict[str, str]) -> None:
        """Start ``python *arguments`` on a new terminal of 120 columns."""
        self.text = ""
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.resize(120)
        self.process = scripts.start(
            arguments,
            folder=folder,
            streams=(theirs, theirs, theirs),
            environment={
                **{name: text for name, text in env.items() if name not in {"COLUMNS", "LINES"}},
                "TERM": "xterm",
            },
        )
        os.close(theirs)

    def resize(self, columns: int) -> None:
        """Make it wider or narrower."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))

    def lines(self) -> list[str]:
        """Return the lines that it shows, as far as ddpsafe draws them: it wipes rows from the last one up."""
        shown = [""]
        for part in re.split(r"(\r?\n|\r\x1b\[2K|\x1b\[1A)", self.read()):
            if part in {"\n", "\r\n"}:
                shown.append("")
            elif part == "\r\x1b[2K":
                shown[-1] = ""
            elif part == "\x1b[1A":
                shown.pop()
            else:
                shown[-1] += part
        return shown

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
        """Wait until the script exits; return its exit code."""
        try:
            return self.process.wait(scripts.LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.read()
            os.close(self._ours)


@pytest.mark.full
def test_a_live_line_shows_how_many_ranks_have_joined_and_which_are_missing(tmp_path: Path) -> None:
    """It counts the seconds in place, and is erased once all ranks have joined."""
    path = scripts.write(tmp_path, "script.py", SCRIPT)
    terminal = Terminal(
        [str(path), "forkserver"],
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
    assert "\x1b[2K" in after_the_line  # the terminal's sequence to erase a line


BARS: Final = """
import os, sys
import ddpsafe


def train(ctx, kind, gates):
    name, total = f"rank {ctx.rank}", len(gates) + 2
    if kind.startswith("tqdm"):
        from tqdm import tqdm
        options = {"dynamic_ncols": "dynamic" in kind, "mininterval": 0}
        if "disable" in kind:
            options["disable"] = None  # draws if the stream is a terminal
        bars = [tqdm(total=total, desc=f"{name} trains", **options)]
        if "nested" in kind:
            bars.append(tqdm(total=total, desc=f"{name} loads", leave=False, **options))
        def step():
            for bar in bars: bar.update()
        def close():
            for bar in reversed(bars): bar.close()
        note = tqdm.write
    else:
        from rich.progress import Progress
        progress = Progress(auto_refresh=False)
        progress.start()
        bars = [progress.add_task(f"{name} {what}", total=total) for what in ("trains", "loads")]
        def step():
            for bar in bars: progress.advance(bar)
            progress.refresh()
        close, note = progress.stop, progress.console.print
    step()
    for gate in gates:
        while not os.path.exists(gate):
            pass
        note(f"{name} notes {os.path.basename(gate)}")
        step()
    step()
    close()
    print(name, "is done")


if __name__ == "__main__":
    ddpsafe.launch(
        train, (sys.argv[1], sys.argv[4:]), nproc_per_node=2, console=sys.argv[2], start_method=sys.argv[3]
    )
"""


@pytest.mark.full(but=["tqdm-nested-all", "rich-all"])
@pytest.mark.parametrize("console", ["rank-zero", "all", "tagged"])
@pytest.mark.parametrize("kind", ["tqdm", "tqdm-disable", "tqdm-nested", "rich"])
def test_progress_bars_are_drawn_on_a_terminal(tmp_path: Path, kind: str, console: str) -> None:
    """Each rank's stay below what is printed, take no line of another rank, and are complete at the end."""
    path = scripts.write(tmp_path, "script.py", BARS)
    gate, end = tmp_path / "gate", tmp_path / "end"
    terminal = Terminal(
        [str(path), kind, console, "forkserver", str(gate), str(end)],
        folder=tmp_path,
        env=scripts.clean_environment(),
    )
    ranks = [0] if console == "rank-zero" else [0, 1]
    names = [f"rank {rank}" for rank in ranks]
    tags = {name: f"[{name}] " if console == "tagged" else "" for name in names}
    bars = ["trains", "loads"] if kind in {"tqdm-nested", "rich"} else ["trains"]

    def rows() -> list[str]:
        return [each for each in terminal.lines() if "%" in each]

    def are_at(percent: int) -> bool:
        expected = [f"{tags[name]}{name} {bar}" for name in names for bar in bars]
        return len(rows()) == len(expected) and all(
            row.startswith(start) and f"{percent}%" in row
            for row, start in zip(rows(), expected, strict=True)
        )

    try:
        scripts.wait_until(lambda: are_at(25), otherwise=terminal.read)
        gate.touch()
        scripts.wait_until(lambda: are_at(50), otherwise=terminal.read)
        *_, last = [line for line in terminal.lines() if "%" not in line]
        assert last in [f"{tags[name]}{name} notes gate" for name in names]
    finally:
        gate.touch()
        end.touch()
        code = terminal.close()
    assert code == 0
    kept = ["trains"] if kind == "tqdm-nested" else bars
    shown = [line for line in terminal.lines() if line]
    for name in names:
        own = [
            line.removeprefix(tags[name]) for line in shown if line.startswith(tags[name] + name)
        ]
        drawn = [line.partition("100%")[0].strip(" ━:") for line in own if "100%" in line]
        assert drawn == [f"{name} {bar}" for bar in kept]
        written = [line for line in own if "%" not in line]
        assert written == [f"{name} {what}" for what in ("notes gate", "notes end", "is done")]
        assert own[-1] == f"{name} is done"  # after the bars, on whatever stream they are
    assert len(shown) == len(names) * (3 + len(kept))
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h") == 0


@pytest.mark.full(but=["tqdm-dynamic-forkserver"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["tqdm-dynamic", "rich"])
def test_bars_are_as_wide_as_the_terminal_is_now(tmp_path: Path, kind: str, method: str) -> None:
    """The fork server has imported tqdm, and a terminal may be made narrower at any time."""
    path = scripts.write(tmp_path, "script.py", BARS)
    gate, end = tmp_path / "gate", tmp_path / "end"
    terminal = Terminal(
        [str(path), kind, "tagged", method, str(gate), str(end)],
        folder=tmp_path,
        env=scripts.clean_environment(),
    )

    def is_drawn(percent: str, width: int) -> bool:
        widths = {len(line) for line in terminal.lines() if percent in line}
        # tqdm leaves the last column free, and rich's bar has a width of its own.
        return widths == {width - 1} or (kind == "rich" and max(widths, default=width + 1) <= width)

    try:
        scripts.wait_until(lambda: is_drawn("25%", 120), otherwise=terminal.read)
        terminal.resize(50)
        gate.touch()
        # Whole: what does not fit is not shown, and the number is on the right of rich's bar.
        scripts.wait_until(lambda: is_drawn("50%", 50), otherwise=terminal.read)
    finally:
        gate.touch()
        end.touch()
        code = terminal.close()
    assert code == 0


ASKING: Final = """
import os, subprocess, sys
import ddpsafe

def train(ctx):
    for stream in (sys.stdout, sys.stderr):
        try:
            size = tuple(os.get_terminal_size(stream.fileno()))
        except OSError:
            size = None
        print(stream.isatty(), size, file=sys.stderr)
    child = "import sys; print(sys.stdout.isatty())"
    print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)

if __name__ == "__main__":
    ddpsafe.launch(train, nproc_per_node=1, console=sys.argv[1], start_method="forkserver")
"""


@pytest.mark.full
def test_a_rank_is_told_what_its_console_is(tmp_path: Path) -> None:
    """Its streams are terminals only where its output is drawn on one; what it starts is not told so."""
    path = scripts.write(tmp_path, "script.py", ASKING)
    piped = scripts.Script([str(path), "all"], folder=tmp_path).end()
    assert (piped.err.split("\n")[:2], piped.lines()[:1]) == (["False None"] * 2, ["False"])
    for console, expected in (("all", "True (120, 40)"), ("tagged", "True (111, 40)")):
        terminal = Terminal([str(path), console], folder=tmp_path, env=scripts.clean_environment())
        assert terminal.close() == 0
        tag = "[rank 0] " * (console == "tagged")
        lines = terminal.lines()
        assert lines.count(tag + expected) == 2
        assert tag + "False" in lines


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tqdm", "tqdm-nested"])
def test_a_redrawn_line_is_one_line_in_a_file(tmp_path: Path, kind: str) -> None:
    """In a file, a bar that several ranks redraw often appears once per rank, in its final state."""
    path = scripts.write(tmp_path, "script.py", BARS)
    (tmp_path / "gate").touch()
    run = scripts.Script(
        [str(path), kind, "tagged", "forkserver", str(tmp_path / "gate")], folder=tmp_path
    ).end()
    assert run.code == 0
    assert "\r" not in run.err
    for rank in (0, 1):
        name = f"rank {rank}"
        (bar,) = [line for line in run.err.splitlines() if name in line]
        assert bar.startswith(f"[{name}] {name} trains: 100%"), run.err
        out = [line for line in run.lines() if line.startswith(f"[{name}]")]
        assert out == [f"[{name}] {name} notes gate", f"[{name}] {name} is done"]


def tail_of(file: Path, show: str) -> _Tail:
    """Return what follows the log of rank 0."""
    spec = SimpleNamespace(world=World.alone(), attempt=1)
    process: Any = SimpleNamespace(spec=spec, rank=0, overflow={})
    return _Tail(process, str(file), sys.stdout, name="stdout", show=show, is_alone=False)


@pytest.mark.parametrize(
    ("show", "steps", "shown"),
    [
        ("all", ["name? ", 0.1, "Ada\n"], ["", "", "name? Ada\n"]),
        ("all", ["name? ", 0.6, 0.6, "Ada\n"], ["", "name? ", "", "Ada\n"]),
        ("tagged", ["name? ", 0.6, "Ada\nage? ", 0.6], ["", "[rank 0] name? ", "Ada\n", "[rank 0] age? "]),
        ("all", ["one", 0.6, " two", 0.6, "\n"], ["", "one", "", " two", "\n"]),
        ("all", ["name? ", 0.6, "\r50%"], ["", "name? ", ""]),
        ("all", ["name? ", 0.6, "\r50%\n"], ["", "name? ", "\n50%\n"]),
        ("json", ["name? ", 0.6], ["", ""]),
    ],
)  # fmt: skip
def test_a_line_that_stays_unfinished_is_shown(
    tmp_path: Path, show: str, steps: list[str | float], shown: list[str]
) -> None:
    """It is a prompt, and whoever is asked has to see it; what follows continues the line."""
    file = tmp_path / "out"
    file.touch()
    tail = tail_of(file, show)
    found, now_s = [], 0.0
    for step in steps:
        if isinstance(step, float):
            now_s += step
        else:
            with file.open("a", newline="") as log:
                log.write(step)
        tail.read(now_s, final=False)
        found.append(tail.take(final=False) + tail.take_unfinished(now_s))
    tail.close()
    assert found == shown


def test_a_script_that_asks_shows_its_question_and_reads_the_answer(tmp_path: Path) -> None:
    """``input()`` and debuggers work in local rank 0 of ``ddpsafe run``, also through pipes."""
    scripts.write(tmp_path, "train.py", "print('hello', input('name? '))")
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "1", "train.py"]
    with subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(6) == b"name? "
        process.stdin.write(b"Ada\n")
        process.stdin.flush()
        assert process.stdout.read() == b"hello Ada\n"
    assert process.returncode == 0


@pytest.mark.full
def test_no_color_turns_colours_off(tmp_path: Path) -> None:
    """``NO_COLOR`` applies to ddpsafe's reports on a terminal."""
    scripts.write(tmp_path, "no-torch/torch.py", "raise ImportError('its import takes a second')")
    found = {}
    for name in ("TERM", "NO_COLOR"):  # the first is set in any case
        reader, writer = pty.openpty()
        process = scripts.start(
            ["-m", "ddpsafe", "doctor", "--no-mesh", "--verbose"],
            folder=tmp_path,
            environment={
                **scripts.clean_environment(),
                "PYTHONPATH": str(tmp_path / "no-torch"),
                "TERM": "xterm",
                name: "xterm",
            },
            streams=(writer, writer, writer),
        )
        os.close(writer)
        text = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(reader, 65536):
                text += data
        process.wait(scripts.LIMIT_S)
        os.close(reader)
        found[name] = re.findall(rb"\x1b\[[\d;]*3[0-7][\d;]*m", text)
    assert found["TERM"]
    assert not found["NO_COLOR"]


# Lines of JSON, and fields of records.

JSON: Final = """
import logging, sys
import ddpsafe


def train(ctx):
    logging.basicConfig(format="%(name)s: rank %(rank)s of %(world_size)s, attempt %(attempt)s")
    print(f"out of {ctx.rank}")
    print("0%\\r50%\\r100%", file=sys.stderr)
    logging.getLogger("user").warning("said", extra={"local_rank": "theirs"})
    ctx.barrier()  # a rank that has not written yet would be ended with the other one
    if ctx.rank == 1:
        raise ConnectionError(f"attempt {ctx.attempt}")


if __name__ == "__main__":
    ddpsafe.launch(
        train,
        nproc_per_node=2,
        console="json",
        run_dir=sys.path[0] + "/run",
        start_method="forkserver",
        retry={"on": ConnectionError, "attempts": 2},
    )
"""


@pytest.mark.full
def test_every_line_of_a_json_console_is_an_object(tmp_path: Path) -> None:
    """This includes lines of ranks, on their own stream, warnings, and the final error."""
    run = scripts.run(tmp_path, JSON)
    assert run.code == 1
    out = [json.loads(line) for line in run.out.splitlines()]
    err = [json.loads(line) for line in run.err.splitlines()]
    for each in [*out, *err]:
        assert {"time", "level", "message", "rank", "attempt", "node", "host"} <= each.keys()
        assert datetime.fromisoformat(each["time"]).tzinfo is not None
    assert sorted((each["attempt"], each["rank"], each["message"]) for each in out) == [
        (attempt, rank, f"out of {rank}") for attempt in (1, 2) for rank in (0, 1)
    ]
    assert {(each["node"], each["stream"]) for each in out} == {(0, "stdout")}
    theirs = [(each["attempt"], each["rank"], each["message"]) for each in err if "stream" in each]
    assert sorted(theirs) == sorted(
        (attempt, rank, text)
        for attempt in (1, 2)
        for rank in (0, 1)
        for text in ("100%", f"user: rank {rank} of 2, attempt {attempt}")
    )
    *_, warning, error = [each for each in err if "stream" not in each]
    assert (warning["level"], warning["attempt"], warning["rank"]) == ("WARNING", 1, None)
    assert "trying again" in warning["message"]
    assert (error["level"], error["attempt"], error["rank"]) == ("ERROR", 2, 1)
    assert (error["error"], error["kind"], error["exit_code"]) == ("RankRaisedError", "network", 1)
    assert "attempt 2" in error["message"]
    assert "ConnectionError" in error["traceback"]


JSON_THEN_TEXT: Final = """
import sys

import ddpsafe

TWO = {"nproc_per_node": 2, "start_method": "forkserver"}


def fail(ctx):
    raise ValueError("no data")


if __name__ == "__main__":
    try:
        ddpsafe.launch(fail, console="json", run_dir=sys.path[0] + "/json", **TWO)
    except ddpsafe.LaunchError:
        ddpsafe.launch(fail, console="none", run_dir=sys.path[0] + "/text", **TWO)
"""


@pytest.mark.full
def test_an_error_is_shown_in_the_form_of_its_own_launch(tmp_path: Path) -> None:
    """The console of an earlier launch no longer applies."""
    err = scripts.run(tmp_path, JSON_THEN_TEXT).err
    assert "Traceback (most recent call last)" in err
    assert "ddpsafe.RankRaisedError: rank " in err
    assert "{" not in err


JSON_TO_THE_END: Final = """
import os, signal, sys, time

import ddpsafe

FIELDS = {"console": "json", "run_dir": sys.path[0] + "/run"}


def end(ctx, launcher):
    os.kill(launcher, signal.SIGTERM)
    time.sleep(60)


def fail(rank):
    raise ValueError("no data")


if __name__ == "__main__":
    if sys.argv[1] == "signal":
        launcher = os.getpid()
        ddpsafe.launch(end, (launcher,), nproc_per_node=1, start_method="forkserver", **FIELDS)
    ddpsafe.spawn(fail, (), 1, join=False, start_method="forkserver", **FIELDS)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("signal", -signal.SIGTERM, "SIGTERM; no rank is left running"),
        ("not joined", 0, "ranks that were never joined have failed"),
    ],
)
def test_a_message_after_a_json_launch_is_an_object_too(
    tmp_path: Path, how: str, code: int, words: str
) -> None:
    """A signal is reported when the launch closes, and a failure when the script exits."""
    run = scripts.run(tmp_path, JSON_TO_THE_END, how)
    assert run.code == code, run.err
    said = [json.loads(line) for line in run.err.splitlines()]
    assert words in said[-1]["message"]


def test_a_launch_that_ends_keeps_the_form_of_open_launches(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Launches in several threads end in any order, and two of them may use the same form."""
    with shown_log("json"), shown_log("none"):
        with shown_log("json"):
            assert is_json()
        assert not is_json()
        logging.getLogger("ddpsafe").warning("not shown")
    assert not is_json()
    assert capfd.readouterr().err == ""


def test_a_logged_traceback_is_shown_as_python_shows_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program has not set up logging, the message alone would show no cause."""
    log = logging.getLogger("ddpsafe")
    monkeypatch.setattr(log, "propagate", False)  # pytest's handlers are at the root
    with pytest.raises(OSError, match="no port") as caught:
        raise OSError("no port")
    with shown_log("rank-zero"):
        log.error("could not open the round", exc_info=caught.value)
    first, second, *_, last = capfd.readouterr().err.splitlines()
    assert (first, last) == ("could not open the round", "OSError: no port")
    assert second == "Traceback (most recent call last):"


def test_no_line_is_lost_while_the_console_closes(capfd: pytest.CaptureFixture[str]) -> None:
    """Another thread may log a warning at that moment."""
    said = 300
    with open_inbox() as inbox:
        for number in range(said):
            console = Console([], "all", inbox=inbox, limit=None)
            console._ended.set()
            speaker = threading.Thread(target=console.show, args=[f"line {number}"])
            if number % 2:
                console._thread.join()  # it has taken its last look
            speaker.start()
            console.finish()
            speaker.join()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"line {number}" for number in range(said))


@pytest.mark.full
def test_records_of_the_launcher_have_the_rank_fields(
    caplog: pytest.LogCaptureFixture, run_dir: Path
) -> None:
    """A formatter of the program may use the fields for every record of ddpsafe."""
    fields: Any = {"retry": {"on": ConnectionError}, "console": "none", "run_dir": run_dir}
    ddpsafe.launch(programs.fail_once, **fields, **TWO)
    (record,) = [each for each in caplog.records if "trying again" in each.getMessage()]
    assert logging.Formatter("%(rank)s %(attempt)s %(node_rank)s").format(record) == "None 1 0"


def test_quiet_hides_notes_and_warnings_only(tmp_path: Path) -> None:
    """The ranks' output and the error of the launch are still shown."""
    scripts.write(tmp_path, "train.py", "print('out'); raise ConnectionError('lost')")
    command = "-m ddpsafe run --quiet --nproc-per-node 1 --run-dir run --role x --max-restarts 1"
    command += " --start-method forkserver train.py"
    run = scripts.Script(command.split(), folder=tmp_path).end()
    assert (run.code, run.out) == (1, "out\nout\n")
    assert "RankRaisedError" in run.err
    assert "trying again" not in run.err
    assert "has no effect" not in run.err


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (None, "[rank 3] "),
        ("[rank${rank}]: ", "[rank3]: "),
        ("${role_name}/${local_rank}> ", "default/1> "),
        ("${unknown} $", "${unknown} $"),
    ],
)
def test_a_line_begins_as_the_template_of_torchrun_says(
    template: str | None, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts that read the output of torchrun set it; text that is not a variable stays."""
    monkeypatch.delenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", raising=False)
    if template is not None:
        monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", template)
    assert tag_of(3, 1) == tag
