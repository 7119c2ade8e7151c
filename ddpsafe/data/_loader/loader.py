"""torch's DataLoader for ranks: sets the epoch, seeds the workers, resumes mid-epoch; and `ctx.loader`."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._arguments import require_choice, require_int
from ddpsafe.data._consistency import check_dataset_of, compare_states
from ddpsafe.data._gathering import gather_json
from ddpsafe.data._iterable import ShardedIterable
from ddpsafe.data._loader.cell import Cell, Epochs, OwnEpoch
from ddpsafe.data._loader.machine_limits import (
    batches_in_flight,
    check_shared_memory,
    note_limits,
    warn_of_limits,
)
from ddpsafe.data._loader.position import (
    CollateWithState,
    Replay,
    SamplerPosition,
    TrackedIndices,
    is_stateful,
)
from ddpsafe.data._loader.reading import FollowedDataset, NamingDataset, SharedProgress
from ddpsafe.data._loader.sampler_search import (
    check_population,
    find_epoch_holder,
    refuse_undivided,
)
from ddpsafe.data._loader.torchs_loader import OpenDataLoader
from ddpsafe.data._loader.worker_death import explain_worker_error, watch_workers
from ddpsafe.data._loader.worker_safety import WorkerSafety, explain_pickling, refuse_unsafe_workers
from ddpsafe.data._replica import chosen_seed, current_replica, run_seed
from ddpsafe.data._samplers.base import AutoEpoch, Resumable, warn_of_nothing_left
from ddpsafe.data._samplers.ordered import DistributedSampler, EvalSampler, LocalSampler
from ddpsafe.data._seeding import WorkerInit, derive_generator
from ddpsafe.data.errors import DataWarning, LateSetEpochError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.utils.data import Dataset, Sampler

    from ddpsafe.data._loader.cell import Pass

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


class EpochIterator(Generic[T_co]):
    """torch's iterator, with a count of what it delivered; ``iter(loader)`` returns it."""

    def __init__(
        self,
        loader: DataLoader[T_co],
        inner: Iterator[T_co],
        running: Pass,
        *,
        cell: Cell,
        receive: Callable[[Any, Pass], T_co] | None,
        progress: SharedProgress | None,
        on_first_batch: Callable[[object], None] | None = None,
        rng_state: torch.Tensor | None = None,
    ) -> None:
        self._loader = loader  # so that it lives as long as an iteration over it
        self._inner = inner
        self._next = inner.__next__
        self._running = running
        self._cell = cell
        self._receive = receive
        self._progress = progress
        self._on_first_batch = on_first_batch
        self._rng_state = rng_state
        self._warned = False  # whether it has warned that another iteration has begun
        self.has_explained = False  # whether it has raised a worker's death
        watch_workers(self, inner)

    def __iter__(self) -> EpochIterator[T_co]:
        return self

    def __next__(self) -> T_co:
        # A batch of small samples takes 60 us, so each call here counts.
        running, cell = self._running, self._cell
        if cell.newest is not running:
            self._refuse_or_warn(running)
        elif type(cell.holder.epoch) is not AutoEpoch:
            cell.require_same_epoch(running)
        try:
            if self._rng_state is None:
                batch = self._next()
            else:
                # Draw from this rank's own generator state; training continues with its own.
                outer = torch.get_rng_state()
                torch.set_rng_state(self._rng_state)
                try:
                    batch = self._next()
                finally:
                    self._rng_state = torch.get_rng_state()
                    torch.set_rng_state(outer)
        except StopIteration:
            running.exhausted = True
            raise
        except Exception as error:
            explanation = self.explain(error)
            if explanation is None:
                raise
            self.has_explained = True
            raise explanation from (explanation.__cause__ or error)
        running.batches += 1
        if self._receive is not None:
            batch = self._receive(batch, running)
        if self._on_first_batch is not None:
            look, self._on_first_batch = self._on_first_batch, None
            look(batch)
        return batch

    def _refuse_or_warn(self, running: Pass) -> None:
        loaded = self._cell.newest is None
        why = "a state was loaded" if loaded else "another iteration has begun"
        if running.is_invalid or running.batches == 0:
            raise LateSetEpochError(
                Explanation(
                    f"This iterator of epoch {running.epoch} is no longer valid: {why}.",
                    cause="two loops use one loader at the same time, or an old iterator was kept.",
                    fix="finish or drop one iteration before the next begins, or make two loaders.",
                )
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"an iterator is still used although {why}; state_dict() counts only the "
                "newest one.",
                DataWarning,
                stacklevel=3,
            )

    def explain(self, error: Exception) -> Exception | None:
        """Return what explains an error, if a worker that died or timed out caused it."""
        return explain_worker_error(error, self._inner, self._progress)

    def count_as_used(self, batches: int) -> None:
        """Count only these batches as read, and the end as not reached; `even_steps` calls it."""
        self._running.used = batches

    def finish(self) -> None:
        """Count the epoch as read, even if batches are left; `even_steps` calls it."""
        self._running.used = None
        self._running.finished = True

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
        ConfigError: The arguments contradict each other.
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
        require_choice(worker_safety, "worker_safety", get_args(WorkerSafety))
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
        self._progress: SharedProgress | None = None
        has_epoch = find_epoch_holder(self)
        own = SamplerPosition.find(self, has_epoch)
        self._position = Replay(self, own) if own is None or is_stateful(dataset) else own
        self._cell = Cell(
            OwnEpoch() if has_epoch is None else has_epoch,
            dataset,
            self.collate_fn,
            is_finished=self._position.is_finished,
        )
        if isinstance(dataset, ShardedIterable):
            dataset.bind_loader(batch_size=batch_size or 1, num_workers=num_workers)
        check_population(self, has_epoch)
        # The loader's, else the run's, else the sampler's.
        chosen = chosen_seed() if seed is None else require_int(seed, "seed")
        inherited = getattr(has_epoch, "seed", 0)
        inherited = inherited if isinstance(inherited, int) else 0
        self._worker_seed: int = inherited if chosen is None else chosen
        # A framework that rebuilds a loader passes the `WorkerInit` of the first one.
        user_fn = (
            worker_init_fn.user_fn if isinstance(worker_init_fn, WorkerInit) else worker_init_fn
        )
        self.worker_init_fn = WorkerInit(self._worker_seed, user_fn)
        warn_of_limits(self)
        self._measured = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; by default each iteration reads the next epoch.

        The chosen epoch stays until an iteration of it is complete. One that you break off, for
        example after a look at the first batch, leaves it to the next iteration.

        Args:
            epoch: From 0. The epoch of a loaded state keeps its offset; any other starts at 0.

        Raises:
            LateSetEpochError: An iteration of another epoch has begun, though without a batch yet.
        """
        self._cell.set_epoch(epoch)

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
        return Epochs(self._cell, require_int(num_epochs, "num_epochs"))

    def __len__(self) -> int:
        """Return how many batches a whole epoch has; a resumed one delivers fewer."""
        position = self.__dict__.get("_position")  # torch's constructor asks for the length, too
        steps = None if position is None or position.own is None else position.own.steps_of_epoch()
        return super().__len__() if steps is None else int(steps)

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's is a private class
        # Not in __init__: Accelerate and Fabric add their own sampler to a loader that has none.
        refuse_undivided(self)
        if self.num_workers > 0 and self._progress is None:
            self._progress = SharedProgress(self.num_workers)
        running = self._cell.begin(takes_workers=self.persistent_workers)
        epoch, position = running.epoch, self._position
        skipped = position.begin(running)
        running.enough = position.steps_to_complete()
        if self._progress is not None:
            offset = self.dataset.start if isinstance(self.dataset, Resumable) else 0
            self._progress.announce(epoch, offset)
        replica = current_replica()
        rng_state = on_first_batch = None
        if skipped is None:
            warn_of_nothing_left(epoch)
            running.finished = True
            inner: Iterator[T_co] = iter(TorchDataLoader([]))  # type: ignore[arg-type]  # it has a length
        else:
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
            if self.num_workers == 0 and replica.num_replicas > 1:
                rng_state = derive_generator(self._worker_seed, epoch, replica.rank, 0).get_state()
            # Measured with the first batch: a sample that is read in this process, before the workers
            # start, would open the dataset's resources in it.
            if self.num_workers > 0 and not self._measured:
                self._measured = True
                on_first_batch = functools.partial(
                    check_shared_memory, batches=batches_in_flight(self)
                )
        iterator = EpochIterator(
            self,
            inner,
            running,
            cell=self._cell,
            receive=position.receive if isinstance(position, Replay) else None,
            progress=self._progress,
            on_first_batch=on_first_batch,
            rng_state=rng_state,
        )
        self._cell.follow(iterator)
        return iterator

    def _made_iterator(self) -> Iterator[T_co]:
        tracker = self._position.tracker
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
            wrapped["worker_init_fn"] = WorkerInit(init.seed, init.user_fn, self._progress)
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
            note_limits(error)
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
            ConfigError: The sampler cannot be resumed, or ``in_order=False``.
            DatasetInconsistencyError: With `compare`, on every rank: the positions differ.
        """
        self._require_order()
        state = self._position.state(self._cell.of_state(), batches)
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
        epoch = self._position.load(state, strict=strict)
        if isinstance(self._position, Replay):
            # Persistent workers hold the dataset at its old position; new ones receive the state.
            self._end_workers()
        self._cell.restart(epoch)

    def _require_order(self) -> None:
        if not self.in_order:
            raise ConfigError(
                Explanation(
                    "This loader has no state: in_order=False delivers batches in any order.",
                    cause="a resume must know which samples were read and which were not.",
                    fix="use in_order=True.",
                )
            )

    def _made_indices(self) -> Any:
        source = super()._made_indices()
        # __init__ asks for the length, and so for the indices, before it is set.
        position = self.__dict__.get("_position")
        return (
            source if position is None or not position.draws else TrackedIndices(position, source)
        )

    def remember_fingerprint(self, fingerprint: str) -> None:
        """Keep the dataset's fingerprint in the state, which is then refused for other data."""
        if self._position.own is not None:
            self._position.own.sampler.fingerprint = fingerprint

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the iteration under way."""
        return {**self._without_workers(), "_progress": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore as a copy with its own position."""
        self.__dict__.update(state)
        self._position = copy.copy(self._position)
        self._cell = copy.copy(self._cell)
        self._cell.is_finished = self._position.is_finished


def build_loader(
    dataset: Dataset[T_co],
    *,
    batch_size: int | None = 1,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int | None = None,
    check: bool = True,
    **options: Any,
) -> DataLoader[T_co]:
    """Make the loader of this rank; every rank calls it.

    Args:
        dataset: The dataset, the same on every rank.
        batch_size: Samples per batch of one rank.
        train: ``True`` shuffles and gives all ranks the same number of samples; ``False`` reads
            each sample exactly once, in order, for evaluation (collect with `gather_exact`).
        shuffle: Whether to shuffle for training; true by default.
        seed: Seed of the order and of the workers; by default that of ``launch(seed=)``, else
            that of ``torch.manual_seed`` on rank 0 if every rank called it, else 0.
        check: Whether to compare the dataset across ranks, and to keep its fingerprint in the
            state. If neither paths nor a fingerprint identify it, 64 of its items are read.
        options: Further arguments of `DataLoader`: ``num_workers``, ``collate_fn``, ...

    Returns:
        The loader; loop ``for epoch in loader.epochs(n)``.

    Raises:
        DatasetInconsistencyError: On every rank, if the ranks' datasets or arguments differ.
        ConfigError: An argument would have no effect, given another one.
    """
    sampler = options.get("sampler")
    batch_sampler = options.get("batch_sampler")
    user_sampler = batch_sampler if sampler is None else sampler
    if user_sampler is not None and shuffle is not None:
        raise _no_effect(f"shuffle={shuffle}", "the sampler that was given decides the order")
    if user_sampler is not None and not train and not isinstance(user_sampler, EvalSampler):
        raise _no_effect("train=False", "it makes an EvalSampler, but a sampler was given")
    if shuffle and not train:
        raise _no_effect("shuffle=True", "train=False reads in the order of the dataset")
    if shuffle and isinstance(dataset, IterableDataset):
        raise _no_effect("shuffle=True", "a stream has its own order")
    if not train and getattr(dataset, "even", None) is not None:
        raise _no_effect("train=False", "ShardedIterable(even=...) drops or repeats samples")
    if batch_sampler is not None and batch_size != 1:
        raise _no_effect(f"batch_size={batch_size}", "a batch_sampler makes its own batches")
    if sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset):
        sized: Any = dataset  # torch's Dataset declares no length
        if not train:
            options["sampler"] = EvalSampler(sized)
        else:
            order_seed = run_seed() or 0 if seed is None else seed
            if seed is None and check:
                # The seeds of ``torch.manual_seed`` may differ between ranks; rank 0's counts.
                seeds = gather_json(chosen_seed())
                order_seed = 0 if None in seeds else int(seeds[0])
            options["sampler"] = DistributedSampler(
                sized, shuffle=shuffle is not False, seed=order_seed
            )
            options["sampler"].takes_seed_of_state = seed is None
    loader = DataLoader(dataset, batch_size, seed=seed, **options)
    if check:
        loader.remember_fingerprint(check_dataset_of(loader))
    return loader


def _no_effect(what: str, why: str) -> ConfigError:
    return ConfigError(
        Explanation(f"{what} would have no effect.", cause=f"{why}.", fix="leave one of them out.")
    )
