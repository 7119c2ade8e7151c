"""The base of samplers that deal one global order to the ranks, and the saved position."""

from __future__ import annotations

import hashlib
import itertools
import operator
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Sampler

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._arguments import require_int
from ddpsafe.data._replica import resolve_replica, run_seed
from ddpsafe.data.errors import DataWarning, StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

T = TypeVar("T")


class AutoEpoch(int):
    """An epoch that the user did not set: it is the loader's, a loaded state's or the initial one.

    A plain integer in ``sampler.epoch`` means that the user has called ``set_epoch()`` since, and
    the user wins.
    """

    # A type, not a flag of a sampler: it works for every sampler that keeps the object it was
    # given, torch's too.

    __slots__ = ()


VERSION: Final = 1

# torchdata's samplers and loaders write these keys; ddpsafe cannot read their position.
_TORCHDATA_KEYS: Final = ("yielded", "next_yielded", "_snapshot", "_num_yielded", "dl_state_dict")


def parse_state(state: object) -> dict[str, Any]:
    """Check the form of a saved state; `compare_identity` checks which data it belongs to.

    Raises:
        StateMismatchError: It is not a state, is damaged, or another version wrote it.
    """
    if not isinstance(state, dict):
        raise _damaged(f"a state is a dict, not {type(state).__name__}")
    foreign = [key for key in _TORCHDATA_KEYS if key in state]
    if foreign:
        raise _damaged(f"the key {foreign[0]!r} is torchdata's, whose positions ddpsafe cannot use")
    version = state.get("version")
    if type(version) is not int:
        raise _damaged("it has no version")
    if version != VERSION:
        older = "an older" if version < VERSION else "a newer"
        raise StateMismatchError(
            Explanation(
                f"The state has version {version}; this ddpsafe reads version {VERSION}.",
                cause=f"{older} ddpsafe wrote it.",
                fix="resume with the version of ddpsafe that wrote it, or restart the epoch.",
            ),
            differences={"version": (version, VERSION)},
        )
    try:
        for key in ("epoch", "consumed"):
            require_int(state.get(key), repr(key), least=0)
    except ConfigError as error:
        raise _damaged(error.explanation.what.removesuffix(".")) from error
    if not isinstance(state.get("finished"), bool):
        raise _damaged(f"'finished' must be true or false, not {state.get('finished')!r}")
    if not isinstance(state.get("identity"), dict):
        raise _damaged("'identity' is missing")
    return dict(state)


def _damaged(why: str) -> StateMismatchError:
    return StateMismatchError(
        Explanation(
            f"The state of the data cannot be read: {why}.",
            cause="the file is damaged, or another library wrote it.",
            fix="load a state that a state_dict() of ddpsafe.data returned.",
        )
    )


def compare_identity(
    saved: Mapping[str, object], current: Mapping[str, object], *, strict: bool, what: str
) -> None:
    """Refuse a state of other data; with ``strict=False`` only warn.

    Raises:
        StateMismatchError: The state belongs to other data.
    """
    differences = {
        key: (saved.get(key), current.get(key))
        for key in {*saved, *current}
        if saved.get(key) != current.get(key)
        # ctx.loader(check=False) and a bare sampler know no fingerprint.
        and not (key == "fingerprint" and None in (saved.get(key), current.get(key)))
    }
    if not differences:
        return
    listed = [f"{key}: saved {a!r}, now {b!r}" for key, (a, b) in sorted(differences.items())]
    text = Explanation(
        f"The state does not belong to this {what}: {', '.join(sorted(differences))} differ.",
        cause="the dataset, the seed or the sampler changed after the state was saved.",
        fix="restore them, restart the epoch, or load with strict=False if samples may be lost or "
        "repeated.",
        details=listed,
    )
    if strict:
        raise StateMismatchError(text, differences=differences)
    warnings.warn(str(text), DataWarning, stacklevel=4)


def digest(data: bytes | memoryview) -> str:
    """Return the 16-byte BLAKE2b of `data` as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def complete_with(most: int, fewest: int) -> int:
    """Return how many batches complete a pass of so many on the ranks: a look at the only one does not."""
    # But where a rank has none, its look reaches the end, which counts: so the others' does, too.
    return max(most, 2) if fewest > 0 else most


class Batching(NamedTuple):
    """How a loader makes batches of its sampler's indices; by default each index is one."""

    batch_size: int = 1
    drop_last: bool = False

    def count(self, samples: int) -> int:
        """Return how many batches so many samples make."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


class Resumable:
    """What divides an epoch among the ranks: a function of epoch, position, seed, rank and world size.

    A pass changes none of them; the loader counts what it delivers. Subclasses say what a position
    is, how many steps an epoch has from one on, and where a number of steps leads.

    Attributes:
        num_replicas: The number of ranks that the data are divided among.
        rank: The rank that this object serves, from 0.
        seed: The seed of the order.
        epoch: The epoch that a pass reads.
        start: The position in it where a pass begins: the beginning, or that of a loaded state.
        finished: Whether a loaded state leaves nothing to read in this epoch.
        fingerprint: Digest of the dataset, kept in the state; ``None`` if there is none.
        takes_seed_of_state: Whether a loaded state brings its seed, because the user gave none.
    """

    beginning: Any = 0

    def __init__(self, num_replicas: int | None, rank: int | None, seed: int | None = None) -> None:
        replica = resolve_replica(num_replicas, rank)
        self.num_replicas = replica.num_replicas
        self.rank = replica.rank
        self.seed = run_seed() or 0 if seed is None else require_int(seed, "seed")
        self.epoch: int = AutoEpoch(0)
        self.start = self.beginning
        self.finished = False
        self.fingerprint: str | None = None
        self.takes_seed_of_state = False
        self._is_loaded = False  # whether a position was loaded that no pass has begun at

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Return what must be equal for a saved position to mean the same."""

    @abstractmethod
    def steps_from(self, position: Any, by: Batching, rank: int = 0) -> int | None:
        """Return how many batches follow for a rank, by default the one that has most; ``None`` if unknown."""

    def steps_of_epoch(self, by: Batching) -> int | None:
        """Return how many batches this rank has in an epoch that is read from its beginning."""
        return self.steps_from(self.beginning, by, self.rank)

    def steps_to_complete(self, by: Batching, *, without: int) -> int | None:
        """Return how many batches complete a pass from `start` on: the same on every rank."""
        most = self.steps_from(self.start, by)
        fewest = self.steps_from(self.start, by, self.num_replicas - 1)
        if most is None or fewest is None:
            return None
        return complete_with(most - without, fewest - without)

    @abstractmethod
    def position_after(self, batches: int, by: Batching) -> Any:
        """Return the position after that many batches of each rank, from `start` on."""

    def write_position(self, position: Any, *, finished: bool) -> dict[str, Any]:  # noqa: ARG002 - others need it
        """Return a position as plain values; ``consumed`` is how much was read."""
        return {"consumed": position}

    def read_position(self, state: Mapping[str, Any], *, strict: bool) -> Any:  # noqa: ARG002 - others need it
        """Read what `write_position` wrote.

        Raises:
            StateMismatchError: There is no such position.
        """
        return state["consumed"]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: that of a loaded state keeps its position, any other starts at 0.

        Args:
            epoch: From 0. The order is a function of it.

        Raises:
            ConfigError: It is not a whole number from 0.
        """
        require_int(epoch, "epoch", least=0)
        if epoch != self.epoch:
            if self._is_loaded and not (self.finished and epoch == self.epoch + 1):
                consumed = self.write_position(self.start, finished=self.finished)["consumed"]
                warnings.warn(
                    f"set_epoch({epoch}) discards the position that was just loaded (epoch "
                    f"{int(self.epoch)}, {consumed} samples read); epoch {epoch} starts at 0.",
                    DataWarning,
                    stacklevel=3,
                )
            self.start, self.finished = self.beginning, False
        self._is_loaded = False
        self.epoch = epoch

    def has_anything_to_read(self) -> bool:
        """Begin a pass: warn and return ``False`` if a loaded state leaves nothing to read."""
        self._is_loaded = False
        if self.finished:
            warn_of_nothing_left(int(self.epoch))
        return not self.finished

    def batches_to_skip(self) -> int:
        """Return how many batches a loader must read again and discard."""
        return 0

    def state_after(self, batches: int, by: Batching, *, exhausted: bool) -> dict[str, Any]:
        """Return the state after `batches` batches of each rank; it is the same on every rank."""
        steps = self.steps_from(self.start, by)
        finished = self.finished or exhausted or (steps is not None and batches >= steps)
        position = self.position_after(batches, by)
        return {
            "version": VERSION,
            "epoch": int(self.epoch),
            **self.write_position(position, finished=finished),
            "finished": finished,
            "world_size": self.num_replicas,
            "identity": self.identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where `state` was taken; world size and batch size may have changed since.

        Args:
            state: What `state_dict` of this object or of its loader returned.
            strict: Refuse a state of other data; ``False`` warns instead.

        Raises:
            StateMismatchError: It is damaged, or belongs to other data.
        """
        self.restore(state, Batching(), strict=strict)

    def restore(self, state: Mapping[str, Any], by: Batching, *, strict: bool) -> None:
        """Load a state; what is less than a step now counts as read, so no pass of it is empty."""
        parsed = parse_state(state)
        saved_seed, own = parsed["identity"].get("seed"), (self.seed, self.epoch)
        # The identity and the size of the epoch depend on both.
        if self.takes_seed_of_state and isinstance(saved_seed, int):
            self.seed = saved_seed
        self.epoch = AutoEpoch(parsed["epoch"])
        try:
            what = type(self).__name__
            compare_identity(parsed["identity"], self.identity(), strict=strict, what=what)
            self.start = self.read_position(parsed, strict=strict)
        except StateMismatchError:
            self.seed, self.epoch = own
            raise
        steps = self.steps_from(self.start, by)
        self.finished = parsed["finished"] or (steps == 0 and self.start != self.beginning)
        self._is_loaded = True


class Drawing(Generic[T]):
    """One pass over chunks of what a sampler yields, and how much of it was yielded."""

    def __init__(self, chunks: Iterator[list[T]]) -> None:
        self._chunks = chunks
        self._stop = 0
        self._rest: Iterator[T] = iter(())

    def __iter__(self) -> Iterator[Iterator[T]]:
        for chunk in self._chunks:
            self._stop, self._rest = self._stop + len(chunk), iter(chunk)
            yield self._rest

    def count(self) -> int:
        """Return how much was yielded: all chunks but what the last one's iterator has left."""
        return self._stop - operator.length_hint(self._rest)

    def batches(self, size: int, *, drop_last: bool) -> Iterator[list[T]]:
        """Yield the batches of torch's `BatchSampler`, cut out of the chunks instead of index by index."""
        rest: list[T] = []
        for chunk in self._chunks:
            rest += chunk
            end = len(rest) - len(rest) % size
            for start in range(0, end, size):
                self._stop += size
                yield rest[start : start + size]
            rest = rest[end:]
        self._stop += len(rest)
        if rest and not drop_last:
            yield rest


class DrawnSampler(Resumable, Sampler[T]):
    """A sampler of indices, or of batches, which knows how far its newest pass is."""

    _drawing: Drawing[T] | None = None

    @abstractmethod
    def chunks(self) -> Iterator[list[T]]:
        """Yield what this rank reads from `start` on."""

    @abstractmethod
    def population(self) -> int:
        """Return the length of the dataset the indices point into."""

    def __iter__(self) -> Iterator[T]:
        # In C, since a generator costs more for an index than looking it up.
        return itertools.chain.from_iterable(self.draw())

    def draw(self) -> Drawing[T]:
        """Begin a pass, which the state of this sampler follows."""
        self._drawing = Drawing(self.chunks())
        return self._drawing

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._drawing = None

    def restore(self, state: Mapping[str, Any], by: Batching, *, strict: bool) -> None:
        super().restore(state, by, strict=strict)
        self._drawing = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after what was drawn so far.

        A loader draws ``num_workers * prefetch_factor`` batches ahead of what it delivers. Save
        the state of `ddpsafe.data.DataLoader` instead, which counts the delivered batches.
        """
        drawn = 0 if self._drawing is None else self._drawing.count()
        return self.state_after(drawn, Batching(), exhausted=False)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the pass under way."""
        return {**self.__dict__, "_drawing": None}


# Indices are looked up in chunks that double: the first one is fast, many are cheap.
FIRST_CHUNK: Final = 256
LARGEST_CHUNK: Final = 1 << 14


Lookup = Callable[[int, int], list[int]]
"""Start and stop in the samples of one rank -> their dataset indices."""


class PositionSampler(DrawnSampler[int]):
    """Deals the positions of an epoch's global order to the ranks, in turn from rank 0.

    A position is how many samples all ranks together have read.

    Attributes:
        drop_last: Whether the tail is dropped, so that all ranks have as many samples.
        pad: Whether samples are repeated to that end.
        num_samples: How many samples this rank has left in the epoch.
        total_size: How many samples all ranks together have left, including repeats.
    """

    drop_last: bool
    pad: bool

    @abstractmethod
    def size(self) -> int:
        """Return how many positions this epoch has."""

    @abstractmethod
    def open_epoch(self) -> Lookup:
        """Make this rank's part of the order of this epoch, from `start` on."""

    def chunks(self) -> Iterator[list[int]]:
        """Look the indices up, and let go of each chunk when the next one is needed."""
        count = self.num_samples if self.has_anything_to_read() else 0
        done, chunk, lookup = 0, FIRST_CHUNK, self.open_epoch() if count else None
        while lookup is not None and done < count:
            yield lookup(done, min(done + chunk, count))
            done, chunk = done + chunk, min(chunk * 2, LARGEST_CHUNK)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_samples(self) -> int:
        return self._share(self.rank, self._left())

    @property
    def total_size(self) -> int:
        uneven = not self.drop_last and not self.pad
        return self._left() if uneven else self.num_samples * self.num_replicas

    def _left(self) -> int:
        return 0 if self.finished else max(0, self.size() - self.start)

    def _share(self, rank: int, left: int) -> int:
        """Return how many of `left` positions a rank gets."""
        if self.drop_last:
            return left // self.num_replicas
        if self.pad:
            return -(-left // self.num_replicas)
        return len(range(rank, left, self.num_replicas))

    def steps_from(self, position: int, by: Batching, rank: int = 0) -> int:
        return by.count(self._share(rank, max(0, self.size() - position)))

    def valid_samples(self) -> int:
        """Return how many of this rank's remaining samples are not repeats; repeats come last."""
        return min(self.num_samples, len(range(self.rank, self._left(), self.num_replicas)))

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        # Positions beyond the end repeat the beginning: torch pads by p % n, in both of its
        # branches (torch/utils/data/distributed.py, DistributedSampler.__iter__).
        local = np.arange(start, stop, dtype=np.int64)
        return np.asarray((self.start + self.rank + self.num_replicas * local) % self.size())

    def position_after(self, batches: int, by: Batching) -> int:
        consumed: int = self.start + batches * by.batch_size * self.num_replicas
        return min(consumed, self.size())

    def write_position(self, position: int, *, finished: bool) -> dict[str, Any]:
        return {"consumed": self.size() if finished else position}

    def read_position(self, state: Mapping[str, Any], *, strict: bool) -> int:
        consumed, size = int(state["consumed"]), self.size()
        if consumed > size and strict:
            raise StateMismatchError(
                Explanation(
                    f"The state is after {consumed} samples of an epoch of {size}.",
                    cause="the state is damaged.",
                    fix="load an intact state, or restart the epoch.",
                )
            )
        return min(consumed, size)


def warn_of_nothing_left(epoch: int) -> None:
    """Warn that a pass is empty: its epoch was complete when the loaded state was saved."""
    warnings.warn(
        f"epoch {epoch} was complete when its state was saved, so nothing is left to read; the next "
        f"epoch is {epoch + 1}. Leave set_epoch() out, or loop over loader.epochs(n).",
        DataWarning,
        stacklevel=4,
    )


def epoch_targets(*items: object) -> list[Any]:
    """Find what has a ``set_epoch()``: each of `items`, or else the datasets it wraps."""
    targets: list[Any] = []
    waiting = list(items)
    while waiting:
        item = waiting.pop(0)
        if callable(getattr(item, "set_epoch", None)):
            targets.append(item)
            continue
        parts = getattr(item, "datasets", None)
        waiting += [
            getattr(item, "dataset", None),
            *(parts if isinstance(parts, list | tuple) else ()),
        ]
        waiting = [each for each in waiting if each is not None]
    return targets
