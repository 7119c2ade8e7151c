"""Which epoch a pass over a loader reads, and what the newest pass has delivered."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import Explanation
from ddpsafe.data._loader.epochs import set_epoch_of
from ddpsafe.data._loader.sampler_search import enter_epoch, mark_unset
from ddpsafe.data._samplers.base import AutoEpoch, check_epoch, require_int
from ddpsafe.data.errors import DataConfigError, LateSetEpochError

if TYPE_CHECKING:
    from collections.abc import Callable


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


class Epochs:
    """The remaining epochs of a run, as ``loader.epochs(n)`` returns them.

    Args:
        cursor: The loader's cursor.
        num_epochs: How many epochs the run has in total.
        find_first: Returns the first of the remaining ones.

    Attributes:
        current: The epoch that the loop is in; ``None`` before and after the loop.
    """

    def __init__(self, cursor: EpochCursor, num_epochs: int, find_first: Callable[[], int]) -> None:
        self.current: int | None = None
        self._cursor = cursor
        self._stop = num_epochs
        self._find_first = find_first
        self._first: int | None = None

    def __len__(self) -> int:
        first = self._find_first() if self._first is None else self._first
        return max(0, self._stop - first)

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> int:
        if self._first is None:
            self._first = epoch = self._find_first()
        else:
            epoch = self._stop if self.current is None else self.current + 1
        if epoch >= self._stop:
            self.current = None
            self._cursor.leave_loop(self)
            raise StopIteration
        self._cursor.enter_loop(self, epoch)
        self.current = epoch
        return epoch


class EpochCursor:
    """The one answer to the question of which epoch the next pass reads.

    The first of these that applies:

    1. what the user set since the last pass, on the loader or on its sampler;
    2. what the user set before, if the last pass of it was broken off;
    3. the epoch of the loop over ``loader.epochs(n)``;
    4. what the user set on the dataset since the last pass;
    5. the epoch after that of the last pass, whether it was broken off or not;
    6. that of a loaded state, or the one after it if the state was saved at its end; 0 at first.

    Args:
        holder: The sampler, or what else has the epoch; see `find_epoch_holder`. An `AutoEpoch` in it
            was not set by the user.

    Attributes:
        holder: As above; replaced if it does not keep the object that marks an epoch.
        delivery: What the newest pass has delivered.
    """

    def __init__(self, holder: Any) -> None:
        """Take the epoch 0 of a new sampler as not set by the user."""
        mark_unset(holder)
        self.holder = holder
        self.delivery = Delivery()
        self._targets: list[Any] = []  # datasets that show whether the user has set their epoch
        self._loop: weakref.ref[Epochs] | None = None
        self._is_running: Callable[[], object] = _nothing

    @property
    def loop(self) -> Epochs | None:
        """The loop under way."""
        return None if self._loop is None else self._loop()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass.

        Raises:
            LateSetEpochError: A pass of another epoch has begun, though without a batch yet.
        """
        check_epoch(epoch)
        delivery = self.delivery
        if self._is_running() is not None and not delivery.exhausted and delivery.batches == 0:
            if epoch != delivery.epoch:
                raise _late_set_epoch(epoch, delivery)
            delivery.chosen = True
        else:
            self.holder.set_epoch(int(epoch))

    def enter_loop(self, loop: Epochs, epoch: int) -> None:
        """Read `epoch` in each pass until `leave_loop`."""
        self._loop = None
        self.set_epoch(epoch)
        # Weak: a loop that is left with `break` is freed, and so is no longer under way.
        self._loop = weakref.ref(loop)

    def leave_loop(self, loop: Epochs) -> None:
        """Let each pass read the next epoch again."""
        if self.loop is loop:
            self._loop = None

    def first_of_loop(self, *, is_finished: bool, has_more: Callable[[], bool]) -> int:
        """Return where a loop begins: a broken-off pass before it does not count.

        Args:
            is_finished: As in `begin`.
            has_more: As in `begin`.
        """
        delivery = self.delivery
        if delivery.epoch is None or delivery.exhausted or delivery.in_loop:
            return self._find_next(is_finished=is_finished, has_more=has_more)[0]
        chosen = self._set_by_user()
        return int(delivery.epoch) if chosen is None else chosen

    def begin(
        self,
        *datasets: object,
        severe: bool,
        is_finished: bool,
        has_more: Callable[[], bool],
    ) -> AutoEpoch:
        """Begin a pass: set its epoch everywhere, and end the pass before.

        Args:
            datasets: What gets the epoch beside the sampler, if it has a ``set_epoch()``.
            severe: Whether the pass before would now deliver wrong data.
            is_finished: Whether a state was loaded that was saved at the end of its epoch.
            has_more: Returns whether the newest pass has batches left.

        Returns:
            The epoch, as the loader marks it.
        """
        number, is_chosen = self._find_next(is_finished=is_finished, has_more=has_more)
        epoch, last, loop = AutoEpoch(number), self.delivery, self.loop
        last.supersede("another iteration has begun", severe=severe)
        holder, self.holder = self.holder, enter_epoch(self.holder, epoch)
        self.delivery = Delivery(
            epoch=epoch,
            in_loop=loop is not None,
            # A holder that had to be replaced cannot show whether the user set its epoch.
            chosen=is_chosen and holder is self.holder,
            # The loop's epoch was already read to its end: reading it again moves no position.
            complete=loop is not None and last.exhausted and last.epoch == epoch,
        )
        self._targets = set_epoch_of(*datasets, epoch=epoch, excluded=self.holder)
        return epoch

    def follow(self, iterator: object) -> None:
        """Take note of the iterator of the pass that has begun."""
        # Weak: a pass whose iterator was dropped is not running any more.
        self._is_running = weakref.ref(iterator)

    def require_same_epoch(self) -> None:
        """Check that the epoch is still that of the newest pass.

        Raises:
            LateSetEpochError: ``set_epoch()`` of another epoch came after ``iter()``.
        """
        if self.holder.epoch is self.delivery.epoch:
            return
        if self.holder.epoch != self.delivery.epoch:
            raise _late_set_epoch(int(self.holder.epoch), self.delivery)
        # Setting the same epoch after iter() has the effect of setting it before.
        self.holder.epoch = self.delivery.epoch
        self.delivery.chosen = True

    def restart(self, epoch: int | None = None) -> None:
        """Forget all passes, after a state was loaded.

        Args:
            epoch: The epoch of the state; ``None`` if the sampler has loaded it itself.
        """
        if epoch is not None:
            self.holder = enter_epoch(self.holder, AutoEpoch(epoch))
        self.delivery.supersede("a state was loaded", severe=True)
        self.delivery = Delivery()
        self._targets = []
        self._is_running = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the iteration and the loop under way."""
        return {**self.__dict__, "_is_running": _nothing, "_loop": None}

    def _find_next(self, *, is_finished: bool, has_more: Callable[[], bool]) -> tuple[int, bool]:
        """Return the epoch of the next pass, and whether the user set it, so that it may stay."""
        last, loop, by_user = self.delivery.epoch, self.loop, self._set_by_user()
        keeps = self._keeps_epoch(has_more)
        if loop is not None and loop.current is not None:
            epoch = by_user if by_user is not None else last if keeps else loop.current
            return int(epoch or 0), keeps if by_user is None else epoch != loop.current
        by_dataset = self._set_on_dataset()
        if by_user is not None and (by_dataset is None or by_user != last):
            return by_user, True
        if by_dataset is not None:
            return by_dataset, True
        if last is not None:
            return int(last) + (not keeps), keeps
        return int(self.holder.epoch) + is_finished, False

    def _set_by_user(self) -> int | None:
        epoch = self.holder.epoch
        return None if isinstance(epoch, AutoEpoch) else int(epoch)

    def _set_on_dataset(self) -> int | None:
        chosen = (item.epoch for item in self._targets if not isinstance(item.epoch, AutoEpoch))
        return next(map(int, chosen), None)

    def _keeps_epoch(self, has_more: Callable[[], bool]) -> bool:
        """Return whether the epoch stays: the user set it, and the last pass was broken off."""
        delivery = self.delivery
        if not delivery.chosen or delivery.complete:
            return False
        if delivery.used is not None:
            return True  # `even_steps` reads ahead: this rank's end need not be that of all ranks
        # With no batch left the epoch is complete, though the loop did not ask for another one.
        return not delivery.exhausted and has_more()


def _nothing() -> None:
    return None


def _late_set_epoch(epoch: int, delivery: Delivery) -> LateSetEpochError:
    """Make the error for an epoch that can no longer take effect."""
    return LateSetEpochError(
        Explanation(
            f"set_epoch({epoch}) came after iter(): the iteration of epoch {int(delivery.epoch or 0)} has begun "
            f"and delivered {delivery.batches} batches.",
            cause="workers have already been given indices of the old epoch, so torch would "
            "silently ignore the call.",
            fix="call set_epoch() before the loop, or loop `for epoch in loader.epochs(n):`.",
        )
    )
