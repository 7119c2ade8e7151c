"""What is replaced or read in torch itself in a rank, by private names, each with its reason.

The modules for other private names are listed in `_torch_private`. Each lookup has a fallback: if a
version of torch renames one, ddpsafe loses the feature behind it and nothing else. A test checks the
names against the installed torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlparse

from ddpsafe._clock import BoundedCall
from ddpsafe._garbage import exempt_from_gc
from ddpsafe._torch_private import WORKER_SIGNALS
from ddpsafe._wire.messages import MAIN_GROUP, UNKNOWN_COLLECTIVE, Arrival, Collective
from ddpsafe._worker.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torch import nn
    from torch.distributed import Store

    Rendezvous = Iterator[tuple[Store, int, int]]
    Handler = Callable[..., Rendezvous]

_SCHEMES: Final = ("env", "tcp", "file")

# Long enough for gloo's thread to release the last collective's objects. Without a pause that releases
# the GIL, 14 of 30 teardowns hung; with 50 ms, 0 of 15.
DRAIN_S: Final = 0.05

# Ranks out of step are noticed a few collectives later: two for each batch norm's buffers.
_KEPT_BEFORE: Final = 16
# How far NCCL's queue may run ahead of the first incomplete collective and still be reported whole.
_KEPT_AHEAD: Final = 128
_KEPT_ARRIVALS: Final = 256

_WAITING_FUNCTIONS: Final = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
)

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
"""The documented default timeout of ``init_process_group``."""

_forgotten: set[tuple[str, str]] = set()


def after_import_of_torch(then: Callable[[], object]) -> None:
    """Call `then` once this process has imported torch, before the import statement ends."""
    sys.meta_path.insert(0, _TorchFinder(then))


class _TorchFinder(MetaPathFinder):
    """Finds torch as without it, and has a function called after its import."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._pid = os.getpid()
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != "torch" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        # A fork is not the rank.
        if spec is None or spec.loader is None or os.getpid() != self._pid:
            return spec
        stock = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with exempt_from_gc(after_script=True):
                stock(module)
            # Not before: libraries look whether torch is installed without importing it.
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            self._then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def use_launcher_store(
    open_store: Callable[[timedelta | None, int], Store],
    *,
    world_size: int,
    on_larger_group: Callable[[], None],
) -> None:
    """Make the script's own ``init_process_group`` use the launcher's store.

    Scripts hard-code ports, and two jobs on one port can join each other without an error. So a
    rendezvous of exactly this launch's ranks gets the launcher's store, whatever address the script
    passed. Every other rendezvous is left to torch.

    Args:
        open_store: Waits for all ranks, with the timeout that the script passed and the number that it gives
            this rank, and opens a store under a prefix that no other group of this launch uses.
        world_size: The launch's number of ranks.
        on_larger_group: Called before a rendezvous of more ranks than this launch has: some may be
            on other hosts.
    """

    def rendezvous(_: str, stock: Handler, url: str, **options: Any) -> Rendezvous:
        rank, size = _place_in(url)
        if size == world_size and 0 <= rank < size:
            yield open_store(options.get("timeout"), rank), rank, size
        else:
            if size > world_size:
                on_larger_group()
            yield from stock(url, **options)

    _replace_rendezvous(rendezvous)


def before_rendezvous(check: Callable[[str], object]) -> None:
    """Call ``check(scheme)`` before ``init_process_group`` joins as the rank that the variables name.

    `check` raises if the process must not do that.
    """

    def rendezvous(scheme: str, stock: Handler, url: str, **options: Any) -> Rendezvous:
        rank, size = _place_in(url)
        if size > 1 and (rank, size) == _place_in("env://"):
            check(scheme)
        return stock(url, **options)

    _replace_rendezvous(rendezvous)


def _replace_rendezvous(rendezvous: Callable[..., Rendezvous]) -> None:
    """Have ``rendezvous(scheme, stock, url, **options)`` called in place of each stock handler."""
    # The public `register_rendezvous_handler` refuses to replace a scheme, hence the private table.
    # The attribute `torch.distributed.rendezvous` is the function, not the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = getattr(module, "_rendezvous_handlers", {})
    for scheme in _SCHEMES:
        if scheme in handlers:
            handlers[scheme] = functools.partial(rendezvous, scheme, handlers[scheme])


def _place_in(url: str) -> tuple[int, int]:
    """Return the rank and the number of ranks that a rendezvous is about; -1 if they are unknown."""
    query = parse_qs(urlparse(url).query)
    rank = int(query.get("rank", [os.environ.get("RANK", "-1")])[0])
    return rank, int(query.get("world_size", [os.environ.get("WORLD_SIZE", "-1")])[0])


def after_worker_signals(then: Callable[[], None]) -> None:
    """Call `then` in a worker of torch's DataLoader, once it has set its own signal handlers."""
    module = importlib.import_module(WORKER_SIGNALS)
    stock = getattr(module, "_set_worker_signal_handlers", None)
    if stock is None or stock.__module__ == __name__:
        return

    def set_handlers() -> None:
        stock()
        then()

    module._set_worker_signal_handlers = set_handlers  # type: ignore[attr-defined]  # noqa: SLF001


def around_shared_files(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Share tensors inside of `around`: with the strategy ``file_system``, torch then starts a process.

    That process, ``torch_shm_manager``, inherits the signals that the caller has blocked.
    """
    import torch

    stock = getattr(torch.UntypedStorage, "_share_filename_cpu_", None)
    if stock is None or stock.__module__ == __name__:
        return

    def share(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around():
            return stock(self, *args, **kwargs)

    torch.UntypedStorage._share_filename_cpu_ = share  # type: ignore[method-assign]


def limit_collectives(timeout: timedelta) -> None:
    """Replace torch's default timeout of 30 minutes in groups for which the script passes none."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        # NCCL's is None in a torch built without NCCL, and torch checks for that.
        if getattr(c10d, name, None) is not None:
            setattr(c10d, name, timeout)


def record_collectives() -> None:
    """Turn torch's flight recorder on where it is off by default, as in torch 2.8 to 2.10."""
    import torch
    from torch.torch_version import TorchVersion

    is_old = TorchVersion(torch.__version__) < "2.11"
    if is_old and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def is_default_timeout(timeout: timedelta) -> bool:
    """Return whether ``init_process_group`` has this timeout because the script passed none."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    return timeout in (DEFAULT_TIMEOUT, *(getattr(c10d, name, None) for name in names))


def before_destroy(hook: Callable[[], object]) -> None:
    """Call `hook` before the script destroys its process group, and make the destruction safe.

    ``destroy_process_group`` while a DDP object is alive can run a destructor that joins a thread
    with the GIL held, while that thread waits for the GIL: a deadlock without a timeout
    (pytorch #56297, #190489). So the group's object is kept. A rank exits through `os._exit`, and
    the destructor never runs.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    stock = c10d.destroy_process_group
    kept: list[object] = []

    def destroy_process_group(group: object = None) -> None:
        hook()
        if group in (None, c10d.group.WORLD):
            this_rank.has_renumbered = None  # the next group may have other numbers
        _scope()  # it cannot be told afterwards
        world = getattr(c10d, "_world", None)
        kept.extend(getattr(world, "pg_map", ()))
        time.sleep(DRAIN_S)
        stock(group)

    destroy_process_group.__doc__ = stock.__doc__
    _replace("destroy_process_group", stock, destroy_process_group)


def is_safe_destroy(destroy: Callable[..., object]) -> bool:
    """Return whether this ``destroy_process_group`` is the safe one of `before_destroy`."""
    return destroy.__module__ == __name__


def around_waits(waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter the context `waiting` whenever the script waits in a barrier or gathers objects.

    These are the calls that people write in an ``except`` or a ``finally``. Collectives of tensors are
    not replaced: `torch.compile` recognises them by identity.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for name in _WAITING_FUNCTIONS:
        stock = getattr(c10d, name, None)
        if stock is not None:
            _replace(name, stock, _called_inside(waiting, stock))


def _called_inside(
    waiting: Callable[[], AbstractContextManager[None]], stock: Callable[..., object]
) -> Callable[..., object]:
    @functools.wraps(stock)
    def call(*args: object, **options: object) -> object:
        with waiting():
            return stock(*args, **options)

    return call


def _replace(name: str, stock: object, ours: object) -> None:
    """Replace a function of torch in every module that has imported it by name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is stock:
            names[name] = ours


@functools.cache
def around_new_group(
    making: Callable[[tuple[int, ...], bool, bool], AbstractContextManager[None]],
) -> None:
    """Enter the context `making` for each ``new_group`` that all ranks of the launch have to make.

    It gets the sorted members, whether the default group gives this rank its number in the launch, and whether they
    wait for each other in the call, with no limit of the script's for it alone. Not all ranks have to make a group with
    ``use_local_synchronization=True``, or where the default group leaves one out. Device meshes call ``new_group``, too.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    stock = c10d.new_group

    @functools.wraps(stock)
    def new_group(*args: Any, **options: Any) -> object:
        is_local = options.get("use_local_synchronization", args[4:5] == (True,))
        main = getattr(getattr(c10d, "_world", None), "default_pg", None)
        if main is None or is_local or _scope() or this_rank.spec is None:
            return stock(*args, **options)
        ranks = options.pop("ranks", args[0] if args else None)
        members = [*range(main.size())] if ranks is None else [*map(int, ranks)]
        keeps_number = main.rank() == this_rank.spec.world.rank
        named = dict(zip(("ranks", "timeout", "backend"), args, strict=False)) | options
        # gloo connects the members at once.
        connects = "gloo" in str(named.get("backend") or c10d.get_backend_config())
        with making(
            tuple(sorted(members)), keeps_number, connects and named.get("timeout") is None
        ):
            return stock(None if ranks is None else members, *args[1:], **options)

    _replace("new_group", stock, new_group)


@functools.cache
def let_members_make_groups() -> None:
    """Let only the members of a group call ``new_group(use_local_synchronization=True)``.

    torch promises that. But if the main group is bound to a device (``device_id``), torch makes the new
    group with ``ncclCommSplit``, which waits for every rank of the job. So the main group is unbound
    during the call, and the new group connects at its first collective.
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


@functools.cache
def before_ddp(check: Callable[[nn.Module, Mapping[str, Any]], None]) -> None:
    """Call `check` with the model and the arguments of each ``DistributedDataParallel`` that is made.

    The class itself stays: subclasses, ``isinstance`` and pickles work as before.
    """
    from torch.distributed.algorithms import Joinable
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

    stock = Joinable.__init__

    # The constructor calls this first. A function around the constructor itself would be the place of
    # every warning that torch gives to the constructor's caller, whose filters would then not apply.
    @functools.wraps(stock)
    def init(self: Joinable) -> None:
        if isinstance(self, DistributedDataParallel):
            arguments = sys._getframe(1).f_locals  # noqa: SLF001 - without a frame there is no check
            if isinstance(arguments.get("module"), Module):
                check(arguments["module"], arguments)
        stock(self)

    Joinable.__init__ = init  # type: ignore[method-assign]


def ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that DDP is told to leave alone."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def default_store() -> Store | None:
    """Return the store of a process group that other code made."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    getter = getattr(c10d, "_get_default_store", None)
    return None if getter is None else getter()


def read_recorders(*, asks_events: bool) -> tuple[tuple[Collective, ...], tuple[Arrival, ...]]:
    """Read torch's flight recorders.

    gloo writes to one and NCCL to another (`FlightRecorder` is a template with one instance for
    each type of event); a build for CUDA has both. They are on by default since torch 2.11. An empty
    result may just mean that they are off.

    Args:
        asks_events: Whether NCCL's recorder may query the CUDA events of running collectives. That
            yields names and shapes, but the query may block in the driver, and from another thread
            it breaks the capture of a CUDA graph. So for a job that may be healthy, only NCCL's
            counters are read.

    Returns:
        The last collectives of each process group, and the times at which this rank entered the last
        ones of the group of all ranks. Times are missing where NCCL only queues the collectives. Where
        torch's default group is not that of all ranks, groups have names of its own: see `_scope`.
    """
    nccl = _read(_DUMP_NCCL, functools.partial(_dump_nccl, asks_events=asks_events))
    if not nccl.get("pg_status"):
        # NCCL of torch 2.15 and later: its recorder has an instance of its own, and no events to query.
        nccl, asks_events = _read(_NCCL2, _RECORDERS[_NCCL2]), True
    others = _read(_DUMP_OTHERS, functools.partial(_dump, _DUMP_OTHERS))
    of_nccl = _select_relevant(_from_entries(nccl)) if asks_events else _from_counters(nccl)
    groups = _from_entries(others, beside=nccl)
    entered = groups.get(MAIN_GROUP, {})
    arrivals = tuple((call.number, call.entered_ns) for call in entered.values() if call.entered_ns)
    collectives = (*of_nccl, *_select_relevant(groups))
    scope = _scope()
    if scope:
        return tuple(replace(call, group=f"{call.group} {scope}") for call in collectives), ()
    return collectives, arrivals[-_KEPT_ARRIVALS:]


def _scope() -> str:
    """Return what names the default group among others of this launch; empty for the group of all ranks.

    A script may leave ranks out of its default group, or make several side by side, and then torch's numbers
    and names of groups mean something else in each. Ranks of one group meet at one store, which names it
    without a message between them. After its end, what was found last holds.
    """
    spec = this_rank.spec
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if spec is None or c10d is None:
        return ""
    world: Any = getattr(c10d, "_world", None)
    main = getattr(world, "default_pg", None)
    if main is None:
        return this_rank.scope
    size = main.size()
    if size == spec.world.world_size:  # in any order: all its ranks have to name it alike
        this_rank.scope = ""
        return ""
    _, store = getattr(world, "pg_map", {}).get(main, (None, None))
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    meets = getattr(store, "port", None) or getattr(store, "path", None) or type(store).__name__
    this_rank.scope = f"of {size} ranks at {meets}"
    return this_rank.scope


def read_groups() -> dict[str, tuple[int, ...]]:
    """Return the members of each process group of this rank; keys as in `Collective.group`.

    Only those whose members are known by their ranks in the launch: a proof needs to know who takes part.
    """
    if _scope():
        return {}
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    names = getattr(world, "pg_names", {})
    members = getattr(world, "pg_group_ranks", {})
    main = getattr(world, "default_pg", None)
    return {
        MAIN_GROUP if group is main else str(names[group]): tuple(sorted(ranks))
        for group, ranks in list(members.items())
        if group in names and (group is main or not this_rank.has_renumbered)
    }


def forget_collectives() -> None:
    """Ignore the collectives so far: the next process group counts its own from 1.

    The recorders keep the entries of destroyed groups, under the same names.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # a rendezvous of something else, such as RPC
        return
    # The summaries of the groups take 0.1 ms, however many entries there are.
    for name, dump in _RECORDERS.items():
        summary = _read(name, functools.partial(dump, includeCollectives=False))
        _forgotten.update((name, group) for group in summary.get("pg_status", {}))


_DUMP_NCCL: Final = "_dump_nccl_trace_json"
_DUMP_OTHERS: Final = "_dump_fr_trace_json"
_NCCL2: Final = "nccl2"
_EVENTS_LIMIT_S: Final = 0.3
_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _read(name: str, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read one recorder; if that fails, return nothing, so that the other one is still read."""
    try:
        content = dump()
    except Exception:  # noqa: BLE001 - a private function of torch may change
        return {}
    content["recorder"] = name
    return content


def _dump(name: str, **options: bool | str) -> dict[str, Any]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, name, None)
    if dump is None or ("backend" in options and not _takes_backend(dump)):
        return {}
    content: dict[str, Any] = json.loads(dump(**options))
    return content


@functools.cache
def _takes_backend(dump: Callable[..., bytes]) -> bool:
    """Whether torch has a recorder for each backend, as since 2.15; it is asked once."""
    try:
        dump(includeCollectives=False, backend=_NCCL2)
    except TypeError:
        return False
    return True


_RECORDERS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    _DUMP_NCCL: functools.partial(_dump, _DUMP_NCCL),
    _DUMP_OTHERS: functools.partial(_dump, _DUMP_OTHERS),
    _NCCL2: functools.partial(_dump, _DUMP_OTHERS, backend=_NCCL2),
}
"""How each recorder is read; before torch 2.15, the last one does not exist."""


def _dump_nccl(*, asks_events: bool) -> dict[str, Any]:
    """Return NCCL's counters, and its entries if the driver replies in time."""

    def query_events() -> dict[str, Any]:
        # By default no thread may query events while another one captures a CUDA graph. This mode
        # lifts that for the calling thread only.
        with contextlib.suppress(OSError, AttributeError):
            exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
            exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        return _dump(_DUMP_NCCL)

    if asks_events and _dump(_DUMP_NCCL, includeCollectives=False).get("pg_status"):
        query = BoundedCall(query_events, name="ddpsafe-recorder")
        if query.wait(_EVENTS_LIMIT_S):
            return query.result()
    return _dump(_DUMP_NCCL, includeCollectives=False)


def _from_counters(content: dict[str, Any]) -> tuple[Collective, ...]:
    """Return the collectives of the group of all ranks, the first that was made, from its counters."""
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
        _queued[first] = (queued, time.time_ns())  # torch records no time with the counters
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
"""For each NCCL group, the last number that was seen as queued, and when it was first seen."""


def _from_entries(
    content: dict[str, Any], *, beside: dict[str, Any] | None = None
) -> dict[str, dict[int, Collective]]:
    """Return the entries of each group, by their number.

    Args:
        content: The dump of a recorder.
        beside: NCCL's dump, if `content` is the other recorder's: a group that is in both counts its
            collectives separately in each.
    """
    entries = content.get("entries", [])
    if not entries and content.get("recorder") == _DUMP_NCCL:
        return {MAIN_GROUP: {call.number: call for call in _from_counters(content)}}
    of_nccl = (beside or {}).get("pg_config", {})
    # A script may destroy a group and make one of the same name: only the newest counts.
    newest = {_group_key(entry): entry.get("pg_id") for entry in entries}
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL no group has a name, and each has a second one for torch's checks.
    # Known is the first one, that of all ranks.
    newest |= {
        key: min(entry.get("pg_id", 0) for entry in entries if _group_key(entry) == key)
        for key in newest
        if not any(key[:2])
    }
    groups: dict[str, dict[int, Collective]] = defaultdict(dict)
    for entry in entries:
        is_newest = entry.get("pg_id") == newest[_group_key(entry)]
        is_forgotten = (content.get("recorder"), str(entry.get("pg_id"))) in _forgotten
        if is_newest and not is_forgotten and not entry.get("is_p2p"):
            name, number = entry["profiling_name"], int(entry["collective_seq_id"])
            # All ranks of a group know it by this name; most groups have no description.
            short, description = entry["process_group"]
            label = MAIN_GROUP if description == MAIN_GROUP or not short else short
            if short in of_nccl:
                label += f" ({name.partition(':')[0]})"
            counters = content.get("pg_status", {}).get(str(entry.get("pg_id")), {})
            is_done = entry["retired"] or entry.get("state") == "completed"
            # The recorder never retires a coalesced call that was captured in a CUDA graph.
            is_done |= name.endswith("coalesced") and number <= int(
                counters.get("last_completed_collective", 0)
            )
            # gloo's calls have begun when they are recorded. NCCL's are queued on a stream until an
            # event shows that they have begun.
            has_begun = entry.get("state") == "started" or not name.startswith("nccl")
            collective = Collective(
                group=label,
                number=number,
                name=name,
                sizes=str(entry["input_sizes"]),
                state="completed" if is_done else "started" if has_begun else "queued",
                entered_ns=int(entry.get("time_created_ns", 0)),
                dtypes=", ".join(map(_name_of_dtype, entry.get("input_dtypes", ()))),
                numel=sum(math.prod(sizes) for sizes in entry["input_sizes"]),
                timeout_s=int(entry.get("timeout_ms", 0)) / 1000,
                thread_id=int(entry.get("thread_id", 0)),
            )
            # The members of a coalesced call never complete. The entry of the whole call has the same
            # number, comes last and replaces theirs.
            groups[collective.group][collective.number] = collective
    return groups


_DTYPES: Final = {
    "Byte": "uint8",
    "Char": "int8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def _name_of_dtype(scalar_type: str) -> str:
    """Return a dtype as torch spells it in Python: ``float64`` for Double."""
    name = _DTYPES.get(scalar_type, scalar_type.lower())
    dtype = getattr(sys.modules["torch"], name, scalar_type)
    return str(dtype).removeprefix("torch.")


def _select_relevant(groups: dict[str, dict[int, Collective]]) -> tuple[Collective, ...]:
    """Return the entries around the first incomplete one of each group, and the last ones."""
    selected: list[Collective] = []
    for group in groups.values():
        # The last ones too: with NCCL, a rank queues collectives far ahead of the incomplete one.
        calls = list(group.values())
        first = next((index for index, call in enumerate(calls) if not call.done), len(calls))
        if len(calls) - first <= _KEPT_AHEAD:
            selected += calls[max(0, first - _KEPT_BEFORE) :]
        else:
            selected += calls[max(0, first - _KEPT_BEFORE) : first + _KEPT_AHEAD]
            selected += calls[-_KEPT_BEFORE:]
    return tuple(selected)


def _group_key(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the name of an entry's group, with the backend: a group of two has an id for each."""
    backend = entry["profiling_name"].partition(":")[0]
    return (*entry["process_group"], backend)
