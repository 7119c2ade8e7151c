"""The examples of the documentation run as a reader would run them: as scripts, from files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final, NamedTuple

import pytest

CHECKOUT: Final = Path(__file__).parents[2]
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
        command, cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False
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


def test_every_path_of_the_contributors_map_exists() -> None:
    """The map "to change X, open Y" and the tour of a failure lead to files that are there."""
    page = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:ddpsafe|tests|docs|benchmarks|examples)/[\w./-]*)`", page)
    assert len(paths) > 40
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []
    loose = [name for name in re.findall(r"`([\w/]+\.py)`", page) if not (CHECKOUT / name).exists()]
    assert loose == []


@pytest.mark.parametrize(
    "page",
    [*sorted(CHECKOUT.glob("*.md")), *sorted((CHECKOUT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(CHECKOUT)),
)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    """README's promises link to the tests that hold them; a test that moved takes its links along."""
    if "_build" in page.parts:
        return
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readmes_promises_are_the_strongest_and_link_their_tests() -> None:
    """Six of them; the rest, with all tests, is in the guarantees."""
    page = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    section = page.partition("## What is guaranteed\n")[2].partition("\n## ")[0]
    promises = [line for line in section.splitlines() if line.startswith("- ")]
    assert len(promises) == 6
    for promise in promises:
        assert re.search(r"\[tests\]\(tests/\w+/test_\w+\.py\)", promise), promise


TUTORIALS: Final = sorted((CHECKOUT / "docs" / "tutorial").glob("*.md"))
INCLUDE: Final = re.compile(
    r"^```{literalinclude} (?P<file>\S+)\n(?P<options>(?::.*\n)*)```$", re.MULTILINE
)


def included(page: Path) -> str:
    """Return the code that a page includes from files, and fail where a marker is not in them."""
    shown = []
    for block in INCLUDE.finditer(page.read_text(encoding="utf-8")):
        text = (page.parent / block["file"]).read_text(encoding="utf-8")
        options = dict(re.findall(r"^:([\w-]+): (.*)$", block["options"], re.MULTILINE))
        start = text.index(options["start-at"])
        end = options.get("end-before")
        shown.append(text[start : text.index(end, start) if end else None])
    return "\n".join(shown)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_explains_what_its_script_has(page: Path) -> None:
    """A list item that begins with a name explains a name of the script that is shown."""
    assert included(page)
    files = [block["file"] for block in INCLUDE.finditer(page.read_text(encoding="utf-8"))]
    code = "".join((page.parent / file).read_text(encoding="utf-8") for file in files)
    names = re.findall(r"^- `([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    assert [name for name in names if name not in code] == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_explains_every_call_of_ddpsafe(page: Path) -> None:
    """What the code of a tutorial takes from ddpsafe, some tutorial has a word on."""
    words = "".join(each.read_text(encoding="utf-8") for each in TUTORIALS)
    used = set(re.findall(r"\bctx\.([a-z_]+)\(|\b(Checkpointer|gather_exact)\b", included(page)))
    assert [name for pair in used for name in pair if name and name not in words] == []


def test_tutorial_shows_what_its_commands_print(tmp_path: Path) -> None:
    """The lines of the first run are those of the script, and breaking it ends as the page says."""
    pytest.importorskip("sklearn", reason="the examples need the extra: ddpsafe[examples]")
    page = (CHECKOUT / "docs" / "tutorial" / "first-run.md").read_text(encoding="utf-8")
    folder = tmp_path / "digits"
    shutil.copytree(CHECKOUT / "examples" / "digits", folder, ignore=shutil.ignore_patterns("out"))
    script = folder / "train.py"
    command = [sys.executable, str(script), "--epochs", "1", "--nproc-per-node", "2"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False
        )

    first = run()
    assert first.returncode == 0, first.stderr
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    numbers = re.compile(r"\d+(?:\.\d+)?")
    assert numbers.sub("N", first.stdout.replace(str(tmp_path), "…/examples")) == numbers.sub(
        "N", shown
    )
    line = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    place = "        for epoch in progress:\n"
    text = script.read_text(encoding="utf-8")
    assert text.count(place) == 1
    script.write_text(text.replace(place, textwrap.indent(line, " " * 8) + place))
    command += ["--out", str(tmp_path / "out")]
    broken = run()
    assert broken.returncode == 1
    told = broken.stderr.partition("RankRaisedError: ")[2]
    assert told.startswith("rank 1 (world_size 2) raised ValueError ")
    assert ": this rank has seen enough" in told.splitlines()[0]
    assert "Logs: " in told
    shutil.rmtree(Path(re.findall(r"Logs: (\S+?/ddpsafe-\w+)", told)[0]))
