"""A save of distributed tensors: every rank writes its own, rank 0 publishes them together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpsafe.checkpoint import _folders, _sharded
from ddpsafe.checkpoint._manifest import FileFacts
from ddpsafe.checkpoint._party import Word
from ddpsafe.checkpoint._saving import follow, heard, warn_of_leftovers
from ddpsafe.checkpoint._trees import size_bytes
from ddpsafe.checkpoint._writing import Content, require_space, save_error, write_files

if TYPE_CHECKING:
    from ddpsafe._clock import Deadline
    from ddpsafe.checkpoint._party import Party, Round
    from ddpsafe.checkpoint._saving import Place
    from ddpsafe.checkpoint._snapshot import Snapshot


def save_shards(
    party: Party, place: Place | None, begin: Round, snapshot: Snapshot, step: int
) -> None:
    """Save a state with distributed tensors: all ranks write, rank 0 publishes.

    Args:
        party: The ranks.
        place: Where checkpoints go, on rank 0.
        begin: The round in which every rank has told that it is here.
        snapshot: What this rank saves.
        step: The step.

    Raises:
        CheckpointError: A rank failed; every rank raises.
    """
    if place is not None:
        _lead_shards(party, place, begin, snapshot, step)
        return
    deadline = party.deadline()
    answer = follow(begin, party, deadline, step)
    if "folder" in answer:  # else the step is saved already
        _write_own_shards(party, snapshot, Path(answer["folder"]), deadline, step)


def _write_own_shards(
    party: Party, snapshot: Snapshot, folder: Path, deadline: Deadline, step: int
) -> None:
    done = party.begin()
    try:
        _sharded.write_shards(snapshot.shards, folder)
        facts = _sharded.facts_of_shards(folder, party.rank)
    except Exception as exc:
        done.fail(exc)
        raise
    files = {name: [fact.size_bytes, fact.crc32] for name, fact in facts.items()}
    done.tell(Word(facts={"step": step, "files": files}))
    follow(done, party, deadline, step)


def _lead_shards(party: Party, place: Place, begin: Round, snapshot: Snapshot, step: int) -> None:
    deadline = party.deadline()
    current = begin
    try:
        words = heard(begin, party, deadline, step)
        place.require_lock(step)
        needed = size_bytes(snapshot.replicated) + sum(len(word.data) for word in words.values())
        needed += sum(word.facts["shard_bytes"] for word in words.values())
        require_space(place.directory, needed, step)
        with _folders.unfinished(place.directory, step) as folder:
            begin.announce({"folder": str(folder)})
            current = party.begin()
            _sharded.write_shards(snapshot.shards, folder)
            own = _sharded.facts_of_shards(folder, 0)
            current.tell(Word(facts={"step": step, "files": {}}))
            told = heard(current, party, deadline, step)
            content = Content(
                step=step,
                replicated=snapshot.replicated,
                ranks=[words[rank].data for rank in sorted(words)],
                names=snapshot.names,
                optimizers=snapshot.optimizers,
                shards={**own, **_files_of(told)},
            )
            write_files(folder, content)
            place.require_lock(step)
            _folders.publish(folder, step)
    except BaseException as exc:
        error = save_error(exc, place.directory, step)
        current.announce(error=error)
        if error is exc:
            raise
        raise error from exc
    current.announce({"saved": True})
    warn_of_leftovers(place, _folders.prune(place.directory, place.keep))


def _files_of(words: dict[int, Word]) -> dict[str, FileFacts]:
    return {
        name: FileFacts(size_bytes=size, crc32=crc32)
        for word in words.values()
        for name, (size, crc32) in word.facts.get("files", {}).items()
    }
