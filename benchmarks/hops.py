"""The time of a hop, read off a measured step."""

from pipeloom.train.measured import hops

__all__ = ["hops"]
