"""The byte tokenizer: a token is a byte of UTF-8."""

from __future__ import annotations

import torch
from torch import Tensor


class ByteTokenizer:
    """256 tokens, nothing to learn and nothing to store."""

    vocab_size = 256

    def encode(self, text: bytes | str) -> Tensor:
        """[length] uint8, which is a token's smallest form; batches are int64."""
        data = text.encode() if isinstance(text, str) else text
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Tensor) -> str:
        """The text; bytes that are no UTF-8, and tokens of 256 and above, become U+FFFD."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens.tolist()).decode(
            errors="replace"
        )
