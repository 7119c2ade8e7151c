"""Stop requests to ranks of torchrun, of Slurm or without a launcher: one is signalled, all stop."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import attached_programs as programs
import forked_ranks
import machine
import pytest
import scripts
from forked_ranks import hand_started

from ddpsafe._worker.stop_agreement import NoAgreementError, StopCalls, StopKeys


@pytest.mark.full(but=["1-0-15"])
@pytest.mark.parametrize(
    ("ranks", "signalled", "signum"),
    [
        (3, 2, signal.SIGUSR1),
        pytest.param(3, 0, signal.SIGTERM, marks=pytest.mark.soak),
        (1, 0, signal.SIGTERM),
    ],
)
def test_signal_to_one_rank_stops_all_at_the_same_call(
    ranks: int, signalled: int, signum: signal.Signals, tmp_path: Path
) -> None:
    """The ranks are many calls apart; a group that is made later starts without the request."""
    envs = hand_started(ranks) if ranks > 1 else [{}]
    ended = forked_ranks.run(programs.be_asked, envs, signalled, signum, folder=tmp_path)
    found = forked_ranks.values(ended)
    assert len({each["call"] for each in found}) == 1, found
    assert all(each["restored"] for each in found)
    assert [each["again"] for each in found] == [[False] * 3] * ranks


def test_callers_handler_is_called_and_kept(tmp_path: Path) -> None:
    """It receives the signal too; a signal that the caller ignores stops no rank."""
    (found,) = forked_ranks.values(
        forked_ranks.run(programs.be_asked_with_a_handler, [{}], folder=tmp_path)
    )
    assert found["answers"] == [False, False, True]
    assert found["seen"] == [signal.SIGUSR1]
    assert found["kept"] == [True, True]


@pytest.mark.full
def test_rank_that_has_exited_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 1 has failed and rank 2 has returned when rank 0 is signalled: ranks 0 and 3 stop together."""
    ways = {1: "fails", 2: "returns"}
    ranks = forked_ranks.run(programs.go_on_without_one, hand_started(4), ways, folder=tmp_path)
    assert isinstance(ranks[1].error, ValueError)
    assert [rank.error for rank in (ranks[0], ranks[2], ranks[3])] == [None] * 3
    assert ranks[0].value == ranks[3].value
    assert ranks[0].value[0] > 1
    assert [rank.value[1] for rank in (ranks[0], ranks[2], ranks[3])] == [1] * 3
    assert max(rank.took_s for rank in ranks) < 20


def test_agreement_that_cannot_be_reached_is_not_waited_for() -> None:
    """Rank 0 exits with the store after rank 1 accepted: rank 1's call fails now, not in an hour."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    calls = StopCalls()
    stop_keys = StopKeys(client, rank=1, world_size=2, calls=calls)
    stop_keys.accept()
    stop_keys.ask(signal.SIGTERM)
    scripts.wait_until(lambda: stop_keys.missing() == [0])
    del server
    started = time.monotonic()
    with pytest.raises(NoAgreementError):
        calls.answer(timedelta(hours=1))
    assert time.monotonic() - started < 10
    assert stop_keys.missing() == [0]
    stop_keys.leave()


def test_unanswered_signal_ends_the_process(tmp_path: Path) -> None:
    """SIGTERM after the last call is not lost; SIGUSR1 is only a warning, and is dropped."""
    source = """
        import os, signal, sys
        from ddpsafe._worker.stop_agreement import Others, StopCalls, Stopping

        stopping = Stopping(Others(StopCalls()))
        assert not stopping.answer()
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        stopping.close()
        print("went on")
    """
    assert scripts.run(tmp_path, source, "SIGUSR1").lines() == ["went on"]
    run = scripts.run(tmp_path, source, "SIGTERM")
    assert (run.code, run.out) == (-signal.SIGTERM, "")


@pytest.mark.full
def test_failed_rank_is_not_waited_for_at_a_barrier(tmp_path: Path) -> None:
    """The others learn at once which rank failed and why, without waiting for the barrier's 30 s."""
    ranks = forked_ranks.run(programs.fail_before_a_barrier, hand_started(3), folder=tmp_path)
    assert isinstance(ranks[1].error, ValueError)
    for rank in (ranks[0], ranks[2]):
        assert rank.error.setting == "barrier"
        assert rank.error.missing_ranks == (1,)  # any other rank was still on its way
        assert "rank 1 has failed: ValueError: bad batch" in str(rank.error)
        assert rank.took_s < machine.hang_limit(20)


def test_environment_is_restored(tmp_path: Path) -> None:
    """Variables that a group sets for gloo and NCCL are removed with it."""
    ranks = forked_ranks.run(programs.look_at_the_environment, hand_started(2), folder=tmp_path)
    assert forked_ranks.values(ranks) == [[True, True]] * 2


def test_forgotten_srun_gives_a_warning(tmp_path: Path) -> None:
    """The batch script of a job with four tasks makes a group of one, and the warning says why."""
    env = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    (said,) = forked_ranks.values(forked_ranks.run(programs.forget_srun, [env], folder=tmp_path))
    assert len(said) == 1
    assert "alone, though its Slurm job has 4 tasks" in said[0]
    assert "start it with srun" in said[0]


def test_sigterm_to_torchrun_lets_the_ranks_save(tmp_path: Path) -> None:
    """Its agent forwards SIGTERM to the ranks, and waits for them."""
    source = """
        import pathlib
        import ddpsafe
        import attached_programs
        import stop_programs

        def be_rank():
            ddpsafe.launch(stop_programs.train_in_step, (pathlib.Path.cwd(),))
            print("the code after launch has run")

        if __name__ == "__main__":
            attached_programs.run_elastically(be_rank)
    """
    script = scripts.write(tmp_path, "train.py", source)
    agent = scripts.Script([str(script)], folder=tmp_path)
    scripts.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    os.kill(agent.pid, signal.SIGTERM)
    run = agent.end()
    saved = [path.read_text() for path in tmp_path.glob("saved-*")]
    assert len(saved) == 2, run.err
    assert len(set(saved)) == 1
    assert run.out == ""
    assert run.code == 1, run.err
