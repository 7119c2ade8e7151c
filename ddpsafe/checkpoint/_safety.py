"""What may go into a checkpoint: only what loads again without executing anything."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import Explanation
from ddpsafe.checkpoint._trees import PLAIN, leaves
from ddpsafe.checkpoint.errors import UnsafeStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTAINERS: Final = (dict, list, tuple)
_SHOWN: Final = 5


def require_loadable(state: dict[str, Any]) -> None:
    """Refuse a state that ``torch.load(weights_only=True)`` would refuse.

    Args:
        state: What is to be saved, by name.

    Raises:
        UnsafeStateError: It holds such values; it says where.
    """
    found = list(_refused(state))
    if found:
        raise _unsafe(found)


def _unsafe(found: list[tuple[str, str]]) -> UnsafeStateError:
    listed = [f"{path}: {why}" for path, why in found[:_SHOWN]]
    more = [f"… and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    values = "a value" if len(found) == 1 else f"{len(found)} values"
    what = f"The state holds {values} that could not be loaded again."
    return UnsafeStateError(
        Explanation(
            what,
            cause="checkpoints are loaded with weights_only=True, so that none can execute code; "
            "that allows tensors, numbers, texts, and dicts, lists and tuples of them.",
            fix="return plain values from state_dict(), or allow the type on both sides with "
            "torch.serialization.add_safe_globals.",
            details=[*listed, *more],
        ),
        paths=[path for path, _ in found],
    )


def require_finite(tree: object, name: str) -> None:
    """Refuse a tree that cannot be walked to its end.

    Raises:
        UnsafeStateError: It holds itself.
    """
    try:
        for _ in leaves(tree, name):
            pass
    except RecursionError:
        why = "a dict, list or tuple that holds itself, or is nested too deep"
        raise _unsafe([(f"state[{name!r}]", why)]) from None


def _refused(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    import torch

    tensors = (torch.Tensor, torch.nn.Parameter)
    for path, leaf in _suspects(state, "state"):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            yield path, "a tensor on the meta device, which has no values"
            continue
        if type(leaf) in PLAIN or type(leaf) in tensors:
            continue
        why = _try(leaf)
        if why is not None:
            yield path, f"{type(leaf).__module__}.{type(leaf).__qualname__} ({why})"


def _suspects(tree: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the leaves, the keys, and containers that are no plain ones, emptied of their items."""
    if isinstance(tree, _CONTAINERS) and not hasattr(tree, "_fields"):
        if type(tree) not in _CONTAINERS:
            yield path, _emptied(tree)
        if isinstance(tree, dict):
            for key, value in tree.items():
                yield f"{path}.keys()", key
                yield from _suspects(value, f"{path}[{key!r}]")
            return
        for number, value in enumerate(tree):
            yield from _suspects(value, f"{path}[{number}]")
        return
    yield from leaves(tree, path)


def _emptied(container: Any) -> object:
    if hasattr(container, "n_sequence_fields"):  # time.struct_time: cannot be made empty
        return container
    if isinstance(container, dict):
        copy = container.copy()
        copy.clear()
        return copy
    return type(container)()


def _try(value: object) -> str | None:
    """Save and load one value; return why that is refused, if it is."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        return "weights_only=True does not allow it"
    except Exception as exc:  # noqa: BLE001 - a user's type may refuse in any way
        return (str(exc).splitlines() or [""])[0][:120] or type(exc).__name__
    return None
