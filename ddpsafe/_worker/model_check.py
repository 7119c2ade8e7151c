"""Compares the model over the ranks before DistributedDataParallel copies it by position.

DDP sends rank 0's parameters and buffers in the order in which each rank lists them, and names are not
part of it. Where two ranks list equal shapes in another order, each gets the other's values, and nothing
fails. So the names are compared here, with order, shapes, dtypes and `requires_grad`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpsafe._errors import Explanation, MismatchError
from ddpsafe._text import ranks_text
from ddpsafe._wire.exception_facts import clip
from ddpsafe._worker import torch_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from ddpsafe._errors import Origin

_SHOWN_RANKS: Final = 8
_NAME_CHARS: Final = 200
# What an entry takes as JSON, with a name of that length and six bytes for each of its characters.
_ENTRY_BYTES: Final = 2_048
# Where a rank has no further entry: no digest of an entry is negative.
_NOTHING: Final = -1


class Entry(NamedTuple):
    """What DDP copies or reduces by its position.

    Attributes:
        kind: "parameter" or "buffer".
        shape: Its shape; ``None`` if it has none yet.
        requires_grad: Whether it is trained; false for a buffer.
    """

    kind: str
    name: str
    shape: tuple[int, ...] | None
    dtype: str
    requires_grad: bool

    def __str__(self) -> str:
        shape = "of unknown shape" if self.shape is None else f"shape {list(self.shape)}"
        frozen = ", frozen" if self.kind == "parameter" and not self.requires_grad else ""
        dtype = self.dtype.removeprefix("torch.")
        return f"{self.kind} {self.name!r} ({shape}, {dtype}{frozen})"


def list_entries(module: nn.Module, *, with_buffers: bool) -> Iterator[Entry]:
    """Return the model's parameters and buffers in the order in which DDP copies them."""
    for name, tensor in module.named_parameters():
        yield Entry("parameter", name, _shape_of(tensor), str(tensor.dtype), tensor.requires_grad)
    if with_buffers:
        for name, buffer in module.named_buffers():
            # DDP copies a buffer whether or not it requires a gradient.
            yield Entry("buffer", name, _shape_of(buffer), str(buffer.dtype), requires_grad=False)


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a lazy module's, which DDP refuses with a good error
        return None


def _digest(value: object) -> int:
    """Return 63 bits; unlike those of `hash`, they are the same in every process."""
    raw = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big") >> 1


def check_before_ddp(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Check a model that is about to be wrapped; every rank of DDP's group calls it.

    `options` are the arguments of DistributedDataParallel, by name.

    Raises:
        MismatchError: On every rank of the group.
    """
    import torch.distributed as dist

    # Without init_sync, DDP's constructor waits for no other rank, so nothing here may either.
    if not dist.is_initialized() or options.get("init_sync", True) is False:
        return
    group, mesh = options.get("process_group"), options.get("device_mesh")
    if group is None and mesh is not None:
        if mesh.ndim != 1:  # DDP refuses it
            return
        group = mesh.get_group(mesh_dim=0)
    # Only then DDP never copies the buffers, and they may be the rank's own.
    are_own = (
        options.get("broadcast_buffers") is False and options.get("forward_sync_buffers") is None
    )
    if dist.get_world_size(group) > 1 and dist.get_rank(group) >= 0:
        apart = options.get("delay_all_reduce_named_params") or ()
        ignored = {*torch_hooks.ignored_by_ddp(module), *(name for name, _ in apart)}
        entries = list_entries(module, with_buffers=not are_own)
        require_equal(
            [entry for entry in entries if entry.name not in ignored],
            group,
            device=_device_for(group, module),
        )


def require_equal(
    entries: Sequence[Entry], group: ProcessGroup | None = None, *, device: torch.device
) -> None:
    """Compare what DDP would copy over the ranks of a group; all of them call this.

    One small all-gather if all ranks are equal; the rest is exchanged only if they are not.

    Raises:
        MismatchError: On every rank of the group.
    """
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)

    def gather(row: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(rows, row, group=group)
        return torch.stack(rows).cpu()

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    summary = gather(integers(_digest(entries), len(entries)))
    by_digest: defaultdict[int, list[int]] = defaultdict(list)
    for rank, digest in enumerate(summary[:, 0].tolist()):
        by_digest[digest].append(rank)
    if len(by_digest) == 1:
        return
    # The largest set of equal ranks is the reference; of two, the one with the lowest rank.
    equal = max(by_digest.values(), key=len)
    reference, rank = equal[0], dist.get_rank(group)
    world_rank = [
        rank if group is None else dist.get_global_rank(group, rank) for rank in range(size)
    ]
    length = int(summary[reference, 1])
    mine = [_digest(entry) for entry in entries]
    theirs = integers(*mine) if rank == reference else integers(*[_NOTHING] * length)
    if length:
        dist.broadcast(theirs, src=world_rank[reference], group=group)
    expected = [*theirs.tolist(), *[_NOTHING] * max(0, len(mine) - length)]
    mine += [_NOTHING] * (len(expected) - len(mine))
    differing = [
        place for place, pair in enumerate(zip(mine, expected, strict=True)) if pair[0] != pair[1]
    ]
    names = sorted(entry[:2] for entry in entries)
    details = gather(integers(differing[0] if differing else _NOTHING, _digest(names)))
    first = min(place for place in details[:, 0].tolist() if place != _NOTHING)
    here = entries[first] if first < len(entries) else None
    row = json.dumps(here and [here[0], clip(here.name, _NAME_CHARS), *here[2:]]).encode()
    rows = gather(torch.tensor(list(row.ljust(_ENTRY_BYTES)), dtype=torch.uint8, device=device))
    decoded = [json.loads(row.numpy().tobytes()) for row in rows]
    raise _mismatch(
        first,
        {world_rank[i]: entry and Entry(*entry) for i, entry in enumerate(decoded)},
        equal=[world_rank[i] for i in equal],
        is_order=len(set(details[:, 1].tolist())) == 1,
        # So the launcher blames a rank that differs, though all ranks raise.
        origin="mismatch" if rank in equal else "own",
    )


def _device_for(group: ProcessGroup | None, module: nn.Module) -> torch.device:
    """Return where a small tensor has to be for a collective of this group: where DDP's are."""
    import torch
    import torch.distributed as dist

    # A CPU backend needs no copy to a device; a group with NCCL only has no CPU backend.
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    # A script may give the model its GPU without making it current. On the current one, which is the
    # first for all ranks then, NCCL would find one GPU twice.
    tensors = itertools.chain(module.parameters(), module.buffers())
    own = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return next(own, None) or torch.device("cuda", torch.cuda.current_device())


def _mismatch(
    place: int,
    entries: Mapping[int, Entry | None],
    *,
    equal: Sequence[int],
    is_order: bool,
    origin: Origin,
) -> MismatchError:
    """Return the error.

    All are compared with the `equal` ranks; `is_order` says whether all ranks have the same names.
    """
    usual = entries[equal[0]]
    odd = [rank for rank in entries if rank not in equal]
    # Ranks may be equal here and differ later.
    differing = [rank for rank in odd if entries[rank] != usual] or odd
    other = entries[differing[0]]
    if usual is None or other is None or usual[:2] != other[:2]:
        if is_order:
            cause = (
                "they are probably made in an order that differs between the processes, as that of a "
                "set of texts does."
            )
            fix = (
                "make them in a fixed order on every rank: loop over sorted(names), not set(names)."
            )
        else:
            cause = (
                "the model is probably built from something that differs between the ranks, or by a "
                "branch."
            )
            fix = "build the same model on every rank; compare its configuration and data there."
    elif usual.requires_grad != other.requires_grad:
        cause = "a layer is probably frozen on some ranks only."
        fix = "set requires_grad by the same condition on every rank, before the model is wrapped."
    elif usual.shape != other.shape:
        cause = "its size probably comes from something that differs: a vocabulary, a number of classes."
        fix = "compute that size once and give it to every rank: ddpsafe.current().broadcast(size)."
    else:
        cause = "the model was probably converted to another dtype on some ranks only."
        fix = "convert it on every rank, before it is wrapped."
    name = (usual or other or Entry("", "", None, "", requires_grad=False)).name
    has = "has" if len(differing) == 1 else "have"
    return MismatchError(
        Explanation(
            f"{ranks_text(differing)} (world_size {len(entries)}) {has} another model than "
            f"{ranks_text(equal[:_SHOWN_RANKS])}: the first difference is at position {place}, "
            f"{other or 'nothing'} instead of {usual or 'nothing'}.",
            cause=f"DDP would copy by position, and {cause}",
            fix=fix,
            details=[
                f"rank {rank}: position {place} is {entry or 'past the end of its model'}"
                for rank, entry in list(entries.items())[:_SHOWN_RANKS]
            ],
        ),
        ranks=tuple(odd),
        name=name,
        origin=origin,
    )
