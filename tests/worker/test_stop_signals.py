"""The handlers that record a stop request, combined with those of the script."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import scripts

from ddpsafe._worker import stop_signals


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

    def wait_until_in(call, child):
        while call not in open(f"/proc/{child.pid}/wchan").read():
            time.sleep(0.01)

    def end_locked(child):
        wait_until_in("futex", child)
        return end(child)

    def start_sleeper(method):
        # A signal that comes just before the call to sleep has its handler run after the call.
        child, _ = start(method, sleep)
        wait_until_in("nanosleep" if sys.version_info >= (3, 11) else "poll", child)  # or in select()
        return child

    def start_program(pipe):
        program = subprocess.Popen(["sleep", "600"])
        os.kill(program.pid, signal.SIGTERM)
        pipe.send(program.wait())
        time.sleep(600)

    def start(method, function, daemon=True):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=function, args=[theirs], daemon=daemon)
        child.start()
        return child, ours.recv()

    # As a scheduler sends a signal. A program would do so while subprocess still blocks all signals here.
    send = os.kill

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
        child = start_sleeper("{method}")
        send(child.pid, signal.SIGUSR1)
        child.join()
        print(child.exitcode)
        child = start_sleeper("{method}")
        signals = StopSignals()
        signals.open()
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            send(child.pid, signum)
        child.join(0.3)
        print(child.exitcode, end(child))
        child = start_sleeper("{method}")
        send(child.pid, signal.SIGTERM)
        child.join(0.3)
        print(child.exitcode, end(child))
    """
    assert scripts.run(tmp_path, source).lines() == ["-10", "None -15", "None -15"]


BY_THE_OWNER = """
    import concurrent.futures, psutil

    def by_kill(pid):
        os.kill(pid, signal.SIGTERM)

    def by_psutil(pid):
        psutil.Process(pid).terminate()

    def by_handler(pid):
        signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGTERM))
        signal.raise_signal(signal.SIGALRM)

    def start_another(pipe):
        grandchild, _ = start("fork", sleep)
        pipe.send(grandchild.pid)
        grandchild.join()
        sys.exit(-grandchild.exitcode)

    if __name__ == "__main__":
        method = "{method}"
        prepare_helpers()
        signals = StopSignals()
        signals.open()
        for way in (by_kill, by_psutil, by_handler):
            child, _ = start(method, sleep)
            way(child.pid)
            child.join()
            print(child.exitcode)
        child, grandchild = start(method, start_another, daemon=False)
        by_kill(grandchild)
        child.join()
        print(child.exitcode)
        executor = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method))
        pid = executor.submit(os.getpid).result()
        by_kill(pid)
        try:
            executor.submit(os.getpid).result()
        except concurrent.futures.process.BrokenProcessPool:
            print("broken")
        executor.shutdown()
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        print(program.wait())
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_helper_that_its_owner_sends_sigterm_ends_at_once(tmp_path: Path, method: str) -> None:
    """In whatever way the owner sends it, while it would itself outlive the signal."""
    run = scripts.run(tmp_path, OWNER + BY_THE_OWNER.replace("{method}", method))
    assert run.lines() == ["-15", "-15", "-15", "15", "broken", "-15"]


def test_no_process_but_a_descendant_is_sent_more_than_asked(tmp_path: Path) -> None:
    """For the first process of a machine, the additional signal means a reboot."""
    source = f"""{OWNER}
    def leave_orphan(pipe):
        pid = os.fork()
        if pid:
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(stop_signals.END, lambda *_: pipe.send("END"))
        os.setsid()
        pipe.send(os.getpid())
        time.sleep(600)

    if __name__ == "__main__":
        from ddpsafe._worker import stop_signals
        prepare_helpers()
        ours, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            leave_orphan(theirs)
        os.wait()
        orphan = ours.recv()
        os.kill(orphan, signal.SIGTERM)
        print(stop_signals._is_below(orphan), stop_signals._is_below(1), ours.poll(0.5))
        os.kill(orphan, signal.SIGKILL)
    """
    assert scripts.run(tmp_path, source).lines() == ["False False False"]


@pytest.mark.full(but=["fork"])
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


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_helper_has_the_signals_blocked_that_its_owner_had_blocked(
    tmp_path: Path, method: str
) -> None:
    """A program may take SIGUSR1 in `sigwait`, and counts on its children having it blocked."""
    source = f"""{OWNER}
    def show():
        print([each.name for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])], flush=True)

    if __name__ == "__main__":
        prepare_helpers()
        for blocked in ([], [signal.SIGUSR1]):
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            child = multiprocessing.get_context("{method}").Process(target=show)
            child.start()
            child.join()
    """
    assert scripts.run(tmp_path, source).lines() == ["[]", "['SIGUSR1']"]


@pytest.mark.full(but=["forkserver"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_rank_that_a_rank_starts_is_no_helper(tmp_path: Path, method: str) -> None:
    """Its launcher ends it by SIGTERM, whatever the signal does to the launcher; its own children are."""
    source = f"""{OWNER}
    from ddpsafe._stdlib_private import withhold_from_child
    from ddpsafe._wire.spec import HELPER

    def show(name):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        print(name, signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, len(blocked), flush=True)

    def rank(name):
        show(name)
        prepare_helpers()
        child = multiprocessing.get_context("{method}").Process(target=show, args=["its helper"])
        child.start()
        child.join()

    if __name__ == "__main__":
        prepare_helpers()
        context = multiprocessing.get_context("{method}")
        for target, name in ((show, "helper"), (rank, "rank")):
            child = context.Process(target=target, args=[name])
            if name == "rank":
                withhold_from_child(child, HELPER)
            child.start()
            child.join()
    """
    run = scripts.run(tmp_path, source)
    assert run.lines() == ["helper True 0", "rank False 0", "its helper True 0"]


def test_terminate_needs_no_thread() -> None:
    """At the limit of threads, and while the interpreter ends, none can be started."""
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(stop_signals.END, lambda *_: os._exit(7))
        os.write(say_ready, b"x")
        while True:
            signal.pause()
    os.read(ready, 1)
    files = Path("/proc/self/fd")
    gc.collect()  # files of earlier tests
    before = len([*files.iterdir()])
    size = threading.stack_size(1 << 47)  # more than there are addresses
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=int).start()
        stop_signals._end_helper(pid)
    finally:
        threading.stack_size(size)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert len([*files.iterdir()]) <= before
    os.close(ready)
    os.close(say_ready)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_first_process_of_a_container_ends_by_sigterm_too(tmp_path: Path) -> None:
    """The default action of a signal has no effect there."""
    source = """
        import time
        from ddpsafe._worker.stop_signals import StopSignals
        signals = StopSignals()
        signals.open()
        signals.die_of_sigterm()
        time.sleep(600)
    """
    path = scripts.write(tmp_path, "script.py", source)
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, str(path)]
    assert (
        subprocess.run(command, check=False, timeout=scripts.LIMIT_S).returncode
        == 128 + signal.SIGTERM
    )


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_rank_of_a_launch_within_a_rank_dies_of_sigterm(tmp_path: Path, method: str) -> None:
    """The outer rank outlives SIGTERM, and that is nothing to the ranks that it has launched."""
    source = f"""
        import os, signal
        import ddpsafe

        def inner(ctx):
            print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)

        def outer(ctx):
            environment = ddpsafe.clean_environment()
            os.environ.clear()
            os.environ.update(environment)
            ddpsafe.launch(inner, nproc_per_node=1, start_method="{method}")

        if __name__ == "__main__":
            ddpsafe.launch(outer, nproc_per_node=1, start_method="{method}")
    """
    assert scripts.run(tmp_path, source).lines() == ["True"]
