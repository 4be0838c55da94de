"""Checkpoints for training loops of your own.

    from pipeloom import checkpoint

    checkpoint.save("runs/mine", step, pipeline, adam, extra={"tokens": seen}, keep=3)
    loaded = checkpoint.load("runs/mine", pipeline, adam)      # .step .extra .path; on any layout and schedule

`Saver` saves asynchronously. Files are safetensors and JSON, each with its SHA-256 in a manifest; nothing is pickled.
"""

from pipeloom.train.checkpoint.load import Loaded, load
from pipeloom.train.checkpoint.save import Saver, save

__all__ = ["Loaded", "Saver", "load", "save"]
