"""Distributed tensors (FSDP2, DTensor): saved by all ranks together, through torch's own format.

``torch.distributed.checkpoint`` gets tensors only. Everything else goes where replicated state
goes: as bytes it would be unpickled without restraint.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from typing import TYPE_CHECKING, Any, Final

from ddpsafe.checkpoint._blocks import DamagedFileError, checksum_file
from ddpsafe.checkpoint._manifest import FileFacts, Manifest
from ddpsafe.checkpoint._trees import leaves, replace_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim import Optimizer

FOLDER: Final = "shards"
_MARK: Final = "\0shard "
"""Stands in the replicated part where a distributed tensor was; no text of a user begins so."""

_SAFE_MODULES: Final = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_SAFE_NAMES: Final = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("pathlib", "PosixPath"),  # where it was written
    ("pathlib._local", "PosixPath"),  # as Python 3.13 calls it
    ("torch.serialization", "_get_layout"),
}


def is_sharded(value: object) -> bool:
    """Tell whether a value is a distributed tensor."""
    # Who has one has imported this; importing it takes a tenth of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split(tree: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take the distributed tensors out of a state; return the rest and them, by path."""
    parts: dict[str, torch.Tensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        parts[path] = leaf
        return _MARK + path

    if not any(is_sharded(leaf) for _, leaf in leaves(tree, name)):
        return tree, parts
    return replace_leaves(tree, name, take), parts


def join(tree: Any, name: str, parts: Mapping[str, torch.Tensor]) -> Any:
    """Put distributed tensors back to where they were taken from."""

    def put(_: str, leaf: Any) -> Any:
        marked = isinstance(leaf, str) and leaf.startswith(_MARK)
        return parts[leaf.removeprefix(_MARK)] if marked else leaf

    return replace_leaves(tree, name, put)


def find_owner(optimizer: Optimizer, state: Mapping[str, Any]) -> nn.Module | None:
    """Return the model that an optimizer of distributed tensors belongs to, if it is one."""
    from torch import nn

    first = next(iter(optimizer.param_groups[0]["params"]), None)
    if not is_sharded(first):
        return None
    for value in state.values():
        if isinstance(value, nn.Module) and any(p is first for p in value.parameters()):
            return value
    return None


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by the names of parameters; ones that have none yet get it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return dict(get_optimizer_state_dict(model, optimizer))


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer the state that `optimizer_state` returned."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state)


def own_bytes(shards: Mapping[str, torch.Tensor]) -> int:
    """Return how many bytes of the shards' files are this rank's; copies are written once."""
    return sum(_local_bytes(part) for part in shards.values())


def _local_bytes(part: Any) -> int:
    place = part.device_mesh.get_coordinate()
    if place is None:  # a rank outside of the mesh
        return 0
    is_copy = any(
        at > 0
        for at, placement in zip(place, part.placements, strict=True)
        if placement.is_replicate()
    )
    return 0 if is_copy else int(part.to_local().nbytes)


def write_shards(shards: dict[str, torch.Tensor], folder: Path) -> None:
    """Write this rank's parts, all ranks together."""
    import torch.distributed.checkpoint as dcp

    dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder / FOLDER, sync_files=True))


def facts_of_shards(folder: Path, rank: int) -> dict[str, FileFacts]:
    """Return size and checksums of the files that this rank wrote; rank 0 wrote the index too."""
    own = sorted((folder / FOLDER).glob(f"__{rank}_*"))
    if rank == 0:
        own.append(folder / FOLDER / ".metadata")
    return {
        str(path.relative_to(folder)): FileFacts(size_bytes=size, crc32=sums)
        for path in own
        for size, sums in [checksum_file(path)]
    }


def check_shards(folder: Path, manifest: Manifest, *, rank: int, world_size: int) -> None:
    """Check this rank's share of the shards' files, and the index.

    Raises:
        DamagedFileError: One is not what was written.
    """
    names = sorted(name for name in manifest.files if name.startswith(FOLDER))
    for number, name in enumerate(names):
        if number % world_size == rank or name.endswith(".metadata"):
            with manifest.open(folder, name) as reader:
                reader.check_rest()


def read_shards(shards: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill distributed tensors in place, all ranks together, whatever the saved world size was."""
    import torch.distributed.checkpoint as dcp

    dcp.load(shards, storage_reader=_safe_reader(folder / FOLDER))


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that were saved, whole and without values, by path."""
    import torch

    metadata = _load_index((folder / FOLDER / ".metadata").read_bytes())
    return {
        path: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for path, entry in metadata.state_dict_metadata.items()
    }


class _Unpickler(pickle.Unpickler):
    """Loads torch's index of shards, and no other classes than it is made of."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module.startswith(_SAFE_MODULES) or (module, name) in _SAFE_NAMES:
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return value
        raise DamagedFileError(f"the index of shards names {module}.{name}, which is none of it")


def _load_index(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


def _safe_reader(folder: Path) -> Any:
    filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")
    metadata_module = importlib.import_module("torch.distributed.checkpoint.metadata")

    class SafeReader(filesystem.FileSystemReader):  # type: ignore[misc, name-defined]  # imported late
        """torch's reader, which would unpickle its index without restraint."""

        def read_metadata(self, *_args: object, **_options: object) -> Any:
            metadata = _load_index((folder / ".metadata").read_bytes())
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = metadata_module.StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return SafeReader(folder)
