"""Compares a checkpoint in memory with the objects, before any of them is changed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._text import shortened
from ddpsafe.checkpoint._format import PER_RANK
from ddpsafe.checkpoint._state import (
    PerRank,
    is_stateful,
    optimizer_facts,
    plain_names,
    renamed,
    state_of,
)
from ddpsafe.checkpoint._trees import leaves
from ddpsafe.checkpoint.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from ddpsafe.checkpoint._format import Manifest, OptimizerFacts
    from ddpsafe.checkpoint._sharded import SavedShards
    from ddpsafe.checkpoint._slots import Slot

_MAX_LISTED: Final = 8
_ABSENT: Final = "nothing"

Differences = dict[str, tuple[object, object]]
Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor, by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that has been read and checked, before it is put into any object.

    Attributes:
        folder: The checkpoint's folder, or the slot in memory.
        replicated: State that all ranks share, by name. Its tensors may be mapped from the file.
        own: This rank's own part, by name; ``None`` if the saved world had no such rank.
        rng: This rank's random number generators; ``None`` if the saved world had no such rank, or
            did not save them.
        mapped: Addresses of the tensors' memory, which may belong to a mapped file.
        left: Paths that a restore with ``strict=False`` leaves unchanged, each with the reason.
    """

    folder: Path | Slot
    manifest: Manifest
    replicated: dict[str, Any]
    own: dict[str, Any] | None
    rng: dict[str, Any] | None
    shards: SavedShards
    mapped: frozenset[int]
    left: dict[str, str] = field(default_factory=dict)


def compare(
    loaded: Loaded,
    state: Mapping[str, Any],
    unwrap: Callable[[nn.Module], nn.Module],
    *,
    strict: bool,
) -> dict[str, str]:
    """Compare names, tensors, and the parameters of optimizers.

    Returns what a restore that is not strict leaves unchanged, and why: names, and paths of tensors in
    models.

    Raises:
        CheckpointMismatchError: Something differs, and the restore is strict.
        ConfigError: A plain value could not be put into the mapping.
    """
    import torch

    plain = [
        name
        for name, value in state.items()
        if not isinstance(value, (PerRank, torch.Tensor)) and not is_stateful(value)
    ]
    if plain and not isinstance(state, MutableMapping):
        raise ConfigError(
            Explanation(
                f"{', '.join(plain)} are plain values, but the mapping cannot be changed.",
                cause=f"a {type(state).__name__} was passed; values without load_state_dict are "
                "restored by putting them into the mapping.",
                fix="pass a dict and read the values from it after restore().",
            )
        )
    differences: Differences = {}
    left: dict[str, str] = {}
    for name, value in state.items():
        kept = loaded.manifest.names.get(name)
        expected = PER_RANK if isinstance(value, PerRank) else "shared"
        unequal: Differences = {}
        if kept is None or (kept == PER_RANK) != (expected == PER_RANK):
            unequal = {name: (kept or _ABSENT, expected)}
        elif not isinstance(value, PerRank):
            # Only shapes and dtypes are compared: the values are not read yet.
            tree = loaded.shards.on_meta(loaded.replicated[name], name)
            unequal = _compare_tensors(name, value, tree, unwrap)
            unequal |= _compare_optimizers(loaded, name, value)
        differences.update(unequal)
        if unequal and isinstance(value, torch.nn.Module) and name not in unequal:
            left.update({path: _line(saved, now) for path, (saved, now) in unequal.items()})
        elif unequal:
            left[name] = _line(*next(iter(unequal.values())))
    if differences and strict:
        raise _mismatch(loaded, differences)
    return left


def _line(saved: object, now: object) -> str:
    return f"saved {_show(saved)}, now {_show(now)}"


def tensors_of(tree: Any, name: str) -> Tensors:
    """Return shape and dtype of each tensor in a tree, by its path without the name."""
    import torch
    from torch.nn.parameter import is_lazy

    tensors: Tensors = {}
    for path, leaf in leaves(tree, name):
        if not isinstance(leaf, torch.Tensor) or is_lazy(leaf):
            continue
        shape: tuple[Any, ...] = tuple(leaf.shape) if not leaf.is_nested else ()
        if leaf.is_nested:  # a nested tensor has a shape for each of its parts
            shape = tuple(tuple(part.shape) for part in leaf.unbind())
        tensors[path.removeprefix(name)] = (shape, str(leaf.dtype).removeprefix("torch."))
    return tensors


def _compare_tensors(
    name: str, value: Any, saved: Any, unwrap: Callable[[nn.Module], nn.Module]
) -> Differences:
    """Compare a tensor, or those of a model."""
    import torch
    from torch.nn.parameter import is_lazy

    if isinstance(value, torch.Tensor) and not isinstance(saved, torch.Tensor):
        return {name: (type(saved).__name__, "a tensor")}
    if isinstance(value, torch.nn.Module) and not isinstance(saved, dict):
        return {name: (type(saved).__name__, "a model")}
    if not isinstance(value, (torch.nn.Module, torch.Tensor)):
        return {}
    if isinstance(value, torch.nn.Module):
        saved = renamed(saved, plain_names(saved))
    current = state_of(value, unwrap)
    before, now = tensors_of(saved, name), tensors_of(current, name)
    differences: Differences = {}
    missing = (_ABSENT, "")
    for path in {**before, **now}:
        saved_shape, saved_dtype = before.get(path, missing)
        shape, dtype = now.get(path, missing)
        if saved_shape != shape:
            differences[f"{name}{path}"] = (saved_shape, shape)
        elif saved_dtype != dtype:  # torch would cast it silently
            differences[f"{name}{path}"] = (saved_dtype, dtype)
    for path, leaf in leaves(current, name):
        if is_lazy(leaf):  # load_state_dict sets its shape
            differences.pop(path, None)
        elif isinstance(leaf, torch.Tensor) and leaf.is_meta:  # load_state_dict would not change it
            differences.setdefault(path, ("values", "on the meta device, which has none"))
    return differences


def _compare_optimizers(loaded: Loaded, name: str, value: Any) -> Differences:
    """Compare the class of an optimizer, and the shapes of its parameters."""
    from torch.optim import Optimizer

    if not isinstance(value, Optimizer):
        return {}
    # Not from its state: a new optimizer has none yet.
    saved, now = loaded.manifest.optimizers.get(name), optimizer_facts(value)
    if saved is not None and not saved.kind:  # from an imported file, where the class is not known
        return {}
    # torch would load it, and continue with the other optimizer's hyperparameters.
    if saved is None or saved.kind != now.kind:
        return {name: ("no optimizer" if saved is None else saved.kind, now.kind)}
    if len(saved.groups) != len(now.groups):
        return {f"{name}['param_groups']": (_count(saved), _count(now))}
    return {
        # torch would load other shapes, and fail in the next step.
        f"{name}['param_groups'][{number}]['params']": (_list(before), _list(after))
        for number, (before, after) in enumerate(zip(saved.groups, now.groups, strict=True))
        if before != after
    }


def _count(facts: OptimizerFacts) -> str:
    number = len(facts.groups)
    return "1 group" if number == 1 else f"{number} groups"


def _list(shapes: list[list[int]]) -> str:
    first = [str(tuple(shape)) for shape in shapes[:_MAX_LISTED]]
    return f"{len(shapes)} of shapes {', '.join(first)}{', …' if len(shapes) > _MAX_LISTED else ''}"


def _mismatch(loaded: Loaded, differences: Differences) -> CheckpointMismatchError:
    lines = [
        f"{path} is not in the checkpoint"
        if saved == _ABSENT and now in ("shared", PER_RANK)
        else f"{path}: {_line(saved, now)}"
        for path, (saved, now) in differences.items()
    ]
    number = len(differences)
    wrapper = _find_wrapper(differences)
    return CheckpointMismatchError(
        Explanation(
            f"The checkpoint {loaded.folder} does not fit the objects: "
            f"{number} {'difference' if number == 1 else 'differences'}.",
            cause=f"a wrapper puts {wrapper!r} before the names of the model's tensors; ddpsafe removes "
            "only the prefixes of DDP and torch.compile."
            if wrapper
            else "the model was changed since, or this is another job's directory.",
            fix="use the wrapper both for saving and for restoring, or for neither."
            if wrapper
            else "build the model as before, start in a new directory, or restore what fits with "
            "strict=False.",
            details=shortened(lines, _MAX_LISTED),
        ),
        differences=differences,
    )


def _find_wrapper(differences: Differences) -> str:
    """Return the prefix that all differing tensors have on one side only; empty if there is none."""
    saved = {path for path, (_, now) in differences.items() if now == _ABSENT}
    present = {path for path, (then, _) in differences.items() if then == _ABSENT}
    longer, shorter = sorted((saved, present), key=lambda paths: -max(map(len, paths), default=0))
    name, _, first = min(shorter, default="").partition("['")
    matches = [path for path in longer if path.endswith(first) and path != name]
    for path in matches if first else ():
        wrapper = path.removesuffix(first).removeprefix(f"{name}['")
        if {own.replace("['", f"['{wrapper}", 1) for own in shorter} == longer:
            return wrapper
    return ""


def _show(shape: object) -> str:
    return f"shape {shape}" if isinstance(shape, tuple) else str(shape)
