"""The private names of the standard library and of torch still mean what ddpsafe expects."""

from __future__ import annotations

import argparse
import asyncio
import importlib
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
from typing import Any

import pytest
import scripts
import torch
from torch.nn import Linear
from torch.utils.data import DataLoader

from ddpsafe import _stdlib_private, _torch_private
from ddpsafe._worker import torch_hooks

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


def test_an_iterator_of_the_loader_knows_its_workers() -> None:
    """Its processes, the batch that it waits for, its limit, whether it keeps them, and their end."""
    loader = DataLoader(
        range(4),  # type: ignore[arg-type]  # it is one, without torch's class
        num_workers=1,
        timeout=60,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    (worker,) = _torch_private.workers_of(iterator)
    assert worker.is_alive()
    assert _torch_private.keeps_workers(iterator)
    assert _torch_private.is_expected(iterator, 0)
    assert iterator._workers_status == [True]  # type: ignore[attr-defined]
    assert _torch_private.worker_limit_s(iterator) == 60
    assert _torch_private.find_awaited_worker(iterator) == 0
    _torch_private.end_of_workers(iterator)()
    assert not worker.is_alive()
    assert list(_torch_private.workers_of(iter(DataLoader([1])))) == []  # type: ignore[arg-type]


def test_parts_of_tensors_and_models_are_found() -> None:
    """What is read of tensors, and of a model's state."""
    model = Linear(2, 2)
    before = _torch_private.changes_of(model.weight)
    with torch.no_grad():
        model.weight.add_(1)
    assert _torch_private.changes_of(model.weight) > before
    assert _torch_private.uncompiled(model) is None
    state = model.state_dict()
    assert _torch_private.module_versions(state)
    indices, values = _torch_private.sparse_parts(torch.eye(3).to_sparse_coo())
    assert indices.shape == (2, 3)
    assert values.tolist() == [1, 1, 1]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is:DeprecationWarning")
def test_the_model_inside_a_compiled_one_is_found() -> None:
    """To compile, torch imports for seconds."""
    model = Linear(2, 2)
    compiled: Any = torch.compile(model)
    assert _torch_private.uncompiled(compiled) is model


def test_modules_and_tables_of_torch_have_their_names() -> None:
    """What `torch_hooks` looks for in this version of torch."""
    importlib.import_module("torch.distributed")
    assert callable(
        importlib.import_module(_torch_private.WORKER_SIGNALS)._set_worker_signal_handlers
    )
    assert importlib.util.find_spec(_torch_private.COMPILER) is not None
    assert callable(torch.UntypedStorage._share_filename_cpu_)
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # type: ignore[attr-defined]
    assert set(torch_hooks._SCHEMES) <= handlers.keys()
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    assert callable(c10d._get_default_store)
    for table in ("pg_map", "pg_names", "pg_group_ranks", "default_pg"):
        assert hasattr(c10d._world, table)
    for name in torch_hooks._WAITING_FUNCTIONS:
        assert callable(getattr(c10d, name))
    DistributedDataParallel = sys.modules["torch.nn.parallel"].DistributedDataParallel  # noqa: N806
    assert {"Joinable", "__init__"} <= set(DistributedDataParallel.__init__.__code__.co_names)
