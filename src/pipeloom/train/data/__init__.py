"""What a run trains on: sources, tokenizers, the cache of tokens, packed rows, batches."""
