"""One pass over a loader, and the state after what it has delivered."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ddpsafe._errors import Explanation
from ddpsafe.data._loader.sampler_search import batch_geometry, find_epoch_holder
from ddpsafe.data._loader.worker_death import explain_worker_error, watch_workers
from ddpsafe.data._samplers.base import Cursor
from ddpsafe.data.errors import DataConfigError, DataWarning, LateSetEpochError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from ddpsafe.data._loader.cursor import Delivery, EpochCursor
    from ddpsafe.data._loader.epochs import EpochBoard
    from ddpsafe.data._loader.replay import Replay

T_co = TypeVar("T_co", covariant=True)


class EpochIterator(Generic[T_co]):
    """torch's iterator, with a count of what it delivered; ``iter(loader)`` returns it."""

    def __init__(
        self,
        inner: Iterator[T_co],
        cursor: EpochCursor,
        board: EpochBoard | None,
        on_first_batch: Callable[[object], None] | None = None,
        rng_state: torch.Tensor | None = None,
        replay: Replay | None = None,
        *,
        loader: object = None,
    ) -> None:
        self._inner = inner
        self._cursor = cursor
        self._delivery = cursor.delivery
        self._board = board
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
        return explain_worker_error(error, self._inner, self._board)

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


def cursor_of(loader: DataLoader[Any]) -> Cursor | None:
    """Return the loader's cursor, if it has one and its batches can be counted."""
    resolved = _resolve(loader)
    return None if resolved is None else resolved[0]


def save_state(
    loader: DataLoader[Any], delivery: Delivery, batches: int | None, replay: Replay | None
) -> dict[str, Any]:
    """Return the state after the delivered batches, or after the first `batches` of them."""
    require_order(loader)
    resolved = _resolve(loader)
    if resolved is None or replay is not None:
        assert replay is not None, "a loader without a cursor has one"  # noqa: S101 - our own invariant
        used = delivery.count_used(batches)
        finished = delivery.is_finished(used)
        epoch = find_epoch_holder(loader).epoch if delivery.epoch is None else delivery.epoch
        return replay.state(int(epoch), used, delivery.batches, finished=finished)
    cursor, batch_size, drop_last = resolved
    if delivery.epoch is None or cursor.epoch is not delivery.epoch:
        # Nothing of the cursor's epoch has been read.
        used, exhausted = 0, False
    else:
        used = delivery.count_used(batches)
        exhausted = delivery.is_finished(used)
    return cursor.state_after(used, batch_size=batch_size, drop_last=drop_last, exhausted=exhausted)


def require_order(loader: DataLoader[Any]) -> None:
    """Raise if the loader may deliver batches out of order."""
    if not loader.in_order:
        raise DataConfigError(
            Explanation(
                "This loader has no state: in_order=False delivers batches in any order.",
                cause="a resume must know which samples were read and which were not.",
                fix="use in_order=True.",
            )
        )


def _resolve(loader: DataLoader[Any]) -> tuple[Cursor, int, bool] | None:
    holder = find_epoch_holder(loader)
    geometry = batch_geometry(loader, holder) if isinstance(holder, Cursor) else None
    return None if geometry is None else (holder, *geometry)
