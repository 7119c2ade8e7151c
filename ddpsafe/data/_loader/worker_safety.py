"""Finds what in a dataset must not cross into a worker process, and reports where it is.

Workers start as torch starts them, with or without ddpsafe: forked on Linux up to Python 3.13,
even if CUDA is initialized. The start method is never changed; before a fork, what a worker would
receive is compared with a table of kinds. Objects may come from any library, so inspecting one may
raise anything.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import gc
import itertools
import os
import pickle
import sqlite3
import stat
import sys
import threading
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.multiprocessing as mp

from ddpsafe._errors import Explanation
from ddpsafe._stdlib_private import has_started, is_fed, standard_streams
from ddpsafe._wire import payload
from ddpsafe._wire.exception_facts import is_internal, package_of
from ddpsafe.data.errors import DataWarning, UnsafeWorkersError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
Severity = Literal["unsafe", "caution", "memory"]
WorkerSafety = Literal["error", "warn", "off"]


def _is_open_file(item: Any) -> bool:
    """Return whether a file is open for reading, with a position that a fork would share."""
    if _is_standard_stream(item) or item.closed or not item.readable():
        return False
    try:
        number = item.fileno()
        # Character devices have no position to share: a terminal, /dev/null, /dev/urandom.
        return number > _LAST_STANDARD_FD and not stat.S_ISCHR(os.fstat(number).st_mode)
    except (OSError, ValueError):
        return False


def _is_standard_stream(item: object) -> bool:
    return any(item is stream for stream in standard_streams())


def _is_open_archive(item: Any) -> bool:
    # An archive shares the position of the file below it; one in memory is copied by a fork.
    below = getattr(item, "fileobj", getattr(item, "fp", None))
    reads = item.mode not in {"w", "x"} and not getattr(item, "closed", False)
    return reads and below is not None and _is_open_file(below)


def _is_open_database(item: Any) -> bool:
    connection = item.connection if isinstance(item, sqlite3.Cursor) else item
    try:
        connection.total_changes  # noqa: B018 - raises where the connection is closed
    except sqlite3.ProgrammingError as error:
        return "closed" not in str(error)  # else another thread made it, and it is open
    return True


def _is_open(item: Any) -> bool:
    """Return whether a library's object is open: libraries have some names for it in common."""
    for name in ("closed", "is_closed", "_closed", "isopen", "isOpened", "is_open", "valid"):
        value = getattr(item, name, None)
        value = value() if callable(value) else value
        if isinstance(value, bool | int):
            return bool(value) is not name.endswith("closed")
    return True


def _answers(call: Callable[[Any], object]) -> Callable[[Any], bool]:
    """Return the check of an object that has no such name: whether a call to it does not raise."""

    def is_open(item: Any) -> bool:
        try:
            call(item)
        except AttributeError:
            return True
        except Exception:  # noqa: BLE001 - each library raises an error of its own
            return False
        return True

    return is_open


def _never(_: object) -> bool:
    return False


class _Kind(NamedTuple):
    """Objects of some classes of a package, as the names of their classes or bases say.

    Attributes:
        package: The top-level package; it may not be installed.
        is_shared: Whether workers would share such an object, or copy it, if there is one.
        what: How one is called; by default by its package and class.
        severity: As in `WorkerHazard`.
        is_searched: Whether what it holds counts too, if it is harmless itself.
    """

    package: str
    classes: str
    is_shared: Callable[[Any], object] = _is_open
    what: str = "{package}.{name}"  # or of the object itself, as {item.device}
    severity: Severity = "unsafe"
    fix: str = "Open it in the worker: ddpsafe.data.PerProcess(factory, *args)."
    is_searched: bool = True


_LAST_STANDARD_FD: Final = 2
_BIG_LIST: Final = 100_000
_IN_THE_WORKER: Final = (
    "Make it in the worker: ddpsafe.data.PerProcess(threading.Lock), for example."
)
_opaque: Final = functools.partial(_Kind, is_shared=_never, is_searched=False)

KINDS: Final = (
    _Kind("io", "IOBase", _is_open_file, "open file"),
    _Kind("_io", "_IOBase", _is_open_file, "open file", is_searched=False),  # the raw file below is the same
    _Kind("tempfile", "SpooledTemporaryFile", _never),  # its fileno() would write it to disk
    _Kind("socket", "socket", lambda item: item.fileno() != -1, "open socket"),
    _Kind("zipfile", "ZipFile", _is_open_archive, "open {name}", is_searched=False),
    _Kind("tarfile", "TarFile", _is_open_archive, "open {name}", is_searched=False),
    _Kind("sqlite3", "Connection Cursor", _is_open_database, "sqlite3 {name}"),
    _Kind("concurrent", "ThreadPoolExecutor ProcessPoolExecutor", has_started, "started {name}"),
    _Kind("multiprocessing", "Pool", is_fed, "started {name}"),
    _Kind("_thread", "lock RLock", bool, "{name}", "caution", _IN_THE_WORKER),
    _Kind("threading", "Thread", bool, "{name}", "caution", _IN_THE_WORKER),
    _Kind("builtins", "generator", bool, "generator", "caution", _IN_THE_WORKER),
    _Kind("builtins", "list dict", lambda item: len(item) >= _BIG_LIST, "{name} of {size} Python objects",
        "memory", "Each worker copies it while it reads: use ddpsafe.data.PackedList or an array."),
    _Kind("torch", "Tensor", lambda item: item.is_cuda, "CUDA tensor on {item.device}", fix="Keep data on "
        "the CPU and move batches to the device in the training loop.", is_searched=False),
    _Kind("torch", "PyTorchFileReader"),
    _Kind("h5py", "File Group Dataset FileID GroupID DatasetID AttrID", bool),
    _Kind("builtins", "Environment", _answers(lambda item: item.path()), "lmdb.{name}"),  # lmdb's C
    _Kind("builtins", "Transaction", _answers(lambda item: item.id()), "lmdb.{name}"),  # extension leaves
    _Kind("builtins", "Cursor", _answers(lambda item: item.key()), "lmdb.{name}"),  # their module out
    _Kind("lmdb", "Environment Transaction Cursor"),
    _Kind("plyvel", "DB"),
    _Kind("_gdbm", "gdbm"),
    _Kind("_dbm", "dbm"),
    _Kind("tables", "File Node"),
    _Kind("netCDF4", "Dataset Variable"),
    _Kind("tiledb", "Array"),
    _Kind("av", "Container", _answers(lambda item: item.flags)),
    _Kind("cv2", "VideoCapture"),
    _Kind("decord", "VideoReader"),
    _Kind("torchcodec", "VideoDecoder"),
    _Kind("soundfile", "SoundFile"),
    _Kind("pyarrow", "MemoryMappedFile BufferReader", _never),  # they have no position in a file
    _Kind("pyarrow", "NativeFile", lambda item: _is_open(item) and item.readable()),
    _Kind("zstandard", "ZstdDecompressionReader"),
    _Kind("rasterio", "DatasetReader"),
    _Kind("osgeo", "Dataset"),
    _Kind("openslide", "OpenSlide"),
    _Kind("pysam", "AlignmentFile FastaFile VariantFile"),
    _Kind("psycopg2", "connection cursor"),
    _Kind("psycopg", "Connection"),
    _Kind("pymysql", "Connection"),
    _Kind("MySQLdb", "Connection"),
    _Kind("pymongo", "MongoClient"),
    _Kind("redis", "Redis"),
    _Kind("duckdb", "DuckDBPyConnection", _answers(lambda item: item.query_progress())),
    _Kind("_duckdb", "DuckDBPyConnection", _answers(lambda item: item.query_progress())),
    _Kind("grpc", "Channel", _answers(lambda item: getattr(item, "_channel", item).check_connectivity_state(
        False  # noqa: FBT003 - grpc's signature
    ))),
    _Kind("zmq", "Socket Context"),
    # What a worker reads nothing from: what only writes, code, generators of random numbers.
    _opaque("builtins", "type module code frame"),
    _opaque("weakref", "ReferenceType"),
    _opaque("torch", "Generator SummaryWriter"),
    _opaque("logging", "Logger LoggerAdapter Handler"),
    _opaque("pathlib", "PurePath"),
    _opaque("enum", "Enum"),
    _opaque("re", "Pattern"),
    _opaque("numpy", "Generator RandomState"),
    _opaque("random", "Random"),
    _opaque("ddpsafe", "PerProcess"),
    _opaque("tensorboardX", "SummaryWriter"),
    _opaque("wandb", "Run"),
    _opaque("loguru", "Logger"),
    _opaque("tqdm", "tqdm"),
    _opaque("rich", "Console"),
)  # fmt: skip
"""What workers would share or copy, and what is harmless. An object is of the first of its bases that is
here. Each handle has a position, a session or threads that a fork would share or lose."""

_BY_NAME: Final = {(kind.package, name): kind for kind in KINDS for name in kind.classes.split()}


def _cached(function: Callable[[type], T]) -> Callable[[type], T]:
    return functools.lru_cache(maxsize=4096)(function)


@_cached
def _kind_of(cls: type) -> _Kind | None:
    for base in cls.__mro__:
        kind = _BY_NAME.get((str(base.__module__).partition(".")[0], base.__name__))
        if kind is not None:
            return kind
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHazard:
    """Something in a dataset that must not be inherited by, or sent to, a worker process.

    Attributes:
        path: Where it is, e.g. ``dataset.readers[0].file``.
        kind: What it is, e.g. ``"open file"``.
        severity: ``"unsafe"``: wrong data or a crash. ``"caution"``: may fail or hang.
            ``"memory"``: correct, but each worker's copy grows.
        fix: What to do instead.
    """

    path: str
    kind: str
    severity: Severity
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}. {self.fix}"


def _find_hazard(item: Any) -> tuple[_Kind, str] | None:
    """Return the kind of an object that workers would share, and how it is called; else ``None``."""
    with contextlib.suppress(Exception):  # an object of any library may raise when inspected
        # Its real type: isinstance() also reads __class__, which a proxy overrides or raises from.
        kind = _kind_of(type(item))
        if kind is not None and kind.is_shared(item):
            size = len(item) if kind.severity == "memory" else 0
            name = type(item).__name__
            return kind, kind.what.format(package=kind.package, name=name, item=item, size=size)
    return None


Part = tuple[object, Any]
"""How an object refers to another one, as text or as the key of a subscript in a tuple; and the other."""

_MAX_OBJECTS: Final = 100_000
_PARTS_PER_TURN: Final = 200
_MAX_KEY_CHARS: Final = 40
_PLAIN: Final = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(...)}
)
_SEQUENCES: Final = (list, tuple, set, frozenset, collections.deque)
_CONTAINERS: Final = frozenset({dict, np.ndarray, *_SEQUENCES})
_NAMED_PARTS: Final = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
}
# What a DataLoader worker calls.
_ENTRIES: Final = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")


def find_handles(root: object, *, name: str) -> Iterator[WorkerHazard]:
    """Look at what workers would receive with an object, nearest first; yield what is a hazard.

    It ends after 100,000 objects, not counting numbers and strings.
    """
    seen: dict[int, tuple[object, int, object]] = {}  # object, who refers to it, and how
    inside: set[int] = set()  # the parts of a hazard that was already yielded
    waiting: collections.deque[tuple[int, Iterator[Part]]] = collections.deque()
    waiting.append((0, iter([(name, root)])))
    while waiting and len(seen) < _MAX_OBJECTS:
        owner, parts = waiting.popleft()
        turn = 0
        for how, item in itertools.islice(parts, _PARTS_PER_TURN):
            turn += 1
            if type(item) in _PLAIN or id(item) in seen:
                continue
            seen[id(item)] = item, owner, how
            found = None if owner in inside else _find_hazard(item)
            if owner in inside or (found is not None and found[0].severity == "unsafe"):
                inside.add(id(item))
            if found is not None:
                path = _path_of(id(item), seen)
                yield WorkerHazard(
                    path=path, kind=found[1], severity=found[0].severity, fix=found[0].fix
                )
            waiting.append((id(item), iter(parts_of(item))))
        # The rest of a long container comes later, so that it does not crowd out near objects.
        if turn == _PARTS_PER_TURN:
            waiting.append((owner, parts))


def _path_of(number: int, seen: dict[int, tuple[object, int, object]]) -> str:
    path = ""
    while number:
        _, number, how = seen[number]
        path = _step(how) + path
    return path


def _step(how: object) -> str:
    if isinstance(how, str):
        return how
    key = how[0]  # type: ignore[index]  # a tuple
    text = repr(key) if type(key) in _PLAIN else f"<{type(key).__name__}>"
    return f"[{text if len(text) <= _MAX_KEY_CHARS else f'{text[:_MAX_KEY_CHARS]}...'}]"


def parts_of(item: Any) -> list[Part]:
    """Return what an object refers to; nothing if it cannot be inspected."""
    with contextlib.suppress(Exception):  # an object of any library may raise anything
        kind = _kind_of(type(item))
        if (kind is None or kind.is_searched) and not _is_standard_stream(item):
            return _parts_of(item, type(item))
    return []


def _parts_of(item: Any, cls: type) -> list[Part]:
    if issubclass(cls, types.FunctionType):
        return _parts_of_function(item)
    parts: list[Part] = []
    if issubclass(cls, dict):
        parts += [((key,), value) for key, value in list(item.items()) if not _is_plain(value)]
    elif issubclass(cls, (np.ndarray, *_SEQUENCES)):
        has_objects = cls is not np.ndarray or item.dtype == object
        entries = list(item.flat if issubclass(cls, np.ndarray) else item) if has_objects else []
        if not set(map(type, entries)) <= _PLAIN:
            parts += [((n,), value) for n, value in enumerate(entries) if not _is_plain(value)]
    elif cls is types.GeneratorType and item.gi_frame is not None:
        parts += _attributes(".<locals>", item.gi_frame.f_locals)
    if cls in _CONTAINERS:
        return parts
    own = vars_of(item)
    parts += _attributes("", own)
    parts += [(f".{name}", getattr(item, name)) for name in _NAMED_PARTS.get(cls, ())]
    for name, member in _slots_of(cls).items():
        with contextlib.suppress(AttributeError):  # it is empty
            parts.append((f".{name}", member.__get__(item, cls)))
    if is_user_class(cls):
        inherited = _class_attributes(cls)
        parts += _attributes("", {name: inherited[name] for name in inherited if name not in own})
        for function in _worker_methods(cls):
            of_function = _parts_of_function(function)
            parts += [(f".{function.__name__}{how}", part) for how, part in of_function]
    # csv.reader, map, an iterator, a cache: only the garbage collector knows what C code holds.
    # Those of pyarrow use pread.
    if not issubclass(cls, (dict, np.ndarray, *_SEQUENCES)) and not cls.__module__.startswith(
        "pyarrow."
    ):
        held = [part for part in gc.get_referents(item) if part is not own]
        parts += [(f".<{type(part).__name__}>", part) for part in held]
    return parts


def _attributes(place: str, values: dict[str, Any]) -> list[Part]:
    return [(f"{place}.{name}", value) for name, value in list(values.items())]


def _is_plain(value: Any) -> bool:
    kind = type(value)
    # The garbage collector does not track tuples and dicts that hold only plain values.
    return kind in _PLAIN or (kind in {tuple, dict} and not gc.is_tracked(value))


def vars_of(item: Any) -> dict[str, Any]:
    """Return the real ``__dict__`` of an instance; empty if it has none."""
    owner = threading.local if issubclass(type(item), threading.local) else object
    try:
        own = owner.__getattribute__(item, "__dict__")
    except Exception:  # noqa: BLE001 - an object of any library may raise anything
        return {}
    return own if isinstance(own, dict) else {}


@_cached
def _slots_of(cls: type) -> dict[str, types.MemberDescriptorType]:
    return {
        name: member
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }


def _parts_of_function(function: types.FunctionType) -> list[Part]:
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    parts: list[Part] = [
        (f".<closure>.{name}", cell.cell_contents)
        for name, cell in cells
        if cell != types.CellType()
    ]
    defaults: dict[object, Any] = dict(enumerate(function.__defaults__ or ()))
    defaults.update(function.__kwdefaults__ or {})
    parts += [(f".<default>[{name!r}]", value) for name, value in defaults.items()]
    for name in _global_names(code) if _is_user_file(code.co_filename) else ():
        value = function.__globals__.get(name)
        parts.append((f".<global>.{name}", value))
        if isinstance(value, type) and is_user_class(value):
            parts += _attributes(f".<global>.{name}", _class_attributes(value))
    return parts


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function reads or sets, including those of nested functions."""
    names = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"}
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


def _is_user_file(filename: str) -> bool:
    """Return whether code is the user's, as in a notebook, and not a library's or ddpsafe's."""
    return not package_of(filename) and not is_internal(filename)


@_cached
def is_user_class(cls: type) -> bool:
    """Return whether a class is the user's."""
    if cls.__module__ in {"__main__", "__mp_main__"}:
        return True
    filename = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return isinstance(filename, str) and _is_user_file(filename)


def _class_attributes(cls: type) -> dict[str, Any]:
    """Return the data attributes of the user's classes, without functions and descriptors."""
    attributes: dict[str, Any] = {}
    for base in filter(is_user_class, cls.__mro__):
        for name, value in vars(base).items():
            is_code = isinstance(value, types.FunctionType) or hasattr(type(value), "__get__")
            is_cache = type(value).__name__ == "_lru_cache_wrapper"
            if is_cache or not (is_code or name.startswith("__")):
                attributes.setdefault(name, value)
    return attributes


@_cached
def _worker_methods(cls: type) -> tuple[types.FunctionType, ...]:
    """Return the user's methods that reading a sample may call, found by the names they use."""
    methods: dict[str, types.FunctionType] = {}
    waiting = list(_ENTRIES)
    while waiting:
        name = waiting.pop()
        if name in methods or name == "__init__":
            continue
        member = next((vars(b)[name] for b in cls.__mro__ if name in vars(b)), None)
        for _ in range(3):  # unwrap a property, a class method or decorators
            if not isinstance(member, types.FunctionType):
                inner = (
                    getattr(member, each, None) for each in ("fget", "__wrapped__", "__func__")
                )
                member = next(filter(None, inner), None)
        if isinstance(member, types.FunctionType) and _is_user_file(member.__code__.co_filename):
            methods[name] = member
            waiting.extend(member.__code__.co_names)
    return tuple(methods.values())


def check_worker_safety(dataset: object) -> tuple[WorkerHazard, ...]:
    """Find what a dataset holds that must not be inherited by, or sent to, workers.

    Files open for reading, sockets, databases, started pools and CUDA tensors are shared by a
    fork and cannot be pickled for a spawn. Locks may be inherited locked. Lambdas cannot be
    pickled. Long lists are copied page by page as their reference counts change. The search
    covers attributes, containers, closures, class attributes, and the globals that the user's
    own methods read. `PerProcess`, loggers, writers and closed handles are safe.

    Args:
        dataset: The dataset, or anything else that is passed to workers.

    Returns:
        The hazards found, the worst first.
    """
    hazards = list(find_handles(dataset, name="dataset"))
    if not any(hazard.severity == "unsafe" for hazard in hazards):
        where = find_unpicklable(dataset, name="dataset")
        if where is not None and all(hazard.path != where[0] for hazard in hazards):
            path, error = where
            hazards.append(
                WorkerHazard(
                    path=path,
                    kind=f"cannot be pickled ({error})",
                    severity="caution",
                    fix="Spawned workers cannot receive it: use a function or class at module "
                    "level.",
                )
            )
    order = {"unsafe": 0, "caution": 1, "memory": 2}
    return tuple(sorted(hazards, key=lambda hazard: order[hazard.severity]))


def start_method_of(requested: Any) -> str:
    """Return how a loader with this ``multiprocessing_context`` starts its workers."""
    if requested is None:
        # get_start_method() without allow_none would fix the method for the whole process.
        return str(mp.get_start_method(allow_none=True) or mp.get_all_start_methods()[0])
    return str(requested if isinstance(requested, str) else requested.get_start_method())


def refuse_unsafe_workers(
    parts: dict[str, object], *, requested: Any, safety: WorkerSafety
) -> None:
    """Raise or warn if forked workers would share an open handle with this process.

    `parts` are what the workers receive, by name: the dataset, collate_fn, worker_init_fn.

    Raises:
        UnsafeWorkersError: The dataset holds an open handle.
    """
    if safety == "off":
        return
    if start_method_of(requested) != "fork":
        return
    unsafe = [
        hazard
        for name, part in parts.items()
        for hazard in find_handles(part, name=name)
        if hazard.severity == "unsafe"
    ]
    if unsafe:
        text = Explanation(
            f"The workers would share an open handle with this process: {unsafe[0].path} "
            f"({unsafe[0].kind}).",
            cause="it was opened before the workers start. After a fork they share its position, "
            "so they read each other's records without an error.",
            fix="open it in the worker: self.file = ddpsafe.data.PerProcess(open, path, 'rb'), then "
            "self.file.get(). If the dataset pickles: multiprocessing_context='forkserver'. If "
            "worker_init_fn reopens it: worker_safety='off'.",
            details=[str(hazard) for hazard in unsafe[1:]],
        )
        if safety == "error":
            raise UnsafeWorkersError(text, paths=tuple(hazard.path for hazard in unsafe))
        warnings.warn(str(text), DataWarning, stacklevel=4)


def explain_pickling(error: Exception, parts: dict[str, object]) -> UnsafeWorkersError | None:
    """Return the error that names the part which spawned workers cannot receive, if there is one."""
    for name, part in parts.items():
        where = find_unpicklable(part, name=name)
        if where is not None:
            path, reason = where
            return UnsafeWorkersError(
                Explanation(
                    f"{path} cannot be sent to the workers: {reason}.",
                    cause=f"spawned workers receive everything pickled ({type(error).__name__}).",
                    fix="open resources in a ddpsafe.data.PerProcess; use functions and classes "
                    "at module level instead of lambdas; or multiprocessing_context='fork'.",
                ),
                paths=(path,),
            )
    return None


def find_unpicklable(root: object, *, name: str) -> tuple[str, str] | None:
    """Return the path and the error of the innermost part that a worker could not receive."""
    found = payload.find_unpicklable(root, name, dumps=_probe)
    return found and (found[0], f"{type(found[1]).__name__}: {found[1]}")


def _probe(item: object) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        _ProbingPickler(nowhere, protocol=pickle.HIGHEST_PROTOCOL).dump(item)


class _ProbingPickler(pickle.Pickler):
    """Fails where pickling would, and also where only the import in the worker would fail."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor or (type(obj) is np.ndarray and not obj.dtype.hasobject):
            # They can be pickled; copying hundreds of megabytes would show no more.
            return (int, ())
        is_here = getattr(obj, "__module__", None) == "__main__"
        if is_here and not hasattr(sys.modules["__main__"], "__file__"):
            msg = "it is defined in a notebook or at a prompt, where a new process cannot import it"
            raise pickle.PicklingError(msg)
        return NotImplemented
