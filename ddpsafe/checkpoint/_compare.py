"""A checkpoint in memory is compared with the objects, before any of them is changed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import Explanation
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
from ddpsafe.checkpoint.errors import CheckpointConfigError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ddpsafe.checkpoint._format import OptimizerFacts
    from ddpsafe.checkpoint._restore import Loaded

_SHOWN: Final = 8
_ABSENT: Final = "nothing"

Differences = dict[str, tuple[object, object]]
Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor, by its path."""


def compare(
    loaded: Loaded,
    state: Mapping[str, Any],
    unwrap: Callable[[nn.Module], nn.Module],
    *,
    strict: bool,
) -> dict[str, str]:
    """Compare names, tensors, and the parameters of optimizers.

    Returns:
        What stays as it is where it is not strict, and why: names, and paths of tensors of models.

    Raises:
        CheckpointMismatchError: With what differs, where it is strict.
        CheckpointConfigError: A plain value could not be given back.
    """
    import torch

    plain = [
        name
        for name, value in state.items()
        if not isinstance(value, (PerRank, torch.Tensor)) and not is_stateful(value)
    ]
    if plain and not isinstance(state, MutableMapping):
        raise CheckpointConfigError(
            Explanation(
                f"{', '.join(plain)} are plain values, and the mapping cannot be changed.",
                cause=f"a {type(state).__name__} was passed; a value without "
                "load_state_dict is given back by putting it into the mapping.",
                fix="pass a dict and read the values from it after restore().",
            )
        )
    differences: Differences = {}
    left: dict[str, str] = {}
    for name, value in state.items():
        kept = loaded.manifest.names.get(name)
        asked = PER_RANK if isinstance(value, PerRank) else "shared"
        found: Differences = {}
        if kept is None or (kept == PER_RANK) != (asked == PER_RANK):
            found = {name: (kept or _ABSENT, asked)}
        elif not isinstance(value, PerRank):
            tree = loaded.shards.on_meta(loaded.replicated[name], name)
            found = _compare_tensors(name, value, tree, unwrap)
            found |= _compare_optimizers(loaded, name, value)
        differences.update(found)
        if found and isinstance(value, torch.nn.Module) and name not in found:
            left.update({path: _line(saved, now) for path, (saved, now) in found.items()})
        elif found:
            left[name] = _line(*next(iter(found.values())))
    if differences and strict:
        raise _mismatch(loaded, differences)
    return left


def _line(saved: object, now: object) -> str:
    return f"saved {_show(saved)}, now {_show(now)}"


def tensors_of(tree: Any, name: str) -> Tensors:
    """Return shape and dtype of each tensor of a tree, by its path without the name."""
    import torch
    from torch.nn.parameter import is_lazy

    found: Tensors = {}
    for path, leaf in leaves(tree, name):
        if not isinstance(leaf, torch.Tensor) or is_lazy(leaf):
            continue
        shape: tuple[Any, ...] = tuple(leaf.shape) if not leaf.is_nested else ()
        if leaf.is_nested:  # it has a shape for each of its parts
            shape = tuple(tuple(each.shape) for each in leaf.unbind())
        found[path.removeprefix(name)] = (shape, str(leaf.dtype).removeprefix("torch."))
    return found


def _compare_tensors(
    name: str, value: Any, saved: Any, unwrap: Callable[[nn.Module], nn.Module]
) -> Differences:
    """Compare the tensors of a model, or of a tensor, which torch would cast without a word."""
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
    for path in [*before, *(path for path in now if path not in before)]:
        kept, own = before.get(path), now.get(path)
        if kept == own:
            continue
        if kept is None or own is None or kept[0] != own[0]:  # the shapes
            facts = (_ABSENT if kept is None else kept[0], _ABSENT if own is None else own[0])
        else:  # the dtypes
            facts = (kept[1], own[1])
        differences[f"{name}{path}"] = facts
    for path, leaf in leaves(current, name):
        if is_lazy(leaf):  # load_state_dict gives it its shape
            differences.pop(path, None)
        elif (
            isinstance(leaf, torch.Tensor) and leaf.is_meta
        ):  # which load_state_dict leaves as it is
            differences.setdefault(path, ("values", "on the meta device, which has none"))
    return differences


def _compare_optimizers(loaded: Loaded, name: str, value: Any) -> Differences:
    """Compare classes and parameters: a new optimizer has no state yet to compare with."""
    from torch.optim import Optimizer

    if not isinstance(value, Optimizer):
        return {}
    saved, now = loaded.manifest.optimizers.get(name), optimizer_facts(value)
    if saved is not None and not saved.kind:  # of an imported file: not known
        return {}
    if saved is None or saved.kind != now.kind:
        return {name: ("no optimizer" if saved is None else saved.kind, now.kind)}
    if len(saved.groups) != len(now.groups):
        return {f"{name}['param_groups']": (_count(saved), _count(now))}
    return {
        f"{name}['param_groups'][{number}]['params']": (_list(before), _list(after))
        for number, (before, after) in enumerate(zip(saved.groups, now.groups, strict=True))
        if before != after
    }


def _count(facts: OptimizerFacts) -> str:
    number = len(facts.groups)
    return "1 group" if number == 1 else f"{number} groups"


def _list(shapes: list[list[int]]) -> str:
    shown = [str(tuple(shape)) for shape in shapes[:_SHOWN]]
    return f"{len(shapes)} of shapes {', '.join(shown)}{', …' if len(shapes) > _SHOWN else ''}"


def _mismatch(loaded: Loaded, differences: Differences) -> CheckpointMismatchError:
    listed = [
        f"{path} is not in the checkpoint"
        if saved == _ABSENT and now in ("shared", PER_RANK)
        else f"{path}: {_line(saved, now)}"
        for path, (saved, now) in list(differences.items())[:_SHOWN]
    ]
    number = len(differences)
    wrapper = _find_wrapper(differences)
    if number > _SHOWN:
        listed.append(f"… and {number - _SHOWN} more")
    return CheckpointMismatchError(
        Explanation(
            f"The checkpoint {loaded.folder} is of other objects: {number} {'differs' if number == 1 else 'differ'}.",
            cause=f"a wrapper puts {wrapper!r} before the names of the model; DDP's and torch.compile's "
            "are left out, others are not."
            if wrapper
            else "the model was changed since, or this is another job's directory.",
            fix="save and restore the model without its wrapper, or with it."
            if wrapper
            else "build the model as it was, begin in a directory of its own, or restore what fits "
            "with strict=False.",
            details=listed,
        ),
        differences=differences,
    )


def _find_wrapper(differences: Differences) -> str:
    """Return what stands before the names of all tensors that differ, on one side only."""
    saved = {path for path, (_, now) in differences.items() if now == _ABSENT}
    present = {path for path, (then, _) in differences.items() if then == _ABSENT}
    longer, shorter = sorted((saved, present), key=lambda paths: -max(map(len, paths), default=0))
    name, _, first = min(shorter, default="").partition("['")
    matches = [path for path in longer if path.endswith(first) and path != name]
    for path in matches if first else ():
        wrapper = path.removesuffix(first).removeprefix(f"{name}['")
        if {each.replace("['", f"['{wrapper}", 1) for each in shorter} == longer:
            return wrapper
    return ""


def _show(shape: object) -> str:
    return f"shape {shape}" if isinstance(shape, tuple) else str(shape)
