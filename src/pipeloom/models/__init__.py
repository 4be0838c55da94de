"""Models as lists of layers, independent of their distribution over ranks."""

from pipeloom.decoder_shape import DecoderShape
from pipeloom.models.layers import cross_entropy, hub_name, layers, tied, token_loss
from pipeloom.models.moe import MoeClasses

__all__ = ["DecoderShape", "MoeClasses", "cross_entropy", "hub_name", "layers", "tied", "token_loss"]
