"""A DataLoader worker of a rank never answers: the rank, the worker, its pid and its line are named."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import data_programs
import pytest

import ddpsafe


@pytest.mark.parametrize("kind", ["ddpsafe", "torch"])
def test_the_worker_and_its_line_are_named(tmp_path: Path, kind: str) -> None:
    """Not only "at the loop over the loader", where the rank itself waits."""
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
    assert re.search(rf"waiting for {name} \(pid \d+\) at \S*{place}", text), text
    named = set(re.findall(r"waiting for (\S+ \(pid \d+\))", text))
    assert len(named) == 1  # the other worker waits for an index
