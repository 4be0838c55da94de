"""Options of a pipeline that change speed or safety, and never the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from pipeloom.errors import ConfigError
from pipeloom.limits import LEAST_TIMEOUT, MOST_SECONDS, require_types, require_whole, whole_numbers
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.schedule.check import TransportName

START_SECONDS = 60.0  # for all ranks to build their stages, of which one may be many times larger than the others

NOTHING_TO_TURN_OFF = (
    "overlap_p2p is False, and the shared-memory transport posts no receives: a message is in the receiver's memory as soon "
    'as it is sent, whatever the receiver computes; use transport "individual" to compare'
)


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of a `Pipeline`.

    Attributes:
        transport: `"individual"`: torch.distributed, one message per call; `"batched"`: the messages between two actions in one
            or two calls, all on one communicator; `"shared"`: shared memory, for CPU ranks of one machine; `"auto"`: shared
            where all ranks can use it, else individual.
        overlap_p2p: post the receives of the next actions before the current one computes. None: yes (the batched transport
            does so with `shapes="once"`); shared memory has no receives to post, so False is refused there.
        receive_depth: receives that each channel keeps open (more where the schedule needs more); shared memory has none.
        shapes: `"once"`: a boundary's shapes are sent with its first message for each shape of the step's inputs, and
            remembered; `"each"`: with every message, for outputs whose shape depends on the data. Messages through shared
            memory always contain their shapes.
        deallocate: free a stage's output once it is sent; its graph is kept.
        device: where stages live; None: the current CUDA device under NCCL, else the CPU.
        timeout: seconds that a rank may make no progress before the watchdog ends the run; None: 20 times the slowest step,
            at least 30 and at most 300 seconds, and more in the first step and outside of steps (`health.status.Limits`).
        monitor: run the watchdog thread (several processes only).
        watchdog: a running watchdog for this pipeline to use; None: the pipeline starts its own.
        microbatch_sizes: rows of each micro-batch of a step; None, and for other batches in evaluations and predictions: as
            even as possible, larger ones first.
        slice_tokens: tokens of each slice of a sequence, where the schedule cuts sequences into slices; None: as even as
            possible, larger ones first.
        recompute: layers whose forward runs again in the backward instead of keeping its activations: `"none"`, `"full"`
            (all), or names of layers. The schedule that runs has blocks (R;B) for their stages. Where it is given blocks, they
            recompute the layers that are named, or all.
        main_gradients: accumulate gradients of bf16 parameters in fp32 (`Pipeline.sync`); `.grad` is the sum rounded to bf16.
            This is always done where gradients are summed over replicas.
        shard_gradients: each replica gets only its slice of the sum over the replicas (ZeRO stage 1). `Pipeline.parameters`
            are the slices of the parameters then, for any optimizer; `.grad` of whole parameters stays None.
        checksum: send a checksum of its values with each message, and verify it on arrival; for finding faults: it costs
            a pass over every message on both ends.
        fault: a fault to inject (any object with `kind` and its values, see runtime/health/fault_injection.py).
        seed: each layer factory (and each `reset_parameters` of a layer on the meta device) runs with the random state of torch,
            Python and NumPy derived from `seed` and the layer's name, so that the first weights are the same in every layout.
            The caller's random state is restored. None: `torch.initial_seed()` of rank 0.
        init: what to do before the first step after construction or a load if weights or buffers that several
            processes hold in full differ: `"broadcast"`: all take the values of the first, and a line says so; `"check"`:
            raise DistributedError; `"none"`: do not compare them.
        check_every: in the first step, and every so many steps, compare checksums of the batch among the ranks of one
            replica, and raise DistributedError if they differ; tensors on the meta device are left out. 0: never.
        shared_targets: let every micro-batch have all of a target tensor whose first dimension is not the batch's rows.
            Without it (and without the pipeline's `weight`) such targets are refused: a loss would broadcast them.
        trace: on a GPU, measure with CUDA events when actions start and end, and for how long computation waits for
            communications inside stages; the host then waits for the device at the start and end of a step. Without it, starts
            and ends on a GPU are those of the launches, and this waiting is not measured. On a CPU every step measures both.
    """

    transport: TransportName = "auto"
    overlap_p2p: bool | None = None
    receive_depth: int = 2
    shapes: Literal["once", "each"] = "once"
    deallocate: bool = True
    device: torch.device | str | int | None = None
    timeout: float | None = None
    monitor: bool = True
    watchdog: Watchdog | None = None
    microbatch_sizes: Sequence[int] | None = None
    slice_tokens: Sequence[int] | None = None
    recompute: Literal["none", "full"] | frozenset[str] = "none"
    main_gradients: bool = False
    shard_gradients: bool = False
    checksum: bool = False
    fault: Any = None
    seed: int | None = None
    init: Literal["broadcast", "check", "none"] = "broadcast"
    check_every: int = 100
    shared_targets: bool = False
    trace: bool = False

    @property
    def start_seconds(self) -> float:
        """Return the seconds that a rank waits for another one at start-up: longer than a watchdog that runs already, which
        knows more.
        """
        if self.watchdog is not None:
            return self.sum_seconds
        return START_SECONDS if self.timeout is None else min(START_SECONDS, self.timeout)

    @property
    def sum_seconds(self) -> float:
        """Return how long a rank waits in a sum: the watchdog is earlier, and knows better which rank is late and why."""
        return (300.0 if self.timeout is None else self.timeout) + 60.0

    def __post_init__(self) -> None:
        require_whole("receive_depth", self.receive_depth)
        require_whole("check_every", self.check_every, 0)
        for name, least in (("microbatch_sizes", 0), ("slice_tokens", 1)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(whole_numbers(name, getattr(self, name), least)))
        require_types(RuntimeOptions, vars(self))
        problems = []
        if self.transport == "shared" and self.overlap_p2p is False:
            problems.append(NOTHING_TO_TURN_OFF)
        seconds = LEAST_TIMEOUT if self.timeout is None else self.timeout
        if not LEAST_TIMEOUT <= seconds <= MOST_SECONDS:
            problems.append(
                f"timeout is {self.timeout!r}; it must be {LEAST_TIMEOUT:g} to {MOST_SECONDS:g} seconds, or None"
            )
        try:
            torch.device("cpu" if self.device is None else self.device)
        except (RuntimeError, TypeError):
            problems.append(
                f"device is {self.device!r}; it must be a device of torch, such as 'cpu' or 'cuda:0', or None"
            )
        if problems:
            raise ConfigError(problems)


def device_of(options: RuntimeOptions, mesh: Mesh) -> torch.device:
    """The device of the stages: as asked, else the current GPU under NCCL, else the CPU."""
    if options.device is not None:
        return torch.device(options.device)
    group = mesh.everyone.group
    if group is not None and "nccl" in str(dist.get_backend_config(group)) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
