"""Keys and values of earlier tokens in the layers of a `transformers` model, in its own caches, while text is generated."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import cache
from typing import Any

from pipeloom.models.hf.library import transformers


@cache
def _cache_class() -> Any:
    class Past(transformers().DynamicCache):  # type: ignore[misc]  # of a package without types, imported when it is needed
        """A cache of which one rank fills its own layers alone: the length is that of the sequence, not of the first layer."""

        tokens = 0  # before those of the present forward

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.tokens

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            window = getattr(self.layers[layer_idx], "sliding_window", None)
            hidden = 0 if window is None else max(self.tokens - window + 1, 0)
            return self.tokens + query_length - hidden, hidden

    return Past


class PastTokens:
    """Caches of the parts of a model on one rank, one per micro-batch, told apart by the order of each part's calls."""

    def __init__(self) -> None:
        self._caches: list[Any] = []
        self._calls: Counter[int] = Counter()
        self._tokens: int | None = None

    def begin(self, tokens: int | None) -> None:
        """Prepare for the next tokens of all micro-batches, each behind `tokens` earlier ones; None: computed without caches."""
        self._calls.clear()
        self._tokens = tokens
        if not tokens:
            for each in self._caches:  # which a replay may still hold
                each.layers.clear()
            self._caches.clear()
        for each in self._caches:
            each.tokens = tokens

    def given(self, part: Any, model: Any) -> dict[str, Any]:
        """Return the keyword arguments of the forward of `model` in the next call of `part`."""
        if self._tokens is None:
            return {}
        number = self._calls[id(part)]
        self._calls[id(part)] += 1
        if number == len(self._caches):
            self._caches.append(_cache_class()(config=model.config))
            self._caches[-1].tokens = self._tokens
        return {_argument(model): self._caches[number], "use_cache": True}

    def filled(self, layer: int) -> bool:
        """Return whether decoder layer `layer` has left something of the first micro-batch in a place whose length `Past` knows.

        RecurrentGemma, for one, keeps states in its layers, where those of another micro-batch would replace them.
        """
        place = self._caches[0].layers[layer]
        states = [getattr(place, f"is_{name}_states_initialized", {}) for name in ("conv", "recurrent")]
        holds = getattr(place, "is_initialized", False) or any(True in each.values() for each in states)
        return holds and type(place).__module__ == "transformers.cache_utils"


def _argument(model: Any) -> str:
    """Return the name by which the forward of `model` takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
