"""NCCL ranks simulated on the CPU; run by nccl_on_cpu/.

torch is made to report GPUs; messages of NCCL and recorder dumps are recorded from real runs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

NO_GPUS = "no GPUs found"
PATIENT = {"start": 30, "collective": 30, "barrier": 30}


class Properties:
    """A fake of torch's properties of a GPU."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


def show_gpus(*uuids: str) -> list[int]:
    """Make torch report GPUs with those UUIDs; return a list that receives the indexes in use."""
    import torch

    taken: list[int] = []
    torch.cuda.device_count = lambda: len(uuids)
    torch.cuda.get_device_properties = lambda index: Properties(uuids[index])  # type: ignore[assignment, return-value, misc]
    torch.cuda.set_device = lambda device: taken.append(torch.device(device).index)  # type: ignore[arg-type, misc]
    return taken


def refuse_to_make_a_group(*_: object, **__: object) -> None:
    """Fail as NCCL does without a GPU, before it ends the process as NCCL of torch 2.15 does."""
    raise ValueError(NO_GPUS)


def join_with_gpus(seen: dict[int, list[str]], backend: str = "auto") -> list[int]:
    """Join as a rank that sees its GPUs, up to the group itself; return the devices that it has set."""
    import torch.distributed as dist

    taken = show_gpus(*seen[int(os.environ["RANK"])])
    if any(seen.values()):
        dist.init_process_group = refuse_to_make_a_group
    try:
        with ddpsafe.process_group(backend, timeouts=PATIENT) as ctx:
            assert ctx.device.type == "cpu"
    except ValueError as error:
        if str(error) != NO_GPUS:
            raise
    except ddpsafe.RendezvousTimeoutError:
        # Rank 0 has failed to make the group by now, and its store ended with it.
        assert os.environ["RANK"] != "0"
    return taken


def say_what_is_initialised(rank: int, folder: Path) -> None:
    """With spawn, write ddpsafe's device, and whether CUDA is initialised."""
    import torch

    context = ddpsafe.current()
    text = f"{context.device} {torch.cuda.is_initialized()}"
    (folder / f"rank-{rank}").write_text(text)


def say_nccl_settings(rank: int, folder: Path) -> None:
    """Write the variables of NCCL and its watchdog."""
    names = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_FR_DUMP_TEMP_FILE", "NCCL_DEBUG_FILE")
    (folder / f"rank-{rank}").write_text(repr([os.environ.get(name) for name in names]))


class ExplodesWhenLoaded:
    """An argument whose unpickling needs the GPU; here it raises."""

    def __setstate__(self, _: object) -> None:
        """Raise in place of ``self.table = torch.zeros(…, device="cuda")``."""
        msg = "unpickled before the device was set"
        raise ArithmeticError(msg)

    def __getstate__(self) -> object:
        return 1


def do_nothing(*_: object) -> None:
    """Return at once."""


def interfaces_at_init(rank: int, folder: Path, world_size: int) -> None:
    """Begin to make a group as one node's script does; write the interfaces it would listen on."""
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
    """Make a subgroup among its members only, while the main group is bound to a device."""
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


def watchdog_words(
    rank: int, number: int, queued: int, completed: int, op: str = "ALLREDUCE"
) -> str:
    """Return the message of the watchdog of torch 2.6 to 2.13 for a timeout."""
    head = f"[rank{rank}]:[E1118 20:27:21.426415540 ProcessGroupNCCL.cpp:685] "
    return (
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
        f"OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=3000) ran for 3081 milliseconds before "
        "timing out.\n"
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work "
        f"sequence id: {number} PG status: last enqueued work: {queued}, last completed work: "
        f"{completed}\n"
    )


def thrown_words(rank: int, error: str) -> str:
    """Return the message of the watchdog when it ends the process."""
    said = (
        f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated "
        f"with exception: {error}"
    )
    return (
        f"[rank{rank}]:[E1118 20:27:21.48 ProcessGroupNCCL.cpp:2057] {said}\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  {said}\n"
    )


def nccl2_words(rank: int, reason: str, before: str = "") -> str:
    """Return the message of torch 2.15's other implementation of NCCL, from the texts in its library."""
    head = f"[rank{rank}]:[E1128 20:27:21.426415540 ProcessGroupNCCL.cpp:812] [TC][rank={rank}][name=0] "
    lines = [before, f"Aborting process on rank {rank} due to {reason}"]
    return "".join(f"{head}{line}\n" for line in lines if line)


TIMED_OUT = "timeout - timeout watchdog detected operation timeout"
"""Why its watchdog aborts a process in which a collective has timed out."""


def write_to_stderr(text: str) -> None:
    """Write to file descriptor 2 without Python's buffer, as C++ does."""
    os.write(2, text.encode())


def item() -> None:
    """Wait as ``loss.item()`` does for the GPU."""
    time.sleep(600)


def read_next_batch_from_dead_mount() -> None:
    """Hang in the input pipeline."""
    time.sleep(600)


Words = dict[int, str]


def act(rank: int, folder: Path, words: Words, then: str, raises: int | None = None) -> None:
    """Simulate a rank under NCCL: its watchdog, a thread, prints those messages, and may abort.

    A rank without messages reads the next batch from a mount that does not respond. As in a real job, no
    rank acts before all have started: else an attempt ends before the last one has printed anything.
    """
    attempt = ddpsafe.current().attempt
    (folder / f"started-{attempt}-{rank}").touch()
    while len(list(folder.glob(f"started-{attempt}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == raises:
        msg = "label 7 is out of range"
        raise ValueError(msg)
    if rank not in words:
        read_next_batch_from_dead_mount()

    def watchdog() -> None:
        time.sleep(0.05 * rank)
        write_to_stderr(words[rank])
        if then == "abort":
            ctypes.CDLL(None).abort()

    threading.Thread(target=watchdog, daemon=True).start()
    item()


def print_the_words(rank: int) -> float:
    """Print a watchdog's message, as a log viewer may, and continue."""
    write_to_stderr("failure detected by watchdog at work sequence id: 118\n")
    time.sleep(1.2)
    return float(rank)


def go_on_after(rank: int, folder: Path) -> None:
    """Handle NCCL's errors in the script: its watchdog prints, and training continues."""
    write_to_stderr(watchdog_words(rank, 118, 160, 117))
    time.sleep(1.2)
    (folder / f"rank-{rank}").write_text("went on")
