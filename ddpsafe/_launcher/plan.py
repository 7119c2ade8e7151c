"""From `LaunchConfig` to `LaunchPlan`: check the call, and decide every "auto" for this machine."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe import _gpus
from ddpsafe._config.backend_names import require_backend
from ddpsafe._errors import STARTUP_KINDS, ConfigError, Explanation
from ddpsafe._host import is_directory_gone, usable_cores
from ddpsafe._launcher.processes.start import CallFile
from ddpsafe._stdlib_private import is_importing_main
from ddpsafe._wire import payload
from ddpsafe._wire.foreign_texts import is_full_disk
from ddpsafe._wire.payload import main_is_importable
from ddpsafe._wire.spec import MARKER, RankTimeouts, make_launch_id
from ddpsafe._world import World, loopback_interfaces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from ddpsafe._config import LaunchConfig
    from ddpsafe._errors import DDPSafeError
    from ddpsafe._wire.spec import CallStyle, LogFiles, StorePlace

    OnRetry = Callable[[DDPSafeError], Sequence[Any] | None]


def require_can_start_ranks() -> None:
    """Refuse a launch from a process that cannot start ranks.

    Raises:
        ConfigError: This process is daemonic, its start method is not one of Python's own, or its current
            directory, where the ranks start, is gone.
    """
    if is_directory_gone():
        what = "the current directory of this process has been removed: no rank can start in it."
        cause = "a clean-up, or a checkout or build that made the directory again."
        raise ConfigError(Explanation(what, cause=cause, fix="change to a directory that exists."))
    process = multiprocessing.current_process()
    if process.daemon:
        what = f"{process.name} is a daemonic process, which may not have children: it cannot start any ranks."
        cause = "it is a worker of multiprocessing.Pool, a DataLoader or Dask, or was started with daemon=True."
        fix = (
            "launch from the main process, start this one with daemon=False, or use "
            "concurrent.futures.ProcessPoolExecutor instead of the Pool; in a Dask worker set "
            "distributed.worker.daemon: False."
        )
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    method = multiprocessing.get_start_method(allow_none=True)
    if method not in (None, "fork", "spawn", "forkserver"):
        # A new process inherits the name of the method, and would fail with "cannot find context".
        what = f"the start method of {process.name} is {method!r}, which a new process does not know: it cannot start any ranks."
        cause = "it is a worker of joblib or loky, or a library has added a start method."
        fix = "call multiprocessing.set_start_method('spawn', force=True) before the launch."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def require_main_guard() -> None:
    """Refuse a launch that every rank would repeat while it imports the script.

    Raises:
        ConfigError: The call is at the top level of the main script, outside any ``if``, or this
            process is a rank that is importing its parent's main script.
    """
    if is_importing_main():
        raise _missing_guard("launch() was called while a rank was importing the script.")
    if not main_is_importable():
        return
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - inspect.stack reads all sources
    while frame is not None:
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back
    if frame is None:  # not called from the top level of the main script
        return
    path, line = frame.f_code.co_filename, frame.f_lineno
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return  # no source to check
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or line)]
    if around and not any(isinstance(node, ast.If) for node in around):
        raise _missing_guard(f"{path}:{line} launches at the top level of the script.")


def _missing_guard(what: str) -> ConfigError:
    cause = "every rank imports the script, and would launch again during the import."
    fix = 'put the call under  if __name__ == "__main__":  at the end of the script.'
    return ConfigError(Explanation(what, cause=cause, fix=fix))


class Calls:
    """The call that the ranks make, pickled before any process starts; a retry may change it.

    Attributes:
        command: The script and its arguments; by default those of this process.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_retry: OnRetry | None,
        *,
        style: CallStyle,
        command: Sequence[str] = (),
    ) -> None:
        main_file = getattr(sys.modules["__main__"], "__file__", None) or ""
        self.command = command or (main_file, *sys.argv[1:])
        self._fn, self._kwargs, self._on_retry = fn, kwargs, on_retry
        self._style: CallStyle = style
        self.current = self._pickled(args)

    def change(self, failure: DDPSafeError) -> bool:
        """Call `on_retry` and take over the arguments that it returns; return whether there are any."""
        args = None if self._on_retry is None else self._on_retry(failure)
        if args is not None:
            changed = self._pickled(args)
            self.current.close()
            self.current = changed
        return args is not None

    def close(self) -> None:
        """Remove the file that the ranks read the call from."""
        self.current.close()

    def _pickled(self, args: Sequence[Any]) -> CallFile:
        _require_call(self._fn, args)
        try:
            # Scripts for mp.spawn may write to a tensor in a rank and read it in the caller.
            parts = (self._fn, tuple(args), dict(self._kwargs))
            call = CallFile(payload.dumps_call(parts, shares_tensors=self._style == "spawn"))
        except Exception as exc:
            name = getattr(self._fn, "__qualname__", repr(self._fn))
            candidates = ((args, "args"), (self._kwargs, "kwargs"), (self._fn, name))
            culprits = (payload.find_unpicklable(part, path) for part, path in candidates)
            path, why = next(filter(None, culprits), (name, exc))
            what = f"{path} cannot be sent to another process: {why}"
            cause = "open files, locks, sockets, generators and GPU tensors belong to one process."
            fix = "pass what it is made from (a path, a seed) and create it inside the function."
            if is_full_disk(str(exc)):  # tensors of `spawn` are shared, as with mp.spawn
                what = f"the tensors in args cannot be put into shared memory (/dev/shm): {exc}"
                cause = "it has less room than they need; Docker gives a container 64 MB."
                fix = (
                    "pass a path and load them in the rank, use launch(), which copies them, or give the "
                    "container more:  docker run --shm-size=8g …"
                )
            raise ConfigError(Explanation(what, cause=cause, fix=fix)) from exc
        _require_fitting(self._fn, args, self._kwargs, self._style)
        return call


def _require_call(fn: object, args: object) -> None:
    if not callable(fn):
        what = f"{fn!r} is not callable."
        cause = "the function was called instead of being passed."
        raise ConfigError(Explanation(what, cause=cause, fix="write launch(train, args=(…,))."))
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        what = f"args={args!r} is not a tuple of the function's arguments."
        cause = "a single argument was passed without a tuple around it."
        raise ConfigError(Explanation(what, cause=cause, fix="write args=(value,) with a comma."))


def _require_fitting(
    fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], style: CallStyle
) -> None:
    """Refuse arguments that do not fit the function; the context or the rank is the first of them."""
    name = getattr(fn, "__qualname__", repr(fn))
    passed, taken = ("context", "rank") if style == "launch" else ("rank", "context")
    other = "spawn" if style == "launch" else "launch"
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        what = f"{name} is an async function or a generator."
        cause = "calling it only creates an object; its body would not run."
        fix = "pass a plain function that runs this one with asyncio.run(…) or a loop."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as exc:
        what = f"{name}{signature} cannot be called with the {passed} and {len(args)} arguments: {exc}."
        cause = f"{style} passes the {passed} first, then args."
        fix = f"add a first parameter for the {passed}, check args=…, or use ddpsafe.{other}."
        raise ConfigError(Explanation(what, cause=cause, fix=fix)) from None
    # A context passed as the rank would not fail: `if rank == 0:` is false on every rank, so that
    # nothing would be saved.
    first_parameter = next(iter(signature.parameters.values()), None)
    if first_parameter is not None and _takes_the_other(first_parameter, style):
        what = f"{name}{signature} takes a {taken} first, but {style} passes the {passed}."
        cause = f"the function was written for {'mp.spawn' if style == 'launch' else 'launch'}."
        fix = f"call ddpsafe.{other}, or take the {passed} first"
        fix += ": def fn(ctx, …), with ctx.rank inside." if style == "launch" else "."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _takes_the_other(first: inspect.Parameter, style: CallStyle) -> bool:
    """Return whether a function's first parameter is a rank where `style` passes a context, or vice versa.

    Its annotation decides, or its name if it has none.
    """
    names, annotations = (
        (("rank", "local_rank"), ("int",)) if style == "launch" else (("ctx",), ("RankContext",))
    )
    if first.annotation is inspect.Parameter.empty:
        return first.name in names
    annotation = getattr(first.annotation, "__name__", first.annotation)
    return str(annotation).rpartition(".")[2] in annotations


LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPlace:
    """The store and addresses for the ranks of several nodes in one round.

    Attributes:
        master_port: A port that node 0's launcher reserves for code that opens MASTER_PORT itself.
        interfaces: Variables that keep the ranks' libraries on one interface of this node, if any.
    """

    store: StorePlace
    master_port: int
    interfaces: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch on one node, with every "auto" decided.

    Attributes:
        worlds: The ranks of this node to start, by local rank.
        backend: The backend, as torch spells it.
        devices: Each rank's device, by local rank.
        child_start_method: See `RankSpec`.
        num_threads: Intra-op threads of each rank; ``None`` keeps the user's choice.
        daemon: Whether the ranks are daemonic processes, as in ``mp.spawn(daemon=…)``.
        place: The store and addresses, if the ranks are on several nodes.
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
    place: NodesPlace | None = None

    @property
    def nproc(self) -> int:
        """Number of ranks of this node."""
        return len(self.worlds)


def make_plan(config: LaunchConfig, *, style: CallStyle, daemon: bool = False) -> LaunchPlan:
    """Decide every "auto" and refuse what this machine cannot do.

    Raises:
        ConfigError: torch does not know the backend, or the GPUs do not exist.
    """
    gpus = _gpus.count_visible(config.env)
    nproc = _resolve_nproc(config, gpus)
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if gpus and config.nproc_per_node != "cpu" else "gloo"
    if style == "launch":  # else the script creates its process group, and chooses the backend
        _require_usable(backend, nproc, gpus, env=config.env)
    console = config.console
    if console == "auto":
        console = "rank-zero" if style == "launch" else "all"
    num_threads = None
    if "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in config.env:
        num_threads = max(1, usable_cores() // nproc)
    # In a spawned process Python starts children by "spawn" as well. Ranks of torchrun are programs of
    # their own: they start DataLoader workers as the script says, or by Python's default, which is
    # "fork" up to Python 3.13. Scripts without a main guard, with a lambda as collate_fn or with a
    # notebook's dataset work only that way, and short epochs are 45 times as fast. So `launch` and
    # `run` do the same. Scripts for `torch.multiprocessing.spawn` are written for "spawn", and may
    # have CUDA tensors in their workers.
    child_start_method = multiprocessing.get_start_method(allow_none=True)
    if style == "spawn":
        child_start_method = config.start_method
    return LaunchPlan(
        config=config,
        style=style,
        worlds=tuple(
            World(
                rank=rank,
                world_size=nproc,
                local_rank=rank,
                local_world_size=nproc,
                node_rank=0,
                nnodes=1,
                started_by="ddpsafe",
            )
            for rank in range(nproc)
        ),
        backend=backend,
        devices=tuple(_device(rank, nproc, backend, gpus, style) for rank in range(nproc)),
        child_start_method=child_start_method,
        num_threads=num_threads,
        console=console,
        launch_id=make_launch_id(),
        timeouts=RankTimeouts(
            start=config.timeouts.start,
            collective=_beyond_attempt(config.timeouts.collective, config.timeouts.attempt),
            barrier=_beyond_attempt(config.timeouts.barrier, config.timeouts.attempt),
            node_loss=config.timeouts.node_loss,
            chosen=frozenset(config.timeouts.model_fields_set),
        ),
        daemon=daemon,
    )


def _beyond_attempt(limit: timedelta, attempt: timedelta | None) -> timedelta:
    """Return a rank's own limit, extended if it would not expire before `timeouts.attempt` does."""
    # Else a wait that began with the attempt would expire together with it, and which of the two is
    # reported would be chance.
    return limit if attempt is None or limit < attempt else limit + timedelta(minutes=1)


def rank_env(
    plan: LaunchPlan, world: World, master_port: int, logs: LogFiles, *, attempt: int = 1
) -> dict[str, str]:
    """Return the variables that one rank gets in addition to the caller's."""
    interfaces = loopback_interfaces() if plan.place is None else plan.place.interfaces
    variables = {
        **world.as_env(),
        "MASTER_ADDR": LOOPBACK if plan.place is None else plan.place.store.host,
        "MASTER_PORT": str(master_port if plan.place is None else plan.place.master_port),
        **interfaces,
    }
    if plan.num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(plan.num_threads)
    if plan.style == "run" and "backend" in plan.config.model_fields_set:
        # For a launch() in the script, and in processes that it starts.
        variables["DDPSAFE_BACKEND"] = plan.config.backend
    if plan.style == "run":
        variables |= _torchruns_variables(plan, world, logs, attempt)
    kept = set(interfaces)
    if plan.style == "spawn":
        # A variable that the caller has set stays: RANK may be the node's rank in scripts that compute
        # the rank from it.
        kept |= set(variables)
    ours = {name: value for name, value in variables.items() if name not in kept & set(os.environ)}
    variables = {**ours, **plan.config.env, MARKER: plan.launch_id}
    return variables | _nccl_variables(plan, world, logs, {**os.environ, **variables})


def _torchruns_variables(
    plan: LaunchPlan, world: World, logs: LogFiles, attempt: int
) -> dict[str, str]:
    """Return what torchrun sets beyond the variables that every launcher sets."""
    # Libraries such as Lightning recognize a rank of torchrun by them. TORCHELASTIC_USE_AGENT_STORE
    # is not among them: there is no agent with a store at MASTER_PORT.
    return {
        "GROUP_RANK": str(world.node_rank),
        "GROUP_WORLD_SIZE": str(world.nnodes),
        "ROLE_NAME": os.environ.get("ROLE_NAME", "default"),
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.world_size),
        # All nodes have to agree on it.
        "TORCHELASTIC_RUN_ID": plan.config.rendezvous.id
        or (plan.launch_id if world.nnodes == 1 else "none"),
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        # By default, only what fails before the script begins is tried again.
        "TORCHELASTIC_MAX_RESTARTS": str(
            plan.config.retry.attempts - 1 if plan.config.retry.on - STARTUP_KINDS else 0
        ),
        "TORCHELASTIC_ERROR_FILE": f"{logs.stderr}.json",
    }


def _nccl_variables(
    plan: LaunchPlan, world: World, logs: LogFiles, given: Mapping[str, str]
) -> dict[str, str]:
    if not _gpus.uses_gpus(plan.backend) and plan.devices[world.local_rank] == "cpu":
        return {}
    import torch

    variables = _gpus.nccl_variables(
        given, torch.__version__, debug_file=logs.nccl, folder=str(Path(logs.nccl).parent)
    )
    if _gpus.are_shared():  # NCCL allows two ranks on one GPU only on different "hosts"
        variables.setdefault("NCCL_HOSTID", given.get("NCCL_HOSTID", f"ddpsafe-test-{world.rank}"))
    return variables


def _resolve_nproc(config: LaunchConfig, gpus: int) -> int:
    setting = config.nproc_per_node
    if setting == "cpu" or (setting == "auto" and gpus == 0):
        return usable_cores()
    if setting not in ("auto", "gpu"):
        return int(setting)
    if gpus == 0:
        _refuse_gpu('nproc_per_node="gpu"', 'nproc_per_node="cpu" (and backend="gloo")')
    if lost := _gpus.find_lost():
        what = f"nproc_per_node={setting!r} starts {gpus} ranks: torch sees {gpus} of {gpus + lost} GPUs."
        cause = "a GPU has fallen off the bus, or another process uses it in exclusive mode."
        fix = (
            f"check nvidia-smi and dmesg; to fail instead of starting with {gpus}, set "
            f"nproc_per_node={gpus + lost}."
        )
        text = str(Explanation(what, cause=cause, fix=fix))
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return gpus


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
            cause += ", and CUDA shows a process only one MIG instance"
        cause += "." if visible is None else f"; {_gpus.VISIBLE}={visible!r} hides others."
        fix = f'set nproc_per_node={gpus}, or backend="gloo" to train on the CPU.'
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _refuse_gpu(setting: str, instead: str) -> None:
    import torch

    what = f"{setting} needs a GPU, but torch sees none."
    cause = "this machine has no GPU, its driver is not loaded, or CUDA_VISIBLE_DEVICES hides it."
    if torch.version.cuda is None:
        cause = f"torch {torch.__version__} is built without CUDA."
    raise ConfigError(Explanation(what, cause=cause, fix=f"write {instead}, or check nvidia-smi."))


def _device(rank: int, nproc: int, backend: str, gpus: int, style: CallStyle) -> str:
    """Return a rank's device; under ``spawn`` and ``run`` the GPU it has unless the script picks another."""
    if gpus and (_gpus.are_shared() or (style == "launch" and "nccl" not in backend)):
        rank %= gpus
    if style != "launch":
        return f"cuda:{rank}" if nproc <= gpus or _gpus.are_shared() else "cpu"
    return f"cuda:{rank}" if "nccl" in backend or ("cuda" in backend and gpus) else "cpu"
