"""Our step beside Megatron-Core's own schedules and torch's, on the same blocks: `python benchmarks/megatron.py [order step]`.

order: forwards and backwards of every rank, action by action, against `1f1b` and `interleaved`.
step:  8 transformer blocks of width 256, 128 tokens, micro-batch 4, m = 8, 2 processes of one thread, v = 1 and 2: ours, and ours
       as a share of Megatron-Core's and of torch's; steps alternate in the same processes, figures are medians of 9.

Megatron-Core 0.16.1 comes from the folder of `make interop`, which this benchmark alone puts on the path. Its functions run on
gloo once three calls of CUDA are replaced; the block, the loss and the micro-batches are those of `benchmarks/runtime.py`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from layers import Block, TinyLayer, mse
from parts import run_parts
from pipeloom.runtime import Pipeline
from pipeloom.schedule.model import parts
from processes import run_ranks
from runtime import torch_step

FOLDER = Path(__file__).parents[1] / ".interop"
PAIRS = 9
Action = tuple[str, int, int]  # F or B, stage, micro-batch


def require_megatron() -> None:
    """Put Megatron-Core on the path; without it the process ends with a line that says how to get it."""
    if not (FOLDER / "megatron").is_dir():
        sys.exit("Megatron-Core is not installed in .interop: run `make interop`")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        package = ModuleType("megatron")  # it has no file of its own, and this one has its name
        package.__path__ = [str(FOLDER / "megatron")]
        sys.modules["megatron"] = package
        warnings.filterwarnings("ignore", message=".*not installed")
        import_module("megatron.core.pipeline_parallel.schedules")  # here, and not in every process


class MegatronStep:
    """Steps of Megatron-Core's own pipeline schedules, on the gloo process group of this process.

    Args:
        layers: of all stages, in order; this rank holds its own.
        chunks: stages per rank; more than one are interleaved, in groups of `group` micro-batches.
        m: micro-batches of a step.

    Attributes:
        actions: those of the last step on this rank, in order.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        chunks: int,
        m: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        group: int = 0,
    ) -> None:
        require_megatron()
        from megatron.core import parallel_state
        from megatron.core.enums import ModelType
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.pipeline_parallel import schedules

        zeros = torch.zeros
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda device=None: None
        schedules.torch = SimpleNamespace(**vars(torch) | {"zeros": lambda *size, device, **more: zeros(*size, **more)})
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            1, ranks, chunks if chunks > 1 else None, create_gloo_process_groups=False
        )
        config = ModelParallelConfig(
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            microbatch_group_size_per_vp_stage=group or ranks,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=chunks > 1,  # as its arguments set them
            batch_p2p_comm=chunks == 1,
            # Of chunks, an output would be freed while gloo sends it; on a GPU the order of the stream keeps it.
            deallocate_pipeline_outputs=chunks == 1,
        )
        config.fine_grained_activation_offloading = False  # of a transformer's configuration
        self.m, self.loss, self.actions = m, loss, list[Action]()
        self._config, self._stages, self._ranks, self._rank = config, ranks * chunks, ranks, rank
        each = len(layers) // self._stages
        self._models = [
            _Stage(
                layers[s * each : (s + 1) * each], config, chunk if chunks > 1 else None, ModelType.encoder_or_decoder
            )
            for chunk, s in enumerate(range(rank, self._stages, ranks))
        ]
        self._run = schedules.get_forward_backward_func()

    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Run a step over the batch, and return the losses of its micro-batches on the last rank."""
        self._config.hidden_size, micro = x.shape[-1], x.shape[0] // self.m
        self.actions = []
        data = [enumerate(zip(x.split(micro), y.split(micro), strict=True)) for _ in self._models]
        several = len(self._models) > 1
        losses: list[Tensor] = self._run(
            forward_step_func=self._forward,
            data_iterator=data if several else data[0],
            model=self._models if several else self._models[0],
            num_microbatches=self.m,
            seq_length=micro,  # its first dimension
            micro_batch_size=x[0].numel() // x.shape[-1],
        )
        return losses

    def _forward(self, data: Iterator[tuple[int, tuple[Tensor, Tensor]]], model: _Stage) -> tuple[Tensor, Any]:
        microbatch, (x, y) = next(data)
        stage = self._rank + self._ranks * (model.vp_stage or 0)
        self.actions.append(("F", stage, microbatch))
        output = model(x if stage == 0 else model.input)
        if output.requires_grad:
            output.register_hook(lambda _: self.actions.append(("B", stage, microbatch)))

        def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
            loss = self.loss(output, y)
            return loss, loss.detach() / self.m

        return output, loss_of


class _Stage(nn.Module):
    """One chunk, with what Megatron-Core's schedules read of it."""

    def __init__(self, layers: Sequence[nn.Module], config: Any, vp_stage: int | None, model_type: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.config, self.vp_stage, self.model_type = config, vp_stage, model_type
        self.input = torch.empty(0)

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        self.input = tensors[0]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def megatrons_actions(rank: int, chunks: int, shapes: list[tuple[int, int]]) -> list[list[Action]]:
    """Return the actions of this rank in a step of tiny layers, for each (micro-batches, group)."""
    orders = []
    for m, group in shapes:
        layers = [TinyLayer() for _ in range(dist.get_world_size() * chunks)]
        step = MegatronStep(layers, chunks, m, mse, group)
        step(torch.randn(m, 2, 4), torch.randn(m, 2, 4))
        orders.append(step.actions)
    return orders


def our_actions(ranks: int, chunks: int, m: int, group: int) -> list[list[Action]]:
    """Return the actions of our schedule for the same sizes, by rank."""
    options = {} if chunks == 1 else {"group_size": group or ranks}
    schedule = pl.schedules.build(
        "1f1b" if chunks == 1 else "interleaved", ranks, m, chunks if chunks > 1 else None, options
    )
    return [
        [(action.kind, action.stage, action.microbatch) for cell in program for action in parts(cell)]
        for program in schedule.programs
    ]


def shapes_of(ranks: int, chunks: int) -> list[tuple[int, int]]:
    """Return (micro-batches, group) of the shapes that are compared, which Megatron-Core accepts; group 0: it has none."""
    counts = (ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks)
    if chunks == 1:
        return [(m, 0) for m in (1, *counts[1:])]
    sizes = [(m, group) for m in counts for group in (ranks, ranks + 1) if group <= m]
    return [(m, group) for m, group in sizes if m % group == 0 or m % group >= ranks][:4]


def order() -> None:
    for ranks in (2, 3, 4):
        for chunks in (1, 2, 3, 4):
            shapes = shapes_of(ranks, chunks)
            theirs = run_ranks(megatrons_actions, ranks, chunks, shapes)
            for at, (m, group) in enumerate(shapes):
                same = [rows[at] for rows in theirs] == our_actions(ranks, chunks, m, group)
                print(f"p={ranks} v={chunks} m={m} group {group or '-'}: {'equal' if same else 'different'}")


def steps(rank: int, chunks: int, m: int) -> list[list[float]]:
    """Return the times of our steps, Megatron-Core's and torch's, in turn, on this rank."""
    schedule = pl.schedules.build("1f1b" if chunks == 1 else "interleaved", 2, m, chunks if chunks > 1 else None)
    torch.manual_seed(0)
    ours = Pipeline([Block for _ in range(8)], schedule, loss=mse)
    theirs = MegatronStep([Block() for _ in range(8)], chunks, m, mse)
    usual = torch_step(schedule.name, schedule.stages_of[rank], schedule.stages, m, [Block() for _ in range(8)], mse)
    runs: list[Callable[[Tensor, Tensor], object]] = [ours.step, theirs, usual]
    x, y = torch.randn(m * 4, 128, 256), torch.randn(m * 4, 128, 256)
    times: list[list[float]] = [[], [], []]
    for turn in range(3 + PAIRS):
        for each, step in zip(times, runs, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step(x, y)
            dist.barrier()
            if turn >= 3:
                each.append(time.perf_counter() - start)
    ours.close()
    return times


def step() -> None:
    print(f"8 blocks of width 256, 128 tokens, micro-batch 4, m = 8, 2 processes; medians of {PAIRS} alternated steps")
    print(f"{'':14}{'ours ms':>9}{'Megatron ms':>13}{'torch ms':>10}{'ours ÷ Megatron':>17}{'ours ÷ torch':>14}")
    for chunks in (1, 2):
        ours, theirs, usual = run_ranks(steps, 2, chunks, 8)[0]
        ratios = [median(a / b for a, b in zip(ours, other, strict=True)) for other in (theirs, usual)]
        name = "1f1b" if chunks == 1 else "interleaved"
        cells = [f"{median(each) * 1e3:{width}.0f}" for each, width in ((ours, 9), (theirs, 13), (usual, 10))]
        print(f"{name:14}{''.join(cells)}{ratios[0]:17.3f}{ratios[1]:14.3f}")


if __name__ == "__main__":
    require_megatron()
    run_parts({"order": order, "step": step})
