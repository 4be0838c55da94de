"""Names of layers and parameters."""

from __future__ import annotations

EMBEDDING = "model.embed_tokens"
HEAD = "head"
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
HEAD_WEIGHT = f"{HEAD}.lm_head.weight"
VOCABULARY_WEIGHTS = (
    HEAD_WEIGHT,
    EMBEDDING_WEIGHT,
)  # [vocabulary, hidden]; where they are tied a rank may list one only


def block(index: int) -> str:
    """The name of transformer block `index`."""
    return f"model.layers.{index}"


def hub_name(name: str) -> str:
    """The Hugging Face name of the parameter that is called `name` here.

    They differ in the last layer only, which holds two of Hugging Face's: `model.norm` and `lm_head`.
    """
    return {f"{HEAD}.norm.weight": "model.norm.weight", HEAD_WEIGHT: "lm_head.weight"}.get(name, name)


def own_name(name: str) -> str:
    """The inverse of `hub_name`."""
    return {"model.norm.weight": f"{HEAD}.norm.weight", "lm_head.weight": HEAD_WEIGHT}.get(name, name)
