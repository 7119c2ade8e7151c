"""The ranks agree which checkpoint to load: the newest that all of them see and find whole."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _applying, _comparing, _folders
from ddpsafe.checkpoint._blocks import DamagedFileError
from ddpsafe.checkpoint._opening import list_steps
from ddpsafe.checkpoint._party import Word, to_wire
from ddpsafe.checkpoint._reading import Loaded, load_checkpoint
from ddpsafe.checkpoint._warnings import warn
from ddpsafe.checkpoint.errors import (
    CorruptCheckpointError,
    DirectoryError,
    MissingCheckpointError,
    RestoreError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddpsafe._clock import Deadline
    from ddpsafe.checkpoint._party import Party

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be restored.

    Attributes:
        party: The ranks.
        directory: Where the checkpoints are.
        state: The objects, by name.
        with_rng: Restore the random number generators too.
        may_tidy: Take damaged checkpoints out of the row.
    """

    party: Party
    directory: Path
    state: Mapping[str, Any]
    with_rng: bool
    may_tidy: bool


def restore(request: Request) -> int | None:
    """Load the newest checkpoint that every rank can, into the objects.

    Returns:
        Its step; ``None`` where there is none on any rank.

    Raises:
        RestoreError: There are some, and none can be used.
    """
    steps, seen = _agree_on_steps(request)
    problems: list[str] = []
    for step in steps:
        loaded, damage = _try_step(request, step)
        if loaded is not None:
            _apply(request, loaded)
            _tidy(request, [other for other in seen if other > step], problems)
            logger.info("restored step %d from %s", step, loaded.folder)
            return step
        problems += damage
    if not steps:
        return None
    raise CorruptCheckpointError(
        Explanation(
            f"All {len(steps)} checkpoints in {request.directory} are damaged.",
            cause="the disk fails, or something has changed or copied the files in part.",
            fix="restore the directory from a copy; remove it to begin again at step 0.",
            details=problems[:8],
        ),
        problems=problems,
    )


def _agree_on_steps(request: Request) -> tuple[list[int], list[int]]:
    """Return the steps that every rank sees, newest first, and those that any of them sees."""
    party = request.party
    current = party.begin()
    try:
        own = list_steps(request.directory)
    except DirectoryError as exc:
        current.fail(exc)
        raise
    current.tell(Word(facts={"steps": own, "host": party.host}))
    answer = current.settle(
        functools.partial(_common, request.directory), functools.partial(_not_come, party)
    )
    return answer["steps"], answer["seen"]


def _common(directory: Path, words: dict[int, Word]) -> dict[str, Any]:
    views = [set(word.facts["steps"]) for word in words.values()]
    common = sorted(set.intersection(*views), reverse=True)
    seen = sorted(set.union(*views), reverse=True)
    if seen == common:
        return {"steps": common, "seen": seen}
    by_host = {word.facts["host"]: word.facts["steps"] for word in words.values()}
    lacking = [
        f"rank {rank} on {word.facts['host']} sees {_list(word.facts['steps'])}"
        for rank, word in words.items()
        if set(word.facts["steps"]) != set(seen)
    ]
    if not common:
        raise MissingCheckpointError(
            Explanation(
                f"No checkpoint in {directory} is there for every rank: "
                f"some ranks see {_list(seen)}.",
                cause="the directory is not shared between the nodes, or a mount is missing.",
                fix="mount the same storage on every node, or copy the checkpoints there.",
                details=lacking[:8],
            ),
            steps=by_host,
        )
    warn(
        f"not every rank sees step {seen[0]} in {directory}; step {common[0]} is the newest that "
        f"all see, and is used ({'; '.join(lacking[:8])})."
    )
    return {"steps": common, "seen": seen}


def _list(steps: list[int]) -> str:
    return "no step" if not steps else "step " + ", ".join(map(str, steps[:4]))


def _try_step(request: Request, step: int) -> tuple[Loaded | None, list[str]]:
    """Load one checkpoint on every rank; return it if all of them could."""
    party = request.party
    current = party.begin()
    loaded, word = _load(request, step)
    current.tell(word)
    answer = current.settle(
        functools.partial(_judge, request.directory, step), functools.partial(_not_come, party)
    )
    return (loaded if answer["use"] else None), answer["problems"]


def _judge(directory: Path, step: int, words: dict[int, Word]) -> dict[str, Any]:
    problems = [
        f"step {step}: {text} (found by rank {rank} on {words[rank].facts['host']})"
        for rank, text in _once(words).items()
    ]
    if problems:
        warn(
            f"the checkpoint of step {step} in {directory} is damaged and is not used: "
            + "; ".join(problems[:4])
        )
    return {"use": not problems, "problems": problems}


def _once(words: dict[int, Word]) -> dict[int, str]:
    """Return each problem once, by the first rank that met it."""
    found: dict[str, int] = {}
    for rank, word in words.items():
        if word.facts["damage"] is not None:
            found.setdefault(word.facts["damage"], rank)
    return {rank: text for text, rank in found.items()}


def _load(request: Request, step: int) -> tuple[Loaded | None, Word]:
    """Read a checkpoint and compare it with the objects; what fails is for rank 0 to judge."""
    party = request.party
    facts: dict[str, Any] = {"damage": None, "host": party.host}
    try:
        loaded = load_checkpoint(
            request.directory, step, rank=party.rank, world_size=party.world_size
        )
        _comparing.require_same(loaded, request.state, party.unwrap)
    except (DamagedFileError, OSError) as exc:
        return None, Word(facts={**facts, "damage": str(exc)})
    except Exception as exc:
        if party.world_size == 1:
            raise
        logger.debug("step %d cannot be restored", step, exc_info=True)
        return None, Word(facts=facts, failure=to_wire(exc, rank=party.rank))
    return loaded, Word(facts=facts)


def _apply(request: Request, loaded: Loaded) -> None:
    """Change the objects; when those of one rank refuse, every rank raises."""
    party = request.party
    current = party.begin()
    try:
        _applying.apply(loaded, request.state, unwrap=party.unwrap, with_rng=request.with_rng)
    except Exception as exc:
        current.fail(exc)
        raise
    current.tell(Word(facts={}))
    current.settle(lambda _: {}, functools.partial(_not_come, party))


def _tidy(request: Request, newer: list[int], problems: list[str]) -> None:
    """Take what is newer than the checkpoint in use out of the row: it is damaged, or not shared.

    The training comes to those steps again and saves them anew.
    """
    if not request.may_tidy or not request.party.is_main:
        return
    try:
        for step in newer:
            target = _folders.set_aside(request.directory, step)
            logger.warning("step %d was set aside as %s: %s", step, target, problems)
    except OSError as exc:
        logger.warning("of %s not all could be set aside: %s", newer, exc)


def _not_come(party: Party, missing: list[int], deadline: Deadline) -> RestoreError:
    names = ", ".join(map(str, missing))
    return RestoreError(
        Explanation(
            f"{party} waited {deadline.waited_s():.1f} s for rank {names} to restore.",
            cause=f"rank {names} did not call restore(), hangs, or reads from slow storage.",
            fix="call restore() on every rank; raise the Checkpointer's timeout for slow storage.",
        ),
        rank=missing[0],
    )
