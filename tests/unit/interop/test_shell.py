"""Launch scripts are read as bash reads them, and what only a run would tell is named."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeloom.errors import UsageError
from pipeloom.interop.shell import commands_of

CASES = {
    "quotes": """launch 'a b' "c  d" e\\ f "" '' "x\\"y" 'x"y' pre"mid \\$H dle"post""",
    "variables": "X=4; Y=${X}0\nlaunch $X ${Y} \"$X $Y\" a$X'b'$Y",
    "empty values": 'X=\nlaunch [$X] a$X $X "$X"',
    "unquoted values are split": 'ARGS=" --tp 2   --pp 4 "\nlaunch x$ARGS y "$ARGS" $ARGS',
    "defaults": 'E=\nlaunch ${NOPE:-4} ${NOPE:-a b} "${NOPE:-a b}" ${E:-5} ${E-5} ${F:=6} $F ${E:+x} ${F:+y} ${G:-${F}0}',
    "arrays": 'A=(1 "2 3"  # why\n 4)\nA+=(5)\nlaunch ${A[@]} "${A[@]}" "x${A[@]}y" "${A[*]}" ${#A[@]} ${A[1]} "${A[0]}"',
    "empty array": 'A=()\nlaunch "${A[@]}" end',
    "sums of texts": 'A=--x\nA+=" --y $A"\nlaunch $A',
    "arithmetic": "N=3; G=8\nlaunch $((N*G)) $(( $N * ${G} - 4 )) $((G/N)) $((G % N + 1))",
    "continued lines": 'launch --a 1 \\\n  --b 2 \\\n  --c "x \\\ny"\nlaunch z',
    "redirections": "launch --a 1 2>&1 --b 2 2> /dev/null 2>>/dev/null < /dev/null --c 22",
    "documents": "cat > /dev/null <<EOF\nlaunch no\nEOF\nlaunch yes",
    "documents that are scripts": "X=1\nbash -s <<EOF 2> /dev/null\nlaunch $X a\nEOF\nlaunch b",
    "comments": "launch a#b c # d\n# launch no\nlaunch x",
    "lists of commands": "true && launch a; launch b || launch c & wait",
    "environment of one command": "OMP_NUM_THREADS=1 NCCL_DEBUG=INFO launch --threads 1 x",
    "exported": "export TP=2 PP=4\nreadonly V=2\nlaunch $TP $PP $V",
    "run by another shell": 'C="launch --a 1 --b 2"\neval $C --c "3"\nbash -c "$C"',
    "expressions in brackets": 'launch "Et*3|(tt|)*29L" x=y --z=1',
    "conditions": """N=8; M=llama
if [ $N -gt 8 ] || [ "$M" = gpt ]; then X=1
elif [[ $N -ge 8 && $M == ll* ]]   # why
then
    X=2; if [ ! "$M" != llama ]; then Y=3; else Y=4; fi
else X=5
fi
[ $N -eq 8 ] && Z=6 || Z=7
if [ $N = 8 ]; then launch first; elif [ $N -ge 8 ]; then launch no; else launch no; fi
if ((N > 8)); then launch no; else launch $X $Y $Z; fi
[ $N = 9 ] && { launch no; X=8; }
if [ -z "$M" ] || ! [ -n "$M" ]; then launch no; fi 2> /dev/null
while [ $N -lt 8 ]; do launch no; X=9; done
launch $X $((N > 4 ? 1 : 2)) $((N > 4 && 0))""",
    "cases": """M=13b
case "$M" in
  7b|small) L=32 ;;   # small
  "13b" )
    L=40; case x in y) L=1;; *) K=2;; esac
    ;;
  (*) L=80; launch no
esac
case $M in 1*) launch $L $K;; 13b) launch no;; esac""",
    "functions": """one() { launch "$1" ${2:-4} $# "$@"; X=${1}; }
function two {
    local a=$1; shift
    one x"$a" $@ "$*"
}
two a "b c"; one; launch [$X]
function three() { launch "${@}"; }
three "" p""",
    "local variables": """PP=1
f() { local PP=4 Q R; declare S=5; T=6; Q=7; R=$PP; g; launch $PP $Q $R $S $T; local PP; launch $PP; }
g() { launch ${PP:-2}; local PP; launch ${PP:-3}; typeset PP=8; declare -g V=9; }
f
launch $PP ${Q:-2} ${R:-2} ${S:-2} $T $V""",
    "variables of a call": "PP=1\nf() { X=2 true; Y=3; launch $PP ${X:-4}; }\nPP=5 f\nlaunch $PP ${X:-4} $Y",
    "subshells": """PP=1
(PP=4; QQ=5; launch $PP; (PP=6; unset QQ; launch $PP ${QQ:-7}); launch $PP $QQ)
launch $PP ${QQ:-2}
[ $PP = 2 ] && (PP=3; launch no)
launch $PP; bash -c "PP=8; launch b"
launch $PP; if ([ $PP = 1 ]); then launch last; fi
if [ $PP = 2 ] && ([ $PP = 1 ]); then launch no; fi""",
    "unset variables": "PP=4; A=(1 2)\nunset PP A\nlaunch ${PP:-2} ${A[0]:-3}\nf() { unset X; }; X=5; f\nlaunch ${X:-6}",
    "expansions in arithmetic": """A=(1 2 3); N=4
f() { launch $(( $1 + ${2:-5} )); }; f 7
launch $(( ${GPUS_PER_NODE:-8} * 2 )) $((${#A[@]} * N)) $(( $((N + 1)) * "$N" ))
if (( ${N:-1} > 3 )); then launch yes; fi""",
    "functions that are subshells": """f() ( PP=4; launch $PP "$@" )
PP=1
function g
{
  launch g
} 2> /dev/null
f a; g; launch $PP""",
    "pipelines": """X=1
launch a | cat; launch b 2>&1 | cat | cat
true | X=2; { X=3; launch $X; } |& cat; launch $X
for i in 1; do launch z; done |
  cat""",
    "positional arguments": """set -euo pipefail
set -- a 'b c' --tp 4
launch "$@" $# $1 "$2"; shift 2
set -- "$@" --pp 2
launch "$@" $*
set --; launch $# "$@" end""",
    "scripts that the script writes": """X=5
cat > job.sh <<EOF
Y=3; launch $X \\$Y "\\$1" \\\\
  --z 1
EOF
bash job.sh 7; Y=2
cat <<'EOF' > job.sh
Y=$1; launch ${X:-0}$Y
EOF
chmod +x job.sh; export X
./job.sh 9; rm job.sh
launch $Y""",
    "documents in a pipeline": "X=2\ncat <<EOF | bash\nlaunch $X in\nEOF\nlaunch out",
    "texts that are read": """X=2
read -r -d '' C <<EOF
launch $X \\\\
 --y 2
EOF
bash -lc "$C"; read A <<< "7 8"; launch $A""",
    "arrays with names": """declare -A M=([a]=3 [b]=4)
M[c]=8; S=c; launch ${M[a]} ${M[$S]} ${#M[@]}
A=(a b); A[1]=c; launch ${A[@]}""",
    "joined tests": """A=1; B=
if [[ -n $B || ! $A == 2 && $A == 1 ]]; then launch y; fi
[ -n $B ] && launch yes; [[ -n $B ]] && launch no
until [ $A -ge 1 ]; do launch no; done
time launch a; ! launch b || launch c
((A > 0)) && launch d""",
    "quotes of other kinds": """launch $'a b' "it's" 'say "x"' a\\
b x#y {a} 50% 2> >(cat)  # don't
A=(1 # it's
 2); launch ${A[@]}
if true; then
cat > /dev/null <<-'EOF'
	launch no 'x
	EOF
fi; launch z""",
    "counts": """A=abc; B=(abc d); E=
launch ${#A} ${#A[@]} ${#B[@]} ${#B} ${#B[1]} ${#E[*]}
launch "${A[0]}" ${A[1]:-none} "${E+x}" "${E:+x}\"""",
    "texts that are read without their ends": 'read -r A <<< "  a b  "; launch "$A"; read -rd "" B <<< "c\\d"; launch "$B"',
    "numbers below zero": "N=-3; M=1+1; E=\nlaunch $(((9-12)/2)) $(((9-12)%2)) $((M*2)) $((E+1))\n[ $N -lt 0 ] && launch yes",
    "texts and arrays": """A=(1 2); A+=3; launch "${A[@]}"; A=4; launch "${A[@]}"
B=1; B+=(2); launch "${B[@]}"
f() { local A=5; launch "${A[@]}"; }; f""",
    "quoted patterns": """P='a*'; M=8b
case $M in "*b") X=4;; *) X=2;; esac
case "8*" in 8"*") Y=1;; *) Y=2;; esac
case $M in $P) Z=1;; ${M}|x) Z=2;; esac
launch $X $Y $Z
[[ ab == "$P" ]] && launch no; [[ ab == $P ]] && launch yes; [[ ab != 'a'* ]] || launch too
[[ "a*" == a\\* ]] && launch star; [[ "[x" == "[x" ]] && launch bracket""",
    "functions that return": """M=8b
axes() { if [ "$M" = 8b ]; then TP=1; PP=2; return; fi; TP=8; PP=4; launch no; }
axes; launch $TP $PP
M=7b; axes_of() { [ "$1" = 7b ] && return 0; TP=5; }; axes_of $M; axes_of 8b; launch $TP""",
    "scripts that end": """f() { (launch a; exit; launch no); launch b; exit | cat; { exit; } & wait
 bash -c 'launch c; exec true; launch no'; launch d; }
f
if [ 1 = 1 ]; then launch e; exit 0; launch no; X=2; g() { launch no; }; fi
launch no""",
    "programs in place of the script": "exec 3>&1\nlaunch a; exec true; launch no",
    "processes in the background": """A=1; f() { A=3; }
{ A=2; } & A=4 & f & true && A=5 &
wait; launch $A; f | cat; A=6 | cat; launch $A
read A <<< 7 | cat; launch $A; f; launch $A""",
    "statuses of functions": """A=1
f() { true; false; }; g() { [ "$1" = x ]; }
f && A=2; f || B=3; g x && C=4; g y && A=5; if g y; then A=6; fi
launch $A $B $C""",
    "functions under conditions": "if [ 1 = 1 ]; then f() { launch a; }; else f() { launch no; }; fi; f",
    "windows line ends": "X=1\r\nlaunch $X \\\r\n  y\r\n",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    prelude = "launch() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }\nexport -f launch\n"
    script = prelude + CASES[name].replace("\r\n", "\n")
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    expected = [part.split("\0")[:-1] for part in done.stdout.split("\n\0")[:-1]]
    mine = [list(each.words[1:]) for each in commands_of(CASES[name]) if each.words[0] == "launch"]
    if name == "lists of commands":  # which of them run depends on how others end
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
            "TP=4\nif grep x y\nthen TP=2; fi\nlaunch $TP",
            "4",
            "line 3: TP is set under a condition, which is not evaluated",
        ),
        ("for N in 1 2; do launch $N; done", "$N", "line 1: $N is that of a loop"),
        ("A=1\nfor N in 1 2; do A=2; done\nlaunch $A", "1", "line 2: A is set in a loop, which is not unrolled"),
        ("for N in 1; do :; done\n[ $U ] && A=2\nlaunch $A", "2", "line 2: A is set under a condition"),
        ("X=$((A*2))\nlaunch $X", "$((A*2))", "$A, which the script does not set"),
        ("launch ${A%x}", "${A%x}", "${A%x}"),
        ("P=2.5\nlaunch $((P/4))", "$((P/4))", "$((P/4))"),
        ("launch $(($(nproc)*2))", "$(($(nproc)*2))", "the output of a command, $(nproc)"),
        ("P=4\n[ $A = 1 ] && unset P\nlaunch $P", "4", "P is unset under a condition, which is not evaluated"),
        ("A=$1\nA+=b\nlaunch $A", "$1b", "$1, which the script does not set"),
        ('main() { launch ${1:-4} $# "$@"; }\nmain "$@"', "$@", "the arguments of the script, $@"),
        ("N=4\nread N\nlaunch $N", "4", "line 2: N is set by `read`"),
        ("N=4\n((N *= 2))\nlaunch $N", "4", "line 2: N is set by arithmetic"),
        ('set -- --tp 2 "$@"\nlaunch "$@"', "$@", "the arguments of the script, $@"),
        ("launch $@", "$@", "the arguments of the script, $@"),
        ("case $1 in 7) L=32;; *) L=40;; esac\nlaunch $L", "32", "line 1: L is set under a condition"),
        ('if [ -n "$A" ]; then P=4; fi\nlaunch $P', "4", "line 1: P is set under a condition"),
        ("grep -q h100 /etc/nodes && P=4\nlaunch $P", "4", "line 1: P is set under a condition"),
        ("A=$1\n[ $A = 2 ] && P=4\nlaunch $P", "4", "line 2: P is set under a condition"),
        ("N=$(nproc) || N=8\nlaunch $N", "$(nproc)", "line 1: N is set under a condition"),
        ("IFS=',' read -ra X <<< 0,1\nlaunch ${#X[@]}", "${#X[@]}", "line 1: X is set by `read`"),
        ("IFS=',' read -ra X <<< 0,1\nlaunch ${X[1]}", "${X[1]}", "line 1: X is set by `read`"),
        ("IFS=,\nread X <<< ,a,\nlaunch $X", "$X", "line 2: X is set by `read`"),
        ('read A B <<< "1 2"\nlaunch $A', "$A", "line 1: A is set by `read`"),
        ('read A B <<< "1 2"\nlaunch $B', "$B", "line 1: B is set by `read`"),
        ("read A <<E\n1\n2\nE\nlaunch $A", "$A", "line 1: A is set by `read`"),
        ("read A <<< 'a\\\\b'\nlaunch $A", "$A", "line 1: A is set by `read`"),
        ("[ $U = 1 ] && read A <<< 1\nlaunch $A", "$A", "line 1: A is set by `read`"),
        ("A=(1 2)\n[ $U = 1 ] && A+=(3)\nlaunch ${#A[@]}", "3", "line 2: A is set under a condition"),
        ("A=1\n[ $U = 1 ] && A=\nlaunch ${A:+4}", "4", "line 2: A is set under a condition"),
        ("f() { [ $U = 1 ] && return; T=8; }\nT=1; f\nlaunch $T", "1", "line 1: T is set under a condition"),
        ("return\nT=8\nlaunch $T", "8", "line 2: T is set under a condition"),
        ("[ $U = 1 ] && exit\nlaunch 1", "1", "line 1: the script may end here, by `exit`"),
        ("[ $# = 0 ] && exit 2\nlaunch 1", "1", "line 1: the script may end here, by `exit 2`"),
        ("[ $U = 1 ] && exec true\nlaunch 1", "1", "line 1: the script may end here, by `exec`"),
        ("f() { true; return 1; }\nf && A=2\nlaunch $A", "2", "line 2: A is set under a condition"),
        ("if true; then false; fi && A=2\nlaunch $A", "2", "line 1: A is set under a condition"),
        ("true | false && A=2\nlaunch $A", "2", "line 1: A is set under a condition"),
        ("! launcher && A=2\nlaunch $A", "2", "line 1: A is set under a condition"),
        ("case a in a) A=1;& b) A=2;; esac\nlaunch $A", "1", "line 1: A is set under a condition"),
        ("case a in a) A=1;;& *) A=2;; esac\nlaunch $A", "1", "line 1: A is set under a condition"),
        ("case 1 in [[:digit:]]) A=1;; *) A=2; esac\nlaunch $A", "1", "line 1: A is set under a condition"),
        ("[[ a == [^b] ]] && A=1\nlaunch $A", "1", "line 1: A is set under a condition"),
        ("[[ 010 -eq 8 ]] && A=1\nlaunch $A", "1", "line 1: A is set under a condition"),
        ("[ $U = 1 ] && f() { A=1; }\nf\nlaunch $A", "1", "line 1: A is set under a condition"),
        ("launch $((16#10))", "$((16#10))", "$((16#10))"),
    ],
)
def test_what_only_a_run_tells_is_named(script: str, word: str, sentence: str) -> None:
    (command,) = [each for each in commands_of(script) if each.words[0] == "launch"]
    assert command.words[-1] == word
    (reason,) = command.unresolved
    assert reason.startswith(sentence)


@pytest.mark.parametrize(
    "text",
    [
        "case x in",
        "case x in y",
        "f() { f; f; }; f",
        "fi; done; }",
        "if [",
        "launch 'a",
        'launch "a$(b',
        "A=(1 2",
        "launch ${A",
        "<<EOF",
        "$((",
        "f() {",
        "case x in a|",
        "[[ a &&",
        "| | ||",
        "launch |",
        "f()",
        "(" * 5 + ")" * 9,
        "for",
        "cat a; time",
        "!",
        "true |",
        "X=$X$X\n" * 90,
        "(",
    ],
)
def test_a_broken_script_ends(text: str) -> None:
    commands_of(text)


def test_commands_too_deep_in_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="too many commands inside each other"):
        commands_of("if " * 5000)


def test_doubling_a_text_ends() -> None:
    (command,) = commands_of("X=ab\n" + "X=$X$X\n" * 60 + "launch $X")
    assert command.words == ("launch",)
    assert "X is longer than 4,000,000 characters" in command.unresolved[0]


def test_an_assignment_before_a_command_is_that_command_s_alone() -> None:
    (command,) = [each for each in commands_of("X=1\nX=2 Y=3 true\nlaunch $X ${Y:-4}") if each.words[0] == "launch"]
    assert command.words == ("launch", "1", "4")
    assert commands_of("X=1 Y=2\nlaunch $X $Y")[-1].words == ("launch", "1", "2")


@pytest.mark.parametrize(
    ("script", "processes"),
    [
        ("torchrun --nproc-per-node=8 --nnodes 4 train.py", 32),
        ("python -m torch.distributed.launch --nproc_per_node 4 train.py --nnodes 9", 4),
        ("torchrun --nproc-per-node gpu train.py", 0),
        ("torchrun --nproc-per-node 8 --nnodes=2 $SCRIPT --nnodes 9", 16),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py", 16),
        ("mpirun -np 64 -x A=1 python train.py", 64),
        ("srun -N 4 --ntasks-per-node=8 python train.py", 32),
        ("#SBATCH --nodes=4 --ntasks-per-node=8\nsrun --mpi=pmix python train.py --n 3", 32),
        (
            "#SBATCH -N 4\n#SBATCH --gres=gpu:h100:2\ntorchrun --nproc-per-node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES x.py",
            8,
        ),
        ("#SBATCH --nodes=4\npython train.py", 0),
        (
            "N=3\nsbatch -A me <<EOF\n#SBATCH --nodes=${N} --ntasks-per-node=8\nsrun python train.py --t \\$SLURM_NTASKS\nEOF",
            24,
        ),
        ("cat > a.sh <<EOF\npython train.py --x\nEOF\nsrun -N 3 --ntasks-per-node=8 bash a.sh", 24),
        ("#SBATCH -n 16\nsrun -l sh -c 'python train.py --x'", 16),
    ],
)
def test_launchers_say_how_many_processes_there_are(script: str, processes: int) -> None:
    assert commands_of(script)[-1].processes == processes


def test_a_check_that_ends_the_script_with_a_failure_is_no_doubt() -> None:
    assert commands_of("cd x || exit 1\nA=2\nlaunch $A")[-1].unresolved == ()


def test_a_function_that_another_shell_may_call_is_read_behind_the_end_of_the_script() -> None:
    assert [each.words for each in commands_of("f() { launch a; }; exit")] == [("launch", "a")]


def test_what_is_set_again_is_known() -> None:
    assert commands_of("A=$1\nA=2\nlaunch $A")[-1].unresolved == ()
    assert commands_of("A=0\ncase b in $U) ;; a) A=2;; esac\nlaunch $A")[-1].unresolved == ()


def test_variables_before_a_command_are_among_its_values() -> None:
    assert commands_of("N=1 M=2\nN=8 ./run.sh --x")[-1].values == {"N": "8", "M": "2"}
