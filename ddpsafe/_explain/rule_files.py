"""Checks files of rules: those of ddpsafe in its tests, and those of a user when they are read.

Every problem names its file and line, and says what to write.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddpsafe._config.problems import find_near, problems_of, show
from ddpsafe._errors import ConfigError, ConfigProblem, Explanation, FailureKind
from ddpsafe._explain.catalogue import (
    GRAM,
    Catalogue,
    Level,
    LogRule,
    Retry,
    built_in,
    own_rule,
    with_advice,
)
from ddpsafe._explain.checks import CHECKS, PIECES, expand
from ddpsafe._explain.reader import explain_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Text = Annotated[str, Field(min_length=1)]

_HEADER: Final = re.compile(r"^\[\[rule\]\]", re.MULTILINE)
_FACT: Final = re.compile(r"\{([a-z_]\w*)\}")
_ENDS_OF_SENTENCE: Final = (".", ":", ")", "`")
_UNBOUNDED: Final = re.compile(r"[*+]|\{\d*,\d*\}")
_PLAIN: Final = re.compile(r"(?:[\w :/,'-]|\\[.\[\]()/ -])*")
_FILLERS: Final = ("a", "0", " ", ".", ":", "/", "-", "a ", "a.", "a_", "0,", "a:", "(", "x=")
_LENGTHS: Final = (*range(8, 26), 60, 125, 250, 500, 1_000)
# An ordinary pattern, whose time rises with the square of a line's length, and the line that takes it
# longest. A pattern that takes so many times as long is refused: on any machine, however fast or busy.
_ORDINARY: Final = r"(?:\w+\.)*\w+!"
_LONG_LINE: Final = "a." * 1_000
_SLOW: Final = 3.0
# A machine may stop a thread in the middle of a search, at the expense of the thread's own clock.
_SEARCHES: Final = 3


class RuleTable(BaseModel):
    """A ``[[rule]]`` of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    code: str = Field(
        pattern=r"^[A-Z][A-Z0-9]*(-[A-Za-z0-9]+)+$",
        description="A stable name.",
        examples=['"ACME-scratch-full"'],
    )
    kind: FailureKind = Field(description="The failure kind.", examples=['"config"'])
    level: Level = Field(default="cause", description="How much its lines prove.")
    retry: Retry = Field(description="Whether trying again can help.", examples=['"never"'])
    keywords: list[Text] = Field(
        default=[],
        description="Plain words in lower case, one of which every matching line has.",
        examples=['["scratch quota"]'],
    )
    signs: list[Text] = Field(
        default=[],
        description="Patterns of one line.",
        examples=["['scratch quota of \\w+ exceeded']"],
    )
    also: Text | None = Field(default=None, description="A pattern of another line.")
    raised_in: Text | None = Field(default=None, description="A pattern of the innermost call.")
    until: Text | None = Field(default=None, description="A pattern of a line that cancels it.")
    unless: Text | None = Field(default=None, description="A pattern the line must not match.")
    check: str | None = Field(default=None, description="A further condition, by its name.")
    over: list[Text] = Field(default=[], description="Codes of rules that add nothing then.")
    fallback: bool = Field(default=False, description="Whether any other rule comes first.")
    cause: Text = Field(description="What happened.", examples=['"The scratch disk is full."'])
    fix: Text = Field(description="What to do.", examples=['"Delete old runs: du -sh $SCRATCH/*."'])
    examples: list[Text] = Field(
        default=[],
        description="Logs that it explains.",
        examples=["['scratch quota of me exceeded']"],
    )
    not_examples: list[Text] = Field(default=[], description="Logs that it must not explain.")


class RuleFile:
    """A file of rules that was read, each rule checked alone.

    Attributes:
        tables: Its rules that are right, by their number among all of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: dict[int, RuleTable] = {}
        self.problems: list[ConfigProblem] = []
        self._lines: list[int] = []
        try:
            self._text = path.read_text("utf-8")
            toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
            table = toml.loads(self._text)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"it is not valid TOML ({error})"
            self._add("rules", str(path), f"{why}", "the path of a TOML file with [[rule]] tables")
            return
        starts = [
            self._text.count("\n", 0, header.start()) for header in _HEADER.finditer(self._text)
        ]
        self._lines = [start + 1 for start in starts]
        rules = table.pop("rule", [])
        for name in table:
            self._add(name, name, "there is no such table", "[[rule]]")
        if not isinstance(rules, list) or not rules:
            self._add("rule", show(rules), "the file has no rule", '[[rule]], then code = "…"')
            return
        for number, rule in enumerate(rules):
            self._check_table(number, rule)

    def place(self, number: int, field: str = "") -> str:
        """Return the file and the line of a rule, or of one of its fields."""
        if number >= len(self._lines):
            return str(self.path)
        line = self._lines[number]
        ends = [*self._lines, self._text.count("\n") + 2]
        block = self._text.split("\n")[line - 1 : ends[number + 1] - 1]
        name = re.compile(rf"\s*{re.escape(field)}\s*=")
        within = (offset for offset, text in enumerate(block) if field and name.match(text))
        return f"{self.path}:{line + next(within, 0)}"

    def _add(self, field: str, given: object, why: str, write: str, place: str = "") -> None:
        source = place or str(self.path)
        text = given if isinstance(given, str) else show(given)
        self.problems.append(
            ConfigProblem(field=field, given=text, why=why, write=write, source=source)
        )

    def _check_table(self, number: int, rule: object) -> None:
        if not isinstance(rule, dict):
            self._add("rule", show(rule), "it is not a table", "[[rule]]", self.place(number))
            return
        try:
            table = RuleTable.model_validate(rule)
        except ValidationError as error:
            self.problems += problems_of(
                error, RuleTable, source=lambda location: self.place(number, str(location[0]))
            )
            return
        before = len(self.problems)
        for field, given, why, write in _problems_of_rule(table):
            place = self.place(number, field)
            self._add(f"{field} of {table.code}", given, why, write, place)
        if len(self.problems) == before:
            self.tables[number] = table


def _problems_of_rule(table: RuleTable) -> Iterator[tuple[str, str, str, str]]:
    """Yield the field, the value, what is wrong with it, and what to write, of one rule alone."""
    given = table.model_dump()
    patterns = [("signs", sign) for sign in table.signs]
    for name in ("also", "raised_in", "until", "unless"):
        patterns += [(name, given[name])] if given[name] is not None else []
    for name, pattern in patterns:
        if (wrong := _why_no_pattern(pattern)) is not None:
            yield name, pattern, *wrong
    names = {name for sign in table.signs for name in re.findall(r"\(\?P<(\w+)>", sign)}
    texts = [with_advice(table.code, n, text) for n, text in enumerate((table.cause, table.fix))]
    for field, text in zip(("cause", "fix"), texts, strict=True):
        if not text.endswith(_ENDS_OF_SENTENCE):
            yield field, text, "it is not a sentence", f"{text}."
    unknown = [name for name in _FACT.findall(texts[0]) if table.signs and name not in names]
    if unknown and not (table.raised_in is not None and unknown == ["said"]):
        why = f"no sign has a group {unknown[0]}"
        yield "cause", table.cause, why, f"(?P<{unknown[0]}>…) in a sign"
    if table.check is not None and table.check not in CHECKS:
        yield "check", table.check, "there is no such check", f"one of {', '.join(CHECKS)}"
    for word in table.keywords:
        if word != word.lower() or len(word) < GRAM:
            why = f"a keyword is in lower case and has at least {GRAM} characters"
            yield "keywords", word, why, f'"{word.lower()}" and more of what stands beside it'
    if bool(table.signs) != bool(table.keywords):
        lacks, has = ("keywords", "signs") if table.signs else ("signs", "keywords")
        write = f'{lacks} = ["…"], words in lower case of which every matching line has one'
        yield has, show(given[has]), f"the rule has no {lacks}", write


def _why_no_pattern(pattern: str) -> tuple[str, str] | None:
    """Return what is wrong with a pattern, and what to write."""
    try:
        full = expand(pattern)
        re.compile(full)
    except KeyError as error:
        near = find_near(error.args[0], PIECES) or "exited"
        return f"there is no piece {error}", f"(?&{near})"
    except re.error as error:
        return f"it is not a regular expression ({error})", "a pattern of Python's re"
    filler = find_slow(full)
    if filler is None:
        return None
    why = f"it takes too long for a line of many {filler!r} (catastrophic backtracking)"
    return why, "no repetition within a repetition, and .{0,80} for .*"


def find_slow(pattern: str) -> str | None:
    """Return the filler of a line for which a pattern takes much too long, or None."""
    without_classes = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern)
    if len(_UNBOUNDED.findall(without_classes)) < len(("one", "within another")):
        return None
    compiled = re.compile(pattern)
    plain = _PLAIN.match(re.sub(r"(?<!\\)\((?:\?(?:P<\w+>|i?:))?", "", pattern))
    prefix = "" if plain is None else plain[0].replace("\\", "")
    for filler in _FILLERS:
        # Lengths rise until a search is slow, so that even exponential time is noticed before it matters.
        for length in _LENGTHS:
            text = f"{prefix}{filler * length}\x00"
            if all(_search_s(compiled, text) > _SLOW * _ordinary_s() for _ in range(_SEARCHES)):
                return filler
    return None


@functools.cache
def _ordinary_s() -> float:
    ordinary = re.compile(_ORDINARY)
    return min(_search_s(ordinary, _LONG_LINE) for _ in range(_SEARCHES))


def _search_s(pattern: re.Pattern[str], text: str) -> float:
    started_s = time.thread_time()
    pattern.search(text)
    return time.thread_time() - started_s


def read_rule_files(paths: Iterable[Path]) -> Catalogue:
    """Return the catalogue of ddpsafe with the rules of a user's files, which come first.

    Of a folder, every ``*.toml`` is read.

    Raises:
        ConfigError: A file cannot be read or a rule is wrong; it lists every problem.
    """
    files = [
        RuleFile(file)
        for path in paths
        for file in (sorted(path.glob("*.toml")) if path.is_dir() else [path])
    ]
    rules = [
        own_rule(table.model_dump(exclude_unset=True), file.place(number))
        for file in files
        for number, table in file.tables.items()
    ]
    catalogue = Catalogue(built_in().packed, rules)
    problems = [problem for file in files for problem in file.problems]
    problems += check_together(files, catalogue, known=built_in().of_code)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        what = f"The rules have {count}; no log was read."
        lines = [f"{number}. {problem}" for number, problem in enumerate(problems, start=1)]
        raise ConfigError(Explanation(what, details=lines), problems=tuple(problems))
    return catalogue


def check_together(
    files: Iterable[RuleFile], catalogue: Catalogue, *, known: Iterable[str] = ()
) -> list[ConfigProblem]:
    """Return what is wrong with rules beside each other: their codes and examples.

    The codes `known` may not be used again; the catalogue has the rules of the files, too.
    """
    problems: list[ConfigProblem] = []
    places = dict.fromkeys(known, "ddpsafe")
    claims: dict[str, str] = {}
    for file in files:
        for number, table in file.tables.items():

            def add(field: str, given: str, why: str, write: str) -> None:
                source = file.place(number, field)  # noqa: B023 - called in this round
                name = f"{field} of {table.code}"  # noqa: B023 - called in this round
                problems.append(
                    ConfigProblem(field=name, given=given, why=why, write=write, source=source)
                )

            if table.code in places:
                add("code", table.code, f"{places[table.code]} has that code", "another code")
            places[table.code] = file.place(number)
            for code in table.over:
                if code not in catalogue.of_code and code != "DS-USER-exception":
                    near = find_near(code, catalogue.of_code) or "DS-USER-exception"
                    add("over", code, "no rule has that code", f'"{near}"')
            rule = catalogue.of_code[table.code]
            is_matched = bool(rule.signs or rule.raised_in)
            if is_matched and not table.examples:
                write = "examples = ['…'], a log of which it finds the cause"
                add("code", table.code, "the rule has no example", write)
            for log in table.examples:
                if log.strip() in claims:
                    why = f"it is an example of {claims[log.strip()]}, too"
                    add("examples", show(log), why, "each example once")
                claims[log.strip()] = table.code
                if (wrong := _why_not(log, rule, catalogue)) is not None:
                    add("examples", show(log), *wrong)
            for log in table.not_examples:
                if table.code in {cause.code for cause in explain_text(log, catalogue)}:
                    add("not_examples", show(log), "the rule explains it", "a narrower sign")
    return problems


def _why_not(log: str, rule: LogRule, catalogue: Catalogue) -> tuple[str, str] | None:
    """Return why an example is not explained by its rule first, and what to write; None if it is."""
    causes = explain_text(log, catalogue)
    if causes and causes[0].code == rule.code:
        return None
    lines = log.splitlines()
    signed = [line for line in lines if rule.find(line) is not None]
    if signed and not any(word in signed[0].lower() for word in rule.keywords):
        return "none of its keywords is in the line that a sign matches", "such a word as a keyword"
    if causes:
        return (
            f"{causes[0].code} explains it first",
            "a sign that only one of them matches, or over",
        )
    if not signed and rule.signs:
        return "no sign matches a line of it", "a sign that does"
    return (
        "the rule does not explain it",
        "a log with the line, and what `also` or `raised_in` need",
    )
