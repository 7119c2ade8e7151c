"""Finds two ranks or workers that read the same samples of a stream.

Only what a stream delivers shows whether it divides itself. So the first samples of each reader (a rank,
or a worker of it) are compared with those of all others: each puts their digest into the ranks' store once,
and the second one with the same digest raises. No rank waits for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ddpsafe._errors import Explanation
from ddpsafe._wire.exception_facts import clip, is_internal
from ddpsafe.data._replica import current_replica
from ddpsafe.data.errors import UndividedStreamError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ddpsafe._job.store_keys import Keys

# Fewer different samples, in the same order, may be equal by chance: constants, padding, few labels.
_DIFFERENT_SAMPLES: Final = 8
# A reader whose first samples are nearly all equal proves nothing.
_MOST_SAMPLES: Final = 256
_SHOWN_SAMPLES: Final = 3
_SHOWN_CHARS: Final = 80
ITEM_DIGEST_BYTES: Final = 8
_MAX_DEPTH: Final = 100

_history: list[str] = []
"""Where the loaders were made whose streams this rank has begun to read, in that order."""


class EqualReaders:
    """Compares the first samples of one loader's readers with those of all others.

    Only a loader that reads a stream is looked at, in its first pass.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._name = type(loader.dataset).__name__
        self._batch_size = loader.batch_size
        dataset: object = loader.dataset
        self._is_stream = isinstance(dataset, IterableDataset)
        # Ranks may have to read the same, for an evaluation or because they share a model: the dataset then
        # has fewer replicas.
        self._replicas = getattr(loader.dataset, "num_replicas", None)
        self._site = _calling_lines() if self._is_stream else ""
        self._readers: dict[int, _FirstSamples] = {}
        self._is_open = False
        self._scope = ""

    def begin(self) -> None:
        """Begin the pass; a later one is not looked at."""
        self._is_open = self._is_stream and not self._scope
        if not self._is_open:
            return
        # A rank that has read another stream before may be in another epoch than the rest, or at another
        # loader: what it reads now proves nothing about their division.
        _history.append(self._site)
        self._scope = hashlib.sha256(json.dumps(_history).encode()).hexdigest()

    def add(self, worker: int, batch: Any) -> None:
        """Look at a batch of a worker, from 0, or of the rank itself.

        Raises:
            UndividedStreamError: Another reader has read the same first samples.
        """
        if not self._is_open or worker < 0:
            return
        reader = self._readers.setdefault(worker, _FirstSamples())
        if reader.is_complete():
            return
        reader.add(batch, self._batch_size)
        if not reader.is_evidence():
            return
        me = current_replica()
        digest = reader.digest()
        for other, samples in self._readers.items():
            if other != worker and samples.is_evidence() and samples.digest() == digest:
                raise self._error(reader, (me.rank, other), (me.rank, worker))
        store = _find_store() if self._replicas in {None, me.num_replicas} else None
        if store is None or me.num_replicas == 1:
            return
        place = json.dumps([me.rank, worker])
        try:
            first = store.compare_set(f"data/streams/{self._scope}/{digest}", "", place)
        except RuntimeError:  # the store ended with the job
            return
        rank, other = json.loads(first)
        if rank != me.rank:
            raise self._error(reader, (rank, other), (me.rank, worker))

    def _error(
        self, reader: _FirstSamples, one: tuple[int, int], other: tuple[int, int]
    ) -> UndividedStreamError:
        is_of_ranks = one[0] != other[0]
        world = current_replica().num_replicas
        names = [f"worker {worker} of rank {rank}" for rank, worker in (one, other)]
        if is_of_ranks and len(self._readers) == 1:
            names = [f"rank {rank}" for rank, _ in (one, other)]
        cause = "each worker iterates over a copy of the whole stream."
        fix = "divide it in __iter__ with torch.utils.data.get_worker_info(), or use num_workers=1."
        if is_of_ranks:
            cause = (
                "the stream does not divide itself among the ranks. In a worker process "
                "torch.distributed is not initialized: rank 0 of 1 there is every rank."
            )
            fix = (
                "or ask for the rank in __init__, which runs in the rank itself. If every rank is meant to "
                "read everything (an evaluation, or ranks that share a model), set num_replicas = 1 on the "
                "dataset."
            )
        return UndividedStreamError(
            Explanation(
                f"{names[0]} and {names[1]} (world_size {world}) read the same samples of "
                f"{self._name}: the first {reader.count}, of which {_DIFFERENT_SAMPLES} differ from "
                "each other, are equal and in the same order.",
                cause=cause,
                fix=f"wrap it in ddpsafe.data.ShardedIterable, {fix}",
                details=[f"sample {i}: {text}" for i, text in enumerate(reader.examples)],
            ),
            ranks=tuple(sorted({one[0], other[0]})),
            workers=(one[1], other[1]),
        )


def _calling_lines() -> str:
    """Return the lines of the script that led here; they are the same on all hosts."""
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    return " ".join(f"{Path(file).name}:{line}" for file, line in calls if not is_internal(file))


class _FirstSamples:
    """The first samples of one reader, up to the first few that differ from each other."""

    def __init__(self) -> None:
        self.count = 0
        self.examples: list[str] = []
        self._checksums: list[int] = []

    def is_evidence(self) -> bool:
        """Return whether enough of them differ to prove that an equal reader reads the same samples."""
        return len(set(self._checksums)) >= _DIFFERENT_SAMPLES

    def is_complete(self) -> bool:
        """Return whether further samples change nothing."""
        return self.is_evidence() or self.count >= _MOST_SAMPLES

    def add(self, batch: Any, batch_size: int | None) -> None:
        for sample in _samples_of(batch, batch_size):
            if self.is_complete():
                return
            self.count += 1
            self._checksums.append(checksum(sample))
            if len(self.examples) < _SHOWN_SAMPLES:
                self.examples.append(clip(" ".join(repr(sample).split()), _SHOWN_CHARS))

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._checksums).encode()).hexdigest()


def _samples_of(batch: Any, batch_size: int | None) -> list[Any]:
    """Return the samples of a batch; the whole batch as one if its parts have no common length."""
    if batch_size is None:
        return [batch]
    if isinstance(batch, Mapping):
        columns = list(batch.values())
    elif isinstance(batch, list | tuple):
        columns = list(batch)
    else:
        columns = [batch]
    lengths = {_length_of(column) for column in columns}
    if len(lengths) != 1 or None in lengths:
        return [batch]
    rows = list(zip(*columns, strict=True))
    return [row[0] for row in rows] if len(columns) == 1 else rows


def _length_of(column: Any) -> int | None:
    if isinstance(column, torch.Tensor | np.ndarray):
        return len(column) if column.ndim else None
    return len(column) if isinstance(column, list | tuple) else None


def _find_store() -> Keys | None:
    """Return the store of this launch's ranks, else that of the process group, if there is one."""
    from ddpsafe._worker import torch_hooks
    from ddpsafe._worker.rank import this_rank

    member = this_rank.context
    if member is not None and member.control is not None:
        return member.control.store
    with contextlib.suppress(ValueError):  # there is no group
        return torch_hooks.default_store()
    return None


def parts_of(tensor: torch.Tensor) -> list[Any] | None:
    """Return what a nested or sparse tensor consists of; ``None`` for one that `bytes_of` takes."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    if tensor.layout is torch.strided:
        return None
    sparse = tensor.detach().to_sparse().coalesce()
    return [tuple(tensor.shape), sparse.indices(), sparse.values()]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the values of a dense tensor as bytes, on the CPU."""
    tensor = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def item_digest(raw: bytes | memoryview) -> str:
    """Return a short digest of a sample's bytes as hexadecimal text."""
    return hashlib.blake2b(raw, digest_size=ITEM_DIGEST_BYTES).hexdigest()


def stable_text(value: Any) -> str:
    """Return a text that is equal on every host for equal samples: without memory addresses."""
    return text_of(value, content_of)


def text_of(value: Any, content: Callable[[Any], str], within: tuple[int, ...] = ()) -> str:
    """Return the same, with what `content` returns of values that are not plain.

    `within` are the ids of the collections around the value, one of which may be the value itself.
    """
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return repr(value)
    if id(value) in within or len(within) > _MAX_DEPTH:
        return "..."
    within = (*within, id(value))
    if isinstance(value, Mapping):
        pairs = (f"{k!r}:{text_of(v, content, within)}" for k, v in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(text_of(part, content, within) for part in value) + "]"
    return f"{type(value).__qualname__}{content(value)}"


def content_of(value: Any) -> str:
    """Return what tells apart two tensors, arrays or images; empty for other objects."""
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # as a meta tensor, which has no content
            parts = parts_of(value)
            if parts is not None:
                return stable_text(parts)
            return f"{tuple(value.shape)}{value.dtype}{item_digest(bytes_of(value))}"
        return f"{value.layout}{value.dtype}{item_digest(repr(value).encode())}"
    if isinstance(value, np.ndarray) and value.dtype == object:  # its bytes are addresses
        return f"{value.shape}{stable_text(value.ravel().tolist())}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.shape}{value.dtype}{item_digest(value.tobytes())}"
    return item_digest(value.tobytes()) if hasattr(value, "tobytes") else ""


def checksum(value: Any) -> int:
    """Return a checksum of nested values, also of objects that only their text tells apart."""
    text = text_of(value, lambda part: content_of(part) or repr(part))
    return zlib.crc32(text.encode("utf-8", "replace"))
