"""State as trees of dicts, lists and tensors: walking, copying to host memory, measuring."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._torch_private import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
"""Types of immutable values that need no copy and load everywhere."""


MAX_DEPTH: Final = 100
"""How deep containers may be nested. A state must also be readable from deeper in the stack, and as JSON."""


def leaves(tree: object, path: str, left: int = MAX_DEPTH) -> Iterator[tuple[str, Any]]:
    """Walk dicts, lists and tuples except named tuples; yield everything else with its path.

    Raises:
        RecursionError: They are nested deeper than `left`, or contain themselves.
    """
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    if left == 0:
        message = f"nested deeper than {MAX_DEPTH}"
        raise RecursionError(message)
    for key, value in items:
        yield from leaves(value, f"{path}[{key!r}]", left - 1)


def replace_leaves(tree: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """Return a copy of the tree with each leaf replaced by ``change(path, leaf)``.

    Containers keep their type. The leaves are those of `leaves`.
    """
    if isinstance(tree, dict):
        items = {
            key: replace_leaves(value, f"{path}[{key!r}]", change) for key, value in tree.items()
        }
        if type(tree) is dict:
            return items
        same = tree.copy()  # keeps the type: OrderedDict, Counter, defaultdict
        if hasattr(tree, "__dict__"):  # torch stores the versions of modules there, in _metadata
            same.__dict__.update(tree.__dict__)
        for key, value in items.items():
            same[key] = value
        return same
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        values = [
            replace_leaves(value, f"{path}[{number}]", change) for number, value in enumerate(tree)
        ]
        return values if type(tree) is list else type(tree)(values)
    return change(path, tree)


class HostCopies:
    """Host memory that tensors are copied to, reused from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def reserved_bytes(self) -> int:
        """Return how much memory they have."""
        return size_bytes(self._buffers)

    def copy(self, tree: Any) -> Any:
        """Copy a state; the same tensor under two names is copied once."""
        import torch

        done: dict[tuple[object, ...], torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}

        def change(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf if type(leaf) in PLAIN else copy.deepcopy(leaf)
            key = _identity(leaf)
            if key in done:
                return done[key]
            source = leaf.detach()
            # Sparse, quantized and nested tensors do not lie in one plain buffer.
            if source.layout is not torch.strided or source.is_quantized or source.is_nested:
                done[key] = source.to("cpu", copy=True)
            else:
                # New memory would cost more than the copy, as every page must be faulted in.
                buffer = self._buffers.get(path)
                if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                    # From a GPU, only a copy to pinned memory is asynchronous.
                    buffer = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
                done[key] = buffer.copy_(source, non_blocking=True)
            buffers[path] = done[key]
            return done[key]

        copied = replace_leaves(tree, "", change)
        self._buffers = buffers
        for device in {key[0] for key in done if isinstance(key[0], torch.device)}:
            if device.type == "cuda":  # the copies run asynchronously on each device's stream
                torch.cuda.synchronize(device)
        return copied


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:  # it has no address and no strides
        return (tensor.device, id(tensor))
    place = (tensor.device, tensor.data_ptr() if tensor.numel() else id(tensor))
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride(), id(type(tensor)))


def size_bytes(tree: object) -> int:
    """Return the approximate size of a state in a file."""
    import torch

    storages: dict[object, int] = {}
    others = 0
    for _, leaf in leaves(tree, ""):
        if isinstance(leaf, torch.Tensor):
            for piece in pieces(leaf):
                storage = piece.untyped_storage()
                storages[piece.device, storage.data_ptr()] = storage.nbytes()
        else:
            others += 32 + (len(leaf) if isinstance(leaf, (str, bytes)) else 0)
    return sum(storages.values()) + others + 256 * len(storages)


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold a tensor's values: several for a sparse or a jagged one."""
    import torch

    tensor = tensor.detach()
    flatten = getattr(tensor, "__tensor_flatten__", None)  # of a tensor that consists of others
    if flatten is not None:
        return [piece for name in flatten()[0] for piece in pieces(getattr(tensor, name))]
    if tensor.is_nested or tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # an opaque layout such as mkldnn's
