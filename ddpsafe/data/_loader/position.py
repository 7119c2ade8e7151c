"""The position of a loader: which batches count as read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpsafe._errors import Explanation
from ddpsafe.data._loader.sampler_search import batch_geometry, find_epoch_holder
from ddpsafe.data._samplers.base import Cursor, require_int
from ddpsafe.data.errors import DataConfigError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ddpsafe.data._loader.iteration import Delivery
    from ddpsafe.data._loader.replay import Replay


def cursor_of(loader: DataLoader[Any]) -> Cursor | None:
    """Return the sampler that knows the position and whose batches can be counted."""
    resolved = _resolve(loader)
    return None if resolved is None else resolved[0]


def save_state(
    loader: DataLoader[Any], delivery: Delivery, batches: int | None, replay: Replay | None
) -> dict[str, Any]:
    """Return the state after the delivered batches, or after the first `batches` of them."""
    require_order(loader)
    resolved = _resolve(loader)
    if resolved is None or replay is not None:
        assert replay is not None, "made where no cursor is"  # noqa: S101 - our own invariant
        used = _used(delivery, batches)
        finished = _is_finished(delivery, used)
        epoch = find_epoch_holder(loader).epoch if delivery.epoch is None else delivery.epoch
        return replay.state(int(epoch), used, delivery.batches, finished=finished)
    cursor, batch_size, drop_last = resolved
    if delivery.epoch is None or cursor.epoch is not delivery.epoch:
        # Nothing was read of the epoch that the cursor stands in.
        used, exhausted = 0, False
    else:
        used = _used(delivery, batches)
        exhausted = _is_finished(delivery, used)
    return cursor.state_after(used, batch_size=batch_size, drop_last=drop_last, exhausted=exhausted)


def require_order(loader: DataLoader[Any]) -> None:
    """Refuse a state of a loader that delivers batches in no order."""
    if not loader.in_order:
        raise DataConfigError(
            Explanation(
                "This loader has no state: in_order=False delivers batches in no order.",
                cause="a resume must know which samples were read, and find the others again.",
                fix="use in_order=True.",
            )
        )


def _resolve(loader: DataLoader[Any]) -> tuple[Cursor, int, bool] | None:
    holder = find_epoch_holder(loader)
    geometry = batch_geometry(loader, holder) if isinstance(holder, Cursor) else None
    return None if geometry is None else (holder, *geometry)


def _is_finished(delivery: Delivery, used: int) -> bool:
    at_end = delivery.exhausted and delivery.used is None and used == delivery.batches
    return delivery.complete or at_end


def _used(delivery: Delivery, batches: int | None) -> int:
    if batches is None:
        return delivery.batches if delivery.used is None else delivery.used
    used = require_int(batches, "batches")
    if not 0 <= used <= delivery.batches:
        raise DataConfigError(
            Explanation(
                f"batches={used}, but this iteration has delivered {delivery.batches}.",
                cause="batches counts from the beginning of this iteration.",
                fix="pass how many of its batches were used.",
            )
        )
    return used
