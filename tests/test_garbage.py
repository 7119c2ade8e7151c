"""Garbage collections skip modules that stay loaded, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import scripts

PROGRAM = """
    import gc, sys, weakref
    from ddpsafe._garbage import exempt_from_gc

    class Large:
        def __init__(self):
            self.itself = self

    before, after_script, was_enabled = map(int, sys.argv[1])
    if before:
        gc.freeze()
    if not was_enabled:
        gc.disable()
    made, frozen = Large(), gc.get_freeze_count()
    try:
        with exempt_from_gc(after_script=bool(after_script)):
            1 / gc.isenabled()
    except ZeroDivisionError:
        pass
    assert gc.isenabled() == was_enabled
    made = weakref.ref(made)
    gc.collect()
    print(made() is None, (gc.get_freeze_count() - frozen) // 1000 > 0)
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("000", "False True"),
        ("001", "False True"),
        ("010", "True False"),
        ("011", "True False"),
        ("110", "True False"),
        ("111", "True False"),
    ],
)
def test_objects_of_a_script_are_freed_once_they_are_garbage(
    tmp_path: Path, case: str, said: str
) -> None:
    """Deleting a model and collecting frees its memory; only modules that ddpsafe loaded stay."""
    assert scripts.run(tmp_path, PROGRAM, case, fresh=True).lines() == [said]
