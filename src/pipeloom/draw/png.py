"""SVG to PNG, with resvg (the extra `png`)."""

from __future__ import annotations

from pipeloom.errors import UsageError


def png(svg: str, zoom: float = 2.0) -> bytes:
    """The picture of an SVG document, with `zoom` pixels per pixel of the document; raises UsageError without the extra `png`."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise UsageError(
            'a PNG needs resvg-py, which the core install leaves out: pip install "pipeloom[png]"'
        ) from None
    return bytes(svg_to_bytes(svg_string=svg, zoom=zoom))
