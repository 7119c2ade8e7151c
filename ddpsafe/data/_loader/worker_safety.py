"""Finds what in a dataset must not cross into a worker process, and reports where it is.

Workers start as torch starts them, with or without ddpsafe: forked on Linux up to Python 3.13,
even if CUDA is initialized. The start method is never changed; before a fork, the dataset is
searched for what the processes would share.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import multiprocessing.pool
import os
import pickle
import socket
import sqlite3
import stat
import sys
import tarfile
import tempfile
import threading
import types
import warnings
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
import torch.multiprocessing as mp

from ddpsafe._errors import Explanation
from ddpsafe._stdlib_private import has_started, is_fed
from ddpsafe.data._loader.reachable import is_standard_stream, parts_of, reachable
from ddpsafe.data.errors import DataWarning, UnsafeWorkersError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Severity = Literal["unsafe", "caution", "memory"]
WorkerSafety = Literal["error", "warn", "off"]

_BIG_LIST: Final = 100_000
_MAX_DEPTH: Final = 8
_LAST_STANDARD_FD: Final = 2

# By top-level package: classes, or their bases. By name, since the libraries may not be installed.
# Each keeps a position, a session or threads that a fork would share or lose.
_LIBRARY_HANDLES: Final[dict[str, set[str]]] = {
    "h5py": {"File", "Group", "Dataset", "FileID", "GroupID", "DatasetID", "AttrID"},
    "lmdb": {"Environment", "Transaction", "Cursor"},
    "plyvel": {"DB"},
    "_gdbm": {"gdbm"},
    "_dbm": {"dbm"},
    "tables": {"File", "Node"},
    "netCDF4": {"Dataset", "Variable"},
    "tiledb": {"Array"},
    "av": {"Container"},
    "cv2": {"VideoCapture"},
    "decord": {"VideoReader"},
    "torchcodec": {"VideoDecoder"},
    "soundfile": {"SoundFile"},
    "pyarrow": {"NativeFile"},
    "zstandard": {"ZstdDecompressionReader"},
    "rasterio": {"DatasetReader"},
    "osgeo": {"Dataset"},
    "openslide": {"OpenSlide"},
    "pysam": {"AlignmentFile", "FastaFile", "VariantFile"},
    "psycopg2": {"connection", "cursor"},
    "psycopg": {"Connection"},
    "pymysql": {"Connection"},
    "MySQLdb": {"Connection"},
    "pymongo": {"MongoClient"},
    "redis": {"Redis"},
    "duckdb": {"DuckDBPyConnection"},
    "_duckdb": {"DuckDBPyConnection"},
    "grpc": {"Channel"},
    "zmq": {"Socket", "Context"},
    "torch": {"PyTorchFileReader"},
}

# Classes without an attribute that tells whether they are closed: a call that raises if they are.
_RAISES_IF_CLOSED: Final[dict[tuple[str, str], Callable[[Any], object]]] = {
    ("av", "Container"): lambda item: item.flags,
    ("lmdb", "Environment"): lambda item: item.path(),
    ("lmdb", "Transaction"): lambda item: item.id(),
    ("lmdb", "Cursor"): lambda item: item.key(),
    ("duckdb", "DuckDBPyConnection"): lambda item: item.query_progress(),
    ("_duckdb", "DuckDBPyConnection"): lambda item: item.query_progress(),
    ("grpc", "Channel"): lambda item: getattr(item, "_channel", item).check_connectivity_state(
        False  # noqa: FBT003 - grpc's signature
    ),
}
# Attributes and methods, and whether an object is closed if they are true.
_TELLS_IF_CLOSED: Final = {
    **dict.fromkeys(("closed", "is_closed", "_closed"), True),
    **dict.fromkeys(("isopen", "isOpened", "is_open", "valid"), False),
}
# pyarrow's files in memory: they have no file position that a fork would share.
_IN_MEMORY: Final = {"MemoryMappedFile", "BufferReader"}
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))


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


def check_worker_safety(dataset: object, *, name: str = "dataset") -> tuple[WorkerHazard, ...]:
    """Find what a dataset holds that must not be inherited by, or sent to, workers.

    Files open for reading, sockets, databases, started pools and CUDA tensors are shared by a
    fork and cannot be pickled for a spawn. Locks may be inherited locked. Lambdas cannot be
    pickled. Long lists are copied page by page as their reference counts change. The search
    covers attributes, containers, closures, class attributes, and the globals that the user's
    own methods read. `PerProcess`, loggers, writers and closed handles are safe.

    Args:
        dataset: The dataset, or anything else that is passed to workers.
        name: What to call it in paths.

    Returns:
        The hazards found, the worst first.
    """
    hazards = list(find_handles(dataset, name=name))
    if not any(hazard.severity == "unsafe" for hazard in hazards):
        where = find_unpicklable(dataset, name=name)
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

    Args:
        parts: What the workers receive, by name: the dataset, collate_fn, worker_init_fn.
        requested: The loader's ``multiprocessing_context``.
        safety: Whether to raise, to warn, or not to search.

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
            raise UnsafeWorkersError(text, paths=[hazard.path for hazard in unsafe])
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
                paths=[path],
            )
    return None


def find_handles(root: object, *, name: str) -> Iterator[WorkerHazard]:
    """Walk what workers would receive; yield what is a hazard by its type."""
    inside: set[int] = set()  # ids of the parts of a hazard that was already yielded
    for path, item in reachable(root, name=name):
        hazard = None if id(item) in inside else _find_hazard(path, item)
        if hazard is not None:
            yield hazard
        if id(item) in inside or (hazard is not None and hazard.severity == "unsafe"):
            inside.update(id(part) for _, part in parts_of(path, item))


def find_unpicklable(root: object, *, name: str, depth: int = 0) -> tuple[str, str] | None:
    """Return the path and the error of the innermost part that cannot be pickled."""
    try:
        _ProbingPickler(_NullFile(), protocol=pickle.HIGHEST_PROTOCOL).dump(root)
    except Exception as raised:  # noqa: BLE001 - a __reduce__ may raise anything
        error = f"{type(raised).__name__}: {raised}"
    else:
        return None
    for path, part in parts_of(name, root) if depth < _MAX_DEPTH else ():
        inner = find_unpicklable(part, name=path, depth=depth + 1)
        if inner is not None:
            return inner
    return name, error


class _NullFile(io.RawIOBase):
    """A file that discards what is written: an attempt to pickle then costs no memory."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


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


def _find_hazard(path: str, item: Any) -> WorkerHazard | None:
    with contextlib.suppress(Exception):  # an object of any library may raise when inspected
        # Its real type: isinstance() also reads __class__, which a proxy overrides or raises from.
        kind = type(item)
        handle = _handle_kind(item)
        if handle is not None:
            return WorkerHazard(
                path=path,
                kind=handle,
                severity="unsafe",
                fix="Open it in the worker: ddpsafe.data.PerProcess(factory, *args).",
            )
        if issubclass(kind, torch.Tensor) and item.is_cuda:
            return WorkerHazard(
                path=path,
                kind=f"CUDA tensor on {item.device}",
                severity="unsafe",
                fix="Keep data on the CPU and move batches to the device in the training loop.",
            )
        if issubclass(kind, (*_LOCKS, threading.Thread, types.GeneratorType)):
            return WorkerHazard(
                path=path,
                kind=kind.__name__,
                severity="caution",
                fix="Make it in the worker: ddpsafe.data.PerProcess(threading.Lock), for example.",
            )
        if issubclass(kind, list | dict) and len(item) >= _BIG_LIST:
            return WorkerHazard(
                path=path,
                kind=f"{kind.__name__} of {len(item)} Python objects",
                severity="memory",
                fix="Each worker copies it while it reads: use ddpsafe.data.PackedList or an array.",
            )
    return None


def _handle_kind(item: Any) -> str | None:
    """Return the kind of open handle; ``None`` if it is closed or only writes, and for others."""
    kind = type(item)
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package == "builtins" and "lmdb" in sys.modules:
            package = "lmdb"  # its C extension leaves __module__ of its types at "builtins"
        if base.__name__ in _LIBRARY_HANDLES.get(package, ()):
            harmless = package == "pyarrow" and (kind.__name__ in _IN_MEMORY or not item.readable())
            raises_if_closed = _RAISES_IF_CLOSED.get((package, base.__name__))
            closed = harmless or _is_closed(item, raises_if_closed)
            return None if closed else f"{package}.{kind.__name__}"
    for base, find_kind in _STANDARD_HANDLES:
        if issubclass(kind, base):
            return find_kind(item)
    return None


def _archive_kind(item: Any) -> str | None:
    # An archive shares the position of the file below it; one in memory is copied by a fork.
    if item.mode in {"w", "x"}:
        return None
    below = item.fp if isinstance(item, zipfile.ZipFile) else item.fileobj
    is_open = below is not None and not getattr(item, "closed", False)
    return f"open {type(item).__name__}" if is_open and _is_shared_file(below) else None


def _database_kind(item: Any) -> str | None:
    connection = item.connection if isinstance(item, sqlite3.Cursor) else item
    try:
        connection.total_changes  # noqa: B018 - raises where the connection is closed
    except sqlite3.ProgrammingError as error:
        if "closed" in str(error):  # else another thread made it, and it is open
            return None
    return f"sqlite3 {type(item).__name__}"


def _executor_kind(item: Any) -> str | None:
    is_pool = isinstance(item, multiprocessing.pool.Pool)
    is_running = is_fed(item) if is_pool else has_started(item)
    return f"started {type(item).__name__}" if is_running else None


# The first base that matches decides.
_STANDARD_HANDLES: Final[tuple[tuple[type, Callable[[Any], str | None]], ...]] = (
    (tempfile.SpooledTemporaryFile, lambda _: None),  # its fileno() would write it to disk
    (io.IOBase, lambda item: "open file" if _is_shared_file(item) else None),
    (socket.socket, lambda item: "open socket" if item.fileno() != -1 else None),
    (zipfile.ZipFile, _archive_kind),
    (tarfile.TarFile, _archive_kind),
    (sqlite3.Connection, _database_kind),
    (sqlite3.Cursor, _database_kind),
    (concurrent.futures.ThreadPoolExecutor, _executor_kind),
    (concurrent.futures.ProcessPoolExecutor, _executor_kind),
    (multiprocessing.pool.Pool, _executor_kind),
)


def _is_shared_file(item: Any) -> bool:
    """Return whether a file is open for reading, with a position that a fork would share."""
    if is_standard_stream(item) or item.closed or not item.readable():
        return False
    try:
        number = item.fileno()
        # Character devices have no position to share: a terminal, /dev/null, /dev/urandom.
        return number > _LAST_STANDARD_FD and not stat.S_ISCHR(os.fstat(number).st_mode)
    except (OSError, ValueError):
        return False


def _is_closed(item: Any, raises_if_closed: Callable[[Any], object] | None) -> bool:
    """Return whether a library's object is closed; each library has its own name for it."""
    if raises_if_closed is not None:
        try:
            raises_if_closed(item)
        except AttributeError:
            return False
        except Exception:  # noqa: BLE001 - each library raises an error of its own
            return True
    for name, if_true in _TELLS_IF_CLOSED.items():
        value = getattr(item, name, None)
        value = value() if callable(value) else value
        if isinstance(value, bool | int):
            return bool(value) is if_true
    return type(item).__module__.startswith("h5py") and not item
