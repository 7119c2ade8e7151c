"""Scripts that clean up, wait or train while they handle an error, and errors that hide another rank's."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist
from exception_programs import LostSampleError, raise_own_error
from hang_programs import FOREVER_S, count_reads, sleep
from training_programs import FAULT_STEP, STEPS, Fault, average_gradients, cleanup, mark, setup

import ddpsafe
from ddpsafe import RankContext


def tidy_up(rank: int, world_size: int, folder: Path, how: str) -> None:
    """Destroy the group in ``finally``, as the official tutorial does, with more around it or not."""
    (ddpsafe.setup if how == "our cleanup" else setup)(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    finally:
        if how == "barrier and destroy":
            dist.barrier()
        (ddpsafe.cleanup if how == "our cleanup" else cleanup)()
        if how == "another group":  # although no other rank makes one
            setup(rank, world_size)


def tidy_up_with_barrier(rank: int, world_size: int, folder: Path) -> None:
    """Enter a barrier in ``except`` although the others wait elsewhere."""
    setup(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    except Exception:
        dist.barrier()
        raise
    finally:
        cleanup()


def tidy_up_with_our_barrier(ctx: RankContext, folder: Path) -> None:
    """Wait for the others at a barrier of ddpsafe in ``finally``."""
    try:
        _train_and_fail(ctx.rank, folder)
    finally:
        ctx.barrier("the end")


def swallow_and_go_on(rank: int, world_size: int, folder: Path) -> None:
    """Log the error and continue, as ``except Exception: print`` does; the rank is then behind."""
    setup(rank, world_size)
    for step in range(STEPS):
        with contextlib.suppress(LostSampleError):
            if rank == 1 and step == FAULT_STEP:
                mark(folder)
                raise_own_error(folder)
            average_gradients()
    cleanup()


def _train_and_fail(rank: int, folder: Path) -> None:
    for step in range(STEPS):
        if rank == 1 and step == FAULT_STEP:
            mark(folder)
            raise_own_error(folder)
        average_gradients()


# Errors that are handled.


def recover_together(ctx: RankContext, folder: Path) -> str:
    """Handle the same error on all ranks with a barrier in the `except` block; one rank is late."""
    for late in range(2):
        _recover(ctx, folder, late)
    return "recovered"


def _recover(ctx: RankContext, folder: Path, late: int) -> None:
    try:
        (folder / "no-checkpoint").read_text()
    except FileNotFoundError:
        if ctx.rank == late:
            time.sleep(1)
        dist.barrier()
        ctx.barrier("all have recovered")
        if ctx.rank == 1 - late:
            time.sleep(1)
        average_gradients()


def start_anew_with_another_group(
    rank: int, world_size: int, folder: Path, where: str, late_s: float
) -> None:
    """Handle the same error on all ranks with another group; rank 0 is late there."""
    _handle_with_destroy(
        rank, world_size, folder, where, lambda: _meet_late(rank, world_size, late_s)
    )


def _handle_with_destroy(
    rank: int, world_size: int, folder: Path, where: str, go_on: Callable[[], object]
) -> None:
    """Handle an error by destroying the group; continue inside the `except` block or after it."""
    setup(rank, world_size)
    try:
        raise_own_error(folder)
    except LostSampleError:
        cleanup()
        if where == "inside":
            go_on()
    if where == "after":
        go_on()


def _meet_late(rank: int, world_size: int, late_s: float) -> None:
    setup(rank, world_size)
    average_gradients()
    if rank == 0:
        time.sleep(late_s)
    average_gradients()


def fail_beside_a_rank_that_steps(
    rank: int, world_size: int, folder: Path, optimizer: Any, where: str
) -> None:
    """Handle an error on all ranks by destroying the group; rank 0 trains, then rank 1 fails."""
    _handle_with_destroy(rank, world_size, folder, where, optimizer.step)
    (folder / f"stepped-{rank}").touch()
    if rank != 1:
        sleep(folder)
    scripts.wait_until((folder / "stepped-0").exists)
    mark(folder)
    raise_own_error(folder)


def fail_beside_a_handled_error(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 fail while rank 0 waits for it inside an `except` block."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        average_gradients()
        if ctx.rank == 1:
            time.sleep(0.2)
            mark(folder)
            raise_own_error(folder)
        ctx.barrier("never")


def run_inside_an_except_block(rank: int, world_size: int, folder: Path) -> None:
    """Run a script whose main function is called in an `except` block."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        ddpsafe.setup(rank, world_size)
        average_gradients()
        ddpsafe.cleanup()
        (folder / f"closed-{rank}").write_text(str(not dist.is_initialized()))


def count_reads_at_an_error(_ctx: RankContext, folder: Path, takes_s: float) -> int:
    """Handle an error slowly; return how often the rank was asked for its position."""
    try:
        raise_own_error(folder)
    except LostSampleError:
        cleanup()
        return count_reads(lambda: time.sleep(takes_s))


def hang_in_finally(folder: Path) -> None:
    """Clean up slowly with an exception in flight, as an upload of logs does."""
    try:
        raise_own_error(folder)
    finally:
        time.sleep(FOREVER_S)


def hang_in_an_except_block_that_raises(folder: Path) -> None:
    """Do the same in an ``except`` that raises again."""
    try:
        raise_own_error(folder)
    except LostSampleError:
        time.sleep(FOREVER_S)
        raise


def hang_while_a_cleanup_tries_again(folder: Path) -> None:
    """Clean up with an exception in flight by a call that fails and is retried."""
    try:
        raise_own_error(folder)
    finally:
        _upload(lambda: time.sleep(FOREVER_S))


def _upload(wait: Callable[[], object]) -> None:
    try:
        raise ConnectionResetError  # noqa: TRY301 - stands for a call that fails
    except ConnectionResetError:
        wait()


@contextlib.contextmanager
def _slowly_closed() -> Iterator[None]:
    try:
        yield
    finally:
        time.sleep(FOREVER_S)


def hang_at_the_end_of_a_with_block(folder: Path) -> None:
    """Do the same in the ``__exit__`` of a context manager."""
    with _slowly_closed():
        raise_own_error(folder)


def hang_in_an_except_block_that_goes_on(folder: Path) -> None:
    """Work where an expected error is handled, as a rank does that builds a missing cache."""
    try:
        raise_own_error(folder)
    except LostSampleError:
        time.sleep(FOREVER_S)


class _SlowTextError(Exception):
    """An exception whose text takes long."""

    def __str__(self) -> str:
        """Hang, as a text that is requested from a server would."""
        time.sleep(FOREVER_S)
        return "never"


def hang_with_an_error_that_cannot_be_described(_folder: Path) -> None:
    """Hang with an exception in flight whose text hangs, too."""
    try:
        raise _SlowTextError
    finally:
        time.sleep(FOREVER_S)


def _fail() -> None:
    raise LostSampleError("lost", 7)


def _translate() -> None:
    try:
        _fail()
    except LostSampleError:
        raise ConnectionResetError from None


class _Uploading:
    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        _upload(self._look)


def _generate(look: Callable[[], object]) -> Generator[int, None, None]:
    try:
        yield 1
    finally:
        look()


def _begun(look: Callable[[], object]) -> Generator[int, None, None]:
    generator = _generate(look)
    next(generator)
    return generator


def leave_by_finally(look: Callable[[], object]) -> None:
    """Look in a function called from a ``finally`` with the error in flight."""
    try:
        _fail()
    finally:
        _upload(look)


def leave_by_finally_itself(look: Callable[[], object]) -> None:
    """Look where another error is handled in the same function."""
    try:
        _fail()
    finally:
        try:
            _translate()
        except ConnectionResetError:
            look()


def leave_by_with(look: Callable[[], object]) -> None:
    """Look at the end of a ``with`` that handles another error."""
    with _Uploading(look):
        _fail()


def leave_by_except(look: Callable[[], object]) -> None:
    """Look in an ``except`` block that raises again, where another error is handled."""
    try:
        _fail()
    except LostSampleError:
        _upload(look)
        raise


def leave_with_a_generator(look: Callable[[], object]) -> None:
    """Look in a generator that is closed while the error is in flight."""
    generator = _begun(look)
    try:
        _fail()
    finally:
        generator.close()


def close_a_generator(look: Callable[[], object]) -> None:
    """Look in a generator that is closed normally."""
    _begun(look).close()


def handle(look: Callable[[], object]) -> None:
    """Look where the error is handled, and then another one."""
    try:
        _fail()
    except LostSampleError:
        _upload(look)


def handle_in_a_generator(look: Callable[[], object]) -> None:
    """Look in a generator that is closed where the error is handled."""
    generator = _begun(look)
    try:
        _fail()
    except LostSampleError:
        generator.close()


def handle_what_it_became(look: Callable[[], object]) -> None:
    """Look where the error has been translated into another, which is handled."""
    try:
        _translate()
    except ConnectionResetError:
        look()


def handle_what_it_became_here(look: Callable[[], object]) -> None:
    """Do the same in the function that translates it."""
    try:
        try:
            _fail()
        except LostSampleError:
            raise ConnectionResetError from None
    except ConnectionResetError:
        look()


# Errors that wrap, hide or resemble another rank's failure.


def exit_with_one() -> None:
    """Exit as ``except Exception: sys.exit(1)`` does."""
    sys.exit(1)


def let_through() -> None:
    """Raise it again."""
    raise  # noqa: PLE0704 - called in an except block


def train_in_try(
    ctx: RankContext, folder: Path, fault: Fault, handle: Callable[[], object]
) -> None:
    """Train; rank 1 meets the fault, and all ranks handle the resulting error in the same way."""
    try:
        for step in range(STEPS):
            if step == FAULT_STEP and ctx.rank == 1:
                mark(folder)
                fault(folder)
            average_gradients()
    except Exception:  # noqa: BLE001 - as it is often written
        handle()


def train_in_an_except_block(ctx: RankContext, folder: Path, fault: Fault) -> None:
    """Do the same while an expected error is being handled."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        for step in range(STEPS):
            if step == FAULT_STEP and ctx.rank == 1:
                mark(folder)
                fault(folder)
            ctx.all_gather(step) if step > FAULT_STEP else average_gradients()


def be_slow_in_an_except_block(ctx: RankContext, meet: Callable[[RankContext], object]) -> str:
    """Handle an expected error with a collective that some ranks enter late; all succeed."""
    average_gradients()
    if ctx.rank == 2:
        time.sleep(2)
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        meet(ctx)
    average_gradients()
    return "well"


def scatter(ctx: RankContext) -> None:
    """Scatter parts whose sizes only the source knows."""
    out: list[object] = [None]
    dist.scatter_object_list(out, list(range(ctx.world_size)) if ctx.rank == 0 else None, src=0)


def gather_in_a_subgroup(ctx: RankContext) -> None:
    """Gather among the last two ranks while the first one continues."""
    group = dist.new_group([1, 2])
    if ctx.rank == 2:
        time.sleep(2)
    if ctx.rank > 0:
        dist.all_gather_object([None, None], ctx.rank, group=group)


def count_reads_of_meetings(ctx: RankContext, _folder: Path) -> int:
    """Make collectives while an error is being handled; return how often the rank was asked."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        return count_reads(lambda: [ctx.all_gather(step) for step in range(20)])
    return -1


def average_other_metrics_in_finally(ctx: RankContext, folder: Path) -> None:
    """Fail on rank 1, whose `finally` averages different metrics than the others' step."""
    if ctx.rank != 1:
        ctx.reduce_mean({"loss": 1.0})
        return
    try:
        mark(folder)
        raise_own_error(folder)
    finally:
        ctx.reduce_mean({"final": 1.0})


def be_killed_in_an_except_block(ctx: RankContext, folder: Path) -> None:
    """Kill rank 1 while it waits for the others and handles an expected error."""
    average_gradients()
    if ctx.rank != 1:
        time.sleep(1)
        average_gradients()
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        threading.Timer(0.3, _kill, args=(folder,)).start()
        ctx.all_gather(ctx.rank)


def _kill(folder: Path) -> None:
    mark(folder)
    os.kill(os.getpid(), 9)


def fail_in_the_handler(_folder: Path) -> None:
    """Handle a timeout of its own, for a key that was never set, and fail in its handler."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        store.wait(["warm"], timedelta(seconds=0.2))
    except dist.DistError:
        _ = {}["label"]


def fail_inside_the_model(ctx: RankContext, folder: Path) -> None:
    """Fail on rank 1 in the forward pass, which DDP calls."""

    def serve(*_: object) -> None:
        if ctx.rank == 1:
            mark(folder)
            message = "feature server [10.0.0.5]:443: Socket Timeout"
            raise RuntimeError(message)

    model = torch.nn.Linear(1, 1)
    model.register_forward_pre_hook(serve)
    ctx.wrap(model)(torch.ones(1)).backward()


def meet_in_finally(ctx: RankContext, folder: Path, meet: Callable[[RankContext], object]) -> None:
    """Make a collective in `finally` on all ranks, even if rank 1 has failed and the others train."""
    try:
        for step in range(STEPS):
            if step == FAULT_STEP and ctx.rank == 1:
                mark(folder)
                raise_own_error(folder)
            average_gradients()
    finally:
        meet(ctx)


def gather(ctx: RankContext) -> None:
    """Gather metrics."""
    ctx.all_gather({"rank": ctx.rank})


def reduce(ctx: RankContext) -> None:
    """Average metrics."""
    ctx.reduce_mean({"loss": 1.0, "accuracy": 0.5})


def broadcast(ctx: RankContext) -> None:
    """Broadcast from rank 0."""
    ctx.broadcast("done")


def monitor(_ctx: RankContext) -> None:
    """Enter gloo's monitored barrier."""
    dist.monitored_barrier()


def gather_tensors(ctx: RankContext) -> None:
    """Gather tensors, which is not watched: the error is found beneath the timeout."""
    dist.all_gather([torch.ones(8)] * ctx.world_size, torch.ones(8))


def lose_a_download(_folder: Path) -> None:
    """Have a server reset the connection, with the text that gloo uses for a lost rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_reset_one, args=(server,)).start()
        port = server.getsockname()[1]
        urllib.request.urlopen(f"https://127.0.0.1:{port}/resnet50.pth", timeout=5)


def _reset_one(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def die_beside_a_rank_that_exits(ctx: RankContext, folder: Path) -> None:
    """Kill rank 1; the others catch the resulting error and exit without a report."""
    try:
        average_gradients()
        if ctx.rank == 1:
            mark(folder)
            os.kill(os.getpid(), 9)
        average_gradients()
    except Exception:  # noqa: BLE001 - as it is often written
        os._exit(1)


def hang_in_a_subgroup(ctx: RankContext, folder: Path, fault: Fault) -> None:
    """Train with tensor parallelism of two; rank 1 meets the fault, and rank 0 waits there for it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine: Any = groups[ctx.rank // 2]
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == 1:
            mark(folder)
            fault(folder)
        dist.all_reduce(torch.ones(2), group=mine)
        average_gradients()


def meet_under_other_names(ctx: RankContext, folder: Path, wait_s: float) -> None:
    """Enter one barrier on rank 1 and a different one on the other ranks."""
    if ctx.rank == 1:
        mark(folder)
    ctx.barrier("evaluated" if ctx.rank == 1 else "trained", timeout=timedelta(seconds=wait_s))


def make_a_group_alone(ctx: RankContext, folder: Path) -> None:
    """Make a group on rank 0 only, although all ranks have to, while the others train."""
    average_gradients()
    if ctx.rank == 0:
        mark(folder)
        dist.new_group([0, 1])
    average_gradients()


def average_other_shapes(ctx: RankContext, folder: Path) -> None:
    """Average a number on rank 0 and two on rank 1."""
    mark(folder)
    ctx.reduce_mean(1.0 if ctx.rank == 0 else torch.tensor([1.0, 2.0]))


def hang_after_a_thread_died(folder: Path) -> None:
    """Wait for a thread that has died."""
    feeder = threading.Thread(target=raise_own_error, args=(folder,))
    feeder.start()
    threading.Event().wait()
