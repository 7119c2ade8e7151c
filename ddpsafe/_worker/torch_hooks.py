"""The private names of torch that ddpsafe touches, all of them, each with its reason.

Nothing else in the package may use a private name of torch. Each is looked up with a fallback, so
that a torch that renames one costs the convenience behind it and nothing else; a test checks them
against the installed torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlparse

from ddpsafe._wire.outcome import MAIN_GROUP, Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from types import ModuleType

    from torch.distributed import Store

    Rendezvous = Iterator[tuple[Store, int, int]]
    Handler = Callable[..., Rendezvous]

_SCHEMES: Final = ("env", "tcp", "file")
# Long enough for gloo's thread to let go of the last collective's objects: with a pause of 50 ms
# that releases the GIL, 0 of 15 teardowns hung that otherwise hung in 14 of 30.
DRAIN_S: Final = 0.05

# Ranks that have come apart are found a few collectives later: two for each batch norm's buffers.
_KEPT: Final = 16

_AWAITED: Final = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
)

_kept_groups: list[object] = []
_forgotten: set[str] = set()


def meet_at_launcher(
    open_store: Callable[[timedelta | None], Store],
    *,
    world_size: int,
    env: dict[str, str],
    on_larger_group: Callable[[], None],
) -> None:
    """Let the script's own ``init_process_group`` meet at the launcher's store.

    Scripts bring hard-coded ports, and two jobs on one port can join each other without an
    error. A rendezvous that asks for exactly this launch's ranks gets the launcher's store
    instead, whatever address it names; every other one is left to torch.

    `register_rendezvous_handler` is public but refuses to replace a scheme, hence the table.

    Args:
        open_store: Opens a store under a prefix that no other group of this launch has, once all
            ranks are there or the timeout that the script gave has passed.
        world_size: The launch's number of ranks.
        env: ``os.environ``, read when the script asks.
        on_larger_group: Called before a group that has more ranks than this launch, some of which
            may be on other hosts.
    """
    handlers = _rendezvous_handlers()
    for scheme in _SCHEMES:
        stock = handlers.get(scheme)
        if stock is not None:
            handlers[scheme] = _handler(stock, open_store, world_size, env, on_larger_group)


def _rendezvous_handlers() -> dict[str, Handler]:
    # `torch.distributed.rendezvous` the attribute is the function, not the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = getattr(module, "_rendezvous_handlers", {})
    return handlers


def _handler(
    stock: Handler,
    open_store: Callable[[timedelta | None], Store],
    world_size: int,
    env: dict[str, str],
    on_larger_group: Callable[[], None],
) -> Handler:
    def handler(url: str, **options: Any) -> Rendezvous:
        asked = parse_qs(urlparse(url).query)
        rank = int(asked.get("rank", [env.get("RANK", "-1")])[0])
        size = int(asked.get("world_size", [env.get("WORLD_SIZE", "-1")])[0])
        if size == world_size and 0 <= rank < size:
            yield open_store(options.get("timeout")), rank, size
        else:
            if size > world_size:
                on_larger_group()
            yield from stock(url, **options)

    return handler


def limit_collectives(timeout: timedelta) -> None:
    """Let groups for which the script names no timeout have this one, not torch's 30 minutes."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        # For NCCL it is None where torch was built without, which torch looks at.
        if getattr(c10d, name, None) is not None:
            setattr(c10d, name, timeout)


def before_destroy(hook: Callable[[], object]) -> None:
    """Call `hook` whenever the script destroys its process group, and make that safe.

    ``destroy_process_group`` while a DDP object is alive can end in a destructor that joins a
    thread with the GIL held, while that thread waits for the GIL: a deadlock without a timeout
    (pytorch #56297, #190489). A rank leaves through `os._exit`, so keeping the group's object
    until then costs nothing and its destructor never runs.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    stock = c10d.destroy_process_group

    def destroy_process_group(group: object = None) -> None:
        hook()
        _keep_groups(c10d)
        time.sleep(DRAIN_S)
        stock(group)

    destroy_process_group.__doc__ = stock.__doc__
    _replace("destroy_process_group", stock, destroy_process_group)


def around_waits(waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Be in the context `waiting` whenever the script waits in a barrier, or gathers objects.

    That is what people write into an ``except`` or a ``finally``. The collectives of tensors are left
    alone: `torch.compile` knows them by identity.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for name in _AWAITED:
        stock = getattr(c10d, name, None)
        if stock is not None:
            _replace(name, stock, _inside(waiting, stock))


def _inside(
    waiting: Callable[[], AbstractContextManager[None]], stock: Callable[..., object]
) -> Callable[..., object]:
    @functools.wraps(stock)
    def call(*args: object, **options: object) -> object:
        with waiting():
            return stock(*args, **options)

    return call


def _replace(name: str, stock: object, ours: object) -> None:
    """Replace the function wherever a script's ``from … import`` has already taken it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is stock:
            names[name] = ours


@functools.cache
def let_members_make_groups() -> None:
    """Let ``new_group(use_local_synchronization=True)`` need its members only, as without ``device_id``.

    A group that is bound to a device makes others by ``ncclCommSplit``, which waits for every rank of
    the job, while that option promises that ranks that are no members need not call it. Such a group
    connects at its first collective instead.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    stock = c10d.new_group

    @functools.wraps(stock)
    def new_group(*args: Any, **options: Any) -> object:
        is_local = options.get("use_local_synchronization", args[4:5] == (True,))
        main: Any = c10d.group.WORLD if is_local else None
        device = getattr(main, "bound_device_id", None)
        if device is None:
            return stock(*args, **options)
        main.bound_device_id = None
        try:
            return stock(*args, **options)
        finally:
            main.bound_device_id = device

    _replace("new_group", stock, new_group)


def _keep_groups(c10d: ModuleType) -> None:
    world = getattr(c10d, "_world", None)
    _kept_groups.extend(getattr(world, "pg_map", ()))


def default_store() -> Store | None:
    """Return the store of a process group that somebody else made."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    getter = getattr(c10d, "_get_default_store", None)
    return None if getter is None else getter()


def read_flight_recorder() -> tuple[Collective, ...]:
    """Return the last few collectives of each process group, from torch's flight recorder.

    It is on by default since torch 2.9 for gloo and NCCL; an empty result says nothing.
    """
    return _last_of_each_group(_dump_flight_recorder().get("entries", []))


def forget_collectives() -> None:
    """Leave out what was entered so far: the next process group counts its own from 1.

    The recorder keeps the entries of groups that are destroyed, under the same names. Its summary
    of groups takes 0.1 ms, however many entries there are.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # the ranks meet for something else, as RPC does
        return
    with contextlib.suppress(Exception):  # the evidence must never cost the group
        _forgotten.update(_dump_flight_recorder(includeCollectives=False).get("pg_status", {}))


def _dump_flight_recorder(**options: bool) -> dict[str, Any]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            content: dict[str, Any] = json.loads(dump(**options))
            return content
    return {}


def _last_of_each_group(entries: list[dict[str, Any]]) -> tuple[Collective, ...]:
    groups: dict[str, deque[Collective]] = defaultdict(lambda: deque(maxlen=_KEPT))
    newest = {_name_of_group(entry): entry.get("pg_id") for entry in entries}
    for entry in entries:
        is_present = entry.get("pg_id") == newest[_name_of_group(entry)]
        if is_present and str(entry.get("pg_id")) not in _forgotten and not entry.get("is_p2p"):
            collective = Collective(
                group=_label_of(entry["process_group"]),
                number=int(entry["collective_seq_id"]),
                name=entry["profiling_name"],
                sizes=str(entry["input_sizes"]),
                done=bool(entry["retired"]),
                entered_ns=int(entry.get("time_created_ns", 0)),
            )
            groups[collective.group].append(collective)
    return tuple(collective for group in groups.values() for collective in group)


def _label_of(group: tuple[str, str]) -> str:
    """Return what all ranks of a group call it: most have no description of their own."""
    name, description = group
    return description if description == MAIN_GROUP else name


def _name_of_group(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return what a later group may share: a group of two backends has an id for each."""
    backend = entry["profiling_name"].partition(":")[0]
    return (*entry["process_group"], backend)
