"""Draws the pictures of docs/how-to/watch.md, light and dark: a ``ddpsafe status`` screen, a report.

A job of four ranks runs, one of them slower than the others; this program queries its status and
draws it as SVG with rich. Then one rank fails in the same job, and Chromium (``apt-get install
chromium-headless-shell``) takes screenshots of its report, as wide as a screen and as a phone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

if TYPE_CHECKING:
    import ddpsafe

CHECKOUT: Final = Path(__file__).parents[1]
IMAGES: Final = CHECKOUT / "docs" / "how-to" / "img"
RANKS: Final = 4
SLOW: Final = 3
SHOWN_AFTER_STEPS: Final = 300
LIMIT_S: Final = 300
COLUMNS: Final = 150


def train(ctx: ddpsafe.RankContext, seen: str) -> None:
    """Make steps, slower ones on one rank; once the status is drawn, rank 1 fails."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while ctx.rank != 1 or not os.path.exists(seen):  # noqa: PTH110 - in each step
        optimizer.zero_grad()
        time.sleep(0.08 if ctx.rank == SLOW else 0.04)
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
    raise ValueError("label 7 is out of range")


def draw_status(run_dir: Path) -> None:
    """Query the running job, and draw its status."""
    command = [sys.executable, "-m", "ddpsafe", "status", str(run_dir)]
    until_s, steps = time.monotonic() + LIMIT_S, 0
    while steps < SHOWN_AFTER_STEPS and time.monotonic() < until_s:
        time.sleep(2)
        asked = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
        ranks = json.loads(asked.stdout)["launches"][0].get("ranks", [])
        steps = min((each["steps"] for each in ranks), default=0)
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = text.replace(str(run_dir), "runs/digits").replace(str(Path(__file__).parent), "project")
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    shown = Text(f"$ ddpsafe status --watch\n{text.rstrip()}", no_wrap=True, overflow="ellipsis")
    shown.highlight_regex(r"(?m)^rank  .*$", "bold")
    shown.highlight_regex(r"(?m)^all others waited.*$", "yellow")
    console.print(shown)
    for name, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", SVG_EXPORT_THEME)):
        drawn = console.export_svg(
            title="ddpsafe status", unique_id=f"status-{name}", theme=theme, clear=False
        )
        # Remove the font that rich would load from the internet.
        drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
        (IMAGES / f"status-{name}.svg").write_text(drawn + "\n", encoding="utf-8")


def main() -> None:
    """Run the job, and draw its status and its report."""
    import ddpsafe

    if "--job" in sys.argv:
        run_dir = sys.argv[-1]
        ddpsafe.launch(
            train, (f"{run_dir}.seen",), nproc_per_node=RANKS, backend="gloo", run_dir=run_dir
        )
        return
    sys.path.insert(0, str(CHECKOUT / "tests" / "kits"))
    from browser import Browser

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "digits")
        job = subprocess.Popen(
            [sys.executable, __file__, "--job", str(run_dir)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            draw_status(run_dir)
        finally:
            Path(f"{run_dir}.seen").touch()
            job.wait()
        page = run_dir / "report.html"
        text = page.read_text(encoding="utf-8")
        text = text.replace(str(run_dir), "runs/digits")
        page.write_text(text.replace(str(Path(__file__).parent), "project"), encoding="utf-8")
        with Browser() as browser:
            for name, width, dark in (
                ("report-light", 1000, False),
                ("report-dark", 1000, True),
                ("report-phone", 390, False),
            ):
                browser.open(page, width=width, dark=dark).screenshot(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
