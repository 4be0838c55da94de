"""Models as lists of layers, independent of their distribution over ranks."""

from pipeloom.models.gate import GateShape, TopKGate
from pipeloom.models.layers import VocabularyRanks, cross_entropy, hub_name, layers, tied, token_loss
from pipeloom.models.moe import MoeClasses, MoELayer
from pipeloom.models.mtp import ahead
from pipeloom.shapes.decoder import DecoderShape

__all__ = [
    "DecoderShape",
    "GateShape",
    "MoELayer",
    "MoeClasses",
    "TopKGate",
    "VocabularyRanks",
    "ahead",
    "cross_entropy",
    "hub_name",
    "layers",
    "tied",
    "token_loss",
]
