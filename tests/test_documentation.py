"""The examples of the documentation run as a reader would run them: as scripts, from files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

CHECKOUT: Final = Path(__file__).parents[1]
PAGES: Final = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<note>not run: .+|new script) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Script(NamedTuple):
    """What a reader would put into one file."""

    page: Path
    number: int
    text: str


def scripts_of(page: Path) -> list[Script]:
    """Join the Python blocks of a page, in order, up to the next ``<!-- new script -->``."""
    texts: list[str] = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        note = block["note"] or ""
        if note.startswith("not run"):
            continue
        if note == "new script" or not texts:
            texts.append("")
        texts[-1] += block["code"]
    return [Script(page, number, text) for number, text in enumerate(texts, start=1)]


SCRIPTS: Final = [script for page in PAGES for script in scripts_of(page)]


@pytest.mark.parametrize(
    "script",
    SCRIPTS,
    ids=[f"{script.page.relative_to(CHECKOUT)}-{script.number}" for script in SCRIPTS],
)
def test_examples_of_a_page_run_as_one_script(script: Script, tmp_path: Path) -> None:
    """What a page shows can be pasted into a file and run, in an empty folder."""
    file = tmp_path / "script.py"
    file.write_text(script.text, encoding="utf-8")
    command = [sys.executable, str(file)]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert run.returncode == 0, f"{script.page}:\n{script.text}\n{run.stdout}\n{run.stderr}"


def test_readme_commands_come_first_and_one_per_block() -> None:
    """The first two bash blocks run the main job and the tests; CI pastes the second one."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    demo, tests = re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[:2]
    assert demo.count("\n") == tests.count("\n") == 1
    assert "examples/digits/train.py" in demo
    assert "nox -s tests" in tests
    assert "-c constraints.txt" in demo
    assert "-c constraints.txt" in tests


def test_every_promise_names_a_test_that_exists() -> None:
    """Each row of the guarantees ends with the tests that hold it."""
    page = (CHECKOUT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row)
        assert named, row
        assert [name for name in named if not (CHECKOUT / name).exists()] == []
