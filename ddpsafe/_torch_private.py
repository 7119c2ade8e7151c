"""Private names of torch that are read from its objects, each with its reason; torch is not imported here.

The others are in `_worker.torch_hooks` (what is replaced in a rank), `data._loader.torchs_loader` (what
the loader overrides) and `_launcher.nodes.torchs_rendezvous` (the state of the rendezvous). No other
module uses a private name of torch. If a version of torch renames one, ddpsafe loses the feature behind
it and nothing else; a test compares the names with the installed torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from torch import Tensor, nn

WORKER_SIGNALS: Final = "torch.utils.data._utils.signal_handling"
"""The module in which a DataLoader's worker sets its signal handlers; loaded with DataLoader."""

COMPILER: Final = "torch._dynamo"
"""What DistributedDataParallel imports when it is created, a second for each rank."""


# An iterator of torch's DataLoader knows its workers; the loader has no public access to them.


def workers_of(iterator: object) -> Sequence[BaseProcess]:
    """Return the worker processes of a DataLoader's iterator; none if it has no workers."""
    return getattr(iterator, "_workers", None) or ()


def is_expected(iterator: object, number: int) -> bool:
    """Return whether a DataLoader's iterator still waits for a worker: not once that has read all of its part."""
    return bool([*getattr(iterator, "_workers_status", ()), *[True] * (number + 1)][number])


def keeps_workers(iterator: object) -> bool:
    """Return whether the workers outlive a pass over the data (``persistent_workers``)."""
    return bool(getattr(iterator, "_persistent_workers", False))


def end_of_workers(iterator: object) -> Callable[[], object]:
    """Return what ends the workers: torch's own end of an iteration."""
    end: Callable[[], object] = getattr(iterator, "_shutdown_workers", lambda: None)
    return end


def dataset_behind(iterator: object) -> object:
    """Return the dataset of ddpsafe's wrapper, which the iterator reads; ``None`` without one."""
    return getattr(getattr(iterator, "_dataset", None), "dataset", None)


def find_awaited_worker(iterator: object) -> int | None:
    """Return which worker prepares the next batch: torch keeps that for each batch in flight."""
    task = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None))
    return None if task is None else int(task[0])


def worker_limit_s(iterator: object) -> float:
    """Return the DataLoader's ``timeout``, in seconds."""
    return float(getattr(iterator, "_timeout", 0))


def uncompiled(model: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` has wrapped; ``None`` if it has not."""
    inner: nn.Module | None = getattr(model, "_orig_mod", None)
    return inner


def changes_of(parameter: Tensor) -> int:
    """Return how often a tensor was changed in place; torch documents the name for that."""
    return parameter._version  # noqa: SLF001


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Return indices and values of a COO tensor; the public ones need it coalesced."""
    return [tensor._indices(), tensor._values()]  # noqa: SLF001


def module_versions(state: object) -> Mapping[str, Any] | None:
    """Return the versions of modules that torch keeps beside the tensors of a model's state."""
    versions = getattr(state, "_metadata", None)
    return versions if isinstance(versions, dict) else None


def set_module_versions(state: Any, versions: Mapping[str, Any]) -> None:
    """Set them; `load_state_dict` reads them."""
    state._metadata = versions  # noqa: SLF001
