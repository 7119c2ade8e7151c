"""A small convolutional network, one epoch of training, and what it misreads.

Nothing in this file knows how many ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from digits_data import Digits
    from torch import Tensor
    from torch.optim import Optimizer


class DigitNet(nn.Sequential):
    """Two convolutions and a linear layer: images (n, 1, 8, 8) to scores (n, 10).

    GroupNorm has no buffers, so the copies on all ranks are equal whenever they evaluate.
    BatchNorm's running averages differ from rank to rank between two training steps.
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
def find_misread(
    model: nn.Module, digits: Digits, indices: Sequence[int], device: torch.device
) -> dict[int, int]:
    """Read some of the images.

    Returns:
        What the model took an image for, by the image's index, where that is wrong.
    """
    model.eval()
    scores = model(digits.images[list(indices)].to(device))
    readings = scores.argmax(dim=1).tolist()
    truths = digits.labels[list(indices)].tolist()
    return {
        index: reading
        for index, reading, truth in zip(indices, readings, truths, strict=True)
        if reading != truth
    }
