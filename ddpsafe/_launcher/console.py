"""What the user sees while ranks run: their output, and a line while they start."""

from __future__ import annotations

import codecs
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.live import Live

    from ddpsafe._launcher.worker import Worker

_QUIET_S: Final = 1.0
_PLAIN_EVERY_S: Final = 30.0


class _Tail:
    """Copies what a file gains to a stream of ours."""

    def __init__(self, path: str, stream: TextIO, *, prefix: str, whole_lines: bool) -> None:
        self._path = Path(path)
        self._stream = stream
        self._prefix = prefix
        self._whole_lines = whole_lines
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def pump(self, *, final: bool = False) -> None:
        """Show what is new; on the last call also a line without an end."""
        text = self._pending + self._decoder.decode(self._read(), final)
        self._pending = ""
        if self._whole_lines and not final:
            cut = max(text.rfind("\n"), text.rfind("\r")) + 1
            text, self._pending = text[:cut], text[cut:]
        if text:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            shown = self._tagged(text).encode(encoding, "replace").decode(encoding)
            self._show(shown)

    def _show(self, text: str) -> None:
        """Write to the console; one that is full, closed or gone must not end the training."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or removed while running
            return b""
        self._offset += len(data)
        return data

    def _tagged(self, text: str) -> str:
        if not self._prefix:
            return text
        return "".join(self._prefix + line for line in text.splitlines(keepends=True))


class Console:
    """The view of one attempt."""

    def __init__(self, workers: Sequence[Worker], show: str) -> None:
        """Choose the outputs to copy.

        Args:
            workers: The ranks.
            show: ``rank-zero``, ``all``, ``tagged`` or ``none``.
        """
        self._workers = workers
        self._started_s = time.monotonic()
        self._next_line_s = _PLAIN_EVERY_S
        self._live: Live | None = None
        self._tails = [tail for worker in workers for tail in _tails(worker, show)]

    @property
    def busy(self) -> bool:
        """Whether it has to be refreshed even when no rank reports anything."""
        return bool(self._tails) or not all(worker.joined for worker in self._workers)

    def refresh(self) -> None:
        """Copy new output; keep the line of the start up to date."""
        if all(worker.joined for worker in self._workers):
            self._clear()
        else:
            self._show_waiting()
        for tail in self._tails:
            tail.pump()

    def finish(self) -> None:
        """Copy the rest."""
        self._clear()
        for tail in self._tails:
            tail.pump(final=True)

    def _show_waiting(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        if elapsed_s < _QUIET_S:
            return
        total = len(self._workers)
        # Ranks that have come wait in "joining" for the others: they are not the missing ones.
        late = [w.rank for w in self._workers if w.phase in ("starting", "loading")]
        what = f"waiting for rank {', '.join(map(str, late))}" if late else "connecting them"
        line = f"ddpsafe: {total - len(late)} of {total} ranks have joined, {what}"
        line += f" ({elapsed_s:.0f} s)"
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            self._update_live(line)
        elif elapsed_s >= self._next_line_s:
            self._next_line_s += _PLAIN_EVERY_S
            sys.stderr.write(line + "\n")

    def _update_live(self, line: str) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        if self._live is None:
            console = RichConsole(file=sys.stderr)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(line, refresh=True)

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


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
def open_console(workers: Sequence[Worker], show: str) -> Iterator[Console]:
    """Show the ranks' output while the context is open, and the rest of it at the end."""
    console = Console(workers, show)
    try:
        yield console
    finally:
        console.finish()
