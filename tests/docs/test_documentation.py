"""The examples of the documentation run as a reader would run them: as scripts from files."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import textwrap
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import scripts

from ddpsafe.cli import make_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT: Final = Path(__file__).parents[2]
PAGES: Final = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<note>not run: [^\n]+|new script) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Script(NamedTuple):
    """The code that a reader would put into one file."""

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


@pytest.mark.full(
    but=[
        "docs/how-to/doctor.md-1", "docs/how-to/logs.md-1", "docs/how-to/other-launchers.md-1",
        "docs/how-to/services.md-1", "docs/how-to/test.md-1", "docs/reference/api.md-1",
        "docs/reference/config.md-1", "docs/reference/data.md-1", "docs/reference/doctor.md-1",
    ]
)  # fmt: skip
@pytest.mark.parametrize(
    "script",
    SCRIPTS,
    ids=[f"{script.page.relative_to(CHECKOUT)}-{script.number}" for script in SCRIPTS],
)
def test_examples_of_a_page_run_as_one_script(script: Script, tmp_path: Path) -> None:
    """Readers can paste what a page shows into a file and run it in an empty folder.

    README's script runs in a new interpreter, and so do its ranks.
    """
    file = tmp_path / "script.py"
    is_readme = script.page.name == "README.md"
    file.write_text(script.text, encoding="utf-8")
    run = scripts.Script(
        [str(file)], folder=tmp_path, env=scripts.SPAWNING if is_readme else None, fresh=is_readme
    ).end()
    assert run.code == 0, f"{script.page}:\n{script.text}\n{run.out}\n{run.err}"


def test_readme_commands_come_first_and_one_per_block() -> None:
    """The first two bash blocks run the main job and the tests; CI pastes the second one."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    demo, tests = re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[:2]
    assert demo.count("\n") == tests.count("\n") == 1
    assert "examples/digits/train.py" in demo
    assert "nox -s tests" in tests
    assert "-c constraints.txt" in demo
    assert "-c constraints.txt" in tests


PROJECT: Final = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
README: Final = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_no_page_installs_from_an_index_what_is_not_there() -> None:
    """There is no release yet: whoever takes the name first would be installed."""
    commands = [
        (page.name, command)
        for page in PAGES
        for command in re.findall(r"pip install ([^`\n]*)", page.read_text(encoding="utf-8"))
    ]
    named = [each for each in commands if re.search(r"(?<![\w/-])ddpsafe\b(?!-\*|/)", each[1])]
    assert [each for each in named if "--no-index" not in each[1]] == []


def test_readme_gives_the_reasons_before_the_code() -> None:
    """Reasons, twelve lines of code, what a failure looks like, the installation, the promises."""
    why, _, rest = README.partition("```python\n")
    code, _, rest = rest.partition("```\n")
    assert len(why.splitlines()) < 15
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    headings = re.findall(r"^## (.+)$", rest, re.MULTILINE)
    assert headings[:4] == ["What a failure looks like", "Install", "What is guaranteed", "Limits"]


@pytest.mark.recorder
def test_failure_in_readme_is_the_output_of_its_script(tmp_path: Path) -> None:
    """The script with the change that the README describes prints the text that it shows."""
    code = scripts_of(CHECKOUT / "README.md")[0].text
    after = README.partition("## What a failure looks like\n")[2]
    (change,) = re.findall(r"`(range\(.+?\))`,", after)
    assert code.count("range(steps)") == 1
    script = tmp_path / "train.py"
    script.write_text(code.replace("range(steps)", change), encoding="utf-8")
    environment = {"TMPDIR": str(tmp_path)}
    run = scripts.Script([str(script)], folder=tmp_path, env=environment).end()
    assert run.code == 1
    printed = run.err.partition("RankLeftEarlyError: ")[2].splitlines()
    shown = after.partition("```text\n")[2].partition("```")[0].splitlines()

    def plain(line: str) -> str:
        line = re.sub(r"returned early on \S+,", "returned early on HOST,", line)
        line = re.sub(r"at /.+/train.py:\d+", "at train.py", line)
        line = re.sub(r"after \d+\.\d s", "after N s", line)
        line = re.sub(r"number \d+", "number N", line)  # counts DDP's initial collectives too
        return re.sub(r"Logs: \S+", "Logs: …", line)

    assert [plain(line) for line in printed if line] == [plain(line) for line in shown]


def rendered_for_pypi(text: str) -> str:
    """Return the README as the wheel's metadata contains it."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"] == [{"path": "README.md"}]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text.replace("$HFPR_VERSION", PROJECT["project"]["version"])


def test_links_of_readme_work_on_pypi() -> None:
    """No link is relative there, and links into the repository lead to existing files."""
    source = f"{PROJECT['project']['urls']['Source']}/blob/v{PROJECT['project']['version']}/"
    links = re.findall(r"\]\(([^)\s]+)\)", rendered_for_pypi(README))
    assert len(links) > 12
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    inside = [link.removeprefix(source) for link in links if link.startswith(source)]
    assert len(inside) > 12
    assert [link for link in inside if not (CHECKOUT / link.partition("#")[0]).exists()] == []


def test_metadata_links_to_the_documentation() -> None:
    """PyPI shows these links beside the page; those into the repository lead to existing files."""
    urls = PROJECT["project"]["urls"]
    assert {"Documentation", "Source", "Changelog", "Issues"} <= urls.keys()
    files = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/main/" in url]
    assert files
    assert all((CHECKOUT / file).is_file() for file in files)


SHELL: Final = re.compile(r"^```(?:console|sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[list[str]]:
    """Return the commands of a page as words, without prompts, variables, pipes, redirections and comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for block in SHELL.findall(text) for line in block.splitlines()]
    found = []
    for line in lines:
        for part in re.split(r"&&|\|\||[|;]", line.removeprefix("$ ")):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue  # a line of a multi-line shell construct
            if ">" in words:
                del words[words.index(">") :]
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            found.append(words)
    return [words for words in found if words]


COMMANDS: Final = [
    (page, words)
    for page in [*PAGES, CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "SECURITY.md"]
    for words in commands_of(page)
    if Path(words[0]).name in ("ddpsafe", "pip")
]


@pytest.mark.parametrize(
    ("page", "words"),
    COMMANDS,
    ids=[f"{page.relative_to(CHECKOUT)}: {' '.join(words)}" for page, words in COMMANDS],
)
def test_commands_of_a_page_use_existing_options(page: Path, words: list[str]) -> None:
    """A reader can paste them: each option exists, and so does each extra that pip installs."""
    if Path(words[0]).name == "ddpsafe":
        if words[1:] != ["--version"]:
            make_parser().parse_args([word.rstrip("…") or "x" for word in words[1:]])
        return
    extras = {
        name
        for word in words
        for found in re.findall(r"\[(.+?)\]", word)
        for name in found.split(",")
    }
    assert extras <= PROJECT["project"]["optional-dependencies"].keys(), page
    if "-c" in words:
        assert (CHECKOUT / words[words.index("-c") + 1]).is_file()


def test_every_promise_names_an_existing_test() -> None:
    """Each row of the guarantees ends with the tests that check it."""
    page = (CHECKOUT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row)
        assert named, row
        assert [name for name in named if not (CHECKOUT / name).exists()] == []


def is_in_the_quick_session(file: Path) -> bool:
    """Return whether ``nox -s tests`` runs at least one test of a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not {"pytest.mark.full", "pytest.mark.soak"} & set(marks):
                return True
    return False


def test_every_promise_is_tested_by_the_quick_session() -> None:
    """``nox -s full`` runs further variants; no promise is left to it alone."""
    page = (CHECKOUT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    for row in rows:
        paths = [CHECKOUT / name for name in re.findall(r"`(tests/[^`]+)`", row)]
        files = [
            file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))
        ]
        assert any(is_in_the_quick_session(file) for file in files), row


def test_every_path_in_the_contributors_map_exists() -> None:
    """So does every path in the tour of a failure."""
    page = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:ddpsafe|tests|docs|benchmarks|examples)/[\w./-]*)`", page)
    assert len(paths) > 40
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []
    loose = [name for name in re.findall(r"`([\w/]+\.py)`", page) if not (CHECKOUT / name).exists()]
    assert loose == []


def test_links_of_pages_lead_to_existing_files_and_headings() -> None:
    """README's promises link to their tests; a moved test takes its links along."""
    pages = [*sorted(CHECKOUT.glob("*.md")), *sorted((CHECKOUT / "docs").rglob("*.md"))]
    dead, tried = [], 0
    for page in pages:
        if "_build" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            tried += 1
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                dead.append(f"{page.relative_to(CHECKOUT)}: {link}")
    assert tried > 100
    assert not dead, "\n".join(dead)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, as GitHub and MyST spell them."""
    headings = re.findall(r"^#{1,3} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_has_six_promises_that_link_their_tests() -> None:
    """The other promises are in the guarantees."""
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
    """Return the code that a page includes from files; a missing marker raises."""
    shown = []
    for block in INCLUDE.finditer(page.read_text(encoding="utf-8")):
        text = (page.parent / block["file"]).read_text(encoding="utf-8")
        options = dict(re.findall(r"^:([\w-]+): (.*)$", block["options"], re.MULTILINE))
        start = text.index(options["start-at"])
        end = options.get("end-before")
        shown.append(text[start : text.index(end, start) if end else None])
    return "\n".join(shown)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_explains_names_of_its_script(page: Path) -> None:
    """A list item that begins with a name explains a name of the included script.

    The page without a script shows commands, which tests/nodes runs.
    """
    if page.stem == "lose-a-node":
        assert "ddpsafe run --nnodes" in page.read_text(encoding="utf-8")
        return
    assert included(page)
    files = [block["file"] for block in INCLUDE.finditer(page.read_text(encoding="utf-8"))]
    code = "".join((page.parent / file).read_text(encoding="utf-8") for file in files)
    names = re.findall(r"^- `([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    assert [name for name in names if name not in code] == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_explains_every_call_of_ddpsafe(page: Path) -> None:
    """Everything that the code of a tutorial takes from ddpsafe is mentioned in some tutorial."""
    words = "".join(each.read_text(encoding="utf-8") for each in TUTORIALS)
    used = set(re.findall(r"\bctx\.([a-z_]+)\(|\b(Checkpointer|gather_exact)\b", included(page)))
    assert [name for pair in used for name in pair if name and name not in words] == []


@pytest.mark.full
def test_tutorial_shows_the_output_of_its_commands(tmp_path: Path) -> None:
    """The first run prints the lines shown, and the broken script ends as the page describes."""
    pytest.importorskip("sklearn", reason="the examples need the extra: ddpsafe[examples]")
    page = (CHECKOUT / "docs" / "tutorial" / "first-run.md").read_text(encoding="utf-8")
    folder = tmp_path / "digits"
    shutil.copytree(CHECKOUT / "examples" / "digits", folder, ignore=shutil.ignore_patterns("out"))
    script = folder / "train.py"
    arguments = [str(script), "--epochs", "1", "--nproc-per-node", "2"]
    first = scripts.Script(arguments, folder=tmp_path).end()
    assert first.code == 0, first.err
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    numbers = re.compile(r"\d+(?:\.\d+)?")
    assert numbers.sub("N", first.out.replace(str(tmp_path), "…/examples")) == numbers.sub(
        "N", shown
    )
    line = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    place = "        for epoch in progress:\n"
    text = script.read_text(encoding="utf-8")
    assert text.count(place) == 1
    script.write_text(text.replace(place, textwrap.indent(line, " " * 8) + place))
    arguments += ["--out", str(tmp_path / "out")]
    broken = scripts.Script(arguments, folder=tmp_path).end()
    assert broken.code == 1
    printed = broken.err.partition("RankRaisedError: ")[2]
    assert printed.startswith("rank 1 (world_size 2) raised ValueError ")
    assert ": this rank has seen enough" in printed.splitlines()[0]
    assert "Logs: " in printed
    shutil.rmtree(Path(re.findall(r"Logs: (\S+?/ddpsafe-\w+)", printed)[0]))


@pytest.mark.full
def test_tutorial_of_a_kill_shows_what_is_printed(tmp_path: Path) -> None:
    """The lines of a killed rank and of a killed launcher, with the epochs that are done."""
    pytest.importorskip("sklearn", reason="the examples need the extra: ddpsafe[examples]")
    page = (CHECKOUT / "docs" / "tutorial" / "survive-a-kill.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    folder, said = tmp_path / "digits", tmp_path / "said"
    shutil.copytree(CHECKOUT / "examples" / "digits", folder, ignore=shutil.ignore_patterns("out"))
    begun = re.compile(r"ranks \[(\d+), (\d+)\], (\d+) epochs done\n")

    def train(starts: int) -> list[list[int]]:
        """Start the training; return the ranks and epochs of its starts, once there are so many."""
        with said.open("wb") as file, Path(os.devnull).open("rb") as nothing:
            streams = (nothing.fileno(), file.fileno(), file.fileno())
            arguments = [str(folder / "train.py"), "--epochs", "400", "--nproc-per-node", "2"]
            env = {**scripts.clean_environment(), "DDPSAFE_RUN_DIR": str(tmp_path / "run")}
            jobs.append(scripts.start(arguments, folder=tmp_path, streams=streams, environment=env))
        return wait_for(starts)

    def wait_for(starts: int) -> list[list[int]]:
        scripts.wait_until(lambda: len(begun.findall(said.read_text())) == starts)
        return [[*map(int, numbers)] for numbers in begun.findall(said.read_text())]

    jobs: list[Any] = []
    try:
        ((_, rank, epochs),) = train(1)
        assert epochs == 0
        scripts.wait_until(lambda: re.search(r"([5-9]|\d\d)/400", said.read_text()))
        os.kill(rank, signal.SIGKILL)
        (_, other, epochs) = wait_for(2)[1]
        assert epochs >= 5
        printed = said.read_text()
        os.kill(jobs[0].pid, signal.SIGKILL)
        os.kill(other, signal.SIGKILL)
        jobs[0].wait()
        ((*_, again),) = train(1)
        # What only the launcher's memory held is lost with it: at most four epochs, with every=5.
        assert again >= epochs // 5 * 5
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    first, retried, resumed = (re.sub(r"\d+(\.\d+)?", "N", text) for text in shown)
    line = re.search(r"attempt 1 of 10 failed.*\n", printed)
    assert line is not None
    host = line[0].replace(socket.gethostname(), "gpu-07")
    assert re.sub(r"\d+(\.\d+)?", "N", host) == retried.splitlines(keepends=True)[0]
    assert {first, resumed, *retried.splitlines(keepends=True)[1:]} == {
        "ranks [N, N], N epochs done\n"
    }
