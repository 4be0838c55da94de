"""Causal language models of Hugging Face `transformers` as lists of layers, without a rewrite and without code per family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeloom.models.hf.cut import Cut, cut
from pipeloom.models.hf.library import RANGE, causal_model, read_config, transformers
from pipeloom.models.hf.sizes import counted_shape, parameters_by_layer
from pipeloom.models.layers import VocabularyRanks, hub_name
from pipeloom.ops.layer import Layer
from pipeloom.parallel.context import ContextParallel
from pipeloom.runtime.stage_modules import LOOKED_UP
from pipeloom.shapes.hub import count_with

__all__ = ["RANGE", "ModelLayers", "hub_name", "layers"]

count_with(counted_shape)


class ModelLayers(list[Layer]):
    """A model's layers for `Pipeline`: the part before the decoder layers, each of them, and the part after them.

    Attributes:
        tied: groups of names of parameters that share one weight; pass them to the pipeline as `tied`.
        cut: how the model was cut.
    """

    def __init__(self, cut: Cut) -> None:
        shares = cut.share_names
        sizes = [*map(sum, parameters_by_layer(cut))]
        tables = (module.weight for module in cut.model.modules() if isinstance(module, LOOKED_UP))
        sizes[0] = max(0, sizes[0] - sum(table.numel() for table in tables))
        super().__init__(
            Layer(name, cut.builder(name), spread=name in shares, cost=0 if shares else 1 + size)
            for name, size in zip(cut.layer_names, sizes, strict=True)
        )
        self.cut = cut
        self.tied = cut.tied()

    @property
    def config(self) -> Any:
        """The model's configuration, as `transformers` keeps it."""
        return self.cut.config


def layers(
    source: Any,
    *,
    dtype: Any = None,
    context: ContextParallel | None = None,
    slices: bool = False,
    spread: VocabularyRanks | None = None,
) -> ModelLayers:
    """Cut a causal language model into layers, one per decoder layer and one for each end.

    Token numbers [batch, length] go in, logits [batch, length, vocabulary] come out. `attention_mask` and `position_ids`
    [batch, length] are keyword arguments of the pipeline's methods. Parameters keep their names of `transformers`, with
    the prefix `first.` or `last.` in the two layers at the ends (`hub_name` removes it).

    Args:
        source: a configuration: every rank builds its own layers, with initial weights drawn by the family's own rules. A
            directory with `config.json` and safetensors: every rank reads its own layers' weights. A model: its weights
            are used in place, not copied.
        dtype: of the parameters; None: that of the configuration, else float32.
        context: spreads the tokens of sequences over these ranks: tokens and logits are this rank's part of them, `position_ids`
            those of whole sequences.
        slices: whether schedules may cut the sequences into slices.
        spread: the ranks over which the embedding and the output layer are spread. Each rank then builds its shares of both, or
            where they are tied of the one weight, as layers behind the last one; the first layer gets the tokens' rows, and the
            schedule has been through the transforms `vocabulary` and `embedding`.

    Raises:
        ConfigError: a model that cannot be cut, with the reason; a missing or unsupported `transformers`.
    """
    folder = Path(source) if isinstance(source, str | Path) else None
    if not isinstance(source, transformers().PreTrainedModel):
        source = causal_model(source if folder is None else read_config(folder), dtype)
    return ModelLayers(cut(source, folder, context, slices, spread))
