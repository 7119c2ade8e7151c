"""The state of a training at one moment, gathered by name from its objects."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, runtime_checkable

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _sharded
from ddpsafe.checkpoint._manifest import OptimizerFacts
from ddpsafe.checkpoint._rng import rng_state
from ddpsafe.checkpoint._safety import require_finite, require_loadable
from ddpsafe.checkpoint.errors import CheckpointConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.optim import Optimizer

REPLICATED: Final = "replicated"
PER_RANK: Final = "per rank"
SHARDED: Final = "sharded"

MAX_RANK_BYTES: Final = 16 * 2**20
"""What one rank may keep for itself: it travels over the store."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and put back."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state over."""


class PerRank:
    """Marks an object whose state differs from rank to rank.

    Each rank saves its own and gets its own back. Under another world size, ranks that the saved
    world did not have keep what they have.

    Args:
        stateful: The object of this rank.
    """

    def __init__(self, stateful: Stateful) -> None:
        if not is_stateful(stateful):
            raise CheckpointConfigError(
                Explanation(
                    f"PerRank({type(stateful).__name__}): it has no state_dict and "
                    "load_state_dict.",
                    cause="a plain value was marked.",
                    fix="mark an object that has both.",
                )
            )
        self.stateful = stateful


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Tell whether a value is an object with a state, and not a state."""
    return isinstance(value, Stateful) and not isinstance(value, type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State as it is saved.

    Attributes:
        replicated: What all ranks share, by name; whole on rank 0, empty on the others.
        own: What this rank alone has, as bytes of a torch file.
        shards: Parts of distributed tensors, by path in the state.
        names: Where each name is kept.
        optimizers: What the optimizers among them are made of.
    """

    replicated: dict[str, Any]
    own: bytes
    shards: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, OptimizerFacts] = field(default_factory=dict)


def take_snapshot(
    state: Mapping[str, Any],
    *,
    unwrap: Callable[[nn.Module], nn.Module],
    whole: bool,
    with_rng: bool,
) -> Snapshot:
    """Take the state of every object.

    Args:
        state: The objects, by name.
        unwrap: Removes DDP's wrapper.
        whole: Keep what is the same on all ranks, as rank 0 does.
        with_rng: Take the random number generators too.

    Raises:
        CheckpointConfigError: The mapping is none.
        UnsafeStateError: Something in it could not be loaded again.
    """
    from torch.optim import Optimizer

    check_names(state)
    replicated: dict[str, Any] = {}
    own: dict[str, Any] = {}
    shards: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, PerRank):
            own[name] = value.stateful.state_dict()
            require_finite(own[name], name)
            names[name] = PER_RANK
            continue
        taken = state_of(value, state, unwrap)
        require_finite(taken, name)
        rest, parts = _sharded.split(taken, name)
        shards.update(parts)
        names[name] = SHARDED if parts else REPLICATED
        if whole:
            replicated[name] = rest
    require_loadable(replicated)
    require_loadable(own)
    return Snapshot(
        replicated=replicated,
        own=_own_bytes(own, rng_state() if with_rng else None),
        shards=shards,
        names=names,
        optimizers={k: optimizer_facts(v) for k, v in state.items() if isinstance(v, Optimizer)},
    )


def optimizer_facts(optimizer: Optimizer) -> OptimizerFacts:
    """Return what an optimizer is made of."""
    groups = [[list(each.shape) for each in group["params"]] for group in optimizer.param_groups]
    return OptimizerFacts(kind=type(optimizer).__qualname__, groups=groups)


def check_names(state: object) -> None:
    """Refuse a state that is no mapping of names.

    Raises:
        CheckpointConfigError: As it says.
    """
    if not isinstance(state, Mapping) or not state or not all(isinstance(k, str) for k in state):
        raise CheckpointConfigError(
            Explanation(
                "The state is no mapping of names to objects.",
                cause=f"it is a {type(state).__name__}, or is empty, or has other keys than texts.",
                fix="pass {'model': model, 'optimizer': optimizer, …}.",
            )
        )


def state_of(value: Any, state: Mapping[str, Any], unwrap: Callable[[nn.Module], nn.Module]) -> Any:
    """Return the state of one object, or the value itself where it is none."""
    from torch import nn
    from torch.optim import Optimizer

    if isinstance(value, nn.Module):
        return unwrap(value).state_dict()
    if isinstance(value, Optimizer):
        owner = _sharded.find_owner(value, state)
        if owner is not None:
            return _sharded.optimizer_state(owner, value)
    return value.state_dict() if is_stateful(value) else value


def _own_bytes(own: dict[str, Any], rng: dict[str, Any] | None) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save({"rng": rng, "own": own}, file)
    data = file.getvalue()
    if len(data) > MAX_RANK_BYTES:
        raise CheckpointConfigError(
            Explanation(
                f"What this rank keeps for itself takes {len(data)} bytes; at most "
                f"{MAX_RANK_BYTES} travel to rank 0.",
                cause=f"{', '.join(sorted(own))} is large and marked PerRank.",
                fix="mark only what differs between ranks; shard large tensors with FSDP2.",
            )
        )
    return data
