"""The decoder as a list of layers: their names, their first weights, the factories that build them, and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.errors import ArgumentError
from pipeloom.models import mtp
from pipeloom.models.decoder import Block, FinalNorm, Head, OwnTokens
from pipeloom.models.gate import TopKGate
from pipeloom.models.moe import MoeClasses, SparseBlock
from pipeloom.models.moe_overlap import SparseBlockInBlocks
from pipeloom.ops.layer import Layer
from pipeloom.ops.random_state import set_sources, stable_seed
from pipeloom.parallel import vocabulary
from pipeloom.parallel.context import ContextParallel, share_tokens
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.sharding import ParameterSharding, shard_of, shardings_of
from pipeloom.parallel.tensor import TensorParallel, if_parallel
from pipeloom.parallel.vocabulary import VocabularyEmbedding, VocabularyShare
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.mesh import uneven_parts

EMBEDDING = "model.embed_tokens"
HEAD = "head"
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
HEAD_WEIGHT = f"{HEAD}.lm_head.weight"
PREDICTION_NORMS = f"{HEAD}.mtp_norms"
VOCABULARY_WEIGHTS = (
    HEAD_WEIGHT,
    EMBEDDING_WEIGHT,
)  # [vocabulary, hidden]; where they are tied a rank may list one only


def block_name(index: int) -> str:
    """The name of transformer block `index`."""
    return f"model.layers.{index}"


# Prefixes of names here -> in `transformers`. The decoder's last layer holds two modules, and the layers at the ends of a model
# of `transformers` (`models/hf`) hold everything outside of its decoder layers.
_HUB_PREFIXES = {f"{HEAD}.norm": "model.norm", f"{HEAD}.lm_head": "lm_head", "first.": "", "last.": ""}


def hub_name(name: str) -> str:
    """Return the name in `transformers` of the module or parameter with this name in a pipeline."""
    prefix = next((each for each in _HUB_PREFIXES if name.startswith(each)), "")
    return _HUB_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def own_name(name: str) -> str:
    """Return the inverse of `hub_name` for a parameter of the decoder."""
    return {"model.norm.weight": f"{HEAD}.norm.weight", "lm_head.weight": HEAD_WEIGHT}.get(name, name)


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter of `model` that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


# Elements of a block in fp32, 4 MB. A rank draws every block of which it holds an element and drops the rest of it: small
# blocks keep that little where a weight is cut along its rows. Another number changes the first weights of large matrices.
BLOCK = 2**20


@dataclass(frozen=True)
class InitSpec:
    """Distribution of first weights.

    Attributes:
        seed: of all of them.
        deviation: standard deviation of matrices.
        special: that of matrices whose module's name ends in one of these words (`o_proj`).
        same: global name -> the name under which it is drawn, for weights that start as copies of another.
        index: axis -> this rank's index, for weights of which it holds a part.
    """

    seed: int
    deviation: float
    special: Mapping[str, float]
    same: Mapping[str, str]
    index: Mapping[str, int]


@torch.no_grad()
def draw(module: nn.Module, layer: str, drawing: InitSpec) -> None:
    """Fills the parameters of `module`, which is called `layer`: matrices normal, biases 0, other vectors (norms) 1.

    A matrix is drawn on the CPU in fp32, in blocks of whole rows (of its last dimension) that follow from its whole shape and
    are seeded by (seed, name, block). Each is cut and converted at once, so that a rank never holds more than its own part and
    one block; layout, dtype and device change the rounding only.
    """
    layouts = shardings_of(module)
    for inner, parameter in module.named_parameters():
        if parameter.is_meta:  # of a layer that is built for its shapes
            continue
        if (bias := inner.rpartition(".")[2] == "bias") or parameter.ndim < 2:
            parameter.fill_(0.0 if bias else 1.0)
            continue
        name = f"{layer}.{inner}"
        deviation = drawing.special.get(name.split(".")[-2], drawing.deviation)
        _fill(parameter, layouts[inner], drawing.index, (drawing.seed, drawing.same.get(name, name)), deviation)


def _fill(
    parameter: Tensor, sharding: ParameterSharding, index: Mapping[str, int], source: tuple[int, str], deviation: float
) -> None:
    """Draw the part of a matrix that `parameter` is; `source`: seed and name."""
    *leading, width = sharding.full_shape(parameter.shape)
    row_cuts = ParameterSharding(tuple(shard for shard in sharding.shards if shard.dim < len(leading)))
    column_cut = ParameterSharding(
        tuple(replace(shard, dim=1) for shard in sharding.shards if shard.dim == len(leading))
    )
    numbers = torch.arange(math.prod(leading)).view(leading)
    rows = shard_of(numbers, row_cuts, index).flatten()  # which of the whole matrix's rows are here, ascending
    height, part = max(BLOCK // width, 1), parameter.view(rows.numel(), parameter.shape[-1])
    generator, buffer = torch.Generator(), torch.empty(min(height, numbers.numel()), width)
    for block in torch.unique(rows.div(height, rounding_mode="floor")).tolist():
        first = block * height
        generator.manual_seed(stable_seed(*source, block))
        drawn = buffer[: numbers.numel() - first].normal_(0, deviation, generator=generator)
        start, stop = torch.searchsorted(rows, torch.tensor([first, first + height])).tolist()
        drawn, inside = shard_of(drawn, column_cut, index), rows[start:stop] - first
        for at in torch.tensor_split(torch.arange(stop - start), torch.where(inside.diff() != 1)[0] + 1):
            if at.numel():  # a run of consecutive rows, copied without an index, which would hold another block
                part[start:stop][at[0] : at[-1] + 1].copy_(drawn[inside[at[0]] : inside[at[-1]] + 1])


@dataclass(frozen=True)
class VocabularyRanks:
    """The ranks over which an output layer is spread: all of a replica.

    Attributes:
        index: number of this rank.
        size: number of the ranks.
        label_smoothing: of the loss in training, which is part of the layer.
    """

    index: int
    size: int
    label_smoothing: float = 0.0

    def share(self, vocabulary: int, width: int, embeds: bool = False, padding: int | None = None) -> VocabularyShare:
        """Return the share of this rank of a weight [vocabulary, width], not drawn; arguments as of `VocabularyShare`."""
        parts = uneven_parts(vocabulary, self.size)
        return VocabularyShare(width, parts, self.index, self.label_smoothing, embeds, padding)


def layers(
    shape: DecoderShape,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tensor: TensorParallel | None = None,
    expert: ExpertParallel | None = None,
    classes: MoeClasses = MoeClasses(),
    drawn: bool = True,
    context: ContextParallel | None = None,
    spread: VocabularyRanks | None = None,
) -> list[Layer]:
    """The decoder as factories: [embedding, block, …, block, norm and output], num_hidden_layers + 2 of them.

    Between the last block and the output are num_nextn_predict_layers more that predict tokens further ahead (`models/mtp.py`).
    With `shape.tie_word_embeddings` give a pipeline `tied=tied(shape)` too, or the two weights only begin equal.

    Tokens [batch, length] int64 go in, logits [batch, length, vocab_size] come out. A weight's first value depends on
    `seed` and its global name alone: normal with deviation sqrt(2 / (5 hidden_size)), 0.02 at a width of 1000 (arXiv
    1910.05895). Projections back into the residual stream start smaller by sqrt(2 L), which keeps its variance
    independent of the depth (GPT-2).

    Args:
        tensor: spreads every layer over these ranks: the same parameter names, parts of the same first weights. Between
            layers then go whole activations, or with sequence parallelism [batch, length / tp, hidden]; each rank puts out
            the logits of its part of the vocabulary.
        expert: spreads the experts of a model that has some over these ranks, each of which has tokens of its own.
        classes: your own classes of experts and routers, for a model that has experts.
        drawn: False: weights are 0, for a model whose weights are loaded afterwards.
        context: spreads the tokens of each sequence over these ranks: tokens, activations and logits are then this rank's part
            (`ContextParallel.own_tokens`), and keyword arguments, such as `position_ids`, those of whole sequences. A `Pipeline`
            cuts the tokens, and sets what is None here to the ranks of its mesh.
        spread: the ranks over which the embedding and the output layer are spread. Each rank then builds its shares of both, or
            where they are tied of the one weight, as layers behind the norm; the first layer gets the tokens' rows, and the
            schedule has been through the transforms `vocabulary` and `embedding`.

    Raises ArgumentError for a shape that the decoder lacks; building a block, for numbers of heads or experts, or an inner
    width, that the ranks do not divide.
    """
    if shape.foreign:
        raise ArgumentError(
            "shape", f" has {', '.join(shape.foreign)}, which the decoder lacks; nearest: models.hf.layers"
        )
    deviation = math.sqrt(2 / (5 * shape.hidden_size))
    residual = deviation / math.sqrt(2 * shape.num_hidden_layers)
    same = {HEAD_WEIGHT: EMBEDDING_WEIGHT} if shape.tie_word_embeddings else {}
    cut = if_parallel(tensor)
    index = {
        "tp": cut.index if cut is not None else 0,
        "ep": expert.axis.index if expert is not None else 0,
        "pp_tp": spread.index if spread is not None else 0,
    }
    drawing = InitSpec(seed, deviation, {"o_proj": residual, "down_proj": residual}, same, index)
    in_blocks = expert is not None and expert.size > 1 and expert.blocks > 1
    sparse = SparseBlockInBlocks if in_blocks else SparseBlock
    blocks = [
        partial(sparse, shape, cut, expert, classes) if each else partial(Block, shape, cut)
        for each in shape.expert_blocks
    ]

    def layer(name: str, make: Callable[[], nn.Module], **names: Any) -> Layer:
        return Layer(name, partial(_built, name, make, dtype, device, drawing, drawn, context), **names)

    depths = range(1, shape.num_nextn_predict_layers + 1)
    predictions = [
        layer(
            block_name(shape.num_hidden_layers + depth - 1),
            lambda: mtp.PredictionBlock(shape, blocks[-1](), cut),
            reads={"embedding": mtp.embedding_name(depth)}
            | ({"hidden": mtp.hidden_name(depth - 1)} if depth > 1 else {}),
            writes={"hidden": mtp.hidden_name(depth)},
        )
        for depth in depths
    ]
    head = [
        layer(
            HEAD,
            partial(mtp.PredictionHead if predictions else Head, shape, cut),
            reads=tuple(map(mtp.hidden_name, depths)),
            losses=mtp.prediction_terms(shape, token_loss(shape, tensor=tensor)),
        )
    ]
    first = layer(EMBEDDING, partial(_embedding, shape, cut), writes=tuple(map(mtp.embedding_name, depths)))
    if spread is not None:
        share = partial(spread.share, shape.vocab_size, shape.hidden_size)
        first = layer("embedded", partial(OwnTokens, cut))
        head = [layer(HEAD, partial(FinalNorm, shape, cut)), layer(EMBEDDING, partial(share, embeds=True), spread=True)]
        head += [] if shape.tie_word_embeddings else [layer(f"{HEAD}.lm_head", share, spread=True)]
    return [first, *(layer(block_name(index), block) for index, block in enumerate(blocks)), *predictions, *head]


def _built(
    name: str,
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
    device: torch.device | str,
    drawing: InitSpec,
    drawn: bool,
    context: ContextParallel | None,
) -> nn.Module:
    with torch.device("meta"):
        module = make()
    module = module.to(dtype).to_empty(device=device)
    if drawn:
        draw(module, name, drawing)
    for parameter in module.parameters() if not drawn else ():
        nn.init.zeros_(parameter)
    set_sources(module, drawing.seed, name)
    share_tokens(module, context)
    for part in module.modules():
        if isinstance(part, TopKGate):
            part.reset_bias()
    return module


def _embedding(shape: DecoderShape, tensor: TensorParallel | None) -> nn.Module:
    depth = shape.num_nextn_predict_layers
    embedding: Any
    if tensor is not None:
        cut = mtp.VocabularyEmbeddingAhead if depth else VocabularyEmbedding
        embedding = cut(shape.vocab_size, shape.hidden_size, tensor)
    else:
        # torch's own first values would be drawn on the meta device, which imports its compiler: seconds a process
        weight = torch.empty(shape.vocab_size, shape.hidden_size)
        whole = mtp.EmbeddingAhead if depth else nn.Embedding
        embedding = whole.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    if depth:
        embedding.depth = depth
    module: nn.Module = embedding
    return module


def tied(shape: DecoderShape) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that are one weight."""
    return ((EMBEDDING_WEIGHT, HEAD_WEIGHT),) if shape.tie_word_embeddings else ()


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, count: Tensor | None = None) -> Tensor:
    """The mean over all targets of -log p(target), in nats: 0-dim, fp32 (fp64 for fp64 logits).

    Args:
        logits: [batch, length, vocabulary].
        targets: [batch, length], int64.
        label_smoothing: the share of each target that is spread over the whole vocabulary.
        count: what the sum over the targets is divided by; None: the number of them.
    """
    wide = logits.flatten(0, -2)
    wide = wide if wide.dtype.itemsize == 8 else wide.float()
    if count is None:
        return F.cross_entropy(wide, targets.flatten(), label_smoothing=label_smoothing)
    return F.cross_entropy(wide, targets.flatten(), label_smoothing=label_smoothing, reduction="sum") / count


def token_loss(
    shape: DecoderShape, label_smoothing: float = 0.0, tensor: TensorParallel | None = None
) -> Callable[..., Tensor]:
    """`cross_entropy` of what the decoder's last layer puts out: under `tensor`, each rank's part of the logits."""
    cut = if_parallel(tensor)
    if cut is None:
        return partial(cross_entropy, label_smoothing=label_smoothing)
    return partial(vocabulary.cross_entropy, tensor=cut, vocabulary=shape.vocab_size, label_smoothing=label_smoothing)
