"""`barrier(timeout=…)` takes a duration as the configuration does, and says what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import odd_end_programs as programs
import pytest
from fault_kit import HANG_S, World

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path


def test_a_number_means_seconds_and_a_text_says_what_it_means() -> None:
    """As everywhere in ddpsafe; a timedelta is as good."""
    result = ddpsafe.launch(
        programs.meet_in_time, nproc_per_node=2, backend="gloo", start_method="forkserver"
    )
    assert result.values == {0: 0, 1: 1}


def test_the_wait_is_as_long_as_written(tmp_path: Path) -> None:
    """Half a second is half a second."""
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.BarrierTimeoutError, programs.meet_too_soon, within_s=0.5 + HANG_S
    )
    assert error.missing_ranks == (1,)


@pytest.mark.parametrize("timeout", ["soon", -1, True, [3], float("nan"), 1e12])
def test_what_is_no_duration_is_a_config_error(timeout: object) -> None:
    """Also where there are no ranks to wait for: the mistake shows on one GPU, not only on eight."""
    with pytest.raises(ddpsafe.ConfigError, match=r"barrier\(timeout=…\): got ") as caught:
        ddpsafe.barrier(timeout=timeout)  # type: ignore[arg-type]  # what is tested
    assert "What to do: write " in str(caught.value)
