"""A layout: how a model, a batch and a schedule are spread over devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from pipeloom.errors import UsageError, did_you_mean, divisors
from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.families import FAMILIES, build, canonical_name
from pipeloom.schedule.slices import balanced_cuts
from pipeloom.schedule.vocabulary import with_shares
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.ops import OFFLOADED, PARTS
from pipeloom.shapes.rules import broken

RECOMPUTE = ("none", "full", *PARTS)
CUTS = ("balanced", "even")
VOCABULARY = ("last", "pp")
GRAD_BYTES = {"fp32": 4, "bf16": 2}
# Families that the search tries, and their numbers of chunks; those of which it tries multiples of the ranks in micro-batches.
CHUNKS = {"1f1b": (1,), "zb-h1": (1,), "interleaved": tuple(range(2, 9)), "zbv": (2,)}
CHUNKS |= {"1f1b-overlap": (1,), "interleaved-overlap": CHUNKS["interleaved"], "dualpipev": (2,)}
WHOLE_ROUNDS = ("interleaved", "interleaved-overlap")


@dataclass(frozen=True)
class PlannedLayout:
    """Axes of parallelism, the schedule, and what is kept in memory. `world` devices; tp is the fastest axis, then cp, dp, pp.

    Attributes:
        dp, tp, cp, pp: sizes of the axes.
        ep: ranks over which the experts are spread, a divisor of dp x cp x tp / etp.
        etp: ranks of tp that divide each expert: tp (or 0), or 1, where each expert is whole on one rank.
        v: chunks of a pipeline rank.
        m: micro-batches of one replica.
        micro_batch: sequences of a micro-batch.
        seq: tokens of a sequence.
        zero: 0: every replica holds everything; 1: the optimizer's state is sharded over dp x cp; 2: gradients too; 3: all.
        recompute: "none", "full", or parts of a block joined by "+".
        schedule: name of a family.
        capacity: capacity factor of the experts; 0: rows as routed, evenly.
        cut: "balanced" or "": the heaviest stage is as light as possible; "even": as many blocks on each stage.
        slices: of each sequence along its tokens, cut so that they take the same time.
        vocabulary: "last": the embedding and the output layer are on the first and the last stage; "pp": each pipeline rank has a
            share of them.
        grads: "fp32" or "bf16", in which gradients are summed and reduced.
        offload: modules whose inputs are copied to host memory, joined by "+", in Megatron's words; "none": none.
        group: micro-batches that interleaving takes through a chunk before the next, from pp to m; 0: as the family divides them.
        stages: layers of each stage by position, the embedding and the output layer among them; empty: as `cut` says.
        recompute_layers: blocks of each stage that are recomputed, from its first; 0: all.
        ep_chunks: parts of a micro-batch's tokens, whose exchanges with experts run beside the experts of other parts.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    v: int = 1
    m: int = 1
    micro_batch: int = 1
    seq: int = 4096
    zero: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    capacity: float = 0.0
    etp: int = 0
    cut: str = ""
    slices: int = 1
    vocabulary: str = "last"
    grads: str = "fp32"
    offload: str = "none"
    group: int = 0
    stages: tuple[int, ...] = ()
    recompute_layers: int = 0
    ep_chunks: int = 1

    @property
    def world(self) -> int:
        """The number of devices."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline rank that hold different experts or copies of them."""
        return self.dp * self.cp * (self.tp if self.etp == 1 else 1)

    @property
    def expert_replicas(self) -> int:
        """Copies of each expert."""
        return max(1, self.expert_ranks // self.ep)

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.m * self.micro_batch * self.dp

    @property
    def slice_multiple(self) -> int:
        """Tokens of which every slice has a multiple: ranks of cp take mirrored pieces, those of tp equal parts of these."""
        return 2 * self.cp * self.tp if self.cp * self.tp > 1 else 1

    def recomputed_share(self, blocks: int, stages: int) -> float:
        """The share of the model's blocks that are recomputed, where `recompute_layers` of each stage are."""
        return min(1.0, self.recompute_layers * stages / blocks)

    def built(self, placed: Costs | None = None) -> Schedule:
        """The schedule, with S and T placed by these costs. Raises UsageError when the family refuses these sizes."""
        options = {"slices": self.slices} | ({"group_size": self.group} if self.group else {})
        schedule = build(self.schedule, self.pp, self.m, self.v if self.v > 1 else None, options)
        return with_shares(schedule, placed) if self.vocabulary == "pp" else schedule

    def text(self) -> str:
        """The layout as `parse` reads it; keys at their default are left out, but for the axes in use."""
        default = PlannedLayout(schedule="interleaved" if self.v > 1 else "1f1b")
        values = {
            key: value for key, value in asdict(self).items() if value != getattr(default, key) and key != "stages"
        }
        return ",".join(f"{key}={value}" for key, value in values.items()) or "dp=1"


def values_of(text: str, option: str) -> dict[str, int | float | str]:
    """Field -> value in `"tp=2,pp=2,schedule=1f1b"`.

    Raises UsageError that names the key and the value, with the nearest valid one; `option` is what gave the text.
    """
    kinds = {spec.name: spec.type for spec in fields(PlannedLayout) if spec.name != "stages"}
    values: dict[str, int | float | str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in item.partition("="))
        key = key.replace("-", "_")
        if key not in kinds:
            raise UsageError(f"{option}: there is no key {key!r:.100}{did_you_mean(key, kinds)}")
        if not equals or not value:
            raise UsageError(f"{option}: {key} has no value; write {key}=…")
        if key in values:
            raise UsageError(f"{option}: {key} is given twice, as {values[key]} and {value:.100}; give it once")
        values[key] = value if kinds[key] == "str" else _number(key, value, kinds[key] == "float", option)
    choices = (
        *(("cut", CUTS), ("recompute", RECOMPUTE), ("vocabulary", VOCABULARY), ("grads", tuple(GRAD_BYTES))),
        ("offload", ("none", *OFFLOADED)),
    )
    for key, known in choices:
        for part in str(values.get(key, known[0])).split("+"):
            if part not in known or (part in ("none", "full") and part != values.get(key, part)):
                raise UsageError(f"{option}: {key}={values[key]!r:.100} is not known{did_you_mean(part, known)}")
    return values


def _number(key: str, text: str, real: bool, option: str) -> int | float:
    try:
        number = float(text) if real else int(text)
    except ValueError:
        raise UsageError(f"{option}: {key}={text!r:.100} is not a number; nearest: {key}=1") from None
    least, most = (
        0 if key in ("zero", "capacity", "etp", "group", "recompute_layers") else 1,
        3 if key == "zero" else 10**6,
    )
    if not least <= number <= most:
        nearest = most if number > most else least
        raise UsageError(f"{option}: {key}={text:.100} is outside {least} to {most}; nearest: {key}={nearest:g}")
    return number


def parse(text: str, base: PlannedLayout = PlannedLayout()) -> PlannedLayout:
    """The layout that `values_of` describes; what the text leaves out is as in `base`, and several chunks are interleaved."""
    values = values_of(text, "--layout")
    if values.get("v", 1) != 1:
        values = {"schedule": "interleaved", **values}
    return replace(base, **values)  # type: ignore[arg-type]


def even_stages(blocks: int, positions: int, ahead: int = 0) -> tuple[int, ...]:
    """Layers of each stage with as many blocks on each, the first ones one more; the last has what predicts further ahead."""
    fewest, more = divmod(blocks, positions)
    ends = {0: 1, positions - 1: 1 + ahead} if positions > 1 else {0: 2 + ahead}
    return tuple(fewest + (at < more) + ends.get(at, 0) for at in range(positions))


def problems(shape: DecoderShape, layout: PlannedLayout) -> list[str]:
    """Return a sentence for each thing that makes the layout impossible for the model."""
    reasons = []

    def divides(key: str, size: int, total: int, what: str) -> None:
        if total % size:
            nearest = max(each for each in divisors(total) if each < size)
            reasons.append(f"{key}={size} does not divide the {total} {what}; nearest: {key}={nearest}")

    divides("tp", layout.tp, shape.num_attention_heads, "attention heads")
    if not shape.kv_lora_rank:
        divides("tp", layout.tp, shape.num_key_value_heads, "key and value heads")
    divides("tp", layout.tp, shape.intermediate_size, "elements of the feed-forward width")
    if layout.etp not in (0, 1, layout.tp):
        reasons.append(f"etp={layout.etp} is neither 1 nor tp; nearest: etp=1")
    if layout.expert_ranks % layout.ep and not layout.dp * layout.cp * layout.tp % layout.ep:
        reasons.append(
            f"ep={layout.ep} does not divide the ranks of dp x cp; nearest: etp=1, with which those of tp count too"
        )
    else:
        divides("ep", layout.ep, layout.expert_ranks, "ranks of dp x cp x tp / etp")
    if layout.ep > 1 and shape.num_experts:
        divides("ep", layout.ep, shape.num_experts, "experts")
    if layout.cp > 1 and layout.seq % (2 * layout.cp):  # a rank takes two mirrored pieces
        fitting = [each for each in divisors(layout.seq) if each < layout.cp and layout.seq % (2 * each) == 0]
        reasons.append(
            f"cp={layout.cp}: twice as many pieces do not divide the {layout.seq} tokens of a sequence; "
            f"nearest: cp={max(fitting, default=1)}"
        )
    if layout.slices > 1:
        try:
            balanced_cuts(layout.seq, layout.slices, multiple=layout.slice_multiple)
        except UsageError as error:
            reasons.append(f"slices={layout.slices}: {error}")
    features = {
        "ep": layout.ep if layout.ep > 1 else 0,
        "ep_chunks": layout.ep_chunks if layout.ep_chunks > 1 else 0,
        "dense model": not shape.num_experts,
        "capacity_factor": layout.capacity,
        "cut": layout.slices > 1,
        "vocabulary": layout.vocabulary if layout.vocabulary == "pp" else "",
        "one pipeline rank": layout.pp == 1,
        "num_nextn_predict_layers": shape.num_nextn_predict_layers,
    }
    used = {name: value for name, value in features.items() if value}
    reasons += [f"{name.removesuffix('_factor')}={used[name]}: {reason}" for name, reason in broken(used)]
    if layout.pp * layout.v > shape.num_hidden_layers and not layout.stages:
        chunks = shape.num_hidden_layers // layout.pp
        nearest = f"v={chunks}" if chunks else f"pp={shape.num_hidden_layers}"
        reasons.append(
            f"pp={layout.pp} times v={layout.v} is more than the {shape.num_hidden_layers} blocks; nearest: {nearest}"
        )
    if layout.group and canonical_name(layout.schedule) in FAMILIES.keys() - {*WHOLE_ROUNDS, "interleaved-zb", "gis"}:
        reasons.append(f"group={layout.group}: {layout.schedule} takes no groups of micro-batches; nearest: group=0")
    return reasons
