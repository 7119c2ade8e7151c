"""Packs the rules of ``ddpsafe explain`` into one file of the wheel: hatchling runs this when it builds one."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackRules(BuildHookInterface[Any]):
    """Adds the catalogue as JSON, which loads ten times as fast as TOML.

    It is written outside of the checkout, where it could become older than the rules; an editable
    install needs none.
    """

    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file and have it added to the wheel."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        try:
            from ddpsafe._explain.catalogue import PACKED, pack, read_toml
        finally:
            sys.path.remove(self.root)
        self._folder = Path(tempfile.mkdtemp())
        packed = self._folder / PACKED
        text = json.dumps(pack(read_toml()), ensure_ascii=False, separators=(",", ":"))
        packed.write_text(text, encoding="utf-8")
        build_data["force_include"][str(packed)] = f"ddpsafe/_explain/{PACKED}"

    def finalize(self, *_: object) -> None:
        """Remove the file."""
        if self._folder is not None:
            shutil.rmtree(self._folder)
