"""SVG to PNG, with resvg (the extra `png`)."""

from __future__ import annotations

import importlib.util

from pipeloom.errors import UsageError


def png(svg: str, zoom: float = 2.0) -> bytes:
    """The picture of an SVG document, with `zoom` pixels per pixel of the document; raises UsageError without the extra `png`."""
    require_png()
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=svg, zoom=zoom))


def require_png() -> None:
    """Raise UsageError without the extra `png`."""
    if importlib.util.find_spec("resvg_py") is None:
        raise UsageError('a PNG needs resvg-py, which the core install leaves out: pip install "pipeloom[png]"')
