"""Names in comments, docstrings and pages: the files, functions, classes and keys that they mention exist."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from paths import ROOT
from pipeloom.config import Config

PROSE = re.compile(r'"""[\s\S]*?"""|(?<![\w"\'&])#(?![0-9a-fA-F]{3,8}\b).*')  # docstrings and comments, no colours
FILE = re.compile(r"(?<![\w./-])(?:[\w-]+/)+\w+\.(?:py|md)\b|(?<=`)\w+\.(?:py|md)(?=`)")
NAME = re.compile(r"`([a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*)(?:\([^`\n]*\))?`")
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
SUFFIX = re.compile(r"[A-Z_\d]+|py|md|jsonl?|toml|html")  # of a file; or a placeholder
FOREIGN = {
    *("_add_unshard_reshard", "recompute_modules", "use_bidirectional_attention", "initialize_model_parallel", "relu_"),
    *("unscale_", "pp_vis", "mtp_1", "mtp_2", "train_mlp.py", "time.perf_counter", "Dataset.save_to_disk"),
    *("layer.aux_loss", "schedule.with_tensors"),
}
"""Names of other systems, and of examples."""


def gone(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the names that the pages, or comments and docstrings of src, of `sources` (path -> text) mention, and no file has."""
    names: dict[str, set[str]] = defaultdict(set)  # package, module, class or section -> its names; "" -> all
    for section, field in Config.model_fields.items():
        names[section] |= set(getattr(field.annotation, "model_fields", ()))
    for path, text in sources.items():
        if not path.endswith(".md"):
            words = set(re.findall(r"\w+", PROSE.sub("", text) if path.endswith(".py") else text))
            homes = Path(path).with_suffix("").parts
            for home in ("", homes[-1], *homes[-2:-1] * (homes[-1] == "__init__"), *CLASS.findall(text)):
                names[home] |= words
            for package, module in pairwise(homes):
                names[package].add(module)
    names[""] |= {*names}.union(*(names[section] for section in Config.model_fields))
    for path, text in sources.items():
        prose = text if path.endswith(".md") else "\n".join(PROSE.findall(text)) if path.startswith("src") else ""
        for file in set(FILE.findall(prose)).difference(FOREIGN):
            if not ((ROOT / file).exists() or any(each.endswith(f"/{file}") for each in sources)):
                yield f"{path}: {file}"
        for name in set(NAME.findall(prose)).difference(FOREIGN):
            parts = name.split(".")
            steps = ((home, part) for home, part in pairwise(parts) if home in names)
            whole = path.startswith("src") or (len(parts) == 1 and "_" in name)  # a page names much that is not ours
            missing = any(part not in names[home] for home, part in steps) or (
                whole and not names[""].issuperset(parts)
            )
            if missing and not SUFFIX.fullmatch(parts[-1]):
                yield f"{path}: {name}"


def test_names_in_prose_exist() -> None:
    paths = [path for top in ("src", "docs", "examples", "benchmarks", "configs") for path in (ROOT / top).rglob("*.*")]
    files = [path for path in (*paths, *ROOT.glob("*.*")) if path.suffix in (".py", ".js", ".toml", ".md")]
    left_out = ("CHANGELOG.md", "log.md", "other_systems.md")  # what was, and a table of the words of six systems
    present = [path for path in files if path.name not in left_out]
    assert sorted(gone({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in present})) == []


def test_a_gone_name_is_found() -> None:
    code = '"""Of `b.py`, `p/a.py`, `a.f()`, `a.g()`, `A.f`, `A.steps`, `h_1`, `X_1`, `train.steps`, `train.stages`."""'
    page = "`p/c.py` and docs/b.md, `pipeloom.p.a`, `pipeloom.p.b`, `h`, `h_2`, `other.h`, `c.json`; ../p/a.py"
    sources = {"src/pipeloom/p/a.py": f"{code}\nclass A:\n    def f(): ...  # `i` and `f`\n", "docs/a.md": page}
    src = [f"src/pipeloom/p/a.py: {name}" for name in ("A.steps", "a.g", "b.py", "h_1", "i", "train.stages")]
    assert (
        sorted(gone(sources)) == [f"docs/a.md: {name}" for name in ("docs/b.md", "h_2", "p/c.py", "pipeloom.p.b")] + src
    )
