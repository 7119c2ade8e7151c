"""One pass over a loader: which batches it has delivered, of which epoch, and the state then."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ddpsafe._errors import Explanation
from ddpsafe.data._loader.sampler_search import batch_geometry, find_epoch_holder
from ddpsafe.data._loader.worker_death import explain_worker_error, watch_workers
from ddpsafe.data._samplers.base import Cursor, require_int
from ddpsafe.data.errors import DataConfigError, DataWarning, LateSetEpochError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from ddpsafe.data._loader.epochs import EpochBoard
    from ddpsafe.data._loader.replay import Replay
    from ddpsafe.data._samplers.base import AutoEpoch

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class Delivery:
    """What one pass has delivered.

    Attributes:
        epoch: The epoch of the pass, as the loader marked it; ``None`` before the first pass.
        batches: How many batches were delivered.
        used: How many of them count as read, if `even_steps` reads ahead; else ``None``.
        exhausted: Whether the pass reached its end.
        superseded: Why the pass is no longer valid: another one began, or a state was loaded.
        severe: Whether a superseded pass would deliver wrong data.
        in_loop: Whether the pass belongs to a loop over ``loader.epochs()``.
        complete: Whether the epoch counts as read, even if this pass did not reach its end.
        chosen: Whether the user set the epoch, for this pass or for an earlier, broken-off one.
    """

    epoch: AutoEpoch | None = None
    batches: int = 0
    used: int | None = None
    exhausted: bool = False
    superseded: str | None = None
    severe: bool = False
    in_loop: bool = False
    complete: bool = False
    chosen: bool = False

    def supersede(self, why: str, *, severe: bool) -> None:
        """End the pass, even if something still holds its iterator."""
        self.superseded = why
        self.severe = severe

    def count_used(self, batches: int | None) -> int:
        """Return how many batches count as read: `batches` if given, else `used`, else all."""
        if batches is None:
            return self.batches if self.used is None else self.used
        used = require_int(batches, "batches")
        if not 0 <= used <= self.batches:
            raise DataConfigError(
                Explanation(
                    f"batches={used}, but this iteration has delivered {self.batches}.",
                    cause="batches counts from the beginning of this iteration.",
                    fix="pass how many of its batches were used.",
                )
            )
        return used

    def is_finished(self, used: int) -> bool:
        """Return whether the epoch is complete after `used` batches."""
        at_end = self.exhausted and self.used is None and used == self.batches
        return self.complete or at_end


class EpochIterator(Generic[T_co]):
    """torch's iterator, with a count of what it delivered; ``iter(loader)`` returns it."""

    def __init__(
        self,
        inner: Iterator[T_co],
        delivery: Delivery,
        holder: Any,
        board: EpochBoard | None,
        on_first_batch: Callable[[object], None] | None = None,
        rng_state: torch.Tensor | None = None,
        replay: Replay | None = None,
        *,
        loader: object = None,
    ) -> None:
        self._inner = inner
        self._delivery = delivery
        self._holder = holder
        self._board = board
        self._mark = delivery.epoch
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
                        f"This iterator of epoch {int(self._mark or 0)} is no longer valid: "
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
        elif self._holder.epoch is not self._mark:  # set_epoch() came after iter()
            if self._holder.epoch != self._mark:
                raise late_set_epoch(
                    int(self._holder.epoch), int(self._mark or 0), delivery.batches
                )
            self._holder.epoch = self._mark
            delivery.chosen = True
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


def late_set_epoch(asked: int, running: int, batches: int) -> LateSetEpochError:
    """Make the error for an epoch that can no longer take effect."""
    return LateSetEpochError(
        Explanation(
            f"set_epoch({asked}) came after iter(): the iteration of epoch {running} has begun "
            f"and delivered {batches} batches.",
            cause="workers have already been given indices of the old epoch, so torch would "
            "silently ignore the call.",
            fix="call set_epoch() before the loop, or loop `for epoch in loader.epochs(n):`.",
        )
    )


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
