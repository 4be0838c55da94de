"""The runtime's small models and samples are used here too."""

import sys
from pathlib import Path

import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # noqa: F401  made once here, instead of by every forked rank

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
