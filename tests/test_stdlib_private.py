"""Private names of the standard library and of torch whose meaning no test of a promise shows."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import sched
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool
from types import FrameType

import scripts
import torch
from torch.utils.data import DataLoader

from ddpsafe import _stdlib_private, _torch_private
from ddpsafe._worker import torch_hooks

SPAWN = multiprocessing.get_context("spawn")


def test_an_executor_of_processes_has_started_once_it_has_work() -> None:
    """A fork would share the processes; `test_worker_kinds` has threads and pools."""
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes:
        assert not _stdlib_private.has_started(processes)
        processes.submit(time.time).result()
        assert _stdlib_private.has_started(processes)


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


def test_the_workers_of_an_iterator_can_be_ended() -> None:
    """By torch's own end of an iteration, while it still waits for them."""
    iterator = iter(DataLoader(range(4), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]  # it is one, without torch's class
    (worker,) = _torch_private.workers_of(iterator)
    assert _torch_private.is_expected(iterator, 0)
    _torch_private.end_of_workers(iterator)()
    assert not worker.is_alive()


def test_parts_of_sparse_tensors_and_versions_of_modules_are_found() -> None:
    """What torch keeps in a tensor that is not coalesced, and beside the tensors of a model's state."""
    indices, values = _torch_private.sparse_parts(torch.eye(3).to_sparse_coo())
    assert (indices.shape, values.tolist()) == ((2, 3), [1, 1, 1])
    assert _torch_private.module_versions(torch.nn.Linear(2, 2).state_dict())


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
