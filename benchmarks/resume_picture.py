"""Draws docs/how-to/img/resume-data.svg from a run of the script in docs/how-to/resume-data.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import matplotlib as mpl
import matplotlib.pyplot as plt

CHECKOUT: Final = Path(__file__).parents[1]
PAGE: Final = CHECKOUT / "docs" / "how-to" / "resume-data.md"
PICTURE: Final = PAGE.parent / "img" / "resume-data.svg"
COLOURS: Final = ("tab:blue", "tab:orange", "tab:green")


def run_page(folder: Path) -> list[tuple[int, list[list[int]]]]:
    """Run the page's script; return (epoch, samples by rank) of each step."""
    script = folder / "resume.py"
    script.write_text(PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0])
    found = folder / "history.json"
    subprocess.run(
        [sys.executable, str(script)], check=True, env={**os.environ, "PICTURE_DATA": str(found)}
    )
    history: list[tuple[int, list[list[int]]]] = json.loads(found.read_text())
    return history


def main() -> None:
    """Draw epoch 1."""
    with tempfile.TemporaryDirectory() as folder:
        history = [ranks for epoch, ranks in run_page(Path(folder)) if epoch == 1]
    mpl.rcParams["svg.hashsalt"] = "resume-data"
    figure, axes = plt.subplots(figsize=(8, 3))
    for step, ranks in enumerate(history):
        for rank, samples in enumerate(ranks):
            label = f"rank {rank}" if step == len(history) - 1 else None
            axes.scatter(samples, [step] * len(samples), s=14, color=COLOURS[rank], label=label)
    before = sum(len(ranks) == 2 for ranks in history)
    axes.axhline(before - 0.5, color="tab:red", linestyle="--")
    axes.text(116, before - 0.5, "rank 1 killed;\n3 ranks resume", color="tab:red", va="center")
    axes.set(xlabel="sample", ylabel="step", title="Epoch 1: who read which sample, and when")
    axes.set_yticks(range(len(history)))
    axes.invert_yaxis()
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
