"""Sharded parameters (ZeRO-3, `shard=3`) beside ZeRO-1 and torch's FSDP2: bytes of parameters on a rank, seconds of a step.

    python benchmarks/sharding.py

2 x 2 processes (dp, pp), `interleaved` with 4 stages per rank, one block of width 512 (two linear layers) per stage, and
8 micro-batches of 256 tokens. torch: the same blocks under `fully_shard` and the same order on torch's own pipeline runtime,
which gathers three stages ahead, and its AdamW. Bytes: the most whole parameters while a layer computes, and the share. All
alternate, step by step, in the same processes; medians and quartiles over 9 steps of the slowest rank, and CPU seconds of all
ranks. The gradients of the first step are compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

import pipeloom as pl
from layers import mse
from pipeloom.config import load
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule import Schedule
from pipeloom.schedule.csv_form import to_csv
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.optimizer import Optimizer
from processes import run_ranks

WIDTH, STAGES, MICROBATCHES, TOKENS, SLOTS, STEPS = 512, 8, 8, 256, 3, 9


class Block(nn.Sequential):
    """A block that notes, unless `notes` is None, how many bytes of the rank's parameters are whole when it runs."""

    def __init__(self, blocks: list[nn.Module], notes: list[int] | None) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.blocks, self.notes = [blocks], notes
        blocks.append(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.notes is None:  # torch's parameters are DTensors
            return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for b in self.blocks[0] for p in b.parameters()}
        self.notes.append(sum(storage.nbytes() for storage in storages.values()))
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def ours(mesh: Mesh, schedule: Schedule, words: list[str], notes: list[int]) -> tuple[Pipeline, Optimizer]:
    """Return a pipeline under the schedule with these transforms, and its optimizer."""
    blocks: list[nn.Module] = []
    layers = [Layer(f"b{at}", partial(Block, blocks, notes)) for at in range(STAGES)]
    options = RuntimeOptions(shard_gradients=True, seed=1, monitor=False)
    pipeline = Pipeline(layers, pl.schedules.transformed(schedule, words), loss=mse, mesh=mesh, options=options)
    return pipeline, Optimizer(list(pipeline.named_parameters()), load("tiny").optimizer, pipeline.sync)


class OfTorch:
    """This rank's blocks under `fully_shard` on torch's pipeline runtime, with the values of a pipeline of ours."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule) -> None:
        place, blocks = pipeline.mesh.place, list[nn.Module]()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        assert (mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()) == (place.pp, place.dp)
        values = {name: value.detach().clone() for name, value in pipeline.named_parameters()}
        self.blocks = {stage: Block(blocks, None) for stage in schedule.stages_of[place.pp]}
        for stage, block in self.blocks.items():
            block.load_state_dict({name: values[f"b{stage}.{name}"] for name, _ in block.named_parameters()})
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        group, device = mesh["pp"].get_group(), torch.device("cpu")
        stages = [PipelineStage(b, at, STAGES, device, group=group) for at, b in self.blocks.items()]
        torch_runtime: Any = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=mse)  # type: ignore[no-untyped-call]
        self.runtime = torch_runtime
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(to_csv(schedule))
            file.flush()
            torch_runtime._load_csv(file.name)
        options = load("tiny").optimizer
        parameters = [parameter for block in self.blocks.values() for parameter in block.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=options.betas, weight_decay=options.weight_decay)

    def step(self, x: Tensor, y: Tensor) -> None:
        more: dict[str, Any] = {"target": y, "losses": []} if STAGES - 1 in self.blocks else {}
        self.runtime.step(*((x,) if 0 in self.blocks else ()), **more)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Global name -> whole gradient; collective over dp."""
        named = [(f"b{at}.{name}", p.grad) for at, b in self.blocks.items() for name, p in b.named_parameters()]
        return {name: gradient.full_tensor() for name, gradient in named if isinstance(gradient, DTensor)}


def measure(rank: int) -> dict[str, Any]:
    """Return name -> (bytes of parameters, of shares, seconds and CPU seconds of each step, error of gradients) on this rank."""
    mesh = Mesh.of(MeshShape(dp=2, pp=2))
    assert mesh is not None
    schedule = pl.schedules.interleaved(ranks=2, microbatches=MICROBATCHES, chunks=STAGES // 2)
    notes: dict[str, list[int]] = {name: [] for name in ("ZeRO-1", f"shard={SLOTS}", "torch FSDP2")}
    plain, optimizer = ours(mesh, schedule, [], notes["ZeRO-1"])
    sharded, sharded_optimizer = ours(mesh, schedule, [f"shard={SLOTS}"], notes[f"shard={SLOTS}"])
    torchs = OfTorch(plain, schedule)
    assert plain.sync is not None
    assert sharded.sync is not None
    updates: list[Callable[[], None]] = [
        lambda: optimizer.step(None, 1e-3),
        lambda: sharded_optimizer.step(None, 1e-3),
        torchs.update,
    ]
    gradients: list[Callable[[], Any]] = [plain.sync.whole_gradients, sharded.sync.whole_gradients, torchs.gradients]
    steps: list[Callable[[Tensor, Tensor], Any]] = [plain.step, sharded.step, torchs.step]
    runs = list(zip(notes, steps, updates, gradients, strict=True))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in notes}
    errors: dict[str, float] = {}
    first: dict[str, Tensor] = {}
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank % 2))
    for step in range(STEPS + 2):
        for name, forward_backward, update, whole in runs:
            notes[name].clear()
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            forward_backward(x, x.flip(0))
            if not step:
                got = {key: value.clone() for key, value in whole().items() if value is not None}
                first = first or got
                errors[name] = max(
                    float((got[key] - value).abs().max() / value.abs().max()) for key, value in first.items()
                )
            update()
            busy = time.process_time() - busy
            dist.barrier()
            if step > 1:
                seconds[name].append((time.perf_counter() - begun, busy))
    shards = sharded.sync.shards
    assert shards is not None
    shares = sum(each.share.nbytes for each in shards.parameters.values())
    result = {
        name: (max(notes[name], default=0), shares if "shard" in name else 0, seconds[name], errors[name])
        for name in notes
    }
    plain.close()
    sharded.close()
    return result


def main() -> None:
    ranks = run_ranks(measure, 4)
    whole = ranks[0]["ZeRO-1"][0]
    slots = whole // (STAGES // 2) * SLOTS
    print(f"parameters of a rank {whole:,} bytes; 1/dp and {SLOTS} slots: {whole // 2 + slots:,}")
    for name in ranks[0]:
        steps = list(zip(*(rank[name][2] for rank in ranks), strict=True))
        low, middle, high = quantiles([max(wall for wall, _ in step) for step in steps], n=4)
        work = median(sum(busy for _, busy in step) for step in steps)
        held = max(rank[name][0] + rank[name][1] for rank in ranks)
        size = f"{held:,}" if held else "-"
        print(
            f"{name:11} {size:>12} bytes   {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), CPU "
            f"{work:.3f} s; gradients differ by {max(rank[name][3] for rank in ranks):.1e} at most"
        )


if __name__ == "__main__":
    main()
