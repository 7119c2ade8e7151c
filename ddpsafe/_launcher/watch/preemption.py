"""A request to stop: passed on to the ranks, which agree on a step and get the time to save."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ddpsafe._clock import Deadline
from ddpsafe._launcher.watch.signals import is_order
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from ddpsafe._launcher.processes.rank_process import RankState
    from ddpsafe._launcher.watch.signals import SignalInbox

logger = get_logger(__name__)


class StopRequest:
    """The request to stop in one attempt, sent to the launcher or to one of the ranks.

    The ranks get the time to stop only if one of them has called `stop_requested` at least once. A
    script that never calls it is ended as soon as the launcher receives SIGTERM, SIGHUP or SIGQUIT.

    Attributes:
        limit: How long ranks may take to save and return.
        deadline: When that time is over; ``None`` until the ranks have been asked to stop.
        has_nothing_to_save: Whether a node leaves the job whose ranks cannot be asked to stop.
    """

    def __init__(
        self,
        processes: Sequence[RankState],
        inbox: SignalInbox,
        *,
        limit: timedelta,
        clock: Callable[[], float],
        find_leaving: Callable[[], Mapping[str, signal.Signals]] = dict,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._processes = processes
        self._inbox = inbox
        self.limit = limit
        self._clock = clock
        self._find_leaving = find_leaving
        self._tell = tell
        self._is_agreed = False
        self._warned_of = ""
        self.deadline: Deadline | None = None
        self.has_nothing_to_save = False

    def must_end(self) -> bool:
        """Return whether the ranks have to be ended now; if not, ask them to stop by themselves."""
        is_asked = any(process.stop.asked_by is not None for process in self._processes)
        leaving = self._find_leaving()
        if self._inbox.received is None and not is_asked and not leaving:
            return False
        if self._inbox.received == signal.SIGINT or self._inbox.insists:
            return True
        if self.deadline is None:
            if not any(process.stop.accepts for process in self._processes):
                # SIGUSR1, or a signal to one rank only, is an early warning that can wait.
                ordered = is_order(self._inbox.received)
                self.has_nothing_to_save = any(map(is_order, leaving.values()))
                source = self.source()
                if source != self._warned_of:
                    self._say(
                        f"{source}: no rank has called stop_requested() yet, so all ranks get SIGTERM now, and "
                        "SIGKILL if they still run after timeouts.grace"
                        if ordered or self.has_nothing_to_save
                        else f"{source}: training continues, because no rank has called stop_requested() yet; "
                        "the stop begins when one does"
                    )
                    self._warned_of = source
                return ordered
            self.deadline = Deadline.after(self.limit, clock=self._clock)
            for process in self._processes:
                process.stop.ask()
            limit_s = self.limit.total_seconds()
            self._say(
                f"{self.source()}: the ranks are asked to save and return, within {limit_s:.0f} s "
                "(timeouts.stop)"
            )
            self._inbox.note_answered()
        if not self._is_agreed:
            # All ranks stop at the agreed step: the first call that none of them has answered.
            promises = [process.stop.promise for process in self._processes]
            known = [promise for promise in promises if promise is not None]
            if len(known) == len(promises):
                for process in self._processes:
                    process.stop.stop_at(max(known))
                self._is_agreed = True
        return False

    def _say(self, text: str) -> None:
        """Show a warning on all nodes."""
        logger.warning("%s", text)
        self._tell(text)

    def is_overdue(self) -> bool:
        """Return whether the time to stop is over."""
        return self.deadline is not None and self.deadline.expired()

    def source(self) -> str:
        """Return which signal was received, and by which process."""
        if self._inbox.received is not None:
            of = f" of {self._inbox.where}" if self._inbox.where else ""
            return f"{self._inbox.received.name} to the launcher{of}"
        sources = [
            f"{received.name} to the launcher of {node}"
            for node, received in self._find_leaving().items()
        ]
        sources += [
            f"{process.stop.asked_by} to rank {process.rank}"
            for process in self._processes
            if process.stop.asked_by is not None
        ]
        return ", ".join(sources)
