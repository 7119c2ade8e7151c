"""Keeps the causes that a log shows, and puts the most likely one first."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._explain.catalogue import LEVELS
from ddpsafe._explain.normalise import Line, Tail, is_retried, weight_of
from ddpsafe._explain.tracebacks import FIX_OF_USER, read_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._errors import FailureKind
    from ddpsafe._explain.catalogue import Catalogue, Level, LogRule, Retry
    from ddpsafe._explain.flight import RecordedFailure
    from ddpsafe._explain.match import Match
    from ddpsafe._explain.tracebacks import Traceback

MAX_DISTINCT: Final = 50_000
"""How many different lines, groups and calls are remembered, to bound the memory."""
_MAX_EVIDENCE: Final = 3
_MAX_EVIDENCE_CHARS: Final = 400
_MAX_QUOTED_CHARS: Final = 300

_LOGGED: Final = re.compile(
    r"(?:^|[\s\[|])(?<!wandb: )(?:ERROR|FATAL|CRITICAL)(?![\w=])(?:[\]:|\s-]|[\w./]{1,60}:\d{1,6}:?\s){0,6}"
    r"(?P<text>(?!pip's dependency resolver)[A-Za-z`'\"].{11,300})"
)
"""A message that a logger marks as an error."""
_CAUGHT_IN_WORKER: Final = re.compile(r"^Caught \w+ in (?:DataLoader worker|pin memory)")
_ROOT_CAUSE: Final = re.compile(r"^Root Cause \(first observed failure\)")
_OTHER_FAILURES: Final = re.compile(r"^Failures:$")
_RANK_OF_ROOT: Final = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_SEQUENCE: Final = re.compile(r"SeqNum=(\d+)(?:, OpType=(\w+)(?:, NumelIn=(\d+))?)?")
_GROUP: Final = re.compile(r"\[PG (?:ID )?(\d+)")
_SAME_SIZES: Final = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")
"""Collectives in which every rank passes the same number of elements."""
_FACT: Final = re.compile(r"\{(\w+)\}")
_GROUP_NAME: Final = re.compile(r"\(\?P<(\w+)>")
_UNUSED_ARE: Final = re.compile(
    r"Parameter(?P<of> indices|s) which did not receive grad for rank \d+: "
    r"(?P<first>[\w.]+(?:,? [\w.]+){0,3})(?P<more>,? [\w.]+)?"
)

_USER: Final = "DS-USER-exception"
_WORKER_RAISED: Final = "DS-DATA-worker-raised"
_MISMATCH: Final = "DS-HANG-mismatch"
_WATCHDOG: Final = "DS-HANG-watchdog"
_REPORT: Final = "DS-RUN-report"
_NCCL: Final = "DS-NCCL-error"
_LOST: Final = "DS-PEER-lost"
_EXIT: Final = "DS-END-exit-code"
_NONE_FAILED: Final = (
    " No rank of this log failed by itself: the other one ended without an error (it left its loop"
    " early, or called sys.exit or os._exit), or its log is not here."
)
_OFTEN_HANDLED: Final = frozenset({"DS-DATA-path", "DS-ENV-module"})
"""What scripts look for without needing it. Of other chains the first exception counts: the next ones may be those of cleanup."""
_FLIGHT: Final = "DS-FLIGHT-"
_UNUSED: Final = ("DS-DDP-unused", "DS-DDP-outputs-unused")
_NAMES_ONE_RANK: Final = ("cause", "exception", "end", "exit")
"""Levels of causes that happen on one rank: torchrun's summary says on which."""
_ENDED_BY_TORCHRUN: Final = ("DS-END-sigkill", "DS-END-sigterm", "DS-END-stopped")
_ENDS_A_PROCESS: Final = ("end", "exit", "peer")
"""Levels of lines that show that a process ended."""
_RETRY_OF: Final[dict[str, Retry]] = {
    "config": "never",
    "user-error": "never",
    "unpicklable": "never",
    "out-of-memory": "never",
    "preempted": "yes",
    "hardware": "elsewhere",
}
"""Whether trying again can help, by the failure kind in a report; "once" for all others."""


@dataclass(slots=True, kw_only=True)
class Cause:
    """One explanation of a log.

    Attributes:
        level: How much its lines prove.
        rank: The rank of the first line that shows it and names one; ``None`` if no line does.
        evidence: The first lines that show it, as ``(line number from 1, text)``; number 0 means
            a report of ddpsafe.
        count: How many lines show it.
        last: The number of the last line that shows it.
        is_warning: Whether the programs that printed its lines marked all of them as warnings.
        has_local_rank: Whether `rank` is a local_rank, because the line names no other.
        is_retried: Whether its programs said that they try again.
        is_wrapper: Whether it only re-raises another process's exception, which may follow.
        is_taken_back: Whether a later line showed that it was over.
    """

    code: str
    kind: FailureKind
    level: Level
    retry: Retry
    cause: str
    fix: str
    page: str
    rank: int | None = None
    evidence: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0
    last: int = 0
    is_warning: bool = False
    has_local_rank: bool = False
    is_retried: bool = False
    is_wrapper: bool = False
    is_taken_back: bool = False

    @property
    def ended_job(self) -> bool:
        """Whether it may have ended the job; False if it is harmless or the job went on."""
        return self.level != "noise"

    def as_json(self) -> dict[str, object]:
        """Return what ``ddpsafe explain --json`` prints of it."""
        return {
            "code": self.code,
            "cause": self.cause,
            "fix": self.fix,
            "rank": self.rank,
            "evidence": [{"line": number, "text": text} for number, text in self.evidence],
            "retry": self.retry,
            "ended_job": self.ended_job,
            "kind": self.kind,
            "page": self.page,
        }


def _make_cause(rule: LogRule, facts: Mapping[str, str]) -> Cause:
    return Cause(
        code=rule.code,
        kind=rule.kind,
        level=rule.level,
        retry=rule.retry,
        cause=_fill(rule.cause, facts),
        fix=_fill(rule.fix, facts),
        page=rule.page,
    )


def _fill(text: str, facts: Mapping[str, str]) -> str:
    """Return a text with the facts that it names in braces; other braces stay."""
    return _FACT.sub(lambda fact: facts.get(fact[1], fact[0]), text)


def _user_error(cause: str, fix: str, rank: int | None, number: int, body: str) -> Cause:
    """Make the cause of a line that no rule matches, at the level "noise"."""
    return Cause(
        code=_USER,
        kind="user-error",
        level="noise",
        retry="never",
        cause=cause,
        fix=fix,
        page="docs/reference/failures.md#ds-user-exception",
        rank=rank,
        evidence=[(number, body[:_MAX_EVIDENCE_CHARS])],
        count=1,
        last=number,
    )


class Findings:
    """The causes that the lines of a log show, in the order of `causes`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._causes: dict[str, Cause] = {}
        self._waiting: dict[str, Cause] = {}  # of rules that need another line, too
        self._lone: Cause | None = None  # the script's own exception, without a traceback
        self._logged: Cause | None = None
        self._asserted: dict[int | None, str] = {}  # the last `assert` line of each rank
        # By rank: the code of its last exception and the line with it; then that line of the one before in
        # a chain, and whether the next one is raised while that is handled (else it is raised from it).
        self._raised: dict[int | None, tuple[str, tuple[int, str]]] = {}
        self._chained: dict[int | None, tuple[tuple[int, str], bool]] = {}
        self._unhandled: Counter[str] = Counter()  # by code: exceptions that were not handled
        self._knows_original = False
        self._report: Mapping[str, Any] | None = None
        self._root_rank: int | None = None
        # Whether torchrun's summary names next the rank that failed first, or the others.
        self.expects_rank = self._is_others = False
        self._timeouts = _Timeouts()
        # The ranks that lost another one, and the exit codes with the ranks that had them, if known.
        self._lost: set[int] = set()
        self._exits: set[tuple[int | None, str]] = set()
        self._unused = ""

    def read_line(self, line: Line) -> None:
        """Keep what says more about causes that other lines show."""
        body = line.body
        if body.lstrip().startswith("assert"):  # a traceback prints it as the source of a call
            self._asserted[line.rank] = body.strip()
        # Keep the rank that torchrun's summary names as the first to fail. The others, which it lists
        # before, it has ended itself.
        if _OTHER_FAILURES.match(body):
            self._is_others = True
        elif _ROOT_CAUSE.match(body):
            self.expects_rank, self._is_others = True, False
        elif self.expects_rank and (root := _RANK_OF_ROOT.match(body)):
            self._root_rank, self.expects_rank = int(root[1]), False

    def note(self, match: Match, line: Line, traceback: Traceback | None = None) -> Cause:
        """Record that a line shows a cause; `traceback` is the one that it ends."""
        rule, _ = match
        if differs_by_rank(rule.code):
            self.note_rank(rule.code, line)
        if rule.code == _EXIT:
            self._exits.add((None if line.has_local_rank else line.rank, match[1]["code"]))
        if not self._unused and (unused := _UNUSED_ARE.search(line.body)) is not None:
            # DDP names them in its first message or in a line of its own.
            are = "They are" if unused["of"] == "s" else "Their numbers are"
            self._unused = f" {are} {unused['first']}{' and more' if unused['more'] else ''}."
        cause = self._note_in(self._causes, match, line)
        if traceback is not None and traceback.is_original:
            self._knows_original = True
        if rule.level == "exception" and traceback is not None and cause.count == 1:
            cause.cause += f" Raised at {traceback.frame}." if traceback.frame else ""
        return cause

    def is_aftermath(self, match: Match) -> bool:
        """Return whether a line is torchrun's report of a rank that it ended because of another one."""
        return self._is_others and match[0].code in _ENDED_BY_TORCHRUN

    def note_waiting(self, match: Match, line: Line) -> None:
        """Record a cause that counts only if another line follows."""
        self._note_in(self._waiting, match, line)

    def _note_in(self, where: dict[str, Cause], match: Match, line: Line) -> Cause:
        rule, sign = match
        facts = dict.fromkeys(_GROUP_NAME.findall(" ".join(rule.signs)), "")
        facts |= {name: value or "" for name, value in sign.groupdict().items()}
        if rule.raised_in is not None:
            text = line.body.strip().rstrip(":")
            if text == "AssertionError" and line.rank in self._asserted:
                text += f": {self._asserted.pop(line.rank)}"  # its condition
            facts["said"] = text[:_MAX_QUOTED_CHARS].removesuffix(".")
        weight = weight_of(line, sign)
        if weight == "handled":  # its own words, in an exception that was raised
            weight = "error"
        level = rule.level
        if weight == "info":
            level = "noise"
        elif weight == "warning" and level == "cause":
            level = "likely"
        is_another_to_follow = is_retried(line)
        is_warning = level == "noise" or weight != "error" or is_another_to_follow
        cause = where.get(rule.code)
        if cause is None:
            cause = where[rule.code] = _make_cause(rule, facts)
            cause.level, cause.is_warning = level, is_warning
            cause.is_retried = is_another_to_follow
        cause.is_warning, cause.last = cause.is_warning and is_warning, line.number
        cause.is_retried = cause.is_retried and is_another_to_follow
        if LEVELS[level] < LEVELS[cause.level]:  # now it is an error, and no longer a warning
            cause.level, cause.evidence = level, []
        if cause.rank is None:
            cause.rank = int(facts["rank"]) if facts.get("rank") else line.rank
            cause.has_local_rank = cause.rank is not None and line.has_local_rank
        cause.count += 1
        if len(cause.evidence) < _MAX_EVIDENCE:
            cause.evidence.append((line.number, line.body[:_MAX_EVIDENCE_CHARS]))
        return cause

    def note_exception(
        self, raised: re.Match[str], line: Line, traceback: Traceback | None, *, is_logged: bool
    ) -> Cause:
        """Record the script's own exception; one without a traceback counts if there is no other."""
        known = self._causes.get(_USER)
        if traceback is None and (known is None or known.is_wrapper):
            known = self._lone
        before, is_handling = self._chained.get(line.rank, ((0, ""), False))
        is_exit = is_handling and raised["type"] == "SystemExit"
        # Whether it belongs to the very exception that is known, and not to that of another rank.
        is_next = known is not None and before == known.evidence[0] and not is_exit
        if known is not None and not known.is_wrapper and not (is_next and is_handling):
            if is_next and line.body not in known.cause:
                known.cause += f" It was raised again as {line.body[:_MAX_QUOTED_CHARS]}."
            known.count += 1
            known.last, known.is_warning = line.number, known.is_warning and is_logged
            return known
        frame = None if traceback is None else traceback.frame
        place = "" if frame is None else f" at {frame}"
        own_text = raised["text"] or ""
        if not own_text and raised["type"] == "AssertionError":
            own_text = self._asserted.pop(line.rank, "")
        text = f": {own_text[:_MAX_QUOTED_CHARS].removesuffix('.')}" if own_text else ""
        calls = () if traceback is None else tuple(traceback.calls)
        who, fix = read_calls(calls, self._catalogue)
        what = f"{who} {raised['type']}"
        is_wrapper = is_passed_on(raised)
        if is_wrapper:  # the original traceback follows, with the line of the dataset
            worker = self._catalogue.of_code[_WORKER_RAISED]
            what, fix = worker.cause.removesuffix("."), worker.fix
        cause = _user_error(f"{what}{text}{place}.", fix, line.rank, line.number, line.body)
        if is_handling:
            cause.cause += f" It was raised while {before[1][:_MAX_QUOTED_CHARS]} was handled."
        cause.level = "end" if traceback is None else "exit" if is_exit else "exception"
        # One that a program logs or quotes counts only if the run makes no progress after it.
        cause.is_warning, cause.is_wrapper = is_logged and traceback is None, is_wrapper
        if traceback is None:
            self._lone = cause
        else:
            self._causes[_USER] = cause
        return cause

    def note_chain(self, rank: int | None, *, is_handling: bool) -> None:
        """Note that the next traceback of a rank continues the chain of its last one."""
        if rank in self._raised:
            code, raised = self._raised.pop(rank)
            self._unhandled[code] -= is_handling
            self._chained[rank] = (raised, is_handling)

    def note_raised(self, cause: Cause, line: Line) -> None:
        """Note the cause of the exception that ends a traceback."""
        self._unhandled[cause.code] += 1
        here = (line.number, line.body[:_MAX_EVIDENCE_CHARS])
        before, is_handling = self._chained.pop(line.rank, (here, False))
        self._raised[line.rank] = (cause.code, here if is_handling else before)

    def note_logged(self, line: Line) -> None:
        """Record what a logger calls an error, in case the log has nothing else."""
        if self._logged is None and (match := _LOGGED.search(line.body)) is not None:
            what = f"A program reported an error: {match['text'].removesuffix('.')}."
            self._logged = _user_error(what, FIX_OF_USER, line.rank, line.number, line.body)
            self._logged.is_warning = True

    def note_again(self, cause: Cause, number: int) -> bool:
        """Count another line that differs only in digits; return False if the cause was taken back."""
        if not cause.is_taken_back:
            cause.count += 1
            cause.last = number
        return not cause.is_taken_back

    def withdraw(self, cause: Cause, *, is_over: bool) -> None:
        """Withdraw the last line of a cause: its program has handled it, or only tries again."""
        if not is_over:
            cause.is_warning = cause.is_retried = True
        elif cause.count > 1:
            cause.count -= 1
        elif cause is self._lone:
            self._lone = None
        elif self._causes.get(cause.code) is cause:
            self.take_back(cause.code)

    def take_back(self, code: str) -> bool:
        """Drop a cause that was over; its lines are matched again. Return whether there was one."""
        self._waiting.pop(code, None)
        cause = self._causes.pop(code, None)
        if cause is not None:
            cause.is_taken_back = True
        return cause is not None

    def add(self, finding: RecordedFailure) -> None:
        """Add what flight recordings show."""
        self._note_proved(f"DS-{finding.code}", finding.facts, finding.evidence, finding.rank)

    def _note_proved(
        self,
        code: str,
        facts: dict[str, str],
        evidence: list[tuple[int, str]],
        rank: int | None = None,
    ) -> None:
        """Record a cause that several records or lines show together."""
        if code not in self._causes:  # else an earlier group stopped, and this one waits for it
            cause = self._causes[code] = _make_cause(self._catalogue.of_code[code], facts)
            cause.rank, cause.evidence, cause.count = rank, evidence, len(evidence)

    def add_report(self, report: Mapping[str, Any]) -> None:
        """Add the report of a launch of ddpsafe; of several, the newest attempt counts."""
        if self._report is not None and self._report["attempt"] > report["attempt"]:
            return
        self._report = report
        facts = {name: str(report[name]).removesuffix(".") for name in ("what", "cause", "fix")}
        cause = _make_cause(self._catalogue.of_code[_REPORT], facts)
        cause.kind = report["kind"]
        cause.retry = _RETRY_OF.get(cause.kind, "once")
        ranks = report.get("missing_ranks") or [None]
        cause.rank = report.get("rank", ranks[0])
        cause.evidence = [(0, line) for line in report["details"]]
        cause.evidence, cause.count = cause.evidence[:_MAX_EVIDENCE], 1
        self._causes[_REPORT] = cause

    def note_rank(self, code: str, line: Line) -> None:
        """Record the rank of a line whose cause others show as well; compare the collectives of timeouts."""
        if code == _LOST:
            self._lost |= set() if line.rank is None else {line.rank}
        elif (mismatch := self._timeouts.read(line)) is not None:
            self._note_proved(_MISMATCH, *mismatch)

    def causes(self, completed: set[str], tail: Tail) -> list[Cause]:
        """Return the causes, most likely first; noise only if there is nothing else.

        `completed` are the codes of rules whose other line has been read.
        """
        noted = [*self._causes.values(), *([self._lone] if self._lone else [])]
        noted += [cause for code, cause in self._waiting.items() if code in completed]
        noted += [self._logged] if self._logged else []
        by_code: dict[str, Cause] = {}
        for cause in noted:
            if not _is_over(cause, tail) and not (cause.is_wrapper and self._knows_original):
                by_code.setdefault(cause.code, cause)
        _lower_what_ended_nothing(by_code.values(), tail)
        self._excuse_exits(by_code)
        for code in _OFTEN_HANDLED & by_code.keys():
            if self._unhandled.get(code) == 0 and by_code[code].level == "cause":
                by_code[code].level = "end"  # the script's own exception comes first
        self._timeouts.describe(by_code)
        for code in by_code.keys() & set(_UNUSED):
            by_code[code].cause += self._unused
        kept = self._without_general(sorted(by_code.values(), key=_order))
        real = [cause for cause in kept if cause.level != "noise"] or kept
        if real and self._root_rank is not None and real[0].level in _NAMES_ONE_RANK:
            is_unknown = real[0].rank is None or real[0].has_local_rank
            real[0].rank = self._root_rank if is_unknown else real[0].rank
        return real

    def _excuse_exits(self, causes: Mapping[str, Cause]) -> None:
        """Put the ends of ranks after the loss of another one, if that is all that they tell."""
        exits = [cause for cause in causes.values() if cause.level == "exit"]
        ranks = {
            (cause.rank if self._root_rank is None else self._root_rank)
            if cause.rank is None or cause.has_local_rank
            else cause.rank
            for cause in exits
        }
        ranks |= {rank for rank, _ in self._exits if rank is not None}
        # Python ends with 1 after an exception.
        is_excused = ranks <= self._lost and all(code == "1" for _, code in self._exits)
        levels = {cause.level for cause in causes.values()}
        if _LOST in causes and exits and is_excused and levels <= {"exit", "peer", "noise"}:
            causes[_LOST].cause += _NONE_FAILED
            causes[_LOST].level = "likely"

    def _without_general(self, ranked: list[Cause]) -> list[Cause]:
        """Leave out causes that add nothing to a more specific one."""
        rules = self._catalogue.of_code
        found = [cause.code for cause in ranked if cause.code in rules]
        general = {over for code in found for over in rules[code].over}
        # One wait shows in many lines: in those of each rank, of the watchdog, and of the store.
        waits = sorted(
            (cause for cause in ranked if is_timeout(cause.code)),
            key=lambda cause: (LEVELS[cause.level], self._catalogue.place[cause.code]),
        )
        is_recorded = any(code.startswith(_FLIGHT) for code in found)
        general |= {cause.code for cause in (waits if is_recorded else waits[1:])}
        if is_recorded:
            general.add(_NCCL)
        # What a library says about its own failure is known when another rule of it holds that proves as much:
        # the ranks that torchrun ended with SIGTERM do not tell which signal ended the one before.
        explained: dict[str, int] = {}
        for rule in (rules[code] for code in found if not rules[code].fallback):
            family, level = _family(rule.code), LEVELS[rule.level]
            explained[family] = min(level, explained.get(family, level))
        for rule in (rules[code] for code in found if rules[code].fallback):
            if explained.get(_family(rule.code), len(LEVELS)) <= LEVELS[rule.level]:
                general.add(rule.code)
        return [cause for cause in ranked if cause.code not in general]


class _Timeouts:
    """Compares the collectives that ranks waited in too long: who is behind, who called another one."""

    def __init__(self) -> None:
        self._lowest: tuple[int, int | None] | None = None
        # By group: the lowest and the highest (sequence number, rank).
        self._reached: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        # By group and sequence number: the first call, its rank and its line.
        self._calls: dict[tuple[str, str], tuple[str, int | None, tuple[int, str]]] = {}
        self._is_mismatch = False

    def read(self, line: Line) -> tuple[dict[str, str], list[tuple[int, str]]] | None:
        """Return the facts and lines that prove that two ranks called one collective differently."""
        match, rank = _SEQUENCE.search(line.body), line.rank
        if match is None:
            return None
        if self._lowest is None or int(match[1]) < self._lowest[0]:
            self._lowest = (int(match[1]), rank)
        group = _GROUP.search(line.body)
        name = group[1] if group else ""
        if rank is not None and (name in self._reached or len(self._reached) < MAX_DISTINCT):
            here = (int(match[1]), rank)
            low, high = self._reached.get(name, (here, here))
            self._reached[name] = (min(low, here), max(high, here))
        if match[2] is None or self._is_mismatch or len(self._calls) >= MAX_DISTINCT:
            return None
        has_size = match[3] is not None and match[2] in _SAME_SIZES
        call = f"{match[2]} of {match[3]} elements" if has_size else match[2]
        here_line = (line.number, line.body[:_MAX_EVIDENCE_CHARS])
        call2, rank2, line2 = self._calls.setdefault((name, match[1]), (call, rank, here_line))
        if call2 == call or rank2 == rank or None in (rank, rank2):
            return None
        self._is_mismatch = True
        facts = {"number": match[1], "rank": str(rank), "call": call}
        return facts | {"rank2": str(rank2), "call2": call2}, [line2, here_line]

    def describe(self, causes: Mapping[str, Cause]) -> None:
        """Name the rank that is behind in the causes that say that a collective took too long."""
        if self._lowest is not None and self._lowest[1] is not None:
            for code, cause in causes.items():
                if is_timeout(code) and code != _MISMATCH:
                    cause.rank = self._lowest[1]
        if _WATCHDOG in causes:
            causes[_WATCHDOG].cause += self._skew()

    def _skew(self) -> str:
        """Describe ranks of one group that waited in different collectives, if there are any."""
        for (low, rank), (high, rank2) in self._reached.values():
            # A difference of one also appears after a lost connection.
            if high - low > 1:
                return (
                    f" Rank {rank} waited in number {low}, and rank {rank2} in {high}: they have called"
                    " different numbers of collectives (uneven batches, or a branch on one rank)."
                )
        return ""


def _is_over(cause: Cause, tail: Tail) -> bool:
    """Return whether the end of the log shows that a cause was expected or only a warning."""
    after = tail.passed
    if cause.is_warning:
        after = max(after, tail.progress)
    if cause.is_retried:
        after = max(after, tail.recovered, tail.succeeded)
    return 0 < cause.last < after


def _lower_what_ended_nothing(causes: Iterable[Cause], tail: Tail) -> None:
    """Lower causes to "noise" that the job has outlived: it ended well later, or training went on."""
    ends = [cause.last for cause in causes if cause.level in _ENDS_A_PROCESS]
    for cause in causes:
        has_ended_well = cause.last < tail.succeeded and max(ends, default=0) < tail.succeeded
        has_gone_on = cause.level not in _ENDS_A_PROCESS and tail.went_on(max([cause.last, *ends]))
        if cause.last and (has_ended_well or has_gone_on):
            cause.level = "noise"


def differs_by_rank(code: str) -> bool:
    """Return whether each line of a cause counts, for its rank."""
    return code == _LOST or is_timeout(code)


def is_timeout(code: str) -> bool:
    """Return whether a cause says that a collective took too long."""
    return code.startswith("DS-HANG-")


def _family(code: str) -> str:
    """Return what a rule is about: ``SLURM`` for DS-SLURM-error."""
    return code.split("-")[1]


def is_passed_on(raised: re.Match[str] | None) -> bool:
    """Return whether an exception is that of another process, whose traceback follows."""
    return raised is not None and _CAUGHT_IN_WORKER.match(raised["text"] or "") is not None


def _order(cause: Cause) -> tuple[int, bool, int]:
    is_recorded = cause.code == _REPORT or cause.code.startswith(_FLIGHT)
    return LEVELS[cause.level], not is_recorded, cause.evidence[0][0] if cause.evidence else 0
