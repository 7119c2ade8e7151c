"""Which rank gets which GPU, on a machine that has one: each test has a CPU counterpart."""

from __future__ import annotations

from pathlib import Path

import forked_ranks
import gpu_programs as programs
import pytest
import scripts
import torch
from forked_ranks import by_hand, free_port

import ddpsafe
from ddpsafe import _gpus

pytestmark = pytest.mark.gpu


HIDDEN = """
import os, torch
from ddpsafe import _gpus

build, has_driver = _gpus.read_build(), _gpus.may_have_driver()
for visible in (None, "", " ", "-1", " -1", "NoDevFiles", "0", "-0", "0,0", "x", "GPU-0", "MIG-0"):
    os.environ.pop(_gpus.VISIBLE, None)
    if visible is not None:
        os.environ[_gpus.VISIBLE] = visible
    if _gpus.sees_none(build, visible, has_driver=has_driver):
        print(repr(visible), torch.cuda.device_count())
"""


@pytest.mark.gpu("its values")
def test_torch_sees_no_gpu_where_the_launcher_sees_none(tmp_path: Path) -> None:
    """The launcher decides this without asking torch."""
    done = scripts.run(tmp_path, HIDDEN)
    assert done.code == 0, done.err
    assert {line.rsplit(" ", 1)[1] for line in done.lines()} <= {"0"}
    assert not any(line.startswith("None ") for line in done.lines())


def test_spawn_leaves_cuda_to_the_script(tmp_path: Path) -> None:
    """CUDA is not initialised when the function starts, and the script's CUDA_VISIBLE_DEVICES wins."""
    ddpsafe.spawn(programs.look_before_cuda, args=(tmp_path,), start_method="forkserver")
    assert (tmp_path / "rank-0").read_text() == "False cuda:0 1"


def test_spawn_with_gloo_opens_no_gpu(tmp_path: Path) -> None:
    """There is no CUDA context, and no device file is open."""
    ddpsafe.spawn(
        programs.compute_on_the_cpu, args=(tmp_path,), nprocs=2, start_method="forkserver"
    )
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["False"] * 2


@pytest.mark.gpu("its values")
def test_two_ranks_that_see_one_gpu_are_refused(tmp_path: Path) -> None:
    """Each rank sees it as its only one, but their UUIDs are equal."""
    port = free_port()
    envs = [by_hand(rank, 2, port) | {_gpus.VISIBLE: "0"} for rank in range(2)]
    for rank in forked_ranks.run(programs.join_as_told, envs, folder=tmp_path):
        assert isinstance(rank.error, ddpsafe.ConfigError)
        assert "would share GPU-" in str(rank.error)


@pytest.mark.gpu("its values")
def test_one_visible_gpu_for_each_rank_works(tmp_path: Path) -> None:
    """As with ``srun --gpus-per-task=1``: LOCAL_RANK is 1, and the GPU is cuda:0."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    port = free_port()
    envs = [by_hand(rank, 2, port) | {_gpus.VISIBLE: str(rank)} for rank in range(2)]
    ended = forked_ranks.run(programs.join_as_told, envs, folder=tmp_path)
    assert forked_ranks.values(ended) == ["cuda:0 16.0"] * 2


def test_gpu_can_be_selected_by_its_uuid_in_env(tmp_path: Path) -> None:
    """``env={"CUDA_VISIBLE_DEVICES": "GPU-…"}`` counts as one GPU, which is the rank's cuda:0."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    values = ddpsafe.launch(
        programs.compute, env={_gpus.VISIBLE: uuid}, start_method="forkserver", run_dir=tmp_path
    ).values
    assert values == {0: ("cuda:0", 3.0)}


@pytest.mark.gpu("its values")
def test_fork_server_opens_no_gpu(tmp_path: Path) -> None:
    """Two launches from one server compute on the GPU, although torch was loaded before the fork."""
    for _ in range(2):
        values = ddpsafe.launch(
            programs.compute, nproc_per_node=1, start_method="forkserver", run_dir=tmp_path
        ).values
        assert values == {0: ("cuda:0", 3.0)}
