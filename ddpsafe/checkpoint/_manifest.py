"""What a checkpoint consists of: its files with sizes and checksums, and what they hold."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint._blocks import BLOCK_BYTES, DamagedFileError, VerifiedReader
from ddpsafe.checkpoint.errors import NewerFormatError

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = "manifest.json"
VERSION: Final = 1
"""Version of the format: of the folder's layout and of this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One file as it was written.

    Attributes:
        size_bytes: Its length.
        crc32: One checksum for each block of `block_bytes`.
    """

    size_bytes: int
    crc32: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer was made of; its state alone does not tell.

    Attributes:
        kind: Name of its class.
        groups: Shapes of its parameters, by group.
    """

    kind: str
    groups: list[list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything to know about a checkpoint before its files are opened.

    Attributes:
        step: The step it was saved at.
        world_size: How many ranks saved it.
        saved_at: When, in UTC, as ISO 8601.
        ddpsafe: Version of ddpsafe that wrote it.
        torch: Version of torch that wrote it.
        names: Names in the state, and where each is kept.
        files: Its files, by path below the checkpoint's folder.
        optimizers: Those among the names that are optimizers.
        ranks: Where each rank's own part lies in its file: offset and length in bytes.
        block_bytes: Length of the blocks that have a checksum.
        version: Version of the format.
    """

    step: int
    world_size: int
    saved_at: str
    ddpsafe: str
    torch: str
    names: dict[str, str]
    files: dict[str, FileFacts]
    optimizers: dict[str, OptimizerFacts] = field(default_factory=dict)
    ranks: list[list[int]] = field(default_factory=list)
    block_bytes: int = BLOCK_BYTES
    version: int = VERSION

    def dumps(self) -> bytes:
        """Return the file's bytes: one JSON object that carries its own checksum."""
        content = _canonical(asdict(self))
        return b'{"crc32":%d,"content":%s}\n' % (zlib.crc32(content), content)

    def open(self, folder: Path, name: str) -> VerifiedReader:
        """Open one of its files for reading, every byte checked.

        Raises:
            DamagedFileError: The file is missing or of another length.
        """
        facts = self.files[name]
        try:
            return VerifiedReader(folder / name, size=facts.size_bytes, crc32=facts.crc32)
        except FileNotFoundError:
            raise DamagedFileError(f"{name} is missing") from None


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedFileError: It is missing or not what was written.
        NewerFormatError: A newer ddpsafe wrote it.
    """
    try:
        data = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFileError(f"{NAME} is missing") from None
    content = _parse(data)
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise _newer(folder, version)
    try:
        files = {name: FileFacts(**facts) for name, facts in content.pop("files").items()}
        optimizers = {
            name: OptimizerFacts(**facts) for name, facts in content.pop("optimizers", {}).items()
        }
        return Manifest(files=files, optimizers=optimizers, **content)
    except (KeyError, TypeError, AttributeError) as exc:
        raise DamagedFileError(f"{NAME} lacks what a manifest has: {exc}") from exc


def _parse(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
        content: dict[str, Any] = document["content"]
        text = _canonical(content)
    except (ValueError, KeyError, TypeError) as exc:
        raise DamagedFileError(f"{NAME} cannot be read: {exc}") from exc
    # Compared as bytes, so that a changed bit is found wherever it is.
    if data != b'{"crc32":%d,"content":%s}\n' % (zlib.crc32(text), text):
        raise DamagedFileError(f"{NAME} does not have the checksum it was written with")
    return content


def _newer(folder: Path, version: int) -> NewerFormatError:
    return NewerFormatError(
        Explanation(
            f"The checkpoint {folder} has format {version}; this ddpsafe reads up to {VERSION}.",
            cause="a newer ddpsafe wrote it.",
            fix="resume with the ddpsafe that wrote it, or upgrade this one.",
        ),
        found=version,
        known=VERSION,
    )
