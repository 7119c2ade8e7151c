"""Which samples make up each global batch when lengths are balanced, and how to resume that.

The global order is cut into windows of `window` global batches. Within a window samples are
sorted by length, cut into global batches, and these shuffled. A resume in the middle of a window
with another global batch size must know what the old plan had delivered of it: the position
therefore keeps the window's start and, for each size it was planned with, how many batches
were delivered. Window 0 leaves every global batch as `DistributedSampler` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddpsafe.data._permutation import random_order
from ddpsafe.data.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


_FIRST: Final = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A window, or what was left of it, planned with one global batch size.

    Attributes:
        batch: Samples per global batch.
        delivered: How many of its batches were delivered.
        end: Position in the global order where it ends.
    """

    batch: int
    delivered: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a balanced epoch.

    Attributes:
        start: Where the window under way starts; everything before was delivered.
        segments: How that window was planned so far.
    """

    start: int = 0
    segments: tuple[Segment, ...] = ()

    def consumed(self) -> int:
        """Return how many samples were delivered."""
        return self.start + sum(part.batch * part.delivered for part in self.segments)

    def to_json(self) -> list[Any]:
        """Return plain values."""
        return [self.start, [[part.batch, part.delivered, part.end] for part in self.segments]]

    @classmethod
    def from_json(cls, value: Any) -> Place:
        """Read what `to_json` wrote.

        Raises:
            StateMismatchError: It did not write this.
        """
        try:
            start, parts = value
            segments = tuple(
                Segment(batch=int(batch), delivered=int(delivered), end=int(end))
                for batch, delivered, end in parts
            )
            return cls(start=int(start), segments=segments)
        except (TypeError, ValueError) as error:
            message = f"The state's 'place' is damaged: {value!r}."
            raise StateMismatchError(message) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The global batches of an epoch, from any place on.

    Attributes:
        n: How many samples the epoch has.
        batch: Samples per global batch.
        window: Global batches per window; 0 for none.
        drop_last: Whether the last, smaller global batch is dropped.
        largest_first: Whether the largest batch of the first window is the first of the epoch.
    """

    n: int
    batch: int
    window: int
    drop_last: bool
    largest_first: bool = False

    def open_segment(self, place: Place) -> tuple[Segment, int]:
        """Return the segment to read next from `place`, and how many samples it has."""
        left = self._left_in_window(place)
        last = place.segments[-1] if place.segments else None
        if last is not None and last.batch == self.batch:
            return last, left + last.batch * last.delivered
        if last is None:
            end = min(self.n, place.start + max(1, self.window) * self.batch)
            return Segment(batch=self.batch, delivered=0, end=end), end - place.start
        # What is left of a window planned with another size is filled up to whole batches.
        end = min(self.n, last.end + -left % self.batch)
        return Segment(batch=self.batch, delivered=0, end=end), left + end - last.end

    def _left_in_window(self, place: Place) -> int:
        return place.segments[-1].end - place.consumed() if place.segments else 0

    def steps(self, place: Place) -> int:
        """Return how many global batches are left."""
        left = max(0, self.n - place.consumed())
        return left // self.batch if self.drop_last else -(-left // self.batch)

    def advance(self, place: Place, batches: int) -> Place:
        """Return the place after `batches` further global batches."""
        while batches > 0 and place.start < self.n:
            segment, size = self.open_segment(place)
            left = -(-size // self.batch) - segment.delivered
            if batches < left:
                return self._within(place, segment, batches)
            batches -= left
            place = Place(start=segment.end)
            whole, batches = divmod(batches, max(1, self.window))
            place = Place(start=min(self.n, place.start + whole * self._window_size()))
        return place

    def _window_size(self) -> int:
        return max(1, self.window) * self.batch

    @staticmethod
    def _within(place: Place, segment: Segment, batches: int) -> Place:
        earlier = place.segments
        if earlier and earlier[-1].batch == segment.batch:
            earlier = earlier[:-1]
        now = Segment(batch=segment.batch, delivered=segment.delivered + batches, end=segment.end)
        return Place(start=place.start, segments=(*earlier, now))

    def read(
        self,
        place: Place,
        lengths: NDArray[np.float64],
        look_up: Callable[[int, int], list[int]],
        seed_words: tuple[int, int],
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the dataset indices of each global batch, shape (g,), int64.

        Args:
            place: Where to begin.
            lengths: Of all samples, shape (n,).
            look_up: Global order: positions start to stop -> indices.
            seed_words: Seed and epoch.
        """
        for _ in range(self.steps(place)):
            segment, _size = self.open_segment(place)
            for batch in self._segment_batches(place, segment, lengths, look_up, seed_words):
                if self.drop_last and len(batch) < self.batch:
                    return
                yield batch
            place = Place(start=segment.end)
            if place.start >= self.n:
                return

    def _segment_batches(
        self,
        place: Place,
        segment: Segment,
        lengths: NDArray[np.float64],
        look_up: Callable[[int, int], list[int]],
        seed_words: tuple[int, int],
    ) -> list[NDArray[np.int64]]:
        """Replay the window's earlier plans, then return this segment's remaining batches."""
        items = np.empty(0, dtype=np.int64)
        batches: list[NDArray[np.int64]] = []
        covered = place.start
        earlier = [part for part in place.segments if part is not segment]
        for number, part in enumerate([*earlier, segment]):
            fresh = np.asarray(look_up(covered, part.end), dtype=np.int64)
            items = np.concatenate([items, fresh])
            covered = max(covered, part.end)
            words = (*seed_words, place.start, number)
            batches = self._cut(items, part.batch, lengths, words)[part.delivered :]
            items = np.concatenate([np.empty(0, dtype=np.int64), *batches])
        return batches

    def _cut(
        self,
        items: NDArray[np.int64],
        size: int,
        lengths: NDArray[np.float64],
        words: tuple[int, ...],
    ) -> list[NDArray[np.int64]]:
        if self.window == 0:
            return [items[first : first + size] for first in range(0, len(items), size)]
        ordered = items[np.argsort(-lengths[items], kind="stable")]
        whole = len(ordered) // size
        batches = [ordered[i * size : (i + 1) * size] for i in range(whole)]
        order = random_order(whole, words).tolist()
        if self.largest_first and words[2:] == _FIRST and whole:
            order.remove(0)
            order.insert(0, 0)
        shuffled = [batches[i] for i in order]
        # A smaller batch comes last, so that batches delivered always count alike.
        rest = ordered[whole * size :]
        return [*shuffled, rest] if len(rest) else shuffled
