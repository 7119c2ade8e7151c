"""What a process is to the system: signals, addresses, clocks, garbage."""

from __future__ import annotations

import faulthandler
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import scripts

from ddpsafe._clock import AwakeClock, BoundedCall
from ddpsafe._host import is_handled_in_c, is_loopback


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ("", -signal.SIGTERM),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])", -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 128 + signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: None)", 128 + signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 3),
    ],
)
def test_the_exit_code_is_that_of_the_signal(tmp_path: Path, before: str, code: int) -> None:
    """A blocked signal is unblocked, an ignored one is replaced by its exit code, a handler may decide."""
    source = f"""
        import signal, sys
        from ddpsafe._host import end_by_signal
        {before}
        end_by_signal(signal.SIGTERM)
        print("still here")
    """
    run = scripts.run(tmp_path, source)
    assert (run.code, run.out) == (code, ""), run.err


def test_a_signal_that_only_c_handles_is_told_apart() -> None:
    """Not one with a handler of Python's, or none."""
    found = []
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        found.append(is_handled_in_c(signal.SIGUSR2))
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        found.append(is_handled_in_c(signal.SIGUSR2))
        faulthandler.register(signal.SIGUSR2)
        found.append(is_handled_in_c(signal.SIGUSR2))
        faulthandler.unregister(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert found == [False, False, True]


@pytest.mark.parametrize(
    ("address", "is_loop"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("ip6-localhost", True),
        ("gpu-01.localhost", True),
        ("gpu-01", False),
        ("", False),
    ],
)
def test_a_loopback_address_is_known_in_each_spelling(address: str, *, is_loop: bool) -> None:
    """Python 3.13 knows that of IPv4 in IPv6 by itself, earlier versions do not."""
    assert is_loopback(address) == is_loop


# Clocks.


@dataclass
class ManualClock:
    """A clock that is set by hand."""

    now_s: float = 100.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now_s


@pytest.mark.parametrize(
    ("before_s", "in_wait_s", "asked_s", "counted_s"),
    [
        (0.0, 0.5, 1.0, 0.5),
        (0.0, 1.9, 1.0, 1.9),
        (0.0, 9.5, 1.0, 1.0),
        (0.9, 0.5, 0.5, 1.4),
        (9.5, 0.5, 1.0, 0.5),
        (9.5, 7.5, 0.5, 0.5),
    ],
    ids=[
        "awake",
        "busy",
        "suspended in a wait",
        "busy before it",
        "suspended before it",
        "suspended twice",
    ],
)
def test_time_in_which_the_process_was_suspended_does_not_count(
    before_s: float, in_wait_s: float, asked_s: float, counted_s: float
) -> None:
    """It counts neither in a wait nor towards a deadline, and the next wait reports it."""
    now = ManualClock()
    clock = AwakeClock(now)
    started_s = clock()
    now.now_s += before_s
    assert clock() - started_s == pytest.approx(before_s if before_s < 1 else 0)
    now.now_s += in_wait_s
    assert clock.note_wait(asked_s) == (before_s > 1 or in_wait_s - asked_s > 1)
    assert clock() - started_s == pytest.approx(counted_s)
    assert not clock.note_wait(asked_s)


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_an_abandoned_call_returns_is_disposed_of_once(*, has_ended: bool) -> None:
    """Whether it returns before or after that: otherwise its connection would stay open."""
    may_end, disposed = threading.Event(), list[bool]()
    call = BoundedCall(lambda: may_end.wait(60), name="abandoned")
    if has_ended:
        may_end.set()
        assert call.wait(60)
    call.abandon(disposed.append)
    may_end.set()
    assert call.wait(60)
    assert disposed == [True]


# Garbage.


PROGRAM = """
    import gc, sys, weakref
    from ddpsafe._garbage import exempt_from_gc

    class Large:
        def __init__(self):
            self.itself = self

    before, after_script, was_enabled = map(int, sys.argv[1])
    if before:
        gc.freeze()
    if not was_enabled:
        gc.disable()
    made, frozen = Large(), gc.get_freeze_count()
    try:
        with exempt_from_gc(after_script=bool(after_script)):
            1 / gc.isenabled()
    except ZeroDivisionError:
        pass
    assert gc.isenabled() == was_enabled
    made = weakref.ref(made)
    gc.collect()
    print(made() is None, (gc.get_freeze_count() - frozen) // 1000 > 0)
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("000", "False True"),
        ("001", "False True"),
        ("010", "True False"),
        ("011", "True False"),
        ("110", "True False"),
        ("111", "True False"),
    ],
)
def test_objects_of_a_script_are_freed_once_they_are_garbage(
    tmp_path: Path, case: str, said: str
) -> None:
    """Deleting a model and collecting frees its memory; only modules that ddpsafe loaded stay."""
    assert scripts.run(tmp_path, PROGRAM, case, fresh=True).lines() == [said]
