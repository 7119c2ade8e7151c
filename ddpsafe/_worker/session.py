"""A rank's membership in its launch: its store, its group, its context."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpsafe._clock import Deadline
from ddpsafe._worker import context, pending_exception, process_group, torch_hooks
from ddpsafe._worker.store_sync import Control, FolderStore
from ddpsafe._world import World, find_world, loopback_interfaces

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch
    from torch.distributed import Store, TCPStore

    from ddpsafe._wire.messages import Phase
    from ddpsafe._wire.spec import RankSpec, StorePlace
    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.store_sync import Keys


_current: RankContext | None = None


def enter(context: RankContext | None) -> RankContext | None:
    """Make a context the current one; return the one before, to be restored."""
    global _current
    before, _current = _current, context
    return before


def find_current() -> RankContext | None:
    """Return the context of this rank, or ``None`` outside of one."""
    return _current


def current_world() -> World:
    """Return this process' place: of the context, else of the environment, else alone."""
    if _current is not None:
        return _current.world
    return find_world(os.environ) or World.alone()


_spec: RankSpec | None = None
_since_start: Callable[[], float] = time.monotonic


def find_spec() -> RankSpec | None:
    """Return what our launcher told this rank, or ``None`` in any other process."""
    return _spec


def install_hooks(spec: RankSpec, since_start: Callable[[], float]) -> None:
    """Prepare torch for scripts that make and destroy their process group themselves.

    Args:
        spec: What the launcher told this rank.
        since_start: The clock for waits at the rendezvous. It stands still until the launcher has
            started all ranks: one that is suspended in between (Ctrl-Z) starts the rest when it goes on.
    """
    global _spec, _since_start
    _spec, _since_start = spec, since_start
    torch_hooks.meet_at_launcher(
        lambda timeout: _meet(spec, timeout),
        world_size=spec.world.world_size,
        env=os.environ,  # type: ignore[arg-type]  # a mapping of str, which is all it needs
        on_larger_group=lambda: _leave_loopback(spec),
    )
    if spec.style == "launch" or "collective" in spec.timeouts.chosen:
        torch_hooks.limit_collectives(spec.timeouts.collective)
    torch_hooks.before_destroy(pending_exception.leaving_group)
    torch_hooks.around_waits(pending_exception.waiting)


def _leave_loopback(spec: RankSpec) -> None:
    """Take back the interface of a launch on one host: other hosts have to reach this rank now."""
    for name, text in loopback_interfaces().items():
        if spec.env.get(name) == text == os.environ.get(name):
            del os.environ[name]


def _meet(spec: RankSpec, timeout: timedelta | None) -> Store:
    """Wait for all ranks before the script's own group is made: gloo and NCCL do not name the missing rank."""
    member = find_current()
    control = None if member is None else member.control
    limit = spec.timeouts.rendezvous
    if timeout is None or torch_hooks.is_default_timeout(timeout):
        timeout = torch_hooks.DEFAULT_TIMEOUT
    if spec.style != "launch" and "rendezvous" not in spec.timeouts.chosen:
        limit = timeout  # what the user has not set must not end a script that works
    deadline = Deadline.after(min(timeout, limit), clock=_since_start)
    process_group.wait_for_everyone(control, spec.world, deadline=deadline)
    return open_fresh_store(spec)


def join(
    spec: RankSpec, device: torch.device, *, on_phase: Callable[[Phase], None]
) -> context.RankContext:
    """Become a member: connect to the launcher's store, in ``launch`` style make the group too."""
    control = None
    if spec.world.world_size > 1:
        place = spec.store_place
        store: Keys = FolderStore(Path(spec.store_dir, "control"))
        if place is not None:
            store = _client(place, "control")
        control = Control(
            store,
            rank=spec.world.rank,
            world_size=spec.world.world_size,
        )
    if spec.style == "launch":
        on_phase("joining")
        open_group(spec, control, backend=spec.backend, device=device)
    member = context.RankContext(
        world=spec.world,
        device=device,
        backend=spec.backend,
        attempt=spec.attempt,
        run_dir=Path(spec.run_dir),
        barrier_timeout=spec.timeouts.barrier,
        control=control,
    )
    enter(member)
    return member


def rendezvous_deadline(spec: RankSpec) -> Deadline:
    """Return until when to wait for the other ranks, from now, or from when all have been started."""
    return Deadline.after(spec.timeouts.rendezvous, clock=_since_start)


def open_group(
    spec: RankSpec, control: Control | None, *, backend: str, device: torch.device
) -> None:
    """Make the process group of this launch, at the launcher's store."""
    process_group.open_group(
        open_fresh_store(spec),
        control,
        world=spec.world,
        backend=backend,
        device=device,
        rendezvous=rendezvous_deadline(spec),
        collective=spec.timeouts.collective,
    )


def leave(deadline: Deadline) -> None:
    """Leave on the good path.

    A rank whose script has closed its group itself does not wait, but tells the others that it
    has come.
    """
    import torch.distributed as dist

    member = enter(None)
    control = None if member is None else member.control
    if dist.is_initialized():
        process_group.close_group(control, deadline=deadline)
    elif control is not None:
        control.arrive("leave")


_groups = itertools.count()
_clients: dict[str, TCPStore] = {}


def _client(place: StorePlace, use: str) -> Store:
    """Return a connection to the launcher's store: a wait on one would hold up the other uses."""
    import torch.distributed as dist

    if use not in _clients:
        _clients[use] = dist.TCPStore(
            place.host, place.port, is_master=False, wait_for_workers=False
        )
    return dist.PrefixStore(f"{place.key}/{use}", _clients[use])


def open_fresh_store(spec: RankSpec) -> Store:
    """Open a store for the next group: a second group must not read the first one's addresses."""
    import torch.distributed as dist

    name = f"group-{next(_groups)}"
    store: Store
    if spec.store_place is None:
        store = dist.FileStore(str(Path(spec.store_dir, name)), -1)
    else:
        store = dist.PrefixStore(name, _client(spec.store_place, "groups"))
    store.set_timeout(spec.timeouts.rendezvous)
    return store
