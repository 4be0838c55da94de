"""The one palette of all drawings: colour by action, lightness by chunk.

Hues are blue, orange, yellow and purple, each at its own lightness, so that the four actions stay apart under the
common kinds of colour blindness (a test measures it); every drawing also writes the letter, in the boxes or in the legend.
"""

from __future__ import annotations

import math
from functools import lru_cache

from pipeloom.schedule.actions import kind_of

Rgb = tuple[float, float, float]

PAPER = "#ffffff"
INK = "#1f2430"
FAINT_INK = "#6b7280"
IDLE_COLOUR = "#eef0f4"
IDLE_LINE = "#bcc3d0"
CURVE_COLOUR = "#c3cad6"
LIMIT_COLOUR = "#b42318"

# OKLCH lightness of the first chunk, of the last chunk, and of an only chunk.
_DARKEST, _LIGHTEST, _ALONE = 0.55, 0.80, 0.62


@lru_cache(maxsize=1024)
def color(kind: str, chunk: int = 0, chunks: int = 1) -> str:
    """`#rrggbb` of an action of `kind` on the `chunk`-th of `chunks` chunks: chunk 0 is the darkest."""
    hue, chroma, offset = kind_of(kind).colour
    base = _ALONE if chunks == 1 else _DARKEST + (_LIGHTEST - _DARKEST) * chunk / (chunks - 1)
    red, green, blue = (round(255 * _gamma(part)) for part in _in_gamut(base + offset, chroma, hue))
    return f"#{red:02x}{green:02x}{blue:02x}"


@lru_cache(maxsize=1024)
def ink_on(background: str) -> str:
    """Black or white, whichever has the higher contrast on `background` (WCAG 2, relative luminance)."""
    red, green, blue = linear(background)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def linear(text: str) -> Rgb:
    """`#rrggbb` as linear light, each part 0..1."""
    red, green, blue = (int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _gamma(part: float) -> float:
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055


def _in_gamut(lightness: float, chroma: float, hue: float) -> Rgb:
    """The most colourful sRGB colour, up to `chroma`, of this lightness and hue; linear light."""
    while True:
        rgb = _from_oklch(lightness, chroma, hue)
        if all(-1e-4 <= part <= 1 + 1e-4 for part in rgb) or chroma <= 0:
            red, green, blue = (min(1.0, max(0.0, part)) for part in rgb)
            return red, green, blue
        chroma -= 0.005


def _from_oklch(lightness: float, chroma: float, hue: float) -> Rgb:
    """OKLCH to linear sRGB (Ottosson, "A perceptual color space for image processing", 2020)."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
