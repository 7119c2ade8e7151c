"""One checkpoint, read into memory with every byte checked, and not yet put anywhere."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _sharded
from ddpsafe.checkpoint._blocks import DamagedFileError
from ddpsafe.checkpoint._folders import folder_name
from ddpsafe.checkpoint._manifest import NAME, Manifest, read_manifest
from ddpsafe.checkpoint._writing import RANKS, STATE
from ddpsafe.checkpoint.errors import RestoreError

if TYPE_CHECKING:
    from pathlib import Path

    from ddpsafe.checkpoint._blocks import VerifiedReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        folder: Where it came from.
        manifest: What it consists of.
        replicated: State that all ranks share, by name.
        own: This rank's own part, by name; ``None`` if the saved world had no such rank.
        rng: This rank's random number generators; ``None`` as `own`, or if they were not saved.
    """

    folder: Path
    manifest: Manifest
    replicated: dict[str, Any]
    own: dict[str, Any] | None
    rng: dict[str, Any] | None


def load_checkpoint(directory: Path, step: int, *, rank: int, world_size: int) -> Loaded:
    """Read what this rank needs.

    Raises:
        DamagedFileError: A file is not what was written, or was written for another step.
        NewerFormatError: A newer ddpsafe wrote it.
        RestoreError: It is whole and cannot be read all the same.
    """
    folder = directory / folder_name(step)
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise DamagedFileError(
            f"{NAME} is of step {manifest.step}; the folder was copied or renamed"
        )
    with manifest.open(folder, STATE) as reader:
        replicated = _load(reader, folder / STATE)
        reader.check_rest()
    with manifest.open(folder, RANKS) as reader:
        reader.check_rest()
        mine = _own_part(reader, manifest, rank)
    _sharded.check_shards(folder, manifest, rank=rank, world_size=world_size)
    part = None if mine is None else _load(io.BytesIO(mine), folder / RANKS)
    return Loaded(
        folder=folder,
        manifest=manifest,
        replicated=replicated,
        own=None if part is None else part["own"],
        rng=None if part is None else part["rng"],
    )


def _own_part(reader: VerifiedReader, manifest: Manifest, rank: int) -> bytes | None:
    if rank >= len(manifest.ranks):
        return None
    offset, length = manifest.ranks[rank]
    reader.seek(offset)
    return reader.read(length)


def _load(file: VerifiedReader | io.BytesIO, path: Path) -> dict[str, Any]:
    import torch

    try:
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]  # reads in any order, which is all it needs
    except DamagedFileError:
        raise
    except Exception as exc:
        error = getattr(file, "error", None)
        if error is not None:  # what came through C++ as something else
            raise error from None
        raise RestoreError(
            Explanation(
                f"{path} is what was written, and torch {torch.__version__} cannot load it: {exc}",
                cause="another version of torch wrote it, or it holds a type that was allowed "
                "then with torch.serialization.add_safe_globals and is not now.",
                fix="allow the type again, or restore with the torch named in manifest.json.",
            )
        ) from exc
    return loaded
