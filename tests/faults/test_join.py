"""A rank does not join, or joins late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import join_programs as programs
import pytest
import scripts
from fault_kit import HANG_S, WORLD_SIZES, World, require_places, write_script
from machine import require_in_time
from training_programs import return_rank

import ddpsafe

RENDEZVOUS_S = 2.0


@pytest.fixture(autouse=True, scope="module")
def _warm_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the fork server load torch before any rank has two seconds to join."""
    World(folder=tmp_path_factory.mktemp("warm")).launch(return_rank, None)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_hangs_before_init_process_group_is_named(tmp_path: Path, ranks: int) -> None:
    """Gloo would wait for five times its timeout and name no rank."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.spawn_fails(
        ddpsafe.RendezvousTimeoutError,
        programs.join_never,
        within_s=RENDEZVOUS_S + HANG_S,
        timeouts={"start": RENDEZVOUS_S},
        retry={"no_progress": None},
    )
    assert error.missing_ranks == (1,)
    # The function has begun, so that another attempt would do its work a second time.
    assert (error.kind, error.attempt, error.previous_attempts) == ("hang", 1, ())
    assert require_places(error, [1]) == {1: "sleep"}


@pytest.mark.full
def test_a_shorter_timeout_of_the_script_is_kept(tmp_path: Path) -> None:
    """``init_process_group(timeout=…)`` overrides the launch's timeout."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.RendezvousTimeoutError,
        programs.join_never,
        RENDEZVOUS_S,
        within_s=RENDEZVOUS_S + HANG_S,
        retry={"attempts": 1},
    )
    assert error.missing_ranks == (1,)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_hangs_while_loading_its_arguments_is_named(tmp_path: Path, ranks: int) -> None:
    """Before the function runs, the launcher itself enforces the timeout."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RendezvousTimeoutError,
        return_rank,
        programs.SlowToLoad(tmp_path),
        within_s=RENDEZVOUS_S + HANG_S,
        timeouts={"start": RENDEZVOUS_S},
        retry={"attempts": 1},
    )
    assert error.missing_ranks == (1,)
    assert error.kind == "startup-network"
    assert "did not join within timeouts.start (2 s)" in str(error)
    assert "in load_slowly" in str(error)


@pytest.mark.full
def test_ranks_that_hang_while_importing_the_script_are_named(tmp_path: Path) -> None:
    """Top-level code of the script runs again in every rank, and the message says so."""
    arguments = write_script(
        tmp_path,
        f"""
        import torch.distributed  # not what is timed
        from training_programs import return_rank
        started = time.monotonic()
        try:
            ddpsafe.launch(
                return_rank, nproc_per_node=2, start_method="spawn", run_dir=folder / "run",
                timeouts={{"start": {RENDEZVOUS_S}}}, retry={{"attempts": 1}},
            )
        except ddpsafe.RendezvousTimeoutError as error:
            print(time.monotonic() - started)
            print(error.missing_ranks)
            print(error)
        """,
    )
    script = tmp_path / "script.py"
    top = "if __name__ == '__mp_main__':\n    time.sleep(600)\nif __name__ == '__main__':"
    script.write_text(script.read_text().replace("if __name__ == '__main__':", top))
    took_s, missing, *message = scripts.Script(arguments, folder=tmp_path).end().lines()
    require_in_time(float(took_s), RENDEZVOUS_S + HANG_S)
    assert missing == "(0, 1)"
    assert "did not join within timeouts.start" in message[0]
    assert any("importing the script" in line for line in message)


LIMITS: list[Any] = [
    pytest.param({}, None, 1800, 1800, id="torch's defaults"),
    pytest.param({"collective": 7, "start": 40}, None, 7, 40, id="chosen in the call"),
    pytest.param({"collective": 7}, None, 7, 1800, id="one of them chosen"),
    pytest.param({}, 7200, 7200, 7200, id="named by the script"),
    pytest.param({"collective": 7}, 7200, 7200, 7200, id="named by the script, not the call's"),
    pytest.param({"attempt": 60}, None, 1800, 1800, id="a short attempt"),
]
"""``timeouts=`` of the call, what the script names, the group's timeout, and how long it waits."""


@pytest.mark.full(but=["torch's defaults"])
@pytest.mark.parametrize(("chosen", "named", "group_s", "join_s"), LIMITS)
def test_a_scripts_timeouts_are_never_shortened(
    tmp_path: Path, chosen: dict[str, Any], named: float | None, group_s: float, join_s: float
) -> None:
    """Timeouts of `spawn` that are not set yield to the script's, and those that are set apply as given."""
    ddpsafe.spawn(
        programs.note_limits, (tmp_path, named), start_method="forkserver", timeouts=chosen
    )
    assert (tmp_path / "limits").read_text() == f"{float(group_s)} {float(join_s)}"


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_may_join_shortly_before_the_timeout(tmp_path: Path, ranks: int) -> None:
    """A slow start is not a failure."""
    world = World(folder=tmp_path, ranks=ranks)
    world.spawn(programs.join_late, 1.5, timeouts={"start": 60})
    assert len(list(tmp_path.glob("done-*"))) == ranks


def test_arguments_may_take_long_to_load(tmp_path: Path) -> None:
    """A slow load is not a failure under `launch` either."""
    world = World(folder=tmp_path)
    late = programs.SlowToLoad(tmp_path, 1.5)
    assert world.launch(return_rank, late, timeouts={"start": 60}).values == {0: 0, 1: 1}
