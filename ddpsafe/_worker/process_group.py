"""Opening a process group in bounded time with an explanation, and closing it without a hang."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from ddpsafe._clock import BoundedCall
from ddpsafe._errors import CollectiveTimeoutError, Explanation, RendezvousTimeoutError, ranks_text
from ddpsafe._logging import get_logger
from ddpsafe._worker import pending_exception
from ddpsafe._worker.torch_hooks import (
    DRAIN_S,
    forget_collectives,
    is_safe_destroy,
    let_members_make_groups,
)

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store

    from ddpsafe._clock import Deadline
    from ddpsafe._worker.store_sync import Control
    from ddpsafe._world import World

logger = get_logger(__name__)


def open_group(
    store: Store,
    control: Control | None,
    *,
    world: World,
    backend: str,
    device: torch.device,
    rendezvous: Deadline,
    collective: timedelta,
) -> None:
    """Make the default process group.

    First every rank says that it is there: a backend that waits for a missing rank does not name it
    and may take five times its timeout.

    Args:
        store: Where the ranks find each other; fresh for this group.
        control: Line to the other ranks; ``None`` in a world of one.
        world: This rank's place.
        backend: Backend for torch.
        device: This rank's device; handed to NCCL so that it connects here and now.
        rendezvous: When to give up.
        collective: Timeout of the group's collectives.

    Raises:
        RendezvousTimeoutError: Some ranks did not come; it names them.
        RuntimeError: The backend could not connect the ranks.
    """
    import torch.distributed as dist

    wait_for_everyone(control, world, deadline=rendezvous)
    if device.type == "cuda":
        let_members_make_groups()
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=collective,
        device_id=device if device.type == "cuda" and "nccl" in backend else None,
    )


def wait_for_everyone(control: Control | None, world: World, *, deadline: Deadline) -> None:
    """Wait until every rank is about to make the group; what came before it is then over.

    Raises:
        RendezvousTimeoutError: Some ranks did not come; it names them.
    """
    missing = [] if control is None else control.barrier("join", deadline=deadline)
    if missing:
        raise not_joined(world, missing, deadline)
    forget_collectives()
    pending_exception.going_on()


def not_joined(world: World, missing: list[int], deadline: Deadline) -> RendezvousTimeoutError:
    """Word the error of a rank that waited for others to join."""
    waited_s = deadline.waited_s()
    names = ranks_text(missing)
    what = f"{world} waited {waited_s:.1f} s to start, but {names} did not join."
    verb = "was" if len(missing) == 1 else "were"
    cause = f"{names} {verb} never started, died while importing, or cannot reach the store."
    fix = (
        f"look at the log of {names}; check that as many processes were started as "
        "world_size says; raise timeouts.rendezvous if its start takes longer."
    )
    return RendezvousTimeoutError(
        Explanation(what, cause=cause, fix=fix),
        waited_s=waited_s,
        missing_ranks=missing,
        kind="startup-network",
    )


def close_group(
    control: Control | None, *, deadline: Deadline, is_supervised: bool = True
) -> list[int]:
    """Leave the group on the good path, without a collective.

    Args:
        control: Line to the other ranks; ``None`` in a world of one.
        deadline: How long to wait for ranks that still work.
        is_supervised: Whether a launcher of ddpsafe ends this process if it hangs.

    Returns:
        The ranks that had not come to the end by then; the group is then left as it is.

    Raises:
        CollectiveTimeoutError: torch had not closed the group by then, where no launcher would end it.
    """
    import torch
    import torch.distributed as dist

    missing = [] if control is None else control.barrier("leave", deadline=deadline, is_last=True)
    if missing or not dist.is_initialized():
        return missing
    # DDP's reducer must be gone and gloo's thread quiet before the group's destructor runs, or
    # the two can deadlock over the GIL (pytorch #56297, #190489).
    gc.collect()
    if not is_safe_destroy(dist.destroy_process_group):  # that one waits by itself
        time.sleep(DRAIN_S)
    if is_supervised or control is None:
        dist.destroy_process_group()
        return []
    # With NCCL it waits for whatever is queued, without a limit of its own.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch

    def destroy() -> None:
        if device is not None:  # each thread has a current device of its own
            torch.cuda.set_device(device)
        dist.destroy_process_group()

    closing = BoundedCall(destroy, name="ddpsafe-destroy")
    if not closing.wait(deadline.remaining_s()):
        waited_s = deadline.waited_s()
        what = f"torch.distributed.destroy_process_group() has not ended after {waited_s:.1f} s."
        cause = "a collective was started that not all ranks have taken part in."
        fix = "wait for the results of asynchronous collectives on every rank before the end."
        raise CollectiveTimeoutError(Explanation(what, cause=cause, fix=fix), waited_s=waited_s)
    closing.result()
    return []
