"""Scripts may rely on the errors, texts and handle of ``torch.multiprocessing.spawn``.

The cases resemble those of torch's own tests.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import re
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
    """``except mp.ProcessRaisedException`` still works, and so does a search in the message.

    The errors keep the attributes of both when they are pickled, as by a pool of processes.
    """
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
