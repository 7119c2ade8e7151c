"""A rank exits before its function returns, which is a failure whatever the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exception_programs as programs
import pytest
import scripts
from exception_programs import raise_own_error
from fault_kit import WORLD_SIZES, World, require_rank, run_script
from training_programs import train, train_by_hand

import ddpsafe

EXITS = [
    pytest.param(programs.exit_well, ddpsafe.RankLeftEarlyError, 1, id="sys.exit(0)"),
    pytest.param(programs.exit_badly, ddpsafe.RankExitedError, 3, id="sys.exit(3)"),
    pytest.param(programs.exit_as_os_system, ddpsafe.RankExitedError, 1, id="sys.exit(256)"),
    pytest.param(programs.exit_below_zero, ddpsafe.RankExitedError, 255, id="sys.exit(-1)"),
    pytest.param(programs.vanish_well, ddpsafe.RankLeftEarlyError, 1, id="os._exit(0)"),
    pytest.param(programs.vanish_badly, ddpsafe.RankExitedError, 7, id="os._exit(7)"),
    pytest.param(programs.be_interrupted, ddpsafe.RankExitedError, 130, id="KeyboardInterrupt"),
]


@pytest.mark.full(but=["3-sys.exit(0)", "3-os._exit(0)"])
@pytest.mark.parametrize(("fault", "error_class", "code"), EXITS)
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_exits_has_failed(
    tmp_path: Path,
    ranks: int,
    fault: Callable[..., Any],
    error_class: type[ddpsafe.RankFailedError],
    code: int,
) -> None:
    """Exit code 0 is a failure too: without a returned value the work is not done."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(error_class, train, fault)
    require_rank(error, 1)
    assert error.exit_code == code
    assert "before its function returned" in str(error)


@pytest.mark.full(but=["os._exit(7)"])
@pytest.mark.parametrize(("fault", "error_class", "code"), EXITS)
def test_a_rank_that_exits_from_an_unported_script_has_failed(
    tmp_path: Path, fault: Callable[..., Any], error_class: type[ddpsafe.RankFailedError], code: int
) -> None:
    """`torch.multiprocessing.spawn` returns normally for four of these exits."""
    world = World(folder=tmp_path, start_method="forkserver")
    error = world.spawn_fails(error_class, train_by_hand, fault)
    require_rank(error, 1)
    assert error.exit_code == code


@pytest.mark.full(but=["exit_well-1"])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (programs.exit_well, 1),
        pytest.param(programs.exit_badly, 3, marks=pytest.mark.soak),
        pytest.param(programs.exit_as_os_system, 1, marks=pytest.mark.soak),
        (programs.die_by_kill, 137),
        pytest.param(raise_own_error, 1, marks=pytest.mark.soak),
    ],
)
def test_the_script_exits_with_the_ranks_exit_code(
    tmp_path: Path, fault: Callable[..., Any], code: int
) -> None:
    """The script need not catch the error for that."""
    statements = f"""
        from {fault.__module__} import {fault.__name__}
        from training_programs import train
        ddpsafe.launch(train, (folder, {fault.__name__}), **options)
    """
    script = run_script(tmp_path, statements)
    assert script.code == code, script.err
    assert "rank 1 (world_size 2)" in script.err
    assert "What to do: " in script.err


def test_the_script_exits_with_78_where_a_retry_cannot_help(tmp_path: Path) -> None:
    """A scheduler that knows the code does not requeue the job."""
    statements = """
        from training_programs import return_rank
        ddpsafe.launch(return_rank, nproc_per_node=0)
    """
    script = run_script(tmp_path, statements)
    assert script.code == 78, script.err


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("import os; os._exit(3)", "let the script reach its end"),
        (
            "import argparse as a; p = a.ArgumentParser(); p.add_argument('--local_rank', required=True); p.parse_args()",
            "os.environ['LOCAL_RANK']",
        ),
    ],
)
def test_a_script_is_not_called_a_function(tmp_path: Path, source: str, advice: str) -> None:
    """Under ``ddpsafe run``, the message speaks of the script; it knows torch.distributed.launch's argument."""
    scripts.write(tmp_path, "train.py", source)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "2", "--run-dir", "run", "train.py"]
    done = scripts.Script(command, folder=tmp_path).end()
    assert "before its script ended" in done.err
    assert "function" not in done.err
    assert advice in done.err


ONLY_PRINTS = """
    import atexit, os, sys, time
    import torch
    import torch.distributed as dist

    if sys.argv[1:] == ["exec"]:
        os.execv(sys.executable, [sys.executable, __file__])
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        atexit.register(time.sleep, 60)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        raise ValueError("no label\\nfor sample 17")
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["--no-python", "sh", "run.sh"], id="program"),
        pytest.param(["train.py", "exec"], id="exec"),
    ],
)
def test_a_rank_that_can_only_print_its_error_is_named(tmp_path: Path, command: list[str]) -> None:
    """Rank 1 is still in its exit functions when rank 0, which has lost it, has ended."""
    script = scripts.write(tmp_path, "train.py", ONLY_PRINTS)
    scripts.write(tmp_path, "run.sh", f"{sys.executable} {script}\nexit $?")
    launcher = ["-m", "ddpsafe", "run", "--nproc-per-node", "2", "--run-dir", "run"]
    done = scripts.Script([*launcher, *command], folder=tmp_path).end()
    assert done.code == 1
    assert "RankRaisedError: rank 1 (world_size 2) raised ValueError" in done.err
    assert ": no label" in done.err
    lines = script.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "raise ValueError" in text)
    assert f"at {script}:{line} in <module>" in done.err
    assert "rank 0 failed because of rank 1: RuntimeError: " in done.err


def test_a_rank_that_faulthandler_ends_is_told_from_an_exit(tmp_path: Path) -> None:
    """It has called nothing: the message names the line that it was at."""
    source = """
        import faulthandler, time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            faulthandler.dump_traceback_later(0.5, exit=True)
            time.sleep(60)
        dist.all_reduce(torch.ones(1))
    """
    script = scripts.write(tmp_path, "train.py", source)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "2", "--run-dir", "run", "train.py"]
    done = scripts.Script(command, folder=tmp_path).end()
    assert done.code == 1
    assert "RankExitedError: rank 1 (world_size 2) exited with code 1" in done.err
    assert f"after 0:00:00.500000, at {script}:9 in <module>" in done.err
