"""Writing to the user's streams, whose reader may pause for as long as it likes.

Whoever writes here may wait for ever, so it does so in a daemon thread.
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


def pour(stream: TextIO, text: str) -> Iterator[None]:
    """Write piece by piece, and yield after each; a stream that is closed or gone takes nothing.

    So does an object of the program's own with half of a stream's methods.

    Pieces end where lines do, and a pipe takes each of them whole or not at all: lines of two
    launches are not torn apart.

    Args:
        stream: Where to.
        text: What; characters that the stream cannot show become marks.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    data = text.encode(encoding, "replace")
    with contextlib.suppress(Exception):
        fd = _find_descriptor(stream)
        if fd is None:
            _write(stream, data.decode(encoding))
            yield
            return
        stream.flush()  # what was printed before comes first
        for piece in _pieces(data):
            try:
                left = piece
                while left:
                    with contextlib.suppress(BlockingIOError):
                        left = left[os.write(fd, left) :]
                        continue
                    # Another process that shares the pipe has made it so.
                    select.select([], [fd], [])
            except BrokenPipeError:
                # At exit Python complains of what it could not write, as after any print.
                _write(stream, piece.decode(encoding, "replace"))
            yield


def say(line: str) -> None:
    """Write a line of the launcher's own to stderr, unless it is stuck."""
    write_line(json_line("WARNING", line, current_fields()) if is_json() else f"ddpsafe: {line}")


def write_line(line: str) -> None:
    """Write a line to stderr as it is, unless it is stuck."""
    stream = sys.stderr
    if stream is None:  # a service may have none
        return
    text = f"{line}\n"
    speaker = threading.Thread(target=lambda: list(pour(stream, text)), daemon=True)
    try:
        speaker.start()
    except RuntimeError:  # no thread is to be had, as at the end of Python 3.12 and later
        list(pour(stream, text))
    else:
        speaker.join(_LINE_S)


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a person reads it; an object of the program's own may not say."""
    with contextlib.suppress(Exception):
        return bool(stream.isatty())
    return False


def _find_descriptor(stream: TextIO) -> int | None:
    """Find where one of Python's own streams writes to; what another one does is its own matter.

    A thread that is stuck in a buffered stream holds its lock, and the interpreter, which flushes
    the stream at its end, could not end. In `os.write` it holds nothing.
    """
    if type(stream) is not io.TextIOWrapper or "write" in vars(stream):  # wandb puts its own there
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer in between
    return raw.fileno() if type(raw) is io.FileIO else None


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
