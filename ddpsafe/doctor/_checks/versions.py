"""Versions: whether torch can be imported, what it supports, and what does not match."""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._config.backend_names import find_unknown, suggest
from ddpsafe._host import is_directory_gone
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_PYTHONS: Final = ((3, 10), (3, 14))
_OLDEST_TORCH: Final = (2, 6)
_SAFE_LOAD_TORCH: Final = (2, 10)
# Their operators are compiled against one version of torch.
_COMPANIONS: Final = ("torchvision", "torchaudio", "torchtext", "triton")
_EXACT_TORCH: Final = re.compile(
    r"^torch\s*\(?==\s*([0-9][0-9a-z.]*)\)?\s*(?:;.*)?$", re.IGNORECASE
)


def check_import(subject: Subject) -> Iterator[Finding]:
    """Check whether torch can be imported, from what the torch probe reported."""
    probed = probe_results(subject)
    if "describe" in probed:
        about = probed["describe"]
        yield ok(
            "DS-VER-001",
            f"torch {about.get('version')} was imported in {probed['import_s']:.1f} s from {about.get('file')}.",
            **about,
        )
        return
    if not probed["timed_out"]:
        yield _broken_import(probed)
        return
    yield warning(
        "DS-VER-001",
        f"`import torch` has not finished after {probed['waited_s']:.0f} s.",
        cause="torch is on slow network storage, or an import hangs in a driver or a dead mount.",
        fix=to_copy(
            "See where it hangs; if the storage is slow, install it on a local disk:",
            f"timeout -s ABRT 60 {shlex.quote(sys.executable)} -X faulthandler -c 'import torch'",
        ),
    )


def probe_results(subject: Subject) -> dict[str, Any]:
    """Return what the torch probe reported, waiting until the examination ends at the latest."""
    if subject.probe is None:
        return {"timed_out": False, "returncode": 0, "stderr": "", "import_error": "not probed"}
    return subject.probe.results(subject.deadline)


def _broken_import(probed: dict[str, Any]) -> Finding:
    if is_directory_gone():
        return failed(
            "DS-VER-001",
            "The current directory has been removed, so torch cannot be imported.",
            cause="a clean-up, or a checkout or build that recreated the directory under this shell.",
            fix=to_copy(
                "Change to a directory that exists; if this one was recreated, enter it again:",
                'cd "$PWD" || cd',
            ),
        )
    code = probed["returncode"]
    # A process that was killed reports no error, but its stderr may end with one.
    why = probed.get("import_error") or (probed["stderr"].strip().splitlines() or [""])[-1]
    died = f"; the process was killed by signal {-code}" if code is not None and code < 0 else ""
    origin = probed.get("found")
    fact = f"torch cannot be imported: {why or 'no message'}{died}. GPUs and backends were not checked."
    if origin and not {"site-packages", "dist-packages"} & {*Path(origin).parts}:
        return _shadowed(fact, Path(origin))
    return failed(
        "DS-VER-001",
        fact,
        cause="it is not installed in this environment, or its libraries do not match.",
        fix=to_copy(
            "See which one is found, and reinstall it:",
            f"{shlex.quote(sys.executable)} -c 'import importlib.util as u; print(u.find_spec(\"torch\"))'",
            f"{shlex.quote(sys.executable)} -m pip install --force-reinstall 'torch>=2.6'",
        ),
        found=origin,
        returncode=code,
    )


def _shadowed(fact: str, origin: Path) -> Finding:
    """Return the finding that something else named torch is found before the package."""
    shadow = origin.parent if origin.name == "__init__.py" else origin
    return failed(
        "DS-VER-001",
        fact,
        cause=f"{shadow} is imported instead of the package: the current directory and PYTHONPATH "
        "come before what is installed.",
        fix=to_copy(
            "Rename it, or remove its directory from PYTHONPATH:",
            f"mv {shlex.quote(str(shadow))} {shlex.quote(str(shadow.with_name('my_' + shadow.name)))}",
        ),
        found=str(origin),
    )


def _torch_version(subject: Subject) -> str:
    return str(probe_results(subject).get("describe", {}).get("version", ""))


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_known(subject: Subject) -> Iterator[Finding]:
    """Compare Python and torch with the versions that ddpsafe supports."""
    python = sys.version_info[:2]
    torch = _torch_version(subject)
    numbers = _major_minor(torch)
    if numbers and numbers < _OLDEST_TORCH:
        yield failed(
            "DS-VER-002",
            f"torch {torch} is older than 2.6, the oldest that ddpsafe supports.",
            cause="an old environment, or a package that requires an older torch.",
            fix=to_copy(
                "Install a newer one:", f"{shlex.quote(sys.executable)} -m pip install 'torch>=2.6'"
            ),
        )
    elif not _PYTHONS[0] <= python <= _PYTHONS[1]:
        yield warning(
            "DS-VER-002",
            f"Python {platform.python_version()} is outside what ddpsafe supports (3.10 to 3.14).",
            cause="it is older or newer than this release.",
            fix=to_copy("Create an environment with a supported one:", "python3.12 -m venv .venv"),
        )
    else:
        yield ok("DS-VER-002", f"Python {platform.python_version()}, torch {torch or 'unknown'}.")


def check_load(subject: Subject) -> Iterator[Finding]:
    """Check whether `weights_only=True` of this torch is safe."""
    torch = _torch_version(subject)
    numbers = _major_minor(torch)
    if numbers and numbers < _SAFE_LOAD_TORCH:
        yield warning(
            "DS-VER-006",
            f"torch {torch} runs code from a forged file even with weights_only=True.",
            cause="CVE-2026-24747, fixed in torch 2.10; a checkpoint from someone else can be such a file.",
            fix=to_copy(
                "Install a newer one:",
                f"{shlex.quote(sys.executable)} -m pip install 'torch>=2.10'",
            ),
        )
    elif numbers:
        yield ok("DS-VER-006", f"torch {torch}: weights_only=True does not run code.")


def check_nccl(subject: Subject) -> Iterator[Finding]:
    """Check for more than one NCCL: installed packages, loaded libraries, and LD_PRELOAD."""
    about = probe_results(subject).get("describe", {})
    packages = sorted(
        f"{name} {dist.version}"
        for dist in metadata.distributions()
        if (name := str(dist.metadata["Name"] or "")).startswith("nvidia-nccl-")
    )
    loaded = list(about.get("libnccl", []))
    preloaded = "nccl" in subject.env.get("LD_PRELOAD", "")
    if len(packages) > 1 or len(loaded) > 1 or preloaded:
        yield warning(
            "DS-VER-003",
            f"There is more than one NCCL: {', '.join([*packages, *loaded]) or subject.env['LD_PRELOAD']}.",
            cause="two builds of torch were installed over each other, or LD_PRELOAD loads another one.",
            fix=to_copy(
                "Keep the one that torch requires:",
                f"{shlex.quote(sys.executable)} -m pip uninstall -y {' '.join(dict.fromkeys(package.split()[0] for package in packages)) or 'nvidia-nccl-cu12'}",
                f"{shlex.quote(sys.executable)} -m pip install --force-reinstall torch",
                *(["unset LD_PRELOAD"] if preloaded else []),
            ),
        )
        return
    yield ok(
        "DS-VER-003", f"NCCL {about.get('nccl') or 'is not part of this torch'}.", packages=packages
    )


def check_companions(subject: Subject) -> Iterator[Finding]:
    """Compare the installed torch with the one that torchvision and similar packages were built for."""
    installed = _torch_version(subject).partition("+")[0]
    mismatches = 0
    for name in _COMPANIONS if installed else ():
        requirements: list[str] = []
        with contextlib.suppress(metadata.PackageNotFoundError):
            requirements = metadata.requires(name) or []
        exact = (match[1] for text in requirements if (match := _EXACT_TORCH.match(text)))
        wanted = next(exact, None)
        if wanted is None or wanted == installed:
            continue
        mismatches += 1
        yield warning(
            "DS-VER-004",
            f"{name} {metadata.version(name)} was built for torch {wanted}, and torch {installed} is "
            "installed; its operators fail to load.",
            cause="one of the two was installed or upgraded without the other.",
            fix=to_copy(
                "Install both in one command:",
                f"{shlex.quote(sys.executable)} -m pip install --upgrade torch {name}",
            ),
        )
    if installed and not mismatches:
        yield ok("DS-VER-004", "No installed package requires another torch.")


def check_backend(subject: Subject) -> Iterator[Finding]:
    """Check whether this build of torch has the configured backend."""
    about = probe_results(subject).get("describe")
    if about is None or "version" not in about:
        return
    backend = subject.config.backend
    lacking = [
        name
        for name, is_built in (("gloo", about["gloo"]), ("nccl", about["has_nccl"]))
        if name in backend and not is_built
    ]
    if not about["distributed"] or lacking:
        what = " and ".join(lacking) or "torch.distributed"
        yield failed(
            "DS-VER-005",
            f"torch {about['version']} was built without {what}.",
            cause="a build for the CPU or for another system.",
            fix=to_copy(
                "Install a build that has it, or use gloo:",
                f"{shlex.quote(sys.executable)} -m pip install --force-reinstall torch",
                "export DDPSAFE_BACKEND=gloo",
            ),
        )
        return
    known = list(about.get("backends", ()))
    unknown = find_unknown(backend, known) if known else []
    if unknown:
        # Only a warning, because the doctor does not import what the script imports.
        yield warning(
            "DS-VER-005",
            f"torch knows no backend called {' or '.join(map(repr, unknown))}; `launch` refuses it "
            "unless the script imports a package that registers it.",
            cause="a typo, or a backend of a package that torch does not load by itself.",
            fix=f"Write {suggest(backend, known)}, or import its package at the start of the script.",
            backends=known,
        )
        return
    yield ok("DS-VER-005", f"torch has what backend {backend!r} needs.")


CHECKS: Final[tuple[Check, ...]] = (
    check_import,
    check_known,
    check_load,
    check_nccl,
    check_companions,
    check_backend,
)
