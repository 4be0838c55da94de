"""The layers of a model as stages hold them: their sizes, a balanced cut, and the stages string.

`"Et*3|(tt|)*29|mL"` says which layers each stage holds: E is the embedding, t a block, m one that predicts tokens further ahead,
L the final norm and output layer; `|` separates stages; `x*3` repeats a letter and `(…)*n` a group, including its `|`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from pipeloom.config.sections import ModelSection
from pipeloom.errors import UsageError
from pipeloom.limits import MOST_LAYERS

_REPEATED_LETTER = re.compile(r"([EtL|])\*(\d{1,9})")
_REPEATED_GROUP = re.compile(r"\(([EtL|]*)\)(?:\*(\d{1,9}))?")
_MARKS = 1_000  # most repetitions in a text, so that nested ones are soon expanded
_MOST_LETTERS = 2 * MOST_LAYERS  # letters of the text written out: layers, and as many ends of stages


@dataclass(frozen=True)
class LayerSize:
    """One layer of the model.

    Attributes:
        letter: E embedding, t block, m block that predicts tokens further ahead, L final norm and output layer.
        parameters: parameters of the layer, with all its experts (a tied output layer counts its copy).
        flops: floating-point operations of the forward and backward of one sequence, with only the experts that a token uses.
        experts: the part of `parameters` that expert parallelism spreads.
        depth: of an m, from 1.
    """

    letter: str
    parameters: int
    flops: int
    experts: int = 0
    depth: int = 0


def layer_sizes(model: ModelSection, seq_len: int) -> list[LayerSize]:
    """[embedding, block, …, block, output layer]: 2 entries more than there are blocks.

    A matrix of n weights takes 2n operations per token forward and 4n backward (a product for each of two gradients).
    Causal attention with queries of width q (all heads) takes 2 s q forward per token of a sequence of s: two products of 2 s q,
    of which the mask leaves half. Biases count as parameters, but not as operations.
    The embedding is a look-up in the forward, and one addition per weight of the row in the backward. A block that predicts
    tokens further ahead is one like the last, behind a matrix of [2 h, h]; the output layer runs once for each of them too.
    """
    h, vocab = model.hidden_size, model.vocab_size
    queries, key_value = (model.head_width * n for n in (model.num_attention_heads, model.num_key_value_heads))
    attention = 2 * h * queries + 2 * h * key_value
    biases = (queries + 2 * key_value) * (model.qkv_bias or model.attention_bias) + h * model.attention_bias
    norms = 2 * h + 2 * model.head_width * model.qk_norm

    def block(experts: bool) -> LayerSize:
        spread, common, used = _feed_forward(model, experts)
        flops = 3 * seq_len * (2 * (attention + used) + 2 * seq_len * queries)
        return LayerSize("t", attention + biases + common + spread + norms, flops, spread)

    dense, sparse = block(False), block(True)
    depths = model.num_nextn_predict_layers
    embedding = LayerSize("E", vocab * h, (1 + depths) * seq_len * h)
    output = LayerSize("L", vocab * h + (1 + depths) * h, (1 + depths) * 3 * seq_len * 2 * vocab * h)
    blocks = [sparse if experts else dense for experts in model.expert_blocks]
    joint = LayerSize("m", 2 * h * h + 2 * h, 3 * seq_len * 2 * 2 * h * h)
    last = blocks[-1]
    predictions = [
        LayerSize("m", last.parameters + joint.parameters, last.flops + joint.flops, last.experts, depth)
        for depth in range(1, depths + 1)
    ]
    return [embedding, *blocks, *predictions, output]


def _feed_forward(model: ModelSection, experts: bool) -> tuple[int, int, int]:
    """Weights of a block's feed-forward part: (of experts, the others, those that one token uses)."""
    h = model.hidden_size
    if not experts:
        return 0, 3 * h * model.intermediate_size, 3 * h * model.intermediate_size
    expert = 3 * h * model.expert_width
    common = model.num_experts * h * (2 if model.router == "noisy" else 1)
    if model.num_shared_experts:
        common += model.num_shared_experts * expert + h
    return model.num_experts * expert, common, common + model.num_experts_per_tok * expert


def parameter_count(model: ModelSection) -> int:
    """Parameters of the whole model; a tied weight counts once."""
    total = sum(size.parameters for size in layer_sizes(model, 1))
    return total - model.vocab_size * model.hidden_size if model.tie_word_embeddings else total


def held_parameters(model: ModelSection, replicas: int, ep: int) -> int:
    """Parameters that all ranks together hold: `replicas` copies of every weight, but `replicas` / `ep` of the experts'."""
    experts = sum(size.experts for size in layer_sizes(model, 1))
    return (parameter_count(model) - experts) * replicas + experts * replicas // ep


def training_flops(model: ModelSection, seq_len: int, sequences: int) -> int:
    """Floating-point operations of the forward and backward of `sequences` sequences."""
    return sequences * sum(size.flops for size in layer_sizes(model, seq_len))


def attention_share(model: ModelSection, seq_len: int) -> float:
    """Return the share of the blocks' operations that causal attention takes in sequences of this length; of `layer_sizes`."""
    once, twice = (
        sum(size.flops for size in layer_sizes(model, length) if size.letter == "t")
        for length in (seq_len, 2 * seq_len)
    )
    return (twice / 2 - once) / once  # all but attention is twice as much in a sequence of twice the length


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """The number of layers of each stage: sums to len(costs), each at least 1.

    Of all contiguous cuts, those whose largest stage costs least are preferred; among these, those with the smallest sum of
    squared costs; and among these, the one with larger first stages. For L layers and S stages the time is O(L log S) where
    all layers but the first and the last cost the same, as a model's blocks do, and O(S L^2) otherwise.

    Raises ValueError unless 1 <= stages <= len(costs).
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers do not make {stages} stages")
    before = [0, *accumulate(costs)]
    if stages > 1 and len(set(costs[1:-1])) <= 1:
        return _of_equal_blocks(costs, stages)
    limit = _smallest_largest(before, stages)
    never = sum(costs) ** 2 + 1
    # furthest[k]: the most layers that the first k stages hold; those from nearest[k] on fit into the last k
    furthest = _ends(before, stages, limit)
    nearest = [count - end for end in _ends([before[-1] - each for each in reversed(before)], stages, limit)]
    # least[k][i]: the least sum of squares of the layers from i on, in k stages, none above the limit
    least = [[never] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    least[0][count] = 0
    for k in range(1, stages + 1):
        for i in range(max(nearest[k], stages - k), min(furthest[stages - k], count - k) + 1):
            for j in range(max(i + 1, nearest[k - 1]), count - k + 2):
                cost = before[j] - before[i]
                if cost > limit:
                    break
                total = cost * cost + least[k - 1][j]
                if total <= least[k][i] and least[k - 1][j] < never:
                    least[k][i], cut[k][i] = total, j
    sizes, start = [], 0
    for k in range(stages, 0, -1):
        sizes.append(cut[k][start] - start)
        start = cut[k][start]
    return sizes


def _of_equal_blocks(costs: Sequence[int], stages: int) -> list[int]:
    """Return the result of `balance` where all layers between the first and the last cost the same.

    Each of them is assigned to the cheapest stage so far, the first of several. The costs of all other cuts majorize the
    resulting ones, so every convex measure of them is smallest.
    """
    sizes = [1] * stages
    block = costs[1] if len(costs) > 2 else 0
    loads = [(block if 0 < at < stages - 1 else costs[-1 if at else 0], at) for at in range(stages)]
    heapify(loads)
    for _ in range(len(costs) - stages):
        load, at = loads[0]
        sizes[at] += 1
        heapreplace(loads, (load + block, at))
    return sizes


def _smallest_largest(before: Sequence[int], stages: int) -> int:
    """Return the least possible cost of the largest stage; `before[i]` is the cost of the first i layers."""
    low, high = max(b - a for a, b in pairwise(before)), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _ends(before, stages, middle)[-1] == len(before) - 1 else (middle + 1, high)
    return low


def _ends(before: Sequence[int], stages: int, limit: int) -> list[int]:
    """Return number of stages, from 0 on -> the most layers that so many first stages hold, none of them above the limit."""
    ends = [0]
    for _ in range(stages):
        ends.append(bisect_right(before, before[ends[-1]] + limit) - 1)
    return ends


def parse_stages(text: str, blocks: int, stages: int, depths: int = 0) -> list[int]:
    """The number of layers of each stage in `text`, for a model of `blocks` blocks cut into `stages` stages.

    `depths` of blocks that predict tokens further ahead follow the others.

    A `|` at the end closes the last stage; `||` asks for a stage without layers. Raises UsageError for other
    characters, wrong counts, and layers out of order.
    """
    letters = expand(text)
    parts = letters.removesuffix("|").split("|")
    counts = {letter: letters.count(letter) for letter in "EtmL"}
    if counts["m"] != depths:
        raise UsageError(
            f"it holds {counts['m']} blocks for multi-token prediction (m), but model.num_nextn_predict_layers is {depths}"
        )
    if counts["t"] != blocks:
        raise UsageError(f"it holds {counts['t']} blocks (t), but model.num_hidden_layers is {blocks}")
    for letter, what in (("E", "embedding"), ("L", "output layer")):
        if counts[letter] != 1:
            raise UsageError(f"it must hold the {what} ({letter}) once; it holds it {counts[letter]} times")
    order = letters.replace("|", "")
    if order != "E" + "t" * blocks + "m" * depths + "L":
        raise UsageError("its layers must be E, then every t, then every m, then L")
    if len(parts) != stages:
        empty = f" ({parts.count('')} of them empty: `||`)" if "" in parts else ""
        raise UsageError(
            f"it makes {len(parts)} stages{empty}, but the schedule has {stages} (parallel.pp times schedule.chunks)"
        )
    if not parts[0] or not parts[-1]:
        raise UsageError("its first stage must hold E and its last one L")
    return [len(part) for part in parts]


def expand(text: str) -> str:
    """`text` with its repetitions written out, without spaces, commas and backslashes.

    Raises UsageError for other characters, an incomplete repetition, and a text that is too long.
    """
    plain = re.sub(r"[\s,\\]", "", text)
    wrong = re.search(r"[^EtmL|()*\d]", plain)
    if wrong:
        raise UsageError(f"{wrong[0]!r:.200} is not a layer code; stages are written with E, t, m, L, |, *n and (…)*n")
    if plain.count("*") + plain.count("(") > _MARKS or len(plain) > _MOST_LETTERS:
        raise UsageError(f"it holds more than {_MARKS:,} repetitions, or {_MOST_LETTERS:,} letters")
    while True:
        plain, letters = _REPEATED_LETTER.subn(lambda match: _repeat(match[1], match[2]), plain)
        plain, groups = _REPEATED_GROUP.subn(lambda match: _repeat(match[1], match[2]), plain)
        if len(plain) > _MOST_LETTERS:
            raise UsageError(f"it stands for more than {_MOST_LETTERS:,} letters")
        if not letters and not groups:
            break
    wrong = re.search(r"[^EtmL|]", plain)
    if wrong:
        raise UsageError(f"{wrong[0]!r:.200} has no partner; repetitions are written t*3 and (tt|)*3")
    return plain


def _repeat(what: str, times: str | None) -> str:
    count = int(times) if times is not None else 1
    if len(what) * count > _MOST_LETTERS:
        raise UsageError(f"({what:.200})*{count} is longer than {_MOST_LETTERS:,} letters")
    return what * count
