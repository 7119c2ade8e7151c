"""Divides a stream among ranks and workers, so that every sample is read once."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, cast, get_args

from torch.utils.data import IterableDataset, get_worker_info

from ddpsafe._errors import Explanation
from ddpsafe.data._arguments import bad_arguments, require_choice
from ddpsafe.data._samplers.base import Batching, Resumable
from ddpsafe.data.errors import DataWarning, UnevenStepsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
Shard = Literal["batch", "sample", "files"]
Even = Literal["truncate", "repeat", "error"]


class ShardedIterable(Resumable, IterableDataset[T], Generic[T]):
    """A stream, divided among ranks and DataLoader workers.

    ``shard="batch"`` (for streams that are cheap to read): item q goes to rank q % R, and whole
    batches to workers, in turn. A rank receives the same batches with any number of workers, and
    can resume under any world size, batch size and number of workers.
    ``shard="files"`` (for large data): each rank, then each worker, reads its own files.
    ``shard="sample"`` strides over ranks and workers; its order depends on the number of workers.

    `source` may have ``set_epoch(epoch)``, called before each pass, and ``seek(position)``,
    called before a resumed pass instead of reading up to the position.

    Args:
        source: What to iterate over, from the start in each epoch and worker: an iterable, or a
            function that returns one. With ``shard="files"``: the paths.
        shard: How to divide.
        read: With ``shard="files"``: path -> iterable of its samples.
        even: With ``shard="batch"``, if the ranks' shares differ by one at the end:
            ``"truncate"`` drops the incomplete round, ``"repeat"`` fills it from the beginning,
            ``"error"`` raises on every rank, ``None`` leaves it (see `even_steps`).
        batch_size: Samples per batch of a rank; `ddpsafe.data.DataLoader` sets it.
        num_replicas: The number of ranks to divide among; the world size by default.
        rank: The rank whose part to read, from 0; this rank by default.

    Raises:
        ConfigError: Fewer files than ranks, or arguments that do not go together.
    """

    def __init__(
        self,
        source: Iterable[T] | Callable[[], Iterable[T]] | Iterable[str],
        *,
        shard: Shard = "batch",
        read: Callable[[str], Iterable[T]] | None = None,
        even: Even | None = None,
        batch_size: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(num_replicas, rank)
        self.source = source
        self.shard: Shard = shard
        self.read = read
        self.even: Even | None = even
        self.batch_size = batch_size
        self._num_workers = 0
        require_choice(shard, "shard", get_args(Shard))
        require_choice(even, "even", (*get_args(Even), None))
        if self.even is not None and self.shard != "batch":
            raise _bad(
                f"even={self.even!r} needs shard='batch': a rank does not know how much others read",
                "wrap the loader in even_steps()",
            )
        if (self.shard == "files") != (self.read is not None):
            raise _bad("shard='files' and read= go together", "pass read=function(path) -> samples")
        if self.shard == "files" and len(self.files()) < self.num_replicas:
            raise _bad(
                f"{len(self.files())} files are too few for {self.num_replicas} ranks: some ranks "
                "would have nothing to read",
                "write more, smaller files, use fewer ranks, or shard='batch'",
            )

    def files(self) -> list[str]:
        """Return the files of all ranks, in the byte order of their paths."""
        return sorted((os.fspath(path) for path in cast("Any", self.source)), key=os.fsencode)

    def bind_loader(self, *, batch_size: int, num_workers: int) -> None:
        """Take over the loader's batch size and number of workers; the loader calls it."""
        self.batch_size = batch_size
        self._num_workers = num_workers
        readers = self.num_replicas * max(1, num_workers)
        if self.shard == "files" and len(self.files()) < readers:
            warnings.warn(
                f"{len(self.files())} files for {self.num_replicas} ranks with {num_workers} "
                "workers each: some workers have nothing to read.",
                DataWarning,
                stacklevel=4,
            )

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if not self.has_anything_to_read():
            return iter(())
        if self.shard == "files":
            own = self.files()[self.rank :: self.num_replicas][worker::workers]
            assert self.read is not None, "checked in __init__"  # noqa: S101 - our own invariant
            return itertools.chain.from_iterable(self.read(path) for path in own)
        if self.shard == "sample":
            stream = itertools.islice(self._open(), self.rank, None, self.num_replicas)
            return itertools.islice(stream, worker, None, workers)
        # The rank's batches number worker, worker + workers, ...
        return (
            item
            for number, item in enumerate(self._own_items())
            if number // self.batch_size % workers == worker
        )

    def _open(self) -> Iterator[T]:
        source = self.source
        if hasattr(source, "set_epoch"):
            source.set_epoch(int(self.epoch))
        return iter(cast("Iterable[T]", source() if callable(source) else source))

    def _resumed(self) -> Iterator[T]:
        seek = getattr(self.source, "seek", None)
        if self.start and callable(seek):
            seek(self.start)
            return self._open()
        return itertools.islice(self._open(), self.start, None)

    def _own_items(self) -> Iterator[T]:
        held: list[T] = []
        place = -1
        for place, item in enumerate(self._resumed()):
            slot = place % self.num_replicas
            if slot == self.rank:
                held.append(item)
            # With "truncate", hold an item back until its round is complete.
            if self.even != "truncate" or slot == self.num_replicas - 1:
                yield from held
                held.clear()
        total = place + 1
        missing = -total % self.num_replicas
        if missing == 0 or self.even in {None, "truncate"}:
            return
        if self.even == "error":
            raise UnevenStepsError(
                Explanation(
                    f"The stream ended after {total} samples, which {self.num_replicas} ranks "
                    "cannot share evenly.",
                    cause="its length is not a multiple of the world size.",
                    fix="choose even='truncate' or even='repeat'.",
                ),
                finished_ranks=tuple(range(self.num_replicas - missing, self.num_replicas)),
                step=total // self.num_replicas,
            )
        # Cycled, since a stream may have fewer samples than there are ranks.
        for extra, item in enumerate(itertools.islice(itertools.cycle(self._open()), missing)):
            if (total + extra) % self.num_replicas == self.rank:
                yield item

    def batches_to_skip(self) -> int:
        """Return how many batches the loader must read again and discard."""
        return 0 if self.shard == "batch" else self.start

    def identity(self) -> dict[str, object]:
        same: dict[str, object] = {"shard": self.shard, "fingerprint": None}
        if self.shard != "batch":
            # Which samples were read in a number of batches depends on these.
            same |= {
                "num_replicas": self.num_replicas,
                "num_workers": self._num_workers,
                "batch_size": self.batch_size,
            }
        return same

    def steps_from(self, position: int, by: Batching, rank: int = 0) -> None:
        """A stream shows its end only when it is read."""

    def position_after(self, batches: int, by: Batching) -> int:
        """Return the samples of all ranks, or with other shards than ``"batch"`` this rank's batches."""
        unit = by.batch_size * self.num_replicas if self.shard == "batch" else 1
        return int(self.start + batches * unit)


_bad: Final = functools.partial(bad_arguments, "ShardedIterable")
