"""What the user sees while ranks run: their output, and a line while they start.

A thread of its own shows it. A console that is not read (a pager, a stalled ssh) would stop the
watch of the ranks as well, and with it every deadline.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from ddpsafe._clock import AwakeClock, Deadline
from ddpsafe._errors import ranks_text
from ddpsafe._launcher.watch.signals import is_order
from ddpsafe._launcher.watch.streams import is_terminal, pour, say
from ddpsafe._wire.spec import open_log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpsafe._launcher.processes.rank_process import Worker
    from ddpsafe._launcher.watch.signals import SignalInbox

_TICK_S: Final = 0.1
_QUIET: Final = timedelta(seconds=1)
_WIPE: Final = "\r\x1b[2K"
"""Wipes the line that the terminal's cursor is in."""
_PLAIN_EVERY_S: Final = 30.0
# How long a reader may pause after the end of ranks that failed, or that were asked to stop.
_PAUSE: Final = timedelta(seconds=2)


class _Tail:
    """Copies what a file gains to a stream of the launcher.

    Attributes:
        pieces: How many pieces the stream has taken.
        given_up: Set when the rest is not to be shown any more.
    """

    def __init__(self, path: str, stream: TextIO, *, prefix: str, whole_lines: bool) -> None:
        self._path = Path(path)
        self._stream = stream
        self._prefix = prefix
        self._whole_lines = whole_lines
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self.pieces = 0
        self.given_up = threading.Event()

    def take(self, *, final: bool) -> str:
        """Return what is new; on the last call also a line without an end."""
        text = self._pending + self._decoder.decode(self._read(), final)
        self._pending = ""
        if self._whole_lines and not final:
            cut = max(text.rfind("\n"), text.rfind("\r")) + 1
            text, self._pending = text[:cut], text[cut:]
        if self._prefix:
            text = "".join(self._prefix + line for line in text.splitlines(keepends=True))
        return text

    def show(self, text: str) -> None:
        """Write it, as far as the stream takes it."""
        if self.given_up.is_set():
            return
        for _ in pour(self._stream, text):
            self.pieces += 1
            if self.given_up.is_set():
                return

    def _read(self) -> bytes:
        try:
            with open(open_log(self._path, os.O_RDONLY), "rb") as file:  # noqa: PTH123 - a file descriptor
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or removed while running
            return b""
        self._offset += len(data)
        return data


class Console:
    """The view of one attempt."""

    def __init__(
        self,
        workers: Sequence[Worker],
        show: str,
        *,
        inbox: SignalInbox,
        limit: timedelta | None,
    ) -> None:
        """Choose the outputs to copy, and begin.

        Args:
            workers: The ranks.
            show: ``rank-zero``, ``all``, ``tagged`` or ``none``.
            inbox: Signals to the launcher.
            limit: How long the attempt may take.
        """
        self._workers = workers
        self._inbox = inbox
        self._attempt = Deadline.after(limit)
        self._started_s = time.monotonic()
        self._next_line_s = _PLAIN_EVERY_S
        self._quiet = Deadline.after(_QUIET)
        self._line = ""
        self._is_mid_line = False
        self._is_silent = show == "none"
        self._tails = [tail for worker in workers for tail in _tails(worker, show)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpsafe-console", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Have the rest copied; a reader that keeps the launcher waiting gets no more of it."""
        self._ended.set()
        pieces = self._pieces()
        clock = AwakeClock()  # this thread is suspended with the one that shows the rest
        pause = Deadline.after(_PAUSE, clock=clock)
        while self._thread.is_alive() and not pause.expired():
            self._thread.join(_TICK_S)
            clock.note_wait(_TICK_S)
            if self._may_wait() and (self._has_succeeded() or self._pieces() > pieces):
                pieces, pause = self._pieces(), Deadline.after(_PAUSE, clock=clock)
        for tail in self._tails:
            tail.given_up.set()
        if self._thread.is_alive():
            say("the console is not read; it has not shown all that the ranks wrote")

    def _may_wait(self) -> bool:
        return not is_order(self._inbox.received) and not self._attempt.expired()

    def _has_succeeded(self) -> bool:
        """Tell whether nothing but the reader is left: logs of a success may be removed unread."""
        returned = all(worker.returned is not None for worker in self._workers)
        return returned and not any(worker.stop.obeys for worker in self._workers)

    def _pieces(self) -> int:
        return sum(tail.pieces for tail in self._tails)

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._refresh()
        self._refresh(final=True)

    def _refresh(self, *, final: bool = False) -> None:
        """Copy new output; keep the line of the start up to date, below it."""
        news = [(tail, text) for tail in self._tails if (text := tail.take(final=final))]
        starting = not final and not all(worker.joined for worker in self._workers)
        if self._line and (news or not starting):  # output would be written behind the line
            self._line = ""
            list(pour(sys.stderr, _WIPE))
        for tail, text in news:
            tail.show(text)
            self._is_mid_line = not text.endswith("\n")
        if news:
            # The ranks run by now, though this process may not have read all their reports.
            self._quiet = Deadline.after(_QUIET)
        elif starting and not self._is_silent and self._quiet.expired() and sys.stderr is not None:
            self._show_waiting()

    def _show_waiting(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        total = len(self._workers)
        # Ranks that have come wait in "joining" for the others: they are not the missing ones.
        late = [w.rank for w in self._workers if w.phase in ("starting", "loading")]
        what = f"waiting for {ranks_text(late)}" if late else "connecting them"
        line = f"ddpsafe: {total - len(late)} of {total} ranks have joined, {what}"
        line += f" ({elapsed_s:.0f} s)"
        if is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") != "dumb":
            if not self._is_mid_line and line != self._line:
                self._line = line
                columns = shutil.get_terminal_size().columns
                list(pour(sys.stderr, _WIPE + line[: columns - 1]))
        elif elapsed_s >= self._next_line_s:
            self._next_line_s += _PLAIN_EVERY_S
            list(pour(sys.stderr, line + "\n"))


def _tails(worker: Worker, show: str) -> Iterator[_Tail]:
    logs = worker.spec.logs
    if show == "none" or (show == "rank-zero" and worker.rank != 0):
        return
    prefix = f"[rank {worker.rank}] " if show == "tagged" else ""
    # A lone rank's progress bar is shown as it is; lines of several must not be torn apart.
    whole_lines = show != "rank-zero"
    for path, stream in ((logs.stdout, sys.stdout), (logs.stderr, sys.stderr)):
        if stream is not None:  # a service may have none
            yield _Tail(path, stream, prefix=prefix, whole_lines=whole_lines)


@contextlib.contextmanager
def open_console(
    workers: Sequence[Worker], show: str, *, inbox: SignalInbox, limit: timedelta | None
) -> Iterator[None]:
    """Show the ranks' output while the context is open, and the rest of it at the end.

    Args:
        workers: The ranks.
        show: ``rank-zero``, ``all``, ``tagged`` or ``none``.
        inbox: Signals to the launcher.
        limit: How long the attempt may take.
    """
    console = Console(workers, show, inbox=inbox, limit=limit)
    try:
        yield
    finally:
        console.finish()


@contextlib.contextmanager
def quiet_log(show: str) -> Iterator[None]:
    """Keep ddpsafe's warnings off the console that nothing shall be shown on.

    Python prints the warnings of a program that has set up no logging; where there are handlers,
    they get them all the same.
    """
    handler = logging.NullHandler()
    logger = logging.getLogger("ddpsafe")
    if show == "none":
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
