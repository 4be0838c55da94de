"""Files, `extends`, overrides, and writing a configuration back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.config import descriptions, load, load_layout, split_arguments, to_toml
from pipeloom.config.sections import SECTIONS
from pipeloom.config.settings import built_in, read_toml
from pipeloom.errors import ConfigError, UsageError, from_machine


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_default_sets_every_key_that_needs_a_value() -> None:
    default = built_in("default")
    for section, model in SECTIONS.items():
        assert set(default[section]) == {key for key, field in model.model_fields.items() if field.is_required()}


def test_every_key_is_described_above_its_default() -> None:
    described = descriptions()
    assert set(described) == {f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields}
    assert described["train.steps"] == "optimizer steps"
    assert described["schedule.chunks"] == "stages per rank; if not given, the schedule's default"
    assert min(map(len, described.values())) > 5


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[train]\nsteps = 3\n[optimizer]\nbetas = [0.8, 0.9]\n")
    config = load(path)
    assert config.train.steps == 3
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.train.seq_len == load().train.seq_len


def test_a_small_batch_has_as_many_microbatches_as_a_replica_has_sequences(tmp_path: Path) -> None:
    default = load().schedule.microbatches
    for batch, dp, microbatches in ((8, 1, 8), (12, 2, 6), (2 * default + 2, 2, default)):
        sizes = {"train.global_batch_size": batch, "parallel.dp": dp}
        assert load(None, sizes).schedule.microbatches == microbatches
        assert (
            load(write(tmp_path / "m.toml", f"[schedule]\nmicrobatches = {default}\n"), sizes).schedule.microbatches
            == default
        )


def test_extends_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "base.toml", "[train]\nsteps = 3\nseed = 7\n")
    path = write(tmp_path / "sub" / "a.toml", 'extends = "../base.toml"\n[train]\nsteps = 4\n')
    assert (load(path).train.steps, load(path).train.seed) == (4, 7)


def test_extends_may_name_a_built_in_configuration(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", 'extends = "tiny"\n[train]\nsteps = 9\n')
    assert load(path).train.steps == 9
    assert load(path).model == load("tiny").model


def test_a_circle_of_extends_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'extends = "b.toml"\n')
    write(tmp_path / "b.toml", 'extends = "c.toml"\n')
    write(tmp_path / "c.toml", 'extends = "b.toml"\n')
    with pytest.raises(ConfigError, match=r"b\.toml -> c\.toml -> b\.toml"):
        load(tmp_path / "a.toml")


def test_malformed_toml_gives_file_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.toml", "[train]\nsteps = 3\nseq_len 4\n")
    with pytest.raises(ConfigError, match=r"bad\.toml:3:9: "):
        load(path)
    with pytest.raises(ConfigError, match=r"cut\.toml:1:1: "):
        load(write(tmp_path / "cut.toml", 'a = "'))


def test_missing_unreadable_and_undecodable_files(tmp_path: Path) -> None:
    write(tmp_path / "train.toml", "")
    with pytest.raises(ConfigError, match=r"there is no file .*trian\.toml; did you mean 'train\.toml'"):
        load(tmp_path / "trian.toml")
    with pytest.raises(ConfigError, match="there is no file tinny; did you mean 'tiny'"):
        load("tinny")
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load(tmp_path / "windows.toml").train.steps == 3
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.toml")


def test_another_schedule_drops_the_options_and_chunks_of_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", '[schedule]\nchunks = 2\noptions = { rounds = "tail" }\n')
    assert load(path).schedule.options == {"rounds": "tail"}
    other = load(path, {"schedule.name": "1f1b"})
    assert (other.schedule.options, other.schedule.chunks) == ({}, None)
    same = load(path, {"schedule.name": "interleaved", "schedule.microbatches": 8})
    assert same.schedule.options == {"rounds": "tail"}


def test_any_name_of_a_family_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", '[schedule]\nname = "VPP"\nchunks = 2\noptions = { rounds = "tail" }\n')
    config = load(path)
    assert (config.schedule.name, config.schedule.options) == ("interleaved", {"rounds": "tail"})
    same = load(path, {"schedule.name": "Interleaved1F1B", "schedule.microbatches": 8})
    assert (same.schedule.name, same.schedule.options) == ("interleaved", {"rounds": "tail"})
    assert load("tiny", {"schedule.name": "ScheduleZBVZeroBubble"}).schedule.name == "zbv"


def test_name_and_options_of_one_command_line_belong_together() -> None:
    overrides = split_arguments(["--schedule.options.rounds", "tail", "--schedule.name", "interleaved"])[1]
    assert load("tiny", {"schedule.name": "gpipe"}, overrides).schedule.options == {"rounds": "tail"}


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--train.steps", "20"], "train.steps", 20),
        (["--train.steps=20"], "train.steps", 20),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 0.001),
        (["--optimizer.lr", ".001"], "optimizer.lr", 0.001),
        (["--optimizer.betas", "[0.9, 0.99]"], "optimizer.betas", [0.9, 0.99]),
        (["--schedule.name", "1f1b"], "schedule.name", "1f1b"),
        (["--schedule.name", '"1f1b"'], "schedule.name", "1f1b"),
        (["--log.dir", "2024"], "log.dir", "2024"),
        (["--debug.fault", "swap-microbatches:0,1"], "debug.fault", "swap-microbatches:0,1"),
        (["--train.deterministic"], "train.deterministic", True),
        (["--train.deterministic", "--train.steps", "3"], "train.deterministic", True),
        (["--train.deterministic", "false"], "train.deterministic", False),
        (["--train.deterministic", "True"], "train.deterministic", True),
        (["--schedule.options.group_size", "5"], "schedule.options.group_size", 5),
        (["--schedule.options.rounds=head"], "schedule.options.rounds", "head"),
        (["--parallel.stages", "Et*3|ttL"], "parallel.stages", "Et*3|ttL"),
        (["--train.seq-len", "64"], "train.seq_len", 64),
    ],
)
def test_flags(arguments: list[str], key: str, value: object) -> None:
    assert split_arguments(arguments)[1][key] == value
    assert split_arguments(["run.toml", *arguments])[0] == "run.toml"
    assert split_arguments([*arguments, "run.toml"])[0] == "run.toml"


def test_a_written_configuration_is_read_back_equal(tmp_path: Path) -> None:
    config = load(
        "tiny",
        {
            "schedule.options.rounds": "tail",
            "schedule.chunks": 2,
            "log.dir": 'a "quoted" \\ path\n',
            "optimizer.lr": 1e-5,
            "train.deterministic": True,
        },
    )
    assert load(write(tmp_path / "out.toml", to_toml(config))) == config


def test_configuration_needs_no_torch() -> None:
    code = "import pipeloom.config as c, sys; c.load_layout(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_path_that_cannot_be_looked_up_is_a_wrong_argument(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in (tmp_path / ("x" * 300), tmp_path / "circle"):
        with pytest.raises(OSError) as raised:
            path.stat()
        code, words = from_machine(raised.value) or (1, "")
        assert code == UsageError.exit_code
        assert words.startswith(f"the path {str(path)!r} cannot be used: ")


def test_a_path_with_half_a_character_is_a_wrong_argument() -> None:
    with pytest.raises(UnicodeEncodeError) as raised:
        Path("\ud800").resolve()
    assert from_machine(raised.value) == (
        UsageError.exit_code,
        "'\\ud800' is not text: it holds half of a character (a lone surrogate)",
    )


def test_a_relative_tokenizer_is_kept_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint names it, and text is generated from other folders."""
    write(tmp_path / "words.json", json.dumps({"model": {"vocab": {"a": 0, "b": 299}}}))
    monkeypatch.chdir(tmp_path)
    config = load(None, {"data.tokenizer": "words.json"})
    assert config.data.tokenizer == str(tmp_path / "words.json")
    assert config.model.vocab_size == 300
    for word in ("auto", "bytes"):
        write(tmp_path / word, "")
        assert load(None, {"data.tokenizer": word}).data.tokenizer == word


def test_a_key_that_is_derived_now_is_accepted_with_a_line(tmp_path: Path) -> None:
    former = '[parallel]\norder = "tp-ep-dp-pp"\n[schedule]\nslice_cuts = "even"\n[train]\ntune_cpu = true\n'
    layout = load_layout(write(tmp_path / "old.toml", former), {"train.tune_cpu": False, "parallel.pp": 2})
    assert [note.partition(":")[0] for note in layout.notes] == [
        'schedule.slice_cuts = "even" has no effect',
        "train.tune_cpu = false has no effect",
    ]
    assert "slice_cuts" not in to_toml(layout.config)
