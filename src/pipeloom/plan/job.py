"""A training run, whichever system runs it: what the words of each of them are read into and written from."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.plan.layout import PlannedLayout
from pipeloom.shapes.decoder import DecoderShape

OPTIONS = ("overlap_p2p", "overlap_warmup", "overlap_grads", "overlap_params", "overlap_experts", "delay_wgrad")
"""What a run hides behind computation: messages between stages, those of the warm-up too, the reduction of gradients, the gathering of
parameters, the experts' all-to-all, and the products of weights' gradients, which are put off for that."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        shape: the model; None: the words do not describe it.
        layout: axes, batch, schedule, recomputation; its `stages` are empty where blocks are divided evenly.
        devices: None: the words do not say.
        group: micro-batches that interleaving takes through a chunk before it goes on to the next; 0: as many as ranks.
        recompute_layers: blocks of each stage that are recomputed, from its first; 0: all.
        recompute_span: blocks whose input alone is kept, so that they are recomputed together.
        offload: modules whose inputs are copied to host memory; offload_share: the share of them.
        fp8: name of the recipe of 8-bit products; "": none.
        grads: "fp32" or "bf16", in which gradients are reduced.
        options: of `OPTIONS`.
        context: how context parallelism exchanges keys and values: "p2p", "all_gather", "a2a"; "": the system's choice.
        dispatcher: how tokens travel to their experts, in the system's word; "": the system's choice.
        unknown: words that were not understood, and values that only a run would tell.
    """

    shape: DecoderShape | None
    layout: PlannedLayout
    devices: int | None = None
    group: int = 0
    recompute_layers: int = 0
    recompute_span: int = 1
    offload: tuple[str, ...] = ()
    offload_share: float = 1.0
    fp8: str = ""
    grads: str = "fp32"
    options: tuple[str, ...] = ()
    context: str = ""
    dispatcher: str = ""
    unknown: tuple[str, ...] = ()
