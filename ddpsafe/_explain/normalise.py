"""Brings a line into the form that rules are written for.

Launchers, loggers, containers and pastes put something before a line, fold it, or print it in another
language; shells and libraries word the same failure differently.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._explain.catalogue import built_in
from ddpsafe._explain.tracebacks import FRAME, exception_of

if TYPE_CHECKING:
    from ddpsafe._explain.catalogue import Catalogue

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
_RANK: Final = re.compile(
    # Every alternative begins with one of these: one quick check instead of trying them all.
    r"(?=[\[\drRlLp:])(?:"
    r"\[rank(?P<a>\d+)\]|\[Rank (?P<b>\d+)\]|\[default(?P<c>\d+)\]|^(?P<d>\d{1,5}): "
    r"|^\[1,(?P<e>\d+)\]<std|(?i:\blocal_rank: ?(?P<local>\d+))|\brank\s*: ?(?P<g>\d+)\b"
    r"|\bprocess (?P<h>\d+) terminated|\bRank (?P<i>\d+)\]|^rank-?(?P<j>\d+)[ :|]"
    r"|: task (?P<k>\d+): |\bprocess rank (?P<l>\d+) with PID|\bRANK (?P<m>\d+) PID)"
)
_RANK_WORDS: Final = ("rank", "Rank", "RANK", "[default", "[1,", "process ", ": task ")
_PREFIX: Final = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:?\s*|\[1,mpirank:\d+,algo-\d+\]<std\w+>:\s?|(?:[\w.]+ )?- (?:[\w.]+ - )?(?:ERROR|INFO|WARNING) - |\[1,\d+\]<std\w+>:\s?|\d{1,5}: |[\w.-]+\s+[|│] ?"
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)\s*|\[[\d\-T:., ]+\]\s*|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s*(?:- (?!(?:ERROR|INFO|WARNING) - ))?"
    r"|[IWEF]\d{4} [\d:.]+ +\d+ \S+:\d+\] ?|\[(?:ERROR|WARNING|INFO|DEBUG)\]\s*"
    r"|(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+(?:\d\d-\d\d [\d:]{8} \[?[\w./-]+:\d+\]|[\w./-]+:\d+ --) ?"
    r"|\[pod/\S+\] ?|> |[a-z][\w.-]*\d: (?=\S)|std(?:out|err) [FP] )+"
)
_DECORATION: Final = re.compile(
    r"""
        [^\w\[(]+                             # indentation, quotes, back-ticks, a box
      | [\[(][^\])]{1,60}[\])]:?\s*           # [ERROR], [2026-11-22 10:11:12], (pid=4711)
      | \d[\d:.,T-]{4,30}Z?\s+                # a date, a time
      | [\w.:/-]+:\d+:?\s+                    # main.py:12:
      | (?:E|(?i:error|critical|fatal|stderr|failed|traceback|(?:un)?caught|exception|original|was))
        (?:\s|:(?:[\w.]+:)?\s*)               # ERROR:root:, of pytest E
      | __main__\s?
      | (?i:rank|worker|process)[ -]?\d+(?:\ failed)?:\s
    """,
    re.VERBOSE,
)
"""One piece of what loggers, pytest, boxes and pastes put before an exception."""
_MAX_DECORATIONS: Final = 12
_DECORATED: Final = re.compile(
    r"""(?:(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)|StopIteration)"""
    r"""|_?queue\.(?:Empty|Full))(?:: |:?[\s`'"*│]*$)"""
)
# Every line that `_DECORATED` matches has one of these.
_EXCEPTION_WORDS: Final = ("rror", "xception", "StopIteration", "queue.", "Interrupt", "Timeout")
# The name of a CUDA error in a program's output, but not in source code that compares with it.
_CUDA_NAME: Final = re.compile(
    r"(?<![=!(|&] )(?<![=!(|&])\b(?:cudaError_?|hipError_?|CUDA_ERROR_)(?P<name>[A-Z]\w{2,40})\b(?!\s*[|&)]{2})"
    r"|\b(?i:cuda(?: ?(?:driver|runtime|execution))?(?: api)?(?: failed with)?) ?(?i:error|failure)(?: code)?[:= ]{0,3}\(?(?P<number>\d{1,3})\)?(?=$|[\s.,;)])"
)
_WORLD_SIZE: Final = re.compile(r" \(world_size \d+\)")
_CLASS: Final = re.compile(
    r"(?<!pickle )<class '([\w.]{1,120}(?:Error|Exception))'>(?:: | --> |, | - | )(?=\S)"
)
"""The repr of an exception's class before the exception's text."""
# Ray's list of possible causes, which names SIGKILL and SIGSEGV whatever happened.
_HEDGE: Final = re.compile(
    r"There are some potential root causes.*|\bkilled by SIGKILL by OOM killer due to high|crashed unexpectedly due to SIGSEGV or"
)
_RECORD: Final = re.compile(
    r"""^\{(?:"(?:stream|time|timestamp|ts|level|severity|logger|name)": ?"[^"]{0,80}", ?){0,8}"""
    r"""(?:"(?:log|message|msg|textPayload)": ?")(?P<text>(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)\""""
)
"""A JSON line as Docker, Kubernetes and structured loggers write it."""
_UNFOLD: Final = re.compile(
    r'\n|(?<=[\s:])(?=File "[^"]{1,300}", line \d+, in )'
    r"|(?<=\s)(?=(?:[a-z_]\w{0,40}\.){0,6}(?:StopIteration|[A-Z]\w{0,60}(?:Error|Exception|Interrupt))(?:: |\s*$))"
)
"""Where a call or an exception begins in the middle of a line."""
# An escaped newline, but not part of a call's path such as C:\nets.
_ESCAPED_END: Final = re.compile(r'\\n(?![^"]{0,300}", line \d)')
# Where a string of JSON ends: at a quote that is not escaped.
_JSON_END: Final = re.compile(r'(?<!\\)(?:\\\\)*"')
_MAX_FOLD_WIDTH: Final = 240
# Terminals and forums fold lines at a width between these.
_MIN_FOLD_WIDTH: Final = 50
_LONG_WORD_CHARS: Final = 15
_MAX_JOINED: Final = 4
# If more lines than this are within a long word of the width, the log has been folded.
_MAX_UNFOLDED_FULL: Final = 2
_BEGINS: Final = re.compile(
    rb"""
    \s*(?: Traceback\ \( | File\ " | \[\ ?(?:rank|default|[EWIF]\d*\b|[\d.]+[,\]]) | \(\w+\ pid= | \S+:\d+:\d+\ \[\d
          | \d{4}-\d\d-\d\d | [EWIF]\d+\  | (?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b | [=*-]{3} | Last\ error
          | (?:ERROR|WARNING|WARN|INFO|CRITICAL)\b | frame\ \# | srun: | slurmstepd | terminate\ called | During\ handling )
    """,
    re.VERBOSE,
)
"""How a line begins that does not continue the one before it."""
_CONTINUES: Final = re.compile(r"(?![\w.]+: )[a-z`(][^=]* ")
"""How a line begins that continues a message which a terminal or a paste has broken."""
# A line that its program marks as less than an error, so it proves less.
_WARNING: Final = re.compile(
    r"^.{0,60}?(?:\[W\d* |\[W \w|(?:^|[\]\s:])W\d{4} |(?<![=_\w])WARN(?:ING)?(?<!NCCL WARN)\b|Warning: |(?:^|[\]\s:])W (?=[\w.]+/)"
    r"|\S{1,300}\.py:\d+: \w*Warning: "
    r"|.{0,120}cuda_(?:driver|executor)\.cc:\d+\] failed to allocate "  # it tries again with less
    r"|(?P<info>\[I\d* |\[I \w|(?:^|[\]\s:])I\d{4} |(?<![=_\w])(?:INFO|DEBUG)\b))"
)
# An exception. Some launchers print their ranks' stderr as INFO, so it counts there, too.
_RAISED: Final = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")
# A passed or skipped test, whose name may mention the failure that it provokes.
_PASSED_TEST: Final = re.compile(
    # Atomic, up to the first "::": backtracking over each takes minutes in a line full of them.
    r"^(?=(.*?::\S))\1.* (?:PASSED|SKIPPED|XFAIL|XPASS)\b|^(?:PASSED|SKIPPED|XFAIL) "
)
# A warning of Kubernetes, which tries everything again.
_EVENT: Final = re.compile(r"^Warning {2,}\w")
_STEPS_OF_GOING_ON: Final = 3
_NUMBER: Final = re.compile(r"\d+")
# The first numbers of a line that shows progress are those of the epoch and the step.
_NUMBERS_OF_STEP: Final = 2
_NOTHING: Final = re.compile(
    r"""(?i)[\w-]*(?: (?:errors?|events?|counts?|kills?|failures?|total))?["']?\s*[:=|]\s*"""
    r"""(?:0+(?:\.0+)?(?=[\s,;}\]|)]|$)|(?:false|none|null|no|never|off|\[\]|\{\}|""|'')(?=[,;}\]|)]|\s*$))"""
)
"""What follows the name of a counter or an option: nothing has happened."""
_COUNTER: Final = re.compile(r"\w*_\w* +0(?=\s|$)")
_OPTION: Final = re.compile(r"--[\w-]*$")


@dataclass(slots=True, kw_only=True)
class Line:
    """A line of a log, or a part of one that had several.

    Attributes:
        number: Its number, from 1.
        body: The line without what a launcher or a logger puts before it, in the usual form.
        rank: The rank that it names, if it does.
        has_local_rank: Whether that is a local_rank.
    """

    number: int
    text: str
    body: str
    rank: int | None
    has_local_rank: bool = False


Weight = Literal["error", "warning", "info", "handled"]


def is_handled(line: Line, match: re.Match[str] | None) -> bool:
    """Return whether a line says that its program has handled what it reports."""
    body = line.body
    # The words that a sign has matched do not count: such a rule is about what was handled.
    if match is not None and match.string == body:
        body = f"{body[: match.start()]} {body[match.end() :]}"
    return _has_stem("handled", body) and _phrase("handled").search(body) is not None


def weight_of(line: Line, match: re.Match[str] | None) -> Weight:
    """Return what its program marks a line as, or that it has handled it; less than an error proves less."""
    if is_handled(line, match):
        return "handled"
    marked = _WARNING.search(line.text)
    if marked is None:
        return "error"
    # Some launchers print their ranks' stderr as INFO.
    is_raised = _RAISED.search(line.body) or exception_of(line.body, is_in_traceback=False)
    return "info" if marked["info"] and not is_raised else "warning"


def is_retried(line: Line) -> bool:
    """Return whether a line says that its program tries again."""
    if _EVENT.match(line.body):
        return True
    return _has_stem("retried", line.body) and _phrase("retried").search(line.body) is not None


@functools.cache
def _phrase(name: str) -> re.Pattern[str]:
    return re.compile(built_in().packed["phrases"][name])


def _has_stem(name: str, body: str) -> bool:
    """Return whether a line has a word of the phrases of a name, without which none is tried."""
    lowered = body.lower()
    return any(stem in lowered for stem in built_in().packed["stems"][name])


def is_talk(line: Line, before: str, following: list[str]) -> bool:
    """Return whether a line outside of tracebacks only talks about failures.

    It is an option, a change, a quote, or source code.

    The lines that follow may have the exception of a traceback without calls.
    """
    if _phrase("talk").match(line.body) or (line.text.lstrip().startswith("> ") and before):
        return True
    if not _phrase("source").match(line.body):
        return False
    bare = [without_prefix(text.rstrip()) for text in following]
    is_alone = not any(map(_phrase("program").match, (before, *bare)))
    is_raised = any(exception_of(text, is_in_traceback=False) or undecorated(text) for text in bare)
    return not is_alone and not is_raised


def is_nothing(match: re.Match[str]) -> bool:
    """Return whether what a sign matched is a counter at zero, an option that is off, or a supposition."""
    text = match.string
    is_zero = _NOTHING.match(text, match.end()) or _COUNTER.match(text, match.start())
    is_option = _OPTION.search(text, 0, match.end())
    return bool((is_zero and not is_option) or _phrase("supposed").search(text[: match.start()]))


@dataclass(slots=True, kw_only=True)
class Tail:
    """What the end of a log shows, each as the number of the last line that shows it; 0 for none.

    Attributes:
        progress: A step, an epoch, or a success.
        recovered: Something that was tried again has worked.
        succeeded: The job ended well.
        passed: A run of tests in which none failed.
        steps: Lines that show progress, with the numbers in them.
    """

    progress: int = 0
    recovered: int = 0
    succeeded: int = 0
    passed: int = 0
    steps: list[tuple[int, str]] = field(default_factory=list)

    def went_on(self, number: int) -> bool:
        """Return whether training made several steps after a line."""
        # A rank cannot make them alone: it waits for the others in the first collective.
        return len({text for step, text in self.steps if step > number}) >= _STEPS_OF_GOING_ON


def read_tail(texts: list[str], lines: int) -> Tail:
    """Return what the last lines of a log show; `lines` is the number of the last one."""
    tail = Tail()
    for number, text in enumerate(texts, start=lines - len(texts) + 1):
        body = without_prefix(clean(text))
        if _phrase("progress").search(text):
            tail.progress = number
            tail.steps.append((number, " ".join(_NUMBER.findall(body)[:_NUMBERS_OF_STEP])))
        if _phrase("succeeded").search(text):
            tail.succeeded = number
        if _phrase("recovered").search(text):
            tail.recovered = number
        if _phrase("all_passed").match(body):
            tail.passed = number
    return tail


def is_passed_test(body: str) -> bool:
    """Return whether a line reports a test that passed, whose name may mention a failure."""
    return _PASSED_TEST.search(body) is not None


def clean(line: str) -> str:
    """Return a line without colours, other control characters and white space at its end."""
    return (line if line.isprintable() else _ANSI.sub("", line)).rstrip()


def record_text(line: str) -> str | None:
    """Return the message of a JSON line; None if the line is not one."""
    record = _RECORD.match(line)
    if record is None:
        return None
    text: str = json.loads(f'"{record["text"]}"', strict=False)
    return text


def without_prefix(line: str) -> str:
    """Return a line without what a launcher or a logger puts before it."""
    return _PREFIX.sub("", line)


def without_hedge(body: str) -> str:
    """Return a line without a list of causes that its program only supposes."""
    return _HEDGE.sub("", body) if "root causes" in body or " due to " in body else body


def unfolded(body: str) -> list[str] | None:
    """Return the lines of a traceback that is in one line; None if it is not one."""
    # A paste has lost its newlines, or a logger has written it as JSON, with escapes.
    if ('File "' not in body and 'File \\"' not in body) or FRAME.fullmatch(body):
        return None
    if (call := body.find('File \\"')) >= 0 and (end := _JSON_END.search(body, call)) is not None:
        body = body[: end.start()]
    text = _ESCAPED_END.sub("\n", body).replace('\\"', '"')
    return list(filter(str.strip, _UNFOLD.split(text)))


def rank_of(line: str) -> tuple[int | None, bool]:
    """Return the rank that a line names, if it does, and whether it is a local_rank."""
    # Most lines name no rank, and searching them for every form of it takes ten times as long.
    if not line[:1].isdigit() and not any(word in line for word in _RANK_WORDS):
        return None, False
    match = _RANK.search(line)
    if match is None:
        return None, False
    return int(match[match.lastgroup or 0]), match.lastgroup == "local"


def undecorated(body: str) -> str | None:
    """Return the exception in a line without its decorations."""
    if not any(word in body for word in _EXCEPTION_WORDS):
        return None
    begin = 0
    # One by one, because a pattern that repeats pieces may take exponential time.
    for _ in range(_MAX_DECORATIONS):
        decoration = _DECORATION.match(body, begin)
        if decoration is None:
            return None
        begin = decoration.end()
        if _DECORATED.match(body, begin):
            quote = body[:begin].rstrip()[-1:]
            bare = body[begin:].rstrip("`*│ ")
            return bare.removesuffix(quote) if quote in ("'", '"') else bare
    return None


def in_usual_form(body: str, catalogue: Catalogue) -> str:
    """Return messages of other languages as bash and Python print them in English."""
    messages = catalogue.ascii_english if body.isascii() else catalogue.english
    for text, english in messages.items():
        if text in body:
            body = (
                body.replace(text, english)
                .replace("\N{FULLWIDTH COLON}", ": ")
                .replace(" : ", ": ")
            )
    if "(world_size " in body:
        # ddpsafe's errors have it beside the rank. With what follows it, rules about a wrong world size
        # would match: "rank 1 (world_size 2) raised ValueError: lr must be below 1".
        body = _WORLD_SIZE.sub("", body)
    if "<class '" in body:
        body = _CLASS.sub(r"\1: ", body)
    # CUDA errors in NCCL's lines have rules of their own, which say more.
    if ("rror" in body or "ERROR" in body or "failure" in body) and "NCCL" not in body:
        body = _with_cuda_message(body, catalogue.cuda)
    return body


def _with_cuda_message(body: str, messages: dict[str, str]) -> str:
    """Return a line that has only the name or number of a CUDA error with CUDA's message for it."""
    name = _CUDA_NAME.search(body)
    key = "" if name is None else (name["number"] or name["name"].replace("_", "").lower())
    message = messages.get(key)
    if name is None or message is None:
        return body
    # The driver, XLA and TensorFlow print "NAME: message".
    if message in body and not body.startswith(f": {message}", name.end()):
        return body
    return f"{body[: name.start()]}CUDA error: {message} ({name[0]}){body[name.end() :]}"


class Folds:
    """Finds lines that a terminal or a paste has broken, in a part of a log.

    Attributes:
        width: The width of the longest one.
        is_paste: Whether several lines are about that long, as in a folded log.
    """

    def __init__(self, lines: list[bytes]) -> None:
        self.lines, self.width = lines, max(map(len, lines))
        full = sum(len(line) > self.width - _LONG_WORD_CHARS for line in lines)
        self.is_paste = full > _MAX_UNFOLDED_FULL

    def following(self, index: int) -> list[str]:
        """Return the few lines after one of them."""
        return [
            line.decode("utf-8", "replace") for line in self.lines[index + 1 : index + _MAX_JOINED]
        ]

    def rest(self, index: int) -> list[str]:
        """Return the lines that continue one, which is folded if the next word did not fit."""
        if self.width > _MAX_FOLD_WIDTH:
            return []
        lines, rest = self.lines[index : index + _MAX_JOINED], list[str]()
        is_message = lines[0].rstrip().endswith(b":")
        for line, following in itertools.pairwise(lines):
            text = following.decode("utf-8", "replace").strip()
            word = following.lstrip().split(b" ", 1)[0]
            is_full = len(line) >= _MIN_FOLD_WIDTH or is_message
            # A single capitalised word need not continue the line.
            is_sentence = self.is_paste or is_message or (b"Error: " in lines[0] and " " in text)
            continues = is_sentence or not text[:1].isupper()
            if not (text and is_full and continues and len(line) + 1 + len(word) > self.width):
                break
            if _BEGINS.match(following):
                break
            rest.append(without_prefix(text))
        return rest


def continuing(following: list[str]) -> list[str]:
    """Return the lines that continue a message which a terminal or a paste has broken anywhere."""
    texts = (without_prefix(text.rstrip()) for text in following)
    return list(itertools.takewhile(_CONTINUES.match, texts))
