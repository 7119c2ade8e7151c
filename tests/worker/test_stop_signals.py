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
        from ddpsafe._worker.stop_signals import StopSignals

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


OWNER = """
    import multiprocessing, os, signal, subprocess, sys, time
    from multiprocessing.connection import wait
    from ddpsafe._worker.stop_signals import StopSignals, prepare_helpers

    def sleep(pipe):
        pipe.send("up")
        time.sleep(600)

    def handle(pipe):
        def leave(*_):
            time.sleep(0.2)
            sys.exit(7)
        signal.signal(signal.SIGTERM, leave)
        sleep(pipe)


    def lock_up(pipe):
        import ctypes
        pipe.send("up")
        # As a library that another thread had locked at the fork: no signal interrupts this wait.
        lock = ctypes.create_string_buffer(64)
        libc = ctypes.PyDLL(None)
        libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_lock(lock)

    def end_locked(child):
        while "futex" not in open(f"/proc/{child.pid}/wchan").read():
            time.sleep(0.01)
        return end(child)

    def start_program(pipe):
        program = subprocess.Popen(["sleep", "600"])
        os.kill(program.pid, signal.SIGTERM)
        pipe.send(program.wait())
        time.sleep(600)

    def start(method, function):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=function, args=[theirs], daemon=True)
        child.start()
        return child, ours.recv()

    def end(child):
        child.terminate()
        child.join()
        return child.exitcode
"""
"""The beginning of a script whose process starts helpers as a rank does."""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_helper_outlives_the_signals_that_its_owner_outlives(tmp_path: Path, method: str) -> None:
    """It dies of them while its owner would, and of its owner's ``terminate()`` at any time."""
    source = f"""{OWNER}
    if __name__ == "__main__":
        prepare_helpers()
        child, _ = start("{method}", sleep)
        os.kill(child.pid, signal.SIGUSR1)
        child.join()
        print(child.exitcode)
        child, _ = start("{method}", sleep)
        signals = StopSignals()
        signals.open()
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(child.pid, signum)
        child.join(0.3)
        print(child.exitcode, end(child))
        child, _ = start("{method}", sleep)
        os.kill(child.pid, signal.SIGTERM)
        child.join(0.3)
        print(child.exitcode, end(child))
    """
    assert scripts.run(tmp_path, source).lines() == ["-10", "None -15", "None -15"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_terminate_means_what_it_means_without_ddpsafe(tmp_path: Path, method: str) -> None:
    """A handler of the script's decides; a helper that runs no Python code ends; a program is left alone."""
    source = f"""{OWNER}
    if __name__ == "__main__":
        prepare_helpers()
        signals = StopSignals()
        signals.open()
        print(end(start("{method}", handle)[0]))
        print(end_locked(start("{method}", lock_up)[0]))
        print(start("{method}", start_program)[1])
    """
    assert scripts.run(tmp_path, source).lines() == ["7", "-9", "-15"]


def test_a_pool_can_be_left_while_its_workers_wait_for_work(tmp_path: Path) -> None:
    """``Pool.terminate()`` ends workers that hold the signals of a stop."""
    source = f"""{OWNER}
    if __name__ == "__main__":
        prepare_helpers()
        signals = StopSignals()
        signals.open()
        for _ in range(5):
            with multiprocessing.get_context("fork").Pool(3) as pool:
                print(pool.map(abs, [-1, 2]))
    """
    assert scripts.run(tmp_path, source).lines() == ["[1, 2]"] * 5
