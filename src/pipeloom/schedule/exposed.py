"""Time that a measured step spent on communications other than messages between stages, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

CommunicationKind = Literal["p2p", "tp", "dp", "all-to-all"]
COMMUNICATIONS: tuple[CommunicationKind, ...] = get_args(CommunicationKind)
"""Kinds of communication.

- p2p: messages between stages, and the gradients of weights that several pipeline ranks hold.
- tp: collectives of tensor-parallel ranks.
- dp: gradients summed over the replicas, and weights that other replicas have stepped.
- all-to-all: tokens and their gradients between expert-parallel ranks, and the counts of them.
"""


@dataclass(frozen=True)
class Exposed:
    """Communications of one rank in one step that no computation hid.

    Attributes:
        inside: kind -> seconds for which computation stood still inside the rank's actions.
        after: kind -> seconds after its last action.
        end: when its gradients were complete, on the clock of the timeline's starts and ends.
    """

    inside: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    end: float = 0.0
