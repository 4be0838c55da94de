"""Times of a model's layers as `pipeloom profile` measures them, in place of those of a data sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeloom.errors import UsageError, echo
from pipeloom.foreign import number_in
from pipeloom.limits import MODEL_CONFIG_BYTES, MOST_WIDTH, read_json
from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.time import StageSeconds
from pipeloom.schedule.costs import Costs
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.ops import LayerOps

_KINDS = ("F", "I", "W", "B", "RB")


@dataclass(frozen=True)
class MeasuredLayers:
    """Seconds of the kinds of layers of a model on one device, each whole.

    Attributes:
        seconds: (letter of the layer, whether it has experts) -> F, I, W, B and RB, the block (R;B): (seconds of a micro-batch of
            no sequences, which is the cost of an action whatever its size; of each sequence more).
        seq: tokens of a sequence.
        p2p, bandwidth: of a message between two pipeline ranks; 0 and infinite where no link was measured.
    """

    seconds: Mapping[tuple[str, bool], Mapping[str, tuple[float, float]]]
    seq: int
    p2p: float
    bandwidth: float

    def stage(self, layers: Sequence[LayerOps], layout: PlannedLayout) -> StageSeconds:
        """Sum the layers of a stage, for the sequences of the layout's micro-batch.

        Of a spread output layer a share takes its part of the time that grows with the sequences, and the norm alone none.

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
        sums, again = dict.fromkeys(_KINDS, 0.0), 0.0
        for layer in layers:
            if layer.kind == "N":
                continue
            times = self.seconds[kind_of_layer(layer)]
            sequences = layout.micro_batch / (layout.pp if layer.kind == "S" else 1)
            seconds = {kind: fixed * layout.slices + each * sequences for kind, (fixed, each) in times.items()}
            for kind in _KINDS:
                sums[kind] += seconds[kind]
            if layer.dropped == layer.tensors.keys():  # recomputed as a whole
                again += seconds["RB"] - seconds["B"]
        recompute = max(0.0, sums["RB"] - sums["B"])
        return StageSeconds(
            sums["F"], sums["I"] + again, sums["W"], 0.0, 0.0, backward=sums["B"] + again, recompute=recompute
        )


def kind_of_layer(layer: LayerOps) -> tuple[str, bool]:
    """(its letter, of a share that of the output layer, whether it has experts)."""
    return layer.kind.replace("S", "L"), any(op.expert for op in layer.ops)


def read(path: Path, shape: DecoderShape) -> MeasuredLayers:
    """The profile in a file. Raises UsageError for one that is none, or of another model."""
    try:
        form = read_json(path, MODEL_CONFIG_BYTES, "a profile")
    except OSError as error:
        raise UsageError(f"--costs {echo(str(path))} cannot be read: {error.strerror}") from None
    letters = ["E", *"t" * shape.num_hidden_layers, *"m" * shape.num_nextn_predict_layers, "L"]
    try:
        seconds: dict[tuple[str, bool], dict[str, tuple[float, float]]] = {}
        where, (sequences, seq), costs = f"--costs {echo(str(path))}", form["microbatch"], form["costs"]
        number_in(f"{where}: microbatch", sequences, 1, MOST_WIDTH, whole=True)
        count = sum(len(each["layers"]) for each in form["layers"])
        if count != len(letters):
            raise UsageError(
                f"--costs {echo(str(path))}: it measures {count} layers, and {shape.name} has {len(letters)}"
            )
        for each in form["layers"]:
            at = min(each["layers"])
            sparse = letters[at] in "tm" and shape.expert_blocks[min(at, shape.num_hidden_layers) - 1]
            samples = each["seconds_of_one_sequence"], each["seconds"]
            seconds[letters[at], sparse] = {
                kind: _line(sequences, *(number_in(f"{where}: {kind}", sample[kind]["median"]) for sample in samples))
                for kind in _KINDS
            }
        link = Costs(p2p=costs.get("p2p", 0.0), bandwidth=costs.get("bandwidth", float("inf")))
        return MeasuredLayers(seconds, seq, link.p2p, link.bandwidth)  # type: ignore[arg-type]  # a profile has one link
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(
            f"--costs {echo(str(path))}: it is not a profile ({type(error).__name__}: {error}); `pipeloom profile --output` "
            "writes one"
        ) from None


def _line(sequences: int, one: float, largest: float) -> tuple[float, float]:
    """(seconds of an action whatever its sequences, seconds of each of them), neither negative.

    The line through the times of one sequence and of the largest micro-batch, of `sequences`; in proportion to the latter where
    that is all that was measured, or where more sequences take more than their share.
    """
    slope = max(0.0, (largest - one) / (sequences - 1)) if sequences > 1 else largest
    fixed = max(0.0, largest - sequences * slope)
    return fixed, (largest - fixed) / sequences
