"""How far a rank has come: numbers that it writes and its launcher reads, without a message or a lock."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Final

_NUMBERS: Final = struct.Struct("<QQqQ")
_NO_CHECKPOINT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank has come in one attempt.

    Attributes:
        steps: Optimizer steps of this attempt.
        saves: Checkpoints that it has saved in this attempt.
        checkpoint: Step number of the last one that it has restored or saved; ``None`` without one.
        steps_at_checkpoint: What `steps` was by then.
    """

    steps: int = 0
    saves: int = 0
    checkpoint: int | None = None
    steps_at_checkpoint: int = 0

    @property
    def steps_since_checkpoint(self) -> int:
        """Optimizer steps behind the last checkpoint."""
        return self.steps - self.steps_at_checkpoint


class StepCounter:
    """The progress of one rank, in memory that both processes map.

    Args:
        fd: A file that begins with `EMPTY`; mapped here, closed by its owner.
    """

    EMPTY: Final = _NUMBERS.pack(0, 0, _NO_CHECKPOINT, 0)
    """What a new file has to contain."""

    def __init__(self, fd: int) -> None:
        """Map the file."""
        self._memory = mmap.mmap(fd, _NUMBERS.size)

    def count(self) -> None:
        """Count one optimizer step; costs a fraction of a microsecond."""
        steps, *others = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, steps + 1, *others)

    def note_checkpoint(self, step: int, *, is_new: bool) -> None:
        """Note that the rank goes on from a checkpoint: it has restored it, or saved a new one."""
        steps, saves, _, _ = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, steps, saves + is_new, step, steps)

    def read(self) -> Progress:
        """Return how far the rank has come."""
        steps, saves, checkpoint, steps_at_checkpoint = _NUMBERS.unpack_from(self._memory)
        return Progress(
            steps=steps,
            saves=saves,
            checkpoint=None if checkpoint == _NO_CHECKPOINT else checkpoint,
            steps_at_checkpoint=steps_at_checkpoint,
        )

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
