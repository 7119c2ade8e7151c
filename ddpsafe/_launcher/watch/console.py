"""What the user sees while ranks run: their output, and a line while they start.

A thread of its own shows it. A console that is not read (a pager, a stalled ssh) would stop the
watch of the ranks as well, and with it every deadline.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import queue
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO

from ddpsafe._clock import AwakeClock, Deadline
from ddpsafe._errors import DDPSafeError, ranks_text
from ddpsafe._launcher.watch.signals import is_order
from ddpsafe._launcher.watch.streams import is_terminal, pour, say, write_line
from ddpsafe._logging import RecordFields, current_fields, json_line, json_of_record, json_scope
from ddpsafe._wire.spec import open_log

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpsafe._launcher.processes.rank_process import Worker
    from ddpsafe._launcher.watch.signals import SignalInbox

_TICK_S: Final = 0.1
_QUIET: Final = timedelta(seconds=1)
_WIPE: Final = "\r\x1b[2K"
"""Wipes the line that the terminal's cursor is in."""
_UP: Final = "\x1b[1A"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CODES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MOST_ROWS: Final = 8
_PLAIN_EVERY_S: Final = 30.0
# How long a reader may pause after the end of ranks that failed, or that were asked to stop.
_PAUSE: Final = timedelta(seconds=2)


Form = Literal["raw", "plain", "tagged", "json"]
"""How the output of a rank is shown: as it is, or by lines, with what around each."""


class _Tail:
    """Copies what a file gains to a stream of the launcher.

    Where lines of several ranks are shown, a line that is drawn again and again, as a progress bar
    is, counts as one: it is shown once it has ended, as it was then.

    Attributes:
        drawn: Such a line that has not ended, as it is now.
        pieces: How many pieces the stream has taken.
        given_up: Set when the rest is not to be shown any more.
        hides_cursor: Whether the terminal was told to hide its cursor, and not yet to show it.
    """

    def __init__(self, worker: Worker, path: str, stream: TextIO, *, name: str, form: Form) -> None:
        self._path = Path(path)
        self._stream = stream
        self._name = name
        self._form = form
        self._world = worker.spec.world
        self._attempt = worker.spec.attempt
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._next_drawn_s = 0.0
        self.drawn = ""
        self.pieces = 0
        self.given_up = threading.Event()
        self.hides_cursor = False

    def take(self, *, final: bool) -> str:
        """Return what is new; on the last call also a line without an end."""
        text = self._pending + self._decoder.decode(self._read(), final)
        self._pending = ""
        if self._form == "raw":
            hides, shows = text.rfind(_HIDE_CURSOR), text.rfind(_SHOW_CURSOR)
            if hides != shows:
                self.hides_cursor = hides > shows
            return text
        *lines, rest = text.split("\n")
        if final:
            # A bar that was cleared leaves nothing to show.
            lines, rest = [*lines, rest] if as_drawn(rest).strip() else lines, ""
        self.drawn = as_drawn(rest) if "\r" in rest else ""
        # An epoch may redraw its bar a hundred thousand times before it ends.
        self._pending = rest
        if self.drawn:
            # What follows a return at the end is drawn over it, as ``print(…, end="\\r")`` means.
            self._pending = f"\r{self.drawn}" + ("\r" if rest.endswith("\r") else "")
        return "".join(self._as_line(line) for line in lines)

    def take_drawn(self, now_s: float) -> str:
        """Return a line that is being redrawn, every half minute: a log shows no other."""
        if not self.drawn.strip():
            self._next_drawn_s = now_s + _PLAIN_EVERY_S
            return ""
        if now_s < self._next_drawn_s:
            return ""
        self._next_drawn_s = now_s + _PLAIN_EVERY_S
        return self._as_line(self.drawn)

    def as_row(self) -> str:
        """Return the line that is being redrawn as it is shown at the end of a terminal."""
        return self._tag() + _CODES.sub("", self.drawn) if self.drawn.strip() else ""

    def show(self, text: str) -> None:
        """Write it, as far as the stream takes it."""
        if self.given_up.is_set():
            return
        for _ in pour(self._stream, text):
            self.pieces += 1
            if self.given_up.is_set():
                return

    def _tag(self) -> str:
        return f"[rank {self._world.rank}] " if self._form == "tagged" else ""

    def _as_line(self, line: str) -> str:
        line = as_drawn(line)
        if self._form != "json":
            return f"{self._tag()}{line}\n"
        if not line:
            return ""
        fields = RecordFields(
            rank=self._world.rank, attempt=self._attempt, node_rank=self._world.node_rank
        )
        # What a rank writes has no level that ddpsafe knows; the name of its stream tells more.
        return json_line("INFO", line, fields, stream=self._name) + "\n"

    def _read(self) -> bytes:
        try:
            with open(open_log(self._path, os.O_RDONLY), "rb") as file:  # noqa: PTH123 - a file descriptor
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or removed while running
            return b""
        self._offset += len(data)
        return data


def as_drawn(line: str) -> str:
    """Return a line with carriage returns as a terminal shows it, roughly: what was drawn last."""
    return line.rstrip("\r").rpartition("\r")[2]


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
            show: ``rank-zero``, ``all``, ``tagged``, ``json`` or ``none``.
            inbox: Signals to the launcher.
            limit: How long the attempt may take.
        """
        self._workers = workers
        self._inbox = inbox
        self._attempt = Deadline.after(limit)
        self._started_s = time.monotonic()
        self._next_line_s = _PLAIN_EVERY_S
        self._quiet = Deadline.after(_QUIET)
        self._is_mid_line = False
        # The user silences what ddpsafe says by the level of its logger, this line too.
        self._is_silent = show == "none" or not logger.isEnabledFor(logging.WARNING)
        self._is_json = show == "json"
        self._has_rows = is_drawn_on(sys.stderr) and not self._is_json
        self._rows: list[str] = []
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._saying = threading.Lock()
        self._is_closed = False
        self._tails = [tail for worker in workers for tail in _tails(worker, show)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpsafe-console", daemon=True)
        self._thread.start()
        _open_consoles.append(self)

    def say(self, text: str) -> None:
        """Show a line of ddpsafe's on stderr, between those of the ranks, or after the last of them."""
        with self._saying:
            if not self._is_closed:
                self._said.put(text)
                return
        write_line(text)

    def finish(self) -> None:
        """Have the rest copied; a reader that keeps the launcher waiting gets no more of it."""
        _open_consoles.remove(self)
        self._ended.set()
        pieces = self._pieces()
        clock = AwakeClock()  # this thread is suspended with the one that shows the rest
        pause = Deadline.after(_PAUSE, clock=clock)
        while self._thread.is_alive() and not pause.expired():
            self._thread.join(_TICK_S)
            clock.note_wait(_TICK_S)
            if is_order(self._inbox.received) or self._attempt.expired():
                continue
            # After a success the logs may be removed unread: only the reader is waited for.
            has_succeeded = all(
                worker.returned is not None and not worker.stop.is_stopping
                for worker in self._workers
            )
            if has_succeeded or self._pieces() > pieces:
                pieces, pause = self._pieces(), Deadline.after(_PAUSE, clock=clock)
        for tail in self._tails:
            tail.given_up.set()
        # A line that came after the thread's last look is shown here, and later ones by who says them.
        with self._saying:
            self._is_closed = True
        if not self._thread.is_alive():
            for text in self._take_said():
                write_line(f"\n{text}" if self._is_mid_line else text)
                self._is_mid_line = False
        else:
            say("nothing reads the console, so it has not shown everything that the ranks wrote")

    def _pieces(self) -> int:
        return sum(tail.pieces for tail in self._tails)

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._refresh()
        self._refresh(final=True)
        for tail in self._tails:
            if tail.hides_cursor:  # the rank ended before it could show it again
                tail.show(_SHOW_CURSOR)

    def _refresh(self, *, final: bool = False) -> None:
        """Copy what is new; keep lines that are redrawn, and the one of the start, below it."""
        news = [(tail, text) for tail in self._tails if (text := tail.take(final=final))]
        said = self._take_said()
        now_s = time.monotonic()
        rows = [row for tail in self._tails if (row := tail.as_row())] if not final else []
        if not self._has_rows:
            news += [(tail, text) for tail in self._tails if (text := tail.take_drawn(now_s))]
        starting = not final and not all(worker.joined for worker in self._workers)
        if news:
            # The ranks run by now, though this process may not have read all their reports.
            self._quiet = Deadline.after(_QUIET)
        elif starting and not self._is_silent and self._quiet.expired() and sys.stderr is not None:
            rows += self._starting_row()
        if self._has_rows:
            columns, lines = _size()
            rows = [row[: columns - 1] for row in rows[: min(_MOST_ROWS, lines - 1)]]
        else:
            rows = []
        if news or said or rows != self._rows:
            # The rows go from the terminal, whose cursor is behind the last one.
            if self._rows:
                list(pour(sys.stderr, _WIPE + (_UP + _WIPE) * (len(self._rows) - 1)))
            self._rows = []
        for tail, text in news:
            tail.show(text)
            self._is_mid_line = not text.endswith("\n")
        for text in said:
            ends_line = "\n" if self._is_mid_line else ""
            self._is_mid_line = False
            list(pour(sys.stderr, f"{ends_line}{text}\n"))
        if rows != self._rows and not self._is_mid_line:
            self._rows = rows
            list(pour(sys.stderr, "\n".join(rows)))

    def _take_said(self) -> list[str]:
        said: list[str] = []
        with contextlib.suppress(queue.Empty):
            while True:
                said.append(self._said.get_nowait())
        return said

    def _starting_row(self) -> list[str]:
        """Return the line of the start for a terminal; where it is none, say it every half minute."""
        elapsed_s = time.monotonic() - self._started_s
        total = len(self._workers)
        # Ranks that have come wait in "joining" for the others: they are not the missing ones.
        late = [w.rank for w in self._workers if w.phase in ("starting", "loading")]
        what = f"waiting for {ranks_text(late)}" if late else "connecting them"
        line = f"{total - len(late)} of {total} ranks have joined, {what} ({elapsed_s:.0f} s)"
        if self._has_rows:
            return [f"ddpsafe: {line}"]
        if elapsed_s >= self._next_line_s:
            self._next_line_s += _PLAIN_EVERY_S
            fields = replace(current_fields(), attempt=self._workers[0].spec.attempt)
            text = json_line("INFO", line, fields) if self._is_json else f"ddpsafe: {line}"
            list(pour(sys.stderr, text + "\n"))
        return []


_open_consoles: Final[list[Console]] = []


def is_drawn_on(stream: TextIO | None) -> bool:
    """Tell whether lines of a stream can be taken back: a terminal that knows how to."""
    if stream is None or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return is_terminal(stream)


def terminal_variables(show: str, rank: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a rank's progress bars fit the terminal they are shown on.

    A rank writes to a file, so that rich would show no bar, and tqdm one of ten characters. What
    rank 0 draws is shown as it is where it is shown alone; of several ranks, lines are.

    Args:
        show: ``rank-zero``, ``all``, ``tagged``, ``json`` or ``none``.
        rank: The rank.
        given: Variables that the rank has in any case; they win.
    """
    if show in ("none", "json") or (show == "rank-zero" and rank != 0):
        return {}
    if not (is_drawn_on(sys.stdout) and is_drawn_on(sys.stderr)):
        return {}
    columns, _ = _size()
    tag = len(f"[rank {rank}] ") if show == "tagged" else 0
    found = {"COLUMNS": str(max(20, columns - tag - 1))}
    if show == "rank-zero":
        found |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}  # rich since 14.1
    return {name: text for name, text in found.items() if name not in given}


def _size() -> tuple[int, int]:
    """Return the terminal's columns and lines, 80 and 24 where it tells none.

    Python 3.10 then takes 0 for an answer.
    """
    columns, lines = shutil.get_terminal_size()
    return columns or 80, lines or 24


def _tails(worker: Worker, show: str) -> Iterator[_Tail]:
    logs = worker.spec.logs
    if show == "none" or (show == "rank-zero" and worker.rank != 0):
        return
    form: Form = _FORMS[show]
    for path, stream, name in (
        (logs.stdout, sys.stdout, "stdout"),
        (logs.stderr, sys.stderr, "stderr"),
    ):
        if stream is not None:  # a service may have none
            yield _Tail(worker, path, stream, name=name, form=form)


# A lone rank's progress bar is shown as it is; lines of several must not be torn apart.
_FORMS: Final[dict[str, Form]] = {
    "rank-zero": "raw",
    "all": "plain",
    "tagged": "tagged",
    "json": "json",
}


@contextlib.contextmanager
def open_console(
    workers: Sequence[Worker], show: str, *, inbox: SignalInbox, limit: timedelta | None
) -> Iterator[None]:
    """Show the ranks' output while the context is open, and the rest of it at the end.

    Args:
        workers: The ranks.
        show: ``rank-zero``, ``all``, ``tagged``, ``json`` or ``none``.
        inbox: Signals to the launcher.
        limit: How long the attempt may take.
    """
    console = Console(workers, show, inbox=inbox, limit=limit)
    try:
        yield
    finally:
        console.finish()


class _Warnings(logging.Handler):
    """Shows ddpsafe's warnings as Python does where a program has set up no logging.

    They stand on lines of their own between those of the ranks and above a progress bar, and the
    launcher does not wait for the reader of its console.

    Attributes:
        shows: A token of each launch that is open, and what it shows; the latest last.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.shows: list[tuple[object, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _, show = self.shows[-1]
            # The program may show records itself.
            loggers = (logger, logging.getLogger()) if logger.propagate else (logger,)
            is_handled = any(other is not self for each in loggers for other in each.handlers)
            if show == "json":
                text = json_of_record(record)
            elif show == "none" or logging.lastResort is None or is_handled:
                return
            else:
                text = logging.lastResort.format(record)  # a traceback as well, where it has one
            if _open_consoles:
                _open_consoles[-1].say(text)
            else:
                write_line(text)
        except Exception:  # noqa: BLE001 - what is logged must not end the launch
            self.handleError(record)


logger: Final = logging.getLogger("ddpsafe")
_warnings: Final = _Warnings()
_lock: Final = threading.Lock()


@contextlib.contextmanager
def shown_log(show: str) -> Iterator[None]:
    """Show ddpsafe's warnings in the form of the console, or keep them off one that is silent.

    Where the program has handlers, they get them all the same. An error that leaves the context
    keeps the form, since it is shown after it.

    Args:
        show: ``rank-zero``, ``all``, ``tagged``, ``json`` or ``none``.
    """
    shown = (object(), show)  # equal to no other one: launches of several threads end in any order
    with _lock:
        _warnings.shows.append(shown)
        logger.addHandler(_warnings)
    try:
        with json_scope(on=show == "json"):
            yield
    except DDPSafeError as error:
        error.shown_as_json = show == "json"
        raise
    finally:
        with _lock:
            _warnings.shows.remove(shown)
            if not _warnings.shows:
                logger.removeHandler(_warnings)
