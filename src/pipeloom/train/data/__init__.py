"""Training data: sources, tokenizers, the cache of tokens, packed rows, batches."""
