"""Messages and collectives through host memory, as several processes on one GPU use them: here the host is the device."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.parallel import collectives
from pipeloom.parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.runtime.p2p import torch_p2p
from pipeloom.runtime.p2p.base import BufferPool, Outgoing
from pipeloom.runtime.tensor_spec import ShapeCache, boundary_of
from pipeloom.schedule.actions import OUTPUT
from pipeloom.schedule.channels import Channel, Edge, Message
from pipeloom.shapes.cut import even_sizes
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core


def work(rank: int) -> dict[str, Any]:
    collectives.goes_through_host = torch_p2p.goes_through_host = lambda device, group: True
    mesh = Mesh.of(MeshShape(pp=1, dp=2))
    assert mesh is not None
    x = torch.arange(8.0).view(1, 4, 2) + rank
    summed, gathered, scattered = (
        x.clone(),
        start_all_gather(x, mesh.dp).wait(),
        start_reduce_scatter(x, mesh.dp).wait(),
    )
    start_all_reduce(summed, mesh.dp).wait()
    found: dict[str, Any] = {"sum": summed.tolist(), "all": gathered.tolist(), "part": scattered.tolist()}
    for transport in ("individual", "batched"):
        schedule = pl.schedules.interleaved(2, 4, 2)
        options = RuntimeOptions(transport=transport, monitor=False, checksum=True)  # type: ignore[arg-type]
        pipeline = Pipeline(blocks(4), schedule, loss=mse, options=options)
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(*batch(8))
        want = serial(blocks(4), *batch(8), even_sizes(8, 4))[1]
        held = gradients(pipeline)
        found[transport] = worst(held, {name: want[name] for name in held})
        pipeline.close()
    return found


def test_values_arrive_through_host_memory() -> None:
    x = torch.arange(8.0).view(1, 4, 2)
    whole = 2 * x + 1
    for rank, found in enumerate(run_ranks(work, 2)):
        assert found["sum"] == whole.tolist()
        assert found["all"] == torch.cat([x, x + 1], 1).tolist()
        assert found["part"] == whole[:, 2 * rank : 2 * rank + 2].tolist()
        assert found["individual"] <= 1e-6
        assert found["batched"] <= 1e-6


# Modules whose own calls send what is on the CPU wherever the group has gloo.
ON_THE_CPU = {
    "parallel/exchange.py": "JSON as bytes; trees are moved to the group's device",
    "runtime/batch.py": "a number that is put on the CPU",
    "runtime/engine.py": "clocks",
    "train/workers/worker.py": "a barrier has no tensor",
    "train/report/verify.py": "a barrier has no tensor",
    "measure/rehearse.py": "a barrier has no tensor",
}
CALLS = re.compile(
    r"\b(?:dist\.(?:isend|irecv|send|recv|broadcast|reduce|all_reduce|all_gather\w*|all_to_all\w*|reduce_scatter\w*|barrier)|"
    r"group\.(?:send|recv|allreduce|broadcast))\("
)


def test_every_direct_call_of_a_collective_is_known_to_move_what_gloo_can() -> None:
    """A tensor of a GPU that is given to gloo's send arrives as an error on another rank."""
    source = Path(collectives.__file__).parents[1]
    direct = {str(path.relative_to(source)): path.read_text() for path in sorted(source.rglob("*.py"))}
    unknown = [
        name
        for name, text in direct.items()
        if CALLS.search(text)
        and name not in ON_THE_CPU
        and not re.search(r"\b(goes_through_host|carrier_of|through_host)\b", text)
    ]
    assert unknown == []


def test_nccl_and_the_cpu_move_tensors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, device, expected in (
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:gloo", "cuda", True),
        ("cpu:gloo,cuda:gloo", "cpu", False),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, backend=backend: backend)
        assert collectives.goes_through_host(torch.device(device), None) == expected


# What ProcessGroupNCCL has a type for, of the dtypes that may cross a boundary.
NCCL_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


class NcclGroup:
    """A group that refuses what NCCL refuses, and notes what it sends and receives."""

    def __init__(self) -> None:
        self.carried: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert all(tensor.dtype in NCCL_DTYPES and tensor.is_contiguous() for tensor in tensors)
        self.carried += tensors
        return SimpleNamespace(wait=lambda: None)

    recv = send


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int16, torch.bfloat16, torch.bool])
def test_messages_have_dtypes_that_nccl_knows(dtype: torch.dtype) -> None:
    """Both ends of a message take the memory of a tensor whose dtype NCCL refuses, and the receiver has the dtype again."""
    group = NcclGroup()
    control = NcclGroup()  # for headers
    links: Any = SimpleNamespace(
        peer=lambda channel, rank: (group, 0), through_host=False, device=torch.device("cpu"), control=control
    )
    values = (torch.arange(6).view(2, 3).to(dtype),)
    message = Message(Channel(0, 1, "activation"), Edge(0, 1, OUTPUT), 0, 0)
    book = ShapeCache("once")
    book.begin([True])
    book.remember(message.edge, 0, boundary_of(values))
    transport = torch_p2p.TorchTransport(links, {}, book, BufferPool(torch.device("cpu")))
    transport.exchange([Outgoing(message, values, boundary_of(values))], [])
    transport.exchange([], [message])
    sent, received = group.carried
    received.copy_(sent)
    (arrived,) = transport.take(message).values
    assert arrived is not None
    assert arrived.dtype == dtype
    assert torch.equal(arrived, values[0])
