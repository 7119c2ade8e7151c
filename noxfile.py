"""The tasks of this repository: ``nox -l`` lists them, ``nox -s NAME`` runs one.

Every session installs the versions in ``constraints.txt``; those for tests and releases are also locked by hash.
A session runs on the Python that runs nox; ``nox -P 3.12 -s tests`` uses another one.
Arguments after ``--`` go to the session's tool: ``nox -s tests -- -k retry``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Sequence

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")
BUILD_LOCK = ROOT / ".github" / "build-requirements.txt"
TESTS_LOCK = ROOT / "tests" / "requirements.txt"
COST = ROOT / "tests" / "kits" / "cost.py"


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; ``-- --fix`` fixes what can be fixed."""
    _install(session, "ruff")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package and of the usage samples in tests/typing."""
    # mypy checks the code for Python 3.10, where ddpsafe reads TOML with tomli.
    _link_torch(session)
    _install(session, ".[examples]", "mypy", "pytest", "types-psutil", "tomli")
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Build the wheel, install it, and test every promise and every table against the package.

    The last line has its cost beside that of ``import torch``, so that it can be compared between machines:
    200 times its CPU time and, on two idle cores, 150 times its duration are the aim.
    """
    _install_for_tests(session)
    _pytest(session, "pytest", "--quick", *session.posargs, wrapper=["python", str(COST)])


@nox.session
def full(session: nox.Session) -> None:
    """Run everything except ``soak``: what ``tests`` runs, and further variants of it."""
    _install_for_tests(session)
    _pytest(session, "pytest", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Run what ``tests`` leaves out: long loops, and more combinations."""
    _install_for_tests(session)
    _pytest(session, "pytest", "-m", "soak", *session.posargs)


@nox.session
def datasets(session: nox.Session) -> None:
    """Run the tests of what data libraries share between processes; installs about a gigabyte."""
    _install_wheel(session, extras="test,datasets")
    tests = [
        str(ROOT / "tests" / "data" / name) for name in ("test_worker_kinds.py", "test_stateful.py")
    ]
    _pytest(session, "pytest", "--extra", "datasets", *session.posargs, *tests, "-n", "2")


def _install_for_tests(session: nox.Session) -> None:
    if _link_torch(session) >= (3, 11):
        # Locked by hash, except torch: each machine gets its build for CPU or CUDA from its own index.
        _install(session, "torch")
        session.install("--no-deps", "--require-hashes", "-r", str(TESTS_LOCK))
        session.install("--force-reinstall", "--no-deps", str(_build_wheel(session)))
    else:  # some locked versions do not support Python 3.10
        _install_wheel(session, extras="test,examples")


def _link_torch(session: nox.Session, *others: str) -> tuple[int, int]:
    """Take torch from the environment that runs nox, if it has it; pip checks the version afterwards.

    Hard links take a second and no space, unpacking its wheel up to a minute. Where one environment
    replaces or removes a file, the other one keeps its own.

    Args:
        session: The session whose environment gets it.
        others: Packages that are built for one build of torch, so that all or none are taken.

    Returns:
        The version of the session's Python.
    """
    ask = "import sys, sysconfig as s; print(*sys.version_info[:2], s.get_path('purelib'), sep='|')"
    major, minor, folder = str(session.run("python", "-c", ask, silent=True)).strip().split("|")
    version, library = (int(major), int(minor)), Path(folder)
    packages = ("torch", *others)
    has_all = all(importlib.util.find_spec(package) for package in packages)
    if version != sys.version_info[:2] or (library / "torch").exists() or not has_all:
        return version
    for file in [file for package in packages for file in metadata.files(package) or []]:
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.exists():  # not the scripts, which name their Python
            target = library / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:  # on another disk
                shutil.copy2(source, target)
    return version


def _pytest(session: nox.Session, command: str, *options: str, wrapper: Sequence[str] = ()) -> None:
    arguments = [_absolute(option) for option in options]
    if not any(argument.startswith(str(ROOT)) for argument in arguments):
        arguments.append(str(ROOT / "tests"))
    workers: list[str] = []
    if not any(argument.startswith(("-n", "--numprocesses")) for argument in arguments):
        # Most tests wait for processes that they started, so more run at a time than there are cores.
        # Each worker costs the import of torch and of all tests, which the quick session notices.
        workers = ["-n", "4" if "--quick" in options else "6", "--dist", "worksteal"]
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # In an empty folder, neither the tests nor their processes can import the checkout;
    # --installed makes pytest refuse to run if they can.
    session.chdir(_folder(session, "empty"))
    configured = [command, "-c", str(ROOT / "pyproject.toml"), "--installed"]
    is_external = command != "pytest"
    if workers:
        # pytest rewrites asserts and compiles each test file. Do so once, before all workers do at the same time.
        collect = [*arguments, "--collect-only", "-qq"]
        session.run(*configured, *collect, external=is_external, silent=True)
    session.run(*wrapper, *configured, *arguments, *workers, external=is_external)


CELLS = {
    "lowest": ("3.10", "lowest-direct", "==2.6.0"),
    "torch-2.8": ("3.12", "highest", "==2.8.0"),
    "torch-2.10": ("3.12", "highest", "==2.10.0"),
    "torch-2.12": ("3.11", "highest", "==2.12.0"),
    "torch-2.13": ("3.10", "highest", "==2.13.0"),
    "newest": ("3.13", "highest", ""),
    "python-3.14": ("3.14", "highest", ""),
}
"""The cells of the matrix: Python version, how uv chooses the dependencies, torch version."""


@nox.session(venv_backend="none")
@nox.parametrize("cell", [nox.param(cell, id=cell) for cell in CELLS])
def matrix(session: nox.Session, cell: str) -> None:
    """Smoke-test every promise with other versions; needs uv, and 3 to 6 GB of wheels per cell.

    ``nox -s "matrix(lowest)"`` runs one cell. Each prints a line for docs/reference/versions.md.
    ``-- --suite`` also runs the tests; options after it go to pytest.
    """
    python, resolution, torch = CELLS[cell]
    folder = _folder(session, cell)
    programs = folder / "bin"
    uv = ["uv", "pip", "install", "--python", str(programs / "python")]
    session.run("uv", "venv", "--clear", "--python", python, str(folder), external=True)
    build = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)]
    session.run(*build, external=True)
    (wheel,) = folder.glob("*.whl")
    # Install ddpsafe's own dependencies first, so that no test tool raises a lowest version.
    listed = ["--requirements", str(ROOT / "pyproject.toml")]
    session.run(*uv, "--resolution", resolution, f"torch{torch}", *listed, external=True)
    session.run(*uv, "--no-deps", str(wheel), external=True)
    session.chdir(folder)
    session.run(str(programs / "python"), str(ROOT / "tests/smoke/promises.py"), external=True)
    if "--suite" in session.posargs:
        command = ["uv", "pip", "freeze", "--quiet", "--python", str(programs / "python")]
        found = session.run(*command, silent=True, external=True)
        pins = [line for line in str(found).splitlines() if "==" in line]
        (folder / "pins.txt").write_text("\n".join(pins), encoding="utf-8")
        with_tools = f"ddpsafe[test,examples] @ {wheel.as_uri()}"
        session.run(*uv, "--constraint", str(folder / "pins.txt"), with_tools, external=True)
        session.env["PATH"] = f"{programs}:{os.environ['PATH']}"
        options = [each for each in session.posargs if each != "--suite"]
        _pytest(session, str(programs / "pytest"), *options)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, warnings being errors, and run its examples."""
    _install_wheel(session, extras="docs,test,examples")
    built = ROOT / "docs" / "_build" / "html"
    release = nox.project.load_toml(ROOT / "pyproject.toml")["project"]["version"]
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", str(built / release))
    # Folders of other versions stay; the front page leads to the version that was built last.
    front = f'<!doctype html><meta http-equiv="refresh" content="0; url={release}/index.html">\n'
    (built / "index.html").write_text(front, encoding="utf-8")
    tests = str(ROOT / "tests" / "docs")
    session.chdir(_folder(session, "empty"))
    session.env["DDPSAFE_SITE"] = str(built / release)
    command = ["pytest", "-c", str(ROOT / "pyproject.toml"), "--installed", "--extra", "docs"]
    session.run(*command, tests)


@nox.session
def build(session: nox.Session) -> None:
    """Build the release files twice, compare and check them, and write the bill of materials."""
    session.install("--require-hashes", "-r", str(BUILD_LOCK))
    session.run("python", str(ROOT / ".github" / "build.py"), str(ROOT / "dist"))


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Regenerate the lock files from constraints.txt; needs uv."""
    without_torch = _folder(session, "lock") / "excludes.txt"
    without_torch.write_text("torch\n", encoding="utf-8")
    tests = ["--universal", "--python-version", "3.11", "--excludes", str(without_torch)]
    tests += ["--extra", "test", "--extra", "examples", "pyproject.toml"]
    for path, options in (
        (BUILD_LOCK, [str(BUILD_LOCK.with_suffix(".in"))]),
        (TESTS_LOCK, tests),
    ):
        command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["--constraints", CONSTRAINTS, "--output-file", str(path), *options]
        session.run(*command, external=True)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Run the recipes of docs/how-to/frameworks.md, and check templates against their schemas."""
    _install_wheel(session, "torchvision", extras="test,frameworks")
    # SageMaker's API is a data file in botocore. Its dependencies, pinned to years-old versions, are not
    # needed to read it.
    session.install("--no-deps", "botocore==1.43.117", "jmespath==1.1.0")
    tests = [
        "tests/frameworks",
        "tests/launcher/test_equality.py",
        "tests/launcher/test_templates.py",
    ]
    session.chdir(_folder(session, "empty"))
    command = ["pytest", "-c", str(ROOT / "pyproject.toml"), "--installed", "-n", "2"]
    command += ["--extra", "frameworks"]
    session.run(*command, *session.posargs, *(str(ROOT / each) for each in tests))


FOR_GPU = ("nox", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "nvidia-ml-py")
"""What ``gpu`` needs besides ddpsafe's own dependencies and what builds its wheel."""


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run on a GPU what needs one, in eight minutes, and write docs/benchmarks/gpu.md, row by row.

    torch is that of the environment of nox, or of the Python that made it, or the index's;
    ``-- --torch-from PYTHON`` takes that of another one, and ``system`` that of the second first.
    ``--wheels DIR`` installs from a folder only, which ``--download DIR [--for 3.12]`` fills elsewhere.
    ``--rehearse`` needs no GPU. The options of benchmarks/gpu.py may follow.
    """
    options = argparse.ArgumentParser("nox -s gpu --", usage=gpu.__doc__)
    options.add_argument("--torch-from")
    options.add_argument("--wheels", type=Path)
    options.add_argument("--download", type=Path)
    options.add_argument("--for", dest="python", default="{}.{}".format(*sys.version_info[:2]))
    given, others = options.parse_known_args(session.posargs)
    project = nox.project.load_toml(ROOT / "pyproject.toml")
    own = [each for each in project["project"]["dependencies"] if not each.startswith("torch")]
    if given.download:
        # pip reads the conditions of constraints.txt with its own version, and they differ for 3.10.
        if (given.python == "3.10") != (sys.version_info < (3, 11)):
            session.error(
                f"download for Python {given.python} with that Python, or a newer than 3.10"
            )
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 17, 12, 5)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        pip += ["--python-version", given.python, *platforms, "--dest", str(given.download)]
        wanted = [*own, *FOR_GPU, *project["build-system"]["requires"]]
        session.run(*pip, "--constraint", CONSTRAINTS, *wanted)
        return
    base = getattr(sys, "_base_executable", sys.executable)
    ask = "import importlib.util as i, sys; print(*sys.path if i.find_spec('torch') else [], sep='\\n')"
    named = {None: [sys.executable, base], "system": [base, sys.executable]}
    for source in named.get(given.torch_from, [given.torch_from]):
        found = str(session.run(source, "-c", ask, silent=True, external=True)).splitlines()
        packages = [path for path in found if path.endswith(("site-packages", "dist-packages"))]
        if packages:
            session.log(f"torch is that of {source}")
            break
    else:
        source = sys.executable
        if given.torch_from or (given.wheels and not list(given.wheels.glob("torch-*"))):
            session.error(
                "found no torch; pass --torch-from and the path of the Python that has it"
            )
    folder = _folder(session, "environment")
    session.run(
        sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", source, str(folder)
    )
    python = str(folder / "bin" / "python")
    session.env["PYTHONPATH"] = ""  # nox itself may be there
    if given.wheels:
        session.env.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(given.wheels.resolve()))
    # The rest of torch's environment comes after what is installed here, so that its versions do not matter.
    (library,) = folder.glob("lib/python3*/site-packages")
    (library / "torch.pth").write_text("\n".join(packages), encoding="utf-8")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    wheels = _folder(session, "wheel")
    session.run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    wheel = max(wheels.glob("ddpsafe-*.whl"), key=lambda path: path.stat().st_mtime)
    # Not by ddpsafe's own requirements: pip would then compare those of a torch from elsewhere with the pins.
    wanted = [*own, *(each for each in FOR_GPU if each != "nox")]
    if not packages:
        wanted.append("torch")
    session.run(*pip, "install", "--quiet", "--constraint", CONSTRAINTS, *wanted)
    session.run(*pip, "install", "--quiet", "--no-deps", str(wheel))
    session.chdir(_folder(session, "empty"))
    page = ROOT / "docs" / "benchmarks" / "gpu.md"
    if "--rehearse" in others and "\nRun on " in page.read_text(encoding="utf-8"):
        page = folder / page.name  # a rehearsal replaces no run
    session.run(python, str(ROOT / "benchmarks" / "gpu.py"), "--save", str(page), *others)


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark, or those given after ``--``."""
    _install_wheel(session, extras="examples")
    scripts = [str(path) for path in ROOT.glob("benchmarks/[!_]*.py") if path.stem != "gpu"]
    for script in session.posargs or sorted(scripts):
        session.run("python", script)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the digits example."""
    _install_wheel(session, extras="examples")
    session.run("python", "examples/digits/train.py", *session.posargs)


def _install(session: nox.Session, *requirements: str) -> None:
    session.install("-c", CONSTRAINTS, *requirements)


def _build_wheel(session: nox.Session) -> Path:
    folder = _folder(session, "wheel")
    for old in folder.glob("*.whl"):
        old.unlink()
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install_wheel(session: nox.Session, *linked: str, extras: str) -> None:
    wheel = _build_wheel(session)
    _link_torch(session, *linked)
    _install(session, f"ddpsafe[{extras}] @ {wheel.as_uri()}")
    # The version number does not change between edits, so pip would keep the old files.
    session.install("--force-reinstall", "--no-deps", str(wheel))


def _folder(session: nox.Session, name: str) -> Path:
    folder = ROOT / session.cache_dir / session.name / name  # absolute, since sessions call chdir
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _absolute(argument: str) -> str:
    """Make a test's path absolute; leave every other argument alone."""
    path = argument.partition("::")[0]
    is_path = not path.startswith("-") and (ROOT / path).exists()
    return str(ROOT / argument) if is_path else argument
