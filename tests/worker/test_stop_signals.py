"""The handlers that record a stop request, combined with those of the script."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import scripts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("fork", [False, True])
def test_a_chained_handler_ends_the_process_after_ddpsafe_is_closed(
    tmp_path: Path, *, fork: bool
) -> None:
    """A script's handler that calls the previous one, as it should, reaches the original handler."""
    source = f"""
        import os, signal, sys
        from ddpsafe._worker.stop_agreement import StopSignals

        signals = StopSignals()
        signals.open()
        noting = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *received: noting(*received))
        signals.close()
        if {fork} and (pid := os.fork()):
            _, status = os.waitpid(pid, 0)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here")
    """
    run = scripts.run(tmp_path, source)
    assert (run.code, run.out, run.err) == (-signal.SIGTERM, "", "")
