"""Verify matrices: lists expanded into every combination."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.config.matrix import expand, load_matrix
from pipeloom.errors import ConfigError

BASE = """
[base.model]
num_hidden_layers = 4
[base.parallel]
pp = 2
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_lists_become_combinations_and_lists_of_values_stay() -> None:
    row = {"schedule": {"name": ["gpipe", "1f1b"], "microbatches": [1, 2]}, "optimizer": {"betas": [0.9, 0.95]}}
    assert list(expand(row)) == [
        {"schedule.name": name, "schedule.microbatches": m, "optimizer.betas": [0.9, 0.95]}
        for name in ("gpipe", "1f1b")
        for m in (1, 2)
    ]


def test_layouts_over_base_over_config_and_flags_on_top(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.toml",
        BASE
        + """
[[layout]]
schedule.name = ["gpipe", "1f1b"]
schedule.microbatches = [1, 3]
[[layout]]
schedule.name = "interleaved"
schedule.options = [{ rounds = "tail" }, { group_size = 2 }]
""",
    )
    matrix = load_matrix(path, "tiny", {"train.seed": 5})
    assert [(layout.schedule.name, layout.schedule.microbatches) for layout in matrix.layouts] == [
        ("gpipe", 1),
        ("gpipe", 3),
        ("1f1b", 1),
        ("1f1b", 3),
        ("interleaved", 5),
        ("interleaved", 5),
    ]
    assert [layout.config.schedule.options for layout in matrix.layouts[-2:]] == [{"rounds": "tail"}, {"group_size": 2}]
    assert {layout.config.train.seed for layout in matrix.layouts} == {5}
    assert {layout.config.model.hidden_size for layout in matrix.layouts} == {32}
    assert matrix.names == (
        "gpipe p=2 v=1 m=1",
        "gpipe p=2 v=1 m=3",
        "1f1b p=2 v=1 m=1",
        "1f1b p=2 v=1 m=3",
        "interleaved rounds=tail p=2 v=2 m=5",
        "interleaved group_size=2 p=2 v=2 m=5",
    )


def test_refused_combinations_are_an_error_unless_told_to_skip(tmp_path: Path) -> None:
    rows = '[[layout]]\nschedule.name = "interleaved"\nschedule.chunks = [2, 3]\n'
    with pytest.raises(ConfigError, match=r"chunks=3: .*6 stages, more than there are decoder layers"):
        load_matrix(write(tmp_path / "m.toml", BASE + rows), "tiny", {})
    matrix = load_matrix(write(tmp_path / "m.toml", "skip_invalid = true\n" + BASE + rows), "tiny", {})
    assert len(matrix.layouts) == 1
    assert "more than there are decoder layers" in matrix.skipped[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"at least one \[\[layout\]\]"),
        ("layouts = 3\n[[layout]]\n", "no key 'layouts'; did you mean 'layout'"),
        ("skip_invalid = 3\n[[layout]]\n", "must be true or false"),
        ("skip_invalid = true\n[[layout]]\nparallel.pp = [90, 91]\n", "every layout is refused; the first: "),
    ],
)
def test_files_that_are_no_matrix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_matrix(write(tmp_path / "m.toml", text), "tiny", {})


def test_a_file_of_too_many_combinations_is_refused_before_any_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    table = f"[[layout]]\ntrain.seed = {list(range(600))}\n"
    path.write_text(table * 2)
    with pytest.raises(ConfigError, match=r"m\.toml: the \[\[layout\]\] tables stand for more than 1,000 combinations"):
        load_matrix(path, "tiny", {"model.no_such_key": 1})
