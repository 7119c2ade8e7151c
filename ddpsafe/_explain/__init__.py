"""Finds what went wrong in the logs of any launcher: ``ddpsafe explain``.

`reader` goes through a log; `normalise` brings its lines into a usual form, `tracebacks` follows the
exceptions of all ranks, `match` finds the rules of a line, and `ranking` puts the most likely cause first.
`flight` reads torch's recordings instead of a log. The rules are data: `catalogue` loads ``rules/*.toml``
with the pieces and conditions of `checks`, and `rule_files` checks them. Imports point from `rule_files`
and `reader` down to `catalogue` and `checks`.
"""
