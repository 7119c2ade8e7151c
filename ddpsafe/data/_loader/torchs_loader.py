"""Private names of torch's DataLoader that ddpsafe's overrides; see `_torch_private`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils import pin_memory as _pinning

if TYPE_CHECKING:
    from collections.abc import Iterator

T_co = TypeVar("T_co", covariant=True)


class OpenDataLoader(TorchDataLoader[T_co]):
    """torch's DataLoader with names of ddpsafe's own for what it makes in each pass."""

    def _made_iterator(self) -> Iterator[T_co]:
        """Return a new iterator, with new workers if there are any."""
        iterator: Iterator[T_co] = super()._get_iterator()
        return iterator

    def _made_indices(self) -> Any:
        """Return what yields the indices of the batches, or of the samples without batches."""
        return super()._index_sampler

    def _end_workers(self) -> None:
        """End persistent workers, which hold the dataset; the next pass starts new ones."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            getattr(iterator, "_shutdown_workers", lambda: None)()

    def _without_workers(self) -> dict[str, Any]:
        """Return the attributes to pickle, without the iterator that keeps the workers."""
        return {**self.__dict__, "_iterator": None}

    def _get_iterator(self) -> Any:
        return self._made_iterator()

    @property
    def _index_sampler(self) -> Any:
        return self._made_indices()


def pinned(batch: Any, device: Any) -> Any:
    """Return a batch in pinned memory, as torch's pinning thread makes it."""
    return _pinning.pin_memory(batch, device)  # type: ignore[no-untyped-call]  # torch has no types here
