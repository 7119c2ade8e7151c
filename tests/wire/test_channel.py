"""The pipe through which a rank reports."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator

import pytest

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
