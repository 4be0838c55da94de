"""The vocabulary over ranks: embedding, loss, and what is never allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layouts import LENGTH, Way, batch, model, step, tensor_parallel
from pipeloom.errors import UsageError
from pipeloom.models import cross_entropy
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.sharding import shard_of, shardings_of
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, whole_logits
from pipeloom.parallel.vocabulary import cross_entropy as spread_cross_entropy
from pipeloom.shapes.mesh import uneven_parts
from processes import run_ranks

pytestmark = pytest.mark.core

WIDTH = 6


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_targets(vocabulary: int) -> Tensor:
    targets = torch.randint(0, vocabulary, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    targets[0, :3] = torch.tensor([0, vocabulary - 1, vocabulary // 4])
    return targets


def loss_and_gradient(compute: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = compute(leaf)
    (loss * 3).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def check_loss(tensor: TensorParallel, vocabulary: int, dtype: torch.dtype, smoothing: float, ignored: bool) -> None:
    logits, targets = 20 * normal(3, LENGTH, vocabulary, dtype=dtype), some_targets(vocabulary)
    if ignored:
        targets[1] = -100
    sharding = shardings_of(VocabularyHead(WIDTH, vocabulary, tensor))["weight"]
    part = shard_of(logits.movedim(-1, 0), sharding, {"tp": tensor.index}).movedim(0, -1)
    want, gradient = loss_and_gradient(lambda x: cross_entropy(x, targets, smoothing), logits)
    loss, found = loss_and_gradient(lambda x: spread_cross_entropy(x, targets, tensor, vocabulary, smoothing), part)
    own = shard_of(gradient.movedim(-1, 0), sharding, {"tp": tensor.index}).movedim(0, -1)
    assert torch.equal(whole_logits(part[0], tensor, vocabulary), logits[0])
    assert loss.dtype == want.dtype
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(loss, want, rtol=min(tolerance, 1e-5), atol=0)
    torch.testing.assert_close(found, own, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))


def check_embedding(tensor: TensorParallel, vocabulary: int) -> None:
    full, tokens, seed = normal(vocabulary, WIDTH), some_targets(vocabulary), normal(3, LENGTH, WIDTH, seed=2)
    reference = full.clone().requires_grad_()
    want = F.embedding(tokens, reference)
    want.backward(seed)
    module = VocabularyEmbedding(vocabulary, WIDTH, tensor)
    sharding = shardings_of(module)["weight"]
    with torch.no_grad():
        module.weight.copy_(shard_of(full, sharding, {"tp": tensor.index}))
    own = (lambda x: x.chunk(tensor.size, 1)[tensor.index]) if tensor.sequence else (lambda x: x)
    out = module(tokens)
    out.backward(own(seed))
    assert torch.equal(out, own(want))
    assert reference.grad is not None
    torch.testing.assert_close(module.weight.grad, shard_of(reference.grad, sharding, {"tp": tensor.index}))


def refusals(tensor: TensorParallel, vocabulary: int) -> list[str]:
    """Every rank refuses, before it communicates: none is left waiting."""
    said = []
    embedding = VocabularyEmbedding(vocabulary, WIDTH, tensor)
    logits = torch.zeros(1, 1, embedding.parts[tensor.index], requires_grad=True)
    for wrong in (vocabulary, -1):
        for call in (embedding, lambda t: spread_cross_entropy(logits, t, tensor, vocabulary)):
            with pytest.raises(UsageError) as caught:
                call(torch.tensor([[wrong]]))
            said.append(str(caught.value))
    loss = spread_cross_entropy(logits, torch.tensor([[2]]), tensor, vocabulary)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    return said


def check_large_logits(tensor: TensorParallel, vocabulary: int) -> None:
    """Logits whose exponentials overflow, or all underflow: the loss and its gradient are those of one process."""
    full = normal(1, 5, vocabulary) * 1000 - 5000
    targets = torch.arange(5).unsqueeze(0) % vocabulary
    reference = full.clone().requires_grad_()
    want = F.cross_entropy(reference.flatten(0, 1), targets.flatten())
    want.backward()
    assert reference.grad is not None
    own = torch.split(full, uneven_parts(vocabulary, tensor.size), -1)[tensor.index].clone().requires_grad_()
    loss = spread_cross_entropy(own, targets, tensor, vocabulary)
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(
        own.grad, torch.split(reference.grad, uneven_parts(vocabulary, tensor.size), -1)[tensor.index]
    )


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest_of_a_step(tensor: TensorParallel | None, **changes: Any) -> int:
    with Largest() as seen:
        step(model(**changes), Way(smoothing=0.1), tensor)
    return seen.elements


def work(rank: int, vocabulary: int) -> tuple[list[str], int, int]:
    for sequence in (False, True):
        check_embedding(tensor_parallel(sequence), vocabulary)
    tensor = tensor_parallel(False)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for smoothing in (0.0, 0.1):
            check_loss(tensor, vocabulary, dtype, smoothing, ignored=smoothing > 0)
    check_large_logits(tensor, vocabulary)
    wide = {"vocab_size": 5000, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32}
    return (
        refusals(tensor, vocabulary),
        largest_of_a_step(tensor_parallel(True), **wide),
        largest_of_a_step(None, **wide),
    )


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 257), (4, 257), (4, 3)])
def test_embedding_and_loss_are_those_of_one_process(ranks: int, vocabulary: int) -> None:
    tokens = max(t.numel() for t, _ in batch(5000))
    for said, largest, alone in run_ranks(work, ranks, vocabulary):
        assert said == [
            f"token {vocabulary} is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}",
            f"target {vocabulary} is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}",
            f"token -1 is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}",
            f"target -1 is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}",
        ]
        # drawing the first weights makes vocabulary x width, which is less here; logits are the largest in a step
        assert largest <= max(-(-5000 // ranks) * tokens, 5000 * 16) < alone
        assert alone == 5000 * tokens


def test_the_last_rank_takes_the_remainder() -> None:
    heads = [VocabularyHead(WIDTH, 257, TensorParallel(Axis((0, 1, 2, 3), at, None))) for at in range(4)]
    assert [head.weight.shape[0] for head in heads] == [64, 64, 64, 65]
    embedding = VocabularyEmbedding(10, WIDTH, TensorParallel(Axis((0, 1, 2, 3), 3, None)))
    assert embedding.parts == (2, 2, 2, 4)


def test_ranks_of_a_smaller_vocabulary_have_one_row_or_none() -> None:
    assert [uneven_parts(count, 4) for count in (1, 3, 4)] == [(1, 0, 0, 0), (1, 1, 1, 0), (1, 1, 1, 1)]


def test_label_smoothing_of_one_process_is_its_formula() -> None:
    logits, targets = normal(3, LENGTH, 11, dtype=torch.float64), some_targets(11)
    logs = torch.log_softmax(logits, -1)
    hit = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(cross_entropy(logits, targets, 0.1), -(0.9 * hit + 0.1 * logs.mean(-1)).mean())
