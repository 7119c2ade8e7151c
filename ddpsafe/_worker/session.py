"""A rank's membership in its launch: its store, its group, its context."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._host import ending_when_silent, without_cpp_warnings
from ddpsafe._job.control import Control
from ddpsafe._job.store_keys import FolderStore, ReopenedStore
from ddpsafe._limits import STORE_SILENCE_S
from ddpsafe._wire.exception_facts import own_line_of
from ddpsafe._worker import collectives, context, pending_exception, process_group, torch_hooks
from ddpsafe._worker.rank import this_rank
from ddpsafe._worker.stop_signals import protect_torchs_helper
from ddpsafe._world import JOINED, joined_mark, loopback_interfaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch.distributed import Store

    from ddpsafe._job.store_keys import Keys
    from ddpsafe._wire.messages import Phase
    from ddpsafe._wire.spec import RankSpec, StorePlace


_CONNECT: Final = timedelta(minutes=5)
_RENUMBERED: Final = "control/renumbered"
_MIN_REOPEN: Final = timedelta(seconds=1)
_DIAL_S: Final = 1.0
_REFUSED_S: Final = 5.0


def install_hooks(spec: RankSpec) -> None:
    """Prepare torch for scripts that make and destroy their process group themselves."""
    torch_hooks.use_launcher_store(
        lambda timeout, rank: _store_of_all_ranks(spec, timeout, rank),
        world_size=spec.world.world_size,
        on_larger_group=lambda: _leave_loopback(spec),
    )
    if spec.style == "launch" or "collective" in spec.timeouts.chosen:
        torch_hooks.limit_collectives(spec.timeouts.collective)
    protect_torchs_helper()
    torch_hooks.record_collectives()
    torch_hooks.before_destroy(_leaving_group)
    torch_hooks.around_waits(pending_exception.waiting)
    torch_hooks.before_ddp(collectives.prepare_ddp)
    torch_hooks.around_new_group(_making_group)


@contextlib.contextmanager
def _making_group(ranks: tuple[int, ...], keeps_number: bool, waits: bool) -> Iterator[None]:  # noqa: FBT001 - called by the hook
    """Refuse a group that another rank makes with other members, in the same call of ``new_group``.

    torch names groups by the number of the call: ranks of two such groups wait for each other, or get a
    wrong sum without an error. The rank that comes first says what it makes, and no rank waits for another.
    A group of one rank meets no other rank.

    Raises:
        ConfigError: The members differ.
    """
    control = None if this_rank.context is None else this_rank.context.control
    if control is None:
        yield
        return
    own = own_line_of(traceback.extract_stack())
    name = control.next_use("new-group")
    fact = json.dumps([this_rank.world.rank, ranks, own])
    first = control.store.compare_set(f"control/{name}", "", fact)
    rank, members, where = json.loads(bytes(first))
    if tuple(members) != ranks and max(len(members), len(ranks)) > 1:
        raise ConfigError(
            Explanation(
                f"rank {this_rank.world.rank} makes a process group of ranks {[*ranks]} in the call of new_group "
                f"in which rank {rank} makes one of ranks {members}.",
                cause="each rank makes only the groups that it is in, or the ranks make them in different orders.",
                fix="make every group on every rank, in the same order, or pass use_local_synchronization=True.",
                details=[f"rank {this_rank.world.rank}, at {own}", f"rank {rank}, at {where}"],
            )
        )
    if not keeps_number:
        control.store.set(_RENUMBERED, "yes")
    with contextlib.ExitStack() as stack:
        if this_rank.world.rank in ranks:
            # torch's recorder knows nothing of that wait. Members of other groups are in other calls meanwhile, so
            # each list of members counts for itself.
            members_id = hashlib.blake2b(str(ranks).encode(), digest_size=8).hexdigest()
            key = f"new-group {members_id}"  # short: each answer of a rank has all of them
            number = control.waits.done.get(key, 0) + 1
            control.waits.do(key, number)
            if waits and this_rank.has_renumbered is False:
                stack.enter_context(control.waits.inside(key, number, "new_group", ranks))
        yield
    if control.is_set(_RENUMBERED):
        this_rank.has_renumbered = True


def _leaving_group() -> None:
    os.environ.pop(JOINED, None)  # a program that starts now may join in this rank's place
    pending_exception.leaving_group()


def _leave_loopback(spec: RankSpec) -> None:
    """Undo the loopback setting of a launch on one host, so that other hosts can reach this rank."""
    for name, text in loopback_interfaces().items():
        if spec.env.get(name) == text == os.environ.get(name):
            del os.environ[name]


def _store_of_all_ranks(spec: RankSpec, timeout: timedelta | None, rank: int) -> Store:
    """Wait for all ranks, then open the store for the group that the script makes, with this rank as `rank`."""
    member = this_rank.context
    control = None if member is None else member.control
    limit = spec.timeouts.start
    if timeout is None or torch_hooks.is_default_timeout(timeout):
        timeout = torch_hooks.DEFAULT_TIMEOUT
    if spec.style != "launch" and "start" not in spec.timeouts.chosen:
        limit = timeout  # a default of ddpsafe's must not end a script that works without it
    deadline = Deadline.after(min(timeout, limit), clock=this_rank.since_start)
    if control is not None and rank != spec.world.rank:
        control.store.set(_RENUMBERED, "yes")
    # gloo and NCCL would not name a missing rank.
    process_group.wait_for_everyone(control, spec.world, deadline=deadline)
    this_rank.has_renumbered = control is not None and control.is_set(_RENUMBERED)
    return open_fresh_store(spec)


def join(
    spec: RankSpec, device: torch.device, *, on_phase: Callable[[Phase], None]
) -> context.RankContext:
    """Connect to the launcher's store and, in ``launch`` style, make the process group."""
    control = _open_control(spec)
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
    this_rank.context = member
    return member


def _open_control(spec: RankSpec) -> Control | None:
    if spec.world.world_size == 1:
        return None
    store: Keys
    if spec.store_place is None:
        store = FolderStore(Path(spec.store_dir, "control"))
    else:
        place, limit = spec.store_place, max(spec.timeouts.node_loss, _MIN_REOPEN)
        store = ReopenedStore(
            functools.partial(_open_for_control, place, _CONNECT),
            functools.partial(_reopen_for_control, place, limit),
        )
    control = Control(store, rank=spec.world.rank, world_size=spec.world.world_size)
    this_rank.waits = control.waits
    if this_rank.counter is not None:
        control.waits.on_change = this_rank.counter.note_waiting
    return control


def rendezvous_deadline(spec: RankSpec) -> Deadline:
    """Return the deadline of a rendezvous; time counts once the launcher has started all ranks."""
    return Deadline.after(spec.timeouts.start, clock=this_rank.since_start)


def open_group(
    spec: RankSpec, control: Control | None, *, backend: str, device: torch.device
) -> None:
    """Make the process group of this launch through the launcher's store."""
    this_rank.has_renumbered = False
    process_group.open_group(
        open_fresh_store(spec),
        control,
        world=spec.world,
        backend=backend,
        device=device,
        rendezvous=rendezvous_deadline(spec),
        collective=spec.timeouts.collective,
    )


def leave(deadline: Deadline, is_idle: Callable[[], bool]) -> None:
    """Leave the launch after success: wait for the other ranks and close the group.

    A rank without a collective under way does not wait long for the others: one that waits for it in what
    torch does not record, such as ``irecv``, learns only from the end of its process that it waits for ever.
    """
    member, this_rank.context, spec = this_rank.context, None, this_rank.spec
    if member is None and spec is not None:  # the script has not imported torch
        control = _open_control(spec) if spec.store_place is None else None
        if control is not None:
            control.arrive("leave")
        return
    import torch.distributed as dist

    control = None if member is None else member.control
    if dist.is_initialized():
        process_group.close_group(control, deadline=deadline, may_go=is_idle)
    elif control is not None:  # the script closed its group: do not wait, but let the others pass
        control.arrive("leave")


def _client(place: StorePlace, use: str, limit: timedelta = _CONNECT) -> Store:
    """Return this use's connection to the launcher's store; connecting takes at most `limit`."""
    import torch.distributed as dist

    # One connection for each use: a client serialises its calls, so a wait would block the others.
    if use not in this_rank.clients:
        with without_cpp_warnings():
            this_rank.clients[use] = dist.TCPStore(
                place.host, place.port, is_master=False, wait_for_workers=False, timeout=limit
            )
    return dist.PrefixStore(f"{place.key}/{use}", this_rank.clients[use])


def _open_for_control(place: StorePlace, limit: timedelta) -> Store:
    with ending_when_silent(place.port, STORE_SILENCE_S):
        return _client(place, "control", limit)


def _reopen_for_control(place: StorePlace, limit: timedelta) -> Store:
    """Connect to the launcher's store again, after an outage that the launchers survive.

    A host that refuses connections has lost its launcher, or has a firewall that does so for a moment.
    """
    import tenacity
    from torch.distributed import DistNetworkError

    def dial() -> None:
        try:
            socket.create_connection((place.host, place.port), timeout=_DIAL_S).close()
        except ConnectionRefusedError:
            raise
        except OSError:
            return  # torch waits for the network

    this_rank.clients.pop("control", None)
    try:
        tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ConnectionRefusedError),
            stop=tenacity.stop_after_delay(_REFUSED_S),
            wait=tenacity.wait_fixed(_DIAL_S / 2),
            reraise=True,
        )(dial)
    except ConnectionRefusedError as exc:
        raise DistNetworkError(str(exc)) from exc
    return _open_for_control(place, limit)


def open_fresh_store(spec: RankSpec) -> Store:
    """Open a store for the next group, which must not read the addresses of the previous one."""
    import torch.distributed as dist

    name = f"group-{next(this_rank.groups)}"
    store: Store
    if spec.store_place is None:
        store = dist.PrefixStore(name, dist.FileStore(spec.groups_file, -1))
    else:
        store = dist.PrefixStore(name, _client(spec.store_place, "groups"))
    store.set_timeout(spec.timeouts.start)
    os.environ[JOINED] = joined_mark(spec.world.rank, os.environ)
    return store
