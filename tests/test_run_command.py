"""``ddpsafe run``: a script's ranks, as torchrun would start them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import scripts

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = """
import os, sys
import torch, torch.distributed as dist
from beside import SCALE

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1) * SCALE
    dist.all_reduce(total)
    with open(f"said-{os.environ['RANK']}", "w") as file:
        print(total.item(), *sys.argv[1:], os.environ["LOCAL_WORLD_SIZE"], file=file)
    dist.destroy_process_group()
    sys.exit(0)
"""

OURS = """
import ddpsafe

def train(ctx):
    return ctx.reduce_mean(float(ctx.rank))

if __name__ == "__main__":
    print(ddpsafe.launch(train).values)
"""


def run(folder: Path, *arguments: str) -> scripts.Run:
    """Run the command in `folder`."""
    return scripts.Script(["-m", "ddpsafe", "run", *arguments], folder=folder).end()


def test_plain_script_meets_its_ranks_and_sees_its_own_arguments(tmp_path: Path) -> None:
    """It imports what lies beside it, and ``sys.exit(0)`` is a good end."""
    scripts.write(tmp_path, "sub/train.py", PLAIN)
    scripts.write(tmp_path, "sub/beside.py", "SCALE = 3")
    done = run(tmp_path, "--nproc-per-node", "2", "sub/train.py", "--lr", "1", "--help")
    assert done.code == 0, done.err
    said = [(tmp_path / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert said == ["6.0 --lr 1 --help 2\n"] * 2


LEAVES_EARLY = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5):
    if os.environ["RANK"] == "1" and step == 2:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))
"""


def test_a_script_that_exits_with_0_too_early_is_named_with_the_line(tmp_path: Path) -> None:
    """The others still wait for it, so the good exit status is where it goes wrong."""
    scripts.write(tmp_path, "train.py", LEAVES_EARLY)
    done = run(tmp_path, "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert done.code == 1
    assert "RankLeftEarlyError: rank 1 (world_size 2) returned early" in done.err
    assert f"sys.exit(0) was called at {tmp_path / 'train.py'}:5 in <module>" in done.err


def test_module_with_launch_inside_attaches(tmp_path: Path) -> None:
    """``launch()`` in a rank starts nothing."""
    scripts.write(tmp_path, "package/train.py", OURS)
    done = run(tmp_path, "--nproc-per-node", "1", "-m", "package.train")
    assert done.lines() == ["{0: 0.0}"]


def test_exit_code_of_a_rank_is_that_of_the_command(tmp_path: Path) -> None:
    """The rank and the line are named, and no frame of the command line hides them."""
    source = "import sys\nsys.exit(7)\n"
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    kept = str(tmp_path / "kept")
    done = run(tmp_path, "--nproc-per-node", "1", "--run-dir", kept, "train.py")
    assert done.code == 7
    assert "rank 0 (world_size 1) exited with code 7" in done.err
    assert "train.py:2" in done.err
    assert "cli.py" not in done.err


def test_module_that_is_not_there_starts_no_rank(tmp_path: Path) -> None:
    """As with a script that is not there, it is wrong usage."""
    done = run(tmp_path, "--nproc-per-node", "2", "-m", "nosuchmod.train")
    assert (done.code, done.out) == (2, "")
    assert "There is no module 'nosuchmod'" in done.err
    assert "Traceback" not in done.err


# A script that torchrun runs: no main guard, workers with a lambda.
UNGUARDED = """
import multiprocessing, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(float(index))

method = multiprocessing.get_start_method(allow_none=True)
dist.init_process_group("gloo")
numbers = Numbers()
for _ in range(2):
    sampler = DistributedSampler(numbers, shuffle=False)
    loader = DataLoader(numbers, 2, sampler=sampler, num_workers=2, collate_fn=lambda b: sum(b))
    total = sum(loader)
    dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total.item(), method)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_of_a_script_start_as_under_torchrun(tmp_path: Path, start_method: str) -> None:
    """Its start method is Python's default, whatever starts the ranks themselves."""
    scripts.write(tmp_path, "train.py", UNGUARDED)
    done = run(tmp_path, "--nproc-per-node", "2", "--start-method", start_method, "train.py")
    assert done.lines() == ["28.0 None"]
