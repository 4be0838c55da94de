"""From `[data]` to rows of tokens: sources are found, tokenized into the cache, split and packed, then opened by every worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeloom.config import Config
from pipeloom.errors import ConfigError, shortened
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.train.collect import from_every_worker
from pipeloom.train.data import cache, store
from pipeloom.train.data.batches import (
    Batch,
    Batches,
    Mixture,
    PackedRows,
    Rows,
    SortedDocuments,
    SpanRows,
    evenly_spaced,
)
from pipeloom.train.data.packing import MULTIPLE, Spans, packed, pieces_of, split
from pipeloom.train.data.sources import BYTES, Source, find, require_length, tokenizer_name
from pipeloom.train.data.tokenizers import Template, Tokenizer, load_tokenizer, prompt_tokens
from pipeloom.train.workers.context import WorkerContext

Plan = list[dict[str, Any]]
"""For each source, as JSON: the paths of its entries in the cache."""


_PARTS = ("training text", "held-out text")
_PROMPT_TOKENS = 16  # of the held-out text that begin a sample, at most half of a row
_NOTHING = "has no document with anything to predict"


@dataclass(frozen=True)
class Data:
    """Training and validation data of a run.

    Attributes:
        tokenizer: tokenizer of the text.
        train: the data that `Batches` takes.
        held_out: batches to evaluate on.
        facts: digests that must be equal on all workers, and that a resumed run compares with the checkpoint's.
        words: description for people.
        unit: "byte" or "token".
        packed: whether rows hold several documents that must not attend to each other.
        template: renders conversations; None: the data hold none.
    """

    tokenizer: Tokenizer
    train: Rows | Mixture | SortedDocuments
    held_out: list[Batch]
    facts: dict[str, str]
    words: str
    unit: str
    packed: bool = False
    template: Template | None = None

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt as in the data; of "": the first held-out question, or the start of the held-out text."""
        if text:  # the vocabulary may contain none of its characters
            return prompt_tokens(text, self.tokenizer, self.template) or [0]
        first = self.held_out[0].rows(0)
        row: list[int] = first.tokens.tolist()
        question = int((first.targets != IGNORE_INDEX).nonzero()[0])  # places before the one that predicts an answer
        return row[: question + 1 if question else min(_PROMPT_TOKENS, -(-len(row) // 2))]


def open_data(config: Config, context: WorkerContext) -> Data:
    """Open the data of this run, on every worker; the first worker of a machine tokenizes what is not in the cache. Collective.

    Raises ConfigError for data that cannot be read, or that does not suit the model.
    """
    plan = prepare(config) if context.local_rank == 0 else None
    plans = from_every_worker(context, plan, "the first worker of this machine to tokenize", "data")
    return opened(config, plans[context.rank - context.local_rank])


def require_data(config: Config, replicas: int) -> Data:
    """Prepare the data for the workers before they start. Raises ConfigError for data that they could not use."""
    data = opened(config, prepare(config))
    Batches(data.train, config, replicas)
    require_masks(config, data)
    return data


def require_masks(config: Config, data: Data) -> None:
    """Raise ConfigError for packed rows and a Hugging Face model whose attention would see across documents."""
    if not data.packed or not config.model.source:
        return
    from pipeloom.measure.build import PARAMETER_DTYPES, foreign

    if not foreign(config.model.source, PARAMETER_DTYPES[config.train.dtype]).cut.keeps_documents_apart():
        raise ConfigError(
            f'data.documents = "{config.data.documents}": rows would hold several documents, and the attention of '
            f'{config.model.source} does not keep them apart by their positions; nearest: "concatenate"'
        )


def prepare(config: Config) -> Plan:
    """Tokenize and pack what is not in the cache. Raises ConfigError for data that cannot be read."""
    data, tokenizer = config.data, tokenizer_of(config)
    folder = cache.folder_of(data.cache)
    plan: Plan = []
    stores = []
    for source in _sources(config):
        entry = None if source.kind == "tokens" else store.tokenized(source, tokenizer, data, folder)
        stores.append(_store(source, entry, config, tokenizer))
        plan.append({"entry": None if entry is None else str(entry.path)})
    arrangement = _arrangement(config, stores)
    if arrangement != "concatenate":
        for source_store, entries, parts in zip(stores, plan, _parts(config, stores), strict=True):
            entries["pieces"] = [
                None if part is None else str(_pieces(source_store, part, config, folder, arrangement == "pack").path)
                for part in parts
            ]
    return plan


def opened(config: Config, plan: Plan) -> Data:
    """Open the data that a plan describes. Raises ConfigError for data that is too short, or that does not suit the model."""
    data, tokenizer, length = config.data, tokenizer_of(config), config.train.seq_len
    sources = _sources(config)
    stores = [
        _store(source, None if each["entry"] is None else cache.Entry(Path(each["entry"])), config, tokenizer)
        for source, each in zip(sources, plan, strict=True)
    ]
    arrangement = _arrangement(config, stores)
    lines = [f"{source_store.words}{_cut(source_store, length)}" for source_store in stores]
    if arrangement == "sort":
        sorted_parts = _sorted(config, stores, plan)
        whole: Rows | Mixture | SortedDocuments = sorted_parts[0]
        batches = sorted_parts[1].evenly_spaced(config.train.eval_batches)
        lines.append(
            f"sorted by length: {sorted_parts[0].documents:,} documents in {sorted_parts[0].count:,} batches, "
            f"{100 * sorted_parts[0].fill:.1f} % full"
        )
    else:
        train, held = _rows(config, stores, plan, arrangement == "pack")
        form = "planned, one document a row" if data.batching == "planned" else "packed"
        lines += [
            f"{form}: {rows.count:,} rows of {length}, {100 * rows.fill:.1f} % full"
            for rows in train
            if isinstance(rows, PackedRows)
        ]
        weights = data.weights or tuple(float(rows.count) for rows in train)
        whole = train[0] if len(train) == 1 else Mixture(train, weights)
        budget = max(1, config.train.eval_batches // len(held))
        batches = [
            batch for rows in held for batch in evenly_spaced(rows, config.train.global_batch_size, length, budget)
        ]
    trained, held_out = (stores[:-1], stores[-1:]) if data.validation else (stores, stores)
    facts = {
        "data, to train on": ", ".join(each.digest for each in trained),
        "data, held out": ", ".join(each.digest for each in held_out),
        "tokenizer": tokenizer.digest[:16],
    }
    counted = "" if tokenizer.eos is None else f", documents end with {tokenizer.eos}"
    words = "\n  ".join([f"data: tokens of {tokenizer.name} (up to {tokenizer.vocab_size:,}{counted})", *lines])
    unit = "byte" if tokenizer.name == BYTES else "token"
    template = store.template_of(tokenizer, data) if any(each.chat for each in stores) else None
    return Data(tokenizer, whole, batches, facts, words, unit, arrangement == "pack", template)


def _rows(config: Config, stores: list[store.Store], plan: Plan, packs: bool) -> tuple[list[Rows], list[Rows]]:
    """Return the rows to train on, and those held out, of each source. Raises ConfigError for a source without any."""
    length, planned = config.train.seq_len, config.data.batching == "planned"
    train: list[Rows] = []
    held: list[Rows] = []
    for number, (source_store, entries, parts) in enumerate(zip(stores, plan, _parts(config, stores), strict=True)):
        of = f" of {shortened(config.data.source[number])}" if 1 < len(config.data.source) > number else ""
        for at, (rows, part, what) in enumerate(zip((train, held), parts, _PARTS, strict=True)):
            if part is None:
                continue
            if packs:
                entry = cache.Entry(Path(entries["pieces"][at]))
                pieces = entry["pieces"].reshape(-1, 2)
                begins = np.arange(len(pieces) + 1) if planned and rows is train else entry["rows"]  # one, or as packed
                rows.append(PackedRows(source_store.tokens, source_store.counts, pieces, begins, length))
            else:
                require_length(part.tokens, length, what + of)
                rows.append(SpanRows(source_store.tokens, part, length))
            if not rows[-1].count:
                raise ConfigError(f"data.source: the {what} of {source_store.words} {_NOTHING}")
    return train, held


def _sorted(config: Config, stores: list[store.Store], plan: Plan) -> tuple[SortedDocuments, SortedDocuments]:
    """Return the documents to train on, and those held out, of all sources. Raises ConfigError if there are none."""
    train, parallel = config.train, config.parallel
    multiple = math.lcm(MULTIPLE, parallel.cp * math.lcm(2, parallel.tp if parallel.sp else 1))
    multiple *= -(-parallel.ep_blocks // multiple)  # no sequence may have fewer tokens than blocks
    both = []
    for at, what in enumerate(_PARTS):
        documents = [
            (each.tokens, each.counts, cache.Entry(Path(entries["pieces"][at]))["pieces"].reshape(-1, 2))
            for each, entries in zip(stores, plan, strict=True)
            if entries["pieces"][at] is not None
        ]
        rows, remainder = train.global_batch_size, config.data.remainder
        both.append(SortedDocuments(documents, rows, train.seq_len, train.seed, remainder, multiple))
        if not both[-1].documents:
            raise ConfigError(f"data.source: the {what} of {' and '.join(each.words for each in stores)} {_NOTHING}")
    return both[0], both[1]


def tokenizer_of(config: Config) -> Tokenizer:
    """Load the run's tokenizer. Raises ConfigError if it cannot be read, or if it has more tokens than the model."""
    data = config.data
    name = tokenizer_name(data.tokenizer, config.model.source or config.model.weights)
    tokenizer = load_tokenizer(name, data.bos, data.eos)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size}: the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} tokens; "
            f"nearest: {tokenizer.vocab_size}"
        )
    return tokenizer


def _sources(config: Config) -> list[Source]:
    """Return the sources to train on, followed by the one of `data.validation`, if that is set."""
    data = config.data
    sources = [find(name, data.format) for name in data.source]
    return [*sources, find(data.validation, data.format)] if data.validation else sources


def _store(source: Source, entry: cache.Entry | None, config: Config, tokenizer: Tokenizer) -> store.Store:
    if entry is not None:
        return store.opened(entry, source)
    return store.token_files(source, config.model.vocab_size, config.data.token_type, tokenizer.eos)


def _arrangement(config: Config, stores: list[store.Store]) -> Literal["concatenate", "pack", "sort"]:
    """Return how documents become batches. Raises ConfigError for conversations that "concatenate" would cut anywhere."""
    chat, documents = [source_store.words for source_store in stores if source_store.chat], config.data.documents
    if chat and documents == "concatenate":
        raise ConfigError(
            f'data.documents = "concatenate": windows would cut the conversations of {chat[0]} anywhere; nearest: "pack"'
        )
    if documents == "auto":
        return "pack" if chat or config.data.batching == "planned" else "concatenate"
    return documents


def _parts(config: Config, stores: list[store.Store]) -> list[tuple[Spans | None, Spans | None]]:
    """Return for each source the documents to train on, and those held out; None where a source has only the others."""
    if not config.data.validation:
        return [split(source_store.starts, _every(config)) for source_store in stores]
    whole = [Spans(source_store.starts[:-1], source_store.starts[1:]) for source_store in stores]
    return [*((spans, None) for spans in whole[:-1]), (None, whole[-1])]


def _cut(source_store: store.Store, length: int) -> str:
    """Return in words how many conversations do not fit in a row."""
    sizes = np.diff(source_store.starts) - 1
    longer = sizes[sizes > length] if source_store.chat else sizes[:0]
    if not len(longer):
        return ""
    tokens = int((longer - length).sum())
    return (
        f"; {len(longer):,} of more than {length:,} tokens are cut, and {tokens:,} tokens lose what stands before them"
    )


def _every(config: Config) -> int:
    return max(2, round(1 / config.data.held_out))


def _pieces(source_store: store.Store, part: Spans, config: Config, folder: Path, packs: bool) -> cache.Entry:
    """Return the cache's entry of a source's documents as pieces that fit a row; with `packs`, also the row of each."""
    length = config.train.seq_len

    def write(writer: cache.Writer) -> None:
        pieces = pieces_of(part, length, source_store.counts)
        if packs:
            pieces, rows = packed(pieces, length)
            writer.add("rows", "<i8", rows)
        writer.add("pieces", "<i8", pieces.reshape(-1))

    which = cache.digest_of([part.starts.tolist()[:1], part.ends.tolist()[-1:], len(part.starts), _every(config)])
    kind = "best fit" if packs else "pieces"
    return cache.entry(folder, cache.digest_of([kind, source_store.digest, length, which]), write)
