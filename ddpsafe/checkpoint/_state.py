"""The state of a training at one moment, gathered by name from its objects.

It may contain only values that load again without executing code.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, runtime_checkable

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._text import shortened
from ddpsafe._torch_private import module_versions, set_module_versions
from ddpsafe.checkpoint import _sharded
from ddpsafe.checkpoint._format import PER_RANK, REPLICATED, SHARDED, Kept, OptimizerFacts
from ddpsafe.checkpoint._replicas import digests_of
from ddpsafe.checkpoint._trees import MAX_DEPTH, PLAIN, leaves
from ddpsafe.checkpoint.errors import UnsafeStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import Optimizer

    from ddpsafe.checkpoint._replicas import Digests

_CONTAINERS: Final = (dict, list, tuple)
_MAX_LISTED: Final = 5
_COMPILED: Final = "_orig_mod."
"""What torch.compile inserts into the names of a submodule's parameters."""

MAX_RANK_BYTES: Final = 16 * 2**20
"""Limit for one rank's own state, which travels to rank 0 over the store."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""


class PerRank:
    """Marks an object whose state differs from rank to rank.

    Each rank saves and restores its own state. After a restart with more ranks, the additional ranks
    keep the state they have.

    Args:
        stateful: This rank's object.
    """

    def __init__(self, stateful: Stateful) -> None:
        if not is_stateful(stateful):
            raise ConfigError(
                Explanation(
                    f"PerRank({type(stateful).__name__}): it lacks state_dict or load_state_dict.",
                    cause="a plain value was marked.",
                    fix="mark an object that has both.",
                )
            )
        self.stateful = stateful


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether a value is an object with `state_dict` and `load_state_dict`; a class is not."""
    return isinstance(value, Stateful) and not isinstance(value, type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state as one rank saves it.

    Attributes:
        replicated: What all ranks share, by name; complete on rank 0, empty on the others.
        own: This rank's own state, as the bytes of a torch file.
        shards: This rank's parts of distributed tensors, by path in the state.
        sharded: Dtype and shape of the distributed tensors, by path; the same on all ranks.
        names: How the state of each name is stored.
        digests: What shows whether the ranks' copies of the models are equal.
    """

    replicated: dict[str, Any]
    own: bytes
    shards: _sharded.Own = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Kept] = field(default_factory=dict)
    optimizers: dict[str, OptimizerFacts] = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)


def take_snapshot(
    state: Mapping[str, Any],
    *,
    unwrap: Callable[[nn.Module], nn.Module],
    whole: bool,
    with_rng: bool,
    is_compared: bool,
) -> Snapshot:
    """Take the state of every object.

    Args:
        state: The objects, by name.
        unwrap: Removes the wrappers of a model.
        whole: Keep the state that all ranks share, as far as this rank has it: rank 0 does, and the first
            rank of each node for its memory.
        with_rng: Include the random number generators.
        is_compared: Take what is needed to compare the ranks' copies of models.

    Raises:
        ConfigError: `state` is not a mapping of names.
        UnsafeStateError: Something in it could not be loaded again.
    """
    from torch.optim import Optimizer

    check_names(state)
    replicated: dict[str, Any] = {}
    own: dict[str, Any] = {}
    shards: dict[str, torch.Tensor] = {}
    names: dict[str, Kept] = {}
    for name, value in state.items():
        if isinstance(value, PerRank):
            own[name] = value.stateful.state_dict()
            require_finite(own[name], name)
            names[name] = PER_RANK
            continue
        # On every rank, though rank 0 keeps it: state_dict() may have collectives, and each rank
        # saves its own parts of distributed tensors.
        if has_parts_on_ranks(value):
            # A collective; only rank 0 has the state then. Not left to the script: it would save what the
            # parts were when it last did so.
            value.consolidate_state_dict(to=0)
            if not whole or value.rank != 0:
                names[name] = REPLICATED
                continue
        tree = state_of(value, unwrap)
        require_finite(tree, name)
        rest, parts = _sharded.split(tree, name)
        shards.update(parts)
        names[name] = SHARDED if parts else REPLICATED
        if whole:
            replicated[name] = rest
    require_loadable(replicated)
    require_loadable(own)
    return Snapshot(
        replicated=replicated,
        own=own_bytes(own, rng_state() if with_rng else None),
        shards=_sharded.own_parts(shards),
        sharded=_sharded.describe(shards),
        names=names,
        optimizers={k: optimizer_facts(v) for k, v in state.items() if isinstance(v, Optimizer)},
        digests=digests_of(state, unwrap) if is_compared else {},
    )


def has_parts_on_ranks(value: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether a value is an optimizer of which each rank has a part of the state."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(value, module.ZeroRedundancyOptimizer)


def optimizer_facts(optimizer: Optimizer) -> OptimizerFacts:
    """Return the class and the parameter shapes of an optimizer."""
    groups = [
        [list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups
    ]
    return OptimizerFacts(kind=type(optimizer).__qualname__, groups=groups)


def check_names(state: object) -> None:
    """Refuse a state that is not a mapping of names.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(state, Mapping):
        cause = f"it is of type {type(state).__name__}."
    elif not state:
        cause = "it is empty."
    else:
        wrong = [name for name in state if not is_text(name)]
        if not wrong:
            return
        cause = f"the key {wrong[0]!r} is not a string that UTF-8 can encode."
    raise ConfigError(
        Explanation(
            "The state is not a mapping of names to objects.",
            cause=cause,
            fix="pass {'model': model, 'optimizer': optimizer, …}.",
        )
    )


def is_text(value: object) -> bool:
    """Return whether a value is a string that UTF-8 can encode; some file names are not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def state_of(value: Any, unwrap: Callable[[nn.Module], nn.Module]) -> Any:
    """Return the state of an object, or the value itself if it is plain."""
    from torch import nn

    if isinstance(value, nn.Module):
        state = unwrap(value).state_dict()
        return renamed(state, plain_names(state))
    return value.state_dict() if is_stateful(value) else value


def plain_names(names: Iterable[object]) -> dict[Any, Any]:
    """Map parameter names to those of the uncompiled model; to ``None`` if these are ambiguous."""
    plain = {name: name.replace(_COMPILED, "") if isinstance(name, str) else name for name in names}
    return plain if len(set(plain.values())) == len(plain) else dict.fromkeys(plain)


def renamed(state: Any, names: Mapping[Any, Any]) -> Any:
    """Return a model's state with its tensors renamed; the same object if no name changes.

    The versions of modules that torch keeps beside the tensors get the uncompiled names too.
    """
    if not isinstance(state, dict) or all(names.get(name, name) in (name, None) for name in state):
        return state
    result: Any = type(state)()
    for name, value in state.items():
        result[names.get(name) or name] = value
    versions = module_versions(state)
    if versions is not None:
        plain = {f"{name}.".replace(_COMPILED, "")[:-1]: facts for name, facts in versions.items()}
        set_module_versions(result, {**versions, **plain})
    return result


def named_for(model: nn.Module, saved: Any) -> Any:
    """Return a saved state with the names that a model's parameters have now."""
    if not isinstance(saved, dict):
        return saved
    now = {plain: name for name, plain in plain_names(model.state_dict()).items() if plain}
    return renamed(
        saved, {name: now.get(plain or name) for name, plain in plain_names(saved).items()}
    )


def own_bytes(own: dict[str, Any], rng: dict[str, Any] | None) -> bytes:
    """Return one rank's own state as the bytes of a torch file.

    Raises:
        ConfigError: It is too large to travel over the store.
    """
    import torch

    file = io.BytesIO()
    with explaining(own):
        torch.save({"rng": rng, "own": own}, file)
    data = file.getvalue()
    if len(data) > MAX_RANK_BYTES:
        raise ConfigError(
            Explanation(
                f"This rank's own state takes {len(data)} bytes; at most {MAX_RANK_BYTES} can be "
                "sent to rank 0.",
                cause=f"{', '.join(sorted(own))} is large and marked PerRank.",
                fix="mark only what differs between ranks; shard large tensors with FSDP2.",
            )
        )
    return data


def require_loadable(state: dict[str, Any]) -> None:
    """Refuse a state that ``torch.load(weights_only=True)`` would refuse.

    Raises:
        UnsafeStateError: It has such values, at `UnsafeStateError.paths`.
    """
    refused = list(_refused(state))
    if refused:
        raise _unsafe(refused)


@contextlib.contextmanager
def explaining(state: dict[str, Any]) -> Iterator[None]:
    """Turn an error of torch into one that names the values that torch cannot copy or save.

    Raises:
        UnsafeStateError: Instead of torch's error, such as KeyError for a dtype it cannot save.
    """
    try:
        yield
    except Exception as exc:
        tensors = ((path, leaf) for path, leaf in leaves(state, "state") if type(leaf) not in PLAIN)
        refused = [(path, why) for path, leaf in tensors if (why := _try(leaf)) is not None]
        if not refused:
            raise
        raise _unsafe(refused) from exc


def _unsafe(refused: list[tuple[str, str]]) -> UnsafeStateError:
    values = "a value" if len(refused) == 1 else f"{len(refused)} values"
    return UnsafeStateError(
        Explanation(
            f"The state holds {values} that could not be loaded again.",
            cause="checkpoints are loaded with weights_only=True, so that they cannot execute code; "
            "that allows tensors, numbers, strings, and dicts, lists and tuples of them.",
            fix="return plain values from state_dict(), or allow the type on both sides with "
            "torch.serialization.add_safe_globals.",
            details=shortened([f"{path}: {why}" for path, why in refused], _MAX_LISTED),
        ),
        paths=tuple(path for path, _ in refused),
    )


def require_finite(tree: object, name: str) -> None:
    """Refuse a tree that is too deep, or that has a string reserved for distributed tensors.

    Raises:
        UnsafeStateError: It contains itself, is nested too deep, or has such a string.
    """
    try:
        # It is saved inside one or two more containers.
        for path, leaf in leaves(tree, f"state[{name!r}]", MAX_DEPTH - 2):
            if isinstance(leaf, str) and leaf.startswith(_sharded.MARK):
                raise _unsafe([(path, f"a string that begins with {_sharded.MARK!r}")])
    except RecursionError:
        why = f"a dict, list or tuple that contains itself, or is nested deeper than {MAX_DEPTH}"
        raise _unsafe([(f"state[{name!r}]", why)]) from None


def _refused(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    import torch

    tensors = (torch.Tensor, torch.nn.Parameter)
    for path, leaf in _suspects(state, "state"):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            yield path, "a tensor on the meta device, which has no values"
            continue
        if type(leaf) in PLAIN:
            continue
        # torch 2.15 saves nested tensors but cannot load them.
        if isinstance(leaf, torch.Tensor) and type(leaf) in tensors and not leaf.is_nested:
            continue
        # Tried, not looked up in a list: add_safe_globals() may have allowed the type.
        why = _try(leaf)
        if why is not None:
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            yield path, f"{kind} ({_advice(leaf) or why})"


def _advice(leaf: object) -> str:
    """Return what to write instead of a value; empty if that is not known."""
    import numpy as np

    if isinstance(leaf, np.generic):
        return "a NumPy scalar: write value.item(), or float(value)"
    if isinstance(leaf, np.ndarray):
        return "a NumPy array: write torch.from_numpy(value)"
    if is_stateful(leaf):
        return "has a state of its own: give it its own name in the state, not inside a container"
    return ""


def _suspects(tree: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield leaves, keys, and empty copies of containers that are not plain dicts, lists or tuples."""
    if isinstance(tree, _CONTAINERS) and not hasattr(tree, "_fields"):
        if type(tree) not in _CONTAINERS:
            empty: Any = tree
            if isinstance(tree, dict):
                empty = tree.copy()
                empty.clear()
            elif not hasattr(tree, "n_sequence_fields"):  # time.struct_time cannot be made empty
                empty = type(tree)()
            yield path, empty
        if isinstance(tree, dict):
            for key, value in tree.items():
                yield f"{path}.keys()", key
                yield from _suspects(value, f"{path}[{key!r}]")
            return
        for number, value in enumerate(tree):
            yield from _suspects(value, f"{path}[{number}]")
        return
    yield from leaves(tree, path)


def _try(value: object) -> str | None:
    """Save and load one value; return why that fails, if it does."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        return "weights_only=True does not allow it"
    except Exception as exc:  # noqa: BLE001 - a user's type may raise anything
        return (str(exc).splitlines() or [""])[0][:120] or type(exc).__name__
    return None


def rng_state() -> dict[str, Any]:
    """Return the states of the generators, in types that load without executing code."""
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the global one
    state = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    # Asking for the state would initialize CUDA in a process that does not use it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_rng_state(state: dict[str, Any]) -> None:
    """Set the generators to saved states; that of a GPU only if there is one."""
    import numpy as np
    import torch

    from ddpsafe._worker.rank import this_rank

    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002 - the global one
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    this_rank.shared_seed = None  # a later wrap must not seed them again
