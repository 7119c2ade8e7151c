"""Reads source files for the tests of the house rules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[2]
PACKAGE: Final = CHECKOUT / "ddpsafe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of one module by another: in a function (`late`), or under ``if TYPE_CHECKING``."""

    file: Path
    line: int
    module: str
    target: str
    late: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.module} imports {self.target}"


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below `folder`, sorted; none if it does not exist."""
    return sorted(folder.rglob("*.py"))


def module_of(file: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def text_of(file: Path) -> str:
    """Read a file once."""
    return file.read_text(encoding="utf-8")


@functools.cache
def parse(file: Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(text_of(file), filename=str(file))


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Return all nodes of a file."""
    return list(ast.walk(parse(file)))


@functools.cache
def imports_of(file: Path) -> list[Import]:
    """Return every import of a file, also those inside functions."""
    return [
        Import(
            file=file,
            line=node.lineno,
            module=module_of(file),
            target=target,
            late=late,
            for_types=for_types,
        )
        for node, late, for_types in _import_nodes(parse(file), late=False, for_types=False)
        for target in _targets(node, file)
    ]


def calls_of(file: Path, function: str) -> list[ast.Call]:
    """Return the calls of a builtin, or of ``time.sleep`` for ``sleep``."""
    found = []
    for node in nodes_of(file):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name == function:
                found.append(node)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="time" | "builtins"), attr=name)
            ) if name == function:
                found.append(node)
    return found


def _import_nodes(
    node: ast.AST, *, late: bool, for_types: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late, for_types
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _import_nodes(_module([statement]), late=late, for_types=True)
            yield from _import_nodes(_module(child.orelse), late=late, for_types=for_types)
        else:
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _import_nodes(child, late=late or in_function, for_types=for_types)


def _module(statements: list[ast.stmt]) -> ast.Module:
    return ast.Module(body=statements, type_ignores=[])


def _targets(node: ast.Import | ast.ImportFrom, file: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = [*file.relative_to(PACKAGE.parent).parts[:-1]]
        kept = package[: len(package) - node.level + 1]
        base = ".".join([*kept, *([base] if base else [])])
    # `from ddpsafe import _errors` names a module, `from ddpsafe import launch` does not.
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if _is_own_module(name) else base for name in names]


@functools.cache
def _is_own_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
