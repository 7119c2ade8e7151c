"""``ddpsafe checkpoint``: lists checkpoints, verifies, compares and imports them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._text import printable
from ddpsafe.checkpoint import Checkpointer, import_file
from ddpsafe.checkpoint._checkpointer import read_info
from ddpsafe.checkpoint._checksums import DamagedFileError
from ddpsafe.checkpoint._directory import folder_name, list_steps, step_of
from ddpsafe.checkpoint._format import NAME as MANIFEST
from ddpsafe.checkpoint._format import read_manifest
from ddpsafe.checkpoint._restore import load_checkpoint, missing_step
from ddpsafe.checkpoint._trees import leaves
from ddpsafe.checkpoint.errors import CheckpointError, CorruptCheckpointError, RestoreError
from ddpsafe.cli import HEALTHY, UNHEALTHY, USAGE, complain, on_terminal, say

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    import torch

    from ddpsafe.checkpoint._compare import Loaded

_MAX_VALUE_CHARS: Final = 60
_RENAME: Final = "write --rename state_dict=model, once for each name."


def handle_checkpoints(options: Namespace) -> int:
    """Run the action; print an error of the checkpoints without a traceback, and exit with 2."""
    actions = {"ls": _list, "verify": _verify, "diff": _diff, "import": _import}
    try:
        return actions[options.action](options)
    except (CheckpointError, ConfigError) as error:
        complain(printable(error, keep="\n"))
        return USAGE


def _list(options: Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for step, folder in _require_some(options.directory):
        try:
            rows.append(asdict(read_info(folder)) | {"damage": _damage_by_size(folder)})
        except RestoreError as error:  # noqa: PERF203 - a damaged checkpoint is listed as damaged
            rows.append({"step": step, "damage": error.explanation.what})
    if options.json:
        say(json.dumps(rows, indent=2))
    else:
        titles = ("step", "saved at", "ranks", "size", "names", "metrics", "metadata", "damage")
        _show(titles, map(_row, rows))
    return HEALTHY


def _require_some(place: str, step: int | None = None) -> list[tuple[int | None, Path]]:
    """Return the steps and folders of the checkpoints at a place, newest first, or only that of `step`.

    The place is a directory that a Checkpointer writes to; or the folder of one checkpoint, which may be
    renamed, copied, or a link such as ``latest``. Its step is ``None`` if its name has none.
    """
    path = Path(place).absolute()
    folder = path.resolve()
    if not folder.is_dir():
        raise _misuse(f"{path} is not a directory.")
    own_step = step_of(folder.name)
    checkpoints: list[tuple[int | None, Path]] = (
        [(own_step, folder)]
        if own_step is not None or (folder / MANIFEST).exists()
        else [(saved, path / folder_name(saved)) for saved in list_steps(path)]
    )
    if step is not None:
        others = [other for other, _ in checkpoints if other is not None]
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint[0] == step]
        if not checkpoints:
            raise missing_step(path, step, others=others)
    if not checkpoints:
        raise _misuse(f"There is no checkpoint in {path}.")
    return checkpoints


def _row(checkpoint: dict[str, Any]) -> tuple[str, ...]:
    if "saved_at" not in checkpoint:  # its manifest cannot be read
        return (str(checkpoint["step"]), *[""] * 6, checkpoint["damage"])
    metrics = ", ".join(f"{name}={value}" for name, value in checkpoint["metrics"].items())
    return (
        str(checkpoint["step"]),
        checkpoint["saved_at"],
        str(checkpoint["world_size"]),
        _size_text(checkpoint["size_bytes"]),
        ", ".join(checkpoint["names"]),
        metrics,
        json.dumps(checkpoint["metadata"]) if checkpoint["metadata"] else "",
        checkpoint["damage"] or "",
    )


def _damage_by_size(folder: Path) -> str | None:
    """Return which file is missing or has another size, if one does; reads only the manifest."""
    try:
        manifest = read_manifest(folder)
        for name in manifest.files:
            with manifest.open(folder, name):
                pass
    except DamagedFileError as exc:
        return str(exc)
    except OSError:  # this process cannot read it, but it may be undamaged
        return None
    return None


def _verify(options: Namespace) -> int:
    checkpoints = _require_some(options.directory, options.step)
    problems = [(step, folder, _damage_of(folder, step)) for step, folder in checkpoints]
    if options.json:
        say(
            json.dumps([{"step": step, "damage": damage} for step, _, damage in problems], indent=2)
        )
    else:
        rows = (
            (folder.name if step is None else str(step), "whole" if damage is None else damage)
            for step, folder, damage in problems
        )
        _show(("step", "state"), rows)
    return UNHEALTHY if any(damage for _, _, damage in problems) else HEALTHY


def _damage_of(folder: Path, step: int | None) -> str | None:
    """Check every file and load the checkpoint; return what is wrong, if anything."""
    try:
        manifest = read_manifest(folder)
        for name in manifest.files:
            with manifest.open(folder, name) as file:
                file.check()
        load_checkpoint(folder, step, rank=0, world_size=1)
    except (DamagedFileError, OSError, MemoryError, RecursionError) as exc:
        return str(exc) or type(exc).__name__
    except (CheckpointError, ConfigError) as exc:
        return exc.explanation.what
    return None


def _diff(options: Namespace) -> int:
    before, after = _load(options.before), _load(options.after)
    then, now = _leaves_of(before), _leaves_of(after)
    differences: list[dict[str, str]] = []
    for path in [*then, *(path for path in now if path not in then)]:
        if path not in now:
            differences.append({"path": path, "difference": "only in the first"})
        elif path not in then:
            differences.append({"path": path, "difference": "only in the second"})
        else:
            text = _difference(
                before.shards.whole_leaf(then[path]), after.shards.whole_leaf(now[path])
            )
            if text:
                differences.append({"path": path, "difference": text})
    if options.json:
        say(
            json.dumps(
                {"leaves": len(then.keys() | now.keys()), "differences": differences}, indent=2
            )
        )
    elif differences:
        _show(("path", "difference"), ((row["path"], row["difference"]) for row in differences))
    else:
        say(f"no difference in {len(then)} values")
    return UNHEALTHY if differences else HEALTHY


def _load(place: str) -> Loaded:
    step, folder = _require_some(place)[0]
    try:
        return load_checkpoint(folder, step, rank=0, world_size=1)
    except (DamagedFileError, OSError, MemoryError, RecursionError) as exc:
        raise CorruptCheckpointError(
            Explanation(
                f"The checkpoint {folder} is damaged: {exc}.",
                fix="find an intact one with: ddpsafe checkpoint verify DIRECTORY.",
            )
        ) from exc


def _leaves_of(loaded: Loaded) -> dict[str, Any]:
    own = {f"{name} (rank 0)": value for name, value in (loaded.own or {}).items()}
    trees = {**loaded.replicated, **own}
    return {path: leaf for name, tree in trees.items() for path, leaf in leaves(tree, name)}


def _difference(before: Any, after: Any) -> str:
    import torch

    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        first, second = _describe(before), _describe(after)
        if first != second:
            return f"{first}, then {second}"
        if before.layout is not torch.strided or before.is_nested or before.is_quantized:
            return "" if str(before) == str(after) else f"{first}: other values"
        same = (before == after) | ((before != before) & (after != after))  # noqa: PLR0124 - NaN
        if bool(same.all()):
            return ""
        count = int((~same).sum())
        change = ""
        if before.is_floating_point() or before.is_complex():
            apart = (after.to(torch.complex128) - before.to(torch.complex128)).abs()
            change = f", by up to {float(apart.nan_to_num().max()):.3g}"
        return f"{count} of {before.numel()} values differ{change}"
    if type(before) is not type(after):
        return f"{type(before).__name__}, then {type(after).__name__}"
    if before == after or (before != before and after != after):  # noqa: PLR0124 - NaN
        return ""
    return f"{str(before)[:_MAX_VALUE_CHARS]}, then {str(after)[:_MAX_VALUE_CHARS]}"


def _describe(tensor: torch.Tensor) -> str:
    shape = "nested" if tensor.is_nested else str(tuple(tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _import(options: Namespace) -> int:
    rename = {}
    for option in options.rename:
        old, separator, new = option.partition("=")
        if not separator:
            raise _misuse(f"--rename {option} is not OLD=NEW.", _RENAME)
        if old in rename:
            raise _misuse(f"--rename {option}: {old!r} already has another new name.", _RENAME)
        rename[old] = new
    directory = Path(options.directory).absolute()
    info = import_file(options.file, directory, options.step, name=options.name, rename=rename)
    if options.json:
        say(json.dumps(asdict(info), indent=2))
    else:
        folder = Checkpointer(directory, access="read").path(info.step)
        say(printable(f"{folder}: {', '.join(info.names)}"))
    return HEALTHY


def _misuse(
    what: str, fix: str = "name a directory that a Checkpointer has written to."
) -> ConfigError:
    return ConfigError(Explanation(what, fix=fix))


def _show(titles: Sequence[str], rows: Any) -> None:
    cells = [tuple(printable(cell) for cell in row) for row in rows]
    used = [number for number in range(len(titles)) if any(row[number] for row in cells)]
    table = [
        [titles[number] for number in used],
        *([row[number] for number in used] for row in cells),
    ]
    if not on_terminal():
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table if cells else ():
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            say("  ".join(padded).rstrip())
        return
    drawn = Table(show_edge=False, pad_edge=False)
    for title in table[0]:
        drawn.add_column(title)
    for row in table[1:]:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)


def _size_text(size: int) -> str:
    """Return a size in the largest unit of which it has at least one."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"
