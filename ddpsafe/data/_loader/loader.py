"""torch's DataLoader for ranks: sets the epoch, seeds the workers, resumes mid-epoch."""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ddpsafe._errors import Explanation
from ddpsafe.data._consistency import compare_states
from ddpsafe.data._iterable import ShardedIterable
from ddpsafe.data._loader.cursor import EpochCursor, Epochs
from ddpsafe.data._loader.epochs import (
    FollowedDataset,
    NamingDataset,
    SharedProgress,
    add_note,
    limit_notes,
)
from ddpsafe.data._loader.machine_limits import (
    batches_in_flight,
    check_shared_memory,
    warn_of_limits,
)
from ddpsafe.data._loader.replay import (
    CollateWithState,
    Replay,
    TrackedIndices,
    is_stateful,
)
from ddpsafe.data._loader.sampler_search import (
    batch_geometry,
    check_population,
    find_epoch_holder,
    refuse_undivided,
)
from ddpsafe.data._loader.torchs_loader import OpenDataLoader
from ddpsafe.data._loader.worker_death import explain_worker_error, watch_workers
from ddpsafe.data._loader.worker_safety import WorkerSafety, explain_pickling, refuse_unsafe_workers
from ddpsafe.data._replica import chosen_seed, current_replica
from ddpsafe.data._samplers.base import Resumable, require_int
from ddpsafe.data._samplers.ordered import LocalSampler
from ddpsafe.data._seeding import WorkerInit, derive_generator
from ddpsafe.data.errors import DataConfigError, DataWarning, LateSetEpochError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.utils.data import Dataset, Sampler

T_co = TypeVar("T_co", covariant=True)


def local_sampler(
    dataset: object, *, shuffle: bool | None, seed: int | None
) -> tuple[LocalSampler | None, bool | None]:
    """Make a resumable sampler for a single rank; with more ranks the caller must pass one."""
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    if not sized or current_replica().num_replicas > 1:
        return None, shuffle
    chosen = (chosen_seed() or 0) if seed is None else seed
    sampler = LocalSampler(dataset, shuffle=bool(shuffle), seed=chosen)  # type: ignore[arg-type]  # sized
    sampler.takes_seed_of_state = seed is None
    return sampler, None


def worker_seed(seed: int | None, holder: object) -> int:
    """Return the seed of the workers: the loader's, else the run's, else the sampler's."""
    if seed is not None:
        return require_int(seed, "seed")
    chosen = chosen_seed()
    if chosen is not None:
        return chosen
    inherited = getattr(holder, "seed", 0)
    return inherited if isinstance(inherited, int) else 0


class EpochIterator(Generic[T_co]):
    """torch's iterator, with a count of what it delivered; ``iter(loader)`` returns it."""

    def __init__(
        self,
        inner: Iterator[T_co],
        cursor: EpochCursor,
        progress: SharedProgress | None,
        on_first_batch: Callable[[object], None] | None = None,
        rng_state: torch.Tensor | None = None,
        replay: Replay | None = None,
        *,
        loader: object = None,
    ) -> None:
        self._inner = inner
        self._cursor = cursor
        self._delivery = cursor.delivery
        self._progress = progress
        self._on_first_batch = on_first_batch
        self._rng_state = rng_state
        self._replay = replay
        self._loader = loader  # kept alive: `Replay` has only a weak reference to it
        self._warned = False  # whether it has warned that another iteration has begun
        self.has_explained = False  # whether it has raised a worker's death
        watch_workers(self, inner)

    def __iter__(self) -> EpochIterator[T_co]:
        return self

    def __next__(self) -> T_co:
        delivery = self._delivery
        if delivery.superseded is not None:
            if delivery.severe or delivery.batches == 0:
                raise LateSetEpochError(
                    Explanation(
                        f"This iterator of epoch {int(delivery.epoch or 0)} is no longer valid: "
                        f"{delivery.superseded}.",
                        cause="two loops use one loader at the same time, or an old iterator was kept.",
                        fix="finish or drop one iteration before the next begins, or make two loaders.",
                    )
                )
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"an iterator is still used although {delivery.superseded}; state_dict() "
                    "counts only the newest one.",
                    DataWarning,
                    stacklevel=2,
                )
        else:
            self._cursor.require_same_epoch()
        try:
            if self._rng_state is None:
                batch = next(self._inner)
            else:
                # Draw from this rank's own generator state; training continues with its own.
                outer = torch.get_rng_state()
                torch.set_rng_state(self._rng_state)
                try:
                    batch = next(self._inner)
                finally:
                    self._rng_state = torch.get_rng_state()
                    torch.set_rng_state(outer)
        except StopIteration:
            delivery.exhausted = True
            raise
        except Exception as error:
            explanation = self.explain(error)
            if explanation is None:
                raise
            self.has_explained = True
            raise explanation from (explanation.__cause__ or error)
        delivery.batches += 1
        if self._replay is not None:
            batch = self._replay.receive(batch)
        if self._on_first_batch is not None:
            look, self._on_first_batch = self._on_first_batch, None
            look(batch)
        return batch

    def explain(self, error: Exception) -> Exception | None:
        """Return what explains an error, if a worker that died or timed out caused it."""
        return explain_worker_error(error, self._inner, self._progress)

    def count_as_used(self, batches: int) -> None:
        """Count only these batches as read, and the end as not reached; `even_steps` calls it."""
        self._delivery.used = batches

    def finish(self) -> None:
        """Count the epoch as read, even if batches are left; `even_steps` calls it."""
        self._delivery.used = None
        self._delivery.complete = True

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # torch's iterators have a length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


class DataLoader(OpenDataLoader[T_co]):
    """torch's `DataLoader` with torch's arguments, safe to use in every rank.

    It sets the epoch of the sampler, the dataset and the collate function, in persistent workers
    too; an epoch that you set with ``set_epoch()`` wins. It seeds workers by (seed, epoch, rank,
    worker) and leaves the global random number generator alone. It resumes exactly: with
    ddpsafe's samplers also under another world size, batch size or number of workers.

    Recommended loop::

        for epoch in loader.epochs(10):
            for batch in loader:
                ...

    Args:
        dataset: As in torch, like all arguments up to `in_order`.
        pin_memory: By default true if this process has initialized CUDA.
        seed: Seed of the workers, and of the order if the loader makes the sampler. By default
            that of ``launch(seed=)`` or ``torch.manual_seed``, else the sampler's, else 0.
        worker_safety: What to do if the dataset holds an open handle that workers would share:
            ``"error"``, ``"warn"`` or ``"off"``.

    Raises:
        DataConfigError: The arguments contradict each other.
        DatasetChangedError: The sampler was made for a dataset of another length.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's own arguments, in torch's order
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001 - torch's signature
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,  # noqa: FBT001 - torch's signature
        drop_last: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        worker_safety: WorkerSafety = "error",
    ) -> None:
        if sampler is not None and batch_sampler is not None:
            raise DataConfigError(
                Explanation(
                    "A sampler and a batch_sampler were given together.",
                    cause="a batch_sampler already decides which samples are read.",
                    fix="give one of them.",
                )
            )
        if worker_safety not in get_args(WorkerSafety):
            raise DataConfigError(
                Explanation(
                    f"worker_safety cannot be {worker_safety!r}.",
                    cause="the name is misspelled.",
                    fix=f"choose one of {', '.join(get_args(WorkerSafety))}.",
                )
            )
        if pin_memory is None:
            pin_memory = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
        # With generator=, torch makes the sampler, so that the order is that of torch's loader.
        if sampler is None and batch_sampler is None and generator is None:
            sampler, shuffle = local_sampler(dataset, shuffle=shuffle, seed=seed)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            bool(pin_memory),
            drop_last,
            timeout,
            None,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # Frameworks rebuild a loader from attributes named like its arguments.
        self.seed = seed
        self.worker_safety: WorkerSafety = worker_safety
        holder = find_epoch_holder(self)
        self._cursor = EpochCursor(holder)
        if isinstance(dataset, ShardedIterable):
            dataset.bind_loader(batch_size=batch_size or 1, num_workers=num_workers)
        check_population(self, holder)
        self._worker_seed = worker_seed(seed, holder)
        # A framework that rebuilds a loader passes the `WorkerInit` of the first one.
        user_fn = (
            worker_init_fn.user_fn if isinstance(worker_init_fn, WorkerInit) else worker_init_fn
        )
        self.worker_init_fn = WorkerInit(self._worker_seed, user_fn)
        warn_of_limits(self)
        self._measured = False
        self._progress: SharedProgress | None = None
        follows_state = is_stateful(dataset) or self._find_position() is None
        self._replay = Replay(self) if follows_state else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; by default each iteration reads the next epoch.

        The chosen epoch stays until an iteration of it is complete. One that you break off, for
        example after a look at the first batch, leaves it to the next iteration.

        Args:
            epoch: From 0. The epoch of a loaded state keeps its offset; any other starts at 0.

        Raises:
            LateSetEpochError: An iteration of another epoch has begun, though without a batch yet.
        """
        self._cursor.set_epoch(epoch)

    def epochs(self, num_epochs: int) -> Epochs:
        """Loop over the remaining epochs: ``for epoch in loader.epochs(10)``.

        Within the loop every iteration reads the loop's epoch, so a look at the first batch does
        not use up an epoch. Neither does an unfinished iteration before the loop.

        Args:
            num_epochs: How many epochs the run has in total, including those before a resume.

        Returns:
            The epochs, starting with the resumed one (or the next one, if the loader has been
            iterated before). ``len()`` is their number.
        """
        return Epochs(
            self._cursor, require_int(num_epochs, "num_epochs"), find_first=self._first_of_loop
        )

    def _first_of_loop(self) -> int:
        return self._cursor.first_of_loop(
            is_finished=self._is_state_finished(), has_more=self._has_more
        )

    def _is_state_finished(self) -> bool:
        """Return whether a state was loaded that was saved at the end of its epoch."""
        if self._replay is not None:
            return self._replay.finished
        holder = self._cursor.holder
        return isinstance(holder, Resumable) and holder.finished

    def _has_more(self) -> bool:
        """Return whether the newest iteration has batches left, as far as that is known."""
        try:
            length = len(self._made_indices())
        except (TypeError, NotImplementedError):  # a stream, or a sampler without a length
            return True
        skipped = 0 if self._replay is None else self._replay.skipped()
        return skipped + self._cursor.delivery.batches < length

    def __len__(self) -> int:
        """Return how many batches a whole epoch has; a resumed one delivers fewer."""
        steps = getattr(self._cursor.holder, "steps_of_epoch", None)
        geometry = batch_geometry(self, self._cursor.holder) if steps is not None else None
        if steps is None or geometry is None:
            return super().__len__()
        batch_size, drop_last = geometry
        count = steps(batch_size=batch_size, drop_last=drop_last)
        return super().__len__() if count is None else int(count)

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's is a private class
        # Not in __init__: Accelerate and Fabric add their own sampler to a loader that has none.
        refuse_undivided(self)
        if self.num_workers > 0 and self._progress is None:
            self._progress = SharedProgress(self.num_workers)
        epoch = self._cursor.begin(
            self.dataset,
            self.collate_fn,
            severe=self.persistent_workers,
            is_finished=self._is_state_finished(),
            has_more=self._has_more,
        )
        holder = self._cursor.holder
        if self._progress is not None:
            offset = self.dataset.start if isinstance(self.dataset, Resumable) else 0
            self._progress.announce(epoch, offset)
        skipped = 0 if self._replay is None else self._replay.begin_epoch(epoch)
        skipped += getattr(holder, "batches_to_skip", int)()
        replica = current_replica()
        # torch draws the workers' base seed. Drawn from the global generator, it would let a
        # validation pass change the training that follows.
        generator = self.generator
        if generator is None:
            generator = derive_generator(self._worker_seed, epoch, replica.rank)
        with self._replaced(generator=generator):
            inner = super().__iter__()
        for _ in range(skipped):
            next(inner)
        # torch.manual_seed() and launch(seed=) seed torch equally on all ranks, so that their
        # models start equal. Without workers, augmentations would draw from the same generator
        # and be equal on all ranks, too.
        rng_state = None
        if self.num_workers == 0 and replica.num_replicas > 1:
            rng_state = derive_generator(self._worker_seed, epoch, replica.rank, 0).get_state()
        on_first_batch = None
        # Measured with the first batch: a sample that is read in this process, before the workers
        # start, would open the dataset's resources in it.
        if self.num_workers > 0 and not self._measured:
            self._measured = True
            on_first_batch = functools.partial(check_shared_memory, batches=batches_in_flight(self))
        iterator = EpochIterator(
            inner,
            self._cursor,
            self._progress,
            on_first_batch,
            rng_state,
            self._replay,
            loader=self,
        )
        self._cursor.follow(iterator)
        return iterator

    def _made_iterator(self) -> Iterator[T_co]:
        tracker = None if self._replay is None else self._replay.tracker
        # torch shards and seeds data pipes by their type, so they must not be wrapped.
        is_pipe = isinstance(self.dataset, IterDataPipe | MapDataPipe)
        wrapped: dict[str, object] = {}
        if self.num_workers == 0:
            if not is_pipe:
                if tracker is not None:
                    tracker.enter(self.dataset)
                wrapped["dataset"] = NamingDataset(self.dataset, tracker)
            with self._replaced(**wrapped):
                return super()._made_iterator()
        init = self.worker_init_fn
        parts: dict[str, object] = {
            "dataset": self.dataset,
            "collate_fn": self.collate_fn,
            "worker_init_fn": init.user_fn if isinstance(init, WorkerInit) else init,
        }
        refuse_unsafe_workers(
            parts, requested=self.multiprocessing_context, safety=self.worker_safety
        )
        if isinstance(init, WorkerInit) and self._progress is not None:
            wrapped["worker_init_fn"] = init.with_progress(self._progress)
            if not is_pipe:
                wrapped["dataset"] = FollowedDataset(
                    self.dataset, self.collate_fn, self._progress, tracker
                )
            if tracker is not None and tracker.has_state():
                wrapped["collate_fn"] = CollateWithState(self.collate_fn, tracker)
        try:
            with self._replaced(**wrapped), warnings.catch_warnings():
                # torch's warning recommends fork, under which workers would share open handles.
                warnings.filterwarnings("ignore", message="Got pickle error when attempting")
                return super()._made_iterator()
        except Exception as error:
            for note in limit_notes(error):
                add_note(error, note)
            # What pickle raises depends on the object, the protocol and the version of Python.
            kinds = (pickle.PicklingError, TypeError, AttributeError, ValueError)
            explanation = explain_pickling(error, parts) if isinstance(error, kinds) else None
            if explanation is None:
                raise
            raise explanation from error

    @contextlib.contextmanager
    def _replaced(self, **attributes: object) -> Iterator[None]:
        """Replace attributes while torch makes its iterator; afterwards they are the user's again."""
        users = {name: self.__dict__[name] for name in attributes}
        self.__dict__.update(attributes)  # torch forbids setting some of them
        try:
            yield
        finally:
            self.__dict__.update(users)

    def state_dict(self, batches: int | None = None, *, compare: bool = False) -> dict[str, Any]:
        """Return the position after the batches delivered so far; call it after the step.

        Args:
            batches: How many batches of this iteration were used, if something between the
                loader and the training loop (a prefetcher) holds some back.
            compare: Check that all ranks are at the same position; every rank must call it then.

        Returns:
            A small dict of plain values, equal on every rank: save it from rank 0 alone.

        Raises:
            DataConfigError: The sampler cannot be resumed, or ``in_order=False``.
            DatasetInconsistencyError: With `compare`, on every rank: the positions differ.
        """
        self._require_order()
        delivery, epoch = self._cursor.delivery, self._cursor.holder.epoch
        used, finished = 0, False
        # If the user has chosen another epoch since, nothing of that one has been read.
        if epoch is delivery.epoch or self._replay is not None:
            used = delivery.count_used(batches)
            finished = delivery.is_finished(used)
        if self._replay is not None:
            epoch = epoch if delivery.epoch is None else delivery.epoch
            state = self._replay.state(int(epoch), used, delivery.batches, finished=finished)
        else:
            position = self._find_position()
            assert position is not None, "a loader without one has a replay"  # noqa: S101 - our own invariant
            sampler, batch_size, drop_last = position
            state = sampler.state_after(
                used, batch_size=batch_size, drop_last=drop_last, exhausted=finished
            )
        if compare:
            compare_states(state)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where `state` was taken: no sample is lost or repeated.

        Args:
            state: What `state_dict` returned. With ddpsafe's samplers the world size, the batch
                size and the number of workers may have changed since.
            strict: Refuse a state of other data; ``False`` warns instead.

        Raises:
            StateMismatchError: It is damaged, or belongs to other data.
        """
        self._require_order()
        epoch, position = None, self._find_position()
        if self._replay is not None:
            epoch = self._replay.load(state, strict=strict)
            # Persistent workers hold the dataset at its old position; new ones receive the state.
            self._end_workers()
        elif position is not None:
            sampler, batch_size, drop_last = position
            sampler.restore(state, strict=strict, batch_size=batch_size, drop_last=drop_last)
        self._cursor.restart(epoch)

    def _require_order(self) -> None:
        if not self.in_order:
            raise DataConfigError(
                Explanation(
                    "This loader has no state: in_order=False delivers batches in any order.",
                    cause="a resume must know which samples were read and which were not.",
                    fix="use in_order=True.",
                )
            )

    def _find_position(self) -> tuple[Resumable, int, bool] | None:
        """Return the sampler that tracks the position, the batch size and drop_last, if all are known."""
        holder = find_epoch_holder(self)
        geometry = batch_geometry(self, holder) if isinstance(holder, Resumable) else None
        return None if geometry is None else (holder, *geometry)

    def _made_indices(self) -> Any:
        source = super()._made_indices()
        # __init__ asks for the length, and so for the indices, before it is set.
        replay = self.__dict__.get("_replay")
        return (
            source if replay is None or replay.tracker.is_stream else TrackedIndices(replay, source)
        )

    def remember_fingerprint(self, fingerprint: str) -> None:
        """Keep the dataset's fingerprint in the state, which is then refused for other data."""
        if hasattr(self._cursor.holder, "fingerprint"):
            self._cursor.holder.fingerprint = fingerprint

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the iteration under way."""
        return {**self._without_workers(), "_progress": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore as a copy with its own position."""
        self.__dict__.update(state)
        if self._replay is not None:
            self._replay = self._replay.copy_for(self)
