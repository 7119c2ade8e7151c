"""What a worker would receive with a dataset: its attributes, containers, closures and globals.

The search for hazards (`worker_safety`) walks these objects. They may come from any library, so
inspecting one may raise anything.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import gc
import itertools
import logging
import os
import pathlib
import random
import re
import sys
import sysconfig
import tarfile
import threading
import types
import weakref
import zipfile
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from ddpsafe._wire.exception_facts import package_of
from ddpsafe.data._per_process import PerProcess

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Part = tuple[str, Any]

_MAX_OBJECTS: Final = 100_000
_PARTS_PER_TURN: Final = 200
_MAX_KEY_CHARS: Final = 40

PLAIN: Final = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(...)}
)
_SEQUENCES: Final = (list, tuple, set, frozenset, collections.deque)
_CONTAINERS: Final = frozenset({*_SEQUENCES, dict})
# Not searched: they hold nothing that a worker would read from. A logger only writes.
_OPAQUE: Final = (
    type,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    torch.Tensor,
    torch.Generator,
    logging.Logger,
    logging.LoggerAdapter,
    logging.Handler,
    pathlib.PurePath,
    enum.Enum,
    re.Pattern,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    weakref.ref,
    PerProcess,
)
# Objects that only write; by package and class name, since the libraries may not be installed.
_WRITERS: Final = {
    ("torch", "SummaryWriter"),
    ("tensorboardX", "SummaryWriter"),
    ("wandb", "Run"),
    ("loguru", "Logger"),
    ("tqdm", "tqdm"),
    ("rich", "Console"),
}
# What a DataLoader worker calls.
_ENTRIES: Final = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")


def _cached(function: Callable[[type], T]) -> Callable[[type], T]:
    return functools.lru_cache(maxsize=256)(function)


def reachable(root: object, *, name: str) -> Iterator[Part]:
    """Yield `root` and what it reaches, each with its path, nearest first.

    It ends after 100,000 objects, not counting numbers and strings.

    Args:
        root: Where to begin.
        name: What to call it in paths.
    """
    seen: dict[int, object] = {}  # holds the objects, so that no id is reused
    near: collections.deque[Part] = collections.deque([(name, root)])
    far: collections.deque[Iterator[Part]] = collections.deque()
    while len(seen) < _MAX_OBJECTS:
        if not near:
            if not far:
                return
            rest = far.popleft()
            near.extend(itertools.islice(rest, _PARTS_PER_TURN))
            if near:
                far.append(rest)
            continue
        path, item = near.popleft()
        if type(item) in PLAIN or id(item) in seen:
            continue
        seen[id(item)] = item
        yield path, item
        parts = iter(parts_of(path, item))
        # The rest of a long container comes later, so that it does not crowd out near objects.
        near.extend(itertools.islice(parts, _PARTS_PER_TURN))
        far.append(parts)


def parts_of(path: str, item: Any) -> Iterable[Part]:
    """Return what an object refers to, with paths; nothing if it cannot be inspected."""
    try:
        return itertools.chain(_parts(path, item), _held_by_c(path, item))
    except Exception:  # noqa: BLE001 - an object of any library may raise anything
        return ()


def _parts(path: str, item: Any) -> Iterable[Part]:  # noqa: PLR0911 - a table of kinds
    kind: type = type(item)
    if issubclass(kind, _OPAQUE) or is_writer(kind) or is_standard_stream(item):
        return ()
    if issubclass(kind, zipfile.ZipFile | tarfile.TarFile) and item.mode in {"w", "x"}:
        return ()  # it only writes, though the file below it is readable too
    if kind.__module__ == "_io":
        return ()  # the raw file below is the same file
    if issubclass(kind, np.ndarray):
        return _entries(path, item.flat) if item.dtype == object else ()
    if issubclass(kind, dict):
        entries = [
            (f"{path}[{_key(key)}]", value)
            for key, value in list(item.items())
            if not _is_plain(value)
        ]
        return itertools.chain(_instance_parts(path, item), entries)
    if issubclass(kind, _SEQUENCES):
        return itertools.chain(_instance_parts(path, item), _entries(path, item))
    if kind is functools.partial:
        named = [(f"{path}.keywords[{key!r}]", value) for key, value in item.keywords.items()]
        return [(f"{path}.func", item.func), *_entries(f"{path}.args", item.args), *named]
    if kind is types.FunctionType:
        return _function_parts(path, item)
    if kind is types.MethodType:
        return [(f"{path}.__self__", item.__self__), (f"{path}.__func__", item.__func__)]
    if kind is types.BuiltinMethodType:
        return [(f"{path}.__self__", item.__self__)]
    if kind is types.GeneratorType:
        frame = item.gi_frame
        return _named(f"{path}.<locals>", frame.f_locals) if frame is not None else ()
    return _instance_parts(path, item)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    # The garbage collector does not track tuples and dicts that hold only plain values.
    return kind in PLAIN or (kind in {tuple, dict} and not gc.is_tracked(value))


def _entries(path: str, items: Iterable[Any]) -> Iterator[Part]:
    listed = list(items)
    if set(map(type, listed)) <= PLAIN:
        return iter(())
    places = [place for place, item in enumerate(listed) if not _is_plain(item)]
    return ((f"{path}[{place}]", listed[place]) for place in places)


def _key(key: object) -> str:
    text = repr(key) if type(key) in PLAIN else f"<{type(key).__name__}>"
    return text if len(text) <= _MAX_KEY_CHARS else f"{text[:_MAX_KEY_CHARS]}..."


def _named(path: str, values: Any) -> list[Part]:
    return [(f"{path}.{name}", value) for name, value in list(values.items())]


def _instance_parts(path: str, item: Any) -> Iterable[Part]:
    kind: type = type(item)
    if kind in _CONTAINERS:
        return ()
    own = vars_of(item)
    parts = _named(path, own)
    parts += [
        (f"{path}.{name}", value)
        for name, member in slots_of(kind).items()
        if (value := _read_slot(member, item)) is not _ABSENT
    ]
    if is_user_class(kind):
        parts += [
            (f"{path}.{name}", value)
            for name, value in class_attributes(kind).items()
            if name not in own
        ]
        for function in worker_methods(kind):
            parts += _function_parts(f"{path}.{function.__name__}", function)
    with contextlib.suppress(AttributeError):  # a proxy, such as wrapt's
        parts.append((f"{path}.__wrapped__", object.__getattribute__(item, "__wrapped__")))
    return parts


def vars_of(item: Any) -> dict[str, Any]:
    """Return the real ``__dict__`` of an instance; empty if it has none."""
    owner = threading.local if issubclass(type(item), threading.local) else object
    try:
        own = owner.__getattribute__(item, "__dict__")
    except Exception:  # noqa: BLE001 - an object of any library may raise anything
        return {}
    return own if isinstance(own, dict) else {}


def _held_by_c(path: str, item: Any) -> list[Part]:
    # csv.reader, map, an iterator, a cache: only the garbage collector knows what C code holds.
    kind: type = type(item)
    if (
        kind in _CONTAINERS
        or issubclass(kind, (*_OPAQUE, np.ndarray, types.FunctionType))
        or kind.__module__ == "_io"
        or is_user_class(kind)
        or kind.__module__.startswith("pyarrow.")  # its readers use pread
        or is_writer(kind)
        or is_standard_stream(item)
        or (vars_of(item) and kind.__name__ != "_lru_cache_wrapper")
    ):
        return []
    return [(f"{path}.<{type(held).__name__}>", held) for held in gc.get_referents(item)]


@_cached
def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class and its bases, by name."""
    slots: dict[str, types.MemberDescriptorType] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if type(member) is types.MemberDescriptorType:
                slots.setdefault(name, member)
    return slots


def _read_slot(member: types.MemberDescriptorType, item: object) -> Any:
    try:
        return member.__get__(item, type(item))
    except Exception:  # noqa: BLE001 - an empty slot, or a getter that raises
        return _ABSENT


def _function_parts(path: str, function: types.FunctionType) -> list[Part]:
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    parts = [
        (f"{path}.<closure>.{name}", cell.cell_contents)
        for name, cell in cells
        if cell != types.CellType()
    ]
    defaults: dict[object, Any] = dict(enumerate(function.__defaults__ or ()))
    defaults.update(function.__kwdefaults__ or {})
    parts += [(f"{path}.<default>[{name!r}]", value) for name, value in defaults.items()]
    if is_user_file(code.co_filename):
        module = str(function.__module__)
        for name in global_names(code):
            value = function.__globals__.get(name)
            parts.append((f"{module}.{name}", value))
            if isinstance(value, type) and is_user_class(value):
                parts += _named(f"{module}.{name}", class_attributes(value))
    return parts


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function reads or sets, including those of nested functions."""
    names = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"}
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(global_names(constant))
    return tuple(sorted(names))


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    # Real paths too: an environment's `lib64` is a link, and the base Python may be one.
    paths = [
        path
        for key, path in sysconfig.get_paths().items()
        if key in {"stdlib", "platstdlib", "purelib", "platlib"}
    ]
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120 - strings are compared
    folders = {*paths, *map(os.path.realpath, paths), own}
    return tuple(os.path.join(folder, "") for folder in folders)  # noqa: PTH118 - strings are compared


@functools.lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Return whether code is the user's, as in a notebook, and not a library's or ddpsafe's."""
    if filename.startswith("<frozen"):
        return False
    return not package_of(filename) and not filename.startswith(_library_folders())


@_cached
def is_user_class(kind: type) -> bool:
    """Return whether a class is the user's."""
    if kind.__module__ in {"__main__", "__mp_main__"}:
        return True
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    return isinstance(filename, str) and is_user_file(filename)


def class_attributes(kind: type) -> dict[str, Any]:
    """Return the data attributes of the user's classes, without functions and descriptors."""
    attributes: dict[str, Any] = {}
    for base in kind.__mro__:
        if is_user_class(base):
            for name, value in vars(base).items():
                is_data = not (
                    isinstance(value, types.FunctionType)
                    or hasattr(type(value), "__get__")
                    or name.startswith("__")
                )
                if is_data or type(value).__name__ == "_lru_cache_wrapper":
                    attributes.setdefault(name, value)
    return attributes


@_cached
def worker_methods(kind: type) -> tuple[types.FunctionType, ...]:
    """Return the user's methods that reading a sample may call, found by the names they use."""
    methods: dict[str, types.FunctionType] = {}
    waiting = list(_ENTRIES)
    while waiting:
        name = waiting.pop()
        if name in methods or name == "__init__":
            continue
        member = next((vars(b)[name] for b in kind.__mro__ if name in vars(b)), None)
        for _ in range(3):  # unwrap a property, a class method or decorators
            if not isinstance(member, types.FunctionType):
                wrapped = ("fget", "__wrapped__", "__func__")
                member = next(
                    filter(None, (getattr(member, inner, None) for inner in wrapped)), None
                )
        if isinstance(member, types.FunctionType) and is_user_file(member.__code__.co_filename):
            methods[name] = member
            waiting.extend(member.__code__.co_names)
    return tuple(methods.values())


def is_standard_stream(item: object) -> bool:
    """Return whether this is the process's stdin, stdout or stderr, also if it was replaced."""
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return any(item is stream for stream in streams)


def is_writer(kind: type) -> bool:
    """Return whether objects of this class only write: logs, progress or metrics."""
    return any(
        (base.__module__.partition(".")[0], base.__name__) in _WRITERS for base in kind.__mro__
    )


_ABSENT: Final = object()
