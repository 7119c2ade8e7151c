"""Which epoch a pass over a loader reads, and how far the newest pass is: one cell has both."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._arguments import require_int
from ddpsafe.data._samplers.base import AutoEpoch, epoch_targets
from ddpsafe.data.errors import LateSetEpochError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, kw_only=True)
class Pass:
    """One pass over the loader, and what it has delivered.

    Attributes:
        in_loop: Whether the pass belongs to a loop over ``loader.epochs()``.
        enough: How many batches complete it for a loop that does not ask for the end; ``None`` if unknown.
        used: How many of them count as read, if `even_steps` reads ahead; else ``None``.
        exhausted: Whether its end was reached.
        finished: Whether the epoch counts as read, even if this pass does not reach its end.
        is_invalid: Whether it would deliver wrong data, since a state was loaded, or another pass has its
            workers.
    """

    epoch: int
    by_user: bool = False
    in_loop: bool = False
    enough: int | None = None
    batches: int = 0
    used: int | None = None
    exhausted: bool = False
    finished: bool = False
    is_invalid: bool = False

    def is_complete(self) -> bool:
        """Return whether the epoch counts as read; all ranks of a loop agree, though some may have a batch less."""
        # `even_steps` reads ahead: this rank's end need not be that of all ranks.
        at_end = self.exhausted or (self.enough is not None and self.batches >= self.enough)
        return self.finished or (self.used is None and at_end)

    def count_used(self, batches: int | None) -> tuple[int, bool]:
        """Return how many batches count as read, and whether the epoch was complete with them.

        Without `batches` these are all, or what `even_steps` has counted.

        Raises:
            ConfigError: So many were not delivered.
        """
        used = self.batches if self.used is None else self.used
        if (
            batches is not None
            and (used := require_int(batches, "batches", least=0)) > self.batches
        ):
            raise ConfigError(
                Explanation(
                    f"batches={used}, but this iteration has delivered {self.batches}.",
                    cause="batches counts from the beginning of this iteration.",
                    fix="pass how many of its batches were used.",
                )
            )
        at_end = self.exhausted and self.used is None and used == self.batches
        return used, self.finished or at_end


class Epochs:
    """The remaining epochs of a run, as ``loader.epochs(n)`` returns them.

    Attributes:
        current: The epoch that the loop is in; ``None`` before and after the loop.
    """

    def __init__(self, cell: Cell, num_epochs: int) -> None:
        self.current: int | None = None
        self._cell = cell
        self._stop = num_epochs
        self._first: int | None = None

    def __len__(self) -> int:
        first = self._cell.first_of_loop() if self._first is None else self._first
        return max(0, self._stop - first)

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> int:
        if self._first is None:
            self._first = epoch = self._cell.first_of_loop()
        else:
            epoch = self._stop if self.current is None else self.current + 1
        if epoch >= self._stop:
            self.current = None
            self._cell.leave_loop(self)
            raise StopIteration
        self._cell.enter_loop(self, epoch)
        self.current = epoch
        return epoch


class OwnEpoch:
    """The epoch of a loader whose sampler has none."""

    def __init__(self) -> None:
        self.epoch: int = AutoEpoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self.epoch = epoch


class _Shown:
    """A sampler or dataset that has an epoch, and what it showed when the loader last set or saw it."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self._seen = getattr(item, "epoch", None)

    def put(self, epoch: int) -> None:
        """Set the epoch as the loader's."""
        self.item.set_epoch(AutoEpoch(epoch))
        self.mark()

    def mark(self) -> None:
        """Let the epoch that it has count as the loader's."""
        now = getattr(self.item, "epoch", None)
        if isinstance(now, int) and not isinstance(now, AutoEpoch):
            with contextlib.suppress(AttributeError):  # a property: only another value shows, then
                self.item.epoch = AutoEpoch(now)
        self._seen = getattr(self.item, "epoch", None)

    def forget(self) -> None:
        """Let whatever it shows count as the user's."""
        self._seen = None

    def find_chosen(self) -> int | None:
        """Return the epoch that the user has set since; ``None`` if there is none."""
        now = getattr(self.item, "epoch", None)
        if not isinstance(now, int) or isinstance(now, AutoEpoch):
            return None
        is_same = now == self._seen and not isinstance(self._seen, AutoEpoch)
        return None if is_same else int(now)


class Cell:
    """The epoch of one loader, who set it, and how far its newest pass is; all others ask it.

    Which epoch a pass reads follows from the first of these rules that applies:

    1. The one that the user set, on the loader, its sampler or its dataset, until a pass of it is
       complete: a look at the first batch does not use it up.
    2. That of the loop over ``loader.epochs(n)``.
    3. The one after that of the last pass. At first it is that of a loaded state, or the one after it
       if nothing of it is left, or 0.

    Rule 3 counts a pass that was left: a script that leaves each pass after k batches, and sets no
    epoch, would otherwise train on the same k batches for ever.

    Args:
        sampler: What has the epoch: the sampler, or an `OwnEpoch`.
        datasets: What gets it, too, if it has a ``set_epoch()``.
        is_finished: Returns whether a loaded state leaves nothing of its epoch.

    Attributes:
        holder: The sampler or other object that has the epoch.
        newest: The newest pass; ``None`` at first, and after a state was loaded.
    """

    def __init__(self, sampler: Any, *datasets: object, is_finished: Callable[[], bool]) -> None:
        self.newest: Pass | None = None
        self.holder = sampler
        self._sampler = _Shown(sampler)
        if sampler.epoch == 0:  # where samplers begin
            self._sampler.mark()
        else:
            self._sampler.forget()
        self._datasets = datasets
        self._shown = self._find_shown()
        self.is_finished = is_finished
        self._loop: weakref.ref[Epochs] | None = None
        self._entered: int | None = None  # the loop's epoch, until a pass begins
        self._running: Callable[[], object] = _nothing

    def _find_shown(self) -> list[_Shown]:
        targets = epoch_targets(*self._datasets)
        others = [_Shown(item) for item in targets if item is not self.holder]
        return [self._sampler, *others]

    @property
    def _current_of_loop(self) -> int | None:
        loop = None if self._loop is None else self._loop()
        return None if loop is None else loop.current

    def _find_chosen(self) -> int | None:
        chosen = (each.find_chosen() for each in self._shown)
        return next((epoch for epoch in chosen if epoch is not None), None)

    def _find_next(self) -> tuple[int, bool]:
        """Return the epoch of the next pass, by the rules above, and whether the user set it."""
        chosen, last, current = self._find_chosen(), self.newest, self._current_of_loop
        if chosen is not None:
            return chosen, chosen != current  # setting the loop's own epoch changes nothing
        if last is not None and last.by_user and not last.is_complete():
            return last.epoch, True
        if self._entered is not None:
            return self._entered, False
        if current is not None:
            return current, False
        if last is not None:
            return last.epoch + 1, False
        return int(self.holder.epoch) + self.is_finished(), False

    def begin(self, *, takes_workers: bool) -> Pass:
        """Begin a pass: set its epoch everywhere, and end the pass before."""
        epoch, by_user = self._find_next()
        last, in_loop = self.newest, self._current_of_loop is not None
        self.newest, self._entered = Pass(epoch=epoch, by_user=by_user, in_loop=in_loop), None
        if last is not None:
            last.is_invalid |= takes_workers
            # The loop's epoch was read already: reading in it again moves no position.
            is_again = in_loop and not by_user and last.epoch == epoch
            self.newest.finished = is_again and last.is_complete()
        self._shown = self._find_shown()
        for each in self._shown:
            each.put(epoch)
        return self.newest

    def follow(self, iterator: object) -> None:
        """Take note of the iterator of the pass that has begun."""
        # Weak: a pass whose iterator was dropped is not running any more.
        self._running = weakref.ref(iterator)

    def restart(self, epoch: int) -> None:
        """Forget all passes, after a state of this epoch was loaded."""
        if self.newest is not None:
            self.newest.is_invalid = True
        self.newest, self._entered, self._running = None, None, _nothing
        self._shown = self._find_shown()
        if self.holder.epoch == epoch:  # it has loaded the state itself
            self._sampler.mark()
        else:
            self._sampler.put(epoch)

    def of_state(self) -> Pass:
        """Return the pass that a state saved now is of: a new one if an epoch was set since."""
        chosen, last, sampler = self._find_chosen(), self.newest, self.holder
        if chosen is not None and sampler.epoch != chosen:
            sampler.set_epoch(chosen)
        is_new = chosen is not None or self._entered is not None
        if last is None or is_new or sampler.epoch != last.epoch:
            return Pass(epoch=int(sampler.epoch))
        return last

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass.

        Raises:
            LateSetEpochError: A pass of another epoch has begun, though without a batch yet.
        """
        require_int(epoch, "epoch", least=0)
        begun = self._find_begun()
        if begun is None:
            self.holder.set_epoch(int(epoch))
            self._sampler.forget()
        elif begun.epoch != epoch:
            raise _late_set_epoch(epoch, begun)
        else:
            begun.by_user = True

    def _find_begun(self) -> Pass | None:
        """Return the pass that runs and has not delivered a batch yet."""
        last = self.newest
        is_begun = last is not None and not last.exhausted and last.batches == 0
        return last if is_begun and self._running() is not None else None

    def require_same_epoch(self, running: Pass) -> None:
        """Check that the epoch is still that of the newest pass.

        Raises:
            LateSetEpochError: ``set_epoch()`` of another epoch came after ``iter()``.
        """
        chosen = self._sampler.find_chosen()
        if chosen is None:
            return
        if chosen != running.epoch:
            raise _late_set_epoch(chosen, running)
        # Setting the same epoch after iter() has the effect of setting it before.
        running.by_user = True
        self._sampler.mark()

    def first_of_loop(self) -> int:
        """Return where a loop begins: a pass before it that was left does not count."""
        last = self.newest
        was_left = last is not None and not last.in_loop and not last.is_complete()
        if last is not None and was_left and self._entered is None and self._find_chosen() is None:
            return last.epoch
        return self._find_next()[0]

    def enter_loop(self, loop: Epochs, epoch: int) -> None:
        """Read `epoch` in each pass until `leave_loop`, unless the user sets another one."""
        begun = self._find_begun()
        if begun is not None and begun.epoch != epoch:
            raise _late_set_epoch(epoch, begun)
        if self.newest is not None:
            self.newest.by_user = False
        for each in self._shown:
            each.mark()
        self._sampler.put(epoch)
        self._entered = epoch
        # Weak: a loop that is left with `break` is freed, and so is no longer under way.
        self._loop = weakref.ref(loop)

    def leave_loop(self, loop: Epochs) -> None:
        """Let each pass read the next epoch again."""
        if self._loop is not None and self._loop() is loop:
            self._loop = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the iteration and the loop under way."""
        return {**self.__dict__, "_running": _nothing, "_loop": None}


def _nothing() -> None:
    return None


def _late_set_epoch(epoch: int, running: Pass) -> LateSetEpochError:
    """Make the error for an epoch that can no longer take effect."""
    return LateSetEpochError(
        Explanation(
            f"set_epoch({epoch}) came after iter(): the iteration of epoch {running.epoch} has begun "
            f"and delivered {running.batches} batches.",
            cause="workers have already been given indices of the old epoch, so torch would "
            "silently ignore the call.",
            fix="call set_epoch() before the loop, or loop `for epoch in loader.epochs(n):`.",
        )
    )
