"""Which samples make up each global batch when lengths are balanced: by tokens, or in windows."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ddpsafe.data._arguments import bad_arguments, require_amounts, require_choice
from ddpsafe.data._samplers.permutation import random_order
from ddpsafe.data.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


Cost = Literal["sum", "padded"] | Callable[[float], float]
"""What a batch costs: the sum of its lengths, its longest times its size, or the sum of a
function of each length (e.g. its square, for attention)."""


def deal(costs: NDArray[np.float64], num_replicas: int, *, padded: bool) -> list[NDArray[np.int64]]:
    """Divide a global batch so that ranks have equal counts and similar costs.

    Args:
        costs: Shape (g,), float64; g is a multiple of `num_replicas`.
        num_replicas: The number of ranks.
        padded: Whether a batch costs its longest sample times its size.

    Returns:
        For each rank the places of its samples in the batch, shape (g / num_replicas,), int64.
    """
    share = len(costs) // num_replicas
    order = np.argsort(-costs, kind="stable")
    # If batches are padded, balance cannot shorten the step, as one rank has the longest sample:
    # samples of similar length stay together.
    if padded or num_replicas == 1:
        return [np.sort(order[r * share : (r + 1) * share]) for r in range(num_replicas)]
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    # Longest processing time first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    loads = [(0.0, rank) for rank in range(num_replicas)]
    for place in order.tolist():
        load, rank = heapq.heappop(loads)
        shares[rank].append(place)
        # Ranks have equal counts: one that has its share receives no more.
        if len(shares[rank]) < share:
            heapq.heappush(loads, (load + float(costs[place]), rank))
    return [np.sort(np.asarray(own, dtype=np.int64)) for own in shares]


def item_costs(lengths: NDArray[np.float64], cost: Cost) -> NDArray[np.float64]:
    """Return what each sample costs: shape (n,), float64."""
    if callable(cost):
        costs = [cost(float(length)) for length in lengths]
        return require_amounts(costs, "costs", "BalancedBatchSampler")
    require_choice(cost, "cost", ("sum", "padded"))
    return lengths


bad_balance: Final = functools.partial(bad_arguments, "BalancedBatchSampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """How a global order is cut into batches of at most `max_tokens`.

    Attributes:
        batch_size: How many samples it may hold.
        window: How many samples are sorted by length together; 0 keeps the order.
        padded: Whether a batch costs its longest sample times its size.
        largest_first: Whether the most expensive batch comes first.
    """

    max_tokens: float
    batch_size: int
    window: int
    padded: bool
    largest_first: bool = False

    def check(self, lengths: NDArray[np.float64]) -> None:
        """Raise if a sample fits into no batch."""
        longest = int(np.argmax(lengths))
        if lengths[longest] > self.max_tokens:
            raise bad_balance(
                f"lengths[{longest}] = {lengths[longest]:g} is more than max_tokens = "
                f"{self.max_tokens:g}",
                "raise max_tokens, or leave such samples out of the dataset",
            )

    def batches(
        self, order: NDArray[np.int64], lengths: NDArray[np.float64], words: tuple[int, int]
    ) -> list[list[int]]:
        """Return all batches of an epoch, as lists of dataset indices."""
        size = self.window or len(order)
        batches: list[list[int]] = []
        for first in range(0, len(order), size):
            items = order[first : first + size]
            if self.window:
                items = items[np.argsort(-lengths[items], kind="stable")]
            filled = self._fill(items.tolist(), lengths[items].tolist())
            shuffled = random_order(len(filled), (*words, first)) if self.window else ()
            batches += [filled[i] for i in shuffled] if self.window else filled
        # A lack of memory then shows in the first step of the epoch.
        if self.largest_first:
            costs = [
                lengths[batch].max() * len(batch) if self.padded else lengths[batch].sum()
                for batch in batches
            ]
            batches.insert(0, batches.pop(int(np.argmax(costs))))
        return batches

    def _fill(self, items: list[int], lengths: list[float]) -> list[list[int]]:
        batches: list[list[int]] = []
        total = longest = 0.0
        for item, length in zip(items, lengths, strict=True):
            longest = max(longest, length)
            count = len(batches[-1]) + 1 if batches else 1
            cost = longest * count if self.padded else total + length
            if not batches or cost > self.max_tokens or count > self.batch_size:
                batches.append([item])
                total, longest = length, length
            else:
                batches[-1].append(item)
                total += length
        return batches


_FIRST: Final = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A window, or the rest of one, planned with one global batch size.

    Attributes:
        batch: Samples per global batch.
        end: Position in the global order where it ends.
    """

    batch: int
    delivered: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPosition:
    """A position in a balanced epoch.

    Attributes:
        start: Where the current window starts; everything before it was delivered.
        segments: How the current window has been planned so far.
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
    def from_json(cls, value: Any) -> EpochPosition:
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
            raise StateMismatchError(f"The state's 'place' is damaged: {value!r}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The global batches of an epoch, from any position on.

    Attributes:
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

    def open_segment(self, place: EpochPosition) -> tuple[Segment, int]:
        """Return the segment to read next from `place`, and how many samples it has."""
        left = place.segments[-1].end - place.consumed() if place.segments else 0
        last = place.segments[-1] if place.segments else None
        if last is not None and last.batch == self.batch:
            return last, left + last.batch * last.delivered
        if last is None:
            end = min(self.n, place.start + max(1, self.window) * self.batch)
            return Segment(batch=self.batch, delivered=0, end=end), end - place.start
        # The rest of a window planned with another size is extended to whole batches.
        end = min(self.n, last.end + -left % self.batch)
        return Segment(batch=self.batch, delivered=0, end=end), left + end - last.end

    def steps(self, place: EpochPosition) -> int:
        """Return how many global batches are left."""
        left = max(0, self.n - place.consumed())
        return left // self.batch if self.drop_last else -(-left // self.batch)

    def advance(self, place: EpochPosition, batches: int) -> EpochPosition:
        """Return the place after `batches` further global batches."""
        while batches > 0 and place.start < self.n:
            segment, size = self.open_segment(place)
            left = -(-size // self.batch) - segment.delivered
            if batches < left:
                earlier = [part for part in place.segments if part is not segment]
                segment = replace(segment, delivered=segment.delivered + batches)
                return EpochPosition(start=place.start, segments=(*earlier, segment))
            batches -= left
            place = EpochPosition(start=segment.end)
            whole, batches = divmod(batches, max(1, self.window))
            place = EpochPosition(
                start=min(self.n, place.start + whole * (max(1, self.window) * self.batch))
            )
        return place

    def read(
        self,
        place: EpochPosition,
        lengths: NDArray[np.float64],
        order_at: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        seed_words: tuple[int, int],
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the dataset indices of each global batch, shape (g,), int64.

        `lengths` are of all samples, shape (n,); `order_at` maps positions to indices, both shape (k,),
        int64; `seed_words` are seed and epoch.
        """
        for _ in range(self.steps(place)):
            segment, _size = self.open_segment(place)
            # Replay the window's earlier plans, then return this segment's remaining batches.
            items = np.empty(0, dtype=np.int64)
            batches: list[NDArray[np.int64]] = []
            covered = place.start
            earlier = [part for part in place.segments if part is not segment]
            for number, part in enumerate([*earlier, segment]):
                fresh = order_at(np.arange(covered, part.end, dtype=np.int64))
                items = np.concatenate([items, fresh])
                covered = max(covered, part.end)
                words = (*seed_words, place.start, number)
                batches = self._cut(items, part.batch, lengths, words)[part.delivered :]
                items = np.concatenate([np.empty(0, dtype=np.int64), *batches])
            for batch in batches:
                if self.drop_last and len(batch) < self.batch:
                    return
                yield batch
            place = EpochPosition(start=segment.end)
            if place.start >= self.n:
                return

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
        # A smaller batch comes last, so that all delivered batches before it have one size.
        rest = ordered[whole * size :]
        return [*shuffled, rest] if len(rest) else shuffled
