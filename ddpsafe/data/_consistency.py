"""The same data on every rank: files in one order, and a check that names ranks that differ."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ddpsafe._errors import ConfigError, Explanation, portable
from ddpsafe._text import ranks_text
from ddpsafe.data._gathering import gather_json, gather_rows
from ddpsafe.data._loader.equal_readers import (
    ITEM_DIGEST_BYTES,
    content_of,
    item_digest,
    stable_text,
    text_of,
)
from ddpsafe.data._loader.machine_limits import add_note
from ddpsafe.data._loader.reading import PATH_ATTRIBUTES, describe_index
from ddpsafe.data._loader.sampler_search import find_epoch_holder, samplers_of
from ddpsafe.data._loader.worker_safety import find_handles, find_unpicklable, start_method_of
from ddpsafe.data._per_process import closing_what_opens
from ddpsafe.data._replica import current_replica
from ddpsafe.data.errors import DatasetInconsistencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PROBES: Final = 64
# Items are read beside the paths, because labels may come from elsewhere: wrong ones show in most items.
_PROBES_BESIDE_PATHS: Final = 16
# Decoders of two hosts may differ in the last bit of a pixel; labels and masks are small or integers.
_COMPARED_VALUES: Final = 1_024


def sorted_files(
    root: str | os.PathLike[str], pattern: str = "**/*", *, suffixes: Collection[str] | None = None
) -> list[Path]:
    """List the files below `root`, ordered by the bytes of their relative paths.

    ``os.listdir`` and ``glob`` return the file system's order, which differs between hosts;
    sorting by text differs between locales. Hidden files are left out, links are followed.

    Args:
        root: The directory.
        pattern: As in ``Path.glob``.
        suffixes: Keep only these, e.g. ``{".jpg", ".png"}``; case does not matter.

    Returns:
        The files, as paths that begin with `root`.

    Raises:
        ConfigError: The directory does not exist, or has no matching file.
    """
    top = Path(root)
    if not top.is_dir():
        raise ConfigError(
            Explanation(
                f"There is no directory {top} (looked at {top.absolute()}).",
                cause="the path is wrong, relative to another directory, or not mounted here.",
                fix="pass an absolute path that exists on every host.",
            )
        )
    accepted = None if suffixes is None else {suffix.lower() for suffix in suffixes}
    files = [
        path
        for path in top.glob(pattern)
        if (accepted is None or path.suffix.lower() in accepted)
        and not any(part.startswith(".") for part in path.relative_to(top).parts)
        and path.is_file()
    ]
    if not files:
        raise ConfigError(
            Explanation(
                f"No file in {top.absolute()} matches {pattern!r}"
                f"{'' if accepted is None else f' with a suffix of {sorted(accepted)}'}.",
                cause="the pattern is wrong, or the directory is empty on this host.",
                fix="check the pattern, and that the data are mounted.",
            )
        )
    return sorted(files, key=lambda path: os.fsencode(path.relative_to(top).as_posix()))


Part: TypeAlias = tuple[str, Literal["number", "text", "other"]]


@dataclass(frozen=True, slots=True)
class DatasetView:
    """What identifies a dataset when ranks compare theirs.

    Attributes:
        length: How many samples it has; ``None`` if it has no length.
        kind: Its type's name, and what is compared.
        indices: Which samples are compared.
        item: Index -> text that identifies the sample, the same on every host.
        parts: Index -> the texts of the parts of the sample, and what each is.
    """

    length: int | None
    kind: str
    indices: range | list[int] = range(0)
    item: Callable[[int], str] = str
    parts: Callable[[int], list[Part]] = lambda _: []
    by_paths: bool = False

    def _samples(self) -> Iterator[bytes]:
        # The names of files need not be UTF-8.
        return (self.item(i).encode("utf-8", "surrogateescape") + b"\0" for i in self.indices)

    def fingerprint(self) -> str:
        """Return the digest of length, kind and samples: 16 bytes as hexadecimal text."""
        samples = hashlib.blake2b(digest_size=ITEM_DIGEST_BYTES)
        for sample in self._samples():
            samples.update(sample)
        text = f"{self.length}|{self.kind}|{samples.hexdigest()}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def digests(self) -> torch.Tensor:
        """Return the digest of each compared sample: shape (k, 8), uint8."""
        digests = [hashlib.blake2b(each, digest_size=ITEM_DIGEST_BYTES) for each in self._samples()]
        rows = np.frombuffer(b"".join(each.digest() for each in digests), dtype=np.uint8)
        return torch.from_numpy(rows.reshape(-1, ITEM_DIGEST_BYTES).copy())


def _count_items(dataset: Any) -> int | None:
    """Return how many items can be read by number; ``None`` for a stream, whose length may be that of a share."""
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    return None if is_stream or not hasattr(dataset, "__len__") else len(dataset)


def views_of(
    dataset: Any, key: Callable[[int], object] | None, *, reads_items: bool = True
) -> list[DatasetView]:
    """Choose what identifies a dataset: `key`, its own fingerprint, its paths, or probes.

    Some items are viewed beside the paths, unless they are random. Of large arrays of floats or bytes
    only shape and dtype count. Without `reads_items`, the length counts instead of items.
    """
    length = _count_items(dataset)
    # A class of the script has two names: in a spawned process, the script's module is __mp_main__.
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}".removeprefix("__mp_main__.")
    name = name.removeprefix("__main__.")
    if key is not None:
        count, by_key = len(dataset), f"{name} by key"
        return [DatasetView(count, by_key, range(count), lambda i: stable_text(key(i)))]
    method, value = getattr(dataset, "fingerprint", None), getattr(dataset, "_fingerprint", None)
    if callable(method) or isinstance(value, str):
        own = str(method()) if callable(method) else str(value)
        return [DatasetView(length, f"{name} by its fingerprint", range(1), lambda _: own)]
    by_paths = _view_paths(dataset, length, f"{name} by its paths")
    if by_paths is not None:
        paths, root = by_paths
        if not (length and reads_items):
            return [paths]
        items = _view_items(
            dataset,
            type(dataset).__qualname__,
            "items",
            _PROBES_BESIDE_PATHS,
            # A sample may hold paths, and hosts may mount the data in different places.
            lambda sample: text_of(sample, _coarse_content).replace(root, ""),
        )
        return [paths] if items is None else [paths, items]
    if length is None:
        return [DatasetView(length, name)]
    items = _view_items(dataset, name, "probes", _PROBES, stable_text) if reads_items else None
    return [items or DatasetView(length, f"{name} by its length, as its items cannot be compared")]


def _view_paths(dataset: Any, length: int | None, kind: str) -> tuple[DatasetView, str] | None:
    """View the paths that a dataset lists; return their root, too, or ``None`` if it lists none."""
    for name in PATH_ATTRIBUTES:
        listing = getattr(dataset, name, None)
        if isinstance(listing, list | tuple) and listing:
            first = listing[0][0] if isinstance(listing[0], tuple | list) else listing[0]
            if isinstance(first, str | os.PathLike):
                break
    else:
        return None
    # Hosts may mount the data in different places: only the path below the root is compared.
    root = getattr(dataset, "root", None)
    if not isinstance(root, str | os.PathLike):
        root = ""  # files of a stream may be divided by folder
    if not root and length is not None:
        root = os.path.commonpath([os.path.dirname(_path_of(entry)) for entry in listing] or [""])  # noqa: PTH120 - for a million paths; Path is 20 times slower
    prefix = os.path.join(os.fspath(root), "")  # noqa: PTH118 - as above

    def parts(index: int) -> list[Part]:
        entry = listing[index]
        rest = stable_text(entry[1:]) if isinstance(entry, tuple | list) else ""
        return [(_path_of(entry).removeprefix(prefix), "other"), (rest, "number")]

    def item(index: int) -> str:
        return "|".join(text for text, _ in parts(index))

    return DatasetView(length, kind, range(len(listing)), item, parts, by_paths=True), prefix


def _path_of(entry: Any) -> str:
    return os.fspath(entry[0] if isinstance(entry, tuple | list) else entry)


def _view_items(
    dataset: Any, name: str, unit: str, count: int, text: Callable[[Any], str]
) -> DatasetView | None:
    """View some items, evenly spread; ``None`` if they are random, and so do not identify a dataset.

    `unit` is what several items are called; `text` is the same for equal items on every host.
    """
    length = len(dataset)
    count = min(count, length)
    indices = sorted({round(p) for p in np.linspace(0, length - 1, count)}) if count else []

    def read(index: int) -> Any:
        with _fixed_randomness(index):
            try:
                return dataset[index]
            except Exception as error:
                where = describe_index(dataset, index)
                add_note(error, f"While reading {where} to compare the dataset over the ranks.")
                raise

    def item(index: int) -> str:
        return text(read(index))

    def parts(index: int) -> list[Part]:
        sample = read(index)
        values = list(sample.values()) if isinstance(sample, Mapping) else sample
        values = values if isinstance(values, list | tuple) else [values]
        return [
            (item_digest(text(value).encode("utf-8", "replace")), _kind_of(value))
            for value in values
        ]

    # A dataset that draws from its own generator gives another item each time.
    if indices and item(indices[0]) != item(indices[0]):
        return None
    return DatasetView(length, f"{name} by {len(indices)} {unit}", indices, item, parts)


def _kind_of(value: Any) -> Literal["number", "text", "other"]:
    """Return whether a value is one number, as labels are, or a text, as paths and names are."""
    if isinstance(value, str | bytes):
        return "text"
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
    is_number = size == 1 or value is None or isinstance(value, int | float | complex)
    return "number" if is_number else "other"


@contextlib.contextmanager
def _fixed_randomness(seed: int) -> Iterator[None]:
    """Let augmentations draw the same on every rank, then restore the generators."""
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


def _coarse_content(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return text_of(value.unbind(), _coarse_content)
        is_of_labels = not value.is_floating_point() and value.dtype is not torch.uint8
        count = value.numel()
    elif isinstance(value, np.ndarray | np.generic):
        is_of_labels, count = value.dtype.kind in "biu" and value.dtype != np.uint8, value.size
    else:  # an image: its file was compared
        return str(getattr(value, "size", ""))
    if is_of_labels or count <= _COMPARED_VALUES:
        return content_of(value)
    return f"{tuple(value.shape)}{value.dtype}"


_SHOWN_CHARS: Final = 200


def check_dataset_consistency(
    dataset: object,
    *,
    key: Callable[[int], object] | None = None,
    facts: Mapping[str, object] | None = None,
) -> str:
    """Check that all ranks have the same dataset in the same order; every rank calls it.

    The dataset is compared by the first of these that it has: `key`, ``fingerprint()``, a list
    of paths (``samples``, ``imgs``, ``files``, ``paths``; relative to its root, so mount
    points may differ), or 64 of its items, read with fixed seeds. Beside paths, 16 items are
    read too, because labels may come from elsewhere; of large images only shape and dtype count then.

    Args:
        dataset: The dataset.
        key: Index -> something that identifies the item, cheaper than reading it.
        facts: Further plain values that must be equal, e.g. ``{"seed": 0, "batch_size": 32}``.

    Returns:
        The fingerprint: 32 hexadecimal digits, equal on all ranks.

    Raises:
        DatasetInconsistencyError: On every rank, naming the ranks that differ (or could not read
            the dataset) and the first item that differs.
        Exception: What the dataset raised, with a note of the index, if no rank could read it.
    """
    if key is not None and not hasattr(dataset, "__len__"):
        raise ConfigError(
            Explanation(
                "key= was given for a dataset without a length.",
                cause="key= maps an index, and a stream has none.",
                fix="leave key= out.",
            )
        )
    # Which loaders will read it is not known here; a forked process leaves nothing open in this one.
    # A fork cannot use the GPU, which the dataset may do when it is read.
    forks = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    return compare_datasets(
        _Reading(dataset, key), facts or {}, start_method="fork" if forks else None
    )


def check_dataset_of(loader: TorchDataLoader[Any]) -> str:
    """Check the dataset and the settings of a loader, and read as it will; every rank calls it.

    Returns the dataset's fingerprint, as `check_dataset_consistency` does.
    """
    method = start_method_of(loader.multiprocessing_context) if loader.num_workers else None
    # A sampler of the user's may give other keys, such as pairs of an index and a size.
    modules = {type(each).__module__.partition(".")[0] for each in samplers_of(loader)}
    reading = _Reading(loader.dataset, by_number=modules <= {"torch", "ddpsafe"})
    return compare_datasets(reading, loader_facts(loader), start_method=method)


def compare_datasets(
    reading: _Reading, facts: Mapping[str, object], *, start_method: str | None
) -> str:
    """Compare datasets over the ranks; see `check_dataset_consistency`.

    The worker that reads is started by `start_method`; ``None`` reads in this process.
    """
    report, error = reading.report(start_method)
    report["facts"] = {name: repr(value) for name, value in facts.items()}
    report["by_number"] = reading.by_number
    reports = gather_json(report)
    broken = [rank for rank, report in enumerate(reports) if report["error"]]
    if len(broken) == len(reports) and error is not None:
        if not all(each["by_number"] for each in reports):
            without_items = _Reading(reading.dataset, reads_items=False)
            return compare_datasets(without_items, facts, start_method=None)
        raise error  # all ranks failed, so the dataset itself is broken
    if broken:
        raise _inconsistent(
            f"{ranks_text(broken)} of {len(reports)} could not read the dataset: "
            f"{reports[broken[0]]['error']}.",
            cause="a file is missing or damaged there, or the storage is not mounted there.",
            fix="make the data readable on every host before training starts.",
            details=[
                *(f"rank {rank}: {reports[rank]['error']}" for rank in broken[1:]),
                f"rank {broken[0]}: {reports[broken[0]]['traceback']}",
            ],
            ranks=broken,
        ) from error
    for fact in sorted({fact for report in reports for fact in report["facts"]}):
        values = [report["facts"].get(fact) for report in reports]
        odd, usual = _minority(values)
        if odd:
            raise _inconsistent(
                f"{ranks_text(odd)} of {len(reports)} {'has' if len(odd) == 1 else 'have'} "
                f"another {fact}: {values[odd[0]]}, where the others have {values[usual]}.",
                cause="it is computed or configured per rank.",
                fix=f"give every rank the same {fact}.",
                ranks=odd,
            )
    fingerprint = str(report["views"][0]["fingerprint"])
    for place in range(min(len(entry["views"]) for entry in reports)):
        if len({entry["views"][place]["fingerprint"] for entry in reports}) > 1:
            described = [{**entry["views"][place], "length": entry["length"]} for entry in reports]
            # The job ends here, or nothing is read: this process may look at what a worker has seen before.
            view = reading.views()[place]
            digests = [rows.numpy() for rows in gather_rows(view.digests())]
            lists = {tuple(map(bytes, rows)) for rows in digests}
            files = {file for each in lists for file in each}
            # The ranks may have divided the files of a stream, and some may share a part.
            is_divided = (
                all(each["length"] is None and each["by_paths"] for each in described)
                and len({each["kind"] for each in described}) == 1
                and len(files) == sum(len(set(each)) for each in lists)
            )
            if not is_divided:
                raise _unequal_data(reading.dataset, view, described, digests)
            fingerprint = hashlib.blake2b(b"".join(sorted(files)), digest_size=16).hexdigest()
    return fingerprint


def _inconsistent(
    what: str,
    *,
    cause: str,
    fix: str,
    ranks: list[int],
    details: Sequence[str] = (),
    index: int | None = None,
) -> DatasetInconsistencyError:
    text = Explanation(what, cause=cause, fix=fix, details=[*details])
    error = DatasetInconsistencyError(text, ranks=tuple(ranks), index=index)
    # So the launcher blames a rank that differs, though all ranks raise.
    error.origin = "own" if current_replica().rank in ranks else "mismatch"
    return error


def compare_states(state: Mapping[str, object]) -> None:
    """Check that all ranks are at the same position in the data; every rank calls it.

    Raises:
        DatasetInconsistencyError: On every rank, naming the ranks at another position.
    """
    compared = ("epoch", "consumed", "finished", "identity")
    states = gather_json({key: state[key] for key in compared})
    # At the end of an epoch the ranks may have read different numbers of samples.
    places = [{**place, "consumed": None} if place["finished"] else place for place in states]
    odd, _ = _minority([json.dumps(place, sort_keys=True) for place in places])
    if odd:
        raise _inconsistent(
            f"{ranks_text(odd)} of {len(states)} {'is' if len(odd) == 1 else 'are'} at a different "
            "position in the data.",
            cause="ranks took different numbers of batches, or saved at different moments.",
            fix="call state_dict() after the same step on every rank.",
            details=[
                f"rank {rank}: " + ", ".join(f"{key} {place[key]}" for key in compared[:-1])
                for rank, place in enumerate(states)
            ],
            ranks=odd,
        )


class _Reading(Dataset[Any]):
    """What is read of a dataset, as the only item of another one, so that a DataLoader worker can read it."""

    def __init__(
        self,
        dataset: Any,
        key: Callable[[int], object] | None = None,
        *,
        by_number: bool = True,
        reads_items: bool = True,
    ) -> None:
        self.dataset, self.by_number = dataset, by_number
        self._key, self._reads_items = key, reads_items

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Exception | None]:
        """Return the report on the dataset, and the exception that it raised."""
        try:
            views = self.views()
            described = [
                {"fingerprint": view.fingerprint(), "kind": view.kind, "by_paths": view.by_paths}
                for view in views
            ]
        except Exception as error:  # noqa: BLE001 - raised on every rank; here it would leave ranks waiting
            report = _report_of(error)
            if get_worker_info() is not None:  # pickling keeps notes, and drops the traceback
                error = portable(error) or RuntimeError(report["error"])  # type: ignore[assignment]
                add_note(error, report["traceback"])
            return report, error
        return {"error": None, "length": views[0].length, "views": described}, None

    def views(self) -> list[DatasetView]:
        return views_of(self.dataset, self._key, reads_items=self._reads_items)

    def report(self, start_method: str | None) -> tuple[dict[str, Any], Exception | None]:
        """Read in a worker, or in this process; return an exception instead of raising it."""
        try:
            if start_method is None or not self._may_be_sent(start_method):
                with closing_what_opens():
                    return self[0]
            loader = TorchDataLoader(
                self,
                batch_size=None,
                num_workers=1,
                multiprocessing_context=start_method,
                generator=torch.Generator(),  # else torch draws the worker's seed from the global one
            )
            report, error = next(iter(loader))
        except Exception as raised:  # noqa: BLE001 - as above
            return _report_of(raised), raised
        return report, error

    def _may_be_sent(self, start_method: str) -> bool:
        """Return whether there are items for a worker to read, and it can receive the dataset as it is."""
        # No process of `multiprocessing` that is a daemon may start another one.
        if _count_items(self.dataset) is None or multiprocessing.current_process().daemon:
            return False
        if start_method == "fork":
            # It would move the position of a file that is open here, and wait for ever for a lock that a
            # thread holds here.
            hazards = find_handles(self.dataset, name="dataset")
            return all(hazard.severity == "memory" for hazard in hazards)
        return find_unpicklable((self.dataset, self._key), name="dataset") is None


def _report_of(error: Exception) -> dict[str, Any]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": f"{type(error).__name__}: {error}", "traceback": text}


def _unequal_data(
    dataset: object,
    view: DatasetView,
    reports: list[dict[str, Any]],
    digests: Sequence[NDArray[np.uint8]],
) -> DatasetInconsistencyError:
    """Find the first compared sample that differs, and make the error with the advice that fits."""
    odd, usual = _minority([report["fingerprint"] for report in reports])
    theirs, others = digests[usual], digests[odd[0]]
    count = min(len(theirs), len(others))
    unequal = np.flatnonzero((theirs[:count] != others[:count]).any(axis=1))
    place = int(unequal[0]) if len(unequal) else None if len(theirs) == len(others) else count
    same_length = reports[usual]["length"] == reports[odd[0]]["length"]
    if not same_length and isinstance(view.indices, list):
        place = None  # probes of datasets of unequal length are not the same items
    index, text, parts = place, None if place is None else "nothing", None
    if place is not None and place < len(view.indices):
        index = view.indices[place]
        text, parts = view.item(index)[:_SHOWN_CHARS], view.parts(index)
    is_split = hasattr(dataset, "indices") and hasattr(dataset, "dataset")
    facts = gather_json({"text": text, "parts": parts, "is_split": is_split})
    difference = UnequalData(
        same_length=same_length,
        same_samples=sorted(map(bytes, theirs)) == sorted(map(bytes, others)),
        unequal=unequal_parts(facts[usual]["parts"], facts[odd[0]]["parts"]),
        is_split=facts[usual]["is_split"],
        has_paths=reports[usual]["by_paths"],
    )
    cause, fix = next((rule.cause, rule.fix) for rule in DIFFERENCES if rule.holds(difference))
    where = "" if index is None else f" The first difference is at item {index}."
    return _inconsistent(
        f"{ranks_text(odd)} of {len(reports)} {'has' if len(odd) == 1 else 'have'} other data than "
        f"the rest.{where}",
        cause=cause,
        fix=fix,
        details=[
            f"rank {rank}: {report['length']} samples, {report['kind']}"
            + ("" if facts[rank]["text"] is None else f", there: {facts[rank]['text']}")
            for rank, report in enumerate(reports)
            if rank in {usual, *odd}
        ],
        ranks=odd,
        index=index,
    )


def unequal_parts(parts: Any, others: Any) -> set[str]:
    """Return what differs in two samples with an equal input: ``"number"``, ``"text"``, ``"other"``."""
    pairs = list(zip(parts or (), others or (), strict=False))
    # An input that is a single number tells apart only where it comes first.
    has_equal_input = any(
        one == other and (place == 0 or one[1] != "number")
        for place, (one, other) in enumerate(pairs)
    )
    return {one[1] for one, other in pairs if one != other} if has_equal_input else set()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalData:
    """How the data of two ranks differ.

    Attributes:
        same_samples: Whether what was compared is the same, in another order.
        unequal: What differs in the first sample that does, if its input is equal.
        is_split: Whether the dataset is a part of another one, as `random_split` makes it.
    """

    same_length: bool
    same_samples: bool
    unequal: set[str]
    is_split: bool
    has_paths: bool


class _DifferenceRule(NamedTuple):
    holds: Callable[[UnequalData], bool]
    cause: str
    fix: str


DIFFERENCES: Final = (
    _DifferenceRule(
        lambda data: data.unequal == {"text"},
        "the samples are equal but for a text, such as a path or an id of each rank, unless they were "
        "shuffled per rank.",
        "make them equal, or leave them out of the samples. If they may differ, make the loader with "
        "check=False, and compare the rest with check_dataset_consistency(dataset, key=…).",
    ),
    _DifferenceRule(
        lambda data: bool(data.unequal),
        "the samples have equal inputs but other labels: the classes are numbered in an order that "
        "differs between processes, as that of a set or of a directory listing does.",
        "number them in a fixed order: {name: i for i, name in enumerate(sorted(set(labels)))}.",
    ),
    _DifferenceRule(
        lambda data: data.is_split and data.same_length,
        "the split was probably drawn from a generator that is seeded per rank.",
        "give the split its own generator: random_split(dataset, lengths, "
        "generator=torch.Generator().manual_seed(0)).",
    ),
    _DifferenceRule(
        lambda data: data.has_paths and data.same_length and data.same_samples,
        "the ranks list the same files in another order: that of a directory listing or of a set.",
        "list files with ddpsafe.data.sorted_files(), or sort the list.",
    ),
    _DifferenceRule(
        lambda data: data.has_paths,
        "files are missing on a host, or were filtered per rank.",
        "compare the data of the hosts; list files with ddpsafe.data.sorted_files(), and filter the "
        "same on all ranks.",
    ),
    _DifferenceRule(
        lambda data: not data.same_length,
        "samples are missing on a host, or were filtered or divided per rank.",
        "give every rank the whole dataset, filtered the same: the sampler divides it.",
    ),
    _DifferenceRule(
        lambda _: True,
        "the samples were shuffled, filtered, divided or drawn at random per rank, or read from other files.",
        "give every rank the whole dataset in the same order, drawn from a fixed seed: the sampler shuffles and divides it.",
    ),
)
"""What can differ, the most certain first; the first rule that holds gives cause and advice."""


def _minority(values: list[Any]) -> tuple[list[int], int]:
    """Return the ranks with another value than most, and a rank that has the usual one."""
    usual = collections.Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual], values.index(usual)


def loader_facts(loader: Any) -> dict[str, object]:
    """Return what must be equal on all ranks of a loader besides its dataset."""
    sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
    identity: dict[str, object] = getattr(find_epoch_holder(loader), "identity", dict)()
    # Length and fingerprint are left to the comparison of the dataset, which names the item.
    settings = {key: identity[key] for key in identity if key not in {"n", "fingerprint"}}
    return {
        **settings,
        "seed": getattr(sampler, "seed", None),
        "batch size": loader.batch_size or getattr(sampler, "batch_size", None),
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__name__,
        "num_replicas": getattr(sampler, "num_replicas", None),
    }
