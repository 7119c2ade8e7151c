"""The launcher's terminal, as a rank's streams show it: programs draw progress bars, of the right width.

A rank writes to files. Its console draws them on a terminal, so to the program they are one: `tqdm`, rich,
click and others ask a stream whether it is, and then for its size.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpsafe._wire.log_overflow import LogStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ddpsafe._wire.log_overflow import LogOverflow
    from ddpsafe._wire.spec import LogFiles


class Terminal:
    """The terminal, whose size may change while the rank runs.

    Attributes:
        drawn: The descriptors, of 1 and 2, that the console draws on it.
    """

    def __init__(self, fd: int, logs: LogFiles) -> None:
        self._fd = os.dup(fd)
        self.drawn = logs.drawn
        self._tag_columns = logs.tag_columns
        self._stock = os.get_terminal_size
        self._noted: os.terminal_size | None = None
        self._is_noted = False
        # Not the whole answer: programs that are not Python, or that ask with an ioctl, get an error.
        os.get_terminal_size = self._get_terminal_size

    def note_environment(self) -> None:
        """From now on, keep the variables with the size, unless the user has set them."""
        self._is_noted = not {"COLUMNS", "LINES"} & os.environ.keys()
        self.note_size()

    def note_size(self) -> None:
        """Set the variables by which versions of tqdm before 4.68 learn the size."""
        if not self._is_noted:
            return
        try:
            size = self._get_terminal_size(*self.drawn[:1])
        except OSError:  # the terminal was closed
            return
        if size != self._noted:
            self._noted = size
            # With the sign, rich keeps asking for the size; digits alone it reads once and for all.
            os.environ.update(COLUMNS=f"+{size.columns}", LINES=f"+{size.lines}")

    def _get_terminal_size(self, fd: int = 1, /) -> os.terminal_size:
        if fd != 0 and fd not in self.drawn:
            return self._stock(fd)
        columns, lines = self._stock(0 if fd == 0 else self._fd)
        if not (columns and lines):  # as in a container without a size
            columns, lines = columns or _number("COLUMNS", 80), lines or _number("LINES", 24)
        return os.terminal_size((max(1, columns - self._tag_columns), lines))


class TerminalStream(LogStream):
    """The lowest layer of a stream that the console draws."""

    def __init__(self, fd: int, overflow: LogOverflow, terminal: Terminal) -> None:
        super().__init__(fd, overflow)
        self._terminal = terminal

    def isatty(self) -> bool:
        """Return whether it is a terminal, as the console makes it."""
        return not self.closed

    def write(self, data: Buffer, /) -> int:
        """Write all of it."""
        self._terminal.note_size()
        return super().write(data)


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def find_terminal(logs: LogFiles) -> Terminal | None:
    """Return the terminal on which the console draws, before the streams are redirected; ``None`` without one."""
    fd = next((fd for fd in (*logs.drawn, 0) if os.isatty(fd)), None) if logs.drawn else None
    return None if fd is None else Terminal(fd, logs)
