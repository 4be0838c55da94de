"""Context parallelism: bytes and time of two blocks over long sequences, on 2 gloo processes against one.

    python benchmarks/context.py [TOKENS]       default 16,384

Two blocks of width 64 with one head, forward and backward of one sequence, in fp32. *bytes*: storages that autograd saves in the
forward, parameters aside. *time* is the slower process's, median of 5 steps in turn with those of one process alone; the
other one sleeps meanwhile, as it would were it not there. *÷ half*: over half the time of one process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.models.decoder import Block
from pipeloom.parallel.context import ContextParallel, share_tokens
from pipeloom.parallel.mesh import Axis
from pipeloom.shapes.decoder import DecoderShape
from processes import run_ranks

WIDTH, BLOCKS, STEPS = 64, 2, 5
SHAPE = DecoderShape(BLOCKS, WIDTH, 1, 1, intermediate_size=2 * WIDTH, vocab_size=16)


def stack(context: ContextParallel | None) -> nn.Sequential:
    torch.manual_seed(0)
    return share_tokens(nn.Sequential(*(Block(SHAPE) for _ in range(BLOCKS))), context)


def saved_bytes(step: Callable[[], Tensor], module: nn.Module) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = step()
    total = sum(size for address, size in storages.items() if address not in weights)
    out.sum().backward()  # type: ignore[no-untyped-call]
    return total


def sides(rank: int, tokens: int) -> dict[str, tuple[int, list[float]]]:
    """Name -> (bytes saved, seconds of each step) on this rank."""
    whole = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    measured: dict[str, tuple[int, list[float]]] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name in ("one process", "gather", "ring"):
        context = None if name == "one process" else ContextParallel(Axis((0, 1), rank, dist.group.WORLD), name)  # type: ignore[arg-type]
        module = stack(context)
        x = (whole if context is None else context.own_tokens(whole)).clone().requires_grad_()
        steps[name] = lambda module=module, x=x: module(x)  # type: ignore[misc]
        if context is not None or rank == 0:
            measured[name] = saved_bytes(steps[name], module), []
        dist.barrier()
    for _ in range(STEPS):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            if name in measured:
                step().sum().backward()  # type: ignore[no-untyped-call]
                measured[name][1].append(time.perf_counter() - begun)
    return measured


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    first, second = run_ranks(sides, 2, tokens)
    alone_bytes, alone = first["one process"]
    print(f"{tokens:,} tokens, {BLOCKS} blocks, width {WIDTH}")
    print(f"{'':12} {'MiB':>7} {'÷ one':>6} {'s':>7} {'÷ half':>7}")
    print(f"{'one process':12} {alone_bytes / 2**20:7.1f} {'':6} {median(alone):7.3f}")
    for name in ("gather", "ring"):
        size = max(first[name][0], second[name][0])
        pairs = zip(first[name][1], second[name][1], alone, strict=True)
        times = [(max(a, b), max(a, b) / (one / 2)) for a, b, one in pairs]
        print(
            f"{name:12} {size / 2**20:7.1f} {size / alone_bytes:6.3f} {median(t for t, _ in times):7.3f} "
            f"{median(ratio for _, ratio in times):7.3f}"
        )


if __name__ == "__main__":
    main()
