"""A checkpoint in memory becomes the state of the objects, or differs from them and does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import explain
from ddpsafe.checkpoint import _sharded
from ddpsafe.checkpoint._rng import load_rng_state
from ddpsafe.checkpoint._snapshot import PerRank, is_stateful, state_of
from ddpsafe.checkpoint.errors import CheckpointConfigError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ddpsafe.checkpoint._reading import Loaded

logger = logging.getLogger(__name__)

_SHOWN: Final = 8
_ABSENT: Final = "nothing"

Differences = dict[str, tuple[object, object]]


def apply(
    loaded: Loaded,
    state: Mapping[str, Any],
    *,
    unwrap: Callable[[nn.Module], nn.Module],
    with_rng: bool,
) -> None:
    """Give every object its saved state.

    Args:
        loaded: The checkpoint.
        state: The objects, by name; names that only the checkpoint has are left out.
        unwrap: Removes DDP's wrapper.
        with_rng: Set the random number generators too.

    Raises:
        CheckpointMismatchError: An object is not what was saved; nothing has been changed then, unless
            its own ``load_state_dict`` found it.
    """
    require_same(loaded, state, unwrap)
    for name, value in state.items():
        if isinstance(value, PerRank):
            if loaded.own is None:
                logger.warning("the saved world had no such rank: %s stays as it is", name)
            else:
                _give(loaded, name, value.stateful, loaded.own[name])
        else:
            _restore_one(loaded, state, name, unwrap)
    if with_rng and loaded.rng is not None:
        load_rng_state(loaded.rng)


def _restore_one(
    loaded: Loaded, state: Mapping[str, Any], name: str, unwrap: Callable[[nn.Module], nn.Module]
) -> None:
    import torch
    from torch.optim import Optimizer

    value, saved = state[name], loaded.replicated[name]
    if loaded.manifest.names[name] == "sharded":
        _, parts = _sharded.split(state_of(value, state, unwrap), name)
        _sharded.read_shards(parts, loaded.folder)
        saved = _sharded.join(saved, name, parts)
        owner = _sharded.find_owner(value, state) if isinstance(value, Optimizer) else None
        if owner is not None:
            _sharded.load_optimizer_state(owner, value, saved)
            return
    if isinstance(value, torch.nn.Module):
        _give(loaded, name, unwrap(value), saved)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(saved)
    elif is_stateful(value):
        _give(loaded, name, value, saved)
    elif isinstance(state, MutableMapping):
        state[name] = saved


def _give(loaded: Loaded, name: str, value: Any, saved: Any) -> None:
    try:
        value.load_state_dict(saved)
    except Exception as exc:
        raise CheckpointMismatchError(
            explain(
                f"{name!r} ({type(value).__name__}) refused its state from {loaded.folder}: {exc}",
                cause="it was made with other arguments than the one that was saved.",
                fix="make it as it was, or leave it out of the state that is restored.",
            ),
            differences={name: (type(saved).__name__, type(value).__name__)},
        ) from exc


def require_same(
    loaded: Loaded, state: Mapping[str, Any], unwrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Compare names and shapes before anything is changed.

    Raises:
        CheckpointMismatchError: With what differs.
        CheckpointConfigError: A plain value could not be given back.
    """
    _require_writable(state)
    differences: Differences = {}
    shapes = _sharded.saved_shapes(loaded.folder) if _has_shards(loaded) else {}
    for name, value in state.items():
        kept = loaded.manifest.names.get(name)
        asked = "per rank" if isinstance(value, PerRank) else "shared"
        if kept is None or (kept == "per rank") != (asked == "per rank"):
            differences[name] = (kept or _ABSENT, asked)
        elif not isinstance(value, PerRank):
            saved = _shapes(_with_shapes(loaded.replicated[name], name, shapes), name)
            differences.update(_compare(name, value, saved, state, unwrap))
    if differences:
        raise _mismatch(loaded, differences)


def _has_shards(loaded: Loaded) -> bool:
    return "sharded" in loaded.manifest.names.values()


def _with_shapes(saved: Any, name: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    import torch

    if not shapes:
        return saved
    meta = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
    return _sharded.join(saved, name, meta)


def _require_writable(state: Mapping[str, Any]) -> None:
    import torch

    plain = [
        name
        for name, value in state.items()
        if not isinstance(value, (PerRank, torch.Tensor)) and not is_stateful(value)
    ]
    if plain and not isinstance(state, MutableMapping):
        raise CheckpointConfigError(
            explain(
                f"{', '.join(plain)} are plain values, and the mapping cannot be changed.",
                cause=f"a {type(state).__name__} was passed; a value that is no object with "
                "load_state_dict is given back by putting it into the mapping.",
                fix="pass a dict and read the values from it after restore().",
            )
        )


def _shapes(tree: Any, name: str) -> dict[str, tuple[int, ...]]:
    from ddpsafe.checkpoint._trees import leaves

    found = ((path.removeprefix(name), leaf) for path, leaf in leaves(tree, name))
    return {path: tuple(leaf.shape) for path, leaf in found if hasattr(leaf, "shape")}


def _compare(
    name: str,
    value: Any,
    saved: dict[str, tuple[int, ...]],
    state: Mapping[str, Any],
    unwrap: Callable[[nn.Module], nn.Module],
) -> Differences:
    """Compare the tensors of a model, or of a tensor; optimizers compare their groups themselves."""
    import torch

    if not isinstance(value, (torch.nn.Module, torch.Tensor)):
        return {}
    current = _shapes(state_of(value, state, unwrap), name)
    return {
        f"{name}{path}": (saved.get(path, _ABSENT), current.get(path, _ABSENT))
        for path in [*saved, *(path for path in current if path not in saved)]
        if saved.get(path) != current.get(path)
    }


def _mismatch(loaded: Loaded, differences: Differences) -> CheckpointMismatchError:
    listed = [
        f"{path}: saved {_show(saved)}, now {_show(now)}"
        for path, (saved, now) in list(differences.items())[:_SHOWN]
    ]
    if len(differences) > _SHOWN:
        listed.append(f"… and {len(differences) - _SHOWN} more")
    return CheckpointMismatchError(
        explain(
            f"The checkpoint {loaded.folder} is of other objects: {len(differences)} differ.",
            cause="the model was changed since, or this is another job's directory.",
            fix="build the model as it was, or begin in a directory of its own.",
            details=listed,
        ),
        differences=differences,
    )


def _show(shape: object) -> str:
    return f"shape {shape}" if isinstance(shape, tuple) else str(shape)
