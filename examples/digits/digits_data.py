"""The UCI handwritten digits on disk, as folders of image files like a real data set."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


def prepare(root: Path) -> None:
    """Write 1,797 images to ``root/{train,test}/<digit>/<number>.png``, once, all or none.

    Every fifth image of each digit is a test image, so the split is the same on every machine.
    """
    if root.exists():
        return
    from sklearn.datasets import load_digits  # slow, and only needed once

    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".unfinished-") as scratch:
        finished = Path(scratch) / root.name
        digits = load_digits()
        write_images(finished, digits.images / digits.images.max(), digits.target)
        publish(finished, root)


def write_images(root: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write ``images``, shape (count, height, width), brightness 0 to 1, sorted by label."""
    seen: Counter[int] = Counter()
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        split = "test" if seen[label] % 5 == 0 else "train"
        seen[label] += 1
        path = root / split / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).astype(np.uint8)).save(path)


def publish(finished: Path, root: Path) -> None:
    """Move a finished folder into place, unless another job has already done so."""
    try:
        finished.replace(root)
    except OSError:
        if not root.exists():
            raise


class Digits(Dataset[tuple[Tensor, int]]):
    """The images below ``folder/<digit>/``, in the same order on every rank.

    Attributes:
        images: Brightness from 0 to 1, shape (count, 1, 8, 8), float32.
        labels: The digit in each image, shape (count,), int64.
    """

    def __init__(self, folder: Path) -> None:
        """Read all images: 1,797 of 8 x 8 pixels fit into memory."""
        files = sorted(folder.glob("*/*.png"))
        pixels = np.stack([np.asarray(Image.open(file)) for file in files])
        self.images = torch.from_numpy(pixels).unsqueeze(1).float() / 255
        self.labels = torch.tensor([int(file.parent.name) for file in files])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])
