"""A launch computes what the hand-written form computes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from equality_programs import SEED, train_by_hand, train_launched

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def parameters_by_hand(
    folder: Path, world_size: int, *, accumulate: bool
) -> dict[str, torch.Tensor]:
    """Train under plain ``torch.multiprocessing.spawn``; return rank 0's parameters."""
    import torch
    import torch.multiprocessing as mp

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    mp.spawn(train_by_hand, args=(world_size, port, folder, accumulate), nprocs=world_size)
    parameters: dict[str, torch.Tensor] = torch.load(folder / "by-hand-0.pt", weights_only=True)
    return parameters


@pytest.mark.parametrize("accumulate", [False, True], ids=["every step", "no_sync"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_equal_those_of_the_hand_written_form_bit_for_bit(
    tmp_path: Path,
    world_size: int,
    accumulate: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Same seeds, same data, same number of threads: same bits, on every rank."""
    import torch

    expected = parameters_by_hand(tmp_path, world_size, accumulate=accumulate)
    result = ddpsafe.launch(
        train_launched,
        args=(accumulate,),
        nproc_per_node=world_size,
        seed=SEED,
        env={"OMP_NUM_THREADS": "1"},
        start_method="forkserver",
    )
    for rank, parameters in result.values.items():
        assert parameters.keys() == expected.keys()
        for name, tensor in parameters.items():
            assert torch.equal(tensor, expected[name]), f"rank {rank}: {name}"
