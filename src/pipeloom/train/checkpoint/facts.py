"""Facts in `extra.json` of a trainer's checkpoint: the place in the data, the configuration, and what decisions depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeloom.config.problems import file_sentence
from pipeloom.errors import CheckpointError
from pipeloom.limits import MOST_STEPS
from pipeloom.train.checkpoint.load import read_extra
from pipeloom.train.checkpoint.manifest import EXTRA

_Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
_Model = TypeVar("_Model", bound=BaseModel)


class RunFacts(BaseModel):
    """The part of `extra.json` that is read.

    Attributes:
        batch: number of batches that were read; None: as many as steps.
        rollbacks: number of rollbacks so far.
        held_out: step -> loss on the held-out text.
        norms: the latest gradient norms.
        run: the run's folder.
        data: digest of the data.
        config: the configuration, section by section.
        source: the Hugging Face directory that the weights were imported from.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    batch: _Count | None = None
    rollbacks: _Count = 0
    held_out: dict[str, float] = {}
    norms: list[float] = []
    run: str = ""
    data: str | None = None
    config: dict[str, dict[str, Any]] = {}
    source: str | None = None

    @classmethod
    def of(cls, extra: Any, directory: Path) -> RunFacts:
        """Return the facts in `extra`, as `save` was given it. Raises CheckpointError if a trainer cannot have written it."""
        return validated(cls, {} if extra is None else extra, directory)

    @classmethod
    def read(cls, directory: Path) -> RunFacts:
        """Return the facts of the checkpoint in `directory`. Raises CheckpointError as `of`, and if it cannot be read."""
        return cls.of(read_extra(directory), directory)

    def batch_after(self, step: int) -> int:
        """Return the number of batches that were read when `step` steps were completed."""
        return step if self.batch is None else self.batch

    def model(self, directory: Path) -> dict[str, Any]:
        """Return the section of the model. Raises CheckpointError if there is none."""
        if "model" not in self.config:
            raise CheckpointError(
                f"{directory}: it does not name its model, so it was not written by Pipeloom's trainer"
            )
        return self.config["model"]


def validated(model: type[_Model], values: Any, directory: Path) -> _Model:
    """Return what `model` makes of `values`, which are from `extra.json`. Raises CheckpointError if it refuses them."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(
            f"{directory / EXTRA}: it was not written by Pipeloom's trainer: {file_sentence(error)}"
        ) from None
