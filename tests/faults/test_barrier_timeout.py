"""`barrier(timeout=…)` accepts the same durations as the configuration, and rejects anything else."""

from __future__ import annotations

from pathlib import Path

import odd_end_programs as programs
import pytest
from fault_kit import HANG_S, World

import ddpsafe


@pytest.mark.full
def test_timeout_may_be_seconds_a_text_or_a_timedelta() -> None:
    """A duration is written in the same ways everywhere in ddpsafe."""
    result = ddpsafe.launch(
        programs.meet_in_time, nproc_per_node=2, backend="gloo", start_method="forkserver"
    )
    assert result.values == {0: 0, 1: 1}


def test_barrier_waits_as_long_as_its_timeout(tmp_path: Path) -> None:
    """The launch's timeout for barriers, which is longer, does not apply."""
    error = World(folder=tmp_path).launch_fails(
        "barrier", programs.meet_too_soon, within_s=0.5 + HANG_S
    )
    assert error.missing_ranks == (1,)


@pytest.mark.parametrize("timeout", ["soon", -1, True, [3], float("nan"), 1e12])
def test_an_invalid_duration_raises_config_error(timeout: object) -> None:
    """It does so even with no other ranks to wait for, so one GPU is enough to find the mistake."""
    with pytest.raises(ddpsafe.ConfigError, match=r"barrier\(timeout=…\): got ") as caught:
        ddpsafe.current().barrier(timeout=timeout)  # type: ignore[arg-type]  # what is tested
    assert "What to do: write " in str(caught.value)
