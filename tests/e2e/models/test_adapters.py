"""Adapters: loss and gradients against weights W + s B A in plain torch, and against peft; frozen weights have no gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import pipeloom as pl
from hf_families import MODEL_FAMILIES, make_batch
from pipeloom.config import ModelSection, load
from pipeloom.errors import ArgumentError
from pipeloom.models import VocabularyRanks, cross_entropy, hf, hub_name, layers, tied, token_loss
from pipeloom.models.hf.library import transformers
from pipeloom.models.lora import AdaptedLinear, LoraOptions, is_adapter, is_linear, with_adapters
from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import join, shard_of
from pipeloom.parallel.tensor import ColumnLinear, TensorParallel
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

OPTIONS = LoraOptions(r=3, lora_alpha=5.0)
ROWS, LENGTH, MICROBATCHES = 8, 8, 4
SCHEDULES = {
    "1f1b": lambda: pl.schedules.one_f_one_b(2, MICROBATCHES),
    "zb-h1": lambda: pl.schedules.zb_h1(2, MICROBATCHES),
    "zbv": lambda: pl.schedules.zbv(2, MICROBATCHES),
    "interleaved": lambda: pl.schedules.interleaved(2, MICROBATCHES, 2),
}


def model(**changes: Any) -> ModelSection:
    values = {"vocab_size": 257, "aux_loss_coef": 0.0, "z_loss_coef": 0.0, **changes}
    return load("tiny", {f"model.{key}": value for key, value in values.items()}).model


DENSE = model(qkv_bias=True, tie_word_embeddings=True)
SPARSE = model(num_experts=4, num_shared_experts=2, moe_intermediate_size=16)


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """The test's values of an adapter's matrix, which do not depend on the layout."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(stable_seed("test", hub_name(name)))) * 0.1


@torch.no_grad()
def fill(pipeline: Pipeline | LocalPipeline) -> None:
    for name, parameter in pipeline.named_parameters():
        if is_adapter(name):
            sharding = pipeline.layouts[name]
            whole = numbers(name, tuple(sharding.full_shape(parameter.shape)))
            parameter.copy_(shard_of(whole, sharding, {"tp": pipeline.mesh.place.tp}))


def batch(vocabulary: int) -> Tensor:
    """Tokens and targets."""
    return torch.randint(0, vocabulary, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(6))


class Sum(nn.Module):
    """W -> W + s B A."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + OPTIONS.scale * (self.up @ self.down)


def serial(shape: ModelSection) -> tuple[float, dict[str, Tensor]]:
    """A step in one process, of layers whose weights are computed from theirs and the adapters' matrices."""
    built = {layer.name: layer() for layer in layers(shape.shape(), 5, torch.float64)}
    if shape.tie_word_embeddings:
        built["head"].lm_head.weight = built["model.embed_tokens"].weight
    sums: dict[str, Sum] = {}
    for layer, module in built.items():
        module.requires_grad_(False)
        for path, linear in [each for each in module.named_modules() if is_linear(each[1])]:
            if OPTIONS.chooses(name := hub_name(f"{layer}.{path}")):
                outputs, inputs = linear.weight.shape
                a, b = numbers(f"{name}.lora_A.weight", (3, inputs)), numbers(f"{name}.lora_B.weight", (outputs, 3))
                sums[name] = Sum(a.double(), b.double())
                parametrize.register_parametrization(linear, "weight", sums[name])
    total = 0.0
    tokens, targets = batch(shape.vocab_size)
    for x, wanted in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        for module in built.values():
            x = module(x)
        loss = cross_entropy(x, wanted) / MICROBATCHES
        loss.backward()
        total += loss.item()
    gradients = {f"{name}.lora_A.weight": each.down.grad for name, each in sums.items()}
    return total, gradients | {f"{name}.lora_B.weight": each.up.grad for name, each in sums.items()}


def worst(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert found.keys() == want.keys()
    return max(float((found[name] - want[name]).abs().max() / want[name].abs().max()) for name in want)


class Case(NamedTuple):
    mesh: MeshShape
    schedule: str
    sequence: bool
    shape: ModelSection
    transforms: tuple[str, ...] = ()


CASES = [
    Case(MeshShape(pp=2, tp=2), "zbv", False, DENSE),
    Case(MeshShape(pp=2, tp=2), "zb-h1", True, SPARSE),
    Case(MeshShape(pp=2, dp=2), "interleaved", False, SPARSE),
    Case(MeshShape(dp=2, tp=2), "1f1b", True, DENSE),
    Case(MeshShape(pp=4), "1f1b", False, DENSE, ("vocabulary", "embedding")),
    Case(MeshShape(pp=2, dp=2), "1f1b", False, SPARSE, ("vocabulary=two", "embedding")),
]


def on_a_mesh(rank: int) -> list[tuple[float, dict[str, tuple[Any, Any]]]]:
    results = []
    for case in CASES:
        mesh = Mesh.of(case.mesh)
        assert mesh is not None
        tensor = TensorParallel(mesh.tp, case.sequence) if case.mesh.tp > 1 else None
        shape, pp = case.shape.shape(), case.mesh.pp
        spread = VocabularyRanks(mesh.place.pp_tp, pp * case.mesh.tp) if case.transforms else None
        schedule = pl.schedules.build(case.schedule, pp, MICROBATCHES // case.mesh.dp)
        pipeline = Pipeline(
            with_adapters(layers(shape, 5, torch.float64, tensor=tensor, spread=spread), OPTIONS, 0),
            pl.schedules.transformed(schedule, case.transforms),
            loss=token_loss(shape, 0.0, tensor),
            mesh=mesh,
            tied=tied(shape),
        )
        fill(pipeline)
        tokens, targets = batch(shape.vocab_size).chunk(case.mesh.dp, 1)[mesh.place.dp]
        loss = pipeline.step(tokens, targets).item()
        held = {
            n: (pipeline.layouts[n], p.grad.numpy().copy()) for n, p in pipeline.named_parameters() if p.requires_grad
        }
        assert all(p.grad is None for name, p in pipeline.named_parameters() if not is_adapter(name))
        results.append((loss, held))
        pipeline.close()
    return results


def test_gradients_on_tensor_and_data_parallel_ranks() -> None:
    results = run_ranks(on_a_mesh, 4)
    for at, case in enumerate(CASES):
        want_loss, want = serial(case.shape)
        found: dict[str, Tensor] = {}
        for name in want:
            copies: dict[tuple[int, ...], list[Tensor]] = {}
            for rank, each in enumerate(results):
                if name in each[at][1]:
                    sharding, gradient = each[at][1][name]
                    place = (case.mesh.place(rank).tp,) if sharding.shards else ()
                    copies.setdefault(place, []).append(torch.from_numpy(gradient))
            assert all(torch.equal(other, same[0]) for same in copies.values() for other in same), (case, name)
            found[name] = join({place: same[0] for place, same in copies.items()}, sharding)
        assert {rank[at][0] for rank in results} == {results[0][at][0]}
        assert results[0][at][0] == pytest.approx(want_loss, rel=1e-5), case
        assert worst(found, want) <= 1e-9, case


@pytest.mark.parametrize("schedule", ["zbv", "interleaved"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_gradients_of_a_foreign_model_are_those_of_peft(family: str, schedule: str) -> None:
    """Linear layers, Conv1D, and a subclass of nn.Linear."""
    peft = pytest.importorskip("peft")
    chosen = hf.layers(MODEL_FAMILIES[family].build())
    pipeline = LocalPipeline(
        with_adapters(chosen, OPTIONS, 0), SCHEDULES[schedule](), loss=cross_entropy, tied=chosen.tied
    )
    fill(pipeline)
    own = {hub_name(name): parameter for name, parameter in pipeline.named_parameters()}
    whole = transformers().AutoModelForCausalLM.from_config(chosen.config, dtype=torch.float32)
    state = whole.state_dict()
    whole.load_state_dict({n: own[n].detach() if n in own else value for n, value in state.items()}, strict=False)
    config = peft.LoraConfig(r=3, lora_alpha=5.0, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(whole, config).train()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    ours = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    given = make_batch(family)
    loss = pipeline.step(given.tokens, given.targets, **given.keywords).item()
    sizes = [2, 1, 1, 1]
    total, counted = 0.0, int((given.targets != -100).sum())
    for rows in torch.arange(5).split(sizes):
        keywords = {name: value[rows] for name, value in given.keywords.items()}
        logits = adapted(given.tokens[rows], use_cache=False, **keywords).logits
        share = int((given.targets[rows] != -100).sum()) / counted
        part = cross_entropy(logits, given.targets[rows]) * share
        part.backward()
        total += part.item()
    assert loss == pytest.approx(total, rel=1e-5)
    for name, parameter in ours.items():
        want = theirs[name].grad
        assert float((parameter.grad - want).norm() / want.norm()) <= 1e-5, name


def test_targets_are_chosen_as_peft_does() -> None:
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
        "model.layers.0.mlp.gate_up_proj",
    ]

    def chosen(targets: Any) -> list[int]:
        return [
            at for at, name in enumerate(names) if LoraOptions(r=1, target_modules=targets, lora_alpha=1).chooses(name)
        ]

    assert chosen("all-linear") == [0, 1, 3]
    assert chosen(("q_proj", "lm_head")) == [0, 2]
    assert chosen(("up_proj",)) == [1]
    assert chosen(("layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj")) == [0, 1]
    assert chosen(r".*layers\.0\..*") == [0, 3]
    assert chosen("q_proj") == []


def test_an_adapter_starts_as_nothing_and_its_first_values_depend_on_its_name_alone() -> None:
    shape = DENSE.shape()
    plain = LocalPipeline(layers(shape, 5), SCHEDULES["1f1b"](), loss=cross_entropy, tied=tied(shape))
    one, two = (
        LocalPipeline(with_adapters(layers(shape, 5), OPTIONS, 0), SCHEDULES[s](), loss=cross_entropy, tied=tied(shape))
        for s in ("1f1b", "zbv")
    )
    tokens = batch(shape.vocab_size)[0]
    assert torch.allclose(one.predict(tokens), plain.predict(tokens), atol=1e-6)
    first = dict(one.named_parameters())
    assert all(torch.equal(p, first[name]) for name, p in two.named_parameters())
    downs = [p for name, p in first.items() if "lora_A" in name]
    assert all(0 < p.abs().max().item() <= p.shape[1] ** -0.5 for p in downs)
    assert len({p[0, 0].item() for p in downs}) == len(downs)


def test_dropout_on_a_layer_that_is_cut_is_refused() -> None:
    """Each rank would draw a mask of its own for the one input that all of them see."""
    cut = ColumnLinear(8, (2, 2), TensorParallel(Axis((0, 1), 0, None)))
    AdaptedLinear(cut, torch.zeros(2, 8), torch.zeros(4, 2), 1.0)
    with pytest.raises(
        ArgumentError, match=r"dropout=0.1 on a layer that is cut over tensor-parallel ranks; nearest: 0"
    ):
        AdaptedLinear(cut, torch.zeros(2, 8), torch.zeros(4, 2), 1.0, dropout=0.1)


def test_a_share_of_an_output_layer_takes_no_adapter() -> None:
    options = LoraOptions(r=3, lora_alpha=5.0, target_modules=("q_proj", "lm_head"))
    share = with_adapters(layers(DENSE.shape(), 5, spread=VocabularyRanks(0, 2)), options, 0)[-1]
    with pytest.raises(ArgumentError, match="target_modules chooses lm_head, and an output layer that is spread"):
        share()


def test_dropout_is_of_the_adapter_alone_and_of_training_alone() -> None:
    shape = DENSE.shape()
    options = LoraOptions(r=3, lora_alpha=5.0, lora_dropout=0.5)
    pipeline = LocalPipeline(with_adapters(layers(shape, 5), options, 0), SCHEDULES["1f1b"](), loss=cross_entropy)
    fill(pipeline)
    data = batch(shape.vocab_size)
    losses = {pipeline.step(*data).item() for _ in range(3)}
    assert len(losses) == 3
    pipeline.eval()
    assert len({pipeline.evaluate(*data).item() for _ in range(2)}) == 1
