"""What `plan --output` writes of models in directories and of presets, `train --dry-run` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from hf_families import MODEL_FAMILIES
from pipeloom.cli.dry_run import report
from pipeloom.cli.plan import PlanFlags, _device, _one, _planner
from pipeloom.config import load_layout
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.interop.systems import written
from pipeloom.models.hf.sizes import counted_shape
from pipeloom.shapes import hub
from pipeloom.shapes.hub import load as load_model
from pipeloom.shapes.hub import presets

LAYOUTS = 30
SAMPLE = ("llama", "gpt2", "deepseek-v3")


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_counters", [counted_shape])


def texts(options: PlanFlags) -> Iterator[str]:
    """Layouts at random, of as many devices as there are: many are refused by the family or by the model."""
    random, axes = Random(0), ("dp", "tp", "cp", "ep")
    schedules = {1: ("1f1b", "zb-h1", "gpipe"), 2: ("interleaved", "zbv", "dualpipev")}
    while True:
        sizes, left = {"pp": random.choice((1, 2, 4))}, (options.devices or 1)
        left //= sizes["pp"]
        for axis in random.sample(axes[:3], 3):
            sizes[axis] = random.choice([size for size in (1, 1, 1, 2, 4, left) if left % size == 0])
            left //= sizes[axis]
        sizes["dp"] *= left
        sizes["ep"] = random.choice([1, 1, sizes["dp"] * sizes["cp"] * sizes["tp"]])
        sizes["v"] = random.choice((1, 2)) if sizes["pp"] > 1 else 1
        sizes["m"] = random.choice([m for m in (1, 2, 4, 8) if options.global_batch % (m * sizes["dp"]) == 0] or [1])
        more = [f"schedule={random.choice(schedules[sizes['v']])}"] if sizes["pp"] > 1 else []
        more += random.choice(([], [], ["recompute=full"], ["vocabulary=pp"] if sizes["pp"] > 1 else []))
        more += [f"zero={random.choice((1, 2))}"] if sizes["dp"] > 1 else []
        yield ",".join([*(f"{axis}={size}" for axis, size in sizes.items() if size > 1 or axis == "m"), *more])


def accepted(options: PlanFlags, folder: Path, count: int) -> int:
    """Write layouts, which differ in as many axes as there are, and describe each; return their number."""
    device, run = _device(options), folder / "run.toml"
    planner = _planner(options, device)
    written_texts: set[str] = set()
    for text in islice(texts(options), 40 * count):
        if len(written_texts) == count:
            break
        if text in written_texts:
            continue
        try:
            prediction = _one(options, planner, text, device.memory)
        except PipeloomError:  # a family that refuses these sizes, or a model that cannot be divided so
            continue
        run.write_text(written(prediction, planner, "pipeloom", options.directory or None)[0])
        lines, _ = report(load_layout(run), device, None, complete=False)
        assert "would start" in lines[-1], text
        assert not any("not predicted" in line for line in lines), text
        written_texts.add(text)
    return len(written_texts)


def written_family(name: str, folder: Path) -> PlanFlags:
    MODEL_FAMILIES[name].build().save_pretrained(folder / "model")
    return PlanFlags(str(folder / "model"), devices=4, global_batch=8, seq=2048)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_layouts_of_a_directory_are_trained(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert accepted(written_family(name, tmp_path), tmp_path, 4) == 4


@pytest.mark.full
@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_layouts_of_every_family_are_trained(name: str, tmp_path: Path) -> None:
    """Thirty of each, or as many as there are; or the model is refused by name."""
    pytest.importorskip("transformers")
    assert accepted(written_family(name, tmp_path), tmp_path, LAYOUTS) >= 4


@pytest.mark.full
@pytest.mark.parametrize("name", presets())
def test_layouts_of_every_preset_are_trained(name: str, tmp_path: Path) -> None:
    options = PlanFlags(name, devices=64, global_batch=64, seq=4096, memory="2000")
    if load_model(name).foreign:  # parts that our own decoder lacks
        with pytest.raises(UsageError, match="without a Hugging Face directory"):
            accepted(options, tmp_path, LAYOUTS)
    else:
        assert accepted(options, tmp_path, LAYOUTS) == LAYOUTS
