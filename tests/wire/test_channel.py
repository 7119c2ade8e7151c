"""The pipe through which a rank reports, and what is reported of an exception."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ddpsafe
from ddpsafe import PreflightError
from ddpsafe._launcher.uncaught import presentable
from ddpsafe._wire.exception_facts import find_own_files, is_library, signal_that_ended_a_child
from ddpsafe._wire.messages import Entered, Position, Recovered, Returned
from ddpsafe._wire.rank_pipe import Receiver, Sender, StepCounter


class HandlerError(TimeoutError):
    """An exception raised by the user's signal handler; a TimeoutError is also an OSError."""


@pytest.fixture
def pipe() -> Iterator[tuple[Sender, Receiver]]:
    """Return the connected ends of a pipe."""
    read_fd, write_fd = os.pipe()
    receiver = Receiver(read_fd)
    yield Sender(write_fd), receiver
    receiver.close()
    os.close(write_fd)


def test_what_a_rank_continues_from_outlasts_its_next_checkpoints() -> None:
    """The step and the place, also if the step is 0."""
    with tempfile.TemporaryFile() as file:
        file.write(StepCounter.EMPTY)
        file.flush()
        counter = StepCounter(file.fileno())
        said = [counter.read().resumed_from]
        for step, in_memory in ((0, False), (7, True)):
            counter.note_checkpoint(step, is_new=False, in_memory=in_memory)
            counter.note_checkpoint(step + 1, is_new=True)
            said.append(counter.read().resumed_from)
        counter.close()
    assert said == ["", "step 0 on disk", "step 7 in memory"]


def test_nothing_follows_a_truncated_report(pipe: tuple[Sender, Receiver]) -> None:
    """The receiver would read the next report as the missing part."""
    sender, receiver = pipe

    def interrupt(*_: object) -> None:
        raise HandlerError

    before = signal.signal(signal.SIGUSR2, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(HandlerError):  # a pipe holds less than that, and nothing reads it
            sender.send(Returned(payload=bytes(1 << 21), position=Position(collectives=())))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    writing = threading.Thread(target=lambda: [sender.send(Entered(phase="running"))] * 2)
    writing.start()
    writing.join()
    for _ in range(3):
        assert receiver.receive() == []


def test_a_forked_child_of_the_rank_sends_nothing(pipe: tuple[Sender, Receiver]) -> None:
    """It inherits the pipe, but its reports are not the rank's."""
    sender, receiver = pipe
    pid = os.fork()
    if pid == 0:
        sender.send(Recovered())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert receiver.receive() == []


OURS: Final = str(Path(ddpsafe.__file__).parent)
STDLIB: Final = sysconfig.get_path("stdlib")
VENV: Final = "/venv/lib/python3.11/site-packages"
DEBIAN: Final = "/usr/local/lib/python3.12/dist-packages"

FILES: Final = [
    # the file, whether it belongs to a library or to Python, whether its traceback is hidden
    (f"{OURS}/_launch.py", True, True),
    (f"{STDLIB}/socket.py", True, True),
    ("<frozen importlib._bootstrap>", True, True),
    (f"{VENV}/ddpsafe/_launch.py", True, True),
    (f"{VENV}/tenacity/__init__.py", True, True),
    (f"{VENV}/torch/distributed/rendezvous.py", True, True),
    (f"{DEBIAN}/torch/distributed/rendezvous.py", True, True),
    (f"{STDLIB}/site-packages/torch/serialization.py", True, True),
    (f"{VENV}/numpy/core/multiarray.py", True, False),
    (f"{VENV}/torch_project/train.py", True, False),
    (f"{VENV}/train.py", True, False),
    (f"{DEBIAN}/project/train.py", True, False),
    (f"{STDLIB}/site-packages/project/train.py", True, False),
    ("<string>", True, False),  # the fork server's first line, or all of `python -c`
    ("/home/me/train.py", False, False),
    (f"{OURS}_project/train.py", "-packages" in OURS, False),
    (f"{STDLIB}-project/train.py", False, False),
]


@pytest.mark.parametrize(("file", "is_of_library"), [row[:2] for row in FILES])
def test_library_files_are_not_the_users(file: str, *, is_of_library: bool) -> None:
    """This holds wherever Python installs them: NVIDIA's containers use Debian's dist-packages."""
    assert is_library(file) is is_of_library


@pytest.mark.parametrize(("file", "is_hidden"), [(row[0], row[2]) for row in FILES])
def test_a_cause_keeps_its_traceback_if_a_line_may_be_the_users(
    file: str, *, is_hidden: bool
) -> None:
    """A project may be installed as libraries are, and its line is the one to look at."""
    error = PreflightError("It cannot be sent.")
    with pytest.raises(KeyError) as caught:
        exec(compile("raise KeyError", file, "exec"))
    error.__cause__ = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # type: ignore[union-attr] # type: ignore[union-attr] # without this file's line
    presentable(error)
    assert (caught.value.__traceback__ is None) is is_hidden


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ((f"{OURS}/x.py", "/me/a.py", f"{VENV}/numpy/n.py", "/me/b.py"), ("/me/a.py", "/me/b.py")),
        ((f"{OURS}/x.py", f"{VENV}/torch/t.py", f"{VENV}/project/a.py", f"{VENV}/numpy/n.py"),
            (f"{VENV}/project/a.py",)),
        (("<string>", f"{VENV}/project/a.py", f"{VENV}/numpy/n.py", f"{VENV}/project/b.py"),
            (f"{VENV}/project/a.py", f"{VENV}/project/b.py")),
        ((f"{VENV}/project/a.py", "/me/b.py"), ("/me/b.py",)),
        ((f"{STDLIB}/threading.py", f"{VENV}/torch/autograd/graph.py"), ()),
        ((), ()),
    ],
)  # fmt: skip
def test_the_users_files_are_found_in_a_stack(files: tuple[str, ...], own: tuple[str, ...]) -> None:
    """They are those outside the libraries; if there are none, the package that was called first."""
    assert find_own_files(files) == set(own)


class Decoder:
    """An object that owns a program, as a reader of videos does."""

    def __init__(self, signum: int) -> None:
        self.program = subprocess.Popen(["sleep", "60"])
        self.program.send_signal(signum)
        self.program.wait()

    def read(self) -> None:
        """Fail in words of its own."""
        raise RuntimeError("the decoder has closed its pipe")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_program_that_died_of_a_signal_is_found_where_the_exception_was_raised(
    signum: signal.Signals,
) -> None:
    """The exception is the script's own, and says nothing of a signal."""
    with pytest.raises(RuntimeError) as caught:
        Decoder(signum).read()
    assert signal_that_ended_a_child(caught.value) == signum


def test_a_program_that_is_running_ended_of_no_signal() -> None:
    """It is one of the frame's values, too."""
    with subprocess.Popen(["sleep", "60"]) as program:
        with pytest.raises(ZeroDivisionError) as caught:
            1 / 0  # noqa: B018 - raises
        assert signal_that_ended_a_child(caught.value) == 0
        program.kill()
