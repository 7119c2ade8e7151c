"""The catalogue of failures: how each shows in a log, its cause, its fix, and whether to retry.

``rules/*.toml`` hold it, an area in each file, every rule with its examples. A rule describes a
mechanism, not one sentence: its patterns hold what every version of a message has in common.
``docs/how-to/explain-your-own-failures.md`` describes the columns.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
import sys
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from ddpsafe._advice import ADVICE, general_advice
from ddpsafe._explain.checks import CHECKS, expand

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._errors import FailureKind

Level = Literal["cause", "exception", "end", "likely", "exit", "peer", "noise"]
"""How much a line proves. ``cause``: it names what is wrong. ``exception``: the script's own error.
``end``: how a process was ended, but not why. ``likely``: a wait that timed out, or a line that suggests the cause. ``exit``: it exited
by itself, which a rank does whatever went wrong. ``peer``: another rank has gone. ``noise``: harmless, and named only if a log holds nothing else."""

LEVELS: Final[dict[Level, int]] = {level: place for place, level in enumerate(get_args(Level))}

Retry = Literal["never", "once", "yes", "elsewhere"]
"""Whether trying again can help: ``once`` may, ``yes`` does, ``elsewhere`` does only on other hardware."""

AREAS: Final = (
    *(
        "containers",
        "memory",
        "gloo",
        "data",
        "frameworks",
        "training",
        "launchers",
        "ddp",
        "store",
    ),
    *("processes", "checkpoint", "environment", "cuda", "hardware", "peers", "nccl", "storage"),
    *("hangs", "ddpsafe", "noise"),
)
"""The files of rules. Of two rules that match one line and prove as much, the one that stands first counts,
so the more specific one stands first: in its file, or in an earlier file."""

PACKED: Final = "catalogue.json"
"""The file of a wheel that `hatch_build.py` makes of the TOML."""
GRAM: Final = 4
"""Characters of a gram: it fits into 32 bits, so numpy can look up all of a log's. No keyword is shorter."""
# What most lines of healthy logs and of tracebacks contain.
_FREQUENT: Final = (
    " step epoch iteration train loss valid lr: rate time data rank world size batch error load worker"
    " saved checkpoint to validation optimizer backward forward warning received channel via module"
    " traceback (most recent call last) /lib/python3 _wrapped_call autograd forward(*args, **kwargs)"
    " data time checkpoint, validation accuracy, in main, self, output = /train.py"
)

# Most logs need a few of a thousand patterns.
compiled = functools.cache(re.compile)
"""Compile a pattern when it is first used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRule:
    """One failure of the catalogue.

    Attributes:
        code: Stable name, ``DS-<AREA>-<name>`` for a rule of ddpsafe.
        kind: The failure kind that the launcher gives it.
        level: How much its lines prove.
        retry: Whether trying again can help.
        keywords: Plain words in lower case. Its patterns are tried only on lines that have one of them.
        signs: Patterns of one line; any of them is evidence. A named group may be used in `cause`
            and `fix`.
        also: A pattern that another line of the log has to match; ``None`` if there is none.
        raised_in: A pattern of the innermost call of the exception, ``File "x.py", line 5, in f``,
            which has to match if `also` does not; ``None`` if any call will do. In a rule without `signs` and in a fallback,
            the place alone is evidence, for exceptions whose own words no rule knows. `cause` may quote those as ``{said}``.
        until: A pattern of a later line that cancels what was found before it; ``None`` if none does.
        unless: A pattern that the line must not match; ``None`` if there is none.
        check: A further condition on the match, by its name in `checks`; ``None`` if there is none.
        over: Codes of more general rules that add nothing when this one holds.
        fallback: Whether it is tried only on lines that no other rule matches: it passes on what a
            library says about its own failure.
        cause: What happened.
        fix: What to do, to copy where possible.
        place: The file and line of a rule of the user's; empty for one of ddpsafe.
    """

    code: str
    kind: FailureKind
    level: Level = "cause"
    retry: Retry
    keywords: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    also: str | None = None
    raised_in: str | None = None
    until: str | None = None
    unless: str | None = None
    check: str | None = None
    over: frozenset[str] = frozenset()
    fallback: bool = False
    cause: str
    fix: str
    place: str = ""

    @property
    def page(self) -> str:
        """Where to read on: from the root of the documentation, or in the user's file."""
        return self.place or f"docs/reference/failures.md#{self.code.lower()}"

    def find(self, body: str) -> re.Match[str] | None:
        """Return the match of a line, or None if the rule does not match it."""
        for sign in self.signs:
            match = compiled(sign).search(body)
            if match is None or (self.check is not None and not CHECKS[self.check](match)):
                continue
            if self.unless is not None and compiled(self.unless).search(body):
                return None
            return match
        return None

    def is_raised_in(self, call: str | None) -> bool:
        """Return whether the innermost call of an exception is the one that the rule is about."""
        if self.raised_in is None or call is None:
            return False
        return compiled(self.raised_in).search(call) is not None


class Catalogue:
    """All rules in their order, and the words that lead to them.

    Attributes:
        rules: Every rule, the more specific one first within a level.
        place: The place of a rule in their order, by its code.
        by_place: Rules for any exception raised in a certain place, if no rule matches its text.
        grams: The numbers of rules by a gram that their lines have, with the keyword that has it.
        stages: What the script was doing, by a call of a traceback: ``call``, ``who``, ``fix``.
        english: Messages of shells and the C library in other languages, with the English one.
        ascii_english: Those of them that are ASCII.
        cuda: CUDA's message of an error, by its names and number.
    """

    def __init__(self, packed: Mapping[str, Any], own: Iterable[LogRule] = ()) -> None:
        """Make it of what `pack` returns and of rules of the user, which come first."""
        own = tuple(own)
        self.packed = packed
        self.rules = (*own, *map(_rule, packed["rules"]))
        self.of_code = {rule.code: rule for rule in self.rules}
        self.place = {code: number for number, code in enumerate(self.of_code)}
        self.by_place = tuple(
            rule for rule in self.rules if rule.raised_in and (rule.fallback or not rule.signs)
        )
        self.grams: dict[str, list[tuple[str, int]]] = {
            gram: [(word, number + len(own)) for word, number in entries]
            for gram, entries in packed["grams"].items()
        }
        for gram, entries in _index([rule.keywords for rule in own]).items():
            self.grams.setdefault(gram, []).extend(entries)
        self.stages: list[dict[str, str]] = packed["stages"]
        self.english: dict[str, str] = packed["english"]
        self.ascii_english = {said: text for said, text in self.english.items() if said.isascii()}
        self.cuda: dict[str, str] = packed["cuda"]


@functools.cache
def built_in() -> Catalogue:
    """Return the catalogue that comes with ddpsafe."""
    # A wheel has the catalogue as one JSON file, which loads in a few milliseconds; a checkout has the
    # TOML, which takes 0.1 s.
    try:
        packed = pkgutil.get_data(__package__, PACKED)
    except OSError:
        return Catalogue(pack(read_toml()))
    return Catalogue(json.loads(packed or b""))


def read_toml() -> dict[str, str]:
    """Return the texts of the catalogue's files by their names, also those in a zip file."""
    names = [*(f"rules/{area}.toml" for area in AREAS), "exceptions.toml", "words.toml"]
    texts = {name: pkgutil.get_data(__package__, name) or b"" for name in names}
    return {Path(name).stem: text.decode() for name, text in texts.items()}


def pack(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the catalogue as plain data, from the texts of its files.

    The examples of rules are left out, and pieces of patterns are filled in.
    """
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    tables = {name: toml.loads(text) for name, text in texts.items()}
    rules = [pack_rule(table) for area in AREAS for table in tables[area]["rule"]]
    words = tables["words"]
    return {
        "rules": rules,
        "grams": _index([rule.get("keywords", ()) for rule in rules]),
        "stages": tables["exceptions"]["stage"],
        "english": {
            said: english for english, others in words["english"].items() for said in others
        },
        "cuda": {name: message for message, names in words["cuda"].items() for name in names},
        "phrases": {
            **{name: f"(?i){'|'.join(any_of)}" for name, any_of in words["phrases"].items()},
            **{name: "|".join(any_of) for name, any_of in words["exact_phrases"].items()},
        },
        "stems": words["stems"],
    }


def pack_rule(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule of a TOML file as `LogRule` takes it: without its examples, and with the shared advice."""
    rule = {name: value for name, value in table.items() if "examples" not in name}
    for number, name in enumerate(("cause", "fix")):
        rule[name] = with_advice(rule["code"], number, rule[name])
    rule["signs"] = [expand(sign) for sign in rule.get("signs", ())]
    for name in ("also", "raised_in", "until", "unless"):
        if name in rule:
            rule[name] = expand(rule[name])
    return rule


def with_advice(code: str, number: int, text: str) -> str:
    """Return a cause (number 0) or what to do (1) with what other parts of ddpsafe say too filled in."""
    if code not in ADVICE or "{advice}" not in text:
        return text
    text = text.replace("{advice}", general_advice(code)[number])
    return text[0].upper() + text[1:]


def _rule(packed: Mapping[str, Any]) -> LogRule:
    over = frozenset(packed.get("over", ()))
    lists = {name: tuple(packed.get(name, ())) for name in ("keywords", "signs")}
    return LogRule(**{**packed, **lists, "over": over})


def own_rule(table: Mapping[str, Any], place: str) -> LogRule:
    """Return a rule of a user's file, which has been checked; `place` is its file and line."""
    return _rule({**pack_rule(table), "place": place})


def grams_of(text: str) -> set[str]:
    """Return every sequence of so many characters in a text."""
    return {text[start : start + GRAM] for start in range(len(text) - GRAM + 1)}


def _index(keywords: list[Iterable[str]]) -> dict[str, list[tuple[str, int]]]:
    """Return keywords and the numbers of their rules, by one of the keyword's grams."""
    # Looking up all grams of a line takes a tenth of the time of searching it for each of 300 words.
    uses = Counter(word for words in keywords for word in words)
    grams = {word: grams_of(word) for word in uses}
    counts: Counter[str] = Counter()
    for word, count in uses.items():
        counts.update(dict.fromkeys(grams[word], count))
    frequent = grams_of(_FREQUENT)
    # Of a keyword's grams, the one that the fewest rules have, and that few healthy lines have.
    key = {
        word: min(each, key=lambda gram: (gram in frequent, counts[gram], " " in gram, gram))
        for word, each in grams.items()
    }
    index: dict[str, list[tuple[str, int]]] = {}
    for number, words in enumerate(keywords):
        for word in words:
            index.setdefault(key[word], []).append((word, number))
    return index
