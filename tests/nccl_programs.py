"""What ranks do under NCCL, acted out on the CPU; run by nccl_on_cpu/.

torch is told that there are GPUs; NCCL's own texts and recorder dumps are recorded ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

PATIENT = {"rendezvous": 30, "collective": 30, "barrier": 30}


class Properties:
    """What CUDA tells of a GPU."""

    def __init__(self, uuid: str) -> None:
        """Keep the UUID."""
        self.uuid = uuid


def show_gpus(*uuids: str) -> list[int]:
    """Let torch see GPUs of those UUIDs; return where the indexes of those taken will be listed."""
    import torch

    taken: list[int] = []
    torch.cuda.device_count = lambda: len(uuids)
    torch.cuda.get_device_properties = lambda index: Properties(uuids[index])  # type: ignore[assignment, return-value, misc]
    torch.cuda.set_device = lambda device: taken.append(torch.device(device).index)  # type: ignore[arg-type, misc]
    return taken


def join_with_gpus(seen: dict[int, list[str]], backend: str = "auto") -> list[int]:
    """Join as a rank that sees the GPUs of its number; return the device that it took by then.

    This torch has no NCCL, so the group itself cannot be made.
    """
    taken = show_gpus(*seen[int(os.environ["RANK"])])
    try:
        with ddpsafe.process_group(backend, timeouts=PATIENT) as ctx:
            assert ctx.device.type == "cpu"
    except ValueError as error:
        if "accelerator support" not in str(error):
            raise
    return taken


def say_what_is_initialised(rank: int, folder: Path) -> None:
    """Say, in spawn style, which device ddpsafe names, and that CUDA is untouched."""
    import torch

    context = ddpsafe.current()
    text = f"{context.device} {torch.cuda.is_initialized()}"
    (folder / f"rank-{rank}").write_text(text)


def say_nccl_settings(rank: int, folder: Path) -> None:
    """Say what the variables of NCCL and of its watchdog are."""
    names = (
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "TORCH_FR_DUMP_TEMP_FILE",
        "NCCL_DEBUG_FILE",
    )
    (folder / f"rank-{rank}").write_text(repr([os.environ.get(name) for name in names]))


class ExplodesWhenLoaded:
    """An argument whose unpickling does work on the GPU, here: raises."""

    def __setstate__(self, _: object) -> None:
        """Stand for ``self.table = torch.zeros(…, device="cuda")``."""
        msg = "unpickled before the device was set"
        raise ArithmeticError(msg)

    def __getstate__(self) -> object:
        """Have a state, so that it is set."""
        return 1


def do_nothing(*_: object) -> None:
    """Return at once."""


def interfaces_at_init(rank: int, folder: Path, world_size: int) -> None:
    """Begin to make a group, as the script of one node of several does; say where it would listen."""
    import torch.distributed as dist

    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = [os.environ.get(name) for name in names]
    seen: list[Any] = []
    stock = dist.TCPStore

    def look(*_: object, **__: object) -> None:
        seen.extend(os.environ.get(name) for name in names)
        raise ConnectionError

    module = __import__("torch.distributed.rendezvous", fromlist=["TCPStore"])
    module.TCPStore = look
    try:
        dist.init_process_group(
            "gloo", init_method="tcp://10.0.0.1:29500", rank=rank, world_size=world_size
        )
    except ConnectionError:
        pass
    else:
        seen.extend(os.environ.get(name) for name in names)
        dist.destroy_process_group()
    finally:
        module.TCPStore = stock
    (folder / f"rank-{rank}").write_text(repr((before, seen)))


def make_a_group_of_members(ctx: ddpsafe.RankContext) -> list[Any]:
    """Make a group that only its members make, while the main group is bound to a device."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from ddpsafe._worker.torch_hooks import let_members_make_groups

    let_members_make_groups()
    device = torch.device("cuda", 0)
    main: Any = dist.group.WORLD
    seen: list[Any] = []
    stock = c10d._new_process_group_helper  # type: ignore[attr-defined]

    def look(*args: Any, **options: Any) -> Any:
        seen.append(str(main.bound_device_id))
        main.bound_device_id = None  # there is no GPU to connect
        return stock(*args, **options)

    c10d._new_process_group_helper = look  # type: ignore[attr-defined]
    main.bound_device_id = device
    if ctx.rank == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        seen += [str(main.bound_device_id), dist.get_world_size(group)]
    main.bound_device_id = None
    return seen
