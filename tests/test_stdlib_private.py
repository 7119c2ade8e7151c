"""The private names of the standard library still are what ddpsafe takes them for."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import scripts

from ddpsafe import _stdlib_private

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


def test_the_folder_of_helpers_is_known_once_it_is_there(tmp_path: Path) -> None:
    """And asking for it makes none. A process that is forked does not own that of its parent."""
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


def test_semaphores_are_named(tmp_path: Path) -> None:
    """Those of queues too, which are made of locks. In a script: joblib gives names of its own."""
    source = """
        import multiprocessing
        from ddpsafe._stdlib_private import name_semaphores
        name_semaphores("/ddpsafe-test")
        print(multiprocessing.get_context("spawn").Lock()._semlock.name)
    """
    (name,) = scripts.run(tmp_path, source).lines()
    assert name.startswith("/ddpsafe-test-")


def test_a_child_that_is_forgotten_is_not_joined_at_the_exit(tmp_path: Path) -> None:
    """The script ends while it sleeps."""
    source = """
        import multiprocessing, time
        from ddpsafe._stdlib_private import forget_child
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
        child.start()
        forget_child(child)
        print(child.pid, multiprocessing.active_children())
    """
    # It would hold the pipe of a script whose output is awaited.
    out = tmp_path / "out"
    with out.open("wb") as file, Path("/dev/null").open("rb") as nothing:
        path = scripts.write(tmp_path, "script.py", source)
        streams = [nothing.fileno(), file.fileno(), file.fileno()]
        process = scripts.start([str(path)], folder=tmp_path, streams=streams)
    assert process.wait(60) == 0
    pid, children = out.read_text().split(maxsplit=1)
    os.kill(int(pid), signal.SIGKILL)
    assert children == "[]\n"


def test_a_rank_ends_as_the_interpreter_does(tmp_path: Path) -> None:
    """Threads are joined, then what is registered for the exit runs."""
    source = """
        import atexit, os, threading, time
        from ddpsafe._stdlib_private import end_as_interpreter
        atexit.register(print, "at exit", flush=True)
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread", flush=True))).start()
        end_as_interpreter()
        os._exit(0)
    """
    assert scripts.run(tmp_path, source).lines() == ["thread", "at exit"]


def test_who_imports_the_main_script_of_its_parent_knows(tmp_path: Path) -> None:
    """At the import, and not later."""
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


def test_executors_and_pools_are_told_by_what_they_have_started() -> None:
    """A fork would lose their threads, or share their processes."""
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


def test_what_serves_forks_is_told_from_what_travels() -> None:
    """A lock says how it was made; everything else does not."""
    assert _stdlib_private.serves_forks(FORK.Lock())
    assert not _stdlib_private.serves_forks(SPAWN.Lock())
    assert not _stdlib_private.serves_forks(sys)


def test_options_of_a_parser_are_known() -> None:
    """In every spelling, for a suggestion where one is misspelled."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--one", "-o")
    parser.add_argument("--two", action="store_true")
    assert _stdlib_private.options_of(parser) == ["--one", "-o", "--two"]
