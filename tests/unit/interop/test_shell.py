"""Launch scripts are read as bash reads them, and what only a run would tell is named."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from pipeloom.interop.shell import commands_of

CASES = {
    "quotes": """launch 'a b' "c  d" e\\ f "" '' "x\\"y" 'x"y' pre"mid \\$H dle"post""",
    "variables": "X=4; Y=${X}0\nlaunch $X ${Y} \"$X $Y\" a$X'b'$Y",
    "unquoted values are split": 'ARGS=" --tp 2   --pp 4 "\nlaunch x$ARGS y "$ARGS" $ARGS',
    "defaults": 'E=\nlaunch ${NOPE:-4} ${NOPE:-a b} "${NOPE:-a b}" ${E:-5} ${E-5} ${F:=6} $F ${E:+x} ${F:+y} ${G:-${F}0}',
    "arrays": 'A=(1 "2 3"  # why\n 4)\nA+=(5)\nlaunch ${A[@]} "${A[@]}" "x${A[@]}y" "${A[*]}" ${#A[@]} ${A[1]} "${A[0]}"',
    "empty array": 'A=()\nlaunch "${A[@]}" end',
    "sums of texts": 'A=--x\nA+=" --y $A"\nlaunch $A',
    "arithmetic": "N=3; G=8\nlaunch $((N*G)) $(( $N * ${G} - 4 )) $((G/N)) $((G % N + 1))",
    "continued lines": 'launch --a 1 \\\n  --b 2 \\\n  --c "x \\\ny"\nlaunch z',
    "redirections": "launch --a 1 2>&1 --b 2 2> /dev/null 2>>/dev/null < /dev/null --c 22",
    "documents": "cat > /dev/null <<EOF\nlaunch no\nEOF\nlaunch yes",
    "comments": "launch a#b c # d\n# launch no\nlaunch x",
    "lists of commands": "true && launch a; launch b || launch c & wait",
    "environment of one command": "OMP_NUM_THREADS=1 NCCL_DEBUG=INFO launch --threads 1 x",
    "exported": "export TP=2 PP=4\nreadonly V=2\nlaunch $TP $PP $V",
    "run by another shell": 'C="launch --a 1 --b 2"\neval $C --c "3"\nbash -c "$C"',
    "expressions in brackets": 'launch "Et*3|(tt|)*29L" x=y --z=1',
    "windows line ends": "X=1\r\nlaunch $X \\\r\n  y\r\n",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_bash(name: str) -> None:
    prelude = "launch() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }\nexport -f launch\n"
    script = prelude + CASES[name].replace("\r\n", "\n")
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = [part.split("\0")[:-1] for part in done.stdout.split("\n\0")[:-1]]
    mine = [list(each.words[1:]) for each in commands_of(CASES[name]) if each.words[0] == "launch"]
    if "||" in CASES[name]:  # which of them run depends on how others end
        mine.remove(["c"])
    assert sorted(mine) == sorted(expected)
    assert not any(each.unresolved for each in commands_of(CASES[name]))


@pytest.mark.parametrize(
    ("script", "word", "sentence"),
    [
        ("launch --tp $TP", "$TP", "$TP, which the script does not set"),
        ("launch $1", "$1", "$1, which the script does not set"),
        ("launch $(hostname)", "$(hostname)", "the output of a command, $(hostname)"),
        ("N=`nproc`\nlaunch $N", "$(nproc)", "the output of a command, $(nproc)"),
        (
            "if [ $A = 1 ]; then\nTP=2\nfi\nlaunch $TP",
            "2",
            "line 2: TP is set under a condition, which is not evaluated",
        ),
        (
            "TP=4\nif true\nthen TP=2; fi\nlaunch $TP",
            "4",
            "line 3: TP is set under a condition, which is not evaluated",
        ),
        ("for N in 1 2; do launch $N; done", "$N", "line 1: $N is that of a loop"),
        ("X=$((A*2))\nlaunch $X", "$((A*2))", "$A, which the script does not set"),
        ("launch ${A%x}", "${A%x}", "${A%x}"),
    ],
)
def test_what_only_a_run_tells_is_named(script: str, word: str, sentence: str) -> None:
    (command,) = [each for each in commands_of(script) if each.words[0] == "launch"]
    assert command.words[-1] == word
    assert any(sentence in each for each in command.unresolved)


@pytest.mark.parametrize(
    "text", ["launch 'a", 'launch "a$(b', "A=(1 2", "launch ${A", "<<EOF", "$((", "X=$X$X\n" * 90, "("]
)
def test_a_broken_script_ends(text: str) -> None:
    commands_of(text)


def test_doubling_a_text_ends() -> None:
    (command,) = commands_of("X=ab\n" + "X=$X$X\n" * 60 + "launch $X")
    assert command.words == ("launch",)
    assert "X is longer than 4,000,000 characters" in command.unresolved[0]


def test_an_assignment_before_a_command_is_that_command_s_alone() -> None:
    (command,) = [each for each in commands_of("X=1\nX=2 Y=3 true\nlaunch $X ${Y:-4}") if each.words[0] == "launch"]
    assert command.words == ("launch", "1", "4")
    assert commands_of("X=1 Y=2\nlaunch $X $Y")[-1].words == ("launch", "1", "2")
