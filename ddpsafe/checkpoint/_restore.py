"""A restore: the ranks agree on a checkpoint that all of them see and find undamaged, and load it.

Every rank first reads the checkpoint and compares it with the objects. Only then is any object changed.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import logging
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.agreement import Message
from ddpsafe._text import listed, shortened
from ddpsafe.checkpoint import _compare, _directory, _sharded
from ddpsafe.checkpoint._checksums import DamagedFileError
from ddpsafe.checkpoint._compare import Loaded
from ddpsafe.checkpoint._format import (
    NAME,
    NOT_DAMAGE,
    PER_RANK,
    RANKS,
    STATE,
    Manifest,
    read_manifest,
)
from ddpsafe.checkpoint._slots import Held, candidates
from ddpsafe.checkpoint._state import PerRank, is_stateful, load_rng_state, named_for, state_of
from ddpsafe.checkpoint._trees import leaves, pieces, replace_leaves
from ddpsafe.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    MissingCheckpointError,
    RestoreError,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn

    from ddpsafe._job.agreement import Absence
    from ddpsafe.checkpoint._checksums import VerifiedFile
    from ddpsafe.checkpoint._memory import StateMemory
    from ddpsafe.checkpoint._ranks import Ranks
    from ddpsafe.checkpoint._slots import Candidate, Slot

logger = logging.getLogger(__name__)

_SHOWN_STEPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """The arguments of one restore.

    Attributes:
        state: The objects, by name.
        step: Restore this step and no other; ``None`` for the newest.
        strict: Refuse a checkpoint that lacks some of the state, or has different tensors.
        may_tidy: Set aside checkpoints newer than the restored one.
        memory: The states in memory, if they are used.
    """

    ranks: Ranks
    directory: Path
    state: Mapping[str, Any]
    step: int | None
    strict: bool
    with_rng: bool
    may_tidy: bool
    memory: StateMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes:
        on_disk: The newest step up to this one that the directory has; ``None`` if it has none.
    """

    manifest: Manifest
    in_memory: bool
    on_disk: int | None


def restore(request: RestoreRequest) -> Restored | None:
    """Load the newest checkpoint that every rank can load, from memory or disk, or the requested one.

    Returns ``None`` if no rank sees a checkpoint.

    Raises:
        RestoreError: There are checkpoints, but none can be used.
    """
    ranks, memory = request.ranks, request.memory
    exchange = ranks.begin("restore()")
    held: dict[str, Any] | None = None
    damaged: list[str] = []
    try:
        if memory is not None and request.step is None:
            held, damaged = memory.held()
        own = _directory.list_steps(request.directory)
    except Exception as exc:
        exchange.fail(exc)
        raise
    exchange.send(
        Message(
            facts={
                "steps": own,
                "host": ranks.host,
                "step": request.step,
                "held": held,
                "damaged": damaged,
                "node": ranks.of_node[0],
            }
        )
    )
    absence_error = ranks.absence_error(
        RestoreError,
        "restore",
        cause="did not call restore(), hangs, or reads from slow storage.",
        fix="call restore() on every rank; raise the Checkpointer's timeout for slow storage.",
    )
    answer = exchange.agree(
        functools.partial(_agree_on_steps, request), absence_error, ranks.deadline()
    )
    steps: list[int] = answer["steps"]  # those that every rank sees, newest first
    seen: list[int] = answer["seen"]  # those that at least one rank sees
    problems: list[str] = answer["damaged"]
    sources: list[tuple[int, Candidate | None]] = [(step, None) for step in steps]
    held_by = {int(node): own and Held(**own) for node, own in answer["held"].items()}
    in_memory = candidates(held_by)  # the newest first, the same on all ranks
    sources += [(found.held.step, found) for found in in_memory]
    # Of one step, that in memory first.
    sources.sort(key=lambda source: (source[0], source[1] is not None), reverse=True)
    for step, candidate in sources:
        folder: Path | Slot = request.directory / _directory.folder_name(step)
        if candidate is not None:
            assert memory is not None  # noqa: S101 - all ranks use it
            provided = memory.provide(candidate, absence_error)
            if isinstance(provided, str):
                if ranks.is_main:
                    warn(f"{provided}.")
                problems.append(provided)
                continue
            folder = provided
        exchange = ranks.begin("restore()")
        loaded, message = _load(request, step, folder)
        exchange.send(message)
        answer = exchange.agree(
            functools.partial(_agree_on_damage, folder, step), absence_error, ranks.deadline()
        )
        if loaded is not None and answer["use"]:  # every rank could load it
            _apply_everywhere(request, loaded, absence_error)
            # The training will reach those steps again, and must be able to save them again.
            newer = [other for other in seen if other > step]
            _set_aside(request, newer, problems)
            if memory is not None:
                newest = in_memory[0].held if in_memory else None
                memory.note_restored(step, newest, from_memory=candidate is not None)
            logger.info("restored step %d from %s", step, loaded.folder)
            return Restored(
                manifest=loaded.manifest,
                in_memory=candidate is not None,
                on_disk=max((other for other in steps if other <= step), default=None),
            )
        problems += answer["problems"]
    if not sources and not problems:
        return None
    # An error, not None: the script would begin at step 0, and days of training would be lost
    # silently.
    if not steps:
        raise RestoreError(
            Explanation(
                f"No state in memory can be restored, and {request.directory} has no checkpoint.",
                cause="; ".join(problems[:4]),
                fix="start the job again, with more memory if that is too little; it begins at step 0.",
            )
        )
    what = f"All {len(steps)} checkpoints in {request.directory} are damaged."
    if request.step is not None:
        what = f"The checkpoint of step {request.step} in {request.directory} is damaged."
    raise CorruptCheckpointError(
        Explanation(
            what,
            cause="the disk is failing, or the files were changed or only partly copied.",
            fix="restore the directory from a backup, or remove it to start again at step 0."
            if request.step is None
            else "restore another step; restore() without step= takes the newest undamaged one.",
            details=problems[:8],
        ),
        problems=tuple(problems),
    )


def _agree_on_steps(request: RestoreRequest, messages: dict[int, Message]) -> dict[str, Any]:
    directory = request.directory
    for rank, message in messages.items():
        if message.facts["step"] != request.step:
            raise RestoreError(
                Explanation(
                    f"rank {rank} restores step {message.facts['step']}, but rank 0 restores "
                    f"step {request.step}.",
                    cause="the ranks call restore() with different steps.",
                    fix="pass the same step= on every rank.",
                ),
                rank=rank,
            )
    nodes = {message.facts["node"] for message in messages.values()}
    held = {str(node): messages[node].facts["held"] for node in nodes}
    views = [set(message.facts["steps"]) for message in messages.values()]
    common = sorted(set.intersection(*views), reverse=True)
    seen = sorted(set.union(*views), reverse=True)
    by_host = {each.facts["host"]: tuple(each.facts["steps"]) for each in messages.values()}
    damaged = [text for message in messages.values() for text in message.facts["damaged"]]
    found = {"steps": common, "seen": seen, "held": held, "damaged": damaged}
    if request.step is not None:
        if request.step not in seen:
            raise missing_step(directory, request.step, others=seen, by_host=by_host)
        if request.step not in common:
            raise MissingCheckpointError(
                Explanation(
                    f"Not every rank sees a checkpoint of step {request.step} in {directory}.",
                    cause=f"the ranks have {_steps_text(common)} in common.",
                    fix="choose one that every rank sees; see: ddpsafe checkpoint ls DIRECTORY.",
                ),
                steps=by_host,
            )
        return {**found, "steps": [request.step]}
    if seen == common:
        return found
    lacking = [
        f"rank {rank} on {message.facts['host']} sees {_steps_text(message.facts['steps'])}"
        for rank, message in messages.items()
        if set(message.facts["steps"]) != set(seen)
    ]
    if not common:
        raise MissingCheckpointError(
            Explanation(
                f"No checkpoint in {directory} is visible to every rank: "
                f"some ranks see {_steps_text(seen)}.",
                cause="the directory is not shared between the nodes, or a mount is missing.",
                fix="mount the same storage on every node, or copy the checkpoints there.",
                details=lacking[:8],
            ),
            steps=by_host,
        )
    warn(
        f"not every rank sees step {seen[0]} in {directory}; using step {common[0]}, the newest "
        f"that all ranks see ({'; '.join(lacking[:8])})."
    )
    return found


def missing_step(
    directory: Path,
    step: int,
    *,
    others: Sequence[int],
    by_host: dict[str, tuple[int, ...]] | None = None,
) -> MissingCheckpointError:
    """Make the error for a step that has no checkpoint, while the steps `others` have one.

    If the ranks restore one, `by_host` has the steps that each host sees.
    """
    there = "there is no checkpoint"
    if others:
        there = f"there {'is' if len(others) == 1 else 'are'} {_steps_text(others)}"
    return MissingCheckpointError(
        Explanation(
            f"There is no checkpoint of step {step} in {directory}.",
            cause=f"it was not saved, or has been removed since; {there}.",
            fix="choose one that exists; see: ddpsafe checkpoint ls DIRECTORY.",
        ),
        steps=by_host or {},
    )


def _steps_text(steps: Sequence[int]) -> str:
    """Return steps for a message: ``step 5``, ``steps 1 and 5``; of many only the newest."""
    names = [str(step) for step in sorted(steps)[-_SHOWN_STEPS:]]
    if len(steps) > _SHOWN_STEPS:
        names.append(f"{len(steps) - _SHOWN_STEPS} older")
    return f"step{'s' if len(steps) > 1 else ''} {listed(names)}" if steps else "no step"


def _agree_on_damage(
    folder: Path | Slot, step: int, messages: dict[int, Message]
) -> dict[str, Any]:
    first_to_find: dict[str, int] = {}
    for rank, message in messages.items():
        if message.facts["damage"] is not None:
            first_to_find.setdefault(message.facts["damage"], rank)
    problems = [
        f"step {step}: {text} (found by rank {rank} on {messages[rank].facts['host']})"
        for text, rank in first_to_find.items()
    ]
    if problems:
        warn(
            f"the checkpoint of step {step} in {folder.parent if isinstance(folder, Path) else folder} is damaged and is skipped: "
            + "; ".join(problems[:4])
        )
    return {"use": not problems, "problems": problems}


def _load(request: RestoreRequest, step: int, folder: Path | Slot) -> tuple[Loaded | None, Message]:
    """Read a checkpoint and compare it with the objects; return it with the message for rank 0.

    It is ``None`` if this rank cannot use it.
    """
    ranks = request.ranks
    facts: dict[str, Any] = {"damage": None, "host": ranks.host}
    try:
        loaded = load_checkpoint(folder, step, rank=ranks.rank, world_size=ranks.world_size)
        loaded.left.update(
            _compare.compare(loaded, request.state, ranks.unwrap, strict=request.strict)
        )
    except Exception as exc:
        # This ends the restore: an older checkpoint would lose work, though this one may be
        # undamaged.
        cannot_read = isinstance(exc, OSError) and exc.errno in NOT_DAMAGE
        # Reading what another user has forged can also exhaust the stack or the memory.
        damage = (DamagedFileError, OSError, RecursionError, MemoryError)
        if isinstance(exc, damage) and not cannot_read:
            return None, Message(facts={**facts, "damage": str(exc) or type(exc).__name__})
        # No local name for the error: with its traceback it would hold this frame, and the mapped
        # file, until the garbage collector runs.
        if ranks.world_size > 1:
            logger.debug("step %d cannot be restored", step, exc_info=True)
            error = _unreadable(request.directory, step, exc) if isinstance(exc, OSError) else exc
            return None, Message(facts=facts, failure=ranks.failure_of(error))
        if isinstance(exc, OSError):
            raise _unreadable(request.directory, step, exc) from exc
        raise
    return loaded, Message(facts=facts)


def _unreadable(directory: Path, step: int, exc: OSError) -> RestoreError:
    """Make the error for a checkpoint that is not damaged but cannot be read now."""
    return RestoreError(
        Explanation(
            f"The checkpoint of step {step} in {directory} cannot be read: {exc}.",
            cause=_directory.find_cause(directory, exc),
            fix="let this process read it, and restore again; no older checkpoint was tried.",
        )
    )


def load_checkpoint(folder: Path | Slot, step: int | None, *, rank: int, world_size: int) -> Loaded:
    """Read and check what this rank needs, of `step` if that is known.

    The checking of the shards is divided among the ranks.

    Raises:
        DamagedFileError: A file is not what was written, or was written for another step.
        NewerFormatError: A newer ddpsafe wrote it.
        RestoreError: It is undamaged, but cannot be loaded.
    """
    import torch

    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise DamagedFileError(
            f"{NAME} is of step {manifest.step}; the folder was copied or renamed"
        )
    with manifest.open(folder, STATE) as file:
        file.check()  # before torch reads it: torch loads a flipped bit silently
        replicated = _read(file, folder / STATE)
    part: Any = None
    with manifest.open(folder, RANKS) as file:
        file.check()
        # A rank that the saved world did not have keeps its present state and generators.
        if rank < manifest.world_size:
            mine = file.read(*manifest.ranks[rank])
            part = _read(io.BytesIO(mine), folder / RANKS)
    _sharded.check_shards(folder, manifest, rank=rank, world_size=world_size)
    own = None if part is None else part.get("own")
    rng = None if part is None else part.get("rng")
    # Refuse what no `Checkpointer` writes, even if the checksums are correct.
    shared = {name for name, kept in manifest.names.items() if kept != PER_RANK}
    if replicated.keys() != shared:
        raise DamagedFileError(f"{STATE} does not hold the names that {NAME} lists")
    is_own = part is None or isinstance(own, dict)
    if not is_own or not isinstance(rng, (dict, type(None))):
        raise DamagedFileError(f"{RANKS} does not hold what a rank saves")
    if own and own.keys() != manifest.names.keys() - shared:
        raise DamagedFileError(f"{RANKS} does not hold the names that {NAME} lists")
    shards = _sharded.SavedShards(folder, manifest)
    # A mark without a tensor is found here, before any object is changed.
    for _, leaf in leaves(replicated, ""):
        shards.find(leaf)
    return Loaded(
        folder=folder,
        manifest=manifest,
        replicated=replicated,
        own=own,
        rng=rng,
        shards=shards,
        mapped=frozenset(
            piece.untyped_storage().data_ptr()
            for _, leaf in leaves(replicated, "")
            if isinstance(leaf, torch.Tensor)
            for piece in pieces(leaf)
        ),
    )


_NO_MAPPING: Final = re.compile(r"mmap", re.IGNORECASE)


def _read(file: VerifiedFile | io.BytesIO, path: Path | str) -> dict[str, Any]:
    """Load a torch file that has been checked; a file on disk is mapped."""
    import torch

    try:
        if isinstance(file, io.BytesIO):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        else:
            # Mapped: the ranks of a node share its pages, and the kernel can drop a page once it
            # has been copied into an object.
            loaded = _map(f"/proc/self/fd/{file.fd}", path)
    except Exception as exc:
        raise RestoreError(
            Explanation(
                f"{path} is undamaged, but torch {torch.__version__} cannot load it: "
                f"{str(exc)[:500]}",
                cause="another version of torch wrote it, or it holds a type that was then allowed "
                "with torch.serialization.add_safe_globals and is not allowed now.",
                fix="allow the type again, or restore with the torch version named in manifest.json.",
            )
        ) from exc
    if not isinstance(loaded, dict):
        raise DamagedFileError(f"{Path(path).name} does not hold a dict")
    return loaded


def _map(descriptor: str, path: Path | str) -> Any:
    import torch

    # By its descriptor it is certainly the file that was checked, even if the path was replaced.
    source = descriptor if os.path.exists(descriptor) else str(path)  # noqa: PTH110 - a string
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as exc:
        if not _NO_MAPPING.search(str(exc)):
            raise
        logger.debug("%s cannot be mapped, reading it instead", path, exc_info=True)
        return torch.load(source, map_location="cpu", weights_only=True)


def _apply_everywhere(
    request: RestoreRequest, loaded: Loaded, absence_error: Callable[[Absence], RestoreError]
) -> None:
    """Load the checkpoint into the objects; if that fails on one rank, every rank raises."""
    exchange = request.ranks.begin("restore()")
    try:
        _apply(request, loaded)
    except Exception as exc:
        exchange.fail(exc)
        raise
    exchange.send(Message(facts={}))
    exchange.agree(lambda _: {}, absence_error, request.ranks.deadline())
    if loaded.left and request.ranks.is_main:
        left = shortened([f"{path}: {why}" for path, why in loaded.left.items()], most=8)
        warn(f"restored step {loaded.manifest.step} in part; left unchanged: {'; '.join(left)}")


def _set_aside(request: RestoreRequest, newer: list[int], problems: list[str]) -> None:
    """Set aside checkpoints newer than the restored one: damaged, not shared, or rolled back."""
    if not newer or not request.may_tidy or not request.ranks.is_main:
        return
    try:
        targets = _directory.set_aside(request.directory, newer)
    except OSError as exc:
        # The restore itself has succeeded on every rank.
        logger.warning("setting aside the newer %s failed: %s", _steps_text(newer), exc)
    else:
        logger.warning(
            "the newer %s %s set aside as %s: %s",
            _steps_text(newer),
            "was" if len(newer) == 1 else "were",
            listed([str(target) for target in targets]),
            "; ".join(map(str, problems)),
        )


# Loading a checkpoint into objects that have been compared with it.


def _apply(request: RestoreRequest, loaded: Loaded) -> None:
    """Load its saved state into every object.

    Raises:
        RestoreError: An object's own ``load_state_dict`` raised, or a file can no longer be read. The
            objects before it in the mapping have already been changed.
    """
    state = request.state
    name = ""
    try:
        for name, value in state.items():
            if name in loaded.left:
                continue
            if isinstance(value, PerRank):
                if loaded.own is None:
                    logger.warning(
                        "%r is not restored on rank %d and keeps its present state: the checkpoint "
                        "was saved with fewer ranks",
                        name,
                        request.ranks.rank,
                    )
                else:
                    _load_into(loaded, name, value.stateful, loaded.own[name])
            else:
                _restore_one(loaded, state, name, request.ranks.unwrap)
    except (DamagedFileError, OSError) as exc:
        raise RestoreError(
            Explanation(
                f"{loaded.folder} was readable at first, but no longer is: {exc}",
                cause="the storage is failing, or the checkpoint was changed during the restore.",
                fix="check that storage, and restore again.",
            )
        ) from exc
    except (CheckpointError, ConfigError):
        raise
    except Exception as exc:
        raise RestoreError(
            Explanation(
                f"{name!r} cannot be restored from {loaded.folder}: {type(exc).__name__}: {exc}",
                cause="the object cannot load it, or a Checkpointer did not save it.",
                fix="create model and optimizer again before you retry, as some already have their "
                "saved state; or restore another step.",
            )
        ) from exc
    if request.with_rng and loaded.rng is not None:
        try:
            load_rng_state(loaded.rng)
        except Exception as exc:
            raise RestoreError(
                Explanation(
                    f"The random number generators in {loaded.folder} cannot be set: {exc}",
                    cause="another version of Python, NumPy or torch wrote them.",
                    fix="create the Checkpointer with rng=False.",
                )
            ) from exc


def _restore_one(
    loaded: Loaded, state: Mapping[str, Any], name: str, unwrap: Callable[[nn.Module], nn.Module]
) -> None:
    import torch
    from torch.optim import Optimizer

    value, saved = state[name], loaded.replicated[name]
    if isinstance(value, torch.nn.Module):
        model = unwrap(value)
        now = state_of(model, lambda same: same)
        # A file in the directory is never written again; a slot in memory is, under what maps it.
        is_file = isinstance(loaded.folder, Path)
        tree = _filled(loaded, saved, now, name, keep_mapped=is_file)
        partly = any(path.startswith(f"{name}[") for path in loaded.left)
        if partly:
            # In place: a new dict would lack the versions of modules that torch keeps beside it.
            for key in list(tree):
                if f"{name}[{key!r}]" in loaded.left:
                    del tree[key]
        tree = named_for(model, tree)
        _load_into(loaded, name, model, tree, **({"strict": False} if partly else {}))
        # A module that loads with assign=True keeps the tensors it was given.
        for tensor in (*model.parameters(), *model.buffers()):
            if _is_mapped(loaded, tensor):
                tensor.data = tensor.data.clone()
    elif isinstance(value, Optimizer):
        _load_into(loaded, name, value, _for_optimizer(loaded, value, saved, name))
    elif isinstance(value, torch.Tensor):
        if _sharded.is_sharded(value):
            loaded.shards.fill(value, saved, name)
        else:
            whole = loaded.shards.whole(saved, name)
            with torch.no_grad():
                if value.is_nested and value.layout is torch.jagged:
                    value.values().copy_(whole.values())
                else:
                    value.copy_(whole)
    elif is_stateful(value):
        now = value.state_dict() if loaded.manifest.shards else None
        _load_into(loaded, name, value, _filled(loaded, saved, now, name))
    elif isinstance(state, MutableMapping):
        state[name] = _own_memory(loaded, loaded.shards.whole(saved, name))


def _filled(loaded: Loaded, saved: Any, now: Any, name: str, *, keep_mapped: bool = False) -> Any:
    """Return a saved state with its tensors whole, except where the object has distributed ones now.

    Those are filled with the saved values and returned in their place.
    """
    current = {path: leaf for path, leaf in leaves(now, name) if _sharded.is_sharded(leaf)}

    def put(path: str, leaf: Any) -> Any:
        if path in loaded.left:  # the part that overlaps would be filled
            return leaf
        if path in current:
            loaded.shards.fill(current[path], leaf, path)
            return current[path]
        return loaded.shards.whole_leaf(leaf)

    tree = replace_leaves(saved, name, put)
    return tree if keep_mapped else _own_memory(loaded, tree)


def _for_optimizer(loaded: Loaded, optimizer: Any, saved: Any, name: str) -> Any:
    """Return an optimizer's saved state, its tensors sharded as its parameters are now."""
    import torch

    shards = loaded.shards
    parameters = list(
        itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    )
    if not any(map(_sharded.is_sharded, parameters)) or not isinstance(saved.get("state"), dict):
        return _own_memory(loaded, shards.whole(saved, name))

    def sharded_entry(key: object, entry: Any) -> Any:
        is_known = isinstance(key, int) and 0 <= key < len(parameters)
        parameter: Any = parameters[key] if is_known else None  # type: ignore[call-overload]  # known
        if not _sharded.is_sharded(parameter):
            return shards.whole(entry, name)

        def put(path: str, leaf: Any) -> Any:
            tensor = shards.find(leaf)
            if tensor is None and not isinstance(leaf, torch.Tensor):
                return leaf
            shape = tuple(leaf.shape if tensor is None else tensor.shape)
            if shape == tuple(parameter.shape) and shape:
                dtype = leaf.dtype if tensor is None else tensor.torch_dtype()
                # As the parameter is sharded.
                target = torch.empty_like(parameter.detach(), dtype=dtype)
                shards.fill(target, leaf, path)
                return target
            if tensor is None:
                return leaf
            return _sharded.copied_to_all(shards.whole_leaf(leaf), parameter)

        return replace_leaves(entry, name, put)

    states = {key: sharded_entry(key, entry) for key, entry in saved["state"].items()}
    rest = {key: value for key, value in saved.items() if key != "state"}
    return _own_memory(loaded, {"state": states, **shards.whole(rest, name)})


def _own_memory(loaded: Loaded, tree: Any) -> Any:
    """Return a tree without mapped tensors: an object may keep them, and with them the mapping."""
    import torch

    copies: dict[int, torch.Tensor] = {}

    def copied(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _is_mapped(loaded, leaf):
            return leaf
        if id(leaf) not in copies:
            # torch cannot clone some quantized tensors.
            copies[id(leaf)] = copy.deepcopy(leaf) if leaf.is_quantized else leaf.clone()
        return copies[id(leaf)]

    return replace_leaves(tree, "", copied)


def _is_mapped(loaded: Loaded, tensor: torch.Tensor) -> bool:
    if _sharded.is_sharded(tensor) or tensor.device.type != "cpu":
        return False
    return not loaded.mapped.isdisjoint(
        piece.untyped_storage().data_ptr() for piece in pieces(tensor)
    )


def _load_into(loaded: Loaded, name: str, value: Any, saved: Any, **options: Any) -> None:
    try:
        value.load_state_dict(saved, **options)
    except Exception as exc:
        raise CheckpointMismatchError(
            Explanation(
                f"{name!r} ({type(value).__name__}) could not load its state from {loaded.folder}: {exc}",
                cause="it was created with other arguments than the saved one.",
                fix="create it as before, or leave it out of the state to restore; create the other "
                "objects again, as some already have their saved state.",
            ),
            differences={name: (type(saved).__name__, type(value).__name__)},
        ) from exc
