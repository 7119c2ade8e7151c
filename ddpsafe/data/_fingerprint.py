"""A dataset's identity: its length, its type, and what its items are."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ddpsafe.data._epoch_board import add_note, sample_path

_LISTINGS: Final = ("samples", "imgs", "files", "paths")
_ITEM_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetView:
    """What a dataset is compared by.

    Attributes:
        length: How many samples it has; ``None`` if it has no length.
        kind: Its type's name, and what of it is compared.
        indices: Which samples are compared.
        item: What stands for a sample: the same text on every host for the same sample.
    """

    length: int | None
    kind: str
    indices: range | list[int]
    item: Callable[[int], str]

    def digest(self, start: int, stop: int) -> str:
        """Return the digest of the compared samples number `start` to `stop`."""
        total = hashlib.blake2b(digest_size=_ITEM_BYTES)
        for place in range(start, min(stop, len(self.indices))):
            total.update(self.item(self.indices[place]).encode("utf-8", "surrogateescape") + b"\0")
        return total.hexdigest()

    def fingerprint(self) -> str:
        """Return the digest of everything: 16 bytes as hexadecimal text."""
        total = hashlib.blake2b(digest_size=16)
        whole = self.digest(0, len(self.indices))
        total.update(f"{self.length}|{self.kind}|{whole}".encode())
        return total.hexdigest()


def view_dataset(
    dataset: Any,
    *,
    probes: int,
    key: Callable[[int], object] | None,
) -> DatasetView:
    """Decide what a dataset is compared by: `key`, its own fingerprint, its paths, or probes."""
    length = len(dataset) if hasattr(dataset, "__len__") else None
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}".removeprefix("__mp_main__.")
    name = name.removeprefix("__main__.")
    if key is not None and length is not None:
        return _view(length, f"{name} by key", range(length), lambda i: stable_text(key(i)))
    own = _own_fingerprint(dataset)
    if own is not None:
        return _view(length, f"{name} by its fingerprint", range(1), lambda _: own)
    listing = _listing(dataset)
    if listing is not None:
        return _view(length, f"{name} by its paths", range(len(listing)), _paths(dataset, listing))
    if length is None or not hasattr(dataset, "__getitem__"):
        return _view(length, name, range(0), str)
    count = min(probes, length)
    indices = sorted({round(p) for p in np.linspace(0, length - 1, count)}) if count else []
    item = _probe(dataset)
    if indices and item(indices[0]) != item(indices[0]):
        # Its items draw from generators of their own: reading them identifies nothing.
        return _view(length, f"{name} by its length, as its items are random", range(0), str)
    return _view(length, f"{name} by {len(indices)} probes", indices, item)


def _view(
    length: int | None, kind: str, indices: range | list[int], item: Callable[[int], str]
) -> DatasetView:
    return DatasetView(length=length, kind=kind, indices=indices, item=item)


def _own_fingerprint(dataset: Any) -> str | None:
    method = getattr(dataset, "fingerprint", None)
    if callable(method):
        return str(method())
    value = getattr(dataset, "_fingerprint", None)
    return value if isinstance(value, str) else None


def _listing(dataset: Any) -> Any:
    for name in _LISTINGS:
        listed = getattr(dataset, name, None)
        if isinstance(listed, list | tuple) and listed:
            first = listed[0][0] if isinstance(listed[0], tuple | list) else listed[0]
            if isinstance(first, str | os.PathLike):
                return listed
    return None


def _paths(dataset: Any, listing: Any) -> Callable[[int], str]:
    # Hosts mount the data in different places: what counts is the path below the root.
    root = getattr(dataset, "root", None)
    if not isinstance(root, str | os.PathLike):
        root = os.path.commonpath([os.path.dirname(_path_of(entry)) for entry in listing] or [""])  # noqa: PTH120 - a million of them; Path is 20 times slower
    prefix = os.path.join(os.fspath(root), "")  # noqa: PTH118 - as above

    def item(index: int) -> str:
        entry = listing[index]
        rest = stable_text(entry[1:]) if isinstance(entry, tuple | list) else ""
        return _path_of(entry).removeprefix(prefix) + "|" + rest

    return item


def _path_of(entry: Any) -> str:
    return os.fspath(entry[0] if isinstance(entry, tuple | list) else entry)


def _probe(dataset: Any) -> Callable[[int], str]:
    def item(index: int) -> str:
        with _fixed_randomness(index):
            try:
                sample = dataset[index]
            except Exception as error:
                path = sample_path(dataset, index)
                where = f"index {index}{f' ({path})' if path else ''}"
                add_note(error, f"While reading {where} to compare the dataset over the ranks.")
                raise
            return stable_text(sample)

    return item


@contextlib.contextmanager
def _fixed_randomness(seed: int) -> Iterator[None]:
    """Let augmentations draw the same on every rank, and leave no trace of it."""
    python, numpy, ours = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - augmentations use the global generator
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - augmentations use the global generator
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - augmentations use the global generator
        torch.set_rng_state(ours)


def stable_text(value: Any) -> str:
    """Return a text that is equal on every host for equal samples, never an address."""
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k!r}:{stable_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(stable_text(part) for part in value) + "]"
    return f"{type(value).__qualname__}{_content(value)}"


def _content(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (
            f"{tuple(value.shape)}{value.dtype}{_short(flat.view(torch.uint8).numpy().tobytes())}"
        )
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.shape}{value.dtype}{_short(value.tobytes())}"
    return _short(value.tobytes()) if hasattr(value, "tobytes") else ""


def _short(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=_ITEM_BYTES).hexdigest()
