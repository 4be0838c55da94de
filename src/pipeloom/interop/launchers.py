"""A command of a launch script: where its launchers end and the program's own words begin, and how many processes they start."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

# What says how many processes a launcher starts: of torchrun, DeepSpeed, mpirun and srun.
_PROCESSES = (
    ("nproc-per-node", "nnodes"), ("num-gpus", "num-nodes"), ("np",), ("ntasks",), ("ntasks-per-node", "nodes"),
)  # fmt: skip
# What a `#SBATCH` line says -> the variables in which slurm repeats it.
_SLURM = {
    "nodes": "SLURM_NNODES SLURM_JOB_NUM_NODES", "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "ntasks": "SLURM_NTASKS SLURM_NPROCS", "gpus-per-node": "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
}  # fmt: skip
_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "gres": "gpus-per-node"}

# Flags of launchers that do not say how many processes there are.
_LAUNCHERS = """
    *-per-* account allow-run-as-root bind-to container-* cpu* distribution error exclu* export gpus* gres hostfile job*
    kill-on-bad-exit label local-addr local-rank* log-dir logs-specs map-by master-* max-restarts mem* module monitor-interval
    mpi nnodes
    no-container-* no-python node* np ntasks* num-gpus num-nodes output overlap partition qos rank rdzv-* redirects role run-path
    standalone start-method tee time unbuffered use-env virtual-local-rank wait
""".split()  # noqa: SIM905
_STARTS = ("torchrun", "deepspeed", "mpirun", "srun", "-m")  # behind what starts a container, whose flags do not matter

Variables = dict[str, str | dict[str, str]]
"""Variable -> its text, or the elements of an array by their keys."""


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: with variables resolved.
        unresolved: a sentence for each expansion in it that only a run would tell.
        values: variable -> value where the command starts, its own assignments among them.
    """

    words: tuple[str, ...]
    unresolved: tuple[str, ...]
    values: Mapping[str, str | dict[str, str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def program(self) -> int:
        """Number of words before the program's own, so of launchers."""
        for at, word in enumerate(self.words):
            module = word == "-m" and not "".join(self.words[at + 1 : at + 2]).startswith("torch.distributed")
            if module or word.endswith((".py", ".sh")):
                return at + 1
        for at, (before, word) in enumerate(pairwise(self.words), 1):
            takes = before.startswith("-") and "=" not in before
            if word[:1] == "$" and not takes and "torchrun" in self.words[:at]:
                return at + 1
        return 0

    @property
    def strange(self) -> list[str]:
        """Flags of launchers that are not known."""
        words = self.words[: self.program]
        begin = next((at for at, word in enumerate(words) if word in _STARTS), 0)
        flags = [flag for flag, _ in flags_of(words[begin:])]
        return [flag for flag in flags if not any(fnmatchcase(flag.replace("_", "-"), known) for known in _LAUNCHERS)]

    @property
    def processes(self) -> int:
        """Number of processes that the launchers start; 0: the text does not say it."""
        launchers = self.words[: self.program] or self.words
        given = dict[str, str]()
        if "srun" in launchers and not {"torchrun", "-m"} & {*launchers}:
            given = {key: str(self.values.get(names.split()[0], "")) for key, names in _SLURM.items()}
        for word, value in pairwise([part for each in launchers for part in each.split("=", 1)]):
            if word.startswith("-"):
                name = word.lstrip("-").replace("_", "-")
                given[_SHORT.get(name, name)] = value
        given.setdefault("nnodes", "1")
        for names in _PROCESSES:
            counts = [given.get(name, "") for name in names]
            if all(re.fullmatch(r"\d{1,7}", count) for count in counts):
                return math.prod(map(int, counts))
        return 0


def slurm_variables(text: str, words: Sequence[str] = ()) -> Variables:
    """Return the variables that slurm sets for a script with these `#SBATCH` lines, and words of `sbatch` before them."""
    sizes = dict[str, str]()
    for line in (*re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE), " ".join(words)):
        for name, count in re.findall(r"(?<!\S)--?([A-Za-z-]+)[ =]*(?:[A-Za-z]\w*:)*(\d{1,7})(?=\s|$)", line):
            sizes[_SHORT.get(name, name)] = count
    if "ntasks-per-node" in sizes:
        sizes.setdefault("ntasks", str(int(sizes["ntasks-per-node"]) * int(sizes.get("nodes", "1"))))
    return {name: sizes[key] for key, names in _SLURM.items() if key in sizes for name in names.split()}


def flags_of(words: Sequence[str], ends: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield (flag without its `--`, its values) of a command; a word that begins with one of `ends` is no value."""
    flag, given = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith(("--", *ends)):
            given.append(word)
            continue
        if flag:
            yield flag, given
        flag, equals, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        given = [value] if equals else []
