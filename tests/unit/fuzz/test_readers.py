"""Files of other programs, changed at random: each reader reads them or refuses them in a sentence; none drops a key silently."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from corpora import tokenizer_directory
from fuzz import files
from fuzz._answers import answer_of, inside
from paths import ROOT
from pipeloom.cli import app
from pipeloom.cli.options import _costs_in
from pipeloom.config import load
from pipeloom.draw import trace
from pipeloom.errors import PipeloomError
from pipeloom.models.hf.sizes import counted_shape, unread_keys
from pipeloom.schedule import files as schedule_files
from pipeloom.schedule.csv_form import to_csv
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.shapes import hub
from pipeloom.traces import chrome, timed_csv, timelines
from pipeloom.traces.segment_times import read_segments
from pipeloom.train.data.conversations import BadDocument, Conversation
from pipeloom.train.data.sources import Fields, find, records
from pipeloom.train.data.store import template_of
from pipeloom.train.data.tokenizers import ByteTokenizer, SimpleTemplate, load_tokenizer

CHATS = ROOT / "tests" / "data" / "foreign" / "chats"
COSTS = pl.Costs(bytes={"saved": 5.0}, pools={"saved": "device"}, parts={"norms": 1.0}, host_links=(0, 0))
ADAPTER = {
    **{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": True},
    **{"use_rslora": False, "lora_dropout": 0.0, "bias": "none", "rank_pattern": {}},
}
SEGMENTS = {"layers": 2, "attention": [1, 2, 3], "experts": [2, 2, 2], "dispatch": 1.5, "combine": 0.5}
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 48}
COUNTED = [
    {**SIZES, "model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8},
    {**SIZES, "model_type": "gpt_oss", "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
]
ASKED = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, (False, True))


def chats() -> list[Any]:
    first = [json.loads(path.read_text().splitlines()[0]) for path in sorted(CHATS.glob("*.jsonl"))]
    alpaca = {"instruction": "a", "input": "b", "output": "c", "system": "d", "history": [["e", "f"]]}
    return [*first, alpaca, {"prompt": "a", "completion": "b", "label": True}]


def read_chat(file: Path) -> str:
    """Return the keys that are said to be of no use."""
    fields, template = Fields(find(str(file), "jsonl"), ""), SimpleTemplate(ByteTokenizer())
    for record in records(fields):
        if isinstance(record.value, BadDocument):
            raise record.value
        if isinstance(record.value, Conversation):
            template.rows(record.value)
    return ", ".join(sorted(fields.unknown))


def read_tokenizer(file: Path) -> None:
    data = load("tiny", {"data.source": "stdlib"}).data
    for piece in template_of(load_tokenizer(str(file.parent)), data).rows(ASKED)[0]:
        assert isinstance(piece.content, str | int)


def read_costs(file: Path) -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(2, 2), _costs_in(file))
    assert min(timeline.peak_memory) >= 0


def traced() -> dict[str, Any]:
    return {**trace(simulated(), 1e6), "distributedInfo": {"rank": 0, "world_size": 1}}


def simulated() -> pl.Timeline:
    return pl.simulate(pl.schedules.one_f_one_b(2, 2), pl.Costs())


def timed() -> str:
    return "\n".join(
        ",".join(f"{cell}:1.5:2" if cell else "" for cell in row.split(","))
        for row in to_csv(simulated().schedule).splitlines()
    )


def texts(values: Callable[[], list[Any]]) -> Callable[[], list[str]]:
    return lambda: [json.dumps(value) for value in values()]


def model(file: Path) -> Any:
    return hub.shape_of(hub.content_of(str(file.parent), "m"), "m")


# kind of a file -> (its name, texts that are read, what reads one)
Read = Callable[[Path], Any]
READERS: dict[str, tuple[str, Callable[[], list[str]], Read]] = {
    "chats": ("a.jsonl", texts(chats), read_chat),
    "adapters": ("adapter_config.json", texts(lambda: [ADAPTER]), lambda file: hub.adapter_keys(str(file.parent), "a")),
    "costs": ("a.json", texts(lambda: [timelines.costs_dict(COSTS)]), read_costs),
    "traces": ("a.json", texts(lambda: [traced()]), chrome.read),
    "segments": ("a.json", texts(lambda: [SEGMENTS]), lambda file: read_segments(str(file))),
    "models": ("config.json", texts(lambda: list(hub.presets().values())), model),
    "counted models": ("config.json", texts(lambda: COUNTED), model),
    "tokenizers": ("tokenizer.json", lambda: [], read_tokenizer),
    "tokenizer configurations": ("tokenizer_config.json", lambda: [], read_tokenizer),
    "schedules": ("a.json", lambda: [to_json(simulated().schedule)], schedule_files.load),
    "schedules as CSV": ("a.csv", lambda: [to_csv(simulated().schedule)], schedule_files.load),
    "timed schedules": ("a.csv", lambda: [timed()], timed_csv.read),
    "timelines": ("a.json", texts(lambda: [timelines.to_dict([simulated()])]), timelines.load),
}
EACH, COUNTS = 165, 40  # of 12 kinds, and of models that are built: 2,020 files


def mutated(text: str, random: Random) -> tuple[bytes, str]:
    """Return a file with a value dropped, renamed, of another type, huge or nested; or cut, or with another character."""
    if random.random() < 0.7 and text.startswith("{"):
        with patch.object(files, "VALUES", copy.deepcopy(files.VALUES)):  # of which a change may change parts
            return files.changed_json(text.encode(), random)
    return files.changed_bytes(text.encode(), random)


def prepared(kind: str, folder: Path) -> tuple[Path, list[str], Read]:
    """Return where the file is, what it may hold, and its reader."""
    name, sound, read = READERS[kind]
    if kind.startswith("tokenizer"):
        tokenizer_directory(folder)
        return folder / name, [(folder / name).read_text()], read
    return folder / name, sound(), read


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_a_changed_file_is_read_or_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_counters", [counted_shape] if kind == "counted models" else [])
    file, sound, read = prepared(kind, tmp_path)
    for text in sound:
        file.write_text(text)
        read(file)
    random = Random(kind)
    refused, count = 0, COUNTS if kind == "counted models" else EACH
    for _ in range(count):
        content, words = mutated(random.choice(sound), random)
        file.write_bytes(content)
        try:
            read(file)
        except (PipeloomError, BadDocument) as error:
            refused += max(map(len, str(error).split())) < 300 or pytest.fail(f"an echo of {words}")
        except Exception as error:
            raise AssertionError(f"{kind}: {words}") from error
    assert refused > count // 8


# kind of a file -> an object in it to which a key is added
INSIDE: dict[str, list[Callable[[Any], Any]]] = {
    "chats": [
        lambda record: record,
        lambda record: record["messages"][0],
        lambda record: record["messages"][1]["tool_calls"][0],
        lambda record: record["messages"][1]["tool_calls"][0]["function"],
    ],
    "schedules": [lambda schedule: schedule],
    "adapters": [lambda adapter: adapter],
    "costs": [lambda costs: costs],
    "segments": [lambda segments: segments],
    "counted models": [lambda model: model],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", INSIDE)
def test_an_invented_key_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the refusal, or once in the log."""
    monkeypatch.setattr(hub, "_counters", [counted_shape])
    file, sound, read = prepared(kind, tmp_path)
    text = next(text for text in sound if kind != "chats" or '"tool_calls"' in text)
    for inside_of in INSIDE[kind]:
        value = json.loads(text)
        inside_of(value)["invented"] = 3
        file.write_text(json.dumps(value))
        said = []
        for _ in range(1 if kind == "schedules" else 2):
            try:
                said.append(str(read(file)))
            except (PipeloomError, BadDocument) as error:
                said.append(str(error))
        logged = [record.getMessage() for record in caplog.records]
        assert "invented" in said[0] or ["invented" in line for line in logged] == [True]


@pytest.mark.parametrize(
    "words",
    [
        ("schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--json"),
        ("search", "--ranks", "2", "--microbatches", "2", "--memory", "2", "--time-limit", "0.1", "--json"),
    ],
)
def test_what_commands_write_beside_a_schedule_is_known(
    words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    from_json(CliRunner().invoke(app, [*words]).stdout)
    assert caplog.records == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0"}, 0),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, 1),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, 0),
    ],
)
def test_one_process_of_a_run_names_them(
    variables: dict[str, str], named: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command has named them before it starts ranks; torchrun has not."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    counted_shape({**COUNTED[0], "invented": str(variables)}, "m")
    assert len(caplog.records) == named


def test_keys_that_a_family_reads_are_not_named() -> None:
    transformers = pytest.importorskip("transformers")
    values = {"model_type": "llama", "rope_theta": 1e4, "torch_dtype": "bfloat16", "_name": "x", "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(**{**values, "invented": 1})
    assert unread_keys(config, values) == []
    assert unread_keys(config, {**values, "invented": 1, "empty": None}) == ["invented"]
    assert (
        unread_keys(transformers.AutoConfig.for_model("ernie4_5_moe"), {"num_experts_per_tok": 2}) == []
    )  # by another name
    whole = transformers.AutoConfig.for_model("gemma3")
    parts = {"text_config": {"head_dim": 8, "invented": 1}, "invented": 2, "vision_config": {}}
    assert unread_keys(whole, parts) == ["invented", "text_config.invented"]


COMMANDS: dict[str, tuple[str, ...]] = {
    "costs": ("schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--costs", "a.json"),
    "traces": ("improve", "a.json"),
    "models": ("plan", "--model", "config.json", "--devices", "2", "--seq", "128", "--global-batch", "4"),
    "schedules": ("check", "a.json"),
    "chats": ("train", "tiny", "--data.source", "a.jsonl", "--dry-run"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_answer_for_changed_files(kind: str, tmp_path: Path) -> None:
    """With the exit code of a defect of the input, or of an answer; and one sentence."""
    file, sound, _ = prepared(kind, tmp_path)
    random = Random(kind)
    with inside(str(tmp_path)):
        for _ in range(4):
            content, words = mutated(random.choice(sound), random)
            file.write_bytes(content)
            found = answer_of(COMMANDS[kind], {})
            assert files.complaint(found.code, found.err, 0.0, 0.0, (0, 2, 3, 4, 5)) is None, (words, found.trace)
