"""Times of a model's layers as `pipeloom profile` measures them, in place of those of a data sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeloom.errors import UsageError, echo
from pipeloom.limits import MODEL_CONFIG_BYTES, read_json
from pipeloom.plan.blocks import LayerOps
from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.model import ModelShape
from pipeloom.plan.time import StageSeconds

_KINDS = ("F", "I", "W", "B", "R")


@dataclass(frozen=True)
class MeasuredLayers:
    """Seconds of the kinds of layers of a model on one device, each whole.

    Attributes:
        seconds: (letter of the layer, whether it has experts) -> F, I, W, B and R of one micro-batch.
        sequences, seq: of that micro-batch.
        p2p, bandwidth: of a message between two pipeline ranks; 0 and infinite where no link was measured.
    """

    seconds: Mapping[tuple[str, bool], Mapping[str, float]]
    sequences: int
    seq: int
    p2p: float
    bandwidth: float

    def stage(self, layers: Sequence[LayerOps], layout: PlannedLayout) -> StageSeconds:
        """Sum the layers of a stage; times are in proportion to the sequences of a micro-batch.

        Raises UsageError for a layout that cuts layers, or whose sequences have another length.
        """
        for axis in ("tp", "cp", "ep"):
            if (size := getattr(layout, axis)) > 1:
                raise UsageError(
                    f"--costs: the layers were measured whole, and {axis}={size} cuts them; nearest: {axis}=1"
                )
        if layout.seq != self.seq:
            raise UsageError(
                f"--costs: sequences of {self.seq} tokens were measured, not of {layout.seq}; nearest: --seq {self.seq}"
            )
        factor, sums = layout.micro_batch / self.sequences, dict.fromkeys(_KINDS, 0.0)
        for layer in layers:
            seconds = self.seconds[kind_of_layer(layer)]
            again = seconds["R"] if layer.dropped == layer.tensors.keys() else 0.0  # recomputed as a whole
            for kind in _KINDS:
                sums[kind] += factor * (seconds[kind] + again * (kind in ("I", "B")))
        return StageSeconds(sums["F"], sums["I"], sums["W"], 0.0, 0.0, sums["B"])


def kind_of_layer(layer: LayerOps) -> tuple[str, bool]:
    """(its letter, whether it has experts)."""
    return layer.kind, any(op.expert for op in layer.ops)


def read(path: Path, shape: ModelShape) -> MeasuredLayers:
    """The profile in a file. Raises UsageError for one that is none, or of another model."""
    form = read_json(path, MODEL_CONFIG_BYTES, "a profile")
    letters = ["E", *"t" * shape.layers, *"m" * shape.ahead, "L"]
    try:
        seconds: dict[tuple[str, bool], dict[str, float]] = {}
        count = sum(len(each["layers"]) for each in form["layers"])
        if count != len(letters):
            raise UsageError(
                f"--costs {echo(str(path))}: it measures {count} layers, and {shape.name} has {len(letters)}"
            )
        for each in form["layers"]:
            at = min(each["layers"])
            sparse = letters[at] in "tm" and shape.block_is_sparse(min(at, shape.layers) - 1)
            seconds[letters[at], sparse] = {kind: float(each["seconds"][kind]["median"]) for kind in _KINDS}
        (sequences, seq), costs = form["microbatch"], form["costs"]
        return MeasuredLayers(seconds, sequences, seq, costs.get("p2p", 0.0), costs.get("bandwidth", float("inf")))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--costs {echo(str(path))}: it is not a profile ({type(error).__name__}: {error}); `pipeloom profile --output` "
            "writes one"
        ) from None
