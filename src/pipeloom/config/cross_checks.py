"""What must hold between keys. A check says which keys it reads, and is left out when one of those is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeloom.config.expert_checks import router_problems, spread_problems
from pipeloom.config.sections import COMPUTED, Config

Check = Callable[[Config], Iterator[str]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


def _reads(*keys: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check

    return register


def cross_problems(config: Config, wrong: Collection[str] = ()) -> list[str]:
    """A sentence for each contradiction between keys; checks that read one of the `wrong` keys are skipped."""
    return [
        sentence
        for keys, check in _CHECKS
        if not any(key in wrong or key.partition(".")[0] in wrong for key in keys)
        for sentence in check(config)
    ]


@_reads("model.hidden_size", "model.num_attention_heads")
def _heads_divide(config: Config) -> Iterator[str]:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    valid = [n for n in range(1, hidden + 1) if hidden % n == 0 and hidden // n % 2 == 0]
    if heads not in valid:
        rest = (
            f"leaves {hidden % heads}"
            if hidden % heads
            else "leaves heads of odd width, which rotary positions cannot turn"
        )
        yield (
            f"model.num_attention_heads = {heads}: model.hidden_size {hidden} divided by it {rest}; "
            f"{_nearest(heads, valid) if valid else 'make the hidden size even'}"
        )


@_reads("model.num_attention_heads", "model.num_key_value_heads")
def _groups_divide(config: Config) -> Iterator[str]:
    heads, key_value = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads % key_value:
        yield (
            f"model.num_key_value_heads = {key_value}: it must divide model.num_attention_heads {heads}; "
            f"{_nearest(key_value, [n for n in range(1, heads + 1) if heads % n == 0])}"
        )


@_reads("model.vocab_size", "data.tokenizer")
def _vocabulary_holds_bytes(config: Config) -> Iterator[str]:
    if config.data.tokenizer == "bytes" and config.model.vocab_size < 256:
        yield f"model.vocab_size = {config.model.vocab_size}: the byte tokenizer has 256 tokens; nearest: 256"


@_reads("parallel")
def _one_axis_is_computed(config: Config) -> Iterator[str]:
    """Those that could be computed are numbers by now."""
    open_axes = [axis for axis in ("pp", "dp", "tp") if getattr(config.parallel, axis) == COMPUTED]
    if len(open_axes) > 1:
        both = " and ".join(f"parallel.{axis} = -1" for axis in open_axes)
        yield f"{both}: only one axis can be computed; give numbers for the others"
    elif open_axes:
        yield (
            f"parallel.{open_axes[0]} = -1: it is computed from the number of workers, which torchrun decides; without "
            f"torchrun give a number"
        )


@_reads("parallel.tp", "model")
def _tensor_parallel_divides(config: Config) -> Iterator[str]:
    tp, model = config.parallel.tp, config.model
    inner = "moe_intermediate_size" if model.num_experts and model.moe_intermediate_size else "intermediate_size"
    cut = ("num_attention_heads", "num_key_value_heads", inner)
    uneven = [f"model.{key} {getattr(model, key)}" for key in cut if tp > 1 and getattr(model, key) % tp]
    if uneven:
        widths = [getattr(model, key) for key in cut]
        valid = [n for n in range(1, min(widths) + 1) if not any(width % n for width in widths)]
        yield f"parallel.tp = {tp}: it must divide {' and '.join(uneven)}; {_nearest(tp, valid)}"


@_reads("parallel.sp", "parallel.tp", "train.seq_len")
def _sequence_parallel_fits(config: Config) -> Iterator[str]:
    tp, length = config.parallel.tp, config.train.seq_len
    if config.parallel.sp and tp == 1:
        yield "parallel.sp = true: it spreads tokens over the tensor-parallel ranks; set parallel.tp to 2 or more"
    elif config.parallel.sp and tp > 1 and length % tp:
        below = length // tp * tp
        nearest = f"{below} or {below + tp}" if below else str(tp)
        yield f"train.seq_len = {length}: parallel.tp {tp} must divide it under parallel.sp; nearest: {nearest}"


@_reads("parallel.ep", "parallel.dp")
def _experts_divide(config: Config) -> Iterator[str]:
    ep, dp = config.parallel.ep, config.parallel.dp
    if dp >= 1 and dp % ep:
        valid = [n for n in range(1, dp + 1) if dp % n == 0]
        yield f"parallel.ep = {ep}: it must divide parallel.dp {dp}; {_nearest(ep, valid)}"


@_reads("model")
def _router_can_choose(config: Config) -> Iterator[str]:
    yield from router_problems(config)


@_reads("model", "parallel")
def _experts_spread(config: Config) -> Iterator[str]:
    yield from spread_problems(config)


@_reads("train.recompute", "model.num_hidden_layers")
def _recomputed_blocks_exist(config: Config) -> Iterator[str]:
    chosen, blocks = config.train.recompute, config.model.num_hidden_layers
    wrong = [number for number in chosen if number >= blocks] if isinstance(chosen, tuple) else []
    if wrong:
        yield f"train.recompute = {list(chosen)}: there is no block {wrong[0]}; the model has {blocks} (0..{blocks - 1})"


@_reads("schedule.head_deferral", "schedule.microbatches")
def _deferral_is_within_the_step(config: Config) -> Iterator[str]:
    limit, m = config.schedule.head_deferral, config.schedule.microbatches
    if limit is not None and limit > m:
        yield f"schedule.head_deferral = {limit}: a step has {m} micro-batches; use at most {m}, or 0 for all"


@_reads("train.global_batch_size", "parallel.dp", "schedule.microbatches")
def _batch_is_large_enough(config: Config) -> Iterator[str]:
    batch, dp, m = config.train.global_batch_size, config.parallel.dp, config.schedule.microbatches
    if dp == COMPUTED:
        return
    if batch < dp * m:
        yield (
            f"train.global_batch_size = {batch}: {m} micro-batches on {dp} data-parallel replica{'s' * (dp > 1)} need "
            f"at least "
            f"{dp * m} sequences; set it to {dp * m}"
            + (f", or schedule.microbatches to {batch // dp}" if batch >= dp else "")
        )
    elif batch % dp:
        valid = [n * dp for n in range(m, batch // dp + 2)]
        yield f"train.global_batch_size = {batch}: parallel.dp {dp} must divide it; {_nearest(batch, valid)}"


@_reads("optimizer.lr", "optimizer.min_lr")
def _rates_fall(config: Config) -> Iterator[str]:
    lr, low = config.optimizer.lr, config.optimizer.min_lr
    if low > lr:
        yield f"optimizer.min_lr = {low}: it must not be above optimizer.lr {lr}; nearest: {lr}"


@_reads("optimizer.zero1", "optimizer.barrier")
def _slices_need_the_barrier(config: Config) -> Iterator[str]:
    if config.optimizer.zero1 and not config.optimizer.barrier:
        yield (
            "optimizer.zero1 = true: replicas gather what each has stepped, which is a barrier; set optimizer.barrier = true"
        )


@_reads("data.source")
def _source_exists(config: Config) -> Iterator[str]:
    source = config.data.source
    if source != "stdlib" and not Path(source).expanduser().exists():
        yield f'data.source = "{source}": there is no such file or folder; "stdlib" is Python\'s own source'


@_reads("log.dir")
def _log_is_folder(config: Config) -> Iterator[str]:
    path = Path(config.log.dir).expanduser()
    if path.exists() and not path.is_dir():
        yield f'log.dir = "{config.log.dir}": it is a file, not a folder'


def _nearest(value: int, valid: list[int]) -> str:
    below = [n for n in valid if n < value][-1:]
    above = [n for n in valid if n > value][:1]
    return "nearest: " + " or ".join(map(str, below + above))
