"""Rank 0's part of a save: the files of one checkpoint, and how it becomes one."""

from __future__ import annotations

import errno
import functools
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _folders
from ddpsafe.checkpoint._blocks import ChecksumWriter
from ddpsafe.checkpoint._manifest import NAME, FileFacts, Manifest, OptimizerFacts
from ddpsafe.checkpoint.errors import NoSpaceError, SaveError

if TYPE_CHECKING:
    from pathlib import Path

STATE: Final = "state.pt"
RANKS: Final = "ranks.bin"

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MARGIN_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint is to hold.

    Attributes:
        step: Its step.
        replicated: State that all ranks share, by name.
        ranks: Each rank's own part, by rank.
        names: Where each name is kept.
        optimizers: What the optimizers among them are made of.
        shards: Files that the ranks have written already.
    """

    step: int
    replicated: dict[str, Any]
    ranks: list[bytes]
    names: dict[str, str]
    optimizers: dict[str, OptimizerFacts]
    shards: dict[str, FileFacts] = field(default_factory=dict)


def require_space(directory: Path, needed_bytes: int, step: int) -> None:
    """Refuse a save that cannot fit.

    Raises:
        NoSpaceError: It cannot.
    """
    needed = needed_bytes + needed_bytes // 100 + _MARGIN_BYTES
    free = _folders.free_bytes(directory)
    if free < needed:
        raise _no_space(directory, step, needed, free)


def _no_space(directory: Path, step: int, needed: int, free: int) -> NoSpaceError:
    return NoSpaceError(
        Explanation(
            f"The checkpoint of step {step} does not fit into {directory}: it takes about "
            f"{needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free.",
            cause="the disk or its quota is full; the checkpoints from before are unharmed.",
            fix="free some space, lower keep, or choose a directory on a larger disk.",
        ),
        step=step,
        needed_bytes=needed,
        free_bytes=free,
    )


def _already_there(exc: OSError, step: int) -> SaveError:
    return SaveError(
        Explanation(
            f"Step {step} was not saved: {exc.filename} is there already.",
            cause="a save of this step was interrupted when it was nearly done, or somebody put "
            "the folder there.",
            fix="go on, and save the next step; or remove the folder and save this one again.",
        ),
        step=step,
    )


def write_files(folder: Path, content: Content) -> None:
    """Write everything of a checkpoint, the manifest last, to the disk."""
    import torch

    files = dict(content.shards)
    with ChecksumWriter(folder / STATE) as writer:
        torch.save(content.replicated, writer)  # type: ignore[arg-type]  # write() is all it needs
    files[STATE] = FileFacts(size_bytes=writer.size, crc32=writer.crc32)
    places: list[list[int]] = []
    with ChecksumWriter(folder / RANKS) as writer:
        for data in content.ranks:
            places.append([writer.size, len(data)])
            writer.write(data)
    files[RANKS] = FileFacts(size_bytes=writer.size, crc32=writer.crc32)
    manifest = Manifest(
        step=content.step,
        world_size=len(content.ranks),
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ddpsafe=_version_of("ddpsafe"),
        torch=str(torch.__version__),
        names=content.names,
        optimizers=content.optimizers,
        files=files,
        ranks=places,
    )
    with ChecksumWriter(folder / NAME) as writer:
        writer.write(manifest.dumps())


@functools.cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def save_error(exc: BaseException, directory: Path, step: int) -> BaseException:
    """Word what the file system refused; return other errors as they are."""
    if not isinstance(exc, OSError) or isinstance(exc, SaveError):
        return exc
    if exc.errno in _FULL:
        try:
            free = _folders.free_bytes(directory)
        except OSError:
            free = 0
        return _no_space(directory, step, free + 1, free)
    if isinstance(exc, FileExistsError):
        return _already_there(exc, step)
    causes = {
        errno.EROFS: "the file system is mounted read-only.",
        errno.EACCES: "this user may not write there.",
        errno.EPERM: "this user may not write there.",
        errno.ENOENT: "the directory, or a part of it, has been removed meanwhile.",
        errno.EIO: "the disk has failed; see dmesg.",
        errno.ESTALE: "the network mount was exported anew or has gone.",
    }
    return SaveError(
        Explanation(
            f"The checkpoint of step {step} could not be written to {directory}: {exc}.",
            cause=causes.get(exc.errno or 0, "the file system refused it."),
            fix="mend the directory; the training can go on and save again.",
        ),
        step=step,
    )
