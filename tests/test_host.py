"""A process ends as a signal ends it, and addresses that lead only to this host are known."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

import pytest
import scripts

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
        ("localhost.", True),
        ("ip6-localhost", True),
        ("gpu-01.localhost", True),
        ("gpu-01", False),
        ("", False),
    ],
)
def test_a_loopback_address_is_known_in_each_spelling(address: str, *, is_loop: bool) -> None:
    """Python 3.13 knows that of IPv4 in IPv6 by itself, earlier versions do not."""
    assert is_loopback(address) == is_loop
