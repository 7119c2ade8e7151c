"""Ranks that hang, diverge, raise and die under NCCL: who is blamed, and what stays behind.

Two ranks share one GPU, which NCCL allows only to different "hosts": `_gpus.SHARING`, a switch
for these tests, gives each rank its own NCCL_HOSTID. tests/nccl_on_cpu has a counterpart of each
test on the CPU, with recorded messages and dumps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gpu_programs as programs
import pytest
import torch

import ddpsafe
from ddpsafe import _gpus

Fails = Callable[..., Any]

pytestmark = pytest.mark.gpu

SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250", "TORCH_NCCL_COORD_CHECK_MILSEC": "100"}
BACKEND: Final = "nccl" if torch.cuda.is_available() else "gloo"  # gloo only in a rehearsal


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two ranks use the first GPU."""
    monkeypatch.setenv(_gpus.SHARING, "1")


def two(folder: Path, fn: Callable[..., Any], *args: Any, **fields: Any) -> Any:
    """Launch two ranks with short timeouts; return their values."""
    usual: dict[str, Any] = {
        "nproc_per_node": 2,
        "backend": BACKEND,
        "start_method": "forkserver",
        "run_dir": folder / "run",
        "timeouts": {"collective": 3, "grace": 1},
        "env": SOON,
    }
    return ddpsafe.launch(fn, args, **{**usual, **fields}).values


@pytest.fixture
def fails(tmp_path: Path, record_property: Callable[[str, object], None]) -> Fails:
    """Return a function that launches ranks that fail, and returns the error; the report quotes it."""

    def launch(fn: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        with pytest.raises(ddpsafe.LaunchError) as caught:
            two(tmp_path, fn, *args, **fields)
        record_property("said", str(caught.value).partition("\n")[0])
        return caught.value

    return launch


def on_gpu(error: Any) -> set[int]:
    """Return the ranks of a failed attempt that the driver still lists."""
    return _gpus.find_users([each.pid for each in error.outcomes.values() if each.pid])


def test_rank_that_raises_is_named_while_the_other_spins(fails: Fails) -> None:
    """Both exit within the grace period."""
    error = fails(programs.raise_while_the_other_spins, timeouts={"collective": 60, "grace": 1})
    assert isinstance(error, ddpsafe.RankRaisedError)
    assert (error.rank, error.kind) == (1, "user-error")


def test_killed_rank_is_named(fails: Fails) -> None:
    """The other rank waits for it on its GPU, and its own watchdog has seen nothing yet."""
    error = fails(programs.die, timeouts={"collective": 60, "grace": 1})
    assert isinstance(error, ddpsafe.RankKilledError)
    assert (error.rank, error.kind) == (1, "killed")


def test_rank_that_returns_early_is_named_without_a_timeout(fails: Fails) -> None:
    """The other rank waits in ``.item()``."""
    error = fails(programs.return_early, timeouts={"collective": 60, "grace": 1})
    assert isinstance(error, ddpsafe.RankLeftEarlyError)
    assert error.rank == 1


@pytest.mark.parametrize("program", [programs.exit_with_zero, programs.skip_a_step])
def test_rank_that_makes_fewer_steps_is_named(fails: Fails, program: Callable[..., Any]) -> None:
    """Exit code 0 hides nothing, and a skipped step is found when the rank has returned."""
    error = fails(program, timeouts={"collective": 60, "grace": 1})
    assert isinstance(error, ddpsafe.RankLeftEarlyError)
    assert error.rank == 1


@pytest.mark.parametrize("env", [{}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}], ids=["watchdog", "wait"])
def test_absent_rank_is_named(fails: Fails, env: dict[str, str]) -> None:
    """Rank 0 waits in ``.item()``, and the launch ends within ten seconds of the timeout."""
    began_s = time.monotonic()
    error = fails(programs.sleep_before_all_reduce, env={**SOON, **env})
    assert error.setting == "collective"
    assert (error.missing_ranks, error.kind) == ((1,), "hang")
    assert time.monotonic() - began_s < 60


def test_busy_gpu_blames_no_rank(fails: Fails) -> None:
    """Both ranks have enqueued the collective, but one GPU never starts it."""
    error = fails(programs.spin_first)
    assert error.setting == "collective"
    assert error.missing_ranks == ()


def test_nccls_recorder_is_read(tmp_path: Path) -> None:
    """Three all_reduces are numbers 1 to 3 and completed, in entries and in counters."""
    found = two(tmp_path, programs.numbers_of_collectives)
    assert found == {rank: [(3, "completed")] * 2 for rank in range(2)}


def test_different_shapes_are_shown(fails: Fails) -> None:
    """NCCL compares nothing: the rank that passed less continues alone."""
    error = fails(programs.pass_another_shape)
    assert "1048576" in str(error)


def test_allocation_failure_is_an_out_of_memory_error(fails: Fails) -> None:
    """The error has the memory that the rank held."""
    error = fails(programs.allocate_too_much)
    assert (error.rank, error.kind) == (1, "out-of-memory")
    assert "held:" in str(error)


def test_next_attempt_finds_the_memory_free(tmp_path: Path) -> None:
    """Each attempt takes 70 % of the GPU."""
    retry = {"attempts": 2, "on": {"killed"}, "backoff_initial": 0, "no_progress": None}
    values = two(tmp_path, programs.take_most_and_die_once, retry=retry)
    assert values[0] == values[1] > 0


def test_rank_that_synchronises_at_each_result_is_not_behind(fails: Fails) -> None:
    """Rank 1 ran ahead by 40 collectives before it hangs, and is blamed."""
    error = fails(programs.run_ahead_then_miss)
    assert error.missing_ranks == (1,)


def test_different_collective_is_found_40_before_the_last(fails: Fails) -> None:
    """All ranks are compared at the first collective that does not complete."""
    error = fails(programs.differ_then_run_ahead)
    assert error.setting == "collective"
    assert "number 4" in str(error)


def test_memory_is_freed_after_sigkill(fails: Fails) -> None:
    """Kernels were running; the driver lists no rank when the error is raised."""
    error = fails(programs.die_while_spinning)
    assert isinstance(error, ddpsafe.RankKilledError)
    assert (error.rank, on_gpu(error)) == (1, set())


@pytest.mark.gpu("its values")
def test_index_out_of_range_is_an_error_of_the_user(fails: Fails) -> None:
    """The watchdog aborts the process, and its message has the real error."""
    error = fails(programs.index_out_of_range)
    assert (error.rank, error.kind) == (1, "user-error")
    assert "device-side assert" in str(error)


def test_sigterm_ends_ranks_blocked_in_item(fails: Fails) -> None:
    """One rank receives it, dies of it, and is named."""
    error = fails(programs.die_of_sigterm)
    assert isinstance(error, ddpsafe.RankKilledError)
    assert error.rank == 0


def test_graph_can_be_captured_while_positions_are_read(tmp_path: Path) -> None:
    """Reading never breaks a capture, and a training that replays graphs records no collectives."""
    assert two(tmp_path, programs.replay_a_graph) == {0: 5.0, 1: 5.0}


def test_asynchronous_copies_are_consistent(tmp_path: Path) -> None:
    """The state changes right after it is copied on a side stream."""
    assert two(tmp_path, programs.copy_then_change) == {0: True, 1: True}


@pytest.mark.gpu("its values")
def test_restored_rank_uses_memory_on_its_own_gpu_only(tmp_path: Path) -> None:
    """Rank 1 has no context on GPU 0, where there is another one."""
    found = two(tmp_path, programs.say_devices_in_use, str(tmp_path))
    assert found == {0: [0], 1: [min(1, torch.cuda.device_count() - 1)]}


@pytest.mark.gpu("its values")
def test_workers_load_batches_after_cuda_is_initialised(tmp_path: Path) -> None:
    """Forked workers do not use CUDA, and batches are pinned."""
    found = two(tmp_path, programs.load_batches)
    assert sum(each["sum"] for each in found.values()) == sum(range(64))
    assert all(each["pinned"] for each in found.values())


def test_ranks_exit_silently_with_cuda_objects_alive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A graph and pinned memory cause no warning, no delay and no trace file beside the run directory."""
    began_s = time.monotonic()
    two(tmp_path, programs.leave_with_things_alive, console="all")
    assert capfd.readouterr() == ("", "")
    assert time.monotonic() - began_s < 60
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    """SIGTERM arrives while a rank waits in ``.item()``, and all ranks stop at the same call."""
    with pytest.raises(ddpsafe.PreemptedError) as caught:
        two(tmp_path, programs.stop_between_steps, 10_000)
    values = caught.value.values
    assert values[0] == values[1]
    assert 3 <= values[0] < 10_000  # type: ignore[operator]  # the program's value


@pytest.mark.gpu("its values")
def test_random_state_and_scaler_are_restored(tmp_path: Path) -> None:
    """A rank's draws on its GPU after a restore equal those after the save."""
    for drawn in two(tmp_path, programs.draw_and_scale, str(tmp_path / "c")).values():
        assert drawn["again"] == drawn["first"]
        assert drawn["scale"] == [512.0]
