"""The palette: actions stay apart for every kind of colour vision, chunks get lighter, ink is readable."""

from __future__ import annotations

import itertools
import math

import pytest

from pipeloom.draw.palette import Rgb, color, ink_on, linear

# What a colour looks like without one kind of cone, linear light (Machado et al. 2009, severity 1).
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _oklab(rgb: Rgb) -> tuple[float, float, float]:
    red, green, blue = rgb
    long = math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue)
    medium = math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue)
    short = math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def _seen(text: str, vision: str) -> tuple[float, float, float]:
    rgb = linear(text)
    seen = [min(1.0, max(0.0, sum(k * part for k, part in zip(row, rgb, strict=True)))) for row in VISION[vision]]
    return _oklab((seen[0], seen[1], seen[2]))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_actions_of_one_chunk_are_told_apart(vision: str, chunks: int) -> None:
    """0.05 in OKLab is well above what side-by-side boxes need (0.02 is about one just noticeable difference)."""
    for chunk in range(chunks):
        for left, right in itertools.combinations("FBIW", 2):
            apart = math.dist(_seen(color(left, chunk, chunks), vision), _seen(color(right, chunk, chunks), vision))
            assert apart > 0.05, (left, right, chunk)


@pytest.mark.parametrize("kind", "FBIW")
def test_later_chunks_are_lighter(kind: str) -> None:
    lightness = [_oklab(linear(color(kind, chunk, 4)))[0] for chunk in range(4)]
    assert lightness == sorted(lightness)
    assert lightness[-1] - lightness[0] > 0.2


@pytest.mark.parametrize("kind", "FBIW")
def test_ink_has_contrast(kind: str) -> None:
    for chunks in range(1, 9):
        for chunk in range(chunks):
            background = color(kind, chunk, chunks)
            light, dark = (
                0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (ink_on(background), background))
            )
            assert (max(light, dark) + 0.05) / (min(light, dark) + 0.05) >= 4.5


def test_linear_light_round_trip() -> None:
    assert linear("#ffffff") == (1.0, 1.0, 1.0)
    assert linear("#000000") == (0.0, 0.0, 0.0)
    assert linear("#808080")[0] == pytest.approx(0.2159, abs=1e-4)
