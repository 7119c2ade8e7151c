"""What a rank's output looks like on a terminal: lines that are finished, and rows that are redrawn.

Progress bars return to the beginning of a line, or move up to lines that they have written, and write
again. Where the output of several ranks is shown, each has a screen of its own, so that no bar draws over
the lines of another rank.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

WIPE_LINE: Final = "\r\x1b[2K"
UP: Final = "\x1b[1A"
_RESET: Final = "\x1b[0m"

_SEQUENCE: Final = (
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # such as a colour or a movement
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # such as a link or a title
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
_CODES: Final = re.compile(_SEQUENCE)
_TOKENS: Final = re.compile(rf"[^\x00-\x1f\x7f]+|{_SEQUENCE}|[\x00-\x1f\x7f]")
_CONTROL: Final = re.compile(r"\x1b\[(?P<arguments>[0-?]*)[ -/]*(?P<code>[@-~])")
_CUT: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)\Z")
_LONGEST_CUT: Final = 1000
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
_LINES: Final = re.compile(r"[^\n]*\n|[^\n]+")
# How far up a program can get: a terminal of this height would have moved what is above out of sight.
_MOST_ROWS: Final = 100
# Farther to the right, a program moves only by mistake.
_MOST_COLUMNS: Final = 2000
# A longer line is shown in parts.
_LONGEST_LINE: Final = 1 << 20


@dataclass(slots=True)
class _Row:
    """One row.

    Attributes:
        text: What it shows, with colours.
        is_redrawn: Whether the program has returned to it.
        is_new: Whether it has changed since the last call of `take_lines`.
    """

    text: str = ""
    is_redrawn: bool = False
    is_new: bool = True

    @property
    def is_blank(self) -> bool:
        """Whether nothing is to be seen."""
        return not self.text or not plain(self.text).strip()


class Screen:
    """The rows that a program may still change, and its cursor.

    A line is finished once the cursor is below it. While a program hides the cursor, as rich does, its
    next redraw shows which lines are above what it redraws. A program that has moved up before, such as
    one with nested bars, gets a moment to do so again.

    Attributes:
        hides_cursor: Whether the program has hidden the cursor.
        has_ended_redraw: Whether one of the last finished lines had been redrawn, such as a bar.
        holds_line: Whether a line above the cursor will be finished in a moment.
    """

    def __init__(self) -> None:
        self.hides_cursor = self.has_ended_redraw = self.holds_line = False
        self._rows = [_Row()]
        self._row = 0
        self._column: int | None = None  # of the cursor; ``None`` at the end of its row
        self._saved: tuple[int, int | None] = (0, None)
        self._top = 0  # the first row that the program redraws, as far as that is known
        self._begins_redraw = False
        self._moves_up = False
        self._cut = ""  # the beginning of a sequence whose rest is still to come
        self._lines: list[str] = []

    @property
    def is_redrawn(self) -> bool:
        """Whether its rows are drawn rather than written: they will change."""
        returns = self._column is not None
        return self.hides_cursor or returns or any(row.is_redrawn for row in self._rows)

    @property
    def rows(self) -> list[str]:
        """What the rows show that are not finished."""
        return [row.text for row in self._rows]

    @property
    def unfinished(self) -> str:
        """The beginning of a line, if it is written rather than drawn."""
        return "" if self._draws("") else self._rows[0].text

    def feed(self, text: str) -> None:
        """Follow what the program writes."""
        text, self._cut = self._cut + text, ""
        if (cut := _CUT.search(text)) and len(cut[0]) < _LONGEST_CUT:
            text, self._cut = text[: cut.start()], cut[0]
        parts = _LINES.findall(text) if self._draws(text) else [text] * bool(text)
        for part in parts:
            if not self._draws(part):
                self._append(part)
                continue
            for piece in _TOKENS.findall(part):
                self._take(piece)

    def take_lines(self, *, final: bool = False) -> list[str]:
        """Return the lines that were finished since the last call; on the last call, all rows.

        What a program has erased, such as a bar that it has closed, is not a line.
        """
        while len(self._rows) - 1 > (0 if final else self._row) and self._rows[-1].is_blank:
            self._rows.pop()
        if final:
            count = len(self._rows) - (len(self._rows) == 1 and self._rows[0].is_blank)
        elif len(self._rows[self._row].text) > _LONGEST_LINE:
            count, self._column = self._row + 1, None
        else:
            count = next(filter(self._may_change, range(self._row)), self._row)
        shown = [row for row in self._rows[:count] if not (row.is_redrawn and row.is_blank)]
        lines, self._lines = [*self._lines, *(row.text for row in shown)], []
        self.has_ended_redraw = any(row.is_redrawn for row in shown)
        self._rows = self._rows[count:] or [_Row()]
        self._row = max(0, self._row - count)
        self._top = max(0, self._top - count)
        self.holds_line = self._row > 0 and not self.hides_cursor
        for row in self._rows:
            row.is_new = False
        return lines

    def _may_change(self, index: int) -> bool:
        row = self._rows[index]
        if index < self._top or len(self._rows) - index > _MOST_ROWS:
            return False
        return self.hides_cursor or (self._moves_up and row.is_redrawn and row.is_new)

    def _draws(self, text: str) -> bool:
        """Return whether text does more than to continue a line and begin others."""
        if len(self._rows) > 1 or self.is_redrawn or "\r" in text or "\b" in text:
            return True
        return "\x1b" in text and "\x1b" in _COLOUR.sub("", text)

    def _append(self, text: str) -> None:
        first, *others = text.split("\n")
        self._rows[0].text += first
        if others:
            self._lines += [self._rows[0].text, *others[:-1]]
            self._rows = [_Row(others[-1])]

    def _take(self, piece: str) -> None:
        control = _CONTROL.fullmatch(piece)
        if piece == "\n":
            self._note_redraw()
            row = self._rows[self._row]
            row.is_redrawn &= bool(row.text)  # else an empty line, and not one that was erased
            self._move_to(self._row + 1)
            self._column = 0 if self._rows[self._row].text else None
        elif piece == "\r":
            self._column = 0
            self._begins_redraw |= self.hides_cursor
        elif piece == "\b":
            self._column = max(0, self._where() - 1)
        elif piece == "\x1bM":
            self._move_up(1)
        elif piece in {"\x1b7", "\x1b[s"}:
            self._saved = (self._row, self._column)
        elif piece in {"\x1b8", "\x1b[u"}:
            self._row, self._column = min(self._saved[0], len(self._rows) - 1), self._saved[1]
        elif control and control["code"] != "m":
            self._obey(control["code"], control["arguments"])
        else:
            self._write(piece)

    def _obey(self, code: str, arguments: str) -> None:
        parts = (each[:6] for each in arguments.split(";"))
        numbers = [min(int(each), _MOST_COLUMNS) if each.isdecimal() else 0 for each in parts]
        count = max(1, numbers[0])
        if code in "JK":
            self._erase(numbers[0], below=code == "J")
        elif code in "hl" and arguments == "?25":
            self.hides_cursor = code == "l"
        elif code in "AF":
            self._move_up(count)
        elif code in "BE":
            self._move_to(min(self._row + count, max(self._row, _MOST_ROWS - 1)))
        elif code in "Hf":
            self._move_up(self._row - count + 1)
            self._move_to(min(count, _MOST_ROWS) - 1)
            self._column = max(1, *numbers[1:2], 1) - 1
        if code in "EF":
            self._column = 0
        elif code == "G":
            self._column = count - 1
        elif code in "CD":
            self._column = max(0, self._where() + (count if code == "C" else -count))

    def _write(self, piece: str) -> None:
        """Write text, or a sequence that belongs to it, such as a colour."""
        self._note_redraw()
        row = self._rows[self._row]
        row.is_new = True
        if self._column == 0:
            # A terminal would go on showing the rest of a longer text, which is of no use in a line.
            row.text, row.is_redrawn, self._column = "", True, None
        if self._column is None:
            row.text += piece
        elif not _CODES.fullmatch(piece):
            row.text, row.is_redrawn = _overwritten(row.text, self._column, piece), True
            self._column += width_of(piece)

    def _erase(self, part: int, *, below: bool) -> None:
        """Erase what follows the cursor (0), what precedes it (1), or both (2); of its row, or of all."""
        if part != 0 or self._column is not None:
            row, self._column = self._rows[self._row], self._where()
            cells, blank = _cells(row.text), [" "] * (self._column + 1)
            kept = {0: cells[: self._column], 1: blank + cells[self._column + 1 :]}.get(part, [])
            row.text, row.is_redrawn, row.is_new = _joined(kept), True, True
        if below and part != 1:
            del self._rows[self._row + 1 :]
        if below and part > 0:
            self._rows[: self._row] = [_Row(is_redrawn=True) for _ in range(self._row)]

    def _where(self) -> int:
        return width_of(self._rows[self._row].text) if self._column is None else self._column

    def _move_up(self, count: int) -> None:
        if count <= 0:
            return
        self._column = self._where()
        above = max(0, self._row - count)
        for row in self._rows[above : self._row + 1]:
            row.is_redrawn = row.is_new = True
        self._row = above
        self._begins_redraw = self._moves_up = True

    def _move_to(self, row: int) -> None:
        self._rows += [_Row() for _ in range(row + 1 - len(self._rows))]
        self._row = row

    def _note_redraw(self) -> None:
        """Note that the program writes at the place that it went to: what is above it is finished."""
        if self._begins_redraw:
            self._top, self._begins_redraw = self._row, False


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() and text.isprintable() else len(_cells(text))


def clipped(text: str, columns: int) -> str:
    """Return as much of a text, with its colours, as fits into so many columns."""
    return _joined(_cells(text.expandtabs())[:columns])


def _cells(text: str) -> list[str]:
    """Return what each column shows, with the codes before it; a wide character is in its second one."""
    cells: list[str] = []
    codes = ""
    for piece in _TOKENS.findall(text):
        if piece.startswith("\x1b"):
            codes += piece
            continue
        for char in piece:
            if unicodedata.category(char) in {"Mn", "Me", "Cf", "Cc"}:
                if cells and char.isprintable():
                    cells[-1] += char
                continue
            if unicodedata.east_asian_width(char) in "WF":
                cells.append("")
            cells.append(codes + char)
            codes = ""
    if cells:
        cells[-1] += codes
    return cells


def _joined(cells: list[str]) -> str:
    text = "".join(cells)
    return text + _RESET * ("\x1b" in text)


def _overwritten(text: str, column: int, new: str) -> str:
    cells, over = _cells(text), _cells(new)
    cells += [" "] * (column - len(cells))
    cells[column : column + len(over)] = over
    return _joined(cells)


def plain(text: str) -> str:
    """Return a text without its colours and other sequences."""
    return _CODES.sub("", text)
