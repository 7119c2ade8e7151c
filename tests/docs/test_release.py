"""The parts of a release are consistent."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import pytest
from source_tree import CHECKOUT

import ddpsafe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")

GITHUB: Final = CHECKOUT / ".github"
PIN: Final = re.compile(r"^([\w.-]+)==([\w.+!]+)", re.MULTILINE)

pytestmark = pytest.mark.skipif(not GITHUB.is_dir(), reason="of the repository, not of an sdist")


def pins_of(name: str) -> dict[str, set[str]]:
    """Return the versions that a requirements file pins, by package."""
    text = (CHECKOUT / name).read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for package, version in PIN.findall(text):
        found.setdefault(re.sub(r"[-_.]+", "-", package).lower(), set()).add(version)
    return found


def locked_by_hash(name: str, *, at_least: int) -> set[str]:
    """Return the packages of a lock file; each needs a hash, the tested version and no URL."""
    text = (CHECKOUT / name).read_text(encoding="utf-8")
    assert "://" not in text
    for block in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in block, block
    locked, tested = pins_of(name), pins_of("constraints.txt")
    shared = locked.keys() & tested.keys()
    assert len(shared) > at_least
    assert {name: locked[name] for name in shared if not locked[name] <= tested[name]} == {}
    return set(locked)


def test_the_version_is_the_same_everywhere() -> None:
    """In the package, its metadata, and the next or an earlier heading of the changelog."""
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{ddpsafe.__version__}"\n' in text


def test_the_build_uses_the_tested_versions_by_hash() -> None:
    """`constraints.txt` stays the source; the lock file names no package index."""
    locked = locked_by_hash(".github/build-requirements.txt", at_least=10)
    wanted = (GITHUB / "build-requirements.in").read_text(encoding="utf-8").split()
    assert set(wanted) <= locked


def test_the_lock_file_covers_the_build_backends() -> None:
    """The build is not isolated, so each build backend of pyproject.toml has to be locked."""
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    requires = re.search(r"^requires = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert requires is not None
    names = re.findall(r'"([\w-]+)>=[\d.]+,<\d+"', requires[1])  # with an upper bound
    assert len(names) == requires[1].count('"') / 2
    assert set(names) <= pins_of(".github/build-requirements.txt").keys()


def test_publishing_needs_no_token() -> None:
    """The publishing job may only prove its identity; the build may only read."""
    text = (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow: dict[Any, Any] = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    assert "password" not in text


def test_every_action_is_pinned_to_a_commit() -> None:
    """Another repository may move a tag to other code, but not a commit."""
    found = []
    for path in sorted((GITHUB / "workflows").glob("*.yml")):
        found += re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert len(found) >= 5
    for action, comment in found:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v[\d.]+", comment), action  # for human readers


def test_the_tests_of_ci_use_the_tested_versions_by_hash() -> None:
    """This covers everything that the extras install, except torch and its own dependencies."""
    locked = locked_by_hash("tests/requirements.txt", at_least=90)
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["examples"]]
    names = {re.split(r"[^\w.-]", each)[0].lower() for each in wanted if "< '3.11'" not in each}
    assert names - locked == {"torch"}


def test_issue_forms_ask_for_the_doctor() -> None:
    """Its JSON shows the versions and what is unusual about the machine."""
    forms = [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        fields = {each["id"]: each for each in form["body"]}
        assert "ddpsafe doctor --json" in fields["doctor"]["attributes"]["label"]
    bug = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    assert {each["id"]: each for each in bug["body"]}["doctor"]["validations"]["required"] is True
