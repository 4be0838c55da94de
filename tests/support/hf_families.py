"""The families of tests/data/hf_families.toml, by name."""

from __future__ import annotations

from pipeloom.train.hub import families
from pipeloom.train.hub.families import FamilyBatch, read_families

MODEL_FAMILIES = {family.name: family for family in read_families()}


def make_batch(family: str, packed: bool = False) -> FamilyBatch:
    return families.make_batch(MODEL_FAMILIES[family], packed)
