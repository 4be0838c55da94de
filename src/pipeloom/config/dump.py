"""The TOML form of a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeloom.config.sections import Config


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return every key of `config` as TOML that `load` reads to an equal one; keys without a value are left out.

    Args:
        origins: "section.key" -> the origin of its value, for a comment at the end of the line.
    """
    lines: list[str] = []
    comments = origins or {}
    for section, table in config.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            origin = comments.get(f"{section}.{key}")
            lines.append(f"{key} = {_value(value)}{_comment(origin)}")
        lines.append("")
    return "\n".join(lines)


def _comment(origin: str | None) -> str:
    if origin is None:
        return ""
    return "  # " + "".join(c if c.isprintable() else "?" for c in origin)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(str(key))} = {_value(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
