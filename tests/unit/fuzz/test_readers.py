"""Files of other programs with values of another kind: each reader reads them or refuses them in a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

import pipeloom as pl
from fuzz import files
from paths import ROOT
from pipeloom.draw import trace
from pipeloom.errors import PipeloomError
from pipeloom.shapes.hub import adapter_keys, from_config, presets
from pipeloom.traces import chrome
from pipeloom.traces.segment_times import read_segments
from pipeloom.traces.timelines import costs_dict, costs_of_dict
from pipeloom.train.data.conversations import BadConversation, conversation

CHATS = ROOT / "tests" / "data" / "foreign" / "chats"
COSTS = pl.Costs(bytes={"saved": 5.0}, pools={"saved": "device"}, parts={"norms": 1.0}, host_links=(0, 0))
ADAPTER = {
    **{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": True},
    **{"use_rslora": False, "lora_dropout": 0.0, "bias": "none", "rank_pattern": {}},
}
SEGMENTS = {"layers": 2, "attention": [1, 2, 3], "experts": [2, 2, 2], "dispatch": 1.5, "combine": 0.5}


def chats() -> list[Any]:
    first = [json.loads(path.read_text().splitlines()[0]) for path in sorted(CHATS.glob("*.jsonl"))]
    alpaca = {"instruction": "a", "input": "b", "output": "c", "system": "d", "history": [["e", "f"]]}
    return [*first, alpaca, {"prompt": "a", "completion": "b", "label": True}]


def read_chat(value: Any, file: Path) -> None:
    if isinstance(value, dict) and isinstance(value.get("messages", value.get("conversations", "")), list):
        names = [name for name in ("messages", "conversations") if name in value]
        conversation(value, names or ["instruction" if "instruction" in value else "prompt", "output"])


def read_trace(value: Any, file: Path) -> None:
    file.write_text(json.dumps(value))
    chrome.read(file)


def read_adapter(value: Any, file: Path) -> None:
    (file.parent / "adapter_config.json").write_text(json.dumps(value))
    adapter_keys(str(file.parent), "adapter")


def read_segment_times(value: Any, file: Path) -> None:
    file.write_text(json.dumps(value))
    read_segments(str(file))


def read_costs(value: Any, file: Path) -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(2, 2), costs_of_dict(value, "costs"))
    assert min(timeline.peak_memory) >= 0


def traced() -> dict[str, Any]:
    timeline = pl.simulate(pl.schedules.one_f_one_b(2, 2), pl.Costs())
    return {**trace(timeline, 1e6), "distributedInfo": {"rank": 0, "world_size": 1}}


READERS: dict[str, tuple[Callable[[], list[Any]], Callable[[Any, Path], None]]] = {
    "chats": (chats, read_chat),
    "adapters": (lambda: [ADAPTER], read_adapter),
    "costs": (lambda: [costs_dict(COSTS)], read_costs),
    "traces": (lambda: [traced()], read_trace),
    "segments": (lambda: [SEGMENTS], read_segment_times),
    "models": (lambda: list(presets().values()), lambda value, file: from_config(value, "m") and None),
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_changed_file_is_read_or_refused(reader: str, tmp_path: Path) -> None:
    sound, read = READERS[reader]
    random = Random(reader)
    refused = 0
    for _ in range(340):
        with patch.object(files, "VALUES", copy.deepcopy(files.VALUES)):  # of which a change may change parts
            value, words = files.changed(json.loads(json.dumps(random.choice(sound()))), random)
        try:
            read(value, tmp_path / "a.json")
        except (PipeloomError, BadConversation):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{reader}: {words}") from error
    assert refused > 50
