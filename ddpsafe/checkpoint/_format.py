"""The manifest of a checkpoint: its fields, its validation, and how the files it names are opened.

A checkpoint is untrusted input: another user may have written it. So the manifest is validated field
by field, and only regular files with the names that this version writes are opened. Anything else
counts as damage, and the checkpoint before is used.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint._checksums import (
    BLOCK_BYTES,
    ChecksumWriter,
    DamagedFileError,
    VerifiedFile,
)
from ddpsafe.checkpoint._trees import leaves
from ddpsafe.checkpoint.errors import NewerFormatError, RestoreError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

NAME: Final = "manifest.json"
STATE: Final = "state.pt"
RANKS: Final = "ranks.bin"
SHARDS: Final = "shards"
VERSION: Final = 2
"""Version of the format: of the folder's layout and of this file."""

Kept = Literal["replicated", "per rank", "sharded"]
"""How the state of a name is stored."""

REPLICATED: Final = "replicated"
PER_RANK: Final = "per rank"
SHARDED: Final = "sharded"

_MAX_MANIFEST_BYTES: Final = 256 * 2**20
_MAX_CORNERS: Final = 2**24
"""Limit for the corners of one tensor's pieces: checking a forged manifest could take hours."""
_OUTER: Final = re.compile(rb'\{"crc32":([0-9]{1,10}),"content":(.*)\}\n', re.DOTALL)

Count = Annotated[int, Field(ge=0, lt=2**63)]
Shape = Annotated[list[Count], Field(max_length=64)]
Crc32 = Annotated[int, Field(ge=0, lt=2**32)]
# A forged manifest could name any file: only names that a save writes are opened.
FileName = Annotated[str, Field(pattern=r"^(state\.pt|ranks\.bin|shards/rank-[0-9]{5,9}\.bin)$")]
Text = Annotated[str, Field(max_length=1000)]


class _Part(BaseModel):
    # Without `strict`, pydantic would convert a value of a wrong type, as in a forged manifest.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FileFacts(_Part):
    """Size and checksums of one file as it was written.

    Attributes:
        crc32: One checksum for each block of `BLOCK_BYTES`.
    """

    size_bytes: Count
    crc32: list[Crc32]

    @model_validator(mode="after")
    def _has_all_checksums(self) -> Self:
        if len(self.crc32) != -(-self.size_bytes // BLOCK_BYTES):
            message = f"{len(self.crc32)} checksums for {self.size_bytes} bytes"
            raise ValueError(message)
        return self


class OptimizerFacts(_Part):
    """Class and parameters of an optimizer, which cannot be read from its state.

    Attributes:
        kind: Name of its class; empty if it is not known.
        groups: Shapes of its parameters, by group.
    """

    kind: Text
    groups: list[list[Shape]]


class Piece(_Part):
    """A part of a distributed tensor as one rank wrote it: its values contiguous, in C order.

    Attributes:
        start: Its first byte in the file.
        offsets: Its position in the tensor.
        sizes: Its shape.
    """

    file: FileName
    start: Count
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """How many values it has."""
        return math.prod(self.sizes)


class ShardedTensor(_Part):
    """A distributed tensor: its dtype as torch names it, its full shape, and its pieces.

    Attributes:
        pieces: Its pieces, which cover each value once.
    """

    dtype: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")]
    shape: Shape
    pieces: list[Piece]

    @model_validator(mode="after")
    def _is_covered(self) -> Self:
        for piece in self.pieces:
            ends = zip(self.shape, piece.offsets, piece.sizes, strict=True)
            if any(offset + size > length for length, offset, size in ends):
                message = "a piece lies outside of its tensor"
                raise ValueError(message)
        if not _make_up(self.shape, [piece for piece in self.pieces if piece.numel]):
            message = "the pieces do not make up the tensor"
            raise ValueError(message)
        return self

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype.

        Raises:
            DamagedFileError: torch has no such dtype.
        """
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise DamagedFileError(f"{NAME} names {self.dtype!r}, a dtype that torch does not have")
        return dtype


def _make_up(shape: list[int], pieces: list[Piece]) -> bool:
    """Return whether pieces, none of them empty or outside, cover each value of a tensor once."""
    if sum(piece.numel for piece in pieces) != math.prod(shape):
        return False
    # The other dimensions would only double the number of corners.
    cut = [dim for dim, n in enumerate(shape) if any(piece.sizes[dim] != n for piece in pieces)]
    if len(pieces) << len(cut) > _MAX_CORNERS:
        return False
    # If each corner of a piece that is not a corner of the tensor is shared by an even number of
    # pieces, each value is covered an odd number of times: once, as the volumes add up to the
    # tensor's.
    odd: set[tuple[int, ...]] = set()
    for piece in pieces:
        ends = ((piece.offsets[dim], piece.offsets[dim] + piece.sizes[dim]) for dim in cut)
        odd.symmetric_difference_update(itertools.product(*ends))
    return not pieces or odd == set(itertools.product(*((0, shape[dim]) for dim in cut)))


class Manifest(_Part):
    """What must be known about a checkpoint before its files are opened.

    Attributes:
        saved_at: When, in UTC, as ISO 8601.
        ddpsafe: Version of ddpsafe that wrote it.
        torch: Version of torch that wrote it.
        names: Names in the state, and how the state of each is stored.
        files: Its files, by path below the checkpoint's folder.
        optimizers: The optimizers, by name.
        ranks: Offset and length in bytes of each rank's own part in its file.
        shards: Distributed tensors, by their path in the state.
        metrics: The caller's numbers, such as a loss; ``None`` for NaN and infinity.
        metadata: The caller's plain values.
        block_bytes: Length of the blocks that have a checksum.
    """

    step: Count
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    saved_at: Text
    ddpsafe: Text
    torch: Text
    names: dict[str, Kept]
    files: dict[FileName, FileFacts]
    optimizers: dict[str, OptimizerFacts] = {}
    ranks: list[tuple[Count, Count]] = []
    shards: dict[str, ShardedTensor] = {}
    metrics: dict[str, float | None] = {}
    metadata: dict[str, JsonValue] = {}
    block_bytes: Literal[1048576] = BLOCK_BYTES  # 2**20
    version: Literal[1, 2] = VERSION

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not {STATE, RANKS} <= self.files.keys():
            message = f"{STATE} or {RANKS} is not listed"
            raise ValueError(message)
        size = self.files[RANKS].size_bytes
        if len(self.ranks) != self.world_size or any(a + b > size for a, b in self.ranks):
            message = f"the parts of the ranks do not lie in {RANKS}"
            raise ValueError(message)
        if not self.optimizers.keys() <= self.names.keys():
            message = "an optimizer is not among the names"
            raise ValueError(message)
        for tensor in self.shards.values():
            for piece in tensor.pieces:
                facts = self.files.get(piece.file)
                # A value takes at least one byte; `check_shards` checks with the real dtype.
                if facts is None or piece.start + piece.numel > facts.size_bytes:
                    message = "a piece does not lie in its file"
                    raise ValueError(message)
        return self

    def dumps(self) -> bytes:
        """Return the file's bytes: one JSON object that carries its own checksum."""
        content = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()
        return b'{"crc32":%d,"content":%s}\n' % (zlib.crc32(content), content)

    def open(self, folder: Path | Place, name: str) -> VerifiedFile:
        """Open one of its files for reading.

        Raises:
            DamagedFileError: The file is missing, is not a regular file, or has another length.
        """
        facts = self.files[name]
        fd = open_regular(folder, name)
        return VerifiedFile(fd, name, size=facts.size_bytes, crc32=facts.crc32)


class Place(Protocol):
    """What holds the files of a checkpoint in place of its folder: a slot in memory."""

    def open(self, name: str) -> int:
        """Open a file for reading; return the descriptor."""

    def path(self, name: str) -> Path:
        """Return where a file is."""


NOT_DAMAGE: Final = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
"""Errors that keep a process from reading a file that may be undamaged."""


def open_regular(folder: Path | Place, name: str) -> int:
    """Open a regular file below a folder for reading, without following links; or one of a slot.

    Raises:
        DamagedFileError: It is missing, or not a regular file.
        OSError: This process cannot open it now, but it may be undamaged: see `NOT_DAMAGE`.
    """
    if not isinstance(folder, Path):
        return folder.open(name)
    *above, last = name.split("/")
    with contextlib.ExitStack() as stack:
        try:
            parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, parent)
            # Folder by folder: O_NOFOLLOW refuses a link only in the last part of a path.
            for part in above:
                parent = os.open(
                    part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
                )
                stack.callback(os.close, parent)
            # A link could lead anywhere, and opening a pipe would block.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(last, flags, dir_fd=parent)
        except FileNotFoundError:
            raise DamagedFileError(f"{name} is missing") from None
        except OSError as exc:
            if exc.errno in NOT_DAMAGE:
                raise
            raise DamagedFileError(f"{name} cannot be opened: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFileError(f"{name} is not a regular file")
    return fd


def new_file(folder: Path | Place, name: str) -> ChecksumWriter:
    """Open a new file of a checkpoint for writing."""
    if not isinstance(folder, Path):
        return ChecksumWriter(folder.path(name), replaces=True)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    return ChecksumWriter(path)


def read_manifest(folder: Path | Place) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedFileError: It is missing, or not what was written.
        NewerFormatError: A newer ddpsafe wrote it.
        RestoreError: A ddpsafe before 0.1 wrote it, with distributed tensors.
    """
    with open(open_regular(folder, NAME), "rb") as file:
        return parse_manifest(file.read(_MAX_MANIFEST_BYTES + 1), folder)


def parse_manifest(data: bytes, folder: Path | Place) -> Manifest:
    """Read the bytes of a manifest; for errors see `read_manifest`."""
    if len(data) > _MAX_MANIFEST_BYTES:
        raise DamagedFileError(f"{NAME} is larger than {_MAX_MANIFEST_BYTES} bytes")
    # As bytes, not as parsed JSON, so that a changed bit is found wherever it is.
    match = _OUTER.fullmatch(data)
    if match is None:
        raise DamagedFileError(f"{NAME} cannot be read: it does not begin and end like a manifest")
    content = match[2]
    if int(match[1]) != zlib.crc32(content):
        raise DamagedFileError(f"{NAME} does not have the checksum it was written with")
    try:
        # First alone: a newer format may have fields that `Manifest` refuses.
        version = _Version.model_validate_json(content).version
        # Not damage: an older checkpoint would lose the progress made with the newer ddpsafe.
        if version > VERSION:
            raise NewerFormatError(
                Explanation(
                    f"The checkpoint {folder} has format {version}; this ddpsafe reads up to "
                    f"{VERSION}.",
                    cause="a newer ddpsafe wrote it.",
                    fix="resume with the ddpsafe that wrote it, or upgrade this one.",
                ),
                found=version,
                known=VERSION,
            )
        manifest = Manifest.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise DamagedFileError(f"{NAME} is not valid: {where}: {first['msg']}"[:300]) from None
    except (ValueError, MemoryError, RecursionError) as exc:
        raise DamagedFileError(f"{NAME} is not valid: {exc}"[:300]) from None
    if manifest.version == 1 and SHARDED in manifest.names.values():
        raise RestoreError(
            Explanation(
                f"The checkpoint {folder} has format 1 and holds distributed tensors.",
                cause="in that format their index is a pickle, which could execute code, so it is not opened.",
                fix="restore it into an unsharded model with the ddpsafe that wrote it, and save that.",
            )
        )
    if (SHARDED in manifest.names.values()) != bool(manifest.shards):
        raise DamagedFileError(f"{NAME} is not valid: names and shards disagree")
    return manifest


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    version: Count


def from_json(value: Any) -> Any:
    """Return plain values as they come back from JSON; tuples become lists.

    Raises:
        TypeError, ValueError: JSON cannot hold the values, or UTF-8 cannot encode the strings.
        RecursionError: They are nested too deep.
    """
    # Not as ASCII: escaped, a string that UTF-8 cannot encode could be saved, but not be read
    # again.
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    plain = json.loads(text.encode())
    # JSON turns a key such as 1 into "1".
    if [path for path, _ in leaves(plain, "")] != [path for path, _ in leaves(value, "")]:
        message = "a key is not a string"
        raise TypeError(message)
    return plain
