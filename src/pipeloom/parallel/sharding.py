"""Layout of a parameter over ranks: the part that each rank holds, and whether gradients are summed over tp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError

ShardAxis = Literal["tp", "ep", "pp_tp"]


@dataclass(frozen=True)
class Shard:
    """One dimension of a parameter, split along one axis of the mesh.

    Attributes:
        axis: axis of the mesh; pp_tp: all ranks of a replica.
        dim: dimension of the parameter.
        sizes: size of each rank's part, in order of the axis; they need not be equal.
        fused: sizes of the projections concatenated along the dimension, such as queries, keys and values. Each is split into
            equal parts, and a rank holds its part of each projection, in the same order. Empty means a single projection.

    Raises UsageError for projections that the axis does not divide, or that do not match `sizes`.
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
        """Return (first element, length) of each range of the full dimension that the rank at `index` holds, in order."""
        if not self.fused:
            return ((sum(self.sizes[:index]), self.sizes[index]),)
        parts = [size // len(self.sizes) for size in self.fused]
        return tuple((sum(self.fused[:at]) + index * part, part) for at, part in enumerate(parts))


@dataclass(frozen=True)
class ParameterSharding:
    """Layout of one parameter; without shards every rank holds all of it.

    Attributes:
        shards: at most one per axis and one per dimension.
        partial: whether each tp rank computes only a term of the gradient, which is therefore summed over tp. Every tp rank
            holds the full parameter.

    Raises UsageError if an axis or dimension is split twice, or if the parameter is partial and sharded over tp.
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
        """Return the shard along `axis`, or None if the parameter is not split along it."""
        return next((shard for shard in self.shards if shard.axis == axis), None)

    @property
    def whole_over_tp(self) -> bool:
        """Return whether all tp ranks of a stage hold the same part."""
        return self.over("tp") is None and self.over("pp_tp") is None

    def full_shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the full parameter, given the shape of any part."""
        whole = list(part)
        for shard in self.shards:
            whole[shard.dim] = sum(shard.sizes)
        return torch.Size(whole)


WHOLE = ParameterSharding()


def to_plain(sharding: ParameterSharding) -> dict[str, Any]:
    """Return the layout as a JSON-serializable dict."""
    return {
        "partial": sharding.partial,
        "shards": [[shard.axis, shard.dim, list(shard.sizes), list(shard.fused)] for shard in sharding.shards],
    }


def from_plain(plain: Mapping[str, Any]) -> ParameterSharding:
    """Return the layout from its dict; the inverse of `to_plain`."""
    shards = (Shard(axis, dim, tuple(sizes), tuple(fused)) for axis, dim, sizes, fused in plain["shards"])
    return ParameterSharding(tuple(shards), plain["partial"])


@runtime_checkable
class HasSharding(Protocol):
    """A module that declares the layout of its parameters, by their names in it; every rank holds all of those that it does not
    name. What a submodule declares of its own counts in place of that."""

    def sharding(self) -> Mapping[str, ParameterSharding]: ...


def shardings_of(module: nn.Module) -> dict[str, ParameterSharding]:
    """Return the layout of each parameter of `module`, by its name in the module.

    Raises UsageError if a submodule's `sharding` names a parameter that it does not have, or one of another size.
    """
    layouts = {name: WHOLE for name, _ in module.named_parameters()}
    for path, part in module.named_modules():
        if not isinstance(part, HasSharding):
            continue
        parameters = dict(module.get_submodule(path).named_parameters())
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
            if name in layouts:  # `named_parameters` lists a tied weight under its first name only
                layouts[name] = sharding
    return layouts


def shard_of(full: Tensor, sharding: ParameterSharding, index: Mapping[str, int]) -> Tensor:
    """Return the part of `full` that the rank at `index` (axis -> index) holds: a view, or a copy for fused projections.

    Raises UsageError if a dimension of `full` does not match the layout.
    """
    for shard in sharding.shards:
        if full.shape[shard.dim] != sum(shard.sizes):
            raise UsageError(f"dimension {shard.dim} is {full.shape[shard.dim]}, not the sum of parts {shard.sizes}")
        pieces = [full.narrow(shard.dim, first, length) for first, length in shard.stretches(index[shard.axis])]
        full = pieces[0] if len(pieces) == 1 else torch.cat(pieces, shard.dim)
    return full


def join(parts: Mapping[tuple[int, ...], Tensor], sharding: ParameterSharding) -> Tensor:
    """Return the full parameter from its parts; the inverse of `shard_of`.

    Args:
        parts: part for each tuple of indices along `sharding.shards`, in their order; `{(): tensor}` without shards.
        sharding: layout of the parameter.

    Raises UsageError if parts are missing.
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
