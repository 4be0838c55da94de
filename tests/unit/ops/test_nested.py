"""Nested values keep their containers and their order."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.nested import mapped, tensors_in


class Sample(NamedTuple):
    values: Tensor
    name: str


def test_tensors_are_found_in_order() -> None:
    a, b, c, d = torch.arange(4.0)
    found = tensors_in((a, [{"first": b, "other": 3}], Sample(c, "c"), None, {"last": (d,)}))
    assert [tensor.item() for tensor in found] == [0, 1, 2, 3]
    assert tensors_in("text") == []


def test_a_changed_value_has_the_containers_of_the_old_one() -> None:
    value = [(1, "text"), {"a": Sample(torch.zeros(2), "b"), "c": []}, torch.Size([5])]
    changed = mapped(value, int, lambda number: number + 1)
    assert changed == [(2, "text"), {"a": value[1]["a"], "c": []}, torch.Size([6])]  # type: ignore[index]
    assert [type(each) for each in (changed, changed[0], changed[1]["a"], changed[2])] == [
        list,
        tuple,
        Sample,
        torch.Size,
    ]
    assert mapped(value, Tensor, torch.numel)[1]["a"] == Sample(2, "b")  # type: ignore[arg-type]


def test_a_sequence_whose_class_takes_other_arguments_is_named() -> None:
    class Window(list[Any]):
        def __init__(self, first: Any, last: Any) -> None:
            super().__init__((first, last))

    with pytest.raises(
        UsageError, match=r"^a Window cannot be made of its items \(.*'last'\); give a tuple or a list$"
    ):
        mapped(Window(1, 2), int, float)
