"""Finds ranks that have ended while others wait for them, without any help of a launcher."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._host import boot_id, read_stat
from ddpsafe._limits import BEAT_S, SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddpsafe._job.control import Control

_CHECK_S: Final = 0.25
"""How often a waiting rank checks that the others are alive."""
_SEARCH_S: Final = 1.0
"""How often it looks for those that have not told which process they are: each costs a request."""


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a rank's process, as it is sent to the other ranks."""

    host: str
    kernel: str
    pid: int
    started: int | None

    @classmethod
    def myself(cls) -> Process:
        """Describe this process."""
        # A pid means the same process only in one pid namespace of one kernel: containers have
        # their own.
        try:
            namespace = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            namespace = socket.gethostname()
        pid = os.getpid()
        return cls(socket.gethostname(), f"{boot_id()} {namespace}", pid, _start_of(pid))

    def has_ended(self) -> bool:
        """Return whether it has exited; only for processes of this kernel and pid namespace."""
        # The pid alone is not enough: the kernel may have given it to another process since.
        return self.started is not None and _start_of(self.pid) != self.started


def _start_of(pid: int) -> int | None:
    """Return when a process started, see `ProcessStat`; ``None`` once it has exited, or if unknown."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    # A zombie has exited, and its parent may never collect its exit status.
    return None if stat.state in ("Z", "X") else stat.started


class PeerWatch:
    """Finds ranks that have exited: on this host by their process, on others by their heartbeat, if any.

    A thread renews this rank's own heartbeat. All ranks send theirs under the name `beats`, or none if that
    is empty. A rank that holds the interpreter's lock sends none meanwhile, so only code of ddpsafe may run
    then.
    """

    def __init__(self, control: Control, rank: int, *, beats: str = "") -> None:
        self._control = control
        self._beats = beats
        self._myself = Process.myself()
        self._processes: dict[int, Process] = {}
        # By rank: its heartbeat, since when it has been unchanged, and when it was last read.
        self._heartbeats: dict[int, tuple[bytes | None, float, float]] = {}
        self._next_check_s = self._next_search_s = 0.0
        self._stop = threading.Event()
        with contextlib.suppress(RuntimeError):  # the store has ended, which the first wait reports
            if not control.has_introduced_itself:
                control.put(_key_of(rank), json.dumps(asdict(self._myself)).encode())
                control.has_introduced_itself = True
        if beats:
            # The thread must not refer to this object, so that its owner can be garbage-collected.
            work = (control, f"{beats}/beat/{rank}", self._stop)
            threading.Thread(target=_beat, args=work, name="ddpsafe-beat", daemon=True).start()

    def stop(self) -> None:
        """Stop this rank's heartbeat."""
        self._stop.set()

    def knows(self, rank: int) -> bool:
        """Return whether a rank has told which process it is."""
        if rank not in self._processes:
            raw = self._control.find(_key_of(rank))
            if raw is None:
                return False
            self._processes[rank] = Process(**json.loads(raw))
        return True

    def find_lost(
        self, ranks: Collection[int], has_sent: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return the first rank that is lost and has not sent its message, and why it is lost."""
        now = time.monotonic()
        if now < self._next_check_s:
            return None
        self._next_check_s = now + _CHECK_S
        departed = self._control.departure()
        may_search = now >= self._next_search_s
        if may_search:
            self._next_search_s = now + _SEARCH_S
        for rank in ranks:
            if departed is not None and departed.rank == rank:
                why = f"it has failed: {departed.error}"
            elif rank in self._processes or (may_search and self.knows(rank)):
                why = self._why_lost(rank, now)
            else:
                continue
            if why and not has_sent(rank):
                return rank, why
        return None

    def _why_lost(self, rank: int, now: float) -> str:
        process = self._processes[rank]
        if process.kernel == self._myself.kernel:
            where = f"{process.pid} on {process.host}"
            return f"its process {where} has ended." if process.has_ended() else ""
        silent = self._beats and self._is_silent(rank, now)
        return (
            f"it has sent no heartbeat from {process.host} for {SILENCE_S:g} s." if silent else ""
        )

    def _is_silent(self, rank: int, now: float) -> bool:
        beat = self._control.find(f"{self._beats}/beat/{rank}")
        before, since_s, read_s = self._heartbeats.get(rank, (None, now, now))
        # Count only the time in which this rank kept reading: it does not read between two waits,
        # nor while its process is suspended. A rank without any heartbeat does not count as silent.
        if beat is None or beat != before or now - read_s > 2 * BEAT_S:
            since_s = now
        self._heartbeats[rank] = (beat, since_s, now)
        return now - since_s > SILENCE_S


def _key_of(rank: int) -> str:
    return f"process/{rank}"


def _beat(control: Control, key: str, stop: threading.Event) -> None:
    for number in itertools.count():
        try:
            control.put(key, str(number).encode())
        except Exception:  # noqa: BLE001 - without the store, no rank can read the heartbeat
            return
        if stop.wait(BEAT_S):
            return
