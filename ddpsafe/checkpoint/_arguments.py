"""What a `Checkpointer` is made and called with, judged before anything happens."""

from __future__ import annotations

import contextlib
import operator
from datetime import timedelta
from typing import TYPE_CHECKING

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint.errors import CheckpointConfigError, StepOrderError

if TYPE_CHECKING:
    from pathlib import Path


def require_absolute(directory: object) -> Path:
    """Return the directory as a path.

    Raises:
        CheckpointConfigError: It is relative, or no path.
    """
    from pydantic import TypeAdapter, ValidationError

    from ddpsafe._config import AbsolutePath

    try:
        path: Path = TypeAdapter(AbsolutePath).validate_python(directory)
    except ValidationError as exc:
        context = exc.errors()[0].get("ctx", {})
        raise CheckpointConfigError(
            Explanation(
                f"Checkpointer({directory!r}): the directory cannot be used.",
                cause=str(context.get("why", exc)),
                fix=f"write {context.get('write', 'an absolute path')}",
            )
        ) from None
    return path


def misuse(what: str, cause: str, fix: str) -> CheckpointConfigError:
    """Word the error of a wrong call."""
    return CheckpointConfigError(Explanation(f"Checkpointer: {what}", cause=cause, fix=fix))


def check_arguments(keep: object, timeout: object, *, on_failure: str, access: str) -> None:
    """Refuse what no checkpointer can be made with.

    Raises:
        CheckpointConfigError: As it says.
    """
    if keep is not None and not _is_whole(keep, 1):
        raise misuse(
            f"keep={keep!r}.", "it is a number of checkpoints.", "write keep=1 or more, or None."
        )
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise misuse(
            f"timeout={timeout!r}.", "it is a duration.", "write timeout=timedelta(minutes=30)."
        )
    for name, value, choices in (
        ("on_failure", on_failure, ("raise", "warn")),
        ("access", access, ("write", "read")),
    ):
        if value not in choices:
            raise misuse(
                f"{name}={value!r}.", "there is no such choice.", f"write {' or '.join(choices)}."
            )


def require_step(step: object) -> int:
    """Return a step as a number of Python, whatever kind of whole number it is.

    Raises:
        CheckpointConfigError: It is none.
    """
    whole = -1
    if not isinstance(step, bool):
        with contextlib.suppress(TypeError):
            whole = operator.index(step)  # type: ignore[arg-type]  # what is tried
    if whole < 0:
        raise misuse(
            f"save(step={step!r}).",
            "a step is a whole number from 0.",
            "pass the number of steps done so far.",
        )
    return whole


def require_open(*, closed: bool, entered: bool, asynchronous: bool) -> None:
    """Refuse a call that comes too late, or needs a ``with`` block and has none.

    Raises:
        CheckpointConfigError: As it says.
    """
    if closed:
        raise misuse(
            "this one is closed.",
            "the with block was left, or close() called.",
            "make another Checkpointer, or call this one before it is closed.",
        )
    if asynchronous and not entered:
        raise misuse(
            "save(asynchronous=True) outside of its with block.",
            "without one, nobody would wait for the last save when the training ends.",
            "write: with Checkpointer(…) as checkpointer:",
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def step_too_old(step: int, newest: int, directory: Path, *, is_ours: bool) -> StepOrderError:
    """Word the error of a step that is not after the newest checkpoint."""
    return StepOrderError(
        Explanation(
            f"step {step} is not after step {newest}, the newest checkpoint in {directory}.",
            cause="the training went on from it and counts anew."
            if is_ours
            else "restore() was not called, or the directory is another training's.",
            fix="begin to count at the step that restore() returns; for a new training choose "
            "an empty directory.",
        ),
        step=step,
        newest=newest,
    )


def check_shards(shards: object, *, asynchronous: bool) -> None:
    """Refuse an asynchronous save of distributed tensors.

    Raises:
        CheckpointConfigError: As it says.
    """
    if asynchronous and shards:
        raise misuse(
            "save(asynchronous=True) of distributed tensors.",
            "they are written by collectives, which must not run beside those of the training.",
            "save them with asynchronous=False.",
        )
