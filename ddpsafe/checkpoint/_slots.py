"""Two places for a state in the memory of a node, each with the files of a checkpoint's folder.

The launcher owns the memory, so it outlives the ranks and is gone with the launcher. The manifest is the
commit record: emptied before anything of its slot is changed, written last, with the checksums of all the rest.
A writer that is killed at any moment leaves the other slot as it was.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ddpsafe.checkpoint._checksums import BLOCK_BYTES, DamagedFileError
from ddpsafe.checkpoint._format import NAME, RANKS, STATE, Manifest, read_manifest
from ddpsafe.checkpoint.errors import RestoreError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpsafe.checkpoint._schedule import Costs

_FIXED: Final = (NAME, STATE, RANKS)
_SLOTS: Final = 2


class Slot:
    """One of the two places, used in place of a checkpoint's folder.

    Args:
        files: Its files: the manifest, the state, the parts of the ranks, and one for each rank's shards.
    """

    def __init__(self, number: int, files: Sequence[Path]) -> None:
        self.number = number
        self.files = files

    def __str__(self) -> str:
        return "the memory of this node"

    def __truediv__(self, name: str) -> str:
        """Return a file's name, for messages."""
        return f"{name} in {self}"

    def path(self, name: str) -> Path:
        """Return where a file is.

        Raises:
            DamagedFileError: There is no such file.
        """
        # The ranks of the one node that has shards are those of the job.
        number = _FIXED.index(name) if name in _FIXED else len(_FIXED) + int(name[-9:-4])
        if number >= len(self.files):
            raise DamagedFileError(f"{name} is missing")
        return self.files[number]

    def open(self, name: str) -> int:
        """Open a file for reading; return the descriptor."""
        return os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)

    def clear(self) -> None:
        """Give up the state that it holds, before anything of it is changed."""
        os.truncate(self.path(NAME), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A state that a node has in memory, in plain values.

    Attributes:
        token: A checksum of its files: equal on two nodes only if the states are.
        files: The lengths of its files, by name; the manifest last.
        slot: The number of its slot on that node.
        costs: The `Costs` of saves that were known when it was saved, if any.
    """

    step: int
    attempt: int
    token: int
    files: dict[str, int]
    slot: int
    costs: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A state that some nodes have in memory, and who sends it to the others.

    Attributes:
        held: The state, as the sender has it.
        slots: The number of its slot on each node that has it, by the node's first rank.
        lacking: The first ranks of the nodes that do not have it.
    """

    held: Held
    source: int
    slots: dict[int, int]
    lacking: list[int]


def candidates(held: dict[int, Held | None]) -> list[Candidate]:
    """Return the states that can be restored from memory, the newest first.

    `held` has the newest that each node has, by the node's first rank.
    """
    found: dict[tuple[int, int], Candidate] = {}
    for rank, own in sorted(held.items()):
        if own is None:
            continue
        known = found.get((own.step, own.attempt))
        if known is None:
            found[own.step, own.attempt] = Candidate(
                held=own, source=rank, slots={rank: own.slot}, lacking=[]
            )
        # A rank's buffers may differ from those of rank 0, which are the ones that count.
        elif known.held.token == own.token:
            known.slots[rank] = own.slot
    ordered = [
        replace(each, lacking=[rank for rank in sorted(held) if rank not in each.slots])
        for _, each in sorted(found.items(), reverse=True)
    ]
    # Another node has no place for the shards of this one's ranks.
    return [
        each
        for each in ordered
        if not (each.lacking and any("/" in name for name in each.held.files))
    ]


class NodeSlots:
    """Both slots of a node.

    States of another directory than `directory` count as none.
    """

    def __init__(self, files: Sequence[Path], directory: Path) -> None:
        length = len(files) // _SLOTS
        self._slots = [
            Slot(number, files[number * length : (number + 1) * length]) for number in range(_SLOTS)
        ]
        self._directory = os.fsencode(directory).decode(errors="backslashreplace")

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def reserved_bytes(self) -> int:
        """Return how much memory both have."""
        return sum(path.stat().st_blocks * 512 for slot in self._slots for path in slot.files)

    def reserve(self, length: int) -> None:
        """Have the kernel give the slots without a state the memory for states of that length.

        Raises:
            OSError: There is too little.
        """
        for slot in self._slots:
            # A file becomes longer by it, and a state that is longer than it was written counts as damaged.
            if slot.path(NAME).stat().st_size == 0:
                with slot.path(STATE).open("r+b") as file:
                    # In pieces: a signal undoes and repeats each call that it interrupts.
                    for start in range(slot.path(STATE).stat().st_size, length, BLOCK_BYTES):
                        os.posix_fallocate(file.fileno(), start, min(BLOCK_BYTES, length - start))

    def free(self) -> None:
        """Give up all states, and the memory that they take."""
        for slot in self._slots:
            for path in slot.files:  # the manifest first
                os.truncate(path, 0)

    def record(
        self, attempt: int, metadata: dict[str, Any], costs: Costs | None, waited_s: float
    ) -> dict[str, Any]:
        """Return the metadata of a manifest in memory: the user's, whose state it is, and for both schedules."""
        whose = {"attempt": attempt, "directory": self._directory}
        when = {"costs": costs and list(costs), "waited_s": waited_s}
        return {**whose, **when, "metadata": metadata}

    def read(self, number: int) -> tuple[Manifest | None, str]:
        """Return the manifest of a slot, and how it is damaged; ``None`` without a whole state of this directory.

        One that a killed writer left, empty or cut, is not damaged.
        """
        slot = self._slots[number]
        try:
            found = read_manifest(slot)
        except DamagedFileError as exc:
            return None, str(exc) if slot.path(NAME).read_bytes().endswith(b"}\n") else ""
        except RestoreError:
            return None, ""
        return (found if found.metadata.get("directory") == self._directory else None), ""

    def _by_age(self) -> list[tuple[int, Manifest | None, str]]:
        found = [(number, *self.read(number)) for number in range(_SLOTS)]
        return sorted(found, key=lambda each: (-1, -1) if each[1] is None else _age_of(each[1]))

    def target(self) -> Slot:
        """Return the slot to write to: the one without a state, or with the older one."""
        return self._slots[self._by_age()[0][0]]

    def newest(self) -> tuple[Held | None, list[str]]:
        """Return the newest state of which every byte is as it was written, and what is damaged."""
        by_age = self._by_age()
        damaged = {number: problem for number, _, problem in by_age if problem}
        for number, manifest, _ in reversed(by_age):
            if manifest is None:
                continue
            try:
                for name in manifest.files:
                    with manifest.open(self._slots[number], name) as file:
                        file.check()
            except DamagedFileError as exc:
                damaged[number] = f"step {manifest.step}: {exc}"
                continue
            for other in damaged:  # the next state goes there, and not over the whole one
                self._slots[other].clear()
            step, attempt = _age_of(manifest)
            content = json.dumps(manifest.model_dump()["files"], sort_keys=True).encode()
            files = {name: facts.size_bytes for name, facts in manifest.files.items()}
            files[NAME] = self._slots[number].path(NAME).stat().st_size
            costs: Any = manifest.metadata.get("costs")
            held = Held(
                step=step,
                attempt=attempt,
                token=zlib.crc32(content),
                files=files,
                slot=number,
                costs=costs,
            )
            return held, [*damaged.values()]
        return None, [*damaged.values()]

    def drop_newer(self, step: int) -> None:
        """Give up states newer than a step: the training was set back to it."""
        for number, manifest, _ in self._by_age():
            if manifest is not None and manifest.step > step:
                self._slots[number].clear()


def _age_of(manifest: Manifest) -> tuple[int, int]:
    attempt = manifest.metadata.get("attempt")
    return manifest.step, attempt if isinstance(attempt, int) else 0


def user_metadata(manifest: Manifest) -> dict[str, Any]:
    """Return the caller's metadata of a state in memory."""
    metadata: Any = manifest.metadata.get("metadata", {})
    return dict(metadata)
