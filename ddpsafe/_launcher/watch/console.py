"""What the user sees while ranks run: their output, and a line while they start.

A separate thread writes it. Else a console that is not read (a pager, a stalled ssh) would block the
watch of the ranks, and with it every deadline.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import queue
import re
import shutil
import string
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO

from ddpsafe._clock import AwakeClock, Deadline
from ddpsafe._errors import DDPSafeError
from ddpsafe._launcher.watch.screen import UP, WIPE_LINE, Screen, clipped, plain
from ddpsafe._launcher.watch.signals import is_order
from ddpsafe._launcher.watch.streams import is_terminal, write_in_pieces, write_line, write_message
from ddpsafe._logging import (
    RecordFields,
    current_fields,
    is_json,
    json_line,
    json_of_record,
    json_scope,
)
from ddpsafe._text import ranks_text, shortened
from ddpsafe._wire.rank_pipe import LOGS_FULL
from ddpsafe._wire.spec import open_log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpsafe._launcher.processes.rank_process import RankProcess
    from ddpsafe._launcher.watch.signals import SignalInbox

# How often it looks for new output while there is some, or was a moment ago, and otherwise. With every
# rank of a large node on the console, looking is most of what a launcher costs.
_TICK_S: Final = 0.1
_QUIET_TICK_S: Final = 0.3
# The line of the start appears only after so long without output. Ranks that write are running, even
# if their reports have not been read yet.
_QUIET: Final = timedelta(seconds=1)
_LEAST_ROWS: Final = 8
_PLAIN_EVERY_S: Final = 30.0
# How long a reader may pause once ranks have failed, or have stopped on request.
_PAUSE: Final = timedelta(seconds=2)


Form = Literal["raw", "plain", "tagged", "json"]
"""How the output of a rank is shown: unchanged, or line by line as such, with its rank, or as JSON."""
# Into a file, the output of a single rank goes unchanged; the lines of several ranks must not be mixed up.
_FORMS: Final[dict[str, Form]] = {
    "rank-zero": "raw",
    "all": "plain",
    "tagged": "tagged",
    "json": "json",
}


# What is read at a time. A rank may write faster than the console is read, and the rest waits in its log.
_CHUNK_BYTES: Final = 64 << 10

# With less room on the disk of the logs, programs of the ranks may fail to print.
_LEAST_ROOM_BYTES: Final = 1 << 20
_LOOK_AT_ROOM_S: Final = 1.0

# Between these, a program such as IPython or an editor has the terminal to itself.
_INTERACTIVE: Final = re.compile(r"\x1b\[\?(47|1047|1049|2004)([hl])")
_INTERACTIVE_TICK_S: Final = 0.02

# Longer than a pause between the parts of a line that a program writes piece by piece.
_UNFINISHED_AFTER_S: Final = 0.5


class _Tail:
    """Copies what is appended to a file to a stream of the launcher.

    Where the output is shown line by line, what is redrawn again and again, such as a progress bar, is
    shown in its last form, once it has ended; see `Screen`. Any other line that stays unfinished for a
    moment is shown as far as it is: a debugger's prompt, or that of ``input()``.

    Attributes:
        pieces: How many pieces the stream has accepted.
        given_up: Set when the rest is not to be shown.
        has_more: Whether more may be there than the last call of `take` has read.
        is_drawn: Whether its stream is a terminal, on which lines can be redrawn.
        changed_s: When something new was last read.
        interactive: Not empty while the rank's output is shown unchanged, as it has taken over the terminal.
    """

    def __init__(
        self,
        process: RankProcess,
        path: str,
        stream: TextIO,
        *,
        name: str,
        show: str,
        is_alone: bool,
    ) -> None:
        self._path = Path(path)
        self._stream = stream
        self._name = name
        self.is_drawn = is_drawn_on(stream)
        self._form: Form = _FORMS[show]
        if self._form == "raw" and self.is_drawn:
            self._form = "plain"  # bars and the lines of the other stream must not be mixed up
        self._unfinished_after_s = 0 if is_alone else _UNFINISHED_AFTER_S
        self._world = process.spec.world
        self.rank = process.rank
        self._attempt = process.spec.attempt
        self._process = process
        self._file: FileIO | None = None
        self.has_more = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.screen = Screen()
        self._ready = ""
        self.interactive = ""
        self.changed_s = 0.0
        self._shown = ""  # the beginning of an unfinished line that is on the console already
        self._next_drawn_s = time.monotonic() + _PLAIN_EVERY_S
        self.pieces = 0
        self.given_up = threading.Event()

    def read(self, now_s: float, *, final: bool) -> None:
        """Read new output."""
        if not (text := self._decoder.decode(self._read(), final)):
            return
        self.changed_s = now_s
        if self._form == "raw":
            self._ready += text
            return
        start = 0
        for match in _INTERACTIVE.finditer(text) if self.is_drawn and "\x1b[?" in text else ():
            code, begins = match[1], match[2] == "h"
            if not self.interactive and begins:
                self.screen.feed(text[start : match.start()])
                self._ready += self._take_lines(final=True)
                self.interactive, start = code, match.start()
            elif self.interactive == code and not begins:
                self._ready += text[start : match.end()]
                self.interactive, start = "", match.end()
        if self.interactive:
            self._ready += text[start:]
        else:
            self.screen.feed(text[start:])

    def take(self, *, final: bool) -> str:
        """Return the output that is ready to be shown; on the last call also an unfinished line."""
        ready, self._ready = self._ready, ""
        return ready + self._take_lines(final=final)

    def _take_lines(self, *, final: bool) -> str:
        return "".join(map(self._as_line, self.screen.take_lines(final=final)))

    def take_unfinished(self, now_s: float) -> str:
        """Return the beginning of a line that stays unfinished, as far as it is not shown yet."""
        line = "" if self._form in {"raw", "json"} else self.screen.unfinished
        if not line or now_s - self.changed_s < self._unfinished_after_s:
            return ""
        rest, self._shown = self._rest_of(line), line
        return rest

    def redraws(self, now_s: float) -> bool:
        """Return whether it has redrawn something a moment ago."""
        return self.screen.is_redrawn and now_s - self.changed_s < _UNFINISHED_AFTER_S

    def end_line(self) -> None:
        """End an unfinished line that is shown, as other output follows."""
        if self._shown:
            self.show("\n")
            self.repeat_line()

    def repeat_line(self) -> None:
        """Show an unfinished line again in a moment, below the output that has followed it."""
        if self._shown:
            self._shown = ""
            self.changed_s = time.monotonic()

    def takes_back_line(self) -> bool:
        """Wipe an unfinished line that is shown, if the rank has begun to redraw it; return whether it has."""
        takes_back = bool(self._shown) and self.is_drawn and self.screen.is_redrawn
        if takes_back:
            self.show(WIPE_LINE)
            self._shown = ""
        return takes_back

    def shares_console(self, other: _Tail) -> bool:
        """Return whether the output of both appears in one place."""
        one, two = self._stream, other._stream
        return one is two or (is_terminal(one) and is_terminal(two))

    def take_drawn(self, now_s: float) -> str:
        """Return what is being redrawn, every `_PLAIN_EVERY_S`, for a stream without rows."""
        if not (rows := self._drawn()):
            self._next_drawn_s = now_s + _PLAIN_EVERY_S
            return ""
        if now_s < self._next_drawn_s:
            return ""
        self._next_drawn_s = now_s + _PLAIN_EVERY_S
        return "".join(map(self._as_line, rows))

    def rows(self, columns: int) -> list[str]:
        """Return what is being redrawn, as rows at the bottom of the terminal."""
        return [clipped(self._tag() + row, columns) for row in self._drawn()]

    def _drawn(self) -> list[str]:
        if not self.screen.is_redrawn:
            return []
        rows = self.screen.rows
        while rows and not rows[-1].strip():
            rows.pop()
        return rows

    def show(self, text: str) -> None:
        """Write the text, until the reader is given up."""
        if self.given_up.is_set():
            return
        for _ in write_in_pieces(self._stream, text):
            self.pieces += 1
            if self.given_up.is_set():
                return

    def _tag(self) -> str:
        return tag_of(self._world.rank, self._world.local_rank) if self._form == "tagged" else ""

    def _rest_of(self, line: str) -> str:
        """Return what of a line is not shown yet, with the rank's tag at its beginning."""
        if not self._shown:
            return self._tag() + line
        rest = line.removeprefix(self._shown)
        return rest if line.startswith(self._shown) else f"\n{self._tag()}{line}"

    def _as_line(self, line: str) -> str:
        if self._form != "json":
            text, self._shown = self._rest_of(line), ""
            return f"{text}\n"
        if not line:
            return ""
        fields = RecordFields(
            rank=self._world.rank, attempt=self._attempt, node_rank=self._world.node_rank
        )
        # A rank's output has no log level; the name of its stream says more.
        return json_line("INFO", line, fields, stream=self._name) + "\n"

    def _read(self) -> bytes:
        data = b""
        with contextlib.suppress(OSError):  # the log is not created yet
            if self._file is None:
                # Kept open: the log may be removed while the rank writes to it.
                self._file = FileIO(open_log(self._path, os.O_RDONLY))
            data = self._file.read(_CHUNK_BYTES)
            if not data and (overflow := self._process.overflow.get(self._name)) is not None:
                data = overflow.read(_CHUNK_BYTES)
        self.has_more = len(data) == _CHUNK_BYTES
        return data

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            self._file.close()


def _is_nearly_full(log: str) -> bool:
    """Return whether the disk of a log has less than `_LEAST_ROOM_BYTES` left for this user."""
    try:
        disk = os.statvfs(Path(log).parent)
    except OSError:  # removed
        return False
    blocks = disk.f_bavail if os.geteuid() else disk.f_bfree
    # Some file systems of user space do not know, and say 0 for all.
    return disk.f_blocks > 0 and blocks * disk.f_frsize < _LEAST_ROOM_BYTES


class Console:
    """Shows the output of one attempt's ranks."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        show: str,
        *,
        inbox: SignalInbox,
        limit: timedelta | None,
    ) -> None:
        self._processes = processes
        self._inbox = inbox
        self._attempt = Deadline.after(limit)
        self._started_s = time.monotonic()
        self._next_line_s = _PLAIN_EVERY_S
        self._quiet = Deadline.after(_QUIET)
        self._is_mid_line = False
        self._last: _Tail | None = None
        # The level of ddpsafe's logger silences the line of the start, too.
        self._is_silent = show == "none" or not logger.isEnabledFor(logging.WARNING)
        self._is_json = show == "json"
        # Where it shows rows below the output.
        drawn = (stream for stream in (sys.stderr, sys.stdout) if is_drawn_on(stream))
        self._terminal = None if self._is_json else next(drawn, None)
        self._rows: list[str] = []
        self._next_look_s = 0.0
        self._told_full: set[int] = set()
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_closed_lock = threading.Lock()
        self._is_closed = False
        shown = [process for process in processes if process.spec.logs.is_shown]
        self._tails = [
            _Tail(process, path, stream, name=name, show=show, is_alone=len(shown) == 1)
            for process in shown
            for path, stream, name in (
                (process.spec.logs.stdout, sys.stdout, "stdout"),
                (process.spec.logs.stderr, sys.stderr, "stderr"),
            )
            if stream is not None  # a service may have none
        ]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpsafe-console", daemon=True)
        self._thread.start()
        _open_consoles.append(self)

    def show(self, text: str) -> None:
        """Show a message of ddpsafe's on stderr, between the lines of the ranks or after them."""
        with self._is_closed_lock:
            if not self._is_closed:
                self._messages.put(text)
                return
        write_line(text)

    def finish(self) -> None:
        """Wait until the rest has been copied, or give up on a reader that pauses for too long."""
        _open_consoles.remove(self)
        self._ended.set()
        pieces = self._pieces()
        clock = AwakeClock()  # while this process is suspended, its console thread cannot write
        pause = Deadline.after(_PAUSE, clock=clock)
        while self._thread.is_alive() and not pause.expired():
            self._thread.join(_TICK_S)
            clock.note_wait(_TICK_S)
            if is_order(self._inbox.received) or self._attempt.expired():
                continue
            # After a success, wait for the reader without limit: the logs may be removed afterwards.
            has_succeeded = all(
                process.returned is not None and not process.stop.is_stopping
                for process in self._processes
            )
            if has_succeeded or self._pieces() > pieces:
                pieces, pause = self._pieces(), Deadline.after(_PAUSE, clock=clock)
        for tail in self._tails:
            tail.given_up.set()
        # Messages that came after the thread's last look are shown here. Later ones are written by `show`.
        with self._is_closed_lock:
            self._is_closed = True
        if not self._thread.is_alive():
            for text in self._take_messages():
                write_line(f"\n{text}" if self._is_mid_line else text)
                self._is_mid_line = False
        else:
            write_message(
                "nothing reads the console, so it has not shown everything that the ranks wrote"
            )

    def _pieces(self) -> int:
        return sum(tail.pieces for tail in self._tails)

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s()):
            self._look_at_room()
            self._refresh()
        self._refresh()
        while self._has_more():
            self._refresh()
        self._refresh(final=True)
        for tail in self._tails:
            tail.close()

    def _look_at_room(self) -> None:
        """Have each rank write to memory before the disk of the logs is full, once it runs.

        In this thread, as a disk that does not answer must not stop the watch.
        """
        now_s = time.monotonic()
        if now_s < self._next_look_s or not self._processes:
            return
        self._next_look_s = now_s + _LOOK_AT_ROOM_S
        untold = [
            process
            for process in self._processes
            if process.phase != "starting" and process.rank not in self._told_full
        ]
        if untold and _is_nearly_full(untold[0].spec.logs.stdout) and not self._ended.is_set():
            for process in untold:
                process.send(LOGS_FULL)
                self._told_full.add(process.rank)

    def _has_more(self) -> bool:
        return any(tail.has_more and not tail.given_up.is_set() for tail in self._tails)

    def _pause_s(self) -> float:
        if self._has_more():
            return 0
        if any(tail.interactive for tail in self._tails):
            return _INTERACTIVE_TICK_S
        return _QUIET_TICK_S if self._quiet.expired() else _TICK_S

    def _refresh(self, *, final: bool = False) -> None:
        """Copy new output; keep redrawn lines, and the line of the start, as rows below it."""
        now_s = time.monotonic()
        news = self._take_news(now_s, final=final)
        # While a rank redraws a bar, it does not wait for an answer.
        redrawing = {tail.rank for tail in self._tails if tail.redraws(now_s)}
        news += [
            (tail, text)
            for tail in self._tails
            if tail.rank not in redrawing and (text := tail.take_unfinished(now_s))
        ]
        messages = self._take_messages()
        news += [
            (tail, text)
            for tail in self._tails
            if not tail.is_drawn and (text := tail.take_drawn(now_s))
        ]
        rows = [] if final else self._rows_of_ranks()
        starting = not final and not all(process.joined for process in self._processes)
        if news or rows:
            self._quiet = Deadline.after(_QUIET)
        elif starting and not self._is_silent and self._quiet.expired() and sys.stderr is not None:
            rows += self._starting_row()
        drawn = ""
        if self._rows and (news or messages or rows != self._rows):
            # Wipe the rows, from the last one up: the cursor is at its end.
            drawn = WIPE_LINE + (UP + WIPE_LINE) * (len(self._rows) - 1)
            self._rows = []
        if news or messages:
            self._draw(drawn)
            drawn = ""
        if self._is_mid_line and self._last is not None and self._last.takes_back_line():
            self._is_mid_line = False
        for tail, text in news:
            if (
                self._last is not None
                and tail is not self._last
                and tail.shares_console(self._last)
            ):
                self._last.end_line()
            tail.show(text)
            if tail.is_drawn or self._terminal is None:
                self._last = tail
                self._is_mid_line = not plain(text).endswith("\n")
        for text in messages:
            ends_line = "\n" if self._is_mid_line else ""
            self._is_mid_line = False
            list(write_in_pieces(sys.stderr, f"{ends_line}{text}\n"))
            if self._last is not None:
                self._last.repeat_line()
        if rows != self._rows and not self._is_mid_line:
            self._rows = rows
            drawn += "\n".join(rows)  # in one piece with the wiping: nothing flickers
        self._draw(drawn)

    def _draw(self, text: str) -> None:
        if self._terminal is not None and text:
            list(write_in_pieces(self._terminal, text))

    def _take_news(self, now_s: float, *, final: bool) -> list[tuple[_Tail, str]]:
        """Read new output; return what is ready, bars that have ended before what was printed after them."""
        for tail in self._tails:
            tail.read(now_s, final=final)
        bars: list[tuple[_Tail, str]] = []
        news: list[tuple[_Tail, str]] = []
        holding: set[int] = set()
        for tail in reversed(self._tails):  # stderr, where most bars are, before stdout
            if tail.rank in holding and not final:
                continue
            text = tail.take(final=final)
            if tail.screen.holds_line:
                holding.add(tail.rank)
            if text:
                (bars if tail.screen.has_ended_redraw else news).append((tail, text))
        return [*reversed(bars), *reversed(news)]

    def _rows_of_ranks(self) -> list[str]:
        """Return what ranks redraw, as far as the terminal has room for it."""
        if self._terminal is None:
            return []
        columns, lines = _size(self._terminal)
        rows = [row for tail in self._tails if tail.is_drawn for row in tail.rows(columns)]
        most = max(1, min(max(_LEAST_ROWS, lines // 2), lines - 2))
        return shortened(rows, most - 1) if len(rows) > most else rows

    def _take_messages(self) -> list[str]:
        # Only one thread takes messages at a time.
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def _starting_row(self) -> list[str]:
        """Return the line of the start as a row; if there are no rows, write it every half minute."""
        elapsed_s = time.monotonic() - self._started_s
        total = len(self._processes)
        # Ranks in "joining" have arrived, and wait for the others.
        late = [w.rank for w in self._processes if w.phase in ("starting", "loading")]
        what = f"waiting for {ranks_text(late)}" if late else "connecting them"
        line = f"{total - len(late)} of {total} ranks have joined, {what} ({elapsed_s:.0f} s)"
        if self._terminal is not None:
            columns, _ = _size(self._terminal)
            return [clipped(f"ddpsafe: {line}", columns)]
        if elapsed_s >= self._next_line_s:
            self._next_line_s += _PLAIN_EVERY_S
            fields = replace(current_fields(), attempt=self._processes[0].spec.attempt)
            text = json_line("INFO", line, fields) if self._is_json else f"ddpsafe: {line}"
            list(write_in_pieces(sys.stderr, text + "\n"))
        return []


_open_consoles: Final[list[Console]] = []

_TEMPLATE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""Variable by which users of torchrun choose what stands in front of a line; see its documentation."""


def tag_of(rank: int, local_rank: int) -> str:
    """Return what stands in front of a line of a rank where every line is tagged."""
    template = string.Template(os.environ.get(_TEMPLATE, "[rank ${rank}] "))
    return template.safe_substitute(role_name="default", rank=rank, local_rank=local_rank)


def is_shown(show: str, rank: int) -> bool:
    """Return whether the console shows a rank's output, if it is to show `show`; see `Console`."""
    return show != "none" and (show != "rank-zero" or rank == 0)


def is_drawn_on(stream: TextIO | None) -> bool:
    """Return whether lines on a stream can be redrawn: it is a terminal that supports that."""
    if stream is None or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return is_terminal(stream)


def drawn_streams(show: str, rank: int) -> tuple[int, ...]:
    """Return the file descriptors, of 1 and 2, whose output a rank may redraw, as the console shows it so."""
    if show == "json" or not is_shown(show, rank):
        return ()
    return tuple(fd for fd, stream in ((1, sys.stdout), (2, sys.stderr)) if is_drawn_on(stream))


def _size(stream: TextIO) -> tuple[int, int]:
    """Return a terminal's columns and lines; without any, what the environment says, else 80 and 24."""
    columns, lines = 0, 0
    with contextlib.suppress(Exception):  # closed, or an object of the program's own
        columns, lines = os.get_terminal_size(stream.fileno())
    fallback = shutil.get_terminal_size()
    return columns or fallback.columns or 80, lines or fallback.lines or 24


@contextlib.contextmanager
def open_console(
    processes: Sequence[RankProcess], show: str, *, inbox: SignalInbox, limit: timedelta | None
) -> Iterator[None]:
    """Show the ranks' output while the context is open, and the rest of it at the end."""
    console = Console(processes, show, inbox=inbox, limit=limit)
    try:
        yield
    finally:
        console.finish()


def note_event(event: str, message: str, **facts: object) -> None:
    """Write an event of a job of several nodes, if the console has lines of JSON."""
    if is_json():
        _write(json_line("INFO", message, current_fields(), event=event, **facts))


def _write(text: str) -> None:
    if _open_consoles:
        _open_consoles[-1].show(text)
    else:
        write_line(text)


class _Warnings(logging.Handler):
    """Shows ddpsafe's warnings as Python does in a program that has not configured logging.

    They appear on lines of their own, between those of the ranks and above progress bars, and the
    launcher does not wait for the reader of its console.

    Attributes:
        shows: For each open launch a token and its `show`; the latest last.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.shows: list[tuple[object, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _, show = self.shows[-1]
            # The program may have handlers that show records.
            loggers = (logger, logging.getLogger()) if logger.propagate else (logger,)
            is_handled = any(
                other is not self for other_logger in loggers for other in other_logger.handlers
            )
            if show == "json":
                text = json_of_record(record)
            elif show == "none" or logging.lastResort is None or is_handled:
                return
            else:
                text = logging.lastResort.format(record)
            _write(text)
        except Exception:  # noqa: BLE001 - a failure to log must not end the launch
            self.handleError(record)


logger: Final = logging.getLogger("ddpsafe")
_warnings: Final = _Warnings()
_lock: Final = threading.Lock()


@contextlib.contextmanager
def shown_log(show: str) -> Iterator[None]:
    """Show ddpsafe's warnings in the form of the console; show none if it is silent.

    Handlers of the program get the warnings in any case. An error that leaves the context keeps the
    form, since it is shown later.
    """
    scope = (object(), show)  # unique, since launches of several threads end in any order
    with _lock:
        _warnings.shows.append(scope)
        logger.addHandler(_warnings)
    try:
        with json_scope(on=show == "json"):
            yield
    except DDPSafeError as error:
        error.shown_as_json = show == "json"
        raise
    finally:
        with _lock:
            _warnings.shows.remove(scope)
            if not _warnings.shows:
                logger.removeHandler(_warnings)
