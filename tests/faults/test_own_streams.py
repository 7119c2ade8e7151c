"""The launcher's own stdout cannot be written to, which is an error of the script, not of a rank."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scripts
from fault_kit import write_script
from training_programs import return_rank

import ddpsafe


class BrokenStream(io.StringIO):
    """A stream of the user's program, whose flush fails."""

    def flush(self) -> None:
        """Fail."""
        raise RuntimeError("no flush today")


@pytest.mark.full
def test_a_closed_stdout_raises_broken_pipe_error(tmp_path: Path) -> None:
    """`python train.py | head -1` with a buffered stdout is not reported as a limit of the machine."""
    arguments = write_script(
        tmp_path,
        "print('begin')\nfrom training_programs import return_rank\nddpsafe.launch(return_rank, **options)",
    )
    env = scripts.clean_environment()
    env.pop("PYTHONUNBUFFERED", None)
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        script = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env,
            stdout=write_fd,
            stderr=subprocess.PIPE,
            text=True,
            timeout=scripts.LIMIT_S,
            check=False,
        )
    finally:
        os.close(write_fd)
    assert script.returncode != 0
    assert "\nBrokenPipeError: " in script.stderr
    assert "could not start rank" not in script.stderr


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_failing_flush_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception comes through, before anything is created for the ranks."""
    options: Any = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}
    ddpsafe.launch(return_rank, **options)
    before = _descriptors()
    monkeypatch.setattr(sys, "stdout", BrokenStream())
    with pytest.raises(RuntimeError, match="no flush today") as caught:
        ddpsafe.launch(return_rank, **options)
    assert caught.tb is not None  # its frames still hold their objects
    assert _descriptors() == before


REPLACEMENTS = {
    "one for both": "sys.stderr = sys.stdout",
    "class": "sys.stdout = type('Tee', (io.TextIOWrapper,), {})(open(os.devnull, 'wb'))",
    "descriptor": "sys.stdout = os.fdopen(1, 'w', 1)",
    "closed": "sys.stdout.close()",
    "absent": "sys.stdout = None",
    "another": "sys.stdout = io.StringIO()",
}


@pytest.mark.full(but=["one for both", "descriptor"])
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_streams_that_a_script_has_replaced_end_up_in_the_logs(tmp_path: Path, how: str) -> None:
    """A rank imports the script before its output is redirected, and what C writes is there as well."""
    source = f"""
        import io, os, sys
        import ddpsafe

        if __name__ != "__main__":
            {REPLACEMENTS[how]}

        def train(ctx):
            print("output", flush=True)
            print("errors", file=sys.stderr, flush=True)
            os.write(1, b"native\\n")

        if __name__ == "__main__":
            ddpsafe.launch(
                train, nproc_per_node=1, backend="gloo", start_method="spawn", console="none", run_dir=sys.argv[1]
            )
    """
    run = scripts.run(tmp_path, source, str(tmp_path / "run"), fresh=True)
    assert run.code == 0, run
    logs = tmp_path / "run" / "attempt-1"
    assert (logs / "rank-0.out").read_text() == "output\nnative\n"
    assert (logs / "rank-0.err").read_text() == "errors\n"
