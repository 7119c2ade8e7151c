"""What a loader needs from whatever knows the position in the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping


class AutoEpoch(int):
    """An epoch that the loader set by itself.

    A plain integer in ``sampler.epoch`` means that the user called ``set_epoch()`` since, and
    the user wins. The mark works for every sampler that keeps what it was given, torch's too.
    """

    __slots__ = ()


@runtime_checkable
class Cursor(Protocol):
    """Owns (epoch, consumed): how many samples of which epoch all ranks together have read."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; the same epoch keeps the offset, any other starts at 0."""
        ...

    def is_finished(self) -> bool:
        """Tell whether nothing of this epoch is left, because a loaded state says so."""
        ...

    def state_after(
        self, batches: int, *, batch_size: int, drop_last: bool, exhausted: bool
    ) -> dict[str, Any]:
        """Return the state after `batches` batches of this iteration were delivered."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where the state was taken."""
        ...
