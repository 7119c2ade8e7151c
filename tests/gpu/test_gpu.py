"""Tests that need a GPU: devices, NCCL, mixed precision, and an exit without a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gpu_programs as programs
import pytest
import scripts
import torch

import ddpsafe
from ddpsafe import _gpus

GPUS: Final = torch.cuda.device_count()

pytestmark = pytest.mark.gpu


def run_two(program: programs.Program, folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """Run a program in two ranks with NCCL, on two GPUs or on a single shared one."""
    ddpsafe.spawn(
        programs.be_one_of_two,
        args=(program, folder),
        nprocs=2,
        start_method="forkserver",
        **fields,
    )
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


# Devices and the process group.


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_every_gpu_gets_one_rank_bound_to_it(start_method: Any) -> None:
    """By default each GPU has one rank, which sets it as its device and binds and connects NCCL to it."""
    values = ddpsafe.launch(programs.look_around, start_method=start_method).values
    assert values == {
        rank: {
            "device": f"cuda:{rank}",
            "current": rank,
            "made_on": f"cuda:{rank}",
            "backend": ("nccl", "nccl"),
            "bound": f"cuda:{rank}",
            "total": GPUS * (GPUS + 1) / 2,
        }
        for rank in range(GPUS)
    }


@pytest.mark.gpu("its values")
def test_more_ranks_than_gpus_are_refused_with_nccl() -> None:
    """NCCL would fail or hang, so the error has both numbers before anything starts."""
    with pytest.raises(ddpsafe.ConfigError, match=f"need {GPUS + 1} GPUs") as caught:
        ddpsafe.launch(programs.look_around, nproc_per_node=GPUS + 1, backend="nccl")
    assert f"this machine shows {GPUS}" in str(caught.value)


def test_device_tensor_is_returned_on_the_cpu() -> None:
    """The rank's device memory is freed when it exits, so its tensors are copied to the CPU."""
    values = ddpsafe.launch(programs.return_a_device_tensor, start_method="forkserver").values
    for rank, value in values.items():
        assert value["tensor"].device.type == "cpu"
        assert value["tensor"].tolist() == [float(rank)] * 3


def test_launch_works_after_the_caller_has_used_cuda() -> None:
    """Forked ranks would not survive the caller's CUDA context; ddpsafe's ranks do."""
    with programs.initialised_cuda():
        values = ddpsafe.launch(programs.look_around, start_method="forkserver").values
    assert sorted(values) == list(range(GPUS))


def test_context_communicates_on_the_device(tmp_path: Path) -> None:
    """Over NCCL, means stay on their argument's device, and objects can be exchanged."""
    for rank, found in enumerate(run_two(programs.reduce_on_device, tmp_path)):
        assert found["mean"] == (0.5, f"cuda:{rank % GPUS}")
        assert found["mean_of_cpu"] == (0.5, "cpu")
        assert found["dict"] == {"loss": 0.5}
        assert found["gathered"] == [0, 1]
        assert found["broadcast"] == "from 0"
        assert found["stop"] is False


# Training.


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """With half a batch each and sync_batchnorm=True, parameters and statistics are those of full batches."""
    first, second = run_two(programs.train_in_parallel, tmp_path)
    assert first["norm"] == second["norm"] == "SyncBatchNorm"
    alone = programs.train_alone(torch.device("cuda", 0))
    assert first["state"].keys() == alone.keys()
    for name, expected in alone.items():
        assert torch.equal(first["state"][name], second["state"][name]), name
        torch.testing.assert_close(first["state"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_mixed_precision_trains_the_same_on_every_rank(tmp_path: Path) -> None:
    """Autocast and GradScaler give half-precision outputs, a falling loss and equal parameters."""
    first, second = run_two(programs.train_with_amp, tmp_path)
    assert first["dtype"] == "torch.float16"
    assert first["losses"] == second["losses"]
    first_batch = first["losses"][:: programs.STEPS]
    assert first_batch[-1] < first_batch[0]
    assert first["scale"] == second["scale"]
    for name, value in first["parameters"].items():
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, second["parameters"][name]), name


def test_no_sync_delays_the_gradient_exchange_until_the_last_batch(tmp_path: Path) -> None:
    """Rank r has r + 1 alone; after the synchronised batch both have the mean of 1 and 2, plus 1."""
    first, second = run_two(programs.accumulate, tmp_path)
    assert first["before"] == [[1.0] * 4]
    assert second["before"] == [[2.0] * 4]
    assert first["after"] == second["after"] == [[2.5] * 4]


# The exit.


def test_launch_ends_without_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither NCCL nor torch warns when the ranks exit."""
    ddpsafe.launch(programs.look_around, start_method="forkserver", console="all")
    assert capfd.readouterr() == ("", "")


def test_own_setup_and_cleanup_end_without_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that destroys its NCCL group itself while a DDP object is alive exits silently."""
    run_two(programs.train_in_parallel, tmp_path, console="all")
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu("its values")
def test_single_process_ends_without_a_warning(tmp_path: Path) -> None:
    """Without a launcher, `process_group` takes the first GPU, and the interpreter exits silently."""
    run = scripts.run(
        tmp_path,
        """
        import torch
        import ddpsafe

        with ddpsafe.process_group() as ctx:
            model = ctx.wrap(torch.nn.Linear(2, 2))
            model(torch.ones(1, 2, device=ctx.device)).sum().backward()
            print(ctx.device, ctx.backend)
        """,
    )
    assert run.err == ""
    assert run.lines() == ["cuda:0 nccl"]


@pytest.mark.gpu("its values")
def test_the_driver_reports_the_state_of_a_gpu() -> None:
    """The report has clocks, memory and throttling of the GPU that a process computes on."""
    pytest.importorskip("pynvml")
    torch.ones(1 << 20, device="cuda").sum().item()
    use = _gpus.read_use()
    (reading, *_) = next(iter(use.values())).gpus  # in a container the pids may be the host's
    assert reading.sm_mhz
    assert reading.max_sm_mhz
    assert 0 < reading.sm_mhz <= reading.max_sm_mhz
    assert reading.slowdowns is not None
    assert f"of {reading.max_sm_mhz} MHz" in str(reading)
