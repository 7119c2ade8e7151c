"""A launch computes the same as the hand-written form, bit for bit."""

from __future__ import annotations

from pathlib import Path

import equality_programs as programs
import pytest
import torch
from forked_ranks import free_port

import ddpsafe

State = dict[str, torch.Tensor]


@pytest.mark.full(but=["2-1"])
@pytest.mark.parametrize(
    ("nproc", "accumulate"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.soak), (2, 3)]
)
def test_launch_trains_the_same_weights_as_the_hand_written_form(
    nproc: int, accumulate: int, tmp_path: Path
) -> None:
    """Both use the same seeds, DistributedSampler, BatchNorm, Dropout and Adam, also with no_sync.

    After two epochs every parameter and buffer of every rank is identical to the last bit.
    """
    expected = train_by_hand(nproc, accumulate, tmp_path)
    values = ddpsafe.launch(
        programs.with_ddpsafe,
        (accumulate,),
        nproc_per_node=nproc,
        backend="gloo",
        start_method="forkserver",
    ).values
    untrained = programs.network().state_dict()
    for rank in range(nproc):
        assert differing(values[rank], expected[rank]) == []
        assert differing(values[rank], untrained) == sorted(untrained)


def train_by_hand(nproc: int, accumulate: int, folder: Path) -> list[State]:
    """Run the hand-written form under plain torch.multiprocessing."""
    args = (nproc, free_port(), accumulate, folder)
    torch.multiprocessing.start_processes(
        programs.by_hand, args=args, nprocs=nproc, start_method="forkserver"
    )
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(nproc)]


def differing(found: State, expected: State) -> list[str]:
    """Return the names of the tensors that are not identical to the last bit."""
    assert found.keys() == expected.keys()
    return sorted(name for name in found if not torch.equal(found[name], expected[name]))
