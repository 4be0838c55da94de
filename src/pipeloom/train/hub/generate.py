"""Generation of text with a model: sampling through a pipeline, and the model of a checkpoint, a run or a directory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.config import Layout, load_layout
from pipeloom.config.checks import CLASS_KEYS
from pipeloom.config.settings import own_keys
from pipeloom.errors import CheckpointError, ConfigError, UsageError
from pipeloom.measure.build import build_pipeline
from pipeloom.models.decoder import Attention, KeyValueCache
from pipeloom.models.hf.library import read_config
from pipeloom.models.hf.parts import ModelPart, TrunkLayer
from pipeloom.models.hf.past import PastTokens
from pipeloom.models.layers import VOCABULARY_WEIGHTS
from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.parallel.vocabulary import whole_logits
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.shapes.hub import ADAPTER_CONFIG, is_directory, read_adapter_config
from pipeloom.train.checkpoint.folder import newest_checkpoint
from pipeloom.train.checkpoint.load import load
from pipeloom.train.checkpoint.run import RunFacts
from pipeloom.train.collect import sums
from pipeloom.train.data.conversations import BadDocument
from pipeloom.train.data.sources import BYTES, FILES, tokenizer_name
from pipeloom.train.data.store import template_of
from pipeloom.train.data.tokenizers import CHAT_TEMPLATE, Tokenizer, has_template, load_tokenizer, prompt_tokens
from pipeloom.train.hub.lora_files import base_weights, begin_weights

_PADDING = 2**30  # position of tokens that no other may attend to
_WINDOW_STEP = 32  # windows grow by this many tokens: larger means fewer distinct shapes, but more padding to compute


@dataclass(frozen=True)
class Sampling:
    """Rule for choosing a token from its logits.

    Attributes:
        temperature: divisor of the logits; 0: always the most likely token (greedy).
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the smallest set of most likely tokens whose probabilities sum to at least p; 1: all.
        seed: seed of the random draws.

    Raises UsageError for a value outside these ranges.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature:g}; it must be 0 (greedy) or above, such as 0.8")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; it must be above 0 and at most 1 (all tokens)")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return the id of a token, given the logits [vocabulary]. Ties go to the lower id."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, tokens = (logits / self.temperature).sort(descending=True, stable=True)
        if self.top_k:
            ordered, tokens = ordered[: self.top_k], tokens[: self.top_k]
        shares = torch.softmax(ordered, dim=-1)
        if shares.isnan().any():
            raise UsageError(
                "the model gives the next token no finite probabilities: its weights, or settings of its config.json, are NaN or "
                "infinite"
            )
        shares[1:].masked_fill_((shares.cumsum(0) - shares)[1:] >= self.top_p, 0)  # the likeliest token always stays
        return int(tokens[torch.multinomial(shares, 1, generator=generator)])


@torch.no_grad()
def extend(
    pipeline: Pipeline | LocalPipeline,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    *,
    ends: Collection[int] = (),
    context: int | None = None,
    keep: bool = False,
    seen: Callable[[list[list[int]]], object] | None = None,
) -> list[list[int]]:
    """Return up to `count` new tokens for each prompt, on every rank. Collective.

    All prompts go through the pipeline together, padded on the right: attention is causal, so padding changes nothing. The
    tokens of a prompt depend on its own index and tokens, not on the other prompts.

    Args:
        ends: tokens that end a sequence; they are its last.
        context: the longest window, in tokens; None: no limit.
        keep: keep keys and values of earlier tokens: of Pipeloom's decoder without a capacity of experts, and of the families of
            `transformers` that keep them in its caches alone; sequences longer than `context` are computed whole.
        seen: called with the prompts and their new tokens after each step.

    Raises UsageError for an empty prompt.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {number} is empty; give it one token at least")
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(stable_seed("sample", sampling.seed, at)) for at in range(len(prompts))]
    going = set(range(len(texts))) if count > 0 else set()
    done = 0  # tokens in the caches
    with _keeping(pipeline, keep) as (kind, caches):
        while going:
            slid = context is not None and any(len(texts[at]) > context for at in going)
            done = 0 if slid else done
            parts = _next_tokens(texts, going, context if slid else None, kind, done)
            length = max(map(len, parts.values()))
            if slid or not (done or kind == "transformers"):
                length = min(-(-length // _WINDOW_STEP) * _WINDOW_STEP, context or sys.maxsize)
            window = torch.zeros(len(texts), length, dtype=torch.int64)
            positions = torch.full_like(window, _PADDING)
            for at, part in parts.items():
                window[at, : len(part)] = torch.tensor(texts[at][part.start : part.stop])
                positions[at, : len(part)] = torch.arange(len(part)) + (0 if slid else part.start)
            for cache in caches:
                cache.begin(None if slid else done)
            keywords = {"position_ids": positions.to(pipeline.device)} if kind == "own" else {}
            logits = pipeline.predict(window.to(pipeline.device), **keywords)
            ready = [at for at in sorted(going) if parts[at].stop == len(texts[at])]
            drawn = [0.0] * len(texts)
            for at in ready if logits is not None else ():
                drawn[at] = sampling.choose(_whole(pipeline, logits[at, len(parts[at]) - 1]), generators[at])
            # only the rank with the last stage has logits; the other ranks add 0, so the sum is its choice
            drawn = sums(pipeline, drawn)
            for at in ready:
                texts[at].append(int(drawn[at]))
                if int(drawn[at]) in ends or len(texts[at]) == len(prompts[at]) + count:
                    going.discard(at)
            if seen is not None:
                seen(texts)
            if kind and not slid:
                done = max(part.stop for part in parts.values())
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _next_tokens(
    texts: Sequence[list[int]], going: Collection[int], last: int | None, kind: str, done: int
) -> dict[int, range]:
    """Return which tokens of each text the next pass computes: the `last` ones, or those that the caches of a `kind` lack."""
    if last is None and kind == "transformers":
        # no padding, which caches of sliding windows and of states would keep: each text goes as far as the shortest
        return dict.fromkeys(going, range(done, min(len(texts[at]) for at in going)))
    new = 1 if done else last or sys.maxsize
    return {at: range(max(0, len(texts[at]) - new), len(texts[at])) for at in going}


@contextlib.contextmanager
def _keeping(
    pipeline: Pipeline | LocalPipeline, keep: bool
) -> Iterator[tuple[str, Sequence[KeyValueCache | PastTokens]]]:
    """Have the layers of this rank keep keys and values meanwhile, if `keep`.

    Yields whose caches they are in, "own", "transformers" or "" (they keep none), the same on every rank, and the caches.
    """
    modules = [part for module in pipeline.modules.values() for part in module.modules()] if keep else []
    attentions = [part for part in modules if isinstance(part, Attention)]
    parts = [part for part in modules if isinstance(part, ModelPart)]
    layers = [part for part in parts if isinstance(part, TrunkLayer)]
    count, refusing = sums(pipeline, [len(layers), sum(not layer.keeps_past() for layer in layers)])
    past = PastTokens() if count and not refusing else None
    try:
        for attention in attentions:
            attention.cache = KeyValueCache()
        for part in parts:
            part.past = past
        if past is not None:
            yield "transformers", [past]
        else:
            caches = [attention.cache for attention in attentions if attention.cache is not None]
            yield "own" if keep and not count else "", caches
    finally:
        if past is not None:
            past.begin(None)  # who still holds it holds no keys and values
        for part in parts:
            part.past = None
        for attention in attentions:
            attention.cache = None


def generate(
    pipeline: Pipeline, tokenizer: Tokenizer, prompt: Sequence[int], count: int, seq_len: int, seed: int
) -> str:
    """Return the tokens of a prompt and up to `count` sampled ones, to the first eos, as text, on every rank. Collective.

    The same weights and seed give the same text.
    """
    ends = () if tokenizer.eos is None or tokenizer.name == BYTES else (tokenizer.eos,)
    (added,) = extend(pipeline, [prompt], count, Sampling(seed=seed), ends=ends, context=seq_len)
    return printable(tokenizer.decode(torch.tensor([*prompt, *added])))


def printable(text: str) -> str:
    """Return `text` with control characters, which could control a terminal, replaced by U+FFFD, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _whole(pipeline: Pipeline | LocalPipeline, logits: Tensor) -> Tensor:
    """Return the logits [vocabulary] of one position, from each tensor-parallel rank's part where these have parts."""
    if pipeline.mesh.tp.size == 1 or pipeline.schedule.vocabulary:
        return logits
    shard = next(pipeline.layouts[name].over("tp") for name in VOCABULARY_WEIGHTS if name in pipeline.layouts)
    assert shard is not None
    return whole_logits(logits, TensorParallel(pipeline.mesh.tp), sum(shard.sizes))


# -- the model of a checkpoint, a run or a directory ---------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedModel:
    """A model to generate with.

    Attributes:
        layout: layout that `open_pipeline` builds.
        checkpoint: checkpoint with its weights; None: they are in the directory that the layout names.
        hub: Hugging Face directory that its configuration names as its source or for its weights, or that it was imported
            from; None: it names none.
        chat: whether it was trained on conversations; None: unknown, as of a directory.
    """

    layout: Layout
    checkpoint: Path | None
    hub: Path | None
    chat: bool | None = None


@dataclass(frozen=True)
class Text:
    """Conversion of text to tokens and back, and the tokens (`ends`) that end a sequence."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: tuple[int, ...]


def open_model(path: Path, prompts: int, flags: Mapping[str, Any], trust_code: bool = False) -> OpenedModel:
    """Find the model at `path`, and make a layout of it for `prompts` sequences at a time.

    Args:
        flags: keys of the configuration that the layout has in addition to the model's, such as "parallel.pp".
        trust_code: import the classes that a checkpoint's model names as `module:class`.

    Raises:
        CheckpointError: there is no model at `path`.
        ConfigError: the layout does not fit the model, or the model names classes without `trust_code`.
    """
    size = max(1, prompts)
    layout: dict[str, Any] = {"schedule.name": "gpipe", "schedule.microbatches": size, "train.global_batch_size": size}
    chat = (path / CHAT_TEMPLATE).is_file() or None
    if (path / ADAPTER_CONFIG).is_file():
        base = Path(str(read_adapter_config(path, str(path)).get("base_model_name_or_path")))
        if not (base / "config.json").is_file():
            raise ConfigError(
                f"{path / ADAPTER_CONFIG}: the model that it adapts, {base}, is not a Hugging Face directory"
            )
        keys = {"model.source": str(base), "lora.adapter": str(path)}
        if any((path / name).is_file() for name in FILES):
            keys["data.tokenizer"] = str(path)
        return OpenedModel(load_layout(None, {**keys, **layout, **flags}), None, base, chat)
    if (path / "config.json").is_file():
        kind = "model.weights"
        try:
            own_keys(str(path))
        except ConfigError:  # the model of transformers, or refused there with the reason
            kind = "model.source"
        return OpenedModel(load_layout(None, {kind: str(path), **layout, **flags}), None, path, chat)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint, a run, or a Hugging Face directory")
    checkpoint = newest_checkpoint(path)
    facts = RunFacts.read(checkpoint)
    config, model = facts.config, facts.model(checkpoint)
    source, weights = model.get("source"), model.get("weights") or facts.source
    hub = source or (weights if isinstance(weights, str) and is_directory(weights) else None)
    for key in CLASS_KEYS:
        if model.get(key) and not trust_code:
            raise ConfigError(
                f"{checkpoint}: its model contains code, model.{key} = {json.dumps(str(model[key])[:200])}, which would be "
                "imported and run; --trust-code allows it"
            )
    values = {"source": source} if source else {key: value for key, value in model.items() if value is not None}
    if not config.get("lora", {}).get("r"):
        values.pop("weights", None)  # the run's initial weights; the checkpoint has its own
    keys = {f"model.{key}": value for key, value in values.items()}
    keys |= {f"lora.{key}": value for key, value in config.get("lora", {}).items() if key != "adapter"}
    for section, key in (("train", "dtype"), *(("data", key) for key in ("tokenizer", "bos", "eos", "template"))):
        if key in config.get(section, {}):
            keys[f"{section}.{key}"] = config[section][key]
    layout_of_model = load_layout(None, {**keys, **layout, **flags})
    return OpenedModel(layout_of_model, checkpoint, Path(hub) if hub else None, facts.chat)


def open_pipeline(opened: OpenedModel, device: torch.device, watchdog: Any = None) -> Pipeline:
    """Build this process's part of the model, and load its weights; collective. The pipeline is in evaluation mode."""
    pipeline = build_pipeline(opened.layout, device, watchdog=watchdog, drawn=False)
    config = opened.layout.config
    begin_weights(config, pipeline, opened.checkpoint is not None)
    if opened.checkpoint is not None:
        load(opened.checkpoint, pipeline, base=base_weights(config))
    pipeline.eval()
    return pipeline


def text_of(opened: OpenedModel, raw: bool = False) -> Text:
    """Open the tokenizer of `data.tokenizer`; "auto" is that of the model's directory if it has one, else bytes.

    Text is a user's message in the template of the conversations that the model was trained on, or, where its training is
    unknown, in that of the tokenizer, if it has one; with `raw` and elsewhere it is as it stands.

    Raises ConfigError if it cannot be read.
    """
    data = opened.layout.config.data
    name = tokenizer_name(data.tokenizer, str(opened.hub or ""))
    tokenizer = load_tokenizer(name, data.bos, data.eos)
    chat = has_template(tokenizer.folder) if opened.chat is None else opened.chat
    template = template_of(tokenizer, data) if chat and not raw else None
    tokenizer_ends = () if tokenizer.eos is None or name == BYTES else (tokenizer.eos,)
    return Text(
        lambda text: prompt_tokens(text, tokenizer, template),
        lambda tokens: tokenizer.decode(torch.tensor(tokens)),
        _ends(opened.hub) or tokenizer_ends,
    )


def continue_prompts(
    opened: OpenedModel,
    pipeline: Pipeline,
    prompts: Sequence[str],
    count: int,
    sampling: Sampling,
    stream: Callable[[str], object] | None = None,
    raw: bool = False,
) -> list[tuple[str, list[int]]]:
    """Return (prompt and continuation as text, new tokens) for each prompt; collective, the same on every rank.

    Args:
        count: most new tokens per prompt.
        stream: called with each new part of the first prompt's text; the prompt itself is the first.
        raw: take the prompts as they stand, also where the model has a template for conversations.

    Raises UsageError for a prompt without tokens, with a token outside the model's vocabulary, or that the template refuses.
    """
    text = text_of(opened, raw)
    try:
        encoded = [text.encode(prompt) for prompt in prompts]
    except BadDocument as error:
        raise UsageError(f"{error}; nearest: --raw, which takes the prompt as it stands") from None
    vocabulary = opened.layout.config.model.vocab_size
    for prompt, tokens in zip(prompts, encoded, strict=True):
        unknown = [token for token in tokens if token >= vocabulary]
        if unknown:
            raise UsageError(
                f"token {unknown[0]} of the prompt {prompt[:60]!r} is outside the vocabulary of {vocabulary}"
            )
    streamed = ""

    def show(texts: list[list[int]]) -> None:
        nonlocal streamed
        whole = text.decode(texts[0])
        if stream is not None and not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # part of a character
            stream(whole[len(streamed) :])
            streamed = whole

    show(encoded)
    model = opened.layout.config.model
    keep = not model.capacity_factor  # a capacity depends on the tokens that are computed together
    context = _context(opened.hub)
    added = extend(pipeline, encoded, count, sampling, ends=text.ends, context=context, keep=keep, seen=show)
    return [(text.decode([*before, *after]), after) for before, after in zip(encoded, added, strict=True)]


def _ends(hub: Path | None) -> tuple[int, ...]:
    ends = None if hub is None else getattr(read_config(hub), "eos_token_id", None)
    return () if ends is None else tuple(ends) if isinstance(ends, Collection) else (int(ends),)


def _context(hub: Path | None) -> int | None:
    """Return the most tokens that the model has positions for; None: any number."""
    most = None if hub is None else getattr(read_config(hub).get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None
