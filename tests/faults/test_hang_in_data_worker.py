"""A DataLoader worker of a rank hangs."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import data_programs
import pytest

import ddpsafe


@pytest.mark.full(but=["torch", "forkserver"])
@pytest.mark.parametrize("kind", ["ddpsafe", "torch", "forkserver"])
def test_a_hanging_worker_is_named_with_its_pid_and_line(tmp_path: Path, kind: str) -> None:
    """The rank's own line alone would show only the loop over the loader."""
    with pytest.raises(ddpsafe.LaunchTimeoutError) as caught:
        ddpsafe.launch(
            data_programs.wait_for_a_stuck_worker,
            args=(kind,),
            nproc_per_node=2,
            backend="gloo",
            start_method="forkserver",
            run_dir=tmp_path,
            timeouts={"barrier": timedelta(seconds=4), "collective": timedelta(seconds=4)},
        )
    text = str(caught.value)
    name = "data_worker_1" if kind == "ddpsafe" else r"\S+"
    place = rf"{re.escape(Path(data_programs.__file__).name)}:\d+ in __getitem__"
    assert re.search(rf"waiting for {name} \(pid \d+\) at /.*{place}", text), text
    named = set(re.findall(r"waiting for (\S+ \(pid \d+\))", text))
    assert len(named) == 1  # the other worker waits for an index
