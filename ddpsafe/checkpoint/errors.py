"""What can go wrong with checkpoints, one class per kind.

::

    DDPSafeError
      ConfigError                                the call is wrong: relative directory, keep=0
      CheckpointError
        DirectoryError                           not writable, or not the same for all ranks
        DirectoryLockedError                     another job writes there
        UnsafeStateError (also TypeError)        the state has values that could not be loaded again
        StepOrderError (also ValueError)         the step is older than the newest checkpoint
        SaveError                                nothing was saved; earlier checkpoints are intact
          NoSpaceError                           the disk is full
          SaveTimeoutError (also TimeoutError)   a rank did not do its part in time
        RestoreError                             nothing was restored
          CorruptCheckpointError                 all checkpoints, or the requested one, are damaged
          NewerFormatError                       a newer ddpsafe wrote it
          MissingCheckpointError                 a node does not see what the others see
          CheckpointMismatchError (also ValueError)  it belongs to another model
      CheckpointWarning (a UserWarning)          something you would want to know

An error on one rank is raised on every rank, and its `rank` names that rank.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field

from ddpsafe._errors import DDPSafeError
from ddpsafe._wire.exception_facts import is_internal


@dataclass(eq=False, repr=False, kw_only=True)
class CheckpointError(DDPSafeError):
    """Base of the errors of ``ddpsafe.checkpoint``, except for wrong calls: those are `ConfigError`.

    Attributes:
        rank: The rank where the error occurred; ``None`` if it occurred on every rank.
    """

    rank: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class DirectoryError(CheckpointError):
    """The directory cannot be used: not writable, vanished, or not the same for all ranks.

    Attributes:
        hosts: The hosts where it cannot be used, sorted.
    """

    hosts: tuple[str, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class DirectoryLockedError(CheckpointError):
    """Another job writes into the directory.

    Attributes:
        owner: What is known about that job: ``host``, ``pid``, ``job``, ``since``.
    """

    owner: dict[str, object] = field(default_factory=dict)


@dataclass(eq=False, repr=False, kw_only=True)
class UnsafeStateError(CheckpointError, TypeError):
    """The state holds values that ``torch.load(weights_only=True)`` would refuse.

    Attributes:
        paths: Where the values are, e.g. ``state['config']['loss']``.
    """

    paths: tuple[str, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class StepOrderError(CheckpointError, ValueError):
    """The step is older than the newest checkpoint.

    Attributes:
        step: The step that was to be saved.
        newest: The step of the newest checkpoint.
    """

    step: int
    newest: int


@dataclass(eq=False, repr=False, kw_only=True)
class SaveError(CheckpointError):
    """Nothing was saved; earlier checkpoints are unchanged.

    Attributes:
        step: The step that was to be saved.
    """

    step: int


@dataclass(eq=False, repr=False, kw_only=True)
class NoSpaceError(SaveError):
    """The disk, a quota on it, or the memory for `memory_every` does not suffice.

    Attributes:
        needed_bytes: Approximate size of the checkpoint.
        free_bytes: Free space.
    """

    needed_bytes: int
    free_bytes: int


@dataclass(eq=False, repr=False, kw_only=True)
class SaveTimeoutError(SaveError, TimeoutError):
    """A rank did not do its part of a save within the checkpointer's `timeout`.

    Attributes:
        missing_ranks: The ranks that did not do their part.
        waited_s: How long the others waited, in seconds.
    """

    origin = "timeout"

    missing_ranks: tuple[int, ...]
    waited_s: float


class RestoreError(CheckpointError):
    """Nothing was restored."""


@dataclass(eq=False, repr=False, kw_only=True)
class CorruptCheckpointError(RestoreError):
    """All checkpoints, or the requested one, are damaged.

    Attributes:
        problems: Descriptions of what is damaged and where.
    """

    problems: tuple[str, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class NewerFormatError(RestoreError):
    """A newer ddpsafe wrote the checkpoint.

    Attributes:
        found: The format version of the checkpoint.
        known: The newest format version that this ddpsafe reads.
    """

    found: int
    known: int


@dataclass(eq=False, repr=False, kw_only=True)
class MissingCheckpointError(RestoreError):
    """The ranks have no checkpoint in common, or not the requested one.

    Attributes:
        steps: The steps that each host sees.
    """

    steps: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(eq=False, repr=False, kw_only=True)
class CheckpointMismatchError(RestoreError, ValueError):
    """The checkpoint belongs to another model, or to other objects.

    Attributes:
        differences: What differs, by path: the saved value and the present one.
    """

    differences: dict[str, tuple[object, object]] = field(default_factory=dict)


class CheckpointWarning(UserWarning):
    """Nothing is lost, but you would want to know."""


def warn(text: str) -> None:
    """Issue a `CheckpointWarning` that points to the line of the user's script."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - inspect.stack would read the sources
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"ddpsafe: {text}", CheckpointWarning, stacklevel=level)
