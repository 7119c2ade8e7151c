"""Writing to the user's streams, whose reader may pause for as long as it likes.

A write may block for ever, so it belongs in a daemon thread.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from typing import TYPE_CHECKING, Final, TextIO

from ddpsafe._logging import current_fields, is_json, json_line

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE_S: Final = 1.0


def write_in_pieces(stream: TextIO, text: str) -> Iterator[None]:
    """Write piece by piece, and yield after each; what cannot be encoded becomes question marks.

    Errors are ignored: the stream may be closed, or be an object of the program's own that lacks
    some of a stream's methods. Pieces end at line ends, and a pipe takes each piece in one write, so
    the lines of two launches are not mixed up.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    data = text.encode(encoding, "replace")
    with contextlib.suppress(Exception):
        fd = _find_descriptor(stream)
        if fd is None:
            _write(stream, data.decode(encoding))
            yield
            return
        stream.flush()  # what was printed earlier comes first
        for piece in _pieces(data):
            try:
                left = piece
                while left:
                    with contextlib.suppress(BlockingIOError):
                        left = left[os.write(fd, left) :]
                        continue
                    # Another process that shares the pipe has made it non-blocking.
                    select.select([], [fd], [])
            except BrokenPipeError:
                # Leave it to Python, which reports it at exit as after any print.
                _write(stream, piece.decode(encoding, "replace"))
            except OSError as error:
                _tell_of_loss(error)
                return
            yield


_has_told_of_loss: Final = threading.Event()


def _tell_of_loss(error: OSError) -> None:
    """Tell once on stderr that a stream takes no more, such as a file on a full disk: that ends no job."""
    if not _has_told_of_loss.is_set():
        _has_told_of_loss.set()
        write_message(
            f"the output cannot be written: {error.strerror}. The job continues without it; with run_dir= "
            "(--run-dir), the logs are kept"
        )


def write_message(line: str) -> None:
    """Write a line of the launcher's own to stderr, without waiting long if that is blocked."""
    write_line(json_line("WARNING", line, current_fields()) if is_json() else f"ddpsafe: {line}")


def write_line(line: str) -> None:
    """Write a line to stderr as it is, without waiting long if that is blocked."""
    stream = sys.stderr
    if stream is None:  # a service may have none
        return
    text = f"{line}\n"
    writer = threading.Thread(target=lambda: list(write_in_pieces(stream, text)), daemon=True)
    try:
        writer.start()
    except RuntimeError:  # Python 3.12 and later start no thread at exit
        list(write_in_pieces(stream, text))
    else:
        writer.join(_LINE_S)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal; false for an object that cannot say."""
    with contextlib.suppress(Exception):
        return bool(stream.isatty())
    return False


def _find_descriptor(stream: TextIO) -> int | None:
    """Return the file descriptor of one of Python's own streams; ``None`` for any other object.

    A thread that is blocked in a buffered stream holds its lock, and the interpreter, which flushes
    the stream at exit, could not exit. In `os.write` it holds no lock.
    """
    if type(stream) is not io.TextIOWrapper or "write" in vars(stream):  # wandb replaces `write`
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)  # without a buffer under python -u
    return raw.fileno() if isinstance(raw, io.FileIO) else None


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _pieces(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = start + select.PIPE_BUF
        if end < len(data):
            end = data.rfind(b"\n", start, end) + 1 or end
        yield data[start:end]
        start = end
