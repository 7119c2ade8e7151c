"""What can be said of an exception in plain text; nothing here raises one itself."""

from __future__ import annotations

import signal
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

_CUT: Final = " […] "

MAX_MESSAGE: Final = 4_000
"""So many characters of an exception's text are looked at and shown."""


def clip(text: str, limit: int) -> str:
    """Shorten text from its middle: the head says what it is, the tail how it ended."""
    if len(text) <= limit:
        return text
    half = (limit - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def where_of(tb: TracebackType | None) -> str:
    """Name the innermost line of a traceback that belongs to the user.

    Returns:
        ``path:line in function``, or nothing where every frame is a library's.
    """
    frames = traceback.extract_tb(tb)
    own = [frame for frame in frames if not is_library(frame.filename)]
    frame = own[-1] if own else None
    return f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else ""


def is_library(filename: str) -> bool:
    """Tell whether a file belongs to Python, to an installed package or to ddpsafe."""
    return filename.startswith(("<frozen", _PACKAGE, _STDLIB)) or "site-packages" in filename


_PACKAGE: Final = str(Path(__file__).parents[1])
_STDLIB: Final = sysconfig.get_path("stdlib")


def type_name_of(exc: BaseException) -> str:
    """Return the qualified name of its type, as a traceback shows it."""
    cls = type(exc)
    if cls.__module__ in ("builtins", "__main__", "__mp_main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def text_of(exc: BaseException) -> str:
    """Return ``str()`` of an exception, whatever its own ``__str__`` does."""
    try:
        return str(exc)
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(its __str__ raised {type(broken).__name__})"


def line_of(exc: BaseException, limit: int) -> str:
    """Return its type and at most so many characters of its text, as a traceback ends."""
    return f"{type_name_of(exc)}: {clip(text_of(exc), limit)}"


def traceback_of(exc: BaseException) -> str:
    """Return the traceback with its chain, as Python prints it."""
    try:
        return "".join(traceback.format_exception(exc))
    except BaseException:  # noqa: BLE001 - formatting calls the user's __str__ and __repr__
        return "".join(traceback.format_tb(exc.__traceback__)) + type_name_of(exc)


def exit_code_of(exc: BaseException) -> int | None:
    """Return the code an exception asks to exit with; ``None`` where it is no such request.

    The system keeps eight bits of it. A code that is an error stays one: ``sys.exit(256)``, which
    is what ``sys.exit(os.system(…))`` comes to, would else be a success.
    """
    if isinstance(exc, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(exc, SystemExit):
        return None
    if exc.code is None:
        return 0
    if not isinstance(exc.code, int):
        return 1
    return exc.code & 0xFF or int(exc.code != 0)
