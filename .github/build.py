"""Build sdist and wheel twice, compare them byte by byte, check them, and write a bill of materials.

Usage: python .github/build.py FOLDER, with what build-requirements.txt names. ``nox -s build`` and
the release workflow run it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path) -> None:
    """Leave in the folder what is to be published, and the bill of materials beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory() as again:
        first, second = build(folder), build(Path(again))
    if first != second:
        sys.exit(f"two builds differ: {first} and {second}")
    files = [str(folder / name) for name in sorted(first)]
    run("twine", "check", "--strict", *files)
    run("check_wheel_contents", *(file for file in files if file.endswith(".whl")))
    write_bill(folder / "ddpsafe.cdx.json")
    for name, digest in sorted(first.items()):
        print(f"{digest}  {name}")


def build(folder: Path) -> dict[str, str]:
    """Build with the time of the last commit; return the digest of each file by its name."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    epoch = found.stdout.strip() or "315532800"  # of an sdist, which has no commits
    environment = {**os.environ, "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", epoch)}
    run("build", "--no-isolation", "--outdir", str(folder), str(ROOT), environment=environment)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def write_bill(path: Path) -> None:
    """Write what ddpsafe needs at run time, in the versions it was tested with, as CycloneDX."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    names = {name.lower() for name in re.findall(r'^\s*"([\w.-]+)', block[1], re.MULTILINE)}
    pins = [
        line.partition(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line.partition("==")[0].strip().lower() in names
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        pinned.write("\n".join(pins) + "\n")
        pinned.flush()
        options = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"]
        run(
            "cyclonedx_py",
            "requirements",
            *options,
            "--output-reproducible",
            "--output-file",
            str(path),
            pinned.name,
        )


def run(module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run a tool of this environment; end where it fails."""
    subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
