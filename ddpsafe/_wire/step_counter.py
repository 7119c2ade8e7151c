"""A number that a rank counts up and its launcher reads, without a message or a lock."""

from __future__ import annotations

import mmap
import struct
from typing import Final

_NUMBER: Final = struct.Struct("<Q")


class StepCounter:
    """Steps of one rank, in memory that both processes map.

    Args:
        fd: A file of at least 8 bytes; mapped here, closed by its owner.
    """

    def __init__(self, fd: int) -> None:
        """Map the file."""
        self._memory = mmap.mmap(fd, _NUMBER.size)

    EMPTY: Final = _NUMBER.pack(0)
    """What a new file has to contain."""

    def count(self) -> None:
        """Count one step; costs a fraction of a microsecond."""
        (steps,) = _NUMBER.unpack_from(self._memory)
        _NUMBER.pack_into(self._memory, 0, steps + 1)

    def read(self) -> int:
        """Return the number of steps so far."""
        return int(_NUMBER.unpack_from(self._memory)[0])

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
