"""Rows of several documents: each document is computed as if it were alone, in every layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.config import ModelSection, load
from pipeloom.models import decoder as documents
from pipeloom.models import layers, tied, token_loss
from pipeloom.models.decoder import document_numbers, visible
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import join
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

LENGTH, ROWS, MICROBATCHES = 16, 8, 4
CUTS = [(16,), (5, 11), (1, 7, 8), (3, 3, 3, 7), (15, 1), (8, 8), (2, 12, 2), (6, 4, 6)]  # documents of each row


def model(**changes: Any) -> ModelSection:
    small = {"num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 257, "tie_word_embeddings": True}
    return load("tiny", {f"model.{key}": value for key, value in {**small, **changes}.items()}).model


DENSE = model()
EXPERTS = model(num_experts=4, moe_intermediate_size=24, aux_loss_coef=0.0, z_loss_coef=0.0, num_shared_experts=1)


class Case(NamedTuple):
    shape: ModelSection
    mesh: MeshShape
    schedule: str
    sequence: bool = False
    recompute: Any = "none"
    chunks: int = 1
    blocks: int = 1


CASES = [
    Case(DENSE, MeshShape(pp=2, tp=2), "zbv", sequence=True),
    Case(DENSE, MeshShape(pp=2, tp=2), "interleaved", recompute="full"),
    Case(DENSE, MeshShape(pp=2, dp=2), "1f1b"),
    Case(DENSE, MeshShape(pp=4), "gpipe"),
    Case(EXPERTS, MeshShape(pp=2, dp=2, ep=2), "zb-h1"),
    Case(EXPERTS, MeshShape(pp=2, dp=2, ep=2), "1f1b-overlap", chunks=2),
    Case(EXPERTS, MeshShape(pp=2, dp=2, ep=2), "1f1b", blocks=3, recompute="full"),
]


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions; a document's last target is no token of the next one."""
    tokens = torch.randint(0, 257, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
    targets = tokens.roll(-1, 1)
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in CUTS])
    targets[:, :-1][positions[:, 1:] == 0] = -100
    targets[:, -1] = -100
    return tokens, targets, positions


def separate(shape: ModelSection) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the same documents, each alone in a row of its own length, in one process."""
    built = {layer.name: layer() for layer in layers(shape, 5)}
    built["head"].lm_head.weight = built["model.embed_tokens"].weight
    tokens, targets, _ = data()
    count, total, loss_of = int((targets != -100).sum()), 0.0, token_loss(shape)
    for row, sizes in enumerate(CUTS):
        for x, wanted in zip(tokens[row].split(sizes), targets[row].split(sizes), strict=True):
            if len(x) == 1:
                continue  # nothing to predict
            x = x[None]
            for name, module in built.items():
                x = module(x, MicrobatchContext()) if name.startswith("model.layers") else module(x)
            loss = loss_of(x, wanted[None]) * (len(wanted) - 1) / count
            loss.backward()
            total += loss.item()
    return total, {f"{name}.{inner}": p.grad for name, m in built.items() for inner, p in m.named_parameters()}


def work(rank: int) -> list[tuple[float, dict[str, tuple[Any, Any]], tuple[int, int]]]:
    results = []
    for at, case in enumerate(CASES):
        documents.OWN_CALL_TOKENS = (1, 10_000)[at % 2]  # attention document by document, and with a mask
        mesh = Mesh.of(case.mesh)
        assert mesh is not None
        tensor = TensorParallel(mesh.tp, case.sequence) if mesh.tp.size > 1 else None
        expert = ExpertParallel(mesh.ep, chunks=case.chunks, blocks=case.blocks) if case.mesh.ep > 1 else None
        pipeline = Pipeline(
            layers(case.shape, 5, tensor=tensor, expert=expert),
            pl.schedules.build(case.schedule, case.mesh.pp, MICROBATCHES // case.mesh.dp),
            loss=token_loss(case.shape, 0.0, tensor),
            mesh=mesh,
            tied=tied(case.shape),
            options=RuntimeOptions(recompute=case.recompute),
        )
        tokens, targets, positions = (each.chunk(case.mesh.dp)[mesh.place.dp] for each in data())
        loss = pipeline.step(tokens, targets, position_ids=positions)
        gradients = {name: (pipeline.layouts[name], p.grad.numpy().copy()) for name, p in pipeline.named_parameters()}
        results.append((loss.item(), gradients, (mesh.place.tp, mesh.ep.index)))
        pipeline.close()
    return results


def test_packed_documents_have_loss_and_gradients_of_separate_ones_in_every_layout() -> None:
    results = run_ranks(work, 4)
    wanted = {id(shape): separate(shape) for shape in (DENSE, EXPERTS)}
    for at, case in enumerate(CASES):
        want_loss, want = wanted[id(case.shape)]
        losses = {rank[at][0] for rank in results}
        assert len(losses) == 1
        assert abs(losses.pop() - want_loss) <= 1e-5, case
        for name in want:
            if name == "head.lm_head.weight":
                continue  # the embedding's
            parts: dict[tuple[int, ...], Tensor] = {}
            for rank in results:
                _, gradients, places = rank[at]
                if name in gradients:
                    sharding, gradient = gradients[name]
                    index = dict(zip(("tp", "ep"), places, strict=True))
                    parts[tuple(index[shard.axis] for shard in sharding.shards)] = torch.from_numpy(gradient)
            found = join(parts, sharding)
            # a gradient of keys' weights is a small difference of large sums: measured against all of a layer's
            scale = max(want[name].abs().max().item(), 1e-3)
            assert (found - want[name]).abs().max() <= 2e-5 * scale, (case, name)


def test_a_document_begins_where_positions_do_not_continue() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 0, 1, 2, 3]])
    assert document_numbers(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]
    assert visible(positions)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert torch.equal(visible(positions, 2, 5), visible(positions)[:, :, 2:5, :5])
