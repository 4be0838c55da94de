"""`train.compile = "blocks"`: blocks compiled one by one compute the loss and gradients of the model that is not compiled."""

from __future__ import annotations

import pytest
import torch

from pipeloom.config import load_layout
from pipeloom.measure.build import PARAMETER_DTYPES, block_names, compiled, model_layers, ties, training_loss
from pipeloom.runtime import LocalPipeline, RuntimeOptions


def step_of(compile: str, name: str, dtype: str, recompute: str):
    """A step's loss and gradients, with different rows in every micro-batch."""
    keys = {"schedule.name": name, "schedule.microbatches": 4, "train.compile": compile, "train.dtype": dtype}
    layout = load_layout("tiny", keys | {"train.compile_backend": "aot_eager"}, world_size=0)
    config, kind = layout.config, PARAMETER_DTYPES[dtype]
    pipeline = LocalPipeline(
        compiled(model_layers(config, kind, torch.device("cpu")), config),
        layout.schedule,
        loss=training_loss(config),
        tied=ties(config),
        options=RuntimeOptions(
            main_gradients=kind.itemsize < 4,
            recompute=frozenset(block_names(config)) if recompute == "full" else "none",
        ),
    )
    tokens, targets = torch.randint(0, 256, (2, 8, 16), generator=torch.Generator().manual_seed(3))
    loss = pipeline.step(tokens, targets)
    return loss, {key: parameter.grad.float() for key, parameter in pipeline.named_parameters()}


@pytest.mark.parametrize(
    ("name", "dtype", "recompute", "tolerance"),
    [
        ("1f1b", "float32", "none", 0.0),
        ("1f1b", "bfloat16", "none", 0.02),
        ("interleaved", "float32", "full", 0.0),
        ("zbv", "float32", "none", 1e-6),
    ],
)
def test_compiled_blocks_train_as_others(name, dtype, recompute, tolerance):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, gradients = step_of("none", name, dtype, recompute)
    assert not torch._dynamo.utils.counters["stats"]
    loss, others = step_of("blocks", name, dtype, recompute)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # of all blocks, and nothing else
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(loss, plain, rtol=tolerance, atol=0)
    assert gradients.keys() == others.keys()
    for key, gradient in gradients.items():
        assert (others[key] - gradient).abs().max() <= tolerance * gradient.abs().max(), key
