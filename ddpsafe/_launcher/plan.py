"""`LaunchConfig` to `LaunchPlan`: what was asked for, as it is on this machine."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe import _gpus
from ddpsafe._config.backends import require_backend
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._wire.spec import MARKER, RankTimeouts, make_launch_id
from ddpsafe._world import World, loopback_interfaces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._config import LaunchConfig
    from ddpsafe._wire.spec import CallStyle, LogFiles

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch on one node, every "auto" decided.

    Attributes:
        config: What was asked for.
        style: How the user's function is called.
        worlds: The ranks to start, by rank.
        backend: Backend for torch.
        devices: Each rank's device, by rank.
        child_start_method: See `RankSpec`.
        num_threads: Intra-op threads of each rank; ``None`` leaves the user's choice.
        console: Whose output the console shows.
        launch_id: Marks the processes of this launch.
        timeouts: The deadlines that ranks keep by themselves.
        daemon: Whether the ranks are daemonic processes, as ``mp.spawn(daemon=…)`` means it.
    """

    config: LaunchConfig
    style: CallStyle
    worlds: tuple[World, ...]
    backend: str
    devices: tuple[str, ...]
    child_start_method: str | None
    num_threads: int | None
    console: str
    launch_id: str
    timeouts: RankTimeouts
    daemon: bool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.worlds)


def make_plan(config: LaunchConfig, *, style: CallStyle, daemon: bool = False) -> LaunchPlan:
    """Decide every "auto" and refuse what this machine cannot do.

    Args:
        config: What was asked for.
        style: How the user's function is called.
        daemon: See `LaunchPlan`.

    Raises:
        ConfigError: More nodes than this launcher starts, a backend that torch does not
            know, or GPUs that are not there.
    """
    _require_one_node(config)
    gpus = _gpus.count_visible(config.env)
    nproc = _resolve_nproc(config, gpus)
    backend = _resolve_backend(config, gpus)
    if style == "launch":  # else the script makes its group, and names the backend
        _require_usable(backend, nproc, gpus, env=config.env)
    return LaunchPlan(
        config=config,
        style=style,
        worlds=tuple(_world(rank, nproc) for rank in range(nproc)),
        backend=backend,
        devices=tuple(_device(rank, nproc, backend, gpus, style) for rank in range(nproc)),
        child_start_method=_child_start_method(config, style),
        num_threads=_threads(nproc, config.env),
        console=_resolve_console(config, style),
        launch_id=make_launch_id(),
        timeouts=RankTimeouts(
            rendezvous=config.timeouts.rendezvous,
            collective=config.timeouts.collective,
            barrier=config.timeouts.barrier,
            chosen=frozenset(config.timeouts.model_fields_set),
        ),
        daemon=daemon,
    )


def rank_env(plan: LaunchPlan, world: World, master_port: int, logs: LogFiles) -> dict[str, str]:
    """Return the variables one rank gets on top of the caller's.

    Under ``spawn`` a variable that the caller has set stays: ``RANK`` may be the node's rank
    in scripts that compute their own from it.
    """
    given = {
        **world.as_env(),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(master_port),
        **loopback_interfaces(),
    }
    if plan.num_threads is not None:
        given["OMP_NUM_THREADS"] = str(plan.num_threads)
    kept = set(loopback_interfaces())
    if plan.style == "spawn":
        kept |= set(given)
    ours = {name: value for name, value in given.items() if name not in kept & set(os.environ)}
    given = {**ours, **plan.config.env, MARKER: plan.launch_id}
    return given | _nccl_variables(plan, world, logs, {**os.environ, **given})


def _nccl_variables(
    plan: LaunchPlan, world: World, logs: LogFiles, given: Mapping[str, str]
) -> dict[str, str]:
    if not _gpus.uses_gpus(plan.backend) and plan.devices[world.rank] == "cpu":
        return {}
    import torch

    found = _gpus.nccl_variables(
        given, torch.__version__, debug_file=logs.nccl, folder=str(Path(logs.nccl).parent)
    )
    if _gpus.are_shared():
        found.setdefault("NCCL_HOSTID", given.get("NCCL_HOSTID", f"ddpsafe-test-{world.rank}"))
    return found


def _world(rank: int, nproc: int) -> World:
    return World(
        rank=rank,
        world_size=nproc,
        local_rank=rank,
        local_world_size=nproc,
        node_rank=0,
        nnodes=1,
        started_by="ddpsafe",
    )


def _require_one_node(config: LaunchConfig) -> None:
    if config.nnodes == 1:
        return
    what = f"nnodes={config.nnodes}: launch() itself starts the ranks of one node."
    fix = (
        "start the same script on every node with srun, or with torchrun "
        f"--nnodes={config.nnodes} --nproc-per-node=… --rdzv-backend=c10d --rdzv-endpoint=…; "
        "launch() then runs the function in each rank that they start."
    )
    cause = "several nodes need a launcher on each of them."
    raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _resolve_nproc(config: LaunchConfig, gpus: int) -> int:
    asked = config.nproc_per_node
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return _cores()
    if asked not in ("auto", "gpu"):
        return int(asked)
    if gpus == 0:
        _refuse_gpu('nproc_per_node="gpu"', 'nproc_per_node="cpu" (and backend="gloo")')
    if lost := _gpus.find_lost():
        what = f"nproc_per_node={asked!r} starts {gpus} ranks: torch sees {gpus} of {gpus + lost} GPUs."
        cause = "a GPU has fallen off the bus, or another process has it for itself."
        fix = (
            f"check nvidia-smi and dmesg; nproc_per_node={gpus + lost} refuses to start with fewer."
        )
        text = str(Explanation(what, cause=cause, fix=fix))
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return gpus


def _resolve_backend(config: LaunchConfig, gpus: int) -> str:
    if config.backend != "auto":
        return config.backend
    return "nccl" if gpus and config.nproc_per_node != "cpu" else "gloo"


def _require_usable(backend: str, nproc: int, gpus: int, *, env: dict[str, str]) -> None:
    require_backend(backend)
    if "nccl" not in backend or (gpus and _gpus.are_shared()):
        return
    if gpus == 0:
        _refuse_gpu("backend nccl", 'backend="gloo"')
    if nproc > gpus:
        visible = env.get(_gpus.VISIBLE, os.environ.get(_gpus.VISIBLE))
        what = f"{nproc} ranks with nccl need {nproc} GPUs, but this machine shows {gpus}."
        cause = "nccl refuses two ranks on one GPU"
        if _gpus.is_split(visible):
            cause += ", and CUDA shows a process one MIG instance only"
        cause += "." if visible is None else f"; {_gpus.VISIBLE}={visible!r} hides others."
        fix = f'nproc_per_node={gpus}, or backend="gloo" to train on the CPU.'
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _refuse_gpu(asked: str, instead: str) -> None:
    import torch

    what = f"{asked} needs a GPU, but torch sees none."
    cause = "this machine has no GPU, its driver is not loaded, or CUDA_VISIBLE_DEVICES hides it."
    if torch.version.cuda is None:
        cause = f"torch {torch.__version__} is built without CUDA."
    raise ConfigError(Explanation(what, cause=cause, fix=f"write {instead}, or check nvidia-smi."))


def _device(rank: int, nproc: int, backend: str, gpus: int, style: CallStyle) -> str:
    """Name a rank's GPU; under ``spawn`` and ``run`` the one that it has unless the script takes another."""
    if gpus and (_gpus.are_shared() or (style == "launch" and "nccl" not in backend)):
        rank %= gpus
    if style != "launch":
        return f"cuda:{rank}" if nproc <= gpus or _gpus.are_shared() else "cpu"
    return f"cuda:{rank}" if "nccl" in backend or ("cuda" in backend and gpus) else "cpu"


def _child_start_method(config: LaunchConfig, style: CallStyle) -> str | None:
    """Return the start method for the processes that ranks start, such as DataLoader workers.

    Python makes a spawned process start its own children by "spawn", too. Ranks of torchrun are
    programs of their own, which start them as the script says or as Python does by default: by
    "fork" up to Python 3.13. Scripts without a main guard, with a lambda as collate_fn or with a
    dataset of a notebook work only so, and short epochs are 45 times as fast. Scripts for
    `torch.multiprocessing.spawn` know "spawn" and may have CUDA tensors in their workers.
    """
    if style == "spawn":
        return config.start_method
    return multiprocessing.get_start_method(allow_none=True)


def _threads(nproc: int, env: dict[str, str]) -> int | None:
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env:
        return None
    return max(1, _cores() // nproc)


def _resolve_console(config: LaunchConfig, style: CallStyle) -> str:
    if config.console != "auto":
        return config.console
    return "rank-zero" if style == "launch" else "all"
