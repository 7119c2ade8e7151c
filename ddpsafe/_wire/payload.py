"""Pickling of what the user hands over: functions, arguments, results, exceptions.

What can be imported by name travels by name; what cannot (notebook cells, closures, lambdas)
travels by value. Objects that only a process being started can inherit (queues, locks, shared
tensors) travel beside the bytes, as `multiprocessing` itself would send them.

Large arrays and tensors are not copied into the pickle (PEP 574). They are written behind it, and
who maps the file has them in place: ranks share the pages until one of them writes.
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
from contextlib import contextmanager, suppress
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
_MOST_SHARED: Final = 200
_SEARCHED_LEVELS: Final = 64
"""Deeper, the search would meet Python's recursion limit, and the path would be too long to read."""

_LARGE_BYTES: Final = 1 << 20
"""From here on memory is worth a place of its own; smaller tensors stay resizable."""
_ALIGNMENT: Final = 64
_SPAN: Final = struct.Struct("<QQ")
"""Where a buffer begins, and its length; at the end of the whole, those of the stream and the table."""

_handles: ContextVar[tuple[object, ...]] = ContextVar("ddpsafe_handles")


class CannotTravelError(pickle.PicklingError):
    """An object that would lose its meaning in another process."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """cloudpickle, but by name where possible, and strict about what must stay."""

    def __init__(
        self, file: io.BytesIO, handles: list[object] | None, *, shares_tensors: bool = False
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_in_stream)
        self.buffers: list[memoryview] = []
        self._handles = handles
        self._shares_tensors = shares_tensors

    def _keep_in_stream(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE_BYTES:
            return True
        self.buffers.append(raw)
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
            # A tensor of the CPU moves into shared memory, as with torch's own pickler.
            plain = obj.layout is sys.modules["torch"].strided and obj.device.type == "cpu"
            if plain and len(self._handles) < _MOST_SHARED and obj.untyped_storage().nbytes():
                obj.share_memory_()
        if self._handles is not None and _is_inherited_only(obj):
            self._handles.append(obj)
            return (_handle, (len(self._handles) - 1,))
        if _lives_in_importable_main(obj):
            return obj.__qualname__  # a string reduces to "import it by this name"
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.storage.TypedStorage) and _is_large(obj._untyped_storage):  # noqa: SLF001 - as torch's own reducers
                return (_typed_storage, (obj._untyped_storage, obj.dtype))  # noqa: SLF001
            if isinstance(obj, torch.UntypedStorage) and _is_large(obj):
                memory: Any = (ctypes.c_char * obj.nbytes()).from_address(obj.data_ptr())
                memory.owner = obj  # which lives as long as its memory is used
                return (_untyped_storage, (pickle.PickleBuffer(memory),))
        return super().reducer_override(obj)


def _is_large(storage: Any) -> bool:
    return bool(storage.device.type == "cpu" and storage.nbytes() >= _LARGE_BYTES)


def _untyped_storage(memory: Any) -> object:
    torch: Any = importlib.import_module("torch")  # whoever sent it has it
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> object:
    torch: Any = importlib.import_module("torch")
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


class _ResultPickler(_Pickler):
    """For what a rank sends back: its device memory dies with it, so tensors move to the CPU."""

    def reducer_override(self, obj: Any) -> object:
        if type(obj).__name__ == "DistributedDataParallel":
            msg = "a DDP model, which needs its process group; return ctx.unwrap(model)"
            raise CannotTravelError(msg)
        if _is_tensor(obj) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickled:
    """A pickle, and the memory that it needs and is not in it; ``bytes()`` of it is for `loads`.

    Attributes:
        stream: The pickle.
        buffers: Memory of the objects themselves, which must not change until it is written.
        handles: Objects that have to be inherited beside all that.
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
        """Return how much memory it takes, but for the few bytes of its table."""
        return sum(part.nbytes for part in (*self.buffers, self.stream))

    def __bytes__(self) -> bytes:
        return b"".join(self.chunks())


def dumps_call(call: object, *, shares_tensors: bool = False) -> Pickled:
    """Pickle what a rank shall run.

    Args:
        call: The function and its arguments.
        shares_tensors: Whether the ranks get the memory of tensors on the CPU, not copies of it.

    Raises:
        Exception: Whatever the objects raise; `find_unpicklable` then says where.
    """
    handles: list[object] = []
    file = io.BytesIO()
    pickler = _Pickler(file, handles, shares_tensors=shares_tensors)
    pickler.dump(call)
    return Pickled(
        stream=memoryview(file.getvalue()), buffers=tuple(pickler.buffers), handles=tuple(handles)
    )


def dumps_result(value: object) -> Pickled:
    """Pickle what a rank sends back; device tensors arrive on the CPU."""
    file = io.BytesIO()
    pickler = _ResultPickler(file, None)
    pickler.dump(value)
    return Pickled(stream=memoryview(file.getvalue()), buffers=tuple(pickler.buffers))


def loads(data: bytes | mmap.mmap, handles: tuple[object, ...] = ()) -> object:
    """Unpickle what our own launcher or our own child has written.

    Args:
        data: All of it. Large arrays and tensors stay where they are in a mapping that can be
            written to, and keep it open.
        handles: What was inherited beside it.
    """
    view = memoryview(data)
    table, count = _SPAN.unpack(view[-_SPAN.size :])
    spans = [_SPAN.unpack_from(view, table + index * _SPAN.size) for index in range(count)]
    *buffers, stream = [view[start : start + length] for start, length in spans]
    if view.readonly:
        buffers = [memoryview(bytearray(each)) for each in buffers]
    with _using(handles):
        return pickle.loads(stream, buffers=buffers)  # noqa: S301 - from our parent or child, never from a peer


def map_file(fd: int, offset: int = 0) -> mmap.mmap:
    """Map a file for `loads`; what is written to the memory stays in this process."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY, offset=offset)


@contextmanager
def _using(handles: tuple[object, ...]) -> Iterator[None]:
    token = _handles.set(handles)
    try:
        yield
    finally:
        _handles.reset(token)


def _handle(index: int) -> object:
    return _handles.get()[index]


def _is_tensor(obj: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _is_inherited_only(obj: Any) -> bool:
    if _is_tensor(obj):
        # A sparse tensor has no storage to ask; its parts are asked when they are pickled.
        return obj.layout is sys.modules["torch"].strided and bool(obj.is_shared())
    if isinstance(obj, (type, types.FunctionType, BaseException)):
        return False
    # RawValue and RawArray are plain ctypes objects that hold on to their shared memory.
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
    found: object = main
    for name in names:
        found = getattr(found, name, None)
    return found is obj


def main_is_importable() -> bool:
    """Tell whether a new process will import the main script, as `multiprocessing` decides it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # multiprocessing does not re-run `python -m package`, i.e. package/__main__.py.
        return not (spec.name == "__main__" or spec.name.endswith(".__main__"))
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).exists() and "ipython" not in Path(file).name


@functools.cache
def _defined_under_guard(script: str) -> frozenset[str]:
    """Find what the script defines under ``if __name__ == "__main__":``, so not when imported."""
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
    """Find the innermost part of an object that cannot be pickled.

    Args:
        obj: The object.
        path: How the reader gets to it, e.g. ``args[1]``.
        dumps: What pickles it; `dumps_call` by default.

    Returns:
        The path to the culprit and what its pickling raised, or ``None`` if all is well.
    """
    dumps = dumps or dumps_call
    exc = _failure(obj, dumps)
    if exc is None:
        return None
    return _find(obj, path, exc, dumps, fails={}, levels=_SEARCHED_LEVELS) or (path, exc)


def _find(
    obj: object,
    path: str,
    exc: BaseException,
    dumps: Callable[[object], object],
    *,
    fails: dict[int, bool],
    levels: int,
) -> tuple[str, BaseException] | None:
    """Search an object that fails; `fails` knows of every object met so far whether it does."""
    fails[id(obj)] = True
    parts = list(_parts(obj)) if levels else []
    for name, part in parts:
        if id(part) in fails:
            continue
        found = _failure(part, dumps)
        fails[id(part)] = found is not None
        if found is not None:
            culprit = _find(part, path + name, found, dumps, fails=fails, levels=levels - 1)
            if culprit is not None:
                return culprit
    # With a part that fails and was met before (a child that knows its parent), look elsewhere.
    return None if any(fails[id(part)] for _, part in parts) else (path, exc)


def _failure(obj: object, dumps: Callable[[object], object]) -> BaseException | None:
    try:
        dumps(obj)
    except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
        return exc
    return None


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    """Yield what is inside, as far as a user's ``__repr__`` and ``__getattr__`` let us look."""
    with suppress(Exception):
        if type(obj).__module__.startswith(_INHERITED_MODULES):
            return  # it travels as a whole
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
