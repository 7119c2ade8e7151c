"""Pickling of the user's functions, arguments, results and exceptions.

What can be imported is pickled by name; what cannot (notebook cells, closures, lambdas) is pickled by
value. Objects that only a process being started can inherit (queues, locks, shared tensors) are passed
beside the bytes, as `multiprocessing` itself would pass them.

Large arrays and tensors are not copied into the pickle (PEP 574). They are written beside it, and a
process that maps the file uses them in place: ranks share the pages until one of them writes.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
import io
import mmap
import pickle
import struct
import sys
import types
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import cloudpickle

from ddpsafe._stdlib_private import serves_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_INHERITED_MODULES: Final = ("multiprocessing.", "torch.multiprocessing.")
_CTYPES: Final = (ctypes.Array, ctypes.Structure, ctypes.Union, *ctypes.c_int.__bases__)
_MAX_SHARED_TENSORS: Final = 200
_MAX_SEARCH_DEPTH: Final = 64
"""A deeper search would exceed Python's recursion limit, and its path would be too long to read."""

_LARGE_BYTES: Final = 1 << 20
"""Memory of this size or more is written beside the pickle; smaller tensors stay resizable."""
_ALIGNMENT: Final = 64
_SPAN: Final = struct.Struct("<QQ")
"""Offset and length of a buffer; the last one has the offset of the table and its number of entries."""

_handles: ContextVar[tuple[object, ...]] = ContextVar("ddpsafe_handles")


class CannotTravelError(pickle.PicklingError):
    """An object has no meaning in another process."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """cloudpickle, but by name where possible, and strict about what must stay in its process."""

    def __init__(self, handles: list[object] | None, *, shares_tensors: bool = False) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5, buffer_callback=self._keep_in_stream)
        self._buffers: list[memoryview] = []
        self._handles = handles
        self._shares_tensors = shares_tensors

    def pickled(self, obj: object) -> Pickled:
        self.dump(obj)
        stream, handles = memoryview(self._file.getvalue()), tuple(self._handles or ())
        return Pickled(stream=stream, buffers=tuple(self._buffers), handles=handles)

    def _keep_in_stream(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE_BYTES:
            return True
        self._buffers.append(raw)
        return False

    def reducer_override(self, obj: Any) -> object:
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            msg = f"an open file ({getattr(obj, 'name', '?')})"
            raise CannotTravelError(msg)
        if _is_tensor(obj) and obj.device.type == "cuda":
            msg = f"a tensor on {obj.device}"
            raise CannotTravelError(msg)
        if type(obj).__module__.startswith(_INHERITED_MODULES):
            inside = (obj, *getattr(obj, "__dict__", {}).values())
            if any(serves_forks(part) for part in inside):
                msg = "it serves forked processes only; make it with multiprocessing.get_context('spawn')"
                raise CannotTravelError(msg)
        if self._shares_tensors and self._handles is not None and _is_tensor(obj):
            # A CPU tensor moves into shared memory, as with torch's own pickler: what a rank writes
            # into it would not reach the caller otherwise, and each rank would have a copy.
            is_plain = obj.layout is sys.modules["torch"].strided and obj.device.type == "cpu"
            has_room = len(self._handles) < _MAX_SHARED_TENSORS
            if is_plain and has_room and obj.untyped_storage().nbytes():
                obj.share_memory_()
        if self._handles is not None and _is_inherited_only(obj):
            self._handles.append(obj)
            return (_handle, (len(self._handles) - 1,))
        if _lives_in_importable_main(obj):
            return obj.__qualname__  # pickle reads a string as "import it by this name"
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.storage.TypedStorage) and _is_large(obj._untyped_storage):  # noqa: SLF001 - as torch's own reducers
                return (_typed_storage, (obj._untyped_storage, obj.dtype))  # noqa: SLF001
            if isinstance(obj, torch.UntypedStorage) and _is_large(obj):
                memory: Any = (ctypes.c_char * obj.nbytes()).from_address(obj.data_ptr())
                memory.owner = obj  # keeps it alive as long as its memory is used
                return (_untyped_storage, (pickle.PickleBuffer(memory),))
        return super().reducer_override(obj)


def _is_large(storage: Any) -> bool:
    return bool(storage.device.type == "cpu" and storage.nbytes() >= _LARGE_BYTES)


def _untyped_storage(memory: Any) -> object:
    torch: Any = importlib.import_module("torch")  # the process that pickled it has torch
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> object:
    torch: Any = importlib.import_module("torch")
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


class _ResultPickler(_Pickler):
    """For results of a rank: its device memory ends with it, so its tensors move to the CPU."""

    def reducer_override(self, obj: Any) -> object:
        if type(obj).__name__ == "DistributedDataParallel":
            msg = (
                "a DDP model, which needs its process group; return ddpsafe.current().unwrap(model)"
            )
            raise CannotTravelError(msg)
        if _is_tensor(obj) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickled:
    """A pickle and the large memory that is not in it; `loads` reads its ``bytes()``.

    Attributes:
        buffers: Memory of the objects themselves, which must not change until it is written.
        handles: Objects that must be inherited besides.
    """

    stream: memoryview
    buffers: tuple[memoryview, ...]
    handles: tuple[object, ...] = ()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield what to write, in order."""
        spans = []
        end = 0
        for part in (*self.buffers, self.stream):
            spans.append(_SPAN.pack(end, part.nbytes))
            padding = -part.nbytes % _ALIGNMENT
            yield part
            yield bytes(padding)
            end += part.nbytes + padding
        yield b"".join(spans)
        yield _SPAN.pack(end, len(spans))

    def nbytes(self) -> int:
        """Return how much memory it takes, without padding and table."""
        return sum(part.nbytes for part in (*self.buffers, self.stream))

    def __bytes__(self) -> bytes:
        return b"".join(self.chunks())


def dumps_call(call: object, *, shares_tensors: bool = False) -> Pickled:
    """Pickle what a rank is to run; with `shares_tensors`, ranks share the memory of CPU tensors.

    Raises:
        Exception: Whatever the objects raise; `find_unpicklable` then finds where.
    """
    return _Pickler([], shares_tensors=shares_tensors).pickled(call)


def dumps_result(value: object) -> Pickled:
    """Pickle the result of a rank; device tensors are moved to the CPU."""
    return _ResultPickler(None).pickled(value)


def loads(data: bytes | mmap.mmap, handles: tuple[object, ...] = ()) -> object:
    """Unpickle what this process's launcher or child has written, with the objects that were inherited.

    Large arrays and tensors of a writable mapping are used in place and keep it open.
    """
    view = memoryview(data)
    table, count = _SPAN.unpack(view[-_SPAN.size :])
    spans = [_SPAN.unpack_from(view, table + index * _SPAN.size) for index in range(count)]
    *buffers, stream = [view[start : start + length] for start, length in spans]
    if view.readonly:  # an array over such memory could not be written to
        buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
    token = _handles.set(handles)
    try:
        return pickle.loads(stream, buffers=buffers)  # noqa: S301 - from our parent or child, never from a peer
    finally:
        _handles.reset(token)


def map_file(fd: int, offset: int = 0) -> mmap.mmap:
    """Map a file for `loads`; writes to the memory stay in this process."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY, offset=offset)


def _handle(index: int) -> object:
    return _handles.get()[index]


def _is_tensor(obj: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _is_inherited_only(obj: Any) -> bool:
    if _is_tensor(obj):
        # A sparse tensor has no storage of its own; its parts are checked when they are pickled.
        return obj.layout is sys.modules["torch"].strided and bool(obj.is_shared())
    if isinstance(obj, (type, types.FunctionType, BaseException)):
        return False
    # RawValue and RawArray are plain ctypes objects that refer to their shared memory.
    holder = vars(obj).get("_wrapper") if isinstance(obj, _CTYPES) else None
    return any(type(part).__module__.startswith(_INHERITED_MODULES) for part in (obj, holder))


def _lives_in_importable_main(obj: Any) -> bool:
    if not isinstance(obj, (type, types.FunctionType)) or obj.__module__ != "__main__":
        return False
    if not main_is_importable():
        return False
    # A rank that imports the main script has to find the object under its name.
    main = sys.modules["__main__"]
    names = obj.__qualname__.split(".")
    if names[0] in _defined_under_guard(str(main.__file__)):
        return False
    target: object = main
    for name in names:
        target = getattr(target, name, None)
    return target is obj


def main_is_importable() -> bool:
    """Return whether a new process will import the main script; decides as `multiprocessing` does."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # multiprocessing does not re-run `python -m package`, i.e. package/__main__.py.
        return not (spec.name == "__main__" or spec.name.endswith(".__main__"))
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).exists() and "ipython" not in Path(file).name


@functools.cache
def _defined_under_guard(script: str) -> frozenset[str]:
    """Find what a script defines under ``if __name__ == "__main__":``, so only if it is not imported."""
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    ifs = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    guarded = [node for part in ifs if "__name__" in ast.unparse(part.test) for node in part.body]
    inside = [node for statement in guarded for node in ast.walk(statement)]
    return frozenset(
        node.name for node in inside if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    )


def find_unpicklable(
    obj: object, path: str, *, dumps: Callable[[object], object] | None = None
) -> tuple[str, BaseException] | None:
    """Find the innermost part that cannot be pickled of an object at `path`, e.g. ``args[1]``.

    Return its path and what its pickling raised, or ``None`` if the object can be pickled.
    """
    dumps = dumps or dumps_call
    exc = _failure(obj, dumps)
    if exc is None:
        return None
    return _find(obj, path, exc, dumps, fails={}, levels=_MAX_SEARCH_DEPTH) or (path, exc)


def _find(
    obj: object,
    path: str,
    exc: BaseException,
    dumps: Callable[[object], object],
    *,
    fails: dict[int, bool],
    levels: int,
) -> tuple[str, BaseException] | None:
    """Search the parts of an object that fails; `fails` records which objects seen so far do."""
    fails[id(obj)] = True
    parts = list(_parts(obj)) if levels else []
    for name, part in parts:
        if id(part) in fails:
            continue
        failure = _failure(part, dumps)
        fails[id(part)] = failure is not None
        if failure is not None:
            culprit = _find(part, path + name, failure, dumps, fails=fails, levels=levels - 1)
            if culprit is not None:
                return culprit
    # If a failing part was seen before (a child that refers to its parent), the culprit is elsewhere.
    return None if any(fails[id(part)] for _, part in parts) else (path, exc)


def _failure(obj: object, dumps: Callable[[object], object]) -> BaseException | None:
    try:
        dumps(obj)
    except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
        return exc
    return None


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object, each with its step of the path."""
    with suppress(Exception):  # a user's __repr__ or __getattr__ may raise anything
        if type(obj).__module__.startswith(_INHERITED_MODULES):
            return  # it is inherited as a whole
        if isinstance(obj, dict):
            yield from ((f"[{key!r}]", value) for key, value in obj.items())
            yield from ((f" key {key!r}", key) for key in obj)
        elif isinstance(obj, (list, tuple, deque)):
            yield from ((f"[{index}]", value) for index, value in enumerate(obj))
        elif isinstance(obj, (set, frozenset)):
            yield from ((f" element {value!r}", value) for value in obj)
        elif isinstance(obj, BaseException):
            yield ".args", obj.args
        if isinstance(obj, types.FunctionType):
            for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
                yield f" closure variable {name!r}", cell.cell_contents
            for name in obj.__code__.co_names:
                if name in obj.__globals__:
                    yield f" global variable {name!r}", obj.__globals__[name]
        elif isinstance(obj, types.MethodType):
            yield ".__self__", obj.__self__
        if not isinstance(obj, type):
            state = getattr(obj, "__dict__", None) or {}
            yield from ((f".{name}", value) for name, value in list(state.items()))
            for cls in type(obj).__mro__:
                slots = cls.__dict__.get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    if hasattr(obj, name):
                        yield f".{name}", getattr(obj, name)
            if isinstance(obj, functools.partial):
                yield ".func", obj.func
                yield ".args", obj.args
                yield ".keywords", obj.keywords
