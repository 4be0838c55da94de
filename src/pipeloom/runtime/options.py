"""How a pipeline runs: everything that changes speed or safety and never the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pipeloom.errors import ConfigError


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of a `Pipeline`.

    Attributes:
        transport: `"individual"`: torch.distributed, one message a call; `"batched"`: what falls between two actions is one
            call; `"shared"`: shared memory, for CPU ranks of one machine; `"auto"`: shared where all ranks can, else individual.
        overlap_p2p: post the receives of coming actions before the present one computes (individual transport; a batch
            holds what its two neighbours need and nothing later, or it would hold up the sends behind it).
        receive_depth: receives that each channel keeps open (more where the schedule needs more).
        shapes: `"once"`: a boundary's shapes are sent with its first message for each shape of the step's inputs and
            remembered; `"each"`: with every message, for outputs whose shape depends on the data.
        deallocate: drop a stage's output once it is sent; its graph stays.
        device: where stages live; None: the current CUDA device under NCCL, else the CPU.
        timeout: seconds that a rank may wait for one message before the watchdog reports a stall.
        monitor: run the watchdog thread (several processes only).
        notice: asked by the watchdog now and then; a text says that some process is dead, and ends the run.
        microbatch_sizes: rows of each micro-batch; None: as even as possible, larger ones first.
        recompute: layers whose forward runs again in the backward instead of keeping what it computed: `"none"`, `"full"`
            (all), or names of layers.
        head_deferral: how many micro-batches' weight gradients of the last layer (its linear layers, and those that are
            `Deferring`) wait for the cool-down: the last so many of a step; 0: all; None: none.
        main_gradients: bf16 parameters' gradients are added up in fp32 (`Pipeline.sync`), and `.grad` stays None. Always so
            where they are summed over replicas.
        shard_gradients: of the sum over the replicas each gets its slice only (ZeRO stage 1), and `.grad` stays None.
        fault: a fault to make on purpose (any object with `kind` and its values, see runtime/faults.py).
        trace: measure with CUDA events on a GPU (on a CPU every step is measured).
    """

    transport: Literal["auto", "individual", "batched", "shared"] = "auto"
    overlap_p2p: bool = True
    receive_depth: int = 2
    shapes: Literal["once", "each"] = "once"
    deallocate: bool = True
    device: torch.device | None = None
    timeout: float = 300.0
    monitor: bool = True
    notice: Callable[[], str | None] | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    recompute: Literal["none", "full"] | frozenset[str] = "none"
    head_deferral: int | None = None
    main_gradients: bool = False
    shard_gradients: bool = False
    fault: Any = None
    trace: bool = False

    def without_fault(self) -> RuntimeOptions:
        """The same with no fault that one rank makes: one that exchanges inputs stays."""
        return self if getattr(self.fault, "rank", -1) < 0 else replace(self, fault=None)

    def __post_init__(self) -> None:
        problems = []
        if self.transport not in ("auto", "individual", "batched", "shared"):
            problems.append(f"transport is {self.transport!r}; it must be 'auto', 'individual', 'batched' or 'shared'")
        if self.shapes not in ("once", "each"):
            problems.append(f"shapes is {self.shapes!r}; it must be 'once' or 'each'")
        if self.receive_depth < 1:
            problems.append(f"receive_depth is {self.receive_depth}; it must be at least 1")
        if not self.timeout > 0:
            problems.append(f"timeout is {self.timeout}; it must be above 0 seconds")
        if not isinstance(self.recompute, frozenset) and self.recompute not in ("none", "full"):
            problems.append(f"recompute is {self.recompute!r}; it must be 'none', 'full' or a frozenset of layer names")
        if self.head_deferral is not None and self.head_deferral < 0:
            problems.append(f"head_deferral is {self.head_deferral}; it must be at least 0 (all), or None")
        if problems:
            raise ConfigError(problems)
