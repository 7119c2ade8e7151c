"""What an installation costs beside torch: packages, megabytes, seconds, and the time of an import.

Usage: python benchmarks/install.py [--wheel WHEEL] [--torch REQUIREMENT | --base PYTHON] [--repeat 5].
It makes an environment that has only torch, unless you pass one, and installs each tool into a folder
beside it; because of pip's cache, the seconds are those of unpacking, not of a download.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = {
    "ddpsafe": ("", ["import ddpsafe", "import ddpsafe; ddpsafe.launch"]),
    "accelerate": ("accelerate", ["import accelerate"]),
    "lightning-fabric": ("lightning-fabric", ["import lightning_fabric"]),
    "torchrunx": ("torchrunx", ["import torchrunx"]),
}


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", default=str(Path(__file__).resolve().parent.parent))
    parser.add_argument("--torch", default="torch", help="such as torch==2.13.0+cpu")
    parser.add_argument("--base", help="the Python of an environment that has only torch")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = options.base
        if python is None:
            python = str(folder / "base" / "bin" / "python")
            subprocess.run([sys.executable, "-m", "venv", str(folder / "base")], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", options.torch], check=True)
        print("| tool | packages beside torch | MB | s to install |")
        print("|---|---|---|---|")
        for tool, (requirement, _) in TOOLS.items():
            print(install(python, folder / tool, tool, requirement or options.wheel), flush=True)
        print("\n| statement | s, best | torch loaded |")
        print("|---|---|---|")
        for tool, (_, statements) in TOOLS.items():
            for statement in (
                ["pass", "import torch", *statements] if tool == "ddpsafe" else statements
            ):
                print(load(python, folder / tool, statement, options.repeat), flush=True)


def install(python: str, folder: Path, tool: str, requirement: str) -> str:
    """Install a tool with its dependencies besides torch; return the row of the table."""
    dry = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", requirement]
    found = subprocess.run(dry, capture_output=True, text=True, check=True)
    metadata = [each["metadata"] for each in json.loads(found.stdout)["install"]]
    pins = [f"{each['name']}=={each['version']}" for each in metadata if each["name"] != "ddpsafe"]
    wanted = [*pins, requirement] if tool == "ddpsafe" else pins
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    began_s = time.monotonic()
    subprocess.run([*command, *wanted], check=True)
    took_s = time.monotonic() - began_s
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.suffix != ".pyc")
    return f"| {tool} | {len(metadata)} | {size / 1e6:.1f} | {took_s:.1f} |"


def load(python: str, folder: Path, statement: str, repeat: int) -> str:
    """Run a statement in new processes; return the row with the fastest time."""
    code = f"{statement}\nimport sys; print('torch' in sys.modules)"
    best_s, loaded = float("inf"), ""
    for _ in range(repeat + 1):  # the first one writes the bytecode
        began_s = time.monotonic()
        done = subprocess.run(
            [python, "-c", code],
            env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        best_s, loaded = min(best_s, time.monotonic() - began_s), done.stdout.strip()
    return f"| `{statement}` | {best_s:.2f} | {'yes' if loaded == 'True' else 'no'} |"


if __name__ == "__main__":
    main()
