"""A checkpoint in memory becomes the state of the objects that were compared with it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _sharded
from ddpsafe.checkpoint._rng import load_rng_state
from ddpsafe.checkpoint._snapshot import SHARDED, PerRank, is_stateful, state_of
from ddpsafe.checkpoint.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from ddpsafe.checkpoint._reading import Loaded

logger = logging.getLogger(__name__)


def apply(
    loaded: Loaded,
    state: Mapping[str, Any],
    *,
    unwrap: Callable[[nn.Module], nn.Module],
    with_rng: bool,
) -> None:
    """Give every object its saved state; `_comparing.require_same` comes before.

    Args:
        loaded: The checkpoint.
        state: The objects, by name; names that only the checkpoint has are left out.
        unwrap: Removes DDP's wrapper.
        with_rng: Set the random number generators too.

    Raises:
        CheckpointMismatchError: An object's own ``load_state_dict`` refused; those before it in the
            mapping have been changed then.
    """
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
    if loaded.manifest.names[name] == SHARDED:
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
            Explanation(
                f"{name!r} ({type(value).__name__}) refused its state from {loaded.folder}: {exc}",
                cause="it was made with other arguments than the one that was saved.",
                fix="make it as it was, or leave it out of the state that is restored; make the "
                "other objects anew, some have their saved state already.",
            ),
            differences={name: (type(saved).__name__, type(value).__name__)},
        ) from exc
