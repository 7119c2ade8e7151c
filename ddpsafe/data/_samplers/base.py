"""The base of samplers that deal one global order to the ranks, and the saved position."""

from __future__ import annotations

import hashlib
import operator
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from torch.utils.data import Sampler

from ddpsafe._errors import Explanation
from ddpsafe.data._replica import resolve_replica, run_seed
from ddpsafe.data.errors import DataConfigError, DataWarning, StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray


class AutoEpoch(int):
    """An epoch that the user did not set: it is the loader's, a loaded state's or the initial one.

    A plain integer in ``sampler.epoch`` means that the user has called ``set_epoch()`` since, and
    the user wins.
    """

    # A type, not a flag of a sampler: it works for every sampler that keeps the object it was
    # given, torch's too.

    __slots__ = ()


@runtime_checkable
class Cursor(Protocol):
    """Tracks the position: the epoch, and how many of its samples all ranks together have read."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the same epoch keeps the offset, any other starts at 0."""
        ...

    def is_finished(self) -> bool:
        """Return whether a loaded state was saved at the end of this epoch."""
        ...

    def state_after(
        self, batches: int, *, batch_size: int, drop_last: bool, exhausted: bool
    ) -> dict[str, Any]:
        """Return the state after `batches` batches of this iteration were delivered."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where the state was taken."""
        ...


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
    if not isinstance(version, int) or isinstance(version, bool):
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
    for key in ("epoch", "consumed"):
        value = state.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _damaged(f"{key!r} must be a whole number from 0, not {value!r}")
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


# Indices are looked up in chunks that double: the first one is fast, many are cheap.
FIRST_CHUNK: Final = 256
LARGEST_CHUNK: Final = 1 << 14


class Lookup(Protocol):
    """A range of one rank's samples -> dataset indices."""

    def __call__(self, start: int, stop: int) -> list[int]:
        """Return the dataset indices of the rank's samples number `start` to `stop`."""
        ...


class _DrawnCount:
    """How many indices an iteration has yielded, without counting each of them."""

    def __init__(self) -> None:
        self.stop = 0
        self.rest: Iterator[int] = iter(())

    def drawn(self) -> int:
        # How many of the current chunk's indices its iterator has left.
        return self.stop - operator.length_hint(self.rest)


class PositionSampler(Sampler[int]):
    """Deals the positions of an epoch's global order to the ranks.

    Attributes:
        num_replicas: The number of ranks that the data are divided among.
        rank: The rank that this sampler serves, from 0.
        epoch: The epoch whose order is dealt.
        num_samples: How many samples this rank has left in the epoch.
        total_size: How many samples all ranks together have left, including repeats.
        fingerprint: Digest of the dataset, kept in the state; ``None`` if there is none.
    """

    num_replicas: int
    rank: int
    epoch: int
    seed: int
    drop_last: bool
    num_samples: int
    total_size: int
    fingerprint: str | None

    def __init__(
        self,
        *,
        num_replicas: int | None,
        rank: int | None,
        seed: int | None,
        drop_last: bool,
        pad: bool,
    ) -> None:
        replica = resolve_replica(num_replicas, rank)
        self.num_replicas = replica.num_replicas
        self.rank = replica.rank
        self.seed = run_seed() or 0 if seed is None else require_int(seed, "seed")
        # Whether a loader chose the seed, and not the caller: a loaded state then replaces it.
        self.takes_seed_of_state = False
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = AutoEpoch(0)
        self.fingerprint = None
        self._base = 0
        self._resumed = False
        self._progress = _DrawnCount()

    @abstractmethod
    def size(self) -> int:
        """Return how many positions this epoch has."""

    @abstractmethod
    def population(self) -> int:
        """Return the length of the dataset the indices point into."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Return what must be equal for a saved position to mean the same."""

    @abstractmethod
    def open_epoch(self) -> Lookup:
        """Make this rank's part of the order of this epoch, from the resumed position on."""

    def _check_dataset(self) -> None:
        """Raise if the dataset is not what the sampler was made for."""

    def __iter__(self) -> Iterator[int]:
        self._check_dataset()
        if self._base and self.is_finished():
            warn_empty_epoch(self.epoch)
        progress = self._progress = _DrawnCount()
        self._resumed = False
        count = self.num_samples
        if count == 0:
            return
        lookup = self.open_epoch()
        chunk = FIRST_CHUNK
        while progress.stop < count:
            start = progress.stop
            stop = min(start + chunk, count)
            rest = iter(lookup(start, stop))
            progress.stop, progress.rest = stop, rest
            yield from rest
            chunk = min(chunk * 2, LARGEST_CHUNK)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: the same epoch keeps a resumed offset, any other starts at 0.

        Args:
            epoch: From 0. The order is a function of it.

        Raises:
            DataConfigError: It is not a whole number from 0.
        """
        check_epoch(epoch)
        if epoch != self.epoch:
            if self._resumed and (not self.is_finished() or epoch != self.epoch + 1):
                warnings.warn(
                    f"set_epoch({epoch}) discards the position that was just loaded (epoch "
                    f"{int(self.epoch)}, {self._base} samples read); epoch {epoch} starts at 0.",
                    DataWarning,
                    stacklevel=3,
                )
            self._base = 0
        self._resumed = False
        self._progress = _DrawnCount()
        self.epoch = epoch
        self._measure()

    def is_finished(self) -> bool:
        """Return whether a loaded state was saved at the end of this epoch."""
        return self._base >= self.size()

    def steps_of_epoch(self, *, batch_size: int, drop_last: bool) -> int:
        """Return how many batches this rank has in an epoch that is read from its beginning."""
        base, self._base = self._base, 0
        count = self._count_of(self.rank)
        self._base = base
        return count // batch_size if drop_last else -(-count // batch_size)

    def _measure(self) -> None:
        self.num_samples = self._count_of(self.rank)
        left = max(0, self.size() - self._base)
        uneven = not self.drop_last and not self.pad
        self.total_size = left if uneven else self.num_samples * self.num_replicas

    def _count_of(self, rank: int) -> int:
        left = max(0, self.size() - self._base)
        if self.drop_last:
            return left // self.num_replicas
        if self.pad:
            return -(-left // self.num_replicas)
        return len(range(rank, left, self.num_replicas))

    def valid_samples(self) -> int:
        """Return how many of this rank's remaining samples are not repeats; repeats come last."""
        left = max(0, self.size() - self._base)
        return min(self.num_samples, len(range(self.rank, left, self.num_replicas)))

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        # Positions beyond the end repeat the beginning: torch pads by p % n, in both of its
        # branches (torch/utils/data/distributed.py, DistributedSampler.__iter__).
        local = np.arange(start, stop, dtype=np.int64)
        return np.asarray((self._base + self.rank + self.num_replicas * local) % self.size())

    def state_after(
        self, batches: int, *, batch_size: int, drop_last: bool, exhausted: bool
    ) -> dict[str, Any]:
        """Return the state after `batches` batches of each rank; it is the same on every rank."""
        # Dealt in turn from rank 0, rank 0 has the most samples, so its number of steps stands for
        # all.
        most = self._count_of(0)
        steps = most // batch_size if drop_last else -(-most // batch_size)
        finished = exhausted or batches >= steps
        consumed = self._base + batches * batch_size * self.num_replicas
        return self._state(consumed=consumed, finished=finished)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the indices drawn so far.

        A loader draws ``num_workers * prefetch_factor`` batches ahead of what it delivers. Save
        the state of `ddpsafe.data.DataLoader` instead, which counts the delivered batches.
        """
        drawn = self._progress.drawn()
        finished = drawn >= self._count_of(0)
        return self._state(consumed=self._base + drawn * self.num_replicas, finished=finished)

    def _state(self, *, consumed: int, finished: bool) -> dict[str, Any]:
        return {
            "version": VERSION,
            "epoch": int(self.epoch),
            "consumed": self.size() if finished else min(consumed, self.size()),
            "finished": finished,
            "world_size": self.num_replicas,
            "identity": self.identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where `state` was taken; world size and batch size may have changed since.

        Args:
            state: What `state_dict` of this sampler or of its loader returned.
            strict: Refuse a state of other data; ``False`` warns instead.

        Raises:
            StateMismatchError: It is damaged, or belongs to other data.
        """
        parsed = parse_state(state)
        saved_seed = parsed["identity"].get("seed")
        own = self.seed, self.epoch
        # The identity and the size depend on both.
        if self.takes_seed_of_state and isinstance(saved_seed, int):
            self.seed = saved_seed
        self.epoch = AutoEpoch(parsed["epoch"])
        try:
            self._require_own(parsed, strict=strict)
        except StateMismatchError:
            self.seed, self.epoch = own
            raise
        self._base = self.size() if parsed["finished"] else min(parsed["consumed"], self.size())
        self._progress = _DrawnCount()
        self._measure()
        self._resumed = True

    def _require_own(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Check that a state belongs to this data and seed, in its epoch.

        Raises:
            StateMismatchError: It does not.
        """
        compare_identity(
            state["identity"], self.identity(), strict=strict, what=type(self).__name__
        )
        if state["consumed"] > self.size() and strict:
            raise StateMismatchError(
                Explanation(
                    f"The state is after {state['consumed']} samples of an epoch of {self.size()}.",
                    cause="the state is damaged.",
                    fix="load an intact state, or restart the epoch.",
                )
            )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the iteration under way."""
        # The iterator of a list pickles its whole chunk.
        return {**self.__dict__, "_progress": _DrawnCount()}


def require_int(value: object, name: str) -> int:
    """Return `value` as an int, or raise for anything that is not a whole number."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    raise DataConfigError(
        Explanation(
            f"{name} must be a whole number, not {value!r}.",
            cause=f"{type(value).__name__} was given.",
            fix=f"pass an int for {name}.",
        )
    )


def bad_arguments(subject: str, what: str, fix: str) -> DataConfigError:
    """Make the error for arguments of `subject` that do not fit."""
    return DataConfigError(
        Explanation(f"{subject}: {what}.", cause="the arguments do not fit.", fix=f"{fix}.")
    )


def check_epoch(epoch: int) -> None:
    """Raise if an epoch is not a whole number from 0."""
    if require_int(epoch, "epoch") < 0:
        raise DataConfigError(
            Explanation(
                f"epoch must not be negative, but is {epoch}.",
                cause="epochs count from 0.",
                fix="pass the number of completed epochs.",
            )
        )


def warn_empty_epoch(epoch: int) -> None:
    """Warn that the loaded state was saved at the end of this epoch."""
    warnings.warn(
        f"epoch {int(epoch)} was complete when its state was saved, so nothing is left to read; "
        f"the next epoch is {int(epoch) + 1}. Leave set_epoch() out, or loop over "
        "loader.epochs(n).",
        DataWarning,
        stacklevel=3,
    )
