"""The rules of ``ddpsafe explain``: each is complete, finds its examples, and cannot be out of date."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest
from explained import RULES, built_in_files, explain
from source_tree import PACKAGE

from ddpsafe._config.sources import read_explain_rules
from ddpsafe._errors import ConfigError
from ddpsafe._explain import normalise
from ddpsafe._explain.catalogue import AREAS, built_in, pack
from ddpsafe._explain.reader import explain_text
from ddpsafe._explain.rule_files import check_together, find_slow, read_rule_files


def test_every_rule_is_complete_and_finds_its_examples() -> None:
    """Each file fits the model, and each of two thousand logs leads to the rule that it stands beside."""
    files = built_in_files()
    assert sorted(file.path for file in files) == sorted(RULES.iterdir())
    problems = [problem for file in files for problem in file.problems]
    problems += check_together(files, built_in())
    assert not problems, "\n".join(map(str, problems))


def test_what_programs_write_is_looked_up_and_is_not_slow() -> None:
    """The phrases of words.toml, and the patterns of exceptions.toml, which no model checks."""
    packed = built_in().packed
    named = set(re.findall(r'_phrase\("(\w+)"\)', inspect.getsource(normalise)))
    assert named == packed["phrases"].keys()
    patterns = [*packed["phrases"].values()]
    patterns += [each["call"] for each in packed["stages"]]
    assert [pattern for pattern in patterns if find_slow(pattern) is not None] == []


def test_the_installed_rules_are_those_of_the_checkout() -> None:
    """A wheel has them packed into one file, which a build makes of the checkout's."""
    texts = {f"{area}": (RULES / f"{area}.toml").read_text("utf-8") for area in AREAS}
    for name in ("exceptions", "words"):
        texts[name] = (RULES.parent / f"{name}.toml").read_text("utf-8")
    assert json.dumps(built_in().packed) == json.dumps(pack(texts))


def test_the_rules_are_read_in_a_zip_file_too(tmp_path: Path) -> None:
    """Those of a checkout, which has them as TOML."""
    archive = tmp_path / "ddpsafe.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in PACKAGE.rglob("*"):
            if "__pycache__" not in path.parts:
                zipped.write(path, path.relative_to(PACKAGE.parent))
    script = (
        f"import sys; sys.path.insert(0, {str(archive)!r})\n"
        "from ddpsafe._explain.reader import explain_text\n"
        "print(explain_text('MemoryError')[0].code)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "DS-MEM-alloc\n"


OWN: Final = """\
[[rule]]
code = "ACME-scratch"
kind = "config"
retry = "never"
keywords = ["acme-scratch"]
signs = ['acme-scratch: (?P<what>quota of \\w+) exceeded']
over = ["DS-DISK-full"]
cause = "The scratch disk of the cluster is full: {what}."
fix = "Delete old runs: du -sh $SCRATCH/*."
examples = [
    'OSError: [Errno 28] acme-scratch: quota of me exceeded',
]
not_examples = ['acme-scratch mounted']
"""
OWN_LOG: Final = "[rank2]: OSError: [Errno 28] acme-scratch: quota of me exceeded\n"


def test_rules_of_a_cluster_come_before_those_of_ddpsafe(tmp_path: Path) -> None:
    """From a file, a folder, or several of them."""
    (tmp_path / "rules").mkdir()
    path = tmp_path / "rules" / "acme.toml"
    path.write_text(OWN, encoding="utf-8")
    assert json.loads(explain("--json", log=OWN_LOG).out)["findings"][0]["code"] == "DS-DISK-full"
    for given in (path, path.parent):
        run = explain("--json", "--rules", str(given), log=OWN_LOG)
        [first] = json.loads(run.out)["findings"]
        assert (first["code"], first["rank"]) == ("ACME-scratch", 2)
        assert first["cause"] == "The scratch disk of the cluster is full: quota of me."
        assert first["page"] == f"{path}:1"
    run = explain("--rules", str(path), log="MemoryError\n")
    assert run.out.startswith("DS-MEM-alloc")


def test_rules_may_be_named_in_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``[tool.ddpsafe.explain]`` names files and folders, from the folder of pyproject.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme.toml").write_text(OWN, encoding="utf-8")
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.ddpsafe.explain]\nrules = ["acme.toml"]\n', encoding="utf-8")
    assert explain(log=OWN_LOG).out.startswith("ACME-scratch (rank 2)")
    project.write_text('[tool.ddpsafe.explain]\nrule = "acme.toml"\n', encoding="utf-8")
    run = explain(log=OWN_LOG)
    assert run.code == 2
    assert "rules = [" in run.err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("retry", "retri", ("acme.toml:4", "retri", "Did you mean 'retry'?")),
        ('"config"', '"confg"', ("acme.toml:3", "Did you mean 'config'?")),
        ('"acme-scratch"]', '"acme-disk"]', ("acme.toml:10", "none of its keywords is in the line")),
        ('"acme-scratch"]', '"ACME"]', ("acme.toml:5", "in lower case")),
        ("over = [", 'over = ["DS-DISK-ful", ', ("acme.toml:7", "no rule has that code", "DS-DISK-full")),
        ("(?P<what>quota", "(?P<what>(?&exitd)", ("acme.toml:6", "no piece 'exitd'", "(?&exited)")),
        ("(?P<what>quota", "(?P<what>(quota", ("acme.toml:6", "not a regular expression")),
        ("\\w+)", "(\\w+\\s*)+)", ("acme.toml:6", "catastrophic backtracking")),
        ("?P<what>", "?P<that>", ("acme.toml:8", "no sign has a group what")),
        ("ACME-scratch", "DS-DISK-full", ("acme.toml:2", "ddpsafe has that code")),
        ("    'OSError", "    'MemoryError', 'OSError", ("acme.toml:10", "DS-MEM-alloc explains it first")),
        ("['acme-scratch mounted']", "['acme-scratch: quota of x exceeded']", ("acme.toml:13", "the rule explains it")),
        ('$SCRATCH/*."', '$SCRATCH/*"', ("acme.toml:9", "not a sentence", "$SCRATCH/*.")),
        ("[[rule]]", "[[rules]]", ("acme.toml", "Write there: [[rule]]")),
        ("[[rule]]", "[[rule", ("acme.toml", "not valid TOML", "line 1")),
        ("keywords = ", "check = 'is-odd'\nkeywords = ", ("acme.toml:5", "one of is-exception")),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_with_its_line_and_what_to_write(
    old: str, new: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    """A name, a pattern, a keyword or an example; nothing is explained with half of the rules."""
    path = tmp_path / "acme.toml"
    path.write_text(OWN.replace(old, new, 1), encoding="utf-8")
    run = explain("--rules", str(path), log=OWN_LOG)
    assert run.code == 2
    assert run.out == ""
    for text in said:
        assert text in run.err


def test_several_wrong_rules_are_each_refused_with_their_own_line(tmp_path: Path) -> None:
    """So is one that is wrong only beside the others: lines count all rules, those left out too."""
    rules = []
    for old, new in (
        ('$SCRATCH/*."', '$SCRATCH/*"'),
        ('"config"', '"confg"'),
        ('"acme-scratch"]', '"ACME"]'),
        ("over = [", 'over = ["DS-DISK-ful", '),
    ):
        text = OWN.replace("ACME-scratch", f"ACME-{len(rules)}").replace(old, new, 1)
        rules.append(text.replace("quota of me", f"quota of user{len(rules)}"))
    path = tmp_path / "acme.toml"
    path.write_text("".join(rules), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_rule_files([path])
    height = OWN.count("\n")
    wanted = [f"{path}:{number * height + line}" for number, line in enumerate((9, 3, 5, 7))]
    assert [problem.source for problem in caught.value.problems] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "[tool.ddpsafe]\nexplain = 3",
        "[tool.ddpsafe]\nexplain = []",
        "[tool.ddpsafe.explain]\nrules = [3]",
        "[tool]\nddpsafe = 1",
        "tool = 1",
    ],
)
def test_a_configuration_of_another_form_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The error names the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        read_explain_rules()


def test_two_rules_may_not_claim_one_example_or_have_none(tmp_path: Path) -> None:
    """All problems of all files are listed at once."""
    for name in ("a", "b"):
        text = OWN.replace("ACME-scratch", f"ACME-{name}")
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    without = OWN.replace("ACME-scratch", "ACME-c").replace("acme-scratch", "acme-home")
    (tmp_path / "c.toml").write_text(without.partition("examples")[0], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_rule_files([tmp_path])
    text = str(caught.value)
    assert "it is an example of ACME-a, too" in text
    assert "c.toml:2: the rule has no example" in text


@pytest.mark.full(but=["(a+)+b"])
@pytest.mark.parametrize(
    "pattern", [r"(a+)+b", r"(\w+\s?)*:", r"x(.*),(.*),(.*),(.*)y", r"(?:[a-z]+ ?)+!"]
)
def test_a_pattern_with_catastrophic_backtracking_is_noticed(pattern: str) -> None:
    """Without taking the time that it would take on a real line."""
    assert find_slow(pattern) is not None


@pytest.mark.parametrize(
    "pattern", [r"(?:\w+\.)*\w+Error: .*", r"rank \d+ .{0,80} timed out", r"a+"]
)
def test_an_ordinary_pattern_is_not_refused(pattern: str) -> None:
    """Repetitions that a character between them keeps apart take linear time."""
    assert find_slow(pattern) is None


def test_braces_that_name_no_fact_stay_as_they_are() -> None:
    """Advice may hold a line of Python."""
    [cause] = [rule for rule in built_in().rules if "{'use_reentrant': False}" in rule.fix][:1]
    example = next(
        table.examples[0]
        for file in built_in_files()
        for table in file.tables.values()
        if table.code == cause.code
    )
    assert "{'use_reentrant': False}" in explain_text(example)[0].fix
