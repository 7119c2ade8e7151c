"""Names of nodes that have not spoken, from what a launcher tells all of them."""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_ITEM: Final = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[]*)(?:,|$)")
_MOST: Final = 100_000


def find_node_names(nnodes: int) -> dict[int, str]:
    """Return the names of the job's nodes by node rank, where Slurm tells them."""
    nodelist = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    names = list(itertools.islice(expand_nodelist(nodelist), _MOST))
    return dict(enumerate(names)) if len(names) == nnodes else {}


def expand_nodelist(text: str) -> Iterator[str]:
    """Spell out ``gpu[01-03,7],m5`` as ``scontrol show hostnames`` does."""
    for prefix, numbers, suffix in _ITEM.findall(text):
        if not prefix and not numbers:
            continue
        for part in numbers.split(",") if numbers else [""]:
            first, _, last = part.partition("-")
            if not last:
                yield f"{prefix}{first}{suffix}"
                continue
            for number in range(int(first), int(last) + 1):
                yield f"{prefix}{number:0{len(first)}d}{suffix}"
