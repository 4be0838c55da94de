"""Help by groups, and options by the names that other programs give them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.cli import COMMANDS
from pipeloom.config.sections import SECTIONS
from pipeloom.config.settings import named_otherwise, other_names, split_arguments
from pipeloom.errors import UsageError

Run = Callable[[str], Any]


def groups(help_text: str) -> dict[str, list[str]]:
    """Title -> the options below it."""
    found: dict[str, list[str]] = {}
    for line in help_text.splitlines():
        if re.fullmatch(r"\S.*:", line):
            found[line[:-1]] = []
        elif match := re.match(r"  (--?[\w.-]+)", line):
            found[list(found)[-1]].append(match[1])
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_options_stand_in_groups(pipeloom: Run, command: str) -> None:
    """A group is one that a reader looks through; what is printed is among the last."""
    listed = groups(pipeloom(f"{command} --help").out.partition("Keys (with")[0])
    assert max(len(each) for each in listed.values()) <= 14
    if sum(map(len, listed.values())) > 13:
        assert list(listed)[-2:] == ["Output options" if command not in ("plan", "generate") else "Output", "Options"]
        assert "--json" in listed[list(listed)[-2]]
    assert [name for each in listed.values() for name in each if name in ("-h", "--help")] in (["-h"], ["--help"])


def test_costs_are_not_among_the_sizes(pipeloom: Run) -> None:
    listed = groups(pipeloom("rehearse --help").out)
    assert listed["Size options"] == ["--ranks", "--microbatches", "--chunks"]
    assert "--forward" in listed["Cost options"]
    assert "--unit" in listed["Emulation options"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("search --ranks 4 --microbatches 8 --vpp 2", "there is no option --vpp; did you mean '--chunks'? ("),
        ("schedule 1f1b --pipeline-model-parallel-size 4", "-size; did you mean '--ranks'? ("),
        ("plan --GPUS 8", "there is no option --GPUS; did you mean '--devices'? ("),
        ("compare 1f1b --rank 3", "did you mean '--ranks' or "),
        ("schedule --zzzz", "there is no option --zzzz (pipeloom schedule --help"),
        ("train tiny --vpp 2", "there is no option '--vpp'; did you mean --schedule.chunks?"),
        ("train tiny --learning_rate 1", "did you mean --optimizer.lr?"),
        ("train tiny --hidden_sice 1", "did you mean --model.hidden_size?"),
        ("show nothing", "pipeloom: there is no nothing\n"),
    ],
)
def test_the_option_that_is_meant_is_named(pipeloom: Run, line: str, words: str) -> None:
    ended = pipeloom(line)
    assert ended.code == 2
    assert words in ended.err


def test_a_name_of_others_stands_for_what_there_is(pipeloom: Run) -> None:
    keys = {f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields}
    options = {word for command in COMMANDS for word in re.findall(r"--([a-z-]+)", pipeloom(f"{command} --help").out)}
    meant = [key for group in other_names() for key in group.split()]
    assert [key for key in meant if key not in keys | options] == []
    names = [name for group in other_names().values() for name in group.split()]
    assert len(names) == len(set(names))
    assert [name for name in names if name in keys] == []
    assert named_otherwise("vpp", ["ranks"]) == ""
    with pytest.raises(UsageError, match=r"--parallel\.pp\?"):
        split_arguments(["--num-stages", "4"])


@pytest.mark.parametrize(
    "example",
    [
        "compare --lengths lengths.txt --ranks 4 --replicas 2 --attention-tokens 8192",
        "rehearse zbv --ranks 4 --microbatches 8 --forward 1 --input-grad 1.2 --message 4MiB",
    ],
)
def test_examples_can_be_copied(pipeloom: Run, example: str) -> None:
    """What does not fit a line goes on behind a backslash, and no option is broken at its hyphen."""
    text = pipeloom(f"{example.split()[0]} --help").out.replace("\\\n", "")
    assert f"pipeloom {example}" in [" ".join(line.split()) for line in text.splitlines()]
