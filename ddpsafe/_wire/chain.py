"""Which exception of a chain says why its rank failed.

What leaves the user's function is often not what went wrong. ``except Exception: sys.exit(1)`` and
``raise RuntimeError("epoch 3") from exc`` wrap what another rank's end has caused here; a collective
in a ``finally`` hides the rank's own error behind such an echo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import DDPSafeError
from ddpsafe._secondary import symptom_in, tells_of_mismatch
from ddpsafe._wire.exceptions import MAX_MESSAGE, clip, text_of, type_name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._secondary import Echo

_OF_A_BACKEND: Final = re.compile(
    r"/gloo/|nccl|c10d|ProcessGroup|\[[0-9a-f.:]+\]:\d+", re.IGNORECASE
)
_OF_TORCH: Final = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a chain of exceptions comes to.

    Attributes:
        shown: The exception to show: the one that left, or the own error that an echo hides.
        echo: What another rank did to this one, where that is all there is.
        hidden_by: The echo that hides the own error, which may have been handled before it.
    """

    shown: BaseException
    echo: Echo | None = None
    hidden_by: BaseException | None = None


def read_chain(exc: BaseException) -> Reading:
    """Find what says why the rank failed, from the exception that left its function."""
    chain = list(_chain_of(exc))
    for number in reversed(range(len(chain))):
        outer, inner = chain[number], chain[number + 1 : number + 2]
        if inner and (echo_of(outer) or tells_of_mismatch(_text_of(outer))):
            return Reading(shown=inner[0], hidden_by=outer)
        if echo := echo_of(outer):
            return Reading(shown=exc, echo=echo)
    return Reading(shown=exc)


def echo_of(exc: BaseException) -> Echo | None:
    """Tell what another rank has done, if that is what this exception, for itself, says.

    The user's own connections break with the same words, in exceptions of other types and places.
    """
    symptom = symptom_in(_text_of(exc))
    if symptom is None:
        return None
    is_torchs = isinstance(exc, RuntimeError) and (
        type(exc) is not RuntimeError
        or _OF_A_BACKEND.search(_text_of(exc)) is not None
        or any(part in file for file in _files_of(exc) for part in _OF_TORCH)
    )
    return symptom.sort if is_torchs or isinstance(exc, DDPSafeError) else None


def _text_of(exc: BaseException) -> str:
    return f"{type_name_of(exc)}: {clip(text_of(exc), MAX_MESSAGE)}"


def _chain_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    at: BaseException | None = exc
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__context__ if at.__cause__ is None else at.__cause__


def _files_of(exc: BaseException) -> Iterator[str]:
    tb = exc.__traceback__
    while tb is not None:
        yield tb.tb_frame.f_code.co_filename
        tb = tb.tb_next
