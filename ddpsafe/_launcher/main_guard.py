"""The missing ``if __name__ == "__main__":`` and what it does, found before anything starts."""

from __future__ import annotations

import ast
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._wire.payload import main_is_importable

if TYPE_CHECKING:
    from types import FrameType


def require_main_guard() -> None:
    """Refuse a launch that every new process would repeat while it imports the script.

    Raises:
        ConfigError: The call stands at the top level of the main script, outside any ``if``; or
            this process is itself importing the main script of its parent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise _missing("this process was started by another launch and imports its script.")
    frame = _top_level_frame() if main_is_importable() else None
    if frame is None:
        return
    path, line = frame.f_code.co_filename, frame.f_lineno
    if not _is_under_an_if(path, line):
        raise _missing(f"{path}:{line} launches at the top level of the script.")


def _top_level_frame() -> FrameType | None:
    """Find the frame of the main script's top level, if the launch was called from there."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - inspect.stack reads all sources
    while frame is not None:
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None


def _is_under_an_if(path: str, line: int) -> bool:
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return True  # no source to judge by
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or line)]
    return not around or any(isinstance(node, ast.If) for node in around)


def _missing(what: str) -> ConfigError:
    cause = "every rank imports the script, and would launch again while it does."
    fix = 'put the call under  if __name__ == "__main__":  at the end of the script.'
    return ConfigError(Explanation(what, cause=cause, fix=fix))
