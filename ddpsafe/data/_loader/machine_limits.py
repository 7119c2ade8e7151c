"""Warns of the machine's limits before workers run into them: open files, shared memory, cores."""

from __future__ import annotations

import errno
import os
import resource
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch

from ddpsafe._advice import ADVICE, COMMANDS
from ddpsafe._errors import Explanation
from ddpsafe._host import count_cores
from ddpsafe.data._replica import local_world_size
from ddpsafe.data.errors import DataWarning

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the mount whose size is the limit
_MIB: Final = 2**20
# Low estimates on purpose: how large batches are is unknown before the first one.
_LEAST_BYTES_PER_BATCH: Final = 2**16
_TENSORS_PER_BATCH: Final = 2
_FILES_PER_WORKER: Final = 4
_MAX_PROCESSES_PER_CORE: Final = 2


def warn_of_limits(loader: DataLoader[Any]) -> None:
    """Warn if this loader's workers will run short of open files, shared memory or cores.

    Before a batch is read only clear shortages are known; `check_shared_memory` measures one.
    """
    if loader.num_workers == 0:
        return
    num_workers, in_flight = loader.num_workers, batches_in_flight(loader)
    shortages: list[Explanation] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]  # torch has no types here
    if soft != resource.RLIM_INFINITY and strategy == "file_descriptor":
        needed = num_workers * _FILES_PER_WORKER + in_flight * _TENSORS_PER_BATCH
        open_files = psutil.Process().num_fds()
        if open_files + needed > soft:
            shortages.append(
                Explanation(
                    f"{num_workers} workers with {in_flight} batches in flight need about {needed} "
                    f"open files; this process has {open_files} and may have {soft} (RLIMIT_NOFILE, hard "
                    f"limit {hard}).",
                    cause="each tensor that a worker sends is an open file until it is freed.",
                    fix=f"raise the limit{_how_to_raise(soft, hard)}  or use fewer workers, or "
                    "torch.multiprocessing.set_sharing_strategy('file_system').",
                )
            )
    free, total = shared_memory_bytes()
    if free is not None and total is not None and free < in_flight * _LEAST_BYTES_PER_BATCH:
        shortages.append(
            Explanation(
                f"{SHARED_MEMORY} has {free / _MIB:.1f} MiB free of {total / _MIB:.1f} MiB, for "
                f"{in_flight} batches in flight.",
                cause=ADVICE["DS-MEM-shm"][0],
                fix=ADVICE["DS-MEM-shm"][1],
            )
        )
    cores, ranks = count_cores(), local_world_size()
    shared = cores == os.cpu_count()  # False: this rank is pinned to cores of its own
    # torch itself warns of more workers than cores in one rank.
    if shared and num_workers <= cores and num_workers * ranks > _MAX_PROCESSES_PER_CORE * cores:
        shortages.append(
            Explanation(
                f"{ranks} ranks with {num_workers} workers each are {num_workers * ranks} processes "
                f"on {cores} cores.",
                cause="num_workers is per rank, not per machine.",
                fix=f"num_workers={max(1, cores // ranks)}, unless workers mostly wait for storage.",
            )
        )
    for explanation in shortages:
        warnings.warn(str(explanation), DataWarning, stacklevel=4)


def batches_in_flight(loader: DataLoader[Any]) -> int:
    """Return how many batches the workers of a loader prepare ahead."""
    return loader.num_workers * (loader.prefetch_factor or 1)


def check_shared_memory(batch: object, *, batches: int) -> None:
    """Warn if the batches in flight on this machine, each as large as `batch`, exceed /dev/shm."""
    total = shared_memory_bytes()[1]
    needed = tensor_bytes(batch) * batches * local_world_size()
    if total is None or needed <= total:
        return
    text = Explanation(
        f"Batches of {tensor_bytes(batch) / _MIB:.1f} MiB, {batches} of them in flight for each "
        f"of {local_world_size()} ranks, need {needed / _MIB:.0f} MiB of {SHARED_MEMORY}, which "
        f"has {total / _MIB:.0f} MiB.",
        cause="workers pass batches through shared memory; a worker that finds it full is killed "
        "by SIGBUS.",
        fix=ADVICE["DS-MEM-shm"][1],
    )
    warnings.warn(str(text), DataWarning, stacklevel=4)


def shared_memory_bytes() -> tuple[int | None, int | None]:
    """Return how much of /dev/shm is free, and its size; ``None`` if it does not exist."""
    try:
        stats = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None, None
    return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize


def tensor_bytes(batch: object) -> int:
    """Return the size of the tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.untyped_storage().nbytes()  # sending a view sends its whole storage
    if isinstance(batch, Mapping):
        return sum(tensor_bytes(part) for part in batch.values())
    if isinstance(batch, list | tuple):
        return sum(tensor_bytes(part) for part in batch)
    return 0


def note_limits(error: BaseException) -> bool:
    """Note how many files this process may open, and return ``True``, if an error says that it had more."""
    texts = ("Too many open files", "received 0 items of ancdata")
    number = error.errno if isinstance(error, OSError) else None
    # A worker's own error arrives as text, without an errno.
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    if number not in {errno.EMFILE, errno.ENFILE} and not told:
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = Explanation(
        f"This process may open {soft} files (RLIMIT_NOFILE, hard limit {hard}).",
        cause="files are opened for each sample and not closed, or many tensors are "
        "passed as file descriptors.",
        fix=f"raise the limit{_how_to_raise(soft, hard)}  or open the files once, in a PerProcess; for "
        "tensors, use torch.multiprocessing.set_sharing_strategy('file_system').",
    )
    add_note(error, str(text))
    return True


def add_note(error: BaseException, note: str) -> None:
    """Append a note to an exception without changing its type."""
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)


def _how_to_raise(soft: int, hard: int) -> str:
    here, outside = COMMANDS["DS-MEM-descriptors"]
    if hard == soft:  # `ulimit` cannot exceed it
        return f", which is the hard one, where the session or the container starts:  {outside}"
    return f" with  {here.format(files=hard)}"
