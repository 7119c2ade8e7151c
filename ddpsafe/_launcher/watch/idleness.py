"""Distinguishes ranks that do nothing at all from ranks that compile, import, load or download.

A hang outside of collectives (a lock file that a killed build has left, a server that does not answer) uses
no processor, reads and writes nothing, and needs no more memory. A slow start does at least one of these,
in the rank or in a process that it has started. So a rank is idle if none of its threads and descendants
does anything for a while.

A program that has taken the rank's place in the job, see `is_alone_in_job`, polls its store and counts as idle.

In doubt a rank is active: the only effect is that the warning comes later.

A rank that waits in a collective over a broken network looks like one that waits for a slow rank, until
a timeout or the kernel ends the wait, many minutes later. But the kernel sends the same packet again
and again meanwhile, and shows that for each connection: `read_unanswered`. A process that is stopped or
does not read is not a reason: its kernel still replies.
"""

from __future__ import annotations

import contextlib
import ipaddress
import operator
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpsafe._host import ProcessStat, is_loopback, read_stat
from ddpsafe._launcher.diagnosis.rank_readings import is_alone_in_job
from ddpsafe._wire.messages import Unanswered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpsafe._launcher.processes.rank_process import RankProcess

_SAMPLE_S: Final = 5.0
_CONNECTIONS_S: Final = 1.0
# A rank whose timeout ends its wait closes its connections before its launcher knows of it.
_KEPT_S: Final = 3.0
# A thread that polls a lock 20 times a second uses less.
_CPU_SHARE: Final = 0.05
_IO_BYTES: Final = 4_096
_MEMORY_BYTES: Final = 512 * 1024
# A download wakes its thread with every packet; a loop that polls sleeps for 50 ms or longer.
_WAKE_UPS_PER_S: Final = 40.0
# gloo's thread wakes up every 10 ms, whatever happens; older versions of torch do not name it.
_GLOO_THREADS: Final = (b"gloo", b"pt_gloo")
_GLOO_WAKE_UPS_PER_S: Final = (90.0, 102.0)
# It runs for microseconds each time. A thread that computes on a busy machine may get as many slices.
_GLOO_CPU_SHARE: Final = 0.02
# To answer a question, a rank reads torch's recorder and sends it with the stacks of all threads.
_ANSWER_CPU_S: Final = 1.0
_ANSWER_BYTES: Final = 4 * 1024 * 1024

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED: Final = "01"
_RESENDS: Final = "01"
"""Of the timers of a connection: not that of a peer that reads too slowly."""

_RETRIES: Final = 5
"""The kernel sends a packet again after 0.2, 0.6, 1.4, 3.0 and 6.2 s. Where one packet of ten is lost, so
many in a row are lost once in 100,000 times."""


class ThreadUsage(NamedTuple):
    """What one thread has used since it started.

    Attributes:
        busy_ns: How long it ran, or was ready to run but had no core: a busy machine gives little.
        wake_ups: How often it was given a core.
        ran_ns: How long it ran.
    """

    busy_ns: int
    wake_ups: int
    ran_ns: int = 0


class Usage(NamedTuple):
    """What a rank and its descendants have used so far.

    Attributes:
        threads: What each thread has used, by thread id, without gloo's.
        io_bytes: How much they have read and written, from and to files, pipes and disks.
        faults: How often they have waited for a page from a disk.
        waits_for_disk: Whether one of them now waits in the kernel, as for a disk or a mount.
    """

    processes: frozenset[int]
    threads: Mapping[int, ThreadUsage]
    io_bytes: int
    memory_bytes: int
    faults: int
    waits_for_disk: bool


def is_active(before: Usage, now: Usage, *, elapsed_s: float, has_answered: bool) -> bool:
    """Return whether a rank did anything between two samples, except to answer the launcher."""
    if now.processes != before.processes or now.faults > before.faults or now.waits_for_disk:
        return True
    nothing = ThreadUsage(0, 0)
    least, most = _GLOO_WAKE_UPS_PER_S
    busy_s, rates = 0.0, [0.0]
    for tid, thread in now.threads.items():
        old = before.threads.get(tid, nothing)
        rate = (thread.wake_ups - old.wake_ups) / elapsed_s
        ran_s = (thread.ran_ns - old.ran_ns) / 1e9
        if not least <= rate <= most or ran_s > _GLOO_CPU_SHARE * elapsed_s:
            busy_s += (thread.busy_ns - old.busy_ns) / 1e9
            rates.append(rate)
    spare_s, spare_bytes = (_ANSWER_CPU_S, _ANSWER_BYTES) if has_answered else (0.0, 0)
    return (
        busy_s > _CPU_SHARE * elapsed_s + spare_s
        or max(rates) > _WAKE_UPS_PER_S
        or now.io_bytes - before.io_bytes > _IO_BYTES + spare_bytes
        or now.memory_bytes - before.memory_bytes > _MEMORY_BYTES + spare_bytes
    )


def read_usage(ranks: Sequence[int]) -> dict[int, Usage | None]:
    """Return what each rank and its descendants have used; ``None`` for one that cannot be read.

    A rank is the leader of its session.
    """
    stats = _read_stats()
    families: dict[int, list[int]] = {rank: [] for rank in ranks}
    for pid in stats:
        owner = _owner_of(pid, stats, families)
        if owner is not None:
            families[owner].append(pid)
    return {rank: _usage_of(rank, family, stats) for rank, family in families.items()}


def _read_stats() -> dict[int, ProcessStat]:
    stats = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names only, every few seconds
        if name.isdigit():
            with contextlib.suppress(OSError):
                stats[int(name)] = read_stat(name)
    return stats


def _owner_of(
    pid: int, stats: Mapping[int, ProcessStat], families: Mapping[int, Sequence[int]]
) -> int | None:
    """Return the rank that a process is or descends from."""
    if stats[pid].session in families:
        return stats[pid].session
    seen: set[int] = set()
    while pid in stats and pid not in seen:
        if pid in families:
            return pid
        seen.add(pid)
        pid = stats[pid].parent
    return None


def _usage_of(rank: int, family: Sequence[int], stats: Mapping[int, ProcessStat]) -> Usage | None:
    if rank not in family:
        return None
    threads: dict[int, ThreadUsage] = {}
    io_bytes = 0
    try:
        for pid in family:
            if pid != rank and is_alone_in_job(pid):
                continue
            for tid in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as above
                with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:  # noqa: PTH123 - as above
                    ran_ns, waited_ns, slices = map(int, file.read().split())
                with open(f"/proc/{pid}/task/{tid}/comm", "rb") as file:  # noqa: PTH123 - as above
                    is_of_gloo = file.read().startswith(_GLOO_THREADS)
                if not is_of_gloo:  # what it transfers is counted as read and written
                    threads[int(tid)] = ThreadUsage(ran_ns + waited_ns, slices, ran_ns)
            with open(f"/proc/{pid}/io", "rb") as file:  # noqa: PTH123 - as above
                lines = dict(line.split(b":") for line in file.read().splitlines())
            io_bytes += sum(int(lines[name]) for name in (b"rchar", b"wchar", b"read_bytes"))
    except (OSError, ValueError, KeyError):  # it has ended, or the system does not show it
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return Usage(
        processes=frozenset(family),
        threads=threads,
        io_bytes=io_bytes,
        memory_bytes=page * sum(stats[pid].resident_pages for pid in family),
        faults=sum(stats[pid].major_faults for pid in family),
        waits_for_disk=any(stats[pid].state == "D" for pid in family),
    )


class IdleWatch:
    """Measures for how long all ranks of this host have been idle, and finds their unanswered connections."""

    def __init__(self, processes: Sequence[RankProcess], *, sample_s: float = _SAMPLE_S) -> None:
        self._processes = processes
        self._sample_s = sample_s
        self._last: Mapping[int, Usage | None] = {}
        self._answers: Sequence[object] = ()
        self._last_s = 0.0
        self._since_s: float | None = None
        self._progress: object = None
        self._progress_s = 0.0
        self._connections_s = self._unanswered_s = 0.0

    def idle_s(self) -> float:
        """Return for how long all ranks had been idle at the last sample; 0 if one was not, or may not."""
        return 0.0 if self._since_s is None else self._last_s - self._since_s

    def look(self, now_s: float, *, is_running: bool) -> bool:
        """Take a sample if it is time to; return whether no rank has made progress since the last one.

        While a main thread is running, a sample would only show that.
        """
        progress = [
            (rank.phase, rank.returned is None, made.steps, made.saves)
            for rank in self._processes
            for made in [rank.progress()]
        ]
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
        if now_s - self._progress_s < self._sample_s:
            self._since_s, self._last, self._last_s = None, {}, 0.0
            for rank in self._processes:
                rank.unanswered = ()
            return False
        if now_s - self._connections_s >= _CONNECTIONS_S:
            self._connections_s = now_s
            unanswered = read_unanswered(
                rank.pid for rank in self._processes if rank.pid is not None
            )
            for rank in self._processes:
                if connections := unanswered.get(rank.pid or 0):
                    rank.unanswered, self._unanswered_s = connections, now_s
                elif now_s - self._unanswered_s > _KEPT_S and rank.raised is None:
                    rank.unanswered = ()
        if not is_running and now_s - self._last_s >= self._sample_s:
            self._take_sample(now_s)
        return True

    def _take_sample(self, now_s: float) -> None:
        ranks = [
            process.pid
            for process in self._processes
            if process.pid is not None and process.alive and process.returned is None
        ]
        answers = [
            answer
            for process in self._processes
            for answer in (process.whereabouts, process.position)
        ]
        usage = read_usage(ranks)
        has_answered = len(answers) != len(self._answers) or any(
            map(operator.is_not, answers, self._answers)
        )
        is_idle = all(
            now is not None
            and (before := self._last.get(pid)) is not None
            and not is_active(
                before, now, elapsed_s=now_s - self._last_s, has_answered=has_answered
            )
            for pid, now in usage.items()
        )
        if not is_idle:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._last_s or now_s
        self._last, self._last_s, self._answers = usage, now_s, answers


def read_unanswered(pids: Iterable[int]) -> dict[int, tuple[Unanswered, ...]]:
    """Return the connections of some processes that have got no reply for 6 s or longer, by process.

    Nothing where the system does not show that, or shows it to the owner of the process only.
    """
    suspects: dict[str, Unanswered] = {}
    for table in _TABLES:
        with contextlib.suppress(OSError, ValueError):
            suspects |= find_unanswered(Path(table).read_text(encoding="ascii"))
    unanswered: dict[int, tuple[Unanswered, ...]] = {}
    for pid in pids if suspects else ():
        files = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for fd in os.listdir(files):  # noqa: PTH208 - names only
                with contextlib.suppress(OSError):  # it was closed a moment ago
                    if connection := suspects.get(os.readlink(f"{files}/{fd}")):  # noqa: PTH115
                        unanswered[pid] = (*unanswered.get(pid, ()), connection)
    return unanswered


def find_unanswered(table: str) -> Mapping[str, Unanswered]:
    """Return the connections without a reply in a table of the kernel, by their names as open files."""
    connections = {}
    for line in table.splitlines()[1:]:
        # Most lines of a large job have none, and splitting them takes longer.
        if f" {_RESENDS}:" not in line:
            continue
        _, own, peer, state, _, timer, retries, _, _, inode, *_ = line.split()
        if state != _ESTABLISHED or timer[:2] != _RESENDS or int(retries, 16) < _RETRIES:
            continue
        connection = Unanswered(_address_of(own), _address_of(peer))
        if not is_loopback(connection.peer):
            connections[f"socket:[{inode}]"] = connection
    return connections


def _address_of(field: str) -> str:
    """Return the address of an entry: words of the machine's byte order, in hexadecimal, and the port."""
    digits = field.partition(":")[0]
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
