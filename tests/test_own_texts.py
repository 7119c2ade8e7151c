"""ddpsafe writes texts for readers and never parses its own.

Facts are passed as data (`Explanation`, `origin`, `kind`), so that rewording a message changes only
the message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from source_tree import PACKAGE, parse, python_files

MATCHERS: Final = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split",
    "rsplit", "find", "rfind", "index", "rindex", "count",
}  # fmt: skip
"""Methods of `str` that search for another text."""

PATTERNS: Final = {"compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub"}
"""Functions of `re` that take a pattern first."""

TEXTS_OF_OTHERS: Final = {
    "_wire/foreign_texts.py": "torch and the system; a row of tests/launcher/test_root_cause.py has an "
    "error of ddpsafe's in the words of others, which is not matched",
    "_explain": "logs of any launcher are what is read there",
    "_secrets.py": "command lines and addresses that a user has written",
}
"""Files and folders that match texts of other programs, each with the program."""

ALLOWED: Final = {}
"""File and text of matches that are not in a message, each with its reason."""


ABOUT_A_FUNCTION: Final = re.compile(r"\b(?:its|the|your) function\b(?! in the log)|\bctx\b")

OF_A_FUNCTION: Final = {
    "_launch.py": "calls of launch() in a rank",
    "_launcher/plan.py": "the arguments of launch() and spawn()",
    "_launcher/diagnosis/attempt_error.py": "chosen by is_script; a row of test_root_cause.py each",
    "_worker/entrypoint.py": "the result of a function, which a script has not",
    "data/_per_process.py": "the function that opens the resource",
}
"""Files whose messages may take for granted that ranks run a function, each with the reason."""


class Match(NamedTuple):
    """A place in the code that searches for a text in another one."""

    file: Path
    line: int
    text: str
    is_pattern: bool


def test_no_text_of_ddpsafe_is_matched() -> None:
    """No pattern, prefix or comparison matches a sentence that ddpsafe writes."""
    trees = {file: parse(file) for file in python_files(PACKAGE)}
    matches = [
        each
        for file, tree in trees.items()
        if not is_about_others(file)
        for each in matches_in(file, tree)
    ]
    assert len(matches) > 40, "the search for matches finds nothing any more"
    at = {(each.file, each.line) for each in matches}
    written = [
        text
        for file, tree in trees.items()
        if not is_about_others(file)
        for line, text in sentences_in(tree)
        if (file, line) not in at
    ]
    assert len(written) > 500, "the search for sentences finds nothing any more"
    found = [
        f"{each.file.relative_to(PACKAGE)}:{each.line}: {each.text!r} is in {text!r}"
        for each in matches
        if is_prose(each)
        for text in written
        if is_in(each, text)
        if (each.file.relative_to(PACKAGE).as_posix(), each.text) not in ALLOWED
    ]
    assert found == []


def test_messages_fit_a_script_as_well_as_a_function() -> None:
    """Under ``ddpsafe run``, a rank has no function, and no ``ctx``: advice says `ddpsafe.current()`."""
    found = {
        (file.relative_to(PACKAGE).as_posix(), text)
        for file in python_files(PACKAGE)
        for _, text in sentences_in(parse(file))
        if ABOUT_A_FUNCTION.search(text)
    }
    assert {file for file, _ in found} == set(OF_A_FUNCTION)
    for rules in PACKAGE.glob("_explain/rules/*.toml"):
        for line in rules.read_text(encoding="utf-8").splitlines():
            is_advice = line.startswith(("cause = ", "fix = ")) and "get_context" not in line
            assert not (is_advice and "ctx." in line), line


def is_about_others(file: Path) -> bool:
    """Return whether a file is listed as one that matches texts of other programs."""
    path = file.relative_to(PACKAGE).as_posix()
    return path in TEXTS_OF_OTHERS or path.partition("/")[0] in TEXTS_OF_OTHERS


def matches_in(file: Path, tree: ast.Module) -> Iterator[Match]:
    """Yield the literals that the code searches for in texts."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            if of_re and node.func.attr in PATTERNS:
                yield from _texts(file, node.args[:1], constants, is_pattern=True)
            elif node.func.attr in MATCHERS:
                yield from _texts(file, node.args[:1], constants, is_pattern=False)
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            yield from _texts(file, operands, constants, is_pattern=False)
        elif isinstance(node, ast.MatchValue):
            yield from _texts(file, [node.value], constants, is_pattern=False)


def _texts(
    file: Path, nodes: list[ast.expr], constants: dict[str, ast.expr], *, is_pattern: bool
) -> Iterator[Match]:
    for node in nodes:
        value = constants.get(node.id, node) if isinstance(node, ast.Name) else node
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List, ast.Set)) else [value]
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield Match(file, part.lineno, part.value, is_pattern)


def sentences_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the sentences that the code writes: literals of several words, except docstrings."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and isinstance(node.body[0], ast.Expr)
    } | {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "…" for each in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
            and len(re.findall(r"[a-z]{2,}", node.value)) > 1
        ):
            yield node.lineno, node.value


def is_prose(match: Match) -> bool:
    """Return whether the searched text may be part of a sentence: it has letters and a space."""
    words = re.sub(r"\\.", "", match.text) if match.is_pattern else match.text
    return re.search(r"[A-Za-z]{2,}", words) is not None and " " in words


def is_in(match: Match, text: str) -> bool:
    """Return whether a match finds something in a text."""
    if not match.is_pattern:
        return match.text in text
    return re.search(match.text, text, re.MULTILINE) is not None
