"""Tiny models of Hugging Face families in a pipeline, compared with the same models in `transformers`.

python tests/support/hf_families.py                all of tests/data/hf_families.toml: minutes
python tests/support/hf_families.py gpt2 mixtral   these two
"""

from __future__ import annotations

import statistics
import sys
import tomllib
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paths import DATA
from pipeloom import schedules
from pipeloom.models import cross_entropy, hf
from pipeloom.models.hf.library import transformers
from pipeloom.ops.random_state import stable_seed
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.schedule.model import Schedule
from pipeloom.shapes.cut import even_sizes

RANKS, MICROBATCHES, SEQUENCE_LENGTH = 2, 4, 12
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: schedules.one_f_one_b(RANKS, MICROBATCHES),
    "interleaved": lambda: schedules.interleaved(RANKS, MICROBATCHES, 2),
    "zbv": lambda: schedules.zbv(RANKS, MICROBATCHES),
}


class Variant(NamedTuple):
    """A schedule with which a family is verified, whether all layers are recomputed, and whether rows hold several documents."""

    schedule: str
    recompute: bool = False
    packed: bool = False

    def __str__(self) -> str:
        return self.schedule + ", recompute" * self.recompute + ", packed" * self.packed


VARIANTS = (
    *map(Variant, SCHEDULES),
    Variant("zbv", recompute=True),
    Variant("1f1b", recompute=True, packed=True),  # of the families that keep documents apart
)


@dataclass(frozen=True)
class ModelFamily:
    """A tiny model of a family, as a table of tests/data/hf_families.toml.

    Attributes:
        name: the table's name.
        config: name of its configuration class in `transformers`.
        values: arguments of that class.
        padded: whether it is verified with an attention mask that leaves out tokens.
    """

    name: str
    config: str
    values: dict[str, Any]
    padded: bool = False

    def build(self) -> Any:
        """Return the configuration, with eager attention and without dropout."""
        config = getattr(transformers(), self.config)(**self.values, attn_implementation="eager")
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        return config


def _read_families() -> Iterator[ModelFamily]:
    content = tomllib.loads((DATA / "hf_families.toml").read_text(encoding="utf-8"))
    for name, family in content["families"].items():
        tables = [content["shared"][shared] for shared in family.pop("shared", ())]
        values = ChainMap(family.pop("values", {}), *reversed(tables))  # a later table overrides an earlier one
        yield ModelFamily(name, values=dict(values), **family)


MODEL_FAMILIES = {family.name: family for family in _read_families()}


class FamilyBatch(NamedTuple):
    """Token numbers and targets, int64 [rows, length], and the other tensors that the layers take by name."""

    tokens: Tensor
    targets: Tensor
    keywords: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """Deviation of a family's step in a pipeline from the same step of the model in `transformers`.

    Attributes:
        schedule: its schedule, and whether layers were recomputed and rows packed, in words.
        loss_error: |a - b| / |b|, where b is the loss of `transformers`.
        worst_error: the largest of ||a - b|| / max(||b||, a thousandth of the median parameter's ||b||) over all gradients.
        worst_parameter: the parameter with that gradient; empty where all gradients are equal.
        passed: whether both errors are within the tolerance.
    """

    family: str
    schedule: str
    loss_error: float
    worst_error: float
    worst_parameter: str
    passed: bool


def make_batch(name: str, packed: bool = False) -> FamilyBatch:
    """Return a batch of random tokens for a family, different in every micro-batch; if it is padded, rows of different lengths.

    Args:
        packed: rows of two documents instead, whose lengths differ from row to row.
    """
    family = MODEL_FAMILIES[name]
    generator = torch.Generator().manual_seed(stable_seed("families", name))
    rows = MICROBATCHES + 1  # one micro-batch is larger than the others
    vocabulary = family.build().get_text_config().vocab_size
    tokens, targets = torch.randint(3, vocabulary, (2, rows, SEQUENCE_LENGTH), generator=generator)
    if packed:
        places, first = torch.arange(SEQUENCE_LENGTH), 3 + torch.arange(rows)[:, None]
        return FamilyBatch(tokens, targets, {"position_ids": torch.where(places < first, places, places - first)})
    if not family.padded:
        return FamilyBatch(tokens, targets, {})
    mask = (torch.arange(SEQUENCE_LENGTH) < SEQUENCE_LENGTH - torch.arange(rows)[:, None]).long()
    return FamilyBatch(tokens * mask, targets.masked_fill(mask == 0, IGNORE_INDEX), {"attention_mask": mask})


def verify_families(families: Iterable[ModelFamily], tolerance: float) -> Iterator[Verdict]:
    """Verify each family in each variant, on all ranks of a pipeline in this process."""
    for family in families:
        model = hf.layers(family.build())
        for variant in VARIANTS:
            if not variant.packed or model.cut.keeps_documents_apart():
                yield verify_family(family, variant, model, tolerance)


def verify_family(family: ModelFamily, variant: Variant, model: hf.ModelLayers, tolerance: float) -> Verdict:
    """Run a step of a family's model in a pipeline, and compare it with that of `transformers`."""
    options = RuntimeOptions(seed=0, recompute="full" if variant.recompute else "none")
    schedule = SCHEDULES[variant.schedule]()
    pipeline = LocalPipeline(model, schedule, loss=cross_entropy, tied=model.tied, options=options)
    batch = make_batch(family.name, variant.packed)
    loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
    return compare(family, variant, model, pipeline.named_parameters(), loss, tolerance)


def compare(
    family: ModelFamily,
    variant: Variant,
    model: hf.ModelLayers,
    parameters: Iterable[tuple[str, nn.Parameter]],
    loss: float,
    tolerance: float,
) -> Verdict:
    """Compare the loss and gradients of a step with those of the model in `transformers` with the same weights.

    Args:
        parameters: names and parameters of all ranks after the step; one that several ranks hold, with each of them.
    """
    errors: dict[str, float] = {}
    trained = list(parameters)
    reference = _whole_model(model, {hf.hub_name(name): parameter for name, parameter in trained})
    want_loss = _serial_step(reference, make_batch(family.name, variant.packed))
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    norms = [float(p.grad.norm()) for p in reference.parameters() if p.grad is not None]
    floor = 1e-3 * statistics.median(norms)
    for name, parameter in trained:
        want = wanted[hf.hub_name(name)]
        if not torch.equal(parameter, want) or (parameter.grad is None) != (want.grad is None):
            error = float("inf")  # copies of a weight differ, or only one of the two has a gradient
        elif parameter.grad is None or want.grad is None:
            continue
        else:
            error = float((parameter.grad - want.grad).norm()) / max(float(want.grad.norm()), floor)
        errors[name] = error if error == error else float("inf")
    unseen = {id(p) for p in reference.parameters()} - {id(wanted[hf.hub_name(name)]) for name, _ in trained}
    errors.update((name, float("inf")) for name, p in wanted.items() if id(p) in unseen)
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(loss - want_loss) / abs(want_loss)
    passed = loss_error <= tolerance and errors[worst] <= tolerance
    return Verdict(family.name, str(variant), loss_error, errors[worst], worst if errors[worst] else "", passed)


def _whole_model(model: hf.ModelLayers, values: Mapping[str, Tensor]) -> Any:
    """Build the model with `transformers`, with the weights `values` (name in `transformers` -> value), in training mode."""
    whole = transformers().AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in whole.named_parameters(remove_duplicate=False):
            if name in values:
                parameter.copy_(values[name])
    return whole.train()


def _serial_step(model: Any, batch: FamilyBatch) -> float:
    """Return the mean loss over the batch, computed part by part; the gradients are accumulated in `model`."""
    total, loss = int((batch.targets != IGNORE_INDEX).sum()), 0.0
    for tokens, targets, keywords in _parts(batch):
        logits = model(tokens, use_cache=False, **keywords).logits
        value = cross_entropy(logits, targets) * (int((targets != IGNORE_INDEX).sum()) / total)
        value.backward()  # type: ignore[no-untyped-call]
        loss += value.item()
    return loss


def _parts(batch: FamilyBatch) -> Iterator[FamilyBatch]:
    """Yield a pipeline's micro-batches; of packed rows, each document alone."""
    rows, positions = len(batch.tokens), batch.keywords.get("position_ids")
    if positions is None:
        sizes = even_sizes(rows, MICROBATCHES)
        split = [torch.split(value, sizes) for value in (batch.tokens, batch.targets, *batch.keywords.values())]
        for tokens, targets, *values in zip(*split, strict=True):
            yield FamilyBatch(tokens, targets, dict(zip(batch.keywords, values, strict=True)))
        return
    for row in range(rows):
        first = [int(place) for place in (positions[row] == 0).nonzero()]
        for start, end in pairwise([*first, SEQUENCE_LENGTH]):
            part = slice(row, row + 1), slice(start, end)
            yield FamilyBatch(batch.tokens[part], batch.targets[part], {})


def main(names: list[str]) -> int:
    """Print a row for each case of the families called `names`, or of all; return 1 if one fails."""
    failed = 0
    for verdict in verify_families([MODEL_FAMILIES[name] for name in names or MODEL_FAMILIES], 1e-5):
        state = "PASS" if verdict.passed else "FAIL"
        worst = f"{verdict.worst_error:.1e} {verdict.worst_parameter}"
        print(
            f"{state}  {verdict.family:<12} {verdict.schedule:<23} loss {verdict.loss_error:.1e}  worst {worst}",
            flush=True,
        )
        failed += not verdict.passed
    print(f"{failed} fail")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
