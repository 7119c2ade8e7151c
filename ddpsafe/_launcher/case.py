"""What is known about a failed attempt, in the forms that errors and messages need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._config.durations import show_duration
from ddpsafe._launcher.wording import where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._config import Timeouts
    from ddpsafe._launcher.supervisor import Ending
    from ddpsafe._wire.outcome import RankOutcome

DOING: Final = {
    "starting": "starting (importing the script)",
    "loading": "loading the function and its arguments",
    "joining": "joining the process group",
    "running": "running",
    "leaving": "leaving",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known about a failed attempt.

    Attributes:
        outcomes: What became of each rank, by rank.
        ending: Why the watch ended.
        attempt: The attempt, counted from 1.
        attempts: How many the policy allows.
        run_dir: Where the logs are.
        oom_kills: Processes that the kernel killed for memory during the attempt.
        timeouts: The deadlines it had.
    """

    outcomes: Mapping[int, RankOutcome]
    ending: Ending
    attempt: int
    attempts: int
    run_dir: Path
    oom_kills: int
    timeouts: Timeouts

    @property
    def when(self) -> str:
        """Say at which attempt and after how long it ended."""
        return f"attempt {self.attempt} of {self.attempts}, after {self.ending.waited_s:.1f} s"

    def limit(self, field: str) -> str:
        """Name a timeout with its value, as it is written in a configuration."""
        value = getattr(self.timeouts, field)
        return f"timeouts.{field} ({show_duration(value)})"

    def name(self, outcome: RankOutcome) -> str:
        """Name a rank with the number of ranks."""
        return f"rank {outcome.rank} (world_size {len(self.outcomes)})"

    def place(self, outcome: RankOutcome) -> str:
        """Say where a rank was, what it did, and when it was over."""
        return f"on {outcome.hostname} while {DOING[outcome.phase]}, {self.when}"

    def log_of(self, outcome: RankOutcome) -> Path:
        """Return where to read on: what the rank wrote, or the report on all ranks if it is silent."""
        log = Path(outcome.stderr) if outcome.stderr else None
        return log if log is not None and log.exists() and log.stat().st_size else self.run_dir

    def facts(self) -> dict[str, Any]:
        """Return what every `LaunchError` carries."""
        return {
            "attempt": self.attempt,
            "attempts": self.attempts,
            "outcomes": self.outcomes,
            "run_dir": self.run_dir,
        }

    def rank_facts(self, root: RankOutcome) -> dict[str, Any]:
        """Return what every `RankFailedError` carries."""
        return {
            **self.facts(),
            "rank": root.rank,
            "local_rank": root.local_rank,
            "hostname": root.hostname,
            "pid": root.pid,
            "log_path": Path(root.stderr) if root.stderr else None,
        }

    def timeout_facts(self, missing: Iterable[RankOutcome], waited_s: float) -> dict[str, Any]:
        """Return what every `LaunchTimeoutError` carries."""
        stacks = {rank: where(outcome) for rank, outcome in self.outcomes.items()}
        return {
            **self.facts(),
            "waited_s": waited_s,
            "missing_ranks": [outcome.rank for outcome in missing],
            "stacks": {rank: text for rank, text in stacks.items() if text},
        }
