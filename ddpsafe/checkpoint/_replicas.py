"""Whether the ranks' copies of a model are equal, as those of DDP have to be.

They drift apart without an error: by parameters that were unfrozen after DDP had been built, by a checkpoint
that one rank loaded, by an optimizer that one rank stepped. A checkpoint would then have rank 0's copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from isal.isal_zlib import crc32

from ddpsafe._text import ranks_text, shortened
from ddpsafe.checkpoint import _sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

_MOST_NAMED: Final = 3

Digests = dict[str, dict[str, int]]
"""A number for the bytes of each parameter, by the name of its model and its own."""


def digests_of(state: Mapping[str, Any], unwrap: Callable[[nn.Module], nn.Module]) -> Digests:
    """Return the digests of the parameters of all models in a state, in one pass over their bytes.

    Buffers are left out: DDP makes those equal at the next forward pass only. So are distributed tensors,
    of which each rank has its own part.
    """
    import torch
    from torch import nn

    found: Digests = {}
    on_devices: list[tuple[str, str, torch.Tensor]] = []
    for name, value in state.items():
        if not isinstance(value, nn.Module):
            continue
        found[name] = {}
        for key, parameter in unwrap(value).named_parameters():
            data = parameter.detach()
            kind = type(data)
            if data.is_meta or data.layout != torch.strided or _sharded.is_sharded(data):
                continue
            if kind not in (torch.Tensor, nn.Parameter):  # quantized or the like
                continue
            raw = data.contiguous().reshape(-1).view(torch.uint8)
            if raw.device.type == "cpu":
                found[name][key] = crc32(raw.numpy())
            else:
                on_devices.append((name, key, _sum_of(raw)))
    # One copy from each device for all of them: every copy waits for the device.
    for device in {total.device for _, _, total in on_devices}:
        own = [each for each in on_devices if each[2].device == device]
        for (name, key, _), value in zip(
            own, torch.stack([total for _, _, total in own]).tolist(), strict=True
        ):
            found[name][key] = value
    return found


def _sum_of(raw: torch.Tensor) -> torch.Tensor:
    """Return the sum of the 32-bit words of some bytes, modulo 2**64; computed on their device."""
    import torch

    if raw.storage_offset() % 4:
        return raw.sum(dtype=torch.int64)
    whole = len(raw) // 4 * 4
    return raw[:whole].view(torch.int32).sum(dtype=torch.int64) + raw[whole:].sum(dtype=torch.int64)


def drift_of(digests: Mapping[int, Digests]) -> list[str]:
    """Return a line for each model of which a rank has another copy than rank 0."""
    lines: list[str] = []
    for model, own in digests[0].items():
        ranks: set[int] = set()
        names: dict[str, None] = {}
        for rank, other in digests.items():
            # A rank that has no such model, or other parameters, fails elsewhere.
            others = other.get(model, {})
            for name in own:
                if name in others and others[name] != own[name]:
                    ranks.add(rank)
                    names[name] = None
        if names:
            listed = ", ".join(shortened([*names], _MOST_NAMED))
            lines.append(f"{model!r} on {ranks_text(sorted(ranks))}: {listed}")
    return lines
