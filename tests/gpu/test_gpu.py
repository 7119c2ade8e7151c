"""What only a GPU can show: devices, NCCL, AMP, shutdown."""

from __future__ import annotations

import gpu_programs as programs
import pytest

import ddpsafe

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPUS = torch.cuda.device_count()


def test_every_rank_has_a_gpu_of_its_own() -> None:
    """``nproc_per_node="gpu"`` starts one rank for each GPU, with NCCL and the device current."""
    result = ddpsafe.launch(programs.describe_device, nproc_per_node="gpu")
    assert len(result.values) == GPUS
    for rank, seen in result.values.items():
        assert seen["device"] == f"cuda:{rank}"
        assert seen["current"] == rank
        assert seen["backend"] == "nccl"
        assert seen["sum"] == sum(range(1, GPUS + 1))
        assert seen["mean"] == pytest.approx((GPUS - 1) / 2)


def test_more_ranks_than_gpus_are_refused_before_anything_starts() -> None:
    """NCCL would refuse two ranks on one device later, with a message about a duplicate GPU."""
    with pytest.raises(ddpsafe.ConfigError, match="GPUs"):
        ddpsafe.launch(programs.describe_device, nproc_per_node=GPUS + 1, backend="nccl")


@pytest.mark.parametrize("option", ["plain", "amp", "no_sync", "sync_batchnorm"])
def test_a_step_leaves_the_same_parameters_on_every_rank(option: str) -> None:
    """Gradients are averaged under autocast, accumulation and SyncBatchNorm too."""
    result = ddpsafe.launch(programs.step, args=({option: True},), nproc_per_node="gpu")
    first = result.values[0]
    for parameters in result.values.values():
        for name, tensor in parameters.items():
            if "running" not in name:  # BatchNorm's averages differ by rank, without SyncBatchNorm
                assert torch.equal(tensor, first[name]), name


def test_a_step_equals_that_of_one_process_on_the_whole_batch() -> None:
    """With SyncBatchNorm, N ranks on shares of a batch do what one does on all of it."""
    options = {"sync_batchnorm": True}
    whole = ddpsafe.launch(programs.step, args=(options,), nproc_per_node=1, backend="nccl")
    shared = ddpsafe.launch(programs.step, args=(options,), nproc_per_node="gpu")
    for name, tensor in whole.values[0].items():
        torch.testing.assert_close(shared.values[0][name], tensor, rtol=1e-4, atol=1e-5)


def test_two_ranks_on_one_gpu_meet_when_they_pass_for_two_hosts() -> None:
    """The launcher's rendezvous carries NCCL's own: checked where only one GPU can be had."""
    ddpsafe.spawn(programs.reduce_on_one_gpu, args=(2,), nprocs=2)


def test_a_tensor_of_a_gpu_comes_back_on_the_cpu() -> None:
    """The rank's device memory dies with the rank."""
    result = ddpsafe.launch(programs.return_device_tensor, nproc_per_node=1, backend="nccl")
    assert result.values[0].device.type == "cpu"


def test_launch_works_after_cuda_was_initialised_in_the_caller(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ranks do not inherit the caller's CUDA context, and the shutdown warns of nothing."""
    torch.ones(1, device="cuda")
    for start_method in ("spawn", "forkserver"):
        ddpsafe.launch(
            programs.describe_device, nproc_per_node=1, backend="nccl", start_method=start_method
        )
    assert "destroy_process_group" not in capfd.readouterr().err
