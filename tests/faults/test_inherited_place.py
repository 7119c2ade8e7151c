"""A process that a rank has started inherits the rank's variables, and would join the job in its place."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import hang_programs as programs
import pytest
import scripts
from fault_kit import Touch, World

from ddpsafe import ConfigError, clean_environment
from ddpsafe._launcher.diagnosis.rank_readings import is_alone_in_job
from ddpsafe._launcher.watch import deadlock_watch
from ddpsafe._world import JOINED, joined_mark, require_not_inherited

INNER = """
import ddpsafe

print(ddpsafe.setup(backend="gloo").world_size)
"""

OUTER = """
import os, subprocess, sys
import ddpsafe

def run(env=None):
    done = subprocess.run([sys.executable, "inner.py"], capture_output=True, text=True, env=env)
    return done.returncode, done.stdout, done.stderr

def work(ctx):
    ctx.barrier()
    if ctx.is_main:
        code, _, errors = run()
        print(code, f"was started by rank 0 (pid {os.getpid()}) and has its variables" in errors)
        print(*run(ddpsafe.clean_environment())[:2])
    ctx.barrier()

if __name__ == "__main__":
    ddpsafe.launch(work, nproc_per_node=2, backend="gloo")
"""

JOINS_IN_WORKERS = """
import ddpsafe

ctx = ddpsafe.setup(backend="gloo")
if __name__ == "__main__":
    for _ in ctx.loader(list(range(8)), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
        pass
"""

JOINS_WITH_TORCH = """
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
if __name__ == "__main__":
    for _ in DataLoader(list(range(8)), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
        pass
"""

JOINS_AT_AN_ADDRESS = JOINS_WITH_TORCH.replace(
    '"gloo")', '"gloo", "tcp://127.0.0.1:29555", rank=int(os.environ["RANK"]), world_size=2)'
).replace("import torch", "import os, torch", 1)

STARTS_PROCESSES = """
import multiprocessing
import torch.distributed as dist

def child():
    dist.init_process_group("gloo")
    dist.barrier()  # or the one with the store ends while the other still joins

if __name__ == "__main__":
    # Before the rank joins, as a server that a library has started.
    multiprocessing.set_forkserver_preload(["torch"])
    multiprocessing.forkserver.ensure_running()
    dist.init_process_group("gloo")
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        print(method, process.exitcode, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    process = multiprocessing.get_context("forkserver").Process(target=child)
    process.start()
    process.join()
    print("afterwards", process.exitcode, flush=True)
"""


def test_a_program_of_a_rank_does_not_join_in_its_place(tmp_path: Path) -> None:
    """It would wait for the rank's peers for ever. With a clean environment it is a job of its own."""
    scripts.write(tmp_path, "inner.py", INNER)
    run = scripts.run(tmp_path, OUTER)
    assert run.code == 0, run.err
    assert run.out.splitlines()[:2] == ["1 True", "0 1"]


def run_ranks(folder: Path, source: str, ranks: int) -> scripts.Run:
    """Run a script under ``ddpsafe run``."""
    scripts.write(folder, "train.py", source)
    command = [
        "-m", "ddpsafe", "run", "--nproc-per-node", str(ranks), "--run-dir", "run", "train.py",
    ]  # fmt: skip
    return scripts.Script(command, folder=folder).end()


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "ranks"), [(JOINS_IN_WORKERS, 1), (JOINS_WITH_TORCH, 2), (JOINS_AT_AN_ADDRESS, 2)]
)
def test_a_worker_that_joins_when_its_script_is_imported_is_explained(
    tmp_path: Path, source: str, ranks: int
) -> None:
    """The worker's own error is part of the message of its death, with torch's loader too."""
    run = run_ranks(tmp_path, source, ranks)
    assert run.code == 1
    assert "DataLoader worker 0" in run.err
    assert "which may be the reason: ddpsafe.ConfigError: this process (pid" in run.err
    assert "join the group under" in run.err


@pytest.mark.full
def test_processes_of_ranks_form_no_group_of_their_own(tmp_path: Path) -> None:
    """One of each of two ranks would train beside the job; once the ranks have left their group, they may."""
    run = run_ranks(tmp_path, STARTS_PROCESSES, 2)
    assert run.code == 0, run.err
    assert sorted(run.out.splitlines()) == [
        *["afterwards 0"] * 2,
        *["forkserver 1"] * 2,
        *["spawn 1"] * 2,
    ]
    assert run.err.count("has its variables") == 4


@pytest.mark.full
def test_a_rank_that_waits_for_a_program_in_its_place_is_named_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has none of ddpsafe's code, so the launcher says what the rank waits for, and the way out."""
    settings = dataclasses.replace(deadlock_watch.SETTINGS, quiet_s=3.0)
    monkeypatch.setattr(deadlock_watch, "SETTINGS", settings)
    touch = Touch(tmp_path / programs.MAY_CONTINUE, "), which has the variables of rank 0")
    monkeypatch.setattr(deadlock_watch.logger, "handlers", [touch])
    result = World(folder=tmp_path, ranks=2).launch(programs.wait_for_a_program_in_its_place)
    assert set(result.values.values()) == {"done"}
    assert "ddpsafe.clean_environment()" in caplog.text


@pytest.mark.full
def test_a_program_that_waits_for_the_job_counts_as_idle() -> None:
    """It polls the store that it serves as rank 0. Once another rank has connected, it may work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env = {**clean_environment(), **env, JOINED: joined_mark(0, env)}
    with subprocess.Popen([sys.executable, "-c", programs.JOINS], env=env) as program:
        try:
            scripts.wait_until(lambda: is_alone_in_job(program.pid))
            with socket.create_connection(("127.0.0.1", port)):
                scripts.wait_until(lambda: not is_alone_in_job(program.pid))
        finally:
            program.kill()


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, True),
        ({"RANK": "1"}, False),
        ({"MASTER_PORT": "29501"}, False),
        ({"RANK": None}, False),
    ],
)
def test_only_the_same_place_is_refused(change: dict[str, str | None], *, is_refused: bool) -> None:
    """A rank may start a launcher, as torchrun for an evaluation, whose ranks have places of their own."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
    mark = joined_mark(0, env)
    require_not_inherited({**env, JOINED: mark})  # this process is the rank itself
    env[JOINED] = mark.replace(f" {os.getpid()} ", " 1 ")
    env = {name: text for name, text in {**env, **change}.items() if text is not None}
    with pytest.raises(ConfigError) if is_refused else nullcontext():
        require_not_inherited(env)


def test_a_clean_environment_keeps_what_gives_no_place() -> None:
    """Only the variables that make a process a rank go."""
    kept = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    gone = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK ROLE_NAME MASTER_ADDR MASTER_PORT "
        f"TORCHELASTIC_RUN_ID SLURM_STEP_ID SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK {JOINED}"
    )
    assert clean_environment({**kept, **dict.fromkeys(gone.split(), "1")}) == kept
