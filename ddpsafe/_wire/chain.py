"""Which exception of a chain says why its rank failed.

What leaves the user's function is often not what went wrong. ``except Exception: sys.exit(1)`` and
``raise RuntimeError("epoch 3") from exc`` wrap what another rank's end has caused here; a collective
in a ``finally`` hides the rank's own error behind such an echo.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import DDPSafeError
from ddpsafe._secondary import symptom_in, tells_of_mismatch
from ddpsafe._wire.exceptions import MAX_MESSAGE, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._secondary import Echo

_OF_A_BACKEND: Final = re.compile(
    r"/gloo/|nccl|c10d|ProcessGroup|(?:Read error|closed by peer) \[", re.IGNORECASE
)
_OF_TORCH: Final = re.compile(r"/torch/(?:distributed/(?!elastic/)|nn/parallel/|autograd/)")
_MEETINGS: Final = 3
_DEEPEST: Final = 4
_GROUP: Final[Any] = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a chain of exceptions comes to.

    Attributes:
        shown: The exception to show: the one that left, or the own error that an echo hides.
        echo: What another rank did to this one, where that is all there is.
        is_wrapped: Whether `shown` is no echo itself, but came of one.
        hidden_by: The echo that hides the own error, which may have been handled before it.
    """

    shown: BaseException
    echo: Echo | None = None
    is_wrapped: bool = False
    hidden_by: BaseException | None = None


def note_met(exc: BaseException) -> None:
    """Count that the rank has met the others while it handled an exception."""
    with contextlib.suppress(Exception):  # it may have no room for a name more
        exc._ddpsafe_met = _met(exc) + 1  # type: ignore[attr-defined]  # noqa: SLF001 - a mark of ours


def is_handled(exc: BaseException) -> bool:
    """Tell whether the rank goes on with its work while it handles an exception.

    A ``finally`` may hold a meeting or two as well, with an exception on its way out.
    """
    return _met(exc) >= _MEETINGS


def _met(exc: BaseException) -> int:
    return int(getattr(exc, "__dict__", {}).get("_ddpsafe_met", 0))


def read_chain(exc: BaseException) -> Reading:
    """Find what says why the rank failed, from the exception that left its function.

    An exception that cannot be read, since its class plays tricks, is what is shown.
    """
    with contextlib.suppress(Exception):
        return _read(exc)
    return Reading(shown=exc)


def _read(exc: BaseException, depth: int = 0) -> Reading:
    chain = list(_chain_of(exc))
    for number in reversed(range(len(chain))):
        outer, inner = chain[number], chain[number + 1 : number + 2]
        echo = _echo_of(outer, depth)
        covers = echo is not None or tells_of_mismatch(line_of(outer, MAX_MESSAGE))
        # What it was raised "from None" over was taken for no matter by whoever raised it.
        if inner and covers and not outer.__suppress_context__:
            return Reading(shown=inner[0], hidden_by=outer)
        if echo is not None:
            return Reading(shown=exc, echo=echo, is_wrapped=outer is not exc)
    return Reading(shown=exc)


def _echo_of(exc: BaseException, depth: int) -> Echo | None:
    """Tell what another rank has done, if that is what this exception, for itself, says.

    The user's own connections break with the same words, in exceptions of other types and places.
    A group of exceptions is an echo if all of them are.
    """
    if isinstance(exc, _GROUP):
        if depth == _DEEPEST:
            return None
        echoes = [_read(each, depth + 1).echo for each in exc.exceptions]
        return echoes[0] if all(echoes) else None
    symptom = symptom_in(line_of(exc, MAX_MESSAGE))
    is_torchs_or_ours = isinstance(exc, DDPSafeError) or _is_torchs(exc)
    return symptom.sort if symptom is not None and is_torchs_or_ours else None


def _is_torchs(exc: BaseException) -> bool:
    """Tell whether torch raised it: its type, its text or the place where it was raised says so."""
    if not isinstance(exc, RuntimeError):
        return False
    return (
        type(exc).__module__.partition(".")[0] == "torch"
        or _OF_A_BACKEND.search(line_of(exc, MAX_MESSAGE)) is not None
        or _OF_TORCH.search(_file_of(exc)) is not None
    )


def _chain_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    at: object = exc
    while isinstance(at, BaseException) and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__context__ if at.__cause__ is None else at.__cause__


def _file_of(exc: BaseException) -> str:
    """Return the file of the line that raised it."""
    file, tb = "", exc.__traceback__
    while tb is not None:
        file, tb = tb.tb_frame.f_code.co_filename, tb.tb_next
    return file
