"""How fast and how busy this machine is, so that a promise in seconds is tested on any machine.

A promise in seconds holds on a machine as fast as the one where it was measured, with a core for whoever
wants one. Elsewhere its limit is stretched: by how much slower this machine computes, measured once
for each run, and by how many processes shared each core while the promise was being kept, sampled all
the time. What a mean hides, such as a crowd in the one moment that counted, is added as a time: how long
the kernel saw a process wait for a core or a disk, or the host ran another machine. Limits that only end
a test that hangs are stretched by the speed alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import struct
import tempfile
import threading
import time
from importlib.metadata import version
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final

_WORK: Final = "total = 0\nfor each in range(40_000):\n    total += hash((each, str(each))) & 7\n"
_REFERENCE_S: Final = 0.0100
"""CPU time of `_WORK` where the promises were measured; `import torch` takes 1.4 s there."""

_SLOWNESS: Final = "PYTEST_MACHINE_SLOWNESS"
_SAMPLES: Final = "PYTEST_MACHINE_SAMPLES"
"""Variables with which the pytest that starts others tells them what it has measured."""

_SAMPLE: Final = struct.Struct("ddd")
"""A time, how many processes were runnable, and the seconds of `_stalled_s` until then."""
_EVERY_S: Final = 0.1
_BEFORE_S: Final = 0.5
"""How long before an interval samples count, so that a short one has some."""


@functools.cache
def slowness() -> float:
    """Return how many times slower than the reference this machine computes, at least 1."""
    known = os.environ.get(_SLOWNESS)
    if known is None:
        code = compile(_WORK, "work", "exec")
        took_s = []
        for _ in range(5):
            began_s = time.thread_time()
            exec(code, {})
            took_s.append(time.thread_time() - began_s)
        known = os.environ[_SLOWNESS] = str(min(took_s) / _REFERENCE_S)
    return max(1.0, float(known))


def hang_limit(limit_s: float) -> float:
    """Return a limit that ends what hangs, for a machine of this speed; nothing is promised by it."""
    return limit_s * slowness()


def crowding(since_s: float) -> float:
    """Return how many runnable processes shared a core since then, at least 1; a mean.

    Args:
        since_s: A time of the monotonic clock.
    """
    runnable = [_runnable(), *(n for _, n, _ in _samples(since_s))]
    return max(1.0, sum(runnable) / len(runnable) / _cores())


def stalled(since_s: float) -> float:
    """Return for how many seconds since then a process waited for a core or a disk of this machine."""
    return _stalled_s() - min([_stalled_s(), *(stalled_s for _, _, stalled_s in _samples(since_s))])


def _samples(since_s: float) -> list[tuple[float, float, float]]:
    """Return the samples since shortly before then, if any are taken."""
    path = os.environ.get(_SAMPLES)
    if path is None:
        return []
    with Path(path).open("rb") as file:
        lasts = int((time.monotonic() - since_s + _BEFORE_S) / _EVERY_S) + 2
        file.seek(max(0, file.seek(0, os.SEEK_END) // _SAMPLE.size - lasts) * _SAMPLE.size)
        content = file.read()
    whole = content[: len(content) // _SAMPLE.size * _SAMPLE.size]
    return [each for each in _SAMPLE.iter_unpack(whole) if each[0] >= since_s - _BEFORE_S]


def note_test() -> None:
    """Note that a test begins: what it requires in time may have ended long before it looks."""
    global _test_began_s  # noqa: PLW0603 - one test runs at a time
    _test_began_s = time.monotonic()


_test_began_s = time.monotonic()


def stretch(since_s: float | None = None) -> float:
    """Return the factor for a limit in seconds, of something that began then; of this test."""
    during = crowding(_test_began_s)
    return slowness() * (during if since_s is None else max(during, crowding(since_s)))


def require_in_time(took_s: float, within_s: float, what: object = "") -> None:
    """Fail if something took longer than promised, stretched for this machine."""
    since_s = time.monotonic() - took_s
    # On a machine that is never idle a process always waits: no more than the promise, or nothing fails.
    limit_s = within_s * stretch(since_s) + min(within_s, stalled(since_s))
    assert took_s < limit_s, (
        f"took {took_s:.1f} s, promised are {within_s} s ({limit_s:.1f} s on this machine): {what}"
    )


def sample_load() -> None:
    """Begin to record how busy the machine is, for this process and the pytest workers it starts."""
    if _SAMPLES in os.environ:
        return
    handle, path = tempfile.mkstemp(prefix="ddpsafe-load-")
    os.environ[_SAMPLES] = path
    stop = threading.Event()

    def record() -> None:
        with open(handle, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            while not stop.wait(_EVERY_S):
                file.write(_SAMPLE.pack(time.monotonic(), _runnable(), _stalled_s()))

    thread = threading.Thread(target=record, name="samples of the load", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()
        Path(path).unlink(missing_ok=True)
        os.environ.pop(_SAMPLES, None)

    Finalize(None, end, exitpriority=-300)


def describe() -> str:
    """Return the facts about this machine that explain a failure elsewhere."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{_cores()} of {os.cpu_count()} cores, "
        f"{slowness():.1f} times slower than the reference, load {load}; "
        f"Python {platform.python_version()}, torch {version('torch')}, pytest {version('pytest')}, "
        f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}, "
        f"user {os.geteuid()}"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _stalled_s() -> float:
    """Return for how long a process has waited for a core or a disk since the machine started.

    A task that waits for a core or a disk does so within the ``some`` of ``/proc/pressure``, and within
    ``steal`` while the host runs another machine. Kernels without pressure information give 0 for it.
    """
    fields = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
    stalled_s = float(fields[8]) / os.sysconf("SC_CLK_TCK")
    for resource in ("cpu", "io"):
        with contextlib.suppress(OSError):
            some = Path("/proc/pressure", resource).read_text(encoding="ascii").partition("\n")[0]
            stalled_s += float(some.rpartition("total=")[2]) / 1e6
    return stalled_s


def _runnable() -> float:
    """Return how many processes run or wait for a core, without the one that asks."""
    running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
    return max(0.0, float(running) - 1)
