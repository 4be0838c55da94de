"""Text from a model whose vocabulary, or whose sequences, are spread over ranks."""

from __future__ import annotations

import pytest

import pipeloom as pl
from layouts import model
from pipeloom.models import layers, tied, token_loss
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.data.tokenizers import ByteTokenizer
from pipeloom.train.hub.generate import generate
from processes import run_ranks

pytestmark = pytest.mark.core


def sampled(rank: int, shape: MeshShape) -> str:
    mesh = Mesh.of(shape)
    assert mesh is not None
    chosen = model(tie_word_embeddings=True, vocab_size=256)  # the tokenizer knows no more
    tensor = TensorParallel(mesh.tp, sequence=shape.tp > 1)
    context = ContextParallel(mesh.cp) if shape.cp > 1 else None
    made = layers(chosen, 5, tensor=tensor, context=context)
    schedule = pl.schedules.build("zbv", shape.pp, 2)
    pipeline = Pipeline(made, schedule, loss=token_loss(chosen, 0.0, tensor), mesh=mesh, tied=tied(chosen))
    pipeline.eval()
    text = generate(pipeline, ByteTokenizer(), list(b"def "), 160, 8, seed=3)
    pipeline.close()
    return text


@pytest.mark.slow
def test_every_rank_gets_the_text_of_one_process() -> None:
    (want,) = run_ranks(sampled, 1, MeshShape())
    assert run_ranks(sampled, 2, MeshShape(tp=2)) == [want] * 2
    assert run_ranks(sampled, 2, MeshShape(cp=2)) == [want] * 2
