"""A run on two processes of one thread whose steps take well below a second, as a configuration of `pipeloom train`."""

from __future__ import annotations

_CONFIG = """[model]
num_hidden_layers = 8
hidden_size = 256
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 768
vocab_size = 512
[parallel]
pp = 2
[schedule]
name = "1f1b"
microbatches = {microbatches}
[train]
steps = {steps}
seq_len = 128
global_batch_size = {batch}
device = "cpu"
threads = 1
[log]
every = 1
[sample]
tokens = 0
"""


def small_run(microbatches: int, batch: int, steps: int) -> str:
    """Return the TOML of a run of `steps` steps; `batch`: sequences of 128 tokens."""
    return _CONFIG.format(microbatches=microbatches, batch=batch, steps=steps)
