"""This host's own packet filter: which of its chains may drop a connection between nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe.doctor._mesh.protocol import FilterChain

if TYPE_CHECKING:
    from collections.abc import Iterator

_NFT_LIMIT_S: Final = 2.0
_FAMILIES: Final = ("inet", "ip", "ip6")
_LEGACY_TABLES: Final = Path("/proc/net/ip_tables_names")


def find_filter_chains() -> list[FilterChain] | None:
    """Return the chains in which this host filters packets, or None if they cannot be read."""
    # The PATH of a user who is not root often lacks these folders.
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if nft is None:
        return None if _has_legacy_tables() is not False else []
    try:
        process = subprocess.run(  # noqa: S603 - a fixed command, found on the system's path
            [nft, "-j", "list", "ruleset"], capture_output=True, timeout=_NFT_LIMIT_S, check=True
        )
        entries = json.loads(process.stdout).get("nftables", [])
        chains = [*_filtering(entries)]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
    return chains if chains or _has_legacy_tables() is False else None


def _has_legacy_tables() -> bool | None:
    """Return whether legacy iptables, which nft does not list, has tables; None if unknown."""
    try:
        return bool(_LEGACY_TABLES.read_text().strip())
    except FileNotFoundError:  # the module is not loaded
        return False
    except OSError:
        return None


def _filtering(entries: list[dict[str, Any]]) -> Iterator[FilterChain]:
    """Yield the base chains that may drop or reject a packet, by their policy or by a rule."""
    dropping: set[tuple[str, str, str]] = set()
    jumps: dict[tuple[str, str, str], set[tuple[str, str, str]]] = defaultdict(set)
    for rule in (entry["rule"] for entry in entries if "rule" in entry):
        key = (rule["family"], rule["table"], rule["chain"])
        for part in rule["expr"]:
            if {"drop", "reject"} & part.keys():
                dropping.add(key)
            # How nft lists the targets of rules that iptables-nft has added.
            if part.get("xt", {}).get("name") in ("DROP", "REJECT"):
                dropping.add(key)
            for verb in ("jump", "goto"):
                if verb in part:
                    jumps[key].add((*key[:2], part[verb]["target"]))
    while more := {key for key, targets in jumps.items() if targets & dropping} - dropping:
        dropping |= more
    for chain in (entry["chain"] for entry in entries if "chain" in entry):
        key = (chain["family"], chain["table"], chain["name"])
        filters = chain.get("hook") in ("input", "output") and chain.get("type") == "filter"
        if filters and key[0] in _FAMILIES and (chain.get("policy") == "drop" or key in dropping):
            yield FilterChain(*key, chain["hook"])
