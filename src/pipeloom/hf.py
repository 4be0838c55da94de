"""`import pipeloom.hf`: the module `pipeloom.models.hf` under its public name."""

import sys

from pipeloom.models import hf

sys.modules[__name__] = hf
