"""Cut of a `transformers` model into the part before its decoder layers, the layers, and the part after them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError, UsageError, first_line
from pipeloom.models.hf.context import spread_attention
from pipeloom.models.hf.library import require_decoder
from pipeloom.models.hf.parts import (
    Altered,
    FirstPart,
    LastPart,
    Recorder,
    Replay,
    Stop,
    Stubs,
    Tape,
    TrunkLayer,
    family_errors,
    set_tensor,
    with_separate_weight_gradients,
)
from pipeloom.models.hf.weights import PretrainedWeights, initialize
from pipeloom.models.layers import VocabularyRanks, shared_names
from pipeloom.parallel.context import ContextParallel

FIRST, LAST = "first", "last"
_MOST_EXTRA = 4  # numbers of values that a decoder layer may return after the hidden states
_PROBE_ROWS, _LENGTH = 1, 4  # sizes of the trial run that determines the cut of a model


def cut(
    model: nn.Module,
    folder: Path | None = None,
    context: ContextParallel | None = None,
    slices: bool = False,
    spread: VocabularyRanks | None = None,
) -> Cut:
    """Cut `model`, on the meta device or with weights. Raises ConfigError with the reason if it cannot be cut."""
    name = type(model).__name__
    if context is not None or slices:
        spread_attention(model, "slices" if context is None else "context parallelism")
    try:
        return Cut(model, folder, context, slices, spread)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be cut into layers: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be cut into layers: its forward fails without its decoder layers "
            f"({type(error).__name__}: {first_line(error)[:200]})"
        ) from error


class Cut:
    """The cut of a model, and the factories of its layers.

    Attributes:
        model: as given, or on the meta device.
        config: its configuration.
        path: the name of its list of decoder layers.
        before: names of the parameters outside of the decoder layers that the part before them uses.
        context: the ranks that share the tokens of sequences; None: every rank has whole ones.
        slices: whether sequences may be cut into slices.
        spread: the ranks over which the embedding and the output layer are spread; None: they are in the parts before and after
            the decoder layers.
        head: the name of an output layer that can be spread: one linear layer without bias that puts out the logits; else "".
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path | None = None,
        context: ContextParallel | None = None,
        slices: bool = False,
        spread: VocabularyRanks | None = None,
    ) -> None:
        self.model: Any = model
        self.spread = spread
        self.head = ""
        self.context = context
        self.slices = slices
        self.folder = folder
        self.config: Any = self.model.config
        self._refuse_options()
        self.path, self.trunk = _trunk(self.model)
        self._refuse_encoder()
        self.path_dot = f"{self.path}."
        self.meta = any(parameter.is_meta for parameter in self.model.parameters())
        self.extra: int | None = None
        self.before = self._before()
        self.extra = self._extra()
        if spread is not None:
            self._require_spreadable()

    # -- names -------------------------------------------------------------------------------------------------------------

    @property
    def layer_names(self) -> list[str]:
        """The names of all layers, in order."""
        names = [FIRST, *(f"{self.path_dot}{index}" for index in range(len(self.trunk))), LAST]
        return [*names, *self.share_names]

    @property
    def share_names(self) -> list[str]:
        """The names of the layers of which each rank has a share: the embedding, and an output layer that is not tied to it."""
        if self.spread is None:
            return []
        tied = any(
            {f"{self.embedding}.weight", f"{self.head}.weight"} <= {*group} for group in shared_names(self.model)
        )
        return [f"{FIRST}.{self.embedding}", *([] if tied else [f"{LAST}.{self.head}"])]

    def global_name(self, name: str) -> str:
        """Return the name in a pipeline of the parameter or buffer called `name` in the model."""
        if name.startswith(self.path_dot):
            return name
        return f"{FIRST if name in self.before else LAST}.{name}"

    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names, in a pipeline, of parameters that share one weight."""
        groups = [tuple(map(self.global_name, group)) for group in shared_names(self.model)]
        return tuple(
            group for group in groups if self.spread is None or f"{FIRST}.{self.embedding}.weight" not in group
        )

    # -- building ------------------------------------------------------------------------------------------------------------

    def builder(self, name: str) -> Callable[[], nn.Module]:
        """Return the factory of the layer called `name`."""
        return partial(self._build, name)

    def _build(self, name: str) -> nn.Module:
        with family_errors(type(self.model).__name__):
            return self._layer(name)

    def _layer(self, name: str) -> nn.Module:
        if name in (FIRST, LAST):
            shell, tape = self._shell()
            outside = self._shell_parameters()
            if self.spread is not None:
                passes: Any = nn.Identity()
                # Some families convert what they give it to its dtype.
                passes.weight = torch.empty(0, dtype=self._dtype)
                shell.set_submodule(self.head, passes)
                outside = [each for each in outside if each != f"{self.head}.weight"]
            held = {each for each in outside if (each in self.before) == (name == FIRST)}
            if self.spread is not None:
                held.discard(f"{self.embedding}.weight")
            stubs = Stubs(shell, [each for each in outside if each not in held])
            self._fill(shell, "")
            if name == FIRST:
                return FirstPart(shell, tape, stubs, None if self.spread is None else self.embedding)
            return LastPart(shell, tape, stubs, self._embedding_width, self._dtype)
        if self.spread is not None and name in self.share_names:
            return self._share(self.spread, name.partition(".")[2], embeds=name.startswith(f"{FIRST}."))
        index = int(name.removeprefix(self.path_dot))
        layer = copy.deepcopy(self.trunk[index], self._shared())
        self._fill(layer, f"{name}.")
        with_separate_weight_gradients(layer)
        return TrunkLayer(layer, index, self.replay, self.context, self.slices)

    @torch.no_grad()
    def _share(self, spread: VocabularyRanks, name: str, embeds: bool) -> nn.Module:
        """Return this rank's share of the layer called `name` in the model; of a directory's it reads no other rows."""
        layer = self.model.get_submodule(name)
        (rows, width), dtype = layer.weight.shape, layer.weight.dtype
        share = spread.share(rows, width, embeds, layer.padding_idx if embeds else None).to(dtype)
        if self._stored is not None:
            self._stored.load_part(f"{name}.weight", share.weight, (share.first, 0), (rows, width))
            return share
        whole = copy.deepcopy(layer, self._shared())
        self._fill(whole, f"{name}.")
        share.weight.copy_(whole.weight[share.first : share.first + len(share.weight)])
        return share

    def _fill(self, module: nn.Module, prefix: str) -> None:
        """Fill parameters and buffers on the meta device with their first values."""
        if not self.meta:
            return
        if self._stored is not None:
            self._stored.require(module, prefix)
        initialize(module, prefix, self.model, draw=self.folder is None)
        if self._stored is not None:
            self._stored.load(module, prefix)

    @cached_property
    def _stored(self) -> PretrainedWeights | None:
        """The weights of the directory; None: the model is from none."""
        return None if self.folder is None else PretrainedWeights(self.folder, self.model)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that this process has read from the directory."""
        stored = vars(self).get("_stored")  # which is opened where a layer is first loaded
        return 0 if stored is None else stored.files.bytes_read

    @cached_property
    def replay(self) -> Replay:
        """The replay that gives all decoder layers of this process their arguments."""
        return self._new_replay()

    def _new_replay(self) -> Replay:
        shell, tape, _ = self._stubbed()
        convolves = any(isinstance(part, nn.Conv1d) for part in self.trunk.modules())
        return Replay(shell, tape, self._embedding_width, self._dtype, convolves)

    def keeps_documents_apart(self) -> bool:
        """Return whether every layer attends inside a document only, where the positions in `position_ids` restart with each."""
        positions = torch.tensor([[0, 1, 0, 1]])
        try:
            self._new_replay().handed(torch.empty(*positions.shape, 1), {"position_ids": positions})
        except (TypeError, UsageError):
            return False  # TypeError: its forward takes no positions
        return True

    def _shared(self) -> dict[int, Any]:
        """Return a memo for deepcopy under which a copy shares the configuration, and the weights if they have values."""
        memo: dict[int, Any] = {id(self.config): self.config}
        if not self.meta:
            memo.update((id(parameter), parameter) for parameter in self.model.parameters())
        return memo

    def _shell(self) -> tuple[Any, Tape]:
        """Return a copy of the model with recorders in place of its decoder layers."""
        tape, count = Tape(self.extra), len(self.trunk)
        recorders = nn.ModuleList(Recorder(layer, index, count, tape) for index, layer in enumerate(self.trunk))
        config = copy.deepcopy(self.config)
        config.use_cache = False
        shell = copy.deepcopy(self.model, {**self._shared(), id(self.trunk): recorders, id(self.config): config})
        return shell, tape

    def _shell_parameters(self) -> list[str]:
        names = (name for name, _ in self.model.named_parameters(remove_duplicate=False))
        return [name for name in names if not name.startswith(self.path_dot)]

    def _stubbed(self) -> tuple[Any, Tape, Stubs]:
        """Return a shell to try, with zeros that know what is computed from them in place of all its parameters."""
        shell, tape = self._shell()
        stubs = Stubs(shell, self._shell_parameters(), requires_grad=True)
        if self.meta:
            initialize(shell, "", self.model)
        return shell, tape, stubs

    @property
    def embedding(self) -> str:
        """The name of the input embedding."""
        layer = self.model.get_input_embeddings()
        name: str = next(name for name, part in self.model.named_modules() if part is layer)
        return name

    @property
    def _embedding_width(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    # -- how it is cut ---------------------------------------------------------------------------------------------------------

    def _refuse_options(self) -> None:
        config = self.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                "output_router_logits is true, and the routers' loss in transformers is over all layers together, so it does "
                "not decompose into stages: set it to false"
            )
        if getattr(config, "layerdrop", 0):
            raise ConfigError(
                f"layerdrop is {config.layerdrop}, and which layers run would differ from rank to rank: set it to 0"
            )
        require_decoder(config)

    def _refuse_encoder(self) -> None:
        causal = {getattr(part, "is_causal", None) for part in self.trunk.modules()}
        config = self.config.get_text_config()
        # Families of which a configuration may be either say by is_decoder which it is; some have no is_causal.
        either = hasattr(config, "add_cross_attention") and hasattr(config, "is_decoder")
        if (False in causal and True not in causal) or (either and not config.is_decoder):
            nearest = f", and {type(self.model).__name__} with is_decoder = true" if either else ""
            raise ConfigError(
                f"its tokens attend to later ones, as in an encoder; supported: causal language models{nearest}"
            )

    def _before(self) -> frozenset[str]:
        """Return the names of the parameters on which the hidden states of the first decoder layer depend."""
        shell, tape, stubs = self._stubbed()
        tape.run(stop_at=0)
        with torch.enable_grad():
            try:
                shell.eval()(torch.zeros(_PROBE_ROWS, _LENGTH, dtype=torch.int64))
            except Stop:
                pass
            else:
                raise ConfigError(f"its forward does not call the layers in {self.path}")
        return frozenset(stubs.used_by(tape.entered))

    @property
    def spreadable(self) -> bool:
        """Spreadability: whether pipeline ranks may have shares of the embedding and the output layer."""
        try:
            self._require_spreadable()
        except Exception:  # of the family's own forward, of any type
            return False
        return True

    def _require_spreadable(self) -> None:
        """Raise ConfigError unless the logits are the output of `head`, and tokens serve for rows of `embedding` alone."""
        if not self.head:
            raise ConfigError(
                "its logits are not the output of one linear layer without bias, which alone can be spread over the pipeline; "
                "nearest: the output layer on the last stage"
            )
        shell, tape, stubs = self._stubbed()
        rows = torch.zeros(_PROBE_ROWS, _LENGTH, self._embedding_width, dtype=self._dtype)
        FirstPart(shell.eval(), tape, stubs, self.embedding)(rows)
        others, weight = stubs.used_by(tape.entered), f"{self.embedding}.weight"
        if weight not in self.before or others != self.before - {weight}:
            raise ConfigError(
                "the part before its decoder layers needs more than the tokens' rows of one embedding, which alone can be spread "
                "over the pipeline; nearest: the embedding and the output layer on the first and the last stage"
            )

    def _extra(self) -> int | None:
        """Return the number of values that a layer must return after the hidden states for the model's forward to accept it."""
        reason: Exception | None = None
        choices: list[int | None] = [None, *range(_MOST_EXTRA)]
        for extra in choices:
            self.extra = extra
            try:
                self._new_replay().run((_PROBE_ROWS, _LENGTH), torch.device("cpu"), {})
                shape = self._tried_last()
                if shape != (_PROBE_ROWS, _LENGTH):
                    raise Altered(
                        f"its forward makes logits of shape {[*shape, '…']} of {_PROBE_ROWS} row of {_LENGTH} tokens"
                    )
                return extra
            except (Altered, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
                reason = reason or error
        assert reason is not None
        raise reason

    def _tried_last(self) -> tuple[int, ...]:
        """Return rows and length of the logits in a trial run of the part after the layers, on the meta device."""
        shell, tape, _ = self._stubbed()
        for name in self._shell_parameters():
            if name not in self.before:
                set_tensor(shell, name, torch.empty_like(self.model.get_parameter(name), device="meta"))
        embedded = torch.zeros(_PROBE_ROWS, _LENGTH, self._embedding_width, dtype=self._dtype)
        tape.run(stop_at=len(self.trunk) - 1)
        width = 0
        try:
            shell.eval()(inputs_embeds=embedded)
        except Stop:
            width = tape.entered.shape[-1]
        tape.run(stop_at=-1, inject=torch.zeros(_PROBE_ROWS, _LENGTH, width, dtype=tape.entered.dtype, device="meta"))
        head: Any = shell.get_output_embeddings()
        put_out: list[Tensor] = []
        if type(head) is nn.Linear and head.bias is None:
            head.register_forward_hook(lambda *call: put_out.append(call[2]))
        with torch.no_grad():
            logits: Tensor = shell(inputs_embeds=embedded).logits
        if any(each is logits for each in put_out):
            self.head = next(name for name, part in shell.named_modules() if part is head)
        return tuple(logits.shape[:-1])


def _trunk(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the shallowest list in `model` with as many modules as the configuration has layers, and its name."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if not count:
        raise ConfigError("its configuration has no num_hidden_layers")
    base = model.base_model
    prefix = next(name for name, part in model.named_modules() if part is base)
    lists = [
        (name, part) for name, part in base.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if not lists:
        raise ConfigError(f"it has no list of {count} decoder layers (num_hidden_layers)")
    name, trunk = min(lists, key=lambda item: item[0].count("."))
    return f"{prefix}.{name}" if prefix else name, trunk
