"""The private names of the standard library still mean what ddpsafe expects."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sched
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import FrameType

import scripts

from ddpsafe import _stdlib_private

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


def test_the_folder_of_helpers_is_found_once_it_exists(tmp_path: Path) -> None:
    """Asking for it does not create it, and a forked process does not own its parent's."""
    source = """
        import os
        from multiprocessing import util
        from ddpsafe._stdlib_private import helpers_folder
        print(helpers_folder())
        made = util.get_temp_dir()
        print(str(helpers_folder()) == made, flush=True)
        if os.fork() == 0:
            print(helpers_folder(), flush=True)
            os._exit(0)
        os.wait()
    """
    assert scripts.run(tmp_path, source).lines() == ["None", "True", "None"]


def test_the_names_of_semaphores_are_found(tmp_path: Path) -> None:
    """That includes those of queues. It runs in a script because joblib replaces the names."""
    source = """
        import multiprocessing
        from ddpsafe._stdlib_private import name_semaphores
        name_semaphores("/ddpsafe-test")
        print(multiprocessing.get_context("spawn").Lock()._semlock.name)
    """
    (name,) = scripts.run(tmp_path, source).lines()
    assert name.startswith("/ddpsafe-test-")


def test_a_forgotten_child_is_not_joined_at_exit(tmp_path: Path) -> None:
    """The script exits while the child sleeps."""
    source = """
        import multiprocessing, time
        from ddpsafe._stdlib_private import forget_child
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
        child.start()
        forget_child(child)
        print(child.pid, multiprocessing.active_children())
    """
    # Otherwise the child would hold the pipe from which the test reads the output.
    out = tmp_path / "out"
    with out.open("wb") as file, Path("/dev/null").open("rb") as nothing:
        path = scripts.write(tmp_path, "script.py", source)
        streams = [nothing.fileno(), file.fileno(), file.fileno()]
        process = scripts.start([str(path)], folder=tmp_path, streams=streams)
    assert process.wait(scripts.LIMIT_S) == 0
    pid, children = out.read_text().split(maxsplit=1)
    os.kill(int(pid), signal.SIGKILL)
    assert children == "[]\n"


def test_a_rank_exits_as_the_interpreter_does(tmp_path: Path) -> None:
    """Threads are joined, and then exit handlers run."""
    source = """
        import atexit, os, threading, time
        from ddpsafe._stdlib_private import end_as_interpreter
        atexit.register(print, "at exit", flush=True)
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread", flush=True))).start()
        end_as_interpreter()
        os._exit(0)
    """
    assert scripts.run(tmp_path, source).lines() == ["thread", "at exit"]


def test_a_process_can_tell_that_it_is_importing_its_parents_script(tmp_path: Path) -> None:
    """It can do so during the import only."""
    source = """
        import multiprocessing
        from ddpsafe._stdlib_private import is_importing_main
        print(__name__, is_importing_main(), flush=True)
        def work():
            print(is_importing_main(), flush=True)
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=work)
            child.start()
            child.join()
    """
    assert scripts.run(tmp_path, source).lines() == ["__main__ False", "__mp_main__ True", "False"]


def test_executors_and_pools_are_recognized_by_their_threads_and_processes() -> None:
    """A fork would lose the threads, or share the processes."""
    with ThreadPoolExecutor(1) as threads:
        assert not _stdlib_private.has_started(threads)
        threads.submit(int).result()
        assert _stdlib_private.has_started(threads)
    assert not _stdlib_private.has_started(threads)
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes:
        assert not _stdlib_private.has_started(processes)
        processes.submit(time.time).result()
        assert _stdlib_private.has_started(processes)
    with SPAWN.Pool(1) as pool:
        assert _stdlib_private.is_fed(pool)
    pool.join()
    assert not _stdlib_private.is_fed(pool)


def _frame_of(thread: threading.Thread) -> FrameType:
    return sys._current_frames()[thread.ident or 0]


def test_a_loop_a_scheduler_and_an_executor_with_work_will_call_back() -> None:
    """Without work they only wait, as fsspec's loop does in many healthy jobs."""
    has_work = _stdlib_private.will_call_back
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    scripts.wait_until(lambda: not has_work(_frame_of(thread)))
    later = asyncio.run_coroutine_threadsafe(asyncio.sleep(3_600), loop)
    scripts.wait_until(lambda: has_work(_frame_of(thread)))
    later.cancel()
    scripts.wait_until(lambda: not has_work(_frame_of(thread)))
    loop.call_soon_threadsafe(loop.call_later, 3_600, int)
    scripts.wait_until(lambda: has_work(_frame_of(thread)))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes:
        processes.submit(int).result()
        manager = next(each for each in threading.enumerate() if "Executor" in type(each).__name__)
        scripts.wait_until(lambda: not has_work(_frame_of(manager)))
        future = processes.submit(time.sleep, 0.5)
        assert has_work(_frame_of(manager)) or future.done()
    with ThreadPool(1) as pool:
        pool.apply(int)
        handlers = [each for each in threading.enumerate() if "_handle_" in str(each)]
        scripts.wait_until(lambda: not any(has_work(_frame_of(each)) for each in handlers))
        pool.apply_async((release := threading.Event()).wait)
        assert any(has_work(_frame_of(each)) for each in handlers)
        release.set()
    release = threading.Event()
    scheduler = sched.scheduler(delayfunc=lambda _: release.wait())
    event = scheduler.enter(3_600, 1, int)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    scripts.wait_until(lambda: has_work(_frame_of(thread)))
    scheduler.cancel(event)
    release.set()
    thread.join()
    thread = threading.Thread(target=(lock := threading.Lock()).acquire, daemon=True)
    lock.acquire()
    thread.start()
    scripts.wait_until(lambda: has_work(_frame_of(thread)))
    lock.release()
    thread.join()
    assert not has_work(sys._getframe())


def test_locks_made_for_forks_are_recognized() -> None:
    """A lock has the start method for which it was made; other objects do not."""
    assert _stdlib_private.serves_forks(FORK.Lock())
    assert not _stdlib_private.serves_forks(SPAWN.Lock())
    assert not _stdlib_private.serves_forks(sys)


def test_the_options_of_a_parser_are_found() -> None:
    """Every spelling is needed to suggest a correction for a misspelled option."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--one", "-o")
    parser.add_argument("--two", action="store_true")
    assert _stdlib_private.options_of(parser) == ["--one", "-o", "--two"]
