"""Ranks that write to the console; run by test_console.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import scripts
from exception_programs import raise_own_error
from training_programs import mark

from ddpsafe import RankContext

LINES = 200


def speak(ctx: RankContext) -> None:
    """Print one line on each stream."""
    print(f"out of rank {ctx.rank}")
    print(f"err of rank {ctx.rank}", file=sys.stderr)


def write_in_pieces(rank: int) -> None:
    """Write many lines, each in pieces, as fast as possible."""
    for number in range(LINES):
        for piece in ("rank ", f"{rank} ", "line ", f"{number}"):
            os.write(1, piece.encode())
        os.write(1, b"\n")


def write_half_a_line(rank: int, folder: Path) -> None:
    """Leave rank 0 in the middle of a line while rank 1 writes one."""
    if rank == 0:
        os.write(1, b"first half, ")
        (folder / "half").touch()
        scripts.wait_until((folder / "gate").exists)
        os.write(1, b"second half\n")
    else:
        scripts.wait_until((folder / "half").exists)
        os.write(1, b"a whole line\n")


def show_progress(ctx: RankContext, gate: Path) -> None:
    """Redraw a line as a progress bar does, and hold it at 50 % until the gate opens."""
    if not ctx.is_main:
        return
    os.write(2, b"\r  0%|     |")
    os.write(2, "\r 50%|██▌  |".encode())
    scripts.wait_until(gate.exists)
    os.write(2, "\r100%|█████|\n".encode())


def write_bytes(_ctx: RankContext, gate: Path) -> None:
    """Write text that some terminals cannot show, one character in two parts, and invalid bytes."""
    os.write(1, b"caf\xc3")
    scripts.wait_until(gate.exists)
    os.write(1, b"\xa9 \xff\n")


def write_much(ctx: RankContext, folder: Path, then: str, lines: int = 3000) -> None:
    """Write more than a pipe holds on rank 0; once the gate is open, ``return`` or ``raise``, and record when."""
    if ctx.is_main:
        os.write(1, b"".join(b"%099d\n" % number for number in range(lines)))
        (folder / "written").touch()
        scripts.wait_until((folder / "gate").exists)
        mark(folder)
        if then == "raise":
            raise_own_error(folder)


def fail_once(ctx: RankContext) -> None:
    """Fail in the first attempt with an error that is retried."""
    if ctx.attempt == 1:
        msg = "once"
        raise ConnectionError(msg)
