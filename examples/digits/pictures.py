"""The pictures that a run draws: its learning curves, and the images that it misreads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from digits_data import Digits
    from matplotlib.figure import Figure


class Epoch(NamedTuple):
    """The result of one epoch, over all ranks."""

    loss: float
    accuracy: float


def new_figure(width: float, height: float) -> Figure:
    """Make a figure that needs no screen; sizes in inches."""
    # Only rank 0 draws, so only rank 0 pays half a second for the import.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def draw_curves(history: Sequence[Epoch], path: Path, resumed: Sequence[int] = ()) -> None:
    """Draw loss and test accuracy over the epochs, and mark where the training resumed."""
    figure = new_figure(6.4, 3.2)
    epochs = range(1, len(history) + 1)
    left, right = figure.subplots(1, 2)
    left.plot(epochs, [epoch.loss for epoch in history], "o-", color="tab:blue", markersize=3)
    left.set(title="training loss", xlabel="epoch", yscale="log")
    right.plot(
        epochs, [100 * epoch.accuracy for epoch in history], "o-", color="tab:green", markersize=3
    )
    right.set(title="test accuracy, percent", xlabel="epoch")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        for epoch in resumed:
            axes.axvline(epoch + 0.5, color="tab:red", linestyle="--", linewidth=1)
    figure.savefig(path)


def draw_misread(digits: Digits, misread: dict[int, int], path: Path) -> None:
    """Draw up to 18 misread images, each with its label and the reading."""
    shown = sorted(misread.items())[:18]
    rows = max(1, math.ceil(len(shown) / 6))
    figure = new_figure(6.4, 0.4 + 1.3 * rows)
    figure.suptitle(f"{len(misread)} of {len(digits)} test images misread")
    for axes in figure.subplots(rows, 6).flat:
        axes.axis("off")
    for axes, (index, reading) in zip(figure.axes, shown, strict=False):
        axes.imshow(digits.images[index, 0], cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(f"{digits.labels[index]}, read as {reading}", fontsize=9)
    figure.savefig(path)
