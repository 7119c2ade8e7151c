"""Batches whose lengths are balanced over the ranks, so that no rank waits for the longest.

Which samples make up each global batch is planned by tokens, or in windows.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from ddpsafe._errors import Explanation
from ddpsafe.data._arguments import bad_arguments, require_amounts, require_choice, require_int
from ddpsafe.data._samplers.base import Batching, DrawnSampler, digest
from ddpsafe.data._samplers.permutation import Algorithm, open_order, random_order
from ddpsafe.data.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

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


_bad: Final = functools.partial(bad_arguments, "BalancedBatchSampler")


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
            raise _bad(
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


class BalancedBatchSampler(DrawnSampler[list[int]]):
    """Deals each global batch so that ranks have equal counts and similar total lengths.

    With ``window=0`` the samples of every global batch are exactly those of
    `DistributedSampler`. Only which rank gets which changes, so training statistics do not (a
    third less step time for packed sequences of lognormal lengths). With ``window=k`` the samples
    of k global batches are sorted by length first, which also saves padding. Use it as
    ``batch_sampler=``.

    Args:
        lengths: Shape (n,), the length of each sample.
        batch_size: Samples per batch of one rank; with `max_tokens`, the maximum.
        window: How many global batches are sorted by length together; 0 for none.
        cost: What a batch costs; see `Cost`.
        max_tokens: Fill batches up to this cost instead of a fixed size.
        num_replicas: The number of ranks to divide among; the world size by default.
        rank: The rank whose part to read, from 0; this rank by default.
        shuffle: Whether to shuffle, as in `DistributedSampler`.
        seed: The same on every rank; by default that of ``launch(seed=)``, else 0.
        drop_last: Drop the last global batch if it is smaller.
        algorithm: The shuffle, as in `DistributedSampler`.
        largest_first: Begin each epoch with a batch of the longest samples, so that a lack of
            memory shows at once: the largest batch of the first window, or with `max_tokens` of
            the whole epoch.

    Attributes:
        dropped_batches: With `max_tokens`: how many batches at the end of the epoch are dropped,
            because they are fewer than the ranks.

    Raises:
        ConfigError: Lengths are negative, NaN or not of shape (n,); a sample is longer than
            `max_tokens`; the sizes are below 1.
    """

    beginning = EpochPosition()

    def __init__(  # noqa: PLR0913 - keyword-only after the subject of the call
        self,
        lengths: Sequence[float] | NDArray[Any],
        batch_size: int,
        *,
        window: int = 0,
        cost: Cost = "sum",
        max_tokens: float | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        algorithm: Algorithm = "torch",
        largest_first: bool = False,
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        require_choice(algorithm, "algorithm", get_args(Algorithm))
        self.batch_size = require_int(batch_size, "batch_size", least=1)
        self.window = require_int(window, "window", least=0)
        self.lengths = require_amounts(lengths, "lengths", "BalancedBatchSampler")
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.algorithm: Algorithm = algorithm
        self.largest_first = largest_first
        self.dropped_batches = 0
        self._costs = item_costs(self.lengths, cost)
        self._padded = cost == "padded"
        self._cost_name = cost if isinstance(cost, str) else "callable"
        self._digest = digest(self._costs.tobytes())
        self._windows = WindowPlan(
            n=len(self.lengths),
            batch=self.batch_size * self.num_replicas,
            window=self.window,
            drop_last=self.drop_last,
            largest_first=self.largest_first,
        )
        self._tokens: TokenPlan | None = None
        self._token_batches: tuple[int, list[list[int]]] | None = None  # of an epoch
        if max_tokens is not None:
            self._tokens = TokenPlan(
                max_tokens=max_tokens,
                batch_size=self.batch_size,
                window=self.window * self.batch_size * self.num_replicas,
                padded=self._padded,
                largest_first=self.largest_first,
            )
            self._tokens.check(self._costs)
        elif largest_first and self.window == 0:
            raise _bad(
                "largest_first=True would change the global batches, which window=0 keeps",
                "give a window or max_tokens",
            )
        elif self._windows.steps(self.beginning) == 0:
            raise _bad(
                f"{len(self.lengths)} samples with drop_last=True are less than one global batch of "
                f"{self._windows.batch}: every rank would read nothing",
                "use smaller batches, fewer ranks, or drop_last=False",
            )

    def population(self) -> int:
        return len(self.lengths)

    def __len__(self) -> int:
        return 0 if self.finished else self.steps_from(self.start, Batching())

    def steps_from(self, position: EpochPosition, by: Batching, rank: int = 0) -> int:  # noqa: ARG002 - it batches itself, and all ranks have as many
        if self._tokens is None:
            return self._windows.steps(position)
        return (len(self._all_batches()) - position.start) // self.num_replicas

    def position_after(self, batches: int, by: Batching) -> EpochPosition:  # noqa: ARG002 - as above
        if self._tokens is None:
            return self._windows.advance(self.start, batches)
        return EpochPosition(start=self.start.start + batches * self.num_replicas)

    def _all_batches(self) -> list[list[int]]:
        assert self._tokens is not None, "called only with max_tokens"  # noqa: S101 - our own invariant
        epoch = int(self.epoch)
        if self._token_batches is None or self._token_batches[0] != epoch:
            order = self._open_order()(np.arange(len(self.lengths), dtype=np.int64))
            batches = self._tokens.batches(order, self._costs, (self.seed, epoch))
            self._token_batches = (epoch, batches)
        return self._token_batches[1]

    def _open_order(self) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the global order, as for a single rank: whole batches of it are dealt to the ranks."""
        return open_order(
            len(self.lengths),
            shuffle=self.shuffle,
            algorithm=self.algorithm,
            seed=self.seed,
            epoch=int(self.epoch),
        )

    def _warn_of_dropped_batches(self) -> None:
        total = len(self._all_batches())
        self.dropped_batches = (total - self.start.start) % self.num_replicas
        if self.dropped_batches:
            logger.warning(
                "epoch %d: %d of %d batches are dropped: they cannot be divided evenly among %d ranks",
                int(self.epoch),
                self.dropped_batches,
                total,
                self.num_replicas,
            )

    def chunks(self) -> Iterator[list[list[int]]]:
        """Deal each global batch, which is made when it is needed."""
        if not self.has_anything_to_read():
            return
        if self._tokens is not None:
            self._warn_of_dropped_batches()
            last = self.start.start + len(self) * self.num_replicas
            yield self._all_batches()[self.start.start + self.rank : last : self.num_replicas]
            return
        order_at = self._open_order()
        words = (self.seed, int(self.epoch))
        for batch in self._windows.read(self.start, self._costs, order_at, words):
            # Like torch, fill the last batch with samples from the epoch's beginning.
            missing = np.arange(-len(batch) % self.num_replicas, dtype=np.int64)
            padded = np.concatenate([batch, order_at(missing % len(self.lengths))])
            shares = deal(self._costs[padded], self.num_replicas, padded=self._padded)
            yield [padded[shares[self.rank]].tolist()]

    def identity(self) -> dict[str, object]:
        tokens = self._tokens
        return {
            "n": len(self.lengths),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "algorithm": self.algorithm if self.shuffle else None,
            "fingerprint": self.fingerprint,
            "lengths": self._digest,
            "window": self.window,
            "cost": self._cost_name,
            "largest_first": self.largest_first,
            "max_tokens": None if tokens is None else tokens.max_tokens,
            "batch_size": None if tokens is None else self.batch_size,
        }

    def write_position(self, position: EpochPosition, *, finished: bool) -> dict[str, Any]:
        return {
            "consumed": len(self.lengths) if finished else position.consumed(),
            "place": position.to_json(),
            "token_window": None if self._tokens is None else self._tokens.window,
        }

    def read_position(self, state: Mapping[str, Any], *, strict: bool) -> EpochPosition:  # noqa: ARG002 - as above
        position = EpochPosition.from_json(state.get("place"))
        window: Any = state.get("token_window")
        is_count = type(window) is int and window >= 0
        if not is_count if self._tokens is not None else window is not None:
            kind = "without" if self._tokens is None else "with"
            raise StateMismatchError(
                Explanation(
                    f"The state was not saved by a BalancedBatchSampler {kind} max_tokens.",
                    cause=f"its 'token_window' is {window!r}, and a position counts other batches.",
                    fix="load a state of such a sampler, or restart the epoch.",
                )
            )
        if self._tokens is not None:
            # Keep the saved window, whatever the world size is now: it determines the batches.
            self._tokens = replace(self._tokens, window=window)
            self._token_batches = None
        return position

    def restore(self, state: Mapping[str, Any], by: Batching, *, strict: bool) -> None:
        super().restore(state, by, strict=strict)
        if self._tokens is not None and self.finished:
            self._warn_of_dropped_batches()  # too few are left for a step, so no pass will warn
