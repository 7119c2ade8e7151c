"""Every code has a page, a check that reports it and a test that provokes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import scripts
from source_tree import CHECKOUT, PACKAGE, python_files

from ddpsafe.cli import main
from ddpsafe.doctor._findings import find_pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES: Final = find_pages()
CODE: Final = re.compile(r"DS-[A-Z]+-\d{3}")


def codes_in(*files: Path) -> set[str]:
    """Return the codes that some files contain."""
    return {code for file in files for code in CODE.findall(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("code", PAGES)
def test_page_has_cause_confirmation_and_fix(code: str) -> None:
    """Each page has its code, a title and the three sections a reader needs, none empty."""
    text = PAGES[code].read_text(encoding="utf-8")
    assert re.match(rf"# {code}: \S.+\n", text)
    sections = dict(section.split("\n", 1) for section in text.split("\n## ")[1:])
    assert list(sections) == ["Cause", "How to confirm", "Fix"]
    assert all(section.strip() for section in sections.values())


def test_every_code_of_a_check_has_a_page_and_every_page_such_a_code() -> None:
    """No message refers to a page that does not exist, and no page is about nothing."""
    assert codes_in(*python_files(PACKAGE)) == set(PAGES)


def test_every_code_is_provoked_by_a_test() -> None:
    """A check that has never reported anything is untested."""
    others = [file for file in python_files(CHECKOUT / "tests") if file != Path(__file__)]
    assert set(PAGES) - codes_in(*others) == set()


def test_installed_package_includes_the_pages(tmp_path: Path) -> None:
    """In the layout of the wheel, away from the checkout, the command prints a page."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in wheel["packages"]:
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    for source, target in wheel["force-include"].items():
        shutil.copytree(CHECKOUT / source, tmp_path / target)
    done = subprocess.run(
        [sys.executable, "-m", "ddpsafe", "doctor", "--explain", "ds-net-001"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=scripts.LIMIT_S,
    )
    assert done.stdout.startswith("# DS-NET-001: An interface variable names no interface")
    assert "## How to confirm" in done.stdout


def test_unknown_code_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped code gets the closest one, with the exit code of wrong usage."""
    assert main(["doctor", "--explain", "DS-NET-0001"]) == 2
    assert "DS-NET-001" in capsys.readouterr().err
