"""Lists of metadata that workers share instead of copying."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch

from ddpsafe.data._arguments import require_int

T = TypeVar("T")


class PackedList(Sequence[T], Generic[T]):
    """A read-only list whose items are pickled into one buffer.

    Reading an item of a Python list writes its reference count, so each forked worker ends up
    copying the whole list, and each spawned one receives a copy. The buffer is one tensor: it
    stays shared after a fork, and torch passes it to spawned workers through shared memory.
    (As detectron2's NumpySerializedList.)

    Args:
        items: What to store; anything that pickles. Items come back equal, not identical.
    """

    def __init__(self, items: Iterable[T]) -> None:
        packed = [pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL) for item in items]
        sizes = np.fromiter((len(part) for part in packed), dtype=np.int64, count=len(packed))
        self._ends = torch.from_numpy(np.cumsum(sizes))
        # torch.frombuffer refuses an empty buffer.
        self._buffer = torch.frombuffer(bytearray(b"".join(packed) or b"\0"), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._item(place) for place in range(*index.indices(len(self)))]
        place = require_int(index, "index")
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} is outside of a PackedList of {len(self)}")
        return self._item(place % len(self))

    def _item(self, place: int) -> T:
        ends = self._ends.numpy()
        start = int(ends[place - 1]) if place else 0
        value: Any = pickle.loads(memoryview(self._buffer.numpy())[start : int(ends[place])])  # type: ignore[arg-type]  # noqa: S301 - packed by this object
        return value  # type: ignore[no-any-return]  # what was packed

    def nbytes(self) -> int:
        """Return the size of the buffers in bytes."""
        return self._buffer.nbytes + self._ends.nbytes

    def __repr__(self) -> str:
        return f"PackedList(len={len(self)}, bytes={self.nbytes()})"
