"""`spawn` replaces ``torch.multiprocessing.spawn``, and scripts run unchanged, with torch's errors and shared tensors."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import machine
import psutil
import pytest
import scripts
import spawn_programs as programs
import torch
import torch.multiprocessing as mp

import ddpsafe
from ddpsafe import spawn
from ddpsafe._launcher.handle import SpawnHandle

METHOD: Final[dict[str, Any]] = {"start_method": "forkserver"}
FAST: Final[dict[str, Any]] = {"nprocs": 2, **METHOD}
SUM: Final = 3.0
"""The sum that ranks 0 and 1 compute if they are in one group."""


@pytest.fixture
def busy_port() -> Iterator[int]:
    """Return a port on which another program listens, such as another user's job."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def notes(folder: Path) -> dict[int, list[Any]]:
    """Return the notes that the ranks have written, by rank."""
    return {
        int(path.name.removeprefix("rank-")): [
            ast.literal_eval(line) for line in path.read_text().splitlines()
        ]
        for path in sorted(folder.glob("rank-*"))
    }


# The call.


def test_the_backend_of_the_call_is_the_default_of_setup(tmp_path: Path) -> None:
    """It applies if the script names no backend itself."""
    spawn(programs.note_backends, (tmp_path,), 1, backend="cpu:gloo", **METHOD)
    assert notes(tmp_path) == {0: [("cpu:gloo", "gloo", "gloo")]}


def test_the_signature_begins_as_torchs_does() -> None:
    """Names, order and defaults are the same; ddpsafe's own parameters are keyword-only."""
    import torch.multiprocessing as mp

    torchs = inspect.signature(mp.spawn).parameters.values()
    ours = list(inspect.signature(spawn).parameters.values())
    positional = [each for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [(each.name, each.default) for each in positional] == [
        (each.name, each.default) for each in torchs
    ]


@pytest.mark.full(but=["as in the tutorial"])
@pytest.mark.parametrize(
    "call",
    [
        lambda fn, args: ddpsafe.spawn(fn, args=args, nprocs=2, join=True, **METHOD),
        lambda fn, args: ddpsafe.spawn(fn, nprocs=2, args=args, **METHOD),
        lambda fn, args: ddpsafe.spawn(fn, args, 2, True, False, "forkserver"),  # noqa: FBT003
        lambda fn, args: spawn(fn, list(args), 2, **METHOD),
        lambda fn, args: spawn(args=args, fn=fn, nprocs=2, daemon=False, **METHOD),
    ],
    ids=["as in the tutorial", "other order", "by position", "from import", "by keyword"],
)
def test_every_spelling_of_the_call_runs_the_script(
    call: Callable[..., object], tmp_path: Path, busy_port: int
) -> None:
    """Its own setup, cleanup and port stay, although another program holds the port."""
    assert call(programs.train, (2, busy_port, tmp_path)) is None
    assert notes(tmp_path) == {0: [SUM], 1: [SUM]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("start_method", "demos"),
    [
        ("", ["sum"]),
        (", start_method='forkserver'", ["sum", "basic"]),
        pytest.param("", ["sum", "basic"], marks=pytest.mark.soak),
    ],
    ids=["one demo, by default", "forkserver", "by default"],
)
def test_a_script_runs_unchanged(tmp_path: Path, start_method: str, demos: list[str]) -> None:
    """One word of the tutorial's script is changed; it runs its demos and prints nothing else."""
    source = """
        import os, sys, torch
        import torch.distributed as dist
        import torch.nn as nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        import ddpsafe as mp

        def setup(rank, world_size):
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = sys.argv[1]
            dist.init_process_group("gloo", rank=rank, world_size=world_size)

        def cleanup():
            dist.destroy_process_group()

        def demo_sum(rank, world_size):
            setup(rank, world_size)
            number = torch.ones(1)
            dist.all_reduce(number)
            print("sum", number.item())
            cleanup()

        def demo_basic(rank, world_size):
            setup(rank, world_size)
            model = DDP(nn.Linear(10, 5))
            loss = nn.MSELoss()(model(torch.randn(20, 10)), torch.zeros(20, 5))
            loss.backward()
            gradient = model.module.weight.grad.clone()
            dist.broadcast(gradient, src=0)
            print("gradient", torch.equal(gradient, model.module.weight.grad))
            cleanup()

        def run_demo(demo_fn, world_size):
            mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=TRUE)

        if __name__ == "__main__":
            for name in sys.argv[2:]:
                run_demo({"sum": demo_sum, "basic": demo_basic}[name], 2)
    """
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = str(other_program.getsockname()[1])
        text = source.replace("TRUE", f"True{start_method}")
        run = scripts.run(tmp_path, text, port, *demos)
    said = {"sum": ["sum 2.0"] * 2, "basic": ["gradient True"] * 2}
    assert run.lines() == [line for name in demos for line in said[name]]
    # A start that takes longer than half a minute gets a line.
    assert re.sub(r"ddpsafe: \d of 2 ranks have joined.*\n", "", run.err) == ""


def test_a_rank_may_open_and_close_its_group_twice(tmp_path: Path, busy_port: int) -> None:
    """The second group does not read the first one's addresses."""
    spawn(programs.train_twice, (2, busy_port, tmp_path), **FAST)
    assert notes(tmp_path) == {0: [SUM] * 2, 1: [SUM] * 2}


@pytest.mark.parametrize("nprocs", [0, -1])
def test_no_ranks_are_no_success(tmp_path: Path, nprocs: int) -> None:
    """``nprocs=torch.cuda.device_count()`` without a GPU says so, where torch returns at once."""
    with pytest.raises(ddpsafe.ConfigError, match="nproc") as caught:
        spawn(programs.note_environment, (tmp_path,), nprocs=nprocs)
    if nprocs == 0:
        assert "torch.cuda.device_count() is 0 on a machine without GPUs" in str(caught.value)
    assert notes(tmp_path) == {}


# The rendezvous.


@pytest.mark.full(but=["tcp"])
@pytest.mark.parametrize("scheme", ["tcp", "new file", "stale file"])
def test_ranks_use_the_launchers_store_whatever_place_the_script_names(
    tmp_path: Path, busy_port: int, scheme: str
) -> None:
    """Neither a taken port nor a file left by a killed job matters."""
    file = tmp_path / "store"
    if scheme == "stale file":
        file.write_bytes(b"\x07left by a job that was killed" * 10)
    url = f"tcp://127.0.0.1:{busy_port}" if scheme == "tcp" else f"file://{file}"
    spawn(programs.meet_by_url, (url, tmp_path), **FAST)
    assert notes(tmp_path) == {0: [SUM], 1: [SUM]}


def test_ranks_find_address_and_rank_in_the_environment(tmp_path: Path) -> None:
    """``init_process_group()`` without a rank works, though torch's spawn sets no variables."""
    spawn(programs.meet_by_environment, (tmp_path,), **FAST)
    assert notes(tmp_path) == {0: [(0, 2, SUM)], 1: [(1, 2, SUM)]}


def test_a_group_of_other_ranks_is_left_to_torch(tmp_path: Path) -> None:
    """A rank may form a group with other processes, at the address that it names."""
    spawn(programs.be_alone, (tmp_path,), **FAST)
    assert notes(tmp_path) == {0: [1.0], 1: [2.0]}
    assert (tmp_path / "store-0").exists()


def test_variables_that_the_caller_has_set_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ImageNet example uses RANK as the node's rank and WORLD_SIZE as the number of nodes."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    spawn(programs.node_rank_idiom, (2, tmp_path), **FAST)
    assert notes(tmp_path) == {
        rank: [({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(rank)}, SUM)] for rank in (0, 1)
    }
    assert os.environ["RANK"] == "0"


def test_fields_of_the_config_work_beside_torchs_arguments(tmp_path: Path) -> None:
    """``env`` reaches the ranks, and nprocs and start_method are those of the call."""
    config = ddpsafe.LaunchConfig(nproc_per_node=5, env={"FROM_CONFIG": "yes"})
    names = ("FROM_CONFIG", "FROM_FIELD", "WORLD_SIZE")
    spawn(
        programs.note_environment,
        (tmp_path, *names),
        config=config,
        env={"FROM_FIELD": "too"},
        **FAST,
    )
    assert notes(tmp_path) == {0: [["yes", "too", "2"]], 1: [["yes", "too", "2"]]}


def test_torchs_arguments_win_even_if_they_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank runs, as with torch, whatever ``nproc_per_node`` config and environment have."""
    monkeypatch.setenv("DDPSAFE_NPROC_PER_NODE", "2")
    spawn(programs.note_environment, (tmp_path, "WORLD_SIZE"), **METHOD)
    config = ddpsafe.LaunchConfig(nproc_per_node=3)
    spawn(programs.note_environment, (tmp_path, "WORLD_SIZE"), config=config, **METHOD)
    assert notes(tmp_path) == {0: [["1"], ["1"]]}


@pytest.mark.full
def test_children_of_a_rank_start_as_those_of_torchs_spawn(tmp_path: Path) -> None:
    """They use the start method of the rank, because workers may hold CUDA tensors."""
    for method in ("spawn", "forkserver"):
        spawn(programs.note_start_method, (tmp_path,), start_method=method)
    assert notes(tmp_path) == {0: ["spawn", "forkserver"]}


# Objects that are inherited instead of pickled.


def test_queues_locks_events_and_shared_tensors_are_inherited() -> None:
    """They are the caller's own, not copies; items that a rank puts arrive before it exits."""
    import torch

    context = multiprocessing.get_context("forkserver")
    queue, lock, event = context.Queue(), context.Lock(), context.Event()
    counter = context.RawValue("i", 0)
    weights = torch.zeros(2).share_memory_()
    handle = spawn(programs.share, (queue, lock, event, counter, weights), join=False, **FAST)
    event.set()
    received = sorted(queue.get(timeout=scripts.LIMIT_S) for _ in range(2))
    assert handle.join()
    assert [(rank, len(text)) for rank, text in received] == [(0, 100_000), (1, 100_000)]
    assert counter.value == 200
    assert weights.tolist() == [1.0, 2.0]
    queue.close()
    queue.join_thread()


def test_a_lock_made_for_forks_is_refused_by_its_path() -> None:
    """``multiprocessing.Queue()`` where fork is the default would fail while a rank starts."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system cannot fork")
    queue = multiprocessing.get_context("fork").Queue()
    with pytest.raises(ddpsafe.ConfigError, match=re.escape("args[0]['queue']")) as caught:
        spawn(programs.note_environment, ({"queue": queue},), **FAST)
    assert "get_context('spawn')" in str(caught.value)
    queue.close()


# join=False.


@pytest.fixture
def gated(tmp_path: Path) -> SpawnHandle:
    """Spawn two ranks that run until the gate opens."""
    handle = spawn(programs.wait_for_gate, (tmp_path,), join=False, **FAST)
    scripts.wait_until(lambda: len(notes(tmp_path)) == 2)
    assert handle is not None
    return handle


def test_a_handle_shows_the_ranks_and_whether_they_have_ended(
    tmp_path: Path, gated: SpawnHandle
) -> None:
    """``join(timeout)`` is False while ranks run and True afterwards."""
    scripts.wait_until(lambda: all(notes(tmp_path).values()))
    assert gated.pids() == [pid for (pid,) in notes(tmp_path).values()]
    assert [process.pid for process in gated.processes] == gated.pids()
    assert all(process.is_alive() for process in gated.processes)
    assert gated.join(timeout=0.1) is False
    assert gated.join(0) is False
    assert set(gated.sentinels.values()) == {0, 1}
    (tmp_path / "gate").touch()
    assert gated.join(timeout=scripts.LIMIT_S) is True
    assert [process.exitcode for process in gated.processes] == [0, 0]
    assert gated.join() is True
    assert (gated.sentinels, len(gated.error_files)) == ({}, 2)
    assert not any(psutil.pid_exists(pid) for pid in gated.pids())


def test_a_failure_is_raised_at_join_and_names_the_rank(tmp_path: Path, run_dir: Path) -> None:
    """The caller may do other work before that; every join raises it again."""
    handle = spawn(programs.wait_and_fail, (tmp_path,), join=False, run_dir=run_dir, **FAST)
    assert handle.join(0) is False
    (tmp_path / "gate").touch()
    for timeout in (None, 1):
        with pytest.raises(ddpsafe.RankRaisedError, match="no such class: 17") as caught:
            handle.join(timeout)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LookupError)
    assert not any(psutil.pid_exists(pid) for pid in handle.pids())


def test_a_wrong_call_fails_at_once_without_a_join(tmp_path: Path) -> None:
    """No join is needed to find out that nothing has started."""
    with pytest.raises(ddpsafe.ConfigError, match="device_count"):
        spawn(programs.wait_for_gate, (tmp_path,), nprocs=0, join=False)
    (tmp_path / "file").touch()
    with pytest.raises(ddpsafe.PreflightError, match="cannot be used"):
        spawn(programs.wait_for_gate, (tmp_path,), join=False, run_dir=tmp_path / "file", **FAST)


@pytest.mark.full
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_signal_right_after_the_start_ends_the_rank(start_method: str, run_dir: Path) -> None:
    """SIGTERM may arrive before the rank's process has run a line of Python."""
    for attempt in range(20 if start_method == "forkserver" else 2):
        options = {"start_method": start_method, "run_dir": run_dir / f"{attempt}"}
        handle = spawn(programs.wait_for_ever, join=False, **options)
        handle.processes[0].terminate()
        with pytest.raises(ddpsafe.RankKilledError) as caught:
            handle.join(timeout=scripts.LIMIT_S)
        assert caught.value.signal == signal.SIGTERM


def test_ctrl_c_at_join_ends_the_ranks_and_is_raised(gated: SpawnHandle) -> None:
    """KeyboardInterrupt is raised after the ranks have exited."""
    interrupter = threading.Thread(
        target=_interrupt_when_inside, args=(SpawnHandle.join, threading.get_ident())
    )
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        gated.join(timeout=scripts.LIMIT_S)
    interrupter.join()
    assert not any(psutil.pid_exists(pid) for pid in gated.pids())


def _interrupt_when_inside(function: Any, thread: int) -> None:
    """Send the signal of Ctrl-C once a thread is inside a function."""

    def is_inside() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[thread])
        return any(frame.f_code is function.__code__ for frame, _ in stack)

    scripts.wait_until(is_inside)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.full(but=["True"])
@pytest.mark.parametrize("daemon", [True, False])
def test_daemon_means_the_same_as_in_multiprocessing(tmp_path: Path, *, daemon: bool) -> None:
    """Daemonic ranks must not have children; other ranks may."""
    spawn(programs.try_to_have_a_child, (tmp_path,), **{**FAST, "nprocs": 1}, daemon=daemon)
    text = (tmp_path / "rank-0").read_text()
    assert text == (
        "True: daemonic processes are not allowed to have children\n"
        if daemon
        else "False: had a child\n"
    )


@pytest.mark.full
def test_daemonic_ranks_end_with_a_caller_that_never_joins(tmp_path: Path) -> None:
    """The caller does not wait for them, and no process is left."""
    source = """
        import sys, spawn_programs, ddpsafe
        from pathlib import Path

        if __name__ == "__main__":
            folder = Path(sys.argv[1])
            handle = ddpsafe.spawn(
                spawn_programs.wait_for_gate, (folder,), 2, False, True, "forkserver"
            )
            spawn_programs.scripts.wait_until((folder / "rank-1").exists)
            print(*handle.pids())
    """
    run = scripts.run(tmp_path, source, str(tmp_path))
    (line,) = run.lines()
    assert run.err == ""
    scripts.wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in line.split()))


@pytest.mark.full
def test_ranks_end_with_a_script_that_dies_of_an_error_with_an_exit_code(tmp_path: Path) -> None:
    """The second error of ddpsafe, which is not caught, sets the exit code and ends the ranks."""
    source = """
        import sys, spawn_programs, ddpsafe
        from pathlib import Path

        if __name__ == "__main__":
            fn, folder = spawn_programs.wait_for_gate, Path(sys.argv[1])
            try:
                ddpsafe.spawn(fn, nprocs=0)
            except ddpsafe.ConfigError:
                pass
            handle = ddpsafe.spawn(fn, (folder,), nprocs=2, join=False, start_method="forkserver")
            spawn_programs.scripts.wait_until((folder / "rank-1").exists)
            ddpsafe.spawn(fn, nprocs=0)
    """
    run = scripts.run(tmp_path, source, str(tmp_path))
    assert run.code == 78
    assert "device_count() is 0" in run.err
    assert "never joined" not in run.err  # they would fail if the gate stayed closed for long


@pytest.mark.full
@pytest.mark.parametrize("goes_on", [False, True])
def test_ranks_end_with_a_script_that_is_preempted(tmp_path: Path, *, goes_on: bool) -> None:
    """It shows no traceback, and the ranks of a handle end, unless a prompt follows."""
    source = """
        import os, sys, spawn_programs, ddpsafe
        from pathlib import Path

        if __name__ == "__main__":
            fn, folder = spawn_programs.wait_for_gate, Path(sys.argv[1])
            handle = ddpsafe.spawn(fn, (folder,), nprocs=2, join=False, start_method="forkserver")
            spawn_programs.scripts.wait_until((folder / "rank-1").exists)
            print(*handle.pids(), flush=True)
            ddpsafe.launch(spawn_programs.stop_oneself, nproc_per_node=1, start_method="forkserver")
    """
    prompt = """
print([os.path.exists(f"/proc/{pid}") for pid in handle.pids()])
(folder / "gate").touch()
print(handle.join())
"""
    script = str(scripts.write(tmp_path, "script.py", source))
    arguments = [*(["-i"] if goes_on else []), script, str(tmp_path)]
    run = scripts.Script(arguments, folder=tmp_path, text=prompt if goes_on else None).end()
    assert "stopped on SIGTERM" in run.err
    assert "Traceback" not in run.err
    pids, *rest = run.out.splitlines()
    if goes_on:
        assert rest == ["[True, True]", "True"]
    else:
        assert run.code == 75
        assert not any(psutil.pid_exists(int(pid)) for pid in pids.split())


@pytest.mark.full
def test_handles_that_have_been_joined_leave_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's ``sys.excepthook`` is restored, in whatever order handles are joined."""
    before = sys.__excepthook__
    monkeypatch.setattr(sys, "excepthook", before)  # earlier tests may have left handles
    (tmp_path / "gate").touch()
    one = {**FAST, "nprocs": 1}
    for first, second in ((0, 1), (1, 0)):
        handles = [spawn(programs.wait_for_gate, (tmp_path,), join=False, **one) for _ in range(2)]
        assert handles[first].join()
        assert sys.excepthook is not before
        assert handles[second].join()
        assert sys.excepthook is before


@pytest.mark.full
def test_the_interpreter_waits_at_exit_for_ranks_that_are_not_daemonic(tmp_path: Path) -> None:
    """As with torch, a caller that never joins loses no work."""
    source = """
        import sys, spawn_programs, ddpsafe
        from pathlib import Path

        if __name__ == "__main__":
            fn, folder = spawn_programs.wait_for_gate, Path(sys.argv[1])
            handle = ddpsafe.spawn(fn, (folder,), nprocs=2, join=False, start_method="forkserver")
            print(*handle.pids(), flush=True)
            (folder / "gate").touch()
    """
    run = scripts.run(tmp_path, source, str(tmp_path))
    assert run.lines() == [" ".join(str(pid) for (pid,) in notes(tmp_path).values())]
    assert run.err == ""


METHODS: Final = pytest.mark.parametrize(
    "start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
)


RAISED: Final = (ddpsafe.RankRaisedError, mp.ProcessRaisedException)
KILLED: Final = (ddpsafe.RankKilledError, mp.ProcessExitedException)
EXITED: Final = (ddpsafe.RankExitedError, mp.ProcessExitedException)
SIGABRT: Final = {"error_index": 0, "exit_code": -6, "signal_name": "SIGABRT", "signal": 6}
FAULTS: Final[dict[str, tuple[tuple[Any, Any], str, dict[str, object]]]] = {
    "raise in 0": (RAISED, r"\nValueError: from rank 0$", {"error_index": 0, "exit_code": 1}),
    "raise in 1": (RAISED, r"\nValueError: from rank 1$", {"error_index": 1, "exit_code": 1}),
    "raise in all": (RAISED, r"\nValueError: from rank (0|1)$", {"exit_code": 1}),
    "abort in 0": (KILLED, "process 0 terminated with signal (SIGABRT|SIGIOT)", SIGABRT),
    "exit in 0": (EXITED, "process 0 terminated with exit code 123", {"exit_code": 123, "signal_name": None}),
    "return in 0, raise in 1": (RAISED, "ValueError: from rank 1", {"error_index": 1}),
}  # fmt: skip
"""The fault of a rank; ddpsafe's class and torch's, torch's message, and the attributes of both."""


@pytest.mark.full(but=["raise in 1-forkserver", "abort in 0-forkserver"])
@METHODS
@pytest.mark.parametrize("fault", FAULTS)
def test_errors_are_also_torchs_errors(run_dir: Path, start_method: str, fault: str) -> None:
    """``except mp.ProcessRaisedException`` and a search in the message work; pickled, they keep both."""
    (ours, torchs), text, facts = FAULTS[fault]
    how: Any = {"start_method": start_method, "run_dir": run_dir}
    with pytest.raises(torchs, match=text) as caught:
        ddpsafe.spawn(programs.end_in_a_way, (fault,), 2, **how)
    for each in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(each, torchs)
        assert isinstance(each, ours)
        assert {name: getattr(each, name) for name in facts} == facts
        assert each.error_pid == each.pid == each.outcomes[each.rank].pid
        assert f"rocess {each.rank} terminated with " in each.msg
        assert each.run_dir == run_dir
        assert type(each).__qualname__ == ours.__qualname__
        assert str(each).startswith(f"rank {each.rank} (world_size 2) ")
    if ours is ddpsafe.RankRaisedError:
        assert "Traceback (most recent call last)" in caught.value.msg
        assert isinstance(caught.value.__cause__, ValueError)


def test_the_exit_status_of_a_script_follows_the_shell(tmp_path: Path) -> None:
    """It is 128 + signal, although torch's `exit_code` is negative."""
    source = """
        import sys, spawn_programs, ddpsafe

        if __name__ == "__main__":
            options = {"start_method": "forkserver", "run_dir": sys.argv[1]}
            ddpsafe.spawn(spawn_programs.end_in_a_way, ("abort in 0",), 2, **options)
    """
    run = scripts.run(tmp_path, source, str(tmp_path / "run"))
    assert run.code == 134
    assert "ddpsafe.RankKilledError: rank 0" in run.err


@pytest.mark.full
@METHODS
def test_children_of_a_killed_rank_end_with_it(tmp_path: Path, start_method: str) -> None:
    """A rank may spawn ranks, and a signal that ends it ends them, too."""
    handle = ddpsafe.spawn(
        programs.spawn_and_die,
        (tmp_path, start_method),
        1,
        join=False,
        start_method=start_method,
        run_dir=tmp_path / "run",
    )
    with pytest.raises(mp.ProcessExitedException, match="SIGTERM"):
        handle.join()
    pids = [int(path.read_text()) for path in tmp_path.glob("inner-*")]
    assert len(pids) == 2
    scripts.wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.full(but=["60.0-True"])
@pytest.mark.parametrize(("grace_s", "finishes"), [(60.0, True), (0.0, False), (None, False)])
def test_a_grace_period_lets_the_other_ranks_finish(
    tmp_path: Path, grace_s: float | None, *, finishes: bool
) -> None:
    """``join(grace_period=…)`` waits that long before it ends the other ranks."""
    handle = ddpsafe.spawn(
        programs.fail_or_finish,
        (tmp_path,),
        2,
        join=False,
        start_method="forkserver",
        run_dir=tmp_path / "run",
    )
    scripts.wait_until((tmp_path / "started").exists)
    assert handle.join(0, grace_period=grace_s) is False
    (tmp_path / "gate").touch()
    with pytest.raises(mp.ProcessRaisedException, match=re.escape("ValueError: the first")):
        handle.join(grace_period=grace_s)
    assert (tmp_path / "finished").exists() == finishes


@pytest.mark.full
def test_a_signal_ends_a_grace_period(tmp_path: Path, run_dir: Path) -> None:
    """Once a rank has failed, Ctrl-C ends the others without the rest of the time that they were given."""
    handle = ddpsafe.spawn(
        programs.fail_or_stay,
        (tmp_path,),
        2,
        join=False,
        start_method="forkserver",
        run_dir=run_dir,
    )
    scripts.wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    assert handle.join(0, grace_period=machine.hang_limit(600)) is False
    (tmp_path / "gate").touch()
    multiprocessing.connection.wait([handle.processes[0].sentinel])
    handle._cancel()  # as the KeyboardInterrupt of a Ctrl-C in join() does
    with pytest.raises(mp.ProcessRaisedException, match="the first"):
        handle.join()


@METHODS
def test_tensors_in_the_arguments_are_shared_as_by_torch(start_method: str) -> None:
    """The caller sees what ranks write to a tensor, to a view of one and to a module."""
    plain, base, model = torch.zeros(2), torch.zeros(4), torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    many = [torch.zeros(1) for _ in range(300)]  # more than a fork server takes descriptors
    arguments = (plain, base[2:], model, many)
    ddpsafe.spawn(programs.write_to_tensors, arguments, 2, start_method=start_method)
    assert plain.tolist() == [1, 2]
    assert base.tolist() == [0, 0, 1, 2]
    assert model.weight.flatten().tolist() == [1, 2]
    assert plain.is_shared()
