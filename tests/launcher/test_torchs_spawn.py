"""What scripts rely on from ``torch.multiprocessing.spawn``: its errors, their texts, its handle.

Cases like those of torch's own tests of it, and the attributes that its errors have.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest
import scripts
import spawn_programs as programs
import torch
import torch.multiprocessing as mp

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

METHODS: Final = pytest.mark.parametrize(
    "start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
)

ENDS: Final[list[Any]] = [
    pytest.param(
        "raise in 0", mp.ProcessRaisedException, r"\nValueError: from rank 0$", id="raise"
    ),
    pytest.param(
        "raise in 1", mp.ProcessRaisedException, r"\nValueError: from rank 1$", id="other"
    ),
    pytest.param(
        "raise in all", mp.ProcessRaisedException, r"\nValueError: from rank (0|1)$", id="all"
    ),
    pytest.param(
        "abort in 0",
        mp.ProcessExitedException,
        r"process 0 terminated with signal (SIGABRT|SIGIOT)",
        id="abort",
    ),
    pytest.param(
        "exit in 0",
        mp.ProcessExitedException,
        r"process 0 terminated with exit code 123",
        id="exit",
    ),
    pytest.param(
        "return in 0, raise in 1",
        mp.ProcessRaisedException,
        r"ValueError: from rank 1",
        id="after-success",
    ),
]
"""What the ranks do, torch's class, and what its message says."""


@METHODS
@pytest.mark.parametrize(("fault", "error", "text"), ENDS)
def test_errors_are_torchs_too(
    run_dir: Path, start_method: str, fault: str, error: type[Exception], text: str
) -> None:
    """``except mp.ProcessRaisedException`` goes on to work, and so do texts that are searched."""
    with pytest.raises(error, match=text) as caught:
        ddpsafe.spawn(
            programs.end_in_a_way, (fault,), 2, start_method=start_method, run_dir=run_dir
        )
    assert isinstance(caught.value, ddpsafe.RankFailedError)


FACTS: Final[list[Any]] = [
    pytest.param(
        "raise in 1", ddpsafe.RankRaisedError, {"error_index": 1, "exit_code": 1}, id="raised"
    ),
    pytest.param(
        "abort in 0",
        ddpsafe.RankKilledError,
        {"error_index": 0, "exit_code": -6, "signal_name": "SIGABRT", "signal": 6},
        id="killed",
    ),
    pytest.param(
        "exit in 0",
        ddpsafe.RankExitedError,
        {"error_index": 0, "exit_code": 123, "signal_name": None},
        id="exited",
    ),
]


@pytest.mark.parametrize(("fault", "error", "facts"), FACTS)
def test_errors_have_torchs_attributes_and_ours(
    run_dir: Path, fault: str, error: type[ddpsafe.RankFailedError], facts: dict[str, object]
) -> None:
    """Also where they have been pickled, as a pool of processes does."""
    with pytest.raises(error) as caught:
        ddpsafe.spawn(
            programs.end_in_a_way, (fault,), 2, start_method="forkserver", run_dir=run_dir
        )
    for each in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(each, (mp.ProcessRaisedException, mp.ProcessExitedException))
        assert {name: getattr(each, name) for name in facts} == facts
        assert each.error_pid == each.pid == each.outcomes[each.rank].pid
        assert f"rocess {each.rank} terminated with " in each.msg
        assert each.run_dir == run_dir
        assert type(each).__qualname__ == error.__qualname__
        assert str(each).startswith(f"rank {each.rank} (world_size 2) ")
    if error is ddpsafe.RankRaisedError:
        assert "Traceback (most recent call last)" in caught.value.msg
        assert isinstance(caught.value.__cause__, ValueError)


def test_the_exit_status_of_a_script_is_that_of_a_shell(tmp_path: Path) -> None:
    """128 + signal, though torch's `exit_code` is negative."""
    source = """
        import sys, spawn_programs, ddpsafe

        if __name__ == "__main__":
            options = {"start_method": "forkserver", "run_dir": sys.argv[1]}
            ddpsafe.spawn(spawn_programs.end_in_a_way, ("abort in 0",), 2, **options)
    """
    run = scripts.run(tmp_path, source, str(tmp_path / "run"))
    assert run.code == 134
    assert "ddpsafe.RankKilledError: rank 0" in run.err


@METHODS
def test_success_without_blocking_and_the_first_argument(start_method: str) -> None:
    """Each rank is called with its index; every later join is true as well."""
    queue = multiprocessing.get_context(start_method).SimpleQueue()
    handle = ddpsafe.spawn(programs.put_index, (queue,), 2, join=False, start_method=start_method)
    ready = multiprocessing.connection.wait(list(handle.sentinels), timeout=60)
    assert {handle.sentinels[sentinel] for sentinel in ready if isinstance(sentinel, int)} <= {0, 1}
    assert ready
    while not handle.join(timeout=60):
        pass
    assert handle.join(timeout=None)
    assert handle.join()
    assert sorted([queue.get(), queue.get()]) == [0, 1]
    assert (handle.sentinels, len(handle.error_files)) == ({}, 2)


@METHODS
def test_children_of_a_rank_that_is_killed_go_with_it(tmp_path: Path, start_method: str) -> None:
    """A rank may spawn ranks; a signal that ends it ends those."""
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
    scripts.wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), within_s=10)


@pytest.mark.parametrize(("grace_s", "finishes"), [(60.0, True), (0.0, False), (None, False)])
def test_a_grace_period_lets_the_other_ranks_finish(
    tmp_path: Path, grace_s: float | None, *, finishes: bool
) -> None:
    """``join(grace_period=…)`` waits that long before it ends them."""
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


def test_a_signal_to_a_rank_is_a_process_exited_exception(run_dir: Path) -> None:
    """Sent from outside, as a scheduler's or an operator's."""
    handle = ddpsafe.spawn(
        programs.wait_for_ever, join=False, start_method="forkserver", run_dir=run_dir
    )
    for pid in handle.pids():
        os.kill(pid, signal.SIGTERM)
    with pytest.raises(mp.ProcessExitedException) as caught:
        handle.join()
    assert caught.value.exit_code == -signal.SIGTERM


@METHODS
def test_tensors_in_the_arguments_are_shared_as_by_torch(start_method: str) -> None:
    """What the ranks write the caller sees, in a tensor, in a view of it and in a module."""
    plain, base, model = torch.zeros(2), torch.zeros(4), torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    many = [torch.zeros(1) for _ in range(300)]  # more than a fork server takes descriptors
    arguments = (plain, base[2:], model, many)
    ddpsafe.spawn(programs.write_to_tensors, arguments, 2, start_method=start_method)
    assert plain.tolist() == [1, 2]
    assert base.tolist() == [0, 0, 1, 2]
    assert model.weight.flatten().tolist() == [1, 2]
    assert plain.is_shared()
