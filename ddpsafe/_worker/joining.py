"""How a process becomes a rank: from a launcher's variables, a launch of ours, or a group."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpsafe._clock import Deadline
from ddpsafe._config.backends import require_backend
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._worker import (
    environment,
    interfaces,
    meeting,
    process_group,
    readiness,
    session,
    stopping,
    torch_hooks,
)
from ddpsafe._worker.context import RankContext
from ddpsafe._worker.control import Control
from ddpsafe._worker.current import enter
from ddpsafe._worker.endpoint import find_endpoint
from ddpsafe._worker.stop_board import StopBoard
from ddpsafe._worker.stop_calls import StopCalls
from ddpsafe._world import World, find_world, loopback_interfaces

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed import Store

    from ddpsafe._config import LaunchConfig


def place_of(rank: int | None, world_size: int | None) -> World:
    """Return this rank's place, from the arguments or from the launcher's variables.

    Raises:
        ConfigError: Only one of the two is given, or the place is impossible.
    """
    if rank is None and world_size is None:
        return find_world(os.environ) or _alone(os.environ)
    if rank is None or world_size is None:
        what = f"setup(rank={rank}, world_size={world_size}) says only half of it."
        fix = "pass both, or neither to take them from the launcher."
        raise ConfigError(Explanation(what, cause="an argument was forgotten.", fix=fix))
    told = find_world(os.environ)
    if told is not None and (told.rank, told.world_size) == (rank, world_size):
        return told
    spoken = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    given = find_world({**_local_variables(os.environ), **spoken})
    assert given is not None  # noqa: S101 - RANK is set
    return given


def _alone(env: Mapping[str, str]) -> World:
    """Return a world of one; say so where a Slurm job of several tasks forgot its srun."""
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks != "1":
        what = f"this process is alone, though its Slurm job has {tasks} tasks (SLURM_NTASKS)."
        cause = "it runs in the batch script or in a shell of salloc, not in a step."
        fix = "start it with srun; or `unset SLURM_NTASKS` if one process is what you want."
        text = Explanation(what, cause=cause, fix=fix)
        warnings.warn(str(text), RuntimeWarning, stacklevel=2)
    return World.alone()


def _local_variables(env: Mapping[str, str]) -> dict[str, str]:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return {name: env[name] for name in names if name in env}


def adopt_group() -> RankContext:
    """Describe a group that somebody else has made (Accelerate, Fabric, the script itself)."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = find_world(os.environ)
    if place is None or (place.rank, place.world_size) != (rank, world_size):
        place = place_of(rank, world_size)
    store = torch_hooks.default_store()
    control = None
    if store is not None and world_size > 1:
        private = dist.PrefixStore("ddpsafe/adopted", store)
        control = Control(private, rank=rank, world_size=world_size)
    return _remember(place, device_for(place, dist.get_backend()), dist.get_backend(), control)


def join_launch(current: RankContext, backend: str) -> RankContext:
    """Make the group of a rank that `spawn` started, at the launcher's store."""
    spec = session.find_spec()
    assert spec is not None  # noqa: S101 - checked by the caller
    chosen = choose_backend(backend, current.world)
    session.open_group(spec, current.control, backend=chosen, device=current.device)
    member = replace(current, backend=chosen)
    enter(member)
    return member


def join_job(world: World, config: LaunchConfig) -> RankContext:
    """Make the group of ranks that another launcher has started, or of a world of one."""
    try:
        return _join_job(world, config)
    except BaseException:
        # The next try, maybe with another address, would take them for the user's own choice.
        environment.give_back()
        raise


def _join_job(world: World, config: LaunchConfig) -> RankContext:
    from torch.distributed import HashStore

    environment.borrow(config.env)
    endpoint = find_endpoint(world, os.environ) if world.world_size > 1 else None
    if endpoint is None or endpoint.is_on_this_host:
        interfaces.prefer(loopback_interfaces())
    deadline = Deadline.after(config.timeouts.rendezvous)
    backend = choose_backend(config.backend, world)
    device = device_for(world, backend)
    control = None
    store: Store = HashStore()
    if endpoint is not None:
        store, control = meeting.open_stores(endpoint, world, os.environ, deadline=deadline)
        if world.nnodes > 1 and config.preflight == "full":
            readiness.require_connected_nodes(
                config, world, endpoint, store, control, backend=backend, deadline=deadline
            )
            deadline = Deadline.after(config.timeouts.rendezvous)  # all have come by now
        if not endpoint.is_on_this_host:
            interfaces.choose(config.rendezvous.interface, endpoint, deadline=deadline)
    process_group.open_group(
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


def choose_backend(asked: str, world: World) -> str:
    """Decide "auto": nccl where every rank of this host has a GPU.

    Raises:
        ConfigError: torch does not know the backend.
    """
    import torch

    if asked != "auto":
        require_backend(asked)
        return asked
    return "nccl" if torch.cuda.device_count() >= world.local_world_size else "gloo"


def device_for(world: World, backend: str) -> torch.device:
    """Make this rank's GPU the current device under nccl; else the CPU.

    Raises:
        ConfigError: There is no GPU for this local rank.
    """
    import torch

    if "nccl" not in backend:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if world.local_rank >= gpus:
        what = f"{world} has local_rank {world.local_rank}, but this host shows {gpus} GPUs."
        cause = "more ranks than GPUs, a missing LOCAL_RANK, or CUDA_VISIBLE_DEVICES."
        fix = "start one rank per GPU and set LOCAL_RANK, or use backend='gloo'."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    return environment.use_device(f"cuda:{world.local_rank}")


def _remember(
    world: World,
    device: torch.device,
    backend: str,
    control: Control | None,
    *,
    config: LaunchConfig | None = None,
) -> RankContext:
    member = describe(world, device, backend, control, config=config)
    enter(member)
    stopping.enter(_stopping_of(member))
    return member


def _stopping_of(member: RankContext) -> stopping.Stopping:
    calls = StopCalls()
    control = member.control
    if control is None:
        return stopping.Stopping(calls, stopping.Nobody(calls))
    board = StopBoard(control.store, rank=member.rank, world_size=member.world_size, calls=calls)
    return stopping.Stopping(calls, board, limit=member.barrier_timeout)


def describe(
    world: World,
    device: torch.device,
    backend: str,
    control: Control | None,
    *,
    config: LaunchConfig | None = None,
) -> RankContext:
    """Build the context of a rank that no launcher of ours has started."""
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
