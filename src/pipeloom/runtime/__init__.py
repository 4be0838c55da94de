"""The runtime: one rank's engine, its transports, and the pipeline that a trainer steps."""

from pipeloom.runtime.layers import Layer
from pipeloom.runtime.local import LocalPipeline
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.pipeline import Pipeline

__all__ = ["Layer", "LocalPipeline", "Pipeline", "RuntimeOptions"]
