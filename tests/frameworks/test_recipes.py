"""The recipes of docs/how-to/frameworks.md, each run as the page describes, with two ranks.

The libraries are large: ``nox -s frameworks`` installs them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

import machine
import pytest
import scripts

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "frameworks.md"
LIMIT_S: Final = machine.hang_limit(200.0)

NEEDS: Final[dict[str, str]] = {
    "hf.py": "transformers",
    "accelerated.py": "accelerate",
    "lit.py": "lightning",
    "fabric.py": "lightning",
    "graphs.py": "torch_geometric",
    "configured.py": "hydra",
    "rays.py": "ray",
    "tasks.py": "distributed",
}
"""The package that a recipe needs besides torch."""


class Recipe(NamedTuple):
    """One recipe of the page: its file, its command and the program."""

    name: str
    command: str
    text: str


def read_recipes() -> list[Recipe]:
    """Return the recipes of the page, which begin with a comment that has their name and command."""
    blocks = re.findall(r"```python\n(# (\S+\.py): ([^,\n]+).*?)```", PAGE.read_text(), re.DOTALL)
    return [Recipe(name, command.strip(), text) for text, name, command in blocks]


RECIPES: Final = read_recipes()

OF_EXTRA: Final = pytest.mark.extra("frameworks")


def test_every_block_of_the_page_is_a_recipe() -> None:
    """A differently spelled first comment would silently drop a recipe."""
    assert PAGE.read_text().count("```python") == len(RECIPES) == 11


@pytest.mark.full(but=["reference.py"])
@pytest.mark.timeout(LIMIT_S + 40)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=OF_EXTRA if recipe.name in NEEDS else ())
        for recipe in RECIPES
    ],
)
def test_recipe_runs_in_two_ranks(tmp_path: Path, recipe: Recipe) -> None:
    """Both ranks train in one group, and the command succeeds."""
    package = NEEDS.get(recipe.name)
    scripts.write(tmp_path, recipe.name, recipe.text)
    program, *arguments = shlex.split(recipe.command)
    ours = ["-m", "ddpsafe"] if program == "ddpsafe" else []
    # Larger libraries may complain that they run in a forked process.
    fresh = package not in {None, "accelerate"}
    env = {} if fresh else scripts.FORKING
    done = scripts.Script([*ours, *arguments], folder=tmp_path, env=env, fresh=fresh).end(LIMIT_S)
    if recipe.name == "rays.py" and "timed out during startup" in done.err:
        pytest.skip("Ray itself did not start within its 30 s on this machine")
    assert done.code == 0, done.err[-3000:]
    steps = dict(re.findall(r"rank (\d) of 2 steps (\d+)", done.out))
    assert sorted(steps) == ["0", "1"], done.out
    assert steps["0"] == steps["1"]
    assert int(steps["0"]) >= 4


@OF_EXTRA
def test_a_daemonic_worker_of_dask_is_refused_with_the_line_to_add(tmp_path: Path) -> None:
    """Without that line of the recipe nothing starts, and the message contains it."""
    (recipe,) = [each for each in RECIPES if each.name == "tasks.py"]
    line = re.search(r"^.*distributed\.worker\.daemon.*\n", recipe.text, re.MULTILINE)
    assert line is not None
    path = scripts.write(tmp_path, recipe.name, recipe.text.replace(line[0], ""))
    run = scripts.Script([str(path)], folder=tmp_path).end()
    assert run.code != 0
    assert "ConfigError" in run.err
    assert "distributed.worker.daemon" in run.err
