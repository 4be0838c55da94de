"""Imports that torch puts off until a first backward or optimizer: made once here, instead of by every forked rank."""

import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # noqa: F401
