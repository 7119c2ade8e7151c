"""What can go wrong with checkpoints, one class per kind.

::

    DDPSafeError
      CheckpointError
        CheckpointConfigError (also ValueError)  the call is wrong: relative directory, keep=0
        DirectoryError                           not writable, or not the same for all ranks
        DirectoryLockedError                     another job writes there
        UnsafeStateError (also TypeError)        the state holds what could not be loaded again
        StepOrderError (also ValueError)         the step is older than what is saved
        SaveError                                nothing was saved; the last good one is there
          NoSpaceError                           the disk is full
          SaveTimeoutError (also TimeoutError)   a rank did not do its part in time
        RestoreError                             nothing was restored
          CorruptCheckpointError                 what there is has been damaged
          NewerFormatError                       a newer ddpsafe wrote it
          MissingCheckpointError                 a node does not see what the others see
          CheckpointMismatchError (also ValueError)  it belongs to another model
      CheckpointWarning (a UserWarning)          something you would want to know

An error that one rank meets is raised on every rank, with `rank` saying whose it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import DDPSafeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpsafe._errors import Explanation


class CheckpointError(DDPSafeError):
    """Base of everything that ``ddpsafe.checkpoint`` raises.

    Attributes:
        rank: The rank that met it; ``None`` where every rank did.
    """

    def __init__(self, explanation: Explanation | str, *, rank: int | None = None) -> None:
        super().__init__(explanation)
        self.rank = rank


class CheckpointConfigError(CheckpointError, ValueError):
    """A `Checkpointer` was made or called with bad arguments."""


class DirectoryError(CheckpointError):
    """The directory cannot be used: not writable, vanished, or not the same for all ranks.

    Attributes:
        hosts: The hosts where it is wrong, sorted.
    """

    def __init__(
        self, explanation: Explanation | str, *, hosts: Sequence[str] = (), rank: int | None = None
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.hosts = tuple(hosts)


class DirectoryLockedError(CheckpointError):
    """Another job writes into the directory.

    Attributes:
        owner: What is known of it: ``host``, ``pid``, ``job``, ``since``.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        owner: Mapping[str, object] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.owner: dict[str, object] = dict(owner or {})


class UnsafeStateError(CheckpointError, TypeError):
    """The state holds values that ``torch.load(weights_only=True)`` would refuse.

    Attributes:
        paths: Where, e.g. ``state['config']['loss']``.
    """

    def __init__(
        self, explanation: Explanation | str, *, paths: Sequence[str] = (), rank: int | None = None
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.paths = tuple(paths)


class StepOrderError(CheckpointError, ValueError):
    """The step is older than the newest checkpoint.

    Attributes:
        step: The step that was to be saved.
        newest: The step that is there.
    """

    def __init__(
        self, explanation: Explanation | str, *, step: int, newest: int, rank: int | None = None
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.step = step
        self.newest = newest


class SaveError(CheckpointError):
    """Nothing was saved; the checkpoints from before are as they were.

    Attributes:
        step: The step that was to be saved.
    """

    def __init__(
        self, explanation: Explanation | str, *, step: int, rank: int | None = None
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.step = step


class NoSpaceError(SaveError):
    """The disk, or a quota on it, is full.

    Attributes:
        needed_bytes: What the checkpoint takes, about.
        free_bytes: What is free.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        step: int,
        needed_bytes: int,
        free_bytes: int,
        rank: int | None = None,
    ) -> None:
        super().__init__(explanation, step=step, rank=rank)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class SaveTimeoutError(SaveError, TimeoutError):
    """A rank did not do its part of a save within the checkpointer's `timeout`.

    Attributes:
        missing_ranks: The ranks that did not.
        waited_s: How long was waited, in seconds.
    """

    origin = "timeout"

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        step: int,
        missing_ranks: Sequence[int],
        waited_s: float,
        rank: int | None = None,
    ) -> None:
        super().__init__(explanation, step=step, rank=rank)
        self.missing_ranks = tuple(missing_ranks)
        self.waited_s = waited_s


class RestoreError(CheckpointError):
    """Nothing was restored."""


class CorruptCheckpointError(RestoreError):
    """Every checkpoint that there is has been damaged.

    Attributes:
        problems: What is wrong and where, one text for each checkpoint.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        problems: Sequence[str] = (),
        rank: int | None = None,
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.problems = tuple(problems)


class NewerFormatError(RestoreError):
    """A newer ddpsafe wrote the checkpoint.

    Attributes:
        found: The version of its format.
        known: The newest that is understood here.
    """

    def __init__(
        self, explanation: Explanation | str, *, found: int, known: int, rank: int | None = None
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.found = found
        self.known = known


class MissingCheckpointError(RestoreError):
    """The nodes have no checkpoint in common.

    Attributes:
        steps: The steps that each host sees.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        steps: Mapping[str, Sequence[int]] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.steps = {host: tuple(seen) for host, seen in (steps or {}).items()}


class CheckpointMismatchError(RestoreError, ValueError):
    """The checkpoint belongs to another model, or to other objects.

    Attributes:
        differences: What differs, by name: what is saved, and what is there now.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        differences: Mapping[str, tuple[object, object]] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(explanation, rank=rank)
        self.differences = {name: tuple(pair) for name, pair in (differences or {}).items()}


class CheckpointWarning(UserWarning):
    """Nothing is lost, but you would want to know."""


_OURS: Final = (f"{Path(__file__).parent.parent}{os.sep}", str(contextlib.__file__))
"""What stands between a warning and the line that led to it."""


def warn(text: str) -> None:
    """Warn of what does not end the training, at the line of the user's script that led to it."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - inspect.stack would read the sources
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"ddpsafe: {text}", CheckpointWarning, stacklevel=level)


BY_NAME: Final = {
    name: each
    for name, each in list(globals().items())
    if isinstance(each, type) and issubclass(each, CheckpointError)
}
"""Every error, by its name, as it travels between ranks."""
