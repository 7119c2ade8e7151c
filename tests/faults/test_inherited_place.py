"""A process that a rank has started inherits the rank's variables, and would join the job in its place."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import scripts

from ddpsafe import ConfigError, clean_environment
from ddpsafe._world import JOINED, joined_mark, require_not_inherited

if TYPE_CHECKING:
    from pathlib import Path

INNER = """
import ddpsafe

def work(ctx):
    return ctx.world_size

if __name__ == "__main__":
    print(ddpsafe.launch(work, nproc_per_node=1, backend="gloo").values)
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


def test_a_program_of_a_rank_does_not_join_in_its_place(tmp_path: Path) -> None:
    """It would wait for the rank's peers for ever. With a clean environment it is a job of its own."""
    scripts.write(tmp_path, "inner.py", INNER)
    run = scripts.run(tmp_path, OUTER)
    assert run.code == 0, run.err
    assert run.out.splitlines()[:2] == ["78 True", "0 {0: 1}"]


@pytest.mark.full
def test_a_worker_that_joins_when_its_script_is_imported_is_explained(tmp_path: Path) -> None:
    """The worker's own error is part of the message of its death."""
    scripts.write(tmp_path, "train.py", JOINS_IN_WORKERS)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "1", "--run-dir", "run", "train.py"]
    run = scripts.Script(command, folder=tmp_path).end()
    assert run.code == 1
    assert "DataLoader worker 0" in run.err
    assert "which may be the reason: ddpsafe.ConfigError: this process (pid" in run.err
    assert "join the group under" in run.err


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
