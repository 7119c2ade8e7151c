"""Distributed tensors (FSDP2, DTensor): each rank writes its own part, and reads what it needs.

A part is written as plain bytes, and the manifest says where it lies in its tensor. So nothing has to
be unpickled, no collective can hang, and a tensor can be read whole or in other parts.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.checkpoint._checksums import DamagedFileError
from ddpsafe.checkpoint._format import (
    NAME,
    SHARDS,
    FileFacts,
    Manifest,
    Piece,
    ShardedTensor,
    new_file,
)
from ddpsafe.checkpoint._trees import leaves, replace_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from ddpsafe.checkpoint._slots import Slot

MARK: Final = "\0shard "
"""Start of the string that replaces a distributed tensor in the replicated part.

A state in which a user's string starts with it is refused.
"""


def is_sharded(value: object) -> bool:
    """Return whether a value is a distributed tensor."""
    # A process that has one has imported this module. Importing it here would take 0.1 s.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split(tree: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take the distributed tensors out of a state; return the rest, and the tensors by path."""
    parts: dict[str, torch.Tensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        parts[path] = leaf
        return MARK + path

    if not any(is_sharded(leaf) for _, leaf in leaves(tree, name)):
        return tree, parts
    return replace_leaves(tree, name, take), parts


def _local(tensor: Any, path: str) -> tuple[list[int], list[int], torch.Tensor] | None:
    """Return offsets, shape and values of this rank's part; ``None`` if it is not in the mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise _unsaveable(path, "partial sums that are not reduced yet (a Partial placement)")
    chunks = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    local = tensor.to_local()
    if len(chunks) != 1 or tuple(local.shape) != tuple(chunks[0].sizes):
        raise _unsaveable(path, f"a local part that is {type(local).__name__}, not one block")
    return list(chunks[0].offsets), list(chunks[0].sizes), local


def _unsaveable(path: str, what: str) -> ConfigError:
    return ConfigError(
        Explanation(
            f"{path} is a distributed tensor that cannot be saved or restored.",
            cause=f"it has {what}.",
            fix="pass tensor.full_tensor() instead.",
        )
    )


Own = dict[str, tuple[list[int], list[int], "torch.Tensor"]]
"""By path: the offsets of this rank's part in its tensor, its shape, and its values."""


def own_parts(shards: Mapping[str, torch.Tensor]) -> Own:
    """Return the parts that this rank writes. Of identical copies, only the mesh's first rank writes one."""
    own: Own = {}
    for path, tensor in shards.items():
        sharded: Any = tensor  # a DTensor
        place = sharded.device_mesh.get_coordinate() or ()
        if any(
            coordinate > 0
            for coordinate, placement in zip(place, sharded.placements, strict=False)
            if placement.is_replicate()
        ):
            continue  # another rank of the mesh has the same part and writes it
        part = _local(tensor, path)
        if part is not None:
            own[path] = part
    return own


def bytes_of(own: Own) -> int:
    """Return how many bytes this rank writes."""
    return sum(local.nbytes for _, _, local in own.values())


def write_shards(own: Own, folder: Path | Slot, rank: int) -> dict[str, Any]:
    """Write this rank's parts into a file of its own; return in plain values what the manifest needs."""
    import torch

    pieces: dict[str, Any] = {}
    name = f"{SHARDS}/rank-{rank:05}.bin"
    with new_file(folder, name) as writer:
        for path, (offsets, sizes, local) in own.items():
            values = local.detach().cpu().contiguous().reshape(-1)
            pieces[path] = [writer.size, offsets, sizes]
            if values.numel():
                # As bytes: NumPy has neither bfloat16 nor floats of 8 bits.
                writer.write(values.view(torch.uint8).numpy().data)
    return {"file": name, "size_bytes": writer.size, "crc32": writer.crc32, "pieces": pieces}


def describe(shards: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return dtype and shape of each distributed tensor, in plain values."""
    return {
        path: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for path, tensor in shards.items()
    }


def index_of(
    whole: Mapping[str, Any], written: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, FileFacts], dict[str, ShardedTensor]]:
    """Make the manifest's entries from what `describe` returned, and `write_shards` on each rank.

    Raises:
        ValueError: They do not make up the tensors.
    """
    files: dict[str, FileFacts] = {}
    pieces: dict[str, dict[object, Piece]] = {path: {} for path in whole}
    for facts in written:
        files[facts["file"]] = FileFacts(size_bytes=facts["size_bytes"], crc32=facts["crc32"])
        for path, (start, offsets, sizes) in facts["pieces"].items():
            piece = Piece(file=facts["file"], start=start, offsets=offsets, sizes=sizes)
            if piece.numel:
                # Ranks of different meshes may have written the same part: each group of ranks may
                # have its own mesh, as with tensor parallelism inside subgroups. The lowest rank's
                # is used.
                pieces[path].setdefault((*offsets, *sizes), piece)
    shards = {
        path: ShardedTensor(dtype=dtype, shape=shape, pieces=list(pieces[path].values()))
        for path, (dtype, shape) in whole.items()
    }
    return files, shards


def check_shards(folder: Path | Slot, manifest: Manifest, *, rank: int, world_size: int) -> None:
    """Check this rank's share of the shard files, and that every piece lies inside its file.

    Raises:
        DamagedFileError: A file is not what was written, or a piece does not lie in it.
    """
    for tensor in manifest.shards.values():
        width = tensor.torch_dtype().itemsize
        for piece in tensor.pieces:
            if piece.start + piece.numel * width > manifest.files[piece.file].size_bytes:
                raise DamagedFileError(f"{NAME}: a piece is longer than its file {piece.file}")
    names = sorted(name for name in manifest.files if name.startswith(f"{SHARDS}/"))
    # A share of the files: what this rank reads of the others is checked as it is read.
    for name in names[rank::world_size]:
        with manifest.open(folder, name) as file:
            file.check()


class SavedShards:
    """The distributed tensors of a checkpoint, read from the files on demand."""

    def __init__(self, folder: Path | Slot, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def find(self, leaf: object) -> ShardedTensor | None:
        """Return the distributed tensor that a leaf of the replicated part stands for, if any.

        Raises:
            DamagedFileError: It stands for a tensor that the checkpoint does not have.
        """
        if not isinstance(leaf, str) or not leaf.startswith(MARK):
            return None
        tensor = self._manifest.shards.get(leaf.removeprefix(MARK))
        if tensor is None:
            raise DamagedFileError(f"{NAME} lacks the tensor {leaf.removeprefix(MARK)[:100]!r}")
        return tensor

    def on_meta(self, tree: Any, name: str) -> Any:
        """Return the tree with tensors on the meta device where distributed ones were."""
        import torch

        def put(_: str, leaf: Any) -> Any:
            saved = self.find(leaf)
            if saved is None:
                return leaf
            return torch.empty(saved.shape, dtype=saved.torch_dtype(), device="meta")

        return replace_leaves(tree, name, put) if self._manifest.shards else tree

    def whole(self, tree: Any, name: str) -> Any:
        """Return the tree with the distributed tensors whole, on the CPU."""
        return replace_leaves(tree, name, lambda _, leaf: self.whole_leaf(leaf))

    def whole_leaf(self, leaf: Any) -> Any:
        """Return the distributed tensor that a leaf stands for, whole; other leaves as they are."""
        import torch

        saved = self.find(leaf)
        if saved is None:
            return leaf
        whole = torch.empty(saved.shape, dtype=saved.torch_dtype())
        self._read(saved, [0] * len(saved.shape), whole)
        return whole

    def fill(self, target: Any, source: Any, path: str) -> None:
        """Fill this rank's part of a distributed tensor from a sharded or a whole saved one.

        `source` is the leaf of the checkpoint: a whole tensor, or the mark of a distributed one. `path` is
        for errors.
        """
        import torch

        part = _local(target, path)
        if part is None:
            return
        offsets, sizes, local = part
        saved = self.find(source)
        with torch.no_grad():
            if saved is None:
                local.copy_(_part(source, offsets, sizes))
            else:
                self._read(saved, offsets, local)

    def _read(self, saved: ShardedTensor, offsets: list[int], target: torch.Tensor) -> None:
        """Fill the block of a tensor that begins at `offsets` from the pieces that overlap it."""
        import torch

        dtype = saved.torch_dtype()
        for piece in saved.pieces:
            overlap = _overlap(piece, offsets, target.shape)
            if overlap is None:
                continue
            in_piece, in_target, sizes = overlap
            # Rows along the first dimension are contiguous in the file: read only those needed.
            row = math.prod(piece.sizes[1:]) * dtype.itemsize
            first, rows = (in_piece[0], sizes[0]) if sizes else (0, 1)
            with self._manifest.open(self._folder, piece.file) as file:
                data = file.read(piece.start + first * row, rows * row)
            values = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
            if sizes:
                values = values.reshape(rows, *piece.sizes[1:])
                values = _part(values, [0, *in_piece[1:]], sizes)
                _part(target, in_target, sizes).copy_(values)
            else:
                target.copy_(values[0])


def _overlap(
    piece: Piece, offsets: list[int], sizes: Iterable[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """Return the overlap of a piece and a block: its offsets in each, and its shape."""
    in_piece, in_block, common = [], [], []
    for a, n, b, m in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        in_piece.append(begin - a)
        in_block.append(begin - b)
        common.append(end - begin)
    return in_piece, in_block, common


def _part(tensor: torch.Tensor, offsets: list[int], sizes: list[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def copied_to_all(whole: torch.Tensor, parameter: Any) -> Any:
    """Return a distributed tensor that is replicated on every rank of a parameter's mesh."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    local = whole.to(parameter.to_local().device)
    # The check would be a collective, in which a rank could hang if another one has failed.
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
