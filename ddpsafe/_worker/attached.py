"""`process_group`, `setup`, `cleanup`: in a rank that something else started, or in none."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from ddpsafe._clock import Deadline
from ddpsafe._errors import ConfigError, explain
from ddpsafe._worker import context as contexts
from ddpsafe._worker import environment, meeting, session, torch_hooks
from ddpsafe._worker import process_group as groups
from ddpsafe._worker.context import RankContext
from ddpsafe._worker.control import Control
from ddpsafe._worker.endpoint import find_endpoint
from ddpsafe._world import World, find_world, loopback_interfaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch.distributed import Store
    from typing_extensions import Unpack

    from ddpsafe._config import AttachedFields, LaunchConfig


def is_rank(env: Mapping[str, str]) -> bool:
    """Tell whether some launcher, ours included, has started this process as a rank."""
    return session.find_spec() is not None or find_world(env) is not None


@contextlib.contextmanager
def process_group(
    backend: str = "auto",
    *,
    config: LaunchConfig | None = None,
    **fields: Unpack[AttachedFields],
) -> Iterator[RankContext]:
    """Be a member of the process group while the context is open.

    Works under torchrun, srun, mpirun, in a rank of `launch` or `spawn`, in a process whose
    ``RANK`` and ``WORLD_SIZE`` somebody set, and alone, where it needs no port. A group that
    exists already is adopted and left alone.

    Args:
        backend: Backend for torch; ``auto`` takes nccl where every rank has a GPU, else gloo.
        config: Timeouts, seed and variables; without one, from environment and file.
        **fields: Fields of `LaunchConfig` that win over it.

    Yields:
        This rank's context.

    Raises:
        ConfigError: The launcher's variables are incomplete or contradict each other, or the
            store belongs to another job.
        PreflightError: The port is taken.
        RendezvousTimeoutError: Ranks did not come within ``timeouts.rendezvous``.
    """
    member, opened = _enter(None, None, backend, config, fields)
    try:
        yield member
    except BaseException:
        # No barrier and no destroy on a failing path: the peers would wait for each other.
        _forget(member)
        raise
    _close(member, opened=opened)


_opened: RankContext | None = None
_handled_at_setup: BaseException | None = None


def setup(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    *,
    config: LaunchConfig | None = None,
    **fields: Unpack[AttachedFields],
) -> RankContext:
    """Join the process group: the hand-written ``setup(rank, world_size)``, made safe.

    Args:
        rank: This rank; by default what the launcher says.
        world_size: Number of ranks; by default what the launcher says.
        backend: Backend for torch; chosen as in `process_group` by default.
        config: As in `process_group`.
        **fields: As in `process_group`.

    Returns:
        This rank's context.

    Raises:
        ConfigError: As in `process_group`; also if only one of `rank` and `world_size` is given.
        PreflightError: As in `process_group`.
        RendezvousTimeoutError: As in `process_group`.
    """
    global _opened, _handled_at_setup
    member, opened = _enter(rank, world_size, backend or "auto", config, fields)
    if opened:
        _opened, _handled_at_setup = member, sys.exc_info()[1]
    return member


def cleanup() -> None:
    """Leave the process group that `setup` joined; harmless when called twice or without it.

    While an exception is on its way, as in ``finally: cleanup()``, it waits for nobody.
    """
    global _opened
    member, _opened = _opened, None
    if member is None:
        return
    exc = sys.exc_info()[1]
    if exc is None or exc is _handled_at_setup:
        _close(member, opened=True)
    else:
        _abandon(member)


def _abandon(member: RankContext) -> None:
    """Leave on a failing path; ranks that are at the end already need not wait for this one."""
    if member.control is not None:
        with contextlib.suppress(RuntimeError):  # the store went with rank 0
            member.control.arrive("leave")
    _forget(member)


def _enter(
    rank: int | None,
    world_size: int | None,
    backend: str,
    config: LaunchConfig | None,
    fields: AttachedFields,
) -> tuple[RankContext, bool]:
    """Return the context, and whether the group is ours to close."""
    import torch.distributed as dist

    current = contexts.find_current()
    if dist.is_initialized():
        return current or _adopt(), False
    if current is not None and session.find_spec() is not None:
        return _join_launch(current, backend), True
    from ddpsafe._config import LaunchConfig

    resolved = LaunchConfig.resolve(config, **fields)
    if backend != "auto":
        resolved = LaunchConfig.resolve(resolved, backend=backend)
    return _join_job(_place(rank, world_size), resolved), True


def current() -> RankContext:
    """Return this rank's context, anywhere in the rank.

    Outside of one, it describes the process as the launcher's variables do, alone by default.
    """
    import torch.distributed as dist

    member = contexts.find_current()
    if member is not None:
        return member
    if dist.is_available() and dist.is_initialized():
        return _adopt()
    place = find_world(os.environ) or World.alone()
    return _describe(place, _device(place, "gloo"), "none", None)


def _place(rank: int | None, world_size: int | None) -> World:
    if rank is None and world_size is None:
        return find_world(os.environ) or World.alone()
    if rank is None or world_size is None:
        what = f"setup(rank={rank}, world_size={world_size}) says only half of it."
        fix = "pass both, or neither to take them from the launcher."
        raise ConfigError(explain(what, cause="an argument was forgotten.", fix=fix))
    spoken = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    given = find_world({**_local_variables(os.environ), **spoken})
    assert given is not None  # noqa: S101 - RANK is set
    return given


def _local_variables(env: Mapping[str, str]) -> dict[str, str]:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return {name: env[name] for name in names if name in env}


def _adopt() -> RankContext:
    """Describe a group that somebody else has made (Accelerate, Fabric, the script itself)."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = find_world(os.environ)
    if place is None or (place.rank, place.world_size) != (rank, world_size):
        place = _place(rank, world_size)
    store = torch_hooks.default_store()
    control = None
    if store is not None and world_size > 1:
        private = dist.PrefixStore("ddpsafe/adopted", store)
        control = Control(private, rank=rank, world_size=world_size)
    return _remember(place, _device(place, dist.get_backend()), dist.get_backend(), control)


def _join_launch(current: RankContext, backend: str) -> RankContext:
    """Make the group of a rank that `spawn` started, at the launcher's store."""
    spec = session.find_spec()
    assert spec is not None  # noqa: S101 - checked by the caller
    chosen = _choose_backend(backend, current.world)
    session.open_group(spec, current.control, backend=chosen, device=current.device)
    return current


def _join_job(world: World, config: LaunchConfig) -> RankContext:
    from torch.distributed import HashStore

    os.environ.update(config.env)
    if world.local_world_size == world.world_size:
        for name, interface in loopback_interfaces().items():
            os.environ.setdefault(name, interface)
    deadline = Deadline.after(config.timeouts.rendezvous)
    backend = _choose_backend(config.backend, world)
    device = _device(world, backend)
    control = None
    store: Store = HashStore()
    if world.world_size > 1:
        endpoint = find_endpoint(world, os.environ)
        store, control = meeting.open_stores(endpoint, world, os.environ, deadline=deadline)
    groups.open_group(
        store,
        control,
        world=world,
        backend=backend,
        device=device,
        rendezvous=deadline,
        collective=config.timeouts.collective,
    )
    member = _remember(world, device, backend, control, config=config)
    if config.seed is not None:
        environment.seed_all(config.seed)
    return member


def _choose_backend(asked: str, world: World) -> str:
    import torch

    if asked != "auto":
        return asked
    return "nccl" if torch.cuda.device_count() >= world.local_world_size else "gloo"


def _device(world: World, backend: str) -> torch.device:
    import torch

    if "nccl" not in backend:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if world.local_rank >= gpus:
        what = f"{world} has local_rank {world.local_rank}, but this host shows {gpus} GPUs."
        cause = "more ranks than GPUs, a missing LOCAL_RANK, or CUDA_VISIBLE_DEVICES."
        fix = "start one rank per GPU and set LOCAL_RANK, or use backend='gloo'."
        raise ConfigError(explain(what, cause=cause, fix=fix))
    return environment.use_device(f"cuda:{world.local_rank}")


def _remember(
    world: World,
    device: torch.device,
    backend: str,
    control: Control | None,
    *,
    config: LaunchConfig | None = None,
) -> RankContext:
    member = _describe(world, device, backend, control, config=config)
    contexts.enter(member)
    return member


def _describe(
    world: World,
    device: torch.device,
    backend: str,
    control: Control | None,
    *,
    config: LaunchConfig | None = None,
) -> RankContext:
    from ddpsafe._config import Timeouts

    timeouts = config.timeouts if config is not None else Timeouts()
    return RankContext(
        world=world,
        device=device,
        backend=backend,
        attempt=1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        run_dir=config.run_dir if config is not None else None,
        barrier_timeout=timeouts.barrier,
        control=control,
    )


def _close(member: RankContext, *, opened: bool) -> None:
    if opened:
        deadline = Deadline.after(member.barrier_timeout)
        missing = groups.close_group(member.control, deadline=deadline)
        if missing:
            raise member.barrier_timeout_error("the end of the process group", missing, deadline)
        _forget(member)


def _forget(member: RankContext) -> None:
    if session.find_spec() is None and contexts.find_current() is member:
        contexts.enter(None)
