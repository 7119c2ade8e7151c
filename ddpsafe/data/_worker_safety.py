"""What in a dataset must not cross into a worker process, and where it sits."""

from __future__ import annotations

import collections
import functools
import io
import pickle
import socket
import sqlite3
import sys
import tarfile
import threading
import types
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from ddpsafe.data._per_process import PerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

Severity = Literal["unsafe", "caution", "memory"]

_MOST_OBJECTS: Final = 20_000
_MOST_ITEMS: Final = 200
_BIG_LIST: Final = 100_000
_DEEPEST: Final = 8
_LAST_STANDARD_FD: Final = 2

# Handles of libraries that need not be installed, by the first part of their module and name.
_FOREIGN_HANDLES: Final = {
    ("h5py", "File"),
    ("h5py", "Group"),
    ("h5py", "Dataset"),
    ("lmdb", "Environment"),
    ("lmdb", "Transaction"),
    ("lmdb", "Cursor"),
    ("tables", "File"),
    ("netCDF4", "Dataset"),
    ("av", "InputContainer"),
    ("cv2", "VideoCapture"),
    ("decord", "VideoReader"),
    ("psycopg2", "connection"),
    ("pymongo", "MongoClient"),
    ("redis", "Redis"),
}
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
_PLAIN: Final = (str, bytes, bytearray, int, float, complex, bool, type(None), range, slice)
_OPAQUE: Final = (type, types.ModuleType, types.BuiltinFunctionType, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHazard:
    """Something in a dataset that does not survive the way into a worker process.

    Attributes:
        path: Where it is, e.g. ``dataset.readers[0].file``.
        kind: What it is, e.g. ``"open file"``.
        severity: ``"unsafe"``: wrong data or a crash. ``"caution"``: may fail or hang.
            ``"memory"``: right, but each worker's copy grows.
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

    Open files, sockets, databases and CUDA tensors are shared by a fork and cannot be
    pickled for a spawn; locks may be inherited locked; lambdas cannot be pickled; long lists
    are copied page by page as their reference counts change. `PerProcess` is safe and skipped.

    Args:
        dataset: The dataset, or anything else that is handed to workers.
        name: What to call it in paths.

    Returns:
        What was found, the worst first; empty if nothing was.
    """
    found = list(find_handles(dataset, name=name))
    if not any(hazard.severity == "unsafe" for hazard in found):
        where = find_unpicklable(dataset, name=name)
        if where is not None and all(hazard.path != where[0] for hazard in found):
            found.append(_cannot_pickle(*where))
    order = {"unsafe": 0, "caution": 1, "memory": 2}
    return tuple(sorted(found, key=lambda hazard: order[hazard.severity]))


def find_handles(root: object, *, name: str) -> Iterator[WorkerHazard]:
    """Walk attributes, containers and closures; yield what is a hazard by its type."""
    seen: set[int] = set()
    waiting = collections.deque([(name, root)])
    while waiting and len(seen) < _MOST_OBJECTS:
        path, item = waiting.popleft()
        if isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        hazard = _judge(path, item)
        if hazard is not None:
            yield hazard
        if hazard is None or hazard.severity == "memory":
            waiting.extend(_parts(path, item))


def find_unpicklable(root: object, *, name: str, depth: int = 0) -> tuple[str, str] | None:
    """Return the path and the error of the innermost part that cannot be pickled."""
    error = _pickling_error(root)
    if error is None:
        return None
    for path, part in _parts(name, root) if depth < _DEEPEST else ():
        inner = find_unpicklable(part, name=path, depth=depth + 1)
        if inner is not None:
            return inner
    return name, error


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing: pickling tells whether it works, at no memory."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


class _Probe(pickle.Pickler):
    """Fails where pickling would, and for what would only fail to be imported by a worker."""

    def reducer_override(self, obj: Any) -> Any:
        is_here = getattr(obj, "__module__", None) == "__main__"
        if is_here and not hasattr(sys.modules["__main__"], "__file__"):
            msg = "it is defined in a notebook or at a prompt, where a new process cannot import it"
            raise pickle.PicklingError(msg)
        return NotImplemented


def _pickling_error(item: object) -> str | None:
    try:
        _Probe(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(item)
    except Exception as error:  # noqa: BLE001 - a __reduce__ may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _cannot_pickle(path: str, error: str) -> WorkerHazard:
    return WorkerHazard(
        path=path,
        kind=f"cannot be pickled ({error})",
        severity="caution",
        fix="Workers that are spawned cannot receive it: use a function or class at module level.",
    )


def _judge(path: str, item: object) -> WorkerHazard | None:
    kind = _handle_kind(item)
    if kind is not None:
        return WorkerHazard(
            path=path,
            kind=kind,
            severity="unsafe",
            fix="Open it in the worker: ddpsafe.data.PerProcess(factory, *args).",
        )
    if isinstance(item, torch.Tensor) and item.is_cuda:
        return WorkerHazard(
            path=path,
            kind=f"CUDA tensor on {item.device}",
            severity="unsafe",
            fix="Keep data on the CPU and move batches to the device in the training loop.",
        )
    if isinstance(item, (*_LOCKS, threading.Thread, types.GeneratorType)):
        return WorkerHazard(
            path=path,
            kind=type(item).__name__,
            severity="caution",
            fix="Make it in the worker: ddpsafe.data.PerProcess(threading.Lock), for example.",
        )
    if isinstance(item, list | dict) and len(item) >= _BIG_LIST:
        return WorkerHazard(
            path=path,
            kind=f"{type(item).__name__} of {len(item)} Python objects",
            severity="memory",
            fix="Each worker copies it while it reads: use ddpsafe.data.PackedList or an array.",
        )
    return None


def _handle_kind(item: object) -> str | None:
    if isinstance(item, io.IOBase):
        return "open file" if _is_open_file(item) else None
    if isinstance(item, socket.socket):
        return "open socket" if item.fileno() != -1 else None
    if isinstance(item, zipfile.ZipFile | tarfile.TarFile):
        return f"open {type(item).__name__}" if getattr(item, "fp", True) is not None else None
    if isinstance(item, sqlite3.Connection | sqlite3.Cursor):
        return f"sqlite3 {type(item).__name__}"
    kind = type(item)
    package = kind.__module__.split(".", maxsplit=1)[0]
    if package == "builtins" and "lmdb" in sys.modules:
        package = "lmdb"  # its C extension does not say where its types are from
    if (package, kind.__name__) in _FOREIGN_HANDLES:
        return f"{package}.{kind.__name__}"
    return None


def _is_open_file(item: io.IOBase) -> bool:
    try:
        return not item.closed and item.fileno() > _LAST_STANDARD_FD
    except (OSError, ValueError):
        return False


def _parts(path: str, item: Any) -> list[tuple[str, Any]]:
    if isinstance(item, (*_PLAIN, *_OPAQUE, PerProcess)):
        return []
    if isinstance(item, dict):
        return [(f"{path}[{key!r}]", value) for key, value in _some(item.items())]
    if isinstance(item, list | tuple | set | frozenset):
        return [(f"{path}[{index}]", value) for index, value in enumerate(_some(item))]
    if isinstance(item, functools.partial):
        return [(f"{path}.func", item.func), *_parts(f"{path}.args", [*item.args])]
    return _closure(path, item) if isinstance(item, types.FunctionType) else _attributes(path, item)


def _some(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_MOST_ITEMS), strict=False)]


def _closure(path: str, function: types.FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return [
        (f"{path}.<closure>.{name}", cell.cell_contents)
        for name, cell in cells
        if cell != types.CellType()
    ]


def _attributes(path: str, item: object) -> list[tuple[str, Any]]:
    parts = dict(getattr(item, "__dict__", {}))
    if isinstance(item, types.MethodType):
        parts["__self__"] = item.__self__
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if isinstance(getattr(kind, slot, None), types.MemberDescriptorType):
                parts[slot] = getattr(item, slot, None)
    return [(f"{path}.{name}", value) for name, value in parts.items()]
