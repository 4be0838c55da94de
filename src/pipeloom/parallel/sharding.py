"""Layout of a parameter over ranks: the part that each holds, and the ranks whose gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError

ShardAxis = Literal["tp", "ep"]


@dataclass(frozen=True)
class Shard:
    """One dimension cut along one axis.

    Attributes:
        axis: of the mesh.
        dim: the dimension of the parameter.
        sizes: of the parts, in order of the axis; they need not be equal.
        fused: sizes of the projections that lie one after the other along the dimension, such as queries, keys and values.
            Each is cut into equal parts, and a rank holds its part of every one, in their order. Empty: there is one.

    Raises UsageError for projections that the axis does not divide, or that do not add up to `sizes`.
    """

    axis: ShardAxis
    dim: int
    sizes: tuple[int, ...]
    fused: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ranks = len(self.sizes)
        if self.fused and (
            any(size % ranks for size in self.fused) or any(sum(self.fused) != ranks * size for size in self.sizes)
        ):
            raise UsageError(f"projections of {list(self.fused)} cannot be cut into parts of {list(self.sizes)}")

    def stretches(self, index: int) -> tuple[tuple[int, int], ...]:
        """(first element, length) of each stretch of the whole dimension that the rank at `index` holds, in order."""
        if not self.fused:
            return ((sum(self.sizes[:index]), self.sizes[index]),)
        parts = [size // len(self.sizes) for size in self.fused]
        return tuple((sum(self.fused[:at]) + index * part, part) for at, part in enumerate(parts))


@dataclass(frozen=True)
class ParameterSharding:
    """The layout of one parameter; without shards every rank holds all of it.

    Attributes:
        shards: at most one an axis and one a dimension.
        partial: held in full by every tp rank, but each one's gradient is that of its own tokens: it is summed over tp.
    """

    shards: tuple[Shard, ...] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        for what in ("axis", "dim"):
            values = [getattr(shard, what) for shard in self.shards]
            if len(set(values)) != len(values):
                raise UsageError(f"a parameter is cut twice along the same {what}: {values}")
        if self.partial and self.over("tp") is not None:
            raise UsageError("a parameter cut over tp cannot be partial over tp as well")

    def over(self, axis: ShardAxis) -> Shard | None:
        """The shard along `axis`; None when the parameter is not cut along it."""
        return next((shard for shard in self.shards if shard.axis == axis), None)

    def full_shape(self, part: torch.Size) -> torch.Size:
        """The shape of the whole parameter from the shape of any part."""
        whole = list(part)
        for shard in self.shards:
            whole[shard.dim] = sum(shard.sizes)
        return torch.Size(whole)


WHOLE = ParameterSharding()


def to_plain(sharding: ParameterSharding) -> dict[str, Any]:
    """Return the layout as JSON can hold it."""
    return {
        "partial": sharding.partial,
        "shards": [[shard.axis, shard.dim, list(shard.sizes), list(shard.fused)] for shard in sharding.shards],
    }


def from_plain(plain: Mapping[str, Any]) -> ParameterSharding:
    """The inverse of `to_plain`."""
    shards = (Shard(axis, dim, tuple(sizes), tuple(fused)) for axis, dim, sizes, fused in plain["shards"])
    return ParameterSharding(tuple(shards), plain["partial"])


@runtime_checkable
class HasSharding(Protocol):
    """A module that says how its own parameters (not its children's) are laid; those that it does not name are whole."""

    def sharding(self) -> Mapping[str, ParameterSharding]: ...


def shardings_of(module: nn.Module) -> dict[str, ParameterSharding]:
    """The layout of each parameter of `module`, by its name inside.

    Raises UsageError when a submodule's `sharding` names a parameter that it does not have, or one of another size.
    """
    layouts = {name: WHOLE for name, _ in module.named_parameters()}
    for path, part in module.named_modules():
        if not isinstance(part, HasSharding):
            continue
        parameters = dict(module.get_submodule(path).named_parameters(recurse=False))
        for local, sharding in part.sharding().items():
            if local not in parameters:
                raise UsageError(
                    f"{type(part).__name__}.sharding() names {local!r}, and the module has {sorted(parameters)}"
                )
            for shard in sharding.shards:
                if parameters[local].shape[shard.dim] not in shard.sizes:
                    raise UsageError(
                        f"{type(part).__name__}.{local} has {parameters[local].shape[shard.dim]} in dimension {shard.dim}, "
                        f"and its layout says parts of {list(shard.sizes)}"
                    )
            name = f"{path}.{local}" if path else local
            if name in layouts:  # a weight that stands in two places is listed under its first name only
                layouts[name] = sharding
    return layouts


def shard_of(full: Tensor, sharding: ParameterSharding, index: Mapping[str, int]) -> Tensor:
    """The part of `full` that the rank at `index` (axis -> index) holds: a view, or of fused projections a copy."""
    for shard in sharding.shards:
        if full.shape[shard.dim] != sum(shard.sizes):
            raise UsageError(f"dimension {shard.dim} is {full.shape[shard.dim]}, not the sum of parts {shard.sizes}")
        pieces = [full.narrow(shard.dim, first, length) for first, length in shard.stretches(index[shard.axis])]
        full = pieces[0] if len(pieces) == 1 else torch.cat(pieces, shard.dim)
    return full


def join(parts: Mapping[tuple[int, ...], Tensor], sharding: ParameterSharding) -> Tensor:
    """The whole parameter from its parts: the inverse of `shard_of`.

    Args:
        parts: indices along `sharding.shards`, in their order, -> part; `{(): tensor}` for a parameter held in full.
    """
    if not sharding.shards:
        return parts[()]
    first, rest = sharding.shards[0], ParameterSharding(sharding.shards[1:])
    missing = [at for at in range(len(first.sizes)) if not any(key[0] == at for key in parts)]
    if missing:
        raise UsageError(f"parts {missing} along {first.axis} are missing")
    lines = [
        join({key[1:]: value for key, value in parts.items() if key[0] == at}, rest) for at in range(len(first.sizes))
    ]
    if first.fused:
        lengths = [length for _, length in first.stretches(0)]
        split = [torch.split(line, lengths, first.dim) for line in lines]
        lines = [part for projection in zip(*split, strict=True) for part in projection]
    return torch.cat(lines, first.dim)
