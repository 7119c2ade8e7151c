"""How to start workers: as torch would, unless a fork would hand them something shared."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.multiprocessing as mp

from ddpsafe._errors import Explanation
from ddpsafe.data._worker_safety import WorkerHazard, find_handles, find_unpicklable
from ddpsafe.data.errors import DataWarning, UnsafeWorkersError

if TYPE_CHECKING:
    from collections.abc import Sequence

WorkerSafety = Literal["error", "warn", "off"]


def choose_start_method(
    parts: dict[str, object],
    *,
    requested: Any,
    safety: WorkerSafety,
) -> str | None:
    """Return the start method the workers need, or ``None`` to leave it as it is.

    Args:
        parts: What goes to the workers, by name: the dataset, collate_fn, worker_init_fn.
        requested: The loader's ``multiprocessing_context``.
        safety: What to do if no start method is safe.

    Raises:
        UnsafeWorkersError: The dataset holds an open handle, and cannot be pickled either.
    """
    if safety == "off" or _method_name(requested) != "fork":
        return None
    unsafe = [
        hazard
        for name, part in parts.items()
        for hazard in find_handles(part, name=name)
        if hazard.severity == "unsafe"
    ]
    if requested is None and (unsafe or _cuda_is_up()) and _can_be_pickled(parts):
        return "forkserver"
    if unsafe:
        _complain(unsafe, safety)
    return None


def explain_pickling(error: Exception, parts: dict[str, object]) -> UnsafeWorkersError | None:
    """Say which part of the dataset kept spawned workers from starting, if one did."""
    for name, part in parts.items():
        where = find_unpicklable(part, name=name)
        if where is not None:
            path, reason = where
            return UnsafeWorkersError(
                Explanation(
                    f"{path} cannot be sent to the workers: {reason}.",
                    cause=f"spawned workers receive everything pickled ({type(error).__name__}).",
                    fix="open resources in a ddpsafe.data.PerProcess; use functions and classes "
                    "at module level instead of lambdas.",
                ),
                paths=[path],
            )
    return None


def _method_name(requested: Any) -> str:
    if requested is None:
        # Asking the default context for its method would fix it for the whole process.
        return mp.get_start_method(allow_none=True) or mp.get_all_start_methods()[0]
    return str(requested if isinstance(requested, str) else requested.get_start_method())


def _cuda_is_up() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has no types here


def _can_be_pickled(parts: dict[str, object]) -> bool:
    return all(find_unpicklable(part, name=name) is None for name, part in parts.items())


def _complain(unsafe: Sequence[WorkerHazard], safety: WorkerSafety) -> None:
    text = Explanation(
        f"The workers would share an open handle with this process: {unsafe[0].path} "
        f"({unsafe[0].kind}).",
        cause="it was opened before the workers start. After a fork they share its position, "
        "so they read each other's records, without an error.",
        fix="open it in the worker: self.file = ddpsafe.data.PerProcess(open, path, 'rb'), then "
        "self.file.get(). If worker_init_fn reopens it: worker_safety='off'.",
        details=[str(hazard) for hazard in unsafe],
    )
    if safety == "error":
        raise UnsafeWorkersError(text, paths=[hazard.path for hazard in unsafe])
    warnings.warn(str(text), DataWarning, stacklevel=5)
