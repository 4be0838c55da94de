"""Losses that would train nothing or weigh micro-batches otherwise than one process, and outputs put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from models import WIDTH, batch, blocks, mse
from pipeloom.errors import ConfigError, UsageError
from pipeloom.runtime import Layer, LocalPipeline

S = pl.schedules


def local(loss: Callable[..., Any], **options: Any) -> LocalPipeline:
    return LocalPipeline(blocks(2), S.zb_h1(2, 4), loss=loss, **options)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, target: mse(output.detach(), target), "the loss carries no gradient for any micro-batch"),
        (lambda output, target: (output > target).sum(), r"the loss returned torch.int64\[\]; it must return"),
        (lambda output, target: mse(output, target) * 1j, r"the loss returned torch.complex64\[\]"),
    ],
    ids=["detached", "integer", "complex"],
)
def test_a_loss_that_trains_nothing_is_refused(loss: Callable[..., Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        local(loss).step(*batch(8))


def test_some_micro_batches_may_have_a_constant_loss() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return torch.zeros(()) if target[0, 0, 0] < 0 else mse(output, target)

    inputs, targets = batch(8)
    targets[:, 0, 0] = torch.tensor([1.0, 1, 1, 1, 1, 1, -1, 1])
    pipeline = local(loss)
    pipeline.step(inputs, targets)
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
    frozen = local(mse)
    frozen.modules["block1"].requires_grad_(False)
    frozen.modules["block0"].requires_grad_(False)
    frozen.step(inputs, targets)  # nothing to train, and nothing to refuse


@pytest.mark.parametrize("method", ["step", "forward_backward"])
def test_a_step_without_gradients_is_refused(method: str) -> None:
    pipeline = local(mse)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off, pytest.raises(UsageError, match="a step is called where gradients are turned off"):
            getattr(pipeline, method)(*batch(8))


CLASSES = torch.arange(1.0, WIDTH + 1)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), "skips targets of 0, and the pipeline's ignore_index is -100"),
        (partial(F.cross_entropy, ignore_index=0), "skips targets of 0"),
        (nn.NLLLoss(weight=CLASSES), r"pass weight=lambda targets: class_weights\[targets\]"),
        (partial(F.cross_entropy, weight=CLASSES), "weighs its classes"),
        (torch.compile(nn.CrossEntropyLoss(weight=CLASSES), backend="eager"), "weighs its classes"),
        (nn.CrossEntropyLoss(weight=CLASSES).forward, "weighs its classes"),
    ],
)
def test_a_cross_entropy_whose_mean_is_over_something_else_is_refused(loss: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        local(loss)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (nn.CrossEntropyLoss(), {}),
        (nn.CrossEntropyLoss(ignore_index=0), {"ignore_index": 0}),
        (partial(F.cross_entropy, weight=CLASSES), {"weight": lambda targets: CLASSES[targets].sum()}),
    ],
)
def test_a_cross_entropy_is_that_of_one_process(loss: Callable[..., Any], options: dict[str, Any]) -> None:
    targets = torch.randint(WIDTH, (8, WIDTH), generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(8, WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
    pipeline = local(loss, **options)
    want = loss(pipeline.modules["block1"](pipeline.modules["block0"](inputs)).detach(), targets)
    torch.testing.assert_close(pipeline.step(inputs, targets), want)


# -- outputs -----------------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """Returns a dict; `rows`: with a number that differs from micro-batch to micro-batch."""

    def __init__(self, rows: bool = False) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "both": (x, [x.sum()]), "none": None, "number": len(x) if self.rows else 7}


def test_outputs_in_dicts_hold_all_rows() -> None:
    inputs, _ = batch(6)
    pipeline = LocalPipeline([*blocks(2), Layer("several", Several)], S.one_f_one_b(2, 4), loss=mse)
    outputs = pipeline.predict(inputs)
    want = pipeline.modules["block1"](pipeline.modules["block0"](inputs))
    torch.testing.assert_close(outputs["x"], want)
    torch.testing.assert_close(outputs["both"][0], want)
    assert outputs["both"][1][0].shape == (4,)
    assert (outputs["none"], outputs["number"]) == (None, 7)
    pipeline = LocalPipeline([*blocks(2), Layer("several", partial(Several, True))], S.one_f_one_b(2, 4), loss=mse)
    assert pipeline.predict(inputs)["number"] == [2, 2, 1, 1]


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


def test_a_sparse_tensor_between_stages_is_refused() -> None:
    pipeline = LocalPipeline([Layer("sparse", Sparse), *blocks(1)], S.one_f_one_b(2, 2), loss=mse)
    with pytest.raises(UsageError, match="stage 0 returned a sparse_coo tensor"):
        pipeline.step(*batch(4))


class Labelled(Tensor):
    """A subclass, which would arrive on another rank as a plain tensor."""


class Labels(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name

    def forward(self, x: Tensor) -> object:
        return (x, {"label": x.as_subclass(Labelled)}) if self.by_name else x.as_subclass(Labelled)


class ReadsLabel(nn.Module):
    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return x * label


@pytest.mark.parametrize(("by_name", "where"), [(False, "stage 0"), (True, "stage 0, as tensor 'label',")])
def test_a_subclass_of_tensor_between_stages_is_refused(by_name: bool, where: str) -> None:
    names = ("label",) if by_name else ()
    labels = Layer("labels", lambda: Labels(by_name), writes=names)
    layers = [labels, *blocks(1), *([Layer("reads", ReadsLabel, reads=names)] if by_name else [])]
    pipeline = LocalPipeline(layers, S.one_f_one_b(2, 2), loss=mse)
    with pytest.raises(
        UsageError, match=f"{where} returned a Labelled, a subclass of torch.Tensor; .* value.as_subclass"
    ):
        pipeline.step(*batch(4))
    LocalPipeline(layers, S.one_f_one_b(1, 2), loss=mse).step(*batch(4))
