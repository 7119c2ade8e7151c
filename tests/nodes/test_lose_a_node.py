"""The tutorial about losing a node, as its readers follow it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import scripts
from nodes_kit import Launcher, require_nothing_left

if TYPE_CHECKING:
    from hosts import Network

pytestmark = pytest.mark.root

CHECKOUT: Final = Path(__file__).parents[2]
TRAINING_S: Final = 330
"""Twelve epochs take 10 s, or minutes on an overloaded machine."""

PAGE: Final = CHECKOUT / "docs" / "tutorial" / "lose-a-node.md"


def command_of_the_page(folder: Path) -> list[str]:
    """Return the command of the page, which is the same for the hosts h0, h1 and h2."""
    found = set(re.findall(r"^ddpsafe run .*$", PAGE.read_text(), re.MULTILINE))
    assert len(found) == 1, "the replacement is started with the command of the start"
    text = found.pop().replace("gpu-01", "h0")
    text = text.replace("examples/", f"{CHECKOUT}/examples/")
    words = shlex.split(text)[1:]
    return ["-m", "ddpsafe", *words, "--out", str(folder), "--data", f"{folder}/d"]


@pytest.mark.soak  # test_replacement.py tests the parts, and tests/docs the training
@pytest.mark.timeout(480)  # two complete trainings
def test_training_continues_after_the_loss_of_a_host(own_network: Network, tmp_path: Path) -> None:
    """One of two hosts loses power in mid-epoch; a third replaces it with the same command."""
    pytest.importorskip("sklearn", reason="the examples need pip install 'ddpsafe[examples]'")
    command = command_of_the_page(tmp_path)
    first, second = (Launcher(own_network[node], command, {}) for node in (0, 1))
    checkpoints = tmp_path / "checkpoints"

    def said() -> str:
        return "\n".join(line for _, line in first.lines) + first.err

    scripts.wait_until(
        lambda: checkpoints.exists() and len(list(checkpoints.iterdir())) >= 2,
        otherwise=lambda: said()[-2000:] + second.err[-1000:],
    )
    own_network[1].power_off()
    lost = r"node 1 \('h1', rank 1 of world_size 2\) was lost, attempt 1 of 4"
    scripts.wait_until(lambda: re.search(lost, said()), otherwise=said)
    third = Launcher(own_network[2], command, {})
    assert first.end(TRAINING_S) == 0, said()[-3000:]
    assert third.end() == 0, third.err[-3000:]
    epochs = [int(number) for number in re.findall(r"ranks \[.*\], (\d+) epochs done", said())]
    assert epochs[0] == 0
    assert len(epochs) == 2
    assert 1 <= epochs[1] < 12
    (accuracy,) = re.findall(r"test accuracy ([0-9.]+) \(world_size 2\)", said())
    assert float(accuracy) > 0.9
    assert (tmp_path / "curves.png").exists()
    require_nothing_left(own_network, besides=[1])
