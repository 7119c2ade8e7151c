"""The private names of torch that ddpsafe touches, all of them, each with its reason.

Nothing else in the package may use a private name of torch. Each is looked up with a fallback, so
that a torch that renames one costs the convenience behind it and nothing else; a test checks them
against the installed torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import math
import sys
import time
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlparse

from ddpsafe._clock import BoundedCall
from ddpsafe._wire.messages import MAIN_GROUP, UNKNOWN_COLLECTIVE, Arrival, Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch.distributed import Store

    Rendezvous = Iterator[tuple[Store, int, int]]
    Handler = Callable[..., Rendezvous]

_SCHEMES: Final = ("env", "tcp", "file")
# Long enough for gloo's thread to let go of the last collective's objects: with a pause of 50 ms
# that releases the GIL, 0 of 15 teardowns hung that otherwise hung in 14 of 30.
DRAIN_S: Final = 0.05

# Ranks that have come apart are found a few collectives later: two for each batch norm's buffers.
_KEPT: Final = 16
_ARRIVALS: Final = 256
_AHEAD: Final = 128

_AWAITED: Final = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
)

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
"""How long ranks wait for each other in ``init_process_group`` by default, as torch documents it."""

_kept_groups: list[object] = []
_safe_destroys: set[object] = set()
_forgotten: set[tuple[str, str]] = set()


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
    # `torch.distributed.rendezvous` the attribute is the function, not the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = getattr(module, "_rendezvous_handlers", {})
    for scheme in _SCHEMES:
        stock = handlers.get(scheme)
        if stock is not None:
            handlers[scheme] = _handler(stock, open_store, world_size, env, on_larger_group)


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


def is_default_timeout(timeout: timedelta) -> bool:
    """Tell whether it is what ``init_process_group`` takes where the script names no timeout."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    return timeout in (DEFAULT_TIMEOUT, *(getattr(c10d, name, None) for name in names))


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
        world = getattr(c10d, "_world", None)
        _kept_groups.extend(getattr(world, "pg_map", ()))
        time.sleep(DRAIN_S)
        stock(group)

    destroy_process_group.__doc__ = stock.__doc__
    _safe_destroys.add(destroy_process_group)
    _replace("destroy_process_group", stock, destroy_process_group)


def is_safe_destroy(destroy: Callable[..., object]) -> bool:
    """Tell whether `before_destroy` has made this ``destroy_process_group`` safe."""
    return destroy in _safe_destroys


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
    the job, while that option promises that only its members need to call it. Such a group
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


def default_store() -> Store | None:
    """Return the store of a process group that other code made."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    getter = getattr(c10d, "_get_default_store", None)
    return None if getter is None else getter()


def read_flight_recorders(*, asks_events: bool) -> tuple[Collective, ...]:
    """Return the collectives at which each process group is; see `read_recorders`."""
    return read_recorders(asks_events=asks_events)[0]


def read_recorders(*, asks_events: bool) -> tuple[tuple[Collective, ...], tuple[Arrival, ...]]:
    """Read torch's two flight recorders.

    gloo writes into the one and NCCL into the other (`FlightRecorder` is a template, with a recorder
    for each type of event); a build for CUDA has both. They are on by default since torch 2.9, and
    an empty result says nothing.

    Args:
        asks_events: Whether NCCL's recorder may query the events of what is under way. That tells
            names and shapes, but it goes to the driver, which may let it wait, and from another
            thread it breaks the capture of a CUDA graph. So a job that may be healthy is only asked
            for NCCL's counters.

    Returns:
        The collectives at which each process group is, and the moments at which this rank entered
        the last ones of the group of all ranks: none where NCCL only queues them.
    """
    nccl = _read(_DUMP_NCCL, functools.partial(_dump_nccl, asks_events=asks_events))
    others = _read(_DUMP_OTHERS, functools.partial(_dump, _DUMP_OTHERS))
    own = _from_counters(nccl) if not asks_events else _flat(_from_entries(nccl))
    groups = _from_entries(others, beside=nccl)
    entered = groups.get(MAIN_GROUP, {})
    arrivals = tuple((each.number, each.entered_ns) for each in entered.values() if each.entered_ns)
    return (*own, *_flat(groups)), arrivals[-_ARRIVALS:]


def read_groups() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group that this rank is in, by `Collective.group`."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    names = getattr(world, "pg_names", {})
    members = getattr(world, "pg_group_ranks", {})
    main = getattr(world, "default_pg", None)
    return {
        MAIN_GROUP if group is main else str(names[group]): tuple(sorted(ranks))
        for group, ranks in list(members.items())
        if group in names
    }


def forget_collectives() -> None:
    """Leave out what was entered so far: the next process group counts its own from 1.

    The recorders keep the entries of groups that are destroyed, under the same names. Their summary
    of groups takes 0.1 ms, however many entries there are.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # the ranks meet for something else, as RPC does
        return
    for name in (_DUMP_NCCL, _DUMP_OTHERS):
        summary = _read(name, functools.partial(_dump, name, includeCollectives=False))
        _forgotten.update((name, group) for group in summary.get("pg_status", {}))


_DUMP_NCCL: Final = "_dump_nccl_trace_json"
_DUMP_OTHERS: Final = "_dump_fr_trace_json"
_EVENTS_S: Final = 0.3
_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _read(name: str, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read one recorder; one that fails, or is not there, must not cost the other's evidence."""
    try:
        content = dump()
    except Exception:  # noqa: BLE001 - a private function of torch may change
        return {}
    content["recorder"] = name
    return content


def _dump(name: str, **options: bool) -> dict[str, Any]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, name, None)
    content: dict[str, Any] = {} if dump is None else json.loads(dump(**options))
    return content


def _dump_nccl(*, asks_events: bool) -> dict[str, Any]:
    """Return NCCL's counters, and its entries if the driver answers soon.

    Only the thread that queries is let off the rule that no thread may while a graph is captured.
    """

    def query_events() -> dict[str, Any]:
        with contextlib.suppress(OSError, AttributeError):
            exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
            exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        return _dump(_DUMP_NCCL)

    if asks_events and _dump(_DUMP_NCCL, includeCollectives=False).get("pg_status"):
        query = BoundedCall(query_events, name="ddpsafe-recorder")
        if query.wait(_EVENTS_S):
            return query.result()
    return _dump(_DUMP_NCCL, includeCollectives=False)


def _from_counters(content: dict[str, Any]) -> tuple[Collective, ...]:
    """Return what the counters of the group of all ranks tell: it is the first that was made."""
    status = {
        int(group): counters
        for group, counters in content.get("pg_status", {}).items()
        if (_DUMP_NCCL, group) not in _forgotten
    }
    if not status:
        return ()
    first = min(status)
    queued = int(status[first]["last_enqueued_collective"])
    completed = max(0, int(status[first]["last_completed_collective"]))  # -1 before the first
    if _queued.get(first, (0, 0))[0] != queued:
        _queued[first] = (queued, time.time_ns())  # torch notes no time here
    numbers = sorted({completed, min(completed + 1, queued), queued} - {-1, 0})
    return tuple(
        Collective(
            group=MAIN_GROUP,
            number=number,
            name=UNKNOWN_COLLECTIVE,
            sizes="",
            state="completed" if number <= completed else "queued",
            entered_ns=_queued[first][1],
        )
        for number in numbers
    )


_queued: dict[int, tuple[int, int]] = {}
"""The last number that each group of NCCL was seen to have queued, and when that was noticed."""


def _from_entries(
    content: dict[str, Any], *, beside: dict[str, Any] | None = None
) -> dict[str, dict[int, Collective]]:
    """Return the entries of each group, by their number.

    Args:
        content: What a recorder has dumped.
        beside: The dump of NCCL, of which a group may be a member too, with other numbers.
    """
    entries = content.get("entries", [])
    if not entries and content.get("recorder") == _DUMP_NCCL:
        return {MAIN_GROUP: {each.number: each for each in _from_counters(content)}}
    of_nccl = (beside or {}).get("pg_config", {})
    newest = {_name_of_group(entry): entry.get("pg_id") for entry in entries}
    groups: dict[str, dict[int, Collective]] = defaultdict(dict)
    for entry in entries:
        is_present = entry.get("pg_id") == newest[_name_of_group(entry)]
        is_known = (content.get("recorder"), str(entry.get("pg_id"))) not in _forgotten
        if is_present and is_known and not entry.get("is_p2p"):
            name, number = entry["profiling_name"], int(entry["collective_seq_id"])
            # All ranks of a group call it so: most have no description of their own.
            short, description = entry["process_group"]
            label = description if description == MAIN_GROUP else short
            counters = content.get("pg_status", {}).get(str(entry.get("pg_id")), {})
            is_done = entry["retired"] or entry.get("state") == "completed"
            # A coalesced call that was captured in a CUDA graph is recorded, but never retired.
            is_done |= name.endswith("coalesced") and number <= int(
                counters.get("last_completed_collective", 0)
            )
            # gloo's have begun when they are recorded; NCCL's wait for the stream until an event says so.
            has_begun = entry.get("state") == "started" or not name.startswith("nccl:")
            collective = Collective(
                group=f"{label} ({name.partition(':')[0]})"
                if (entry["process_group"][0] in of_nccl)
                else label,
                number=number,
                name=name,
                sizes=str(entry["input_sizes"]),
                state="completed" if is_done else "started" if has_begun else "queued",
                entered_ns=int(entry.get("time_created_ns", 0)),
                numel=sum(math.prod(sizes) for sizes in entry["input_sizes"]),
                timeout_s=int(entry.get("timeout_ms", 0)) / 1000,
                thread_id=int(entry.get("thread_id", 0)),
            )
            # The members of a coalesced call never complete; the entry of the whole call comes last.
            groups[collective.group][collective.number] = collective
    return groups


def _flat(groups: dict[str, dict[int, Collective]]) -> tuple[Collective, ...]:
    """Return the entries that matter; see `_KEPT`."""
    kept: list[Collective] = []
    for group in groups.values():
        # Those around the first incomplete one, and the last: NCCL's ranks run ahead of it.
        calls = list(group.values())
        first = next((index for index, each in enumerate(calls) if not each.done), len(calls))
        if len(calls) - first <= _AHEAD:
            kept += calls[max(0, first - _KEPT) :]
        else:
            kept += [*calls[max(0, first - _KEPT) : first + _AHEAD], *calls[-_KEPT:]]
    return tuple(kept)


def _name_of_group(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return what a later group may share: a group of two backends has an id for each."""
    backend = entry["profiling_name"].partition(":")[0]
    return (*entry["process_group"], backend)
