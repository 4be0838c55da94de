"""Check during training that values held by several ranks are still equal, bit for bit.

A weight that differs from its replica (after a flipped bit, a lost message or a race) spoils a run silently. The check
compares weights, masters and the optimizer's moments among the ranks that hold the same elements: data-parallel replicas
(those along edp for an expert), tensor-parallel ranks for tensors that are not sharded, the replicas of two routes, and the
holders of a tied weight. Under ZeRO-1 a rank's slice of the state is compared with equal slices on other ranks. On CUDA,
tensor-parallel ranks may differ by CUDA_TP_TOLERANCE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from pipeloom.errors import DistributedError
from pipeloom.runtime import Pipeline, replicas
from pipeloom.runtime.health.status import Names
from pipeloom.train.checkpoint.state import stepped_states
from pipeloom.train.optimizer import Optimizer

# Relative to a tensor's norm: on CUDA, tensor-parallel ranks may add the terms of the same sum in different orders.
CUDA_TP_TOLERANCE = 1e-3


class ReplicaCheck:
    """Compares values that several ranks hold: at a fixed interval of steps, and before each checkpoint.

    Args:
        every: steps from one check to the next; 0: never check, not even before a checkpoint.
        tied: groups of parameter names that are one weight.

    Attributes:
        equal_until: the last step after which the values were equal; None: not known.
    """

    def __init__(
        self, pipeline: Pipeline, optimizer: Optimizer, every: int, tied: Sequence[Sequence[str]] = ()
    ) -> None:
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._every = every
        self.equal_until: int | None = None
        self._first = {name: names[0] for names in tied for name in names}

    def before_save(self, step: int) -> None:
        """Check after step `step`, unless checks are off; collective and errors as for `check`."""
        if self._every:
            self.check(step)

    def check(self, step: int) -> None:
        """Check after step `step`, counted from 1. Collective over the run.

        Raises DistributedError on every rank; it names a tensor and ranks that hold different values of it.
        """
        pipeline, shape = self._pipeline, self._pipeline.mesh.shape
        if pipeline._distributed:
            named = dict(self.tensors())
            tolerance = CUDA_TP_TOLERANCE if pipeline.device.type == "cuda" and shape.tp > 1 else 0.0
            with pipeline.waiting("the other ranks' checksums"):
                differences = replicas.compare(named, pipeline._run_control, shape, tolerance)
            if differences:
                raise DistributedError(f"after step {step} {self._words(differences)}")
        self.equal_until = step

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (key, tensor); tensors with equal keys on two ranks must be equal.

        A key is `name|part|kind`: the parameter's name, its place along the axes that shard it, and the kind of tensor.
        """
        pipeline = self._pipeline

        def place(name: str) -> str:
            shards = pipeline.layouts[name].shards
            cut = " ".join(f"{shard.axis} {getattr(pipeline.mesh.place, shard.axis)}" for shard in shards)
            return f"{self._first.get(name, name)}|{cut}"

        for name, parameter in pipeline.named_parameters():
            yield f"{place(name)}|weight", parameter
        for state in stepped_states(pipeline, self._optimizer):
            stepped = state.stepped
            for kind, value in state.values().items():
                if isinstance(value, Tensor) and kind != "step":
                    yield f"{place(stepped.name)}|{kind} {stepped.start}:{stepped.stop}", value

    def _words(self, differences: Sequence[replicas.Difference]) -> str:
        names, first = Names(self._pipeline.mesh), differences[0]
        name, _, kind = first.key.split("|")
        what = {"weight": name, "master": f"the master weight of {name}"}.get(kind.split()[0])
        what = what or f"the optimizer's {kind.split()[0]} of {name}"
        more = f" (and {len(differences) - 1} more tensors)" if len(differences) > 1 else ""
        held = " and ".join(names.of(rank) for rank in first.same[:3])
        return (
            f"{what}{more} is not the same on {' and '.join(names.of(rank) for rank in first.others[:3])} as on {held}, which "
            "should hold the same bits: memory, a message or a kernel is at fault; start again from the newest checkpoint, "
            "which is from before the difference"
        )
