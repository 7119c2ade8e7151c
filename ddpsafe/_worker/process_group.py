"""Opens a process group within a deadline, and closes it without a hang."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from ddpsafe._clock import BoundedCall
from ddpsafe._errors import Explanation, LaunchTimeoutError, RendezvousTimeoutError
from ddpsafe._job.agreement import Absence
from ddpsafe._logging import get_logger
from ddpsafe._text import ranks_text
from ddpsafe._worker import pending_exception
from ddpsafe._worker.torch_hooks import (
    DRAIN_S,
    forget_collectives,
    is_safe_destroy,
    let_members_make_groups,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch
    from torch.distributed import Store

    from ddpsafe._clock import Deadline
    from ddpsafe._job.control import Control
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

    All ranks meet at a barrier first: a backend does not name the rank that it waits for, and may
    take five times its timeout.

    No other group has used the store. With NCCL, the ranks connect right here instead of at the first collective.

    Raises:
        RendezvousTimeoutError: Some ranks did not join; the error names them.
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
    """Wait until every rank is about to make the group; then start over with collectives and reports.

    Raises:
        RendezvousTimeoutError: Some ranks did not join; the error names them.
    """
    missing = [] if control is None else control.barrier("join", deadline=deadline)
    if missing:
        raise absence_error(world, Absence(ranks=missing, waited_s=deadline.waited_s()))
    forget_collectives()
    pending_exception.withdraw_report()


def absence_error(world: World, absence: Absence) -> RendezvousTimeoutError:
    """Return the error of a rank that waited for others to join."""
    names = ranks_text(absence.ranks)
    what = f"{world} waited {absence.waited_s:.1f} s to start, but {names} did not join."
    verb = "was" if len(absence.ranks) == 1 else "were"
    cause = f"{names} {verb} never started, died during imports, or cannot reach the store."
    if absence.lost:
        cause = f"rank {absence.ranks[0]} is lost: {absence.lost}"
    fix = (
        f"look at the log of {names}; check that {world.world_size} processes were started; "
        "raise timeouts.start if starting them takes longer."
    )
    return RendezvousTimeoutError(
        Explanation(what, cause=cause, fix=fix),
        waited_s=absence.waited_s,
        missing_ranks=tuple(absence.ranks),
        kind="startup-network",
    )


def close_group(
    control: Control | None,
    *,
    deadline: Deadline,
    is_supervised: bool = True,
    may_go: Callable[[], bool] | None = None,
) -> list[int]:
    """Wait for all ranks at the end of a successful job, then close the group; without a collective.

    `is_supervised` says whether ddpsafe's launcher ends this process if it hangs, `may_go` is that of
    `Control.barrier`. Returns the ranks that had not finished in time; if there are any, the group stays open.

    Raises:
        LaunchTimeoutError: torch did not close the group by the deadline, and there is no
            launcher to end this process.
    """
    import torch
    import torch.distributed as dist

    missing: list[int] = []
    if control is not None:
        missing = control.barrier("leave", deadline=deadline, is_last=True, may_go=may_go)
    if missing or not dist.is_initialized():
        return missing
    # Before the group's destructor runs, DDP's reducer must be freed and gloo's thread idle, or the two
    # can deadlock over the GIL (pytorch #56297, #190489).
    gc.collect()
    if not is_safe_destroy(dist.destroy_process_group):  # the safe one waits by itself
        time.sleep(DRAIN_S)
    if is_supervised or control is None:
        dist.destroy_process_group()
        return []
    # With NCCL, destroy_process_group waits for all queued work, without a timeout.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch

    def destroy() -> None:
        if device is not None:  # the current device is per thread
            torch.cuda.set_device(device)
        dist.destroy_process_group()

    closing = BoundedCall(destroy, name="ddpsafe-destroy")
    if not closing.wait(deadline.remaining_s()):
        waited_s = deadline.waited_s()
        what = f"torch.distributed.destroy_process_group() did not return within {waited_s:.1f} s."
        cause = "a collective was started in which not all ranks take part."
        fix = "wait for the results of asynchronous collectives on every rank before the end."
        raise LaunchTimeoutError(
            Explanation(what, cause=cause, fix=fix), setting="collective", waited_s=waited_s
        )
    closing.result()
    return []
