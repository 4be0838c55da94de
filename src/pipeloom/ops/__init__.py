"""Autograd building blocks that use no process group."""

from pipeloom.ops.products import use_onednn_linear

__all__ = ["use_onednn_linear"]
