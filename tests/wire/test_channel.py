"""The pipe on which a rank reports."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from ddpsafe._wire.messages import Entered, Position, Recovered, Returned
from ddpsafe._wire.rank_pipe import Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class HandlerError(TimeoutError):
    """What a signal handler of the user's raises; a TimeoutError is an OSError, too."""


@pytest.fixture
def pipe() -> Iterator[tuple[Sender, Receiver]]:
    """Connect the two ends."""
    read_fd, write_fd = os.pipe()
    receiver = Receiver(read_fd)
    yield Sender(write_fd), receiver
    receiver.close()
    os.close(write_fd)


def test_nothing_follows_a_report_that_was_cut_short(pipe: tuple[Sender, Receiver]) -> None:
    """What came after it would be read as the part that is missing."""
    sender, receiver = pipe

    def interrupt(*_: object) -> None:
        raise HandlerError

    before = signal.signal(signal.SIGUSR2, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(HandlerError):  # a pipe holds less than that, and there is no reader
            sender.send(Returned(payload=bytes(1 << 21), position=Position(collectives=())))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    writing = threading.Thread(target=lambda: [sender.send(Entered(phase="running"))] * 2)
    writing.start()
    writing.join()
    for _ in range(3):
        assert receiver.receive() == []


def test_reports_arrive_whole_and_in_order(pipe: tuple[Sender, Receiver]) -> None:
    """However large they are."""
    sender, receiver = pipe
    large = Returned(payload=bytes(1 << 21), position=Position(collectives=()))
    writing = threading.Thread(
        target=lambda: [sender.send(large), sender.send(Entered(phase="running"))]
    )
    writing.start()
    received: list[object] = []
    while len(received) < 2:
        received += receiver.receive()
    writing.join()
    assert received == [large, Entered(phase="running")]


def test_a_fork_of_the_rank_says_nothing(pipe: tuple[Sender, Receiver]) -> None:
    """It inherits the pipe, but what it has to say is not what the rank has to say."""
    sender, receiver = pipe
    pid = os.fork()
    if pid == 0:
        sender.send(Recovered())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert receiver.receive() == []


def test_nothing_is_written_to_what_has_taken_the_number_of_the_pipe(tmp_path: Path) -> None:
    """A script that closes all descriptors may get the same numbers for files of its own."""
    read_fd, write_fd = os.pipe()
    sender = Sender(write_fd)
    own = tmp_path / "own"
    with own.open("wb") as file:
        os.dup2(file.fileno(), write_fd)  # closes the pipe, too
        sender.send(Recovered())
    os.close(write_fd)
    os.close(read_fd)
    assert own.read_bytes() == b""
    assert sender.is_lost
