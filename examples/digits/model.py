"""A small convolutional network, one epoch of training, and its right and wrong readings.

Nothing in this file knows how many ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer


class DigitNet(nn.Sequential):
    """Two convolutions and a linear layer: images (n, 1, 8, 8) to scores (n, 10).

    GroupNorm has no buffers, so all ranks evaluate with equal copies of the model.
    BatchNorm's running averages differ between ranks after a training step.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.4),
            nn.Linear(32 * 4 * 4, 10),
        )


def train_epoch(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    device: torch.device,
) -> float:
    """Train on every batch once.

    Returns:
        The mean of the batches' losses.
    """
    model.train()
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def read_digits(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> Tensor:
    """Read the images of every batch.

    Returns:
        The digit that the model reads in each image, shape (count,), int64.
    """
    model.eval()
    return torch.cat([model(images.to(device)).argmax(dim=1).cpu() for images, _ in batches])


def find_misread(readings: Tensor, truths: Tensor) -> dict[int, int]:
    """Return the wrong readings, by the index of the image."""
    wrong = (readings != truths).nonzero().flatten().tolist()
    return {index: int(readings[index]) for index in wrong}
