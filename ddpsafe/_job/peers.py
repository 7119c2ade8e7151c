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

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddpsafe._job.control import Control

BEAT_S: Final = 5.0
"""How often a rank renews the heartbeat that ranks on other hosts see."""
SILENCE_S: Final = 30.0
"""A rank on another host counts as lost if its heartbeat has not changed for this long."""
_CHECK_S: Final = 0.25
"""How often a waiting rank checks that the others are alive."""


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
        try:
            namespace = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            namespace = socket.gethostname()
        pid = os.getpid()
        return cls(socket.gethostname(), f"{boot_id()} {namespace}", pid, _start_of(pid))

    def has_ended(self) -> bool:
        """Return whether it has exited; only for processes of this kernel and pid namespace."""
        return self.started is not None and _start_of(self.pid) != self.started


def _start_of(pid: int) -> int | None:
    """Return when a process started, see `ProcessStat`; ``None`` once it has exited, or if unknown."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    return None if stat.state in ("Z", "X") else stat.started


class PeerWatch:
    """Finds ranks that have exited: on this host by their process, on others by their heartbeat.

    A thread renews this rank's own heartbeat. It refers only to the control line, not to this object,
    so that it can be stopped when the owner of this one is garbage-collected.

    Args:
        control: This rank's control line to the others.
        name: Names what the ranks do meanwhile; the same for all of them.
        rank: This rank.
        on_many_hosts: Whether others may be on other hosts, and need a heartbeat.
    """

    def __init__(self, control: Control, name: str, rank: int, *, on_many_hosts: bool) -> None:
        """Tell the others which process this is."""
        self._control = control
        self._name = name
        self._myself = Process.myself()
        self._processes: dict[int, Process] = {}
        # By rank: its heartbeat, since when it has been unchanged, and when it was last read.
        self._heartbeats: dict[int, tuple[bytes | None, float, float]] = {}
        self._next_check_s = 0.0
        self._stop = threading.Event()
        self._own_key = f"{name}/process/{rank}"
        control.put(self._own_key, json.dumps(asdict(self._myself)).encode())
        if on_many_hosts:
            work = (control, f"{name}/beat/{rank}", self._stop)
            threading.Thread(target=_beat, args=work, name="ddpsafe-beat", daemon=True).start()

    def stop(self) -> None:
        """Stop this rank's heartbeat."""
        self._stop.set()

    def forget(self) -> None:
        """Stop, and remove what the others know of this rank, since none waits for it any longer."""
        self.stop()
        with contextlib.suppress(RuntimeError):  # the store may have ended
            self._control.drop(self._own_key)

    def find_lost(
        self, ranks: Collection[int], has_sent: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return the first rank that is lost and has not sent its message, and why it is lost."""
        now = time.monotonic()
        if now < self._next_check_s:
            return None
        self._next_check_s = now + _CHECK_S
        for rank in ranks:
            why = self._why_lost(rank, now)
            if why and not has_sent(rank):
                return rank, why
        return None

    def _why_lost(self, rank: int, now: float) -> str:
        departed = self._control.departure()
        if departed is not None and departed.rank == rank:
            return f"it has failed: {departed.error}"
        if rank not in self._processes:
            raw = self._control.find(f"{self._name}/process/{rank}")
            if raw is None:
                return ""
            self._processes[rank] = Process(**json.loads(raw))
        process = self._processes[rank]
        if process.kernel == self._myself.kernel:
            where = f"{process.pid} on {process.host}"
            return f"its process {where} has ended." if process.has_ended() else ""
        silent = self._is_silent(rank, now)
        return (
            f"it has sent no heartbeat from {process.host} for {SILENCE_S:g} s." if silent else ""
        )

    def _is_silent(self, rank: int, now: float) -> bool:
        beat = self._control.find(f"{self._name}/beat/{rank}")
        before, since_s, read_s = self._heartbeats.get(rank, (None, now, now))
        # Count only the time in which this rank kept reading: it does not read between two waits,
        # nor while its process is suspended. A rank without any heartbeat does not count as silent.
        if beat is None or beat != before or now - read_s > 2 * BEAT_S:
            since_s = now
        self._heartbeats[rank] = (beat, since_s, now)
        return now - since_s > SILENCE_S


def _beat(control: Control, key: str, stop: threading.Event) -> None:
    for number in itertools.count():
        try:
            control.put(key, str(number).encode())
        except Exception:  # noqa: BLE001 - without the store, no rank can read the heartbeat
            return
        if stop.wait(BEAT_S):
            return
