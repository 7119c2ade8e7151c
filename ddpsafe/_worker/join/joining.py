"""How a process becomes a rank: from a launcher's variables, ddpsafe's launch, or an existing group."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ddpsafe import _gpus
from ddpsafe._clock import Deadline
from ddpsafe._config.backend_names import require_backend
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.agreement import Message, RankGroup
from ddpsafe._job.control import Control
from ddpsafe._job.store_keys import SignedKeys
from ddpsafe._logging import name_rank
from ddpsafe._secrets import take_own_secrets
from ddpsafe._worker import environment, process_group, session, torch_hooks
from ddpsafe._worker.context import RankContext
from ddpsafe._worker.join import network
from ddpsafe._worker.join.store import open_stores
from ddpsafe._worker.join.store_endpoint import find_endpoint, job_secret
from ddpsafe._worker.rank import this_rank
from ddpsafe._worker.stop_agreement import Others, StopCalls, StopKeys, Stopping
from ddpsafe._worker.stop_signals import prepare_helpers, protect_torchs_helper
from ddpsafe._world import World, find_world, loopback_interfaces, require_int

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from ddpsafe._config import LaunchConfig
    from ddpsafe._job.store_keys import Keys


_ADOPTED: Final = "ddpsafe/adopted"


def place_of(rank: int | None, world_size: int | None) -> World:
    """Return this rank's place, from the arguments or from the launcher's variables.

    Raises:
        ConfigError: Only one of the two is given, or the place is impossible.
    """
    if rank is None and world_size is None:
        place = find_world(os.environ)
        if place is not None:
            return place
        # Slurm sets it in a batch script too, which is one process.
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if tasks != "1":
            what = f"this process is alone, though its Slurm job has {tasks} tasks (SLURM_NTASKS)."
            cause = "it runs in the batch script or in a shell of salloc, not in a step."
            fix = "start it with srun; or `unset SLURM_NTASKS` if you want a single process."
            text = Explanation(what, cause=cause, fix=fix)
            warnings.warn(str(text), RuntimeWarning, stacklevel=1)
        return World.alone()
    if rank is None or world_size is None:
        what = f"setup(rank={rank}, world_size={world_size}) has only one of the two."
        fix = "pass both, or neither to take them from the launcher."
        raise ConfigError(Explanation(what, cause="an argument is missing.", fix=fix))
    place = find_world(os.environ)
    if place is not None and (place.rank, place.world_size) == (rank, world_size):
        return place
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    place = find_world({**variables, "RANK": str(rank), "WORLD_SIZE": str(world_size)})
    assert place is not None  # noqa: S101 - RANK is set
    return place


def adopt_group() -> RankContext:
    """Return the context of a rank whose group other code has made (Accelerate, Fabric, the script)."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = find_world(os.environ)
    if place is None or (place.rank, place.world_size) != (rank, world_size):
        place = place_of(rank, world_size)
    store = torch_hooks.default_store()
    control = None
    if store is not None and world_size > 1:
        keys: Keys = dist.PrefixStore(_ADOPTED, store)
        take_own_secrets()
        secret = job_secret()
        if secret is not None:  # all adopted groups share a prefix: old messages may be replayed
            keys = SignedKeys(keys, secret, _ADOPTED)
        control = Control(keys, rank=rank, world_size=world_size)
    backend = dist.get_backend()
    return _remember(place, device_of_script(place), backend, control)


def join_launch(current: RankContext, backend: str) -> RankContext:
    """Make the group of a rank that `spawn` started, at the launcher's store.

    The backend ``auto`` is the one that was passed to the launch.
    """
    spec = this_rank.spec
    assert spec is not None  # noqa: S101 - checked by the caller
    deadline = session.rendezvous_deadline(spec)
    if backend == "auto":
        backend = spec.asked_backend
    chosen, device, _ = agree_on_devices(backend, current.world, current.control, deadline=deadline)
    session.open_group(spec, current.control, backend=chosen, device=device)
    this_rank.joined = member = replace(current, backend=chosen, device=device)
    this_rank.context = member
    return member


def join_job(world: World, config: LaunchConfig) -> RankContext:
    """Make the group of ranks that another launcher has started, or of a world of one."""
    try:
        return _join_job(world, config)
    except BaseException:
        # The next try, maybe at another address, would take these variables for the user's choice.
        environment.give_back()
        raise


def _join_job(world: World, config: LaunchConfig) -> RankContext:
    import torch
    from torch.distributed import HashStore

    environment.borrow(config.env)
    take_own_secrets()
    endpoint = find_endpoint(world, os.environ) if world.world_size > 1 else None
    # On loopback, gloo cannot be reached from another host.
    if endpoint is None or endpoint.is_on_this_host:
        network.prefer(loopback_interfaces())
    deadline = Deadline.after(config.timeouts.start)
    if config.backend != "auto":
        require_backend(config.backend)
    control = None
    store: Store = HashStore()
    if endpoint is not None:
        store, control, keys = open_stores(endpoint, world, os.environ, deadline=deadline)
        if world.nnodes > 1 and config.preflight == "full":
            likely = config.backend
            if likely == "auto":  # the ranks agree on the backend only after this examination
                likely = "nccl" if torch.cuda.device_count() else "gloo"
            network.require_connected_nodes(
                config, world, endpoint, keys, control, backend=likely, deadline=deadline
            )
            deadline = Deadline.after(config.timeouts.start)  # all nodes have joined by now
        if not endpoint.is_on_this_host:
            network.choose(config.rendezvous.interface, endpoint, deadline=deadline)
    backend, device, world = agree_on_devices(config.backend, world, control, deadline=deadline)
    if device.type == "cuda":
        network.prefer(_nccl_variables(config, world))
    if control is not None:
        # A host that joined later counts fewer restarts (pytorch #108158).
        control.raise_to("attempt", _own_attempt())
    process_group.open_group(
        store,
        control,
        world=world,
        backend=backend,
        device=device,
        rendezvous=deadline,
        collective=config.timeouts.collective,
    )
    attempt = _own_attempt() if control is None else control.number("attempt")
    member = replace(_remember(world, device, backend, control, config=config), attempt=attempt)
    name_rank(world, attempt)
    this_rank.context = member
    if config.seed is not None:
        environment.seed_run(config.seed)
    return member


def _nccl_variables(config: LaunchConfig, world: World) -> dict[str, str]:
    import torch

    folder = config.run_dir
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return _gpus.nccl_variables(
        os.environ,
        torch.__version__,
        debug_file=None if folder is None else f"{folder}/rank-{world.rank}.nccl",
        folder=None if folder is None else str(folder),
    )


def agree_on_devices(
    backend: str, world: World, control: Control | None, *, deadline: Deadline
) -> tuple[str, torch.device, World]:
    """Agree with all ranks on the backend and on each rank's GPU; make this rank's GPU the current one.

    The backend ``auto`` is nccl if the ranks have GPUs. Returns the backend, this rank's device, and its
    place with all ranks of its node.

    Raises:
        ConfigError: torch does not know the backend, or some rank has no GPU of its own.
        RendezvousTimeoutError: Some ranks did not join.
    """
    if backend != "auto":
        require_backend(backend)
    mine = _gpus.VisibleGpus.here(world, backend)
    if control is None:
        agreed = _gpus.assign([replace(mine, rank=0)])
        index = agreed.indexes[0] if agreed.indexes else None
        return agreed.backend, _use(index), world
    # If each rank decided alone, a host that has lost a GPU would join with another backend than
    # the others, and two ranks could choose the same GPU.
    group = RankGroup(control, control.next_use("gpus"), world, range(world.world_size))
    exchange = group.begin("the choice of devices")
    exchange.send(Message(facts=dataclasses.asdict(mine)))
    absence_error = partial(process_group.absence_error, world)
    answer = exchange.agree(_assign, absence_error, deadline)
    agreed = _gpus.Assignment(backend=answer["backend"], indexes=tuple(answer["indexes"]))
    device = _use(agreed.indexes[world.rank] if agreed.indexes else None)
    return agreed.backend, device, world.among(answer["hosts"], answer["node_ranks"])


def _assign(messages: dict[int, Message]) -> dict[str, Any]:
    """Decide on rank 0 for all ranks; see `_gpus.assign`."""
    facts = [messages[rank].facts for rank in sorted(messages)]
    ranks = [_gpus.VisibleGpus(**{**fact, "uuids": tuple(fact["uuids"])}) for fact in facts]
    return {
        **dataclasses.asdict(_gpus.assign(ranks)),
        "hosts": [rank.host for rank in ranks],
        "node_ranks": [rank.node_rank for rank in ranks],
    }


def _use(index: int | None) -> torch.device:
    return environment.use_device("cpu" if index is None else f"cuda:{index}")


def as_in_script(member: RankContext) -> RankContext:
    """Return the context of a rank of `spawn` with the backend and device that its script chose."""
    import torch
    import torch.distributed as dist

    spec = this_rank.spec
    if spec is None or spec.style == "launch" or member is this_rank.joined:
        return member
    device, backend = member.device, member.backend
    if dist.is_initialized():
        device, backend = device_of_script(member.world), dist.get_backend()
    elif device.type == "cuda" and torch.cuda.device_count() == 1:  # the index counts visible GPUs
        device = torch.device("cuda", 0)
    if (device, backend) != (member.device, member.backend):
        member = replace(member, device=device, backend=backend)
        this_rank.context = member
    return member


def device_of_script(world: World) -> torch.device:
    """Return the device of a rank whose script may have made a group; changes nothing."""
    import torch
    import torch.distributed as dist

    has_group = dist.is_available() and dist.is_initialized()
    gpus = torch.cuda.device_count()
    if not has_group or not gpus:
        return torch.device("cpu")
    backends = dict(part.partition(":")[::2] for part in dist.get_backend_config().split(","))
    if backends.get("cuda") != "nccl":
        return torch.device("cpu")
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]  # torch
    # Another device than 0 is the script's choice; 0 may only be the default.
    if chosen == 0 and world.local_rank < gpus:
        chosen = world.local_rank
    return torch.device("cuda", chosen)


def _remember(
    world: World,
    device: torch.device,
    backend: str,
    control: Control | None,
    *,
    config: LaunchConfig | None = None,
) -> RankContext:
    member = describe(world, device, backend, control, config=config)
    this_rank.context = member
    prepare_helpers()
    protect_torchs_helper()
    others = Others(StopCalls())
    if control is not None:
        others = StopKeys(
            control.store, rank=world.rank, world_size=world.world_size, calls=others.calls
        )
    this_rank.stopping = Stopping(others, limit=member.barrier_timeout)
    return member


def describe(
    world: World,
    device: torch.device,
    backend: str,
    control: Control | None,
    *,
    config: LaunchConfig | None = None,
) -> RankContext:
    """Return the context of a rank that ddpsafe did not launch."""
    from ddpsafe._config import Timeouts

    timeouts = config.timeouts if config is not None else Timeouts()
    return RankContext(
        world=world,
        device=device,
        backend=backend,
        attempt=_own_attempt(),
        run_dir=config.run_dir if config is not None else None,
        barrier_timeout=timeouts.barrier,
        control=control,
    )


def _own_attempt() -> int:
    """Return the attempt according to torchrun's agent on this host, counted from 1."""
    env = {"TORCHELASTIC_RESTART_COUNT": "0", **os.environ}
    return 1 + require_int(env, "TORCHELASTIC_RESTART_COUNT", because="TORCHELASTIC_RUN_ID")
