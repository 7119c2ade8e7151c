"""Learn which of two numbers is larger, under Slurm; rank 0 evaluates while the others wait.

Start it with ``srun python``, one task for each GPU.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def pairs(count: int, seed: int) -> TensorDataset:
    """Sample pairs of numbers, each labelled with the index of the larger one."""
    numbers = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, numbers.argmax(dim=1))


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of ``inputs``, shape (n, 2), that the model gets right."""
    return (model(inputs).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    """Train, and evaluate on rank 0 after every epoch."""
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    gpu = torch.cuda.is_available()
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    device = torch.device(f"cuda:{os.environ['SLURM_LOCALID']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=world_size)
    train_set, test_set = pairs(1024, seed=0), pairs(500, seed=1)
    sampler = DistributedSampler(train_set)
    batches = DataLoader(train_set, batch_size=32, sampler=sampler, pin_memory=gpu)
    model = DistributedDataParallel(nn.Linear(2, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, labels in batches:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            test_inputs, test_labels = (tensor.to(device) for tensor in test_set.tensors)
            print(f"epoch {epoch}: accuracy {accuracy(model.module, test_inputs, test_labels):.3f}")
        dist.barrier()


if __name__ == "__main__":
    main()
