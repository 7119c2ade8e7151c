"""Memory that the launcher of a node owns, in which its ranks keep states of the training.

It outlives the ranks, so the next attempt restores from it, and it is gone with the launcher: no file has a name.
"""

from __future__ import annotations

import os
import weakref


class NodeMemory:
    """Files without a name, empty until a rank writes into them: two places for a state.

    `memfd_create` charges their pages to the control group of the rank that writes them, and needs no room
    in /dev/shm.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.close = weakref.finalize(self, _close, self._fds)

    def files(self, nproc: int) -> tuple[int, ...]:
        """Return the descriptors in this process, slot by slot; none where the system has no such files."""
        if not self._fds and hasattr(os, "memfd_create"):
            try:
                # Twice: manifest, state, the ranks' own parts, and for each rank one for its shards.
                for _ in range(2 * (3 + nproc)):
                    self._fds.append(os.memfd_create("ddpsafe-state"))
            except OSError:  # the job runs without, and a Checkpointer that wants them says so
                _close(self._fds)
        return tuple(self._fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
